"""Swaps storages between device and host and keeps the ledger of device bytes.

Each program tensor is one storage. A swap-out ends with ``resize_(0)`` of the storage, after its bytes have reached the
host; a swap-in begins with ``resize_(nbytes)``. Tensors and views that share the storage stay valid objects. Copies run
on the engines of executor/memory/engines.py; the rules below keep memory from being overwritten too early.
"""

# Ordering rules, enforced by events alone (executor/training/README.md):
# 1. All memory is allocated and freed while the compute stream is current, so it is reused in the order of calls.
# 2. A swap-out starts after all compute so far; compute waits for the copy before its memory is freed (``reclaim``).
# 3. The H2D stream waits for compute before a swap-in writes; compute waits for the swap-in before it uses the tensor.
# 4. A swap-out overwrites a host slot only after the last swap-in from that slot, of any tensor, was waited for.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from enum import Enum
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from executor.memory import ALIGNMENT
from executor.memory.engines import Engines, TransferError, engines_for


class StepError(RuntimeError):
    """Raised if a step cannot be created or fails; the message gives the resulting state of the model."""


class Place(Enum):
    """Location of a storage's content."""

    DEVICE = "device"
    OUT = "out"  # on the device, with a swap-out in flight
    HOST = "host"
    IN = "in"  # on the host, with a swap-in in flight


class UserTensor:
    """A user's tensor that steps use: its ``device_tensor``, and ``visible``, the tensor that the user sees."""

    user: Tensor
    device_tensor: Tensor
    visible: Tensor

    def show_tensor(self, tensor: Tensor) -> None:
        """Makes the user's tensor refer to the data of ``tensor``."""
        self.user.data = self.visible = tensor


class Block:
    """A program tensor that the plan swaps.

    Attributes:
        storage: its device storage; None for a tensor created in the step while it is on the device.
        host: its slot in pinned memory, uint8[nbytes], which other tensors use at other times (issue_order.py); None
            while the step holds no pinned memory (HostMemory).
        valid: whether the slot contains the tensor's content.
        users: the user's tensors, for a persistent tensor.
        absent: whether it belongs to a micro-batch that has not arrived; its moves then only count bytes.
        is_shown: whether the user's tensors refer to the host copy.
    """

    def __init__(self, name: str, nbytes: int, persistent: bool):
        self.name = name
        self.nbytes = nbytes
        self.persistent = persistent
        self.host: Any = None
        self.place = Place.DEVICE
        self.storage: torch.UntypedStorage | None = None
        self.bytes: Tensor | None = None
        self.out_event: Any  # events: of swap-outs (out_event), of swap-ins (in_event), of the last of either (event)
        self.out_event = self.in_event = self.event = None
        self.valid = self.is_shown = self.absent = False
        self.users: Sequence[UserTensor] = ()

    def attach(self, tensor: Tensor) -> None:
        """Assigns the storage of this tensor to the block."""
        self.storage = tensor.untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self.storage)

    def allocate(self) -> None:
        """Allocates its storage from PyTorch's allocator."""
        self.storage.resize_(self.nbytes)  # type: ignore[union-attr]

    def adopt(self) -> None:
        """Assigns the storage of ``users`` to the block; a storage that cannot be emptied is replaced by a copy."""
        if not is_movable(self.users[0].device_tensor):
            memory = self.users[0].device_tensor.untyped_storage().clone()
            for user_tensor in self.users:
                own = user_tensor.device_tensor
                user_tensor.device_tensor = torch.empty(0, dtype=own.dtype, device=own.device).set_(
                    memory, own.storage_offset(), own.size(), own.stride()
                )
                user_tensor.show_tensor(user_tensor.device_tensor)
        self.attach(self.users[0].device_tensor)

    def show(self) -> None:
        """Makes the user's tensors refer to the host copy."""
        for user_tensor in self.users:
            user_tensor.show_tensor(as_tensor(self.host, user_tensor.device_tensor))
        self.is_shown = True

    def hide(self) -> None:
        """Makes the user's tensors refer to the device again."""
        if self.is_shown:
            for user_tensor in self.users:
                user_tensor.show_tensor(user_tensor.device_tensor)
            self.is_shown = False


class Blocks:
    """All blocks of a plan by tensor, with the moves of issue_order.py and the ledger of device bytes.

    Attributes:
        values: table of values of the current step.
        allocate: function that allocates a block's device memory.
        total: bytes of the persistent tensors.
        used: bytes of the program's tensors on the device.
        tolerant: whether a failed copy is recorded in ``faults`` instead of stopping the step.
    """

    def __init__(self, engines: Engines, blocks: dict[int, Block], total: int):
        self.engines = engines
        self.blocks = blocks
        self.total = total
        self.used = total
        for block in blocks.values():
            block.out_event = engines.event()
            block.in_event = engines.event()
        self.values: list[Any] = []
        self.allocate: Callable[[Block], None] = Block.allocate
        self.tolerant = False
        self.faults: list[str] = []

    def attach_storage(self, block: Block, slots: Sequence[int]) -> None:
        """Finds the storage of a tensor created in the step, shared by the values in these table slots.

        Raises:
            TransferError: If its size is not that of the program.
        """
        if block.storage is None:
            for slot in slots:
                if (value := self.values[slot]) is not None:
                    break
            block.attach(value)
            if (nbytes := value.untyped_storage().nbytes()) != block.nbytes:
                raise TransferError(
                    f"{block.name} has {nbytes:,} bytes, but {block.nbytes:,} in the program: the operator's output "
                    "differs from its trace; capture the step again"
                )

    def start_swap_out(self, target: tuple[Block, Sequence[int]]) -> None:
        """Starts the swap-out (``out``) of a tensor given by its block and table slots."""
        if not target[0].absent:
            self.attach_storage(*target)
        self.swap_out(target[0])

    def swap_out(self, block: Block) -> None:
        """Starts the copy to the host; the tensor stays usable until ``reclaim``."""
        block.event = block.out_event
        block.valid = False
        try:
            if not block.absent:
                self.engines.copy_out(block.host, block.bytes, block.out_event)  # type: ignore[arg-type]
        except TransferError as error:
            self._fault(block, "out", error)
            return  # the tensor stays on the device
        block.place = Place.OUT

    def reclaim(self, block: Block) -> None:
        """Waits for the swap-out and frees the memory."""
        if block.place is not Place.OUT:
            return
        try:
            if not block.absent:
                self.engines.wait(block.out_event)
        except TransferError as error:
            self._fault(block, "out", error)
            self._finish_swap_in(block)  # its device memory is still intact
            return
        block.valid = True
        self._free(block)

    def release(self, target: tuple[Block, Sequence[int]]) -> None:
        """Frees a tensor's memory if its host copy is valid; arguments as in ``start_swap_out``."""
        if target[0].valid:
            if not target[0].absent:
                self.attach_storage(*target)
            self._free(target[0])

    def _free(self, block: Block) -> None:
        if not block.absent:
            self.engines.borrow(block.bytes)  # type: ignore[arg-type]
            block.storage.resize_(0)  # type: ignore[union-attr]  # the empty storage object stays
        block.place = Place.HOST
        self.used -= block.nbytes

    def swap_in(self, block: Block) -> None:
        """Allocates memory and starts the swap-in."""
        if block.place is not Place.HOST:
            return
        if block.absent:
            block.place = Place.DEVICE
            self.used += block.nbytes
            return
        self.allocate(block)
        self.used += block.nbytes
        block.place = Place.IN
        block.event = block.in_event
        try:
            self.engines.copy_in(block.bytes, block.host, block.in_event)  # type: ignore[arg-type]
        except TransferError as error:
            self._retry_swap_in(block, error)

    def wait(self, block: Block) -> None:
        """Waits for the swap-in."""
        if block.place is not Place.IN:
            return
        try:
            self.engines.wait(block.in_event)
        except TransferError as error:
            self._retry_swap_in(block, error)
            return
        self._finish_swap_in(block)

    def _retry_swap_in(self, block: Block, error: TransferError) -> None:
        """Repeats a failed swap-in synchronously, without the engines."""
        self._fault(block, "in", error)
        block.bytes.copy_(block.host)  # type: ignore[union-attr]
        self._finish_swap_in(block)

    def _finish_swap_in(self, block: Block) -> None:
        block.place = Place.DEVICE
        block.hide()
        if not block.persistent:
            block.storage = block.bytes = None  # its values keep the storage alive

    def _fault(self, block: Block, direction: str, error: TransferError) -> None:
        message = f"the swap-{direction} of {block.name} failed: {error}"
        if not self.tolerant:
            raise TransferError(message) from error
        self.faults.append(message)

    # ---------------------------------------------------------------------------------- between steps

    def start(self, places: dict[int, Literal["host", "out", "in"]]) -> None:
        """Moves tensors to their locations at the iteration boundary, before the first kernel."""
        self.engines.begin()
        for t, place in places.items():
            block = self.blocks[t]
            if place != "in":
                self.wait(block)
                if block.place is Place.DEVICE:
                    self.swap_out(block)
        for t in places:
            if places[t] == "host":
                self.reclaim(self.blocks[t])
            elif places[t] == "in":
                self.swap_in(self.blocks[t])
        self.swap_in_all(t for t, block in self.blocks.items() if block.persistent and t not in places)

    def swap_in_all(self, tensors: Iterable[int]) -> None:
        """Swaps tensors in; a tensor with a swap-out in flight stays on the device."""
        blocks = [self.blocks[t] for t in tensors]
        for block in blocks:
            if block.place is Place.OUT:
                self.engines.join(block.out_event)
                block.place = Place.DEVICE
            self.swap_in(block)
        for block in blocks:
            self.wait(block)

    def settle(self, wait: bool = True) -> None:
        """Makes the user's tensors valid between two steps: on the device or as host copies.

        Args:
            wait: whether to wait for copies in flight; otherwise host copies may be incomplete.
        """
        for block in self.blocks.values():
            if block.persistent and wait:
                self.reclaim(block)
                self.wait(block)
        for block in self.blocks.values():
            block.valid = block.place is Place.HOST
            if block.valid and not block.is_shown:
                if wait:
                    self.engines.join(block.event)
                block.show()

    def show(self) -> list[Block]:
        """Shows all host copies to the user without waiting; returns the blocks not shown before."""
        hidden = [b for b in self.blocks.values() if b.users and b.place is Place.HOST and not b.is_shown]
        for block in hidden:
            block.show()
        return hidden

    def drain(self, on_host: Set[int]) -> None:
        """Cleans up after a failure: ends copies, drops tensors created in the step and restores persistent ones.

        Args:
            on_host: persistent tensors that may stay on the host; all others are copied to the device synchronously.
        """
        self.engines.synchronize()
        self.used = self.total
        for t, block in self.blocks.items():
            if not block.persistent:
                block.place = Place.DEVICE
                block.storage = None
                block.bytes = None
            elif block.place is Place.HOST and t in on_host:
                self.used -= block.nbytes
            elif block.place in (Place.HOST, Place.IN):
                assert block.storage is not None and block.bytes is not None
                block.storage.resize_(block.nbytes)
                block.bytes.copy_(block.host)
                self._finish_swap_in(block)
            else:
                block.place = Place.DEVICE

    def __del__(self) -> None:
        for block in self.blocks.values():  # breaks reference cycles, so that memory is freed at once
            block.users = ()


def is_movable(tensor: Tensor) -> bool:
    """Returns True if the storage can be emptied: not if a NumPy array, a file or another process holds it."""
    return tensor.untyped_storage().resizable() and not is_shared(tensor)


def is_shared(tensor: Tensor) -> bool:
    """Returns True for memory shared between processes, whose resizing crashes although PyTorch allows it."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()


def as_tensor(memory: Tensor, like: Tensor) -> Tensor:
    """Views uint8[nbytes], a copy of a storage, as a tensor of the same form as ``like``."""
    return memory.view(like.dtype).as_strided(like.size(), like.stride(), like.storage_offset())


class HostMemory:
    """Pinned memory of a planned step: slots for swapped tensors, and copies to undo a step.

    It is allocated and freed as a whole. A step holds it from its first move until ``PlannedStep.finish``; afterwards
    other steps may use it (executor/memory/pinned.py), and the next step allocates it again.

    Args:
        places: tensor -> offset in bytes; tensors may share memory.
        device: device that copies to and from this memory.

    Attributes:
        copies: undo copies on the device, with the bindings that they belong to.
        bindings: bindings whose undo copies are in this memory.
        undo: per device and dtype, all undo copies and their bindings; only while ``is_allocated``.
    """

    def __init__(self, blocks: Blocks, places: dict[int, int], device: torch.device) -> None:
        self._blocks = blocks
        self._places = places
        self._device = device
        self.copies: list[tuple[Tensor, UserTensor]] = []
        self.bindings: list[UserTensor] = []
        self.undo: list[tuple[list[Tensor], list[UserTensor]]] = []
        self.is_allocated = False

    def allocate(self) -> None:
        """Allocates the memory; raises StepError, with nothing allocated, if the host has too little."""
        blocks = self._blocks.blocks
        rest = self.bindings
        message = "the plan cannot be run"
        try:
            places = slab(self._blocks.engines, [b.nbytes for b in blocks.values()], [self._places[t] for t in blocks])
            message = "the host has no memory to undo a step"
            sizes = [b.device_tensor.untyped_storage().nbytes() for b in rest]
            ends = [0, *accumulate(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes)]
            copies = slab(engines_for(self._device), sizes, ends[:-1]) if rest else []
        except TransferError as error:
            raise StepError(f"{message}: {error}") from error
        for block, place in zip(blocks.values(), places, strict=True):
            block.host = place
        groups: dict[Any, list[tuple[Tensor, UserTensor]]] = {}
        for copy, b in (
            *self.copies,
            *((as_tensor(copy, b.device_tensor), b) for copy, b in zip(copies, rest, strict=True)),
        ):
            groups.setdefault((copy.device, copy.dtype), []).append((copy, b))
        self.undo = [([copy for copy, _ in group], [b for _, b in group]) for group in groups.values()]
        self.is_allocated = True

    def release(self) -> None:
        """Frees the memory; it must hold no content, and no copy may use it before the next ``allocate``."""
        for block in self._blocks.blocks.values():
            block.host = None
        self.undo = []
        self.is_allocated = False


def slab(engines: Engines, sizes: Sequence[int], offsets: Sequence[int]) -> list[Tensor]:
    """Returns slots of these sizes and offsets, which may overlap, in pinned memory.

    Each slot has its own storage, so that saving a tensor saves only its slot. Overlapping slots are in one part.
    """
    end = 0
    cuts: list[int] = []
    for offset, nbytes in sorted(zip(offsets, sizes, strict=True)):
        if 0 < end <= offset:
            cuts.append(offset)
        end = max(end, -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT)
    parts = engines.pinned([*dict.fromkeys(cuts), end]) if end else []  # tensors of the arrays keep the memory alive
    begins = [begin for begin, _ in parts]
    slots: list[Tensor] = []
    for offset, nbytes in zip(offsets, sizes, strict=True):
        begin, memory = parts[bisect_right(begins, offset) - 1] if parts else (0, b"")
        slots.append(torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset - begin))
    return slots
