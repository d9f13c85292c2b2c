"""Table I of the SmartPool paper: competitive ratio and time of cudaMalloc, CnMem and SmartPool."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.plotting.charts import ONE, Axis, Chart, Line, Mark, Panel, pairs
from experiments.plotting.palette import ALLOCATORS, FAINT, KEPT
from simulator.machine import Machine
from simulator.pool import Intervals, program_lifetimes
from simulator.pool.times import allocation_ns
from simulator.program import Program, Tensor

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
    return [{"network": name} for name in figures.networks(settings, PAPER)]


def run(task: Row, machine: Machine) -> Row:
    """Bytes, ratios and ns of one network."""
    from experiments import workloads  # PyTorch is only needed to capture

    config = figures.workload(task["network"])
    program = workloads.load({**config, "algorithms": False}, machine).program
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


def speedup(row: Row, pool: str) -> float:
    """Of an iteration with a pool over one with cudaMalloc."""
    slow, fast = (row["ideal_ns"] + row["allocation_ns"][name] for name in ("cudamalloc", pool))
    return float(slow / fast)


# ------------------------------------------------------------------------------------------ for people


def facts(row: Row) -> Row:
    """A network's numbers, beside the paper's."""
    paper, singa = PAPER[row["network"]], row["singa"]
    return {
        **row, "label": figures.label(row["network"]), "paper": paper,
        "cudamalloc_ms": (row["ideal_ns"] + row["allocation_ns"]["cudamalloc"]) / 1e6,
        "speedups": {pool: speedup(row, pool) for pool in POOLS},
        "captured": row["load"] / MB / paper["load"], "kept": singa["load"] / MB / paper["load"],
    }  # fmt: skip


def multiples(rows: list[Row]) -> list[float]:
    """From each ResNet to the next: how many times the weights the paper's load grows by beside our activations. Of
    weights and momentum, the captured peak holds two."""
    nets = [(PAPER[r["network"]]["load"] * MB, r["load"], r["weights"]) for r in rows if "resnet" in r["network"]]
    return [
        2 + ((theirs - theirs0) - (ours - ours0)) / (weights - weights0)
        for (theirs0, ours0, weights0), (theirs, ours, weights) in zip(nets, nets[1:], strict=False)
    ]


def numbers(rows: list[Row]) -> Row:
    """Of all networks."""
    return {
        "exact": max(row["ratios"]["smartpool"] for row in rows), "worst": WORST,
        "aligned": max(row["ratios"]["aligned"] for row in rows),
        "binary": multiples(rows) or None,
        "networks": [facts(row) for row in rows],
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Load, ratio and speedup, a row per network."""
    found = [facts(row) for row in rows]
    names = Axis(names=[one["label"] for one in found])
    loads: list[Mark] = [
        Line([one[key] for one in found], range(len(found)), colour, label, "o", "", size=7,
             texts=[f"{one[key] - 1:+.0%}" for one in found], side=side)
        for key, colour, label, side in (("captured", FAINT, "load as captured", "left"),
                                         ("kept", KEPT, "with what SINGA keeps", "right"))
    ]  # fmt: skip
    ratios: list[Mark] = []
    speeds: list[Mark] = []
    for shift, pool in zip((-0.16, 0.16), POOLS, strict=True):
        look = ALLOCATORS[pool]._replace(label=ALLOCATORS[pool].label.partition(",")[0])
        ratios += pairs(look, [one["paper"][pool] for one in found], [one["ratios"][pool] for one in found], shift)
        theirs, ours = [one["paper"][f"{pool}_speedup"] for one in found], [one["speedups"][pool] for one in found]
        speeds += pairs(look, theirs, ours, shift)
    return Chart(
        "Table I of the SmartPool paper, batch size 100, GTX 1080 Ti: the paper's numbers and ours",
        [
            Panel("Peak load, over the paper's", [ONE, *loads], Axis("ours / paper", "%", (0.62, 1.14)), names),
            Panel("Competitive ratio", [ONE, *ratios], Axis("footprint / peak load", limits=(0.985, None)), names),
            Panel("Speedup over cudaMalloc", speeds, Axis("iteration, cudaMalloc / the pool", "{:.2f}×"), names),
        ],
        size=(4.3, 0.42 * len(rows) + 0.9),
        keys=6,
    )


FIGURE = Figure("smartpool_table1", tasks, run, numbers, chart)
