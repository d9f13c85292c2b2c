"""Transfers in the floor: bytes that are swapped out and in while kernels run and while the compute stream waits.

Before each kernel k the compute stream waits, or recomputes kernels, for a time wait_k; then k runs for d_k.
P_k: bytes of the swapped gaps that are open at k. Bytes at the start (1) and the end (2) of k:
Q: of P, not yet copied out. E: of P, swapped in before their use. A: copied out before their gap opens.

    load_k - P_k + Q + E <= limit                rule 2: queued and early returned bytes take memory
    Q_1 = Q_2(k-1) + opened at k-1 - out         rule 4: an early copy (A) may start after the last write
    A_1 = A_2(k-1) - opened at k-1 + early
    E_1 = E_2(k-1) + in - used at k              rule 5: Q + E <= P, so bytes return only after they have left
    out + early, in <= rate x wait_k, then x d_k (per direction, and jointly as the link allows);  minimize sum(wait_k)
"""
# Indices are cyclic: transfers left at the end of an iteration happen in the next one (rule 10).

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from agents.floor.lp import Linear, Row, Terms
from agents.floor.reruns import Reruns
from simulator.machine import ALONE, Machine
from simulator.program import Gap, Program


class Groups:
    """Consecutive kernels merged into about ``max_groups`` groups, so that the floor of large programs takes seconds.

    A group of one kernel is exact: the compute stream waits, then the kernel runs. In a larger group, waits and kernels
    form one step in which everything happens in the best order. Short kernels are merged, so that transfers are
    misplaced by little time. Kernels in ``singles`` are groups of their own.

    Attributes:
        first, last: first and last kernel of each group.
        group: the group of each kernel.
    """

    def __init__(self, program: Program, max_groups: int, singles: Collection[int] = ()) -> None:
        duration = [k.duration_ns for k in program.kernels]
        fixed = set(singles)
        self.first = _begins(duration, -1.0, fixed)
        if len(self.first) > max_groups:
            # Bisection for the duration up to which groups are merged.
            low = 0.0
            high = float(sum(duration))
            for _ in range(20):
                middle = (low + high) / 2
                low, high = (low, middle) if len(_begins(duration, middle, fixed)) <= max_groups else (middle, high)
            self.first = _begins(duration, high, fixed)
        ends = [*self.first[1:], len(duration)]
        self.last = [end - 1 for end in ends]
        self.group = [g for g, (begin, end) in enumerate(zip(self.first, ends, strict=True)) for _ in range(begin, end)]

    def __len__(self) -> int:
        return len(self.first)

    def single(self, group: int) -> bool:
        """Returns whether the group has exactly one kernel."""
        return self.first[group] == self.last[group]

    def touched(self, kernels: Iterable[int]) -> list[int]:
        """Returns the distinct groups of the given kernels."""
        return list(dict.fromkeys(self.group[k] for k in kernels))

    def heaviest(self, load: NDArray[np.int64], min_load: NDArray[np.int64], limit: int) -> list[int]:
        """Returns the kernels that get a memory constraint: the heaviest of each group, if above ``limit``.

        "Heaviest" is evaluated with everything evictable resident (``load``, int64[n] bytes), with everything evicted
        (``min_load``), and for mixtures of the two.
        """
        # Which kernel of a group is the heaviest depends on the plan, so a single one would lose more of the bound.
        kernels: set[int] = set()
        for weight in (1.0, 0.75, 0.5, 0.25, 0.0):
            mixture = weight * load + (1 - weight) * min_load
            kernels |= {a + int(mixture[a : b + 1].argmax()) for a, b in zip(self.first, self.last, strict=True)}
        return sorted(k for k in kernels if load[k] > limit)


def _begins(duration: list[int], max_ns: float, singles: set[int]) -> list[int]:
    """Returns the first kernel of each group, with at most ``max_ns`` ns per merged group; -1: none is merged."""
    firsts = [0]
    total = float(duration[0])
    is_single = 0 in singles
    for k in range(1, len(duration)):
        if is_single or k in singles or total + duration[k] > max_ns:
            firsts.append(k)
            total = 0.0
            is_single = k in singles
        total += duration[k]
    return firsts


def _link_rows(machine: Machine) -> set[tuple[float, float]]:
    """Returns pairs (f, h) with f out + h in <= T, for the standalone ns of copies in each direction within a time T.

    With shares s out and r in, both directions busy for x of T, out alone for y, in alone for z: out = y + s x,
    in = z + r x, x + y + z <= T. So (out, in) is in the convex hull of (0, 0), (T, 0), (0, T) and (s T, r T). If
    s + r >= 1, the last point is a corner with the edges out + (1 - s) / r in <= T and (1 - r) / s out + in <= T.
    Otherwise it lies below the line from (T, 0) to (0, T), and out + in <= T as with one copy engine. The clock only
    makes copies slower, because it rounds their ends up.
    """
    if machine.copy_engines == 1:
        return {(1.0, 1.0)}
    s = machine.d2h_share / ALONE
    r = machine.h2d_share / ALONE
    return {(1.0, min(1.0, (1 - s) / r)), (min(1.0, (1 - r) / s), 1.0)}


class Transfers:
    """Columns and rows of a program's transfers.

    Columns: swap[i], gap i is swapped; free[i], gap i is emptied without a copy, because the host has a valid one;
    early[i], the fraction copied before the gap opens; wait[g], the wait before group g.

    Args:
        groups: merged kernels; the recurrences run over groups.
        loads: per constrained kernel, the memory it needs without swaps (``Reruns.load``).
        reruns: None if nothing is recomputed; its windows begin with single-kernel groups.
        byte, tick: units of the linear program, in bytes and ns.
        families: constraint families, as in ``floor``.
    """

    def __init__(
        self,
        lp: Linear,
        program: Program,
        machine: Machine,
        limit: int,
        gaps: list[Gap],
        groups: Groups,
        loads: dict[int, tuple[Terms, float]],
        reruns: Reruns | None,
        byte: float,
        tick: float,
        families: Collection[str],
    ) -> None:
        self.lp = lp
        self.program = program
        self.machine = machine
        self.gaps = gaps
        self.groups = groups
        self.n = len(program.kernels)
        m = len(gaps)
        self.byte = byte
        self.room = limit / byte
        nbytes = [program.tensors[g.tensor].nbytes for g in gaps]
        # From here on bytes and times are in the program's units.
        self.size = np.array(nbytes) / byte
        self.duration = np.array([k.duration_ns for k in program.kernels]) / tick
        self.out_time = np.array([machine.d2h_ns(b) for b in nbytes]) / tick
        self.in_time = np.array([machine.h2d_ns(b) for b in nbytes]) / tick
        self.opens: list[list[int]] = [[] for _ in program.kernels]  # gaps that open after each kernel
        self.closes: list[list[int]] = [[] for _ in program.kernels]  # gaps that close before each kernel
        for i, g in enumerate(gaps):
            self.opens[g.after].append(i)
            self.closes[g.before].append(i)
        self.link_rows = _link_rows(machine)
        # Weak duality needs a bound: no wait exceeds the time to move and recompute everything.
        max_wait = float(2 * (self.out_time.sum() + self.in_time.sum()) + self.duration.sum()) + 1.0
        self.swap = lp.columns(m)
        self.free = lp.columns(m, 0.0)
        self.early = lp.columns(m, 0.0)
        self.wait = [lp.column(max_wait * (b - a + 1), 1.0) for a, b in zip(groups.first, groups.last, strict=True)]
        self.writer = [self._writer(g) for g in gaps]
        self._host_copies()
        self._flows()
        self._memory(loads)
        if "early_copies" in families:
            self._early_copies()
        if "whole_tensors" in families:
            self._whole_tensors()
        if "host" in families:
            self._host_bytes()
        if reruns is not None:
            self._reruns(reruns)

    def _writer(self, g: Gap) -> int | None:
        """Returns the last writer of a gap's tensor before the gap (below 0: previous iteration), or None."""
        writes = self.program.writes[g.tensor]
        if not writes:
            return None
        return max((w for w in writes if w <= g.after), default=writes[-1] - self.n)

    def _host_copies(self) -> None:
        """Limits the bytes that are evicted without a transfer in their gap (rule 4)."""
        by_tensor: dict[int, list[int]] = defaultdict(list)
        for i, g in enumerate(self.gaps):
            by_tensor[g.tensor].append(i)
            self.lp.row([(self.free[i], 1), (self.early[i], 1), (self.swap[i], -1)], 0)
        for i, (t, after, _) in enumerate(self.gaps):
            last = self.writer[i]
            earlier = []
            if last is not None and last < after:
                self.lp.upper[self.early[i]] = 1.0
            # Gaps that ended after the last write before this one opened; cyclic for persistent tensors.
            for j in by_tensor[t]:
                end = self.gaps[j].before
                ended = end if end <= after else end - self.n
                if (end <= after or self.program.tensors[t].persistent) and (last is None or (ended > last and j != i)):
                    earlier.append(j)
            if earlier:
                self.lp.upper[self.free[i]] = 1.0
                if i not in earlier:
                    self.lp.row([(self.free[i], 1), *((self.swap[j], -1) for j in earlier)], 0)

    def _flows(self) -> None:
        lp = self.lp
        size = self.size
        groups = self.groups
        total = float(size.sum())
        count = len(groups)
        self.swapped = lp.columns(count, total)  # P, at the last kernel of each group
        may_leave = lp.columns(count, total)  # bytes of the early copies that have begun and whose gaps have not opened
        klass = self._classes()
        # Optimistic: every byte of a class moves as fast as in the class's fastest tensor.
        rates = [
            tuple(float((time / size)[klass == c].min()) for time in (self.out_time, self.in_time))
            for c in range(int(klass.max()) + 1)
        ]
        fastest = float((self.out_time / size).min())
        self.starts: list[list[int]] = [[] for _ in range(self.n)]  # gaps whose early copy may start after it
        for i, last in enumerate(self.writer):
            if last is not None and lp.upper[self.early[i]]:
                self.starts[last % self.n].append(i)
        # Q and E of each class, of each step of each group; a group of several kernels is one step.
        self.queued: list[list[list[int]]] = [[] for _ in range(count)]
        self.returned: list[list[list[int]]] = [[] for _ in range(count)]
        width = 1 + 2 * len(rates)  # A, and Q and E of each class
        last_level = level_before = lp.columns(width, total)
        for g in range(count):
            a = groups.first[g]
            b = groups.last[g]
            opened = self._in_range(self.opens, a - 1, b)
            closed = self._in_range(self.closes, a, b + 1)
            swapped = self._bytes(self.swap, opened, -1.0) + self._bytes(self.swap, closed, 1.0)
            lp.equation([(self.swapped[g], 1.0), (self.swapped[g - 1], -1.0), *swapped], 0)
            early_opened = self._bytes(self.early, opened, 1.0)
            early_begun = self._bytes(self.early, self._in_range(self.starts, a - 1, b), -1.0)
            lp.equation([(may_leave[g], 1.0), (may_leave[g - 1], -1.0), *early_opened, *early_begun], 0)
            # Of a single kernel, the wait and the run are two steps: what is copied in the wait is absent in the run.
            for wait, run in ((1, 0), (0, 1)) if groups.single(g) else ((1, 1),):
                # The last step's level is the first step's predecessor, which closes the cycle.
                level = last_level if g == count - 1 and run else lp.columns(width, total)
                flow = lp.columns(width, total)
                lp.equation([(level[0], 1), (level_before[0], -1), (flow[0], -1), *(early_opened if wait else [])], 0)
                if run:
                    lp.row([(level[0], 1), (may_leave[g], -1)], 0)
                for c in range(len(rates)):
                    q = 1 + 2 * c
                    e = 2 + 2 * c
                    queue_terms = self._queue_terms([i for i in opened if klass[i] == c]) if wait else []
                    returned_terms = self._bytes(self.swap, [i for i in closed if klass[i] == c], 1.0) if wait else []
                    lp.equation([(level[q], 1), (level_before[q], -1), (flow[q], 1), *queue_terms], 0)
                    lp.equation([(level[e], 1), (level_before[e], -1), (flow[e], -1), *returned_terms], 0)
                # Early copies have no class, so they get the fastest rate of all.
                outs = [(flow[0], fastest), *((flow[1 + 2 * c], rate) for c, (rate, _) in enumerate(rates))]
                ins = [(flow[2 + 2 * c], rate) for c, (_, rate) in enumerate(rates)]
                waits = [(self.wait[g], -1.0)] if wait else []
                time = float(self.duration[a : b + 1].sum()) if run else 0.0
                for f, h in self.link_rows:
                    lp.row([*((c, f * x) for c, x in outs if f), *((c, h * x) for c, x in ins if h), *waits], time)
                lp.row([*((c, 1.0) for c in level[1:]), (self.swapped[g], -1)], 0)
                self.queued[g].append(level[1::2])
                self.returned[g].append(level[2::2])
                level_before = level
        # Cyclic recurrences leave the level undetermined: gaps open over the boundary are out at kernel 0.
        wrapping = [i for i, g in enumerate(self.gaps) if g.after >= g.before > 0]
        b = groups.last[0]
        opened = self._in_range(self.opens, 0, b)
        closed = self._in_range(self.closes, 1, b + 1)
        terms = self._bytes(self.swap, [*wrapping, *opened], -1.0) + self._bytes(self.swap, closed, 1.0)
        lp.equation([(self.swapped[0], 1.0), *terms], 0)
        begun_before = [i for ids in self.starts for i in ids if (self.writer[i] or 0) < 0 <= self.gaps[i].after]
        terms = self._bytes(self.early, [*begun_before, *self._in_range(self.starts, 0, b)], -1.0)
        lp.equation([(may_leave[0], 1.0), *terms, *self._bytes(self.early, opened, 1.0)], 0)

    @staticmethod
    def _in_range(by_kernel: list[list[int]], begin: int, end: int) -> list[int]:
        """Returns the entries of kernels begin to end - 1; -1 is the last kernel of the previous iteration."""
        return [i for k in range(begin, end) for i in by_kernel[k]]

    def _bytes(self, columns: list[int], gaps: list[int], sign: float) -> list[tuple[int, float]]:
        return [(columns[i], sign * float(self.size[i])) for i in gaps]

    def _queue_terms(self, gaps: list[int]) -> list[tuple[int, float]]:
        """Returns the bytes that join the swap-out queue as the gaps open, as terms to subtract."""
        kinds = (self.swap, -1.0), (self.free, 1.0), (self.early, 1.0)
        return [(columns[i], f * float(self.size[i])) for i in gaps for columns, f in kinds]

    def _memory(self, loads: dict[int, tuple[Terms, float]]) -> None:
        """Limits memory at the start and the end of a single-kernel group, else at some time in the group.

        Bytes queued at the end of a group, less those of gaps that open from the kernel on, were queued at the kernel.
        Bytes returned at its start, less those used up to the kernel, are still resident.
        """
        lp = self.lp
        groups = self.groups
        total = float(self.size.sum())
        self.in_transit: dict[tuple[int, int], tuple[int, int]] = {}  # columns: bytes that have not left, or that
        for k, (load, constant) in loads.items():  # returned early, at the start (0) and the end (1) of a kernel
            g = groups.group[k]
            is_single = groups.single(g)
            a = groups.first[g]
            b = groups.last[g]
            opened = self._in_range(self.opens, k, b)
            closed = self._in_range(self.closes, k + 1, b + 1)
            evicted = self._bytes(self.swap, opened, 1.0) + self._bytes(self.swap, closed, -1.0)
            for end in (0, 1) if is_single else (0,):
                queued, returned = lp.columns(2, total)
                self.in_transit[k, end] = queued, returned
                lp.row([*((c, 1.0) for c in self.queued[g][end]), *self._queue_terms(opened), (queued, -1.0)], 0)
                used_terms = [] if is_single else self._bytes(self.swap, self._in_range(self.closes, a, k + 1), -1.0)
                returned_before = self.returned[g][end] if is_single else self.returned[g - 1][-1]
                lp.row([*((c, 1.0) for c in returned_before), *used_terms, (returned, -1.0)], 0)
                terms = [(queued, 1.0), (returned, 1.0), (self.swapped[g], -1.0), *evicted]
                lp.row([*load, *terms], self.room - constant)

    def _early_copies(self) -> None:
        """Limits early copies, which must start after a tensor's last write and end when its gap opens.

        Copies within such an interval take at most its duration. Per pair of kernel groups only the tightest
        constraint is added.
        """
        ids = [i for i in range(len(self.gaps)) if self.lp.upper[self.early[i]]]
        earliest = np.array([self.writer[i] for i in ids])
        latest = np.array([self.gaps[i].after for i in ids])
        elapsed = np.concatenate([[0.0], np.cumsum(np.tile(self.duration, 2))])  # time before a kernel, from that at -n
        tightest: dict[tuple[int, int], tuple[float, Row]] = {}
        for a, b in sorted(set(zip(earliest.tolist(), latest.tolist(), strict=True))):
            # The interval may cross the iteration boundary, so copies of the neighboring iterations count.
            is_within = np.zeros(len(ids), dtype=bool)
            for shift in (-self.n, 0, self.n):
                is_within |= (earliest + shift >= a) & (latest + shift <= b)
            time = float(elapsed[b + 1 + self.n] - elapsed[a + 1 + self.n])
            excess = float(self.out_time[ids][is_within].sum()) - time
            pair = self.groups.group[(a + 1) % self.n], self.groups.group[b]
            if excess > (tightest[pair][0] if pair in tightest else 0.0):
                waits = [(self.wait[g], -1.0) for g in self.groups.touched(k % self.n for k in range(a + 1, b + 1))]
                copies = [(self.early[ids[i]], float(self.out_time[ids[i]])) for i in np.flatnonzero(is_within)]
                tightest[pair] = excess, ([*copies, *waits], time)
        self.lp.lazy_rows += [row for _, row in tightest.values()]

    def _host_bytes(self) -> None:
        """Limits host memory at the end of each group to ``host_bytes``.

        It holds bytes that have left and were not yet requested back, and permanently the persistent tensors that are
        never written.
        """
        lp = self.lp
        host = self.machine.host_bytes / self.byte
        # No rows if the host has room for everything.
        if sum(self.program.tensors[t].nbytes for t in {g.tensor for g in self.gaps}) <= self.machine.host_bytes:
            return
        permanent = {self.gaps[i].tensor: lp.column() for i, w in enumerate(self.writer) if w is None}
        for i, g in enumerate(self.gaps):
            if g.tensor in permanent:
                lp.row([(self.swap[i], 1), (permanent[g.tensor], -1)], 0)
        permanent_terms = [(c, self.program.tensors[t].nbytes / self.byte) for t, c in permanent.items()]
        lp.row(permanent_terms, host)
        is_permanent = np.array([g.tensor in permanent for g in self.gaps])
        _, after, before = np.array(self.gaps).T
        for group, k in enumerate(self.groups.last):
            is_open = (k - after - 1) % self.n < (before - after - 1) % self.n
            swapped_terms = self._bytes(self.swap, np.flatnonzero(is_permanent & is_open).tolist(), -1.0)
            transit_terms = [(c, -1.0) for c in (*self.queued[group][0], *self.returned[group][0])]
            lp.row([(self.swapped[group], 1.0), *swapped_terms, *transit_terms, *permanent_terms], host)

    def _reruns(self, reruns: Reruns) -> None:
        """Charges recomputation time to waits, and keeps tensors from being both on the host and dropped.

        A swapped tensor may have been recomputed in its gap before its copy is issued. While it is dropped (``first``),
        none of it has left. Windows begin with a single-kernel group; drops later in a larger group are unconstrained.
        """
        lp = self.lp
        times: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (j, w), column in reruns.rerun.items():
            times[j].append((column, float(self.duration[w])))
        for j, terms in times.items():
            lp.row([*terms, *((self.wait[g], -1.0) for g in self.groups.touched(range(*reruns.windows[j])))], 0)
        queued: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for i, g in enumerate(self.gaps):
            for j, column, sign in reruns.absent(g):
                k = max(g.after + 1, reruns.windows[j][0])
                if not self.groups.single(self.groups.group[k]):
                    continue
                first = lp.column()
                lp.row([(self.swap[i], 1.0), (column, float(sign)), (first, -1.0)], (1 + sign) / 2)
                queued[k].append((first, float(self.size[i])))
        for k, terms in queued.items():
            lp.row([*terms, *((c, -1.0) for c in self.queued[self.groups.group[k]][0])], 0)

    def _whole_tensors(self) -> None:
        """Requires a swapped tensor's full memory just after its gap opens and just before it closes.

        If the time D_0 from the end of the gap is shorter than the transfer time D, the tensor has not left yet or is
        on its way back. The same holds for tensors of its size or larger with even less time. With waits, the sum over
        them of size x swapped is at most the resident bytes plus the sum of sizes x waits / (D - D_0). If a copy began
        before the gap opened, D / (D - D_0) x its early part has left.
        """
        n = self.n
        gaps = self.gaps
        size = self.size
        for i, g in enumerate(gaps):
            # Copies of less than 2 % of the iteration raise the bound little, and there are many of them.
            if self.out_time[i] + self.in_time[i] < 0.02 * self.duration.sum():
                continue
            for side, transfer in ((0, self.out_time[i]), (1, self.in_time[i])):
                k, step = (g.after, 1) if side == 0 else (g.before, -1)
                # Walks into the gap, kernel by kernel, while the elapsed time is shorter than the copy.
                time = 0.0
                members = [i]
                waits = dict[int, None]()
                while time < transfer * (1 - 1e-9):
                    waits[self.wait[self.groups.group[(k + 1) % n if side == 0 else k]]] = None
                    next_k = (k + step) % n
                    if next_k == (g.before if side == 0 else g.after):
                        break
                    for end in (0, 1) if side == 0 else (1, 0):
                        if end == 1 - side:
                            time += self.duration[next_k]
                        if time >= transfer * (1 - 1e-9):
                            break
                        if (next_k, end) not in self.in_transit:  # memory is not constrained there
                            continue
                        rest_time = transfer - time
                        terms = [(self.swap[j], size[j]) for j in members]
                        if side == 0:  # a valid host copy needs no transfer, and an early one has begun before
                            terms += [(self.free[j], -size[j]) for j in members]
                            terms += [(self.early[j], -size[j] * transfer / rest_time) for j in members]
                        total = float(size[members].sum())
                        terms += [(w, -total / rest_time) for w in waits]
                        self.lp.lazy_rows.append(([*terms, (self.in_transit[next_k, end][side], -1)], 0.0))
                    members = members + [
                        j for j in (self.opens, self.closes)[side][next_k] if size[j] >= size[i] and j != i
                    ]
                    k = next_k

    def _classes(self) -> NDArray[np.int64]:
        """Returns int64[m], the size class of each gap; a class has the rate per byte of its largest member.

        Chooses at most three classes that maximize the total transfer time of all gaps (dynamic programming over the
        sorted sizes). Fewer suffice if they lose at most a thousandth of that time.
        """
        sizes, inverse, count = np.unique(self.size, return_inverse=True, return_counts=True)
        index = np.unique(inverse, return_index=True)[1]
        rate = (self.out_time + self.in_time)[index] / sizes
        # Latency dominates small tensors: without a cap they would decide the classes, although they move few bytes.
        rate = np.minimum(rate, 2.0 * rate[-1])
        total = np.concatenate([[0.0], np.cumsum(sizes * count)])
        time = np.cumsum(np.concatenate([[0.0], sizes * count * rate]))
        # best[j]: time lost by the first j sizes in as many classes as there are ``begins``; begins[c][j]: first size
        # of the last of c + 1 classes.
        begins = [np.zeros(len(total), np.int64)]
        best = time - total * np.concatenate([[0.0], rate])
        while len(begins) < min(3, len(sizes)) and best[-1] > 1e-3 * time[-1]:
            costs = [best[:j] + time[j] - time[:j] - (total[j] - total[:j]) * rate[j - 1] for j in range(1, len(total))]
            begins.append(np.array([0, *(int(cost.argmin()) for cost in costs)]))
            best = np.array([0.0, *(cost.min() for cost in costs)])
        klass = np.zeros(len(sizes), np.int64)
        end = len(sizes)
        for c in reversed(range(len(begins))):
            begin = int(begins[c][end])
            klass[begin:end] = c
            end = begin
        return np.unique(klass[inverse], return_inverse=True)[1]
