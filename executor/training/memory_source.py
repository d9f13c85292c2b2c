"""Storages that leave the device and come back: where each one is, the copies, and the ledger of bytes.

A tensor of a program is one storage. A swap-out ends with ``resize_(0)`` of that storage, once its bytes are on the
host; a swap-in begins with ``resize_(nbytes)``. Every tensor and view that shares it stays as it is.

Copies are the engines' (executor/memory/engines.py). Work is ordered by events alone. Why no byte is overwritten too
early (executor/training/README.md):

1. All memory is allocated and freed while the compute stream is current: freed memory is reused in the order of calls.
2. A swap-out starts after all compute so far; before its memory is freed (``reclaim``) compute waits for the copy.
3. The h2d stream waits for compute before a swap-in writes; compute waits for the swap-in before it uses the tensor.
4. A swap-out writes a place on the host only after the last swap-in from it, of whichever tensor, was waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from enum import Enum
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from executor.memory import ALIGNMENT
from executor.memory.engines import Engines, TransferError, engines_for


class StepError(RuntimeError):
    """A step cannot be made or failed; the message is one sentence and says what became of the model."""


class Place(Enum):
    """Where a storage's content is."""

    DEVICE = "device"
    OUT = "out"  # on the device, a swap-out under way
    HOST = "host"
    IN = "in"  # on the host, a swap-in under way


class Shared:
    """A tensor of the user's that steps use: ``own`` is what it is on the device, ``seen`` what the user sees."""

    user: Tensor
    own: Tensor
    seen: Tensor

    def see(self, what: Tensor) -> None:
        """The user's tensor shows ``what`` from now on."""
        self.user.data = self.seen = what


class Block:
    """One tensor of the program that a plan swaps.

    Attributes:
        storage: None for a tensor born in the step while it is on the device.
        host: its place in pinned memory, uint8[nbytes]; others have it while it is not this one's
            (issue_order.py). None while the step has no pinned memory (HostMemory).
        valid: the content there is that of the tensor.
        users: of a persistent tensor: the user's.
        absent: it is of a micro-batch that has not come: its moves only count bytes, as the program does.
        shown: the user's tensors show the content on the host.
    """

    def __init__(self, name: str, nbytes: int, persistent: bool):
        self.name, self.nbytes, self.persistent = name, nbytes, persistent
        self.host: Any = None
        self.place = Place.DEVICE
        self.storage: torch.UntypedStorage | None = None
        self.bytes: Tensor | None = None
        self.went: Any  # the event of its swap-outs; of its swap-ins; of the last of either
        self.went = self.came = self.event = None
        self.valid = self.shown = self.absent = False
        self.users: Sequence[Shared] = ()

    def on(self, tensor: Tensor) -> None:
        """It is this tensor's storage from now on."""
        self.storage = tensor.untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self.storage)  # type: ignore[call-overload]

    def take(self) -> None:
        """Its storage gets memory of PyTorch's allocator."""
        self.storage.resize_(self.nbytes)  # type: ignore[union-attr]

    def adopt(self) -> None:
        """It is the storage of ``users`` from now on; if that cannot be emptied, they get another one."""
        if not movable(self.users[0].own):
            memory = self.users[0].own.untyped_storage().clone()
            for shared in self.users:
                own = shared.own
                shared.own = torch.empty(0, dtype=own.dtype, device=own.device).set_(
                    memory, own.storage_offset(), own.size(), own.stride()
                )  # type: ignore[call-overload]
                shared.see(shared.own)
        self.on(self.users[0].own)

    def show(self) -> None:
        """The user's tensors become the copy on the host."""
        for shared in self.users:
            shared.see(as_tensor(self.host, shared.own))
        self.shown = True

    def hide(self) -> None:
        """The user's tensors are on the device again."""
        if self.shown:
            for shared in self.users:
                shared.see(shared.own)
            self.shown = False


class Blocks:
    """All blocks of a plan, by tensor; the moves of issue_order.py, and the bytes in use.

    Attributes:
        values: the table of values of the step that runs.
        take: gives a block memory.
        total: bytes of the persistent tensors.
        used: bytes of the program's tensors on the device.
        tolerant: a failed copy does not stop the step; ``faults`` has what failed.
    """

    def __init__(self, engines: Engines | None, blocks: dict[int, Block], total: int):
        self.engines, self.blocks, self.total, self.used = engines, blocks, total, total
        for block in blocks.values():
            block.went, block.came = engines.event(), engines.event()  # type: ignore[union-attr]
        self.values: list[Any] = []
        self.take: Callable[[Block], None] = Block.take
        self.tolerant = False
        self.faults: list[str] = []

    def find(self, block: Block, slots: Sequence[int]) -> None:
        """The storage of a tensor, which the values in these slots of the table share."""
        if block.storage is None:
            for slot in slots:
                if (value := self.values[slot]) is not None:
                    break
            block.on(value)
            if (found := value.untyped_storage().nbytes()) != block.nbytes:
                raise TransferError(
                    f"{block.name} has {found:,} bytes, the program says {block.nbytes:,}: this operator is not what "
                    "its trace was"
                )

    def leave(self, which: tuple[Block, Sequence[int]]) -> None:
        """``out`` of a tensor that the values in these slots of the table share."""
        if not which[0].absent:
            self.find(*which)
        self.out(which[0])

    def out(self, block: Block) -> None:
        """Starts the copy to the host; the tensor can be used until it is reclaimed."""
        block.event, block.valid = block.went, False
        try:
            if not block.absent:
                self.engines.copy_out(block.host, block.bytes, block.went)  # type: ignore[union-attr, arg-type]
        except TransferError as error:
            self._fault(block, "out", error)
            return  # it stays
        block.place = Place.OUT

    def reclaim(self, block: Block) -> None:
        """Waits for the swap-out and frees the memory."""
        if block.place is not Place.OUT:
            return
        try:
            if not block.absent:
                self.engines.wait(block.went)  # type: ignore[union-attr]
        except TransferError as error:
            self._fault(block, "out", error)
            self._arrive(block)  # it has never left
            return
        block.valid = True
        self._free(block)

    def release(self, which: tuple[Block, Sequence[int]]) -> None:
        """Frees the memory, whose copy on the host is valid unless it has failed; arguments as in ``leave``."""
        if which[0].valid:
            if not which[0].absent:
                self.find(*which)
            self._free(which[0])

    def _free(self, block: Block) -> None:
        if not block.absent:
            self.engines.borrow(block.bytes)  # type: ignore[union-attr, arg-type]
            block.storage.resize_(0)  # type: ignore[union-attr]  # which stays, empty
        block.place = Place.HOST
        self.used -= block.nbytes

    def swap_in(self, block: Block) -> None:
        """Takes memory and starts the swap-in."""
        if block.place is not Place.HOST:
            return
        if block.absent:
            block.place = Place.DEVICE
            self.used += block.nbytes
            return
        self.take(block)
        self.used += block.nbytes
        block.place, block.event = Place.IN, block.came
        try:
            self.engines.copy_in(block.bytes, block.host, block.came)  # type: ignore[union-attr, arg-type]
        except TransferError as error:
            self._again(block, error)

    def wait(self, block: Block) -> None:
        """Waits for the swap-in."""
        if block.place is not Place.IN:
            return
        try:
            self.engines.wait(block.came)  # type: ignore[union-attr]
        except TransferError as error:
            self._again(block, error)
            return
        self._arrive(block)

    def _again(self, block: Block, error: TransferError) -> None:
        """A swap-in has failed: once more, without the engines."""
        self._fault(block, "in", error)
        block.bytes.copy_(block.host)  # type: ignore[union-attr]
        self._arrive(block)

    def _arrive(self, block: Block) -> None:
        block.place = Place.DEVICE
        block.hide()
        if not block.persistent:
            block.storage = block.bytes = None  # it lives as long as its values

    def _fault(self, block: Block, way: str, error: TransferError) -> None:
        what = f"the swap-{way} of {block.name} failed: {error}"
        if not self.tolerant:
            raise TransferError(what) from error
        self.faults.append(what)

    # ---------------------------------------------------------------------------------- between steps

    def start(self, places: dict[int, Literal["host", "out", "in"]]) -> None:
        """Before the first kernel: tensors go where the steady iteration begins; the others are on the device."""
        if self.engines:
            self.engines.begin()
        for t, place in places.items():
            block = self.blocks[t]
            if place != "in":
                self.wait(block)
                if block.place is Place.DEVICE:
                    self.out(block)
        for t in places:
            if places[t] == "host":
                self.reclaim(self.blocks[t])
            elif places[t] == "in":
                self.swap_in(self.blocks[t])
        self.back(t for t, block in self.blocks.items() if block.persistent and t not in places)

    def back(self, which: Iterable[int]) -> None:
        """Brings tensors to the device; one whose swap-out is under way stays there."""
        blocks = [self.blocks[t] for t in which]
        for block in blocks:
            if block.place is Place.OUT:
                self.engines.join(block.went)  # type: ignore[union-attr]
                block.place = Place.DEVICE
            self.swap_in(block)
        for block in blocks:
            self.wait(block)

    def settle(self, wait: bool = True) -> None:
        """Between two steps the user's tensors are right: on the device, or their content on the host is shown.

        Args:
            wait: until no copy is under way. Else what is on its way is left so, and content on the host may lag.
        """
        for block in self.blocks.values():
            if block.persistent and wait:
                self.reclaim(block)
                self.wait(block)
        for block in self.blocks.values():
            block.valid = block.place is Place.HOST
            if block.valid and not block.shown:
                if wait:
                    self.engines.join(block.event)  # type: ignore[union-attr]
                block.show()

    def show(self) -> list[Block]:
        """What is on the host is shown, without a wait; returns what had not been."""
        found = [b for b in self.blocks.values() if b.users and b.place is Place.HOST and not b.shown]
        for block in found:
            block.show()
        return found

    def drain(self, away: Set[int]) -> None:
        """After a failure: copies end, what was born in the step is gone, persistent tensors are whole.

        Args:
            away: persistent tensors that may stay on the host; the others come to the device, without the engines.
        """
        if self.engines:
            self.engines.synchronize()
        self.used = self.total
        for t, block in self.blocks.items():
            if not block.persistent:
                block.place, block.storage, block.bytes = Place.DEVICE, None, None
            elif block.place is Place.HOST and t in away:
                self.used -= block.nbytes
            elif block.place in (Place.HOST, Place.IN):
                assert block.storage is not None and block.bytes is not None
                block.storage.resize_(block.nbytes)
                block.bytes.copy_(block.host)
                self._arrive(block)
            else:
                block.place = Place.DEVICE

    def __del__(self) -> None:
        for block in self.blocks.values():  # it knows its users and they know it: memory would wait for the collector
            block.users = ()


def movable(tensor: Tensor) -> bool:
    """Can its storage be emptied? Not where a NumPy array, a file or another process has it."""
    return tensor.untyped_storage().resizable() and not shared(tensor)


def shared(tensor: Tensor) -> bool:
    """Is it in memory that other processes see? (PyTorch says of such memory that it can be resized, and crashes.)"""
    return tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()


def as_tensor(memory: Tensor, like: Tensor) -> Tensor:
    """uint8[nbytes] with the bytes of a storage as a tensor that looks as ``like``, one of that storage."""
    return memory.view(like.dtype).as_strided(like.size(), like.stride(), like.storage_offset())


class HostMemory:
    """A planned step's pinned memory: a place for each tensor that the plan swaps, and the copies that undo a step.

    Taken and given back as a whole. A step has it from its first move until ``PlannedStep.finish``, which leaves
    nothing in it. Then whoever asks gets it (executor/memory/pinned.py), and the step asks again when it runs again.

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
        self.kept: list[tuple[Tensor, Shared]] = []
        self.rest: list[Shared] = []
        self.undo: list[tuple[list[Tensor], list[Shared]]] = []
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
        groups: dict[Any, list[tuple[Tensor, Shared]]] = {}
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
