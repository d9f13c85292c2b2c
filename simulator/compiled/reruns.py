"""Plans with Rerun decisions, compiled: the memory effects that schedule.lower derives.

A version of a tensor is a slot of ``graph``: that of the writer in the tensor's list of writers. Initial versions of
persistent tensors have no slot. Block x is that of the persistent tensor x.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import (
    AFTER,
    BEFORE,
    KIND,
    RERUN,
    TENSOR,
    ByKernel,
    ByRow,
    Graph,
    Ints,
    Kernels,
    Tensors,
)
from simulator.compiled.jit import jit, stage
from simulator.compiled.lowering import copied_at, grouped, is_swap, sort
from simulator.compiled.records import named


@jit
def _passes(rows, n, steps):
    """Writes the recomputed kernels into ``steps``, in order: those for kernel k are steps[starts[k]:starts[k + 1]]."""
    keys = np.full(rows.shape[0], -1, np.int64)
    for r in range(keys.size):
        if rows[r, KIND] == RERUN:
            keys[r] = rows[r, BEFORE]
    starts, kernels = grouped(keys, n)
    for i in range(kernels.size):
        kernels[i] = rows[kernels[i], AFTER]
    for k in range(n):
        sort(kernels, starts[k], starts[k + 1])
        for i in range(starts[k], starts[k + 1]):
            steps[i].kernel = kernels[i]
            steps[i].before = k
    return starts


class Walk(NamedTuple):
    """Arrays that ``_build`` reads and updates while it lowers one pass after the other."""

    graph: Graph
    tensors: Tensors
    by_row: ByRow
    nbytes: Ints  # of each block
    last: Ints  # last step that uses each block
    holder: Ints  # block that holds each version; -1: none
    original: Ints  # block that holds the initial version of each tensor; -1: none
    # What the pass before kernel passed_at[x] has written of tensor x: the block, and the version in it.
    passed_at: Ints
    own: Ints
    slots: Ints
    away: Ints  # row that leaves each tensor on the host; -1: none
    copied: NDArray[np.bool_]  # schedule._Builder._has_host_copy
    fetched: Ints  # tensors that the pass swaps in before their gaps end


class Lists(NamedTuple):
    """Linked lists of rows by kernel: the first row, and the next one; -1: none."""

    first: Ints
    following: Ints


@stage(inline=True)
def _slot_before(graph, x, w):
    """Returns the last writer of tensor x before kernel w, as an index into ``graph``; -1: none."""
    slot = -1
    for i in range(graph.writes_at[x], graph.writes_at[x + 1]):
        if graph.values[i] < w:
            slot = i
    return slot


@stage
def _enter(lists, k, r):
    """Adds row r to the list of kernel k."""
    lists.following[r] = lists.first[k]
    lists.first[k] = r


@stage
def _restore(walk, x):
    """Makes tensor x resident, without a copy on the host."""
    walk.away[x] = -1
    walk.copied[x] = False


@stage
def _read_inputs(walk, s, w, k, is_rerun, n_fetched):
    """Uses the inputs of kernel w in step s; returns the number of ``fetched`` tensors, and whether all inputs exist.

    A pass reads a version that it has written itself, else the one that kernel k would read.
    """
    graph = walk.graph
    is_valid = True
    for i in range(graph.reads_at[w], graph.reads_at[w + 1]):
        x = graph.values[i]
        slot = _slot_before(graph, x, w)
        block = walk.holder[slot] if slot >= 0 else walk.original[x]
        if is_rerun:
            is_own = walk.passed_at[x] == k and walk.slots[x] == slot
            if block >= 0 and (walk.tensors.persistent[x] or not is_own):
                r = walk.away[x]
                if r >= 0 and slot == _slot_before(graph, x, k):
                    if walk.by_row.by_pass[r] == 0:
                        walk.fetched[n_fetched] = x
                        n_fetched += 1
                    walk.by_row.returns[r] = k
                    walk.by_row.by_pass[r] = 1
            else:
                is_valid &= is_own
                block = walk.own[x] if is_own else 0
        walk.last[block] = s
    return n_fetched, is_valid


@stage
def _write_outputs(walk, s, w, k, is_rerun, n_blocks):
    """Writes the outputs of kernel w in step s to their blocks; returns the bytes and the number of new blocks.

    The third result is whether a pass that repeats a later write of a tensor has repeated the write before it.
    """
    graph = walk.graph
    tensors = walk.tensors
    holder = walk.holder
    nbytes = 0
    n_new = 0
    is_valid = True
    for i in range(graph.results_at[w], graph.results_at[w + 1]):
        x = graph.values[i]
        previous = _slot_before(graph, x, w)
        slot = previous + 1 if previous >= 0 else graph.writes_at[x]
        is_own = is_rerun and walk.passed_at[x] == k
        if is_own:
            block = walk.own[x]
        elif is_rerun or (not tensors.persistent[x] and tensors.first[x] == w):
            block = n_blocks + n_new
            walk.nbytes[block] = tensors.size[x]
            nbytes += tensors.size[x]
            n_new += 1
        else:
            block = holder[previous] if previous >= 0 else walk.original[x]
        if is_rerun:
            # The copy on the host stays the current version: a pass then writes a copy for itself only.
            is_replaced = not tensors.persistent[x] and not walk.copied[x]
            if not tensors.persistent[x] and previous >= 0:
                is_valid &= is_own and walk.slots[x] == previous
            if is_replaced and is_own and holder[walk.slots[x]] == block:
                holder[walk.slots[x]] = -1
            walk.passed_at[x] = k
            walk.own[x] = block
            walk.slots[x] = slot
            if is_replaced:
                holder[slot] = block
        else:
            if previous >= 0:
                holder[previous] = -1
            walk.original[x] = -1
            holder[slot] = block
        walk.last[block] = s
    return nbytes, n_new, is_valid


@jit
def _build(n, tensors, graph, rows, by_row, steps, n_steps, away, allocated, freed):
    """Sums the bytes that each step allocates and frees; returns whether every step finds its inputs.

    It executes ``schedule._Builder`` from ``away_at_start``. If a pass swaps a tensor in before its gap ends,
    ``returns`` and ``by_pass`` change.

    Args:
        away: (tensors,) the row that leaves the tensor on the host at the end; initially -1.
    """
    m = rows.shape[0]
    n_tensors = away.size
    n_blocks = n_tensors
    # Each persistent tensor has a block, and each step may create one per output.
    capacity = n_tensors + graph.results_at[n] - graph.results_at[0]
    for j in range(n_steps):
        capacity += graph.results_at[steps[j].kernel + 1] - graph.results_at[steps[j].kernel]
    walk = Walk(
        graph,
        tensors,
        by_row,
        np.zeros(capacity, np.int64),
        np.zeros(capacity, np.int64),
        np.full(graph.values.size, -1, np.int64),
        np.full(n_tensors, -1, np.int64),
        np.full(n_tensors, -1, np.int64),
        np.empty(n_tensors, np.int64),
        np.empty(n_tensors, np.int64),
        away,
        np.zeros(n_tensors, np.bool_),
        np.empty(n_tensors, np.int64),
    )
    ends = Lists(np.full(n, -1, np.int64), np.empty(m, np.int64))
    opens = Lists(np.full(n, -1, np.int64), np.empty(m, np.int64))
    copies = Lists(np.full(n, -1, np.int64), np.empty(m, np.int64))
    for r in range(m):
        if is_swap(rows, r):
            t = rows[r, TENSOR]
            copy = copied_at(rows, r)
            _enter(ends, by_row.returns[r], r)
            _enter(opens, rows[r, AFTER], r)
            _enter(copies, copy, r)
            if by_row.away_at_start[r]:
                away[t] = r
            walk.copied[t] |= by_row.away_at_start[r] == 1 or copy > rows[r, AFTER]
    for x in range(n_tensors):
        if tensors.persistent[x]:
            walk.original[x] = x
    is_valid = True
    n_fetched = 0
    j = 0
    k = 0
    for s in range(n + n_steps):
        is_rerun = j < n_steps and steps[j].before == k
        w = steps[j].kernel if is_rerun else k
        if not is_rerun:  # tensors swapped in for the pass stay
            for i in range(n_fetched):
                _restore(walk, walk.fetched[i])
            n_fetched = 0
            r = ends.first[k]
            while r >= 0:
                if away[rows[r, TENSOR]] == r:
                    _restore(walk, rows[r, TENSOR])
                r = ends.following[r]
        n_fetched, has_inputs = _read_inputs(walk, s, w, k, is_rerun, n_fetched)
        nbytes, n_new, has_previous = _write_outputs(walk, s, w, k, is_rerun, n_blocks)
        is_valid &= has_inputs and has_previous
        allocated[s] += nbytes
        n_blocks += n_new
        if is_rerun:
            j += 1
            continue
        r = opens.first[k]
        while r >= 0:
            away[rows[r, TENSOR]] = r
            r = opens.following[r]
        r = copies.first[k]
        while r >= 0:
            walk.copied[rows[r, TENSOR]] = True
            r = copies.following[r]
        k += 1
    for b in range(n_tensors, n_blocks):
        freed[walk.last[b]] += walk.nbytes[b]
    return is_valid


@jit
def lower_reruns(kernels, tensors, graph, rows, by_kernel, by_row, steps):
    """Lowers a plan of swaps and reruns; parameters as in ``lower_recomputations``, but ``graph`` is split.

    There must be more ``steps`` than ``rows``.

    Fills by_kernel.planned, ``steps``, and ``returns``, ``by_pass`` and ``away_at_start`` of by_row. Returns
    ``kernels`` with the bytes that they free under the plan, and the number of recomputed kernels; -1: an input of one
    of them is missing.
    """
    n = kernels.shape[1] - 1
    m = rows.shape[0]
    tensors = named(Tensors, tensors)
    planned = named(ByKernel, by_kernel).planned
    by_row = named(ByRow, by_row)
    size = tensors.size
    starts = _passes(rows, n, steps)
    allocated = np.empty(n + starts[n], np.int64)
    freed = np.empty(n + starts[n], np.int64)
    away = np.empty(size.size, np.int64)
    for r in range(m):
        by_row.away_at_start[r] = 1 if is_swap(rows, r) and rows[r, AFTER] >= rows[r, BEFORE] else 0
    # As in ``lower_recomputations``, until the iteration ends with the tensors on the host that it started with.
    for _ in range(2):
        for r in range(m):
            by_row.returns[r] = rows[r, BEFORE]
            by_row.by_pass[r] = 0
        away.fill(-1)
        allocated.fill(0)
        freed.fill(0)
        if not _build(n, tensors, graph, rows, by_row, steps, starts[n], away, allocated, freed):
            return kernels, -1
        changed = False
        for r in range(m):
            is_on_host = 1 if is_swap(rows, r) and away[rows[r, TENSOR]] == r else 0
            changed |= is_on_host != by_row.away_at_start[r]
            by_row.away_at_start[r] = is_on_host
        if not changed:
            break
    used = 0
    for x in range(size.size):
        used += size[x] if tensors.persistent[x] else 0
    restored = np.zeros(n + 1, np.int64)
    for r in range(m):
        if is_swap(rows, r):
            nbytes = size[rows[r, TENSOR]]
            restored[by_row.returns[r]] += nbytes
            restored[rows[r, AFTER] + 1] -= nbytes
            if by_row.away_at_start[r] == 1:
                used -= nbytes
    new_kernels = kernels.copy()
    table = named(Kernels, new_kernels)
    for k in range(n):
        used += restored[k]
        peak = 0
        for j in range(starts[k], starts[k + 1]):
            # Kernel k follows its pass, so that step j is preceded by k other kernels.
            i = j + k
            step = steps[j]
            step.allocated = allocated[i]
            step.freed = freed[i]
            used += allocated[i]
            peak = max(peak, used + table.workspace[step.kernel])
            used -= freed[i]
        i = starts[k + 1] + k
        used += allocated[i]
        planned[k] = max(peak, used + table.workspace[k])
        used -= freed[i]
        table.dies[k] = freed[i]
        table.live[k] = table.level[k] + table.born[k] + table.workspace[k]
        table.level[k + 1] = table.level[k] + table.born[k] - freed[i]
    return new_kernels, starts[n]
