"""Plans with Recompute decisions, compiled: the memory effects that schedule.lower derives.

``_build`` walks through one iteration, over the kernels at which a gap opens or ends. The functions above it are its
stages at one kernel, in this order: the chain is traced back, then laid out. Records of a tensor or kernel for the
chain of one kernel are valid if their mark is that of the kernel; marks are unique, so that nothing needs to be
cleared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from simulator.compiled.encoding import (
    AFTER,
    BEFORE,
    EXTRA,
    KIND,
    RECOMPUTE,
    TENSOR,
    WHEN,
    ByKernel,
    ByRow,
    ByTensor,
    Ints,
    Kernels,
    Tensors,
)
from simulator.compiled.jit import stage
from simulator.compiled.lowering import view_graph
from simulator.compiled.records import named

_IDLE = -2  # in the lists by kernel: no gap opens or ends there

CHAIN = 10_000  # most kernels of a chain whose times are summed


class Case(NamedTuple):
    """Arguments of ``lower_recomputations``: tables of encoding.py, of which stages take single ones.

    A call copies every argument.
    """

    kernels: Ints
    tensors: Ints
    graph: Ints
    rows: Ints
    by_kernel: Ints
    by_tensor: Ints
    by_row: Ints
    steps: NDArray[Any]  # STEP


@stage(inline=True)
def _mark(graph, x, before, marked, mark, pending, n_pending):
    """Adds the writers of tensor x before kernel ``before`` to ``pending``, each once per mark."""
    for i in range(graph.writes_at[x], graph.writes_at[x + 1]):
        w = graph.values[i]
        if w < before and marked[w] != mark:
            marked[w] = mark
            pending[n_pending] = w
            n_pending += 1
    return n_pending


@stage
def _targets(case, k, mark):
    """Makes the writers of tensors that kernel k ends the drop of pending; returns their number, and if any is kept."""
    by_kernel = named(ByKernel, case.by_kernel)
    by_tensor = named(ByTensor, case.by_tensor)
    by_row = named(ByRow, case.by_row)
    graph = view_graph(case.graph, by_kernel.ends.size - 1)
    rows = case.rows
    n_pending = 0
    keep = False
    r = by_kernel.ends[k]
    while r >= 0:
        t = rows[r, TENSOR]
        if by_tensor.evicted_by[t] == -r - 1:
            keep |= rows[r, EXTRA] == 1
            by_tensor.kept[t] = mark
            n_pending = _mark(graph, t, k, by_kernel.marked, mark, by_kernel.pending, n_pending)
        r = by_row.next_end[r]
    return n_pending, keep


@stage
def _trace_back(case, k, mark, n_pending):
    """Fills ``order`` with the pending kernels and writers of missing inputs; returns count and bytes swapped in."""
    by_kernel = named(ByKernel, case.by_kernel)
    by_tensor = named(ByTensor, case.by_tensor)
    by_row = named(ByRow, case.by_row)
    graph = view_graph(case.graph, by_kernel.ends.size - 1)
    sizes = named(Tensors, case.tensors).size
    evicted_by = by_tensor.evicted_by
    used = by_tensor.used
    used_last = by_tensor.used_last
    pending = by_kernel.pending
    order = by_kernel.order
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
        for i in range(graph.reads_at[w], graph.reads_at[w + 1]):
            x = graph.values[i]
            if evicted_by[x] >= 0 and k <= graph.values[i + graph.until]:
                # The input is available, or its copy on the host is swapped in for the chain already.
                if evicted_by[x] > 0:
                    by_row.returns[evicted_by[x] - 1] = k
                    by_row.by_pass[evicted_by[x] - 1] = 1
                    evicted_by[x] = 0
                    fetched += sizes[x]
                continue
            n_pending = _mark(graph, x, w, by_kernel.marked, mark, pending, n_pending)
            used_last[x] = w if used[x] != mark else max(used_last[x], w)
            used[x] = mark
        for i in range(graph.results_at[w], graph.results_at[w + 1]):
            x = graph.values[i]
            used_last[x] = w if used[x] != mark else max(used_last[x], w)
            used[x] = mark
    for i in range(n_order // 2):
        order[i], order[n_order - 1 - i] = order[n_order - 1 - i], order[i]
    return n_order, fetched


@stage
def _keep(case, n_order, k, mark):
    """Marks the dropped tensors that ``keep`` makes resident: the chain repeats all their writes before kernel k."""
    by_kernel = named(ByKernel, case.by_kernel)
    by_tensor = named(ByTensor, case.by_tensor)
    graph = view_graph(case.graph, by_kernel.ends.size - 1)
    for i in range(n_order):
        w = by_kernel.order[i]
        for j in range(graph.results_at[w], graph.results_at[w + 1]):
            x = graph.values[j]
            if by_tensor.evicted_by[x] < 0:
                is_complete = True
                for u in range(graph.writes_at[x], graph.writes_at[x + 1]):
                    writer = graph.values[u]
                    is_complete &= writer >= k or by_kernel.marked[writer] == mark
                if is_complete:
                    by_tensor.kept[x] = mark


@stage
def _lay_out(case, n_order, k, mark, n_steps):
    """Writes the chain's steps; returns the peak of the bytes that it adds, the bytes added at its end, and its ns."""
    kernels = named(Kernels, case.kernels)
    sizes = named(Tensors, case.tensors).size
    by_kernel = named(ByKernel, case.by_kernel)
    by_tensor = named(ByTensor, case.by_tensor)
    by_row = named(ByRow, case.by_row)
    graph = view_graph(case.graph, by_kernel.ends.size - 1)
    evicted_by = by_tensor.evicted_by
    resident = by_tensor.resident
    kept = by_tensor.kept
    used_last = by_tensor.used_last
    peak = kept_bytes = duration_ns = 0
    for j in range(n_order):
        w = by_kernel.order[j]
        allocated = freed = 0
        for i in range(graph.results_at[w], graph.results_at[w + 1]):
            x = graph.values[i]
            if resident[x] != mark:
                resident[x] = mark
                allocated += sizes[x]
                if kept[x] == mark and evicted_by[x] < 0:
                    by_row.returns[-evicted_by[x] - 1] = k
                    evicted_by[x] = 0
            if used_last[x] == w and kept[x] != mark and resident[x] == mark:
                resident[x] = 0
                freed += sizes[x]
        for i in range(graph.reads_at[w], graph.reads_at[w + 1]):
            x = graph.values[i]
            if resident[x] == mark and used_last[x] == w and kept[x] != mark:
                resident[x] = 0
                freed += sizes[x]
        step = case.steps[n_steps + j]
        step.kernel = w
        step.allocated = allocated
        step.freed = freed
        step.before = k
        peak = max(peak, kept_bytes + allocated + kernels.workspace[w])
        kept_bytes += allocated - freed
        duration_ns += kernels.duration[w]
    return peak, kept_bytes, duration_ns


@stage
def _list_gaps(case):
    """Lists the rows by the kernels at which their gaps end and open; returns the bytes evicted at the start."""
    by_kernel = named(ByKernel, case.by_kernel)
    by_row = named(ByRow, case.by_row)
    evicted_by = named(ByTensor, case.by_tensor).evicted_by
    sizes = named(Tensors, case.tensors).size
    ends = by_kernel.ends
    opens = by_kernel.opens
    rows = case.rows
    for k in range(ends.size - 1):
        ends[k] = _IDLE
        opens[k] = -1
    evicted_bytes = 0
    for r in range(rows.shape[0]):
        t = rows[r, TENSOR]
        after = rows[r, AFTER]
        before = rows[r, BEFORE]
        if rows[r, KIND] == RECOMPUTE and rows[r, WHEN] >= 0:
            before = rows[r, WHEN]
        by_row.returns[r] = before
        by_row.by_pass[r] = 0
        by_row.next_end[r] = ends[before]
        ends[before] = r
        by_row.next_open[r] = opens[after]
        opens[after] = r
        # A kernel at which gaps only open is not idle either.
        ends[after] = max(ends[after], -1)
        if by_row.away_at_start[r]:
            evicted_by[t] = r + 1
            evicted_bytes += sizes[t]
    return evicted_bytes


@stage
def _build(case):
    """Executes schedule._Builder from ``away_at_start``; returns number and ns of recomputed kernels."""
    kernels = named(Kernels, case.kernels)
    sizes = named(Tensors, case.tensors).size
    by_kernel = named(ByKernel, case.by_kernel)
    by_row = named(ByRow, case.by_row)
    evicted_by = named(ByTensor, case.by_tensor).evicted_by
    planned = by_kernel.planned
    marked = by_kernel.marked
    rows = case.rows
    n = planned.size - 1
    # The last entry of ``marked`` counts the marks of all plans so far.
    first_mark = marked[n] + 1
    marked[n] += n + 1
    evicted_bytes = _list_gaps(case)
    n_steps = rerun_ns = 0
    for k in range(n):
        planned[k] = kernels.live[k] - evicted_bytes
        if by_kernel.ends[k] == _IDLE:
            continue
        mark = first_mark + k
        n_pending, keep = _targets(case, k, mark)
        n_order = 0
        if n_pending:
            n_order, fetched = _trace_back(case, k, mark, n_pending)
            evicted_bytes -= fetched
            if keep:
                _keep(case, n_order, k, mark)
        # Tensors that kernel k itself uses are swapped in.
        r = by_kernel.ends[k]
        while r >= 0:
            t = rows[r, TENSOR]
            if evicted_by[t] == r + 1:
                evicted_by[t] = 0
                evicted_bytes -= sizes[t]
            r = by_row.next_end[r]
        planned[k] = kernels.live[k] - evicted_bytes
        if n_order:
            # Without room for the steps they are only counted: the caller repeats the plan with more room.
            if n_steps + n_order < case.steps.size:
                peak, kept_bytes, ns = _lay_out(case, n_order, k, mark, n_steps)
                planned[k] += max(kept_bytes, peak - kernels.born[k] - kernels.workspace[k])
                evicted_bytes -= kept_bytes
                rerun_ns += ns
            n_steps += n_order
        r = by_kernel.opens[k]
        while r >= 0:
            t = rows[r, TENSOR]
            evicted_by[t] = -r - 1 if rows[r, KIND] == RECOMPUTE else r + 1
            evicted_bytes += sizes[t]
            r = by_row.next_open[r]
    return n_steps, rerun_ns


@stage(entry=True)
def rerun_times(durations, graph, tensor, before, marked, pending, times):
    """Fills ``times`` with residency.recompute_ns of each ``tensor`` and kernel ``before``, of at most CHAIN kernels.

    marked, pending: int64 (kernels,), work arrays; ``marked`` is zero.
    """
    graph = view_graph(graph, durations.shape[0])
    for g in range(tensor.shape[0]):
        t = tensor[g]
        k = before[g]
        mark = g + 1
        n_pending = _mark(graph, t, k, marked, mark, pending, 0)
        times[g] = 0
        remaining = CHAIN
        while n_pending and remaining:
            n_pending -= 1
            remaining -= 1
            w = pending[n_pending]
            times[g] += durations[w]
            for i in range(graph.reads_at[w], graph.reads_at[w + 1]):
                x = graph.values[i]
                if x == t or k > graph.values[i + graph.until]:
                    n_pending = _mark(graph, x, w, marked, mark, pending, n_pending)


@stage(entry=True)
def lower_recomputations(kernels, tensors, graph, rows, by_kernel, by_tensor, by_row, steps):
    """Lowers a plan of swaps and recomputations; parameters as in ``score_plans``, but ``steps`` are records.

    Fills by_kernel.planned, ``steps``, and ``returns``, ``by_pass`` and ``away_at_start`` of by_row. Returns the number
    of recomputed kernels, and their ns. ``steps`` was too short if it has no more entries than that.
    """
    case = Case(kernels, tensors, graph, rows, by_kernel, by_tensor, by_row, steps)
    evicted_by = named(ByTensor, by_tensor).evicted_by
    away_at_start = named(ByRow, by_row).away_at_start
    for r in range(rows.shape[0]):
        away_at_start[r] = 1 if rows[r, AFTER] >= rows[r, BEFORE] else 0
    n_steps = rerun_ns = 0
    # An iteration may end with other tensors on the host than it started with. Then it is built from these.
    for _ in range(2):
        n_steps, rerun_ns = _build(case)
        changed = False
        for r in range(rows.shape[0]):
            is_on_host = 1 if evicted_by[rows[r, TENSOR]] == r + 1 else 0
            changed |= is_on_host != away_at_start[r]
            away_at_start[r] = is_on_host
        for r in range(rows.shape[0]):
            evicted_by[rows[r, TENSOR]] = 0
        if not changed:
            break
    return n_steps, rerun_ns
