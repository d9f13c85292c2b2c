"""Scores plans one after the other; called by ``Engine``."""

from __future__ import annotations

from simulator.compiled.event_loop import event_loop
from simulator.compiled.jit import call, stage
from simulator.compiled.lowering import is_swap, swap_residency
from simulator.compiled.rematerialization import lower_recomputations
from simulator.compiled.encoding import (
    BEGINS,
    DONE,
    DURATION,
    HOST_FULL,
    ISSUE_NS,
    ITERATION_NS,
    KIND,
    LIMIT,
    MORE_STEPS,
    NEVER,
    OUT_OF_MEMORY,
    PEAK,
    PERIOD,
    PLANNED,
    RECOMPUTE,
    REQUIRED,
    RERUN,
    SLOWER,
    STATUS,
    STEP_KERNEL,
    STUCK,
    UNKNOWN,
    Lowering,
    Tables,
    Arrays,
)


@stage
def _issued_items(kernels, steps, count, swaps):
    """Returns the sum of ``Schedule.issues`` for ``swaps`` swaps and the first ``count`` recomputed ``steps``."""
    n_items = 2 * swaps
    durations = kernels[DURATION]
    for k in range(durations.size):  # the last entry is padding of duration 0
        n_items += durations[k] > 0
    for j in range(count):
        n_items += durations[steps[j, STEP_KERNEL]] > 0
    return n_items


@stage(entry=True)
def score_plans(
    kernels,
    tensors,
    graph,
    rows,
    ends,
    first,
    n_steps,
    settings,
    limit_until,
    cutoff,
    iterations,
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

    Args:
        kernels, tensors: See encoding.py.
        graph: ``ragged`` inputs and outputs of the kernels and writers of the tensors; then, for each input in this
            order, ``Program.available_until``.
        n_steps: Number of ``steps`` that ``lower_reruns`` made for the only plan; -1: none; None: only plans of swaps,
            for which less code is compiled.
        limit_until, cutoff, iterations, log: As in ``event_loop``.
        by_kernel, by_segment, by_tensor, by_row, gaps, steps, states: Work arrays.
        results: int64 (plans, 5), filled.

    Returns:
        The first plan without a result (its status gives the reason) or the number of plans; the number of log entries.
    """
    n = by_kernel.shape[1] - 1
    n_log = 0
    limit = settings[LIMIT]
    planned = by_kernel[PLANNED]
    tables = Tables(kernels, tensors, graph, settings)
    work = Arrays(by_kernel, by_segment, by_tensor, by_row, gaps, steps, states)
    for i in range(first, ends.size - 1):
        plan = rows[ends[i] : ends[i + 1]]
        result = results[i]
        swaps = drops = reruns = 0
        for r in range(plan.shape[0]):
            swaps += is_swap(plan, r)
            drops += plan[r, KIND] == RECOMPUTE
            reruns += plan[r, KIND] == RERUN
        status = DONE
        count = 0
        rerun_ns = 0
        if drops == 0 and reruns == 0:
            swap_residency(kernels, tensors, plan, planned)
        elif n_steps is None:
            status = UNKNOWN
        elif reruns:
            status = DONE if n_steps >= 0 else UNKNOWN
            count = n_steps
            for j in range(n_steps):
                rerun_ns += kernels[DURATION, steps[j, STEP_KERNEL]]
        else:
            count, rerun_ns = lower_recomputations(kernels, tensors, graph, plan, by_kernel, by_tensor, by_row, steps)
            if count >= steps.shape[0]:
                status = MORE_STEPS
        if status == DONE:
            required = 0
            for k in range(n):
                required = max(required, planned[k])
            if required > limit:
                for k in range(min(limit_until, n)):
                    if planned[k] > limit:
                        status = OUT_OF_MEMORY
            result[ITERATION_NS] = NEVER
            result[REQUIRED] = required
            result[PEAK] = 0
            result[PERIOD] = 0
            issue_ns = settings[ISSUE_NS] * _issued_items(kernels, steps, count, swaps) if settings[ISSUE_NS] > 0 else 0
            if status == DONE and issue_ns >= cutoff:
                status = SLOWER
            elif status == DONE and swaps == 0 and log.shape[0] == 0 and issue_ns == 0:  # no waits
                rerun_ns += kernels[BEGINS, n]
                result[ITERATION_NS] = rerun_ns
                result[PEAK] = required
                result[PERIOD] = 1
                if result[ITERATION_NS] >= cutoff:
                    status = SLOWER
            elif status == DONE:
                status, n_log = event_loop(
                    tables,
                    plan,
                    Lowering(drops + reruns > 0, count, rerun_ns, required),
                    work,
                    limit_until,
                    cutoff,
                    iterations,
                    result,
                    log,
                )
        result[STATUS] = status
        if status == UNKNOWN or status == MORE_STEPS:
            return i, n_log
    return ends.size - 1, n_log


@stage
def score_one(
    entry,
    swaps_only,
    kernels,
    tensors,
    graph,
    settings,
    ends,
    by_kernel,
    by_segment,
    by_tensor,
    by_row,
    gaps,
    steps,
    states,
    results,
    log,
    plan,
    rows,
    cutoff,
):
    """Scores the first ``rows`` of ``plan`` like ``Engine.score``, from compiled code, given ``Engine.direct``.

    Returns the iteration time in ns, NEVER if infeasible; -1 if only ``Engine.score`` can tell.
    """
    n = by_kernel.shape[1] - 1
    ends[1] = rows
    if swaps_only:
        call(
            entry,
            (0, 0),
            (
                kernels,
                tensors,
                graph,
                plan,
                ends,
                0,
                None,
                settings,
                n,
                cutoff,
                1,
                by_kernel,
                by_segment,
                by_tensor,
                by_row,
                gaps,
                steps,
                states,
                results,
                log,
            ),
        )
    else:
        call(
            entry,
            (0, 0),
            (
                kernels,
                tensors,
                graph,
                plan,
                ends,
                0,
                -1,
                settings,
                n,
                cutoff,
                1,
                by_kernel,
                by_segment,
                by_tensor,
                by_row,
                gaps,
                steps,
                states,
                results,
                log,
            ),
        )
    result = results[0]
    status = result[STATUS]
    if status == HOST_FULL or status == MORE_STEPS or status == UNKNOWN or status == STUCK:
        return -1
    return result[ITERATION_NS] if status == DONE and result[PERIOD] > 0 else NEVER
