"""Figure 7 of the HOME paper: an iteration of vDNN, SuperNeurons, Capuchin and HOME, taken apart.

The four parts add up to the iteration: recomputation, kernels that run again; swapping, compute waits for a transfer;
overlap, a kernel and a transfer at the same time; computation, the other time of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.figure import Figure
from experiments.figures.home import METHODS, NETWORKS
from experiments.plotting.charts import Axis, Bars, Chart, Mark, Panel, Rule, Words
from experiments.plotting.palette import PARTS
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.timeline import Timeline

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


def lines(rows: list[Row]) -> list[Row]:
    """One per network and method."""
    return [
        {
            "network": NETWORKS[row["network"]].label, "batch": row["batch"], "ideal_ns": row["ideal_ns"],
            "method": f"{method} (all layers)" if found and found["planner"] == "vdnn_all" else method, "found": found,
            "ours": {part: found["parts"][part] / found["iteration_ns"] if found else None for part in PARTS},
            "paper": {**dict.fromkeys(PARTS), **(PAPER.get(row["network"], {}).get(method, {}) if found else {})},
        }
        for row in rows
        for method, found in row["methods"].items()
    ]  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """Of each network: HOME beside the others, and what SuperNeurons' recomputation is of the kernels' time."""
    networks = []
    for row in rows:
        theirs, here = PAPER.get(row["network"], {}).get("SuperNeurons", {}), row["methods"]["SuperNeurons"]
        said = [f"{method} {found['overhead']:+.2%}" if found else f"{method} does not fit"
                for method, found in row["methods"].items()]  # fmt: skip
        both = here if "recomputation" in theirs else None
        networks.append({
            "label": NETWORKS[row["network"]].label, "batch": row["batch"], "times": row["batch"] / row["unplanned"],
            "said": said, "again": both and here["parts"]["recomputation"] / row["ideal_ns"],
            "again_paper": both and theirs["recomputation"] / (1 - theirs["recomputation"] - theirs["swapping"]),
        })  # fmt: skip
    return {"networks": networks, "lines": lines(rows)}


def chart(rows: list[Row]) -> Chart:
    """A panel per network: a bar per method, its parts one after the other, over the time without a plan."""
    panels = []
    for row in rows:
        methods, unit = lines([row]), row["ideal_ns"]
        marks: list[Mark] = [Rule(1)]
        left = np.zeros(len(methods))
        longest = max((one["found"]["iteration_ns"] for one in methods if one["found"]), default=0) / unit
        for part, ink in PARTS.items():
            width = np.array([one["found"]["parts"][part] / unit if one["found"] else 0.0 for one in methods])
            texts = [
                f"{one['ours'][part]:.0%}" if w > 0.05 * longest else "" for one, w in zip(methods, width, strict=True)
            ]
            marks.append(Bars(range(len(methods)), width, ink, part, 0.62, left, texts=texts, inside=True))
            left = left + width
        for y, one in enumerate(methods):
            said = [f"{part} {100 * value:g}%" for part, value in one["paper"].items() if value is not None]
            paper = f"  (paper: {', '.join(said)})" if said else ""
            text = f"  {one['found']['overhead']:+.1%}{paper}" if one["found"] else "  does not fit"
            marks.append(Words(left[y], y, text, "left"))
        where = Axis("iteration time, over that of the kernels alone", "{:g}×", (0, 1.5 * longest))
        title = f"{NETWORKS[row['network']].label}, batch {row['batch']:,}"
        panels.append(Panel(title, marks, where, Axis(names=[one["method"] for one in methods])))
    return Chart("Where an iteration's time goes, in 11 GB of an RTX 2080 Ti", panels, 1, (12.0, 2.7), keys=4)


FIGURE = Figure("home_fig7", tasks, run, numbers, chart)
