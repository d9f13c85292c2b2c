"""Event loop for one plan of one program: the clock of rules.py, compiled.

``event_loop`` reads the plan (lowering.py) and then advances from one completion to the next, by the lines of rule 9.
The functions above it are its stages. Their state is ``clock``, ``links`` (one engine per Link) and ``compute``, all on
the stack: the stages are inlined, so that LLVM keeps the fields in registers. README.md shows the states of a gap and
the optimizations.
"""

from __future__ import annotations

from simulator.compiled.encoding import (
    CHECKS,
    CLOCK,
    DUE_SEGMENT,
    ENGINE,
    GATE,
    HOST,
    NEVER,
    RECOMPUTE,
    STATE,
    STATE_COLUMNS,
    SYNC_SWAP,
    ByKernel,
    ByRow,
    BySegment,
    ByTensor,
    Cause,
    Copy,
    Event,
    Kernels,
    Link,
    Settings,
    Status,
)
from simulator.compiled.heap import OUTSIDE, pop, push
from simulator.compiled.host import Queue, complete, issue, start_host, update_lead
from simulator.compiled.jit import stage
from simulator.compiled.lowering import evict_at_start, fill_waits, first_settled_kernel, mark_missing, read_plan
from simulator.compiled.records import local, named
from simulator.compiled.segments import Segments, add_weight, build_segments, next_segments, obstacle_of
from simulator.machine import ALONE


@stage(inline=True)
def _write_log(clock, log, start, end, event, index):
    """Appends an entry to the log, or overwrites the last one if the log is full."""
    # Entries beyond the end are counted, so that the caller knows how long a log a second run needs.
    if log.size:
        entry = log[min(clock.entries, log.size - 1)]
        entry.start = start
        entry.end = end
        entry.event = event
        entry.index = index
        clock.entries += 1


@stage(inline=True)
def _remaining(engine, speed, now):
    """Returns the remaining work of an engine that has had this speed since its last update; 0 if it is idle."""
    return 0 if engine.end_ns == NEVER else engine.work - speed * (now - engine.updated_ns)


@stage(inline=True)
def _set_speed(engine, speed, now, log):
    """Changes the completion time of a running engine, whose work is up to date, to that at another speed."""
    # Times are integers. Rounded up, no work is left at the completion.
    engine.end_ns = now - (-engine.work // speed)
    if engine.entry < log.size:
        log[engine.entry].end = engine.end_ns


@stage(inline=True)
def _busy(links):
    """Returns the number of links with a copy in flight."""
    count = 0
    for i in range(links.size):
        count += links[i].end_ns != NEVER
    return count


@stage(inline=True)
def _update_links(links, now):
    """Brings the remaining work of all copies up to date."""
    is_shared = _busy(links) > 1
    for i in range(links.size):
        link = links[i]
        link.work = _remaining(link, link.speed if is_shared else ALONE, now)
        link.updated_ns = now


@stage(inline=True)
def _start_copy(clock, links, which, row, ns, event, log):
    """Starts a copy of a row's tensor, which takes ``ns`` if it is alone."""
    # The copies in flight have run without this one until now.
    if clock.is_slowed and _busy(links) > 0:
        _update_links(links, clock.now)
        clock.restarted = 1
    link = links[which]
    link.row = row
    link.work = ns * ALONE
    link.updated_ns = clock.now
    link.end_ns = clock.now + ns
    link.entry = clock.entries
    _write_log(clock, log, clock.now, link.end_ns, event, row)


@stage(inline=True)
def _can_start(links, which, one_engine):
    """Returns whether a link is free; a single engine serves all links."""
    return _busy(links) == 0 if one_engine else links[which].end_ns == NEVER


@stage(inline=True)
def _start_swap_out(clock, links, gaps, by_row, one_engine, log):
    """Starts a swap-out; with one engine, after any swap-in that was issued before it and fits."""
    if clock.head == clock.tail or not _can_start(links, Link.OUT, one_engine):
        return
    row = by_row.queue[clock.head]
    # A pinned swap-in that was issued earlier goes first, unless it was just found not to fit.
    if one_engine and clock.waiting >= 0 and not clock.in_failed:
        if gaps[clock.waiting].pinned != 0 and by_row.ready[clock.waiting] < gaps[row].issued:
            return
    clock.head += 1
    _start_copy(clock, links, Link.OUT, row, gaps[row].out_ns, Event.OUT, log)


@stage(inline=True)
def _start_swap_in(clock, links, compute, gaps, by_row, segments, limit, required, one_engine, log):
    """Starts a swap-in if it fits until its use (rule 5); else notes in ``clock`` when it may fit."""
    clock.next_bytes = NEVER
    if clock.waiting < 0 or not _can_start(links, Link.IN, one_engine):
        return
    row = clock.waiting
    nbytes = gaps[row].nbytes
    clock.next_bytes = nbytes
    # A running kernel has its memory already.
    start = clock.position + (1 if compute.end_ns != NEVER and not clock.in_pass else 0)
    if start <= clock.blocked or clock.used + nbytes > clock.limit:
        return
    # The tensor stays until its use, so that it must fit at every kernel before that.
    first = start - clock.position + clock.kernel
    until = by_row.due[row] // DUE_SEGMENT
    obstacle = obstacle_of(segments, first, until, limit - nbytes, required)
    if obstacle >= 0:
        clock.blocked = obstacle + clock.position - clock.kernel
        return
    clock.blocked = -1
    add_weight(segments, segments.of_kernel[first], until, nbytes)
    clock.waiting = pop(by_row.due, by_row.child, by_row.sibling, row)
    clock.used += nbytes
    clock.peak = max(clock.peak, clock.used)
    _start_copy(clock, links, Link.IN, row, gaps[row].in_ns, Event.IN, log)
    clock.next_bytes = NEVER


@stage
def _move_ready(by_row, held, waiting, position, blocked):
    """Moves the rows of ``held`` that are ready to ``waiting``; returns both roots, and ``blocked``."""
    while held >= 0 and by_row.ready[held] <= position:
        r = held
        held = pop(by_row.ready, by_row.child, by_row.sibling, held)
        waiting = push(by_row.due, by_row.child, by_row.sibling, waiting, r)
        # The next swap-in is another one, for which no obstacle is known yet.
        if waiting == r:
            blocked = -1
    return held, waiting, blocked


@stage(inline=True)
def _start_copies(clock, links, compute, gaps, by_row, segments, limit, required, one_engine, log):
    """Starts the copies that can start; returns whether a swap-out may now pass a swap-in that does not fit."""
    if clock.held >= 0 and by_row.ready[clock.held] <= clock.position:
        clock.held, clock.waiting, clock.blocked = _move_ready(
            by_row, clock.held, clock.waiting, clock.position, clock.blocked
        )
    _start_swap_out(clock, links, gaps, by_row, one_engine, log)
    _start_swap_in(clock, links, compute, gaps, by_row, segments, limit, required, one_engine, log)
    # If a swap-out waits and nothing is in flight, it has given way to a swap-in that does not fit.
    if one_engine:
        clock.in_failed = clock.head < clock.tail and _busy(links) == 0
        if clock.in_failed:
            return True
    # Copies that start at the same time share the links from the start.
    if clock.restarted:
        clock.restarted = 0
        for i in range(links.size):
            if links[i].end_ns != NEVER:
                _set_speed(links[i], links[i].speed, clock.now, log)
    return False


@stage(inline=True)
def _run_plain(clock, kernels, gate, horizon):
    """Executes plain kernels up to ``horizon`` (completion of a copy) or until the next swap-in may fit.

    Returns whether it may fit.
    """
    begins = kernels.begins
    live = kernels.live
    level = kernels.level
    k = clock.kernel
    # Plain kernels wait for nothing: time and memory differ from the unplanned program by constants.
    offset_ns = clock.now - begins[k]
    extra_bytes = clock.used - level[k]
    max_live = clock.limit - extra_bytes
    room = clock.limit - extra_bytes - clock.next_bytes
    end_limit = horizon - offset_ns
    # The swap-in cannot fit before the end of this kernel.
    plain_until = clock.blocked - clock.position + k
    top = -NEVER
    may_fit = False
    while gate[k].word == 0 and live[k] <= max_live and begins[k + 1] < end_limit and not may_fit:
        top = max(top, live[k])
        k += 1
        may_fit = level[k] <= room and k > plain_until
    clock.now = begins[k] + offset_ns
    clock.position += k - clock.kernel
    clock.kernel = k
    clock.used = level[k] + extra_bytes
    clock.peak = max(clock.peak, top + extra_bytes)
    return may_fit


@stage(inline=True)
def _waits_for_data(clock, by_kernel, gate):
    """Returns whether the next kernel, or a step of its pass, reads an evicted tensor."""
    return by_kernel.missing_in_pass[clock.kernel] > 0 if clock.in_pass else gate[clock.kernel].missing > 0


@stage(inline=True)
def _start_step(clock, compute, kernels, by_kernel, gate, queue, host, has_host, waits, log):
    """Starts a kernel or a recomputed kernel, if nothing holds it up."""
    clock.unissued = 0
    if compute.end_ns != NEVER:
        return
    k = clock.kernel
    steps = queue.steps
    clock.in_pass = clock.step < queue.n_steps and steps[clock.step].before == k
    kernel = steps[clock.step].kernel if clock.in_pass else k
    change = kernels.workspace[kernel] + (steps[clock.step].allocated if clock.in_pass else kernels.born[k])
    if gate[k].sync or _waits_for_data(clock, by_kernel, gate) or clock.used + change > clock.limit:
        return
    if has_host:
        issue(queue, host, clock.now)
        if host.issued == 0:
            clock.unissued = 1
            host.has_waited = 1
            return
        host.issued -= 1
    clock.used += change
    clock.peak = max(clock.peak, clock.used)
    ns = kernels.duration[kernel]
    if waits and not clock.in_pass:
        ns += by_kernel.waits[k]
    compute.row = kernel
    compute.end_ns = clock.now + ns
    compute.work = ns * ALONE
    compute.updated_ns = clock.now
    compute.speed = ALONE
    compute.entry = clock.entries
    event = Event.RECOMPUTE if clock.in_pass else Event.KERNEL
    _write_log(clock, log, clock.now, compute.end_ns, event, kernel)


@stage(inline=True)
def _contend(clock, links, compute, loss, log):
    """Adapts the speed of the running step to the copies beside it."""
    speed = ALONE - _busy(links) * loss[compute.row]
    if speed != compute.speed:
        compute.work = _remaining(compute, compute.speed, clock.now)
        compute.updated_ns = clock.now
        compute.speed = speed
        _set_speed(compute, speed, clock.now, log)


@stage(inline=True)
def _next_copy_ns(links):
    """Returns the next completion time of a copy."""
    ns = NEVER
    for i in range(links.size):
        ns = min(ns, links[i].end_ns)
    return ns


@stage(inline=True)
def _advance(clock, links, compute, kernels, by_kernel, gate, host, pass_ns, max_delay, log):
    """Advances to the next completion; returns whether the simulation continues.

    Args:
        pass_ns: Duration of all recomputed kernels.
        max_delay: Smallest delay of the iteration that reaches the cutoff.
    """
    next_ns = min(compute.end_ns, _next_copy_ns(links))
    if clock.unissued:
        next_ns = min(next_ns, host.next_ns)
    if next_ns == NEVER:
        return False
    if compute.end_ns == NEVER and next_ns > clock.now:
        if log.size:
            cause = Cause.MEMORY
            if clock.unissued:
                cause = Cause.ISSUE
            elif links[Link.IN].end_ns != NEVER and _waits_for_data(clock, by_kernel, gate):
                cause = Cause.DATA
            _write_log(clock, log, clock.now, next_ns, Event.STALL, cause.value)
        # The rest of the iteration takes at least the time of its kernels.
        if next_ns - kernels.begins[clock.kernel] - pass_ns + clock.passes_left_ns >= max_delay:
            clock.status = Status.SLOWER
            return False
    clock.now = next_ns
    return True


@stage(inline=True)
def _complete_copies(clock, links, gaps, by_row, by_kernel, gate, log):
    """Completes copies: the others speed up, and memory or inputs become available."""
    now = clock.now
    if _next_copy_ns(links) > now:
        return
    # What remains in flight is alone from now on.
    if clock.is_slowed and _busy(links) > 1:
        _update_links(links, now)
        for i in range(links.size):
            if now < links[i].end_ns < NEVER:
                _set_speed(links[i], ALONE, now, log)
    link = links[Link.OUT]
    if link.end_ns == now:
        link.end_ns = NEVER
        gap = gaps[link.row]
        # If the gap has opened meanwhile, its memory is free only now; else it will be when the gap opens.
        if gap.copy == Copy.LEAVING:
            clock.used -= gap.nbytes
            _write_log(clock, log, now, now, Event.LEFT, link.row)
            if gap.kind == SYNC_SWAP:
                gate[clock.kernel].sync -= 1
            clock.held = push(by_row.ready, by_row.child, by_row.sibling, clock.held, link.row)
        gap.copy = Copy.DONE
    link = links[Link.IN]
    if link.end_ns == now:
        link.end_ns = NEVER
        mark_missing(gaps[link.row], gate, by_kernel.missing_in_pass, -1)


@stage(inline=True)
def _open_gaps(clock, gaps, by_row, by_kernel, gate, copied, n_segments, log):
    """Issues copies and opens gaps at the end of the kernel."""
    k = clock.kernel
    position = clock.position
    n = gate.size - 1
    entry = by_kernel.opens[k]
    while entry >= 0:
        r = entry >> 1
        is_early = entry & 1
        entry = by_row.next_open[entry]
        gap = gaps[r]
        t = gap.tensor
        # Dropping takes no copy.
        if gap.kind == RECOMPUTE:
            clock.used -= gap.nbytes
            continue
        if is_early or gap.lead == 0:
            # The tensor is copied unless the host has its last version.
            if copied[t] < position - gap.since_write + (gap.lead if is_early else 0):
                gap.copy = Copy.PENDING
                gap.issued = position + 1
                by_row.queue[clock.tail] = r
                clock.tail += 1
            copied[t] = position
        if not is_early:
            due = by_kernel.segment[gap.returns] + (n_segments if gap.returns <= k else 0)
            by_row.due[r] = due * DUE_SEGMENT + t
            mark_missing(gap, gate, by_kernel.missing_in_pass, 1)
            by_row.ready[r] = position + gap.hold
            if gap.copy == Copy.DONE:
                clock.held = push(by_row.ready, by_row.child, by_row.sibling, clock.held, r)
                clock.used -= gap.nbytes
                _write_log(clock, log, clock.now, clock.now, Event.LEFT, r)
            else:
                gap.copy = Copy.LEAVING
                if gap.kind == SYNC_SWAP:
                    gate[k + 1 if k + 1 < n else 0].sync += 1


@stage(inline=True)
def _complete_step(clock, compute, kernels, queue, host, has_host, log):
    """Completes a kernel or a recomputed kernel; returns whether it was a kernel."""
    compute.end_ns = NEVER
    kernel = compute.row
    if has_host:
        complete(queue, host, kernels.duration[kernel] > 0, clock.now)
    freed = queue.steps[clock.step].freed if clock.in_pass else kernels.dies[kernel]
    clock.used -= kernels.workspace[kernel] + freed
    _write_log(clock, log, clock.now, clock.now, Event.END, kernel)
    if clock.in_pass:
        clock.passes_left_ns -= kernels.duration[kernel]
        clock.step += 1
        return False
    return True


@stage(inline=True)
def _write_state(clock, links, by_row, host, at_start, m, state):
    """Writes the state of the simulation (rule 10): its head, and the status of each of m rows.

    1: on the host; 2 and more: position in the queue; negative: remaining time of a copy in flight; 0: none of these.
    """
    head = state[:STATE_COLUMNS].view(STATE)[0]
    status = state[STATE_COLUMNS:]
    head.lasted_ns = clock.now - clock.begin
    head.lead = host.lead
    head.lead_ns = host.lead_ns
    head.at_start = at_start
    for r in range(m):
        status[r] = by_row.child[r] != OUTSIDE
    for j in range(clock.head, clock.tail):
        status[by_row.queue[j]] = 2 + j - clock.head
    is_shared = _busy(links) > 1
    for i in range(links.size):
        link = links[i]
        if link.end_ns != NEVER:
            # The link is part of the value: a copy out and a copy in with equal remaining times are different states.
            left = link.end_ns - clock.now
            if clock.is_slowed:
                left = _remaining(link, link.speed if is_shared else ALONE, clock.now)
            status[link.row] = -links.size * left - i


@stage
def _lasted_ns(states, i):
    """Returns the duration of the iteration until state i."""
    return states[i][:STATE_COLUMNS].view(STATE)[0].lasted_ns


@stage
def _are_equal(states, i, j, m):
    """Returns whether two states of m rows are equal."""
    c = 1  # without ``lasted_ns``
    while c < STATE_COLUMNS + m and states[i, c] == states[j, c]:
        c += 1
    return c == STATE_COLUMNS + m


@stage
def _period_of(states, iteration, m):
    """Returns rules._period after iteration i."""
    slowest = 0
    period = 0
    earlier = iteration - 1
    while earlier >= 0:
        slowest = max(slowest, _lasted_ns(states, earlier + 1))
        if _are_equal(states, iteration, earlier, m):
            period = iteration - earlier if _lasted_ns(states, iteration) == slowest else 0
            earlier = 0
        earlier -= 1
    return period


@stage(inline=True)
def _check_kernel(first_settled, n, check):
    """Returns the kernel before which the state is compared: in the first iteration with ``check`` checks left."""
    return first_settled + ((n - first_settled) >> check) if check else n


@stage(inline=True)
def _check_state(states, check, iteration):
    """Returns the index of the state at a check, which alternates between this iteration and the last."""
    return states.shape[0] - 2 * (CHECKS + 1) + 2 * check + iteration % 2


@stage(inline=True)
def _repeats(clock, states, first_settled, n, m):
    """Compares the state at a check with that of the last iteration; returns whether they are equal."""
    this = _check_state(states, clock.check, clock.iteration)
    last = _check_state(states, clock.check, clock.iteration + 1)
    clock.check -= 1
    clock.next_check = _check_kernel(first_settled, n, clock.check)
    if clock.iteration and _are_equal(states, this, last, m):
        # The rest repeats the last iteration.
        clock.iteration_ns += clock.now - clock.begin - _lasted_ns(states, last)
        clock.period = 1
        clock.status = Status.DONE
        return True
    return False


@stage(inline=True)
def _end_iteration(clock, by_row, log):
    """Counts an iteration and moves the queue to the start of its array."""
    clock.iteration += 1
    clock.iteration_ns = clock.now - clock.begin
    clock.period = 1
    _write_log(clock, log, clock.now, clock.now, Event.BOUNDARY, 0)
    # Without the move, the queue would outgrow its array after some iterations.
    for i in range(clock.head, clock.tail):
        by_row.queue[i - clock.head] = by_row.queue[i]
    clock.tail -= clock.head
    clock.head = 0


@stage(inline=True)
def _begin_iteration(clock, limit, pass_ns, checks, first_settled, n):
    """Resets what counts from the start of an iteration. ``limit``: in force at the first kernel."""
    clock.begin = clock.now
    clock.kernel = 0
    clock.step = 0
    clock.limit = limit
    clock.passes_left_ns = pass_ns
    clock.check = checks
    clock.next_check = _check_kernel(first_settled, n, checks)


@stage(inline=True)
def _start_engines(clock, compute, links, settings):
    """Makes all engines idle, with the speeds of the machine."""
    compute.end_ns = links[Link.OUT].end_ns = links[Link.IN].end_ns = NEVER
    links[Link.OUT].speed = settings.d2h_share
    links[Link.IN].speed = settings.h2d_share
    clock.is_slowed = settings.d2h_share < ALONE or settings.h2d_share < ALONE


@stage(inline=True)
def _segments(by_kernel, by_segment, limit_until, n_segments):
    """Builds the segments."""
    planned = by_kernel.planned
    enforced = planned
    if limit_until < planned.size - 1:
        enforced = by_kernel.enforced
        for k in range(planned.size):
            enforced[k] = planned[k] if k < limit_until else -NEVER
    segments = Segments(
        by_kernel.segment,
        enforced,
        by_kernel.tops,
        by_kernel.added,
        by_segment.first,
        by_segment.highest,
        by_segment.expected,
        by_segment.tops,
        by_segment.added,
    )
    build_segments(segments, n_segments)
    return segments


@stage(inline=True)
def _place_checks(gate, first_settled):
    """Stops plain kernels at up to CHECKS kernels, at which the state is compared; returns their number."""
    n = gate.size - 1
    checks = CHECKS
    while checks > 0 and (n - first_settled) >> checks == 0:
        checks -= 1
    for c in range(1, checks + 1):
        gate[_check_kernel(first_settled, n, c) - 1].has_event = 1
    return checks


@stage
def event_loop(tables, work, rows, lowering, limit_until, cutoff, iterations, result, log):
    """Simulates one plan whose planned residency fits.

    Args:
        tables, work, lowering: Named tuples of encoding.py.
        limit_until: The limit is enforced for kernels before this one.
        cutoff: Stop if the iteration takes at least this many ns.
        iterations: Least number of simulated iterations.
        result: RESULT, filled.
        log: LOG (entries,), filled; needs one spare entry. With zero entries, no log is written.
        rows: int64 (decisions, 6), the plan.

    Returns:
        The number of log entries.
    """
    kernels = named(Kernels, tables.kernels)
    settings = named(Settings, tables.settings)
    by_kernel = named(ByKernel, work.by_kernel)
    by_row = named(ByRow, work.by_row)
    by_segment = named(BySegment, work.by_segment)
    copied = named(ByTensor, work.by_tensor).copied
    gate = by_kernel.gate.view(GATE)
    gaps = work.gaps
    states = work.states
    n = gate.size - 1
    m = rows.shape[0]
    pass_ns = lowering.rerun_ns
    limit = settings.limit
    n_segments, on_host, has_early_copy = read_plan(tables, work, rows, lowering.recomputes)
    if on_host > settings.host_bytes:  # conservative: they need not be on the host at the same time
        result.status = Status.HOST_FULL
        return 0
    waits = fill_waits(rows, gaps, by_kernel.waits, gate, settings)
    segments = _segments(by_kernel, by_segment, limit_until, n_segments)
    if 0 < limit_until < n:
        gate[limit_until - 1].has_event = 1  # the limit changes here

    clock = local(CLOCK, 1)[0]
    compute = local(ENGINE, 1)[0]
    links = local(ENGINE, 2)
    host = local(HOST, 1)[0]
    _start_engines(clock, compute, links, settings)
    one_engine = settings.copy_engines == 1
    contends = settings.contends > 0
    clock.held, nbytes = evict_at_start(work, rows, lowering.recomputes)
    clock.waiting = clock.blocked = -1
    clock.used = clock.peak = settings.persistent_bytes - nbytes
    queue = Queue(
        kernels.duration, work.steps, lowering.n_steps, by_kernel.issues, settings.issue_ns, settings.queue_depth
    )
    # Lower bound on the duration of an iteration.
    bound = kernels.begins[n] + pass_ns
    has_host = start_host(host, queue, rows, gaps, bound)

    # States at the boundaries, then at CHECKS kernels of the iteration. Not needed if nothing is carried over a
    # boundary, because then all iterations are alike.
    first_settled = first_settled_kernel(tables, work, rows)
    has_carryover = clock.held >= 0 or first_settled > 0 or has_early_copy or has_host
    checks = 0
    if has_carryover:
        _write_state(clock, links, by_row, host, first_settled, m, states[0])
        if log.size == 0 and not has_host:
            checks = _place_checks(gate, first_settled)
    # With a carryover, a slow first iteration says nothing about the steady one.
    max_delay = NEVER if has_carryover else cutoff - bound
    # No iteration is shorter than its kernels.
    running = bound < cutoff
    clock.status = Status.STUCK if running else Status.SLOWER
    first_limit = limit if limit_until > 0 else NEVER
    _begin_iteration(clock, first_limit, pass_ns, checks, first_settled, n)
    while running:
        if _start_copies(clock, links, compute, gaps, by_row, segments, limit, lowering.required, one_engine, log):
            continue
        # Plain kernels run in one go, except if each is logged, issued or slowed down.
        is_alone = not contends or _busy(links) == 0
        if compute.end_ns == NEVER and gate[clock.kernel].word == 0 and log.size == 0 and is_alone and not has_host:
            before = clock.kernel
            may_fit = _run_plain(clock, kernels, gate, _next_copy_ns(links))
            is_ready = clock.held >= 0 and by_row.ready[clock.held] <= clock.position and clock.kernel != before
            if may_fit or is_ready:
                continue
        _start_step(clock, compute, kernels, by_kernel, gate, queue, host, has_host, waits, log)
        if contends and compute.end_ns != NEVER:
            _contend(clock, links, compute, kernels.loss, log)
        if not _advance(clock, links, compute, kernels, by_kernel, gate, host, pass_ns, max_delay, log):
            break
        _complete_copies(clock, links, gaps, by_row, by_kernel, gate, log)
        if compute.end_ns != clock.now or not _complete_step(clock, compute, kernels, queue, host, has_host, log):
            continue
        if by_kernel.opens[clock.kernel] >= 0:
            _open_gaps(clock, gaps, by_row, by_kernel, gate, copied, n_segments, log)
        clock.position += 1
        clock.kernel += 1
        clock.limit = limit if clock.kernel < limit_until else NEVER
        is_boundary = clock.kernel == n
        if not is_boundary and clock.kernel != clock.next_check:
            continue

        # At a boundary or a check: has the state occurred before?
        if is_boundary:
            _end_iteration(clock, by_row, log)
        if has_carryover:
            if has_host:
                update_lead(queue, host, clock.now, clock.iteration < settings.max_iterations)
            state = clock.iteration if is_boundary else _check_state(states, clock.check, clock.iteration)
            _write_state(clock, links, by_row, host, 0, m, states[state])
            if not is_boundary:
                running = not _repeats(clock, states, first_settled, n, m)
                continue
            clock.period = _period_of(states, clock.iteration, m)
        if clock.iteration >= iterations and (clock.period or clock.iteration >= settings.max_iterations):
            clock.status = Status.DONE
            break
        _begin_iteration(clock, first_limit, pass_ns, checks, first_settled, n)
        # Segments count from the start of the iteration.
        for r in range(m):
            by_row.due[r] -= n_segments * DUE_SEGMENT
        next_segments(segments, n_segments)
    result.status = clock.status
    result.iteration_ns = clock.iteration_ns
    result.peak = clock.peak
    result.period = clock.period
    return clock.entries
