"""Fig. 2 of the SuperNeurons paper: memory of a training step with and without convolution workspaces."""

from __future__ import annotations

from omegaconf import DictConfig

from agents.heuristics.workspace import algorithms
from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Panel, groups
from experiments.plotting.palette import INK, MEASURED, PREDICTED
from simulator.machine import Machine

GB = 10**9
BATCH = 32
PAPER = {"resnet152_imagenet": 18.5, "inception_v4": 44.3}  # GB with workspaces, the two that the text names


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    return [{"network": name} for name in figures.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """Peak bytes of a step in which each convolution takes its fastest algorithm, or the one of the least workspace."""
    program = figures.program(task["network"], machine, batch_size=BATCH, algorithms=True)
    chosen = [min(algorithms(kernel)) for kernel in program.kernels]
    held = [live - kernel.workspace for live, kernel in zip(program.live_bytes, program.kernels, strict=True)]
    tensors = sum(tensor.nbytes for tensor in program.tensors)  # none of them ever freed
    return {
        "without": max(held), "fastest": max(a + b for a, (_, b, _) in zip(held, chosen, strict=True)),
        "sum": tensors + sum(nbytes for _, nbytes, _ in chosen), "all": tensors,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """Each network, and what workspaces add."""
    found = [
        {**row, "label": figures.label(row["network"]), "paper": PAPER.get(row["network"]),
         "times": row["sum"] / row["all"], "live_times": row["fastest"] / row["without"]}
        for row in rows
    ]  # fmt: skip
    return {"networks": found, "batch": BATCH, "most": max(one["times"] for one in found)}


def chart(rows: list[Row]) -> Chart:
    """Bars of all tensors, without and with workspaces, and with liveness analysis."""
    names = [figures.label(row["network"]) for row in rows]
    series = [
        ("all tensors", PREDICTED, [row["all"] / GB for row in rows], []),
        ("all tensors and workspaces", MEASURED, [row["sum"] / GB for row in rows], []),
    ]
    theirs = [PAPER.get(row["network"]) for row in rows]
    paper = Line(theirs, list(range(len(rows))), INK, "paper", "D", "", size=7, hollow=True, front=5)
    panel = Panel("", [*groups(series, across=True), paper], Axis("GB"), Axis(names=names))
    return Chart(f"Simulated memory of a step, batch {BATCH}", [panel], size=(7.5, 0.55 * len(rows) + 1.0))


FIGURE = Figure("superneurons_fig2", tasks, run, numbers, chart)
