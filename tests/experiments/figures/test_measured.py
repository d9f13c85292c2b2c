"""figure=measured: its tasks, its table and sentences from rows made by hand, a row as it is computed."""

from pathlib import Path
from typing import Any

import pytest

from experiments.common import cli
from experiments.figures import measured as fig
from simulator import Machine
from tests.experiments.conftest import figure_settings

H100 = Machine.load("h100")


def peak(error: float | None, fits: bool, said: bool, xmem: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"part": "peaks", "network": "VGG16", "optimizer": "SGD", "batch": 8, "gpu": "A100",
                           "fits": fits, "ours_fits": said, "error": error}  # fmt: skip
    for name in ("xmem", "dnnmem", "schedtune", "llmem"):
        row |= {f"{name}_error": xmem if name == "xmem" else None, f"{name}_fits": True if name == "xmem" else None}
    return row


# 100 ms measured, 95 said, 150 by one roofline; kernels of 60, 39.99 and 0.01 ms.
ROWS: list[dict[str, Any]] = [
    {"part": "steps", "file": "h100_resnet50.csv", "kind": "kernels", "label": "h100: resnet50, 128",
     "source": "theirs",
     "rows": [["a", "conv", 60_000.0, 54_000.0, 120_000.0], ["b", "norm", 39_990.0, 40_980.0, 29_990.0],
              ["c", "other", 10.0, 20.0, 10.0]]},
    {"part": "steps", "file": "v100_resnet50_by_kind.csv", "kind": "kinds",
     "label": "v100: resnet50, 32, float32, NCHW", "rows": [["conv fwd", "conv fwd", 1000.0, 1200.0, 2000.0]]},
    {"part": "steps", "file": "steps.csv", "kind": "whole",
     "rows": [["a100_80gb: vgg13, 128, tf32, NCHW", "iteration", 100.0, 104.0, 300.0]]},
    {"part": "fit", "error": 0.13, "middle": 0.06, "held_out": {"kernels": 300, "middle": 0.2, "spread": 0.19}},
    {"part": "plans", "limit": 0.5, "rows": [
        {"times": "model", "planner": "lp_round", "said": 0.05, "measured": 0.07, "own": 0.03, "floor": 0.01},
        {"times": "roofline", "planner": "home", "said": 0.02, "measured": 0.3, "own": 0.03, "floor": 0.01}]},
    peak(0.02, True, True, -0.3), peak(-0.04, True, True, 0.1), peak(None, False, True, None),
]  # fmt: skip


def test_tasks_are_the_files_the_peaks_and_the_fit() -> None:
    found = fig.tasks(figure_settings("measured", parts=["steps", "fit", "peaks"]))
    files = [task["file"] for task in found if task["part"] == "steps"]
    assert files[:3] == ["h100_resnet50.csv", "steps.csv", "v100_resnet50_by_kind.csv"]
    assert sum(task["part"] == "peaks" for task in found) == 22 and found[-1] == {"part": "fit"}
    assert all(len(task["sha256"]) == 12 for task in found if "file" in task)
    assert [task["part"] for task in fig.tasks(figure_settings("measured", parts=["fit"]))] == ["fit"]
    limits = fig.tasks(figure_settings("measured", parts=["plans"], limits=[0.6, 0.3], calls=7))
    assert limits == [{"part": "plans", "limit": limit, "calls": 7} for limit in (0.6, 0.3)]
    with pytest.raises(cli.UsageError, match="there is no part 'peak'; the nearest is 'peaks'"):
        fig.tasks(figure_settings("measured", parts=["peak"]))


def test_a_changed_measurement_is_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("steps.csv", "h100_resnet50.csv", "h100_resnet50.yaml"):
        (tmp_path / name).write_text("a")
    monkeypatch.setattr(fig, "DATA", tmp_path)
    before = fig.tasks(figure_settings("measured", parts=["steps"]))
    (tmp_path / "h100_resnet50.yaml").write_text("b")
    after = fig.tasks(figure_settings("measured", parts=["steps"]))
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]


def test_each_bar_is_reached_or_missed() -> None:
    heads, cells = fig.FIGURE.table(ROWS)
    assert len(heads) == 6 and all(len(line) == 6 for line in cells)
    bars = {line[0]: (line[3], line[4], line[5]) for line in cells}
    assert bars["H100, ResNet-50, 128: sum of kernels (fitted to it)"] == ("-5.0%", "+50.0%", "10%: reached")
    assert bars["V100, ResNet-50, 32, fp32, NCHW: sum of kernels (fitted to it)"] == (
        "+20.0%",
        "+100.0%",
        "10%: missed",
    )
    assert bars["A100 80 GB, VGG13, 128, TF32, NCHW: iteration"] == ("+4.0%", "+200.0%", "10%: reached")
    # Of two kernels of at least 20 us: 10 % and 2.5 %; 100 % and 25 %.
    assert bars["H100, ResNet-50, 128: 2 kernels of at least 20 us, median error"] == ("6.2%", "62.5%", "15%: reached")
    assert bars["the same, 300 of them by coefficients fitted to other shapes"] == ("20.0%", "", "15%: missed")
    assert bars["overhead within 50% of the peak: said, under measured times"] == (
        "2.0 points", "2.0% said, 30.0%", "3%: reached")  # fmt: skip
    assert bars["within 50%: above the plan made for the measured times, and the floor"] == (
        "+4.0 points", "+27.0 points", "3%: missed")  # fmt: skip
    # Of three runs one did not fit, and both said that it would.
    assert bars["peaks of 2 runs, ours, mean error; 1 of 3 verdicts wrong"] == (
        "3.0%",
        "",
        "4.2%: reached; none wrong: missed",
    )
    assert bars["peaks of 2 runs, xMem, mean error; 1 of 3 verdicts wrong"] == ("20.0%", "", "")


def test_rows_of_a_trace() -> None:
    task = fig.tasks(figure_settings("measured", parts=["steps"]))[0]
    row = {**task, **fig.run(task, H100)}
    assert row["kind"] == "kernels" and len(row["rows"]) == 396
    assert fig.all_steps([row])[0].measured == pytest.approx(70.723)
