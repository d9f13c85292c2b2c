"""This computer behind ``executor.replay.backend``: a GPU played with what every computer has.

The arena is a NumPy array, each stream is a thread that does its work in order, copies really move their bytes at the
speed of a ``Machine``, and the threads run in parallel (NumPy releases the GIL while it copies).
How it keeps time (executor/replay/README.md):

1. A spin ends, and the last byte of a copy moves, when it is due, never before; a late thread delays nothing after it,
   whatever ``pause_ns`` is. A kernel whose bytes take longer is late by that.
2. A copy moves in up to PARTS pieces, each when it is due: who reads too early meets a copy that is half done.
3. Filling and checking take as long as NumPy takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from executor.memory.engines import HostStream
from executor.memory.pinned import HOST
from executor.replay.backend import RAMP, Backend, BackendError, Bytes, Stream, first_difference, pattern, pieces
from simulator.machine import Machine

PARTS = 16  # of a copy
PART_BYTES = 1024  # at least, of each part


class _Event:
    """When it happened, and whether it has."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.ns = 0


class _Dropped(Exception):
    """Work was called off while it ran."""


_Work = Callable[[int], int]  # from when it could begin to when it was due to be over


class HostBackend(Backend):
    """This computer as a machine's GPU: its memory sizes, its copy engines, its transfer times."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.name = f"host, as {machine.name}"
        self.memory_bytes = machine.memory_bytes
        self._stop = threading.Event()  # what has not begun is dropped
        self._error: tuple[str, BaseException] | None = None
        self._arena: Bytes | None = None
        self._mismatches: dict[int, int] = {}
        self._checks = 0
        self._base = self._absorbed = self._next = 0  # the last: where the next kernel streams
        self._due: dict[str, int] = {}  # of each thread: when what it did last was due to be over
        self.make_streams(lambda name: HostStream(name, partial(self._do, name)), machine.copy_engines)

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, device_bytes: int, host_bytes: int) -> None:
        if self._arena is not None:
            raise BackendError("there is an arena already; free it first")
        if device_bytes > self.memory_bytes:
            raise BackendError(f"{self.name} has {self.memory_bytes:,} bytes, too few for {device_bytes:,}")
        self.host = self._pin(host_bytes)
        try:
            self._arena = np.zeros(device_bytes, np.uint8)
        except MemoryError as error:
            del self.host
            raise BackendError(f"an arena of {device_bytes:,} bytes cannot be allocated ({error})") from None
        self._absorbed = self._next = 0
        self._base = time.perf_counter_ns()

    def _pin(self, nbytes: int) -> Bytes:
        if nbytes > self.machine.host_bytes:
            name, most = self.machine.name, self.machine.host_bytes
            raise BackendError(f"{nbytes:,} bytes of host memory cannot be pinned: {name} has {most:,}")
        try:
            return HOST.take(nbytes)
        except MemoryError as error:
            raise BackendError(str(error)) from None

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.nbytes

    def free(self) -> None:
        self._stop.set()
        for event in [self.record(stream) for stream in self.streams]:
            event.happened.wait()
        self._stop.clear()
        self._error, self._arena, self._mismatches, self._checks, self.task = None, None, {}, 0, ""
        if hasattr(self, "host"):
            del self.host

    def close(self) -> None:
        self.free()
        for stream in set(self.streams.values()):
            stream.close()

    # ---------------------------------------------------------------------------------- work

    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        on_device, on_host = self._range(device, nbytes), self.host[host : host + nbytes]
        self.check_range(host, nbytes, len(self.host), "host buffer")
        source, target = (on_device, on_host) if stream == "d2h" else (on_host, on_device)
        ns = self.machine.d2h_ns(nbytes) if stream == "d2h" else self.machine.h2d_ns(nbytes)
        latency = self.machine.d2h_latency_ns if stream == "d2h" else self.machine.h2d_latency_ns
        self._put(stream, lambda ready: self._copy(source, target, ready, ns, latency))

    def _copy(self, source: Bytes, target: Bytes, ready: int, ns: int, latency: int) -> int:
        nbytes = len(source)
        parts = min(PARTS, max(1, nbytes // PART_BYTES))
        for i in range(parts):
            self._sleep_until(ready + latency + (ns - latency) * (i + 1) // parts)
            begin, end = nbytes * i // parts, nbytes * (i + 1) // parts
            target[begin:end] = source[begin:end]
        return ready + ns

    def spin(self, ns: int, nbytes: int = 0) -> None:
        arena, half = self._range(0, 0 if self._arena is None else len(self._arena)), nbytes // 2
        parts = min(PARTS, max(1, half // PART_BYTES)) if half and len(arena) else 0
        first, self._next = self._next, self._next + half

        def work(ready: int) -> int:
            self._absorbed += max(0, time.perf_counter_ns() - ready)
            took = 0
            for i in range(parts):
                begin = time.perf_counter_ns()
                self._stream(arena, first + half * i // parts, first + half * (i + 1) // parts)
                took += time.perf_counter_ns() - begin
                self._sleep_until(ready + ns * (i + 1) // parts)
            return self._sleep_until(ready + max(ns, took))

        self._put("compute", work)

    @staticmethod
    def _stream(arena: Bytes, begin: int, end: int) -> None:
        """Reads and writes these bytes of the arena, which goes round."""
        while begin < end:
            at = begin % len(arena)
            piece = arena[at : at + end - begin]
            piece[:] = piece.copy()
            begin += len(piece)

    def absorbed_ns(self) -> int:
        return self._absorbed

    def fill(self, device: int, nbytes: int, seed: int) -> None:
        where = self._range(device, nbytes)

        def work(ready: int) -> int:
            for at in pieces(nbytes):
                piece = where[at : at + 4 * len(RAMP)]
                piece[:] = pattern(len(piece), seed, at // 4)
            return time.perf_counter_ns()

        self._put("compute", work)

    def verify(self, device: int, nbytes: int, seed: int) -> int:
        where, number = self._range(device, nbytes), self._checks
        self._checks += 1

        def work(ready: int) -> int:
            wrong = first_difference(where, seed)
            if wrong is not None:
                self._mismatches[number] = wrong
            return time.perf_counter_ns()

        self._put("compute", work)
        return number

    def mismatches(self) -> dict[int, int]:
        return dict(self._mismatches)

    def _range(self, offset: int, nbytes: int) -> Bytes:
        assert self._arena is not None, "there is no arena"
        self.check_range(offset, nbytes, len(self._arena), "arena")
        return self._arena[offset : offset + nbytes]

    # ---------------------------------------------------------------------------------- order and time

    def record(self, stream: Stream) -> _Event:
        event = _Event()
        self.streams[stream].put((time.perf_counter_ns(), self.task, event))
        return event

    def wait(self, stream: Stream, event: _Event) -> None:
        def work(ready: int) -> int:
            event.happened.wait()
            return max(ready, event.ns)

        self._put(stream, work)

    def synchronize(self, event: _Event | None = None) -> None:
        for each in [event] if event else [self.record(stream) for stream in self.streams]:
            each.happened.wait()
        if self._error:
            task, error = self._error
            raise BackendError(f"{task}: {error}" if task else str(error)) from error

    def time_ns(self, event: _Event) -> int:
        return event.ns - self._base

    def _put(self, stream: Stream, work: _Work) -> None:
        self.streams[stream].put((time.perf_counter_ns(), self.task, work))

    def _do(self, stream: str, item: tuple[int, str, _Work | _Event]) -> None:
        """What a stream's thread does. Events happen even where work is dropped."""
        enqueued, task, work = item
        if isinstance(work, _Event):
            work.ns = time.perf_counter_ns()
            work.happened.set()
        elif not self._stop.is_set():
            try:
                self._due[stream] = work(max(self._due.get(stream, 0), enqueued))
            except _Dropped:
                pass
            except BaseException as error:  # whatever it is, nobody may wait for this thread in vain
                self._error = self._error or (task, error)
                self._stop.set()

    def _sleep_until(self, due: int) -> int:
        """Sleeps until then, the last 0.1 ms awake; returns ``due``."""
        while (left := due - time.perf_counter_ns()) > 0:
            if left < 100_000:
                time.sleep(0)
            elif self._stop.wait((left - 60_000) / 1e9):
                raise _Dropped
        return due
