"""Table 1 of the SuperNeurons paper: layers computed again, and peak memory, by strategy."""

from __future__ import annotations

from omegaconf import DictConfig

import agents
from agents.heuristics.superneurons import JOINS
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import layerwise
from experiments.figures.figure import Figure, span
from experiments.figures.layerwise import FREE, MB
from experiments.plotting.charts import Axis, Bars, Chart, Line, Mark, Panel
from experiments.plotting.palette import INK, STRATEGY
from simulator.machine import Machine

LABELS = {"speed": "speed-centric", "memory": "memory-centric", "cost": "cost-aware"}
NETWORKS = {
    "alexnet": (layerwise.alexnet, 200),
    "resnet50": (lambda: layerwise.resnet(3, 4, 6, 3), 32),
    "resnet101": (lambda: layerwise.resnet(3, 4, 23, 3), 32),
}
PAPER: dict[str, dict[str, tuple[int, float]]] = {  # layers computed again, MB
    "alexnet": {"speed": (14, 993.018), "memory": (23, 886.23), "cost": (17, 886.23)},
    "resnet50": {"speed": (84, 455.125), "memory": (118, 401), "cost": (85, 401)},
    "resnet101": {"speed": (169, 455.125), "memory": (237, 401), "cost": (170, 401)},
}


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and strategy."""
    names = [str(name) for name in cli.values(settings, "networks")]
    for name in names:
        if name not in NETWORKS:
            raise cli.UsageError(f"figure.networks: {name!r} is not in the table ({', '.join(NETWORKS)})")
    return [{"network": name, "strategy": strategy} for name in names for strategy in LABELS]


def run(task: Row, machine: Machine) -> Row:
    """Layers computed again, the peak and what is in memory then; and the planner's smallest memory."""
    layers, batch_size = NETWORKS[task["network"]]
    program = layerwise.program(task["network"], layers(), batch_size)
    branches = any(layer.kind in JOINS for layer in layers())
    plan = layerwise.plan(program, strategy=task["strategy"], branches=branches)
    planner = agents.make("superneurons", recompute=task["strategy"], joins=branches)
    steps, again, peak = layerwise.steps(program, plan)
    most = max(steps, key=lambda step: step.nbytes)
    return {
        "batch_size": batch_size,
        "again": again,
        "peak": peak,
        "step": f"{most.name} {most.phase}",
        "at_peak": [[program.tensors[t].name, program.tensors[t].nbytes] for t in most.tensors],
        "planner": figures.least_limit(planner, program, FREE, 1),
    }


# ------------------------------------------------------------------------------------------ for people


def facts(row: Row) -> Row:
    """A network and strategy, beside the paper's."""
    again, peak = PAPER[row["network"]][row["strategy"]]
    return {
        **row, "label": figures.label(row["network"]), "named": LABELS[row["strategy"]], "paper": (again, peak),
        "paper_mb": f"{peak:,g}" if peak < 500 else f"{peak:,.3f}", "close": abs(row["peak"] / MB - peak) < 0.0011,
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """What agrees."""
    found = [facts(row) for row in rows]
    far = [one["peak"] / MB - one["paper"][1] for one in found if one["network"] != "alexnet" and not one["close"]]
    more = [row["planner"] - row["peak"] for row in rows]
    return {
        "lines": found, "count": len(rows), "same": sum(one["again"] == one["paper"][0] for one in found),
        "close": sum(one["close"] for one in found), "missing": far[-1] if far else None,
        "exact": None if any(more) else "to the byte", "more": span(more) if any(more) else None,
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Bars of ours by network and strategy, and the paper's numbers as lines across them."""
    found, panels = figures.grouped(map(facts, rows)), []
    for i, (title, key, unit) in enumerate((("Layers computed again", "again", 1), ("Peak memory (MB)", "peak", MB))):
        marks: list[Mark] = []
        for s, (strategy, label) in enumerate(LABELS.items()):
            mine = [next((one for one in net if one["strategy"] == strategy), None) for net in found.values()]
            ours, theirs = [one and one[key] / unit for one in mine], [one and one["paper"][i] for one in mine]
            texts = ["" if a is None else f"{a:,.{3 * i}f}" + (f"\n({b:g})" if round(a - b, 3 * i - 1) else "")
                     for a, b in zip(ours, theirs, strict=True)]  # fmt: skip
            x = [n + 0.27 * (s - 1) for n in range(len(found))]
            marks += [Bars(x, ours, STRATEGY[strategy], label, 0.24, across=False, texts=texts),
                      Line(x, theirs, INK, "the paper's (in brackets where it differs)", "_", "", size=19)]  # fmt: skip
        names = [f"{net[0]['label']}, batch {net[0]['batch_size']}" for net in found.values()]
        panels.append(Panel(title, marks, Axis(names=names), Axis(limits=(0, None), room=1.08)))
    return Chart("Table 1 of the SuperNeurons paper: what is recomputed, and what it takes", panels, 2, (7.5, 3.8))


FIGURE = Figure("superneurons_table1", tasks, run, numbers, chart)
