"""Tests the trackers: reads back files of TensorBoard and MLflow; replaces Weights & Biases by a stub."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.common import tracking
from experiments.common.cli import UsageError

CONFIG = {"seed": 3, "agent": {"learning_rate": 0.1, "widths": [1, 2]}}


def write(name: str, out: Any) -> None:
    tracker = tracking.TRACKERS[name](out, CONFIG)
    tracker.log_scalars(0, {"overhead": 0.5, "best": math.inf})
    tracker.log_scalars(7, {"overhead": 0.25, "best": 0.25})
    tracker.close()


def test_tensorboard(tmp_path) -> None:
    write("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("overhead")] == [(0, 0.5), (7, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("best")] == [(7, 0.25)]


@pytest.mark.nightly
def test_mlflow_in_files_of_the_run_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out = tmp_path / "my run"
    out.mkdir()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # set by tracking.py; the test restores it
    write("mlflow", out)
    from mlflow import MlflowClient

    client = MlflowClient((out / "mlruns").absolute().as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("headroom").experiment_id])
    assert run.info.run_name == "my run" and run.info.status == "FINISHED"
    assert run.data.params == {"seed": "3", "agent.learning_rate": "0.1", "agent.widths": "[1, 2]"}
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "overhead")] == [(0, 0.5), (7, 0.25)]
    assert run.data.metrics["best"] == 0.25
    write("mlflow", out)  # a second run of the same experiment
    assert len(client.search_runs([run.info.experiment_id])) == 2


def test_wandb_logs_the_same(tmp_path, monkeypatch) -> None:
    said: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: said.append((step, values)), finish=lambda: said.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: said.append(options) or run))
    write("wandb", tmp_path)
    assert said == [
        {"project": "headroom", "name": tmp_path.name, "dir": str(tmp_path), "config": CONFIG},
        (0, {"overhead": 0.5}),
        (7, {"overhead": 0.25, "best": 0.25}),
        "finished",
    ]


def test_no_tracker_and_a_missing_tracker(tmp_path, monkeypatch) -> None:
    write("none", tmp_path)
    assert not list(tmp_path.iterdir())
    assert tracking.tracker_class(DictConfig({"tracker": "mlflow"})) is tracking.TRACKERS["mlflow"]
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="tracker: wandb"):
        tracking.tracker_class(DictConfig({"tracker": "wandb"}))
