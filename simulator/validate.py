"""A slow, obvious checker of a Timeline: is what it says possible, and is it what the rules ask for?

It shares no code with ``reference.py`` and ``compiled/`` and works the other way round: they decide what happens; it
takes the spans as given, replays them against a ledger of its own, and names every rule that they break. Content is
tracked by **version**, the kernel executions that wrote it, so that a stale host copy or a rematerialisation that ran
the wrong kernels cannot pass. The rules (numbers: the docstring of ``reference.py``):

- ``spans``      well formed, in order of start
- ``overlap``    one piece of work at a time on a stream; on both copy streams with one copy engine (4)
- ``order``      the kernels run in program order and every iteration is complete (1)
- ``duration``   a kernel lasts as long as its algorithm does, a copy latency + bytes / bandwidth (4)
- ``resident``   what a kernel or a step uses is in device memory when it starts (2, 6)
- ``content``    … and has the content that program order gives it (7)
- ``recompute``  each kernel once, in program order, only before one that needs it; the same in every iteration (7)
- ``swap-out``   one for every opening of a gap, in order, after ``after``; none if the host copy is valid (4)
- ``sync``       no kernel or step starts while a synchronous swap-out is queued or under way (4)
- ``swap-in``    of a tensor on the host, after ``prefetch``, in order of next use (5)
- ``idle``       no stream waits while its next piece of work could start (2, 4, 6)
- ``memory``     the curve is the ledger, change by change (3, 4, 5, 9)
- ``limit``      no point of the curve is above the limit
- ``figures``    ideal, iteration, peak, required bytes, boundaries and breakdown follow from the spans
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import NamedTuple

from simulator.machine import Machine
from simulator.plan import Plan, Recompute, Swap
from simulator.program import Program
from simulator.timeline import Span, Timeline

Version = tuple[int, ...]  # executions that wrote the content: iteration * kernels + kernel


class Violation(NamedTuple):
    """One broken rule."""

    rule: str
    time_ns: int
    detail: str


def violations(
    timeline: Timeline, program: Program, plan: Plan, machine: Machine, limit: int | None
) -> list[Violation]:
    """Every rule that a timeline breaks; [] for a right one.

    Args:
        plan: fits the program (``Plan.check``).
        limit: bytes; None where the timeline was simulated with the limit not enforced.
    """
    found = list(_spans(timeline, program)) or [*_overlap(timeline, machine), *_order(timeline, program)]
    if found:  # a replay needs one thing at a time, in order
        return found
    runs = program.with_variants(plan.variants)
    replay = _Replay(timeline, runs, plan, machine, limit)
    found = [*_duration(timeline, runs, machine), *replay.violations(), *_figures(timeline, program, replay)]
    if limit is not None:
        found += [Violation("limit", t, f"{used} bytes of {limit}") for t, used in timeline.memory if used > limit]
    return sorted(found, key=lambda v: v.time_ns)


# ------------------------------------------------------------------------------------- spans alone


def _spans(timeline: Timeline, program: Program) -> Iterator[Violation]:
    streams = {"kernel": "compute", "recompute": "compute", "swap_out": "d2h", "swap_in": "h2d"}
    for span in timeline.spans:
        count = len(program.kernels if span.stream == "compute" else program.tensors)
        if streams[span.kind] != span.stream:
            yield Violation("spans", span.start_ns, f"a {span.kind} on stream {span.stream}")
        elif not 0 <= span.index < count:
            yield Violation("spans", span.start_ns, f"{span.kind} of {span.index}; there are {count}")
        elif not 0 <= span.start_ns <= span.end_ns:
            yield Violation("spans", span.start_ns, f"{span} ends before it starts")
    for a, b in pairwise(timeline.spans):
        if b.start_ns < a.start_ns:
            yield Violation("spans", b.start_ns, f"{b} is recorded after {a}")
    if not (timeline.spans and timeline.boundaries and timeline.memory):
        yield Violation("spans", 0, "there are no spans, no boundaries or no memory curve")


def _overlap(timeline: Timeline, machine: Machine) -> Iterator[Violation]:
    streams = [{"compute"}, {"d2h"}, {"h2d"}] if machine.copy_engines == 2 else [{"compute"}, {"d2h", "h2d"}]
    for stream in streams:
        for a, b in pairwise(s for s in timeline.spans if s.stream in stream):
            if b.start_ns < a.end_ns:
                yield Violation("overlap", b.start_ns, f"{b} starts before {a} has ended")


def _order(timeline: Timeline, program: Program) -> Iterator[Violation]:
    n = len(program.kernels)
    compute = [s for s in timeline.spans if s.stream == "compute"]
    ran = [s for s in compute if s.kind == "kernel"]
    for position, span in enumerate(ran):
        if span.index != position % n:
            yield Violation("order", span.start_ns, f"kernel {span.index} runs where {position % n} is next")
            return
    if len(ran) != n * len(timeline.boundaries):
        when = ran[-1].end_ns if ran else 0
        yield Violation("order", when, f"{len(ran)} kernels in {len(timeline.boundaries)} iterations of {n}")
    elif timeline.spans[-1].start_ns > ran[-1].end_ns or compute[-1] != ran[-1]:
        yield Violation("order", timeline.spans[-1].start_ns, "something starts after the last iteration")


def _duration(timeline: Timeline, program: Program, machine: Machine) -> Iterator[Violation]:
    for span in timeline.spans:
        if span.stream == "compute":
            right = program.kernels[span.index].duration_ns
        else:
            rate = machine.d2h_bytes_per_s if span.stream == "d2h" else machine.h2d_bytes_per_s
            whole, rest = divmod(program.tensors[span.index].nbytes * 10**9, rate)
            right = machine.copy_latency_ns + whole + (rest > 0)
        lasts = span.end_ns - span.start_ns
        if lasts != right:
            yield Violation("duration", span.start_ns, f"{span.kind} {span.index} lasts {lasts} ns, not {right}")


# ------------------------------------------------------------------------------------ the replay


@dataclass
class _Gap:
    """A swap decision at work: opened, and not closed yet."""

    tensor: int
    pinned: int  # position of ``prefetch``, or of ``after``
    sync: bool  # compute waits until it has left
    state: str  # "queued" -> "leaving" -> "on host" -> "arriving"


@dataclass
class _Rematerialisation:
    """What the spans run again before one kernel, and what that means."""

    steps: list[int] = field(default_factory=list)  # kernels, as recorded
    reads: set[int] = field(default_factory=set)  # tensors read where they are
    last: dict[int, int] = field(default_factory=dict)  # tensor in the step's own memory -> step of its last use
    stay: set[int] = field(default_factory=set)  # dropped tensors that it brings back
    own: dict[int, Version] = field(default_factory=dict)  # the steps' own memory, now
    done: int = 0


class _Replay:
    """Replays the spans; every start is checked, every completion moves bytes in the ledger."""

    def __init__(self, timeline: Timeline, program: Program, plan: Plan, machine: Machine, limit: int | None):
        self.timeline, self.program, self.plan = timeline, program, plan
        self.one_engine = machine.copy_engines == 1
        self.limit = float("inf") if limit is None else limit
        self.n = n = len(program.kernels)
        self.size = [t.nbytes for t in program.tensors]
        self.uses = [[k for k, kernel in enumerate(program.kernels) if t in kernel.inputs + kernel.outputs]
                     for t in range(len(self.size))]  # fmt: skip
        self.writers = [[k for k in uses if t in program.kernels[k].outputs] for t, uses in enumerate(self.uses)]
        self.steps: list[list[int]] = [[]]  # per position
        for span in timeline.spans:
            if span.kind == "recompute":
                self.steps[-1].append(span.index)
            elif span.kind == "kernel":
                self.steps.append([])
        self.found: list[Violation] = []
        self.now = 0
        self.position = 0
        self.running: dict[str, Span] = {}
        self.queue: deque[_Gap] = deque()
        self.gaps: dict[int, _Gap] = {}  # by tensor
        self.dropped: dict[int, Recompute] = {}
        self.right: list[Version] = [()] * len(self.size)  # content by program order
        self.device: dict[int, Version] = {t: () for t, x in enumerate(program.tensors) if x.persistent}
        self.host: dict[int, Version] = {}
        self.read: dict[tuple[int, int], Version] = {}  # (position, tensor) -> content that the kernel read
        self.needs: list[set[int]] = []  # per position: tensors it uses that nothing recomputes
        self.candidates: list[tuple[int, int, int, list[int]]] = []  # swap-ins: time, position, tensor, the others
        self.live: list[tuple[int, int, dict[int, int]]] = []  # compute: position, used, {tensor: gap opened at}
        self.stalls = {"memory": 0, "data": 0}  # in the last iteration
        self.opened: dict[int, int] = {}  # tensor -> position at which its last gap was opened
        for d in plan.decisions:
            if isinstance(d, Swap) and d.after >= d.before and not self._fetched_before_boundary(d):
                del self.device[d.tensor]
                self.host[d.tensor] = ()
                self.gaps[d.tensor] = self._gap(d, d.after - n, "on host")
        self.used = sum(self.size[t] for t in self.device)
        self.ledger = [(0, self.used)]
        self.remat = self._remat()
        for span in timeline.spans:
            self._advance(span.start_ns)
            self._start(span)
        self._advance(max(self.now, timeline.spans[-1].start_ns, self._last_end()), last=True)

    def violations(self) -> list[Violation]:
        """Those of the replay, and those that can be told only when it is over."""
        out = list(self.found)
        for i, (ours, theirs) in enumerate(zip_longest(self.ledger, self.timeline.memory)):
            if ours != theirs:
                out.append(Violation("memory", (ours or theirs)[0], f"memory[{i}] is {theirs}, the ledger says {ours}"))
                break
        out += [
            Violation("recompute", self.now, f"kernel {p % self.n}: not the same chain in every iteration")
            for p in range(self.n, len(self.needs))
            if self.steps[p] != self.steps[p - self.n]
        ]
        for time, position, tensor, others in self.candidates:
            first = min(others, key=lambda t: (self._next_use(t, position), t))
            if first != tensor:
                out.append(Violation("swap-in", time, f"tensor {first} is needed before tensor {tensor}"))
        return out

    def required_bytes(self) -> int:
        """The largest planned residency: the bytes in use, less what the plan has away at that kernel."""
        return max(
            used - sum(self.size[t] for t, opened in early.items() if self._next_use(t, opened + 1) > position)
            for position, used, early in self.live
        )

    @cached_property
    def _needed(self) -> list[list[int]]:
        """Per tensor: the kernels before which it must be in memory; only when the replay is over."""
        return [[k for k in range(self.n) if t in self.needs[k]] for t in range(len(self.size))]

    def _next_use(self, tensor: int, position: int) -> int:
        iteration, k = divmod(max(position, 0), self.n)
        kernels = self._needed[tensor]
        later = kernels[bisect_left(kernels, k) :] + [k + self.n for k in kernels]
        return iteration * self.n + (later[0] if later else 2 * self.n)

    def _last_end(self) -> int:
        return max(s.end_ns for s in self.timeline.spans if s.kind == "kernel")

    def _fail(self, rule: str, detail: str) -> None:
        self.found.append(Violation(rule, self.now, detail))

    def _charge(self, nbytes: int) -> None:
        self.used += nbytes
        if nbytes:
            self.ledger.append((self.now, self.used))

    # ------------------------------------------------------------------------------ what a remat is

    def _same_since(self, tensor: int, step: int, kernel: int) -> bool:
        """Does ``tensor`` before ``kernel`` still have the content that ``step`` read?"""
        uses = self.uses[tensor]
        alive = self.program.tensors[tensor].persistent or uses[0] < kernel <= uses[-1]
        return alive and not any(step <= w < kernel for w in self.writers[tensor])

    def _fetched_before_boundary(self, d: Swap) -> bool:
        """A recomputation that reads a tensor on the host fetches it, and it stays: here, before the boundary."""
        return any(
            d.tensor in self.program.kernels[w].inputs and self._same_since(d.tensor, w, k)
            for k in range(d.after + 1, self.n) for w in self.steps[k]
        )  # fmt: skip

    def _remat(self) -> _Rematerialisation:
        """Reads what runs again before the next kernel, and checks its form."""
        k = self.position % self.n
        kernels = self.program.kernels
        remat = _Rematerialisation(self.steps[self.position])
        if remat.steps != sorted(set(remat.steps)) or any(w >= k for w in remat.steps):
            self._fail("recompute", f"kernel {k}: kernels {remat.steps} are not in program order before it")
        wanted = {t for t in kernels[k].inputs + kernels[k].outputs if t in self.dropped}
        if remat.steps and not wanted:
            self._fail("recompute", f"kernel {k} needs nothing recomputed")
        remat.stay = set(wanted)
        if any(self.dropped[t].keep for t in wanted):
            remat.stay |= {t for t in self.dropped if {w for w in self.writers[t] if w < k} <= set(remat.steps)}
        useful = set(remat.stay)
        for w in reversed(remat.steps):
            if not useful & set(kernels[w].outputs):
                self._fail("recompute", f"kernel {w} is run again for kernel {k} in vain")
            for t in kernels[w].outputs:
                remat.last.setdefault(t, w)
            for t in kernels[w].inputs:
                if t not in self.dropped and self._same_since(t, w, k):
                    remat.reads.add(t)
                else:
                    remat.last.setdefault(t, w)
                    useful.add(t)
        self.needs.append(remat.reads | set(kernels[k].inputs + kernels[k].outputs) - wanted)
        return remat

    # -------------------------------------------------------------------------------------- starts

    def _start(self, span: Span) -> None:
        self.running[span.stream] = span
        if span.stream == "compute" and self._held():
            self._fail("sync", f"{span.kind} {span.index} starts before tensors {self._held()} have left")
        {"kernel": self._start_kernel, "recompute": self._start_step,
         "swap_out": self._start_out, "swap_in": self._start_in}[span.kind](span.index)  # fmt: skip

    def _gap(self, d: Swap, position: int, state: str) -> _Gap:
        """The gap of a decision, opened by the kernel at ``position``."""
        pinned = position
        while d.prefetch is not None and pinned % self.n != d.prefetch:
            pinned += 1
        self.opened[d.tensor] = position
        return _Gap(d.tensor, pinned, d.sync, state)

    def _held(self) -> list[int]:
        """Tensors whose synchronous swap-outs compute waits for."""
        return [t for t, g in self.gaps.items() if g.sync and g.state in ("queued", "leaving")]

    def _start_out(self, tensor: int) -> None:
        if not self.queue or self.queue[0].tensor != tensor:
            self._fail("swap-out", f"tensor {tensor} leaves; queued are {[g.tensor for g in self.queue]}")
        self.queue = deque(g for g in self.queue if g.tensor != tensor)
        if tensor in self.gaps:
            self.gaps[tensor].state = "leaving"

    def _start_in(self, tensor: int) -> None:
        gap = self.gaps.get(tensor)
        if gap is None or gap.state != "on host":
            self._fail("swap-in", f"tensor {tensor} returns but is {gap.state if gap else 'not away'}")
            return
        if not self._may_return(gap):
            self._fail("swap-in", f"tensor {tensor} returns before its prefetch kernel {gap.pinned % self.n} has ended")
        others = [g.tensor for g in self.gaps.values() if g.state == "on host" and self._may_return(g)]
        self.candidates.append((self.now, self.position, tensor, [*others, tensor]))
        gap.state = "arriving"
        self._charge(self.size[tensor])

    def _may_return(self, gap: _Gap) -> bool:
        return self.position > gap.pinned or gap.tensor in self.needs[self.position]

    def _start_step(self, w: int) -> None:
        iteration, k = divmod(self.position, self.n)
        remat, kernel = self.remat, self.program.kernels[w]
        for t in remat.reads:
            if t in self.gaps:
                self._fail("resident", f"kernel {w} is run again for {k} while tensor {t} is away")
        for t in dict.fromkeys(kernel.inputs):
            where = self.device if t not in self.dropped and self._same_since(t, w, k) else remat.own
            content = where.get(t)
            if content is None:
                self._fail("resident", f"kernel {w} is run again for {k} without tensor {t}")
            elif content != self.read.get((iteration * self.n + w, t)):
                self._fail("content", f"kernel {w} is run again for {k} on another content of tensor {t}")
        self._charge(self._need(w, rerun=True))
        for t in set(kernel.outputs):
            remat.own[t] = (*remat.own.get(t, ()), iteration * self.n + w)
        self._note_live_bytes()

    def _start_kernel(self, k: int) -> None:
        kernel = self.program.kernels[k]
        for t in dict.fromkeys(kernel.inputs + kernel.outputs):
            if self._born(t, k):
                self.device[t] = ()
            if t in self.gaps:
                self._fail("resident", f"kernel {k} starts while tensor {t} is away")
            elif t not in self.device:
                self._fail("resident", f"kernel {k} starts without tensor {t}")
            elif self.device[t] != self.right[t]:
                self._fail("content", f"kernel {k} uses tensor {t} with content {self.device[t]}, not {self.right[t]}")
            self.read[self.position, t] = self.right[t]
        self._charge(self._need(k))
        self._note_live_bytes()

    def _born(self, tensor: int, kernel: int) -> bool:
        return not self.program.tensors[tensor].persistent and self.uses[tensor][0] == kernel

    def _need(self, k: int, rerun: bool = False) -> int:
        """Bytes that kernel k, or the step that runs it again, allocates at its start."""
        kernel = self.program.kernels[k]
        born = (t for t in set(kernel.outputs) if (t not in self.remat.own if rerun else self._born(t, k)))
        return sum(self.size[t] for t in born) + kernel.workspace

    def _note_live_bytes(self) -> None:
        """For ``required_bytes``: bytes in use with all that this kernel needs, and the tensors that may be early."""
        on_host = {t for t, g in self.gaps.items() if g.state == "on host"}
        missing = sum(self.size[t] for t in on_host & self.needs[self.position])  # a step need not wait for them
        early = {t: p for t, p in self.opened.items() if t not in on_host}
        self.live.append((self.position, self.used + missing, early))

    # --------------------------------------------------------------------------------- completions

    def _advance(self, time: int, last: bool = False) -> None:
        """Completes what ends until ``time``, copies first (rule 9)."""
        while ends := [s.end_ns for s in self.running.values() if s.end_ns <= time]:
            if min(ends) > self.now:
                self._leave_instant(min(ends))
            for stream, complete in (("d2h", self._end_out), ("h2d", self._end_in), ("compute", self._end_compute)):
                if stream in self.running and self.running[stream].end_ns <= self.now:
                    complete(self.running.pop(stream))
        if time > self.now and not last:
            self._leave_instant(time)

    def _leave_instant(self, then: int) -> None:
        """Nothing more happens now: has everything started that could? And why does compute wait?"""
        k = self.position % self.n
        if self.queue and "d2h" not in self.running and not (self.one_engine and "h2d" in self.running):
            self._fail("idle", f"tensor {self.queue[0].tensor} does not leave while the copy engine is free")
        if "compute" not in self.running:
            steps_left = self.remat.steps[self.remat.done :]
            waits = sorted(t for t in (self.remat.reads if steps_left else self.needs[self.position]) if t in self.gaps)
            needed = self._need(steps_left[0], rerun=True) if steps_left else self._need(k)
            if not waits and not self._held() and self.used + needed <= self.limit:
                self._fail("idle", f"nothing keeps kernel {k} from starting")
            on_host = sorted(t for t in self.needs[self.position] if t in self.gaps and self.gaps[t].state == "on host")
            engine_free = "h2d" not in self.running and not (self.one_engine and "d2h" in self.running)
            if on_host and engine_free and self.used + self.size[on_host[0]] <= self.limit:
                self._fail("idle", f"kernel {k} waits for tensor {on_host[0]}, which does not return")
            begin = self.timeline.last_start_ns
            why = "data" if waits and "h2d" in self.running else "memory"
            self.stalls[why] += max(0, min(then, self._last_end()) - max(self.now, begin))
        self.now = then

    def _end_out(self, span: Span) -> None:
        gap = self.gaps.get(span.index)
        if gap and span.index in self.device:
            self.host[span.index] = self.device.pop(span.index)
            gap.state = "on host"
            self._charge(-self.size[span.index])

    def _end_in(self, span: Span) -> None:
        gap = self.gaps.get(span.index)
        if gap and gap.state == "arriving":
            del self.gaps[span.index]
            self.device[span.index] = self.host[span.index]

    def _end_compute(self, span: Span) -> None:
        kernel, k = self.program.kernels[span.index], span.index
        if span.kind == "recompute":
            remat = self.remat
            freed = [t for t in remat.own if remat.last[t] == k and t not in remat.stay]
            self._charge(-sum(self.size[t] for t in freed) - kernel.workspace)
            for t in freed:
                del remat.own[t]
            remat.done += 1
            if remat.done == len(remat.steps):
                for t in remat.stay & set(remat.own):
                    self.device[t] = remat.own[t]
                    del self.dropped[t]
            return
        for t in kernel.outputs:
            if self.right[t][-1:] != (self.position,):
                self.right[t] = (*self.right[t], self.position)
            self.device[t] = self.right[t]
        dead = [t for t in set(kernel.inputs + kernel.outputs)
                if not self.program.tensors[t].persistent and self.uses[t][-1] == k]  # fmt: skip
        for t in dead:
            self.right[t] = ()
            self.device.pop(t, None)
        self._charge(-sum(self.size[t] for t in dead) - kernel.workspace)
        for d in sorted((d for d in self.plan.decisions if d.after == k), key=lambda d: d.tensor):
            if isinstance(d, Recompute):
                self.dropped[d.tensor] = d
            else:
                valid = self.host.get(d.tensor) == self.right[d.tensor]  # its copy on the host
                self.gaps[d.tensor] = self._gap(d, self.position, "on host" if valid else "queued")
                if not valid:
                    self.queue.append(self.gaps[d.tensor])
                    continue
            self.device.pop(d.tensor, None)
            self._charge(-self.size[d.tensor])
        self.position += 1
        if self.position < self.n * len(self.timeline.boundaries):
            self.remat = self._remat()


# --------------------------------------------------------------------------------------- figures


def _figures(timeline: Timeline, program: Program, replay: _Replay) -> Iterator[Violation]:
    n = len(program.kernels)
    ends = [s.end_ns for s in timeline.spans if s.kind == "kernel"][n - 1 :: n]
    begin, end = ([0] + ends)[-2:]

    def busy(kind: str) -> int:
        return sum(max(0, min(s.end_ns, end) - max(s.start_ns, begin)) for s in timeline.spans if s.kind == kind)

    waits = replay.stalls["memory"] + replay.stalls["data"]
    parts = timeline.breakdown
    for name, says, right in (
        ("boundaries", timeline.boundaries, tuple(ends)),
        ("iteration_ns", timeline.iteration_ns, end - begin),
        ("ideal_ns", timeline.ideal_ns, sum(k.duration_ns for k in program.kernels)),
        ("peak_bytes", timeline.peak_bytes, max(used for _, used in timeline.memory)),
        ("required_bytes", timeline.required_bytes, replay.required_bytes()),
        ("compute_ns", parts.compute_ns, busy("kernel")),
        ("recompute_ns", parts.recompute_ns, busy("recompute")),
        ("stall_memory_ns", parts.stall_memory_ns, replay.stalls["memory"]),
        ("stall_data_ns", parts.stall_data_ns, replay.stalls["data"]),
        ("overlapped_transfer_ns", parts.overlapped_transfer_ns, busy("swap_out") + busy("swap_in") - waits),
        ("the sum of the breakdown", parts.compute_ns + parts.recompute_ns + parts.stall_memory_ns
         + parts.stall_data_ns, end - begin),
    ):  # fmt: skip
        if says != right:
            yield Violation("figures", end, f"{name} is {says}, the spans give {right}")
