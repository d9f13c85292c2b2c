"""Plans for several jobs that share one GPU: the workload of the benchmark, and a static split of memory.

The metric is the **makespan** of a fixed amount of work: all jobs arrive at time 0, and the number of
iterations of each job gives all jobs about the same run time when run alone (``jobs_of``).

Multi-job planners implement ``plan_jobs``: TENSILE (heuristics/tensile/) and ``Split`` (here).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import agents
from agents.planner import Planner
from simulator.job import Job
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


class JobsPlanner(Protocol):
    """Plans several programs on one machine under one limit.

    Attributes:
        name: label in tables and results.
        simulator_calls: simulator calls that the last ``plan_jobs`` made, single-job and multi-job ones.
    """

    name: str
    simulator_calls: int

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """Returns one plan per program that together fit ``limit`` (bytes); raises Infeasible if it finds none.

        Args:
            programs: The jobs.
            machine: Machine that they share.
            limit: Memory limit in bytes for all jobs.
        """
        ...


def jobs_of(programs: Sequence[Program], plans: Sequence[Plan | None]) -> tuple[Job, ...]:
    """Returns the benchmark's jobs, each limited by its plan; None stands for the empty plan.

    The job with the longest iteration has six of them, and the others take about the same time.
    """
    longest_ns = max(program.ideal_ns for program in programs)
    jobs = []
    for i, (program, plan) in enumerate(zip(programs, plans, strict=True)):
        count = max(1, round(6 * longest_ns / max(program.ideal_ns, 1)))
        plan = plan or Plan((), program.fingerprint, "none")
        jobs.append(Job(f"{i}: {program.name}", program, plan, iterations=count, within_limit=True))
    return tuple(jobs)


class Split:
    """Static split: plans each job separately, with memory in proportion to its peak.

    Args:
        planner: a key of ``agents.PLANNERS``; ``options`` are passed to it.
    """

    def __init__(self, planner: str, **options: object) -> None:
        self.name = planner
        self.simulator_calls = 0
        self._make: Callable[[], Planner] = lambda: agents.make(planner, **options)

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """Plans each job within its share of ``limit`` (bytes); raises Infeasible if a share is too small."""
        peaks = [program.peak_bytes for program in programs]
        shares = [min(peak, limit * peak // sum(peaks)) for peak in peaks]
        planner = self._make()
        plans = []
        calls = 0
        for program, share in zip(programs, shares, strict=True):
            plans.append(planner.plan(program, machine, share))
            calls += planner.simulator_calls
        self.simulator_calls = calls
        return tuple(plans)
