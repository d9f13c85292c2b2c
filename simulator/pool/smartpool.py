"""SmartPool: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section III.

Offline dynamic storage allocation as weighted interval graph coloring: vertices are blocks weighted by bytes, edges
join blocks with overlapping lifetimes, and colors are addresses. Blocks are colored by decreasing size (section
III-C), each in a hole between its colored neighbors: best-fit (default) takes the smallest sufficient hole, first-fit
the lowest. O(n²) time, O(n) memory. Choices not specified in the paper, and one extension:

1. Blocks of equal size are taken in malloc order. 2. Best-fit takes the lowest of the smallest holes.
3. A block that fits no hole is placed on top of its highest neighbor, whether or not that extends the pool.
4. Lifetimes may be arcs of a circle (a tensor that crosses the iteration boundary); the paper's pool is a line.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals, Packing

FITS = ("best", "first")


def pack(intervals: Intervals, alignment: int = 1, fit: str = "best") -> Packing:
    """Packs ``intervals`` with SmartPool.

    Args:
        intervals: blocks on a circle or a line.
        alignment: bytes; sizes are rounded up to it, so that every offset is a multiple.
        fit: best or first.

    Returns:
        Offsets of the blocks and their footprint.

    Raises:
        ValueError: ``fit`` is unknown, or ``alignment`` is below 1.
    """
    if fit not in FITS:
        raise ValueError(f"fit: expected one of {', '.join(FITS)}, got {fit!r}")
    intervals = intervals.rounded(alignment)
    lower, upper, size = map(np.ascontiguousarray, (intervals.lower, intervals.upper, intervals.nbytes))
    order = np.lexsort((lower, -size))
    offsets = _color(lower, upper, size, order, intervals.period, fit == "best")  # compiled once for all layouts
    footprint = int((offsets + size).max(initial=0))
    # At run time a malloc looks its address up and a free does nothing (section V); the pool is a single cudaMalloc.
    return Packing(offsets, footprint, footprint == intervals.peak_bytes, steps=len(size) * len(size).bit_length())


@jit
def _color(lower, upper, size, order, period, best_fit):
    """Returns int64[n] offsets (section III-C); ``order``: int64[n], the blocks in order of placement."""
    n = len(order)
    offsets = np.empty(n, np.int64)
    # Placed blocks by ascending offset.
    table = np.empty((4, n), np.int64)
    begins = table[0]
    ends = table[1]
    lowers = table[2]
    uppers = table[3]
    neighbors = np.empty(n, np.int64)
    for placed in range(n):
        i = order[placed]
        a = lower[i]
        b = upper[i]
        nbytes = size[i]
        n_neighbors = 0
        for j in range(placed):  # branch-free, since the branch is unpredictable
            neighbors[n_neighbors] = j
            overlaps = (a < uppers[j]) & (lowers[j] < b) | (a + period < uppers[j]) | (lowers[j] + period < b)
            n_neighbors += overlaps
        # end of the neighbors so far; the hole to take
        top = np.int64(0)
        hole_at = np.int64(-1)
        hole = np.int64(0)
        for j in neighbors[:n_neighbors]:
            gap = begins[j] - top
            if gap >= nbytes and (hole_at < 0 or (best_fit and gap < hole)):
                hole_at = top
                hole = gap
                if not best_fit:
                    break
            top = max(top, ends[j])
        offset = top if hole_at < 0 else hole_at
        offsets[i] = offset
        position = np.searchsorted(begins[:placed], offset)
        for column, value in ((begins, offset), (ends, offset + nbytes), (lowers, a), (uppers, b)):
            for j in range(placed, position, -1):
                column[j] = column[j - 1]
            column[position] = value
    return offsets
