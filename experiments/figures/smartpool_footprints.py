"""SmartPool's Fig. 10 and 11: footprints by batch size and by method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from omegaconf import DictConfig

import agents
from agents.heuristics.memonger import Stages, recomputations
from agents.heuristics.smartpool_autoswap import SmartPoolAutoSwap
from agents.planner import MIB
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows, span
from experiments.figures.smartpool_loads import ZERO, kept_by_singa
from experiments.plotting.charts import DASHED, DOTTED, Axis, Chart, Line, Mark, Panel, Rule
from experiments.plotting.palette import ALLOCATORS, HUES, INK, SWAPPED, look
from simulator import Machine, Plan, Program, simulate
from simulator.compiled.engine import decisions_of
from simulator.modes import MODES
from simulator.pool import ALLOCATORS as KNOWN, Intervals, program_lifetimes, timeline_lifetimes


class Fig10(Figure):
    """Fig. 10: footprint against batch size, for four allocators."""

    name = "smartpool_fig10"
    pools = ("cudamalloc", "cnmem", "smartpool")  # without a plan

    def tasks(self, settings: DictConfig) -> Rows:
        expected = "numbers of at least 0"
        overheads = figures.numbers(settings, "overheads", lambda value: 0 <= value < float("inf"), expected)
        batches = figures.integers(settings, "batches", 2)
        pool = cli.choice(settings, "pool", tuple(name for name, allocator in KNOWN.items() if not allocator.online))
        seconds = cli.number(settings, "seconds")
        steps = cli.integer(settings, "steps", least=2)
        search = {"overheads": sorted(overheads), "pool": pool, "seconds": seconds, "steps": steps}
        search["evaluations"] = cli.integer(settings, "evaluations", least=4)
        return [{**task, "batch": batch, **search} for task in super().tasks(settings) for batch in batches]

    def run(self, task: Row, machine: Machine) -> Row:
        from experiments import workloads  # only captures need PyTorch

        config = figures.workload(task["network"])
        program = with_batch(config, task["batch"], machine)
        lives = program_lifetimes(program).intervals
        sizes = [tensor.nbytes for tensors in kept_by_singa(workloads.build(config)[0]) for tensor in tensors]
        return {
            "load": program.peak_bytes,
            "ideal_ns": program.ideal_ns,
            "memory": machine.memory_bytes,
            "kept_by_singa": sum(sizes),
            "footprints": {name: footprint(name, lives, machine) for name in self.pools},
            "swapped": smallest_footprints(program, machine, task),
        }

    def template_values(self, rows: Rows) -> Row:
        overheads = rows[0]["overheads"]
        batch = min((row["batch"] for row in rows), key=lambda b: abs(b - 100))
        networks = []
        claims = []
        deviations = []
        for name, lines in by_network(rows).items():
            chosen = next(row for row in lines if row["batch"] == batch)
            cells = [
                f"{entry['footprint'] / MIB:,.0f} ({span(saving(row, i) for row in lines):.0%})"
                for i, entry in enumerate(chosen["swapped"])
            ]
            networks.append({"network": name, "footprints": chosen["footprints"], "cells": cells})
            x, y = np.array([(row["batch"], row["swapped"][-1]["footprint"]) for row in lines], float).T
            deviations.append(np.abs(np.poly1d(np.polyfit(x, y, 1))(x) / y - 1).max() if len(x) > 1 else 0.0)
        for claim in self.published:
            if claim["overhead"] in overheads:
                i = overheads.index(claim["overhead"])
                shares = [saving(row, i) for row in rows]
                kept = span(saving(row, i, row["kept_by_singa"]) for row in rows)
                enough = sum(share >= claim["share"] for share in shares)
                claims.append({**claim, "saved": span(shares), "kept": kept, "enough": enough})
        return {
            "networks": networks,
            "claims": claims,
            "at": batch,
            "most": overheads[-1],
            "off": max(deviations),
            "heads": [f"+AutoSwap {o:.0%}" for o in overheads],
        }

    def chart(self, rows: Rows) -> Chart:
        overheads = rows[0]["overheads"]
        memory = rows[0]["memory"] / 2**30
        panels = []
        for network, lines in by_network(rows).items():
            x = [row["batch"] for row in lines]
            marks: list[Mark] = []
            for i, overhead in enumerate(overheads):
                y = [row["swapped"][i]["footprint"] / 2**30 for row in lines]
                ink = SWAPPED[round(i * (len(SWAPPED) - 1) / max(len(overheads) - 1, 1))]
                marks.append(
                    Line(x, y, ink, marker="o^vs"[i % 4], end=f"+AutoSwap {overhead:.0%}: −{saving(lines[-1], i):.0%}")
                )
            for pool in self.pools:
                name, ink, marker = ALLOCATORS[pool]
                y = [row["footprints"][pool] / 2**30 for row in lines]
                name = name.partition(",")[0]
                dotted = Line(x, y, INK, line=DOTTED, width=1.2, front=4, end=name)  # hides SmartPool
                marks.append(dotted if pool == "cudamalloc" else Line(x, y, ink, marker=marker, width=1.8, end=name))
            top = 1.06 * max(max(m.y) for m in marks if isinstance(m, Line))
            if memory < top:
                marks.append(Rule(memory, horizontal=True, text="the GPU's memory"))
            batches = Axis("batch size", limits=(0, x[-1] * 1.02), ticks=x)
            panels.append(Panel(figures.label(network), marks, batches, Axis("footprint (GiB)", limits=(0, top))))
        note = "+AutoSwap: SmartPool+AutoSwap with at most so much simulated overhead, and\nwhat it saves of "
        note += "CnMem's footprint at the largest batch size. cudaMalloc (dotted) is the peak load."
        saved = span(saving(row, 0) for row in rows)
        title = f"SmartPool+AutoSwap saves {saved:.0%} of CnMem's footprint at {overheads[0]:.0%} overhead"
        return Chart(title, panels, 2, (4.95, 3.4), (0.0, 0.5), note=note)


def with_batch(config: dict[str, Any], batch: int, machine: Machine) -> Program:
    """Returns a workload at another batch size, with its measured time scaled by the roofline."""
    from experiments import workloads

    captured = workloads.load({**config, "batch_size": batch, "iteration_ms": {}}, machine)
    measured = figures.measured_ms(config, machine)
    if measured is None:
        return captured.program
    roofline = captured.program.ideal_ns
    if batch != config["batch_size"]:
        roofline = workloads.load({**config, "iteration_ms": {}}, machine).program.ideal_ns
    return captured.on(machine, iteration_ns=round(measured * 1e6 * captured.program.ideal_ns / roofline)).program


def make_planner(task: Row, score: str = "bo", **options: Any) -> SmartPoolAutoSwap:
    """Returns SmartPool+AutoSwap with the settings of a task."""
    return SmartPoolAutoSwap(score, steps=task["steps"], evaluations=task["evaluations"], **options)


def smallest_footprints(program: Program, machine: Machine, search: Row) -> Rows:
    """Returns the smallest footprint that the planner finds for each overhead."""
    pool = search["pool"]
    seconds = search["seconds"]
    planner = make_planner(search, pool=pool, seconds=seconds)
    rows = []
    plans = planner.smallest(program, machine, [max(overhead, ZERO) for overhead in search["overheads"]])
    for overhead, plan in zip(search["overheads"], plans, strict=True):
        timeline = simulate(program, plan, machine, plan.limit)
        lives = timeline_lifetimes(timeline).intervals
        rows.append(
            {
                "at_most": overhead,
                "overhead": timeline.overhead,
                "load": lives.peak_bytes,
                "swaps": len(plan.decisions),
                "footprint": footprint(pool, lives, machine, seconds),
            }
        )
    return rows


def saving(row: Row, i: int, extra: int = 0) -> float:
    """Returns the fraction of CnMem's footprint saved at the i-th overhead, with ``extra`` bytes added to both."""
    return float(1 - (row["swapped"][i]["footprint"] + extra) / (row["footprints"]["cnmem"] + extra))


def by_network(rows: Rows) -> dict[str, Rows]:
    """Groups rows by network, in order of batch size."""
    return {name: sorted(lines, key=lambda row: row["batch"]) for name, lines in figures.group_by(rows).items()}


POOLS = {  # allocators without and with a plan
    "smartpool+autoswap": ("cnmem", "smartpool"),
    "memonger": ("cudamalloc", "cudamalloc"),
    "superneurons": ("superneurons", "superneurons"),
    "geeps": ("cudamalloc", "cudamalloc"),
}
CONTROLS = ("all", "random")  # weights of AutoSwap in place of Bayesian optimization's: the scores alone, random ones


class Fig11(Figure):
    """Fig. 11: overhead against the reduction of the footprint, four methods."""

    name = "smartpool_fig11"
    markers: ClassVar = {"swap": "o", "recompute": "s", "both": "p"}  # of SuperNeurons' options
    top = 0.8  # maximum overhead in the picture
    same = 0.05  # points of reduction that are not a difference
    close = 0.02  # fraction of overhead within which methods are comparable

    def tasks(self, settings: DictConfig) -> Rows:
        overheads, limits = (
            figures.numbers(settings, key, lambda value, most=most: 0 <= value <= most, f"numbers from 0 to {most:g}")
            for key, most in (("overheads", math.inf), ("geeps", 1.0))
        )
        shared = {"overheads": sorted(overheads), "geeps": sorted(limits, reverse=True)}
        shared |= {key: cli.integer(settings, key, least) for key, least in (("steps", 2), ("evaluations", 4))}
        return [{**task, **shared} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        lives = program_lifetimes(program).intervals
        plans: dict[str, Iterator[tuple[Plan, int]]] = {
            "smartpool+autoswap": autoswap(program, machine, task),
            "memonger": memonger(program, machine),
            "superneurons": superneurons(program, machine),
            "geeps": geeps(program, machine, task["geeps"]),
            **{score: autoswap(program, machine, task, score) for score in CONTROLS},
        }
        bases = {name: footprint(base, lives, machine) for name, (base, _) in POOLS.items()}
        points = {
            name: [
                measure_point(POOLS.get(name, POOLS["smartpool+autoswap"])[1], plan, limit, program, machine)
                for plan, limit in candidates
            ]
            for name, candidates in plans.items()
        }
        caffe = sum(tensor.nbytes for tensor in program.tensors)
        totals = {"load": program.peak_bytes, "memory": machine.memory_bytes, "caffe": caffe}
        return {**totals, "bases": bases, "points": points}

    def template_values(self, rows: Rows) -> Row:
        networks = [fig11_entry(row) for row in rows]
        gap = np.array([difference for net in networks for difference in net["off"]])
        scores, random = (100 * np.array([net["gains"][i] for net in networks]).ravel() for i in range(len(CONTROLS)))
        return {
            "networks": networks,
            "tuned": len(scores),
            "scores": int((scores > self.same).sum()),
            "ahead": int((random > self.same).sum()),
            "behind": int((random < -self.same).sum()),
            "deeper": sum(net["deeper"] for net in networks),
            "dearer": sum(net["dearer"] for net in networks),
            "points": len(gap),
            "close": self.close,
            "worse": int((gap > self.close).sum()),
            "beyond": int(np.isinf(gap).sum()),
            "better": int(((gap < -self.close) & np.isfinite(gap)).sum()),
        }

    def chart(self, rows: Rows) -> Chart:
        panels = []
        for row in rows:
            marks: list[Mark] = []
            for name in POOLS:
                points = reductions(row, name)
                style = look(name)
                if name == "superneurons":
                    ink = HUES["swap and recompute"].slots[0]  # SuperNeurons'
                    for p, (option, marker) in zip(points, self.markers.items(), strict=True):
                        label = f"{style.label}: {option}"
                        marks.append(Line([p[0]], [p[1]], ink, label, marker, "", size=8, hollow=True, front=4))
                    continue
                is_line = name in ("smartpool+autoswap", "geeps")
                points = points[points[:, 0].argsort()]
                marks.append(Line(*points.T, style.color, style.label, style.marker, "-" if is_line else ""))
                if name == "geeps":
                    above = points[points[:, 1] > self.top, 0]
                    label = f"{style.label}, above {self.top:.0%}"
                    marks.append(Line(above, [0.97 * self.top] * len(above), style.color, label, "^", "", size=8))
                    caffe = reductions(row, name, row["caffe"])
                    label = "GeePS, against Caffe, which frees nothing"
                    marks.append(Line(*caffe[caffe[:, 0].argsort()].T, style.color, label, line=DASHED, width=1))
            axes = (
                Axis("reduction of the footprint", "%", (0, 1)),
                Axis(f"overhead (up to {self.top:.0%})", "%", (-0.015, self.top)),
            )
            panels.append(Panel(figures.label(row["network"]), marks, *axes))
        values = self.template_values(rows)
        more = f"over {self.close:.0%} more than SmartPool+AutoSwap"
        title = f"GeePS costs {more} at {values['worse']} of its {values['points']} points"
        return Chart(title, panels, 2, (4.95, 3.2), keys=3)


def footprint(pool: str, lives: Intervals, machine: Machine, seconds: float = 5.0) -> int:
    """Returns the bytes that an allocator reserves; for "cudamalloc" this is the load."""
    return figures.checked_packing(pool, lives, machine.alignment, seconds).footprint


def measure_point(pool: str, plan: Plan, limit: int, program: Program, machine: Machine) -> list[float]:
    """Returns overhead and footprint of a plan under a limit, and the bytes it moves in both directions."""
    timeline = simulate(program, plan, machine, limit)
    moved = [s for s in timeline.spans if s.stream != "compute" and s.start_ns >= timeline.last_start_ns]
    size = footprint(pool, timeline_lifetimes(timeline).intervals, machine)
    return [timeline.overhead, size, sum(program.tensors[s.index].nbytes for s in moved)]


def autoswap(program: Program, machine: Machine, task: Row, score: str = "bo") -> Iterator[tuple[Plan, int]]:
    """Yields SmartPool alone, then with AutoSwap at each overhead."""
    yield Plan(), program.peak_bytes
    plans = make_planner(task, score).smallest(program, machine, [max(o, ZERO) for o in task["overheads"]])
    # Equal swaps under different limits give different timelines.
    yield from ((plan, plan.limit) for plan in {(plan.decisions, plan.limit): plan for plan in plans}.values())


def memonger(program: Program, machine: Machine) -> Iterator[tuple[Plan, int]]:
    """Yields plans of recomputation at the budgets."""
    stages = Stages(program)
    budget = 0
    for _ in range(3):  # as in the planner
        stored, largest, _ = stages.divide(budget)
        budget = math.isqrt(stored * largest)
    for share in (0.25, 0.5, 1.0):
        rows = recomputations(stages.divide(round(share * budget))[2])
        yield Plan(decisions_of(rows)), machine.memory_bytes


def superneurons(program: Program, machine: Machine) -> Iterator[tuple[Plan, int]]:
    """Yields SuperNeurons' fastest plan of each mode in the smallest memory that a setting of it reaches."""
    for mode in MODES:
        planner = agents.make("superneurons", mode=mode)
        limit = figures.least_limit(planner, program, machine, program.peak_bytes // 200)  # to 0.5 %
        yield planner.plan(program, machine, limit), limit


def geeps(program: Program, machine: Machine, shares: list[float]) -> Iterator[tuple[Plan, int]]:
    """Yields a plan for each limit, a fraction of the load, as long as one is found."""
    planner = agents.make("geeps")
    for share in shares:
        limit = int(share * program.peak_bytes)
        if (plan := figures.attempt(planner, program, machine, limit)) is None:
            return
        yield plan, limit


def reductions(row: Row, method: str, base: int | None = None) -> np.ndarray:
    """Returns float64[points, 2]: footprint reduction (relative to no plan, or to ``base`` bytes) and overhead."""
    points = np.array(row["points"][method], dtype=float).reshape(-1, 3)
    base = base or row["bases"]["smartpool+autoswap" if method in CONTROLS else method]
    return np.stack([1 - points[:, 1] / base, points[:, 0]], 1)


def overhead_at(points: np.ndarray, reduction: float) -> float:
    """Returns the least overhead of points that reduce by at least ``reduction``; inf if none does."""
    return float(points[points[:, 0] >= reduction - 1e-9, 1].min(initial=np.inf))


def deepest(points: np.ndarray, overhead: float = ZERO) -> float:
    """Returns the largest reduction within an overhead, at least 0."""
    return float(points[points[:, 1] <= overhead, 0].max(initial=0.0))


def fig11_entry(row: Row) -> Row:
    """Returns a network's reductions and overheads by method."""
    ours, memonger, neurons, geeps = (reductions(row, name) for name in POOLS)
    limits = [max(overhead, ZERO) for overhead in row["overheads"]]
    return {
        "network": row["network"],
        "free": deepest(ours),
        "at_15": deepest(ours, 0.15),
        # Reduction beyond that of each control, at each overhead.
        "gains": [[deepest(ours, o) - deepest(reductions(row, name), o) for o in limits] for name in CONTROLS],
        "most": render(ours[ours[:, 0].argmax()]),
        "memonger": [render(p) for p in memonger[memonger[:, 0].argsort()]],
        "superneurons": [render(p) for p in neurons],
        "geeps_free": deepest(geeps),
        "geeps": render(geeps[geeps[:, 0].argmax()]) if len(geeps) else "–",
        "deeper": neurons[:, 0].max() > memonger[:, 0].max(),
        "dearer": neurons[-1, 1] > memonger[:, 1].max(),
        # Overhead of GeePS minus ours, at each of its points; -inf if ours does not reduce as much.
        "off": [float(overhead) - overhead_at(ours, float(reduction)) for reduction, overhead in geeps],
    }


def render(point: Any) -> str:
    """Formats reduction and overhead of a point."""
    return f"{point[0]:.0%} ({point[1]:.0%})"
