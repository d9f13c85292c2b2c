"""Rounding the floor: optimal where that is known, between the floor and the heuristics elsewhere."""

from __future__ import annotations

import agents
from simulator import Recompute, Swap, simulate
from tests.agents.search.test_search import pyramid
from tests.agents.test_floor import MACHINE, sandwich


def test_it_finds_the_plans_that_are_best_by_hand() -> None:
    # Writing the tensor again takes 10 ns, moving it 200.
    for mode, best in (("joint", Recompute(0, 0, 2)), ("swap", Swap(0, 0, 2))):
        assert agents.make("lp_round", min_bytes=1, mode=mode).plan(sandwich(), MACHINE, 100).decisions == (best,)
    # It stops at the floor.
    planner = agents.make("lp_round", min_bytes=1)
    planner.plan(sandwich(), MACHINE, 100)
    assert planner.floor.iteration_ns == 60
    assert planner.simulator_calls == 2  # the rounded plan, and the final check


def test_with_few_seconds_or_calls_there_is_a_plan() -> None:
    program = pyramid(60, 1)
    limit = int(0.6 * program.peak_bytes)
    for seconds in (0.1, 1.0):
        planner = agents.make("lp_round", min_bytes=1, seconds=seconds)
        plan = planner.plan(program, MACHINE, limit)
        found = simulate(program, plan, MACHINE, limit).overhead
        assert planner.floor.overhead <= found < float("inf")
    few = agents.make("lp_round", min_bytes=1, seconds=60.0, calls=100)
    few.plan(program, MACHINE, limit)
    assert few.simulator_calls <= 100
