"""Graphs on the double of torch.cuda: the real ``torch.cuda.graph``, ``GraphPool`` and ``Segments``; captures that run
nothing, and replays that do what was issued at the addresses at which it was. Details: tests/README.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from executor.memory import engines, graph_pool, segments
from executor.memory.segments import functions
from executor.training import graph
from tests.executor.cuda_double import CudaDouble, Event, Stream, is_real
from tests.executor.cuda_memory import BASE, HOST, Clocks

ADDRESSES = itertools.count(2 * BASE + (1 << 40), 1 << 40)  # of arenas; the allocator of segments knows all of them


@dataclasses.dataclass(frozen=True)  # and so a leaf of a pytree
class Ref:
    """A tensor by its address."""

    at: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, double: GraphDouble) -> None:
        self.double, self.log = double, list[tuple[Any, ...]]()
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.ended = self.broken = False
        self.fake: FakeTensorMode | None = FakeTensorMode()

    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def capture_begin(self, pool: Any = (1, 0), **_: Any) -> None:
        double = self.double
        self.pool, self.stream = pool, double.current_stream()
        self.forked = {self.stream}
        double.capture = self
        double.begin(pool)

    def capture_end(self) -> None:
        """aten/src/ATen/cuda/CUDAGraph.cpp: where the capture was invalidated, the allocation to the pool goes on."""
        double = self.double
        assert double.current_stream() is self.stream
        double.capture, self.fake = None, None  # which knows tensors
        clocks, own = double.clocks.clocks, double.clocks.of(self.stream.name)
        joined = all(own.get(s.name, 0) >= clocks[s.name].get(s.name, 0) for s in self.forked)
        Clocks.join(clocks[HOST], own)  # none of it has been done
        for stream in self.forked:
            Clocks.join(clocks[HOST], clocks[stream.name])
        if self.broken or not joined:
            raise RuntimeError("CUDA error: " + ("the capture was invalidated" if joined else "unjoined work"))
        double.end(0, self.pool)
        self.ended = True

    def reset(self) -> None:
        if self.ended:
            self.ended = False
            self.double.release(0, self.pool)

    def replay(self) -> None:
        double, stream = self.double, self.double.current_stream()
        double.use(stream, "a replay", self.reads, self.writes)
        stream.run(stream.issued)
        stream.lags = False
        with _disable_current_modes():  # all of it has been seen
            for func, grad, args, kwargs, outs in self.log:
                with torch.set_grad_enabled(grad):
                    made = func(*tree_map(double.tensor, args), **tree_map(double.tensor, kwargs))
                for ref, out in zip(outs, tree_leaves(made), strict=False):
                    if ref is not None:
                        double.tensor(ref).copy_(out)
            double.show()


class Pool:
    """torch.cuda.MemPool."""

    def __init__(self, double: GraphDouble) -> None:
        self.double, self.id = double, (0, 7 + double.made)
        double.made += 1
        double.uses[self.id] = 1

    def __del__(self) -> None:
        self.double.release(0, self.id)


class Driver:
    """libcuda.so.1. A thread has a context once it has called the runtime (here: torch.cuda.synchronize)."""

    def __init__(self, double: GraphDouble) -> None:
        self.double = double

    def cuMemAlloc_v2(self, found: Any, nbytes: Any) -> int:
        if not self.double.context:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        found._obj.value = next(ADDRESSES)
        self.double.arenas[found._obj.value] = torch.full((nbytes.value,), 0xFF, dtype=torch.uint8)
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        memory = self.double.arenas.pop(address.value)
        self.double.use(None, "cuMemFree", (), ((address.value, address.value + memory.nbytes),))
        return 0


class GraphDouble(CudaDouble):
    """A double that captures.

    Attributes:
        capture: that is under way; ``routes``: pools to which allocations go on, in the allocator's mind.
        uses: of each pool, by whom it is held; ``arenas``: what the driver has handed out.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.capture: Graph | None = None
        self.routes: list[Any] = []
        self.thread: Any = None  # of use_mem_pool
        self.uses: dict[Any, int] = {}
        self.arenas: dict[int, Tensor] = {}
        self.made, self.context = 0, False

    def install(self, monkeypatch: Any) -> None:
        super().install(monkeypatch)
        monkeypatch.setattr(torch.cuda.graphs.graph, "default_capture_stream", None)
        for name, value in {
            "CUDAGraph": lambda: Graph(self), "MemPool": lambda allocator: Pool(self),
            "use_mem_pool": self.use_mem_pool, "memory_snapshot": self.snapshot, "empty_cache": self.empty_cache,
            "is_current_stream_capturing": lambda: self.is_captured(self.current_stream()),
            "_lazy_init": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        for name, does in {
            "_cuda_endAllocateToPool": self.end, "_cuda_releasePool": self.release, "_host_emptyCache": lambda: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch._C, name, does, raising=False)
        monkeypatch.setattr(graph_pool, "allocator", lambda: None)
        monkeypatch.setattr(graph_pool, "capture_stream", engines.capture_stream)
        refused, cpu = graph.refused, torch.device("cpu")  # tensors are the CPU's
        monkeypatch.setattr(graph, "refused", lambda step: refused(dataclasses.replace(step, device=cpu)))
        monkeypatch.setattr(segments, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: Driver(self)}))

    def synchronize(self, device: Any = None) -> None:
        if not self.left_out():  # which asks who called this method
            self.context = True
            self.wait_for_all()

    # ------------------------------------------------------------------------------------------ the pool

    def begin(self, pool: Any) -> None:
        self.routes.append(pool)
        self.uses[pool] = self.uses.get(pool, 0) + 1

    def end(self, device: int, pool: Any) -> None:
        if pool not in self.routes:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.routes.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.uses[pool] -= 1
        if not self.uses[pool]:
            self.empty_cache()

    def empty_cache(self) -> None:
        """What nobody has of pools without an owner goes back."""
        for (pool, _), spans in self.memory.free.items():
            for free in spans[:] if isinstance(pool, tuple) and not self.uses[pool[0]] else ():
                if self.memory.segments.get(free.begin) == free.end:
                    del self.memory.segments[free.begin]
                    spans.remove(free)
                    functions()[1].ctypes(free.begin, 0, 0, 0)

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Pool) -> Iterator[None]:
        self.begin(pool.id)
        self.thread = pool.id
        yield
        self.thread = None
        self.end(0, pool.id)
        self.release(0, pool.id)

    def is_captured(self, stream: Stream) -> bool:
        return self.capture is not None and stream in self.capture.forked

    def pool_of(self, stream: Stream) -> Any:
        pool = self.capture.pool if self.capture and self.is_captured(stream) else self.thread
        return stream if pool is None else (pool, stream)

    def segment(self, pool: Any, nbytes: int) -> int | None:
        if not isinstance(pool, tuple):
            return None
        if not (at := functions()[0].ctypes(nbytes, 0, 0)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return int(at)

    def snapshot(self, pool: Any) -> list[dict[str, int]]:
        held = [b.nbytes for b in self.memory.live.values() if b.at > 2 * BASE]
        return [{"allocated_size": nbytes} for nbytes in held]

    # ------------------------------------------------------------------------------------------ what is captured

    def captured(self, stream: Stream, event: Event, waits: bool = False) -> bool:
        """Whether a wait, or the record of an event, is part of the capture."""
        if not waits:
            event.capture = self.capture if self.is_captured(stream) else None
        elif self.capture and getattr(event, "capture", None) is self.capture:
            self.capture.forked.add(stream)
        elif self.is_captured(stream):
            self._refuse("dependency created on uncaptured work in another stream")
        return self.is_captured(stream)

    def _refuse(self, why: str) -> None:
        assert self.capture
        self.capture.broken = True
        raise RuntimeError(f"CUDA error: {why}")

    def host_waits(self, stream: Stream, upto: int, clock: Any) -> None:
        if self.capture:
            self._refuse("operation not permitted when stream is capturing")
        super().host_waits(stream, upto, clock)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs["device"] = torch.device("cpu")
        if self.capture and not self.is_captured(self.current_stream()):
            self.found.append(f"{func} is not captured")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def do(self, func: Any, args: Any, kwargs: Any, reads: Any, writes: Any) -> Any:
        """In a capture nothing is done; what is made is there, and nothing is in it."""
        if self.capture is None:
            return super().do(func, args, kwargs, reads, writes)
        assert not any(self.memory.of(t).stream is None for t in tree_leaves((args, kwargs)) if is_real(t))
        fake = self.capture.fake
        real: dict[int, Tensor] = {}

        def pretend(value: Any) -> Any:
            if not is_real(value):
                return value
            made = fake.from_tensor(value)
            real[id(made)] = value
            return made

        with fake:
            made = func(*tree_map(pretend, args), **tree_map(pretend, kwargs))
        flat, spec = tree_flatten(made)
        if not any(isinstance(x, Tensor) for x in flat) and func._schema.returns:
            self._refuse("operation not permitted when stream is capturing")
        outs = [
            x if not isinstance(x, Tensor) else real[id(x)] if id(x) in real
            else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
            for x in flat
        ]  # fmt: skip
        new = [x if isinstance(x, Tensor) and id(y) not in real else None for x, y in zip(outs, flat, strict=True)]
        refs = [None if x is None else self.ref(x) for x in new]
        named = tree_map(self.ref, args), tree_map(self.ref, kwargs)
        self.capture.log.append((func, torch.is_grad_enabled(), *named, refs))
        return tree_unflatten(outs, spec)

    def use(self, stream: Stream | None, name: str, reads: Any, writes: Any, after: Any = None) -> None:
        reads, writes = tuple(reads), tuple(writes)
        if self.capture and "given back" not in name:
            self.capture.reads += reads
            self.capture.writes += writes
        super().use(stream, name, reads, writes, after)

    def transfer(self, stream: Stream, spans: Any) -> None:
        if self.capture is None:
            super().transfer(stream, spans)
            return
        target, source = (Ref(a, (b - a,), (1,), torch.uint8) for a, b in spans)
        self.capture.log.append((Tensor.copy_, False, (target, source), {}, []))

    # ------------------------------------------------------------------------------------------ replays

    def ref(self, value: Any) -> Any:
        if not is_real(value):
            return value
        return Ref(self.memory.span(value)[0], tuple(value.size()), tuple(value.stride()), value.dtype)

    def tensor(self, value: Any) -> Any:
        """What is at an address now."""
        if not isinstance(value, Ref):
            return value
        found, itemsize = torch.empty(0, dtype=value.dtype), value.dtype.itemsize
        for at, memory in self.arenas.items():
            if at <= value.at < at + memory.nbytes:
                return found.set_(memory.untyped_storage(), (value.at - at) // itemsize, value.size, value.stride)
        if value.at < BASE:
            last = sum((n - 1) * stride for n, stride in zip(value.size, value.stride, strict=True))
            memory = (ctypes.c_ubyte * ((last + 1) * itemsize)).from_address(value.at)
            return torch.frombuffer(memory, dtype=value.dtype).as_strided(value.size, value.stride)
        block = self.memory.live[self.memory.order[bisect_right(self.memory.order, value.at) - 1]]
        storage = block.storage()
        assert storage is not None and value.at < block.at + block.nbytes, "a replay uses memory that has gone"
        return found.set_(storage, (value.at - block.at) // itemsize, value.size, value.stride)

    def show(self) -> None:
        """What is in the arenas is in the tensors that are there."""
        for block in self.memory.live.values():
            if block.at > 2 * BASE and (storage := block.storage()) is not None:
                content = self.tensor(Ref(block.at, (block.nbytes,), (1,), torch.uint8))
                ctypes.memmove(storage.data_ptr(), content.data_ptr(), block.nbytes)
