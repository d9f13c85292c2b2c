"""Plans as tables, compiled: what ``schedule.lower`` finds, from the blocks that compiled/blocks.py finds."""

from __future__ import annotations

from collections.abc import Sequence
from threading import local
from typing import Any, NamedTuple

import numpy as np

# isort: off
from simulator.compiled.blocks import B_BYTES, B_FIRST, B_LAST, B_OWNER, S_AGAIN, S_FOR, S_KERNEL, walk
from simulator.compiled.encoding import (
    AFTER, AWAY_AT_START, BY_REMAT, D2H, DURATION, EXTRA, H2D, KIND, LAST, PERSISTENT, PLANNED, RETURNS, SIZE,
    SYNC_SWAP, TENSOR, WHEN, Ints,
)  # fmt: skip

# isort: on
from simulator.compiled.engine import Engine
from simulator.compiled.jit import jit, stage
from simulator.compiled.lowering import copied_at, grouped, host_load, sort, swaps_of
from simulator.jobs.tables import AWAY, COPIED, OTHERWISE, PLAN


@stage(inline=True)
def _touch(b, s, seen, out, at):  # type: ignore[no-untyped-def]
    """Adds block b to the list of step s, once; returns where the list ends."""
    if seen[b] != s:
        seen[b], out[at] = s, b
        at += 1
    return at


@jit
def _rows_of(step, items_at, items, out, at):  # type: ignore[no-untyped-def]
    """Writes the list, per step, of what is grouped by kernel; what runs again has none. Returns where it ends."""
    count, head = step.shape[1], at
    at += count + 1
    for s in range(count):
        out[head + s] = at
        k = step[S_FOR, s]
        for i in range(items_at[k], items_at[k + 1] if not step[S_AGAIN, s] else items_at[k]):
            out[at] = items[i]
            at += 1
    out[head + count] = at
    return at


@jit
def _lists(tensors, graph, rows, order, by_row, found, plan, out):  # type: ignore[no-untyped-def]
    """Writes the lists of a table.

    Args:
        order: the rows that are swaps, by tensor and opening.
        found: Blocks.
        plan: a record of PLAN, which gets the places.
        out: long enough.

    Returns:
        Where they end; int64 (steps,), bytes that each step needs with everything else away.
    """
    step, block, uses, uses_at, moved = found.step, found.block, found.uses, found.uses_at, found.moved
    count, n_blocks, n_rows = step.shape[1], block.shape[1], order.size
    n = step[S_FOR, count - 1] + 1
    results_at = graph[n + 1 :]
    swapped, least = np.zeros(tensors.shape[1], np.bool_), np.zeros(count, np.int64)
    # Swaps, as indices of ``order``: by the kernel whose pass fetches them, that copies, that opens.
    fetches, copied, opened = np.full(n_rows, -1, np.int64), np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    for i in range(n_rows):
        r = order[i]
        swapped[rows[r, TENSOR]] = True
        if by_row[BY_REMAT, r]:
            fetches[i] = by_row[RETURNS, r]
        copied[i], opened[i] = copied_at(rows, r), rows[r, AFTER]
    fetched_at, fetched = grouped(fetches, n)
    copies_at, copies = grouped(copied, n)
    opens_at, opens = grouped(opened, n)
    ends = np.full(n_blocks, -1, np.int64)
    for b in range(n_blocks):
        if block[B_OWNER, b] < 0:
            least[block[B_FIRST, b]] += block[B_BYTES, b]
        elif block[B_LAST, b] < count:
            ends[b] = block[B_LAST, b]
    dies_at, dies = grouped(ends, count)

    # Tensors that must be there. A pass waits at every step for what it fetches.
    plan.waits, at = 0, count + 1
    for s in range(count):
        out[plan.waits + s] = begin = at
        k = step[S_FOR, s]
        if step[S_AGAIN, s]:
            for i in range(fetched_at[k], fetched_at[k + 1]):
                out[at] = rows[order[fetched[i]], TENSOR]
                at += 1
        else:
            for i in range(uses_at[s], uses_at[s + 1]):
                if swapped[uses[i, 0]]:
                    new = True
                    for j in range(begin, at):
                        new &= out[j] != uses[i, 0]
                    if new:
                        out[at] = uses[i, 0]
                        at += 1
            sort(out, begin, at)
    out[plan.waits + count] = at

    # Blocks that it touches.
    touches, seen = np.zeros(n_blocks + 1, np.int64), np.full(n_blocks, -1, np.int64)
    plan.touched, at = at, at + count + 1
    for s in range(count):
        out[plan.touched + s] = begin = at
        k, again = step[S_FOR, s], step[S_AGAIN, s]
        for i in range(uses_at[s], uses_at[s + 1]):
            at = _touch(uses[i, 1], s, seen, out, at)
        for i in range(dies_at[s], dies_at[s + 1]):
            at = _touch(dies[i], s, seen, out, at)
        if not again:
            for i in range(copies_at[k], copies_at[k + 1]):
                at = _touch(moved[order[copies[i]]], s, seen, out, at)
            for i in range(opens_at[k], opens_at[k + 1]):
                at = _touch(moved[order[opens[i]]], s, seen, out, at)
        sort(out, begin, at)
        for i in range(begin, at):
            least[s] += block[B_BYTES, out[i]]
            touches[out[i] + 1] += 1
        if again:
            for i in range(fetched_at[k], fetched_at[k + 1]):
                b = moved[order[fetched[i]]]
                if seen[b] != s:
                    least[s] += block[B_BYTES, b]
    out[plan.touched + count] = at

    # Tensors that it writes, each with its block; or uses last.
    plan.writes, at = at, at + count + 1
    for s in range(count):
        out[plan.writes + s] = at
        if step[S_AGAIN, s]:
            continue
        w = step[S_KERNEL, s]
        for i in range(uses_at[s + 1] - (results_at[w + 1] - results_at[w]), uses_at[s + 1]):
            if swapped[uses[i, 0]] or tensors[PERSISTENT, uses[i, 0]]:
                out[at], out[at + 1] = uses[i, 0], uses[i, 1]
                at += 2
        for i in range(uses_at[s], uses_at[s + 1]):
            x = uses[i, 0]
            if swapped[x] and not tensors[PERSISTENT, x] and tensors[LAST, x] == w:
                first = True
                for j in range(uses_at[s], i):
                    first &= uses[j, 0] != x
                if first:
                    out[at], out[at + 1] = x, -1
                    at += 2
    out[plan.writes + count] = at

    plan.copies, at = at, _rows_of(step, copies_at, copies, out, at)
    plan.opens, at = at, _rows_of(step, opens_at, opens, out, at)

    # Steps that touch a block.
    plan.touches, at = at, at + n_blocks + 1
    for b in range(n_blocks + 1):
        at += touches[b]
        touches[b] = out[plan.touches + b] = at
    for s in range(count):
        for i in range(out[plan.touched + s], out[plan.touched + s + 1]):
            out[touches[out[i]]] = s
            touches[out[i]] += 1
    return at, least


@jit
def write_table(kernels, tensors, graph, rows, by_row, planned, steps, n_steps, record, out):  # type: ignore[no-untyped-def]
    """The table of a lowered plan.

    Args:
        record: one of PLAN, to be filled, but for what depends on the job.
        out: gets the table.

    Returns:
        How long the table is, or, below 0, ``out`` has to be; the most bytes that one of its steps needs with
        everything else away, and that the host holds.
    """
    found = walk(kernels, tensors, graph, rows, by_row, steps, n_steps)
    step, block, plan = found.step, found.block, record[0]
    n, n_tensors, count, n_blocks = kernels.shape[1] - 1, tensors.shape[1], step.shape[1], block.shape[1]
    _, order = swaps_of(rows, n, n_tensors)
    n_rows = order.size
    room = 5 * (count + 1) + 8 * found.uses.shape[0] + 4 * n_blocks + 8 * n_rows + 1  # of lists
    room += n_rows * n_steps  # a pass waits at every step for what it fetches
    room += 7 * count + 1 + 8 * n_rows + 6 * n_blocks + n
    if out.size < room:
        return -room, 0, 0
    at, least = _lists(tensors, graph, rows, order, by_row, found, plan, out)
    plan.n, plan.n_steps, plan.n_rows, plan.n_blocks = n, count, n_rows, n_blocks

    # Columns of steps.
    plan.before, plan.again, plan.lasts = before, again, lasts = at, at + count, at + 2 * count
    plan.takes, plan.gives, plan.kernel = takes, gives, kernel = at + 3 * count, at + 4 * count, at + 5 * count
    plan.begins = begins = at + 6 * count
    at, time = begins + count + 1, 0
    for s in range(count):
        w = step[S_KERNEL, s]
        out[before + s], out[again + s], out[kernel + s] = step[S_FOR, s], step[S_AGAIN, s], w
        out[lasts + s], out[begins + s] = kernels[DURATION, w], time
        out[takes + s] = out[gives + s] = 0
        time += kernels[DURATION, w]
    out[begins + count] = time

    # Columns of rows.
    plan.row_tensor, plan.row_block, plan.row_before, plan.row_ready = at, at + n_rows, at + 2 * n_rows, at + 3 * n_rows
    plan.row_sync, plan.row_pinned = at + 4 * n_rows, at + 5 * n_rows
    plan.row_after, plan.row_start = at + 6 * n_rows, at + 7 * n_rows
    start_bytes = waited = 0
    for i in range(n_rows):
        r = order[i]
        t, after, prefetch = rows[r, TENSOR], rows[r, AFTER], rows[r, EXTRA]
        out[at + i], out[at + n_rows + i] = t, found.moved[r]
        out[at + 2 * n_rows + i] = (by_row[RETURNS, r] - after - 1) % n + 1
        out[at + 3 * n_rows + i] = 1 if prefetch < 0 else (prefetch - after) % n + 1
        out[at + 4 * n_rows + i], out[at + 5 * n_rows + i] = rows[r, KIND] == SYNC_SWAP, prefetch >= 0
        out[at + 6 * n_rows + i], out[at + 7 * n_rows + i] = after, COPIED if rows[r, WHEN] > after else OTHERWISE
        if by_row[AWAY_AT_START, r]:
            out[at + 7 * n_rows + i] = AWAY
            start_bytes -= tensors[SIZE, t]
            for j in range(out[0], out[1]):
                waited += tensors[SIZE, t] * (out[j] == t)
    at += 8 * n_rows

    # Columns of blocks.
    plan.owner, plan.nbytes, plan.first, plan.last = at, at + n_blocks, at + 2 * n_blocks, at + 3 * n_blocks
    plan.out_ns, plan.in_ns = at + 4 * n_blocks, at + 5 * n_blocks
    plan.n_persistent = 0
    for b in range(n_blocks):
        owner, nbytes, first, last = block[B_OWNER, b], block[B_BYTES, b], block[B_FIRST, b], block[B_LAST, b]
        out[at + b], out[at + n_blocks + b] = owner, nbytes
        out[at + 2 * n_blocks + b], out[at + 3 * n_blocks + b] = first, last
        out[at + 4 * n_blocks + b] = tensors[D2H, owner] if owner >= 0 else 0
        out[at + 5 * n_blocks + b] = tensors[H2D, owner] if owner >= 0 else 0
        if first >= 0:
            out[takes + first] += nbytes
        else:
            start_bytes += nbytes
            plan.n_persistent += 1
        if last < count:
            out[gives + last] += nbytes
    at += 6 * n_blocks

    plan.residency = at
    for k in range(n):
        out[at + k] = planned[k]
    plan.start_bytes, plan.admission_bytes = start_bytes, start_bytes + waited + out[takes]
    return at + n, least.max(), host_load(tensors, graph, rows, by_row[RETURNS], n)


class _Room(local):
    """Where a thread makes tables: new memory costs as much as they do."""

    values = np.empty(0, np.int64)


_room = _Room()


class Table(NamedTuple):
    """A plan for a machine."""

    values: Ints
    record: Any  # of PLAN, but for what depends on the job
    least_bytes: int  # the most that one of its steps needs with everything else away
    on_host: int  # the most bytes that the host holds for it
    ns: int  # of an iteration's kernels


def table_of(engine: Engine, rows: Ints, variants: Sequence[tuple[int, int]] = ()) -> Table:
    """The table of a plan's ``rows`` and ``variants``, which fit the engine's program.

    Raises:
        PlanError: a kernel that is to run again would not find an input as it was.
    """
    if variants:
        engine = engine.with_variants(variants)
    kernels, tensors, graph, _ = engine.tables
    work, n_steps = engine.lowered(rows)
    record = np.zeros(1, PLAN)
    given = kernels, tensors, graph, rows, work.by_row, work.by_kernel[PLANNED], work.steps, n_steps, record
    while (found := write_table(*given, _room.values))[0] < 0:
        _room.values = np.empty(-2 * found[0], np.int64)
    size, least, on_host = found
    plan, values = record[0], _room.values[:size].copy()
    return Table(values, plan, least, on_host, int(values[plan["begins"] + plan["n_steps"]]))
