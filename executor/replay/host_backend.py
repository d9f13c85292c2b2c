"""A GPU played in virtual time: what ``executor.replay.backend`` enqueues is done at once, by the times of a Machine.

1. *Time* is counted, not measured: a kernel begins ``launch_ns`` (in a graph ``graph_launch_ns``) after the one before,
   a copy takes what the machine says, an event and a wait of the compute stream ``event_ns`` and ``wait_ns``; the host
   takes ``issue_ns`` for each kernel or copy and waits while ``queue_depth`` of them are pending on a stream.
2. *Bytes* are real, and move in the order of the calls.
3. *Order* is checked by vector clocks: two uses of one byte, of which one writes, that no event orders are refused,
   whatever their times. So a missing wait is found even if it would do no harm on this machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from executor.memory.pinned import HOST
from executor.replay.backend import (
    NEVER,
    RAMP,
    Backend,
    BackendError,
    Bytes,
    Log,
    Stream,
    first_difference,
    pattern,
    pieces,
)
from simulator.machine import Machine

Space = Literal["arena", "host buffer"]


@dataclass(eq=False)
class _Queue:
    """A stream: when it is idle, what precedes its next work, and the ends of the work that may be pending."""

    name: str
    ends: deque[int]
    idle_ns: int = 0
    clock: dict[str, int] = field(default_factory=dict)  # queue -> how many of its pieces of work are over


@dataclass(eq=False)
class _Event:
    ns: int = 0
    clock: dict[str, int] = field(default_factory=dict)


class _Use(NamedTuple):
    """Bytes that some work read or wrote."""

    begin: int
    end: int
    write: bool
    queue: str
    number: int  # of the work on its queue
    task: str


class HostBackend(Backend):
    """This computer as a machine's GPU: its memory sizes, its copy engines, its times."""

    streams: dict[Stream, _Queue]

    def __init__(self, machine: Machine):
        self.machine = machine
        self.name = f"host, as {machine.name}"
        self.memory_bytes = machine.memory_bytes
        self.make_streams(lambda name: _Queue(name, deque(maxlen=machine.queue_depth)), machine.copy_engines)
        self._arena: Bytes | None = None
        self._log = np.zeros((3, 0), np.uint64)
        self._uses: dict[Space, list[_Use]] = {"arena": [], "host buffer": []}
        self._host_ns = 0
        self._nodes: list[tuple[str, Callable[[], None]]] | None = None  # while a graph is captured
        self._launched = False  # is a graph under way?

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, device_bytes: int, host_bytes: int, slots: int = 0) -> None:
        if self._arena is not None:
            raise BackendError("there is an arena already; free it first")
        if device_bytes > self.memory_bytes:
            raise BackendError(f"{self.name} has {self.memory_bytes:,} bytes, too few for {device_bytes:,}")
        if host_bytes > self.machine.host_bytes:
            name, most = self.machine.name, self.machine.host_bytes
            raise BackendError(f"{host_bytes:,} bytes of host memory cannot be pinned: {name} has {most:,}")
        try:
            self.host, self._arena = HOST.take(host_bytes), np.zeros(device_bytes, np.uint8)
        except MemoryError as error:
            raise BackendError(str(error)) from None
        self._log = np.zeros((3, slots), np.uint64)
        self._clear_log()

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.nbytes

    def free(self) -> None:
        self.synchronize()
        self._arena, self._nodes, self.task = None, None, ""
        if hasattr(self, "host"):
            del self.host

    def close(self) -> None:
        self.free()

    # ---------------------------------------------------------------------------------- work

    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        out = stream == "d2h"
        on_device, on_host = self._bytes("arena", device, nbytes), self._bytes("host buffer", host, nbytes)
        lasts = self.machine.d2h_ns(nbytes) if out else self.machine.h2d_ns(nbytes)

        def work() -> None:
            self._count(stream, lasts)
            self._use(stream, "arena", device, nbytes, write=not out)
            self._use(stream, "host buffer", host, nbytes, write=out)
            source, target = (on_device, on_host) if out else (on_host, on_device)
            target[:] = source

        self._enqueue(work)

    def spin(self, ns: int, slot: int | None = None, stream: Stream = "compute") -> None:
        def work() -> None:
            pause = self.machine.graph_launch_ns if self._launched else self.machine.launch_ns
            begin, end = self._count(stream, ns, pause if stream == "compute" else 0)
            if slot is not None:
                log = Log(*self._log)
                log.begin[slot], log.end[slot] = min(int(log.begin[slot]), begin), max(int(log.end[slot]), end)

        self._enqueue(work)

    def fill(self, device: int, nbytes: int, seed: int) -> None:
        where = self._bytes("arena", device, nbytes)

        def work() -> None:
            self._count("compute", 0)
            self._use("compute", "arena", device, nbytes, write=True)
            for at in pieces(nbytes):
                piece = where[at : at + 4 * len(RAMP)]
                piece[:] = pattern(len(piece), seed, at // 4)

        self._enqueue(work)

    def verify(self, device: int, nbytes: int, seed: int, slot: int) -> None:
        where = self._bytes("arena", device, nbytes)

        def work() -> None:
            self._count("compute", 0)
            self._use("compute", "arena", device, nbytes, write=False)
            if (wrong := first_difference(where, seed)) is not None:
                Log(*self._log).wrong[slot] = wrong

        self._enqueue(work)

    def log(self) -> Log:
        return Log(*self._log.copy())

    def _clear_log(self) -> None:
        self._log[:2], self._log[2] = NEVER, 0

    def _bytes(self, space: Space, offset: int, nbytes: int) -> Bytes:
        assert self._arena is not None, "there is no arena"
        memory = self._arena if space == "arena" else self.host
        self.check_range(offset, nbytes, len(memory), space)
        return memory[offset : offset + nbytes]

    # ---------------------------------------------------------------------------------- graphs

    def _enqueue(self, work: Callable[[], None]) -> None:
        if self._nodes is None:
            work()
        else:
            self._nodes.append((self.task, work))

    def begin_capture(self) -> None:
        self._nodes = []

    def end_capture(self) -> Callable[[], None]:
        nodes, self._nodes = self._nodes or [], None

        def launch() -> None:
            self._clear_log()
            self._host_ns += self.machine.issue_ns
            self._launched, before = True, self.task
            try:
                for self.task, work in nodes:
                    work()
            finally:
                self._launched, self.task = False, before

        return launch

    # ---------------------------------------------------------------------------------- order and time

    def record(self, stream: Stream, timed: bool = False) -> _Event:
        event = _Event()

        def work() -> None:
            queue = self.streams[stream]
            if stream == "compute" and not timed:
                queue.idle_ns += self.machine.event_ns
            event.ns, event.clock = queue.idle_ns, dict(queue.clock)

        self._enqueue(work)
        return event

    def wait(self, stream: Stream, event: _Event) -> None:
        def work() -> None:
            queue = self.streams[stream]
            queue.idle_ns = max(queue.idle_ns, event.ns) + (self.machine.wait_ns if stream == "compute" else 0)
            for other, number in event.clock.items():
                queue.clock[other] = max(queue.clock.get(other, 0), number)

        self._enqueue(work)

    def synchronize(self) -> None:
        self._host_ns = max(self._host_ns, *(queue.idle_ns for queue in self.streams.values()))
        for uses in self._uses.values():  # all that is enqueued from now on comes after them
            uses.clear()

    def elapsed_ns(self, first: _Event, second: _Event) -> int:
        return second.ns - first.ns

    def host_ns(self) -> int:
        return self._host_ns

    def _count(self, stream: Stream, lasts: int, pause: int = 0) -> tuple[int, int]:
        """Gives the stream a piece of work; returns its begin and end."""
        queue = self.streams[stream]
        queue.clock[queue.name] = queue.clock.get(queue.name, 0) + 1
        if not self._launched:
            full = len(queue.ends) == queue.ends.maxlen
            self._host_ns = max(self._host_ns, queue.ends[0] if full else 0) + self.machine.issue_ns
        begin = max(queue.idle_ns + pause, self._host_ns)
        queue.idle_ns = begin + lasts
        if not self._launched:
            queue.ends.append(queue.idle_ns)
        return begin, queue.idle_ns

    def _use(self, stream: Stream, space: Space, begin: int, nbytes: int, write: bool) -> None:
        """Notes bytes that the stream's latest work uses; raises BackendError if a conflicting use is in no order."""
        queue, end, kept = self.streams[stream], begin + nbytes, list[_Use]()
        for use in self._uses[space]:
            if use.begin < end and begin < use.end:
                ordered = queue.clock.get(use.queue, 0) >= use.number
                if (write or use.write) and not ordered:
                    raise BackendError(
                        f"{self.task}: it uses bytes of the {space} that {use.task} uses, too, and no event orders them"
                    )
                if ordered and (write or not use.write) and begin <= use.begin and use.end <= end:
                    continue  # whoever comes after this use comes after that one
            kept.append(use)
        if nbytes:
            kept.append(_Use(begin, end, write, queue.name, queue.clock[queue.name], self.task))
        self._uses[space] = kept
