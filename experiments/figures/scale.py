"""The time of the floor and of `lp_round` against the size of the program, in every mode, and what simulated annealing
finds in the same time. No paper has this figure.

1. The floor is timed by itself; `lp_round` computes one of its own, which its time has in it.
2. Annealing has the seconds that `lp_round` took, all cores, and no floor.
3. Planning is timed in a process that has compiled what it calls (Numba), with the program in memory.
"""

from __future__ import annotations

import time
from pathlib import Path

from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.floor import floor
from experiments.common import cli
from experiments.common.report import Row, warm_up
from experiments.figures import label, network, planned, program
from experiments.plotting.palette import FAINT, INK, MODE_COLOURS, look
from experiments.plotting.plots import panel_grid
from simulator import Machine
from simulator.ways import MODES

TITLE = "Scale: seconds of the floor and of LP rounding"
ALONE = True  # a planner has all cores
TICKS = (100, 200, 500, 1000, 2000, 5000)  # kernels
PLANNERS = ("lp_round", "annealing")


def tasks(settings: DictConfig) -> list[Row]:
    """One per program and mode."""
    config = cli.plain(settings)
    out: list[Row] = []
    for name, task in config["programs"].items():
        changes = {key: value for key, value in task.items() if key not in ("workload", "machine")}
        workload = network(task.get("workload", name), f"programs.{name}.workload")
        machine = task.get("machine", config["machine_of_the_rest"])
        out += [
            {"program": name, "workload": workload, "machine": machine, "changes": changes, "mode": mode,
             "limit": config["limit"]}
            for mode in config["modes"]
        ]  # fmt: skip
    if not 0 < config["limit"] <= 1:
        raise cli.UsageError(f"figure.limit: expected a share of the peak, got {config['limit']!r}")
    if wrong := [mode for mode in config["modes"] if mode not in MODES]:
        raise cli.UsageError(f"figure.modes: expected some of {', '.join(MODES)}, got {wrong[0]!r}")
    return out


def run(task: Row, machine: Machine) -> Row:
    """Overheads in per cent (None: no plan), times in s."""
    machine = Machine.load(task["machine"])
    built = program(task["workload"], machine, **task["changes"])
    limit = int(task["limit"] * built.peak_bytes)
    for name in PLANNERS:
        warm_up(machine, name, task["mode"])
    begin = time.perf_counter()
    bound = floor(built, machine, limit, task["mode"])
    found = {
        "kernels": len(built.kernels), "gaps": len(built.gaps(1)), "ideal_ns": built.ideal_ns, "limit_bytes": limit,
        "floor_percent": round(100 * bound.overhead, 4) if bound.feasible else None,
        "floor_s": round(time.perf_counter() - begin, 2),
    }  # fmt: skip
    options = {"mode": task["mode"]}
    for name in PLANNERS:
        made = planned(built, machine, limit, name, **options)
        found |= {f"{name}_percent": made["overhead_percent"], f"{name}_s": round(made["plan_s"], 2)}
        options["seconds"] = max(made["plan_s"], 0.01)  # of the next
    return found


# ------------------------------------------------------------------------------------------ for people


def title(row: Row) -> str:
    """A program's name for people."""
    more = [f"{key} {value}" for key, value in row["changes"].items()]
    images = {"imagenet": "ImageNet", "cifar": "CIFAR-10"}.get(row["workload"].rpartition("_")[2])
    more += [images] if images else []
    return label(row["workload"]) + (f" ({', '.join(more)})" if more else "")


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per program and mode."""
    heads = ["program", "kernels", "machine", "mode", "floor", "s", "LP rounding", "s", "annealing, as long"]
    cells = [
        [title(row), f"{row['kernels']:,}", row["machine"], row["mode"], _cell(row["floor_percent"]),
         f"{row['floor_s']:.1f}", _cell(row["lp_round_percent"]), f"{row['lp_round_s']:.1f}",
         _cell(row["annealing_percent"])]
        for row in rows
    ]  # fmt: skip
    return heads, cells


def _cell(percent: float | None) -> str:
    return "–" if percent is None else f"{percent:.2f}%"


def notes(rows: list[Row]) -> list[str]:
    """The slowest of all, and who is ahead of whom."""
    out = []
    for what, name in (("floor", "floor"), ("lp_round", "LP rounding")):
        slow = max(rows, key=lambda row: row[f"{what}_s"])
        out.append(f"The slowest {name}: {slow[f'{what}_s']:.1f} s ({title(slow)}, {slow['mode']}).")
    pairs = [(row["lp_round_percent"], row["annealing_percent"]) for row in rows]
    there = [(a, b) for a, b in pairs if a is not None and b is not None]
    ahead, behind = sum(a < b - 0.01 for a, b in there), sum(a > b + 0.01 for a, b in there)
    out.append(
        f"In the same time LP rounding is more than 0.01 points ahead of annealing at {ahead} of {len(there)} and "
        f"behind it at {behind}."
    )
    proven = sum(row["lp_round_percent"] is not None and row["lp_round_percent"] - row["floor_percent"] < 0.1
                 for row in rows if row["floor_percent"] is not None)  # fmt: skip
    out.append(f"Its plan is within 0.1 points of the floor at {proven} of {len(rows)}.")
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A panel for the floor's time and one for that of LP rounding, by the number of kernels; without those where no
    plan can fit, which is known at once."""
    rows = [row for row in rows if row["floor_percent"] is not None]
    with panel_grid(path, 2, 2, (5.2, 4.2), (0.2, 0.2)) as (panels, _):
        for panel, what, name in zip(panels, ("floor_s", "lp_round_s"), ("floor", look("lp_round").label), strict=True):
            for mode in sorted({row["mode"] for row in rows}):
                mine = [row for row in rows if row["mode"] == mode]
                panel.plot([row["kernels"] for row in mine], [row[what] for row in mine], "o",
                           color=MODE_COLOURS[mode], markersize=4.5, alpha=0.8, label=mode)  # fmt: skip
            panel.set(title=name, xlabel="kernels of the program", ylabel="time", xscale="log", yscale="log")
            for seconds in (1, 10, 30):
                panel.axhline(seconds, color=FAINT, linewidth=0.8, zorder=0)
            panel.set_xticks(TICKS, [f"{kernels:,}" for kernels in TICKS])
            panel.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
            panel.set_ylim(0.05, 45)
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} s"))
            last = max(rows, key=lambda row: row["kernels"])
            panel.annotate(title(last), (last["kernels"], last[what]), textcoords="offset points", xytext=(-6, 8),
                           ha="right", fontsize=8, color=INK)  # fmt: skip
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
