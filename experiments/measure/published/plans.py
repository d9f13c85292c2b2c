"""Compares the predicted overhead of plans with their overhead under measured kernel times.

For each limit and each assumption about the times, plans are made as by ``experiments.plan``, with a fixed number of
simulator calls. The recommended plan is simulated under the measured times and compared with the plan that the same
searches find for the measured times, and with the certified lower bound. The assumptions (``times`` of a row) are:

- ``model``: the kernel-time model with its error (agents/search/retimed.py);
- ``model, believed exact``: control, the model without its error;
- ``roofline``: control, a single float32 roofline (steps.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import agents
from agents.floor import UNPROVEN, floor
from agents.planner import small
from agents.search.retimed import ForFaster, Retimed, Spread, TimesError
from executor.capture.durations import with_roofline
from experiments.common import report
from experiments.measure.published import steps
from experiments.plan import times
from experiments.plan.answer import Best
from simulator import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

Row = dict[str, Any]


def rows(
    limits: Sequence[float] = (0.7, 0.5, 0.4),
    calls: int = 5_000,
    searches: Sequence[str] = ("tensile", "annealing", "policy_search"),
) -> list[Row]:
    """Returns the rows of ``compared`` for the trace of ResNet-50 on an H100.

    ``lp_round`` is not among the searches: it is the slowest, and it found no cheaper plan.
    """
    trace = steps.Trace.load(steps.DATA / "h100_resnet50.csv")
    captured = trace.captured()
    measured = steps.with_trace_times(captured, trace.operators)
    return compared(captured.program, measured, Machine.load(trace.machine), limits, calls, searches)


def compared(
    modeled: Program, measured: Program, machine: Machine, limits: Sequence[float], calls: int, searches: Sequence[str]
) -> list[Row]:
    """Compares predicted and measured overheads for each limit and each assumption about the times.

    Args:
        modeled, measured: the same program with modeled and with measured durations.
        machine: machine with a kernel-time model.
        limits: fractions of the program's peak.
        calls: simulator calls of each search that counts them.
        searches: names of planners; the search for faster kernels starts from their plans.

    Returns:
        Rows with ``limit_fraction``, ``limit_bytes``, ``times`` (the assumption), ``planner``, and overheads relative
        to the ideal time under the same durations: ``said`` (predicted), ``low`` and ``high`` (range within the error;
        None without an error), ``measured`` (under measured times), ``own`` (of the plan made for measured times) and
        ``floor`` (certified lower bound under measured times).

    Raises:
        Infeasible: if no search finds a plan.
        PlanError: if the programs differ in more than durations.
    """
    assert machine.kernel_times is not None
    error = TimesError(machine.kernel_times.error, machine.kernel_times.step_error)
    simplified = with_roofline(modeled, steps.one_roofline(machine))
    believed: Mapping[str, tuple[Program, TimesError | None]] = {
        "model": (modeled, error),
        "model, believed exact": (modeled, None),
        "roofline": (simplified, None),
    }
    found = []
    for limit in limits:
        task = (machine, int(limit * modeled.peak_bytes))
        measured_plan, _ = planned(measured, *task, calls, None, searches)
        bound = floor(measured, *task, families=UNPROVEN)
        for name, (program, expected) in believed.items():
            plan, spread = planned(program, *task, calls, expected, searches)
            found.append(
                {
                    "limit_fraction": limit,
                    "limit_bytes": task[1],
                    "times": name,
                    "planner": plan.planner,
                    "said": simulate(program, plan, *task).overhead,
                    "low": None if spread is None else spread.least,
                    "high": None if spread is None else spread.most,
                    "measured": simulate(measured, plan.retimed(measured), *task).overhead,
                    "own": simulate(measured, measured_plan, *task).overhead,
                    "floor": bound.overhead,
                }
            )
    return found


def planned(
    program: Program, machine: Machine, limit: int, calls: int, error: TimesError | None, searches: Sequence[str]
) -> tuple[Plan, Spread | None]:
    """Returns the recommended plan and, if ``error`` is given, its spread (agents/search/retimed.py).

    Args:
        program: program to plan.
        machine: machine to plan for.
        limit: memory limit in bytes.
        calls: simulator calls of each search.
        error: error of the program's durations.
        searches: names of the planners to choose from.

    Raises:
        Infeasible: if no search finds a plan.
    """
    task = (program, machine, limit)
    options: dict[str, Any] = {"calls": calls, "seed": 0, "min_bytes": small(program)}
    found = [_best(report.make(name, mode="joint", **options), task) for name in searches]
    if error is not None:
        starts = [best.plan for best in found if best.plan is not None]
        found.append(_best(ForFaster(starts, error, **options), task))
    retimed = None if error is None else Retimed(*task, error, seed=0)
    best = times.recommended(found, retimed)
    if best is None or best.plan is None:
        raise agents.Infeasible(f"no planner found a plan of {program.name!r} within {limit:,} bytes; raise the limit")
    return best.plan, None if retimed is None else retimed.spread(best.plan)


def _best(planner: agents.Planner, task: tuple[Program, Machine, int]) -> Best:
    return Best(planner.name, *report.score_with(planner, *task, 0), 0.0)
