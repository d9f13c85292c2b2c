"""Plans with Rerun decisions, compiled: what schedule.lower says of them in bytes, which ``lower_reruns`` adds up."""

from __future__ import annotations

import numpy as np

from simulator.compiled.blocks import B_BYTES, B_FIRST, B_LAST, B_OWNER, walk
from simulator.compiled.jit import jit
from simulator.compiled.lowering import grouped, is_swap, sort

# isort: off
from simulator.compiled.encoding import (
    AFTER, ALLOCATED, AWAY_AT_START, BEFORE, BORN, BY_REMAT, DIES, FREED, KIND, LEVEL, LIVE, PLANNED, RERUN, RETURNS,
    SIZE, STEP_FOR, STEP_KERNEL, TENSOR, WORKSPACE,
)  # fmt: skip
# isort: on


@jit
def _passes(rows, n, steps):  # type: ignore[no-untyped-def]
    """Writes what runs again into ``steps``, in order: those for kernel k are steps[at[k]:at[k + 1]]."""
    keys = np.full(rows.shape[0], -1, np.int64)
    for r in range(keys.size):
        if rows[r, KIND] == RERUN:
            keys[r] = rows[r, BEFORE]
    at, again = grouped(keys, n)
    for i in range(again.size):
        again[i] = rows[again[i], AFTER]
    for k in range(n):
        sort(again, at[k], at[k + 1])
        for i in range(at[k], at[k + 1]):
            steps[i, STEP_KERNEL], steps[i, STEP_FOR] = again[i], k
    return at


@jit
def lower_reruns(kernels, tensors, graph, rows, by_kernel, by_row, steps):  # type: ignore[no-untyped-def]
    """The schedule of a plan of swaps and kernels that run again: by_kernel[PLANNED], ``steps``, and of by_row RETURNS,
    BY_REMAT, AWAY_AT_START.

    Args:
        kernels, tensors, graph, rows, by_kernel, by_row: as in ``score_plans``.
        steps: as there, of one more than the rows at least.

    Returns:
        ``kernels`` with what they free under the plan, and how many steps run again; -1: one of them cannot, because
        what it reads is not there.
    """
    n, m, size = kernels.shape[1] - 1, rows.shape[0], tensors[SIZE]
    at = _passes(rows, n, steps)
    for r in range(m):
        by_row[AWAY_AT_START, r] = 1 if is_swap(rows, r) and rows[r, AFTER] >= rows[r, BEFORE] else 0
    for _ in range(2):
        for r in range(m):
            by_row[RETURNS, r], by_row[BY_REMAT, r] = rows[r, BEFORE], 0
        found = walk(kernels, tensors, graph, rows, by_row, steps, at[n])
        if not found.possible:
            return kernels, -1
        changed = False
        for r in range(m):
            still = 1 if is_swap(rows, r) and found.away[rows[r, TENSOR]] == r else 0
            changed |= still != by_row[AWAY_AT_START, r]
            by_row[AWAY_AT_START, r] = still
        if not changed:
            break
    block = found.block
    allocated, freed = np.zeros(n + at[n], np.int64), np.zeros(n + at[n], np.int64)
    used = 0
    for b in range(block.shape[1]):
        if block[B_OWNER, b] < 0:
            continue
        if block[B_FIRST, b] < 0:
            used += block[B_BYTES, b]
        else:
            allocated[block[B_FIRST, b]] += block[B_BYTES, b]
            freed[block[B_LAST, b]] += block[B_BYTES, b]
    comes = np.zeros(n + 1, np.int64)
    for r in range(m):
        if is_swap(rows, r):
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
            i, step = j + k, steps[j]
            step[ALLOCATED], step[FREED] = allocated[i], freed[i]
            used += allocated[i]
            most = max(most, used + kernels[WORKSPACE, step[STEP_KERNEL]])
            used -= freed[i]
        i = at[k + 1] + k
        used += allocated[i]
        by_kernel[PLANNED, k] = max(most, used + kernels[WORKSPACE, k])
        used -= freed[i]
        kernels[DIES, k] = freed[i]
        kernels[LIVE, k] = kernels[LEVEL, k] + kernels[BORN, k] + kernels[WORKSPACE, k]
        kernels[LEVEL, k + 1] = kernels[LEVEL, k] + kernels[BORN, k] - freed[i]
    return kernels, at[n]
