"""The whole step of Llama 3 8B: its tasks, its rows on a small step, its table and picture."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.figures import llama8b
from experiments.figures.llama8b import GB
from simulator import Kernel, Machine, Program, Tensor
from tests.experiments.conftest import figure_settings

GPU = Machine.load("h100")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Two GB of parameters, 4 GB that the forward pass leaves for the backward pass, 4 GB between."""
    kinds = ("parameter", "activation", "activation", "gradient")
    tensors = tuple(
        Tensor(name, size * GB, kind, kind == "parameter")
        for name, size, kind in zip("pabg", (2, 4, 4, 1), kinds, strict=True)
    )
    kernels = (
        Kernel("first", "matmul", "forward", (0,), (1,), 10**9, flops=3),
        Kernel("second", "matmul", "forward", (0,), (2,), 10**9),
        Kernel("third", "matmul", "backward", (2,), (3,), 10**9),
        Kernel("fourth", "matmul", "backward", (1, 3), (0,), 10**9),
    )
    made = Program("small", tensors, kernels)
    monkeypatch.setattr(llama8b, "_captured", lambda changes, machine: made)
    return made


def rows(**more: Any) -> list[dict[str, Any]]:
    few = {"limits": [10, 7, 5], "methods": ["floor", "autoswap_swdoa", "checkpoint_all"], "options": {}}
    return [{**task, **llama8b.run(task, GPU)} for task in llama8b.tasks(figure_settings("llama8b", **{**few, **more}))]


def test_tasks_are_the_program_and_every_method_at_every_limit() -> None:
    asked = figure_settings("llama8b")
    made = llama8b.tasks(asked)
    assert made[0]["method"] is None and len(made) == 1 + len(asked.limits) * len(asked.methods)
    assert [task["limit_gb"] for task in made[1:]] == [x for x in (80, 60, 40) for _ in asked.methods]
    (home,) = {str(task["options"]) for task in made if task["method"] == "home"}
    assert home == str(OmegaConf.to_container(asked.options.home))


def test_rows_by_hand(small: Program) -> None:
    """At 10 GB all fits; at 7 GB 4 GB leave and come back, at 55.2 and 55.36 GB/s, while one kernel runs."""
    step, *found = rows()
    assert (step["kernels"], step["tensors"], step["flops"], step["ideal_ns"]) == (4, 4, 3, 4 * 10**9)
    assert step["peak_bytes"] == 11 * GB and step["persistent"] == {"parameter": 2 * GB}
    assert step["peak_by"] == {"parameter": 2 * GB, "activation": 8 * GB, "gradient": GB}
    by = {(row["method"], row["limit_gb"]): row for row in found}
    assert by["floor", 7]["least_bytes"] == 7 * GB and by["floor", 7]["overhead_percent"] is not None
    swapped = by["autoswap_swdoa", 7]
    assert swapped["decisions"] == 1 and swapped["peak_bytes"] <= 7 * GB
    out, back = (round(100 * 4e9 / rate / 4, 4) for rate in (55.2e9, 55.36e9))
    assert swapped["overhead_percent"] == pytest.approx(out + back, abs=1e-3)
    assert by["autoswap_swdoa", 5]["overhead_percent"] is None
    assert by["autoswap_swdoa", 5]["reason"].startswith("the smallest limit it can reach is 7,000,000,000")


def test_table_notes_and_picture(small: Program) -> None:
    made = rows()
    heads, cells = llama8b.FIGURE.table(made)
    assert heads == ["overhead (time to plan)", "10 GB", "7 GB", "5 GB"]
    assert [line[0] for line in cells] == ["the floor", "AutoSwap SWDOA", "checkpoints, every block"]
    assert cells[1][3].startswith("–")
    words = "\n".join(llama8b.FIGURE.notes(made))
    assert "4 kernels, 4 tensors" in words and "Its peak is 11.0 GB (parameter 2.0, activation 8.0" in words
    assert "No plan fits less than 7.0 GB" in words
    assert "5 GB: 0 of 2 methods have a plan" in words
    assert "AutoSwap SWDOA, no plan at 5 GB: the smallest limit it can reach is 7,000,000,000 bytes." in words
    only = [row for row in made if row["method"] != "floor"]  # without the floor
    assert "floor" not in "\n".join(llama8b.FIGURE.notes(only))
