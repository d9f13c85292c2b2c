"""Several jobs that share a GPU's memory, by every kind of planner."""

from __future__ import annotations

import time
from collections.abc import Sequence

from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.jobs import JobsPlanner, SearchedSplit, Split, floor_ns, jobs_of, unlimited_ns
from agents.planner import Infeasible
from agents.search.joint_annealing import JointAnnealing
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import tensile_table2
from experiments.figures.figure import Figure
from experiments.plotting import palette
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from experiments.plotting.plots import TICKS
from simulator.jobs import simulate_jobs
from simulator.machine import Machine
from simulator.program import Program

SPLITS = ("capuchin", "autoswap_swdoa", "lp_round", "policy_search")
SEARCHED = "policy_search"
EXACT = "lp_round"


def tasks(settings: DictConfig) -> list[Row]:
    """One per mixture and limit."""
    batch, calls = cli.integer(settings, "batch", least=1), cli.integer(settings, "calls", least=1)
    found = []
    for i, one in enumerate(cli.values(settings, "tasks")):
        if not isinstance(one, dict) or set(one) != {"jobs", "limit"} or not 0 < one["limit"] <= 1:
            raise cli.UsageError(f"figure.tasks[{i}]: expected jobs and a limit up to 1, got {one!r}")
        names = [figures.network(str(name), f"tasks[{i}].jobs") for name in one["jobs"]]
        found.append({"jobs": names, "limit": one["limit"], "batch": batch, "calls": calls})
    return found


def run(task: Row, machine: Machine) -> Row:
    """Overhead, planning time and simulator calls of each planner; None: no plan."""
    known = {name: figures.program(name, machine, batch_size=task["batch"], algorithms=False) for name in task["jobs"]}
    programs = [known[name] for name in task["jobs"]]
    limit = int(task["limit"] * sum(program.peak_bytes for program in programs))
    least = unlimited_ns(programs, machine)
    planners: dict[str, JobsPlanner] = {"tensile": TENSILE(), **{name: Split(name) for name in SPLITS}}
    planners["exact_split"] = SearchedSplit(EXACT)
    planners["split"] = SearchedSplit(SEARCHED)
    calls = task["calls"]
    planners["control"] = split_search(programs, calls)
    planners["joint"] = JointAnnealing(calls=calls)
    found = {key: outcome(planner, programs, machine, limit, least) for key, planner in planners.items()}
    if found["joint"] is not None:
        seconds = found["joint"]["plan_s"]
        found["seconds"] = searched_for(seconds, calls, programs, machine, limit, least)
    return {
        "limit_bytes": limit, "unlimited_ns": least, "floor": floor_ns(programs, machine, limit) / least - 1,
        "planners": found,
    }  # fmt: skip


def split_search(programs: Sequence[Program], calls: int) -> SearchedSplit:
    """The search over splits, with so many simulations of all jobs."""
    return SearchedSplit(SEARCHED, parts=max(2, round(calls ** (1 / len(programs))) - 1), tried=calls)


def searched_for(
    seconds: float, calls: int, programs: Sequence[Program], machine: Machine, limit: int, least: int
) -> Row | None:
    """The best of searches over splits with ever more simulations; the last begins before the time is over."""
    best, spent, made = None, 0.0, 0
    while spent < seconds:
        begin = time.perf_counter()
        one = outcome(split_search(programs, calls), programs, machine, limit, least)
        spent, calls = spent + time.perf_counter() - begin, 2 * calls
        if one is None:
            break
        made += one["calls"]
        best = min((best or one, one), key=lambda row: row["overhead"])
    return None if best is None else {**best, "plan_s": round(spent, 2), "calls": made}


def outcome(planner: JobsPlanner, programs: Sequence[Program], machine: Machine, limit: int, least: int) -> Row | None:
    """What the jobs lose under a planner's plans."""
    begin = time.perf_counter()
    try:
        plans = planner.plan_jobs(programs, machine, limit)
    except Infeasible:
        return None
    seconds = time.perf_counter() - begin
    timeline = simulate_jobs(jobs_of(programs, plans), machine, limit)
    return {"overhead": timeline.end_ns / least - 1, "plan_s": round(seconds, 2), "calls": planner.simulator_calls,
            "evictions": len(timeline.evictions), "limits": [plan.limit for plan in plans]}  # fmt: skip


# ------------------------------------------------------------------------------------------ for people

LABELS = {"exact_split": "floor's plan, rounded, split searched", "split": "policy and search, split searched",
          "control": "the same, as many simulations", "seconds": "the same, as many seconds",
          "joint": "joint annealing"}  # fmt: skip
LOOKS = {"exact_split": ("#1f6fb3", "s"), "split": ("#8a1253", "s"), "control": ("#9a9a9a", "s"),
         "seconds": ("#9a9a9a", "v"), "joint": ("#222222", "P")}  # fmt: skip


def look(key: str) -> palette.Look:
    """A planner's looks."""
    return palette.Look(LABELS[key], *LOOKS[key]) if key in LABELS else palette.look(key)


def title(row: Row) -> str:
    """A task's name for people."""
    return f"{tensile_table2.label(row)}, {row['limit']:.0%}"


def planners(rows: list[Row]) -> list[str]:
    """All that some task has."""
    return list(dict.fromkeys(key for row in rows for key in row["planners"]))


def numbers(rows: list[Row]) -> Row:
    """Every task; joint annealing beside its start and its controls."""
    lines, rivals = [], []
    for row in rows:
        found = [row["planners"].get(key) for key in planners(rows)]
        cells = ["–" if one is None else f"{one['overhead']:.2%} ({one['plan_s']:.1f} s)" for one in found]
        lines.append({"title": title(row), "floor": row["floor"], "cells": cells})
    for key in ("split", "control", "seconds"):
        both = [(row["planners"]["joint"], row["planners"].get(key)) for row in rows]
        there = [b["overhead"] - a["overhead"] for a, b in both if a is not None and b is not None]
        if there:
            rivals.append({
                "label": LABELS[key].replace("the same, ", "that search over splits with "), "there": len(there),
                "wins": sum(off > 0 for off in there), "gain": 100 * sum(there) / len(there),
            })  # fmt: skip
    evicted = [title(row) for row in rows for one in row["planners"].values() if one is not None and one["evictions"]]
    return {"heads": [look(key).label for key in planners(rows)], "lines": lines, "rivals": rivals,
            "evicted": evicted or None}  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A line of marks per task."""
    over = {key: [(row["planners"].get(key) or {}).get("overhead") for row in rows] for key in planners(rows)}
    highest = max(value for values in over.values() for value in values if value is not None)
    y = range(len(rows))
    marks: list[Mark] = [Line([row["floor"] for row in rows], y, palette.FAINT, "the floor", "|", "", size=25)]
    marks += [
        Line(values, y, look(key).colour, look(key).label, look(key).marker, "", size=8) for key, values in over.items()
    ]
    ticks = [tick for tick in TICKS if tick <= 1.3 * highest]
    where = Axis("overhead of the makespan, over that with memory for everything", "{:.1%}", (-0.0008, 1.2 * highest),
                 "symlog", ticks)  # fmt: skip
    panel = Panel("", marks, where, Axis(names=[title(row) for row in rows]))
    return Chart("Several jobs in less memory than they need", [panel], size=(10.5, 0.5 + 0.75 * len(rows)), keys=3)


FIGURE = Figure("jobs", tasks, run, numbers, chart)
