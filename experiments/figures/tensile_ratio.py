"""TENSILE, section 4.1: the maximum swapping ratio of one, two and three jobs."""

from __future__ import annotations

from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.planner import Infeasible
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.figures.smartpool_loads import ZERO
from experiments.figures.tensile import smallest, table2_outcome
from experiments.plotting.charts import Axis, Chart, Line, Panel
from simulator.machine import Machine
from simulator.plan import Plan

PANELS = (
    ("saved", "Memory saved (MSR)", "of the peak without a plan", "%"),
    ("lost", "Time lost (EOR)", "of the time without a plan", "%"),
    ("benefit", "Cost-benefit ratio (CBR)", "MSR / EOR", "{:g}"),
)
STYLES = (("#1f5fa8", "o", "-"), ("#f16913", "^", "--"), ("#238b45", "s", ":"))


class Ratio(Figure):
    """Memory saved and time lost against the maximum fraction of tensors that are swapped."""

    name = "tensile_ratio"

    def tasks(self, settings: DictConfig) -> list[Row]:
        expected = "numbers from 0 to 1"
        ratios = figures.numbers(settings, "ratios", lambda x: 0 <= x <= 1, expected)
        network, batch = figures.network(str(settings.network), "network"), cli.integer(settings, "batch", least=1)
        jobs = figures.integers(settings, "jobs", 1)
        return [{"network": network, "batch": batch, "jobs": n, "ratio": ratio} for n in jobs for ratio in ratios]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)
        programs = [program] * task["jobs"]
        planner = TENSILE("swap", max_swap_ratio=task["ratio"])

        def planned(limit: int) -> tuple[Plan, ...] | None:
            try:
                return planner.plan_jobs(programs, machine, limit)
            except Infeasible:
                return None

        without = [Plan((), program.fingerprint, "none") for program in programs]
        plans = smallest(sum(program.peak_bytes for program in programs), 200, planned) or without
        return {
            "without": table2_outcome(programs, without, machine),
            "with": table2_outcome(programs, plans, machine),
        }

    def numbers(self, rows: list[Row]) -> Row:
        groups = list(figures.grouped([facts(row) for row in rows], "jobs").values())
        last = [group[-1] for group in groups]
        return {
            "heads": [f"{one['ratio']:.0%}" for one in groups[0]],
            "groups": [{**group[0], "cells": [cell(one) for one in group]} for group in groups],
            "best": [max(group, key=lambda one: one["benefit"] or 0.0)["ratio"] for group in groups],
            "enough": [
                min(one["ratio"] for one in group if one["saved"] == end["saved"])
                for group, end in zip(groups, last, strict=True)
            ],
            "jobs": [group[0]["jobs"] for group in groups],
            "channel": min(one["channel"] for one in last),
        }

    def chart(self, rows: list[Row]) -> Chart:
        found = figures.grouped([facts(row) for row in rows], "jobs")
        ratios = [one["ratio"] for one in next(iter(found.values()))]
        panels = []
        for key, title, axis, form in PANELS:
            marks = [
                Line(range(len(lines)), [one[key] for one in lines], colour, lines[0]["label"], marker, line)
                for lines, (colour, marker, line) in zip(found.values(), STYLES, strict=False)
            ]
            where = Axis("maximum swapping ratio, %", names=[f"{100 * ratio:g}" for ratio in ratios])
            panels.append(Panel(title, marks, where, Axis(axis, form, (0, None))))
        return Chart(f"TENSILE's maximum swapping ratio, batch size {rows[0]['batch']}", panels, 3, (4.8, 3.8))


def facts(row: Row) -> Row:
    """Returns a row with its ratios; the cost-benefit ratio is None if no time is lost."""
    found, without = row["with"], row["without"]
    saved = 1 - found["peak_bytes"] / without["peak_bytes"]
    lost = found["makespan_ns"] / without["makespan_ns"] - 1
    return {
        **row, "saved": saved, "lost": lost, "benefit": saved / lost if lost > ZERO else None,
        "swaps": sum(found["decisions"]), "channel": found["channel"],
        "label": f"{figures.label(row['network'])} × {row['jobs']}",
    }  # fmt: skip


def cell(one: Row) -> str:
    """Returns MSR and EOR in per cent, and CBR (∞ if no time is lost)."""
    benefit = "∞" if one["benefit"] is None else f"{one['benefit']:.2f}"
    return f"{100 * one['saved']:.1f}/{100 * one['lost']:.1f}/{benefit}" if one["swaps"] else "–"
