"""HOME: "HOME: A Holistic GPU Memory Management Framework for Deep Learning" (He et al., IEEE TC 2022).

A particle assigns a placement to each feature map: 0 retain, 1 swap, 2 recompute (section 3.3). Algorithm 1 starts
from random particles and repeats: evaluate all particles, record the global best, update the particles. Algorithm 3
updates one particle: for each tensor it tries the placement of P_1 (best particle of the last iteration) and of P_2
(the particle's own best), with the other placements fixed, and keeps the one with the smaller overhead. Constants: 500
particles, 500 iterations. Entry points: ``HOME.choose``, ``HOME._search`` and ``Evaluator``. Numbered choices and
deviations: home.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.heuristics.layers import feature_maps
from agents.planner import NO_ROWS, Candidates, PlannerInfo, Rows, RowsPlanner, at_least, one_of
from simulator.compiled.encoding import rows_for
from simulator.compiled.engine import NEVER, Engine
from simulator.machine import Machine
from simulator.modes import MODES, Choice, evictions
from simulator.program import Gap, Program
from simulator.residency import reruns

RETAINED = Choice.RESIDENT
UPDATES = ("tensors", "whole")

Placements = NDArray[np.int8]  # (feature maps,), or (particles, feature maps)
Costs = NDArray[np.int64]  # (particles, 2): bytes over the limit, iteration_ns; compared in this order
Cost = tuple[int, int]


class Iteration(NamedTuple):
    """Statistics of a swarm in one iteration (figure 8): times of its feasible particles, nan if it has none."""

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
        calls: maximum simulator calls; None: unlimited.
        mode: swap (placements 0 and 1), recompute (0 and 2) or joint.
        jobs: threads that share the simulator calls of an update; None: one per core, or one within a worker process.
            The plan does not depend on it.
        update: "tensors": Algorithm 3 as printed; "whole": one evaluation per particle and iteration (choice 11).
        evaluator: "simulator", or "stages": Algorithm 2 as printed, whose best particle must fit in the simulator.

    Attributes:
        history: one ``Iteration`` per iteration of the last ``plan``.
    """

    facts = PlannerInfo(
        "home",
        "HOME",
        '"HOME: A Holistic GPU Memory Management Framework for Deep Learning", IEEE TC 2022',
        family="search",
        slot=3,
        place=160,
        slow=3,
    )

    particles: int = at_least(1, 500)
    iterations: int = at_least(1, 500)
    calls: int | None = at_least(2, None)
    mode: str = one_of(MODES, "joint")
    jobs: int | None = at_least(1, None)
    update: str = one_of(UPDATES, "tensors")
    evaluator: str = one_of(("simulator", "stages"), "simulator")
    history: list[Iteration] = field(init=False, default_factory=list)

    def choose(self, engine: Engine) -> Rows:
        """Returns the best particle of all iterations; raises Infeasible if none was within the limit."""
        self.history = []
        if engine.limit >= engine.program.peak_bytes:
            return NO_ROWS
        maps = feature_maps(engine.program, self.min_bytes)
        pairs = [(m.gap, placements(engine.program, m.gap, self.mode)) for m in maps]
        gaps = [gap for gap, kinds in pairs if len(kinds) > 1]
        allowed = [kinds for _, kinds in pairs if len(kinds) > 1]
        # Swaps alone reach the minimum; recomputation chains need extra memory.
        min_limit = Candidates(engine.program, gaps).least_bytes
        if min_limit > engine.limit:
            raise self.beyond_reach(engine, None if self.mode == "recompute" else min_limit)
        evaluator = Evaluator(engine, gaps, self.jobs, self.evaluator)
        best, cost = self._search(evaluator, allowed)
        if cost[0]:
            raise self.beyond_reach(engine, None)
        return evaluator.rows(best)

    def _search(self, evaluator: Evaluator, allowed: list[list[int]]) -> tuple[Placements, Cost]:
        """Returns the best particle and its cost (Algorithm 1)."""
        rng = np.random.default_rng(self.seed)
        budget = math.inf if self.calls is None else self.calls - 1  # one call is reserved for the final check
        particles = int(min(self.particles, budget))
        x = np.stack([rng.choice(np.array(kinds, np.int8), particles) for kinds in allowed], axis=1)
        pending = np.arange(0)  # particles that the iteration could not update
        cost = evaluator.evaluate(x)
        personal = x  # each particle's own best
        personal_cost = cost
        while True:
            self.history.append(statistics(cost))
            if len(self.history) == self.iterations or len(pending):
                break
            leader = np.broadcast_to(x[best_index(cost)], x.shape)
            if self.update == "whole":
                count = int(min(len(x), budget - evaluator.calls))
                pending = np.arange(count, len(x))
                x = np.concatenate([recombined(rng, x, leader, personal)[:count], x[count:]])
                cost = np.concatenate([evaluator.evaluate(x[:count]), cost[count:]])
                personal, personal_cost = updated_bests(x, cost, personal, personal_cost)
                continue
            # Equal particles with the same history are updated once.
            _, first, inverse = np.unique(np.hstack([x, personal]), axis=0, return_index=True, return_inverse=True)
            new = x[first]
            new_cost = cost[first]
            pending = np.argsort(first)
            max_calls = 2 * (leader != personal).sum(axis=1)[first] + 1  # simulator calls of an update
            while count := int(np.searchsorted(max_calls[pending].cumsum(), budget - evaluator.calls, side="right")):
                batch = pending[:count]
                pending = pending[count:]
                i = first[batch]
                new[batch], new_cost[batch] = evaluator.update(x[i], cost[i], leader[i], personal[i])
            if np.array_equal(new[inverse], x):
                break
            x = new[inverse]
            cost = new_cost[inverse]
            personal, personal_cost = updated_bests(x, cost, personal, personal_cost)
        best = best_index(personal_cost)
        return personal[best], tuple(personal_cost[best].tolist())


class Evaluator:
    """Evaluation and update of particles (Algorithms 2 and 3).

    Args:
        engine: the simulator.
        threads: number of scoring threads; None: one per core.
        kind: "simulator" or "stages".

    Attributes:
        swaps: int64[feature maps, 6], the rows that swap them.
    """

    def __init__(self, engine: Engine, gaps: list[Gap], threads: int | None = None, kind: str = "simulator") -> None:
        self.engine = engine
        self._threads = threads
        self._estimates = 0
        self._stages = StageModel(engine.program, engine.machine, engine.limit, gaps) if kind == "stages" else None
        self.swaps = rows_for(gaps, Choice.SWAPPED)
        self._kind_rows = np.empty((Choice.CHAIN_KEPT, *self.swaps.shape), np.int64)  # the row of each placement
        self._kind_rows[Choice.SWAPPED] = self.swaps
        self._kind_rows[Choice.RECOMPUTED] = rows_for(gaps, Choice.RECOMPUTED)

    def rows(self, x: Placements) -> Rows:
        """Returns int64[n, 6], the plan of one particle, or the concatenated plans of several."""
        index = np.nonzero(x != RETAINED)
        rows: Rows = self._kind_rows[x[index], index[-1]]
        return rows

    @property
    def calls(self) -> int:
        """Number of simulator calls and stage-model evaluations."""
        return self.engine.calls + self._estimates

    def evaluate(self, x: Placements) -> Costs:
        """Returns the costs of particles (Algorithm 2)."""
        if self._stages is not None:
            self._estimates += len(x)
            return self._stages.evaluate(x)
        scores = self.engine.score_batch(self.rows(x), (x != RETAINED).sum(axis=1), self._threads)
        return np.stack([np.maximum(scores.required_bytes - self.engine.limit, 0), scores.iteration_ns], axis=1)

    def update(self, x: Placements, cost: Costs, leader: Placements, personal: Placements) -> tuple[Placements, Costs]:
        """Updates particles ``x`` of known cost in parallel, each with its P_1 and P_2 (Algorithm 3).

        Args:
            leader: P_1 of each particle.
            personal: P_2 of each particle.

        Returns:
            The updated particles and their costs.
        """
        x = x.copy()
        cost = cost.copy()
        fresh = np.ones(len(x), np.bool_)  # whether ``cost`` belongs to the particle's current state
        for j in range(x.shape[1]):
            now = x[:, j].copy()
            p1 = leader[:, j]
            p2 = personal[:, j]
            differ = p1 != p2
            side, rows = np.nonzero(differ & ~(fresh & (np.stack([p1, p2]) == now)))  # 0: P_1's placement, 1: P_2's
            costs = np.stack([cost, cost])
            if len(rows):
                particles = x[rows]
                particles[:, j] = np.where(side == 0, p1[rows], p2[rows])
                costs[side, rows] = self.evaluate(particles)
            is_first = is_less(*costs)
            cost = np.where(differ[:, None], np.where(is_first[:, None], *costs), cost)
            x[:, j] = np.where(differ & ~is_first, p2, p1)
            fresh = differ | (fresh & (x[:, j] == now))
        stale = np.flatnonzero(~fresh)
        if len(stale):
            cost[stale] = self.evaluate(x[stale])
        return x, cost


class StageModel:
    """HOME's policy evaluator (section 3.4, Algorithm 2) for one program, machine and limit, vectorized over particles.

    The stages of a forward and a backward pass are the program's kernels. A swapped feature map is offloaded
    asynchronously after its last forward use. A stage that lacks memory waits for the head of the swap-out list (lines
    3 to 10). The feature map is prefetched one stage before its use; a stage waits for the rest of its transfer (Fig.
    4). Choices that the paper leaves open:

    1. A recomputation runs the kernels that produce the feature map. Inputs that are not resident and can be recomputed
       are recomputed first. Intermediate tensors are not kept.
    2. A particle that lacks memory while the swap-out list is empty is infeasible (line 5). Its cost is the largest
       deficit in bytes.

    Args:
        gaps: the feature maps' gaps, from last forward use to first backward use.
    """

    def __init__(self, program: Program, machine: Machine, limit: int, gaps: Sequence[Gap]) -> None:
        self.program = program
        self.limit = limit
        self.gaps = gaps
        self.nbytes = np.array([program.tensors[g.tensor].nbytes for g in gaps], np.int64)
        self.out_ns = np.array([machine.d2h_ns(int(n)) for n in self.nbytes], np.int64)
        self.in_ns = np.array([machine.h2d_ns(int(n)) for n in self.nbytes], np.int64)
        n = len(program.kernels)
        self.opens: list[list[int]] = [[] for _ in range(n)]
        self.closes: list[list[int]] = [[] for _ in range(n)]
        for f, gap in enumerate(gaps):
            self.opens[gap.after].append(f)
            self.closes[gap.before].append(f)
        index = {gap.tensor: f for f, gap in enumerate(gaps)}
        self.chain_ns = np.zeros(len(gaps), np.int64)
        self.chain_reads: list[list[int]] = []  # feature maps that a chain reads and that are absent if recomputed
        for gap in gaps:
            kernels = [program.kernels[k] for k in reruns(program, {gap.tensor}, gap.before)]
            read = {index[t] for kernel in kernels for t in kernel.inputs if t in index and t != gap.tensor}
            self.chain_ns[len(self.chain_reads)] = sum(kernel.duration_ns for kernel in kernels)
            self.chain_reads.append([g for g in sorted(read) if gaps[g].before > gap.before])

    def evaluate(self, x: Placements) -> NDArray[np.int64]:
        """Returns (particles, 2): maximum deficit in bytes, and iteration time in ns."""
        swapped = x == Choice.SWAPPED
        recomputed = x == Choice.RECOMPUTED
        chains = self._chains(recomputed)
        particles = len(x)
        now, d2h_free, h2d_free, previous = (np.zeros(particles, np.int64) for _ in range(4))
        absent = np.zeros(particles, np.int64)  # bytes
        deficit = np.zeros(particles, np.int64)
        ends = np.full(x.shape, np.iinfo(np.int64).max)  # of swap-outs in flight
        for k, (kernel, load) in enumerate(zip(self.program.kernels, self.program.live_bytes, strict=True)):
            for f in self.closes[k]:
                arrival = np.maximum(h2d_free, previous) + self.in_ns[f]
                h2d_free = np.where(swapped[:, f], arrival, h2d_free)
                pending = swapped[:, f] & (ends[:, f] < np.iinfo(np.int64).max)  # its swap-out is still pending
                absent += np.where(pending, self.nbytes[f], 0)
                ends[pending, f] = np.iinfo(np.int64).max
                absent -= np.where(swapped[:, f] | recomputed[:, f], self.nbytes[f], 0)
                now = np.where(swapped[:, f], np.maximum(now, h2d_free), now + chains[:, f])
            if load > self.limit:
                lacking = np.flatnonzero(load - absent > self.limit)
                while len(lacking):  # lines 3 to 10
                    front = ends[lacking].argmin(axis=1)
                    first_end = ends[lacking, front]
                    is_empty = first_end == np.iinfo(np.int64).max
                    stuck = lacking[is_empty]
                    deficit[stuck] = np.maximum(deficit[stuck], load - absent[stuck] - self.limit)
                    lacking = lacking[~is_empty]
                    front = front[~is_empty]
                    first_end = first_end[~is_empty]
                    now[lacking] = np.maximum(now[lacking], first_end)
                    absent[lacking] += self.nbytes[front]
                    ends[lacking, front] = np.iinfo(np.int64).max
                    lacking = lacking[load - absent[lacking] > self.limit]
            previous = now
            now = now + kernel.duration_ns
            for f in self.opens[k]:
                d2h_free = np.where(swapped[:, f], np.maximum(d2h_free, now) + self.out_ns[f], d2h_free)
                ends[swapped[:, f], f] = d2h_free[swapped[:, f]]
                absent += np.where(recomputed[:, f], self.nbytes[f], 0)
        return np.stack([deficit, now], axis=1)

    def _chains(self, recomputed: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the recomputation time in ns of each feature map, (particles, feature maps)."""
        chains = np.where(recomputed, self.chain_ns, 0)
        for f in sorted(range(len(self.gaps)), key=lambda f: -self.gaps[f].before):
            if self.chain_reads[f]:
                chains[:, f] += recomputed[:, f] * chains[:, self.chain_reads[f]].sum(axis=1)
        return chains


def recombined(rng: np.random.Generator, x: Placements, leader: Placements, personal: Placements) -> Placements:
    """Returns particles whose placements stay or become P_1's or P_2's, with probabilities 1/2, 1/4 and 1/4."""
    target = np.where(rng.random(x.shape) < 0.5, leader, personal)
    return np.where(rng.random(x.shape) < 0.5, x, target)


def updated_bests(x: Placements, cost: Costs, personal: Placements, personal_cost: Costs) -> tuple[Placements, Costs]:
    """Returns each particle's own best and its cost after the update to ``x``."""
    is_better = is_less(cost, personal_cost)[:, None]
    return np.where(is_better, x, personal), np.where(is_better, cost, personal_cost)


def is_less(cost: Costs, other: Costs) -> NDArray[np.bool_]:
    """Returns bool[particles]: whether one cost is less than the other, compared lexicographically."""
    (excess, ns), (excess_other, ns_other) = cost.T, other.T
    result: NDArray[np.bool_] = (excess < excess_other) | (excess == excess_other) & (ns < ns_other)
    return result


def placements(program: Program, gap: Gap, mode: str) -> list[int]:
    """Returns the placements that a feature map may have: RETAINED, SWAPPED, RECOMPUTED."""
    return [RETAINED, *(kind for kind in evictions(program, gap, mode) if kind != Choice.CHAIN_KEPT)]


def best_index(cost: Costs) -> int:
    """Returns the index of the first particle with the lowest cost."""
    return int(np.lexsort(cost.T[::-1])[0])


def statistics(cost: Costs) -> Iteration:
    """Returns the history entry of a swarm with these costs."""
    times = cost[cost[:, 1] < NEVER, 1]
    summary = (float(times.max()), float(times.mean()), float(times.min())) if len(times) else (math.nan,) * 3
    return Iteration(*summary, len(times))
