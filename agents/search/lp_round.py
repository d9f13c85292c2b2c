"""LP rounding: rounds the optimum of the floor's linear program and repairs it by local search.

Three steps (reasons in README.md); entry point: ``LPRound.plan``.

1. Solve the linear program of the floor. Few fractions of its optimum are neither 0 nor 1.
2. Round: recompute gaps with a recomputed fraction above ``drop``, swap all other emptied gaps. For
   programs of more than ``few_kernels`` kernels, remove decisions that the limit does not need, smallest fractions
   first.
3. Repair by annealing with moves weighted by the fractions: ``runs``, then kicks of the best plan, then cooling.
   With ``seconds``, runs of large programs use all cores, in threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from threading import Event

import numpy as np
from numpy.typing import NDArray

from agents.floor import UNPROVEN, Floor, floor
from agents.planner import LEAST, PlannerInfo, Rows, RowsPlanner, at_least, infeasible, one_of, positive
from agents.search.annealing import half_way, start
from agents.search.budgeted import budgeted
from agents.search.local_search import Chains, anneal
from agents.search.thinning import pruned
from simulator.compiled.encoding import AFTER, BEFORE, EXTRA, KIND, NEVER, RECOMPUTE, SWAP, TENSOR, WHEN, row_of
from simulator.compiled.engine import Engine, cores
from simulator.machine import Machine
from simulator.modes import MODES, Choice, evictions
from simulator.moves.moves import Moves, since_write
from simulator.plan import Plan
from simulator.program import Gap, Program


@dataclass(frozen=True)
class RoundingOptions:
    """Parameters of rounding and repair. Temperatures are fractions of the ideal time."""

    drop: float = 0.3  # recomputed fraction above which a gap is recomputed
    # Explorations: the number added to every fraction as the weight of its move, and the first temperature.
    runs: tuple[tuple[float, float], ...] = ((0.05, 1e-3), (0.2, 1e-3), (1.0, 3e-3))
    kick_calls: int = 4_000
    kick_hot: float = 1e-3
    warm: float = 3e-4  # first temperature of the last run
    cold: float = 1e-5  # last temperature of all runs
    kernels: int = 10**8  # kernels that all simulator calls simulate by default
    max_calls: int = 300_000
    fallback_s: float = 3.0  # maximum duration of a fallback heuristic if the rounded plan does not fit
    few_kernels: int = 2_000  # up to this size the next value applies, and a floor is faster in proportion
    max_gaps: int = 400  # gaps of the linear program in joint mode (tuned)
    floor_share: float = 0.5  # of the time budget
    floor_s: float = 10.0  # approximate seconds of a floor in full detail
    min_detail: float = 0.1  # below it the floor would say little, so none is computed


OPTIONS = RoundingOptions()

_Task = tuple[NDArray[np.float64], Rows, int, float]


@dataclass(eq=False)
class LPRound(RowsPlanner):
    """Rounding and repair of the floor's linear program.

    Args:
        calls: simulator calls; None: as many as simulate ``RoundingOptions.kernels`` kernels, at most ``max_calls``, or
            as many as fit into ``seconds``.
        mode: swap, recompute or joint.
        seconds: wall-clock budget; a small budget gives a coarse floor, or the ideal time. If set, the plan depends on
            the speed of the computer.
        jobs: parallel chains (one per core) if ``seconds`` is set; None: all cores.

    Attributes:
        floor: lower bound for all plans of the mode, set by ``plan``.
        first: rows of a feasible plan that joins the search after its own exploration; or None.
    """

    facts = PlannerInfo("lp_round", "LP rounding", family="search", slot=4, place=230, slow=2)

    calls: int | None = at_least(LEAST, None)
    mode: str = one_of(MODES, "joint")
    seconds: float | None = positive(None)
    jobs: int | None = at_least(1, None)
    first: Rows | None = field(init=False, default=None)

    @budgeted
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the best plan found; raises Infeasible if the floor proves infeasibility or no plan was found."""
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        self.floor = self._floor(program, machine, limit)
        if not self.floor.feasible:
            raise infeasible(self, program, limit, self.floor.least_bytes)
        engine = Engine(program, machine, limit)
        gaps, swapped, recomputed = self._fractions(program)
        rounded = self._rounded(gaps, swapped, recomputed)
        moves = Moves(program, limit, self.mode, self.min_bytes, self.seed)
        plans = [rounded]
        if len(program.kernels) > OPTIONS.few_kernels:
            plans += _variants(program, pruned(engine, rounded))
        scores = engine.scores(plans)
        best_index = min(range(len(plans)), key=lambda i: scores[i].iteration_ns)
        best = plans[best_index]
        best_ns = scores[best_index].iteration_ns
        if best_ns == NEVER and moves.accepts(self.first):
            best = self.first
            best_ns = engine.score(self.first).iteration_ns
        elif best_ns == NEVER:
            fallback, best_ns, required = start(
                program, machine, limit, engine, self.mode, self.min_bytes, half_way(deadline), OPTIONS.fallback_s
            )
            if fallback is None:
                raise self.beyond_reach(engine, required if self.mode == "swap" else None)
            best = fallback
        if best_ns > self.floor.iteration_ns and (deadline is None or time.monotonic() < deadline):
            fractions = np.stack([np.zeros_like(swapped), swapped, recomputed / 2, recomputed / 2], 1)
            calls = self.calls
            if calls is None and deadline is None:
                calls = min(OPTIONS.kernels // len(program.kernels), OPTIONS.max_calls)
            if calls is not None:
                calls = max(calls - 1 - engine.calls, 0)  # one call is reserved for the final check
            search = _Repair(self, engine, moves, calls, deadline, fractions, best, best_ns)
            search.run()
            best = search.best
            engine.calls = sum(e.calls for e in search.engines)
        return self.finish(engine, best)

    def _floor(self, program: Program, machine: Machine, limit: int) -> Floor:
        """Computes the floor with as much detail as the time budget allows.

        A coarse solve comes first; the detail of the second assumes that time grows with its square.
        """
        relative_size = len(program.kernels) / OPTIONS.few_kernels
        gaps = OPTIONS.max_gaps if self.mode == "joint" and relative_size < 1 else None
        if self.seconds is None:
            return floor(program, machine, limit, self.mode, gaps, 1.0, UNPROVEN)
        remaining = OPTIONS.floor_share * self.seconds
        detail = min(0.5 * remaining / (OPTIONS.floor_s * min(1.0, relative_size)), 1.0)
        detail = detail if detail > OPTIONS.min_detail else 0.0
        start_time = time.monotonic()
        coarse = floor(program, machine, limit, self.mode, gaps, detail, UNPROVEN, remaining)
        elapsed = time.monotonic() - start_time
        if not 0 < detail < 1 or not coarse.feasible or elapsed > remaining / 6:
            return coarse
        detail = min(1.0, detail * ((remaining - elapsed) / elapsed / 2) ** 0.5)
        fine = floor(program, machine, limit, self.mode, gaps, detail, UNPROVEN, remaining - elapsed)
        return fine if fine.iteration_ns > coarse.iteration_ns or not fine.feasible else coarse

    def _fractions(self, program: Program) -> tuple[list[Gap], NDArray[np.float64], NDArray[np.float64]]:
        """Returns the gaps of ``program.gaps`` with the fractions that the floor swaps and recomputes."""
        index = {gap: i for i, gap in enumerate(self.floor.gaps)}
        gaps = program.gaps(self.min_bytes)
        swapped, recomputed = (
            np.array([part[index[g]] if g in index else 0.0 for g in gaps])
            for part in (self.floor.swapped, self.floor.recomputed)
        )
        for i in np.flatnonzero(recomputed):  # the floor covers more eviction kinds
            if Choice.RECOMPUTED not in evictions(program, gaps[i], self.mode):
                recomputed[i] = 0.0
        return gaps, swapped, recomputed

    def _rounded(self, gaps: list[Gap], swapped: NDArray[np.float64], recomputed: NDArray[np.float64]) -> Rows:
        """Rounds the fractions (step 2), smallest first."""
        evicted = swapped + recomputed
        chosen = np.flatnonzero((recomputed > OPTIONS.drop) | ((evicted > 1e-3) & (self.mode != "recompute")))
        order = chosen[np.argsort(evicted[chosen], kind="stable")].tolist()
        rows = [row_of(gaps[i], Choice.RECOMPUTED if recomputed[i] > OPTIONS.drop else Choice.SWAPPED) for i in order]
        return np.array(rows, dtype=np.int64).reshape(-1, 6)


def _variants(program: Program, plan: Rows) -> list[Rows]:
    """Returns variants of a plan: with copies issued as early as possible, and with ``keep`` for recomputations."""
    early = plan.copy()
    for i in np.flatnonzero(plan[:, KIND] == SWAP):
        gap = Gap(*plan[i, [TENSOR, AFTER, BEFORE]].tolist())
        if lead := since_write(program, gap):
            early[i, WHEN] = (gap.after - lead) % len(program.kernels)
    keeping = [plan.copy(), early.copy()]
    for rows in keeping:
        rows[rows[:, KIND] == RECOMPUTE, EXTRA] = 1
    return [plan, early, *keeping]


class _Repair:
    """Search state: the best plan so far and the weights that found it, with an engine and moves per thread.

    Attributes:
        calls: remaining calls of all runs; None: limited only by ``deadline``.
    """

    def __init__(
        self,
        planner: LPRound,
        engine: Engine,
        moves: Moves,
        calls: int | None,
        deadline: float | None,
        fractions: NDArray[np.float64],
        best: Rows,
        best_ns: int,
    ) -> None:
        self.best = best
        self.best_ns = best_ns
        self.enough_ns = planner.floor.iteration_ns
        self.calls = calls
        self.deadline = deadline
        self.seed = planner.seed
        self.runs = 0
        program = engine.program
        machine = engine.machine
        limit = engine.limit
        chains = 1 if deadline is None else planner.jobs or cores()  # with a call budget, one chain is better
        self.moves = [moves, *(moves.fork(planner.seed + chain) for chain in range(1, chains))]
        self.engines = [engine, *(Engine(program, machine, limit) for _ in range(1, chains))]
        index = {(g.tensor, g.before): i for i, g in enumerate(program.gaps(planner.min_bytes))}
        is_possible = moves.weights > 0
        fractions = fractions[[index[g.tensor, g.before] for g in moves.gaps]]
        self.guides = [is_possible * (fractions + explore) for explore, _ in OPTIONS.runs]
        self.weights = self.guides[0]
        self.first = planner.first if moves.accepts(planner.first) else None

    def run(self) -> None:
        """Spends a third of the calls (or of the time) on exploration, half on kicks and the rest on cooling."""
        chains = len(self.moves)
        begin = time.monotonic()
        ends = [None if self.deadline is None else begin + (self.deadline - begin) * f for f in (1 / 3, 5 / 6, 1.0)]
        explore_calls, kick_calls, cool_calls = (None if self.calls is None else self.calls // n for n in (3, 2, 6))
        with Chains(chains) as pool:
            start = (self.best, self.best_ns)
            count_runs = len(OPTIONS.runs)
            waves = -(-count_runs // chains)
            for wave in range(waves):
                runs = range(wave * chains, min((wave + 1) * chains, count_runs))
                deadline = ends[0] and begin + (ends[0] - begin) * (wave + 1) / waves
                jobs = [(self.guides[i], *start, OPTIONS.runs[i][1]) for i in runs]
                winner = self._wave(pool, jobs, explore_calls and explore_calls // count_runs, deadline)
                if winner is not None:
                    self.weights = jobs[winner][0]
            if self.first is not None and (ns := self.engines[0].score(self.first).iteration_ns) < self.best_ns:
                self.best = self.first
                self.best_ns = ns
            kicks = max((kick_calls or 0) // (OPTIONS.kick_calls * chains), 1)
            max_calls = (
                OPTIONS.kick_calls if kick_calls is None else min(OPTIONS.kick_calls, kick_calls // (kicks * chains))
            )
            for _ in count() if kick_calls is None else range(kicks):
                if (ends[1] is not None and time.monotonic() >= ends[1]) or self.best_ns <= self.enough_ns:
                    break
                self._wave(pool, [self._kick(chain) for chain in range(chains)], max_calls, ends[1])
            jobs = [(self.weights, self.best, self.best_ns, OPTIONS.warm)] * chains
            self._wave(pool, jobs, cool_calls and cool_calls // chains, ends[2])

    def _wave(self, pool: Chains, jobs: Sequence[_Task], calls: int | None, deadline: float | None) -> int | None:
        """Executes annealing runs in parallel, each with its weights, start, start time in ns and initial temperature.

        Returns the index of the run that found a new best plan, or None.
        """
        winner = None
        if self.best_ns <= self.enough_ns:
            return winner
        results = list(
            pool.map(self._run, range(len(jobs)), jobs, repeat(calls), repeat(deadline), repeat(pool.stopped))
        )
        self.runs += len(jobs)
        for i, (rows, ns) in enumerate(results):
            if ns < self.best_ns:
                self.best = rows
                self.best_ns = ns
                winner = i
        return winner

    def _run(
        self, chain: int, job: _Task, calls: int | None, deadline: float | None, stopped: Event
    ) -> tuple[Rows, int]:
        weights, rows, ns, hot = job
        seed = int(np.random.default_rng([self.seed, self.runs + chain]).integers(2**31))
        moves = self.moves[chain]
        moves.weights = weights
        engine = self.engines[chain]
        return anneal(moves, engine, rows, ns, calls, hot, OPTIONS.cold, seed, self.enough_ns, deadline, stopped)

    def _kick(self, chain: int) -> _Task:
        """Perturbs the best plan: restores a recomputed (else swapped) gap and forbids that eviction kind for it."""
        rng = np.random.default_rng([self.seed, self.runs, chain])
        dropped = np.flatnonzero(self.best[:, KIND] == RECOMPUTE)
        if not len(self.best):
            return self.weights, self.best, self.best_ns, OPTIONS.kick_hot
        removed = int(rng.choice(dropped if len(dropped) else len(self.best)))
        row = self.best[removed]
        i = self.moves[chain].index[int(row[TENSOR]), int(row[BEFORE])]
        weights = self.weights.copy()
        swapped = np.arange(weights.shape[1]) == Choice.SWAPPED
        weights[i] = np.where(swapped == (row[KIND] == SWAP), 0.0, weights[i])
        return weights, np.delete(self.best, removed, 0), NEVER, OPTIONS.kick_hot
