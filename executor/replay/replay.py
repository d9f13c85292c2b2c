"""A program and a plan on a device: what the simulator says, measured.

Kernels are spins of their durations; memory and transfers are real. The arena is exactly as large as the footprint of
the packing, and nothing else on the device holds tensors. The order of issue and the waits are those of ``streams.py``;
hardware decides when anything happens. The measured Timeline is of the simulator's type.

    with open_backend("cuda", machine) as backend:
        measured = replay(program, plan, machine, limit, backend)
    measured.iteration_ns, measured.error, measured.timeline.save("measured.json")

``kernels="stream"``: kernels also read and write as many bytes as the program says, so that copies and kernels contend
for the device's memory. ``mode="check"``: blocks are filled and compared. Choices: executor/replay/README.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

from executor.replay.backend import Backend, first_difference, pattern
from executor.replay.streams import Block, Circle, Job, ReplayError, circle
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import BlockEvent, Span, Timeline

AHEAD = 2  # iterations

Mode = Literal["time", "check"]
Kernels = Literal["spin", "stream"]
# Of an event, what orders it: its time; whether what causes it begins then (at one instant frees first, rule 9, but of
# what takes no time); the number of its job; whether it frees.
_Key = tuple[int, bool, int, bool]


@dataclass(frozen=True)
class Measured:
    """What a replay measured, beside what was simulated.

    Attributes:
        timeline: of the measured iterations.
        iterations_ns: of each of them.
        predicted: the simulated timeline that gave the order of issue; ``predicted_ns`` is its time per iteration.
        period: iterations after which everything repeats; ``predicted`` is of so many as one.
        limit, footprint: bytes; the arena had ``footprint`` bytes.
        device_bytes: what the arena took by the device's own count, which a GPU rounds up to its pages (2 MiB).
        allocator: that packed.
        checks: how many comparisons there were, each of a whole block.
        device: in words.
        kernels: whether they moved bytes of their own.
        absorbed_ns: of an iteration, the pauses before kernels that these made up for (``Backend.spin``): by so much
            the time may be too short.
    """

    timeline: Timeline
    iterations_ns: tuple[int, ...]
    predicted: Timeline
    predicted_ns: float
    period: int
    limit: int
    footprint: int
    device_bytes: int
    allocator: str
    checks: int
    device: str
    kernels: Kernels = "spin"
    absorbed_ns: float = 0.0

    @property
    def iteration_ns(self) -> float:
        """Median over the measured iterations; over the means of those that repeat as a group."""
        times, group = self.iterations_ns, self.period
        return median(sum(times[i : i + group]) / group for i in range(0, len(times), group))

    @property
    def error(self) -> float:
        """Measured over predicted iteration time, minus 1."""
        return self.iteration_ns / self.predicted_ns - 1 if self.predicted_ns else 0.0

    @property
    def fits(self) -> bool:
        """Is the arena at most the limit?"""
        return self.footprint <= self.limit


def replay(
    program: Program,
    plan: Plan,
    machine: Machine,
    limit: int,
    backend: Backend,
    iterations: int = 5,
    warmup: int = 2,
    mode: Mode = "time",
    kernels: Kernels = "spin",
    strict: bool = False,
    allocators: Sequence[str] = ("smartpool", "optimal"),
    seconds: float = 5.0,
) -> Measured:
    """Runs a plan on a backend.

    Args:
        machine: what the simulator predicts with; the backend does as it does. Copies take nothing of spins.
        limit: bytes, persistent tensors included.
        iterations: measured ones, at least 2; this and ``warmup`` are rounded up where iterations repeat in groups.
        warmup: iterations before them. The first begins with nothing under way, unlike the others.
        mode: "check": every block is also filled with a pattern of its tensor and version and compared wherever it is
            read; what is wrong is a ReplayError that names tensor and kernel, and times are not the plan's.
        kernels: see the module; while blocks are checked, they spin.
        strict: refuse a plan whose footprint is over the limit although its bytes are not. Else the arena is as large
            as the footprint, and the result says so (``fits``).
        allocators, seconds: as ``executor.replay.streams.circle``.

    Raises:
        PlanError, OutOfMemory: as ``simulate``.
        ReplayError: the plan does not become steady, does not fit (``strict``), or a check failed.
        BackendError: the device refused or failed; the streams are drained and its memory is given back.
    """
    if iterations < 2 or warmup < 1:
        raise ValueError(f"expected at least 2 iterations and 1 of warm-up, got {iterations} and {warmup}")
    if mode not in ("time", "check"):
        raise ValueError(f"mode: expected time or check, got {mode!r}")
    if kernels not in ("spin", "stream"):
        raise ValueError(f"kernels: expected spin or stream, got {kernels!r}")
    stream = kernels == "stream" and mode == "time"
    if not stream:  # nothing to be taken from
        machine = replace(machine, copy_contention=0.0)
    order = circle(program, plan, machine, limit, allocators, seconds)
    if strict and order.footprint > limit:
        raise ReplayError(
            f"{order.allocator} needs {order.footprint:,} bytes for blocks of {order.predicted.peak_bytes:,}, "
            f"over the limit of {limit:,}"
        )
    with backend.arena(order.footprint, order.host_bytes):
        run = Run(order, backend, mode == "check", stream)
        group = order.iterations
        warmup, iterations = (-(-count // group) * group for count in (warmup, iterations))
        for i in range((warmup + iterations) // group):
            if i >= AHEAD:
                backend.synchronize(run.ends[i - AHEAD][-1])
            run.issue(i)
        run.finish()
        timeline = run.read(program, limit, warmup)
        device_bytes = backend.allocated_bytes
        absorbed = backend.absorbed_ns() / (warmup + iterations)
    ends = (0, *timeline.boundaries)
    return Measured(
        timeline, tuple(b - a for a, b in zip(ends, ends[1:], strict=False)), order.predicted,
        order.predicted.iteration_ns / group, group, limit, order.footprint, device_bytes, order.allocator,
        len(run.checks), backend.name, kernels, absorbed,
    )  # fmt: skip


class _Task(NamedTuple):
    """A job of a round, whose name is made when somebody asks: a replay that is timed has no time for it."""

    run: Run
    job: Job
    round: int

    def __str__(self) -> str:
        return self.run._name(self.job, self.round)


class Run:
    """Issues the circle of jobs again and again and keeps the events."""

    def __init__(self, order: Circle, backend: Backend, check: bool, stream: bool):
        self.order, self.backend, self.check, self.stream = order, backend, check, stream
        self.program = order.program
        self.begins: list[list[Any]] = []  # per round and job; None where it starts when the one before ends
        self.ends: list[list[Any]] = []
        self.checks: list[tuple[Block, str]] = []
        self._acts = [self._act(job) for job in order.jobs]
        if check:
            backend.task = "filling the arena"
            for block in order.start:
                backend.fill(block.offset, block.nbytes, _seed(block))
            for t in order.on_host & order.host.keys():
                at = order.host[t]
                block = Block(t, at, self.program.tensors[t].nbytes)
                backend.host[at : at + block.nbytes] = pattern(block.nbytes, _seed(block))
            backend.synchronize()

    def issue(self, i: int) -> None:
        """Enqueues round i."""
        backend, begins, ends = self.backend, list[Any](), list[Any]()
        self.begins.append(begins)
        self.ends.append(ends)
        record = backend.record
        for job, act in zip(self.order.jobs, self._acts, strict=True):
            stream, waits = job.span.stream, job.waits
            backend.task = self._name(job, i) if self.check else _Task(self, job, i)
            for back, other in waits:
                if i >= back:
                    backend.wait(stream, self.ends[i - back][other])
            begins.append(record(stream) if waits or stream != "compute" or not (i or ends) else None)
            if self.check and stream == "compute":
                self._checked(job, i)
            elif act:
                act()
            ends.append(record(stream))

    def _act(self, job: Job) -> Callable[[], None] | None:
        """What a job does, prepared: a host that is slower than the kernels would be what is measured."""
        stream, index = job.span.stream, job.span.index
        if stream == "compute":
            kernel = self.program.kernels[index]
            nbytes = kernel.bytes if self.stream else 0
            return partial(self.backend.spin, kernel.duration_ns, nbytes) if kernel.duration_ns else None
        if not job.block:
            return None
        return partial(self.backend.copy, stream, job.block.offset, self.order.host[index], job.block.nbytes)

    def _checked(self, job: Job, i: int) -> None:
        """A kernel that really writes and reads."""
        who = self._name(job, i)
        self._compare(job.reads, i, f"before {who}")
        self._fill(job.fresh, i)
        if act := self._act(job):
            act()
        self._compare(job.reads, i, f"during {who}")
        self._compare(job.fresh, i, f"after {who}")
        self._fill(job.writes, i)

    def _fill(self, blocks: list[Block], i: int) -> None:
        for b in blocks:
            self.backend.fill(b.offset, b.nbytes, self._seed(b, i))

    def _compare(self, blocks: list[Block], i: int, when: str) -> None:
        for b in blocks:
            number = self.backend.verify(b.offset, b.nbytes, self._seed(b, i))
            assert number == len(self.checks)
            self.checks.append((b, when))

    def finish(self) -> None:
        """Waits, and in mode check looks at all that is left and raises what went wrong first.

        Raises:
            ReplayError: naming tensor and kernel.
        """
        rounds, start = len(self.ends), {b.owner: b for b in self.order.start}
        self.backend.task = "the end of the run"
        self.backend.synchronize()
        if not self.check:
            return
        self._compare(list(start.values()), rounds, "at the end of the run")
        self.backend.synchronize()
        if wrong := self.backend.mismatches():
            first = min(wrong)
            self._raise(*self.checks[first], wrong[first])
        for t, at in self.order.host.items():
            tensor = self.program.tensors[t]
            if tensor.persistent and t not in start:
                block = Block(t, at, tensor.nbytes)
                byte = first_difference(self.backend.host[at : at + block.nbytes], self._seed(block, rounds))
                self.checks.append((block, "on the host at the end of the run"))
                if byte is not None:
                    self._raise(*self.checks[-1], byte)

    def _raise(self, block: Block, when: str, byte: int) -> None:
        raise ReplayError(f"{self._owner(block)}, {when}: byte {byte:,} of {block.nbytes:,} is wrong")

    def _seed(self, block: Block, i: int) -> int:
        """Of the pattern of a block in round i."""
        owner = block.owner
        return _seed(block, i * len(self.program.writes[owner]) if owner >= 0 else 0)

    def _owner(self, block: Block) -> str:
        if block.owner < 0:
            return f"the workspace of kernel {-1 - block.owner} ({self.program.kernels[-1 - block.owner].name!r})"
        return f"tensor {self.order.original[block.owner]} ({self.program.tensors[block.owner].name!r})"

    def _name(self, job: Job, i: int) -> str:
        index, n = job.span.index, len(self.program.kernels) // self.order.iterations
        if job.span.stream != "compute":
            what = "swap-out" if job.span.kind == "swap_out" else "swap-in"
            return f"{what} of {self._owner(Block(index, 0, 0))}, iteration {i * self.order.iterations}"
        again = " run again" if job.span.kind == "recompute" else ""
        name = self.program.kernels[index].name
        return f"kernel {index % n} ({name!r}){again}, iteration {i * self.order.iterations + index // n}"

    def read(self, program: Program, limit: int, skip: int) -> Timeline:
        """What happened from the end of iteration ``skip`` on, its time 0, in the given program's indices."""
        n, jobs, time_ns = len(program.kernels), self.order.jobs, self.backend.time_ns
        boundaries: list[int] = []
        marks: list[_Key] = []  # of the same
        spans: list[tuple[Span, int]] = []  # and the iteration
        stalls: list[tuple[int, int, str]] = []
        starts: list[list[int]] = []  # per round and job
        over: list[list[int]] = []
        before = 0  # when compute was last busy
        for begins, ends in zip(self.begins, self.ends, strict=True):
            over.append([time_ns(e) for e in ends])
            starts.append([])
            for j, job in enumerate(jobs):
                stream, kind, index = job.span[2:]
                begin = before if begins[j] is None else time_ns(begins[j])
                end = over[-1][j] = max(over[-1][j], begin)
                starts[-1].append(begin)
                if stream != "compute":
                    spans.append((Span(begin, end, stream, kind, self.order.original[index]), len(boundaries)))
                    continue
                if begin > before:
                    waits = [(over[-1 - back][i], jobs[i].span.kind) for back, i in job.waits if back < len(over)]
                    stalls.append((before, begin, "data" if waits and max(waits)[1] == "swap_in" else "memory"))
                before = end
                spans.append((Span(begin, end, stream, kind, index % n), len(boundaries)))
                if kind == "kernel" and index % n == n - 1:
                    boundaries.append(end)
                    marks.append((end, True, (len(over) - 1) * len(jobs) + j, True))
        zero, last = boundaries[skip - 1], boundaries[-1]
        kept = [
            s._replace(start_ns=max(s.start_ns - zero, 0), end_ns=s.end_ns - zero)
            for s, i in spans
            if (i >= skip if s.stream == "compute" else s.end_ns > zero and s.start_ns < last)
        ]
        kept.sort(key=lambda s: s.start_ns)
        memory = self._events(starts, over, n)
        keys = [key for key, _ in memory]
        first = bisect_right(keys, marks[skip - 1])
        until = [bisect_right(keys, mark) for mark in marks[skip:]]
        held: dict[int, BlockEvent] = {}  # at zero, by block
        for _, event in memory[:first]:
            held.pop(event.block, None)
            if event.nbytes > 0:
                held[event.block] = event._replace(time_ns=0)
        events = [*held.values(), *(e._replace(time_ns=e.time_ns - zero) for _, e in memory[first : until[-1]])]
        until = [len(held) + i - first for i in until]
        waited = [(a - zero, b - zero, data) for a, b, data in stalls]
        required = self.order.predicted.required_bytes
        ends_at = [b - zero for b in boundaries[skip:]]
        return Timeline.assemble(program, limit, required, ends_at, kept, events, until, waited)

    def _events(self, starts: list[list[int]], over: list[list[int]], n: int) -> list[tuple[_Key, BlockEvent]]:
        """What took memory and gave it back when, in order. ``n``: kernels."""
        events: list[tuple[_Key, BlockEvent]] = []
        count = len(self.order.jobs)
        for stay in self.order.stays:
            who, nbytes = stay.block.owner, stay.block.nbytes
            owner = self.order.original[who] if who >= 0 else -1 - (-1 - who) % n
            for i in range(-1 if stay.crosses else 0, len(over) if stay.begin is not None else 0):
                ends = [(over[i + later][j], i + later, j) for later, j in stay.ends if 0 <= i + later < len(over)]
                if i < 0:
                    if stay.begin is not None and not ends:
                        continue  # what frees it would have been under way before the run
                    key: _Key = (0, False, -1, False)
                else:
                    assert stay.begin is not None
                    key = (starts[i][stay.begin], True, i * count + stay.begin, False)
                events.append((key, BlockEvent(key[0], owner, stay.index, nbytes)))
                if ends and all(i + later < len(over) for later, _ in stay.ends):
                    end, j_round, j = max(ends)
                    at_once = starts[j_round][j] == end
                    events.append(
                        ((end, at_once, j_round * count + j, True), BlockEvent(end, owner, stay.index, -nbytes))
                    )
        return sorted(events)


def _seed(block: Block, written: int = 0) -> int:
    """32 bits that differ for every owner and version; ``written``: writes since."""
    return (block.owner * 0x9E3779B1 + (block.version + written) * 0x85EBCA77 + 0x27D4EB2F) % 2**32
