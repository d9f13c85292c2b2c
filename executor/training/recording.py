"""An iteration as a list of operations at fixed addresses, as a CUDA graph captures one; checked, then replayed.

``Recording`` takes down kernels, and as copy engines (storage.py) what these do with streams and events; each operation
is done, too. ``illegal`` says what CUDA would not capture, or would replay wrongly:

1. a number that the host reads: the host does not run when a graph is replayed;
2. work on a stream that has not been forked from the compute stream by an event, or that is not joined at the end;
3. a wait for an event that was not recorded before it in the same recording;
4. memory that is neither the pool's, taken at that time, nor there before the recording (an allocation);
5. two uses of one memory, one of them a write, on two streams in no order. To take memory counts as a write.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from executor.training.engines import Bytes, TransferError, move

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

    def kernel(
        self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor], again: Callable[[], object]
    ) -> None:  # fmt: skip
        reads, writes = list(reads), list(writes)
        self._keep += reads + writes
        self._add("kernel", COMPUTE, name, reads, writes, again)

    def also_writes(self, place: Tensor) -> None:
        """The last kernel that was recorded does."""
        at = max(i for i, done in enumerate(self.operations) if done.kind == "kernel")
        last = self.operations[at]
        self.operations[at] = last._replace(writes=(*last.writes, *_spans([place])))

    def take(self, memory: Span) -> None:
        self.operations.append(Operation("take", COMPUTE, "memory that is taken", (), (memory,)))

    def give(self, memory: Span, again: Callable[[], object]) -> None:
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
        raise TransferError("a recording has its own batch")

    def event(self) -> object:
        return object()

    def begin(self) -> None:
        pass

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
