"""Tests of the figure of predicted kernel times: R² on held-out networks for both sources."""

from __future__ import annotations

from statistics import median

import pytest
from omegaconf import DictConfig

from experiments.figures.tensile import Times
from simulator import Machine

MACHINE = Machine.load("rtx2080ti")
SETTINGS = {"networks": ["squeezenet", "mobilenet", "resnet18_cifar"], "sources": ["model", "measured"],
            "batch": 2, "repeats": 1}  # fmt: skip


@pytest.mark.nightly
def test_networks_held_out() -> None:
    rows = [{**task, **Times().run(task, MACHINE)} for task in Times().tasks(DictConfig(SETTINGS))]
    model, measured = rows
    assert model["device"] == "rtx2080ti" and measured["device"].startswith("cpu")
    # The simulator's times are a function of the network's inputs, except for unseen kernel kinds.
    assert median(one["all"] for one in model["held"].values()) > 0.5
    assert all(-9 < one["all"] <= 1 and one["iteration"] > 0 for row in rows for one in row["held"].values())
    _, cells, _ = Times().say(rows)
    assert len(cells) == 4 and "0.582" in cells[-1][1] and "0.805" in cells[-1][2]
