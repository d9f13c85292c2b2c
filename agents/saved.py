"""A plan that was saved, as a planner: ``fit(..., planner=saved_plan("runs/plan-mymodel"))`` trains under it.

The step in hand may be captured on another device than the one that was planned, by other kernels. Decisions are then
carried over by the places of kernels and, where these differ, by tensors and the order of their accesses
(simulator/plan_transfer.py); whether what comes of it fits is simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agents.planner import Infeasible
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.plan_transfer import adapted
from simulator.program import Program


def saved_plan(run: str | Path) -> Callable[[Program, Machine, int], Plan]:
    """What makes the plan of a run directory (plan.json, and program.json that it was made for) one for another capture
    of the step; it raises Infeasible where that does not fit.

    Raises:
        FormatError: a file is missing or malformed.
    """
    plan, planned = Plan.load(Path(run) / "plan.json"), Program.load(Path(run) / "program.json")

    def carried_over(program: Program, machine: Machine, limit: int) -> Plan:
        found = adapted(plan, planned, program)
        score = Engine(program, machine, limit).score(rows_of(found.decisions))
        if not score.feasible:
            raise Infeasible(
                f"the plan of {run} needs {score.required_bytes:,} bytes here, of {limit:,}: "
                f"{len(found.decisions)} of its {len(plan.decisions)} decisions have a place in this capture, whose "
                "kernels are others; leave out planner=, and the step is planned here"
            )
        return found

    return carried_over
