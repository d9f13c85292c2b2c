"""The rules of a walk, compiled, for many walks at once: equal to tests/oracle/walk.py step by step.

``step_walks`` is called by batch.py, which makes the arrays; columns.py has their columns. A walk is a row of
``walks``: its columns, then ``need`` (kernels + 1), the clock's ``ended`` (kernels + 1), ``out_end`` and ``queue``
(gaps), and what is ``taken`` (gaps). What compiled code cannot settle (room on a short host, more room for steps)
leaves a walk PENDING: batch.py does so, and calls again with ``resume``.
"""

from __future__ import annotations

import numpy as np

from envs.graph import NOTHING, OFFLOAD, VALID
from envs.observation import early_kernel, first_over, show
from envs.task import COPY, DEAD_END_REWARD, EARLY, KEEP
from simulator.compiled.jit import stage
from simulator.compiled.rematerialisation import lower_recomputations
from simulator.compiled.scoring import score_plans

# isort: off
from envs.columns import (
    AFTER, AUTORESET, BEFORE, BY_BEFORE, CAME_FROM, CAUSAL, CHANGED, CLOSED, COPY_AT, COUNT, DEAD_END, ENDED, ENDED_AT,
    FREE_NS, GAPS, GAPS_AT, GAP_ROWS, GRAPH_AT, GRAPH_END, HEAD, HOST, HOST_LEFT, IDEAL_NS, IGNORE, IN_FREE, ITERATION,
    ITERATIONS, KERNELS, KERNELS_AT, LIMIT_BYTES, NBYTES, NEED_AT, NEW_FROM, NEW_TO, NODES, NODES_AT, NODE_AT, NODE_GAP,
    NODE_KIND, NODE_ROWS, NOT_PENDING, OPENING_AT, OUT_END_AT, OUT_FREE, OVER, PENDING, POSITION, QUEUE_AT, REMOVALS,
    RERUN_NS, SEED, SETTINGS_AT, SHORT, SHOWN, SHOWN_NODES, STATIC_AT, STUCK_AT, TAIL, TAKEN_AT, TASK, TASKS,
    TENSOR, TENSORS, TENSORS_AT, TIMES_AT, UNDER_WAY, WALK, WANTS_HOST, WANTS_STEPS, WORK_AT, WRAPS, Scratch, TaskView,
    WalkView,
)  # fmt: skip
from simulator.compiled.encoding import (
    AFTER as ROW_AFTER, BEFORE as ROW_BEFORE, BEGINS, D2H, DONE, EXTRA, H2D, HOST_BYTES, ITERATION_NS, KERNEL_ROWS,
    KIND, LIVE, MORE_STEPS, NEVER, PERIOD, PLANNED, RECOMPUTE, REQUIRED, RESULTS, SETTINGS, STATUS, STEP_KERNEL, SWAP,
    TENSOR as ROW_TENSOR, TENSOR_ROWS, WHEN, work_shapes,
)  # fmt: skip
# isort: on


shapes_of = stage(work_shapes, inline=True)


@stage(inline=True)
def _area(shape):  # type: ignore[no-untyped-def]
    """How many elements an array of this shape has."""
    return shape[0] * shape[1]


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
def _issue(task, state, g, time):  # type: ignore[no-untyped-def]
    """Clock.offload."""
    walk = state.row
    walk[OUT_FREE] = max(walk[OUT_FREE], time) + task.tensors[D2H, task.gaps[TENSOR, g]]
    state.out_end[g] = walk[OUT_FREE]
    state.queue[walk[TAIL]] = g
    walk[TAIL] += 1
    walk[UNDER_WAY] += task.gaps[NBYTES, g]


@stage
def _run_clock(task, state):  # type: ignore[no-untyped-def]
    """Clock.run, from CAME_FROM to POSITION."""
    gaps, begins, limit = task.gaps, task.begins, task.limit
    walk, need, ended, out_end, queue, taken = state
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
            walk[IN_FREE] = max(walk[IN_FREE], max(out_end[g], fits)) + task.tensors[H2D, gaps[TENSOR, g]]
            now = max(now, walk[IN_FREE])
        while walk[HEAD] < walk[TAIL]:
            g = queue[walk[HEAD]]
            if out_end[g] > now and need[k] + walk[UNDER_WAY] <= limit:
                break
            now = max(now, out_end[g])
            walk[HEAD] += 1
            walk[UNDER_WAY] -= gaps[NBYTES, g]
        ended[k + 1] = now + begins[k + 1] - begins[k]


# --------------------------------------------------------------------------------------------------------- one step


@stage
def _act(task, state, rows, kind, g, form, early, causal):  # type: ignore[no-untyped-def]
    """Walk._offload and _remove, or nothing: the new row, and where the agent goes."""
    walk, gaps, begins, opening, ended = state.row, task.gaps, task.begins, task.opening, state.ended
    p, stuck, ideal = walk[POSITION], walk[STUCK_AT], begins[begins.size - 1]
    onward = min(opening[p], stuck) if p < opening.size else p
    if kind == NOTHING:
        walk[POSITION] = onward
        return
    t, after, before = gaps[TENSOR, g], gaps[AFTER, g], gaps[BEFORE, g]
    row = rows[walk[COUNT]]
    walk[COUNT] += 1
    row[ROW_TENSOR], row[ROW_BEFORE] = t, before
    state.taken[g] = kind
    if kind != OFFLOAD:
        row[KIND], row[ROW_AFTER], row[EXTRA], row[WHEN] = RECOMPUTE, max(p - 1, after), 1 if form == KEEP else 0, early
        walk[REMOVALS] += 1
        if stuck != p:
            walk[POSITION] = onward
        return
    copy = gaps[COPY_AT, g] if form == COPY else -1
    lasts = task.tensors[D2H, t]
    row[KIND], row[EXTRA], row[WHEN] = SWAP, -1, copy
    if gaps[WRAPS, g] and p == 0:
        row[ROW_AFTER] = after
        begin = begins[(after if copy < 0 else copy) + 1] - ideal
        walk[FREE_NS] = max(walk[FREE_NS], begin) + lasts
        if causal:
            _issue(task, state, g, begin)
        return
    # The last kernel that ended before the engine is free, if the gap was open then.
    least, after = 0 if gaps[WRAPS, g] else after, p - 1
    while after > least and begins[after + 1] > walk[FREE_NS]:
        after -= 1
    row[ROW_AFTER] = after
    issued = after if copy < 0 else copy
    end = max(walk[FREE_NS], begins[issued + 1]) + lasts
    if causal:
        _issue(task, state, g, ended[issued + 1])
    if stuck == p:
        walk[FREE_NS] = begins[p]
        return
    walk[FREE_NS] = min(end, begins[stuck])
    while p < stuck and begins[p] < end:
        p += 1
    walk[POSITION] = p


@stage
def swap_out(need, after, before, size):  # type: ignore[no-untyped-def]
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
def _begin(task, state):  # type: ignore[no-untyped-def]
    """Walk.reset."""
    walk, need, n = state.row, state.need, task.begins.size - 1
    ideal, most = task.begins[n], 0
    for k in range(n):
        need[k] = task.kernels[LIVE, k]
        most = max(most, need[k])
    for g in range(state.taken.size):
        state.taken[g] = -1
    for c in range(POSITION, WALK):
        walk[c] = 0
    walk[FREE_NS] = walk[OUT_FREE] = walk[IN_FREE] = -ideal
    walk[ITERATION] = ideal
    walk[HOST_LEFT] = task.row[HOST]
    walk[ENDED] = 1 if most <= task.limit else 0
    state.ended[0] = 0


@stage
def _replan(task, state, touched, plan, by_kernel, by_tensor, by_row, steps, causal):  # type: ignore[no-untyped-def]
    """The planned residency with what the step has changed, as far as it is known without a simulation.

    Returns:
        Whether it is known; whether there was too little room for what runs again.
    """
    walk, need, gaps = state.row, state.need, task.gaps
    g, n = walk[CHANGED], need.size - 1
    walk[NEW_FROM], walk[NEW_TO] = 0, n
    if g < 0:
        return True, False
    if state.taken[g] == OFFLOAD and (walk[REMOVALS] == 0 or (causal and not touched[gaps[TENSOR, g]])):
        after, before = plan[walk[COUNT] - 1, ROW_AFTER], gaps[BEFORE, g]
        swap_out(need, after, before, gaps[NBYTES, g])
        if after < before:
            walk[NEW_FROM], walk[NEW_TO] = after + 1, before
        return True, False
    if not causal:
        return False, False
    n_steps, lasts = lower_recomputations(
        task.kernels, task.tensors, task.graph, plan, by_kernel, by_tensor, by_row, steps
    )
    if n_steps >= steps.shape[0]:
        return False, True
    walk[RERUN_NS] = lasts
    for k in range(n):
        need[k] = by_kernel[PLANNED, k]
    _touch(task.graph, n, steps, n_steps, touched)
    return True, False


@stage(entry=True)
def step_walks(  # type: ignore[no-untyped-def]
    begin, end, resume, resets, actions, chosen, tables, arrays, work, shown
):  # fmt: skip
    """Steps walks ``begin`` to ``end`` - 1, or begins those in ``resets`` anew.

    Args:
        resume: only those that are PENDING.
        resets: bool (walks,).
        actions: (walks,) node + N * form; none: only ``resets`` counts.
        chosen: (walks,) the task of those that begin, or -1: drawn.
        tables: options, where, ints, floats: see columns.py.
        arrays: walks: see columns.py; rows: int64 (walks, gaps, COLUMNS), the plans so far; touched: bool (walks,
            tensors), what the plan's recomputation uses.
        work: what one thread works on (batch.py).
        shown: rewards, terminated, invalid: of this step; overhead, feasible, mask, nodes, current: of the walks, which
            are written where they change.

    Returns:
        How many walks are PENDING.
    """
    options, where, ints, floats = tables
    walks, rows, touched = arrays
    work_ints, product, bits, shares, work_gaps, steps = work
    rewards, terminated, invalid, overhead, feasible, mask, nodes, current = shown
    scratch = Scratch(product, bits, shares)
    pending, number = 0, -1
    size, causal = options[SHOWN_NODES], options[CAUSAL] != 0
    for i in range(begin, end):
        whole = walks[i]
        walk = whole[:WALK]
        starts = not resume and (resets[i] or (options[AUTORESET] != 0 and walk[OVER] != 0))
        if (resume and walk[PENDING] == NOT_PENDING) or (not resume and actions.size == 0 and not starts):
            continue
        if not resume:
            rewards[i], terminated[i], invalid[i] = 0.0, False, False
        if starts:
            walk[TASK] = chosen[i] if chosen[i] >= 0 else draw(walk, options[TASKS])

        # The tables of the task and what to work on, if it is another one than before; the arrays of the walk.
        if walk[TASK] != number:
            number = walk[TASK]
            w = where[number]
            n, n_gaps, limit, ideal = w[KERNELS], w[GAPS], w[LIMIT_BYTES], w[IDEAL_NS]
            kernels = ints[w[KERNELS_AT] : w[KERNELS_AT] + KERNEL_ROWS * (n + 1)].reshape(KERNEL_ROWS, n + 1)
            tensors = ints[w[TENSORS_AT] : w[TENSORS_AT] + TENSOR_ROWS * w[TENSORS]].reshape(TENSOR_ROWS, w[TENSORS])
            gaps = ints[w[GAPS_AT] : w[GAPS_AT] + GAP_ROWS * n_gaps].reshape(GAP_ROWS, n_gaps)
            v = ints[w[NODES_AT] : w[NODES_AT] + NODE_ROWS * w[NODES]].reshape(NODE_ROWS, w[NODES])
            task = TaskView(
                w, kernels, tensors, ints[w[GRAPH_AT] : w[GRAPH_END]], gaps, v,
                floats[w[TIMES_AT] : w[TIMES_AT] + w[NODES]], kernels[BEGINS],
                ints[w[OPENING_AT] : w[OPENING_AT] + n], ints[w[NODE_AT] : w[NODE_AT] + n + 1], limit,
            )  # fmt: skip
            shapes = shapes_of(n, w[TENSORS], n_gaps, options[ITERATIONS])
            at, to = w[WORK_AT], w[WORK_AT] + _area(shapes[0])
            by_kernel = work_ints[at:to].reshape(shapes[0])
            at, to = to, to + _area(shapes[2])
            by_tensor = work_ints[at:to].reshape(shapes[2])
            at, to = 0, _area(shapes[1])
            by_segment = work_ints[at:to].reshape(shapes[1])
            at, to = to, to + _area(shapes[3])
            by_row = work_ints[at:to].reshape(shapes[3])
            at, to = to, to + _area(shapes[4])
            states = work_ints[at:to].reshape(shapes[4])
            results, ends = work_ints[to : to + RESULTS].reshape(1, RESULTS), work_ints[to + RESULTS : to + RESULTS + 2]
            result, settings = results[0], work_ints[to + RESULTS + 2 : to + RESULTS + 2 + SETTINGS]
        state = WalkView(
            walk, whole[options[NEED_AT] : options[NEED_AT] + n + 1],
            whole[options[ENDED_AT] : options[ENDED_AT] + n + 1],
            whole[options[OUT_END_AT] : options[OUT_END_AT] + n_gaps],
            whole[options[QUEUE_AT] : options[QUEUE_AT] + n_gaps],
            whole[options[TAKEN_AT] : options[TAKEN_AT] + n_gaps],
        )  # fmt: skip
        need = state.need

        if starts:
            _begin(task, state)
            walk[NEW_TO] = n
            if walk[SHOWN] != walk[TASK] + 1:
                walk[SHOWN] = walk[TASK] + 1
                for c in range(nodes.shape[1]):
                    for j in range(size):
                        nodes[i, c, j] = floats[w[STATIC_AT] + c * w[NODES] + j] if c < VALID and j < w[NODES] else 0.0
            current[i] = show(task, state, scratch, options, mask[i], nodes[i], -1, True, True)
            overhead[i], feasible[i] = walk[ITERATION] / ideal - 1.0, walk[ENDED] > walk[DEAD_END]
            continue

        # The action.
        if not resume:
            if not (0 <= actions[i] < mask.shape[1] and mask[i, actions[i]]):
                invalid[i] = True
                if options[IGNORE] == 0:
                    rewards[i], terminated[i], walk[OVER] = DEAD_END_REWARD, True, 1
                continue
            if walk[ENDED]:  # nothing need leave
                terminated[i], walk[OVER] = True, 1
                continue
            node, form, early = actions[i] % size, actions[i] // size, -1
            kind, g = v[NODE_KIND, node], v[NODE_GAP, node]
            if kind > OFFLOAD and form == EARLY:
                early = early_kernel(gaps[BEFORE, g], walk[POSITION], need, limit)
            walk[CAME_FROM], walk[CHANGED] = walk[POSITION], g
            _act(task, state, rows[i], kind, g, form, early, causal)
            if w[SHORT] and g >= 0:
                walk[PENDING] = WANTS_HOST
                pending += 1
                continue

        # What the plan needs, and how long it takes: by the clock, or simulated.
        plan, g, p = rows[i][: walk[COUNT]], walk[CHANGED], walk[POSITION]
        known, no_room = _replan(task, state, touched[i], plan, by_kernel, by_tensor, by_row, steps, causal)
        fits, feasibly, ns = known and first_over(need, limit) == n, True, 0
        if causal and not fits and not no_room:
            _run_clock(task, state)
            ns = task.begins[n] + state.ended[p] - task.begins[p] + walk[RERUN_NS]
        again = not no_room and (fits or not causal)
        while again:
            for c in range(SETTINGS):
                settings[c] = ints[w[SETTINGS_AT] + c]
            if w[SHORT]:  # what the plan needs of it is known
                settings[HOST_BYTES] = NEVER
            ends[0], ends[1] = 0, walk[COUNT]
            score_plans(
                kernels, tensors, task.graph, plan, ends, 0, -1, settings, n if fits else p, NEVER, 1, by_kernel,
                by_segment, by_tensor, by_row, work_gaps, steps, states, results, steps[:0],
            )  # fmt: skip
            no_room = result[STATUS] == MORE_STEPS
            again = not known and not no_room and result[REQUIRED] <= limit
            if again:  # it is the last step
                known = fits = True
            for k in range(n):
                need[k] = by_kernel[PLANNED, k]
            ns = result[ITERATION_NS]
            feasibly = result[STATUS] == DONE and result[PERIOD] > 0 and (w[SHORT] == 0 or walk[HOST_LEFT] >= 0)
        walk[PENDING] = WANTS_STEPS if no_room else NOT_PENDING
        if no_room:
            pending += 1
            continue
        if fits:
            walk[ENDED] = 1
        if feasibly:
            rewards[i], overhead[i] = (walk[ITERATION] - ns) / ideal, ns / ideal - 1.0
            walk[ITERATION] = ns
        elif fits:  # its iterations never repeat (rule 10)
            walk[DEAD_END] = 1
        moved = p != walk[CAME_FROM]
        current[i] = show(task, state, scratch, options, mask[i], nodes[i], g, moved, w[SHORT] != 0)
        if walk[DEAD_END]:
            rewards[i] += DEAD_END_REWARD
        if walk[ENDED]:
            terminated[i], walk[OVER], feasible[i] = True, 1, walk[DEAD_END] == 0
    return pending
