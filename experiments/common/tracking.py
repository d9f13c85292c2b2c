"""Where a training's scalars go: TensorBoard (the default), Weights & Biases, MLflow (where installed), or nowhere.

MLflow writes where MLFLOW_TRACKING_URI says, else into the run directory (``mlflow ui --backend-store-uri
RUN/mlruns``); Weights & Biases goes by its own environment (WANDB_MODE=offline keeps it on this computer).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from experiments.common import cli

TRACKERS = ("tensorboard", "wandb", "mlflow", "none")
_MODULES = {"wandb": "wandb", "mlflow": "mlflow"}


class Tracker(Protocol):
    """Takes the scalars of a training, step by step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Values at a step; those that are no finite numbers are left out."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


def chosen(cfg: DictConfig) -> str:
    """The tracker of the config; raises UsageError where there is no such, or it is not installed."""
    name = cli.choice(cfg, "tracker", TRACKERS)
    if name in _MODULES and find_spec(_MODULES[name]) is None:
        raise cli.UsageError(f"tracker: {name} is not installed; the extra is {name}")
    return name


def open_tracker(name: str, out: Path, config: Mapping[str, Any]) -> Tracker:
    """A tracker for a training whose run directory is ``out``.

    Args:
        name: of ``TRACKERS``.
        config: of the run, which Weights & Biases and MLflow show beside it.
    """
    kinds = {"tensorboard": _TensorBoard, "wandb": _WandB, "mlflow": _MLflow, "none": _Nowhere}
    return kinds[name](out, config)


class _TensorBoard:
    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run reports all its steps again.
        self._writer = SummaryWriter(str(out / "tb"), purge_step=0)  # type: ignore[no-untyped-call]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in _finite(values).items():
            self._writer.add_scalar(key, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class _WandB:
    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        self._run = import_module("wandb").init(project="headroom", name=out.name, dir=str(out), config=dict(config))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(_finite(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        local = "MLFLOW_TRACKING_URI" not in os.environ
        if local:  # from version 3 on MLflow asks for this where files are its store
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = import_module("mlflow").MlflowClient((out / "mlruns").absolute().as_uri() if local else None)
        known = client.get_experiment_by_name("headroom")
        experiment = known.experiment_id if known else client.create_experiment("headroom")
        self._client, self._run = client, client.create_run(experiment, run_name=out.name).info.run_id
        for key, value in _flat(config).items():
            client.log_param(self._run, key, value)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in _finite(values).items():
            self._client.log_metric(self._run, key, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Nowhere:
    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        pass

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if math.isfinite(value)}


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested mappings as one, its keys with dots; values are cut to what MLflow takes."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{before}{key}.")
        else:
            out[f"{before}{key}"] = str(value)[:500]
    return out
