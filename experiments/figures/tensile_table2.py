"""Table 2 and Figure 6 of the TENSILE paper: several jobs launched at the same time, and mixtures."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.jobs import JobsPlanner, Split, jobs_of
from agents.planner import Infeasible
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import tensile
from experiments.figures.figure import Figure
from experiments.plotting import palette
from experiments.plotting.charts import Chart
from simulator import simulate_jobs
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

PLANNERS = {"vDNN": "vdnn_all", "Capuchin": "capuchin", "TENSILE": "tensile", "AutoSwap": "autoswap_swdoa",
            "LP rounding": "lp_round"}  # fmt: skip
METHODS = tuple(PLANNERS)
PAPER = {  # of VGG x 1, 2, 3: MSR, EOR, CBR
    "vDNN": ((0.2822, 0.8507, 0.3317), (0.2368, 0.9103, 0.2602), (0.2613, 0.9202, 0.2840)),
    "Capuchin": ((0.1003, 0.8921, 0.1124), (0.0056, 0.9208, 0.006), (0.1109, 0.9215, 0.1204)),
    "TENSILE": ((0.2001, 0.0838, 2.5112), (0.2295, 0.1016, 3.2256), (0.2767, 0.2793, 1.0478)),
}
OF_PAPER = "vgg16_imagenet"
STEPS = 200  # of the peak, in which TENSILE's least limit is sought


def tasks(settings: DictConfig) -> list[Row]:
    """One per mixture."""
    batch = cli.integer(settings, "batch", least=1)
    mixtures = cli.values(settings, "jobs")
    for i, names in enumerate(mixtures):
        if not isinstance(names, list) or not names:
            raise cli.UsageError(f"figure.jobs[{i}]: expected a list of workloads, got {names!r}")
    return [{"jobs": [figures.network(str(name), "jobs") for name in names], "batch": batch} for names in mixtures]


def run(task: Row, machine: Machine) -> Row:
    """Peak and makespan of each method; None where it has no plans."""
    known = {name: figures.program(name, machine, batch_size=task["batch"], algorithms=False) for name in task["jobs"]}
    programs = [known[name] for name in task["jobs"]]
    without = [Plan((), program.fingerprint, "none") for program in programs]
    lowest = smallest(programs, machine)
    found = {
        "vDNN": outcome(programs, planned(Split("vdnn_all"), programs, machine, machine.memory_bytes), machine),
        "TENSILE": outcome(programs, lowest, machine),
    }
    limit = found["TENSILE"]["peak_bytes"] if found["TENSILE"] else sum(p.peak_bytes for p in programs)
    for method in ("Capuchin", "AutoSwap", "LP rounding"):
        found[method] = outcome(programs, planned(Split(PLANNERS[method]), programs, machine, limit), machine)
    return {"without": outcome(programs, without, machine), "methods": found}


def outcome(programs: Sequence[Program], plans: Sequence[Plan] | None, machine: Machine) -> Row | None:
    """What jobs do under plans in the GPU's memory."""
    if plans is None:
        return None
    timeline = simulate_jobs(jobs_of(programs, plans), machine, machine.memory_bytes)
    return {
        "peak_bytes": timeline.peak_bytes, "makespan_ns": timeline.end_ns,
        "decisions": [len(plan.decisions) for plan in plans], "evictions": len(timeline.evictions),
        "channel": round((timeline.copies_ns("d2h") + timeline.copies_ns("h2d")) / timeline.end_ns, 4),
    }  # fmt: skip


def planned(planner: JobsPlanner, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...] | None:
    """Plans; None: it has none."""
    try:
        return planner.plan_jobs(programs, machine, limit)
    except Infeasible:
        return None


def smallest(programs: Sequence[Program], machine: Machine) -> tuple[Plan, ...] | None:
    """TENSILE's plans for the smallest limit that it has some for; None: it saves nothing."""
    peak = sum(program.peak_bytes for program in programs)
    return tensile.smallest(peak, STEPS, lambda limit: planned(TENSILE("swap"), programs, machine, limit))


# ------------------------------------------------------------------------------------------ for people


def ratios(row: Row, method: str) -> tensile.Ratios | None:
    """MSR, EOR, CBR; None: no plans."""
    found, without = row["methods"][method], row["without"]
    if found is None:
        return None
    return tensile.ratios(found["peak_bytes"], found["makespan_ns"], without["peak_bytes"], without["makespan_ns"])


def label(row: Row) -> str:
    """The jobs, those of one kind with their number."""
    counts = {name: row["jobs"].count(name) for name in dict.fromkeys(row["jobs"])}
    return ", ".join(
        figures.label(name) + (f" × {n}" if n > 1 or len(counts) == 1 else "") for name, n in counts.items()
    )


def paper(row: Row) -> dict[str, tensile.Ratios]:
    """The paper's ratios, by method."""
    n = len(row["jobs"])
    return {m: values[n - 1] for m, values in PAPER.items()} if set(row["jobs"]) == {OF_PAPER} and n <= 3 else {}


def numbers(rows: list[Row]) -> Row:
    """Every mixture and method, and the order of the cost-benefit ratios."""
    lines, mixtures, ahead = [], [], {"vDNN": [], "Capuchin": []}
    for row in rows:
        found = {method: r for method in METHODS if (r := ratios(row, method)) is not None}
        for method in METHODS:
            one = row["methods"][method]
            lines.append({
                "label": label(row), "method": method, "found": one,
                "cells": tensile.cells(found.get(method), paper(row).get(method)),
                "decisions": one and " + ".join(map(str, one["decisions"])),
            })  # fmt: skip
        for rival, wins in ahead.items():
            wins += [found["TENSILE"][2] > found[rival][2]] if {"TENSILE", rival} <= found.keys() else []
        order = sorted(found, key=lambda method: -found[method][2])
        mixtures.append({"label": label(row), "order": " > ".join(f"{m} ({found[m][2]:.2f})" for m in order),
                         "tensile": row["methods"]["TENSILE"]})  # fmt: skip
    counts = {rival: (sum(wins), len(wins)) for rival, wins in ahead.items()}
    return {"lines": lines, "mixtures": mixtures, "ahead": counts}


def chart(rows: list[Row]) -> Chart:
    """Memory saved and time lost, a row per mixture."""
    return tensile.chart(
        f"Several jobs that share an RTX 2080 Ti, batch size {rows[0]['batch']}",
        {label(row): ({method: ratios(row, method) for method in METHODS}, paper(row)) for row in rows},
        {method: palette.look(key) for method, key in PLANNERS.items()},
    )


FIGURE = Figure("tensile_table2", tasks, run, numbers, chart)
