"""Event loop for one plan of one program: the clock of rules.py, compiled.

``event_loop`` reads the plan (lowering.py) and then advances from one completion to the next, by the lines of rule 9.
The functions above it are its stages. README.md shows the state and the optimizations.
"""

from __future__ import annotations

from simulator.compiled.heap import OUTSIDE, pop, push
from simulator.compiled.host import complete, issue, write_lead, start_host, start_step
from simulator.compiled.jit import stage
from simulator.compiled.lowering import evict_at_start, first_settled_kernel, fill_waits, read_plan
from simulator.compiled.segments import next_segments, obstacle_of, build_segments, add_weight
from simulator.compiled.encoding import (
    ALLOCATED,
    AT_START,
    BEGINS,
    BORN,
    CHECKS,
    CHILD,
    CONTENDS,
    COPIED,
    COPYING,
    COPY_ENGINES,
    D2H_SHARE,
    DIES,
    DONE,
    DUE,
    DUE_SEGMENT,
    DURATION,
    ENFORCED,
    EVENT_NS,
    FOR_DATA,
    FOR_ISSUE,
    FOR_MEMORY,
    FREED,
    GATE,
    GATE_EVENT,
    GATE_MISSING,
    GATE_REMAT,
    GATE_SYNC,
    H2D_SHARE,
    HOST_BYTES,
    HOST_FULL,
    ITERATION_NS,
    LASTED,
    LEAD,
    LEAD_NS,
    LEAVING,
    LEVEL,
    LIMIT,
    LIVE,
    LOG_BOUNDARY,
    LOG_END,
    LOG_IN,
    LOG_KERNEL,
    LOG_LEFT,
    LOG_OUT,
    LOG_RECOMPUTE,
    LOG_STALL,
    LOSS,
    MAX_ITERATIONS,
    NEVER,
    NEXT_OPEN,
    OPENS,
    PEAK,
    PERIOD,
    PERSISTENT_BYTES,
    PLANNED,
    QUEUE,
    READY,
    RECOMPUTE,
    SEGMENT,
    SIBLING,
    SLOWER,
    STEP_FOR,
    STEP_KERNEL,
    STUCK,
    SYNC_SWAP,
    WAITS,
    WAIT_NS,
    WORKSPACE,
)
from simulator.machine import ALONE


@stage
def _log(log, count, start, end, kind, index):
    """Writes entry ``count`` of the log, or overwrites the last one if the log is full; returns the new count."""
    if log.shape[0]:
        i = min(count, log.shape[0] - 1)
        log[i, 0] = start
        log[i, 1] = end
        log[i, 2] = kind
        log[i, 3] = index
        count += 1
    return count


@stage
def _log_end(log, entry, end):
    """Changes the end of a logged span."""
    if end != NEVER and entry < log.shape[0]:
        log[entry, 1] = end


@stage
def _remaining(work, end, rate, elapsed):
    """Returns the remaining work of a transfer after ``elapsed`` ns at ``rate``; 0 if none is in flight."""
    return 0 if end == NEVER else work - rate * elapsed


@stage
def _end(work, rate, now):
    """Returns the completion time of a transfer at ``rate``."""
    return now - (-work // rate)


@stage
def _waits_for_data(gate, rerun):
    """Returns whether the kernel with this gate, or a step of its pass, reads an evicted tensor."""
    return gate & GATE_MISSING >= GATE_REMAT if rerun else gate & GATE_MISSING > 0


@stage
def _move_ready(by_row, held, waiting, position, blocked):
    """Moves the rows of ``held`` that are ready to ``waiting``; returns both roots, and ``blocked``."""
    ready = by_row[READY]
    due = by_row[DUE]
    child = by_row[CHILD]
    sibling = by_row[SIBLING]
    while held >= 0 and ready[held] <= position:
        r = held
        held = pop(ready, child, sibling, held)
        waiting = push(due, child, sibling, waiting, r)
        if waiting == r:
            blocked = -1
    return held, waiting, blocked


@stage
def _run_plain(kernels, gate, now, k, used, peak, limit, horizon, next_bytes, plain_until):
    """Executes plain kernels up to ``horizon`` (completion of a copy) or until a swap-in of ``next_bytes`` may fit."""
    # The swap-in cannot fit before the end of kernel ``plain_until``.
    begins = kernels[BEGINS]
    live = kernels[LIVE]
    level = kernels[LEVEL]
    # differences from the unplanned program
    offset_ns = now - begins[k]
    extra_bytes = used - level[k]
    max_live = limit - extra_bytes
    room = limit - extra_bytes - next_bytes
    end_limit = horizon - offset_ns
    top = -NEVER
    may_fit = False
    while gate[k] == 0 and live[k] <= max_live and begins[k + 1] < end_limit and not may_fit:
        top = max(top, live[k])
        k += 1
        may_fit = level[k] <= room and k > plain_until
    return begins[k] + offset_ns, k, level[k] + extra_bytes, max(peak, top + extra_bytes), may_fit


@stage
def _open_gaps(
    gaps, opens, by_row, gate, segment_of, copied, held, queue_tail, log, n_log, now, position, k, used, n_segments
):
    """Issues copies and opens gaps at the end of kernel k; returns used, held, queue_tail, n_log."""
    following = by_row[NEXT_OPEN]
    queue = by_row[QUEUE]
    ready = by_row[READY]
    n = gate.size - 1
    entry = opens[k]
    while entry >= 0:
        r = entry >> 1
        is_early = entry & 1
        entry = following[entry]
        gap = gaps[r]
        t = gap.tensor
        if gap.kind == RECOMPUTE:
            used -= gap.nbytes
            continue
        if is_early or gap.lead == 0:
            if copied[t] < position - gap.since_write + (gap.lead if is_early else 0):
                gap.pending = COPYING
                gap.issued = position + 1
                queue[queue_tail] = r
                queue_tail += 1
            copied[t] = position
        if not is_early:
            due = segment_of[gap.returns] + (n_segments if gap.returns <= k else 0)
            by_row[DUE, r] = due * DUE_SEGMENT + t
            gate[gap.returns] += gap.weight
            ready[r] = position + gap.hold
            if gap.pending:
                gap.pending = LEAVING
                if gap.kind == SYNC_SWAP:
                    gate[k + 1 if k + 1 < n else 0] += GATE_SYNC
            else:
                held = push(ready, by_row[CHILD], by_row[SIBLING], held, r)
                used -= gap.nbytes
                n_log = _log(log, n_log, now, now, LOG_LEFT, r)
    return used, held, queue_tail, n_log


@stage
def _write_state(state, m, lasts, child, queue, head, tail):
    """Writes the status of each row into ``state``: 1 on the host, 2 and more in the queue, 0 neither.

    The event loop adds the remaining time of copies in flight as negative values, and the last columns (encoding.LEAD).
    """
    for r in range(m):
        state[r] = child[r] != OUTSIDE
    state[m + LEAD] = 0
    state[m + LEAD_NS] = 0
    state[m + AT_START] = 0
    state[m + LASTED] = lasts
    for j in range(head, tail):
        state[queue[j]] = 2 + j - head


@stage
def _equal_states(state, other, columns):
    """Returns whether the first ``columns`` of two states are equal."""
    c = 0
    while c < columns and state[c] == other[c]:
        c += 1
    return c == columns


@stage
def _period_of(states, iteration, m):
    """Returns rules._period after iteration i. The last column of ``states`` is the duration of the iteration."""
    slowest = 0
    period = 0
    earlier = iteration - 1
    while earlier >= 0:
        slowest = max(slowest, states[earlier + 1, m + LASTED])
        if _equal_states(states[iteration], states[earlier], m + LASTED):
            period = iteration - earlier if states[iteration, m + LASTED] == slowest else 0
            earlier = 0
        earlier -= 1
    return period


@stage
def event_loop(tables, rows, lowering, work, limit_until, cutoff, iterations, result, log):
    """Simulates one plan whose planned residency fits.

    Args:
        tables, lowering, work: Named tuples of encoding.py.
        limit_until: The limit is enforced for kernels before this one.
        cutoff: Stop if the iteration takes at least this many ns.
        iterations: Least number of simulated iterations.
        result: int64 (RESULTS,), filled.
        log: int64 (entries, 4), filled; needs one spare entry. With zero entries, no log is written.

    Returns:
        The status, and the number of log entries.
    """
    kernels, tensors, graph, settings = tables
    lowered, n_steps, rerun_ns, required = lowering
    by_kernel, by_segment, by_tensor, by_row, gaps, steps, states = work
    n = by_kernel.shape[1] - 1
    m = rows.shape[0]
    limit = settings[LIMIT]
    engines = settings[COPY_ENGINES]
    # speed of a copy beside an opposite one
    out_share = settings[D2H_SHARE]
    in_share = settings[H2D_SHARE]
    planned = enforced = by_kernel[PLANNED]
    if limit_until < n:
        enforced = by_kernel[ENFORCED]  # far below 0 where the limit is not enforced
        for k in range(n + 1):
            enforced[k] = planned[k] if k < limit_until else -NEVER
    n_segments, on_host, has_early_copy = read_plan(tensors, graph, rows, lowered, by_kernel, by_tensor, by_row, gaps)
    if on_host > settings[HOST_BYTES]:  # conservative: they need not be on the host at the same time
        return HOST_FULL, 0
    waits = fill_waits(rows, gaps, by_kernel, settings[WAIT_NS], settings[EVENT_NS])
    build_segments(enforced, by_kernel, by_segment, n_segments)
    gate = by_kernel[GATE]
    opens = by_kernel[OPENS]
    segment_of = by_kernel[SEGMENT]
    copied = by_tensor[COPIED]
    if 0 < limit_until < n:
        gate[limit_until - 1] |= GATE_EVENT  # the limit changes here

    # The clock. README.md shows the states of a row: held, waiting, or in the swap-out queue.
    now = 0
    begin = 0
    iteration = 0
    # the running kernel, or else the next; its recomputed steps
    position = 0
    k = 0
    step = 0
    rerun = False
    end = out_end = in_end = NEVER  # completion times on compute, d2h, h2d
    out_row = in_row = 0
    # A transfer beside an opposite one: its remaining work at the last update; its log entry.
    duplex = out_share < ALONE or in_share < ALONE
    rates_changed = False
    updated_ns = out_work = in_work = out_log = in_log = 0
    # The running step beside copies: its remaining work at the last update, that time, its speed, its log entry.
    contends = settings[CONTENDS] > 0
    step_work = 0
    step_updated_ns = 0
    speed = ALONE
    end_log = 0
    in_failed = False  # with one engine: the swap-in that was issued first does not fit
    ready = by_row[READY]
    due = by_row[DUE]
    child = by_row[CHILD]
    sibling = by_row[SIBLING]
    queue = by_row[QUEUE]
    queue_head = queue_tail = 0
    held, nbytes = evict_at_start(rows, lowered, by_kernel, by_tensor, by_row, gaps)
    waiting = -1  # root of the heap; the root of `held` is the next row that becomes ready
    blocked = -1  # the first of `waiting` cannot be swapped in before the kernel at this position has ended
    used = peak = settings[PERSISTENT_BYTES] - nbytes
    step_limit = limit if limit_until > 0 else NEVER
    n_log = 0
    has_log = log.shape[0] > 0

    # States at the boundaries, then at CHECKS kernels of the iteration. Not needed if nothing is carried over a
    # boundary, because then all iterations are alike.
    first_settled = first_settled_kernel(tensors, graph, rows, by_tensor, gaps, n)
    has_carryover = held >= 0 or first_settled > 0 or has_early_copy
    boundaries = settings[MAX_ITERATIONS] + 1
    next_check = n
    check = 0
    first_check = CHECKS
    has_host, to_issue, host = start_host(kernels, rows, gaps, by_kernel, steps, n_steps, rerun_ns, settings)
    has_carryover |= has_host
    lead = host.issued
    lead_ns = min(-host.next_ns, 0)
    has_waited = False
    if has_carryover:
        _write_state(states[0], m, 0, child, queue, 0, 0)
        states[0, m + LEAD] = lead
        states[0, m + LEAD_NS] = lead_ns
        states[0, m + AT_START] = first_settled
        while first_check > 0 and (n - first_settled) >> first_check == 0:
            first_check -= 1
        first_check = 0 if has_log or has_host else first_check
        for c in range(1, first_check + 1):
            gate[first_settled + ((n - first_settled) >> c) - 1] |= GATE_EVENT
        check = first_check
        next_check = first_settled + ((n - first_settled) >> check) if check else n
    # Lower bounds on the duration of an iteration, and of this one at kernel k.
    bound = kernels[BEGINS, n] + rerun_ns
    max_delay = NEVER if has_carryover else cutoff - bound  # smallest delay that reaches the cutoff
    status = SLOWER if bound >= cutoff else STUCK
    running = status == STUCK
    iteration_ns = period = 0
    reruns_left = rerun_ns

    while running:
        while True:
            # Tensors on the host become ready to be swapped in.
            if held >= 0 and ready[held] <= position:
                held, waiting, blocked = _move_ready(by_row, held, waiting, position, blocked)

            # A swap-out starts; with one engine, after any swap-in that was issued before it and fits.
            if queue_head < queue_tail and out_end == NEVER and (engines == 2 or in_end == NEVER):
                in_first = False
                if engines == 1 and waiting >= 0 and not in_failed:
                    in_first = gaps[waiting].pinned != 0 and ready[waiting] < gaps[queue[queue_head]].issued
                if not in_first:
                    out_row = queue[queue_head]
                    queue_head += 1
                    if duplex:
                        in_work = _remaining(in_work, in_end, ALONE, now - updated_ns)
                        updated_ns = now
                        out_work = gaps[out_row].out_ns * ALONE
                        rates_changed = True
                    out_end = now + gaps[out_row].out_ns
                    out_log = n_log
                    n_log = _log(log, n_log, now, out_end, LOG_OUT, out_row)

            # A swap-in starts, if it fits.
            next_bytes = NEVER  # size of the next swap-in, if the engine is free
            if waiting >= 0 and in_end == NEVER and (engines == 2 or out_end == NEVER):
                next_bytes = gaps[waiting].nbytes
                start = position + (1 if end != NEVER and not rerun else 0)
                if start > blocked and used + next_bytes <= step_limit:
                    first = start - position + k
                    until = due[waiting] // DUE_SEGMENT
                    obstacle = obstacle_of(
                        segment_of, by_kernel, by_segment, enforced, first, until, limit - next_bytes, required
                    )
                    blocked = obstacle + position - k
                    if obstacle < 0:
                        blocked = -1
                        add_weight(by_segment, segment_of[first], until, next_bytes)
                        in_row = waiting
                        waiting = pop(due, child, sibling, waiting)
                        used += next_bytes
                        peak = max(peak, used)
                        if duplex:
                            out_work = _remaining(out_work, out_end, ALONE, now - updated_ns)
                            updated_ns = now
                            in_work = gaps[in_row].in_ns * ALONE
                            rates_changed = True
                        in_end = now + gaps[in_row].in_ns
                        in_log = n_log
                        n_log = _log(log, n_log, now, in_end, LOG_IN, in_row)
                        next_bytes = NEVER
            if engines == 1:
                in_failed = queue_head < queue_tail and out_end == NEVER and in_end == NEVER
                if in_failed:  # the swap-out may pass
                    continue
            if rates_changed:
                rates_changed = False
                if out_end != NEVER and in_end != NEVER:
                    out_end = _end(out_work, out_share, now)
                    in_end = _end(in_work, in_share, now)
                    _log_end(log, out_log, out_end)
                    _log_end(log, in_log, in_end)

            # Plain kernels run in one go, except if each is logged.
            is_uncontended = not contends or (out_end == NEVER and in_end == NEVER)
            if end == NEVER and gate[k] == 0 and not has_log and is_uncontended and not has_host:
                first_kernel = k
                now, k, used, peak, may_fit = _run_plain(
                    kernels,
                    gate,
                    now,
                    k,
                    used,
                    peak,
                    step_limit,
                    min(out_end, in_end),
                    next_bytes,
                    blocked - position + k,
                )
                position += k - first_kernel
                if may_fit or (held >= 0 and ready[held] <= position and k != first_kernel):
                    continue

            # A kernel or a recomputed kernel starts.
            unissued = False
            if end == NEVER:
                rerun = step < n_steps and steps[step, STEP_FOR] == k
                kernel = steps[step, STEP_KERNEL] if rerun else k
                change = kernels[WORKSPACE, kernel] + (steps[step, ALLOCATED] if rerun else kernels[BORN, k])
                can_run = gate[k] < GATE_SYNC and not _waits_for_data(gate[k], rerun) and used + change <= step_limit
                if can_run and has_host:
                    host = issue(to_issue, host, now)
                    unissued = host.issued == 0
                    can_run = not unissued
                    has_waited = has_waited or unissued
                if can_run:
                    host = start_step(host)
                    used += change
                    peak = max(peak, used)
                    end = now + kernels[DURATION, kernel]
                    end_log = n_log
                    if waits and not rerun:
                        end += by_kernel[WAITS, k]
                    step_work = (end - now) * ALONE
                    step_updated_ns = now
                    speed = ALONE
                    n_log = _log(log, n_log, now, end, LOG_RECOMPUTE if rerun else LOG_KERNEL, kernel)

            if contends and end != NEVER:
                loss = kernels[LOSS, steps[step, STEP_KERNEL] if rerun else k]
                pace = ALONE - (loss if out_end != NEVER else 0) - (loss if in_end != NEVER else 0)
                if pace != speed:
                    step_work = step_work - speed * (now - step_updated_ns)
                    step_updated_ns = now
                    speed = pace
                    end = _end(step_work, speed, now)
                    _log_end(log, end_log, end)

            # Advance to the next completion.
            next_ns = min(end, min(out_end, in_end))
            if unissued:
                next_ns = min(next_ns, host.next_ns)
            if next_ns == NEVER:
                running = False
                break
            if end == NEVER and next_ns > now:
                if has_log:
                    for_data = in_end != NEVER and _waits_for_data(gate[k], rerun)
                    cause = FOR_ISSUE if unissued else FOR_DATA if for_data else FOR_MEMORY
                    n_log = _log(log, n_log, now, next_ns, LOG_STALL, cause)
                if next_ns - kernels[BEGINS, k] - rerun_ns + reruns_left >= max_delay:
                    status = SLOWER
                    running = False
                    break
            now = next_ns

            # Copies complete.
            if duplex and (out_end == now or in_end == now):
                is_duplex = out_end != NEVER and in_end != NEVER
                out_work = _remaining(out_work, out_end, out_share if is_duplex else ALONE, now - updated_ns)
                in_work = _remaining(in_work, in_end, in_share if is_duplex else ALONE, now - updated_ns)
                updated_ns = now
                if now < out_end < NEVER:
                    out_end = _end(out_work, ALONE, now)
                    _log_end(log, out_log, out_end)
                if now < in_end < NEVER:
                    in_end = _end(in_work, ALONE, now)
                    _log_end(log, in_log, in_end)
            if out_end == now:
                out_end = NEVER
                gap = gaps[out_row]
                if gap.pending == LEAVING:
                    used -= gap.nbytes
                    n_log = _log(log, n_log, now, now, LOG_LEFT, out_row)
                    if gap.kind == SYNC_SWAP:
                        gate[k] -= GATE_SYNC
                    held = push(ready, child, sibling, held, out_row)
                gap.pending = 0
            if in_end == now:
                gate[gaps[in_row].returns] -= gaps[in_row].weight
                in_end = NEVER

            # The kernel completes, and gaps open.
            if end == now:
                end = NEVER
                kernel = steps[step, STEP_KERNEL] if rerun else k
                if has_host:
                    host = complete(to_issue, host, kernels[DURATION, kernel] > 0, now)
                used -= kernels[WORKSPACE, kernel] + (steps[step, FREED] if rerun else kernels[DIES, k])
                n_log = _log(log, n_log, now, now, LOG_END, kernel)
                if rerun:
                    reruns_left -= kernels[DURATION, kernel]
                    step += 1
                else:
                    if opens[k] >= 0:
                        used, held, queue_tail, n_log = _open_gaps(
                            gaps,
                            opens,
                            by_row,
                            gate,
                            segment_of,
                            copied,
                            held,
                            queue_tail,
                            log,
                            n_log,
                            now,
                            position,
                            k,
                            used,
                            n_segments,
                        )
                    position = position + 1
                    k = k + 1
                    step_limit = limit if k < limit_until else NEVER
                    if k == n or k == next_check:
                        break
        if not running:
            break

        # At a boundary or a check: has the state occurred before?
        is_boundary = k == n
        if is_boundary:
            iteration += 1
            iteration_ns = now - begin
            n_log = _log(log, n_log, now, now, LOG_BOUNDARY, 0)
            for i in range(queue_head, queue_tail):
                queue[i - queue_head] = queue[i]
            queue_head, queue_tail = 0, queue_tail - queue_head
            period = 1
        if has_carryover:
            # The states of a check alternate between this iteration and the last.
            parity = iteration % 2
            state = states[iteration] if is_boundary else states[boundaries + 2 * check + parity]
            previous = states[boundaries + 2 * check + 1 - parity]
            _write_state(state, m, now - begin, child, queue, queue_head, queue_tail)
            if has_host:
                changes = 0 if iteration >= settings[MAX_ITERATIONS] else 2 if has_waited else 1
                host, lead, lead_ns = write_lead(state, m, to_issue, host, now, changes, lead, lead_ns)
                has_waited = False
            if duplex:
                is_duplex = out_end != NEVER and in_end != NEVER
                out_left = _remaining(out_work, out_end, out_share if is_duplex else ALONE, now - updated_ns)
                in_left = _remaining(in_work, in_end, in_share if is_duplex else ALONE, now - updated_ns)
            else:
                out_left = out_end - now
                in_left = in_end - now
            if out_end != NEVER:
                state[out_row] = -2 * out_left
            if in_end != NEVER:
                state[in_row] = -2 * in_left - 1
            if not is_boundary:
                check -= 1
                next_check = first_settled + ((n - first_settled) >> check) if check else n
                if iteration and _equal_states(state, previous, m):  # the rest repeats the last iteration
                    iteration_ns += now - begin - previous[m + LASTED]
                    period = 1
                    status = DONE
                    running = False
                continue
            period = _period_of(states, iteration, m)
        if iteration >= iterations and (period or iteration >= settings[MAX_ITERATIONS]):
            status = DONE
            break

        # Shift to the next iteration's kernels and segments.
        begin = now
        k = 0
        step = 0
        reruns_left = rerun_ns
        check = first_check
        next_check = first_settled + ((n - first_settled) >> check) if has_carryover and check else n
        for r in range(m):
            due[r] -= n_segments * DUE_SEGMENT
        next_segments(by_segment, n_segments)
        step_limit = limit if limit_until > 0 else NEVER

    result[ITERATION_NS] = iteration_ns
    result[PEAK] = peak
    result[PERIOD] = period
    return status, n_log
