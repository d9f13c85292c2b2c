"""An iteration as a list of operations at fixed addresses, as a CUDA graph captures one; checked, then replayed.

``Arena`` runs an iteration once so that everything that is born in it lies at its packed address, and records it.
What is given back is overwritten, so that who reads it still is found out.

``Recording`` takes down kernels, and as copy engines (executor/memory/engines.py) what these do with streams and
events; each operation is done, too. ``illegal`` says what CUDA would not capture, or would replay wrongly:

1. a number that the host reads: the host does not run when a graph is replayed;
2. work on a stream that has not been forked from the compute stream by an event, or that is not joined at the end;
3. a wait for an event that was not recorded before it in the same recording;
4. memory that is neither the pool's, taken at that time, nor there before the recording (an allocation);
5. two uses of one memory, one of them a write, on two streams in no order. To take memory counts as a write.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from executor.memory import ALIGNMENT
from executor.memory.engines import Bytes, TransferError, move
from executor.training.issue_order import Order, stays
from executor.training.memory_source import Block, Storages
from executor.training.node_calls import Call, Calls
from simulator.pool import smartpool
from simulator.schedule import Step

Span = tuple[int, int]  # addresses of bytes, half-open
COMPUTE, D2H, H2D = "compute", "d2h", "h2d"


class Operation(NamedTuple):
    """What a stream is given to do, or to wait for.

    Attributes:
        name: of the kernel; of the event that is recorded or waited for.
        again: does it; None where there is nothing to do.
    """

    kind: Literal["kernel", "copy", "record", "wait", "take", "give", "read"]
    stream: str
    name: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    again: Callable[[], object] | None = None


class Recording:
    """What has been done so far.

    Args:
        pool: addresses that may be taken.

    Attributes:
        operations: in the order of issue.
        there: memory from before the recording.
    """

    streams = ()

    def __init__(self, pool: Span):
        self.pool = pool
        self.operations: list[Operation] = []
        self.there: list[Span] = []
        self._events: dict[int, str] = {}
        self._keep: list[Any] = []  # whose ids and addresses stay theirs

    def static(self, tensor: Tensor) -> None:
        """This tensor's memory was there before."""
        storage = tensor.untyped_storage()
        self._keep.append(tensor)
        self.there.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def kernel(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor], again: Callable[[], object]) -> None:
        """Notes a kernel, and ``again``, which runs it."""
        reads, writes = list(reads), list(writes)
        self._keep += reads + writes
        self._add("kernel", COMPUTE, name, reads, writes, again)

    def also_writes(self, place: Tensor) -> None:
        """The last kernel that was recorded does."""
        at = max(i for i, done in enumerate(self.operations) if done.kind == "kernel")
        last = self.operations[at]
        self.operations[at] = last._replace(writes=(*last.writes, *_spans([place])))

    def take(self, memory: Span) -> None:
        """Notes that a span of memory is taken."""
        self.operations.append(Operation("take", COMPUTE, "memory that is taken", (), (memory,)))

    def give(self, memory: Span, again: Callable[[], object]) -> None:
        """Notes that a span of memory is given back."""
        self.operations.append(Operation("give", COMPUTE, "memory that is given back", (), (memory,), again))

    def read(self, name: str) -> None:
        """The host reads a number."""
        self.operations.append(Operation("read", COMPUTE, name))

    def _add(
        self, kind: Literal["kernel", "copy"], stream: str, name: str, reads: Iterable[Tensor],
        writes: Iterable[Tensor], again: Callable[[], object],
    ) -> None:  # fmt: skip
        self.operations.append(Operation(kind, stream, name, _spans(reads), _spans(writes), again))

    def replay(self) -> None:
        for operation in self.operations:
            if operation.again:
                operation.again()

    # ------------------------------------------------------------------------------------ copy engines

    def pinned(self, nbytes: int) -> Bytes:
        raise TransferError("a recording takes no host memory")

    def borrow(self, tensor: Tensor) -> None:
        pass  # there is one arena

    def event(self) -> object:
        return object()

    def begin(self) -> bool:
        return False

    def copy_out(self, host: Tensor, device: Tensor, event: Any) -> None:
        self._copy(D2H, host, device, event)

    def copy_in(self, device: Tensor, host: Tensor, event: Any) -> None:
        self._copy(H2D, device, host, event)

    def _copy(self, stream: str, target: Tensor, source: Tensor, event: Any) -> None:
        computed = f"computed {len(self.operations)}"
        self.operations.append(Operation("record", COMPUTE, computed))
        self.operations.append(Operation("wait", stream, computed))
        self._add("copy", stream, f"copy on {stream}", [source], [target], lambda: move(target, source))
        move(target, source)
        self.operations.append(Operation("record", stream, self._name(event)))

    def _name(self, event: Any) -> str:
        self._keep.append(event)
        return self._events.setdefault(id(event), f"event {len(self._events)}")

    def wait(self, event: Any) -> None:
        self.operations.append(Operation("wait", COMPUTE, self._name(event)))

    def join(self, event: Any) -> None:
        self.read("an event")

    def synchronize(self) -> None:
        self.read("all streams")


def span(tensor: Tensor) -> Span:
    """The addresses between a tensor's first byte and its last."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _spans(tensors: Iterable[Tensor]) -> tuple[Span, ...]:
    return tuple(found for found in map(span, tensors) if found[0] < found[1])


def illegal(operations: Sequence[Operation], pool: Span, there: Iterable[Span]) -> str | None:
    """The first reason why a list of operations cannot be a graph; None where it can."""
    check = _Check(pool, there)
    for operation in operations:
        if reason := check.step(operation):
            return reason
    return check.end()


class _Check:
    """Order by vector clocks: of each stream, how much of every other comes before what it does next."""

    def __init__(self, pool: Span, there: Iterable[Span]):
        self.pool, self.there = pool, _merged(there)
        self.starts = [a for a, _ in self.there]
        self.taken: list[Span] = []
        self.clocks: dict[str, dict[str, int]] = {COMPUTE: {COMPUTE: 0}}  # of streams that are part of the recording
        self.events: dict[str, dict[str, int]] = {}
        self.uses: dict[str, list[tuple[int, Span, bool, str]]] = {}  # by stream: when, what, a write?, of what

    def step(self, done: Operation) -> str | None:
        if done.kind == "read":
            return f"the host reads {done.name}, which it does not when a graph is replayed"
        if done.kind == "wait":
            if done.name not in self.events:
                return f"{done.stream} waits for {done.name}, which has not been recorded"
            clock = self.clocks.setdefault(done.stream, {done.stream: 0})
            for stream, at in self.events[done.name].items():
                clock[stream] = max(clock.get(stream, 0), at)
            return None
        if done.stream not in self.clocks:
            return f"{done.name}: {done.stream} has not been forked from the compute stream"
        clock = self.clocks[done.stream]
        if done.kind == "record":
            self.events[done.name] = dict(clock)
            return None
        clock[done.stream] += 1
        if done.kind == "take":
            (memory,) = done.writes
            if not (self.pool[0] <= memory[0] and memory[1] <= self.pool[1]):
                return "memory is taken that is not the pool's"
            if any(memory[0] < b and a < memory[1] for a, b in self.taken):
                return "memory is taken that has not been given back"
            self.taken.append(memory)
        return self._use(done, clock)

    def _use(self, done: Operation, clock: dict[str, int]) -> str | None:
        for memory, write in [(m, False) for m in done.reads] + [(m, True) for m in done.writes]:
            if not self._is_there(memory):
                return f"{done.name} uses memory that is neither taken from the pool nor there before the recording"
            for stream, uses in self.uses.items():
                if stream == done.stream:
                    continue
                known = clock.get(stream, 0)
                for at, other, wrote, name in reversed(uses):
                    if at <= known:
                        break
                    if (write or wrote) and memory[0] < other[1] and other[0] < memory[1]:
                        return f"{done.name} and {name} use the same memory, and neither waits for the other"
            self.uses.setdefault(done.stream, []).append((clock[done.stream], memory, write, done.name))
        if done.kind == "give":
            if done.writes[0] not in self.taken:
                return "memory is given back that was not taken"
            self.taken.remove(done.writes[0])
        return None

    def _is_there(self, memory: Span) -> bool:
        if self.pool[0] <= memory[0] and memory[1] <= self.pool[1]:
            return any(a <= memory[0] and memory[1] <= b for a, b in self.taken)
        i = bisect_right(self.starts, memory[0]) - 1
        return i >= 0 and memory[1] <= self.there[i][1]

    def end(self) -> str | None:
        for stream, clock in self.clocks.items():
            if self.clocks[COMPUTE].get(stream, 0) < clock[stream]:
                return f"{stream} is not joined: it has work that nothing on the compute stream waits for"
        return "memory is not given back" if self.taken else None


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for a, b in sorted(spans):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        elif a < b:
            found.append((a, b))
    return found


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
        """The block that lies where this tensor does; its bytes."""
        where = tensor.storage_offset() * tensor.element_size()
        b = next(b for b in self._there if self._at[b] <= where < self._at[b] + self.blocks[b].nbytes)
        self._moved[id(block)] = b
        block.storage, block.bytes = tensor.untyped_storage(), self._bytes(b)
        return block.bytes.nbytes

    def take(self, block: Block) -> None:
        """The block gets its next place, and all tensors of it are views of that place."""
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
        """The block's place is free."""
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
        if isinstance(out, slice):
            assert node is not None
            result = list(result)
            places = [(i, self._settle(out.start + i, result[i])) for i in self.calls.items[node]
                      if self._is_new(result[i])]  # fmt: skip
            for i, place in places:
                result[i] = place
            if places:
                self._record(name, node, function, args, options, places)
        elif node is None:  # memory whose content does not matter
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
