"""Turns a plan into work on three streams: its order, its addresses, and what waits for what.

The order is that of one steady iteration of a simulated Timeline (simulator/RULES.md), a circle of **jobs**: its spans
in the order of their starts. Each stream does its jobs in order; between streams a job waits for

1. *data*: a step of the schedule for the swap-ins of what it uses (rules 2, 6, 7);
2. *its kernel*: a swap-out for the end of ``copy``; a swap-in for that of ``prefetch`` or of the last compute (4, 5);
3. *the host*: a swap-in for the swap-out before it; a swap-out for the swap-ins of what was in its place before;
4. ``sync``: the next compute for the synchronous swap-outs that are then queued or under way (rule 4);
5. *memory*: a job that puts a block at an address, for all that had to be over to free what was there (simulator.pool).

Why this cannot lock up: executor/replay/README.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Decision, Plan, Swap
from simulator.pool import Lifetimes, Packing, timeline_lifetimes
from simulator.pool.packed import pack_within
from simulator.pool.pinned_places import Held
from simulator.program import Kernel, Program
from simulator.schedule import Schedule, lower
from simulator.timeline import Span, Timeline

LONGEST = 512  # iterations to simulate before a plan counts as never steady
MAX_PERIOD = 16  # iterations in a circle


class ReplayError(RuntimeError):
    """A plan cannot be run as asked, or what ran was wrong; the message names the first reason."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes in the arena that hold a tensor (or, below 0, as -1 - k, the workspace of kernel k) at a version."""

    owner: int
    offset: int
    nbytes: int
    version: int = 0  # in the first iteration


@dataclass(frozen=True, slots=True)
class Stay:
    """One stay of a block of the schedule in the arena.

    Attributes:
        index: of the block in the schedule.
        begin: the job that puts it there; None: it is there always.
        ends: (rounds later, job) of the jobs that must be over until its memory is free.
        crosses: it is there where the circle begins.
    """

    block: Block
    index: int
    begin: int | None
    ends: tuple[tuple[int, int], ...]
    crosses: bool


@dataclass(slots=True)
class Job:
    """One span of the circle, as it is issued.

    Attributes:
        waits: (iterations back, position in the circle) of the jobs that must be over.
        fresh: blocks that it writes first, its workspace among them.
        reads: blocks whose content it needs.
        writes: blocks that held something before, with the version that it leaves there.
        block: of a copy: where the tensor is in the arena.
    """

    span: Span
    waits: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[Block] = field(default_factory=list)
    reads: list[Block] = field(default_factory=list)
    writes: list[Block] = field(default_factory=list)
    block: Block | None = None


@dataclass(frozen=True)
class Circle:
    """The jobs of a plan, and where they find memory.

    Attributes:
        program: what the jobs' indices mean: under its variants, and unrolled over ``iterations`` of the given one.
        original: the given program's index of each of its tensors.
        predicted: the simulated timeline that the order comes from, of ``program``.
        jobs: in the order of issue.
        stays: of the blocks in the arena.
        host: tensor -> offset in the host buffer of ``host_bytes``, of those that are swapped.
        on_host: tensors whose places are theirs where the circle begins.
        footprint: bytes of the packing, and of the arena.
    """

    program: Program
    original: list[int]
    predicted: Timeline
    iterations: int
    jobs: list[Job]
    stays: list[Stay]
    host: dict[int, int]
    host_bytes: int
    on_host: frozenset[int]
    footprint: int

    @property
    def start(self) -> list[Block]:
        """Blocks of persistent tensors that are in the arena where the circle begins."""
        return [s.block for s in self.stays if s.crosses]


def circle(program: Program, plan: Plan, machine: Machine, limit: int) -> Circle:
    """Returns the jobs of a plan.

    Raises:
        PlanError, OutOfMemory: as ``simulate``; PlanError also for a kind of decision that is not replayed.
        ReplayError: the plan does not become steady.
    """
    plan.only("a replay", "swap", "recompute", "rerun")
    plan.check(program)
    schedule, times = lower(program, plan), 1
    predicted = simulate(program, plan, machine, limit, schedule=schedule)
    if not predicted.period:
        predicted = simulate(program, plan, machine, limit, iterations=LONGEST, schedule=schedule)
    original = list(range(len(program.tensors)))
    if not predicted.steady:
        times = predicted.period
        if not 0 < times <= MAX_PERIOD:
            what = f"repeat only after {times}" if times else f"do not repeat within {LONGEST}"
            raise ReplayError(f"the plan's iterations {what}; up to {MAX_PERIOD} can be replayed as a circle")
        program, plan, original = unrolled(schedule.program, plan, times)
        schedule = lower(program, plan)
        predicted = simulate(program, plan, replace(machine, host_bytes=2**62), limit, schedule=schedule)
        if not predicted.steady:
            raise ReplayError(f"the plan's iterations do not repeat in groups of {times} either")
    lives = timeline_lifetimes(predicted)
    packing = pack_within(lives.intervals, limit, machine.alignment)
    walk = _Walk(schedule, predicted, lives, packing, machine)
    held = walk.held
    first = frozenset(t for t, upper in zip(held.tensors, held.intervals.upper, strict=True) if upper >= walk.period)
    return Circle(
        schedule.program, original, predicted, times, walk.jobs, walk.stays, held.offsets, held.footprint, first,
        packing.footprint,
    )  # fmt: skip


def unrolled(program: Program, plan: Plan, times: int) -> tuple[Program, Plan, list[int]]:
    """So many iterations as one: persistent tensors are the same in all, the others are born in each.

    Returns:
        The program, the plan, and the given index of each tensor.
    """
    n, tensors = len(program.kernels), list(program.tensors)
    original = list(range(len(tensors)))
    kernels: list[Kernel] = []
    decisions: list[Decision] = []
    for i in range(times):
        index = list(range(len(program.tensors)))
        for t, tensor in enumerate(program.tensors):
            if i and not tensor.persistent:
                index[t] = len(tensors)
                tensors.append(tensor)
                original.append(t)
        kernels += [replace(k, inputs=tuple(index[t] for t in k.inputs), outputs=tuple(index[t] for t in k.outputs))
                    for k in program.kernels]  # fmt: skip
        decisions += [d.renumbered(index, i * n, n, times * n) for d in plan.decisions]
    return replace(program, tensors=tuple(tensors), kernels=tuple(kernels)), Plan(tuple(decisions)), original


class _Walk:
    """The last iteration of a steady timeline as a circle.

    A moment is the start or the end of a job; positions count moments from the iteration's begin.

    Attributes:
        period: how many moments there are.
        begins, ends: position of the start and of the end of each job.
        late: of each job, whether it ends in the next iteration.
    """

    def __init__(self, schedule: Schedule, timeline: Timeline, lives: Lifetimes, packing: Packing, machine: Machine):
        self.schedule, self.program = schedule, schedule.program
        self._moments(timeline)
        one = machine.copy_engines == 1
        self.streams = ["copy" if one and j.span.stream != "compute" else j.span.stream for j in self.jobs]
        self.kernels, self.outs, self.ins = (self._jobs_of(kind) for kind in ("kernel", "swap_out", "swap_in"))
        self.compute = [j for j, job in enumerate(self.jobs) if job.span.stream == "compute"]  # by step
        if len(self.compute) != len(schedule.steps):
            raise AssertionError(
                f"{len(self.compute)} spans of compute are {len(schedule.steps)} steps of the schedule"
            )
        self.gap = {j: self._gap(j) for jobs in (*self.outs.values(), *self.ins.values()) for j in jobs}
        self._stays(lives, packing)
        self._contents()
        self.held = Held(
            {t: [self.begins[j] for j in jobs] for t, jobs in self.outs.items()},
            {t: [self.ends[j] for j in jobs] for t, jobs in self.ins.items()},
            [t.nbytes for t in self.program.tensors], self.period, machine.alignment,
        )  # fmt: skip
        self._waits()

    def _moments(self, timeline: Timeline) -> None:
        """Starts and ends in their order, as simulator.pool.intervals reads them (rule 9)."""
        spans, end = timeline.spans, timeline.boundaries[-1]
        starts = [span.start_ns for span in spans]
        # An end comes before the first span that starts later and not earlier than that; of several, compute's is last.
        following = [bisect_left(starts, span.end_ns, i + 1) for i, span in enumerate(spans)]
        over = {i for i, span in enumerate(spans) if following[i] < len(spans) or span.end_ns <= end}
        moments = [(i, True, 0, False, i) for i in range(len(spans))]
        moments += [(following[i], False, spans[i].end_ns, spans[i].stream == "compute", i) for i in over]
        moments.sort()
        ends = [m for m, (_, starts_now, *_, i) in enumerate(moments) if not starts_now and spans[i].kind == "kernel"]
        boundary = ends[-len(self.program.kernels) - 1]  # the last iteration begins after it
        first = moments[boundary][0]
        moments = moments[boundary + 1 :]

        # What was under way at the begin is what is under way at the end, an iteration later.
        under_way = {spans[i][2:]: i for i in range(len(spans)) if i not in over}
        self.jobs = [Job(span) for span in spans[first:]]
        self.begins, self.ends = [0] * len(self.jobs), [0] * len(self.jobs)
        for position, (_, starts_now, *_, i) in enumerate(moments):
            j = (under_way[spans[i][2:]] if i < first else i) - first
            (self.begins if starts_now else self.ends)[j] = position
        self.late = [end < begin for begin, end in zip(self.begins, self.ends, strict=True)]
        self.period = len(moments)

    def _jobs_of(self, kind: str) -> dict[int, list[int]]:
        """Index of the span -> its jobs."""
        out: dict[int, list[int]] = {}
        for j, job in enumerate(self.jobs):
            if job.span.kind == kind:
                out.setdefault(job.span.index, []).append(j)
        return out

    def _latest(self, jobs: Iterable[int], position: int) -> tuple[int, int] | None:
        """(iterations back, at most 0; job) of the last job to start that is over at a position."""
        return max(((-(self.ends[j] > position) - self.late[j], j) for j in jobs), default=None)

    # ---------------------------------------------------------------------------------- memory

    def _gap(self, j: int) -> tuple[tuple[int, int], Swap]:
        """The decision that a copy belongs to, and the kernel whose end issued it or opened its gap (``_latest``)."""
        span, found = self.jobs[j].span, []
        for d in self.schedule.moved:
            if d.tensor == span.index:
                kernels = self.kernels[d.copied_at if span.kind == "swap_out" else d.after]
                latest = self._latest(kernels, self.begins[j])
                assert latest is not None
                found.append((latest, d))
        return max(found, key=lambda x: x[0])

    def _stays(self, lives: Lifetimes, packing: Packing) -> None:
        """Which blocks a job puts where, and the jobs that free what lies there before."""
        schedule, blocks, gaps = self.schedule, lives.intervals, self.schedule.gaps_of_blocks
        step_of = dict(zip(self.compute, schedule.steps, strict=True))
        begun: dict[int, list[tuple[int, int]]] = {}  # block -> the jobs that put it there, and how many gaps before
        for j, job in enumerate(self.jobs):
            if job.span.kind == "swap_in":
                d = self.gap[j][1]
                begun.setdefault(schedule.moved[d], []).append((j, gaps[schedule.moved[d]].index(d) + 1))
            for b in step_of[j].allocates if j in step_of else ():
                begun.setdefault(b, []).append((j, 0))

        def ends(b: int, past: int) -> list[int]:
            """The jobs that end the stay after so many gaps."""
            mine = gaps.get(b, [])
            if past == len(mine) and schedule.blocks[b].first >= 0:
                return [self.compute[schedule.blocks[b].last]]
            d = mine[past % len(mine)]
            return [*self.kernels[d.after], *(j for j in self.outs.get(d.tensor, ()) if self.gap[j][1] == d)]

        self.stays: list[Stay] = []
        self.arrives: list[list[Stay]] = [[] for _ in self.jobs]
        for i, b in enumerate(lives.block.tolist()):  # by ascending begin
            block = Block(int(lives.owner[i]), int(packing.offsets[i]), int(blocks.nbytes[i]))
            crosses = bool(blocks.upper[i] >= blocks.period)
            if blocks.upper[i] - blocks.lower[i] == blocks.period:
                self.stays.append(Stay(block, b, None, (), True))
                continue
            j, past = begun[b].pop(0)
            self.stays.append(Stay(block, b, j, tuple((int(f < j), f) for f in ends(b, past)), crosses))
            self.arrives[j].append(self.stays[-1])
        self.freed_by: list[set[int]] = [set() for _ in self.jobs]  # by whom the memory of each job's blocks is freed
        lower, upper = packing.offsets, packing.offsets + blocks.nbytes
        for i, stay in enumerate(self.stays):
            if stay.begin is not None:
                here = np.flatnonzero((lower < upper[i]) & (lower[i] < upper))
                self.freed_by[stay.begin].update(f for other in here for _, f in self.stays[other].ends)

    # ---------------------------------------------------------------------------------- contents

    def _contents(self) -> None:
        """What each job reads and writes, where, at which version."""
        writes = self.program.writes
        where = {s.index: s.block for s in self.stays if s.crosses}
        version = {b: 0 for b, block in enumerate(self.schedule.blocks) if block.first < 0}
        steps = iter(self.schedule.steps)
        for j, job in enumerate(self.jobs):
            where |= {stay.index: stay.block for stay in self.arrives[j]}
            if job.span.stream != "compute":
                job.block = where.get(self.schedule.moved[self.gap[j][1]])
                continue
            step = next(steps)
            kernel = self.program.kernels[step.kernel]
            job.fresh = [stay.block for stay in self.arrives[j] if stay.block.owner < 0]
            for x, b in step.uses.items():
                if x in kernel.inputs and version[b] != bisect_left(writes[x], step.kernel):
                    raise AssertionError(f"kernel {step.kernel} reads version {version[b]} of tensor {x}")
                if b in where and b not in step.allocates:
                    job.reads.append(replace(where[b], version=version[b]))
                if x in kernel.outputs:
                    version[b] = bisect_right(writes[x], step.kernel)
                    if b in where:
                        to = job.fresh if b in step.allocates else job.writes
                        to.append(replace(where[b], version=version[b]))

    # ---------------------------------------------------------------------------------- waits

    def _waits(self) -> None:
        """Per job the last job of each other stream that must be over, unless a job before it waits for that."""
        count = len(self.jobs)
        sync = [j for jobs in self.outs.values() for j in jobs if self.gap[j][1].sync]
        waited: dict[tuple[str, str], int] = {}
        for _ in range(2):  # the second time knows what was waited for an iteration before
            waited = {key: last - count for key, last in waited.items()}
            for j, job in enumerate(self.jobs):
                job.waits = []
                for back, i in sorted(self._must_be_over(j, sync), reverse=True):
                    key, number = (self.streams[j], self.streams[i]), back * count + i
                    if key[0] != key[1] and number > waited.get(key, -4 * count):
                        waited[key] = number
                        job.waits.append((-back, i))

    def _must_be_over(self, j: int, sync: list[int]) -> set[tuple[int, int]]:
        """The jobs of the numbered list above (module), as ``_latest`` gives them."""
        kind, at, t = self.jobs[j].span.kind, self.begins[j], self.jobs[j].span.index
        out = {self._latest([i], at) for i in self.freed_by[j]}
        if kind == "swap_out":
            out.add(self.gap[j][0])
            out |= {self._latest(self.ins.get(x, ()), at) for x in self.held.neighbours(t)}
        elif kind == "swap_in":
            opened, decision = self.gap[j]
            pinned = self._latest(self.kernels[decision.prefetch], at) if decision.prefetch is not None else None
            if pinned is None or pinned < opened:
                ended = bisect_left([self.ends[i] for i in self.compute], at)
                pinned = (0, self.compute[ended - 1]) if ended else (-1, self.compute[-1])
            out |= {pinned, self._latest(self.outs.get(t, ()), at)}
        else:
            step = self.schedule.steps[bisect_left(self.compute, j)]
            out |= {self._latest(self.ins.get(x, ()), at) for x in step.waits}
            out.add(self._latest(sync, at))
        return {x for x in out if x is not None}
