"""Comparison of predictions with measurements of real GPUs: times of kernels and whole steps, and peaks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import ONE, Axis, Chart, Line, Mark, Panel, Rule, Words, between
from experiments.plotting.palette import FAINT, INK
from simulator.machine import Machine

DATA = cli.CONFIGS.parent / "tests" / "data" / "measured"
STEPS = "steps.csv"  # steps with only the time published
PEAKS = "xmem_points.csv"
# Accepted errors; of a plan in overhead.
BARS = {"step": 0.1, "kernel": 0.15, "peak": 0.042, "left_out": 0.12, "plan": 0.03}
FITTED = (
    "h100_resnet50.csv",
    "v100_resnet50_by_kind.csv",
    *(f"nvidia_h200-{network}.json" for network in ("gpt2_medium_bf16", "llama_bf16", "resnet50_imagenet_bf16")),
)


class Measured(Figure):
    """Comparison of predictions with measurements of real GPUs: times of kernels and whole steps, and peaks."""

    name = "measured"
    # Colors of our model and of the control, and of kernels by kind.
    ours = "#1f5fa8"
    control = "#f16913"
    kernels: ClassVar = {
        "conv": "#4a148c",
        "matmul": "#cb181d",
        "norm": "#e377c2",
        "activation": "#238b45",
        "pool": "#8e5bd0",
        "elementwise": "#00a6c8",
        "optimizer": "#17becf",
        "reduce": "#d6336c",
        "copy": "#b8860b",
        "dropout": "#9a9a9a",
        "rnn": "#8c564b",
        "lrn": "#bcbd22",
        "other": "#7a5c3a",
    }
    estimators: ClassVar = {
        "ours": "ours",
        "xmem": "xMem",
        "dnnmem": "DNNMem",
        "schedtune": "SchedTune",
        "llmem": "LLMem",
    }
    simulated = False
    pictures = ("", "_memory")

    def tasks(self, settings: DictConfig) -> Rows:
        parts = figures.choices(settings, "parts", ("steps", "fit", "peaks", "plans"), "part ")
        if not (DATA / STEPS).exists():
            raise cli.UsageError(f"{DATA} not found: the measurements come with the repository; run in a clone of it")
        tasks: Rows = []
        if "steps" in parts:
            tasks += [{"part": "steps", "file": path.name, "sha256": _digest(path)} for path in _files()]
        if "peaks" in parts:
            path = DATA / PEAKS
            count = len(path.read_text().splitlines()) - 1
            digest = _digest(path)
            tasks += [{"part": "peaks", "file": PEAKS, "point": i, "sha256": digest} for i in range(count)]
        if "plans" in parts:
            calls = cli.integer(settings, "calls", 1)
            tasks += [{"part": "plans", "limit": limit, "calls": calls} for limit in cli.values(settings, "limits")]
        return [*tasks, *({"part": part} for part in parts if part == "fit")]

    def run(self, task: Row, machine: Machine) -> Row:
        if task["part"] == "plans":
            from experiments.measure.published import plans

            return {"rows": plans.rows(limits=(task["limit"],), calls=task["calls"])}
        if task["part"] == "peaks":
            from experiments.measure.published import peaks

            return peaks.row(peaks.points()[task["point"]])
        from experiments.measure.published import fit, steps  # PyTorch

        if task["part"] == "fit":
            fitted = fit.h100()
            assert fitted.held_out is not None
            held_out = fitted.held_out
            return {
                "error": fitted.errors.spread,
                "middle": fitted.errors.median,
                "held_out": {"kernels": held_out.kernels, "middle": held_out.median, "spread": held_out.spread},
                "networks": [network._asdict() for network in fit.h200().networks],
            }
        path = DATA / task["file"]
        if path.name == STEPS:
            return {
                "kind": "whole",
                "rows": [list(step) for step in steps.published()],
            }
        if path.stem == steps.BY_KIND:
            return {"kind": "kinds", "label": "v100: resnet50, 32, float32, NCHW", "rows": _rounded(steps.by_kind())}
        data = steps.load(path)
        if isinstance(data, steps.Trace):
            batch = data.network.get("batch_size", "")
            label = f"{data.machine}: {data.name.partition('_')[2] or data.name}, {batch}"
            return {"kind": "kernels", "label": label, "source": data.source, "rows": _rounded(steps.of_trace(data))}
        label = f"{data.machine}: {data.workload}"
        step_ms = None if data.step_ns is None else data.step_ns / 1e6
        kernel_rows = _rounded(steps.of_profile(data))
        return {"kind": "kernels", "label": label, "source": data.source, "step_ms": step_ms, "rows": kernel_rows}

    def template_values(self, rows: Rows) -> Row:
        steps = all_steps(rows)
        fits = _rows_of(rows, "fit")
        unseen = [step for step in steps if not step["fit"]]
        errors = [[abs(step[key]) for step in unseen] for key in ("error", "old")]
        large_kernels = []
        for row, large in kernels(rows):
            middle = error(large)
            entry = {"name": _title(row["label"]), "count": len(large), "bar": bar(middle, "kernel")}
            large_kernels.append({**entry, "errors": [middle, error(large, 4)]})
        left_out = []
        for network in (network for row in fits for network in row["networks"]):
            name = _title(f"h200: {network['workload']}")
            left_out.append({**network, "name": name, "bar": bar(abs(network["left_out"]), "left_out")})
        peaks = []
        for name, mean in means(_rows_of(rows, "peaks")).items():
            verdict = bar(mean["error"], "peak") if name == "ours" else None
            peaks.append({**mean, "name": self.estimators[name], "bar": verdict})
        return {
            "steps": steps,
            "kernels": large_kernels,
            "fits": [{**row, "bar": bar(row["held_out"]["middle"], "kernel")} for row in fits],
            "left_out": left_out,
            "peaks": peaks,
            "plans": list(map(plan_entry, _rows_of(rows, "plans"))),
            "unseen": len(unseen) or None,
            "errors": [sum(e) / len(e) if e else None for e in errors],
            "worst": [max(e, default=None) for e in errors],
        }

    def chart(self, rows: Rows) -> Chart:
        panels: list[Panel] = []
        title = "Times on GPUs, predicted and measured"
        if large := [kernel for _, compared in kernels(rows) for kernel in compared]:
            panels += [scatter(large, 3, "Our model"), scatter(large, 4, "One roofline")]
            errors = [f"{error(large, column):.0%}" for column in (3, 4)]
            title = f"{len(large):,} kernels: median error {errors[0]} with our model, {errors[1]} with one roofline"
        if steps := all_steps(rows):
            x = [[step[key] + 1 for step in steps] for key in ("error", "old")]
            ticks = (0.7, 1, 1.5, 2, 3, 5)
            marks = [
                Rule(1 - BARS["step"], 1 + BARS["step"], color="#eeeeee"),
                ONE,
                *paired_marks(x, [bool(step["fit"]) for step in steps], "ours, fitted to it"),
            ]
            names = [step["name"].replace(" 80 GB", "").replace(", NCHW", "") for step in steps]
            names = [name.replace("ResNet-50, ", "") for name in names]
            panels.append(
                Panel(
                    f"Steps of ResNet-50 and others (gray: ±{BARS['step']:.0%})",
                    marks,
                    Axis("predicted / measured", "{:g}", scale="log", ticks=ticks),
                    Axis(names=names),
                )
            )
        panels += [kinds_panel(row) for row in _rows_of(rows, "steps") if row["kind"] == "kinds"]
        return Chart(title, panels, 2, (4.95, 3.9), (0.0, 1.2), keys=5)

    def charts(self, rows: Rows) -> dict[str, Chart]:
        panels = []
        title = "Plans under measured times"
        if plans := _rows_of(rows, "plans"):
            panels.append(plans_panel(plans))
        if estimators := means(_rows_of(rows, "peaks")):
            points = _rows_of(rows, "peaks")
            most = max(mean["of"] for mean in estimators.values())
            marks: list[Mark] = [Rule(1 - BARS["peak"], 1 + BARS["peak"], color="#eeeeee"), ONE]
            for y, name in enumerate(estimators):
                key, ink = ("error", self.ours) if name == "ours" else (f"{name}_error", INK)
                ratios = [1 + row[key] for row in points if row[key] is not None]
                marks.append(Line(ratios, [y] * len(ratios), ink, marker="o", line="", alpha=0.6))
            texts = [
                f"{self.estimators[name]}\n{mean['wrong']} of {mean['verdicts']}\nverdicts wrong"
                for name, mean in estimators.items()
            ]
            axis = Axis("predicted / measured peak")
            panels.append(Panel(f"Peaks (gray: ±{BARS['peak']:.1%})", marks, axis, Axis(names=texts)))
            errors = ", ".join(
                f"{self.estimators[name]} {mean['error']:.0%}" + f" (of {mean['of']})" * (mean["of"] < most)
                for name, mean in estimators.items()
            )
            title = f"Mean error of {most} peaks: {errors}"
        return {"": self.chart(rows), "_memory": Chart(title, panels, 2, (4.95, 3.8), (0.0, 1.3), keys=2)}


def _files() -> list[Path]:
    """Returns the files of traces, sums by kind, profiled steps and whole steps."""
    files = [path for path in DATA.glob("*.csv") if path.name in (*FITTED, STEPS) or path.with_suffix(".yaml").exists()]
    return [*sorted(files), *sorted(DATA.glob("*.json"))]


def _digest(path: Path) -> str:
    metadata = path.with_suffix(".yaml")
    return hashlib.sha256(path.read_bytes() + (metadata.read_bytes() if metadata.exists() else b"")).hexdigest()[:12]


def _rounded(rows: list[Any]) -> list[list[Any]]:
    return [[row.name, row.kind, *(round(us, 3) for us in (row.measured, row.modeled, row.control))] for row in rows]


def all_steps(rows: Rows) -> Rows:
    """Returns every step in ms with relative errors of our model and the control, fitted steps first."""
    steps_ms: Rows = []
    for row in _rows_of(rows, "steps"):
        steps = row["rows"]
        if row["kind"] != "whole":
            steps = [(row["label"], "sum of kernels", *(sum(kernel[i] for kernel in steps) / 1e3 for i in (2, 3, 4)))]
        for name, source, measured, ours, control in steps:
            error = ours / measured - 1
            note = " (fitted to it)" if row.get("file") in FITTED else ""
            steps_ms.append(
                {
                    "name": _title(name),
                    "what": source + note,
                    "measured": measured,
                    "ours": ours,
                    "error": error,
                    "fit": note,
                    "old": control / measured - 1,
                    "bar": bar(abs(error), "step"),
                }
            )
    return sorted(steps_ms, key=lambda step: not step["fit"])


def _rows_of(rows: Rows, part: str) -> Rows:
    """Returns the rows of a part; those of plans in the order of their limits, the loosest first."""
    return sorted((row for row in rows if row["part"] == part), key=lambda row: -row.get("limit", 0))


def _title(label: str) -> str:
    machine, _, workload = label.partition(": ")
    if "," not in workload:
        return f"{figures.label(machine)}, {figures.label(workload)}"
    for short, long in (("resnet50", "ResNet-50"), ("vgg13", "VGG13"), ("float", "fp"), ("tf32", "TF32")):
        workload = workload.replace(short, long)
    return f"{figures.label(machine)}, {workload}"


def kernels(rows: Rows) -> Iterator[tuple[Row, list[list[Any]]]]:
    """Yields each file with kernels, and its individually compared kernels."""
    for row in _rows_of(rows, "steps"):
        if row["kind"] == "kernels" and (large := [kernel for kernel in row["rows"] if kernel[2] >= 20]):
            yield row, large


def error(large: list[list[Any]], column: int = 3) -> float:
    """Returns the median error."""
    return median(abs(kernel[column] / kernel[2] - 1) for kernel in large)


def bar(error: float, kind: str) -> str:
    """Formats whether the error meets its bar."""
    threshold = BARS[kind]
    return f"{100 * threshold:g}%: {'reached' if error <= threshold else 'missed'}"


def means(points: Rows) -> dict[str, Row]:
    """Returns the estimators that have an error, ours first, as ``experiments.measured.peaks.means`` does."""
    if not points:
        return {}
    from experiments.measure.published import peaks  # PyTorch

    return {name: mean for name, mean in peaks.means(points).items() if mean["of"]}


def plan_entry(row: Row) -> Row:
    """Returns the predictions for plans at a limit, and their times under measured durations."""
    by_model = {entry["times"]: entry for entry in row["rows"]}
    model = by_model["model"]
    roofline = by_model["roofline"]
    error = abs(model["said"] - model["measured"])
    excess = model["measured"] - model["own"]
    return {
        "limit": row["limit"],
        "model": model,
        "old": roofline,
        "apart": 100 * error,
        "bar": bar(error, "plan"),
        "more": [100 * excess, 100 * (roofline["measured"] - roofline["own"])],
        "more_bar": bar(excess, "plan"),
    }


def paired_marks(x: Sequence[Sequence[float]], hollow: Sequence[bool], label: str) -> list[Mark]:
    """Draws a row per entry: the plain roofline's value, and ours, hollow or filled."""
    (ours, control), rows = x, range(len(hollow))
    marks: list[Mark] = [
        between(ours, control, rows, FAINT),
        Line(control, rows, Measured.control, "one roofline", "o", "", size=7),
    ]
    for is_fitted, name in ((False, "ours"), (True, label)):
        values = [value if is_hollow == is_fitted else None for value, is_hollow in zip(ours, hollow, strict=True)]
        marks.append(Line(values, rows, Measured.ours, name, "o", "", size=8, hollow=is_fitted, front=4))
    return marks


def scatter(large: list[list[Any]], column: int, title: str) -> Panel:
    """Returns a panel of predicted against measured times of kernels, by kind.

    Args:
        large: Kernels as lists: name, kind, measured and predicted time in us, and that of one roofline.
        column: Index of the prediction to draw.
        title: Title of the panel.
    """
    low = min(kernel[2] for kernel in large) / 1.5
    high = max(kernel[2] for kernel in large) * 1.5
    ends = np.array([low, high])
    accepted = BARS["kernel"]
    marks: list[Mark] = [Line(ends, ends, INK, width=1, band=((1 - accepted) * ends, (1 + accepted) * ends))]
    for kind in sorted({kernel[1] for kernel in large}, key=list(Measured.kernels).index):
        group = [kernel for kernel in large if kernel[1] == kind]
        x, y = ([kernel[i] for kernel in group] for i in (2, column))
        marks.append(Line(x, y, Measured.kernels[kind], kind, "o", "", size=4, alpha=0.75))
    outside = {"v": [k[2] for k in large if k[column] < low], "^": [k[2] for k in large if k[column] > high]}
    for (marker, x), y in zip(outside.items(), (1.1 * low, high / 1.1), strict=True):
        marks.append(Line(x, [y] * len(x), FAINT, "kernels beyond the axis", marker, "", size=5, front=4))
    counts = "\n{} below, {} above the axis".format(*map(len, outside.values()))
    text = f"median error {error(large, column):.1%}\ngray: ±{accepted:.0%}{counts}"
    marks.append(Words(high / 1.1, 0.18, text, "right", top=True))
    axes = [Axis(f"{name} (us)", "{:g}", (low, high), "log", (100, 1000)) for name in ("measured", "predicted")]
    return Panel(title, marks, *axes)


def kinds_panel(row: Row) -> Panel:
    """Draws sums by kind."""
    kinds = [kind for kind in row["rows"] if kind[2] >= 100]
    marks = [
        Line([kind[i] / 1e3 or np.nan for kind in kinds], range(len(kinds)), ink, name, marker, "", size=8, front=4 - i)
        for i, ink, name, marker in (
            (2, INK, "measured", "|"),
            (3, Measured.ours, "ours", "o"),
            (4, Measured.control, "one roofline", "s"),
        )
    ]
    names = [kind[0] if kind[3] else f"{kind[0]} (predicted: 0)" for kind in kinds]
    title = f"A step by kind: {_title(row['label']).partition(', ')[0]} (fitted)"
    return Panel(title, marks, Axis("ms of a step", "{:g}", scale="log", ticks=(0.1, 1, 10)), Axis(names=names))


def plans_panel(rows: Rows) -> Panel:
    """Draws the overheads by limit and time model: predicted (hollow), under measured times, and the floor."""
    marks: list[Mark] = []
    x = np.arange(len(rows))
    for key, ink, name, shift in (
        ("model", Measured.ours, "ours", -0.12),
        ("roofline", Measured.control, "one roofline", 0.12),
    ):
        entries = [next(entry for entry in row["rows"] if entry["times"] == key) for row in rows]
        predicted, measured = ([entry[k] for entry in entries] for k in ("said", "measured"))
        marks += [
            between(predicted, measured, x + shift, ink, vertical=True),
            Line(x + shift, predicted, ink, f"{name}: predicted", "o", "", size=8, hollow=True),
            Line(x + shift, measured, ink, f"{name}: under measured times", "o", "", size=8),
        ]
    replanned, low = ([row["rows"][0][key] for row in rows] for key in ("own", "floor"))
    marks += [
        Line(x, replanned, INK, "planned for the measured times", "_", "", size=30),
        Line(x, low, FAINT, "the floor", "_", "", size=30),
    ]
    limits = Axis("memory limit, of the peak", names=[f"{row['limit']:.0%}" for row in rows])
    return Panel("Plans for ResNet-50 on an H100", marks, limits, Axis("overhead", "%"))
