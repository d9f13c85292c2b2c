"""What the floor knows of transfers: bytes that leave and return while kernels run and while they wait.

Before each kernel k the compute stream waits, or runs kernels again, for a time wait_k; then k runs for d_k. P_k are
the bytes of swapped gaps that are open at kernel k, Q those of them that have not left yet, E those that came back
before their use, A those that left before their gap opened, at the start (1) and the end (2) of the kernel:

    load_k - P_k + Q + E <= limit                rule 2: what has not left, or came back early, takes memory
    Q_1 = Q_2(k-1) + opened at k-1 - out         rule 4: an early copy (A) may be made from the last write on
    A_1 = A_2(k-1) - opened at k-1 + early
    E_1 = E_2(k-1) + in - used at k              rule 5: Q + E <= P, so that bytes return only after they have left
    out + early, in <= rate x wait_k, then x d_k     each way, and both together as the link allows
    minimise the sum of wait_k

Indices are cyclic: the program is one iteration of a steady state (rule 10), so that what is left to do at the end of
an iteration is done in the next.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from agents.bound_lp import Linear, Terms
from agents.bound_reruns import Reruns
from simulator.machine import ALONE, Machine
from simulator.program import Gap, Program

CLASSES = 3
WHOLE = 0.02  # of the ideal time: a tensor that moves in less is not worth its rows in ``_whole_tensors``


class Transfers:
    """Columns: swap[i], gap i is swapped; free[i], without a copy, as a valid one is on the host; early[i], what part
    of it is copied before the gap opens; wait[k].

    Args:
        loads: per kernel over the limit, what it needs when nothing is swapped (``Reruns.load``).
        reruns: None where nothing runs again.
        byte, tick: the units of the linear program, in bytes and ns.
    """

    def __init__(
        self, lp: Linear, program: Program, machine: Machine, limit: int, gaps: list[Gap],
        loads: dict[int, tuple[Terms, float]], reruns: Reruns | None, byte: float, tick: float,
    ) -> None:  # fmt: skip
        self.lp, self.program, self.machine, self.gaps = lp, program, machine, gaps
        self.n, m = len(program.kernels), len(gaps)
        self.byte, self.room = byte, limit / byte
        nbytes = [program.tensors[g.tensor].nbytes for g in gaps]
        self.size = np.array(nbytes) / byte
        self.duration = np.array([k.duration_ns for k in program.kernels]) / tick
        self.out_time = np.array([machine.d2h_ns(b) for b in nbytes]) / tick
        self.in_time = np.array([machine.h2d_ns(b) for b in nbytes]) / tick
        self.opens: list[list[int]] = [[] for _ in program.kernels]  # gaps that open after each kernel
        self.closes: list[list[int]] = [[] for _ in program.kernels]  # and that close before it
        for i, g in enumerate(gaps):
            self.opens[g.after].append(i)
            self.closes[g.before].append(i)
        share = max(0.5, machine.duplex_share / ALONE) if machine.copy_engines == 2 else 0.5
        self.beside = (1 - share) / share  # time that one direction takes from the other
        # Weak duality needs a bound: no kernel waits longer than it takes to move and to run everything again.
        long = float(2 * (self.out_time.sum() + self.in_time.sum()) + self.duration.sum()) + 1.0
        self.swap, self.free, self.early = lp.many(m), lp.many(m, 0.0), lp.many(m, 0.0)
        self.wait = lp.many(self.n, long, 1.0)
        self.written = [self._written(g) for g in gaps]
        self._host_copies()
        self._flows(loads)
        self._early_copies()
        self._whole_tensors(loads)
        self._host_bytes()
        if reruns is not None:
            self._beside(reruns)

    def _written(self, g: Gap) -> int | None:
        """The kernel that last wrote what a gap's tensor holds in it, below 0 in the iteration before; None: none."""
        writes = self.program.writes[g.tensor]
        if not writes:
            return None
        return max((w for w in writes if w <= g.after), default=writes[-1] - self.n)

    def open(self, k: int) -> list[int]:
        """The gaps that are open at kernel k."""
        n = self.n
        return [i for i, g in enumerate(self.gaps) if (k - g.after - 1) % n < (g.before - g.after - 1) % n]

    def _host_copies(self) -> None:
        """Rule 4: what may leave without a transfer in its gap, as a valid copy is on the host from an earlier gap, and
        as it is copied before its gap opens."""
        of_tensor: dict[int, list[int]] = defaultdict(list)
        for i, g in enumerate(self.gaps):
            of_tensor[g.tensor].append(i)
            self.lp.row([(int(self.free[i]), 1), (int(self.early[i]), 1), (int(self.swap[i]), -1)], 0)
        for t, mine in of_tensor.items():
            for i in mine:
                g, last = self.gaps[i], self.written[i]
                if last is not None and last < g.after:
                    self.lp.upper[self.early[i]] = 1.0
                # Gaps that ended after the last write before this one opened; cyclic for persistent tensors.
                earlier = []
                for j in mine:
                    end = self.gaps[j].before
                    ended = end if end <= g.after else end - self.n
                    if last is None or (ended > last and j != i):
                        earlier.append(j)
                if not self.program.tensors[t].persistent:
                    earlier = [j for j in earlier if self.gaps[j].before <= g.after]
                if earlier:
                    self.lp.upper[self.free[i]] = 1.0
                    if i not in earlier:
                        self.lp.row([(int(self.free[i]), 1), *((int(self.swap[j]), -1) for j in earlier)], 0)

    def _flows(self, loads: dict[int, tuple[Terms, float]]) -> None:
        n, size, lp = self.n, self.size, self.lp
        opens, closes = self.opens, self.closes
        total = float(size.sum())
        self.away = lp.many(n, total)  # P
        # Bytes of the tensors that have not left, or came back early, at the start and at the end of each kernel.
        self.whole = [(lp.many(n, total), lp.many(n, total)) for _ in range(2)]
        klass = self._classes()
        names = ("q1", "q2", "e1", "e2", "ow", "od", "iw", "id")
        steps = [{name: lp.many(n, total) for name in names} for _ in range(int(klass.max()) + 1)]
        rate = [
            tuple(float((time / size)[klass == c].min()) for time in (self.out_time, self.in_time))
            for c in range(len(steps))
        ]
        ahead = {name: lp.many(n, total) for name in ("a1", "a2", "aw", "ad", "may")}  # early copies, of all classes
        fastest = float((self.out_time / size).min())
        # Gaps whose early copy may be made from the end of a kernel on.
        written: list[list[int]] = [[] for _ in range(n)]
        for i in np.flatnonzero(np.array(lp.upper)[self.early]).tolist():
            written[self.written[i] % n].append(i)  # type: ignore[operator]
        self.queued: list[tuple[list[int], list[int]]] = []  # columns, at the start and the end of each kernel
        self.returned: list[tuple[list[int], list[int]]] = []
        for k in range(n):
            j = k - 1 if k else n - 1
            went = [(int(self.swap[i]), -size[i]) for i in opens[j]]
            used = [(int(self.swap[i]), size[i]) for i in closes[k]]
            lp.equation([(int(self.away[k]), 1), (int(self.away[j]), -1), *went, *used], 0)
            out_wait, out_run, in_wait, in_run = [], [], [], []
            for c, s in enumerate(steps):
                queued = [(int(v), x) for i in opens[j] if klass[i] == c for v, x in
                          ((self.swap[i], -size[i]), (self.free[i], size[i]), (self.early[i], size[i]))]  # fmt: skip
                mine = [(int(self.swap[i]), size[i]) for i in closes[k] if klass[i] == c]
                lp.equation([(s["q1"][k], 1), (s["q2"][j], -1), (s["ow"][k], 1), *queued], 0)
                lp.equation([(s["q2"][k], 1), (s["q1"][k], -1), (s["od"][k], 1)], 0)
                lp.equation([(s["e1"][k], 1), (s["e2"][j], -1), (s["iw"][k], -1), *mine], 0)
                lp.equation([(s["e2"][k], 1), (s["e1"][k], -1), (s["id"][k], -1)], 0)
                out_wait.append((s["ow"][k], rate[c][0]))
                out_run.append((s["od"][k], rate[c][0]))
                in_wait.append((s["iw"][k], rate[c][1]))
                in_run.append((s["id"][k], rate[c][1]))
            gone = [(int(self.early[i]), size[i]) for i in opens[j]]
            lp.equation([(ahead["a1"][k], 1), (ahead["a2"][j], -1), (ahead["aw"][k], -1), *gone], 0)
            lp.equation([(ahead["a2"][k], 1), (ahead["a1"][k], -1), (ahead["ad"][k], -1)], 0)
            begun = [(int(self.early[i]), -size[i]) for i in written[j]]
            lp.equation([(ahead["may"][k], 1), (ahead["may"][j], -1), *gone, *begun], 0)
            lp.row([(ahead["a2"][k], 1), (ahead["may"][k], -1)], 0)
            out_wait.append((ahead["aw"][k], fastest))
            out_run.append((ahead["ad"][k], fastest))
            for out, back, terms, right in (
                (out_wait, in_wait, [(int(self.wait[k]), -1.0)], 0.0),
                (out_run, in_run, [], float(self.duration[k])),
            ):
                for f, g in {(1.0, self.beside), (self.beside, 1.0)}:
                    lp.row([*((c, f * x) for c, x in out if f), *((c, g * x) for c, x in back if g), *terms], right)
            self.queued.append(tuple([int(s[name][k]) for s in steps] for name in ("q1", "q2")))  # type: ignore[arg-type]
            self.returned.append(tuple([int(s[name][k]) for s in steps] for name in ("e1", "e2")))  # type: ignore[arg-type]
            for end in (0, 1):
                held = [*self.queued[k][end], *self.returned[k][end]]
                lp.row([*((c, 1.0) for c in held), (int(self.away[k]), -1)], 0)
            if k in loads:
                load, constant = loads[k]
                for end, whole in enumerate(self.whole):
                    for moved, part in zip(whole, (self.queued[k][end], self.returned[k][end]), strict=True):
                        lp.row([*((c, 1.0) for c in part), (int(moved[k]), -1)], 0)
                    parts = [(int(whole[0][k]), 1.0), (int(whole[1][k]), 1.0), (int(self.away[k]), -1.0)]
                    lp.row([*load, *parts], self.room - constant)
        # The cyclic recurrences leave the level open: what is open over the boundary is away at kernel 0.
        wraps = [(int(self.swap[i]), -size[i]) for i, g in enumerate(self.gaps) if g.after >= g.before > 0]
        lp.equation([(int(self.away[0]), 1), *wraps], 0)
        over = [(int(self.early[i]), -size[i]) for ids in written for i in ids
                if self.written[i] < 0 <= self.gaps[i].after]  # type: ignore[operator]  # fmt: skip
        lp.equation([(int(ahead["may"][0]), 1), *over], 0)

    def _early_copies(self) -> None:
        """The early copies that begin and end within one of their intervals, from the last write to the opening of the
        gap, take no longer than that."""
        some = [i for i in range(len(self.gaps)) if self.lp.upper[self.early[i]]]
        first = np.array([self.written[i] for i in some])
        last = np.array([self.gaps[i].after for i in some])
        past = np.concatenate([[0.0], np.cumsum(np.tile(self.duration, 2))])  # time before a kernel, from that at -n
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            within = np.zeros(len(some), dtype=bool)
            for shift in (-self.n, 0, self.n):
                within |= (first + shift >= a) & (last + shift <= b)
            mine = [some[i] for i in np.flatnonzero(within)]
            time = past[b + 1 + self.n] - past[a + 1 + self.n]
            if self.out_time[mine].sum() > time:
                waits = [(int(self.wait[k % self.n]), -1.0) for k in range(a + 1, b + 1)]
                self.lp.row([*((int(self.early[i]), self.out_time[i]) for i in mine), *waits], time)

    def _host_bytes(self) -> None:
        """At no kernel does the host hold more than it has: what has left and not been asked for again, and for ever
        the persistent tensors that nothing writes."""
        lp, size = self.lp, self.size
        host = self.machine.host_bytes / self.byte
        if sum(self.program.tensors[t].nbytes for t in {g.tensor for g in self.gaps}) <= self.machine.host_bytes:
            return
        always = {self.gaps[i].tensor: lp.new() for i, w in enumerate(self.written) if w is None}
        for i, g in enumerate(self.gaps):
            if g.tensor in always:
                lp.row([(int(self.swap[i]), 1), (always[g.tensor], -1)], 0)
        kept = [(c, self.program.tensors[t].nbytes / self.byte) for t, c in always.items()]
        lp.row(kept, host)
        for k in range(self.n):
            beside = [(int(self.swap[i]), -size[i]) for i in self.open(k) if self.gaps[i].tensor in always]
            back = [(c, -1.0) for c in (*self.queued[k][0], *self.returned[k][0])]
            lp.row([(int(self.away[k]), 1.0), *beside, *back, *kept], host)

    def _beside(self, reruns: Reruns) -> None:
        """What runs again takes time; and a tensor is not both on the host and away to be written again.

        One that is swapped in its gap may have been written again in it before its copy is issued. While it is away
        for that (``first``), none of it has left.
        """
        lp = self.lp
        times: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (j, w), column in reruns.again.items():
            times[j].append((column, float(self.duration[w])))
        for j, terms in times.items():
            lp.row([*terms, *((int(c), -1.0) for c in self.wait[slice(*reruns.windows[j])])], 0)
        waiting: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for i, g in enumerate(self.gaps):
            v = reruns.version_in(g)
            if v < 0 or not reruns.droppable[v]:
                continue
            for j, column, sign in reruns.absent(v, g):
                first = lp.new()
                lp.row([(int(self.swap[i]), 1.0), (column, float(sign)), (first, -1.0)], (1 + sign) / 2)
                waiting[max(g.after + 1, reruns.windows[j][0])].append((first, float(self.size[i])))
        for k, terms in waiting.items():
            lp.row([*terms, *((c, -1.0) for c in self.queued[k][0])], 0)

    def _whole_tensors(self, loads: dict[int, tuple[Terms, float]]) -> None:
        """A swapped tensor takes all of its memory just after its gap opens and just before it closes.

        Where the time D_0 from the end of the gap is less than a transfer takes, D, the tensor has not left yet, or is
        on its way back. So are those of its size or larger that have even less time. With waits, the sum over them of
        size x swapped is at most what is there plus the sum of sizes x waits / (D - D_0). Of a copy that was begun
        before the gap opened, D / (D - D_0) x its early part has left.
        """
        n, gaps, size = self.n, self.gaps, self.size
        for i, g in enumerate(gaps):
            if self.out_time[i] + self.in_time[i] < WHOLE * self.duration.sum():
                continue
            for side, transfer in ((0, self.out_time[i]), (1, self.in_time[i])):
                k, step = (g.after, 1) if side == 0 else (g.before, -1)
                time, with_it, waits = 0.0, [i], []
                while True:
                    waits.append(int(self.wait[(k + 1) % n] if side == 0 else self.wait[k]))
                    at = (k + step) % n
                    if at == (g.before if side == 0 else g.after):
                        break
                    for end in (0, 1) if side == 0 else (1, 0):
                        if end == 1 - side:
                            time += self.duration[at]
                        if time >= transfer * (1 - 1e-9):
                            break
                        least = transfer - time
                        terms = [(int(self.swap[j]), size[j]) for j in with_it]
                        if side == 0:
                            terms += [(int(self.free[j]), -size[j]) for j in with_it]
                            terms += [(int(self.early[j]), -size[j] * transfer / least) for j in with_it]
                        total = float(size[with_it].sum())
                        terms += [(w, -total / least) for w in waits]
                        if at in loads:
                            self.lp.row([*terms, (int(self.whole[end][side][at]), -1)], 0)
                    if time >= transfer * (1 - 1e-9):
                        break
                    with_it = with_it + [
                        j for j in (self.opens, self.closes)[side][at] if size[j] >= size[i] and j != i
                    ]
                    k = at

    def _classes(self) -> NDArray[np.int64]:
        """int64[m], by size: gaps of one class are as fast per byte as the largest of it."""
        edges = np.quantile(np.unique(self.size), np.linspace(0, 1, CLASSES + 1)[1:-1])
        return np.unique(np.searchsorted(edges, self.size), return_inverse=True)[1]
