"""``Host`` of job_state.py, compiled: the thread that issues steps ahead of the GPU (RULES.md, choice i)."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from simulator.compiled.encoding import (
    AFTER,
    BEGINS,
    DURATION,
    ISSUES,
    ISSUE_NS,
    LEAD,
    LEAD_NS,
    NEVER,
    QUEUE_DEPTH,
    STEP_FOR,
    STEP_KERNEL,
    Ints,
)
from simulator.compiled.jit import stage
from simulator.compiled.lowering import is_swap


class Queue(NamedTuple):
    """Work of the host in one iteration, and the bound on its lead."""

    durations: Ints  # of the kernels in ns
    steps: NDArray[Any]  # recomputed kernels
    n_steps: int
    issues: Ints  # by_kernel[ISSUES]
    issue_ns: int
    depth: int


class Host(NamedTuple):
    """State of the host."""

    kernel: int  # next to issue
    step: int  # of the kernels that are recomputed, the next to issue, if it is for ``kernel``
    issued: int  # number of steps that are issued and have not started
    queued: int  # number of timed steps that are issued and unfinished
    next_ns: int  # time of the next issue, assuming that the queue has room


@stage
def _cost(queue, kernel, step):
    """Returns the host time for the next step in ns."""
    if step < queue.n_steps and queue.steps[step, STEP_FOR] == kernel:
        return queue.issue_ns if queue.durations[queue.steps[step, STEP_KERNEL]] > 0 else 0
    return queue.issues[kernel]


@stage
def issue(queue, host, now):
    """Issues all steps that can be issued until ``now``."""
    kernel, step, issued, queued, next_ns = host
    while next_ns <= now:
        rerun = step < queue.n_steps and queue.steps[step, STEP_FOR] == kernel
        is_timed = 1 if queue.durations[queue.steps[step, STEP_KERNEL] if rerun else kernel] > 0 else 0
        if queued + is_timed > queue.depth:
            break
        issued = issued + 1
        queued = queued + is_timed
        if rerun:
            step += 1
        else:
            kernel += 1
            if kernel == queue.durations.size - 1:
                kernel = step = 0
        next_ns += _cost(queue, kernel, step)
    return Host(kernel, step, issued, queued, next_ns)


@stage
def start_host(kernels, rows, gaps, by_kernel, steps, n_steps, rerun_ns, settings):
    """Fills by_kernel[ISSUES] (Schedule.issues); returns if the host takes time, its work, and its first state."""
    issues = by_kernel[ISSUES]
    n = kernels.shape[1] - 1
    issue_ns = settings[ISSUE_NS]
    queue = Queue(kernels[DURATION], steps, n_steps, issues, issue_ns, settings[QUEUE_DEPTH])
    host = Host(0, 0, 0, 0, 0)
    compute_ns = kernels[BEGINS, n] + rerun_ns
    if issue_ns == 0 or compute_ns == 0:
        return False, queue, host
    host_ns = 2 * issue_ns * rows.shape[0]
    for k in range(n):
        issues[k] = issue_ns if kernels[DURATION, k] > 0 else 0
        host_ns += issues[k]
    for r in range(rows.shape[0]):
        if is_swap(rows, r):
            issues[gaps[r].returns] += issue_ns
            issues[(rows[r, AFTER] - gaps[r].lead + 1) % n] += issue_ns
        else:
            host_ns -= 2 * issue_ns
    for j in range(n_steps):
        host_ns += issue_ns if kernels[DURATION, steps[j, STEP_KERNEL]] > 0 else 0
    if host_ns > compute_ns:
        return True, queue, Host(0, 0, 0, 0, _cost(queue, 0, 0))
    kernel, step, issued, queued, _ = issue(queue, host, NEVER)
    return True, queue, Host(kernel, step, issued, queued, 0)


@stage
def start_step(host):
    """Starts the step that was issued first."""
    return Host(host.kernel, host.step, host.issued - 1, host.queued, host.next_ns)


@stage
def complete(queue, host, timed, now):
    """Completes a step, which makes room in the queue if it took time."""
    host = issue(queue, host, now)
    if timed:
        return Host(host.kernel, host.step, host.issued, host.queued - 1, max(host.next_ns, now))
    return host


@stage
def write_lead(state, m, queue, host, now, change_kind, lead, lead_ns):
    """Writes the host's lead at a boundary into ``state`` (Host.lead); returns the host, and its lead.

    change_kind: 0: the lead counts as unchanged; 1: only a smaller lead is a change; 2: a step has waited for the host.
    """
    host = issue(queue, host, now)
    ahead_ns = min(now - host.next_ns, 0)
    is_smaller = host.issued < lead or (host.issued == lead and ahead_ns < lead_ns)
    if change_kind == 2 or (change_kind == 1 and is_smaller):
        lead = host.issued
        lead_ns = ahead_ns
    state[m + LEAD] = lead
    state[m + LEAD_NS] = lead_ns
    return host, lead, lead_ns
