"""The overhead of plans against the time that a planner has, on a dozen tasks (a program, a machine, a limit each):
what `lp_round` and annealing find in 0.1 to 60 seconds, floor included, on all cores, beside the best plan of the
published heuristics and the floor. No paper has this figure.

1. Every budget is a run of its own: nothing is carried from one to the next.
2. Planning is timed in a process that has compiled what it calls (Numba), with the program in memory.
"""

from __future__ import annotations

import time
from pathlib import Path

from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.bound import floor
from experiments import cli
from experiments.figures import label, network, planned, program
from experiments.plotting.palette import FAINT, FLOOR, INK, look
from experiments.plotting.plots import panel_grid
from experiments.report import Row, heuristics, warm_up
from simulator import Machine

TITLE = "Core tasks: overhead against planning time"
ALONE = True  # a planner has all cores


def tasks(settings: DictConfig) -> list[Row]:
    """One per program, machine and limit."""
    config = cli.plain(settings)
    out: list[Row] = []
    for name, task in config["tasks"].items():
        network(task["workload"], f"tasks.{name}.workload")
        if not 0 < task["limit"] <= 1:
            raise cli.UsageError(f"figure.tasks.{name}.limit: expected a share of the peak, got {task['limit']!r}")
        out.append({"task": name, **task, "planners": config["planners"], "seconds": config["seconds"]})
    return out


def run(task: Row, machine: Machine) -> Row:
    """Overheads in per cent (None: no plan), planning times in s."""
    machine = Machine.load(task["machine"])
    built = program(task["workload"], machine)
    limit = int(task["limit"] * built.peak_bytes)
    for name in (*task["planners"], *heuristics()):
        warm_up(machine, name)
    begin = time.perf_counter()
    bound = floor(built, machine, limit)
    floor_s = time.perf_counter() - begin
    published = [{"planner": name, **planned(built, machine, limit, name)} for name in heuristics()]
    return {
        "kernels": len(built.kernels), "limit_bytes": limit, "ideal_ns": built.ideal_ns,
        "floor_percent": round(100 * bound.overhead, 4), "floor_s": round(floor_s, 2),
        "published": published,
        "found": {
            name: [planned(built, machine, limit, name, **options, seconds=s) for s in task["seconds"]]
            for name, options in task["planners"].items()
        },
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


def best_published(row: Row) -> Row | None:
    """The best of the heuristics; None where none has a plan."""
    there = [found for found in row["published"] if found["overhead_percent"] is not None]
    return min(there, key=lambda found: found["overhead_percent"], default=None)


def title(row: Row) -> str:
    """A task's name for people."""
    return f"{label(row['workload'])}, {row['limit']:.0%}, {row['machine']}"


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per task: the floor, the best published heuristic, and each planner after each time."""
    names, seconds = list(rows[0]["planners"]), rows[0]["seconds"]
    heads = ["task", "kernels", "floor (s)", "best published (s)"]
    heads += [f"{look(name).label}, {s:g} s" for name in names for s in seconds]
    cells = []
    for row in rows:
        best = best_published(row)
        cells.append([
            title(row), f"{row['kernels']:,}", f"{row['floor_percent']:.2f}% ({row['floor_s']:.1f})",
            f"{best['overhead_percent']:.2f}% {look(best['planner']).label} ({best['plan_s']:.1f})" if best else "–",
            *(_cell(found["overhead_percent"]) for name in names for found in row["found"][name]),
        ])  # fmt: skip
    return heads, cells


def _cell(percent: float | None) -> str:
    return "–" if percent is None else f"{percent:.2f}%"


def notes(rows: list[Row]) -> list[str]:
    """How far each planner is from the floor after each time; which is ahead; what the budgets were overrun by."""
    names, seconds = list(rows[0]["planners"]), rows[0]["seconds"]
    out = []
    for i, s in enumerate(seconds):
        parts = []
        for name in names:
            gaps = sorted(
                row["found"][name][i]["overhead_percent"] - row["floor_percent"]
                for row in rows if row["found"][name][i]["overhead_percent"] is not None
            )  # fmt: skip
            parts.append(
                f"{look(name).label} {gaps[len(gaps) // 2]:.2f} points ({len(gaps)} of {len(rows)} tasks)"
                if gaps else f"{look(name).label} has no plan"
            )  # fmt: skip
        out.append(f"In {s:g} s, above the floor in the median of the tasks with a plan: {', '.join(parts)}.")
    late = max((found["plan_s"] - s, s, row["task"], name) for row in rows for name in names
               for found, s in zip(row["found"][name], seconds, strict=True))  # fmt: skip
    out.append(f"The longest overrun: {late[0]:.2f} s beyond {late[1]:g} s ({late[3]}, {late[2]}).")
    return out


def highest(row: Row) -> float:
    """The top of a panel: above the best heuristic and what is found from the second time on. What is found before
    may be so far above that it would press all others to the floor."""
    columns = list(zip(*row["found"].values(), strict=True))
    first, *later = [[f["overhead_percent"] for f in column if f["overhead_percent"] is not None] for column in columns]
    best = best_published(row)
    top = max(
        [row["floor_percent"], *(y for column in later for y in column), *([best["overhead_percent"]] if best else [])]
    )
    return float(max([top, *(min(y, 1.3 * top) for y in first)]))


def draw(rows: list[Row], path: Path) -> None:
    """A panel per task; what is above its top is said by the table."""
    names, seconds = list(rows[0]["planners"]), rows[0]["seconds"]
    with panel_grid(path, len(rows), 4, (3.4, 2.9), (0.2, 0.6)) as (panels, columns):
        for i, (panel, row) in enumerate(zip(panels, rows, strict=True)):
            low, best = row["floor_percent"], best_published(row)
            panel.axhspan(-100, low, color=FLOOR, zorder=0)
            panel.axhline(low, color=FAINT, linewidth=1.2, label="floor: no plan is below")
            for name in names:
                points = [(s, f["overhead_percent"]) for s, f in zip(seconds, row["found"][name], strict=True)]
                points = [point for point in points if point[1] is not None]
                style = look(name)
                panel.plot(*zip(*points, strict=True) if points else ((), ()), color=style.colour, marker=style.marker,
                           linewidth=1.4, markersize=5, label=style.label)  # fmt: skip
            if best is not None:
                panel.axhline(best["overhead_percent"], color=INK, linewidth=1.0, linestyle=(0, (4, 2)),
                              label="best published heuristic")  # fmt: skip
            high = highest(row)
            room = max(high - low, 0.5)
            panel.set(title=title(row), xscale="log", ylim=(max(low - 0.35 * room, -0.1 * room), high + 0.12 * room))
            panel.set_xticks(seconds, [f"{s:g}" for s in seconds], minor=False)
            panel.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}%"))
            if i % columns == 0:
                panel.set_ylabel("overhead")
            if i >= len(rows) - columns:
                panel.set_xlabel("planning time, s")
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
