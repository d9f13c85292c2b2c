"""One job in the machine: where it is in its program, and which of its tensors are away. Read reference.py first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.jobs.lowered import NEVER, Lowered
from simulator.jobs.nouns import Cause, Job, Stall
from simulator.plan import Swap
from simulator.schedule import Step
from simulator.timeline import BlockEvent, Span


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


class Resident:
    """The state of a job from its admission until it has left. The ledger and the copies are the machine's."""

    def __init__(self, index: int, job: Job, plans: Sequence[Lowered], plan: int, now: int, kernel_ends: int):
        self.index, self.job, self.plans = index, job, plans
        self.use(plan)
        self.position = 0  # the kernel that runs, or else the next one
        self.step = 0  # the step that runs, or else the next one
        self.ends = [kernel_ends]  # per position: how many kernels of all jobs had ended when it was reached
        self.away: dict[int, Gap] = {}  # by its plan: by tensor
        self.evicted: dict[int, Gap] = {}  # on demand: by block
        self.early: list[Gap] = []  # come back, or coming, before their use
        self.memory: set[int] = set()  # blocks
        self.held = 0  # their bytes
        self.host_copy: dict[int, int] = {}  # tensor -> the block that its valid copy on the host is of
        self.running = False
        self.waits_since = now  # when its last step ended
        self.ready_since: int | None = None  # since when its next step could start
        self.offer: Gap | None = None  # the tensor that it would have back next
        self.offered_since = 0
        self.leaving = False
        self.boundaries: list[int] = []
        self.spans: list[Span] = []
        self.events: list[BlockEvent] = []
        self.events_until: list[int] = []
        self.stalls: list[Stall] = []

    def use(self, plan: int) -> None:
        """From now on it goes by this one of its entries."""
        self.plan, self.lowered, self.schedule = plan, self.plans[plan], self.plans[plan].schedule
        self.n = len(self.schedule.program.kernels)

    @property
    def next_step(self) -> Step:
        """The step that runs, or else the next one."""
        return self.schedule.steps[self.step]

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
        kernels, _ = self.lowered.next_touch(block, self.step)
        tensor = self.schedule.blocks[block].owner
        before = min(NEVER, self.position + kernels)
        return Gap(tensor, block, before, self.position if before < NEVER else NEVER, demand=True)

    def awaited(self) -> list[Gap]:
        """What the next step waits for."""
        touched = self.lowered.touched[self.step]
        planned = [gap for t, gap in self.away.items() if t in self.next_step.waits]
        return planned + [gap for b, gap in self.evicted.items() if b in touched]

    def held_up(self) -> bool:
        """Is a tensor missing, or a synchronous swap-out not over?"""
        return any(gap.sync and not gap.left for gap in self.away.values()) or bool(self.awaited())

    def lasts_ns(self, kernel: int) -> int:
        """Rule 11: what a kernel takes in this iteration."""
        rows, planned = self.job.durations, self.schedule.program.kernels[kernel].duration_ns
        return rows[len(self.boundaries) % len(rows)][kernel] if rows else planned

    def requested(self) -> int:
        """Bytes that the next step allocates."""
        return sum(self.schedule.blocks[b].nbytes for b in self.next_step.allocates)

    def first_to_return(self, awaited_only: bool) -> Gap | None:
        """Rule 3: of the tensors on the host that may come back, the one that is needed first.

        Args:
            awaited_only: of those that the next step waits for.
        """
        gaps = self.awaited() if awaited_only else [*self.away.values(), *self.evicted.values()]
        waiting = [g for g in gaps if g.on_host and (self.position >= g.ready or self.position == g.before)]
        return min(waiting, key=lambda g: (g.before, g.tensor, g.demand, g.block), default=None)

    def has_room(self, gap: Gap, limit: int) -> bool:
        """Rule 4: by the job's own planned residency, does it fit up to its use? That counts what is away on demand."""
        if gap.demand:
            return True
        nbytes = self.schedule.blocks[gap.block].nbytes
        kernel_runs = self.running and not self.next_step.rerun
        for p in range(self.position + kernel_runs, gap.before):
            early = sum(self.schedule.blocks[g.block].nbytes for g in self.early if g.before > p)
            if self.schedule.residency[p % self.n] + early + nbytes > limit:
                return False
        return True

    def issued(self, gap: Gap) -> float:
        """How many kernels of all jobs had ended when a pinned swap-in was issued."""
        return self.ends[max(gap.ready, 0)] if gap.ready <= self.position else float("inf")

    def wait(self, start_ns: int, end_ns: int, cause: Cause) -> None:
        """Notes a wait, which may go on from the one before."""
        if self.stalls and self.stalls[-1][1:] == (start_ns, cause):
            start_ns = self.stalls.pop().start_ns
        self.stalls.append(Stall(start_ns, end_ns, cause))


@dataclass(eq=False)
class Work:
    """A copy or a step that is under way or, with ``issued``, queued."""

    job: Resident
    span: int = -1  # its index among the job's spans
    work: int = 0  # what is left of it, in ns / ALONE, when it was last reckoned
    end: int = 0
    tensor: int = -1
    block: int = -1
    issued: int = 0  # how many kernels of all jobs had ended
    void: bool = False  # the tensor was written meanwhile
