"""The floor: a lower bound on the iteration time of every plan, by linear programming.

Every plan is a point of the linear program (``_Problem`` has its rows): fractions of gaps that are swapped and
recomputed, bytes per kernel that leave and return, waits. Every relaxation is on the optimistic side, so that no plan
beats its least value. That value is taken from the dual solution by weak duality, so that it holds whatever the
solver's tolerances. Read on in ``floor``. What is relaxed (reasons in README.md):

1. A tensor may be swapped or recomputed in part; near the ends of its gap all of it counts (``_whole_tensors``).
2. A byte takes as long as in the transfer, latency included, that is fastest per byte of its class by size.
3. A tensor not written since its last swap-out leaves without a transfer as far as earlier gaps were swapped (rule 4).
4. A recomputed gap costs the kernels that any recovery of it runs, at its end or in an earlier window; memory is free.
5. Gaps beyond the ``max_gaps`` largest are emptied for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agents.planner import Candidates
from simulator.machine import Machine
from simulator.plan import cannot_recompute
from simulator.program import Gap, Program
from simulator.schedule import reruns
from simulator.ways import RECOMPUTED, check_mode, ways_to_empty

if TYPE_CHECKING:  # SciPy takes as long to import as all else here: it is, where a program is solved
    from scipy.sparse import csr_matrix

CLASSES, WINDOWS = 3, 24
WHOLE = 0.02  # of the ideal time: a tensor that moves in less is not worth its rows in ``_whole_tensors``
TOLERANCES = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}
ROUNDING = 1e-3  # ns, far above the rounding errors of the dual value
_Rows = tuple[list[tuple[int, int, float]], list[float]]  # (row, column, coefficient), right sides


@dataclass(frozen=True)
class Floor:
    """The bound that no plan can beat.

    Attributes:
        feasible: False: no plan fits the limit, whatever its time.
        least_bytes: no plan fits a smaller limit than this.
        iteration_ns: no plan has a shorter iteration in the steady state; the ideal time where infeasible.
        overhead: ``iteration_ns`` over the ideal time, less 1.
        gaps: m gaps that the program of the bound decides about.
        swapped: float64[m], fraction of each that the relaxed optimum swaps.
        recomputed: float64[m], fraction that it recomputes.
    """

    feasible: bool
    least_bytes: int
    iteration_ns: int
    overhead: float
    gaps: tuple[Gap, ...]
    swapped: NDArray[np.float64]
    recomputed: NDArray[np.float64]


def floor(program: Program, machine: Machine, limit: int, mode: str = "joint", max_gaps: int = 1500) -> Floor:
    """The floor under the plans of ``mode`` (swap, recompute or joint) within ``limit`` bytes.

    Args:
        max_gaps: gaps that the linear program decides about, the largest; the rest are emptied for nothing.
    """
    check_mode(mode)
    gaps = [g for g in program.gaps(1) if mode != "recompute" or ways_to_empty(program, g, mode)]
    gaps.sort(key=lambda g: -program.tensors[g.tensor].nbytes)
    least_bytes = Candidates(program, gaps).least
    small = Candidates(program, gaps[max_gaps:])
    live_bytes = small.residency(np.ones(len(small), dtype=bool))
    gaps = sorted(gaps[:max_gaps])
    none = np.zeros(len(gaps))
    if least_bytes > limit or live_bytes.max() <= limit:
        return Floor(least_bytes <= limit, least_bytes, program.ideal_ns, 0.0, tuple(gaps), none, none)
    lp = _Problem(program, machine, limit, mode, gaps, live_bytes)
    solution = lp.solve()
    if solution is None:
        return Floor(False, least_bytes, program.ideal_ns, 0.0, tuple(gaps), none, none)
    extra_ns, x = solution
    iteration = program.ideal_ns + max(0, extra_ns)
    overhead = iteration / program.ideal_ns - 1 if program.ideal_ns else 0.0
    return Floor(True, least_bytes, iteration, overhead, tuple(gaps), x[lp.swap], lp.recomputed(x))


class _Problem:
    """The linear program.

    Before each kernel k the compute stream stalls or recomputes for a time s_k; then k runs for d_k. P_k are the bytes
    that decisions have away by plan, Q those of them that still queue for their swap-out, E those that came back before
    their use, at the start (1) and the end (2) of the kernel:

        load_k - P_k + Q + E <= limit            rule 2: what is queued or came back early takes memory
        Q_1 = Q_2(k-1) + opened at k-1 - out     rules 4, 5: bytes flow while time passes, both ways at most at the
        E_1 = E_2(k-1) + in - used at k          rate of the machine; Q, E >= 0; Q + E <= what is open: bytes return
        out, in <= rate x s_k, then x d_k        only after they have left
        s_k >= rerun_k                           rule 7: the kernels that must run again for k
        minimise the sum of s_k

    Indices are cyclic: the program is one iteration of a steady state (rule 10), so that what is left to do at the end
    of an iteration is done in the next.
    """

    def __init__(
        self, program: Program, machine: Machine, limit: int, mode: str, gaps: list[Gap], live_bytes: NDArray[np.int64]
    ) -> None:
        self.program, self.machine, self.gaps = program, machine, gaps
        self.n, m = len(program.kernels), len(gaps)
        nbytes = [program.tensors[g.tensor].nbytes for g in gaps]
        # Units of bytes and of time in which the numbers of the linear program are near 1.
        self.byte, self.tick = max(nbytes) / 8, max(program.ideal_ns, machine.d2h_ns(max(nbytes))) / 1000
        self.size = np.array(nbytes) / self.byte
        self.duration = np.array([k.duration_ns for k in program.kernels]) / self.tick
        self.out_time = np.array([machine.d2h_ns(b) for b in nbytes]) / self.tick
        self.in_time = np.array([machine.h2d_ns(b) for b in nbytes]) / self.tick
        self.opens: list[list[int]] = [[] for _ in program.kernels]  # gaps that open after each kernel
        self.closes: list[list[int]] = [[] for _ in program.kernels]  # and that close before it
        for i, g in enumerate(gaps):
            self.opens[g.after].append(i)
            self.closes[g.before].append(i)
        self._upper: list[NDArray[np.float64]] = []
        self._columns = 0
        self._rows: tuple[_Rows, _Rows] = (([], []), ([], []))  # inequalities, equations
        # Weak duality needs a bound: no kernel waits longer than it takes to move and to run everything again.
        long = float(self.out_time.sum() + self.in_time.sum() + self.duration.sum()) + 1.0
        self.swap = self._new(m, 0.0 if mode == "recompute" else 1.0)
        self.late = self._new(m, 0.0)
        self.free = self._new(m, 0.0)
        self.wait = self._new(self.n, long)
        self.early: list[list[tuple[int, int]]] = [[] for _ in gaps]  # column, and the kernel where it is back
        self._reruns(mode)
        for i in range(m):
            self._row([(self.swap[i], 1), (self.late[i], 1), *((v, 1) for v, _ in self.early[i])], 1)
        self._host_copies()
        self._flows(machine, limit, live_bytes)

    # ------------------------------------------------------------------------------------ columns and rows

    def _new(self, count: int, upper: float | NDArray[np.float64]) -> NDArray[np.int64]:
        """Columns of variables from 0 to ``upper``."""
        self._upper.append(np.broadcast_to(np.asarray(upper, dtype=np.float64), (count,)).copy())
        self._columns += count
        return np.arange(self._columns - count, self._columns)

    def _row(self, terms: list[tuple[int, float]], right: float, equal: bool = False) -> None:
        """sum of coefficient x column <= right; with ``equal``, = right."""
        entries, rights = self._rows[equal]
        entries += [(len(rights), int(c), v) for c, v in terms]
        rights.append(right)

    def solve(self) -> tuple[int, NDArray[np.float64]] | None:
        """The least sum of waits in ns, rounded up: times are integers; the optimum. None where there is no solution:
        what must leave does not fit on the host."""
        (a, b), (d, e) = (self._matrix(*rows) for rows in self._rows)
        from scipy.optimize import linprog

        upper = np.concatenate(self._upper)
        c = np.zeros(self._columns)
        c[self.wait] = 1
        found = linprog(c, a, b, d, e, np.stack([np.zeros_like(upper), upper], 1), method="highs", options=TOLERANCES)
        if found.status == 2:  # infeasible
            return None
        if found.x is None:
            raise RuntimeError(f"the linear program of the floor was not solved: {found.message}")
        # Weak duality: for any u <= 0 and v, c x >= u b + v e + the least of (c - u A - v D) x over the box of x.
        u, v = np.minimum(found.ineqlin.marginals, 0.0), found.eqlin.marginals
        reduced = c - a.T @ u - d.T @ v
        least = u @ b + v @ e + (np.minimum(reduced, 0.0) * upper).sum()
        return int(np.ceil(least * self.tick - ROUNDING)), found.x

    def _matrix(
        self, entries: list[tuple[int, int, float]], right: list[float]
    ) -> tuple[csr_matrix, NDArray[np.float64]]:
        from scipy.sparse import csr_matrix

        rows, columns, values = zip(*entries, strict=True)
        return csr_matrix((values, (rows, columns)), shape=(len(right), self._columns)), np.array(right)

    def recomputed(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[m]: fraction of each gap that ``x`` recomputes."""
        early: NDArray[np.float64] = np.array([sum(x[v] for v, _ in early) for early in self.early])
        return x[self.late] + early

    # ---------------------------------------------------------------------------------------- recomputation

    def _reruns(self, mode: str) -> None:
        """Rule 7: time for the kernels that run again."""
        program, n = self.program, self.n
        runs: dict[tuple[int, int], int] = {}  # (kernel, kernel that it runs again for) -> column
        for_kernel: dict[int, list[tuple[int, float]]] = defaultdict(list)  # time of the chain of a kernel
        chains = [i for i, g in enumerate(self.gaps) if RECOMPUTED in ways_to_empty(program, g, mode)]
        for i in chains:
            g = self.gaps[i]
            self._upper[1][i] = 1.0
            for w in reruns(program, g.tensor, g.before):
                if (w, g.before) not in runs:
                    runs[w, g.before] = int(self._new(1, 1.0)[0])
                    for_kernel[g.before].append((runs[w, g.before], self.duration[w]))
                self._row([(self.late[i], 1), (runs[w, g.before], -1)], 0)
        for k, terms in for_kernel.items():
            self._row([*terms, (self.wait[k], -1)], 0)
        edges = np.unique(np.linspace(0, n, WINDOWS + 1).astype(int))
        targets = _targets(program) if chains else {}
        stops = np.array(sorted(targets), dtype=np.int64)
        window = np.searchsorted(edges, np.arange(n), side="right") - 1
        # Recoveries of one tensor in one window each run its kernels anew: they are in different chains.
        recoveries: dict[tuple[int, int, int], list[tuple[int, float]]] = defaultdict(list)
        paths: list[tuple[int, int, float]] = []  # column, window, time of the chain that it needs at least
        readers = _readers(program) if chains else []
        for i in chains:
            g = self.gaps[i]
            far = self._paths(readers, max(w for w in program.writes[g.tensor] if w <= g.after), g.before)
            reach = {k: min((far[w] for w in targets[k] if w in far), default=np.inf)
                     for k in stops[(stops > g.after) & (stops < g.before)].tolist()}  # fmt: skip
            parts: dict[int, int] = {}
            for at in sorted({int(window[k]) for k, ms in reach.items() if ms < np.inf}):
                parts[at] = int(self._new(1, 1.0)[0])
                inside = {k: ms for k, ms in reach.items() if window[k] == at and ms < np.inf}
                self.early[i].append((parts[at], max(inside)))
                paths.append((parts[at], at, min(inside.values())))
            for w in reruns(program, g.tensor, g.after + 1):
                for at, v in [*parts.items(), (int(window[g.before]), int(self.late[i]))]:
                    recoveries[g.tensor, w, at].append((v, 1.0))
        chain_time = {at: [t for k in stops[window[stops] == at].tolist() for t in for_kernel[k]]
                      for at in np.unique(window[stops]).tolist()}  # fmt: skip
        more: dict[tuple[int, int], int] = {}  # (kernel, window) -> runs beside those of the chains above
        for (_, w, at), terms in recoveries.items():
            ks = stops[window[stops] == at].tolist()
            if (w, at) not in more:
                more[w, at] = int(self._new(1, float(len(ks)))[0])
                chain_time[at].append((more[w, at], self.duration[w]))
            self._row([*terms, (more[w, at], -1), *((runs[w, k], -1.0) for k in ks if (w, k) in runs)], 0)
        waits = {at: [(int(self.wait[k]), -1.0) for k in stops[window[stops] == at]] for at in chain_time}
        for at, terms in chain_time.items():
            self._row([*terms, *waits[at]], 0)
        for v, at, ms in paths:
            self._row([(v, ms), *waits[at]], 0)

    def _paths(self, readers: list[list[int]], first: int, end: int) -> dict[int, float]:
        """Least time of a chain from kernel ``first`` to each of those before ``end`` that it can lead to."""
        far = {first: float(self.duration[first])}
        for w in range(first, end):
            if w in far:
                for v in readers[w]:
                    far[v] = min(far.get(v, np.inf), far[w] + self.duration[v])
        return far

    # -------------------------------------------------------------------------------------------- transfers

    def _host_copies(self) -> None:
        """Rule 4: what may leave without a transfer (relaxation 3)."""
        program = self.program
        of_tensor: dict[int, list[int]] = defaultdict(list)
        for i, g in enumerate(self.gaps):
            self._row([(self.free[i], 1), (self.swap[i], -1)], 0)
            of_tensor[g.tensor].append(i)
        for t, mine in of_tensor.items():
            writes = program.writes[t]
            for i in mine:
                g = self.gaps[i]
                # Gaps that ended after the last write before this one opened; cyclic for persistent tensors.
                last = max((w for w in writes if w <= g.after), default=max(writes, default=-1) - self.n)
                earlier = []
                for j in mine:
                    end = self.gaps[j].before
                    ended = end if end <= g.after else end - self.n
                    if ended > last and (j != i or not writes):
                        earlier.append(j)
                if not program.tensors[t].persistent:
                    earlier = [j for j in earlier if self.gaps[j].before <= g.after]
                if earlier:
                    self._upper[2][i] = 1.0
                    if i not in earlier:
                        self._row([(self.free[i], 1), *((self.swap[j], -1) for j in earlier)], 0)

    def _flows(self, machine: Machine, limit: int, live_bytes: NDArray[np.int64]) -> None:
        n, gaps, size = self.n, self.gaps, self.size
        opens, closes = self.opens, self.closes
        back: list[list[tuple[int, float]]] = [[] for _ in range(n)]  # recomputed bytes that are back for a kernel
        for i, g in enumerate(gaps):
            back[g.before].append((self.late[i], size[i]))
            for v, k in self.early[i]:
                back[k].append((v, size[i]))
        total = float(size.sum())
        away_swap, away_rerun = self._new(n, total), self._new(n, total)  # P_k
        # Bytes of the tensors that queue, or came back early, at the start and at the end of each kernel.
        self.whole = [(self._new(n, total), self._new(n, total)) for _ in range(2)]
        klass = self._classes()
        classes = sorted(set(klass.tolist()))
        steps = {c: {name: self._new(n, total) for name in ("q1", "q2", "e1", "e2", "ow", "od", "iw", "id")}
                 for c in classes}  # fmt: skip
        rate = {c: (float((self.out_time / size)[klass == c].min()), float((self.in_time / size)[klass == c].min()))
                for c in classes}  # fmt: skip
        for k in range(n):
            j = k - 1 if k else n - 1
            went = [(self.swap[i], -size[i]) for i in opens[j]]
            used = [(self.swap[i], size[i]) for i in closes[k]]
            self._row([(away_swap[k], 1), (away_swap[j], -1), *went, *used], 0, equal=True)
            if k:
                dropped = [(v, -size[i]) for i in opens[j] for v in (self.late[i], *(v for v, _ in self.early[i]))]
                self._row([(away_rerun[k], 1), (away_rerun[j], -1), *dropped, *back[k]], 0, equal=True)
            run: tuple[list[tuple[int, float]], ...] = ([], [], [], [])
            start, end = [], []
            for c, s in steps.items():
                queued = [(v, x) for i in opens[j] if klass[i] == c for v, x in
                          ((self.swap[i], -size[i]), (self.free[i], size[i]))]  # fmt: skip
                mine = [(self.swap[i], size[i]) for i in closes[k] if klass[i] == c]
                self._row([(s["q1"][k], 1), (s["q2"][j], -1), (s["ow"][k], 1), *queued], 0, equal=True)
                self._row([(s["q2"][k], 1), (s["q1"][k], -1), (s["od"][k], 1)], 0, equal=True)
                self._row([(s["e1"][k], 1), (s["e2"][j], -1), (s["iw"][k], -1), *mine], 0, equal=True)
                self._row([(s["e2"][k], 1), (s["e1"][k], -1), (s["id"][k], -1)], 0, equal=True)
                for flow, name, per in zip(run, ("ow", "od", "iw", "id"), (0, 0, 1, 1), strict=True):
                    flow.append((s[name][k], rate[c][per]))
                start += [(s["q1"][k], 1.0), (s["e1"][k], 1.0)]
                end += [(s["q2"][k], 1.0), (s["e2"][k], 1.0)]
            ow, od, iw, id_ = run
            for waits, runs in ((ow, od), (iw, id_)) if machine.copy_engines == 2 else ((ow + iw, od + id_),):
                self._row([*waits, (self.wait[k], -1)], 0)
                self._row(runs, self.duration[k])
            room = (limit - int(live_bytes[k])) / self.byte
            for whole, held in ((self.whole[0], start), (self.whole[1], end)):
                self._row([*held, (away_swap[k], -1)], 0)
                for moved, part in zip(whole, (held[::2], held[1::2]), strict=True):  # queued, come back
                    self._row([*part, (moved[k], -1)], 0)
                self._row([(whole[0][k], 1), (whole[1][k], 1), (away_swap[k], -1), (away_rerun[k], -1)], room)
        self._whole_tensors()
        # The cyclic recurrence leaves the level open: what is open over the boundary is away at kernel 0.
        wraps = [(self.swap[i], -size[i]) for i, g in enumerate(gaps) if g.after >= g.before > 0]
        self._row([(away_swap[0], 1), *wraps], 0, equal=True)
        self._row([(away_rerun[0], 1)], 0)
        swapped = {g.tensor for g in gaps}
        if sum(self.program.tensors[t].nbytes for t in swapped) > machine.host_bytes:
            kept = {t: int(self._new(1, 1.0)[0]) for t in swapped}
            for i, g in enumerate(gaps):
                self._row([(self.swap[i], 1), (kept[g.tensor], -1)], 0)
            nbytes = [(v, self.program.tensors[t].nbytes / self.byte) for t, v in kept.items()]
            self._row(nbytes, machine.host_bytes / self.byte)

    def _whole_tensors(self) -> None:
        """A swapped tensor takes all of its memory just after its gap opens and just before it closes.

        Where the time D_0 from the end of the gap is less than a transfer takes, D, the tensor has not left yet, or is
        on its way back. So are those of its size or larger that have even less time. With waits, the sum over them of
        size x swapped is at most what is there plus the sum of sizes x waits / (D - D_0).
        """
        n, gaps, size = self.n, self.gaps, self.size
        for i, g in enumerate(gaps):
            if self.out_time[i] + self.in_time[i] < WHOLE * self.duration.sum():
                continue
            for side, transfer in ((0, self.out_time[i]), (1, self.in_time[i])):
                k, step = (g.after, 1) if side == 0 else (g.before, -1)
                time, with_it, waits = 0.0, [i], []
                while True:
                    if side == 0:
                        waits.append(int(self.wait[(k + 1) % n]))
                    else:
                        waits.append(int(self.wait[k]))
                    at = (k + step) % n
                    if at == (g.before if side == 0 else g.after):
                        break
                    for end in (0, 1) if side == 0 else (1, 0):
                        if end == 1 - side:
                            time += self.duration[at]
                        if time >= transfer * (1 - 1e-9):
                            break
                        least = transfer - time
                        terms = [(self.swap[j], size[j]) for j in with_it]
                        if side == 0:
                            terms += [(self.free[j], -size[j]) for j in with_it]
                        total = float(size[with_it].sum())
                        terms += [(w, -total / least) for w in waits]
                        self._row([*terms, (self.whole[end][side][at], -1)], 0)
                    if time >= transfer * (1 - 1e-9):
                        break
                    with_it = with_it + [
                        j for j in (self.opens, self.closes)[side][at] if size[j] >= size[i] and j != i
                    ]
                    k = at

    def _classes(self) -> NDArray[np.int64]:
        """int64[m], by size: gaps of one class are as fast per byte as the largest of it."""
        if not len(self.size):
            return np.zeros(0, dtype=np.int64)
        edges = np.quantile(np.unique(self.size), np.linspace(0, 1, CLASSES + 1)[1:-1])
        return np.searchsorted(edges, self.size)


def _targets(program: Program) -> dict[int, set[int]]:
    """Per kernel that may have a chain: the writers of the tensors that the chain may be asked for."""
    found: dict[int, set[int]] = defaultdict(set)
    for t, uses in enumerate(program.accesses):
        for a, b in zip(uses, uses[1:], strict=False):
            if cannot_recompute(program, t, a, b) is None:
                found[b].update(w for w in program.writes[t] if w < b)
    return found


def _readers(program: Program) -> list[list[int]]:
    """Per kernel: the later ones that can run again and read what it writes, persistent tensors aside."""
    return [
        sorted({
            v for t in kernel.outputs if not program.tensors[t].persistent
            for v in program.accesses[t] if v > k and program.kernels[v].recomputable and t in program.kernels[v].inputs
        })
        for k, kernel in enumerate(program.kernels)
    ]  # fmt: skip
