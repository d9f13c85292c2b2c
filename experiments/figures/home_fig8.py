"""Figure 8 of "HOME: A Holistic GPU Memory Management Framework for Deep Learning" (2022), section 4.5: the iteration
time of the worst, the average and the best of 500 particles, over the iterations of HOME's search; six networks.

The paper's text gives few of the figure's numbers (``PAPER``), and no batch sizes: ours are all the same multiple of
the largest batch that fits without a plan. Networks, limit and durations are those of
experiments/figures/home_table2.py. Times are over that of the kernels alone, and of the particles that fit the memory.
The lines are means over the seeds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from omegaconf import DictConfig

from agents.heuristics.home import HOME
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.home import NETWORKS
from experiments.plotting.palette import INK, SWARM
from experiments.plotting.plots import panel_grid
from simulator.machine import Machine

TITLE = "HOME, Fig. 8: convergence of the particle swarm"
PAPER = {"resnet18_cifar": 16, "squeezenet": 30, "inception_v3_cifar": 89}  # iterations until close to the end
OTHERS = 42  # "other models only need 42 iterations on average"
NEAR = 0.01  # of the last time: "close"


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and seed; a network's one after the other."""
    share, options = cli.number(settings, "share"), home.search(settings)
    if share <= 1:
        raise cli.UsageError(f"figure.share: expected a number above 1, got {share}")
    seeds = cli.values(settings, "seeds")
    for value in seeds:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise cli.UsageError(f"figure.seeds: expected integers of at least 0, got {value!r}")
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


def by_network(rows: list[Row]) -> dict[str, list[Row]]:
    """The seeds of each network."""
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(row["network"], []).append(row)
    return out


def curve(runs: list[Row], which: str) -> NDArray[np.float64]:
    """float64[iterations]: the mean over the seeds, over the time of the kernels; a search that has ended stays as it
    was. Iterations in which no particle fits are nan."""
    most = max(len(run[which]) for run in runs)
    padded = [np.array(run[which] + run[which][-1:] * (most - len(run[which])), float) for run in runs]
    out: NDArray[np.float64] = np.mean(
        [times / run["ideal_ns"] for times, run in zip(padded, runs, strict=True)], axis=0
    )
    return out


def needed(run: Row) -> int:
    """Iterations until the best particle is within ``NEAR`` of the last one."""
    best = run["best"]
    return next(i for i, ns in enumerate(best, 1) if ns is not None and ns <= (1 + NEAR) * best[-1])


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Iterations and times, means over the seeds."""
    heads = [
        "means over the seeds", "batch", "iterations until close, paper / ours", "until the swarm rests",
        "evaluations in an iteration", "first: worst", "mean", "best", "last: mean", "best",
    ]  # fmt: skip
    cells = []
    for network, runs in by_network(rows).items():
        curves = {which: curve(runs, which) for which in ("worst", "mean", "best")}
        theirs = PAPER.get(network)
        cells.append([
            NETWORKS[network].label,
            f"{runs[0]['batch']:,}",
            f"{theirs if theirs else f'(mean {OTHERS})'} / {np.mean([needed(r) for r in runs]):.1f}",
            f"{np.mean([len(r['best']) for r in runs]):.1f}",
            f"{np.mean([r['calls'] / len(r['best']) for r in runs]):,.0f}",
            *(f"{curves[w][0]:.3f}×" for w in ("worst", "mean", "best")),
            *(f"{curves[w][-1]:.3f}×" for w in ("mean", "best")),
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """General, then a sentence per network."""
    networks = by_network(rows)
    each = [r["calls"] / len(r["best"]) for r in rows]
    rest, particles = [len(r["best"]) for r in rows], rows[0]["particles"]
    out = [
        f"Ours is close to its end (within {NEAR:.0%}) after {min(map(needed, rows))} to {max(map(needed, rows))} "
        "iterations, the paper's after dozens, because ours do more: Algorithm 3 as printed evaluates up to two "
        f"placements of every feature map of every particle, {min(each):,.0f} to {max(each):,.0f} evaluations an "
        f"iteration with {particles} particles. The paper's iteration of ResNet takes 20 ms, which at 0.6 ms an "
        "evaluation in 16 threads is 533: about one for each of its 500 particles (inferred).",
        f"The swarm comes to rest after {min(rest)} to {max(rest)} of {rows[0]['iterations']} iterations: then no "
        f"particle would change any more. {_spread(networks)}",
    ]
    large = "inception_v3_cifar"
    if large in networks and len(networks) > 1:
        ours, others = (
            np.mean([len(r["best"]) for name, runs in networks.items() for r in runs if (name == large) == is_large])
            for is_large in (True, False)
        )
        out.append(
            f"InceptionV3, the largest network, takes {ours:.1f} iterations to come to rest, the others {others:.1f} "
            f"(the paper's converges in {PAPER[large]} against {OTHERS})."
        )
    return [*out, *(why(runs) for runs in networks.values())]


def _spread(networks: dict[str, list[Row]]) -> str:
    """How far the seeds' results are apart."""
    apart = {
        name: [r["best"][-1] / r["ideal_ns"] - 1 for r in runs] for name, runs in networks.items() if len(runs) > 1
    }
    if not apart:
        return "Another seed may end at another plan."
    name = max(apart, key=lambda n: max(apart[n]) - min(apart[n]))
    return (
        f"It need not be the best plan: on {NETWORKS[name].label} the seeds end between {min(apart[name]):.2%} and "
        f"{max(apart[name]):.2%} overhead."
    )


def why(runs: list[Row]) -> str:
    """A network's sentence."""
    name = runs[0]["network"]
    mean, best = curve(runs, "mean"), curve(runs, "best")
    theirs = " (paper: from 30 % to 13 %)" if name == "squeezenet" else ""
    fit = np.mean([r["fit"][0] / r["particles"] for r in runs])
    return (
        f"{NETWORKS[name].label}: {fit:.0%} of the first, random particles fit; the mean particle is "
        f"{mean[0] / best[0] - 1:.0%} slower than the best at first and {mean[-1] / best[-1] - 1:.0%} at the "
        f"end{theirs}; the best goes from {best[0] - 1:.1%} overhead to {best[-1] - 1:.1%}."
    )


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network: worst, mean and best over the iterations; every seed thin, their mean thick."""
    networks = by_network(rows)
    with panel_grid(path, len(networks), 3, (4.4, 3.2), (0.0, 0.9)) as (grid, columns):
        for axes, (network, runs) in zip(grid, networks.items(), strict=True):
            for which, ink in SWARM.items():
                for run in runs:
                    line = np.array(run[which], float) / run["ideal_ns"]
                    axes.plot(range(1, len(line) + 1), line, color=ink, linewidth=0.8, alpha=0.5)
                mean = curve(runs, which)
                axes.plot(range(1, len(mean) + 1), mean, color=ink, linewidth=2, label=which)
            axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (5, 3)))
            axes.set_title(f"{NETWORKS[network].label}, batch {runs[0]['batch']:,}")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        for axes in grid[::columns]:
            axes.set_ylabel("iteration time / kernels alone")
        for axes in grid[-columns:]:
            axes.set_xlabel("iteration of the search")
        fig = grid[0].figure
        handles, labels = grid[0].get_legend_handles_labels()
        fig.legend(handles, [f"{name} particle" if name != "mean" else "mean of the particles" for name in labels],
                   loc="outside lower center", ncols=3, fontsize=10)  # fmt: skip
        fig.suptitle("HOME's search: particles that fit 11 GB, by iteration time; thin lines are single seeds",
                     x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)  # fmt: skip
