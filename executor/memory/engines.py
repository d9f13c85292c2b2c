"""Copy engines: one each way, the same calls for tensors in host memory and on a GPU.

Work is ordered by events alone (executor/training/memory_source.py says which).
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from executor.memory import cuda_index
from executor.memory.pinned import CUDA, HOST, Bytes, Slabs


class TransferError(RuntimeError):
    """A copy between device and host failed, or host memory for it cannot be had."""


class Engines(Protocol):
    """One copy engine each way; copies of one direction are done in order, after the compute enqueued before them.

    Attributes:
        streams: what they enqueue copies on; none where there is no GPU.
    """

    streams: tuple[Any, ...]

    def pinned(self, nbytes: int) -> Bytes:
        """Host memory for copies, uint8[nbytes], free again with the array; raises TransferError."""

    def borrow(self, tensor: Tensor) -> None:
        """The step frees this memory, which may be another stream's: it is used again after all compute so far."""

    def event(self) -> Any:
        """For copies of one tensor one way, again and again: each is waited for before the next starts."""

    def begin(self) -> bool:
        """What the calling thread computes from now on is what copies come after. Is it on another stream than before?
        Then what is there may have been taken on the one before, and is to be borrowed."""

    def copy_out(self, host: Tensor, device: Tensor, event: Any) -> None:
        """Starts a swap-out; the event is when it is done."""

    def copy_in(self, device: Tensor, host: Tensor, event: Any) -> None:
        """Starts a swap-in; the event is when it is done."""

    def wait(self, event: Any) -> None:
        """What is computed from now on comes after the event; raises TransferError where its copy failed."""

    def join(self, event: Any) -> None:
        """The calling thread waits for the event."""

    def synchronize(self) -> None:
        """It waits for all copies and all compute; what failed is not raised."""


def move(target: Tensor, source: Tensor) -> None:
    """Copies one tensor of the host to another."""
    target.copy_(source)


class _Copied:
    """The event of copies on the host: the error of the last one, or None."""

    error: Exception | None = None


class HostEngines:
    """Copy engines for tensors in host memory: a copy is done when it is issued, and fails when it is waited for."""

    streams = ()
    event = _Copied

    def pinned(self, nbytes: int) -> Bytes:
        return _take(HOST, nbytes)

    def borrow(self, tensor: Tensor) -> None: ...

    def begin(self) -> bool:
        return False  # the calling thread computes

    def copy_out(self, host: Tensor, device: Tensor, event: _Copied) -> None:
        self.copy_in(host, device, event)

    def copy_in(self, device: Tensor, host: Tensor, event: _Copied) -> None:
        try:
            move(device, host)
            event.error = None
        except Exception as error:
            event.error = error.with_traceback(None)  # whose frames hold the tensors

    def wait(self, event: _Copied) -> None:
        if event.error:
            raise TransferError(line(event.error)) from event.error

    def join(self, event: _Copied) -> None: ...

    def synchronize(self) -> None: ...


@cache
def capture_stream(index: int) -> torch.cuda.Stream:
    """One for each device: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(index)


_PAIRS: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # by device


def copy_streams(index: int, compute: torch.cuda.Stream) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """A device's streams for copies, one each way, for all steps; neither is the other, ``compute``, or what graphs are
    captured on. (PyTorch has 32 streams a device and hands them out in turn: c10/cuda/CUDAStream.cpp.)"""
    others = {compute.cuda_stream, capture_stream(index).cuda_stream}
    pair = _PAIRS.get(index)
    if pair is None or any(stream.cuda_stream in others for stream in pair):
        found: dict[int, torch.cuda.Stream] = {}
        while len(found) < 2:
            stream = torch.cuda.Stream(index)
            if stream.cuda_stream not in others:
                found[stream.cuda_stream] = stream
        d2h, h2d = found.values()
        pair = _PAIRS[index] = d2h, h2d
    return pair


class CudaEngines:
    """For tensors on a GPU: a stream each way (``copy_streams``)."""

    def __init__(self, device: torch.device):
        self.device, self._index = device, cuda_index(device)
        self.d2h, self.h2d = self.streams = copy_streams(self._index, torch.cuda.current_stream(device))
        self._computed = torch.cuda.Event()
        self._compute: torch.cuda.Stream | None = None

    def pinned(self, nbytes: int) -> Bytes:
        return _take(CUDA, nbytes)

    def borrow(self, tensor: Tensor) -> None:
        if not on_host(tensor):
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def begin(self) -> bool:
        before = self._compute
        self._compute, outside = torch.cuda.current_stream(self.device), torch.cuda.current_stream()
        self.d2h, self.h2d = self.streams = copy_streams(self._index, self._compute)
        # To make a stream the current one makes its device the current one, too: the caller's is put back after it.
        self._back = (self._compute,) if outside.device == self._compute.device else (self._compute, outside)
        return before is not None and before != self._compute

    def copy_out(self, host: Tensor, device: Tensor, event: torch.cuda.Event) -> None:
        self._copy(self.d2h, host, device, event)

    def copy_in(self, device: Tensor, host: Tensor, event: torch.cuda.Event) -> None:
        self._copy(self.h2d, device, host, event)

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, event: torch.cuda.Event) -> None:
        if on_host(target) and on_host(source):  # an optimizer's number, attention's seed
            for other in self.streams:  # which may still copy to or from its place in pinned memory
                other.synchronize()
            target.copy_(source)
            return
        self._computed.record(self._compute)  # a wait is for the last record before it, so one event does for all
        stream.wait_event(self._computed)
        try:
            torch.cuda.set_stream(stream)
            target.copy_(source, non_blocking=True)
            event.record(stream)
        except RuntimeError as error:
            raise TransferError(line(error)) from error
        finally:
            for previous in self._back:
                torch.cuda.set_stream(previous)

    def wait(self, event: torch.cuda.Event) -> None:
        self._compute.wait_event(event)

    def join(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        with contextlib.suppress(RuntimeError):  # the caller already has an error to report
            torch.cuda.synchronize(self.device)


def on_host(tensor: Tensor) -> bool:
    """Is it not in a device's memory?"""
    return tensor.device.type == "cpu"


def _take(slabs: Slabs, nbytes: int) -> Bytes:
    try:
        return slabs.take(nbytes)
    except MemoryError as error:
        raise TransferError(str(error)) from None


def engines_for(device: torch.device) -> Engines:
    """The copy engines for tensors on a device.

    Raises:
        TransferError: there are none for this kind of device.
    """
    if device.type == "cuda":
        return CudaEngines(device)
    if device.type == "cpu":
        return HostEngines()
    raise TransferError(f"there are no copy engines for {device.type} tensors; there are for cpu and cuda")


def line(error: BaseException) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
