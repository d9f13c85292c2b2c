"""What the event loop reads of a plan: gaps, gates and segments, made once a call. README.md draws them.

The arguments ``kernels``, ``tensors``, ``graph``, ``rows`` are as in ``Engine``; ``endings`` is as in
``lower_recomputations``, and empty for a plan of swaps.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit

# isort: off
from simulator.compiled.encoding import (
    AFTER, AWAY_AT_START, BEFORE, BY_REMAT, D2H, EXTRA, GAP, GATE_EVENT, GATE_REMAT, H2D, KIND, LIVE, NEVER,
    ORDER_SEGMENT, PERSISTENT, RECOMPUTE, RERUN, RETURNS, SIZE, TENSOR, WHEN,
)  # fmt: skip
# isort: on

_NO_COPY, _NOT_SWAPPED = -NEVER + 1, -NEVER


@jit
def swap_residency(kernels, tensors, rows, residency):  # type: ignore[no-untyped-def]
    """Fills residency[0] for a plan of swaps: live bytes less what is away. residency[1] is scratch."""
    n = kernels.shape[1]
    planned, change = residency[0], residency[1]
    change[:] = 0
    for r in range(rows.shape[0]):
        size, after, before = tensors[SIZE, rows[r, TENSOR]], rows[r, AFTER], rows[r, BEFORE]
        if after >= before:
            change[0] -= size
        if after + 1 < n:
            change[after + 1] -= size
        change[before] += size
    away = 0
    live = kernels[LIVE]
    for k in range(n):
        away += change[k]
        planned[k] = live[k] + away


@jit
def _since_write(graph, begin, end, after, n):  # type: ignore[no-untyped-def]
    """Kernels from the last of the writes graph[begin:end] to kernel ``after``, over the boundary where need be."""
    for i in range(end - 1, begin - 1, -1):
        if graph[i] <= after:
            return after - graph[i]
    return after - graph[end - 1] + n if begin < end else NEVER // 2


@jit
def _enter(opens, rows, k, entry):  # type: ignore[no-untyped-def]
    """Puts an entry into the list of kernel k."""
    m = rows.shape[0]
    at, t = 2 * m + k, rows[entry % m, TENSOR]
    while opens[at] >= 0 and rows[opens[at] % m, TENSOR] < t:
        at = opens[at]
    opens[at], opens[entry] = entry, opens[at]


@jit
def copied_at(rows, r):  # type: ignore[no-untyped-def]
    """plan.copied_at: the kernel at whose end the copy of a swap is issued."""
    return rows[r, WHEN] if rows[r, WHEN] >= 0 else rows[r, AFTER]


@jit
def _hold(held, begin, kernels):  # type: ignore[no-untyped-def]
    """Marks so many kernels after ``begin``, over the boundary where need be."""
    for k in range(begin + 1, begin + 1 + kernels):
        held[k % held.size] = True


@jit
def host_load(tensors, graph, rows, endings, n):  # type: ignore[no-untyped-def]
    """The most bytes that the host holds for a plan at a time (schedule._on_host)."""
    m, writes_at = rows.shape[0], graph[2 * n + 2 :]
    load, held = np.zeros(n, np.int64), np.zeros(n, np.bool_)
    done = np.zeros(tensors.shape[1], np.bool_)
    for first in range(m):
        t = rows[first, TENSOR]
        if rows[first, KIND] & 1 or done[t]:
            continue
        done[t], held[:] = True, False
        for r in range(first, m):
            if rows[r, KIND] & 1 or rows[r, TENSOR] != t:
                continue
            copy = copied_at(rows, r)
            returns = endings[r, RETURNS] if endings.shape[0] else rows[r, BEFORE]
            _hold(held, copy, (returns - copy - 1) % n + 1)
            # On to the next copy of the tensor, if it is not written until then.
            following, least = -1, n + 1
            for s in range(first, m):
                if rows[s, KIND] & 1 == 0 and rows[s, TENSOR] == t:
                    distance = (rows[s, AFTER] - rows[r, AFTER] + n - 1) % n
                    if distance < least and (rows[s, AFTER] > rows[r, AFTER] or tensors[PERSISTENT, t]):
                        following, least = s, distance
            if following >= 0:
                kernels, clean = (copied_at(rows, following) - copy - 1) % n + 1, True
                for i in range(writes_at[t], writes_at[t + 1]):
                    clean &= (graph[i] - copy - 1) % n >= kernels
                _hold(held, copy, kernels if clean else 0)
        for k in range(n):
            load[k] += tensors[SIZE, t] * held[k]
    return load.max()


@jit
def read_plan(tensors, graph, rows, endings, n):  # type: ignore[no-untyped-def]
    """The tables of a plan of m rows for n kernels.

    Returns:
        gaps: GAP (m,).
        opens: int64 (2m + n,), lists by kernel, [2m + k] is the first entry for the end of kernel k, [i] the one after
            entry i, by tensor; -1 ends a list. Entry r: the gap of row r opens. Entry m + r: its early copy is issued.
        gate: int64 (n,), nothing being away.
        copied: int64 (tensors,), position at which the newest host copy was made, _NO_COPY or _NOT_SWAPPED.
        starts: bool (n,), does a segment start here? Then how many do, the bytes of all tensors that are swapped, and
            whether a copy is issued an iteration before its gap opens.
    """
    m, writes_at = rows.shape[0], graph[2 * n + 2 :]
    recomputes = endings.shape[0] > 0
    gaps = np.empty(m, GAP)
    opens = np.full(2 * m + n, -1, np.int64)
    gate = np.zeros(n, np.int64)
    gate[n - 1] = GATE_EVENT
    copied = np.full(tensors.shape[1], _NOT_SWAPPED, np.int64)
    starts, n_segments, on_host, ahead = np.zeros(n, np.bool_), 1, 0, False
    starts[0] = True
    for r in range(m):
        if rows[r, KIND] == RERUN:
            gate[rows[r, BEFORE]] |= GATE_EVENT
            continue
        t, after = rows[r, TENSOR], rows[r, AFTER]
        returns = endings[r, RETURNS] if recomputes else rows[r, BEFORE]
        _enter(opens, rows, after, r)
        gap = gaps[r]
        gap.nbytes, gap.returns = tensors[SIZE, t], returns
        gate[after] |= GATE_EVENT
        if rows[r, KIND] == RECOMPUTE:
            gate[returns] |= GATE_EVENT
            continue
        if copied[t] == _NOT_SWAPPED:
            copied[t] = _NO_COPY
            on_host += tensors[SIZE, t]
        gap.out_ns, gap.in_ns = tensors[D2H, t], tensors[H2D, t]
        n_segments += not starts[returns]
        starts[returns] = True
        gap.pending = gap.lead = gap.issued = 0
        copy = rows[r, WHEN]
        if copy >= 0 and copy != after:
            gap.lead = after - copy if copy < after else after - copy + n
            gate[copy] |= GATE_EVENT
            _enter(opens, rows, copy, m + r)
            ahead |= copy > after
        gap.weight = 1 + GATE_REMAT * endings[r, BY_REMAT] if recomputes else 1
        gap.hold = 1
        prefetch = rows[r, EXTRA]
        gap.pinned = prefetch >= 0
        if prefetch >= 0:
            gate[prefetch] |= GATE_EVENT
            gap.hold = prefetch - after + 1 if prefetch >= after else prefetch - after + 1 + n
            gap.hold = min(gap.hold, returns - after if returns > after else returns - after + n)
        gap.since_write = _since_write(graph, writes_at[t], writes_at[t + 1], after, n)
    return gaps, opens, gate, copied, starts, n_segments, on_host, ahead


@jit
def segments(enforced, starts, n_segments):  # type: ignore[no-untyped-def]
    """The segments. Kernels n to 2n - 1 and segments S to 2S - 1 are those of the next iteration, S = ``n_segments``.

    Args:
        enforced: int64 (n,), planned residency, far below 0 where the limit does not count.
        starts: bool (n,), as from ``read_plan``.

    Returns:
        segment_of: int64 (n + 1,), the segment of a kernel.
        rest: int64 (n + 1,), the largest of ``enforced`` from a kernel to the end of its segment.
        first: int64 (2S + 1,), the first kernel of a segment, and 2n.
        highest: int64 (2S,), the largest of ``enforced`` in a segment.
        expected: int64 (2S,), ``highest`` plus the bytes that came back early: none yet.
    """
    n = enforced.size
    segment_of, rest = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    highest, first = np.empty(2 * n_segments, np.int64), np.empty(2 * n_segments + 1, np.int64)
    top, at = -NEVER, n_segments - 1
    for k in range(n - 1, -1, -1):
        top = max(top, enforced[k])
        segment_of[k], rest[k] = at, top
        highest[at], first[at] = top, k
        if starts[k]:
            top = -NEVER
            at -= 1
    segment_of[n], rest[n], first[2 * n_segments] = n_segments, rest[0], 2 * n
    highest[n_segments:] = highest[:n_segments]
    for at in range(n_segments):
        first[n_segments + at] = first[at] + n
    return segment_of, rest, first, highest, highest.copy()


@jit
def leave_at_start(rows, endings, gaps, segment_of, gate, copied, held):  # type: ignore[no-untyped-def]
    """Puts the rows whose tensors are on the host at the start into ``held``; returns how many, and their bytes.

    A copy that the iteration before would have issued is there, too.
    """
    n, n_held, nbytes = gate.size, 0, 0
    recomputes = endings.shape[0] > 0
    for r in range(rows.shape[0]):
        gap, after = gaps[r], rows[r, AFTER]
        away = endings[r, AWAY_AT_START] == 1 if recomputes else after >= gap.returns
        swaps = rows[r, KIND] & 1 == 0
        if swaps and not away and gap.lead > after:
            copied[rows[r, TENSOR]] = after - gap.lead
        if swaps and away:
            nbytes += gap.nbytes
            copied[rows[r, TENSOR]] = after - n
            gap.ready = after - n + gap.hold
            gap.order = segment_of[gap.returns] * ORDER_SEGMENT + rows[r, TENSOR]
            gate[gap.returns] += gap.weight
            held[n_held] = r
            n_held += 1
    return n_held, nbytes


@jit
def makes_copies(tensors, graph, rows, copied, n):  # type: ignore[no-untyped-def]
    """Does a swap between two uses of a persistent tensor make a copy that is valid at the boundary, unlike at the
    start?"""
    writes_at = graph[2 * n + 2 :]
    for r in range(rows.shape[0]):
        t = rows[r, TENSOR]
        if rows[r, KIND] & 1 == 0 and tensors[PERSISTENT, t] and copied[t] == _NO_COPY:
            if writes_at[t] == writes_at[t + 1] or graph[writes_at[t + 1] - 1] <= rows[r, AFTER]:
                return True
    return False
