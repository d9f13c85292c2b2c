"""The memory of a CUDA graph: an arena out of which PyTorch's allocator serves the capture; and the stream of that.

    need = need_of(intervals)                       # what the allocator will want, by a model of it
    pool = GraphPool(device, need)
    with pool.capturing(graph, sides):              # sides: streams that copies are on
        ...                                         # allocations of this stream come out of the arena
    pool.close()

PyTorch asks for segments, not for tensors, so tensors are not at packed addresses. But the arena is first taken as one
segment and given back, which leaves the pool one free block of that size: what follows is cut from it, best fit, as
``simulator.pool.online.caching`` models. An operator that wants more than is left raises, and nothing grows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor.memory import ALIGNMENT, cuda_index
from executor.memory.engines import capture_stream
from executor.memory.segments import Segments, allocator
from simulator.pool import smartpool
from simulator.pool.intervals import Intervals
from simulator.pool.online import caching

_BROKEN: list[Any] = []  # graphs whose capture did not end: PyTorch's allocator of pinned memory still asks them
SLACK, LEAST_SLACK = 1 / 16, 32 * 2**20  # for what operators take beside the program's workspaces
PAGE = caching.ROUND_LARGE


@dataclass(frozen=True)
class Need:
    """Bytes of a graph's memory.

    Attributes:
        packed: the packing's footprint.
        first: the segment that the pool begins with.
        reserved: all segments that PyTorch's allocator asks for, by the model.
        arena: what it may have, ``reserved`` and the slack.
    """

    packed: int
    first: int
    reserved: int
    arena: int


def need_of(intervals: Intervals) -> Need:
    """Of stays on the device, on a line (executor.training.issue_order.stays)."""
    first, reserved = caching.first_segment(intervals)
    arena = reserved + -(-max(LEAST_SLACK, int(SLACK * reserved)) // PAGE) * PAGE
    return Need(smartpool.pack(intervals, ALIGNMENT).footprint, first, reserved, arena)


class GraphPool:
    """An arena and a pool that is served from it.

    Attributes:
        need: the figures.
        arena: see executor.memory.segments.

    Raises:
        MemoryError: the device has not so much.
    """

    def __init__(self, device: torch.device, need: Need):
        self.need = need
        self.device = torch.device("cuda", cuda_index(device))
        self._stream = capture_stream(self.device.index)
        self.arena = Segments.on_device(self.device, need.arena)
        try:
            with torch.cuda.device(self.device):
                self._pool: Any = torch.cuda.MemPool(allocator())
        except BaseException:
            self.arena.close()
            raise

    @contextlib.contextmanager
    def capturing(self, graph: Any, sides: Sequence[Any]) -> Iterator[None]:
        """What is issued is captured.

        Args:
            graph: a ``torch.cuda.CUDAGraph``, its generators registered.
            sides: streams on which there may be work that nothing has waited for when it fails half way.

        Raises:
            whatever is raised within; of the end of a capture that failed, only the first error.
        """
        with torch.cuda.device(self.device), self.arena.open():
            before = torch.cuda.current_stream()
            failed: BaseException | None = None
            try:
                self._fill()
                with torch.cuda.graph(
                    graph, pool=self._pool.id, stream=self._stream, capture_error_mode="thread_local"
                ):
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
            torch._C._cuda_endAllocateToPool(index, self._pool.id)
        except RuntimeError:  # it has ended
            return
        torch._C._cuda_releasePool(index, self._pool.id)
        graph.reset()
        _BROKEN.append(graph)
        with contextlib.suppress(RuntimeError):
            one = torch.ones(1, device=self.device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
                one.zero_()  # a capture that ends well gives the generator back

    def _fill(self) -> None:
        """The pool gets its first segment, whole and free. It belongs to the stream that asked, so this one asks."""
        with torch.cuda.stream(self._stream):
            ones = torch.ones(16, 16, device=self.device)
            torch.addmm(ones[0], ones, ones @ ones)  # cuBLAS's workspace for this stream is not to be the pool's
            if self.need.first:
                with torch.cuda.use_mem_pool(self._pool):
                    torch.empty(self.need.first, dtype=torch.uint8, device=self.device)

    def _join(self, sides: Sequence[Any]) -> None:
        for side in sides:
            with torch.cuda.stream(side):
                forked = torch.cuda.is_current_stream_capturing()
            if forked:
                self._stream.wait_stream(side)

    def allocated(self) -> int:
        """Bytes that tensors have in it now; PyTorch counts no more of it as in use."""
        return sum(segment["allocated_size"] for segment in torch.cuda.memory_snapshot(self._pool.id))

    def close(self) -> None:
        """After the graph is gone: the device has its memory back."""
        self._pool = None  # which gives its segments back to the arena
        self.arena.close()
