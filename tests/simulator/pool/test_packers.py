"""Tests SmartPool, portfolio and exact search: by hand, against a slow checker, and on MiniMalloc's benchmark."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from experiments.measure.speed.packing import perfect, scattered
from simulator.pool import Intervals, Packing, optimal, portfolio, smartpool
from simulator.pool.files import load
from simulator.pool.skyline import Verdict
from tests.oracle.packing import overlaps
from tests.simulator.pool.test_pool import table

BENCHMARK = Path(__file__).parents[2] / "data" / "minimalloc"
CAPACITY = 1048576
CIRCLE = 20
PACKERS: dict[str, Callable[..., Packing]] = {
    "smartpool": smartpool.pack,
    "first-fit": lambda blocks, alignment=1: smartpool.pack(blocks, alignment, "first"),
    "portfolio": lambda blocks, alignment=1: portfolio.pack(blocks, alignment, work=100_000),
    "optimal": lambda blocks, alignment=1: optimal.pack(blocks, alignment, seconds=20, workers=1),
}
arcs = st.tuples(st.integers(0, CIRCLE - 1), st.integers(1, CIRCLE), st.integers(0, 50))
EVERY = pytest.mark.parametrize("name", PACKERS)


def right(blocks: Intervals, packing: Packing, alignment: int = 1) -> None:
    """Asserts that no two blocks share a byte, and that the footprint is the highest end."""
    rounded = blocks.rounded(alignment)
    assert overlaps(rounded, packing.offsets) == []
    assert not (packing.offsets % alignment).any() and (packing.offsets >= 0).all()
    assert rounded.peak_bytes <= packing.footprint == (packing.offsets + rounded.nbytes).max(initial=0)


@pytest.mark.parametrize("name", [name for name in PACKERS if name != "optimal"])
@given(st.lists(arcs, max_size=25), st.sampled_from([1, 8]), st.booleans())
def test_packings_are_right_and_the_portfolios_no_worse(name: str, found: list, alignment: int, circle: bool) -> None:
    blocks = table([(a, a + d, size) for a, d, size in found], **({"period": CIRCLE} if circle else {}))
    packing = PACKERS[name](blocks, alignment)
    right(blocks, packing, alignment)
    if name == "portfolio":
        assert packing.proven == (packing.footprint == blocks.rounded(alignment).peak_bytes)
        assert all(packing.footprint <= smartpool.pack(blocks, alignment, fit).footprint for fit in smartpool.FITS)


@pytest.mark.parametrize(("name", "n", "seed"), [("portfolio", 24, 0), ("portfolio", 24, 1), ("optimal", 30, 30)])
def test_a_cut_rectangle_is_packed_without_waste(name: str, n: int, seed: int) -> None:
    blocks = perfect(n, seed)
    packing = portfolio.pack(blocks, work=20_000_000) if name == "portfolio" else PACKERS[name](blocks)
    right(blocks, packing)
    assert (packing.footprint, packing.proven) == (2**20, True)


@EVERY
def test_bad_options_and_nothing(name: str) -> None:
    with pytest.raises(ValueError, match="alignment: expected at least 1"):
        PACKERS[name](table([(0, 1, 1)]), 0)
    assert PACKERS[name](table([])).footprint == PACKERS[name](table([(0, 3, 0)])).footprint == 0
    with pytest.raises(ValueError, match="fit: expected one of best, first, got 'worst'"):
        smartpool.pack(table([]), fit="worst")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "ratio"), [("smartpool", 1.15), ("first-fit", 1.07), ("portfolio", 1.04)])
def test_twenty_thousand_blocks(name: str, ratio: float) -> None:
    blocks = scattered(20_000, seed=0)
    assert 1 <= (portfolio.pack(blocks, work=0) if name == "portfolio" else PACKERS[name](blocks)).ratio(blocks) < ratio


@pytest.mark.parametrize(("name", "limit"), [("A", 1.06), pytest.param("K", 1.12, marks=pytest.mark.nightly)])
def test_the_searches_improve_on_every_start(name: str, limit: float) -> None:
    blocks = load(BENCHMARK / f"{name}.1048576.csv").intervals
    start, packing = (portfolio.pack(blocks, work=work) for work in (0, 60_000_000))
    assert overlaps(blocks, packing.offsets) == []
    assert packing.ratio(blocks) < limit < start.ratio(blocks) <= smartpool.pack(blocks, fit="first").ratio(blocks)


def test_work_and_seed_decide() -> None:
    blocks = load(BENCHMARK / "B.1048576.csv").intervals
    one, same, other = (portfolio.pack(blocks, work=10_000_000, seed=seed).offsets.tolist() for seed in (0, 0, 1))
    assert one == same != other


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a clock that advances by one per call: at the start, and after each run."""
    hard = load(BENCHMARK / "D.1048576.csv").intervals
    easy = table([(0, 1, 1), (1, 2, 1)])
    clock = count()
    seen = []
    monkeypatch.setattr(portfolio, "time", SimpleNamespace(monotonic=lambda: seen.append(next(clock)) or seen[-1]))
    assert portfolio.pack(easy, seconds=60).proven and len(seen) <= 2
    for seconds in (0, 9):
        seen.clear()
        assert portfolio.pack(hard, seconds=seconds).ratio(hard) < 1.4
        assert seconds < seen[-1] - seen[0] <= seconds + 2  # asked twice when it is over


def test_offsets_that_leave_no_bits_for_blocks() -> None:
    # 2^61 and a few more bytes: the load is 3 * 2^60 + 2, of sizes whose only common divisor is 1.
    big = 1 << 60
    blocks = table([(0, 2, big), (1, 4, big + 1), (3, 6, big), (4, 6, 2 * big + 1), (5, 7, 1)])
    assert overlaps(blocks, portfolio.pack(blocks, work=1_000_000).offsets) == []


def least_footprint(blocks: Intervals) -> int:
    """Returns the minimum footprint by first-fit in every order: canonical packings are first-fit in offset order."""
    n = len(blocks)
    apart = np.zeros(n, np.int64)  # all at one address: those that meet are the pairs that overlap
    ones = Intervals(blocks.lower, blocks.upper, np.ones(n), blocks.period)
    meets = {frozenset(pair) for pair in overlaps(ones, apart)}
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


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8), st.integers(1, 6)), min_size=1, max_size=6), st.booleans()
)
def test_no_smaller_footprint_exists(found: list, circle: bool) -> None:
    blocks = table([(a, a + length, nbytes) for a, length, nbytes in found], **({"period": 8} if circle else {}))
    packing = optimal.pack(blocks, seconds=20, workers=1)
    right(blocks, packing)
    assert packing.proven and packing.footprint == least_footprint(blocks)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.nightly] * (file.name[0] != "A"), id=file.name[0])
        for file in sorted(BENCHMARK.glob("*.csv"))
    ],
)
def test_benchmark(file: Path) -> None:
    blocks = load(file).intervals
    if file.name[0] in "DJ":  # their loads are 6 % below the capacity, and what is between is not known
        answer, offsets = optimal._Search(blocks, 0, None).fits(CAPACITY, seconds=60)
        assert (
            answer == Verdict.FITS and overlaps(blocks, offsets) == [] and (offsets + blocks.nbytes).max() <= CAPACITY
        )
        return
    packing = optimal.pack(blocks, seconds=30)
    right(blocks, packing)
    assert packing.proven and packing.footprint == blocks.peak_bytes <= CAPACITY


def test_the_time_is_kept() -> None:
    blocks = load(BENCHMARK / "D.1048576.csv").intervals  # no packing with a footprint equal to its load is known
    threads = threading.active_count()
    packing = optimal.pack(blocks, seconds=1)  # which ends
    right(blocks, packing)
    assert not packing.proven and threading.active_count() == threads
