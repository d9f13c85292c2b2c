"""The clock of reference.py, compiled: one plan of one program, from arrays to figures.

engine.py calls this from Python only, as it does chains.py.

How it is fast: sizes, births and deaths are added up per kernel beforehand, so that a kernel that no
decision touches costs a few additions; the planned residency of a plan without recomputation is one
prefix sum (chains.py has the rest); a swap-in that does not fit is not tried again before the last kernel
beside which it does not fit has ended. A plan under which no swap of a persistent tensor is carried over the
end of an iteration is steady after one. Rule 5's "fits at every kernel until it is used" is kept per segment,
a run of kernels that ends where something is due: what came back early is due at the end of a segment, so
it weighs on all of a segment or on nothing of it, and the rule is one maximum over an array, a charge one
addition to it (a vector loop each).
"""

from __future__ import annotations

import numpy as np
from numba import njit

# isort: off
from simulator.compiled.encoding import (
    AFTER, ALLOCATED, AWAY_AT_START, BEFORE, BORN, BY_REMAT, D2H, DIES, DURATION, EXTRA, FREED, GONE, H2D, KIND, LIVE,
    LOG_RECOMPUTE, LOG_BOUNDARY, LOG_IN, LOG_KERNEL, LOG_MEMORY, LOG_OUT, LOG_STALL, NEVER, PERSISTENT, RECOMPUTE,
    RETURNS, SIZE, STEP_AT, STEP_KERNEL, SYNC_SWAP, TENSOR, WORKSPACE,
)  # fmt: skip
# isort: on

_SYNC, _BUSY, _REMAT = 2**41, 2**40, 2**20  # parts of `gate` in run


@njit(cache=True)
def plan_swaps(kernels, tensors, rows, residency):  # type: ignore[no-untyped-def]
    """Planned residency of a plan without recomputation: the load less what is away."""
    n = kernels.shape[1]
    need, change = residency[0], residency[1]
    change[:] = 0
    for r in range(rows.shape[0]):
        size, after, before = tensors[SIZE, rows[r, TENSOR]], rows[r, AFTER], rows[r, BEFORE]
        if after >= before:
            change[0] -= size
        if after + 1 < n:
            change[after + 1] -= size
        change[before] += size
    away = 0
    load = kernels[LIVE]
    for k in range(n):
        away += change[k]
        need[k] = load[k] + away


@njit(cache=True)
def _log(log, count, start, end, what, index):  # type: ignore[no-untyped-def]
    """Appends to the log while there is room; returns how many entries there would be with room for all."""
    if count < log.shape[0]:
        log[count, 0], log[count, 1], log[count, 2], log[count, 3] = start, end, what, index
    return count + 1


@njit(cache=True)
def _log_memory(log, count, now, used, change):  # type: ignore[no-untyped-def]
    return _log(log, count, now, now, LOG_MEMORY, used) if change else count


@njit(cache=True)
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


@njit(cache=True)
def run(  # type: ignore[no-untyped-def]
    kernels, tensors, graph, rows, by_row, by_kernel, steps, residency, base, limit, until, iterations, most,
    copy_engines, host_bytes, log,
):  # fmt: skip
    """Returns (status, iteration_ns, required, peak, entries of the log, detail, used).

    status 0: done, ``detail`` is the period; 1: out of memory at kernel ``detail``; 2: ``detail`` bytes are too many
    for the host. ``iterations``, ``most``: how many are simulated at least, and at most.
    """
    n, m = kernels.shape[1], rows.shape[0]
    duration, workspace, born, dies = kernels[DURATION], kernels[WORKSPACE], kernels[BORN], kernels[DIES]
    size, write_at = tensors[SIZE], graph[2 * n + 2 :]
    # Each call of _log stays behind `if record`: LLVM then makes a loop without them, which is 2.7 times as fast.
    record = log.shape[0] > 0
    recomputes = by_row.shape[0] > 0
    if not recomputes:
        plan_swaps(kernels, tensors, rows, residency)
    need = enforced = residency[0]
    required = 0
    for k in range(n):
        required = max(required, need[k])
    if required > limit:
        for k in range(min(until, n)):
            if need[k] > limit:
                there = kernels[LIVE, k] - by_kernel[GONE, k] if recomputes else need[k]
                return 1, NEVER, required, 0, 0, k, there - workspace[k] - born[k]
    if until < n:
        enforced = residency[1]  # far below 0 where the limit does not count
        enforced[:until], enforced[until:] = need[:until], -NEVER

    copied = np.full(tensors.shape[1], -NEVER, np.int64)  # per tensor: position of its newest host copy
    # Per row: bytes and times; what it adds to `gate`; kernels since the tensor was last written, and until it may
    # come back; while away, the segment that begins with its use and the position from which it may come back.
    room = np.empty((11, m), np.int64)  # one allocation: each costs some 30 ns
    nbytes, out_ns, in_ns, weight, written, hold = room[0], room[1], room[2], room[3], room[4], room[5]
    goal, ready, waiting, pinned, returns = room[6], room[7], room[8], room[9], room[10]
    follows = np.full(m + n, -1, np.int64)  # m + k begins the list of the rows that open at kernel k, by tensor
    queue = np.empty(2 * m + 1, np.int64)  # what is left from the iteration before, and each row once
    q_head = q_tail = 0
    n_waiting = n_pinned = 0  # on the host, the next to come back last; on the host, not to come back yet
    # Per kernel: how many of the tensors it needs are away, plus _REMAT for each that its chain needs, plus _BUSY
    # if anything else happens at its start or end, plus _SYNC for each swap-out that it waits for as the next one.
    # Kernels with 0 are plain.
    gate = np.zeros(n, np.int64)
    gate[n - 1] = _BUSY
    starts, n_segments = np.zeros(n, np.bool_), 1
    starts[0] = True
    used, on_host = base, 0
    for r in range(m):
        t, after = rows[r, TENSOR], rows[r, AFTER]
        back = returns[r] = by_row[r, RETURNS] if recomputes else rows[r, BEFORE]
        at = m + after
        while follows[at] >= 0 and rows[follows[at], TENSOR] < t:
            at = follows[at]
        follows[at], follows[r] = r, follows[at]
        nbytes[r] = size[t]
        gate[after] |= _BUSY
        if rows[r, KIND] == RECOMPUTE:
            gate[back] |= _BUSY
            continue
        if copied[t] == -NEVER:
            copied[t] = -NEVER + 1
            on_host += size[t]
        out_ns[r], in_ns[r] = tensors[D2H, t], tensors[H2D, t]
        n_segments += not starts[back]
        starts[back] = True
        weight[r] = 1 + _REMAT * by_row[r, BY_REMAT] if recomputes else 1
        hold[r] = 1
        pin = rows[r, EXTRA]
        if pin >= 0:
            gate[pin] |= _BUSY
            hold[r] = pin - after + 1 if pin >= after else pin - after + 1 + n
        written[r] = after - graph[write_at[t + 1] - 1] + n if write_at[t] < write_at[t + 1] else NEVER // 2
        for i in range(write_at[t + 1] - 1, write_at[t] - 1, -1):
            if graph[i] <= after:
                written[r] = after - graph[i]
                break
    if on_host > host_bytes:
        return 2, NEVER, required, 0, 0, on_host, 0

    # A segment ends before a kernel at which something is due, or with the iteration. By segment of this iteration
    # and the next, `worst` is the largest planned residency plus what came back early; `high` is without the latter.
    # The one that has begun counts from the present kernel only: `crest` is the largest from a kernel to its end.
    segment, crest = np.empty(n + 1, np.int64), np.empty(n, np.int64)
    high, first = np.empty(n_segments, np.int64), np.empty(n_segments + 1, np.int64)
    segment[n], first[n_segments] = n_segments, n
    top, at = -NEVER, n_segments - 1
    for k in range(n - 1, -1, -1):
        top = max(top, enforced[k])
        segment[k], crest[k] = at, top
        high[at], first[at] = top, k
        if starts[k]:
            top = -NEVER
            at -= 1
    # Uses lie at most one iteration ahead.
    worst = np.empty(2 * n_segments, np.int64)
    worst[:n_segments], worst[n_segments:] = high, high

    now, position, k, iteration, begin = 0, 0, 0, 0, 0
    s, rerun, out_row, back_row = 0, False, 0, 0
    end = out_end = back_end = NEVER  # of what is under way
    blocked = -1  # the head of `waiting` cannot come back before the kernel at this position has ended
    for r in range(m):
        away = by_row[r, AWAY_AT_START] == 1 if recomputes else rows[r, AFTER] >= returns[r]
        if away and rows[r, KIND] != RECOMPUTE:
            used -= nbytes[r]
            copied[rows[r, TENSOR]] = rows[r, AFTER] - n
            ready[r] = rows[r, AFTER] - n + hold[r]
            goal[r] = segment[returns[r]]
            gate[returns[r]] += weight[r]
            pinned[n_pinned] = r
            n_pinned += 1
    # A swap between two uses of a persistent tensor makes a copy that is valid at the boundary, unlike at the start.
    makes_copies = False
    for r in range(m):
        t = rows[r, TENSOR]
        if rows[r, KIND] != RECOMPUTE and tensors[PERSISTENT, t] and copied[t] == -NEVER + 1:
            makes_copies |= write_at[t] == write_at[t + 1] or graph[write_at[t + 1] - 1] <= rows[r, AFTER]
    # Per boundary, where anything is carried over one: by row, 1 on the host, 2 and more in the queue, below 0 what the
    # copy under way still takes; whether there are only the copies of the start; what the iteration has lasted.
    states = np.empty((4 if n_pinned or makes_copies else 0, m + 2), np.int64)
    if states.size:
        states[0, :m], states[0, m] = 0, makes_copies
        for i in range(n_pinned):
            states[0, pinned[i]] = 1
    peak = used
    limit_here = limit if until > 0 else NEVER
    n_log = _log(log, 0, 0, 0, LOG_MEMORY, used)
    fresh = True  # pinned swap-ins may have become ready
    while True:
        while True:
            if fresh and n_pinned:
                left = 0
                for i in range(n_pinned):
                    r = pinned[i]
                    if ready[r] > position and returns[r] != k:
                        pinned[left] = r
                        left += 1
                        continue
                    at = n_waiting  # sorted by (use, tensor), the smallest last
                    while at > 0 and (
                        goal[waiting[at - 1]] < goal[r]
                        or (goal[waiting[at - 1]] == goal[r] and rows[waiting[at - 1], TENSOR] < rows[r, TENSOR])
                    ):
                        waiting[at] = waiting[at - 1]
                        at -= 1
                    waiting[at] = r
                    if at == n_waiting:
                        blocked = -1
                    n_waiting += 1
                n_pinned = left
            fresh = False
            # Copies start.
            if q_head < q_tail and out_end == NEVER and (copy_engines == 2 or back_end == NEVER):
                out_row = queue[q_head]
                q_head += 1
                out_end = now + out_ns[out_row]
                if record:
                    n_log = _log(log, n_log, now, out_end, LOG_OUT, rows[out_row, TENSOR])
            head_bytes = NEVER  # of the next swap-in, where the engine is free for it
            if n_waiting and back_end == NEVER and (copy_engines == 2 or out_end == NEVER):
                r = waiting[n_waiting - 1]
                head_bytes = nbytes[r]
                start = position + (end != NEVER and not rerun)
                if start > blocked and used + head_bytes <= limit_here:
                    blocked = -1
                    fits = limit - head_bytes
                    at, origin, shift = start - position + k, position - k, 0
                    if at == n:
                        at, origin, shift = 0, origin + n, shift + n_segments
                    low, stop = segment[at] + shift, goal[r]
                    # The first test is a bound that often holds: all that came early beside the worst of all kernels.
                    if low < stop and required + worst[low] - high[low - shift] > fits:
                        top = worst[stop - 1] if low + 1 < stop else -NEVER  # it mostly decides
                        if top <= fits:
                            later = worst[low + 1 : stop]  # a slice, because LLVM makes gathers of worst[j]
                            for j in range(later.size):
                                top = max(top, later[j])
                        j = -1  # the last segment beside which it does not fit
                        if top > fits:
                            j = stop - 1
                            while worst[j] <= fits:
                                j -= 1
                        elif crest[at] + worst[low] - high[low - shift] > fits:
                            j = low
                        if j >= 0:
                            if j >= shift + n_segments:
                                shift, origin = shift + n_segments, origin + n
                            came, q = worst[j] - high[j - shift], first[j - shift + 1] - 1
                            while enforced[q] + came <= fits:
                                q -= 1
                            blocked = q + origin
                    if blocked < 0:
                        beside = worst[low:stop]
                        for j in range(beside.size):
                            beside[j] += head_bytes
                        n_waiting -= 1
                        used += head_bytes
                        peak = max(peak, used)
                        back_row, back_end = r, now + in_ns[r]
                        if record:
                            n_log = _log(log, n_log, now, back_end, LOG_IN, rows[r, TENSOR])
                            n_log = _log_memory(log, n_log, now, used, head_bytes)
                        head_bytes = NEVER
            if end == NEVER:
                # Plain kernels, up to the next completion of a copy or the next chance of a swap-in.
                if gate[k] == 0 and not record:
                    until_time, came_from, chance = min(out_end, back_end), position, False
                    while gate[k] == 0:
                        change = used + workspace[k] + born[k]
                        then = now + duration[k]
                        if change > limit_here or then >= until_time:
                            break
                        peak = max(peak, change)
                        used += born[k] - dies[k]
                        now = then
                        position, k = position + 1, k + 1
                        limit_here = limit if k < until else NEVER
                        if used + head_bytes <= limit_here and position > blocked:
                            chance = True
                            break
                    if position != came_from:
                        if recomputes:
                            s = by_kernel[STEP_AT, k]
                        if chance or (n_pinned and gate[k] & (_BUSY - 1)):
                            fresh = True
                            continue
                # A kernel starts.
                rerun = recomputes and s < by_kernel[STEP_AT, k + 1]
                which = steps[s, STEP_KERNEL] if rerun else k
                change = workspace[which] + (steps[s, ALLOCATED] if rerun else born[k])
                missing = gate[k] & (_BUSY - 1)  # what is away
                if gate[k] < _SYNC and (missing < _REMAT if rerun else missing == 0) and used + change <= limit_here:
                    used += change
                    peak = max(peak, used)
                    end = now + duration[which]
                    if record:
                        n_log = _log(log, n_log, now, end, LOG_RECOMPUTE if rerun else LOG_KERNEL, which)
                        n_log = _log_memory(log, n_log, now, used, change)
            # On to the next completion.
            then = min(end, min(out_end, back_end))
            if then == NEVER:
                raise AssertionError("nothing is under way: the planned residency promised that this cannot be")
            if record and end == NEVER and then > now:
                missing = gate[k] & (_BUSY - 1)
                waits = missing >= _REMAT if rerun else missing > 0
                n_log = _log(log, n_log, now, then, LOG_STALL, waits and back_end != NEVER)
            now = then
            # Copies complete.
            if out_end == now:
                used -= nbytes[out_row]
                if record:
                    n_log = _log_memory(log, n_log, now, used, nbytes[out_row])
                out_end = NEVER
                if rows[out_row, KIND] == SYNC_SWAP:
                    gate[k] -= _SYNC
                pinned[n_pinned] = out_row
                n_pinned += 1
                fresh = True
            if back_end == now:
                gate[returns[back_row]] -= weight[back_row]
                back_end = NEVER
            # The kernel completes.
            if end == now:
                end = NEVER
                change = workspace[steps[s, STEP_KERNEL]] + steps[s, FREED] if rerun else workspace[k] + dies[k]
                used -= change
                if record:
                    n_log = _log_memory(log, n_log, now, used, change)
                if rerun:
                    s += 1
                else:
                    r = follows[m + k]
                    while r >= 0:
                        leaves = True
                        if rows[r, KIND] != RECOMPUTE:
                            t = rows[r, TENSOR]
                            goal[r] = segment[returns[r]] + (n_segments if returns[r] <= k else 0)
                            gate[returns[r]] += weight[r]
                            ready[r] = position + hold[r]
                            leaves = copied[t] >= position - written[r]
                            copied[t] = position
                            if leaves:
                                pinned[n_pinned] = r
                                n_pinned += 1
                            else:
                                queue[q_tail] = r
                                q_tail += 1
                                if rows[r, KIND] == SYNC_SWAP:
                                    gate[k + 1 if k + 1 < n else 0] += _SYNC
                        if leaves:
                            used -= nbytes[r]
                            if record:
                                n_log = _log_memory(log, n_log, now, used, nbytes[r])
                        r = follows[r]
                    fresh = True
                    position, k = position + 1, k + 1
                    if k == n:
                        break
                    limit_here = limit if k < until else NEVER
                    if recomputes:
                        s = by_kernel[STEP_AT, k]
        k = 0
        if record:
            n_log = _log(log, n_log, now, now, LOG_BOUNDARY, 0)
        for i in range(q_head, q_tail):
            queue[i - q_head] = queue[i]
        q_head, q_tail = 0, q_tail - q_head
        iteration += 1
        period = 1
        if states.size:
            if iteration == states.shape[0]:
                more = np.empty((2 * iteration, m + 2), np.int64)
                more[:iteration] = states
                states = more
            states[iteration] = 0
            for i in range(n_waiting):
                states[iteration, waiting[i]] = 1
            for i in range(n_pinned):
                states[iteration, pinned[i]] = 1
            for i in range(q_tail):
                states[iteration, queue[i]] = 2 + i
            if out_end != NEVER:
                states[iteration, out_row] = -2 * (out_end - now)
            if back_end != NEVER:
                states[iteration, back_row] = -2 * (back_end - now) - 1
            states[iteration, m + 1] = now - begin
            period = _period(states, iteration)
        if iteration >= iterations and (period or iteration >= most):
            break
        begin = now
        goal -= n_segments
        worst[:n_segments], worst[n_segments:] = worst[n_segments:], high
        limit_here = limit if until > 0 else NEVER
        s = by_kernel[STEP_AT, 0] if recomputes else 0
    return 0, now - begin, required, peak, n_log, period, 0
