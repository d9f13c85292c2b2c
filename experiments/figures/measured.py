"""What we say beside what was measured on real GPUs: times of kernels and of whole steps, and peaks, as others
published or contributed them (tests/data/measured). No paper has this figure; the controls are what was said of times
before the model by kind (one roofline, float32's rate for every kernel, 5 us for a launch), and four published
estimators of peaks.

1. Kernels are operators of a published trace, or kernels of a contributed profile; those of at least 20 us are
   compared one by one. Sums by kind where no more is published.
2. A step is the sum of its kernels, of those that were recorded. Published iterations have the host's part, too.
3. The coefficients were fitted to the trace and to the sums by kind (`python -m experiments.measured fit`); how far
   the model is off on shapes that it was not fitted to is apart.
4. Peaks are NVML's of whole runs (xMem's data). Where a run did not fit there is no peak, only the verdict.
5. A plan is made from believed times, and simulated under those of the trace (experiments/measured/plans.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting.palette import CONTROL, FAINT, GRID, INK, KERNELS, OURS
from experiments.plotting.plots import panel_grid
from simulator.machine import Machine

TITLE = "Measured on GPUs, and what we say"
DATA = cli.CONFIGS.parent / "tests" / "data" / "measured"
WHOLE = "steps.csv"  # of steps of which only the time is published
PEAKS = "xmem_points.csv"
PARTS = ("steps", "fit", "peaks", "plans")
STEP_BAR, KERNEL_BAR, PEAK_BAR = 0.1, 0.15, 0.042
PLAN_BAR = 0.03  # of the ideal time: points of overhead
MODEL, ROOFLINE = "model", "roofline"  # times of experiments/measured/plans.py
ESTIMATORS = {"ours": "ours", "xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}
LEAST_US = 20.0
FITTED = ("h100_resnet50.csv", "v100_resnet50_by_kind.csv")  # what coefficients are fitted to
GPUS = {"h100": "H100", "v100": "V100", "a100_80gb": "A100 80 GB", "rtx2080ti": "RTX 2080 Ti"}


def tasks(settings: DictConfig) -> list[Row]:
    """One per file of measurements, then the fit."""
    asked = cli.values(settings, "parts")
    for part in asked:
        if part not in PARTS:
            raise cli.UsageError(f"figure.parts: there is no part {part!r}{cli.nearest(part, set(PARTS))}")
    if not (DATA / WHOLE).exists():
        raise cli.UsageError(f"{DATA} is not there: the measurements come with the repository")
    found: list[Row] = []
    if "steps" in asked:
        found += [{"part": "steps", "file": path.name, "sha256": _digest(path)} for path in _files()]
    if "peaks" in asked:
        path = DATA / PEAKS
        count, digest = len(path.read_text().splitlines()) - 1, _digest(path)
        found += [{"part": "peaks", "file": PEAKS, "point": i, "sha256": digest} for i in range(count)]
    if "plans" in asked:
        calls = cli.integer(settings, "calls", 1)
        found += [{"part": "plans", "limit": limit, "calls": calls} for limit in cli.values(settings, "limits")]
    return [*found, *({"part": part} for part in asked if part == "fit")]


def _files() -> list[Path]:
    """Traces, sums by kind, contributed steps, whole steps."""
    found = [path for path in DATA.glob("*.csv") if path.name in (*FITTED, WHOLE) or path.with_suffix(".yaml").exists()]
    return [*sorted(found), *sorted(DATA.glob("*.json"))]


def _digest(path: Path) -> str:
    about = path.with_suffix(".yaml")
    return hashlib.sha256(path.read_bytes() + (about.read_bytes() if about.exists() else b"")).hexdigest()[:12]


def run(task: Row, machine: Machine) -> Row:
    """Rows [name, kind, measured, ours, control], in us for kernels and kinds, in ms for whole steps; or the fit; or a
    peak."""
    if task["part"] == "plans":
        from experiments.measured import plans

        return {"rows": plans.rows(limits=(task["limit"],), calls=task["calls"])}
    if task["part"] == "peaks":
        from experiments.measured import peaks

        (row,) = peaks.rows([peaks.points()[task["point"]]])
        return row
    from experiments.measured import fit, steps  # PyTorch

    if task["part"] == "fit":
        found = fit.h100()
        assert found.held_out is not None
        held = found.held_out
        return {"error": found.error, "middle": found.middle,
                "held_out": {"kernels": held.kernels, "middle": held.middle, "spread": held.spread}}  # fmt: skip
    path = DATA / task["file"]
    if path.name == WHOLE:
        return {"kind": "whole", "rows": [[f"{s.machine}: {s.name}", s.what, s.measured, s.ours, s.control]
                                          for s in steps.published()]}  # fmt: skip
    if path.stem == steps.BY_KIND:
        return {"kind": "kinds", "label": "v100: resnet50, 32, float32, NCHW", "rows": _plain(steps.by_kind())}
    read = steps.load(path)
    if isinstance(read, steps.Trace):
        batch = read.network.get("batch_size", "")
        label = f"{read.machine}: {read.name.partition('_')[2] or read.name}, {batch}"
        return {"kind": "kernels", "label": label, "source": read.source, "rows": _plain(steps.of_trace(read))}
    label = f"{read.machine}: {read.workload}"
    return {"kind": "kernels", "label": label, "source": read.source, "step_ms": _ms(read.step_ns),
            "rows": _plain(steps.of_contributed(read))}  # fmt: skip


def _plain(rows: list[Any]) -> list[list[Any]]:
    return [[row.name, row.kind, *(round(us, 3) for us in (row.measured, row.ours, row.control))] for row in rows]


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


# ------------------------------------------------------------------------------------------ for people


class Step(NamedTuple):
    """A step, in ms; ``fitted``: the coefficients were fitted to it."""

    name: str
    measured: float
    ours: float
    control: float
    fitted: bool
    what: str


def all_steps(rows: list[Row]) -> list[Step]:
    """Every step that there is."""
    found = []
    for row in _of(rows, "steps"):
        if row["kind"] == "whole":
            found += [Step(_named(name), measured, ours, control, False, what)
                      for name, what, measured, ours, control in row["rows"]]  # fmt: skip
        else:
            sums = [sum(one[i] for one in row["rows"]) / 1e3 for i in (2, 3, 4)]
            found.append(Step(_named(row["label"]), *sums, row["file"] in FITTED, "sum of kernels"))
    return sorted(found, key=lambda step: not step.fitted)


def _of(rows: list[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _named(label: str) -> str:
    machine, _, rest = label.partition(": ")
    rest = (
        rest.replace("resnet50", "ResNet-50").replace("vgg13", "VGG13").replace("float", "fp").replace("tf32", "TF32")
    )
    return f"{GPUS.get(machine, machine)}, {rest}"


def kernels(rows: list[Row]) -> Iterator[tuple[Row, list[list[Any]]]]:
    """Of each file with kernels, those that are compared one by one."""
    for row in _of(rows, "steps"):
        if row["kind"] == "kernels":
            yield row, [one for one in row["rows"] if one[2] >= LEAST_US]


def off(large: list[list[Any]], column: int = 3) -> float:
    """The median error."""
    return median(abs(one[column] / one[2] - 1) for one in large)


def _bar(error: float, bar: float) -> str:
    return f"{100 * bar:g}%: {'reached' if error <= bar else 'missed'}"


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per step, then per set of kernels."""
    cells = []
    for step in all_steps(rows):
        error, old = step.ours / step.measured - 1, step.control / step.measured - 1
        cells.append([f"{step.name}: {step.what}{' (fitted to it)' if step.fitted else ''}", f"{step.measured:.1f} ms",
                      f"{step.ours:.1f} ms", f"{error:+.1%}", f"{old:+.1%}", _bar(abs(error), STEP_BAR)])  # fmt: skip
    for row, large in kernels(rows):
        if large:
            name = f"{_named(row['label'])}: {len(large)} kernels of at least {LEAST_US:g} us, median error"
            cells.append([name, "", "", f"{off(large):.1%}", f"{off(large, 4):.1%}", _bar(off(large), KERNEL_BAR)])
    for row in _of(rows, "fit"):
        held = row["held_out"]
        cells.append([f"the same, {held['kernels']} of them by coefficients fitted to other shapes", "", "",
                      f"{held['middle']:.1%}", "", _bar(held["middle"], KERNEL_BAR)])  # fmt: skip
    for key, mean in means(_of(rows, "peaks")).items():
        bar = ""
        if key == "ours":
            bar = f"{_bar(mean['error'], PEAK_BAR)}; none wrong: {'missed' if mean['wrong'] else 'reached'}"
        wrong = f"{mean['wrong']} of {mean['verdicts']} verdicts wrong"
        name = f"peaks of {mean['of']} runs, {ESTIMATORS[key]}, mean error; {wrong}"
        cells.append([name, "", "", f"{mean['error']:.1%}", "", bar])
    for row in sorted(_of(rows, "plans"), key=lambda row: -row["limit"]):
        by = {one["times"]: one for one in row["rows"]}
        model, old = by[MODEL], by[ROOFLINE]
        apart, more = abs(model["said"] - model["measured"]), model["measured"] - model["own"]
        name = f"overhead within {row['limit']:.0%} of the peak: said, under measured times"
        before = f"{_percent(old['said'])} said, {_percent(old['measured'])}"
        cells.append([name, _percent(model["measured"]), _percent(model["said"]), f"{100 * apart:.1f} points", before,
                      _bar(apart, PLAN_BAR)])  # fmt: skip
        cells.append(["the same: above the plan made for the measured times, and the floor",
                      f"{_percent(model['own'])}, {_percent(model['floor'])}", _percent(model["measured"]),
                      f"{100 * more:+.1f} points", f"{100 * (old['measured'] - old['own']):+.1f} points",
                      _bar(more, PLAN_BAR)])  # fmt: skip
    return ["", "measured", "ours", "error", "one roofline's", "bar"], cells


def _percent(part: float) -> str:
    return f"{part:.1%}"


def means(points: list[Row]) -> dict[str, Row]:
    """By estimator, ours first, as ``experiments.measured.peaks.means`` has it; those that have an error."""
    if not points:
        return {}
    from experiments.measured import peaks  # PyTorch

    return {name: mean for name, mean in peaks.means(points).items() if mean["of"]}


def _error(estimator: str) -> str:
    return "error" if estimator == "ours" else f"{estimator}_error"


def notes(rows: list[Row]) -> list[str]:
    """Bars that were missed, where kernels are off, the model's error, and what has not been compared."""
    found = all_steps(rows)
    unseen = [step for step in found if not step.fitted]
    missed = [step for step in found if abs(step.ours / step.measured - 1) > STEP_BAR]
    out = []
    if unseen:
        errors, old = ([abs(getattr(s, key) / s.measured - 1) for s in unseen] for key in ("ours", "control"))
        out.append(
            f"Steps that no coefficient was fitted to: {len(unseen)}, mean error {sum(errors) / len(errors):.1%}, "
            f"worst {max(errors):.1%}; one roofline {sum(old) / len(old):.1%} and {max(old):.1%}. Those of the V100 "
            "were looked at when the rate of its float32 convolutions was chosen."
        )
    if missed:
        said = "; ".join(f"{s.name} ({s.ours / s.measured - 1:+.1%}, {s.what})" for s in missed)
        out.append(f"Steps that are off by more than {STEP_BAR:.0%}: {said}.")
    for row, large in kernels(rows):
        if large:
            near = sum(abs(one[3] / one[2] - 1) <= KERNEL_BAR for one in large) / len(large)
            worst = max(large, key=lambda one: max(one[3] / one[2], one[2] / max(one[3], 1e-9)))
            out.append(
                f"{_named(row['label'])} ({row['source']}): {near:.0%} of the kernels are within {KERNEL_BAR:.0%}; "
                f"farthest off is {worst[0]}, {worst[2]:,.0f} us, ours {worst[3]:,.0f}."
            )
    out += [
        f"The standard deviation of ln(measured / modelled) is {row['error']:.3f} over the kernels fitted to, "
        f"{row['held_out']['spread']:.3f} on shapes that were not."
        for row in _of(rows, "fit")
    ]
    for row in _of(rows, "plans"):
        said = "; ".join(
            f"{one['times']}: {one['said']:.1%} said, {one['measured']:.1%} ({one['planner']})" for one in row["rows"]
        )
        out.append(
            f"Plans within {row['limit']:.0%} of the peak, said and under the measured times, by what was believed of "
            f"the times: {said}."
        )
    points = _of(rows, "peaks")
    if measured := [row for row in points if row["error"] is not None]:
        worst = max(measured, key=lambda row: abs(row["error"]))
        low = sum(row["error"] < 0 for row in measured)
        out.append(
            f"Peaks: {len(points)} runs, of which {len(points) - len(measured)} did not fit; ours is too low at {low} "
            f"of {len(measured)}, farthest off at {worst['network']}, {worst['optimizer']}, batch {worst['batch']} on "
            f"{worst['gpu']} ({worst['error']:+.1%})."
        )
    out.append(
        "Times not compared with any measurement: attention and matrix products on tensor cores, normalisations other "
        "than batch norm, grouped and transposed convolutions, recurrent networks; GPUs but those in the table."
    )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """Kernels by kind, ours and the control's; steps; sums by kind."""
    panels: list[Callable[[Axes], None]] = []
    large = [one for _, found in kernels(rows) for one in found]
    if large:
        names = ", ".join(_named(row["label"]) for row, _ in kernels(rows))
        panels += [lambda axes: _scatter(axes, large, 3, f"Kernels: {names}"),
                   lambda axes: _scatter(axes, large, 4, "The same by one roofline")]  # fmt: skip
    if all_steps(rows):
        panels.append(lambda axes: _steps(axes, all_steps(rows)))
    for row in _of(rows, "steps"):
        if row["kind"] == "kinds":
            panels.append(lambda axes, row=row: _kinds(axes, row))  # type: ignore[misc]
    if _of(rows, "plans"):
        panels.append(lambda axes: _plans(axes, _of(rows, "plans")))
    if means(_of(rows, "peaks")):
        panels.append(lambda axes: _peaks(axes, _of(rows, "peaks")))
    with panel_grid(path, len(panels), 3, (6.4, 4.9), (0.3, 0.2)) as (grid, _):
        for axes, panel in zip(grid, panels, strict=True):
            panel(axes)


def _scatter(axes: Axes, large: list[list[Any]], column: int, title: str) -> None:
    low, high = min(one[2] for one in large) / 1.5, max(one[2] for one in large) * 1.5
    axes.plot([low, high], [low, high], color=INK, linewidth=1.0, zorder=1)
    axes.fill_between([low, high], [low * (1 - KERNEL_BAR), high * (1 - KERNEL_BAR)],
                      [low * (1 + KERNEL_BAR), high * (1 + KERNEL_BAR)], color=GRID, linewidth=0, zorder=0)  # fmt: skip
    kinds = sorted({one[1] for one in large}, key=list(KERNELS).index)
    for kind in kinds:
        mine = [one for one in large if one[1] == kind]
        axes.plot([one[2] for one in mine], [one[column] for one in mine], "o", color=KERNELS[kind], markersize=4,
                  alpha=0.75, markeredgewidth=0, zorder=3)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=title, xlabel="measured (us)",
             ylabel="said (us)")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.text(0.97, 0.04, f"median error {off(large, column):.1%}\ngrey: ±{KERNEL_BAR:.0%}", transform=axes.transAxes,
              ha="right", fontsize=10, color=INK)  # fmt: skip
    handles = [
        Line2D([], [], color=KERNELS[kind], marker="o", linestyle="", markersize=5, label=kind) for kind in kinds
    ]
    axes.legend(handles=handles, loc="upper left", fontsize=9, handletextpad=0.2)


def _steps(axes: Axes, steps: list[Step]) -> None:
    """What is said of each step over what was measured."""
    axes.axvspan(1 - STEP_BAR, 1 + STEP_BAR, color=GRID, linewidth=0, zorder=0)
    axes.axvline(1, color=INK, linewidth=1.0, zorder=1)
    for y, step in enumerate(steps):
        ours, control = step.ours / step.measured, step.control / step.measured
        axes.plot([ours, control], [y, y], color=FAINT, linewidth=1.0, zorder=1)
        axes.plot(control, y, "o", color=CONTROL, markersize=7, zorder=2)
        axes.plot(ours, y, "o", color=OURS, markersize=8, zorder=3,
                  markerfacecolor="white" if step.fitted else OURS, markeredgewidth=1.8)  # fmt: skip
    axes.set_yticks(range(len(steps)), [step.name for step in steps], fontsize=9)
    axes.set(xscale="log", ylim=(len(steps) - 0.4, -0.6), xlabel="said over measured", title="Whole steps")
    axes.set_xticks([0.7, 1, 1.5, 2, 3, 5])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.legend(handles=[
        Line2D([], [], color=OURS, marker="o", linestyle="", label="ours"),
        Line2D([], [], color=OURS, marker="o", markerfacecolor="white", linestyle="", label="ours, fitted to it"),
        Line2D([], [], color=CONTROL, marker="o", linestyle="", label="one roofline"),
    ], fontsize=9, loc="lower right", handletextpad=0.2)  # fmt: skip


def _kinds(axes: Axes, row: Row) -> None:
    """Sums by kind."""
    found = [one for one in row["rows"] if one[2] >= 100 and one[3]]
    for i, (column, colour, label) in enumerate(
        ((2, INK, "measured"), (3, OURS, "ours"), (4, CONTROL, "one roofline"))
    ):
        axes.barh([y + 0.27 * (i - 1) for y in range(len(found))], [one[column] / 1e3 for one in found], height=0.25,
                  color=colour, label=label)  # fmt: skip
    axes.set_yticks(range(len(found)), [one[0] for one in found], fontsize=9)
    axes.set(xscale="log", ylim=(len(found) - 0.4, -0.6), xlabel="ms of a step",
             title=f"By kind, fitted to it: {_named(row['label']).rpartition(', ')[0]}")  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.legend(fontsize=9, loc="lower right")


def _plans(axes: Axes, rows: list[Row]) -> None:
    """By limit: overhead as said (hollow) and under the measured times, by belief; the plan for these; the floor."""
    looks = {MODEL: (OURS, "o"), ROOFLINE: (CONTROL, "o")}
    limits = sorted({row["limit"] for row in rows}, reverse=True)
    for row in rows:
        x = limits.index(row["limit"])
        for one in row["rows"]:
            if one["times"] in looks:
                colour, marker = looks[one["times"]]
                at = x + (-0.12 if one["times"] == MODEL else 0.12)
                axes.plot([at, at], [100 * one["said"], 100 * one["measured"]], color=colour, linewidth=1.2, zorder=2)
                axes.plot(at, 100 * one["said"], marker, color=colour, markerfacecolor="white", markersize=8, zorder=3)
                axes.plot(at, 100 * one["measured"], marker, color=colour, markersize=8, zorder=3)
        first = row["rows"][0]
        axes.plot([x - 0.3, x + 0.3], [100 * first["own"]] * 2, color=INK, linewidth=1.4, zorder=1)
        axes.plot([x - 0.3, x + 0.3], [100 * first["floor"]] * 2, color=FAINT, linewidth=1.4, linestyle=":", zorder=1)
    axes.set_xticks(range(len(limits)), [f"{limit:.0%}" for limit in limits])
    axes.set(title="Plans under measured times: H100, ResNet-50", xlabel="limit, of the peak", ylabel="overhead (%)",
             xlim=(-0.5, len(limits) - 0.5))  # fmt: skip
    axes.legend(handles=[
        Line2D([], [], color=OURS, marker="o", markerfacecolor="white", linestyle="", label="said"),
        Line2D([], [], color=OURS, marker="o", linestyle="", label="under measured times"),
        Line2D([], [], color=CONTROL, marker="o", linestyle="", label="the same by one roofline"),
        Line2D([], [], color=INK, label="planned for the measured times"),
        Line2D([], [], color=FAINT, linestyle=":", label="floor"),
    ], fontsize=9, loc="upper left", handletextpad=0.4)  # fmt: skip


def _peaks(axes: Axes, points: list[Row]) -> None:
    """What each estimator says over NVML's peak; a dot for each run."""
    found = means(points)
    axes.axvspan(1 - PEAK_BAR, 1 + PEAK_BAR, color=GRID, linewidth=0, zorder=0)
    axes.axvline(1, color=INK, linewidth=1.0, zorder=1)
    for y, name in enumerate(found):
        ratios = [1 + row[_error(name)] for row in points if row[_error(name)] is not None]
        axes.plot(ratios, [y] * len(ratios), "o", color=OURS if name == "ours" else CONTROL, markersize=6, alpha=0.6,
                  markeredgewidth=0, zorder=3)  # fmt: skip
        said = (
            f"mean error {found[name]['error']:.1%}, {found[name]['wrong']} of {found[name]['verdicts']} verdicts wrong"
        )
        axes.text(0.98, y + 0.32, said, transform=axes.get_yaxis_transform(), fontsize=9, color=INK, ha="right")
    axes.set_yticks(range(len(found)), [ESTIMATORS[name] for name in found])
    axes.set(ylim=(len(found) - 0.4, -0.6), xlabel="said over measured", title=f"Peaks of {len(points)} runs")
