"""Plans with Recompute decisions, compiled: the memory effects that schedule.lower derives.

``_build`` walks through one iteration, over the kernels at which a gap opens or ends. The functions above it are its
stages at one kernel, in this order. by_tensor[AWAY] has the row that evicts a tensor: r + 1 on the host, -r - 1
dropped, 0 none. Records of a tensor or kernel for the chain of one kernel are valid if their mark is that of the
kernel; marks are unique, so that nothing needs to be cleared.
"""

from __future__ import annotations

from simulator.compiled.jit import stage
from simulator.compiled.encoding import (
    AFTER,
    ALLOCATED,
    AWAY,
    AWAY_AT_START,
    BEFORE,
    BORN,
    BY_REMAT,
    DURATION,
    ENDS,
    EXTRA,
    FREED,
    HOLDS,
    KIND,
    LIVE,
    MARKED,
    NEXT_END,
    NEXT_OPEN,
    OPENS,
    ORDER,
    PENDING,
    PLANNED,
    RECOMPUTE,
    RETURNS,
    SIZE,
    STAYS,
    STEP_FOR,
    STEP_KERNEL,
    TENSOR,
    USED,
    USED_LAST,
    WHEN,
    WORKSPACE,
)

_IDLE = -2  # in the lists by kernel: no gap opens or ends there

CHAIN = 10_000  # most kernels of a chain whose times are summed


@stage
def _mark(graph, begin, end, before, marked, mark, pending, n_pending):
    """Adds the writers graph[begin:end] before kernel ``before`` to ``pending``, each once per mark."""
    for i in range(begin, end):
        w = graph[i]
        if w < before and marked[w] != mark:
            marked[w] = mark
            pending[n_pending] = w
            n_pending += 1
    return n_pending


@stage
def _targets(graph, writes_at, rows, by_tensor, by_row, ending, k, marked, mark, pending):
    """Makes the writers of tensors that kernel k ends the drop of pending; returns their number, and if any is kept."""
    away = by_tensor[AWAY]
    stays = by_tensor[STAYS]
    next_end = by_row[NEXT_END]
    n_pending = 0
    keep = False
    r = ending
    while r >= 0:
        t = rows[r, TENSOR]
        if away[t] == -r - 1:
            keep |= rows[r, EXTRA] == 1
            stays[t] = mark
            n_pending = _mark(graph, writes_at[t], writes_at[t + 1], k, marked, mark, pending, n_pending)
        r = next_end[r]
    return n_pending, keep


@stage
def _trace_back(tensors, graph, until_at, writes_at, by_tensor, by_row, k, marked, mark, pending, n_pending, order):
    """Fills ``order`` with the pending kernels and writers of missing inputs; returns count and bytes swapped in."""
    n = order.size - 1
    results_at = graph[n + 1 :]
    away = by_tensor[AWAY]
    used = by_tensor[USED]
    used_last = by_tensor[USED_LAST]
    returns = by_row[RETURNS]
    by_remat = by_row[BY_REMAT]
    n_order = fetched = 0
    while n_pending:
        n_pending -= 1
        w = pending[n_pending]
        # Insertion sort: the new kernel is mostly the first.
        position = n_order
        while position > 0 and order[position - 1] < w:
            order[position] = order[position - 1]
            position -= 1
        order[position] = w
        n_order += 1
        for i in range(graph[w], graph[w + 1]):
            x = graph[i]
            if away[x] >= 0 and k <= graph[i + until_at]:
                if away[x] > 0:
                    returns[away[x] - 1] = k
                    by_remat[away[x] - 1] = 1
                    away[x] = 0
                    fetched += tensors[SIZE, x]
                continue
            n_pending = _mark(graph, writes_at[x], writes_at[x + 1], w, marked, mark, pending, n_pending)
            used_last[x] = w if used[x] != mark else max(used_last[x], w)
            used[x] = mark
        for i in range(results_at[w], results_at[w + 1]):
            x = graph[i]
            used_last[x] = w if used[x] != mark else max(used_last[x], w)
            used[x] = mark
    for i in range(n_order // 2):
        order[i], order[n_order - 1 - i] = order[n_order - 1 - i], order[i]
    return n_order, fetched


@stage
def _keep(graph, results_at, writes_at, by_tensor, order, n_order, k, marked, mark):
    """Marks the dropped tensors that ``keep`` makes resident: the chain repeats all their writes before kernel k."""
    for i in range(n_order):
        w = order[i]
        for j in range(results_at[w], results_at[w + 1]):
            x = graph[j]
            if by_tensor[AWAY, x] < 0:
                is_complete = True
                for u in range(writes_at[x], writes_at[x + 1]):
                    is_complete &= graph[u] >= k or marked[graph[u]] == mark
                if is_complete:
                    by_tensor[STAYS, x] = mark


@stage
def _lay_out(kernels, tensors, graph, results_at, by_tensor, by_row, order, n_order, k, mark, steps, n_steps):
    """Writes the steps of a chain; returns the most bytes that it adds, those that it adds at its end, and its ns."""
    away = by_tensor[AWAY]
    holds = by_tensor[HOLDS]
    stays = by_tensor[STAYS]
    used_last = by_tensor[USED_LAST]
    peak = kept_bytes = duration_ns = 0
    for j in range(n_order):
        w = order[j]
        allocated = freed = 0
        for i in range(results_at[w], results_at[w + 1]):
            x = graph[i]
            if holds[x] != mark:
                holds[x] = mark
                allocated += tensors[SIZE, x]
                if stays[x] == mark and away[x] < 0:
                    by_row[RETURNS, -away[x] - 1] = k
                    away[x] = 0
            if used_last[x] == w and stays[x] != mark and holds[x] == mark:
                holds[x] = 0
                freed += tensors[SIZE, x]
        for i in range(graph[w], graph[w + 1]):
            x = graph[i]
            if holds[x] == mark and used_last[x] == w and stays[x] != mark:
                holds[x] = 0
                freed += tensors[SIZE, x]
        step = steps[n_steps + j]
        step[STEP_KERNEL] = w
        step[ALLOCATED] = allocated
        step[FREED] = freed
        step[STEP_FOR] = k
        peak = max(peak, kept_bytes + allocated + kernels[WORKSPACE, w])
        kept_bytes += allocated - freed
        duration_ns += kernels[DURATION, w]
    return peak, kept_bytes, duration_ns


@stage
def _build(kernels, tensors, graph, rows, by_kernel, by_tensor, by_row, steps):
    """Executes schedule._Builder from by_row[AWAY_AT_START]; returns number and ns of recomputed kernels."""
    n = by_kernel.shape[1] - 1
    m = rows.shape[0]
    results_at = graph[n + 1 :]
    writes_at = graph[2 * n + 2 :]
    until_at = graph.size - (graph[n] - graph[0])  # offset from an input to its ``Program.available_until``
    until_at -= graph[0]
    size = tensors[SIZE]
    live = kernels[LIVE]
    planned = by_kernel[PLANNED]
    ends = by_kernel[ENDS]
    opens = by_kernel[OPENS]
    marked = by_kernel[MARKED]
    pending = by_kernel[PENDING]
    order = by_kernel[ORDER]
    away = by_tensor[AWAY]
    next_end = by_row[NEXT_END]
    next_open = by_row[NEXT_OPEN]
    first_mark = marked[n] + 1
    marked[n] += n + 1
    for k in range(n):
        ends[k] = _IDLE
        opens[k] = -1
    evicted_bytes = 0
    for r in range(m):
        t = rows[r, TENSOR]
        after = rows[r, AFTER]
        before = rows[r, BEFORE]
        if rows[r, KIND] == RECOMPUTE and rows[r, WHEN] >= 0:
            before = rows[r, WHEN]
        by_row[RETURNS, r] = before
        by_row[BY_REMAT, r] = 0
        # Lists of rows by the kernel before which they end, and by the kernel after which they open.
        next_end[r] = ends[before]
        ends[before] = r
        next_open[r] = opens[after]
        opens[after] = r
        ends[after] = max(ends[after], -1)
        if by_row[AWAY_AT_START, r]:
            away[t] = r + 1
            evicted_bytes += size[t]
    n_steps = rerun_ns = 0
    for k in range(n):
        planned[k] = live[k] - evicted_bytes
        if ends[k] == _IDLE:
            continue
        mark = first_mark + k
        n_pending, keep = _targets(graph, writes_at, rows, by_tensor, by_row, ends[k], k, marked, mark, pending)
        n_order = 0
        if n_pending:
            n_order, fetched = _trace_back(
                tensors, graph, until_at, writes_at, by_tensor, by_row, k, marked, mark, pending, n_pending, order
            )
            evicted_bytes -= fetched
            if keep:
                _keep(graph, results_at, writes_at, by_tensor, order, n_order, k, marked, mark)
        # Tensors that kernel k itself uses are swapped in.
        r = ends[k]
        while r >= 0:
            t = rows[r, TENSOR]
            if away[t] == r + 1:
                away[t] = 0
                evicted_bytes -= size[t]
            r = next_end[r]
        planned[k] = live[k] - evicted_bytes
        if n_order:
            if n_steps + n_order < steps.shape[0]:
                peak, kept_bytes, ns = _lay_out(
                    kernels, tensors, graph, results_at, by_tensor, by_row, order, n_order, k, mark, steps, n_steps
                )
                planned[k] += max(kept_bytes, peak - kernels[BORN, k] - kernels[WORKSPACE, k])
                evicted_bytes -= kept_bytes
                rerun_ns += ns
            n_steps += n_order
        r = opens[k]
        while r >= 0:
            t = rows[r, TENSOR]
            away[t] = -r - 1 if rows[r, KIND] == RECOMPUTE else r + 1
            evicted_bytes += size[t]
            r = next_open[r]
    return n_steps, rerun_ns


@stage(entry=True)
def rerun_times(durations, graph, tensor, before, marked, pending, times):
    """Fills ``times`` with residency.recompute_ns of each ``tensor`` and kernel ``before``, of at most CHAIN kernels.

    marked, pending: int64 (kernels,), work arrays; ``marked`` is zero.
    """
    n = durations.shape[0]
    writes_at = graph[2 * n + 2 :]
    until_at = graph.size - (graph[n] - graph[0]) - graph[0]
    for g in range(tensor.shape[0]):
        t = tensor[g]
        k = before[g]
        mark = g + 1
        n_pending = _mark(graph, writes_at[t], writes_at[t + 1], k, marked, mark, pending, 0)
        times[g] = 0
        remaining = CHAIN
        while n_pending and remaining:
            n_pending = n_pending - 1
            remaining = remaining - 1
            w = pending[n_pending]
            times[g] += durations[w]
            for i in range(graph[w], graph[w + 1]):
                x = graph[i]
                if x == t or k > graph[i + until_at]:
                    n_pending = _mark(graph, writes_at[x], writes_at[x + 1], w, marked, mark, pending, n_pending)


@stage(entry=True)
def lower_recomputations(kernels, tensors, graph, rows, by_kernel, by_tensor, by_row, steps):
    """Lowers a plan of swaps and recomputations; parameters as in ``score_plans``.

    Fills by_kernel[PLANNED], ``steps``, and by_row[RETURNS, BY_REMAT, AWAY_AT_START]. Returns the number of recomputed
    kernels, and their ns. ``steps`` was too short if it has no more rows than that.
    """
    m = rows.shape[0]
    away = by_tensor[AWAY]
    away_at_start = by_row[AWAY_AT_START]
    for r in range(m):
        away_at_start[r] = 1 if rows[r, AFTER] >= rows[r, BEFORE] else 0
    n_steps = rerun_ns = 0
    for _ in range(2):
        n_steps, rerun_ns = _build(kernels, tensors, graph, rows, by_kernel, by_tensor, by_row, steps)
        changed = False
        for r in range(m):
            is_on_host = 1 if away[rows[r, TENSOR]] == r + 1 else 0
            changed |= is_on_host != away_at_start[r]
            away_at_start[r] = is_on_host
        for r in range(m):
            away[rows[r, TENSOR]] = 0
        if not changed:
            break
    return n_steps, rerun_ns
