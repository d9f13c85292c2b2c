"""Table 5 of the SuperNeurons paper: the largest batch of six networks that trains in 12 GB, by framework."""

from __future__ import annotations

from omegaconf import DictConfig

import agents
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import frameworks
from experiments.figures.figure import Figure
from experiments.figures.frameworks import METHODS
from experiments.figures.home import Sizes
from experiments.plotting.charts import Chart
from experiments.plotting.palette import label
from simulator.compiled.engine import simulate
from simulator.machine import Machine

PAPER = {  # None: could not be run
    name: dict(zip(frameworks.FRAMEWORKS, row, strict=True))
    for name, row in {
        "alexnet": (768, 768, 1024, 1408, 1792),
        "vgg16_imagenet": (48, 64, 48, 80, 224),
        "inception_v4": (16, None, None, 64, 240),
        "resnet50_imagenet": (24, 80, 32, 128, 384),
        "resnet101_imagenet": (16, 48, 16, 80, 256),
        "resnet152_imagenet": (16, 32, 16, 48, 176),
    }.items()
}
BATCHES = (32, 64)  # captured
MOST = 1 << 14
CHECKED = "superneurons"
NEAR = 0.97  # of the memory: full


def tasks(settings: DictConfig) -> list[Row]:
    """One per network, and one for its plan at the paper's largest batch."""
    found = figures.networks(settings, PAPER)
    methods, ours = frameworks.methods(settings), str(settings.ours)
    if CHECKED not in methods:
        raise cli.UsageError(f"figure.methods: {CHECKED} is not among them; at its batch the captures are compared")
    searches: list[Row] = [{"network": name, "methods": methods} for name in found]
    return searches + [{"network": name, "planner": ours, "batch": PAPER[name]["SuperNeurons"]} for name in found]


def run(task: Row, machine: Machine) -> Row:
    """Per method the largest batch that fits; or what a planner makes of one batch."""
    name = task["network"]
    if "planner" in task:
        program = figures.program(name, machine, batch_size=task["batch"], algorithms=False)
        plan = figures.attempt(agents.make(task["planner"]), program, machine, machine.memory_bytes)
        if plan is None:
            return {"overhead": None}
        return {"overhead": simulate(program, plan, machine, machine.memory_bytes).overhead}
    small, large = (figures.program(name, machine, batch_size=batch, algorithms=False) for batch in BATCHES)
    sizes = Sizes((small, large), BATCHES, machine)
    found = {}
    for method in task["methods"]:
        batch, there = frameworks.most(method, sizes.at, machine, BATCHES[0], MOST)
        found[method] = {"batch": batch, **there}
    batch = found[CHECKED]["batch"]
    if figures.program(name, machine, batch_size=batch, algorithms=False) != sizes.at(batch):
        raise AssertionError(f"{name}: at batch {batch} the program captured is not the one on the line")
    return {"found": found, "kernels": len(small.kernels), "memory": machine.memory_bytes, "host": machine.host_bytes}


# ------------------------------------------------------------------------------------------ for people


def facts(row: Row, ours: Row) -> Row:
    """A network: what fits."""
    cells = [f"{there['batch']:,}" + (f" ({there['overhead']:.0%})" if there.get("overhead") else "")
             for there in row["found"].values()]  # fmt: skip
    return {
        "label": figures.label(row["network"]), "cells": cells, "overhead": ours["overhead"],
        "paper": ["N/A" if n is None else f"{n:,}" for n in PAPER[row["network"]].values()],
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """What fits, and which methods leave memory of the GPU free."""
    searched = [row for row in rows if "found" in row]
    held = {row["network"]: row for row in rows if "planner" in row}
    short = [
        f"{METHODS[method].label} on {figures.label(row['network'])}"
        for row in searched
        for method, there in row["found"].items()
        if there.get("peak", row["memory"]) < NEAR * row["memory"]
    ]
    return {
        "networks": [facts(row, held[row["network"]]) for row in searched],
        "frameworks": [f"{name}, paper" for name in frameworks.FRAMEWORKS],
        "methods": [METHODS[method].label for method in searched[0]["found"]],
        "planner": label(next(iter(held.values()))["planner"]), "short": short or None, "host": searched[0]["host"],
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A panel per network: a bar per framework, hollow, and per method; a line where no plan goes beyond."""
    panels = []
    for row in (row for row in rows if "found" in row):
        found = {m: there["batch"] for m, there in row["found"].items()}
        bound = found.get("bound")
        bars = [(m, batch) for m, batch in found.items() if METHODS[m].planner or m == "own"]
        title = figures.label(row["network"]) + (f": no plan beyond {bound:,}" if bound else "")
        panels.append(frameworks.panel(title, PAPER[row["network"]], bars, [f"{batch:,}" for _, batch in bars],
                                       "largest batch, images", 1.15, bound))  # fmt: skip
    title = "Largest batch in 12 GB: frameworks in the paper (hollow), methods here (filled)"
    return Chart(title, panels, 3, (4.3, 3.7), (2.2, 0.4))


FIGURE = Figure("superneurons_table5", tasks, run, numbers, chart)
