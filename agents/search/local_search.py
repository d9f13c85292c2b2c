"""Local search over plans, shared by simulated annealing, LP rounding and policy-guided search.

The moves are those of simulator/moves/. ``walk`` is the compiled loop; ``anneal`` draws the acceptance random numbers
and checks the clock.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NamedTuple

import numpy as np

from agents.planner import Rows
from simulator.compiled.encoding import NEVER
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.compiled.scoring import score_one
from simulator.moves.moves import Moves
from simulator.moves.plan_moves import propose

# The number of calls between clock checks is adapted, because a check leaves compiled code.
CLOCK = 8  # calls before the first check; doubled after less than TICK seconds, else halved
TICK = 2e-3
LATE = 1.0  # seconds: there are fewer than CLOCK calls only if those took longer

WalkState = np.dtype(
    [
        ("step", np.int64),  # next step
        ("scored", np.int64),  # plans simulated in compiled code
        ("now_ns", np.int64),  # time of the current plan
        ("best_ns", np.int64),  # time of the best plan
        ("rows", np.int64),  # rows of the last proposal
        ("best_rows", np.int64),  # rows of the best plan; -1: the start
        ("cutoff_ns", np.int64),  # proposals below it are accepted
        ("answer_ns", np.int64),  # time of the last proposal if the caller supplied it, else -1
    ]
)


def check_heat(hot: float, cold: float) -> None:
    """Raises ValueError unless 0 < cold <= hot."""
    if not 0 < cold <= hot:
        raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")


class Chains(ThreadPoolExecutor):
    """Threads for annealing, which ends at once if their context is left by an exception such as Ctrl-C or TimeUp.

    Attributes:
        stopped: for ``anneal``.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.stopped = Event()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Any:
        if error is not None:
            self.stopped.set()
        return super().__exit__(kind, error, trace)


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
def walk(rng, limit, gaps, now, new, scratch, engine, cooling, chances, best, states, enough_ns):
    """Executes steps of ``anneal``, at most one per entry of ``chances``, until a plan reaches ``enough_ns``.

    Args:
        rng, limit, gaps, now, new, scratch: as in ``Moves.arrays``.
        engine: ``Engine.direct``.
        cooling: schedule of the whole walk.
        chances: float64, uniform in [0, 1).
        best: output, rows of the best plan unless it is the start.
        states: WalkState[1], updated.
        enough_ns: iteration time in ns at which the walk ends.

    Returns:
        Whether the walk has ended (the best plan is good enough, or no move was found), whether it needs ``answer_ns``,
        and whether ``now`` and ``new`` are swapped.
    """
    state = states[0]
    swapped = False
    plan = scratch.plan
    for i in range(chances.shape[0]):
        if state.best_ns <= enough_ns:
            return True, False, swapped
        # With an answer the proposal and its cutoff exist already: random numbers must not be drawn twice.
        ns = state.answer_ns
        state.answer_ns = -1
        if ns < 0:
            count = propose(rng, limit, gaps, now, new, scratch, gaps.class_prob)
            if count < 0:
                return True, False, swapped
            progress = max(cooling.spent, state.step / cooling.calls) if cooling.calls else cooling.spent
            increase = -(cooling.hot_ns * cooling.fall**progress) * math.log(1.0 - chances[i])
            # Plans slower than the cutoff are rejected, so their simulation can stop there.
            cutoff = min(state.now_ns + math.ceil(increase), NEVER) if increase < NEVER else NEVER
            state.rows = count
            state.cutoff_ns = cutoff
            ns = score_one(engine, plan, count, cutoff)
            if ns < 0:  # only ``Engine.score`` can simulate it
                return False, True, swapped
            state.scored += 1
        state.step += 1
        if ns < state.cutoff_ns:  # accepted: ``now`` and ``new`` change places instead of being copied
            now, new = new, now
            swapped = not swapped
            state.now_ns = ns
            if ns < state.best_ns:
                state.best_ns = ns
                state.best_rows = state.rows
                for j in range(state.rows):
                    for c in range(plan.shape[1]):
                        best[j, c] = plan[j, c]
    return False, False, swapped


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
    stopped: Event | None = None,
) -> tuple[Rows, int]:
    """Runs simulated annealing with Metropolis acceptance and geometric cooling from ``hot`` to ``cold``.

    Args:
        start: rows of a feasible plan, and its iteration time.
        calls: simulator calls; None: limited only by time.
        hot, cold: temperatures, as fractions of the ideal time.
        enough_ns: stop at a plan that is at least this fast.
        deadline: time on time.monotonic(). The temperature follows the calls or the time, whichever gives the lower.
        stopped: ends the search at the next look at the clock once it is set.
        moves: neighbors of the plan.
        engine: the simulator.
        start_ns: iteration time of ``start``.
        seed: random seed.

    Returns:
        Rows and iteration time of the best plan.
    """
    ideal = max(engine.program.ideal_ns, 1)
    # No plan is faster than the ideal time.
    enough = max(enough_ns, engine.program.ideal_ns)
    random = np.random.default_rng(seed)
    moves.reset(start)
    best = np.empty_like(moves.rows)
    states = np.zeros(1, WalkState)
    states["now_ns"] = states["best_ns"] = start_ns
    states["best_rows"] = states["answer_ns"] = -1
    state = states[0]
    start_time = now = time.monotonic()
    spent = 0.0
    count = CLOCK // 2
    has_ended = False
    while not (has_ended or (stopped is not None and stopped.is_set())) and (calls is None or state["step"] < calls):
        last = now
        now = time.monotonic()
        count = 2 * count if now - last < TICK else max(count // 2, 1 if now - last > LATE else CLOCK)
        if deadline is not None:
            spent = (now - start_time) / max(deadline - start_time, 1e-9)
            if spent >= 1:
                break
        begin = int(state["step"])
        chances = random.random(count if calls is None else min(count, calls - begin))
        cooling = Cooling(ideal * hot, cold / hot, spent, calls or 0)
        needs_answer = True
        while needs_answer:
            draws = chances[state["step"] - begin :]
            has_ended, needs_answer, swapped = walk(
                *moves.arrays, engine.direct(len(best)), cooling, draws, best, states, enough
            )
            if swapped:
                moves.accept()
            if needs_answer:
                rows = moves.proposed(state["rows"])
                state["answer_ns"] = engine.score(rows, None, int(state["cutoff_ns"])).iteration_ns
    engine.calls += int(state["scored"])
    return start if state["best_rows"] < 0 else best[: state["best_rows"]], int(state["best_ns"])
