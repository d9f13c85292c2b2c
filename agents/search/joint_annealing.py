"""Simulated annealing over the plans of several jobs that share a GPU, scored by all of them together.

State: a plan for every job. A move changes one job's plan (the moves of local_moves.py), within the memory that the
others' plans leave; so memory goes from job to job as plans change. Energy: the makespan of a fixed amount of work
(agents/jobs.py), simulated with all jobs. Metropolis acceptance; the temperature falls geometrically from ``hot`` to
``cold`` (fractions of the makespan with unlimited memory).

Plans are made robust by samples of noise (simulator/jobs/noise.py), the same ones for every move: the energy is then
the mean over them. That is for one job, too.

1. The starts are the plans of other planners of several jobs; the best by makespan is taken.
2. Every job keeps within what its plan needs and an equal part of what no plan needs.
3. A job is picked with a chance in proportion to its candidate gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agents.jobs import ROUNDS, JobsPlanner, SearchedSplit, engine_of, parts_of, shares_of_work, unlimited_ns
from agents.planner import MIB, Infeasible
from agents.search.local_search import Moves, check_heat
from simulator.compiled.encoding import Ints, decisions_of, rows_of
from simulator.job import Tenant
from simulator.jobs import JobsEngine
from simulator.jobs.noise import Noise
from simulator.machine import Machine
from simulator.modes import check_mode
from simulator.plan import Plan
from simulator.program import Program

CALLS = 1_000

World = tuple[Sequence[tuple[tuple[int, ...], ...]] | None, Tenant | None]  # kernel times of each job, tenant


class JointAnnealing:
    """Annealing over several jobs.

    Args:
        starts: planners of several jobs; one that has no plans is passed over.
        calls: simulations of all jobs together, one for each sample.
        mode: swap, recompute or joint.
        hot, cold: first and last temperature.
        min_bytes: tensors below this size stay.
        rounds: iterations of the longest job in the work (agents/jobs.py).
        noise: what plans are made for; None: kernels take their own times, and the link is theirs.
        samples: of the noise.
    """

    def __init__(
        self, starts: Sequence[JobsPlanner] = (), calls: int = CALLS, mode: str = "joint", hot: float = 3e-4,
        cold: float = 3e-5, min_bytes: int = MIB, rounds: int = ROUNDS, seed: int = 0, noise: Noise | None = None,
        samples: int = 4,
    ) -> None:  # fmt: skip
        check_heat(hot, cold)
        if calls < 1 or samples < 1:
            raise ValueError(f"calls, samples: expected at least 1, got {calls} and {samples}")
        self.name, self.simulator_calls = "joint annealing", 0
        self.starts = tuple(starts) or (SearchedSplit("policy_search", mode=mode, min_bytes=min_bytes),)
        self.calls, self.mode, self.hot, self.cold = calls, check_mode(mode), hot, cold
        self.min_bytes, self.rounds, self.seed = min_bytes, rounds, seed
        self.noise, self.samples = noise, samples

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """The best plans found; raises Infeasible where no start has plans."""
        engine, begun = engine_of(programs, machine, limit, self.rounds), []
        worlds = self._worlds(programs)
        self.simulator_calls = 0
        for i, planner in enumerate(self.starts):
            try:
                plans = planner.plan_jobs(programs, machine, limit)
            except Infeasible:
                plans = ()
            self.simulator_calls += planner.simulator_calls
            if plans and (ns := _mean_ns(engine, plans, worlds)) is not None:
                begun.append((ns, i, plans))
        if not begun:
            raise Infeasible(f"{self.name}: no start has plans for {len(programs)} jobs in {limit:,} bytes")
        now, _, plans = min(begun, key=lambda entry: entry[:2])
        best = self._search(engine, worlds, plans, now)
        self.simulator_calls += engine.calls
        return best

    def _worlds(self, programs: Sequence[Program]) -> list[World]:
        """The samples of the noise."""
        if self.noise is None:
            return [(None, None)]
        work = shares_of_work(programs, self.rounds)
        longest = max(range(len(programs)), key=lambda j: programs[j].ideal_ns)
        out: list[World] = []
        for i in range(self.samples):
            seeds = [int(s) for s in np.random.SeedSequence([self.seed, i]).generate_state(len(programs) + 1)]
            rows = [self.noise.durations(p, n, s) for p, n, s in zip(programs, work, seeds, strict=False)]
            out.append((rows, self.noise.tenants(programs[longest], len(programs) * work[longest], seeds[-1])))
        return out

    def _search(
        self, engine: JobsEngine, worlds: list[World], plans: tuple[Plan, ...], now: float
    ) -> tuple[Plan, ...]:  # fmt: skip
        """The best plans on the way from these, whose mean makespan is ``now``."""
        programs, machine, limit = engine.programs, engine.machine, engine.limit
        ideal = unlimited_ns(programs, machine, rounds=self.rounds)
        jobs = [Moves(p, limit, self.mode, self.min_bytes, self.seed + j) for j, p in enumerate(programs)]
        for moves, plan in zip(jobs, plans, strict=True):
            moves.reset(rows_of(plan.decisions))
        random = np.random.default_rng(self.seed)
        gaps = np.array([len(moves.gaps) for moves in jobs], dtype=np.float64)
        best, best_ns = plans, now
        steps = self.calls // len(worlds) if gaps.any() else 0
        for step in range(steps):
            j = int(random.choice(len(jobs), p=gaps / gaps.sum()))
            needs = [int(moves.load.max()) for moves in jobs]
            jobs[j].limit = limit - sum(needs) + needs[j]
            rows = jobs[j].propose()
            if rows is None:
                continue
            tried = [*map(Moves.plan, jobs[:j]), rows, *map(Moves.plan, jobs[j + 1 :])]
            needs[j] = int(jobs[j].proposed_load.max())
            parts = parts_of(needs, limit)
            ns = _mean_ns(engine, tried, worlds, parts)
            heat = ideal * self.hot * (self.cold / self.hot) ** (step / steps)
            if ns is not None and ns < now - heat * math.log(1.0 - random.random()):
                jobs[j].accept()
                now = ns
                if now < best_ns:
                    best_ns = now
                    best = tuple(
                        Plan.of(program, decisions_of(mine), self.name, part, machine.name)
                        for program, mine, part in zip(programs, tried, parts, strict=True)
                    )
        return best


def _mean_ns(
    engine: JobsEngine, plans: Sequence[Plan | Ints], worlds: list[World], shares: Sequence[int] | None = None
) -> float | None:
    """The mean makespan; None where the plans cannot run."""
    scores = [engine.score(plans, sample, tenant, shares) for sample, tenant in worlds]
    return sum(s.makespan_ns for s in scores) / len(scores) if all(s.feasible for s in scores) else None
