"""TENSILE's Global Controller (sections 3.2 and 4.5): replans when jobs arrive, leave, or drift from predicted times.

A new plan takes effect when its job begins an iteration. Arrivals and departures replan all jobs, with the times
expected at the new utilization; so does a drift of measured times from those of the plans (times.py). The planner is
any ``JobsPlanner``: TENSILE receives the times, other planners receive programs with these durations.

1. Times are checked every ``check_ns``; the paper does not specify the interval.
2. A kernel's time lasts from its start to the next kernel's, minus waits for memory and data: it includes GPU
   contention by other jobs but not recomputation.
3. The simulation is deterministic and is repeated from the start up to each decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.times import KernelTimes, Times, corrected, drift, sequence
from agents.jobs import JobsPlanner
from simulator import simulate_jobs
from simulator.job import Job, JobsTimeline, JobTimeline
from simulator.machine import Machine
from simulator.schedule import NEVER

DRIFT = 0.1  # drift above which plans are remade


@dataclass(frozen=True)
class Replanned:
    """A replanning event and its reason."""

    time_ns: int
    why: str  # "arrival", "departure" or "drift"
    drift: float  # largest drift of all jobs, as a fraction


@dataclass(frozen=True)
class Controlled:
    """Result of running jobs under a controller."""

    jobs: tuple[Job, ...]  # with all plans they received
    timeline: JobsTimeline
    replanned: tuple[Replanned, ...]  # in order of time


def control(
    jobs: Sequence[Job],
    machine: Machine,
    limit: int,
    planner: JobsPlanner,
    until_ns: int,
    check_ns: int,
    times: KernelTimes | None = None,
) -> Controlled:
    """Simulates jobs whose plans ``planner`` makes and replans.

    Args:
        jobs: their own plans and switches are ignored.
        machine: machine that the jobs share.
        limit: memory limit in bytes for all jobs.
        planner: plans the jobs.
        until_ns: all jobs leave at their first iteration boundary after this time.
        check_ns: interval between checks of measured times.
        times: predicts unmeasured times; None: a kernel's own time multiplied by the number of running jobs.

    Returns:
        The jobs with all plans that they received, their timeline, and when plans changed.

    Raises:
        Infeasible: the running jobs have no plans that fit together.
        ValueError: ``check_ns`` is below 1.
    """
    if check_ns < 1:
        raise ValueError(f"check_ns: expected at least 1, got {check_ns}")
    run = _JobSet(jobs, machine, limit, planner, times)
    now = 0
    while now < until_ns:
        results = run.simulate(now + check_ns)
        active = {j for j, job in enumerate(jobs) if job.arrives_ns <= now and run.left_ns(results, j) > now}
        if active != run.active:
            run.plan(active, now, "arrival" if active - run.active else "departure", 0.0)
            results = run.simulate(now + check_ns)
        elif (drift := run.update_times(results, now)) > DRIFT:
            run.plan(active, now, "drift", drift)
            results = run.simulate(now + check_ns)
        changes = [job.arrives_ns for job in jobs] + [run.left_ns(results, j) for j in active]
        if not active and max(changes) <= now:
            break
        now = min([now + check_ns, *(time for time in changes if time > now)])
    final = tuple(job for _, job in sorted(run.planned.items()))
    return Controlled(final, simulate_jobs(final, machine, limit, until_ns), tuple(run.replanned))


class _JobSet:
    """Jobs that have arrived, by index, with the plans they have received.

    Attributes:
        active: jobs for which the current plans were made.
        times: latest estimate of each job's kernel times.
        plan_times: kernel times used by each job's plan.
    """

    def __init__(
        self, jobs: Sequence[Job], machine: Machine, limit: int, planner: JobsPlanner, predictor: KernelTimes | None
    ) -> None:
        self.jobs = jobs
        self.machine = machine
        self.limit = limit
        self.planner = planner
        self.predictor = predictor
        self.active: set[int] = set()
        self.planned: dict[int, Job] = {}
        self.times: dict[int, Times] = {}
        self.plan_times: dict[int, Times] = {}
        self.replanned: list[Replanned] = []

    def simulate(self, until_ns: int) -> dict[int, JobTimeline]:
        """Simulates all jobs with plans up to a time; returns results by index."""
        order = sorted(self.planned)
        if not order:
            return {}
        timeline = simulate_jobs([self.planned[j] for j in order], self.machine, self.limit, until_ns + 1)
        return dict(zip(order, timeline.jobs, strict=True))

    def left_ns(self, timelines: dict[int, JobTimeline], j: int) -> int:
        """Returns when a job left; NEVER: it did not leave before the end of the simulation."""
        run = timelines.get(j)
        spec = self.jobs[j]
        if run is None or run.left_ns is None:
            return NEVER
        ended = len(run.boundaries) == spec.iterations or (spec.leaves_ns is not None and run.left_ns >= spec.leaves_ns)
        return run.left_ns if ended else NEVER

    def expected(self, j: int, jobs: int) -> Times:
        """Returns a job's expected kernel times at a number of running jobs.

        Scales its last estimate by the ratio of the predictions.
        """
        program = self.jobs[j].program
        last = self.times.get(j)
        if self.predictor is None:
            durations = np.array([k.duration_ns for k in program.kernels], np.int64)
            return durations * jobs if last is None else last * jobs // len(self.active)
        predicted = self.predictor.predict(program, jobs)
        if last is None:
            return predicted
        old = np.maximum(self.predictor.predict(program, len(self.active)), 1)
        scaled: Times = np.rint(last * (predicted / old)).astype(np.int64)
        return scaled

    def plan(self, active: set[int], now: int, reason: str, drift: float) -> None:
        """Plans all active jobs."""
        order = sorted(active)
        if reason != "drift":
            self.times |= {j: self.expected(j, len(order)) for j in order}
        self.active = active
        if not order:
            return
        programs = [self.jobs[j].program for j in order]
        if isinstance(self.planner, TENSILE):
            sequences = [sequence(self.times[j]) for j in order]
            plans = self.planner.plan_jobs(programs, self.machine, self.limit, sequences)
        else:
            retimed = [self.jobs[j].program.with_durations((self.times[j] // len(order)).tolist()) for j in order]
            drafts = self.planner.plan_jobs(retimed, self.machine, self.limit)
            plans = tuple(replace(plan, fingerprint=p.fingerprint) for plan, p in zip(drafts, programs, strict=True))
        for j, plan in zip(order, plans, strict=True):
            self.plan_times[j] = self.times[j]
            if j not in self.planned:
                self.planned[j] = replace(self.jobs[j], plan=plan, switches=(), within_limit=True)
            elif plan.decisions != (job := self.planned[j]).plans[-1].decisions:
                switches = tuple(switch for switch in job.switches if switch[0] < now)
                self.planned[j] = replace(job, switches=(*switches, (now, plan)))
        self.replanned.append(Replanned(now, reason, drift))

    def update_times(self, timelines: dict[int, JobTimeline], now: int) -> float:
        """Updates the times from each job's last complete iteration; returns the largest drift."""
        largest = 0.0
        for j in self.active:
            measured = measured_times(timelines[j], len(self.jobs[j].program.kernels), now)
            if measured is not None:
                self.times[j] = corrected(self.times[j], measured, beta=0.5)
                largest = max(largest, drift(self.plan_times[j], self.times[j]))
        return largest


def measured_times(job: JobTimeline, n: int, now: int) -> Times | None:
    """Returns (n,) ns of the kernels of the last iteration that ended by ``now``, or None."""
    ended = [i for i, time in enumerate(job.boundaries) if time <= now]
    if not ended or job.admitted_ns is None:
        return None
    i = ended[-1]
    begin = job.boundaries[i - 1] if i else job.admitted_ns
    end = job.boundaries[i]
    starts = [s.start_ns for s in job.spans if s.kind == "kernel"][i * n : (i + 1) * n]
    edges = np.array([begin, *starts[1:], end], np.int64)
    waits = np.zeros(n, np.int64)
    pauses = [(stall.start_ns, stall.end_ns) for stall in job.stalls if stall.cause in ("memory", "data")]
    pauses += [(span.start_ns, span.end_ns) for span in job.spans if span.kind == "recompute"]
    for start, end_ns in pauses:
        if begin <= start < end:
            waits[np.searchsorted(edges, start, side="right") - 1] += end_ns - start
    return np.maximum(np.diff(edges) - waits, 0)
