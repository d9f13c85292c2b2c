"""Table 5 of "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (2018), section 4.2: the
largest batch of six networks that trains in the 12 GB of a K40c, by framework.

Choices:

1. Programs of any batch size are made of two captures (home.Sizes); SuperNeurons' largest batch is captured to compare.
2. The batch of a method is the last for which its plan fits the simulator; one image more does not fit.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

import agents
from agents.heuristics.superneurons import JOINS
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import frameworks
from experiments.figures.frameworks import METHODS
from experiments.figures.home import Sizes
from experiments.plotting.palette import CAPACITY_OF, INK, label
from experiments.plotting.plots import panel_grid
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.program import Program

TITLE = "SuperNeurons, Table 5: the largest batch in 12 GB"
PAPER = {  # None: could not be run
    name: dict(zip(frameworks.FRAMEWORKS, row, strict=True))
    for name, row in {
        "alexnet": (768, 768, 1024, 1408, 1792),
        "vgg16_imagenet": (48, 64, 48, 80, 224),
        "inception_v4": (16, None, None, 64, 240),
        "resnet50_imagenet": (24, 80, 32, 128, 384),
        "resnet101_imagenet": (16, 48, 16, 80, 256),
        "resnet152_imagenet": (16, 32, 16, 48, 176),
    }.items()
}
BATCHES = (32, 64)  # captured
MOST = 1 << 14
CHECKED = "superneurons"
NEAR = 0.97  # of the memory: full
MUCH = 0.1  # of what is in memory


def tasks(settings: DictConfig) -> list[Row]:
    """One per network, and one for its plan at the paper's largest batch."""
    for name in (found := figures.networks(settings)):
        if name not in PAPER:
            raise cli.UsageError(f"figure.networks: {name!r} is not in the table ({', '.join(PAPER)})")
    methods, ours = frameworks.methods(settings), str(settings.ours)
    if CHECKED not in methods:
        raise cli.UsageError(f"figure.methods: {CHECKED} is not among them; at its batch the captures are compared")
    searches: list[Row] = [{"network": name, "methods": methods} for name in found]
    return searches + [{"network": name, "planner": ours, "batch": PAPER[name]["SuperNeurons"]} for name in found]


def run(task: Row, machine: Machine) -> Row:
    """Per method the largest batch that fits; or what a planner makes of one batch."""
    name = task["network"]
    if "planner" in task:
        program = figures.program(name, machine, batch_size=task["batch"], algorithms=False)
        try:
            plan = agents.make(task["planner"]).plan(program, machine, machine.memory_bytes)
        except agents.Infeasible:
            return {"overhead": None}
        return {"overhead": simulate(program, plan, machine, machine.memory_bytes).overhead}
    small, large = (figures.program(name, machine, batch_size=batch, algorithms=False) for batch in BATCHES)
    sizes = Sizes((small, large), BATCHES, machine)
    found = {}
    for method in task["methods"]:
        batch, there = frameworks.most(method, sizes.at, machine, BATCHES[0], MOST)
        found[method] = {"batch": batch, **there}
    batch = found[CHECKED]["batch"]
    if figures.program(name, machine, batch_size=batch, algorithms=False) != sizes.at(batch):
        raise AssertionError(f"{name}: at batch {batch} the program captured is not the one on the line")
    floor = frameworks.floor(CHECKED, sizes.at(batch + 1))
    return {
        "found": found, "kernels": len(small.kernels), "joins": joins(sizes.at(batch)),
        "floor": floor / machine.memory_bytes, "memory": machine.memory_bytes, "host": machine.host_bytes,
    }  # fmt: skip


def joins(program: Program) -> float:
    """What sums, concatenations and other kernels of elements write in the forward pass, as a part of what lies in
    memory at the peak."""
    k = max(range(len(program.kernels)), key=program.live_bytes.__getitem__)
    live = [
        program.tensors[t].nbytes
        for t, uses in enumerate(program.accesses)
        if not program.tensors[t].persistent and uses and uses[0] <= k <= uses[-1]
        if program.kernels[uses[0]].phase == "forward" and program.kernels[uses[0]].kind in JOINS
    ]
    return sum(live) / program.live_bytes[k]


# ------------------------------------------------------------------------------------------ for people


def _searched(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "found" in row]


def _residency(rows: list[Row], network: str) -> Row:
    return next(row for row in rows if "planner" in row and row["network"] == network)


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The paper's batches, then ours with what they cost."""
    methods = list(_searched(rows)[0]["found"])
    planner = label(next(row for row in rows if "planner" in row)["planner"])
    heads = ["largest batch in 12 GB (overhead)", *(f"{name}, paper" for name in frameworks.FRAMEWORKS),
             *(METHODS[m].label for m in methods), f"{planner} at SuperNeurons' batch in the paper"]  # fmt: skip
    cells = []
    for row in _searched(rows):
        there = _residency(rows, row["network"])["overhead"]
        cells.append([
            figures.label(row["network"]),
            *("N/A" if batch is None else f"{batch:,}" for batch in PAPER[row["network"]].values()),
            *(_cell(row["found"][m]) for m in methods), "does not fit" if there is None else f"fits ({there:.1%})",
        ])  # fmt: skip
    return heads, cells


def _cell(found: Row) -> str:
    return f"{found['batch']:,}" + (f" ({found['overhead']:.0%})" if found.get("overhead") else "")


def notes(rows: list[Row]) -> list[str]:
    """What ours are, then a sentence per network."""
    return [
        "Ours are memory strategies on PyTorch's own program, not the frameworks: without convolution workspaces, a "
        "CUDA context or holes between blocks. Overheads are at the largest batch, over "
        "the same kernels without any waiting.",
        "The paper's batches are multiples of 8 or more, ours are exact to one image.",
        f"Programs of other batch sizes lie on a line through captures at {BATCHES[0]} and {BATCHES[1]}; at the "
        "largest batch of SuperNeurons each network was captured again, and is the same.",
        *hosts(_searched(rows)),
        *(why(row, _residency(rows, row["network"])) for row in _searched(rows)),
    ]


def hosts(rows: list[Row]) -> list[str]:
    """A sentence on those that leave memory of the GPU free."""
    short = [
        f"{METHODS[method].label} on {figures.label(row['network'])}"
        for row in rows
        for method, there in row["found"].items()
        if there.get("peak", row["memory"]) < NEAR * row["memory"]
    ]
    if not short:
        return []
    return [f"What stops {', '.join(short)} is the host's memory, {rows[0]['host'] / 2**30:.0f} GiB: the GPU has room."]


def why(row: Row, ours: Row) -> str:
    """A network's sentence."""
    paper, found = PAPER[row["network"]], row["found"]
    theirs, batch = paper["SuperNeurons"], found[CHECKED]["batch"]
    assert theirs is not None
    none = f"without a plan {found['none']['batch']:,} fit (TensorFlow {paper['TensorFlow']:,})"
    out = f"{figures.label(row['network'])}: {none}; SuperNeurons "
    if batch >= theirs:
        out += f"goes to {batch:,} (paper {theirs:,}), we infer because nothing but tensors takes memory here"
    elif row["joins"] > MUCH:
        joins = "sums and concatenations"
        if row["network"] == "alexnet":
            joins = "LRN, which PyTorch makes of several kernels"
        out += (
            f"stops at {batch:,}, not {theirs:,}: at the peak without a plan {row['joins']:.0%} of the bytes are "
            f"results of {joins}, and stay"
        )
    else:
        out += (
            f"stops at {batch:,}, not {theirs:,}: with one image more, tensors take {row['floor']:.0%} of the memory, "
            "and what a chain of recomputation reads takes the rest"
        )
    end = "does not fit there." if ours["overhead"] is None else f"fits there with {ours['overhead']:.1%} overhead."
    return f"{out}. At the paper's {theirs:,} {label(ours['planner'])} {end}"


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network: a bar per framework, hollow, and per method; a line where no plan goes beyond."""
    searched = _searched(rows)
    methods = [m for m in searched[0]["found"] if METHODS[m].planner or m == "own"]
    count = len(frameworks.FRAMEWORKS) + len(methods)
    with panel_grid(path, len(searched), 3, (4.3, 0.7 + 0.3 * count), (2.2, 0.7)) as (grid, columns):
        for i, (axes, row) in enumerate(zip(grid, searched, strict=True)):
            bars = [(f"{name} (paper)", batch, "none") for name, batch in PAPER[row["network"]].items()]
            bars += [(METHODS[m].label, row["found"][m]["batch"], CAPACITY_OF[m]) for m in methods]
            for y, (_, value, fill) in enumerate(bars):
                axes.barh(y, value or 0, 0.7, color=fill, edgecolor=INK if fill == "none" else fill)
                axes.annotate("N/A" if value is None else f"{value:,}", (value or 0, y), (4, 0), va="center",
                              textcoords="offset points", fontsize=9.5, color=INK)  # fmt: skip
            top = max(value or 0 for _, value, _ in bars)
            if bound := row["found"].get("bound", {}).get("batch"):
                top = max(top, bound)
                axes.axvline(bound, color=INK, linewidth=1, linestyle=(0, (5, 3)))
                axes.annotate(f"no plan\nbeyond {bound:,}", (bound, 0), (-4, 0), textcoords="offset points", ha="right",
                              va="center", fontsize=9.5, color=INK)  # fmt: skip
            axes.set_yticks(range(len(bars)), [name for name, _, _ in bars] if i % columns == 0 else [""] * len(bars))
            axes.invert_yaxis()
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)
            axes.set_xlim(0, 1.12 * top)
            axes.set_title(figures.label(row["network"]))
        for axes in grid[-columns:]:
            axes.set_xlabel("largest batch, images")
        grid[0].figure.suptitle("Largest batch in 12 GB: frameworks in the paper (hollow), methods here (filled)",
                                x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)  # fmt: skip
