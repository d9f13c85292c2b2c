"""Turns a plan into jobs on three streams with their order, addresses and dependencies.

A **cycle** of jobs is one steady iteration of a simulated Timeline (simulator/RULES.md): its spans in order of their
starts. Each stream runs its jobs in order; across streams, a job waits for other jobs (see the list below).
executor/replay/README.md explains why this cannot deadlock.
"""

# Waits across streams:
# 1. data: a step of the schedule waits for the swap-ins of the tensors it uses (rules 2, 6, 7);
# 2. kernel: a swap-out waits for the end of kernel ``copy``, a swap-in for ``prefetch`` or the last kernel (4, 5);
# 3. host: a swap-in waits for the preceding swap-out, a swap-out for the swap-ins of earlier tensors at its host place;
# 4. sync: the next compute waits for synchronous swap-outs that are queued or in flight (rule 4);
# 5. memory: a job that places a block waits for all jobs that had to end to free that memory (simulator.pool).

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
from simulator.pool.pinned_places import PinnedSlots
from simulator.program import Kernel, Program
from simulator.schedule import Schedule, lower
from simulator.timeline import Span, Timeline

LONGEST = 512  # simulated iterations after which a plan counts as never steady
MAX_PERIOD = 16  # maximum number of iterations in a cycle


class ReplayError(RuntimeError):
    """Raised if a plan cannot be replayed or a replay produced wrong bytes; the message has the first reason."""


@dataclass(frozen=True, slots=True)
class Block:
    """Arena memory of a version of a tensor or of a workspace."""

    owner: int  # tensor, or -1 - k for the workspace of kernel k
    offset: int
    nbytes: int
    version: int = 0  # version in the first iteration


@dataclass(frozen=True, slots=True)
class Residency:
    """Interval in which a block of the schedule is in the arena.

    Attributes:
        index: index of the block in the schedule.
        begin: job that places it; None: always resident.
        ends: (rounds later, job) of the jobs that must end before its memory is free.
        crosses: whether the block is resident at the start of the cycle.
    """

    block: Block
    index: int
    begin: int | None
    ends: tuple[tuple[int, int], ...]
    crosses: bool


@dataclass(slots=True)
class Job:
    """One span of the cycle, in order of issue.

    Attributes:
        waits: (iterations back, position in the cycle) of the jobs that must end before this one starts.
        fresh: blocks that the job writes first, including its workspace.
        reads: blocks that the job reads.
        writes: blocks that the job overwrites, with their new version.
        block: location of a copy's tensor in the arena.
    """

    span: Span
    waits: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[Block] = field(default_factory=list)
    reads: list[Block] = field(default_factory=list)
    writes: list[Block] = field(default_factory=list)
    block: Block | None = None


@dataclass(frozen=True)
class Cycle:
    """Steady-state cycle of a plan: its jobs and their addresses.

    Attributes:
        program: program that the jobs' indices refer to: with the plan's variants, unrolled over ``iterations``.
        original: index of each tensor of ``program`` in the given program.
        predicted: simulated timeline of ``program`` that determines the order.
        iterations: iterations of the given program in the cycle.
        jobs: jobs in order of issue.
        residencies: intervals of the blocks in the arena.
        host: offset of each swapped tensor in the host buffer.
        host_bytes: size of the host buffer.
        on_host: tensors that occupy their host place at the start of the cycle.
        footprint: size of the arena in bytes.
    """

    program: Program
    original: list[int]
    predicted: Timeline
    iterations: int
    jobs: list[Job]
    residencies: list[Residency]
    host: dict[int, int]
    host_bytes: int
    on_host: frozenset[int]
    footprint: int

    @property
    def start(self) -> list[Block]:
        """Blocks of persistent tensors that are in the arena at the start of the cycle."""
        return [s.block for s in self.residencies if s.crosses]


def cycle(program: Program, plan: Plan, machine: Machine, limit: int) -> Cycle:
    """Returns the jobs of a plan.

    Args:
        limit: memory limit in bytes.
        program: program of the plan.
        plan: plan to replay.
        machine: machine whose copy engines are used.

    Returns:
        the jobs of ``repeats`` iterations, with offsets and footprint.

    Raises:
        PlanError, OutOfMemory: as in ``simulate``; PlanError also for kinds of decisions that cannot be replayed.
        ReplayError: if the plan does not become steady.
    """
    plan.only("a replay", "swap", "recompute", "rerun")
    plan.check(program)
    schedule = lower(program, plan)
    repeats = 1
    predicted = simulate(program, plan, machine, limit, schedule=schedule)
    if not predicted.period:
        predicted = simulate(program, plan, machine, limit, iterations=LONGEST, schedule=schedule)
    original = list(range(len(program.tensors)))
    if not predicted.steady:
        repeats = predicted.period
        if not 0 < repeats <= MAX_PERIOD:
            period_text = f"repeat only after {repeats}" if repeats else f"do not repeat within {LONGEST}"
            raise ReplayError(
                f"the plan's iterations {period_text}; a replay supports periods of up to {MAX_PERIOD}: plan again "
                "with another seed or limit"
            )
        program, plan, original = unrolled(schedule.program, plan, repeats)
        schedule = lower(program, plan)
        predicted = simulate(program, plan, replace(machine, host_bytes=2**62), limit, schedule=schedule)
        if not predicted.steady:
            raise ReplayError(
                f"the plan's iterations do not repeat in groups of {repeats} either: plan again with another seed"
            )
    lifetimes = timeline_lifetimes(predicted)
    packing = pack_within(lifetimes.intervals, limit, machine.alignment)
    built = _CycleBuilder(schedule, predicted, lifetimes, packing, machine)
    host = built.pinned
    on_host = frozenset(t for t, upper in zip(host.tensors, host.intervals.upper, strict=True) if upper >= built.period)
    return Cycle(
        schedule.program,
        original,
        predicted,
        repeats,
        built.jobs,
        built.residencies,
        host.offsets,
        host.footprint,
        on_host,
        packing.footprint,
    )


def unrolled(program: Program, plan: Plan, times: int) -> tuple[Program, Plan, list[int]]:
    """Unrolls ``times`` iterations into one; they share persistent tensors and have their own other tensors.

    Returns:
        The unrolled program, its plan, and the original index of each tensor.
    """
    n = len(program.kernels)
    tensors = list(program.tensors)
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
        kernels += [
            replace(k, inputs=tuple(index[t] for t in k.inputs), outputs=tuple(index[t] for t in k.outputs))
            for k in program.kernels
        ]
        decisions += [d.renumbered(index, i * n, n, times * n) for d in plan.decisions]
    return replace(program, tensors=tuple(tensors), kernels=tuple(kernels)), Plan(tuple(decisions)), original


class _CycleBuilder:
    """Builds the cycle from the last iteration of a steady timeline.

    A moment is the start or the end of a job; positions count moments from the start of the iteration.

    Attributes:
        period: number of moments.
        begins, ends: positions of the start and of the end of each job.
        late: whether each job ends in the next iteration.
    """

    def __init__(self, schedule: Schedule, timeline: Timeline, lives: Lifetimes, packing: Packing, machine: Machine):
        self.schedule = schedule
        self.program = schedule.program
        self._moments(timeline)
        shares_engine = machine.copy_engines == 1
        self.streams = ["copy" if shares_engine and j.span.stream != "compute" else j.span.stream for j in self.jobs]
        self.kernels, self.outs, self.ins = (self._jobs_of(kind) for kind in ("kernel", "swap_out", "swap_in"))
        self.compute = [j for j, job in enumerate(self.jobs) if job.span.stream == "compute"]  # by step
        if len(self.compute) != len(schedule.steps):
            raise AssertionError(
                f"the timeline has {len(self.compute)} compute spans, the schedule {len(schedule.steps)}; report it"
            )
        self.gap = {j: self._gap(j) for jobs in (*self.outs.values(), *self.ins.values()) for j in jobs}
        self._find_residencies(lives, packing)
        self._contents()
        self.pinned = PinnedSlots(
            {t: [self.begins[j] for j in jobs] for t, jobs in self.outs.items()},
            {t: [self.ends[j] for j in jobs] for t, jobs in self.ins.items()},
            [t.nbytes for t in self.program.tensors],
            self.period,
            machine.alignment,
        )
        self._waits()

    def _moments(self, timeline: Timeline) -> None:
        """Orders the starts and ends of jobs as simulator.pool.intervals does (rule 9)."""
        spans = timeline.spans
        end = timeline.boundaries[-1]
        starts = [span.start_ns for span in spans]
        # An end precedes the first later span that starts at or after it; of several ends, compute's is last.
        following = [bisect_left(starts, span.end_ns, i + 1) for i, span in enumerate(spans)]
        ended = {i for i, span in enumerate(spans) if following[i] < len(spans) or span.end_ns <= end}
        moments = [(i, True, 0, False, i) for i in range(len(spans))]
        moments += [(following[i], False, spans[i].end_ns, spans[i].stream == "compute", i) for i in ended]
        moments.sort()
        ends = [m for m, (_, starts_now, *_, i) in enumerate(moments) if not starts_now and spans[i].kind == "kernel"]
        boundary = ends[-len(self.program.kernels) - 1]  # the last iteration starts after it
        first = moments[boundary][0]
        moments = moments[boundary + 1 :]

        # Jobs in flight at the start equal those in flight at the end, one iteration later.
        under_way = {spans[i][2:]: i for i in range(len(spans)) if i not in ended}
        self.jobs = [Job(span) for span in spans[first:]]
        self.begins, self.ends = [0] * len(self.jobs), [0] * len(self.jobs)
        for position, (_, starts_now, *_, i) in enumerate(moments):
            j = (under_way[spans[i][2:]] if i < first else i) - first
            (self.begins if starts_now else self.ends)[j] = position
        self.late = [end < begin for begin, end in zip(self.begins, self.ends, strict=True)]
        self.period = len(moments)

    def _jobs_of(self, kind: str) -> dict[int, list[int]]:
        """Returns the jobs of a kind by the index of their span."""
        jobs_by_index: dict[int, list[int]] = {}
        for j, job in enumerate(self.jobs):
            if job.span.kind == kind:
                jobs_by_index.setdefault(job.span.index, []).append(j)
        return jobs_by_index

    def _latest(self, jobs: Iterable[int], position: int) -> tuple[int, int] | None:
        """Returns (iteration offset <= 0, job) of the last-started job that has ended at a position, or None."""
        return max(((-(self.ends[j] > position) - self.late[j], j) for j in jobs), default=None)

    # ---------------------------------------------------------------------------------- memory

    def _gap(self, j: int) -> tuple[tuple[int, int], Swap]:
        """Returns a copy's decision and the kernel (as ``_latest``) whose end issued it or opened its gap."""
        span = self.jobs[j].span
        candidates = []
        for d in self.schedule.moved:
            if d.tensor == span.index:
                kernels = self.kernels[d.copied_at if span.kind == "swap_out" else d.after]
                latest = self._latest(kernels, self.begins[j])
                assert latest is not None
                candidates.append((latest, d))
        return max(candidates, key=lambda x: x[0])

    def _find_residencies(self, lives: Lifetimes, packing: Packing) -> None:
        """Finds the blocks that each job places and the jobs that free that memory before."""
        schedule = self.schedule
        blocks = lives.intervals
        gaps = self.schedule.gaps_of_blocks
        step_of = dict(zip(self.compute, schedule.steps, strict=True))
        placements: dict[int, list[tuple[int, int]]] = {}  # block -> (placing job, number of earlier gaps)
        for j, job in enumerate(self.jobs):
            if job.span.kind == "swap_in":
                d = self.gap[j][1]
                placements.setdefault(schedule.moved[d], []).append((j, gaps[schedule.moved[d]].index(d) + 1))
            for b in step_of[j].allocates if j in step_of else ():
                placements.setdefault(b, []).append((j, 0))

        def ends(b: int, index: int) -> list[int]:
            """Returns the jobs that end a block's stay after ``index`` gaps."""
            block_gaps = gaps.get(b, [])
            if index == len(block_gaps) and schedule.blocks[b].first >= 0:
                return [self.compute[schedule.blocks[b].last]]
            d = block_gaps[index % len(block_gaps)]
            return [*self.kernels[d.after], *(j for j in self.outs.get(d.tensor, ()) if self.gap[j][1] == d)]

        self.residencies: list[Residency] = []
        self.placed: list[list[Residency]] = [[] for _ in self.jobs]
        for i, b in enumerate(lives.block.tolist()):  # in ascending order of begin
            block = Block(int(lives.owner[i]), int(packing.offsets[i]), int(blocks.nbytes[i]))
            crosses = bool(blocks.upper[i] >= blocks.period)
            if blocks.upper[i] - blocks.lower[i] == blocks.period:
                self.residencies.append(Residency(block, b, None, (), True))
                continue
            j, index = placements[b].pop(0)
            self.residencies.append(Residency(block, b, j, tuple((int(f < j), f) for f in ends(b, index)), crosses))
            self.placed[j].append(self.residencies[-1])
        self.freed_by: list[set[int]] = [set() for _ in self.jobs]  # jobs that free the memory of each job's blocks
        lower = packing.offsets
        upper = packing.offsets + blocks.nbytes
        for i, entry in enumerate(self.residencies):
            if entry.begin is not None:
                shared = np.flatnonzero((lower < upper[i]) & (lower[i] < upper))
                self.freed_by[entry.begin].update(f for other in shared for _, f in self.residencies[other].ends)

    # ---------------------------------------------------------------------------------- contents

    def _contents(self) -> None:
        """Finds the blocks and versions that each job reads and writes."""
        writes = self.program.writes
        location = {s.index: s.block for s in self.residencies if s.crosses}
        version = {b: 0 for b, block in enumerate(self.schedule.blocks) if block.first < 0}
        steps = iter(self.schedule.steps)
        for j, job in enumerate(self.jobs):
            location |= {entry.index: entry.block for entry in self.placed[j]}
            if job.span.stream != "compute":
                job.block = location.get(self.schedule.moved[self.gap[j][1]])
                continue
            step = next(steps)
            kernel = self.program.kernels[step.kernel]
            job.fresh = [entry.block for entry in self.placed[j] if entry.block.owner < 0]
            for x, b in step.uses.items():
                if x in kernel.inputs and version[b] != bisect_left(writes[x], step.kernel):
                    raise AssertionError(
                        f"kernel {step.kernel} reads version {version[b]} of tensor {x}, not the latest; report it"
                    )
                if b in location and b not in step.allocates:
                    job.reads.append(replace(location[b], version=version[b]))
                if x in kernel.outputs:
                    version[b] = bisect_right(writes[x], step.kernel)
                    if b in location:
                        target = job.fresh if b in step.allocates else job.writes
                        target.append(replace(location[b], version=version[b]))

    # ---------------------------------------------------------------------------------- waits

    def _waits(self) -> None:
        """Sets each job's waits: the last required job of each other stream, unless an earlier job waits for it."""
        count = len(self.jobs)
        sync = [j for jobs in self.outs.values() for j in jobs if self.gap[j][1].sync]
        waited: dict[tuple[str, str], int] = {}
        for _ in range(2):  # the second pass knows the waits of the previous iteration
            waited = {key: last - count for key, last in waited.items()}
            for j, job in enumerate(self.jobs):
                job.waits = []
                for rounds, i in sorted(self._required_jobs(j, sync), reverse=True):
                    key = (self.streams[j], self.streams[i])
                    number = rounds * count + i
                    if key[0] != key[1] and number > waited.get(key, -4 * count):
                        waited[key] = number
                        job.waits.append((-rounds, i))

    def _required_jobs(self, j: int, sync: list[int]) -> set[tuple[int, int]]:
        """Returns the jobs that job ``j`` waits for (list at the top of the module), as ``_latest``."""
        kind = self.jobs[j].span.kind
        position = self.begins[j]
        t = self.jobs[j].span.index
        required = {self._latest([i], position) for i in self.freed_by[j]}
        if kind == "swap_out":
            required.add(self.gap[j][0])
            required |= {self._latest(self.ins.get(x, ()), position) for x in self.pinned.neighbors(t)}
        elif kind == "swap_in":
            opened, decision = self.gap[j]
            issued = self._latest(self.kernels[decision.prefetch], position) if decision.prefetch is not None else None
            if issued is None or issued < opened:
                ended = bisect_left([self.ends[i] for i in self.compute], position)
                issued = (0, self.compute[ended - 1]) if ended else (-1, self.compute[-1])
            required |= {issued, self._latest(self.outs.get(t, ()), position)}
        else:
            step = self.schedule.steps[bisect_left(self.compute, j)]
            required |= {self._latest(self.ins.get(x, ()), position) for x in step.waits}
            required.add(self._latest(sync, position))
        return {x for x in required if x is not None}
