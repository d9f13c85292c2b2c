"""Picture of a packing: time on the x axis, addresses on the y axis, one rectangle per block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator

from experiments.plotting.palette import INK, LOAD
from experiments.plotting.plots import figure, labels_at_right
from simulator.pool import Intervals, Packing


def binary(nbytes: float) -> str:
    """Formats bytes in the most readable binary unit: 768 B, 1.5 KiB, 23.4 MiB, 1.02 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:,.0f} {unit}"


def rectangles(intervals: Intervals, packing: Packing) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rectangles of the blocks: two for a block that wraps around, none for a block of zero bytes.

    Returns:
        float64[m, 4], left, right, bottom and top of each rectangle; int64[m], the block of each.
    """
    nonempty = np.flatnonzero(intervals.nbytes)
    wrapped = nonempty[intervals.upper[nonempty] > intervals.period]
    block = np.concatenate((nonempty, wrapped))
    left = np.concatenate((intervals.lower[nonempty], np.zeros(len(wrapped))))
    right = np.concatenate(
        (np.minimum(intervals.upper[nonempty], intervals.period), intervals.upper[wrapped] - intervals.period)
    )
    bottom = packing.offsets[block]
    return np.stack((left, right, bottom, bottom + intervals.nbytes[block]), axis=1).astype(float), block


def draw(
    path: Path, intervals: Intervals, packing: Packing, title: str, ids: Sequence[str] = (), capacity: int | None = None
) -> None:
    """Saves a packing as PNG, with lines at the peak load, the footprint and the ``capacity``.

    Args:
        intervals: Lifetimes and sizes of at least one block of at least one byte.
        ids: Names of the blocks, written into the rectangles that have room.
        path: Picture to write.
        title: Title.
    """
    boxes, block = rectangles(intervals, packing)
    from_small_to_large = ("#f6d98f", "#9fd08b", "#45b0a8", "#3a8fc9", "#4a5fb5", "#6a2c80")
    scale = ScalarMappable(_norm(boxes), LinearSegmentedColormap.from_list("blocks", from_small_to_large))
    # Neighbors often have the same size; shades separate those too small for an edge. Multiples of the golden ratio
    # spread evenly over [0, 1).
    white = 0.35 * (block * (5**0.5 - 1) / 2 % 1)[:, None]
    inks = (1 - white) * scale.to_rgba(boxes[:, 3] - boxes[:, 2])[:, :3] + white
    with figure(path, 9.9, 6.0) as axes:
        patches = PolyCollection(boxes[:, [[0, 2], [1, 2], [1, 3], [0, 3]]], facecolors=inks, edgecolors="white")
        axes.add_collection(patches)
        axes.grid(False)
        axes.set(xlabel="time, as the file counts it", ylabel="address", title=title)
        axes.set_xlim(boxes[:, 0].min(), boxes[:, 1].max())
        axes.set_ylim(0, 1.04 * max(packing.footprint, capacity or 0))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:,.0f}"))
        axes.yaxis.set_major_locator(MultipleLocator(2.0 ** max(0, np.ceil(np.log2(axes.get_ylim()[1] / 8)))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: binary(v)))
        _lines(axes, {"peak load": intervals.peak_bytes, "capacity": capacity, "footprint": packing.footprint})
        extend = "min" if (boxes[:, 3] - boxes[:, 2]).min() < scale.norm.vmin else "neither"
        bar = axes.figure.colorbar(
            scale, ax=axes, location="bottom", fraction=0.03, aspect=60, shrink=0.6, pad=0.02, extend=extend
        )
        is_narrow = scale.norm.vmax < 32 * scale.norm.vmin
        bar.ax.xaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5) if is_narrow else (1.0,), numticks=7))
        bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: binary(v)))
        bar.ax.minorticks_off()
        bar.set_label("size of a block")
        bar.outline.set_visible(False)
        axes.figure.draw_without_rendering()  # runs the layout, which fixes the size of rectangles in pixels
        low, high = (axes.transData.transform(boxes[:, corner]) for corner in ([0, 2], [1, 3]))
        pixels = high - low
        # A white edge would cover a smaller rectangle.
        patches.set_linewidths(np.where(pixels.min(axis=1) > 4, 0.7, 0.0))
        if len(intervals) <= 60 and ids:
            _names(axes, boxes, [ids[i] for i in block], pixels, inks)


def _norm(boxes: np.ndarray) -> LogNorm:
    """Maps sizes to colors, from the size below which blocks cover 1 % of the area to the largest."""
    sizes = boxes[:, 3] - boxes[:, 2]
    order = np.argsort(sizes)
    area = np.cumsum((sizes * (boxes[:, 1] - boxes[:, 0]))[order])
    low = sizes[order[np.searchsorted(area, area[-1] / 100)]]
    high = sizes.max()
    return LogNorm(low, high) if low < high else LogNorm(high / 2, 2 * high)


def _lines(axes: Axes, levels: dict[str, int | None]) -> None:
    """Draws a labeled horizontal line per level; equal levels share one line."""
    inks = {"peak load": LOAD, "capacity": "#238b45", "footprint": INK}
    labels = []
    for level in sorted({level for level in levels.values() if level is not None}):
        names = [name for name, other in levels.items() if other == level]
        axes.axhline(level, color=inks[names[0]], linewidth=1.4, linestyle=(0, (5, 3)), zorder=3, clip_on=False)
        lines = [" =\n".join(names), binary(level)] + ([f"({level:,})"] if level >= 1000 else [])
        labels.append((float(level), "\n".join(lines), inks[names[0]]))
    labels_at_right(axes, labels, points=46)


def _names(axes: Axes, boxes: np.ndarray, names: list[str], pixels: np.ndarray, inks: np.ndarray) -> None:
    """Writes names into the rectangles that have room for them."""
    for (left, right, bottom, top), name, (width, height), ink in zip(boxes, names, pixels, inks, strict=True):
        if width > 8 * (len(name) + 1) and height > 16:
            is_dark = ink @ (0.299, 0.587, 0.114) < 0.55
            axes.text(
                (left + right) / 2,
                (bottom + top) / 2,
                name,
                ha="center",
                va="center",
                fontsize=9,
                color="white" if is_dark else INK,
            )
