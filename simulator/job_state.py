"""The state of one job in ``rules.py``: where it is in its program, and which of its tensors are away."""

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
ALONE_ONLY = ("issue_ns", "wait_ns", "event_ns", "copy_contention")  # costs of one job that has the machine alone


def reserved_bytes(plans: Sequence[Schedule]) -> int:
    """What the host keeps free for a job (J9): what its plan holds there at the most; for a job that changes its plans,
    what those two hold that hold most."""
    return sum(sorted(max(plan.on_host) for plan in plans)[-2:])


def check_jobs(
    jobs: Sequence[Job], plans: Sequence[Sequence[Schedule]], machine: Machine, limit: int, until_ns: int | None
) -> None:
    """Can every job run alone, evicting on demand, and does every one end?

    Args:
        plans: of each job, those of ``Job.plans``.

    Raises:
        ValueError: a job has no end, or the machine has one of the costs ALONE_ONLY.
        OutOfMemory: a job and the first kernel that does not fit alone.
        PlanError: a job whose plans hold more on the host than it has.
    """
    for name in ALONE_ONLY:
        if value := getattr(machine, name):
            raise ValueError(f"machine.{name} is {value}: simulate_jobs has no such cost; set it to 0")
    for job, schedules in zip(jobs, plans, strict=True):
        if job.iterations is None and job.leaves_ns is None and until_ns is None:
            raise ValueError(
                f"job {job.name!r} has no end: give it iterations or leaves_ns, or the simulation until_ns"
            )
        lasts_ns = sum(map(sum, job.durations)) if job.durations else min(plan.begins[-1] for plan in schedules)
        if job.iterations is None and not lasts_ns:
            raise ValueError(f"job {job.name!r} takes no time: give it iterations")
        for plan in schedules:
            if plan.admission_bytes > limit:
                used = plan.start_bytes
                raise OutOfMemory(0, plan.admission_bytes - used, used, limit, job.name)
            for step, least in zip(plan.steps, plan.least_bytes, strict=True):
                if least > limit:
                    requested = sum(plan.blocks[b].nbytes for b in step.allocates)
                    raise OutOfMemory(step.kernel, requested, least - requested, limit, job.name)
        most = reserved_bytes(schedules)
        if most > machine.host_bytes:
            raise PlanError(
                f"job {job.name!r}: its plans have {most:,} bytes on the host at a time; "
                f"{machine.name} has {machine.host_bytes:,}"
            )


@dataclass(eq=False)
class Gap:
    """A tensor that is away. Positions count the job's kernels from its start, or its last change of plans."""

    tensor: int
    block: int
    before: int  # position of the kernel that needs it
    ready: int  # position from which it may come back
    sync: bool = False
    pinned: bool = False  # it has a prefetch kernel
    demand: bool = False  # no plan sent it away
    host_bytes: int = 0  # counted on the host beside what is reserved for the plan
    left: bool = False  # its bytes have left
    on_host: bool = False  # and it is not on the way back


@dataclass(eq=False)
class Work:
    """A copy or a step that is under way or, with ``issued``, queued."""

    job: JobState
    span: int = -1  # its index among those of the job
    left: int = 0  # of it, in ns / ALONE
    tensor: int = -1
    block: int = -1
    issued: int = 0  # how many kernels of all jobs had ended
    void: bool = False  # the tensor was written meanwhile

    def ends(self, now: int, rate: int) -> int:
        """When it will be done at this rate, in whole ns."""
        return now - (-self.left // rate)


class Host:
    """The thread that issues the steps of a job that has the machine to itself (choice i).

    Attributes:
        ahead: steps that are issued and have not started.
        next_ns: when the next step is issued, or would be if the queue had room for it.
        waited: whether a step has waited for the host since the last boundary.
        settles_after: iterations after which the host counts as no further ahead than before.
    """

    def __init__(self, schedule: Schedule, machine: Machine, settles_after: int):
        self.settles_after = settles_after
        self._lasts_ns = [machine.issue_ns * count for count in schedule.issues]
        self._timed = [step.duration_ns > 0 for step in schedule.steps]
        self._depth = machine.queue_depth
        self._step = self._queued = 0  # the next to issue; those that take time, are issued and not over
        self.ahead, self.waited = 0, False
        self.next_ns = self._lasts_ns[0]
        if sum(self._lasts_ns) <= sum(step.duration_ns for step in schedule.steps):
            self.next_ns = 0
            while self._queued + self._timed[self._step] <= self._depth:
                self._issue()
                self.next_ns = 0
        self._lead = self._lead_at(0)

    def _issue(self) -> None:
        self.ahead += 1
        self._queued += self._timed[self._step]
        self._step = (self._step + 1) % len(self._timed)
        self.next_ns += self._lasts_ns[self._step]

    def advance(self, now: int) -> None:
        """Issues what can be issued until then."""
        while self.next_ns <= now and self._queued + self._timed[self._step] <= self._depth:
            self._issue()

    def is_ahead(self, now: int) -> bool:
        """Has the next step been issued?"""
        self.advance(now)
        return self.ahead > 0

    def complete(self, step: Step, now: int) -> None:
        """A step is over: the queue has room for another."""
        self.advance(now)
        if step.duration_ns:
            self._queued -= 1
            self.next_ns = max(self.next_ns, now)

    def _lead_at(self, now: int) -> tuple[int, int]:
        return self.ahead, min(now - self.next_ns, 0)

    def lead(self, now: int, settled: bool) -> tuple[int, int]:
        """Returns at a boundary what the future depends on: how far the host is ahead.

        A host that is further ahead than at the last boundary is as far ahead if no step has waited for it since: then
        none will. So it is if it counts as ``settled``.
        """
        self.advance(now)
        lead = self._lead_at(now)
        if not settled and (self.waited or lead < self._lead):
            self._lead = lead
        self.waited = False
        return self._lead


class JobState:
    """One job: where it is, and what it has done so far. The ledger and the copies are the machine's."""

    def __init__(self, index: int, job: Job, plans: Sequence[Schedule]):
        self.index, self.job, self.plans = index, job, plans
        self.admitted_ns: int | None = None
        self.left_ns: int | None = None
        self.boundaries: list[int] = []
        self.spans: list[Span] = []
        self.events: list[BlockEvent] = []
        self.events_until: list[int] = []
        self.stalls: list[Stall] = []
        self.switches: list[tuple[int, int]] = []
        self.position = 0  # the kernel that runs, or else the next one
        self.step = 0  # the step that runs, or else the next one
        self.ends: list[int] = []  # per position: how many kernels of all jobs had ended when it was reached
        self.away: dict[int, Gap] = {}  # by its plan: by tensor
        self.evicted: dict[int, Gap] = {}  # on demand: by block
        self.early: list[Gap] = []  # come back, or coming, before their use
        self.memory: set[int] = set()  # blocks
        self.held = 0  # their bytes
        self.host_copy: dict[int, int] = {}  # tensor -> the block that its valid copy on the host is of
        self.running = False
        self.waits_since = 0  # when its last step ended
        self.ready_since: int | None = None  # since when its next step could start
        self.offer: Gap | None = None  # the tensor that it would have back next
        self.offered_since = 0
        self.leaving = False

    def begin(self, plan: int, now: int, kernel_ends: int) -> None:
        """It is admitted, by this one of its plans."""
        self.use(plan)
        self.admitted_ns, self.waits_since, self.ends = now, now, [kernel_ends]
        self.wait(self.job.arrives_ns, now, "admission")
        if plan:
            self.switches.append((now, plan))

    def wait(self, start_ns: int, end_ns: int, cause: Cause) -> None:
        """It waits, if that takes time; this may go on from the wait before."""
        if start_ns < end_ns:
            if self.stalls and self.stalls[-1][1:] == (start_ns, cause):
                start_ns = self.stalls.pop().start_ns
            self.stalls.append(Stall(start_ns, end_ns, cause))

    def timeline(self) -> JobTimeline:
        """What it did; spans by start, as a step after a switch starts later than copies that come after it."""
        job, spans = self.job, sorted(self.spans, key=lambda s: s.start_ns)
        return JobTimeline(
            job.name, job.program.name, job.program.ideal_ns, job.arrives_ns, self.admitted_ns, self.left_ns,
            tuple(self.boundaries), tuple(spans), tuple(self.events), tuple(self.events_until), tuple(self.stalls),
            tuple(self.switches),
        )  # fmt: skip

    def use(self, plan: int) -> None:
        """From now on it goes by this one of its plans."""
        self.plan, self.schedule = plan, self.plans[plan]
        self.n = len(self.schedule.program.kernels)

    @property
    def next_step(self) -> Step:
        """The step that runs, or else the next one."""
        return self.schedule.steps[self.step]

    def nbytes(self, block: int) -> int:
        """Of a block."""
        return self.schedule.blocks[block].nbytes

    def gap_of(self, d: Swap, position: int) -> Gap:
        """The gap of d, opened when the kernel at ``position`` ended."""

        def ahead(k: int) -> int:
            return position + ((k - d.after - 1) % self.n) + 1

        pinned = d.prefetch is not None and d.prefetch != d.after
        ready = ahead(d.prefetch) + 1 if pinned else position + 1  # type: ignore[arg-type]
        before = ahead(self.schedule.returns[d])
        return Gap(d.tensor, self.schedule.moved[d], before, ready, d.sync, d.prefetch is not None)

    def gap_on_demand(self, block: int) -> Gap:
        """The gap of a block that is away on demand, from now to the next step that touches it."""
        kernels, _ = self.schedule.next_touch(block, self.step)
        before = min(NEVER, self.position + kernels)
        tensor = self.schedule.blocks[block].owner
        return Gap(tensor, block, before, self.position if before < NEVER else NEVER, demand=True)

    def open_at_start(self) -> list[Swap]:
        """The swaps whose gaps are open at an iteration's begin, by tensor."""
        away = self.schedule.away_at_start
        opened = [d for d in self.schedule.moved if d.tensor in away and d.after >= d.before]
        return sorted(opened, key=lambda d: d.tensor)

    def awaited(self) -> list[Gap]:
        """What the next step waits for."""
        touched = self.schedule.touched[self.step]
        planned = [gap for t, gap in self.away.items() if t in self.next_step.waits]
        return planned + [gap for b, gap in self.evicted.items() if b in touched]

    def held_up(self) -> bool:
        """Is a tensor missing, or a synchronous swap-out not over?"""
        return any(gap.sync and not gap.left for gap in self.away.values()) or bool(self.awaited())

    def lasts_ns(self, step: Step) -> int:
        """J11: what a step takes in this iteration."""
        rows = self.job.durations
        return rows[len(self.boundaries) % len(rows)][step.kernel] if rows else step.duration_ns

    def requested(self) -> int:
        """Bytes that the next step allocates."""
        return sum(self.nbytes(b) for b in self.next_step.allocates)

    def first_to_return(self, awaited_only: bool) -> Gap | None:
        """Rule 5: of the tensors on the host that may come back, the one that is needed first.

        Args:
            awaited_only: of those that the next step waits for.
        """
        gaps = self.awaited() if awaited_only else [*self.away.values(), *self.evicted.values()]
        waiting = [g for g in gaps if g.on_host and (self.position >= g.ready or self.position == g.before)]
        return min(waiting, key=lambda g: (g.before, g.tensor, g.demand, g.block), default=None)

    def issued(self, gap: Gap) -> float:
        """How many kernels of all jobs had ended when a pinned swap-in was issued."""
        return self.ends[max(gap.ready, 0)] if gap.ready <= self.position else float("inf")
