"""How far plans are from the floor against the time that they took, on networks and machines that the policy never
learned (the test split): the policy, decoded and with its search, beside the same search without the network, the DQN,
the searches and the published heuristics. No paper has this figure.

1. A gap is the overhead of a plan less the floor's, in points: no plan is closer than 0.
2. Planning is timed in a process that has compiled what it calls (Numba), with the program in memory.
3. The best published is the best of all heuristics, and its time is that of all together.
4. Intervals: 2,000 times tasks are drawn again with replacement; 95 % of the means lie in them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents import PLANNERS
from agents.floor import floor
from experiments.common import cli
from experiments.common.report import Row, heuristics, warm_up
from experiments.figures import network, planned, program
from experiments.plotting.palette import INK, look
from experiments.plotting.plots import figure
from simulator import Machine
from simulator.compiled import warm

TITLE = "Test split: the gap to the floor against planning time"
ALONE = True  # planners are timed
PUBLISHED = "published"
WITHOUT = "without_network"
DRAWS, LEVEL = 2_000, 95


def tasks(settings: DictConfig) -> list[Row]:
    """One per network, machine and limit."""
    config = cli.plain(settings)
    shared = {key: config[key] for key in ("seeds", "weights", "methods")}
    for name, method in config["methods"].items():
        if not isinstance(method, dict) or "planner" not in method:
            raise cli.UsageError(f"figure.methods.{name}: expected a mapping with planner, got {method!r}")
    return [
        {"network": network(str(name), "networks"), "machine": machine, "limit": limit, **shared}
        for name in config["networks"] for machine in config["machines"] for limit in config["limits"]
    ]  # fmt: skip


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


def run(task: Row, machine: Machine) -> Row:
    """Gaps in points (None: no plan), planning times in s."""
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
    bound = 100 * floor(built, machine, limit).overhead
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
            one = planned(built, machine, limit, planners[line.split(",")[0]], **options, seed=seed)
            found.append(entry(line, calls, seed, [one]))
    return {
        "kernels": len(built.kernels), "floor_percent": round(bound, 4), "floor_s": round(floor_s, 2), "found": found
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


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


def interval(of_tasks: np.ndarray) -> tuple[float, float]:
    """Of the mean of float64[tasks]."""
    drawn = np.random.default_rng(0).integers(len(of_tasks), size=(DRAWS, len(of_tasks)))
    low, high = np.percentile(of_tasks[drawn].mean(1), [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def name_of(line: str) -> str:
    """A line's name for people."""
    if line == PUBLISHED:
        return "best published"
    if line == WITHOUT:
        return "the same search without the network"
    name, _, which = line.partition(", ")
    return f"{look(name).label}, {which}" if which else look(name).label


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per method and budget, over all tasks and seeds."""
    heads = ["planner", "calls", "seconds, median", "gap in points: mean", "95 %", "median", "quartiles", "no plan"]
    cells = []
    for (line, calls), found in points(rows).items():
        gaps, seconds = found[..., 0], found[..., 1]
        there = gaps[~np.isnan(gaps)]
        whole = not np.isnan(gaps).any()
        low, high = interval(gaps.mean(1)) if whole else (np.nan, np.nan)
        quartiles = np.percentile(there, [25, 75]) if len(there) else (np.nan, np.nan)
        cells.append([
            name_of(line), "–" if calls is None else f"{calls:,}", f"{np.median(seconds):.2g}",
            f"{gaps.mean():.2f}" if whole else "–", f"{low:.2f} to {high:.2f}" if whole else "–",
            f"{np.median(there):.2f}" if len(there) else "–", f"{quartiles[0]:.2f} to {quartiles[1]:.2f}",
            str(int(np.isnan(gaps).sum())),
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """What the network adds at equal calls, and which lines the policy's search is ahead of."""
    found = points(rows)
    out = [
        f"{len(rows)} tasks, {len(rows[0]['seeds'])} seeds; a floor took up to {max(r['floor_s'] for r in rows):.1f} s."
    ]
    for (line, calls), with_network in found.items():
        without = found.get((WITHOUT, calls))
        if not line.startswith("policy_search") or without is None:
            continue
        both = without[..., 0].mean(1) - with_network[..., 0].mean(1)
        if np.isnan(both).any():
            continue
        low, high = interval(both)
        out.append(
            f"{name_of(line)}, {calls:,} calls: what the network takes off the gap is {both.mean():.2f} points "
            f"({LEVEL} %: {low:.2f} to {high:.2f}), by task and at equal calls."
        )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """Medians, with bars from the lower to the upper quartile over tasks and seeds."""
    found = points(rows)
    with figure(path, 7.6, 4.8) as axes:
        for line in dict.fromkeys(line for line, _ in found):
            mine = [values for (name, _), values in found.items() if name == line]
            seconds = [float(np.median(values[..., 1])) for values in mine]
            gaps = np.array([np.nanpercentile(values[..., 0], [25, 50, 75]) for values in mine])
            style = look(line.split(",")[0])
            colour = INK if line == PUBLISHED else "#8a8a8a" if line == WITHOUT else style.colour
            axes.errorbar(
                seconds, gaps[:, 1], yerr=np.abs(gaps[:, [0, 2]] - gaps[:, [1]]).T, label=name_of(line), color=colour,
                marker="D" if line == PUBLISHED else "o" if line == WITHOUT else style.marker, markersize=5,
                linewidth=1.4, elinewidth=0.8, capsize=2, linestyle="--" if line == WITHOUT else "-",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="planning time, s", ylabel="gap to the floor, points")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.legend(fontsize=8, ncols=2)
