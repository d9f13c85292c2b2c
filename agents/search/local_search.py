"""Local search over plans, shared by simulated annealing, LP rounding and policy-guided search.

The moves are those of simulator/moves/. ``walk`` is the compiled loop; ``anneal`` draws the acceptance random numbers
and checks the clock.
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

CLOCK = 8  # calls before the first clock check; then doubled if they took less than TICK, else halved
# seconds; fewer than CLOCK calls only if those take longer than LATE
TICK = 2e-3
LATE = 1.0
# Entries of ``state``. STEP: next step. SCORED: simulated plans. NOW_NS, BEST_NS: times of the current and best plan.
# ROWS: rows of the last proposal; BEST_ROWS: rows of the best plan, -1 if it is the start. CUTOFF_NS: proposals below
# it are accepted. ANSWER_NS: time of the last proposal if the caller supplied it, else -1.
STEP, SCORED, NOW_NS, BEST_NS, ROWS, BEST_ROWS, CUTOFF_NS, ANSWER_NS, STATE = range(9)
# Reasons for returning. END: the best plan is good enough, or no move was found. ASK: ANSWER_NS is needed.
DONE, END, ASK = range(3)


def check_heat(hot: float, cold: float) -> None:
    """Raises ValueError unless 0 < cold <= hot."""
    if not 0 < cold <= hot:
        raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")


class Cooling(NamedTuple):
    """Cooling schedule of a walk.

    Attributes:
        hot_ns: initial temperature.
        fall: final temperature as a fraction of the initial one.
        spent: elapsed fraction of the time budget.
        calls: simulator calls of the whole walk, 0: unlimited.
    """

    hot_ns: float
    fall: float
    spent: float
    calls: int


@stage(entry=True)
def walk(rng, limit, gaps, now, new, scratch, engine, cooling, chances, best, state, enough_ns):
    """Executes steps of ``anneal``, at most one per entry of ``chances``, until a plan reaches ``enough_ns``.

    Args:
        rng, limit, gaps, now, new, scratch: as in ``propose``.
        engine: ``Engine.direct``.
        cooling: schedule of the whole walk.
        chances: float64, uniform in [0, 1).
        best: output, rows of the best plan unless it is the start.
        state: int64[STATE], updated (entries: above).
        enough_ns: iteration time in ns at which the walk ends.

    Returns:
        The reason for returning, and whether ``now`` and ``new`` are swapped.
    """
    swapped = False
    plan = scratch.plan
    for i in range(chances.shape[0]):
        if state[BEST_NS] <= enough_ns:
            return END, swapped
        ns = state[ANSWER_NS]
        state[ANSWER_NS] = -1
        if ns < 0:
            count = propose(rng, limit, gaps, now, new, scratch)
            if count < 0:
                return END, swapped
            progress = max(cooling.spent, state[STEP] / cooling.calls) if cooling.calls else cooling.spent
            increase = -(cooling.hot_ns * cooling.fall**progress) * math.log(1.0 - chances[i])
            # Plans slower than the cutoff are rejected, so their simulation can stop there.
            cutoff = min(state[NOW_NS] + math.ceil(increase), NEVER) if increase < NEVER else NEVER
            state[ROWS] = count
            state[CUTOFF_NS] = cutoff
            ns = score_one(engine, plan, count, cutoff)
            if ns < 0:
                return ASK, swapped
            state[SCORED] += 1
        state[STEP] += 1
        if ns < state[CUTOFF_NS]:
            now, new = new, now
            swapped = not swapped
            state[NOW_NS] = ns
            if ns < state[BEST_NS]:
                state[BEST_NS], state[BEST_ROWS] = ns, state[ROWS]
                for j in range(state[ROWS]):
                    for c in range(plan.shape[1]):
                        best[j, c] = plan[j, c]
    return DONE, swapped


def anneal(
    moves: Moves,
    engine: Engine,
    start: Rows,
    start_ns: int,
    calls: int | None,
    hot: float,
    cold: float,
    seed: int,
    enough_ns: int = 0,
    deadline: float | None = None,
) -> tuple[Rows, int]:
    """Runs simulated annealing with Metropolis acceptance and geometric cooling from ``hot`` to ``cold``.

    Args:
        start: rows of a feasible plan, and its iteration time.
        calls: simulator calls; None: limited only by time.
        hot, cold: temperatures, as fractions of the ideal time.
        enough_ns: stop at a plan that is at least this fast.
        deadline: time on time.monotonic(). The temperature follows the calls or the time, whichever gives the lower.

    Returns:
        Rows and iteration time of the best plan.
    """
    ideal = max(engine.program.ideal_ns, 1)
    enough = max(enough_ns, engine.program.ideal_ns)
    random = np.random.default_rng(seed)
    moves.reset(start)
    best = np.empty_like(moves.rows)
    state = np.zeros(STATE, dtype=np.int64)
    state[[NOW_NS, BEST_NS]] = start_ns
    state[[BEST_ROWS, ANSWER_NS]] = -1
    start_time = now = time.monotonic()
    spent = 0.0
    count = CLOCK // 2
    code = DONE
    while code == DONE and (calls is None or state[STEP] < calls):
        last = now
        now = time.monotonic()
        count = 2 * count if now - last < TICK else max(count // 2, 1 if now - last > LATE else CLOCK)
        if deadline is not None:
            spent = (now - start_time) / max(deadline - start_time, 1e-9)
            if spent >= 1:
                break
        begin = state[STEP]
        chances = random.random(count if calls is None else min(count, calls - int(begin)))
        cooling = Cooling(ideal * hot, cold / hot, spent, calls or 0)
        while True:
            draws = chances[state[STEP] - begin :]
            code, swapped = walk(*moves.arrays, engine.direct(len(best)), cooling, draws, best, state, enough)
            if swapped:
                moves.accept()
            if code != ASK:
                break
            rows = moves.proposed(state[ROWS])
            state[ANSWER_NS] = engine.score(rows, None, int(state[CUTOFF_NS])).iteration_ns
    engine.calls += int(state[SCORED])
    return start if state[BEST_ROWS] < 0 else best[: state[BEST_ROWS]], int(state[BEST_NS])
