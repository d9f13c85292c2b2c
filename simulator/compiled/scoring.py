"""Scores plans one after the other; called by ``Engine``."""

from __future__ import annotations

from simulator.compiled.encoding import (
    GAP,
    KIND,
    LOG,
    NEVER,
    RECOMPUTE,
    RERUN,
    RESULT,
    STEP,
    Arrays,
    ByKernel,
    Kernels,
    Lowering,
    Settings,
    Status,
    Tables,
)
from simulator.compiled.event_loop import event_loop
from simulator.compiled.jit import call, stage
from simulator.compiled.lowering import is_swap, swap_residency
from simulator.compiled.records import named
from simulator.compiled.rematerialization import lower_recomputations


@stage
def _issued_items(durations, steps, count, swaps):
    """Returns the sum of ``Schedule.issues`` for ``swaps`` swaps and the first ``count`` recomputed ``steps``."""
    n_items = 2 * swaps
    for k in range(durations.size):  # the last entry is padding of duration 0
        n_items += durations[k] > 0
    for j in range(count):
        n_items += durations[steps[j].kernel] > 0
    return n_items


@stage
def _count(plan):
    """Returns the numbers of a plan's swaps, recomputations and reruns."""
    swaps = drops = reruns = 0
    for r in range(plan.shape[0]):
        swaps += is_swap(plan, r)
        drops += plan[r, KIND] == RECOMPUTE
        reruns += plan[r, KIND] == RERUN
    return swaps, drops, reruns


@stage(entry=True)
def score_plans(
    rows,
    first,
    n_steps,
    limit_until,
    cutoff,
    iterations,
    ends,
    kernels,
    tensors,
    graph,
    settings,
    by_kernel,
    by_segment,
    by_tensor,
    by_row,
    gaps,
    steps,
    states,
    results,
    log,
):
    """Scores the plans rows[ends[i]:ends[i + 1]] from i = ``first`` on.

    The arguments are flat int64 arrays, because a call takes 2.6 us with these and 6.8 us with named tuples.

    Args:
        n_steps: Number of ``steps`` that ``lower_reruns`` made for the only plan; -1: none; None: only plans of swaps,
            for which less code is compiled.
        limit_until, cutoff, iterations: As in ``event_loop``.
        kernels, tensors, settings: Tables, see encoding.py.
        graph: ``ragged`` inputs and outputs of the kernels and writers of the tensors; then, for each input in this
            order, ``Program.available_until``.
        by_kernel, by_segment, by_tensor, by_row, gaps, steps, states: Work arrays (encoding.Arrays).
        results: RESULT per plan, filled.
        log: LOG, filled as in ``event_loop``.

    Returns:
        The first plan without a result (its status gives the reason) or the number of plans; the number of log entries.
    """
    tables = Tables(kernels, tensors, graph, settings)
    work = Arrays(by_kernel, by_segment, by_tensor, by_row, gaps.view(GAP), steps.view(STEP), states)
    result_of = results.view(RESULT)
    entries = log.view(LOG)
    names = named(Settings, settings)
    planned = named(ByKernel, by_kernel).planned
    table = named(Kernels, kernels)
    n = planned.size - 1
    n_log = 0
    for i in range(first, ends.size - 1):
        plan = rows[ends[i] : ends[i + 1]]
        result = result_of[i]
        swaps, drops, reruns = _count(plan)
        result.status = Status.DONE
        count = 0
        rerun_ns = 0
        if drops == 0 and reruns == 0:
            swap_residency(kernels, tensors, plan, planned)
        elif n_steps is None:
            result.status = Status.UNKNOWN
        elif reruns:
            count = n_steps
            for j in range(n_steps):
                rerun_ns += table.duration[work.steps[j].kernel]
            if n_steps < 0:
                result.status = Status.UNKNOWN
        else:
            count, rerun_ns = lower_recomputations(
                kernels, tensors, graph, plan, by_kernel, by_tensor, by_row, work.steps
            )
            if count >= work.steps.size:
                result.status = Status.MORE_STEPS
        if result.status != Status.DONE:
            return i, n_log
        required = 0
        for k in range(n):
            required = max(required, planned[k])
        if required > names.limit:
            for k in range(min(limit_until, n)):
                if planned[k] > names.limit:
                    result.status = Status.OUT_OF_MEMORY
        result.iteration_ns = NEVER
        result.required = required
        result.peak = 0
        result.period = 0
        if result.status != Status.DONE:
            continue
        issue_ns = 0
        if names.issue_ns > 0:
            issue_ns = names.issue_ns * _issued_items(table.duration, work.steps, count, swaps)
        if issue_ns >= cutoff:
            result.status = Status.SLOWER
        elif swaps == 0 and entries.size == 0 and issue_ns == 0:
            # Nothing waits, so that the iteration is a sum.
            result.iteration_ns = rerun_ns + table.begins[n]
            result.peak = required
            result.period = 1
            if result.iteration_ns >= cutoff:
                result.status = Status.SLOWER
        else:
            lowering = Lowering(drops + reruns > 0, count, rerun_ns, required)
            n_log = event_loop(tables, work, plan, lowering, limit_until, cutoff, iterations, result, entries)
    return ends.size - 1, n_log


@stage
def score_one(engine, plan, rows, cutoff):
    """Scores the first ``rows`` of ``plan`` like ``Engine.score``, from compiled code, given ``Engine.direct``.

    Returns the iteration time in ns, NEVER if infeasible; -1 if only ``Engine.score`` can tell.
    """
    entry, swaps_only, n, ends, results, arrays = engine
    ends[1] = rows
    # The type of ``n_steps`` tells which of the two compilations is at the address.
    if swaps_only:
        call(entry, (0, 0), (plan, 0, None, n, cutoff, 1, ends) + arrays)
    else:
        call(entry, (0, 0), (plan, 0, -1, n, cutoff, 1, ends) + arrays)
    result = results.view(RESULT)[0]
    status = result.status
    if status == Status.HOST_FULL or status == Status.MORE_STEPS or status == Status.UNKNOWN or status == Status.STUCK:
        return -1
    return result.iteration_ns if status == Status.DONE and result.period > 0 else NEVER
