"""Pinned host memory: one slab, used by every replay, calibration and planned step of a process, one after the other.

    memory = CUDA.take(nbytes)      # uint8[nbytes]; the slab is free again when the last array or tensor of it dies
    CUDA.drop()                     # unpins what is free

Pinning is slow (executor/README.md), so a slab stays pinned when it is free, and the next who asks gets it. Where none
is large enough, free ones are unpinned and one is made. Choices:

1. ``cudaHostRegister`` of whole pages, so a slab is as large as asked for (PyTorch's own pinned memory is rounded up to
   a power of two), and what is calibrated is what is used. The mapping is private, or no page would be huge, and what
   is pinned is not there in forked processes: a write after a fork would give this one other pages than the device's.
2. What the host has not, it is not asked for: a computer out of memory ends processes instead of saying so.
3. ``HOST`` is the same without a driver, for backends that play a GPU.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE = mmap.PAGESIZE
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class _Slab:
    """Whole pages, pinned; ``used`` until the last array of it has died."""

    def __init__(self, pages: mmap.mmap, address: int):
        self.pages, self.address, self.nbytes, self.used = pages, address, len(pages), False

    def release(self) -> None:
        self.used = False


class Slabs:
    """Pinned memory of a process.

    Args:
        pin: makes (address, bytes) memory that a device copies from and to; raises MemoryError.
        unpin: undoes it, by address.
        settle: returns when no copy is under way any more.
        forks: forked processes have the memory, too.
    """

    def __init__(
        self, pin: Callable[[int, int], None], unpin: Callable[[int], None], settle: Callable[[], None],
        forks: bool = False,
    ) -> None:  # fmt: skip
        self._pin, self._unpin, self._settle = pin, unpin, settle
        self._advice = [mmap.MADV_HUGEPAGE, *([] if forks else [mmap.MADV_DONTFORK])]
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of all slabs, used and free."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> Bytes:
        """Memory of any content, uint8[nbytes]; nobody else has it until all arrays and tensors made of it are gone.

        Raises:
            MemoryError: the host has not so much, or it cannot be pinned.
        """
        if not nbytes:
            return np.empty(0, np.uint8)
        with self._lock:
            free = [slab for slab in self._slabs if not slab.used and slab.nbytes >= nbytes]
            slab = min(free, key=lambda slab: slab.nbytes, default=None)
            if slab:
                self._settle()  # copies of whoever had it
            else:
                self._drop()
                slab = self._make(nbytes)
            slab.used = True
            memory = np.frombuffer(slab.pages, np.uint8, nbytes)
            weakref.finalize(memory, slab.release).atexit = False  # views and tensors hold it
            return memory

    def drop(self) -> None:
        """Gives free slabs back to the system."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        free = [slab for slab in self._slabs if not slab.used]
        if free:
            self._settle()
        for slab in free:
            self._slabs.remove(slab)
            self._unpin(slab.address)

    def _make(self, nbytes: int) -> _Slab:
        size = -(-nbytes // PAGE) * PAGE
        what = f"{nbytes:,} bytes of host memory cannot be pinned"
        left, source = available()
        if size > left:
            raise MemoryError(f"{what}: {left:,} are available ({source})")
        try:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"{what}: {error}") from None
        for advice in self._advice:
            with contextlib.suppress(OSError):  # where there are no huge pages, small ones do
                pages.madvise(advice)
        address = np.frombuffer(pages, np.uint8, 1).ctypes.data
        try:
            self._pin(address, size)
        except MemoryError as error:
            raise MemoryError(f"{what}: {error}") from None
        self._slabs.append(_Slab(pages, address))
        return self._slabs[-1]


def available(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes of host memory that this process can still have, and who says so: the system, or the limit of a control
    group that it is in. What files only cache counts as available. ``root``: of the file system."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    words = {line.partition(":")[0]: line.partition(":")[2].split() for line in lines}
    found = [(1024 * int(words["MemAvailable"][0]), "MemAvailable in /proc/meminfo"), *_groups(root)]
    left, source = min(found)
    return max(left, 0), source


def _groups(root: Path) -> Iterator[tuple[int, str]]:
    """What the limits of the process's control groups leave, from its own to the outermost; versions 2 and 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, most, now, cached = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, cached = root / "sys/fs/cgroup/memory", "total_inactive_file"
            most, now = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, used = _text(group / most), _text(group / now)
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
                yield int(limit) - int(used) + int(stat.get(cached, 0)), f"limit in {group / most}"
            if group == top:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _runtime() -> Any:
    """The CUDA runtime that PyTorch has loaded; whoever else uses CUDA in this process shares its context."""
    import torch

    return torch.cuda.cudart()


def _register(address: int, nbytes: int) -> None:
    runtime = _runtime()
    status = runtime.cudaHostRegister(address, nbytes, PORTABLE)
    if int(status):
        import torch

        with contextlib.suppress(RuntimeError):  # the driver tells the next launch once more
            torch.zeros((), device="cuda")
        raise MemoryError(str(runtime.cudaGetErrorString(status)))


def _unregister(address: int) -> None:
    _runtime().cudaHostUnregister(address)


def _synchronize() -> None:
    """Waits for every device that is used, and makes no context on another."""
    import torch

    current = torch.cuda.current_device()
    for device in range(torch.cuda.device_count()):
        if device == current or torch.cuda.memory_reserved(device):
            with contextlib.suppress(RuntimeError):  # an earlier failure is reported where it happened
                torch.cuda.synchronize(device)


CUDA = Slabs(_register, _unregister, _synchronize)
HOST = Slabs(lambda address, nbytes: None, lambda address: None, lambda: None, forks=True)
