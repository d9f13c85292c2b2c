"""Fig. 9 of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section VI-B-2: communication
overhead of AutoSwap with each of its four priority scores and with Bayesian optimisation (BO), across limits from 647
to 280 MB; VGG16, batch size 100, GTX 1080 Ti.

1. At our limits as many bytes must be swapped out as at the paper's (experiments/figures/smartpool.py).
2. BO begins with the four scores (agents/heuristics/autoswap_bo.py, choice 3); 30 evaluations; median over seeds.
3. The floor is what no plan of swaps can beat at a limit (agents/floor/).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.ticker import PercentFormatter
from omegaconf import DictConfig

import agents
from agents.floor import floor
from agents.heuristics.autoswap_bo import BASIC
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.smartpool import MB, ZERO, limits_of, our_limit, percent, planned, span, waits
from experiments.figures.smartpool_table1 import PAPER
from experiments.plotting.palette import FAINT, FLOOR, INK, look
from experiments.plotting.plots import figure, labels_at_right
from simulator import Machine

TITLE = "SmartPool, Fig. 9: overhead of AutoSwap's priority scores and of Bayesian optimisation"
SCORES = tuple(f"autoswap_{score}" for score in BASIC)
FREE = 447  # MB: the limit down to which the paper's overhead is zero
CLOSE, HIGHEST = 0.03, 0.2  # claimed: the scores differ by less, all are below


def tasks(settings: DictConfig) -> list[Row]:
    """One for the four scores and the floor, and one per seed of BO."""
    network = settings.network
    shared = {"network": network, "limits": sorted(limits_of(settings, network), reverse=True)}
    seeds = cli.values(settings, "seeds")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise cli.UsageError(f"figure.seeds: expected integers of at least 0, got {seed!r}")
    return [{**shared, "seed": None}, *({**shared, "seed": seed} for seed in seeds)]


def run(task: Row, machine: Machine) -> Row:
    """Overheads by planner, one per limit; the part of that at the lowest that the forward pass waits."""
    program = figures.program(task["network"], machine)
    limits = [our_limit(program, task["network"], limit) for limit in task["limits"]]
    seed = task["seed"]
    planners = {n: agents.make(n) for n in SCORES} if seed is None else {"bo": agents.make("autoswap_bo", seed=seed)}
    runs = {n: [planned(p, program, machine, limit) for limit in limits] for n, p in planners.items()}
    found = {n: [timeline.overhead for timeline in mine] for n, mine in runs.items()}
    if seed is None:
        found["floor"] = [floor(program, machine, limit, "swap").overhead for limit in limits]
    forward = sum(kernel.phase == "forward" for kernel in program.kernels)
    return {
        "load": program.peak_bytes,
        "ours": limits,
        "overheads": found,
        "forward": {n: sum(waits(mine[-1], program)[:forward]) / program.ideal_ns for n, mine in runs.items()},
    }


# ------------------------------------------------------------------------------------------ for people


class Lines:
    """The rows as arrays over the limits, float64[limits]; ``bo`` is [seeds, limits]."""

    def __init__(self, rows: list[Row]) -> None:
        first = next(row for row in rows if row["seed"] is None)
        self.network, self.paper, self.ours = first["network"], first["limits"], first["ours"]
        self.scores = np.array([first["overheads"][name] for name in SCORES])
        self.floor = np.array(first["overheads"]["floor"])
        self.bo = np.array([row["overheads"]["bo"] for row in rows if row["seed"] is not None])
        self.load, self.forward = first["load"], [first["forward"][name] for name in SCORES]

    def free(self, overheads: np.ndarray) -> float:
        """The lowest limit of the paper at which there is no overhead, nor at any above it."""
        paid = np.flatnonzero(overheads > ZERO)
        return float(self.paper[paid[0] - 1 if len(paid) else -1]) if not len(paid) or paid[0] else np.nan


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per limit."""
    lines = Lines(rows)
    heads = ["limit, MB: paper", "ours", *(look(n).label.split()[-1] for n in SCORES), "BO", "BO, seeds", "floor"]
    cells = []
    for i, (paper, ours) in enumerate(zip(lines.paper, lines.ours, strict=True)):
        bo = lines.bo[:, i]
        spread = f"{percent(bo.min())}–{percent(bo.max())}" if bo.max() - bo.min() > ZERO else "same"
        cells.append([
            f"{paper:g}", f"{ours / MB:,.0f}", *map(percent, lines.scores[:, i]), percent(float(np.median(bo))),
            spread, percent(lines.floor[i]),
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """The paper's claims, each beside what we find."""
    lines = Lines(rows)
    aoa, doa, wdoa, swdoa = lines.scores
    bo, best = np.median(lines.bo, axis=0), lines.scores.min(axis=0)
    paid = lines.scores.max(axis=0) > ZERO
    weighted = int((np.minimum(wdoa, swdoa) <= np.minimum(aoa, doa) + ZERO)[paid].sum())
    spread = lines.scores.max(axis=0) - best
    worst, low = int(spread.argmax()), int(lines.scores.max(axis=0).argmax())
    falls, drops = ((np.diff(some) < -ZERO).sum() for some in (bo, lines.scores))
    better = int((bo < best - ZERO).sum())
    paper = PAPER[lines.network]["load"]
    out = [
        f"A limit of ours asks for as many MB to leave as the paper's: its load is {paper:g} MB, ours "
        f"{lines.load / MB:,.0f} MB, the difference being what SINGA keeps and never swaps (see Table I).",
        '"WDOA and SWDOA exhibit lower overhead under most of the memory load limits": the better of them is no worse '
        f"than the better of AOA and DOA at {weighted} of the {paid.sum()} limits at which any score has overhead.",
        f'"Differ by less than 3% overhead": ours do at {(spread < CLOSE).sum()} of {len(spread)} limits; the most is '
        f"{100 * spread[worst]:.1f} points at {lines.paper[worst]:g} MB.",
        f'"Less than 20 % throughout the experiment": ours are at {(lines.scores.max(axis=0) < HIGHEST).sum()} of '
        f"{len(spread)} limits; the most is {percent(lines.scores.max())} at {lines.paper[low]:g} MB.",
        '"The use of BO safeguards the overhead to be no larger than the minimum of the 4 PS": so it does by '
        f"construction; it is lower at {better} limits. Over {len(lines.bo)} seeds its overhead differs by at most "
        f"{100 * np.ptp(lines.bo, axis=0).max():.1f} points.",
        f'"Zero overhead with the memory load reduced to {FREE} MB": BO has none down to {lines.free(bo):g} MB, the '
        f"best score alone down to {lines.free(best):g} MB, and the floor is 0 down to {lines.free(lines.floor):g} MB, "
        "so that a plan without overhead may exist there.",
        f'"Does not always monotonically increase with lower memory load": it falls at {drops} of {4 * (len(bo) - 1)} '
        f"steps of the four scores and at {falls} of {len(bo) - 1} of BO.",
    ]
    if lines.scores.max() >= HIGHEST:
        out.append(
            f"Ours are above 20% near load_min for the backward pass: at {lines.paper[-1]:g} MB the forward pass waits "
            f"{span(lines.forward)} of an iteration. Our load_min lies in the backward pass, the paper's at the start "
            "of the iteration (Fig. 8), so that swap-ins find no room beside the gradients."
        )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """Overhead against the limit; the paper's limits below, ours above."""
    lines = Lines(rows)
    with figure(path, 10.0, 5.6) as axes:
        # A tighter limit has no lower floor: between two limits that of the wider one holds.
        x, y = [*lines.paper, min(lines.paper) - 5], [*lines.floor, lines.floor[-1]]
        axes.fill_between(x, -0.003, y, step="post", color=FLOOR, linewidth=0, zorder=1)
        axes.axvline(FREE, color=FAINT, linewidth=1, linestyle=(0, (5, 3)))
        top = 1.08 * max(lines.scores.max(), 0.02)
        axes.set(xlim=(max(lines.paper) + 5, min(lines.paper) - 5), ylim=(-0.003, top))
        axes.annotate("the paper's limit\nof no overhead", (FREE, top), (4, -4), textcoords="offset points", va="top",
                      fontsize=9.5, color=INK)  # fmt: skip
        levels = []
        for name, overheads in zip(SCORES, lines.scores, strict=True):
            ink = look(name)
            axes.plot(lines.paper, overheads, ink.marker, color=ink.colour, markersize=5, linestyle="-", linewidth=1.2)
            levels.append((float(overheads[-1]), f"{ink.label.split()[-1]} {overheads[-1]:.0%}", ink.colour))
        ink, bo = look("autoswap_bo"), np.median(lines.bo, axis=0)
        axes.fill_between(lines.paper, lines.bo.min(axis=0), lines.bo.max(axis=0), color=ink.colour, alpha=0.25,
                          linewidth=0)  # fmt: skip
        axes.plot(lines.paper, bo, color=ink.colour, linewidth=2.6, zorder=4)
        levels += [
            (float(bo[-1]), f"BO {bo[-1]:.0%}", ink.colour),
            (float(lines.floor[-1]), f"floor {lines.floor[-1]:.0%}", FAINT),
        ]
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlabel("memory load limit of the paper (MB)")
        axes.set_ylabel("overhead of an iteration")
        shift = lines.paper[0] - lines.ours[0] / MB
        above = axes.secondary_xaxis("top", functions=(lambda v: v - shift, lambda v: v + shift))
        above.set_xlabel("our limit, at which as much must leave (MB)", fontsize=10)
        above.tick_params(labelsize=9.5)
        labels_at_right(axes, levels)
        axes.figure.suptitle(
            f"{figures.label(lines.network)}, batch size 100, GTX 1080 Ti: overhead of AutoSwap by priority score",
            x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK,
        )  # fmt: skip
        axes.figure.supxlabel("BO: the median of the seeds, and the band of all. Grey: no plan of swaps can be there.",
                              x=0.01, ha="left", fontsize=10, color=INK)  # fmt: skip
