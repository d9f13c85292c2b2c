"""Device interface: one arena, three streams, and graphs of work on the streams.

Offsets are in bytes, into the arena (``device``) or into the pinned host buffer (``host``). A call enqueues work on a
stream and returns; ``synchronize`` waits for all work. Inside ``graph``, the same calls become nodes and edges of a
graph. Work on one stream runs in order; only ``record`` and ``wait`` order work across streams. The streams are those
of the simulator: ``compute``, ``d2h`` and ``h2d``; with one copy engine, the last two are the same stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Stream = Literal["compute", "d2h", "h2d"]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]

STEP = 2654435761  # odd, so that a pattern's first 2**32 words all differ
NEVER = 2**64 - 1  # Log entry if no kernel has started or no byte was wrong


class BackendError(RuntimeError):
    """Raised if the device refused or failed; the message names the reason and the task."""


class Log(NamedTuple):
    """Log slots that kernels have written.

    Attributes:
        begin: uint64[slots], start of the first kernel of a slot, in ns of the device's clock.
        wrong: uint64[slots], first wrong byte found by ``verify``, or NEVER.
        end: uint64[slots], end of the last kernel of a slot, in ns of the device's clock.
    """

    begin: Numbers
    wrong: Numbers
    end: Numbers


def pattern(nbytes: int, seed: int) -> Bytes:
    """Returns the bytes that ``fill`` writes, uint8[nbytes]: little-endian words seed + i * STEP modulo 2**32.

    Two patterns agree at one relative offset at most, so a wrong address or version is detected.
    """
    words = np.arange(-(-nbytes // 4), dtype="<u4")
    words *= np.uint32(STEP)
    words += np.uint32(seed)
    return words.view(np.uint8)[:nbytes]


def first_difference(data: Bytes, seed: int) -> int | None:
    """Returns the index of the first byte of uint8[n] that differs from ``pattern(n, seed)``, or None."""
    wrong = data != pattern(len(data), seed)
    return int(wrong.argmax()) if wrong.any() else None


class Backend(ABC):
    """Device with an arena in device memory, a pinned host buffer, a log of numbered slots, and streams.

    Attributes:
        name: description of the device.
        streams: stream objects by name; with one copy engine, both directions share one stream.
        memory_bytes: total memory of the device.
        host: uint8[host_bytes], the pinned buffer while an arena exists. Access it only after ``synchronize``.
        task: description of the work that the caller enqueues; prefix of its error messages.
    """

    name: str
    streams: dict[Stream, Any]
    memory_bytes: int
    host: Bytes
    task: str = ""

    def make_streams(self, make: Callable[[Stream], Any], copy_engines: int) -> None:
        """Sets ``streams``, creating each with ``make(name)``."""
        self.streams = {"compute": make("compute"), "d2h": make("d2h")}
        self.streams["h2d"] = make("h2d") if copy_engines == 2 else self.streams["d2h"]

    def check_range(self, offset: int, nbytes: int, total: int, where: str) -> None:
        """Raises BackendError if a range exceeds the arena or the host buffer of ``total`` bytes."""
        if not 0 <= offset <= offset + nbytes <= total:
            raise BackendError(
                f"{self.task}: bytes {offset:,} to {offset + nbytes:,} are not in the {where} of {total:,}; report it"
            )

    @contextmanager
    def arena(self, device_bytes: int, host_bytes: int, slots: int = 0) -> Iterator[Backend]:
        """Calls ``allocate`` on entry and ``free`` on exit."""
        self.allocate(device_bytes, host_bytes, slots)
        try:
            yield self
        finally:
            self.free()

    def graph(self, issue: Callable[[], None]) -> Callable[[], None]:
        """Captures the work that ``issue`` enqueues as one graph that starts and ends on the compute stream.

        Returns:
            A function that clears the log and launches the graph.

        Raises:
            BackendError: if the device refused the capture.
        """
        directions: tuple[Stream, ...] = ("d2h", "h2d")
        self.begin_capture()
        try:
            fork = self.record("compute")
            for copies in directions:
                self.wait(copies, fork)
            issue()
            for copies in directions:
                self.wait("compute", self.record(copies))
        except BaseException:
            with suppress(BackendError):
                self.end_capture()
            raise
        return self.end_capture()

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def allocate(self, device_bytes: int, host_bytes: int, slots: int = 0) -> None:
        """Allocates the arena (one allocation of exactly ``device_bytes``), the host buffer and an empty log.

        Args:
            device_bytes: size of the arena.
            host_bytes: size of the host buffer.
            slots: entries of the log.

        Raises:
            BackendError: if device or host memory does not suffice, or an arena exists already.
        """

    @abstractmethod
    def free(self) -> None:
        """Drains the streams and frees arena, host buffer and log; raises nothing.

        Pinned memory stays pinned for its next user (executor/memory/pinned.py).
        """

    def close(self) -> None:
        """Frees everything including streams, after which the backend is unusable."""
        self.free()

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Device memory of the arena as counted by the device."""

    @abstractmethod
    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        """Copies ``nbytes`` between arena[device:] and host[host:] in the direction of ``stream`` (d2h or h2d)."""

    @abstractmethod
    def spin(self, ns: int, slot: int | None = None, stream: Stream = "compute") -> None:
        """Launches a kernel that occupies its stream for ``ns`` and writes its start and end to a slot of the log."""

    @abstractmethod
    def fill(self, device: int, nbytes: int, seed: int) -> None:
        """Writes ``pattern(nbytes, seed)`` to arena[device:] on the compute stream."""

    @abstractmethod
    def verify(self, device: int, nbytes: int, seed: int, slot: int) -> None:
        """Compares arena[device:] with ``pattern(nbytes, seed)`` on the compute stream and logs the result."""

    @abstractmethod
    def record(self, stream: Stream, timed: bool = False) -> Any:
        """Returns an event that fires when all work enqueued on the stream so far has ended."""

    @abstractmethod
    def wait(self, stream: Stream, event: Any) -> None:
        """Makes all work enqueued on the stream later wait for an event."""

    @abstractmethod
    def begin_capture(self) -> None:
        """Starts capturing enqueued work as nodes of a graph; see ``graph``."""

    @abstractmethod
    def end_capture(self) -> Callable[[], None]:
        """Ends the capture and returns a function that launches the graph."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all enqueued work has ended.

        Raises:
            BackendError: if some of it failed.
        """

    @abstractmethod
    def log(self) -> Log:
        """Returns the log; call ``synchronize`` first."""

    @abstractmethod
    def elapsed_ns(self, first: Any, second: Any) -> int:
        """Returns the time between two past timed events in ns."""

    @abstractmethod
    def host_ns(self) -> int:
        """Returns the clock of the host that enqueues the work, in ns."""
