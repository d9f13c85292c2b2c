"""Compiled transition rules of many walks, equal to the reference tests/oracle/walk.py in every step.

batch.py allocates the arrays (fields: columns.py) and calls ``step_walks``. Two cases need Python: host memory that
is limited, and a full buffer of recomputation steps. Then the walk is marked pending, batch.py handles the request
and calls ``step_walks`` again with ``resume``.
"""

from __future__ import annotations

import numpy as np

from envs.graph import VALID
from envs.observation import early_kernel, first_over, show
from envs.task import COPY, DEAD_END_REWARD, EARLY, KEEP
from simulator.compiled.jit import stage
from simulator.compiled.rematerialization import lower_recomputations
from simulator.compiled.scoring import score_plans
from simulator.modes import Choice

# isort: off
from envs.columns import (
    NODE_GAP,
    NODE_KIND,
    NODE_ROWS,
    NOT_PENDING,
    WANTS_HOST,
    WANTS_STEPS,
    Scratch,
    TaskView,
    WalkView,
)
from simulator.compiled.encoding import (
    AFTER as ROW_AFTER,
    BEFORE as ROW_BEFORE,
    BEGINS,
    D2H,
    DONE,
    EXTRA,
    H2D,
    HOST_BYTES,
    ITERATION_NS,
    KERNEL_ROWS,
    KIND,
    LIVE,
    MORE_STEPS,
    NEVER,
    PERIOD,
    PLANNED,
    RECOMPUTE,
    REQUIRED,
    RESULTS,
    SETTINGS,
    STATUS,
    STEP_KERNEL,
    SWAP,
    TENSOR as ROW_TENSOR,
    TENSOR_ROWS,
    WHEN,
    work_shapes,
)
# isort: on


shapes_of = stage(work_shapes, inline=True)


@stage(inline=True)
def _view(array, offset, shape):
    """Returns a view of the given shape that begins at ``offset``, and the offset after it."""
    end = offset + shape[0] * shape[1]
    return array[offset:end].reshape(shape), end


@stage
def draw(walk, tasks):
    """Returns the next random task of a walk.

    Source: SplitMix64 (Steele, Lea, Flood 2014).
    """
    state = np.uint64(walk.seed) + np.uint64(0x9E3779B97F4A7C15)
    walk.seed = np.int64(state)
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((z ^ (z >> np.uint64(31))) >> np.uint64(1)) % tasks


# ------------------------------------------------------------------------------------------------------ the clock


@stage
def _issue(task, state, g, time):
    """Queues a copy to the host (Clock.offload of the reference)."""
    walk = state.row
    walk.out_free = max(walk.out_free, time) + task.tensors[D2H, task.gaps[g].tensor]
    state.out_end[g] = walk.out_free
    state.queue[walk.tail] = g
    walk.tail += 1
    walk.under_way += task.gaps[g].nbytes


@stage
def _run_clock(task, state):
    """Advances the clock from the previous position to the current one (Clock.run of the reference)."""
    gaps = task.gaps
    begins = task.begins
    limit = task.limit
    walk, need, ended_ns, out_end, queue, gap_actions = state
    ideal = begins[begins.size - 1]
    rank = walk.closed
    while rank > 0 and gaps[gaps[rank - 1].by_before].before >= walk.came_from:
        rank -= 1
    for k in range(walk.came_from, walk.position):
        now = ended_ns[k]
        while rank < gaps.size and gaps[gaps[rank].by_before].before == k:
            g = gaps[rank].by_before
            rank += 1
            if gap_actions[g] != Choice.SWAPPED:
                continue
            size = gaps[g].nbytes
            first = 0 if gaps[g].wraps else gaps[g].after + 1
            j = k - 1
            while j >= first and need[j] + size <= limit:
                j -= 1
            fits = ended_ns[j + 1] if j >= first else -ideal
            walk.in_free = max(walk.in_free, max(out_end[g], fits)) + task.tensors[H2D, gaps[g].tensor]
            now = max(now, walk.in_free)
        while walk.head < walk.tail:
            g = queue[walk.head]
            if out_end[g] > now and need[k] + walk.under_way <= limit:
                break
            now = max(now, out_end[g])
            walk.head += 1
            walk.under_way -= gaps[g].nbytes
        ended_ns[k + 1] = now + begins[k + 1] - begins[k]


# --------------------------------------------------------------------------------------------------------- one step


@stage
def _act(task, state, rows, kind, g, form, early, causal):
    """Appends the action's row to the plan and moves the agent (Walk._offload and Walk._remove of the reference)."""
    walk = state.row
    gaps = task.gaps
    begins = task.begins
    opening = task.opening
    ended_ns = state.ended_ns
    p = walk.position
    stuck = walk.stuck_at
    ideal = begins[begins.size - 1]
    next_position = min(opening[p], stuck) if p < opening.size else p
    if kind == Choice.RESIDENT:
        walk.position = next_position
        return
    t = gaps[g].tensor
    after = gaps[g].after
    before = gaps[g].before
    row = rows[walk.count]
    walk.count += 1
    row[ROW_TENSOR] = t
    row[ROW_BEFORE] = before
    state.gap_actions[g] = kind
    if kind != Choice.SWAPPED:
        row[KIND] = RECOMPUTE
        row[ROW_AFTER] = max(p - 1, after)
        row[EXTRA] = 1 if form == KEEP else 0
        row[WHEN] = early
        walk.removals += 1
        if stuck != p:
            walk.position = next_position
        return
    copy = gaps[g].copy_at if form == COPY else -1
    copy_ns = task.tensors[D2H, t]
    row[KIND] = SWAP
    row[EXTRA] = -1
    row[WHEN] = copy
    if gaps[g].wraps and p == 0:
        row[ROW_AFTER] = after
        begin_ns = begins[(after if copy < 0 else copy) + 1] - ideal
        walk.free_ns = max(walk.free_ns, begin_ns) + copy_ns
        if causal:
            _issue(task, state, g, begin_ns)
        return
    # The last kernel that ended before the engine is free, if the gap was open then.
    first_after = 0 if gaps[g].wraps else after
    after = p - 1
    while after > first_after and begins[after + 1] > walk.free_ns:
        after -= 1
    row[ROW_AFTER] = after
    issued = after if copy < 0 else copy
    end_ns = max(walk.free_ns, begins[issued + 1]) + copy_ns
    if causal:
        _issue(task, state, g, ended_ns[issued + 1])
    if stuck == p:
        walk.free_ns = begins[p]
        return
    walk.free_ns = min(end_ns, begins[stuck])
    while p < stuck and begins[p] < end_ns:
        p += 1
    walk.position = p


@stage
def swap_out(need, after, before, size):
    """Subtracts a swapped tensor from the planned residency, from the end of kernel ``after`` to ``before``."""
    n = need.size - 1
    inner = need[after + 1 : before if after < before else n]
    wrapped = need[: 0 if after < before else before]
    for k in range(inner.size):
        inner[k] -= size
    for k in range(wrapped.size):
        wrapped[k] -= size


@stage
def _touch(graph, n, steps, n_steps, touched):
    """Marks tensors that recomputation writes or reads; swapping others does not change the recomputation."""
    for t in range(touched.size):
        touched[t] = False
    for j in range(n_steps):
        for table in range(2):
            row = steps[j, STEP_KERNEL] + table * (n + 1)
            for i in range(graph[row], graph[row + 1]):
                touched[graph[i]] = True


@stage
def _begin(task, state):
    """Resets a walk (Walk.reset of the reference)."""
    walk = state.row
    need = state.need
    n = task.begins.size - 1
    ideal = task.begins[n]
    most = 0
    for k in range(n):
        need[k] = task.kernels[LIVE, k]
        most = max(most, need[k])
    for g in range(state.gap_actions.size):
        state.gap_actions[g] = -1
    walk.position = walk.count = walk.dead_end = walk.pending = walk.over = walk.removals = walk.rerun_ns = 0
    walk.changed = walk.came_from = walk.new_from = walk.head = walk.tail = walk.under_way = 0
    walk.free_ns = walk.out_free = walk.in_free = -ideal
    walk.iteration = ideal
    walk.host_left = task.row.host
    walk.ended = 1 if most <= task.limit else 0
    state.ended_ns[0] = 0


@stage
def _replan(task, state, touched, plan, by_kernel, by_tensor, by_row, steps, causal):
    """Updates the planned residency after a step as far as no simulation is needed.

    Returns:
        Whether the residency is up to date, and whether the buffer of recomputation steps was too small.
    """
    walk = state.row
    need = state.need
    gaps = task.gaps
    g = walk.changed
    n = need.size - 1
    walk.new_from = 0
    walk.new_to = n
    if g < 0:
        return True, False
    if state.gap_actions[g] == Choice.SWAPPED and (walk.removals == 0 or (causal and not touched[gaps[g].tensor])):
        after = plan[walk.count - 1, ROW_AFTER]
        before = gaps[g].before
        swap_out(need, after, before, gaps[g].nbytes)
        if after < before:
            walk.new_from = after + 1
            walk.new_to = before
        return True, False
    if not causal:
        return False, False
    n_steps, rerun_ns = lower_recomputations(
        task.kernels, task.tensors, task.graph, plan, by_kernel, by_tensor, by_row, steps
    )
    if n_steps >= steps.shape[0]:
        return False, True
    walk.rerun_ns = rerun_ns
    for k in range(n):
        need[k] = by_kernel[PLANNED, k]
    _touch(task.graph, n, steps, n_steps, touched)
    return True, False


@stage(entry=True)
def step_walks(begin, end, resume, resets, actions, task_indices, tables, arrays, work, outputs):
    """Steps walks ``begin`` to ``end`` - 1, or resets those in ``resets``.

    Args:
        begin: first walk.
        end: last walk + 1.
        resume: continue pending walks only.
        resets: bool (walks,).
        actions: (walks,) node + N * form; empty: resets only.
        task_indices: (walks,) task of walks that are reset; -1: draw one.
        tables: options, task_rows, gaps, ints, floats (columns.py).
        arrays: walks, need, ended_ns, out_end, queue, gap_actions: fields of each WalkView, along the first axis; rows:
            int64 (walks, gaps, COLUMNS), the partial plans; touched: bool (walks, tensors), tensors that the plan's
            recomputation writes or reads.
        work: work arrays of one thread (batch.py).
        outputs: rewards, terminated, invalid: of this step; overhead (NaN in a dead end), feasible, mask, nodes,
            current: of the walks, written only where they change.

    Returns:
        The number of pending walks.
    """
    option_rows, task_rows, gap_table, ints, floats = tables
    walks, needs, ended_ns, out_end, queues, kinds, rows, touched = arrays
    options = option_rows[0]
    work_ints, product, bits, shares, work_gaps, steps = work
    rewards, terminated, invalid, overhead, feasible, mask, nodes, current = outputs
    scratch = Scratch(product, bits, shares)
    pending = 0
    task_index = -1
    size = options.shown_nodes
    causal = options.causal != 0
    for i in range(begin, end):
        walk = walks[i]
        resets_walk = not resume and (resets[i] or (options.autoreset != 0 and walk.over != 0))
        if (resume and walk.pending == NOT_PENDING) or (not resume and actions.size == 0 and not resets_walk):
            continue
        if not resume:
            rewards[i] = 0.0
            terminated[i] = False
            invalid[i] = False
        if resets_walk:
            walk.task = task_indices[i] if task_indices[i] >= 0 else draw(walk, options.tasks)

        # Views of the task's tables and work arrays, if the task differs from the previous walk's; arrays of the walk.
        if walk.task != task_index:
            task_index = walk.task
            w = task_rows[task_index]
            n = w.kernels
            n_gaps = w.gaps
            limit = w.limit_bytes
            ideal = w.ideal_ns
            kernels, _ = _view(ints, w.kernels_at, (KERNEL_ROWS, n + 1))
            tensors, _ = _view(ints, w.tensors_at, (TENSOR_ROWS, w.tensors))
            gaps = gap_table[w.gaps_at : w.gaps_at + n_gaps]
            v, _ = _view(ints, w.nodes_at, (NODE_ROWS, w.nodes))
            task = TaskView(
                w,
                kernels,
                tensors,
                ints[w.graph_at : w.graph_end],
                gaps,
                v,
                floats[w.times_at : w.times_at + w.nodes],
                kernels[BEGINS],
                ints[w.opening_at : w.opening_at + n],
                ints[w.node_at : w.node_at + n + 1],
                limit,
            )
            shapes = shapes_of(n, w.tensors, n_gaps, options.iterations)
            by_kernel, offset = _view(work_ints, w.work_at, shapes[0])
            by_tensor, _ = _view(work_ints, offset, shapes[2])
            by_segment, offset = _view(work_ints, 0, shapes[1])
            by_row, offset = _view(work_ints, offset, shapes[3])
            states, to = _view(work_ints, offset, shapes[4])
            results = work_ints[to : to + RESULTS].reshape(1, RESULTS)
            ends = work_ints[to + RESULTS : to + RESULTS + 2]
            result = results[0]
            settings = work_ints[to + RESULTS + 2 : to + RESULTS + 2 + SETTINGS]
        need = needs[i, : n + 1]
        state = WalkView(walk, need, ended_ns[i, : n + 1], out_end[i, :n_gaps], queues[i, :n_gaps], kinds[i, :n_gaps])

        if resets_walk:
            _begin(task, state)
            walk.new_to = n
            if walk.shown != walk.task + 1:
                walk.shown = walk.task + 1
                for c in range(nodes.shape[1]):
                    for j in range(size):
                        nodes[i, c, j] = floats[w.static_at + c * w.nodes + j] if c < VALID and j < w.nodes else 0.0
            current[i] = show(task, state, scratch, options, mask[i], nodes[i], -1, True, True)
            overhead[i] = np.nan if walk.dead_end else walk.iteration / ideal - 1.0
            feasible[i] = walk.ended > walk.dead_end
            continue

        # The action.
        if not resume:
            if not (0 <= actions[i] < mask.shape[1] and mask[i, actions[i]]):
                invalid[i] = True
                if options.ignore == 0:
                    rewards[i] = DEAD_END_REWARD
                    terminated[i] = True
                    walk.over = 1
                continue
            if walk.ended:  # no further action is needed
                terminated[i] = True
                walk.over = 1
                continue
            node = actions[i] % size
            form = actions[i] // size
            early = -1
            kind = v[NODE_KIND, node]
            g = v[NODE_GAP, node]
            if kind > Choice.SWAPPED and form == EARLY:
                early = early_kernel(gaps[g].before, walk.position, need, limit)
            walk.came_from = walk.position
            walk.changed = g
            _act(task, state, rows[i], kind, g, form, early, causal)
            if w.short and g >= 0:
                walk.pending = WANTS_HOST
                pending += 1
                continue

        # Planned residency and iteration time, from the clock or from a simulation.
        plan = rows[i][: walk.count]
        g = walk.changed
        p = walk.position
        is_known, no_room = _replan(task, state, touched[i], plan, by_kernel, by_tensor, by_row, steps, causal)
        fits = is_known and first_over(need, limit) == n
        is_feasible = True
        ns = 0
        if causal and not fits and not no_room:
            _run_clock(task, state)
            ns = task.begins[n] + state.ended_ns[p] - task.begins[p] + walk.rerun_ns
        needs_simulation = not no_room and (fits or not causal)
        while needs_simulation:
            for c in range(SETTINGS):
                settings[c] = ints[w.settings_at + c]
            if w.short:  # host_left already has the plan's host memory
                settings[HOST_BYTES] = NEVER
            ends[0] = 0
            ends[1] = walk.count
            score_plans(
                kernels,
                tensors,
                task.graph,
                plan,
                ends,
                0,
                -1,
                settings,
                n if fits else p,
                NEVER,
                1,
                by_kernel,
                by_segment,
                by_tensor,
                by_row,
                work_gaps,
                steps,
                states,
                results,
                steps[:0],
            )
            no_room = result[STATUS] == MORE_STEPS
            needs_simulation = not is_known and not no_room and result[REQUIRED] <= limit
            if needs_simulation:  # last step of the episode
                is_known = fits = True
            for k in range(n):
                need[k] = by_kernel[PLANNED, k]
            ns = result[ITERATION_NS]
            is_feasible = result[STATUS] == DONE and result[PERIOD] > 0 and (w.short == 0 or walk.host_left >= 0)
        walk.pending = WANTS_STEPS if no_room else NOT_PENDING
        if no_room:
            pending += 1
            continue
        if fits:
            walk.ended = 1
        if is_feasible:
            rewards[i] = (walk.iteration - ns) / ideal
            overhead[i] = ns / ideal - 1.0
            walk.iteration = ns
        elif fits:  # its iterations never repeat (rule 10)
            walk.dead_end = 1
        moved = p != walk.came_from
        current[i] = show(task, state, scratch, options, mask[i], nodes[i], g, moved, w.short != 0)
        if walk.dead_end:
            rewards[i] += DEAD_END_REWARD
            overhead[i] = np.nan
        if walk.ended:
            terminated[i] = True
            walk.over = 1
            feasible[i] = walk.dead_end == 0
    return pending
