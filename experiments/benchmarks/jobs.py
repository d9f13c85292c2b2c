"""Timings of several jobs on one GPU: simulating them, and planning them anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from agents.heuristics.tensile import TENSILE
from simulator.jobs.engine import JobsEngine
from simulator.machine import Machine
from simulator.program import Program


def several(
    programs: Sequence[Program], machine: Machine, part: float, span_ns: int, times: int
) -> dict[str, float]:  # fmt: skip
    """Medians in ms: ``jobs_simulate_ms`` of ``JobsEngine.score`` until ``span_ns`` have passed and the iterations that
    run then are over, with TENSILE's plans; ``jobs_plan_ms`` of making them.

    Args:
        part: the limit, of the sum of the peaks.
        times: that each is timed.

    Raises:
        Infeasible: there are no such plans.
    """
    limit = int(part * sum(program.peak_bytes for program in programs))
    planner = TENSILE()
    plans = planner.plan_jobs(programs, machine, limit)
    engine = JobsEngine(programs, machine, limit, span_ns)
    if not engine.score(plans).feasible:
        raise AssertionError("TENSILE's plans cannot be simulated")
    return {
        "jobs_simulate_ms": _median_ms(lambda: engine.score(plans), times),
        "jobs_plan_ms": _median_ms(lambda: planner.plan_jobs(programs, machine, limit), times),
    }


def _median_ms(work: Callable[[], object], times: int) -> float:
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return round(1e3 * median(spent), 2)
