"""Compiled observation of a walk: Walk._refresh, Walk.form_masks and dynamic_features of tests/oracle/walk.py.

Only entries that have changed are written: gaps that have opened, closed or been emptied; columns that depend on the
planned residency, after an action; times, after the agent has moved.
"""

from __future__ import annotations

import numpy as np

from envs.graph import Feature
from envs.task import COPY, EARLY, KEEP
from simulator.compiled.jit import stage
from simulator.modes import Choice


@stage
def early_kernel(before, position, need, limit):
    """Returns the kernel at which early recomputation fits, or -1 (Walk._early of the reference)."""
    k = before - 1
    while k >= position and need[k] <= limit:
        k -= 1
    return k + 1 if position <= k < before - 1 else -1


@stage
def _copies(task, walk, g):
    """Returns whether gap g can be copied right after its last write (Walk.form_masks of the reference)."""
    gaps = task.gaps
    first = task.gaps[g].first_since
    if gaps[g].copy_at < 0 or (gaps[g].wraps and (walk.row.position != 0 or first != g)):
        return False
    for f in range(first, g):
        if walk.gap_actions[f] >= 0:
            return False
    return True


@stage
def _is_open(task, walk, g):
    """Returns whether gap g is open (Walk.open of the reference)."""
    gaps = task.gaps
    p = walk.row.position
    return (gaps[g].after < p or gaps[g].wraps != 0) and p < gaps[g].before and walk.gap_actions[g] < 0


@stage
def _show_gap(task, walk, g, mask, nodes):
    """Updates mask and validity of the nodes of a gap."""
    gaps = task.gaps
    row = walk.row
    is_open = row.ended == 0 and _is_open(task, walk, g)
    for removal in range(2):
        node = gaps[g].remove_node if removal else gaps[g].offload_node
        if node >= 0:
            valid = 1 if is_open and (removal == 1 or gaps[g].nbytes <= row.host_left) else 0
            row.valid_actions += valid - mask[node]
            mask[node] = valid
            nodes[Feature.VALID, node] = valid - (1 if walk.gap_actions[g] == Choice.SWAPPED + removal else 0)


@stage
def _show_forms(task, walk, mask, options):
    """Updates the masks of the additional forms that the options allow."""
    gaps = task.gaps
    size = options.shown_nodes
    copies = options.copies
    keeps = options.keeps
    earlies = options.earlies
    has_early = options.forms > EARLY
    for g in range(gaps.size):
        node = gaps[g].offload_node
        if node >= 0 and copies:
            mask[COPY * size + node] = 1 if mask[node] and _copies(task, walk, g) else 0
        node = gaps[g].remove_node
        if node >= 0 and has_early:
            mask[KEEP * size + node] = mask[node] if keeps else 0
            early = (
                earlies and mask[node] and early_kernel(gaps[g].before, walk.row.position, walk.need, task.limit) >= 0
            )
            mask[EARLY * size + node] = 1 if early else 0


@stage
def _divide(values, shift, divisor, product, bits, out):
    """Writes (values - shift) / divisor as float32 to ``out``, bit-identical to the division.

    The product with the reciprocal is off by at most 2 float64 units. ``bits`` shows whether a product is that close
    to a float32 rounding boundary; if one is, all values are divided.
    """
    reciprocal = 1.0 / divisor
    # A float64 has 29 bits more than a float32: ``distance`` is how far the closest product is from a boundary.
    distance = 2**29
    for i in range(values.size):
        product[i] = (values[i] - shift) * reciprocal
    for i in range(values.size):
        out[i] = product[i]
    for i in range(values.size):
        distance = min(distance, (bits[i] - (2**28 - 2)) & (2**29 - 1))
    if distance <= 4:
        for i in range(values.size):
            out[i] = (values[i] - shift) / divisor


@stage
def _fill(values, value):
    """Sets every entry of ``values``."""
    for i in range(values.size):
        values[i] = value


@stage
def _any_over(need, limit, begin, end):
    """Returns whether an entry of need[begin:end] exceeds the limit."""
    # a slice and no early exit, so that the loop vectorizes
    values = need[begin:end]
    over = 0
    for k in range(values.size):
        over |= values[k] > limit
    return over != 0


@stage
def first_over(need, limit):
    """Returns the start of the first block of kernels with one over the limit, or the number of kernels."""
    block = 32
    n = need.size - 1
    first = 0
    while first < n and not _any_over(need, limit, first, min(first + block, n)):
        first = min(first + block, n)
    return first


@stage
def _show_relief(task, need, work, nodes):
    """Updates the relief column of action nodes (Walk.relief), summing only over blocks around the excess."""
    block = 32
    gaps = task.gaps
    begins = task.begins
    limit = task.limit
    product = work.product
    shares = work.shares
    n = last = need.size - 1
    first = first_over(need, limit)
    while last > first and not _any_over(need, limit, max(first, last - block), last):
        last = max(first, last - block)
    excess = product[: n + 1]
    gap_excess = product[product.size // 2 :]
    _fill(excess[: first + 1], 0.0)
    total = 0.0
    for k in range(first, last):
        total += np.float64(max(0, need[k] - limit)) * np.float64(begins[k + 1] - begins[k])
        excess[k + 1] = total
    _fill(excess[last:], total)
    for j in range(gaps.size):  # indirect order: otherwise LLVM emits slow float64 gathers
        g = np.uintp(gaps[j].by_after)
        gap_excess[g] = excess[np.uintp(gaps[g].before)] - excess[np.uintp(gaps[g].after + 1)]
    j = gaps.size - 1
    while j >= 0 and gaps[gaps[j].by_after].wraps:  # wrapping gaps are last
        gap_excess[gaps[j].by_after] += total
        j -= 1
    _divide(gap_excess[: gaps.size], 0.0, max(total, 1.0), product, work.bits, shares)
    relief = nodes[Feature.RELIEF]
    for j in range(task.action_nodes.size):
        relief[np.uintp(task.action_nodes[j])] = shares[np.uintp(task.action_gaps[j])]


@stage
def _show_pressure(task, need, first, last, shares, nodes):
    """Updates the pressure at the nodes of kernels ``first`` to ``last`` - 1 (gpu_memory.md)."""
    limit = task.limit
    node_at = task.node_at
    planned = need[first:last]
    pressures = shares[first:last]
    for k in range(planned.size):
        pressures[k] = np.float64(planned[k] - limit) / np.float64(max(planned[k], limit))
    begin = node_at[first] + 1 if first else 0
    end = node_at[last] + 1
    kernel = task.node_kernel[begin:end]
    pressure = nodes[Feature.PRESSURE, begin:end]
    for i in range(kernel.size):
        pressure[i] = shares[np.uintp(kernel[i])]


@stage
def _show_time(task, walk, work, nodes, moved):
    """Updates the distance to the nodes, the copy queue and the time until the walk is stuck."""
    starts = task.times
    begins = task.begins
    ideal = task.ideal_ns
    n = begins.size - 1
    now = begins[min(walk.position, n - 1)]
    if moved:
        _divide(starts, np.float64(now), np.float64(ideal), work.product, work.bits, nodes[Feature.AHEAD])
    queued_ns = max(0, walk.free_ns - now)
    queue = np.float32(queued_ns / (queued_ns + ideal))
    if nodes[Feature.QUEUE, 0] != queue:
        _fill(nodes[Feature.QUEUE, : starts.size], queue)
    stuck = np.float32(1.0 if walk.stuck_at == n else (begins[walk.stuck_at] - now) / ideal)
    if nodes[Feature.STUCK, 0] != stuck:
        _fill(nodes[Feature.STUCK, : starts.size], stuck)


@stage
def show(task, state, work, options, mask, nodes, rewrite):
    """Updates the walk (Walk._refresh of the reference) and its observation; returns the current node.

    Args:
        task: TaskView of the walk.
        state: WalkView of the walk.
        work: WorkArrays of the thread.
        options: record of OPTIONS (columns.py).
        mask: int8 (F N,) to update.
        nodes: float32 (OBSERVED, N) to update.
        rewrite: whether to rewrite the whole observation; else only what the last action, the walk's came_from and
            changed, can have affected.
    """
    walk = state.row
    need = state.need
    gaps = task.gaps
    limit = task.limit
    n = need.size - 1
    g = walk.changed
    p = walk.position
    stuck = p
    while stuck < n and need[stuck] <= limit:
        stuck += 1
    walk.stuck_at = stuck
    n_gaps = gaps.size
    if rewrite:
        walk.valid_actions = walk.opened = walk.closed = 0
        for node in range(mask.size):
            mask[node] = 0
        for gap in range(n_gaps):
            _show_gap(task, state, gap, mask, nodes)
    elif g >= 0:
        _show_gap(task, state, g, mask, nodes)
    # Gaps that have opened or closed since the last time; wrapping gaps are open from the start.
    while walk.opened < n_gaps:
        gap = gaps[walk.opened].by_after
        if gaps[gap].after + 1 > p or gaps[gap].wraps:
            break
        _show_gap(task, state, gap, mask, nodes)
        walk.opened += 1
    while walk.closed < n_gaps:
        gap = gaps[walk.closed].by_before
        if gaps[gap].before > p:
            break
        _show_gap(task, state, gap, mask, nodes)
        walk.closed += 1
    if walk.ended == 0 and stuck == p and walk.valid_actions == 0:
        walk.ended = walk.dead_end = 1
    if walk.ended and walk.valid_actions:
        for gap in range(n_gaps):
            _show_gap(task, state, gap, mask, nodes)
    mask[0] = 1 if walk.ended or stuck > p else 0
    nodes[Feature.VALID, 0] = mask[0]
    if options.forms > 1:
        _show_forms(task, state, mask, options)
    if g >= 0 or rewrite:
        _show_relief(task, need, work, nodes)
        _show_pressure(task, need, walk.new_from, walk.new_to, work.shares, nodes)
    _show_time(task, walk, work, nodes, rewrite or p != walk.came_from)
    return task.node_at[p]
