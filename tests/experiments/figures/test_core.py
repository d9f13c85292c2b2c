"""The core suite: what it asks for, one small task of it, and what it says of the rows."""

import pytest
from omegaconf import DictConfig

from experiments.cli import UsageError
from experiments.figures import core
from experiments.report import heuristics
from simulator import Machine

SETTINGS = {
    "tasks": {"small": {"workload": "mlp", "machine": "gtx1080ti", "limit": 0.8}},
    "planners": {"annealing": {"min_bytes": 1}}, "seconds": [0.05, 0.2],
}  # fmt: skip


def test_a_task_as_a_user_runs_it() -> None:
    (task,) = core.tasks(DictConfig(SETTINGS))
    assert task["task"] == "small" and task["seconds"] == [0.05, 0.2]
    row = core.run(task, Machine.load("h100"))
    assert row["limit_bytes"] > 10**8 and row["kernels"] > 10
    found = row["found"]["annealing"]
    assert [len(found), *(f["plan_s"] < 2 for f in found)] == [2, True, True]
    assert all(row["floor_percent"] <= f["overhead_percent"] for f in found)
    assert {f["planner"] for f in row["published"]} == set(heuristics())
    assert "tensile" in heuristics() and not {"annealing", "none", "home", "dqn"} & set(heuristics())


def row(task: str, floor: float, found: list[float | None], published: list[float | None]) -> core.Row:
    return {
        "task": task, "workload": "vgg16", "machine": "h100", "limit": 0.5, "seconds": [1, 10], "kernels": 1234,
        "floor_percent": floor, "floor_s": 0.5, "planners": {"lp_round": {}},
        "published": [{"planner": name, "overhead_percent": over, "plan_s": 0.1}
                      for name, over in zip(("tensile", "capuchin"), published, strict=True)],
        "found": {"lp_round": [{"overhead_percent": over, "plan_s": s, "simulator_calls": 9}
                               for over, s in zip(found, (1.25, 9.0), strict=True)]},
    }  # fmt: skip


def test_what_is_said_of_the_rows(tmp_path) -> None:
    rows = [row("a", 1.0, [2.0, 1.5], [None, 3.0]), row("b", 0.0, [None, 0.1], [None, None])]
    heads, cells = core.table(rows)
    assert heads[-2:] == ["LP rounding, 1 s", "LP rounding, 10 s"]
    assert cells[0][1:] == ["1,234", "1.00% (0.5)", "3.00% Capuchin (0.1)", "2.00%", "1.50%"]
    assert cells[1][-3:] == ["–", "–", "0.10%"]
    first, second, late = core.notes(rows)
    assert "LP rounding 1.00 points (1 of 2 tasks)" in first
    assert "LP rounding 0.50 points (2 of 2 tasks)" in second  # of 0.5 and 0.1
    assert late == "The longest overrun: 0.25 s beyond 1 s (lp_round, b)."
    core.draw(rows, tmp_path / "core.png")
    assert (tmp_path / "core.png").stat().st_size > 10_000


@pytest.mark.parametrize(("change", "message"), [
    ({"workload": "vgg61"}, "figure.tasks.small.workload: there is no workload 'vgg61'"),
    ({"limit": 40}, "figure.tasks.small.limit: expected a share of the peak, got 40"),
])  # fmt: skip
def test_wrong_settings(change: dict[str, object], message: str) -> None:
    task = {**SETTINGS["tasks"]["small"], **change}  # type: ignore[index]
    with pytest.raises(UsageError, match=message):
        core.tasks(DictConfig({**SETTINGS, "tasks": {"small": task}}))
