"""What the figures of the TENSILE paper share: its three ratios, the least limit, and the picture of two ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from experiments.common.bisection import largest
from experiments.plotting.charts import Axis, Bars, Chart, Line, Mark, Panel
from experiments.plotting.palette import INK, Look

Ratios = tuple[float, float, float]  # MSR, EOR, CBR
MOST = 5.0  # of the cost-benefit ratio in a picture
Plans = TypeVar("Plans")


def ratios(peak_bytes: int, ns: int, without_bytes: int, without_ns: int) -> Ratios:
    """Of a peak and a time, beside those without a plan; CBR is infinite where nothing is lost."""
    msr, eor = 1 - peak_bytes / without_bytes, ns / without_ns - 1
    return msr, eor, msr / eor if eor else float("inf")


def cells(ours: Ratios | None, theirs: Ratios | None) -> list[str]:
    """The paper's ratios, if there are some, and ours."""
    if ours is None:
        return ["no plan", "", ""]
    said = ["∞" if value == float("inf") else f"{value:.4f}" for value in ours]
    return said if theirs is None else [f"{paper:.4f} / {value}" for paper, value in zip(theirs, said, strict=True)]


def smallest(peak: int, steps: int, plan: Callable[[int], Plans | None]) -> Plans | None:
    """What ``plan`` has for the smallest limit that it has something for, in ``steps`` of the peak; None: it saves
    nothing."""
    plans: dict[int, Plans | None] = {}

    def fits(saved: int) -> bool:
        plans[saved] = plan(peak * (steps - saved) // steps)
        return plans[saved] is not None

    return plans.get(largest(fits, steps // 10, steps - 1))


def chart(
    title: str, rows: Mapping[str, tuple[Mapping[str, Ratios | None], Mapping[str, Ratios]]],
    looks: Mapping[str, Look], hollow: Sequence[str] = (),
) -> Chart:  # fmt: skip
    """Makes three panels of a row per label: memory saved, time lost, and their ratio; the paper's as diamonds.

    Args:
        rows: of each label our ratios by method (None: no plan), and the paper's.
        hollow: methods whose bars are not filled.
    """
    panels, high = [], 0.72 / len(looks)
    titles = (
        ("Memory saved (MSR)", "of the peak without a plan", "%", 1.0),
        ("Time lost (EOR)", "of the time without a plan", "%", 1.0),
        ("Cost-benefit ratio (CBR)", f"MSR / EOR, up to {MOST:g}", "{:g}", MOST),
    )
    for i, (name, axis, form, most) in enumerate(titles):
        marks: list[Mark] = []
        for m, (method, look) in enumerate(looks.items()):
            at = [y + (m - (len(looks) - 1) / 2) * high for y in range(len(rows))]
            ours = [(one := found[method]) and one[i] for found, _ in rows.values()]
            theirs = [paper[method][i] if method in paper else None for _, paper in rows.values()]
            texts = ["" if a is None else f"{a:.1%}" if form == "%" else f"{a:.3g}" for a in ours]
            ours = [a if a is None or form == "%" else min(a, most) for a in ours]
            marks.append(
                Bars(at, ours, look.colour, f"{method}, ours", 0.9 * high, hollow=method in hollow, texts=texts)
            )
            if any(value is not None for value in theirs):
                marks.append(Line(theirs, at, INK, "the paper's", "D", "", size=6, hollow=True, front=5))
        limits = (0, None) if form == "%" else (0, 1.25 * MOST)
        panels.append(Panel(name, marks, Axis(axis, form, limits, room=1.15), Axis(names=list(rows))))
    return Chart(title, panels, 3, (5.2, 0.6 + 0.95 * len(rows)))
