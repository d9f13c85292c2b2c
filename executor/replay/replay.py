"""Runs a program under a plan on a device and measures what the simulator predicts.

Several rounds of the plan are captured as one graph: kernels are spins of their durations that log their start and end,
copies are real, and edges come from ``streams.py``. The arena has exactly the footprint of the packing. The pause
between two nodes (``Machine.graph_launch_ns``) is subtracted from the durations in advance, so it cannot hide a wait.
Choices: executor/replay/README.md.

    with open_backend("cuda", machine) as backend:
        measured = replay(program, plan, machine, limit, backend)
    measured.iteration_ns, measured.error, measured.timeline.save("measured.json")
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from executor.replay.backend import NEVER, Backend, Bytes, Log, first_difference, pattern
from executor.replay.streams import Block, Cycle, Job, ReplayError, cycle
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import BlockEvent, Span, Timeline

Mode = Literal["time", "check"]
# Sort key of memory events: time; whether the causing job starts then (at one instant, frees come first by rule 9,
# except those of jobs without duration); number of the job; whether it frees.
_Key = tuple[int, bool, int, bool]


@dataclass(frozen=True)
class Measured:
    """Result of a replay.

    Attributes:
        timeline: timeline of the measured iterations, from a traced run with time stamps around each copy.
        iterations_ns: duration of each measured iteration of the timed run, which has no such stamps.
        predicted: simulated timeline whose order was replayed.
        predicted_ns: predicted time per iteration.
        period: number of iterations after which everything repeats; ``predicted`` has a whole period as one iteration.
        limit: memory limit in bytes.
        footprint: size of the arena in bytes.
        device_bytes: memory of the arena as counted by the device, which a GPU rounds up to pages of 2 MiB.
        checks: number of comparisons, each of a whole block.
        device: description of the device.
    """

    timeline: Timeline
    iterations_ns: tuple[int, ...]
    predicted: Timeline
    predicted_ns: float
    period: int
    limit: int
    footprint: int
    device_bytes: int
    checks: int
    device: str

    @property
    def iteration_ns(self) -> float:
        """Median over the measured iterations, or over the means of periods of several iterations."""
        times = self.iterations_ns
        group = self.period
        return median(sum(times[i : i + group]) / group for i in range(0, len(times), group))

    @property
    def error(self) -> float:
        """Relative error: measured / predicted iteration time - 1."""
        return self.iteration_ns / self.predicted_ns - 1 if self.predicted_ns else 0.0

    @property
    def fits(self) -> bool:
        """Whether the arena is at most the limit."""
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
) -> Measured:
    """Runs a plan on a backend and measures it.

    The arena has the size of the packing's footprint, which may exceed the limit because of fragmentation
    (``Measured.fits``).

    Args:
        program: program of the plan.
        plan: plan to run.
        machine: predicts the time and has the pause between two graph nodes. ``issue_ns`` and ``copy_contention`` are
            ignored: the host issues nothing while a graph runs, and copies do not slow down spins.
        limit: memory limit in bytes, including persistent tensors.
        backend: device to run it on.
        iterations: measured iterations, at least 2. This and ``warmup`` are rounded up to whole periods.
        warmup: earlier iterations of the graph, at least 1; the first starts with no copy in flight, unlike the others.
        mode: "time"; or "check": fills blocks with a pattern of their tensor and version and compares them at each
            read. Times are then not the plan's.

    Returns:
        The measured times beside the predicted ones.

    Raises:
        PlanError, OutOfMemory: as in ``simulate``.
        ReplayError: if the plan does not become steady, or a check fails; the message names tensor and kernel.
        BackendError: if the device refused or failed; its memory is freed.
        ValueError: if ``iterations``, ``warmup`` or ``mode`` is invalid.
    """
    if iterations < 2 or warmup < 1:
        raise ValueError(f"expected iterations >= 2 and warmup >= 1, got {iterations} and {warmup}")
    if mode not in ("time", "check"):
        raise ValueError(f"mode: expected time or check, got {mode!r}")
    check = mode == "check"
    machine = replace(machine, issue_ns=0, copy_contention=0.0)
    order = cycle(program, plan, machine, limit)
    group = order.iterations
    skip = -(-warmup // group) * group
    rounds = -(-warmup // group) - (-iterations // group)
    with backend.arena(order.footprint, order.host_bytes, slots(order, rounds, check)):
        run = Run(order, backend, rounds, machine.graph_launch_ns, check)
        log = run.log(trace=check)
        traced = log if check else run.log(trace=True)
        device_bytes = backend.allocated_bytes
    ends = run.boundaries(log)[skip - 1 :]
    return Measured(
        run.read(traced, program, limit, skip),
        tuple(b - a for a, b in zip(ends, ends[1:], strict=False)),
        order.predicted,
        order.predicted.iteration_ns / group,
        group,
        limit,
        order.footprint,
        device_bytes,
        len(run.checks),
        backend.name,
    )


def slots(order: Cycle, rounds: int, check: bool) -> int:
    """Returns the number of log slots: one per job and round, and one per comparison."""
    compared = sum(2 * len(job.reads) + len(job.fresh) for job in order.jobs if job.span.stream == "compute")
    return rounds * (len(order.jobs) + check * compared) + check * len(order.start)


class Run:
    """Captures rounds of a cycle of jobs as a graph, launches it and reads the log."""

    def __init__(self, order: Cycle, backend: Backend, rounds: int, pause_ns: int, check: bool):
        self.order = order
        self.backend = backend
        self.rounds = rounds
        self.pause_ns = pause_ns
        self.check = check
        self.program = order.program
        self.checks: list[tuple[Block, str]] = []
        self.awaited = {other for job in order.jobs for _, other in job.waits}
        self.kernels = len(order.program.kernels) // order.iterations  # per iteration
        if check:
            backend.task = "filling the arena"
            for block in order.start:
                backend.fill(block.offset, block.nbytes, self._seed(block))
            for t in order.on_host & order.host.keys():
                block = self._on_host(t)
                self._bytes(block)[:] = pattern(block.nbytes, self._seed(block))
            backend.synchronize()

    def log(self, trace: bool) -> Log:
        """Captures all rounds as one graph, launches it and returns the log.

        Args:
            trace: whether to log time stamps around each copy.

        Returns:
            Start and end of each logged operation by the device's clock.

        Raises:
            ReplayError: if a check fails; the message names tensor and kernel of the first failure.
        """
        launch = self.backend.graph(lambda: self._issue(trace))
        # Of the launches of a timed graph only the last counts, because the first uploads the graph.
        for _ in range(1 if trace else 3):
            launch()
            self.backend.synchronize()
        if self.check:
            self._compare(self.order.start, self.rounds, "at the end of the run")
            self.backend.synchronize()
        log = self.backend.log()
        if self.check:
            self._raise_first(log)
        return log

    def _issue(self, trace: bool) -> None:
        backend = self.backend
        ends = dict[tuple[int, int], object]()
        debt_ns = 0  # part of the pauses in ns (<= 0) that exceeded earlier spins and is subtracted from later ones
        for i in range(self.rounds):
            for j, job in enumerate(self.order.jobs):
                stream = job.span.stream
                index = job.span.index
                slot = i * len(self.order.jobs) + j
                backend.task = self._name(job, i)
                for rounds, other in job.waits:
                    if i >= rounds:
                        backend.wait(stream, ends[i - rounds, other])
                if stream == "compute":
                    debt_ns += self.program.kernels[index].duration_ns - self.pause_ns
                    self._kernel(job, i, max(debt_ns, 0), slot)
                    debt_ns = min(debt_ns, 0)
                elif job.block:
                    if trace:
                        backend.spin(0, slot, stream)
                    backend.copy(stream, job.block.offset, self.order.host[index], job.block.nbytes)
                    if trace:
                        backend.spin(0, slot, stream)
                if j in self.awaited:
                    ends[i, j] = backend.record(stream)

    def _kernel(self, job: Job, i: int, ns: int, slot: int) -> None:
        """Enqueues a spin; in mode "check" also comparisons of its reads and fills of its writes."""
        task = self.backend.task
        if self.check:
            self._compare(job.reads, i, f"before {task}")
            self._fill(job.fresh, i)
        self.backend.spin(ns, slot)
        if self.check:
            self._compare(job.reads, i, f"during {task}")
            self._compare(job.fresh, i, f"after {task}")
            self._fill(job.writes, i)

    def _fill(self, blocks: list[Block], i: int) -> None:
        for b in blocks:
            self.backend.fill(b.offset, b.nbytes, self._seed(b, i))

    def _compare(self, blocks: list[Block], i: int, when: str) -> None:
        for b in blocks:
            slot = self.rounds * len(self.order.jobs) + len(self.checks)
            self.backend.verify(b.offset, b.nbytes, self._seed(b, i), slot)
            self.checks.append((b, when))

    def _raise_first(self, log: Log) -> None:
        wrong = log.wrong[self.rounds * len(self.order.jobs) :]
        for index in np.flatnonzero(wrong != NEVER)[:1].tolist():
            block, when = self.checks[index]
            self._raise(block, when, int(wrong[index]))
        start = {b.owner for b in self.order.start}
        for t in self.order.host:
            if self.program.tensors[t].persistent and t not in start:
                block = self._on_host(t)
                byte = first_difference(self._bytes(block), self._seed(block, self.rounds))
                self.checks.append((block, "on the host at the end of the run"))
                if byte is not None:
                    self._raise(*self.checks[-1], byte)

    def _raise(self, block: Block, when: str, byte: int) -> None:
        raise ReplayError(
            f"{self._owner(block)}, {when}: byte {byte:,} of {block.nbytes:,} is wrong; report it with program and plan"
        )

    def _on_host(self, t: int) -> Block:
        return Block(t, self.order.host[t], self.program.tensors[t].nbytes)

    def _bytes(self, on_host: Block) -> Bytes:
        return self.backend.host[on_host.offset : on_host.offset + on_host.nbytes]

    def _seed(self, block: Block, i: int = 0) -> int:
        """Returns a 32-bit seed for a block's owner and its version in round i."""
        version = block.version + (i * len(self.program.writes[block.owner]) if block.owner >= 0 else 0)
        return (block.owner * 0x9E3779B1 + version * 0x85EBCA77 + 0x27D4EB2F) % 2**32

    def _owner(self, block: Block) -> str:
        if block.owner < 0:
            return f"the workspace of kernel {-1 - block.owner} ({self.program.kernels[-1 - block.owner].name!r})"
        return f"tensor {self.order.original[block.owner]} ({self.program.tensors[block.owner].name!r})"

    def _name(self, job: Job, i: int) -> str:
        index = job.span.index
        n = self.kernels
        if job.span.stream != "compute":
            direction = "swap-out" if job.span.kind == "swap_out" else "swap-in"
            return f"{direction} of {self._owner(Block(index, 0, 0))}, iteration {i * self.order.iterations}"
        suffix = " (recomputed)" if job.span.kind == "recompute" else ""
        name = self.program.kernels[index].name
        return f"kernel {index % n} ({name!r}){suffix}, iteration {i * self.order.iterations + index // n}"

    # ---------------------------------------------------------------------------------- reading the log

    def boundaries(self, log: Log) -> list[int]:
        """Returns the end of each iteration by the device's clock, in ns."""
        count = len(self.order.jobs)
        n = self.kernels
        last = [j for j, job in enumerate(self.order.jobs) if job.span.kind == "kernel" and job.span.index % n == n - 1]
        return [int(log.end[i * count + j]) for i in range(self.rounds) for j in last]

    def read(self, log: Log, program: Program, limit: int, skip: int) -> Timeline:
        """Returns the measured timeline from the end of iteration ``skip`` on, which is its time 0.

        Args:
            log: Times of the run.
            program: Program whose kernel and tensor indices the spans get.
            limit: Memory limit in bytes.
            skip: Number of warm-up iterations, at least 1.

        Returns:
            The timeline, in ns from its time 0.
        """
        n = self.kernels
        jobs = self.order.jobs
        count = len(jobs)
        boundaries = self.boundaries(log)
        zero = boundaries[skip - 1]
        last = boundaries[-1]
        starts, ends = (times.astype(np.int64).tolist() for times in (log.begin, log.end))
        spans: list[Span] = []
        stalls: list[tuple[int, int, str]] = []
        marks: list[_Key] = []  # keys of the iteration boundaries
        ready = starts[next(j for j, job in enumerate(jobs) if job.span.stream == "compute")]  # end of the last kernel
        for slot in range(self.rounds * count):
            job = jobs[slot % count]
            i = slot // count
            stream, kind, index = job.span[2:]
            if stream != "compute":
                if not job.block:
                    starts[slot] = ends[slot] = ready
                if ends[slot] > zero and starts[slot] < last:
                    spans.append(Span(starts[slot], ends[slot], stream, kind, self.order.original[index]))
                continue
            begin = starts[slot] = max(ready, starts[slot] - self.pause_ns) if job.waits else ready
            end = ends[slot]
            if begin > ready:
                waits = [(ends[(i - ago) * count + o], jobs[o].span.kind) for ago, o in job.waits if ago <= i]
                stalls.append(
                    (ready - zero, begin - zero, "data" if waits and max(waits)[1] == "swap_in" else "memory")
                )
            ready = end
            if len(marks) >= skip:
                spans.append(Span(begin, end, stream, kind, index % n))
            if kind == "kernel" and index % n == n - 1:
                marks.append((end, True, slot, True))
        spans = [s._replace(start_ns=max(s.start_ns - zero, 0), end_ns=s.end_ns - zero) for s in spans]
        memory = self._events(starts, ends)
        keys = [key for key, _ in memory]
        first = bisect_right(keys, marks[skip - 1])
        until = [bisect_right(keys, mark) for mark in marks[skip:]]
        live: dict[int, BlockEvent] = {}  # blocks allocated at time 0
        for _, event in memory[:first]:
            live.pop(event.block, None)
            if event.nbytes > 0:
                live[event.block] = event._replace(time_ns=0)
        events = [*live.values(), *(e._replace(time_ns=e.time_ns - zero) for _, e in memory[first : until[-1]])]
        return Timeline.assemble(
            program,
            limit,
            self.order.predicted.required_bytes,
            [b - zero for b in boundaries[skip:]],
            sorted(spans, key=lambda s: s.start_ns),
            events,
            [len(live) + i - first for i in until],
            stalls,
        )

    def _events(self, starts: list[int], stops: list[int]) -> list[tuple[_Key, BlockEvent]]:
        """Returns the allocations and frees of blocks, each with its sort key."""
        events: list[tuple[_Key, BlockEvent]] = []
        count = len(self.order.jobs)
        n = self.kernels
        total = self.rounds * count
        for stay in self.order.residencies:
            index = stay.block.owner
            nbytes = stay.block.nbytes
            owner = self.order.original[index] if index >= 0 else -1 - (-1 - index) % n
            for i in range(-1 if stay.crosses else 0, self.rounds if stay.begin is not None else 0):
                ends = [(stops[slot], slot) for later, j in stay.ends if 0 <= (slot := (i + later) * count + j) < total]
                if i < 0:
                    if stay.begin is not None and not ends:
                        continue  # freed by a job that would have started before the run
                    key: _Key = (0, False, -1, False)
                else:
                    assert stay.begin is not None
                    begin = i * count + stay.begin
                    key = (starts[begin], True, begin, False)
                events.append((key, BlockEvent(key[0], owner, stay.index, nbytes)))
                if ends and all(i + later < self.rounds for later, _ in stay.ends):
                    end, slot = max(ends)
                    events.append(((end, starts[slot] == end, slot, True), BlockEvent(end, owner, stay.index, -nbytes)))
        return sorted(events)
