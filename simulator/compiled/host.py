"""``Host`` of job_state.py, compiled: the thread that issues steps ahead of the GPU (RULES.md, choice i).

``host`` is a record of encoding.HOST.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from simulator.compiled.encoding import AFTER, NEVER, Ints
from simulator.compiled.jit import stage
from simulator.compiled.lowering import is_swap


class Queue(NamedTuple):
    """Work of the host in one iteration, and the bound on its lead."""

    durations: Ints  # of the kernels in ns
    steps: NDArray[Any]  # recomputed kernels
    n_steps: int  # number of ``steps``
    issues: Ints  # by_kernel.issues
    issue_ns: int  # of one step
    depth: int  # steps that may be issued before they run


@stage
def _is_recomputed(queue, host):
    """Returns whether the next step to issue is a recomputed kernel."""
    return host.step < queue.n_steps and queue.steps[host.step].before == host.kernel


@stage
def _cost(queue, host):
    """Returns the host time for the next step in ns."""
    if _is_recomputed(queue, host):
        return queue.issue_ns if queue.durations[queue.steps[host.step].kernel] > 0 else 0
    return queue.issues[host.kernel]


@stage
def issue(queue, host, now):
    """Issues all steps that can be issued until ``now``."""
    while host.next_ns <= now:
        is_recomputed = _is_recomputed(queue, host)
        kernel = queue.steps[host.step].kernel if is_recomputed else host.kernel
        is_timed = 1 if queue.durations[kernel] > 0 else 0
        if host.queued + is_timed > queue.depth:
            break
        host.issued += 1
        host.queued += is_timed
        if is_recomputed:
            host.step += 1
        else:
            host.kernel += 1
            if host.kernel == queue.durations.size - 1:
                host.kernel = host.step = 0
        host.next_ns += _cost(queue, host)


@stage
def start_host(host, queue, rows, gaps, compute_ns):
    """Fills by_kernel.issues (Schedule.issues) and starts the host; returns whether it takes time."""
    issues = queue.issues
    durations = queue.durations
    issue_ns = queue.issue_ns
    n = durations.size - 1
    if issue_ns == 0 or compute_ns == 0:
        return False
    host_ns = 2 * issue_ns * rows.shape[0]
    for k in range(n):
        issues[k] = issue_ns if durations[k] > 0 else 0
        host_ns += issues[k]
    for r in range(rows.shape[0]):
        if is_swap(rows, r):
            issues[gaps[r].returns] += issue_ns
            issues[(rows[r, AFTER] - gaps[r].lead + 1) % n] += issue_ns
        else:
            host_ns -= 2 * issue_ns
    for j in range(queue.n_steps):
        host_ns += issue_ns if durations[queue.steps[j].kernel] > 0 else 0
    if host_ns > compute_ns:
        # The host is the bottleneck, so that no step is issued ahead.
        host.next_ns = _cost(queue, host)
    else:
        issue(queue, host, NEVER)
        host.next_ns = 0
    host.lead = host.issued
    host.lead_ns = min(-host.next_ns, 0)
    return True


@stage
def complete(queue, host, timed, now):
    """Removes a completed step from the launch queue at time ``now``, if it is ``timed`` (takes time)."""
    issue(queue, host, now)
    if timed:
        host.queued -= 1
        host.next_ns = max(host.next_ns, now)


@stage
def update_lead(queue, host, now, may_settle):
    """Updates the host's lead at a boundary (Host.lead).

    Args:
        may_settle: Whether the lead may still change. If no step has waited for the host, only a smaller lead counts.
        queue, host: Launch queue and state of the host.
        now: Time of the boundary in ns.
    """
    issue(queue, host, now)
    ahead_ns = min(now - host.next_ns, 0)
    is_smaller = host.issued < host.lead or (host.issued == host.lead and ahead_ns < host.lead_ns)
    if may_settle and (host.has_waited or is_smaller):
        host.lead = host.issued
        host.lead_ns = ahead_ns
    host.has_waited = 0
