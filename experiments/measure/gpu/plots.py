"""Plots of a validation: predicted against measured values, timelines and largest batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agents.planner import MIB
from executor.replay.replay import Measured
from experiments.plotting.charts import DASHED, Axis, Bars, Chart, Line, Mark, Panel, Rule, draw
from experiments.plotting.palette import FAINT, INK, LIMIT, MEASURED, PREDICTED, SPANS, look
from simulator.timeline import STREAMS, Timeline


def scatter(path: Path, replays: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]]) -> None:
    """Plots predicted (x) against measured (y) iteration time and peak; the diagonal is a perfect prediction.

    Args:
        path: image file.
        replays, trained: rows with ``planner``, ``predicted_ns``, ``measured_ns``, ``predicted_peak`` and
            ``measured_peak``; replays have filled markers, training steps hollow ones.
    """
    panels = []
    for predicted, measured, unit, title in (
        ("predicted_ns", "measured_ns", 1e6, "Iteration time, ms (dashed: ±5 %)"),
        ("predicted_peak", "measured_peak", MIB, "Peak, MiB"),
    ):
        marks: list[Mark] = []
        values: list[float] = []
        for rows, hollow in ((replays, False), (trained, True)):
            for name in dict.fromkeys(r["planner"] for r in rows):
                points = [r for r in rows if r["planner"] == name and r[predicted] is not None]
                x, y = ([r[key] / unit for r in points] for key in (predicted, measured))
                values += [*x, *y]
                label = f"{look(name).label}{', training' * hollow}"
                marks.append(Line(x, y, look(name).color, label, look(name).marker, "", hollow=hollow))
        ends = np.array([min(values) * 0.92, max(values) * 1.08])
        marks.append(Line(ends, ends, LIMIT, width=0.9, front=1))
        if unit == 1e6:
            marks += [Line(ends, ends * error, FAINT, line=DASHED, width=0.8, front=1) for error in (0.95, 1.05)]
        scale = "log" if ends[1] > 8 * ends[0] else "linear"
        panels.append(Panel(title, marks, *(Axis(name, "{:g}", scale=scale) for name in ("predicted", "measured"))))
    times = [r["measured_ns"] / r["predicted_ns"] for r in replays if r["predicted_ns"]]
    away = max(abs(r["measured_peak"] / r["predicted_peak"] - 1) for r in (*replays, *trained) if r["predicted_peak"])
    title = f"Replays take {min(times):.2f} to {max(times):.2f} times the predicted time; peaks within {away:.1%}"
    draw(path, Chart(title, panels, 2, (4.95, 4.4), keys=5))


def timelines(path: Path, measured: Measured, workload: str, planner: str) -> None:
    """Plots one steady-state iteration as predicted and as measured, with the memory of both, on one time axis."""
    begin = max(len(measured.timeline.boundaries) - measured.period - 1, 0)
    pair = [
        ("Predicted", measured.predicted, measured.predicted.last_start_ns, PREDICTED),
        ("Measured", measured.timeline, measured.timeline.boundaries[begin], MEASURED),
    ]
    end = 1.01 * max(timeline.boundaries[-1] - start for _, timeline, start, _ in pair) / 1e6
    x = Axis("ms from the start of an iteration", limits=(0, end))
    panels = []
    memory = list[Mark]()
    for word, timeline, start, color in pair:
        duration_ms = (timeline.boundaries[-1] - start) / 1e6
        marks = [*_streams(timeline, start), Rule(duration_ms, color=LIMIT, line="-", width=1)]
        panels.append(Panel(f"{word}: {duration_ms:.2f} ms", marks, x, Axis(names=STREAMS)))
        points = [(t, used) for t, used in timeline.memory if t <= timeline.boundaries[-1]]
        inside = [(start, used) for t, used in points if t <= start][-1:] + [p for p in points if p[0] > start]
        memory.append(
            Line(
                [(t - start) / 1e6 for t, _ in inside],
                [used / MIB for _, used in inside],
                color,
                f"memory, {word.lower()}",
                width=1.2,
                step=True,
            )
        )
    memory.append(Rule(measured.limit / MIB, horizontal=True, color=LIMIT, label="limit", width=1))
    panels.append(Panel("Memory", memory, x, Axis("MiB in use", limits=(0, None))))
    title = f"{workload}, {look(planner).label}, on {measured.device}"
    draw(path, Chart(title, panels, 1, (9.9, 2.0), (0, 0.9), keys=7))


def _streams(timeline: Timeline, start: int) -> list[Mark]:
    """Returns bars for the spans of each kind, one row per stream."""
    spans = [s for s in timeline.spans if s.end_ns > start]
    marks: list[Mark] = []
    for kind, color in SPANS.items():
        chosen = [s for s in spans if s.kind == kind]
        lengths = [(s.end_ns - s.start_ns) / 1e6 for s in chosen]
        starts = [(s.start_ns - start) / 1e6 for s in chosen]
        rows = [STREAMS.index(s.stream) for s in chosen]
        marks.append(Bars(rows, lengths, color, kind.replace("_", "-") if chosen else "", 0.76, np.array(starts)))
    return [mark for mark in marks if isinstance(mark, Bars) and len(mark.positions)]


def batches(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plots the largest batch of each method, one panel per workload, in descending order.

    Args:
        path: image file.
        rows: rows with ``workload``, ``method``, ``batch``, ``own_batch``, ``cap`` (bytes) and ``time_over``.
    """
    panels = []
    for name in dict.fromkeys(r["workload"] for r in rows):
        ordered = sorted((r for r in rows if r["workload"] == name), key=lambda r: -r["batch"])
        texts = [f"{'at least ' * r['time_over']}{r['batch']} ({r['batch'] / r['own_batch']:.1f}×)" for r in ordered]
        marks: list[Mark] = [
            Bars(range(len(ordered)), [r["batch"] for r in ordered], MEASURED, thick=0.6, texts=texts),
            Rule(ordered[0]["own_batch"], color=INK),
        ]
        names = [r["method"] for r in ordered]
        title = f"{name}, {ordered[0]['cap'] / MIB:,.1f} MiB"
        panels.append(Panel(title, marks, Axis("largest batch", room=1.45), Axis(names=names)))
    draw(path, Chart("Largest batch in the memory of eager's default batch (dashed)", panels, len(panels)))
