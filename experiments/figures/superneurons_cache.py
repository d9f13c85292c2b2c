"""SuperNeurons, Fig. 11: speed with and without the Tensor Cache."""

from __future__ import annotations

from omegaconf import DictConfig

import agents
from agents.heuristics import tensor_cache
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.plotting.charts import Axis, Chart, Line, Panel, groups
from experiments.plotting.palette import INK
from simulator import simulate
from simulator.machine import Machine
from simulator.program import Program

LOSS = 0.3333  # largest loss without the cache in the paper
LINEAR = ("alexnet", "vgg16_imagenet")


class Fig11(Figure):
    """Fig. 11: images per second with the Tensor Cache and without it."""

    name = "superneurons_fig11"

    def tasks(self, settings: DictConfig) -> list[Row]:
        batches, short = cli.to_dict(settings.batches), cli.number(settings, "short")
        for name, batch in batches.items():
            figures.network(name, "batches")
            if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
                raise cli.UsageError(f"figure.batches.{name}: expected an integer of at least 1, got {batch!r}")
        return [{"network": name, "batch": batch, "short": short} for name, batch in batches.items()]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"])
        return {
            "peak": program.peak_bytes, "ideal_ns": program.ideal_ns,
            "without": always_offloaded(program, machine),
            "cached": cached(program, machine, machine.memory_bytes),
            "cached_short": cached(program, machine, int(task["short"] * program.peak_bytes)),
        }  # fmt: skip

    def numbers(self, rows: list[Row]) -> Row:
        found = [facts(row) for row in rows]
        return {
            "networks": found, "losses": span(one["loss"] for one in found),
            "linear": span(one["loss"] for one in found if one["network"] in LINEAR),
            "others": span(one["loss"] for one in found if one["network"] not in LINEAR),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found = [facts(row) for row in rows]
        series = [
            (label, colour, [one[key] for one in found], [f"{one[key]:.0%}" for one in found])
            for label, colour, key in (("with Tensor Cache", "#1f5fa8", "with_speed"), ("without", "#f16913", "speed"))
        ]
        names = Axis(names=[one["label"] for one in found])
        ends, label = [-0.5, len(found) - 0.5], f"paper: at least {1 - LOSS:.0%} without"
        paper = Line(ends, [1 - LOSS] * 2, INK, label, line="--", front=5)
        panel = Panel("", [*groups(series), paper], names, Axis("speed, of that without swaps", "%", (0, 1.15)))
        return Chart("Speed with and without the Tensor Cache, 12 GB", [panel], size=(1.4 * len(rows) + 2, 4.6))


def always_offloaded(program: Program, machine: Machine) -> Row:
    """Returns the iteration with every CONV output offloaded (section 3.3.1)."""
    limit = machine.memory_bytes
    plan = agents.make("superneurons", mode="swap", recompute="cost", cache="off").plan(program, machine, limit)
    timeline = simulate(program, plan, machine, limit)
    moved = sum(program.tensors[decision.tensor].nbytes for decision in plan.decisions)
    return {"iteration_ns": timeline.iteration_ns, "offloaded": moved}


def cached(program: Program, machine: Machine, limit: int) -> Row | None:
    """Returns the iteration with the Tensor Cache at run time; None if it does not fit."""
    try:
        found = tensor_cache.run(program, machine, limit)
    except agents.Infeasible:
        return None
    return {"iteration_ns": found.iteration_ns, "offloaded": found.offloaded_bytes, "misses": found.misses,
            "hits": found.hits}  # fmt: skip


def facts(row: Row) -> Row:
    """Returns the speeds of a network relative to the iteration without swaps."""
    short = row["cached_short"]
    return {
        **row, "label": figures.label(row["network"]),
        "images": [row["batch"] / row[key]["iteration_ns"] * 1e9 for key in ("cached", "without")],
        "with_speed": row["ideal_ns"] / row["cached"]["iteration_ns"],
        "speed": row["ideal_ns"] / row["without"]["iteration_ns"],
        "loss": 1 - row["cached"]["iteration_ns"] / row["without"]["iteration_ns"],
        "short_speed": "does not fit" if short is None else f"{row['ideal_ns'] / short['iteration_ns']:.0%}",
    }  # fmt: skip
