"""Table II of the SmartPool paper: how far AutoSwap reduces the memory load without overhead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from omegaconf import DictConfig

import agents
from agents.floor import floor
from agents.heuristics.autoswap import peak_gaps
from agents.planner import Candidates
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import between
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.figures.smartpool import MB, ZERO, our_limit, planned
from experiments.figures.smartpool_table1 import PAPER as LOADS
from experiments.plotting.charts import Axis, Chart, Line, Panel, pairs
from experiments.plotting.palette import INK, look
from simulator import Machine, Program

REDUCED = {  # MB
    "resnet18": 1152, "resnet34": 2124, "resnet50": 2906, "resnet101": 5658, "vgg11": 284, "vgg13": 360, "vgg16": 447,
    "vgg19": 561,
}  # fmt: skip
PLANNER = "autoswap_bo"
BISECTIONS, SLOWEST, FASTEST = 7, 0.1, 2.0  # of the link


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    steps = cli.integer(settings, "steps", least=2)
    return [{"network": name, "steps": steps} for name in figures.networks(settings, REDUCED)]


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
    """A limit below which every plan of swaps has overhead, or fits not at all: the highest such, to 1 % of the
    load."""
    high = program.peak_bytes
    low = floor(program, machine, high, "swap").least_bytes

    def free(limit: int) -> bool:
        return floor(program, machine, limit, "swap").overhead <= ZERO

    return low if free(low) else between(free, low, high, program.peak_bytes // 100)[0]


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


def facts(row: Row) -> Row:
    """A network: MB, and shares of a load."""
    load, left = LOADS[row["network"]]["load"], row["load"] - row["reduced"]
    return {
        **row, "label": figures.label(row["network"]), "load_paper": load, "reduced_paper": REDUCED[row["network"]],
        "left_paper": load - REDUCED[row["network"]], "left": left, "paper": 1 - REDUCED[row["network"]] / load,
        "ours": left / row["load"], "of_theirs": left / MB / load, "most": 1 - row["least"] / row["load"],
        "most_of_theirs": (row["load"] - row["least"]) / MB / load,
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """What is general, and every network."""
    networks = [facts(row) for row in rows]
    kinds = {kind: span(row["link"] for row in rows if row["network"].startswith(kind)) for kind in ("vgg", "resnet")}
    return {
        "networks": networks, "count": len(rows), "free": sum(row["at_theirs"] <= ZERO for row in rows), **kinds,
        "further": sum(one["of_theirs"] > one["paper"] for one in networks),
        "links": span(row["link"] for row in rows) or span([FASTEST]), "most": span(one["most"] for one in networks),
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A line per network: the paper's share, ours, and the most possible."""
    found = [facts(row) for row in rows]
    theirs, ours, most = ([one[key] for one in found] for key in ("paper", "of_theirs", "most_of_theirs"))
    join, hollow, filled = pairs(look(PLANNER)._replace(marker="o"), theirs, ours)
    marks = [
        join, replace(hollow, texts=[f"{x:.0%}" for x in theirs], side="left"),
        replace(filled, texts=[f"{x:.0%}" for x in ours], side="above"),
        Line(most, range(len(rows)), INK, "no plan of swaps can do more (proven)", "|", "", size=13,
             texts=[f"{x:.0%}" for x in most]),
    ]  # fmt: skip
    where = Axis("what leaves without overhead, of the paper's load", "%", (0, 0.6))
    title = "Largest reduction of the load without overhead, batch size 100, GTX 1080 Ti"
    return Chart(title, [Panel("", marks, where, Axis(names=[one["label"] for one in found]))],
                 size=(9.5, 0.42 * len(rows) + 0.8))  # fmt: skip


FIGURE = Figure("smartpool_table2", tasks, run, numbers, chart)
