"""Several jobs that share a GPU's memory, by every kind of planner: TENSILE, planners of one job with the memory split
between them, the best of many splits, and annealing over all jobs. No paper has this figure.

The overhead is that of the makespan of a fixed amount of work over the makespan with memory for everything
(`agents/jobs.py`), beside a floor that no plans are below.

1. A limit is a share of the jobs' peaks together.
2. Kernels of several jobs run one at a time, first come, first served.
3. Controls of annealing are the search over splits with as many simulations of all jobs, and with as many seconds: with
   twice the simulations again and again until the time is over, the best of all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.jobs import JobsPlanner, SearchedSplit, Split, floor_ns, jobs_of, unlimited_ns
from agents.planner import Infeasible
from agents.search.joint_annealing import JointAnnealing
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import tensile_table2
from experiments.plotting import palette
from experiments.plotting.plots import figure
from simulator.jobs import simulate_jobs
from simulator.machine import Machine
from simulator.program import Program

TITLE = "Several jobs in less memory than they need"
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
) -> Row | None:  # fmt: skip
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


def outcome(
    planner: JobsPlanner, programs: Sequence[Program], machine: Machine, limit: int, least: int
) -> Row | None:  # fmt: skip
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


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per task."""
    keys = list(dict.fromkeys(key for row in rows for key in row["planners"]))
    cells = []
    for row in rows:
        found = [row["planners"].get(key) for key in keys]
        line = ["–" if one is None else f"{one['overhead']:.2%} ({one['plan_s']:.1f} s)" for one in found]
        cells.append([title(row), f"{row['floor']:.2%}", *line])
    return ["jobs, limit", "floor", *(look(key).label for key in keys)], cells


def notes(rows: list[Row]) -> list[str]:
    """Joint annealing beside its start and its controls."""
    out = []
    for key in ("split", "control", "seconds"):
        both = [(row["planners"]["joint"], row["planners"].get(key)) for row in rows]
        there = [(a["overhead"], b["overhead"]) for a, b in both if a is not None and b is not None]
        if there:
            wins, gain = sum(a < b for a, b in there), sum(b - a for a, b in there) / len(there)
            name = LABELS[key].replace("the same, ", "that search over splits with ")
            out.append(f"Joint annealing is below {name} in {wins} of {len(there)} tasks, by {100 * gain:.2f} points "
                       "in the mean.")  # fmt: skip
    every = [(row, one) for row in rows for one in row["planners"].values()]
    evicted = [title(row) for row, one in every if one is not None and one["evictions"]]
    out.append(f"Plans under which tensors were evicted on demand: {', '.join(evicted)}." if evicted else
               "Under none of the plans a tensor is evicted on demand: every job keeps within its part.")  # fmt: skip
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A line of marks per task."""
    with figure(path, 10.5, 1.4 + 0.75 * len(rows)) as axes:
        for y, row in enumerate(rows):
            axes.plot([row["floor"]] * 2, [y - 0.38, y + 0.38], color=palette.FAINT, linewidth=2.5)
            for key, one in row["planners"].items():
                if one is not None:
                    how = look(key)
                    axes.plot(one["overhead"], y, how.marker, color=how.colour, markersize=9 if key == "joint" else 7.5,
                              label=how.label if y == 0 else None)  # fmt: skip
        axes.set_yticks(range(len(rows)), [title(row) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xscale("symlog", linthresh=0.01, linscale=0.7)
        ticks = (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
        highest = max(one["overhead"] for row in rows for one in row["planners"].values() if one is not None)
        axes.set_xticks([tick for tick in ticks if tick <= 1.3 * highest])
        axes.set_xlim(-0.0008, 1.2 * highest)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1%}" if 0 < x < 0.01 else f"{x:.0%}"))
        axes.set(xlabel="overhead of the makespan, over that with memory for everything (grey: the floor)")
        axes.grid(axis="y", visible=False)
        handles = {key: look(key) for row in rows for key, one in row["planners"].items() if one is not None}
        axes.figure.legend(handles=[Line2D([], [], linestyle="", marker=how.marker, color=how.colour, label=how.label)
                                    for how in handles.values()], loc="outside lower center", ncols=3)  # fmt: skip
