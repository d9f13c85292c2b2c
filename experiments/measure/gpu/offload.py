"""Activation offloading on side streams, as in OffloadActivations of torchtune and TRL.

Tensors that a block saves for its backward pass (``saved_tensors_hooks``) are copied to pinned memory on a side stream
while the next blocks run. They return on another stream while the backward pass is at the following block, so the
device holds the saved tensors of two blocks. ``torch.autograd.graph.save_on_cpu``, in contrast, waits for every copy.
A storage that is saved several times is copied once. Device memory is allocated and freed in compute-stream order; the
compute stream waits for a copy before it frees the source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class _Item:
    """A saved storage: its device and host copies, its block, and the number of pending unpacks."""

    device: Tensor | None
    host: Tensor | None
    block: int
    uses: int = 0


@dataclass(eq=False)
class _Block:
    """Saved storages of one block, with events for its copies."""

    items: dict[tuple[int, int], _Item] = field(default_factory=dict)  # by storage pointer and version
    left: Any = None  # event after the last copy to the host
    back: Any = None  # event after the last copy to the device


class Offload:
    """Wraps blocks in the order in which they run; each must run once per step.

    Args:
        model: its parameters and buffers stay on the device.
        device: "cuda" or "cpu".
        depth: number of blocks whose saved tensors are on the device at once.
        min_bytes: smaller storages are not offloaded.

    Attributes:
        copied: bytes copied to the host so far.
    """

    def __init__(self, model: nn.Module, device: str, depth: int = 2, min_bytes: int = 2**16):
        self.depth = depth
        self.min_bytes = min_bytes
        self.cuda = device == "cuda"
        self.kept = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.blocks: list[_Block] = []
        self.count = self.copied = 0
        self.out: torch.cuda.Stream | None = torch.cuda.Stream() if self.cuda else None
        self.back: torch.cuda.Stream | None = torch.cuda.Stream() if self.cuda else None

    def wrap(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward function of the next block, wrapped with offloading."""
        number = self.count
        self.count += 1

        def forward(*args: Any) -> Any:
            if number == 0:
                self.blocks = []
            self.blocks.append(_Block())
            self._retire(number - self.depth)
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                result = inner(*args)
            block = self.blocks[-1]
            block.left = self.out.record_event() if self.out else None
            return result

        return forward

    def _retire(self, number: int) -> None:
        """Frees the device memory of a block's saved storages after their copies to the host."""
        if number >= 0:
            block = self.blocks[number]
            if block.left:
                torch.cuda.current_stream().wait_event(block.left)
            for item in block.items.values():
                item.device = None

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.min_bytes or storage.data_ptr() in self.kept:
            return tensor
        number = len(self.blocks) - 1
        items = self.blocks[number].items
        key = storage.data_ptr(), tensor._version
        if key not in items:
            device = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.cuda)
            self._copy(self.out, host, device)
            self.copied += storage.nbytes()
            items[key] = _Item(device, host, number)
        items[key].uses += 1
        return items[key], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        item, dtype, size, stride, offset = packed
        for number in (item.block, item.block - 1):  # prefetch the block that the backward pass needs next
            self._fetch(number)
        event = self.blocks[item.block].back
        if event:
            torch.cuda.current_stream().wait_event(event)
        storage: Tensor = item.device
        item.uses -= 1
        if not item.uses:
            item.device = item.host = None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage.untyped_storage(), offset, size, stride)

    def _fetch(self, number: int) -> None:
        """Starts copying a block's offloaded storages back to the device."""
        block = self.blocks[number] if number >= 0 else _Block()
        for item in block.items.values():
            if item.device is None and item.host is not None:
                item.device = torch.empty_like(item.host, device="cuda" if self.cuda else "cpu")
                self._copy(self.back, item.device, item.host)
                block.back = self.back.record_event() if self.back else None

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        if stream is None:
            target.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
