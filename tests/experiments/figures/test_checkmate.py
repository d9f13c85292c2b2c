"""Tests Checkmate's published schedules as plans of this simulator."""

import json

import pytest

from experiments.figures import checkmate
from simulator import Machine, Program, Rerun, simulate
from simulator.schedule import lower

ANSWERS = json.loads((checkmate.DATA / "answers.json").read_text())["models"]
CASES = [(m, b) for m in ANSWERS for b in m["budgets"]]


@pytest.mark.parametrize(("model", "budget"), CASES, ids=[f"{m['program'][:6]}-{b['budget_gib']:g}" for m, b in CASES])
def test_a_published_schedule_replays_as_published(model: checkmate.Row, budget: checkmate.Row) -> None:
    program = Program.load(checkmate.DATA / model["program"])
    assert (program.ideal_ns, program.peak_bytes) == (model["ideal_ns"], model["peak_bytes"])
    plan = checkmate.plan_from(budget["run"])
    timeline = simulate(program, plan, Machine.load("v100"), budget["limit_bytes"])
    assert timeline.iteration_ns == budget["schedule_ns"]
    assert timeline.peak_bytes == budget["schedule_peak_bytes"]
    assert 100 * timeline.overhead == pytest.approx(budget["overhead_percent"], abs=1e-4)
    assert [step.kernel for step in lower(program, plan).steps] == budget["run"]


def test_a_schedule_as_a_plan() -> None:
    assert checkmate.plan_from([0, 1, 0, 2, 0, 1, 3]).decisions == (Rerun(0, 2), Rerun(0, 3), Rerun(1, 3))
