"""Replays the spans of a timeline event by event and reports the first broken rule.

At each instant, ended work is completed. Each stream is then checked: a recorded start must be allowed, and a stream
without one must be unable to start work. Positions count kernels from the start of the simulation. Rules by
number: simulator/RULES.md.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from simulator.machine import Machine
from simulator.plan import Swap
from simulator.timeline import Span, Timeline
from tests.oracle.host import Host
from tests.oracle.ledger import Change
from tests.oracle.machine import FULL, Violation, copy_ns, duplex_rates, speed_loss
from tests.oracle.steps import Block, Step, Steps


class Broken(Exception):
    """Raised if a rule is broken; the replay then stops."""


@dataclass(eq=False)
class OpenGap:
    """An evicted tensor."""

    block: Block
    before: int  # position that needs it
    after: int  # last position at which it may not be swapped in
    sync: bool
    pinned: bool
    state: str = "leaving"  # -> "on host" -> "arriving"


@dataclass
class Copy:
    """A swap-out, queued or in flight, or a swap-in."""

    block: Block
    issued: int  # number of kernels that had ended at its issue
    writes: int  # number of writes of its tensor at its issue


@dataclass
class Activity:
    """A running step or a copy in flight."""

    span: Span
    remaining: int  # remaining work, in ns / FULL
    rate: int = FULL


class Replay:
    """Replays a timeline with well-formed spans up to its last boundary; ``found`` has at most one violation."""

    def __init__(self, timeline: Timeline, steps: Steps, machine: Machine, limit: int):
        self.steps = steps
        self.machine = machine
        self.limit = limit
        self.boundaries = timeline.boundaries
        self.one_engine = machine.copy_engines == 1
        self.program = steps.program
        self.n = steps.n
        self.residency = steps.planned_residency()
        self.swaps = steps.gaps(range(-1, len(timeline.boundaries) + 1))  # positions of copy, opening, return
        self.returns = Counter(back % self.n for _, _, opened, back in self.swaps if 0 <= opened < self.n)
        self.signals = {issued % self.n for _, issued, _, _ in self.swaps} | {d.prefetch for d, *_ in self.swaps}
        self.host_thread = self._host()
        self.pending = deque(steps.steps)
        self.spans = {stream: deque(s for s in timeline.spans if s.stream == stream) for stream in ("d2h", "h2d")}
        self.duplex_rates = duplex_rates(machine)
        self.now = self.used = self.position = self.ended = self.iterations = 0
        self.running: Activity | None = None
        self.memory: list[Block] = []
        self.gaps: dict[Block, OpenGap] = {}
        self.prefetched: list[OpenGap] = []  # swapped in, or being swapped in, before their use
        self.writes: dict[int, int] = {}  # per tensor: number of writes, without recomputations
        self.host: dict[int, int] = {}  # per tensor: ``writes`` of the copy on the host
        self.queue: list[Copy] = []
        self.copies: dict[str, tuple[Activity, Copy]] = {}
        self.ledger: list[Change] = []
        self.changes: list[int] = []  # length of the ledger at the start and at the end of each iteration
        self.stalls: list[tuple[int, int, str]] = []  # start, end, cause
        self.states: list[object] = []  # of rule 10, at the start and at the end of each iteration
        self.found: list[Violation] = []
        try:
            self._begin()
            while self._advance():
                pass
        except Broken as broken:
            rule, detail = broken.args
            self.found.append(Violation(rule, self.now, detail))

    def _check(self, holds: bool, rule: str, detail: str) -> None:
        if not holds:
            raise Broken(rule, detail)

    def _host(self) -> Host | None:
        """Returns the host thread if issuing takes time (i)."""
        steps = [step for step in self.steps.steps if step.position < self.n]
        if not self.machine.issue_ns or not any(step.duration_ns for step in steps):
            return None
        swap_outs = Counter((issued + 1) % self.n for _, issued, opened, _ in self.swaps if 0 <= opened < self.n)
        costs = []
        for step in steps:
            copies = swap_outs[step.position] + self.returns[step.position] if step.span.kind == "kernel" else 0
            costs.append(self.machine.issue_ns * (copies + (step.duration_ns > 0)))
        is_full = sum(costs) <= sum(step.duration_ns for step in steps)
        return Host([step.duration_ns > 0 for step in steps], costs, self.machine.queue_depth, is_full)

    def _unissued(self) -> int | None:
        """Returns the issue time of the next step if it lacks only its issue."""
        nbytes = sum(b.nbytes for b in self.pending[0].allocates)
        if self.host_thread is None or self.running or self._is_blocked() or self.used + nbytes > self.limit:
            return None
        time = self.host_thread.time_of(self.host_thread.started)
        return time if time is not None and time > self.now else None

    def _begin(self) -> None:
        for d, issued, opened, position_back in self.swaps:
            if opened < 0 <= position_back:
                gap = self._gap_of(d, opened, position_back)
                gap.state, self.gaps[gap.block] = "on host", gap
            if opened < 0 <= position_back or issued < 0 <= opened:
                self.host[d.tensor] = 0
        for block in self.steps.persistent:
            if block not in self.gaps:
                self._charge(block, 1)
        self._record_boundary()

    def _record_boundary(self) -> None:
        position = self.position
        self.changes.append(len(self.ledger))
        last = self.iterations == len(self.boundaries)
        self.states.append(
            (
                self.host_thread and self.host_thread.lead(self.now, self.iterations, last),
                frozenset(t for t in self.host if self._valid(t)),
                frozenset(
                    (g.block.owner, g.state, g.after - position, g.before - position) for g in self.gaps.values()
                ),
                frozenset((g.block.owner, g.before - position) for g in self.prefetched if g.before > position),
                frozenset((work.span.stream, work.span.index, work.remaining) for work, _ in self.copies.values()),
                tuple((c.block.owner, c.issued - self.ended) for c in self.queue),
                self.used,
            )
        )

    def _advance(self) -> bool:
        self._end_copies()
        if self.running and self._ends(self.running):
            self._end_step()
        if self.iterations == len(self.boundaries):
            return self._stop()
        offer = self._first_swap_in()
        if offer and not self._swap_in_fits(offer):
            offer = None
        self._start_out(offer)
        self._start_in(offer)
        self._start_step()
        self._advance_clock()
        return True

    def _stop(self) -> bool:
        """Ends the replay; copies in flight at the last boundary would continue unchanged."""
        self._set_rates()
        for work, _ in self.copies.values():
            is_exact = work.span.end_ns == self.now - (-work.remaining // work.rate)
            self._check(is_exact, "duration", f"{work.span} does not end when its work is done")
        self._check(not any(self.spans.values()), "order", "something is recorded after the last iteration")
        return False

    def _charge(self, block: Block, sign: int) -> None:
        self.used += sign * block.nbytes
        if sign > 0:
            self.memory.append(block)
        else:
            self._check(block in self.memory, "memory", f"tensor {block.owner} is freed twice")
            self.memory.remove(block)
        if block.nbytes:
            self.ledger.append(Change(self.now, block.owner, block.born, sign * block.nbytes))
            self._check(self.used <= self.limit, "limit", f"{self.used} bytes of {self.limit}")

    # ---------------------------------------------------------------------------------------- gaps

    def _gap_of(self, d: Swap, opened: int, before: int) -> OpenGap:
        after = opened
        while d.prefetch is not None and after % self.n != d.prefetch:
            after += 1
        return OpenGap(self._evicted_block(d, opened), before, after, d.sync, d.prefetch is not None)

    def _evicted_block(self, d: Swap, opened: int) -> Block:
        """Returns the block that a gap opened at a position evicts."""
        blocks = self.steps.evicted
        persistent = {b.owner: b for b in self.steps.persistent}
        return blocks[opened, d.tensor] if (opened, d.tensor) in blocks else persistent[d.tensor]

    def _valid(self, tensor: int) -> bool:
        """Returns whether the host has the current content of a tensor."""
        return tensor in self.host and self.host[tensor] == self.writes.get(tensor, 0)

    def _is_blocked(self) -> bool:
        """Returns whether the next step waits for a tensor or for a synchronous swap-out."""
        missing = any(g.block.owner in self.pending[0].waits for g in self.gaps.values())
        return missing or any(g.sync and g.state == "leaving" for g in self.gaps.values())

    def _first_swap_in(self) -> OpenGap | None:
        """Returns the next swap-in: of the tensors on the host that may be swapped in, the one needed first."""
        waiting = [
            g
            for g in self.gaps.values()
            if g.state == "on host" and (self.position > g.after or self.position == g.before)
        ]
        return min(waiting, key=lambda g: (g.before, g.block.owner), default=None)

    def _swap_in_fits(self, gap: OpenGap) -> bool:
        """Returns whether a swap-in fits now and, by planned residency, until its use."""
        nbytes = gap.block.nbytes
        if self.used + nbytes > self.limit:
            return False
        is_running = self.running is not None and self.running.span.kind == "kernel"
        for p in range(self.position + is_running, gap.before):
            early = sum(g.block.nbytes for g in self.prefetched if g.before > p)
            if self.residency[p % self.n] + early + nbytes > self.limit:
                return False
        return True

    # ---------------------------------------------------------------------------------- what ends

    def _ends(self, work: Activity) -> bool:
        """Returns whether the work ends now; checks that it is complete exactly at its recorded end."""
        done = work.remaining <= 0
        ends = work.span.end_ns <= self.now
        exact = done and (work.remaining + work.rate > 0 or work.span.start_ns == self.now)
        label = f"{work.span.kind} {work.span.index}"
        self._check(ends == done and (exact or not done), "duration", f"{label} does not end when its work is done")
        return ends

    def _end_copies(self) -> None:
        if "d2h" in self.copies and self._ends(self.copies["d2h"][0]):
            copy = self.copies.pop("d2h")[1]
            gap = self.gaps.get(copy.block)
            t = copy.block.owner
            if copy.writes == self.writes.get(t, 0):
                self.host[t] = copy.writes
                if gap and gap.state == "leaving":
                    self._release(gap)
        if "h2d" in self.copies and self._ends(self.copies["h2d"][0]):
            del self.gaps[self.copies.pop("h2d")[1].block]

    def _release(self, gap: OpenGap) -> None:
        gap.state = "on host"
        self._charge(gap.block, -1)

    def _end_step(self) -> None:
        step = self.pending.popleft()
        self.running = None
        if self.host_thread and step.duration_ns:
            self.host_thread.ends.append(self.now)
        for block in step.frees:
            self._charge(block, -1)
        if step.span.kind != "kernel":
            return
        self.ended += 1
        kernel = self.program.kernels[step.span.index]
        for t in set(kernel.outputs):
            self.writes[t] = self.writes.get(t, 0) + 1
            self.queue = [c for c in self.queue if c.block.owner != t or c.block not in step.uses]
        for t in set(kernel.inputs + kernel.outputs):
            if not self.program.tensors[t].persistent and self.steps.uses[t][-1] == step.span.index:
                self.host.pop(t, None)
        swaps = sorted((s for s in self.swaps if self.position in s[1:3]), key=lambda s: s[0].tensor)
        for d, issued, opened, _ in swaps:
            if issued == self.position and not self._valid(d.tensor):
                self._issue(self._evicted_block(d, opened))
        for d, _, opened, before in swaps:
            if opened == self.position:
                gap = self._gap_of(d, opened, before)
                self.gaps[gap.block] = gap
                if self._valid(d.tensor):
                    self._release(gap)
                else:
                    self._issue(gap.block)
        self.position += 1
        self.prefetched = [g for g in self.prefetched if g.before >= self.position]
        if self.position % self.n == 0:
            self._check(self.boundaries[self.iterations] == self.now, "figures", "there are other boundaries")
            self.iterations += 1
            self._record_boundary()

    def _issue(self, block: Block) -> None:
        writes = self.writes.get(block.owner, 0)
        in_flight = [self.copies["d2h"][1]] if "d2h" in self.copies else []
        if not any(c.block is block and c.writes == writes for c in (*self.queue, *in_flight)):
            self.queue.append(Copy(block, self.ended, writes))

    # -------------------------------------------------------------------------------- what starts

    def _pop_span(self, stream: str, block: Block | None) -> Span | None:
        """Returns the recorded span that starts now, which must belong to the next block in the queue, if any."""
        spans = self.spans[stream]
        kind = "swap-out" if stream == "d2h" else "swap-in"
        span = spans[0] if spans else None
        if block is None:
            self._check(span is None or span.start_ns >= self.now, kind, f"{span} starts when it cannot")
            return None
        starts_now = span is not None and span.start_ns <= self.now
        self._check(starts_now, "idle", f"{kind} of tensor {block.owner} could start")
        is_expected = span is not None and span.index == block.owner and span.start_ns == self.now
        self._check(is_expected, kind, f"{span} starts; it is the turn of tensor {block.owner}")
        return spans.popleft()

    def _begin_copy(self, stream: str, span: Span, copy: Copy) -> None:
        self.copies[stream] = Activity(span, copy_ns(self.machine, stream, copy.block.nbytes) * FULL), copy

    def _start_out(self, offer: OpenGap | None) -> None:
        first = self.queue[0] if self.queue else None
        if first and self.one_engine and offer and offer.pinned and offer.after < self.position:
            first = None if max(0, offer.after + 1) < first.issued else first  # the earlier issue goes first
        if "d2h" in self.copies or (self.one_engine and self.copies):
            first = None
        if span := self._pop_span("d2h", first.block if first else None):
            self._begin_copy("d2h", span, self.queue.pop(0))

    def _start_in(self, offer: OpenGap | None) -> None:
        if "h2d" in self.copies or (self.one_engine and self.copies):
            offer = None
        span = self._pop_span("h2d", offer.block if offer else None)
        if span and offer:
            offer.state = "arriving"
            self.prefetched.append(offer)
            self._charge(offer.block, 1)
            self._begin_copy("h2d", span, Copy(offer.block, 0, 0))

    def _start_step(self) -> None:
        step = self.pending[0]
        nbytes = sum(b.nbytes for b in step.allocates)
        if self.running or self._is_blocked() or self.used + nbytes > self.limit or self._unissued() is not None:
            return
        if self.host_thread:
            self.host_thread.started += 1
        self._check(step.span.start_ns == self.now, "idle", "the next step could start")
        for block in step.allocates:
            self._charge(block, 1)
        waits = 0
        if step.span.kind == "kernel":
            waits += self.machine.wait_ns * self.returns[step.span.index]
            waits += self.machine.event_ns * (step.span.index in self.signals)
        self.running = Activity(step.span, (step.duration_ns + waits) * FULL)

    def _reason(self) -> str:
        """Returns the rule that keeps the next step from starting."""
        if self._unissued() is not None:
            return "issued"
        if any(g.sync and g.state == "leaving" for g in self.gaps.values()):
            return "sync"
        return "resident" if self._is_blocked() else "limit"

    # ---------------------------------------------------------------------- on to the next instant

    def _advance_clock(self) -> None:
        in_flight = self._set_rates()
        issued_at = self._unissued()
        waits = issued_at is not None
        self._check(bool(in_flight) or waits, self._reason(), "nothing is under way, and nothing can start")
        times = [w.span.end_ns for w in in_flight] + [self.now - (-w.remaining // w.rate) for w in in_flight]
        starts = [spans[0].start_ns for spans in self.spans.values() if spans]
        if not self.running:
            starts.append(self.pending[0].span.start_ns)
        if issued_at is not None:
            times.append(issued_at)
        times += [start_ns for start_ns in starts if start_ns > self.now]  # recorded starts, allowed or not
        next_ns = max(self.now, min(times))
        if next_ns > self.now and not self.running:
            self._check(self.pending[0].span.start_ns > self.now, self._reason(), "a step starts when it cannot")
            waits_for_data = any(g.block.owner in self.pending[0].waits for g in self.gaps.values())
            if self.host_thread and waits:
                self.host_thread.has_waited = True
            cause = "issue" if waits else "data" if "h2d" in self.copies and waits_for_data else "memory"
            self.stalls.append((self.now, next_ns, cause))
        for work in in_flight:
            work.remaining -= work.rate * (next_ns - self.now)
        self.now = next_ns

    def _set_rates(self) -> list[Activity]:
        """Updates the speeds of running steps and copies in flight, and returns them."""
        copies = [work for work, _ in self.copies.values()]
        for work in copies:
            work.rate = self.duplex_rates[work.span.stream] if len(copies) == 2 else FULL
        if not self.running:
            return copies
        step: Step = self.pending[0]
        self.running.rate = FULL - len(copies) * speed_loss(step.duration_ns, step.traffic_bytes, self.machine)
        return [*copies, self.running]
