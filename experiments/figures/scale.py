"""The time of the floor and of `lp_round` against the size of the program, and annealing in the same time."""

from __future__ import annotations

import time

from omegaconf import DictConfig

from agents.floor import floor
from experiments.common import cli
from experiments.common.report import Row, warm_up
from experiments.figures import grouped, label, network, planned, program, share_of_peak
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule, Words
from experiments.plotting.palette import FAINT, MODE_COLOURS, look
from simulator import Machine
from simulator.modes import MODES

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
    share_of_peak(config["limit"])
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


def numbers(rows: list[Row]) -> Row:
    """The slowest of all, and who is ahead of whom."""
    lines = [{**row, "title": title(row)} for row in rows]
    there = [(row["lp_round_percent"], row["annealing_percent"]) for row in rows]
    there = [(a, b) for a, b in there if a is not None and b is not None]
    floors = [(row["lp_round_percent"], row["floor_percent"]) for row in rows if row["floor_percent"] is not None]
    return {
        "lines": lines, "slow_floor": max(lines, key=lambda row: row["floor_s"]), "there": len(there),
        "slow": max(lines, key=lambda row: row["lp_round_s"]), "ahead": sum(a < b - 0.01 for a, b in there),
        "behind": sum(a > b + 0.01 for a, b in there), "count": len(rows),
        "proven": sum(a is not None and a - low < 0.1 for a, low in floors),
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Seconds of the floor and of LP rounding, by the number of kernels; without those where no plan can fit, which is
    known at once."""
    rows, panels = [row for row in rows if row["floor_percent"] is not None], []
    last = max(rows, key=lambda row: row["kernels"])
    for what, name in (("floor_s", "floor"), ("lp_round_s", look("lp_round").label)):
        marks: list[Mark] = [Rule(seconds, across=True, colour=FAINT, line="-", width=0.8) for seconds in (1, 10, 30)]
        for mode, mine in sorted(grouped(rows, "mode").items()):
            marks.append(Line([r["kernels"] for r in mine], [r[what] for r in mine], MODE_COLOURS[mode], mode, "o", ""))
        marks.append(Words(last["kernels"], 1.6 * last[what], title(last), "right"))
        panels.append(Panel(name, marks, Axis("kernels of the program", "{:,g}", (None, None), "log", TICKS),
                            Axis("time", "{:g} s", (0.05, 45), "log")))  # fmt: skip
    return Chart("Seconds of the floor and of LP rounding", panels, 2, (5.2, 3.8))


FIGURE = Figure("scale", tasks, run, numbers, chart, alone=True)
