"""What each change to the paper's agent is worth: one variant of the configuration beside another."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.figures.learning import spread
from experiments.plotting.charts import Axis, Chart, Panel, ranges
from experiments.plotting.palette import FAINT, look
from simulator import Machine, simulate

SHOWN = {"best": "best found", "without_network": "network never asked", "greedy": "greedy policy"}


def tasks(settings: DictConfig) -> list[Row]:
    """One per variant and seed."""
    share, episodes = figures.share_of_peak(cli.number(settings, "limit")), cli.integer(settings, "episodes", 1)
    network = figures.network_or_file(str(settings.network), "network")
    variants = cli.plain(settings)["variants"]
    only = figures.chosen(settings, "only", variants, "variant ") if settings.only is not None else list(variants)
    for name, changes in variants.items():
        config(changes, episodes, f"variants.{name}")  # a wrong key is an error before anything is computed
    return [
        {"variant": name, "changes": changes, "seed": seed, "network": network, "limit": share, "episodes": episodes}
        for name, changes in variants.items()
        if name in only
        for seed in figures.integers(settings, "seeds", 0)
    ]


def config(changes: Row, episodes: int, where: str) -> Any:
    """The configuration of a variant; raises UsageError where a key or value is wrong."""
    from agents.learned.dqn_config import DQNConfig

    return cli.dataclass_of(DQNConfig, OmegaConf.create({**changes, "episodes": episodes}), where)


def run(task: Row, machine: Machine) -> Row:
    """Trains one agent; overheads are None where there is no feasible plan."""
    from agents.learned import dqn
    from agents.learned.planner import without_network

    program = figures.program(task["network"], machine)
    limit, seed = int(task["limit"] * program.peak_bytes), task["seed"]
    settings = config(task["changes"], task["episodes"], task["variant"])
    result = dqn.train(program, machine, limit, settings, seed)
    planner = without_network(settings, seed, max(result.simulator_calls, 2))
    alone = figures.attempt(planner, program, machine, limit)

    def overhead(plan: Any) -> float | None:
        return None if plan is None else simulate(program, plan, machine, limit).overhead

    return {"best": overhead(result.best), "greedy": overhead(result.greedy),
            "simulator_calls": result.simulator_calls, "without_network": overhead(alone)}  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """Every variant, over the seeds."""
    lines = [
        {"variant": name, "cells": [spread([run[key] for run in runs]) for key in SHOWN],
         "calls": sum(run["simulator_calls"] for run in runs) // len(runs)}
        for name, runs in figures.grouped(rows, "variant").items()
    ]  # fmt: skip
    return {"lines": lines, "heads": SHOWN.values()}


def chart(rows: list[Row]) -> Chart:
    """A row per variant: means and ranges over the seeds."""
    variants, marks = figures.grouped(rows, "variant"), []
    dqn, greedy = look("dqn"), look("dqn_greedy")
    looks = {"best": (dqn.colour, "o"), "without_network": (FAINT, "s"), "greedy": (greedy.colour, "D")}
    for shift, (key, label) in zip((-0.2, 0.0, 0.2), SHOWN.items(), strict=True):
        ink, marker = looks[key]
        marks += ranges(label, ink, marker, [[run[key] for run in runs] for runs in variants.values()], shift)
    panel = Panel("", marks, Axis("overhead", "%", (-0.001, None), "symlog"), Axis(names=list(variants)))
    return Chart("What each change to the paper's agent is worth", [panel], size=(9.0, 0.5 * len(variants)))


FIGURE = Figure("ablation", tasks, run, numbers, chart, on_demand=True)
