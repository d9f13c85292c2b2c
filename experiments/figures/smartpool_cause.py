"""SmartPool, Table II: which cost explains that AutoSwap reduces the load further here than in the paper."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.figures.smartpool import REDUCED, lowest_free
from experiments.figures.smartpool_loads import MB, PAPER
from experiments.plotting.charts import Axis, Chart, Line, Panel
from experiments.plotting.palette import INK
from simulator.machine import Machine

PLANNER = "autoswap_swdoa"  # Bayesian optimization takes thirty times as long
LOOKS = (("#1f5fa8", "s"), ("#f16913", "^"), ("#8c564b", "v"), ("#238b45", "D"), ("#8e5bd0", "P"), ("#cb181d", "X"))


class Cause(Figure):
    """Table II with a slower link, waits per swap, and a slower host."""

    name = "smartpool_cause"
    among = REDUCED

    def tasks(self, settings: DictConfig) -> list[Row]:
        more = {
            "steps": cli.integer(settings, "steps", least=2),
            "links": figures.numbers(settings, "links", lambda x: 0 < x <= 1, "numbers of at most 1"),
            "waits_us": figures.numbers(settings, "waits_us", lambda x: x > 0, "positive numbers"),
            "issue_us": cli.integer(settings, "issue_us", least=1),
        }
        return [{**task, **more} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        load = PAPER[task["network"]]["load"] * MB
        reductions = {
            label: (program.peak_bytes - lowest_free(program, other, task["steps"], 0, PLANNER)) / load
            for label, other in variants(task, machine).items()
        }
        return {"reductions": reductions}

    def numbers(self, rows: list[Row]) -> Row:
        labels = list(rows[0]["reductions"])
        found = [
            {"label": figures.label(row["network"]), "paper": paper(row),
             "cells": [f"{row['reductions'][label]:.1%}" for label in labels]}
            for row in rows
        ]  # fmt: skip
        ratios = [
            {"variant": label, "ratio": span(row["reductions"][label] / paper(row) for row in rows)} for label in labels
        ]
        return {"networks": found, "heads": labels, "variants": ratios}

    def chart(self, rows: list[Row]) -> Chart:
        at = range(len(rows))
        marks = [Line([paper(row) for row in rows], at, INK, "paper", "o", "", size=9, hollow=True)]
        for label, (colour, marker) in zip(rows[0]["reductions"], LOOKS, strict=False):
            x, plain = [row["reductions"][label] for row in rows], label == "as measured"
            marks.append(Line(x, at, colour, label, marker, "", size=12 if plain else 7, hollow=plain))
        where = Axis("reduction without overhead, of the paper's load", "%", (0, 0.6))
        names = Axis(names=[figures.label(row["network"]) for row in rows])
        return Chart("Table II under costs that the simulator leaves out by default", [Panel("", marks, where, names)],
                     size=(9.5, 0.42 * len(rows) + 0.8))  # fmt: skip


def variants(task: Row, machine: Machine) -> dict[str, Machine]:
    """Returns the machine as measured, with slower links, with waits per swap, and with a slower host."""
    speeds = machine.h2d_bytes_per_s, machine.d2h_bytes_per_s
    found = {"as measured": machine}
    for factor in task["links"]:
        h2d, d2h = (round(speed * factor) for speed in speeds)
        found[f"link × {factor:g}"] = replace(machine, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h)
    for us in task["waits_us"]:
        found[f"wait {us:g} us"] = replace(machine, wait_ns=round(1000 * us))
    found[f"issue {task['issue_us']} us"] = replace(machine, issue_ns=1000 * task["issue_us"])
    return found


def paper(row: Row) -> float:
    """Returns the paper's reduction of a network."""
    return float(1 - REDUCED[row["network"]] / PAPER[row["network"]]["load"])
