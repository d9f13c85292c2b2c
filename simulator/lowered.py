"""What follows from the plans of a job without a clock: its schedule, and what on-demand eviction has to know of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from simulator.job import Job
from simulator.machine import Machine
from simulator.plan import Plan, PlanError
from simulator.program import Program
from simulator.schedule import OutOfMemory, Schedule, lower

NEVER = 2**62  # a time, or a number of kernels, that does not come
ALONE_ONLY = ("issue_ns", "wait_ns", "event_ns", "copy_contention")  # costs of one job that has the machine alone


@dataclass(frozen=True)
class Lowered:
    """A schedule, and what each step touches."""

    schedule: Schedule

    @classmethod
    def of(cls, program: Program, plan: Plan) -> Lowered:
        """Checks the plan and lowers it.

        Raises:
            PlanError: it does not fit the program, or several jobs cannot take it.
        """
        plan.check(program)
        plan.only("a job among several", "swap", "recompute", "rerun")
        return cls(lower(program, plan))

    @cached_property
    def touched(self) -> tuple[frozenset[int], ...]:
        """Per step: the blocks of tensors that must be in memory when it starts or that it makes: those that it reads,
        writes or frees, and those whose copy to the host is issued or whose gap opens at its end."""
        s = self.schedule
        return tuple(
            frozenset(step.uses.values())
            | {b for b in (*step.allocates, *step.frees) if s.blocks[b].owner >= 0}
            | {s.moved[d] for d in (*step.copies, *step.opens)}
            for step in s.steps
        )

    @cached_property
    def touches(self) -> dict[int, tuple[int, ...]]:
        """Per block: the steps that touch it, ascending; one that no step touches is not there."""
        found: dict[int, list[int]] = {}
        for i, blocks in enumerate(self.touched):
            for b in blocks:
                found.setdefault(b, []).append(i)
        return {b: tuple(steps) for b, steps in found.items()}

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Per step, and one past the last: ns of all steps before it."""
        return (0, *accumulate(step.duration_ns for step in self.schedule.steps))

    @cached_property
    def start_bytes(self) -> int:
        """What is in memory before the first iteration."""
        away = self.schedule.away_at_start
        return sum(b.nbytes for b in self.schedule.blocks if b.first < 0 and b.owner not in away)

    @cached_property
    def admission_bytes(self) -> int:
        """What must be free when the job begins: its start, and what its first step allocates and waits for."""
        first, tensors = self.schedule.steps[0], self.schedule.program.tensors
        waits = sum(tensors[t].nbytes for t in first.waits & self.schedule.away_at_start)
        return self.start_bytes + waits + sum(self.schedule.blocks[b].nbytes for b in first.allocates)

    @cached_property
    def on_host(self) -> int:
        """The most bytes that the host holds for the plan at a time."""
        return max(self.schedule.on_host)

    @cached_property
    def least_bytes(self) -> tuple[int, ...]:
        """Per step: what it needs with everything else away: what it touches, allocates and waits for."""
        s = self.schedule
        fetched: dict[tuple[int, int], int] = {(s.returns[d], d.tensor): b for d, b in s.moved.items()}
        return tuple(
            sum(
                s.blocks[b].nbytes
                for b in touched
                | {fetched[step.before, t] for t in step.waits if (step.before, t) in fetched}
                | set(step.allocates)
            )
            for step, touched in zip(s.steps, self.touched, strict=True)
        )

    def next_touch(self, block: int, step: int) -> tuple[int, int]:
        """(kernels, ns) from this step to the next one that touches a block; NEVER where there is none."""
        steps, s = self.touches.get(block, ()), self.schedule
        later = next((i for i in steps if i >= step), None)
        if later is not None:
            return s.steps[later].before - s.steps[step].before, self.begins[later] - self.begins[step]
        if not steps or s.blocks[block].first >= 0:
            return NEVER, NEVER
        n, first = len(s.program.kernels), steps[0]
        kernels = n - s.steps[step].before + s.steps[first].before
        return kernels, self.begins[-1] - self.begins[step] + self.begins[first]


def reserved_bytes(on_host: Iterable[int]) -> int:
    """What the host keeps free for a job: what its plan holds there at the most; for a job that changes its plans, what
    those two hold that hold most.

    Args:
        on_host: that of each of its plans.
    """
    return sum(sorted(on_host)[-2:])


def check(jobs: Sequence[Job], plans: Sequence[Sequence[Lowered]], machine: Machine, limit: int, until_ns: int | None
          ) -> None:  # fmt: skip
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
    for job, lowered in zip(jobs, plans, strict=True):
        if job.iterations is None and job.leaves_ns is None and until_ns is None:
            raise ValueError(
                f"job {job.name!r} has no end: give it iterations or leaves_ns, or the simulation until_ns"
            )
        lasts_ns = sum(map(sum, job.durations)) if job.durations else min(plan.begins[-1] for plan in lowered)
        if job.iterations is None and not lasts_ns:
            raise ValueError(f"job {job.name!r} takes no time: give it iterations")
        for plan in lowered:
            if plan.admission_bytes > limit:
                used = plan.start_bytes
                raise OutOfMemory(0, plan.admission_bytes - used, used, limit, job.name)
            for step, least in zip(plan.schedule.steps, plan.least_bytes, strict=True):
                if least > limit:
                    requested = sum(plan.schedule.blocks[b].nbytes for b in step.allocates)
                    raise OutOfMemory(step.kernel, requested, least - requested, limit, job.name)
        most = reserved_bytes(plan.on_host for plan in lowered)
        if most > machine.host_bytes:
            raise PlanError(
                f"job {job.name!r}: its plans have {most:,} bytes on the host at a time; "
                f"{machine.name} has {machine.host_bytes:,}"
            )
