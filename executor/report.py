"""One-page report of a captured step: memory peak, moved tensors, recomputed kernels and their cost.

print(report(captured, machine, limit, plan))
"""

from __future__ import annotations

from executor.capture.captured import Captured
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.packed import packed_bytes
from simulator.program import Program
from simulator.report import Report, report as reported

__all__ = ["Report", "report"]


def report(
    source: Captured | Program,
    machine: Machine,
    limit: int,
    plan: Plan | None = None,
    floor_ns: int | None = None,
    issued: str = "",
) -> Report:
    """Returns the report of ``plan`` on a step, or of the unplanned step.

    Args:
        source: the step, captured or as a program.
        machine: machine to simulate.
        limit: memory limit in bytes.
        plan: plan for the step; None: the step runs without a plan.
        floor_ns: as in ``agents.floor.floor``.
        issued: how the step runs; "" if it is not executed.

    Raises:
        PlanError: the plan is for another program.
        OutOfMemory: the plan is infeasible at the limit.
    """
    program = source if isinstance(source, Program) else source.program
    alone = simulate(program, Plan(), machine, program.peak_bytes)
    decided = plan is not None and bool(plan.decisions or plan.variants)
    under = simulate(program, plan, machine, limit) if plan is not None and decided else None
    origins = source.origins if isinstance(source, Captured) else None
    packed = packed_bytes(under or alone, limit, machine.alignment)
    return reported(program, machine, limit, packed, alone, under, plan, floor_ns, origins, issued)
