"""Figures. Every colour and label of the project is in this file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from experiments.report import MB, Row
from simulator.timeline import Timeline

INK, FAINT, LIMIT = "#222222", "#9a9a9a", "#222222"
COLOURS = {
    "none": "#222222",
    "random": "#9a9a9a",
    "autoswap_doa": "#a6cee3",
    "autoswap_aoa": "#5aa5d6",
    "autoswap_wdoa": "#1f78b4",
    "autoswap_swdoa": "#08306b",
    "superneurons": "#e69f00",
    "annealing": "#2ca25f",
    "dqn": "#d6336c",
    "dqn_greedy": "#f783ac",
    "dqn_paper": "#7b3294",
    "dqn_paper_greedy": "#c2a5cf",
}
LABELS = {
    "none": "no plan",
    "random": "random",
    "autoswap_doa": "AutoSwap DOA",
    "autoswap_aoa": "AutoSwap AOA",
    "autoswap_wdoa": "AutoSwap WDOA",
    "autoswap_swdoa": "AutoSwap SWDOA",
    "superneurons": "SuperNeurons",
    "annealing": "simulated annealing",
    "dqn": "DQN",
    "dqn_greedy": "DQN, greedy policy",
    "dqn_paper": "DQN, as in the paper",
    "dqn_paper_greedy": "DQN, as in the paper, greedy policy",
}
MARKERS = "os^Dvp*Xh<>P"
STYLE = {
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": "#eeeeee", "axes.axisbelow": True,
    "legend.frameon": False,
}  # fmt: skip


def colour(planner: str) -> str:
    """The planner's colour; one that is not known takes one from a fixed cycle, by its name."""
    spare = ("#8c564b", "#17becf", "#bcbd22", "#e377c2")
    return COLOURS.get(planner, spare[sum(planner.encode()) % len(spare)])


def label(planner: str) -> str:
    """The planner's name for people."""
    return LABELS.get(planner, planner)


@contextmanager
def figure(path: Path, width: float = 8.0, height: float = 4.2) -> Iterator[Axes]:
    """One pair of axes, saved as PNG at the end: whole or not at all."""
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), layout="constrained")
        yield fig.subplots()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        fig.savefig(temporary, format="png", dpi=150)
        os.replace(temporary, path)


def steady_memory(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """The memory curve of the last simulated iteration, as steps.

    Returns:
        float64[n] time in ms from its start, float64[n] MB in use from then on.
    """
    end = timeline.boundaries[-1]
    begin = timeline.boundaries[-2] if len(timeline.boundaries) > 1 else 0
    times, used = (np.array(column, dtype=float) for column in zip(*timeline.memory, strict=True))
    first = int(np.searchsorted(times, begin, side="right")) - 1
    last = int(np.searchsorted(times, end, side="right")) - 1
    x = np.append(np.clip(times[first : last + 1], begin, end), end)
    y = np.append(used[first : last + 1], used[last])
    return (x - begin) / 1e6, y / MB


def memory_curve(path: Path, before: Timeline, after: Timeline, machine: str, planner: str) -> None:
    """Bytes in use over one iteration, without and with the plan, and the limit."""
    limit = after.limit / MB
    with figure(path) as axes:
        (x0, y0), (x1, y1) = steady_memory(before), steady_memory(after)
        axes.fill_between(x0, y0, step="post", color="#e9e9e9", linewidth=0)
        axes.step(x0, y0, where="post", color=FAINT, linewidth=1.3, label=f"no plan: peak {y0.max():,.0f} MB")
        name = f"{label(planner)} plan: peak {y1.max():,.0f} MB, {after.overhead:+.1%} time"
        axes.step(x1, y1, where="post", color=colour(planner), linewidth=1.5, label=name)
        percent = after.limit / before.peak_bytes
        axes.axhline(limit, color=LIMIT, linewidth=1.3, linestyle=(0, (5, 3)),
                     label=f"limit: {limit:,.0f} MB, {percent:.0%} of the peak")  # fmt: skip
        axes.set(
            xlim=(0, max(x0[-1], x1[-1])), ylim=(0, 1.28 * max(y0.max(), y1.max(), limit)),
            xlabel="time in the iteration (ms)", ylabel="GPU memory in use (MB)",
            title=f"{before.program} on {machine}: one training iteration",
        )  # fmt: skip
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.legend(loc="upper left", ncols=1, fontsize=10, handlelength=1.6)


def learning_curve(path: Path, history: Sequence[Any], rows: Sequence[Row], planner: str, title: str) -> None:
    """Overhead of every training episode, the best so far, and the other planners' as level lines.

    Args:
        history: episodes with ``episode``, ``overhead``, ``feasible`` and ``best_overhead``.
        rows: what the other planners achieved.
    """
    with figure(path, 9.0, 4.8) as axes:
        good = [e for e in history if e.feasible]
        bad = [e.episode for e in history if not e.feasible]
        found = [e for e in history if np.isfinite(e.best_overhead)]
        axes.scatter([e.episode for e in good], [e.overhead for e in good], s=9, color=colour(planner), alpha=0.3,
                     linewidths=0, label="one training episode")  # fmt: skip
        if bad:
            axes.plot(bad, [0.985] * len(bad), "|", color=FAINT, markersize=6, alpha=0.5, clip_on=False,
                      transform=axes.get_xaxis_transform(), label="episode with no plan in the limit")  # fmt: skip
        levels = []
        for r in rows:
            if r["feasible"] and r["planner"] not in (planner, f"{planner}_greedy", "none"):
                axes.axhline(r["overhead"], color=colour(r["planner"]), linewidth=1.1, linestyle=(0, (5, 3)))
                levels.append((r["overhead"], f"{label(r['planner'])} {r['overhead']:.2%}", colour(r["planner"])))
        if found:
            x, y = [e.episode for e in found], [e.best_overhead for e in found]
            axes.step(x, y, where="post", color=colour(planner), linewidth=2.4, label="best plan so far")
            levels.append((y[-1], f"{label(planner)} {y[-1]:.2%}", colour(planner)))
        shown = [e.overhead for e in good] + [level[0] for level in levels]
        _overhead_axis(axes, max(shown, default=0.01))
        _labels_at_right(axes, levels)
        axes.set(xlabel="training episode", ylabel="overhead over the ideal time", title=title)
        axes.set_xlim(0, max([e.episode for e in history], default=1) + 1)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize=9.5, markerscale=1.6)


def overhead_by_limit(path: Path, rows: Sequence[Row], title: str) -> None:
    """Overhead against the limit, one line a planner; a planner's line ends where it finds no plan."""
    with figure(path, 9.0, 4.8) as axes:
        names = list(dict.fromkeys(r["planner"] for r in rows))
        top = max([r["overhead"] for r in rows if r["feasible"]], default=0.01)
        tightest = min((r["limit_fraction"] for r in rows), default=1)
        levels = []
        for i, name in enumerate(names):
            mine = sorted((r["limit_fraction"], r["overhead"]) for r in rows if r["planner"] == name and r["feasible"])
            if not mine:
                continue
            x, y = zip(*mine, strict=True)
            axes.plot(x, y, color=colour(name), marker=MARKERS[i % len(MARKERS)], markersize=5, linewidth=1.7)
            reach = "" if x[0] == tightest else f", to {x[0]:.0%}"
            levels.append((y[0], f"{label(name)}{reach}", colour(name)))
        _overhead_axis(axes, top)
        _labels_at_right(axes, levels)
        axes.invert_xaxis()
        limits = sorted({r["limit_fraction"] for r in rows})
        if len(limits) <= 12:
            axes.xaxis.set_ticks(limits)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set(xlabel="memory limit, of the program's peak (tighter to the right)",
                 ylabel="overhead over the ideal time", title=title)  # fmt: skip


def _overhead_axis(axes: Axes, top: float) -> None:
    """Overhead in per cent: linear up to 1 %, logarithmic above, so that 0, 2 % and 80 % can all be read."""
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.7)
    ticks = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_ylim(-0.0003, 1.3 * max(top, 0.01))  # a line at 0 is seen whole
    axes.yaxis.set_ticks([t for t in ticks if t <= 1.3 * max(top, 0.01)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
    axes.yaxis.set_minor_locator(NullLocator())


def _labels_at_right(axes: Axes, levels: list[tuple[float, str, str]], gap: float = 0.052) -> None:
    """Names lines at their right ends, (value, text, colour) each, moved apart where they would touch."""
    to_axes = axes.transData + axes.transAxes.inverted()
    places = sorted((to_axes.transform((0, v))[1], text, ink) for v, text, ink in levels)
    ys = [p[0] for p in places]
    for i in range(1, len(ys)):
        ys[i] = max(ys[i], ys[i - 1] + gap)
    ceiling = 1.0
    for i in reversed(range(len(ys))):  # back down from the top edge
        ys[i] = min(ys[i], ceiling)
        ceiling = ys[i] - gap
    for y, (_, text, ink) in zip(ys, places, strict=True):
        axes.text(1.015, y, text, transform=axes.transAxes, color=ink, fontsize=9.5, va="center")
