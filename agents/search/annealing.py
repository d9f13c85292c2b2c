"""Simulated annealing over plans.

State: which candidate gaps are emptied, and how. Candidates are all gaps of tensors of at least ``min_bytes``, those
that do not span the peak and those over the iteration boundary included. Energy: the simulated iteration time over
the ideal one. The moves are those of simulator/moves/plan_moves.py, with all gaps and ways alike.

The start is the best plan of the heuristics that ``mode`` allows (``start``), or else every gap emptied. Metropolis
acceptance; the temperature falls geometrically from ``hot`` to ``cold`` (fractions of the ideal time).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
    one_of,
    positive,
    ways_of,
)
from agents.search.in_time import in_time
from agents.search.local_search import anneal, check_heat
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine, cores
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.moves.moves import Moves
from simulator.plan import Plan
from simulator.program import Program

CALLS = 20_000
LONG = 10.0  # seconds: no heuristic that takes longer is among the starts


@dataclass(eq=False)
class Annealing(RowsPlanner):
    """Simulated annealing.

    Args:
        calls: simulator calls, those of the start and the final check included; None: ``CALLS``, or as many as fit
            into ``seconds``.
        mode: swap, recompute or joint.
        hot: first temperature, as a fraction of the ideal time.
        cold: last temperature.
        seconds: of wall-clock time. With them the plan depends on the computer.
        jobs: runs side by side, each on a core, where there are ``seconds``; None: all.
    """

    facts = PlannerInfo(
        "annealing", "simulated annealing", "", family="search", slot=2, place=220, moves="joint", slow=1,
    )  # fmt: skip

    calls: int | None = at_least(LEAST, None)
    mode: str = one_of(MODES, "joint")
    hot: float = 3e-3
    cold: float = 3e-5
    seconds: float | None = positive(None)
    jobs: int | None = at_least(1, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heat(self.hot, self.cold)

    @in_time
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible when none of the starts fits ``limit``."""
        until = time.monotonic() + self.seconds if self.seconds is not None else None
        engine = Engine(program, machine, limit)
        best, best_ns, required = start(program, machine, limit, engine, self.mode, self.min_bytes, half_way(until))
        if best is None:
            # Chains take memory, so that recomputing everything does not reach the least.
            raise self.beyond_reach(engine, required if self.mode == "swap" else None)
        if until is None:
            moves = Moves(program, limit, self.mode, self.min_bytes, self.seed)
            left = self._left(engine.calls)
            best, best_ns = anneal(moves, engine, best, best_ns, left, self.hot, self.cold, self.seed)
        elif time.monotonic() < until:
            best = self._on_all_cores(engine, best, best_ns, until)
        return self.finish(engine, best)

    def _left(self, calls: int) -> int:
        """Calls that are left after so many; the last one is the final check."""
        return max((CALLS if self.calls is None else self.calls) - 1 - calls, 0)

    def _on_all_cores(self, engine: Engine, best: Rows, best_ns: int, until: float) -> Rows:
        """The best plan of runs side by side, each on a core."""
        jobs = self.jobs or cores()
        program, machine, limit = engine.program, engine.machine, engine.limit
        moves = Moves(program, limit, self.mode, self.min_bytes, self.seed)
        several = [
            (moves, engine),
            *((moves.fork(self.seed + i), Engine(program, machine, limit)) for i in range(1, jobs)),
        ]
        each = None if self.calls is None else self._left(engine.calls) // jobs
        with ThreadPoolExecutor(jobs) as pool:
            found = [
                pool.submit(anneal, mine, on, best, best_ns, each, self.hot, self.cold, self.seed + i, until=until)
                for i, (mine, on) in enumerate(several)
            ]
            best, _ = min((one.result() for one in found), key=lambda result: result[1])
        engine.calls = sum(on.calls for _, on in several)
        return best


def half_way(until: float | None) -> float | None:
    """Between now and a time of time.monotonic()."""
    return None if until is None else (time.monotonic() + until) / 2


def start(
    program: Program, machine: Machine, limit: int, engine: Engine, mode: str, min_bytes: int,
    until: float | None = None, longest: float = LONG,
) -> tuple[Rows | None, int, int]:  # fmt: skip
    """Rows, iteration time and required bytes of the best plan of the heuristics, or of every gap emptied where they
    have none. The rows are None where that does not fit either. All simulator calls are added to ``engine``'s.

    Args:
        until: time.monotonic() at which it should be over: heuristics that would take longer are left out, once there
            is a plan.
        longest: s that a heuristic may take, about.
    """
    gaps, n = len(program.gaps(min_bytes)), len(program.kernels)
    found: list[Rows] = []
    for each, product, heuristic in _heuristics(mode, min_bytes):
        takes = each * (gaps + n) + product * gaps * n
        if takes < longest and (not found or until is None or time.monotonic() + takes < until):
            try:
                found.append(rows_of(heuristic.plan(program, machine, limit).decisions))
            except Infeasible:
                pass
            engine.calls += heuristic.simulator_calls
    found = found or [everything(program, mode, min_bytes)]
    scores = [engine.score(rows) for rows in found]
    best = min(range(len(found)), key=lambda i: (not scores[i].feasible, scores[i].iteration_ns))
    feasible, iteration_ns, required, *_ = scores[best]
    return found[best] if feasible else None, iteration_ns, required


def _heuristics(mode: str, min_bytes: int) -> Iterator[tuple[float, float, Planner]]:
    """Those whose plans have only what ``mode`` allows; and about how long they take: s for each gap and each kernel,
    and s for each pair of them."""
    if mode != "recompute":
        yield from ((2e-5, 0.0, AutoSwap(score, min_bytes=min_bytes)) for score in SCORES)
    if mode != "swap":
        yield 3e-5, 0.0, Memonger(min_bytes=min_bytes)
        yield 0.0, 3e-8, ActivationBudget(min_bytes=min_bytes)
        yield 0.0, 3e-8, SuperNeurons(mode, early=True, min_bytes=min_bytes)
    yield 0.0, 1.5e-7, TENSILE(mode, min_bytes=min_bytes)
    yield 0.0, 3e-6, Capuchin(mode, min_bytes=min_bytes)


def everything(program: Program, mode: str, min_bytes: int) -> Rows:
    """int64[m, 6]: every gap emptied in the first of its ways."""
    ways = [ways_of(program, gap, mode) for gap in program.gaps(min_bytes)]
    return np.array([w[0] for w in ways if w], dtype=np.int64).reshape(-1, 6)
