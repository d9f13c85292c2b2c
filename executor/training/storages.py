"""Where the memory of what a plan swaps comes from: PyTorch's allocator; an arena (arena.py) takes its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from executor.training.storage import Block


class Storages:
    """Memory of blocks by PyTorch's allocator: a storage loses it and gets other."""

    def hold(self, block: Block, tensor: Tensor) -> int:
        """The block is this tensor's storage; its bytes."""
        block.on(tensor)
        return tensor.untyped_storage().nbytes()

    def take(self, block: Block) -> None:
        block.storage.resize_(block.nbytes)  # type: ignore[union-attr]

    def give(self, block: Block) -> None:
        block.storage.resize_(0)  # type: ignore[union-attr]
