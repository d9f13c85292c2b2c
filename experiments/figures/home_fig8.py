"""Figure 8 of the HOME paper: worst, average and best particle over the iterations of HOME's search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from agents.heuristics.home import HOME
from experiments import figures
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.figure import Figure, span
from experiments.figures.home import NETWORKS
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule
from experiments.plotting.palette import SWARM
from simulator.machine import Machine

PAPER = {"resnet18_cifar": 16, "squeezenet": 30, "inception_v3_cifar": 89}  # iterations until close to the end
OTHERS = 42  # "other models only need 42 iterations on average"
NEAR = 0.01  # of the last time: "close"


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and seed; a network's one after the other."""
    share, options = home.share(settings), home.search(settings)
    seeds = figures.integers(settings, "seeds", 0)
    return [
        {"network": name, "share": share, "seed": seed, **options} for name in home.networks(settings) for seed in seeds
    ]


def run(task: Row, machine: Machine) -> Row:
    """What the swarm was in every iteration of one search: worst, mean, best in ns (None: none fits), how many fit."""
    of = home.sizes(task["network"], machine)
    program = of.at(round(task["share"] * home.unplanned(of)))
    planner = HOME(particles=task["particles"], iterations=task["iterations"], jobs=1, seed=task["seed"])
    planner.plan(program, machine, machine.memory_bytes)
    history = planner.history
    return {
        "batch": round(task["share"] * home.unplanned(of)),
        "ideal_ns": program.ideal_ns,
        "worst": [i.worst_ns if i.feasible else None for i in history],
        "mean": [round(i.mean_ns) if i.feasible else None for i in history],
        "best": [i.best_ns if i.feasible else None for i in history],
        "fit": [i.feasible for i in history],
        "calls": planner.simulator_calls,
    }


# ------------------------------------------------------------------------------------------ for people


def curve(runs: list[Row], which: str) -> NDArray[np.float64]:
    """float64[iterations]: the mean over the seeds, over the time of the kernels; a search that has ended stays as it
    was. Iterations in which no particle fits are nan."""
    most = max(len(run[which]) for run in runs)
    padded = [np.array(run[which] + run[which][-1:] * (most - len(run[which])), float) for run in runs]
    return np.asarray(np.mean([times / run["ideal_ns"] for times, run in zip(padded, runs, strict=True)], axis=0))


def needed(run: Row) -> int:
    """Iterations until the best particle is within ``NEAR`` of the last one."""
    best = run["best"]
    return next(i for i, ns in enumerate(best, 1) if ns is not None and ns <= (1 + NEAR) * best[-1])


def facts(network: str, runs: list[Row]) -> Row:
    """A network, means over the seeds."""
    worst, mean, best = (curve(runs, which) for which in ("worst", "mean", "best"))
    return {
        "label": NETWORKS[network].label, "batch": runs[0]["batch"], "paper": PAPER.get(network, f"(mean {OTHERS})"),
        "needed": np.mean([needed(run) for run in runs]), "rests": np.mean([len(run["best"]) for run in runs]),
        "calls": np.mean([run["calls"] / len(run["best"]) for run in runs]),
        "first": [worst[0], mean[0], best[0]], "last": [mean[-1], best[-1]],
        "ends": span(run["best"][-1] / run["ideal_ns"] - 1 for run in runs),
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """Of all searches, and of each network."""
    networks = [facts(name, runs) for name, runs in figures.grouped(rows).items()]
    apart = max(networks, key=lambda one: max(one["ends"].values) - min(one["ends"].values))
    return {
        "networks": networks, "near": NEAR, "needed": span(map(needed, rows)), "particles": rows[0]["particles"],
        "each": span(r["calls"] / len(r["best"]) for r in rows), "rest": span(len(r["best"]) for r in rows),
        "iterations": rows[0]["iterations"], "apart": apart if len(rows) > len(networks) else None,
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A panel per network: worst, mean and best over the iterations; every seed thin, their mean thick."""
    panels = []
    names = {"worst": "worst particle", "mean": "mean of the particles", "best": "best particle"}
    for network, runs in figures.grouped(rows).items():
        marks: list[Mark] = [Rule(1, across=True)]
        for which, ink in SWARM.items():
            seeds = [np.array(run[which], float) / run["ideal_ns"] for run in runs]
            marks += [Line(range(1, len(y) + 1), y, ink, width=0.8, alpha=0.5) for y in seeds]
            mean = curve(runs, which)
            marks.append(Line(range(1, len(mean) + 1), mean, ink, names[which], width=2))
        title = f"{NETWORKS[network].label}, batch {runs[0]['batch']:,}"
        panels.append(Panel(title, marks, Axis("iteration of the search", "{:g}"),
                            Axis("iteration time / kernels alone", "{:g}×")))  # fmt: skip
    title = "HOME's search: particles that fit 11 GB, by iteration time; thin lines are single seeds"
    return Chart(title, panels, 3, (4.4, 3.2))


FIGURE = Figure("home_fig8", tasks, run, numbers, chart)
