"""Table 2 of "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (2018), section 4.1.2:
images per second of six networks on a K40c, with cudaMalloc and cudaFree for every tensor, and with a memory pool (a
heap that is allocated once).

Choices:

1. The paper's text does not name the batch sizes: 128 for AlexNet and 16 for the others are assumed.
2. An iteration is the kernels' time plus mallocs and frees on the host; with the pool it is the paper's, else ours.
3. A malloc and a free per tensor that dies, at the costs of k40c.yaml, and at one fitted to the paper's differences.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting.palette import ALLOCATORS, FAINT, INK
from experiments.plotting.plots import figure
from simulator.machine import Machine
from simulator.pool import program_lifetimes
from simulator.pool.times import allocation_ns

TITLE = "SuperNeurons, Table 2: a memory pool against cudaMalloc"
POOL = "superneurons"  # of simulator.pool: their heap
PAPER = {  # images/s with cudaMalloc ("CUDA") and with the pool ("Ours")
    "alexnet": (359.4, 401.6), "vgg16_imagenet": (12.1, 14.4), "inception_v4": (6.77, 10.0),
    "resnet50_imagenet": (21.5, 32.9), "resnet101_imagenet": (11.3, 18.95), "resnet152_imagenet": (7.46, 13.2),
}  # fmt: skip
BATCH = {name: 128 if name == "alexnet" else 16 for name in PAPER}


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    for name in (found := figures.networks(settings)):
        if name not in PAPER:
            raise cli.UsageError(f"figure.networks: {name!r} is not in the table ({', '.join(PAPER)})")
    return [{"network": name, "batch": BATCH[name]} for name in found]


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


def difference_ms(row: Row) -> float:
    """What cudaMalloc adds to the paper's iteration, ms."""
    slow, fast = PAPER[row["network"]]
    return 1e3 * row["batch"] * (1 / slow - 1 / fast)


def speedup(row: Row, added_ms: float) -> float:
    """Of the pool over cudaMalloc, where that adds so many ms to the paper's iteration with the pool."""
    return 1 + added_ms / (1e3 * row["batch"] / PAPER[row["network"]][1])


def added_ms(row: Row) -> float:
    """What cudaMalloc adds at the machine's costs."""
    return float(row["allocation_ns"]["cudamalloc"] - row["allocation_ns"][POOL]) / 1e6


def per_block_ms(row: Row) -> float:
    """The paper's difference for each of our blocks."""
    return difference_ms(row) / float(row["blocks"])


def fitted_ms(rows: list[Row]) -> float:
    """One cost per block for all networks: the median of theirs."""
    costs = sorted(map(per_block_ms, rows))
    middle = len(costs) // 2
    return costs[middle] if len(costs) % 2 else (costs[middle - 1] + costs[middle]) / 2


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The paper's images/s, and ours with cudaMalloc; speedups."""
    cost = fitted_ms(rows)
    heads = ["images/s on a K40c", "batch", "pool: paper", "cudaMalloc: paper", "ours", "ours, one cost per block",
             "speedup: paper", "ours", "ours, one cost per block", "blocks", "allocated, GB"]  # fmt: skip
    cells = []
    for row in rows:
        slow, fast = PAPER[row["network"]]
        ours = [speedup(row, added_ms(row)), speedup(row, cost * row["blocks"])]
        cells.append([
            figures.label(row["network"]), str(row["batch"]), f"{fast:g}", f"{slow:g}",
            *(f"{fast / s:.1f}" for s in ours), f"{fast / slow:.2f}", *(f"{s:.2f}" for s in ours),
            f"{row['blocks']:,}", f"{row['allocated'] / 1e9:.1f}",
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """What the difference is made of, then a sentence per network."""
    blocks = sorted(map(per_block_ms, rows))
    gigabytes = sorted(difference_ms(row) / (row["allocated"] / 1e9) for row in rows)
    roofline = sorted(row["batch"] / PAPER[row["network"]][1] / row["roofline_ns"] * 1e9 for row in rows)
    return [
        "The paper's text gives no batch sizes; 128 for AlexNet and 16 for the others are assumed.",
        "The speed with the pool is the paper's: kernels are scaled to it. The roofline alone is "
        f"{roofline[0]:.1f} to {roofline[-1]:.1f} times as fast.",
        "The costs of cudaMalloc and cudaFree in configs/machine/k40c.yaml are those of a GTX 1080 Ti, mostly by "
        "bytes: they are assumed, so that only how the speedups spread says something.",
        f"In the paper they go by calls rather than bytes: its differences are {blocks[0]:.2f} to {blocks[-1]:.2f} ms "
        f"for each of our blocks (median {fitted_ms(rows):.2f}), but {gigabytes[0]:.0f} to {gigabytes[-1]:.0f} ms for "
        'each GB of ours. The column "one cost per block" has the median for all networks.',
        *(why(row, fitted_ms(rows)) for row in rows),
    ]


def why(row: Row, cost: float) -> str:
    """A network's sentence."""
    name = figures.label(row["network"])
    return (
        f"{name}: cudaMalloc adds {difference_ms(row):,.0f} ms in the paper; here {added_ms(row):,.0f} ms, for "
        f"{row['blocks']:,} blocks and {row['allocated'] / 1e9:.1f} GB, or {cost * row['blocks']:,.0f} ms with one "
        f"cost per block ({per_block_ms(row):.2f} ms would be the paper's)."
    )


def draw(rows: list[Row], path: Path) -> None:
    """Speedups, three bars per network."""
    cost = fitted_ms(rows)
    colour = ALLOCATORS[POOL].colour
    bars = (
        ("the paper", "none", [PAPER[r["network"]][1] / PAPER[r["network"]][0] for r in rows]),
        ("ours: costs by bytes, as on a GTX 1080 Ti", FAINT, [speedup(r, added_ms(r)) for r in rows]),
        ("ours: one cost per block, fitted", colour, [speedup(r, cost * r["blocks"]) for r in rows]),
    )
    with figure(path, 2.6 + 1.45 * len(rows), 4.4) as axes:
        for i, (name, fill, values) in enumerate(bars):
            x = [n + (i - 1) * 0.27 for n in range(len(rows))]
            axes.bar(x, values, 0.25, label=name, color=fill, edgecolor=INK if fill == "none" else fill)
            for at, value in zip(x, values, strict=True):
                axes.annotate(f"{value:.2f}×", (at, value), (0, 2), textcoords="offset points", ha="center",
                              fontsize=8.5, color=INK)  # fmt: skip
        axes.axhline(1, color=INK, linewidth=1)
        names = (figures.label(r["network"]) for r in rows)
        axes.set_xticks(range(len(rows)), [f"{n}\nbatch {r['batch']}" for n, r in zip(names, rows, strict=True)])
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, 1.2 * max(max(values) for _, _, values in bars))
        axes.set_ylabel("iteration with cudaMalloc / with the pool")
        axes.set_title("Speedup of SuperNeurons' memory pool over cudaMalloc, Tesla K40c")
        axes.legend(loc="upper center", ncols=3, fontsize=9.5)
