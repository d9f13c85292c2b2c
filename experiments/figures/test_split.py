"""Test split: gaps to the certified lower bound by planning time, on networks that the policy was not trained on."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
from omegaconf import DictConfig

import agents
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row, heuristics, warm_up
from experiments.figures import network, program
from experiments.figures.core import DRAWS, NO_NETWORK, PUBLISHED, label
from experiments.figures.figure import Figure, Range, Rows
from experiments.plotting.charts import DASHED, Axis, Chart, Line, Mark, Panel, between
from experiments.plotting.palette import INK, Look, look
from simulator import Machine
from simulator.compiled import warm


class TestSplit(Figure):
    """Gap to the certified lower bound against planning time, on networks not used in training the policy."""

    name = "test_split"
    needs_all_cores = True

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        tasks = []
        for key, prefix in (("networks", ""), ("fresh", "fresh_")):
            methods = config[f"{prefix}methods"]
            for name, method in methods.items():
                if not isinstance(method, dict) or "planner" not in method:
                    entry = f"figure.{prefix}methods.{name}"
                    raise cli.UsageError(f"{entry}: expected a mapping with planner, got {method!r}")
            shared = {"seeds": config[f"{prefix}seeds"], "weights": config["weights"], "methods": methods}
            combinations = product(config[key], config[f"{prefix}machines"], config[f"{prefix}limits"])
            tasks += [
                {"network": network(str(name), key), "fresh": key == "fresh", "machine": machine, "limit": limit}
                | shared
                for name, machine, limit in combinations
            ]
        return tasks

    def run(self, task: Row, machine: Machine) -> Row:
        machine = Machine.load(task["machine"])
        built = program(task["network"], machine, **task.get("changes", {}))
        limit = int(task["limit"] * built.peak_bytes)
        planners = {name: method["planner"] for name, method in task["methods"].items()}
        for name in {*planners.values(), *heuristics()}:
            if agents.PLANNERS[name].learned:
                figures.evaluate(warm.TINY, machine, warm.TINY.peak_bytes, name, episodes=1)
            else:
                warm_up(machine, name)
        begin = time.perf_counter()
        # No floor for fresh networks: the LP of ConvNeXt takes more than 10 minutes.
        bound = 0.0 if task["fresh"] else 100 * floor(built, machine, limit).overhead
        floor_s = time.perf_counter() - begin

        def entry(line: str, calls: int | None, seed: int | None, results: Rows) -> Row:
            percent = [result["overhead_percent"] for result in results if result["overhead_percent"] is not None]
            return {
                "line": line,
                "calls": calls,
                "seed": seed,
                "gap": round(min(percent) - bound, 4) if percent else None,
                "plan_s": round(sum(result["plan_s"] for result in results), 3),
                "simulator_calls": sum(result["simulator_calls"] for result in results),
            }

        found = [entry(PUBLISHED, None, None, [figures.evaluate(built, machine, limit, name) for name in heuristics()])]
        for line, calls, options in methods_of(task):
            for seed in task["seeds"]:
                name = planners.get(line) or planners[line.split(",")[0]]  # or the same method with other weights
                result = figures.evaluate(built, machine, limit, name, **options, seed=seed)
                found.append(entry(line, calls, seed, [result]))
        floors = {"floor_percent": round(bound, 4), "floor_s": round(floor_s, 2)}
        return {"kernels": len(built.kernels), **floors, "found": found}

    def template_values(self, rows: Rows) -> Row:
        test, fresh = ([row for row in rows if row.get("fresh", False) is is_fresh] for is_fresh in (False, True))
        gaps_by_line = gaps_of(test)
        lines = []
        networks = []
        by_family = []
        for (line, calls), values in gaps_by_line.items():
            gaps = values[..., 0]
            heading = {"label": with_calls(line, calls)}
            lines.append(
                {
                    **heading,
                    "seconds": np.median(values[..., 1]),
                    "interval": mean_interval(gaps.mean(1)),
                    "mean": None if np.isnan(gaps).any() else gaps.mean(),
                }
            )
            without = gaps_by_line.get((NO_NETWORK, calls))
            if line.startswith("policy_search") and without is not None:
                gained = without[..., 0].mean(1) - gaps.mean(1)
                networks.append({**heading, "mean": gained.mean(), "interval": mean_interval(gained)})
        families: dict[str, list[int]] = {}
        for i, row in enumerate(fresh):
            families.setdefault(figures.label(row["network"]), []).append(i)
        for (line, calls), values in gaps_of(fresh).items():
            means = [values[indices, :, 0].mean(1).mean() for indices in families.values()]
            cells = ["–" if np.isnan(mean) else f"{mean:.2f}" for mean in (*means, np.mean(means))]
            by_family.append({"label": with_calls(line, calls), "cells": cells})
        return {
            "lines": lines,
            "families": [*families, "mean of these"] if fresh else None,
            "networks": networks,
            "fresh": by_family,
        }

    def chart(self, rows: Rows) -> Chart:
        gaps_by_line = gaps_of([row for row in rows if not row.get("fresh")])
        marks: list[Mark] = []
        for line in dict.fromkeys(line for line, _ in gaps_by_line):
            if "," in line and line in rows[0]["methods"]:
                continue
            by_calls = [values for (name, _), values in gaps_by_line.items() if name == line]
            middle = [float(np.nanmean(values[..., 0])) for values in by_calls]
            intervals = [mean_interval(values[..., 0].mean(1)) for values in by_calls]
            ends = [
                Range([gap]) if interval is None else interval for gap, interval in zip(middle, intervals, strict=True)
            ]
            low, high = ([extremum(interval.values) for interval in ends] for extremum in (min, max))
            seconds = [float(np.median(values[..., 1])) for values in by_calls]
            looks = {PUBLISHED: Look("", INK, "D"), NO_NETWORK: Look("", "#8a8a8a", "o")}
            _, ink, marker = looks.get(line, look(line.split(",")[0]))
            style = "" if sorted(seconds) != seconds else DASHED if line == NO_NETWORK else "-"
            marks.append(Line(seconds, middle, ink, label(line), marker, style, 1.4))
            marks.append(between(low, high, seconds, ink, vertical=True))
        axes = [Axis(name, "{:g}", scale="log") for name in ("planning time, s", "gap to the floor, points")]
        count = sum(not row.get("fresh") for row in rows)
        late = 1.02  # a planner with a limit in seconds may end a little later
        least = {
            limit: min(
                (float(values[..., 0].mean()), label(line.split(",")[0]))
                for (line, _), values in gaps_by_line.items()
                if np.median(values[..., 1]) <= late * limit
            )
            for limit in (0.1, 1)
        }
        found = ", ".join(f"{gap:.2f} in {limit} s ({name})" for limit, (gap, name) in least.items())
        note = (
            f"Means over {count} tasks and {len(rows[0]['seeds'])} seeds; bars: 95 % bootstrap intervals over tasks. "
            "Title: with lines for limits in seconds."
        )
        return Chart(
            f"Least mean gap, points: {found}",
            [Panel("", marks, *axes)],
            1,
            (9.9, 4.4),
            keys=3,
            note=note,
        )


def methods_of(task: Row) -> list[tuple[str, int | None, dict[str, Any]]]:
    """Returns the line, calls and planner options of every method with every budget and weights."""
    methods: list[tuple[str, int | None, dict[str, Any]]] = []
    for name, method in task["methods"].items():
        learns = method["planner"].startswith("policy") and method.get("guide", True)
        for weights, file in (task["weights"] or {"": None}).items() if learns else [("", None)]:
            options = {key: value for key, value in method.items() if key not in ("planner", "calls")}
            options |= {"weights": file} if file else {}
            line = f"{name}, {weights}" if weights else name
            budgets = method.get("calls", [None])
            methods += [(line, calls, options | ({"calls": calls} if calls else {})) for calls in budgets]
    return methods


def gaps_of(rows: Rows) -> dict[tuple[str, int | None], np.ndarray]:
    """Returns float64[tasks, seeds, 2] by line and budget: gap (nan without a plan) and seconds."""
    gaps: dict[tuple[str, int | None], np.ndarray] = {}
    for line, calls in dict.fromkeys((run["line"], run["calls"]) for row in rows[:1] for run in row["found"]):
        by_task = [
            [
                (np.nan if run["gap"] is None else run["gap"], run["plan_s"])
                for run in row["found"]
                if (run["line"], run["calls"]) == (line, calls)
            ]
            for row in rows
        ]
        gaps[line, calls] = np.array(by_task, np.float64)
    return gaps


def with_calls(line: str, calls: int | None) -> str:
    """Returns a line's display name with its budget."""
    return label(line) + (f", {calls:,} calls" if calls else "")


def mean_interval(gaps: np.ndarray) -> Range | None:
    """Returns the bootstrap interval of the mean of float64[tasks], or None if a value is nan."""
    if np.isnan(gaps).any():
        return None
    samples = np.random.default_rng(0).integers(len(gaps), size=(DRAWS, len(gaps)))
    return Range(np.percentile(gaps[samples].mean(1), [2.5, 97.5]))
