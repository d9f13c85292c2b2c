"""The rules for several jobs, compiled: the clock. tables.py names the arrays, swap_state.py is about what is away.

``run`` goes from one round to the next, by the last paragraph of the rules. What a job waits for and what it would have
back are looked for only when something has happened to it (``looked``, ``stale``). What every step does is inlined: a
call pushes the description of all arrays, some hundred words.
"""

from __future__ import annotations

from simulator.compiled.encoding import COPY_ENGINES, D2H_SHARE, HOST_BYTES, LIMIT, NEVER
from simulator.compiled.jit import stage

# isort: off
from simulator.jobs.swap_state import (
    begin_rows, charge, drop_queued, enqueue, evict, first_to_return, fits, land, leave, note, open_row, switch,
)  # fmt: skip
from simulator.jobs.tables import (
    BACK, BY_BLOCK, BY_ROW, BY_TENSOR, CHANGES, COMPUTE_AT, COUNTED, C_BLOCK, C_COMPUTE, C_DATA, C_END, C_ENTRY, C_JOB,
    C_MEMORY, C_TENSOR, C_VOID, C_WORK, DEADLOCK, DONE, FIFO, FREE, GAP_STATE, GOES_ON, GONE, HEAD, HOST_BLOCK,
    HOST_LEFT, KERNEL_ENDS, LEAVES, LEAVING, LINK_AT, L_ADMIT, L_BOUNDARY, L_END, L_GONE, L_IN, L_NEVER, L_OUT, L_STALL,
    L_STEP, NOW, OPEN_ROW, OUT, PRESENT, QUEUED, Q_BLOCK, Q_ISSUED, Q_JOB, Q_TENSOR, RETURNS, RUNNING, SERVED, SHARE,
    STEPPED, SWITCH_NS, TAIL, TENANT, TENANT_AT, UNADMITTED, UNFINISHED, USED, WAITING,
)  # fmt: skip

# isort: on
from simulator.machine import ALONE


@stage(entry=True)
def begin(w):  # type: ignore[no-untyped-def]
    """All that is not given, before the first round; ``jobs``, ``copy`` and ``now`` are 0."""
    n, now = w.jobs.size, w.now
    now[UNADMITTED] = now[UNFINISHED] = n
    now[SERVED] = now[STEPPED] = -1
    now[HOST_LEFT], now[FREE] = w.settings[HOST_BYTES], ALONE
    now[TENANT], now[TENANT_AT] = w.settings[CHANGES], w.times[w.settings[CHANGES]]
    for i in range(2):
        w.copy[i, C_JOB], w.copy[i, C_END] = -1, NEVER
    for j in range(n):
        job = w.jobs[j]
        job.end = job.first = job.offer = NEVER
        job.admitted = job.left = job.ready_since = job.blocked = -1
        job.stale = 1
        for c in range(BY_TENSOR):
            for x in range(w.by_tensor.shape[2]):
                w.by_tensor[j, c, x] = -1
        for c in range(BY_ROW):
            for r in range(w.by_row.shape[2]):
                w.by_row[j, c, r] = 0
        for c in range(BY_BLOCK):
            for b in range(w.by_block.shape[2]):
                w.by_block[j, c, b] = 0


@stage(inline=True)
def _rate(w, which):  # type: ignore[no-untyped-def]
    """Speed of a copy under way."""
    both = w.copy[OUT, C_JOB] >= 0 and w.copy[BACK, C_JOB] >= 0
    return max(1, (w.settings[D2H_SHARE + which] if both else ALONE) * w.now[FREE] // ALONE)


@stage(inline=True)
def _reckon_link(w):  # type: ignore[no-untyped-def]
    for i in range(2):
        w.copy[i, C_WORK] -= _rate(w, i) * (w.now[NOW] - w.now[LINK_AT])
    w.now[LINK_AT] = w.now[NOW]


@stage(inline=True)
def _set_link_ends(w):  # type: ignore[no-untyped-def]
    for i in range(2):
        if w.copy[i, C_JOB] >= 0:
            w.copy[i, C_END] = w.now[LINK_AT] - (-w.copy[i, C_WORK] // _rate(w, i))
            if w.copy[i, C_ENTRY] < w.log.shape[0]:
                w.log[w.copy[i, C_ENTRY], 1] = w.copy[i, C_END]


@stage(inline=True)
def _reckon_compute(w):  # type: ignore[no-untyped-def]
    done = w.settings[SHARE + w.now[RUNNING]] * (w.now[NOW] - w.now[COMPUTE_AT])
    if done:
        for j in range(w.jobs.size):
            w.jobs[j].work -= done
    w.now[COMPUTE_AT] = w.now[NOW]


@stage(inline=True)
def _set_compute_ends(w):  # type: ignore[no-untyped-def]
    rate = w.settings[SHARE + w.now[RUNNING]]
    for j in range(w.jobs.size):
        job = w.jobs[j]
        if job.running:
            job.end = w.now[COMPUTE_AT] - (-job.work // rate)
            if job.entry < w.log.shape[0]:
                w.log[job.entry, 1] = job.end


# ------------------------------------------------------------------------------------------ completions


@stage(inline=True)
def _complete_copies(w):  # type: ignore[no-untyped-def]
    now = w.now[NOW]
    if w.copy[OUT, C_END] != now and w.copy[BACK, C_END] != now and w.now[TENANT_AT] != now:
        return
    _reckon_link(w)
    if w.now[TENANT_AT] == now:
        w.now[FREE] = w.times[w.now[TENANT] + 1]
        w.now[TENANT] += 2
        w.now[TENANT_AT] = w.times[w.now[TENANT]]
    for i in range(2):
        if w.copy[i, C_END] == now:
            w.copy[i, C_END] = NEVER
            land(w, i)
            w.copy[i, C_JOB] = -1
    _set_link_ends(w)


@stage(inline=True)
def _plan_now(w, j):  # type: ignore[no-untyped-def]
    """The plan that a job is to go by now."""
    job = w.jobs[j]
    plan = job.first_plan
    if job.takes_turns:
        return plan + job.boundaries % job.n_plans
    while plan + 1 < job.first_plan + job.n_plans and w.plans[plan + 1].at_ns <= w.now[NOW]:
        plan += 1
    return plan


@stage
def _boundary(w, j):  # type: ignore[no-untyped-def]
    job, now = w.jobs[j], w.now[NOW]
    job.step = 0
    job.boundaries += 1
    job.boundary = now
    note(w, now, now, L_BOUNDARY, j, 0, 0)
    if job.boundaries == job.iterations or now >= job.leaves:
        job.stage = LEAVING
        drop_queued(w, j, -1)
    else:
        plan = _plan_now(w, j)
        if plan != job.plan:
            switch(w, j, plan)


@stage(inline=True)
def _complete(w, j):  # type: ignore[no-untyped-def]
    job = w.jobs[j]
    plan = w.plans[job.plan]
    table, base, s = w.tables, plan.base, job.step
    charge(w, j, -table[base + plan.gives + s])
    note(w, w.now[NOW], w.now[NOW], L_END, j, 0, 0)
    job.step += 1
    job.looked = 0
    if table[base + plan.again + s]:
        return
    w.now[KERNEL_ENDS] += 1
    for i in range(table[base + plan.writes + s], table[base + plan.writes + s + 1], 2):
        t, b = table[base + i], table[base + i + 1]
        w.by_tensor[j, HOST_BLOCK, t] = -1
        if b >= 0 and w.by_block[j, QUEUED, b]:
            w.by_block[j, QUEUED, b] = 0
            if w.copy[OUT, C_JOB] == j and w.copy[OUT, C_BLOCK] == b:
                w.copy[OUT, C_VOID] = 1
            drop_queued(w, j, b)
    for i in range(table[base + plan.copies + s], table[base + plan.copies + s + 1]):
        r = table[base + i]
        t = table[base + plan.row_tensor + r]
        if w.by_tensor[j, HOST_BLOCK, t] < 0:
            enqueue(w, j, t, table[base + plan.row_block + r])
    for i in range(table[base + plan.opens + s], table[base + plan.opens + s + 1]):
        open_row(w, j, table[base + i], job.position)
    k = table[base + plan.before + s]
    w.load[j, k] = table[base + plan.residency + k]
    job.position += 1
    w.ends[j, job.position % (plan.n + 1)] = w.now[KERNEL_ENDS]
    if job.step == plan.n_steps:
        _boundary(w, j)


@stage(inline=True)
def _complete_steps(w):  # type: ignore[no-untyped-def]
    now, ended = w.now[NOW], 0
    for j in range(w.jobs.size):
        ended += w.jobs[j].running != 0 and w.jobs[j].end == now
    if ended == 0:
        return
    _reckon_compute(w)
    w.now[RUNNING] -= ended
    for j in range(w.jobs.size):
        job = w.jobs[j]
        if job.running and job.end == now:
            job.running = 0
            job.end = NEVER
            job.since = now
            _complete(w, j)
    _set_compute_ends(w)


@stage(inline=True)
def _part(w):  # type: ignore[no-untyped-def]
    for j in range(w.jobs.size):
        job = w.jobs[j]
        if job.stage == LEAVING and w.copy[OUT, C_JOB] != j and w.copy[BACK, C_JOB] != j:
            plan = w.plans[job.plan]
            nbytes, counted = 0, 0
            for b in range(plan.n_persistent):
                state, row = w.by_block[j, GAP_STATE, b], w.by_tensor[j, OPEN_ROW, w.tables[plan.base + plan.owner + b]]
                size = w.tables[plan.base + plan.nbytes + b]
                if row >= 0:
                    state = w.by_row[j, GAP_STATE, row]
                elif state:
                    counted += size * w.by_block[j, COUNTED, b]
                if state <= LEAVES or state == RETURNS:
                    nbytes += size
            charge(w, j, -nbytes)
            w.now[HOST_LEFT] += job.reserved + counted
            job.stage = GONE
            job.left = w.now[NOW]
            w.now[UNFINISHED] -= 1
            note(w, w.now[NOW], w.now[NOW], L_GONE, j, 0, 0)


# ------------------------------------------------------------------------------------------------ starts


@stage(inline=True)
def _admit(w):  # type: ignore[no-untyped-def]
    now = w.now[NOW]
    for j in range(w.jobs.size):
        job = w.jobs[j]
        if job.stage == WAITING and job.leaves <= now:
            job.stage = GONE
            w.now[UNADMITTED] -= 1
            w.now[UNFINISHED] -= 1
            note(w, job.arrives, now, L_NEVER, j, 0, 0)
    for i in range(w.arrivals.size):
        j = w.arrivals[i]
        job = w.jobs[j]
        if job.stage != WAITING:
            continue
        if job.arrives > now or w.now[SERVED] >= 0:
            break
        p = _plan_now(w, j)
        if w.now[USED] + w.plans[p].admission_bytes > w.settings[LIMIT] or w.now[HOST_LEFT] < job.reserved:
            break
        w.now[UNADMITTED] -= 1
        w.now[HOST_LEFT] -= job.reserved
        job.stage = PRESENT
        job.plan = p
        job.admitted = job.since = job.boundary = now
        note(w, now, now, L_ADMIT, j, p - job.first_plan, 0)
        charge(w, j, w.plans[p].start_bytes)
        begin_rows(w, j)


@stage
def _issued_before(w, j, issued):  # type: ignore[no-untyped-def]
    """With one engine: was the swap-in that is offered pinned, and issued before the first swap-out?"""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    if job.offer < 0 or w.tables[plan.base + plan.row_pinned + job.offer] == 0:
        return False
    ready = w.by_row[j, 2, job.offer]
    return ready <= job.position and w.ends[j, max(ready, 0) % (plan.n + 1)] < issued


@stage
def _begin_copy(w, which, j, tensor, block, lasts):  # type: ignore[no-untyped-def]
    _reckon_link(w)
    c = w.copy[which]
    c[C_JOB], c[C_TENSOR], c[C_BLOCK], c[C_WORK], c[C_VOID] = j, tensor, block, lasts * ALONE, 0
    c[C_ENTRY] = note(w, w.now[NOW], 0, L_OUT if which == OUT else L_IN, j, block, 0)
    _set_link_ends(w)


@stage(inline=True)
def _may_start(w, which):  # type: ignore[no-untyped-def]
    """Is there an engine free for a copy in this direction?"""
    return w.copy[which, C_JOB] < 0 and (w.settings[COPY_ENGINES] == 2 or w.copy[1 - which, C_JOB] < 0)


@stage(inline=True)
def _start_copies(w):  # type: ignore[no-untyped-def]
    now, going = w.now[NOW], -1
    free = _may_start(w, BACK)
    for j in range(w.jobs.size):
        job = w.jobs[j]
        if job.stage != PRESENT and job.stage != LEAVING:
            continue
        gap = NEVER
        if job.stage == PRESENT and (w.now[SERVED] < 0 or w.now[SERVED] == j):
            gap = first_to_return(w, j, w.now[SERVED] == j)
        if gap != job.offer:
            job.offer = gap
            job.offered_since = now
            job.blocked = -1
        if free and gap != NEVER and (going < 0 or job.offered_since < w.jobs[going].offered_since) and fits(w, j, gap):
            going = j
    if w.now[HEAD] < w.now[TAIL] and _may_start(w, OUT):
        q = w.queue[w.now[HEAD]]
        if not (w.settings[COPY_ENGINES] == 1 and going >= 0 and _issued_before(w, going, q[Q_ISSUED])):
            w.now[HEAD] += 1
            plan = w.plans[w.jobs[q[Q_JOB]].plan]
            _begin_copy(w, OUT, q[Q_JOB], q[Q_TENSOR], q[Q_BLOCK], w.tables[plan.base + plan.out_ns + q[Q_BLOCK]])
            if w.settings[COPY_ENGINES] == 1:
                going = -1
    if going >= 0:
        job = w.jobs[going]
        tensor, block = leave(w, going, job.offer)
        plan = w.plans[job.plan]
        _begin_copy(w, BACK, going, tensor, block, w.tables[plan.base + plan.in_ns + block])
        job.offer = NEVER


@stage(inline=True)
def _look(w, j):  # type: ignore[no-untyped-def]
    """Does the next step wait for data?"""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    table, base, s = w.tables, plan.base, job.step
    missing = 0
    for i in range(table[base + plan.waits + s], table[base + plan.waits + s + 1]):
        missing |= w.by_tensor[j, OPEN_ROW, table[base + i]] >= 0
    if job.evicted:
        for i in range(table[base + plan.touched + s], table[base + plan.touched + s + 1]):
            missing |= w.by_block[j, GAP_STATE, table[base + i]] != 0
    job.missing = missing
    job.held_up = 1 if missing or job.sync > 0 else 0
    job.looked = 1


@stage(inline=True)
def _start_steps(w):  # type: ignore[no-untyped-def]
    now, fifo = w.now[NOW], w.settings[FIFO]
    while True:
        best = -1
        for j in range(w.jobs.size):
            job = w.jobs[j]
            if job.stage != PRESENT or job.running or (w.now[SERVED] >= 0 and w.now[SERVED] != j):
                job.ready_since = -1
                continue
            if not job.looked:
                _look(w, j)
            plan = w.plans[job.plan]
            takes = w.tables[plan.base + plan.takes + job.step]
            if job.held_up or w.now[USED] + takes > w.settings[LIMIT]:
                job.ready_since = -1
                continue
            if job.ready_since < 0:
                job.ready_since = now
            if best < 0 or job.ready_since < w.jobs[best].ready_since:
                best = j
        if best < 0 or (fifo and w.now[RUNNING] > 0):
            return
        job = w.jobs[best]
        plan = w.plans[job.plan]
        charge(w, best, w.tables[plan.base + plan.takes + job.step])
        pause = 0
        if fifo and w.now[STEPPED] >= 0 and w.now[STEPPED] != best:
            pause = w.settings[SWITCH_NS]
        lasts = w.tables[plan.base + plan.lasts + job.step]
        if job.n_durations:
            row = job.durations + job.boundaries % job.n_durations * plan.n
            lasts = w.times[row + w.tables[plan.base + plan.kernel + job.step]]
        _reckon_compute(w)
        job.running = 1
        job.work = (pause + lasts) * ALONE
        job.entry = note(w, now, 0, L_STEP, best, pause, 0)
        job.ready_since = -1
        w.now[RUNNING] += 1
        w.now[STEPPED] = best
        w.now[SERVED] = -1
        _set_compute_ends(w)


@stage(inline=True)
def _advance(w):  # type: ignore[no-untyped-def]
    """On to the next instant, or a tensor is evicted; returns whether that can be done."""
    now = w.now[NOW]
    then = min(w.copy[OUT, C_END], w.copy[BACK, C_END])
    for j in range(w.jobs.size):
        if w.jobs[j].running:
            then = min(then, w.jobs[j].end)
    if then == NEVER and w.now[UNFINISHED] > w.now[UNADMITTED]:
        return evict(w)
    then = min(then, w.now[TENANT_AT])
    if w.now[UNADMITTED]:
        for j in range(w.jobs.size):
            job = w.jobs[j]
            if job.stage == WAITING:
                then = min(then, job.arrives if job.arrives > now else job.leaves)
                then = min(then, job.leaves)
    if w.log.shape[0] and then > now:
        for j in range(w.jobs.size):
            job = w.jobs[j]
            if job.stage == PRESENT and not job.running:
                if not job.looked:
                    _look(w, j)
                data = job.missing and w.copy[BACK, C_JOB] >= 0
                cause = C_COMPUTE if job.ready_since >= 0 else C_DATA if data else C_MEMORY
                note(w, now, then, L_STALL, j, cause, 0)
    w.now[NOW] = then
    return True


@stage(inline=True)
def instant(w):  # type: ignore[no-untyped-def]
    """All that happens at an instant; then it is the next one. Returns GOES_ON, or DONE where all jobs have left, or
    DEADLOCK where none can go on."""
    at = w.now[NOW]
    while w.now[NOW] == at:
        _complete_copies(w)
        _complete_steps(w)
        _part(w)
        if w.now[UNADMITTED]:
            _admit(w)
        if w.now[UNFINISHED] == 0:
            return DONE
        _start_copies(w)
        _start_steps(w)
        if not _advance(w):
            return DEADLOCK
    return GOES_ON


@stage(entry=True)
def run(w):  # type: ignore[no-untyped-def]
    """Simulates until all jobs have left, or none can go on; returns which."""
    begin(w)
    status = GOES_ON
    while status == GOES_ON:
        status = instant(w)
    return status
