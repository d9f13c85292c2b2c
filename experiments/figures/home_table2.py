"""Table 2 of the HOME paper: the largest batch of PyTorch, Capuchin and HOME, and images per second there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from omegaconf import DictConfig

from agents.heuristics.layers import feature_maps
from agents.planner import MIB, Candidates
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.figure import Figure, span
from experiments.figures.home import NETWORKS, TABLE2
from experiments.plotting import palette
from experiments.plotting.charts import ONE, Axis, Chart, Mark, Panel, pairs
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    resolution = cli.number(settings, "resolution")
    if not 0 < resolution < 1:
        raise cli.UsageError(f"figure.resolution: expected a number between 0 and 1, got {resolution}")
    return [{"network": name, "resolution": resolution, **home.search(settings)} for name in home.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """Largest batches of one network, and what an iteration takes there."""
    network, options = task["network"], {key: task[key] for key in ("particles", "iterations")}
    of = home.sizes(network, machine)

    plans: dict[tuple[str, int], Plan | None] = {}

    def plan(method: str, batch: int) -> Plan | None:
        if (method, batch) not in plans:
            plans[method, batch] = home.planned(method, of.at(batch), machine, options)
        return plans[method, batch]

    def within(method: str, batch: int) -> bool:
        return least(method, of.at(batch)) <= machine.memory_bytes

    def fits(method: str, batch: int) -> bool:
        return plan(method, batch) is not None

    plain = home.unplanned(of)
    bounds = {method: largest(partial(within, method), plain, home.MOST) for method in TABLE2}
    largest_of = {
        method: highest(partial(fits, method), plain, bound, task["resolution"]) for method, bound in bounds.items()
    }
    found = {}
    for i, (method, batch) in enumerate(largest_of.items()):
        program = of.timed(home.program(network, machine, batch))
        if program.fingerprint != of.at(batch).fingerprint:
            raise AssertionError(f"{network}: the capture at batch {batch} is not the one that was planned")
        theirs = NETWORKS[network].batch[i]
        found[method] = {
            "batch": batch, "bound": bounds[method], "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns,
            **(home.outcome(program, plan(method, batch), machine) or {}),
            "at_paper": home.outcome(of.at(theirs), plan(method, theirs), machine),
        }  # fmt: skip
    return {"limit": machine.memory_bytes, "factor": of.factor, "found": found}


def least(method: str, program: Program) -> int:
    """Bytes that a method cannot get below: the peak with everything away that it may move."""
    if method == "PyTorch":
        return program.peak_bytes
    gaps = [m.gap for m in feature_maps(program)] if method == "HOME" else program.gaps(MIB)
    return Candidates(program, gaps).least


def highest(fits: Callable[[int], bool], low: int, high: int, resolution: float) -> int:
    """The largest batch that fits, from ``low``, which does, to ``high``, which is tried first: itself, or less than
    ``resolution`` of it below one that does not fit."""
    if fits(high):
        return high
    while high - low > max(1, resolution * low):
        middle = min(2 * low, (low + high) // 2)  # from below: a planner takes longest to find that it has no plan
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ------------------------------------------------------------------------------------------ for people


def facts(row: Row) -> Row:
    """A network: batches, images/s at one's own largest batch and at the paper's, by method; what bounds HOME's."""
    paper, found = NETWORKS[row["network"]], row["found"]
    ideal = {m: one["batch"] / one["ideal_ns"] for m, one in found.items()}
    at_paper = {m: one["at_paper"] and batch / one["at_paper"]["iteration_ns"] * 1e9
                for batch, (m, one) in zip(paper.batch, found.items(), strict=True)}  # fmt: skip
    home_ = found["HOME"]
    return {
        **home_, "label": paper.label, "paper_batch": paper.batch, "paper_rate": paper.throughput, "rate_at": at_paper,
        "batches": {m: one["batch"] for m, one in found.items()},
        "rate": {m: one["batch"] / one["iteration_ns"] * 1e9 for m, one in found.items()},
        "times_paper": paper.batch[2] / paper.batch[0], "times": home_["batch"] / found["PyTorch"]["batch"],
        "gain": ideal["HOME"] / ideal["PyTorch"] - 1, "gain_paper": paper.throughput[2] / paper.throughput[0] - 1,
        "part": paper.batch[2] / home_["batch"], "more": found["PyTorch"]["batch"] / paper.batch[0] - 1,
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """What is general, and each network."""
    networks = [facts(row) for row in rows]
    return {
        "networks": networks, "limit": rows[0]["limit"], "count": len(rows),
        **{f"{key}s": span(one[key] for one in networks) for key in ("more", "part", "gain", "gain_paper")},
        **{f"{key}_ahead": sum(one[key]["HOME"] > one[key]["Capuchin"] for one in networks)
           for key in ("batches", "rate")},
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Largest batch, throughput at the paper's batch, and at one's own; all over PyTorch's."""
    found = [facts(row) for row in rows]
    panels: list[list[Mark]] = [[ONE], [ONE], [ONE]]
    for shift, (i, method) in zip((-0.17, 0.17), ((1, "Capuchin"), (2, "HOME")), strict=True):
        how = palette.look(method.lower())._replace(label=method)
        batch, rate = ([one[key][i] / one[key][0] for one in found] for key in ("paper_batch", "paper_rate"))
        panels[0] += pairs(how, batch, [one["batches"][method] / one["batches"]["PyTorch"] for one in found], shift)
        for marks, key in zip(panels[1:], ("rate_at", "rate"), strict=True):
            ours = [one[key][method] and one[key][method] / one["rate"]["PyTorch"] for one in found]
            marks += pairs(how, rate, ours, shift)
    titles = ("Largest batch", "Images/s at the paper's batch", "Images/s at one's own largest batch")
    names = Axis(names=[one["label"] for one in found])
    return Chart(
        "Largest batch and throughput in the 11 GB of an RTX 2080 Ti",
        [Panel(title, marks, Axis("over PyTorch's at its largest batch", "{:g}×", (0, None)), names)
         for title, marks in zip(titles, panels, strict=True)],
        size=(4.6, 0.5 * len(rows) + 1.0),
    )  # fmt: skip


FIGURE = Figure("home_table2", tasks, run, numbers, chart)
