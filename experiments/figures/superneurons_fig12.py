"""Fig. 12 of the SuperNeurons paper: convolution workspaces in the memory that tensors leave, and training speed."""

from __future__ import annotations

from omegaconf import DictConfig

import agents
from agents.heuristics.workspace import algorithms, least_workspaces, plan_with_variants
from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.plotting.charts import Axis, Chart, Panel, groups
from experiments.plotting.palette import MEASURED, PREDICTED
from simulator import simulate
from simulator.machine import Machine

GB = 10**9
NETWORK = "alexnet"


def tasks(settings: DictConfig) -> list[Row]:
    """One per batch size."""
    shares = figures.numbers(settings, "pools", lambda share: share >= 1, "numbers of at least 1")
    return [{"batch_size": batch, "pools": shares} for batch in figures.integers(settings, "batches", 1)]


def run(task: Row, machine: Machine) -> Row:
    """Images per second and bytes of workspaces, with the least ones and with the fastest that fit, by pool.

    A pool is a multiple of the smallest one in which SuperNeurons has a plan.
    """
    program = figures.program(NETWORK, machine, batch_size=task["batch_size"], algorithms=True)
    planner, bare = agents.make("superneurons", early=True), program.with_variants(least_workspaces(program))
    least, found = figures.least_limit(planner, bare, machine, 2**20), []
    for share in task["pools"]:
        limit = round(share * least)
        one: Row = {"pool": limit}
        for name, fill in (("least", False), ("filled", True)):
            plan = plan_with_variants(planner, program, machine, limit, fill)
            iteration_ns = simulate(program, plan, machine, limit).iteration_ns
            one[name] = {
                "images_per_s": task["batch_size"] / iteration_ns * 1e9,
                "workspaces": sum(kernel.workspace for kernel in program.with_variants(plan.variants).kernels),
            }
        found.append(one)
    return {"found": found, "wanted": sum(min(algorithms(kernel))[1] for kernel in program.kernels)}


# ------------------------------------------------------------------------------------------ for people


def facts(rows: list[Row]) -> list[Row]:
    """A line of the table for each batch and pool."""
    return [
        {
            "batch_size": row["batch_size"], "pool": one["pool"], "slow": one["least"]["images_per_s"],
            "fast": one["filled"]["images_per_s"], "share": one["filled"]["workspaces"] / row["wanted"],
            "times": one["filled"]["images_per_s"] / one["least"]["images_per_s"],
        }
        for row in rows
        for one in row["found"]
    ]  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """Each batch and pool; the range of the gain."""
    found = facts(rows)
    return {"rows": found, "gains": span(one["times"] for one in found)}


def chart(rows: list[Row]) -> Chart:
    """Bars of images per second."""
    found = facts(rows)
    series = [
        ("least workspaces", PREDICTED, [one["slow"] for one in found], []),
        ("fastest that fit", MEASURED, [one["fast"] for one in found],
         [f"{one['share']:.0%} of all workspaces" for one in found]),
    ]  # fmt: skip
    names = [f"batch {one['batch_size']}, {one['pool'] / GB:.2f} GB" for one in found]
    panel = Panel("", groups(series, across=True), Axis("images per second", room=1.55), Axis(names=names))
    return Chart("AlexNet on a K40c: simulated speed with workspaces", [panel], size=(6.5, 0.55 * len(found) + 1.0))


FIGURE = Figure("superneurons_fig12", tasks, run, numbers, chart)
