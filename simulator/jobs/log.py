"""The log of a compiled simulation as timelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.compiled.encoding import Ints
from simulator.job import Cause, Eviction, Job, JobTimeline, Record
from simulator.lowered import Lowered

# isort: off
from simulator.jobs.tables import (
    L_ADMIT, L_BOUNDARY, L_END, L_EVICT, L_GONE, L_IN, L_LEFT, L_NEVER, L_OUT, L_STALL, L_STEP, L_SWITCH,
)  # fmt: skip

# isort: on
from simulator.timeline import BlockEvent, Span

CAUSE: tuple[Cause, ...] = ("compute", "data", "memory")  # by C_COMPUTE and so on


class _Job(Record):
    """What is known of a job so far."""

    def __init__(self, job: Job, plans: Sequence[Lowered]):
        super().__init__(job)
        self.plans, self.now, self.step = plans, plans[0], 0
        self.memory: set[int] = set()

    def change(self, time: int, blocks: Iterable[int], sign: int) -> int:
        """Blocks come or go; returns how many events that are."""
        before = len(self.events)
        for b in blocks:
            owner, nbytes, *_ = self.now.schedule.blocks[b]
            (self.memory.add if sign > 0 else self.memory.remove)(b)
            if nbytes:
                self.events.append(BlockEvent(time, owner, b, sign * nbytes))
        return len(self.events) - before

    def begin(self, time: int, plan: int) -> int:
        """It is admitted; returns how many events that are."""
        self.admit(time, plan)
        self.now = self.plans[plan]
        schedule = self.now.schedule
        here = [b for b, x in enumerate(schedule.blocks) if x.first < 0 and x.owner not in schedule.away_at_start]
        count = self.change(time, here, 1)
        self.events_until.append(len(self.events))
        return count

    def launch(self, start: int, end: int, pause: int) -> int:
        """A step starts; returns how many events that are."""
        step = self.now.schedule.steps[self.step]
        if pause:
            self.spans.append(Span(start, start + pause, "compute", "switch", step.subject))
        self.spans.append(Span(start + pause, end, "compute", step.kind, step.subject))
        return self.change(start, step.allocates, 1)


def read_log(
    log: Ints, jobs: Sequence[Job], plans: Sequence[Sequence[Lowered]]
) -> tuple[list[JobTimeline], list[int], list[Eviction]]:
    """What each job did, the jobs of all block events in order, and the evictions on demand.

    Args:
        log: int64 (entries, 6).
        plans: of each job, those of ``Job.entries``.
    """
    ran = [_Job(job, each) for job, each in zip(jobs, plans, strict=True)]
    order: list[int] = []
    evictions: list[Eviction] = []
    for start, end, what, j, index, more in log.tolist():
        job = ran[j]
        blocks = job.now.schedule.blocks
        count = 0
        if what == L_STEP:
            count = job.launch(start, end, index)
        elif what == L_END:
            count = job.change(start, job.now.schedule.steps[job.step].frees, -1)
            job.step += 1
        elif what == L_OUT:
            job.spans.append(Span(start, end, "d2h", "swap_out", blocks[index].owner))
        elif what == L_IN:
            job.spans.append(Span(start, end, "h2d", "swap_in", blocks[index].owner))
            count = job.change(start, [index], 1)
        elif what == L_LEFT:
            count = job.change(start, [index], -1)
        elif what == L_STALL:
            job.wait(start, end, CAUSE[index])
        elif what == L_BOUNDARY:
            job.step = 0
            job.boundaries.append(start)
            job.events_until.append(len(job.events))
        elif what == L_ADMIT:
            count = job.begin(start, index)
        elif what == L_SWITCH:
            job.now = job.plans[index]
            job.switches.append((start, index))
        elif what == L_GONE:
            job.left = start
            count = job.change(start, sorted(job.memory), -1)
        elif what == L_EVICT:
            evictions.append(Eviction(start, j, blocks[index].owner, index, blocks[index].nbytes, more))
        elif what == L_NEVER:
            job.wait(start, end, "admission")
        order += [j] * count
    return [job.timeline() for job in ran], order, evictions
