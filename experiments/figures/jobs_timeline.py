"""Jobs that come and leave, under TENSILE's controller: the memory that each holds, when plans were made anew and when
they took effect, and how long each job's iterations took. No paper has this figure.

The setting of "TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic workloads
system" (2021), sections 3 and 4.5: plans change when a job comes, leaves, or takes other times than was thought.

1. Half-way through the stay of all jobs the kernels of the first take another time.
2. `timeline.perfetto(jobs)` of the same run opens in Perfetto, a process for each job (simulator/jobs/README.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.controller import control
from agents.jobs import JobsPlanner, SearchedSplit
from experiments import figures
from experiments.common import cli
from experiments.common.report import MB, Row
from experiments.plotting import palette
from experiments.plotting.palette import FAINT, INK, LIMIT, SPARE
from experiments.plotting.plots import figure
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.plan import Plan

TITLE = "Jobs that come and leave"
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


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per planner and job."""
    cells = []
    for row in rows:
        for job in row["ran"]:
            lasts = np.diff([job["admitted_ns"], *job["boundaries"]]) / job["ideal_ns"]
            there = f"{job['admitted_ns'] / 1e9:.1f} to {job['left_ns'] / 1e9:.1f} s"
            cells.append([
                palette.label(row["planner"]), job["name"], there, f"{len(job['boundaries'])}", f"{lasts.mean():.2f}",
                f"{len(job['switches'])}",
            ])  # fmt: skip
    return ["planner", "job", "there", "iterations", "mean, of its time alone", "switches of plans"], cells


def notes(rows: list[Row]) -> list[str]:
    """Why plans were made anew, and whether the limit held."""
    out = [
        "Kernels take turns, first come, first served: a job of short kernels (MobileNet) waits for a long one of the "
        "others before each of its own. So measured times change with whoever is there, which counts as drift."
    ]
    for row in rows:
        why = [cause for _, cause, _ in row["replanned"]]
        counts = ", ".join(f"{why.count(cause)} by {cause}" for cause in CAUSES if cause in why)
        peak, limit = row["peak_bytes"] / MB, row["limit_bytes"] / MB
        out.append(
            f"{palette.label(row['planner'])}: plans made {len(why)} times ({counts}); the peak is {peak:,.0f} MB of "
            f"{limit:,.0f}; {row['evictions']} tensors were evicted on demand."
        )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """Two panels for each planner: memory, and how long each iteration took."""
    with figure(path, 12, 5.6 * len(rows), 2 * len(rows), 1) as made:
        for i, row in enumerate(rows):
            memory, lasts = made[2 * i], made[2 * i + 1]
            top = np.zeros(POINTS)
            seconds = np.array([t for t, _ in row["memory"]]) / 1e9
            for colour, job in zip(SPARE, row["ran"], strict=False):
                mine = np.array([b for _, b in job["held"]]) / MB
                memory.fill_between(seconds, top, top + mine, color=colour, alpha=0.55, linewidth=0, step="post",
                                    label=job["name"])  # fmt: skip
                top = top + mine
                edges = [job["admitted_ns"], *job["boundaries"]]
                lasts.step(np.array(edges) / 1e9, np.append(np.diff(edges), edges[-1] - edges[-2]) / job["ideal_ns"],
                           where="post", color=colour, linewidth=1.6)  # fmt: skip
                for at in job["switches"]:
                    lasts.axvline(at / 1e9, ymax=0.06, color=colour, linewidth=2)
            memory.axhline(row["limit_bytes"] / MB, color=LIMIT, linewidth=1.2, linestyle=(0, (4, 2)))
            for at, why, _ in row["replanned"]:
                for axes in (memory, lasts):
                    axes.axvline(at / 1e9, color=CAUSES[why], linewidth=1, linestyle=":", zorder=0.5)
            name = palette.label(row["planner"])
            memory.set(title=f"{name}: memory of each job, the most in {POINTS:,} parts of the time", ylabel="MB")
            lasts.set(title="An iteration, in times of the job alone", xlabel="s", yscale="log", ylim=(0.5, None))
            lasts.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            memory.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
            for axes in (memory, lasts):
                axes.set_xlim(0, row["end_ns"] / 1e9)
        handles, _ = made[0].get_legend_handles_labels()
        handles += [
            Line2D([], [], color=colour, linestyle=":", label=f"planned anew: {why}") for why, colour in CAUSES.items()
        ]
        handles += [Line2D([], [], color=FAINT, marker="|", linestyle="", markersize=9, label="a plan takes effect"),
                    Line2D([], [], color=INK, linestyle=(0, (4, 2)), label="limit")]  # fmt: skip
        made[0].figure.legend(handles=handles, loc="outside lower center", ncols=4)
