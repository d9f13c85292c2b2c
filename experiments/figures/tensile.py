"""What the figures of the TENSILE paper share: its three ratios, and the picture of two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from experiments.plotting.palette import INK, Look
from experiments.plotting.plots import figure

Ratios = tuple[float, float, float]  # MSR, EOR, CBR


def ratios(peak_bytes: int, ns: int, without_bytes: int, without_ns: int) -> Ratios:
    """Of a peak and a time, beside those without a plan; CBR is infinite where nothing is lost."""
    msr, eor = 1 - peak_bytes / without_bytes, ns / without_ns - 1
    return msr, eor, msr / eor if eor else float("inf")


def pair(theirs: float | None, ours: float) -> str:
    """The paper's value, if there is one, and ours."""
    value = "∞" if ours == float("inf") else f"{ours:.4f}"
    return value if theirs is None else f"{theirs:.4f} / {value}"


def draw(
    path: Path, labels: Sequence[str], ours: Sequence[Mapping[str, Ratios | None]],
    theirs: Sequence[Mapping[str, Ratios]], looks: Mapping[str, Look], hollow: Sequence[str], legend: str, title: str,
) -> None:  # fmt: skip
    """Two panels of a row per label: memory saved, time lost; a bar for each method, the paper's as diamonds.

    Args:
        ours, theirs: per label, by method; None: no plan.
        hollow: methods whose bars are not filled.
        legend: of the diamonds.
    """
    high = 0.66 / len(looks)
    shifts = dict(zip(looks, np.linspace(-0.36 + high / 2, 0.36 - high / 2, len(looks)), strict=True))
    with figure(path, 12.0, 2.0 + 0.8 * len(labels), 1, 2) as (saved, lost):
        for axes, i in ((saved, 0), (lost, 1)):
            for y in range(len(labels)):
                axes.axhspan(y - 0.5, y + 0.5, color="none" if y % 2 else "#f6f6f6", linewidth=0, zorder=0)
                for method, look in looks.items():
                    at, value, paper = y + shifts[method], ours[y][method], theirs[y].get(method)
                    if value is not None:
                        axes.barh(at, value[i], color="white" if method in hollow else look.colour,
                                  edgecolor=look.colour, height=0.9 * high, zorder=2)  # fmt: skip
                        if paper is None:
                            axes.annotate(f"{value[i]:.1%}", (value[i], at), (4, 0), "data", "offset points",
                                          va="center", fontsize=8.5, color=INK)  # fmt: skip
                    if paper is not None:
                        axes.plot(paper[i], at, "D", color=look.colour, markerfacecolor="white", markersize=7,
                                  markeredgewidth=1.6, zorder=4)  # fmt: skip
            axes.set_yticks(range(len(labels)), labels if axes is saved else [])
            axes.set(ylim=(len(labels) - 0.4, -0.6), xlim=(0, None))
            axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)
        saved.set(title="Memory saved (MSR)", xlabel="of the peak without a plan")
        lost.set(title="Time lost (EOR)", xlabel="of the time without a plan")
        keys: list[Artist] = [
            Patch(
                facecolor="white" if method in hollow else look.colour, edgecolor=look.colour, label=f"{method}, ours"
            )
            for method, look in looks.items()
        ]
        keys.append(Line2D([], [], linestyle="", marker="D", color=INK, markerfacecolor="white", markersize=7,
                           markeredgewidth=1.6, label=legend))  # fmt: skip
        fig = saved.figure
        fig.legend(handles=keys, loc="outside lower center", ncols=6, fontsize=10)
        fig.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
