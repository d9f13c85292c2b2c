"""Recompute-only planning as a 0/1 program that is exact for the simulator's rules.

In the spirit of Checkmate ("Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020,
section 4): which tensors are there at which kernel (its S), which kernels run again for which (its R), and memory
counted within every such pass, freed values included (its U and FREE). The rules are those of simulator/RULES.md,
rule 7: a gap is emptied once; what the pass of kernel k recovers is made in program order, right before k, by all
writers of its present content, into memory of the pass's own. A plan that only recomputes waits for nothing: its time
is the ideal time and the durations of the passes, and it runs exactly when its planned residency fits.

The plans: ``Recompute`` decisions, dropped at any kernel, and ``at`` their end or a cut (``Recomputation``), which is
all that ``keep`` can say, too. Not among them: another ``at``, and ``Rerun`` (a gap emptied twice, a tensor retained
after its last use). ``Recomputation`` lists the variables; read on there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import product

import numpy as np

from agents.planner import Rows
from simulator.compiled.encoding import RECOMPUTE, decisions_of
from simulator.modes import ways_to_empty
from simulator.plan import Plan, Recompute
from simulator.program import Program
from simulator.schedule import lower

Terms = list[tuple[int, int]]  # (coefficient, variable)


class ZeroOne:
    """Minimise ``cost @ x`` over x in {0, 1}, each row ``sum(c * x[v] for c, v in terms) <= bound``.

    Attributes:
        cost: one per variable.
        upper: one per variable, 1; larger for a number of bytes, which the rows determine.
        rows: (terms, bound).
        defined: variables that others determine: (variable, is it the AND of all or the OR, of these).
        sums: likewise: (variable, terms, constant).
    """

    def __init__(self) -> None:
        self.cost: list[int] = []
        self.upper: list[int] = []
        self.rows: list[tuple[Terms, int]] = []
        self.defined: list[tuple[int, bool, tuple[int, ...]]] = []
        self.sums: list[tuple[int, Terms, int]] = []

    def new(self, cost: int = 0, upper: int = 1) -> int:
        """Another variable: its index."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def at_most(self, terms: Terms, bound: int) -> None:
        """Another row."""
        self.rows.append((terms, bound))

    def implies(self, one: int, other: int) -> None:
        """one <= other."""
        self.rows.append(([(1, one), (-1, other)], 0))

    def all_of(self, parts: Sequence[int]) -> int:
        """A variable that is 1 where all ``parts`` are; where not, it may be."""
        if len(parts) == 1:
            return parts[0]
        v = self.new()
        self.at_most([(1, p) for p in parts] + [(-1, v)], len(parts) - 1)
        self.defined.append((v, True, tuple(parts)))
        return v

    def total(self, terms: Terms, constant: int, bound: int) -> int:
        """A variable of at least ``constant`` and the sum of ``terms``, up to ``bound``."""
        v = self.new(upper=bound)
        self.at_most([*terms, (-1, v)], -constant)
        self.sums.append((v, terms, constant))
        return v

    def complete(self, x: list[int]) -> None:
        """Fills in the variables that others determine, in the order of their definition."""
        for v, every, parts in self.defined:
            x[v] = int(all(x[p] for p in parts) if every else any(x[p] for p in parts))
        for v, terms, constant in self.sums:
            x[v] = max(0, constant + sum(c * x[u] for c, u in terms))

    def any_of(self, parts: Sequence[int]) -> int:
        """A variable that is 1 where one of ``parts`` is; where none is, it may be."""
        if len(parts) == 1:
            return parts[0]
        v = self.new()
        for p in parts:
            self.implies(p, v)
        self.defined.append((v, False, tuple(parts)))
        return v


class Recomputation:
    """The 0/1 program of the recompute-only plans of one program.

    0/1 variables; k is a kernel that ends at least one candidate gap, w < k a kernel that may run again for it:

        away[g, s]   gap g is empty in its segment s. A gap is cut after each kernel k whose pass could recover
                     its tensor; in between its state has no use but memory, so that dropping at once is best
        drop[g, s]   the decision: dropped at the beginning of segment s; at most one per gap
        back[g, k]   the decision: at the cut k, k's pass recovers gap g's tensor, which is needed later, for good
        rerun[k, w]  kernel w runs again before kernel k; the objective is their duration
        need[k, w, x]   rerun[k, w] and x, which w reads, is away then; every writer of x before w runs again
        held[k, w, x]   the pass has memory for x while w runs: needed by w or later, or recovered to stay

    Rows bound the last three from below only. Each grows with the others and with ``back`` and ``away``, and takes time
    or memory; so the least values, those of the plan that the decisions say, keep every row that any values keep.

    Args:
        limit: bytes.
        min_bytes: tensors below this size stay.

    Attributes:
        model: the 0/1 program. Its cost is the simulated time beyond the ideal.
        gaps: candidates, of ``Program.gaps``.
    """

    def __init__(self, program: Program, limit: int, min_bytes: int) -> None:
        self.program, self.limit, self.model = program, limit, ZeroOne()
        self.gaps = [g for g in program.gaps(min_bytes) if ways_to_empty(program, g, "recompute")]
        self._of: dict[int, list[int]] = {}  # tensor: its gaps
        self._ends: dict[int, list[int]] = {}  # kernel: gaps that it ends
        for i, g in enumerate(self.gaps):
            self._of.setdefault(g.tensor, []).append(i)
            self._ends.setdefault(g.before, []).append(i)
        self._size = [program.tensors[g.tensor].nbytes for g in self.gaps]
        self._reruns = {k: self._passes(k) for k in sorted(self._ends)}
        # Per kernel k: gaps that its pass could recover and that end later.
        self._others = {k: self._recoverable(k) for k in self._reruns}
        self._cuts: list[list[int]] = [[] for _ in self.gaps]
        for k, others in self._others.items():
            for i in others:
                self._cuts[i].append(k)
        self._back: dict[tuple[int, int], int] = {}
        self._gaps()
        for k in self._reruns:
            self._pass(k)
        self._loads()

    # ------------------------------------------------------------------------------------------ structure

    def _open(self, x: int, k: int) -> int:
        """The candidate gap of tensor x with after < k <= before; -1 where there is none."""
        return next((i for i in self._of.get(x, ()) if self.gaps[i].after < k <= self.gaps[i].before), -1)

    def _gone(self, x: int, w: int, k: int) -> bool:
        """Is the content of x that kernel w read gone at k, whatever the plan?"""
        uses = self.program.accesses[x]
        alive = self.program.tensors[x].persistent or uses[0] < k <= uses[-1]
        return not alive or any(w <= u < k for u in self.program.writes[x])

    def _passes(self, k: int) -> dict[int, int]:
        """rerun[k, .]: the kernels that may run again before k."""
        writes = self.program.writes
        pending = [u for i in self._ends[k] for u in writes[self.gaps[i].tensor] if u < k]
        found = set(pending)
        while pending:
            w = pending.pop()
            for x in self.program.kernels[w].inputs:
                if self._gone(x, w, k) or self._open(x, k) >= 0:
                    more = {u for u in writes[x] if u < w} - found
                    found |= more
                    pending += more
        return {w: self.model.new(self.program.kernels[w].duration_ns) for w in sorted(found)}

    def _recoverable(self, k: int) -> list[int]:
        rerun = self._reruns[k]
        return [
            i for i, g in enumerate(self.gaps)
            if g.after < k < g.before and all(w in rerun for w in self.program.writes[g.tensor] if w < k)
        ]  # fmt: skip

    # ---------------------------------------------------------------------------------------- constraints

    def _gaps(self) -> None:
        """Each gap is emptied at most once, and filled by the pass of one of its cuts, or at its end."""
        model = self.model
        for k, others in self._others.items():
            for i in others:
                self._back[i, k] = model.new()
        self._away, self._drop = [], []
        for i, cuts in enumerate(self._cuts):
            drop = [model.new() for _ in range(len(cuts) + 1)]
            away = [drop[0]] + [model.new() for _ in cuts]
            for s, k in enumerate(cuts):
                change = [(1, away[s + 1]), (-1, away[s]), (-1, drop[s + 1]), (1, self._back[i, k])]
                model.at_most(change, 0)
                model.at_most([(-c, v) for c, v in change], 0)
            if cuts:
                model.at_most([(1, v) for v in drop], 1)
            self._away.append(away)
            self._drop.append(drop)

    def _is_away(self, i: int, k: int) -> int:
        """away[i, .] at kernel k, before its pass."""
        return self._away[i][bisect_left(self._cuts[i], k)]

    def _pass(self, k: int) -> None:
        """The pass of kernel k: what runs again, what stays, and the memory while it does."""
        model, kernels, writes = self.model, self.program.kernels, self.program.writes
        rerun = self._reruns[k]
        targets = {self.gaps[i].tensor: self._is_away(i, k) for i in self._ends[k]}
        stays = dict(targets)
        for i in self._others[k]:
            back = stays[self.gaps[i].tensor] = self._back[i, k]
            model.implies(back, self._is_away(i, k))
        reasons: dict[int, set[int]] = {w: set() for w in rerun}

        def requires(what: int, w: int) -> None:
            if what not in reasons[w]:
                reasons[w].add(what)
                model.implies(what, rerun[w])

        for x, recovered in stays.items():
            for u in writes[x]:
                if u < k:
                    requires(recovered, u)
        needs: dict[int, list[tuple[int, int]]] = {}  # tensor: (w, need[k, w, x])
        for w in reversed(rerun):
            for x in dict.fromkeys(kernels[w].inputs):
                gap = self._open(x, k)
                gone = self._gone(x, w, k)
                if not gone and (gap < 0 or x in targets):
                    continue
                need = rerun[w] if gone else model.all_of((rerun[w], self._is_away(gap, k)))
                needs.setdefault(x, []).append((w, need))
                for u in writes[x]:
                    if u < w:
                        requires(need, u)
        self._pass_memory(k, needs, stays)

    def _pass_memory(self, k: int, needs: dict[int, list[tuple[int, int]]], stays: dict[int, int]) -> None:
        """While any kernel of the pass runs, what it holds fits beside what is resident.

        A kernel that does not run again has no row to switch off: the pass then holds no more than it did
        when its last kernel ran.
        """
        model, kernels, tensors = self.model, self.program.kernels, self.program.tensors
        rerun = self._reruns[k]
        born = sum(tensors[t].nbytes for t in kernels[k].accesses
                   if not tensors[t].persistent and self.program.accesses[t][0] == k)  # fmt: skip
        there = self.program.live_bytes[k] - born - kernels[k].workspace
        held: dict[int, Terms] = {w: [(kernels[w].workspace, rerun[w])] for w in rerun}
        settled: dict[int, Terms] = {w: [] for w in rerun}  # held from w to the end
        for x in {x for w in rerun for x in kernels[w].outputs if tensors[x].nbytes}:
            for w, v, last in self._held(k, x, needs.get(x, []), stays.get(x, -1)):
                (settled if last else held)[w].append((tensors[x].nbytes, v))
        beside = [(-self._size[i], self._is_away(i, k)) for i, g in enumerate(self.gaps) if g.after < k <= g.before]
        most, base = there, -1
        for w in rerun:
            beside += settled[w]
            most += sum(c for c, _ in settled[w])
            if most + sum(c for c, _ in held[w]) > self.limit:
                if beside or base < 0:  # what all later rows share, as one variable
                    known, constant = ([(1, base)], 0) if base >= 0 else ([], there)
                    base, beside = model.total(known + beside, constant, self.limit), []
                model.at_most([(1, base), *held[w]], self.limit)

    def _held(self, k: int, x: int, readers: list[tuple[int, int]], stays: int) -> list[tuple[int, int, bool]]:
        """What has the pass of k hold tensor x while w runs: (w, variable, from w to the end?).

        Args:
            readers: (w, need[k, w, x]), w descending.
            stays: the variable that has it stay, or -1.
        """
        model, rerun, writes = self.model, self._reruns[k], self.program.writes[x]
        writers = [w for w in rerun if w in writes]
        blind = [w for w in writers if x not in self.program.kernels[w].inputs]
        until = max([w for w, _ in readers[:1]] + writers)
        found: list[tuple[int, int, bool]] = []
        pending, why = list(readers), stays
        for w in sorted((w for w in rerun if writers[0] <= w <= until), reverse=True):
            while pending and pending[0][0] >= w:
                why = model.any_of([v for v in (pending.pop(0)[1], why) if v >= 0])
            parts = [why] if why >= 0 and w >= writes[0] else []
            if w in writers:
                parts = [rerun[w]]  # whoever needs x later has all its writers run
            # Overwritten without being read: held in between all the same.
            parts += [model.all_of((rerun[u], rerun[v])) for u, v in product(writers, blind) if u < w < v]
            if parts:
                found.append((w, model.any_of(parts), False))
        if stays >= 0:
            found += [(w, stays, True) for w in rerun if w > until][:1]
        return found

    def _loads(self) -> None:
        """The load of every kernel, less what is away and with what its pass keeps for later, fits."""
        for k, load in enumerate(self.program.live_bytes):
            if load > self.limit:
                terms = []
                for i, g in enumerate(self.gaps):
                    if g.after < k < g.before:
                        terms.append((-self._size[i], self._is_away(i, k)))
                        if (i, k) in self._back:
                            terms.append((self._size[i], self._back[i, k]))
                self.model.at_most(terms, self.limit - load)

    # ------------------------------------------------------------------------------ plans and assignments

    def rows(self, x: Sequence[int]) -> Rows:
        """int64[n, 6]: the plan of an assignment."""
        found = []
        for i, (g, drop) in enumerate(zip(self.gaps, self._drop, strict=True)):
            for after, v in zip([g.after, *self._cuts[i]], drop, strict=True):
                if x[v]:
                    at = next((k for k in self._cuts[i] if x[self._back[i, k]]), -1)
                    found.append((RECOMPUTE, g.tensor, after, g.before, 0, at))
        return np.array(found, dtype=np.int64).reshape(-1, 6)

    def nearest(self, rows: Rows) -> Rows | None:
        """int64[n, 6]: a plan with every tensor back at the one of its gap's cuts, or the end of the gap, that is
        nearest to where it is; None where ``rows`` does more than to recompute in the candidate gaps."""
        decisions = decisions_of(rows)
        index = {(g.tensor, g.before): i for i, g in enumerate(self.gaps)}
        if not all(isinstance(d, Recompute) and (d.tensor, d.before) in index for d in decisions):
            return None
        found = []
        for d, until in lower(self.program, Plan(decisions)).returns.items():
            cuts = [k for k in self._cuts[index[d.tensor, d.before]] if k > d.after]
            at = min([d.before, *cuts], key=lambda k: abs(k - until))
            found.append((RECOMPUTE, d.tensor, d.after, d.before, 0, at if at < d.before else -1))
        return np.array(found, dtype=np.int64).reshape(-1, 6)

    def assignment(self, rows: Rows) -> list[int]:
        """The assignment of a plan of the candidate gaps, all back at a cut or at the end of their gap. It costs what
        the plan does, and keeps every row where the plan fits the limit."""
        schedule = lower(self.program, Plan(decisions_of(rows)))
        index = {(g.tensor, g.before): i for i, g in enumerate(self.gaps)}
        x = [0] * len(self.model.cost)
        for d, until in schedule.returns.items():
            i = index[d.tensor, d.before]
            opens = [self.gaps[i].after, *self._cuts[i]]
            dropped = bisect_right(opens, d.after) - 1
            x[self._drop[i][dropped]] = 1
            for s, v in enumerate(self._away[i]):
                x[v] = int(s >= dropped and opens[s] < until)
            if until < d.before:
                x[self._back[i, until]] = 1
        for step in schedule.steps:
            if step.again:
                x[self._reruns[step.before][step.kernel]] = 1
        self.model.complete(x)
        return x
