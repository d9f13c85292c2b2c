"""Robustness of plans to errors in kernel times.

A model of kernel times has an error (simulator.kernel_times). Overestimated kernel times are the costly case, because
copies that kernels were expected to hide become visible. Two independent error models:

1. Step error: all kernels are faster, or slower, by the same factor ``step``.
2. Kernel error: each kernel shape (operator, FLOPs, bytes) has a log-normal factor; the step's sum is preserved.

Overheads are relative to the ideal time under the perturbed times. ``ForFaster`` plans for the fast end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agents.planner import MIB, Infeasible, check_budget, finish
from agents.search.local_search import anneal
from simulator.compiled.engine import Engine, rows_of
from simulator.machine import Machine
from simulator.modes import check_mode
from simulator.moves.moves import Moves
from simulator.plan import Plan
from simulator.program import Program

DRAWS = 20  # samples of the kernel error


@dataclass(frozen=True)
class TimesError:
    """Error model of kernel times.

    Attributes:
        kernel: standard deviation of ln(true / predicted) per kernel.
        step: maximum relative error of the step's sum; 0: the sum was measured.

    Raises:
        ValueError: a value is negative, or ``step`` is not below 1.
    """

    kernel: float
    step: float

    def __post_init__(self) -> None:
        if not (self.kernel >= 0 and 0 <= self.step < 1):
            raise ValueError(f"kernel, step: expected at least 0, and step below 1, got {self.kernel} and {self.step}")

    @property
    def margin(self) -> float:
        """Relative safety margin of kernel times next to copies; errors of several kernels partly cancel."""
        return max(self.step, self.kernel / 2)

    def faster(self, program: Program) -> Program:
        """Returns the program with all kernels faster by the step error."""
        return _scaled_times(program, 1 / (1 + self.step))

    def slower(self, program: Program) -> Program:
        """Returns the program with all kernels slower by the step error."""
        return _scaled_times(program, 1 + self.step)

    def sampled(self, program: Program, seed: int) -> Program:
        """Returns the program with a random factor per kernel shape; the sum is preserved up to rounding."""
        shapes: dict[tuple[str, int, int], int] = {}
        shape_index = np.array([shapes.setdefault((k.name, k.flops, k.bytes), len(shapes)) for k in program.kernels])
        factors = np.exp(np.random.default_rng(seed).normal(0.0, self.kernel, len(shapes)))[shape_index]
        durations = np.array([k.duration_ns for k in program.kernels], np.float64)
        total = float((durations * factors).sum())
        return _scaled_times(program, factors * (program.ideal_ns / total if total else 1.0))


@dataclass(frozen=True)
class Spread:
    """Overheads of a plan under different kernel times; infinite if infeasible.

    Attributes:
        said: overhead with the predicted times.
        fast, slow: overhead with all kernels faster or slower by the step error.
        low, high: 5th and 95th percentile over kernel errors.
    """

    said: float
    fast: float
    slow: float
    low: float
    high: float

    @property
    def least(self) -> float:
        """Smallest overhead of all."""
        return min(self.said, self.fast, self.slow, self.low)

    @property
    def most(self) -> float:
        """Largest overhead of all."""
        return max(self.said, self.fast, self.slow, self.high)


class Retimed:
    """A program within a limit under perturbed kernel times; deterministic for a seed.

    Args:
        limit: memory limit in bytes.
        draws: number of samples of the kernel error.
    """

    def __init__(
        self, program: Program, machine: Machine, limit: int, error: TimesError, draws: int = DRAWS, seed: int = 0
    ) -> None:
        self.program = program
        self.machine = machine
        self.limit = limit
        self.error = error
        self.draws = draws
        self.seed = seed
        self._engine = Engine(program, machine, limit)

    def expected(self, plan: Plan) -> float:
        """Returns the mean overhead over predicted, faster and slower times, or over kernel errors if the sum is exact.

        Raises:
            PlanError: the plan does not fit the program.
        """
        return float(np.mean(self._costs(plan, self._scaled if self.error.step else self._sampled)))

    def spread(self, plan: Plan) -> Spread:
        """Returns the overheads of a plan under all perturbations; raises PlanError if it does not fit the program."""
        said, fast, slow = self._costs(plan, self._scaled)
        low, high = np.percentile(self._costs(plan, self._sampled), (5, 95), method="nearest")
        return Spread(said, fast, slow, float(low), float(high))

    def _costs(self, plan: Plan, engines: Sequence[Engine]) -> list[float]:
        plan.check(self.program)
        rows = rows_of(plan.decisions)
        overheads = []
        for engine in engines:
            score = engine.with_variants(plan.variants).score(rows)
            ideal = max(engine.program.ideal_ns, 1)
            overheads.append(score.iteration_ns / ideal - 1 if score.feasible else float("inf"))
        return overheads

    @cached_property
    def _scaled(self) -> list[Engine]:
        base = self.program
        return [self._engine, *(self._engine.retimed(p) for p in (self.error.faster(base), self.error.slower(base)))]

    @cached_property
    def _sampled(self) -> list[Engine]:
        seeds = np.random.SeedSequence(self.seed).generate_state(self.draws).tolist()
        return [self._engine.retimed(self.error.sampled(self.program, seed)) for seed in seeds]


class ForFaster:
    """Annealing from given plans under kernel times reduced by ``TimesError.margin``.

    Args:
        starts: plans for the predicted times; the search starts from the one that is best under the reduced times.
            Only plans of swaps and recomputations of tensors of at least ``min_bytes`` qualify.
        error: error model of the kernel times.
        calls: simulator calls, including one per start; None: 5,000, or as many as fit into ``seconds``.
        mode: swap, recompute or joint.
        seconds: wall-clock budget. If set, the plan depends on the speed of the computer.
    """

    def __init__(
        self,
        starts: Sequence[Plan],
        error: TimesError,
        calls: int | None = None,
        mode: str = "joint",
        min_bytes: int = MIB,
        seed: int = 0,
        seconds: float | None = None,
    ) -> None:
        check_budget(calls, seconds)
        self.starts = tuple(starts)
        self.error = error
        self.mode = check_mode(mode)
        self.min_bytes = min_bytes
        self.calls = 5_000 if calls is None and seconds is None else calls
        self.seconds = seconds
        self.seed = seed
        self.name = "annealing, for faster kernels"
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the best plan found for ``program``.

        Raises:
            Infeasible: No start plan fits the limit and consists of swaps and recomputations only.
        """
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        engine = Engine(_scaled_times(program, 1 / (1 + self.error.margin)), machine, limit)
        moves = Moves(program, limit, self.mode, self.min_bytes, self.seed)
        starts = [
            rows
            for rows in (rows_of(plan.decisions) for plan in self.starts if not plan.variants)
            if moves.accepts(rows)
        ]
        scores = engine.scores(starts)
        best = min(range(len(starts)), key=lambda i: scores[i].iteration_ns, default=None)
        self.simulator_calls = engine.calls
        if best is None or not scores[best].feasible:
            raise Infeasible(
                f"{self.name}: no start plan fits and consists of swaps and recomputations only; raise the limit, or "
                "give other starts"
            )
        calls = None if self.calls is None else max(self.calls - engine.calls - 1, 0)
        start_ns = scores[best].iteration_ns
        rows, _ = anneal(
            moves, engine, starts[best], start_ns, calls, hot=3e-3, cold=1e-5, seed=self.seed, deadline=deadline
        )
        return finish(self, program, machine, limit, engine, rows)


def _scaled_times(program: Program, factors: float | NDArray[np.float64]) -> Program:
    """Returns the program with each duration multiplied by its factor."""
    durations = np.array([k.duration_ns for k in program.kernels], np.float64)
    return program.with_durations(np.rint(durations * factors).astype(np.int64).tolist())
