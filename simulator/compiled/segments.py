"""Kernels in segments, and what rule 5 asks of them: does a swap-in fit until its use?

README.md draws the segments. A segment is a run of kernels between two at which something ends or begins; groups of
FINE and COARSE segments keep the largest value of each, so that a question takes a few steps instead of one a kernel.
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

FINE, COARSE = 5, 11  # bits: groups of 32 and of 2048 values


@stage
def coarse(values):  # type: ignore[no-untyped-def]
    """Where the coarse groups begin, behind the fine ones."""
    return (values.size >> FINE) + 1


@stage
def _largest(values):  # type: ignore[no-untyped-def]
    top = -NEVER
    for j in range(values.size):
        top = max(top, values[j])
    return top


@stage
def group(values, tops, added, count):  # type: ignore[no-untyped-def]
    """Groups of the first ``count`` values: value i is in fine group i >> FINE and in coarse group i >> COARSE, which
    has the entries of ``coarse`` on.

    tops: the largest of each group.
    added: to be added to all values of a group, and in the tops of it and of those in it: nothing yet.
    """
    n_fine, n_coarse = (count + (1 << FINE) - 1) >> FINE, (count + (1 << COARSE) - 1) >> COARSE
    for g in range(n_fine):
        tops[g], added[g] = _largest(values[g << FINE : min((g + 1) << FINE, count)]), 0
    at, wide = coarse(values), COARSE - FINE
    for g in range(n_coarse):
        tops[at + g], added[at + g] = _largest(tops[g << wide : min((g + 1) << wide, n_fine)]), 0


@stage
def segments(enforced, by_kernel, by_segment, n_segments):  # type: ignore[no-untyped-def]
    """The segments. Kernels n to 2n - 1 and segments S to 2S - 1 are those of the next iteration, S = ``n_segments``.

    by_kernel[SEGMENT]: the segment of a kernel, n + 1 of them.
    by_segment[FIRST_OF]: the first kernel of a segment, and 2n.
    by_segment[HIGHEST]: the largest of ``enforced`` in a segment.
    by_segment[EXPECTED]: the same plus the bytes that came back early: none yet.
    by_segment[SEGMENT_TOPS, SEGMENT_ADDED]: groups of EXPECTED.

    Args:
        enforced: int64 (n + 1,), planned residency, far below 0 where the limit does not count.
    """
    n = enforced.size - 1
    segment_of, first = by_kernel[SEGMENT], by_segment[FIRST_OF]
    highest, expected = by_segment[HIGHEST], by_segment[EXPECTED]
    begin = 0
    for at in range(n_segments):
        end = begin + 1
        while end < n and segment_of[end] == 0:
            end += 1
        top = -NEVER
        for k in range(begin, end):
            segment_of[k] = at
            top = max(top, enforced[k])
        first[at], first[n_segments + at] = begin, begin + n
        highest[at] = highest[n_segments + at] = expected[at] = expected[n_segments + at] = top
        begin = end
    segment_of[n], first[2 * n_segments] = n_segments, 2 * n
    group(expected, by_segment[SEGMENT_TOPS], by_segment[SEGMENT_ADDED], 2 * n_segments)


@stage
def next_segments(by_segment, n_segments):  # type: ignore[no-untyped-def]
    """The next iteration's segments become this one's; what comes back early there counts on, in no group."""
    highest, expected, added = by_segment[HIGHEST], by_segment[EXPECTED], by_segment[SEGMENT_ADDED]
    for g in range(n_segments >> FINE, (2 * n_segments >> FINE) + 1):
        more = added[g] + added[coarse(expected) + (g >> COARSE - FINE)]
        if more:
            for s in range(g << FINE, min((g + 1) << FINE, 2 * n_segments)):
                expected[s] += more
    for s in range(n_segments):
        expected[s], expected[n_segments + s] = expected[n_segments + s], highest[s]
    group(expected, by_segment[SEGMENT_TOPS], added, 2 * n_segments)


@stage
def _last_above(values, tops, added, begin, end, bound):  # type: ignore[no-untyped-def]
    """The last index in values[begin:end], in groups, of more than ``bound``; -1: none. A top may be more than any."""
    at, groups = end - 1, coarse(values)
    while at >= begin:
        fine, big = at >> FINE, groups + (at >> COARSE)
        if tops[big] <= bound:
            at = (at >> COARSE << COARSE) - 1
        elif tops[fine] + added[big] <= bound:
            at = (fine << FINE) - 1
        else:
            first, most = max(fine << FINE, begin), bound - added[fine] - added[big]
            while at >= first and values[at] <= most:
                at -= 1
            if at >= first:
                return at
    return -1


@stage
def _expected(by_segment, s):  # type: ignore[no-untyped-def]
    """Bytes that are expected at most in segment s."""
    expected, added = by_segment[EXPECTED], by_segment[SEGMENT_ADDED]
    return expected[s] + added[s >> FINE] + added[coarse(expected) + (s >> COARSE)]


@stage(inline=True)  # the call would push some thirty words
def obstacle_of(segment_of, by_kernel, by_segment, enforced, grouped, at, due, fits, required):  # type: ignore[no-untyped-def]
    """Rule 5: the last kernel, from kernel ``at`` up to segment ``due``, at which the planned residency and what came
    back early are more than ``fits``; -1: none. Kernels of the next iteration are counted on from this one's. And
    whether ``enforced`` is in groups (by_kernel[KERNEL_TOPS, KERNEL_ADDED]), which is put off until it is needed."""
    kernel, segment, n = -1, segment_of[at], enforced.size - 1
    here = _expected(by_segment, segment)
    early = here - by_segment[HIGHEST, segment]
    # A bound that often holds: all that came early beside the worst of all kernels.
    if segment < due and required + early > fits:
        later = _last_above(
            by_segment[EXPECTED], by_segment[SEGMENT_TOPS], by_segment[SEGMENT_ADDED], segment + 1, due, fits
        )
        if later >= 0:
            segment, at, here = later, by_segment[FIRST_OF, later], _expected(by_segment, later)
        if here > fits:
            early, turn = here - by_segment[HIGHEST, segment], n if at >= n else 0
            if not grouped:
                group(enforced, by_kernel[KERNEL_TOPS], by_kernel[KERNEL_ADDED], n)
                grouped = True
            kernel = _last_above(
                enforced, by_kernel[KERNEL_TOPS], by_kernel[KERNEL_ADDED], at - turn,
                by_segment[FIRST_OF, segment + 1] - turn, fits - early,
            )  # fmt: skip
            kernel += turn if kernel >= 0 else 0
    return kernel, grouped


@stage
def weigh(by_segment, begin, due, nbytes):  # type: ignore[no-untyped-def]
    """So many bytes come back early and weigh on the segments from ``begin`` up to ``due``; and on some before, which
    are over: nobody asks for them again."""
    expected, tops, added = by_segment[EXPECTED], by_segment[SEGMENT_TOPS], by_segment[SEGMENT_ADDED]
    groups, fine = coarse(expected), due >> FINE
    last = groups + (due >> COARSE)
    for g in range(groups + (begin >> COARSE), last):
        tops[g] += nbytes
        added[g] += nbytes
    for g in range(max(begin >> FINE, due >> COARSE << COARSE - FINE), fine):
        tops[g] += nbytes
        added[g] += nbytes
        tops[last] = max(tops[last], tops[g] + added[last])
    part, top = expected[max(begin, fine << FINE) : due], -NEVER  # a slice, because LLVM makes gathers of expected[j]
    for j in range(part.size):
        part[j] += nbytes
        top = max(top, part[j])
    tops[fine] = max(tops[fine], top + added[fine])
    tops[last] = max(tops[last], tops[fine] + added[last])
