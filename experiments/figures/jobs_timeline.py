"""Jobs that come and leave, under TENSILE's controller: memory, when plans were made anew, iterations."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.controller import control
from agents.jobs import JobsPlanner, SearchedSplit
from experiments import figures
from experiments.common import cli
from experiments.common.report import MB, Row
from experiments.figures.figure import Figure
from experiments.plotting import palette
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule
from experiments.plotting.palette import LIMIT, SPARE
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.plan import Plan

POINTS = 1_500  # of a memory curve
CAUSES = {"arrival": "#238b45", "departure": "#1f5fa8", "drift": "#cb181d"}


def tasks(settings: DictConfig) -> list[Row]:
    """One per planner."""
    config = cli.plain(settings)
    jobs = config["jobs"]
    for i, job in enumerate(jobs):
        figures.network(job["workload"], f"jobs[{i}].workload")
    drift, limit = float(config["drift"]), cli.number(settings, "limit")
    rest = {"batch": config["batch"], "limit": limit, "drift": drift, "span": cli.number(settings, "span")}
    return [{"planner": name, "jobs": jobs, **rest} for name in config["planners"]]


def run(task: Row, machine: Machine) -> Row:
    """Memory, iterations and switches of each job; times in ns."""
    known = {job["workload"]: figures.program(job["workload"], machine, batch_size=task["batch"], algorithms=False)
             for job in task["jobs"]}  # fmt: skip
    programs = [known[job["workload"]] for job in task["jobs"]]
    unit = max(program.ideal_ns for program in programs)
    limit = int(task["limit"] * sum(program.peak_bytes for program in programs))
    jobs = []
    for i, (one, program) in enumerate(zip(task["jobs"], programs, strict=True)):
        kernels = tuple(kernel.duration_ns for kernel in program.kernels)
        slower = tuple(round(ns * (1 + task["drift"])) for ns in kernels)
        # A row of times for each iteration; they change after `drifts` of them.
        rows = (kernels,) * one["drifts"] + (slower,) * 1_000 if "drifts" in one else ()
        leaves = None if one["leaves"] is None else round(one["leaves"] * unit)
        name, arrives = f"{figures.label(one['workload'])} {i + 1}", round(one["arrives"] * unit)
        jobs.append(Job(name, program, Plan(), arrives, None, leaves, durations=rows))
    planner: JobsPlanner = TENSILE() if task["planner"] == "tensile" else SearchedSplit(task["planner"])
    done = control(jobs, machine, limit, planner, until_ns=round(task["span"] * unit), check_ns=unit)
    timeline = done.timeline
    return {
        "limit_bytes": limit, "peak_bytes": timeline.peak_bytes, "end_ns": timeline.end_ns,
        "evictions": len(timeline.evictions),
        "replanned": [[r.time_ns, r.why, round(r.drift, 4)] for r in done.replanned],
        "memory": _thinned(timeline.memory, timeline.end_ns),
        "ran": [{"name": job.name, "ideal_ns": job.ideal_ns, "admitted_ns": job.admitted_ns, "left_ns": job.left_ns,
                 "boundaries": list(job.boundaries), "switches": [at for at, _ in job.switches],
                 "held": _thinned(job.held, timeline.end_ns)} for job in timeline.jobs],
    }  # fmt: skip


def _thinned(curve: tuple[tuple[int, int], ...], end_ns: int) -> list[list[int]]:
    """The most that is held in each of ``POINTS`` parts of the time: (start of the part, bytes)."""
    edges = np.linspace(0, end_ns, POINTS + 1).astype(np.int64)
    times = np.array([t for t, _ in curve], np.int64)
    used = np.array([b for _, b in curve], np.int64)
    out = []
    for left, right in zip(edges[:-1], edges[1:], strict=True):
        first = max(int(np.searchsorted(times, left, side="right")) - 1, 0)
        last = max(int(np.searchsorted(times, right, side="left")), first + 1)
        out.append([int(left), int(used[first:last].max(initial=0)) if used.size and times[0] <= right else 0])
    return out


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """Every planner and job; why plans were made anew, and whether the limit held."""
    lines, planners = [], []
    for row in rows:
        causes = [cause for _, cause, _ in row["replanned"]]
        name = palette.label(row["planner"])
        counts = [f"{causes.count(cause)} by {cause}" for cause in CAUSES if cause in causes]
        planners.append({**row, "label": name, "times": len(causes), "counts": counts})
        for job in row["ran"]:
            lasts = np.diff([job["admitted_ns"], *job["boundaries"]]) / job["ideal_ns"]
            lines.append(
                {**job, "planner": name, "mean": lasts.mean(), "iterations": len(lasts), "times": len(job["switches"])}
            )
    return {"lines": lines, "planners": planners}


def chart(rows: list[Row]) -> Chart:
    """Two panels for each planner: memory, and how long each iteration took."""
    panels = []
    for row in rows:
        top, x = np.zeros(POINTS), np.array([t for t, _ in row["memory"]]) / 1e9
        memory: list[Mark] = []
        lasts: list[Mark] = []
        for ink, job in zip(SPARE, row["ran"], strict=False):
            low, top = top, top + np.array([held for _, held in job["held"]]) / MB
            memory.append(Line(x, top, ink, width=0.0, band=(low, top), shade=0.55, step=True))
            edges = np.array([job["admitted_ns"], *job["boundaries"]])
            each = np.diff(edges) / job["ideal_ns"]
            lasts.append(Line(edges / 1e9, [*each, each[-1]], ink, job["name"], step=True))
            switches = [at / 1e9 for at in job["switches"]]
            lasts.append(Line(switches, [0.55] * len(switches), ink, "a plan takes effect", "|", "", size=9))
        for marks in (memory, lasts):
            marks += [Rule(at / 1e9, colour=CAUSES[why], label=f"planned anew: {why}", line=":", width=1)
                      for at, why, _ in row["replanned"]]  # fmt: skip
        memory.append(Rule(row["limit_bytes"] / MB, across=True, colour=LIMIT, label="limit"))
        seconds = Axis("s", limits=(0, row["end_ns"] / 1e9))
        name = palette.label(row["planner"])
        panels += [
            Panel(f"{name}: memory of each job, the most in {POINTS:,} parts of the time", memory, seconds, Axis("MB")),
            Panel("An iteration, in times of the job alone", lasts, seconds, Axis("", "{:g}", (0.5, None), "log")),
        ]
    return Chart("Jobs that come and leave, under TENSILE's controller", panels, 1, (12.0, 2.8))


FIGURE = Figure("jobs_timeline", tasks, run, numbers, chart)
