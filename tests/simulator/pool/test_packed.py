"""Tests whether a plan fits: packing of its blocks, host memory, and device memory next to tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simulator import Plan, simulate
from simulator.pool import packed, smartpool, timeline_lifetimes
from simulator.pool.device_memory import DevicePeak, of_program, under_plan
from simulator.pool.intervals import Intervals, overlap
from simulator.pool.packed import SHARES, DoesNotPack, first_that_packs, pack_within, packed_bytes
from simulator.pool.pinned_places import PinnedSlots
from simulator.program import Program
from simulator.schedule import OutOfMemory, lower
from simulator.timeline import Timeline
from tests.programs import activations, straight
from tests.strategies import machines, plans, programs
from tests.tiny import MACHINE, PROGRAM, SWAP_PLAN

MIB = 2**20


@given(st.data())
def test_packed_bytes_are_a_packing_of_the_steady_iteration(data: st.DataObject) -> None:
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    limit = lower(program, plan).required_bytes
    timeline = simulate(program, plan, machine, limit)
    blocks = timeline_lifetimes(timeline).intervals
    packing = pack_within(blocks, limit)
    assert packed_bytes(timeline, limit) == packing.footprint >= blocks.peak_bytes
    assert overlap(blocks, packing.offsets) is None
    assert packed_bytes(timeline, limit, 512) >= blocks.rounded(512).peak_bytes


def test_a_better_packing_is_searched_for_if_smartpools_is_over_the_limit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        times = np.sort(rng.integers(0, 30, (12, 2)), axis=1)
        blocks = Intervals(times[:, 0], times[:, 1] + 1, rng.integers(1, 50, 12), 31)
        first = smartpool.pack(blocks)
        if first.footprint > blocks.peak_bytes:
            better = pack_within(blocks, blocks.peak_bytes)
            if better.footprint < first.footprint:
                break
    else:
        pytest.fail("SmartPool was never improved on")
    assert pack_within(blocks, first.footprint).footprint == first.footprint
    assert overlap(blocks, better.offsets) is None


def test_smaller_parts_of_a_limit_are_tried_until_the_packing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def attempt(limit: int) -> tuple[int, Timeline]:
        asked.append(limit)
        return limit, simulate(PROGRAM, SWAP_PLAN, MACHINE, limit)

    found = {200: 230, int(200 * SHARES[1]): 205, int(200 * SHARES[2]): 199}
    monkeypatch.setattr(packed, "packed_bytes", lambda timeline, limit, alignment: found.get(asked[-1], 10 * asked[-1]))
    assert first_that_packs(200, attempt) == (int(200 * SHARES[2]), 199)
    assert asked == list(found)
    least = lower(PROGRAM, SWAP_PLAN).required_bytes
    with pytest.raises(DoesNotPack) as caught:
        first_that_packs(least + 1, attempt)
    assert caught.value.packed_bytes == 10 * (least + 1) and asked[3] == least + 1 and asked[4] < least
    with pytest.raises(OutOfMemory):  # not even a plan for all of it
        first_that_packs(least - 1, attempt)


def test_what_is_left_for_tensors() -> None:
    found = DevicePeak(80, 10, 10, 20, 30, 110, False)
    assert (found.reserved, found.nbytes, found.beside) == (120, 150, 70)
    assert found.limit == (110 - 30) * 100 // 120 - 20  # the allocator has a sixth of what it reserves
    assert DevicePeak(80, 10, 10, 20, 30, 150, False).limit == 80  # the sum is the memory: all tensors
    assert DevicePeak(80, 10, 10, 20, 30, 140, True).limit == 80  # it fits without what is cached
    assert DevicePeak(80, 10, 10, 20, 30, 10, False).limit == 1
    with pytest.raises(ValueError, match="memory_bytes: not given"):
        _ = DevicePeak(80, 10, 10, 20, 30).limit


def chain(nbytes: int) -> Program:
    """Builds a program of three tensors, two of which are in use at once."""
    return straight(activations(nbytes, nbytes, nbytes), ((), (0,), 10), ((0,), (1,), 10), ((1,), (2,), 10))


def test_a_program_file_has_allocator_and_context() -> None:
    program = chain(11 * MIB)  # each in a segment of its own of 12 MiB
    found = of_program(program, 5 * MIB, 29 * MIB)
    assert (found.tensors, found.allocator, found.context) == (22 * MIB, 2 * MIB, 5 * MIB)
    assert found.fits and found.limit == 22 * MIB
    assert not of_program(program, 5 * MIB, 28 * MIB).fits


def test_under_a_plan() -> None:
    program = chain(11 * MIB)
    timeline = simulate(program, Plan(), MACHINE, program.peak_bytes)
    card = DevicePeak(22 * MIB, 1 * MIB, 2 * MIB, 2 * MIB, 5 * MIB, 64 * MIB, True)
    assert under_plan(card, timeline) == (32 * MIB, True)  # two segments, and what stands beside them
    assert under_plan(replace(card, memory_bytes=32 * MIB), timeline) == (32 * MIB, True)
    assert under_plan(replace(card, memory_bytes=31 * MIB), timeline) == (32 * MIB, False)
    assert under_plan(replace(card, memory_bytes=None), timeline) == (32 * MIB, True)


@pytest.mark.parametrize(
    ("copies", "returns", "nbytes", "period", "alignment", "spans", "offsets", "footprint"),
    [
        # Tensor 0 is copied at 2 and returns by 4 and, from the same copy, by 6; 1 is out over the boundary.
        ({0: [2], 1: [8]}, {0: [4, 6], 1: [1]}, [40, 10, 7], 10, 1, [(2, 6), (8, 11)], {0: 0, 1: 0}, 40),
        ({0: [2], 1: [3]}, {0: [5], 1: [8]}, [40, 10], 10, 16, [(2, 5), (3, 8)], {0: 0, 1: 48}, 64),  # side by side
        # Copied twice it has one place, of which its longest time without a copy is free: from 9 to 1; from 3 to 8.
        ({0: [1, 6]}, {0: [3, 9]}, [5], 12, 1, [(1, 9)], {0: 0}, 5),
        ({0: [1, 8]}, {0: [3, 9]}, [5], 12, 1, [(8, 15)], {0: 0}, 5),
        ({}, {0: [3]}, [7], 10, 1, [(0, 10)], {0: 0}, 7),  # never copied out: held permanently
        ({}, {0: [3]}, [0], 10, 1, [(0, 10)], {}, 0),
        ({}, {}, [3], 1, 512, [], {}, 0),
    ],
)
def test_a_place_is_held_while_its_copy_is_needed(
    copies, returns, nbytes, period, alignment, spans, offsets, footprint
):
    held = PinnedSlots(copies, returns, nbytes, period, alignment)
    assert list(zip(held.intervals.lower.tolist(), held.intervals.upper.tolist(), strict=True)) == spans
    assert (held.tensors, held.offsets, held.footprint) == (list(range(len(spans))), offsets, footprint)
    shared = len(offsets) == 2 and len(set(offsets.values())) == 1
    assert all(held.neighbors(t) == [1 - t] * shared for t in offsets)
