"""AutoSwap: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section IV.

Candidate gaps are ranked by a priority score and selected one by one until the peak load is at most the limit: by one
of four scores (``AutoSwap``), or by their weighted sum (``AutoSwapBO``, section IV-C). smartpool_autoswap.py adds
addresses (section V). Numbered choices and deviations: autoswap.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planner import MIB, Candidates, Family, PlannerInfo, Rows, RowsPlanner, at_least, is_open, one_of
from simulator.compiled.encoding import AFTER, BEFORE
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.files import no_collections
from simulator.machine import Machine
from simulator.program import Gap, Program

PAPER = '"Efficient Memory Management for GPU-based Deep Learning Systems", section'
FAMILY: Family = "swap: AutoSwap"
NAMES = ("doa", "aoa", "wdoa", "swdoa")
BASIC = ("aoa", "doa", "wdoa", "swdoa")  # in the order of equation 3

Floats = NDArray[np.float64]


@dataclass(eq=False)
class AutoSwap(RowsPlanner):
    """AutoSwap with one of its four scores.

    Args:
        score: doa, aoa, wdoa or swdoa.
    """

    facts = tuple(
        PlannerInfo(
            f"autoswap_{key}", f"AutoSwap {key.upper()}", f"{PAPER} IV", FAMILY, i, 20 + 10 * i, "swap", {"score": key}
        )
        for i, key in enumerate(NAMES)
    )

    score: str = one_of(NAMES, "swdoa")

    @no_collections()
    def choose(self, engine: Engine) -> Rows:
        """Selects swaps until the planned residency fits; raises Infeasible if no selection suffices."""
        candidates = self.reachable(engine, peak_gaps(engine.program, self.min_bytes))
        return candidates.rows[self.select(candidates, engine)]

    def select(self, candidates: Candidates, engine: Engine) -> NDArray[np.int64]:
        """Returns the selected candidates in order of selection by this score (section IV-D)."""
        return candidates.prefix(SCORES[self.score](candidates, engine.program, engine.machine), engine.limit)


def peak_gaps(program: Program, min_bytes: int = MIB) -> list[Gap]:
    """Returns the gaps of tensors of at least ``min_bytes`` that are open at the peak (section IV-A)."""
    peak = int(np.argmax(program.live_bytes))
    return [g for g in program.gaps(min_bytes) if is_open(g, peak)]


def duration_of_absence(candidates: Candidates, program: Program, machine: Machine) -> NDArray[np.int64]:
    """Returns DOA, int64[m] ns: time between the two accesses minus both transfers."""
    free = [program.gap_ns(g) for g in candidates.gaps]
    transfers = [machine.d2h_ns(b) + machine.h2d_ns(b) for b in candidates.nbytes.tolist()]
    return np.array(free, dtype=np.int64) - np.array(transfers, dtype=np.int64)


def area_of_absence(candidates: Candidates, program: Program, machine: Machine) -> Floats:
    """Returns AOA, float64[m]: DOA times the size; if DOA is negative, DOA over the size."""
    doa = duration_of_absence(candidates, program, machine)
    nbytes = candidates.nbytes.astype(np.float64)
    return np.where(doa >= 0, doa * nbytes, doa / nbytes)


def weighted_duration(candidates: Candidates, program: Program) -> Floats:
    """Returns WDOA, float64[m] byte-nanoseconds: area under the load between the two accesses of each gap."""
    area = load_area(candidates, program)
    after = candidates.rows[:, AFTER]
    before = candidates.rows[:, BEFORE]
    return area[before] - area[after + 1] + np.where(after < before, 0.0, area[-1])


def load_area(candidates: Candidates, program: Program) -> Floats:
    """Returns float64[n + 1], the byte-nanoseconds before each kernel and in all, which exceed 64-bit integers."""
    return np.concatenate(([0.0], np.cumsum(candidates.live_bytes.astype(np.float64) * np.diff(program.start_ns))))


def submodular_weighted_duration(candidates: Candidates, program: Program) -> tuple[NDArray[np.int64], Floats]:
    """Returns the candidates in order of selection by SWDOA, and its value in byte-nanoseconds at each selection.

    Each candidate maximizes WDOA under the load that the previous selections leave (Fig. 6). Loads only decrease, and
    so does the score.
    """
    area = load_area(candidates, program)
    start = np.array(program.start_ns, np.float64)
    scores = weighted_duration(candidates, program)
    heap = np.argsort(-scores, kind="stable")
    trees = np.zeros((2, len(start) + 1))
    order = np.empty_like(heap)
    scored = np.zeros_like(heap)
    values = np.empty_like(scores)
    greedy(area, start, candidates.rows, candidates.nbytes, scores, heap, scored, trees, order, values)
    return order, values


@stage
def _saved_area(trees, start, k):
    """Returns the byte-nanoseconds evicted before kernel k, from two Fenwick trees.

    The trees hold the bytes that leave minus those that return at each kernel, and these times the kernel's start.
    """
    nbytes = area = 0.0
    i = k
    while i > 0:
        nbytes += trees[0, i]
        area += trees[1, i]
        i -= i & -i
    return nbytes * start[k] - area


@stage
def _add_eviction(trees, start, k, nbytes):
    """Marks ``nbytes`` as evicted from kernel k on."""
    i = k + 1
    while i < trees.shape[1]:
        trees[0, i] += nbytes
        trees[1, i] += nbytes * start[k]
        i += i & -i


@stage
def _sift_down(heap, size, scores):
    """Sifts down the first heap entry: highest score first, ties by candidate index."""
    position = 0
    entry = heap[0]
    while 2 * position + 1 < size:
        child = 2 * position + 1
        for sibling in range(child, min(child + 2, size)):
            a = heap[sibling]
            b = heap[child]
            if scores[a] > scores[b] or (scores[a] == scores[b] and a < b):
                child = sibling
        child_entry = heap[child]
        if scores[entry] > scores[child_entry] or (scores[entry] == scores[child_entry] and entry < child_entry):
            break
        heap[position] = child_entry
        position = child
    heap[position] = entry


@stage(entry=True)
def greedy(area, start, rows, nbytes, scores, heap, scored, trees, order, values):
    """Fills ``order`` and ``values`` of ``submodular_weighted_duration`` by lazy greedy selection.

    Scores only decrease, so a candidate that is still the highest after its score was updated is the maximum.

    Args:
        area: float64[n + 1], byte-nanoseconds before each kernel; ``start``: ns before it.
        rows: int64[m, 6], the candidates as rows of a plan.
        nbytes: int64[m], sizes in bytes.
        scores, heap: initial scores of the m candidates, and the candidates as a heap by score.
        scored: int64[m], number of selections when each was scored: 0.
        trees: float64[2, n + 2], zeros: see ``_saved_area``.
        order, values: int64[m] and float64[m], filled: candidates in order of selection, and their scores then.
    """
    size = heap.shape[0]
    end = start.shape[0] - 1
    for count in range(order.shape[0]):
        best = heap[0]
        while scored[best] < count:
            after = rows[best, AFTER] + 1
            before = rows[best, BEFORE]
            score = area[before] - area[after] - (_saved_area(trees, start, before) - _saved_area(trees, start, after))
            if after > before:
                score += area[end] - _saved_area(trees, start, end)
            scores[best] = score
            scored[best] = count
            _sift_down(heap, size, scores)
            best = heap[0]
        order[count] = best
        values[count] = scores[best]
        after = rows[best, AFTER] + 1
        before = rows[best, BEFORE]
        _add_eviction(trees, start, after, nbytes[best])
        _add_eviction(trees, start, before, -nbytes[best])
        if after > before:
            _add_eviction(trees, start, 0, nbytes[best])
        size -= 1
        heap[0] = heap[size]
        _sift_down(heap, size, scores)


def descending(scores: NDArray[np.int64] | Floats) -> NDArray[np.int64]:
    """Returns the candidates by descending score."""
    return np.argsort(-scores, kind="stable")


# Per score: every candidate by descending score.
SCORES: dict[str, Callable[[Candidates, Program, Machine], NDArray[np.int64]]] = {
    "doa": lambda candidates, *task: descending(duration_of_absence(candidates, *task)),
    "aoa": lambda candidates, *task: descending(area_of_absence(candidates, *task)),
    "wdoa": lambda candidates, program, _: descending(weighted_duration(candidates, program)),
    "swdoa": lambda candidates, program, _: submodular_weighted_duration(candidates, program)[0],
}


@dataclass(eq=False)
class AutoSwapBO(RowsPlanner):
    """AutoSwap with optimized weights of its four scores (section IV-C).

        BO = a * AOA + b * DOA + c * WDOA + d * SWDOA        (equation 3)

    The scores are standardized and summed with weights in [-1, 1]. Bayesian optimization with a Gaussian process prior
    finds the weights whose selection (section IV-D) has the smallest simulated overhead.

    Args:
        evaluations: number of weight vectors tried, including the four unit vectors.
        random: number of random weight vectors before the first update.
    """

    facts = PlannerInfo("autoswap_bo", "AutoSwap BO", f"{PAPER} IV-C", FAMILY, 4, 60, "swap")

    evaluations: int = at_least(4, 30)
    random: int = at_least(0, 4)

    def choose(self, engine: Engine) -> Rows:
        """Returns the swaps of the best weights; raises Infeasible if all candidates leave the peak above the limit."""
        candidates = self.reachable(engine, peak_gaps(engine.program, self.min_bytes))
        return candidates.rows[self.select(candidates, engine)]

    def select(
        self, candidates: Candidates, engine: Engine, schedule: Callable[[Rows], Rows] = lambda rows: rows
    ) -> NDArray[np.int64]:
        """Returns the selection of the best weights, as indices of ``candidates``; all of them if none runs.

        Args:
            candidates: swaps to select from.
            engine: program, machine and limit.
            schedule: sets the prefetch times of the swaps, whose overhead is minimized.
        """
        program = engine.program
        machine = engine.machine
        limit = engine.limit
        rng = np.random.default_rng(self.seed)
        scores = standardized_scores(candidates, program, machine)
        evaluated: list[Floats] = []
        overheads: list[float] = []
        best = np.arange(len(candidates))
        best_overhead = np.inf
        for i in range(self.evaluations):
            if i < 4:
                weights = np.eye(4)[i]
                order = SCORES[BASIC[i]](candidates, program, machine)  # exact, without rounding
            else:
                is_random = i < 4 + self.random or not evaluated
                weights = rng.uniform(-1, 1, 4) if is_random else propose(np.array(evaluated), np.array(overheads), rng)
                order = descending(scores @ weights)
            selected = candidates.prefix(order, limit)
            score = engine.score(schedule(candidates.rows[selected]))
            if not score.feasible:
                continue
            evaluated.append(weights)
            overheads.append(score.iteration_ns / max(program.ideal_ns, 1) - 1)
            if overheads[-1] < best_overhead:
                best = selected
                best_overhead = overheads[-1]
            if best_overhead <= 0:
                break
        return best


def standardized_scores(candidates: Candidates, program: Program, machine: Machine) -> Floats:
    """Returns float64[m, 4], the scores of ``BASIC`` per candidate, each with mean 0 and standard deviation 1."""
    scores = np.empty((len(candidates), 4))
    scores[:, 0] = area_of_absence(candidates, program, machine)
    scores[:, 1] = duration_of_absence(candidates, program, machine)
    scores[:, 2] = weighted_duration(candidates, program)
    order, values = submodular_weighted_duration(candidates, program)
    scores[order, 3] = values
    if not len(scores):
        return scores
    scores -= scores.mean(axis=0)
    deviation = scores.std(axis=0)
    return scores / np.where(deviation > 0, deviation, 1)


def propose(evaluated: Floats, overheads: Floats, rng: np.random.Generator) -> Floats:
    """Returns the weights (float64[4]) with the largest expected improvement.

    Args:
        evaluated: float64[k, 4], weights evaluated so far.
        overheads: float64[k], their overheads.
        rng: draws the weights that are compared.
    """
    from scipy.stats import norm
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.ones(4), (1e-1, 1e2), nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=1e-6, normalize_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound means an irrelevant weight
        process.fit(evaluated, overheads)
    proposals = rng.uniform(-1, 1, (2048, 4))  # among which the expected improvement is maximized
    mean, deviation = process.predict(proposals, return_std=True)
    gain = overheads.min() - mean
    z = gain / np.maximum(deviation, 1e-12)
    best: Floats = proposals[np.argmax(gain * norm.cdf(z) + deviation * norm.pdf(z))]
    return best
