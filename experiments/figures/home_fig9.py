"""Fig. 9 of the HOME paper: what the evaluator predicts, and what an H200 measured."""

from __future__ import annotations

import re
from statistics import fmean

from omegaconf import DictConfig

from experiments.common.report import Row
from experiments.figures import chosen
from experiments.figures.figure import Figure
from experiments.measured.replays import FOLDER, Replay, replays
from experiments.plotting.charts import Axis, Chart, Line, Panel, Rule
from experiments.plotting.palette import INK, look
from simulator.files import load_json
from simulator.machine import Machine

EXECUTORS = {"streams": "launches from Python", "graph": "one CUDA graph"}
GRAPH, STREAMS = EXECUTORS["graph"], EXECUTORS["streams"]
NETWORKS = {"resnet50_imagenet_bf16": "ResNet-50", "gpt2_medium_bf16": "GPT-2 medium", "llama_bf16": "Llama"}


def tasks(settings: DictConfig) -> list[Row]:
    """One per executor."""
    return [{"executor": EXECUTORS[name]} for name in chosen(settings, "executors", EXECUTORS)]


def run(task: Row, machine: Machine) -> Row:
    """Predicted and measured iterations, in ns, of every replayed plan."""
    if task["executor"] == STREAMS:
        return {"replays": [row._asdict() for row in replays()]}
    found = []
    for row in load_json(FOLDER / "probe.json", lambda data: data["rows"]):  # type: ignore[index]
        if row["section"] == "graph_replay":
            workload, fraction, planner = re.fullmatch(r"plan-(\w+)-([\d.]+)-(\w+)", row["plan"]).groups()  # type: ignore[union-attr]
            predicted, measured = row["predicted"], row["measured"]
            found.append(Replay(workload, float(fraction), planner, False, predicted, predicted, measured)._asdict())
    return {"replays": found}


# ------------------------------------------------------------------------------------------ for people


def lines(rows: list[Row]) -> list[Row]:
    """One per executor and plan, the graph first."""
    return [
        {
            **one, "executor": row["executor"], "error": one["predicted_ns"] / one["measured_ns"] - 1,
            "label": f"{NETWORKS[one['workload']]} {one['fraction']:.0%}, {one['planner']}",
        }
        for row in sorted(rows, key=lambda row: row["executor"] != GRAPH)
        for one in row["replays"]
    ]  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """Each plan; mean and largest error of each executor."""
    found, out = lines(rows), {}
    for name, executor in (("graph", GRAPH), ("streams", STREAMS)):
        here = [one for one in found if one["executor"] == executor]
        errors = [abs(one["error"]) for one in here]
        before = [abs(one["before_ns"] / one["measured_ns"] - 1) for one in here]
        out |= {
            f"{name}_plans": len(here), f"{name}_mean": fmean(errors) if here else None,
            f"{name}_worst": max(errors, default=None), f"{name}_before": fmean(before) if here else None,
        }  # fmt: skip
    return {"lines": found, **out}


def chart(rows: list[Row]) -> Chart:
    """Errors by plan; the paper's largest error as a line."""
    found = lines(rows)
    names = list(dict.fromkeys(one["label"] for one in found))
    marks: list[Line | Rule] = [Rule(0), Rule(1, line=":", text="paper: below 1 %"), Rule(-1, line=":")]
    for executor, colour, marker in ((GRAPH, look("home").colour, "o"), (STREAMS, INK, "^")):
        here = [one for one in found if one["executor"] == executor]
        at = [names.index(one["label"]) for one in here]
        marks.append(
            Line([100 * one["error"] for one in here], at, colour, executor, marker, "", hollow=executor == STREAMS)
        )
    panel = Panel("", marks, Axis("predicted − measured, % of measured", "{:g}"), Axis(names=names))
    return Chart("Simulated iterations against replays on an H200", [panel], size=(6.5, 0.3 * len(names) + 1.2))


FIGURE = Figure("home_fig9", tasks, run, numbers, chart)
