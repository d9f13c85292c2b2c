"""Tests allocators: digests of random blocks, figures of PyTorch's tests, and pools against their definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simulator.compiled.encoding import NEVER
from simulator.pool import ALLOCATORS, Intervals, run
from simulator.pool.online import caching, cnmem, cudamalloc, heap
from simulator.pool.times import allocation_ns
from tests import tiny
from tests.oracle.packing import overlaps
from tests.simulator.pool.test_pool import table

KB = 2**10
MB = 2**20
ONLINE = {"cudamalloc": 1, "caching": 512, "cnmem": 512, "superneurons": 1024}  # name -> unit


def drawn(rng: np.random.Generator, period: int) -> Intervals:
    """Returns random blocks of similar sizes on a circle of 20, or on a line."""
    n = rng.integers(1, 40)
    unit = rng.choice([1, 300, KB, MB // 2, 3 * MB])
    lower = rng.integers(0, 20, n)
    nbytes = rng.integers(0, 7, n) * unit
    return Intervals(lower, lower + rng.integers(1, 21, n), nbytes, period)


def places(name: str) -> Iterator[object]:
    """Yields results of an allocator for random blocks; checks that no two of them share a byte."""
    rng = np.random.default_rng(0)
    for period in (20, NEVER) * 100:
        circle = drawn(rng, period)
        blocks, packing = run(name, circle, alignment=int(rng.choice([1, 8])))
        assert overlaps(blocks, packing.offsets) == []
        assert packing.footprint >= blocks.peak_bytes == circle.peak_bytes
        assert not (packing.offsets % ONLINE.get(name, 1)).any()
        yield packing.offsets.tolist(), *(int(x) for x in (packing.footprint, packing.steps, packing.driver_mallocs))
        yield packing.driver_frees, allocation_ns(name, circle, DRIVER)
        if name == "cnmem" and period == NEVER:
            yield [cnmem.pack(blocks, reserve).offsets.tolist() for reserve in (None, 10 * KB - 1)]
        if name == "caching":
            limit = int(rng.uniform(0.5, 1.5) * packing.footprint)
            yield [caching.serve(blocks, most, grows) for most in (None, limit) for grows in (False, True)]


DRIVER = replace(tiny.MACHINE, malloc_ns=100, free_ns=10, malloc_bytes_per_s=10**9)  # 1 ns a byte
DIGESTS = {
    "cudamalloc": "c68bbc9c80f920b5",
    "caching": "d75e0b269fb1a31f",
    "cnmem": "4e4d0fac530a5e32",
    "superneurons": "ee47287738fca198",
    "smartpool": "b1220223017e8468",
    "smartpool_first": "3bce98307dc6c50f",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_results_equal_the_recorded_digests(name: str) -> None:
    assert sha256(repr(list(places(name))).encode()).hexdigest()[:16] == DIGESTS[name]


@pytest.mark.parametrize(
    ("nbytes", "segments", "reserved"),
    [
        (512, 1, 2 * MB),
        (MB, 2, 4 * MB),  # two fit into a small segment
        (MB + 512, 1, 20 * MB),
        (10 * MB - 512, 2, 40 * MB),  # two fit into a large segment
        (10 * MB + 512, 3, 36 * MB),  # a segment each, rounded up to 12 MiB
    ],
)
def test_caching_makes_the_segments_that_pytorch_tests_for(nbytes: int, segments: int, reserved: int) -> None:
    # ``b = a.clone()``, then five times ``b = b.clone() + 1``: three blocks live at most. The numbers are those of
    # test_graph_memory_stats_and_use_result_after_destroy_graph in PyTorch's test_cuda.py.
    blocks = [(0, 3, nbytes)]
    for k in range(5):
        blocks += [(2 * k + 1, 2 * k + 3, nbytes), (2 * k + 2, 2 * k + 5, nbytes)]
    packing = caching.pack(table(blocks))
    assert (packing.driver_mallocs, packing.footprint) == (segments, reserved)


lives = st.lists(st.tuples(st.integers(0, 19), st.integers(1, 20), st.integers(0, 6)), max_size=25)


@given(lives)
def test_one_pool_is_the_gaps_between_live_blocks(found: list) -> None:
    # The incrementally maintained lists must match those derived from all live blocks.
    blocks = table([(lower, lower + length, n * KB) for lower, length, n in found])
    for pack, choose in ((heap.pack, lambda gaps: gaps[0]), (lambda b: cnmem.pack(b, None), min)):
        offsets = pack(blocks).offsets
        top = 2 * int(blocks.nbytes.sum())
        for i in np.lexsort((np.arange(len(blocks)), blocks.lower)):
            at = blocks.lower[i]
            nbytes = int(blocks.nbytes[i])
            if not nbytes:
                continue
            there = (blocks.lower <= at) & (at < blocks.upper) & (blocks.nbytes > 0)
            there &= (blocks.lower < at) | (np.arange(len(blocks)) < i)
            live = sorted(zip(offsets[there].tolist(), (offsets + blocks.nbytes)[there].tolist(), strict=True))
            ends = [0, *(end for _, end in live)]
            begins = [*(begin for begin, _ in live), top]
            gaps = [(b - e, e) for e, b in zip(ends, begins, strict=True) if b - e >= nbytes]
            assert offsets[i] == choose(gaps)[1]


@pytest.mark.parametrize("name", ALLOCATORS)
def test_run_by_name(name: str) -> None:
    circle = table([(0, 1, 600), (1, 2, 600), (0, 2, 100)], period=2)
    blocks, packing = run(name, circle, alignment=256, seconds=1.0)
    assert (blocks is circle) == (name not in ONLINE)
    assert len(packing.offsets) == len(blocks) == (3 if blocks is circle else 7)
    assert overlaps(blocks, packing.offsets) == []
    assert packing.footprint == {
        "cudamalloc": 700,
        "caching": 2 * MB,
        "cnmem": 1024 + 512,
        "superneurons": 2048,
    }.get(name, 768 + 256)


def test_what_is_refused() -> None:
    circle = table([(0, 1, 8)], period=2)
    for module in (cudamalloc, caching, cnmem, heap):
        with pytest.raises(ValueError, match="unroll the circle"):
            module.pack(circle)
        assert module.pack(table([])).footprint == 0
    with pytest.raises(ValueError, match="reserve_bytes: expected at least 0, got -1"):
        cnmem.pack(table([]), reserve_bytes=-1)
    with pytest.raises(ValueError, match="unknown allocator 'malloc'; expected one of cudamalloc, caching, cnmem"):
        run("malloc", circle)
    with pytest.raises(ValueError, match="unknown allocator"):
        allocation_ns("malloc", circle, tiny.MACHINE)
