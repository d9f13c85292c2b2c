"""Search over which kernels run again, and when: the schedules of Checkmate and MOCCASIN, by annealing and kicks.

The plans are sets of ``Rerun``: any kernel again, any number of times, early where that lets something go, backward
ones too; a copy lives until its last use before its writer's next run. That is the language of Checkmate (MLSys 2020,
section 4: R) and of MOCCASIN ("Efficient Tensor Rematerialization for Neural Networks", ICML 2023, section 2: retention
intervals). How it differs from these two; reasons in README.md; read on in ``RerunSearch.plan``:

1. No solver: annealing by the moves of rerun_moves.py from the program without reruns, then kicks of the best plan.
2. The floor's linear program says which tensors are worth splitting; the search stops where it reaches the floor.
3. Memory above the limit is allowed on the way, at a price that rises while there is any and falls while there is none.
4. A kick bans a kernel that runs again, or locks one that does not into the plan, for a short annealing.
5. Passes run in program order; a kernel runs again as often as it pays (MOCCASIN: at most a given number of times).
6. Kernels that write one tensor in turns run again together, with what reads it in between.
"""

from __future__ import annotations

import time

import numpy as np

from agents.bound import floor
from agents.planner import MIB, Facts, Rows, finish, infeasible
from agents.search.rerun_moves import BANNED, FROM, LOCKED, NODE, OWNER, TO, WORKSPACE, Tables, anneal, tables
from simulator.compiled.encoding import RERUN, Ints
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

HOT, WARM, COLD = 1e-3, 3e-4, 1e-5  # temperatures, of the ideal time
FIRST, KICK, SETTLE = 200_000, 20_000, 10_000  # moves of the first annealing, of a kick, and after it
PATIENCE = 40  # kicks without a better plan, after which the search starts anew
PART = 1_000  # moves between two looks at the clock
EXPLORE = 0.1  # added to the fraction of a tensor that the floor recomputes
PRICE = 10.0  # at first, of the ideal time for the excess of the empty plan
SLACK = 0.01  # a kicked plan is kicked next if its reruns take at most that much longer than the best one's


class RerunSearch:
    """The search.

    Args:
        time_limit: seconds. Where it ends the search, the plan depends on the speed of the computer.
        kicks: at most so many.
        min_bytes: tensors below this size stay.
    """

    facts = Facts(
        "rerun_search", "rerun search", "", family="search and exact", slot=6, place=250, moves="recompute", slow=3,
    )  # fmt: skip
    name = facts.key

    def __init__(self, time_limit: float = 60.0, kicks: int = 300, min_bytes: int = MIB, seed: int = 0) -> None:
        if not time_limit > 0:
            raise ValueError(f"time_limit: expected more than 0, got {time_limit}")
        if kicks < 0:
            raise ValueError(f"kicks: expected at least 0, got {kicks}")
        self.time_limit, self.kicks, self.min_bytes, self.seed = time_limit, kicks, min_bytes, seed
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible where there is none, or none was found."""
        until = time.monotonic() + self.time_limit
        engine = Engine(program, machine, limit)
        self.simulator_calls = 0
        runs: Ints = np.empty(0, np.int64)
        if program.peak_bytes > limit:
            table = tables(program, self.min_bytes)
            least = least_bytes(program, table)
            if least > limit:
                raise infeasible(self, program, limit, least)
            search = _Search(program, machine, table, limit, self.seed, until)
            search.first()
            for _ in range(self.kicks):
                if time.monotonic() > until or search.done:
                    break
                search.kick()
            if search.best_ns < 0:
                raise infeasible(self, program, limit, None)
            runs = search.best
        return finish(self, program, machine, limit, engine, rows(runs, len(program.kernels)))


def rows(runs: Ints, n: int) -> Rows:
    """int64[len(runs), 6]: the Reruns, of a program with n kernels."""
    out = np.full((len(runs), 6), -1, np.int64)
    out[:, 0], out[:, 2], out[:, 3], out[:, 4] = RERUN, runs % n, runs // n, 0
    return out


def least_bytes(program: Program, table: Tables) -> int:
    """What a kernel needs of memory, and what cannot be written again, at the kernel with the most."""
    load = table.kernels[WORKSPACE] + table.base
    for x, tensor in enumerate(program.tensors):
        uses, g = program.accesses[x], table.tensors[OWNER, x]
        if tensor.persistent or not uses:
            continue
        free = table.nodes[FROM, g] <= table.nodes[TO, g]
        for span in [slice(k, k + 1) for k in uses] if free else [slice(uses[0], uses[-1] + 1)]:
            load[span] += tensor.nbytes
    return int(load.max())


class _Search:
    """The plan that is kicked (``now``), and the best so far; ns of its reruns, -1: none fits."""

    def __init__(self, program: Program, machine: Machine, table: Tables, limit: int, seed: int, until: float) -> None:
        self.n, self.table, self.limit, self.until = len(program.kernels), table, limit, until
        self.rng = np.random.default_rng(seed)
        self.ideal = max(program.ideal_ns, 1)
        self.price = PRICE * self.ideal / sum(max(used - limit, 0) for used in program.live_bytes)
        below = floor(program, machine, limit, "recompute")
        self.enough = below.iteration_ns - program.ideal_ns
        worth = np.full(len(program.tensors), EXPLORE)
        for gap, part in zip(below.gaps, below.recomputed, strict=True):
            worth[gap.tensor] = max(worth[gap.tensor], EXPLORE + part)
        self.split = table.worth * worth
        self.lock = np.zeros(table.nodes.shape[1])  # per node: how likely it is locked in
        self.uses: list[list[int]] = [[] for _ in self.lock]  # per node: kernels for which it may run again
        for x, g in enumerate(table.tensors[OWNER]):
            later = [k for k in program.accesses[x] if table.nodes[FROM, g] <= k <= table.nodes[TO, g]]
            if self.split[x] > 0 and later:
                self.lock[g] += self.split[x]
                self.uses[g] += later
        self.best: Ints = np.empty(0, np.int64)
        self.best_ns = -1
        self.deck: list[int] = []

    @property
    def done(self) -> bool:
        """Is nothing left to gain?"""
        return 0 <= self.best_ns <= self.enough

    def first(self) -> None:
        """From the program without reruns."""
        self.now, self.since_ns, self.dull = np.empty(0, np.int64), -1, 0
        runs, ns, last, price = self._anneal(self.now, FIRST, HOT, np.zeros_like(self.lock, np.int64))
        self.now, self.price = last, price
        self._take(runs, ns)

    def kick(self) -> None:
        """A short annealing under a ban or with a lock, then one without; or a new start."""
        self.dull += 1
        if self.dull > PATIENCE:
            self.first()
            return
        rules = np.zeros_like(self.lock, np.int64)
        node = self.table.kernels[NODE][self.now % self.n]
        lock = self.lock.copy()
        lock[node] = 0.0
        if len(node) and (self.rng.random() < 0.5 or not lock.any()):  # every ban once before one comes again
            self.deck = [g for g in self.deck if g in node] or self.rng.permutation(np.unique(node)).tolist()
            g = self.deck.pop()
            rules[g], start = BANNED, self.now[node != g]
        elif lock.any():
            g = int(self.rng.choice(len(lock), p=lock / lock.sum()))
            members = np.flatnonzero(self.table.kernels[NODE] == g)
            rules[g], start = LOCKED, np.union1d(self.now, self.rng.choice(self.uses[g]) * self.n + members)
        else:
            return
        runs, ns, last, _ = self._anneal(start, KICK, WARM, rules)
        self._take(runs, ns)
        runs, ns, last, _ = self._anneal(last if ns < 0 else runs, SETTLE, WARM / 3, np.zeros_like(rules))
        self._take(runs, ns)
        if self.since_ns < 0:
            self.now = last

    def _anneal(self, runs: Ints, moves: int, hot: float, rules: Ints) -> tuple[Ints, int, Ints, float]:
        """One annealing from ``runs``: the best, its ns, the last state, the last price."""
        state = np.empty(2 * len(runs) + 2 * self.n + self.table.room, np.int64)
        state[: len(runs)], m = runs, len(runs)
        rng = self.rng.integers(1, 2**63, 1, dtype=np.uint64)
        best, best_ns, price, fall = runs, -1, self.price, COLD / hot
        for part in range(0, moves, PART):
            if part and time.monotonic() > self.until:
                break
            begin, end = (self.ideal * hot * fall ** (done / moves) for done in (part, part + PART))
            m, found, ns, price = anneal(
                rng, self.table.kernels, self.table.nodes, self.table.tensors, self.split, self.table.graph,
                self.table.base, self.limit, rules, state, m, min(PART, moves - part), begin, end, price,
                self.table.room,
            )  # fmt: skip
            if ns >= 0 and (best_ns < 0 or ns < best_ns):
                best, best_ns = found, ns
        return best, best_ns, state[:m].copy(), price

    def _take(self, runs: Ints, ns: int) -> None:
        """Goes on from these runs if they are near the best since the search started anew."""
        if ns < 0:
            return
        if self.since_ns < 0 or ns < self.since_ns:
            self.since_ns, self.dull = ns, 0
        if ns <= self.since_ns * (1 + SLACK):
            self.now = runs
        if self.best_ns < 0 or ns < self.best_ns:
            self.best, self.best_ns = runs, ns
