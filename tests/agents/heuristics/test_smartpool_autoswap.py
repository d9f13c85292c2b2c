"""Tests that the limit of SmartPool+AutoSwap applies to addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import agents
from agents.heuristics.autoswap import peak_gaps
from agents.heuristics.smartpool_autoswap import SmartPoolAutoSwap, just_in_time
from agents.planner import Candidates
from simulator import Machine, Plan, Program, Swap, simulate
from simulator.compiled.encoding import SWAP
from simulator.pool import Packing, program_lifetimes, smartpool, timeline_lifetimes
from tests import random_cases
from tests.agents.heuristics.test_autoswap import MACHINE, PAIR, straight
from tests.agents.planned import planned
from tests.oracle.packing import overlaps
from tests.strategies import machines, networks, programs, reachable_limits

# Six kernels of 10 ns; kernel 4 has R, 3 bytes of workspace; tensors (written by, read by, bytes):
#   S (0, 5, 2)  G (0, 1, 3)  P (1, 3, 2)  Q (3, 5, 2)
# Colored by size: G and R at 0 (they do not meet), then S on them at 3, P on S at 5, and Q, which meets P, R and S,
# on P at 7: a footprint of 9 for a load of 7.
FRAGMENTED = straight([(0, 5), (0, 1), (1, 3), (3, 5)], [2, 3, 2, 2], [10] * 6, [0, 0, 0, 0, 3, 0])


def pack(program: Program, plan: Plan, machine: Machine, alignment: int = 1) -> Packing:
    timeline = simulate(program, plan, machine, plan.limit)
    lives = timeline_lifetimes(timeline)
    packing = smartpool.pack(lives.intervals, alignment)
    assert overlaps(lives.intervals, packing.offsets) == []
    return packing


def make(**options: object) -> agents.Planner:
    return agents.make("smartpool+autoswap", **{"min_bytes": 1, "align": False, **options})


def test_fragments_make_it_swap_more() -> None:
    assert FRAGMENTED.live_bytes == (5, 7, 4, 6, 7, 4)
    assert smartpool.pack(program_lifetimes(FRAGMENTED).intervals).footprint == 9
    assert planned("autoswap_swdoa", FRAGMENTED, MACHINE, 7).decisions == ()
    # Without S from 12 (its 2 bytes have left) to 40: S at 3, P on it at 5; Q now finds the hole at 3 above R, and
    # S, back beside R and Q, takes P's place at 5. It must be back at 50, so it must start at 48: after kernel 3.
    plan = make().plan(FRAGMENTED, MACHINE, 7)
    assert plan.decisions == (Swap(0, 0, 5, prefetch=3),)
    assert plan.limit == 7 and pack(FRAGMENTED, plan, MACHINE).footprint == 7
    assert simulate(FRAGMENTED, plan, MACHINE, 7).overhead == 0


TWO = straight([(0, 1), (1, 2)], [10, 10], [1] * 3, [0] * 3)
# By size: 7 at 0; the workspace of kernel 0, 4, at 7; 4 at 11; 2 at 7, between 7 and 4; the other 2 comes when 7 has
# gone: first-fit puts it at 0, best-fit at 9, where 1, which still meets 7, would have had its place.
HOLES = straight([(1, 4), (3, 5), (1, 4), (0, 2), (0, 4)], [1, 2, 2, 7, 4], [10] * 6, [4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("program", "options", "least"),
    [
        (TWO, {}, 20),
        (TWO, {"align": True}, 1024),
        (HOLES, {"min_bytes": 100, "pool": "smartpool_first"}, HOLES.peak_bytes),
        (HOLES, {"min_bytes": 100}, 16),
    ],
)
def test_the_packing_decides_what_fits(program: Program, options: dict[str, object], least: int) -> None:
    assert make(**options).plan(program, MACHINE, least).decisions == ()
    with pytest.raises(agents.Infeasible):
        make(**options).plan(program, MACHINE, least - 1)


@pytest.mark.parametrize(
    ("nbytes", "pinned"),
    [
        # Kernels of 10 ns; 12 and 6 bytes are both due at kernel 5, at 50. Of two with one access the higher tensor
        # comes later: 1 starts at 44, after kernel 3 has ended at 40; 0 must end by 44: it starts at 32,
        # after kernel 2.
        (12, [2, 3]),
        (60, [0, 3]),  # cannot be in time: at once
    ],
)
def test_swap_ins_are_just_in_time_and_one_at_a_time(nbytes: int, pinned: list[int]) -> None:
    program = straight([(0, 5), (0, 5)], [nbytes, 6], [10] * 6, [0] * 6)
    rows = np.array([(SWAP, 0, 0, 5, -1, -1), (SWAP, 1, 0, 5, -1, -1)])
    assert just_in_time(program, MACHINE, rows)[:, 4].tolist() == pinned


@given(st.data())
def test_the_footprint_fits_or_the_limit_is_infeasible(data: st.DataObject) -> None:
    program = data.draw(programs() | networks())
    machine = data.draw(machines())
    limit = data.draw(reachable_limits(program) | st.integers(program.peak_bytes // 2, 2 * program.peak_bytes))
    planner = make(steps=6)
    try:
        plan = planner.plan(program, machine, limit)
    except agents.Infeasible as error:
        assert f"within {limit:,} bytes" in str(error)
        assert limit < smartpool.pack(program_lifetimes(program).intervals).footprint
        return
    assert plan.limit <= limit
    assert pack(program, plan, machine).footprint <= limit
    assert simulate(program, plan, machine, plan.limit).peak_bytes <= plan.limit
    assert simulate(program, plan, machine, limit).peak_bytes <= limit
    assert planner.plan(program, machine, limit) == plan and planner.simulator_calls >= 2


@pytest.mark.parametrize("score", ["all", "bo", "random"])
def test_other_weights_find_what_no_score_does(score: str) -> None:
    # Tensors 0 and 1 of PAIR reach a footprint of 10 at an overhead of 3 of 23 ns; the scores take 5.
    planner = SmartPoolAutoSwap(score, align=False, min_bytes=1, steps=3, evaluations=30)
    (plan,) = planner.smallest(PAIR, MACHINE, [0.2])
    assert pack(PAIR, plan, MACHINE).footprint == (11 if score == "all" else 10)
    assert {d.tensor for d in plan.decisions} == ({0} if score == "all" else {0, 1})


# Here the first iteration of a run needs more than the others: tensors swapped over the boundary are still present.
FIRST_NEEDS_MORE = random_cases.case(8417)


@example(FIRST_NEEDS_MORE[0], FIRST_NEEDS_MORE[2])
@given(programs() | networks(), machines())
def test_no_smaller_footprint_is_passed_over(program: Program, machine: Machine) -> None:
    planner = SmartPoolAutoSwap(align=False, min_bytes=1, steps=3)
    overheads = (0.0, 0.2, 100.0)
    plans = planner.smallest(program, machine, overheads)
    assert planner.simulator_calls >= len(overheads)
    candidates = Candidates(program, peak_gaps(program, 1))
    runs = planner._runs(candidates, program, machine, program.peak_bytes, candidates.least_bytes, 6)
    for overhead, plan in zip(overheads, plans, strict=True):
        timeline = simulate(program, plan, machine, plan.limit)
        assert timeline.iteration_ns <= program.ideal_ns * (1 + overhead)
        allowed = [run for run in runs if run.iteration_ns <= program.ideal_ns * (1 + overhead)]
        smallest = min(planner._footprint(run) for run in allowed)
        assert max(pack(program, plan, machine).footprint, timeline.peak_bytes) == smallest
