"""Search over recomputation schedules (the plan spaces of Checkmate and MOCCASIN) by annealing and kicks.

Plans are sets of ``Rerun``: any kernel any number of times, early if that frees memory, including backward kernels; a
copy lives until its last use before the next run of its writer. This is the plan space of Checkmate (MLSys 2020,
section 4: R) and of MOCCASIN ("Efficient Tensor Rematerialization for Neural Networks", ICML 2023, section 2:
retention intervals). Entry point: ``RerunSearch.plan``; differences from these two: README.md.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planner import PlannerInfo, Rows, RowsPlanner, at_least, positive
from agents.search.budgeted import budgeted
from agents.search.rerun_moves import Rule, Tables, anneal, pruned, tables
from simulator.compiled.encoding import Ints, rows_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import evictions
from simulator.plan import Plan, Rerun
from simulator.program import Program
from simulator.residency import recompute_ns


@dataclass(frozen=True)
class RerunSearchOptions:
    """Schedule of the search. Temperatures are fractions of the ideal time."""

    hot: float = 1e-3  # first temperature of a start from the program without reruns
    warm: float = 3e-4  # first temperature of a kick, and, divided by 3, after it
    cold: float = 1e-5  # last temperature of all
    start_moves: int = 200_000  # moves of a start
    kick_moves: int = 20_000  # moves of a kick, with its rule
    settle_moves: int = 10_000  # after a kick, without its rule
    patience: int = 40  # kicks without improvement before a restart
    clock_moves: int = 1_000  # moves between looks at the clock
    # Added to the fractions of ``relaxed`` as weights of the tensors, in turn: 0.1 trusts them, 1 hardly.
    explore: tuple[float, ...] = (0.1, 1.0)
    price: float = 10.0  # initial price: that times the ideal time is the cost of the empty plan's excess
    slack: float = 0.01  # a kicked plan is continued from if its rerun time exceeds the best by at most that fraction


OPTIONS = RerunSearchOptions()


@dataclass(eq=False)
class RerunSearch(RowsPlanner):
    """Annealing and kicks over sets of reruns.

    Args:
        seconds: wall-clock budget. If it ends the search, the plan depends on the speed of the computer.
        kicks: maximum number of kicks.
    """

    facts = PlannerInfo("rerun_search", "rerun search", "", "search", 5, 250, "recompute", slow=3)

    seconds: float = positive(60.0)
    kicks: int = at_least(0, 300)

    @budgeted
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the best plan found; raises Infeasible if none exists or none was found."""
        deadline = time.monotonic() + self.seconds
        engine = Engine(program, machine, limit)
        runs: Ints = np.empty(0, np.int64)
        if program.peak_bytes > limit:
            table = tables(program, self.min_bytes)
            min_limit = least_bytes(program, table)
            if min_limit > limit:
                raise self.beyond_reach(engine, min_limit)
            search = _KickSearch(program, table, limit, self.seed, deadline)
            for explore in OPTIONS.explore:
                search.restart(explore)
            for _ in range(self.kicks):
                if time.monotonic() > deadline:
                    break
                search.kick()
            if search.best_ns < 0:
                raise self.beyond_reach(engine, None)
            runs = pruned(table, search.best)
        return self.finish(engine, rows(runs, len(program.kernels)))


def rows(runs: Ints, n: int) -> Rows:
    """Returns int64[len(runs), 6], the Rerun rows of a program with n kernels."""
    return rows_of(Rerun(run % n, run // n) for run in runs.tolist())


def least_bytes(program: Program, table: Tables) -> int:
    """Returns the maximum over kernels of their own memory plus that of tensors that cannot be recomputed."""
    load = table.kernels["workspace"] + table.base
    for x, tensor in enumerate(program.tensors):
        uses = program.accesses[x]
        if tensor.persistent or not uses:
            continue
        first, last = table.nodes[table.tensors["owner"][x]]
        is_rerunnable = first <= last
        for span in [slice(k, k + 1) for k in uses] if is_rerunnable else [slice(uses[0], uses[-1] + 1)]:
            load[span] += tensor.nbytes
    return int(load.max())


def relaxed(program: Program, table: Tables, limit: int) -> NDArray[np.float64]:
    """Returns float64[tensors], the evicted fraction of each tensor in the cheapest relaxed way to fit the limit.

    The relaxation assumes that recomputation takes its standalone time and no memory; 1 if it has no solution.
    """
    from scipy.optimize import linprog
    from scipy.sparse import lil_array

    gaps = [g for g in program.gaps() if table.worth[g.tensor] > 0 and evictions(program, g, "recompute")]
    fractions = np.zeros(len(program.tensors))
    fractions[[g.tensor for g in gaps]] = 1.0
    heavy = [k for k, used in enumerate(program.live_bytes) if used > limit]
    size = np.array([program.tensors[g.tensor].nbytes for g in gaps]) / limit
    cost = np.array([recompute_ns(program, g) for g in gaps]) / max(program.ideal_ns, 1)
    matrix = lil_array((len(heavy), len(gaps)))
    for i, g in enumerate(gaps):
        for j in range(bisect_right(heavy, g.after), bisect_left(heavy, g.before)):
            matrix[j, i] = -size[i]
    excess = [1 - program.live_bytes[k] / limit for k in heavy]
    solution = linprog(cost, matrix.tocsr(), excess, bounds=(0, 1)) if gaps else None
    if solution is not None and solution.x is not None:
        fractions[:] = 0.0
        for g, part in zip(gaps, solution.x, strict=True):
            fractions[g.tensor] = max(fractions[g.tensor], part)
    return fractions


class _KickSearch:
    """Search state: the current plan (``current``) and the best so far; ns of its reruns, -1: none fits."""

    def __init__(self, program: Program, table: Tables, limit: int, seed: int, deadline: float) -> None:
        self.n = len(program.kernels)
        self.table = table
        self.limit = limit
        self.deadline = deadline
        self.rng = np.random.default_rng(seed)
        self.ideal = max(program.ideal_ns, 1)
        self.price = OPTIONS.price * self.ideal / sum(max(used - limit, 0) for used in program.live_bytes)
        self.fractions = relaxed(program, table, limit)
        self.lock = np.zeros(len(table.nodes))  # per node: weight of being locked
        self.uses: list[list[int]] = [[] for _ in self.lock]  # per node: kernels before which it can be recomputed
        for x, g in enumerate(table.tensors["owner"]):
            first, last = table.nodes[g]
            later = [k for k in program.accesses[x] if first <= k <= last]
            if table.worth[x] > 0 and later:
                self.lock[g] += table.worth[x] * (OPTIONS.explore[0] + self.fractions[x])
                self.uses[g] += later
        self.best: Ints = np.empty(0, np.int64)
        self.best_ns = -1
        self.ban_deck: list[int] = []
        self.starts = 0

    def restart(self, explore: float) -> None:
        """Starts from the program without reruns."""
        self.worth = self.table.worth * (explore + self.fractions)
        empty: Ints = np.empty(0, np.int64)
        free = np.full(len(self.lock), Rule.FREE, np.int64)
        runs, ns, last, self.price = self._anneal(empty, OPTIONS.start_moves, OPTIONS.hot, free)
        self.current = runs if ns >= 0 else last
        self.since_ns = ns
        self.failures = 0
        self._accept(runs, ns)
        if not self.starts and self.best_ns >= 0:  # before the first restart, the best runs so far are perturbed next
            self.current = self.best
            self.since_ns = self.best_ns

    def kick(self) -> None:
        """Anneals briefly with one node banned or locked, then without; restarts after too many failures."""
        self.failures += 1
        if self.failures > OPTIONS.patience:
            self.starts += 1
            self.restart(OPTIONS.explore[self.starts % len(OPTIONS.explore)])
            return
        free = np.full(len(self.lock), Rule.FREE, np.int64)
        rules = free.copy()
        node = self.table.kernels["node"][self.current % self.n]
        lock = self.lock.copy()
        lock[node] = 0.0
        if len(node) and (self.rng.random() < 0.5 or not lock.any()):  # each ban is used once before any repeats
            self.ban_deck = [g for g in self.ban_deck if g in node] or self.rng.permutation(np.unique(node)).tolist()
            g = self.ban_deck.pop()
            rules[g] = Rule.BANNED
            start = self.current[node != g]
        elif lock.any():
            g = int(self.rng.choice(len(lock), p=lock / lock.sum()))
            members = np.flatnonzero(self.table.kernels["node"] == g)
            rules[g] = Rule.LOCKED
            start = np.union1d(self.current, self.rng.choice(self.uses[g]) * self.n + members)
        else:
            return
        runs, ns, last, _ = self._anneal(start, OPTIONS.kick_moves, OPTIONS.warm, rules)
        self._accept(runs, ns)
        start = last if ns < 0 else runs
        runs, ns, last, _ = self._anneal(start, OPTIONS.settle_moves, OPTIONS.warm / 3, free)
        self._accept(runs, ns)
        if self.since_ns < 0:
            self.current = last

    def _anneal(self, runs: Ints, moves: int, hot: float, rules: Ints) -> tuple[Ints, int, Ints, float]:
        """Anneals once from ``runs``; returns the best runs, their ns, the final state and the final price."""
        table = self.table._replace(worth=self.worth)
        state = np.empty(2 * len(runs) + 2 * self.n + table.room, np.int64)
        state[: len(runs)] = runs
        m = len(runs)
        rng = self.rng.integers(1, 2**63, 1, dtype=np.uint64)
        best = runs
        best_ns = -1
        price = self.price
        fall = OPTIONS.cold / hot
        chunk = OPTIONS.clock_moves
        for move in range(0, moves, chunk):
            if move and time.monotonic() > self.deadline:
                break
            begin, end = (self.ideal * hot * fall ** (done / moves) for done in (move, move + chunk))
            m, candidate, ns, price = anneal(
                rng, table, self.limit, rules, state, m, min(chunk, moves - move), begin, end, price
            )
            if ns >= 0 and (best_ns < 0 or ns < best_ns):
                best = candidate
                best_ns = ns
        return best, best_ns, state[:m].copy(), price

    def _accept(self, runs: Ints, ns: int) -> None:
        """Accepts runs as the current plan if they are close to the best since the last restart."""
        if ns < 0:
            return
        if self.since_ns < 0 or ns < self.since_ns:
            self.since_ns = ns
            self.failures = 0
        if ns <= self.since_ns * (1 + OPTIONS.slack):
            self.current = runs
        if self.best_ns < 0 or ns < self.best_ns:
            self.best = runs
            self.best_ns = ns
