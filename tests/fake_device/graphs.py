"""Adds CUDA graphs to the double of torch.cuda, for the real ``torch.cuda.graph``, ``GraphMemory`` and ``Arena``.

A capture runs nothing; a replay performs the captured work at the captured addresses. tests/README.md has details.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
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

from executor.memory import addresses, engines, graph_memory
from executor.memory.addresses import functions
from executor.training import graph
from tests.fake_device.cuda import UNWRITTEN, CudaDouble, Event, Stream, is_real
from tests.fake_device.memory import BASE, SEGMENT, Block
from tests.fake_device.order import HOST, Clocks

ADDRESSES = itertools.count(2 * BASE + (1 << 40), 1 << 40)  # of arenas; unique, as the native allocator knows them all


@dataclasses.dataclass(frozen=True)  # a dataclass is a leaf of a pytree
class Ref:
    """Reference to a tensor by its address."""

    at: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Graph:
    """Double of torch.cuda.CUDAGraph."""

    def __init__(self, double: GraphDouble, keep_graph: bool = False) -> None:
        self.double = double
        self.keeps_graph = keep_graph
        self.log = list[tuple[Any, ...]]()
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.ended = self.broken = False
        self.fake: FakeTensorMode | None = FakeTensorMode()

    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def capture_begin(self, pool: Any = (1, 0), **_: Any) -> None:
        double = self.double
        self.pool = pool
        self.stream = double.current_stream()
        self.forked = {self.stream}
        double.capture = self
        double.begin(pool)

    def capture_end(self) -> None:
        """Ends the capture; after an invalidated one, allocation to the pool continues (aten's CUDAGraph.cpp)."""
        double = self.double
        assert double.current_stream() is self.stream
        # the fake mode references tensors
        double.capture = None
        self.fake = None
        clocks = double.clocks.clocks
        clock = double.clocks.of(self.stream.name)
        joined = all(clock.get(s.name, 0) >= clocks[s.name].get(s.name, 0) for s in self.forked)
        Clocks.join(clocks[HOST], clock)  # none of the captured work has run
        for stream in self.forked:
            Clocks.join(clocks[HOST], clocks[stream.name])
        if self.broken or not joined:
            raise RuntimeError("CUDA error: " + ("the capture was invalidated" if joined else "unjoined work"))
        double.end(0, self.pool)
        self.ended = True

    def raw_cuda_graph(self) -> int:
        assert self.ended and self.keeps_graph
        return id(self)

    def instantiate(self) -> None:
        assert self.ended and self.keeps_graph
        self.keeps_graph = False
        self.double.free_bytes -= self.double.executable_bytes

    def raw_cuda_graph_exec(self) -> int:
        assert not self.keeps_graph
        return id(self)

    def reset(self) -> None:
        if self.ended:
            self.double.free_bytes += self.double.executable_bytes * (not self.keeps_graph)
            self.ended = False
            self.double.release(0, self.pool)

    def replay(self) -> None:
        double = self.double
        stream = self.double.current_stream()
        assert not self.keeps_graph
        double.use(stream, "a replay", self.reads, self.writes)
        stream.run(stream.issued)
        stream.lags = False
        self.double.show(into_arenas=True)
        with _disable_current_modes():  # the capture has checked all operators
            for func, grad, args, kwargs, outs in self.log:
                with torch.set_grad_enabled(grad):
                    results = func(*tree_map(double.tensor, args), **tree_map(double.tensor, kwargs))
                for ref, out in zip(outs, tree_leaves(results), strict=False):
                    if ref is not None:
                        double.tensor(ref).copy_(out)
            double.show()


class Allocator:
    """Double of torch._C._cuda_customAllocator, which tracks its allocations and aborts on a double use."""

    def __init__(self, double: GraphDouble) -> None:
        self.double = double
        self.handed = set[int]()

    def allocate(self, nbytes: int) -> int:
        if not (address := int(functions()[0].ctypes(nbytes, 0, 0))):
            return 0
        if address in self.handed:
            self.double.found.append(f"one allocator object hands out {address:#x} twice: PyTorch aborts the process")
        self.handed.add(address)
        return address

    def free(self, address: int) -> None:
        self.handed.remove(address)
        functions()[1].ctypes(address, 0, 0, 0)


class Pool:
    """Double of torch.cuda.MemPool."""

    def __init__(self, double: GraphDouble, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False):
        self.double = double
        self.id = (0, 7 + double.pool_count)
        self.allocator = allocator
        double.pool_count += 1
        double.uses[self.id] = 1
        double.allocators[self.id] = allocator
        assert no_split or allocator is None

    def __del__(self) -> None:
        if self.double.capture:
            self.double.found.append("a pool is released during a capture: PyTorch aborts the process")
        self.double.release(0, self.id)


class Driver:
    """Double of libcuda.so.1; a thread has a context after a call of the runtime (here: torch.cuda.synchronize)."""

    def __init__(self, double: GraphDouble) -> None:
        self.double = double
        self.mapped = set[int]()

    def _address(self, pointer: Any) -> int:
        if not self.double.context:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        pointer._obj.value = next(ADDRESSES)
        return 0

    def cuMemAlloc_v2(self, pointer: Any, nbytes: Any) -> int:
        if status := self._address(pointer):
            return status
        self.double.arenas[pointer._obj.value] = torch.full((nbytes.value,), 0xFF, dtype=torch.uint8)
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        memory = self.double.arenas.pop(address.value)
        self.double.use(None, "cuMemFree", (), ((address.value, address.value + memory.nbytes),))
        return 0

    def cuMemCreate(self, handle: Any, nbytes: Any, properties: Any, flags: Any) -> int:
        kind, handles, place, index, *reserved = (ctypes.c_int32 * 8).from_address(properties.value)
        assert (kind, handles, place, index, reserved) == (1, 0, 1, 0, [0] * 4) and nbytes.value % SEGMENT == 0
        return self._address(handle)

    def cuMemAddressReserve(self, pointer: Any, nbytes: Any, *_: Any) -> int:
        if not (status := self._address(pointer)):
            self.double.aliased[pointer._obj.value] = nbytes.value
        return status

    def cuMemMap(self, address: Any, nbytes: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert address.value not in self.mapped and offset.value == 0
        self.mapped.add(address.value)
        return 0

    def cuMemSetAccess(self, address: Any, nbytes: Any, access: Any, count: Any) -> int:
        assert list((ctypes.c_int32 * 3).from_address(access.value)) == [1, 0, 3] and count.value == 1
        chunk = nbytes.value // len(self.mapped)
        assert self.mapped == set(range(address.value, address.value + nbytes.value, chunk))
        return 0

    def cuMemUnmap(self, address: Any, nbytes: Any) -> int:
        self.mapped.remove(address.value)
        return 0

    def cuMemAddressFree(self, address: Any, nbytes: Any) -> int:
        assert not self.mapped
        assert self.double.aliased.pop(address.value) == nbytes.value
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        return 0

    def cuGraphUpload(self, graph: Any, stream: Any) -> int:
        assert graph.value == id(self.double.graphs[-1]) and stream.value
        return 0


class GraphDouble(CudaDouble):
    """Double of torch.cuda that supports capture.

    Attributes:
        capture: the current capture, or None.
        routes: pools to which the allocator directs allocations.
        nested: pools of use_mem_pool, innermost last.
        nests: whether these take precedence over the capture's pool.
        uses: number of users of each pool.
        allocators: allocator of each pool.
        arenas: memory allocated from the driver.
        aliased: address ranges that share physical memory.
        max_entries: entries that the allocation history keeps.
        executable_bytes: bytes of device memory that an instantiated graph takes.
        free_bytes: free device memory, of which only executable graphs take any.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(seed)
        self.capture: Graph | None = None
        self.routes: list[Any] = []
        self.nested: list[Any] = []
        self.nests = True
        self.uses: dict[Any, int] = {}
        self.allocators: dict[Any, Any] = {}
        self.graphs: list[Graph] = []
        self.arenas: dict[int, Tensor] = {}
        self.aliased: dict[int, int] = {}
        self.pool_count = 0
        self.context = False
        self.history = False
        self.max_entries = 1 << 30
        self.executable_bytes = 0
        self.free_bytes = 1 << 40

    def install(self, monkeypatch: Any) -> None:
        super().install(monkeypatch)
        monkeypatch.setattr(torch.cuda.graphs.graph, "default_capture_stream", None)
        for name, value in {
            "CUDAGraph": self.new_graph,
            "MemPool": functools.partial(Pool, self),
            "use_mem_pool": self.use_mem_pool,
            "empty_cache": self.empty_cache,
            "memory_snapshot": self.memory_snapshot,
            "mem_get_info": lambda device: (self.free_bytes, 1 << 40),
            "is_current_stream_capturing": lambda: self.is_captured(self.current_stream()),
            "_lazy_init": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name, does in {
            "_cuda_endAllocateToPool": self.end,
            "_cuda_releasePool": self.release,
            "_host_emptyCache": lambda: None,
            "_cuda_customAllocator": lambda allocate, free: Allocator(self),
            "_cuda_isHistoryEnabled": lambda: self.history,
        }.items():
            monkeypatch.setattr(torch._C, name, does, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record_history)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(graph_memory, "own_stream", engines.own_stream)
        monkeypatch.setattr(graph_memory, "libraries_bytes", graph_memory.libraries_bytes.__wrapped__)
        monkeypatch.setattr(graph, "libraries_bytes", graph_memory.libraries_bytes)
        monkeypatch.setattr(graph_memory, "_workspace_pool", functools.cache(graph_memory._workspace_pool.__wrapped__))
        monkeypatch.setattr(graph, "replace_memsets", lambda device, handle: 0)
        monkeypatch.setattr(graph, "address_of", lambda block: self.memory.blocks[block.storage._cdata].at)
        monkeypatch.setattr(graph, "device_of", lambda captured: self.gpu)
        monkeypatch.setattr(graph, "on_device", lambda captured, device: True)  # tensors are on the CPU
        monkeypatch.setattr(addresses, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: Driver(self)}))

    def synchronize(self, device: Any = None) -> None:
        if not self.left_out():  # inspects the caller of this method
            self.context = True
            self.wait_for_all()

    def new_graph(self, keep_graph: bool = False) -> Graph:
        self.graphs.append(Graph(self, keep_graph))
        return self.graphs[-1]

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
        """Frees unused segments of pools without an owner."""
        for (pool, _), spans in self.memory.free.items():
            for free in spans[:] if not self.uses[pool[0]] else ():
                del self.memory.segments[pool, free.begin]
                spans.remove(free)
                if allocator := self.allocators[pool[0]]:
                    allocator.free(free.begin)

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Pool, device: Any = None) -> Iterator[None]:
        self.begin(pool.id)
        self.nested.append(pool.id)
        try:
            yield
        finally:
            self.nested.pop()
            self.end(0, pool.id)
            self.release(0, pool.id)

    def is_captured(self, stream: Stream) -> bool:
        return self.capture is not None and stream in self.capture.forked

    def pool_of(self, stream: Stream) -> Any:
        """Returns the pool for an allocation: use_mem_pool's before the capture's (pytorch/pytorch#168382)."""
        if self.nested and (self.nests or not (self.capture and self.is_captured(stream))):
            return self.nested[-1], stream
        return (self.capture.pool, stream) if self.capture and self.is_captured(stream) else stream

    def segment(self, pool: Any, nbytes: int) -> int:
        if (allocator := self.allocators[pool[0]]) is None:
            return next(ADDRESSES)
        if not (address := allocator.allocate(nbytes)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return int(address)

    def record_history(self, enabled: str | None = "all", context: str | None = "all", stacks: str = "all") -> None:
        self.history = enabled is not None
        self.memory.trace.clear()

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return [
            {"segment_pool_id": block.pool[0], "allocated_size": self.memory.segments[block.pool, block.at]}
            for block in self.memory.live.values()
            if isinstance(block.pool, tuple)
        ]

    def snapshot(self) -> dict[str, Any]:
        assert self.history
        trace = enumerate(self.memory.trace)
        entries = [{"action": a, "addr": address, "size": nbytes, "time_us": i} for i, (a, address, nbytes) in trace]
        return {"device_traces": [entries[-self.max_entries :]]}

    # ------------------------------------------------------------------------------------------ capture

    def captured(self, stream: Stream, event: Event, waits: bool = False) -> bool:
        """Returns True if a wait, or the recording of an event, is part of the capture."""
        if not waits:
            event.capture = self.capture if self.is_captured(stream) else None
        elif self.capture and getattr(event, "capture", None) is self.capture:
            self.capture.forked.add(stream)
        elif self.is_captured(stream):
            self._refuse("dependency created on uncaptured work in another stream")
        return self.is_captured(stream)

    def _refuse(self, reason: str) -> None:
        assert self.capture
        self.capture.broken = True
        raise RuntimeError(f"CUDA error: {reason}")

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
        """Runs an operator; in a capture, records it and creates outputs without content."""
        if self.capture is None:
            return func(*args, **kwargs)
        assert not any(self.memory.of(t).stream is None for t in tree_leaves((args, kwargs)) if is_real(t))
        fake = self.capture.fake
        real: dict[int, Tensor] = {}

        def pretend(value: Any) -> Any:
            if not is_real(value):
                return value
            results = fake.from_tensor(value)
            real[id(results)] = value
            return results

        with fake:
            results = func(*tree_map(pretend, args), **tree_map(pretend, kwargs))
        flat, spec = tree_flatten(results)
        if not any(isinstance(x, Tensor) for x in flat) and func._schema.returns:
            self._refuse("operation not permitted when stream is capturing")
        outs = [
            x
            if not isinstance(x, Tensor)
            else real[id(x)]
            if id(x) in real
            else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
            for x in flat
        ]
        if func._overloadpacket in UNWRITTEN:  # no kernel
            return tree_unflatten(outs, spec)
        new = [x if isinstance(x, Tensor) and id(y) not in real else None for x, y in zip(outs, flat, strict=True)]
        refs = [None if x is None else self.ref(x) for x in new]
        named = tree_map(self.ref, args), tree_map(self.ref, kwargs)
        self.capture.log.append((func, torch.is_grad_enabled(), *named, refs))
        return tree_unflatten(outs, spec)

    def use(self, stream: Stream | None, name: str, reads: Any, writes: Any, after: Any = None) -> None:
        reads = tuple(reads)
        writes = tuple(writes)
        if self.capture and "freed memory" not in name:
            self.capture.reads += reads
            self.capture.writes += writes
        super().use(stream, name, reads, writes, after)

    def transfer(self, stream: Stream, spans: Any) -> None:
        if self.capture is None:
            stream.put(functools.partial(self.memory.move, *spans))
            return
        target, source = (Ref(a, (b - a,), (1,), torch.uint8) for a, b in spans)
        self.capture.log.append((Tensor.copy_, False, (target, source), {}, []))

    # ------------------------------------------------------------------------------------------ replays

    def ref(self, value: Any) -> Any:
        if not is_real(value):
            return value
        return Ref(self.memory.span(value)[0], tuple(value.size()), tuple(value.stride()), value.dtype)

    def tensor(self, value: Any) -> Any:
        """Returns the tensor currently at an address."""
        if not isinstance(value, Ref):
            return value
        result = torch.empty(0, dtype=value.dtype)
        itemsize = value.dtype.itemsize
        if 0 in value.size:
            return torch.empty_strided(value.size, value.stride, dtype=value.dtype)
        for base, memory in self.arenas.items():
            if base <= value.at < base + memory.nbytes:
                return result.set_(memory.untyped_storage(), (value.at - base) // itemsize, value.size, value.stride)
        if value.at < BASE:
            last = sum((n - 1) * stride for n, stride in zip(value.size, value.stride, strict=True))
            memory = (ctypes.c_ubyte * ((last + 1) * itemsize)).from_address(value.at)
            return torch.frombuffer(memory, dtype=value.dtype).as_strided(value.size, value.stride)
        block = self.memory.live[self.memory.order[bisect_right(self.memory.order, value.at) - 1]]
        storage = block.storage()
        assert storage is not None and value.at < block.at + block.nbytes, "a replay uses freed memory"
        return result.set_(storage, (value.at - block.at) // itemsize, value.size, value.stride)

    def show(self, into_arenas: bool = False) -> None:
        """Copies the content of the arenas to the tensors in them, or with ``into_arenas`` the other way round."""
        for block in self.memory.live.values():
            self.exchange(block, into_arenas)

    def exchange(self, block: Block, into_arena: bool) -> None:
        storage = block.storage()
        if storage is not None and any(base <= block.at < base + memory.nbytes for base, memory in self.arenas.items()):
            with _disable_current_modes():
                content = self.tensor(Ref(block.at, (block.nbytes,), (1,), torch.uint8))
            ends = storage.data_ptr(), content.data_ptr()
            ctypes.memmove(*(reversed(ends) if into_arena else ends), block.nbytes)
