"""Plots of memory, trainings and overhead by limit, and output files of a training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter
from scipy.optimize import isotonic_regression

from experiments.common import report
from experiments.common.report import ABLATION, MIB, Row
from experiments.plotting import palette
from experiments.plotting.palette import FAINT, FLOOR, INK, LIMIT, Look, color, label, look
from simulator import simulate
from simulator.files import write_json
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import Timeline

Levels = list[tuple[float, str, str]]  # labels at the right ends of lines: value, name, color
BOTTOM = -0.0003  # of a logarithmic axis, so that a line at 0 is not clipped
DOTTED = (0, (1, 1.2))
HATCH = "////"


@contextmanager
def figure(path: Path, width: float = 8.0, height: float = 4.2, rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Yields axes (one pair, or an array [rows, columns]) and saves them as PNG atomically at the end."""
    with style.context(Path(__file__).with_name("headroom.mplstyle")):
        fig = Figure(figsize=(width, height), layout="constrained")
        yield fig.subplots(rows, columns)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        fig.savefig(temporary, format="png", dpi=150)
        os.replace(temporary, path)


@contextmanager
def panel_grid(
    path: Path, n: int, max_columns: int, size: tuple[float, float], margins: tuple[float, float]
) -> Iterator[tuple[list[Axes], int]]:
    """Yields ``n`` axes in rows of at most ``max_columns`` and the number of columns; saves them as ``figure`` does.

    Args:
        path: Picture to write.
        size: Width and height of each pair of axes, in inches.
        margins: Additional width and height of the whole picture, in inches.
    """
    columns = min(n, max_columns)
    rows = -(-n // columns)
    width = size[0] * columns + margins[0]
    height = size[1] * rows + margins[1]
    with figure(path, width, height, rows, columns) as axes_grid:
        grid = list(np.atleast_1d(axes_grid).flat)
        for axes in grid[n:]:
            axes.set_axis_off()
        yield grid[:n], columns


def steady_memory(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Returns the memory curve of the last simulated iteration, as steps.

    Returns:
        float64[n], time in ms since the start of the iteration; float64[n], MiB in use from that time on.
    """
    end = timeline.boundaries[-1]
    begin = timeline.last_start_ns
    times, used = (np.array(column, dtype=float) for column in zip(*timeline.memory, strict=True))
    first = int(np.searchsorted(times, begin, side="right")) - 1
    last = int(np.searchsorted(times, end, side="right")) - 1
    x = np.append(np.clip(times[first : last + 1], begin, end), end)
    y = np.append(used[first : last + 1], used[last])
    return (x - begin) / 1e6, y / MIB


def memory_curve(
    path: Path, before: Timeline, after: Timeline | None, machine: str, planner: str, limit: int | None = None
) -> None:
    """Plots memory over one iteration, unplanned and (if given) planned, with the limit (default: the plan's)."""
    limit_mib = (after.limit if limit is None and after is not None else limit or 0) / MIB
    with figure(path) as axes:
        x0, y0 = steady_memory(before)
        right = x0[-1]
        top = max(y0.max(), limit_mib)
        axes.fill_between(x0, y0, step="post", color="#e9e9e9", linewidth=0)
        axes.step(x0, y0, where="post", color=FAINT, linewidth=1.3, label=f"no plan: peak {y0.max():,.0f} MiB")
        if after is not None:
            x1, y1 = steady_memory(after)
            right = max(right, x1[-1])
            top = max(top, y1.max())
            name = f"{label(planner)} plan: peak {y1.max():,.0f} MiB, {after.overhead:+.1%} time"
            axes.step(x1, y1, where="post", color=color(planner), linewidth=1.5, label=name)
        percent = limit_mib * MIB / before.peak_bytes
        finding = "no plan" if after is None else f"{after.overhead:+.1%} time"
        axes.axhline(
            limit_mib,
            color=LIMIT,
            linewidth=1.3,
            linestyle=(0, (5, 3)),
            label=f"limit: {limit_mib:,.0f} MiB, {percent:.0%} of the peak",
        )
        axes.set(
            xlim=(0, right),
            ylim=(0, 1.28 * top),
            xlabel="time in the iteration (ms)",
            ylabel="GPU memory in use (MiB)",
            title=f"{before.program} on {machine}: {finding} in {percent:.0%} of memory (simulated)",
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.legend(loc="upper left", ncols=1, fontsize=10, handlelength=1.6)


def learning_curve(path: Path, history: Sequence[Any], rows: Sequence[Row], planner: str, title: str) -> None:
    """Plots the overhead of every training episode and the best so far, with the other planners as level lines.

    Args:
        history: Episodes with ``episode``, ``overhead``, ``feasible`` and ``best_overhead``.
        rows: Results of the other planners.
        path: Picture to write.
        planner: Name of the trained planner, whose rows are not drawn.
        title: Title.
    """
    with figure(path, 9.0, 4.8) as axes:
        valid = [e for e in history if e.feasible]
        invalid = [e.episode for e in history if not e.feasible]
        planned = [e for e in history if np.isfinite(e.best_overhead)]
        axes.scatter(
            [e.episode for e in valid],
            [e.overhead for e in valid],
            s=9,
            color=color(planner),
            alpha=0.3,
            linewidths=0,
            label="one training episode",
        )
        if invalid:
            axes.plot(
                invalid,
                [0.985] * len(invalid),
                "|",
                color=FAINT,
                markersize=6,
                alpha=0.5,
                clip_on=False,
                transform=axes.get_xaxis_transform(),
                label="episode with no plan in the limit",
            )
        levels = []
        for r in rows:
            if r["feasible"] and r["planner"] not in (planner, f"{planner}_greedy", "none"):
                axes.axhline(r["overhead"], color=color(r["planner"]), linewidth=1.1, linestyle=(0, (5, 3)))
                levels.append((r["overhead"], f"{label(r['planner'])} {r['overhead']:.2%}", color(r["planner"])))
        if planned:
            x = [e.episode for e in planned]
            y = [e.best_overhead for e in planned]
            axes.step(x, y, where="post", color=color(planner), linewidth=2.4, label="best plan so far")
            levels.append((y[-1], f"{label(planner)} {y[-1]:.2%}", color(planner)))
        overheads = [e.overhead for e in valid] + [level[0] for level in levels]
        _overhead_axis(axes, max(overheads, default=0.01))
        floor = rows[0]["bound_overhead"] if rows else None
        if floor is not None:
            axes.axhspan(BOTTOM, floor, color=FLOOR, linewidth=0, label=f"no plan can be here: floor {floor:.2%}")
        labels_at_right(axes, levels)
        axes.set(xlabel="training episode", ylabel="overhead over the ideal time", title=title)
        axes.set_xlim(0, max([e.episode for e in history], default=1) + 1)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize=9.5, markerscale=1.6)


def edit_learning(
    path: Path,
    history: Sequence[Mapping[str, float]],
    points: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    title: str,
) -> None:
    """Plots a training of the DQN by simulator calls: overhead, hit rate of edits, and temporal-difference error.

    Args:
        history: Rows of ``agents.learned.dqn.DQN.iterate``.
        points: Points of curve.json.
        rows: Results of the planners.
        path: Picture to write.
        title: Title.
    """
    with figure(path, 12.6, 4.2, columns=3) as (overhead, hits, error):
        calls = [row["calls"] for row in history]
        greedy = [(p["calls"], p["greedy/overhead"]) for p in points if p["greedy/overhead"] is not None]
        finished = [(row["calls"], row["overhead"]) for row in history if "overhead" in row]
        if finished:
            overhead.scatter(
                *zip(*finished, strict=True),
                s=9,
                color=color("dqn"),
                alpha=0.35,
                linewidths=0,
                label="episodes that ended, mean",
            )
        overhead.plot(
            *zip(*greedy, strict=True),
            color=color("dqn"),
            linewidth=2.2,
            marker="o",
            markersize=4,
            label="greedy policy",
        )
        for row, style in zip(
            (r for r in rows if r["feasible"] and r["planner"].startswith((ABLATION, "dqn, before"))),
            ((0, (5, 3)), (0, (1, 1.5)), "-.", (0, (3, 1, 1, 1))),
            strict=False,
        ):
            overhead.axhline(row["overhead"], color=FAINT, linewidth=1.1, linestyle=style, label=row["planner"])
        _overhead_axis(overhead, max([y for _, y in [*greedy, *finished]], default=0.01))
        overhead.set(xlabel="simulator calls", title="overhead over the ideal time")
        overhead.figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        for axes, keys, name in (
            (hits, (("hits", "chosen by Q"), ("hits_random", "at random")), "edits that improve the plan"),
            (error, (("td", "temporal difference"), ("loss", "Huber loss")), "error of Q, in log reward"),
        ):
            for (key, text), style in zip(keys, ("-", (0, (5, 3))), strict=True):
                samples = [(c, row[key]) for c, row in zip(calls, history, strict=True) if key in row]
                if samples:
                    axes.plot(
                        *zip(*samples, strict=True), color=color("dqn"), linestyle=style, linewidth=1.4, label=text
                    )
            axes.set(xlabel="simulator calls", title=name)
            axes.set_ylim(0, None)
        hits.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
        for axes in (overhead, hits, error):
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8.5)


def unseen_learning(
    path: Path,
    points: Sequence[Mapping[str, Any]],
    levels: Mapping[str, Sequence[Sequence[float]]],
    names: Sequence[str],
    floor: float,
) -> None:
    """Plots the greedy policy's overhead on unseen tasks during a training from scratch, above its controls.

    Args:
        path: Picture to write.
        points: ``calls`` and ``overheads`` (by task and seed) of each test.
        levels: overheads (by task and seed) of the controls.
        names: the tasks.
        floor: mean certified lower bound.
    """
    with figure(path, 9.0, 4.8) as axes:
        calls = [point["calls"] for point in points]
        overheads = np.array([point["overheads"] for point in points])  # (points, tasks, seeds)
        ink = color("dqn")
        for k, name in enumerate(names):
            axes.plot(
                calls, overheads[:, k].mean(1), color=ink, linewidth=1, alpha=0.4, marker="os^DvP"[k % 6], label=name
            )
        means = overheads.mean((1, 2))
        axes.plot(calls, means, color=ink, linewidth=2.6, label="mean")
        labels: Levels = [(means[-1], f"greedy policy {means[-1]:.1%}", ink)]
        for (name, values), style in zip(levels.items(), ("--", ":", "-."), strict=False):
            level = float(np.mean(values))
            axes.axhline(level, color=INK, linewidth=1.2, linestyle=style)
            labels.append((level, f"{name} {level:.1%}", INK))
        _overhead_axis(axes, max(overheads.max(), *(np.max(values) for values in levels.values())))
        axes.axhline(floor, color=FAINT, linewidth=1.2)
        labels.append((floor, f"mean floor {floor:.1%}", FAINT))
        axes.set_xlim(0, max(calls[-1], 1))
        axes.set_ylim(bottom=0.7 * min(overheads.min(), floor))
        labels_at_right(axes, labels)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.set(
            xlabel="simulator calls of the training, on other programs",
            ylabel="overhead on unseen programs",
            title=f"Greedy policy of a DQN from scratch on unseen programs: {means[-1]:.1%} (simulated)",
        )
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, fontsize=9.5)


def overhead_by_limit(path: Path, rows: Sequence[Row], title: str, scale: str = "log") -> None:
    """Plots overhead against the limit: one line per planner above the certified lower bound.

    A line ends where its planner finds no plan. Up to eight planners share one panel. A larger number gets a panel
    per family of methods, and one with the best of each family.

    Args:
        rows: Certified results for one or more limits.
        scale: Scale of the overhead axis, "log" or "linear".
        path: Picture to write.
        title: Title.
    """
    lines: dict[str, dict[float, float]] = {}  # overhead by limit, per planner
    for r in rows:
        line = lines.setdefault(r["planner"], {})
        if r["feasible"]:
            line[r["limit_fraction"]] = r["overhead"]
    is_split = len(lines) > 8
    families: dict[str, list[str]] = {}
    for name in sorted(lines, key=[*palette.LOOKS, *lines].index):
        families.setdefault(palette.family(name) if is_split else "", []).append(name)
    best = least_overheads(lines.values())
    top = _top(scale, [y for line in lines.values() for y in line.values()], [*best.values()])
    size, margins = ((4.95, 3.1), (0.0, 0.8)) if is_split else ((9.0, 5.0), (0.0, 0.0))
    with panel_grid(path, len(families) + is_split, 2, size, margins) as (grid, columns):
        for axes, (heading, names) in zip(grid, families.items(), strict=False):
            curves = [(lines[name], look(name)) for name in names if lines[name] or name != "none"]
            _panel(axes, rows, curves, best if is_split else {}, top, scale)
            axes.set_title(heading)
        if is_split:
            curves = [
                (least_overheads(lines[name] for name in names), Look(heading, palette.HUES[heading].color, marker))
                for (heading, names), marker in zip(families.items(), "osD^vPX", strict=False)
            ]
            _panel(grid[-1], rows, curves, best, top, scale)
            grid[-1].set_title("the best of each family")
        for axes in grid[::columns]:
            axes.set_ylabel("overhead over the ideal time")
        for axes in grid[-columns:]:
            axes.set_xlabel("memory limit, of the program's peak")
        keys = [Patch(color=FLOOR, label="the floor: no plan can be here")]
        if grid[0].patches:  # hatched
            keys.append(Patch(facecolor="white", edgecolor=FAINT, hatch=HATCH, label="no plan fits (proven)"))
        if is_split:
            keys.append(Line2D([], [], color=INK, linewidth=1, linestyle=DOTTED, label="the best planner"))
        text = f"one run of each planner, seed {rows[0].get('seed', 0)}"
        grid[0].figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=9.5, title=text)
        grid[0].figure.suptitle(f"{title} (simulated)", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)


def leaders(rows: Sequence[Row]) -> str:
    """Says which planners have the least overhead at most limits that not every planner solves without any."""
    by_limit: dict[float, dict[str, float]] = {}
    for row in rows:
        found = by_limit.setdefault(row["limit_fraction"], {})
        if row["feasible"]:
            found[row["planner"]] = row["overhead"]
    paid = [found for found in by_limit.values() if found and min(found.values()) > 0]
    if not paid:
        return "no overhead at any limit" if any(by_limit.values()) else "no plan"
    firsts = [name for found in paid for name in found if found[name] <= min(found.values())]
    most = max(map(firsts.count, firsts))
    names = ", ".join(label(name) for name in dict.fromkeys(firsts) if firsts.count(name) == most)
    return f"{names}: lowest at {most} of {len(paid)} limits with overhead"


def least_overheads(lines: Iterable[dict[float, float]]) -> dict[float, float]:
    """Returns the least overhead at each limit."""
    out: dict[float, float] = {}
    for line in lines:
        for x, y in line.items():
            out[x] = min(y, out.get(x, y))
    return out


def _top(scale: str, overheads: list[float], best: list[float]) -> float:
    """Returns the upper limit of the overhead axis; the linear scale cuts off large overheads."""
    top = max(overheads, default=0.01)
    return top if scale == "log" else min(top, max(0.2, 2 * max(best, default=0.0)))


def _panel(
    axes: Axes,
    rows: Sequence[Row],
    lines: list[tuple[dict[float, float], Look]],
    best: dict[float, float],
    top: float,
    scale: str,
) -> None:
    """Draws one panel of ``overhead_by_limit``: the floor, the ``best`` of all planners, and labeled lines."""
    limits = sorted({r["limit_fraction"] for r in rows})
    margin = 0.06 * (limits[-1] - limits[0]) or 0.02
    left = limits[-1] + margin
    right = limits[0] - margin
    _overhead_axis(axes, top, scale)
    axes.set_xlim(left, right)  # tighter to the right
    _floor(axes, rows, left, right)
    if best:
        axes.plot(*zip(*sorted(best.items()), strict=True), color=INK, linewidth=1, linestyle=DOTTED, zorder=4)
    levels = []
    for line, (name, ink, marker) in lines:
        if not line:
            levels.append((axes.get_ylim()[1], f"{name}: no plan", FAINT))
            continue
        x, y = zip(*sorted(line.items()), strict=True)
        axes.plot(x, y, color=ink, marker=marker, markersize=5, linewidth=1.6, zorder=3, clip_on=max(y) > top)
        reach = "" if x[0] == limits[0] else f", to {x[0]:.0%}"
        above = f" ({y[0]:.0%} ↑)" if y[0] > axes.get_ylim()[1] else ""
        levels.append((min(y[0], axes.get_ylim()[1]), f"{name}{reach}{above}", ink))
    labels_at_right(axes, levels)
    if len(limits) <= 12:
        axes.xaxis.set_ticks(limits)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(labelsize=9.5)


def _floor(axes: Axes, rows: Sequence[Row], left: float, right: float) -> None:
    """Draws the floor as a band, which holds from each limit to the next tighter one; hatches infeasible limits."""
    floors = {r["limit_fraction"]: r["bound_overhead"] for r in rows if r["bound_overhead"] is not None}
    least = max((r["bound_bytes"] / r["limit_bytes"] * r["limit_fraction"] for r in rows), default=0.0)
    if floors:
        x = sorted(floors, reverse=True)
        y = [floors[v] for v in x]
        x = [*x, max(least, right)]
        y = [*y, y[-1]]
        axes.fill_between(x, BOTTOM, y, step="post", color=FLOOR, linewidth=0, zorder=1)
        axes.step(x, y, where="post", color=FAINT, linewidth=1, zorder=2)
    if least > right:
        axes.axvspan(min(least, left), right, facecolor="white", edgecolor=FAINT, hatch=HATCH, linewidth=0, zorder=1)


def _overhead_axis(axes: Axes, top: float, scale: str = "log") -> None:
    """Formats the overhead axis in per cent; "log" is linear up to 1 % and logarithmic above."""
    top = 1.3 * max(top, 0.01) if scale == "log" else 1.05 * max(top, 0.01)
    if scale == "log":
        axes.set_yscale("symlog", linthresh=0.01, linscale=0.7)
        axes.yaxis.set_ticks([t for t in (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if t <= top])
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(BOTTOM if scale == "log" else -0.01 * top, top)  # a line at 0 is not clipped
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))


def labels_at_right(axes: Axes, levels: Levels, points: float = 11.5) -> None:
    """Labels lines at their right ends, moved apart to at least ``points`` between two labels."""
    if not levels:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    labels = sorted((float(to_axes.transform((x, v))[1]), text, ink) for v, text, ink in levels)
    figure = axes.figure.get_figure(root=True)
    gap = points / (axes.get_window_extent().height / figure.dpi * 72)
    offsets = gap * np.arange(len(labels))
    ys = isotonic_regression(np.array([y for y, _, _ in labels]) - offsets).x
    ys = np.clip(ys, 0.0, max(1.0 - offsets[-1], 0.0)) + offsets
    for y, (_, text, ink) in zip(ys, labels, strict=True):
        axes.text(1.015, y, text, transform=axes.transAxes, color=ink, fontsize=9.5, va="center")


def write_training(
    out: Path,
    program: Program,
    machine: Machine,
    plan: Plan,
    planner: str,
    history: Sequence[Any],
    rows: list[Row],
    edits: tuple[Sequence[Any], Sequence[Any]] | None = None,
) -> None:
    """Writes the best plan of a training, its timeline, pictures and rows to the run directory.

    Args:
        out: Run directory.
        program: Program of the plan.
        machine: Machine to simulate.
        plan: Best plan.
        planner: Name of the trained planner.
        history: Episodes, as for ``learning_curve``.
        rows: Certified results, including the trained planner's.
        edits: Iterations and points for ``edit_learning``, which replace ``history`` for the DQN over edits.
    """
    before = simulate(program, Plan(), machine, program.peak_bytes)
    after = simulate(program, plan, machine, plan.limit)
    plan.save(out / "plan.json")
    write_json(out / "timeline.json", after.perfetto(program))
    memory_curve(out / "memory_curve.png", before, after, machine.name, planner)
    title = f"{program.name} on {machine.name}, limit {plan.limit / program.peak_bytes:.0%} of the peak: training"
    if edits is not None:
        edit_learning(out / "learning_curve.png", *edits, rows, title)
    else:
        learning_curve(out / "learning_curve.png", history, report.contenders(rows), planner, title)
    report.write_rows(out / "results.jsonl", rows)
