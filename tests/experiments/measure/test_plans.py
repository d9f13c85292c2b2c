"""Tests of plans under measured times: accuracy on a published H100 trace, compared with controls."""

import pytest

from agents.planner import Infeasible
from experiments.measure.published import plans
from simulator import Machine, simulate
from tests.experiments.conftest import chain

H100 = Machine.load("h100")
POINTS = 0.03


@pytest.fixture(scope="module")
def belief_rows() -> dict[str, plans.Row]:
    return {row["times"]: row for row in plans.rows((0.7,), 2000, ("tensile",))}


@pytest.mark.nightly
def test_plans_cost_what_the_model_predicts_and_the_control_does_not(belief_rows: dict[str, plans.Row]) -> None:
    model, exact, roofline = belief_rows.values()
    assert abs(model["said"] - model["measured"]) <= POINTS and model["low"] <= model["said"] <= model["high"]
    assert model["measured"] <= model["own"] + POINTS
    assert model["measured"] < exact["measured"] and exact["low"] is exact["high"] is None
    assert abs(roofline["said"] - roofline["measured"]) > POINTS  # without the kernel-time model
    assert roofline["measured"] > roofline["own"] + POINTS
    for row in belief_rows.values():
        assert row["floor"] <= min(row["own"], row["measured"]) and row["limit_fraction"] == 0.7


def test_rows_do_not_depend_on_the_clock() -> None:
    program = chain()
    other = program.with_durations([k.duration_ns * 9 // 10 for k in program.kernels])
    arguments = (program, other, H100, (0.7, 0.5), 200, ("tensile", "annealing"))
    first = plans.compared(*arguments)
    assert first == plans.compared(*arguments) and len(first) == 2 * 3
    plan, spread = plans.planned(program, H100, first[0]["limit_bytes"], 200, None, ("tensile", "annealing"))
    assert spread is None and first[1]["times"] == "model, believed exact"
    assert first[1]["said"] == simulate(program, plan, H100, first[0]["limit_bytes"]).overhead


def test_a_limit_without_a_plan_is_refused() -> None:
    with pytest.raises(Infeasible, match="no planner found a plan of 'chain' within 1,000 bytes"):
        plans.planned(chain(), H100, 1000, 50, None, ("annealing",))
