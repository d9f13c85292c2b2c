"""Fig. 11 of the SmartPool paper: overhead against the reduction of the footprint, four methods."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from omegaconf import DictConfig

import agents
from agents.heuristics.memonger import Stages, recomputations
from agents.heuristics.smartpool_autoswap import SmartPoolAutoSwap
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.figures.smartpool import ZERO
from experiments.plotting.charts import DASHED, Axis, Chart, Line, Mark, Panel
from experiments.plotting.palette import look
from simulator import Machine, Plan, Program, simulate
from simulator.compiled.engine import decisions_of
from simulator.modes import MODES
from simulator.pool import Intervals, program_lifetimes, timeline_lifetimes

POOLS = {  # allocator without a plan, and with one
    "smartpool+autoswap": ("cnmem", "smartpool"), "memonger": ("cudamalloc", "cudamalloc"),
    "superneurons": ("superneurons", "superneurons"), "geeps": ("cudamalloc", "cudamalloc"),
}  # fmt: skip
BUDGETS = (0.25, 0.5, 1.0)  # of memonger's B
TOP = 0.8  # overhead that the picture shows
CLOSE = 0.02  # points of overhead: comparable


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    overheads, limits = (
        figures.numbers(settings, key, lambda value, most=most: 0 <= value <= most, f"numbers from 0 to {most:g}")
        for key, most in (("overheads", math.inf), ("geeps", 1.0))
    )
    shared = {
        "overheads": sorted(overheads),
        "geeps": sorted(limits, reverse=True),
        "steps": cli.integer(settings, "steps", least=2),
    }
    return [{"network": name, **shared} for name in figures.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """Points of each method: overhead, bytes of the footprint, bytes that are moved in an iteration."""
    program = figures.program(task["network"], machine)
    lives = program_lifetimes(program).intervals
    plans: dict[str, Iterator[tuple[Plan, int]]] = {
        "smartpool+autoswap": autoswap(program, machine, task["overheads"], task["steps"]),
        "memonger": memonger(program, machine),
        "superneurons": superneurons(program, machine),
        "geeps": geeps(program, machine, task["geeps"]),
    }
    return {
        "load": program.peak_bytes,
        "memory": machine.memory_bytes,
        "caffe": sum(tensor.nbytes for tensor in program.tensors),
        "bases": {name: footprint(base, lives, machine) for name, (base, _) in POOLS.items()},
        "points": {
            name: [point(POOLS[name][1], plan, limit, program, machine) for plan, limit in found]
            for name, found in plans.items()
        },
    }


def footprint(pool: str, lives: Intervals, machine: Machine) -> int:
    """Bytes that an allocator takes, of which "cudamalloc" is the load."""
    return figures.packed(pool, lives, machine.alignment).footprint


def point(pool: str, plan: Plan, limit: int, program: Program, machine: Machine) -> list[float]:
    """Overhead and footprint of a plan run under a limit, and the bytes that it moves, both ways."""
    timeline = simulate(program, plan, machine, limit)
    moved = [s for s in timeline.spans if s.stream != "compute" and s.start_ns >= timeline.last_start_ns]
    size = footprint(pool, timeline_lifetimes(timeline).intervals, machine)
    return [timeline.overhead, size, sum(program.tensors[s.index].nbytes for s in moved)]


def autoswap(program: Program, machine: Machine, overheads: list[float], steps: int) -> Iterator[tuple[Plan, int]]:
    """SmartPool alone, then with AutoSwap at each of the overheads."""
    yield Plan(), program.peak_bytes
    found = SmartPoolAutoSwap(steps=steps).smallest(program, machine, [max(o, ZERO) for o in overheads])
    # The same swaps are another run under another load limit.
    yield from ((plan, plan.limit) for plan in {(plan.decisions, plan.limit): plan for plan in found}.values())


def memonger(program: Program, machine: Machine) -> Iterator[tuple[Plan, int]]:
    """Recomputation at the budgets."""
    stages = Stages(program)
    budget = 0
    for _ in range(3):  # as the planner does
        kept, largest, _ = stages.divide(budget)
        budget = math.isqrt(kept * largest)
    for share in BUDGETS:
        rows = recomputations(stages.divide(round(share * budget))[2])
        yield Plan(decisions_of(rows)), machine.memory_bytes


def superneurons(program: Program, machine: Machine) -> Iterator[tuple[Plan, int]]:
    """All that may leave, in each of the modes."""
    for mode in MODES:
        planner = agents.make("superneurons", mode=mode)
        limit = figures.least_limit(planner, program, machine, program.peak_bytes // 200)  # to 0.5 %
        yield planner.plan(program, machine, limit), machine.memory_bytes


def geeps(program: Program, machine: Machine, shares: list[float]) -> Iterator[tuple[Plan, int]]:
    """A plan for each limit, a share of the load, as far as there is one."""
    planner = agents.make("geeps")
    for share in shares:
        limit = int(share * program.peak_bytes)
        if (plan := figures.attempt(planner, program, machine, limit)) is None:
            return
        yield plan, limit


# ------------------------------------------------------------------------------------------ for people


def reductions(row: Row, method: str, base: int | None = None) -> np.ndarray:
    """float64[points, 2]: reduction of the footprint without a plan (or of ``base`` bytes), and overhead."""
    found = np.array(row["points"][method], dtype=float).reshape(-1, 3)
    return np.stack([1 - found[:, 1] / (base or row["bases"][method]), found[:, 0]], 1)


def at(points: np.ndarray, reduction: float) -> float:
    """The least overhead of points that reduce by at least so much; inf where none does."""
    return float(points[points[:, 0] >= reduction - 1e-9, 1].min(initial=np.inf))


def free(points: np.ndarray, overhead: float = ZERO) -> float:
    """The largest reduction within an overhead, at least 0."""
    return float(points[points[:, 1] <= overhead, 0].max(initial=0.0))


def facts(row: Row) -> Row:
    """A network: reduction and overhead of each method's points, the extremes of the wide ranges."""
    ours, memonger, both, geeps = (reductions(row, name) for name in POOLS)
    return {
        "label": figures.label(row["network"]), "free": free(ours), "at_15": free(ours, 0.15),
        "most": said(ours[ours[:, 0].argmax()]), "memonger": [said(p) for p in memonger[memonger[:, 0].argsort()]],
        "superneurons": [said(p) for p in both], "geeps_free": free(geeps),
        "geeps": said(geeps[geeps[:, 0].argmax()]) if len(geeps) else "–",
        "deeper": both[:, 0].max() > memonger[:, 0].max(), "dearer": both[-1, 1] > memonger[:, 1].max(),
        "further": ours[:, 0].max() > geeps[:, 0].max(initial=0),
        # Overhead of GeePS less ours, at each of its points; -inf: ours does not go so far.
        "off": [float(p[1]) - at(ours, float(p[0])) for p in geeps],
        "wide": free(reductions(row, "geeps", row["caffe"])),
    }  # fmt: skip


def said(point: Any) -> str:
    """Reduction and overhead of a point."""
    return f"{point[0]:.0%} ({point[1]:.0%})"


def numbers(rows: list[Row]) -> Row:
    """The claims of the text beside what we find."""
    found = [facts(row) for row in rows]
    off = np.array([gap for one in found for gap in one["off"]])
    beyond = int((off == -np.inf).sum())
    best = {kind: [one["memonger"][-1] for one in found if one["label"].lower().startswith(kind)] or ["–"]
            for kind in ("vgg", "resnet")}  # fmt: skip
    return {
        "networks": found, "count": len(rows), "best": best, "points": len(off), "close": CLOSE, "beyond": beyond,
        **{key: sum(one[key] for one in found) for key in ("deeper", "dearer", "further")},
        "near": int((abs(off) <= CLOSE).sum()), "worse": int((off > CLOSE).sum()),
        "better": int((off < -CLOSE).sum()) - beyond,
        **{f"{key}_all": span(one[key] for one in found) for key in ("geeps_free", "wide")},
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A panel per network."""
    panels = []
    for row in rows:
        marks: list[Mark] = []
        for name in POOLS:
            points, how = reductions(row, name), look(name)
            if name == "superneurons":
                marks.append(Line(*points.T, how.colour, f"{how.label} (s swap, r recompute, b both)", how.marker, "",
                                  texts="srb", side="above"))  # fmt: skip
                continue
            wide, points = name in ("smartpool+autoswap", "geeps"), points[points[:, 0].argsort()]
            marks.append(Line(*points.T, how.colour, how.label, how.marker, "-" if wide else ""))
            if name == "geeps":
                caffe = reductions(row, name, row["caffe"])
                label = "GeePS, against Caffe, which frees nothing"
                marks.append(Line(*caffe[caffe[:, 0].argsort()].T, how.colour, label, line=DASHED, width=1))
        panels.append(Panel(figures.label(row["network"]), marks, Axis("reduction of the footprint", "%", (0, 1)),
                            Axis(f"overhead (up to {TOP:.0%})", "%", (-0.015, TOP))))  # fmt: skip
    return Chart("Overhead against reduction of the footprint, batch size 100", panels, 4, (3.9, 3.5), keys=3)


FIGURE = Figure("smartpool_fig11", tasks, run, numbers, chart)
