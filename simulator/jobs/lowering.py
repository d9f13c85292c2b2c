"""Plans as tables, compiled: what ``schedule.lower`` finds, from what the compiled lowering says of a plan.

``walk`` goes over the steps of an iteration and finds which block each of them uses; ``lists`` and ``table_of`` make a
table of it (tables.py). A version of a tensor is a slot of ``graph``, as in ``compiled/reruns.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# isort: off
from simulator.compiled.encoding import (
    AFTER, AWAY_AT_START, BY_REMAT, D2H, DURATION, EXTRA, FIRST, H2D, KIND, LAST, PERSISTENT, PLANNED, RECOMPUTE,
    RERUN, RETURNS, SIZE, STEP_FOR, STEP_KERNEL, SYNC_SWAP, TENSOR, WHEN, WORKSPACE, Ints, rows_of,
)  # fmt: skip

# isort: on
from simulator.compiled.engine import Engine
from simulator.compiled.jit import jit
from simulator.compiled.lowering import copied_at, host_load
from simulator.compiled.reruns import slot_before
from simulator.jobs.tables import AWAY, COPIED, OTHERWISE
from simulator.plan import Plan

B_OWNER, B_BYTES, B_FIRST, B_LAST = range(4)
S_KERNEL, S_AGAIN, S_BEFORE = range(3)
LISTS = ("waits", "touched", "writes", "copies", "opens", "touches")


@jit
def _sorted_in(values, begin, end):  # type: ignore[no-untyped-def]
    """Sorts values[begin:end]: a few, by insertion."""
    for i in range(begin + 1, end):
        value, at = values[i], i
        while at > begin and values[at - 1] > value:
            values[at] = values[at - 1]
            at -= 1
        values[at] = value


@jit
def _grouped(keys, n):  # type: ignore[no-untyped-def]
    """Indices by their key from 0 to n - 1, in order: those of key k are items[at[k]:at[k + 1]]; -1 is no key."""
    at = np.zeros(n + 1, np.int64)
    for key in keys:
        if key >= 0:
            at[key + 1] += 1
    for k in range(n):
        at[k + 1] += at[k]
    items, filled = np.empty(at[n], np.int64), at.copy()
    for i in range(keys.size):
        if keys[i] >= 0:
            items[filled[keys[i]]] = i
            filled[keys[i]] += 1
    return at, items


@jit
def _on_its_way(rows, away, r, k):  # type: ignore[no-untyped-def]
    """schedule._Walk._copied: has the copy of row r been enqueued before the pass of kernel k, and is it not back?"""
    copy, after = copied_at(rows, r), rows[r, AFTER]
    between = copy < k and k <= after if copy <= after else not (after < k and k <= copy)
    return away[rows[r, TENSOR]] == r or between


@jit
def walk(kernels, tensors, graph, rows, by_row, steps, n_steps):  # type: ignore[no-untyped-def]
    """The steps and blocks of a lowered plan.

    Returns:
        int64 (3, steps): kernel, does it run again, for which kernel. int64 (4, blocks): owner, bytes, first and last
        step. Where the pairs of a step begin in the last array, int64 (steps + 1,). Per row the block that it moves.
        int64 (pairs, 2): tensor and block that a step uses.
    """
    n, n_tensors, m = kernels.shape[1] - 1, tensors.shape[1], rows.shape[0]
    reads_at, results_at, writes_at = graph, graph[n + 1 :], graph[2 * n + 2 :]
    until_at = graph.size - (graph[n] - graph[0]) - graph[0]
    count = n + n_steps
    step = np.empty((3, count), np.int64)
    room = n_tensors + count
    pairs = 0
    at = 0
    for k in range(n):
        while at < n_steps and steps[at, STEP_FOR] == k:
            step[S_KERNEL, at + k], step[S_AGAIN, at + k], step[S_BEFORE, at + k] = steps[at, STEP_KERNEL], 1, k
            at += 1
        step[S_KERNEL, at + k], step[S_AGAIN, at + k], step[S_BEFORE, at + k] = k, 0, k
    for w in step[S_KERNEL]:
        results = results_at[w + 1] - results_at[w]
        room += results
        pairs += results + reads_at[w + 1] - reads_at[w]
    block, uses = np.empty((4, room), np.int64), np.empty((pairs, 2), np.int64)
    uses_at, moved = np.zeros(count + 1, np.int64), np.full(m, -1, np.int64)
    holder, original = np.full(graph.size, -1, np.int64), np.full(n_tensors, -1, np.int64)
    own, held, mine = np.empty(n_tensors, np.int64), np.empty(n_tensors, np.int64), np.full(n_tensors, -1, np.int64)
    dropped, away = np.zeros(n_tensors, np.bool_), np.full(n_tensors, -1, np.int64)
    copied = np.zeros(n_tensors, np.bool_)
    one_by_one = False
    for r in range(m):
        one_by_one |= rows[r, KIND] == RERUN
        if rows[r, KIND] & 1 == 0 and by_row[AWAY_AT_START, r]:
            away[rows[r, TENSOR]] = r
    ends, opens = np.full(m, -1, np.int64), np.full(m, -1, np.int64)
    for r in range(m):
        if rows[r, KIND] != RERUN:
            ends[r], opens[r] = by_row[RETURNS, r], rows[r, AFTER]
    ends_at, ends = _grouped(ends, n)
    opens_at, opens = _grouped(opens, n)
    n_blocks = n_uses = 0
    for x in range(n_tensors):
        if tensors[PERSISTENT, x]:
            block[B_OWNER, n_blocks], block[B_BYTES, n_blocks] = x, tensors[SIZE, x]
            block[B_FIRST, n_blocks] = block[B_LAST, n_blocks] = -1
            original[x] = n_blocks
            n_blocks += 1
    passes = -1  # the kernel whose pass has begun
    for s in range(count):
        w, again, k = step[S_KERNEL, s], step[S_AGAIN, s], step[S_BEFORE, s]
        if again and one_by_one and passes != k:
            passes = k
            copied[:] = False
            for r in range(m):
                if rows[r, KIND] & 1 == 0 and _on_its_way(rows, away, r, k):
                    copied[rows[r, TENSOR]] = True
        if kernels[WORKSPACE, w]:
            block[B_OWNER, n_blocks], block[B_BYTES, n_blocks] = -1 - w, kernels[WORKSPACE, w]
            block[B_FIRST, n_blocks] = block[B_LAST, n_blocks] = s
            n_blocks += 1
        if not again:  # what its pass has recovered stays
            for i in range(ends_at[k], ends_at[k + 1]):
                r = ends[i]
                t = rows[r, TENSOR]
                if rows[r, KIND] != RECOMPUTE:
                    away[t] = -1 if away[t] == r else away[t]
                elif dropped[t]:
                    holder[slot_before(graph, writes_at, t, k)] = own[t]
                    dropped[t] = False
        for i in range(reads_at[w], reads_at[w + 1]):
            x = graph[i]
            slot = slot_before(graph, writes_at, x, w)
            there = holder[slot] if slot >= 0 else original[x]
            if again and one_by_one:
                if there < 0 or (not tensors[PERSISTENT, x] and mine[x] == k and held[x] == slot):
                    there = own[x]
            elif again and (dropped[x] or k > graph[i + until_at]):
                there = own[x]
            block[B_LAST, there] = s
            uses[n_uses, 0], uses[n_uses, 1] = x, there
            n_uses += 1
        for i in range(results_at[w], results_at[w + 1]):
            x = graph[i]
            before, after = slot_before(graph, writes_at, x, w), slot_before(graph, writes_at, x, w + 1)
            fresh = not again and not tensors[PERSISTENT, x] and tensors[FIRST, x] == w
            if fresh or (again and mine[x] != k):
                block[B_OWNER, n_blocks], block[B_BYTES, n_blocks] = x, tensors[SIZE, x]
                block[B_FIRST, n_blocks] = s
                there = n_blocks
                n_blocks += 1
            elif again:
                there = own[x]
            else:
                there = holder[before] if before >= 0 else original[x]
                if before >= 0:
                    holder[before] = -1
                else:
                    original[x] = -1
            if not again:
                holder[after] = there
            else:
                replaced = one_by_one and not tensors[PERSISTENT, x] and not copied[x]
                if replaced and mine[x] == k and holder[held[x]] == there:
                    holder[held[x]] = -1
                mine[x], own[x], held[x] = k, there, after
                if replaced:
                    holder[after] = there
            block[B_LAST, there] = s
            uses[n_uses, 0], uses[n_uses, 1] = x, there
            n_uses += 1
        uses_at[s + 1] = n_uses
        if again:
            continue
        for i in range(opens_at[k], opens_at[k + 1]):
            r = opens[i]
            t = rows[r, TENSOR]
            slot = slot_before(graph, writes_at, t, k + 1)
            there = holder[slot] if slot >= 0 else original[t]
            if rows[r, KIND] == RECOMPUTE:
                block[B_LAST, there] = s
                holder[slot] = -1
                dropped[t] = True
            else:
                moved[r] = there
                away[t] = r
    for x in range(n_tensors):
        if tensors[PERSISTENT, x]:
            slot = slot_before(graph, writes_at, x, n)
            block[B_LAST, holder[slot] if slot >= 0 else original[x]] = count
    return step, block[:, :n_blocks], uses_at, moved, uses


@jit
def lists(tensors, graph, rows, order, by_row, step, block, uses_at, moved, uses):  # type: ignore[no-untyped-def]
    """The LISTS of a table, from its beginning on; where each of them begins, int64 (6,); and per step the bytes that
    it needs with everything else away.

    Args:
        order: the rows that are swaps, by tensor and opening.
        step, block, uses_at, moved, uses: what ``walk`` returns.
    """
    count, n_blocks, n_rows = step.shape[1], block.shape[1], order.size
    n = count - step[S_AGAIN].sum()
    results_at = graph[n + 1 :]
    swapped, least = np.zeros(tensors.shape[1], np.bool_), np.zeros(count, np.int64)
    # Swaps, as indices of ``order``: by the kernel whose pass fetches them, that copies, that opens.
    keys = np.empty((3, n_rows), np.int64)
    for i in range(n_rows):
        r = order[i]
        swapped[rows[r, TENSOR]] = True
        keys[0, i] = by_row[RETURNS, r] if by_row[BY_REMAT, r] else -1
        keys[1, i], keys[2, i] = copied_at(rows, r), rows[r, AFTER]
    fetched_at, fetched = _grouped(keys[0], n)
    copies_at, copies = _grouped(keys[1], n)
    opens_at, opens = _grouped(keys[2], n)
    dies_at, dies = _grouped(np.where(block[B_LAST] < count, block[B_LAST], -1), count)
    size = 5 * (count + 1) + 8 * uses.shape[0] + 4 * n_blocks + 8 * n_rows + 1
    for s in range(count):  # a pass waits at every step for what it fetches
        k = step[S_BEFORE, s]
        size += (fetched_at[k + 1] - fetched_at[k]) * step[S_AGAIN, s]
    out, where, at = np.zeros(size, np.int64), np.zeros(6, np.int64), 0
    touches, seen = np.zeros(n_blocks, np.int64), np.full(n_blocks, -1, np.int64)
    for b in range(n_blocks):
        if block[B_OWNER, b] < 0:
            least[block[B_FIRST, b]] += block[B_BYTES, b]
    for which in range(5):
        where[which] = head = at
        at += count + 1
        for s in range(count):
            out[head + s] = begin = at
            w, again, k = step[S_KERNEL, s], step[S_AGAIN, s], step[S_BEFORE, s]
            first, reads, end = uses_at[s], uses_at[s + 1] - (results_at[w + 1] - results_at[w]), uses_at[s + 1]
            if which == 0 and again:
                for i in range(fetched_at[k], fetched_at[k + 1]):
                    out[at] = rows[order[fetched[i]], TENSOR]
                    at += 1
            elif which == 0:
                for i in range(first, end):
                    new = swapped[uses[i, 0]]
                    for j in range(first, i):
                        new &= uses[j, 0] != uses[i, 0]
                    if new:
                        out[at] = uses[i, 0]
                        at += 1
                _sorted_in(out, begin, at)
            elif which == 1:
                for i in range(first, end):
                    if seen[uses[i, 1]] != s:
                        seen[uses[i, 1]], out[at] = s, uses[i, 1]
                        at += 1
                for i in range(dies_at[s], dies_at[s + 1]):
                    b = dies[i]
                    if block[B_OWNER, b] >= 0 and seen[b] != s:
                        seen[b], out[at] = s, b
                        at += 1
                for some_at, some in ((copies_at, copies), (opens_at, opens)):
                    for i in range(some_at[k], some_at[k + 1]):
                        b = moved[order[some[i]]]
                        if not again and seen[b] != s:
                            seen[b], out[at] = s, b
                            at += 1
                _sorted_in(out, begin, at)
                for i in range(begin, at):
                    least[s] += block[B_BYTES, out[i]]
                    touches[out[i]] += 1
                for i in range(fetched_at[k], fetched_at[k + 1]):
                    b = moved[order[fetched[i]]]
                    if again and seen[b] != s:
                        least[s] += block[B_BYTES, b]
            elif which == 2 and not again:
                for i in range(reads, end):
                    if swapped[uses[i, 0]] or tensors[PERSISTENT, uses[i, 0]]:
                        out[at], out[at + 1] = uses[i, 0], uses[i, 1]
                        at += 2
                for i in range(first, end):
                    x = uses[i, 0]
                    last = swapped[x] and not tensors[PERSISTENT, x] and tensors[LAST, x] == w
                    for j in range(first, i):
                        last &= uses[j, 0] != x
                    if last:
                        out[at], out[at + 1] = x, -1
                        at += 2
            elif which > 2 and not again:
                some_at, some = (copies_at, copies) if which == 3 else (opens_at, opens)
                for i in range(some_at[k], some_at[k + 1]):
                    out[at] = some[i]
                    at += 1
        out[head + count] = at
    where[5] = head = at
    at += n_blocks + 1
    for b in range(n_blocks):
        out[head + b] = at
        at += touches[b]
        touches[b] = out[head + b]
    out[head + n_blocks] = at
    for s in range(count):
        for i in range(out[where[1] + s], out[where[1] + s + 1]):
            out[touches[out[i]]] = s
            touches[out[i]] += 1
    return out[:at], where, least


class Table(NamedTuple):
    """A plan for a machine."""

    values: Ints
    record: dict[str, int]  # all of its PLAN but what depends on the job
    least_bytes: int  # the most that one of its steps needs with everything else away
    on_host: int  # the most bytes that the host holds for it
    ns: int  # of an iteration's kernels


def table_of(engine: Engine, plan: Plan) -> Table:
    """The table of a plan, which fits the engine's program."""
    if plan.variants:
        engine = engine.with_variants(plan.variants)
    rows = rows_of(plan.decisions)
    kernels, tensors, graph, _ = engine.tables
    work, n_steps = engine.lowered(rows)
    swaps = np.flatnonzero(rows[:, KIND] % 2 == 0)
    order = swaps[np.lexsort((rows[swaps, AFTER], rows[swaps, TENSOR]))]
    step, block, *used = walk(kernels, tensors, graph, rows, work.by_row, work.steps, n_steps)
    entries, where, least = lists(tensors, graph, rows, order, work.by_row, step, block, *used)
    n, (owner, nbytes, first, last) = len(engine.program.kernels), block
    count, lasts = n + n_steps, kernels[DURATION, step[S_KERNEL]]
    takes, gives = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)  # the last is of what stays
    np.add.at(takes, first, nbytes)
    np.add.at(gives, last, nbytes)
    tensor, after, prefetch, when = (rows[order, column] for column in (TENSOR, AFTER, EXTRA, WHEN))
    returns, away = work.by_row[RETURNS, order], work.by_row[AWAY_AT_START, order] == 1
    copied = np.maximum(owner, -1)  # no workspace is
    columns = {
        "before": step[S_BEFORE], "again": step[S_AGAIN], "lasts": lasts, "takes": takes[:count],
        "gives": gives[:count], "begins": np.append(0, lasts.cumsum()), "kernel": step[S_KERNEL],
        "row_tensor": tensor, "row_block": used[1][order], "row_before": (returns - after - 1) % n + 1,
        "row_ready": np.where(prefetch < 0, 1, (prefetch - after) % n + 1), "row_sync": rows[order, KIND] == SYNC_SWAP,
        "row_pinned": prefetch >= 0, "row_after": after,
        "row_start": np.where(away, AWAY, np.where(when > after, COPIED, OTHERWISE)),
        "owner": owner, "nbytes": nbytes, "first": first, "last": last,
        "out_ns": np.append(tensors[D2H], 0)[copied], "in_ns": np.append(tensors[H2D], 0)[copied],
        "residency": work.by_kernel[PLANNED, :n],
    }  # fmt: skip
    begins = np.cumsum([len(entries), *map(len, columns.values())]).tolist()
    start_bytes = int(takes[-1] - tensors[SIZE, tensor[away]].sum())
    waits = np.intersect1d(entries[entries[0] : entries[1]], tensor[away])
    record = {"n": n, "n_steps": count, "n_rows": len(order), "n_blocks": len(owner),
              "n_persistent": int((first < 0).sum()), "start_bytes": start_bytes,
              "admission_bytes": start_bytes + int(takes[0] + tensors[SIZE, waits].sum()),
              **dict(zip(LISTS, where.tolist(), strict=True)), **dict(zip(columns, begins, strict=False))}  # fmt: skip
    on_host = host_load(tensors, graph, rows, work.by_row[RETURNS], n)
    return Table(np.concatenate([entries, *columns.values()]), record, int(least.max()), int(on_host), int(lasts.sum()))
