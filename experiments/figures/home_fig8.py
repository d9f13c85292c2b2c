"""Figure 8 of the HOME paper: worst, average and best particle over the iterations of HOME's search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from agents.heuristics.home import HOME, UPDATES
from experiments import figures
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.figure import Figure, span
from experiments.figures.home import NETWORKS
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule
from experiments.plotting.palette import FAINT, SWARM
from simulator.machine import Machine

PAPER = {"resnet18_cifar": 16, "squeezenet": 30, "inception_v3_cifar": 89}  # iterations until close to the end
OTHERS = 42  # "other models only need 42 iterations on average"
NEAR = 0.01  # of the last time: "close"
NAMES = dict(zip(UPDATES, ("Algorithm 3", "one evaluation"), strict=True))


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and seed; a network's one after the other."""
    share, options = home.share(settings), home.search(settings)
    seeds = figures.integers(settings, "seeds", 0)
    return [
        {"network": name, "share": share, "update": update, "seed": seed, **options}
        for name in home.networks(settings)
        for update in UPDATES
        for seed in seeds
    ]


def run(task: Row, machine: Machine) -> Row:
    """What the swarm was in every iteration of one search: worst, mean, best in ns (None: none fits), how many fit."""
    of = home.sizes(task["network"], machine)
    program = of.at(round(task["share"] * home.unplanned(of)))
    options = {key: task[key] for key in ("particles", "iterations", "seed", "update")}
    planner = HOME(**options, jobs=1)
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


def grouped(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by network and way of updating."""
    networks = figures.grouped(rows).items()
    return {(name, update): runs for name, of in networks for update, runs in figures.grouped(of, "update").items()}


def facts(network: str, update: str, runs: list[Row]) -> Row:
    """A network by one way of updating, means over the seeds."""
    worst, mean, best = (curve(runs, which) for which in ("worst", "mean", "best"))
    return {
        "label": NETWORKS[network].label, "update": NAMES[update], "batch": runs[0]["batch"],
        "paper": PAPER.get(network, f"(mean {OTHERS})"),
        "needed": np.mean([needed(run) for run in runs]), "rests": np.mean([len(run["best"]) for run in runs]),
        "calls": np.mean([run["calls"] / len(run["best"]) for run in runs]),
        "first": [worst[0], mean[0], best[0]], "last": [mean[-1], best[-1]],
        "ends": span(run["best"][-1] / run["ideal_ns"] - 1 for run in runs),
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """Of all searches, and of each network."""
    networks = [facts(*key, runs) for key, runs in grouped(rows).items()]
    printed, whole = ([row for row in rows if row["update"] == update] for update in UPDATES)
    apart = max(networks, key=lambda one: max(one["ends"].values) - min(one["ends"].values))
    return {
        "networks": networks, "near": NEAR, "needed": span(map(needed, printed)),
        "needed_whole": span(map(needed, whole)),
        "particles": rows[0]["particles"], "each": span(r["calls"] / len(r["best"]) for r in printed),
        "rest": span(len(r["best"]) for r in printed),
        "iterations": rows[0]["iterations"], "apart": apart if len(rows) > len(networks) else None,
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A panel per network: worst, mean and best over the iterations; every seed thin, their mean thick."""
    panels = []
    names = {"worst": "worst particle", "mean": "mean of the particles", "best": "best particle"}
    for network, runs in figures.grouped(rows).items():
        marks: list[Mark] = [Rule(1, across=True)]
        if network in PAPER:
            marks.append(Rule(PAPER[network], colour=FAINT, label="close to the end, paper"))
        updates = figures.grouped(runs, "update")
        for which, ink in SWARM.items():
            seeds = [np.array(run[which], float) / run["ideal_ns"] for run in updates[UPDATES[0]]]
            marks += [Line(range(1, len(y) + 1), y, ink, width=0.8, alpha=0.5) for y in seeds]
            mean = curve(updates[UPDATES[0]], which)
            marks.append(Line(range(1, len(mean) + 1), mean, ink, names[which], width=2))
        whole = curve(updates[UPDATES[1]], "best")
        marks.append(
            Line(range(1, len(whole) + 1), whole, SWARM["best"], "best, one evaluation per particle", line="--")
        )
        title = f"{NETWORKS[network].label}, batch {runs[0]['batch']:,}"
        panels.append(Panel(title, marks, Axis("iteration of the search", "{:g}", scale="log", ticks=(1, 10, 100, 500)),
                            Axis("iteration time / kernels alone", "{:g}×")))  # fmt: skip
    title = "HOME's search: particles that fit 11 GB, by iteration time; thin lines are single seeds"
    return Chart(title, panels, 3, (4.4, 3.2))


FIGURE = Figure("home_fig8", tasks, run, numbers, chart)
