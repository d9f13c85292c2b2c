"""Reference implementation of the simulator's rules, for one job or several.

RULES.md states the rules; comments cite its numbers. ``compiled/`` must agree with this file to the nanosecond.
``schedule.py`` computes everything that needs no clock, ``job_state.py`` has the state of one job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from simulator.job import Cause, Eviction, Job, JobsDeadlock, JobsTimeline, Sharing, merged_curve
from simulator.job_state import Activity, Direction, Host, JobState, OpenGap, check_jobs, reserved_bytes
from simulator.machine import ALONE, Machine
from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.schedule import MAX_ITERATIONS, NEVER, Schedule, check_room, lower
from simulator.timeline import BlockEvent, Span, Timeline


class World:
    """State of a simulation; one method per line of rule 9."""

    def __init__(
        self,
        jobs: Sequence[Job],
        plans: Sequence[Sequence[Schedule]],
        machine: Machine,
        limit: int,
        until_ns: int | None,
        sharing: Sharing,
        limit_until: int = NEVER,
    ):
        self.jobs = jobs
        self.machine = machine
        self.sharing = sharing
        self.limit = limit
        self.limit_until = limit_until
        self.now = self.used = self.kernel_ends = 0
        latest_ns = NEVER if until_ns is None else until_ns
        self.leave_ns = [latest_ns if job.leaves_ns is None else min(latest_ns, job.leaves_ns) for job in jobs]
        self.pending = sorted(range(len(jobs)), key=lambda j: (jobs[j].arrives_ns, j))  # for admission
        self.admitted: list[JobState] = []  # by job
        self.queue: list[Activity] = []  # swap-outs
        self.copies: dict[Direction, Activity] = {}  # in flight, at most one per direction
        self.steps: list[Activity] = []  # running
        self.last_job: JobState | None = None  # job whose step was the last to start
        self.served_job: JobState | None = None
        self.event_jobs: list[int] = []
        self.evictions: list[Eviction] = []
        self.states = [JobState(j, job, schedules) for j, (job, schedules) in enumerate(zip(jobs, plans, strict=True))]
        self.host: Host | None = None  # for a single job with issue costs

    def _limit_at(self, job: JobState, position: int) -> int:
        """Returns the limit at a position (choice d)."""
        return self.limit if position % job.n < self.limit_until else NEVER

    def _charge(self, job: JobState, block: int, sign: int) -> None:
        owner, nbytes, *_ = job.schedule.blocks[block]
        self.used += sign * nbytes
        job.resident_bytes += sign * nbytes
        (job.resident.add if sign > 0 else job.resident.remove)(block)
        if nbytes:
            job.events.append(BlockEvent(self.now, owner, block, sign * nbytes))
            self.event_jobs.append(job.index)

    def _release(self, job: JobState, gap: OpenGap) -> None:
        """Frees the memory of an open gap whose swap-out is complete."""
        gap.is_freed = gap.on_host = True
        self._charge(job, gap.block, -1)

    def _enqueue(self, job: JobState, tensor: int, block: int) -> None:
        """Enqueues a swap-out, unless one of this block is queued or in flight."""
        swap_outs = [*self.queue, *(copy for d, copy in self.copies.items() if d == "d2h")]
        if not any(c.job is job and c.block == block and not c.is_stale for c in swap_outs):
            self.queue.append(Activity(job, tensor=tensor, block=block, issued=self.kernel_ends))

    def _step_speed(self, step: Activity) -> int:
        """Returns the speed of a step beside other steps (J2) and copies (k)."""
        kernel = step.job.schedule.program.kernels[step.job.next_step.kernel]
        loss = len(self.copies) * self.machine.copy_loss(kernel.bytes, kernel.duration_ns)
        return self.machine.compute_share(len(self.steps)) - loss

    def in_flight(self) -> list[tuple[Activity, int]]:
        """Returns running steps and copies with their speeds in 1 / ALONE; opposite copies slow each other down (g)."""
        shares = {"d2h": self.machine.d2h_share, "h2d": self.machine.h2d_share}
        is_duplex = len(self.copies) == 2
        copies = [(copy, shares[direction] if is_duplex else ALONE) for direction, copy in self.copies.items()]
        return [*copies, *((step, self._step_speed(step)) for step in self.steps)]

    def may_start(self, direction: Direction) -> bool:
        """Returns whether the copy engine is free."""
        return direction not in self.copies and not (self.machine.copy_engines == 1 and self.copies)

    def _pop_completed(self, direction: Direction) -> Activity | None:
        """Removes and returns the copy in this direction if it is complete."""
        is_done = direction in self.copies and self.copies[direction].remaining <= 0
        return self._close_span(self.copies.pop(direction)) if is_done else None

    def _close_span(self, work: Activity) -> Activity:
        spans = work.job.spans
        spans[work.span] = spans[work.span]._replace(end_ns=self.now)
        return work

    # ------------------------------------------------------------------------------------ completions

    def complete_copies(self) -> None:
        """Completes copies."""
        if swap_out := self._pop_completed("d2h"):
            job = swap_out.job
            if swap_out.block in job.evicted:
                self._release(job, job.evicted[swap_out.block])
            elif not swap_out.is_stale:
                job.host_copies[swap_out.tensor] = swap_out.block
                if swap_out.tensor in job.gaps:
                    self._release(job, job.gaps[swap_out.tensor])
        if swap_in := self._pop_completed("h2d"):
            job = swap_in.job
            if job.evicted.pop(swap_in.block, None) is None:
                del job.gaps[swap_in.tensor]

    def complete_steps(self) -> None:
        """Completes steps: frees blocks, opens gaps, enqueues swap-outs, and changes plans at a boundary."""
        ended = [self._close_span(step).job for step in self.steps if step.remaining <= 0]
        self.steps = [step for step in self.steps if step.remaining > 0]
        for job in sorted(ended, key=lambda job: job.index):
            self._complete(job)

    def _complete(self, job: JobState) -> None:
        step = job.next_step
        schedule = job.schedule
        job.is_running = False
        job.waits_since = self.now
        if self.host:
            self.host.complete(step, self.now)
        for b in step.frees:
            self._charge(job, b, -1)
        job.step += 1
        if step.is_recomputation:
            return
        self.kernel_ends += 1
        program = schedule.program
        kernel = program.kernels[step.kernel]
        for t in kernel.outputs:
            job.host_copies.pop(t, None)
            for copy in (*self.queue, *self.copies.values()):
                if copy.job is job and copy.block == step.uses[t]:
                    copy.is_stale = True
        self.queue = [copy for copy in self.queue if not copy.is_stale]
        for t in kernel.accesses:
            if not program.tensors[t].persistent and program.accesses[t][-1] == step.kernel:
                job.host_copies.pop(t, None)
        for d in step.copies:
            if d.tensor not in job.host_copies:
                self._enqueue(job, d.tensor, schedule.moved[d])
        for d in step.opens:
            self._open_gap(job, d, job.position)
        job.position += 1
        job.ended_before.append(self.kernel_ends)
        job.prefetched = [gap for gap in job.prefetched if gap.before >= job.position]
        if job.position % job.n == 0:
            self._end_iteration(job)

    def _open_gap(self, job: JobState, d: Swap, position: int) -> None:
        """Opens the gap of d; its copy is already queued or in flight unless the plan has changed since."""
        gap = job.gaps[d.tensor] = job.gap_of(d, position)
        if d.tensor in job.host_copies:
            self._release(job, gap)
        else:
            self._enqueue(job, d.tensor, gap.block)

    def _end_iteration(self, job: JobState) -> None:
        job.step = 0
        job.boundaries.append(self.now)
        job.events_until.append(len(job.events))
        if len(job.boundaries) == job.job.iterations or self.now >= self.leave_ns[job.index]:
            job.is_leaving = True
            self.queue = [copy for copy in self.queue if copy.job is not job]
        elif (plan := self._due_plan(job.index)) != job.plan:
            job.switches.append((self.now, plan))
            self._switch_plan(job, plan)

    def _due_plan(self, j: int) -> int:
        """Returns the index into ``Job.plans`` of the plan that is due now."""
        return sum(at_ns <= self.now for at_ns, _ in self.jobs[j].switches)

    def _switch_plan(self, job: JobState, plan: int) -> None:
        """Changes plans (J7). At a boundary, evicted tensors are persistent and have the same block in every plan."""
        evicted = {gap.block: gap for gap in (*job.gaps.values(), *job.evicted.values())}
        is_unchanged = job.job.equivalent_plans[plan] == job.job.equivalent_plans[job.plan]
        job.set_plan(plan)
        if is_unchanged:
            return
        job.position = 0
        job.ended_before = [self.kernel_ends]
        job.gaps = {}
        job.evicted = {}
        job.prefetched = []
        for d in job.swaps_open_at_start():
            previous = evicted.pop(job.schedule.moved[d], None)
            if previous is None:
                self._open_gap(job, d, d.after - job.n)
                continue
            gap = job.gaps[d.tensor] = job.gap_of(d, d.after - job.n)
            gap.is_freed = previous.is_freed
            gap.on_host = previous.on_host
            if gap.on_host:
                job.host_copies[d.tensor] = gap.block
            elif gap.is_freed:  # being swapped in
                job.prefetched.append(gap)
        for block, previous in evicted.items():
            gap = job.evicted[block] = job.gap_on_demand(block)
            gap.is_freed = previous.is_freed
            gap.on_host = previous.on_host
            gap.host_bytes = previous.host_bytes
        leaving = {gap.block for gap in (*job.gaps.values(), *job.evicted.values()) if not gap.is_freed}
        self.queue = [copy for copy in self.queue if copy.job is not job or copy.block in leaving]

    def remove_leaving(self) -> None:
        """Removes leaving jobs without copies in flight."""
        copying = [copy.job for copy in self.copies.values()]
        for job in [job for job in self.admitted if job.is_leaving and job not in copying]:
            for b in sorted(job.resident):
                self._charge(job, b, -1)
            job.left_ns = self.now
            self.admitted.remove(job)

    # ---------------------------------------------------------------------------------------- starts

    def admit(self) -> None:
        """Admits jobs."""
        for j in [j for j in self.pending if self.leave_ns[j] <= self.now]:
            self.pending.remove(j)
            self.states[j].record_stall(self.jobs[j].arrives_ns, self.now, "admission")
        while self.pending and self.jobs[self.pending[0]].arrives_ns <= self.now and self.served_job is None:
            j = self.pending[0]
            plan = self._due_plan(j)
            needed_bytes = self.states[j].plans[plan].admission_bytes
            if self.used + needed_bytes > self.limit or self._host_left() < reserved_bytes(self.states[j].plans):
                break
            self.begin(j, plan)

    def begin(self, j: int, plan: int) -> JobState:
        """Starts a job with one of its plans."""
        self.pending.remove(j)
        job = self.states[j]
        job.begin(plan, self.now, self.kernel_ends)
        self.admitted = sorted([*self.admitted, job], key=lambda job: job.index)
        for d in job.swaps_open_at_start():
            gap = job.gaps[d.tensor] = job.gap_of(d, d.after - job.n)
            gap.is_freed = gap.on_host = True
            job.host_copies[d.tensor] = gap.block
        for d, block in job.schedule.moved.items():
            if d.tensor not in job.gaps and d.copy is not None and d.copy > d.after:
                job.host_copies[d.tensor] = block
        for b, entry in enumerate(job.schedule.blocks):
            if entry.first < 0 and entry.owner not in job.gaps:
                self._charge(job, b, 1)
        job.events_until.append(len(job.events))
        return job

    def _host_left(self) -> int:
        """Returns the free bytes of the host (J9)."""
        planned = sum(reserved_bytes(job.plans) for job in self.admitted)
        return self.machine.host_bytes - planned - sum(g.host_bytes for j in self.admitted for g in j.evicted.values())

    def start_copies(self) -> None:
        """Starts copies."""
        for job in self.admitted:
            may_swap_in = not job.is_leaving and self.served_job in (None, job)
            gap = job.first_swap_in(self.served_job is job) if may_swap_in else None
            if gap is not job.next_swap_in:
                job.next_swap_in = gap
                job.swap_in_since = self.now
        chosen = min(
            (job for job in self.admitted if job.next_swap_in and self._swap_in_fits(job, job.next_swap_in)),
            key=lambda job: (job.swap_in_since, job.index),
            default=None,
        )
        is_single = self.machine.copy_engines == 1
        gap = chosen.next_swap_in if chosen else None
        if self.queue and self.may_start("d2h"):
            copy = self.queue[0]
            if not (is_single and chosen and gap and gap.pinned and chosen.issued_at(gap) < copy.issued):
                self._start_copy("d2h", self.queue.pop(0))
        if chosen and gap and self.may_start("h2d"):
            self._charge(chosen, gap.block, 1)
            gap.on_host = False
            if not gap.on_demand:
                chosen.prefetched.append(gap)
            self._start_copy("h2d", Activity(chosen, tensor=gap.tensor, block=gap.block))

    def _start_copy(self, direction: Direction, copy: Activity) -> None:
        copy_ns = self.machine.d2h_ns if direction == "d2h" else self.machine.h2d_ns
        spans = copy.job.spans
        copy.span, copy.remaining = len(spans), copy_ns(copy.job.nbytes(copy.block)) * ALONE
        spans.append(Span(self.now, 0, direction, "swap_out" if direction == "d2h" else "swap_in", copy.tensor))
        self.copies[direction] = copy

    def _swap_in_fits(self, job: JobState, gap: OpenGap) -> bool:
        """Returns whether a swap-in fits by rules 5 and J4, given planned residency and earlier swap-ins."""
        nbytes = job.nbytes(gap.block)
        share = job.job.share(job.plan)
        job_limit = NEVER if share is None or self.served_job is job else share
        if self.used + nbytes > self._limit_at(job, job.position) or job.resident_bytes + nbytes > job_limit:
            return False
        is_kernel_running = job.is_running and not job.next_step.is_recomputation
        for p in range(job.position + is_kernel_running, job.position if gap.on_demand else gap.before):
            early_bytes = sum(job.nbytes(g.block) for g in job.prefetched if g.before > p)
            if job.schedule.residency[p % job.n] + early_bytes + nbytes > min(job_limit, self._limit_at(job, p)):
                return False
        return True

    def start_steps(self) -> None:
        """Starts steps."""
        while True:
            for job in self.admitted:
                if not self._is_ready(job):
                    job.ready_since = None
                elif job.ready_since is None:
                    job.ready_since = self.now
            if self.sharing == "fifo" and self.steps:
                return
            ready = [(job.ready_since, job.index, job) for job in self.admitted if job.ready_since is not None]
            if not ready:
                return
            self._start_step(min(ready)[2])

    def _is_ready(self, job: JobState) -> bool:
        return self._has_room(job) and (self.host is None or self.host.has_issued(self.now))

    def _has_room(self, job: JobState) -> bool:
        """Returns whether the next step has its data and its memory."""
        if job.is_running or job.is_leaving or self.served_job not in (None, job) or job.is_blocked():
            return False
        return self.used + job.requested_bytes() <= self._limit_at(job, job.position)

    def _waits_for_host(self, job: JobState) -> bool:
        """Returns whether the next step lacks only its issue."""
        return self.host is not None and self._has_room(job) and not self.host.has_issued(self.now)

    def _start_step(self, job: JobState) -> None:
        step = job.next_step
        begin = self.now
        for b in step.allocates:
            self._charge(job, b, 1)
        if self.sharing == "fifo" and self.last_job not in (None, job) and self.machine.switch_ns:
            begin += self.machine.switch_ns
            job.spans.append(Span(self.now, begin, "compute", "switch", step.subject))
        job.spans.append(Span(begin, 0, "compute", step.kind, step.subject))
        duration_ns = begin - self.now + job.duration_ns(step)
        if not step.is_recomputation:
            duration_ns += self.machine.wait_ns * job.schedule.waited[step.kernel]
            duration_ns += self.machine.event_ns * (step.kernel in job.schedule.signals)
        if self.host:
            self.host.issued -= 1
        self.steps.append(Activity(job, len(job.spans) - 1, duration_ns * ALONE))
        job.is_running, job.ready_since, self.last_job = True, None, job
        if self.served_job is job:
            self.served_job = None

    def advance(self) -> None:
        """Advances the clock to the next completion, arrival or departure; or evicts a tensor if none is due."""
        ends = [work.completion_ns(self.now, speed) for work, speed in self.in_flight()]
        if self.host and self._waits_for_host(self.admitted[0]):
            self.host.has_waited = True
            ends.append(self.host.next_ns)
        if not ends and self.admitted:
            self._evict()
            return
        ends += [t for j in self.pending for t in (self.jobs[j].arrives_ns, self.leave_ns[j]) if t > self.now]
        next_ns = min(ends)
        for job in self.admitted:
            if not job.is_running and not job.is_leaving:
                job.record_stall(self.now, next_ns, self._stall_cause(job))
        for work, speed in self.in_flight():
            work.remaining -= speed * (next_ns - self.now)
        self.now = next_ns

    def _stall_cause(self, job: JobState) -> Cause:
        """Returns why the next step does not start (rule 8)."""
        if job.ready_since is not None:
            return "compute"
        if self._waits_for_host(job):
            return "issue"
        return "data" if "h2d" in self.copies and job.awaited_gaps() else "memory"

    def _evict(self) -> None:
        """Evicts one tensor on demand (J6)."""
        previous = self.served_job
        self.served_job = previous or min(self.admitted, key=lambda job: (job.waits_since, job.index))
        best: tuple[tuple[int, ...], JobState, int] | None = None
        host_left = self._host_left()
        for job in self.admitted:
            touched_blocks = job.schedule.touched[job.step]
            for b in job.resident:
                tensor, nbytes, *_ = job.schedule.blocks[b]
                if not nbytes or nbytes > host_left or (job is self.served_job and b in touched_blocks):
                    continue
                tier = 2 if b in touched_blocks else int(job is self.served_job)
                _, ns = job.schedule.next_touch(b, job.step)
                key = (tier, -ns, -nbytes, job.index, tensor, b)
                if best is None or key < best[0]:
                    best = key, job, b
        if best is None and previous is None:
            return
        if best is None:
            requests = [
                f"{job.job.name!r} asks for {job.requested_bytes():,} bytes for kernel {job.next_step.kernel}"
                + "".join(f" and {job.nbytes(gap.block):,} for tensor {gap.tensor}" for gap in job.awaited_gaps())
                for job in self.admitted
            ]
            raise JobsDeadlock(
                f"no job can go on at {self.now} ns, and the host is full: {'; '.join(requests)}: raise the limit or "
                "machine.host_bytes"
            )
        _, job, b = best
        tensor, nbytes, *_ = job.schedule.blocks[b]
        self.evictions.append(Eviction(self.now, job.index, tensor, b, nbytes, self.served_job.index))
        gap = job.evicted[b] = replace(job.gap_on_demand(b), host_bytes=nbytes)
        if job.host_copies.get(tensor) == b:
            self._release(job, gap)
        else:
            self._enqueue(job, tensor, b)

    def state(self, job: JobState) -> tuple[object, ...]:
        """Returns everything at a boundary that determines the future of a single job, in relative times (rule 10)."""
        p = job.position
        return (
            self.host and self.host.lead(self.now, len(job.boundaries) >= self.host.settles_after),
            frozenset((direction, copy.tensor, copy.remaining) for direction, copy in self.copies.items()),
            tuple((copy.tensor, copy.issued - p) for copy in self.queue),
            frozenset((t, g.before - p, g.ready - p, g.is_freed, g.on_host) for t, g in job.gaps.items()),
            frozenset((g.tensor, g.before - p) for g in job.prefetched if g.before > p),
            frozenset(job.host_copies.items()),
            self.used,
        )

    def timeline(self) -> JobsTimeline:
        """Returns the timeline of all jobs."""
        end = max((job.left_ns for job in self.states if job.left_ns is not None), default=self.now)
        timelines = tuple(job.timeline() for job in self.states)
        order = tuple(self.event_jobs)
        peak = max(used for _, used in merged_curve(timelines, order))
        return JobsTimeline(self.limit, self.sharing, end, peak, timelines, order, tuple(self.evictions))


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

    Returns:
        One timeline per job, the order of block events, and the evictions; times in ns.

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
        world.remove_leaving()
        world.admit()
        if not world.admitted and not world.pending:
            return world.timeline()
        world.start_copies()
        world.start_steps()
        world.advance()


def simulate(
    program: Program, plan: Plan, machine: Machine, limit: int, iterations: int = 2, limit_until: int | None = None
) -> Timeline:
    """Simulates one program until its iterations repeat (rule 10).

    Arguments, result and errors are those of ``simulator.simulate``.
    """
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
        if world.served_job:
            raise AssertionError(
                "simulation is stuck although the planned residency fits the limit; report it with program and plan"
            )
    for work, speed in world.in_flight():
        job.spans[work.span] = job.spans[work.span]._replace(end_ns=work.completion_ns(world.now, speed))
    return Timeline.assemble(
        program,
        limit,
        schedule.required_bytes,
        job.boundaries,
        job.spans,
        job.events,
        job.events_until,
        job.stalls,
        period,
    )


def _period(states: Sequence[object], boundaries: Sequence[int]) -> int:
    """Returns after how many iterations the state recurs; 0 if never, or if the cycle's last one is not its slowest."""
    *earlier, current = states
    if current not in earlier:
        return 0
    period = earlier[::-1].index(current) + 1
    ends = [0, *boundaries]
    durations = [end - begin for begin, end in pairwise(ends[-period - 1 :])]
    return period if durations[-1] == max(durations) else 0
