"""Output files of a training: the best plan, its timeline, pictures and rows."""

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
    """Writes the best plan of a training, its timeline, pictures and rows to the run directory.

    Args:
        history: Episodes, as for ``plots.learning_curve``.
        rows: Certified results, including the trained planner's.
        edits: Iterations and points for ``plots.edit_learning``, which replace ``history`` for the DQN over edits.
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
