"""Plans with Recompute decisions, compiled: what schedule.lower says of them in bytes.

``lower_recomputations`` walks one iteration by the plan. ``_walk`` is that walk, over the kernels at which a gap opens
or ends; the functions above it are what it does at one of them, in this order.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit

# isort: off
from simulator.compiled.encoding import (
    AFTER, ALLOCATED, AWAY_AT_START, AWAY_BYTES, BEFORE, BORN, BY_REMAT, EXTRA, FIRST, FREED, KIND, LAST, LIVE,
    PERSISTENT, RECOMPUTE, RERUN, RETURNS, SIZE, STEP_AT, STEP_KERNEL, SWAP, TENSOR, WHEN, WORKSPACE,
)  # fmt: skip
# isort: on

_IDLE = -2  # in the lists by kernel: no gap opens or ends there


@jit
def recomputes(rows):  # type: ignore[no-untyped-def]
    """The kind of rows by which a plan recomputes: RECOMPUTE, RERUN, or SWAP where it does not."""
    for r in range(rows.shape[0]):
        if rows[r, KIND] == RECOMPUTE or rows[r, KIND] == RERUN:
            return rows[r, KIND]
    return SWAP


@jit
def _dropped(rows, away, x):  # type: ignore[no-untyped-def]
    """Is tensor x away, and not on the host?"""
    dropped = False
    for _ in range(away[x] >= 0):
        dropped = rows[away[x], KIND] == RECOMPUTE
    return dropped


@jit
def _present(tensors, graph, writes_at, rows, away, x, w, k):  # type: ignore[no-untyped-def]
    """schedule.present: is tensor x there at kernel k, or on the host, as kernel w read it?"""
    there = (tensors[PERSISTENT, x] != 0) | ((tensors[FIRST, x] < k) & (k <= tensors[LAST, x]))
    there &= not _dropped(rows, away, x)
    for i in range(writes_at[x], writes_at[x + 1] if there else writes_at[x]):
        there &= not w <= graph[i] < k
    return there


@jit
def _mark(graph, begin, end, before, marked, k, pending, n_pending):  # type: ignore[no-untyped-def]
    """Adds the writers graph[begin:end] that run before ``before`` to ``pending``, each once for kernel k."""
    for i in range(begin, end):
        w = graph[i]
        if w < before and marked[w] != k:
            marked[w] = k
            pending[n_pending] = w
            n_pending += 1
    return n_pending


@jit
def _targets(graph, writes_at, rows, away, ending, next_end, k, marked, pending, stays):  # type: ignore[no-untyped-def]
    """Makes the writers of what was dropped and is back at kernel k pending, the rows from ``ending`` on; returns how
    many they are, and whether one of the rows has ``keep``."""
    n_pending, keep, r = 0, False, ending
    while r >= 0:
        t = rows[r, TENSOR]
        if rows[r, KIND] == RECOMPUTE and away[t] == r:
            keep |= rows[r, EXTRA] == 1
            stays[t] = k
            n_pending = _mark(graph, writes_at[t], writes_at[t + 1], k, marked, k, pending, n_pending)
        r = next_end[r]
    return n_pending, keep


@jit
def _trace_back(tensors, graph, reads_at, writes_at, rows, away, k, marked, pending, n_pending, order):  # type: ignore[no-untyped-def]
    """All that runs again for kernel k, into ``order``: what is pending, and the writers of what that reads and is not
    present; returns how many."""
    n_order = 0
    while n_pending:
        n_pending -= 1
        w = pending[n_pending]
        order[n_order] = w
        n_order += 1
        for i in range(reads_at[w], reads_at[w + 1]):
            x = graph[i]
            if not _present(tensors, graph, writes_at, rows, away, x, w, k):
                n_pending = _mark(graph, writes_at[x], writes_at[x + 1], w, marked, k, pending, n_pending)
    return n_order


@jit
def _fetch(  # type: ignore[no-untyped-def]
    tensors, graph, reads_at, results_at, writes_at, rows, away, k, marked, chain, keep, stays, last, endings,
):  # fmt: skip
    """Notes where in the chain each tensor is used last and which dropped ones stay with ``keep``; what it reads from
    the host comes back for it; returns these bytes."""
    fetched = 0
    for w in chain:
        for i in range(results_at[w], results_at[w + 1]):
            x = graph[i]
            last[x] = w
            if keep and _dropped(rows, away, x):
                whole = True
                for j in range(writes_at[x], writes_at[x + 1]):
                    whole &= graph[j] >= k or marked[graph[j]] == k
                if whole:
                    stays[x] = k
        for i in range(reads_at[w], reads_at[w + 1]):
            x = graph[i]
            if not _present(tensors, graph, writes_at, rows, away, x, w, k):
                last[x] = w
            elif away[x] >= 0:
                endings[away[x], RETURNS], endings[away[x], BY_REMAT] = k, 1
                away[x] = -1
                fetched += tensors[SIZE, x]
    return fetched


@jit
def _lay_out(kernels, tensors, graph, reads_at, results_at, k, chain, stays, last, held, steps, n_steps):  # type: ignore[no-untyped-def]
    """Writes the steps of a chain; returns the bytes that it adds to those that were there: at most, and in the end."""
    size = tensors[SIZE]
    most, stay = 0, 0
    for w in chain:
        allocated, freed = 0, 0
        for i in range(results_at[w], results_at[w + 1]):
            x = graph[i]
            if held[x] != k:
                held[x] = k
                allocated += size[x]
        for list_at in (results_at, reads_at):
            for i in range(list_at[w], list_at[w + 1]):
                x = graph[i]
                if held[x] == k and last[x] == w and stays[x] != k:
                    held[x] = -1
                    freed += size[x]
        steps[n_steps, STEP_KERNEL], steps[n_steps, ALLOCATED], steps[n_steps, FREED] = w, allocated, freed
        n_steps += 1
        most = max(most, stay + allocated + kernels[WORKSPACE, w])
        stay += allocated - freed
    return most, stay


@jit
def _walk(kernels, tensors, graph, rows, residency, away_at_start):  # type: ignore[no-untyped-def]
    """schedule._Walk, but only the kernels at which a gap ends or opens are visited one by one."""
    n, m, n_tensors = kernels.shape[1], rows.shape[0], tensors.shape[1]
    reads_at, results_at, writes_at = graph, graph[n + 1 :], graph[2 * n + 2 :]
    size, live = tensors[SIZE], kernels[LIVE]
    endings, at_kernel = np.zeros((m, 3), np.int64), np.empty((2, n + 1), np.int64)
    step_at, away_at = at_kernel[STEP_AT], at_kernel[AWAY_BYTES]
    away = np.full(n_tensors, -1, np.int64)  # the row that has the tensor away
    # Lists of rows by the kernel before which they end and after which they open.
    ends, opens = np.full(n, _IDLE, np.int64), np.full(n, -1, np.int64)
    following = np.empty((2, m), np.int64)
    next_end, next_open = following[0], following[1]
    away_bytes = 0
    for r in range(m):
        t, after, before = rows[r, TENSOR], rows[r, AFTER], rows[r, BEFORE]
        if rows[r, KIND] == RECOMPUTE and rows[r, WHEN] >= 0:
            before = rows[r, WHEN]
        endings[r, RETURNS] = before
        next_end[r], ends[before] = ends[before], r
        next_open[r], opens[after] = opens[after], r
        ends[after] = max(ends[after], -1)
        if away_at_start[r]:
            away[t] = r
            away_bytes += size[t]
    steps = np.empty((256, 3), np.int64)
    n_steps = 0
    # The kernels of the chain of kernel k are marked k; its tensors that are held, that stay; who uses them last.
    marked, held, stays = np.full(n, -1, np.int64), np.full(n_tensors, -1, np.int64), np.full(n_tensors, -1, np.int64)
    pending, order, last = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n_tensors, np.int64)
    begin = 0  # the first kernel that is not done yet
    for k in range(n):
        if ends[k] == _IDLE:
            continue
        for j in range(begin, k + 1):
            step_at[j], away_at[j], residency[j] = n_steps, away_bytes, live[j] - away_bytes
        begin = k + 1
        n_pending, keep = _targets(graph, writes_at, rows, away, ends[k], next_end, k, marked, pending, stays)
        n_order = _trace_back(tensors, graph, reads_at, writes_at, rows, away, k, marked, pending, n_pending, order)
        chain = order[:n_order]
        if n_order:
            if n_order > 1:
                chain.sort()
            away_bytes -= _fetch(
                tensors, graph, reads_at, results_at, writes_at, rows, away, k, marked, chain, keep, stays, last,
                endings,
            )  # fmt: skip
        # What kernel k itself uses comes back.
        r = ends[k]
        while r >= 0:
            t = rows[r, TENSOR]
            if away[t] == r and rows[r, KIND] != RECOMPUTE:
                away[t] = -1
                away_bytes -= size[t]
            r = next_end[r]
        away_at[k], residency[k] = away_bytes, live[k] - away_bytes
        if n_order:
            if n_steps + n_order > steps.shape[0]:
                more = np.empty((2 * (n_steps + n_order), 3), np.int64)
                more[:n_steps] = steps[:n_steps]
                steps = more
            most, stay = _lay_out(
                kernels, tensors, graph, reads_at, results_at, k, chain, stays, last, held, steps, n_steps
            )
            n_steps += n_order
            # What was dropped and stays is there again.
            for w in chain:
                for i in range(results_at[w], results_at[w + 1]):
                    x = graph[i]
                    if away[x] >= 0 and stays[x] == k:
                        endings[away[x], RETURNS] = k
                        away[x] = -1
            residency[k] += max(stay, most - kernels[BORN, k] - kernels[WORKSPACE, k])
            away_bytes -= stay
        r = opens[k]
        while r >= 0:
            away[rows[r, TENSOR]] = r
            away_bytes += size[rows[r, TENSOR]]
            r = next_open[r]
    for j in range(begin, n):
        step_at[j], away_at[j], residency[j] = n_steps, away_bytes, live[j] - away_bytes
    step_at[n] = n_steps
    for r in range(m):
        endings[r, AWAY_AT_START] = away[rows[r, TENSOR]] == r
    return endings, at_kernel, steps


@jit
def lower_recomputations(kernels, tensors, graph, rows, residency):  # type: ignore[no-untyped-def]
    """The schedule of a plan of swaps and recomputation.

    Args:
        kernels, tensors, graph, rows: as in ``Engine``.
        residency: int64 (kernels,), filled with the planned residency.

    Returns:
        ``kernels``; int64 (rows, 3): kernel that ends the gap, whether a rematerialisation ends it, whether the tensor
        is away at the start of an iteration; int64 (2, kernels + 1): index of the first step that runs again for the
        kernel, bytes that are away; int64 (at least all steps, 3): kernel, bytes allocated, bytes freed.
    """
    wraps = rows[:, AFTER] >= rows[:, BEFORE]
    out = _walk(kernels, tensors, graph, rows, residency, wraps)
    still = out[0][:, AWAY_AT_START] == 1
    if (still != wraps).any():
        out = _walk(kernels, tensors, graph, rows, residency, still)
    return kernels, out[0], out[1], out[2]
