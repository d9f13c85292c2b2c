"""Table 3 of "HOME: A Holistic GPU Memory Management Framework for Deep Learning" (2022), section 4.7: seconds that
HOME's search takes, and milliseconds that one evaluation of a policy takes; six networks.

Measured: processor time of one process, on the machine that made this page (column "processor"). The paper's search
ran in 16 threads on two Intel Xeon Gold 5218R. Networks and limit are those of experiments/figures/home_table2.py; the
paper does not say its batch sizes, ours are all the same multiple of the largest batch that fits without a plan. An
evaluation is one of a random particle with all of its transfers and recomputation, by the compiled simulator.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.heuristics.home import HOME, Evaluator, placements
from agents.heuristics.layers import feature_maps
from experiments.common import cli
from experiments.common.report import Row, warm_up
from experiments.figures import home
from experiments.figures.home import NETWORKS
from experiments.plotting.palette import INK, look
from experiments.plotting.plots import figure
from simulator.machine import Machine

TITLE = "HOME, Table 3: time of the search and of an evaluation"
THREADS, PARTICLES, ITERATIONS = 16, 500, 500  # the paper's
EVALUATIONS = 500  # timed


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    share = cli.number(settings, "share")
    if share <= 1:
        raise cli.UsageError(f"figure.share: expected a number above 1, got {share}")
    return [{"network": name, "share": share, **home.search(settings)} for name in home.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """Processor seconds of a search and of an evaluation."""
    of = home.sizes(task["network"], machine)
    program = of.at(round(task["share"] * home.unplanned(of)))
    warm_up(machine, "home")
    planner = HOME(particles=task["particles"], iterations=task["iterations"], jobs=1)
    begin = time.process_time()
    planner.plan(program, machine, machine.memory_bytes)
    search_s = time.process_time() - begin
    gaps = [m.gap for m in feature_maps(program)]
    evaluator = Evaluator(program, machine, machine.memory_bytes, gaps)
    rng = np.random.default_rng(0)
    ways = [placements(program, gap, "joint") for gap in gaps]
    particles = np.stack([rng.choice(np.array(w, np.int8), EVALUATIONS) for w in ways], axis=1)
    begin = time.process_time()
    evaluator.evaluate(particles)
    return {
        "kernels": len(program.kernels),
        "maps": len(gaps),
        "search_s": search_s,
        "iterations_run": len(planner.history),
        "calls": planner.simulator_calls,
        "evaluation_s": (time.process_time() - begin) / EVALUATIONS,
        "processor": processor(),
    }


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Paper / ours in the columns of times."""
    heads = [
        "", "search, s: paper / ours", "evaluation, ms: paper / ours", "kernels", "feature maps", "iterations",
        "evaluations", "ms of search an evaluation", "processor",
    ]  # fmt: skip
    cells = []
    for row in rows:
        paper = NETWORKS[row["network"]]
        cells.append([
            paper.label,
            f"{paper.search_s} / {row['search_s']:.1f}",
            f"{paper.evaluation_ms} / {row['evaluation_s'] * 1e3:.3f}",
            f"{row['kernels']:,}", f"{row['maps']:,}", f"{row['iterations_run']}", f"{row['calls']:,}",
            f"{row['search_s'] / row['calls'] * 1e3:.3f}",
            row["processor"],
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """General, then a sentence per network."""
    papers = [NETWORKS[r["network"]] for r in rows]
    sums = [p.search_s * 1e3 * THREADS / (PARTICLES * ITERATIONS * p.evaluation_ms) for p in papers]
    times = [p.evaluation_ms / 1e3 / r["evaluation_s"] for p, r in zip(papers, rows, strict=True)]
    return [
        f"Measured on one core of {', '.join(sorted({r['processor'] for r in rows}))}, with {rows[0]['particles']} "
        f"particles. Our evaluator is {min(times):,.0f} to {max(times):,.0f} times as fast as the paper's: it is "
        "compiled, and makes no object per evaluation.",
        f"The paper's search times are {min(sums):.2f} to {max(sums):.2f} times {PARTICLES} × {ITERATIONS} evaluations "
        f"of its third column shared by {THREADS} threads: one evaluation a particle and iteration. Ours does what "
        "Algorithm 3 says, one for each placement that it tries, and ends when the swarm rests.",
        *(why(row) for row in rows),
    ]


def why(row: Row) -> str:
    """A network's sentence."""
    paper = NETWORKS[row["network"]]
    ratio = paper.search_s / row["search_s"]
    faster = f"{ratio:.1f} times as fast as" if ratio >= 1 else f"{1 / ratio:.1f} times as slow as"
    return (
        f"{paper.label}: {row['calls']:,} evaluations in {row['iterations_run']} iterations over {row['maps']} feature "
        f"maps; the search is {faster} the paper's in {THREADS} threads."
    )


def draw(rows: list[Row], path: Path) -> None:
    """Two panels of a row per network: seconds of the search, ms of an evaluation; the paper hollow, ours filled."""
    ink = look("home").colour
    with figure(path, 11.0, 1.9 + 0.42 * len(rows), 1, 2) as (searches, evaluations):
        papers = [NETWORKS[row["network"]] for row in rows]
        panels = (
            (searches, [p.search_s for p in papers], [r["search_s"] for r in rows], "seconds"),
            (evaluations, [p.evaluation_ms for p in papers], [r["evaluation_s"] * 1e3 for r in rows], "milliseconds"),
        )
        for axes, theirs, ours, unit in panels:
            for y, (paper, found) in enumerate(zip(theirs, ours, strict=True)):
                axes.plot([paper, found], [y, y], color=ink, linewidth=1, alpha=0.5)
                axes.plot(paper, y, "^", color=ink, markerfacecolor="white", markersize=8, markeredgewidth=1.5)
                axes.plot(found, y, "^", color=ink, markersize=8)
                for x, side in zip(sorted([paper, found]), (-1, 1), strict=True):
                    axes.annotate(f"{x:.3g}", (x, y), (9 * side, 0), "data", "offset points", va="center",
                                  ha="left" if side > 0 else "right", fontsize=9.5, color=INK)  # fmt: skip
            names = [p.label for p in papers] if axes is searches else [""] * len(rows)
            axes.set_yticks(range(len(rows)), names)
            axes.set(ylim=(len(rows) - 0.4, -0.6), xscale="log", xlabel=unit)
            axes.margins(x=0.2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)
        searches.set_title("The whole search")
        evaluations.set_title("One evaluation")
        fig = searches.figure
        keys = [
            Line2D([], [], linestyle="", marker="^", color=ink, markerfacecolor="white", markeredgewidth=1.5,
                   markersize=8, label="paper, search in 16 threads"),
            Line2D([], [], linestyle="", marker="^", color=ink, markersize=8, label="ours, one process"),
        ]  # fmt: skip
        fig.legend(handles=keys, loc="outside lower center", ncols=2, fontsize=10)
        fig.suptitle("What HOME's search costs", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
