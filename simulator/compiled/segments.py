"""Segments of kernels, which answer rule 5 quickly: does a swap-in fit until its use?

A segment is a range of kernels between two consecutive ends of gaps (README.md). Maxima of groups of segments or
kernels are stored, so that a query takes a few steps instead of one per kernel.
"""

from __future__ import annotations

from simulator.compiled.encoding import (
    EXPECTED,
    FIRST_OF,
    HIGHEST,
    KERNEL_ADDED,
    KERNEL_TOPS,
    NEVER,
    SEGMENT,
    SEGMENT_ADDED,
    SEGMENT_TOPS,
)
from simulator.compiled.jit import stage


@stage(inline=True)
def _bits(values):
    """Returns b such that value i is in group i >> b; groups are small unless values are very many."""
    return 5 if values.size < 1 << 13 else 6 if values.size < 1 << 15 else 8


@stage
def _group(values, tops, added, count):
    """Groups the first ``count`` values: ``tops`` are maxima, ``added`` increments of all values, included in tops."""
    bits = _bits(values)
    for g in range((count + (1 << bits) - 1) >> bits):
        part = values[g << bits : min((g + 1) << bits, count)]
        top = -NEVER
        for j in range(part.size):
            top = max(top, part[j])
        tops[g] = top
        added[g] = 0


@stage
def build_segments(enforced, by_kernel, by_segment, n_segments):
    """Builds the segments. Kernels n to 2n - 1 and segments S to 2S - 1 are in the next iteration, S = ``n_segments``.

    by_kernel[SEGMENT]: Segment of each kernel, (n + 1,).
    by_segment[FIRST_OF]: First kernel of each segment, then 2n.
    by_segment[HIGHEST]: Maximum of ``enforced`` in each segment.
    by_segment[EXPECTED]: HIGHEST plus the bytes swapped in early: initially none.
    by_segment[SEGMENT_TOPS, SEGMENT_ADDED]: Groups of EXPECTED.
    by_kernel[KERNEL_TOPS, KERNEL_ADDED]: Groups of ``enforced``, built on demand; the last top is a flag.

    Args:
        enforced: int64 (n + 1,), planned residency, far below 0 where the limit is not enforced.
    """
    n = enforced.size - 1
    segment_of = by_kernel[SEGMENT]
    first = by_segment[FIRST_OF]
    highest = by_segment[HIGHEST]
    expected = by_segment[EXPECTED]
    begin = 0
    for segment in range(n_segments):
        end = begin + 1
        while end < n and segment_of[end] == 0:
            end += 1
        top = -NEVER
        for k in range(begin, end):
            segment_of[k] = segment
            top = max(top, enforced[k])
        first[segment] = begin
        first[n_segments + segment] = begin + n
        highest[segment] = highest[n_segments + segment] = expected[segment] = expected[n_segments + segment] = top
        begin = end
    segment_of[n] = n_segments
    first[2 * n_segments] = 2 * n
    by_kernel[KERNEL_TOPS, n] = 0
    _group(expected, by_segment[SEGMENT_TOPS], by_segment[SEGMENT_ADDED], 2 * n_segments)


@stage
def _expected(by_segment, s):
    """Returns the largest number of bytes expected in segment s."""
    expected = by_segment[EXPECTED]
    return expected[s] + by_segment[SEGMENT_ADDED, s >> _bits(expected)]


@stage
def next_segments(by_segment, n_segments):
    """Shifts the segments by one iteration; early swap-ins of the next iteration keep their weight, in no group."""
    highest = by_segment[HIGHEST]
    expected = by_segment[EXPECTED]
    for s in range(n_segments):
        expected[s] = _expected(by_segment, n_segments + s)
        expected[n_segments + s] = highest[s]
    _group(expected, by_segment[SEGMENT_TOPS], by_segment[SEGMENT_ADDED], 2 * n_segments)


@stage
def _last_above(values, tops, added, begin, end, bound):
    """Returns the last index in values[begin:end] above ``bound``; -1: none. Group tops are upper bounds."""
    index = end - 1
    bits = _bits(values)
    while index >= begin:
        g = index >> bits
        if tops[g] > bound:
            first = max(g << bits, begin)
            threshold = bound - added[g]
            while index >= first and values[index] <= threshold:
                index -= 1
            if index >= first:
                return index
        index = (g << bits) - 1
    return -1


@stage(inline=True)  # a call would push some thirty words
def obstacle_of(segment_of, by_kernel, by_segment, enforced, start, due, fits, required):
    """Returns the last kernel that prevents a swap-in by rule 5; -1: none.

    Kernels from ``start`` up to segment ``due`` at which planned residency and early swap-ins exceed ``fits``.
    Kernels of the next iteration have indices from n on.
    """
    highest = by_segment[HIGHEST]
    expected = by_segment[EXPECTED]
    first = by_segment[FIRST_OF]
    segment = segment_of[start]
    kernel = -1
    n = enforced.size - 1
    level = _expected(by_segment, segment)
    # Quick upper bound: all early swap-ins on top of the worst kernel.
    if segment < due and required + level - highest[segment] > fits:
        worst = _last_above(expected, by_segment[SEGMENT_TOPS], by_segment[SEGMENT_ADDED], segment + 1, due, fits)
        if worst >= 0:
            segment = worst
            start = first[worst]
            level = _expected(by_segment, worst)
        if level > fits:
            tops = by_kernel[KERNEL_TOPS]
            added = by_kernel[KERNEL_ADDED]
            base = n if start >= n else 0
            if tops[n] == 0:
                _group(enforced, tops, added, n)
                tops[n] = 1
            threshold = fits - (level - highest[segment])
            kernel = _last_above(enforced, tops, added, start - base, first[segment + 1] - base, threshold)
            kernel += base if kernel >= 0 else 0
    return kernel


@stage
def add_weight(by_segment, begin, due, nbytes):
    """Adds an early swap-in of ``nbytes`` to the segments from ``begin`` up to ``due``.

    May also change earlier segments, which are no longer queried.
    """
    expected = by_segment[EXPECTED]
    tops = by_segment[SEGMENT_TOPS]
    added = by_segment[SEGMENT_ADDED]
    bits = _bits(expected)
    last = due >> bits
    for g in range(begin >> bits, last):
        tops[g] += nbytes
        added[g] += nbytes
    # expected[j] would compile to gathers
    values = expected[max(begin, last << bits) : due]
    top = -NEVER
    for j in range(values.size):
        values[j] += nbytes
        top = max(top, values[j])
    tops[last] = max(tops[last], top + added[last])
