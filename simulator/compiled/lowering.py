"""Lowers a plan for the event loop: gaps, gates and segments, once per call. README.md shows them.

Parameters are those of ``score_plans``. For plans that recompute, ``by_row`` has the ends of the gaps.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.heap import OUTSIDE, push
from simulator.compiled.jit import jit, stage
from simulator.compiled.encoding import (
    AFTER,
    AWAY_AT_START,
    BEFORE,
    BY_REMAT,
    CHILD,
    COPIED,
    D2H,
    DUE,
    DUE_SEGMENT,
    EXTRA,
    GATE,
    GATE_EVENT,
    GATE_REMAT,
    H2D,
    KIND,
    LIVE,
    NEVER,
    NEXT_OPEN,
    OPENS,
    PERSISTENT,
    READY,
    RECOMPUTE,
    RERUN,
    RETURNS,
    SEGMENT,
    SIBLING,
    SIZE,
    TENSOR,
    WAITS,
    WHEN,
)

_NO_COPY = -NEVER + 1
_NOT_SWAPPED = -NEVER


@stage(entry=True)
def swap_residency(kernels, tensors, rows, planned):
    """Fills ``planned`` for a plan of swaps: live bytes minus evicted bytes."""
    n = planned.size - 1
    live = kernels[LIVE]
    for k in range(n + 1):
        planned[k] = 0
    for r in range(rows.shape[0]):
        size = tensors[SIZE, rows[r, TENSOR]]
        after = rows[r, AFTER]
        before = rows[r, BEFORE]
        if after >= before:
            planned[0] -= size
        planned[after + 1] -= size
        planned[before] += size
    evicted = 0
    for k in range(n):
        evicted += planned[k]
        planned[k] = live[k] + evicted


@stage
def _since_write(graph, begin, end, after, n):
    """Returns the kernels from the last of the writes graph[begin:end] to ``after``, over the boundary if needed."""
    since = after - graph[end - 1] + n if begin < end else NEVER // 2
    for i in range(begin, end):
        if graph[i] <= after:
            since = after - graph[i]
    return since


@stage
def _enter(heads, following, rows, k, entry):
    """Inserts an entry into the list of kernel k, ordered by tensor."""
    t = rows[entry >> 1, TENSOR]
    cursor = heads[k]
    previous = -1
    while cursor >= 0 and rows[cursor >> 1, TENSOR] < t:
        previous = cursor
        cursor = following[cursor]
    following[entry] = cursor
    if previous < 0:
        heads[k] = entry
    else:
        following[previous] = entry


@stage(inline=True)
def is_swap(rows, r):
    """Returns whether row r is a swap, with or without ``sync``."""
    return rows[r, KIND] & 1 == 0


@jit
def copied_at(rows, r):
    """Returns the kernel at whose end the copy of a swap is issued (Swap.copied_at)."""
    return rows[r, WHEN] if rows[r, WHEN] >= 0 else rows[r, AFTER]


@jit
def grouped(keys, n):
    """Groups indices by their key in range(n): those of key k are items[at[k]:at[k + 1]], in order; -1 is no key."""
    starts = np.zeros(n + 1, np.int64)
    for key in keys:
        if key >= 0:
            starts[key + 1] += 1
    for k in range(n):
        starts[k + 1] += starts[k]
    items = np.empty(starts[n], np.int64)
    next_free = starts.copy()
    for i in range(keys.size):
        if keys[i] >= 0:
            items[next_free[keys[i]]] = i
            next_free[keys[i]] += 1
    return starts, items


@stage
def sort(values, begin, end):
    """Sorts the few values[begin:end] by insertion."""
    for i in range(begin + 1, end):
        value = values[i]
        position = i
        while position > begin and values[position - 1] > value:
            values[position] = values[position - 1]
            position -= 1
        values[position] = value


@jit
def swaps_by_tensor(rows, n, n_tensors):
    """Returns the rows that are swaps, by tensor and opening: those of tensor t are order[at[t]:at[t + 1]]."""
    keys = np.full(rows.shape[0], -1, np.int64)
    for r in range(keys.size):
        if is_swap(rows, r):
            keys[r] = rows[r, AFTER]
    _, by_opening = grouped(keys, n)
    tensor = np.empty(by_opening.size, np.int64)
    for i in range(by_opening.size):
        tensor[i] = rows[by_opening[i], TENSOR]
    starts, order = grouped(tensor, n_tensors)
    for i in range(order.size):
        order[i] = by_opening[order[i]]
    return starts, order


@jit
def host_load(tensors, graph, rows, returns, n):
    """Returns the most bytes that the host holds for a plan (schedule._host_bytes); ``returns``: ends of gaps."""
    writes_at = graph[2 * n + 2 :]
    starts, order = swaps_by_tensor(rows, n, tensors.shape[1])
    nbytes = np.zeros(2 * n + 1, np.int64)  # changes, then bytes, at the kernels of this iteration and the next
    for i in range(order.size):
        r = order[i]
        t = rows[r, TENSOR]
        copy = copied_at(rows, r)
        kernels = (returns[r] - copy - 1) % n + 1
        # Extend to the next copy of the tensor, if it is not written until then.
        last = i + 1 == starts[t + 1]
        if not last or tensors[PERSISTENT, t]:
            until_next = (copied_at(rows, order[starts[t] if last else i + 1]) - copy - 1) % n + 1
            is_valid = True
            for j in range(writes_at[t], writes_at[t + 1]):
                is_valid &= (graph[j] - copy - 1) % n >= until_next
            kernels = max(kernels, until_next if is_valid else 0)
        nbytes[copy + 1] += tensors[SIZE, t]
        nbytes[copy + 1 + kernels] -= tensors[SIZE, t]
    peak = 0
    for k in range(1, 2 * n):
        nbytes[k] += nbytes[k - 1]
        if k >= n:
            peak = max(peak, nbytes[k - n] + nbytes[k])
    return peak


@stage
def read_plan(tensors, graph, rows, lowered, by_kernel, by_tensor, by_row, gaps):
    """Fills the tables of a plan.

    gaps: Gaps of the rows.
    by_row[NEXT_OPEN]: Linked lists by kernel, ordered by tensor; by_kernel[OPENS, k] is the first entry for the end of
        kernel k, -1 ends a list. Entry 2r: the gap of row r opens. Entry 2r + 1: its early copy is issued.
    by_kernel[GATE]: Gates with nothing evicted.
    by_kernel[SEGMENT]: 1 where a segment starts.
    by_tensor[COPIED]: For swapped tensors, the position of the newest host copy: _NO_COPY.

    Args:
        lowered: Whether by_row has RETURNS, BY_REMAT and AWAY_AT_START.

    Returns:
        The number of segments, the bytes of all swapped tensors, and whether a copy is issued in the iteration before
        its gap opens.
    """
    m = rows.shape[0]
    n = by_kernel.shape[1] - 1
    writes_at = graph[2 * n + 2 :]
    gate = by_kernel[GATE]
    heads = by_kernel[OPENS]
    starts = by_kernel[SEGMENT]
    copied = by_tensor[COPIED]
    following = by_row[NEXT_OPEN]
    ends = by_row[RETURNS]
    by_remat = by_row[BY_REMAT]
    for k in range(n + 1):
        gate[k] = 0
        heads[k] = -1
        starts[k] = 0
    gate[n - 1] = GATE_EVENT
    n_segments = 1
    swapped_bytes = 0
    has_early_copy = False
    starts[0] = 1
    for r in range(m):
        if rows[r, KIND] != RERUN:
            copied[rows[r, TENSOR]] = _NOT_SWAPPED
    for r in range(m):
        if rows[r, KIND] == RERUN:
            gate[rows[r, BEFORE]] |= GATE_EVENT
            continue
        t = rows[r, TENSOR]
        after = rows[r, AFTER]
        if not lowered:
            ends[r] = rows[r, BEFORE]
        returns = ends[r]
        _enter(heads, following, rows, after, 2 * r)
        gap = gaps[r]
        gap.tensor = t
        gap.kind = rows[r, KIND]
        gap.nbytes = tensors[SIZE, t]
        gap.returns = returns
        gate[after] |= GATE_EVENT
        if gap.kind == RECOMPUTE:
            gate[returns] |= GATE_EVENT
            continue
        if copied[t] == _NOT_SWAPPED:
            copied[t] = _NO_COPY
            swapped_bytes += gap.nbytes
        gap.out_ns = tensors[D2H, t]
        gap.in_ns = tensors[H2D, t]
        n_segments += 1 - starts[returns]
        starts[returns] = 1
        gap.pending = gap.lead = gap.issued = 0
        copy = rows[r, WHEN]
        if copy >= 0 and copy != after:
            gap.lead = after - copy if copy < after else after - copy + n
            gate[copy] |= GATE_EVENT
            _enter(heads, following, rows, copy, 2 * r + 1)
            has_early_copy |= copy > after
        gap.weight = 1 + GATE_REMAT * by_remat[r] if lowered else 1
        gap.hold = 1
        prefetch = rows[r, EXTRA]
        gap.pinned = 1 if prefetch >= 0 else 0
        if prefetch >= 0:
            gate[prefetch] |= GATE_EVENT
            gap.hold = prefetch - after + 1 if prefetch >= after else prefetch - after + 1 + n
            gap.hold = min(gap.hold, returns - after if returns > after else returns - after + n)
        gap.since_write = _since_write(graph, writes_at[t], writes_at[t + 1], after, n)
    return n_segments, swapped_bytes, has_early_copy


@stage
def fill_waits(rows, gaps, by_kernel, wait_ns, event_ns):
    """Fills by_kernel[WAITS]: ns that events of copies add to each kernel (RULES.md, j); returns whether any do."""
    if wait_ns == 0 and event_ns == 0:
        return False
    waits = by_kernel[WAITS]
    gate = by_kernel[GATE]
    n = waits.size - 1
    for k in range(n + 1):
        waits[k] = 0
    if event_ns:
        for r in range(rows.shape[0]):
            if is_swap(rows, r):
                waits[(rows[r, AFTER] - gaps[r].lead) % n] = event_ns
                if rows[r, EXTRA] >= 0:
                    waits[rows[r, EXTRA]] = event_ns
    for r in range(rows.shape[0]):
        if is_swap(rows, r):
            waits[gaps[r].returns] += wait_ns
    for k in range(n):
        if waits[k]:
            gate[k] |= GATE_EVENT
    return True


@stage
def evict_at_start(rows, lowered, by_kernel, by_tensor, by_row, gaps):
    """Builds a heap by by_row[READY] of the rows whose tensors are on the host at the start.

    It includes copies that the previous iteration would have issued. Returns the root, and the bytes of the tensors.
    """
    n = by_kernel.shape[1] - 1
    root = -1
    nbytes = 0
    gate = by_kernel[GATE]
    segment_of = by_kernel[SEGMENT]
    copied = by_tensor[COPIED]
    ready = by_row[READY]
    child = by_row[CHILD]
    sibling = by_row[SIBLING]
    for r in range(rows.shape[0]):
        child[r] = OUTSIDE
        if not is_swap(rows, r):
            continue
        gap = gaps[r]
        after = rows[r, AFTER]
        is_on_host = by_row[AWAY_AT_START, r] == 1 if lowered else after >= gap.returns
        if is_on_host:
            nbytes += gap.nbytes
            copied[gap.tensor] = after - n
            ready[r] = after - n + gap.hold
            by_row[DUE, r] = segment_of[gap.returns] * DUE_SEGMENT + gap.tensor
            gate[gap.returns] += gap.weight
            root = push(ready, child, sibling, root, r)
        elif gap.lead > after:
            copied[gap.tensor] = after - gap.lead
    return root, nbytes


@stage
def first_settled_kernel(tensors, graph, rows, by_tensor, gaps, n):
    """Returns the kernel from which on all copies are issued that are valid at the boundary but not at the start.

    Swaps between two uses of a persistent tensor may make such copies. 0: none do.
    """
    writes_at = graph[2 * n + 2 :]
    first_settled = 0
    for r in range(rows.shape[0]):
        if is_swap(rows, r):
            t = rows[r, TENSOR]
            if tensors[PERSISTENT, t] != 0 and by_tensor[COPIED, t] == _NO_COPY:
                if writes_at[t] == writes_at[t + 1] or graph[writes_at[t + 1] - 1] <= rows[r, AFTER]:
                    issue = rows[r, AFTER] - gaps[r].lead
                    first_settled = max(first_settled, 1 + (issue if issue >= 0 else issue + n))
    return first_settled
