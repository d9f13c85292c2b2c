"""A GPU behind ``executor.replay.backend``, with CuPy. The only file that imports it.

The arena is one cudaMalloc a run, the host buffer the pinned memory of the process (executor/memory/pinned.py). No pool
of CuPy's is used. Each stream is a CUDA stream
without the legacy default stream's barriers. Reasons for these are in executor/replay/README.md:

1. A spin reads the GPU's ``globaltimer``; it may make up for a pause of ``pause_ns`` before it (``Backend.spin``). One
   with bytes runs on all multiprocessors, which stream their share of the arena evenly over its time.
2. Patterns are written and checked 16 bytes at a time by all multiprocessors, unaligned ends byte by byte.
3. Events have the resolution of cudaEventElapsedTime: half a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from executor.memory.pinned import CUDA
from executor.replay.backend import Backend, BackendError, Stream

try:
    import cupy
    from cupy.cuda import runtime
except ImportError as error:
    raise BackendError(f"the cuda backend needs CuPy ({error}): pip install 'headroom[gpu]'") from None

ERRORS = RuntimeError, OSError, cupy.cuda.compiler.CompileException  # of the runtime, the driver, or the loader
UNROLL = 4  # vectors of 16 bytes that a thread of ``stream`` has under way
CLOCK = 32  # bytes, of which 24 are used
SLOTS = 4096  # of answers of checks, per allocation
THREADS = 256
AWAKE_NS = 500_000_000  # for which the GPU works before anything is measured: an idle one has low clocks

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
#define UNROLL 4

__device__ u64 now() { u64 ns; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)); return ns; }

// last: when the kernel before was over, when it was due, and the pauses made up for so far; next: the same, of this
// one. Two of them take turns.
__device__ u64 begin_of(u64 begin, u64 pause, const u64* last) {
    return pause && begin - last[0] <= pause ? last[1] : begin;
}

extern "C" __global__ void spin(u64 ns, u64 pause, const u64* last, u64* next) {
    u64 begin = now(), from = begin_of(begin, pause, last), end = begin;
    while (end < from + ns) end = now();
    next[0] = end;
    next[1] = from + ns;
    next[2] = last[2] + (begin - from);
}

// Past the caches' usual ways, and never left out by the compiler.
__device__ uint4 load(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ void store(uint4* p, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Reads and writes ``count`` vectors of the arena's, from ``first`` on and round; the addresses of a round of all
// threads follow each other. Times grow, so what stands in next from two kernels ago is below what comes.
extern "C" __global__ void stream(u64 ns, u64 pause, const u64* last, u64* next, uint4* arena, u64 vectors, u64 first,
                                  u64 count) {
    u64 begin = now(), from = begin_of(begin, pause, last), end = begin;
    u64 threads = gridDim.x * (u64)blockDim.x, me = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    u64 rounds = (count + UNROLL * threads - 1) / (UNROLL * threads);
    for (u64 r = 0; r < rounds; r++) {
        uint4 v[UNROLL];
        u64 at[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            u64 i = (r * UNROLL + u) * threads + me;
            at[u] = i < count ? first + i : first;
            while (at[u] >= vectors) at[u] -= vectors;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) v[u] = load(arena + at[u]);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if ((r * UNROLL + u) * threads + me < count) store(arena + at[u], v[u]);
        u64 until = from + ns * (r + 1) / rounds;
        do end = now(); while (end < until);
    }
    atomicMax(next, end);
    atomicMax(next + 1, from + ns);
    if (me == 0) next[2] = last[2] + (begin - from);
}

__device__ u32 word(u64 i, u32 seed) { return seed + (u32)i * 2654435761u; }
__device__ unsigned char byte_at(u64 i, u32 seed) { return word(i >> 2, seed) >> (8 * (i & 3)); }

// Byte i of the range is p[i]. The vectors are those of 16 bytes that lie in it and that start at a multiple of 4 of
// it and of 16 in memory; where there are none (p is odd), all bytes are done singly.
__device__ void parts(const unsigned char* p, u64 n, u64* begin, u64* end) {
    u64 skip = (16 - ((u64)p & 15)) & 15;
    *begin = (skip & 3) || skip > n ? n : skip;
    *end = *begin + (n - *begin) / 16 * 16;
}

extern "C" __global__ void fill(unsigned char* p, u64 n, u32 seed) {
    u64 begin, end, first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    parts(p, n, &begin, &end);
    for (u64 at = begin + 16 * first; at < end; at += 16 * step) {
        u64 w = at / 4;
        *(uint4*)(p + at) = make_uint4(word(w, seed), word(w + 1, seed), word(w + 2, seed), word(w + 3, seed));
    }
    for (u64 at = first; at < begin; at += step) p[at] = byte_at(at, seed);
    for (u64 at = end + first; at < n; at += step) p[at] = byte_at(at, seed);
}

__device__ void check(const unsigned char* p, u64 at, u32 seed, u64* wrong) {
    if (p[at] != byte_at(at, seed)) atomicMin(wrong, at);
}

extern "C" __global__ void verify(const unsigned char* p, u64 n, u32 seed, u64* wrong) {
    u64 begin, end, first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    parts(p, n, &begin, &end);
    for (u64 at = begin + 16 * first; at < end; at += 16 * step) {
        u64 w = at / 4;
        uint4 v = *(const uint4*)(p + at);
        if (v.x != word(w, seed) || v.y != word(w + 1, seed) || v.z != word(w + 2, seed) || v.w != word(w + 3, seed))
            for (int i = 0; i < 16; i++) check(p, at + i, seed, wrong);
    }
    for (u64 at = first; at < begin; at += step) check(p, at, seed, wrong);
    for (u64 at = end + first; at < n; at += step) check(p, at, seed, wrong);
}
"""


class CupyBackend(Backend):
    """The GPU of number ``device``; with ``copy_engines`` 1 both directions share one stream.

    Raises:
        BackendError: there is no such GPU.
    """

    def __init__(self, copy_engines: int = 2, pause_ns: int = 0, device: int = 0):
        self._device, self.pause_ns = device, pause_ns
        with self._talk("no CUDA GPU can be used"):
            runtime.setDevice(device)
            properties = runtime.getDeviceProperties(device)
            self.memory_bytes = int(properties["totalGlobalMem"])
            major, minor = divmod(runtime.runtimeGetVersion() // 10, 100)
            self.name = f"{properties['name'].decode()}, CUDA {major}.{minor}, CuPy {cupy.__version__}"
            kernels = cupy.RawModule(code=SOURCE)
            kernels.compile()
            names = ("spin", "stream", "fill", "verify")
            self._spin, self._stream, self._fill, self._verify = map(kernels.get_function, names)
            self._blocks = 4 * int(properties["multiProcessorCount"])
            self.make_streams(lambda _: cupy.cuda.Stream(non_blocking=True), copy_engines)
        self._arena = self._clock = 0  # addresses
        self._bytes = self._taken = self._checks = 0
        self._kernels = self._next = 0  # how many there were; the vector of the arena at which the next one streams
        self._slots: list[int] = []  # addresses of uint64[SLOTS]
        self._known: dict[Any, tuple[np.uint64, ...]] = {}  # arguments of spins
        self._base: Any = None
        self._awake = False

    @contextmanager
    def _talk(self, what: str) -> Iterator[None]:
        """Errors of CUDA become one sentence."""
        try:
            yield
        except BackendError:
            raise
        except MemoryError as e:  # of pinned memory, which says it all
            raise BackendError(f"{self.task}: {e}" if self.task else str(e)) from e
        except ERRORS as e:
            raise self._said(what, e) from e

    def _said(self, what: str, error: Exception) -> BackendError:
        reason = f"{what} ({error})".splitlines()[0]
        return BackendError(f"{self.task}: {reason}" if self.task else reason)

    # ---------------------------------------------------------------------------------- memory

    def allocate(self, device_bytes: int, host_bytes: int) -> None:
        if self._clock:
            raise BackendError("there is an arena already; free it first")
        try:
            with self._talk(f"{host_bytes:,} bytes of host memory cannot be pinned"):
                self.host = CUDA.take(host_bytes)
            with self._talk(f"an arena of {device_bytes:,} bytes cannot be allocated"):
                self._clock = runtime.malloc(2 * CLOCK)
                free, _ = runtime.memGetInfo()
                self._arena = runtime.malloc(max(device_bytes, 1))
                self._taken = free - runtime.memGetInfo()[0]
                runtime.memset(self._clock, 0, 2 * CLOCK)
                runtime.deviceSynchronize()
                self._bytes = device_bytes
                if not self._awake:
                    self.spin(AWAKE_NS, device_bytes)
                    runtime.deviceSynchronize()
                    self._awake = True
                self._base = self.record("compute")
        except BaseException:
            self.free()
            raise

    @property
    def allocated_bytes(self) -> int:
        return self._taken

    def free(self) -> None:
        try:
            for stream in self.streams.values():
                stream.synchronize()
        except runtime.CUDARuntimeError:
            pass  # after an error nothing runs any more, and the context gives back its memory with the process
        if hasattr(self, "host"):
            del self.host
        for address in (self._arena, self._clock, *self._slots):
            try:
                if address:
                    runtime.free(address)
            except runtime.CUDARuntimeError:
                pass  # as above
        self._arena = self._clock = self._bytes = self._taken = self._checks = self._kernels = self._next = 0
        self._slots, self._known, self._base, self.task = [], {}, None, ""

    def close(self) -> None:
        self.free()
        self.streams = {}

    # ---------------------------------------------------------------------------------- work

    def copy(self, stream: Stream, device: int, host: int, nbytes: int) -> None:
        on_device, on_host = self._address(device, nbytes), self.host.ctypes.data + host
        self.check_range(host, nbytes, len(self.host), "host buffer")
        target, source, kind = (
            (on_host, on_device, runtime.memcpyDeviceToHost)
            if stream == "d2h"
            else (on_device, on_host, runtime.memcpyHostToDevice)
        )
        with self._talk(f"a copy of {nbytes:,} bytes failed"):
            runtime.memcpyAsync(target, source, nbytes, kind, self.streams[stream].ptr)

    def spin(self, ns: int, nbytes: int = 0) -> None:
        turn = self._kernels % 2
        self._kernels += 1
        args = self._known.get((ns, turn))
        if args is None:
            clocks = self._clock + CLOCK * turn, self._clock + CLOCK * (1 - turn)
            args = self._known[ns, turn] = tuple(map(np.uint64, (ns, self.pause_ns, *clocks)))
        count, vectors = nbytes // 32, self._bytes // 16  # each is read and written
        if not count or not vectors:
            self._launch(self._spin, 1, 1, *args)
            return
        first, self._next = self._next, (self._next + count) % vectors
        blocks = min(self._blocks, -(-count // (UNROLL * THREADS)))
        where = np.uint64(self._arena), np.uint64(vectors), np.uint64(first), np.uint64(count)
        self._launch(self._stream, blocks, THREADS, *args, *where)

    def absorbed_ns(self) -> int:
        found = np.zeros(CLOCK // 8, np.uint64)
        with self._talk("the clock of kernels cannot be read"):
            at = self._clock + CLOCK * (self._kernels % 2)
            runtime.memcpy(found.ctypes.data, at, CLOCK, runtime.memcpyDeviceToHost)
        return int(found[2])

    def fill(self, device: int, nbytes: int, seed: int) -> None:
        if nbytes:
            args = (np.uint64(self._address(device, nbytes)), np.uint64(nbytes), np.uint32(seed))
            self._launch(self._fill, self._grid(nbytes), THREADS, *args)

    def verify(self, device: int, nbytes: int, seed: int) -> int:
        number, at = self._checks, self._checks % SLOTS
        if at == 0:
            with self._talk("the answers of checks cannot be allocated"):
                self._slots.append(runtime.malloc(8 * SLOTS))
                runtime.memsetAsync(self._slots[-1], 0xFF, 8 * SLOTS, self.streams["compute"].ptr)
        self._checks += 1
        if nbytes:
            args = (np.uint64(self._address(device, nbytes)), np.uint64(nbytes), np.uint32(seed))
            self._launch(self._verify, self._grid(nbytes), THREADS, *args, np.uint64(self._slots[-1] + 8 * at))
        return number

    def mismatches(self) -> dict[int, int]:
        wrong: dict[int, int] = {}
        answers = np.empty(SLOTS, np.uint64)
        for i, slots in enumerate(self._slots):
            with self._talk("the answers of checks cannot be read"):
                runtime.memcpy(answers.ctypes.data, slots, 8 * SLOTS, runtime.memcpyDeviceToHost)
            wrong |= {SLOTS * i + int(j): int(answers[j]) for j in np.flatnonzero(answers != 2**64 - 1)}
        return wrong

    def _launch(self, kernel: Any, blocks: int, threads: int, *args: Any) -> None:
        try:  # these are issued for every kernel of a replay, where a context manager would take as long as the rest
            with self.streams["compute"]:
                kernel((blocks,), (threads,), args)
        except ERRORS as e:
            raise self._said("a kernel cannot be launched", e) from e

    def _grid(self, nbytes: int) -> int:
        return min(self._blocks, -(-nbytes // (16 * THREADS)))

    def _address(self, offset: int, nbytes: int) -> int:
        self.check_range(offset, nbytes, self._bytes, "arena")
        return int(self._arena) + offset

    # ---------------------------------------------------------------------------------- order and time

    def record(self, stream: Stream) -> Any:
        try:
            event = cupy.cuda.Event()
            event.record(self.streams[stream])
        except ERRORS as e:
            raise self._said("an event cannot be recorded", e) from e
        return event

    def wait(self, stream: Stream, event: Any) -> None:
        try:
            self.streams[stream].wait_event(event)
        except ERRORS as e:
            raise self._said("a stream cannot wait", e) from e

    def synchronize(self, event: Any = None) -> None:
        with self._talk("the GPU reports that earlier work failed"):
            for each in [event] if event else list(self.streams.values()):
                each.synchronize()

    def time_ns(self, event: Any) -> int:
        with self._talk("an event has no time"):
            return round(1e6 * float(cupy.cuda.get_elapsed_time(self._base, event)))
