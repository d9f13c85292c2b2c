"""Declarative charts: a figure describes its panels and marks as data, and ``draw`` renders them.

Marks are lines (or points), bars, rules (a level or a band) and words. ``pairs`` (the paper's values hollow, ours
filled) and ``groups`` (bars side by side) build common combinations of marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from experiments.plotting.palette import FAINT, INK, Look
from experiments.plotting.plots import labels_at_right, panel_grid

Values = Sequence[float | None] | NDArray[np.float64]  # None: missing
DASHED = (0, (5, 3))
DOTTED = (0, (1, 1.5))


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        format: Format of a tick for ``str.format``; "%" formats fractions as per cent.
        limits: Lower and upper limit; None fits the data.
        names: Labels of the positions 0, 1, … (rows from top to bottom, or columns), or of ``ticks`` if given.
        room: Factor on the upper limit that leaves space for texts.
    """

    label: str = ""
    format: str = "{:,g}"
    limits: tuple[float | None, float | None] = (None, None)
    scale: str = "linear"
    ticks: Sequence[float] | None = None
    names: Sequence[str] = ()
    room: float = 1.0


@dataclass(frozen=True)
class Line:
    """Line through points, or markers only if ``line`` is "".

    Attributes:
        band: Lower and upper edge of a shaded area over ``x``.
        texts: Labels of the points, on the given ``side`` of each.
        end: Name of the line at the right edge of the panel.
    """

    x: Values
    y: Values
    color: str = INK
    label: str = ""
    marker: str = ""  # Matplotlib's, as ``line`` and ``alpha``
    line: Any = "-"
    width: float = 1.6
    size: float = 5.5
    hollow: bool = False  # whether markers are not filled
    step: bool = False  # whether y stays until the next x
    alpha: float = 1.0
    band: tuple[Any, Any] | None = None
    shade: float = 0.2  # opacity of the band
    texts: Sequence[str] = ()
    side: str = "right"
    end: str = ""
    front: float = 3.0  # order of drawing; larger is in front

    def draw(self, axes: Axes) -> None:
        """Draws the line with its band and texts."""
        x = _numbers(self.x)
        y = _numbers(self.y)
        if self.band is not None:
            low, high = (np.broadcast_to(_numbers(np.atleast_1d(edge)), x.shape) for edge in self.band)
            axes.fill_between(
                x,
                low,
                high,
                step="post" if self.step else None,
                color=self.color,
                alpha=self.shade,
                linewidth=0,
                zorder=self.front - 1,
            )
        axes.plot(
            x,
            y,
            color=self.color,
            label=self.label or None,
            linestyle=self.line,
            linewidth=self.width,
            marker="o" if self.hollow and self.marker == "x" else self.marker,  # a cross cannot be hollow
            markersize=self.size,
            markerfacecolor="white" if self.hollow else self.color,
            zorder=self.front,
            alpha=self.alpha,
            markeredgewidth=2.0 if self.marker in ("|", "_") else 1.5 if self.hollow else 1.0,
            drawstyle="steps-post" if self.step else "default",
        )
        for position, value, text in zip(x, y, self.texts, strict=False):
            _annotate(axes, position, value, text, self.side)


@dataclass(frozen=True)
class Bars:
    """Bars at ``positions`` from ``base``; texts are at the ends, or ``inside`` the bars.

    ``hatch`` is Matplotlib's, in white.
    """

    positions: Sequence[float]
    values: Values
    color: str = INK
    label: str = ""
    thick: float = 0.8
    base: Any = 0.0
    hollow: bool = False
    horizontal: bool = True
    texts: Sequence[str] = ()
    inside: bool = False
    shade: float = 1.0
    hatch: str = ""

    def draw(self, axes: Axes) -> None:
        """Draws the bars with their texts."""
        values = _numbers(self.values)
        base = np.broadcast_to(_numbers(np.atleast_1d(self.base)), len(self.positions))
        draw_bars, start = (axes.barh, "left") if self.horizontal else (axes.bar, "bottom")
        draw_bars(
            self.positions,
            np.nan_to_num(values),
            self.thick,
            color="white" if self.hollow else self.color,
            edgecolor="white" if self.hatch else self.color,
            linewidth=1.0 if self.hollow else 0.0,
            zorder=2,
            label=self.label or None,
            alpha=self.shade,
            hatch=self.hatch or None,
            **{start: base},
        )
        for position, value, low, text in zip(self.positions, np.nan_to_num(values), base, self.texts, strict=False):
            end = low + (value / 2 if self.inside else value)
            place = (end, position) if self.horizontal else (position, end)
            if self.inside:
                box = {"color": self.color, "pad": 1.5} if self.hatch and text else None
                axes.annotate(text, place, ha="center", va="center", fontsize=9.5, color="white", zorder=4, bbox=box)
            else:
                _annotate(axes, *place, text, "right" if self.horizontal else "above")


@dataclass(frozen=True)
class Rule:
    """Line across the panel at a value of x (of y if ``horizontal``), or band from it to ``end``."""

    pos: float
    end: float | None = None
    horizontal: bool = False
    color: str = INK
    label: str = ""
    line: Any = DASHED
    width: float = 1.1
    text: str = ""
    below: bool = False

    def draw(self, axes: Axes) -> None:
        """Draws the rule across the panel."""
        if self.end is not None:
            span = axes.axhspan if self.horizontal else axes.axvspan
            span(self.pos, self.end, color=self.color, linewidth=0, zorder=0.5, label=self.label or None)
            return
        rule = axes.axhline if self.horizontal else axes.axvline
        rule(self.pos, color=self.color, linewidth=self.width, linestyle=self.line, zorder=1, label=self.label or None)
        if self.text:
            place = (0.005, self.pos)
            transform = axes.get_yaxis_transform()
            if not self.horizontal:
                place = (self.pos, 0.99)
                transform = axes.get_xaxis_transform()
            above = self.horizontal and not self.below
            axes.annotate(
                self.text,
                place,
                (4, 3 if above else -3),
                transform,
                "offset points",
                fontsize=9,
                color=self.color,
                va="bottom" if above else "top",
            )


@dataclass(frozen=True)
class Words:
    """Text at a point; with ``top``, y is a fraction of the panel's height."""

    x: float
    y: float
    text: str
    align: str = "center"
    top: bool = False

    def draw(self, axes: Axes) -> None:
        """Writes the text."""
        axes.text(
            self.x,
            self.y,
            self.text,
            ha=self.align,
            va="top" if self.top else "center",
            fontsize=9.5,
            color=INK,
            transform=axes.get_xaxis_transform() if self.top else axes.transData,
        )


Mark = Line | Bars | Rule | Words
ONE = Rule(1, line="-", width=1)


@dataclass(frozen=True)
class Panel:
    """Pair of axes with its marks, from back to front."""

    title: str
    marks: Sequence[Mark]
    x: Axis = Axis()
    y: Axis = Axis()


@dataclass(frozen=True)
class Chart:
    """Picture of one or more panels.

    Attributes:
        columns: Maximum number of panels per row.
        size: Width and height of each panel, in inches.
        margins: Additional width and height of the whole picture, in inches.
        keys: Columns of the legend, which lists every label once.
        note: Text below the panels, above the legend.
    """

    title: str
    panels: Sequence[Panel]
    columns: int = 3
    size: tuple[float, float] = (4.6, 3.6)
    margins: tuple[float, float] = (0.0, 0.9)
    keys: int = 4
    note: str = ""


def draw(path: Path, chart: Chart) -> None:
    """Saves a chart as PNG, without the axis labels and row names that repeat a neighbor's."""
    panels = chart.panels
    with panel_grid(path, len(panels), chart.columns, chart.size, chart.margins) as (grid, columns):
        keys: dict[str, Any] = {}
        for i, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            left = panels[i - 1].y if i % columns else None
            lower = panels[i + columns].x if i + columns < len(panels) else None
            for mark in panel.marks:
                mark.draw(axes)
            axes.set_title(panel.title)
            _set_axis(axes, "x", panel.x, panel.x.label if lower is None or lower.label != panel.x.label else "")
            _set_axis(axes, "y", panel.y, panel.y.label if left is None or left.label != panel.y.label else "")
            if left is not None and panel.y.names and left.names == panel.y.names:
                axes.set_yticklabels([])
            ends = [(float(_numbers(m.y)[-1]), m.end, m.color) for m in panel.marks if isinstance(m, Line) and m.end]
            labels_at_right(axes, ends)
            keys |= {text: key for key, text in zip(*axes.get_legend_handles_labels(), strict=True) if text not in keys}
        fig = grid[0].figure
        if keys:
            legend = fig.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=chart.keys, fontsize=10)
            legend.set_title(chart.note or None, {"size": 10})
        elif chart.note:
            fig.supxlabel(chart.note, x=0.01, ha="left", fontsize=10, color=INK)
        fig.suptitle(chart.title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)


def between(start: Values, end: Values, rows: Values, color: str, vertical: bool = False) -> Line:
    """Returns thin lines from ``start`` to ``end`` in each of ``rows``, or at each x if ``vertical``."""
    along = [value for pair in zip(start, end, strict=True) for value in (*pair, None)]
    rows_twice = [value for row in rows for value in (row, row, None)]
    x, y = (rows_twice, along) if vertical else (along, rows_twice)
    return Line(x, y, color, width=1.3, alpha=0.6, front=2)


def pairs(
    look: Look, paper: Values, reproduced: Values, shift: float = 0.0, texts: Sequence[str] = (), side: str = "right"
) -> list[Mark]:
    """Returns one row per value: the paper's marker hollow, the reproduced one filled, joined by a line."""
    rows = [y + shift for y in range(len(reproduced))]
    name, color, marker = look
    return [
        between(paper, reproduced, rows, color),
        Line(paper, rows, color, f"{name}, paper", marker, "", size=7, hollow=True),
        Line(reproduced, rows, color, f"{name}, ours", marker, "", size=7, front=4, texts=texts, side=side),
    ]


def groups(
    series: Sequence[tuple[str, str, Values, Sequence[str]]],
    horizontal: bool = False,
    thick: float = 0.8,
    hollow: Sequence[str] = (),
) -> list[Mark]:
    """Returns grouped bars at positions 0, 1, ….

    Args:
        series: (label, color, values, texts) of each bar in a group.
        horizontal: Whether bars are horizontal.
        thick: Width of a group, where groups are 1 apart.
        hollow: Labels of the series that are drawn as outlines.
    """
    width = thick / len(series)
    return [
        Bars(
            [n + (i - (len(series) - 1) / 2) * width for n in range(len(values))],
            values,
            color,
            label,
            0.92 * width,
            hollow=label in hollow,
            horizontal=horizontal,
            texts=texts,
        )
        for i, (label, color, values, texts) in enumerate(series)
    ]


def _numbers(values: Values) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _annotate(axes: Axes, x: float, y: float, text: str, side: str) -> None:
    if not (text and np.isfinite(x) and np.isfinite(y)):
        return
    offset, horizontal, vertical = {
        "right": ((7, 0), "left", "center"),
        "left": ((-7, 0), "right", "center"),
        "above": ((0, 4), "center", "bottom"),
        "below": ((0, -4), "center", "top"),
    }[side]
    axes.annotate(
        text, (x, y), offset, "data", "offset points", fontsize=9, color=INK, zorder=5, ha=horizontal, va=vertical
    )


def _set_axis(axes: Axes, xy: str, axis: Axis, label: str) -> None:
    """Sets scale, limits, ticks and names of an axis."""
    axis_, limits, set_limits = (getattr(axes, name) for name in (f"{xy}axis", f"get_{xy}lim", f"set_{xy}lim"))
    axis_.set_label_text(label)
    n = len(axis.names)
    if n and axis.ticks is None:
        set_limits(*((n - 0.4, -0.6) if xy == "y" else (-0.6, n - 0.4)))
        axis_.set_ticks(range(n), axis.names)
        axis_.set_tick_params(length=0)
        axes.grid(axis=xy, visible=False)
        if xy == "y":
            axes.spines["left"].set_visible(False)
            for row in range(0, n, 2):
                axes.axhspan(row - 0.5, row + 0.5, color="#f6f6f6", linewidth=0, zorder=0)
        return
    if axis.scale != "linear":
        options = {"linthresh": 0.01, "linscale": 0.7} if axis.scale == "symlog" else {}
        getattr(axes, f"set_{xy}scale")(axis.scale, **options)
    set_limits(*axis.limits)
    if axis.room != 1:
        set_limits(None, axis.room * limits()[1])
    if n:
        axis_.set_ticks(axis.ticks, axis.names, rotation=90, fontsize=9)
        axes.grid(axis=xy, visible=False)
        return
    if axis.ticks is not None:
        axis_.set_ticks(axis.ticks)
        axis_.set_minor_formatter(NullFormatter())

    def tick_text(value: float, _: Any = None) -> str:
        return f"{round(100 * value, 6):g}%" if axis.format == "%" else axis.format.format(value)

    axis_.set_major_formatter(FuncFormatter(tick_text))
    if axis.ticks is not None:
        return
    low, high = limits()
    if axis.scale == "log":
        labeled = "25" if xy == "x" and high > 100 * low else "235"  # texts of three would touch
        axis_.set_minor_formatter(
            FuncFormatter(lambda value, _: tick_text(value) if f"{value:e}"[0] in labeled else "")
        )
    elif axis.scale == "linear" and xy == "x" and high >= 1000:
        axis_.get_major_locator().set_params(nbins=6)


def floor(x: Values, y: Values, low: float = 0.0, step: bool = False) -> Line:
    """Returns the certified lower bound on the overhead as a shaded area."""
    return Line(x, y, FAINT, "the floor: no plan is below", width=1.1, band=(low, y), shade=0.35, step=step, front=2)
