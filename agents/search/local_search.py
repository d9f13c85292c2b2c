"""Local search over plans, of simulated annealing, LP rounding and the policy's search.

The moves are those of simulator/moves/. ``walk`` is the compiled loop; ``anneal`` draws the random numbers that decide
on acceptance, and looks at the clock.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from agents.planner import Rows
from simulator.compiled.encoding import NEVER
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.compiled.scoring import score_one
from simulator.moves.moves import Moves
from simulator.moves.plan_moves import propose

CLOCK = 8  # calls to the first look at the clock; twice as many to the next while they take less than TICK, or half
TICK, LATE = 2e-3, 1.0  # seconds; only where CLOCK calls take longer than LATE, fewer of them
# Entries of the ``state`` of a walk. STEP: the next one. SCORED: plans. NOW_NS, BEST_NS: of the present plan and of the
# best. ROWS: of the plan that was proposed last, BEST_ROWS: -1 where the best is still the start. CUTOFF_NS: faster
# plans are accepted. ANSWER_NS: of the plan that was proposed last, where it was asked for; else -1.
STEP, SCORED, NOW_NS, BEST_NS, ROWS, BEST_ROWS, CUTOFF_NS, ANSWER_NS, STATE = range(9)
# Why it came back. ENDS: the best plan is good enough, or no move was found. ASKS: for ANSWER_NS.
DONE, ENDS, ASKS = range(3)


def check_heat(hot: float, cold: float) -> None:
    """Are these the temperatures of a search? Raises ValueError where they are not."""
    if not 0 < cold <= hot:
        raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")


class Cooling(NamedTuple):
    """hot_ns, fall: the first temperature, and what it falls to, as a part of it; spent: the part of the time that has
    passed; calls: simulator calls of the whole walk, 0: any."""

    hot_ns: float
    fall: float
    spent: float
    calls: int


@stage(entry=True)
def walk(  # type: ignore[no-untyped-def]
    rng, limit, gaps, now, new, scratch, engine, cooling, chances, best, state, enough_ns
):
    """Steps of ``anneal``, at most one for each of ``chances``, and none with a plan of ``enough_ns``.

    Args:
        rng to scratch: as for ``propose``.
        engine: ``Engine.direct``.
        chances: float64, uniform in [0, 1).
        best: the rows of the best plan, where it is not the start.
        state: int64[STATE], see above.

    Returns:
        Why it came back; whether the present plan is now ``new``, and the new one ``now``.
    """
    moved, plan = False, scratch.plan
    for i in range(chances.shape[0]):
        if state[BEST_NS] <= enough_ns:
            return ENDS, moved
        ns = state[ANSWER_NS]
        state[ANSWER_NS] = -1
        if ns < 0:
            count = propose(rng, limit, gaps, now, new, scratch)
            if count < 0:
                return ENDS, moved
            done = max(cooling.spent, state[STEP] / cooling.calls) if cooling.calls else cooling.spent
            more = -(cooling.hot_ns * cooling.fall**done) * math.log(1.0 - chances[i])
            # A slower plan is not accepted, so that it need not be simulated to its end.
            cutoff = min(state[NOW_NS] + math.ceil(more), NEVER) if more < NEVER else NEVER
            state[ROWS], state[CUTOFF_NS] = count, cutoff
            ns = score_one(*engine, plan, count, cutoff)
            if ns < 0:
                return ASKS, moved
            state[SCORED] += 1
        state[STEP] += 1
        if ns < state[CUTOFF_NS]:
            now, new = new, now
            moved = not moved
            state[NOW_NS] = ns
            if ns < state[BEST_NS]:
                state[BEST_NS], state[BEST_ROWS] = ns, state[ROWS]
                for j in range(state[ROWS]):
                    for c in range(plan.shape[1]):
                        best[j, c] = plan[j, c]
    return DONE, moved


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
        few = 2 * few if now - then < TICK else max(few // 2, 1 if now - then > LATE else CLOCK)
        if until is not None:
            spent = (now - begin) / max(until - begin, 1e-9)
            if spent >= 1:
                break
        first = state[STEP]
        chances = random.random(few if calls is None else min(few, calls - int(first)))
        cooling = Cooling(ideal * hot, cold / hot, spent, calls or 0)
        while True:
            left = chances[state[STEP] - first :]
            why, moved = walk(*moves.arrays, engine.direct(len(best)), cooling, left, best, state, enough)
            if moved:
                moves.accept()
            if why != ASKS:
                break
            rows = moves.proposed(state[ROWS])
            state[ANSWER_NS] = engine.score(rows, None, int(state[CUTOFF_NS])).iteration_ns
    engine.calls += int(state[SCORED])
    return start if state[BEST_ROWS] < 0 else best[: state[BEST_ROWS]], int(state[BEST_NS])
