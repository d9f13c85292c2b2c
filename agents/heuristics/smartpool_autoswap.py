"""SmartPool+AutoSwap: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), combined mode.

AutoSwap plans first; SmartPool then assigns addresses to the mallocs and frees of the plan, including those of its
swaps (section V, last paragraph; section VI-C). The *footprint*, the highest address in use, must fit, because the
limit is on memory as a driver counts it. The packing is not part of the plan: simulator/pool/__init__.py shows how to
derive it. Entry point: ``SmartPoolAutoSwap.plan``. Numbered choices and deviations: smartpool_autoswap.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.heuristics.autoswap import FAMILY, PAPER, SCORES, AutoSwap, AutoSwapBO, peak_gaps
from agents.planner import Candidates, PlannerInfo, Rows, RowsPlanner, at_least, infeasible
from simulator.compiled.encoding import BEFORE, EXTRA, NEVER, TENSOR
from simulator.compiled.engine import Engine, decisions_of
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool import allocator, run as pack, timeline_lifetimes
from simulator.program import Gap, Program

TUNED = ("bo", "random")  # weights per load limit: by Bayesian optimization, and its control of equal evaluations


class _Execution(NamedTuple):
    """Swaps executed under the load limit of an engine."""

    iteration_ns: int
    peak_bytes: int
    engine: Engine
    rows: Rows


@dataclass(eq=False)
class SmartPoolAutoSwap(RowsPlanner):
    """AutoSwap under a load limit at which SmartPool's footprint fits.

    Args:
        score: doa, aoa, wdoa or swdoa (autoswap.py); all of them; bo, which adds the weights that Bayesian optimization
            finds for each load limit (section IV-C); or random, its control, with as many random weights.
        evaluations: number of weights tried for each load limit by bo and random, including the four scores.
        pool: an offline packer (simulator.pool.ALLOCATORS): smartpool, smartpool_first, …
        seconds: time budget per packing, if ``pool`` is a search.
        align: round blocks up to the machine's alignment, as GPU addresses require.
        steps: number of load limits tried, evenly spaced from the limit down to half of it or the minimum that swaps
            reach.
    """

    facts = PlannerInfo(
        "smartpool+autoswap", "SmartPool + AutoSwap", f"{PAPER} V", FAMILY, 5, 70, "swap", addressed=True
    )

    score: str = "all"
    pool: str = "smartpool"
    seconds: float = 1.0
    align: bool = True
    steps: int = at_least(2, 16)
    evaluations: int = at_least(4, 30)

    def __post_init__(self) -> None:
        super().__post_init__()
        if allocator(self.pool).online:
            raise ValueError(f"pool: expected an offline packer, got {self.pool!r}, which is online")
        scores = SCORES if self.score in ("all", *TUNED) else (self.score,)
        self.autoswaps: list[AutoSwap | AutoSwapBO] = [AutoSwap(score) for score in scores]
        if self.score in TUNED:
            random = 4 if self.score == "bo" else self.evaluations
            self.autoswaps.append(AutoSwapBO(self.evaluations, random, seed=self.seed))

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns a plan whose footprint fits ``limit`` when executed under ``Plan.limit``.

        Raises:
            Infeasible: no plan tried has such a footprint.
        """
        candidates = Candidates(program, peak_gaps(program, self.min_bytes))
        lowest = min(limit, max(candidates.least_bytes, limit // 2))
        runs = self._runs(candidates, program, machine, limit, lowest, self.steps)
        for run in sorted(runs, key=lambda run: (run.iteration_ns, len(run.rows), run.peak_bytes)):
            if self._footprint(run) <= limit:
                return self._finish(run)
        raise infeasible(self, program, limit, None, self.simulator_calls)

    def smallest(self, program: Program, machine: Machine, overheads: Sequence[float]) -> list[Plan]:
        """Returns the plan of the smallest footprint for each maximum overhead, at least 0 (the inverse problem).

        Tries ``2 * steps`` load limits, from the peak to the minimum that swaps reach.
        """
        candidates = Candidates(program, peak_gaps(program, self.min_bytes))
        runs = self._runs(candidates, program, machine, program.peak_bytes, candidates.least_bytes, 2 * self.steps)
        runs.sort(key=lambda run: (run.peak_bytes, run.iteration_ns, len(run.rows)))
        footprints: dict[int, int] = {}
        plans = []
        for overhead in overheads:
            best = 0
            footprint = NEVER
            for i, run in enumerate(runs):
                if run.peak_bytes >= footprint:  # as are all footprints of lower load limits
                    break
                if run.iteration_ns <= program.ideal_ns * (1 + overhead):
                    if i not in footprints:
                        footprints[i] = self._footprint(run)
                    if footprints[i] < footprint:
                        best = i
                        footprint = footprints[i]
            plans.append(self._finish(runs[best]))
        return plans

    def _runs(
        self, candidates: Candidates, program: Program, machine: Machine, highest: int, lowest: int, steps: int
    ) -> list[_Execution]:
        """Yields every selection for one of the load limits, executed under every load limit that it fits."""
        loads = np.unique(np.linspace(highest, lowest, steps, dtype=np.int64))[::-1].tolist()
        engines = [Engine(program, machine, load) for load in loads]
        selections: dict[frozenset[int], NDArray[np.int64]] = {}
        schedule = partial(just_in_time, program, machine)
        for autoswap, engine in product(self.autoswaps, engines):
            if candidates.least_bytes <= engine.limit:
                options = [schedule] if isinstance(autoswap, AutoSwapBO) else []
                selected = autoswap.select(candidates, engine, *options)
                selections.setdefault(frozenset(selected.tolist()), selected)
        runs: dict[tuple[int, int, int], _Execution] = {}
        for i, selected in enumerate(selections.values()):
            rows = schedule(candidates.rows[selected])
            for engine in engines:
                score = engine.score(rows)
                if score.feasible:  # same time and peak as under a higher load limit: identical run
                    run = _Execution(score.iteration_ns, score.peak_bytes, engine, rows)
                    runs.setdefault((i, score.iteration_ns, score.peak_bytes), run)
        self.simulator_calls = sum(engine.calls for engine in engines)
        return list(runs.values())

    def _footprint(self, run: _Execution) -> int:
        """Returns the memory a run consumes: the footprint of its repeated iteration, or its peak if higher."""
        plan = Plan(decisions_of(run.rows))
        lives = timeline_lifetimes(run.engine.timeline(plan))
        alignment = run.engine.machine.alignment if self.align else 1
        packing = pack(self.pool, lives.intervals, alignment, self.seconds)[1]
        return max(packing.footprint, run.peak_bytes)  # the first iteration may have more

    def _finish(self, run: _Execution) -> Plan:
        calls = self.simulator_calls
        plan = self.finish(run.engine, run.rows)
        self.simulator_calls = calls + 1
        return plan


def just_in_time(program: Program, machine: Machine, rows: Rows) -> Rows:
    """Returns the swaps ``rows`` (int64[m, 6]), each pinned to return just before its access (section IV-E).

    Swap-ins are one at a time; times assume unlimited memory.
    """
    n = len(program.kernels)
    period = program.ideal_ns
    ends = [t + i * period for i in (0, 1) for t in program.start_ns[1:]]  # of the kernels of two iterations
    gaps = [Gap(*row[TENSOR : BEFORE + 1]) for row in rows.tolist()]
    access = [g.before + n * (g.after >= g.before) for g in gaps]  # counting kernels over the boundary
    scheduled = rows.copy()
    next_in = ends[-1]
    for i in sorted(range(len(gaps)), key=lambda i: (-access[i], -gaps[i].tensor)):
        start = ends[access[i] - 1] if access[i] else 0
        next_in = min(next_in, start) - machine.h2d_ns(program.tensors[gaps[i].tensor].nbytes)
        scheduled[i, EXTRA] = max(gaps[i].after, min(access[i], bisect_right(ends, next_in)) - 1) % n
    return scheduled
