"""Random search: what simulator calls are worth without any thought.

Every sample empties candidate gaps in random order until the planned residency fits the limit. The best by simulated
iteration time is kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agents.planner import MIB, Candidates, PlannerInfo, Rows, finish, infeasible
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

BATCH = 1000  # plans that are scored at a time


class RandomSearch:
    """Best of ``calls`` random feasible plans of swaps.

    Args:
        calls: simulator calls, the final check included.
        min_bytes: tensors below this size are no candidates.
    """

    facts = PlannerInfo("random_search", "random search", "", family="search and exact", slot=1, place=10, moves="swap")
    name = facts.key

    def __init__(self, calls: int = 2_000, min_bytes: int = MIB, seed: int = 0) -> None:
        if calls < 2:
            raise ValueError(f"calls: expected at least 2 (one sample and the final check), got {calls}")
        self.calls, self.min_bytes, self.seed = calls, min_bytes, seed
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best sample; raises Infeasible when all candidate gaps together leave the peak above ``limit``."""
        candidates = Candidates(program, program.gaps(self.min_bytes))
        if candidates.least > limit:
            raise infeasible(self, program, limit, candidates.least)
        engine = Engine(program, machine, limit)
        rng = np.random.default_rng(self.seed)
        best: Rows = candidates.rows
        best_ns: float = np.inf
        # Where nothing need leave, every sample is the empty plan.
        left = self.calls - 1 if candidates.live_bytes.max() > limit else 1
        while left:
            plans = [candidates.rows[random_subset(candidates, limit, rng)] for _ in range(min(left, BATCH))]
            for rows, score in zip(plans, engine.scores(plans), strict=True):
                if score.iteration_ns < best_ns:
                    best, best_ns = rows, score.iteration_ns
            left -= len(plans)
        return finish(self, program, machine, limit, engine, best)


def random_subset(candidates: Candidates, limit: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """bool[m]: gaps added in random order until the planned residency is at most ``limit``, which all of
    them together must allow."""
    chosen = np.zeros(len(candidates), dtype=bool)
    chosen[candidates.first(iter(rng.permutation(len(candidates)).tolist()), limit)] = True
    return chosen
