"""The clock of reference.py, compiled: one plan of one program, from arrays to figures.

``event_loop`` is the clock: it reads the plan (lowering.py) and then goes from one completion to the next, by the
lines of rule 9. The functions above it are its stages. README.md draws the state and says what keeps it fast.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit
from simulator.compiled.lowering import (
    host_load,
    leave_at_start,
    makes_copies,
    read_plan,
    segments,
    swap_residency,
)

# isort: off
from simulator.compiled.encoding import (
    ALLOCATED, AWAY_BYTES, BORN, COPYING, DIES, DONE, DURATION, FREED, GATE_MISSING, GATE_REMAT, GATE_SYNC,
    HOST_FULL, KIND, LEAVING, LIVE, LOG_BOUNDARY, LOG_END, LOG_IN, LOG_KERNEL, LOG_LEFT, LOG_OUT, LOG_RECOMPUTE,
    LOG_STALL, NEVER, ORDER_SEGMENT, OUT_OF_MEMORY, RECOMPUTE, STEP_AT, STEP_KERNEL, SYNC_SWAP, TENSOR, WORKSPACE,
)  # fmt: skip

# isort: on
from simulator.machine import ALONE


@jit
def _log(log, count, start, end, what, index):  # type: ignore[no-untyped-def]
    """Writes entry ``count`` of the log, or the last one where there is no such; returns how many there are now."""
    if log is None:  # known when this is compiled
        return count
    i = min(count, log.shape[0] - 1)
    log[i, 0], log[i, 1], log[i, 2], log[i, 3] = start, end, what, index
    return count + 1


@jit
def _log_end(log, entry, end):  # type: ignore[no-untyped-def]
    """A span that was logged ends at another time."""
    if log is not None and end != NEVER and entry < log.shape[0]:
        log[entry, 1] = end


@jit
def _left(work, end, rate, elapsed):  # type: ignore[no-untyped-def]
    """What is left of a transfer after so long at a rate; 0 where none is under way."""
    return 0 if end == NEVER else work - rate * elapsed


@jit
def _end(work, rate, now):  # type: ignore[no-untyped-def]
    """When a transfer ends at a rate."""
    return now - (-work // rate)


@jit
def _waits_for_data(gate, rerun):  # type: ignore[no-untyped-def]
    """Is a tensor away that the kernel with this gate reads, or a step of its rematerialisation?"""
    return gate & GATE_MISSING >= GATE_REMAT if rerun else gate & GATE_MISSING > 0


@jit
def _allow(rows, gaps, waiting, n_waiting, r):  # type: ignore[no-untyped-def]
    """Puts row r among those that wait to come back, by ``order``, the least last; returns where."""
    order, at = gaps[r].order, n_waiting
    while at > 0 and gaps[waiting[at - 1]].order < order:
        waiting[at] = waiting[at - 1]
        at -= 1
    waiting[at] = r
    return at


@jit
def _release(rows, gaps, held, n_held, waiting, n_waiting, position, blocked):  # type: ignore[no-untyped-def]
    """Moves the rows of ``held`` that are ready to ``waiting``; returns n_held, n_waiting, blocked, and the position at
    which the next one is ready."""
    left, next_ready = 0, NEVER
    for i in range(n_held):
        r = held[i]
        if gaps[r].ready > position:
            next_ready = min(next_ready, gaps[r].ready)
            held[left] = r
            left += 1
            continue
        if _allow(rows, gaps, waiting, n_waiting, r) == n_waiting:
            blocked = -1
        n_waiting += 1
    return left, n_waiting, blocked, next_ready


@jit
def _largest(values, begin, end, enough):  # type: ignore[no-untyped-def]
    """The largest of values[begin:end], or one that is more than ``enough``."""
    part = values[begin:end]  # a slice, because LLVM makes gathers of values[j]
    top = part[part.size - 1] if part.size else -NEVER  # it mostly decides
    for j in range(part.size if top <= enough else 0):
        top = max(top, part[j])
    return top


@jit
def _last_above(values, at, bound):  # type: ignore[no-untyped-def]
    """The last index up to ``at`` at which ``values`` is more than ``bound``; there must be one."""
    while values[at] <= bound:
        at -= 1
    return at


@jit
def _obstacle(segment_of, rest, first, highest, expected, enforced, at, due, fits, required):  # type: ignore[no-untyped-def]
    """Rule 5: the last kernel, from kernel ``at`` up to segment ``due``, at which the planned residency and what came
    back early are more than ``fits``; -1: none. Kernels of the next iteration are counted on from this one's."""
    kernel = -1
    for _ in range(1):  # once: see README.md, "References"
        low, n = segment_of[at], enforced.size
        early = expected[low] - highest[low]
        segment = -1
        # A bound that often holds: all that came early beside the worst of all kernels.
        if low < due and required + early > fits:
            if _largest(expected, low + 1, due, fits) > fits:
                segment = _last_above(expected, due - 1, fits)
            elif rest[at] + early > fits:
                segment = low
        if segment >= 0:
            early, last = expected[segment] - highest[segment], first[segment + 1] - 1
            turn = n if last >= n else 0
            kernel = _last_above(enforced, last - turn, fits - early) + turn
    return kernel


@jit
def _add(values, begin, end, change):  # type: ignore[no-untyped-def]
    """values[begin:end] += change, as one vector loop."""
    part = values[begin:end]
    for j in range(part.size):
        part[j] += change


@jit
def _run_plain(kernels, gate, now, position, k, used, peak, limit, limit_until, horizon, head_bytes, blocked):  # type: ignore[no-untyped-def]
    """Runs plain kernels up to the next completion of a copy, ``horizon``, or the next chance of the first swap-in, of
    ``head_bytes``; returns now, position, k, used, peak, and whether there is that chance."""
    chance = False
    while True:  # one way out: see README.md, "References"
        if gate[k] != 0 or chance:
            break
        charged = used + kernels[WORKSPACE, k] + kernels[BORN, k]
        then = now + kernels[DURATION, k]
        if charged > (limit if k < limit_until else NEVER) or then >= horizon:
            break
        peak = max(peak, charged)
        used += kernels[BORN, k] - kernels[DIES, k]
        now = then
        position, k = position + 1, k + 1
        chance = used + head_bytes <= (limit if k < limit_until else NEVER) and position > blocked
    return now, position, k, used, peak, chance


@jit
def _open_gaps(  # type: ignore[no-untyped-def]
    rows, gaps, opens, gate, segment_of, copied, held, n_held, next_ready, queue, queue_tail, log, n_log, now,
    position, k, used, n_segments,
):  # fmt: skip
    """Copies are issued and gaps open, as kernel k ends; returns used, n_held, next_ready, queue_tail, n_log."""
    n, m = gate.size, gaps.size
    entry = opens[2 * m + k]
    while True:
        if entry < 0:
            break
        r = entry - m if entry >= m else entry
        gap = gaps[r]
        t = rows[r, TENSOR]
        if rows[r, KIND] == RECOMPUTE:
            used -= gap.nbytes
            entry = opens[entry]
            continue
        if entry >= m or gap.lead == 0:
            if copied[t] < position - gap.since_write + (gap.lead if entry >= m else 0):
                gap.pending, gap.issued = COPYING, position + 1
                queue[queue_tail] = r
                queue_tail += 1
            copied[t] = position
        if entry < m:
            due = segment_of[gap.returns] + (n_segments if gap.returns <= k else 0)
            gap.order = due * ORDER_SEGMENT + t
            gate[gap.returns] += gap.weight
            gap.ready = position + gap.hold
            if gap.pending:
                gap.pending = LEAVING
                if rows[r, KIND] == SYNC_SWAP:
                    gate[k + 1 if k + 1 < n else 0] += GATE_SYNC
            else:
                held[n_held] = r
                n_held += 1
                next_ready = min(next_ready, gap.ready)
                used -= gap.nbytes
                n_log = _log(log, n_log, now, now, LOG_LEFT, r)
        entry = opens[entry]
    return used, n_held, next_ready, queue_tail, n_log


@jit(inline="always")  # LLVM would leave it a call, and the loop that makes it is then slower
def _note_state(states, i, waiting, n_waiting, held, n_held, queue, n_queue):  # type: ignore[no-untyped-def]
    """Writes who is away into states[i]: by row, 1 on the host, 2 and more in the queue, 0 neither.

    The loop adds, below 0, what a copy under way still takes; in the last but one column, whether there are only the
    host copies of the start; in the last one, what the iteration has lasted.
    """
    states[i] = 0
    for j in range(n_waiting):
        states[i, waiting[j]] = 1
    for j in range(n_held):
        states[i, held[j]] = 1
    for j in range(n_queue):
        states[i, queue[j]] = 2 + j


@jit
def _period(states, i):  # type: ignore[no-untyped-def]
    """reference._Run.period after iteration i; the last column has what each iteration lasted."""
    width, slowest = states.shape[1] - 1, 0
    for j in range(i - 1, -1, -1):
        slowest = max(slowest, states[j + 1, width])
        c = 0
        while c < width and states[i, c] == states[j, c]:
            c += 1
        if c == width:
            return i - j if states[i, width] == slowest else 0
    return 0


@jit
def event_loop(  # type: ignore[no-untyped-def]
    kernels, tensors, graph, rows, endings, at_kernel, steps, residency, persistent_bytes, limit, limit_until,
    iterations, max_iterations, copy_engines, duplex_share, host_bytes, log,
):  # fmt: skip
    """Simulates one plan, for ``iterations`` at least and ``max_iterations`` at most.

    Args:
        kernels, tensors, graph, rows: as in ``Engine``.
        endings, at_kernel, steps: what ``lower_recomputations`` or ``lower_reruns`` returns; empty for a plan of swaps.
        residency: int64 (2, kernels); [0] is the planned residency, filled in here unless these have done so.
        limit_until: the limit counts for kernels before this one.
        log: int64 (entries, 4) to be filled, one entry more than is needed; or None.

    Returns:
        (status, iteration_ns, required, peak, entries of the log, detail, used). ``detail`` is the period where the
        status is DONE, the kernel where it is OUT_OF_MEMORY, the bytes swapped where it is HOST_FULL.
    """
    n, m = kernels.shape[1], rows.shape[0]
    recomputes = endings.shape[0] > 0
    if not recomputes:
        swap_residency(kernels, tensors, rows, residency)
    planned = enforced = residency[0]
    required = 0
    for k in range(n):
        required = max(required, planned[k])
    if required > limit:
        for k in range(min(limit_until, n)):
            if planned[k] > limit:
                there = kernels[LIVE, k] - at_kernel[AWAY_BYTES, k] if recomputes else planned[k]
                return OUT_OF_MEMORY, NEVER, required, 0, 0, k, there - kernels[WORKSPACE, k] - kernels[BORN, k]
    if limit_until < n:
        enforced = residency[1]  # far below 0 where the limit does not count
        enforced[:limit_until], enforced[limit_until:] = planned[:limit_until], -NEVER
    gaps, opens, gate, copied, starts, n_segments, on_host, ahead = read_plan(tensors, graph, rows, endings, n)
    if on_host > host_bytes:  # all of them together: they need not be there at one time
        on_host = host_load(tensors, graph, rows, endings, n)
        if on_host > host_bytes:
            return HOST_FULL, NEVER, required, 0, 0, on_host, 0
    segment_of, rest, first, highest, expected = segments(enforced, starts, n_segments)

    # The clock. README.md draws where a row can be: held, waiting, or in the queue to the host.
    now, begin, iteration = 0, 0, 0
    position, k, step, rerun = 0, 0, 0, False  # the kernel that runs, or else the next one; what runs again for it
    end = out_end = in_end = NEVER  # of what is under way on compute, d2h, h2d
    out_row = in_row = 0
    # Of a transfer beside one in the other direction: what was left of it when last reckoned; its entry in the log.
    duplex, changed, reckoned, out_work, in_work, out_log, in_log = duplex_share < ALONE, False, 0, 0, 0, 0, 0
    in_failed = False  # with one engine: the swap-in that was issued first does not fit
    lists = np.empty((2, m), np.int64)  # one allocation: each costs some 30 ns
    held, waiting = lists[0], lists[1]
    queue = np.empty(2 * m + 1, np.int64)  # what is left from the iteration before, and each row once
    n_held = n_waiting = queue_head = queue_tail = 0
    blocked = -1  # the first of `waiting` cannot come back before the kernel at this position has ended
    next_ready = 0  # the position at which the next of `held` is ready, or before
    n_held, nbytes = leave_at_start(rows, endings, gaps, segment_of, gate, copied, held)
    used = peak = persistent_bytes - nbytes
    limit_here = limit if limit_until > 0 else NEVER
    n_log = 0

    # The states at the boundaries; none where nothing is carried over one, so that all iterations are alike.
    copies = makes_copies(tensors, graph, rows, copied, n)
    states = np.empty((4 if n_held or copies or ahead else 0, m + 2), np.int64)
    if states.size:
        _note_state(states, 0, waiting, 0, held, n_held, queue, 0)
        states[0, m] = copies

    while True:
        while True:
            # Tensors on the host become ready to come back.
            if position >= next_ready:
                n_held, n_waiting, blocked, next_ready = _release(
                    rows, gaps, held, n_held, waiting, n_waiting, position, blocked
                )

            # A swap-out starts; with one engine, not before a swap-in that was issued before it and fits.
            if queue_head < queue_tail and out_end == NEVER and (copy_engines == 2 or in_end == NEVER):
                in_first = False
                if copy_engines == 1 and n_waiting and not in_failed:
                    r = waiting[n_waiting - 1]
                    in_first = gaps[r].pinned != 0 and gaps[r].ready < gaps[queue[queue_head]].issued
                if not in_first:
                    out_row = queue[queue_head]
                    queue_head += 1
                    if duplex:
                        in_work = _left(in_work, in_end, ALONE, now - reckoned)
                        reckoned, out_work, changed = now, gaps[out_row].out_ns * ALONE, True
                    out_end, out_log = now + gaps[out_row].out_ns, n_log
                    n_log = _log(log, n_log, now, out_end, LOG_OUT, out_row)

            # A swap-in starts, if it fits.
            head_bytes = NEVER  # of the next one, where the engine is free for it
            if n_waiting and in_end == NEVER and (copy_engines == 2 or out_end == NEVER):
                r = waiting[n_waiting - 1]
                head_bytes = gaps[r].nbytes
                start = position + (end != NEVER and not rerun)
                if start > blocked and used + head_bytes <= limit_here:
                    at, due = start - position + k, gaps[r].order // ORDER_SEGMENT
                    fits = limit - head_bytes
                    obstacle = _obstacle(segment_of, rest, first, highest, expected, enforced, at, due, fits, required)
                    blocked = obstacle + position - k
                    if obstacle < 0:
                        blocked = -1
                        _add(expected, segment_of[at], due, head_bytes)
                        n_waiting -= 1
                        used += head_bytes
                        peak = max(peak, used)
                        if duplex:
                            out_work = _left(out_work, out_end, ALONE, now - reckoned)
                            reckoned, in_work, changed = now, gaps[r].in_ns * ALONE, True
                        in_row, in_end, in_log = r, now + gaps[r].in_ns, n_log
                        n_log = _log(log, n_log, now, in_end, LOG_IN, r)
                        head_bytes = NEVER
            if copy_engines == 1:
                in_failed = queue_head < queue_tail and out_end == NEVER and in_end == NEVER
                if in_failed:  # so the swap-out goes
                    continue
            if changed:
                changed = False
                if out_end != NEVER and in_end != NEVER:
                    out_end, in_end = _end(out_work, duplex_share, now), _end(in_work, duplex_share, now)
                    _log_end(log, out_log, out_end)
                    _log_end(log, in_log, in_end)

            # Plain kernels run, one after the other; a log wants each of them.
            if log is None:
                if end == NEVER and gate[k] == 0:
                    came_from, horizon = position, min(out_end, in_end)
                    now, position, k, used, peak, chance = _run_plain(
                        kernels, gate, now, position, k, used, peak, limit, limit_until, horizon, head_bytes, blocked
                    )
                    if position != came_from:
                        limit_here = limit if k < limit_until else NEVER
                        if recomputes:
                            step = at_kernel[STEP_AT, k]
                        if chance or position >= next_ready:
                            continue

            # A kernel starts, or one runs again.
            if end == NEVER:
                rerun = recomputes and step < at_kernel[STEP_AT, k + 1]
                which = steps[step, STEP_KERNEL] if rerun else k
                change = kernels[WORKSPACE, which] + (steps[step, ALLOCATED] if rerun else kernels[BORN, k])
                if gate[k] < GATE_SYNC and not _waits_for_data(gate[k], rerun) and used + change <= limit_here:
                    used += change
                    peak = max(peak, used)
                    end = now + kernels[DURATION, which]
                    n_log = _log(log, n_log, now, end, LOG_RECOMPUTE if rerun else LOG_KERNEL, which)

            # On to the next completion.
            then = min(end, min(out_end, in_end))
            if then == NEVER:
                raise AssertionError("nothing is under way: the planned residency promised that this cannot be")
            if end == NEVER and then > now:
                for_data = _waits_for_data(gate[k], rerun) and in_end != NEVER
                n_log = _log(log, n_log, now, then, LOG_STALL, for_data)
            now = then

            # Copies complete.
            if duplex and (out_end == now or in_end == now):
                rate = ALONE if out_end == NEVER or in_end == NEVER else duplex_share
                out_work = _left(out_work, out_end, rate, now - reckoned)
                in_work = _left(in_work, in_end, rate, now - reckoned)
                reckoned = now
                if now < out_end < NEVER:
                    out_end = _end(out_work, ALONE, now)
                    _log_end(log, out_log, out_end)
                if now < in_end < NEVER:
                    in_end = _end(in_work, ALONE, now)
                    _log_end(log, in_log, in_end)
            if out_end == now:
                out_end = NEVER
                if gaps[out_row].pending == LEAVING:
                    used -= gaps[out_row].nbytes
                    n_log = _log(log, n_log, now, now, LOG_LEFT, out_row)
                    if rows[out_row, KIND] == SYNC_SWAP:
                        gate[k] -= GATE_SYNC
                    held[n_held] = out_row
                    n_held += 1
                    next_ready = min(next_ready, gaps[out_row].ready)
                gaps[out_row].pending = 0
            if in_end == now:
                gate[gaps[in_row].returns] -= gaps[in_row].weight
                in_end = NEVER

            # The kernel completes, and gaps open.
            if end == now:
                end = NEVER
                which = steps[step, STEP_KERNEL] if rerun else k
                change = kernels[WORKSPACE, which] + (steps[step, FREED] if rerun else kernels[DIES, k])
                used -= change
                n_log = _log(log, n_log, now, now, LOG_END, which)
                if rerun:
                    step += 1
                else:
                    used, n_held, next_ready, queue_tail, n_log = _open_gaps(
                        rows, gaps, opens, gate, segment_of, copied, held, n_held, next_ready, queue, queue_tail, log,
                        n_log, now, position, k, used, n_segments,
                    )  # fmt: skip
                    position, k = position + 1, k + 1
                    if k == n:
                        break
                    limit_here = limit if k < limit_until else NEVER
                    if recomputes:
                        step = at_kernel[STEP_AT, k]

        # The boundary: is the state one that there was before?
        iteration += 1
        n_log = _log(log, n_log, now, now, LOG_BOUNDARY, 0)
        for i in range(queue_head, queue_tail):
            queue[i - queue_head] = queue[i]
        queue_head, queue_tail = 0, queue_tail - queue_head
        period = 1
        if states.size:
            if iteration == states.shape[0]:
                states = np.concatenate((states, states))
            _note_state(states, iteration, waiting, n_waiting, held, n_held, queue, queue_tail)
            if duplex:
                rate = ALONE if out_end == NEVER or in_end == NEVER else duplex_share
                out_left = _left(out_work, out_end, rate, now - reckoned)
                in_left = _left(in_work, in_end, rate, now - reckoned)
            else:
                out_left, in_left = out_end - now, in_end - now
            if out_end != NEVER:
                states[iteration, out_row] = -2 * out_left
            if in_end != NEVER:
                states[iteration, in_row] = -2 * in_left - 1
            states[iteration, m + 1] = now - begin
            period = _period(states, iteration)
        if iteration >= iterations and (period or iteration >= max_iterations):
            return DONE, now - begin, required, peak, n_log, period, 0

        # The next iteration's kernels and segments become this one's.
        begin, k = now, 0
        for r in range(m):
            gaps[r].order -= n_segments * ORDER_SEGMENT
        expected[:n_segments], expected[n_segments:] = expected[n_segments:], highest[n_segments:]
        limit_here = limit if limit_until > 0 else NEVER
        step = at_kernel[STEP_AT, 0] if recomputes else 0
