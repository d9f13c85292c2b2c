"""The clock: replays the spans, checks every start, and keeps a ledger of the bytes in use.

Everything happens in rounds of rule 9: what ends now is completed, then each stream is asked whether something starts
now, copies first. What starts must be allowed to; where nothing starts, nothing must be able to.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from simulator.plan import Swap
from simulator.timeline import Span, Timeline
from simulator.validate.ledger import Change
from simulator.validate.spans import Link, Violation
from simulator.validate.steps import Block, Step, Steps


@dataclass
class _Gap:
    """A swap decision at work: opened, and not closed yet. Positions count kernels from the start."""

    swap: Swap
    block: Block
    pinned: int  # position of ``prefetch``, or of ``after``
    before: int  # position that needs it
    state: str = "leaving"  # -> "on host" -> "arriving"


class Replay:
    """Replays a timeline of which ``spans`` has found nothing.

    Attributes:
        found: broken rules: resident, swap-out, sync, swap-in, idle, order.
        ledger: every change of the bytes in use.
        residency: per kernel, the planned residency.
        stalls: ns of the last iteration in which compute waits for "memory" and for "data".
        states: what the future depends on, relative to now: at the start and at the end of each iteration.
        changes: how long the ledger was then.
    """

    def __init__(self, timeline: Timeline, steps: Steps, link: Link, one_engine: bool, limit: int | None):
        self.timeline, self.steps, self.n, self.size = timeline, steps, steps.n, steps.size
        self.link, self.one_engine = link, one_engine
        self.limit = float("inf") if limit is None else limit
        self.found: list[Violation] = []
        self.ledger: list[Change] = []
        self.residency = steps.planned_residency()
        self.stalls = {"memory": 0, "data": 0}
        self.now = self.position = self.used = 0
        self.spans = deque(timeline.spans)  # those to come
        self.work = deque(steps.steps)  # likewise, of compute
        self.running: dict[str, Span] = {}
        self.queue: deque[tuple[int, int]] = deque()  # to be copied to the host: tensor, position of the issue
        self.gaps: dict[int, _Gap] = {}  # by tensor
        self.early: list[_Gap] = []  # closed, or closing, before their use
        self.written = [-1] * len(self.size)  # position of the last write
        self.host: dict[int, int] = {}  # tensor -> the write whose content was copied to the host
        begin = {block.owner: block for block in steps.persistent}
        for d, issued, opened, back in steps.gaps([-1]):
            if back >= 0:
                self.gaps[d.tensor] = self._gap(d, begin.pop(d.tensor), opened, back)
                self.gaps[d.tensor].state = "on host"
            if back >= 0 or issued + self.n < 0:  # away, or copied by the iteration before for a gap of the first
                self.host[d.tensor] = -1
        for block in begin.values():
            self._charge(block, 1)
        self.states, self.changes = [self._state()], [len(self.ledger)]
        self._replay()

    def _state(self) -> object:
        at = self.position
        return (
            frozenset(b.owner for b in self.steps.persistent if self.host.get(b.owner) == self.written[b.owner]),
            frozenset((t, g.state, g.pinned - at, g.before - at) for t, g in self.gaps.items()),
            frozenset((g.swap.tensor, g.before - at) for g in self.early if g.before > at),
            frozenset((s.stream, s.index, self.link.left(s, self.now)) for s in self.running.values()),
            tuple((t, issued - at) for t, issued in self.queue),
            self.used,
        )

    def _replay(self) -> None:
        while True:
            self._complete()
            if not self.work and "compute" not in self.running:
                break
            self._start_copies()
            self._start_compute()
            ends = [s.end_ns for s in self.running.values()] + [s.start_ns for s in list(self.spans)[:1]]
            self._wait(max(self.now, min(ends)))
        if self.spans:
            self._fail("order", "something starts after the last iteration")

    def _fail(self, rule: str, detail: str) -> None:
        self.found.append(Violation(rule, self.now, detail))

    def _charge(self, block: Block, sign: int) -> None:
        self.used += sign * block.nbytes
        if block.nbytes:
            self.ledger.append(Change(self.now, block.owner, block.born, sign * block.nbytes))

    def _gap(self, d: Swap, block: Block, opened: int, back: int) -> _Gap:
        pinned = opened
        while d.prefetch is not None and pinned % self.n != d.prefetch:
            pinned += 1
        return _Gap(d, block, pinned, back)

    # --------------------------------------------------------------------------------- completions

    def _complete(self) -> None:
        for stream, complete in (("d2h", self._end_out), ("h2d", self._end_in), ("compute", self._end_compute)):
            if stream in self.running and self.running[stream].end_ns <= self.now:
                complete(self.running.pop(stream))

    def _end_out(self, span: Span) -> None:
        self.host[span.index] = self.written[span.index]
        gap = self.gaps.get(span.index)
        if gap and gap.state == "leaving":
            self._left(gap)

    def _left(self, gap: _Gap) -> None:
        gap.state = "on host"
        self._charge(gap.block, -1)

    def _end_in(self, span: Span) -> None:
        gap = self.gaps.get(span.index)
        if gap and gap.state == "arriving":
            del self.gaps[span.index]

    def _end_compute(self, span: Span) -> None:
        step, k = self.work.popleft(), span.index
        for block in step.gives:
            self._charge(block, -1)
        if span.kind == "recompute":
            return
        for t in self.steps.program.kernels[k].outputs:
            self.written[t] = self.position
        for d in self.steps.swaps:
            valid = self.host.get(d.tensor) == self.written[d.tensor]  # its copy on the host
            if d.after == k:
                back = self.steps.next_use(d.tensor, self.position + 1)
                gap = self.gaps[d.tensor] = self._gap(
                    d, self.steps.leaves[self.position, d.tensor], self.position, back
                )
                if valid:
                    self._left(gap)
            if (d.after if d.copy is None else d.copy) == k and not valid:
                self.queue.append((d.tensor, self.position))
        self.position += 1
        if self.position % self.n == 0:
            self.states.append(self._state())
            self.changes.append(len(self.ledger))

    # -------------------------------------------------------------------------------------- copies

    def _next(self, stream: str) -> Span | None:
        """What is recorded to start now, if it is on this stream."""
        span = self.spans[0] if self.spans else None
        return span if span and span.start_ns <= self.now and span.stream == stream else None

    def _start_copies(self) -> None:
        engine_free = not (self.one_engine and {"d2h", "h2d"} & self.running.keys())
        first = self._first_to_return()
        ahead = self.one_engine and first is not None and self._goes_first(first)
        if span := self._next("d2h"):
            self._start_out(span, first if ahead else None)
        elif self.queue and engine_free and "d2h" not in self.running and not ahead:
            self._fail("idle", f"tensor {self.queue[0][0]} does not leave while the copy engine is free")
        if self.one_engine and "d2h" in self.running:
            engine_free = False
        if span := self._next("h2d"):
            self._start_in(span, first)
        elif first and engine_free and "h2d" not in self.running and not (self.one_engine and self.queue and not ahead):
            if self._fits(first):
                self._fail("idle", f"tensor {first.swap.tensor} does not return while the copy engine is free")

    def _first_to_return(self) -> _Gap | None:
        """Of the tensors on the host that may come back, the one that is needed first."""
        waiting = [g for g in self.gaps.values() if g.state == "on host" and self._may_return(g)]
        return min(waiting, key=lambda g: (g.before, g.swap.tensor), default=None)

    def _may_return(self, gap: _Gap) -> bool:
        return self.position > gap.pinned or self.position == gap.before

    def _goes_first(self, gap: _Gap) -> bool:
        """On one engine: is this swap-in served before the first swap-out?"""
        issued_first = not self.queue or (gap.swap.prefetch is not None and gap.pinned < self.queue[0][1])
        return issued_first and self._fits(gap)

    def _fits(self, gap: _Gap) -> bool:
        """Rule 5: now, and with the planned residency and what is early at every kernel until its use."""
        if self.used + self.size[gap.swap.tensor] > self.limit:
            return False
        runs = self.running.get("compute")
        for p in range(self.position + (runs is not None and runs.kind == "kernel"), gap.before):
            early = sum(self.size[g.swap.tensor] for g in self.early if g.before > p)
            if self.residency[p % self.n] + early + self.size[gap.swap.tensor] > self.limit:
                return False
        return True

    def _start_out(self, span: Span, rather: _Gap | None) -> None:
        self.running["d2h"] = self.spans.popleft()
        t = span.index
        if not self.queue or self.queue[0][0] != t:
            self._fail("swap-out", f"tensor {t} leaves; queued are {[q[0] for q in self.queue]}")
        elif rather:
            self._fail(
                "swap-out", f"tensor {t} leaves before tensor {rather.swap.tensor} returns, which was issued first"
            )
        self.queue = deque(q for q in self.queue if q[0] != t)

    def _start_in(self, span: Span, first: _Gap | None) -> None:
        self.running["h2d"] = self.spans.popleft()
        t, gap = span.index, self.gaps.get(span.index)
        if gap is None or gap.state != "on host":
            self._fail("swap-in", f"tensor {t} returns but is {gap.state if gap else 'not away'}")
            return
        if not self._may_return(gap):
            self._fail("swap-in", f"tensor {t} returns before its prefetch kernel {gap.pinned % self.n} has ended")
        elif first and first is not gap:
            self._fail("swap-in", f"tensor {first.swap.tensor} is needed before tensor {t}")
        elif not self._fits(gap):
            self._fail("swap-in", f"tensor {t} returns where there is no room for it until its use")
        elif self.one_engine and self.queue and not self._goes_first(gap):
            self._fail("swap-in", f"tensor {t} returns before tensor {self.queue[0][0]} leaves, which was issued first")
        gap.state = "arriving"
        self.early.append(gap)
        self._charge(gap.block, 1)

    # ------------------------------------------------------------------------------------- compute

    def _held(self) -> list[int]:
        """Tensors whose synchronous swap-outs compute waits for."""
        return [t for t, g in self.gaps.items() if g.swap.sync and g.state == "leaving"]

    def _away(self, step: Step) -> list[int]:
        """Tensors that the step waits for."""
        return sorted(t for t in step.waits if t in self.gaps)

    def _start_compute(self) -> None:
        span = self._next("compute")
        step = self.work[0] if self.work else None
        if span and step:
            self.running["compute"] = self.spans.popleft()
            if self._held():
                self._fail("sync", f"{span.kind} {span.index} starts before tensors {self._held()} have left")
            for t in self._away(step):
                k = step.position % self.n
                again = "" if span.kind == "kernel" else f" is run again for {k}"
                self._fail("resident", f"kernel {span.index}{again or ' starts'} while tensor {t} is away")
            for block in step.takes:
                self._charge(block, 1)
        elif step and "compute" not in self.running and not self._held() and not self._away(step):
            if self.used + sum(block.nbytes for block in step.takes) <= self.limit:
                self._fail("idle", f"nothing keeps kernel {step.span.index} from starting")

    def _wait(self, then: int) -> None:
        """Until then nothing happens. Why does compute wait?"""
        if "compute" not in self.running and self.work:
            why = "data" if self._away(self.work[0]) and "h2d" in self.running else "memory"
            self.stalls[why] += max(0, then - max(self.now, self.timeline.last_start_ns))
        self.now = then
