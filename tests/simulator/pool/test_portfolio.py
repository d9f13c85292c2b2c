"""The portfolio of heuristics: by hand, against a slow search of each part, and never worse than where it starts."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
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


def skyline(blocks: Intervals, priority: list[float], limit: int = 1 << 40) -> tuple[int, list[int], list[float]]:
    """Footprint, offsets and the priorities afterwards."""
    offsets, priorities = np.full(len(blocks), -1), np.array(priority)
    footprint, _ = portfolio._skyline(portfolio._blocks(blocks), priorities, limit, offsets)
    return int(footprint), offsets.tolist(), priorities.tolist()


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


# ------------------------------------------------------------------------------------------- its parts


def test_sections_are_the_mallocs_that_no_free_parts() -> None:
    # Mallocs at 0 and 1, a free at 2 with a malloc, a malloc at 3, the rest are frees: [0, 2) and [2, 9).
    first, covers, m = portfolio.sections(table([(0, 2, 1), (1, 9, 1), (2, 5, 1), (3, 4, 1)]))
    assert (first.tolist(), covers.tolist(), m) == ([0, 0, 1, 1], [1, 2, 1, 1], 2)
    # On a circle of 10: the free of [8, 11) at 1 is in the section of 8 still.
    first, covers, m = portfolio.sections(table([(8, 11, 1), (2, 4, 1), (4, 12, 1)], period=10))
    assert (first.tolist(), covers.tolist(), m) == ([1, 0, 1], [1, 1, 1], 2)


def test_the_skyline_fills_basins() -> None:
    # Sections [0, 2) and [2, 4). By priority 4 goes to the ground of both, 3 on it at the left, and 1 beside it, at
    # the right. That is a basin of 5 with a bank at 7 in which nothing lies any more, so that 2 goes to 7.
    blocks, priority = table([(0, 4, 2), (0, 2, 3), (2, 4, 1), (0, 4, 4)]), [1.0, 2.0, 1.0, 3.0]
    for limit in (1 << 40, 9):
        assert skyline(blocks, priority, limit) == (9, [7, 4, 4, 0], priority)
    # 8 is too little for the left, above 4 there wait 3 + 2: its blocks get a higher priority.
    footprint, _, after = skyline(blocks, priority, 8)
    blame = portfolio.BLAME
    assert (footprint, after) == (portfolio.NOTHING_WAITS, [blame, 2 * blame, 1.0, 3 * blame])


@given(cases, st.integers(0, 5))
def test_skylines_are_packings(case: tuple, seed: int) -> None:
    blocks = blocks_of([b for b in case[0] if b[2]] or [(0, 1, 1)], case[1])
    priority = np.random.default_rng(seed).random(len(blocks)) + 0.1
    footprint, offsets, _ = skyline(blocks, priority.tolist())
    assert overlaps(blocks, np.array(offsets)) == []
    assert footprint == (np.array(offsets) + blocks.nbytes).max()
    assert skyline(blocks, priority.tolist(), footprint)[0] == footprint
    failed, _, after = skyline(blocks, priority.tolist(), footprint - 1)
    assert failed == portfolio.NOTHING_WAITS
    first, covers, m = portfolio.sections(blocks)
    held = [((s - first) % m < covers).tolist() for s in range(m)]
    assert (after > priority).tolist() in held  # those of one section


@given(cases, st.integers(0, 24))
def test_neighbours_are_those_that_meet(case: tuple, chosen: int) -> None:
    blocks = blocks_of([b for b in case[0] if b[2]] or [(0, 1, 1)], case[1])
    n, block = len(blocks), chosen % len(blocks)
    offsets = np.arange(n)[::-1].copy()
    offsets[block], offsets[::7] = -1, -1
    begins = np.empty(n, np.int64)
    d, _ = portfolio._neighbours(portfolio._blocks(blocks), offsets, block, 8, begins)
    ones = Intervals(blocks.lower, blocks.upper, np.ones(n, np.int64), blocks.period)
    meet = {i + j - block for i, j in overlaps(ones, np.zeros(n, np.int64)) if block in (i, j)}
    expected = sorted((int(offsets[j]), j) for j in meet if offsets[j] >= 0)
    assert [divmod(int(key), 256) for key in begins[:d]] == expected


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(1, 5)), max_size=8), st.integers(1, 12))
def test_the_cheapest_offset(placed: list[tuple[int, int, int]], size: int) -> None:
    """Against every offset; ``placed``: begin, size, weight."""
    target, rng = 40, np.random.default_rng(0)
    begins = np.array(sorted(begin << 8 | j for j, (begin, _, _) in enumerate(placed)), np.int64)
    ends = np.array(sorted((begin + height) << 8 | j for j, (begin, height, _) in enumerate(placed)), np.int64)
    weight = np.array([w for _, _, w in placed], np.float64)

    def cost(offset: int) -> int:
        return sum(w for begin, height, w in placed if begin < offset + size and offset < begin + height)

    offset = int(portfolio._cheapest(begins, ends, 8, size, target, weight, rng))
    assert 0 <= offset <= target - size
    assert cost(offset) == min(map(cost, range(target - size + 1)))
