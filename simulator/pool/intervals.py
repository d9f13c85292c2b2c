"""Who holds how many bytes from when to when: the input of every allocator.

Time is logical (the operation index of "Efficient Memory Management for GPU-based Deep Learning Systems", section III):
it counts mallocs and frees in the order in which they happen. ``Lifetimes.time_ns`` says when each event was.
Iterations repeat, so time is a circle of ``period`` events. A block is one stay in device memory:
- a tensor, from the start of the kernel that first writes it (or of its swap-in or recomputation) until its last use
  ends, it is dropped, or its swap-out completes. A tensor that stays over the iteration boundary is one block that ends
  in the next iteration; a persistent tensor that is never swapped out fills the circle;
- a workspace, while its kernel runs, and what a recomputation writes on the way.

Whoever runs a packing must make a malloc wait for the frees before it at the same addresses (README.md says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.compiled.encoding import NEVER, Ints
from simulator.program import Program
from simulator.timeline import Timeline


@dataclass(frozen=True)
class Intervals:
    """n blocks, each holding its bytes over the half-open [lower, upper).

    Attributes:
        lower: int64[n], 0 <= lower < period.
        upper: int64[n], lower < upper <= lower + period; beyond ``period`` where the block stays into the next
            iteration.
        nbytes: int64[n].
        period: length of the circle; NEVER where time does not repeat.
    """

    lower: Ints
    upper: Ints
    nbytes: Ints
    period: int = NEVER

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def peak_bytes(self) -> int:
        """Peak load: most bytes held at once, below which no allocator comes (omega of section III-B)."""
        over = self.upper > self.period
        frees = np.where(over, self.upper - self.period, self.upper)
        times = np.concatenate((frees, self.lower))
        changes = np.concatenate((-self.nbytes, self.nbytes))  # frees first: half-open
        held = np.cumsum(changes[np.argsort(times, kind="stable")])
        return int(self.nbytes[over].sum() + held.max(initial=0))

    def rounded(self, alignment: int) -> Intervals:
        """The same blocks, sizes rounded up to a multiple of ``alignment`` bytes; raises ValueError below 1."""
        if alignment < 1:
            raise ValueError(f"alignment: expected at least 1, got {alignment}")
        return Intervals(self.lower, self.upper, -(-self.nbytes // alignment) * alignment, self.period)

    def above_always(self) -> tuple[Intervals, Ints, Ints, int]:
        """What is always held lies at the bottom: it meets every other block, so that none is worse off above it.

        Returns:
            The m blocks of some bytes that come and go, int64[m], which of ours each is, int64[n] the offsets of what
            is always held (0 for the others), and the bytes that it takes.
        """
        always = self.upper - self.lower == self.period
        held = np.where(always, self.nbytes, 0)
        rest = np.flatnonzero(~always & (self.nbytes > 0))
        others = Intervals(self.lower[rest], self.upper[rest], self.nbytes[rest], self.period)
        return others, rest, np.where(always, np.cumsum(held) - held, 0), int(held.sum())

    def unrolled(self, iterations: int) -> tuple[Intervals, Ints]:
        """The blocks of so many iterations on a line, for allocators that do not know that time repeats.

        What fills the circle is one block. What stays over a boundary is there at the start, too, and the last
        iteration ends what it still holds.

        Returns:
            The m blocks by ascending ``lower``, and int64[m], which of ours each one is.

        Raises:
            ValueError: time does not repeat.
        """
        if self.period == NEVER:
            raise ValueError("these blocks are on a line; only a circle can be unrolled")
        end = iterations * self.period
        always = self.upper - self.lower == self.period
        source = [np.flatnonzero(always)]
        lower, upper = [np.zeros_like(source[0])], [np.full_like(source[0], end)]
        for shift in range(-self.period, end, self.period):
            here = np.flatnonzero(~always & (self.upper + shift > 0))
            lower.append(np.maximum(self.lower[here] + shift, 0))
            upper.append(np.minimum(self.upper[here] + shift, end))
            source.append(here)
        order = np.argsort(np.concatenate(lower), kind="stable")
        which = np.concatenate(source)[order]
        return Intervals(np.concatenate(lower)[order], np.concatenate(upper)[order], self.nbytes[which]), which


@dataclass(frozen=True)
class Packing:
    """Where an allocator put the blocks of an ``Intervals``, and what that took.

    Attributes:
        offsets: int64[n], first byte of each block.
        footprint: bytes from 0 to the highest end of a block.
        proven: no packing has a smaller footprint.
        steps: entries of a list or a table that all its mallocs and frees look at.
        driver_mallocs, driver_frees: calls of cudaMalloc and cudaFree.
    """

    offsets: Ints
    footprint: int
    proven: bool = False
    steps: int = 0
    driver_mallocs: int = 0
    driver_frees: int = 0

    def ratio(self, intervals: Intervals) -> float:
        """Competitive ratio: the footprint over the peak load of the blocks; 1 where there are none."""
        return self.footprint / intervals.peak_bytes if self.footprint else 1.0


@dataclass(frozen=True)
class Lifetimes:
    """The blocks of one iteration, in the order of their mallocs, and what they are.

    Attributes:
        intervals: of n blocks; those of zero bytes are left out.
        owner: int64[n], the tensor, or -1 - k for the workspace of kernel k.
        block: int64[n], of which block of the schedule (simulator.schedule) each is a stay; of a program: its own.
        time_ns: int64[period], when each event of the iteration was, from its start.
    """

    intervals: Intervals
    owner: Ints
    block: Ints
    time_ns: Ints

    def addresses(self, packing: Packing) -> dict[int, dict[int, int]]:
        """The table that an executor looks up (SmartPool, section V): event -> owner -> offset, for every malloc."""
        table: dict[int, dict[int, int]] = {}
        for event, who, offset in zip(self.intervals.lower, self.owner, packing.offsets, strict=True):
            table.setdefault(int(event), {})[int(who)] = int(offset)
        return table


def program_lifetimes(program: Program) -> Lifetimes:
    """The blocks of a program with unlimited memory; event k is the start of kernel k."""
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
    """The blocks of the last iteration of a timeline, taken to repeat.

    What one instant takes, or gives back, is one event.

    Raises:
        ValueError: the timeline has one iteration only.
    """
    if len(timeline.boundaries) < 2:
        raise ValueError("timeline: expected at least two iterations; the first has nothing under way at its start")
    times: list[int] = []
    begin, before = 0, (-1, False)
    since: dict[int, int] = {}  # block in memory -> the event that took it
    owner: dict[int, int] = {}
    nbytes: dict[int, int] = {}
    left: list[tuple[int, int, int]] = []  # block, from, to, of those given back in the last iteration
    for i, event in enumerate(timeline.events):
        if i == timeline.events_until[-2]:
            begin, before = len(times), (-1, False)
        here = (event.time_ns, event.nbytes > 0)
        if here != before:
            times.append(event.time_ns)
        before, at = here, len(times) - 1
        if event.nbytes > 0:
            since[event.block], owner[event.block], nbytes[event.block] = at, event.owner, event.nbytes
        elif i < timeline.events_until[-2]:
            del since[event.block]
        else:
            left.append((event.block, since.pop(event.block), at))
    if len(times) == begin:  # nothing comes or goes
        times.append(timeline.last_start_ns)
    period = len(times) - begin
    blocks = []
    for block, lower, upper in left:
        if lower < begin and block in since:  # it stays over the boundary: one block with what is there at the end
            lower, upper = since.pop(block), upper + period
        blocks.append((max(lower - begin, 0), upper - begin, nbytes[block], owner[block], block))
    blocks += [(max(lower - begin, 0), period, nbytes[block], owner[block], block) for block, lower in since.items()]
    return _lifetimes(blocks, period, [t - timeline.last_start_ns for t in times[begin:]])


def _lifetimes(blocks: list[tuple[int, int, int, int, int]], period: int, times: Sequence[int]) -> Lifetimes:
    """From (lower, upper, bytes, owner, index) per block."""
    table = np.array(sorted(b for b in blocks if b[2]), np.int64).reshape(-1, 5)
    lower, upper, nbytes, owner, index = np.ascontiguousarray(table.T)
    return Lifetimes(Intervals(lower, upper, nbytes, period), owner, index, np.array(times, np.int64))
