"""The rules of several programs on one machine, written to be read: the definition of what is true.

``engine.py`` has the same rules compiled, and must agree with this file to the nanosecond. Those of one program are in
``simulator.reference``; their numbers are said so.

1. Each job keeps rules 1 to 9 of one program, with its own schedule, order and gaps. Shared are the limit and its
   ledger, the compute stream, the copy engines and the link.
2. A step is ready from the first instant at which its data is there and its memory fits, as long as that stays so.
   "fifo": one step at a time; the one that has been ready longest starts (then the lower job). Where it is of another
   job than the step before, its memory is taken now and it begins ``Machine.switch_ns`` later.
   "shared": a step of each job at a time; all that are ready start, in that order. k at once go at
   ``Machine.compute_share(k)`` of their speed each, reckoned as transfers that share the link are (choice g there).
3. The swap-outs of all jobs go in one FIFO, in order of issue (then by job). Each job offers the first of its tensors
   to return (rule 5 there). The one that has been offered longest, of those that fit, goes first (then the lower job):
   one that does not fit holds up those of its own job only. With one copy engine a swap-in with a ``prefetch`` that
   was issued before the first swap-out goes before it (choice b there); what was issued when is counted in kernels of
   all jobs; before a change of plans is at the change.
4. Does a swap-in fit? Now, beside all that is in use; and until its use, by its own job's planned residency alone.
   The swap-ins of a job ``within`` its plan's limit fit that, too: now, beside what it holds itself, and until their
   use. Its steps take what is free all the same. While it is served (6) its plan's limit is not asked for.
5. A job begins at the first instant from its arrival on at which there is room for what is resident before its first
   iteration and for what its first step allocates and waits for; FIFO by arrival (then by job). The host keeps free
   what its plan holds there (rule 9), which must fit, too. A job that would have to leave before that never begins. At
   the boundary at which it leaves, its queued copies are dropped; when those under way have ended, its memory is free.
6. Deadlock: jobs are there, nothing is under way, nothing can start. Then the job whose last step ended first (then
   the lower job) is **served** until its next step starts: until then no other step starts, nothing comes back but
   what that step waits for, and nobody is admitted. One tensor is evicted on demand, if there is any; and another, when
   nothing is under way again and the step still cannot start. Which one:
   (a) of other jobs, not touched by their next step; else of the served job, not touched by its next; else of other
       jobs;
   (b) of these the one whose next touch is furthest ahead, in ns of its own job's steps; then the larger, the lower
       job, the lower tensor, the lower block.
   A step **touches** what it reads, writes or frees, and what is copied or sent away at its end. The evicted tensor is
   copied to the host unless a copy that its plan made of this block is valid (until the tensor's last use in program
   order). It is back before the next step that touches it, which waits for it, or stays away where none does. It may
   come back at once, as its job's planned residency counts it; its copy is then given up.
   So every step gets what it needs in the end: only a full host (rule 9) can stop the jobs, and raises JobsDeadlock. A
   step that does not fit with everything else away is refused before the start (OutOfMemory).
7. A new plan takes effect at a boundary, or at the admission; one with the same decisions changes nothing. Tensors
   that it has away there leave if they are in memory, and stay away, or on the way, if they are not. Tensors that it
   has in memory and that are not come back as if they had been evicted on demand. Queued copies of the old plan that
   no open gap waits for are dropped; one under way does not count if the tensor is written meanwhile. Where the new
   plan finds no copy that it would have issued before the switch, it is issued as the gap opens.
8. One job alone without switches does what ``simulator.simulate`` says, iteration by iteration, if that can run its
   plan.
9. The host has room for what the plans hold there (``Schedule.on_host``; of a job that changes plans, those two
   together that hold most), from the admission of their jobs, and for every tensor that is away on demand. Where it
   would be full, a candidate is passed over.
10. A job leaves after ``iterations``, or at its first boundary from ``leaves_ns`` on; from ``until_ns`` on they all
    do. The simulation ends when all have left.
11. Kernels, and those that run again, take the time of their plan's variants, else the program's; with ``durations``
    that of the iteration's row. What it will be is not known before: 6 (b) goes by the former all the same.
12. A tenant takes ``share`` of the link from ``at_ns`` on. Copies go at 1 - share (at least 2⁻²⁰) of the speed that
    they would have otherwise, in whole units of 2⁻²⁰; reckoned anew at ``at_ns``, before copies complete.

13. Iteration i of a job with ``steps`` runs entry i mod len of them, another program under another plan, which takes
    effect as a new plan does (7). Persistent tensors are the same by name; one that a program lacks stays as it is.

At one instant: the tenant's share changes, copies complete (d2h first), steps complete (by job), jobs that leave are
gone, jobs are admitted, copies start (d2h first), steps start. A waiting job's stall is for compute where its step is
ready, else for data where a tensor is missing and a swap-in is under way, else for memory; before its admission it is
for admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simulator.jobs.lowered import NEVER, Lowered, check, left_by, reserved_bytes
from simulator.jobs.nouns import (
    Eviction,
    Job,
    JobsDeadlock,
    JobsTimeline,
    JobTimeline,
    Sharing,
    Stall,
    Tenant,
    in_order,
)
from simulator.jobs.resident import Gap, Resident, Work
from simulator.machine import ALONE, Machine
from simulator.plan import Swap
from simulator.timeline import BlockEvent, Span


class _Machine:
    """The state of a simulation; one method per line of the last paragraph."""

    def __init__(self, jobs: Sequence[Job], plans: Sequence[Sequence[Lowered]], machine: Machine, limit: int,
                 until_ns: int | None, sharing: Sharing, tenant: Tenant):  # fmt: skip
        self.free, self.tenant = ALONE, left_by(tenant)  # speed that the tenant leaves now, and from when on
        self.jobs, self.plans, self.machine, self.limit, self.sharing = jobs, plans, machine, limit, sharing
        self.now = self.used = self.kernel_ends = 0
        never = NEVER if until_ns is None else until_ns
        self.leaves = [min(never, NEVER if job.leaves_ns is None else job.leaves_ns) for job in jobs]
        self.waiting = sorted(range(len(jobs)), key=lambda j: (jobs[j].arrives_ns, j))  # for admission
        self.present: list[Resident] = []  # by job
        self.gone: list[Resident] = []
        self.queue: list[Work] = []  # to the host
        self.out: Work | None = None
        self.back: Work | None = None
        self.link_reckoned = self.compute_reckoned = 0  # when the work of copies was, and of steps
        self.steps: list[Work] = []  # under way
        self.stepped: Resident | None = None  # whose step was the last to start
        self.served: Resident | None = None
        self.order: list[int] = []
        self.evictions: list[Eviction] = []
        self.switches: list[list[tuple[int, int]]] = [[] for _ in jobs]
        self.admitted: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.unserved: dict[int, Stall] = {}  # of jobs that never began

    def _charge(self, job: Resident, block: int, sign: int) -> None:
        owner, nbytes, *_ = job.schedule.blocks[block]
        self.used += sign * nbytes
        job.held += sign * nbytes
        (job.memory.add if sign > 0 else job.memory.remove)(block)
        if nbytes:
            job.events.append(BlockEvent(self.now, owner, block, sign * nbytes))
            self.order.append(job.index)

    def _release(self, job: Resident, gap: Gap) -> None:
        """The bytes of an open gap have left."""
        gap.left = gap.on_host = True
        self._charge(job, gap.block, -1)

    # ------------------------------------------------------------- what is under way: the link, and compute

    def _rate(self, copy: Work) -> int:
        share = self.machine.d2h_share if copy is self.out else self.machine.h2d_share
        return max(1, (share if self.out and self.back else ALONE) * self.free // ALONE)

    def _reckon_link(self) -> None:
        """Before a copy starts or when one ends: what is left of both."""
        for copy in (self.out, self.back):
            if copy:
                copy.work -= self._rate(copy) * (self.now - self.link_reckoned)
        self.link_reckoned = self.now

    def _reckon_compute(self) -> None:
        """The same of steps."""
        done = self.machine.compute_share(len(self.steps)) * (self.now - self.compute_reckoned)
        for step in self.steps:
            step.work -= done
        self.compute_reckoned = self.now

    def _set_ends(self) -> None:
        """After something has started or ended: when does what is under way end?"""
        share = self.machine.compute_share(len(self.steps))
        for each, rate, reckoned in (
            *((copy, self._rate(copy), self.link_reckoned) for copy in (self.out, self.back) if copy),
            *((step, share, self.compute_reckoned) for step in self.steps),
        ):
            each.end = reckoned - (-each.work // rate)
            each.job.spans[each.span] = each.job.spans[each.span]._replace(end_ns=each.end)

    def _copy(self, copy: Work, lasts: int, span: Span) -> Work:
        self._reckon_link()
        copy.job.spans.append(span)
        copy.span, copy.work = len(copy.job.spans) - 1, lasts * ALONE
        return copy

    def _queued(self, job: Resident, block: int) -> bool:
        """Is there a copy of it to come?"""
        return any(c.job is job and c.block == block and not c.void for c in (*self.queue, self.out) if c)

    def _enqueue(self, job: Resident, tensor: int, block: int) -> None:
        if not self._queued(job, block):
            self.queue.append(Work(job, tensor=tensor, block=block, issued=self.kernel_ends))

    # ------------------------------------------------------------------------------------ completions

    def complete_copies(self) -> None:
        """The tenant takes more or less of the link; copies complete."""
        self._reckon_link()
        self.free = dict(self.tenant).get(self.now, self.free)
        out, back = self.out, self.back
        if out and out.end == self.now:
            self.out = None
            job = out.job
            if out.block in job.evicted:
                self._release(job, job.evicted[out.block])
            elif not out.void:
                job.host_copy[out.tensor] = out.block
                if out.tensor in job.away:
                    self._release(job, job.away[out.tensor])
        if back and back.end == self.now:
            self.back = None
            if back.job.evicted.pop(back.block, None) is None:
                del back.job.away[back.tensor]
        self._set_ends()

    def complete_steps(self) -> None:
        """Steps complete, blocks are freed, gaps open, swap-outs are enqueued; at a boundary plans change."""
        self._reckon_compute()
        ended = [step.job for step in self.steps if step.end == self.now]
        self.steps = [step for step in self.steps if step.end != self.now]
        self._set_ends()
        for job in sorted(ended, key=lambda job: job.index):
            self._complete(job)

    def _complete(self, job: Resident) -> None:
        step, schedule = job.next_step, job.schedule
        job.running, job.waits_since = False, self.now
        for b in step.frees:
            self._charge(job, b, -1)
        job.step += 1
        if step.rerun:
            return
        self.kernel_ends += 1
        program = schedule.program
        kernel = program.kernels[step.kernel]
        for t in kernel.outputs:
            job.host_copy.pop(t, None)
            for copy in (*self.queue, self.out):
                if copy and copy.job is job and copy.block == step.uses[t]:
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

    def _open(self, job: Resident, d: Swap, position: int) -> None:
        """The gap of d opens; its copy is under way, unless a change of plans came between."""
        gap = job.away[d.tensor] = job.gap_of(d, position)
        if d.tensor in job.host_copy:
            self._release(job, gap)
        else:
            self._enqueue(job, d.tensor, gap.block)

    def _boundary(self, job: Resident) -> None:
        job.step = 0
        job.boundaries.append(self.now)
        job.events_until.append(len(job.events))
        if len(job.boundaries) == job.job.iterations or self.now >= self.leaves[job.index]:
            job.leaving = True
            self.queue = [copy for copy in self.queue if copy.job is not job]
        elif (plan := self._plan_now(job.index, len(job.boundaries))) != job.plan:
            self.switches[job.index].append((self.now, plan))
            self._switch(job, plan)

    def _plan_now(self, j: int, iterations: int) -> int:
        """Which of its entries a job is to go by now, after so many iterations."""
        if self.jobs[j].steps:
            return iterations % len(self.jobs[j].steps)
        return sum(at_ns <= self.now for at_ns, _ in self.jobs[j].switches)

    def _switch(self, job: Resident, plan: int) -> None:
        """Rule 7. At a boundary all that is away is persistent, and has the same block in every plan."""
        missing = {gap.block: gap for gap in (*job.away.values(), *job.evicted.values())}
        nothing_changes = job.job.alike[plan] == job.job.alike[job.plan]
        job.use(plan)
        if nothing_changes:
            return
        job.position, job.ends = 0, [self.kernel_ends]
        job.away, job.evicted, job.early = {}, {}, []
        for d, block in sorted(job.schedule.moved.items(), key=lambda moved: moved[0].tensor):
            if not (d.tensor in job.schedule.away_at_start and d.after >= d.before):
                continue
            before = missing.pop(block, None)
            if before is None:
                self._open(job, d, job.position - job.n + d.after)
                continue
            gap = job.away[d.tensor] = job.gap_of(d, job.position - job.n + d.after)
            gap.left, gap.on_host = before.left, before.on_host
            if gap.on_host:
                job.host_copy[d.tensor] = block
            elif gap.left:  # on the way back
                job.early.append(gap)
        for block, before in missing.items():
            gap = job.evicted[block] = job.gap_on_demand(block)
            gap.left, gap.on_host, gap.host_bytes = before.left, before.on_host, before.host_bytes
        leaving = {gap.block for gap in (*job.away.values(), *job.evicted.values()) if not gap.left}
        self.queue = [copy for copy in self.queue if copy.job is not job or copy.block in leaving]

    def part(self) -> None:
        """Jobs that leave are gone when no copy of theirs is under way."""
        busy = [copy.job for copy in (self.out, self.back) if copy]
        for job in [job for job in self.present if job.leaving and job not in busy]:
            for b in sorted(job.memory):
                self._charge(job, b, -1)
            self.left[job.index] = self.now
            self.present.remove(job)
            self.gone.append(job)

    # ---------------------------------------------------------------------------------------- starts

    def admit(self) -> None:
        """Jobs are admitted."""
        for j in [j for j in self.waiting if self.leaves[j] <= self.now]:
            self.waiting.remove(j)
            if self.jobs[j].arrives_ns < self.now:
                self.unserved[j] = Stall(self.jobs[j].arrives_ns, self.now, "admission")
        while self.waiting and self.jobs[self.waiting[0]].arrives_ns <= self.now and self.served is None:
            j = self.waiting[0]
            plan = self._plan_now(j, 0)
            lowered = self.plans[j][plan]
            if self.used + lowered.admission_bytes > self.limit or self._host_left() < reserved_bytes(self.plans[j]):
                break
            self._begin(self.waiting.pop(0), plan)

    def _begin(self, j: int, plan: int) -> None:
        job = Resident(j, self.jobs[j], self.plans[j], plan, self.now, self.kernel_ends)
        self.admitted[j] = self.now
        if self.jobs[j].arrives_ns < self.now:
            job.wait(self.jobs[j].arrives_ns, self.now, "admission")
        if plan:
            self.switches[j].append((self.now, plan))
        self.present = sorted([*self.present, job], key=lambda job: job.index)
        schedule = job.schedule
        for d, block in schedule.moved.items():
            if d.tensor in schedule.away_at_start and d.after >= d.before:
                gap = job.away[d.tensor] = job.gap_of(d, d.after - job.n)
                gap.left = gap.on_host = True
                job.host_copy[d.tensor] = block
            elif d.copy is not None and d.copy > d.after:
                job.host_copy[d.tensor] = block
        for b, each in enumerate(schedule.blocks):
            if each.first < 0 and each.owner not in job.away:
                self._charge(job, b, 1)
        job.events_until.append(len(job.events))

    def _host_left(self) -> int:
        """Bytes of the host that are free (rule 9)."""
        planned = sum(reserved_bytes(job.plans) for job in self.present)
        return self.machine.host_bytes - planned - sum(g.host_bytes for j in self.present for g in j.evicted.values())

    def start_copies(self) -> None:
        """Copies start."""
        for job in self.present:
            offers = not job.leaving and self.served in (None, job)
            gap = job.first_to_return(self.served is job) if offers else None
            if gap is not job.offer:
                job.offer, job.offered_since = gap, self.now
        going = min((job for job in self.present if job.offer and self._fits(job, job.offer)),
                    key=lambda job: (job.offered_since, job.index), default=None)  # fmt: skip
        one, gap = self.machine.copy_engines == 1, going.offer if going else None
        if self.queue and not self.out and not (one and self.back):
            copy = self.queue[0]
            if not (one and going and gap and gap.pinned and going.issued(gap) < copy.issued):
                nbytes = copy.job.schedule.blocks[copy.block].nbytes
                span = Span(self.now, 0, "d2h", "swap_out", copy.tensor)
                self.out = self._copy(self.queue.pop(0), self.machine.d2h_ns(nbytes), span)
        if going and gap and not self.back and not (one and self.out):
            self._charge(going, gap.block, 1)
            gap.on_host = False
            if not gap.demand:
                going.early.append(gap)
            span = Span(self.now, 0, "h2d", "swap_in", gap.tensor)
            lasts = self.machine.h2d_ns(going.schedule.blocks[gap.block].nbytes)
            self.back = self._copy(Work(going, tensor=gap.tensor, block=gap.block), lasts, span)
        self._set_ends()

    def _fits(self, job: Resident, gap: Gap) -> bool:
        nbytes, share = job.schedule.blocks[gap.block].nbytes, job.job.share(job.plan)
        own = self.limit if share is None or self.served is job else min(share, self.limit)
        return self.used + nbytes <= self.limit and job.held + nbytes <= own and job.has_room(gap, own)

    def start_steps(self) -> None:
        """Steps start."""
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

    def _ready(self, job: Resident) -> bool:
        if job.running or job.leaving or self.served not in (None, job) or job.held_up():
            return False
        return self.used + job.requested() <= self.limit

    def _start(self, job: Resident) -> None:
        step, begin = job.next_step, self.now
        for b in step.allocates:
            self._charge(job, b, 1)
        if self.sharing == "fifo" and self.stepped not in (None, job) and self.machine.switch_ns:
            begin += self.machine.switch_ns
            job.spans.append(Span(self.now, begin, "compute", "switch", step.kernel))
        job.spans.append(Span(begin, 0, "compute", "recompute" if step.rerun else "kernel", step.kernel))
        self._reckon_compute()
        lasts = begin - self.now + job.lasts_ns(step.kernel)
        self.steps.append(Work(job, len(job.spans) - 1, lasts * ALONE))
        self._set_ends()
        job.running, job.ready_since, self.stepped = True, None, job
        if self.served is job:
            self.served = None

    # ---------------------------------------------------------------------------- time, and demand

    def advance(self) -> None:
        """To the next completion, arrival, or end of patience; or a tensor is evicted."""
        ends = [each.end for each in (self.out, self.back, *self.steps) if each]
        if not ends and self.present:
            self._evict()
            return
        ends += [self.jobs[j].arrives_ns for j in self.waiting if self.jobs[j].arrives_ns > self.now]
        ends += [at_ns for at_ns, _ in self.tenant if at_ns > self.now]
        then = min(ends + [self.leaves[j] for j in self.waiting if self.leaves[j] > self.now])
        for job in self.present:
            if then > self.now and not job.running and not job.leaving:
                data = self.back is not None and job.awaited()
                job.wait(self.now, then, "compute" if job.ready_since is not None else "data" if data else "memory")
        self.now = then

    def _evict(self) -> None:
        """Rule 6."""
        before = self.served
        self.served = before or min(self.present, key=lambda job: (job.waits_since, job.index))
        best: tuple[tuple[int, ...], Resident, int] | None = None
        host_left = self._host_left()
        for job in self.present:
            touched = job.lowered.touched[job.step]
            for b in job.memory:
                tensor, nbytes, *_ = job.schedule.blocks[b]
                if not nbytes or nbytes > host_left or (job is self.served and b in touched):
                    continue
                tier = 2 if b in touched else int(job is self.served)
                _, ns = job.lowered.next_touch(b, job.step)
                key = (tier, -ns, -nbytes, job.index, tensor, b)
                if best is None or key < best[0]:
                    best = key, job, b
        if best is None and before is None:
            return
        if best is None:
            asks = [
                f"{job.job.name!r} asks for {job.requested():,} bytes for kernel {job.next_step.kernel}"
                + "".join(f" and {job.schedule.blocks[g.block].nbytes:,} for tensor {g.tensor}" for g in job.awaited())
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

    def timeline(self) -> JobsTimeline:
        """What happened."""
        ran = {job.index: job for job in self.gone}
        out = []
        for j, job in enumerate(self.jobs):
            r = ran.get(j)
            stalls = r.stalls if r else [self.unserved[j]] if j in self.unserved else []
            out.append(JobTimeline(
                job.name, job.program.name, job.program.ideal_ns, job.arrives_ns,
                self.admitted.get(j), self.left.get(j),
                tuple(r.boundaries) if r else (), in_order(r.spans) if r else (), tuple(r.events) if r else (),
                tuple(r.events_until) if r else (), tuple(stalls), tuple(self.switches[j]),
            ))  # fmt: skip
        end = max(self.left.values(), default=self.now)
        return JobsTimeline.assemble(self.limit, self.sharing, end, out, self.order, self.evictions)


def simulate_jobs(
    jobs: Sequence[Job], machine: Machine, limit: int, until_ns: int | None = None, sharing: Sharing = "fifo",
    tenant: Tenant = (),
) -> JobsTimeline:  # fmt: skip
    """Runs several jobs on one machine; the arguments are those of ``engine.simulate_jobs``."""
    plans = [[Lowered.of(program, plan) for program, plan in job.entries] for job in jobs]
    check(jobs, plans, machine, limit, until_ns)
    run = _Machine(jobs, plans, machine, limit, until_ns, sharing, tenant)
    while True:
        run.complete_copies()
        run.complete_steps()
        run.part()
        run.admit()
        if not run.present and not run.waiting:
            return run.timeline()
        run.start_copies()
        run.start_steps()
        run.advance()
