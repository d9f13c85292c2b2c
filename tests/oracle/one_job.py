"""One job of a recorded timeline, step by step: what it may do next, by its spans and its plans alone.

What each step reads, takes and gives back is ``steps.py``'s, one plan after the other. Positions count
kernels from the beginning of the present plan. Plans are numbered as in ``Job.plans``.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from simulator.job import Job, JobTimeline
from simulator.plan import Swap
from simulator.timeline import Span
from tests.oracle.ledger import Change
from tests.oracle.machine import LONE
from tests.oracle.steps import Block, Step, Steps, passes

FAR = 2**62  # a use that does not come


@dataclass(eq=False)
class Gap:
    """A tensor that is away."""

    block: Block
    before: int  # position that needs it
    after: int = FAR  # position from which it may come back, less one
    sync: bool = False
    pinned: bool = False
    demand: bool = False  # then ``after`` says nothing
    state: str = "leaving"  # -> "on host" -> "arriving"
    counted: bool = False  # on the host, beside what is planned


class Piece(NamedTuple):
    """A step as recorded."""

    begin: int  # when its memory is taken: that of the switch before it
    step: Step
    span: Span


@dataclass
class Part:
    """Iterations that a job ran one after the other by the same plan."""

    plan: int  # or another one that is alike
    steps: Steps
    pieces: list[Piece]
    residency: list[int]
    swaps: list[tuple[Swap, int, int, int]]  # positions of the copy's issue, the opening, the return
    ended: int  # iterations of the job when it ended

    @cached_property
    def returns(self) -> Counter[int]:
        """How many gaps each kernel ends."""
        n = self.steps.n
        return Counter(back % n for _, _, opened, back in self.swaps if 0 <= opened < n)

    @classmethod
    def of(cls, job: Job, plan: int, spans: list[Span], begins: dict[int, int], first: int, end: int) -> Part:
        """Iterations ``first`` to ``end``, by a plan; ``begins``: when a switch comes before a span."""
        went_by = job.plans[plan]
        steps = Steps(spans, job.program.with_variants(went_by.variants), went_by)
        pieces = [Piece(begins.get(id(s.span), s.span.start_ns), s, s.span) for s in steps.steps]
        return cls(plan, steps, pieces, steps.planned_residency(), steps.gaps(range(-1, end - first + 1)), end)

    @classmethod
    def unused(cls, job: Job, plan: int) -> Part:
        """A plan that no iteration ran by."""
        spans = []
        for k, again in enumerate(passes(job.program, job.plans[plan])):
            spans += [Span(0, 0, "compute", "recompute", w) for w in again] + [Span(0, 0, "compute", "kernel", k)]
        return cls.of(job, plan, spans, {}, 0, 1)

    def touched(self, step: Step) -> list[Block]:
        """What must be there when the step starts, or is made by it."""
        out = step.uses + step.gives + step.takes
        if step.span.kind == "kernel":
            for d, issued, opened, _ in self.swaps:
                if step.position in (issued, opened):
                    out.append(self.sent(d, opened))
        return [b for b in out if b.owner >= 0]

    def sent(self, d: Swap, opened: int) -> Block:
        """The block that a gap opened at a position sends away."""
        blocks = self.steps.leaves
        persistent = {b.owner: b for b in self.steps.persistent}
        return blocks[opened, d.tensor] if (opened, d.tensor) in blocks else persistent[d.tensor]


def alike(job: Job, a: int, b: int) -> bool:
    """Do two plans do the same?"""
    x, y = job.plans[a], job.plans[b]
    return set(x.decisions) == set(y.decisions) and x.variants == y.variants


def parts_of(job: Job, ran: JobTimeline) -> list[Part]:
    """The job's iterations, by plan; its spans are well formed and in order."""
    compute = [s for s in ran.spans if s.stream == "compute"]
    begins, work = {}, [s for s in compute if s.kind != "switch"]
    for a, b in zip(compute, compute[1:], strict=False):
        if a.kind == "switch":
            begins[id(b)] = a.start_ns
    ends = [0]  # of iterations, in ``work``
    for i, s in enumerate(work):
        if s.kind == "kernel" and s.index == len(job.program.kernels) - 1:
            ends.append(i + 1)
    by = {0: 0}  # iteration -> plan
    for time, plan in ran.switches:
        by[0 if time == ran.admitted_ns else 1 + ran.boundaries.index(time)] = plan
    starts = [0]
    for i in sorted(by):
        if not alike(job, by[i], by[starts[-1]]):
            starts.append(i)
    return [
        Part.of(job, by[first], work[ends[first] : ends[end]], begins, first, end)
        for first, end in zip(starts, [*starts[1:], len(ran.boundaries)], strict=True)
    ]


@dataclass(eq=False)
class Running:
    """The state of a job from its admission until it has left."""

    index: int
    job: Job
    ran: JobTimeline
    parts: list[Part]
    kernel_ends: list[int]  # by position: how many kernels of all jobs had ended when it was reached
    part: int = -1
    plan: int = 0  # that it goes by
    switches: list[tuple[int, int]] = field(default_factory=list)
    position: int = 0
    todo: deque[Piece] = field(default_factory=deque)
    running: Piece | None = None
    memory: list[Block] = field(default_factory=list)
    gaps: dict[Block, Gap] = field(default_factory=dict)
    early: list[Gap] = field(default_factory=list)
    writes: dict[int, int] = field(default_factory=dict)  # by tensor: how often kernels wrote it, but again
    host: dict[int, tuple[int, Block]] = field(default_factory=dict)  # by tensor: that number, of its copy; of what
    iterations: int = 0
    idle_since: int = 0
    ready_since: int | None = None
    offer: Gap | None = None
    offered_since: int = 0
    leaving: bool = False
    on_host: list[int] = field(default_factory=list)  # by plan: what it holds there at the most
    ledger: list[Change] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)  # how long the ledger was after admission, and each iteration
    stalls: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def now(self) -> Part:
        """The present plan's part."""
        return self.parts[self.part]

    @property
    def n(self) -> int:
        """Kernels of an iteration."""
        return len(self.now.steps.program.kernels)

    def state(self) -> tuple[object, ...]:
        """What its future depends on, relative to now."""
        at = self.position
        return (
            frozenset(t for t in self.host if self.valid(t)),
            frozenset((g.block.owner, g.state, g.after - at, g.before - at) for g in self.gaps.values()),
            frozenset((g.block.owner, g.before - at) for g in self.early if g.before > at),
        )

    def valid(self, tensor: int) -> bool:
        """Has the host what the tensor holds?"""
        return tensor in self.host and self.host[tensor][0] == self.writes.get(tensor, 0)

    def go_by(self, plan: int, now: int) -> bool:
        """Goes on by a plan; returns whether that changes anything."""
        if plan == self.plan:
            return False
        before, self.plan = self.plan, plan
        self.switches.append((now, plan))
        return not alike(self.job, before, plan)

    def enter(self, part: int, ended: int) -> None:
        """Goes on by the next plan, after so many kernels of all jobs; what is in memory, or away, is persistent."""
        if part:
            new = {b.owner: b for b in self.parts[part].steps.persistent}
            self.memory = [new[b.owner] for b in self.memory]
            for gap in self.gaps.values():
                gap.block = new[gap.block.owner]
            self.gaps = {gap.block: gap for gap in self.gaps.values()}
            self.host = {t: (count, new[t]) for t, (count, _) in self.host.items()}
        self.part, self.position, self.early, self.kernel_ends = part, 0, [], [ended]
        self.todo = deque(self.now.pieces)

    def gap_of(self, d: Swap, opened: int, back: int) -> Gap:
        """A gap of the plan."""
        after = opened
        while d.prefetch is not None and after % self.n != d.prefetch:
            after += 1
        return Gap(self.now.sent(d, opened), back, after, d.sync, d.prefetch is not None)

    def next_touch(self, block: Block) -> tuple[int, int]:
        """(position, ns until then) of the next step that touches a block."""
        ns, step = 0, None
        left = [p.step for p in self.todo if p.step.position // self.n == self.position // self.n]
        for step in left:
            if block in self.now.touched(step):
                return step.position, ns
            ns += step.lasts_ns
        if block.born < 0:
            # The iterations of a plan are alike; that before is as good as that after.
            whole = [p.step for p in self.now.pieces if p.step.position // self.n == self.position // self.n]
            for step in whole:
                if block in self.now.touched(step):
                    return step.position + self.n, ns
                ns += step.lasts_ns
        return FAR, FAR

    def awaited(self) -> list[Gap]:
        """What the next step needs and is away."""
        step = self.todo[0].step
        touched = self.now.touched(step)
        return [g for g in self.gaps.values() if (g.block in touched if g.demand else g.block.owner in step.waits)]

    def held_up(self) -> bool:
        """Is something missing, or a synchronous swap-out not over?"""
        return bool(self.awaited()) or any(g.sync and g.state == "leaving" for g in self.gaps.values())

    def first_to_return(self, served: bool) -> Gap | None:
        """Of what is on the host and may come back, what is needed first; ``served``: of what the next step needs."""
        gaps = self.awaited() if served else list(self.gaps.values())
        waiting = [
            g for g in gaps
            if g.state == "on host"
            and ((g.demand and g.before < FAR) or self.position > g.after or self.position == g.before)
        ]  # fmt: skip
        return min(waiting, key=lambda g: (g.before, g.block.owner, g.demand, g.block.born), default=None)

    def has_room(self, gap: Gap, limit: int) -> bool:
        """Until it is used, by the job's planned residency."""
        if gap.demand:
            return True
        runs = self.running is not None and self.running.span.kind == "kernel"
        for p in range(self.position + runs, gap.before):
            early = sum(g.block.nbytes for g in self.early if g.before > p)
            if self.now.residency[p % self.n] + early + gap.block.nbytes > limit:
                return False
        return True


@dataclass
class Copy:
    """To the host, queued or under way; or back."""

    job: Running
    block: Block
    issued: int  # kernels of all jobs that had ended
    writes: int  # of its tensor, then


@dataclass
class Work:
    """A span under way."""

    job: Running
    span: Span
    left: int  # in ns / LONE
    rate: int = LONE
