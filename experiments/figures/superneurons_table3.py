"""Table 3 of "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (2018), section 4.1.2: GB
that cross the host link in one iteration of AlexNet by batch size, without the Tensor Cache, where every output of a
convolution goes to the host and comes back, and with it, where tensors leave in LRU order when memory is short; K40c.

The network is counted as the paper counts it (experiments/figures/layerwise.py); weights, their gradients and momentum
lie in memory besides. GB is 10^9 bytes: the paper's numbers without cache then lie on a line that begins with the size
of the weights. Batch sizes above 1024 are ours; 1792 is the largest of AlexNet's in the paper's Table 5.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, product
from pathlib import Path

from omegaconf import DictConfig

import agents
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import layerwise
from experiments.plotting.palette import INK, MEASURED, PREDICTED
from experiments.plotting.plots import figure
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program, Tensor

TITLE = "SuperNeurons, Table 3: what the Tensor Cache saves in copies"
GB = 10**9
PAPER = {  # GB without and with the cache
    256: (2.56, 0.0), 384: (3.72, 0.0), 512: (4.88, 0.0), 640: (6.03, 0.0), 896: (8.35, 0.0), 1024: (9.50, 0.88),
}  # fmt: skip
KEPT = ("weights", "gradients of weights", "momentum")


def tasks(settings: DictConfig) -> list[Row]:
    """One per batch size."""
    batches = cli.values(settings, "batches")
    if any(isinstance(batch, bool) or not isinstance(batch, int) or batch < 1 for batch in batches):
        raise cli.UsageError(f"figure.batches: expected positive integers, got {batches}")
    return [{"batch_size": batch} for batch in batches]


def run(task: Row, machine: Machine) -> Row:
    """Bytes copied without and with the cache, and how full the GPU is."""
    weights = parameters()
    program = with_weights(layerwise.program("alexnet", layerwise.alexnet(), task["batch_size"]), weights)
    planner = agents.make("superneurons", mode="swap")
    try:
        cached: int | None = copied(program, planner.plan(program, machine, machine.memory_bytes))
    except agents.Infeasible:
        cached = None
    return {
        "weights": weights,
        "memory": machine.memory_bytes,
        "copied": copied(program, layerwise.plan(program)),
        "cached": cached,
        "peak": program.peak_bytes,
        "all": sum(t.nbytes for t in program.tensors),
    }


def parameters() -> int:
    """Bytes of AlexNet's weights and biases."""
    from experiments import workloads  # PyTorch is only needed to count them

    model = workloads.build(figures.workload("alexnet"))[0]
    return sum(p.numel() * p.element_size() for p in model.parameters())


def with_weights(program: Program, nbytes: int) -> Program:
    """The program with ``KEPT`` in memory all the time, each of ``nbytes``."""
    kept = tuple(Tensor(name, nbytes, "parameter", True) for name in KEPT)
    return Program(program.name, (*program.tensors, *kept), program.kernels)


def copied(program: Program, plan: Plan) -> int:
    """Bytes that a plan copies in one iteration, out and back in."""
    return sum(2 * program.tensors[d.tensor].nbytes for d in plan.decisions if isinstance(d, Swap))


def choices(rows: list[Row]) -> tuple[list[tuple[str, ...]], int]:
    """What a paper that does not say it may have copied besides: the weights once, and of each other size of output up
    to POOL5 so many that no output is copied more than twice.

    Returns:
        The names of the outputs in every choice that gives all of the paper's numbers, and how many choices there are.
    """
    layers = layerwise.alexnet()
    last = [layer.name for layer in layers].index("POOL5")
    names: dict[int, list[str]] = {}
    for layer in layers[: last + 1]:
        if layer.kind != "conv":
            names.setdefault(layer.floats, []).append(layer.name)
    found, counted = [], 0
    for counts in product(*(range(2 * len(same) + 1) for same in names.values())):
        counted += 1
        floats = sum(n * count for n, count in zip(names, counts, strict=True))
        copies = [row["copied"] + row["weights"] + row["batch_size"] * layerwise.FLOAT * floats for row in rows]
        if all(agrees(n, row) for n, row in zip(copies, rows, strict=True)):
            found.append(tuple(chain(*((2 * same)[:n] for same, n in zip(names.values(), counts, strict=True)))))
    return found, counted


def agrees(nbytes: int, row: Row) -> bool:
    """Are the bytes the paper's number without cache, as printed?"""
    return f"{nbytes / GB:.2f}" == f"{PAPER[row['batch_size']][0]:.2f}"


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """GB by batch size."""
    heads = ["batch size", "without cache, GB: paper", "ours", "with cache, GB: paper", "ours", "peak, MB",
             "all tensors at once, MB", "GPU, MB"]  # fmt: skip
    cells = []
    for row in rows:
        without, cached = PAPER.get(row["batch_size"], (None, None))
        cells.append([
            str(row["batch_size"]), _gb(without), _gb(row["copied"] / GB), _gb(cached),
            "does not fit" if row["cached"] is None else _gb(row["cached"] / GB),
            *(f"{n / layerwise.MB:,.0f}" for n in (row["peak"], row["all"], row["memory"])),
        ])  # fmt: skip
    return heads, cells


def _gb(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def notes(rows: list[Row]) -> list[str]:
    """What the differences are, and what is only inferred."""
    shown = [row for row in rows if row["batch_size"] in PAPER]
    out = []
    if shown:
        less = [1 - row["copied"] / GB / PAPER[row["batch_size"]][0] for row in shown]
        out.append(
            f"Without cache, the outputs of convolutions out and back in are {min(less):.0%} to {max(less):.0%} less "
            "than the paper's numbers. What else is copied its text does not say."
        )
        found, counted = choices(shown)
        if found:
            times = ", ".join(f"{name} {n} times" if n > 1 else name for name, n in Counter(found[-1]).items())
            out.append(
                f"Nor do its numbers: {len(found)} of {counted:,} choices of other outputs up to POOL5, with the "
                f"weights ({shown[0]['weights'] / GB:.2f} GB) once, give them to the last digit; one is {times}."
            )
    full = [row["batch_size"] for row in rows if row["all"] > row["memory"]]
    kept = len(KEPT) * rows[0]["weights"] / layerwise.MB
    out.append(
        "With cache, ours copies nothing as long as the peak of liveness analysis fits beside weights, their gradients "
        f"and momentum ({kept:,.0f} MB), which is so up to batch {limit(rows[0]):,}."
    )
    if 1024 in full and not any(batch < 1024 for batch in full):
        row = next(row for row in rows if row["batch_size"] == 1024)
        out.append(
            "The paper's cache copies 0.88 GB at 1024. Our accounting leaves "
            f"{(row['memory'] - row['peak']) / layerwise.MB:,.0f} MB free there; all tensors at once, without liveness "
            f"analysis, would be {(row['all'] - row['memory']) / layerwise.MB:,.0f} MB too many at 1024 and fit at all "
            "smaller sizes of the table. We infer that something besides the counted tensors, such as convolution "
            "workspaces, took the rest; which tensors made up the 0.88 GB the text does not say."
        )
    return out


def limit(row: Row) -> int:
    """The largest batch whose peak fits; the peak is proportional to the batch beside what is kept."""
    kept = len(KEPT) * row["weights"]
    return int((row["memory"] - kept) * row["batch_size"] // (row["peak"] - kept))


def draw(rows: list[Row], path: Path) -> None:
    """Two lines and their paper's, without cache above, with cache below."""
    xs = [row["batch_size"] for row in rows]
    shown = [x for x in xs if x in PAPER]
    with figure(path, 10.0, 5.0) as axes:
        copies = [row["copied"] / GB for row in rows]
        axes.plot(xs, copies, color=PREDICTED, linewidth=2)
        axes.annotate("without cache, ours", (xs[-1], copies[-1]), (8, 0), "data", "offset points", va="center",
                      color=INK)  # fmt: skip
        axes.plot(shown, [PAPER[x][0] for x in shown], "o--", color=PREDICTED, markersize=8, markerfacecolor="white",
                  markeredgewidth=2, label="without cache, paper")  # fmt: skip
        cached = [row for row in rows if row["cached"] is not None]
        axes.plot([row["batch_size"] for row in cached], [row["cached"] / GB for row in cached], "-", linewidth=2,
                  color=MEASURED)  # fmt: skip
        if cached:
            last = cached[-1]
            axes.annotate("Tensor Cache, ours", (last["batch_size"], last["cached"] / GB), (8, 0), "data",
                          "offset points", va="center", color=MEASURED)  # fmt: skip
        axes.plot(shown, [PAPER[x][1] for x in shown], "o--", color=MEASURED, markersize=8, markerfacecolor="white",
                  markeredgewidth=2, label="Tensor Cache, paper")  # fmt: skip
        axes.set(xlabel="batch size", ylabel="copied in one iteration (GB)", xlim=(0, 1.25 * xs[-1]), ylim=(-0.3, None),
                 title="AlexNet on a 12 GB K40c: traffic over the host link")  # fmt: skip
        axes.set_xticks(xs)
        axes.legend(loc="upper left")
