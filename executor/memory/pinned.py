"""Cache of pinned host memory, shared by all replays, calibrations and planned steps of a process.

    memory = CUDA.take(nbytes)      # uint8[nbytes]; the slab is free again when its last array or tensor dies
    parts = CUDA.take_parts(cuts)   # memory that may be in several slabs
    CUDA.drop()                     # unpins free slabs

Pinning is slow (executor/README.md), so free slabs stay pinned and are reused. If none is large enough, ``take`` unpins
free slabs and pins a new one, ``take_parts`` pins only what they lack. ``HOST`` is the same cache without a driver, for
backends that emulate a GPU.
"""

# Design choices:
# 1. ``cudaHostRegister`` of whole pages: a slab is as large as requested, while PyTorch rounds up to a power of two.
#    The mapping is private (huge pages require it) and absent in forked processes: a write after a fork would
#    copy the page, and the device would keep the old one. A child that reads it is killed (SIGSEGV), which is safer
#    than MADV_WIPEONFORK: zeros in place of parameters would be written to a checkpoint without notice.
# 2. A slab never grows: a copy may not span two registered ranges of host memory.
# 3. A request beyond the available host memory is refused, because the kernel would kill a process instead of failing.

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor.memory.addresses import Driver

Bytes = npt.NDArray[np.uint8]
LEAST_USE = 0.75  # of a slab by a part of memory: else it is unpinned, so that little pinned memory lies idle


class _Slab:
    """Pinned whole pages; ``is_used`` until their last array has died."""

    def __init__(self, pages: mmap.mmap, address: int):
        self.pages = pages
        self.address = address
        self.nbytes = len(pages)
        self.is_used = False

    def release(self) -> None:
        self.is_used = False


class Slabs:
    """Cache of a process's pinned memory.

    Args:
        pin: pins the memory at (address, bytes) for device copies; raises MemoryError.
        unpin: unpins the memory at an address.
        settle: blocks until no copy is in flight.
        inherit_on_fork: whether forked processes inherit the memory.
        place: asks for pages on a NUMA node for the memory at (address, bytes), before anything is written to it.
    """

    def __init__(
        self,
        pin: Callable[[int, int], None],
        unpin: Callable[[int], None],
        settle: Callable[[], None],
        inherit_on_fork: bool = False,
        place: Callable[[int, int], object] = lambda address, nbytes: None,
    ) -> None:
        self._pin = pin
        self._unpin = unpin
        self._settle = settle
        self._place = place
        self._advice = [mmap.MADV_HUGEPAGE, *([] if inherit_on_fork else [mmap.MADV_DONTFORK])]
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Total bytes of all slabs, used and free."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> Bytes:
        """Returns uninitialized memory uint8[nbytes], reserved until all its arrays and tensors have died.

        Raises:
            MemoryError: the host has too little memory, or it cannot be pinned.
        """
        if not nbytes:
            return np.empty(0, np.uint8)
        with self._lock:
            free = [slab for slab in self._slabs if not slab.is_used and slab.nbytes >= nbytes]
            slab = min(free, key=lambda slab: slab.nbytes, default=None)
            if slab:
                self._reuse([slab])
            else:
                self._drop()
                slab = self._pin_slab(nbytes)
            return _memory(slab, nbytes)

    def take_parts(self, cuts: Sequence[int]) -> list[tuple[int, Bytes]]:
        """Returns memory for the bytes from 0 to the last cut, as ``take``, in parts that free slabs hold if possible.

        Args:
            cuts: increasing positions in bytes at which a part may end.

        Returns:
            The first byte of each part, and its memory.
        """
        end = cuts[-1]
        chosen: list[tuple[int, int, _Slab]] = []
        begin = 0
        with self._lock:
            free = sorted((slab for slab in self._slabs if not slab.is_used), key=lambda slab: -slab.nbytes)
            for slab in free if free and free[0].nbytes < end else ():
                stop = max((cut for cut in cuts if cut <= begin + slab.nbytes), default=0)
                if stop == end or stop - begin >= LEAST_USE * slab.nbytes:
                    chosen.append((begin, stop, slab))
                    begin = stop
                if begin == end:
                    break
            if chosen:
                self._reuse([slab for _, _, slab in chosen])
                if begin < end:
                    self._drop()
                try:
                    if begin < end:
                        chosen.append((begin, end, self._pin_slab(end - begin)))
                except MemoryError:
                    for _, _, slab in chosen:
                        slab.is_used = False
                else:
                    return [(begin, _memory(slab, stop - begin)) for begin, stop, slab in chosen]
        return [(0, self.take(end))]

    def _reuse(self, slabs: Sequence[_Slab]) -> None:
        self._settle()  # copies of the previous user may be in flight
        for slab in slabs:
            slab.is_used = True

    def drop(self) -> None:
        """Unpins free slabs and returns them to the system."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        free = [slab for slab in self._slabs if not slab.is_used]
        if free:
            self._settle()
        for slab in free:
            self._slabs.remove(slab)
            self._unpin(slab.address)

    def _pin_slab(self, nbytes: int) -> _Slab:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        message = f"{nbytes:,} bytes of host memory cannot be pinned"
        available_bytes, source = available()
        if size > available_bytes:
            raise MemoryError(f"{message}: {available_bytes:,} are available ({source}); free some, or swap less")
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"{message}: {error}; free some, or swap less") from None
        for advice in self._advice:
            with contextlib.suppress(OSError):  # small pages work where huge pages are unavailable
                pages.madvise(advice)
        address = np.frombuffer(pages, np.uint8, 1).ctypes.data
        self._place(address, size)
        try:
            self._pin(address, size)
        except MemoryError as error:
            raise MemoryError(f"{message}: {error}") from None
        self._slabs.append(_Slab(pages, address))
        return self._slabs[-1]


def _memory(slab: _Slab, nbytes: int) -> Bytes:
    """Returns the first bytes of a slab, which is used until they have died."""
    slab.is_used = True
    memory = np.frombuffer(slab.pages, np.uint8, nbytes)
    weakref.finalize(memory, slab.release).atexit = False  # views and tensors keep the array alive
    return memory


def available(root: Path = Path("/")) -> tuple[int, str]:
    """Returns the bytes of host memory available to this process and the source: the system or a control group's limit.

    File cache counts as available.

    Args:
        root: root of the file system.

    Returns:
        bytes, at least 0, and the source in words.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
    limits = [(1024 * int(fields["MemAvailable"][0]), "MemAvailable in /proc/meminfo"), *_cgroup_limits(root)]
    nbytes, source = min(limits)
    return max(nbytes, 0), source


def _cgroup_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yields the bytes left in the process's control groups (v2 and v1), from the innermost to the outermost."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
            maximum = "memory.max"
            usage = "memory.current"
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            cache = "total_inactive_file"
            maximum = "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit = _read(group / maximum)
            used = _read(group / usage)
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
                yield int(limit) - int(used) + int(stat.get(cache, 0)), f"limit in {group / maximum}"
            if group == top:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def numa_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of a PCI device such as "0000:3B:00.0"; None on machines with one node.

    Args:
        pci_address: domain, bus, device and function.
        root: root of the file system.

    Returns:
        the node's index.
    """
    text = _read(root / f"sys/bus/pci/devices/{pci_address.lower()}/numa_node")
    return int(text) if text.isdigit() else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Asks the kernel for pages on a NUMA node; returns False if it declines, and pages come from any node then.

    Without it they come from the node of the thread that pins them. A copy between a GPU and the other socket's memory
    is slower (torchtitan#3489 measured 115 instead of 330 GB/s on GB200).
    """
    number = {"x86_64": 237, "aarch64": 235}.get(platform.machine())  # of the system call mbind
    if number is None:
        return False
    preferred = 1  # MPOL_PREFERRED
    mask = (ctypes.c_uint64 * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(preferred), mask)
    bits = ctypes.c_ulong(64 * len(mask) + 1)
    return bool(ctypes.CDLL(None).syscall(ctypes.c_long(number), *arguments, bits, ctypes.c_uint(0)) == 0)


def _place_near_gpu(address: int, nbytes: int) -> None:
    text = ctypes.create_string_buffer(16)
    index = torch.cuda.current_device()
    Driver(torch.device("cuda", index))("cuDeviceGetPCIBusId", text, ctypes.c_int(len(text)), ctypes.c_int(index))
    node = numa_node(text.value.decode())
    if node is not None:
        prefer_node(address, nbytes, node)


def _register(address: int, nbytes: int) -> None:
    runtime: Any = torch.cuda.cudart()  # that of PyTorch: all CUDA users of the process share its context
    portable = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
    status = runtime.cudaHostRegister(address, nbytes, portable)
    if int(status):
        with contextlib.suppress(RuntimeError):  # the driver reports the error to the next launch, too
            torch.zeros((), device="cuda")
        reason = runtime.cudaGetErrorString(status)
        raise MemoryError(f"cudaHostRegister failed ({reason}): raise `ulimit -l`, or plan for more memory")


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _synchronize() -> None:
    """Synchronizes every device in use without creating a context on any other."""
    current = torch.cuda.current_device()
    for device in range(torch.cuda.device_count()):
        if device == current or torch.cuda.memory_reserved(device):
            with contextlib.suppress(RuntimeError):  # earlier failures are reported where they occur
                torch.cuda.synchronize(device)


CUDA = Slabs(_register, _unregister, _synchronize, place=_place_near_gpu)
HOST = Slabs(lambda address, nbytes: None, lambda address: None, lambda: None, inherit_on_fork=True)
