"""Table 4 of the SuperNeurons paper: the deepest ResNet that trains in 12 GB, by framework."""

from __future__ import annotations

from functools import lru_cache

from omegaconf import DictConfig

from agents.heuristics.layers import feature_maps
from agents.heuristics.superneurons import JOINS
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import frameworks
from experiments.figures.capacity import Deeper, anonymous
from experiments.figures.figure import Figure
from experiments.figures.frameworks import METHODS
from experiments.plotting.charts import Chart
from simulator.machine import Machine
from simulator.program import Program

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
    from executor.capture.durations import with_roofline  # PyTorch

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


def numbers(rows: list[Row]) -> Row:
    """The paper's frameworks, and our methods; None: a method that was not asked for."""
    found = [
        {**row, "label": METHODS[row["method"]].label, "held": row["at_end"] / row["memory"],
         "sums_part": row["sums"] / row["memory"], "overhead": row.get("overhead"),
         "images": row["batch"] / row["iteration_ns"] * 1e9 if "overhead" in row else None}
        for row in rows
    ]  # fmt: skip
    return {
        "paper": [{"framework": name, "there": there} for name, there in PAPER.items()], "batch": rows[0]["batch"],
        "found": found, "whole": next(row for row in rows if row["captured"]),
        **{method: next((one for one in found if one["method"] == method), None) for method in METHODS},
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A bar per framework, hollow, and per method."""
    slower = [f" ({row['overhead']:.0%} slower)" if row.get("overhead") else "" for row in rows]
    texts = [f"{row['depth']:,}{more}" for row, more in zip(rows, slower, strict=True)]
    bars = [(row["method"], row["depth"]) for row in rows]
    return Chart(
        f"Deepest ResNet in 12 GB, batch size {rows[0]['batch']}: the paper (hollow), ours (filled)",
        [frameworks.panel("", PAPER, bars, texts, "layers with weights", 1.28)],
        size=(8.6, 0.7 + 0.36 * (len(PAPER) + len(rows))),
        besides=(0.0, 0.3),
    )


FIGURE = Figure("superneurons_table4", tasks, run, numbers, chart)
