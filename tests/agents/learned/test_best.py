"""Tests the planner ``best``: its table of shares, and that it is at least as good as each of its methods."""

from itertools import product

import numpy as np
import pytest

import agents
from agents.learned.best import HUGE, OPTIONS, shares
from agents.search.lp_round import LPRound
from simulator import Program, simulate
from simulator.compiled.encoding import rows_of
from simulator.modes import MODES
from tests.agents.planned import planned
from tests.agents.search.test_search import MACHINE, pyramid

PROGRAM = pyramid(12, 0)
LIMIT = int(0.6 * PROGRAM.peak_bytes)


def ns(program: Program, plan: agents.planner.Plan, limit: int = LIMIT) -> int:
    return simulate(program, plan, MACHINE, limit).iteration_ns


def test_time_shares_of_the_methods_add_up_to_one() -> None:
    for mode, kernels, seconds, network in product(
        MODES, (3, 500, 20_000, HUGE), (None, 0.1, 1.0, OPTIONS.lp_s, 10.0, 1e3), (False, True)
    ):
        table = shares(mode, kernels, seconds, network)
        assert np.isclose(sum(share.fraction for share in table), 1) and min(share.fraction for share in table) > 0
        names = {share.method for share in table}
        assert network or "policy_search" not in names
        assert kernels >= HUGE or ("rerun_search" in names) == (mode == "recompute")
    assert len(shares("joint", 500, 10.0, True)) > len(shares("joint", 500, 1.0, True)) == 1  # restarts


def test_no_method_alone_is_better_and_plans_are_deterministic() -> None:
    best, repeated = (agents.make("best", min_bytes=1, calls=601) for _ in range(2))
    plan = best.plan(PROGRAM, MACHINE, LIMIT)
    assert plan == repeated.plan(PROGRAM, MACHINE, LIMIT)
    assert list(best.best_ns) == ["policy_search", "lp_round"] and best.best_ns["lp_round"] == ns(PROGRAM, plan)
    for name, turn in (("policy_search", 0), ("lp_round", 1)):
        method = agents.make(name, min_bytes=1, calls=300, seed=OPTIONS.seed_step * turn)
        assert ns(PROGRAM, plan) <= ns(PROGRAM, method.plan(PROGRAM, MACHINE, LIMIT))
    assert best.floor is not None and best.floor.iteration_ns <= ns(PROGRAM, plan)


def test_recomputation_alone_ends_with_the_search_over_reruns() -> None:
    best = agents.make("best", mode="recompute", min_bytes=1, seconds=0.3)
    plan = best.plan(PROGRAM, MACHINE, LIMIT)
    plan.only("the test", "recompute", "rerun")
    assert "rerun_search" in best.best_ns and best.best_ns["rerun_search"] == ns(PROGRAM, plan)


def test_lp_rounding_continues_from_a_given_plan() -> None:
    """With almost no simulator calls, LP rounding is no worse than the given plan."""
    start = planned("policy_search", PROGRAM, MACHINE, LIMIT)
    from_scratch, continued = (LPRound(20, min_bytes=1) for _ in range(2))
    continued.first = rows_of(start.decisions)
    assert ns(PROGRAM, continued.plan(PROGRAM, MACHINE, LIMIT)) <= ns(PROGRAM, start)
    assert ns(PROGRAM, start) < ns(PROGRAM, from_scratch.plan(PROGRAM, MACHINE, LIMIT))


def test_infeasible_limits_raise_and_unneeded_plans_are_empty() -> None:
    with pytest.raises(agents.Infeasible, match=r"^best: .* cannot be planned within 1,?\d* bytes"):
        planned("best", PROGRAM, MACHINE, 1)
    planner = agents.make("best", seconds=60)
    assert not planner.plan(PROGRAM, MACHINE, PROGRAM.peak_bytes).decisions and planner.simulator_calls == 1
