"""Tests online allocators: hand-computed differences, and random blocks against a slow checker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simulator.pool import ALLOCATORS, Intervals, Packing, run
from simulator.pool.online import caching, cnmem, cudamalloc, heap
from simulator.pool.times import STEP_NS, allocation_ns
from tests import tiny
from tests.oracle.packing import overlaps
from tests.simulator.pool.test_pool import table

KB, MB = 2**10, 2**20
ONLINE = {"cudamalloc": 1, "caching": 512, "cnmem": 512, "superneurons": 1024}  # name -> unit


def in_units(packing: Packing, unit: int) -> tuple[list[float], float]:
    """Returns offsets and footprint in units of the allocator's granularity."""
    return (packing.offsets / unit).tolist(), packing.footprint / unit


# (lower, upper, KB): a 4, b 1, c 2 and d 1 lie side by side at 0, 4, 5 and 7. Then a and c go, e 2 and f 1 come.
HOLES = table([(0, 2, 4 * KB), (0, 9, KB), (0, 3, 2 * KB), (0, 9, KB), (3, 9, 2 * KB), (3, 9, KB)])


# Free in the order b (middle), a, c: then all of [0, 6) is one piece, and d takes it.
MERGED = table([(0, 2, 2 * KB), (0, 1, 2 * KB), (0, 3, 2 * KB), (3, 4, 6 * KB)])


@pytest.mark.parametrize(("packing", "offsets", "footprint", "calls"), [
    # CnMem: free are [0, 4), [5, 7) and what is above 8. e fits c's place; f takes the smaller of the other two.
    # Of 10 KB the piece above 8 has 2: as many as [5, 7), which is lower, and fewer than [0, 4).
    (cnmem.pack(HOLES, None), [0, 4, 5, 7, 5, 0], 8, (1, 0)),
    (cnmem.pack(HOLES, 10 * KB), [0, 4, 5, 7, 5, 8], 10, (1, 0)),
    (cnmem.pack(MERGED, 6 * KB), [0, 2, 4, 0], 6, (1, 0)),
    (heap.pack(HOLES), [0, 4, 5, 7, 0, 2], 8, (1, 0)),  # the first node
    (heap.pack(MERGED), [0, 2, 4, 0], 6, (1, 0)),
    (cudamalloc.pack(HOLES), [0, 4, 5, 7, 8, 10], 8, (6, 6)),  # what it needs, and no address twice
    (caching.pack(HOLES), [0, 4, 5, 7, 5, 0], 2 * KB, (1, 0)),  # as CnMem, from a small segment of 2 MiB
])  # fmt: skip
def test_where_blocks_go(packing: Packing, offsets: list[int], footprint: int, calls: tuple[int, int]) -> None:
    assert in_units(packing, KB) == (offsets, footprint)
    assert (packing.driver_mallocs, packing.driver_frees) == calls


def test_cnmem_does_not_merge_what_it_got_from_two_cudamallocs() -> None:
    blocks = table([(0, 2, 2 * KB), (0, 2, 2 * KB), (2, 3, 4 * KB)])
    grown = cnmem.pack(blocks)
    assert in_units(grown, KB) == ([0, 2, 4], 8)  # [0, 2) and [2, 4) are free when 4 are asked for
    # Used list, newest first: b a. Freeing a looks at both, and at no free piece; freeing b at one and at [0, 2); c
    # at the two pieces, and at both again to put what cudaMalloc gives above them; freeing c at one and at two.
    assert (grown.steps, grown.driver_mallocs) == (2 + 0 + 1 + 1 + 2 + 2 + 1 + 2, 3)
    whole = cnmem.pack(blocks, reserve_bytes=4 * KB - 1)  # rounded up to 4 KB
    assert in_units(whole, KB) == ([0, 2, 0], 4)
    assert whole.driver_mallocs == cnmem.pack(blocks, reserve_bytes=None).driver_mallocs == 1


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


def test_caching_splits_small_blocks_down_to_512_bytes() -> None:
    # 600 and 1536 bytes lie at 0 and 1024, 512 at 2560. Then 1536 goes: 1000 (1024) takes its place, which has 512
    # left; they go to the next.
    blocks = table([(0, 9, 600), (0, 2, 1536), (0, 9, 512), (2, 9, 1000), (2, 9, 512)])
    assert caching.pack(blocks).offsets.tolist() == [0, 1024, 2560, 1024, 2048]


def test_caching_splits_large_blocks_only_if_more_than_1_mib_is_left() -> None:
    # 11 MiB leave 1 of their segment of 12, which stays with them; 10.5 MiB leave 1.5, where 1.25 fit.
    blocks = table([(0, 9, 11 * MB), (0, 9, 21 * MB // 2), (1, 9, 5 * MB // 4), (1, 9, MB)])
    packing = caching.pack(blocks)
    assert in_units(packing, MB) == ([0, 12, 22.5, 24], 26)  # 1 MiB is a small request: a segment of 2 MiB
    assert packing.driver_mallocs == 3


def test_caching_merges_within_a_segment_only() -> None:
    blocks = table([(0, 1, 4 * MB), (0, 1, 4 * MB), (1, 2, 9 * MB)])
    assert in_units(caching.pack(blocks), MB) == ([0, 4, 0], 20)
    blocks = table([(0, 1, 12 * MB), (0, 1, 12 * MB), (1, 2, 20 * MB), (2, 3, 12 * MB)])
    assert in_units(caching.pack(blocks), MB) == ([0, 12, 24, 0], 44)  # the lowest of the two smallest


lives = st.lists(st.tuples(st.integers(0, 19), st.integers(1, 20), st.integers(0, 6)), max_size=25)
units = st.sampled_from([1, 300, 1024, MB // 2, 3 * MB])


@given(lives, units, st.sampled_from(list(ONLINE)))
def test_no_two_blocks_share_a_byte(found: list, unit: int, name: str) -> None:
    blocks = table([(lower, lower + length, n * unit) for lower, length, n in found])
    line, packing = run(name, blocks)
    again = run(name, blocks)[1]
    assert line is blocks
    assert overlaps(blocks, packing.offsets) == []
    assert not (packing.offsets % ONLINE[name]).any()
    assert packing.footprint >= blocks.peak_bytes
    if name != "cudamalloc":  # its addresses are virtual
        assert packing.footprint >= (packing.offsets + blocks.nbytes).max(initial=0)
    assert packing.offsets.tolist() == again.offsets.tolist()
    one = np.zeros(1)  # == of longer arrays has no truth value
    assert replace(packing, offsets=one) == replace(again, offsets=one)


@given(lives)
def test_one_pool_is_the_gaps_between_live_blocks(found: list) -> None:
    # The incrementally maintained lists must match those derived from all live blocks.
    blocks = table([(lower, lower + length, n * KB) for lower, length, n in found])
    for pack, choose in ((heap.pack, lambda gaps: gaps[0]), (lambda b: cnmem.pack(b, None), min)):
        offsets = pack(blocks).offsets
        top = 2 * int(blocks.nbytes.sum())
        for i in np.lexsort((np.arange(len(blocks)), blocks.lower)):
            at, nbytes = blocks.lower[i], int(blocks.nbytes[i])
            if not nbytes:
                continue
            there = (blocks.lower <= at) & (at < blocks.upper) & (blocks.nbytes > 0)
            there &= (blocks.lower < at) | (np.arange(len(blocks)) < i)
            live = sorted(zip(offsets[there].tolist(), (offsets + blocks.nbytes)[there].tolist(), strict=True))
            ends, begins = [0, *(end for _, end in live)], [*(begin for begin, _ in live), top]
            gaps = [(b - e, e) for e, b in zip(ends, begins, strict=True) if b - e >= nbytes]
            assert offsets[i] == choose(gaps)[1]


@given(lives, st.sampled_from(list(ONLINE)))
def test_a_circle_is_unrolled(found: list, name: str) -> None:
    circle = table([(lower, lower + length, n * KB) for lower, length, n in found], period=20)
    blocks, packing = run(name, circle)
    assert overlaps(blocks, packing.offsets) == []
    assert blocks.peak_bytes == circle.peak_bytes
    assert len(blocks) >= len(circle)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_run_by_name(name: str) -> None:
    circle = table([(0, 1, 600), (1, 2, 600), (0, 2, 100)], period=2)
    blocks, packing = run(name, circle, alignment=256, seconds=1.0)
    assert (blocks is circle) == (name not in ONLINE)
    assert len(packing.offsets) == len(blocks) == (3 if blocks is circle else 7)
    assert overlaps(blocks, packing.offsets) == []
    assert packing.footprint == {
        "cudamalloc": 700, "caching": 2 * MB, "cnmem": 1024 + 512, "superneurons": 2048,
    }.get(name, 768 + 256)  # fmt: skip


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


DRIVER = replace(tiny.MACHINE, malloc_ns=100, free_ns=10, malloc_bytes_per_s=10**9)  # 1 ns a byte


def test_time_of_an_iteration() -> None:
    circle = table([(0, 2, 500), (0, 1, 1000), (1, 2, 3000)], period=2)  # w a b
    assert allocation_ns("cudamalloc", circle, DRIVER) == 2 * 100 + 2 * 10 + 4000  # w was there before
    # A look-up among three entries is two levels deep; a and b are looked up.
    assert allocation_ns("smartpool", circle, DRIVER) == 2 * 2 * STEP_NS
    # CnMem has a piece for a and one for b. Freeing b looks at b, the newest used block, and at a's piece; mallocs of
    # a at both pieces; freeing a at a and at b's piece; mallocs of b at both.
    assert allocation_ns("cnmem", circle, DRIVER) == (1 + 1 + 2 + 1 + 1 + 2) * STEP_NS
    # SuperNeurons: w lies at 0, a or b at 1, the rest is one node. A free looks at the hash table and at that node,
    # a malloc at the one node that is left.
    assert allocation_ns("superneurons", circle, DRIVER) == 2 * (1 + 1 + 1) * STEP_NS


ONE_BY_ONE = table([(0, 1, 12 * MB), (2, 3, 14 * MB)])
PART = table([(0, 3, 3 * MB // 2), (1, 2, 20 * MB)])
GROWN = table([(0, 1, 30 * MB), (2, 3, 50 * MB)])


@pytest.mark.parametrize(("blocks", "limit", "expandable", "reserved"), [
    # Two segments, one of which is returned when memory is short.
    (ONE_BY_ONE, None, False, 26 * MB), (ONE_BY_ONE, 14 * MB, False, 14 * MB), (ONE_BY_ONE, 14 * MB - 1, False, None),
    (table([(0, 2, 12 * MB), (1, 3, 14 * MB)]), 26 * MB, False, 26 * MB),
    (table([(0, 2, 12 * MB), (1, 3, 14 * MB)]), 25 * MB, False, None),
    (PART, 40 * MB, False, 40 * MB), (PART, 39 * MB, False, None),  # a segment stays of which a part is in use
    # 30 MiB, given back, then 50: 40 MiB mapped, and 20 more behind them; by default two segments.
    (GROWN, None, True, 60 * MB), (GROWN, None, False, 80 * MB), (GROWN, 59 * MB, True, None),
    (table([(0, 3, MB), (1, 2, 3 * MB // 2)]), None, True, 22 * MB),  # of two pools
])  # fmt: skip
def test_caching_under_a_limit(blocks: Intervals, limit: int | None, expandable: bool, reserved: int | None) -> None:
    found, served = caching.serve(blocks, limit, expandable)
    assert served == (reserved is not None) and (not served or found == reserved)


@given(lives)
def test_expandable_segments_reserve_what_is_in_use_at_least(rows: list[tuple[int, int, int]]) -> None:
    blocks = table([(lower, lower + length, nbytes * KB) for lower, length, nbytes in rows])
    reserved, served = caching.serve(blocks, expandable=True)
    assert served and reserved >= blocks.rounded(512).peak_bytes and reserved % (2 << 20) == 0
