"""Tests overheads of plans under perturbed kernel times, and plans for faster kernels."""

from dataclasses import replace

import numpy as np
import pytest

from agents.planner import Infeasible
from agents.search.retimed import ForFaster, Retimed, TimesError
from simulator import Plan, Program, Rerun, Swap, simulate
from tests.tiny import LIMIT, MACHINE, PROGRAM, RECOMPUTE_PLAN, SWAP_PLAN, just_hidden

ERROR = TimesError(0.3, 0.25)


def test_each_shape_by_a_factor_of_its_own() -> None:
    slowed = PROGRAM.with_durations([k.duration_ns * 10**6 for k in PROGRAM.kernels])
    extended = replace(slowed, kernels=(*slowed.kernels, replace(slowed.kernels[-1], inputs=(0,), outputs=())))
    sample = ERROR.sampled(extended, 3)
    assert sample.ideal_ns == pytest.approx(extended.ideal_ns, rel=1e-6)
    factors = [a.duration_ns / b.duration_ns for a, b in zip(sample.kernels, extended.kernels, strict=True)]
    assert factors[-1] == pytest.approx(factors[-2], rel=1e-6)  # the same operator, FLOPs and bytes
    assert len({round(f, 4) for f in factors}) == 8
    assert ERROR.sampled(extended, 3) == sample != ERROR.sampled(extended, 4)
    assert TimesError(0.0, 0.1).sampled(extended, 3) == extended


@pytest.mark.parametrize("plan", [SWAP_PLAN, RECOMPUTE_PLAN])
def test_overheads_are_those_of_simulations(plan: Plan) -> None:
    retimed = Retimed(PROGRAM, MACHINE, LIMIT, ERROR, draws=5)
    bare = replace(plan, fingerprint="")

    def cost(program: Program) -> float:
        return simulate(program, bare, MACHINE, LIMIT).overhead

    spread = retimed.spread(plan)
    assert spread.said == cost(PROGRAM)
    assert spread.fast == cost(ERROR.faster(PROGRAM)) and spread.slow == cost(ERROR.slower(PROGRAM))
    assert retimed.expected(plan) == pytest.approx((spread.said + spread.fast + spread.slow) / 3)
    exact = Retimed(PROGRAM, MACHINE, LIMIT, TimesError(0.3, 0.0), draws=5)  # of the sum
    costs = [cost(exact.error.sampled(PROGRAM, seed)) for seed in np.random.SeedSequence(0).generate_state(5).tolist()]
    assert exact.expected(plan) == pytest.approx(np.mean(costs))
    assert TimesError(0.3, 0.0).margin == 0.15 and TimesError(0.14, 0.1).margin == 0.1
    assert spread.least <= spread.low <= spread.high <= spread.most
    assert Retimed(PROGRAM, MACHINE, LIMIT, ERROR, draws=5).spread(plan) == spread
    if plan is SWAP_PLAN:  # the link takes as long as before
        assert spread.fast > spread.said > spread.slow and spread.high > spread.low


def test_a_plan_that_cannot_run_costs_without_end() -> None:
    assert Retimed(PROGRAM, MACHINE, 120, ERROR, draws=2).spread(SWAP_PLAN).most == float("inf")


def test_algorithms_are_off_alike() -> None:
    kernels = (replace(PROGRAM.kernels[0], variants=((30, 0),)), *PROGRAM.kernels[1:])
    program = replace(PROGRAM, kernels=kernels)
    plan = replace(Plan.of(program, SWAP_PLAN.decisions), variants=((0, 0),))
    slow = ERROR.slower(program)
    spread = Retimed(program, MACHINE, LIMIT, ERROR, draws=1).spread(plan)
    assert spread.slow == simulate(slow, plan.retimed(slow), MACHINE, LIMIT).overhead


@pytest.mark.parametrize(("kernel", "step"), [(-0.1, 0.1), (0.1, -0.1), (0.1, 1.0), (float("nan"), 0.1)])
def test_an_error_out_of_range(kernel: float, step: float) -> None:
    with pytest.raises(ValueError, match="kernel, step"):
        TimesError(kernel, step)


def test_kernels_that_are_faster_hide_less() -> None:
    program, machine, limit = just_hidden()
    hidden = Plan.of(program, (Swap(1, 1, 5),))
    retimed = Retimed(program, machine, limit, ERROR, draws=1)
    planner = ForFaster([hidden], ERROR, calls=400, min_bytes=0)
    found = planner.plan(program, machine, limit)
    assert (found.fingerprint, found.planner, found.limit) == (program.fingerprint, planner.name, limit)
    assert 1 < planner.simulator_calls <= 400
    spread = retimed.spread(found)
    old = retimed.spread(hidden)
    assert spread.fast < old.fast and spread.said > old.said == 0
    assert found == planner.plan(program, machine, limit)


@pytest.mark.parametrize(
    ("starts", "min_bytes"),
    [
        ([Plan.of(PROGRAM, (Rerun(0, 6),))], 0),
        ([replace(SWAP_PLAN, decisions=(Swap(1, 1, 6, sync=True),))], 0),
        ([Plan.of(PROGRAM, ())], 0),
        ([], 0),
        ([SWAP_PLAN], 1000),  # tensors that are too small to move
    ],
)
def test_infeasible_starts_and_too_few_calls_are_refused(starts: list[Plan], min_bytes: int) -> None:
    with pytest.raises(Infeasible, match="no start plan fits"):
        ForFaster(starts, ERROR, calls=50, min_bytes=min_bytes).plan(PROGRAM, MACHINE, LIMIT)
    with pytest.raises(ValueError, match="calls"):
        ForFaster(starts, ERROR, calls=5)
