"""Plans that fit the card, not its tensors alone: PyTorch's allocator has to serve what a plan moves.

A plan leaves holes of other sizes than the step alone does, so that one whose tensors fit may not run. Where the
cheapest is such a one, LP rounding plans in less and less memory until its plan is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from agents.planner import small
from experiments.common import report
from experiments.fit.times import ROOM
from simulator import simulate
from simulator.machine import Machine
from simulator.pool.card import CardPeak, under_plan
from simulator.program import Program

if TYPE_CHECKING:  # Matplotlib takes long to import
    from experiments.fit.answer import Best

PARTS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the limit that the tensors would have
FAMILY = "less fragmented"


def judged(families: Sequence[Best], card: CardPeak | None) -> list[Best]:
    """The families, with what the card counts under the plan of each."""
    if card is None:
        return list(families)
    return [b if b.timeline is None else replace(b, card=under_plan(card, b.timeline)) for b in families]


def wants_less(families: Sequence[Best]) -> bool:
    """Whether the cheapest plan is not served, and those that are cost ROOM more or are none."""
    least = {True: inf, False: inf}
    for b in families:
        if b.timeline is not None:
            least[b.served] = min(least[b.served], b.timeline.overhead)
    return least[False] < least[True] - ROOM


def tightened(task: tuple[Program, Machine, int], card: CardPeak, mode: str, seed: int, seconds: float) -> Best | None:
    """The first plan that the allocator serves, of LP rounding within parts of the limit; None: there is none.

    Args:
        seconds: of all of them.
    """
    from experiments.fit.answer import Best

    program, machine, limit = task
    spent = 0.0
    for part in PARTS:
        planner = report.made("lp_round", seed=seed, mode=mode, seconds=seconds / len(PARTS), min_bytes=small(program))
        row, plan = report.score_with(planner, program, machine, int(part * limit), seed, mode)
        spent += (row["plan_ms"] or 0.0) / 1e3
        if plan is None or not row["feasible"]:
            return None
        timeline = simulate(program, plan, machine, min(limit, plan.limit))
        counted = under_plan(card, timeline)
        if counted[1]:
            return Best(FAMILY, row, plan, timeline, spent, card=counted)
    return None
