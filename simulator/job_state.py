"""State of one job in ``rules.py``: its position in the program and its evicted tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from simulator.job import Cause, Job, JobTimeline, Stall
from simulator.machine import Machine
from simulator.plan import PlanError, Swap
from simulator.schedule import NEVER, OutOfMemory, Schedule, Step
from simulator.timeline import BlockEvent, Span

Direction = Literal["d2h", "h2d"]


def reserved_bytes(plans: Sequence[Schedule]) -> int:
    """Returns the host bytes reserved for a job (J9): what its plan holds at most, or its two largest together."""
    return sum(sorted(max(plan.on_host) for plan in plans)[-2:])


def check_jobs(
    jobs: Sequence[Job], plans: Sequence[Sequence[Schedule]], machine: Machine, limit: int, until_ns: int | None
) -> None:
    """Checks that every job can run alone, with eviction on demand, and that every job terminates.

    Args:
        jobs: Jobs that share the machine.
        plans: Lowered ``Job.plans`` of each job.
        machine: Machine of all jobs.
        limit: Memory limit in bytes for all jobs together.
        until_ns: As in ``simulate_jobs``.

    Raises:
        ValueError: A job never terminates, or the machine sets a cost that only ``simulate`` models.
        OutOfMemory: A kernel of a job does not fit alone; the message names the job and its first such kernel.
        PlanError: A job's plans hold more bytes on the host than the machine has.
    """
    for name in ("issue_ns", "wait_ns", "event_ns", "copy_contention"):
        if value := getattr(machine, name):
            raise ValueError(f"machine.{name} is {value}: simulate_jobs does not model this cost; set it to 0")
    for job, schedules in zip(jobs, plans, strict=True):
        if job.iterations is None and job.leaves_ns is None and until_ns is None:
            raise ValueError(
                f"job {job.name!r} has no end: give it iterations or leaves_ns, or the simulation until_ns"
            )
        iteration_ns = sum(map(sum, job.durations)) if job.durations else min(plan.begins[-1] for plan in schedules)
        if job.iterations is None and not iteration_ns:
            raise ValueError(f"job {job.name!r} takes no time: give it iterations")
        for plan in schedules:
            if plan.admission_bytes > limit:
                used = plan.start_bytes
                raise OutOfMemory(0, plan.admission_bytes - used, used, limit, job.name)
            for step, needed in zip(plan.steps, plan.least_bytes, strict=True):
                if needed > limit:
                    requested = sum(plan.blocks[b].nbytes for b in step.allocates)
                    raise OutOfMemory(step.kernel, requested, needed - requested, limit, job.name)
        host_bytes = reserved_bytes(schedules)
        if host_bytes > machine.host_bytes:
            raise PlanError(
                f"job {job.name!r}: its plans have {host_bytes:,} bytes on the host at a time; "
                f"{machine.name} has {machine.host_bytes:,}; swap less"
            )


@dataclass(eq=False)
class OpenGap:
    """An evicted tensor. Positions count the job's kernels since its start or its last change of plans."""

    tensor: int
    block: int  # its block in the schedule
    before: int  # position of the kernel that needs it
    ready: int  # position from which it may be swapped in
    sync: bool = False  # as in ``Swap``
    pinned: bool = False  # it has a prefetch kernel
    on_demand: bool = False  # evicted on demand
    host_bytes: int = 0  # host memory in addition to what is reserved for the plan
    is_freed: bool = False  # its device memory is free
    on_host: bool = False  # free, and no swap-in has started


@dataclass(eq=False)
class Activity:
    """A copy that is queued or in flight, or a step that is in flight."""

    job: JobState
    span: int = -1  # index among the job's spans
    remaining: int = 0  # remaining work, in ns / ALONE
    tensor: int = -1  # of a copy
    block: int = -1  # of a copy
    issued: int = 0  # number of kernels of all jobs that had ended at its issue
    is_stale: bool = False  # the tensor was written since its issue

    def completion_ns(self, now: int, rate: int) -> int:
        """Returns the completion time at this rate, in whole ns."""
        return now - (-self.remaining // rate)


class Host:
    """Host thread that issues the steps of a single job (choice i)."""

    def __init__(self, schedule: Schedule, machine: Machine, settles_after: int):
        self.settles_after = settles_after  # iterations after which a change of the lead counts as unchanged
        self._costs_ns = [machine.issue_ns * count for count in schedule.issues]
        self._is_timed = [step.duration_ns > 0 for step in schedule.steps]
        self._queue_depth = machine.queue_depth
        self._step = self._n_queued = 0  # next step to issue; timed steps that are issued and unfinished
        self.issued = 0  # number of steps that are issued and have not started
        self.has_waited = False  # whether a step has waited for the host since the last boundary
        self.next_ns = self._costs_ns[0]  # time of the next issue, assuming that the queue has room
        if sum(self._costs_ns) <= sum(step.duration_ns for step in schedule.steps):
            self.next_ns = 0
            while self._n_queued + self._is_timed[self._step] <= self._queue_depth:
                self._issue()
                self.next_ns = 0
        self._lead = self._lead_at(0)

    def _issue(self) -> None:
        self.issued += 1
        self._n_queued += self._is_timed[self._step]
        self._step = (self._step + 1) % len(self._is_timed)
        self.next_ns += self._costs_ns[self._step]

    def advance(self, now: int) -> None:
        """Issues all steps that can be issued until ``now``."""
        while self.next_ns <= now and self._n_queued + self._is_timed[self._step] <= self._queue_depth:
            self._issue()

    def has_issued(self, now: int) -> bool:
        """Returns whether the next step has been issued."""
        self.advance(now)
        return self.issued > 0

    def complete(self, step: Step, now: int) -> None:
        """Removes a completed step from the queue."""
        self.advance(now)
        if step.duration_ns:
            self._n_queued -= 1
            self.next_ns = max(self.next_ns, now)

    def _lead_at(self, now: int) -> tuple[int, int]:
        return self.issued, min(now - self.next_ns, 0)

    def lead(self, now: int, settled: bool) -> tuple[int, int]:
        """Returns the host's lead at a boundary, which is part of the state (rule 10).

        A lead that has grown since the last boundary while no step waited for the host counts as unchanged, because no
        step will wait for it later. So does any lead if ``settled``.
        """
        self.advance(now)
        lead = self._lead_at(now)
        if not settled and (self.has_waited or lead < self._lead):
            self._lead = lead
        self.has_waited = False
        return self._lead


class JobState:
    """State and records of one job; the ledger and the copies belong to ``World``."""

    def __init__(self, index: int, job: Job, plans: Sequence[Schedule]):
        self.index = index
        self.job = job
        self.plans = plans
        self.admitted_ns: int | None = None
        self.left_ns: int | None = None
        self.boundaries: list[int] = []
        self.spans: list[Span] = []
        self.events: list[BlockEvent] = []
        self.events_until: list[int] = []
        self.stalls: list[Stall] = []
        self.switches: list[tuple[int, int]] = []
        self.position = 0  # the running kernel, or else the next
        self.step = 0  # the running step, or else the next
        self.ended_before: list[int] = []  # per position: number of kernels of all jobs that had ended before it
        self.gaps: dict[int, OpenGap] = {}  # evicted by the plan, by tensor
        self.evicted: dict[int, OpenGap] = {}  # evicted on demand, by block
        self.prefetched: list[OpenGap] = []  # swapped in, or being swapped in, before their use
        self.resident: set[int] = set()  # resident blocks
        self.resident_bytes = 0  # bytes of the resident blocks
        self.host_copies: dict[int, int] = {}  # tensor -> block of its valid host copy
        self.is_running = False
        self.waits_since = 0  # end of its last step
        self.ready_since: int | None = None  # time from which its next step could start
        self.next_swap_in: OpenGap | None = None  # its next swap-in
        self.swap_in_since = 0
        self.is_leaving = False

    def begin(self, plan: int, now: int, kernel_ends: int) -> None:
        """Admits the job with one of its plans."""
        self.set_plan(plan)
        self.admitted_ns = now
        self.waits_since = now
        self.ended_before = [kernel_ends]
        self.record_stall(self.job.arrives_ns, now, "admission")
        if plan:
            self.switches.append((now, plan))

    def record_stall(self, start_ns: int, end_ns: int, cause: Cause) -> None:
        """Records a stall, merged with the previous one if it continues it."""
        if start_ns < end_ns:
            if self.stalls and self.stalls[-1][1:] == (start_ns, cause):
                start_ns = self.stalls.pop().start_ns
            self.stalls.append(Stall(start_ns, end_ns, cause))

    def timeline(self) -> JobTimeline:
        """Returns the job's timeline; spans are sorted, because steps after a switch are recorded before they start."""
        job = self.job
        spans = sorted(self.spans, key=lambda s: s.start_ns)
        return JobTimeline(
            job.name,
            job.program.name,
            job.program.ideal_ns,
            job.arrives_ns,
            self.admitted_ns,
            self.left_ns,
            tuple(self.boundaries),
            tuple(spans),
            tuple(self.events),
            tuple(self.events_until),
            tuple(self.stalls),
            tuple(self.switches),
        )

    def set_plan(self, plan: int) -> None:
        """Changes to another plan of the job."""
        self.plan = plan
        self.schedule = self.plans[plan]
        self.n = len(self.schedule.program.kernels)

    @property
    def next_step(self) -> Step:
        """The running step, or the next step if none is running."""
        return self.schedule.steps[self.step]

    def nbytes(self, block: int) -> int:
        """Returns the size of a block."""
        return self.schedule.blocks[block].nbytes

    def gap_of(self, d: Swap, position: int) -> OpenGap:
        """Returns the gap of d that opened when the kernel at ``position`` ended."""

        def next_position(k: int) -> int:
            return position + ((k - d.after - 1) % self.n) + 1

        ready = (position if d.prefetch is None or d.prefetch == d.after else next_position(d.prefetch)) + 1
        before = next_position(self.schedule.returns[d])
        return OpenGap(d.tensor, self.schedule.moved[d], before, ready, d.sync, d.prefetch is not None)

    def gap_on_demand(self, block: int) -> OpenGap:
        """Returns the gap of a block evicted on demand, from now to the next step that touches it."""
        kernels, _ = self.schedule.next_touch(block, self.step)
        before = min(NEVER, self.position + kernels)
        tensor = self.schedule.blocks[block].owner
        return OpenGap(tensor, block, before, self.position if before < NEVER else NEVER, on_demand=True)

    def swaps_open_at_start(self) -> list[Swap]:
        """Returns the swaps whose gaps are open at the start of an iteration, by tensor."""
        swapped_out = self.schedule.away_at_start
        swaps = [d for d in self.schedule.moved if d.tensor in swapped_out and d.after >= d.before]
        return sorted(swaps, key=lambda d: d.tensor)

    def awaited_gaps(self) -> list[OpenGap]:
        """Returns the gaps of evicted tensors that the next step waits for."""
        touched = self.schedule.touched[self.step]
        planned = [gap for t, gap in self.gaps.items() if t in self.next_step.waits]
        return planned + [gap for b, gap in self.evicted.items() if b in touched]

    def is_blocked(self) -> bool:
        """Returns whether the next step waits for a tensor or for a synchronous swap-out."""
        return any(gap.sync and not gap.is_freed for gap in self.gaps.values()) or bool(self.awaited_gaps())

    def duration_ns(self, step: Step) -> int:
        """Returns the duration of a step in the current iteration (J11)."""
        rows = self.job.durations
        return rows[len(self.boundaries) % len(rows)][step.kernel] if rows else step.duration_ns

    def requested_bytes(self) -> int:
        """Returns the bytes that the next step allocates."""
        return sum(self.nbytes(b) for b in self.next_step.allocates)

    def first_swap_in(self, awaited_only: bool) -> OpenGap | None:
        """Returns the next swap-in by rule 5: of the tensors on the host that may be swapped in, the one needed first.

        Args:
            awaited_only: Consider only tensors that the next step waits for.

        Returns:
            The open gap to end, or None if no tensor may be swapped in.
        """
        gaps = self.awaited_gaps() if awaited_only else [*self.gaps.values(), *self.evicted.values()]
        candidates = [g for g in gaps if g.on_host and (self.position >= g.ready or self.position == g.before)]
        return min(candidates, key=lambda g: (g.before, g.tensor, g.on_demand, g.block), default=None)

    def issued_at(self, gap: OpenGap) -> float:
        """Returns the number of kernels of all jobs that had ended when a swap-in with ``prefetch`` was issued."""
        return self.ended_before[max(gap.ready, 0)] if gap.ready <= self.position else float("inf")
