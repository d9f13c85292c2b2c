"""Memory of a CUDA graph: one pool per operator, and the stream on which the graph is captured.

    memory = GraphMemory(device, Arena.aliased(device, nbytes))
    with memory.arena.serving(), memory.recording() as events:
        with memory.capturing(graph, streams):  # streams: the copy streams
            with memory.pool():                 # the arena serves all allocations within
                ...                             # one operator
    found = requests_of(events, memory)

A pool that does not split its segments requests each tensor and workspace from the arena, rounded up to 2 MiB or more.
PyTorch's allocation history provides the exact sizes and the time of each free.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from executor.memory import cuda_index
from executor.memory.addresses import Arena, Driver, allocator, served
from executor.memory.engines import own_stream
from simulator.compiled.encoding import Ints

_BROKEN_GRAPHS: list[Any] = []  # graphs whose capture did not end: PyTorch's pinned-memory allocator still queries them
_OUTLIVED_ALLOCATORS: list[Any] = []  # allocators whose pools still had tensors when their graph was closed


class Event(NamedTuple):
    """Entry of PyTorch's allocation history.

    Attributes:
        allocates: True for an allocation, False for a free.
        address: address of the block.
        nbytes: requested bytes, before rounding.
    """

    allocates: bool
    address: int
    nbytes: int


@dataclass(frozen=True)
class Requests:
    """The n requests of a capture in order; time is the index of an event in PyTorch's allocation history.

    Attributes:
        served: int64[n, 2], bytes of the segment that PyTorch requested, and its address.
        nbytes: int64[n], size of the largest block in the segment.
        begin, end: int64[n], time of the request, and time from which its memory can be reused.
        length: number of events, and so the end of requests that were not freed.
        group: int64[n], first of the requests with which the request may exchange its memory (``requests_of``).
    """

    served: Ints
    nbytes: Ints
    begin: Ints
    end: Ints
    length: int
    group: Ints


class RecordError(RuntimeError):
    """Raised if PyTorch's allocation history does not match the capture."""


def requests_of(events: Sequence[Event], memory: GraphMemory) -> Requests:
    """Returns the memory requests of a capture.

    Args:
        events: allocation history of the capture (``GraphMemory.recording``).
        memory: the memory that served the capture.

    Returns:
        requests with bytes and the positions of their events.

    Raises:
        RecordError: the history lacks allocations, or an operator was served from another operator's pool.
    """
    index = {int(address): i for i, address in enumerate(memory.served[:, 1])}
    n = len(index)
    nbytes = np.zeros(n, np.int64)
    begin = np.full(n, -1)
    end = np.full(n, len(events))
    last_allocation = np.full(n, -1)
    for time, event in enumerate(events):
        i = index[event.address]
        if event.allocates:
            begin[i] = time if begin[i] < 0 else begin[i]
            last_allocation[i] = time
            nbytes[i] = max(nbytes[i], event.nbytes)
            end[i] = len(events)
        else:
            end[i] = time
    if n and begin.min() < 0:
        raise RecordError(
            f"PyTorch's allocation history lacks {(begin < 0).sum()} of {n} requests; report it, and set graph=False"
        )
    # Until an operator's last request, its pool may reuse freed segments. Of equally large ones it takes the lowest
    # address, which differs between captures, so such segments get the same bytes and the same lifetime.
    group = np.arange(n)
    for first, stop in memory.operators:
        if stop > first:
            members = np.arange(first, stop)
            if stop < n and last_allocation[members].max() > begin[stop]:
                raise RecordError(f"pools do not nest in a capture of PyTorch {torch.__version__}: set graph=False")
            end[members] = np.maximum(end[members], last_allocation[members].max() + 1)
            for size in set(memory.served[members, 0].tolist()):
                peers = members[memory.served[members, 0] == size]
                if len(peers) > 1 and (last_allocation[peers] > begin[peers]).any():  # a segment was reused
                    group[peers] = peers[0]
                    begin[peers] = begin[peers].min()
                    end[peers] = end[peers].max()
                    nbytes[peers] = nbytes[peers].max()
    return Requests(memory.served, nbytes, begin, end, len(events), group)


class GraphMemory:
    """An arena and the memory pools that it serves.

    Attributes:
        operators: half-open range of requests (first, end) of each pool.
        served: int64[n, 2] as in ``Requests``, of the last finished capture.
    """

    def __init__(self, device: torch.device, arena: Arena):
        self.device = torch.device("cuda", cuda_index(device))
        self.arena = arena
        self.stream = own_stream(self.device.index, "capture")
        create_workspaces(self.device.index)
        self.operators: list[tuple[int, int]] = []
        self.served = np.zeros((0, 2), np.int64)
        self._pools: list[Any] = []
        self._allocators: list[Any] = []
        self._default_pool = self._pool()

    def _pool(self) -> Any:
        self._allocators.append(allocator())
        with torch.cuda.device(self.device):
            self._pools.append(torch.cuda.MemPool(self._allocators[-1], no_split=True))
        return self._pools[-1]

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        """Serves one operator's allocations from a pool of its own.

        The pool lives until ``close``, because PyTorch aborts the process if a pool is released during a capture.
        """
        first = len(served())
        with torch.cuda.use_mem_pool(self._pool(), self.device):
            yield
        self.operators.append((first, len(served())))

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Yields the list of allocation events, filled in at the end; a history that the caller enabled stays on."""
        events: list[Event] = []
        was_enabled = torch._C._cuda_isHistoryEnabled()
        if not was_enabled:
            torch.cuda.memory._record_memory_history(context=None, stacks="python")
        try:
            # The history may be full, so that new entries take the place of old ones: its length shows nothing.
            begin = max((entry["time_us"] for entry in self._trace()), default=0)
            yield events
            low = self.arena.base
            high = self.arena.base + self.arena.nbytes
            actions = {"alloc": True, "free_requested": False}
            events += [
                Event(actions[entry["action"]], entry["addr"], entry["size"])
                for entry in self._trace()
                if entry["time_us"] >= begin and entry["action"] in actions and low <= entry["addr"] < high
            ]
            self.served = served()
        finally:
            if not was_enabled:
                torch.cuda.memory._record_memory_history(None)

    def _trace(self) -> list[dict[str, Any]]:
        return torch.cuda.memory._snapshot()["device_traces"][self.device.index]

    @contextlib.contextmanager
    def capturing(self, graph: Any, side_streams: Sequence[Any]) -> Iterator[None]:
        """Captures the work issued within the ``with`` block.

        Re-raises errors from within the block; a failure to end a failed capture is suppressed in favor of the first.

        Args:
            graph: ``torch.cuda.CUDAGraph`` with its generators registered.
            side_streams: streams that may have unjoined work if the capture fails.
        """
        with torch.cuda.device(self.device):
            caller_stream = torch.cuda.current_stream()
            block_error: BaseException | None = None
            try:
                with torch.cuda.graph(
                    graph, pool=self._default_pool.id, stream=self.stream, capture_error_mode="thread_local"
                ):
                    try:
                        yield
                    except BaseException as error:
                        block_error = error
                        self._join(side_streams)  # else the capture cannot end, and PyTorch would stay in capture mode
                        raise
            except BaseException as error:
                torch.cuda.set_stream(caller_stream)  # torch.cuda.graph leaves its stream current if capture_end fails
                self._clean_up(graph)
                if block_error is None or block_error is error:
                    raise
                error.__context__ = None  # breaks a reference cycle whose frames would hold the captured tensors
                raise block_error from error.with_traceback(None)
            finally:
                block_error = None  # this frame would hold them, too

    def _clean_up(self, graph: Any) -> None:
        """Cleans up after a failed capture, because CUDAGraph::capture_end raises before it does so.

        Otherwise PyTorch's allocator would stay in capture mode (no reuse of memory shared by two streams, no retry
        after an out-of-memory error), the pool would never be released, and before PyTorch 2.12 the random generator
        would keep drawing for the graph.
        """
        index = self.device.index
        try:
            torch._C._cuda_endAllocateToPool(index, self._default_pool.id)
        except RuntimeError:  # the capture has ended properly
            return
        torch._C._cuda_releasePool(index, self._default_pool.id)
        graph.reset()
        _BROKEN_GRAPHS.append(graph)
        with contextlib.suppress(RuntimeError):
            scratch = torch.ones(1, device=self.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
                scratch.zero_()  # a successful capture resets the generator

    def _join(self, side_streams: Sequence[Any]) -> None:
        for stream in side_streams:
            with torch.cuda.stream(stream):
                forked = torch.cuda.is_current_stream_capturing()
            if forked:
                self.stream.wait_stream(stream)

    def counted_bytes(self) -> int:
        """Returns the bytes in use in the pools by PyTorch's allocator, which rounds up to whole segments."""
        pool_ids = {pool.id for pool in self._pools}
        segments = torch.cuda.memory_snapshot()
        return sum(segment["allocated_size"] for segment in segments if tuple(segment["segment_pool_id"]) in pool_ids)

    def close(self) -> None:
        """Frees the memory; call it after the graph has been released."""
        self._default_pool = None
        self._pools.clear()  # returns their segments to the arena
        if self.arena.live:
            _OUTLIVED_ALLOCATORS.extend(self._allocators)
        self.arena.close()


def instantiate(device: torch.device, graph: Any) -> int:
    """Instantiates a captured graph and uploads it; returns the bytes of device memory that it takes outside the arena.

    They are the difference in free memory, so that allocations of other processes at this moment count, too.
    """
    driver = Driver(device)
    free_before = torch.cuda.mem_get_info(device)[0]
    graph.instantiate()
    stream = own_stream(cuda_index(device), "capture").cuda_stream
    driver("cuGraphUpload", ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(stream))
    return max(0, int(free_before - torch.cuda.mem_get_info(device)[0]))


@cache
def _workspace_pool(index: int) -> Any:
    """Returns the pool of the libraries' workspaces on a device's capture stream.

    Other code may free the workspaces that replays still write (clearCublasWorkspaces, as Inductor's
    graphs do). Their memory then stays in this pool, from which nothing else allocates.
    """
    with torch.cuda.device(index):
        return torch.cuda.MemPool()


def create_workspaces(index: int) -> None:
    """Creates the cuBLAS workspaces of a device's capture stream, if it has none."""
    with torch.cuda.device(index), torch.cuda.stream(own_stream(index, "capture")):
        with torch.cuda.use_mem_pool(_workspace_pool(index)):
            ones = torch.ones(16, 16, device=torch.device("cuda", index))
            torch.addmm(ones[0], ones, ones @ ones)
            del ones


@cache
def libraries_bytes(index: int) -> int:
    """Creates the cuBLAS workspaces of a device's capture stream and returns their bytes."""
    bytes_before = torch.cuda.memory_stats(index)["allocated_bytes.all.current"]
    create_workspaces(index)
    return int(torch.cuda.memory_stats(index)["allocated_bytes.all.current"] - bytes_before)
