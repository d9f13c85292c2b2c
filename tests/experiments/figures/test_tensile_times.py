"""The figure of predicted kernel times: R² on networks held out, for both sources."""

from __future__ import annotations

from statistics import median

import pytest
from omegaconf import DictConfig

from experiments.common.cli import UsageError
from experiments.figures import tensile_times
from simulator import Machine

MACHINE = Machine.load("rtx2080ti")
SETTINGS = {"networks": ["squeezenet", "mobilenet", "resnet18_cifar"], "sources": ["model", "measured"],
            "batch": 2, "repeats": 1}  # fmt: skip


def test_networks_held_out() -> None:
    rows = [{**task, **tensile_times.run(task, MACHINE)} for task in tensile_times.tasks(DictConfig(SETTINGS))]
    model, measured = rows
    assert model["device"] == "rtx2080ti" and measured["device"].startswith("cpu")
    # The model is a function of what the network sees, but for kinds of kernels that it never saw.
    assert median(one["all"] for one in model["held"].values()) > 0.5
    assert all(-9 < one["all"] <= 1 and one["iteration"] > 0 for row in rows for one in row["held"].values())
    heads, cells = tensile_times.FIGURE.table(rows)
    assert all(len(line) == len(heads) for line in cells) and len(cells) == 4
    assert "0.582" in cells[-1][1] and "0.805" in cells[-1][2]
    assert "rtx2080ti" in tensile_times.FIGURE.notes(rows)[0]


def test_one_network_has_nothing_to_learn_from() -> None:
    with pytest.raises(UsageError, match="at least two"):
        tensile_times.tasks(DictConfig({**SETTINGS, "networks": ["mobilenet"]}))
