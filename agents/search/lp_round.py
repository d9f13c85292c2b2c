"""Rounding the floor: bound.py's linear program says what the best plan would look like, local search makes it a plan.

Three steps, reasons in README.md; read on in ``LPRound.plan``:

1. Solve the linear program of the floor. Few of the fractions in its optimum are neither 0 nor 1.
2. Round: recompute a gap that it recomputes by more than ``DROP``, swap any other that it empties at all.
3. Repair by annealing, gaps and ways picked by their fractions: ``RUNS``, then kicks of the best plan, then cooling.
   With ``seconds``, a large program's runs are made on all cores, in threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from agents.bound import Floor, floor
from agents.heuristics.autoswap import SCORES, AutoSwap
from agents.heuristics.capuchin import Capuchin
from agents.heuristics.memonger import Memonger
from agents.heuristics.superneurons import SuperNeurons
from agents.planner import MIB, Facts, Planner, Rows, finish, infeasible, plans_of, row_of
from agents.search.annealing import everything, start
from agents.search.local_search import Moves, anneal
from simulator.compiled.encoding import BEFORE, KIND, NEVER, RECOMPUTE, SWAP, TENSOR
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.ways import RECOMPUTED, SWAPPED, check_mode, ways_to_empty

DROP = 0.3
RUNS = ((0.05, 1e-3), (0.2, 1e-3), (1.0, 3e-3))  # explore: added to every weight; hot: of the ideal time
KICK, KICKS = 4000, 12  # simulator calls of a kick at most, and kicks at least
LARGE = 2000  # kernels; in a smaller program, Python takes most of the time, and threads do not help
KERNELS, MOST = 10**8, 300_000
HOT, WARM, COLD = 1e-3, 3e-4, 1e-5  # temperatures, of the ideal time
PIECES = 8  # of a run whose calls are not counted: after each, the time that is left says how long the next is
LINEAR = (0.5, 10.0, 2000)  # the floor: part of the time, seconds with all detail, from so many kernels on
GUIDES = 400  # gaps that the floor of a small program decides about: fractions of more of them lead less well
CAPUCHIN, CAPUCHIN_S = 4 * 10**5, 1e-5  # at most so many gaps times kernels; seconds of each, about
SLOW = 3e-8  # seconds of a heuristic per gap and kernel, about
ROUGH = 0.1  # with less detail than this there is no floor

_Job = tuple[NDArray[np.float64], Rows, int, float]


class LPRound:
    """The floor's program, rounded and repaired.

    Args:
        calls: simulator calls; None: as many as simulate ``KERNELS`` kernels, at most ``MOST``.
        mode: swap, recompute or joint.
        min_bytes: tensors below this size stay.
        seconds: of planning, in the place of calls; with few, the floor is rough, or the ideal time. The plan depends
            on the computer then.

    Attributes:
        floor: a floor under all plans of the mode, after ``plan``.
    """

    facts = Facts("lp_round", "LP rounding", "", family="search and exact", slot=4, place=230, moves="joint", slow=2)
    name = facts.key

    def __init__(
        self, calls: int | None = None, mode: str = "joint", min_bytes: int = MIB, seed: int = 0,
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        if calls is not None and calls < 20:
            raise ValueError(f"calls: expected at least 20, got {calls}")
        if seconds is not None and (calls is not None or not seconds > 0):
            raise ValueError(f"seconds: expected more than 0, and no calls, got {seconds}")
        self.calls, self.mode, self.min_bytes, self.seed = calls, check_mode(mode), min_bytes, seed
        self.seconds = seconds
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible where the floor proves that there is none, or none was found."""
        until = np.inf if self.seconds is None else time.monotonic() + self.seconds
        self.simulator_calls = 0
        self.floor = self._floor(program, machine, limit)
        if not self.floor.feasible:
            raise infeasible(self, program, limit, self.floor.least_bytes)
        began = time.monotonic()
        engine = Engine(program, machine, limit)
        best, swapped, recomputed = self._rounded(program)
        feasible, best_ns, required, *_ = engine.score(best)
        if not feasible:
            found, best_ns, required = self._start(program, machine, limit, engine, until)
            if found is None:
                self.simulator_calls = engine.calls
                raise infeasible(self, program, limit, required if self.mode == "swap" else None)
            best = found
        fractions = np.stack([np.zeros_like(swapped), swapped, recomputed / 2, recomputed / 2], 1)
        search = _Search(program, machine, limit, engine, self, fractions, best, best_ns, began, until)
        calls = self.calls or min(KERNELS // len(program.kernels), MOST)
        search.all(max(calls - 1 - engine.calls, 0))  # the last call is the final check
        engine.calls += sum(e.calls for e in search.engines[1:])
        return finish(self, program, machine, limit, engine, search.best)

    def _start(
        self, program: Program, machine: Machine, limit: int, engine: Engine, until: float
    ) -> tuple[Rows | None, int, int]:
        """Rows (None: none fits), iteration time and required bytes of the best plan of the heuristics that take little
        time, or else of every gap emptied, or else of the heuristics of annealing."""
        swaps: list[Planner] = [AutoSwap(score, self.min_bytes) for score in reversed(SCORES)]
        drops: list[Planner] = [Memonger(min_bytes=self.min_bytes)]
        drops += [SuperNeurons(self.mode, early=True, min_bytes=self.min_bytes)]
        quick = {"swap": swaps, "recompute": drops, "joint": [*swaps, *drops]}[self.mode]
        size = len(program.gaps(self.min_bytes)) * len(program.kernels)
        plans, took = list[Rows](), 0.0
        for planner in quick:
            began = time.monotonic()
            if began + max(took, SLOW * size) < until:
                plans += plans_of([planner], program, machine, limit, engine)
                took = max(took, time.monotonic() - began)
        if size <= CAPUCHIN and time.monotonic() + CAPUCHIN_S * size < until:
            plans += plans_of([Capuchin(self.mode, min_bytes=self.min_bytes)], program, machine, limit, engine)
        plans = plans or [everything(program, self.mode, self.min_bytes)]
        scores = [engine.score(rows) for rows in plans]
        best = min(range(len(plans)), key=lambda i: (not scores[i].feasible, scores[i].iteration_ns))
        if not scores[best].feasible and until == np.inf:
            return start(program, machine, limit, engine, self.mode, self.min_bytes)
        rows = plans[best] if scores[best].feasible else None
        return rows, scores[best].iteration_ns, min(s.required_bytes for s in scores)

    def _floor(self, program: Program, machine: Machine, limit: int) -> Floor:
        """With as much detail as there is time for: first roughly, and then so that it takes the time that is left, if
        that grows with the square of the detail."""
        gaps = GUIDES if self.mode == "joint" and len(program.kernels) < LARGE else None
        if self.seconds is None:
            return floor(program, machine, limit, self.mode, gaps, proofs=False)
        part, seconds, kernels = LINEAR
        left = part * self.seconds
        detail = min(0.5 * left / (seconds * min(1.0, len(program.kernels) / kernels)), 1.0)
        detail = detail if detail > ROUGH else 0.0
        began = time.monotonic()
        rough = floor(program, machine, limit, self.mode, gaps, detail, False, left)
        took = time.monotonic() - began
        if not 0 < detail < 1 or not rough.feasible or took > left / 6:
            return rough
        detail = min(1.0, detail * ((left - took) / took / 2) ** 0.5)
        fine = floor(program, machine, limit, self.mode, gaps, detail, False, left - took)
        return fine if fine.iteration_ns > rough.iteration_ns or not fine.feasible else rough

    def _rounded(self, program: Program) -> tuple[Rows, NDArray[np.float64], NDArray[np.float64]]:
        """The rounded plan, and per gap of ``program.gaps`` the fractions that are swapped and recomputed."""
        at = {gap: i for i, gap in enumerate(self.floor.gaps)}
        gaps = program.gaps(self.min_bytes)
        swapped, recomputed = (
            np.array([part[at[g]] if g in at else 0.0 for g in gaps])
            for part in (self.floor.swapped, self.floor.recomputed)
        )
        for i in np.flatnonzero(recomputed):  # the floor knows of more ways
            if RECOMPUTED not in ways_to_empty(program, gaps[i], self.mode):
                recomputed[i] = 0.0
        rounded = [
            row_of(g, RECOMPUTED if drop > DROP else SWAPPED)
            for g, leave, drop in zip(gaps, swapped, recomputed, strict=True)
            if drop > DROP or (leave + drop > 1e-3 and self.mode != "recompute")
        ]
        return np.array(rounded, dtype=np.int64).reshape(-1, 6), swapped, recomputed


class _Search:
    """The best plan so far, and the moves that found it; an engine and a way to move for each thread."""

    def __init__(
        self, program: Program, machine: Machine, limit: int, engine: Engine, planner: LPRound,
        fractions: NDArray[np.float64], best: Rows, best_ns: int, began: float, until: float,
    ) -> None:  # fmt: skip
        self.best, self.best_ns, self.enough_ns = best, best_ns, planner.floor.iteration_ns
        self.until, self.seed, self.jobs = until, planner.seed, 0
        self.engines, self.moves = [engine], list[Moves]()
        if 2 * time.monotonic() - began > until:
            return  # no time for a search
        at = {(g.tensor, g.before): i for i, g in enumerate(program.gaps(planner.min_bytes))}
        # Of counted calls, one long chain makes more than several short ones, and the same on any computer.
        chains = 1 if until == np.inf or len(program.kernels) < LARGE else len(os.sched_getaffinity(0))
        for chain in range(chains):
            here = time.monotonic()
            if chain:
                self.engines.append(Engine(program, machine, limit))
            self.moves.append(Moves(program, limit, planner.mode, planner.min_bytes, planner.seed + chain))
            if time.monotonic() + 4 * (time.monotonic() - here) > until:
                break  # no time to prepare another
        self.possible = self.moves[0].weights > 0
        self.fractions = fractions[[at[g.tensor, g.before] for g in self.moves[0].gaps]]
        self.weights = self.possible * (self.fractions + RUNS[0][0])
        self.call_s = [0.0] * len(self.moves)  # seconds of a simulator call of each chain

    def all(self, calls: int) -> None:
        """All runs: a third of the calls (or of the time) explores, half of them kicks, the rest cools."""
        chains, now = len(self.moves), time.monotonic()
        left = self.until - now
        if not chains or self.best_ns <= self.enough_ns:
            return
        with ThreadPoolExecutor(chains) as pool:
            tried = [self.possible * (self.fractions + explore) for explore, _ in RUNS]
            start = self.best, self.best_ns
            waves = -(-len(RUNS) // chains)
            for wave in range(waves):
                runs = range(wave * chains, min((wave + 1) * chains, len(RUNS)))
                until = now + left / 3 * (wave + 1) / waves
                jobs = [(tried[i], *start, RUNS[i][1]) for i in runs]
                better = self._wave(pool, jobs, calls // 3 // len(RUNS), until)
                self.weights = self.weights if better is None else jobs[better][0]
            waves = max(calls // 2 // (KICK * chains), KICKS // chains, 1)
            for wave in range(waves):
                until = now + left * (1 / 3 + 1 / 2 * (wave + 1) / waves)
                self._wave(pool, [self._kick(chain) for chain in range(chains)], calls // 2 // (waves * chains), until)
            cool = [(self.weights, self.best, self.best_ns, WARM)] * chains
            self._wave(pool, cool, (calls - calls // 3 - calls // 2) // chains, self.until)

    def _wave(self, pool: ThreadPoolExecutor, jobs: Sequence[_Job], calls: int, until: float) -> int | None:
        """Runs of annealing beside each other, each of its own weights, start, its ns, and first temperature; which of
        them found the best plan, None where none did."""
        better = None
        if self.best_ns <= self.enough_ns:
            return better
        seeds = [int(np.random.default_rng([self.seed, self.jobs + i]).integers(2**31)) for i in range(len(jobs))]
        self.jobs += len(jobs)
        found = pool.map(self._run, range(len(jobs)), jobs, seeds, [calls] * len(jobs), [until] * len(jobs))
        for i, (rows, ns) in enumerate(found):
            if ns < self.best_ns:
                self.best, self.best_ns, better = rows, ns, i
        return better

    def _run(self, chain: int, job: _Job, seed: int, calls: int, until: float) -> tuple[Rows, int]:
        """One run of annealing, of so many calls; or, in pieces, for as long as there is time."""
        weights, rows, ns, hot = job
        moves, engine = self.moves[chain], self.engines[chain]
        moves.weights = weights
        if until == np.inf:
            return anneal(moves, engine, rows, ns, calls, hot, COLD, seed, self.enough_ns)
        for piece in range(PIECES):
            began, counted = time.monotonic(), engine.calls
            share = (until - began) / (PIECES - piece)
            calls = int(share / self.call_s[chain]) if self.call_s[chain] else 1
            if calls < 1 or ns <= self.enough_ns:
                break
            fall = COLD / hot
            first, last = hot * fall ** (piece / PIECES), hot * fall ** ((piece + 1) / PIECES)
            rows, ns = anneal(moves, engine, rows, ns, calls, first, last, seed + piece, self.enough_ns)
            if engine.calls > counted:
                self.call_s[chain] = (time.monotonic() - began) / (engine.calls - counted)
        return rows, ns

    def _kick(self, chain: int) -> _Job:
        """From the best plan without one of its recomputed gaps (or else swapped ones), which may not be emptied in
        that way."""
        rng = np.random.default_rng([self.seed, self.jobs, chain])
        dropped = np.flatnonzero(self.best[:, KIND] == RECOMPUTE)
        if not len(self.best):
            return self.weights, self.best, self.best_ns, HOT
        out = int(rng.choice(dropped if len(dropped) else len(self.best)))
        row = self.best[out]
        i = self.moves[chain].index[int(row[TENSOR]), int(row[BEFORE])]
        weights = self.weights.copy()
        swapped = np.arange(weights.shape[1]) == SWAPPED
        weights[i] = np.where(swapped == (row[KIND] == SWAP), 0.0, weights[i])
        return weights, np.delete(self.best, out, 0), NEVER, HOT
