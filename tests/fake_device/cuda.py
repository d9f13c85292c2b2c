"""Test double of ``torch.cuda``: runs the real ``CudaEngines`` and steps on CPU tensors and checks all ordering.

    double = GraphDouble(seed)          # None: copies run as late as possible; else at random moments
    double.install(monkeypatch)         # replaces torch.cuda; steps of CPU tensors become steps on cuda:0
    with double: ...                    # intercepts every operator
    double.check()

tests/README.md lists the modeled behavior of CUDA and PyTorch and its limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.capture.operators import arguments, running_statistics
from executor.memory import engines, pinned
from executor.training import planned_step, work
from tests.fake_device.memory import POISON, Memory
from tests.fake_device.order import HOST, Clock, Clocks, Queue, Span, by_chance

aten = torch.ops.aten
STREAMS = 32  # streams per device, assigned round-robin (c10/cuda/CUDAStream.h)
RESHAPES = {
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.detach_.default,
    aten.resize_.default,
    aten.is_same_size.default,
    aten.is_set_to.default,
}


class Event:
    """Double of torch.cuda.Event."""

    def __init__(self, double: CudaDouble) -> None:
        self.double = double
        self.clock = Clock()
        self.position = 0
        self.stream: Stream | None = None  # None: never recorded, so waits return at once

    def record(self, stream: Stream | None = None) -> None:
        if self.double.left_out():
            return
        self.stream = stream or self.double.current_stream()
        self.double.captured(self.stream, self)
        self.clock = dict(self.double.clocks.of(self.stream.name))
        self.position = self.stream.issued

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.position

    def wait(self, stream: Stream | None = None) -> None:
        if not self.double.left_out():
            (stream or self.double.current_stream())._wait(self)

    def synchronize(self) -> None:
        if not self.double.left_out() and self.stream is not None:
            self.double.host_waits(self.stream, self.position, self.clock)


class Stream(Queue):
    """Double of torch.cuda.Stream; its work consists of copies and waits for events."""

    def __init__(self, double: CudaDouble, device: torch.device, handle: int) -> None:
        super().__init__(f"stream {handle} of {device}")
        self.double = double
        self.device = device
        self.cuda_stream = handle
        self.lags = handle > 0  # until a kernel runs on this stream

    def put(self, work: Callable[[], object]) -> None:
        super().put(work)
        if not self.lags:
            self.run(self.issued)

    def _wait(self, event: Event) -> None:
        if event.stream is None:
            return
        captured = self.double.captured(self, event, waits=True)
        Clocks.join(self.double.clocks.of(self.name), event.clock)
        if not captured:
            self.put(partial(event.stream.run, event.position))

    def wait_event(self, event: Event) -> None:
        if not self.double.left_out():
            self._wait(event)

    def wait_stream(self, stream: Stream) -> None:
        if not self.double.left_out():
            self._wait(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.double)
        event.record(self)
        return event

    def query(self) -> bool:
        return self.done == self.issued

    def synchronize(self) -> None:
        if not self.double.left_out():
            self.double.host_waits(self, self.issued, self.double.clocks.of(self.name))


class Current:
    """Double of torch.cuda.StreamContext.

    It is no generator: one left open, as when capture_end raises, would be closed by the garbage collector.
    """

    def __init__(self, double: CudaDouble, stream: Stream) -> None:
        self.double = double
        self.stream = stream

    def __enter__(self) -> None:
        self.previous = self.double.current_stream()
        self.double.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        self.double.set_stream(self.previous)


class Runtime:
    """Double of torch.cuda.cudart(), for pinned memory."""

    def __init__(self, double: CudaDouble) -> None:
        self.double = double
        self.pinned = double.memory.pinned

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert not any(a < address + nbytes and address < a + n for a, n in self.pinned.items())
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.double.use(None, "unpinning", (), ((address, address + self.pinned.pop(address)),))
        return 0


class CudaDouble(TorchDispatchMode):
    """Double of one GPU without graphs and memory pools, which GraphDouble (graphs.py) adds.

    Attributes:
        found: descriptions of detected errors.
        omitted: (file, first line, last line) of calls of wait_event, wait_stream, record_stream and synchronize to
            skip.
        called: file and line of those calls that were made.
        fails: predicate of a copy (target, source): whether it fails when issued.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.random = random.Random(seed) if seed is not None else None
        self.clocks, self.memory, self.found = Clocks(), Memory(self), list[str]()
        self.omitted: tuple[str, int, int] | None = None
        self.called: set[tuple[str, int]] = set()
        self.fails: Callable[[Tensor, Tensor], bool] = lambda target, source: False
        self.gpu = torch.device("cuda", 0)
        self.pools: dict[int, list[Stream]] = {}  # priority -> streams, next one first
        self.current = Stream(self, self.gpu, 0)
        self.everything = [self.current]

    # ---------------------------------------------------------------------------------------- torch.cuda

    def install(self, monkeypatch: Any) -> None:
        """Replaces torch.cuda and treats steps of CPU tensors as steps on the first device."""
        names = ("current_stream", "set_stream", "synchronize", "stream", "device")
        for name in (*names, "memory_stats", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(self))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *device: torch.empty(0))  # the host draws
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *state: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.memory.bytes)
        monkeypatch.setattr(
            torch.UntypedStorage, "resize_", lambda storage, nbytes: self.memory.resize(storage, nbytes)
        )
        monkeypatch.setattr(
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: None if self.left_out() else self.record_stream(tensor, stream),
        )
        monkeypatch.setattr(engines, "on_host", lambda tensor: False)
        monkeypatch.setattr(engines, "Driver", lambda device: self.driver)
        monkeypatch.setattr(engines, "own_stream", cache(engines.own_stream.__wrapped__))
        monkeypatch.setattr(torch.cuda, "ExternalStream", self.external_stream)
        slabs = pinned.Slabs(pinned._register, pinned._unregister, lambda: self.left_out() or pinned._synchronize())
        monkeypatch.setattr(engines, "CUDA", slabs)
        states = work.Random
        monkeypatch.setattr(work, "device_of", lambda captured: self.gpu)
        monkeypatch.setattr(planned_step, "not_by_default", lambda captured, undo: "a double")
        monkeypatch.setattr(work, "Random", lambda captured, device: states(captured, torch.device("cpu")))

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        if priority not in self.pools:
            first = 100 * (1 + len(self.pools))
            self.pools[priority] = [Stream(self, self.gpu, first + i) for i in range(STREAMS)]
            self.everything += self.pools[priority]
        pool = self.pools[priority]
        pool.append(pool.pop(0))
        return pool[-1]

    def driver(self, function: str, handle: Any, flags: Any) -> None:
        assert function == "cuStreamCreate" and flags.value == 1  # not ordered with the default stream
        handle._obj.value = 10_000 + len(self.everything)

    def external_stream(self, handle: int, device: int) -> Stream:
        self.everything.append(Stream(self, self.gpu, handle))
        return self.everything[-1]

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def stream(self, stream: Stream) -> Current:
        return Current(self, stream)

    def device(self, device: Any) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def wait_for_all(self) -> None:
        for stream in self.everything:
            if stream.name in self.clocks.clocks:
                self.host_waits(stream, stream.issued, self.clocks.of(stream.name))

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        block = self.memory.of(tensor)
        if block.stream is not stream:
            block.users.add(stream)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        now = self.memory.bytes
        peak = self.memory.recent_peak
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak, "num_alloc_retries": 0}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.memory.recent_peak = self.memory.bytes

    # ---------------------------------------------------------------------------------------- order

    def left_out(self) -> bool:
        """Returns True if the call two frames up is to be skipped."""
        caller = sys._getframe(2)
        site = caller.f_code.co_filename, caller.f_lineno
        self.called.add(site)
        return self.omitted is not None and self.omitted[0] == site[0] and self.omitted[1] <= site[1] <= self.omitted[2]

    def use(
        self,
        stream: Stream | None,
        name: str,
        reads: Iterable[Span],
        writes: Iterable[Span],
        after: Clock | None = None,
    ) -> None:
        if wrong := self.clocks.use(stream.name if stream else HOST, name, reads, writes, after or {}):
            self.found.append(wrong)

    def host_waits(self, stream: Stream, upto: int, clock: Clock) -> None:
        stream.run(upto)
        Clocks.join(self.clocks.clocks[HOST], clock)

    def check(self) -> None:
        assert not self.found, self.found[0]

    # ---------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_chance(self.random, self.everything)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source, *args[2:], **kwargs)
            return None
        if func.is_view or func in RESHAPES:
            return func(*args, **kwargs)
        return self._kernel(func, args, kwargs)

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        stream = self.current_stream()
        name = str(func)
        statistics = running_statistics(func, args, kwargs)
        device: tuple[list[Tensor], list[Tensor]] = [], []
        host: tuple[list[Tensor], list[Tensor]] = [], []
        for argument, value in arguments(func, args, kwargs):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if is_real(tensor) and tensor.numel():
                    space = host if self.memory.of(tensor).stream is None else device
                    if written or not MAKES.search(name):  # other operators read only the form
                        space[written or any(tensor is s for s in statistics)].append(tensor)
        if any(host):  # a host computation, which must wait for its device inputs
            self.use(None, name, *([self.memory.span(t) for t in ts] for ts in host))
            stream.run(stream.issued)
            Clocks.join(self.clocks.clocks[HOST], self.clocks.of(stream.name))
        stream.lags = False
        stream.run(stream.issued)
        out = self.do(func, args, kwargs, *device)
        results = [t for t in tree_leaves(out) if is_real(t)]
        spans = [[self.memory.span(t) for t in ts] for ts in device]
        fresh = [t for t in results if t.untyped_storage()._cdata not in self.memory.blocks]
        for tensor in fresh:
            self.memory.of(tensor)
        if func._overloadpacket in UNWRITTEN:
            for tensor in () if self.capture else fresh:
                storage = tensor.untyped_storage()
                ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())
            fresh = []
        self.use(
            None if any(host) else stream, name, spans[0], spans[1] + [self.memory.span(t) for t in fresh if t.numel()]
        )
        if not results and any(device) and func._schema.returns:  # a number read by the host
            self.host_waits(stream, stream.issued, self.clocks.of(stream.name))
        return out

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not (is_real(target) and is_real(source)) or not target.numel():
            return aten.copy_.default(target, source, non_blocking)
        ends = self.memory.of(target), self.memory.of(source)
        if (ends[0].stream is None) is (ends[1].stream is None):
            return self._kernel(aten.copy_.default, (target, source, non_blocking), {})
        if self.fails(target, source):
            raise RuntimeError("CUDA error: no link")
        stream = self.current_stream()
        spans = (self.memory.span(target), self.memory.span(source))
        self.use(stream, f"a copy on {stream.name}", spans[1:], spans[:1])
        if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype:
            self.transfer(stream, spans)
        else:
            stream.run(stream.issued)
            aten.copy_.default(target, source)
        if not non_blocking:
            self.host_waits(stream, stream.issued, self.clocks.of(stream.name))
        return target


MAKES = re.compile(r"aten\.(new_|\w+_like\.)")
UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


def is_real(value: Any) -> bool:
    """Returns True for a tensor that stands for device memory or is in pinned memory."""
    return isinstance(value, Tensor) and value.device.type == "cpu" and not isinstance(value, FakeTensor)
