"""Common parts of online allocators: mallocs and frees in time order, and a free list."""

from __future__ import annotations

import numpy as np

from simulator.compiled.encoding import NEVER, Ints
from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals

BEGIN, END, HEAD = range(3)  # rows of a free list: int64[3, capacity], pieces by ascending address


def events(intervals: Intervals) -> Ints:
    """Returns mallocs (i) and frees (~i) of n blocks in time order, int64[2n].

    At one instant frees precede mallocs, both in block order. Empty blocks are omitted, since an allocator returns a
    null pointer for them.

    Raises:
        ValueError: time repeats.
    """
    if intervals.period != NEVER:
        raise ValueError("online allocators need blocks on a line: unroll the circle first")
    blocks = np.flatnonzero(intervals.nbytes)
    times = np.concatenate((intervals.upper[blocks], intervals.lower[blocks]))
    return np.concatenate((~blocks, blocks))[np.argsort(times, kind="stable")]


@jit
def insert(free, m, at, begin, end, head):
    """Inserts [begin, end) at index ``at`` of m pieces; ``head``: a cudaMalloc begins there. Returns the new m."""
    for j in range(m, at, -1):
        for row in range(3):
            free[row, j] = free[row, j - 1]
    free[BEGIN, at] = begin
    free[END, at] = end
    free[HEAD, at] = head
    return m + 1


@jit
def remove(free, m, at):
    """Removes the piece at index ``at`` of m; returns the new m."""
    for j in range(at, m - 1):
        for row in range(3):
            free[row, j] = free[row, j + 1]
    return m - 1


@jit
def take(free, m, at, nbytes):
    """Cuts the first bytes off the piece at index ``at`` of m, or removes it entirely; returns the new m."""
    free[BEGIN, at] += nbytes
    free[HEAD, at] = 0
    return remove(free, m, at) if free[BEGIN, at] == free[END, at] else m


@jit
def give_back(free, m, at, begin, end, head):
    """Inserts [begin, end) into m pieces, ``at`` of which lie below, and merges; returns the new m.

    Neighbors merge unless a cudaMalloc begins between them.
    """
    if at < m and free[BEGIN, at] == end and not free[HEAD, at]:
        end = free[END, at]
        m = remove(free, m, at)
    if at > 0 and free[END, at - 1] == begin and not head:
        free[END, at - 1] = end
        return m
    return insert(free, m, at, begin, end, head)
