"""Fig. 10 of the SmartPool paper: footprint against batch size, four ways to allocate."""

from __future__ import annotations

from typing import Any

import numpy as np
from omegaconf import DictConfig

from agents.heuristics.smartpool_autoswap import SmartPoolAutoSwap
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.figures.smartpool_table1 import kept_by_singa
from experiments.plotting.charts import DOTTED, Axis, Chart, Line, Mark, Panel, Rule
from experiments.plotting.palette import ALLOCATORS, INK, SWAPPED
from simulator import Machine, Program, simulate
from simulator.pool import ALLOCATORS as POOLS, program_lifetimes, timeline_lifetimes

MB = 2**20
ZERO = 0.0005  # an overhead below it is 0.0 %
PLAIN = ("cudamalloc", "cnmem", "smartpool")
CLAIMS = (  # overhead, least reduction of CnMem's footprint, quotation
    (0.0, 1 / 3, "up to 1/3 of the footprint without increasing the training time"),
    (0.15, 0.6, "no less than 60% of the footprint with smaller than 15% overhead"),
)


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and batch size."""
    least = "numbers of at least 0"
    overheads = figures.numbers(settings, "overheads", lambda value: 0 <= value < float("inf"), least)
    batches = figures.integers(settings, "batches", 2)
    pool = cli.choice(settings, "pool", tuple(name for name, how in POOLS.items() if not how.online))
    search = {
        "pool": pool,
        "seconds": cli.number(settings, "seconds"),
        "steps": cli.integer(settings, "steps", least=2),
    }
    return [
        {"network": name, "batch": batch, "overheads": sorted(overheads), **search}
        for name in figures.networks(settings)
        for batch in batches
    ]


def run(task: Row, machine: Machine) -> Row:
    """Footprints of one network at one batch size, in bytes."""
    from experiments import workloads  # PyTorch is only needed to capture

    config = figures.workload(task["network"])
    program = at_batch(config, task["batch"], machine)
    lives = program_lifetimes(program).intervals
    footprints = {name: figures.packed(name, lives, machine.alignment).footprint for name in PLAIN}
    return {
        "load": program.peak_bytes,
        "ideal_ns": program.ideal_ns,
        "memory": machine.memory_bytes,
        "kept_by_singa": sum(t.nbytes for tensors in kept_by_singa(workloads.build(config)[0]) for t in tensors),
        "footprints": footprints,
        "swapped": smallest(program, machine, task),
    }


def at_batch(config: dict[str, Any], batch: int, machine: Machine) -> Program:
    """A workload at another batch size; its durations as the module says."""
    from experiments import workloads

    captured = workloads.load({**config, "batch_size": batch, "iteration_ms": {}}, machine)
    measured = figures.measured_ms(config, machine)
    if measured is None:
        return captured.program
    roofline = captured.program.ideal_ns
    if batch != config["batch_size"]:
        roofline = workloads.load({**config, "iteration_ms": {}}, machine).program.ideal_ns
    return captured.on(machine, iteration_ns=round(measured * 1e6 * captured.program.ideal_ns / roofline)).program


def smallest(program: Program, machine: Machine, search: Row) -> list[Row]:
    """For each of the overheads the smallest footprint that the planner finds."""
    pool, seconds = search["pool"], search["seconds"]
    planner = SmartPoolAutoSwap(pool=pool, seconds=seconds, steps=search["steps"])
    out = []
    plans = planner.smallest(program, machine, [max(overhead, ZERO) for overhead in search["overheads"]])
    for overhead, plan in zip(search["overheads"], plans, strict=True):
        timeline = simulate(program, plan, machine, plan.limit)
        lives = timeline_lifetimes(timeline).intervals
        out.append({
            "at_most": overhead, "overhead": timeline.overhead, "load": lives.peak_bytes, "swaps": len(plan.decisions),
            "footprint": figures.packed(pool, lives, machine.alignment, seconds).footprint,
        })  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------ for people


def saved(row: Row, i: int, more: int = 0) -> float:
    """What part of CnMem's footprint the i-th overhead saves, ``more`` bytes on both sides."""
    return float(1 - (row["swapped"][i]["footprint"] + more) / (row["footprints"]["cnmem"] + more))


def line(lines: list[Row], sizes: list[int]) -> tuple[float, float]:
    """Slope of the least-squares line, bytes per image, and how far the sizes are off it, of themselves, at most."""
    x, y = np.array([row["batch"] for row in lines], float), np.array(sizes, float)
    if len(x) < 2:
        return float(y[0] / x[0]), 0.0
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(np.abs((slope * x + start) / y - 1).max())


def facts(network: str, lines: list[Row], batch: int) -> Row:
    """A network: footprints at one batch size, and what swapping saves at all."""
    here = next(row for row in lines if row["batch"] == batch)
    cells = []
    for i, one in enumerate(here["swapped"]):
        cells.append(f"{one['footprint'] / MB:,.0f} ({span(saved(row, i) for row in lines):.0%})")
    slope, off = line(lines, [row["swapped"][-1]["footprint"] for row in lines])
    return {
        "label": figures.label(network), "footprints": here["footprints"], "cells": cells,
        "slopes": [line(lines, [row["footprints"]["cnmem"] for row in lines])[0], slope], "off": off,
    }  # fmt: skip


def numbers(rows: list[Row]) -> Row:
    """The claims, and every network."""
    overheads, batch = rows[0]["overheads"], min((row["batch"] for row in rows), key=lambda b: abs(b - 100))
    networks = [facts(name, lines, batch) for name, lines in by_network(rows).items()]
    claims = []
    for overhead, share, quotation in CLAIMS:
        for i in (i for i, o in enumerate(overheads) if o == overhead):
            perfect = sum(1 - row["swapped"][i]["load"] / row["footprints"]["cnmem"] >= share for row in rows)
            enough = sum(saved(row, i) >= share for row in rows)
            claims.append({
                "quotation": quotation, "share": share, "saved": span(saved(row, i) for row in rows), "enough": enough,
                "perfect": perfect if perfect > enough else None, "count": len(rows),
                "kept": span(saved(row, i, row["kept_by_singa"]) for row in rows),
            })  # fmt: skip
    straight = all(len(lines) > 2 for lines in by_network(rows).values())
    return {
        "networks": networks, "claims": claims, "at": batch, "most": overheads[-1],
        "heads": [f"+AutoSwap {o:.0%}" for o in overheads],
        "slope": span(one["slopes"][1] / one["slopes"][0] for one in networks) if straight else None,
        "off": max(one["off"] for one in networks),
    }  # fmt: skip


def by_network(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each network, from small batches to large ones."""
    return {name: sorted(lines, key=lambda row: row["batch"]) for name, lines in figures.grouped(rows).items()}


def chart(rows: list[Row]) -> Chart:
    """A panel per network: footprint across batch sizes, named at the right with what is saved there."""
    overheads, memory = rows[0]["overheads"], rows[0]["memory"] / 2**30
    panels = []
    for network, lines in by_network(rows).items():
        x = [row["batch"] for row in lines]
        marks: list[Mark] = []
        for i, overhead in enumerate(overheads):
            y = [row["swapped"][i]["footprint"] / 2**30 for row in lines]
            ink = SWAPPED[round(i * (len(SWAPPED) - 1) / max(len(overheads) - 1, 1))]
            marks.append(Line(x, y, ink, marker="o", end=f"+AutoSwap {overhead:.0%}: −{saved(lines[-1], i):.0%}"))
        for pool in PLAIN:
            name, ink, marker = ALLOCATORS[pool]
            y, name = [row["footprints"][pool] / 2**30 for row in lines], name.partition(",")[0]
            dotted = Line(x, y, INK, line=DOTTED, width=1.2, front=4, end=name)  # SmartPool lies on it
            marks.append(dotted if pool == "cudamalloc" else Line(x, y, ink, marker=marker, width=1.8, end=name))
        top = 1.06 * max(max(m.y) for m in marks if isinstance(m, Line))
        if memory < top:
            marks.append(Rule(memory, across=True, text="the GPU's memory"))
        panels.append(Panel(figures.label(network), marks, Axis("batch size", limits=(0, x[-1] * 1.02), ticks=x),
                            Axis("footprint (GiB)", limits=(0, top))))  # fmt: skip
    note = ("+AutoSwap: SmartPool+AutoSwap with at most so much simulated overhead, and what it saves of "
            "CnMem's footprint at the largest batch size. cudaMalloc (dotted) is the peak load.")  # fmt: skip
    return Chart("Footprint against batch size on a GTX 1080 Ti", panels, 3, (5.2, 3.7), (0.0, 0.5), note=note)


FIGURE = Figure("smartpool_fig10", tasks, run, numbers, chart)
