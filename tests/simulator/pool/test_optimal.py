"""The exact search, against every order of first-fit on small instances and on MiniMalloc's benchmark."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from experiments.benchmark.packing import perfect
from simulator.pool import Intervals, optimal, smartpool
from simulator.pool.files import load
from simulator.pool.skyline import FITS
from tests.oracle.packing import overlaps
from tests.simulator.pool.test_pool import table

BENCHMARK = Path(__file__).parents[2] / "data" / "minimalloc"
CAPACITY = 1048576


def least_footprint(blocks: Intervals) -> int:
    """By first-fit in every order: a canonical packing is first-fit in the order of its offsets."""
    n = len(blocks)
    apart = np.zeros(n, np.int64)  # all at one address: those that meet are the pairs that overlap
    meets = {
        frozenset(pair) for pair in overlaps(Intervals(blocks.lower, blocks.upper, np.ones(n), blocks.period), apart)
    }
    best = 1 << 62
    for order in itertools.permutations(range(n)):
        ends: dict[int, tuple[int, int]] = {}
        for i in order:
            offset = 0
            for begin, end in sorted(ends[j] for j in ends if frozenset((i, j)) in meets):
                if begin - offset >= blocks.nbytes[i]:
                    break
                offset = max(offset, end)
            ends[i] = offset, offset + int(blocks.nbytes[i])
        best = min(best, max(end for _, end in ends.values()))
    return best


arcs = st.tuples(st.integers(0, 7), st.integers(1, 8), st.integers(1, 6))


@given(st.lists(arcs, min_size=1, max_size=6), st.booleans())
def test_no_smaller_footprint_exists(found: list, circle: bool) -> None:
    blocks = table([(a, a + length, nbytes) for a, length, nbytes in found], **({"period": 8} if circle else {}))
    packing = optimal.pack(blocks, seconds=20, workers=1)
    assert packing.proven
    assert packing.footprint == least_footprint(blocks) == int((packing.offsets + blocks.nbytes).max())
    assert overlaps(blocks, packing.offsets) == []


def test_a_load_that_no_packing_reaches() -> None:
    # On a circle of 3, each of three blocks of 1 meets the two others, but only two are held at once.
    blocks = table([(0, 2, 1), (1, 3, 1), (2, 4, 1)], period=3)
    packing = optimal.pack(blocks, seconds=20)
    assert (blocks.peak_bytes, packing.footprint, packing.proven) == (2, 3, True)


def test_where_greedy_by_size_leaves_a_fragment() -> None:
    # SmartPool ends at 7 here (test_pool.py); with the second 2 at 0 and the other 3 at 2 there is room in 5.
    blocks = table([(0, 2, 3), (1, 4, 2), (3, 6, 2), (4, 6, 3)])
    assert smartpool.pack(blocks).footprint == 7
    packing = optimal.pack(blocks)
    assert (packing.footprint, packing.proven) == (5, True)
    assert overlaps(blocks, packing.offsets) == []


def test_what_is_always_held_lies_at_the_bottom() -> None:
    blocks = table([(0, 4, 10), (3, 7, 5), (1, 3, 2), (2, 4, 3), (0, 1, 2)], period=4)
    packing = optimal.pack(blocks, alignment=4)
    assert sorted(packing.offsets[:2].tolist()) == [0, 8] or sorted(packing.offsets[:2].tolist()) == [0, 12]
    assert packing.proven
    assert packing.footprint == 12 + 8 + 4 + 4
    assert overlaps(blocks.rounded(4), packing.offsets) == []


@pytest.mark.parametrize("n", [30, 100])
def test_a_cut_rectangle_is_put_together_again(n: int) -> None:
    blocks = perfect(n, seed=n)
    packing = optimal.pack(blocks, seconds=20)
    assert (packing.footprint, packing.proven) == (1 << 20, True)
    assert overlaps(blocks, packing.offsets) == []


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=pytest.mark.nightly, id=file.name[0]) if i else pytest.param(file, id=file.name[0])
     for i, file in enumerate(sorted(BENCHMARK.glob("*.csv")))],
)  # fmt: skip
def test_benchmark(file: Path) -> None:
    blocks = load(file).intervals
    if file.name[0] in "DJ":  # their loads are 6 % below the capacity, and what is between is not known
        answer, offsets = optimal._Search(blocks, 0, None).fits(CAPACITY, seconds=60)
        assert answer == FITS and overlaps(blocks, offsets) == [] and (offsets + blocks.nbytes).max() <= CAPACITY
        return
    packing = optimal.pack(blocks, seconds=30)
    assert overlaps(blocks, packing.offsets) == []
    assert packing.proven and packing.footprint == blocks.peak_bytes <= CAPACITY


def test_the_time_is_kept() -> None:
    blocks = load(BENCHMARK / "D.1048576.csv").intervals  # nobody has packed it into its load
    threads = threading.active_count()
    packing = optimal.pack(blocks, seconds=1)  # which ends
    assert not packing.proven
    assert overlaps(blocks, packing.offsets) == []
    assert threading.active_count() == threads


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="alignment: expected at least 1"):
        optimal.pack(table([(0, 1, 1)]), alignment=0)
    for nothing in (table([]), table([(0, 1, 0)])):
        assert optimal.pack(nothing).footprint == 0
