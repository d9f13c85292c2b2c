"""Lifetimes of blocks in device memory: the input of every allocator.

Time is logical (operation index of "Efficient Memory Management for GPU-based Deep Learning Systems", section III): it
counts mallocs and frees in order; ``Lifetimes.time_ns`` gives the wall time of each event. Iterations repeat, so time
is a circle of ``period`` events. Blocks are

- tensors, from the start of the kernel that first writes (or swaps in or recomputes) them until the end of their last
  use, their drop, or the end of their swap-out. A tensor that crosses the iteration boundary is one block that ends in
  the next iteration; a persistent tensor that is never swapped fills the circle;
- workspaces during their kernel, and intermediate outputs of recomputations.
"""
# An executor of a packing must make each malloc wait for earlier frees at the same addresses (README.md says why).

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.compiled.encoding import NEVER, Ints
from simulator.program import Program
from simulator.timeline import Timeline


@dataclass(frozen=True)
class Intervals:
    """n blocks, each holding its bytes over the half-open interval [lower, upper)."""

    lower: Ints  # [n], 0 <= lower < period
    upper: Ints  # [n], lower < upper <= lower + period; beyond ``period`` if it stays into the next iteration
    nbytes: Ints  # [n]
    period: int = NEVER  # length of the circle; NEVER if time does not repeat

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def peak_bytes(self) -> int:
        """Peak load: maximum bytes held at once, a lower bound on every footprint (omega of section III-B)."""
        wraps = self.upper > self.period
        frees = np.where(wraps, self.upper - self.period, self.upper)
        times = np.concatenate((frees, self.lower))
        changes = np.concatenate((-self.nbytes, self.nbytes))  # frees first: half-open
        load = np.cumsum(changes[np.argsort(times, kind="stable")])
        return int(self.nbytes[wraps].sum() + load.max(initial=0))

    def rounded(self, alignment: int) -> Intervals:
        """Returns the same blocks with sizes rounded up to a multiple of ``alignment``; raises ValueError below 1."""
        if alignment < 1:
            raise ValueError(f"alignment: expected at least 1, got {alignment}")
        return Intervals(self.lower, self.upper, -(-self.nbytes // alignment) * alignment, self.period)

    def above_permanent(self) -> tuple[Intervals, Ints, Ints, int]:
        """Places permanent blocks at the bottom of memory.

        This makes no packing worse, since they overlap in time with every other block.

        Returns:
            The m temporary blocks of nonzero size; int64[m], their indices; int64[n], offsets of the permanent blocks
            (0 for others); and the bytes of the permanent blocks.
        """
        permanent = self.upper - self.lower == self.period
        sizes = np.where(permanent, self.nbytes, 0)
        index = np.flatnonzero(~permanent & (self.nbytes > 0))
        blocks = Intervals(self.lower[index], self.upper[index], self.nbytes[index], self.period)
        return blocks, index, np.where(permanent, np.cumsum(sizes) - sizes, 0), int(sizes.sum())

    def unrolled(self, iterations: int) -> tuple[Intervals, Ints]:
        """Returns the blocks of several iterations on a line, for allocators that do not know that time repeats.

        Permanent blocks become one block. Blocks that cross a boundary also exist at the start, and the last iteration
        ends those it still holds.

        Returns:
            The m blocks by ascending ``lower``, and int64[m], the index of each in this object.

        Raises:
            ValueError: time does not repeat.
        """
        if self.period == NEVER:
            raise ValueError("expected blocks on a circle: blocks on a line cannot be unrolled")
        end = iterations * self.period
        is_permanent = self.upper - self.lower == self.period
        source = [np.flatnonzero(is_permanent)]
        lower = [np.zeros_like(source[0])]
        upper = [np.full_like(source[0], end)]
        for shift in range(-self.period, end, self.period):
            indices = np.flatnonzero(~is_permanent & (self.upper + shift > 0))
            lower.append(np.maximum(self.lower[indices] + shift, 0))
            upper.append(np.minimum(self.upper[indices] + shift, end))
            source.append(indices)
        order = np.argsort(np.concatenate(lower), kind="stable")
        index = np.concatenate(source)[order]
        return Intervals(np.concatenate(lower)[order], np.concatenate(upper)[order], self.nbytes[index]), index


@dataclass(frozen=True)
class Packing:
    """Offsets of the blocks of an ``Intervals``, with the cost of computing them."""

    offsets: Ints  # [n], first byte of each block
    footprint: int  # bytes from 0 to the highest end of a block
    proven: bool = False  # whether the footprint is proven minimal
    steps: int = 0  # list or table entries that all mallocs and frees visit
    driver_mallocs: int = 0  # cudaMalloc calls
    driver_frees: int = 0  # cudaFree calls

    def ratio(self, intervals: Intervals) -> float:
        """Returns the competitive ratio: the footprint over the peak load of the blocks; 1 without blocks."""
        return self.footprint / intervals.peak_bytes if self.footprint else 1.0


def overlap(intervals: Intervals, offsets: Ints) -> tuple[int, int] | None:
    """Returns a pair of blocks (i < j) that share a byte while both are live, or None; O(n log n) comparisons.

    Sweeps over time with live blocks sorted by address. As long as no two of them overlap, a new block that overlaps
    any of them overlaps one of its two neighbors.
    """
    lower = intervals.lower.tolist()
    upper = intervals.upper.tolist()
    offset = offsets.tolist()
    ends = (offsets + intervals.nbytes).tolist()
    events: list[tuple[int, int, int]] = []  # time, 0 for a free or 1 for a malloc, block
    for i in (i for i in range(len(intervals)) if offset[i] < ends[i]):  # empty blocks cannot overlap
        events += [(lower[i], 1, i), (min(upper[i], intervals.period), 0, i)]
        if upper[i] > intervals.period:  # the part beyond the period wraps to the start of the circle
            events += [(0, 1, i), (upper[i] - intervals.period, 0, i)]
    live: list[tuple[int, int]] = []  # (offset, block), ascending
    for _, malloc, i in sorted(events):
        block = (offset[i], i)
        if not malloc:
            del live[bisect(live, block) - 1]
            continue
        position = bisect(live, block)
        for _, j in live[max(position - 1, 0) : position + 1]:
            if max(offset[i], offset[j]) < min(ends[i], ends[j]):
                return min(i, j), max(i, j)
        insort(live, block)
    return None


@dataclass(frozen=True)
class Lifetimes:
    """Blocks of one iteration in malloc order, with their owners."""

    intervals: Intervals  # n blocks; blocks of zero bytes are omitted
    owner: Ints  # [n], the tensor, or -1 - k for the workspace of kernel k
    block: Ints  # [n], the schedule's block (simulator.schedule); for a program, an index of its own
    time_ns: Ints  # [period], time of each event since the start of the iteration

    def addresses(self, packing: Packing) -> dict[int, dict[int, int]]:
        """Returns an executor's address table (SmartPool, section V): event -> owner -> offset, for every malloc."""
        table: dict[int, dict[int, int]] = {}
        for event, owner, offset in zip(self.intervals.lower, self.owner, packing.offsets, strict=True):
            table.setdefault(int(event), {})[int(owner)] = int(offset)
        return table


def program_lifetimes(program: Program) -> Lifetimes:
    """Returns the blocks of a program with unlimited memory; event k is the start of kernel k."""
    n = len(program.kernels)
    blocks = []
    for t, tensor in enumerate(program.tensors):
        uses = program.accesses[t]
        if tensor.persistent:
            blocks.append((0, n, tensor.nbytes, t, t))
        elif uses:
            blocks.append((uses[0], uses[-1] + 1, tensor.nbytes, t, t))
    count = len(program.tensors)
    blocks += [(k, k + 1, kernel.workspace, -1 - k, count + k) for k, kernel in enumerate(program.kernels)]
    return _lifetimes(blocks, n, program.start_ns[:-1])


def timeline_lifetimes(timeline: Timeline) -> Lifetimes:
    """Returns the blocks of the last iteration of a timeline, assumed to repeat.

    Mallocs at the same instant are one event, as are frees.

    Raises:
        ValueError: the timeline has only one iteration.
    """
    if len(timeline.boundaries) < 2:
        raise ValueError("timeline: expected at least two iterations, because the first is not in the steady state")
    times: list[int] = []
    begin = 0
    previous = (-1, False)
    starts: dict[int, int] = {}  # block in memory -> event of its malloc
    owner: dict[int, int] = {}
    nbytes: dict[int, int] = {}
    freed: list[tuple[int, int, int]] = []  # (block, from, to) of blocks freed in the last iteration
    for i, event in enumerate(timeline.events):
        if i == timeline.events_until[-2]:
            begin = len(times)
            previous = (-1, False)
        current = (event.time_ns, event.nbytes > 0)
        if current != previous:
            times.append(event.time_ns)
        previous = current
        index = len(times) - 1
        if event.nbytes > 0:
            starts[event.block] = index
            owner[event.block] = event.owner
            nbytes[event.block] = event.nbytes
        elif i < timeline.events_until[-2]:
            del starts[event.block]
        else:
            freed.append((event.block, starts.pop(event.block), index))
    if len(times) == begin:  # no mallocs or frees
        times.append(timeline.last_start_ns)
    period = len(times) - begin
    blocks = []
    for block, lower, upper in freed:
        if lower < begin and block in starts:  # crosses the boundary: merged with the block present at the end
            lower = starts.pop(block)
            upper = upper + period
        blocks.append((max(lower - begin, 0), upper - begin, nbytes[block], owner[block], block))
    blocks += [(max(lower - begin, 0), period, nbytes[block], owner[block], block) for block, lower in starts.items()]
    return _lifetimes(blocks, period, [t - timeline.last_start_ns for t in times[begin:]])


def _lifetimes(blocks: list[tuple[int, int, int, int, int]], period: int, times: Sequence[int]) -> Lifetimes:
    """Builds Lifetimes from (lower, upper, bytes, owner, index) per block."""
    table = np.array(sorted(b for b in blocks if b[2]), np.int64).reshape(-1, 5)
    lower, upper, nbytes, owner, index = np.ascontiguousarray(table.T)
    return Lifetimes(Intervals(lower, upper, nbytes, period), owner, index, np.array(times, np.int64))
