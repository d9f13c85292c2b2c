"""Tests of pinned memory: slabs of whole pages are reused, and requests beyond the host's memory are refused."""

import ctypes
import faulthandler
import gc
import os
import platform
import signal
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.memory.engines import Engines
from executor.memory.pinned import CUDA, HOST, Slabs, available, numa_node, prefer_node
from executor.training.memory_source import slab

TREE = {"proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    600 kB\n"}


class Driver:
    """Records which memory is pinned."""

    def __init__(self):
        self.pinned = {}
        self.calls = []
        self.settled = 0
        self.slabs = Slabs(self.pin, self.unpin, self.settle)

    def pin(self, address, nbytes):
        if nbytes > 100 * PAGESIZE:
            raise MemoryError("the driver says no")
        assert address % PAGESIZE == 0
        self.pinned[address] = nbytes
        self.calls.append(nbytes)

    def unpin(self, address):
        del self.pinned[address]

    def settle(self):
        self.settled += 1


class Parts(Engines):
    """Engines whose pinned memory comes from these slabs."""

    def __init__(self, slabs):
        self.pinned = slabs.take_parts


@pytest.fixture
def driver():
    return Driver()


def test_one_slab_serves_all_in_turn(driver):
    for nbytes in (3 * PAGESIZE, PAGESIZE + 1, 3 * PAGESIZE, 17):
        memory = driver.slabs.take(nbytes)
        assert memory.shape == (nbytes,) and memory.dtype == np.uint8
        memory[:] = 7
        del memory
    assert driver.calls == [3 * PAGESIZE] and driver.settled == 3  # once before each of the three reuses


def test_a_slab_that_is_too_small_goes_first(driver):
    assert len(driver.slabs.take(0)) == 0 and not driver.calls
    driver.slabs.take(2 * PAGESIZE)
    memory = driver.slabs.take(5 * PAGESIZE - 1)  # rounded to whole pages, not to a power of two
    assert list(driver.pinned.values()) == [5 * PAGESIZE] and len(memory) == 5 * PAGESIZE - 1


def test_growing_shapes_pin_what_the_last_one_lacked(driver):
    """Slots of a shape may be in several slabs; memory of one array would be pinned five times."""
    for slots in (10, 20, 32, 41, 50):
        sizes = [PAGESIZE - 600] * slots
        places = slab(Parts(driver.slabs), sizes, [i * PAGESIZE for i in range(slots)])
        for i, place in enumerate(places):
            assert place.shape == (sizes[i],)
            place.fill_(i)
        assert all(bool((place == i).all()) for i, place in enumerate(places))
        del place, places
        gc.collect()
    assert driver.calls == [n * PAGESIZE for n in (10, 10, 12, 9, 9)] and driver.slabs.nbytes == 50 * PAGESIZE
    assert len(driver.slabs.take_parts([60 * PAGESIZE])) == 1  # an array may be in one slab only
    assert driver.slabs.nbytes == 60 * PAGESIZE


def test_parts_that_would_leave_a_slab_idle_are_pinned_anew(driver):
    driver.slabs.take(8 * PAGESIZE)
    assert [begin for begin, _ in driver.slabs.take_parts([PAGESIZE, 9 * PAGESIZE])] == [0]
    assert driver.calls == [8 * PAGESIZE, 9 * PAGESIZE] and driver.slabs.nbytes == 9 * PAGESIZE


def test_parts_that_cannot_be_pinned_leave_free_slabs(driver):
    driver.slabs.take(8 * PAGESIZE)
    with pytest.raises(MemoryError, match="the driver says no"):
        driver.slabs.take_parts([8 * PAGESIZE, 200 * PAGESIZE])
    driver.slabs.drop()
    assert driver.slabs.nbytes == 0


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
def test_the_node_of_a_gpu(text, node, tmp_path):
    """Machines with one node give -1."""
    if text is not None:
        (tmp_path / "sys/bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices/0000:3b:00.0/numa_node").write_text(text)
    assert numa_node("0000:3B:00.0", tmp_path) == node


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of get_mempolicy is x86-64's")
def test_pages_are_placed_before_they_are_pinned():
    """The policy of the memory is that of the node when the driver pins it."""
    policies = []

    def pin(address, nbytes):
        mode = ctypes.c_int(-1)
        mask = (ctypes.c_ulong * 16)()
        system = ctypes.CDLL(None)
        of_address = ctypes.c_ulong(2)  # MPOL_F_ADDR
        arguments = (ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_void_p(address), of_address)
        assert system.syscall(ctypes.c_long(239), *arguments) == 0  # get_mempolicy
        policies.append((mode.value, mask[0]))

    def place(address, nbytes):
        assert prefer_node(address, nbytes, 0)

    Slabs(pin, lambda address: None, lambda: None, place=place).take(3 * PAGESIZE)
    Slabs(pin, lambda address: None, lambda: None).take(3 * PAGESIZE)
    assert policies == [(1, 1), (0, 0)]  # preferred node 0; the default


def test_used_memory_is_not_reused(driver):
    first = driver.slabs.take(2 * PAGESIZE)
    view = torch.frombuffer(first, dtype=torch.uint8, count=8, offset=16).view(torch.int64)
    part = first[100:200]
    second = driver.slabs.take(PAGESIZE)
    assert driver.calls == [2 * PAGESIZE, PAGESIZE]
    second[:] = 1
    del first
    gc.collect()
    driver.slabs.drop()
    assert len(driver.pinned) == 2 and view.shape == (1,)  # a tensor and a view keep the slab alive
    del view
    driver.slabs.drop()
    assert len(driver.pinned) == 2
    del part, second
    driver.slabs.drop()
    assert not driver.pinned and driver.slabs.nbytes == 0


def test_failed_allocations_raise_and_leave_nothing(driver):
    with pytest.raises(MemoryError, match=r"^4,611,686,018,427,387,904 bytes of host memory cannot be pinned: .* are "):
        driver.slabs.take(2**62)
    with pytest.raises(MemoryError, match=r"^413,696 bytes of host memory cannot be pinned: the driver says no$"):
        driver.slabs.take(413_696)  # 101 pages
    assert not driver.pinned and driver.slabs.nbytes == 0


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "left", "source"),
    [
        ({}, 614_400, "MemAvailable"),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": "5000",
                "sys/fs/cgroup/a/b/memory.current": "3",
                "sys/fs/cgroup/a/memory.current": "1800",
                "sys/fs/cgroup/a/memory.stat": "anon 1000\ninactive_file 800\n",
            },
            4000,
            "cgroup/a/memory.max",
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,memory:/x\n1:cpu:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "900",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
            },
            0,
            "memory.limit_in_bytes",
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "9999999999",
                "sys/fs/cgroup/memory.current": "1",
            },
            614_400,
            "MemAvailable",
        ),
    ],
)
def test_what_is_available_by_hand(tmp_path, files, left, source):
    nbytes, origin = available(tree(tmp_path, TREE | files))
    assert nbytes == left and source in origin
    assert 2**20 < available()[0] < 2**50  # on this machine


@pytest.mark.parametrize("slabs", ["driver", HOST])
def test_huge_pages_are_allowed_and_children_inherit_no_pinned_memory(slabs, request):
    """Checks the mapping's flags in /proc/self/smaps: huge pages require a private mapping."""
    memory = (request.getfixturevalue("driver").slabs if slabs == "driver" else slabs).take(64 * PAGESIZE)
    address = memory.ctypes.data
    flags_line = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.partition(" ")[0]
        if "-" in first:
            begin, end = (int(x, 16) for x in first.split("-"))
        elif line.startswith("VmFlags:") and begin <= address < end:
            flags_line = line
    flags = flags_line.split()[1:]
    assert "hg" in flags and "sh" not in flags and ("dc" in flags) == (slabs == "driver")


def test_a_child_that_reads_pinned_memory_is_killed(driver):
    """Zeros in place of the parent's parameters would be taken for parameters."""
    memory = driver.slabs.take(PAGESIZE)
    memory[:] = 7
    if not (child := os.fork()):
        faulthandler.disable()
        os._exit(int(memory[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_copies_from_it_while_the_host_goes_on():
    memory = CUDA.take(2**26 + 1)
    assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    memory[:] = np.arange(len(memory), dtype=np.uint64).astype(np.uint8)
    device = torch.empty(len(memory), dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(10_000_000)
    before = torch.cuda.Event()
    device.copy_(torch.frombuffer(memory, dtype=torch.uint8), non_blocking=True)
    before.record()
    assert not before.query()  # issued, but not finished
    torch.cuda.synchronize()
    assert np.array_equal(device.cpu().numpy(), memory)
    address = memory.ctypes.data
    del memory
    again = CUDA.take(2**25)
    assert again.ctypes.data == address
    del again
    CUDA.drop()
    assert CUDA.nbytes == 0
