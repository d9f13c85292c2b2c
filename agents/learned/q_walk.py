"""Walks that follow Q-values, compiled: the choice of the action and the environment in one loop."""

from __future__ import annotations

from envs.columns import NOT_PENDING, PENDING
from envs.compiled_walk import step_walks
from simulator.compiled.jit import stage

LEAST = -1e30


@stage(entry=True)
def play(begin, end, resume, code, values, given, state, work, shown, batch, trace, lengths):  # type: ignore[no-untyped-def]
    """Walks ``begin`` to ``end`` - 1, which have begun, to their ends: each step takes the valid action of the highest
    value, the first of those that are equal.

    Args:
        resume: the first of them was PENDING.
        code: (A,) what the environment calls each action. values: (walks, A).
        given, state, work, shown: as ``step_walks`` takes them. batch: its actions (walks,), ``nobody`` and ``drawn``.
        trace: (walks, steps) the actions that are taken. lengths: (walks,) how many.

    Returns:
        The walk that is PENDING, or -1.
    """
    terminated, mask = shown[1], shown[5]
    actions, nobody, drawn = batch
    for i in range(begin, end):
        going = True
        while going:
            if not resume:
                best, taken = LEAST, 0
                for a in range(code.size):
                    if mask[i, code[a]] != 0 and values[i, a] > best:
                        best, taken = values[i, a], a
                trace[i, lengths[i]] = taken
                lengths[i] += 1
                actions[i] = code[taken]
            step_walks(i, i + 1, resume, nobody, actions, drawn, given, state, work, shown)
            resume = False
            if state[0][i, PENDING] != NOT_PENDING:
                return i
            going = not terminated[i]
    return -1
