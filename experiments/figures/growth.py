"""CPU time and memory against the size of the program, from 1,000 kernels to 100,000 (``experiments.workloads.stack``).

Every size is measured in a process of its own, by ``python -m experiments.figures.growth KERNELS MACHINE LIMIT``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

import agents
from agents.search.local_search import Moves, anneal
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import share_of_peak
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Panel
from experiments.workloads.stack import stack
from simulator import Engine, Machine, Plan, Program, simulate
from simulator.compiled.encoding import rows_of

CALLS = 20  # of annealing
# What is measured, and its name for people.
STAGES = {
    "load": "load the file", "simulate": "simulate", "planned": "simulate a plan", "autoswap_doa": "AutoSwap DOA",
    "memonger": "memonger", "tflms": "TFLMS", "task": "an environment's task", "call": "a call of annealing",
}  # fmt: skip
WARM = 200  # kernels of a program with which all is compiled first


def tasks(settings: DictConfig) -> list[Row]:
    """One per size, the largest last."""
    config = cli.plain(settings)
    share_of_peak(config["limit"])
    sizes = config["kernels"]
    if not sizes or not all(isinstance(n, int) and n >= WARM for n in sizes):
        raise cli.UsageError(f"figure.kernels: expected integers of at least {WARM}, got {sizes}")
    return [{"asked": n, "limit": config["limit"]} for n in sorted(sizes)]


def run(task: Row, machine: Machine) -> Row:
    """CPU seconds of every stage, the peak of the process's memory in bytes; of the program, how large it is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        path.write_text(json.dumps(machine.to_dict()))
        words = [sys.executable, "-m", "experiments.figures.growth", str(task["asked"]), str(path), str(task["limit"])]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(kernels: int, machine: Machine, share: float) -> Row:
    """``run``, in this process."""
    from envs.task import Task

    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        out = work()
        seconds[stage] = round(time.process_time() - begin, 4)
        return out

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.json"
        stack(kernels).save(path)
        program = timed("load", lambda: Program.load(path))
    limit = int(share * program.peak_bytes)
    timed("simulate", lambda: simulate(program, Plan(), machine, program.peak_bytes))
    plans = [
        timed(name, lambda name=name: agents.make(name).plan(program, machine, limit))
        for name in ("autoswap_doa", "memonger", "tflms")
    ]
    timed("planned", lambda: simulate(program, plans[0], machine, limit))
    timed("task", lambda: Task(program, machine, limit, mode="joint"))
    engine, rows = Engine(program, machine, limit), rows_of(plans[0].decisions)
    moves, start = Moves(program, limit, "joint", 2**20, 0), engine.score(rows).iteration_ns
    moves.reset(rows)
    timed("call", lambda: anneal(moves, engine, rows, start, CALLS, 3e-3, 3e-5, 0))
    seconds["call"] /= CALLS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"kernels": len(program.kernels), "tensors": len(program.tensors), "gaps": len(program.gaps()),
            "seconds": seconds, "rss_bytes": peak}  # fmt: skip


def exponent(sizes: list[float], values: list[float]) -> float:
    """The slope of the line through them, both by their logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-6)), 1)[0])


def numbers(rows: list[Row]) -> Row:
    """A line a stage, with how it grows."""
    sizes = [float(row["kernels"]) for row in rows]
    rss = [row["rss_bytes"] / 2**20 for row in rows]
    lines = []
    for stage, name in STAGES.items():
        values = [row["seconds"][stage] for row in rows]
        lines.append({"title": name, "cells": [f"{v:.4f}" if v < 0.1 else f"{v:.2f}" for v in values],
                      "exponent": exponent(sizes, values)})  # fmt: skip
    memory = {"title": "memory, MiB", "cells": [f"{v:,.0f}" for v in rss], "exponent": exponent(sizes, rss)}
    return {"lines": [*lines, memory], "sizes": [f"{row['kernels']:,}" for row in rows],
            "most": max(lines, key=lambda line: line["exponent"])}  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Seconds by kernels, and memory."""
    sizes = [row["kernels"] for row in rows]
    across = Axis("kernels of the program", "{:,g}", (None, None), "log", [1000, 10_000, 100_000])
    times = [
        Line(sizes, [row["seconds"][stage] for row in rows], f"C{i}", name, "o")
        for i, (stage, name) in enumerate(STAGES.items())
    ]
    memory = [Line(sizes, [row["rss_bytes"] / 2**20 for row in rows], "C0", "", "o")]
    seconds = Axis("time", "{:g} s", (None, None), "log", [1e-4, 1e-3, 0.01, 0.1, 1, 10])
    panels = [Panel("CPU time", list(times), across, seconds),
              Panel("memory at the peak", list(memory), across, Axis("MiB", "{:,g}", (None, None), "log"))]  # fmt: skip
    return Chart("Time and memory against the size of the program", panels, 2, (5.2, 3.8))


FIGURE = Figure("growth", tasks, run, numbers, chart, alone=True)

if __name__ == "__main__":
    here = Machine.load(sys.argv[2])
    measured(WARM, here, float(sys.argv[3]))
    print(json.dumps(measured(int(sys.argv[1]), here, float(sys.argv[3]))))
