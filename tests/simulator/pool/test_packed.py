"""The verdict whether a plan fits: by the packing of its blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simulator import Plan, simulate
from simulator.pool import packed, smartpool, timeline_lifetimes
from simulator.pool.intervals import Intervals
from simulator.pool.packed import SHARES, DoesNotPack, first_that_packs, pack_within, packed_bytes
from simulator.pool.validate import overlap
from simulator.schedule import OutOfMemory, lower
from simulator.timeline import Timeline
from tests.strategies import machines, plans, programs
from tests.tiny import MACHINE, PROGRAM, SWAP_PLAN


@given(st.data())
def test_packed_bytes_are_a_packing_of_the_steady_iteration(data: st.DataObject) -> None:
    program = data.draw(programs())
    plan, machine = data.draw(plans(program)), data.draw(machines())
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


def test_a_step_without_a_plan_packs_its_persistent_tensors_once() -> None:
    timeline = simulate(PROGRAM, Plan(), MACHINE, PROGRAM.peak_bytes)
    assert packed_bytes(timeline, PROGRAM.peak_bytes) >= PROGRAM.peak_bytes
