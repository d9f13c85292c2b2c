"""What the time of several jobs is measured against: each alone on the machine, and all of them with memory enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.compiled.engine import simulate
from simulator.job import Job, JobsTimeline, Sharing
from simulator.jobs.engine import simulate_jobs
from simulator.machine import Machine
from simulator.plan import Plan


def alone_ns(job: Job, machine: Machine, limit: int) -> int:
    """An iteration of a job by its first plan, or step, alone under the limit, in the steady state.

    Raises:
        OutOfMemory: its plan needs more.
    """
    return simulate(*job.entries[0], machine, limit).iteration_ns


def without_limit(
    jobs: Sequence[Job], machine: Machine, until_ns: int | None = None, sharing: Sharing = "fifo"
) -> JobsTimeline:
    """The same jobs with memory enough and no plans: they wait for each other's kernels only."""
    limit = sum(max(program.peak_bytes for program, _ in job.entries) for job in jobs)
    none = Plan()
    plain = [replace(job, plan=none, switches=(), steps=tuple((p, none) for p, _ in job.steps)) for job in jobs]
    return simulate_jobs(plain, machine, limit, until_ns, sharing)
