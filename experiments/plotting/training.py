"""What a training leaves in its run directory: the best plan, its timeline, pictures and rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import simulator
from experiments.common import report
from experiments.plotting import plots
from simulator.files import write_json
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


def write_training(
    out: Path,
    program: Program,
    machine: Machine,
    plan: Plan,
    planner: str,
    history: Sequence[Any],
    rows: list[report.Row],
    edits: tuple[Sequence[Any], Sequence[Any]] | None = None,
) -> None:
    """Writes what a training leaves in its run directory besides its summary: the best plan, its timeline, pictures and
    rows.

    Args:
        history: episodes, as ``plots.learning_curve``.
        rows: certified, the trained planner's among them.
        edits: of the DQN, iterations and points of ``plots.edit_learning``, in the place of ``history``.
    """
    before = simulator.simulate(program, Plan(), machine, program.peak_bytes)
    after = simulator.simulate(program, plan, machine, plan.limit)
    plan.save(out / "plan.json")
    write_json(out / "timeline.json", after.perfetto(program))
    plots.memory_curve(out / "memory_curve.png", before, after, machine.name, planner)
    title = f"{program.name} on {machine.name}, limit {plan.limit / program.peak_bytes:.0%} of the peak: training"
    if edits is not None:
        plots.edit_learning(out / "learning_curve.png", *edits, rows, title)
    else:
        plots.learning_curve(out / "learning_curve.png", history, report.contenders(rows), planner, title)
    report.write_rows(out / "results.jsonl", rows)
