"""Timings of several jobs on one GPU: simulating them, and planning them anew."""

from __future__ import annotations

from collections.abc import Sequence

from agents.heuristics.tensile import TENSILE
from experiments.benchmarks.simulation import median_s
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
        "jobs_simulate_ms": round(1e3 * median_s(lambda: engine.score(plans), times), 2),
        "jobs_plan_ms": round(1e3 * median_s(lambda: planner.plan_jobs(programs, machine, limit), times), 2),
    }
