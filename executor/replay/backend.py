"""The device seam: one arena, three streams, events. Everything that replay and calibration ask of a device.

``Backend`` is the interface; ``host_backend`` plays a GPU with threads, ``cupy_backend`` is one.

Offsets are bytes, into the arena (``device``) or into the pinned host buffer (``host``). A call enqueues work on a
stream and returns; ``synchronize`` waits. Work on one stream runs in the order of the calls; between streams only
``record`` and ``wait`` order anything. The streams are those of the simulator: ``compute``, ``d2h``, ``h2d``; on a
machine with one copy engine the latter two are one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Stream = Literal["compute", "d2h", "h2d"]
Bytes = npt.NDArray[np.uint8]

STEP = 2654435761  # odd, so that the words of a pattern differ for 2**32 words
RAMP = (np.arange(2**16, dtype=np.uint64) * STEP).astype("<u4")


class BackendError(RuntimeError):
    """The device refused or failed; the message says what, and during which task."""


def pattern(nbytes: int, seed: int, first_word: int = 0) -> Bytes:
    """What ``fill`` writes: little-endian 32-bit words, word i is seed + i * STEP modulo 2**32. uint8[nbytes].

    Two patterns agree at no more than one distance: a tensor that lies elsewhere or holds another content is told.
    """
    words = -(-nbytes // 4)
    if words <= len(RAMP):
        start = (seed + first_word * STEP) % 2**32
        return (RAMP[:words] + np.uint32(start)).view(np.uint8)[:nbytes]
    parts = [pattern(min(4 * len(RAMP), nbytes - at), seed, first_word + at // 4) for at in pieces(nbytes)]
    return np.concatenate(parts)


def first_difference(found: Bytes, seed: int) -> int | None:
    """The first byte of uint8[n] that is not as ``pattern(n, seed)``; None where there is none."""
    for at in pieces(len(found)):
        piece = found[at : at + 4 * len(RAMP)]
        wrong = piece != pattern(len(piece), seed, at // 4)
        if wrong.any():
            return at + int(wrong.argmax())
    return None


def pieces(nbytes: int) -> range:
    """Offsets of the parts, of at most one RAMP each, in which a long range is filled and checked."""
    return range(0, nbytes, 4 * len(RAMP))


class Backend(ABC):
    """One arena in device memory, one pinned buffer in host memory, work on streams.

    Attributes:
        name: of the device, in words.
        streams: what work is enqueued on; with one copy engine both directions have the same.
        memory_bytes: of the device in all.
        pause_ns: kernels that begin so soon after the one before make up for the pause (``spin``).
        host: uint8[host_bytes], the pinned buffer, while there is one. Touch it when nothing is under way there.
        task: what the caller is doing, as ``str`` says it; errors of what is enqueued from now on begin with it.
    """

    name: str
    streams: dict[Stream, Any]
    memory_bytes: int
    pause_ns: int = 0
    host: Bytes
    task: object = ""

    def make_streams(self, make: Callable[[Stream], Any], copy_engines: int) -> None:
        """``streams``, each made by ``make`` from its name."""
        self.streams = {"compute": make("compute"), "d2h": make("d2h")}
        self.streams["h2d"] = make("h2d") if copy_engines == 2 else self.streams["d2h"]

    def check_range(self, offset: int, nbytes: int, total: int, of: str) -> None:
        """Raises BackendError where some bytes of the arena, or of the host buffer, are not in it."""
        if not 0 <= offset <= offset + nbytes <= total:
            raise BackendError(f"{self.task}: bytes {offset:,} to {offset + nbytes:,} are not in the {of}")

    @contextmanager
    def arena(self, device_bytes: int, host_bytes: int) -> Iterator[Backend]:
        """``allocate``, and ``free`` whatever happens."""
        self.allocate(device_bytes, host_bytes)
        try:
            yield self
        finally:
            self.free()

    @abstractmethod
    def allocate(self, device_bytes: int, host_bytes: int) -> None:
        """Makes the arena, one allocation of exactly so many bytes, and the host buffer; the clock starts at 0.

        Raises:
            BackendError: there is not so much memory, it cannot be pinned, or there is an arena already.
        """

    @abstractmethod
    def free(self) -> None:
        """Drains the streams and returns the arena and the host buffer, which stays pinned for who asks next
        (executor/memory/pinned.py); work that has not begun may be dropped. Raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """``free``, and gives back the streams. The backend cannot be used any more."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Device memory that the arena takes, by the device's own count."""

    @abstractmethod
    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        """Copies ``nbytes`` between arena[device:] and host[host:]; ``stream``, d2h or h2d, is the direction."""

    @abstractmethod
    def spin(self, ns: int, nbytes: int = 0) -> None:
        """Keeps the compute stream busy for so long, and longer if its ``nbytes`` cannot be moved in that time.

        Args:
            ns: from its start; where that is at most ``pause_ns`` after the kernel before, from when that was due.
            nbytes: half of them are read from the arena and half written to it as they were, evenly over the time.
                What copies bring there meanwhile may be overwritten.
        """

    @abstractmethod
    def absorbed_ns(self) -> int:
        """After ``synchronize``: the pauses that kernels made up for, in all."""

    @abstractmethod
    def fill(self, device: int, nbytes: int, seed: int) -> None:
        """Writes ``pattern(nbytes, seed)`` to arena[device:] on the compute stream."""

    @abstractmethod
    def verify(self, device: int, nbytes: int, seed: int) -> int:
        """Compares arena[device:] with ``pattern(nbytes, seed)`` on the compute stream; a number for the answer."""

    @abstractmethod
    def mismatches(self) -> dict[int, int]:
        """After ``synchronize``: of each number of a ``verify`` that failed, the first byte that was wrong."""

    @abstractmethod
    def record(self, stream: Stream) -> Any:
        """An event: happens when all that is enqueued on the stream so far is over."""

    @abstractmethod
    def wait(self, stream: Stream, event: Any) -> None:
        """What is enqueued on the stream from now on begins after the event, which has been recorded already."""

    @abstractmethod
    def synchronize(self, event: Any = None) -> None:
        """Returns when the event has happened (None: when all that is enqueued is over).

        Raises:
            BackendError: something that was enqueued failed; all that had not begun by then was dropped.
        """

    @abstractmethod
    def time_ns(self, event: Any) -> int:
        """When a past event happened, from ``allocate``."""
