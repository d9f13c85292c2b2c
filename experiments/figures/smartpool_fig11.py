"""Fig. 11 of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section VI-C-2: overhead against
the reduction of the memory footprint, for SmartPool+AutoSwap, MXNet-memonger, SuperNeurons and GeePS; VGG and ResNet of
several depths, batch size 100, GTX 1080 Ti.

The text names the points of each method, but neither the figure's networks nor its numbers, only claims. Ours:

1. The frameworks become planners of one program each; a reduction is of the method's own footprint (``POOLS``).
2. SmartPool+AutoSwap: the smallest footprint at each of several overheads, down to load_min (``smallest``).
3. memonger: three points, of budgets B / 4, B / 2 and B; B balances what is kept and the largest stage.
4. SuperNeurons: three points: swap, recompute, both; as much as its rules allow, then run with the GPU's memory.
5. GeePS: a plan for each of several limits; the dashed line is against the sum of all tensors, as Caffe never frees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from omegaconf import DictConfig

import agents
from agents.heuristics.memonger import Stages, recomputations
from agents.heuristics.smartpool_autoswap import SmartPoolAutoSwap
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.smartpool import ZERO, span
from experiments.plotting.palette import INK, look
from experiments.plotting.plots import panel_grid
from simulator import Machine, Plan, Program, simulate
from simulator.compiled.engine import decisions_of
from simulator.pool import Intervals, program_lifetimes, timeline_lifetimes
from simulator.ways import MODES

TITLE = "SmartPool, Fig. 11: overhead against footprint reduction, four methods"
POOLS = {  # allocator without a plan, and with one
    "smartpool+autoswap": ("cnmem", "smartpool"), "memonger": ("cudamalloc", "cudamalloc"),
    "superneurons": ("superneurons", "superneurons"), "geeps": ("cudamalloc", "cudamalloc"),
}  # fmt: skip
BUDGETS = (0.25, 0.5, 1.0)  # of memonger's B
TOP = 0.8  # overhead that the picture shows
NAMED = {"superneurons": " (s swap, r recompute, b both)"}
CLOSE = 0.02  # points of overhead: comparable


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    overheads, limits = (cli.values(settings, key) for key in ("overheads", "geeps"))
    for key, values, most in (("overheads", overheads, math.inf), ("geeps", limits, 1.0)):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise cli.UsageError(f"figure.{key}: expected numbers from 0 to {most:g}, got {value!r}")
    shared = {
        "overheads": sorted(overheads), "geeps": sorted(limits, reverse=True),
        "steps": cli.integer(settings, "steps", least=2),
    }  # fmt: skip
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
        low, high = 0, program.peak_bytes  # the smallest limit that it reaches, to 0.5 %
        while high - low > program.peak_bytes // 200:
            middle = (low + high) // 2
            try:
                planner.plan(program, machine, middle)
                high = middle
            except agents.Infeasible:
                low = middle
        yield planner.plan(program, machine, high), machine.memory_bytes


def geeps(program: Program, machine: Machine, shares: list[float]) -> Iterator[tuple[Plan, int]]:
    """A plan for each limit, a share of the load, as far as there is one."""
    planner = agents.make("geeps")
    for share in shares:
        limit = int(share * program.peak_bytes)
        try:
            yield planner.plan(program, machine, limit), limit
        except agents.Infeasible:
            return


# ------------------------------------------------------------------------------------------ for people


def reductions(row: Row, method: str, base: int | None = None) -> np.ndarray:
    """float64[points, 2]: reduction of the footprint without a plan (or of ``base`` bytes), and overhead."""
    found = np.array(row["points"][method], dtype=float).reshape(-1, 3)
    return np.stack([1 - found[:, 1] / (base or row["bases"][method]), found[:, 0]], 1)


def at(points: np.ndarray, reduction: float) -> float:
    """The least overhead of points that reduce by at least so much; inf where none does."""
    return float(points[points[:, 0] >= reduction - 1e-9, 1].min(initial=np.inf))


def traffic(row: Row) -> float:
    """How many times the bytes of SmartPool+AutoSwap GeePS moves where it reduces by half, or next to that."""
    geeps, ours = (reductions(row, name)[:, 0] for name in ("geeps", "smartpool+autoswap"))
    half = int(np.abs(geeps - 0.5).argmin())
    reach = np.where(ours >= geeps[half], ours, np.inf)
    moved = [row["points"][n][int(i)][2] for n, i in (("geeps", half), ("smartpool+autoswap", reach.argmin()))]
    return float(moved[0] / moved[1])


def free(points: np.ndarray) -> float:
    """The largest reduction without overhead, at least 0."""
    return float(points[points[:, 1] <= ZERO, 0].max(initial=0.0))


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Per network: reduction (overhead) of each method's points, the extremes of the wide ranges."""
    heads = [
        "reduction (overhead)", "SmartPool+AutoSwap, no overhead", "15%", "at most", "memonger", "SuperNeurons: swap",
        "recompute", "both", "GeePS, no overhead", "at most",
    ]  # fmt: skip
    cells = []
    for row in rows:
        ours, geeps = (reductions(row, name) for name in ("smartpool+autoswap", "geeps"))
        best, other = ours[ours[:, 0].argmax()], (geeps[geeps[:, 0].argmax()] if len(geeps) else None)
        memonger = reductions(row, "memonger")
        cells.append([
            figures.label(row["network"]), f"{free(ours):.0%}",
            f"{ours[ours[:, 1] <= 0.15, 0].max(initial=0):.0%}", _point(best),
            ", ".join(_point(p) for p in memonger[memonger[:, 0].argsort()]),
            *(_point(p) for p in reductions(row, "superneurons")),
            f"{free(geeps):.0%}", "–" if other is None else _point(other),
        ])  # fmt: skip
    return heads, cells


def _point(p: Any) -> str:
    return f"{p[0]:.0%} ({p[1]:.0%})"


def notes(rows: list[Row]) -> list[str]:
    """The claims of the text beside what we find."""
    kinds = {k: [row for row in rows if row["network"].startswith(k)] for k in ("vgg", "resnet")}
    best = {
        k: [_point(max(reductions(row, "memonger"), key=lambda p: p[0])) for row in mine] for k, mine in kinds.items()
    }
    deeper = sum(reductions(r, "superneurons")[:, 0].max() > reductions(r, "memonger")[:, 0].max() for r in rows)
    dearer = sum(reductions(r, "superneurons")[-1, 1] > reductions(r, "memonger")[:, 1].max() for r in rows)
    further = sum(
        reductions(r, "smartpool+autoswap")[:, 0].max() > reductions(r, "geeps")[:, 0].max(initial=0) for r in rows
    )
    gaps = [
        (at(reductions(r, "smartpool+autoswap"), float(p[0])), float(p[1]))
        for r in rows
        for p in reductions(r, "geeps")
    ]
    off = np.array([theirs - ours for ours, theirs in gaps])
    beyond, near = int((off == -np.inf).sum()), int((abs(off) <= CLOSE).sum())
    better, worse = int((off < -CLOSE).sum()) - beyond, int((off > CLOSE).sum())
    times = [traffic(row) for row in rows if row["points"]["geeps"]]
    caffe = [1 - row["load"] / row["caffe"] for row in rows]
    wide = [free(reductions(row, "geeps", row["caffe"])) for row in rows]
    narrow = [free(reductions(row, "geeps")) for row in rows]
    return [
        "The text has no numbers of the figure and does not name its networks, but makes claims. Here all methods plan "
        "the same program with the same durations, where the paper runs four frameworks.",
        '"MXNet-memonger shows significant memory reduction for VGG models, reducing 40% of the memory consumption '
        f'with only less than 30% of overhead": ours, at most, {_list(best["vgg"])} for VGG.',
        f'"Less effect on ResNet models": ours has more, {_list(best["resnet"])}. It finds its cuts, at the ends of '
        "the residual blocks, where the paper's were placed by hand; we do not know where.",
        f'"SuperNeurons is able to reduce more memory consumption than MXNet-memonger": so in {deeper} of {len(rows)} '
        f'networks. "Its overhead is constantly higher": with both of its options so in {dearer}.',
        '"GeePS exhibits zero or nearly zero overhead within a wide range": without overhead ours reduces by '
        f"{span(narrow)}. Against Caffe, which frees nothing, that is {span(wide)}; {span(caffe)} take no swap at all, "
        "only frees.",
        f'"Comparable with SmartPool+AutoSwap. Under some conditions, its overhead is smaller": of the {len(gaps)} '
        f"points of GeePS {near} are within {CLOSE:.0%} of overhead of ours at the same reduction, {better} are below "
        f"and {worse} above. Where it reduces by half it moves {min(times):.1f} to {max(times):.1f} times as many "
        "bytes: it swaps what it does not pin in every gap.",
        '"The memory consumption of GeePS cannot be reduced further to what can be achieved by SmartPool+AutoSwap": '
        f"ours goes further in {further} of {len(rows)} networks, GeePS at {beyond} points, as it swaps in other gaps "
        "than those at the peak, too; the planner has none of what GeePS allocates when it builds the network.",
    ]


def _list(words: list[str]) -> str:
    return ", ".join(words) or "–"


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network."""
    with panel_grid(path, len(rows), 4, (3.9, 3.5), (0.4, 0.9)) as (grid, columns):
        for axes, row in zip(grid, rows, strict=True):
            for name in POOLS:
                points = reductions(row, name)
                points = points[points[:, 0].argsort()]
                ink = look(name)
                line = "-" if name in ("smartpool+autoswap", "geeps") else ""
                axes.plot(*points.T, ink.marker, color=ink.colour, linestyle=line, markersize=5, linewidth=1.6,
                          zorder=4 if name == "smartpool+autoswap" else 3)  # fmt: skip
                if name == "geeps":
                    caffe = reductions(row, name, row["caffe"])
                    axes.plot(*caffe[caffe[:, 0].argsort()].T, color=ink.colour, linewidth=1, linestyle=(0, (3, 2)))
                if name == "superneurons":
                    for mode, (x, y) in zip(("s", "r", "b"), reductions(row, name), strict=True):
                        axes.annotate(mode, (x, y), (0, 5), textcoords="offset points", ha="center",
                                      fontsize=9.5, color=ink.colour)  # fmt: skip
            axes.set(xlim=(0, 1), ylim=(-0.015, TOP), title=figures.label(row["network"]))
            axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for axes in grid[::columns]:
            axes.set_ylabel(f"overhead (up to {TOP:.0%})")
        for axes in grid[-columns:]:
            axes.set_xlabel("reduction of the footprint")
        fig = grid[0].figure
        keys = [
            Line2D([], [], color=look(n).colour, marker=look(n).marker, label=look(n).label + NAMED.get(n, ""),
                   linestyle="-" if n in ("smartpool+autoswap", "geeps") else "")
            for n in POOLS
        ]  # fmt: skip
        keys.append(Line2D([], [], color=look("geeps").colour, linewidth=1, linestyle=(0, (3, 2)),
                           label="GeePS, against Caffe, which frees nothing"))  # fmt: skip
        fig.legend(handles=keys, loc="outside lower center", ncols=5 if columns > 2 else 2, fontsize=10)
        fig.suptitle("Overhead against reduction of the footprint, batch size 100", x=0.01, ha="left", fontsize=13,
                     fontweight="bold", color=INK)  # fmt: skip
