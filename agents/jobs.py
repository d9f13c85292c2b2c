"""Plans for several jobs that share one GPU: the work that they are measured by, and memory split between them.

The measure is the **makespan** of a fixed amount of work: every job arrives at 0 and runs as many iterations as take it
about as long, alone, as the others (``shares_of_work``).

A planner of several jobs has ``plan_jobs``: TENSILE (heuristics/tensile/), and ``Split`` here.
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

ROUNDS = 6  # iterations of the job whose iteration takes longest


class JobsPlanner(Protocol):
    """Plans several programs on one machine under one limit.

    Attributes:
        name: for people and results.
        simulator_calls: simulator calls that the last ``plan_jobs`` made, of one program or of all together.
    """

    name: str
    simulator_calls: int

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """A plan of each program, which together fit ``limit`` (bytes); raises Infeasible where it has none."""
        ...


def shares_of_work(programs: Sequence[Program], rounds: int = ROUNDS) -> tuple[int, ...]:
    """Iterations of each job: ``rounds`` of the longest one, and of the others as many as take about as long."""
    longest = max(program.ideal_ns for program in programs)
    return tuple(max(1, round(rounds * longest / max(program.ideal_ns, 1))) for program in programs)


def jobs_of(programs: Sequence[Program], plans: Sequence[Plan | None], rounds: int = ROUNDS) -> tuple[Job, ...]:
    """The jobs of the measure, each within its plan's limit; None: the empty plan."""
    work = shares_of_work(programs, rounds)
    known = [plan or Plan((), program.fingerprint, "none") for program, plan in zip(programs, plans, strict=True)]
    return tuple(
        Job(f"{i}: {program.name}", program, plan, iterations=count, within=True)
        for i, (program, plan, count) in enumerate(zip(programs, known, work, strict=True))
    )


class Split:
    """Each job by a planner of its own, in a part of the memory in proportion to its peak.

    Args:
        planner: a key of ``agents.PLANNERS``; options are its options.
    """

    def __init__(self, planner: str, **options: object) -> None:
        self.name, self.simulator_calls = planner, 0
        self._make: Callable[[], Planner] = lambda: agents.make(planner, **options)

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """Plans each job for its part; raises Infeasible where a part is too small."""
        peaks = [program.peak_bytes for program in programs]
        parts = [min(peak, limit * peak // sum(peaks)) for peak in peaks]
        planner, plans, calls = self._make(), [], 0
        for program, part in zip(programs, parts, strict=True):
            plans.append(planner.plan(program, machine, part))
            calls += planner.simulator_calls
        self.simulator_calls = calls
        return tuple(plans)
