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
from tests.oracle.machine import LONE, Violation, beside_each_other, copy_ns, taken
from tests.oracle.steps import Block, Step, Steps


class Broken(Exception):
    """Raised if a rule is broken; the replay then stops."""


@dataclass(eq=False)
class Gap:
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
class Work:
    """A running step or a copy in flight."""

    span: Span
    left: int  # remaining work, in ns / LONE
    rate: int = LONE


class Replay:
    """Replays a timeline with well-formed spans up to its last boundary; ``found`` has at most one violation."""

    def __init__(self, timeline: Timeline, steps: Steps, machine: Machine, limit: int):
        self.steps, self.machine, self.limit = steps, machine, limit
        self.boundaries, self.one_engine = timeline.boundaries, machine.copy_engines == 1
        self.program, self.n = steps.program, steps.n
        self.residency = steps.planned_residency()
        self.swaps = steps.gaps(range(-1, len(timeline.boundaries) + 1))  # positions of copy, opening, return
        self.returns = Counter(back % self.n for _, _, opened, back in self.swaps if 0 <= opened < self.n)
        self.signals = {issued % self.n for _, issued, _, _ in self.swaps} | {d.prefetch for d, *_ in self.swaps}
        self.host_thread = self._host()
        self.todo = deque(steps.steps)
        self.spans = {stream: deque(s for s in timeline.spans if s.stream == stream) for stream in ("d2h", "h2d")}
        self.shared = beside_each_other(machine)
        self.now = self.used = self.position = self.ended = self.iterations = 0
        self.running: Work | None = None
        self.memory: list[Block] = []
        self.gaps: dict[Block, Gap] = {}
        self.early: list[Gap] = []  # swapped in, or being swapped in, before their use
        self.writes: dict[int, int] = {}  # per tensor: number of writes, without recomputations
        self.host: dict[int, int] = {}  # per tensor: ``writes`` of the copy on the host
        self.queue: list[Copy] = []
        self.copies: dict[str, tuple[Work, Copy]] = {}
        self.ledger: list[Change] = []
        self.changes: list[int] = []  # length of the ledger at the start and at the end of each iteration
        self.stalls: list[tuple[int, int, str]] = []  # start, end, cause
        self.states: list[object] = []  # of rule 10, at the start and at the end of each iteration
        self.found: list[Violation] = []
        try:
            self._begin()
            while self._round():
                pass
        except Broken as broken:
            rule, detail = broken.args
            self.found.append(Violation(rule, self.now, detail))

    def _need(self, holds: bool, rule: str, detail: str) -> None:
        if not holds:
            raise Broken(rule, detail)

    def _host(self) -> Host | None:
        """Returns the host thread if issuing takes time (i)."""
        steps = [step for step in self.steps.steps if step.position < self.n]
        if not self.machine.issue_ns or not any(step.lasts_ns for step in steps):
            return None
        outs = Counter((issued + 1) % self.n for _, issued, opened, _ in self.swaps if 0 <= opened < self.n)
        costs = []
        for step in steps:
            copies = outs[step.position] + self.returns[step.position] if step.span.kind == "kernel" else 0
            costs.append(self.machine.issue_ns * (copies + (step.lasts_ns > 0)))
        ahead = sum(costs) <= sum(step.lasts_ns for step in steps)
        return Host([step.lasts_ns > 0 for step in steps], costs, self.machine.queue_depth, ahead)

    def _unissued(self) -> int | None:
        """Returns the issue time of the next step if it lacks only its issue."""
        takes = sum(b.nbytes for b in self.todo[0].takes)
        if self.host_thread is None or self.running or self._held_up() or self.used + takes > self.limit:
            return None
        time = self.host_thread.time_of(self.host_thread.started)
        return time if time is not None and time > self.now else None

    def _begin(self) -> None:
        for d, issued, opened, back in self.swaps:
            if opened < 0 <= back:
                gap = self._gap_of(d, opened, back)
                gap.state, self.gaps[gap.block] = "on host", gap
            if opened < 0 <= back or issued < 0 <= opened:
                self.host[d.tensor] = 0
        for block in self.steps.persistent:
            if block not in self.gaps:
                self._charge(block, 1)
        self._note_boundary()

    def _note_boundary(self) -> None:
        at = self.position
        self.changes.append(len(self.ledger))
        last = self.iterations == len(self.boundaries)
        self.states.append((
            self.host_thread and self.host_thread.lead(self.now, self.iterations, last),
            frozenset(t for t in self.host if self._valid(t)),
            frozenset((g.block.owner, g.state, g.after - at, g.before - at) for g in self.gaps.values()),
            frozenset((g.block.owner, g.before - at) for g in self.early if g.before > at),
            frozenset((work.span.stream, work.span.index, work.left) for work, _ in self.copies.values()),
            tuple((c.block.owner, c.issued - self.ended) for c in self.queue),
            self.used,
        ))  # fmt: skip

    def _round(self) -> bool:
        self._end_copies()
        if self.running and self._ends(self.running):
            self._end_step()
        if self.iterations == len(self.boundaries):
            return self._stop()
        offer = self._first_to_return()
        if offer and not self._may_return(offer):
            offer = None
        self._start_out(offer)
        self._start_in(offer)
        self._start_step()
        self._go_on()
        return True

    def _stop(self) -> bool:
        """Ends the replay; copies in flight at the last boundary would continue unchanged."""
        self._set_rates()
        for work, _ in self.copies.values():
            right = work.span.end_ns == self.now - (-work.left // work.rate)
            self._need(right, "duration", f"{work.span} does not end when its work is done")
        self._need(not any(self.spans.values()), "order", "something is recorded after the last iteration")
        return False

    def _charge(self, block: Block, sign: int) -> None:
        self.used += sign * block.nbytes
        if sign > 0:
            self.memory.append(block)
        else:
            self._need(block in self.memory, "memory", f"tensor {block.owner} is freed twice")
            self.memory.remove(block)
        if block.nbytes:
            self.ledger.append(Change(self.now, block.owner, block.born, sign * block.nbytes))
            self._need(self.used <= self.limit, "limit", f"{self.used} bytes of {self.limit}")

    # ---------------------------------------------------------------------------------------- gaps

    def _gap_of(self, d: Swap, opened: int, back: int) -> Gap:
        after = opened
        while d.prefetch is not None and after % self.n != d.prefetch:
            after += 1
        return Gap(self._sent(d, opened), back, after, d.sync, d.prefetch is not None)

    def _sent(self, d: Swap, opened: int) -> Block:
        """Returns the block that a gap opened at a position evicts."""
        blocks = self.steps.leaves
        persistent = {b.owner: b for b in self.steps.persistent}
        return blocks[opened, d.tensor] if (opened, d.tensor) in blocks else persistent[d.tensor]

    def _valid(self, tensor: int) -> bool:
        """Returns whether the host has the current content of a tensor."""
        return tensor in self.host and self.host[tensor] == self.writes.get(tensor, 0)

    def _held_up(self) -> bool:
        """Returns whether the next step waits for a tensor or for a synchronous swap-out."""
        missing = any(g.block.owner in self.todo[0].waits for g in self.gaps.values())
        return missing or any(g.sync and g.state == "leaving" for g in self.gaps.values())

    def _first_to_return(self) -> Gap | None:
        """Returns the next swap-in: of the tensors on the host that may be swapped in, the one needed first."""
        waiting = [g for g in self.gaps.values()
                   if g.state == "on host" and (self.position > g.after or self.position == g.before)]  # fmt: skip
        return min(waiting, key=lambda g: (g.before, g.block.owner), default=None)

    def _may_return(self, gap: Gap) -> bool:
        """Returns whether a swap-in fits now and, by planned residency, until its use."""
        nbytes = gap.block.nbytes
        if self.used + nbytes > self.limit:
            return False
        runs = self.running is not None and self.running.span.kind == "kernel"
        for p in range(self.position + runs, gap.before):
            early = sum(g.block.nbytes for g in self.early if g.before > p)
            if self.residency[p % self.n] + early + nbytes > self.limit:
                return False
        return True

    # ---------------------------------------------------------------------------------- what ends

    def _ends(self, work: Work) -> bool:
        """Returns whether the work ends now; checks that it is complete exactly at its recorded end."""
        done = work.left <= 0
        now = work.span.end_ns <= self.now
        just = done and (work.left + work.rate > 0 or work.span.start_ns == self.now)
        what = f"{work.span.kind} {work.span.index}"
        self._need(now == done and (just or not done), "duration", f"{what} does not end when its work is done")
        return now

    def _end_copies(self) -> None:
        if "d2h" in self.copies and self._ends(self.copies["d2h"][0]):
            copy = self.copies.pop("d2h")[1]
            gap, t = self.gaps.get(copy.block), copy.block.owner
            if copy.writes == self.writes.get(t, 0):
                self.host[t] = copy.writes
                if gap and gap.state == "leaving":
                    self._left(gap)
        if "h2d" in self.copies and self._ends(self.copies["h2d"][0]):
            del self.gaps[self.copies.pop("h2d")[1].block]

    def _left(self, gap: Gap) -> None:
        gap.state = "on host"
        self._charge(gap.block, -1)

    def _end_step(self) -> None:
        step, self.running = self.todo.popleft(), None
        if self.host_thread and step.lasts_ns:
            self.host_thread.ends.append(self.now)
        for block in step.gives:
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
        here = sorted((s for s in self.swaps if self.position in s[1:3]), key=lambda s: s[0].tensor)
        for d, issued, opened, _ in here:
            if issued == self.position and not self._valid(d.tensor):
                self._issue(self._sent(d, opened))
        for d, _, opened, back in here:
            if opened == self.position:
                gap = self._gap_of(d, opened, back)
                self.gaps[gap.block] = gap
                if self._valid(d.tensor):
                    self._left(gap)
                else:
                    self._issue(gap.block)
        self.position += 1
        self.early = [g for g in self.early if g.before >= self.position]
        if self.position % self.n == 0:
            self._need(self.boundaries[self.iterations] == self.now, "figures", "there are other boundaries")
            self.iterations += 1
            self._note_boundary()

    def _issue(self, block: Block) -> None:
        writes = self.writes.get(block.owner, 0)
        under_way = [self.copies["d2h"][1]] if "d2h" in self.copies else []
        if not any(c.block is block and c.writes == writes for c in (*self.queue, *under_way)):
            self.queue.append(Copy(block, self.ended, writes))

    # -------------------------------------------------------------------------------- what starts

    def _next(self, stream: str, turn: Block | None) -> Span | None:
        """Returns the recorded span that starts now, which must belong to the next block in the queue, if any."""
        spans, kind = self.spans[stream], "swap-out" if stream == "d2h" else "swap-in"
        span = spans[0] if spans else None
        if turn is None:
            self._need(span is None or span.start_ns >= self.now, kind, f"{span} starts when it cannot")
            return None
        here = span is not None and span.start_ns <= self.now
        self._need(here, "idle", f"{kind} of tensor {turn.owner} could start")
        right = span is not None and span.index == turn.owner and span.start_ns == self.now
        self._need(right, kind, f"{span} starts; it is the turn of tensor {turn.owner}")
        return spans.popleft()

    def _begin_copy(self, stream: str, span: Span, copy: Copy) -> None:
        self.copies[stream] = Work(span, copy_ns(self.machine, stream, copy.block.nbytes) * LONE), copy

    def _start_out(self, offer: Gap | None) -> None:
        first = self.queue[0] if self.queue else None
        if first and self.one_engine and offer and offer.pinned and offer.after < self.position:
            first = None if max(0, offer.after + 1) < first.issued else first  # the earlier issue goes first
        if "d2h" in self.copies or (self.one_engine and self.copies):
            first = None
        if span := self._next("d2h", first.block if first else None):
            self._begin_copy("d2h", span, self.queue.pop(0))

    def _start_in(self, offer: Gap | None) -> None:
        if "h2d" in self.copies or (self.one_engine and self.copies):
            offer = None
        span = self._next("h2d", offer.block if offer else None)
        if span and offer:
            offer.state = "arriving"
            self.early.append(offer)
            self._charge(offer.block, 1)
            self._begin_copy("h2d", span, Copy(offer.block, 0, 0))

    def _start_step(self) -> None:
        step = self.todo[0]
        takes = sum(b.nbytes for b in step.takes)
        if self.running or self._held_up() or self.used + takes > self.limit or self._unissued() is not None:
            return
        if self.host_thread:
            self.host_thread.started += 1
        self._need(step.span.start_ns == self.now, "idle", "the next step could start")
        for block in step.takes:
            self._charge(block, 1)
        waits = 0
        if step.span.kind == "kernel":
            waits += self.machine.wait_ns * self.returns[step.span.index]
            waits += self.machine.event_ns * (step.span.index in self.signals)
        self.running = Work(step.span, (step.lasts_ns + waits) * LONE)

    def _reason(self) -> str:
        """Returns the rule that keeps the next step from starting."""
        if self._unissued() is not None:
            return "issued"
        if any(g.sync and g.state == "leaving" for g in self.gaps.values()):
            return "sync"
        return "resident" if self._held_up() else "limit"

    # ---------------------------------------------------------------------- on to the next instant

    def _go_on(self) -> None:
        under_way, issued_at = self._set_rates(), self._unissued()
        waits = issued_at is not None
        self._need(bool(under_way) or waits, self._reason(), "nothing is under way, and nothing can start")
        times = [w.span.end_ns for w in under_way] + [self.now - (-w.left // w.rate) for w in under_way]
        says = [spans[0].start_ns for spans in self.spans.values() if spans]
        if not self.running:
            says.append(self.todo[0].span.start_ns)
        if issued_at is not None:
            times.append(issued_at)
        times += [at for at in says if at > self.now]  # recorded starts, allowed or not
        then = max(self.now, min(times))
        if then > self.now and not self.running:
            self._need(self.todo[0].span.start_ns > self.now, self._reason(), "a step starts when it cannot")
            missing = any(g.block.owner in self.todo[0].waits for g in self.gaps.values())
            if self.host_thread and waits:
                self.host_thread.waited = True
            cause = "issue" if waits else "data" if "h2d" in self.copies and missing else "memory"
            self.stalls.append((self.now, then, cause))
        for work in under_way:
            work.left -= work.rate * (then - self.now)
        self.now = then

    def _set_rates(self) -> list[Work]:
        """Updates the speeds of running steps and copies in flight, and returns them."""
        copies = [work for work, _ in self.copies.values()]
        for work in copies:
            work.rate = self.shared[work.span.stream] if len(copies) == 2 else LONE
        if not self.running:
            return copies
        step: Step = self.todo[0]
        self.running.rate = LONE - len(copies) * taken(step.lasts_ns, step.moves, self.machine)
        return [*copies, self.running]
