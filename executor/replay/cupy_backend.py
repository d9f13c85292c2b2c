"""CuPy implementation of ``executor.replay.backend`` for a GPU; the only file that imports CuPy.

The arena is one cudaMalloc, the host buffer is the process's pinned memory (executor/memory/pinned.py); CuPy's memory
pools are not used. The streams do not synchronize with the legacy default stream. Reasons: executor/replay/README.md.

1. A spin reads the GPU's ``globaltimer`` and logs its start and end, so it needs no timed events.
2. Events have no timing, except in calibration; their resolution is half a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from executor.memory.pinned import CUDA
from executor.replay.backend import Backend, BackendError, Log, Stream

try:
    import cupy
    from cupy.cuda import runtime
except ImportError as error:
    raise BackendError(f"the cuda backend needs CuPy ({error}): pip install 'headroom[gpu]'") from None

THREADS = 256
WARM_UP_NS = 500_000_000  # warm-up before measurements, because an idle GPU runs at low clocks

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;

__device__ u64 now() { u64 ns; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)); return ns; }

// Its begin and end go to the log; of several kernels of one slot, the first begin and the last end.
extern "C" __global__ void spin(u64 ns, u64* begins, u64* ends) {
    u64 begin = now(), end = begin;
    while (end < begin + ns) end = now();
    if (begins) {
        atomicMin(begins, begin);
        atomicMax(ends, end);
    }
}

__device__ unsigned char byte_at(u64 i, u32 seed) { return (seed + (u32)(i >> 2) * 2654435761u) >> (8 * (i & 3)); }

extern "C" __global__ void fill(unsigned char* p, u64 n, u32 seed) {
    u64 step = gridDim.x * (u64)blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += step) p[i] = byte_at(i, seed);
}

extern "C" __global__ void verify(const unsigned char* p, u64 n, u32 seed, u64* wrong) {
    u64 step = gridDim.x * (u64)blockDim.x;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += step)
        if (p[i] != byte_at(i, seed)) atomicMin(wrong, i);
}
"""


class CupyBackend(Backend):
    """Backend for GPU number ``device``; with ``copy_engines`` 1, both directions share one stream.

    Raises:
        BackendError: if the GPU does not exist or cannot be used.
    """

    def __init__(self, copy_engines: int = 2, device: int = 0):
        with self._errors("no CUDA GPU can be used"):
            runtime.setDevice(device)
            properties = runtime.getDeviceProperties(device)
            self.memory_bytes = int(properties["totalGlobalMem"])
            major, minor = divmod(runtime.runtimeGetVersion() // 10, 100)
            self.name = f"{properties['name'].decode()}, CUDA {major}.{minor}, CuPy {cupy.__version__}"
            kernels = cupy.RawModule(code=SOURCE)
            kernels.compile()
            self._spin, self._fill, self._verify = map(kernels.get_function, ("spin", "fill", "verify"))
            self._blocks = 8 * int(properties["multiProcessorCount"])
            self.make_streams(lambda _: cupy.cuda.Stream(non_blocking=True), copy_engines)
        self._arena = self._log = 0  # addresses
        self._bytes = self._slots = self._counted_bytes = 0
        self._is_warm = False
        self._captured: list[Any] | None = None  # events of the graph in capture, which must outlive the capture

    @contextmanager
    def _errors(self, failure: str) -> Iterator[None]:
        """Converts CUDA errors into one-line BackendErrors."""
        try:
            yield
        except BackendError:
            raise
        except MemoryError as e:  # from pinning memory; its message is complete
            raise BackendError(f"{self.task}: {e}" if self.task else str(e)) from e
        # From the runtime, the driver or the loader.
        except (RuntimeError, OSError, cupy.cuda.compiler.CompileException) as e:
            reason = f"{failure} ({e})".splitlines()[0]
            raise BackendError(f"{self.task}: {reason}" if self.task else reason) from e

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, device_bytes: int, host_bytes: int, slots: int = 0) -> None:
        if self._arena:
            raise BackendError("an arena exists already; free it first")
        try:
            with self._errors(f"{host_bytes:,} bytes of host memory cannot be pinned"):
                self.host = CUDA.take(host_bytes)
            with self._errors(f"an arena of {device_bytes:,} bytes cannot be allocated"):
                self._log = runtime.malloc(24 * max(slots, 1))
                self._slots = slots
                free, _ = runtime.memGetInfo()
                self._arena = runtime.malloc(max(device_bytes, 1))
                self._counted_bytes = free - runtime.memGetInfo()[0]
                self._bytes = device_bytes
                self._clear_log()
                if not self._is_warm:
                    self.spin(WARM_UP_NS)
                    self._is_warm = True
                self.synchronize()
        except BaseException:
            self.free()
            raise

    @property
    def allocated_bytes(self) -> int:
        return self._counted_bytes

    def free(self) -> None:
        # After an error no call works, and the memory is freed with the process.
        with suppress(runtime.CUDARuntimeError):
            for stream in self.streams.values():
                stream.synchronize()
        if hasattr(self, "host"):
            del self.host
        for address in filter(None, (self._arena, self._log)):
            with suppress(runtime.CUDARuntimeError):
                runtime.free(address)
        self._arena = self._log = self._bytes = self._slots = self._counted_bytes = 0
        self.task = ""

    def close(self) -> None:
        self.free()
        self.streams = {}

    # ---------------------------------------------------------------------------------- work

    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        on_device = self._address(device, nbytes)
        on_host = self.host.ctypes.data + host
        self.check_range(host, nbytes, len(self.host), "host buffer")
        target, source, kind = (
            (on_host, on_device, runtime.memcpyDeviceToHost)
            if stream == "d2h"
            else (on_device, on_host, runtime.memcpyHostToDevice)
        )
        if nbytes:
            with self._errors(f"a copy of {nbytes:,} bytes failed"):
                runtime.memcpyAsync(target, source, nbytes, kind, self.streams[stream].ptr)

    def spin(self, ns: int, slot: int | None = None, stream: Stream = "compute") -> None:
        log = (0, 0) if slot is None else (self._log + 8 * slot, self._log + 8 * (2 * self._slots + slot))
        self._launch(self._spin, 1, 1, stream, ns, *log)

    def fill(self, device: int, nbytes: int, seed: int) -> None:
        if nbytes:
            start = self._address(device, nbytes)
            self._launch(self._fill, self._grid(nbytes), THREADS, "compute", start, nbytes, np.uint32(seed))

    def verify(self, device: int, nbytes: int, seed: int, slot: int) -> None:
        if nbytes:
            start = self._address(device, nbytes)
            log = self._log + 8 * (self._slots + slot)
            self._launch(self._verify, self._grid(nbytes), THREADS, "compute", start, nbytes, np.uint32(seed), log)

    def log(self) -> Log:
        entries = np.empty((3, self._slots), np.uint64)
        with self._errors("the log of kernels cannot be read"):
            runtime.memcpy(entries.ctypes.data, self._log, entries.nbytes, runtime.memcpyDeviceToHost)
        return Log(*entries)

    def _clear_log(self) -> None:
        """Sets ``begin`` and ``wrong`` to NEVER and ``end`` to 0."""
        if self._slots:
            stream = self.streams["compute"].ptr
            runtime.memsetAsync(self._log, 0xFF, 16 * self._slots, stream)
            runtime.memsetAsync(self._log + 16 * self._slots, 0, 8 * self._slots, stream)

    def _launch(self, kernel: Any, blocks: int, threads: int, stream: Stream, *args: int | np.uint32) -> None:
        values = tuple(a if isinstance(a, np.uint32) else np.uint64(a) for a in args)
        with self._errors("a kernel cannot be launched"), self.streams[stream]:
            kernel((blocks,), (threads,), values)

    def _grid(self, items: int) -> int:
        return min(self._blocks, -(-items // THREADS))

    def _address(self, offset: int, nbytes: int) -> int:
        self.check_range(offset, nbytes, self._bytes, "arena")
        return int(self._arena) + offset

    # ---------------------------------------------------------------------------------- order and time

    def record(self, stream: Stream, timed: bool = False) -> Any:
        with self._errors("an event cannot be recorded"):
            event = cupy.cuda.Event(disable_timing=not timed)
            event.record(self.streams[stream])
        if self._captured is not None:
            self._captured.append(event)
        return event

    def wait(self, stream: Stream, event: Any) -> None:
        with self._errors("a stream cannot wait"):
            self.streams[stream].wait_event(event)

    def begin_capture(self) -> None:
        with self._errors("a graph cannot be captured"):
            self.streams["compute"].begin_capture()
        self._captured = []

    def end_capture(self) -> Callable[[], None]:
        compute = self.streams["compute"]
        try:
            with self._errors("a graph cannot be captured"):
                graph = compute.end_capture()
        finally:
            self._captured = None

        def launch() -> None:
            with self._errors("a graph cannot be launched"):
                self._clear_log()
                graph.launch(compute)

        return launch

    def synchronize(self) -> None:
        with self._errors("the GPU reports that earlier work failed"):
            for stream in self.streams.values():
                stream.synchronize()

    def elapsed_ns(self, first: Any, second: Any) -> int:
        with self._errors("the time between two events cannot be read"):
            return round(1e6 * float(cupy.cuda.get_elapsed_time(first, second)))

    def host_ns(self) -> int:
        return time.perf_counter_ns()
