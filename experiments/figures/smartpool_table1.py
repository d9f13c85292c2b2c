"""Table I of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section VI-A: peak load,
competitive ratio (footprint over load) and time per iteration with cudaMalloc, CnMem and SmartPool; eight networks,
batch size 100, GTX 1080 Ti.

SINGA, on which the paper runs, keeps more than the captured program (the column "as SINGA keeps it"): the gradients of
the previous iteration, and in every convolution a workspace. ``fastest`` is another reading: every layer keeps the
workspace of the fastest algorithm of executor/capture/algorithms.py. How the paper's rows are read, and what the
workspaces are inferred from (experiments/figures/README.md):

1. MB is 2^20 bytes: with it the loads of the ResNets differ by one multiple of the weights (``multiples``).
2. "cudaMalloc Time Per Iteration" is that of the whole iteration; over the speedups it is what our programs take.
3. An iteration takes its kernels' time plus that of its mallocs and frees on the host (simulator/pool/times.py).
4. Left out: cuDNN's random states in dropout layers, and its masks of a bit where PyTorch keeps a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting.palette import ALLOCATORS, FAINT, INK, KEPT
from experiments.plotting.plots import figure
from simulator.machine import Machine
from simulator.pool import Intervals, program_lifetimes
from simulator.pool.times import allocation_ns
from simulator.program import Program, Tensor

TITLE = "SmartPool, Table I: competitive ratio and time of cudaMalloc, CnMem and SmartPool"
MB = 2**20
POOLS = ("cnmem", "smartpool")
PAPER: dict[str, dict[str, float]] = {  # ratios, ms of an iteration with cudaMalloc, speedups over it
    name: dict(zip(("load", "cnmem", "smartpool", "ms", "cnmem_speedup", "smartpool_speedup"), row, strict=True))
    for name, row in {
        "resnet18": (1452, 1.033, 1.003, 359, 1.84, 1.83),
        "resnet34": (2824, 1.028, 1.001, 684, 1.86, 1.85),
        "resnet50": (4418, 1.030, 1.003, 993, 1.84, 1.88),
        "resnet101": (8367, 1.028, 1.0005, 2086, 1.99, 1.97),
        "vgg11": (389, 1.169, 1.013, 76, 1.77, 1.75),
        "vgg13": (509, 1.115, 1.016, 94, 1.72, 1.71),
        "vgg16": (647, 1.113, 1.012, 122, 1.72, 1.73),
        "vgg19": (785, 1.072, 1.011, 162, 1.91, 1.94),
    }.items()
}
WORST = 1.016  # the paper's worst ratio of SmartPool


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    for name in (found := figures.networks(settings)):
        if name not in PAPER:
            raise cli.UsageError(f"figure.networks: {name!r} is not in the table ({', '.join(PAPER)})")
    return [{"network": name} for name in found]


def run(task: Row, machine: Machine) -> Row:
    """Bytes, ratios and ns of one network."""
    from experiments import workloads  # PyTorch is only needed to capture

    config = figures.workload(task["network"])
    captured = workloads.load({**config, "algorithms": False}, machine)
    program = captured.program
    gradients, filters = kept_by_singa(workloads.build(config)[0])
    singa = Program(program.name, (*program.tensors, *gradients, *filters), program.kernels)
    lives = program_lifetimes(program).intervals
    return {
        "load": program.peak_bytes,
        "blocks": len(lives),
        "ratios": ratios(lives, machine),
        "weights": sum(t.nbytes for t in program.tensors if t.kind == "parameter"),
        "ideal_ns": program.ideal_ns,
        "allocation_ns": {name: allocation_ns(name, lives, machine) for name in ("cudamalloc", *POOLS)},
        "singa": {
            "load": singa.peak_bytes,
            "gradients": sum(t.nbytes for t in gradients),
            "filters": sum(t.nbytes for t in filters),
            "ratios": ratios(program_lifetimes(singa).intervals, machine),
        },
        "fastest": program.peak_bytes + workspaces(captured.on(machine, algorithms=True).program),
    }


def ratios(lives: Intervals, machine: Machine) -> dict[str, float]:
    """Footprints over the load; ``aligned``: SmartPool's with the machine's alignment."""
    load = lives.peak_bytes
    found = {name: figures.packed(name, lives).footprint / load for name in POOLS}
    return {**found, "aligned": figures.packed("smartpool", lives, machine.alignment).footprint / load}


def kept_by_singa(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the previous iteration, and the transformed filters of 3x3 convolutions of stride 1."""
    gradients = [
        Tensor(f"previous gradient of {name}", p.numel() * p.element_size(), "gradient", True)
        for name, p in model.named_parameters()
    ]
    convolutions = {
        name: layer.weight
        for name, layer in model.named_modules()
        if getattr(layer, "kernel_size", None) == (3, 3) and layer.stride == (1, 1)
    }
    filters = [
        Tensor(f"transformed filters of {name}", w.numel() * w.element_size() * 16 // 9, "buffer", True)
        for name, w in convolutions.items()
    ]
    return gradients, filters


def workspaces(program: Program) -> int:
    """Bytes of one workspace per convolution layer: the larger of its forward and its backward kernel's."""
    layers: dict[int, int] = {}  # by the weight
    for kernel in program.kernels:
        if kernel.workspace:
            weights = [t for t in kernel.inputs if program.tensors[t].kind == "parameter"]
            layer = max(weights, key=lambda t: program.tensors[t].nbytes)
            layers[layer] = max(layers.get(layer, 0), kernel.workspace)
    return sum(layers.values())


def iteration_ns(row: Row, pool: str) -> int:
    """Time of an iteration with an allocator."""
    return int(row["ideal_ns"] + row["allocation_ns"][pool])


def speedup(row: Row, pool: str) -> float:
    """Of a pool over cudaMalloc."""
    return iteration_ns(row, "cudamalloc") / iteration_ns(row, pool)


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Paper / ours in every cell."""
    heads = [
        "paper / ours", "load, MB", "as SINGA keeps it", "CnMem ratio", "SmartPool ratio", "aligned", "cudaMalloc, ms",
        "CnMem speedup", "SmartPool speedup",
    ]  # fmt: skip
    cells = []
    for row in rows:
        paper, ours = PAPER[row["network"]], row["ratios"]
        cells.append([
            label(row),
            f"{paper['load']:,.0f} / {row['load'] / MB:,.0f}",
            f"{paper['load']:,.0f} / {row['singa']['load'] / MB:,.0f}",
            f"{paper['cnmem']:.3f} / {ours['cnmem']:.3f}",
            f"{paper['smartpool']:.4f} / {ours['smartpool']:.4f}",
            f"{ours['aligned']:.4f}",
            f"{paper['ms']:,.0f} / {iteration_ns(row, 'cudamalloc') / 1e6:,.0f}",
            f"{paper['cnmem_speedup']:.2f} / {speedup(row, 'cnmem'):.2f}",
            f"{paper['smartpool_speedup']:.2f} / {speedup(row, 'smartpool'):.2f}",
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """What is general, then a sentence per network."""
    exact, aligned = (max(row["ratios"][key] for row in rows) for key in ("smartpool", "aligned"))
    far = [row["fastest"] / MB / PAPER[row["network"]]["load"] for row in rows]
    out = [
        f"SmartPool's worst ratio is {exact:.4f}, and {aligned:.4f} with sizes rounded up to the machine's alignment; "
        f"the paper's is {WORST}."
    ]
    if binary := multiples(rows, MB):
        out.append(
            "MB is 2^20 bytes. From one ResNet to the next the paper's load grows by our activations and "
            f"{_list(binary)} times the weights; with MB of 10^6 bytes it would be {_list(multiples(rows, 10**6))} "
            "times. 3 + 16/9 = 4.78: SINGA holds the previous iteration's gradients beside weights and momentum, and, "
            "we infer, filters transformed for Winograd convolution, 16 values for 9, kept by every layer. The column "
            '"as SINGA keeps it" has both, for all networks.'
        )
    return [
        *out,
        "Another reading, that each layer keeps the workspace of the fastest algorithm "
        "(executor/capture/algorithms.py), does not explain the loads: "
        f"it makes them {min(far):.1f} to {max(far):.1f} times the paper's.",
        "Where CnMem leaves holes depends on the order of mallocs, which is PyTorch's here and SINGA's there.",
        "What cudaMalloc and cudaFree cost was fitted to this table's times (configs/machine/gtx1080ti.yaml), so that "
        "their level says nothing; how they spread over the networks does.",
        *(why(row) for row in rows),
    ]


def multiples(rows: list[Row], unit: int) -> list[float]:
    """From each ResNet to the next: how many times the weights the paper's load, in MB of ``unit`` bytes, grows by
    beside our activations. Of weights and momentum, the captured peak holds two."""
    nets = [(PAPER[r["network"]]["load"] * unit, r["load"], r["weights"]) for r in rows if "resnet" in r["network"]]
    return [
        2 + ((theirs - theirs0) - (ours - ours0)) / (weights - weights0)
        for (theirs0, ours0, weights0), (theirs, ours, weights) in zip(nets, nets[1:], strict=False)
    ]


def _list(values: list[float]) -> str:
    return ", ".join(f"{v:.2f}" for v in values)


def why(row: Row) -> str:
    """A network's sentence: what its differences are made of."""
    paper, singa = PAPER[row["network"]], row["singa"]
    captured, kept = (f"{load / MB / paper['load'] - 1:+.1%}" for load in (row["load"], singa["load"]))
    missing, gradients, filters = paper["load"] - row["load"] / MB, singa["gradients"] / MB, singa["filters"] / MB
    holes, theirs = (row["ratios"]["cnmem"] - 1) * row["load"] / MB, (paper["cnmem"] - 1) * paper["load"]
    kernels, calls = row["ideal_ns"] / 1e6, row["allocation_ns"]["cudamalloc"] / 1e6
    return (
        f"{label(row)}: of the load {missing:,.0f} MB are missing ({captured}), where SINGA keeps {gradients:,.0f} MB "
        f"of gradients and {filters:,.0f} MB of filters ({kept} with them); CnMem's holes are {holes:,.0f} MB, the "
        f"paper's {theirs:,.0f} MB (ratio {singa['ratios']['cnmem']:.3f} in SINGA's load); {row['blocks']:,} blocks "
        f"cost cudaMalloc {calls:,.0f} ms beside {kernels:,.0f} ms of kernels, the paper's "
        f"{paper['ms'] - kernels:,.0f} ms."
    )


def draw(rows: list[Row], path: Path) -> None:
    """Three panels of a row per network: load, ratio, speedup; the paper hollow, ours filled."""
    ys = range(len(rows))
    with figure(path, 13.0, 1.9 + 0.42 * len(rows), 1, 3) as (loads, ratio, speed):
        fig = loads.figure
        for axes in (loads, ratio, speed):
            axes.set_yticks(ys, [label(r) for r in rows] if axes is loads else [""] * len(rows))
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)
            axes.spines["left"].set_visible(False)
            for y in ys:
                axes.axhspan(y - 0.5, y + 0.5, color="none" if y % 2 else "#f6f6f6", linewidth=0, zorder=0)
        ink = ALLOCATORS["cudamalloc"].colour
        for y, row in enumerate(rows):
            paper = PAPER[row["network"]]["load"]
            captured, kept = (load / MB / paper for load in (row["load"], row["singa"]["load"]))
            _pair(loads, y, captured, kept, None)
            loads.plot(captured, y, "o", color=ink, markersize=7, zorder=3)
            loads.plot(kept, y, "o", color=KEPT, markersize=7, zorder=3)
            for x, side in ((captured, -1), (kept, 1)):
                loads.annotate(f"{x - 1:+.0%}".replace("-", "−"), (x, y), (8 * side, 0), "data", "offset points",
                               ha="left" if side > 0 else "right", va="center", fontsize=9.5, color=INK)  # fmt: skip
        loads.axvline(1, color=INK, linewidth=1)
        loads.set(title="Peak load, over the paper's", xlim=(0.62, 1.14), xlabel="ours / paper")
        loads.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        for axes, value, key in ((ratio, _ratio, "{}"), (speed, speedup, "{}_speedup")):
            for shift, pool in zip((-0.16, 0.16), POOLS, strict=True):
                look = ALLOCATORS[pool]
                for y, row in enumerate(rows):
                    theirs, ours = PAPER[row["network"]][key.format(pool)], value(row, pool)
                    _pair(axes, y + shift, theirs, ours, look.colour)
                    axes.plot(theirs, y + shift, look.marker, color=look.colour, markerfacecolor="white", zorder=3,
                              markersize=6.5, markeredgewidth=1.5)  # fmt: skip
                    axes.plot(ours, y + shift, look.marker, color=look.colour, zorder=4, markersize=6.5)
        ratio.axvline(1, color=INK, linewidth=1)
        ratio.set(title="Competitive ratio", xlabel="footprint / peak load", xlim=(0.985, None))
        speed.set(title="Speedup over cudaMalloc", xlabel="iteration with cudaMalloc / with the pool")
        speed.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.2f}×"))
        keys = [
            Line2D([], [], marker="o", linestyle="", color=ink, label="load as captured"),
            Line2D([], [], marker="o", linestyle="", color=KEPT, label="with what SINGA keeps"),
        ]
        for pool in POOLS:
            look = ALLOCATORS[pool]
            keys += [
                Line2D([], [], marker=look.marker, linestyle="", color=look.colour, markerfacecolor="white",
                       markeredgewidth=1.5, label=f"{_name(pool)}, paper"),
                Line2D([], [], marker=look.marker, linestyle="", color=look.colour, label=f"{_name(pool)}, ours"),
            ]  # fmt: skip
        fig.legend(handles=keys, loc="outside lower center", ncols=6, fontsize=10, handletextpad=0.3)
        fig.suptitle("Table I of the SmartPool paper, batch size 100, GTX 1080 Ti: the paper's numbers and ours",
                     x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)  # fmt: skip


def _pair(axes: Any, y: float, a: float, b: float, colour: str | None) -> None:
    axes.plot((a, b), (y, y), color=colour or FAINT, linewidth=1.4, alpha=0.6, zorder=2)


def _ratio(row: Row, pool: str) -> float:
    value: Mapping[str, float] = row["ratios"]
    return value[pool]


def label(row: Row) -> str:
    """A network's name for people."""
    return figures.label(row["network"])


def _name(pool: str) -> str:
    return ALLOCATORS[pool].label.partition(",")[0]
