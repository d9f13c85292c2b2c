"""The walk over several jobs, compiled, for many walks at once: equal to tests/oracle/jobs_walk.py step by step.

jobs_batch.py makes the arrays, and calls ``act``, ``plan``, ``go_on``: three, because compiled code is optimised once
more as a part of what calls it. A decision changes the draft of one job's plan. With "enough" the drafts become tables
of simulator/jobs, in two places for each job: of the plan that it runs under, and of the one that it changes to. Then
time goes on from the **kept** state of the clock, before anything of the instant at which the phase began. A copy runs
through the instant at which somebody goes or comes, because what is seen of it is that. Kept is the state before, as
the plans of the next phase count from that instant on.
"""

from __future__ import annotations

import numpy as np

from envs.compiled_walk import swap_out
from envs.graph import OFFLOAD, REMOVE, STATIC
from envs.jobs_task import FREE, JOBS, LEFT, LOAD, OVER, RELIEF, SHARE, TIME_LEFT, VALID
from envs.task import DEAD_END_REWARD
from simulator.compiled.jit import jit, stage
from simulator.compiled.lowering import host_load
from simulator.compiled.rematerialisation import lower_recomputations
from simulator.jobs.event_loop import instant
from simulator.jobs.lowering import write_table

# isort: off
from envs.jobs_columns import (
    AFTER, ALONE_NS, ANEW, ARRIVALS_AT, ARRIVES, BEFORE, DECIDED, DOES_NOT_FIT, DRAFT, ENDED, ENDED_NS,
    ENOUGH, FIRST, GAPS, GAPS_AT, GAP_ROWS, GRAPH_AT, GRAPH_END, IDEAL_NS, KERNELS, KERNELS_AT, KNOWN, LARGEST,
    LEAVES, LIMIT, LIMITS, NBYTES, NEW, NODES, NODES_AT, NODE_GAP, NODE_KERNEL, NODE_KIND, NODE_ROWS, NOT_PENDING,
    N_JOBS, N_NODES, OFFLOAD_NODE, ON_HOST, O_BLOCKS, O_IGNORE, O_JOBS, O_KERNELS, O_PLACE, O_ROWS, O_TENSORS,
    PART_AT, PEAK, PEAKS, PEAK_AT, PENDING, PHASE, PLACE, PartView, REMOVABLE, REMOVALS, SETTINGS_AT, SETTINGS_END,
    STATIC_AT, STUCK, TASK, TENSOR, TENSORS, TENSORS_AT, THERE, TIMES_AT, TIMES_END, UNTIL,
    WANTED, WANTS_BLOCKS, WANTS_PLACE, WANTS_STEPS, WANTS_TABLE, WORK_AT,
)  # fmt: skip
from simulator.compiled.encoding import (
    AFTER as ROW_AFTER, AWAY_AT_START, BEFORE as ROW_BEFORE, BEGINS, BY_KERNEL, BY_REMAT,
    BY_TENSOR as BY_TENSOR_OF_PLAN, EXTRA, KERNEL_ROWS, KIND, LIVE, NEVER, PLANNED, RECOMPUTE, RETURNS, SWAP,
    TENSOR as ROW_TENSOR, TENSOR_ROWS, WHEN,
)  # fmt: skip
from simulator.jobs.tables import (
    BACK, BY_BLOCK, BY_ROW, BY_TENSOR, COPY, C_END, DEADLOCK, DONE, GONE, LEAVING, NOW, OUT, PRESENT, QUEUE, STATE,
    UNFINISHED, USED, WAITING, World,
)  # fmt: skip
# isort: on

# ``go_on``: to what is seen of the next phase, to the instant before that, to the end of all jobs.
_AHEAD, _AGAIN, _TO_THE_END = range(3)


def _view(parts, ints, number):  # type: ignore[no-untyped-def]
    row = parts[number]
    n, t, g, v = row[KERNELS] + 1, row[TENSORS], row[GAPS], row[NODES]
    at, to, of_gaps, of_nodes = row[KERNELS_AT], row[TENSORS_AT], row[GAPS_AT], row[NODES_AT]
    return PartView(
        row, ints[at : at + KERNEL_ROWS * n].reshape(KERNEL_ROWS, n),
        ints[to : to + TENSOR_ROWS * t].reshape(TENSOR_ROWS, t), ints[row[GRAPH_AT] : row[GRAPH_END]],
        ints[of_gaps : of_gaps + GAP_ROWS * g].reshape(GAP_ROWS, g),
        ints[of_nodes : of_nodes + NODE_ROWS * v].reshape(NODE_ROWS, v),
    )  # fmt: skip


# A stage counts no references: what it returns can be used by stages alone.
_part, _counted_part = stage(_view, inline=True), jit(_view)


@stage
def _world(task, tables, plans, places, jobs, state):  # type: ignore[no-untyped-def]
    """The clock's arrays of one walk."""
    options, ints = tables.options, tables.ints
    n, count = task[N_JOBS], options[O_JOBS]
    t, r, b, k = options[O_TENSORS], options[O_ROWS], options[O_BLOCKS], options[O_KERNELS]
    a0 = STATE
    a1 = a0 + 2 * COPY
    a2 = a1 + count * BY_TENSOR * t
    a3 = a2 + count * BY_ROW * r
    a4 = a3 + count * BY_BLOCK * b
    a5 = a4 + count * k
    a6 = a5 + count * (r + b)
    a7 = a6 + count * (k + 1)
    a8 = a7 + (count * b + 1) * QUEUE
    return World(
        places, ints[task[TIMES_AT] : task[TIMES_END]], plans, jobs[:n],
        ints[task[ARRIVALS_AT] : task[ARRIVALS_AT] + n], state[a1:a2].reshape(count, BY_TENSOR, t),
        state[a2:a3].reshape(count, BY_ROW, r), state[a3:a4].reshape(count, BY_BLOCK, b),
        state[a4:a5].reshape(count, k), state[a5:a6].reshape(count, r + b), state[a6:a7].reshape(count, k + 1),
        state[a7:a8].reshape(count * b + 1, QUEUE), state[a0:a1].reshape(2, COPY), state[:a0],
        ints[task[SETTINGS_AT] : task[SETTINGS_END]], tables.no_log,
    )  # fmt: skip


@stage
def _copy(of, to):  # type: ignore[no-untyped-def]
    for x in range(of.size):
        to[x] = of[x]


# ------------------------------------------------------------------------------------------------------- decisions


@stage
def _lower(part, taken, need, work):  # type: ignore[no-untyped-def]
    """The plan that has these gaps taken, as the first of ``rows``, and lowered; ``need`` where anything runs again.

    Returns:
        How many rows, and how many steps run again: there is too little room for them if as many as there may be.
    """
    gaps, rows, by_row, steps, m, drops = part.gaps, work.rows, work.by_row, work.steps, 0, 0
    for g in range(gaps.shape[1]):
        if taken[g] >= 0:
            row, offload = rows[m], taken[g] == OFFLOAD
            row[KIND], row[EXTRA], row[WHEN] = SWAP if offload else RECOMPUTE, -1 if offload else 0, -1
            row[ROW_TENSOR], row[ROW_AFTER], row[ROW_BEFORE] = gaps[TENSOR, g], gaps[AFTER, g], gaps[BEFORE, g]
            by_row[RETURNS, m], by_row[BY_REMAT, m] = gaps[BEFORE, g], 0
            by_row[AWAY_AT_START, m] = 1 if gaps[AFTER, g] >= gaps[BEFORE, g] else 0
            m += 1
            drops += 0 if offload else 1
    if drops == 0:
        return m, 0
    n, t, at = part.row[KERNELS] + 1, part.row[TENSORS], part.row[WORK_AT]
    to = at + BY_KERNEL * n
    by_kernel = work.ints[at:to].reshape(BY_KERNEL, n)
    by_tensor = work.ints[to : to + BY_TENSOR_OF_PLAN * t].reshape(BY_TENSOR_OF_PLAN, t)
    count, _ = lower_recomputations(
        part.kernels, part.tensors, part.graph, rows[:m], by_kernel, by_tensor, by_row, steps
    )
    if count < steps.shape[0]:
        for k in range(n - 1):
            need[k] = by_kernel[PLANNED, k]
    return m, count


@stage
def _look(draft, need):  # type: ignore[no-untyped-def]
    """The peak of a draft, and the first kernel at which it is."""
    peak, at = need[0], 0
    for k in range(1, need.size):
        if need[k] > peak:
            peak, at = need[k], k
    draft[PEAK], draft[PEAK_AT] = peak, at


@stage
def _decide(part, draft, need, taken, kind, g, work):  # type: ignore[no-untyped-def]
    """Empties a gap in a draft. Returns how many rows the plan has, where that was asked; -1: no room for its steps."""
    n, gaps, m, count = part.row[KERNELS], part.gaps, 0, 0
    taken[g] = kind
    if part.row[REMOVABLE]:
        m, count = _lower(part, taken, need, work)
        if count >= work.steps.shape[0]:
            taken[g] = -1
            return -1
    draft[REMOVALS] += kind == REMOVE
    if draft[REMOVALS] == 0:
        swap_out(need, gaps[AFTER, g], gaps[BEFORE, g], gaps[NBYTES, g])
    _look(draft, need[:n])
    return m


# -------------------------------------------------------------------------------------------------------- what is shown


@stage
def _show_job(part, draft, need, taken, limit, is_open, mask, nodes, shares):  # type: ignore[no-untyped-def]
    """What a decision on a job changes: masks, relief, load, share. ``is_open``: may decisions be taken?"""
    gaps, first, count, n = part.gaps, part.row[FIRST], part.row[NODES], part.row[KERNELS]
    at, room = draft[PEAK_AT], limit - part.row[LARGEST] - draft[ON_HOST]
    mask, nodes = mask[first : first + count], nodes[:, first : first + count]
    for g in range(gaps.shape[1]):
        after, before, nbytes, free = gaps[AFTER, g], gaps[BEFORE, g], gaps[NBYTES, g], taken[g] < 0
        inside = (after < at and at < before) if after < before else (after < at or at < before)
        relief = np.float32(nbytes / limit) if inside and free else np.float32(0.0)
        for way in range(2):
            node = gaps[OFFLOAD_NODE + way, g]
            if node >= 0:
                fits = room >= 0 if way else nbytes <= room or draft[REMOVALS] == 0
                valid = 1 if is_open and free and fits else 0
                mask[node] = valid
                nodes[VALID, node] = valid - (1 if taken[g] == OFFLOAD + way else 0)
                nodes[RELIEF, node] = relief
    for k in range(n):
        shares[k] = need[k] / limit
    load, kernel = nodes[LOAD], part.nodes[NODE_KERNEL]
    for x in range(count):
        load[x] = shares[np.uintp(kernel[x])]
    share, column = np.float32(draft[PEAK] / limit), nodes[SHARE]
    for x in range(count):
        column[x] = share


@stage
def _show(i, changed, tables, arrays, work, shown):  # type: ignore[no-untyped-def]
    """What has changed with the draft of job ``changed``; -1: of all that are there."""
    walk, drafts = arrays.walks[i], arrays.drafts[i]
    task = tables.tasks[walk[TASK]]
    limit, peaks, n = task[LIMIT], 0, task[N_JOBS]
    for j in range(n):
        peaks += drafts[j, PEAK] if drafts[j, THERE] else 0
    was, is_open = walk[PEAKS] > limit, walk[ENDED] == 0 and peaks > limit
    walk[PEAKS] = peaks
    for j in range(n):
        if drafts[j, THERE] and (j == changed or changed < 0 or was != is_open):
            _show_job(
                _part(tables.parts, tables.ints, task[PART_AT] + j), drafts[j], arrays.need[i, j],
                arrays.taken[i, NEW, j], limit, is_open, shown.mask[i], shown.nodes[i], work.shares,
            )  # fmt: skip
    shown.moment[i, OVER] = peaks / limit - 1.0


@stage
def _begin_phase(i, now, used, tables, arrays, work, shown):  # type: ignore[no-untyped-def]
    """The drafts of the jobs that are there are empty; all is shown."""
    walk, drafts, nodes, job = arrays.walks[i], arrays.drafts[i], shown.nodes[i], shown.job[i]
    number = walk[TASK]
    task = tables.tasks[number]
    walk[PHASE], there, total = now, 0, task[N_NODES]
    for c in range(nodes.shape[0]):
        for x in range(nodes.shape[1]):
            nodes[c, x] = 0.0
    for c in range(STATIC):
        nodes[c, 0] = tables.static[task[STATIC_AT] + c * total]
    nodes[VALID, 0] = 1.0
    for x in range(job.size):
        job[x], shown.mask[i, x] = -1, 0
    shown.mask[i, 0] = 1
    for j in range(task[N_JOBS]):
        draft = drafts[j]
        if not draft[THERE]:
            continue
        there += 1
        part = _part(tables.parts, tables.ints, task[PART_AT] + j)
        need, taken, n, first = arrays.need[i, j], arrays.taken[i, NEW, j], part.row[KERNELS], part.row[FIRST]
        _copy(part.kernels[LIVE], need)
        for g in range(part.row[GAPS]):
            taken[g] = -1
        draft[REMOVALS] = draft[ON_HOST] = 0
        _look(draft, need[:n])
        left = np.float32(max(0.0, 1.0 - draft[ENDED_NS] / part.row[ALONE_NS]))
        for c in range(STATIC):
            at = task[STATIC_AT] + c * total
            for x in range(first, first + part.row[NODES]):
                nodes[c, x] = tables.static[at + x]
        for x in range(first, first + part.row[NODES]):
            nodes[LEFT, x], job[x] = left, j
    _show(i, -1, tables, arrays, work, shown)
    moment = shown.moment[i]
    moment[FREE], moment[JOBS] = 1.0 - used / task[LIMIT], there
    moment[TIME_LEFT] = 1.0 if task[UNTIL] == NEVER else max(0, task[UNTIL] - now) / task[UNTIL]


@stage
def _act(i, action, resets, tables, arrays, work, shown):  # type: ignore[no-untyped-def]
    """Takes the action of one walk, if it is a decision; returns how many rows the job's plan has then, or -1."""
    walk, mask = arrays.walks[i], shown.mask[i]
    shown.rewards[i], shown.terminated[i], shown.invalid[i] = 0.0, False, False
    walk[PENDING] = NOT_PENDING
    if resets:
        walk[PENDING] = ANEW
        return -1
    task = tables.tasks[walk[TASK]]
    if not (0 <= action < mask.size and mask[action]):
        shown.invalid[i] = True
        if tables.options[O_IGNORE] == 0:
            shown.rewards[i] = DEAD_END_REWARD * task[N_JOBS]
            walk[ENDED] = 1
            _show(i, -1, tables, arrays, work, shown)
        shown.terminated[i] = walk[ENDED] != 0
        return -1
    if action == 0:
        shown.terminated[i] = walk[ENDED] != 0
        walk[PENDING] = NOT_PENDING if walk[ENDED] else ENOUGH
        return -1
    j = shown.job[i, action]
    part = _part(tables.parts, tables.ints, task[PART_AT] + j)
    node = action - part.row[FIRST]
    rows = _decide(
        part, arrays.drafts[i, j], arrays.need[i, j], arrays.taken[i, NEW, j], part.nodes[NODE_KIND, node],
        part.nodes[NODE_GAP, node], work,
    )  # fmt: skip
    walk[DECIDED] = j
    if rows < 0:
        walk[PENDING] = WANTS_STEPS
    return rows


@jit(nogil=True)
def act(begin, end, resume, resets, actions, tables, arrays, work, shown):  # type: ignore[no-untyped-def]
    """Takes decisions in walks ``begin`` to ``end`` - 1; what else there is to do is PENDING.

    Args:
        resume: only of those that are PENDING.
        resets: bool (walks,): those that begin anew.
        actions: (walks,) nodes; none: only ``resets`` counts.
        tables, arrays, work, shown: Tables, Arrays, Scratch, Shown.

    Returns:
        How many walks are PENDING.
    """
    pending = 0
    for i in range(begin, end):
        if arrays.walks[i, PENDING] == NOT_PENDING if resume else actions.size == 0 and not resets[i]:
            continue
        rows = _act(i, actions[i] if actions.size else 0, resets[i], tables, arrays, work, shown)
        if rows >= 0:
            j = arrays.walks[i, DECIDED]
            number = tables.tasks[arrays.walks[i, TASK], PART_AT] + j
            if tables.parts[number, REMOVABLE]:
                part = _counted_part(tables.parts, tables.ints, number)
                arrays.drafts[i, j, ON_HOST] = host_load(
                    part.tensors, part.graph, work.rows[:rows], work.by_row[RETURNS], part.row[KERNELS]
                )
            _show(i, j, tables, arrays, work, shown)
        pending += arrays.walks[i, PENDING] != NOT_PENDING
    return pending


# ------------------------------------------------------------------------------------------------------------- enough


@stage
def _place(i, j, limit, arrays):  # type: ignore[no-untyped-def]
    """Where the plan of a job goes; -1: it has it already. One that it runs under stays where it is."""
    draft, record, taken = arrays.drafts[i, j], arrays.jobs[i, j], arrays.taken[i]
    if not draft[KNOWN]:
        return 0
    last, same = draft[PLACE], draft[LIMITS + draft[PLACE]] == limit
    for g in range(taken.shape[2]):
        same &= taken[NEW, j, g] == taken[1 + last, j, g]
    if same:
        return -1
    return last if record.stage == WAITING else 1 - (record.plan - record.first_plan)


@stage
def _give(i, j, place, limit, part, arrays):  # type: ignore[no-untyped-def]
    """The plan in this place is what the job is to change to."""
    draft, record, taken, plans = arrays.drafts[i, j], arrays.jobs[i, j], arrays.taken[i], arrays.plans[i]
    at, same = record.first_plan, True
    for g in range(taken.shape[2]):
        taken[1 + place, j, g] = taken[NEW, j, g]
        same &= taken[1, j, g] == taken[2, j, g]
    plans[at].alike, plans[at + 1].alike = 0, 0 if same and draft[KNOWN] else 1
    plans[at].at_ns, plans[at + 1].at_ns = -1, arrays.walks[i, PHASE] if place else NEVER
    plans[at + place].share = limit if limit else NEVER
    draft[PLACE], draft[LIMITS + place], draft[KNOWN] = place, limit, 1
    record.arrives, record.leaves = part.row[ARRIVES], part.row[LEAVES]


@stage(inline=True)
def _may_go(w):  # type: ignore[no-untyped-def]
    """May a job be gone at this instant? If none of its steps takes no time, no other can."""
    now = w.now[NOW]
    for j in range(w.jobs.size):
        job = w.jobs[j]
        if job.stage == LEAVING and (w.copy[OUT, C_END] == now or w.copy[BACK, C_END] == now):
            return True
        if job.stage == WAITING and job.leaves <= now:
            return True
        if job.stage == PRESENT and job.running and job.end == now:
            if job.step + 1 == w.plans[job.plan].n_steps and (
                job.boundaries + 1 == job.iterations or job.leaves <= now
            ):
                return True
    return False


@stage
def _slowdown(w, task, tables, drafts, now):  # type: ignore[no-untyped-def]
    """jobs_walk.lost of all jobs that have come, and ENDED_NS."""
    total = 0.0
    for j in range(w.jobs.size):
        if drafts[j, KNOWN]:
            job, part = w.jobs[j], _part(tables.parts, tables.ints, task[PART_AT] + j)
            gone = now
            if job.stage == GONE:
                gone = job.left if job.left >= 0 else part.row[LEAVES]
            done = drafts[j, ENDED_NS] = job.boundaries * part.row[IDEAL_NS]
            if job.admitted >= 0:
                plan = w.plans[job.plan]
                done += part.kernels[BEGINS, w.tables[plan.base + plan.before + job.step]]
            total += (max(0, min(now, gone) - part.row[ARRIVES]) - done) / part.row[ALONE_NS]
    return total


@jit(nogil=True)
def plan(begin, end, actions, tables, arrays, work):  # type: ignore[no-untyped-def]
    """Gives the jobs their plans in the walks that are PENDING with "enough"; returns how many cannot go on."""
    pending = 0
    for i in range(begin, end):
        walk = arrays.walks[i]
        if walk[PENDING] == NOT_PENDING or walk[PENDING] == ANEW:
            continue
        if actions[i]:  # it wants room for a decision
            pending += 1
            continue
        task, room, there, wants = tables.tasks[walk[TASK]], tables.options[O_PLACE], 0, ENOUGH
        for j in range(task[N_JOBS]):
            there += arrays.drafts[i, j, THERE]
        spare = task[LIMIT] - walk[PEAKS]
        for j in range(task[N_JOBS]):
            own = arrays.drafts[i, j, PEAK] + spare // there if spare >= 0 else 0
            place = _place(i, j, own, arrays) if arrays.drafts[i, j, THERE] and wants == ENOUGH else -1
            if place < 0:
                continue
            part, need = _counted_part(tables.parts, tables.ints, task[PART_AT] + j), arrays.need[i, j]
            m, count = _lower(part, arrays.taken[i, NEW, j], need, work)
            number = 2 * j + place
            record = arrays.plans[i, number : number + 1]
            if count >= work.steps.shape[0]:
                wants = WANTS_STEPS
                continue
            size, least, _ = write_table(
                part.kernels, part.tensors, part.graph, work.rows[:m], work.by_row, need, work.steps, count, record,
                work.table,
            )  # fmt: skip
            if size < 0:
                wants, walk[WANTED] = WANTS_TABLE, -size
            elif size > room:
                wants, walk[WANTED] = WANTS_PLACE, size
            elif record[0].n_blocks > tables.options[O_BLOCKS]:
                wants, walk[WANTED] = WANTS_BLOCKS, record[0].n_blocks
            elif max(least, record[0].admission_bytes) > task[LIMIT]:
                wants = DOES_NOT_FIT
            else:
                _copy(work.table[:size], arrays.places[i, number * room : number * room + size])
                record[0].base = number * room
                _give(i, j, place, own, part, arrays)
        walk[PENDING] = wants
        pending += wants != ENOUGH
    return pending


# ------------------------------------------------------------------------------------------------------------ time


@stage
def _first(i, tables, arrays, shown):  # type: ignore[no-untyped-def]
    """Back to the first arrival; returns that."""
    walk, first = arrays.walks[i], NEVER
    task = tables.tasks[walk[TASK]]
    _copy(tables.records[walk[TASK]], arrays.records[i])
    _copy(tables.state[walk[TASK]], arrays.state[i])
    for j in range(task[N_JOBS]):
        first = min(first, tables.parts[task[PART_AT] + j, ARRIVES])
        for c in range(DRAFT):
            arrays.drafts[i, j, c] = 0
    for j in range(task[N_JOBS]):
        arrays.drafts[i, j, THERE] = tables.parts[task[PART_AT] + j, ARRIVES] == first
    arrays.state[i, NOW] = first
    walk[ENDED] = 0
    shown.slowdown[i] = 0.0
    return first


@stage(entry=True)
def go_on(begin, end, tables, arrays, work, shown):  # type: ignore[no-untyped-def]
    """In the walks that are PENDING and have what they want, time goes on to the next phase, or to the end; returns in
    how many it cannot."""
    stuck = 0
    for i in range(begin, end):
        walk, drafts = arrays.walks[i], arrays.drafts[i]
        if walk[PENDING] == ANEW:
            walk[PENDING] = NOT_PENDING
            _begin_phase(i, _first(i, tables, arrays, shown), 0, tables, arrays, work, shown)
        if walk[PENDING] != ENOUGH:
            continue
        walk[PENDING] = NOT_PENDING
        task = tables.tasks[walk[TASK]]
        kept, kept_records, plans, places = arrays.state[i], arrays.records[i], arrays.plans[i], arrays.places[i]
        _copy(kept, work.state)
        _copy(kept_records, work.records)
        w = _world(task, tables, plans, places, work.jobs, work.state)
        come = NEVER
        for j in range(task[N_JOBS]):
            arrives = tables.parts[task[PART_AT] + j, ARRIVES]
            if arrives > walk[PHASE]:
                come = min(come, arrives)
        unfinished, way, used, now = w.now[UNFINISHED], _AHEAD, 0, come
        while True:
            at = min(w.now[NOW], come)
            w.now[NOW] = at
            if way == _AGAIN:
                if at == come:
                    break
            elif way == _AHEAD and (at == come or _may_go(w)):
                _copy(work.state, kept)
                _copy(work.records, kept_records)
            status = instant(w)
            if status == DEADLOCK:
                walk[PENDING] = STUCK
                stuck += 1
                break
            gone = w.now[UNFINISHED] < unfinished and way == _AHEAD
            if gone:
                unfinished, gone = w.now[UNFINISHED], False
                for j in range(task[N_JOBS]):
                    gone |= drafts[j, THERE] != 0 and w.jobs[j].stage == GONE
            if way == _AHEAD and (gone or at == come or status == DONE):
                there = False
                for j in range(task[N_JOBS]):
                    here = (
                        w.jobs[j].stage != GONE if drafts[j, KNOWN] else tables.parts[task[PART_AT] + j, ARRIVES] == at
                    )
                    drafts[j, THERE] = here
                    there |= here
                if there and at < task[UNTIL]:
                    now, used = at, w.now[USED]
                    before = shown.slowdown[i]
                    shown.slowdown[i] = _slowdown(w, task, tables, drafts, now)
                    shown.rewards[i] = before - shown.slowdown[i]
                    if kept[NOW] == at:
                        break
                    way, come = _AGAIN, at
                    w = _world(task, tables, plans, places, arrays.jobs[i], kept)
                elif there or come == NEVER:
                    way, come = _TO_THE_END, NEVER
            if way == _TO_THE_END and status == DONE:
                now = -1
                for j in range(task[N_JOBS]):
                    now = max(now, w.jobs[j].left)
                    drafts[j, THERE] = False
                now = now if now >= 0 else w.now[NOW]
                before = shown.slowdown[i]
                shown.slowdown[i] = _slowdown(w, task, tables, drafts, now)
                shown.rewards[i] = before - shown.slowdown[i]
                walk[ENDED] = shown.terminated[i] = True
                break
        if walk[PENDING] == NOT_PENDING:
            _begin_phase(i, now, used, tables, arrays, work, shown)
    return stuck
