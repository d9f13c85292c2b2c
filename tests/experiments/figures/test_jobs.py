"""The figures of several jobs: small ones run, and what they say of rows."""

import pytest
from omegaconf import DictConfig

from experiments import figures
from experiments.figures import jobs, jobs_timeline
from simulator import Machine
from tests.experiments.conftest import chain

MACHINE = Machine("small", 2**30, 12 * 10**9, 12 * 10**9)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network is a chain of layers."""
    monkeypatch.setattr(figures, "program", lambda name, machine, **changes: chain(4 if name == "vgg11" else 6))


def test_jobs_by_every_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SPLITS", ("autoswap_swdoa",))  # the others are as slow as they are
    monkeypatch.setattr(jobs, "EXACT", "capuchin")
    settings = {"tasks": [{"jobs": ["vgg11", "resnet18"], "limit": 0.7}], "batch": 1, "calls": 20}
    (task,) = jobs.tasks(DictConfig(settings))
    row = {**task, **jobs.run(task, MACHINE)}
    found = {key: one["overhead"] for key, one in row["planners"].items() if one is not None}
    assert {"tensile", "autoswap_swdoa", "split", "control", "seconds", "exact_split", "joint"} <= set(found)
    assert all(overhead >= row["floor"] - 1e-9 for overhead in found.values())
    assert found["joint"] <= found["split"] and found["seconds"] <= found["control"]
    assert row["planners"]["seconds"]["plan_s"] >= row["planners"]["joint"]["plan_s"]
    heads, ((*cells,),) = jobs.FIGURE.table([row])
    assert len(heads) == len(cells) and cells[0] == "VGG11, ResNet18, 70%"
    assert "Joint annealing is below" in jobs.FIGURE.notes([row])[0]


def test_jobs_that_come_and_leave() -> None:
    settings = {
        "planners": ["tensile"], "span": 14, "drift": -0.3, "limit": 0.8, "batch": 1,
        "jobs": [{"workload": "vgg11", "arrives": 0, "leaves": None, "drifts": 6},
                 {"workload": "resnet18", "arrives": 2, "leaves": 8}],
    }  # fmt: skip
    (task,) = jobs_timeline.tasks(DictConfig(settings))
    row = {**task, **jobs_timeline.run(task, MACHINE)}
    assert [why for _, why, _ in row["replanned"] if why != "drift"] == ["arrival", "arrival", "departure"]
    assert row["peak_bytes"] <= row["limit_bytes"]
    first, second = row["ran"]
    assert second["admitted_ns"] == 2 * chain().ideal_ns and second["left_ns"] < first["left_ns"]
    # The curves are the most that was held: none is above the peak, and one reaches it.
    assert max(held for _, held in row["memory"]) == row["peak_bytes"]
    _, cells = jobs_timeline.FIGURE.table([row])
    assert [cell[1] for cell in cells] == ["VGG11 1", "ResNet18 2"]
    assert "1 by departure" in jobs_timeline.FIGURE.notes([row])[1]
