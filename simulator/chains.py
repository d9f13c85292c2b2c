"""Plans that recompute, compiled: reference.resolve, without the clock.

engine.py calls this from Python only: Numba recompiles a cached function when its own file changes, not when
the file of a function that it calls does.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# isort: off
from simulator.tables import (
    AFTER, ALLOCATED, AWAY_AT_START, BEFORE, BORN, BY_CHAIN, DIES, EXTRA, FIRST, FREED, KIND, LAST, PERSISTENT,
    RECOMPUTE, RESIDENT, RETURNS, SIZE, STEP_AT, STEP_KERNEL, SWAP, TENSOR, WORKSPACE,
)  # fmt: skip
# isort: on


@njit(cache=True)
def recomputes(rows):  # type: ignore[no-untyped-def]
    """Does any of the rows recompute?"""
    for r in range(rows.shape[0]):
        if rows[r, KIND] == RECOMPUTE:
            return True
    return False


@njit(cache=True)
def _present(x, w, k, tensors, graph, write_at, away, rows):  # type: ignore[no-untyped-def]
    """Is tensor x there at kernel k, or on the host, as kernel w read it?"""
    if not tensors[PERSISTENT, x] and not (tensors[FIRST, x] < k <= tensors[LAST, x]):
        return False
    if away[x] >= 0 and rows[away[x], KIND] == RECOMPUTE:
        return False
    for i in range(write_at[x], write_at[x + 1]):
        if w <= graph[i] < k:
            return False
    return True


@njit(cache=True)
def _walk(kernels, tensors, graph, rows, base, need, away_at_start):  # type: ignore[no-untyped-def]
    """reference._walk; see ``resolve``."""
    n, m, n_tensors = kernels.shape[1], rows.shape[0], tensors.shape[1]
    read_at, use_at, result_at, write_at = graph, graph[n + 1 :], graph[2 * n + 2 :], graph[3 * n + 3 :]
    size = tensors[SIZE]
    by_row, by_kernel = np.zeros((m, 3), np.int64), np.zeros((n + 1, 2), np.int64)
    away = np.full(n_tensors, -1, np.int64)
    by_row[:, RETURNS] = rows[:, BEFORE]
    opens = np.full(n, -1, np.int64)
    opens_next = np.full(m, -1, np.int64)
    used = base
    for r in range(m):
        opens_next[r] = opens[rows[r, AFTER]]
        opens[rows[r, AFTER]] = r
        if away_at_start[r]:
            away[rows[r, TENSOR]] = r
            used -= size[rows[r, TENSOR]]
    steps = np.empty((256, 3), np.int64)
    n_steps = 0
    marked = np.full(n, -1, np.int64)  # kernels of the chain of kernel k hold k
    pending, order = np.empty(n, np.int64), np.empty(n, np.int64)
    last, held = np.empty(n_tensors, np.int64), np.full(n_tensors, -1, np.int64)
    stays = np.full(n_tensors, -1, np.int64)
    for k in range(n):
        keep, n_pending, n_order = False, 0, 0
        for i in range(use_at[k], use_at[k + 1]):
            t = graph[i]
            r = away[t]
            if r >= 0 and rows[r, KIND] == RECOMPUTE:
                keep |= rows[r, EXTRA] == 1
                stays[t] = k
                for j in range(write_at[t], write_at[t + 1]):
                    w = graph[j]
                    if w < k and marked[w] != k:
                        marked[w] = k
                        pending[n_pending] = w
                        n_pending += 1
        while n_pending:
            n_pending -= 1
            w = pending[n_pending]
            order[n_order] = w
            n_order += 1
            for i in range(read_at[w], read_at[w + 1]):
                x = graph[i]
                if _present(x, w, k, tensors, graph, write_at, away, rows):
                    continue
                for j in range(write_at[x], write_at[x + 1]):
                    u = graph[j]
                    if u < w and marked[u] != k:
                        marked[u] = k
                        pending[n_pending] = u
                        n_pending += 1
        chain = np.sort(order[:n_order])
        if keep:
            for r in range(m):
                t = rows[r, TENSOR]
                if rows[r, KIND] == RECOMPUTE and away[t] == r:
                    whole = True
                    for j in range(write_at[t], write_at[t + 1]):
                        whole &= graph[j] >= k or marked[graph[j]] == k
                    if whole:
                        stays[t] = k
        for w in chain:
            for i in range(result_at[w], result_at[w + 1]):
                last[graph[i]] = w
            for i in range(read_at[w], read_at[w + 1]):
                x = graph[i]
                if not _present(x, w, k, tensors, graph, write_at, away, rows):
                    last[x] = w
        if n_steps + n_order > steps.shape[0]:
            more = np.empty((2 * (n_steps + n_order), 3), np.int64)
            more[:n_steps] = steps[:n_steps]
            steps = more
        for s in range(n_order):
            w = chain[s]
            allocated, freed = 0, 0
            for i in range(result_at[w], result_at[w + 1]):
                if held[graph[i]] != k:
                    held[graph[i]] = k
                    allocated += size[graph[i]]
            for list_at in (result_at, read_at):
                for i in range(list_at[w], list_at[w + 1]):
                    x = graph[i]
                    if held[x] == k and last[x] == w and stays[x] != k:
                        held[x] = -1
                        freed += size[x]
            steps[n_steps + s, STEP_KERNEL] = w
            steps[n_steps + s, ALLOCATED] = allocated
            steps[n_steps + s, FREED] = freed
        # Swapped tensors that the chain or the kernel needs come back.
        for s in range(n_order):
            w = chain[s]
            for i in range(read_at[w], read_at[w + 1]):
                x = graph[i]
                r = away[x]
                if r >= 0 and rows[r, KIND] == SWAP and _present(x, w, k, tensors, graph, write_at, away, rows):
                    by_row[r, RETURNS], by_row[r, BY_CHAIN] = k, 1
                    away[x] = -1
                    used += size[x]
        for i in range(use_at[k], use_at[k + 1]):
            r = away[graph[i]]
            if r >= 0 and rows[r, KIND] == SWAP:
                by_row[r, RETURNS], by_row[r, BY_CHAIN] = k, 0
                away[graph[i]] = -1
                used += size[graph[i]]
        by_kernel[k, RESIDENT] = used
        highest = 0
        for s in range(n_steps, n_steps + n_order):
            used += steps[s, ALLOCATED]
            highest = max(highest, used + kernels[WORKSPACE, steps[s, STEP_KERNEL]])
            used -= steps[s, FREED]
        if n_order:
            for r in range(m):
                t = rows[r, TENSOR]
                if stays[t] == k and away[t] == r:
                    by_row[r, RETURNS] = k
                    away[t] = -1
        n_steps += n_order
        by_kernel[k + 1, STEP_AT] = n_steps
        used += kernels[BORN, k]
        need[k] = max(highest, used + kernels[WORKSPACE, k])
        used -= kernels[DIES, k]
        r = opens[k]
        while r >= 0:
            away[rows[r, TENSOR]] = r
            used -= size[rows[r, TENSOR]]
            r = opens_next[r]
    for r in range(m):
        by_row[r, AWAY_AT_START] = away[rows[r, TENSOR]] == r
    return by_row, by_kernel, steps


@njit(cache=True)
def resolve(kernels, tensors, graph, rows, base, need):  # type: ignore[no-untyped-def]
    """reference.resolve.

    Args:
        kernels, tensors, graph, rows: as in ``Engine``.
        base: bytes of the persistent tensors.
        need: int64 (kernels,), filled with the planned residency.

    Returns:
        int64 (rows, 3): kernel that ends the gap, whether a chain ends it, whether the tensor is away at the
        start of an iteration; int64 (kernels + 1, 2): index of the first step of its chain, bytes resident;
        int64 (at least all steps, 3): kernel, bytes allocated, bytes freed.
    """
    wraps = rows[:, AFTER] >= rows[:, BEFORE]
    out = _walk(kernels, tensors, graph, rows, base, need, wraps)
    still = out[0][:, AWAY_AT_START] == 1
    if (still != wraps).any():
        out = _walk(kernels, tensors, graph, rows, base, need, still)
    return out
