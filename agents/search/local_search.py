"""Local search over plans, of simulated annealing, LP rounding and the DQN's refinement.

The moves and what a state is: local_moves.py, where the loop itself is compiled, too. ``anneal`` draws the random
numbers that decide on acceptance, and looks at the clock.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.planner import Candidates, Rows, rows_for
from simulator.compiled.encoding import BEFORE, TENSOR
from simulator.compiled.engine import Engine
from simulator.program import Gap, Program
from simulator.ways import KEPT, RECOMPUTED, SWAPPED, ways_to_empty

# isort: off
from agents.search.local_moves import (
    ANSWER_NS, ASKS, BEST_NS, BEST_ROWS, CUTOFF_NS, DONE, NOW_NS, PRUNE, ROWS, SCORED, STATE, STEP, one_move, put,
    walk,
)  # fmt: skip
# isort: on

CLOCK = 8  # calls between two looks at the clock; more while these take less than TICK
TICK = 2e-3  # seconds

Floats = NDArray[np.float64]


class Moves:
    """The candidate gaps of a program, the present plan of the search, and the one that it tries.

    Args:
        weights: float64[m, 4], how likely each way (SWAPPED, RECOMPUTED, KEPT) of each of the m gaps of
            ``program.gaps(min_bytes)`` is picked; None: all alike.

    Attributes:
        gaps: those that can be emptied in at least one way.
        rows: int64[len(gaps), 6], a row per gap, whether it is in use or not.
        weights: float64[len(gaps), 4], as above; may be changed.
        on: bool[len(gaps)], gaps that the plan empties.
        load: int64[n], planned residency per kernel.
        limit: bytes, which the residency of a proposed plan keeps within; may be changed.
    """

    def __init__(
        self, program: Program, limit: int, mode: str, min_bytes: int, seed: int, weights: Floats | None = None
    ) -> None:
        gaps = program.gaps(min_bytes)
        ways = [ways_to_empty(program, gap, mode) for gap in gaps]
        kept = [i for i, w in enumerate(ways) if w]
        self.gaps = [gaps[i] for i in kept]
        candidates = Candidates(program, self.gaps)
        self.index = {(g.tensor, g.before): i for i, g in enumerate(self.gaps)}
        self._live_bytes, self._nbytes = candidates.live_bytes, candidates.nbytes
        self._ways = np.zeros((len(kept), KEPT + 1, 6), dtype=np.int64)  # the row of each way
        self.weights = np.zeros((len(kept), KEPT + 1))
        for way in (SWAPPED, RECOMPUTED, KEPT):
            have = [i for i, j in enumerate(kept) if way in ways[j]]
            self._ways[have, way] = rows_for([self.gaps[i] for i in have], way)
            self.weights[have, way] = 1.0 if weights is None else weights[[kept[i] for i in have], way]
        self._after = np.array([g.after for g in self.gaps], dtype=np.int64)
        self._since = np.array([since_write(program, g) for g in self.gaps], dtype=np.int64)
        self._earlier = _earlier(program, self.gaps)
        self.limit = limit
        self._own(seed)

    def _own(self, seed: int) -> None:
        """What no two searches share."""
        self._rng = np.random.default_rng(seed).integers(1, 2**63, 1, dtype=np.uint64)
        self.rows, self.on, self.load = self._empty()
        self._tried = self._empty()
        self._differ = np.full(len(self.gaps) + 2 * PRUNE + 8, -1, dtype=np.int64)  # see local_moves.py
        self._plan, self._row = np.empty_like(self.rows), np.empty(6, dtype=np.int64)

    def _empty(self) -> tuple[Rows, NDArray[np.bool_], NDArray[np.int64]]:
        first = self.weights.argmax(1)
        return self._ways[np.arange(len(first)), first], np.zeros(len(first), dtype=np.bool_), self._live_bytes.copy()

    def fork(self, seed: int) -> Moves:
        """Moves of the same gaps, with a plan and random numbers of their own; the weights are shared."""
        out = copy.copy(self)
        out._own(seed)
        return out

    def reset(self, rows: Rows) -> None:
        """Makes this the plan of ``rows`` (int64[k, 6]), of gaps that are candidates."""
        self.rows, self.on, self.load = self._empty()
        for row in rows:
            i = self.index[int(row[TENSOR]), int(row[BEFORE])]
            put(self.rows, self.on, self.load, self._nbytes, self._differ, i, True, np.asarray(row, np.int64))
        self._differ[0] = -1

    def plan(self) -> Rows:
        """int64[k, 6]: the rows in use, a copy."""
        return self.rows[self.on]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What ``propose`` works on: its arguments."""
        return (self._rng, self.limit, self._nbytes, self._ways, self.weights, self._after, self._since, self._earlier,
                self.rows, self.on, self.load, *self._tried, self._differ, self._row, self._plan)  # fmt: skip

    def propose(self) -> Rows | None:
        """int64[k, 6]: a neighbouring plan whose residency fits, a copy; None when ``TRIES`` moves in a row did not."""
        rows = one_move(*self.arrays)
        return self.proposed(rows).copy() if rows >= 0 else None

    def proposed(self, rows: int) -> Rows:
        """int64[rows, 6]: the plan that was proposed last, of so many rows; to be read before the next."""
        return self._plan[:rows]

    @property
    def proposed_load(self) -> NDArray[np.int64]:
        """int64[n]: planned residency per kernel of the plan that was proposed last."""
        return self._tried[2]

    def accept(self) -> None:
        """Goes to the plan that was proposed last."""
        self._tried, (self.rows, self.on, self.load) = (self.rows, self.on, self.load), self._tried


def since_write(program: Program, gap: Gap) -> int:
    """Kernels from the last write of the content that a gap empties to the gap, and not over its own end."""
    n, t = len(program.kernels), gap.tensor
    back = [(gap.after - w) % n for w in program.writes[t] if w <= gap.after or program.tensors[t].persistent]
    return min([*back, (gap.after - gap.before) % n])


def _earlier(program: Program, gaps: list[Gap]) -> NDArray[np.int64]:
    """int64[gaps]: the gap of the same tensor before each, of the iteration before where it lives that long; or -1."""
    out = np.full(len(gaps), -1, dtype=np.int64)
    of: dict[int, list[int]] = {}
    for i in sorted(range(len(gaps)), key=lambda i: gaps[i].after):
        of.setdefault(gaps[i].tensor, []).append(i)
    for t, mine in of.items():
        for i, j in zip(mine, mine[-1:] + mine, strict=False):
            if i != mine[0] or program.tensors[t].persistent:
                out[i] = j
    return out


def check_heat(hot: float, cold: float) -> None:
    """Are these the temperatures of a search? Raises ValueError where they are not."""
    if not 0 < cold <= hot:
        raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")


def anneal(
    moves: Moves, engine: Engine, start: Rows, start_ns: int, calls: int | None, hot: float, cold: float, seed: int,
    enough_ns: int = 0, until: float | None = None,
) -> tuple[Rows, int]:  # fmt: skip
    """Metropolis acceptance, the temperature falling geometrically from ``hot`` to ``cold``.

    Args:
        start: rows of a plan that fits, and its iteration time.
        calls: simulator calls; None: as many as there is time for.
        hot, cold: temperatures, as fractions of the ideal time.
        enough_ns: stop at a plan that is at least this fast.
        until: time.monotonic() at which to stop. The temperature is that of the calls or of the time, the lower one.

    Returns:
        rows and iteration time of the best plan.
    """
    ideal, enough = max(engine.program.ideal_ns, 1), max(enough_ns, engine.program.ideal_ns)
    random = np.random.default_rng(seed)
    moves.reset(start)
    best, state = np.empty_like(moves.rows), np.zeros(STATE, dtype=np.int64)
    state[[NOW_NS, BEST_NS]], state[[BEST_ROWS, ANSWER_NS]] = start_ns, -1
    begin = now = time.monotonic()
    spent, few, why = 0.0, CLOCK // 2, DONE
    while why == DONE and (calls is None or state[STEP] < calls):
        then, now = now, time.monotonic()
        few = 2 * few if now - then < TICK else max(few // 2, CLOCK)
        if until is not None:
            spent = (now - begin) / max(until - begin, 1e-9)
            if spent >= 1:
                break
        first = state[STEP]
        chances = random.random(few if calls is None else min(few, calls - int(first)))
        while True:
            why, moved = walk(
                *moves.arrays, *engine.direct(len(best)), chances[state[STEP] - first :], best, state, enough,
                calls or 0, spent, ideal * hot, cold / hot,
            )  # fmt: skip
            if moved:
                moves.accept()
            if why != ASKS:
                break
            rows = moves.proposed(state[ROWS])
            state[ANSWER_NS] = engine.score(rows, None, int(state[CUTOFF_NS])).iteration_ns
    engine.calls += int(state[SCORED])
    return start if state[BEST_ROWS] < 0 else best[: state[BEST_ROWS]], int(state[BEST_NS])
