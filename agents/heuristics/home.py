"""HOME: "HOME: A Holistic GPU Memory Management Framework for Deep Learning" (He et al., IEEE TC 2022).

A particle is a placement per feature map: 0 retain, 1 swap, 2 recompute (section 3.3). Algorithm 1 starts from random
particles and repeats: evaluate every particle, remember the best ever, update the particles. Algorithm 3 updates one
particle: tensor by tensor it tries the placement of P_1, the best particle of the last iteration, and that of P_2, the
particle's own best so far, with its other placements as they are, and keeps the one with the smaller overhead.
Constants: 500 particles, 500 iterations. Read on in ``HOME.choose``, ``HOME._search`` and ``Evaluator``. Choices and
deviations: README.md, by their numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.heuristics.home_stages import StageModel
from agents.heuristics.layers import feature_maps
from agents.planner import NO_ROWS, Candidates, PlannerInfo, Rows, RowsPlanner, at_least, one_of
from simulator.compiled.encoding import rows_for
from simulator.compiled.engine import NEVER, Engine
from simulator.modes import KEPT, MODES, RECOMPUTED, STAYS, SWAPPED, ways_to_empty
from simulator.program import Gap, Program

RETAINED = STAYS
UPDATES = ("tensors", "whole")
EVALUATORS = ("simulator", "stages")

Placements = NDArray[np.int8]  # (feature maps,), or (particles, feature maps)
Costs = NDArray[np.int64]  # (particles, 2): bytes over the limit, iteration_ns; compared in this order
Cost = tuple[int, int]


class Iteration(NamedTuple):
    """A swarm in one iteration (figure 8): times of its particles within the limit, nan where there is none."""

    worst_ns: float
    mean_ns: float
    best_ns: float
    feasible: int  # particles within the limit


@dataclass(eq=False)
class HOME(RowsPlanner):
    """HOME's particle swarm.

    Args:
        particles: m of Algorithm 1.
        iterations: iters of Algorithm 1.
        calls: simulator calls, at most; None: as many as it takes.
        mode: swap (placements 0 and 1), recompute (0 and 2) or joint.
        jobs: threads that share the simulator calls of an update; None: one per core, or one within a worker process
            of the caller's. The plan does not depend on it.
        update: "tensors": Algorithm 3 as printed; "whole": one evaluation per particle and iteration (choice 11).
        evaluator: "simulator", or "stages": Algorithm 2 as printed, whose best particle must fit in the simulator.

    Attributes:
        history: an ``Iteration`` for each that the last ``plan`` ran.
    """

    facts = PlannerInfo(
        "home", "HOME", '"HOME: A Holistic GPU Memory Management Framework for Deep Learning", IEEE TC 2022',
        family="search", slot=3, place=160, moves="joint", slow=3,
    )  # fmt: skip

    particles: int = at_least(1, 500)
    iterations: int = at_least(1, 500)
    calls: int | None = at_least(2, None)
    mode: str = one_of(MODES, "joint")
    jobs: int | None = at_least(1, None)
    update: str = one_of(UPDATES, "tensors")
    evaluator: str = one_of(EVALUATORS, "simulator")
    history: list[Iteration] = field(init=False, default_factory=list)

    def choose(self, engine: Engine) -> Rows:
        """The best particle ever; raises Infeasible when none was within the limit."""
        self.history = []
        if engine.limit >= engine.program.peak_bytes:
            return NO_ROWS
        maps = feature_maps(engine.program, self.min_bytes)
        every = [(m.gap, placements(engine.program, m.gap, self.mode)) for m in maps]
        gaps, allowed = [gap for gap, ways in every if len(ways) > 1], [ways for _, ways in every if len(ways) > 1]
        # Swaps alone reach the least; chains of recomputation add to it.
        least = Candidates(engine.program, gaps).least
        if least > engine.limit:
            raise self.beyond_reach(engine, None if self.mode == "recompute" else least)
        evaluator = Evaluator(engine, gaps, self.jobs, self.evaluator)
        best, cost = self._search(evaluator, allowed)
        if cost[0]:
            raise self.beyond_reach(engine, None)
        return evaluator.rows(best)

    def _search(self, evaluator: Evaluator, allowed: list[list[int]]) -> tuple[Placements, Cost]:
        """Algorithm 1: the best particle and its cost."""
        rng = np.random.default_rng(self.seed)
        budget = math.inf if self.calls is None else self.calls - 1  # one is for the check of the plan
        particles = int(min(self.particles, budget))
        x = np.stack([rng.choice(np.array(ways, np.int8), particles) for ways in allowed], axis=1)
        todo = np.arange(0)  # what an iteration could not update
        cost = evaluator.evaluate(x)
        own, own_cost = x, cost  # each particle's own best
        while True:
            self.history.append(statistics(cost))
            if len(self.history) == self.iterations or len(todo):
                break
            leader = np.broadcast_to(x[lowest(cost)], x.shape)
            if self.update == "whole":
                count = int(min(len(x), budget - evaluator.calls))
                todo = np.arange(count, len(x))
                x = np.concatenate([moved(rng, x, leader, own)[:count], x[count:]])
                cost = np.concatenate([evaluator.evaluate(x[:count]), cost[count:]])
                own, own_cost = bettered(x, cost, own, own_cost)
                continue
            # Equal particles with the same history are updated once.
            _, first, which = np.unique(np.hstack([x, own]), axis=0, return_index=True, return_inverse=True)
            new, new_cost, todo = x[first], cost[first], np.argsort(first)
            at_most = 2 * (leader != own).sum(axis=1)[first] + 1  # calls of an update
            while count := int(np.searchsorted(at_most[todo].cumsum(), budget - evaluator.calls, side="right")):
                part, todo = todo[:count], todo[count:]
                i = first[part]
                new[part], new_cost[part] = evaluator.update(x[i], cost[i], leader[i], own[i])
            if np.array_equal(new[which], x):
                break
            x, cost = new[which], new_cost[which]
            own, own_cost = bettered(x, cost, own, own_cost)
        best = lowest(own_cost)
        return own[best], tuple(own_cost[best].tolist())


class Evaluator:
    """Algorithms 2 and 3, for some of the particles.

    Args:
        engine: the simulator.
        threads: that score plans; None: one a core.
        kind: one of EVALUATORS.

    Attributes:
        swaps: int64[feature maps, 6], the rows that swap them.
    """

    def __init__(self, engine: Engine, gaps: list[Gap], threads: int | None = None, kind: str = "simulator") -> None:
        self.engine, self._threads, self._estimates = engine, threads, 0
        self._stages = StageModel(engine.program, engine.machine, engine.limit, gaps) if kind == "stages" else None
        self.swaps = rows_for(gaps, SWAPPED)
        self._ways = np.empty((KEPT, *self.swaps.shape), np.int64)  # the row of each placement
        self._ways[SWAPPED], self._ways[RECOMPUTED] = self.swaps, rows_for(gaps, RECOMPUTED)

    def rows(self, x: Placements) -> Rows:
        """int64[n, 6]: the plan of one particle, or those of several, one after the other."""
        at = np.nonzero(x != RETAINED)
        rows: Rows = self._ways[x[at], at[-1]]
        return rows

    @property
    def calls(self) -> int:
        """Simulator calls, and evaluations by stages."""
        return self.engine.calls + self._estimates

    def evaluate(self, x: Placements) -> Costs:
        """Algorithm 2: the costs of particles."""
        if self._stages is not None:
            self._estimates += len(x)
            return self._stages.evaluate(x)
        scores = self.engine.score_batch(self.rows(x), (x != RETAINED).sum(axis=1), self._threads)
        return np.stack([np.maximum(scores.required_bytes - self.engine.limit, 0), scores.iteration_ns], axis=1)

    def update(self, x: Placements, cost: Costs, leader: Placements, own: Placements) -> tuple[Placements, Costs]:
        """Algorithm 3 on particles ``x`` of known cost, side by side; each has its P_1 (``leader``) and P_2 (``own``).

        Returns:
            The particles after, and their costs.
        """
        x, cost = x.copy(), cost.copy()
        known = np.ones(len(x), np.bool_)  # is ``cost`` that of the particle as it is now?
        for j in range(x.shape[1]):
            now, tried = x[:, j].copy(), []
            differ = leader[:, j] != own[:, j]
            for placement in (leader[:, j], own[:, j]):
                asked = np.flatnonzero(differ & ~(known & (placement == now)))
                particles, costs = x[asked], cost.copy()
                particles[:, j] = placement[asked]
                tried.append((asked, particles, costs))
            (asked1, x1, o1), (asked2, x2, o2) = tried
            if len(asked1) + len(asked2):
                found = self.evaluate(np.concatenate([x1, x2]))
                o1[asked1], o2[asked2] = found[: len(asked1)], found[len(asked1) :]
            first = less(o1, o2)
            cost = np.where(differ[:, None], np.where(first[:, None], o1, o2), cost)
            x[:, j] = np.where(differ & ~first, own[:, j], leader[:, j])
            known = differ | (known & (x[:, j] == now))
        rest = np.flatnonzero(~known)
        if len(rest):
            cost[rest] = self.evaluate(x[rest])
        return x, cost


def moved(rng: np.random.Generator, x: Placements, leader: Placements, own: Placements) -> Placements:
    """Particles in which each placement stays, or becomes P_1's or P_2's: with probability 1/2, 1/4 and 1/4."""
    target = np.where(rng.random(x.shape) < 0.5, leader, own)
    return np.where(rng.random(x.shape) < 0.5, x, target)


def bettered(x: Placements, cost: Costs, own: Placements, own_cost: Costs) -> tuple[Placements, Costs]:
    """Each particle's own best and its cost, after it has become ``x``."""
    better = less(cost, own_cost)[:, None]
    return np.where(better, x, own), np.where(better, cost, own_cost)


def less(cost: Costs, other: Costs) -> NDArray[np.bool_]:
    """bool[particles]: is the one cost less than the other?"""
    (over, ns), (over_other, ns_other) = cost.T, other.T
    out: NDArray[np.bool_] = (over < over_other) | (over == over_other) & (ns < ns_other)
    return out


def placements(program: Program, gap: Gap, mode: str) -> list[int]:
    """Those that a feature map may have: RETAINED, SWAPPED, RECOMPUTED."""
    return [RETAINED, *(way for way in ways_to_empty(program, gap, mode) if way != KEPT)]


def lowest(cost: Costs) -> int:
    """The first particle of least cost."""
    return int(np.lexsort(cost.T[::-1])[0])


def statistics(cost: Costs) -> Iteration:
    """The history entry of a swarm of these costs."""
    times = cost[cost[:, 1] < NEVER, 1]
    if not len(times):
        return Iteration(math.nan, math.nan, math.nan, 0)
    return Iteration(float(times.max()), float(times.mean()), float(times.min()), len(times))
