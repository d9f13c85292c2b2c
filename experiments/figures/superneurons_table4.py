"""Table 4 of "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (2018), section 4.2: the
deepest ResNet that trains in the 12 GB of a K40c at batch size 16, by framework.

The ResNet has 6, 32, n3 and 6 bottleneck blocks in its four stages and a depth of 3 (6 + 32 + n3 + 6) + 2; n3 grows.
So it is in the program that the authors released (``residual_imagenet_max``, with n3 = 788 for depth 2498, the "ResNet
2500" of the text at batch size 1). Choices:

1. Programs of any depth are one capture with a block repeated (capacity.Deeper); one depth is captured to compare.
2. The depth of a method is the last for which its plan fits the simulator; one block more does not fit.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig

from agents.heuristics.layers import feature_maps
from agents.heuristics.superneurons import JOINS
from executor.capture.roofline import with_roofline
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import frameworks
from experiments.figures.capacity import Deeper, anonymous
from experiments.figures.frameworks import METHODS
from experiments.plotting.palette import CAPACITY_OF, INK
from experiments.plotting.plots import figure
from simulator.machine import Machine
from simulator.program import Program

TITLE = "SuperNeurons, Table 4: the deepest ResNet in 12 GB"
PAPER = dict(zip(frameworks.FRAMEWORKS, (148, 480, 152, 592, 1920), strict=True))
STAGES = (6, 32, 6)  # n1, n2, n4
CAPTURED = 4  # n3 of the capture; its third block is repeated
FIRST, MOST = {"own": CAPTURED, "none": 128}, 2048  # n3


def tasks(settings: DictConfig) -> list[Row]:
    """One per method."""
    found, captured = frameworks.methods(settings), str(settings.captured)
    if captured not in found:
        raise cli.UsageError(f"figure.captured: {captured!r} is not one of the methods ({', '.join(found)})")
    batch = cli.integer(settings, "batch_size", least=2)
    return [{"method": name, "batch": batch, "captured": name == captured} for name in found]


def run(task: Row, machine: Machine) -> Row:
    """The deepest that fits."""
    method, batch = task["method"], task["batch"]
    shallow = Deeper(with_roofline(first(batch), machine), 4 + sum(STAGES[:2]) + CAPTURED // 2)
    n3, found = frameworks.most(method, lambda n: shallow.by(n - CAPTURED), machine, FIRST.get(method, 400), MOST)
    program = shallow.by(n3 - CAPTURED)
    if task["captured"]:
        whole = captured(batch, n3, machine)
        if anonymous(whole) != anonymous(program):
            raise AssertionError(f"n3 = {n3}: the program captured is not the one of a block repeated")
        program = whole
        if METHODS[method].planner and frameworks.planned(method, whole, machine) is None:
            raise AssertionError(f"{method}: n3 = {n3} fits as repeated, and not as captured")
    sums = [m for m in feature_maps(program) if program.kernels[m.layer].kind in JOINS]
    return {
        "n3": n3, "depth": depth(n3), "kernels": len(program.kernels), "memory": machine.memory_bytes,
        "at_end": program.live_bytes[-1], "sums": sum(program.tensors[m.tensor].nbytes for m in sums), **found,
    }  # fmt: skip


def captured(batch: int, n3: int, machine: Machine) -> Program:
    """The network, captured."""
    n1, n2, n4 = STAGES
    return figures.program("resnet50_imagenet", machine, batch_size=batch, stages=f"{n1}-{n2}-{n3}-{n4}")


@lru_cache(maxsize=1)  # a process has several tasks
def first(batch: int) -> Program:
    """The capture of which the deeper ones are made; of its durations none is used."""
    return captured(batch, CAPTURED, Machine.load("k40c"))


def depth(n3: int) -> int:
    """Layers with weights."""
    return 3 * (sum(STAGES) + n3) + 2


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The paper's frameworks, then our methods."""
    heads = [f"deepest ResNet, batch {rows[0]['batch']}", "depth", "n3", "overhead", "images/s, roofline",
             "weights, gradients, momentum"]  # fmt: skip
    cells = [[f"{name}, in the paper", f"{there:,}", "", "", "", ""] for name, there in PAPER.items()]
    for row in rows:
        timed = "overhead" in row
        cells.append([
            METHODS[row["method"]].label, f"{row['depth']:,}", str(row["n3"]),
            f"{row['overhead']:.0%}" if timed else "",
            f"{row['batch'] / row['iteration_ns'] * 1e9:.1f}" if timed else "",
            f"{row['at_end'] / row['memory']:.0%} of the memory",
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """How far, then a sentence per method."""
    found = {row["method"]: row for row in rows}
    whole = next(row for row in rows if row["captured"])
    out = [
        "Ours are memory strategies on PyTorch's own program, not the frameworks: without convolution workspaces, a "
        "CUDA context or holes between blocks.",
        f"Programs of other depths repeat a block of one capture; at depth {whole['depth']:,} ({whole['kernels']:,} "
        "kernels) the network was captured as a whole and is the same, kernel by kernel.",
    ]
    if row := found.get("own"):
        out.append(
            f"Every tensor in memory of its own: {row['depth']}, against {PAPER['Caffe']} of Caffe and "
            f"{PAPER['Torch']} of Torch, whose reuse of memory does little for nonlinear networks (2.2)."
        )
    if row := found.get("none"):
        out.append(
            f"Dead tensors freed: {row['depth']}, against {PAPER['TensorFlow']} of TensorFlow and {PAPER['MXNet']} of "
            "MXNet; we infer that the rest of theirs is convolution workspace."
        )
    if row := found.get("superneurons"):
        out.append(
            f"SuperNeurons by its section 3 reaches {row['depth']:,}, less than its own {PAPER['SuperNeurons']:,}: the "
            "sums that end the blocks are neither convolutions nor cheap layers and stay, "
            f"{row['sums'] / row['memory']:.0%} of the memory there."
        )
    if row := found.get("superneurons_joins"):
        out.append(
            f"Where the sums go to the host, too, it reaches {row['depth']:,}, and stops because weights, momentum and "
            f"gradients take {row['at_end'] / row['memory']:.0%} of the memory at the end of the iteration; the "
            f"paper's 2,500 at batch size 1 is near that. Why it has {PAPER['SuperNeurons']:,} at batch size 16 its "
            "text does not say."
        )
    if row := found.get("memonger"):
        out.append(
            f"memonger reaches {row['depth']:,}, far beyond MXNet's {PAPER['MXNet']}: it runs convolutions again, too, "
            "where MXNet frees what cheap layers made (2.2)."
        )
    if row := found.get("vdnn_all"):
        out.append(
            f"vDNN, not in the paper's table, reaches {row['depth']:,} with {row['overhead']:.0%} overhead: as deep as "
            "weights, momentum and gradients allow."
        )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A bar per framework, hollow, and per method."""
    bars = [(f"{name} (paper)", there, "none") for name, there in PAPER.items()]
    bars += [(METHODS[row["method"]].label, row["depth"], CAPACITY_OF[row["method"]]) for row in rows]
    speeds = {len(PAPER) + i: row["overhead"] for i, row in enumerate(rows) if row.get("overhead")}
    with figure(path, 8.6, 1.3 + 0.36 * len(bars)) as axes:
        for y, (_, value, fill) in enumerate(bars):
            axes.barh(y, value, 0.68, color=fill, edgecolor=INK if fill == "none" else fill)
            slower = f" ({speeds[y]:.0%} slower)" if y in speeds else ""
            axes.annotate(f"{value:,}{slower}", (value, y), (5, 0), textcoords="offset points", va="center",
                          fontsize=10, color=INK)  # fmt: skip
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.28 * max(value for _, value, _ in bars))
        axes.set_xlabel("layers with weights")
        title = f"Deepest ResNet in 12 GB, batch size {rows[0]['batch']}: the paper (hollow), ours (filled)"
        axes.figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
