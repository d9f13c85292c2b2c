"""Lifetimes by hand, and packings that a slow checker looks over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simulator import Kernel, Plan, Program, Swap, Tensor, simulate
from simulator.pool import Intervals, Lifetimes, program_lifetimes, smartpool, timeline_lifetimes
from simulator.schedule import lower
from tests import tiny
from tests.oracle.packing import overlaps
from tests.strategies import machines, plans, programs
from tests.tiny import A1, A2, A3, A4, G2, G3, G4, W


def table(blocks: list[tuple[int, int, int]], **period: int) -> Intervals:
    """From (lower, upper, bytes)."""
    return Intervals(*np.array(blocks, np.int64).reshape(-1, 3).T, **period)


def in_ns(lives: Lifetimes, iteration_ns: int) -> list[tuple[int, int, int]]:
    """(owner, start, end) of every block, the end past the iteration where the block is."""
    times = [*lives.time_ns.tolist(), *(lives.time_ns + iteration_ns).tolist(), 2 * iteration_ns]
    lower, upper = lives.intervals.lower.tolist(), lives.intervals.upper.tolist()
    return sorted((t, times[a], times[b]) for t, a, b in zip(lives.owner.tolist(), lower, upper, strict=True))


# ------------------------------------------------------------------------------------------- lifetimes


def test_lifetimes_of_a_program() -> None:
    lives = program_lifetimes(tiny.PROGRAM)
    # Kernels f1 f2 f3 f4 b4 b3 b2 b1 are 0 to 7; see the table of reads and writes in tiny.py.
    expected = [(W, 0, 8), (A1, 0, 8), (A2, 1, 7), (A3, 2, 6), (A4, 3, 5), (G4, 4, 6), (G3, 5, 7), (G2, 6, 8)]
    found = zip(lives.owner.tolist(), lives.intervals.lower.tolist(), lives.intervals.upper.tolist(), strict=True)
    assert sorted(found) == sorted(expected)
    assert lives.time_ns.tolist() == [0, 10, 20, 30, 40, 60, 80, 100]
    assert lives.intervals.peak_bytes == tiny.PROGRAM.peak_bytes


def test_lifetimes_under_a_swap() -> None:
    timeline = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    lives = timeline_lifetimes(timeline)
    # a1 leaves from 20 to 60 and comes back from 90 on; f4 starts at 60. The drawing is in tiny.py.
    assert in_ns(lives, 170) == [
        (W, 0, 170), (A1, 0, 60), (A1, 90, 170), (A2, 10, 150), (A3, 20, 110), (A4, 60, 90),
        (G4, 70, 110), (G3, 90, 150), (G2, 130, 170),
    ]  # fmt: skip


def test_lifetimes_under_recomputation() -> None:
    timeline = simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, tiny.MACHINE, tiny.LIMIT)
    lives = timeline_lifetimes(timeline)
    # f2 ends at 20 and drops a1; f1 runs again from 80 to 90, then b2 to 110 and b1 to 130.
    assert [b for b in in_ns(lives, 130) if b[0] == A1] == [(A1, 0, 20), (A1, 80, 130)]
    assert lives.intervals.peak_bytes == 140  # a2 a3 a4 w g4 in b4


@pytest.mark.parametrize("written", [True, False])
def test_a_tensor_that_stays_over_the_boundary_is_one_block(written: bool) -> None:
    kernels = (
        Kernel("k0", "other", "forward", (0,), (), 100),
        Kernel("k1", "other", "forward", (), (), 100, workspace=5),
        Kernel("k2", "other", "forward", (), (), 100),
        Kernel("k3", "other", "forward", (0,), (0,) * written, 100),
    )
    program = Program("wraps", (Tensor("w", 40, "parameter", True),), kernels)
    plan = Plan((Swap(0, 0, 3, prefetch=2),))
    timeline = simulate(program, plan, tiny.MACHINE, 100)
    lives = timeline_lifetimes(timeline)
    # Out from 100 to 140 where k3 has written it, else released at 100, since its copy on the host is still valid.
    # Back from 300 (the end of k2) to 340, so that k3 runs to 440.
    leaves = 440 + (140 if written else 100)
    assert in_ns(lives, timeline.iteration_ns) == [(-2, 100, 200), (0, 300, leaves)]  # -2: the workspace of k1
    assert lives.intervals.peak_bytes == (45 if written else 40)
    assert smartpool.pack(lives.intervals).offsets.tolist() == ([40, 0] if written else [0, 0])


def test_kernels_without_duration_do_not_share_addresses() -> None:
    kernels = (
        Kernel("write", "other", "forward", (), (0,), 0),
        Kernel("copy", "other", "forward", (0,), (1,), 0),
        Kernel("read", "other", "forward", (1,), (2,), 0),
    )
    program = Program("instant", tuple(Tensor(x, 8) for x in "abc"), kernels)
    lives = timeline_lifetimes(simulate(program, Plan(), tiny.MACHINE, 16))
    packing = smartpool.pack(lives.intervals)
    assert packing.footprint == lives.intervals.peak_bytes == 16
    assert packing.offsets.tolist() == [0, 8, 0]  # c comes when a has gone


def test_one_iteration_is_too_few() -> None:
    timeline = simulate(tiny.PROGRAM, Plan(), tiny.MACHINE, 180, iterations=1)
    with pytest.raises(ValueError, match="at least two iterations"):
        timeline_lifetimes(timeline)


@given(st.data())
def test_the_blocks_are_the_ledger_and_their_addresses_are_apart(data: st.DataObject) -> None:
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    timeline = simulate(program, plan, machine, limit)
    lives = timeline_lifetimes(timeline)
    blocks = lives.intervals
    held = np.zeros(blocks.period, np.int64)  # after each event
    for begin, end, nbytes in zip(blocks.lower, blocks.upper, blocks.nbytes, strict=True):
        held[np.arange(begin, end) % blocks.period] += nbytes
    begin, end = timeline.boundaries[-2:]
    ledger = {t - begin: used for t, used in timeline.memory if begin < t < end}  # the last change at each instant
    ours = dict(zip(lives.time_ns.tolist(), held.tolist(), strict=True))
    assert {t: ours[t] for t in ledger} == ledger
    assert blocks.peak_bytes == held.max() <= timeline.peak_bytes
    for fit in smartpool.FITS:
        packing = smartpool.pack(blocks, fit=fit)
        assert overlaps(blocks, packing.offsets) == []
        assert blocks.peak_bytes <= packing.footprint


# --------------------------------------------------------------------------------------------- SmartPool


def test_best_fit_takes_the_smallest_hole_first_fit_the_lowest() -> None:
    # By size: 10 lies at 0; 8 meets it and lies on it, at 10; 4 meets both: 18; 3 meets all three: 22. When 2
    # comes, 10 and 4 have gone: the holes are [0, 10) and [18, 22).
    blocks = table([(0, 2, 10), (1, 8, 8), (1, 3, 4), (1, 8, 3), (6, 8, 2)])
    assert smartpool.pack(blocks, fit="best").offsets.tolist() == [0, 10, 18, 22, 18]
    assert smartpool.pack(blocks, fit="first").offsets.tolist() == [0, 10, 18, 22, 0]
    assert smartpool.pack(blocks).footprint == blocks.peak_bytes == 25


def test_the_largest_block_is_placed_first() -> None:
    # In the order of mallocs the small one would lie at 0 and both large ones on it; so it lies on them.
    blocks = table([(0, 3, 1), (0, 1, 6), (2, 3, 5)])
    assert smartpool.pack(blocks).offsets.tolist() == [6, 0, 0]


def test_greedy_by_size_may_leave_a_fragment() -> None:
    # 3 and 3 lie at 0, the first 2 on the one, the second 2 meets it and the other 3, so that nothing is left
    # below 5. The load is 5: with the second 2 at 0 and the other 3 at 2 there would be room.
    blocks = table([(0, 2, 3), (1, 4, 2), (3, 6, 2), (4, 6, 3)])
    packing = smartpool.pack(blocks)
    assert (packing.offsets.tolist(), packing.footprint, blocks.peak_bytes) == ([0, 3, 5, 0], 7, 5)


def test_time_is_a_circle() -> None:
    # Of a period of 10, [8, 12) meets [1, 3) and [9, 10), but not [2, 8).
    blocks = table([(8, 12, 4), (1, 3, 4), (9, 10, 4), (2, 8, 4)], period=10)
    assert blocks.peak_bytes == 8
    assert overlaps(blocks, np.zeros(4, np.int64)) == [(0, 1), (0, 2), (1, 3)]
    offsets = smartpool.pack(blocks).offsets.tolist()  # by malloc: [1, 3), [2, 8), [8, 12), [9, 10)
    assert offsets == [4, 0, 0, 4]
    assert overlaps(table([(8, 12, 4), (1, 3, 4)]), np.zeros(2, np.int64)) == []  # without a period


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    blocks = table([(0, 2, 5), (1, 3, 9), (1, 2, 8)])
    packing = smartpool.pack(blocks, alignment=8)
    assert (packing.offsets.tolist(), packing.footprint) == ([16, 0, 24], 32)
    assert smartpool.pack(blocks).footprint == 22


arcs = st.tuples(st.integers(0, 19), st.integers(1, 20), st.integers(0, 50))


@given(st.lists(arcs, max_size=25), st.sampled_from(smartpool.FITS), st.sampled_from([1, 8]), st.booleans())
def test_no_two_blocks_share_a_byte(found: list, fit: str, alignment: int, circle: bool) -> None:
    period = {"period": 20} if circle else {}
    blocks = table([(lower, lower + length, nbytes) for lower, length, nbytes in found], **period)
    packing = smartpool.pack(blocks, alignment, fit)
    assert overlaps(blocks, packing.offsets) == []
    assert not (packing.offsets % alignment).any()
    ends = packing.offsets + -(-blocks.nbytes // alignment) * alignment
    assert blocks.peak_bytes <= packing.footprint == ends.max(initial=0)


@pytest.mark.nightly
def test_twenty_thousand_blocks() -> None:
    rng = np.random.default_rng(0)
    lower = rng.integers(0, 20_000, 20_000)
    blocks = Intervals(lower, lower + rng.integers(1, 2_000, 20_000), rng.integers(1, 10**8, 20_000))
    assert 1 <= smartpool.pack(blocks).ratio(blocks) < 1.15


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="fit: expected one of best, first, got 'worst'"):
        smartpool.pack(table([]), fit="worst")
    with pytest.raises(ValueError, match="alignment: expected at least 1"):
        smartpool.pack(table([]), alignment=0)
    assert smartpool.pack(table([])).footprint == 0
