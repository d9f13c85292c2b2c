"""Plans that recompute, compiled: reference.resolve, without the clock.

engine.py calls this from Python only: Numba recompiles a cached function when its own file changes, not when
the file of a function that it calls does.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# isort: off
from simulator.compiled.encoding import (
    AFTER, ALLOCATED, AWAY_AT_START, BEFORE, BORN, BY_REMAT, EXTRA, FIRST, FREED, GONE, KIND, LAST, LIVE, PERSISTENT,
    RECOMPUTE, RETURNS, SIZE, STEP_AT, STEP_KERNEL, TENSOR, WORKSPACE,
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
def _walk(kernels, tensors, graph, rows, need, away_at_start):  # type: ignore[no-untyped-def]
    """reference._walk; see ``resolve``. Only the kernels at which a gap ends or opens are visited one by one."""
    n, m, n_tensors = kernels.shape[1], rows.shape[0], tensors.shape[1]
    read_at, result_at, write_at = graph, graph[n + 1 :], graph[2 * n + 2 :]
    size, load = tensors[SIZE], kernels[LIVE]
    by_row, by_kernel = np.zeros((m, 3), np.int64), np.empty((2, n + 1), np.int64)
    step_at, gone_at = by_kernel[STEP_AT], by_kernel[GONE]
    away = np.full(n_tensors, -1, np.int64)  # the row that has the tensor away
    # Lists of rows by the kernel before which they end and after which they open; -2: neither.
    ends, opens = np.full(n, -2, np.int64), np.full(n, -1, np.int64)
    following = np.empty((2, m), np.int64)
    next_end, next_open = following[0], following[1]
    gone = 0  # bytes that are away
    for r in range(m):
        t, after, before = rows[r, TENSOR], rows[r, AFTER], rows[r, BEFORE]
        by_row[r, RETURNS] = before
        next_end[r], ends[before] = ends[before], r
        next_open[r], opens[after] = opens[after], r
        ends[after] = max(ends[after], -1)
        if away_at_start[r]:
            away[t] = r
            gone += size[t]
    steps = np.empty((256, 3), np.int64)
    n_steps = 0
    marked = np.full(n, -1, np.int64)  # kernels of the chain of kernel k hold k
    pending, order = np.empty(n, np.int64), np.empty(n, np.int64)
    last, held = np.empty(n_tensors, np.int64), np.full(n_tensors, -1, np.int64)
    stays = np.full(n_tensors, -1, np.int64)
    begin = 0  # the first kernel that is not done yet
    for k in range(n):
        if ends[k] == -2:
            continue
        for j in range(begin, k + 1):
            step_at[j], gone_at[j], need[j] = n_steps, gone, load[j] - gone
        begin = k + 1
        n_pending, n_order, keep = 0, 0, False
        r = ends[k]
        while r >= 0:
            t = rows[r, TENSOR]
            if rows[r, KIND] == RECOMPUTE and away[t] == r:
                keep |= rows[r, EXTRA] == 1
                stays[t] = k
                for j in range(write_at[t], write_at[t + 1]):
                    w = graph[j]
                    if w < k and marked[w] != k:
                        marked[w] = k
                        pending[n_pending] = w
                        n_pending += 1
            r = next_end[r]
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
        if n_order:
            chain = order[:n_order]
            if n_order > 1:
                chain.sort()
            for w in chain:
                for i in range(result_at[w], result_at[w + 1]):
                    x = graph[i]
                    last[x] = w
                    if keep and away[x] >= 0 and rows[away[x], KIND] == RECOMPUTE:
                        whole = True
                        for j in range(write_at[x], write_at[x + 1]):
                            whole &= graph[j] >= k or marked[graph[j]] == k
                        if whole:
                            stays[x] = k
                for i in range(read_at[w], read_at[w + 1]):
                    x = graph[i]
                    if not _present(x, w, k, tensors, graph, write_at, away, rows):
                        last[x] = w
                    elif away[x] >= 0:  # on the host: it comes back for the chain
                        by_row[away[x], RETURNS], by_row[away[x], BY_REMAT] = k, 1
                        away[x] = -1
                        gone -= size[x]
        r = ends[k]
        while r >= 0:
            t = rows[r, TENSOR]
            if away[t] == r and rows[r, KIND] != RECOMPUTE:
                away[t] = -1
                gone -= size[t]
            r = next_end[r]
        gone_at[k], need[k] = gone, load[k] - gone
        if n_order:
            if n_steps + n_order > steps.shape[0]:
                more = np.empty((2 * (n_steps + n_order), 3), np.int64)
                more[:n_steps] = steps[:n_steps]
                steps = more
            highest, back = 0, 0  # bytes beside those that were there: at most, and in the end
            for w in chain:
                allocated, freed = 0, 0
                for i in range(result_at[w], result_at[w + 1]):
                    x = graph[i]
                    if held[x] != k:
                        held[x] = k
                        allocated += size[x]
                for list_at in (result_at, read_at):
                    for i in range(list_at[w], list_at[w + 1]):
                        x = graph[i]
                        if held[x] == k and last[x] == w and stays[x] != k:
                            held[x] = -1
                            freed += size[x]
                steps[n_steps, STEP_KERNEL], steps[n_steps, ALLOCATED], steps[n_steps, FREED] = w, allocated, freed
                n_steps += 1
                highest = max(highest, back + allocated + kernels[WORKSPACE, w])
                back += allocated - freed
            for w in chain:
                for i in range(result_at[w], result_at[w + 1]):
                    x = graph[i]
                    if away[x] >= 0 and stays[x] == k:
                        by_row[away[x], RETURNS] = k
                        away[x] = -1
            own = kernels[BORN, k] + kernels[WORKSPACE, k]
            need[k] += max(back, highest - own)
            gone -= back
        r = opens[k]
        while r >= 0:
            away[rows[r, TENSOR]] = r
            gone += size[rows[r, TENSOR]]
            r = next_open[r]
    for j in range(begin, n):
        step_at[j], gone_at[j], need[j] = n_steps, gone, load[j] - gone
    step_at[n] = n_steps
    for r in range(m):
        by_row[r, AWAY_AT_START] = away[rows[r, TENSOR]] == r
    return by_row, by_kernel, steps


@njit(cache=True)
def resolve(kernels, tensors, graph, rows, need):  # type: ignore[no-untyped-def]
    """reference.resolve.

    Args:
        kernels, tensors, graph, rows: as in ``Engine``.
        need: int64 (kernels,), filled with the planned residency.

    Returns:
        int64 (rows, 3): kernel that ends the gap, whether a chain ends it, whether the tensor is away at the
        start of an iteration; int64 (2, kernels + 1): index of the first step of its chain, bytes that are away;
        int64 (at least all steps, 3): kernel, bytes allocated, bytes freed.
    """
    wraps = rows[:, AFTER] >= rows[:, BEFORE]
    out = _walk(kernels, tensors, graph, rows, need, wraps)
    still = out[0][:, AWAY_AT_START] == 1
    if (still != wraps).any():
        out = _walk(kernels, tensors, graph, rows, need, still)
    return out
