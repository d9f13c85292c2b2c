"""Simulated GPU in virtual time that executes enqueued work immediately, with the times of a Machine.

1. *Time* is computed: a kernel starts ``launch_ns`` (in a graph: ``graph_launch_ns``) after its predecessor, copies
   take the machine's transfer times, and events and waits of the compute stream cost ``event_ns`` and ``wait_ns``. The
   host spends ``issue_ns`` per kernel or copy and blocks while ``queue_depth`` of them are pending on a stream.
2. *Bytes* are real and are copied in the order of the calls, regardless of streams and events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from executor.memory.pinned import HOST
from executor.replay.backend import NEVER, Backend, BackendError, Bytes, Log, Stream, first_difference, pattern
from simulator.machine import Machine


@dataclass(eq=False)
class _Queue:
    """A stream: the time from which it is idle, and the end times of recent work."""

    ends: deque[int]
    idle_ns: int = 0


@dataclass(eq=False)
class _Event:
    ns: int = 0


class HostBackend(Backend):
    """Simulated GPU with the memory sizes, copy engines and times of a machine."""

    streams: dict[Stream, _Queue]

    def __init__(self, machine: Machine):
        self.machine = machine
        self.name = f"host, as {machine.name}"
        self.memory_bytes = machine.memory_bytes
        self.make_streams(lambda _: _Queue(deque(maxlen=machine.queue_depth)), machine.copy_engines)
        self._arena: Bytes | None = None
        self._log = np.zeros((3, 0), np.uint64)
        self._host_ns = 0
        self._nodes: list[Callable[[], None]] | None = None  # while a graph is captured
        self._launched = False  # whether a graph is running

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, device_bytes: int, host_bytes: int, slots: int = 0) -> None:
        if self._arena is not None:
            raise BackendError("an arena exists already; free it first")
        if device_bytes > self.memory_bytes:
            raise BackendError(
                f"{self.name} has {self.memory_bytes:,} bytes, too few for {device_bytes:,}; lower the limit"
            )
        if host_bytes > self.machine.host_bytes:
            name = self.machine.name
            available = self.machine.host_bytes
            raise BackendError(
                f"{host_bytes:,} bytes of host memory cannot be pinned: {name} has {available:,}; swap less"
            )
        try:
            self.host = HOST.take(host_bytes)
            self._arena = np.zeros(device_bytes, np.uint8)
        except MemoryError as error:
            raise BackendError(str(error)) from None
        self._log = np.zeros((3, slots), np.uint64)
        self._clear_log()

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.nbytes

    def free(self) -> None:
        self.synchronize()
        self._arena = None
        self._nodes = None
        self.task = ""
        if hasattr(self, "host"):
            del self.host

    # ---------------------------------------------------------------------------------- work

    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        is_swap_out = stream == "d2h"
        on_device = self._bytes("arena", device, nbytes)
        on_host = self._bytes("host buffer", host, nbytes)
        duration_ns = self.machine.d2h_ns(nbytes) if is_swap_out else self.machine.h2d_ns(nbytes)

        def work() -> None:
            self._schedule(stream, duration_ns)
            source, target = (on_device, on_host) if is_swap_out else (on_host, on_device)
            target[:] = source

        self._enqueue(work)

    def spin(self, ns: int, slot: int | None = None, stream: Stream = "compute") -> None:
        def work() -> None:
            pause = self.machine.graph_launch_ns if self._launched else self.machine.launch_ns
            begin, end = self._schedule(stream, ns, pause if stream == "compute" else 0)
            if slot is not None:
                log = Log(*self._log)
                log.begin[slot], log.end[slot] = min(int(log.begin[slot]), begin), max(int(log.end[slot]), end)

        self._enqueue(work)

    def fill(self, device: int, nbytes: int, seed: int) -> None:
        target = self._bytes("arena", device, nbytes)

        def work() -> None:
            self._schedule("compute", 0)
            target[:] = pattern(nbytes, seed)

        self._enqueue(work)

    def verify(self, device: int, nbytes: int, seed: int, slot: int) -> None:
        data = self._bytes("arena", device, nbytes)

        def work() -> None:
            self._schedule("compute", 0)
            if (wrong := first_difference(data, seed)) is not None:
                Log(*self._log).wrong[slot] = wrong

        self._enqueue(work)

    def log(self) -> Log:
        return Log(*self._log.copy())

    def _clear_log(self) -> None:
        self._log[:2] = NEVER
        self._log[2] = 0

    def _bytes(self, space: str, offset: int, nbytes: int) -> Bytes:
        assert self._arena is not None, "no arena is allocated"
        memory = self._arena if space == "arena" else self.host
        self.check_range(offset, nbytes, len(memory), space)
        return memory[offset : offset + nbytes]

    # ---------------------------------------------------------------------------------- graphs

    def _enqueue(self, work: Callable[[], None]) -> None:
        if self._nodes is None:
            work()
        else:
            self._nodes.append(work)

    def begin_capture(self) -> None:
        self._nodes = []

    def end_capture(self) -> Callable[[], None]:
        nodes = self._nodes or []
        self._nodes = None

        def launch() -> None:
            self._clear_log()
            self._host_ns += self.machine.issue_ns
            self._launched = True
            for work in nodes:
                work()
            self._launched = False

        return launch

    # ---------------------------------------------------------------------------------- order and time

    def record(self, stream: Stream, timed: bool = False) -> _Event:
        event = _Event()

        def work() -> None:
            queue = self.streams[stream]
            if stream == "compute" and not timed:
                queue.idle_ns += self.machine.event_ns
            event.ns = queue.idle_ns

        self._enqueue(work)
        return event

    def wait(self, stream: Stream, event: _Event) -> None:
        def work() -> None:
            queue = self.streams[stream]
            queue.idle_ns = max(queue.idle_ns, event.ns) + (self.machine.wait_ns if stream == "compute" else 0)

        self._enqueue(work)

    def synchronize(self) -> None:
        self._host_ns = max(self._host_ns, *(queue.idle_ns for queue in self.streams.values()))

    def elapsed_ns(self, first: _Event, second: _Event) -> int:
        return second.ns - first.ns

    def host_ns(self) -> int:
        return self._host_ns

    def _schedule(self, stream: Stream, duration_ns: int, pause: int = 0) -> tuple[int, int]:
        """Schedules work of ``duration_ns`` ns on a stream and returns its start and end in ns."""
        queue = self.streams[stream]
        if not self._launched:
            is_full = len(queue.ends) == queue.ends.maxlen
            self._host_ns = max(self._host_ns, queue.ends[0] if is_full else 0) + self.machine.issue_ns
        begin = max(queue.idle_ns + pause, self._host_ns)
        queue.idle_ns = begin + duration_ns
        if not self._launched:
            queue.ends.append(queue.idle_ns)
        return begin, queue.idle_ns
