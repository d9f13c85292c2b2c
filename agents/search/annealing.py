"""Simulated annealing over plans: what the learned agent is compared with.

State: which candidate gaps are emptied, and how. Candidates are all gaps of tensors of at least ``min_bytes``, those
that do not span the peak and those over the iteration boundary included. Energy: the simulated iteration time over
the ideal one. The moves are those of local_search.py, with all gaps and ways alike.

The start is the best plan of AutoSwap, SuperNeurons, Capuchin and memonger (those that ``mode`` allows), or else every
gap emptied. Metropolis acceptance; the temperature falls geometrically from ``hot`` to ``cold`` (fractions of the
ideal time) in each of ``restarts`` equal runs, each from the best plan so far.
"""

from __future__ import annotations

import numpy as np

from agents.heuristics.autoswap import SCORES, AutoSwap
from agents.heuristics.capuchin import Capuchin
from agents.heuristics.memonger import Memonger
from agents.heuristics.superneurons import SuperNeurons
from agents.planner import MIB, Facts, Planner, Rows, finish, infeasible, plans_of, ways_of
from agents.search.local_search import Moves, anneal
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.ways import check_mode


class Annealing:
    """Simulated annealing.

    Args:
        calls: simulator calls, those of the start and the final check included.
        mode: swap, recompute or joint.
        hot: first temperature, as a fraction of the ideal time.
        cold: last temperature.
        restarts: equal runs that share the calls.
        min_bytes: tensors below this size stay.
    """

    facts = Facts(
        "annealing", "simulated annealing", "", family="search and exact", slot=2, place=220, moves="joint", slow=1,
    )  # fmt: skip
    name = facts.key

    def __init__(
        self,
        calls: int = 20_000,
        mode: str = "swap",
        hot: float = 3e-3,
        cold: float = 3e-5,
        restarts: int = 1,
        min_bytes: int = MIB,
        seed: int = 0,
    ) -> None:
        if calls < 20:
            raise ValueError(f"calls: expected at least 20, got {calls}")
        if not 0 < cold <= hot:
            raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")
        self.calls, self.mode, self.hot, self.cold = calls, check_mode(mode), hot, cold
        self.restarts, self.min_bytes, self.seed = restarts, min_bytes, seed
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible when none of the starts fits ``limit``."""
        engine = Engine(program, machine, limit)
        best, best_ns, required = start(program, machine, limit, engine, self.mode, self.min_bytes)
        if best is None:
            self.simulator_calls = engine.calls
            # Chains take memory, so that recomputing everything does not reach the least.
            raise infeasible(self, program, limit, required if self.mode == "swap" else None)
        moves = Moves(program, limit, self.mode, self.min_bytes, self.seed)
        each = max((self.calls - 1 - engine.calls) // self.restarts, 0)  # the last call is the final check
        for run in range(self.restarts):
            best, best_ns = anneal(moves, engine, best, best_ns, each, self.hot, self.cold, self.seed + run)
        return finish(self, program, machine, limit, engine, best)


def start(
    program: Program, machine: Machine, limit: int, engine: Engine, mode: str, min_bytes: int
) -> tuple[Rows | None, int, int]:
    """Rows, iteration time and required bytes of the best plan of the heuristics, or of every gap emptied where they
    have none. The rows are None where that does not fit either. All simulator calls are added to ``engine``'s."""
    heuristics: list[Planner] = []
    if mode != "recompute":
        heuristics += [AutoSwap(score, min_bytes) for score in SCORES]
    if mode != "swap":
        heuristics += [SuperNeurons(mode, early=True, min_bytes=min_bytes), Memonger(min_bytes=min_bytes)]
    heuristics += [Capuchin(mode, min_bytes=min_bytes)]
    found = plans_of(heuristics, program, machine, limit, engine) or [everything(program, mode, min_bytes)]
    scores = [engine.score(rows) for rows in found]
    best = min(range(len(found)), key=lambda i: (not scores[i].feasible, scores[i].iteration_ns))
    feasible, iteration_ns, required, *_ = scores[best]
    return found[best] if feasible else None, iteration_ns, required


def everything(program: Program, mode: str, min_bytes: int) -> Rows:
    """int64[m, 6]: every gap emptied in the first of its ways."""
    ways = [ways_of(program, gap, mode) for gap in program.gaps(min_bytes)]
    return np.array([w[0] for w in ways if w], dtype=np.int64).reshape(-1, 6)
