"""Results of trainings over seeds: curves by simulator calls (common/curves.py), and a table of train_dqn runs."""

from __future__ import annotations

import json
import math
import re
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.curves import BEST, GREEDY, LAST, OVERHEAD
from experiments.common.report import ABLATION, Row, console
from experiments.figures import group_by, label as network_label
from experiments.figures.core import WITHOUT, interval, iqm
from experiments.figures.dqn import SAME
from experiments.figures.figure import Figure, Range, Rows
from experiments.plotting.charts import Axis, Chart, Line, Panel
from experiments.plotting.palette import color
from simulator import Machine
from simulator.files import FormatError, read_json

CASE = ("workload", "machine", "limit_fraction", "mode")
MEANT = {GREEDY: "greedy policy", OVERHEAD: f"last {LAST} episodes", BEST: "best plan so far"}


class Learning(Figure):
    """Curves of trainings by simulator calls, and a table of train_dqn runs, over the seeds."""

    name = "learning"
    shown: ClassVar = {  # headings by key of a run
        "greedy": "greedy policy",
        "before": "the same before training",
        "uniform_greedy": "without the network, as many calls",
        "dqn": "best of the training",
        "uniform_calls": "without the network, equal calls",
        "uniform_seconds": "without the network, equal seconds",
        "annealing": "annealing",
    }
    compared = (
        ("greedy", "before"),
        ("greedy", "uniform_greedy"),
        ("dqn", "uniform_calls"),
        ("dqn", "uniform_seconds"),
    )
    inks = ("#1f5fa8", "#238b45", "#f16913", "#8e5bd0", "#222222")  # of other agents
    labels: ClassVar = {  # label and color of an agent
        "train_dqn, dqn, log": ("DQN, fine-tuned", color("dqn")),
        "train_dqn, dqn, from scratch, log": ("DQN, from scratch", color("dqn_greedy")),
        "ppo_single_file": ("PPO (ppo_single_file)", "#1f5fa8"),
        "train_sb3, maskable_ppo": ("MaskablePPO (train_sb3)", "#f16913"),
    }
    on_demand = True
    simulated = False

    def tasks(self, settings: DictConfig) -> Rows:
        folder = Path(str(settings.runs)).expanduser()
        files = sorted(folder.rglob("summary.json"))
        runs = [summary for file in files if (summary := summarize(file)) is not None]
        curves = [learning_curve(file) for file in sorted(folder.rglob("curve.json"))]
        if not curves:
            raise cli.UsageError(f"figure.runs: no training with a curve.json under {folder}; run train_dqn first")
        if len(runs) < len(files):
            reason = "they are not of train_dqn, were resumed, or compared too few planners"
            count = f"{len(files) - len(runs)} of {len(files)} runs"
            console().print(f"{count} under {folder} are not in the table: {reason}")
        runs.sort(key=lambda r: (r["workload"], r["machine"], r["limit_fraction"], r["mode"], r["seed"]))
        return runs + sorted(curves, key=lambda r: (*(str(r[key]) for key in CASE), r["agent"], r["seed"]))

    def run(self, task: Row, machine: Machine) -> Row:
        return {}

    def template_values(self, rows: Rows) -> Row:
        ends = []
        for (workload, _, limit, _), group in trainings(rows).items():
            for agent, runs in group.items():
                calls, greedy = over_seeds(runs, GREEDY)
                if not calls:  # one run ends before another begins
                    continue
                best = over_seeds(runs, BEST)[1]
                ends.append(
                    {
                        "agent": agent,
                        "workload": workload,
                        "limit": limit,
                        "calls": calls[-1],
                        "greedy": iqm(greedy[-1:]),
                        "interval": Range(interval(greedy[-1:])),
                        "best": iqm(best[-1:]),
                    }
                )
        runs = [row for row in rows if "calls" not in row]
        duels = []
        for ours, theirs in self.compared:
            pairs = [(run[ours], run[theirs]) for run in runs if None not in (run[ours], run[theirs])]
            duels.append(
                {
                    "ours": self.shown[ours],
                    "theirs": self.shown[theirs],
                    "better": sum(a < b - SAME for a, b in pairs),
                    "worse": sum(a > b + SAME for a, b in pairs),
                    "runs": len(pairs),
                }
            )
        return {"cases": cases(rows), "heads": self.shown.values(), "ends": ends, "duels": duels}

    def chart(self, rows: Rows) -> Chart:
        panels = []
        tasks = trainings(rows)
        names = dict.fromkeys(agent for group in tasks.values() for agent in group)
        inks = dict(zip([name for name in names if name not in self.labels], cycle(self.inks), strict=False))
        inks |= {name: ink for name, (_, ink) in self.labels.items()}
        for (workload, _, limit, _), group in sorted(tasks.items(), key=lambda item: -len(item[1])):
            for key, title in MEANT.items():
                marks = []
                starts = []
                ends = []
                least = math.inf
                most = 0.0
                for agent, runs in group.items():
                    calls, gaps = over_seeds(runs, key)
                    if not calls:
                        continue
                    low, high = np.array([interval(seeds[None]) for seeds in gaps]).T
                    least = min(least, *low)
                    most = max(most, *high)
                    starts.append(calls[0])
                    ends.append(calls[-1])
                    middle = [iqm(seeds) for seeds in gaps]
                    label = self.labels.get(agent, (agent, ""))[0]
                    marks.append(Line(calls, middle, inks[agent], label, band=(low, high), step=True))
                if not starts:
                    continue
                steps = (1, 2, 4) if max(ends) < 20 * min(starts) else (1,)
                ticks = [t for i in range(10) for m in steps if min(starts) <= (t := m * 10**i) <= max(ends)]
                x = Axis("simulator calls", "{:,.0f}", (0.9 * min(starts), 1.1 * max(ends)), "log", ticks or None)
                scale = "linear" if most < 2 * least else "log" if least > 0 else "symlog"
                low_end = 0 if scale == "symlog" else 0.5 * least if scale == "log" else 0.0
                y = Axis("gap to the floor, points", "{:g}", (low_end, None), scale)
                panels.append(Panel(f"{network_label(workload)}, {limit:.0%}\n{title}", marks, x, y))
        seeds = max(len(runs) for group in tasks.values() for runs in group.values())
        note = f"Lines: interquartile means over up to {seeds} seeds; bands: 95 % bootstrap intervals."
        return Chart(self.finding(rows), panels, 3, (3.3, 2.9), (0.0, 1.1), keys=4, note=note)

    def finding(self, rows: Rows) -> str:
        """Returns the title of the picture: the greedy policies of the task with the most agents, the best first."""
        tasks = trainings(rows)
        (workload, _, limit, _), group = max(tasks.items(), key=lambda item: len(item[1]))
        ends = {agent: over_seeds(runs, GREEDY)[1] for agent, runs in group.items()}
        gaps = sorted(
            (iqm(gap[-1:]), self.labels.get(agent, (agent, ""))[0]) for agent, gap in ends.items() if len(gap)
        )
        if not gaps:
            return "Gaps of trainings to the floor"
        (least, first), *_, (most, last) = [(gap, label.partition(" (")[0]) for gap, label in [*gaps, gaps[-1]]]
        task = f"{network_label(workload)}, {limit:.0%}"
        return f"{task}: greedy policy {least:.1f} points above the floor ({first}) to {most:.1f} ({last})"


def learning_curve(file: Path) -> Row:
    """Returns the row of a curve.json, with its points as lists.

    Raises:
        FormatError: The file is not a training curve.
    """
    stored = read_json(file)
    try:
        points = stored["points"]
        columns = {key: [point[key] for point in points] for key in ("calls", *MEANT)}
        if not points or not all(isinstance(v, (int, float)) for v in [*columns["calls"], stored["floor"]]):
            raise TypeError("expected points with numbers of calls, and a floor")
        if not all(re.fullmatch(r"[\w ,.:+-]+", str(stored[key])) for key in (*CASE, "reward", "agent", "seed")):
            raise TypeError("names may hold letters, digits, spaces and ,.:+- only")  # they are drawn and printed
        return {**{key: stored[key] for key in (*CASE, "reward", "agent", "seed", "floor")}, **columns}
    except (KeyError, TypeError) as error:
        raise FormatError(f"{file}: not the curve of a training ({json.dumps(str(error))}); remove it") from None


def summarize(file: Path) -> Row | None:
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
        has_controls = {"dqn", f"{ABLATION}, equal calls", f"{ABLATION}, equal seconds"} <= set(rows)
        if (
            dqn is None
            or not has_controls
            or "dqn, before training" not in rows
            or not autoswap
            or not rows.get("annealing", {}).get("feasible")
        ):
            return None
        return {
            "workload": dqn["workload"],
            "machine": dqn["machine"],
            "limit_fraction": round(dqn["limit_fraction"], 4),
            "mode": summary["config"]["agent"]["mode"],
            "seed": dqn["seed"],
            "episodes": summary["episodes"],
            "command": " ".join(w for w in summary["command"] if not w.startswith("out=")),
            "train_s": round(summary["train_s"], 1),
            "simulator_calls": dqn["simulator_calls"],
            "dqn": dqn["overhead"],
            "greedy": rows["dqn_greedy"]["overhead"],
            "before": rows["dqn, before training"]["overhead"],
            "uniform_greedy": rows[f"{ABLATION}, {summary['config']['agent']['greedy_calls']:,} calls"]["overhead"],
            "uniform_calls": rows[f"{ABLATION}, equal calls"]["overhead"],
            "uniform_seconds": rows[f"{ABLATION}, equal seconds"]["overhead"],
            "autoswap": min(autoswap),
            "annealing": rows["annealing"]["overhead"],
            "floor": dqn["bound_overhead"],
            "gap": dqn["gap"],
        }
    except (KeyError, TypeError) as error:
        raise FormatError(f"{file}: not the summary of a run ({json.dumps(str(error))}); remove it") from None


def spread(values: list[float | None]) -> str:
    """Formats "mean (minimum to maximum)" and the number of None values; "infeasible" if all are None."""
    numbers = [v for v in values if v is not None]
    if not numbers:
        return "infeasible"
    text = f"{sum(numbers) / len(numbers):.2%} ({min(numbers):.2%} to {max(numbers):.2%})"
    return text if len(numbers) == len(values) else f"{text}, {len(values) - len(numbers)} infeasible"


def over_seeds(runs: Rows, key: str) -> tuple[list[int], NDArray[np.float64]]:
    """Returns the simulator calls at which every run has a value, and the gaps there in points of ideal time.

    Gaps are float64[points, seeds]. Between two points of a run the previous one holds; without a plan the gap is
    WITHOUT.
    """
    x = sorted({calls for run in runs for calls in run["calls"]})
    x = [calls for calls in x if max(run["calls"][0] for run in runs) <= calls <= min(r["calls"][-1] for r in runs)]
    gaps = np.full((len(x), len(runs)), WITHOUT)
    for j, run in enumerate(runs):
        last = np.searchsorted(run["calls"], x, side="right") - 1
        values = [run[key][i] for i in last]
        gaps[:, j] = [WITHOUT if v is None else min(100 * (v - run["floor"]), WITHOUT) for v in values]
    return x, gaps


def trainings(rows: Rows) -> dict[tuple[Any, ...], dict[str, Rows]]:
    """Groups the curves by task, then by agent."""
    curves: dict[tuple[Any, ...], dict[str, Rows]] = {}
    for row in rows:
        if "calls" in row:
            name = row["agent"] if row["reward"] == "paper" else f"{row['agent']}, {row['reward']}"
            curves.setdefault(tuple(row[key] for key in CASE), {}).setdefault(name, []).append(row)
    return curves


def cases(rows: Rows) -> Rows:
    """Groups the runs by workload, limit and mode."""
    keyed = [{**row, "case": tuple(row[key] for key in CASE)} for row in rows if "calls" not in row]
    return [
        {**runs[0], "seeds": len(runs), "cells": [spread([run[key] for run in runs]) for key in Learning.shown]}
        for runs in group_by(keyed, "case").values()
    ]
