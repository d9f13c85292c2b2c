"""One training step of an 8-billion-parameter Llama on one H100: what each planning method costs under a limit."""

from __future__ import annotations

import json
import time
from functools import lru_cache

from omegaconf import DictConfig

import agents
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule, Words
from experiments.plotting.palette import FAINT, FLOOR, look
from simulator import Machine, Plan, Program, simulate

WORKLOAD = "llama3_8b"
LOWER = "floor"  # among the methods: agents/floor/
GB = 10**9


def tasks(settings: DictConfig) -> list[Row]:
    """The program itself, then one per method and limit; the tight limits, which take longest, last."""
    asked = cli.plain(settings)
    changes, options = asked["workload"], asked["options"]
    known = {LOWER, *agents.untrained()}
    for method in (*asked["methods"], *options):
        if method not in known:
            raise cli.UsageError(f"figure.methods: there is no method {method!r}{cli.nearest(method, known)}")
    limits = figures.numbers(settings, "limits", lambda value: value > 0, "numbers of GB above 0")
    return [
        {"workload": changes, "method": None, "limit_gb": None, "options": {}},
        *(
            {"workload": changes, "method": method, "limit_gb": limit, "options": options.get(method, {})}
            for limit in sorted(limits, reverse=True)
            for method in asked["methods"]
        ),
    ]


def run(task: Row, machine: Machine) -> Row:
    """Facts of the program, or overheads in per cent and planning times in s; without a plan, why."""
    program = _captured(json.dumps(task["workload"]), json.dumps(machine.to_dict()))
    if task["method"] is None:
        return facts(program, machine)
    limit, begin = round(task["limit_gb"] * GB), time.perf_counter()
    if task["method"] == LOWER:
        low = floor(program, machine, limit, "joint")
        over = round(100 * low.overhead, 4) if low.feasible else None
        return {"overhead_percent": over, "least_bytes": low.least_bytes,
                "seconds": round(time.perf_counter() - begin, 1)}  # fmt: skip
    try:
        plan = agents.make(task["method"], **task["options"]).plan(program, machine, limit)
    except agents.Infeasible as error:
        return {"overhead_percent": None, "reason": str(error).rpartition("; ")[2],
                "seconds": round(time.perf_counter() - begin, 1)}  # fmt: skip
    seconds = time.perf_counter() - begin
    timeline = simulate(program, plan, machine, min(limit, plan.limit))
    return {
        "overhead_percent": round(100 * timeline.overhead, 4), "peak_bytes": timeline.peak_bytes,
        "decisions": len(plan.decisions), "seconds": round(seconds, 1),
    }  # fmt: skip


@lru_cache(maxsize=1)  # a process has the tasks of one program
def _captured(changes: str, machine: str) -> Program:
    return figures.program(WORKLOAD, Machine.from_dict(json.loads(machine)), **json.loads(changes))


def facts(program: Program, machine: Machine) -> Row:
    """Sizes of a program; what lies in memory at its peak, by kind."""
    peak = simulate(program, Plan(), machine, program.peak_bytes)
    kinds: dict[str, int] = {}
    for tensor in program.tensors:
        if tensor.persistent:
            kinds[tensor.kind] = kinds.get(tensor.kind, 0) + tensor.nbytes
    return {
        "kernels": len(program.kernels), "tensors": len(program.tensors),
        "flops": sum(kernel.flops for kernel in program.kernels), "ideal_ns": program.ideal_ns,
        "peak_bytes": program.peak_bytes, "persistent": kinds,
        "peak_by": peak.peak_by(lambda t: program.tensors[t].kind),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


def split(rows: list[Row]) -> tuple[Row, list[float], dict[str, dict[float, Row]]]:
    """The program's row, the limits from the loosest, and of each method its row by limit."""
    by = figures.grouped(rows[1:], "method")
    found = {method: {row["limit_gb"]: row for row in mine} for method, mine in by.items()}
    return rows[0], sorted({row["limit_gb"] for row in rows[1:]}, reverse=True), found


def name(method: str) -> str:
    """A method's name for people."""
    return "the floor" if method == LOWER else look(method).label


def in_gb(sizes: dict[str, int]) -> list[str]:
    """Kinds of tensors, those that have some size."""
    return [f"{kind.replace('_', ' ')} {size / GB:.1f}" for kind, size in sizes.items() if size >= GB / 10]


def numbers(rows: list[Row]) -> Row:
    """The program's sizes; at each limit the best, and who has no plan and why."""
    step, limits, found = split(rows)
    low = found.get(LOWER, {})
    kept, best, missing = sum(step["persistent"].values()), [], []
    for limit in limits:
        over = {name(m): by[limit]["overhead_percent"] for m, by in found.items() if m != LOWER}
        there = {n: o for n, o in over.items() if o is not None}
        first = min(there, key=lambda n: (there[n], n)) if there else None
        best.append({"limit": limit, "there": len(there), "of": len(over), "first": first, "over": there.get(first),
                     "floor": low.get(limit, {}).get("overhead_percent")})  # fmt: skip
    for method, by in found.items():
        if without := [limit for limit in limits if by[limit].get("reason")]:
            missing.append({"label": name(method), "without": without, "reason": by[without[0]]["reason"]})
    return {
        "limits": [f"{limit:g} GB" for limit in limits], "step": step, "at_peak": in_gb(step["peak_by"]),
        "lines": [{"label": name(method), "cells": [cell(by[n]) for n in limits]} for method, by in found.items()],
        "kept": kept, "kept_by": in_gb(step["persistent"]), "state": kept + step["persistent"].get("parameter", 0),
        "least": next(iter(low.values()))["least_bytes"] if low else None, "best": best, "missing": missing,
        "tflop": step["flops"] / 1e12,
    }  # fmt: skip


def cell(row: Row) -> str:
    """Overhead and planning time."""
    over = "–" if row["overhead_percent"] is None else f"{row['overhead_percent']:.2f}%"
    return f"{over} ({row['seconds']:,.0f} s)"


def chart(rows: list[Row]) -> Chart:
    """A panel per limit, a line per method: a point, or words where there is no plan."""
    _, limits, found = split(rows)
    methods = [method for method in found if method != LOWER]
    over = {m: {limit: row["overhead_percent"] for limit, row in by.items()} for m, by in found.items()}
    most = max([value or 0.0 for by in over.values() for value in by.values()] + [1.0]) / 100
    panels = []
    for limit in limits:
        low = over.get(LOWER, {}).get(limit)
        marks: list[Mark] = (
            [] if low is None else [Rule(-0.001, low / 100, colour=FLOOR, label="the floor: no plan is there")]
        )
        for y, method in enumerate(methods):
            if (value := over[method][limit]) is None:
                marks.append(Words(5.4 * most, y, "no plan", "right", FAINT))
            else:
                marks.append(Line([value / 100], [y], look(method).colour, marker=look(method).marker, size=8,
                                  texts=[f"{value:.1f}%"]))  # fmt: skip
        where = Axis("overhead of an iteration", "%", (-0.001, 6 * most), "symlog")
        panels.append(Panel(f"{limit:g} GB", marks, where, Axis(names=[name(method) for method in methods])))
    return Chart("Llama 3 8B on an H100", panels, len(limits), (3.6, 0.27 * len(methods)), (2.2, 1.4))


FIGURE = Figure("llama8b", tasks, run, numbers, chart, alone=True)
