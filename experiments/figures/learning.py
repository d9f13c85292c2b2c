"""What finished runs of train_dqn learned, over the seeds, beside the search without the network and other planners."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.report import Row, console
from experiments.figures import grouped
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Panel, ranges
from experiments.plotting.palette import FAINT, look
from simulator.files import FormatError, read_json
from simulator.machine import Machine

MARGIN = 0.005  # of ideal time, over annealing
SHOWN = {  # keys of a run, and their headings
    "dqn": "DQN", "mutation_calls": "mutation, equal calls", "mutation_seconds": "mutation, equal seconds",
    "greedy": "greedy policy", "autoswap": "best AutoSwap", "annealing": "annealing",
}  # fmt: skip
LOOKS = {"dqn": "dqn", "mutation_calls": "mutation", "mutation_seconds": "mutation", "greedy": "dqn_greedy",
         "autoswap": "autoswap_swdoa", "annealing": "annealing"}  # fmt: skip


def tasks(settings: DictConfig) -> list[Row]:
    """One per finished run in the folder ``runs``, at any depth; by workload, limit and mode, then by seed."""
    folder = Path(str(settings.runs)).expanduser()
    files = sorted(folder.rglob("summary.json"))
    found = [one for file in files if (one := summarise(file)) is not None]
    if not found:
        raise cli.UsageError(f"figure.runs: there is no finished run of train_dqn under {folder}")
    if len(found) < len(files):
        console().print(f"{len(files) - len(found)} of {len(files)} runs under {folder} are left out: they are not of "
                        "train_dqn, were resumed, or compared too few planners")  # fmt: skip
    return sorted(found, key=lambda r: (r["workload"], r["machine"], r["limit_fraction"], r["mode"], r["seed"]))


def run(task: Row, machine: Machine) -> Row:
    """Nothing more: the runs are there."""
    return {}


def summarise(file: Path) -> Row | None:
    """One run's overheads; None for a summary that is not of train_dqn or has no comparison in it, as one of a run that
    was resumed or made before there was `mutation`.

    Raises:
        FormatError: the file is not a summary.
    """
    summary = read_json(file)
    try:
        rows = {r["planner"]: r for r in summary["results"]}
        dqn = rows.get("dqn")
        autoswap = [r["overhead"] for n, r in rows.items() if n.startswith("autoswap_") and r["feasible"]]
        there = {"dqn", "mutation, equal calls", "mutation, equal seconds"} <= set(rows)
        if dqn is None or not there or not autoswap or not rows.get("annealing", {}).get("feasible"):
            return None
        return {
            "workload": dqn["workload"], "machine": dqn["machine"], "limit_fraction": round(dqn["limit_fraction"], 4),
            "mode": summary["config"]["agent"]["mode"], "seed": dqn["seed"], "episodes": summary["episodes"],
            "command": " ".join(w for w in summary["command"] if not w.startswith("out=")),
            "train_s": round(summary["train_s"], 1), "simulator_calls": dqn["simulator_calls"],
            "dqn": dqn["overhead"], "greedy": rows["dqn_greedy"]["overhead"],
            "mutation_calls": rows["mutation, equal calls"]["overhead"],
            "mutation_seconds": rows["mutation, equal seconds"]["overhead"],
            "autoswap": min(autoswap), "annealing": rows["annealing"]["overhead"],
            "floor": dqn["bound_overhead"], "gap": dqn["gap"],
        }  # fmt: skip
    except (KeyError, TypeError) as error:
        raise FormatError(f"{file}: not the summary of a run ({json.dumps(str(error))})") from None


def spread(values: list[float | None]) -> str:
    """Mean, least and largest; how many are missing."""
    known = [v for v in values if v is not None]
    if not known:
        return "infeasible"
    text = f"{sum(known) / len(known):.2%} ({min(known):.2%} to {max(known):.2%})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} infeasible"


# ------------------------------------------------------------------------------------------ for people


def cases(rows: list[Row]) -> list[Row]:
    """The runs of each workload, limit and mode; ``holds``: the agent is never above the best AutoSwap score, nor more
    than ``MARGIN`` above annealing."""
    keyed = [{**row, "case": (row["workload"], row["machine"], row["limit_fraction"], row["mode"])} for row in rows]
    return [
        {**runs[0], "runs": runs, "seeds": len(runs), "cells": [spread([run[key] for run in runs]) for key in SHOWN],
         "holds": "yes" if all(r["dqn"] <= min(r["autoswap"], r["annealing"] + MARGIN) for r in runs) else "no"}
        for runs in grouped(keyed, "case").values()
    ]  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """Every workload, limit and mode, over the seeds."""
    return {"cases": cases(rows), "heads": SHOWN.values(), "points": 100 * MARGIN}


def chart(rows: list[Row]) -> Chart:
    """A row for each workload, limit and mode: means and ranges over the seeds."""
    found = cases(rows)
    names = [f"{one['workload']}, {one['limit_fraction']:.0%}, {one['mode']}" for one in found]
    floors = [one["floor"] for one in found]
    marks = [Line(floors, range(len(found)), FAINT, "the floor", "|", "", size=30)]
    for i, (key, label) in enumerate(SHOWN.items()):
        _, ink, marker = look(LOOKS[key])
        values = [[run[key] for run in one["runs"]] for one in found]
        marker = "d" if key == "mutation_seconds" else marker
        marks += ranges(label, ink, marker, values, 0.13 * (i - 2.5))
    panel = Panel("", marks, Axis("overhead", "%", (-0.001, None), "symlog"), Axis(names=names))
    return Chart("What training runs learned: means and ranges over the seeds", [panel], size=(9.5, 0.9 * len(found)))


FIGURE = Figure("learning", tasks, run, numbers, chart, on_demand=True)
