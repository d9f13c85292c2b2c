"""The compiled loop of simulated annealing over the moves of simulator/moves/plan_moves.py."""

from __future__ import annotations

import math
from typing import NamedTuple

from simulator.compiled.encoding import NEVER
from simulator.compiled.jit import stage
from simulator.compiled.scoring import score_one
from simulator.moves.plan_moves import propose

# Entries of the ``state`` of a walk. STEP: the next one. SCORED: plans. NOW_NS, BEST_NS: of the present plan and of the
# best. ROWS: of the plan that was proposed last, BEST_ROWS: -1 where the best is still the start. CUTOFF_NS: faster
# plans are accepted. ANSWER_NS: of the plan that was proposed last, where it was asked for; else -1.
STEP, SCORED, NOW_NS, BEST_NS, ROWS, BEST_ROWS, CUTOFF_NS, ANSWER_NS, STATE = range(9)
# Why it came back. ENDS: the best plan is good enough, or no move was found. ASKS: for ANSWER_NS.
DONE, ENDS, ASKS = range(3)


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
):  # fmt: skip
    """Steps of ``local_search.anneal``, at most one for each of ``chances``, and none with a plan of ``enough_ns``.

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
