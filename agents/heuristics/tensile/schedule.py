"""TENSILE's schedule of one job: its transfers on the PCIe channel (Algorithm 1), its footprint (Algorithm 2), and what
is recomputed (section 4.4). The jobs' peaks meet in ``TENSILE.plan_jobs`` (Algorithm 3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from agents.planner import Rows, is_open
from simulator.compiled.encoding import SWAP, Row, row_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import RECOMPUTED, ways_to_empty
from simulator.program import Gap, Program
from simulator.residency import recompute_ns


def array(rows: list[Row]) -> Rows:
    """int64[m, 6]."""
    return np.array(rows, np.int64).reshape(-1, 6)


class Channel:
    """PCIe: one transfer at a time, the same in every iteration of ``period`` ns.

    Attributes:
        busy: (start, end) of the transfers, in nanoseconds; each stands for its repetitions in every iteration.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.busy: list[tuple[int, int]] = []

    def regions(self, earliest: int, latest: int) -> list[tuple[int, int]]:
        """The feasible regions: what is free from ``earliest`` to ``latest``."""
        found, at = [], earliest
        for start, end in sorted(self._busy(earliest, latest)):
            if start > at:
                found.append((at, start))
            at = max(at, end)
        return found + [(at, latest)] if at < latest else found

    @property
    def load(self) -> float:
        """Share of the time in which it is busy."""
        return self.share(sum(end - start for start, end in self.busy))

    def share(self, duration: int) -> float:
        """Of the time."""
        return duration / self.period if self.period else 0.0

    def has(self, duration: int, free: float) -> bool:
        """Is it busy for at most a share ``free`` of the time with another transfer?"""
        return self.load + self.share(duration) <= free

    def _busy(self, earliest: int, latest: int) -> Iterator[tuple[int, int]]:
        for start, end in self.busy:
            first = -((end - earliest) // self.period)  # iterations to shift by: the first that ends after `earliest`
            for i in range(first, (latest - start) // self.period + 1):
                yield start + i * self.period, end + i * self.period

    def early(self, duration: int, earliest: int, latest: int) -> int | None:
        """The first start of a transfer within the regions; None: there is none."""
        fits = (start for start, end in self.regions(earliest, latest) if end - start >= duration)
        return next(fits, None) if duration <= self.period else None

    def late(self, duration: int, earliest: int, latest: int) -> int | None:
        """The last start of a transfer within the regions; None: there is none."""
        fits = (end - duration for start, end in reversed(self.regions(earliest, latest)) if end - start >= duration)
        return next(fits, None) if duration <= self.period else None


class Schedule:
    """The decisions so far. A position is a kernel, or a kernel of the next iteration (+ n).

    Args:
        starts: n + 1 times in ns, when each kernel starts and the iteration ends: the Tensor Access Sequence.
        ratio: share of the tensors that may be swapped.

    Attributes:
        rows: the decisions, as rows of ``planner.Rows``.
        footprint: int64[kernels], bytes while each runs (Algorithm 2), transfers included.
        swapped: the tensors that are swapped.
    """

    def __init__(
        self, program: Program, machine: Machine, engine: Engine, min_bytes: int, ratio: float, starts: Sequence[int]
    ) -> None:
        self.program, self.machine, self.engine = program, machine, engine
        self.n = len(program.kernels)
        self.gaps = program.gaps(min_bytes)
        self.allowed = ratio * len({g.tensor for g in self.gaps})  # tensors that may be swapped
        self.channel = Channel(starts[-1])
        both = [t + i * starts[-1] for i in (0, 1) for t in starts[: self.n]]
        self.starts, self.ends = both, both[1:] + [2 * starts[-1]]
        self.rows: list[Row] = []
        self.scheduled: set[Gap] = set()
        self.swapped: set[int] = set()
        self.moving = np.zeros(self.n, np.int64)  # bytes that leave or return while a kernel of their gap runs
        self.footprint = self._footprint(self.rows)

    def _footprint(self, rows: list[Row]) -> NDArray[np.int64]:
        """Algorithm 2: int64[kernels], with the decisions ``rows``."""
        return self.engine.residency(array(rows)) + self.moving

    def _at_peak(self) -> list[Gap]:
        """The gaps that span the peak kernel and are not scheduled, the largest tensors first."""
        k = self._peak_kernel
        spanning = [g for g in self.gaps if is_open(g, k) and g not in self.scheduled]
        return sorted(spanning, key=lambda g: -self.nbytes(g))

    @property
    def _peak_kernel(self) -> int:
        return int(np.argmax(self.footprint))

    @property
    def peak(self) -> int:
        """Bytes: the peak of the footprint."""
        return int(self.footprint.max())

    @property
    def hosted(self) -> int:
        """Bytes of the tensors that are swapped."""
        return sum(self.program.tensors[t].nbytes for t in self.swapped)

    def candidates(self) -> list[Gap]:
        """The gaps at the peak that may be swapped (lines 27 to 29), the largest tensors first."""
        more = len(self.swapped) + 1 <= self.allowed
        return [g for g in self._at_peak() if (g.after >= g.before if g.tensor in self.swapped else more)]

    def nbytes(self, gap: Gap) -> int:
        """Of the gap's tensor."""
        return self.program.tensors[gap.tensor].nbytes

    def swap(self, gap: Gap, free: float = 1.0) -> bool:
        """Function scheduling_swap: both transfers of a gap around the peak; False without regions for them.

        Args:
            free: share of the channel's time that this job may take.
        """
        nbytes = self.nbytes(gap)
        out_ns = self.machine.d2h_ns(nbytes)
        if not self.channel.has(out_ns + self.machine.h2d_ns(nbytes), free):
            return False
        peak = self._position(self._peak_kernel, gap)
        out = self.channel.early(out_ns, self._written(gap), self.starts[peak])
        if out is None:
            return False
        self.channel.busy.append((out, out + out_ns))
        issued = bisect_right(self.ends, out + self.channel.period) - 1 - self.n
        if not self._swap_in(gap, issued, out + out_ns, self.ends[peak]):
            self.channel.busy.pop()
            return False
        self.swapped.add(gap.tensor)
        self._swap_in_the_rest(gap, free)
        self.footprint = self._footprint(self.rows)
        return True

    def _written(self, gap: Gap) -> int:
        """The time from which a tensor may be copied: the end of its last write (its OTA, section 4.1), or that of the
        use that opens the gap, where another swap comes between."""
        away = {g.before for g in self.scheduled if g.tensor == gap.tensor}
        times = []
        for k in self.program.writes[gap.tensor]:
            written = k if k <= gap.after else k - self.n
            if not any(written < b <= gap.after or written < b - self.n for b in away):
                times.append(self.ends[k] - (0 if k <= gap.after else self.channel.period))
        return max(times, default=self.ends[gap.after])

    def _swap_in(self, gap: Gap, issued: int, gone: int, earliest: int) -> bool:
        """Schedules the swap-in of a tensor, not before ``earliest``; False when no region has room for it.

        Args:
            issued: the position at whose end the copy to the host is issued.
            gone: the time from which it is gone.
        """
        after = max(gap.after, issued)
        nbytes, before = self.nbytes(gap), self._position(gap.before, gap)
        in_ns = self.machine.h2d_ns(nbytes)
        start = self.channel.late(in_ns, earliest, self.starts[before])
        if start is None:
            return False
        self.channel.busy.append((start, start + in_ns))
        prefetch = bisect_right(self.ends, start) - 1
        copy = issued % self.n if issued < after else -1
        self.rows = [self._copied(row, gap) for row in self.rows]
        self.rows.append((SWAP, gap.tensor, after % self.n, gap.before, prefetch % self.n, copy))
        self.scheduled.add(gap)
        for p in range(after + 1, before):
            if self.starts[p] < gone or self.ends[p] > start:
                self.moving[p % self.n] += nbytes
        return True

    def _copied(self, row: Row, gap: Gap) -> Row:
        """A swap beside that of a new gap: where the tensor is away between its early copy and its own gap, it needs
        none, for it is on the host since then."""
        kind, tensor, after, before, prefetch, copy = row
        between = (after - gap.before) % self.n < (after - copy) % self.n
        drops = kind == SWAP and tensor == gap.tensor and copy >= 0 and between
        return (kind, tensor, after, before, prefetch, -1) if drops else row

    def _swap_in_the_rest(self, gap: Gap, free: float) -> None:
        """Line 36: swaps in the later gaps of the tensor in which the copy on the host is still valid."""
        t, program = gap.tensor, self.program
        opens = {g.after: g for g in self.gaps if g.tensor == t and g not in self.scheduled}
        i = program.accesses[t].index(gap.before)
        for k in program.accesses[t][i:] + (program.accesses[t][:i] if program.tensors[t].persistent else ()):
            if k in program.writes[t]:
                break
            if k in opens and self.channel.has(self.machine.h2d_ns(self.nbytes(gap)), free):
                self._swap_in(opens[k], k, self.ends[k], self.ends[k + 1])

    def droppable(self) -> list[tuple[float, Gap]]:
        """Section 4.4: the gaps at the peak that may be recomputed, each with 1 / MSPS, the best first."""
        released = {g.tensor for g in self.scheduled}
        fresh = [g for g in self._at_peak() if g.tensor not in released and ways_to_empty(self.program, g, "recompute")]
        cost = ((recompute_ns(self.program, gap) / self.nbytes(gap), gap) for gap in fresh)
        return sorted(cost, key=lambda entry: entry[0])

    def drop(self, gap: Gap) -> bool:
        """Recomputes a tensor of the peak; False where that would not lower it."""
        k, row = self._peak_kernel, row_of(gap, RECOMPUTED)
        footprint = self._footprint([*self.rows, row])
        if footprint.max() > self.peak or footprint[k] >= self.footprint[k]:
            return False
        self.rows.append(row)
        self.scheduled.add(gap)
        self.footprint = footprint
        return True

    def _position(self, k: int, gap: Gap) -> int:
        """The position of kernel ``k`` of a gap, counted from the iteration in which the gap opens."""
        return k if k > gap.after else k + self.n
