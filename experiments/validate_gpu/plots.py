"""Figures of a validation: predicted against measured, and a predicted timeline above the measured one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from executor.replay.replay import Measured
from experiments.plotting.palette import FAINT, GRID, INK, LIMIT, MEASURED, PREDICTED, SPANS, STYLE, look
from simulator.timeline import STREAMS, Timeline

MIB = 2**20


@contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        yield made
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=150)


def scatter(path: Path, replays: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]]) -> None:
    """Iteration time and peak, predicted (across) and measured (up); the diagonal is a perfect prediction.

    Args:
        replays, trained: rows with ``planner``, ``predicted_ns``, ``measured_ns``, ``predicted_peak``,
            ``measured_peak``; replays are filled markers, training hollow ones.
    """
    with _figure(path, 10.5, 5.2) as made:
        left, right = made.subplots(1, 2)
        for axes, keys, unit, title in (
            (left, ("predicted_ns", "measured_ns"), 1e6, "Iteration time, ms"),
            (right, ("predicted_peak", "measured_peak"), MIB, "Peak, MiB"),
        ):
            values: list[float] = []
            for rows, hollow in ((replays, False), (trained, True)):
                for r in rows:
                    if r[keys[0]] is None:
                        continue
                    x, y = r[keys[0]] / unit, r[keys[1]] / unit
                    values += [x, y]
                    style = look(r["planner"])
                    line = style.marker in "x+"
                    face = "none" if hollow else style.colour
                    axes.scatter(x, y, s=60 if hollow else 28, marker=style.marker, linewidths=1.2, zorder=3,
                                 **({"color": style.colour} if line else {"facecolors": face,
                                                                          "edgecolors": style.colour}))  # fmt: skip
            low, high = min(values) * 0.92, max(values) * 1.08
            axes.plot([low, high], [low, high], color=LIMIT, lw=0.9, zorder=1)
            if unit == 1e6:
                for error in (0.95, 1.05):
                    axes.plot([low, high], [low * error, high * error], color=FAINT, lw=0.8, ls="--", zorder=1)
                axes.annotate("±5 %", (high, high * 1.05), xytext=(-4, 0), textcoords="offset points", ha="right",
                              va="center", color=FAINT, fontsize=9)  # fmt: skip
            if high > 8 * low:
                axes.set_xscale("log")
                axes.set_yscale("log")
                for axis in (axes.xaxis, axes.yaxis):
                    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                    axis.set_minor_formatter(NullFormatter())
            axes.set(xlim=(low, high), ylim=(low, high * 1.06), title=title, xlabel="predicted", ylabel="measured")
        names = dict.fromkeys(r["planner"] for r in (*replays, *trained))
        handles = [
            Line2D([], [], ls="", marker=look(n).marker, color=look(n).colour, label=look(n).label) for n in names
        ]
        if trained:
            handles += [Line2D([], [], ls="", marker="o", color=INK, label="replay"),
                        Line2D([], [], ls="", marker="o", mfc="none", color=INK, ms=8, label="training")]  # fmt: skip
        made.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)


def timelines(path: Path, found: Measured, workload: str, planner: str) -> None:
    """One steady iteration as predicted, above it as measured, and the memory of both, on one time axis."""
    predicted, measured = found.predicted, found.timeline
    start_p = predicted.last_start_ns
    skip = len(measured.boundaries) - found.period - 1
    start_m = measured.boundaries[skip] if skip >= 0 else 0
    end = max(predicted.boundaries[-1] - start_p, measured.boundaries[-1] - start_m) / 1e6
    with _figure(path, 10.5, 6.2) as made:
        above, below, memory = made.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.2))
        for axes, timeline, start, word in ((above, predicted, start_p, "Predicted"), (below, measured, start_m, "Measured")):  # noqa: E501  # fmt: skip
            _streams(axes, timeline, start)
            took = (timeline.boundaries[-1] - start) / 1e6
            axes.set_title(f"{word}: {took:.2f} ms")
            axes.axvline(took, color=LIMIT, lw=1)
        for timeline, start, colour, word in (
            (predicted, start_p, PREDICTED, "predicted"),
            (measured, start_m, MEASURED, "measured"),
        ):
            points = [(max(t, start), used) for t, used in timeline.memory if t <= timeline.boundaries[-1]]
            before = [used for t, used in timeline.memory if t <= start][-1:]
            inside = [(start, u) for u in before] + [(t, u) for t, u in points if t > start]
            memory.step([(t - start) / 1e6 for t, _ in inside], [u / MIB for _, u in inside], where="post",
                        color=colour, lw=1.2, label=word)  # fmt: skip
        memory.axhline(found.limit / MIB, color=LIMIT, lw=1, ls="--", label="limit")
        memory.set(
            xlim=(0, end * 1.01), xlabel="ms from the start of an iteration", ylabel="MiB in use", title="Memory"
        )
        memory.set_ylim(bottom=0)
        memory.legend(loc="lower left", ncols=3, fontsize=9)
        handles = [Patch(color=c, label=k.replace("_", "-")) for k, c in SPANS.items()]
        made.suptitle(f"{workload}, {look(planner).label}, on {found.device}", x=0.01, ha="left", fontweight="bold")
        made.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)


def batches(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The largest batch of each method, a panel per workload, the largest on top.

    Args:
        rows: with ``workload``, ``method``, ``batch``, ``own_batch``, ``cap`` (bytes) and ``time_over``.
    """
    names = list(dict.fromkeys(r["workload"] for r in rows))
    with _figure(path, 4.2 * max(2, len(names)), 3.6) as made:
        for axes, name in zip(made.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            shown = sorted((r for r in rows if r["workload"] == name), key=lambda r: r["batch"])
            most = max(r["batch"] for r in shown)
            axes.barh([r["method"] for r in shown], [r["batch"] for r in shown], color=MEASURED, height=0.6)
            for i, r in enumerate(shown):
                text = f"{'at least ' * r['time_over']}{r['batch']} ({r['batch'] / r['own_batch']:.1f}×)"
                axes.annotate(text, (r["batch"], i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
            axes.axvline(shown[0]["own_batch"], color=LIMIT, lw=0.9, ls="--")
            axes.set(xlim=(0, most * 1.45), xlabel="largest batch", title=f"{name}, {shown[0]['cap'] / MIB:,.1f} MiB")
            axes.grid(visible=False, axis="y")
        made.suptitle(
            "Largest batch in the memory that eager needs for its own (dashed)", x=0.01, ha="left", fontweight="bold"
        )


def _streams(axes: Axes, timeline: Timeline, start: int) -> None:
    """Three rows of bars."""
    for row, stream in enumerate(reversed(STREAMS)):
        for kind, colour in SPANS.items():
            bars = [((s.start_ns - start) / 1e6, (s.end_ns - s.start_ns) / 1e6) for s in timeline.spans
                    if s.stream == stream and s.kind == kind and s.end_ns > start]  # fmt: skip
            axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colour, edgecolors="white", linewidth=0.3)
    axes.set_yticks(range(3), list(reversed(STREAMS)))
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.axvline(0, color=GRID)
