"""Tests figure=measured: tasks, computed rows, and error thresholds of the committed result."""

import json
from pathlib import Path

import pytest

from experiments.figures import measured as fig
from simulator import Machine
from tests.experiments.conftest import ROOT, figure_settings

H100 = Machine.load("h100")


def test_tasks_are_the_files_the_peaks_and_the_fit() -> None:
    tasks = fig.Measured().tasks(figure_settings("measured", parts=["steps", "fit", "peaks"]))
    files = [task["file"] for task in tasks if task["part"] == "steps"]
    assert files[:3] == ["h100_resnet50.csv", "steps.csv", "v100_resnet50_by_kind.csv"]
    assert sum(task["part"] == "peaks" for task in tasks) == 22 and tasks[-1] == {"part": "fit"}
    assert all(len(task["sha256"]) == 12 for task in tasks if "file" in task)
    assert [task["part"] for task in fig.Measured().tasks(figure_settings("measured", parts=["fit"]))] == ["fit"]
    limits = fig.Measured().tasks(figure_settings("measured", parts=["plans"], limits=[0.6, 0.3], calls=7))
    assert limits == [{"part": "plans", "limit": limit, "calls": 7} for limit in (0.6, 0.3)]


def test_a_changed_measurement_is_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("steps.csv", "h100_resnet50.csv", "h100_resnet50.yaml"):
        (tmp_path / name).write_text("a")
    monkeypatch.setattr(fig, "DATA", tmp_path)
    before = fig.Measured().tasks(figure_settings("measured", parts=["steps"]))
    (tmp_path / "h100_resnet50.yaml").write_text("b")
    after = fig.Measured().tasks(figure_settings("measured", parts=["steps"]))
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]


@pytest.mark.nightly
def test_rows_of_a_trace() -> None:
    task = fig.Measured().tasks(figure_settings("measured", parts=["steps"]))[0]
    row = {**task, **fig.Measured().run(task, H100)}
    assert row["kind"] == "kernels" and len(row["rows"]) == 396
    assert fig.all_steps([row])[0]["measured"] == pytest.approx(70.723)


def test_the_committed_bars_are_reached() -> None:
    """Checks the H200's step sums (5 % fitted, 12 % held out) and unchanged errors of other GPUs."""
    rows = json.loads((ROOT / "experiments" / "results" / "measured.json").read_text())["rows"]
    numbers = fig.Measured().template_values(rows)
    assert [abs(step["error"]) < 0.05 for step in numbers["steps"] if step["name"].startswith("H200")] == [True] * 3
    assert [entry["bar"] for entry in numbers["left_out"]] == ["12%: reached"] * 3
    assert all(entry["bar"].endswith("reached") for entry in numbers["kernels"])
    others = {step["name"]: step["error"] for step in numbers["steps"] if not step["name"].startswith("H200")}
    assert len(others) == 10 and sum(abs(error) > 0.09 for error in others.values()) == 2
    assert max(map(abs, others.values())) < 0.13
