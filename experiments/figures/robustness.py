"""How plans stand noise: kernel times that vary (jitter) or drift, and a link that a tenant shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

import agents
from agents.heuristics.tensile.controller import control
from agents.jobs import JobsPlanner, Split
from agents.planner import Infeasible
from agents.search.joint_annealing import JointAnnealing
from experiments import figures
from experiments.common import cli, report
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Words, between
from experiments.plotting.palette import FAINT, INK, Look, look
from simulator import simulate
from simulator.jobs import Job, Noise, simulate_jobs
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

ROBUST, CONTROL = "robust", "without_noise"  # searched for noise, and as long without
KINDS = ("jitter", "drift", "tenant")
FAR = 0.005  # of ideal time: from the overhead of the last iteration
THRESHOLD = 0.05  # drift above which a job is planned anew
Floats = NDArray[np.float64]
AXES = {
    "jitter": "jitter: deviation of log time",
    "drift": "drift: kernels change by",
    "tenant": "tenant: takes up to, of the link",
}
OWN = {
    ROBUST: Look("planned for noise", "#222222", "P"),
    CONTROL: Look("the same search without noise", "#9a9a9a", "P"),
}


def tasks(settings: DictConfig) -> list[Row]:
    """One per network, or program/1 file."""
    share = figures.share_of_peak(cli.number(settings, "limit"))
    common = {"limit": share, "planners": cli.plain(settings)["planners"], **settings_of(settings)}
    return [
        {"network": figures.network_or_file(str(name), "networks"), **common}
        for name in cli.values(settings, "networks")
    ]


def run(task: Row, machine: Machine) -> Row:
    """What ``measure`` finds."""
    program = figures.program(task["network"], machine)
    return measure(program, machine, int(task["limit"] * program.peak_bytes), task["planners"], task)


def settings_of(cfg: DictConfig) -> Row:
    """What ``measure`` asks for, checked.

    Raises:
        UsageError: a value is of the wrong kind or out of range.
    """
    out: Row = {
        key: cli.integer(cfg, key, least=least) for key, least in (("iterations", 4), ("seeds", 1), ("robust_calls", 0))
    }
    for kind in (*KINDS, "robust"):
        sizes = cli.values(cfg, kind) if kind != "robust" else [1]
        try:
            for size in sizes:
                Noise(**(cli.plain(cfg.robust) if kind == "robust" else {kind: size}))
        except (TypeError, ValueError) as error:
            raise cli.UsageError(f"{kind}: {error}") from None
        out[kind] = cli.plain(cfg.robust) if kind == "robust" else [float(size) for size in sizes]
    return out


def measure(program: Program, machine: Machine, limit: int, names: Sequence[str], settings: Mapping[str, Any]) -> Row:
    """Overheads under noise, of each planner that has a plan.

    Args:
        settings: as ``settings_of`` returns them.

    Returns:
        ``noise``: of each kind a list with the size and, of each planner, mean and 95th percentile over iterations;
        ``recovery``: of each drift what became of the job, with and without replanning.
    """
    iterations, seeds = settings["iterations"], range(1, settings["seeds"] + 1)
    plans, without = {}, []
    for name in report.tracked(names, "planning with"):
        if (plan := figures.attempt(agents.make(name), program, machine, limit)) is None:
            without.append(name)
        else:
            plans[name] = plan
    if settings["robust_calls"] and plans:
        starts = [Given(plan) for plan in plans.values()]
        for name, noise in ((CONTROL, None), (ROBUST, Noise(**settings["robust"]))):
            search = JointAnnealing(starts, settings["robust_calls"], noise=noise)
            try:
                plans[name] = search.plan_jobs([program], machine, limit)[0]
            except Infeasible:
                without.append(name)
    if not plans:
        raise Infeasible(f"no planner has a plan for {program.name!r} within {limit:,} bytes")

    def row(noise: Noise) -> Row:
        found: Row = {}
        for name, plan in plans.items():
            every = [overheads(program, plan, machine, limit, noise, iterations, seed)[1:] for seed in seeds]
            values = np.concatenate(every)
            found[name] = {"mean": float(values.mean()), "p95": float(np.percentile(values, 95))}
        return found

    noise = {kind: [{"size": size, "planners": row(Noise(**{kind: size}))}
                    for size in report.tracked(settings[kind], f"running under {kind}")] for kind in KINDS}  # fmt: skip
    noise["both"] = [{**settings["robust"], "planners": row(Noise(**settings["robust"]))}]
    recovery = [
        {"size": size, "planners": {name: recovered(program, machine, limit, name, Noise(drift=size), iterations)
                                    for name in plans if name not in (ROBUST, CONTROL)}}
        for size in report.tracked([size for size in settings["drift"] if size], "planning anew after drift")
    ]  # fmt: skip
    return {"program": program.name, "machine": machine.name, "limit_bytes": limit, "without_a_plan": without,
            "noise": noise, "recovery": recovery}  # fmt: skip


class Given:
    """A plan that is there already, as a planner of one job: where a search starts."""

    name, simulator_calls = "given", 0

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """The plan."""
        return (self._plan,)


def overheads(
    program: Program, plan: Plan, machine: Machine, limit: int, noise: Noise, iterations: int, seed: int
) -> Floats:
    """(iterations,) of each: its time over that of its own kernels, less 1."""
    rows = noise.durations(program, iterations, seed)
    job = Job(program.name, program, plan, iterations=iterations, durations=rows)
    tenant = noise.tenants(program, iterations, seed)
    return _overheads(simulate_jobs([job], machine, limit, tenant=tenant).jobs[0].iterations_ns, program, rows)


def recovered(program: Program, machine: Machine, limit: int, name: str, noise: Noise, iterations: int) -> Row:
    """What becomes of a job whose kernels' times drift in the middle, with replanning and without.

    Returns:
        ``new``: overhead of a plan made for the new times; ``kept``, ``replanned``: overhead of the last iteration;
        ``plans``: how many were made after the first; ``iterations`` after the drift that were slower than the last.
    """
    rows, half = noise.durations(program, iterations, 1), iterations // 2
    planner: JobsPlanner = Split(name)
    job = Job(program.name, program, Plan(), iterations=iterations, durations=rows)
    long = 20 * iterations * max(program.ideal_ns, 1)
    check_ns = max(min(map(sum, rows)), 1)
    done = control([job], machine, limit, planner, until_ns=long, check_ns=check_ns, threshold=THRESHOLD)
    later = program.with_durations(rows[-1])
    new = simulate(later, agents.make(name).plan(later, machine, limit), machine, limit).overhead
    kept = overheads(program, done.jobs[0].plan, machine, limit, noise, iterations, 1)
    after = _overheads(done.timeline.jobs[0].iterations_ns, program, rows)[half:]
    slow = np.flatnonzero(after > after[-1] + FAR)
    return {"new": new, "kept": float(kept[-1]), "replanned": float(after[-1]), "plans": len(done.replanned) - 1,
            "iterations": int(slow[-1]) + 1 if slow.size else 0}  # fmt: skip


def _overheads(times: Sequence[int], program: Program, rows: Sequence[Sequence[int]]) -> Floats:
    ideal = np.array([sum(row) for row in rows] if rows else [program.ideal_ns] * len(times), np.float64)
    return np.asarray(times / np.maximum(ideal, 1) - 1)


# ------------------------------------------------------------------------------------------ for people


def style(planner: str) -> Look:
    """A planner's looks, those of the robust plan and of its control too."""
    return OWN.get(planner) or look(planner)


def largest(row: Row) -> dict[str, Row]:
    """The largest noise of each kind, and both together: what each planner makes of it."""
    kinds = {f"{kind} {entry['size']:g}": entry["planners"] for kind in KINDS for entry in row["noise"][kind][-1:]}
    both = row["noise"]["both"][0]
    return {**kinds, " + ".join(f"{kind} {both[kind]:g}" for kind in KINDS if both.get(kind)): both["planners"]}


def numbers(rows: list[Row]) -> Row:
    """Each network and planner; which plans lose least, and what planning anew gains."""
    lines, networks, recovered = [], [], []
    for row in rows:
        both, kinds, label = row["noise"]["both"][0], largest(row), figures.label(row["network"])
        order = sorted(both["planners"], key=lambda name: both["planners"][name]["mean"])
        still = {entry["size"]: entry["planners"] for entry in row["noise"]["jitter"]}.get(0.0, {})
        networks.append({
            "label": label, "both": both, "still": still.get(ROBUST, {}).get("mean"),
            "found": [f"{style(name).label} {both['planners'][name]['mean']:.2%}" for name in order],
        })  # fmt: skip
        again = row["recovery"][0] if row["recovery"] else {"planners": {}}
        for name in both["planners"]:
            cells = [f"{one[name]['mean']:.2%} ({one[name]['p95']:.2%})" for one in kinds.values()]
            if row["recovery"]:
                one = again["planners"].get(name)
                cells.append(
                    "" if one is None else f"{one['kept']:.2%} → {one['replanned']:.2%} in {one['iterations']}"
                )
            lines.append({"network": label, "planner": style(name).label, "cells": cells})
        if row["recovery"]:
            said = [f"{style(name).label} {one['kept']:.1%} → {one['replanned']:.1%} in {one['iterations']} iterations"
                    for name, one in again["planners"].items()]  # fmt: skip
            recovered.append({"label": label, "size": again["size"], "again": said})
    heads = [*largest(rows[-1]), *(f"replanned after drift {one['size']:g}" for one in recovered[-1:])]
    return {"heads": heads, "lines": lines, "networks": networks, "recovered": recovered}


def chart(rows: list[Row]) -> Chart:
    """A row of panels for each network: mean and 95th percentile against each kind of noise, and what replanning does
    after the first drift."""
    panels = []
    for row in rows:
        for i, (kind, label) in enumerate(AXES.items()):
            entries = sorted(row["noise"][kind], key=lambda entry: entry["size"])
            x = [entry["size"] for entry in entries]
            marks: list[Mark] = []
            for name in entries[0]["planners"]:
                text, ink, marker = style(name)
                mean, p95 = ([entry["planners"][name][key] for entry in entries] for key in ("mean", "p95"))
                marks += [Line(x, mean, ink, f"{text}, mean", marker, size=5),
                          Line(x, p95, ink, "dotted: 95th percentile", line=":", width=1.1)]  # fmt: skip
            title = "" if i else f"{figures.label(row['network'])} in {row['limit']:.0%}, {row['machine']}"
            panels.append(Panel(title, marks, Axis(label), Axis("overhead", "%")))
        panels.append(recovery(row))
    return Chart("Overhead of plans under noise", panels, len(AXES) + 1, (3.9, 3.6), keys=4)


def recovery(row: Row) -> Panel:
    """After the first drift: the plan kept, plans made anew, and the plan for the new times."""
    if not row["recovery"]:
        return Panel("", [Words(0.5, 0.5, "no drift")])
    found = row["recovery"][0]["planners"]
    y = range(len(found))
    kept, again, new = ([one[key] for one in found.values()] for key in ("kept", "replanned", "new"))
    texts = [f"{one['iterations']} iterations" for one in found.values()]
    marks = [
        between(new, kept, y, FAINT),
        Line(list(map(max, kept, again, new)), y, INK, line="", texts=texts),
        Line(kept, y, INK, "plan kept", "o", "", size=7),
        Line(again, y, INK, "planned anew, in the end", "o", "", size=7, hollow=True, front=4),
        Line(new, y, INK, "plan for the new times", "|", "", size=11),
    ]
    title = f"After drift {row['recovery'][0]['size']:g}, replanned"
    return Panel(title, marks, Axis("overhead", "%", room=1.35), Axis(names=[style(name).label for name in found]))


FIGURE = Figure("robustness", tasks, run, numbers, chart)
