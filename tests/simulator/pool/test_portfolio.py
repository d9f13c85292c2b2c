"""The portfolio of heuristics: by hand, right by a slow checker, and never worse than where it starts."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from experiments.benchmark.packing import perfect, scattered
from simulator.pool import Intervals, portfolio, smartpool
from simulator.pool.files import load
from tests.oracle.packing import overlaps
from tests.simulator.pool.test_pool import table

BENCHMARK = Path(__file__).parents[2] / "data" / "minimalloc"
CIRCLE = 20
arcs = st.tuples(st.integers(0, CIRCLE - 1), st.integers(1, CIRCLE), st.integers(0, 50))
cases = st.tuples(st.lists(arcs, max_size=25), st.booleans())


def blocks_of(found: list[tuple[int, int, int]], circle: bool) -> Intervals:
    """From (lower, duration, bytes)."""
    return table([(a, a + d, size) for a, d, size in found], **({"period": CIRCLE} if circle else {}))


# ------------------------------------------------------------------------------------------ the whole


def test_it_finds_what_greedy_by_size_misses() -> None:
    # See test_pool: SmartPool ends at 7. 3 lies at 0 and 2 on it; the second 2 at 0, and the other 3 on that.
    blocks = table([(0, 2, 3), (1, 4, 2), (3, 6, 2), (4, 6, 3)])
    packing = portfolio.pack(blocks, seconds=60)
    assert (packing.footprint, packing.proven, packing.steps) == (5, True, 4)
    assert overlaps(blocks, packing.offsets) == []


def test_what_is_always_held_lies_at_the_bottom() -> None:
    # [8, 12) of a period of 10 meets [1, 3), but not [3, 8).
    blocks = table([(8, 12, 4), (2, 12, 5), (1, 3, 2), (3, 8, 6), (0, 10, 1)], period=10)
    packing = portfolio.pack(blocks)
    assert packing.offsets.tolist()[1::3] == [0, 5]
    assert packing.footprint == blocks.peak_bytes == 12 and packing.proven  # 5 + 1, then 4 + 2, or 6
    assert overlaps(blocks, packing.offsets) == []


@given(cases, st.sampled_from([1, 8]))
def test_packings_are_right_and_no_worse_than_smartpool(case: tuple, alignment: int) -> None:
    blocks = blocks_of(*case)
    packing = portfolio.pack(blocks, alignment, work=100_000)
    rounded = blocks.rounded(alignment)
    assert overlaps(rounded, packing.offsets) == []
    assert not (packing.offsets % alignment).any() and (packing.offsets >= 0).all()
    assert packing.footprint == (packing.offsets + rounded.nbytes).max(initial=0)
    assert packing.proven == (packing.footprint == rounded.peak_bytes)
    for fit in smartpool.FITS:
        assert packing.footprint <= smartpool.pack(blocks, alignment, fit).footprint


@pytest.mark.parametrize("seed", range(3))
def test_perfect_packings(seed: int) -> None:
    blocks = perfect(24, seed)
    packing = portfolio.pack(blocks, work=20_000_000)
    assert packing.footprint == 2**20 and packing.proven
    assert overlaps(blocks, packing.offsets) == []


@pytest.mark.parametrize(("name", "limit"), [("A", 1.06), ("F", 1.06), ("K", 1.12)])
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
    """Of a clock that goes on by one each time that it is asked: at the beginning, after each run."""
    hard, easy = load(BENCHMARK / "D.1048576.csv").intervals, table([(0, 1, 1), (1, 2, 1)])
    clock, seen = count(), []
    monkeypatch.setattr(portfolio, "time", SimpleNamespace(monotonic=lambda: seen.append(next(clock)) or seen[-1]))
    assert portfolio.pack(easy, seconds=60).proven and len(seen) <= 2
    for seconds in (0, 9):
        seen.clear()
        assert portfolio.pack(hard, seconds=seconds).ratio(hard) < 1.4
        assert seconds < seen[-1] - seen[0] <= seconds + 2  # asked twice when it is over


@pytest.mark.nightly
def test_twenty_thousand_blocks() -> None:
    blocks = scattered(20_000, seed=0)
    packing = portfolio.pack(blocks, work=0)
    assert 1 <= packing.ratio(blocks) < 1.04  # SmartPool's first-fit: 1.06


def test_offsets_that_leave_no_bits_for_blocks() -> None:
    # 2^61 and a few more bytes: the load is 3 * 2^60 + 2, of sizes whose only common divisor is 1.
    big = 1 << 60
    blocks = table([(0, 2, big), (1, 4, big + 1), (3, 6, big), (4, 6, 2 * big + 1), (5, 7, 1)])
    packing = portfolio.pack(blocks, work=1_000_000)
    assert overlaps(blocks, packing.offsets) == []


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="alignment: expected at least 1"):
        portfolio.pack(table([]), alignment=0)
    assert portfolio.pack(table([])).footprint == portfolio.pack(table([(0, 3, 0)])).footprint == 0
