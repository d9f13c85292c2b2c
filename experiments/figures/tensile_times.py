"""TENSILE and kernel times: how well they are predicted (section 4.3), first iterations, and longer kernels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.controller import control, measured_times
from agents.heuristics.tensile.schedule import Schedule, array
from agents.heuristics.tensile.times import KernelTimes, Sample, Times as KernelNs, r_squared, sequence
from agents.learned.optimization import on_one_thread
from agents.planner import MIB, Infeasible, decisions_of
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows, span
from experiments.figures.smartpool_loads import ZERO
from experiments.plotting.charts import DASHED, DOTTED, Axis, Chart, Line, Mark, Panel, Rule, groups
from simulator import simulate, simulate_jobs
from simulator.compiled.engine import Engine
from simulator.job import Job, JobTimeline
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Kernel, Program
from simulator.schedule import NEVER

if TYPE_CHECKING:
    from executor.capture.captured import Captured


class Times(Figure):
    """Section 4.3: accuracy of a small neural network that predicts the times of unmeasured kernels."""

    name = "tensile_times"
    names: ClassVar = {"all": "all kernels", "expensive": "convolutions, products"}
    sources = ("model", "measured")
    least = -0.02  # minimum R² in the picture
    needs_all_cores = True
    simulated = False

    def tasks(self, settings: DictConfig) -> Rows:
        batch = cli.integer(settings, "batch", least=1)
        repeats = cli.integer(settings, "repeats", least=1)
        names = figures.networks(settings)
        sources = cli.values(settings, "sources")
        if not sources or not set(sources) <= set(self.sources):
            raise cli.UsageError(f"figure.sources: expected some of {', '.join(self.sources)}, got {sources!r}")
        if len(names) < 2:
            raise cli.UsageError("figure.networks: expected at least two, one of them for training")
        return [{"source": source, "networks": names, "batch": batch, "repeats": repeats} for source in sources]

    def run(self, task: Row, machine: Machine) -> Row:
        samples: dict[str, Sample] = {}
        device = machine.name
        for name in task["networks"]:
            captured, program, device = timed_program(name, task, machine)
            samples[name] = sample(program)._replace(shapes=operator_shapes(captured))
        results: dict[str, Row] = {}
        for name, held in samples.items():
            others = [sample for other, sample in samples.items() if other != name]
            predicted = KernelTimes.fit([sample._replace(shapes=None) for sample in others]).predict(held.program, 1)
            from_shapes = KernelTimes.fit(others).predict(held.program, 1, held.shapes)
            results[name] = {
                "kernels": len(held.times),
                **scores(predicted, held),
                "iteration": float(predicted.sum() / held.times.sum()),
                "shapes": scores(from_shapes, held),
            }
        return {"device": device, "held": results}

    def template_values(self, rows: Rows) -> Row:
        lines = []
        for name in rows[0]["networks"]:
            for row in rows:
                run = row["held"][name]
                for inputs, entry in ((row["source"], run), (f"{row['source']} with shapes", run["shapes"])):
                    cells = [f"{entry[key]:.3f}" for key in self.published]
                    cells.append(f"{run['iteration']:.2f}" if entry is run else "")
                    lines.append({"label": figures.label(name), "inputs": inputs, "cells": cells})
        medians = [
            {"inputs": inputs, **{key: median(entry[key] for entry in entries) for key in self.published}}
            for row in rows
            for inputs, entries in (
                (row["source"], list(row["held"].values())),
                (f"{row['source']} with shapes", [run["shapes"] for run in row["held"].values()]),
            )
        ]
        for entry in medians:
            middle = [f"{entry[key]:.3f}" for key in self.published]
            lines.append({"label": "our median", "inputs": entry["inputs"], "cells": [*middle, ""]})
        means = [f"{paper:.3f}" for paper in self.published.values()]
        lines.append({"label": "paper's mean", "inputs": "", "cells": [*means, ""]})
        return {
            "networks": lines,
            "heads": [*self.names.values(), "iteration"],
            "scores": medians,
            "published": self.published,
        }

    def chart(self, rows: Rows) -> Chart:
        inks = {"all": "#9a9a9a", "expensive": "#b3123d"}
        panels = []
        for row in rows:
            names = [figures.label(name) for name in row["networks"]]
            series = []
            for key, ink in inks.items():
                values = [row["held"][name][key] for name in row["networks"]]
                texts = []
                for name, value in zip(row["networks"], values, strict=True):
                    dot = row["held"][name]["shapes"][key]
                    below = [f"{value:.2f}"] * (value < self.least) + [f"○ {dot:.2f}"] * (dot < self.least)
                    texts.append(", ".join(below) + " below" if below else "")
                series.append((self.names[key], ink, [max(value, self.least) for value in values], texts))
            marks: list[Mark] = []
            for bars, (key, ink), hatch in zip(groups(series, horizontal=True), inks.items(), ("", "///"), strict=True):
                rule = f"the paper's mean, {self.names[key]}"
                dots = [row["held"][name]["shapes"][key] for name in row["networks"]]
                dots = [None if dot < self.least else dot for dot in dots]
                marks += [
                    replace(bars, hatch=hatch),
                    Line(
                        dots, bars.positions, label="with shapes as inputs", marker="o", line="", hollow=True, front=5
                    ),
                    Rule(self.published[key], color=ink, label=rule, width=1.4, line=DOTTED if hatch else DASHED),
                ]
            axis = Axis("R² on the network held out", "{:.1f}", (-0.03, 1.0))
            source = "modeled" if row["source"] == "model" else "measured"
            panels.append(Panel(f"Times {source}: {figures.label(row['device'])}", marks, axis, Axis(names=names)))
        medians = self.template_values(rows)["scores"]
        plain, products = (f"{span(entry[key] for entry in medians):.2f}" for key in self.published)
        paper, paper_products = self.published.values()
        title = f"R², median: {plain} (paper, mean: {paper:.2f}); convolutions: {products} ({paper_products:.2f})"
        return Chart(title, panels, 2, (4.95, 4.4), keys=2)


def timed_program(name: str, task: Row, machine: Machine) -> tuple[Captured, Program, str]:
    """Returns a captured network, its program with the source's times, and the device they are for."""
    from executor.capture.profile import with_profile
    from executor.capture.profiler import measure  # PyTorch
    from experiments import workloads

    changes = {"batch_size": task["batch"], "iteration_ms": None}
    captured = workloads.load({**figures.workload(name), **changes}, machine)
    if task["source"] == "model":
        return captured, captured.program, machine.name
    profile = measure(captured, "cpu", repeats=task["repeats"], cache="hot")
    return captured, with_profile(captured.program, profile), profile.device


def operator_shapes(captured: Captured) -> NDArray[np.float32]:
    """Returns (kernels, 14): logarithms of the dimensions of three inputs, and of the sizes of window and stride."""
    from executor.capture.operators import bind_arguments  # PyTorch

    out = np.zeros((len(captured.nodes), 14), np.float32)
    for row, nodes in zip(out, captured.nodes, strict=True):
        if not nodes:
            continue  # a marker
        metas = [node.meta.get("tensor_meta") for node in nodes[0].all_input_nodes]
        shapes = [meta.shape for meta in metas if hasattr(meta, "shape")]
        for i, shape in enumerate(shapes[:3]):
            row[4 * i : 4 * i + min(len(shape), 4)] = np.log1p(shape[:4])
        arguments = bind_arguments(nodes[0].target, nodes[0].args, nodes[0].kwargs)
        for i, name in enumerate(("kernel_size", "stride"), 12):
            row[i] = np.log1p(prod(arguments.get(name) or (0,)))
    return out


def scores(predicted: KernelNs, held: Sample) -> Row:
    """Returns the R² of predicted times, over all kernels and over convolutions and matrix products."""
    mask = np.array([kernel.kind in ("conv", "matmul") for kernel in held.program.kernels])
    return {"all": r_squared(predicted, held.times), "expensive": r_squared(predicted[mask], held.times[mask])}


class Start(Figure):
    """Time lost in the first iterations, by the source of the times of the first plan."""

    name = "tensile_start"
    looks: ClassVar = {  # by source of the times: label, color, marker, line and size of the marker
        "passive": ("passive mode", "#cb181d", "x", "-", 5.0),
        "networks": ("predicted from other networks", "#f16913", "^", "--", 8.0),
        "batches": ("predicted from other batch sizes", "#1f5fa8", "s", "-.", 10.0),
        "measured": ("measured before", "#238b45", "D", ":", 12.0),
    }

    def tasks(self, settings: DictConfig) -> Rows:
        names = figures.networks(settings)
        limits = cli.to_dict(settings.limits)
        for name in limits:
            if name not in names or len(names) < 2:
                raise cli.UsageError(f"figure.networks: expected {name} and another network to predict it from")
        batch, iterations = (cli.integer(settings, key, least=1) for key in ("batch", "iterations"))
        other_batches = figures.integers(settings, "batches", 1)
        if batch in other_batches:
            raise cli.UsageError(f"figure.batches: expected batch sizes other than {batch}, got {other_batches}")
        common = {"networks": names, "batch": batch, "batches": other_batches, "iterations": iterations}
        return [
            {"network": name, "share": figures.share_of_peak(share, f"limits.{name}"), **common}
            for name, share in limits.items()
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        name = task["network"]
        batch = task["batch"]
        samples = {
            (network, size): sample(figures.program(network, machine, batch_size=size))
            for network in task["networks"]
            for size in (batch, *task["batches"])
        }
        program, times = samples[name, batch].program, samples[name, batch].times
        training = {
            "networks": [s for (network, _), s in samples.items() if network != name],
            "batches": [s for (_, size), s in samples.items() if size != batch],
        }
        limit = int(task["share"] * program.peak_bytes)
        job = Job(name, program, Plan((), program.fingerprint, "none"), iterations=task["iterations"])
        methods: Row = {"passive": {"lost": passive_losses(job, machine, limit), "plans": 1}}
        for method in list(self.looks)[1:]:
            accuracy: Row = {}
            predictor = None
            if method in training:
                with on_one_thread():
                    predictor = KernelTimes.fit(training[method])
                    predicted = predictor.predict(program, 1)
                accuracy = {"r2": r_squared(predicted, times)}
            methods[method] = {**run_controlled(job, machine, limit, predictor), **accuracy}
        return {"peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns, "methods": methods}

    def template_values(self, rows: Rows) -> Row:
        methods = {key: [row["methods"][key]["lost"] for row in rows] for key in self.looks}
        lines = []
        for row in rows:
            for key, (name, *_) in self.looks.items():
                cells = [f"{loss:.1%}" for loss in row["methods"][key]["lost"]]
                cells += [""] * (row["iterations"] - len(cells))
                lines.append({"label": f"{label(row)}, {name}", "cells": cells})
        firsts = {key: [run[0] if run else NEVER for run in losses] for key, losses in methods.items()}
        less = [max(predicted) < passive for passive, *predicted in zip(*list(firsts.values())[:3], strict=True)]
        return {
            "lines": lines,
            "less": sum(less),
            "count": len(less),
            "first": {key: span(run[0] for run in losses if run) for key, losses in methods.items()},
        }

    def chart(self, rows: Rows) -> Chart:
        x = list(range(1, rows[0]["iterations"] + 1))
        panels = []
        for row in rows:
            marks = [
                Line(
                    x[: len(losses)],
                    losses,
                    color,
                    name,
                    marker,
                    line,
                    size=size,
                    hollow=marker != "x",
                    front=9 - size / 2,
                )
                for key, (name, color, marker, line, size) in self.looks.items()
                if (losses := row["methods"][key]["lost"])
            ]
            y = Axis("time lost, of an iteration", "%", (-0.002, None), "symlog", room=2)
            panels.append(Panel(f"{label(row)} of the peak", marks, Axis("iteration", ticks=x), y))
        first = {key: losses.values if losses else [] for key, losses in self.template_values(rows)["first"].items()}
        predicted = span([*first["networks"], *first["batches"]])
        title = f"First iteration: passive mode loses {span(first['passive']):.0%}"
        title += f", predictions {predicted:.1%}" if predicted else ""
        return Chart(title, panels, 2, (4.95, 3.6), keys=2)


def label(row: Row) -> str:
    """Returns the network and the limit of a row."""
    return f"{figures.label(row['network'])}, {row['share']:.0%}"


def sample(program: Program) -> Sample:
    """Returns a program's kernel times, alone on the GPU."""
    return Sample(program, 1, np.array([kernel.duration_ns for kernel in program.kernels]))


def lost_fractions(timeline: JobTimeline) -> list[float]:
    """Returns the time lost in each iteration, as a fraction of the iteration without a limit."""
    return [ns / timeline.ideal_ns - 1 for ns in timeline.iterations_ns]


def run_controlled(job: Job, machine: Machine, limit: int, predictor: KernelTimes | None) -> Row:
    """Returns the time lost per iteration under the controller, and its number of plans; none if it finds no plan."""
    try:
        result = control([job], machine, limit, TENSILE(), 2**62, job.program.ideal_ns, times=predictor)
    except Infeasible:
        return {"lost": [], "plans": 0}
    return {"lost": lost_fractions(result.timeline.jobs[0]), "plans": len(result.replanned)}


def passive_losses(job: Job, machine: Machine, limit: int) -> list[float]:
    """Returns the time lost per iteration if the first, which evicts on demand (J6), measures the kernel times."""
    first = simulate_jobs([replace(job, iterations=1)], machine, limit).jobs[0]
    measured_ns = first.boundaries[0]
    times = measured_times(first, len(job.program.kernels), measured_ns)
    assert times is not None
    (plan,) = TENSILE().plan_jobs([job.program], machine, limit, [sequence(times)])
    return lost_fractions(simulate_jobs([replace(job, switches=((measured_ns, plan),))], machine, limit).jobs[0])


class Speed(Figure):
    """Memory saved by TENSILE's plans with kernels that take several times as long."""

    name = "tensile_speed"
    styles = (("#1f5fa8", "o"), ("#f16913", "^"), ("#238b45", "s"), ("#8e5bd0", "D"), ("#222222", "v"))
    panels: ClassVar = {  # titles by the dashed lines
        "held": "Dashed: held to its limit; kernels wait",
        "within": "Dashed: no swaps across iterations",
    }

    def tasks(self, settings: DictConfig) -> Rows:
        factors = figures.numbers(settings, "factors", lambda x: x > 0, "positive numbers")
        tasks = []
        for key, adam in (("batches", False), ("adam", True)):
            for name, batches in cli.to_dict(settings[key]).items():
                figures.network(name, key)
                if not all(isinstance(batch, int) and batch > 0 for batch in batches):
                    raise cli.UsageError(f"figure.{key}.{name}: expected a list of positive integers, got {batches!r}")
                tasks += [{"network": name, "batch": b, "adam": adam, "factor": x} for b in batches for x in factors]
        return tasks

    def run(self, task: Row, machine: Machine) -> Row:
        changes = {"adam": True} if task["adam"] else {}
        program = figures.program(task["network"], machine, batch_size=task["batch"], **changes)
        program = program.with_durations([round(task["factor"] * k.duration_ns) for k in program.kernels])
        schedule, plan = build_schedule(program, machine)
        _, plan_within = build_schedule(program, machine, across_boundary=False)
        residents = int(schedule.engine.residency(array(schedule.rows)).max())
        split, exact = split_kernels(schedule, plan)
        runs = {
            "alone": simulate(program, plan, machine, machine.memory_bytes),
            "held": simulate(program, plan, machine, residents),
            "within": simulate(program, plan_within, machine, machine.memory_bytes),
            "exact": simulate(split, exact, machine, machine.memory_bytes),
        }
        state = sum(t.nbytes for t in program.tensors if t.kind == "optimizer_state")
        return {
            "peak_bytes": program.peak_bytes,
            "ideal_ns": program.ideal_ns,
            "state_bytes": state,
            "planned": schedule.peak,
            "decisions": len(plan.decisions),
            **{key: {"peak_bytes": run.peak_bytes, "overhead": run.overhead} for key, run in runs.items()},
        }

    def template_values(self, rows: Rows) -> Row:
        lines = [speed_entry(row) for row in rows]
        claim = self.published["mlp"]
        groups = list(figures.group_by(lines, "key").values())
        vgg, mlp = (
            [row for row in lines if row["network"] == name and not row["adam"]] for name in ("vgg16_imagenet", "mlp")
        )
        adam = [row for row in lines if row["adam"]]
        # The paper's claim is for plans without extra time.
        free_rows = [row for row in mlp if row["overhead"] <= ZERO]
        free_savings = [row["alone"] for row in free_rows if row["factor"] == 1]
        sufficient_factors = [row["factor"] for row in free_rows if row["alone"] >= claim]
        states = [max(group, key=lambda row: row["alone"] - row["within"]) for group in (vgg, adam, mlp) if group]
        gained = [row["alone"] - row["within"] for row in lines]
        exact = [100 * (1 - row["exact"]["peak_bytes"] / row["peak_bytes"] - row["alone"]) for row in lines]
        changed = sorted(points for points in exact if abs(points) >= 0.05)
        return {
            "lines": [row for group in groups for row in group],
            "claim": claim,
            "vgg": span(row["alone"] for row in vgg),
            "mlp": max(free_savings, default=None),
            "enough": min(sufficient_factors, default=None),
            "states": states,
            "more": sum(gain > 0 for gain in gained),
            "less": sum(gain < 0 for gain in gained),
            "more_adam": sum(row["alone"] > row["within"] for row in adam),
            "adam": len(adam),
            "changed": changed,
        }

    def chart(self, rows: Rows) -> Chart:
        entries = [speed_entry(row) for row in rows]
        claims = ((self.published["mlp"], "the paper's MLP"), (self.published["vgg16_imagenet"], "the paper's VGG"))
        panels = []
        by_key = figures.group_by(entries, "key")
        for dashed, title in self.panels.items():
            marks: list[Mark] = [Rule(share, horizontal=True, line=":", text=text) for share, text in claims]
            for (key, lines), (color, marker) in zip(by_key.items(), self.styles, strict=False):
                x, needs_all_cores, other = ([row[column] for row in lines] for column in ("ms", "alone", dashed))
                marks += [
                    Line(x, needs_all_cores, color, key, marker),
                    Line(x, other, color, "", marker, "--", size=8, hollow=True, front=2.5),
                ]
            x_axis = Axis("iteration without a plan, ms", "{:g}", scale="log")
            panels.append(Panel(title, marks, x_axis, Axis("saved of the peak", "%", (-0.015, None))))
        values = self.template_values(rows)
        title = "TENSILE: saved memory against the iteration time"
        if values["mlp"]:
            here = f", here with kernels × {values['enough']:g}" if values["enough"] else ""
            title = f"MLP: {values['mlp']:.1%} saved without extra time (paper: {values['claim']:.1%}{here})"
        return Chart(title, panels, 2, (4.95, 4.4), keys=3)


def build_schedule(program: Program, machine: Machine, across_boundary: bool = True) -> tuple[Schedule, Plan]:
    """Swaps until no swap succeeds (Algorithm 3 without a limit); returns the schedule and its plan.

    Args:
        program: Program to plan.
        machine: Machine with the speed of the link.
        across_boundary: Whether tensors may be evicted over the iteration boundary.
    """
    schedule = Schedule(Engine(program, machine, 0), MIB, 1.0, program.start_ns)
    schedule.gaps = [gap for gap in schedule.gaps if across_boundary or gap.after < gap.before]
    while any(schedule.swap(gap) for gap in schedule.candidates()):
        pass
    return schedule, Plan.of(program, decisions_of(array(schedule.rows)), "tensile", schedule.peak)


def split_kernels(schedule: Schedule, plan: Plan) -> tuple[Program, Plan]:
    """Returns program and plan with kernels cut where swap-ins start, so that none is rounded to a kernel's end.

    Every part of a kernel uses the kernel's tensors and workspace.
    """
    program = schedule.program
    begins = [start % program.ideal_ns for start in schedule.scheduled.values() if start is not None]
    parts: list[Kernel] = []
    first = []
    last = []
    ends = []
    for kernel, start in zip(program.kernels, program.start_ns, strict=False):
        end = start + kernel.duration_ns
        edges = [start, *sorted({issue for issue in begins if start < issue < end}), end]
        first.append(len(parts))
        for low, high in pairwise(edges):
            part = replace(kernel, duration_ns=high - low, recomputable=False, variants=())
            reread = replace(part, inputs=tuple(dict.fromkeys(kernel.accesses)), outputs=())
            parts.append(part if low == start else reread)
            ends.append(high)
        last.append(len(parts) - 1)
    decisions = [shift(swap, issue, first, last, ends) for swap, issue in zip(plan.of_kind(Swap), begins, strict=True)]
    split = replace(program, kernels=tuple(parts))
    return split, Plan.of(split, tuple(decisions), plan.planner, plan.limit)


def shift(swap: Swap, issue_ns: int, first: Sequence[int], last: Sequence[int], ends: Sequence[int]) -> Swap:
    """Returns a swap of the cut program whose swap-in is issued at ``issue_ns`` ns."""
    copy = None if swap.copy is None else last[swap.copy]
    prefetch = (bisect_right(ends, issue_ns) - 1) % len(ends)
    return replace(swap, after=last[swap.after], before=first[swap.before], prefetch=prefetch, copy=copy)


def speed_entry(row: Row) -> Row:
    """Returns the fractions of the peak that are saved, by mode, with the overheads."""
    saved = {key: 1 - row[key]["peak_bytes"] / row["peak_bytes"] for key in ("alone", "within", "held")}
    label = figures.label(row["network"]) + ", Adam" * row["adam"]
    return {
        **row,
        **saved,
        "overhead": row["alone"]["overhead"],
        "overhead_held": row["held"]["overhead"],
        "ms": row["ideal_ns"] / 1e6,
        "label": label,
        "key": f"{label}, batch {row['batch']:,}",
        "state": row["state_bytes"] / row["peak_bytes"],
    }
