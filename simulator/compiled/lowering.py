"""Lowers a plan for the event loop: gaps, gates and segments, once per call. README.md shows them.

Parameters are those of ``score_plans``. For plans that recompute, ``by_row`` has the ends of the gaps.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.encoding import (
    AFTER,
    BEFORE,
    DUE_SEGMENT,
    EXTRA,
    GATE,
    KIND,
    NEVER,
    RECOMPUTE,
    RERUN,
    TENSOR,
    WHEN,
    ByKernel,
    ByRow,
    ByTensor,
    Copy,
    Kernels,
    Tensors,
    split_graph,
)
from simulator.compiled.heap import OUTSIDE, push
from simulator.compiled.jit import jit, stage
from simulator.compiled.records import named

# Positions of the newest host copy of a tensor, before all kernels:
_NO_COPY = -NEVER + 1
_NOT_SWAPPED = -NEVER  # no swap of the tensor has been read yet


# Its arrays are borrowed: a function that counts references must not call it.
view_graph = stage(split_graph, inline=True)


@stage(entry=True)
def swap_residency(kernels, tensors, rows, planned):
    """Fills ``planned`` for a plan of swaps: live bytes minus evicted bytes."""
    n = planned.size - 1
    live = named(Kernels, kernels).live
    sizes = named(Tensors, tensors).size
    # First the changes of the evicted bytes at each kernel, then their sum.
    for k in range(n + 1):
        planned[k] = 0
    for r in range(rows.shape[0]):
        size = sizes[rows[r, TENSOR]]
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
    """Groups indices by their key in range(n); -1 is no key.

    Returns ``starts`` and ``items``: those of key k are items[starts[k]:starts[k + 1]], in order.
    """
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
    """Returns the rows that are swaps, by tensor and opening: of tensor t, order[starts[t]:starts[t + 1]]."""
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
    """Returns the most bytes that the host holds for a plan (schedule._host_bytes).

    Args:
        graph: Result of ``split_graph``.
        returns: Ends of the gaps.
        tensors, rows: Tables of encoding.py.
        n: Number of kernels.
    """
    tensors = named(Tensors, tensors)
    writes_at = graph.writes_at
    starts, order = swaps_by_tensor(rows, n, tensors.size.size)
    nbytes = np.zeros(2 * n + 1, np.int64)  # changes, then bytes, at the kernels of this iteration and the next
    for i in range(order.size):
        r = order[i]
        t = rows[r, TENSOR]
        copy = copied_at(rows, r)
        kernels = (returns[r] - copy - 1) % n + 1
        # Extend to the next copy of the tensor, if it is not written until then.
        last = i + 1 == starts[t + 1]
        if not last or tensors.persistent[t]:
            until_next = (copied_at(rows, order[starts[t] if last else i + 1]) - copy - 1) % n + 1
            is_valid = True
            for j in range(writes_at[t], writes_at[t + 1]):
                is_valid &= (graph.values[j] - copy - 1) % n >= until_next
            kernels = max(kernels, until_next if is_valid else 0)
        nbytes[copy + 1] += tensors.size[t]
        nbytes[copy + 1 + kernels] -= tensors.size[t]
    peak = 0
    for k in range(1, 2 * n):
        nbytes[k] += nbytes[k - 1]
        if k >= n:
            peak = max(peak, nbytes[k - n] + nbytes[k])
    return peak


@stage
def read_plan(tables, work, rows, lowered):
    """Fills the tables of a plan.

    gaps: Gaps of the rows.
    by_row.next_open: Linked lists by kernel, ordered by tensor; by_kernel.opens[k] is the first entry for the end of
        kernel k, -1 ends a list. Entry 2r: the gap of row r opens. Entry 2r + 1: its early copy is issued.
    by_kernel.gate, by_kernel.missing_in_pass (for plans that recompute): With nothing evicted.
    by_kernel.segment: 1 where a segment starts.
    by_tensor.copied: For swapped tensors, the position of the newest host copy: _NO_COPY.

    Args:
        tables, work: ``Tables`` to read, and ``Arrays`` to fill.
        rows: int64 (n, 6), the plan.
        lowered: Whether by_row has ``returns``, ``by_pass`` and ``away_at_start``.

    Returns:
        The number of segments, the bytes of all swapped tensors, and whether a copy is issued in the iteration before
        its gap opens.
    """
    tensors = named(Tensors, tables.tensors)
    by_kernel = named(ByKernel, work.by_kernel)
    by_row = named(ByRow, work.by_row)
    gaps = work.gaps
    gate = by_kernel.gate.view(GATE)
    heads = by_kernel.opens
    starts = by_kernel.segment
    copied = named(ByTensor, work.by_tensor).copied
    n = gate.size - 1
    graph = view_graph(tables.graph, n)
    writes_at = graph.writes_at
    for k in range(n + 1):
        by_kernel.gate[k] = 0
        heads[k] = -1
        starts[k] = 0
    if lowered:
        for k in range(n + 1):
            by_kernel.missing_in_pass[k] = 0
    gate[n - 1].has_event = 1
    n_segments = 1
    swapped_bytes = 0
    has_early_copy = False
    starts[0] = 1
    for r in range(rows.shape[0]):
        if rows[r, KIND] != RERUN:
            copied[rows[r, TENSOR]] = _NOT_SWAPPED
    for r in range(rows.shape[0]):
        if rows[r, KIND] == RERUN:
            gate[rows[r, BEFORE]].has_event = 1
            continue
        t = rows[r, TENSOR]
        after = rows[r, AFTER]
        if not lowered:
            by_row.returns[r] = rows[r, BEFORE]
        returns = by_row.returns[r]
        _enter(heads, by_row.next_open, rows, after, 2 * r)
        gap = gaps[r]
        gap.tensor = t
        gap.kind = rows[r, KIND]
        gap.nbytes = tensors.size[t]
        gap.returns = returns
        gate[after].has_event = 1
        if gap.kind == RECOMPUTE:
            gate[returns].has_event = 1
            continue
        if copied[t] == _NOT_SWAPPED:
            copied[t] = _NO_COPY
            swapped_bytes += gap.nbytes
        gap.out_ns = tensors.d2h_ns[t]
        gap.in_ns = tensors.h2d_ns[t]
        # The weight of an early swap-in ends where the tensor is used, so that segments begin there.
        n_segments += 1 - starts[returns]
        starts[returns] = 1
        gap.copy = Copy.DONE
        gap.lead = gap.issued = 0
        copy = rows[r, WHEN]
        if copy >= 0 and copy != after:
            gap.lead = after - copy if copy < after else after - copy + n
            gate[copy].has_event = 1
            _enter(heads, by_row.next_open, rows, copy, 2 * r + 1)
            has_early_copy |= copy > after
        gap.by_pass = by_row.by_pass[r] if lowered else 0
        gap.hold = 1
        prefetch = rows[r, EXTRA]
        gap.pinned = 1 if prefetch >= 0 else 0
        if prefetch >= 0:
            gate[prefetch].has_event = 1
            gap.hold = prefetch - after + 1 if prefetch >= after else prefetch - after + 1 + n
            # A recomputation may end the gap before its prefetch.
            gap.hold = min(gap.hold, returns - after if returns > after else returns - after + n)
        gap.since_write = _since_write(graph.values, writes_at[t], writes_at[t + 1], after, n)
    return n_segments, swapped_bytes, has_early_copy


@stage
def fill_waits(rows, gaps, waits, gate, settings):
    """Fills ``waits``: ns that events of copies add to each kernel (RULES.md, j); returns whether any do."""
    if settings.wait_ns == 0 and settings.event_ns == 0:
        return False
    n = waits.size - 1
    for k in range(n + 1):
        waits[k] = 0
    if settings.event_ns:
        for r in range(rows.shape[0]):
            if is_swap(rows, r):
                waits[(rows[r, AFTER] - gaps[r].lead) % n] = settings.event_ns
                if rows[r, EXTRA] >= 0:
                    waits[rows[r, EXTRA]] = settings.event_ns
    for r in range(rows.shape[0]):
        if is_swap(rows, r):
            waits[gaps[r].returns] += settings.wait_ns
    for k in range(n):
        if waits[k]:
            gate[k].has_event = 1
    return True


@stage
def mark_missing(gap, gate, missing_in_pass, sign):
    """Counts the evicted tensor of a gap (``sign`` 1), or that it is resident again (-1), where it is read."""
    # The counter ``missing`` is the low half of the word. Storing only this half would cost 4 % of a call, because the
    # processor cannot forward it to the load of the whole word that follows.
    gate[gap.returns].word += sign
    if gap.by_pass:
        missing_in_pass[gap.returns] += sign


@stage
def evict_at_start(work, rows, lowered):
    """Builds a heap by ``ready`` of the rows whose tensors are on the host at the start.

    It includes copies that the previous iteration would have issued. Returns the root, and the bytes of the tensors.
    """
    by_kernel = named(ByKernel, work.by_kernel)
    by_row = named(ByRow, work.by_row)
    copied = named(ByTensor, work.by_tensor).copied
    gaps = work.gaps
    gate = by_kernel.gate.view(GATE)
    ready = by_row.ready
    n = gate.size - 1
    root = -1
    nbytes = 0
    for r in range(rows.shape[0]):
        by_row.child[r] = OUTSIDE
        if not is_swap(rows, r):
            continue
        gap = gaps[r]
        after = rows[r, AFTER]
        is_on_host = by_row.away_at_start[r] == 1 if lowered else after >= gap.returns
        if is_on_host:
            nbytes += gap.nbytes
            copied[gap.tensor] = after - n
            ready[r] = after - n + gap.hold
            by_row.due[r] = by_kernel.segment[gap.returns] * DUE_SEGMENT + gap.tensor
            mark_missing(gap, gate, by_kernel.missing_in_pass, 1)
            root = push(ready, by_row.child, by_row.sibling, root, r)
        elif gap.lead > after:
            copied[gap.tensor] = after - gap.lead
    return root, nbytes


@stage
def first_settled_kernel(tables, work, rows):
    """Returns the first kernel after which every host copy is issued that only later iterations start with; or 0.

    The initial state lacks these copies, which carry over the boundary: those of swaps between two uses of a persistent
    tensor.
    """
    persistent = named(Tensors, tables.tensors).persistent
    copied = named(ByTensor, work.by_tensor).copied
    gaps = work.gaps
    n = work.by_kernel.shape[1] - 1
    graph = view_graph(tables.graph, n)
    writes_at = graph.writes_at
    first_settled = 0
    for r in range(rows.shape[0]):
        if is_swap(rows, r):
            t = rows[r, TENSOR]
            if persistent[t] != 0 and copied[t] == _NO_COPY:
                if writes_at[t] == writes_at[t + 1] or graph.values[writes_at[t + 1] - 1] <= rows[r, AFTER]:
                    issue = rows[r, AFTER] - gaps[r].lead
                    first_settled = max(first_settled, 1 + (issue if issue >= 0 else issue + n))
    return first_settled
