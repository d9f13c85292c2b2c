"""A plan as work on three streams: what is issued, in which order, at which addresses, and what waits for what.

The simulator decides when; hardware only keeps an order. So the order is that of one steady iteration of a simulated
Timeline (simulator/reference.py), a circle of **jobs**: its spans in the order of their starts. One thread issues them
ahead of time, iteration after iteration, because waits are events. Each stream does its jobs in order; between streams
a job waits for

1. *data*: a kernel, or a step of a rematerialisation, for the swap-ins of what it uses (rules 2, 6, 7);
2. *its kernel*: a swap-out for the end of ``after``; a swap-in for that of ``prefetch`` or of the last compute (4, 5);
3. *its other half*: a swap-in for the swap-out before it;
4. ``sync``: the next compute for the synchronous swap-outs that are then queued or under way (rule 4);
5. *memory*: a job that puts a block at an address, for what freed the blocks that were last there (simulator.pool).

Why this cannot lock up, and the reasons for these choices: executor/replay/README.md.

(a) A plan whose iterations repeat only after several (rule 10) is unrolled: the circle is as many iterations.
(b) Content is told by version: how often a tensor has been written since the first iteration.
(c) A rematerialisation's own memory has the versions that its kernels wrote the first time.
(d) One place on the host per tensor, also where the circle is several iterations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan, Recompute, Swap
from simulator.pool import Lifetimes, Packing, allocator, run, timeline_lifetimes
from simulator.program import Program
from simulator.reference import present, resolve
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


@dataclass(slots=True)
class Job:
    """One span of the circle, as it is issued.

    Attributes:
        waits: (iterations back, position in the circle) of the jobs that must be over.
        fresh: blocks that it writes first, its workspace among them.
        reads: blocks whose content it needs.
        writes: blocks that held something before, with the version that it leaves there.
        charged, freed: bytes that it takes at its start and gives back at its end.
        block: of a copy: where the tensor is in the arena.
    """

    span: Span
    waits: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[Block] = field(default_factory=list)
    reads: list[Block] = field(default_factory=list)
    writes: list[Block] = field(default_factory=list)
    charged: int = 0
    freed: int = 0
    block: Block | None = None


@dataclass(frozen=True)
class Circle:
    """The jobs of a plan, and where they find memory.

    Attributes:
        program: what the jobs' indices mean: under its variants, and unrolled over ``iterations`` of the given one.
        original: the given program's index of each of its tensors.
        predicted: the simulated timeline that the order comes from, of ``program``.
        jobs: in the order of issue.
        start: blocks of persistent tensors that are in the arena where the circle begins.
        used: bytes held there before the first job, when nothing is under way.
        host: tensor -> offset in the host buffer of ``host_bytes``, of those that are swapped.
        allocator, footprint: of the packing; the arena has ``footprint`` bytes.
    """

    program: Program
    original: list[int]
    predicted: Timeline
    iterations: int
    jobs: list[Job]
    start: list[Block]
    used: int
    host: dict[int, int]
    host_bytes: int
    allocator: str
    footprint: int


def circle(
    program: Program,
    plan: Plan,
    machine: Machine,
    limit: int,
    allocators: Sequence[str] = ("smartpool", "optimal"),
    seconds: float = 5.0,
) -> Circle:
    """The jobs of a plan.

    Args:
        allocators: offline ones of simulator.pool. The first whose footprint is at most the limit packs; where none
            is, that with the smallest.
        seconds: for those that search.

    Raises:
        PlanError, OutOfMemory: as ``simulate``.
        ReplayError: the plan does not become steady.
        ValueError: there is no such allocator, or it is an online one.
    """
    predicted, times = simulate(program, plan, machine, limit), 1
    if not predicted.period:
        predicted = simulate(program, plan, machine, limit, iterations=LONGEST)
    program, plan = program.with_variants(plan.variants), replace(plan, variants=(), fingerprint="")
    original = list(range(len(program.tensors)))
    if not predicted.steady:
        times = predicted.period
        if not 0 < times <= MAX_PERIOD:
            what = f"repeat only after {times}" if times else f"do not repeat within {LONGEST}"
            raise ReplayError(f"the plan's iterations {what}; up to {MAX_PERIOD} can be replayed as a circle")
        program, plan, original = unrolled(program, plan, times)
        predicted = simulate(program, plan, replace(machine, host_bytes=2**62), limit)
        if not predicted.steady:
            raise ReplayError(f"the plan's iterations do not repeat in groups of {times} either")
    lives = timeline_lifetimes(predicted, program, plan)
    name, packing = _pack(lives, machine.alignment, limit, allocators, seconds)
    walk = _Walk(program, plan, predicted, lives, packing, machine.copy_engines == 1)

    place: dict[int, int] = {}  # of the given program's tensors
    host_bytes = 0
    swapped = sorted({d.tensor for d in plan.decisions if isinstance(d, Swap)})
    for t in swapped:
        if original[t] not in place:
            place[original[t]] = host_bytes
            host_bytes += -(-program.tensors[t].nbytes // machine.alignment) * machine.alignment
    host = {t: place[original[t]] for t in swapped}
    return Circle(
        program, original, predicted, times, walk.jobs, walk.start, walk.used, host, host_bytes, name,
        packing.footprint,
    )  # fmt: skip


def _pack(
    lives: Lifetimes, alignment: int, limit: int, allocators: Sequence[str], seconds: float
) -> tuple[str, Packing]:
    best: tuple[str, Packing] | None = None
    for name in allocators:
        if allocator(name).online:
            raise ValueError(f"allocator {name!r} sees mallocs one by one; a circle needs one that knows them all")
        packing = run(name, lives.intervals, alignment, seconds)[1]
        if best is None or packing.footprint < best[1].footprint:
            best = name, packing
        if packing.footprint <= limit:
            return name, packing
    if best is None:
        raise ValueError("allocators: expected at least one")
    return best


def unrolled(program: Program, plan: Plan, times: int) -> tuple[Program, Plan, list[int]]:
    """So many iterations as one: persistent tensors are the same in all, the others are born in each.

    Returns:
        The program, the plan, and the given index of each tensor.
    """
    n, tensors = len(program.kernels), list(program.tensors)
    original = list(range(len(tensors)))
    kernels, decisions = [], []
    for i in range(times):
        index = list(range(len(program.tensors)))
        for t, tensor in enumerate(program.tensors):
            if i and not tensor.persistent:
                index[t] = len(tensors)
                tensors.append(tensor)
                original.append(t)
        kernels += [replace(k, inputs=tuple(index[t] for t in k.inputs), outputs=tuple(index[t] for t in k.outputs))
                    for k in program.kernels]  # fmt: skip
        for d in plan.decisions:

            def later(k: int, after: int = d.after, i: int = i) -> int:
                return (i * n + after + 1 + (k - after - 1) % n) % (times * n)

            moved = replace(d, tensor=index[d.tensor], after=d.after + i * n, before=later(d.before))
            if isinstance(moved, Swap) and moved.prefetch is not None:
                same = moved.prefetch == d.after
                moved = replace(moved, prefetch=moved.after if same else later(moved.prefetch))
            decisions.append(moved)
    return replace(program, tensors=tuple(tensors), kernels=tuple(kernels)), Plan(tuple(decisions)), original


class _Walk:
    """The last iteration of a steady timeline as a circle.

    A moment is the start or the end of a job; positions count moments from the iteration's begin.

    Attributes:
        begins, ends: position of the start and of the end of each job.
        late: of each job, whether it ends in the next iteration.
    """

    def __init__(
        self, program: Program, plan: Plan, timeline: Timeline, lives: Lifetimes, packing: Packing, one_engine: bool
    ):
        self.program, self.plan = program, plan
        self._moments(timeline)
        self.streams = ["copy" if one_engine and j.span.stream != "compute" else j.span.stream for j in self.jobs]
        self.kernels, self.outs, self.ins = (self._jobs_of(kind) for kind in ("kernel", "swap_out", "swap_in"))
        self.compute = [j for j, job in enumerate(self.jobs) if job.span.stream == "compute"]
        self._blocks(lives, packing)
        self._contents()
        self._waits()

    def _moments(self, timeline: Timeline) -> None:
        """Starts and ends in their order, as simulator.pool.intervals reads them (rule 9)."""
        spans, n = timeline.spans, len(self.program.kernels)
        moments: list[tuple[int, bool]] = []  # span, whether it is its end
        running: list[int] = []
        kernels = first = 0

        def complete(now: int, following: int) -> None:
            nonlocal kernels, first
            over = [i for i in running if spans[i].end_ns <= now]
            for i in sorted(over, key=lambda i: (spans[i].end_ns, spans[i].stream == "compute")):
                running.remove(i)
                moments.append((i, True))
                kernels += spans[i].kind == "kernel"
                if kernels == n * (len(timeline.boundaries) - 1) and spans[i].kind == "kernel":
                    moments.clear()
                    first = following

        for i, span in enumerate(spans):
            complete(span.start_ns, i)
            running.append(i)
            moments.append((i, False))
        complete(timeline.boundaries[-1], len(spans))

        # What was under way at the begin is what is under way at the end, an iteration later.
        under_way = {spans[i][2:]: i for i in running}
        place = [(under_way[spans[i][2:]] if i < first else i) - first for i, _ in moments]
        self.jobs = [Job(span) for span in spans[first:]]
        self.begins, self.ends = [0] * len(self.jobs), [0] * len(self.jobs)
        for position, (j, (_, is_end)) in enumerate(zip(place, moments, strict=True)):
            (self.ends if is_end else self.begins)[j] = position
        self.late = [end < begin for begin, end in zip(self.begins, self.ends, strict=True)]
        # Lifetimes counts all moments but the starts of swap-outs, which neither take nor give memory.
        self.events = [
            (j, is_end) for j, (i, is_end) in zip(place, moments, strict=True) if is_end or spans[i].kind != "swap_out"
        ]

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

    def _blocks(self, lives: Lifetimes, packing: Packing) -> None:
        """Which blocks a job puts where, and the jobs that free what lies there before."""
        blocks, owner = lives.intervals, lives.owner.tolist()
        if blocks.period != len(self.events):
            raise AssertionError(f"{blocks.period} events of lifetimes are {len(self.events)} of the circle")
        begin, end = packing.offsets, packing.offsets + blocks.nbytes
        always = blocks.upper - blocks.lower == blocks.period
        frees = np.array([-1 if a else self.events[u % blocks.period][0] for a, u in zip(always, blocks.upper)])  # noqa: B905
        self.start: list[Block] = []
        self.freed_by: list[set[int]] = [set() for _ in self.jobs]  # by whom the memory of each job's blocks is freed
        self.used = 0
        for b, who in enumerate(owner):
            block = Block(who, int(begin[b]), int(blocks.nbytes[b]))
            if blocks.upper[b] >= blocks.period:
                self.start.append(block)
                self.used += 0 if not always[b] and self.late[frees[b]] else block.nbytes
            if not always[b]:
                j = self.events[blocks.lower[b]][0]
                self.jobs[j].fresh.append(block)
                self.jobs[j].charged += block.nbytes
                self.jobs[frees[b]].freed += block.nbytes
                meets = (begin < end[b]) & (begin[b] < end) & ~always
                self.freed_by[j].update(frees[meets].tolist())

    # ---------------------------------------------------------------------------------- contents

    def _contents(self) -> None:
        """What each job reads and writes, where, at which version; and what it waits for to be there."""
        program = self.program
        chains = resolve(program, self.plan.decisions).remats
        where = {b.owner: b for b in self.start}
        own: dict[int, Block] = {}  # the memory of a rematerialisation
        dropped: set[int] = set()
        self.uses: list[set[int]] = [set() for _ in self.jobs]  # tensors that must have come back
        kernel = 0  # the next one
        for j, job in enumerate(self.jobs):
            here = {b.owner: b for b in job.fresh}
            if job.span.kind == "swap_in":
                where |= here
            if job.span.stream != "compute":
                job.fresh, job.block = [], where.get(job.span.index)
                continue
            k = job.span.index
            last = job.span.kind == "kernel"
            chain = chains.get(kernel)
            if last:
                recovered = chain.recovered if chain else frozenset()
                where |= here | {t: own[t] for t in recovered if t in own}
                own = {}
                dropped -= recovered
                dropped |= {d.tensor for d in self.plan.decisions if isinstance(d, Recompute) and d.after == k}
                found = {t: where[t] for t in program.kernels[k].accesses if t in where}
                self.uses[j] = set(program.kernels[k].accesses) - recovered
                kernel += 1
            else:
                assert chain is not None
                own |= here
                found = {t: own[t] for t in program.kernels[k].accesses if t in own}
                found |= {t: where[t] for t in program.kernels[k].inputs
                          if t in where and present(program, t, k, kernel, dropped)}  # fmt: skip
                self.uses[j] = set(chain.fetched)
            for t, block in found.items():
                before, after = bisect_left(program.writes[t], k), bisect_right(program.writes[t], k)
                if t not in here:
                    job.reads.append(replace(block, version=before))
                    if after > before:
                        job.writes.append(replace(block, version=after))
            job.fresh = [replace(b, version=bisect_right(program.writes[b.owner], k)) if b.owner >= 0 else b
                         for b in job.fresh]  # fmt: skip

    # ---------------------------------------------------------------------------------- waits

    def _waits(self) -> None:
        """Per job the last job of each other stream that must be over, unless a job before it waits for that."""
        count = len(self.jobs)
        sync = [j for jobs in self.outs.values() for j in jobs if self._opening(j)[1].sync]
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
            out.add(self._opening(j)[0])
        elif kind == "swap_in":
            opened, decision = self._opening(j)
            pinned = self._latest(self.kernels[decision.prefetch], at) if decision.prefetch is not None else None
            if pinned is None or pinned < opened:
                ended = bisect_left([self.ends[i] for i in self.compute], at)
                pinned = (0, self.compute[ended - 1]) if ended else (-1, self.compute[-1])
            out |= {pinned, self._latest(self.outs.get(t, ()), at)}
        else:
            out |= {self._latest(self.ins.get(x, ()), at) for x in self.uses[j]}
            out.add(self._latest(sync, at))
        return {x for x in out if x is not None}

    def _opening(self, j: int) -> tuple[tuple[int, int], Swap]:
        """The decision that a copy belongs to, and the kernel whose end opened its gap, as ``_latest`` gives it."""
        opened = []
        for d in self.plan.decisions:
            if isinstance(d, Swap) and d.tensor == self.jobs[j].span.index:
                latest = self._latest(self.kernels[d.after], self.begins[j])
                assert latest is not None
                opened.append((latest, d))
        return max(opened, key=lambda x: x[0])
