"""Compiled transition rules of many walks, equal to the reference tests/oracle/walk.py in every step.

batch.py allocates the arrays (fields: columns.py) and calls ``step_walks``. Two cases need Python: host memory that
is limited, and a full buffer of recomputation steps. Then the walk is marked pending, batch.py handles the request
and calls ``step_walks`` again with ``resume``.

Functions with ``inline=True`` take whole views, whose arrays a call would copy one by one.
"""

from __future__ import annotations

import numpy as np

from envs.graph import STATIC
from envs.observation import early_kernel, first_over, show
from envs.task import COPY, DEAD_END_REWARD, EARLY, KEEP
from simulator.compiled.jit import stage
from simulator.compiled.rematerialization import lower_recomputations
from simulator.compiled.scoring import score_plans
from simulator.modes import Choice

# isort: off
from envs.columns import BatchTables, Outputs, Pending, Simulation, TaskView, WalkArrays, WalkView, WorkArrays
from simulator.compiled.encoding import (
    AFTER as ROW_AFTER,
    BEFORE as ROW_BEFORE,
    EXTRA,
    HOST_BYTES,
    KERNEL_ROWS,
    KIND,
    NEVER,
    RECOMPUTE,
    RESULT,
    RESULTS,
    SETTINGS,
    STEP,
    SWAP,
    TENSOR as ROW_TENSOR,
    TENSOR_ROWS,
    WHEN,
    Arrays,
    ByKernel,
    Kernels,
    Status,
    Tensors,
    work_shapes,
)
from simulator.compiled.records import named
# isort: on


shapes_of = stage(work_shapes, inline=True)


@stage(inline=True)
def _view(array, offset, shape):
    """Returns a view of the given shape that begins at ``offset``, and the offset after it."""
    end = offset + shape[0] * shape[1]
    return array[offset:end].reshape(shape), end


@stage(inline=True)
def _task_view(tables, row):
    """Returns the TaskView of a task, a record of TASK."""
    ints = tables.ints
    n = row.kernels
    kernels, _ = _view(ints, row.kernels_at, (KERNEL_ROWS, n + 1))
    tensors, _ = _view(ints, row.tensors_at, (TENSOR_ROWS, row.tensors))
    return TaskView(
        kernels=kernels,
        tensors=tensors,
        graph=ints[row.graph_at : row.graph_end],
        settings=ints[row.settings_at : row.settings_at + SETTINGS],
        gaps=tables.gaps[row.gaps_at : row.gaps_at + row.gaps],
        node_kernel=ints[row.node_kernel_at : row.node_kernel_at + row.nodes],
        node_kind=ints[row.node_kind_at : row.node_kind_at + row.nodes],
        node_gap=ints[row.node_gap_at : row.node_gap_at + row.nodes],
        action_nodes=ints[row.action_nodes_at : row.action_nodes_at + row.n_actions],
        action_gaps=ints[row.action_gaps_at : row.action_gaps_at + row.n_actions],
        times=tables.floats[row.times_at : row.times_at + row.nodes],
        begins=named(Kernels, kernels).begins,
        opening=ints[row.opening_at : row.opening_at + n],
        node_at=ints[row.node_at : row.node_at + n + 1],
        limit=row.limit_bytes,
        ideal_ns=row.ideal_ns,
        host_bytes=row.host_bytes,
        host_is_short=row.host_is_short,
    )


@stage(inline=True)
def _simulation(work, row, iterations):
    """Returns the views of a thread's work array with which plans of a task, a record of TASK, are simulated."""
    kernel_shape, segment_shape, tensor_shape, row_shape, state_shape = shapes_of(
        row.kernels, row.tensors, row.gaps, iterations
    )
    # Lowering marks entries of by_kernel and by_tensor with a number that rises from call to call, so that nothing must
    # be cleared: each program has its own. The others are refilled by each call and shared by all tasks.
    by_kernel, offset = _view(work.ints, row.work_at, kernel_shape)
    by_tensor, _ = _view(work.ints, offset, tensor_shape)
    by_segment, offset = _view(work.ints, 0, segment_shape)
    by_row, offset = _view(work.ints, offset, row_shape)
    states, offset = _view(work.ints, offset, state_shape)
    ends_at = offset + RESULTS
    return Simulation(
        Arrays(by_kernel, by_segment, by_tensor, by_row, work.gaps, work.steps, states),
        results=work.ints[offset:ends_at],
        ends=work.ints[ends_at : ends_at + 2],
        settings=work.ints[ends_at + 2 : ends_at + 2 + SETTINGS],
    )


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
    walk.out_free = max(walk.out_free, time) + named(Tensors, task.tensors).d2h_ns[task.gaps[g].tensor]
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
            h2d_ns = named(Tensors, task.tensors).h2d_ns[gaps[g].tensor]
            walk.in_free = max(walk.in_free, max(out_end[g], fits)) + h2d_ns
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
def _act(task, state, rows, node, form, causal):
    """Appends the action's row to the plan and moves the agent (Walk._offload and Walk._remove of the reference)."""
    walk = state.row
    begins = task.begins
    ended_ns = state.ended_ns
    position = walk.position
    stuck = walk.stuck_at
    ideal = begins[begins.size - 1]
    next_position = min(task.opening[position], stuck) if position < task.opening.size else position
    kind = task.node_kind[node]
    g = task.node_gap[node]
    walk.came_from = position
    walk.changed = g
    if kind == Choice.RESIDENT:
        walk.position = next_position
        return
    gap = task.gaps[g]
    row = rows[walk.count]
    walk.count += 1
    row[ROW_TENSOR] = gap.tensor
    row[ROW_BEFORE] = gap.before
    state.gap_actions[g] = kind
    if kind != Choice.SWAPPED:
        row[KIND] = RECOMPUTE
        row[ROW_AFTER] = max(position - 1, gap.after)
        row[EXTRA] = 1 if form == KEEP else 0
        row[WHEN] = early_kernel(gap.before, position, state.need, task.limit) if form == EARLY else -1
        walk.removals += 1
        if stuck != position:
            walk.position = next_position
        return
    copy = gap.copy_at if form == COPY else -1
    copy_ns = named(Tensors, task.tensors).d2h_ns[gap.tensor]
    row[KIND] = SWAP
    row[EXTRA] = -1
    row[WHEN] = copy
    if gap.wraps and position == 0:
        # The gap opened in the previous iteration, whose copy does not hold the agent.
        row[ROW_AFTER] = gap.after
        begin_ns = begins[(gap.after if copy < 0 else copy) + 1] - ideal
        walk.free_ns = max(walk.free_ns, begin_ns) + copy_ns
        if causal:
            _issue(task, state, g, begin_ns)
        return
    # The last kernel that ended before the engine is free, if the gap was open then.
    first_after = 0 if gap.wraps else gap.after
    after = position - 1
    while after > first_after and begins[after + 1] > walk.free_ns:
        after -= 1
    row[ROW_AFTER] = after
    issued = after if copy < 0 else copy
    end_ns = max(walk.free_ns, begins[issued + 1]) + copy_ns
    if causal:
        _issue(task, state, g, ended_ns[issued + 1])
    # The agent waits for the copy, but kernels up to the next one that cannot start need not.
    if stuck == position:
        walk.free_ns = begins[position]
        return
    walk.free_ns = min(end_ns, begins[stuck])
    while position < stuck and begins[position] < end_ns:
        position += 1
    walk.position = position


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
            row = steps[j].kernel + table * (n + 1)
            for i in range(graph[row], graph[row + 1]):
                touched[graph[i]] = True


@stage
def _replan(task, state, touched, plan, arrays, causal):
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
    steps = arrays.steps.view(STEP)
    n_steps, rerun_ns = lower_recomputations(
        task.kernels, task.tensors, task.graph, plan, arrays.by_kernel, arrays.by_tensor, arrays.by_row, steps
    )
    if n_steps >= steps.size:
        return False, True
    walk.rerun_ns = rerun_ns
    planned = named(ByKernel, arrays.by_kernel).planned
    for k in range(n):
        need[k] = planned[k]
    _touch(task.graph, n, steps, n_steps, touched)
    return True, False


@stage(inline=True)
def _simulate(task, state, simulation, plan, limit_until):
    """Simulates the plan with the limit enforced before kernel ``limit_until``, and updates the planned residency.

    Returns:
        The iteration time; whether the plan is feasible.
    """
    walk = state.row
    arrays, results, ends, settings = simulation
    for c in range(SETTINGS):
        settings[c] = task.settings[c]
    if task.host_is_short:  # host_left already has the plan's host memory
        settings[HOST_BYTES] = NEVER
    ends[0] = 0
    ends[1] = walk.count
    score_plans(
        plan,
        0,
        -1,
        limit_until,
        NEVER,
        1,
        ends,
        task.kernels,
        task.tensors,
        task.graph,
        settings,
        arrays.by_kernel,
        arrays.by_segment,
        arrays.by_tensor,
        arrays.by_row,
        arrays.gaps,
        arrays.steps,
        arrays.states,
        results,
        arrays.steps[:0],
    )
    planned = named(ByKernel, arrays.by_kernel).planned
    for k in range(task.begins.size - 1):
        state.need[k] = planned[k]
    result = results.view(RESULT)[0]
    has_host = task.host_is_short == 0 or walk.host_left >= 0
    return result.iteration_ns, result.status == Status.DONE and result.period > 0 and has_host


@stage(inline=True)
def _evaluate(task, state, simulation, plan, touched, causal):
    """Updates planned residency and iteration time after an action; returns whether the rest of the iteration fits.

    Returns:
        The iteration time, from the clock or from a simulation; whether every kernel fits, so that the walk ends;
        whether the plan is feasible; whether the buffer of recomputation steps was too small for all of this.
    """
    walk = state.row
    n = task.begins.size - 1
    position = walk.position
    is_known, needs_steps = _replan(task, state, touched, plan, simulation.arrays, causal)
    fits = is_known and first_over(state.need, task.limit) == n
    if needs_steps:
        return 0, fits, True, True
    if causal and not fits:
        _run_clock(task, state)
        ended_ns = state.ended_ns[position] + walk.rerun_ns
        return ended_ns + task.begins[n] - task.begins[position], False, True, False
    while True:
        ns, is_feasible = _simulate(task, state, simulation, plan, n if fits else position)
        result = simulation.results.view(RESULT)[0]
        needs_steps = result.status == Status.MORE_STEPS
        if is_known or needs_steps or result.required > task.limit:
            return ns, fits, is_feasible, needs_steps
        # The walk ends: its last simulation enforces the limit in all of the iteration.
        is_known = fits = True


@stage(inline=True)
def _begin_episode(task, state, static, size, nodes):
    """Resets a walk (Walk.reset of the reference) and, if its task has changed, writes the static observation."""
    walk = state.row
    n = task.begins.size - 1
    ideal = task.begins[n]
    peak = 0
    for k in range(n):
        state.need[k] = named(Kernels, task.kernels).live[k]
        peak = max(peak, state.need[k])
    for g in range(state.gap_actions.size):
        state.gap_actions[g] = -1
    walk.position = walk.count = walk.dead_end = walk.pending = walk.over = walk.removals = walk.rerun_ns = 0
    walk.changed = walk.came_from = walk.new_from = walk.head = walk.tail = walk.under_way = 0
    walk.new_to = n
    walk.free_ns = walk.out_free = walk.in_free = -ideal
    walk.iteration = ideal
    walk.host_left = task.host_bytes
    walk.ended = 1 if peak <= task.limit else 0
    state.ended_ns[0] = 0
    if walk.shown == walk.task + 1:
        return
    walk.shown = walk.task + 1
    n_nodes = task.times.size
    for c in range(nodes.shape[0]):
        for node in range(size):
            nodes[c, node] = static[c * n_nodes + node] if c < STATIC and node < n_nodes else 0.0


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
        tables: fields of BatchTables.
        arrays: fields of WalkArrays.
        work: fields of WorkArrays, of one thread.
        outputs: fields of Outputs.

    Returns:
        The number of pending walks.
    """
    # Passing a NamedTuple from Python takes a microsecond more than passing a tuple.
    tables = BatchTables(*tables)
    arrays = WalkArrays(*arrays)
    work = WorkArrays(*work)
    outputs = Outputs(*outputs)
    options = tables.options[0]
    rewards = outputs.rewards
    pending = 0
    task_index = -1
    size = options.shown_nodes
    causal = options.causal != 0
    for i in range(begin, end):
        walk = arrays.walks[i]
        begins_episode = not resume and (resets[i] or (options.autoreset != 0 and walk.over != 0))
        if resume and walk.pending == Pending.NOTHING:
            continue
        if not resume:
            if actions.size == 0 and not begins_episode:
                continue
            rewards[i] = 0.0
            outputs.terminated[i] = False
            outputs.invalid[i] = False
        if begins_episode:
            walk.task = task_indices[i] if task_indices[i] >= 0 else draw(walk, options.tasks)
        if walk.task != task_index:  # consecutive walks often share the task, so that the views are kept
            task_index = walk.task
            row = tables.tasks[task_index]
            task = _task_view(tables, row)
            simulation = _simulation(work, row, options.iterations)
            n_gaps = row.gaps
            n_bounds = row.kernels + 1
        state = WalkView(
            walk,
            arrays.need[i, :n_bounds],
            arrays.ended_ns[i, :n_bounds],
            arrays.out_end[i, :n_gaps],
            arrays.queue[i, :n_gaps],
            arrays.gap_actions[i, :n_gaps],
        )
        mask = outputs.mask[i]
        nodes = outputs.nodes[i]
        if begins_episode:
            _begin_episode(task, state, tables.floats[row.static_at :], size, nodes)
            outputs.current[i] = show(task, state, work, options, mask, nodes, True)
            outputs.overhead[i] = np.nan if walk.dead_end else walk.iteration / task.ideal_ns - 1.0
            outputs.feasible[i] = walk.ended > walk.dead_end
            continue

        if not resume:
            action = actions[i]
            if not (0 <= action < mask.size and mask[action]):
                outputs.invalid[i] = True
                if options.ignore == 0:
                    rewards[i] = DEAD_END_REWARD
                    outputs.overhead[i] = np.nan
                    outputs.terminated[i] = True
                    walk.over = 1
                continue
            if walk.ended:  # no further action is needed
                outputs.terminated[i] = True
                walk.over = 1
                continue
            _act(task, state, arrays.rows[i], action % size, action // size, causal)
            if task.host_is_short and walk.changed >= 0:
                walk.pending = Pending.HOST_BYTES
                pending += 1
                continue

        plan = arrays.rows[i][: walk.count]
        ns, fits, is_feasible, needs_steps = _evaluate(task, state, simulation, plan, arrays.touched[i], causal)
        if needs_steps:  # once there is room, the evaluation is repeated
            walk.pending = Pending.STEPS
            pending += 1
            continue
        walk.pending = Pending.NOTHING
        if fits:
            walk.ended = 1
        if is_feasible:
            rewards[i] = (walk.iteration - ns) / task.ideal_ns
            outputs.overhead[i] = ns / task.ideal_ns - 1.0
            walk.iteration = ns
        elif fits:  # its iterations never repeat (rule 10)
            walk.dead_end = 1
        # Limited host memory may forbid any offload after any action, so that all of the mask may change.
        outputs.current[i] = show(task, state, work, options, mask, nodes, task.host_is_short != 0)
        if walk.dead_end:
            rewards[i] += DEAD_END_REWARD
            outputs.overhead[i] = np.nan
        if walk.ended:
            outputs.terminated[i] = True
            walk.over = 1
            outputs.feasible[i] = walk.dead_end == 0
    return pending
