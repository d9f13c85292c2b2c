"""Simulator of GPU memory: programs, machines, plans, and `simulate`, which executes a program under a plan."""

from simulator.compiled.engine import Engine, simulate
from simulator.files import FormatError
from simulator.job import Job, JobsDeadlock, JobsTimeline
from simulator.machine import Machine
from simulator.plan import Decision, Plan, PlanError, Recompute, Rerun, Swap
from simulator.program import Gap, Kernel, Program, Tensor
from simulator.rules import simulate_jobs
from simulator.schedule import OutOfMemory
from simulator.siblings import warn_if_hidden
from simulator.timeline import Timeline

warn_if_hidden()

__all__ = [
    "Decision",
    "Engine",
    "FormatError",
    "Gap",
    "Job",
    "JobsDeadlock",
    "JobsTimeline",
    "Kernel",
    "Machine",
    "OutOfMemory",
    "Plan",
    "PlanError",
    "Program",
    "Recompute",
    "Rerun",
    "Swap",
    "Tensor",
    "Timeline",
    "simulate",
    "simulate_jobs",
]
