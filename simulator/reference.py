"""The rules of the simulator, written to be read: the definition of what is true.

``compiled/`` holds the same rules compiled, and must agree with this file to the nanosecond.

Three resources move the bytes and the time: the compute stream, the d2h engine and the h2d engine (a
machine with one copy engine has the last two share it). A ledger counts the bytes in use. What follows from
the plan without a clock (what runs again, which blocks of memory there are) is in ``simulator.schedule``.

1. Kernels run in program order, one at a time.
2. A step (kernel k, or one that runs again for it) starts when earlier compute work is done, every tensor that it uses
   is resident, and used + newly allocated blocks + workspace <= limit.
3. Its blocks are charged at its start; its workspace and the blocks that it is the last to use are freed at its end.
4. A swap-out is enqueued when ``copy`` ends. d2h is FIFO; a transfer takes latency + nbytes/bandwidth,
   rounded up; its memory is freed when it is complete and ``after`` has ended. A tensor whose host copy is still valid
   (not written since) is not copied again. A swap-out is never called back. From the end of ``after`` until the
   memory of a ``sync`` one is free, no step starts.
5. A swap-in charges its memory when its transfer starts. Tensors on the host come back in the order of
   their next use. One starts when the engine is free, its ``prefetch`` kernel has ended (if given), and
   it fits under the limit now and, by the planned residency, at every kernel until it is used.
6. A step whose input is away waits for it; then it need only fit now.
7. A tensor that was dropped is recomputed on the compute stream just before kernel ``at``: the
   writers of its present content are run again in program order, with those of their inputs that are
   gone or have changed since recovered in the same way, in the same pass. An input on the host is
   fetched for it and stays. Tensors recovered on the way are freed after their last use in
   this; with ``keep``, dropped ones among them stay. Kernels that a plan runs again one by one (Rerun) run just
   before kernel ``before``, and what they write lives until its last use.
8. When memory is short, compute waits for swap-outs under way. A wait counts as one for data where a
   tensor is missing and a swap-in is under way, else as one for memory, a ``sync`` swap-out's too.
9. At one instant: copies complete, the step completes, blocks are freed, gaps open, swap-outs are
   enqueued, copies start (d2h first), the next step starts.
10. Iterations repeat without a barrier. Before the first, a tensor whose gap wraps over the boundary is
    on the host, and so is a copy that the iteration before would have made; the other persistent tensors are
    resident. The simulation ends with an iteration that
    ends in the state in which it began, so that all later ones are like it: the steady state. The state is
    everything that the future depends on (``_Run.state``), relative to the boundary. Where states recur
    after several iterations only, it ends with the slowest of these.

The **planned residency** of kernel k is what it needs at least: the load of the program, less the tensors
that the plan has away at k, plus what runs again for k. It follows from the plan alone, without the
clock. Rule 5 never lets a swap-in push it over the limit, so a plan runs exactly when its
largest planned residency (``required_bytes``) is at most the limit. Hence a plan that is feasible at one
limit is feasible at every larger one.

Choices where the rules could be read in several ways:
(a) A swap-out that is still queued or moving when ``before`` is reached is completed first, as a copy
    that has been handed to a CUDA stream is.
(b) One copy engine serves its queue in order of issue. A swap-in is issued when its ``prefetch`` kernel ends; one
    without goes when no swap-out is queued. A swap-in that does not fit yet (rule 5) lets swap-outs go before it, which
    free memory, so that no order can dead-lock.
(c) There is no eviction on demand. A planner that wants a cache (SuperNeurons' LRU) decides its
    evictions beforehand, because the iteration repeats; the plan stays data, and rule 5 stays true.
(d) ``limit_until`` enforces the limit for the kernels before that one only: the simulated time of a plan
    that is still being made (DQN paper, section 4.7).
(e) There are finitely many states, so they recur, mostly after one iteration; of a longer cycle the slowest
    iteration is reported, which no average exceeds. A queue of copies that takes a little longer than an
    iteration grows until compute waits for it: after MAX_ITERATIONS the simulation ends as it is, and the
    Timeline says so (``period`` 0).
(f) A plan's ``variants`` change the durations and workspaces of kernels before anything else: what is simulated
    is ``Program.with_variants``. The ideal time is that of the program as given, so that all plans of a program
    are measured by one figure.
(g) A transfer beside one in the other direction goes at ``Machine.d2h_share`` (to the host) or ``h2d_share`` (back) of
    its own speed, its latency included; its end is reckoned anew whenever the other starts or ends, in whole units of
    2**-20 ns, and rounded up.
(h) The host holds a copy from its issue until the tensor is back, or until the next gap that finds it valid has ended
    (``Schedule.on_host``).
(i) The host issues one thing after the other, each in ``Machine.issue_ns``: the steps that take time, and two copies
    for each Swap. It runs ahead, iteration after iteration, and waits for nothing. So it delays nothing where an
    iteration takes the machine at least as long as the host; else iterations follow each other at the host's pace,
    which is then ``iteration_ns``. Spans and boundaries are those of a host that is ahead.
(j) The compute stream waits for the event of each swap-in, which takes ``Machine.wait_ns`` also where the copy has long
    been over: at the begin of the kernel that ends the Swap's gap, in its span (``Schedule.waited``).
(k) Copies share the GPU's memory with the step that runs: each under way takes ``Machine.copy_loss`` of its speed, the
    more the nearer the kernel is to the bandwidth of that memory. Copies keep theirs. The end of the step is reckoned
    anew when that changes, as those of transfers are (g).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from simulator.machine import ALONE, Machine
from simulator.plan import Plan, PlanError, Swap
from simulator.program import Program
from simulator.schedule import Schedule, Step, lower
from simulator.timeline import BlockEvent, Span, Timeline

MAX_ITERATIONS = 64  # of a simulation that does not become steady (rule 10)


class OutOfMemory(RuntimeError):
    """A kernel needs more than the limit even with everything away that the plan swaps out or drops."""

    def __init__(self, kernel: int, requested: int, used: int, limit: int, job: str = ""):
        of = f"job {job!r}: " if job else ""
        super().__init__(
            f"{of}kernel {kernel} needs {requested:,} bytes beside {used:,} in use, over the limit of {limit:,}"
        )
        self.kernel, self.requested, self.used, self.limit = kernel, requested, used, limit


@dataclass
class _Away:
    """An open gap. Positions count kernels from the start."""

    swap: Swap
    before: int  # position of the kernel that needs it
    ready: int  # position from which it may come back
    left: bool = False  # its bytes have left
    on_host: bool = False  # and it is not on the way back


@dataclass
class _Transfer:
    """A copy under way."""

    tensor: int
    work: int  # what is left of it, in ns / ALONE of a transfer alone on the link, when it was last reckoned
    span: int  # its index among the spans
    end: int = 0


class _Run:
    """The state of a simulation; one method per line of rule 9."""

    def __init__(self, schedule: Schedule, machine: Machine, limit: int, limit_until: int):
        self.schedule, self.machine = schedule, machine
        self.program = program = schedule.program
        self.limit, self.limit_until = limit, limit_until
        self.n = len(program.kernels)
        self.now = 0
        self.position = 0  # the kernel that runs, or else the next one
        self.step = 0  # the step that runs, or else the next one
        self.used = 0
        self.events: list[BlockEvent] = []
        self.away: dict[int, _Away] = {}
        self.host_copy = set(schedule.away_at_start)  # tensors with a valid copy on the host
        for d in schedule.moved:
            if d.tensor in schedule.away_at_start and d.after >= d.before:
                self.away[d.tensor] = self._leave(d, d.after - self.n)
                self.away[d.tensor].left = self.away[d.tensor].on_host = True
            elif d.copy is not None and d.copy > d.after:
                self.host_copy.add(d.tensor)
        for b, block in enumerate(schedule.blocks):
            if block.first < 0 and block.owner not in self.away:
                self._charge(b, 1)
        self.charged: list[_Away] = []  # come back, or coming, before their use
        self.queue: deque[tuple[int, int]] = deque()  # to the host: tensor, and the position from which it is enqueued
        self.out: _Transfer | None = None
        self.back: _Transfer | None = None
        self.reckoned = 0  # when the work of both was
        self.running: int | None = None  # the end of the step that runs
        self.work = self.worked = 0  # what was left of it, in ns / ALONE, when last reckoned, and when that was
        self.speed = ALONE  # of it, since then
        self.computes = 0  # its index among the spans
        self.boundaries: list[int] = []
        self.events_until = [len(self.events)]
        self.states = [self.state()]  # before the first iteration and after each
        self.spans: list[Span] = []
        self.stalls: list[tuple[int, int, bool]] = []  # (start, end, waits for data)

    def _leave(self, d: Swap, position: int) -> _Away:
        """The gap of d, opened when the kernel at ``position`` ended."""

        def ahead(k: int) -> int:
            return position + ((k - d.after - 1) % self.n) + 1

        pinned = d.prefetch is not None and d.prefetch != d.after
        ready = ahead(d.prefetch) + 1 if pinned else position + 1  # type: ignore[arg-type]
        return _Away(d, ahead(self.schedule.returns[d]), ready)

    @property
    def next_step(self) -> Step:
        """The step that runs, or else the next one."""
        return self.schedule.steps[self.step]

    def state(self) -> tuple[object, ...]:
        """Everything that the future depends on, at a boundary and relative to it (rule 10)."""
        at = self.position
        return (
            self.out and (self.out.tensor, self._left(self.out)),
            self.back and (self.back.tensor, self._left(self.back)),
            tuple((t, issued - at) for t, issued in self.queue),
            frozenset((t, a.before - at, a.ready - at, a.left, a.on_host) for t, a in self.away.items()),
            frozenset((a.swap.tensor, a.before - at) for a in self.charged if a.before > at),
            frozenset(self.host_copy),
            self.used,
        )

    def period(self) -> int:
        """How many iterations ago the state was the present one; 0: never, or the last was not the slowest."""
        *before, present = self.states
        if present not in before:
            return 0
        period = before[::-1].index(present) + 1
        ends = [0, *self.boundaries]
        lasts = [end - begin for begin, end in pairwise(ends[-period - 1 :])]
        return period if lasts[-1] == max(lasts) else 0

    def _limit_at(self, position: int) -> float:
        return self.limit if position % self.n < self.limit_until else float("inf")

    def _charge(self, block: int, sign: int) -> None:
        owner, nbytes, *_ = self.schedule.blocks[block]
        self.used += sign * nbytes
        if nbytes:
            self.events.append(BlockEvent(self.now, owner, block, sign * nbytes))

    def _nbytes(self, tensor: int) -> int:
        return self.program.tensors[tensor].nbytes

    # --------------------------------------------------------------------------------------- the link

    def _rate(self, job: _Transfer) -> int:
        if not (self.out and self.back):
            return ALONE
        return self.machine.d2h_share if job is self.out else self.machine.h2d_share

    def _left(self, job: _Transfer) -> int:
        """What is left now of a transfer."""
        return job.work - self._rate(job) * (self.now - self.reckoned)

    def _reckon(self) -> None:
        """Before a transfer starts or when one ends: what is left of both."""
        lefts = [(job, self._left(job)) for job in (self.out, self.back) if job]
        for job, left in lefts:
            job.work = left
        self.reckoned = self.now

    def _schedule_ends(self) -> None:
        """After a transfer has started or ended: when do those under way end?"""
        for job in (self.out, self.back):
            if job:
                job.end = self.now - (-job.work // self._rate(job))
                self.spans[job.span] = self.spans[job.span]._replace(end_ns=job.end)

    def _begin(self, tensor: int, lasts: int, span: Span) -> _Transfer:
        self._reckon()
        self.spans.append(span)
        return _Transfer(tensor, lasts * ALONE, len(self.spans) - 1)

    # ------------------------------------------------------------------------------------------ rule 9

    def complete_copies(self) -> None:
        """Copies complete."""
        self._reckon()
        if self.out and self.out.end == self.now:
            t, self.out = self.out.tensor, None
            self.host_copy.add(t)
            if t in self.away:
                self._release(self.away[t])
        if self.back and self.back.end == self.now:
            del self.away[self.back.tensor]
            self.back = None
        self._schedule_ends()

    def _release(self, gap: _Away) -> None:
        """The bytes of an open gap have left."""
        gap.left = gap.on_host = True
        self._charge(self.schedule.moved[gap.swap], -1)

    def complete_step(self) -> None:
        """The step completes, blocks are freed, gaps open, swap-outs are enqueued."""
        if self.running != self.now:
            return
        step, self.running = self.next_step, None
        for b in step.frees:
            self._charge(b, -1)
        self.step += 1
        if step.rerun:
            return
        for t in self.program.kernels[step.kernel].outputs:
            self.host_copy.discard(t)
        for t in self.program.kernels[step.kernel].accesses:
            if not self.program.tensors[t].persistent and self.program.accesses[t][-1] == step.kernel:
                self.host_copy.discard(t)
        self.queue.extend((d.tensor, self.position + 1) for d in step.copies if d.tensor not in self.host_copy)
        for d in step.opens:
            gap = self.away[d.tensor] = self._leave(d, self.position)
            if d.tensor in self.host_copy:
                self._release(gap)
        self.position += 1
        self.charged = [a for a in self.charged if a.before >= self.position]
        if self.position % self.n == 0:
            self.step = 0
            self.boundaries.append(self.now)
            self.events_until.append(len(self.events))
            self.states.append(self.state())

    def start_copies(self) -> None:
        """Copies start."""
        one, gap = self.machine.copy_engines == 1, self._first_to_return()
        if self.queue and not self.out and not (one and self.back):
            tensor, issued = self.queue[0]
            if not (one and gap and gap.swap.prefetch is not None and gap.ready < issued and self._fits(gap)):
                self.queue.popleft()
                lasts = self.machine.d2h_ns(self._nbytes(tensor))
                self.out = self._begin(tensor, lasts, Span(self.now, 0, "d2h", "swap_out", tensor))
                self._schedule_ends()
        if gap and not self.back and not (one and self.out) and self._fits(gap):
            tensor = gap.swap.tensor
            self._charge(self.schedule.moved[gap.swap], 1)
            self.charged.append(gap)
            gap.on_host = False
            lasts = self.machine.h2d_ns(self._nbytes(tensor))
            self.back = self._begin(tensor, lasts, Span(self.now, 0, "h2d", "swap_in", tensor))
            self._schedule_ends()

    def _first_to_return(self) -> _Away | None:
        waiting = [
            a for a in self.away.values() if a.on_host and (self.position >= a.ready or self.position == a.before)
        ]
        return min(waiting, key=lambda a: (a.before, a.swap.tensor), default=None)

    def _fits(self, gap: _Away) -> bool:
        """Rule 5: does it fit now, and beside the planned residency and what came early up to its use?"""
        nbytes = self._nbytes(gap.swap.tensor)
        if self.used + nbytes > self._limit_at(self.position):
            return False
        kernel_runs = self.running is not None and not self.next_step.rerun
        for p in range(self.position + kernel_runs, gap.before):
            early = sum(self._nbytes(a.swap.tensor) for a in self.charged if a.before > p)
            if self.schedule.residency[p % self.n] + early + nbytes > self._limit_at(p):
                return False
        return True

    def start_step(self) -> None:
        """The next step starts."""
        step = self.next_step
        if self.running is not None or any(a.swap.sync and not a.left for a in self.away.values()):
            return
        if any(t in self.away for t in step.waits):
            return
        if self.used + sum(self.schedule.blocks[b].nbytes for b in step.allocates) > self._limit_at(self.position):
            return
        for b in step.allocates:
            self._charge(b, 1)
        lasts = self.program.kernels[step.kernel].duration_ns
        if not step.rerun:
            lasts += self.machine.wait_ns * self.schedule.waited[step.kernel]
        self.running, self.work, self.worked, self.speed = self.now + lasts, lasts * ALONE, self.now, ALONE
        self.computes = len(self.spans)
        kind = "recompute" if step.rerun else "kernel"
        self.spans.append(Span(self.now, self.running, "compute", kind, step.kernel))  # type: ignore[arg-type]

    def pace_step(self) -> None:
        """Choice k: how fast does the step run beside the copies under way?"""
        if self.running is None:
            return
        kernel, copies = self.program.kernels[self.next_step.kernel], (self.out is not None) + (self.back is not None)
        speed = ALONE - copies * self.machine.copy_loss(kernel.bytes, kernel.duration_ns)
        if speed != self.speed:
            self.work -= self.speed * (self.now - self.worked)
            self.worked, self.speed = self.now, speed
            self.running = self.now - (-self.work // speed)
            self.spans[self.computes] = self.spans[self.computes]._replace(end_ns=self.running)

    def advance(self) -> None:
        """To the next completion."""
        ends = [job.end for job in (self.out, self.back) if job]
        if self.running is not None:
            ends.append(self.running)
        if not ends:
            raise AssertionError("nothing is under way: the planned residency promised that this cannot be")
        then = min(ends)
        if self.running is None and then > self.now:
            missing = any(t in self.away for t in self.next_step.waits)
            self.stalls.append((self.now, then, missing and self.back is not None))
        self.now = then


def simulate(
    program: Program, plan: Plan, machine: Machine, limit: int, iterations: int = 2, limit_until: int | None = None
) -> Timeline:
    """Runs a program under a plan; see the rules above. The arguments are those of ``engine.simulate``."""
    plan.check(program)
    schedule = lower(program, plan)
    until = len(program.kernels) if limit_until is None else limit_until
    check_room(schedule, machine, limit, until)
    run = _Run(schedule, machine, limit, until)
    while True:
        ended = len(run.boundaries)
        run.complete_copies()
        run.complete_step()
        if ended < len(run.boundaries) >= iterations:
            period = run.period()
            if period or len(run.boundaries) >= MAX_ITERATIONS:
                break
        run.start_copies()
        run.start_step()
        run.pace_step()
        run.advance()
    return Timeline.assemble(
        program, limit, schedule.required_bytes, run.boundaries, run.spans, run.events, run.events_until,
        run.stalls, period, schedule.issued * machine.issue_ns,
    )  # fmt: skip


def check_room(schedule: Schedule, machine: Machine, limit: int, limit_until: int) -> None:
    """Do a plan's planned residency fit under the limit, and its copies on the host?

    Raises:
        OutOfMemory: the first kernel that does not fit, of those before ``limit_until``.
        PlanError: more is on the host at one time than it holds.
    """
    for k in range(limit_until):
        if schedule.residency[k] > limit:
            used = schedule.resident[k]
            raise OutOfMemory(k, schedule.residency[k] - used, used, limit)
    most = max(schedule.on_host)
    if most > machine.host_bytes:
        raise PlanError(f"the plan has {most:,} bytes on the host at a time; {machine.name} has {machine.host_bytes:,}")
