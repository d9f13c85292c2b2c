"""Table 1 of "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (2018), section 3.4: how
many layers are computed again, and the peak memory, with speed-centric, memory-centric and cost-aware recomputation.

The networks are counted as the paper counts them (experiments/figures/layerwise.py). The last column is the planner
agents/heuristics/superneurons.py: the smallest memory for which it finds a plan; it moves no more than it must. What
the table leaves open (reasons in experiments/figures/README.md):

1. Batch sizes: AlexNet's is 200, as in section 4.1.1; the ResNets' is 32, of images of 227 x 227.
2. What is recomputed is what a layer's backward step reads; that gives all nine numbers.
3. In the ResNets forks and joins are swapped out, too, and come back when they are used.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from omegaconf import DictConfig

import agents
from agents.heuristics.superneurons import JOINS
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import layerwise
from experiments.figures.layerwise import FREE, MB
from experiments.plotting.palette import INK, STRATEGY
from experiments.plotting.plots import figure
from simulator.machine import Machine
from simulator.program import Program

TITLE = "SuperNeurons, Table 1: layers computed again, and peak memory, by strategy"
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
    steps, again, peak = layerwise.steps(program, plan)
    most = max(steps, key=lambda step: step.nbytes)
    return {
        "batch_size": batch_size,
        "again": again,
        "peak": peak,
        "step": f"{most.name} {most.phase}",
        "at_peak": [[program.tensors[t].name, program.tensors[t].nbytes] for t in most.tensors],
        "planner": smallest(program, task["strategy"], branches),
    }


def smallest(program: Program, strategy: str, joins: bool) -> int:
    """The least bytes for which the planner finds a plan."""
    low, high = 0, program.peak_bytes
    while high - low > 1:
        middle = (low + high) // 2
        try:
            agents.make("superneurons", recompute=strategy, joins=joins).plan(program, FREE, middle)
        except agents.Infeasible:
            low = middle
        else:
            high = middle
    return high


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A row per network and strategy."""
    heads = ["network, batch, strategy", "computed again: paper", "ours", "peak, MB: paper", "ours", "at the step of",
             "planner's smallest memory, MB"]  # fmt: skip
    cells = []
    for row in rows:
        again, peak = PAPER[row["network"]][row["strategy"]]
        cells.append([
            f"{figures.label(row['network'])}, {row['batch_size']}, {LABELS[row['strategy']]}",
            str(again), str(row["again"]), f"{peak:,g}" if peak < 500 else f"{peak:,.3f}", f"{row['peak'] / MB:,.3f}",
            row["step"], f"{row['planner'] / MB:,.3f}",
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """What agrees, and by which tensors the rest differs."""
    same = sum(row["again"] == PAPER[row["network"]][row["strategy"]][0] for row in rows)
    close = [row for row in rows if abs(row["peak"] / MB - PAPER[row["network"]][row["strategy"]][1]) < 0.0011]
    out = [
        f"{same} of {len(rows)} counts and {len(close)} of {len(rows)} peaks agree to the last digit that is printed. "
        "Layers are counted where the backward step of a layer reads what was dropped; memory-centric recomputation "
        "frees all that this step does not read."
    ]
    for row in rows:
        if row["strategy"] == "cost" or (row["strategy"] == "speed" and row["network"] != "resnet101"):
            tensors = ", ".join(f"{name} {nbytes / MB:.3f}" for name, nbytes in row["at_peak"])
            out.append(
                f"{figures.label(row['network'])}, {LABELS[row['strategy']]}: the {row['peak'] / MB:,.3f} MB at "
                f"{row['step']} are {tensors}."
            )
    if far := [row for row in rows if row["network"] != "alexnet" and row not in close]:
        row = far[-1]
        missing = row["peak"] / MB - PAPER[row["network"]][row["strategy"]][1]
        out.append(
            f"The ResNets' 401 MB are {missing:.3f} MB less than the four tensors that give AlexNet's 886.230 MB, too: "
            "the first convolution, the two layers after it, and one gradient. No tensor of the networks has the size "
            "of the difference, and no five or fewer of them above 1 MB add up to what rounds to 401. With 455.125 MB, "
            "which has the same tensors and two of POOL1, exact, we infer a misprint of 406."
        )
    more = [row["planner"] - row["peak"] for row in rows]
    out.append(
        "The planner needs the same memory, "
        + ("to the byte." if not any(more) else f"but for {min(more) / MB:,.3f} to {max(more) / MB:,.3f} MB more.")
    )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """Bars of ours by network and strategy, and the paper's numbers as lines across them."""
    names = list(dict.fromkeys(row["network"] for row in rows))
    with figure(path, 15.0, 4.6, 1, 2) as (counts, peaks):
        for axes, column, title in ((counts, 0, "Layers computed again"), (peaks, 1, "Peak memory (MB)")):
            values = [(row["again"], row["peak"] / MB)[column] for row in rows]
            for row, value in zip(rows, values, strict=True):
                x = names.index(row["network"]) + 0.27 * (list(LABELS).index(row["strategy"]) - 1)
                paper = PAPER[row["network"]][row["strategy"]][column]
                axes.bar(x, value, width=0.24, color=STRATEGY[row["strategy"]])
                axes.plot((x - 0.12, x + 0.12), (paper, paper), color=INK, linewidth=2.2, solid_capstyle="butt")
                same = f"{value:.{column * 3}f}" == f"{paper:.{column * 3}f}"
                text = f"{value:,.{column * 3}f}" + ("" if same else f"\n({paper:g})")
                axes.annotate(text, (x, max(value, paper)), (0, 4), "data", "offset points", ha="center", color=INK,
                              fontsize=9)  # fmt: skip
            axes.set_xticks(range(len(names)), [_group(rows, name) for name in names])
            axes.set(title=title, ylim=(0, 1.1 * max(values)), xlim=(-0.5, len(names) - 0.5))
            axes.tick_params(axis="x", length=0)
            axes.grid(axis="x", visible=False)
        keys: list[Patch | Line2D] = [Patch(color=STRATEGY[key], label=label) for key, label in LABELS.items()]
        keys.append(Line2D([], [], color=INK, linewidth=2.2, label="the paper's number (in brackets where it differs)"))
        counts.figure.legend(handles=keys, loc="outside lower center", ncols=4)
        counts.figure.suptitle("Table 1 of the SuperNeurons paper: what is recomputed, and what it takes",
                               x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)  # fmt: skip


def _group(rows: list[Row], name: str) -> str:
    batch_size = next(row["batch_size"] for row in rows if row["network"] == name)
    return f"{figures.label(name)}, batch {batch_size}"
