"""What is away, compiled: gaps that open and close, the queue to the host, eviction on demand; ledger and log above it.

A gap is known by its row, or on demand as -1 - block.
"""

from __future__ import annotations

from simulator.compiled.encoding import LIMIT, NEVER
from simulator.compiled.jit import stage

# isort: off
from simulator.jobs.tables import (
    AWAY, COPIED, COUNTED, C_BLOCK, C_JOB, C_TENSOR, C_VOID, EVICTIONS, GAP_BEFORE, GAP_READY, GAP_STATE, HEAD, HOSTED,
    HOST_BLOCK, HOST_LEFT, KERNEL_ENDS, LEAVES, L_EVICT, L_LEFT, L_SWITCH, NOW, N_LOG, OPEN_ROW, OUT, PEAK,
    PRESENT, QUEUE, QUEUED, Q_BLOCK, Q_ISSUED, Q_JOB, Q_TENSOR, RETURNS, SERVED, TAIL, THERE, USED,
)  # fmt: skip
# isort: on


@stage(inline=True)
def charge(w, j, nbytes):  # type: ignore[no-untyped-def]
    """So many bytes more, or less, are in use, by job j."""
    w.jobs[j].held += nbytes
    w.now[USED] += nbytes
    w.now[PEAK] = max(w.now[PEAK], w.now[USED])


@stage(inline=True)
def note(w, start, end, what, job, index, more):  # type: ignore[no-untyped-def]
    """Writes an entry of the log, or the last one where there is no room; returns which it would be."""
    entry = w.now[N_LOG]
    if w.log.shape[0]:
        row = w.log[min(entry, w.log.shape[0] - 1)]
        row[0], row[1], row[2], row[3], row[4], row[5] = start, end, what, job, index, more
        w.now[N_LOG] += 1
    return entry


@stage
def enqueue(w, j, tensor, block):  # type: ignore[no-untyped-def]
    """A copy to the host is issued, unless there is one to come."""
    if w.by_block[j, QUEUED, block]:
        return
    w.by_block[j, QUEUED, block] = 1
    if w.now[TAIL] == w.queue.shape[0]:
        shift = w.now[HEAD]
        for i in range(shift, w.now[TAIL]):
            for c in range(QUEUE):
                w.queue[i - shift, c] = w.queue[i, c]
        w.now[HEAD] = 0
        w.now[TAIL] -= shift
    q = w.queue[w.now[TAIL]]
    q[Q_JOB], q[Q_TENSOR], q[Q_BLOCK], q[Q_ISSUED] = j, tensor, block, w.now[KERNEL_ENDS]
    w.now[TAIL] += 1


@stage
def _leaving(w, j, block):  # type: ignore[no-untyped-def]
    """Does an open gap wait for the copy of a block?"""
    if w.by_block[j, GAP_STATE, block]:
        return w.by_block[j, GAP_STATE, block] == LEAVES
    plan = w.plans[w.jobs[j].plan]
    row = w.by_tensor[j, OPEN_ROW, w.tables[plan.base + plan.owner + block]]
    return row >= 0 and w.by_row[j, GAP_STATE, row] == LEAVES and w.tables[plan.base + plan.row_block + row] == block


@stage
def drop_queued(w, j, block):  # type: ignore[no-untyped-def]
    """Queued copies of a job's block are dropped; of -1: of all its blocks; of -2: of those no open gap waits for."""
    kept = w.now[HEAD]
    for i in range(w.now[HEAD], w.now[TAIL]):
        b = w.queue[i, Q_BLOCK]
        if w.queue[i, Q_JOB] == j and (block == b or block == -1 or (block == -2 and not _leaving(w, j, b))):
            w.by_block[j, QUEUED, b] = 0
            continue
        for c in range(QUEUE):
            w.queue[kept, c] = w.queue[i, c]
        kept += 1
    w.now[TAIL] = kept


@stage
def _on_host(w, j, gap):  # type: ignore[no-untyped-def]
    """A gap's bytes have left, or were never there."""
    job = w.jobs[j]
    if gap >= 0:
        w.by_row[j, GAP_STATE, gap] = HOSTED
    else:
        w.by_block[j, GAP_STATE, -1 - gap] = HOSTED
    w.hosted[j, job.hosted] = gap
    job.hosted += 1
    job.stale = 1
    job.looked = 0


@stage
def _left(w, j, gap):  # type: ignore[no-untyped-def]
    """The bytes of an open gap leave memory."""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    block = -1 - gap
    if gap >= 0:
        block = w.tables[plan.base + plan.row_block + gap]
        job.sync -= w.tables[plan.base + plan.row_sync + gap]
    _on_host(w, j, gap)
    charge(w, j, -w.tables[plan.base + plan.nbytes + block])
    note(w, w.now[NOW], w.now[NOW], L_LEFT, j, block, 0)


@stage
def _set_row(w, j, row, position, state):  # type: ignore[no-untyped-def]
    """A row's gap, opened when the kernel at a position ended, is in this state."""
    plan = w.plans[w.jobs[j].plan]
    table, base = w.tables, plan.base
    w.by_row[j, GAP_STATE, row] = state
    w.by_row[j, GAP_BEFORE, row] = position + table[base + plan.row_before + row]
    w.by_row[j, GAP_READY, row] = position + table[base + plan.row_ready + row]
    w.by_tensor[j, OPEN_ROW, table[base + plan.row_tensor + row]] = row
    w.jobs[j].looked = 0


@stage
def open_row(w, j, row, position):  # type: ignore[no-untyped-def]
    """A gap of the plan opens."""
    plan = w.plans[w.jobs[j].plan]
    _set_row(w, j, row, position, LEAVES)
    w.jobs[j].sync += w.tables[plan.base + plan.row_sync + row]
    tensor = w.tables[plan.base + plan.row_tensor + row]
    if w.by_tensor[j, HOST_BLOCK, tensor] >= 0:
        _left(w, j, row)
    else:
        enqueue(w, j, tensor, w.tables[plan.base + plan.row_block + row])


@stage(inline=True)
def _next_touch(w, j, block):  # type: ignore[no-untyped-def]
    """(kernels, ns) to the next step that touches a block, and whether that is the job's next."""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    table, base, s = w.tables, plan.base, job.step
    begin, end = table[base + plan.touches + block], table[base + plan.touches + block + 1]
    before, begins = base + plan.before, base + plan.begins
    for i in range(begin, end):
        at = table[base + i]
        if at >= s:
            return table[before + at] - table[before + s], table[begins + at] - table[begins + s], at == s
    if begin == end or table[base + plan.first + block] >= 0:
        return NEVER, NEVER, False
    at = table[base + begin]
    kernels = plan.n - table[before + s] + table[before + at]
    return kernels, table[begins + plan.n_steps] - table[begins + s] + table[begins + at], False


@stage
def _open_block(w, j, block, state):  # type: ignore[no-untyped-def]
    """A block is away on demand, from now to the next step that touches it."""
    job = w.jobs[j]
    kernels, _, _ = _next_touch(w, j, block)
    w.by_block[j, GAP_STATE, block] = state
    w.by_block[j, GAP_BEFORE, block] = min(NEVER, job.position + kernels)
    w.by_block[j, GAP_READY, block] = job.position if kernels < NEVER else NEVER
    job.evicted += 1
    job.looked = 0


@stage
def _load_early(w, j, row):  # type: ignore[no-untyped-def]
    """A planned swap-in comes, or has come, before its use."""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    nbytes = w.tables[plan.base + plan.nbytes + w.tables[plan.base + plan.row_block + row]]
    k = job.position % plan.n
    for _ in range(w.by_row[j, GAP_BEFORE, row] - job.position):
        w.load[j, k] += nbytes
        k = k + 1 if k + 1 < plan.n else 0


@stage
def begin_rows(w, j):  # type: ignore[no-untyped-def]
    """A job is admitted: what its plan has away is on the host."""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    table, base = w.tables, plan.base
    for k in range(plan.n):
        w.load[j, k] = table[base + plan.residency + k]
    w.ends[j, 0] = w.now[KERNEL_ENDS]
    for row in range(plan.n_rows):
        start, tensor = table[base + plan.row_start + row], table[base + plan.row_tensor + row]
        if start == AWAY:
            _set_row(w, j, row, table[base + plan.row_after + row] - plan.n, HOSTED)
            _on_host(w, j, row)
        if start == AWAY or start == COPIED:
            w.by_tensor[j, HOST_BLOCK, tensor] = table[base + plan.row_block + row]


@stage
def land(w, which):  # type: ignore[no-untyped-def]
    """A copy is complete."""
    c = w.copy[which]
    j, tensor, block = c[C_JOB], c[C_TENSOR], c[C_BLOCK]
    job = w.jobs[j]
    job.looked = 0
    on_demand = w.by_block[j, GAP_STATE, block] != THERE
    if which == OUT:
        if not c[C_VOID]:
            w.by_block[j, QUEUED, block] = 0
        if on_demand:
            _left(w, j, -1 - block)
        elif not c[C_VOID]:
            w.by_tensor[j, HOST_BLOCK, tensor] = block
            if w.by_tensor[j, OPEN_ROW, tensor] >= 0:
                _left(w, j, w.by_tensor[j, OPEN_ROW, tensor])
    elif on_demand:
        plan = w.plans[job.plan]
        w.by_block[j, GAP_STATE, block] = THERE
        w.now[HOST_LEFT] += w.tables[plan.base + plan.nbytes + block] * w.by_block[j, COUNTED, block]
        w.by_block[j, COUNTED, block] = 0
        job.evicted -= 1
    else:
        w.by_row[j, GAP_STATE, w.by_tensor[j, OPEN_ROW, tensor]] = THERE
        w.by_tensor[j, OPEN_ROW, tensor] = -1


@stage
def _awaited(w, j, gap):  # type: ignore[no-untyped-def]
    """Does the next step wait for it?"""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    table, base = w.tables, plan.base
    lists, wanted = plan.touched, -1 - gap
    if gap >= 0:
        lists, wanted = plan.waits, table[base + plan.row_tensor + gap]
    for i in range(table[base + lists + job.step], table[base + lists + job.step + 1]):
        if table[base + i] == wanted:
            return True
    return False


@stage(inline=True)
def first_to_return(w, j, awaited_only):  # type: ignore[no-untyped-def]
    """The gap that is to be over first, of those that may be; NEVER: none."""
    job = w.jobs[j]
    if not awaited_only and not job.stale and job.position < job.next_ready:
        return job.first
    plan = w.plans[job.plan]
    table, base = w.tables, plan.base
    first, before, tensor, block = NEVER, NEVER, NEVER, NEVER
    next_ready = NEVER
    for i in range(job.hosted):
        gap = w.hosted[j, i]
        if gap >= 0:
            b, due, ready = -1, w.by_row[j, GAP_BEFORE, gap], w.by_row[j, GAP_READY, gap]
            t = table[base + plan.row_tensor + gap]
            ready = min(ready, due)
        else:
            b = -1 - gap
            due, ready, t = w.by_block[j, GAP_BEFORE, b], w.by_block[j, GAP_READY, b], table[base + plan.owner + b]
        if ready > job.position:
            next_ready = min(next_ready, ready)
        elif not awaited_only or _awaited(w, j, gap):
            if due < before or (due == before and (t < tensor or (t == tensor and b < block))):
                first, before, tensor, block = gap, due, t, b
    if awaited_only:
        job.stale = 1
    else:
        job.stale, job.first, job.next_ready = 0, first, next_ready
    return first


@stage
def fits(w, j, gap):  # type: ignore[no-untyped-def]
    """Rules 5 and J4."""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    table, base = w.tables, plan.base
    block = table[base + plan.row_block + gap] if gap >= 0 else -1 - gap
    nbytes, served = table[base + plan.nbytes + block], w.now[SERVED] == j
    if w.now[USED] > w.settings[LIMIT] - nbytes:
        return False
    room = (w.settings[LIMIT] if served else min(w.settings[LIMIT], plan.share)) - nbytes
    if job.held > room:
        return False
    if gap < 0:
        return True
    runs = 1 if job.running and table[base + plan.again + job.step] == 0 else 0
    p = job.position + runs
    if p <= job.blocked and not served:
        return False
    k = p % plan.n
    for at in range(p, w.by_row[j, GAP_BEFORE, gap]):
        if w.load[j, k] > room:
            job.blocked = job.blocked if served else at
            return False
        k = k + 1 if k + 1 < plan.n else 0
    return True


@stage
def leave(w, j, gap):  # type: ignore[no-untyped-def]
    """A tensor leaves the host: its memory is taken; returns the tensor and the block."""
    job = w.jobs[j]
    plan = w.plans[job.plan]
    table, base = w.tables, plan.base
    i = 0
    while w.hosted[j, i] != gap:
        i += 1
    job.hosted -= 1
    w.hosted[j, i] = w.hosted[j, job.hosted]
    job.stale = 1
    if gap >= 0:
        block = table[base + plan.row_block + gap]
        w.by_row[j, GAP_STATE, gap] = RETURNS
        _load_early(w, j, gap)
    else:
        block = -1 - gap
        w.by_block[j, GAP_STATE, block] = RETURNS
    charge(w, j, table[base + plan.nbytes + block])
    return table[base + plan.owner + block], block


@stage
def switch(w, j, to):  # type: ignore[no-untyped-def]
    """J7. What is away is persistent: a block has the same number in every plan."""
    job = w.jobs[j]
    old = w.plans[job.plan]
    note(w, w.now[NOW], w.now[NOW], L_SWITCH, j, to - job.first_plan, 0)
    if w.plans[to].alike == old.alike:
        job.plan = to
        job.blocked = -1
        return
    for row in range(old.n_rows):  # what is away by the old plan is so on demand
        state = w.by_row[j, GAP_STATE, row]
        if state:
            w.by_block[j, GAP_STATE, w.tables[old.base + old.row_block + row]] = state
            w.by_tensor[j, OPEN_ROW, w.tables[old.base + old.row_tensor + row]] = -1
            w.by_row[j, GAP_STATE, row] = THERE
    job.plan = to
    job.hosted = job.evicted = job.sync = 0
    job.offer = NEVER
    job.blocked = -1
    job.stale = 1
    job.position = 0
    w.ends[j, 0] = w.now[KERNEL_ENDS]
    plan = w.plans[to]
    table, base = w.tables, plan.base
    for k in range(plan.n):
        w.load[j, k] = table[base + plan.residency + k]
    for row in range(plan.n_rows):
        if table[base + plan.row_start + row] != AWAY:
            continue
        block, tensor = table[base + plan.row_block + row], table[base + plan.row_tensor + row]
        opened = job.position - plan.n + table[base + plan.row_after + row]
        state = w.by_block[j, GAP_STATE, block]
        if state == THERE:
            open_row(w, j, row, opened)
            continue
        w.now[HOST_LEFT] += table[base + plan.nbytes + block] * w.by_block[j, COUNTED, block]
        w.by_block[j, GAP_STATE, block] = w.by_block[j, COUNTED, block] = 0
        _set_row(w, j, row, opened, state)
        if state == LEAVES:
            job.sync += table[base + plan.row_sync + row]
        elif state == HOSTED:
            w.by_tensor[j, HOST_BLOCK, tensor] = block
            _on_host(w, j, row)
        else:
            _load_early(w, j, row)
    for block in range(plan.n_persistent):
        state = w.by_block[j, GAP_STATE, block]
        if state:
            _open_block(w, j, block, state)
            if state == HOSTED:
                _on_host(w, j, -1 - block)
    drop_queued(w, j, -2)


@stage
def evict(w):  # type: ignore[no-untyped-def]
    """J6; returns False where the served job cannot go on."""
    before = w.now[SERVED]
    if before < 0:
        for j in range(w.jobs.size):
            if w.jobs[j].stage == PRESENT and (w.now[SERVED] < 0 or w.jobs[j].since < w.jobs[w.now[SERVED]].since):
                w.now[SERVED] = j
    best, best_job, best_tier, best_ns, best_bytes, best_owner = -1, -1, 3, 0, 0, 0
    for j in range(w.jobs.size):
        job = w.jobs[j]
        if job.stage != PRESENT:
            continue
        plan = w.plans[job.plan]
        table, base = w.tables, plan.base
        for b in range(plan.n_blocks):
            if table[base + plan.last + b] < job.step or table[base + plan.first + b] >= job.step:
                continue
            owner, nbytes = table[base + plan.owner + b], table[base + plan.nbytes + b]
            if owner < 0 or nbytes == 0 or nbytes > w.now[HOST_LEFT] or w.by_block[j, GAP_STATE, b]:
                continue
            row = w.by_tensor[j, OPEN_ROW, owner]
            if row >= 0 and table[base + plan.row_block + row] == b:
                continue
            _, ns, touched = _next_touch(w, j, b)
            tier = 2 if touched else 1 if j == w.now[SERVED] else 0
            if tier > best_tier or (touched and j == w.now[SERVED]):
                continue
            alike = ns == best_ns and nbytes == best_bytes and j == best_job
            further = ns > best_ns or (ns == best_ns and nbytes > best_bytes) or (alike and owner < best_owner)
            if tier < best_tier or further:
                best, best_job, best_tier, best_ns, best_bytes, best_owner = b, j, tier, ns, nbytes, owner
    if best < 0:
        return before < 0
    note(w, w.now[NOW], w.now[NOW], L_EVICT, best_job, best, w.now[SERVED])
    w.now[EVICTIONS] += 1
    w.now[HOST_LEFT] -= best_bytes
    _open_block(w, best_job, best, LEAVES)
    w.by_block[best_job, COUNTED, best] = 1
    if w.by_tensor[best_job, HOST_BLOCK, best_owner] == best:
        _left(w, best_job, -1 - best)
    else:
        enqueue(w, best_job, best_owner, best)
    return True
