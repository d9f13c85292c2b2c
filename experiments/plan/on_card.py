"""Plans that fit the card, not its tensors alone: PyTorch's allocator has to serve what a plan moves.

A plan leaves holes of other sizes than the step alone does, so that one whose tensors fit may not run. Where the
cheapest is such a one, `best` plans in less and less memory until its plan is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from experiments.plan.times import ROOM
from simulator.pool.card import CardPeak, under_plan

if TYPE_CHECKING:  # Matplotlib takes long to import
    from experiments.plan.summary import Best

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
