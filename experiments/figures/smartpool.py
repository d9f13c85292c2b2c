"""What several figures of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020) need.

Our loads are lower than the paper's, because SINGA keeps things that never leave (smartpool_table1.py). A limit of the
paper is therefore taken over as the bytes that must leave: its load of Table I less the limit.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

import agents
from experiments import figures
from experiments.common import cli
from experiments.figures.smartpool_table1 import PAPER
from simulator import Machine, Program, Timeline, simulate
from simulator.timeline import Span

MB = 2**20  # as in Table I
ZERO = 0.0005  # an overhead up to this is 0.0 %


def limits_of(settings: DictConfig, network: Any) -> list[float]:
    """The limits of the YAML in MB, in the paper's terms; raises UsageError for what is none of this network."""
    if network not in PAPER:
        raise cli.UsageError(f"figure.network: {network!r} is not in Table I ({', '.join(PAPER)})")
    most = PAPER[network]["load"]
    wanted = f"MB above 0, at most {network}'s {most:g}"
    return figures.numbers(settings, "limits", lambda value: 0 < value <= most, wanted)


def our_limit(program: Program, network: str, paper_mb: float) -> int:
    """The limit in bytes at which as much must be swapped out as at the paper's limit in MB.

    Raises:
        ValueError: the paper's limit is above its load.
    """
    load = PAPER[network]["load"]
    if paper_mb > load:
        raise ValueError(f"{network}: the paper's load is {load} MB, below a limit of {paper_mb:g} MB")
    return program.peak_bytes - round((load - paper_mb) * MB)


def planned(planner: agents.Planner, program: Program, machine: Machine, limit: int) -> Timeline:
    """The run of a planner's plan under its limit, which the simulator enforces; raises Infeasible without one."""
    plan = planner.plan(program, machine, limit)
    return simulate(program, plan, machine, min(limit, plan.limit))


def last_kernels(timeline: Timeline, program: Program) -> list[Span]:
    """The kernels of the last iteration of a plan without recomputation, in program order."""
    begin = timeline.last_start_ns
    return [s for s in timeline.spans if s.kind == "kernel" and s.start_ns >= begin][: len(program.kernels)]


def waits(timeline: Timeline, program: Program) -> list[int]:
    """ns that the compute stream waits before each kernel in the last iteration of a plan without recomputation."""
    kernels = last_kernels(timeline, program)
    free = [timeline.last_start_ns, *(s.end_ns for s in kernels)]
    return [s.start_ns - ready for s, ready in zip(kernels, free, strict=False)]
