"""Table 2 of the SuperNeurons paper: images per second with a memory pool and with cudaMalloc."""

from __future__ import annotations

from statistics import median

from omegaconf import DictConfig

from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.plotting.charts import Axis, Chart, Panel, Rule, groups
from experiments.plotting.palette import ALLOCATORS, FAINT, INK
from simulator.machine import Machine
from simulator.pool import program_lifetimes
from simulator.pool.times import allocation_ns

POOL = "superneurons"  # of simulator.pool: their heap
PAPER = {  # images/s with cudaMalloc ("CUDA") and with the pool ("Ours")
    "alexnet": (359.4, 401.6), "vgg16_imagenet": (12.1, 14.4), "inception_v4": (6.77, 10.0),
    "resnet50_imagenet": (21.5, 32.9), "resnet101_imagenet": (11.3, 18.95), "resnet152_imagenet": (7.46, 13.2),
}  # fmt: skip
BATCH = {name: 128 if name == "alexnet" else 16 for name in PAPER}


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    return [{"network": name, "batch": BATCH[name]} for name in figures.networks(settings, PAPER)]


def run(task: Row, machine: Machine) -> Row:
    """Blocks and bytes of one iteration, and ns of its mallocs and frees."""
    program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)
    lives = program_lifetimes(program).intervals
    return {
        "blocks": sum(not t.persistent for t in program.tensors),
        "allocated": sum(t.nbytes for t in program.tensors if not t.persistent),
        "roofline_ns": program.ideal_ns,
        "allocation_ns": {name: allocation_ns(name, lives, machine) for name in ("cudamalloc", POOL)},
    }


# ------------------------------------------------------------------------------------------ for people


def facts(rows: list[Row]) -> list[Row]:
    """Every network: what cudaMalloc adds to an iteration, in the paper and here, and what the pool gains by that.

    ``each``: with one cost per block for all networks, the median of what would give the paper's differences.
    """
    out = []
    for row in rows:
        slow, fast = PAPER[row["network"]]
        calls, paper_ms = row["allocation_ns"], 1e3 * row["batch"] * (1 / slow - 1 / fast)
        out.append({
            **row, "label": figures.label(row["network"]), "slow": slow, "fast": fast,
            "unit_ms": 1e3 * row["batch"] / fast,
            "added": {"paper": paper_ms, "ours": (calls["cudamalloc"] - calls[POOL]) / 1e6},
            "block_ms": paper_ms / row["blocks"], "gb_ms": paper_ms / (row["allocated"] / 1e9),
        })  # fmt: skip
    cost = median(one["block_ms"] for one in out)
    for one in out:
        one["added"]["each"] = cost * one["blocks"]
        one["speedup"] = {key: 1 + ms / one["unit_ms"] for key, ms in one["added"].items()}
        one["images"] = {key: one["fast"] / speedup for key, speedup in one["speedup"].items()}
    return out


def numbers(rows: list[Row]) -> Row:
    """What the difference is made of."""
    networks = facts(rows)
    return {
        "networks": networks, "block": span(one["block_ms"] for one in networks),
        "middle": median(one["block_ms"] for one in networks), "gb": span(one["gb_ms"] for one in networks),
        "roofline": span(one["unit_ms"] * 1e6 / one["roofline_ns"] for one in networks),
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Speedups, three bars per network."""
    found = facts(rows)
    labels = {"paper": ("the paper", INK), "each": ("ours: one cost per block, fitted", ALLOCATORS[POOL].colour),
              "ours": ("ours: costs by bytes, as on a GTX 1080 Ti", FAINT)}  # fmt: skip
    series = [
        (*how, [one["speedup"][key] for one in found], [f"{one['speedup'][key]:.2f}×" for one in found])
        for key, how in labels.items()
    ]
    panel = Panel(
        "",
        [Rule(1, across=True, line="-"), *groups(series, hollow=("the paper",))],
        Axis(names=[f"{one['label']}\nbatch {one['batch']}" for one in found]),
        Axis("iteration with cudaMalloc / with the pool", "{:.1f}", (0, None), room=1.05),
    )
    title = "Speedup of SuperNeurons' memory pool over cudaMalloc, Tesla K40c"
    return Chart(title, [panel], size=(2.6 + 1.45 * len(rows), 3.8))


FIGURE = Figure("superneurons_table2", tasks, run, numbers, chart)
