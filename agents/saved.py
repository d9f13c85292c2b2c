"""Saved plans as planners: ``fit(..., planner=saved_plan("runs/plan-mymodel"))`` trains under a stored plan.

The current step may have been captured on a different device, with different kernels. Decisions are then mapped by
kernel position and, where positions differ, by tensor and access order (simulator/plan_transfer.py). The simulator
checks whether the resulting plan fits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agents.planner import Infeasible
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.plan_transfer import transfer_plan
from simulator.program import Program


def saved_plan(run: str | Path) -> Callable[[Program, Machine, int], Plan]:
    """Returns a planner that adapts the plan of a run directory to another capture of the step.

    The planner raises Infeasible if the adapted plan does not fit.

    Args:
        run: directory with plan.json and the program.json that it was made for.

    Raises:
        FormatError: a file is missing or malformed.
    """
    plan = Plan.load(Path(run) / "plan.json")
    planned_program = Program.load(Path(run) / "program.json")

    def adapt_plan(program: Program, machine: Machine, limit: int) -> Plan:
        mapped = transfer_plan(plan, planned_program, program)
        score = Engine(program, machine, limit).score(rows_of(mapped.decisions))
        if not score.feasible:
            raise Infeasible(
                f"the plan of {run} needs {score.required_bytes:,} bytes for this capture, and the limit is {limit:,}: "
                f"{len(mapped.decisions)} of its {len(plan.decisions)} decisions could be mapped, because the "
                "kernels differ; omit planner= to plan this step from scratch"
            )
        return mapped

    return adapt_plan
