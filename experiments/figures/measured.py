"""Comparison of predictions with measurements of real GPUs: times of kernels and whole steps, and peaks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.plotting.charts import ONE, Axis, Chart, Line, Mark, Panel, Rule, Words, between, groups
from experiments.plotting.palette import CONTROL, FAINT, GRID, INK, KERNELS, OURS
from simulator.machine import Machine

DATA = cli.CONFIGS.parent / "tests" / "data" / "measured"
WHOLE = "steps.csv"  # steps with only the time published
PEAKS = "xmem_points.csv"
PARTS = ("steps", "fit", "peaks", "plans")
STEP_BAR, KERNEL_BAR, PEAK_BAR, LEFT_OUT_BAR = 0.1, 0.15, 0.042, 0.12
PLAN_BAR = 0.03  # of the ideal time, in points of overhead
MODEL, ROOFLINE = "model", "roofline"  # time models of experiments/measured/plans.py
ESTIMATORS = {"ours": "ours", "xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}
LEAST_US = 20.0
FITTED = ("h100_resnet50.csv", "v100_resnet50_by_kind.csv", *(
    f"nvidia_h200-{network}.json" for network in ("gpt2_medium_bf16", "llama_bf16", "resnet50_imagenet_bf16")
))  # fmt: skip
GPUS = {"h100": "H100", "h200": "H200", "v100": "V100", "a100_80gb": "A100 80 GB", "rtx2080ti": "RTX 2080 Ti"}


class Measured(Figure):
    """Comparison of predictions with measurements of real GPUs: times of kernels and whole steps, and peaks."""

    name = "measured"
    simulated = False

    def tasks(self, settings: DictConfig) -> list[Row]:
        asked = figures.chosen(settings, "parts", PARTS, "part ")
        if not (DATA / WHOLE).exists():
            raise cli.UsageError(f"{DATA} not found: the measurements come with the repository")
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

    def run(self, task: Row, machine: Machine) -> Row:
        if task["part"] == "plans":
            from experiments.measured import plans

            return {"rows": plans.rows(limits=(task["limit"],), calls=task["calls"])}
        if task["part"] == "peaks":
            from experiments.measured import peaks

            return peaks.row(peaks.points()[task["point"]])
        from experiments.measured import fit, steps  # PyTorch

        if task["part"] == "fit":
            found = fit.h100()
            assert found.held_out is not None
            held = found.held_out
            return {"error": found.errors.spread, "middle": found.errors.middle,
                    "held_out": {"kernels": held.kernels, "middle": held.middle, "spread": held.spread},
                    "networks": [one._asdict() for one in fit.h200().networks]}  # fmt: skip
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
        step_ms = None if read.step_ns is None else read.step_ns / 1e6
        found = _plain(steps.of_profile(read))
        return {"kind": "kernels", "label": label, "source": read.source, "step_ms": step_ms, "rows": found}

    def numbers(self, rows: list[Row]) -> Row:
        steps, fits = all_steps(rows), _of(rows, "fit")
        unseen = [step for step in steps if not step["fit"]]
        errors = [[abs(step[key]) for step in unseen] for key in ("error", "old")]
        return {
            "steps": steps,
            "kernels": [{"name": _named(row["label"]), "count": len(large), "errors": [off(large), off(large, 4)],
                         "bar": bar(off(large), KERNEL_BAR)} for row, large in kernels(rows)],
            "fits": [{**row, "bar": bar(row["held_out"]["middle"], KERNEL_BAR)} for row in fits],
            "left_out": [
                {**one, "name": _named(f"h200: {one['workload']}"), "bar": bar(abs(one["left_out"]), LEFT_OUT_BAR)}
                for row in fits for one in row["networks"]
            ],
            "peaks": [
                {**mean, "name": ESTIMATORS[name], "bar": bar(mean["error"], PEAK_BAR) if name == "ours" else None}
                for name, mean in means(_of(rows, "peaks")).items()
            ],
            "plans": [of_plans(row) for row in sorted(_of(rows, "plans"), key=lambda row: -row["limit"])],
            "unseen": len(unseen) or None, "errors": [sum(e) / len(e) if e else None for e in errors],
            "worst": [max(e, default=None) for e in errors],
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        panels: list[Panel] = []
        if large := [one for _, found in kernels(rows) for one in found]:
            names = [_named(row["label"]) for row, _ in kernels(rows)]
            about = ", ".join(names) if len(names) < 2 else f"{len(names)} steps"
            panels += [scatter(large, 3, f"Kernels: {about}"), scatter(large, 4, "The same by one roofline")]
        if steps := all_steps(rows):
            x, ticks = [[step[key] + 1 for step in steps] for key in ("error", "old")], (0.7, 1, 1.5, 2, 3, 5)
            marks = [Rule(1 - STEP_BAR, 1 + STEP_BAR, colour=GRID), ONE,
                     *pair(x, [bool(step["fit"]) for step in steps], "ours, fitted to it")]  # fmt: skip
            panels.append(Panel("Whole steps", marks, Axis("said over measured", "{:g}", scale="log", ticks=ticks),
                                Axis(names=[step["name"] for step in steps])))  # fmt: skip
        panels += [of_kinds(row) for row in _of(rows, "steps") if row["kind"] == "kinds"]
        if plans := _of(rows, "plans"):
            panels.append(planned(sorted(plans, key=lambda row: -row["limit"])))
        if found := means(_of(rows, "peaks")):
            points = _of(rows, "peaks")
            marks = [Rule(1 - PEAK_BAR, 1 + PEAK_BAR, colour=GRID), ONE]
            for y, name in enumerate(found):
                key, ink = ("error", OURS) if name == "ours" else (f"{name}_error", CONTROL)
                ratios = [1 + row[key] for row in points if row[key] is not None]
                marks.append(Line(ratios, [y] * len(ratios), ink, marker="o", line="", alpha=0.6))
            texts = [f"{ESTIMATORS[name]}\nmean {one['error']:.0%}\n{one['wrong']}/{one['verdicts']} wrong"
                     for name, one in found.items()]  # fmt: skip
            panels.append(Panel(f"Peaks of {len(points)} runs", marks, Axis("said over measured"), Axis(names=texts)))
        return Chart("Measured on GPUs, and what we say (grey: the bar)", panels, 3, (6.4, 4.9), (0.3, 0.7), keys=6)


def _files() -> list[Path]:
    """Returns the files of traces, sums by kind, profiled steps and whole steps."""
    found = [path for path in DATA.glob("*.csv") if path.name in (*FITTED, WHOLE) or path.with_suffix(".yaml").exists()]
    return [*sorted(found), *sorted(DATA.glob("*.json"))]


def _digest(path: Path) -> str:
    about = path.with_suffix(".yaml")
    return hashlib.sha256(path.read_bytes() + (about.read_bytes() if about.exists() else b"")).hexdigest()[:12]


def _plain(rows: list[Any]) -> list[list[Any]]:
    return [[row.name, row.kind, *(round(us, 3) for us in (row.measured, row.ours, row.control))] for row in rows]


def all_steps(rows: list[Row]) -> list[Row]:
    """Returns every step in ms with relative errors of our model and the control, fitted steps first."""
    found: list[Row] = []
    for row in _of(rows, "steps"):
        steps = row["rows"]
        if row["kind"] != "whole":
            steps = [(row["label"], "sum of kernels", *(sum(one[i] for one in steps) / 1e3 for i in (2, 3, 4)))]
        for name, what, measured, ours, control in steps:
            error, fit = ours / measured - 1, " (fitted to it)" if row.get("file") in FITTED else ""
            found.append({
                "name": _named(name), "what": what + fit, "measured": measured, "ours": ours, "error": error,
                "fit": fit, "old": control / measured - 1, "bar": bar(abs(error), STEP_BAR),
            })  # fmt: skip
    return sorted(found, key=lambda step: not step["fit"])


def _of(rows: list[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part]


def _named(label: str) -> str:
    machine, _, rest = label.partition(": ")
    for short, long in (("resnet50", "ResNet-50"), ("vgg13", "VGG13"), ("float", "fp"), ("tf32", "TF32")):
        rest = rest.replace(short, long)
    return f"{GPUS.get(machine, machine)}, {rest}"


def kernels(rows: list[Row]) -> Iterator[tuple[Row, list[list[Any]]]]:
    """Yields each file with kernels, and its individually compared kernels."""
    for row in _of(rows, "steps"):
        if row["kind"] == "kernels" and (large := [one for one in row["rows"] if one[2] >= LEAST_US]):
            yield row, large


def off(large: list[list[Any]], column: int = 3) -> float:
    """Returns the median error."""
    return median(abs(one[column] / one[2] - 1) for one in large)


def bar(error: float, most: float) -> str:
    """Formats whether the error meets its threshold."""
    return f"{100 * most:g}%: {'reached' if error <= most else 'missed'}"


def means(points: list[Row]) -> dict[str, Row]:
    """Returns the estimators that have an error, ours first, as ``experiments.measured.peaks.means`` does."""
    if not points:
        return {}
    from experiments.measured import peaks  # PyTorch

    return {name: mean for name, mean in peaks.means(points).items() if mean["of"]}


def of_plans(row: Row) -> Row:
    """Returns the predictions for plans at a limit, and their times under measured durations."""
    by = {one["times"]: one for one in row["rows"]}
    model, old = by[MODEL], by[ROOFLINE]
    apart, more = abs(model["said"] - model["measured"]), model["measured"] - model["own"]
    return {
        "limit": row["limit"], "model": model, "old": old, "apart": 100 * apart, "bar": bar(apart, PLAN_BAR),
        "more": [100 * more, 100 * (old["measured"] - old["own"])], "more_bar": bar(more, PLAN_BAR),
    }  # fmt: skip


def pair(x: Sequence[Sequence[float]], hollow: Sequence[bool], label: str) -> list[Mark]:
    """Draws a row per entry: the plain roofline's value, and ours, hollow or filled."""
    (ours, control), rows = x, range(len(hollow))
    marks: list[Mark] = [between(ours, control, rows, FAINT),
                         Line(control, rows, CONTROL, "one roofline", "o", "", size=7)]  # fmt: skip
    for which, name in ((False, "ours"), (True, label)):
        shown = [value if one == which else None for value, one in zip(ours, hollow, strict=True)]
        marks.append(Line(shown, rows, OURS, name, "o", "", size=8, hollow=which, front=4))
    return marks


def scatter(large: list[list[Any]], column: int, title: str) -> Panel:
    """Draws predicted against measured times of each kernel, by kind."""
    low, high = min(one[2] for one in large) / 1.5, max(one[2] for one in large) * 1.5
    ends = np.array([low, high])
    marks: list[Mark] = [Line(ends, ends, INK, width=1, band=((1 - KERNEL_BAR) * ends, (1 + KERNEL_BAR) * ends))]
    for kind in sorted({one[1] for one in large}, key=list(KERNELS).index):
        mine = [one for one in large if one[1] == kind]
        x, y = ([one[i] for one in mine] for i in (2, column))
        marks.append(Line(x, y, KERNELS[kind], kind, "o", "", size=4, alpha=0.75))
    said = f"median error {off(large, column):.1%}\ngrey: ±{KERNEL_BAR:.0%}"
    marks.append(Words(high / 1.1, 0.12, said, "right", top=True))
    where = [Axis(f"{name} (us)", "{:g}", (low, high), "log", (100, 1000)) for name in ("measured", "said")]
    return Panel(title, marks, *where)


def of_kinds(row: Row) -> Panel:
    """Draws sums by kind."""
    found = [one for one in row["rows"] if one[2] >= 100 and one[3]]
    series = [(label, ink, [one[i] / 1e3 for one in found], ())
              for i, ink, label in ((2, INK, "measured"), (3, OURS, "ours"), (4, CONTROL, "one roofline"))]  # fmt: skip
    title = f"By kind, fitted to it: {_named(row['label']).rpartition(', ')[0]}"
    return Panel(title, groups(series, across=True), Axis("ms of a step", "{:g}", scale="log", ticks=(0.1, 1, 10)),
                 Axis(names=[one[0] for one in found]))  # fmt: skip


def planned(rows: list[Row]) -> Panel:
    """Draws the overheads by limit and time model: predicted (hollow), under measured times, and the floor."""
    marks: list[Mark] = []
    x = np.arange(len(rows))
    for key, ink, name, shift in ((MODEL, OURS, "ours", -0.12), (ROOFLINE, CONTROL, "one roofline", 0.12)):
        mine = [next(one for one in row["rows"] if one["times"] == key) for row in rows]
        said, took = ([one[k] for one in mine] for k in ("said", "measured"))
        marks += [
            between(said, took, x + shift, ink, upright=True),
            Line(x + shift, said, ink, f"{name}: said", "o", "", size=8, hollow=True),
            Line(x + shift, took, ink, f"{name}: under measured times", "o", "", size=8),
        ]
    own, low = ([row["rows"][0][key] for row in rows] for key in ("own", "floor"))
    marks += [Line(x, own, INK, "planned for the measured times", "_", "", size=30),
              Line(x, low, FAINT, "the floor", "_", "", size=30)]  # fmt: skip
    limits = Axis("limit, of the peak", names=[f"{row['limit']:.0%}" for row in rows])
    return Panel("Plans under measured times: H100, ResNet-50", marks, limits, Axis("overhead", "%"))
