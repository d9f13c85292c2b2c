"""Simulated annealing over plans, and random search.

State: which candidate gaps are emptied, and how (swap or recompute). Candidates are all gaps of tensors of at least
``min_bytes``, including those that do not span the peak and those that cross the iteration boundary. Energy:
simulated iteration time over the ideal time. Moves: simulator/moves/plan_moves.py, with uniform weights.

The search starts from the best plan of the heuristics allowed by ``mode`` (``start``), or else with every gap
emptied. Metropolis acceptance; the temperature falls geometrically from ``hot`` to ``cold`` (fractions of the ideal
time).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from agents.heuristics.autoswap import SCORES, AutoSwap
from agents.heuristics.capuchin import Capuchin
from agents.heuristics.memonger import Memonger
from agents.heuristics.pytorch import ActivationBudget
from agents.heuristics.superneurons import SuperNeurons
from agents.heuristics.tensile import TENSILE
from agents.planner import (
    LEAST,
    Infeasible,
    Planner,
    PlannerInfo,
    Rows,
    RowsPlanner,
    at_least,
    eviction_rows,
    one_of,
    positive,
)
from agents.search.budgeted import budgeted
from agents.search.local_search import Chains, anneal, check_heat
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine, cores
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.moves.moves import Moves
from simulator.plan import Plan
from simulator.program import Program


@dataclass(eq=False)
class Annealing(RowsPlanner):
    """Simulated annealing.

    Args:
        calls: simulator calls, including those of the start and the final check; None: 20,000, or as many as fit
            into ``seconds``.
        mode: swap, recompute or joint.
        hot: initial temperature, as a fraction of the ideal time.
        cold: final temperature, as a fraction of the ideal time.
        seconds: wall-clock budget. If set, the plan depends on the speed of the computer.
        jobs: parallel chains (one per core) if ``seconds`` is set; None: all cores.

    Attributes:
        first: rows of a feasible plan from which the search starts instead; or None.
        by_class: whether alike gaps are moved together if the program is repetitive.
    """

    facts = PlannerInfo("annealing", "simulated annealing", family="search", slot=2, place=220, slow=1)

    calls: int | None = at_least(LEAST, None)
    mode: str = one_of(MODES, "joint")
    hot: float = 3e-3
    cold: float = 3e-5
    seconds: float | None = positive(None)
    jobs: int | None = at_least(1, None)
    first: Rows | None = field(init=False, default=None)
    by_class: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heat(self.hot, self.cold)

    @budgeted
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the best plan found; raises Infeasible if none of the starts fits ``limit``."""
        deadline = time.monotonic() + self.seconds if self.seconds is not None else None
        engine = Engine(program, machine, limit)
        moves = Moves(program, limit, self.mode, self.min_bytes, self.seed, by_class=self.by_class)
        best: Rows | None = self.first
        if moves.accepts(best):
            best_ns = engine.score(best).iteration_ns
        else:
            until = half_way(deadline)
            best, best_ns, required = start(program, machine, limit, engine, self.mode, self.min_bytes, until)
            if best is None:
                # Recomputation chains need memory, so recomputing everything does not reach the minimum.
                raise self.beyond_reach(engine, required if self.mode == "swap" else None)
        if deadline is None:
            calls = self._remaining_calls(engine.calls)
            best, best_ns = anneal(moves, engine, best, best_ns, calls, self.hot, self.cold, self.seed)
        elif time.monotonic() < deadline:
            best = self._on_all_cores(engine, moves, best, best_ns, deadline)
        return self.finish(engine, best)

    def _remaining_calls(self, calls: int) -> int:
        """Returns the remaining calls after ``calls``, with one reserved for the final check."""
        return max((20_000 if self.calls is None else self.calls) - 1 - calls, 0)

    def _on_all_cores(self, engine: Engine, moves: Moves, best: Rows, best_ns: int, deadline: float) -> Rows:
        """Returns the best plan of parallel chains, one per core."""
        jobs = self.jobs or cores()
        program = engine.program
        machine = engine.machine
        limit = engine.limit
        chains = [
            (moves, engine),
            *((moves.fork(self.seed + i), Engine(program, machine, limit)) for i in range(1, jobs)),
        ]
        share = None if self.calls is None else self._remaining_calls(engine.calls) // jobs
        with Chains(jobs) as pool:
            futures = [
                pool.submit(
                    anneal,
                    fork,
                    scorer,
                    best,
                    best_ns,
                    share,
                    self.hot,
                    self.cold,
                    self.seed + i,
                    deadline=deadline,
                    stopped=pool.stopped,
                )
                for i, (fork, scorer) in enumerate(chains)
            ]
            best, _ = min((future.result() for future in futures), key=lambda result: result[1])
        engine.calls = sum(scorer.calls for _, scorer in chains)
        return best


@dataclass(eq=False)
class RandomSearch(RowsPlanner):
    """The baseline: each of ``calls - 1`` samples empties gaps in random order until the planned residency fits."""

    facts = PlannerInfo("random_search", "random search", "", "search", 1, 10, "swap")

    calls: int = at_least(LEAST, 2_000)

    def choose(self, engine: Engine) -> Rows:
        """Returns the best sample; raises Infeasible if emptying all gaps leaves the peak above the limit."""
        program = engine.program
        limit = engine.limit
        candidates = self.reachable(engine, program.gaps(self.min_bytes))
        rng = np.random.default_rng(self.seed)
        samples = self.calls - 1 if program.peak_bytes > limit else 1
        orders = (rng.permutation(len(candidates)) for _ in range(samples))
        plans = (candidates.rows[np.sort(candidates.prefix(order, limit))] for order in orders)
        return min(plans, key=lambda rows: engine.score(rows).iteration_ns)


def half_way(deadline: float | None) -> float | None:
    """Returns the midpoint between now and a deadline on time.monotonic()."""
    return None if deadline is None else (time.monotonic() + deadline) / 2


def start(
    program: Program,
    machine: Machine,
    limit: int,
    engine: Engine,
    mode: str,
    min_bytes: int,
    deadline: float | None = None,
    longest_s: float = 10.0,
) -> tuple[Rows | None, int, int]:
    """Finds the initial plan: the best heuristic plan, or every gap emptied if no heuristic finds one.

    Simulator calls of the heuristics are added to ``engine.calls``.

    Args:
        deadline: deadline on time.monotonic(): once a plan is found, heuristics expected to finish later are skipped.
        longest_s: seconds; heuristics expected to take longer are skipped.
        program, machine, limit: the task; the limit is in bytes.
        mode: swap, recompute or joint.
        min_bytes: size below which tensors stay resident.

    Returns:
        Rows (None if even the fallback does not fit), iteration time in ns, and required bytes.
    """
    gaps = len(program.gaps(min_bytes))
    n = len(program.kernels)
    plans: list[Rows] = []
    for per_item, per_pair, heuristic in _heuristics(mode, min_bytes):
        expected_s = per_item * (gaps + n) + per_pair * gaps * n
        if expected_s < longest_s and (not plans or deadline is None or time.monotonic() + expected_s < deadline):
            try:
                plans.append(rows_of(heuristic.plan(program, machine, limit).decisions))
            except Infeasible:
                pass
            engine.calls += heuristic.simulator_calls
    plans = plans or [everything(program, mode, min_bytes)]
    scores = [engine.score(rows) for rows in plans]
    best = min(range(len(plans)), key=lambda i: (not scores[i].feasible, scores[i].iteration_ns))
    feasible, iteration_ns, required, *_ = scores[best]
    return plans[best] if feasible else None, iteration_ns, required


def _heuristics(mode: str, min_bytes: int) -> Iterator[tuple[float, float, Planner]]:
    """Yields the heuristics whose plans are allowed by ``mode``, with estimates of their duration.

    The estimates are seconds per gap and kernel, and seconds per (gap, kernel) pair.
    """
    if mode != "recompute":
        yield from ((2e-5, 0.0, AutoSwap(score, min_bytes=min_bytes)) for score in SCORES)
    if mode != "swap":
        yield 3e-5, 0.0, Memonger(min_bytes=min_bytes)
        yield 0.0, 3e-8, ActivationBudget(min_bytes=min_bytes)
        yield 0.0, 3e-8, SuperNeurons(mode, "cost", early=True, min_bytes=min_bytes)
    yield 0.0, 1.5e-7, TENSILE(mode, min_bytes=min_bytes)
    yield 0.0, 3e-6, Capuchin(mode, min_bytes=min_bytes)


def everything(program: Program, mode: str, min_bytes: int) -> Rows:
    """Returns int64[m, 6]: every gap emptied by its first eviction kind."""
    rows = [eviction_rows(program, gap, mode) for gap in program.gaps(min_bytes)]
    return np.array([kind_rows[0] for kind_rows in rows if kind_rows], dtype=np.int64).reshape(-1, 6)
