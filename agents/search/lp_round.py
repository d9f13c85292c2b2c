"""Rounding the floor: bound.py's linear program says what the best plan would look like, local search makes it a plan.

Three steps, reasons in README.md; read on in ``LPRound.plan``:

1. Solve the linear program of the floor. Few of the fractions in its optimum are neither 0 nor 1.
2. Round: recompute a gap that it recomputes by more than ``DROP``, swap any other that it empties at all.
3. Repair by annealing, gaps and ways picked by their fractions: ``RUNS``, then kicks of the best plan, then cooling.
"""

from __future__ import annotations

import numpy as np

from agents.bound import floor
from agents.planner import MIB, Facts, Rows, finish, infeasible, row_of
from agents.search.annealing import start
from agents.search.local_search import Moves, anneal
from simulator.compiled.encoding import BEFORE, KIND, NEVER, RECOMPUTE, SWAP, TENSOR
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.ways import RECOMPUTED, SWAPPED, check_mode, ways_to_empty

DROP = 0.3
RUNS = ((0.05, 1e-3), (0.2, 1e-3), (1.0, 3e-3))  # explore: added to every weight; hot: of the ideal time
KICK = 4000  # simulator calls
KERNELS, MOST = 10**8, 300_000
HOT, WARM, COLD = 1e-3, 3e-4, 1e-5  # temperatures, of the ideal time


class LPRound:
    """The floor's program, rounded and repaired.

    Args:
        calls: simulator calls; None: as many as simulate ``KERNELS`` kernels, at most ``MOST``.
        mode: swap, recompute or joint.
        min_bytes: tensors below this size stay.

    Attributes:
        floor: the floor under all plans of the mode, after ``plan``.
    """

    facts = Facts("lp_round", "LP rounding", "", family="search and exact", slot=4, place=230, moves="joint", slow=2)
    name = facts.key

    def __init__(self, calls: int | None = None, mode: str = "joint", min_bytes: int = MIB, seed: int = 0) -> None:
        if calls is not None and calls < 20:
            raise ValueError(f"calls: expected at least 20, got {calls}")
        self.calls, self.mode, self.min_bytes, self.seed = calls, check_mode(mode), min_bytes, seed
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible where the floor proves that there is none, or none was found."""
        engine = Engine(program, machine, limit)
        self.floor = floor(program, machine, limit, self.mode)
        self.simulator_calls = 0
        if not self.floor.feasible:
            raise infeasible(self, program, limit, self.floor.least_bytes)
        at = {gap: i for i, gap in enumerate(self.floor.gaps)}
        gaps = program.gaps(self.min_bytes)
        swapped, recomputed = (
            np.array([part[at[g]] if g in at else 0.0 for g in gaps])
            for part in (self.floor.swapped, self.floor.recomputed)
        )
        ways = [ways_to_empty(program, g, self.mode) for g in gaps]  # the floor knows more of them
        recomputed = np.where([RECOMPUTED in w for w in ways], recomputed, 0.0)
        rounded = [
            row_of(g, RECOMPUTED if drop > DROP else SWAPPED)
            for g, leave, drop in zip(gaps, swapped, recomputed, strict=True)
            if drop > DROP or (leave + drop > 1e-3 and self.mode != "recompute")
        ]
        best = np.array(rounded, dtype=np.int64).reshape(-1, 6)
        feasible, best_ns, required, *_ = engine.score(best)
        if not feasible:
            found, best_ns, required = start(program, machine, limit, engine, self.mode, self.min_bytes)
            if found is None:
                self.simulator_calls = engine.calls
                raise infeasible(self, program, limit, required if self.mode == "swap" else None)
            best = found
        fractions = np.stack([np.zeros_like(swapped), swapped, recomputed / 2, recomputed / 2], 1)
        tried = [
            Moves(program, limit, self.mode, self.min_bytes, self.seed + run, fractions + explore)
            for run, (explore, _) in enumerate(RUNS)
        ]
        search = _Search(engine, tried[0], best, best_ns, self.floor.iteration_ns, np.random.default_rng(self.seed))
        calls = self.calls or min(KERNELS // len(program.kernels), MOST)
        left = max(calls - 1 - engine.calls, 0)  # the last call is the final check
        for moves, (_, hot) in zip(tried, RUNS, strict=True):
            search.run(moves, best, best_ns, left // 3 // len(RUNS), hot)
        for _ in range(max(left // 2 // KICK, 1)):
            search.kick(min(KICK, left // 2))
        search.run(search.moves, search.best, search.best_ns, max(calls - 1 - engine.calls, 0), WARM)
        return finish(self, program, machine, limit, engine, search.best)


class _Search:
    """The best plan so far, and the moves that found it."""

    def __init__(
        self, engine: Engine, moves: Moves, best: Rows, best_ns: int, enough_ns: int, rng: np.random.Generator
    ) -> None:
        self.engine, self.moves, self.best, self.best_ns = engine, moves, best, best_ns
        self.enough_ns, self.rng = enough_ns, rng

    def run(self, moves: Moves, start: Rows, start_ns: int, calls: int, hot: float) -> None:
        """One run of annealing."""
        if self.best_ns > self.enough_ns:
            seed = int(self.rng.integers(2**31))
            found, found_ns = anneal(moves, self.engine, start, start_ns, calls, hot, COLD, seed, self.enough_ns)
            if found_ns < self.best_ns:
                self.best, self.best_ns, self.moves = found, found_ns, moves

    def kick(self, calls: int) -> None:
        """A run from the best plan without one of its recomputed gaps (or else swapped ones), which may not be
        emptied in that way."""
        if self.best_ns <= self.enough_ns:
            return
        dropped = np.flatnonzero(self.best[:, KIND] == RECOMPUTE)
        out = int(self.rng.choice(dropped if len(dropped) else len(self.best)))
        moves, row = self.moves, self.best[out]
        i = moves.index[int(row[TENSOR]), int(row[BEFORE])]
        weights = moves.weights[i].copy()
        swapped = np.arange(len(weights)) == SWAPPED
        moves.weights[i] = np.where(swapped == (row[KIND] == SWAP), 0.0, weights)
        self.run(moves, np.delete(self.best, out, 0), NEVER, calls, HOT)
        moves.weights[i] = weights
