"""Test double of CuPy for the real ``CupyBackend``: runs its kernels, compiled by g++, in host memory.

    with opened(machine, seed) as (backend, device): ...

Enqueued work runs when something waits for it, or at random moments (``seed``), in stream order and after its events. A
graph records the calls of its capture and repeats them at launch. Time is simulated: each stream has a clock, copies
take the machine's time, kernels the time that their ``now()`` returns. ``device.found`` lists unordered uses of the
same memory on two streams, detected by the vector clocks of order.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from executor.memory.pinned import Slabs
from simulator import Machine
from tests.fake_device.order import HOST, Clock, Clocks, Queue, by_chance

SHIM = r"""
#include <stddef.h>
#define __device__ static
#define __global__
struct dim3 { unsigned x; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;
static inline void atomicMax(unsigned long long* p, unsigned long long v) { if (v > *p) *p = v; }
static inline void atomicMin(unsigned long long* p, unsigned long long v) { if (v < *p) *p = v; }
static unsigned long long shim_ns;                        // a microsecond later at each look
static inline unsigned long long shim_now() { return shim_ns += 1000; }
"""
ASM = (  # GPU-only statements, each with its replacement
    (r'asm volatile\("mov\.u64 %0, %globaltimer;"[^;]*;', "ns = shim_now();"),
)
KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
WIDTHS = {"u32": np.uint32}  # other types have 8 bytes: u64, addresses


@cache
def compiled(source: str) -> tuple[ctypes.CDLL, dict[str, list[Any]]]:
    """Compiles the kernels to functions ``run_NAME(start_ns, blocks, threads, …)`` that return their end time.

    All threads run one after the other, each from ``start_ns``.

    Returns:
        The library, and the types of each kernel's own arguments.
    """
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    for pattern, replacement in ASM:
        source, times = re.subn(pattern, replacement, source)
        assert times == 1, pattern
    kernels = {}
    runs = ""
    for name, parameters in KERNEL.findall(source):
        parts = [" ".join(p.split()).rpartition(" ") for p in parameters.split(",")]
        kernels[name] = [WIDTHS.get(kind, np.uint64) for kind, _, _ in parts]
        runs += f"""
extern "C" u64 run_{name}(u64 start, u32 blocks, u32 threads, {parameters}) {{
    u64 over = start;
    gridDim.x = blocks, blockDim.x = threads;
    for (u32 b = 0; b < blocks; b++) for (u32 t = 0; t < threads; t++) {{
        shim_ns = start, blockIdx.x = b, threadIdx.x = t;
        {name}({", ".join(part[2] for part in parts)});
        if (shim_ns > over) over = shim_ns;
    }}
    return over;
}}
"""
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder, "kernels")
        stem.with_suffix(".cpp").write_text(SHIM + source + runs)
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        compilation = subprocess.run(["g++", *flags, "-o", f"{stem}.so", f"{stem}.cpp"], capture_output=True, text=True)
        assert not compilation.returncode, compilation.stderr
        library = ctypes.CDLL(f"{stem}.so")
    for name in kernels:
        getattr(library, f"run_{name}").restype = ctypes.c_uint64
    return library, kernels


class CUDARuntimeError(RuntimeError):
    """Double of cupy.cuda.runtime.CUDARuntimeError."""


class Stream(Queue):
    """Double of cupy.cuda.Stream, with a clock."""

    def __init__(self, device: Device) -> None:
        device.streams.append(self)
        self.device = device
        self.ptr = len(device.streams)
        self.ns = 0
        super().__init__(f"stream {self.ptr}")

    def enqueue(self, work: Callable[[int], int]) -> None:
        """Enqueues ``work``, a function from the earliest start time to the end time."""
        enqueued = self.device.host_ns  # earliest start

        def does() -> None:
            self.ns = work(max(self.ns, enqueued))

        self.put(does)
        by_chance(self.device.random, self.device.streams)

    def begin_capture(self) -> None:
        assert not self.device.graph, "one capture at a time"
        self.device.graph = Graph(self)

    def end_capture(self) -> Graph:
        graph = self.device.graph
        self.device.graph = None
        assert graph and graph.origin is self
        for stream, count in graph.counts.items():
            if stream is not self and graph.joined.get(stream) != count:
                raise CUDARuntimeError("cudaErrorStreamCaptureUnjoined")
        return graph

    def wait_event(self, event: Event) -> None:
        if graph := self.device.graph:
            if event not in graph.events:
                raise CUDARuntimeError("cudaErrorStreamCaptureIsolation")
            if self is graph.origin:
                graph.joined[event.stream] = graph.events[event]
            graph.counts.setdefault(self, 0)  # the stream joins the capture
            return graph.add(self, "wait", lambda: self.wait_event(event))
        Clocks.join(self.device.clocks.of(self.name), event.clock)
        self.enqueue(lambda ns: max(ns, event.happened()))

    def synchronize(self) -> None:
        if self.device.graph and self in self.device.graph.counts:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")
        self.run(self.issued)
        self.device.host_ns = max(self.device.host_ns, self.ns)
        Clocks.join(self.device.clocks.clocks[HOST], self.device.clocks.of(self.name))
        if error := self.device.error:
            raise error

    def __enter__(self) -> None:
        self.device.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.device.current.pop()


class Graph:
    """Double of cupy.cuda.graph.Graph, with the state of its capture.

    Attributes:
        counts: number of calls on each captured stream.
        joined: number of each stream's calls that the origin stream waits for.
        events: events recorded in the capture, with the number of calls before them.
        nodes: number of calls of each kind.
    """

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.calls = list[Callable[[], object]]()
        self.counts = {origin: 0}
        self.joined = dict[Stream, int]()
        self.events: dict[Event, int] = {}
        self.nodes: Counter[str] = Counter()

    def add(self, stream: Stream, kind: str, call: Callable[[], object]) -> None:
        assert stream in self.counts, f"{stream.name} takes no part in the capture"
        self.counts[stream] += kind != "record"
        self.nodes[kind] += 1
        self.calls.append(call)

    def launch(self, stream: Stream) -> None:
        assert stream is self.origin
        stream.device.launched.append(self)
        for call in self.calls:
            call()


class Event:
    """Double of cupy.cuda.Event."""

    def __init__(self, device: Device, disable_timing: bool = False) -> None:
        self.device = device
        self.clock = Clock()
        self.ns = -1
        self.position = 0
        self.timed = not disable_timing
        self.stream: Stream

    def record(self, stream: Stream) -> None:
        if graph := self.device.graph:
            graph.add(stream, "timed event" if self.timed else "record", lambda: self.record(stream))
            self.stream = stream
            graph.events[self] = graph.counts[stream]
            return
        self.stream, self.clock = stream, dict(self.device.clocks.of(stream.name))

        def happens(ns: int) -> int:
            self.ns = ns
            return ns

        self.position = stream.issued + 1
        stream.enqueue(happens)

    def happened(self) -> int:
        self.stream.run(self.position)
        return self.ns

    def synchronize(self) -> None:
        self.happened()
        Clocks.join(self.device.clocks.clocks[HOST], self.clock)
        if error := self.device.error:
            raise error


class Device:
    """Double of the module ``cupy``, with the device state for tests.

    Attributes:
        found: descriptions of detected errors.
        error: error of finished work, raised at the next wait.
    """

    def __init__(self, machine: Machine, seed: int | None = None) -> None:
        self.machine = machine
        self.random = random.Random(seed) if seed is not None else None
        self.clocks = Clocks()
        self.found = list[str]()
        self.streams = list[Stream]()
        self.current: list[Stream] = []
        self.host_ns = 0  # when the host last waited for a stream
        self.graph: Graph | None = None  # the current capture
        self.launched: list[Graph] = []
        self.memory: dict[int, np.ndarray] = {}
        self.error: CUDARuntimeError | None = None
        self.__version__ = "of a double"
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: Stream(self),
            get_elapsed_time=self.elapsed,
            Event=lambda disable_timing=False: Event(self, disable_timing),
            compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                setDevice=lambda device: None,
                runtimeGetVersion=lambda: 12040,
                getDeviceProperties=lambda device: {
                    "totalGlobalMem": machine.memory_bytes,
                    "name": b"a double",
                    "multiProcessorCount": 2,
                },
                malloc=self.malloc,
                free=self.free,
                memGetInfo=lambda: (self.left(), machine.memory_bytes),
                memsetAsync=self.memset_async,
                memcpy=self.memcpy,
                memcpyAsync=self.memcpy_async,
                memcpyDeviceToHost=2,
                memcpyHostToDevice=1,
            ),
        )

    # ------------------------------------------------------------------------------------------ memory

    def left(self) -> int:
        return self.machine.memory_bytes - sum(a.nbytes for a in self.memory.values())

    def malloc(self, nbytes: int) -> int:
        if nbytes > self.left():
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        content = np.full(-(-nbytes // 512) * 512 + 512, 0xFF, np.uint8)  # poison for uninitialized memory
        address = -(-content.ctypes.data // 512) * 512
        self.memory[address] = content
        return address

    def free(self, address: int) -> None:
        """Waits for all work, as cudaFree does, and overwrites the freed memory."""
        assert all(not stream.queue for stream in self.streams)
        self.memory.pop(address)[:] = 0xFE

    def use(self, stream: str, name: str, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
        if wrong := self.clocks.use(stream, name, [(a, a + n) for a, n in reads], [(a, a + n) for a, n in writes], {}):
            self.found.append(wrong)

    def memcpy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        self.use(HOST, "a copy of the host", [(source, nbytes)], [(target, nbytes)])
        ctypes.memmove(target, source, nbytes)

    def memcpy_async(self, target: int, source: int, nbytes: int, kind: int, ptr: int) -> None:
        stream = self.streams[ptr - 1]
        if self.graph:
            return self.graph.add(stream, "copy", lambda: self.memcpy_async(target, source, nbytes, kind, ptr))
        self.use(stream.name, f"a copy on {stream.name}", [(source, nbytes)], [(target, nbytes)])
        lasts = self.machine.d2h_ns(nbytes) if kind == 2 else self.machine.h2d_ns(nbytes)

        def copy(ns: int) -> int:
            ctypes.memmove(target, source, nbytes)
            return ns + lasts

        stream.enqueue(copy)

    def memset_async(self, address: int, value: int, nbytes: int, ptr: int) -> None:
        stream = self.streams[ptr - 1]
        assert not self.graph
        self.use(stream.name, "memset", [], [(address, nbytes)])
        stream.enqueue(lambda ns: ctypes.memset(address, value, nbytes) * 0 + ns)

    def elapsed(self, first: Event, second: Event) -> float:
        assert first.ns >= 0 and second.ns >= 0, "both have to have happened"
        assert first.timed and second.timed
        return (second.ns - first.ns) / 1e6

    # ------------------------------------------------------------------------------------------ kernels

    def RawModule(self, code: str) -> Any:
        library, kernels = compiled(code)

        def function(name: str) -> Callable[..., None]:
            run = getattr(library, f"run_{name}")
            kinds = kernels[name]

            def launch(blocks: tuple[int], threads: tuple[int], args: tuple[Any, ...]) -> None:
                assert [type(a) for a in args] == kinds and 0 < blocks[0] < 2**31 and 0 < threads[0] <= 1024
                values = [int(a) for a in args]
                reads, writes = {
                    "spin": lambda ns, begins, ends: ([], [(begins, 8), (ends, 8)] if begins else []),
                    "fill": lambda at, n, word: ([], [(at, n)]),
                    "verify": lambda at, n, word, answer: ([(at, n)], [(answer, 8)]),
                }[name](*values)
                stream = self.current[-1]
                plain = [
                    ctypes.c_uint32(v) if k is np.uint32 else ctypes.c_uint64(v)
                    for v, k in zip(values, kinds, strict=True)
                ]

                def enqueue() -> None:
                    self.use(stream.name, name, reads, writes)
                    stream.enqueue(lambda ns: run(ctypes.c_uint64(ns), blocks[0], threads[0], *plain))

                if self.graph:
                    self.graph.add(stream, name, enqueue)
                else:
                    enqueue()

            return launch

        return SimpleNamespace(compile=lambda: None, get_function=function)


@contextlib.contextmanager
def opened(machine: Machine, seed: int | None = None) -> Iterator[tuple[Any, Device]]:
    """Yields a backend on a test double, and the double."""
    device = Device(machine, seed)
    name = "executor.replay.cupy_backend"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", device)
        patch.setitem(sys.modules, "cupy.cuda", device.cuda)
        patch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        patch.setattr(module, "WARM_UP_NS", 20_000)
        patch.setattr(module, "CUDA", Slabs(lambda at, n: None, lambda at: None, lambda: None))
        try:
            with module.CupyBackend(machine.copy_engines) as backend:
                yield backend, device
        finally:
            patch.delitem(sys.modules, name, raising=False)
            assert not device.memory, "memory was not freed"
