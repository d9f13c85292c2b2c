"""What plans cost under measured times, beside what they were said to cost.

For each limit and each belief about the times (``BELIEFS``) plans are made as ``experiments.plan`` makes them, by
searches of so many simulator calls, so that nothing depends on the clock; the recommended one is then simulated under
the measured times. Beside it stand the plan made for the measured times by the same searches, and the floor under all.

- ``model``: the model of kernel times, planned for with its error (agents/search/other_times.py);
- ``model, believed exact``: the control, the same without the error: the cheapest plan as said;
- ``roofline``: one roofline in float32, as before there was a model (steps.py, the control).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import agents
from agents.floor import UNPROVEN, floor
from agents.planner import small
from agents.search.other_times import ForFaster, OtherTimes, Spread, TimesError
from executor.capture.durations import with_roofline
from experiments.common import report
from experiments.measured import steps
from experiments.plan import times
from experiments.plan.answer import Best
from simulator import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

LIMITS = (0.7, 0.5, 0.4)  # of the peak
CALLS = 5_000  # of each search
SEARCHES = ("tensile", "annealing", "policy_search")  # lp_round takes longest, and found nothing cheaper
MODEL, EXACT, ROOFLINE = "model", "model, believed exact", "roofline"
BELIEFS = (MODEL, EXACT, ROOFLINE)

Row = dict[str, Any]


def rows(
    limits: Sequence[float] = LIMITS, calls: int = CALLS, seed: int = 0, searches: Sequence[str] = SEARCHES
) -> list[Row]:
    """``compared`` for the trace of ResNet-50 on an H100."""
    trace = steps.Trace.load(steps.DATA / f"{steps.RESNET50}.csv")
    captured = trace.captured()
    measured = steps.with_trace_times(captured, trace.operators)
    return compared(captured.program, measured, Machine.load(trace.machine), limits, calls, seed, searches)


def compared(
    modelled: Program, measured: Program, machine: Machine, limits: Sequence[float] = LIMITS, calls: int = CALLS,
    seed: int = 0, searches: Sequence[str] = SEARCHES,
) -> list[Row]:  # fmt: skip
    """A row for each limit and belief.

    Args:
        modelled, measured: one program with two kinds of times.
        limits: fractions of its peak.
        calls: simulator calls of each search that counts them.
        searches: names of planners; the plans for faster kernels begin from theirs.

    Returns:
        ``limit_fraction``, ``limit_bytes``, ``times`` (of BELIEFS), ``planner`` and the overheads, of the ideal time
        under the times in question: ``said``, ``low`` and ``high`` (within the error; None where none is believed),
        ``measured`` (the plan's under the measured times), ``own`` (of the plan made for these), ``floor`` (no plan has
        less under these).

    Raises:
        Infeasible: no search has a plan.
        PlanError: the programs differ in more than times.
        ValueError: the machine has no model of kernel times.
    """
    if machine.kernel_times is None:
        raise ValueError(f"machine: {machine.name} has no model of kernel times")
    error = TimesError(machine.kernel_times.error, machine.kernel_times.step_error)
    before = with_roofline(modelled, steps.one_roofline(machine))
    believed: Mapping[str, tuple[Program, TimesError | None]] = {
        MODEL: (modelled, error), EXACT: (modelled, None), ROOFLINE: (before, None),
    }  # fmt: skip
    found = []
    for limit in limits:
        task = (machine, int(limit * modelled.peak_bytes))
        own, _ = planned(measured, *task, calls, seed, None, searches)
        bound = floor(measured, *task, families=UNPROVEN)
        for name, (program, expected) in believed.items():
            plan, spread = planned(program, *task, calls, seed, expected, searches)
            found.append({
                "limit_fraction": limit, "limit_bytes": task[1], "times": name, "planner": plan.planner,
                "said": simulate(program, plan, *task).overhead,
                "low": None if spread is None else spread.least, "high": None if spread is None else spread.most,
                "measured": simulate(measured, plan.retimed(measured), *task).overhead,
                "own": simulate(measured, own, *task).overhead, "floor": bound.overhead,
            })  # fmt: skip
    return found


def planned(
    program: Program, machine: Machine, limit: int, calls: int, seed: int, error: TimesError | None,
    searches: Sequence[str] = SEARCHES,
) -> tuple[Plan, Spread | None]:  # fmt: skip
    """The plan that is recommended, and its spread (agents/search/other_times.py) where the times have an error.

    Args:
        limit: bytes.

    Raises:
        Infeasible: no search has a plan.
    """
    task = (program, machine, limit)
    planners: list[agents.Planner] = [
        report.made(name, mode="joint", calls=calls, seed=seed, min_bytes=small(program)) for name in searches
    ]
    found = [_best(planner, task, seed) for planner in planners]
    if error is not None:
        starts = [best.plan for best in found if best.plan is not None]
        found.append(_best(ForFaster(starts, error, calls, min_bytes=small(program), seed=seed), task, seed))
    others = None if error is None else OtherTimes(*task, error, seed=seed)
    best = times.recommended(found, others)
    if best is None or best.plan is None:
        raise agents.Infeasible(f"{program.name!r} has no plan within {limit:,} bytes")
    return best.plan, None if others is None else others.spread(best.plan)


def _best(planner: agents.Planner, task: tuple[Program, Machine, int], seed: int) -> Best:
    return Best(planner.name, *report.score_with(planner, *task, seed), 0.0)
