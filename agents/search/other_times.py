"""What plans cost where kernels take other times than believed.

A model of kernel times has an error (simulator.kernel_times), and kernels believed too slow are the costly mistake:
what was to be hidden by them is not. Two errors, each by itself:

1. Of a step: all kernels are faster, or slower, alike, by ``step``.
2. Of kernels: each shape of kernel (operator, FLOPs, bytes) by a factor of its own, log-normal; the step's sum stays.

An overhead is over the ideal time under the times in question. ``ForFaster`` makes plans for the fast end.
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

DRAWS = 20
CALLS = 5_000
HOT, COLD = 3e-3, 1e-5  # temperatures, of the ideal time
FASTER = ", for faster kernels"  # of a planner's name


@dataclass(frozen=True)
class TimesError:
    """How far modelled times are off.

    Attributes:
        kernel: standard deviation of ln(true / believed) of a kernel.
        step: by how much the sum of a step may be off, of itself; 0: it was measured.

    Raises:
        ValueError: a number is negative, or ``step`` not below 1.
    """

    kernel: float
    step: float

    def __post_init__(self) -> None:
        if not (self.kernel >= 0 and 0 <= self.step < 1):
            raise ValueError(f"kernel, step: expected at least 0, and step below 1, got {self.kernel} and {self.step}")

    @property
    def margin(self) -> float:
        """By how much kernels beside a copy may be faster, where a plan is made for that: errors of several kernels
        partly cancel."""
        return max(self.step, self.kernel / 2)

    def faster(self, program: Program) -> Program:
        """All kernels as fast as they may be."""
        return _times(program, 1 / (1 + self.step))

    def slower(self, program: Program) -> Program:
        """All kernels as slow as they may be."""
        return _times(program, 1 + self.step)

    def drawn(self, program: Program, seed: int) -> Program:
        """Each shape of kernel off by a factor of its own; the sum stays, but for rounding."""
        shapes: dict[tuple[str, int, int], int] = {}
        which = np.array([shapes.setdefault((k.name, k.flops, k.bytes), len(shapes)) for k in program.kernels])
        factors = np.exp(np.random.default_rng(seed).normal(0.0, self.kernel, len(shapes)))[which]
        own = np.array([k.duration_ns for k in program.kernels], np.float64)
        total = float((own * factors).sum())
        return _times(program, factors * (program.ideal_ns / total if total else 1.0))


@dataclass(frozen=True)
class Spread:
    """Overheads of a plan; infinite where it cannot run.

    Attributes:
        said: under the times that are believed.
        fast, slow: where all kernels are faster or slower, by the error of a step.
        low, high: 5th and 95th percentile over errors of kernels.
    """

    said: float
    fast: float
    slow: float
    low: float
    high: float

    @property
    def least(self) -> float:
        """The smallest overhead of all."""
        return min(self.said, self.fast, self.slow, self.low)

    @property
    def most(self) -> float:
        """The largest overhead of all."""
        return max(self.said, self.fast, self.slow, self.high)


class OtherTimes:
    """A program within a limit under the times that it may have; deterministic for a seed.

    Args:
        limit: bytes.
        draws: of errors of kernels.
    """

    def __init__(
        self, program: Program, machine: Machine, limit: int, error: TimesError, draws: int = DRAWS, seed: int = 0
    ) -> None:
        self.program, self.machine, self.limit, self.error = program, machine, limit, error
        self.draws, self.seed = draws, seed
        self._own = Engine(program, machine, limit)

    def expected(self, plan: Plan) -> float:
        """The mean overhead of a plan as said, with all kernels faster and with all slower; where the sum is sure, over
        errors of kernels.

        Raises:
            PlanError: the plan does not fit the program.
        """
        return float(np.mean(self._costs(plan, self._alike if self.error.step else self._drawn)))

    def spread(self, plan: Plan) -> Spread:
        """What a plan may cost; raises PlanError where it does not fit the program."""
        said, fast, slow = self._costs(plan, self._alike)
        low, high = np.percentile(self._costs(plan, self._drawn), (5, 95), method="nearest")
        return Spread(said, fast, slow, float(low), float(high))

    def _costs(self, plan: Plan, engines: Sequence[Engine]) -> list[float]:
        plan.check(self.program)
        rows, out = rows_of(plan.decisions), []
        for engine in engines:
            found = engine.with_variants(plan.variants).score(rows)
            ideal = max(engine.program.ideal_ns, 1)
            out.append(found.iteration_ns / ideal - 1 if found.feasible else float("inf"))
        return out

    @cached_property
    def _alike(self) -> list[Engine]:
        own = self.program
        return [self._own, *(self._own.retimed(p) for p in (self.error.faster(own), self.error.slower(own)))]

    @cached_property
    def _drawn(self) -> list[Engine]:
        seeds = np.random.SeedSequence(self.seed).generate_state(self.draws).tolist()
        return [self._own.retimed(self.error.drawn(self.program, seed)) for seed in seeds]


class ForFaster:
    """Annealing from plans that are there already, under times as short as they may be (``TimesError.margin``).

    Args:
        starts: plans for the times that are believed; the best under the fast ones is taken, of those whose decisions
            annealing may change: swaps and recomputations of tensors of at least ``min_bytes``.
        calls: simulator calls, one for each start included; None: CALLS, or as many as there are ``seconds`` for.
        mode: swap, recompute or joint.
        seconds: of wall-clock time. With them the plan depends on the computer.
    """

    def __init__(
        self, starts: Sequence[Plan], error: TimesError, calls: int | None = None, mode: str = "joint",
        min_bytes: int = MIB, seed: int = 0, seconds: float | None = None,
    ) -> None:  # fmt: skip
        check_budget(calls, seconds)
        self.starts, self.error, self.mode, self.min_bytes = tuple(starts), error, check_mode(mode), min_bytes
        self.calls, self.seconds, self.seed = CALLS if calls is None and seconds is None else calls, seconds, seed
        self.name, self.simulator_calls = f"annealing{FASTER}", 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found, for ``program``; raises Infeasible where no start can be taken."""
        until = None if self.seconds is None else time.monotonic() + self.seconds
        engine = Engine(_times(program, 1 / (1 + self.error.margin)), machine, limit)
        moves = Moves(program, limit, self.mode, self.min_bytes, self.seed)
        found = [rows for rows in (rows_of(plan.decisions) for plan in self.starts if not plan.variants)
                 if moves.takes(rows)]  # fmt: skip
        scores = engine.scores(found)
        best = min(range(len(found)), key=lambda i: scores[i].iteration_ns, default=None)
        self.simulator_calls = engine.calls
        if best is None or not scores[best].feasible:
            raise Infeasible(f"{self.name}: there is no plan of swaps and recomputations to start from")
        left = None if self.calls is None else max(self.calls - engine.calls - 1, 0)
        rows, _ = anneal(moves, engine, found[best], scores[best].iteration_ns, left, HOT, COLD, self.seed, until=until)
        return finish(self, program, machine, limit, engine, rows)


def _times(program: Program, factors: float | NDArray[np.float64]) -> Program:
    """The program with each duration times its factor."""
    own = np.array([k.duration_ns for k in program.kernels], np.float64)
    return program.with_durations(np.rint(own * factors).astype(np.int64).tolist())
