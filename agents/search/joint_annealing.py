"""Simulated annealing over the plans of several jobs that share a GPU, scored by all of them together.

State: a plan for every job. A move changes one job's plan (the moves of local_moves.py), within the memory that the
others' plans leave; so memory goes from job to job as plans change. Energy: the makespan of a fixed amount of work
(agents/jobs.py), simulated with all jobs. Metropolis acceptance; the temperature falls geometrically from ``hot`` to
``cold`` (fractions of the makespan with unlimited memory).

1. The starts are the plans of other planners of several jobs; the best by makespan is taken.
2. Every job keeps within what its plan needs and an equal part of what no plan needs.
3. A job is picked with a chance in proportion to its candidate gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agents.jobs import ROUNDS, JobsPlanner, SearchedSplit, engine_of, unlimited_ns
from agents.planner import MIB, Infeasible, Rows
from agents.search.local_search import Moves, check_heat
from simulator.compiled.encoding import decisions_of, rows_of
from simulator.jobs import JobsEngine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.ways import check_mode

CALLS = 1_000


class JointAnnealing:
    """Annealing over several jobs.

    Args:
        starts: planners of several jobs; one that has no plans is passed over.
        calls: simulations of all jobs together.
        mode: swap, recompute or joint.
        hot, cold: first and last temperature.
        min_bytes: tensors below this size stay.
        rounds: iterations of the longest job in the work (agents/jobs.py).
    """

    def __init__(
        self, starts: Sequence[JobsPlanner] = (), calls: int = CALLS, mode: str = "joint", hot: float = 3e-4,
        cold: float = 3e-5, min_bytes: int = MIB, rounds: int = ROUNDS, seed: int = 0,
    ) -> None:  # fmt: skip
        check_heat(hot, cold)
        if calls < 1:
            raise ValueError(f"calls: expected at least 1, got {calls}")
        self.name, self.simulator_calls = "joint annealing", 0
        self.starts = tuple(starts) or (SearchedSplit("policy_search", mode=mode, min_bytes=min_bytes),)
        self.calls, self.mode, self.hot, self.cold = calls, check_mode(mode), hot, cold
        self.min_bytes, self.rounds, self.seed = min_bytes, rounds, seed

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """The best plans found; raises Infeasible where no start has plans."""
        engine, begun = engine_of(programs, machine, limit, self.rounds), []
        self.simulator_calls = 0
        for i, planner in enumerate(self.starts):
            try:
                plans = planner.plan_jobs(programs, machine, limit)
            except Infeasible:
                plans = ()
            self.simulator_calls += planner.simulator_calls
            if plans and (score := engine.score(plans)).feasible:
                begun.append((score.makespan_ns, i, plans))
        if not begun:
            raise Infeasible(f"{self.name}: no start has plans for {len(programs)} jobs in {limit:,} bytes")
        now, _, plans = min(begun, key=lambda entry: entry[:2])
        best = self._search(engine, plans, now)
        self.simulator_calls += engine.calls
        return best

    def _search(self, engine: JobsEngine, plans: tuple[Plan, ...], now: int) -> tuple[Plan, ...]:
        """The best plans on the way from these, whose makespan is ``now``."""
        programs, machine, limit = engine.programs, engine.machine, engine.limit
        ideal = unlimited_ns(programs, machine, rounds=self.rounds)
        jobs = [Moves(p, limit, self.mode, self.min_bytes, self.seed + j) for j, p in enumerate(programs)]
        for moves, plan in zip(jobs, plans, strict=True):
            moves.reset(rows_of(plan.decisions))
        random = np.random.default_rng(self.seed)
        gaps = np.array([len(moves.gaps) for moves in jobs], dtype=np.float64)
        best, best_ns = plans, now
        for step in range(self.calls if gaps.any() else 0):
            j = int(random.choice(len(jobs), p=gaps / gaps.sum()))
            needs = [int(moves.load.max()) for moves in jobs]
            jobs[j].limit = limit - sum(needs) + needs[j]
            rows = jobs[j].propose()
            if rows is None:
                continue
            tried = [*map(Moves.plan, jobs[:j]), rows, *map(Moves.plan, jobs[j + 1 :])]
            needs[j] = int(jobs[j].proposed_load.max())
            found = _plans(programs, tried, needs, machine, limit, self.name)
            score = engine.score(found)
            heat = ideal * self.hot * (self.cold / self.hot) ** (step / self.calls)
            if score.feasible and score.makespan_ns < now - heat * math.log(1.0 - random.random()):
                jobs[j].accept()
                now = score.makespan_ns
                if now < best_ns:
                    best, best_ns = found, now
        return best


def _plans(
    programs: Sequence[Program], rows: Sequence[Rows], needs: Sequence[int], machine: Machine, limit: int, name: str
) -> tuple[Plan, ...]:  # fmt: skip
    """Plans of these rows, each with the memory that it needs and an equal part of the rest."""
    spare = (limit - sum(needs)) // len(needs)
    return tuple(
        Plan(decisions_of(mine), program.fingerprint, name, need + spare, machine.name)
        for program, mine, need in zip(programs, rows, needs, strict=True)
    )
