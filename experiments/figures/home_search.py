"""HOME's Fig. 8, the convergence of its search, and Table 3, the predicted times and the cost of an evaluation."""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

import agents
from agents.heuristics.home import HOME, UPDATES, Evaluator, placements
from agents.heuristics.layers import feature_maps
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row, warm_up
from experiments.figures import home_networks as home
from experiments.figures.figure import Figure, Rows, span
from experiments.figures.home_networks import NETWORKS
from experiments.plotting.charts import DASHED, DOTTED, Axis, Chart, Line, Mark, Panel, Rule, pairs
from experiments.plotting.palette import FAINT, INK, look
from simulator.compiled.engine import Engine
from simulator.machine import Machine


class Search(Figure):
    """Section 2.3: HOME's particle swarm beside simulated annealing with fewer simulations, over seeds."""

    name = "home_search"

    def tasks(self, settings: DictConfig) -> Rows:
        limits = figures.numbers(settings, "limits", lambda value: 0 < value < 1, "shares of the peak")
        calls = cli.integer(settings, "calls", least=1)
        options = home.search_options(settings)
        return [
            {"network": name, "limit": limit, "seed": seed, "calls": calls, **options}
            for name, limit, seed in product(figures.networks(settings), limits, figures.integers(settings, "seeds", 0))
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        limit = int(task["limit"] * program.peak_bytes)
        options = {key: task[key] for key in home.SEARCH}
        planners = {
            "home": HOME(**options, seed=task["seed"], jobs=1),
            "annealing": agents.make("annealing", calls=task["calls"], seed=task["seed"], jobs=1),
        }
        found = {name: figures.overhead(planner, program, machine, limit) for name, planner in planners.items()}
        return {"found": found, "used": {name: planner.simulator_calls for name, planner in planners.items()}}

    def template_values(self, rows: Rows) -> Row:
        pairs_found = [(row["found"]["home"], row["found"]["annealing"]) for row in rows]
        swarm, annealing = (
            [float("inf") if value is None else value for value in values] for values in zip(*pairs_found, strict=True)
        )
        lines = [
            {"label": figures.label(network), "limit": limit, **{name: _spread(runs, name) for name in LABELS}}
            for network, of_network in figures.group_by(rows).items()
            for limit, runs in figures.group_by(of_network, "limit").items()
        ]
        return {
            "lines": lines,
            "ahead": sum(a < b for a, b in zip(swarm, annealing, strict=True)),
            "behind": sum(a > b for a, b in zip(swarm, annealing, strict=True)),
            "used": {name: span(row["used"][name] for row in rows) for name in LABELS},
        }

    def chart(self, rows: Rows) -> Chart:
        groups = figures.group_by(rows, "limit")
        marks: list[Mark] = [
            Line(
                [row["found"][name] for lines in groups.values() for row in lines],
                [y + shift for y, lines in enumerate(groups.values()) for _ in lines],
                look(name).color,
                look(name).label,
                look(name).marker,
                "",
                size=7,
                hollow=True,
            )
            for name, shift in (("home", -0.15), ("annealing", 0.15))
        ]
        values = self.template_values(rows)
        title = f"HOME's swarm beats annealing in {values['ahead']} of {len(rows)} runs"
        names = [f"{limit:.0%} of the peak" for limit in groups]
        label = f"overhead, each of {len({row['seed'] for row in rows})} seeds"
        panel = Panel(figures.label(rows[0]["network"]), marks, Axis(label, "%", (0, None)), Axis(names=names))
        return Chart(title, [panel], size=(8.0, 2.2))


LABELS = ("home", "annealing")


def _spread(runs: Rows, name: str) -> str:
    """Formats mean and range of a planner's overheads, or "no plan" if a run has none."""
    values = [row["found"][name] for row in runs]
    if None in values:
        return "no plan"
    return f"{fmean(values):.2%} ({min(values):.2%} to {max(values):.2%})"


class Fig8(Figure):
    """Fig. 8: worst, average and best particle over the iterations of HOME's search."""

    name = "home_fig8"
    paper_networks = NETWORKS
    near = 0.01  # of the final time; counts as "close"
    swarm: ClassVar = {  # label, color and marker of a curve
        "worst": ("worst particle", "#9a9a9a", "v"),
        "mean": ("mean of the particles", "#1f5fa8", "s"),
        "best": ("best particle", "#cb181d", "o"),
    }

    def tasks(self, settings: DictConfig) -> Rows:
        share = home.batch_share(settings)
        options = home.search_options(settings)
        seeds = figures.integers(settings, "seeds", 0)
        return [
            {**task, "share": share, "update": update, "seed": seed, **options}
            for task, update, seed in product(super().tasks(settings), UPDATES, seeds)
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        sizes = home.sizes(task["network"], machine)
        batch = round(task["share"] * home.unplanned_batch(sizes))
        program = sizes.at_batch(batch)
        options = {key: task[key] for key in ("particles", "iterations", "seed", "update")}
        planner = HOME(**options, jobs=1)
        planner.plan(program, machine, machine.memory_bytes)
        # Until a particle fits, an iteration has no times.
        times = [(i.worst_ns, round(i.mean_ns), i.best_ns) if i.feasible else (None,) * 3 for i in planner.history]
        worst, mean, best = map(list, zip(*times, strict=True))
        return {
            "batch": batch,
            "ideal_ns": program.ideal_ns,
            "worst": worst,
            "mean": mean,
            "best": best,
            "fit": [i.feasible for i in planner.history],
            "calls": planner.simulator_calls,
        }

    def template_values(self, rows: Rows) -> Row:
        keys = figures.group_by(({**row, "key": (row["network"], row["update"])} for row in rows), "key")
        networks = [fig8_entry(runs) for runs in keys.values()]
        ends = [net["last"] for net in networks]
        printed, single = ([row for row in rows if row["update"] == update] for update in UPDATES)
        return {
            "networks": networks,
            "near": self.near,
            "needed": span(map(iterations_needed, printed)),
            "needed_whole": span(map(iterations_needed, single)),
            "worse": span(b - a for a, b in zip(ends[::2], ends[1::2], strict=False)),
            "each": span(r["calls"] / len(r["best"]) for r in printed),
        }

    def chart(self, rows: Rows) -> Chart:
        panels = []
        for network, runs in figures.group_by(rows).items():
            marks: list[Mark] = [Rule(1, horizontal=True, color=FAINT, line="-")]
            others = self.published["others"]
            stated = network in self.published
            text = "paper: close to the end" if stated else f"paper: {others}, mean of all but InceptionV3"
            iterations = self.published.get(network, others)
            marks.append(Rule(iterations, color=FAINT, label=text, line=DASHED if stated else DOTTED))
            updates = figures.group_by(runs, "update")
            for key, (label, ink, marker) in self.swarm.items():
                seeds = [np.array(run[key], float) / run["ideal_ns"] for run in updates[UPDATES[0]]]
                marks += [Line(range(1, len(y) + 1), y, ink, width=0.8, alpha=0.5) for y in seeds]
                mean = curve(updates[UPDATES[0]], key)
                marks.append(Line(range(1, len(mean) + 1), mean, ink, f"{label}, Algorithm 3", marker, width=2))
            best = curve(updates[UPDATES[1]], "best")
            label = "best, one evaluation per particle"
            marks.append(Line(range(1, len(best) + 1), best, INK, label, line="--", front=4))
            converged = round(fmean(map(iterations_needed, updates[UPDATES[1]])))
            label = f"the same, within {self.near:.0%} of its end"
            marks.append(Line([converged], [best[converged - 1]], INK, label, "*", "", size=12, front=5))
            title = f"{NETWORKS[network].label}, batch {runs[0]['batch']:,}"
            x = Axis("iteration of the search", "{:g}", scale="log", ticks=(1, 10, 100, 500))
            panels.append(Panel(title, marks, x, Axis("iteration time / kernels alone", "{:g}×")))
        values = self.template_values(rows)
        stated = [iterations for name, iterations in self.published.items() if name != "others"]
        title = f"HOME's search nears its end in {values['needed']:.0f} iterations (paper: {span(stated):.0f})"
        note = f"Means over {len({row['seed'] for row in rows})} seeds, particles within 11 GB; thin lines: one seed."
        return Chart(title, panels, 2, (4.95, 3.2), (0.0, 1.3), keys=2, note=note)


def curve(runs: Rows, key: str) -> NDArray[np.float64]:
    """Returns the swarm's best, mean or worst iteration time per search iteration, averaged over seeds.

    The result is float64[iterations], relative to total kernel time. A search that ended early keeps its last value.
    Iterations without a feasible particle are NaN.
    """
    length = max(len(run[key]) for run in runs)
    padded = [np.array(run[key] + run[key][-1:] * (length - len(run[key])), float) for run in runs]
    return np.asarray(np.mean([times / run["ideal_ns"] for times, run in zip(padded, runs, strict=True)], axis=0))


def iterations_needed(run: Row) -> int:
    """Returns the iterations until the best particle is within ``Fig8.near`` of the final one."""
    best = run["best"]
    return next(i for i, ns in enumerate(best, 1) if ns is not None and ns <= (1 + Fig8.near) * best[-1])


def fig8_entry(runs: Rows) -> Row:
    """Returns the means over the seeds of one network with one update rule."""
    network = runs[0]["network"]
    best = curve(runs, "best")
    paper = figures.published("home_fig8")
    return {
        "label": NETWORKS[network].label,
        "update": "Algorithm 3" if runs[0]["update"] == UPDATES[0] else "one evaluation",
        "paper": paper.get(network, f"(mean {paper['others']})"),
        "needed": fmean(map(iterations_needed, runs)),
        "calls": fmean(run["calls"] / len(run["best"]) for run in runs),
        "first": best[0],
        "last": best[-1],
    }


class Table3(Figure):
    """Table 3: cost of HOME's search, and of one evaluation of a policy."""

    name = "home_table3"
    paper_networks = NETWORKS
    evaluations = 500  # timed
    simulated = False

    def tasks(self, settings: DictConfig) -> Rows:
        options = {"share": home.batch_share(settings), **home.search_options(settings)}
        return [{**task, **options} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        sizes = home.sizes(task["network"], machine)
        program = sizes.at_batch(round(task["share"] * home.unplanned_batch(sizes)))
        warm_up(machine, "home")
        planner = HOME(particles=task["particles"], iterations=task["iterations"], jobs=1)
        begin = time.process_time()
        planner.plan(program, machine, machine.memory_bytes)
        search_s = time.process_time() - begin
        gaps = [m.gap for m in feature_maps(program)]
        evaluator = Evaluator(Engine(program, machine, machine.memory_bytes), gaps)
        rng = np.random.default_rng(0)
        modes = [placements(program, gap, "joint") for gap in gaps]
        particles = np.stack([rng.choice(np.array(mode, np.int8), self.evaluations) for mode in modes], axis=1)
        begin = time.process_time()
        evaluator.evaluate(particles)
        return {
            "kernels": len(program.kernels),
            "maps": len(gaps),
            "search_s": search_s,
            "iterations_run": len(planner.history),
            "calls": planner.simulator_calls,
            "evaluation_s": (time.process_time() - begin) / self.evaluations,
            "processor": processor(),
        }

    def template_values(self, rows: Rows) -> Row:
        networks = [table3_entry(row) for row in rows]
        for net in networks:
            net["is_faster"] = net["ms"] <= net["paper_ms"]
        return {
            "networks": networks,
            "processors": sorted({row["processor"] for row in rows}),
            "times": span(net["time"] for net in networks),
        }

    def chart(self, rows: Rows) -> Chart:
        networks = [table3_entry(row) for row in rows]
        names = Axis(names=[net["label"] for net in networks])
        panels = []
        search = ("search_paper", "search_s")
        single = ("paper_ms", "ms")
        for title, unit, keys in (("The whole search", "seconds", search), ("One evaluation", "milliseconds", single)):
            theirs, ours = ([net[key] for net in networks] for key in keys)
            join, hollow, filled = pairs(look("home"), theirs, ours)
            marks = [
                join,
                replace(hollow, texts=[f"{x:.3g}" for x in theirs]),
                replace(filled, texts=[f"{x:.2g}" for x in ours], side="left"),
            ]
            low = min(*theirs, *ours)
            high = max(*theirs, *ours)
            ticks = [10.0**n for n in range(-3, 4) if low / 3 <= 10.0**n <= 3 * high]
            panels.append(Panel(title, marks, Axis(unit, "{:g}", (low / 3, 3 * high), "log", ticks), names))
        seconds, paper_seconds = (span(net[key] for net in networks) for key in ("search_s", "search_paper"))
        title = f"HOME's search: {seconds:.0f} s in one process (paper: {paper_seconds:.0f} s in 16 threads)"
        return Chart(title, panels, size=(4.95, 0.42 * len(rows) + 0.9))


def processor() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )


def table3_entry(row: Row) -> Row:
    """Returns one network's numbers with the paper's."""
    paper = NETWORKS[row["network"]]
    return {
        **row,
        "label": paper.label,
        "search_paper": paper.search_s,
        "paper_ms": paper.evaluation_ms,
        "ms": row["evaluation_s"] * 1e3,
        "time": paper.evaluation_ms / 1e3 / row["evaluation_s"],
    }
