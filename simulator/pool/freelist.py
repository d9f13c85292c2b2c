"""What online allocators share: mallocs and frees in the order of time, and a list of free memory."""

from __future__ import annotations

import numpy as np

from simulator.compiled.encoding import NEVER, Ints
from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals

BEGIN, END, HEAD = range(3)  # rows of a free list: int64[3, capacity], pieces by ascending address


def events(intervals: Intervals) -> Ints:
    """Mallocs (i) and frees (~i) of n blocks in the order of time, int64[2n].

    At one instant frees come before mallocs, both in the order of the blocks. Blocks of no bytes are left out: an
    allocator answers them with a null pointer.

    Raises:
        ValueError: time repeats.
    """
    if intervals.period != NEVER:
        raise ValueError("an online allocator does not know that time repeats: unroll the circle")
    blocks = np.flatnonzero(intervals.nbytes)
    times = np.concatenate((intervals.upper[blocks], intervals.lower[blocks]))
    return np.concatenate((~blocks, blocks))[np.argsort(times, kind="stable")]


@jit
def insert(free, m, at, begin, end, head):  # type: ignore[no-untyped-def]
    """Puts [begin, end) at index ``at`` of m pieces; ``head``: a cudaMalloc begins there. Returns the new m."""
    for j in range(m, at, -1):
        for row in range(3):
            free[row, j] = free[row, j - 1]
    free[BEGIN, at], free[END, at], free[HEAD, at] = begin, end, head
    return m + 1


@jit
def remove(free, m, at):  # type: ignore[no-untyped-def]
    """Takes the piece at index ``at`` out of m. Returns the new m."""
    for j in range(at, m - 1):
        for row in range(3):
            free[row, j] = free[row, j + 1]
    return m - 1


@jit
def take(free, m, at, nbytes):  # type: ignore[no-untyped-def]
    """Cuts the first bytes off the piece at index ``at`` of m, or takes all of it. Returns the new m."""
    free[BEGIN, at] += nbytes
    free[HEAD, at] = 0
    return remove(free, m, at) if free[BEGIN, at] == free[END, at] else m


@jit
def give_back(free, m, at, begin, end, head):  # type: ignore[no-untyped-def]
    """Puts [begin, end) among m pieces, ``at`` of which lie below, and merges. Returns the new m.

    Neighbours become one piece unless a cudaMalloc begins between them.
    """
    if at < m and free[BEGIN, at] == end and not free[HEAD, at]:
        end = free[END, at]
        m = remove(free, m, at)
    if at > 0 and free[END, at - 1] == begin and not head:
        free[END, at - 1] = end
        return m
    return insert(free, m, at, begin, end, head)
