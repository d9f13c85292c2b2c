"""How plans stand noise: kernel times that vary (jitter) or drift, and a link that a tenant shares; and what a plan for
each iteration, made by what is seen of them, is worth (closed_loop.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

import agents
from agents.heuristics.tensile.controller import control
from agents.jobs import JobsPlanner, Split
from agents.planner import Infeasible
from agents.search.joint_annealing import JointAnnealing
from envs.memory_env import small_task
from experiments import figures
from experiments.common import cli, report
from experiments.common.report import Row
from experiments.figures.closed_loop import Replanner, Run, Walker, trained
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Words, between
from experiments.plotting.palette import FAINT, INK, Look, look
from simulator import simulate
from simulator.jobs import Job, Noise, simulate_jobs
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:
    from agents.learned.dqn import Trainer

ROBUST, CONTROL = "robust", "without_noise"  # searched for noise, and as long without
LONG = "robust_longer"  # as long as it takes to plan anew for each iteration of a run, from the robust plan
BLIND, WALK, LINK = "walk_blind", "walk", "walk_link"  # of one plan; sees what kernels took; and the link, too
NEAR_BLIND, NEAR = "walk_robust_blind", "walk_robust"  # by values moved to the robust plan; sees kernels and link
REPLANNED, CLAIRVOYANT = "replanned", "clairvoyant"
LOOPS = (WALK, LINK, NEAR, REPLANNED, CLAIRVOYANT)  # a plan for each iteration
KINDS = ("jitter", "drift", "tenant")
FAR = 0.005  # of ideal time: from the overhead of the last iteration
THRESHOLD = 0.05  # drift above which a job is planned anew
LEAST = {
    "iterations": 4,
    "seeds": 1,
    "robust_calls": 0,
    "longer": 1,
    "episodes": 1,
    "replan_calls": 1,
}  # of what is counted
Floats = NDArray[np.float64]
ALIKE = 0.001  # of ideal time: what is nearer is neither better nor worse
AXES = {
    "jitter": "jitter: deviation of log time",
    "drift": "drift: kernels change by",
    "tenant": "tenant: takes up to, of the link",
}
OWN = {
    ROBUST: Look("planned for noise", "#222222", "P"),
    CONTROL: Look("the same search without noise", "#9a9a9a", "P"),
    LONG: Look("planned for noise, longer", "#b8860b", "P"),
    BLIND: Look("walk, blind", "#f783ac", "s"),
    WALK: Look("walk that sees kernels", "#d6336c", "s"),
    LINK: Look("walk that sees kernels and link", "#8a1253", "s"),
    NEAR_BLIND: Look("walk near the plan for noise, blind", "#d3a0bd", "D"),
    NEAR: Look("walk near the plan for noise, sees both", "#5b5be0", "D"),
    REPLANNED: Look("planned anew for each iteration", "#1f5fa8", "*"),
    CLAIRVOYANT: Look("planned anew, clairvoyant", "#000000", "*"),
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
    out: Row = {key: cli.integer(cfg, key, least=least) for key, least in LEAST.items()}
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
        ``noise``: of each kind a list with the size and, of each planner, mean and 95th percentile over iterations; at
        the largest size of a kind, and of both, that of closed loops, too. ``seconds``: of planning before the run.
        ``each_ms``: of a closed loop's planning, per iteration. ``dead_ends``: of a walk, of so many ``iterations``.
        ``recovery``: after the first drift, what became of the job, with and without replanning.
    """
    small, small_machine = small_task()
    less = {**settings, "robust_calls": min(settings["robust_calls"], 8), "episodes": 1}
    made_by(small, small_machine, small.peak_bytes * 6 // 10, names, less)  # so that compiling is not timed
    made = made_by(program, machine, limit, names, settings)
    if not made.plans:
        raise Infeasible(f"no planner has a plan for {program.name!r} within {limit:,} bytes")
    noise: Row = {kind: [{"size": size, "planners": {}} for size in settings[kind]] for kind in KINDS}
    noise["both"] = [{**settings["robust"], "planners": {}}]
    last, spent = [id(_largest(entries)) for entries in noise.values()], dict[str, list[float]]()
    cases = [(kind, entry) for kind, entries in noise.items() for entry in entries]
    for kind, entry in report.tracked(cases, "running under"):
        what = Noise(**(settings["robust"] if kind == "both" else {kind: entry["size"]}))
        found: dict[str, list[Floats]] = {}
        for seed in range(1, settings["seeds"] + 1):
            for name, plan in made.plans.items():
                every = overheads(program, plan, machine, limit, what, settings["iterations"], seed)
                found.setdefault(name, []).append(every[1:])
            for name, loop in made.loops(settings["replan_calls"], seed).items() if id(entry) in last else ():
                run = Run(program, machine, limit, what, settings["iterations"], seed)
                for _ in range(run.iterations):
                    begin = time.perf_counter()
                    chosen = loop.plan(run)
                    spent.setdefault(name, []).append(time.perf_counter() - begin)
                    run.take(chosen)
                found.setdefault(name, []).append(_overheads(run.simulated().iterations_ns, program, run.rows)[1:])
        for name, values in found.items():
            every = np.concatenate(values)
            entry["planners"][name] = {"mean": float(every.mean()), "p95": float(np.percentile(every, 95))}
    recovery = [
        {"size": size, "planners": {name: recovered(program, machine, limit, name, Noise(drift=size),
                                                    settings["iterations"]) for name in made.plans if name in names}}
        for size in [size for size in settings["drift"] if size][:1]
    ]  # fmt: skip
    return {"program": program.name, "machine": machine.name, "limit_bytes": limit, "ideal_ns": program.ideal_ns,
            "iterations": settings["iterations"],
            "without_a_plan": made.without, "noise": noise, "recovery": recovery, "seconds": made.seconds,
            "each_ms": {name: round(1000 * float(np.mean(one)), 1) for name, one in spent.items()},
            "dead_ends": {name: [walker.dead_ends, len(spent[name])] for name, walker in made.walkers.items()},
            }  # fmt: skip


class Made(NamedTuple):
    """What was made before a run: plans, walkers, and s of planning, by name; and who has no plan."""

    plans: dict[str, Plan]
    walkers: dict[str, Walker]
    seconds: dict[str, float]
    without: list[str]

    def loops(self, calls: int, seed: int) -> dict[str, Walker | Replanner]:
        """The closed loops. calls: of a search for one iteration."""
        every = list(self.plans.values())
        before = [plan for name, plan in self.plans.items() if name != LONG]  # that is made in the same seconds
        anew, knows = Replanner(before, calls, False, seed), Replanner(every, calls, True, seed)
        return {**self.walkers, REPLANNED: anew, CLAIRVOYANT: knows}


def made_by(program: Program, machine: Machine, limit: int, names: Sequence[str], settings: Mapping[str, Any]) -> Made:
    """Plans of planners, robust plan and control that start from them, and walkers."""
    made = Made({}, {}, {}, [])

    def attempt(name: str, make: Callable[[], Plan]) -> None:
        begin = time.perf_counter()
        try:
            made.plans[name] = make()
        except Infeasible:
            made.without.append(name)
        made.seconds[name] = round(time.perf_counter() - begin, 3)

    for name in report.tracked(names, "planning with"):
        attempt(name, lambda name=name: agents.make(name).plan(program, machine, limit))
    if settings["robust_calls"] and made.plans:
        starts = [Given(plan) for plan in made.plans.values()]
        noise, calls = Noise(**settings["robust"]), settings["robust_calls"]
        for name, one, many in ((CONTROL, None, 1), (ROBUST, noise, 1), (LONG, noise, settings["longer"])):
            search = JointAnnealing(starts, many * calls, noise=one)
            attempt(name, lambda search=search: search.plan_jobs([program], machine, limit)[0])

    trainer: list[Trainer] = []

    def blind() -> Plan:
        trainer.append(trained(program, machine, limit, settings["episodes"]))
        made.walkers[WALK], made.walkers[LINK] = (Walker(*trainer, link) for link in (False, True))
        return made.walkers[WALK].blind

    def near() -> Plan:
        made.walkers[NEAR] = Walker(*trainer, True, made.plans[ROBUST])
        return made.walkers[NEAR].blind

    attempt(BLIND, blind)
    if ROBUST in made.plans and BLIND in made.plans:
        attempt(NEAR_BLIND, near)
        made.seconds[NEAR_BLIND] = round(sum(made.seconds[name] for name in (BLIND, ROBUST, NEAR_BLIND)), 3)
    return made


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


def _largest(entries: list[Row]) -> Row:
    """Of one kind of noise."""
    return max(entries, key=lambda entry: abs(entry.get("size", 0.0)))


def largest(row: Row) -> dict[str, Row]:
    """The largest noise of each kind, and both together: what each planner makes of it."""
    entries = {kind: _largest(row["noise"][kind]) for kind in KINDS}
    kinds = {f"{kind} {entry['size']:g}": entry["planners"] for kind, entry in entries.items()}
    both = row["noise"]["both"][0]
    return {**kinds, " + ".join(f"{kind} {both[kind]:g}" for kind in KINDS if both.get(kind)): both["planners"]}


def planning(row: Row, name: str) -> str:
    """How long it took: before the run, and for each iteration."""
    before = row["seconds"].get({WALK: BLIND, LINK: BLIND, NEAR: NEAR_BLIND}.get(name, name))
    parts = [] if before is None else [report.duration(before)]
    if name in row["each_ms"]:
        parts.append(f"{report.duration(row['each_ms'][name] / 1000)} each")
    return " + ".join(parts)


def whole(row: Row) -> Row:
    """s of all planning of a run with a plan for each iteration, and of the longer search for noise; or None."""
    each, before = row["each_ms"].get(REPLANNED), row["seconds"].get(ROBUST)
    known = each is not None and before is not None
    return {"anew_s": before + row["iterations"] * each / 1000 if known else None, "long_s": row["seconds"].get(LONG),
            "run": row["iterations"]}  # fmt: skip


def verdicts(rows: list[Row]) -> list[Row]:
    """What each closed loop gains over its control, and over the best single plan, of all networks and noises."""
    cases = [{name: one["mean"] for name, one in found.items()} for row in rows for found in largest(row).values()]
    best = "the best single plan of the case"
    for case in cases:
        case[best] = min(mean for name, mean in case.items() if name not in LOOPS)
    out = []
    for name, against in ((WALK, BLIND), (LINK, BLIND), (NEAR, NEAR_BLIND), (NEAR, ROBUST), (REPLANNED, ROBUST),
                          (REPLANNED, LONG), (REPLANNED, best), (CLAIRVOYANT, best)):  # fmt: skip
        points = np.array([case[name] - case[against] for case in cases if name in case and against in case])
        if points.size:
            out.append({
                "loop": style(name).label, "against": against if against == best else style(against).label,
                "cases": points.size, "better": int((points < -ALIKE).sum()), "worse": int((points > ALIKE).sum()),
                "least": 100 * points.min(), "median": 100 * float(np.median(points)), "most": 100 * points.max(),
            })  # fmt: skip
    return out


def numbers(rows: list[Row]) -> Row:
    """Each network and planner; which plans lose least, and what planning anew gains."""
    lines, networks, recovered = [], [], []
    for row in rows:
        both, kinds, label = row["noise"]["both"][0], largest(row), figures.label(row["network"])
        order = sorted(both["planners"], key=lambda name: both["planners"][name]["mean"])
        still = {entry["size"]: entry["planners"] for entry in row["noise"]["jitter"]}.get(0.0, {})
        networks.append({
            "label": label, "both": both, "still": still.get(ROBUST, {}).get("mean"), "ideal": row["ideal_ns"],
            "each": row["each_ms"].get(REPLANNED), **whole(row),
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
            lines.append({"network": label, "planner": style(name).label, "planning": planning(row, name),
                          "cells": cells})  # fmt: skip
        if row["recovery"]:
            said = [f"{style(name).label} {one['kept']:.1%} → {one['replanned']:.1%} in {one['iterations']} iterations"
                    for name, one in again["planners"].items()]  # fmt: skip
            recovered.append({"label": label, "size": again["size"], "again": said})
    heads = [*largest(rows[-1]), *(f"replanned after drift {one['size']:g}" for one in recovered[-1:])]
    ends = [entry for row in rows for entry in row["dead_ends"].values()]
    return {"heads": heads, "lines": lines, "networks": networks, "recovered": recovered, "verdicts": verdicts(rows),
            "dead": sum(dead for dead, _ in ends), "walks": sum(walks for _, walks in ends)}  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A row of panels for each network: mean and 95th percentile against each kind of noise, and what replanning does
    after the first drift."""
    panels = []
    for row in rows:
        for i, (kind, label) in enumerate(AXES.items()):
            entries = sorted(row["noise"][kind], key=lambda entry: entry["size"])
            marks: list[Mark] = []
            for name in dict.fromkeys(name for entry in entries for name in entry["planners"]):
                text, ink, marker = style(name)
                there = [entry for entry in entries if name in entry["planners"]]  # closed loops: at the largest size
                x = [entry["size"] for entry in there]
                mean, p95 = ([entry["planners"][name][key] for entry in there] for key in ("mean", "p95"))
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
