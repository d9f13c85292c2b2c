"""Figure 7 of "HOME: A Holistic GPU Memory Management Framework for Deep Learning" (2022), section 4.3: an iteration of
vDNN, SuperNeurons, Capuchin and HOME, taken apart; VGG16 at batch 3950 and InceptionV3, RTX 2080 Ti.

Networks, limit, durations and methods are those of experiments/figures/home_fig6.py. The four parts of the paper, which
add up to the iteration:

- recomputation: kernels that run again;
- swapping: compute waits for a transfer;
- overlap: a kernel and a transfer at the same time;
- computation: the other time of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.home import METHODS, NETWORKS
from experiments.plotting.palette import INK, PARTS
from experiments.plotting.plots import figure
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.timeline import Timeline

TITLE = "HOME, Fig. 7: where the time goes"
SHOWN = tuple(method for method in METHODS if method != "PyTorch")
# Section 4.3: parts of the iteration, as far as the text gives them.
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "vgg16": {
        "vDNN": {"swapping": 0.75},
        "SuperNeurons": {"recomputation": 0.205, "swapping": 0.09},
        "HOME": {"overlap": 0.57, "swapping": 0.0},
    },
    "inception_v3_cifar": {"vDNN": {"swapping": 0.34}, "Capuchin": {"swapping": 0.05}, "HOME": {"swapping": 0.01}},
}


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    options = home.search(settings)
    batches = cli.plain(settings.batches)
    for name, batch in batches.items():
        if name not in NETWORKS:
            raise cli.UsageError(f"figure.batches: {name!r} is not one of HOME's networks ({', '.join(NETWORKS)})")
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 2:
            raise cli.UsageError(f"figure.batches.{name}: expected an integer of at least 2, got {batch!r}")
    return [{"network": name, "batch": batch, **options} for name, batch in batches.items()]


def run(task: Row, machine: Machine) -> Row:
    """Nanoseconds of each part, by method."""
    of = home.sizes(task["network"], machine)
    options = {key: task[key] for key in ("particles", "iterations")}
    program = of.at(task["batch"])
    found: dict[str, Row | None] = {}
    for method in SHOWN:
        plan = home.planned(method, program, machine, options)
        found[method] = None
        if plan is not None:
            timeline = simulate(program, plan, machine, machine.memory_bytes)
            found[method] = {
                "planner": plan.planner, "iteration_ns": timeline.iteration_ns, "overhead": timeline.overhead,
                "parts": parts(timeline),
            }  # fmt: skip
    return {"unplanned": home.unplanned(of), "ideal_ns": program.ideal_ns, "methods": found}


def parts(timeline: Timeline) -> dict[str, int]:
    """Nanoseconds of the last iteration: computation, overlap, recomputation, swapping; they add up to it."""
    begin, end = timeline.last_start_ns, timeline.boundaries[-1]
    inside = [
        (max(s.start_ns, begin), min(s.end_ns, end), s.kind)
        for s in timeline.spans
        if s.end_ns > begin and s.start_ns < end
    ]
    copies = union((a, b) for a, b, kind in inside if kind in ("swap_out", "swap_in"))
    both = overlap_ns([(a, b) for a, b, kind in inside if kind == "kernel"], copies)
    took = timeline.breakdown
    return {
        "computation": took.compute_ns - both,
        "overlap": both,
        "recomputation": took.recompute_ns,
        "swapping": took.stall_memory_ns + took.stall_data_ns,
    }


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint intervals, in order, that cover the same time."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(intervals):
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(b, out[-1][1])
        else:
            out.append((a, b))
    return out


def overlap_ns(kernels: list[tuple[int, int]], copies: list[tuple[int, int]]) -> int:
    """Time that lies in one of ``kernels`` and in one of ``copies``; each list is disjoint."""
    return sum(max(0, min(b, d) - max(a, c)) for a, b in kernels for c, d in copies)


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Parts of the iteration: paper / ours where the paper's text has a number, else ours."""
    heads = ["part of the iteration: paper / ours", "batch", "ms, ours", *PARTS]
    cells = []
    for row in rows:
        for method, found in row["methods"].items():
            name = f"{NETWORKS[row['network']].label}, {_name(method, found)}"
            if found is None:
                cells.append([name, f"{row['batch']:,}", "does not fit", *["" for _ in PARTS]])
                continue
            theirs = PAPER.get(row["network"], {}).get(method, {})
            cells.append([
                name, f"{row['batch']:,}", f"{found['iteration_ns'] / 1e6:,.0f}",
                *((f"{theirs[part]:.1%} / " if part in theirs else "") + f"{share(found, part):.1%}" for part in PARTS),
            ])  # fmt: skip
    return heads, cells


def _name(method: str, found: Row | None) -> str:
    return f"{method} (all layers)" if found and found["planner"] == "vdnn_all" else method


def share(found: Row, part: str) -> float:
    """What part of the iteration it is."""
    return float(found["parts"][part] / found["iteration_ns"])


def notes(rows: list[Row]) -> list[str]:
    """A sentence per network, then what is general."""
    return [
        *(why(row) for row in rows),
        "vDNN: where the inputs of convolutions alone do not fit, those of all layers are offloaded. The next layer "
        "waits for every offload, which is where its time goes, as in the paper (whose InceptionV3 has vDNN at batch "
        "170, although it fails above 160 in Fig. 6).",
        "SuperNeurons: ours swaps a convolution's output only as far as memory is short after dropping all that it "
        "may, the paper's swaps them all.",
    ]


def why(row: Row) -> str:
    """A network's sentence: HOME beside Capuchin, and what SuperNeurons' recomputation is of the kernels' time."""
    label, methods = NETWORKS[row["network"]].label, row["methods"]
    parts = [
        f"{method} {found['overhead']:+.2%}" if found else f"{method} does not fit" for method, found in methods.items()
    ]
    out = (
        f"{label} (batch {row['batch']:,}, {row['batch'] / row['unplanned']:.2f} times the largest without a plan): "
        f"{', '.join(parts)}."
    )
    theirs = PAPER.get(row["network"], {}).get("SuperNeurons", {}).get("recomputation")
    if theirs and methods["SuperNeurons"]:
        kernels = 1 - theirs - PAPER[row["network"]]["SuperNeurons"]["swapping"]
        ours = methods["SuperNeurons"]["parts"]["recomputation"] / row["ideal_ns"]
        out += (
            f" What SuperNeurons recomputes takes {ours:.0%} of the kernels' time by the roofline, where the paper's "
            f"numbers make it {theirs / kernels:.0%}: pooling, activation and batch-norm took more there than the time "
            "of their bytes (inferred)."
        )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network: a bar per method, its parts one after the other, over the time without a plan."""
    with figure(path, 12.0, 1.6 + 0.55 * len(SHOWN) * len(rows), len(rows), 1) as made:
        grid = list(np.atleast_1d(made).flat)
        for axes, row in zip(grid, rows, strict=True):
            longest = max((f["iteration_ns"] for f in row["methods"].values() if f), default=0) / row["ideal_ns"]
            names = [_name(m, found) for m, found in row["methods"].items()]
            for y, (method, found) in enumerate(row["methods"].items()):
                if found is None:
                    axes.text(0.01, y, "does not fit", va="center", fontsize=10, color=INK)
                    continue
                left = 0.0
                for part, ink in PARTS.items():
                    width = found["parts"][part] / row["ideal_ns"]
                    axes.barh(y, width, left=left, color=ink, height=0.62, label=part if not y else None)
                    if width > 0.05 * longest:
                        axes.text(left + width / 2, y, f"{share(found, part):.0%}", ha="center", va="center",
                                  fontsize=9.5, color="white")  # fmt: skip
                    left += width
                theirs = PAPER.get(row["network"], {}).get(method, {})
                paper = f"  (paper: {', '.join(f'{p} {100 * v:g}%' for p, v in theirs.items())})" if theirs else ""
                axes.text(left, y, f"  {found['overhead']:+.1%}{paper}", va="center", fontsize=10, color=INK)
            axes.set_yticks(range(len(names)), names)
            axes.set(ylim=(len(names) - 0.45, -0.55), title=f"{NETWORKS[row['network']].label}, batch {row['batch']:,}")
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
            axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (5, 3)))
            axes.set_xlim(0, 1.35 * axes.get_xlim()[1])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        grid[-1].set_xlabel("iteration time, over that of the kernels alone")
        fig = grid[0].figure
        handles, labels = grid[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
        fig.suptitle("Where an iteration's time goes, in 11 GB of an RTX 2080 Ti", x=0.01, ha="left", fontsize=13,
                     fontweight="bold", color=INK)  # fmt: skip
