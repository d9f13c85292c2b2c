"""Allocator for ``torch.cuda.MemPool`` that places the memory of a CUDA graph at chosen addresses.

    arena = Arena.aliased(device, nbytes)       # or Arena.resident: memory of its own
    pool = torch.cuda.MemPool(allocator(), no_split=True)
    with arena.serving(requests):               # None: record (bytes, address) of each request; else replay them
        ...

The first capture gives each request its own address. The second gives request k the address packed for it and refuses
a request of another size. PyTorch calls the allocator from any thread with its locks held, so both functions are
native code (Numba) that takes no GIL and keeps its tables in arrays at fixed addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from executor.memory import ALIGNMENT, cuda_index
from simulator.compiled.encoding import Ints
from simulator.compiled.jit import jit

ARENAS = 32  # that may be open at a time
CHUNK = 128 << 20  # bytes of physical memory behind an aliased arena
# PyTorch may free memory after the interpreter has shut down, so these arrays are never freed, and native code has
# their addresses.
_STATE = np.zeros(
    1,
    [
        ("lock", np.int64),  # spin lock
        ("serving", np.int64),  # row of the arena that serves; 0: none
        ("has_answers", np.int64),  # whether the log holds the answers
        ("next", np.int64),  # index of the next request
    ],
)
_TABLE = np.zeros(
    1 + ARENAS,  # row 0 is not used
    [
        ("base", np.int64),  # address; 0: the row is free
        ("nbytes", np.int64),
        ("device", np.int64),
        ("live", np.int64),  # segments not freed
        ("used", np.int64),  # bytes given away so far
        ("refused", np.int64),  # bytes of the last refused request
    ],
)
_LOG = np.zeros((1 << 17, 2), np.int64)  # bytes and address of each request of a capture, which has at most so many
_ROWS_LOCK = threading.Lock()  # guards the search for a free row
_SERVING_LOCK = threading.Lock()  # one arena serves at a time: PyTorch captures one graph at a time
_types: Any = types  # Numba's type functions have no annotations


@intrinsic
def _pointer(context, address):  # type: ignore[no-untyped-def]
    """Casts an integer address to void*."""
    return _types.voidptr(address), lambda context, builder, signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


@intrinsic
def _exchange(context, address, value):  # type: ignore[no-untyped-def]
    """Exchanges the int64 at an address atomically and returns the old value."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", pointer, args[1], "seq_cst")

    return _types.int64(_types.int64, _types.int64), generate


@jit
def _allocate(state, table, log, nbytes, device):  # type: ignore[no-untyped-def]
    """Returns the address for the next request, or 0 if the request is refused."""
    row = table[state.serving]
    k = state.next
    if state.serving == 0 or nbytes <= 0 or device != row.device:
        return 0
    rounded = (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    if state.has_answers != 0:
        refused = log[k, 0] != nbytes  # entries after the last request are zero
    else:
        refused = k + 1 >= len(log) or row.used + rounded > row.nbytes
    if refused:
        row.refused = nbytes
        return 0
    if state.has_answers == 0:
        log[k, 0] = nbytes
        log[k, 1] = row.base + row.used
        row.used += rounded
    state.next = k + 1
    row.live += 1
    return log[k, 1]


@jit
def _record_free(table, address):  # type: ignore[no-untyped-def]
    """Decrements the count of live segments in the arena that contains the freed address."""
    for r in range(1, len(table)):
        row = table[r]
        if row.base <= address < row.base + row.nbytes:
            row.live -= 1


@cache
def functions() -> tuple[Any, Any]:
    """Returns the native allocate and free functions; the first call compiles them.

    The signatures are those of ``torch.cuda.memory.CUDAPluggableAllocator``: ``void* (size_t size, int device,
    cudaStream_t)`` and ``void (void*, size_t size, int device, cudaStream_t)``. Each function has an ``address`` and a
    ``ctypes`` callable for tests. Addresses are integers; 0 is NULL.
    """
    # Numba freezes these values into the native code.
    lock = _STATE.ctypes.data  # the first field
    table_at = _TABLE.ctypes.data
    log_at = _LOG.ctypes.data
    state_type = _STATE.dtype
    row_type = _TABLE.dtype
    n_rows = len(_TABLE)
    log_shape = _LOG.shape
    word = _types.intp
    number = _types.int32

    @cfunc(word(word, number, word))  # type: ignore[untyped-decorator]
    def allocate(nbytes, device, stream):  # type: ignore[no-untyped-def]
        state = carray(_pointer(lock), 1, state_type)
        table = carray(_pointer(table_at), n_rows, row_type)
        log = carray(_pointer(log_at), log_shape, np.int64)
        while _exchange(lock, 1) != 0:
            pass
        address = _allocate(state[0], table, log, nbytes, device)
        _exchange(lock, 0)
        return address

    @cfunc(_types.void(word, word, number, word))  # type: ignore[untyped-decorator]
    def free(address, nbytes, device, stream):  # type: ignore[no-untyped-def]
        table = carray(_pointer(table_at), n_rows, row_type)
        if address != 0:
            while _exchange(lock, 1) != 0:
                pass
            _record_free(table, address)
            _exchange(lock, 0)

    for item in (allocate, free, _STATE, _TABLE, _LOG):  # makes them immortal
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    return allocate, free


def allocator() -> Any:
    """Returns a new allocator for one ``torch.cuda.MemPool``.

    PyTorch's allocator object tracks its allocations by address and aborts the process if two pools that share it free
    the same address. Each pool therefore needs its own allocator, kept alive while the pool has memory.
    """
    allocate, free = functions()
    return torch._C._cuda_customAllocator(allocate.address, free.address)


class Driver:
    """Caller of CUDA driver functions (``libcuda``) with a device's primary context current.

    Raises:
        MemoryError: the CUDA driver is not installed, or a call failed.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MemoryError(
                f"cannot allocate device memory, the CUDA driver is missing ({error}): install it"
            ) from None
        self.index = cuda_index(device)
        with torch.cuda.device(self.index):
            torch.cuda.synchronize()  # makes the device's context current in this thread

    def __call__(self, function: str, *args: Any) -> None:
        """Calls a driver function."""
        with torch.cuda.device(self.index):
            status = getattr(self._library, function)(*args)
        if status:
            raise MemoryError(f"{function} failed with CUDA error {status}; restart the process, and check nvidia-smi")


class Arena:
    """Range of device addresses that serves allocation requests.

    Args:
        address, nbytes: the range; bytes before the first multiple of 512 are unused.
        device: index of the device.
        release: frees the range; called once, when the arena is closed and has no live segments.

    Raises:
        MemoryError: ARENAS arenas are open already.
    """

    _closed: list[Arena] = []  # noqa: RUF012  # closed while PyTorch still had tensors in them

    def __init__(self, address: int, nbytes: int, device: int = 0, release: Callable[[], object] = lambda: None):
        sweep()
        self.base = -(-address // ALIGNMENT) * ALIGNMENT
        self.nbytes = max(0, nbytes - (self.base - address)) // ALIGNMENT * ALIGNMENT
        with _ROWS_LOCK:
            free = np.flatnonzero(_TABLE["base"][1:] == 0)
            if not len(free):
                release()
                raise MemoryError(f"{ARENAS} graph arenas are open already: close one first")
            self._index = 1 + int(free[0])
            self._row = _TABLE[self._index]
            _TABLE[self._index] = (self.base, self.nbytes, device, 0, 0, 0)
        self._release: Callable[[], object] | None = release

    @classmethod
    def resident(cls, device: torch.device, nbytes: int) -> Arena:
        """Allocates an arena directly from the driver; PyTorch's allocator does not count it.

        Raises:
            MemoryError: the device has too little free memory, or the CUDA driver is not installed.
        """
        driver = Driver(device)
        address = ctypes.c_uint64()
        torch.cuda.empty_cache()
        try:
            driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes + ALIGNMENT))
        except MemoryError as error:
            raise MemoryError(
                f"the device has no contiguous {nbytes:,} bytes ({error}): free some, or plan for less memory"
            ) from None

        def release() -> None:
            torch.cuda.synchronize(driver.index)
            driver("cuMemFree_v2", address)

        return cls(int(address.value), nbytes + ALIGNMENT, driver.index, release)

    @classmethod
    def aliased(cls, device: torch.device, nbytes: int) -> Arena:
        """Reserves an arena whose chunks all map to the same physical memory, for a capture that is never replayed.

        Raises:
            MemoryError: the device has no CHUNK bytes free, or the CUDA driver is not installed.
        """
        driver = Driver(device)
        size = -(-nbytes // CHUNK) * CHUNK
        handle = ctypes.c_uint64()
        base = ctypes.c_uint64()
        torch.cuda.empty_cache()
        location = np.array([1, driver.index], np.int32)  # CU_MEM_LOCATION_TYPE_DEVICE
        # CUmemAllocationProp: pinned, no handle type, location, no security attributes, no flags; CUmemAccessDesc.
        properties = np.concatenate((np.array([1, 0], np.int32), location, np.zeros(4, np.int32)))
        access = np.append(location, np.int32(3))
        driver(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(CHUNK),
            ctypes.c_void_p(properties.ctypes.data),
            ctypes.c_uint64(0),
        )
        mapped: list[ctypes.c_uint64] = []

        def release() -> None:
            for chunk in mapped:
                driver("cuMemUnmap", chunk, ctypes.c_size_t(CHUNK))
            if base.value:
                driver("cuMemAddressFree", base, ctypes.c_size_t(size))
            driver("cuMemRelease", handle)

        try:
            driver(
                "cuMemAddressReserve",
                ctypes.byref(base),
                ctypes.c_size_t(size),
                ctypes.c_size_t(0),
                ctypes.c_uint64(0),
                ctypes.c_uint64(0),
            )
            for offset in range(0, size, CHUNK):
                chunk = ctypes.c_uint64(base.value + offset)
                driver("cuMemMap", chunk, ctypes.c_size_t(CHUNK), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
                mapped.append(chunk)
            driver(
                "cuMemSetAccess", base, ctypes.c_size_t(size), ctypes.c_void_p(access.ctypes.data), ctypes.c_size_t(1)
            )
        except MemoryError:
            release()
            raise
        return cls(int(base.value), size, driver.index, release)

    @contextlib.contextmanager
    def serving(self, requests: Ints | None = None) -> Iterator[None]:
        """Serves all allocation requests from this arena within the ``with`` block.

        Args:
            requests: int64[n, 2], bytes and address of each request in order; None records the requests instead.
        """
        with _SERVING_LOCK:
            _LOG[:] = 0
            if requests is not None:
                _LOG[: len(requests)] = requests
            _STATE["next"] = 0
            _STATE["has_answers"] = requests is not None
            _STATE["serving"] = self._index
            try:
                yield
            finally:
                _STATE["serving"] = 0

    @property
    def live(self) -> int:
        """Number of segments that PyTorch has allocated and not freed."""
        return int(self._row["live"])

    @property
    def refused_bytes(self) -> int:
        """Bytes of the last refused request, or 0 if none was refused."""
        return int(self._row["refused"])

    def close(self) -> None:
        """Frees the memory, or leaves that to `sweep` if PyTorch still has tensors in it."""
        if self._release is None:
            return
        if self.live:
            if self not in Arena._closed:
                Arena._closed.append(self)
            return
        if self in Arena._closed:
            Arena._closed.remove(self)
        release = self._release
        self._release = None
        self._row["base"] = self._row["nbytes"] = 0  # before the release: the address may be reused at once
        release()


def served() -> Ints:
    """Returns int64[n, 2]: bytes and address of each request that the serving arena has answered so far."""
    return _LOG[: _STATE["next"][0]].copy()


def sweep() -> None:
    """Frees the memory of closed arenas whose segments PyTorch has freed since."""
    if Arena._closed:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # frees the segments of pools without an owner
        for arena in list(Arena._closed):
            arena.close()
