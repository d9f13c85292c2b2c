"""Detects repeating iterations (rule 10): compares states at boundaries."""

from __future__ import annotations

from simulator.compiled.encoding import AT_START, LASTED, LEAD, LEAD_NS
from simulator.compiled.heap import OUTSIDE
from simulator.compiled.jit import stage


@stage
def note_state(state, m, lasts, child, queue, head, tail):
    """Writes the status of each row into ``state``: 1 on the host, 2 and more in the queue, 0 neither.

    The event loop adds the remaining time of copies in flight as negative values, and the last columns (encoding.LEAD).
    """
    for r in range(m):
        state[r] = child[r] != OUTSIDE
    state[m + LEAD], state[m + LEAD_NS], state[m + AT_START], state[m + LASTED] = 0, 0, 0, lasts
    for j in range(head, tail):
        state[queue[j]] = 2 + j - head


@stage
def alike(one, two, columns):
    """Returns whether the first ``columns`` of two states are equal."""
    c = 0
    while c < columns and one[c] == two[c]:
        c += 1
    return c == columns


@stage
def period_of(states, i, m):
    """Returns rules._period after iteration i. The last column of ``states`` is the duration of the iteration."""
    slowest, period, j = 0, 0, i - 1
    while j >= 0:
        slowest = max(slowest, states[j + 1, m + LASTED])
        if alike(states[i], states[j], m + LASTED):
            period = i - j if states[i, m + LASTED] == slowest else 0
            j = 0
        j -= 1
    return period
