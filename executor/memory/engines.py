"""Copy engines, one per direction, with the same interface for tensors in host memory and on a GPU.

Events alone order the work; executor/training/memory_source.py lists the rules.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from executor.memory import cuda_index
from executor.memory.addresses import Driver
from executor.memory.pinned import CUDA, HOST, Bytes, Slabs


class TransferError(RuntimeError):
    """Raised if a copy between device and host fails or its host memory cannot be allocated."""


class _CopyEvent:
    """Event of host copies: holds the error of the last copy, or None."""

    error: Exception | None = None


class Engines:
    """Copy engines, one per direction; copies of one direction run in order, after the compute enqueued before them.

    Those of this class serve tensors in host memory: copies run when issued and report failures when waited for.

    Attributes:
        streams: the CUDA streams of the copies; empty without a GPU.
    """

    streams: tuple[Any, ...] = ()

    def pinned(self, cuts: Sequence[int]) -> list[tuple[int, Bytes]]:
        """Returns pinned host memory in parts, as ``Slabs.take_parts``, freed with the arrays; raises TransferError."""
        return _allocate_pinned(HOST, cuts)

    def borrow(self, tensor: Tensor) -> None:
        """Marks memory, possibly of another stream, as reusable only after the compute issued so far."""

    def event(self) -> Any:
        """Returns a reusable event for one tensor's copies in one direction; only one such copy is ever pending."""
        return _CopyEvent()

    def begin(self) -> bool:
        """Orders copies after the calling thread's current stream; returns True if that stream has changed.

        After a change, existing tensors may belong to the previous stream and must be passed to ``borrow``.
        """
        return False

    def copy_out(self, host: Tensor, device: Tensor, event: Any) -> None:
        """Starts a swap-out and records the event at its end."""
        self.copy_in(host, device, event)

    def copy_in(self, device: Tensor, host: Tensor, event: Any) -> None:
        """Starts a swap-in and records the event at its end."""
        try:
            move(device, host)
            event.error = None
        except Exception as error:
            event.error = error.with_traceback(None)  # its frames would keep the tensors alive

    def wait(self, event: Any) -> None:
        """Makes later compute wait for the event; raises TransferError if the copy failed."""
        if event.error:
            raise TransferError(line(event.error)) from event.error

    def join(self, event: Any) -> None:
        """Blocks the calling thread until the event."""

    def synchronize(self) -> None:
        """Blocks until all copies and compute are done; does not raise their errors."""


def move(target: Tensor, source: Tensor) -> None:
    """Copies one host tensor to another."""
    target.copy_(source)


@cache
def own_stream(index: int, role: Literal["capture", "d2h", "h2d"]) -> torch.cuda.Stream:
    """Returns a device's stream for one role, shared by all steps; no other code can get it.

    PyTorch hands out 32 streams per device round-robin (c10/cuda/CUDAStream.cpp): those of a user's thread may coincide
    with any of them. There is one capture stream, because cuBLAS keeps a workspace for every stream it sees.
    """
    handle = ctypes.c_void_p()
    non_blocking = ctypes.c_uint(1)  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
    Driver(torch.device("cuda", index))("cuStreamCreate", ctypes.byref(handle), non_blocking)
    return torch.cuda.ExternalStream(handle.value, device=index)


class CudaEngines(Engines):
    """Copy engines for tensors on a GPU: one stream per direction."""

    def __init__(self, device: torch.device):
        self.device = device
        index = cuda_index(device)
        self.d2h, self.h2d = self.streams = (own_stream(index, "d2h"), own_stream(index, "h2d"))
        self._compute_event = torch.cuda.Event()
        self._compute: torch.cuda.Stream | None = None

    def pinned(self, cuts: Sequence[int]) -> list[tuple[int, Bytes]]:
        return _allocate_pinned(CUDA, cuts)

    def borrow(self, tensor: Tensor) -> None:
        if not on_host(tensor):
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def begin(self) -> bool:
        previous = self._compute
        self._compute = torch.cuda.current_stream(self.device)
        caller = torch.cuda.current_stream()
        # set_stream also changes the current device, so the caller's stream is restored after the compute stream.
        self._to_restore = (self._compute,) if caller.device == self._compute.device else (self._compute, caller)
        return previous is not None and previous != self._compute

    def copy_out(self, host: Tensor, device: Tensor, event: torch.cuda.Event) -> None:
        self._copy(self.d2h, host, device, event)

    def copy_in(self, device: Tensor, host: Tensor, event: torch.cuda.Event) -> None:
        self._copy(self.h2d, device, host, event)

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, event: torch.cuda.Event) -> None:
        if on_host(target) and on_host(source):  # an optimizer's scalar, attention's seed
            for other in self.streams:  # their copies may still use this place in pinned memory
                other.synchronize()
            target.copy_(source)
            return
        self._compute_event.record(self._compute)  # a wait refers to the last record before it, so one event suffices
        stream.wait_event(self._compute_event)
        try:
            torch.cuda.set_stream(stream)
            target.copy_(source, non_blocking=True)
            event.record(stream)
        except RuntimeError as error:
            raise TransferError(line(error)) from error
        finally:
            for previous in self._to_restore:
                torch.cuda.set_stream(previous)

    def wait(self, event: torch.cuda.Event) -> None:
        assert self._compute is not None
        self._compute.wait_event(event)

    def join(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        with contextlib.suppress(RuntimeError):  # the caller already has an error to report
            torch.cuda.synchronize(self.device)


def on_host(tensor: Tensor) -> bool:
    """Returns True if the tensor is in host memory."""
    return tensor.device.type == "cpu"


def _allocate_pinned(slabs: Slabs, cuts: Sequence[int]) -> list[tuple[int, Bytes]]:
    try:
        return slabs.take_parts(cuts)
    except MemoryError as error:
        raise TransferError(str(error)) from None


def engines_for(device: torch.device) -> Engines:
    """Returns the copy engines for a device.

    Raises:
        TransferError: the device type is neither cpu nor cuda.
    """
    if device.type == "cuda":
        return CudaEngines(device)
    if device.type == "cpu":
        return Engines()
    raise TransferError(f"no copy engines for {device.type} tensors: expected cpu or cuda")


def line(error: BaseException) -> str:
    """Returns the first line of an error, with its type."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
