"""Table II of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section VI-B-4: how far
AutoSwap with Bayesian optimisation reduces the memory load without overhead; eight networks, batch size 100, GTX 1080
Ti.

1. The reduced load is the lowest of ``steps`` limits at which the simulated overhead is 0.0 %; all are tried.
2. "At most": below that limit the floor of every plan of swaps is above 0.0 %; bisected to 1 % of the load.
3. MB that leave are compared directly, shares of the load with what SINGA keeps added to ours (smartpool_table1.py).
4. "Link needed": the slowest link, over the measured one, at which the paper's MB leave without overhead; bisected.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from omegaconf import DictConfig

import agents
from agents.floor import floor
from agents.heuristics.autoswap import peak_gaps
from agents.planner import Candidates
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.smartpool import MB, ZERO, our_limit, planned, span
from experiments.figures.smartpool_table1 import PAPER as LOADS
from experiments.plotting.palette import FAINT, GRID, INK, look
from experiments.plotting.plots import figure
from simulator import Machine, Program

TITLE = "SmartPool, Table II: largest reduction of the load without overhead"
REDUCED = {  # MB
    "resnet18": 1152, "resnet34": 2124, "resnet50": 2906, "resnet101": 5658, "vgg11": 284, "vgg13": 360, "vgg16": 447,
    "vgg19": 561,
}  # fmt: skip
PLANNER = "autoswap_bo"
BISECTIONS, SLOWEST, FASTEST = 7, 0.1, 2.0  # of the link


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    steps = cli.integer(settings, "steps", least=2)
    for name in (found := figures.networks(settings)):
        if name not in REDUCED:
            raise cli.UsageError(f"figure.networks: {name!r} is not in the table ({', '.join(REDUCED)})")
    return [{"network": name, "steps": steps} for name in found]


def run(task: Row, machine: Machine) -> Row:
    """Loads of one network in bytes, and the link's factor."""
    program = figures.program(task["network"], machine)
    theirs = our_limit(program, task["network"], REDUCED[task["network"]])
    least = lowest_floor(program, machine)
    reduced = lowest_free(program, machine, task["steps"], least)
    return {
        "load": program.peak_bytes,
        "reduced": reduced,
        "swapped_ns": planned(agents.make(PLANNER), program, machine, reduced).breakdown.overlapped_transfer_ns,
        "ideal_ns": program.ideal_ns,
        "least": least,
        "at_theirs": planned(agents.make(PLANNER), program, machine, theirs).overhead,
        "link": slowest_link(program, machine, theirs),
    }


def is_free(program: Program, machine: Machine, limit: int) -> bool:
    """Whether AutoSwap's plan has no overhead."""
    return planned(agents.make(PLANNER), program, machine, limit).overhead <= ZERO


def lowest_free(program: Program, machine: Machine, steps: int, above: int) -> int:
    """The lowest of the limits at which AutoSwap has no overhead; the load itself is one. None below ``above`` is
    tried."""
    least = Candidates(program, peak_gaps(program)).least
    limits: list[int] = np.linspace(program.peak_bytes, least, steps + 1).astype(np.int64).tolist()
    return min(limit for limit in limits if limit >= above and is_free(program, machine, limit))


def lowest_floor(program: Program, machine: Machine) -> int:
    """A limit below which every plan of swaps has overhead, or fits not at all: the highest such, to 1 % of the "
    "load."""
    high = program.peak_bytes
    low = floor(program, machine, high, "swap").least_bytes
    if floor(program, machine, low, "swap").overhead <= ZERO:
        return low
    while high - low > program.peak_bytes // 100:  # free at ``high``, not at ``low``
        middle = (low + high) // 2
        if floor(program, machine, middle, "swap").overhead <= ZERO:
            high = middle
        else:
            low = middle
    return low


def slowest_link(program: Program, machine: Machine, limit: int) -> float | None:
    """The least multiple of the link's speed at which AutoSwap has no overhead at ``limit``; None if ``FASTEST`` is too
    slow."""

    def enough(factor: float) -> bool:
        speeds = (round(speed * factor) for speed in (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s))
        h2d, d2h = speeds
        return is_free(program, replace(machine, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h), limit)

    low, high = SLOWEST, FASTEST
    if not enough(high):
        return None
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# ------------------------------------------------------------------------------------------ for people


def shares(row: Row) -> dict[str, float]:
    """Reductions as shares of a load: the paper's, ours, ours of the paper's load, the most possible of ours."""
    load = LOADS[row["network"]]["load"]
    left = row["load"] - row["reduced"]
    return {
        "paper": 1 - REDUCED[row["network"]] / load,
        "ours": left / row["load"],
        "of_theirs": left / MB / load,
        "most": 1 - row["least"] / row["load"],
    }


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Paper / ours, and at most."""
    heads = [
        "paper / ours", "load, MB", "reduced load, MB", "MB that leave", "of the load", "of the paper's load",
        "at most, of ours", "link needed",
    ]  # fmt: skip
    cells = []
    for row in rows:
        load, reduced, share = LOADS[row["network"]]["load"], REDUCED[row["network"]], shares(row)
        ours = (row["load"] - row["reduced"]) / MB
        cells.append([
            figures.label(row["network"]), f"{load:,.0f} / {row['load'] / MB:,.0f}",
            f"{reduced:,.0f} / {row['reduced'] / MB:,.0f}", f"{load - reduced:,.0f} / {ours:,.0f}",
            f"{share['paper']:.1%} / {share['ours']:.1%}", f"{share['paper']:.1%} / {share['of_theirs']:.1%}",
            f"{share['most']:.1%}", "more than 2×" if row["link"] is None else f"{row['link']:.2f}×",
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """What is general, then a sentence per network."""
    links = [row["link"] for row in rows if row["link"]] or [FASTEST]
    kinds = {
        kind: [row["link"] for row in rows if row["network"].startswith(kind) and row["link"]]
        for kind in ("vgg", "resnet")
    }
    most = [shares(row)["most"] for row in rows]
    out = [
        f"At the paper's reduced load our planner has no overhead in {sum(r['at_theirs'] <= ZERO for r in rows)} of "
        f"{len(rows)} networks. By MB it goes further than the paper's in "
        f"{sum(shares(r)['of_theirs'] > shares(r)['paper'] for r in rows)} of them.",
        f"How much further, as a speed: for the paper's reduction {span(links)} of the measured link is enough here. "
        "What takes up the rest there is inferred: synchronisation and other traffic, which the simulator has none of.",
        f'"At most" is proven: no plan of swaps, whoever makes it, lets more than that share ({span(most)} of our '
        "load) leave without overhead. It is not known whether a plan exists there.",
    ]
    if all(kinds.values()):
        out.append(
            f"VGGs need {span(kinds['vgg'])} of the link for the paper's reduction, ResNets {span(kinds['resnet'])}: "
            "it is for ResNets that the paper's planner leaves most unused."
        )
    return [*out, *(why(row) for row in rows)]


def why(row: Row) -> str:
    """A network's sentence."""
    share, load = shares(row), LOADS[row["network"]]["load"]
    ours, theirs = (row["load"] - row["reduced"]) / MB, load - REDUCED[row["network"]]
    busy = row["swapped_ns"] / row["ideal_ns"] / 2
    return (
        f"{figures.label(row['network'])}: {ours:,.0f} MB leave ({theirs:,.0f} in the paper), when each direction of "
        f"the link is busy for {busy:.0%} of the iteration; {share['most']:.0%} of the load is the most that can."
    )


def draw(rows: list[Row], path: Path) -> None:
    """A line per network: the paper's share, ours, and the most possible."""
    with figure(path, 9.5, 1.9 + 0.42 * len(rows)) as axes:
        ink = look(PLANNER).colour
        for y, row in enumerate(rows):
            share = shares(row)
            axes.axhspan(y - 0.5, y + 0.5, color="none" if y % 2 else GRID, alpha=0.5, linewidth=0, zorder=0)
            axes.plot((share["paper"], share["of_theirs"]), (y, y), color=ink, linewidth=1.4, alpha=0.6, zorder=2)
            axes.plot(share["paper"], y, "o", color=ink, markerfacecolor="white", markersize=7, markeredgewidth=1.5)
            axes.plot(share["of_theirs"], y, "o", color=ink, markersize=7)
            most = share["most"] * row["load"] / MB / LOADS[row["network"]]["load"]
            axes.plot(most, y, "|", color=INK, markersize=14, markeredgewidth=2)
            axes.annotate(f"{share['paper']:.0%}", (share["paper"], y), (-8, 0), textcoords="offset points",
                          va="center", ha="right", fontsize=9.5, color=INK)  # fmt: skip
            axes.annotate(f"{share['of_theirs']:.0%}", (share["of_theirs"], y), (0, 5), textcoords="offset points",
                          ha="center", fontsize=9.5, color=INK)  # fmt: skip
            axes.annotate(f"{most:.0%}", (most, y), (6, 0), textcoords="offset points", va="center", fontsize=9.5,
                          color=FAINT)  # fmt: skip
        axes.set_yticks(range(len(rows)), [figures.label(row["network"]) for row in rows])
        axes.set(
            ylim=(len(rows) - 0.4, -0.6), xlim=(0, 0.6), xlabel="what leaves without overhead, of the paper's load",
            title="Largest reduction of the load without overhead, batch size 100, GTX 1080 Ti",
        )  # fmt: skip
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        keys = [
            Line2D([], [], marker="o", linestyle="", color=ink, markerfacecolor="white", markeredgewidth=1.5,
                   label="AutoSwap BO, paper"),
            Line2D([], [], marker="o", linestyle="", color=ink, label="AutoSwap BO, ours"),
            Line2D([], [], marker="|", linestyle="", color=INK, markersize=12, markeredgewidth=2,
                   label="no plan of swaps can do more (proven)"),
        ]  # fmt: skip
        axes.figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=10, handletextpad=0.4)
