"""Experiment trackers: TensorBoard (default), Weights & Biases, MLflow (if installed), or none.

MLflow writes to MLFLOW_TRACKING_URI, else into the run directory (``mlflow ui --backend-store-uri RUN/mlruns``).
Weights & Biases reads its own environment variables (WANDB_MODE=offline keeps data local).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.help import flat


class Tracker:
    """Base class of the trackers; logs nothing.

    Args:
        out: run directory.
        config: configuration of the run.
    """

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        pass

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the finite values of a step."""
        self.log(step, {key: float(value) for key, value in values.items() if math.isfinite(value)})

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes finite values."""

    def close(self) -> None:
        """Flushes and closes the tracker."""


class _TensorBoard(Tracker):
    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run logs all its steps again.
        self._writer = SummaryWriter(str(out / "tb"), purge_step=0)

    def log(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB(Tracker):
    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        self._run = import_module("wandb").init(project="headroom", name=out.name, dir=str(out), config=dict(config))

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow(Tracker):
    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        local = "MLFLOW_TRACKING_URI" not in os.environ
        if local:  # required by MLflow >= 3 for a file store
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = import_module("mlflow").MlflowClient((out / "mlruns").absolute().as_uri() if local else None)
        existing = client.get_experiment_by_name("headroom")
        experiment = existing.experiment_id if existing else client.create_experiment("headroom")
        self._client = client
        self._run = client.create_run(experiment, run_name=out.name).info.run_id
        for key, value in flat(config):
            client.log_param(self._run, key, str(value)[:500])  # MLflow's length limit

    def log(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._client.log_metric(self._run, key, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "mlflow": _MLflow,
    "none": Tracker,
}


def tracker_class(cfg: DictConfig) -> type[Tracker]:
    """Returns the class of the config's tracker; raises UsageError if it is unknown or not installed."""
    name: str = cli.choice(cfg, "tracker", tuple(TRACKERS))
    if name in ("wandb", "mlflow") and find_spec(name) is None:
        raise cli.UsageError(f"tracker: {name} is not installed; the extra is {name}")
    return TRACKERS[name]
