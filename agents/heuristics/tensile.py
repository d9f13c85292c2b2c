"""TENSILE: "TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic workloads
system" (Zhang et al., 2021), for one job.

Algorithm 3: find the peak of the footprint (Algorithm 2), swap the largest tensor that lies there unused and whose
transfers find their place on the PCIe channel (Algorithm 1), and repeat; once no swap succeeds, recompute, by MSPS
(section 4.4). Computation never waits for a swap scheduled so: where no region is free, the tensor stays. Read on in
``TENSILE.plan`` and ``_Schedule``. What the paper leaves open, and deviations (reasons in README.md):

1. The Tensor Access Sequence (section 4.3) is the program's own, with unlimited memory; nothing is predicted.
2. The loop stops as soon as the peak is within the limit; the paper lowers the peak as far as it can.
3. A swap is for the gap that spans the peak kernel: the swap-out as early, the swap-in as late as possible around it.
4. Line 21 of Algorithm 1, the tensor's next gap, is left out: by choice 3 no other gap would do.
5. One tensor is scheduled per peak, the largest that can be (section 4.1), not every tensor of the peak (line 25).
6. One transfer at a time, both directions together (section 4.1); a transfer may cross the iteration boundary.
7. A tensor updated in the optimizing phase is away over the boundary (lines 9-10, 27-28): its wrapping gap.
8. The host copy is good until the tensor is written (section 3.1): in later gaps the tensor leaves at once (line 36).
9. A swap-in counts from its start, as the simulator charges it; Algorithm 2 counts it from its end.
10. ``max_swap_ratio`` is the share of tensors that may be swapped, each once, and once more over the boundary.
11. A task's trigger (section 3.2) becomes a kernel: the last that ends by the scheduled start.
12. Recomputation is for tensors at the peak that are never away otherwise, by MSPS; it must not raise the peak.
13. A footprint above the limit only by transfers under way is left to the simulator, which waits (rule 8).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from agents.planner import MIB, Facts, Row, finish, infeasible, row_of
from simulator.compiled.encoding import SWAP
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Gap, Program
from simulator.schedule import recompute_ns
from simulator.ways import RECOMPUTED, check_mode, ways_to_empty


class TENSILE:
    """TENSILE for one job.

    Args:
        mode: swap, recompute or joint.
        max_swap_ratio: share of the tensors that may be swapped, 0 to 1.
        min_bytes: tensors below this size stay.
        seed: unused; nothing is drawn.
    """

    facts = Facts(
        "tensile", "TENSILE",
        '"TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic workloads '
        'system", 2021',
        family="swap and recompute", slot=2, place=170, moves="joint",
    )  # fmt: skip
    name = facts.key

    def __init__(self, mode: str = "joint", max_swap_ratio: float = 1.0, min_bytes: int = MIB, seed: int = 0) -> None:
        if not 0 <= max_swap_ratio <= 1:
            raise ValueError(f"max_swap_ratio: expected a number from 0 to 1, got {max_swap_ratio}")
        self.mode, self.max_swap_ratio, self.min_bytes = check_mode(mode), max_swap_ratio, min_bytes
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Algorithm 3; raises Infeasible when neither swaps nor recomputation bring the plan within ``limit``."""
        engine = Engine(program, machine, limit)
        schedule = _Schedule(program, machine, engine, self.min_bytes, self.max_swap_ratio)
        steps = [schedule.swap] if self.mode != "recompute" else []
        steps += [schedule.recompute] if self.mode != "swap" else []
        for step in steps:
            while schedule.footprint.max() > limit and step():
                pass
        rows = np.array(schedule.rows, np.int64).reshape(-1, 6)
        least = int(engine.residency(rows).max())
        if least > limit:
            self.simulator_calls = 0
            raise infeasible(self, program, limit, least)
        return finish(self, program, machine, limit, engine, rows)


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


class _Schedule:
    """The decisions so far. A position is a kernel, or a kernel of the next iteration (+ n).

    Attributes:
        rows: the decisions, as rows of ``planner.Rows``.
        footprint: int64[kernels], bytes while each runs (Algorithm 2), transfers included.
    """

    def __init__(self, program: Program, machine: Machine, engine: Engine, min_bytes: int, ratio: float) -> None:
        self.program, self.machine, self.engine = program, machine, engine
        self.n = len(program.kernels)
        self.gaps = program.gaps(min_bytes)
        self.allowed = ratio * len({g.tensor for g in self.gaps})  # tensors that may be swapped
        self.channel = Channel(program.ideal_ns)
        both = [t + i * program.ideal_ns for i in (0, 1) for t in program.start_ns[: self.n]]
        self.starts, self.ends = both, both[1:] + [2 * program.ideal_ns]
        self.rows: list[Row] = []
        self.scheduled: set[Gap] = set()
        self.swapped: set[int] = set()
        self.moving = np.zeros(self.n, np.int64)  # bytes that leave or return while a kernel of their gap runs
        self.footprint = self._footprint(self.rows)

    def _footprint(self, rows: list[Row]) -> NDArray[np.int64]:
        """Algorithm 2: int64[kernels], with the decisions ``rows``."""
        return self.engine.residency(np.array(rows, np.int64).reshape(-1, 6)) + self.moving

    def _at_peak(self) -> tuple[int, list[Gap]]:
        """The peak kernel and the gaps that span it and are not scheduled, the largest tensors first."""
        k = int(np.argmax(self.footprint))
        spanning = [
            g
            for g in self.gaps
            if (g.after < k < g.before if g.after < g.before else not g.before <= k <= g.after)
            and g not in self.scheduled
        ]
        return k, sorted(spanning, key=lambda g: -self.program.tensors[g.tensor].nbytes)

    def swap(self) -> bool:
        """Algorithm 1: schedules the largest tensor of the peak that can be; False when there is none."""
        k, gaps = self._at_peak()
        return any(self._may_swap(gap) and self._swap(gap, k) for gap in gaps)

    def _may_swap(self, gap: Gap) -> bool:
        """Lines 27-29, and the room on the host."""
        if gap.tensor in self.swapped:
            return gap.after >= gap.before
        on_host = sum(self.program.tensors[t].nbytes for t in self.swapped | {gap.tensor})
        return len(self.swapped) + 1 <= self.allowed and on_host <= self.machine.host_bytes

    def _swap(self, gap: Gap, peak: int) -> bool:
        """Function scheduling_swap: both transfers of a gap around kernel ``peak``; False without regions for them."""
        nbytes = self.program.tensors[gap.tensor].nbytes
        out_ns = self.machine.d2h_ns(nbytes)
        peak = self._position(peak, gap)
        out = self.channel.early(out_ns, self._written(gap), self.starts[peak])
        if out is None:
            return False
        self.channel.busy.append((out, out + out_ns))
        issued = bisect_right(self.ends, out + self.channel.period) - 1 - self.n
        if not self._swap_in(gap, issued, out + out_ns, self.ends[peak]):
            self.channel.busy.pop()
            return False
        self.swapped.add(gap.tensor)
        self._swap_in_the_rest(gap)
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
        nbytes, before = self.program.tensors[gap.tensor].nbytes, self._position(gap.before, gap)
        in_ns = self.machine.h2d_ns(nbytes)
        start = self.channel.late(in_ns, earliest, self.starts[before])
        if start is None:
            return False
        self.channel.busy.append((start, start + in_ns))
        prefetch = bisect_right(self.ends, start) - 1
        copy = issued % self.n if issued < after else -1
        self.rows.append((SWAP, gap.tensor, after % self.n, gap.before, prefetch % self.n, copy))
        self.scheduled.add(gap)
        for p in range(after + 1, before):
            if self.starts[p] < gone or self.ends[p] > start:
                self.moving[p % self.n] += nbytes
        return True

    def _swap_in_the_rest(self, gap: Gap) -> None:
        """Line 36: swaps in the later gaps of the tensor in which the copy on the host is still valid."""
        t, program = gap.tensor, self.program
        opens = {g.after: g for g in self.gaps if g.tensor == t and g not in self.scheduled}
        i = program.accesses[t].index(gap.before)
        for k in program.accesses[t][i:] + (program.accesses[t][:i] if program.tensors[t].persistent else ()):
            if k in program.writes[t]:
                break
            if k in opens:
                self._swap_in(opens[k], k, self.ends[k], self.ends[k + 1])

    def recompute(self) -> bool:
        """Section 4.4: drops the tensor of the peak with the largest MSPS; False when none lowers the peak."""
        k, gaps = self._at_peak()
        released = {g.tensor for g in self.scheduled}
        fresh = [g for g in gaps if g.tensor not in released and ways_to_empty(self.program, g, "recompute")]
        for gap in sorted(fresh, key=self._seconds_per_byte):
            row = row_of(gap, RECOMPUTED)
            footprint = self._footprint([*self.rows, row])
            if footprint.max() <= self.footprint.max() and footprint[k] < self.footprint[k]:
                self.rows.append(row)
                self.scheduled.add(gap)
                self.footprint = footprint
                return True
        return False

    def _seconds_per_byte(self, gap: Gap) -> float:
        """1 / MSPS."""
        return recompute_ns(self.program, gap) / self.program.tensors[gap.tensor].nbytes

    def _position(self, k: int, gap: Gap) -> int:
        """The position of kernel ``k`` of a gap, counted from the iteration in which the gap opens."""
        return k if k > gap.after else k + self.n
