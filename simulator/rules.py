"""Reference implementation of the simulator's rules, for one job or several.

RULES.md states the rules; comments cite its numbers. ``compiled/`` must agree with this file to the nanosecond.
``schedule.py`` computes everything that needs no clock, ``job_state.py`` has the state of one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from simulator.job import Cause, Eviction, Job, JobsDeadlock, JobsTimeline, Sharing, merged_curve
from simulator.job_state import Direction, Gap, Host, JobState, Work, check_jobs, reserved_bytes
from simulator.machine import ALONE, Machine
from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.schedule import MAX_ITERATIONS, NEVER, Schedule, check_room, lower
from simulator.timeline import BlockEvent, Span, Timeline


class World:
    """State of a simulation; one method per line of rule 9."""

    def __init__(self, jobs: Sequence[Job], plans: Sequence[Sequence[Schedule]], machine: Machine, limit: int,
                 until_ns: int | None, sharing: Sharing, limit_until: int = NEVER):  # fmt: skip
        self.jobs, self.machine, self.sharing = jobs, machine, sharing
        self.limit, self.limit_until = limit, limit_until
        self.now = self.used = self.kernel_ends = 0
        never = NEVER if until_ns is None else until_ns
        self.leaves = [never if job.leaves_ns is None else min(never, job.leaves_ns) for job in jobs]
        self.waiting = sorted(range(len(jobs)), key=lambda j: (jobs[j].arrives_ns, j))  # for admission
        self.present: list[JobState] = []  # by job
        self.queue: list[Work] = []  # swap-outs
        self.copies: dict[Direction, Work] = {}  # in flight, at most one per direction
        self.steps: list[Work] = []  # running
        self.stepped: JobState | None = None  # job whose step was the last to start
        self.served: JobState | None = None
        self.order: list[int] = []
        self.evictions: list[Eviction] = []
        self.states = [JobState(j, job, schedules) for j, (job, schedules) in enumerate(zip(jobs, plans, strict=True))]
        self.host: Host | None = None  # for a single job with issue costs

    def _limit_at(self, job: JobState, position: int) -> int:
        """Returns the limit at a position (choice d)."""
        return self.limit if position % job.n < self.limit_until else NEVER

    def _charge(self, job: JobState, block: int, sign: int) -> None:
        owner, nbytes, *_ = job.schedule.blocks[block]
        self.used += sign * nbytes
        job.held += sign * nbytes
        (job.memory.add if sign > 0 else job.memory.remove)(block)
        if nbytes:
            job.events.append(BlockEvent(self.now, owner, block, sign * nbytes))
            self.order.append(job.index)

    def _release(self, job: JobState, gap: Gap) -> None:
        """Frees the memory of an open gap whose swap-out is complete."""
        gap.left = gap.on_host = True
        self._charge(job, gap.block, -1)

    def _enqueue(self, job: JobState, tensor: int, block: int) -> None:
        """Enqueues a swap-out, unless one of this block is queued or in flight."""
        coming = [*self.queue, *(copy for d, copy in self.copies.items() if d == "d2h")]
        if not any(c.job is job and c.block == block and not c.void for c in coming):
            self.queue.append(Work(job, tensor=tensor, block=block, issued=self.kernel_ends))

    def _speed(self, step: Work) -> int:
        """Returns the speed of a step beside other steps (J2) and copies (k)."""
        kernel = step.job.schedule.program.kernels[step.job.next_step.kernel]
        loss = len(self.copies) * self.machine.copy_loss(kernel.bytes, kernel.duration_ns)
        return self.machine.compute_share(len(self.steps)) - loss

    def under_way(self) -> list[tuple[Work, int]]:
        """Returns running steps and copies in flight with their speeds; opposite copies slow each other down (g)."""
        shares = {"d2h": self.machine.d2h_share, "h2d": self.machine.h2d_share}
        both = len(self.copies) == 2
        copies = [(copy, shares[direction] if both else ALONE) for direction, copy in self.copies.items()]
        return [*copies, *((step, self._speed(step)) for step in self.steps)]

    def may_start(self, direction: Direction) -> bool:
        """Returns whether the copy engine is free."""
        return direction not in self.copies and not (self.machine.copy_engines == 1 and self.copies)

    def _completed(self, direction: Direction) -> Work | None:
        """Removes and returns the copy in this direction if it is complete."""
        done = direction in self.copies and self.copies[direction].left <= 0
        return self._ended(self.copies.pop(direction)) if done else None

    def _ended(self, work: Work) -> Work:
        spans = work.job.spans
        spans[work.span] = spans[work.span]._replace(end_ns=self.now)
        return work

    # ------------------------------------------------------------------------------------ completions

    def complete_copies(self) -> None:
        """Completes copies."""
        if out := self._completed("d2h"):
            job = out.job
            if out.block in job.evicted:
                self._release(job, job.evicted[out.block])
            elif not out.void:
                job.host_copy[out.tensor] = out.block
                if out.tensor in job.away:
                    self._release(job, job.away[out.tensor])
        if back := self._completed("h2d"):
            job = back.job
            if job.evicted.pop(back.block, None) is None:
                del job.away[back.tensor]

    def complete_steps(self) -> None:
        """Completes steps: frees blocks, opens gaps, enqueues swap-outs, and changes plans at a boundary."""
        ended = [self._ended(step).job for step in self.steps if step.left <= 0]
        self.steps = [step for step in self.steps if step.left > 0]
        for job in sorted(ended, key=lambda job: job.index):
            self._complete(job)

    def _complete(self, job: JobState) -> None:
        step, schedule = job.next_step, job.schedule
        job.running, job.waits_since = False, self.now
        if self.host:
            self.host.complete(step, self.now)
        for b in step.frees:
            self._charge(job, b, -1)
        job.step += 1
        if step.again:
            return
        self.kernel_ends += 1
        program = schedule.program
        kernel = program.kernels[step.kernel]
        for t in kernel.outputs:
            job.host_copy.pop(t, None)
            for copy in (*self.queue, *self.copies.values()):
                if copy.job is job and copy.block == step.uses[t]:
                    copy.void = True
        self.queue = [copy for copy in self.queue if not copy.void]
        for t in kernel.accesses:
            if not program.tensors[t].persistent and program.accesses[t][-1] == step.kernel:
                job.host_copy.pop(t, None)
        for d in step.copies:
            if d.tensor not in job.host_copy:
                self._enqueue(job, d.tensor, schedule.moved[d])
        for d in step.opens:
            self._open(job, d, job.position)
        job.position += 1
        job.ends.append(self.kernel_ends)
        job.early = [gap for gap in job.early if gap.before >= job.position]
        if job.position % job.n == 0:
            self._boundary(job)

    def _open(self, job: JobState, d: Swap, position: int) -> None:
        """Opens the gap of d; its copy is already queued or in flight unless the plan has changed since."""
        gap = job.away[d.tensor] = job.gap_of(d, position)
        if d.tensor in job.host_copy:
            self._release(job, gap)
        else:
            self._enqueue(job, d.tensor, gap.block)

    def _boundary(self, job: JobState) -> None:
        job.step = 0
        job.boundaries.append(self.now)
        job.events_until.append(len(job.events))
        if len(job.boundaries) == job.job.iterations or self.now >= self.leaves[job.index]:
            job.leaving = True
            self.queue = [copy for copy in self.queue if copy.job is not job]
        elif (plan := self._plan_now(job.index)) != job.plan:
            job.switches.append((self.now, plan))
            self._switch(job, plan)

    def _plan_now(self, j: int) -> int:
        """Returns the index into ``Job.plans`` of the plan that is due now."""
        return sum(at_ns <= self.now for at_ns, _ in self.jobs[j].switches)

    def _switch(self, job: JobState, plan: int) -> None:
        """Changes plans (J7). At a boundary, evicted tensors are persistent and have the same block in every plan."""
        missing = {gap.block: gap for gap in (*job.away.values(), *job.evicted.values())}
        nothing_changes = job.job.equivalent_plans[plan] == job.job.equivalent_plans[job.plan]
        job.use(plan)
        if nothing_changes:
            return
        job.position, job.ends = 0, [self.kernel_ends]
        job.away, job.evicted, job.early = {}, {}, []
        for d in job.open_at_start():
            before = missing.pop(job.schedule.moved[d], None)
            if before is None:
                self._open(job, d, d.after - job.n)
                continue
            gap = job.away[d.tensor] = job.gap_of(d, d.after - job.n)
            gap.left, gap.on_host = before.left, before.on_host
            if gap.on_host:
                job.host_copy[d.tensor] = gap.block
            elif gap.left:  # being swapped in
                job.early.append(gap)
        for block, before in missing.items():
            gap = job.evicted[block] = job.gap_on_demand(block)
            gap.left, gap.on_host, gap.host_bytes = before.left, before.on_host, before.host_bytes
        leaving = {gap.block for gap in (*job.away.values(), *job.evicted.values()) if not gap.left}
        self.queue = [copy for copy in self.queue if copy.job is not job or copy.block in leaving]

    def part(self) -> None:
        """Removes leaving jobs without copies in flight."""
        busy = [copy.job for copy in self.copies.values()]
        for job in [job for job in self.present if job.leaving and job not in busy]:
            for b in sorted(job.memory):
                self._charge(job, b, -1)
            job.left_ns = self.now
            self.present.remove(job)

    # ---------------------------------------------------------------------------------------- starts

    def admit(self) -> None:
        """Admits jobs."""
        for j in [j for j in self.waiting if self.leaves[j] <= self.now]:
            self.waiting.remove(j)
            self.states[j].wait(self.jobs[j].arrives_ns, self.now, "admission")
        while self.waiting and self.jobs[self.waiting[0]].arrives_ns <= self.now and self.served is None:
            j = self.waiting[0]
            plan = self._plan_now(j)
            needs = self.states[j].plans[plan].admission_bytes
            if self.used + needs > self.limit or self._host_left() < reserved_bytes(self.states[j].plans):
                break
            self.begin(j, plan)

    def begin(self, j: int, plan: int) -> JobState:
        """Starts a job with one of its plans."""
        self.waiting.remove(j)
        job = self.states[j]
        job.begin(plan, self.now, self.kernel_ends)
        self.present = sorted([*self.present, job], key=lambda job: job.index)
        for d in job.open_at_start():
            gap = job.away[d.tensor] = job.gap_of(d, d.after - job.n)
            gap.left = gap.on_host = True
            job.host_copy[d.tensor] = gap.block
        for d, block in job.schedule.moved.items():
            if d.tensor not in job.away and d.copy is not None and d.copy > d.after:
                job.host_copy[d.tensor] = block
        for b, each in enumerate(job.schedule.blocks):
            if each.first < 0 and each.owner not in job.away:
                self._charge(job, b, 1)
        job.events_until.append(len(job.events))
        return job

    def _host_left(self) -> int:
        """Returns the free bytes of the host (J9)."""
        planned = sum(reserved_bytes(job.plans) for job in self.present)
        return self.machine.host_bytes - planned - sum(g.host_bytes for j in self.present for g in j.evicted.values())

    def start_copies(self) -> None:
        """Starts copies."""
        for job in self.present:
            offers = not job.leaving and self.served in (None, job)
            gap = job.first_to_return(self.served is job) if offers else None
            if gap is not job.offer:
                job.offer, job.offered_since = gap, self.now
        going = min((job for job in self.present if job.offer and self._fits(job, job.offer)),
                    key=lambda job: (job.offered_since, job.index), default=None)  # fmt: skip
        one, gap = self.machine.copy_engines == 1, going.offer if going else None
        if self.queue and self.may_start("d2h"):
            copy = self.queue[0]
            if not (one and going and gap and gap.pinned and going.issued(gap) < copy.issued):
                self._start_copy("d2h", self.queue.pop(0))
        if going and gap and self.may_start("h2d"):
            self._charge(going, gap.block, 1)
            gap.on_host = False
            if not gap.demand:
                going.early.append(gap)
            self._start_copy("h2d", Work(going, tensor=gap.tensor, block=gap.block))

    def _start_copy(self, direction: Direction, copy: Work) -> None:
        lasts_ns, spans = self.machine.d2h_ns if direction == "d2h" else self.machine.h2d_ns, copy.job.spans
        copy.span, copy.left = len(spans), lasts_ns(copy.job.nbytes(copy.block)) * ALONE
        spans.append(Span(self.now, 0, direction, "swap_out" if direction == "d2h" else "swap_in", copy.tensor))
        self.copies[direction] = copy

    def _fits(self, job: JobState, gap: Gap) -> bool:
        """Returns whether a swap-in fits by rules 5 and J4, given planned residency and earlier swap-ins."""
        nbytes, share = job.nbytes(gap.block), job.job.share(job.plan)
        own = NEVER if share is None or self.served is job else share
        if self.used + nbytes > self._limit_at(job, job.position) or job.held + nbytes > own:
            return False
        kernel_runs = job.running and not job.next_step.again
        for p in range(job.position + kernel_runs, job.position if gap.demand else gap.before):
            early = sum(job.nbytes(g.block) for g in job.early if g.before > p)
            if job.schedule.residency[p % job.n] + early + nbytes > min(own, self._limit_at(job, p)):
                return False
        return True

    def start_steps(self) -> None:
        """Starts steps."""
        while True:
            for job in self.present:
                if not self._ready(job):
                    job.ready_since = None
                elif job.ready_since is None:
                    job.ready_since = self.now
            if self.sharing == "fifo" and self.steps:
                return
            ready = [(job.ready_since, job.index, job) for job in self.present if job.ready_since is not None]
            if not ready:
                return
            self._start(min(ready)[2])

    def _ready(self, job: JobState) -> bool:
        return self._has_room(job) and (self.host is None or self.host.is_ahead(self.now))

    def _has_room(self, job: JobState) -> bool:
        """Returns whether the next step has its data and its memory."""
        if job.running or job.leaving or self.served not in (None, job) or job.held_up():
            return False
        return self.used + job.requested() <= self._limit_at(job, job.position)

    def _waits_for_host(self, job: JobState) -> bool:
        """Returns whether the next step lacks only its issue."""
        return self.host is not None and self._has_room(job) and not self.host.is_ahead(self.now)

    def _start(self, job: JobState) -> None:
        step, begin = job.next_step, self.now
        for b in step.allocates:
            self._charge(job, b, 1)
        if self.sharing == "fifo" and self.stepped not in (None, job) and self.machine.switch_ns:
            begin += self.machine.switch_ns
            job.spans.append(Span(self.now, begin, "compute", "switch", step.subject))
        job.spans.append(Span(begin, 0, "compute", step.kind, step.subject))
        lasts = begin - self.now + job.lasts_ns(step)
        if not step.again:
            lasts += self.machine.wait_ns * job.schedule.waited[step.kernel]
            lasts += self.machine.event_ns * (step.kernel in job.schedule.signals)
        if self.host:
            self.host.ahead -= 1
        self.steps.append(Work(job, len(job.spans) - 1, lasts * ALONE))
        job.running, job.ready_since, self.stepped = True, None, job
        if self.served is job:
            self.served = None

    def advance(self) -> None:
        """Advances the clock to the next completion, arrival or departure; or evicts a tensor if none is due."""
        ends = [work.ends(self.now, speed) for work, speed in self.under_way()]
        if self.host and self._waits_for_host(self.present[0]):
            self.host.waited = True
            ends.append(self.host.next_ns)
        if not ends and self.present:
            self._evict()
            return
        ends += [t for j in self.waiting for t in (self.jobs[j].arrives_ns, self.leaves[j]) if t > self.now]
        then = min(ends)
        for job in self.present:
            if not job.running and not job.leaving:
                job.wait(self.now, then, self._cause(job))
        for work, speed in self.under_way():
            work.left -= speed * (then - self.now)
        self.now = then

    def _cause(self, job: JobState) -> Cause:
        """Returns why the next step does not start (rule 8)."""
        if job.ready_since is not None:
            return "compute"
        if self._waits_for_host(job):
            return "issue"
        return "data" if "h2d" in self.copies and job.awaited() else "memory"

    def _evict(self) -> None:
        """Evicts one tensor on demand (J6)."""
        before = self.served
        self.served = before or min(self.present, key=lambda job: (job.waits_since, job.index))
        best: tuple[tuple[int, ...], JobState, int] | None = None
        host_left = self._host_left()
        for job in self.present:
            touched = job.schedule.touched[job.step]
            for b in job.memory:
                tensor, nbytes, *_ = job.schedule.blocks[b]
                if not nbytes or nbytes > host_left or (job is self.served and b in touched):
                    continue
                tier = 2 if b in touched else int(job is self.served)
                _, ns = job.schedule.next_touch(b, job.step)
                key = (tier, -ns, -nbytes, job.index, tensor, b)
                if best is None or key < best[0]:
                    best = key, job, b
        if best is None and before is None:
            return
        if best is None:
            asks = [
                f"{job.job.name!r} asks for {job.requested():,} bytes for kernel {job.next_step.kernel}"
                + "".join(f" and {job.nbytes(gap.block):,} for tensor {gap.tensor}" for gap in job.awaited())
                for job in self.present
            ]
            raise JobsDeadlock(f"no job can go on at {self.now} ns, and the host is full: {'; '.join(asks)}")
        _, job, b = best
        tensor, nbytes, *_ = job.schedule.blocks[b]
        self.evictions.append(Eviction(self.now, job.index, tensor, b, nbytes, self.served.index))
        gap = job.evicted[b] = replace(job.gap_on_demand(b), host_bytes=nbytes)
        if job.host_copy.get(tensor) == b:
            self._release(job, gap)
        else:
            self._enqueue(job, tensor, b)

    def state(self, job: JobState) -> tuple[object, ...]:
        """Returns everything at a boundary that determines the future of a single job, in relative times (rule 10)."""
        at = job.position
        return (
            self.host and self.host.lead(self.now, len(job.boundaries) >= self.host.settles_after),
            frozenset((direction, copy.tensor, copy.left) for direction, copy in self.copies.items()),
            tuple((copy.tensor, copy.issued - at) for copy in self.queue),
            frozenset((t, g.before - at, g.ready - at, g.left, g.on_host) for t, g in job.away.items()),
            frozenset((g.tensor, g.before - at) for g in job.early if g.before > at),
            frozenset(job.host_copy.items()),
            self.used,
        )

    def timeline(self) -> JobsTimeline:
        """Returns the timeline of all jobs."""
        end = max((job.left_ns for job in self.states if job.left_ns is not None), default=self.now)
        ran, order = tuple(job.timeline() for job in self.states), tuple(self.order)
        peak = max(used for _, used in merged_curve(ran, order))
        return JobsTimeline(self.limit, self.sharing, end, peak, ran, order, tuple(self.evictions))


def simulate_jobs(
    jobs: Sequence[Job], machine: Machine, limit: int, until_ns: int | None = None, sharing: Sharing = "fifo"
) -> JobsTimeline:
    """Simulates several jobs on one machine by the rules in RULES.md.

    Args:
        jobs: Programs with their plans and iterations.
        machine: Machine that the jobs share.
        limit: Memory limit in bytes for all jobs together, persistent tensors included.
        until_ns: Time from which every job leaves at its next boundary and none is admitted; None: no such time.
        sharing: "fifo": one step at a time on the compute stream; "shared": one step of each job, at reduced speed.

    Raises:
        ValueError: A job has no end.
        PlanError: A plan does not fit its program, or holds more bytes on the host than the machine has.
        OutOfMemory: A step of a job does not fit under the limit with everything else evicted.
        JobsDeadlock: No job can proceed, because the host is full.
    """
    for job in jobs:
        for plan in job.plans:
            plan.check(job.program)
            plan.only("a job among several", "swap", "recompute", "rerun")
    plans = [[lower(job.program, plan) for plan in job.plans] for job in jobs]
    check_jobs(jobs, plans, machine, limit, until_ns)
    world = World(jobs, plans, machine, limit, until_ns, sharing)
    while True:
        world.complete_copies()
        world.complete_steps()
        world.part()
        world.admit()
        if not world.present and not world.waiting:
            return world.timeline()
        world.start_copies()
        world.start_steps()
        world.advance()


def simulate(
    program: Program, plan: Plan, machine: Machine, limit: int, iterations: int = 2, limit_until: int | None = None
) -> Timeline:
    """Simulates one program until its iterations repeat (rule 10); parameters as in ``simulator.simulate``."""
    plan.check(program)
    schedule = lower(program, plan)
    until = len(program.kernels) if limit_until is None else limit_until
    check_room(schedule, machine, limit, until)
    world = World([Job("", program, plan)], [[schedule]], machine, limit, None, "fifo", until)
    job = world.begin(0, 0)
    if machine.issue_ns and any(step.duration_ns for step in schedule.steps):
        world.host = Host(schedule, machine, max(iterations, MAX_ITERATIONS))
    states = [world.state(job)]  # before the first iteration and after each
    while True:
        world.complete_copies()
        world.complete_steps()
        if len(job.boundaries) == len(states):
            states.append(world.state(job))
            period = _period(states, job.boundaries)
            if len(job.boundaries) >= iterations and (period or len(job.boundaries) >= MAX_ITERATIONS):
                break
        world.start_copies()
        world.start_steps()
        world.advance()
        if world.served:
            raise AssertionError("simulation is stuck although the planned residency fits the limit")
    for work, speed in world.under_way():
        job.spans[work.span] = job.spans[work.span]._replace(end_ns=work.ends(world.now, speed))
    return Timeline.assemble(
        program, limit, schedule.required_bytes, job.boundaries, job.spans, job.events, job.events_until, job.stalls,
        period,
    )  # fmt: skip


def _period(states: Sequence[object], boundaries: Sequence[int]) -> int:
    """Returns after how many iterations the state has recurred; 0: never, or the last one was not the slowest."""
    *before, present = states
    if present not in before:
        return 0
    period = before[::-1].index(present) + 1
    ends = [0, *boundaries]
    lasts = [end - begin for begin, end in pairwise(ends[-period - 1 :])]
    return period if lasts[-1] == max(lasts) else 0
