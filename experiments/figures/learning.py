"""Results of trainings over seeds: curves by simulator calls (common/curves.py), and a table of train_dqn runs."""

from __future__ import annotations

import json
import math
import re
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.curves import BEST, GREEDY, LAST, OVERHEAD
from experiments.common.report import ABLATION, Row, console
from experiments.figures import grouped
from experiments.figures.core import WITHOUT, interval, iqm
from experiments.figures.figure import Figure, Range
from experiments.plotting.charts import Axis, Chart, Line, Panel
from simulator.files import FormatError, read_json
from simulator.machine import Machine

MARGIN = 0.005  # of ideal time, over annealing
SHOWN = {  # headings by key of a run
    "dqn": "DQN", "uniform_calls": "no network, equal calls", "uniform_seconds": "no network, equal seconds",
    "greedy": "greedy policy", "autoswap": "best AutoSwap", "annealing": "annealing",
}  # fmt: skip
CASE = ("workload", "machine", "limit_fraction", "mode")
MEANT = {GREEDY: "greedy policy", OVERHEAD: f"last {LAST} episodes", BEST: "best plan so far"}
INKS = ("#d6336c", "#1f5fa8", "#238b45", "#f16913", "#8e5bd0", "#222222")


class Learning(Figure):
    """Curves of trainings by simulator calls, and a table of train_dqn runs, over the seeds."""

    name = "learning"
    on_demand = True
    simulated = False

    def tasks(self, settings: DictConfig) -> list[Row]:
        folder = Path(str(settings.runs)).expanduser()
        files = sorted(folder.rglob("summary.json"))
        found = [one for file in files if (one := summarise(file)) is not None]
        curves = [curve(file) for file in sorted(folder.rglob("curve.json"))]
        if not curves:
            raise cli.UsageError(f"figure.runs: no training with a curve.json under {folder}")
        if len(found) < len(files):
            reason = "they are not of train_dqn, were resumed, or compared too few planners"
            count = f"{len(files) - len(found)} of {len(files)} runs"
            console().print(f"{count} under {folder} are not in the table: {reason}")
        found.sort(key=lambda r: (r["workload"], r["machine"], r["limit_fraction"], r["mode"], r["seed"]))
        return found + sorted(curves, key=lambda r: (*(str(r[key]) for key in CASE), r["agent"], r["seed"]))

    def run(self, task: Row, machine: Machine) -> Row:
        return {}

    def numbers(self, rows: list[Row]) -> Row:
        ends = []
        for (workload, machine, limit, mode), found in trainings(rows).items():
            for agent, runs in found.items():
                at, greedy = over_seeds(runs, GREEDY)
                if not at:  # one run ends before another begins
                    continue
                best = over_seeds(runs, BEST)[1]
                ends.append({
                    "agent": agent, "workload": workload, "machine": machine, "limit": limit, "mode": mode,
                    "seeds": len(runs), "calls": at[-1], "greedy": iqm(greedy[-1:]),
                    "interval": Range(interval(greedy[-1:])), "best": iqm(best[-1:]),
                })  # fmt: skip
        return {"cases": cases(rows), "heads": SHOWN.values(), "points": 100 * MARGIN, "ends": ends}

    def chart(self, rows: list[Row]) -> Chart:
        panels, tasks = [], trainings(rows)
        inks = dict(zip(dict.fromkeys(agent for found in tasks.values() for agent in found), cycle(INKS), strict=False))
        for (workload, _, limit, mode), found in tasks.items():
            for key, title in MEANT.items():
                marks, starts, ends, least = [], [], [], math.inf
                for agent, runs in found.items():
                    at, gaps = over_seeds(runs, key)
                    if not at:
                        continue
                    low, high = np.array([interval(one[None]) for one in gaps]).T
                    least = min(least, *low)
                    starts.append(at[0])
                    ends.append(at[-1])
                    marks.append(Line(at, [iqm(one) for one in gaps], inks[agent], agent, band=(low, high)))
                if not starts:
                    continue
                ticks = [t for i in range(10) if min(starts) <= (t := 10**i) <= max(ends)]
                x = Axis("simulator calls", "{:,.0f}", (0.9 * min(starts), 1.1 * max(ends)), "log", ticks or None)
                y = Axis("gap to the floor, points", scale="log" if least > 0 else "symlog")
                panels.append(Panel(f"{workload}, {limit:.0%}, {mode}: {title}", marks, x, y))
        return Chart("What trainings learned: interquartile means over the seeds, 95 % bootstrap intervals", panels)


def curve(file: Path) -> Row:
    """Returns the row of a curve.json, with its points as lists.

    Raises:
        FormatError: The file is not a training curve.
    """
    kept = read_json(file)
    try:
        points = kept["points"]
        columns = {key: [point[key] for point in points] for key in ("calls", *MEANT)}
        if not points or not all(isinstance(v, (int, float)) for v in [*columns["calls"], kept["floor"]]):
            raise TypeError("no points")
        if not all(re.fullmatch(r"[\w ,.:+-]+", str(kept[key])) for key in (*CASE, "reward", "agent", "seed")):
            raise TypeError("a name that is none")  # they are drawn and printed
        return {**{key: kept[key] for key in (*CASE, "reward", "agent", "seed", "floor")}, **columns}
    except (KeyError, TypeError) as error:
        raise FormatError(f"{file}: not the curve of a training ({json.dumps(str(error))})") from None


def summarise(file: Path) -> Row | None:
    """Returns one run's overheads.

    None if the summary is not from train_dqn or has no comparison, as after a resumed run.

    Raises:
        FormatError: The file is not a summary.
    """
    summary = read_json(file)
    try:
        rows = {r["planner"]: r for r in summary["results"]}
        dqn = rows.get("dqn")
        autoswap = [r["overhead"] for n, r in rows.items() if n.startswith("autoswap_") and r["feasible"]]
        there = {"dqn", f"{ABLATION}, equal calls", f"{ABLATION}, equal seconds"} <= set(rows)
        if dqn is None or not there or not autoswap or not rows.get("annealing", {}).get("feasible"):
            return None
        return {
            "workload": dqn["workload"], "machine": dqn["machine"], "limit_fraction": round(dqn["limit_fraction"], 4),
            "mode": summary["config"]["agent"]["mode"], "seed": dqn["seed"], "episodes": summary["episodes"],
            "command": " ".join(w for w in summary["command"] if not w.startswith("out=")),
            "train_s": round(summary["train_s"], 1), "simulator_calls": dqn["simulator_calls"],
            "dqn": dqn["overhead"], "greedy": rows["dqn_greedy"]["overhead"],
            "uniform_calls": rows[f"{ABLATION}, equal calls"]["overhead"],
            "uniform_seconds": rows[f"{ABLATION}, equal seconds"]["overhead"],
            "autoswap": min(autoswap), "annealing": rows["annealing"]["overhead"],
            "floor": dqn["bound_overhead"], "gap": dqn["gap"],
        }  # fmt: skip
    except (KeyError, TypeError) as error:
        raise FormatError(f"{file}: not the summary of a run ({json.dumps(str(error))})") from None


def spread(values: list[float | None]) -> str:
    """Formats mean, least and largest, and the number of missing values."""
    known = [v for v in values if v is not None]
    if not known:
        return "infeasible"
    text = f"{sum(known) / len(known):.2%} ({min(known):.2%} to {max(known):.2%})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} infeasible"


def over_seeds(runs: list[Row], key: str) -> tuple[list[int], NDArray[np.float64]]:
    """Returns the simulator calls at which every run has a value, and the gaps there in points of ideal time.

    Gaps are float64[points, seeds]. Between two points of a run the previous one holds; without a plan the gap is
    WITHOUT.
    """
    at = sorted({calls for run in runs for calls in run["calls"]})
    at = [calls for calls in at if max(run["calls"][0] for run in runs) <= calls <= min(r["calls"][-1] for r in runs)]
    out = np.full((len(at), len(runs)), WITHOUT)
    for j, one in enumerate(runs):
        last = np.searchsorted(one["calls"], at, side="right") - 1
        values = [one[key][i] for i in last]
        out[:, j] = [WITHOUT if v is None else min(100 * (v - one["floor"]), WITHOUT) for v in values]
    return at, out


def trainings(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, list[Row]]]:
    """Groups the curves by task, then by agent."""
    out: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        if "calls" in row:
            name = row["agent"] if row["reward"] == "paper" else f"{row['agent']}, {row['reward']}"
            out.setdefault(tuple(row[key] for key in CASE), {}).setdefault(name, []).append(row)
    return out


def cases(rows: list[Row]) -> list[Row]:
    """Groups the runs by workload, limit and mode.

    ``holds``: the agent is never above the best AutoSwap score, nor more than ``MARGIN`` above annealing.
    """
    keyed = [{**row, "case": tuple(row[key] for key in CASE)} for row in rows if "calls" not in row]
    return [
        {**runs[0], "runs": runs, "seeds": len(runs), "cells": [spread([run[key] for run in runs]) for key in SHOWN],
         "holds": "yes" if all(r["dqn"] <= min(r["autoswap"], r["annealing"] + MARGIN) for r in runs) else "no"}
        for runs in grouped(keyed, "case").values()
    ]  # fmt: skip
