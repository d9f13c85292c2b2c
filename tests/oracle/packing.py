"""Slow reference validator of addresses."""

from __future__ import annotations

from simulator.compiled.encoding import Ints
from simulator.pool.intervals import Intervals


def overlaps(intervals: Intervals, offsets: Ints) -> list[tuple[int, int]]:
    """Returns every pair of blocks (i < j) that share a byte while both are held; [] for a valid packing. O(n²)."""
    period = intervals.period
    blocks = []
    for lower, upper, nbytes, offset in zip(
        intervals.lower.tolist(), intervals.upper.tolist(), intervals.nbytes.tolist(), offsets.tolist(), strict=True
    ):
        # Time beyond the period wraps to the start of the circle.
        times = [(lower, min(upper, period)), (0, max(upper - period, 0))]
        blocks.append((times, offset, offset + nbytes))
    return [
        (i, j)
        for j, (times, begin, end) in enumerate(blocks)
        for i, (others, first, last) in enumerate(blocks[:j])
        if max(begin, first) < min(end, last) and any(max(a, c) < min(b, d) for a, b in times for c, d in others)
    ]
