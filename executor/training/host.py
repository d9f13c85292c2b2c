"""A planned step's pinned memory: a place for each tensor that the plan swaps, and the copies that undo a step.

A step has it from its first move until ``PlannedStep.finish``, which leaves nothing in it. Then whoever asks gets it
(executor/memory/pinned.py), and the step asks again when it runs the next time.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from executor.training.bindings import Binding, StepError
from executor.training.engines import ALIGNMENT, Engines, TransferError, engines_for
from executor.training.storage import Blocks, as_tensor


class HostMemory:
    """Taken and given back as a whole.

    Args:
        places: tensor -> its offset; tensors may share memory.
        device: what is copied to and from.

    Attributes:
        kept: copies of what a step overwrites, on the device, and whose they are.
        rest: what has its copy here.
        undo: of each device and type: all copies, and whose they are; while it is ``taken``.
    """

    def __init__(self, blocks: Blocks, places: dict[int, int], device: torch.device) -> None:
        self._blocks, self._places, self._device = blocks, places, device
        self.kept: list[tuple[Tensor, Binding]] = []
        self.rest: list[Binding] = []
        self.undo: list[tuple[list[Tensor], list[Binding]]] = []
        self.taken = False

    def take(self) -> None:
        """Raises StepError where the host has not so much; nothing is taken then."""
        engines, blocks, rest = self._blocks.engines, self._blocks.blocks, self.rest
        what = "the plan cannot be run"
        try:
            places = slab(engines, {t: b.nbytes for t, b in blocks.items()}, self._places) if engines else {}
            what = "there is no memory to undo a step"
            sizes = {i: b.own.untyped_storage().nbytes() for i, b in enumerate(rest)}
            copies = slab(engines or engines_for(self._device), sizes) if rest else {}
        except TransferError as error:
            raise StepError(f"{what}: {error}") from error
        for t, place in places.items():
            blocks[t].host = place
        groups: dict[Any, list[tuple[Tensor, Binding]]] = {}
        for copy, b in (*self.kept, *((as_tensor(copies[i], b.own), b) for i, b in enumerate(rest))):
            groups.setdefault((copy.device, copy.dtype), []).append((copy, b))
        self.undo = [([copy for copy, _ in group], [b for _, b in group]) for group in groups.values()]
        self.taken = True

    def give(self) -> None:
        """Nothing is in it, and no copy to or from it will be asked for before ``take``."""
        for block in self._blocks.blocks.values():
            block.host = None
        self.undo, self.taken = [], False


def slab(engines: Engines, sizes: dict[int, int], offsets: dict[int, int] | None = None) -> dict[int, Tensor]:
    """One piece of pinned memory, cut: a place for each tensor, with a storage of its own (it is all that is saved when
    a tensor that shows it is saved). Without ``offsets`` one after the other; with them, some may share memory."""
    if offsets is None:
        ends = accumulate(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes.values())
        offsets = dict(zip(sizes, (0, *ends), strict=False))
    end = max(-(-(offsets[t] + sizes[t]) // ALIGNMENT) * ALIGNMENT for t in sizes)
    memory = engines.pinned(end)  # a tensor made from it keeps the array, and so the memory
    return {t: torch.frombuffer(memory, dtype=torch.uint8, count=sizes[t], offset=at) for t, at in offsets.items()}
