"""The log of a compiled simulation as timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.compiled.encoding import Ints
from simulator.jobs.lowered import Lowered
from simulator.jobs.nouns import Cause, Eviction, Job, JobTimeline, Stall, in_order

# isort: off
from simulator.jobs.tables import (
    L_ADMIT, L_BOUNDARY, L_END, L_EVICT, L_GONE, L_IN, L_LEFT, L_NEVER, L_OUT, L_STALL, L_STEP, L_SWITCH,
)  # fmt: skip

# isort: on
from simulator.timeline import BlockEvent, Span

CAUSE: tuple[Cause, ...] = ("compute", "data", "memory")  # by C_COMPUTE and so on


@dataclass
class _Job:
    """What is known of a job so far."""

    job: Job
    plans: Sequence[Lowered]
    now: Lowered
    step: int = 0
    memory: set[int] = field(default_factory=set)
    admitted: int | None = None
    left: int | None = None
    boundaries: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    events: list[BlockEvent] = field(default_factory=list)
    events_until: list[int] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    switches: list[tuple[int, int]] = field(default_factory=list)

    def change(self, time: int, block: int, sign: int) -> int:
        """A block comes or goes; returns how many events that are."""
        owner, nbytes, *_ = self.now.schedule.blocks[block]
        (self.memory.add if sign > 0 else self.memory.remove)(block)
        if not nbytes:
            return 0
        self.events.append(BlockEvent(time, owner, block, sign * nbytes))
        return 1

    def admit(self, time: int, plan: int) -> int:
        """It begins; returns how many events that are."""
        self.admitted, self.now = time, self.plans[plan]
        if self.job.arrives_ns < time:
            self.stalls.append(Stall(self.job.arrives_ns, time, "admission"))
        if plan:
            self.switches.append((time, plan))
        schedule = self.now.schedule
        here = [b for b, x in enumerate(schedule.blocks) if x.first < 0 and x.owner not in schedule.away_at_start]
        count = sum(self.change(time, b, 1) for b in here)
        self.events_until.append(len(self.events))
        return count

    def launch(self, start: int, end: int, pause: int) -> int:
        """A step starts; returns how many events that are."""
        step = self.now.schedule.steps[self.step]
        if pause:
            self.spans.append(Span(start, start + pause, "compute", "switch", step.kernel))
        self.spans.append(Span(start + pause, end, "compute", "recompute" if step.rerun else "kernel", step.kernel))
        return sum(self.change(start, b, 1) for b in step.allocates)

    def wait(self, start: int, end: int, cause: Cause) -> None:
        """It waits, perhaps still."""
        if self.stalls and self.stalls[-1][1:] == (start, cause):
            start = self.stalls.pop().start_ns
        self.stalls.append(Stall(start, end, cause))

    def timeline(self) -> JobTimeline:
        """All of it."""
        return JobTimeline(
            self.job.name, self.job.program.name, self.job.program.ideal_ns, self.job.arrives_ns, self.admitted,
            self.left, tuple(self.boundaries), in_order(self.spans), tuple(self.events), tuple(self.events_until),
            tuple(self.stalls), tuple(self.switches),
        )  # fmt: skip


def read_log(
    log: Ints, jobs: Sequence[Job], plans: Sequence[Sequence[Lowered]]
) -> tuple[list[JobTimeline], list[int], list[Eviction]]:
    """What each job did, the jobs of all block events in order, and the evictions on demand.

    Args:
        log: int64 (entries, 6).
        plans: of each job, those of ``Job.entries``.
    """
    ran = [_Job(job, each, each[0]) for job, each in zip(jobs, plans, strict=True)]
    order: list[int] = []
    evictions: list[Eviction] = []
    for start, end, what, j, index, more in log.tolist():
        job = ran[j]
        blocks = job.now.schedule.blocks
        count = 0
        if what == L_STEP:
            count = job.launch(start, end, index)
        elif what == L_END:
            count = sum(job.change(start, b, -1) for b in job.now.schedule.steps[job.step].frees)
            job.step += 1
        elif what == L_OUT:
            job.spans.append(Span(start, end, "d2h", "swap_out", blocks[index].owner))
        elif what == L_IN:
            job.spans.append(Span(start, end, "h2d", "swap_in", blocks[index].owner))
            count = job.change(start, index, 1)
        elif what == L_LEFT:
            count = job.change(start, index, -1)
        elif what == L_STALL:
            job.wait(start, end, CAUSE[index])
        elif what == L_BOUNDARY:
            job.step = 0
            job.boundaries.append(start)
            job.events_until.append(len(job.events))
        elif what == L_ADMIT:
            count = job.admit(start, index)
        elif what == L_SWITCH:
            job.now = job.plans[index]
            job.switches.append((start, index))
        elif what == L_GONE:
            job.left = start
            count = sum(job.change(start, b, -1) for b in sorted(job.memory))
        elif what == L_EVICT:
            evictions.append(Eviction(start, j, blocks[index].owner, index, blocks[index].nbytes, more))
        elif what == L_NEVER and start < end:
            job.wait(start, end, "admission")
        order += [j] * count
    return [job.timeline() for job in ran], order, evictions
