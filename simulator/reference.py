"""The rules of the simulator, written to be read: the definition of what is true.

``compiled/`` holds the same rules compiled, and must agree with this file to the nanosecond.

Three resources move the bytes and the time: the compute stream, the d2h engine and the h2d engine (a
machine with one copy engine has the last two share it). A ledger counts the bytes in use.

1. Kernels run in program order, one at a time.
2. Kernel k starts when earlier compute work is done, every tensor that it uses is resident, and
   used + newly allocated outputs + workspace <= limit.
3. Outputs are charged at its start; the workspace is returned at its end; a non-persistent tensor is
   freed at the end of its last use.
4. A swap-out is enqueued when ``after`` ends. d2h is FIFO; a transfer takes latency + nbytes/bandwidth,
   rounded up; its memory is freed when it completes. A tensor whose host copy is still valid (not
   written since) is released at once. A swap-out is never called back. While a ``sync`` one is queued
   or under way, no compute (kernel or step of a rematerialisation) starts.
5. A swap-in charges its memory when its transfer starts. Tensors on the host come back in the order of
   their next use. One starts when the engine is free, its ``prefetch`` kernel has ended (if given), and
   it fits under the limit now and, by the planned residency, at every kernel until it is used.
6. A kernel whose input is away waits for it; then it need only fit now.
7. An input that was dropped is recomputed on the compute stream just before kernel ``before``: the
   writers of its present content are run again in program order, with those of their inputs that are
   gone or have changed since recovered in the same way, in the same pass. An input on the host is
   fetched for it and stays. Tensors recovered on the way are freed after their last use in
   this; with ``keep``, dropped ones among them stay.
8. When memory is short, compute waits for swap-outs under way. A wait counts as one for data where a
   tensor is missing and a swap-in is under way, else as one for memory, a ``sync`` swap-out's too.
9. At one instant: copies complete, the kernel completes, tensors are freed and dropped, swap-outs are
   enqueued, copies start (d2h first), the next kernel starts.
10. Iterations repeat without a barrier. Before the first, a tensor whose gap wraps over the boundary is
    on the host and the other persistent tensors are resident. The simulation ends with an iteration that
    ends in the state in which it began, so that all later ones are like it: the steady state. The state is
    everything that the future depends on (``_Run.state``), relative to the boundary. Where states recur
    after several iterations only, it ends with the slowest of these.

The **planned residency** of kernel k is what it needs at least: the load of the program, less the tensors
that the plan has away at k, plus what is recomputed for k. It follows from the plan alone, without the
clock (``resolve``). Rule 5 never lets a swap-in push it over the limit, so a plan runs exactly when its
largest planned residency (``required_bytes``) is at most the limit. Hence a plan that is feasible at one
limit is feasible at every larger one.

Choices where the rules could be read in several ways:
(a) A swap-out that is still queued or moving when ``before`` is reached is completed first, as a copy
    that has been handed to a CUDA stream is.
(b) With one copy engine, queued swap-outs go before swap-ins: they free memory, so no order of arrival
    can dead-lock.
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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import pairwise

from simulator.machine import Machine
from simulator.plan import Decision, Plan, PlanError, Recompute, Swap
from simulator.program import Gap, Program
from simulator.timeline import Span, Timeline

MAX_ITERATIONS = 64  # of a simulation that does not become steady (rule 10)


class OutOfMemory(RuntimeError):
    """A kernel needs more than the limit even with everything away that the plan swaps out or drops."""

    def __init__(self, kernel: int, requested: int, used: int, limit: int):
        super().__init__(
            f"kernel {kernel} needs {requested:,} bytes beside {used:,} in use, over the limit of {limit:,}"
        )
        self.kernel, self.requested, self.used, self.limit = kernel, requested, used, limit


# ---------------------------------------------------------------------------------- the plan, no clock


@dataclass(frozen=True)
class Step:
    """One kernel run again (rule 7)."""

    kernel: int
    allocated: int  # bytes charged at its start, without the workspace
    freed: int  # bytes returned at its end, without the workspace


@dataclass(frozen=True)
class Rematerialisation:
    """All that is recomputed for one kernel."""

    steps: tuple[Step, ...]
    fetched: frozenset[int]  # tensors on the host that the steps read
    recovered: frozenset[int]  # tensors that stay afterwards


@dataclass
class Schedule:
    """What a plan means for a program, without times."""

    remats: dict[int, Rematerialisation] = field(default_factory=dict)  # kernel -> what is recomputed for it
    returns: dict[Decision, int] = field(default_factory=dict)  # decision -> kernel that ends its gap
    away_at_start: frozenset[int] = frozenset()  # tensors on the host at the iteration boundary
    resident: list[int] = field(default_factory=list)  # per kernel: bytes there before its own needs
    residency: list[int] = field(default_factory=list)  # per kernel: planned residency


def resolve(program: Program, decisions: tuple[Decision, ...]) -> Schedule:
    """Walks one iteration by the plan: who is away when, and what each kernel then needs.

    A rematerialisation may end a wrapping gap before the boundary (rule 7: what it fetches stays), and then the
    tensor is not away at the start of the next iteration; hence the second walk.
    """
    wrapping = {d.tensor: d for d in decisions if d.after >= d.before}
    schedule, still_away = _walk(program, decisions, wrapping)
    if still_away != set(wrapping):
        schedule, still_away = _walk(program, decisions, {t: wrapping[t] for t in still_away})
    schedule.away_at_start = frozenset(still_away)
    return schedule


def _walk(
    program: Program, decisions: tuple[Decision, ...], away_at_start: dict[int, Decision]
) -> tuple[Schedule, set[int]]:
    size = [t.nbytes for t in program.tensors]
    schedule = Schedule()
    away = dict(away_at_start)
    used = sum(t.nbytes for i, t in enumerate(program.tensors) if t.persistent and i not in away)
    for k, kernel in enumerate(program.kernels):
        dropped = {t for t, d in away.items() if isinstance(d, Recompute)}
        keep = any(away[t].keep for t in kernel.accesses if t in dropped)  # type: ignore[union-attr]
        remat = _remat(program, k, dropped, set(away) - dropped, keep) if dropped else None
        if remat is not None:
            schedule.remats[k] = remat
        for t in set(kernel.accesses) | (remat.fetched if remat else set()):
            if t in away and t not in dropped:
                schedule.returns[away.pop(t)] = k
                used += size[t]
        schedule.resident.append(used)
        during_steps = 0
        for step in remat.steps if remat else ():
            used += step.allocated
            during_steps = max(during_steps, used + program.kernels[step.kernel].workspace)
            used -= step.freed
        for t in remat.recovered if remat else ():
            schedule.returns[away.pop(t)] = k
        used += _allocated(program, k)
        schedule.residency.append(max(during_steps, used + kernel.workspace))
        used -= _freed(program, k)
        for d in decisions:
            if d.after == k:
                away[d.tensor] = d
                used -= size[d.tensor]
    return schedule, set(away)


def _allocated(program: Program, k: int) -> int:
    """Bytes of the tensors born at kernel k."""
    return sum(
        program.tensors[t].nbytes
        for t in program.kernels[k].accesses
        if not program.tensors[t].persistent and program.accesses[t][0] == k
    )


def _freed(program: Program, k: int) -> int:
    """Bytes of the tensors that die after kernel k."""
    return sum(
        program.tensors[t].nbytes
        for t in program.kernels[k].accesses
        if not program.tensors[t].persistent and program.accesses[t][-1] == k
    )


def _remat(program: Program, k: int, dropped: set[int], on_host: set[int], keep: bool) -> Rematerialisation | None:
    """What must run again before kernel k (rule 7), or None."""
    targets = {t for t in program.kernels[k].accesses if t in dropped}
    if not targets:
        return None

    rerun = _reruns_for(program, k, targets, dropped)
    read = {(x, w) for w in rerun for x in program.kernels[w].inputs}
    fetched = {x for x, w in read if x in on_host and present(program, x, w, k, dropped)}
    recovered = set(targets)
    if keep:
        recovered |= {x for x in dropped if all(u in rerun for u in program.writes[x] if u < k)}
    # In program order; every output goes to memory of their own.
    order = sorted(rerun)
    last = {}
    for w in order:
        for x in program.kernels[w].outputs:
            last[x] = w
        for x in program.kernels[w].inputs:
            if not present(program, x, w, k, dropped):
                last[x] = w
    steps: list[Step] = []
    held: set[int] = set()
    for w in order:
        new = set(program.kernels[w].outputs) - held
        held |= new
        freed = {x for x in held if last[x] == w and x not in recovered}
        held -= freed
        allocated = sum(program.tensors[x].nbytes for x in new)
        steps.append(Step(w, allocated, sum(program.tensors[x].nbytes for x in freed)))
    return Rematerialisation(tuple(steps), frozenset(fetched), frozenset(recovered))


def present(program: Program, x: int, w: int, k: int, dropped: Set[int]) -> bool:
    """Is tensor x there at kernel k, or on the host, as kernel w read it?"""
    tensor, uses = program.tensors[x], program.accesses[x]
    alive = tensor.persistent or uses[0] < k <= uses[-1]
    return alive and x not in dropped and not any(w <= u < k for u in program.writes[x])


def _reruns_for(program: Program, k: int, targets: set[int], dropped: Set[int]) -> set[int]:
    """The kernels to run again before kernel k: the writers of the targets, and of what those read and is not
    present."""
    rerun: set[int] = set()
    pending = [u for t in targets for u in program.writes[t] if u < k]
    while pending:
        w = pending.pop()
        if w in rerun:
            continue
        rerun.add(w)
        for x in program.kernels[w].inputs:
            if not present(program, x, w, k, dropped):
                pending += [u for u in program.writes[x] if u < w]
    return rerun


def reruns(program: Program, tensor: int, k: int, dropped: Set[int] = frozenset()) -> list[int]:
    """Kernels that run again, in order, to have ``tensor`` back before kernel k when of the others ``dropped`` are
    away. With more away, or later in the same gap, these run again and perhaps others."""
    return sorted(_reruns_for(program, k, {tensor}, dropped | {tensor}))


# ------------------------------------------------------------------------------------------- the clock


@dataclass
class _Away:
    """One emptying of one gap: a decision in one iteration. Positions count kernels from the start."""

    tensor: int
    before: int  # position of the kernel that needs it
    ready: int  # position from which it may come back
    sync: bool = False  # no compute starts until its bytes have left
    out: bool = False  # its bytes have left


@dataclass
class _Work:
    """One piece of compute: a kernel, or a step of a rematerialisation."""

    kernel: int
    rerun: bool
    waits: frozenset[int]  # tensors that must not be away
    allocated: int
    workspace: int
    freed: int


class _Run:
    """The state of a simulation; one method per line of rule 9."""

    def __init__(self, program: Program, plan: Plan, machine: Machine, limit: int, limit_until: int):
        self.program, self.machine = program, machine
        self.limit, self.limit_until = limit, limit_until
        self.schedule = schedule = resolve(program, plan.decisions)
        self.n = len(program.kernels)
        self.opens: dict[int, list[Decision]] = {}
        for d in sorted(plan.decisions, key=lambda d: d.tensor):
            self.opens.setdefault(d.after, []).append(d)
        self.now = 0
        self.position = 0  # the kernel that runs, or else the next one
        self.used = sum(
            t.nbytes for i, t in enumerate(program.tensors) if t.persistent and i not in schedule.away_at_start
        )
        self.away: dict[int, _Away] = {}
        self.host_copy = set(schedule.away_at_start)  # tensors with a valid copy on the host
        for d in plan.decisions:
            if d.tensor in schedule.away_at_start and d.after >= d.before:
                self.away[d.tensor] = self._leave(d, d.after - self.n)
                self.away[d.tensor].sync, self.away[d.tensor].out = False, True
        self.charged: list[_Away] = []  # come back, or coming, before their use
        self.out_queue: deque[_Away] = deque()
        self.out: tuple[int, _Away] | None = None  # (end, what) of the copy under way
        self.back: tuple[int, _Away] | None = None
        self.running: tuple[int, _Work] | None = None
        self.work = self._work_of(0)
        self.boundaries: list[int] = []
        self.states = [self.state()]  # before the first iteration and after each
        self.spans: list[Span] = []
        self.memory: list[tuple[int, int]] = [(0, self.used)]
        self.stalls: list[tuple[int, int, bool]] = []  # (start, end, waits for data)

    def _leave(self, d: Decision, position: int) -> _Away:
        """Decision d, opened when the kernel at ``position`` ended."""

        def ahead(k: int) -> int:
            return position + ((k - d.after - 1) % self.n) + 1

        ready = position + 1
        if isinstance(d, Swap) and d.prefetch is not None and d.prefetch != d.after:
            ready = ahead(d.prefetch) + 1
        return _Away(d.tensor, ahead(self.schedule.returns[d]), ready, isinstance(d, Swap) and d.sync)

    def _work_of(self, k: int) -> deque[_Work]:
        """The compute work for kernel k: what runs again for it, then itself."""
        out: deque[_Work] = deque()
        remat = self.schedule.remats.get(k)
        for step in remat.steps if remat else ():
            workspace = self.program.kernels[step.kernel].workspace
            out.append(_Work(step.kernel, True, remat.fetched, step.allocated, workspace, step.freed))  # type: ignore[union-attr]
        kernel = self.program.kernels[k]
        waits = frozenset(kernel.accesses) - (remat.recovered if remat else frozenset())
        out.append(_Work(k, False, waits, _allocated(self.program, k), kernel.workspace, _freed(self.program, k)))
        return out

    def state(self) -> tuple[object, ...]:
        """Everything that the future depends on, at a boundary and relative to it (rule 10)."""
        now, at = self.now, self.position
        return (
            self.out and (self.out[0] - now, self.out[1].tensor),
            self.back and (self.back[0] - now, self.back[1].tensor),
            tuple(a.tensor for a in self.out_queue),
            frozenset((t, a.before - at, a.ready - at, a.sync, a.out) for t, a in self.away.items()),
            frozenset((c.tensor, c.before - at) for c in self.charged if c.before > at),
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

    def _use(self, change: int) -> None:
        self.used += change
        if change:
            self.memory.append((self.now, self.used))

    def complete_copies(self) -> None:
        if self.out and self.out[0] == self.now:
            self._left(self.out[1])
            self.host_copy.add(self.out[1].tensor)
            self.out = None
        if self.back and self.back[0] == self.now:
            del self.away[self.back[1].tensor]
            self.back = None

    def _left(self, swap: _Away) -> None:
        swap.sync, swap.out = False, True
        self._use(-self.program.tensors[swap.tensor].nbytes)

    def complete_kernel(self) -> None:
        if not self.running or self.running[0] != self.now:
            return
        work, self.running = self.running[1], None
        self._use(-work.workspace - work.freed)
        if work.rerun:
            return
        k = work.kernel
        for t in self.program.kernels[k].outputs:
            self.host_copy.discard(t)
        for t in self.program.kernels[k].accesses:
            if not self.program.tensors[t].persistent and self.program.accesses[t][-1] == k:
                self.host_copy.discard(t)
        for d in self.opens.get(k, ()):
            if isinstance(d, Recompute):
                self._use(-self.program.tensors[d.tensor].nbytes)
                continue
            swap = self.away[d.tensor] = self._leave(d, self.position)
            if d.tensor in self.host_copy:
                self._left(swap)
            else:
                self.out_queue.append(swap)
        self.position += 1
        self.charged = [c for c in self.charged if c.before >= self.position]
        self.work = self._work_of(self.position % self.n)
        if self.position % self.n == 0:
            self.boundaries.append(self.now)
            self.states.append(self.state())

    def start_copies(self) -> None:
        machine, size = self.machine, self.program.tensors
        if self.out_queue and not self.out and (machine.copy_engines == 2 or not self.back):
            swap = self.out_queue.popleft()
            self.out = (self.now + machine.d2h_ns(size[swap.tensor].nbytes), swap)
            self.spans.append(Span(self.now, self.out[0], "d2h", "swap_out", swap.tensor))
        if self.back or (machine.copy_engines == 1 and self.out):
            return
        waiting = [a for a in self.away.values()
                   if a.out and (self.position >= a.ready or self.position == a.before)]  # fmt: skip
        if not waiting:
            return
        first = min(waiting, key=lambda a: (a.before, a.tensor))
        nbytes = size[first.tensor].nbytes
        if self.used + nbytes > self._limit_at(self.position) or not self._fits_until_use(first, nbytes):
            return
        self._use(nbytes)
        self.charged.append(first)
        first.out = False
        self.back = (self.now + machine.h2d_ns(nbytes), first)
        self.spans.append(Span(self.now, self.back[0], "h2d", "swap_in", first.tensor))

    def _fits_until_use(self, item: _Away, nbytes: int) -> bool:
        """Planned residency + what came back early + nbytes <= limit, at every kernel up to its use."""
        kernel_runs = self.running is not None and not self.running[1].rerun
        for p in range(self.position + kernel_runs, item.before):
            early = sum(self.program.tensors[c.tensor].nbytes for c in self.charged if c.before > p)
            if self.schedule.residency[p % self.n] + early + nbytes > self._limit_at(p):
                return False
        return True

    def start_kernel(self) -> None:
        if self.running:
            return
        work = self.work[0]
        if any(a.sync for a in self.away.values()) or any(t in self.away for t in work.waits):
            return
        if self.used + work.allocated + work.workspace > self._limit_at(self.position):
            return
        self.work.popleft()
        self._use(work.allocated + work.workspace)
        end = self.now + self.program.kernels[work.kernel].duration_ns
        self.running = (end, work)
        self.spans.append(Span(self.now, end, "compute", "recompute" if work.rerun else "kernel", work.kernel))

    def advance(self) -> None:
        """To the next completion."""
        ends = [job[0] for job in (self.out, self.back, self.running) if job]
        if not ends:
            raise AssertionError("nothing is under way: the planned residency promised that this cannot be")
        then = min(ends)
        if not self.running and then > self.now:
            missing = any(t in self.away for t in self.work[0].waits)
            self.stalls.append((self.now, then, missing and self.back is not None))
        self.now = then


def simulate(
    program: Program, plan: Plan, machine: Machine, limit: int, iterations: int = 2, limit_until: int | None = None
) -> Timeline:
    """Runs a program under a plan; see the rules above. The arguments are those of ``engine.simulate``."""
    plan.check(program)
    given, program = program, program.with_variants(plan.variants)
    until = len(program.kernels) if limit_until is None else limit_until
    run = _Run(program, plan, machine, limit, until)
    for k in range(until):
        if run.schedule.residency[k] > limit:
            used = run.schedule.resident[k]
            raise OutOfMemory(k, run.schedule.residency[k] - used, used, limit)
    swapped = sum(program.tensors[t].nbytes for t in {d.tensor for d in plan.decisions if isinstance(d, Swap)})
    if swapped > machine.host_bytes:
        raise PlanError(f"the plan swaps {swapped:,} bytes; {machine.name} has {machine.host_bytes:,} on the host")
    while True:
        ended = len(run.boundaries)
        run.complete_copies()
        run.complete_kernel()
        if ended < len(run.boundaries) >= iterations:
            period = run.period()
            if period or len(run.boundaries) >= MAX_ITERATIONS:
                break
        run.start_copies()
        run.start_kernel()
        run.advance()
    required = max(run.schedule.residency)
    return Timeline.assemble(given, limit, required, run.boundaries, run.spans, run.memory, run.stalls, period)


def recompute_ns(program: Program, gap: Gap) -> int:
    """Duration of the kernels that recover a gap's tensor when nothing else is away."""
    return sum(program.kernels[k].duration_ns for k in reruns(program, gap.tensor, gap.before))
