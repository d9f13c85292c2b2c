"""TENSILE's schedule of one job: transfers (Algorithm 1), footprint (Algorithm 2) and recomputation (section 4.4).

``TENSILE.plan_jobs`` (Algorithm 3) combines the jobs' peaks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from agents.planner import Rows, is_open
from simulator.compiled.encoding import SWAP, Row, row_of
from simulator.compiled.engine import Engine
from simulator.modes import Choice, evictions
from simulator.program import Gap
from simulator.residency import recompute_ns


def array(rows: list[Row]) -> Rows:
    """Returns the rows as int64[m, 6]."""
    return np.array(rows, np.int64).reshape(-1, 6)


class Channel:
    """PCIe channel: one transfer at a time, repeated in every iteration of ``period`` ns.

    Attributes:
        busy: (start, end) of the transfers, in ns; each stands for its repetitions in every iteration.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.busy: list[tuple[int, int]] = []

    def regions(self, duration: int, earliest: int, latest: int) -> list[tuple[int, int]]:
        """Returns the free intervals from ``earliest`` to ``latest`` that are long enough for a transfer."""
        regions = []
        free_from = earliest
        for start, end in sorted(self._busy(earliest, latest)):
            regions.append((free_from, start))
            free_from = max(free_from, end)
        regions.append((free_from, latest))
        return [(a, b) for a, b in regions if b - a >= max(duration, 1)] if duration <= self.period else []

    @property
    def load(self) -> float:
        """Fraction of time in which the channel is busy."""
        return sum(end - start for start, end in self.busy) / self.period if self.period else 0.0

    def has_room(self, duration: int, free: float) -> bool:
        """Returns whether the load stays at or below ``free`` with another transfer."""
        return self.load + (duration / self.period if self.period else 0.0) <= free

    def _busy(self, earliest: int, latest: int) -> Iterator[tuple[int, int]]:
        for start, end in self.busy:
            first = -((end - earliest) // self.period)  # iterations to shift by: the first that ends after `earliest`
            for i in range(first, (latest - start) // self.period + 1):
                yield start + i * self.period, end + i * self.period


class Schedule:
    """Decisions so far. A position is a kernel, or a kernel of the next iteration (+ n).

    Args:
        starts: n + 1 times in ns, when each kernel starts and the iteration ends: the Tensor Access Sequence.
        ratio: fraction of the tensors that may be swapped.

    Attributes:
        rows: the decisions, as rows of ``planner.Rows``.
        footprint: int64[kernels], bytes while each runs (Algorithm 2), transfers included.
        swapped: the swapped tensors.
        scheduled: the gaps of ``rows``, in order, each with the start of its swap-in in ns; None: recomputed.
    """

    def __init__(self, engine: Engine, min_bytes: int, ratio: float, starts: Sequence[int]) -> None:
        self.program = engine.program
        self.machine = engine.machine
        self.engine = engine
        self.n = len(self.program.kernels)
        self.gaps = self.program.gaps(min_bytes)
        self.allowed = ratio * len({g.tensor for g in self.gaps})  # tensors that may be swapped
        self.channel = Channel(starts[-1])
        starts_twice = [t + i * starts[-1] for i in (0, 1) for t in starts[: self.n]]
        self.starts = starts_twice
        self.ends = starts_twice[1:] + [2 * starts[-1]]
        self.rows: list[Row] = []
        self.scheduled: dict[Gap, int | None] = {}
        self.swapped: set[int] = set()
        self.moving = np.zeros(self.n, np.int64)  # bytes that leave or return while a kernel of their gap runs
        self.footprint = self._footprint(self.rows)

    def _footprint(self, rows: list[Row]) -> NDArray[np.int64]:
        """Returns int64[kernels], the footprint with the decisions ``rows`` (Algorithm 2)."""
        return self.engine.residency(array(rows)) + self.moving

    def _peak_gaps(self) -> list[Gap]:
        """Returns the unscheduled gaps that span the peak kernel, largest tensors first."""
        k = self._peak_kernel
        spanning = [g for g in self.gaps if is_open(g, k) and g not in self.scheduled]
        return sorted(spanning, key=lambda g: -self.nbytes(g))

    @property
    def _peak_kernel(self) -> int:
        return int(np.argmax(self.footprint))

    @property
    def peak(self) -> int:
        """Peak of the footprint, in bytes."""
        return int(self.footprint.max())

    @property
    def host_bytes(self) -> int:
        """Bytes of the swapped tensors."""
        return sum(self.program.tensors[t].nbytes for t in self.swapped)

    def candidates(self) -> list[Gap]:
        """Returns the gaps at the peak that may be swapped (lines 27 to 29), largest tensors first."""
        may_add = len(self.swapped) + 1 <= self.allowed
        return [g for g in self._peak_gaps() if (g.after >= g.before if g.tensor in self.swapped else may_add)]

    def nbytes(self, gap: Gap) -> int:
        """Returns the bytes of the gap's tensor."""
        return self.program.tensors[gap.tensor].nbytes

    def swap(self, gap: Gap, free: float = 1.0) -> bool:
        """Schedules both transfers of a gap around the peak (scheduling_swap); returns False if no region is free.

        Args:
            free: maximum load of the channel by this job.
        """
        nbytes = self.nbytes(gap)
        out_ns = self.machine.d2h_ns(nbytes)
        if not self.channel.has_room(out_ns + self.machine.h2d_ns(nbytes), free):
            return False
        peak = self._position(self._peak_kernel, gap)
        regions = self.channel.regions(out_ns, self._copyable_from(gap), self.starts[peak])
        if not regions:
            return False
        out = regions[0][0]
        self.channel.busy.append((out, out + out_ns))
        issued = bisect_right(self.ends, out + self.channel.period) - 1 - self.n
        if not self._swap_in(gap, issued, out + out_ns, self.ends[peak]):
            self.channel.busy.pop()
            return False
        self.swapped.add(gap.tensor)
        self._swap_in_later(gap, free)
        self.footprint = self._footprint(self.rows)
        return True

    def _copyable_from(self, gap: Gap) -> int:
        """Returns the earliest time in ns at which the gap's tensor may be copied to the host.

        This is the end of its last write (OTA, section 4.1). If the tensor is swapped in between that write and the
        gap, it is the end of the use that opens the gap.
        """
        swap_ins = {g.before for g in self.scheduled if g.tensor == gap.tensor}
        times = []
        for k in self.program.writes[gap.tensor]:
            write = k if k <= gap.after else k - self.n
            if not any(write < b <= gap.after or write < b - self.n for b in swap_ins):
                times.append(self.ends[k] - (0 if k <= gap.after else self.channel.period))
        return max(times, default=self.ends[gap.after])

    def _swap_in(self, gap: Gap, issued: int, copied_ns: int, earliest: int) -> bool:
        """Schedules the swap-in of a tensor, not before ``earliest``; returns False if no region has room.

        Args:
            issued: the position after which the copy to the host is issued.
            copied_ns: the time in ns at which the copy to the host ends.
        """
        after = max(gap.after, issued)
        nbytes = self.nbytes(gap)
        before = self._position(gap.before, gap)
        in_ns = self.machine.h2d_ns(nbytes)
        regions = self.channel.regions(in_ns, earliest, self.starts[before])
        if not regions:
            return False
        start = regions[-1][1] - in_ns
        self.channel.busy.append((start, start + in_ns))
        prefetch = bisect_right(self.ends, start) - 1
        copy = issued % self.n if issued < after else -1
        self.rows = [self._drop_copy(row, gap) for row in self.rows]
        self.rows.append((SWAP, gap.tensor, after % self.n, gap.before, prefetch % self.n, copy))
        self.scheduled[gap] = start
        for p in range(after + 1, before):
            if self.starts[p] < copied_ns or self.ends[p] > start:
                self.moving[p % self.n] += nbytes
        return True

    def _drop_copy(self, row: Row, gap: Gap) -> Row:
        """Drops a swap's early copy if the new gap lies between it and the swap's gap, as the host then has a copy."""
        kind, tensor, after, before, prefetch, copy = row
        is_between = (after - gap.before) % self.n < (after - copy) % self.n
        is_dropped = kind == SWAP and tensor == gap.tensor and copy >= 0 and is_between
        return (kind, tensor, after, before, prefetch, -1) if is_dropped else row

    def _swap_in_later(self, gap: Gap, free: float) -> None:
        """Swaps in the tensor's later gaps in which the host copy is still valid (line 36)."""
        t = gap.tensor
        program = self.program
        opens = {g.after: g for g in self.gaps if g.tensor == t and g not in self.scheduled}
        i = program.accesses[t].index(gap.before)
        for k in program.accesses[t][i:] + (program.accesses[t][:i] if program.tensors[t].persistent else ()):
            if k in program.writes[t]:
                break
            if k in opens and self.channel.has_room(self.machine.h2d_ns(self.nbytes(gap)), free):
                self._swap_in(opens[k], k, self.ends[k], self.ends[k + 1])

    def droppable(self) -> list[tuple[float, Gap]]:
        """Returns the gaps at the peak that may be recomputed, each with 1 / MSPS, best first (section 4.4)."""
        touched = {g.tensor for g in self.scheduled}
        gaps = [g for g in self._peak_gaps() if g.tensor not in touched and evictions(self.program, g, "recompute")]
        cost = ((recompute_ns(self.program, gap) / self.nbytes(gap), gap) for gap in gaps)
        return sorted(cost, key=lambda entry: entry[0])

    def drop(self, gap: Gap) -> bool:
        """Recomputes a tensor of the peak; returns False if that does not lower the peak."""
        k = self._peak_kernel
        row = row_of(gap, Choice.RECOMPUTED)
        footprint = self._footprint([*self.rows, row])
        if footprint.max() > self.peak or footprint[k] >= self.footprint[k]:
            return False
        self.rows.append(row)
        self.scheduled[gap] = None
        self.footprint = footprint
        return True

    def _position(self, k: int, gap: Gap) -> int:
        """Returns the position of kernel ``k`` of a gap, counted from the iteration in which the gap opens."""
        return k if k > gap.after else k + self.n
