"""TENSILE: saved memory against the iteration time, the MLP of section 4.1, and optimizer state across iterations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from omegaconf import DictConfig

from agents.heuristics.tensile.schedule import Schedule, array
from agents.planner import decisions_of
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.figures.smartpool_loads import ZERO
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule
from simulator import simulate
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Kernel, Program

CLAIM = 0.335  # fraction of an MLP's peak saved without extra time, section 4.1
VGG = 0.2241  # Table 1
NETWORKS = ("vgg16_imagenet", "mlp")
LEAST_BYTES = 2**20  # minimum size of a swapped tensor, as the planners' default
STYLES = (("#1f5fa8", "o"), ("#f16913", "^"), ("#238b45", "s"), ("#8e5bd0", "D"), ("#222222", "v"))
DASHED = {"held": "Dashed: held to its limit; kernels wait", "within": "Dashed: no swaps across iterations"}


class Speed(Figure):
    """Memory saved by TENSILE's plans with kernels that take several times as long."""

    name = "tensile_speed"

    def tasks(self, settings: DictConfig) -> list[Row]:
        factors = figures.numbers(settings, "factors", lambda x: x > 0, "positive numbers")
        found = []
        for key, adam in (("batches", False), ("adam", True)):
            for name, batches in cli.to_dict(settings[key]).items():
                figures.network(name, key)
                if not all(isinstance(batch, int) and batch > 0 for batch in batches):
                    raise cli.UsageError(f"figure.{key}.{name}: expected a list of positive integers, got {batches!r}")
                found += [{"network": name, "batch": b, "adam": adam, "factor": x} for b in batches for x in factors]
        return found

    def run(self, task: Row, machine: Machine) -> Row:
        changes = {"adam": True} if task["adam"] else {}
        program = figures.program(task["network"], machine, batch_size=task["batch"], **changes)
        program = program.with_durations([round(task["factor"] * k.duration_ns) for k in program.kernels])
        schedule, plan = scheduled(program, machine)
        _, within = scheduled(program, machine, across=False)
        residents = int(schedule.engine.residency(array(schedule.rows)).max())
        cut, exact = with_deltas(schedule, plan)
        runs = {
            "alone": simulate(program, plan, machine, machine.memory_bytes),
            "held": simulate(program, plan, machine, residents),
            "within": simulate(program, within, machine, machine.memory_bytes),
            "exact": simulate(cut, exact, machine, machine.memory_bytes),
        }
        state = sum(t.nbytes for t in program.tensors if t.kind == "optimizer_state")
        return {
            "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns, "state_bytes": state,
            "planned": schedule.peak, "decisions": len(plan.decisions),
            **{key: {"peak_bytes": run.peak_bytes, "overhead": run.overhead} for key, run in runs.items()},
        }  # fmt: skip

    def numbers(self, rows: list[Row]) -> Row:
        found = [facts(row) for row in rows]
        vgg, mlp = ([one for one in found if one["network"] == name and not one["adam"]] for name in NETWORKS)
        adam = [one for one in found if one["adam"]]
        free = [one for one in mlp if one["alone_overhead"] <= ZERO]
        enough = [one["factor"] for one in free if one["alone"] >= CLAIM]
        groups = [
            [one for one in found if (one["label"], one["batch"]) == key]
            for key in dict.fromkeys((one["label"], one["batch"]) for one in found)
        ]
        moved = [100 * (one["exact"] - one["alone"]) for one in found if one["exact"] != one["alone"]]
        return {
            "heads": [f"×{one['factor']:g}" for one in groups[0]],
            "groups": [{**group[0], "cells": [cell(one) for one in group]} for group in groups],
            "claim": CLAIM, "enough": min(enough, default=None), "count": len(found),
            "mlp": max((one["alone"] for one in free if one["factor"] == 1), default=None),
            "vgg": [min(one["alone"] for one in vgg), max(one["alone"] for one in vgg)] if vgg else None,
            "adam": max((one["alone"] for one in adam), default=None),
            "kept": sum(one["planned"] == one["alone"] for one in found),
            "moved": len(moved), "most": [min(moved), max(moved)] if moved else None,
            "states": [max(group, key=lambda one: one["alone"] - one["within"]) for group in (vgg, adam, mlp) if group],
            "dip": next((one for one in vgg if one["factor"] == 4), None),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found = [facts(row) for row in rows]
        claims = ((CLAIM, "the paper's MLP"), (VGG, "the paper's VGG"))
        keys = dict.fromkeys((one["label"], one["batch"]) for one in found)
        panels = []
        for dashed, title in DASHED.items():
            marks: list[Mark] = [Rule(share, across=True, line=":", text=text) for share, text in claims]
            for (label, batch), (colour, marker) in zip(keys, STYLES, strict=False):
                lines = [one for one in found if (one["label"], one["batch"]) == (label, batch)]
                x = [one["ms"] for one in lines]
                marks.append(Line(x, [one["alone"] for one in lines], colour, f"{label}, batch {batch:,}", marker))
                marks.append(
                    Line(x, [one[dashed] for one in lines], colour, "", marker, "--", size=8, hollow=True, front=2.5)
                )
            where = (
                Axis("iteration without a plan, ms", "{:g}", scale="log"),
                Axis("saved of the peak", "%", (-0.015, None)),
            )
            panels.append(Panel(title, marks, *where))
        return Chart("TENSILE: saved memory against the iteration time", panels, 2, (6.6, 4.6), keys=5)


def scheduled(program: Program, machine: Machine, across: bool = True) -> tuple[Schedule, Plan]:
    """Swaps until no swap succeeds (Algorithm 3 without a limit); returns the schedule and its plan.

    Args:
        across: Whether tensors may be evicted over the iteration boundary.
    """
    schedule = Schedule(program, machine, Engine(program, machine, 0), LEAST_BYTES, 1.0, program.start_ns)
    schedule.gaps = [gap for gap in schedule.gaps if across or gap.after < gap.before]
    while any(schedule.swap(gap) for gap in schedule.candidates()):
        pass
    return schedule, Plan.of(program, decisions_of(array(schedule.rows)), "tensile", schedule.peak)


def with_deltas(schedule: Schedule, plan: Plan) -> tuple[Program, Plan]:
    """Returns program and plan with kernels cut where swap-ins start, so that none is rounded to a kernel's end.

    Every part of a kernel uses the kernel's tensors and workspace.
    """
    program = schedule.program
    begins = [start % program.ideal_ns for start in schedule.scheduled.values() if start is not None]
    parts: list[Kernel] = []
    first, last, ends = [], [], []
    for kernel, start in zip(program.kernels, program.start_ns, strict=False):
        end = start + kernel.duration_ns
        edges = [start, *sorted({at for at in begins if start < at < end}), end]
        first.append(len(parts))
        for low, high in pairwise(edges):
            part = replace(kernel, duration_ns=high - low, recomputable=False, variants=())
            reread = replace(part, inputs=tuple(dict.fromkeys(kernel.accesses)), outputs=())
            parts.append(part if low == start else reread)
            ends.append(high)
        last.append(len(parts) - 1)
    decisions = [moved(swap, at, first, last, ends) for swap, at in zip(plan.of_kind(Swap), begins, strict=True)]
    cut = replace(program, kernels=tuple(parts))
    return cut, Plan.of(cut, tuple(decisions), plan.planner, plan.limit)


def moved(swap: Swap, at: int, first: Sequence[int], last: Sequence[int], ends: Sequence[int]) -> Swap:
    """Returns a swap of the cut program whose swap-in is issued at ``at`` ns."""
    copy = None if swap.copy is None else last[swap.copy]
    prefetch = (bisect_right(ends, at) - 1) % len(ends)
    return replace(swap, after=last[swap.after], before=first[swap.before], prefetch=prefetch, copy=copy)


def facts(row: Row) -> Row:
    """Returns the fractions of the peak that are saved, by mode, and the overheads."""
    modes = ("alone", "held", "within", "exact")
    saved = {key: 1 - row[key]["peak_bytes"] / row["peak_bytes"] for key in modes}
    over = {f"{key}_overhead": row[key]["overhead"] for key in modes}
    label = figures.label(row["network"]) + ", Adam" * row["adam"]
    return {**row, **saved, **over, "planned": 1 - row["planned"] / row["peak_bytes"], "label": label,
            "state": row["state_bytes"] / row["peak_bytes"], "ms": row["ideal_ns"] / 1e6}  # fmt: skip


def cell(one: Row) -> str:
    """Returns the savings and the overhead of the held plan in per cent."""
    saved = "/".join(f"{100 * one[key]:.1f}" for key in ("alone", "within", "held"))
    return f"{saved}(+{100 * one['held_overhead']:.1f})"
