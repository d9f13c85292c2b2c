"""Table 1 of the TENSILE paper: what vDNN, Capuchin and TENSILE save of the peak, and what that costs."""

from __future__ import annotations

from omegaconf import DictConfig

import agents
from agents.heuristics.layers import feature_maps
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import tensile
from experiments.figures.figure import Figure
from experiments.plotting import palette
from experiments.plotting.charts import Chart
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

PLANNERS = {"vDNN": "vdnn_all", "Capuchin": "capuchin", "TENSILE": "tensile"}
HELD = "TENSILE, held to its limit"
METHODS = (*PLANNERS, HELD)
PAPER = {  # of VGG: MSR, EOR, CBR
    "vDNN": (0.2733, 0.8580, 0.3185), "Capuchin": (0.1003, 0.8971, 0.1118), "TENSILE": (0.2241, 0.0971, 2.3006),
}  # fmt: skip
OF_PAPER = "vgg16_imagenet"
STEPS = 1000  # of the peak, in which TENSILE's least limit is sought


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    batch = cli.integer(settings, "batch", least=1)
    return [{"network": name, "batch": batch} for name in figures.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """Peak and iteration time of each method on one network; None where it has no plan."""
    program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)
    everything = machine.memory_bytes
    lowest = smallest(program, machine)
    found: dict[str, Row | None] = {
        "vDNN": outcome(program, planned("vDNN", program, machine, everything), machine, everything),
        "Capuchin": None,
        "TENSILE": outcome(program, lowest, machine, everything),
        HELD: outcome(program, lowest, machine, lowest.limit if lowest else everything),
    }
    if found["TENSILE"]:
        limit = found["TENSILE"]["peak_bytes"]
        found["Capuchin"] = outcome(program, planned("Capuchin", program, machine, limit), machine, limit)
    return {
        "peak_bytes": program.peak_bytes,
        "ideal_ns": program.ideal_ns,
        "maps": sum(program.tensors[m.tensor].nbytes for m in feature_maps(program, 1)),
        "methods": found,
    }


def outcome(program: Program, plan: Plan | None, machine: Machine, limit: int) -> Row | None:
    """What a plan does when it runs within ``limit`` bytes."""
    if plan is None:
        return None
    timeline = simulate(program, plan, machine, limit)
    kinds: dict[str, int] = {}
    for decision in plan.decisions:
        tensor = program.tensors[decision.tensor]
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + tensor.nbytes
    return {
        "peak_bytes": timeline.peak_bytes, "iteration_ns": timeline.iteration_ns, "decisions": len(plan.decisions),
        "bytes": kinds,
    }  # fmt: skip


def planned(method: str, program: Program, machine: Machine, limit: int) -> Plan | None:
    """A method's plan; None: it has none."""
    options = {"mode": "swap"} if method == "TENSILE" else {}
    return figures.attempt(agents.make(PLANNERS[method], **options), program, machine, limit)


def smallest(program: Program, machine: Machine) -> Plan | None:
    """TENSILE's plan for the smallest limit that it has one for; None: it saves nothing."""
    return tensile.smallest(program.peak_bytes, STEPS, lambda limit: planned("TENSILE", program, machine, limit))


# ------------------------------------------------------------------------------------------ for people


def ratios(row: Row, method: str) -> tensile.Ratios | None:
    """MSR, EOR, CBR; None: no plan."""
    found = row["methods"][method]
    if found is None:
        return None
    return tensile.ratios(found["peak_bytes"], found["iteration_ns"], row["peak_bytes"], row["ideal_ns"])


def paper(row: Row) -> dict[str, tensile.Ratios]:
    """The paper's ratios, by method."""
    return PAPER if row["network"] == OF_PAPER else {}


def lines(row: Row) -> list[Row]:
    """A network's methods."""
    out = []
    for method in METHODS:
        moved = row["methods"][method] and row["methods"][method]["bytes"]
        lasting = moved and sum(moved.get(kind, 0) for kind in ("parameter", "optimizer_state", "buffer"))
        out.append({
            "label": figures.label(row["network"]), "method": method, "found": row["methods"][method],
            "cells": tensile.cells(ratios(row, method), paper(row).get(method)),
            "lasting": moved and lasting / sum(moved.values()),
        })  # fmt: skip
    return out


def numbers(rows: list[Row]) -> Row:
    """Every network and method."""
    return {"lines": [line for row in rows for line in lines(row)]}


def chart(rows: list[Row]) -> Chart:
    """Memory saved and time lost, a row per network."""
    looks = {method: palette.look(PLANNERS.get(method, "tensile")) for method in METHODS}
    return tensile.chart(
        f"What vDNN, Capuchin and TENSILE save and cost: one job, batch size {rows[0]['batch']}, RTX 2080 Ti",
        {figures.label(row["network"]): ({m: ratios(row, m) for m in METHODS}, paper(row)) for row in rows},
        looks,
        [HELD],
    )


FIGURE = Figure("tensile_table1", tasks, run, numbers, chart)
