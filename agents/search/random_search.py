"""Random search, the baseline of the searches: the fastest of many random plans of swaps that fit."""

from __future__ import annotations

import numpy as np

from agents.planner import MIB, Candidates, PlannerInfo, check_budget, finish, infeasible
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


class RandomSearch:
    """Each of ``calls - 1`` samples empties gaps in random order until the planned residency fits the limit."""

    facts = PlannerInfo("random_search", "random search", "", family="search", slot=1, place=10, moves="swap")
    name = facts.key

    def __init__(self, calls: int = 2_000, min_bytes: int = MIB, seed: int = 0) -> None:
        check_budget(calls)
        self.calls, self.min_bytes, self.seed = calls, min_bytes, seed
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best sample; raises Infeasible if all gaps together leave the peak above ``limit``."""
        candidates = Candidates(program, program.gaps(self.min_bytes))
        if candidates.least > limit:
            raise infeasible(self, program, limit, candidates.least)
        engine, rng = Engine(program, machine, limit), np.random.default_rng(self.seed)
        samples = self.calls - 1 if program.peak_bytes > limit else 1
        orders = (rng.permutation(len(candidates)).tolist() for _ in range(samples))
        plans = (candidates.rows[np.sort(candidates.first(iter(order), limit))] for order in orders)
        best = min(plans, key=lambda rows: engine.score(rows).iteration_ns)
        return finish(self, program, machine, limit, engine, best)
