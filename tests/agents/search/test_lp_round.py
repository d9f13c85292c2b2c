"""Rounding the floor: optimal where that is known, between the floor and the heuristics elsewhere."""

from __future__ import annotations

import pytest

import agents
from simulator import Recompute, Swap, simulate
from tests import tiny
from tests.agents.search.test_search import overhead, pyramid
from tests.agents.test_floor import MACHINE, sandwich


def test_it_finds_the_plans_that_are_best_by_hand() -> None:
    plan = agents.make("lp_round", min_bytes=1, calls=200).plan(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT)
    assert simulate(tiny.PROGRAM, plan, tiny.MACHINE, tiny.LIMIT).iteration_ns == tiny.PROGRAM.ideal_ns + 10
    assert sum(isinstance(d, Recompute) for d in plan.decisions) == 1
    # Writing the tensor again takes 10 ns, moving it 200.
    for mode, best in (("joint", Recompute(0, 0, 2)), ("swap", Swap(0, 0, 2))):
        assert agents.make("lp_round", min_bytes=1, mode=mode).plan(sandwich(), MACHINE, 100).decisions == (best,)


def test_it_stops_at_the_floor() -> None:
    planner = agents.make("lp_round", min_bytes=1)
    planner.plan(sandwich(), MACHINE, 100)
    assert planner.floor.iteration_ns == 60
    assert planner.simulator_calls == 2  # the rounded plan, and the final check


@pytest.mark.parametrize("mode", ["swap", "joint"])
def test_it_is_no_worse_than_the_published_scores_and_never_below_the_floor(mode: str) -> None:
    program = pyramid(16, 5)
    for fraction in (0.5, 0.6, 0.7):
        limit = int(fraction * program.peak_bytes)
        planner = agents.make("lp_round", min_bytes=1, calls=2_000, mode=mode)
        plan = planner.plan(program, MACHINE, limit)
        found = simulate(program, plan, MACHINE, limit).overhead
        assert planner.floor.overhead <= found
        assert found <= min(overhead(program, limit, f"autoswap_{s}") for s in ("doa", "aoa", "wdoa", "swdoa"))
        assert planner.simulator_calls <= 2_000


def test_infeasible_is_proven_by_the_floor() -> None:
    with pytest.raises(agents.Infeasible, match="smallest limit it can reach is 100 bytes"):
        agents.make("lp_round", min_bytes=1).plan(sandwich(), MACHINE, 99)


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
