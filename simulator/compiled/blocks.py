"""Which block of memory each step of a lowered plan uses, compiled: ``schedule._Walk``.

A version of a tensor is a slot of ``graph``: that of the writer in the tensor's list of writers. The versions that
persistent tensors have at the start have no slot. reruns.py adds up the bytes of the blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simulator.compiled.jit import jit, stage
from simulator.compiled.lowering import copied_at, is_swap

# isort: off
from simulator.compiled.encoding import (
    AFTER, AWAY_AT_START, BY_REMAT, FIRST, KIND, PERSISTENT, RECOMPUTE, RERUN, RETURNS, SIZE, STEP_FOR, STEP_KERNEL,
    TENSOR, WORKSPACE, Ints,
)  # fmt: skip
# isort: on

# Rows of the steps and of ``block``. AGAIN: does it run again? FOR: the kernel for which it runs.
S_KERNEL, S_AGAIN, S_FOR, STEP_ROWS = range(4)
B_OWNER, B_BYTES, B_FIRST, B_LAST, BLOCK_ROWS = range(5)
ENDS, OPENS, COPIES = range(3)


class Blocks(NamedTuple):
    """The blocks of memory of an iteration."""

    block: Ints  # (BLOCK_ROWS, blocks): as schedule.Block
    away: Ints  # (tensors,): the row that has a tensor on the host in the end, or -1
    possible: bool  # does every step that runs again find what it reads?


@stage(inline=True)
def slot_before(graph, writes_at, x, w):  # type: ignore[no-untyped-def]
    """The last writer of tensor x before kernel w, as an index of ``graph``; -1 where there is none."""
    slot = -1
    for i in range(writes_at[x], writes_at[x + 1]):
        if graph[i] < w:
            slot = i
    return slot


@jit
def _steps(n, steps, n_steps):  # type: ignore[no-untyped-def]
    """(STEP_ROWS, steps) of n kernels, for which the first ``n_steps`` of ``steps`` run again."""
    step, at = np.empty((STEP_ROWS, n + n_steps), np.int64), 0
    for k in range(n):
        while at < n_steps and steps[at, STEP_FOR] == k:
            step[S_KERNEL, at + k], step[S_AGAIN, at + k], step[S_FOR, at + k] = steps[at, STEP_KERNEL], 1, k
            at += 1
        step[S_KERNEL, at + k], step[S_AGAIN, at + k], step[S_FOR, at + k] = k, 0, k
    return step


@jit
def walk(kernels, tensors, graph, rows, by_row, steps, n_steps):  # type: ignore[no-untyped-def]
    """The blocks of a plan, by what by_row[AWAY_AT_START] and by_row[RETURNS] say.

    Where kernels run again one by one, a pass may fetch a tensor before its gap ends; then this is noted in
    by_row[RETURNS] and by_row[BY_REMAT].

    Args:
        kernels, tensors, graph, rows, by_row: as in ``score_plans``.
        steps: the first ``n_steps`` have STEP_KERNEL and STEP_FOR of what runs again.
    """
    n, n_tensors, m = kernels.shape[1] - 1, tensors.shape[1], rows.shape[0]
    reads_at, results_at, writes_at = graph, graph[n + 1 :], graph[2 * n + 2 :]
    until_at = graph.size - (graph[n] - graph[0]) - graph[0]
    step = _steps(n, steps, n_steps)
    count = n + n_steps
    room = n_tensors + count
    for s in range(count):
        w = step[S_KERNEL, s]
        room += results_at[w + 1] - results_at[w]
    block = np.empty((BLOCK_ROWS, room), np.int64)
    # The block that holds a version; that of a persistent tensor, unless it has been written.
    holder, original = np.full(graph.size, -1, np.int64), np.full(n_tensors, -1, np.int64)
    # Of a pass, where ``mine`` is its kernel: the block that it has written, and the version in it.
    own, held, mine = np.empty(n_tensors, np.int64), np.empty(n_tensors, np.int64), np.full(n_tensors, -1, np.int64)
    dropped, away = np.zeros(n_tensors, np.bool_), np.full(n_tensors, -1, np.int64)
    copied = np.zeros(n_tensors, np.bool_)  # schedule._Walk._copied
    fetched, n_fetched = np.empty(n_tensors, np.int64), 0
    # Rows by the kernel that ends, opens, copies: the first one, and the one after a row.
    heads, following = np.full((3, n), -1, np.int64), np.empty((3, m), np.int64)
    one_by_one = False
    for r in range(m):
        if rows[r, KIND] == RERUN:
            one_by_one = True
            continue
        end, after = by_row[RETURNS, r], rows[r, AFTER]
        following[ENDS, r], heads[ENDS, end] = heads[ENDS, end], r
        following[OPENS, r], heads[OPENS, after] = heads[OPENS, after], r
        if is_swap(rows, r):
            t, copy = rows[r, TENSOR], copied_at(rows, r)
            following[COPIES, r], heads[COPIES, copy] = heads[COPIES, copy], r
            if by_row[AWAY_AT_START, r]:
                away[t] = r
            copied[t] |= by_row[AWAY_AT_START, r] == 1 or copy > after
    possible = True
    n_blocks = 0
    for x in range(n_tensors):
        if tensors[PERSISTENT, x]:
            block[B_OWNER, n_blocks], block[B_BYTES, n_blocks] = x, tensors[SIZE, x]
            block[B_FIRST, n_blocks] = block[B_LAST, n_blocks] = -1
            original[x] = n_blocks
            n_blocks += 1
    for s in range(count):
        w, again, k = step[S_KERNEL, s], step[S_AGAIN, s] == 1, step[S_FOR, s]
        alone = again and one_by_one
        if kernels[WORKSPACE, w]:
            block[B_OWNER, n_blocks], block[B_BYTES, n_blocks] = -1 - w, kernels[WORKSPACE, w]
            block[B_FIRST, n_blocks] = block[B_LAST, n_blocks] = s
            n_blocks += 1
        if not again:  # what its pass has fetched or recovered stays
            for i in range(n_fetched):
                away[fetched[i]], copied[fetched[i]] = -1, False
            n_fetched = 0
            r = heads[ENDS, k]
            while r >= 0:
                t = rows[r, TENSOR]
                if rows[r, KIND] != RECOMPUTE:
                    if away[t] == r:
                        away[t], copied[t] = -1, False
                elif dropped[t]:
                    holder[slot_before(graph, writes_at, t, k)] = own[t]
                    dropped[t] = False
                r = following[ENDS, r]
        for i in range(reads_at[w], reads_at[w + 1]):
            x = graph[i]
            slot = slot_before(graph, writes_at, x, w)
            there = holder[slot] if slot >= 0 else original[x]
            if alone:
                ours = mine[x] == k and held[x] == slot
                if there >= 0 and (tensors[PERSISTENT, x] or not ours):
                    r = away[x]
                    if r >= 0 and slot == slot_before(graph, writes_at, x, k):
                        if by_row[BY_REMAT, r] == 0:
                            fetched[n_fetched] = x
                            n_fetched += 1
                        by_row[RETURNS, r], by_row[BY_REMAT, r] = k, 1
                else:
                    possible &= ours
                    there = own[x] if ours else 0
            elif again and (dropped[x] or k > graph[i + until_at]):
                there = own[x]
            block[B_LAST, there] = s
        for i in range(results_at[w], results_at[w + 1]):
            x = graph[i]
            before = slot_before(graph, writes_at, x, w)
            after = before + 1 if before >= 0 else writes_at[x]
            ours = again and mine[x] == k
            if ours:
                there = own[x]
            elif again or (not tensors[PERSISTENT, x] and tensors[FIRST, x] == w):
                block[B_OWNER, n_blocks], block[B_BYTES, n_blocks] = x, tensors[SIZE, x]
                block[B_FIRST, n_blocks] = s
                there = n_blocks
                n_blocks += 1
            else:
                there = holder[before] if before >= 0 else original[x]
            if again:
                replaced = one_by_one and not tensors[PERSISTENT, x] and not copied[x]
                if alone and not tensors[PERSISTENT, x] and before >= 0:  # it goes on writing
                    possible &= ours and held[x] == before
                if replaced and ours and holder[held[x]] == there:
                    holder[held[x]] = -1
                mine[x], own[x], held[x] = k, there, after
                if replaced:
                    holder[after] = there
            else:
                if before >= 0:
                    holder[before] = -1
                original[x] = -1
                holder[after] = there
            block[B_LAST, there] = s
        if again:
            continue
        r = heads[OPENS, k]
        while r >= 0:
            t = rows[r, TENSOR]
            if rows[r, KIND] == RECOMPUTE:
                slot = slot_before(graph, writes_at, t, k + 1)
                block[B_LAST, holder[slot] if slot >= 0 else original[t]] = s
                holder[slot] = -1
                dropped[t] = True
            else:
                away[t] = r
            r = following[OPENS, r]
        r = heads[COPIES, k]
        while r >= 0:
            copied[rows[r, TENSOR]] = True
            r = following[COPIES, r]
    for x in range(n_tensors):
        if tensors[PERSISTENT, x]:
            slot = slot_before(graph, writes_at, x, n)
            block[B_LAST, holder[slot] if slot >= 0 else original[x]] = count
    return Blocks(block[:, :n_blocks], away, possible)
