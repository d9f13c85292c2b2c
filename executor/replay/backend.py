"""Interface to a device: one arena, three streams, and graphs of the work on them.

Offsets are bytes, into the arena (``device``) or into the pinned host buffer (``host``). A call enqueues work on a
stream and returns; ``synchronize`` waits for it. Within ``graph`` the same calls become nodes and edges of a graph.
Work on one stream runs in the order of the calls; between streams only ``record`` and ``wait`` order anything. The
streams are those of the simulator: ``compute``, ``d2h``, ``h2d``; with one copy engine the latter two are one.
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

STEP = 2654435761  # odd, so that the words of a pattern differ for 2**32 words
NEVER = 2**64 - 1  # in a Log: no kernel began, no byte was wrong


class BackendError(RuntimeError):
    """The device refused or failed; the message says what, and during which task."""


class Log(NamedTuple):
    """What kernels wrote into their slots.

    Attributes:
        begin, end: uint64[slots], ns of the device's clock: when the first kernel of a slot began, its last ended.
        wrong: uint64[slots], the first wrong byte that a ``verify`` found, else NEVER.
    """

    begin: Numbers
    wrong: Numbers
    end: Numbers


def pattern(nbytes: int, seed: int) -> Bytes:
    """Returns what ``fill`` writes: little-endian 32-bit words, word i is seed + i * STEP modulo 2**32. uint8[nbytes].

    Two patterns agree at no more than one distance, so a tensor at a wrong address or of another version differs.
    """
    words = np.arange(-(-nbytes // 4), dtype="<u4")
    words *= np.uint32(STEP)
    words += np.uint32(seed)
    return words.view(np.uint8)[:nbytes]


def first_difference(found: Bytes, seed: int) -> int | None:
    """Returns the first byte of uint8[n] that differs from ``pattern(n, seed)``, or None."""
    wrong = found != pattern(len(found), seed)
    return int(wrong.argmax()) if wrong.any() else None


class Backend(ABC):
    """One arena in device memory, one pinned buffer in host memory, a log of numbered slots, work on streams.

    Attributes:
        name: of the device, in words.
        streams: what work is enqueued on; with one copy engine both directions have the same.
        memory_bytes: of the device in all.
        host: uint8[host_bytes], the pinned buffer while an arena exists. Access it only after ``synchronize``.
        task: what the caller enqueues now; errors of that work begin with it.
    """

    name: str
    streams: dict[Stream, Any]
    memory_bytes: int
    host: Bytes
    task: str = ""

    def make_streams(self, make: Callable[[Stream], Any], copy_engines: int) -> None:
        """Sets ``streams``, each made by ``make`` from its name."""
        self.streams = {"compute": make("compute"), "d2h": make("d2h")}
        self.streams["h2d"] = make("h2d") if copy_engines == 2 else self.streams["d2h"]

    def check_range(self, offset: int, nbytes: int, total: int, where: str) -> None:
        """Raises BackendError if some bytes are outside the arena or the host buffer."""
        if not 0 <= offset <= offset + nbytes <= total:
            raise BackendError(f"{self.task}: bytes {offset:,} to {offset + nbytes:,} are not in the {where}")

    @contextmanager
    def arena(self, device_bytes: int, host_bytes: int, slots: int = 0) -> Iterator[Backend]:
        """Calls ``allocate``, and ``free`` at the end."""
        self.allocate(device_bytes, host_bytes, slots)
        try:
            yield self
        finally:
            self.free()

    def graph(self, issue: Callable[[], None]) -> Callable[[], None]:
        """Captures what ``issue`` enqueues as one graph that begins and ends on the compute stream.

        Returns:
            A function that clears the log and launches the graph.

        Raises:
            BackendError: the device refused the capture.
        """
        self.begin_capture()
        try:
            fork = self.record("compute")
            for copies in ("d2h", "h2d"):
                self.wait(copies, fork)
            issue()
            for copies in ("d2h", "h2d"):
                self.wait("compute", self.record(copies))  # type: ignore[arg-type]
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

        Raises:
            BackendError: device or host memory does not suffice, or an arena exists already.
        """

    @abstractmethod
    def free(self) -> None:
        """Drains the streams and returns arena, host buffer and log; raises nothing. Pinned memory stays pinned for
        the next user (executor/memory/pinned.py)."""

    def close(self) -> None:
        """Frees everything, streams included. The backend cannot be used any more."""
        self.free()

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Device memory that the arena takes, by the device's own count."""

    @abstractmethod
    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        """Copies ``nbytes`` between arena[device:] and host[host:] in the direction of ``stream`` (d2h or h2d)."""

    @abstractmethod
    def spin(self, ns: int, slot: int | None = None, stream: Stream = "compute") -> None:
        """Launches a kernel that keeps its stream busy for ``ns`` and writes its begin and end to a slot of the log."""

    @abstractmethod
    def fill(self, device: int, nbytes: int, seed: int) -> None:
        """Writes ``pattern(nbytes, seed)`` to arena[device:] on the compute stream."""

    @abstractmethod
    def verify(self, device: int, nbytes: int, seed: int, slot: int) -> None:
        """Compares arena[device:] with ``pattern(nbytes, seed)`` on the compute stream; the answer goes to a slot."""

    @abstractmethod
    def record(self, stream: Stream, timed: bool = False) -> Any:
        """Returns an event that happens when all work enqueued on the stream so far is over."""

    @abstractmethod
    def wait(self, stream: Stream, event: Any) -> None:
        """Makes work enqueued on the stream from now on begin after an event."""

    @abstractmethod
    def begin_capture(self) -> None:
        """Turns what is enqueued from now on into nodes of a graph; see ``graph``."""

    @abstractmethod
    def end_capture(self) -> Callable[[], None]:
        """Returns the launch of what was captured."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all enqueued work is over.

        Raises:
            BackendError: some of it failed.
        """

    @abstractmethod
    def log(self) -> Log:
        """Returns the log; to be called after ``synchronize``."""

    @abstractmethod
    def elapsed_ns(self, first: Any, second: Any) -> int:
        """Time from one past timed event to another."""

    @abstractmethod
    def host_ns(self) -> int:
        """Time of the host that enqueues the work, in ns."""
