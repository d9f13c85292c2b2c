"""Simulated annealing over plans: the yardstick that the learned agent is compared to.

State: which candidate gaps are emptied (of every tensor of at least ``min_bytes``, whether or not the gap
spans the peak, those over the iteration boundary included), and how. Energy: the simulated iteration time
over the ideal one. Only plans whose planned residency fits are simulated: a move that breaks the limit is
repaired by emptying random gaps that are open where the load is largest, so that hardly a simulator call is
spent on a plan that cannot run. Moves:

- fill: an emptied gap is filled, then the plan is repaired;
- empty: a gap is emptied, then emptied ones are filled at random while the limit holds;
- shift: a swap-out is issued some kernels later, so that others go before it on the FIFO, or a swap-in waits
  for a kernel to end;
- way (``mode="joint"`` or ``"recompute"``): an emptied gap changes between swap, recompute, and recompute that
  keeps.

The start is the best of the AutoSwap and SuperNeurons plans, else every gap emptied. Metropolis acceptance;
the temperature falls geometrically from ``hot`` to ``cold`` (fractions of the ideal time) in each of
``restarts`` equal runs, which begin where the best plan so far was.
"""

from __future__ import annotations

import math
import random

import numpy as np

from agents.autoswap import SCORES, AutoSwap
from agents.planner import (
    MIB,
    RECOMPUTE,
    SWAP,
    Candidates,
    Infeasible,
    Planner,
    Rows,
    check_mode,
    finish,
    infeasible,
    spans,
)  # fmt: skip
from agents.superneurons import SuperNeurons
from simulator.engine import Engine, rows_of
from simulator.machine import Machine
from simulator.plan import Plan, cannot_recompute
from simulator.program import Gap, Program

FILL, EMPTY = 0.4, 0.4  # shares of the moves; the rest are shifts and ways
PRUNE = 3  # gaps that an empty move tries to fill
SHIFT = 8.0  # kernels, mean of a shift

Row = tuple[int, int, int, int, int]


class Annealing:
    """Simulated annealing.

    Args:
        calls: simulator calls, those of the start and the final check included.
        mode: swap, recompute or joint.
        hot: first temperature, as a fraction of the ideal time.
        cold: last temperature.
        restarts: equal runs that share the calls.
        min_bytes: tensors below this size stay.
    """

    name = "annealing"

    def __init__(
        self,
        calls: int = 20_000,
        mode: str = "swap",
        hot: float = 3e-3,
        cold: float = 3e-5,
        restarts: int = 1,
        min_bytes: int = MIB,
        seed: int = 0,
    ) -> None:
        if calls < 20:
            raise ValueError(f"calls: expected at least 20, got {calls}")
        if not 0 < cold <= hot:
            raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")
        self.calls, self.mode, self.hot, self.cold = calls, check_mode(mode), hot, cold
        self.restarts, self.min_bytes, self.seed = restarts, min_bytes, seed
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible when none of the starts fits ``limit``."""
        engine = Engine(program, machine, limit)
        rng = random.Random(self.seed)
        best, best_ns = self._start(program, machine, limit, engine)
        state = _State(program, limit, self.mode, self.min_bytes, rng)
        ideal = max(program.ideal_ns, 1)
        each = max((self.calls - 1 - engine.calls) // self.restarts, 0)  # the last call is the final check
        for _ in range(self.restarts):
            state.reset(best)
            now_ns = best_ns
            for step in range(each):
                if best_ns <= ideal or not state.propose():
                    break
                score = engine.score(state.plan())
                temperature = ideal * self.hot * (self.cold / self.hot) ** (step / each)
                if score.feasible and score.iteration_ns - now_ns < -temperature * math.log(1.0 - rng.random()):
                    now_ns = score.iteration_ns
                    if now_ns < best_ns:
                        best, best_ns = state.plan(), now_ns
                else:
                    state.undo()
        return finish(self, program, machine, limit, engine, best)

    def _start(self, program: Program, machine: Machine, limit: int, engine: Engine) -> tuple[Rows, int]:
        """Rows and iteration time of the best plan of the others, or of every gap emptied where they have none."""
        others: list[Planner] = []
        if self.mode != "recompute":
            others += [AutoSwap(score, self.min_bytes) for score in SCORES]
        if self.mode != "swap":
            others += [SuperNeurons(self.mode, early=True, min_bytes=self.min_bytes)]
        starts = []
        for planner in others:
            try:
                starts.append(rows_of(planner.plan(program, machine, limit).decisions))
            except Infeasible:
                pass
            engine.calls += planner.simulator_calls
        starts = starts or [everything(program, self.mode, self.min_bytes)]
        scores = [engine.score(rows) for rows in starts]
        best = min(range(len(starts)), key=lambda i: (not scores[i].feasible, scores[i].iteration_ns))
        if not scores[best].feasible:
            self.simulator_calls = engine.calls
            # Chains take memory, so that recomputing everything does not reach the least.
            raise infeasible(self, program, limit, scores[best].required_bytes if self.mode == "swap" else None)
        return starts[best], scores[best].iteration_ns


def ways_of(program: Program, gap: Gap, mode: str) -> list[Row]:
    """The rows that can empty ``gap``: a swap, a recomputation, one that keeps; none where ``mode`` and the
    program allow none."""
    ways: list[Row] = [(SWAP, *gap, -1)] if mode != "recompute" else []
    if mode != "swap" and gap.after < gap.before and cannot_recompute(program, *gap) is None:
        ways += [(RECOMPUTE, *gap, 0), (RECOMPUTE, *gap, 1)]
    return ways


def everything(program: Program, mode: str, min_bytes: int) -> Rows:
    """int64[m, 5]: every gap emptied in the first of its ways."""
    ways = [ways_of(program, gap, mode) for gap in program.gaps(min_bytes)]
    return np.array([w[0] for w in ways if w], dtype=np.int64).reshape(-1, 5)


class _State:
    """A plan as one row per candidate gap, with its planned residency (without the memory of recomputation
    chains, which the engine adds), and the log that undoes the last proposal."""

    def __init__(self, program: Program, limit: int, mode: str, min_bytes: int, rng: random.Random) -> None:
        ways = [ways_of(program, gap, mode) for gap in program.gaps(min_bytes)]
        self.ways = [w for w in ways if w]
        gaps = [Gap(*w[0][1:4]) for w in self.ways]
        self.candidates = Candidates(program, gaps)
        self.index = {(g.tensor, g.before): i for i, g in enumerate(gaps)}
        self.limit, self.rng, self.n = limit, rng, len(program.kernels)
        self.nbytes = self.candidates.nbytes.tolist()
        self.reset(self.candidates.rows[:0])

    def reset(self, rows: Rows) -> None:
        """Makes this the plan of ``rows``."""
        self.row = [w[0] for w in self.ways]
        self.rows = np.array(self.row, dtype=np.int64).reshape(-1, 5)
        self.on = np.zeros(len(self.ways), dtype=bool)
        self.load = self.candidates.loads.copy()
        self.log: list[tuple[int, bool, Row]] = []
        for kind, tensor, after, before, extra in rows.tolist():
            self._set(self.index[tensor, before], True, (kind, tensor, after, before, extra))

    def plan(self) -> Rows:
        """int64[n, 5]: the rows of the emptied gaps, a copy."""
        return self.rows[self.on]

    def propose(self) -> bool:
        """Changes the plan to one whose residency fits; False when a hundred moves in a row did not."""
        for _ in range(100):
            self.log = []
            if self._move():
                return True
            self.undo()
        return False

    def undo(self) -> None:
        """Takes the last proposal back."""
        for i, on, row in reversed(self.log):
            self._put(i, on, row)
        self.log = []

    def _set(self, i: int, on: bool, row: Row) -> None:
        self.log.append((i, bool(self.on[i]), self.row[i]))
        self._put(i, on, row)

    def _put(self, i: int, on: bool, row: Row) -> None:
        if self.on[i]:
            for span in spans(self.row[i][2], self.row[i][3], self.n):
                self.load[span] += self.nbytes[i]
        if on:
            for span in spans(row[2], row[3], self.n):
                self.load[span] -= self.nbytes[i]
        self.on[i] = on
        if row is not self.row[i]:
            self.row[i] = row
            self.rows[i] = row

    def _pick(self, among: np.ndarray) -> int:
        """A random index at which ``among`` (bool[m]) holds; -1 when there is none."""
        found = among.nonzero()[0]
        return int(found[int(self.rng.random() * len(found))]) if len(found) else -1

    def _way(self, i: int) -> Row:
        ways = self.ways[i]
        return ways[0] if len(ways) == 1 else self.rng.choice(ways)

    def _move(self) -> bool:
        kind = self.rng.random()
        filled = FILL <= kind < FILL + EMPTY
        i = self._pick(~self.on if filled else self.on)
        if i < 0:
            return False
        if kind < FILL:
            self._set(i, False, self.row[i])
            return self._repair(i)
        if filled:
            self._set(i, True, self._way(i))
            self._prune(i)
        elif len(self.ways[i]) > 1 and self.rng.random() < 0.5:
            self._set(i, True, self._way(i))
        elif self.row[i][0] == SWAP:
            self._set(i, True, self._shifted(i))
        else:
            return False
        return self._repair(i)

    def _repair(self, moved: int) -> bool:
        """Empties gaps other than ``moved`` until the residency fits; False when it cannot."""
        while True:
            k = int(self.load.argmax())
            if self.load[k] <= self.limit:
                return True
            closed = self.candidates.absent[:, k] & ~self.on
            closed[moved] = False
            i = self._pick(closed)
            if i < 0:
                return False
            self._set(i, True, self._way(i))

    def _prune(self, emptied: int) -> None:
        """Tries to fill a few gaps other than ``emptied``."""
        for _ in range(PRUNE):
            i = self._pick(self.on)
            room = self.limit - self.nbytes[i]
            _, _, after, before, _ = self.row[i]
            if i != emptied and all(self.load[s].max(initial=0) <= room for s in spans(after, before, self.n)):
                self._set(i, False, self.row[i])

    def _shifted(self, i: int) -> Row:
        """The swap of gap i with another ``after`` or another ``prefetch``."""
        kind, tensor, after, before, _ = self.row[i]
        opens, shift = self.candidates.gaps[i].after, int(self.rng.expovariate(1 / SHIFT))
        if self.rng.random() < 0.5:
            after = (opens + min(shift, (before - opens - 2) % self.n)) % self.n
            return kind, tensor, after, before, -1
        if self.rng.random() < 0.5:
            return kind, tensor, after, before, -1
        return kind, tensor, after, before, (before - 1 - min(shift, (before - after - 1) % self.n)) % self.n
