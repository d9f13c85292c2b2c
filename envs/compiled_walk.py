"""walk.py and clock.py for many walks at once, compiled: equal to them step by step.

``step_walks`` and ``reset_walks`` are called by batch.py, which makes the arrays. A walk is a row of ``walks``: the
columns below, then its ``need`` (kernels + 1), the clock's ``ended`` (kernels + 1), ``out_end`` and ``queue`` (gaps), and
what is ``taken`` (gaps). What a task is stands in ``ints``; ``where`` says where. What is observed is written only
where it changes. What compiled code cannot settle (room on a short host, more room for steps) leaves the walk PENDING:
batch.py does so, and calls again with ``resume``.
"""

from __future__ import annotations

import numpy as np

from envs.graph import AHEAD, NOTHING, OFFLOAD, PRESSURE, QUEUE, RELIEF, STUCK, VALID
from envs.walk import COPY, DEAD_END_REWARD, EARLY, KEEP
from simulator.compiled.encoding import (
    BY_KERNEL, BY_ROW, BY_SEGMENT, BY_TENSOR, DONE, DURATION, H2D, D2H, ITERATION_NS, LIVE, MORE_STEPS, NEVER, PERIOD,
    PLANNED, BEGINS, RECOMPUTE, REQUIRED, RESULTS, STATUS, STEP_KERNEL, SWAP, HOST_BYTES, SETTINGS,
)  # fmt: skip
from simulator.compiled.jit import stage
from simulator.compiled.rematerialisation import lower_recomputations
from simulator.compiled.scoring import score_plans

# Columns of ``where``, a row a task: how many there are, what it is, and where its tables begin.
(
    KERNELS, TENSORS, GAPS, NODES, LIMIT_BYTES, IDEAL_NS, HOST, SHORT, KERNELS_AT, TENSORS_AT, GRAPH_AT, GRAPH_END,
    SETTINGS_AT, OPENING_AT, GAPS_AT, NODES_AT, N_ACTIONS, STATIC_AT, TIMES_AT, WORK_AT, WHERE,
) = range(21)  # fmt: skip
# Rows of a task's table of gaps. OFFLOAD_NODE, REMOVE_NODE: or -1. BY_AFTER: those that do not wrap by the kernel that
# opens them, and then the others. BY_BEFORE: all by the kernel that ends them.
(
    TENSOR, AFTER, BEFORE, WRAPS, NBYTES, COPY_AT, FIRST_SINCE, OFFLOAD_NODE, REMOVE_NODE, BY_AFTER, BY_BEFORE, GAP_ROWS,
) = range(12)  # fmt: skip
NODE_KERNEL, NODE_KIND, NODE_GAP, ACTIONS, ACTION_GAPS, NODE_ROWS = range(6)

# Columns of ``walks``. OPENED, CLOSED: how many of BY_AFTER and BY_BEFORE are behind. VALID_ACTIONS: beside node 0.
# PENDING: what it waits for. OVER: 1 from the end of the episode on. The last five are the clock's.
(
    TASK, SHOWN, SEED, POSITION, COUNT, FREE_NS, STUCK_AT, ITERATION, ENDED, DEAD_END, HOST_LEFT, PENDING, OVER, OPENED,
    CLOSED, VALID_ACTIONS, REMOVALS, RERUN_NS, CHANGED, CAME_FROM, OUT_FREE, IN_FREE, HEAD, TAIL, UNDER_WAY, WALK,
) = range(26)  # fmt: skip
NOT_PENDING, WANTS_HOST, WANTS_STEPS = range(3)

# ``settings`` of a batch.
SIZE_, FORMS, CAUSAL, IGNORE, AUTORESET, TASKS, NEED_AT, ENDED_AT, OUT_END_AT, QUEUE_AT, TAKEN_AT, STATES = range(12)
BATCH = STATES + 1


@stage
def _first_from(values, x, strictly):  # type: ignore[no-untyped-def]
    """How many of the ascending values are less than x, or ``strictly`` False: not more than x."""
    low, high = 0, values.size
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < x or (values[middle] == x and not strictly):
            low = middle + 1
        else:
            high = middle
    return low


@stage
def draw(walk, tasks):  # type: ignore[no-untyped-def]
    """The next task of a walk: SplitMix64 (Steele, Lea, Flood 2014)."""
    state = np.uint64(walk[SEED]) + np.uint64(0x9E3779B97F4A7C15)
    walk[SEED] = np.int64(state)
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((z ^ (z >> np.uint64(31))) >> np.uint64(1)) % tasks


# ------------------------------------------------------------------------------------------------------ the clock


@stage
def _issue(walk, gaps, tensors, ended, out_end, queue, g, time):  # type: ignore[no-untyped-def]
    """Clock.offload."""
    walk[OUT_FREE] = max(walk[OUT_FREE], time) + tensors[D2H, gaps[TENSOR, g]]
    out_end[g] = walk[OUT_FREE]
    queue[walk[TAIL]] = g
    walk[TAIL] += 1
    walk[UNDER_WAY] += gaps[NBYTES, g]


@stage
def _run_clock(walk, gaps, tensors, begins, need, ended, out_end, queue, taken, limit):  # type: ignore[no-untyped-def]
    """Clock.run, from CAME_FROM to POSITION."""
    ideal = begins[begins.size - 1]
    at = walk[CLOSED]
    while at > 0 and gaps[BEFORE, gaps[BY_BEFORE, at - 1]] >= walk[CAME_FROM]:
        at -= 1
    for k in range(walk[CAME_FROM], walk[POSITION]):
        now = ended[k]
        while at < gaps.shape[1] and gaps[BEFORE, gaps[BY_BEFORE, at]] == k:
            g = gaps[BY_BEFORE, at]
            at += 1
            if taken[g] != OFFLOAD:
                continue
            size, first = gaps[NBYTES, g], 0 if gaps[WRAPS, g] else gaps[AFTER, g] + 1
            j = k - 1
            while j >= first and need[j] + size <= limit:
                j -= 1
            fits = ended[j + 1] if j >= first else -ideal
            walk[IN_FREE] = max(walk[IN_FREE], max(out_end[g], fits)) + tensors[H2D, gaps[TENSOR, g]]
            now = max(now, walk[IN_FREE])
        while walk[HEAD] < walk[TAIL]:
            g = queue[walk[HEAD]]
            if out_end[g] > now and need[k] + walk[UNDER_WAY] <= limit:
                break
            now = max(now, out_end[g])
            walk[HEAD] += 1
            walk[UNDER_WAY] -= gaps[NBYTES, g]
        ended[k + 1] = now + begins[k + 1] - begins[k]


# ---------------------------------------------------------------------------------------------------- what is shown


@stage
def _early(before, position, need, limit):  # type: ignore[no-untyped-def]
    """Walk._early."""
    k = before - 1
    while k >= position and need[k] <= limit:
        k -= 1
    return k + 1 if position <= k < before - 1 else -1


@stage
def _copies(walk, gaps, taken, g):  # type: ignore[no-untyped-def]
    """May the copy of gap g be made after the last write? Walk.form_masks."""
    first = gaps[FIRST_SINCE, g]
    if gaps[COPY_AT, g] < 0 or (gaps[WRAPS, g] and (walk[POSITION] != 0 or first != g)):
        return False
    for f in range(first, g):
        if taken[f] >= 0:
            return False
    return True


@stage
def _is_open(walk, gaps, taken, g):  # type: ignore[no-untyped-def]
    """Walk.open."""
    p = walk[POSITION]
    return (gaps[AFTER, g] < p or gaps[WRAPS, g] != 0) and p < gaps[BEFORE, g] and taken[g] < 0


@stage
def _show_gap(walk, gaps, taken, g, mask, nodes):  # type: ignore[no-untyped-def]
    """The mask and validity of the nodes of a gap."""
    is_open = walk[ENDED] == 0 and _is_open(walk, gaps, taken, g)
    for way in range(2):
        node = gaps[OFFLOAD_NODE + way, g]
        if node >= 0:
            valid = 1 if is_open and (way == 1 or gaps[NBYTES, g] <= walk[HOST_LEFT]) else 0
            walk[VALID_ACTIONS] += valid - mask[node]
            mask[node] = valid
            nodes[VALID, node] = valid - (1 if taken[g] == OFFLOAD + way else 0)


@stage
def _show_forms(walk, gaps, taken, need, limit, mask, size, forms):  # type: ignore[no-untyped-def]
    """The masks of the other forms of all actions."""
    for g in range(gaps.shape[1]):
        node = gaps[OFFLOAD_NODE, g]
        if node >= 0:
            mask[COPY * size + node] = 1 if mask[node] and _copies(walk, gaps, taken, g) else 0
        node = gaps[REMOVE_NODE, g]
        if node >= 0 and forms > EARLY:
            mask[KEEP * size + node] = mask[node]
            early = mask[node] and _early(gaps[BEFORE, g], walk[POSITION], need, limit) >= 0
            mask[EARLY * size + node] = 1 if early else 0


@stage
def _divide(values, less, by, product, bits, out):  # type: ignore[no-untyped-def]
    """out[:] = (values - less) / by as float32, by a product where that rounds to the same for certain: it is off by 2
    units of float64 at most, and its bits (``bits`` is ``product``) say whether it is as near to where float32 turns."""
    per, least = 1.0 / by, 2**29
    for i in range(values.size):
        product[i] = (values[i] - less) * per
    for i in range(values.size):
        out[i] = product[i]
    for i in range(values.size):
        least = min(least, (bits[i] - (2**28 - 2)) & (2**29 - 1))
    if least <= 4:
        for i in range(values.size):
            out[i] = (values[i] - less) / by


@stage
def _fill(values, value):  # type: ignore[no-untyped-def]
    """values[:] = value."""
    for i in range(values.size):
        values[i] = value


@stage
def _any_over(need, limit, begin, end):  # type: ignore[no-untyped-def]
    """Is one of need[begin:end] over the limit?"""
    part, over = need[begin:end], 0  # a slice, and no way out: a vector loop
    for k in range(part.size):
        over |= part[k] > limit
    return over != 0


@stage
def _show_relief(gaps, v, n_actions, need, begins, limit, scratch, bits, shares, nodes):  # type: ignore[no-untyped-def]
    """Walk.relief, of the nodes of actions. The sums are added up only from the first block of kernels that do not all
    fit to the last."""
    n, block = need.size - 1, 32
    first, last = 0, n
    while first < n and not _any_over(need, limit, first, min(first + block, n)):
        first = min(first + block, n)
    while last > first and not _any_over(need, limit, max(first, last - block), last):
        last = max(first, last - block)
    until, inside = scratch[: n + 1], scratch[scratch.size // 2 :]
    _fill(until[: first + 1], 0.0)
    total = 0.0
    for k in range(first, last):
        total += np.float64(max(0, need[k] - limit)) * np.float64(begins[k + 1] - begins[k])
        until[k + 1] = total
    _fill(until[last:], total)
    after, before, wraps, order = gaps[AFTER], gaps[BEFORE], gaps[WRAPS], gaps[BY_BEFORE]
    for j in range(order.size):  # in an order, because LLVM would make gathers of float64, which are slow
        g = np.uintp(order[j])
        inside[g] = until[np.uintp(before[g])] - until[np.uintp(after[g] + 1)] + total * wraps[g]
    _divide(inside[: order.size], 0.0, max(total, 1.0), scratch, bits, shares)
    relief, actions, gap_of = nodes[RELIEF], v[ACTIONS], v[ACTION_GAPS]
    for j in range(n_actions):
        relief[np.uintp(actions[j])] = shares[np.uintp(gap_of[j])]


@stage
def _show_pressure(v, need, limit, shares, nodes):  # type: ignore[no-untyped-def]
    """Planned residency less the limit, over the limit."""
    kernel, pressure, per_byte = v[NODE_KERNEL], nodes[PRESSURE], 1.0 / limit
    for k in range(need.size):
        shares[k] = np.float64(need[k] - limit) * per_byte
    for i in range(kernel.size):
        pressure[i] = shares[np.uintp(kernel[i])]


@stage
def _show_time(walk, v, starts, begins, ideal, scratch, bits, nodes, moved):  # type: ignore[no-untyped-def]
    """How far ahead the nodes are, the copy queue, where the walk gets stuck; returns the current node."""
    n = begins.size - 1
    now = begins[min(walk[POSITION], n - 1)]
    if moved:
        _divide(starts, np.float64(now), np.float64(ideal), scratch, bits, nodes[AHEAD])
    queue = np.float32(max(0, walk[FREE_NS] - now) / ideal)
    if nodes[QUEUE, 0] != queue:
        _fill(nodes[QUEUE, : starts.size], queue)
    stuck = np.float32(1.0 if walk[STUCK_AT] == n else (begins[walk[STUCK_AT]] - now) / ideal)
    if nodes[STUCK, 0] != stuck:
        _fill(nodes[STUCK, : starts.size], stuck)
    return max(0, _first_from(v[NODE_KERNEL], walk[POSITION], True) - 1)


@stage
def _show(  # type: ignore[no-untyped-def]
    walk, gaps, v, starts, n_actions, taken, need, begins, limit, ideal, scratch, bits, shares, options, mask, nodes, g, moved,
    fresh,
):  # fmt: skip
    """Walk._refresh, and the observation where it has changed since the last step; returns the current node.

    Args:
        g: the gap that was emptied, or -1.
        moved: whether the position has changed.
        fresh: whether nothing is known of what is shown.
    """
    n, p = need.size - 1, walk[POSITION]
    stuck = p
    while stuck < n and need[stuck] <= limit:
        stuck += 1
    walk[STUCK_AT] = stuck
    behind = gaps.shape[1]
    if not fresh:
        if g >= 0:
            _show_gap(walk, gaps, taken, g, mask, nodes)
        # Gaps that have opened, and those that have ended.
        for row in range(2):
            at, column = walk[OPENED + row], AFTER + row
            while at < behind:
                other = gaps[BY_AFTER + row, at]
                if gaps[column, other] + (1 - row) > p or (row == 0 and gaps[WRAPS, other]):
                    break
                _show_gap(walk, gaps, taken, other, mask, nodes)
                at += 1
            walk[OPENED + row] = at
    else:
        walk[VALID_ACTIONS] = 0
        for node in range(mask.size):
            mask[node] = 0
        for other in range(behind):
            _show_gap(walk, gaps, taken, other, mask, nodes)
        at = 0
        while at < behind and gaps[WRAPS, gaps[BY_AFTER, at]] == 0 and gaps[AFTER, gaps[BY_AFTER, at]] < p:
            at += 1
        walk[OPENED] = at
        at = 0
        while at < behind and gaps[BEFORE, gaps[BY_BEFORE, at]] <= p:
            at += 1
        walk[CLOSED] = at
    if walk[ENDED] == 0 and stuck == p and walk[VALID_ACTIONS] == 0:
        walk[ENDED] = walk[DEAD_END] = 1
    if walk[ENDED] and walk[VALID_ACTIONS]:
        for other in range(behind):
            _show_gap(walk, gaps, taken, other, mask, nodes)
    mask[0] = 1 if walk[ENDED] or stuck > p else 0
    nodes[VALID, 0] = mask[0]
    if options[FORMS] > 1:
        _show_forms(walk, gaps, taken, need, limit, mask, options[SIZE_], options[FORMS])
    if g >= 0 or fresh:
        _show_relief(gaps, v, n_actions, need, begins, limit, scratch, bits, shares, nodes)
        _show_pressure(v, need, limit, shares, nodes)
    return _show_time(walk, v, starts, begins, ideal, scratch, bits, nodes, moved or fresh)


# --------------------------------------------------------------------------------------------------------- one step


@stage
def _act(walk, rows, gaps, tensors, begins, opening, ended, out_end, queue, taken, kind, g, form, early, causal):  # type: ignore[no-untyped-def]
    """Walk._offload and _remove, or nothing: the new row, and where the agent goes."""
    p, stuck, ideal = walk[POSITION], walk[STUCK_AT], begins[begins.size - 1]
    onward = min(opening[p], stuck) if p < opening.size else p
    if kind == NOTHING:
        walk[POSITION] = onward
        return
    t, after, before = gaps[TENSOR, g], gaps[AFTER, g], gaps[BEFORE, g]
    row = rows[walk[COUNT]]
    walk[COUNT] += 1
    row[1], row[3] = t, before
    taken[g] = kind
    if kind != OFFLOAD:
        row[0], row[2], row[4], row[5] = RECOMPUTE, max(p - 1, after), 1 if form == KEEP else 0, early
        walk[REMOVALS] += 1
        if stuck != p:
            walk[POSITION] = onward
        return
    copy = gaps[COPY_AT, g] if form == COPY else -1
    lasts = tensors[D2H, t]
    row[0], row[4], row[5] = SWAP, -1, copy
    if gaps[WRAPS, g] and p == 0:
        row[2] = after
        begin = begins[(after if copy < 0 else copy) + 1] - ideal
        walk[FREE_NS] = max(walk[FREE_NS], begin) + lasts
        if causal:
            _issue(walk, gaps, tensors, ended, out_end, queue, g, begin)
        return
    queued = _first_from(begins, walk[FREE_NS], False) - 2
    after = max(min(p - 1, queued), 0 if gaps[WRAPS, g] else after)
    row[2] = after
    issued = after if copy < 0 else copy
    end = max(walk[FREE_NS], begins[issued + 1]) + lasts
    if causal:
        _issue(walk, gaps, tensors, ended, out_end, queue, g, ended[issued + 1])
    if stuck == p:
        walk[FREE_NS] = begins[p]
        return
    reached = min(_first_from(begins, end, True), stuck)
    walk[FREE_NS] = min(end, begins[stuck])
    walk[POSITION] = max(p, reached)


@stage
def _swap_out(need, after, before, size):  # type: ignore[no-untyped-def]
    """The planned residency of a plan of swaps with one more, from the end of kernel ``after`` to ``before``."""
    n = need.size - 1
    part, more = need[after + 1 : before if after < before else n], need[: 0 if after < before else before]
    for k in range(part.size):
        part[k] -= size
    for k in range(more.size):
        more[k] -= size


@stage
def _touch(graph, n, steps, n_steps, touched):  # type: ignore[no-untyped-def]
    """Notes what runs again, or is read by it: to swap anything else out changes nothing of it."""
    for t in range(touched.size):
        touched[t] = False
    for j in range(n_steps):
        for table in range(2):
            at = steps[j, STEP_KERNEL] + table * (n + 1)
            for i in range(graph[at], graph[at + 1]):
                touched[graph[i]] = True


@stage
def _begin(walk, where, ints, options, whole):  # type: ignore[no-untyped-def]
    """Walk.reset."""
    w = where[walk[TASK]]
    n, ideal = w[KERNELS], ints[w[KERNELS_AT] + BEGINS * (w[KERNELS] + 1) + w[KERNELS]]
    live = w[KERNELS_AT] + LIVE * (n + 1)
    need, most = options[NEED_AT], 0
    for k in range(n):
        whole[need + k] = ints[live + k]
        most = max(most, ints[live + k])
    for g in range(w[GAPS]):
        whole[options[TAKEN_AT] + g] = -1
    for c in range(POSITION, WALK):
        walk[c] = 0
    walk[FREE_NS] = walk[OUT_FREE] = walk[IN_FREE] = -ideal
    walk[ITERATION] = ideal
    walk[HOST_LEFT] = w[HOST]
    walk[ENDED] = 1 if most <= w[LIMIT_BYTES] else 0
    whole[options[ENDED_AT]] = 0


@stage(entry=True)
def step_walks(  # type: ignore[no-untyped-def]
    begin, end, resume, resets, options, where, ints, floats, walks, rows, touched, work, scratch, bits, shares, work_gaps, steps, actions, chosen,
    rewards, terminated, invalid, overhead, feasible, mask, nodes, current,
):  # fmt: skip
    """Steps walks ``begin`` to ``end`` - 1, or begins those in ``resets`` anew.

    Args:
        resume: only those that are PENDING.
        resets: bool (walks,): those that begin anew, where there are any.
        options, where, ints, walks: see above.
        floats: the static columns of the tasks, and the times of their nodes.
        rows: int64 (walks, gaps, 6): the plans so far.
        touched: bool (walks, tensors): what the plan's recomputation uses.
        work, scratch, bits, shares, work_gaps, steps: what one thread works on.
        actions: (walks,) node + SIZE_ * form.
        chosen: (walks,) the task of those that begin, or -1: drawn.
        rewards, terminated, invalid, overhead, feasible, mask, nodes, current: results.

    Returns:
        How many walks are PENDING.
    """
    pending = 0
    size, causal = options[SIZE_], options[CAUSAL] != 0
    for i in range(begin, end):
        whole = walks[i]
        walk = whole[:WALK]
        starts = not resume and resets[i]
        if resume and walk[PENDING] == NOT_PENDING:
            continue
        if not resume:
            if actions.size == 0 and not starts:
                continue
            rewards[i], terminated[i], invalid[i] = 0.0, False, False
            starts = starts or (options[AUTORESET] != 0 and walk[OVER] != 0)
        if starts:
            walk[TASK] = chosen[i] if chosen[i] >= 0 else draw(walk, options[TASKS])
            _begin(walk, where, ints, options, whole)

        # The tables of the task, and the arrays of the walk.
        w = where[walk[TASK]]
        n, n_gaps, limit, ideal = w[KERNELS], w[GAPS], w[LIMIT_BYTES], w[IDEAL_NS]
        kernels = ints[w[KERNELS_AT] : w[KERNELS_AT] + (BEGINS + 1) * (n + 1)].reshape(BEGINS + 1, n + 1)
        tensors = ints[w[TENSORS_AT] : w[TENSORS_AT] + (H2D + 1) * w[TENSORS]].reshape(H2D + 1, w[TENSORS])
        graph = ints[w[GRAPH_AT] : w[GRAPH_END]]
        gaps = ints[w[GAPS_AT] : w[GAPS_AT] + GAP_ROWS * n_gaps].reshape(GAP_ROWS, n_gaps)
        v = ints[w[NODES_AT] : w[NODES_AT] + NODE_ROWS * w[NODES]].reshape(NODE_ROWS, w[NODES])
        times = floats[w[TIMES_AT] : w[TIMES_AT] + w[NODES]]
        begins, opening = kernels[BEGINS], ints[w[OPENING_AT] : w[OPENING_AT] + n]
        need = whole[options[NEED_AT] : options[NEED_AT] + n + 1]
        ended = whole[options[ENDED_AT] : options[ENDED_AT] + n + 1]
        out_end = whole[options[OUT_END_AT] : options[OUT_END_AT] + n_gaps]
        queue = whole[options[QUEUE_AT] : options[QUEUE_AT] + n_gaps]
        taken = whole[options[TAKEN_AT] : options[TAKEN_AT] + n_gaps]
        shown, masked = nodes[i], mask[i]
        by_kernel = work[w[WORK_AT] : w[WORK_AT] + BY_KERNEL * (n + 1)].reshape(BY_KERNEL, n + 1)
        at = w[WORK_AT] + BY_KERNEL * (n + 1)
        by_tensor = work[at : at + BY_TENSOR * w[TENSORS]].reshape(BY_TENSOR, w[TENSORS])
        at = 0
        by_segment = work[at : at + BY_SEGMENT * (2 * n + 2)].reshape(BY_SEGMENT, 2 * n + 2)
        at += BY_SEGMENT * (2 * n + 2)
        most = n_gaps
        by_row = work[at : at + BY_ROW * (2 * most + 1)].reshape(BY_ROW, 2 * most + 1)
        at += BY_ROW * (2 * most + 1)
        states = work[at : at + options[STATES] * (most + 2)].reshape(options[STATES], most + 2)
        at += options[STATES] * (most + 2)
        results = work[at : at + RESULTS].reshape(1, RESULTS)
        result = results[0]
        at += RESULTS
        ends = work[at : at + 2]
        settings = work[at + 2 : at + 2 + SETTINGS]

        if starts:
            if walk[SHOWN] != walk[TASK] + 1:
                walk[SHOWN] = walk[TASK] + 1
                n_nodes, column = w[NODES], w[STATIC_AT]
                for c in range(shown.shape[0]):
                    for j in range(size):
                        shown[c, j] = floats[column + c * n_nodes + j] if c < VALID and j < n_nodes else 0.0
            current[i] = _show(
                walk, gaps, v, times, w[N_ACTIONS], taken, need, begins, limit, ideal, scratch, bits, shares, options, masked,
                shown, -1, True, True,
            )  # fmt: skip
            overhead[i], feasible[i] = walk[ITERATION] / ideal - 1.0, walk[ENDED] > walk[DEAD_END]
            continue

        if not resume:
            node, form = actions[i] % size, actions[i] // size
            if not (0 <= actions[i] < masked.size and masked[actions[i]]):
                invalid[i] = True
                if options[IGNORE] == 0:
                    rewards[i], terminated[i], walk[OVER] = DEAD_END_REWARD, True, 1
                continue
            if walk[ENDED]:
                terminated[i], walk[OVER] = True, 1
                continue
            kind, g = v[NODE_KIND, node], v[NODE_GAP, node]
            early = -1
            if kind > OFFLOAD and form == EARLY:
                early = _early(gaps[BEFORE, g], walk[POSITION], need, limit)
            walk[CAME_FROM], walk[CHANGED] = walk[POSITION], g if kind != NOTHING else -1
            _act(walk, rows[i], gaps, tensors, begins, opening, ended, out_end, queue, taken, kind, g, form, early, causal)
            if w[SHORT] and kind != NOTHING:
                walk[PENDING] = WANTS_HOST
                pending += 1
                continue
        plan, g, p = rows[i][: walk[COUNT]], walk[CHANGED], walk[POSITION]

        # The planned residency, and what runs again.
        known = g < 0 or walk[REMOVALS] == 0 or causal
        apart = taken[g] == OFFLOAD and (walk[REMOVALS] == 0 or (causal and not touched[i, gaps[TENSOR, g]]))
        if g >= 0 and apart:
            _swap_out(need, plan[walk[COUNT] - 1, 2], gaps[BEFORE, g], gaps[NBYTES, g])
        elif g >= 0 and causal:
            n_steps, lasts = lower_recomputations(kernels, tensors, graph, plan, by_kernel, by_tensor, by_row, steps)
            if n_steps >= steps.shape[0]:
                walk[PENDING] = WANTS_STEPS
                pending += 1
                continue
            walk[RERUN_NS] = lasts
            for k in range(n):
                need[k] = by_kernel[PLANNED, k]
            _touch(graph, n, steps, n_steps, touched[i])
        fits = known
        if known:
            for k in range(n):
                fits &= need[k] <= limit
        if causal and not fits:
            _run_clock(walk, gaps, tensors, begins, need, ended, out_end, queue, taken, limit)

        # The simulated time: of the clock, or of the plan so far.
        settles, ns = True, 0
        if causal and not fits:
            ns = begins[n] + ended[p] - begins[p] + walk[RERUN_NS]
        else:
            for c in range(SETTINGS):
                settings[c] = ints[w[SETTINGS_AT] + c]
            if w[SHORT]:  # its bytes at one time are known
                settings[HOST_BYTES] = NEVER
            ends[0], ends[1] = 0, walk[COUNT]
            again = True
            status = DONE
            while again:
                score_plans(
                    kernels, tensors, graph, plan, ends, 0, -1, settings, n if fits else p, NEVER, 1, by_kernel,
                    by_segment, by_tensor, by_row, work_gaps, steps, states, results, steps[:0],
                )  # fmt: skip
                status = result[STATUS]
                again = not known and status != MORE_STEPS and result[REQUIRED] <= limit
                if again:
                    known = fits = True
            if status == MORE_STEPS:
                walk[PENDING] = WANTS_STEPS
                pending += 1
                continue
            if g >= 0:
                for k in range(n):
                    need[k] = by_kernel[PLANNED, k]
            ns = result[ITERATION_NS]
            settles = status == DONE and result[PERIOD] > 0 and (w[SHORT] == 0 or walk[HOST_LEFT] >= 0)
        walk[PENDING] = NOT_PENDING
        if fits:
            walk[ENDED] = 1
        if settles:
            rewards[i] = (walk[ITERATION] - ns) / ideal
            walk[ITERATION] = ns
            overhead[i] = ns / ideal - 1.0
        elif fits:
            walk[DEAD_END] = 1
        current[i] = _show(
            walk, gaps, v, times, w[N_ACTIONS], taken, need, begins, limit, ideal, scratch, bits, shares, options, masked, shown,
            g, p != walk[CAME_FROM], w[SHORT] != 0,
        )  # fmt: skip
        if walk[DEAD_END]:
            rewards[i] += DEAD_END_REWARD
        if walk[ENDED]:
            terminated[i], walk[OVER], feasible[i] = True, 1, walk[DEAD_END] == 0
    return pending
