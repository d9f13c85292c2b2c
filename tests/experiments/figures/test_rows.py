"""Tests rows of the papers' figures on a toy network: the keys of the committed rows, and a complete table."""

import json
from typing import Any

import pytest

from experiments import figures
from experiments.figures.figure import find
from simulator import Machine
from simulator.pool import Packing, program_lifetimes
from tests.experiments.conftest import ROOT, chain

GPU = Machine.load("gtx1080ti")
VGG = "vgg16_imagenet"
MB = 2**20


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("smartpool_fig8", {"network": "vgg16", "curve": "load_min", "limit": None}),
        ("smartpool_fig9", {"network": "vgg16", "limits": [647, 607], "seed": None}),
        (
            "smartpool_fig11",
            {"network": "vgg16", "overheads": [0.0, 1.0], "geeps": [1.0, 0.5], "steps": 2, "evaluations": 5},
        ),
        ("smartpool_optimality", {"network": "vgg19", "leave": [0.3], "calls": 50}),
        ("smartpool_table2", {"network": "vgg16", "steps": 2}),
        ("superneurons_fig2", {"network": "inception_v4"}),
        ("superneurons_fig8", {"network": VGG}),
        ("superneurons_table2", {"network": VGG, "batch": 16}),
        ("tensile_ratio", {"network": VGG, "batch": 2, "jobs": 2, "ratio": 0.5}),
        ("tensile_speed", {"network": VGG, "batch": 2, "adam": False, "factor": 4}),
        (
            "tensile_start",
            {"network": VGG, "share": 0.8, "networks": [VGG, "vgg16"], "batch": 2, "batches": [4], "iterations": 3},
        ),
        ("tensile_table1", {"network": VGG, "batch": 2}),
        ("tensile_table2", {"jobs": [VGG, VGG], "batch": 2}),
    ],
)
def test_a_toy_network_makes_a_row(name: str, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program = chain(12, 32 * MB)
    monkeypatch.setattr(figures, "program", lambda name, machine, **changes: program)
    figure = find(name)
    row = json.loads(json.dumps({**task, **figure.run(task, GPU)}))
    committed = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())["rows"]
    identity_keys = ("curve", "seed")
    stored = next(row for row in committed if all(row.get(key) == task.get(key) for key in identity_keys))
    assert set(row) == set(stored) - {"task_seconds"}
    if name != "smartpool_fig9":  # its table needs a second row
        heads, cells, _ = figure.format_text([row])
        assert cells and all(len(line) == len(heads) for line in cells)


def test_the_seeds_of_bayesian_optimization_are_no_worse_than_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "program", lambda name, machine: chain(12, 10 * MB))
    figure = find("smartpool_fig9")
    task = {"network": "vgg16", "limits": [647, 607]}
    rows = [{**task, "seed": seed, **figure.run({**task, "seed": seed}, GPU)} for seed in (None, 1)]
    scores, bo = (row["overheads"] for row in rows)
    for i, best in enumerate(bo["bo"]):
        assert scores["floor"][i] <= best <= min(found[i] for name, found in scores.items() if name != "floor")
    assert len(figure.format_text(rows)[1]) == 2


def test_overlapping_blocks_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = program_lifetimes(chain()).intervals
    assert figures.checked_packing("smartpool", lives).footprint == lives.peak_bytes
    monkeypatch.setattr(figures, "run", lambda *_: (lives, Packing(0 * lives.nbytes, 0)))
    with pytest.raises(AssertionError, match=r"smartpool: blocks \d+ and \d+ share a byte"):
        figures.checked_packing("smartpool", lives)
