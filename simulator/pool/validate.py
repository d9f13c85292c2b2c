"""Address checker for tens of thousands of blocks."""

from __future__ import annotations

from bisect import bisect, insort

from simulator.compiled.encoding import Ints
from simulator.pool.intervals import Intervals


def overlap(intervals: Intervals, offsets: Ints) -> tuple[int, int] | None:
    """Returns a pair of blocks (i < j) that share a byte while both are live, or None; O(n log n) comparisons.

    Sweeps over time with live blocks sorted by address. As long as no two of them overlap, a new block that overlaps
    any of them overlaps one of its two neighbors.
    """
    lower, upper, offset = intervals.lower.tolist(), intervals.upper.tolist(), offsets.tolist()
    ends = (offsets + intervals.nbytes).tolist()
    events: list[tuple[int, int, int]] = []  # time, 0 for a free or 1 for a malloc, block
    for i in (i for i in range(len(intervals)) if offset[i] < ends[i]):  # empty blocks cannot overlap
        events += [(lower[i], 1, i), (min(upper[i], intervals.period), 0, i)]
        if upper[i] > intervals.period:  # the part beyond the period wraps to the start of the circle
            events += [(0, 1, i), (upper[i] - intervals.period, 0, i)]
    held: list[tuple[int, int]] = []  # (offset, block), ascending
    for _, malloc, i in sorted(events):
        block = (offset[i], i)
        if not malloc:
            del held[bisect(held, block) - 1]
            continue
        at = bisect(held, block)
        for _, j in held[max(at - 1, 0) : at + 1]:
            if max(offset[i], offset[j]) < min(ends[i], ends[j]):
                return min(i, j), max(i, j)
        insort(held, block)
    return None
