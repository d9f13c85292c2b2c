"""Tests HOME's and TENSILE's tables and figures, on networks small enough to compute by hand.

``chain(batch)`` has four layers. For b images, each activation x1 … x4 and gradient dx4 … dx1 has b MiB; the weight has
4 MiB. Forward kernel i reads the weight and x(i-1), and writes x(i). Backward kernel i reads the weight, x(i) and
dx(i+1), and writes dx(i). The machine has 54 MiB: 4 + 5 b fits up to 10 images, 4 + 3 b up to 16. MiB in use:

    kernel                 f1   f2   f3   f4   b4      b3          b2         b1
    tensors but weight     x1   x1-2 x1-3 x1-4 x1-4 dx4 x1-3 dx4 dx3  x1-2 dx3 dx2  x1 dx2 dx1
    MiB                    4+b  4+2b 4+3b 4+4b 4+5b    4+5b        4+4b       4+3b
    x1, x2, x3 swapped out 4+b  4+2b 4+2b 4+2b 4+2b    4+3b        4+3b       4+3b
"""

import json
import math
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from executor.capture.durations import with_roofline
from experiments import figures
from experiments.figures import home as fig, home_networks as home, home_search, tensile, tensile_times
from experiments.figures.figure import Figure
from simulator import Kernel, Machine, Program, Tensor, simulate
from tests import tiny

MIB = 2**20
GPU = Machine.load("rtx2080ti")
MACHINE = replace(GPU, name="small", memory_bytes=54 * MIB)
SEARCH = {"particles": 20, "iterations": 20}


def chain(batch: int, layers: int = 4) -> Program:
    tensors = [Tensor("weight", 4 * MIB, "parameter", True)]
    kernels = []
    work = {"flops": batch * 10**9, "bytes": 1}
    for i in range(1, layers + 1):
        tensors.append(Tensor(f"x{i}", batch * MIB))
        kernels.append(Kernel(f"f{i}", "conv", "forward", (0, i - 1) if i > 1 else (0,), (i,), 0, **work))
    work["flops"] *= 2
    for i in range(layers, 0, -1):
        tensors.append(Tensor(f"dx{i}", batch * MIB, "gradient"))
        inputs = (0, i) if i == layers else (0, i, len(tensors) - 2)
        kernels.append(Kernel(f"b{i}", "conv", "backward", inputs, (len(tensors) - 1,), 0, **work))
    return Program("chain", tuple(tensors), tuple(kernels))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces every network with the chain."""
    monkeypatch.setattr(home, "program", lambda network, machine, batch: with_roofline(chain(batch), machine))
    monkeypatch.setattr(home, "_modeled_ns", {})
    monkeypatch.setattr(home, "_captured", lambda network: tuple(chain(batch) for batch in home.CAPTURED))


def table_of(figure: Figure, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the table's cells after checking that all are filled."""
    heads, cells, _ = figure.format_text(rows)
    assert cells and all(len(line) == len(heads) for line in cells)
    assert json.loads(json.dumps(rows)) == rows
    return cells


def test_a_program_at_any_batch_size() -> None:
    sizes = home.Sizes((chain(64), chain(128)), (64, 128), MACHINE)
    for batch in (2, 96, 1000):
        assert sizes.at_batch(batch).fingerprint == sizes.timed(chain(batch)).fingerprint
        assert sizes.at_batch(batch).peak_bytes == (4 + 5 * batch) * MIB
    assert home.unplanned_batch(sizes) == 10

    scaled = home.Sizes((chain(64), chain(128)), (64, 128), MACHINE, (50, 2.0))
    assert scaled.at_batch(50).ideal_ns == 2 * 10**9
    # Slightly less than twice the time for twice the images, since launch overhead is constant.
    assert 0.999 < scaled.at_batch(100).ideal_ns / (4 * 10**9) < 1
    with pytest.raises(ValueError, match="kernels"):
        home.Sizes((chain(2), chain(4, layers=3)), (2, 4), MACHINE)
    odd = chain(4)
    odd = replace(odd, tensors=(odd.tensors[0], replace(odd.tensors[1], nbytes=4 * MIB + 1), *odd.tensors[2:]))
    with pytest.raises(ValueError, match="no multiple of 2"):
        home.Sizes((chain(2), odd), (2, 4), MACHINE)


def test_table2_finds_the_largest_batches(small: None) -> None:
    task = {"network": "vgg16", "resolution": 0.01, "slower": 0.0001, **SEARCH}
    row = {**task, **fig.Table2().run(task, MACHINE)}
    results = row["found"]
    assert [results[m]["bound"] for m in home.TABLE2] == [10, 16, 16, 16]
    assert [results[m]["batch"] for m in home.TABLE2] == [10, 16, 16, 16]
    assert all(10 <= result["bounded"] <= result["batch"] for result in results.values())
    sizes = home.sizes("vgg16", MACHINE)
    batch = results["HOME"]["bounded"]
    assert batch < 16, "16 images wait for swaps"
    run = home.run_plan(sizes.at_batch(batch), home.first_plan("HOME", sizes.at_batch(batch), MACHINE, task), MACHINE)
    assert run and run["iteration_ns"] / batch <= 1.0001 * results["PyTorch"]["iteration_ns"] / 10
    assert results["PyTorch"]["overhead"] == 0 and results["HOME"]["overhead"] > 0
    # x3 may stay: with x1 and x2 swapped out, b4 needs 4 + 3 b too.
    assert results["HOME"]["swapped_bytes"] + results["HOME"]["recomputed_bytes"] >= 2 * 16 * MIB
    # PyTorch's images/s equal the paper's at any batch except for launches; its batch of 2759 does not fit here.
    entry = fig.table2_entry(row)
    assert entry["rate"]["PyTorch"] == pytest.approx(2786, rel=0.01) and entry["rate_at"]["PyTorch"] is None
    cells = [line[:5] for line in table_of(fig.Table2(), [row])]
    assert cells[0] == ["VGG16, PyTorch", "2,759", "10", "1.00", "1.00"]
    assert cells[1] == ["VGG16, Capuchin", "4,250", "16", "1.54", "1.60"]
    assert cells[-1] == ["VGG16, HOME", "5,125", "16", "1.86", "1.60"]


def test_fig6_runs_every_method(small: None) -> None:
    tasks = [{"network": "vgg16", "share": share, **SEARCH} for share in (0.5, 1.0, 1.5, 1.7)]
    rows = [{**task, **fig.Fig6().run(task, MACHINE)} for task in tasks]
    assert [row["batch"] for row in rows] == [5, 10, 15, 17]
    fits = [{m for m, result in row["methods"].items() if result} for row in rows]
    # Every output is a feature map for vDNN, SuperNeurons and HOME: a convolution that the next one reads.
    assert fits[0] == fits[1] == set(home.METHODS)
    assert "PyTorch" not in fits[2] and {"Capuchin", "HOME"} <= fits[2]
    assert fits[3] == set(), "17 images need 55 MiB with every feature map away"
    assert fig.rate(rows[1], "PyTorch") == pytest.approx(2786, rel=0.01)  # the paper's, as the times are almost linear
    assert rows[1]["methods"]["HOME"]["overhead"] == 0 < rows[1]["methods"]["vDNN"]["overhead"]
    assert table_of(fig.Fig6(), rows)[1][:2] == ["VGG16, 1.00", "10"]
    task = {"network": "vgg16", "batch": 15, **SEARCH}  # Fig. 7 decomposes the same iterations
    row = {**task, **fig.Fig7().run(task, MACHINE)}
    assert all(sum(result["parts"].values()) == result["iteration_ns"] for result in row["methods"].values() if result)
    assert [line[:2] for line in table_of(fig.Fig7(), [row])[-2:]] == [["VGG16, HOME", "15"], ["the same, paper", ""]]


def test_fig7_parts_of_the_tiny_plan() -> None:
    """Decomposes the plan of tests/tiny.py: a1 is swapped out during 20-60 and swapped in during 90-130.

    Kernels run in 0-30, 60-110 and 130-170. Overlap: 20 to 30 and 90 to 110. Kernels alone: 120 - 30. Waits: 30 for
    memory, 20 for data.
    """
    timeline = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    parts = fig.split_iteration(timeline)
    assert parts == {"computation": 90, "overlap": 30, "recomputation": 0, "swapping": 50}
    assert sum(parts.values()) == timeline.iteration_ns == 170
    recomputed = simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert fig.split_iteration(recomputed) == {"computation": 120, "overlap": 0, "recomputation": 10, "swapping": 0}


def history(seed: int, best: list[int | None], mean: list[int | None]) -> dict[str, Any]:
    return {
        "network": "squeezenet",
        "share": 2.0,
        "update": "tensors",
        "seed": seed,
        **SEARCH,
        "batch": 20,
        "ideal_ns": 100,
        "worst": mean,
        "mean": mean,
        "best": best,
        "fit": [0 if ns is None else 20 for ns in best],
        "calls": 10 * len(best),
    }


def test_fig8_of_hand_made_searches() -> None:
    rows = [history(0, [130, 121, 120], [160, 140, 130]), history(1, [None, 110, 110, 110], [None, 150, 120, 120])]
    # 121 <= 1.01 * 120; the other starts infeasible.
    assert [home_search.iterations_needed(row) for row in rows] == [2, 2]
    best = home_search.curve(rows, "best")
    assert math.isnan(best[0]) and best[1:].tolist() == pytest.approx([1.155, 1.15, 1.15])
    assert table_of(home_search.Fig8(), [rows[0]])[0][1:6] == ["Algorithm 3", "30", "2.0", "10", "1.300×"]
    assert table_of(home_search.Fig8(), rows)[0][2:5] == ["30", "2.0", "10"]


def test_fig8_runs(small: None) -> None:
    task = {"network": "vgg16", "share": 1.5, "seed": 0, "update": "whole", **SEARCH}
    row = home_search.Fig8().run(task, MACHINE)
    assert row["batch"] == 15 and len(row["best"]) == SEARCH["iterations"]
    assert len(row["worst"]) == len(row["mean"]) == len(row["best"]) == len(row["fit"])
    fitting = [ns for ns in row["best"] if ns is not None]
    assert fitting and min(fitting) >= row["ideal_ns"]


def test_table3_measures(small: None) -> None:
    task = {"network": "vgg16", "share": 1.5, **SEARCH}
    row = {**task, **home_search.Table3().run(task, MACHINE)}
    assert (row["kernels"], row["maps"]) == (8, 3)
    assert 0 < row["evaluation_s"] < 0.1 and 0 < row["search_s"] and row["calls"] > 20
    measured = {**row, "search_s": 5.0, "evaluation_s": 1e-4, "calls": 50_000, "processor": "a processor"}
    assert table_of(home_search.Table3(), [measured])[0] == ["VGG16", "25", "5.0", "1.4", "0.100", "3", "50,000"]
    assert home_search.table3_entry(measured)["time"] == pytest.approx(14)


def test_tensile_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = home.Sizes((chain(64), chain(128)), (64, 128), MACHINE).at_batch(8)  # a peak of 44 MiB
    monkeypatch.setattr(figures, "program", lambda name, machine, **changes: program)
    task = {"network": "vgg16_imagenet", "batch": 8}
    row = {**task, **tensile.Table1().run(task, MACHINE)}
    assert row["peak_bytes"] == 44 * MIB and row["maps"] == 3 * 8 * MIB
    unlimited = row["methods"]["TENSILE"]
    limited = row["methods"][tensile.HELD]
    assert unlimited["iteration_ns"] == row["ideal_ns"], "nothing waits in the whole memory"
    assert limited["peak_bytes"] <= unlimited["peak_bytes"] < row["peak_bytes"]
    cells = next(line for line in table_of(tensile.Table1(), [row]) if line[0] == "VGG16, TENSILE")
    assert cells[2::2] == [f"{100 - 100 * unlimited['peak_bytes'] / row['peak_bytes']:.1f}%", "0.0%", "∞"]


@pytest.mark.nightly
def test_kernel_times_of_networks_held_out() -> None:
    settings = {
        "networks": ["squeezenet", "mobilenet", "resnet18_cifar"],
        "sources": ["model", "measured"],
        "batch": 2,
        "repeats": 1,
    }
    figure = tensile_times.Times()
    rows = [{**task, **figure.run(task, GPU)} for task in figure.tasks(OmegaConf.create(settings))]
    model, measured = rows
    assert model["device"] == "rtx2080ti" and measured["device"].startswith("cpu")
    # The simulator's times are a function of the network's inputs, except for unseen kernel kinds.
    assert median(scores["all"] for scores in model["held"].values()) > 0.5
    assert all(-9 < scores["all"] <= 1 and scores["iteration"] > 0 for row in rows for scores in row["held"].values())
    assert all(scores["shapes"]["all"] <= 1 for row in rows for scores in row["held"].values())
    _, cells, _ = figure.format_text(rows)
    assert len(cells) == 3 * 4 + 4 + 1 and cells[-1][:4] == ["paper's mean", "", "0.582", "0.805"]
    inputs = ["model", "model with shapes", "measured", "measured with shapes"]
    assert [line[1] for line in cells[-5:-1]] == inputs == [line[1] for line in cells[:4]]


def test_operator_shapes() -> None:
    captured, _, device = tensile_times.timed_program("alexnet", {"source": "model", "batch": 2}, GPU)
    shapes = np.expm1(tensile_times.operator_shapes(captured)).round().tolist()
    assert device == GPU.name and len(shapes) == len(captured.program.kernels)
    # Images, filters and biases of CONV1, whose stride is 4 x 4; then its ReLU.
    assert shapes[0] == [2, 3, 227, 227, 96, 3, 11, 11, 96, 0, 0, 0, 0, 16]
    assert shapes[1] == [2, 96, 55, 55] + [0] * 10
