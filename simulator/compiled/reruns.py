"""Plans with Rerun decisions, compiled: the memory effects that schedule.lower derives.

A version of a tensor is a slot of ``graph``: that of the writer in the tensor's list of writers. Initial versions of
persistent tensors have no slot. Block x is that of the persistent tensor x.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit, stage
from simulator.compiled.lowering import copied_at, grouped, is_swap, sort
from simulator.compiled.encoding import (
    AFTER,
    ALLOCATED,
    AWAY_AT_START,
    BEFORE,
    BORN,
    BY_REMAT,
    DIES,
    FIRST,
    FREED,
    KIND,
    LEVEL,
    LIVE,
    PERSISTENT,
    PLANNED,
    RERUN,
    RETURNS,
    SIZE,
    STEP_FOR,
    STEP_KERNEL,
    TENSOR,
    WORKSPACE,
)

ENDS, OPENS, COPIES = range(3)


@jit
def _passes(rows, n, steps):
    """Writes the recomputed kernels into ``steps``, in order: those for kernel k are steps[at[k]:at[k + 1]]."""
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
            steps[i, STEP_KERNEL] = kernels[i]
            steps[i, STEP_FOR] = k
    return starts


@stage(inline=True)
def _slot_before(graph, writes_at, x, w):
    """Returns the last writer of tensor x before kernel w, as an index into ``graph``; -1: none."""
    slot = -1
    for i in range(writes_at[x], writes_at[x + 1]):
        if graph[i] < w:
            slot = i
    return slot


@jit
def _build(n, tensors, graph, rows, by_row, steps, n_steps, away, allocated, freed):
    """Sums the bytes that each step allocates and frees; returns whether every step finds its inputs."""
    # ``schedule._Builder`` from by_row[AWAY_AT_START]. If a pass swaps a tensor in before its gap ends, by_row[RETURNS,
    # BY_REMAT] changes. away, (tensors,): the row that leaves the tensor on the host at the end, initially -1.
    m = rows.shape[0]
    n_tensors = tensors.shape[1]
    size = tensors[SIZE]
    reads_at = graph
    results_at = graph[n + 1 :]
    writes_at = graph[2 * n + 2 :]
    capacity = n_tensors + results_at[n] - results_at[0]
    for j in range(n_steps):
        capacity += results_at[steps[j, STEP_KERNEL] + 1] - results_at[steps[j, STEP_KERNEL]]
    nbytes = np.zeros(capacity, np.int64)
    last = np.zeros(capacity, np.int64)
    n_blocks = n_tensors
    # Block that holds a version; initially that of a persistent tensor.
    holder = np.full(graph.size, -1, np.int64)
    original = np.full(n_tensors, -1, np.int64)
    # Within a pass, where ``passes`` is its kernel: the block that the pass has written, and the version in it.
    own = np.empty(n_tensors, np.int64)
    slots = np.empty(n_tensors, np.int64)
    passes = np.full(n_tensors, -1, np.int64)
    copied = np.zeros(n_tensors, np.bool_)  # schedule._Builder._has_host_copy
    fetched = np.empty(n_tensors, np.int64)
    n_fetched = 0
    # Linked lists of rows by the kernel that ends, opens or copies: the first row, and the next one.
    heads = np.full((3, n), -1, np.int64)
    following = np.empty((3, m), np.int64)
    for r in range(m):
        if is_swap(rows, r):
            t = rows[r, TENSOR]
            end = by_row[RETURNS, r]
            after = rows[r, AFTER]
            copy = copied_at(rows, r)
            following[ENDS, r] = heads[ENDS, end]
            heads[ENDS, end] = r
            following[OPENS, r] = heads[OPENS, after]
            heads[OPENS, after] = r
            following[COPIES, r] = heads[COPIES, copy]
            heads[COPIES, copy] = r
            if by_row[AWAY_AT_START, r]:
                away[t] = r
            copied[t] |= by_row[AWAY_AT_START, r] == 1 or copy > after
    for x in range(n_tensors):
        if tensors[PERSISTENT, x]:
            original[x] = x
    is_valid = True
    j = 0
    k = 0
    for s in range(n + n_steps):
        is_rerun = j < n_steps and steps[j, STEP_FOR] == k
        w = steps[j, STEP_KERNEL] if is_rerun else k
        if not is_rerun:  # tensors swapped in for the pass stay
            for i in range(n_fetched):
                away[fetched[i]] = -1
                copied[fetched[i]] = False
            n_fetched = 0
            r = heads[ENDS, k]
            while r >= 0:
                if away[rows[r, TENSOR]] == r:
                    away[rows[r, TENSOR]] = -1
                    copied[rows[r, TENSOR]] = False
                r = following[ENDS, r]
        for i in range(reads_at[w], reads_at[w + 1]):
            x = graph[i]
            slot = _slot_before(graph, writes_at, x, w)
            block = holder[slot] if slot >= 0 else original[x]
            if is_rerun:
                is_own = passes[x] == k and slots[x] == slot
                if block >= 0 and (tensors[PERSISTENT, x] or not is_own):
                    r = away[x]
                    if r >= 0 and slot == _slot_before(graph, writes_at, x, k):
                        if by_row[BY_REMAT, r] == 0:
                            fetched[n_fetched] = x
                            n_fetched += 1
                        by_row[RETURNS, r] = k
                        by_row[BY_REMAT, r] = 1
                else:
                    is_valid &= is_own
                    block = own[x] if is_own else 0
            last[block] = s
        for i in range(results_at[w], results_at[w + 1]):
            x = graph[i]
            previous = _slot_before(graph, writes_at, x, w)
            after = previous + 1 if previous >= 0 else writes_at[x]
            is_own = is_rerun and passes[x] == k
            if is_own:
                block = own[x]
            elif is_rerun or (not tensors[PERSISTENT, x] and tensors[FIRST, x] == w):
                block = n_blocks
                nbytes[n_blocks] = size[x]
                allocated[s] += size[x]
                n_blocks += 1
            else:
                block = holder[previous] if previous >= 0 else original[x]
            if is_rerun:
                replaced = not tensors[PERSISTENT, x] and not copied[x]
                if not tensors[PERSISTENT, x] and previous >= 0:  # not the first writer
                    is_valid &= is_own and slots[x] == previous
                if replaced and is_own and holder[slots[x]] == block:
                    holder[slots[x]] = -1
                passes[x] = k
                own[x] = block
                slots[x] = after
                if replaced:
                    holder[after] = block
            else:
                if previous >= 0:
                    holder[previous] = -1
                original[x] = -1
                holder[after] = block
            last[block] = s
        if is_rerun:
            j += 1
            continue
        r = heads[OPENS, k]
        while r >= 0:
            away[rows[r, TENSOR]] = r
            r = following[OPENS, r]
        r = heads[COPIES, k]
        while r >= 0:
            copied[rows[r, TENSOR]] = True
            r = following[COPIES, r]
        k += 1
    for b in range(n_tensors, n_blocks):
        freed[last[b]] += nbytes[b]
    return is_valid


@jit
def lower_reruns(kernels, tensors, graph, rows, by_kernel, by_row, steps):
    """Lowers a plan of swaps and reruns; parameters as in ``score_plans``, with more ``steps`` than ``rows``.

    Fills by_kernel[PLANNED], ``steps``, and by_row[RETURNS, BY_REMAT, AWAY_AT_START]. Returns ``kernels`` with the
    bytes that they free under the plan, and the number of recomputed kernels; -1: an input of one of them is missing.
    """
    n = kernels.shape[1] - 1
    m = rows.shape[0]
    size = tensors[SIZE]
    starts = _passes(rows, n, steps)
    allocated = np.empty(n + starts[n], np.int64)
    freed = np.empty(n + starts[n], np.int64)
    away = np.empty(size.size, np.int64)
    for r in range(m):
        by_row[AWAY_AT_START, r] = 1 if is_swap(rows, r) and rows[r, AFTER] >= rows[r, BEFORE] else 0
    for _ in range(2):
        for r in range(m):
            by_row[RETURNS, r] = rows[r, BEFORE]
            by_row[BY_REMAT, r] = 0
        away.fill(-1)
        allocated.fill(0)
        freed.fill(0)
        if not _build(n, tensors, graph, rows, by_row, steps, starts[n], away, allocated, freed):
            return kernels, -1
        changed = False
        for r in range(m):
            is_on_host = 1 if is_swap(rows, r) and away[rows[r, TENSOR]] == r else 0
            changed |= is_on_host != by_row[AWAY_AT_START, r]
            by_row[AWAY_AT_START, r] = is_on_host
        if not changed:
            break
    used = 0
    for x in range(size.size):
        used += size[x] if tensors[PERSISTENT, x] else 0
    restored = np.zeros(n + 1, np.int64)
    for r in range(m):
        if is_swap(rows, r):
            nbytes = size[rows[r, TENSOR]]
            restored[by_row[RETURNS, r]] += nbytes
            restored[rows[r, AFTER] + 1] -= nbytes
            if by_row[AWAY_AT_START, r] == 1:
                used -= nbytes
    kernels = kernels.copy()
    for k in range(n):
        used += restored[k]
        peak = 0
        for j in range(starts[k], starts[k + 1]):
            i = j + k
            step = steps[j]
            step[ALLOCATED] = allocated[i]
            step[FREED] = freed[i]
            used += allocated[i]
            peak = max(peak, used + kernels[WORKSPACE, step[STEP_KERNEL]])
            used -= freed[i]
        i = starts[k + 1] + k
        used += allocated[i]
        by_kernel[PLANNED, k] = max(peak, used + kernels[WORKSPACE, k])
        used -= freed[i]
        kernels[DIES, k] = freed[i]
        kernels[LIVE, k] = kernels[LEVEL, k] + kernels[BORN, k] + kernels[WORKSPACE, k]
        kernels[LEVEL, k + 1] = kernels[LEVEL, k] + kernels[BORN, k] - freed[i]
    return kernels, starts[n]
