"""Predicted time and memory of the committed plans: those of the last run, for the whole link, and those for a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.measure.gpu.plan_files import AIMS, plan_file
from experiments.measure.networks import limit_of
from simulator import Machine, Plan, Program, simulate
from simulator.pool import ITERATIONS
from simulator.pool.intervals import timeline_lifetimes
from simulator.pool.online import caching
from simulator.pool.packed import packed_bytes

LINKS = (1.0, 0.9, 0.8)


def row(program: Program, plan: Plan, machine: Machine, limit: int) -> dict[str, Any]:
    """Returns a plan's ms at each speed of the link, and its bytes over the limit.

    ``packed`` is as a CUDA graph, ``default`` and ``expandable`` are what PyTorch's allocator reserves by kernels.
    """
    timeline = simulate(program, plan, machine, plan.limit or limit)
    blocks, _ = timeline_lifetimes(timeline).intervals.unrolled(ITERATIONS)
    found: dict[str, Any] = {}
    for link in LINKS:
        ns = simulate(program, plan, machine.with_link(link), plan.limit or limit).iteration_ns
        found[f"ms at {link:.0%}"] = round(ns / 1e6, 2)
    for kind, nbytes in (
        ("packed", packed_bytes(timeline, limit, machine.alignment)),
        ("default", caching.serve(blocks)[0]),
        ("expandable", caching.serve(blocks, expandable=True)[0]),
    ):
        found[kind] = round(nbytes / limit, 3)
    return found


def load_rows(folder: Path, machine: Machine, fraction: float, networks: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the rows of traced networks.

    Args:
        folder: folder with ``traces`` and ``plans``.
        machine: machine of the traces.
        fraction: limit in the names of the plans.
        networks: name of a traced network -> name of its plans.
    """
    found = []
    for traced, name in networks.items():
        program = Program.load(folder / "traces" / f"{traced}-program.json.gz")
        limit = limit_of(program, fraction)
        plans = {"before": folder / "traces" / f"{traced}-{fraction}-kernels-plan.json"}
        plans["after"] = plan_file(folder / "plans", name, fraction, "kernels", 0)
        last = len(AIMS["graph"]) - 1
        plans[f"after, for {AIMS['graph'][last]:.0%}"] = plan_file(folder / "plans", name, fraction, "graph", last)
        for label, path in plans.items():
            found.append({"workload": name, "plan": label, **row(program, Plan.load(path), machine, limit)})
    return found
