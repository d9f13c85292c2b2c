"""The memory of a CUDA graph: one pool for each operator, and the stream on which the graph is captured.

    memory = GraphMemory(device, Arena.aliased(device, nbytes))
    with memory.arena.serving(), memory.recorded() as events:
        with memory.capturing(graph, sides):    # sides: streams that copies are on
            with memory.pool():                 # allocations within are requests to the arena
                ...                             # one operator
    found = requests_of(events, memory)

A pool that does not split its segments asks the arena for each tensor and each workspace, with sizes that are rounded
up to 2 MiB and more. PyTorch's own record of its allocations has the exact sizes, and when each was freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from executor.memory import cuda_index
from executor.memory.addresses import Arena, allocator, served
from executor.memory.engines import capture_stream
from simulator.compiled.encoding import Ints

_BROKEN: list[Any] = []  # graphs whose capture did not end: PyTorch's allocator of pinned memory still asks them
_OUTLIVED: list[Any] = []  # allocators whose pools had tensors when their graph was closed


class Event(NamedTuple):
    """An entry of PyTorch's record of allocations.

    Attributes:
        allocates: an allocation, else a free.
        address: of the block.
        nbytes: as asked for.
    """

    allocates: bool
    address: int
    nbytes: int


@dataclass(frozen=True)
class Requests:
    """The n requests of a capture, in their order. Time counts the events of PyTorch's record.

    Attributes:
        served: int64[n, 2], bytes of the segment that PyTorch asked for, and its address.
        nbytes: int64[n], the largest block that was there.
        begin, end: int64[n], when the request is made, and when its memory may be used for others.
        length: events in all, which is the end of what was not freed.
        group: int64[n], the first of the requests with which it may change places (``requests_of``).
    """

    served: Ints
    nbytes: Ints
    begin: Ints
    end: Ints
    length: int
    group: Ints


class RecordError(RuntimeError):
    """PyTorch's record of allocations is not that of the capture."""


def requests_of(events: Sequence[Event], memory: GraphMemory) -> Requests:
    """What a capture has asked for.

    Raises:
        RecordError: the record lacks allocations, or one operator got the memory of another's pool.
    """
    index = {int(address): i for i, address in enumerate(memory.served[:, 1])}
    n = len(index)
    nbytes, begin, end = np.zeros(n, np.int64), np.full(n, -1), np.full(n, len(events))
    last = np.full(n, -1)  # allocation
    for at, event in enumerate(events):
        i = index[event.address]
        if event.allocates:
            begin[i] = at if begin[i] < 0 else begin[i]
            last[i], nbytes[i], end[i] = at, max(nbytes[i], event.nbytes), len(events)
        else:
            end[i] = at
    if n and begin.min() < 0:
        raise RecordError(f"PyTorch's record of allocations lacks {(begin < 0).sum()} of {n}")
    # Until an operator has made its last request, its pool may use what it has freed again. Of free segments of one
    # size it takes the lowest, which is another one in another capture: they get the same bytes and the same time.
    group = np.arange(n)
    for first, behind in memory.operators:
        if behind > first:
            own = np.arange(first, behind)
            if behind < n and last[own].max() > begin[behind]:
                raise RecordError(f"pools do not nest in a capture of PyTorch {torch.__version__}")
            end[own] = np.maximum(end[own], last[own].max() + 1)
            for size in set(memory.served[own, 0].tolist()):
                same = own[memory.served[own, 0] == size]
                if len(same) > 1 and (last[same] > begin[same]).any():  # it has used one again
                    group[same] = same[0]
                    begin[same], end[same], nbytes[same] = begin[same].min(), end[same].max(), nbytes[same].max()
    return Requests(memory.served, nbytes, begin, end, len(events), group)


class GraphMemory:
    """An arena, and pools that are served from it.

    Attributes:
        operators: of each pool, its first request and the one behind its last.
        served: int64[n, 2], as in ``Requests``; of a capture that is over.
    """

    def __init__(self, device: torch.device, arena: Arena):
        self.device, self.arena = torch.device("cuda", cuda_index(device)), arena
        self.stream = capture_stream(self.device.index)
        self.operators: list[tuple[int, int]] = []
        self.served = np.zeros((0, 2), np.int64)
        self._pools: list[Any] = []
        self._allocators: list[Any] = []
        self._rest = self._pool()

    def _pool(self) -> Any:
        self._allocators.append(allocator())
        with torch.cuda.device(self.device):
            self._pools.append(torch.cuda.MemPool(self._allocators[-1], no_split=True))
        return self._pools[-1]

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        """Allocations within are one operator's. Its pool stays until ``close``: PyTorch aborts the process if one is
        released during a capture."""
        first = len(served())
        with torch.cuda.use_mem_pool(self._pool(), self.device):
            yield
        self.operators.append((first, len(served())))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Yields the record of allocations, which is filled in at the end. A record that the caller has switched on
        goes on."""
        events: list[Event] = []
        on = torch._C._cuda_isHistoryEnabled()
        if not on:
            torch.cuda.memory._record_memory_history(context=None, stacks="python")
        try:
            before = len(self._trace())
            yield events
            low, high = self.arena.base, self.arena.base + self.arena.nbytes
            actions = {"alloc": True, "free_requested": False}
            events += [
                Event(actions[entry["action"]], entry["addr"], entry["size"])
                for entry in self._trace()[before:]
                if entry["action"] in actions and low <= entry["addr"] < high
            ]
            self.served = served()
        finally:
            if not on:
                torch.cuda.memory._record_memory_history(None)

    def _trace(self) -> list[dict[str, Any]]:
        return torch.cuda.memory._snapshot()["device_traces"][self.device.index]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def capturing(self, graph: Any, sides: Sequence[Any]) -> Iterator[None]:
        """What is issued is captured.

        Args:
            graph: a ``torch.cuda.CUDAGraph``, its generators registered.
            sides: streams on which there may be work that nothing has waited for when it fails half way.

        Raises:
            whatever is raised within; of the end of a capture that failed, only the first error.
        """
        with torch.cuda.device(self.device):
            before = torch.cuda.current_stream()
            failed: BaseException | None = None
            try:
                with torch.cuda.graph(graph, pool=self._rest.id, stream=self.stream, capture_error_mode="thread_local"):
                    try:
                        yield
                    except BaseException as error:
                        failed = error
                        self._join(sides)  # or the capture could not end, and PyTorch would go on as if within it
                        raise
            except BaseException as error:
                torch.cuda.set_stream(before)  # where capture_end fails, torch.cuda.graph leaves its stream current
                self._end(graph)
                if failed is None or failed is error:
                    raise
                error.__context__ = None  # or both, in a circle, and their frames would hold the tensors of the capture
                raise failed from error.with_traceback(None)
            finally:
                failed = None  # and so would this frame

    def _end(self, graph: Any) -> None:
        """Ends what a capture that failed has begun, where it has not: CUDAGraph::capture_end raises before it does.

        Else PyTorch's allocator would go on as if within the capture (no memory used by two streams comes back, nothing
        is tried again where memory is short), the pool would never be free, and of versions before 2.12 the generator
        would draw for the graph.
        """
        index = self.device.index
        try:
            torch._C._cuda_endAllocateToPool(index, self._rest.id)
        except RuntimeError:  # it has ended
            return
        torch._C._cuda_releasePool(index, self._rest.id)
        graph.reset()
        _BROKEN.append(graph)
        with contextlib.suppress(RuntimeError):
            one = torch.ones(1, device=self.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
                one.zero_()  # a capture that ends well gives the generator back

    def _join(self, sides: Sequence[Any]) -> None:
        for side in sides:
            with torch.cuda.stream(side):
                forked = torch.cuda.is_current_stream_capturing()
            if forked:
                self.stream.wait_stream(side)

    def counted_bytes(self) -> int:
        """Bytes that PyTorch's allocator counts as in use in the pools; it rounds them up to whole segments."""
        own = {pool.id for pool in self._pools}
        segments = torch.cuda.memory_snapshot()
        return sum(s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) in own)

    def close(self) -> None:
        """Gives the memory back, once the graph is gone."""
        self._rest = None
        self._pools.clear()  # which gives their segments back to the arena
        if self.arena.live:
            _OUTLIVED.extend(self._allocators)
        self.arena.close()


@cache
def libraries_bytes(index: int) -> int:
    """Bytes of the workspaces that cuBLAS keeps for a device's capture stream, which this makes."""
    before = torch.cuda.memory_stats(index)["allocated_bytes.all.current"]
    with torch.cuda.device(index), torch.cuda.stream(capture_stream(index)):
        ones = torch.ones(16, 16, device=torch.device("cuda", index))
        torch.addmm(ones[0], ones, ones @ ones)
        del ones
    return int(torch.cuda.memory_stats(index)["allocated_bytes.all.current"] - before)
