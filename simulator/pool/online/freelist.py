"""Common parts of online allocators: mallocs and frees in time order, and a free list."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.compiled.encoding import NEVER, Ints
from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals


class FreeList(NamedTuple):
    """Free pieces by ascending address; a count outside says how many there are."""

    begin: Ints  # [capacity]
    end: Ints  # [capacity]
    is_head: Ints  # [capacity], 1 if a cudaMalloc begins there


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
def free_list(capacity):
    """Returns an empty free list."""
    return FreeList(np.empty(capacity, np.int64), np.empty(capacity, np.int64), np.empty(capacity, np.int64))


@jit
def insert(free, m, at, begin, end, is_head):
    """Inserts [begin, end) at index ``at`` of m pieces; ``is_head``: a cudaMalloc begins there. Returns the new m."""
    for j in range(m, at, -1):
        for column in free:
            column[j] = column[j - 1]
    free.begin[at] = begin
    free.end[at] = end
    free.is_head[at] = is_head
    return m + 1


@jit
def remove(free, m, at):
    """Removes the piece at index ``at`` of m; returns the new m."""
    for j in range(at, m - 1):
        for column in free:
            column[j] = column[j + 1]
    return m - 1


@jit
def take(free, m, at, nbytes):
    """Cuts the first bytes off the piece at index ``at`` of m, or removes it entirely; returns the new m."""
    free.begin[at] += nbytes
    free.is_head[at] = 0
    return remove(free, m, at) if free.begin[at] == free.end[at] else m


@jit
def give_back(free, m, at, begin, end, is_head):
    """Inserts [begin, end) into m pieces, ``at`` of which lie below, and merges; returns the new m.

    Neighbors merge unless a cudaMalloc begins between them.
    """
    if at < m and free.begin[at] == end and not free.is_head[at]:
        end = free.end[at]
        m = remove(free, m, at)
    if at > 0 and free.end[at - 1] == begin and not is_head:
        free.end[at - 1] = end
        return m
    return insert(free, m, at, begin, end, is_head)
