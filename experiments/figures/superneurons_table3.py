"""Table 3 of the SuperNeurons paper: what the Tensor Cache saves in copies of AlexNet."""

from __future__ import annotations

from omegaconf import DictConfig

import agents
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import layerwise
from experiments.figures.figure import Figure, span
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from experiments.plotting.palette import MEASURED, PREDICTED
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program, Tensor

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
    return sum(2 * program.tensors[d.tensor].nbytes for d in plan.of_kind(Swap))


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """What the differences are, and what is only inferred."""
    shown = [row for row in rows if row["batch_size"] in PAPER]
    full = [row for row in rows if row["all"] > row["memory"]]
    at_1024 = next((row for row in full if row["batch_size"] == 1024), None)
    if any(row["batch_size"] < 1024 for row in full):
        at_1024 = None
    return {
        "sizes": [{**row, "paper": PAPER.get(row["batch_size"])} for row in rows],
        "less": span(1 - row["copied"] / GB / PAPER[row["batch_size"]][0] for row in shown),
        "kept": len(KEPT) * rows[0]["weights"], "limit": limit(rows[0]),
        "free": at_1024 and at_1024["memory"] - at_1024["peak"],
        "over": at_1024 and at_1024["all"] - at_1024["memory"],
    }  # fmt: skip


def limit(row: Row) -> int:
    """The largest batch whose peak fits; the peak is proportional to the batch beside what is kept."""
    kept = len(KEPT) * row["weights"]
    return int((row["memory"] - kept) * row["batch_size"] // (row["peak"] - kept))


def chart(rows: list[Row]) -> Chart:
    """Copies by batch size, ours as lines, the paper's hollow."""
    xs = [row["batch_size"] for row in rows]
    marks: list[Mark] = []
    shown = (("copied", PREDICTED, "without cache"), ("cached", MEASURED, "Tensor Cache"))
    for i, (key, ink, name) in enumerate(shown):
        ours = [None if row[key] is None else row[key] / GB for row in rows]
        theirs = [PAPER[x][i] if x in PAPER else None for x in xs]
        marks += [Line(xs, ours, ink, f"{name}, ours", width=2),
                  Line(xs, theirs, ink, f"{name}, paper", "o", "", size=8, hollow=True)]  # fmt: skip
    panel = Panel("", marks, Axis("batch size", limits=(0, None), ticks=xs), Axis("copied in one iteration (GB)"))
    return Chart("AlexNet on a 12 GB K40c: traffic over the host link", [panel], size=(9.5, 4.2))


FIGURE = Figure("superneurons_table3", tasks, run, numbers, chart)
