"""Random search, the baseline: the fastest of many random swap plans that fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.planner import LEAST, PlannerInfo, Rows, RowsPlanner, at_least
from simulator.compiled.engine import Engine


@dataclass(eq=False)
class RandomSearch(RowsPlanner):
    """Random search: each of ``calls - 1`` samples empties gaps in random order until the planned residency fits."""

    facts = PlannerInfo("random_search", "random search", "", family="search", slot=1, place=10, moves="swap")

    calls: int = at_least(LEAST, 2_000)

    def choose(self, engine: Engine) -> Rows:
        """Returns the best sample; raises Infeasible if emptying all gaps leaves the peak above the limit."""
        program, limit = engine.program, engine.limit
        candidates = self.reachable(engine, program.gaps(self.min_bytes))
        rng = np.random.default_rng(self.seed)
        samples = self.calls - 1 if program.peak_bytes > limit else 1
        orders = (rng.permutation(len(candidates)).tolist() for _ in range(samples))
        plans = (candidates.rows[np.sort(candidates.first(iter(order), limit))] for order in orders)
        return min(plans, key=lambda rows: engine.score(rows).iteration_ns)
