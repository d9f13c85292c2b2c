"""Tests lifetimes computed by hand, and packings validated by a slow checker."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simulator import Plan, Swap, simulate
from simulator.pool import Intervals, Lifetimes, program_lifetimes, smartpool, timeline_lifetimes
from simulator.schedule import lower
from tests import tiny
from tests.oracle.packing import overlaps
from tests.programs import activations, parameter, straight
from tests.strategies import machines, plans, programs
from tests.tiny import A1, A2, A3, A4, G2, G3, G4, W


def table(blocks: list[tuple[int, int, int]], **period: int) -> Intervals:
    """Builds Intervals from (lower, upper, bytes)."""
    return Intervals(*np.array(blocks, np.int64).reshape(-1, 3).T, **period)


def in_ns(lives: Lifetimes, iteration_ns: int) -> list[tuple[int, int, int]]:
    """Returns (owner, start, end) of every block, with the end past the iteration if the block crosses it."""
    times = [*lives.time_ns.tolist(), *(lives.time_ns + iteration_ns).tolist(), 2 * iteration_ns]
    lower = lives.intervals.lower.tolist()
    upper = lives.intervals.upper.tolist()
    return sorted((t, times[a], times[b]) for t, a, b in zip(lives.owner.tolist(), lower, upper, strict=True))


def test_lifetimes_of_a_program() -> None:
    lives = program_lifetimes(tiny.PROGRAM)
    # Kernels f1 f2 f3 f4 b4 b3 b2 b1 are 0 to 7; see the table of reads and writes in tiny.py.
    expected = [(W, 0, 8), (A1, 0, 8), (A2, 1, 7), (A3, 2, 6), (A4, 3, 5), (G4, 4, 6), (G3, 5, 7), (G2, 6, 8)]
    found = zip(lives.owner.tolist(), lives.intervals.lower.tolist(), lives.intervals.upper.tolist(), strict=True)
    assert sorted(found) == sorted(expected)
    assert lives.time_ns.tolist() == [0, 10, 20, 30, 40, 60, 80, 100]
    assert lives.intervals.peak_bytes == tiny.PROGRAM.peak_bytes


@pytest.mark.parametrize("written", [True, False])
def test_a_tensor_that_stays_over_the_boundary_is_one_block(written: bool) -> None:
    program = straight([parameter(40)], ((0,), (), 100), ((), (), 100, 5), ((), (), 100), ((0,), (0,) * written, 100))
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
    program = straight(activations(8, 8, 8), ((), (0,), 0), ((0,), (1,), 0), ((1,), (2,), 0))
    lives = timeline_lifetimes(simulate(program, Plan(), tiny.MACHINE, 16))
    packing = smartpool.pack(lives.intervals)
    assert packing.footprint == lives.intervals.peak_bytes == 16
    assert packing.offsets.tolist() == [0, 8, 0]  # c is allocated after a is freed


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
