"""How far plans are from the floor against the time that they took, on networks that the policy never learned."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
from omegaconf import DictConfig

from agents import PLANNERS
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row, heuristics, warm_up
from experiments.figures import network, planned, program
from experiments.figures.core import DRAWS, LEVEL, PUBLISHED, label
from experiments.figures.figure import Figure, Range
from experiments.plotting.charts import DASHED, Axis, Chart, Line, Mark, Panel, between
from experiments.plotting.palette import INK, Look, look
from simulator import Machine
from simulator.compiled import warm

WITHOUT = "without_network"


class TestSplit(Figure):
    """How far plans are from the floor against the time that they took, on networks that the policy never learned."""

    name = "test_split"
    alone = True

    def tasks(self, settings: DictConfig) -> list[Row]:
        config = cli.plain(settings)
        out = []
        for key, before in (("networks", ""), ("fresh", "fresh_")):
            methods = config[f"{before}methods"]
            for name, method in methods.items():
                if not isinstance(method, dict) or "planner" not in method:
                    where = f"figure.{before}methods.{name}"
                    raise cli.UsageError(f"{where}: expected a mapping with planner, got {method!r}")
            shared = {"seeds": config[f"{before}seeds"], "weights": config["weights"], "methods": methods}
            every = product(config[key], config[f"{before}machines"], config[f"{before}limits"])
            out += [
                {"network": network(str(name), key), "fresh": key == "fresh", "machine": machine, "limit": limit}
                | shared
                for name, machine, limit in every
            ]
        return out

    def run(self, task: Row, machine: Machine) -> Row:
        machine = Machine.load(task["machine"])
        built = program(task["network"], machine)
        limit = int(task["limit"] * built.peak_bytes)
        planners = {name: method["planner"] for name, method in task["methods"].items()}
        for name in {*planners.values(), *heuristics()}:
            if PLANNERS[name].learned:
                planned(warm.TINY, machine, warm.TINY.peak_bytes, name, episodes=1)
            else:
                warm_up(machine, name)
        begin = time.perf_counter()
        bound = (
            0.0 if task["fresh"] else 100 * floor(built, machine, limit).overhead
        )  # the LP of ConvNeXt takes > 10 min
        floor_s = time.perf_counter() - begin

        def entry(line: str, calls: int | None, seed: int | None, found: list[Row]) -> Row:
            known = [one["overhead_percent"] for one in found if one["overhead_percent"] is not None]
            return {
                "line": line, "calls": calls, "seed": seed, "gap": round(min(known) - bound, 4) if known else None,
                "plan_s": round(sum(one["plan_s"] for one in found), 3),
                "simulator_calls": sum(one["simulator_calls"] for one in found),
            }  # fmt: skip

        found = [entry(PUBLISHED, None, None, [planned(built, machine, limit, name) for name in heuristics()])]
        for line, calls, options in runs(task):
            for seed in task["seeds"]:
                name = planners.get(line) or planners[line.split(",")[0]]  # or the method's with other weights
                one = planned(built, machine, limit, name, **options, seed=seed)
                found.append(entry(line, calls, seed, [one]))
        floors = {"floor_percent": round(bound, 4), "floor_s": round(floor_s, 2)}
        return {"kernels": len(built.kernels), **floors, "found": found}

    def numbers(self, rows: list[Row]) -> Row:
        test, fresh = ([row for row in rows if row.get("fresh", False) is key] for key in (False, True))
        lines, networks = _lines(test)
        families = list(dict.fromkeys(figures.label(row["network"]) for row in fresh))
        heads = [*families, "mean of these"] if fresh else None
        return {"lines": lines, "families": heads, "fresh": _by_family(fresh, families), "networks": networks,
                "level": LEVEL, "tasks": len(test),
                "seeds": len(rows[0]["seeds"]), "floor_s": max(row["floor_s"] for row in rows)}  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found = points([row for row in rows if not row.get("fresh")])
        marks: list[Mark] = []
        for line in dict.fromkeys(line for line, _ in found):
            if "," in line and line in rows[0]["methods"]:
                continue
            mine = [values for (name, _), values in found.items() if name == line]
            low, middle, high = np.array([np.nanpercentile(values[..., 0], [25, 50, 75]) for values in mine]).T
            seconds = [float(np.median(values[..., 1])) for values in mine]
            known = {PUBLISHED: Look("", INK, "D"), WITHOUT: Look("", "#8a8a8a", "o")}
            _, ink, marker = known.get(line, look(line.split(",")[0]))
            marks.append(Line(seconds, middle, ink, label(line), marker, DASHED if line == WITHOUT else "-", 1.4,
                              band=(low, high), shade=0.08))  # fmt: skip
            marks.append(between(low, high, seconds, ink, upright=True))
        where = [Axis(name, "{:g}", scale="log") for name in ("planning time, s", "gap to the floor, points")]
        title = "The gap to the floor against planning time, test split"
        return Chart(title, [Panel("", marks, *where)], size=(8.6, 4.4), keys=3)


def runs(task: Row) -> list[tuple[str, int | None, dict[str, Any]]]:
    """Every method with every budget and weights: its line, its calls, and the planner's options."""
    out: list[tuple[str, int | None, dict[str, Any]]] = []
    for name, method in task["methods"].items():
        learns = method["planner"].startswith("policy") and method.get("guide", True)
        for which, file in (task["weights"] or {"": None}).items() if learns else [("", None)]:
            options = {key: value for key, value in method.items() if key not in ("planner", "calls")}
            options |= {"weights": file} if file else {}
            line = f"{name}, {which}" if which else name
            budgets = method.get("calls", [None])
            out += [(line, calls, options | ({"calls": calls} if calls else {})) for calls in budgets]
    return out


def points(rows: list[Row]) -> dict[tuple[str, int | None], np.ndarray]:
    """Of each line and budget, float64[tasks, seeds, 2]: gaps (not a number: no plan) and seconds."""
    out: dict[tuple[str, int | None], np.ndarray] = {}
    for line, calls in dict.fromkeys((f["line"], f["calls"]) for f in rows[0]["found"]):
        each = [
            [(np.nan if f["gap"] is None else f["gap"], f["plan_s"]) for f in row["found"]
             if (f["line"], f["calls"]) == (line, calls)]
            for row in rows
        ]  # fmt: skip
        out[line, calls] = np.array(each, np.float64)
    return out


def interval(of_tasks: np.ndarray) -> Range | None:
    """Of the mean of float64[tasks]; None where one is not a number."""
    if np.isnan(of_tasks).any():
        return None
    drawn = np.random.default_rng(0).integers(len(of_tasks), size=(DRAWS, len(of_tasks)))
    return Range(np.percentile(of_tasks[drawn].mean(1), [(100 - LEVEL) / 2, (100 + LEVEL) / 2]))


def _by_family(rows: list[Row], families: list[str]) -> list[Row]:
    """Overheads of every method and budget, by fresh family and in the mean of the families."""
    out = []
    for (line, calls), values in points(rows).items() if rows else ():
        of_tasks = values[..., 0].mean(1)
        means = [of_tasks[[figures.label(row["network"]) == name for row in rows]].mean() for name in families]
        cells = ["–" if np.isnan(mean) else f"{mean:.2f}" for mean in (*means, np.mean(means))]
        out.append({"label": label(line), "calls": calls, "cells": cells})
    return out


def _lines(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The table of some tasks; and what the policy's network adds to its search at equal calls."""
    found, lines, networks = points(rows), [], []
    for (line, calls), values in found.items():
        gaps = values[..., 0]
        there, whole = gaps[~np.isnan(gaps)], not np.isnan(gaps).any()
        lines.append({
            "label": label(line), "calls": calls, "seconds": np.median(values[..., 1]),
            "mean": gaps.mean() if whole else None, "interval": interval(gaps.mean(1)), "without": np.isnan(gaps).sum(),
            "median": np.median(there) if len(there) else None,
            "quartiles": Range(np.percentile(there, [25, 75])) if len(there) else None,
        })  # fmt: skip
        without = found.get((WITHOUT, calls))
        if line.startswith("policy_search") and without is not None:
            off = without[..., 0].mean(1) - gaps.mean(1)
            networks.append({"label": label(line), "calls": calls, "mean": off.mean(), "interval": interval(off)})
    return lines, networks
