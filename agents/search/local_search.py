"""Local search over plans, of simulated annealing, LP rounding and the policy's search.

The moves are those of simulator/moves/, the compiled loop is anneal_loop.py. ``anneal`` draws the random numbers that
decide on acceptance, and looks at the clock.
"""

from __future__ import annotations

import time

import numpy as np

from agents.planner import Rows
from agents.search import anneal_loop as of
from simulator.compiled.engine import Engine
from simulator.moves.moves import Moves

CLOCK = 8  # calls to the first look at the clock; twice as many to the next while they take less than TICK, or half
TICK, LATE = 2e-3, 1.0  # seconds; only where CLOCK calls take longer than LATE, fewer of them


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
    best, state = np.empty_like(moves.rows), np.zeros(of.STATE, dtype=np.int64)
    state[[of.NOW_NS, of.BEST_NS]], state[[of.BEST_ROWS, of.ANSWER_NS]] = start_ns, -1
    begin = now = time.monotonic()
    spent, few, why = 0.0, CLOCK // 2, of.DONE
    while why == of.DONE and (calls is None or state[of.STEP] < calls):
        then, now = now, time.monotonic()
        few = 2 * few if now - then < TICK else max(few // 2, 1 if now - then > LATE else CLOCK)
        if until is not None:
            spent = (now - begin) / max(until - begin, 1e-9)
            if spent >= 1:
                break
        first = state[of.STEP]
        chances = random.random(few if calls is None else min(few, calls - int(first)))
        cooling = of.Cooling(ideal * hot, cold / hot, spent, calls or 0)
        while True:
            left = chances[state[of.STEP] - first :]
            why, moved = of.walk(*moves.arrays, engine.direct(len(best)), cooling, left, best, state, enough)
            if moved:
                moves.accept()
            if why != of.ASKS:
                break
            rows = moves.proposed(state[of.ROWS])
            state[of.ANSWER_NS] = engine.score(rows, None, int(state[of.CUTOFF_NS])).iteration_ns
    engine.calls += int(state[of.SCORED])
    return start if state[of.BEST_ROWS] < 0 else best[: state[of.BEST_ROWS]], int(state[of.BEST_NS])
