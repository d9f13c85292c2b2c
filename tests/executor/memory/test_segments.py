"""The native functions of a graph's memory pool, called as PyTorch does it: by their addresses, from threads."""

import ctypes
import threading

import numpy as np
import pytest
import torch

from executor.memory import ALIGNMENT, segments
from executor.memory.segments import Segments, functions, stray

MIB = 2**20
# As torch.cuda.memory.CUDAPluggableAllocator declares them; ctypes lets go of Python's lock meanwhile.
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@pytest.fixture(scope="module")
def native():
    allocate, free = functions()
    take, give = ALLOCATE(allocate.address), FREE(free.address)
    return (lambda nbytes, device=0: take(nbytes, device, None)), (lambda at, nbytes=0: give(at, nbytes, 0, None))


@pytest.fixture
def arena():
    memory = np.zeros(8 * MIB, np.uint8)
    made = Segments(memory.ctypes.data + 100, memory.nbytes - 100)
    yield made
    made._row[segments._LIVE] = 0
    made.close()
    assert memory.sum() == 0  # nothing is ever written there


def test_addresses_are_aligned_disjoint_and_inside(native, arena):
    take, _ = native
    base = int(arena._row[segments._BASE])
    assert base % ALIGNMENT == 0 and arena.nbytes % ALIGNMENT == 0 and arena.nbytes >= 8 * MIB - 2 * ALIGNMENT
    with arena.open():
        found = [(at, nbytes) for nbytes in (1, 511, 512, 513, MIB, 2 * MIB, 3) if (at := take(nbytes))]
    assert len(found) == 7 and all(at % ALIGNMENT == 0 for at, _ in found)
    ends = [at + -(-nbytes // ALIGNMENT) * ALIGNMENT for at, nbytes in found]
    assert [at for at, _ in found] == [base, *ends[:-1]] and ends[-1] <= base + arena.nbytes
    assert arena.live == 7 and arena.most_bytes == ends[-1] - base and not arena.refused_bytes


def test_holes_are_used_again_and_what_does_not_fit_is_refused(native, arena):
    take, give = native
    with arena.open():
        a, b, c, d = (take(n * ALIGNMENT) for n in (1, 4, 2, 1))
        give(a)
        give(c)
        assert take(2 * ALIGNMENT) == c and take(ALIGNMENT) == a  # the first hole that is large enough
        give(b)
        give(a)
        assert take(5 * ALIGNMENT) == a  # two holes that touch are one
        assert arena.live == 3 and arena.most_bytes == 8 * ALIGNMENT
        for at in (a, c, d):
            give(at)
        assert take(arena.nbytes + 1) is None and arena.refused_bytes == arena.nbytes + 1
        whole = take(arena.nbytes)
        assert whole and take(1) is None and arena.refused_bytes == 1 and arena.live == 1
        give(whole)
        halves = [take(arena.nbytes // 2 // ALIGNMENT * ALIGNMENT) for _ in range(2)]
        assert all(halves) and take(arena.nbytes // 2) is None
        assert take(0) is None and take(512, device=1) is None  # of another device
    assert take(512) is None  # none is open
    assert arena.most_bytes == arena.nbytes and arena.live == 2


def test_a_free_finds_its_arena_and_no_other_memory(native, arena):
    take, give = native
    memory = np.zeros(MIB, np.uint8)
    other = Segments(memory.ctypes.data, memory.nbytes)
    with arena.open():
        a = take(MIB)
    with other.open():
        b = take(512)
    before = stray()
    give(a + 512)  # inside, where no segment begins
    give(7)
    give(None)  # free(NULL) is no mistake
    assert stray() == before + 2 and (arena.live, other.live) == (1, 1)
    give(a)
    give(b)
    assert (arena.live, other.live) == (0, 0)
    other.close()


def test_threads_get_memory_of_their_own(native):
    """Without Python's lock: every thread writes all it has, and reads it back before it gives it away."""
    take, give = native
    memory = np.zeros(4 * MIB, np.uint8)
    arena = Segments(memory.ctypes.data, memory.nbytes)
    wrong, refused = [], []

    def work(mark):
        rng = np.random.default_rng(mark)
        held = []
        for _ in range(400):
            nbytes = int(rng.integers(1, 64 * 1024))
            if at := take(nbytes):
                ctypes.memset(at, mark, nbytes)
                held.append((at, nbytes))
            else:
                refused.append(mark)
            while held and (not at or rng.random() < 0.55):
                at, nbytes = held.pop(int(rng.integers(len(held))))
                if ctypes.string_at(at, nbytes).strip(bytes([mark])):
                    wrong.append(mark)
                give(at)
        for at, _ in held:
            give(at)

    with arena.open():
        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and arena.live == 0 and 0 < arena.most_bytes <= arena.nbytes
    arena.close()


def test_the_memory_goes_back_once_and_not_before_the_last_segment(native):
    take, give = native
    memory, back = np.zeros(MIB, np.uint8), []
    arena = Segments(memory.ctypes.data, memory.nbytes, release=lambda: back.append(1))
    with arena.open():
        at = take(512)
    arena.close()
    arena.close()
    assert not back
    Segments(memory.ctypes.data, 0).close()
    assert not back  # it is still out
    give(at)
    Segments(memory.ctypes.data, 0).close()
    arena.close()
    assert back == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_that_is_said():
    with pytest.raises(MemoryError, match="the CUDA driver cannot be asked for memory: libcuda"):
        Segments.on_device(torch.device("cuda", 0), 1)
