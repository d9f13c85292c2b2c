"""Section 4.3 of the TENSILE paper: how well a small network predicts the times of kernels never measured."""

from __future__ import annotations

from statistics import median

import numpy as np
from omegaconf import DictConfig

from agents.heuristics.tensile.times import KernelTimes, Sample, r_squared
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Panel, Rule, groups
from simulator.machine import Machine
from simulator.program import Program

PAPER = {"all": 0.582, "expensive": 0.805}
NAMES = {"all": "all kernels", "expensive": "convolutions, products"}
EXPENSIVE = ("conv", "matmul")
SOURCES = ("model", "measured")
LEAST = -0.02  # of R² in the picture


def tasks(settings: DictConfig) -> list[Row]:
    """One per source of times; each has all networks, as they learn from each other."""
    batch, repeats = cli.integer(settings, "batch", least=1), cli.integer(settings, "repeats", least=1)
    names, sources = figures.networks(settings), cli.values(settings, "sources")
    if not sources or not set(sources) <= set(SOURCES):
        raise cli.UsageError(f"figure.sources: expected some of {', '.join(SOURCES)}, got {sources!r}")
    if len(names) < 2:
        raise cli.UsageError("figure.networks: expected at least two, one to learn from")
    return [{"source": source, "networks": names, "batch": batch, "repeats": repeats} for source in sources]


def run(task: Row, machine: Machine) -> Row:
    """R² of each network by a predictor that learned from the others, and its predicted time over the true one."""
    known: dict[str, Program] = {}
    device = machine.name
    for name in task["networks"]:
        known[name], device = timed(name, task, machine)
    samples = {name: Sample(p, 1, np.array([k.duration_ns for k in p.kernels])) for name, p in known.items()}
    held: dict[str, Row] = {}
    for name, program in known.items():
        learned = KernelTimes.fit([sample for other, sample in samples.items() if other != name])
        found, true = learned.predict(program, 1), samples[name].times
        of = np.array([kernel.kind in EXPENSIVE for kernel in program.kernels])
        held[name] = {"kernels": len(true), "all": r_squared(found, true), "expensive": r_squared(found[of], true[of]),
                      "iteration": float(found.sum() / true.sum())}  # fmt: skip
    return {"device": device, "held": held}


def timed(name: str, task: Row, machine: Machine) -> tuple[Program, str]:
    """A network's program with the source's times, and on what they are."""
    if task["source"] == "model":
        return figures.program(name, machine, batch_size=task["batch"], iteration_ms=None), machine.name
    from executor.capture.profile import measure, with_profile  # PyTorch
    from experiments import workloads

    captured = workloads.load({**figures.workload(name), "batch_size": task["batch"]}, machine)
    profile = measure(captured, "cpu", repeats=task["repeats"], cache="hot")
    return with_profile(captured.program, profile), profile.device


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """R² of every network by every source's times, and the medians."""
    sources = []
    for row in rows:
        held = {figures.label(name): one for name, one in row["held"].items()}
        low, high = (of(held, key=lambda name: held[name]["all"]) for of in (min, max))
        sources.append({**row, "worst": held[low]["all"], "worst_of": low, "best": held[high]["all"], "best_of": high})
    heads = [f"{row['source']}, {name}" for row in rows for name in NAMES.values()]
    return {
        "heads": [*heads, *(f"{row['source']}, iteration" for row in rows)], "sources": sources,
        "networks": [
            {"label": figures.label(name), "cells": [f"{row['held'][name][key]:.3f}" for row in rows for key in PAPER]
             + [f"{row['held'][name]['iteration']:.2f}" for row in rows]}
            for name in rows[0]["networks"]
        ],
        "middle": [f"{paper:.3f} / {median(one[key] for one in row['held'].values()):.3f}"
                   for row in rows for key, paper in PAPER.items()],
        "blank": ["" for _ in rows],
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A panel per source: two bars per network, the paper's means as lines."""
    inks, panels = {"all": "#9a9a9a", "expensive": "#b3123d"}, []
    for row in rows:
        names = [figures.label(name) for name in row["networks"]]
        series = []
        for key, ink in inks.items():
            found = [row["held"][name][key] for name in row["networks"]]
            below = [f"{value:.2f}, below the axis" if value < LEAST else "" for value in found]
            series.append((NAMES[key], ink, [max(value, LEAST) for value in found], below))
        marks = groups(series, across=True)
        marks += [Rule(PAPER[key], colour=ink, label=f"the paper's mean, {NAMES[key]}", width=1.4)
                  for key, ink in inks.items()]  # fmt: skip
        panels.append(Panel(f"{row['source']}: {row['device']}", marks,
                            Axis("R² on the network held out", "{:.1f}", (-0.03, 1.0)), Axis(names=names)))  # fmt: skip
    return Chart("Kernel times predicted, on networks that were not learned from", panels, 2, (5.7, 4.6), keys=2)


FIGURE = Figure("tensile_times", tasks, run, numbers, chart, alone=True, simulated=False)
