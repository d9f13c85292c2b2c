"""Who holds how many bytes from when to when: what every allocator starts from.

Time is logical, as in SmartPool (the operation index of "Efficient Memory Management for GPU-based Deep Learning
Systems", section III): it counts mallocs and frees in the order in which they happen. To pack blocks only
their order matters, and two events at one nanosecond have an order, too (simulator rule 9), which is what keeps
kernels without a duration apart. ``Lifetimes.time_ns`` says when each event was.

A block is one stay in device memory:

- a tensor, from the start of the kernel that writes it first (or of its swap-in, or of the step that recomputes
  it) until it is freed at the end of its last use, dropped, released because its host copy is valid, or until its
  swap-out completes. A tensor that left comes back as another block, at another address;
- a workspace, while its kernel or recomputation step runs;
- what a recomputation chain writes on the way, in memory of its own.

Iterations repeat, so that time is a circle of ``period`` events: a tensor that stays over the iteration boundary
is one block that ends in the next iteration, and a persistent tensor that never leaves fills the circle.

Addresses hold the stream order of a timeline together only if whoever runs it makes a malloc wait for the frees
before it at the same addresses; a copy that takes longer than simulated would otherwise be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.compiled.encoding import NEVER, Ints
from simulator.plan import Decision, Plan, Recompute
from simulator.program import Program
from simulator.reference import present
from simulator.timeline import Span, Timeline


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
        time_ns: int64[period], when each event of the iteration was, from its start.
    """

    intervals: Intervals
    owner: Ints
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
            blocks.append((0, n, tensor.nbytes, t))
        elif uses:
            blocks.append((uses[0], uses[-1] + 1, tensor.nbytes, t))
    blocks += [(k, k + 1, kernel.workspace, -1 - k) for k, kernel in enumerate(program.kernels)]
    return _lifetimes(blocks, n, program.start_ns[:-1])


def timeline_lifetimes(timeline: Timeline, program: Program, plan: Plan) -> Lifetimes:
    """The blocks of the last iteration of a timeline, taken to repeat.

    Args:
        timeline: of at least two iterations, so that the last one starts as it ends.
        program, plan: those that were simulated.

    Raises:
        ValueError: the timeline has one iteration only.
    """
    if len(timeline.boundaries) < 2:
        raise ValueError("timeline: expected at least two iterations; the first has nothing under way at its start")
    walk = _Walk(timeline, program.with_variants(plan.variants), plan)
    begin, held = walk.begin, dict(walk.held)
    period = len(walk.times) - begin
    blocks = []
    for who, lower, upper in walk.freed:
        if lower < begin and who in held:  # it stays over the boundary: one block with what is there at the end
            lower, upper = held.pop(who), upper + period
        blocks.append((max(lower - begin, 0), upper - begin, walk.nbytes(who), who[0]))
    blocks += [(max(lower - begin, 0), period, walk.nbytes(who), who[0]) for who, lower in held.items()]
    return _lifetimes(blocks, period, [t - timeline.last_start_ns for t in walk.times[begin:]])


def _lifetimes(blocks: list[tuple[int, int, int, int]], period: int, times: Sequence[int]) -> Lifetimes:
    """From (lower, upper, bytes, owner) per block."""
    table = np.array(sorted(b for b in blocks if b[2]), np.int64).reshape(-1, 4)
    lower, upper, nbytes, owner = np.ascontiguousarray(table.T)
    return Lifetimes(Intervals(lower, upper, nbytes, period), owner, np.array(times, np.int64))


_Key = tuple[int, bool]  # owner, and whether it is a chain's own memory


class _Walk:
    """Reads the spans of a timeline in order and keeps a book of who is in device memory since when.

    Attributes:
        times: when each event was, in ns. An event is a start that allocates or an end that frees.
        begin: the first event of the last iteration.
        held: who is in memory at the end, and since which event.
        freed: (who, from, to) of those that left in the last iteration.
    """

    def __init__(self, timeline: Timeline, program: Program, plan: Plan):
        self.program = program
        self.times: list[int] = []
        self.begin = 0
        self.freed: list[tuple[_Key, int, int]] = []
        self.opens: dict[int, list[Decision]] = {}
        for d in plan.decisions:
            self.opens.setdefault(d.after, []).append(d)
        first_copy: dict[int, str] = {}
        self.steps: list[list[int]] = [[]]  # kernels run again before each kernel
        for span in timeline.spans:
            if span.stream != "compute":
                first_copy.setdefault(span.index, span.kind)
            elif span.kind == "recompute":
                self.steps[-1].append(span.index)
            else:
                self.steps.append([])
        # Tensors with a valid copy on the host. Those that are there at the start come before they go.
        self.on_host = {t for t, kind in first_copy.items() if kind == "swap_in"}
        self.held: dict[_Key, int] = {
            (t, False): 0 for t, x in enumerate(program.tensors) if x.persistent and t not in self.on_host
        }
        self.dropped: dict[int, Recompute] = {}
        self.last: dict[int, int] = {}  # in the chain under way: its own tensors, and the step after which they go
        self.stay: set[int] = set()  # in the chain under way: dropped tensors that it brings back
        self.position = 0  # kernels that have ended
        self.last_iteration = len(program.kernels) * (len(timeline.boundaries) - 1)
        running: list[Span] = []
        for span in timeline.spans:
            running = self._complete(running, span.start_ns)
            running.append(span)
            self._start(span)
        self._complete(running, timeline.boundaries[-1])

    def nbytes(self, who: _Key) -> int:
        """Bytes of a block."""
        owner = who[0]
        return self.program.tensors[owner].nbytes if owner >= 0 else self.program.kernels[-1 - owner].workspace

    def _complete(self, running: list[Span], now: int) -> list[Span]:
        """Ends what ends until ``now``, copies first (rule 9); returns the rest."""
        for span in sorted((s for s in running if s.end_ns <= now), key=lambda s: (s.end_ns, s.stream == "compute")):
            if span.kind == "swap_out":
                self.on_host.add(span.index)
                self._free((span.index, False))
            elif span.kind == "kernel":
                self._end_kernel(span.index)
            elif span.kind == "recompute":
                self._end_step(span.index)
            self.times.append(span.end_ns)
            if self.position == self.last_iteration and span.kind == "kernel":
                self.begin = len(self.times)
        return [s for s in running if s.end_ns > now]

    def _start(self, span: Span) -> None:
        kernel = self.program.kernels[span.index] if span.stream == "compute" else None
        if span.kind == "swap_in":
            new = [(span.index, False)]
        elif kernel is None:
            return
        elif span.kind == "kernel":
            new = [(t, False) for t in kernel.outputs if not self.program.tensors[t].persistent]
        else:
            if not self.last:
                self._open_remat()
            new = [(t, True) for t in kernel.outputs]
        if kernel is not None:
            new.append((-1 - span.index, False))
        for who in new:
            self.held.setdefault(who, len(self.times))
        self.times.append(span.start_ns)

    def _free(self, who: _Key) -> None:
        since = self.held.pop(who)
        if self.position >= self.last_iteration:
            self.freed.append((who, since, len(self.times)))

    def _end_kernel(self, k: int) -> None:
        kernel, tensors, uses = self.program.kernels[k], self.program.tensors, self.program.accesses
        self._free((-1 - k, False))
        for t in kernel.accesses:
            if not tensors[t].persistent and uses[t][-1] == k:
                self._free((t, False))
        self.on_host.difference_update(kernel.outputs)
        for d in self.opens.get(k, ()):
            if isinstance(d, Recompute):
                self.dropped[d.tensor] = d
            if isinstance(d, Recompute) or d.tensor in self.on_host:
                self._free((d.tensor, False))
        self.position += 1

    def _open_remat(self) -> None:
        """Rule 7: what the chain of the next kernel holds of its own, for how long, and what stays."""
        k = self.position % len(self.program.kernels)
        rerun = set(self.steps[self.position])
        writes = self.program.writes
        for w in sorted(rerun):
            own = [x for x in self.program.kernels[w].inputs if not present(self.program, x, w, k, self.dropped.keys())]
            self.last |= dict.fromkeys([*self.program.kernels[w].outputs, *own], w)
        self.stay = self.dropped.keys() & self.program.kernels[k].accesses
        if any(self.dropped[t].keep for t in self.stay):
            self.stay |= {t for t in self.dropped if rerun.issuperset(u for u in writes[t] if u < k)}

    def _end_step(self, w: int) -> None:
        self._free((-1 - w, False))
        for t in [t for t, step in self.last.items() if step == w and t not in self.stay]:
            self._free((t, True))
        if w == self.steps[self.position][-1]:
            for t in self.stay:
                self.held[t, False] = self.held.pop((t, True))
                del self.dropped[t]
            self.last = {}
