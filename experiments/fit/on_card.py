"""Plans that fit the card, not its tensors alone: PyTorch's allocator has to serve what a plan moves.

A plan leaves holes of other sizes than the step alone does, so that one whose tensors fit may not run. Where no family
has one that does, annealing plans in less and less memory until its plan is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agents.planner import small
from experiments.common import report
from simulator import simulate
from simulator.machine import Machine
from simulator.pool.card import CardPeak, under_plan
from simulator.program import Program

if TYPE_CHECKING:  # Matplotlib takes long to import
    from experiments.fit.answer import Best

PARTS = (0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the limit that the tensors would have
FAMILY = "less fragmented"


def judged(families: Sequence[Best], card: CardPeak | None) -> list[Best]:
    """The families, with what the card counts under the plan of each."""
    if card is None:
        return list(families)
    return [b if b.timeline is None else replace(b, card=under_plan(card, b.timeline)) for b in families]


def tightened(task: tuple[Program, Machine, int], card: CardPeak, mode: str, seed: int, seconds: float) -> Best | None:
    """The first plan that the allocator serves, of annealing within parts of the limit; None: there is none.

    Args:
        seconds: of all of them.
    """
    from experiments.fit.answer import Best

    program, machine, limit = task
    spent = 0.0
    for part in PARTS:
        planner = report.made("annealing", seed=seed, mode=mode, seconds=seconds / len(PARTS), min_bytes=small(program))
        row, plan = report.score_with(planner, program, machine, int(part * limit), seed, mode)
        spent += (row["plan_ms"] or 0.0) / 1e3
        if plan is None or not row["feasible"]:
            return None
        timeline = simulate(program, plan, machine, min(limit, plan.limit))
        counted = under_plan(card, timeline)
        if counted[1]:
            return Best(FAMILY, row, plan, timeline, spent, card=counted)
    return None
