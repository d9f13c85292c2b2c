"""Iteration time against the memory budget of "Checkmate" (MLSys 2020), compared with planners that recompute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

import agents
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, floor as floor_area
from experiments.plotting.palette import INK, look
from simulator import Machine, Plan, Program, Rerun, simulate
from simulator.files import read_json

DATA = cli.CONFIGS.parent / "tests" / "data" / "checkmate"
LABELS = {"un_11": "U-Net, batch 11", "resnet50_184": "ResNet-50, batch 184"}
PUBLISHED = ("overhead_percent", "lower_bound_percent", "solve_seconds", "status")
GIB = 2**30
SAME = 5e-5  # points; the published overheads have four decimals


class Checkmate(Figure):
    """Overhead against the memory budget of "Checkmate" (MLSys 2020), compared with planners that recompute."""

    name = "checkmate"

    def tasks(self, settings: DictConfig) -> list[Row]:
        if not (DATA / "answers.json").exists():
            raise cli.UsageError(f"{DATA} not found: the graphs come with the repository and the source distribution")
        known = {network: sorted(published(network)) for network in LABELS}
        planners: dict[str, Any] = cli.to_dict(settings)["planners"]
        out: list[Row] = []
        for network, budgets in cli.to_dict(settings)["budgets"].items():
            if network not in known:
                raise cli.UsageError(f"figure.budgets: unknown network {network!r}{cli.nearest(network, set(known))}")
            for budget in budgets:
                if budget not in known[network]:
                    raise cli.UsageError(f"figure.budgets.{network}: expected some of {known[network]}, got {budget!r}")
                out.append({"network": network, "budget_gib": budget, "planners": planners})
        return out

    def run(self, task: Row, machine: Machine) -> Row:
        program = Program.load(DATA / f"{task['network']}.json.gz")
        limit = int(task["budget_gib"] * GIB)
        theirs = published(task["network"])[task["budget_gib"]]
        replayed = simulate(program, plan_of(theirs["run"]), machine, limit)
        found: Row = {}
        for name, options in task["planners"].items():
            mode = {"mode": "recompute"} if "mode" in agents.options(name) else {}
            start = time.perf_counter()
            plan = figures.attempt(agents.make(name, **mode, **options), program, machine, limit)
            seconds = round(time.perf_counter() - start, 1)
            if plan is None:
                found[name] = {"overhead_percent": None, "plan_s": seconds}
                continue
            timeline = simulate(program, plan, machine, limit)
            found[name] = {
                "overhead_percent": round(100 * timeline.overhead, 4), "peak_bytes": timeline.peak_bytes,
                "decisions": len(plan.decisions), "plan_s": seconds,
            }  # fmt: skip
        return {
            "published": {key: theirs[key] for key in PUBLISHED},
            "replayed": {"overhead_percent": round(100 * replayed.overhead, 4), "peak_bytes": replayed.peak_bytes},
            "floor_percent": round(100 * floor(program, machine, limit, "recompute").overhead, 4),
            "found": found,
        }

    def numbers(self, rows: list[Row]) -> Row:
        names, planners = list(rows[0]["planners"]), []
        published = [row["published"]["overhead_percent"] for row in rows]
        for name in names:
            ours = [row["found"][name]["overhead_percent"] for row in rows]
            off = [a - b for a, b in zip(ours, published, strict=True) if a is not None]
            below, same = sum(o < -SAME for o in off), sum(abs(o) <= SAME for o in off)
            planners.append({"label": look(name).label, "below": below, "same": same})
        lines = [
            {**row, "label": LABELS[row["network"]], "solved": duration(row["published"]["solve_seconds"]),
             "cells": [cell(row["found"][name]) for name in names]}
            for row in rows
        ]  # fmt: skip
        exact = [abs(r["replayed"]["overhead_percent"] - b) <= SAME for r, b in zip(rows, published, strict=True)]
        return {"lines": lines, "heads": [one["label"] for one in planners], "planners": planners,
                "count": len(rows), "exact": sum(exact)}  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        panels = []
        for network, mine in figures.grouped(sorted(rows, key=lambda row: row["budget_gib"])).items():
            budgets = [row["budget_gib"] for row in mine]
            low = [row["floor_percent"] / 100 for row in mine]
            marks: list[Mark] = [floor_area(budgets, low)]
            for name in rows[0]["planners"]:
                points = [(r["budget_gib"], r["found"][name]["overhead_percent"]) for r in mine]
                x, y = zip(*((budget, over / 100) for budget, over in points if over is not None), strict=True)
                marks.append(Line(x, y, look(name).colour, look(name).label, look(name).marker))
            published = [row["published"]["overhead_percent"] / 100 for row in mine]
            marks.append(Line(budgets, published, INK, "Checkmate, Gurobi, up to 24 h", "_", "", size=16, front=5))
            panels.append(Panel(LABELS[network], marks, Axis("memory budget", "{:g} GiB"),
                                Axis("overhead of an iteration", "%", scale="log")))  # fmt: skip
        return Chart("Recomputation within Checkmate's budgets", panels, 2, (5.6, 4.2))


def published(network: str) -> dict[float, Row]:
    """Returns the published results of a network, by budget in GiB."""
    models: list[Row] = read_json(DATA / "answers.json")["models"]
    return {b["budget_gib"]: b for m in models if m["program"] == f"{network}.json.gz" for b in m["budgets"]}


def plan_of(run: Sequence[int]) -> Plan:
    """Converts a schedule, kernels in execution order with first executions in program order, to a plan."""
    decisions: list[Rerun] = []
    waiting: list[int] = []
    at = 0
    for k in run:
        if k == at:
            decisions += [Rerun(w, at) for w in waiting]
            waiting, at = [], at + 1
        else:
            waiting.append(k)
    return Plan(tuple(decisions))


def cell(found: Row) -> str:
    """Formats a planner's overhead (if it found a plan) and time."""
    over = found["overhead_percent"]
    return ("" if over is None else f"{over:.4f}%") + f" ({found['plan_s']:,.0f} s)"


def duration(seconds: float) -> str:
    """Formats a duration in hours or seconds."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:,.0f} s"
