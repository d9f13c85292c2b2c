"""Table 3 of the HOME paper: what HOME's search, and one evaluation of a policy, takes."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from agents.heuristics.home import HOME, Evaluator, placements
from agents.heuristics.layers import feature_maps
from experiments.common.report import Row, warm_up
from experiments.figures import home
from experiments.figures.figure import Figure, span
from experiments.figures.home import NETWORKS
from experiments.plotting.charts import Axis, Chart, Panel, pairs
from experiments.plotting.palette import look
from simulator.compiled.engine import Engine
from simulator.machine import Machine

THREADS, PARTICLES, ITERATIONS = 16, 500, 500  # the paper's
EVALUATIONS = 500  # timed


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    return [
        {"network": name, "share": home.share(settings), **home.search(settings)} for name in home.networks(settings)
    ]


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
    evaluator = Evaluator(Engine(program, machine, machine.memory_bytes), gaps)
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


def facts(row: Row) -> Row:
    """A network, beside the paper's."""
    paper = NETWORKS[row["network"]]
    return {
        **row, "label": paper.label, "search_paper": paper.search_s, "paper_ms": paper.evaluation_ms,
        "ms": row["evaluation_s"] * 1e3, "each_ms": row["search_s"] / row["calls"] * 1e3,
        "time": paper.evaluation_ms / 1e3 / row["evaluation_s"],
        "sum": paper.search_s * 1e3 * THREADS / (PARTICLES * ITERATIONS * paper.evaluation_ms),
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """What is general, and each network."""
    found = [facts(row) for row in rows]
    return {
        "networks": found, "processors": sorted({row["processor"] for row in rows}), "particles": rows[0]["particles"],
        **{f"{key}s": span(one[key] for one in found) for key in ("sum", "time")},
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Seconds of the search, ms of an evaluation."""
    found = [facts(row) for row in rows]
    names = Axis(names=[one["label"] for one in found])
    panels = []
    whole, one_of = ("search_paper", "search_s"), ("paper_ms", "ms")
    for title, unit, keys in (("The whole search", "seconds", whole), ("One evaluation", "milliseconds", one_of)):
        theirs, ours = ([one[key] for one in found] for key in keys)
        join, hollow, filled = pairs(look("home"), theirs, ours)
        marks = [join, replace(hollow, texts=[f"{x:.3g}" for x in theirs]),
                 replace(filled, texts=[f"{x:.2g}" for x in ours], side="left")]  # fmt: skip
        low, high = min(*theirs, *ours), max(*theirs, *ours)
        ticks = [10.0**n for n in range(-3, 4) if low / 3 <= 10.0**n <= 3 * high]
        panels.append(Panel(title, marks, Axis(unit, "{:g}", (low / 3, 3 * high), "log", ticks), names))
    return Chart(
        "What HOME's search costs: the paper's in 16 threads, ours in one process",
        panels,
        size=(5.5, 0.42 * len(rows) + 0.9),
    )


FIGURE = Figure("home_table3", tasks, run, numbers, chart, simulated=False)
