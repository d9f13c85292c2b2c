"""Overhead of plans against noise (experiments/robustness.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.common.report import Row
from experiments.plotting.palette import FAINT, INK, Look, look
from experiments.plotting.plots import figure

AXES = {
    "jitter": "jitter: deviation of log time",
    "drift": "drift: kernels change by",
    "tenant": "tenant: takes up to, of the link",
}
OWN = {
    "robust": Look("planned for noise", "#222222", "P"),
    "without_noise": Look("the same search without noise", "#9a9a9a", "P"),
}


def style(planner: str) -> Look:
    """A planner's looks, those of the robust plan and of its control too."""
    return OWN.get(planner) or look(planner)


def noise_panels(path: Path, rows: Sequence[Row]) -> None:
    """A row of panels for each of ``rows`` (with a ``title``): mean and 95th percentile against each kind of noise, and
    what replanning does after the first drift."""
    with figure(path, 15, 0.7 + 3.6 * len(rows), len(rows), len(AXES) + 1) as made:
        grid = np.atleast_2d(made)
        seen: dict[str, Look] = {}
        for panels, row in zip(grid, rows, strict=True):
            for axes, (kind, label) in zip(panels, AXES.items(), strict=False):
                entries = sorted(row["noise"][kind], key=lambda entry: entry["size"])
                for name in entries[0]["planners"]:
                    seen[name] = how = style(name)
                    x = [entry["size"] for entry in entries]
                    for key, line in (("mean", "-"), ("p95", ":")):
                        y = [entry["planners"][name][key] for entry in entries]
                        axes.plot(x, y, line, color=how.colour, marker=how.marker if key == "mean" else None,
                                  markersize=5, linewidth=1.5 if key == "mean" else 1.1)  # fmt: skip
                axes.set(xlabel=label)
                axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
            panels[0].set(title=row["title"], ylabel="overhead")
            _recovery(panels[-1], row["recovery"])
        fig = grid[0, 0].figure
        handles = [Line2D([], [], color=how.colour, marker=how.marker, label=how.label) for how in seen.values()]
        handles += [Line2D([], [], color=INK, label="mean"), Line2D([], [], color=INK, linestyle=":",
                                                                   label="95th percentile")]  # fmt: skip
        fig.legend(handles=handles, loc="outside lower center", ncols=5)


def _recovery(axes: Axes, recovery: Sequence[Row]) -> None:
    if not recovery:
        axes.set_axis_off()
        return
    first = recovery[0]
    for y, (name, one) in enumerate(first["planners"].items()):
        how = style(name)
        axes.plot([one["new"], one["kept"]], [y, y], color=FAINT, linewidth=1.2, zorder=1)
        axes.plot(one["kept"], y, how.marker, color=how.colour, markersize=7)
        axes.plot(one["replanned"], y, how.marker, color=how.colour, markerfacecolor="white", markersize=7)
        axes.plot(one["new"], y, "|", color=INK, markersize=13)
        right = max(one["kept"], one["replanned"], one["new"])
        axes.annotate(f"{one['iterations']} iterations", (right, y), (8, 0), "data", "offset points", va="center",
                      fontsize=9, color=INK)  # fmt: skip
    n = len(first["planners"])
    axes.set(title=f"After drift {first['size']:g}, replanned", ylim=(n + 1.2, -0.6), xlabel="overhead")
    axes.set_xlim(None, 1.35 * axes.get_xlim()[1])
    axes.set_yticks(range(n), [style(name).label for name in first["planners"]])
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.legend(handles=[
        Line2D([], [], color=INK, marker="o", linestyle="", label="plan kept"),
        Line2D([], [], color=INK, marker="o", markerfacecolor="white", linestyle="", label="planned anew, in the end"),
        Line2D([], [], color=INK, marker="|", linestyle="", markersize=11, label="plan for the new times"),
    ], fontsize=8.5, loc="lower center", ncols=3, columnspacing=1, handletextpad=0.2)  # fmt: skip
