"""One piece of device memory for a CUDA memory pool of PyTorch, which asks for segments of it and gets nothing else.

    arena = Segments.on_device(device, nbytes)
    pool = torch.cuda.MemPool(allocator())      # whose cudaMalloc and cudaFree are ALLOCATE and FREE below
    with arena.open():                          # requests are served from this arena; without one they are refused
        ...
    arena.close()

PyTorch calls these two with its locks held and from any thread, so they are native code (Numba), take no lock of
Python's, and keep their tables in an array of fixed address. First fit, addresses and sizes in multiples of 512 bytes.
A request that does not fit is refused, and PyTorch raises OutOfMemoryError: the pool cannot grow past its arena.
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
from simulator.compiled.jit import jit

ARENAS, SEGMENTS = 32, 2048  # at a time; segments of each
# Row 0 of the table: a lock, the row that is open, frees of what was not handed out. Other rows: an arena each, then
# begin and end of its segments by address.
_LOCK, _OPEN, _STRAY = 0, 1, 2
_BASE, _NBYTES, _DEVICE, _LIVE, _MOST, _REFUSED, _FIRST = range(7)
_TABLE = np.zeros((1 + ARENAS, _FIRST + 2 * SEGMENTS), np.int64)  # never freed, so that late calls find it
_ADDRESS, _SHAPE = _TABLE.ctypes.data, _TABLE.shape
_ROWS = threading.Lock()  # to find a free row
_ONE = threading.Lock()  # one arena is open at a time: PyTorch captures one graph at a time
_types: Any = types  # its functions are not typed


@intrinsic
def _pointer(context, address):  # type: ignore[no-untyped-def]
    """An address as void*."""
    return _types.voidptr(address), lambda context, builder, signature, args: builder.inttoptr(
        args[0], cgutils.voidptr_t
    )


@intrinsic
def _exchange(context, address, value):  # type: ignore[no-untyped-def]
    """Puts an int64 at an address in one indivisible step; returns what was there."""

    def make(context, builder, signature, args):  # type: ignore[no-untyped-def]
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", place, args[1], "seq_cst")

    return _types.int64(_types.int64, _types.int64), make


@jit
def _take(table, nbytes, device):  # type: ignore[no-untyped-def]
    """First fit; 0 where there is none."""
    row = table[table[0, _OPEN]]
    if table[0, _OPEN] == 0 or nbytes <= 0 or device != row[_DEVICE]:
        return 0
    need, n, i, at = (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, row[_LIVE], 0, row[_BASE]
    while i < n and row[_FIRST + 2 * i] - at < need:
        at = row[_FIRST + 2 * i + 1]
        i += 1
    if n == SEGMENTS or (i == n and row[_BASE] + row[_NBYTES] - at < need):
        row[_REFUSED] = nbytes
        return 0
    for j in range(2 * n - 1, 2 * i - 1, -1):
        row[_FIRST + j + 2] = row[_FIRST + j]
    row[_FIRST + 2 * i], row[_FIRST + 2 * i + 1], row[_LIVE] = at, at + need, n + 1
    held = 0
    for j in range(n + 1):
        held += row[_FIRST + 2 * j + 1] - row[_FIRST + 2 * j]
    row[_MOST] = max(row[_MOST], held)
    return at


@jit
def _give(table, address):  # type: ignore[no-untyped-def]
    """Takes a segment back, of whichever arena."""
    for r in range(1, len(table)):
        row = table[r]
        if row[_BASE] <= address < row[_BASE] + row[_NBYTES]:
            n = row[_LIVE]
            for i in range(n):
                if row[_FIRST + 2 * i] == address:
                    for j in range(2 * i, 2 * n - 2):
                        row[_FIRST + j] = row[_FIRST + j + 2]
                    row[_LIVE] = n - 1
                    return
    table[0, _STRAY] += 1


@cache
def functions() -> tuple[Any, Any]:
    """ALLOCATE and FREE as ``torch.cuda.memory.CUDAPluggableAllocator`` describes them, compiled at the first call:
    ``void* (size_t size, int device, cudaStream_t)`` and ``void (void*, size_t size, int device, cudaStream_t)``.
    Each has an ``address`` and, for tests, a ``ctypes`` callable; addresses are integers here, 0 for NULL."""
    lock = _ADDRESS + 8 * _LOCK
    word, number = _types.intp, _types.int32

    @cfunc(word(word, number, word))  # type: ignore[untyped-decorator]
    def allocate(nbytes, device, stream):  # type: ignore[no-untyped-def]
        table = carray(_pointer(_ADDRESS), _SHAPE, np.int64)
        while _exchange(lock, 1) != 0:
            pass
        found = _take(table, nbytes, device)
        _exchange(lock, 0)
        return found

    @cfunc(_types.void(word, word, number, word))  # type: ignore[untyped-decorator]
    def free(address, nbytes, device, stream):  # type: ignore[no-untyped-def]
        table = carray(_pointer(_ADDRESS), _SHAPE, np.int64)
        if address != 0:
            while _exchange(lock, 1) != 0:
                pass
            _give(table, address)
            _exchange(lock, 0)

    for kept in (allocate, free, _TABLE):  # to the very end of the process: PyTorch frees what it has later than Python
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return allocate, free


@cache
def allocator() -> Any:
    """For ``torch.cuda.MemPool``; one for all arenas, and kept: a pool may call it until the process ends."""
    allocate, free = functions()
    return torch._C._cuda_customAllocator(allocate.address, free.address)


class Segments:
    """An arena: memory from which segments are taken.

    Args:
        address, nbytes: the memory; its first bytes up to a multiple of 512 are not used.
        release: gives it back; called once, when the arena is closed and no segment of it is out.

    Raises:
        MemoryError: ARENAS are there already.
    """

    _closed: list[Segments] = []  # noqa: RUF012  # closed with segments out: PyTorch still has tensors there

    def __init__(self, address: int, nbytes: int, device: int = 0, release: Callable[[], object] = lambda: None):
        sweep()
        base = -(-address // ALIGNMENT) * ALIGNMENT
        self.nbytes = max(0, nbytes - (base - address)) // ALIGNMENT * ALIGNMENT
        with _ROWS:
            free = np.flatnonzero(_TABLE[1:, _BASE] == 0)
            if not len(free):
                release()
                raise MemoryError(f"there are {ARENAS} arenas of graphs already")
            self._index = 1 + int(free[0])
            self._row = _TABLE[self._index]
            self._row[_NBYTES:_FIRST] = self.nbytes, device, 0, 0, 0
            self._row[_BASE] = base
        self._release: Callable[[], object] | None = release

    @classmethod
    def on_device(cls, device: torch.device, nbytes: int) -> Segments:
        """Memory of a GPU, by the driver: PyTorch counts it when segments of it are handed out, and not before.

        Raises:
            MemoryError: the device has not so much, or this system has no driver that is known.
        """
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MemoryError(f"the CUDA driver cannot be asked for memory: {error}") from None
        index = cuda_index(device)
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # the device's context is this thread's
            torch.cuda.empty_cache()
            found = ctypes.c_uint64()
            status = driver.cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(nbytes + ALIGNMENT))
        if status:
            raise MemoryError(f"the device has no {nbytes:,} bytes in one piece (cuMemAlloc: error {status})")
        address = int(found.value)

        def release() -> None:
            with torch.cuda.device(index):
                torch.cuda.synchronize()
                driver.cuMemFree_v2(ctypes.c_uint64(address))

        return cls(address, nbytes + ALIGNMENT, index, release)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Requests are served from here."""
        with _ONE:
            _TABLE[0, _OPEN] = self._index
            try:
                yield
            finally:
                _TABLE[0, _OPEN] = 0

    @property
    def live(self) -> int:
        """Segments that are out."""
        return int(self._row[_LIVE])

    @property
    def most_bytes(self) -> int:
        """The most that was out at once."""
        return int(self._row[_MOST])

    @property
    def refused_bytes(self) -> int:
        """The last request that did not fit; 0 where all did."""
        return int(self._row[_REFUSED])

    def close(self) -> None:
        """The memory goes back, where segments are out when they have come home."""
        if self._release is None:
            return
        if self.live:
            if self not in Segments._closed:
                Segments._closed.append(self)
            return
        if self in Segments._closed:
            Segments._closed.remove(self)
        release, self._release = self._release, None
        self._row[_BASE] = self._row[_NBYTES] = 0  # first: the address may be another's at once
        release()


def sweep() -> None:
    """Arenas that were closed while segments were out give their memory back, if these have come home since."""
    if Segments._closed:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # which gives back what pools without an owner have
        for arena in list(Segments._closed):
            arena.close()


def stray() -> int:
    """How often memory was freed that no arena had handed out."""
    return int(_TABLE[0, _STRAY])
