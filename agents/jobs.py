"""Plans for several jobs that share one GPU: what they are measured by, the floor under it, memory split between them.

The measure is the **makespan** of a fixed amount of work: every job comes at 0 and runs as many iterations as take it
about as long, alone, as the others (``shares_of_work``). Its overhead is over the makespan with unlimited memory and no
plans, so that what the jobs cost each other by sharing the kernels' time is in both.

A planner of several jobs has ``plan_jobs``: TENSILE (heuristics/tensile/), ``Split`` and ``SearchedSplit`` here, and
``JointAnnealing`` (search/joint_annealing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, Protocol

import agents
from agents.floor import floor
from agents.planner import Infeasible, Planner
from simulator.compiled.engine import simulate
from simulator.job import Sharing
from simulator.jobs import Job, JobsEngine, simulate_jobs, without_limit
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


def makespan_ns(
    programs: Sequence[Program], plans: Sequence[Plan], machine: Machine, limit: int, sharing: Sharing = "fifo",
    rounds: int = ROUNDS,
) -> int:  # fmt: skip
    """When the last job has done its work; raises as ``simulate_jobs``."""
    return simulate_jobs(jobs_of(programs, plans, rounds), machine, limit, sharing=sharing).end_ns


def engine_of(programs: Sequence[Program], machine: Machine, limit: int, rounds: int = ROUNDS) -> JobsEngine:
    """What scores plans by this measure, many of them: each job within its plan's limit."""
    return JobsEngine(programs, machine, limit, iterations=shares_of_work(programs, rounds), within=True)


def unlimited_ns(
    programs: Sequence[Program], machine: Machine, sharing: Sharing = "fifo", rounds: int = ROUNDS
) -> int:  # fmt: skip
    """The makespan with memory for everything and no plans."""
    return without_limit(jobs_of(programs, [None] * len(programs), rounds), machine, sharing=sharing).end_ns


def floor_ns(programs: Sequence[Program], machine: Machine, limit: int, rounds: int = ROUNDS) -> int:
    """No plans have a shorter makespan (either way of sharing, with ``Machine.concurrency`` of 1).

    The kernels' own time, all of it; and for each job, that it takes alone in the whole memory: what the linear program
    proves of a steady iteration holds of the mean of all iterations but one, whose transfers may be before the start
    and after the end.
    """
    work = shares_of_work(programs, rounds)
    busy = sum(count * program.ideal_ns for count, program in zip(work, programs, strict=True))
    alone = [
        program.ideal_ns + int((count - 1) * program.ideal_ns * (1 + floor(program, machine, limit).overhead))
        for count, program in zip(work, programs, strict=True)
    ]
    return max(busy, *alone)


def with_parts(plans: Sequence[Plan], needs: Sequence[int], limit: int) -> tuple[Plan, ...]:
    """The plans, each with its part as its limit (``parts_of``)."""
    return tuple(replace(plan, limit=part) for plan, part in zip(plans, parts_of(needs, limit), strict=True))


def parts_of(needs: Sequence[int], limit: int) -> list[int]:
    """The bytes that each plan needs and an equal part of what none needs."""
    spare = (limit - sum(needs)) // len(needs)
    return [need + spare for need in needs]


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


class SearchedSplit(Split):
    """The same, the memory split in the best of many ways.

    Every job is planned for ``parts`` limits between its smallest and its peak, and for its part in proportion to its
    peak. The split in proportion to peaks and, of all combinations that fit together, the ``tried`` with the least sum
    of the iterations' overheads are simulated, and that of least makespan is taken. Every job keeps within what its
    plan needs and an equal part of what is left over.
    """

    def __init__(self, planner: str, parts: int = 7, tried: int = 12, **options: object) -> None:
        if parts < 2 or tried < 1:
            raise ValueError(f"parts, tried: expected at least 2 and 1, got {parts} and {tried}")
        super().__init__(planner, **options)
        self.name, self.parts, self.tried = f"{planner}, split searched", parts, tried

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """The best combination; raises Infeasible where none fits."""
        known: dict[str, list[_Entry]] = {}
        self.simulator_calls = 0
        peak = sum(program.peak_bytes for program in programs)
        for program in programs:
            if program.fingerprint not in known:
                even = min(limit * program.peak_bytes // peak, program.peak_bytes)
                known[program.fingerprint] = self._menu(program, machine, even, min(limit, program.peak_bytes))
        menus = [known[program.fingerprint] for program in programs]
        found = [chosen for chosen in product(*menus) if sum(one.needs for one in chosen) <= limit]
        if not found:
            raise Infeasible(f"{self.name}: no split of {limit:,} bytes gives every job a plan")
        # The even split first, where it is there.
        found.sort(key=lambda chosen: (not all(one.even for one in chosen), sum(one.overhead for one in chosen)))
        engine, best = engine_of(programs, machine, limit), []
        for i, chosen in enumerate(found[: self.tried + 1]):
            plans = with_parts([one.plan for one in chosen], [one.needs for one in chosen], limit)
            score = engine.score(plans)
            if score.feasible:
                best.append((score.makespan_ns, i, plans))
        self.simulator_calls += engine.calls
        if not best:
            raise Infeasible(f"{self.name}: no split that was tried can run")
        return min(best, key=lambda entry: entry[:2])[2]

    def _menu(self, program: Program, machine: Machine, even: int, top: int) -> list[_Entry]:
        """Plans of one program, for an even part and for limits down from the top to the smallest that has a plan."""
        planner, found = self._make(), []
        for part in (even, *(int(top * (1 - i / self.parts)) for i in range(self.parts))):
            try:
                plan = planner.plan(program, machine, part)
            except Infeasible:
                self.simulator_calls += planner.simulator_calls
                continue
            self.simulator_calls += planner.simulator_calls + 1
            timeline = simulate(program, plan, machine, part)
            found.append(_Entry(timeline.required_bytes, timeline.overhead, plan, part == even))
        return found


class _Entry(NamedTuple):
    """A plan of one job."""

    needs: int  # bytes
    overhead: float
    plan: Plan
    even: bool  # made for its part in proportion to peaks
