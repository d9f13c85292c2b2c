"""Plans with Rerun decisions, compiled: what schedule.lower says of them in bytes.

``_walk`` goes over the steps of an iteration and keeps which block holds which version of a tensor, and which step uses
each block last. A version is a slot of ``graph``: that of the writer in the tensor's list of writers. The versions that
persistent tensors have at the start have no slot; their block has the tensor's number, as all first blocks have.
``lower_reruns`` then adds up the bytes.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit
from simulator.compiled.lowering import copied_at

# isort: off
from simulator.compiled.encoding import (
    AFTER, ALLOCATED, AWAY_AT_START, BEFORE, BORN, BY_REMAT, DIES, FIRST, FREED, KIND, LEVEL, LIVE, PERSISTENT, PLANNED,
    RERUN, RETURNS, SIZE, STEP_FOR, STEP_KERNEL, TENSOR, WHEN, WORKSPACE,
)  # fmt: skip
# isort: on


@jit
def slot_before(graph, writes_at, x, w):  # type: ignore[no-untyped-def]
    """The last writer of tensor x before kernel w, as an index of ``graph``; -1 where there is none."""
    slot = -1
    for i in range(writes_at[x], writes_at[x + 1]):
        if graph[i] < w:
            slot = i
    return slot


@jit
def _passes(rows, n):  # type: ignore[no-untyped-def]
    """Kernels that run again, in order: those for kernel k are again[at[k]:at[k + 1]]."""
    at = np.zeros(n + 1, np.int64)
    for r in range(rows.shape[0]):
        if rows[r, KIND] == RERUN:
            at[rows[r, BEFORE] + 1] += 1
    for k in range(n):
        at[k + 1] += at[k]
    again, filled = np.empty(at[n], np.int64), at.copy()
    for r in range(rows.shape[0]):
        if rows[r, KIND] == RERUN:
            i = filled[rows[r, BEFORE]]
            filled[rows[r, BEFORE]] += 1
            while i > at[rows[r, BEFORE]] and again[i - 1] > rows[r, AFTER]:
                again[i] = again[i - 1]
                i -= 1
            again[i] = rows[r, AFTER]
    return at, again


@jit
def _lists(rows, n):  # type: ignore[no-untyped-def]
    """Swaps by the kernel that ends, opens, copies them: heads int64 (3, n), the next one int64 (3, rows)."""
    heads, following = np.full((3, n), -1, np.int64), np.empty((3, rows.shape[0]), np.int64)
    for r in range(rows.shape[0]):
        if rows[r, KIND] & 1 == 0:
            for i, k in enumerate((rows[r, BEFORE], rows[r, AFTER], copied_at(rows, r))):
                following[i, r], heads[i, k] = heads[i, k], r
    return heads, following


@jit
def _walk(tensors, graph, rows, at, again, by_row):  # type: ignore[no-untyped-def]
    """schedule._Walk, from what by_row[AWAY_AT_START] says. Steps: those for kernel k are from at[k] + k, itself
    at[k + 1] + k.

    Returns:
        int64 (3, blocks): tensor, first step, last step. The first blocks are those of the tensors themselves, by
        tensor. int64 (tensors,): the row that has a tensor away in the end, or -1.
    """
    n, m, n_tensors = at.size - 1, rows.shape[0], tensors.shape[1]
    reads_at, results_at, writes_at = graph, graph[n + 1 :], graph[2 * n + 2 :]
    n_blocks = n_tensors
    for w in again:
        n_blocks += results_at[w + 1] - results_at[w]
    block = np.full((3, n_blocks), -1, np.int64)
    owner, first, last = block[0], block[1], block[2]
    for x in range(n_tensors):
        owner[x] = x
    n_blocks = n_tensors
    holder = np.full(graph.size, -1, np.int64)
    changed = np.zeros(n_tensors, np.bool_)  # persistent tensors that were written in this iteration
    heads, following = _lists(rows, n)
    away, copied = np.full(n_tensors, -1, np.int64), np.zeros(n_tensors, np.bool_)
    for r in range(m):
        if rows[r, KIND] & 1 == 0:
            by_row[RETURNS, r], by_row[BY_REMAT, r] = rows[r, BEFORE], 0
            if by_row[AWAY_AT_START, r]:
                away[rows[r, TENSOR]] = r
            copied[rows[r, TENSOR]] |= by_row[AWAY_AT_START, r] == 1 or rows[r, WHEN] > rows[r, AFTER]
    own, held, mine = np.empty(n_tensors, np.int64), np.empty(n_tensors, np.int64), np.full(n_tensors, -1, np.int64)
    for k in range(n):
        for j in range(at[k], at[k + 1]):
            w, step = again[j], j + k
            for i in range(reads_at[w], reads_at[w + 1]):
                x = graph[i]
                slot = slot_before(graph, writes_at, x, w)
                there = -1
                if slot >= 0:
                    there = holder[slot]
                elif tensors[PERSISTENT, x] and not changed[x]:
                    there = x
                if there >= 0 and (tensors[PERSISTENT, x] or mine[x] != k or held[x] != slot):
                    last[there] = step
                    if away[x] >= 0 and slot == slot_before(graph, writes_at, x, k):
                        by_row[RETURNS, away[x]], by_row[BY_REMAT, away[x]] = k, 1
                else:
                    last[own[x]] = step
            for i in range(results_at[w], results_at[w + 1]):
                x = graph[i]
                slot = slot_before(graph, writes_at, x, w + 1)
                replaces = not tensors[PERSISTENT, x] and not copied[x]
                if mine[x] != k:
                    mine[x], own[x] = k, n_blocks
                    owner[n_blocks], first[n_blocks] = x, step
                    n_blocks += 1
                elif replaces and holder[held[x]] == own[x]:
                    holder[held[x]] = -1
                last[own[x]], held[x] = step, slot
                if replaces:
                    holder[slot] = own[x]
        # What the pass fetched is back, and what kernel k itself uses.
        for j in range(at[k], at[k + 1]):
            for i in range(reads_at[again[j]], reads_at[again[j] + 1]):
                x = graph[i]
                if away[x] >= 0 and by_row[BY_REMAT, away[x]] == 1 and by_row[RETURNS, away[x]] == k:
                    away[x], copied[x] = -1, False
        r = heads[0, k]
        while r >= 0:
            if away[rows[r, TENSOR]] == r:
                by_row[RETURNS, r], away[rows[r, TENSOR]], copied[rows[r, TENSOR]] = k, -1, False
            r = following[0, r]
        step = at[k + 1] + k
        for i in range(reads_at[k], reads_at[k + 1]):
            x = graph[i]
            slot = slot_before(graph, writes_at, x, k)
            if not tensors[PERSISTENT, x]:
                last[holder[slot]] = step
        for i in range(results_at[k], results_at[k + 1]):
            x = graph[i]
            slot = slot_before(graph, writes_at, x, k)
            changed[x] = True
            if tensors[PERSISTENT, x]:
                used = x
            elif tensors[FIRST, x] == k:
                used = x
                first[x] = step
            else:
                used = holder[slot]
            if slot >= 0:
                holder[slot] = -1
            last[used], holder[slot_before(graph, writes_at, x, k + 1)] = step, used
        r = heads[1, k]
        while r >= 0:
            away[rows[r, TENSOR]] = r
            r = following[1, r]
        r = heads[2, k]
        while r >= 0:
            copied[rows[r, TENSOR]] = True
            r = following[2, r]
    return block[:, :n_blocks], away


@jit
def lower_reruns(kernels, tensors, graph, rows, by_kernel, by_row, steps):  # type: ignore[no-untyped-def]
    """The schedule of a plan of swaps and kernels that run again: by_kernel[PLANNED], ``steps``, and of by_row RETURNS,
    BY_REMAT, AWAY_AT_START.

    Args:
        kernels, tensors, graph, rows, by_kernel, by_row: as in ``score_plans``.
        steps: as there, of one more than the rows at least.

    Returns:
        ``kernels`` with what they free under the plan, and how many steps run again.
    """
    n, m = kernels.shape[1] - 1, rows.shape[0]
    at, again = _passes(rows, n)
    for r in range(m):
        by_row[AWAY_AT_START, r] = 1 if rows[r, KIND] & 1 == 0 and rows[r, AFTER] >= rows[r, BEFORE] else 0
    for _ in range(2):
        block, away = _walk(tensors, graph, rows, at, again, by_row)
        changed = False
        for r in range(m):
            still = 1 if rows[r, KIND] & 1 == 0 and away[rows[r, TENSOR]] == r else 0
            changed |= still != by_row[AWAY_AT_START, r]
            by_row[AWAY_AT_START, r] = still
        if not changed:
            break
    allocated, freed = np.zeros(n + again.size, np.int64), np.zeros(n + again.size, np.int64)
    used = 0
    size = tensors[SIZE]
    for b in range(block.shape[1]):
        x = block[0, b]
        if b < tensors.shape[1] and tensors[PERSISTENT, x]:
            used += size[x]
        elif block[1, b] >= 0:
            allocated[block[1, b]] += size[x]
            freed[block[2, b]] += size[x]
    comes = np.zeros(n + 1, np.int64)
    for r in range(m):
        if rows[r, KIND] & 1 == 0:
            nbytes = size[rows[r, TENSOR]]
            comes[by_row[RETURNS, r]] += nbytes
            comes[rows[r, AFTER] + 1] -= nbytes
            if by_row[AWAY_AT_START, r] == 1:
                used -= nbytes
    kernels = kernels.copy()
    for k in range(n):
        used += comes[k]
        most = 0
        for j in range(at[k], at[k + 1]):
            i, w, step = j + k, again[j], steps[j]
            step[STEP_KERNEL], step[ALLOCATED], step[FREED], step[STEP_FOR] = w, allocated[i], freed[i], k
            used += allocated[i]
            most = max(most, used + kernels[WORKSPACE, w])
            used -= freed[i]
        i = at[k + 1] + k
        used += allocated[i]
        by_kernel[PLANNED, k] = max(most, used + kernels[WORKSPACE, k])
        used -= freed[i]
        kernels[DIES, k] = freed[i]
        kernels[LIVE, k] = kernels[LEVEL, k] + kernels[BORN, k] + kernels[WORKSPACE, k]
        kernels[LEVEL, k + 1] = kernels[LEVEL, k] + kernels[BORN, k] - freed[i]
    return kernels, again.size
