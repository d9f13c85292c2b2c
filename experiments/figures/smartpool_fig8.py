"""Fig. 8 of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section VI-B-1: memory load of
VGG16 over one iteration, without swaps, with AutoSwap at limits of 500 and 400 MB, and the least, load_min; batch size
100, GTX 1080 Ti.

1. At our limits as many bytes must be swapped out as at the paper's (experiments/figures/smartpool.py).
2. Plans are AutoSwap's with Bayesian optimisation; the curve is the simulated steady state, with its waits.
3. load_min: all candidates are swapped synchronously; the curve is drawn without that time, which the table has.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from omegaconf import DictConfig

import agents
from agents.heuristics.autoswap import peak_gaps
from agents.planner import Candidates
from experiments import figures
from experiments.common.report import MB as MEGABYTE, Row
from experiments.figures.smartpool import MB, limits_of, our_limit, percent, planned
from experiments.figures.smartpool_table1 import PAPER
from experiments.plotting import plots
from experiments.plotting.palette import FAINT, GRID, LOAD, SWAPPED
from experiments.plotting.plots import figure
from simulator import Machine, Plan, Program, Swap, Timeline, simulate

TITLE = "SmartPool, Fig. 8: memory load with AutoSwap"
LEAST = 280  # MB: the lowest limit of Fig. 9, "slightly above the load_min"
NONE, MINIMUM = "no swap", "load_min"


def tasks(settings: DictConfig) -> list[Row]:
    """One per curve."""
    network, limits = settings.network, limits_of(settings, settings.network)
    curves: list[Row] = [{"curve": NONE, "limit": None}, {"curve": MINIMUM, "limit": None}]
    curves += [{"curve": f"limit {limit:g} MB", "limit": limit} for limit in limits]
    return [{"network": network, **curve} for curve in curves]


def run(task: Row, machine: Machine) -> Row:
    """Steps of the curve: ms and MB; the run's figures in bytes and ns."""
    program = figures.program(task["network"], machine)
    if task["curve"] == MINIMUM:
        found, timeline = load_min(program, machine)
        x, y = np.array(program.start_ns) / 1e6, np.append(found, found[-1]) / MB
        peak, limit = int(found.max()), None
        gradients = gradient_bytes(program, int(found.argmax()))
    elif task["limit"] is None:
        timeline = simulate(program, Plan(), machine, program.peak_bytes)
        peak, limit = timeline.peak_bytes, None
    else:
        limit = our_limit(program, task["network"], task["limit"])
        timeline = planned(agents.make("autoswap_bo"), program, machine, limit)
        peak = timeline.peak_bytes
    if task["curve"] != MINIMUM:
        x, y = plots.steady_memory(timeline)
        y = y * MEGABYTE / MB
    out = [s for s in timeline.spans if s.kind == "swap_out" and s.start_ns >= timeline.last_start_ns]
    return {
        "ours": limit,
        "load": program.peak_bytes,
        "peak": peak,
        "gradients": gradients if task["curve"] == MINIMUM else None,
        "peak_ms": float(x[int(np.argmax(y))]),
        "iteration_ns": timeline.iteration_ns,
        "ideal_ns": program.ideal_ns,
        "moved": sum(program.tensors[s.index].nbytes for s in out),
        "swaps": len(out),
        "curve_points": [[round(float(a), 4), round(float(b), 3)] for a, b in zip(x, y, strict=True)],
    }


def load_min(program: Program, machine: Machine) -> tuple[np.ndarray, Timeline]:
    """Load per kernel (int64[n]) when every candidate of AutoSwap is away, and the run of its synchronous swaps."""
    candidates = Candidates(program, peak_gaps(program))
    load = candidates.residency(np.ones(len(candidates), dtype=bool))
    n = len(program.kernels)
    swaps = tuple(Swap(*g, prefetch=(g.before - 1) % n, sync=True) for g in candidates.gaps)
    return load, simulate(program, Plan(swaps), machine, program.peak_bytes)


def gradient_bytes(program: Program, kernel: int) -> int:
    """Bytes of gradients that are alive while a kernel runs."""
    alive = [uses[0] <= kernel <= uses[-1] if uses else False for uses in program.accesses]
    return sum(t.nbytes for t, here in zip(program.tensors, alive, strict=True) if here and t.kind == "gradient")


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per curve."""
    heads = ["MB", "the paper's limit", "ours", "peak load", "at, ms", "swapped out", "in swaps", "overhead"]
    cells = []
    for row in rows:
        limits = [f"{row['limit']:,.0f}", f"{row['ours'] / MB:,.0f}"] if row["limit"] else ["", ""]
        cells.append([
            row["curve"], *limits, f"{row['peak'] / MB:,.0f}", f"{row['peak_ms']:.1f}", f"{row['moved'] / MB:,.0f}",
            str(row["swaps"]), percent(overhead(row)),
        ])  # fmt: skip
    return heads, cells


def overhead(row: Row) -> float:
    """Of an iteration with swaps."""
    return float(row["iteration_ns"] / row["ideal_ns"] - 1)


def notes(rows: list[Row]) -> list[str]:
    """How limits are taken over, and what the text says of the figure."""
    network, load = rows[0]["network"], rows[0]["load"] / MB
    name, paper = figures.label(network), PAPER[network]["load"]
    least = next(row for row in rows if row["curve"] == MINIMUM)
    away, theirs = load - least["peak"] / MB, paper - LEAST
    if least["peak_ms"] < 0.5 * least["ideal_ns"] / 1e6:
        where = "near the start"
    else:
        where = f"in the backward pass, where {least['gradients'] / MB:,.0f} MB are gradients, which are no candidates"
    return [
        f"{name}'s load is {load:,.0f} MB here and {paper:,.0f} MB in the paper, where SINGA keeps things that never "
        "leave (see Table I). A limit of ours is therefore the one at which as many MB must leave.",
        f"So taken, load_min agrees: at most {away:,.0f} MB can leave, {theirs:,.0f} MB or slightly more in the paper "
        f"({LEAST} MB is slightly above its load_min).",
        f'The paper\'s load_min peaks "at the start of the iteration (or at the end of the iteration in other cases)"; '
        f"ours at {least['peak_ms']:.1f} of {least['ideal_ns'] / 1e6:.0f} ms, {where}. Its synchronous transfers would "
        f"cost {overhead(least):.0%}.",
        "The text has no other numbers of the figure.",
    ]


def draw(rows: list[Row], path: Path) -> None:
    """All curves in one pair of axes, limits dashed."""
    order = sorted(rows, key=lambda row: -row["peak"])
    inks = [FAINT, *SWAPPED][: len(order) - 1] + [LOAD]
    with figure(path, 9.5, 5.0) as axes:
        for row, ink in zip(order, inks, strict=True):
            x, y = zip(*row["curve_points"], strict=True)
            words = f"{row['curve']}: peak {row['peak'] / MB:,.0f} MB"
            if row["limit"]:
                words = (
                    f"paper's limit {row['limit']:g} MB, ours {row['ours'] / MB:,.0f} MB: "
                    f"{percent(overhead(row))} overhead"
                )
                axes.axhline(row["ours"] / MB, color=ink, linewidth=1, linestyle=(0, (5, 3)))
            if row["curve"] == NONE:
                axes.fill_between(x, y, step="post", color=GRID, linewidth=0)
            axes.step(x, y, where="post", color=ink, linewidth=1.5, label=words)
        axes.set(
            xlim=(0, max(row["curve_points"][-1][0] for row in rows)), ylim=(0, 1.42 * order[0]["peak"] / MB),
            xlabel="time in the iteration (ms)", ylabel="memory load (MB)",
            title=f"{figures.label(rows[0]['network'])}, batch size 100, GTX 1080 Ti: load with AutoSwap",
        )  # fmt: skip
        axes.legend(loc="upper right", fontsize=10)
