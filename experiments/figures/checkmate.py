"""Iteration time against the memory budget of "Checkmate" (MLSys 2020), compared with planners that recompute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from omegaconf import DictConfig

import agents
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, floor as floor_area
from experiments.plotting.palette import INK, look
from simulator import Machine, Plan, Program, Rerun, simulate
from simulator.files import read_json

DATA = cli.CONFIGS.parent / "tests" / "data" / "checkmate"


class Checkmate(Figure):
    """Overhead against the memory budget of "Checkmate" (MLSys 2020), compared with planners that recompute."""

    name = "checkmate"
    labels: ClassVar = {"un_11": "U-Net, batch 11", "resnet50_184": "ResNet-50, batch 184"}
    same = 5e-5  # points; the published overheads have four decimals

    def tasks(self, settings: DictConfig) -> Rows:
        if not (DATA / "answers.json").exists():
            raise cli.UsageError(
                f"{DATA} not found: the graphs come with the repository and the source distribution; run there"
            )
        valid = {network: sorted(published(network)) for network in self.labels}
        planners: dict[str, Any] = cli.to_dict(settings)["planners"]
        tasks: Rows = []
        for network, budgets in cli.to_dict(settings)["budgets"].items():
            if network not in valid:
                raise cli.UsageError(f"figure.budgets: unknown network {network!r}{cli.nearest(network, set(valid))}")
            for budget in budgets:
                if budget not in valid[network]:
                    raise cli.UsageError(f"figure.budgets.{network}: expected some of {valid[network]}, got {budget!r}")
                tasks.append({"network": network, "budget_gib": budget, "planners": planners})
        return tasks

    def run(self, task: Row, machine: Machine) -> Row:
        program = Program.load(DATA / f"{task['network']}.json.gz")
        limit = int(task["budget_gib"] * 2**30)
        theirs = published(task["network"])[task["budget_gib"]]
        replayed = simulate(program, plan_from(theirs["run"]), machine, limit)
        results: Row = {}
        for name, options in task["planners"].items():
            mode = {"mode": "recompute"} if "mode" in agents.options(name) else {}
            start = time.perf_counter()
            plan = figures.attempt(agents.make(name, **mode, **options), program, machine, limit)
            seconds = round(time.perf_counter() - start, 1)
            if plan is None:
                results[name] = {"overhead_percent": None, "plan_s": seconds}
                continue
            timeline = simulate(program, plan, machine, limit)
            results[name] = {
                "overhead_percent": round(100 * timeline.overhead, 4),
                "peak_bytes": timeline.peak_bytes,
                "decisions": len(plan.decisions),
                "plan_s": seconds,
            }
        return {
            "published": {
                key: theirs[key] for key in ("overhead_percent", "lower_bound_percent", "solve_seconds", "status")
            },
            "replayed": {"overhead_percent": round(100 * replayed.overhead, 4), "peak_bytes": replayed.peak_bytes},
            "floor_percent": round(100 * floor(program, machine, limit, "recompute").overhead, 4),
            "found": results,
        }

    def template_values(self, rows: Rows) -> Row:
        names = list(rows[0]["planners"])
        planners = []
        published = [row["published"]["overhead_percent"] for row in rows]
        for name in names:
            ours = [row["found"][name]["overhead_percent"] for row in rows]
            differences = [a - b for a, b in zip(ours, published, strict=True) if a is not None]
            below = sum(o < -self.same for o in differences)
            equal = sum(abs(o) <= self.same for o in differences)
            planners.append({"label": look(name).label, "below": below, "same": equal})
        lines = [
            {
                **row,
                "label": self.labels[row["network"]],
                "solved": duration(row["published"]["solve_seconds"]),
                "cells": [cell(row["found"][name]) for name in names],
            }
            for row in rows
        ]
        exact = [abs(r["replayed"]["overhead_percent"] - b) <= self.same for r, b in zip(rows, published, strict=True)]
        return {
            "lines": lines,
            "heads": [entry["label"] for entry in planners],
            "planners": planners,
            "count": len(rows),
            "exact": sum(exact),
        }

    def chart(self, rows: Rows) -> Chart:
        panels = []
        for network, lines in figures.group_by(sorted(rows, key=lambda row: row["budget_gib"])).items():
            budgets = [row["budget_gib"] for row in lines]
            low = [row["floor_percent"] / 100 for row in lines]
            marks: list[Mark] = [floor_area(budgets, low)]
            for name in rows[0]["planners"]:
                points = [(r["budget_gib"], r["found"][name]["overhead_percent"]) for r in lines]
                x, y = zip(*((budget, percent / 100) for budget, percent in points if percent is not None), strict=True)
                size = 9 if name == "best" else 5  # its line coincides with that of rerun search
                marks.append(
                    Line(x, y, look(name).color, look(name).label, look(name).marker, size=size, hollow=size > 5)
                )
            published = [row["published"]["overhead_percent"] / 100 for row in lines]
            marks.append(Line(budgets, published, INK, "Checkmate, Gurobi, up to 24 h", "_", "", size=16, front=5))
            panels.append(
                Panel(
                    self.labels[network],
                    marks,
                    Axis("memory budget", "{:g} GiB"),
                    Axis("overhead of an iteration", "%", scale="log", ticks=(0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)),
                )
            )
        best = next((p for p in self.template_values(rows)["planners"] if p["label"] == look("best").label), None)
        title = "Recomputation within Checkmate's budgets"
        if best:
            title = f"Our best: below Gurobi at {best['below']}, equal at {best['same']} of {len(rows)} budgets"
        return Chart(title, panels, 2, (4.95, 4.0))


def published(network: str) -> dict[float, Row]:
    """Returns the published results of a network, by budget in GiB."""
    models: Rows = read_json(DATA / "answers.json")["models"]
    return {b["budget_gib"]: b for m in models if m["program"] == f"{network}.json.gz" for b in m["budgets"]}


def plan_from(run: Sequence[int]) -> Plan:
    """Converts a schedule, kernels in execution order with first executions in program order, to a plan."""
    decisions: list[Rerun] = []
    recomputed: list[int] = []
    kernel = 0
    for k in run:
        if k == kernel:
            decisions += [Rerun(w, kernel) for w in recomputed]
            recomputed = []
            kernel = kernel + 1
        else:
            recomputed.append(k)
    return Plan(tuple(decisions))


def cell(result: Row) -> str:
    """Formats a planner's overhead (if it found a plan) and time."""
    overhead = result["overhead_percent"]
    return ("" if overhead is None else f"{overhead:.4f}%") + f" ({result['plan_s']:,.0f} s)"


def duration(seconds: float) -> str:
    """Formats a duration in hours or seconds."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:,.0f} s"
