"""TENSILE's Tables 1 and 2, and the accuracy of its kernel-time predictions (section 4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeVar

import numpy as np
from omegaconf import DictConfig

import agents
from agents.heuristics.layers import feature_maps
from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.times import KernelTimes, Sample, r_squared
from agents.jobs import JobsPlanner, Split, jobs_of
from agents.planner import Infeasible
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.plotting import palette
from experiments.plotting.charts import DASHED, DOTTED, Axis, Bars, Chart, Line, Mark, Panel, Rule, groups
from experiments.plotting.palette import INK
from simulator import simulate_jobs
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

Ratios = tuple[float, float, float]  # MSR, EOR, CBR
MOST = 5.0  # maximum cost-benefit ratio in the picture
PANELS = (
    ("Memory saved (MSR)", "of the peak without a plan", "%", 1.0),
    ("Time lost (EOR)", "of the time without a plan", "%", 1.0),
    ("Cost-benefit ratio (CBR)", f"MSR / EOR, up to {MOST:g}", "{:g}", MOST),
)
OF_PAPER = "vgg16_imagenet"
PLANNERS = {
    "vDNN": "vdnn_all", "Capuchin": "capuchin", "TENSILE": "tensile", "AutoSwap": "autoswap_swdoa",
    "LP rounding": "lp_round",
}  # fmt: skip
HELD = "TENSILE, held to its limit"
LASTING = ("parameter", "optimizer_state", "buffer")
HATCHES = {"Capuchin": "///", "AutoSwap": "\\\\\\", "LP rounding": "xxx"}
Plans = TypeVar("Plans")


class _Ratios(Figure):
    """Table of three ratios by method, the paper's and ours.

    Attributes:
        planners: Planners of ``agents``, by method.
        time: Key of the time in a method's result, and in ``without``.
    """

    planners: Mapping[str, str] = {}
    time = ""

    def without(self, row: Row) -> tuple[int, int]:
        """Returns peak and time without a plan."""
        raise NotImplementedError

    def paper(self, row: Row) -> Mapping[str, Ratios]:
        """Returns the paper's ratios, by method."""
        raise NotImplementedError

    def label(self, row: Row) -> str:
        """Returns the networks of a row."""
        return figures.label(row["network"])

    def ratios(self, row: Row, method: str) -> Ratios | None:
        """Returns MSR, EOR and CBR (infinite if no time is lost) of a method, or None without a plan."""
        if (found := row["methods"][method]) is None:
            return None
        without_bytes, without_ns = self.without(row)
        msr, eor = 1 - found["peak_bytes"] / without_bytes, found[self.time] / without_ns - 1
        return msr, eor, msr / eor if eor else float("inf")

    def lines(self, rows: list[Row]) -> list[Row]:
        """Returns the table's lines: the paper's ratios, if it has some, and ours."""
        found = []
        for row in rows:
            theirs, ours = self.paper(row), {method: self.ratios(row, method) for method in self.planners}
            for label, ratios in ((f"{self.label(row)}, paper", theirs), (self.label(row), ours)):
                cells = [cell(ratios[method]) if method in ratios else "–" for method in self.planners]
                found += [{"label": label, "cells": cells}] if ratios else []
        return found

    def panels(self, title: str, rows: list[Row]) -> Chart:
        """Makes a panel each of memory saved, time lost and their ratio; the paper's values are diamonds."""
        panels, high = [], 0.72 / len(self.planners)
        for i, (name, axis, form, most) in enumerate(PANELS):
            marks: list[Mark] = []
            for m, (method, planner) in enumerate(self.planners.items()):
                at = [y + (m - (len(self.planners) - 1) / 2) * high for y in range(len(rows))]
                ours = [(one := self.ratios(row, method)) and one[i] for row in rows]
                theirs = [paper[method][i] if method in paper else None for paper in map(self.paper, rows)]
                texts = ["" if a is None else number(a, form) for a in ours]
                papers = ["" if a is None else f" (◇ {number(a, form)})" for a in theirs]
                ours = [a if a is None or form == "%" else min(a, most) for a in ours]
                ends = [a if a is None else max(a, b or 0.0) for a, b in zip(ours, theirs, strict=True)]
                colour, hollow, hatch = palette.colour(planner), method == HELD, HATCHES.get(method, "")
                marks.append(Bars(at, ours, colour, f"{method}, ours", 0.9 * high, hollow=hollow, hatch=hatch))
                marks.append(Line(ends, at, INK, line="", texts=[a + b for a, b in zip(texts, papers, strict=True)]))
                if any(value is not None for value in theirs):
                    marks.append(Line(theirs, at, INK, "the paper's", "D", "", size=6, hollow=True, front=5))
            limits = (0, None) if form == "%" else (0, 1.25 * MOST)
            names = Axis(names=[self.label(row) for row in rows])
            panels.append(Panel(name, marks, Axis(axis, form, limits, room=1.35), names))
        return Chart(title, panels, 3, (5.2, 0.6 + 0.95 * len(rows)))


def cell(ratios: Ratios | None) -> str:
    """Returns MSR and EOR in per cent, and CBR."""
    if ratios is None:
        return "no plan"
    saved, lost, benefit = ratios
    return f"{100 * saved:.1f}/{100 * lost:.1f}/{number(benefit, '')}"


def number(value: float, form: str) -> str:
    """Returns a ratio as the text of a bar."""
    if form == "%":
        return f"{value:.1%}"
    return "∞" if value == float("inf") else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def smallest(peak: int, steps: int, plan: Callable[[int], Plans | None]) -> Plans | None:
    """Returns ``plan`` of the smallest feasible limit, in ``steps`` of the peak; None if it saves nothing."""
    plans: dict[int, Plans | None] = {}

    def fits(saved: int) -> bool:
        plans[saved] = plan(peak * (steps - saved) // steps)
        return plans[saved] is not None

    return plans.get(largest(fits, steps // 10, steps - 1))


class Table1(_Ratios):
    """Table 1: peak reduction of vDNN, Capuchin and TENSILE, and its cost."""

    name = "tensile_table1"
    planners: Mapping[str, str] = {**dict(list(PLANNERS.items())[:3]), HELD: "tensile"}
    time = "iteration_ns"

    def tasks(self, settings: DictConfig) -> list[Row]:
        batch = cli.integer(settings, "batch", least=1)
        return [{**task, "batch": batch} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)

        def planned(method: str, limit: int) -> Plan | None:
            options = {"mode": "swap"} if method == "TENSILE" else {}
            return figures.attempt(agents.make(PLANNERS[method], **options), program, machine, limit)

        everything = machine.memory_bytes
        lowest = smallest(program.peak_bytes, 1000, lambda limit: planned("TENSILE", limit))
        found: dict[str, Row | None] = {
            "vDNN": table1_outcome(program, planned("vDNN", everything), machine, everything),
            "Capuchin": None,
            "TENSILE": table1_outcome(program, lowest, machine, everything),
            HELD: table1_outcome(program, lowest, machine, lowest.limit if lowest else everything),
        }
        if found["TENSILE"]:
            limit = found["TENSILE"]["peak_bytes"]
            found["Capuchin"] = table1_outcome(program, planned("Capuchin", limit), machine, limit)
        maps = sum(program.tensors[m.tensor].nbytes for m in feature_maps(program, 1))
        return {"peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns, "maps": maps, "methods": found}

    def without(self, row: Row) -> tuple[int, int]:
        return row["peak_bytes"], row["ideal_ns"]

    def paper(self, row: Row) -> Mapping[str, Ratios]:
        theirs = ((0.2733, 0.8580, 0.3185), (0.1003, 0.8971, 0.1118), (0.2241, 0.0971, 2.3006))
        return dict(zip(PLANNERS, theirs, strict=False)) if row["network"] == OF_PAPER else {}

    def numbers(self, rows: list[Row]) -> Row:
        moved = [found["bytes"] for row in rows if (found := row["methods"]["TENSILE"])]
        lasting = [sum(one.get(kind, 0) for kind in LASTING) / sum(one.values()) for one in moved if one]
        return {"lines": self.lines(rows), "heads": list(self.planners), "lasting": span(lasting)}

    def chart(self, rows: list[Row]) -> Chart:
        batch = rows[0]["batch"]
        title = f"What vDNN, Capuchin and TENSILE save and cost: one job, batch size {batch}, RTX 2080 Ti"
        return self.panels(title, rows)


def table1_outcome(program: Program, plan: Plan | None, machine: Machine, limit: int) -> Row | None:
    """Simulates a plan within ``limit`` bytes."""
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


TABLE2_PAPER = {  # VGG x 1, 2, 3: MSR, EOR, CBR
    "vDNN": ((0.2822, 0.8507, 0.3317), (0.2368, 0.9103, 0.2602), (0.2613, 0.9202, 0.2840)),
    "Capuchin": ((0.1003, 0.8921, 0.1124), (0.0056, 0.9208, 0.006), (0.1109, 0.9215, 0.1204)),
    "TENSILE": ((0.2001, 0.0838, 2.5112), (0.2295, 0.1016, 3.2256), (0.2767, 0.2793, 1.0478)),
}


class Table2(_Ratios):
    """Table 2 and Figure 6: several jobs launched at the same time, and mixtures."""

    name = "tensile_table2"
    planners = PLANNERS
    time = "makespan_ns"

    def tasks(self, settings: DictConfig) -> list[Row]:
        batch = cli.integer(settings, "batch", least=1)
        mixtures = cli.values(settings, "jobs")
        for i, names in enumerate(mixtures):
            if not isinstance(names, list) or not names:
                raise cli.UsageError(f"figure.jobs[{i}]: expected a list of workloads, got {names!r}")
        return [{"jobs": [figures.network(str(name), "jobs") for name in names], "batch": batch} for names in mixtures]

    def run(self, task: Row, machine: Machine) -> Row:
        batch, memory = task["batch"], machine.memory_bytes
        known = {n: figures.program(n, machine, batch_size=batch, algorithms=False) for n in task["jobs"]}
        programs = [known[name] for name in task["jobs"]]

        def planned(planner: JobsPlanner, limit: int) -> tuple[Plan, ...] | None:
            try:
                return planner.plan_jobs(programs, machine, limit)
            except Infeasible:
                return None

        peak = sum(program.peak_bytes for program in programs)
        lowest = smallest(peak, 200, lambda limit: planned(TENSILE("swap"), limit))
        found = {
            "vDNN": table2_outcome(programs, planned(Split("vdnn_all"), memory), machine),
            "TENSILE": table2_outcome(programs, lowest, machine),
        }
        limit = found["TENSILE"]["peak_bytes"] if found["TENSILE"] else peak
        for method in ("Capuchin", "AutoSwap", "LP rounding"):
            found[method] = table2_outcome(programs, planned(Split(PLANNERS[method]), limit), machine)
        without = [Plan((), program.fingerprint, "none") for program in programs]
        return {"without": table2_outcome(programs, without, machine), "methods": found}

    def without(self, row: Row) -> tuple[int, int]:
        return row["without"]["peak_bytes"], row["without"]["makespan_ns"]

    def paper(self, row: Row) -> Mapping[str, Ratios]:
        jobs = len(row["jobs"])
        of_paper = set(row["jobs"]) == {OF_PAPER} and jobs <= 3
        return {method: values[jobs - 1] for method, values in TABLE2_PAPER.items()} if of_paper else {}

    def label(self, row: Row) -> str:
        counts = Counter(row["jobs"])
        several = [figures.label(name) + f" × {n}" * (n > 1 or len(counts) == 1) for name, n in counts.items()]
        return ", ".join(several)

    def numbers(self, rows: list[Row]) -> Row:
        ahead: dict[str, list[bool]] = {"vDNN": [], "Capuchin": []}
        for row in rows:
            found = {method: r[2] for method in PLANNERS if (r := self.ratios(row, method)) is not None}
            for rival, wins in ahead.items():
                wins += [found["TENSILE"] > found[rival]] if {"TENSILE", rival} <= found.keys() else []
        counts = {rival: (sum(wins), len(wins)) for rival, wins in ahead.items()}
        return {"lines": self.lines(rows), "heads": list(self.planners), "ahead": counts}

    def chart(self, rows: list[Row]) -> Chart:
        return self.panels(f"Several jobs that share an RTX 2080 Ti, batch size {rows[0]['batch']}", rows)


def table2_outcome(programs: Sequence[Program], plans: Sequence[Plan] | None, machine: Machine) -> Row | None:
    """Simulates jobs under their plans in the GPU's memory."""
    if plans is None:
        return None
    timeline = simulate_jobs(jobs_of(programs, plans), machine, machine.memory_bytes)
    return {
        "peak_bytes": timeline.peak_bytes, "makespan_ns": timeline.end_ns,
        "decisions": [len(plan.decisions) for plan in plans], "evictions": len(timeline.evictions),
        "channel": round((timeline.copies_ns("d2h") + timeline.copies_ns("h2d")) / timeline.end_ns, 4),
    }  # fmt: skip


TIMES_PAPER = {"all": 0.582, "expensive": 0.805}
NAMES = {"all": "all kernels", "expensive": "convolutions, products"}
EXPENSIVE = ("conv", "matmul")
SOURCES = ("model", "measured")
LEAST = -0.02  # minimum R² in the picture


class Times(Figure):
    """Section 4.3: accuracy of a small neural network that predicts the times of unmeasured kernels."""

    name = "tensile_times"
    alone = True
    simulated = False

    def tasks(self, settings: DictConfig) -> list[Row]:
        batch, repeats = cli.integer(settings, "batch", least=1), cli.integer(settings, "repeats", least=1)
        names, sources = figures.networks(settings), cli.values(settings, "sources")
        if not sources or not set(sources) <= set(SOURCES):
            raise cli.UsageError(f"figure.sources: expected some of {', '.join(SOURCES)}, got {sources!r}")
        if len(names) < 2:
            raise cli.UsageError("figure.networks: expected at least two, one of them for training")
        return [{"source": source, "networks": names, "batch": batch, "repeats": repeats} for source in sources]

    def run(self, task: Row, machine: Machine) -> Row:
        known: dict[str, Program] = {}
        device = machine.name
        for name in task["networks"]:
            known[name], device = timed(name, task, machine)
        samples = {name: Sample(p, 1, np.array([k.duration_ns for k in p.kernels])) for name, p in known.items()}
        held: dict[str, Row] = {}
        for name, program in known.items():
            learned = KernelTimes.fit([sample for other, sample in samples.items() if other != name])
            found, true = learned.predict(program, 1), samples[name].times
            of = np.array([kernel.kind in EXPENSIVE for kernel in program.kernels])
            scores = {"all": r_squared(found, true), "expensive": r_squared(found[of], true[of])}
            held[name] = {"kernels": len(true), **scores, "iteration": float(found.sum() / true.sum())}
        return {"device": device, "held": held}

    def numbers(self, rows: list[Row]) -> Row:
        sources = []
        for row in rows:
            held = {figures.label(name): one for name, one in row["held"].items()}
            low, high = (of(held, key=lambda name: held[name]["all"]) for of in (min, max))
            sources.append(
                {**row, "worst": held[low]["all"], "worst_of": low, "best": held[high]["all"], "best_of": high}
            )
        heads = [f"{row['source']}, {name}" for row in rows for name in NAMES.values()]
        lines = []
        for name in rows[0]["networks"]:
            cells = [f"{row['held'][name][key]:.3f}" for row in rows for key in TIMES_PAPER]
            cells += [f"{row['held'][name]['iteration']:.2f}" for row in rows]
            lines.append({"label": figures.label(name), "cells": cells})
        return {
            "heads": [*heads, *(f"{row['source']}, iteration" for row in rows)], "sources": sources, "networks": lines,
            "middle": [f"{paper:.3f} / {median(one[key] for one in row['held'].values()):.3f}"
                       for row in rows for key, paper in TIMES_PAPER.items()],
            "blank": ["" for _ in rows],
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        inks, panels = {"all": "#9a9a9a", "expensive": "#b3123d"}, []
        for row in rows:
            names = [figures.label(name) for name in row["networks"]]
            series = []
            for key, ink in inks.items():
                found = [row["held"][name][key] for name in row["networks"]]
                below = [f"{value:.2f}, below the axis" if value < LEAST else "" for value in found]
                series.append((NAMES[key], ink, [max(value, LEAST) for value in found], below))
            marks: list[Mark] = []
            for bars, (key, ink), hatch in zip(groups(series, across=True), inks.items(), ("", "///"), strict=True):
                rule = f"the paper's mean, {NAMES[key]}"
                marks += [replace(bars, hatch=hatch), Rule(TIMES_PAPER[key], colour=ink, label=rule, width=1.4,
                                                           line=DOTTED if hatch else DASHED)]  # fmt: skip
            where = Axis("R² on the network held out", "{:.1f}", (-0.03, 1.0))
            panels.append(Panel(f"{row['source']}: {row['device']}", marks, where, Axis(names=names)))
        return Chart("Kernel times predicted, on networks that were not learned from", panels, 2, (5.7, 4.6), keys=2)


def timed(name: str, task: Row, machine: Machine) -> tuple[Program, str]:
    """Returns a network's program with the source's times, and the device they are for."""
    if task["source"] == "model":
        return figures.program(name, machine, batch_size=task["batch"], iteration_ms=None), machine.name
    from executor.capture.profile import measure, with_profile  # PyTorch
    from experiments import workloads

    captured = workloads.load({**figures.workload(name), "batch_size": task["batch"]}, machine)
    profile = measure(captured, "cpu", repeats=task["repeats"], cache="hot")
    return with_profile(captured.program, profile), profile.device
