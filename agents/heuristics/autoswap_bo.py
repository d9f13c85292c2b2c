"""AutoSwap with Bayesian optimization of its score weights.

    BO = a * AOA + b * DOA + c * WDOA + d * SWDOA        (equation 3)

The four scores of autoswap.py are standardized and summed with weights in [-1, 1]. Bayesian optimization with a
Gaussian process prior finds the weights whose selection (section IV-D) has the smallest simulated overhead. Entry
point: ``AutoSwapBO.choose``. Numbered choices and deviations: README.md.

Source: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section IV-C.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.heuristics.autoswap import (
    PAPER,
    SCORES,
    area_of_absence,
    descending,
    duration_of_absence,
    peak_gaps,
    submodular_weighted_duration,
    weighted_duration,
)
from agents.planner import Candidates, PlannerInfo, Rows, RowsPlanner, at_least
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.program import Program

BASIC = ("aoa", "doa", "wdoa", "swdoa")  # as in equation 3
PROPOSALS = 2048  # random weight vectors over which expected improvement is maximized

Floats = NDArray[np.float64]


@dataclass(eq=False)
class AutoSwapBO(RowsPlanner):
    """AutoSwap with optimized weights of its four scores.

    Args:
        evaluations: number of weight vectors tried, including the four unit vectors.
        random: number of random weight vectors before the first update.
    """

    facts = PlannerInfo("autoswap_bo", "AutoSwap BO", f"{PAPER} IV-C", "swap: AutoSwap", 4, 60, "swap")

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
            schedule: sets the prefetch times of the swaps, whose overhead is minimized.
        """
        program, machine, limit = engine.program, engine.machine, engine.limit
        rng = np.random.default_rng(self.seed)
        scores = standardised_scores(candidates, program, machine)
        tried: list[Floats] = []
        overheads: list[float] = []
        best, best_overhead = np.arange(len(candidates)), np.inf
        for i in range(self.evaluations):
            if i < 4:
                weights = np.eye(4)[i]
                order = SCORES[BASIC[i]](candidates, program, machine)  # exact, without rounding
            else:
                drawn = i < 4 + self.random or not tried
                weights = rng.uniform(-1, 1, 4) if drawn else propose(np.array(tried), np.array(overheads), rng)
                order = descending(scores @ weights)
            chosen = candidates.first(order, limit)
            score = engine.score(schedule(candidates.rows[chosen]))
            if not score.feasible:
                continue
            tried.append(weights)
            overheads.append(score.iteration_ns / max(program.ideal_ns, 1) - 1)
            if overheads[-1] < best_overhead:
                best, best_overhead = chosen, overheads[-1]
            if best_overhead <= 0:
                break
        return best


def standardised_scores(candidates: Candidates, program: Program, machine: Machine) -> Floats:
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


def propose(tried: Floats, overheads: Floats, rng: np.random.Generator) -> Floats:
    """Returns the weights (float64[4]) with the largest expected improvement.

    Args:
        tried: float64[k, 4], weights evaluated so far.
        overheads: float64[k], their overheads.
    """
    from scipy.stats import norm
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(np.ones(4), (1e-1, 1e2), nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=1e-6, normalize_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound means an irrelevant weight
        process.fit(tried, overheads)
    proposals = rng.uniform(-1, 1, (PROPOSALS, 4))
    mean, deviation = process.predict(proposals, return_std=True)
    gain = overheads.min() - mean
    z = gain / np.maximum(deviation, 1e-12)
    best: Floats = proposals[np.argmax(gain * norm.cdf(z) + deviation * norm.pdf(z))]
    return best
