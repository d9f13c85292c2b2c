"""Figure 6 of the HOME paper: images per second against the batch size, five methods, six networks."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments import figures
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.figure import Figure
from experiments.figures.home import METHODS, NETWORKS, TABLE2
from experiments.plotting import palette
from experiments.plotting.charts import Axis, Chart, Line, Panel
from simulator.machine import Machine

SHOWN = (1.0, 2.0)  # shares in the table; the picture has all
CLAIMS = {"vDNN": 5.7, "SuperNeurons": 2.0, "Capuchin": 1.3}  # "up to": HOME's throughput over theirs, at one batch
DASHES = {"vDNN": "-.", "SuperNeurons": ":", "Capuchin": "--"}


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and batch size; a network's one after the other."""
    shares = figures.numbers(settings, "shares", lambda value: 0 < value < float("inf"), "positive numbers")
    options = home.search(settings)
    return [
        {"network": name, "share": share, **options} for name in home.networks(settings) for share in sorted(shares)
    ]


def run(task: Row, machine: Machine) -> Row:
    """What each method achieves on one network at one batch size."""
    of = home.sizes(task["network"], machine)
    options = {key: task[key] for key in ("particles", "iterations")}
    batch = round(task["share"] * home.unplanned(of))
    program = of.at(batch)
    return {
        "batch": batch,
        "limit": machine.memory_bytes,
        "ideal_ns": program.ideal_ns,
        "methods": {
            method: home.outcome(program, home.planned(method, program, machine, options), machine)
            for method in METHODS
        },
    }


# ------------------------------------------------------------------------------------------ for people


def rate(row: Row, method: str) -> float | None:
    """Images per second; None where nothing fits."""
    found = row["methods"][method]
    return float(row["batch"] / found["iteration_ns"] * 1e9) if found else None


def numbers(rows: list[Row]) -> Row:
    """The paper's claims beside ours."""
    claims = []
    for rival, theirs in CLAIMS.items():
        both = [(home_rate / other, f"{NETWORKS[r['network']].label}, batch {r['batch']:,}")
                for r in rows if (home_rate := rate(r, "HOME")) and (other := rate(r, rival))]  # fmt: skip
        claims += [{"rival": rival, "theirs": theirs, "least": min(both), "most": max(both)}] if both else []
    needed = [(r["methods"]["Capuchin"], r["methods"]["HOME"]) for r in rows if not r["methods"]["PyTorch"]]
    needed = [(theirs["iteration_ns"], ours["iteration_ns"]) for theirs, ours in needed if theirs and ours]
    gains, over_plain = [], []
    for lines in figures.grouped(rows).values():
        ideal = [row["batch"] / row["ideal_ns"] for row in (lines[0], lines[-1])]
        gains.append(ideal[1] / ideal[0] - 1)
        best, plain = (max((rate(row, m) or 0.0 for row in lines), default=0.0) for m in ("HOME", "PyTorch"))
        over_plain += [best / plain] if plain else []
    return {
        "methods": METHODS,
        "lines": [{**r, "label": NETWORKS[r["network"]].label, "cells": cells(r)} for r in rows if r["share"] in SHOWN],
        "claims": claims, "needed": len(needed) or None,
        "behind": sum(theirs < ours for theirs, ours in needed),
        "over_plain": max(over_plain, default=None), "gain": max(gains),
    }  # fmt: skip


def cells(row: Row) -> list[str]:
    """Images/s of every method."""
    found = [(rate(row, method), row["methods"][method]) for method in METHODS]
    return [
        f"{images:,.0f}{' (all)' * (of['planner'] == 'vdnn_all')}" if images else "does not fit" for images, of in found
    ]


def chart(rows: list[Row]) -> Chart:
    """A panel per network: images per second across batch sizes, and the paper's points of Table 2."""
    panels = []
    for network, lines in figures.grouped(rows).items():
        paper, marks = NETWORKS[network], []
        for method, planners in METHODS.items():
            _, colour, marker = palette.look(planners[0][0])
            marks.append(Line([row["batch"] for row in lines], [rate(row, method) for row in lines], colour,
                              f"{method}, ours{' (after the drop: all layers)' * (method == 'vDNN')}", marker,
                              DASHES.get(method, "-"), width=3.5 if method == "Capuchin" else 1.5,
                              size=9 if method == "PyTorch" else 5,
                              front=2 if method == "PyTorch" else 3))  # fmt: skip
            if method in TABLE2:
                i = TABLE2.index(method)
                marks.append(Line(paper.batch[i : i + 1], paper.throughput[i : i + 1], colour,
                                  f"{method}'s largest batch in the paper (Table 2)", marker, "", size=9, hollow=True,
                                  front=4))  # fmt: skip
        where = Axis("batch size", "{:,.0f}", (0, None)), Axis("images/s", "{:,.0f}", (0, None))
        panels.append(Panel(paper.label, marks, *where))
    return Chart("Throughput against batch size on an RTX 2080 Ti (11 GB)", panels, 3, (4.9, 3.5), (0.0, 1.1))


FIGURE = Figure("home_fig6", tasks, run, numbers, chart)
