"""TENSILE, sections 4.3 and 4.5: first iterations of a job with passive mode, predicted times and measured times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.controller import control, measured_times
from agents.heuristics.tensile.times import KernelTimes, Sample, r_squared, sequence
from agents.learned.optimisation import on_one_thread
from agents.planner import Infeasible
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.plotting.charts import Axis, Chart, Line, Panel
from simulator import simulate_jobs
from simulator.job import Job, JobTimeline
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.schedule import NEVER

LOOKS = {
    "passive": ("passive mode", "#cb181d", "x", "-", 5.0),
    "networks": ("predicted from other networks", "#f16913", "^", "--", 8.0),
    "batches": ("predicted from other batch sizes", "#1f5fa8", "s", "-.", 10.0),
    "measured": ("measured before", "#238b45", "D", ":", 12.0),
}


class Start(Figure):
    """Time lost in the first iterations, by the source of the times of the first plan."""

    name = "tensile_start"

    def tasks(self, settings: DictConfig) -> list[Row]:
        names, limits = figures.networks(settings), cli.to_dict(settings.limits)
        for name in limits:
            if name not in names or len(names) < 2:
                raise cli.UsageError(f"figure.networks: expected {name} and another network to predict it from")
        batch, iterations = (cli.integer(settings, key, least=1) for key in ("batch", "iterations"))
        others = figures.integers(settings, "batches", 1)
        if batch in others:
            raise cli.UsageError(f"figure.batches: expected batch sizes other than {batch}, got {others}")
        common = {"networks": names, "batch": batch, "batches": others, "iterations": iterations}
        return [
            {"network": name, "share": figures.share_of_peak(share, f"limits.{name}"), **common}
            for name, share in limits.items()
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        name, batch = task["network"], task["batch"]
        samples = {
            (one, size): sample(figures.program(one, machine, batch_size=size))
            for one in task["networks"] for size in (batch, *task["batches"])
        }  # fmt: skip
        program, _, times = samples[name, batch]
        training = {
            "networks": [one for (network, _), one in samples.items() if network != name],
            "batches": [one for (_, size), one in samples.items() if size != batch],
        }
        limit = int(task["share"] * program.peak_bytes)
        job = Job(name, program, Plan((), program.fingerprint, "none"), iterations=task["iterations"])
        methods: Row = {"passive": {"lost": passive(job, machine, limit), "plans": 1}}
        for method in list(LOOKS)[1:]:
            found: Row = {}
            predictor = None
            if method in training:
                with on_one_thread():
                    predictor = KernelTimes.fit(training[method])
                    predicted = predictor.predict(program, 1)
                found = {"r2": r_squared(predicted, times)}
            methods[method] = {**controlled(job, machine, limit, predictor), **found}
        return {"peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns, "methods": methods}

    def numbers(self, rows: list[Row]) -> Row:
        lines = []
        for row in rows:
            lost = [row["methods"][key]["lost"] for key in LOOKS]
            cells = ["/".join(f"{100 * one:.1f}" for one in found) or "no plan" for found in lost]
            lines.append({"label": label(row), "cells": cells})
        found = [(key, one) for row in rows for key, one in row["methods"].items()]
        first = {name: span(one["lost"][0] for key, one in found if key == name and one["lost"]) for name in LOOKS}
        scores = span(one["r2"] for _, one in found if "r2" in one)
        second = span(row["methods"]["passive"]["lost"][1] for row in rows)
        less = [
            max(one["lost"][0] if one["lost"] else NEVER for one in row["methods"].values() if "r2" in one)
            < row["methods"]["passive"]["lost"][0]
            for row in rows
        ]
        heads = [name for name, *_ in LOOKS.values()]
        return {"lines": lines, "heads": heads, "first": first, "second": second, "r2": scores,
                "less": sum(less), "count": len(less)}  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        x = list(range(1, rows[0]["iterations"] + 1))
        panels = []
        for row in rows:
            marks = [
                Line(x[: len(found)], found, colour, name, marker, line, size=size, hollow=marker != "x",
                     front=9 - size / 2)
                for key, (name, colour, marker, line, size) in LOOKS.items()
                if (found := row["methods"][key]["lost"])
            ]  # fmt: skip
            y = Axis("time lost, of an iteration", "%", (-0.002, None), "symlog", room=2)
            panels.append(Panel(f"{label(row)} of the peak", marks, Axis("iteration", ticks=x), y))
        return Chart("The first iterations of a job: passive mode or predicted times", panels, 3, (4.4, 3.8), keys=4)


def label(row: Row) -> str:
    """Returns the network and the limit of a row."""
    return f"{figures.label(row['network'])}, {row['share']:.0%}"


def sample(program: Program) -> Sample:
    """Returns a program's kernel times, alone on the GPU."""
    return Sample(program, 1, np.array([kernel.duration_ns for kernel in program.kernels]))


def lost(ran: JobTimeline) -> list[float]:
    """Returns the time lost in each iteration, as a fraction of the iteration without a limit."""
    return [ns / ran.ideal_ns - 1 for ns in ran.iterations_ns]


def controlled(job: Job, machine: Machine, limit: int, predictor: KernelTimes | None) -> Row:
    """Returns the time lost per iteration under the controller, and its number of plans; none if it finds no plan."""
    try:
        ran = control([job], machine, limit, TENSILE(), 2**62, job.program.ideal_ns, times=predictor)
    except Infeasible:
        return {"lost": [], "plans": 0}
    return {"lost": lost(ran.timeline.jobs[0]), "plans": len(ran.replanned)}


def passive(job: Job, machine: Machine, limit: int) -> list[float]:
    """Returns the time lost per iteration if the first, which evicts on demand (J6), measures the kernel times."""
    first = simulate_jobs([replace(job, iterations=1)], machine, limit).jobs[0]
    at = first.boundaries[0]
    times = measured_times(first, len(job.program.kernels), at)
    assert times is not None
    (plan,) = TENSILE().plan_jobs([job.program], machine, limit, [sequence(times)])
    return lost(simulate_jobs([replace(job, switches=((at, plan),))], machine, limit).jobs[0])
