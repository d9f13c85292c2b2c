"""One iteration in an arena: memory with an address for every stay of a block on the device, packed beforehand.

``stays`` walks over an order of issue and says from when to when each block of the schedule is on the device; packed
(simulator/pool) these have addresses. ``Arena`` runs the iteration once so that everything that is born in it lies at
its address, and records it (recording.py). What is given back is overwritten, so that who reads it still is found out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from executor.memory import ALIGNMENT
from executor.training.calls import Call, Calls
from executor.training.order import Order
from executor.training.recording import Recording, span
from executor.training.storage import Block, Storages
from simulator.pool import smartpool
from simulator.pool.intervals import Intervals
from simulator.schedule import Step


def stays(order: Order, swapped: Iterable[int]) -> tuple[list[int], Intervals]:
    """Block and interval of every stay on the device in one iteration, in the order in which they begin.

    Time counts what is taken and given. Of persistent tensors there are those that the plan swaps; before the first
    kernel and after the last these are on the host.

    Args:
        swapped: tensors that the plan swaps, in the order in which those at home on the device are fetched.
    """
    memory, clock = order.schedule.blocks, count()
    home = {memory[b].owner: b for b in range(len(memory)) if memory[b].first < 0}
    stay: list[int] = []
    lower: list[int] = []
    upper: list[int] = []
    there: dict[int, int] = {}  # block -> its stay
    leaving: set[int] = set()

    def take(b: int) -> None:
        if memory[b].nbytes and b not in there:
            there[b] = len(stay)
            stay.append(b)
            lower.append(next(clock))
            upper.append(-1)

    def give(b: int) -> None:
        leaving.discard(b)
        if b in there:
            upper[there.pop(b)] = next(clock)

    def move(kind: str, b: int) -> None:
        if kind == "in":
            take(b)
        elif kind == "out" and b in there:
            leaving.add(b)
        elif kind == "release" or (kind == "reclaim" and b in leaving):
            give(b)

    for t, place in order.start.items():
        if place == "in":
            take(home[t])
    for t in swapped:
        if t in home and t not in order.start:
            take(home[t])
    for item in order.items:
        for kind, b in item.before:
            move(kind, b)
        for b in item.step.allocates:
            take(b)
        for b in item.step.frees:
            give(b)
        for kind, b in item.after:
            move(kind, b)
    for b in list(there):
        give(b)
    return stay, Intervals(*(np.array(x, np.int64) for x in (lower, upper, [memory[b].nbytes for b in stay])))


class Arena(Storages):
    """Runs and records an iteration.

    Args:
        swapped: what the plan swaps, by tensor.
        table: values, to be filled; what it has now stays where it is.

    Attributes:
        memory: uint8[footprint].
        recording: what has been run.
    """

    def __init__(self, order: Order, calls: Calls, swapped: dict[int, Block], table: list[Any]):
        self.calls, self.table, self.blocks = calls, table, order.schedule.blocks
        which, intervals = stays(order, swapped)
        packing = smartpool.pack(intervals, ALIGNMENT)
        self._coming = iter(zip(which, packing.offsets.tolist(), strict=True))
        self.memory = torch.zeros(packing.footprint, dtype=torch.uint8)
        self.recording = Recording(span(self.memory))
        self._known = {self.memory.untyped_storage()._cdata}
        for value in tree_leaves(table):
            if isinstance(value, Tensor):
                self._stays_put(value)
        for block in swapped.values():
            self._stays_put(block.host)
        self._at: dict[int, int] = {}  # block of the schedule -> its offset, now or last
        self._there: set[int] = set()  # blocks of the schedule
        # Of what the plan swaps: the block of the schedule that leaves and comes back.
        self._moved = {id(swapped[b.owner]): i for i, b in enumerate(self.blocks) if b.first < 0 and b.owner in swapped}
        self._of_slot = {slot: b for b, slots in calls.of.items() for slot in slots}
        self._own: dict[int, list[int]] = {}  # persistent tensor that is swapped -> its slots
        for node, slot in calls.slots.items():
            if calls.values.get(node, -1) in swapped:
                self._own.setdefault(calls.values[node], []).append(slot)
        self._made: dict[int, tuple[Any, list[tuple[Any, Tensor]]]] = {}  # id of a list -> it, (index, place) of items

    def _stays_put(self, tensor: Tensor) -> None:
        self._known.add(tensor.untyped_storage()._cdata)
        self.recording.static(tensor)

    # ------------------------------------------------------------------------------------ stays

    def _begin(self, b: int) -> None:
        """The next stay, which is of this block."""
        packed, offset = next(self._coming)
        if packed != b:
            raise AssertionError("what is recorded is not what was packed")
        self._at[b] = offset
        self._there.add(b)
        self.recording.take(span(self._bytes(b)))

    def _end(self, b: int) -> None:
        memory = self._bytes(b)
        self.recording.give(span(memory), lambda: memory.fill_(255))
        memory.fill_(255)
        self._there.discard(b)

    def _bytes(self, b: int) -> Tensor:
        return self.memory[self._at[b] : self._at[b] + self.blocks[b].nbytes]

    def _view(self, b: int, like: Tensor, begin: int) -> Tensor:
        """A tensor that looks as one that is ``begin`` bytes into the block."""
        at = (self._at[b] + begin) // like.element_size()
        empty = torch.empty(0, dtype=like.dtype)
        return empty.set_(self.memory.untyped_storage(), at, like.size(), like.stride())  # type: ignore[call-overload]

    def hold(self, block: Block, tensor: Tensor) -> int:
        where = tensor.storage_offset() * tensor.element_size()
        b = next(b for b in self._there if self._at[b] <= where < self._at[b] + self.blocks[b].nbytes)
        self._moved[id(block)] = b
        block.storage, block.bytes = tensor.untyped_storage(), self._bytes(b)
        return block.bytes.nbytes

    def take(self, block: Block) -> None:
        b = self._moved[id(block)]
        before = self._at.get(b, 0)
        self._begin(b)
        block.bytes = self._bytes(b)
        for slot in self._own.get(self.blocks[b].owner, ()) if block.persistent else self.calls.of.get(b, ()):
            if isinstance(value := self.table[slot], Tensor):
                here = value.untyped_storage()._cdata == self.memory.untyped_storage()._cdata
                begin = value.storage_offset() * value.element_size() - (before if here else 0)
                self.table[slot] = self._view(b, value, begin)

    def give(self, block: Block) -> None:
        self._end(self._moved[id(block)])

    # ------------------------------------------------------------------------------------ steps

    def run(self, step: Step, calls: Sequence[Call]) -> None:
        """Runs and records a step's calls."""
        for b in step.allocates:
            if self.blocks[b].nbytes:
                self._begin(b)
        body = self.calls.bodies[step.kernel]
        nodes: list[fx.Node | None] = [None] * (len(calls) - len(body)) + body  # type: ignore[assignment, list-item]
        name = self.calls.schedule.program.kernels[step.kernel].name
        for node, call in zip(nodes, calls, strict=True):
            self._call(name, node, call)

    def end(self, step: Step, keep: Sequence[int]) -> None:
        """After a step: what is returned (slots) moves out of what is given back."""
        for b in step.frees:
            for slot in set(keep) & set(self.calls.of.get(b, ())):
                self.keep(slot)
            if self.blocks[b].nbytes:
                self._end(b)

    def keep(self, slot: int) -> None:
        """What is returned gets a place of its own, once."""
        value = self.table[slot]
        if value.untyped_storage()._cdata == self.memory.untyped_storage()._cdata:
            self.table[slot] = kept = value.clone()
            self._stays_put(kept)
            self.recording.kernel("copy of what is returned", [value], [kept], lambda: kept.copy_(value))

    def _call(self, name: str, node: fx.Node | None, call: Call) -> None:
        out, function, get, options = call
        args, options = get(self.table), dict(options)
        result = function(*args, **options)
        if node is None:  # memory whose content does not matter
            result = self._settle(out, result)
        elif function is operator.getitem and id(args[0]) in self._made and isinstance(result, Tensor):
            result = self._settle(out, result)
            self._made[id(args[0])][1].append((args[1], result))
            self.recording.also_writes(result)
        elif isinstance(result, (list, tuple)) and any(map(self._is_new, result)):
            self._made[id(result)] = result, []
            self._record(name, node, function, args, options, self._made[id(result)][1])
        elif self._is_new(result):
            result = self._settle(out, result)
            self._record(name, node, function, args, options, [(None, result)])
        elif _written(node, args):
            self._record(name, node, function, args, options, [])
        self.table[out] = result

    def _is_new(self, result: Any) -> bool:
        return isinstance(result, Tensor) and result.untyped_storage()._cdata not in self._known

    def _settle(self, slot: int, result: Tensor) -> Tensor:
        """The result in its block; where it has none, it lies where it lies, which is no legal place."""
        b = self._of_slot.get(slot)
        if b is None or not self._is_new(result) or result.untyped_storage().nbytes() != self.blocks[b].nbytes:
            return result
        placed = self._view(b, result, result.storage_offset() * result.element_size())
        return placed.copy_(result)

    def _record(
        self, name: str, node: fx.Node, function: Any, args: Any, options: dict[str, Any],
        places: list[tuple[Any, Tensor]],
    ) -> None:  # fmt: skip
        mode = torch.is_grad_enabled()

        def again() -> None:
            with torch.set_grad_enabled(mode):
                made = function(*args, **options)
            for index, place in places:
                place.copy_(made if index is None else made[index])

        reads = [v for v in tree_leaves((tuple(args), options)) if isinstance(v, Tensor)]
        writes = [place for _, place in places] + _written(node, args)
        self.recording.kernel(name, reads, writes, again)


def _written(node: fx.Node, args: Sequence[Any]) -> list[Tensor]:
    """The arguments that an operator writes."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = [a for a in node.target._schema.arguments if not a.kwarg_only]
    written = [v for a, v in zip(arguments, args, strict=False) if a.alias_info is not None and a.alias_info.is_write]
    return [v for v in tree_leaves(written) if isinstance(v, Tensor)]
