"""An optimizer's step that is left out because a GradScaler has found gradients that are not finite.

The plan is for the normal step, and its moves are made in any case. Of the kernels that are left out those run that
write no persistent tensor, because a plan may move what they make; the others write nothing. So the state is to the bit
as before, and what comes after (the scaler's update) goes on.
"""

from __future__ import annotations

from typing import Any

from executor.training.storage import Blocks


class Skipping:
    """The other work of the items that may be left out.

    Attributes:
        work: the step's, whose entries are exchanged until the step ends.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.work: list[tuple[Any, ...]] = []
        self._others: dict[int, tuple[Any, ...]] = {}
        self._normal: dict[int, tuple[Any, ...]] = {}

    def add(self, item: int, calls: tuple[Any, ...]) -> None:
        """The calls of an item where the update is left out."""
        self._others[item] = calls

    def ask(self, slot: int) -> None:
        """Before the update: is it left out? ``slot``: of the number that says so."""
        if self._blocks.values[slot]:
            for item, calls in self._others.items():
                before, charged, normal, *rest = self.work[item]
                self._normal[item] = normal
                self.work[item] = (before, charged, calls, *rest)

    def end(self) -> None:
        """The step is over."""
        for item, calls in self._normal.items():
            before, charged, _, *rest = self.work[item]
            self.work[item] = (before, charged, calls, *rest)
        self._normal.clear()
