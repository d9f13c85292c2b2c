"""Tests of the native allocator functions, called as PyTorch calls them: by address and from several threads."""

import ctypes
import threading

import numpy as np
import pytest
import torch

from executor.memory import ALIGNMENT
from executor.memory.addresses import Arena, functions, served

MIB = 2**20
# Signatures of torch.cuda.memory.CUDAPluggableAllocator; ctypes releases the GIL during a call.
ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@pytest.fixture(scope="module")
def native():
    allocate, free = functions()
    take = ALLOCATE(allocate.address)
    give = FREE(free.address)
    return (lambda nbytes, device=0: take(nbytes, device, None)), (lambda at, nbytes=0: give(at, nbytes, 0, None))


@pytest.fixture
def arena():
    instance = Arena(100 * MIB + 100, 8 * MIB - 100)
    yield instance
    instance._row["live"] = 0
    instance.close()


def test_a_first_pass_gives_every_request_an_address_of_its_own(native, arena):
    request, free = native
    assert arena.base % ALIGNMENT == 0 and arena.nbytes % ALIGNMENT == 0 and arena.nbytes >= 8 * MIB - 2 * ALIGNMENT
    sizes = [1, 511, 512, 513, MIB, 2 * MIB, 3]
    with arena.serving():
        received = [request(nbytes) for nbytes in sizes]
        free(received[0])
        received.append(request(1))  # the first pass reuses no address
        assert served().tolist() == [[nbytes, address] for nbytes, address in zip([*sizes, 1], received, strict=True)]
        ends = [
            address + -(-nbytes // ALIGNMENT) * ALIGNMENT for address, nbytes in zip(received, [*sizes, 1], strict=True)
        ]
        assert received == [arena.base, *ends[:-1]] and ends[-1] <= arena.base + arena.nbytes
        assert arena.live == 7 and not arena.refused_bytes
        assert request(arena.nbytes) is None and arena.refused_bytes == arena.nbytes
        assert request(0) is None and request(512, device=1) is None  # of another device
    assert request(512) is None  # no arena serves


def test_a_second_pass_gives_packed_addresses_and_refuses_what_was_not_asked_for(native, arena):
    request, free = native
    packed = np.array([[512, arena.base + 1024], [3 * MIB, arena.base], [512, arena.base + 1024]])
    for position, nbytes in ((0, 1024), (1, 512), (2, MIB), (3, 512)):
        with arena.serving(packed):
            for size, address in packed[:position].tolist():
                assert request(size) == address
                free(address)
            assert request(nbytes) is None and arena.refused_bytes == nbytes
            assert served().tolist() == packed[:position].tolist()


def test_a_free_finds_its_arena_and_no_other_memory(native, arena):
    request, free = native
    other = Arena(200 * MIB, MIB)
    with arena.serving():
        a = request(MIB)
    with other.serving():
        b = request(512)
    free(7)
    free(None)  # free(NULL) is valid
    assert (arena.live, other.live) == (1, 1)
    free(a)
    free(b)
    assert (arena.live, other.live) == (0, 0)
    other.close()


def test_threads_get_addresses_of_their_own(native):
    """Calls from several threads without the GIL get distinct addresses."""
    request, free = native
    arena = Arena(300 * MIB, 64 * MIB)
    received = []

    def work():
        for _ in range(400):
            received.append(request(512))
            free(received[-1])

    with arena.serving():
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(served()) == 2400
    assert len(set(received)) == 2400 and arena.live == 0
    arena.close()


def test_memory_is_freed_once_after_the_last_segment(native):
    request, free = native
    releases = []
    arena = Arena(400 * MIB, MIB, release=lambda: releases.append(1))
    with arena.serving():
        address = request(512)
    arena.close()
    arena.close()
    assert not releases
    Arena(500 * MIB, 0).close()
    assert not releases  # it is still out
    free(address)
    Arena(500 * MIB, 0).close()
    arena.close()
    assert releases == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("make", [Arena.resident, Arena.aliased])
def test_a_missing_driver_is_reported(make):
    with pytest.raises(MemoryError, match=r"the CUDA driver is missing \(libcuda.*\): install it"):
        make(torch.device("cuda", 0), 1)
