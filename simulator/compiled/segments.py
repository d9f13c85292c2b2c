"""Segments of kernels, which answer rule 5 quickly: does a swap-in fit until its use?

A segment is a range of kernels between two consecutive ends of gaps (README.md). Maxima of groups of segments or
kernels are stored, so that a query takes a few steps instead of one per kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from simulator.compiled.encoding import NEVER, Ints
from simulator.compiled.jit import stage


class Segments(NamedTuple):
    """Segments of a plan. Kernels n to 2n - 1 and segments S to 2S - 1 of S are in the next iteration."""

    of_kernel: Ints  # (n + 1,) segment of each kernel
    enforced: Ints  # (n + 1,) planned residency, far below 0 where the limit is not enforced
    kernel_tops: Ints  # groups of ``enforced``, built on demand; the last top is a flag
    kernel_added: Ints
    first: Ints  # first kernel of each segment, then 2n
    highest: Ints  # maximum of ``enforced`` in each segment
    expected: Ints  # ``highest`` plus the bytes swapped in early: initially none
    tops: Ints  # groups of ``expected``
    added: Ints


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
def build_segments(segments, n_segments):
    """Builds ``n_segments`` segments, which begin where ``of_kernel`` is 1."""
    enforced = segments.enforced
    segment_of = segments.of_kernel
    first = segments.first
    highest = segments.highest
    expected = segments.expected
    n = enforced.size - 1
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
    segments.kernel_tops[n] = 0
    _group(expected, segments.tops, segments.added, 2 * n_segments)


@stage
def _expected(segments, s):
    """Returns the largest number of bytes expected in segment s."""
    return segments.expected[s] + segments.added[s >> _bits(segments.expected)]


@stage
def next_segments(segments, n_segments):
    """Shifts the segments by one iteration; early swap-ins of the next iteration keep their weight, in no group."""
    expected = segments.expected
    for s in range(n_segments):
        expected[s] = _expected(segments, n_segments + s)
        expected[n_segments + s] = segments.highest[s]
    _group(expected, segments.tops, segments.added, 2 * n_segments)


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


@stage(inline=True)  # a call would push some sixty words
def obstacle_of(segments, start, due, fits, required):
    """Returns the last kernel that prevents a swap-in by rule 5; -1: none.

    Kernels from ``start`` up to segment ``due`` at which planned residency and early swap-ins exceed ``fits``.
    Kernels of the next iteration have indices from n on.
    """
    enforced = segments.enforced
    highest = segments.highest
    first = segments.first
    segment_of = segments.of_kernel
    segment = segment_of[start]
    kernel = -1
    n = enforced.size - 1
    level = _expected(segments, segment)
    # Quick upper bound: all early swap-ins on top of the worst kernel.
    if segment < due and required + level - highest[segment] > fits:
        worst = _last_above(segments.expected, segments.tops, segments.added, segment + 1, due, fits)
        if worst >= 0:
            segment = worst
            start = first[worst]
            level = _expected(segments, worst)
        if level > fits:
            tops = segments.kernel_tops
            added = segments.kernel_added
            base = n if start >= n else 0
            if tops[n] == 0:
                _group(enforced, tops, added, n)
                tops[n] = 1
            threshold = fits - (level - highest[segment])
            kernel = _last_above(enforced, tops, added, start - base, first[segment + 1] - base, threshold)
            kernel += base if kernel >= 0 else 0
    return kernel


@stage(inline=True)
def add_weight(segments, begin, due, nbytes):
    """Adds an early swap-in of ``nbytes`` to the segments from ``begin`` up to ``due``.

    May also change earlier segments, which are no longer queried.
    """
    expected = segments.expected
    tops = segments.tops
    added = segments.added
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
