"""TENSILE's Tables 1 and 2 and its swapping ratio (section 4.1): memory saved, time lost, and their ratio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

from omegaconf import DictConfig

import agents
from agents.heuristics.layers import feature_maps
from agents.heuristics.tensile import TENSILE
from agents.jobs import JobsPlanner, Split, jobs_of
from agents.planner import Infeasible
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import published
from experiments.figures.figure import Figure, Rows, span
from experiments.figures.smartpool_loads import ZERO
from experiments.plotting import palette
from experiments.plotting.charts import Axis, Bars, Chart, Line, Mark, Panel
from experiments.plotting.palette import INK
from simulator import simulate_jobs
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

Ratios = tuple[float, float, float]  # MSR, EOR, CBR
PANELS = (
    ("Memory saved (MSR)", "of the peak without a plan", "%"),
    ("Time lost (EOR)", "of the time without a plan", "%"),
    ("Cost-benefit ratio (CBR)", "MSR / EOR", "{:g}"),
)
PLANNERS = {
    "vDNN": "vdnn_all",
    "Capuchin": "capuchin",
    "TENSILE": "tensile",
    "AutoSwap": "autoswap_swdoa",
    "LP rounding": "lp_round",
}
HELD = "TENSILE, held to its limit"
CAPUCHIN_HELD = "Capuchin, held to its limit"
Plans = TypeVar("Plans")


class _Ratios(Figure):
    """Table of three ratios by method, the paper's and ours."""

    planners: Mapping[str, str] = PLANNERS
    duels: ClassVar[Mapping[str, tuple[str, str]]] = {
        "vDNN": ("TENSILE", "vDNN"),
        "Capuchin": ("TENSILE", "Capuchin"),
    }
    most = 5.0  # maximum cost-benefit ratio in the picture
    hatches: ClassVar = {"Capuchin": "///", "AutoSwap": "\\\\\\", "LP rounding": "xxx"}

    def template_values(self, rows: Rows) -> Row:
        lines = []
        for row in rows:
            for method in self.planners:
                theirs = cells(paper(row).get(method), "")
                ours = cells(ratios(row["methods"][method], row.get("without", row)), "no plan")
                pairs = [text for pair in zip(theirs, ours, strict=True) for text in pair]
                lines.append({"label": f"{jobs_label(row)}, {method}", "cells": pairs})
        duels = {}
        times = [
            [outcome["iteration_ns"] for method in ("TENSILE", "Capuchin") if (outcome := row["methods"][method])]
            if "ideal_ns" in row
            else []
            for row in rows
        ]
        for rival, methods in self.duels.items():
            pairs = [[ratios(row["methods"][method], row.get("without", row)) for method in methods] for row in rows]
            benefits = [(ours[2], theirs[2]) for ours, theirs in pairs if ours and theirs]
            ahead, behind = (sum(sign * a > sign * b for a, b in benefits) for sign in (1, -1))
            duels[rival] = {"ahead": ahead, "behind": behind, "count": len(benefits)}
        saved = [ratios(row["methods"]["TENSILE"], row.get("without", row)) for row in rows if paper(row)]
        return {
            "lines": lines,
            "duels": duels,
            "free": sum(
                max(values) <= row.get("ideal_ns", 0) for values, row in zip(times, rows, strict=True) if values
            ),
            "saved": span(values and values[0] for values in saved),
            "saved_paper": span(paper(row)["TENSILE"][0] for row in rows if paper(row)),
        }

    def panels(self, title: str, rows: Rows) -> Chart:
        """Makes a panel each of memory saved, time lost and their ratio; the paper's values are diamonds."""
        panels = []
        high = 0.8 / len(self.planners)
        for i, (name, axis, form) in enumerate(PANELS):
            marks: list[Mark] = []
            most = self.most
            x = Axis(f"{axis}, cut at {most:g}", form, (0, 1.3 * most), ticks=range(int(most) + 1))
            pairs = {
                method: [
                    (values and values[i], paper(row).get(method, [None] * 3)[i])
                    for row in rows
                    for values in [ratios(row["methods"][method], row.get("without", row))]
                ]
                for method in self.planners
            }
            if form == "%":
                most = max(value or 0.0 for lines in pairs.values() for pair in lines for value in pair)
                x = Axis(axis, form, (0, None), room=1.2)
            for m, (method, planner) in enumerate(self.planners.items()):
                ys = [y + (m - (len(self.planners) - 1) / 2) * high for y in range(len(rows))]
                ours, theirs = zip(*pairs[method], strict=True)
                cut = [a if a is None else min(a, most) for a in ours]
                texts = ["" if a is None else number(a, form) + " →" * (a > most) for a in ours]
                papers = ["" if a is None else number(a, form) for a in theirs]
                ends = []
                for n, (a, b) in enumerate(zip(cut, theirs, strict=True)):
                    is_near = b is not None and b < (a or 0.0) + 0.12 * most  # one text for bar and marker
                    ends.append(max(a or 0.0, b) if is_near else a)
                    if is_near:
                        texts[n] += f" (◇ {papers[n]})"
                        papers[n] = ""
                color = palette.color(planner)
                hollow = method in (HELD, CAPUCHIN_HELD)
                hatch = self.hatches.get(method, "")
                marks.append(Bars(ys, cut, color, f"{method}, ours", 0.9 * high, hollow=hollow, hatch=hatch))
                marks.append(Line(ends, ys, line="", texts=texts))
                if any(value is not None for value in theirs):
                    diamonds = Line(theirs, ys, INK, "the paper's", "D", "", size=6, hollow=True, front=5, texts=papers)
                    marks.append(diamonds)
            panels.append(Panel(name, marks, x, Axis(names=[jobs_label(row) for row in rows])))
        return Chart(title, panels, 1, (9.9, 0.4 + len(rows) * (0.1 + 0.18 * len(self.planners))))


def paper(row: Row) -> Mapping[str, Ratios]:
    """Returns the paper's ratios, by method."""
    if "network" in row:
        return published("tensile_table1").get(row["network"], {})
    return published("tensile_table2").get(" ".join(row["jobs"]), {})


def jobs_label(row: Row) -> str:
    """Returns the display name of a row's network or jobs."""
    if "network" in row:
        return figures.label(row["network"])
    counts = Counter(row["jobs"])
    texts = [figures.label(name) + f" × {n}" * (n > 1 or len(counts) == 1) for name, n in counts.items()]
    return ", ".join(texts)


def ratios(result: Row | None, without: Row) -> Ratios | None:
    """Returns MSR, EOR and CBR (infinite if no time is lost) of an outcome, or None without a plan."""
    if result is None:
        return None
    times = ("makespan_ns", "iteration_ns", "ideal_ns")  # of several jobs, of one, and of one without a plan
    ns, without_ns = (next(values[key] for key in times if key in values) for values in (result, without))
    msr = 1 - result["peak_bytes"] / without["peak_bytes"]
    eor = ns / without_ns - 1
    return msr, eor, msr / eor if eor else float("inf")


def cells(ratios: Ratios | None, missing: str) -> list[str]:
    """Returns the texts of MSR, EOR and CBR, or ``missing`` and two empty texts."""
    if ratios is None:
        return [missing, "", ""]
    return [number(value, form) for value, form in zip(ratios, ("%", "%", ""), strict=True)]


def number(value: float, form: str) -> str:
    """Returns a ratio as the text of a bar."""
    if form == "%":
        return f"{value:.1%}"
    return "∞" if value == float("inf") else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def smallest_plans(peak: int, steps: int, plan: Callable[[int], Plans | None]) -> Plans | None:
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

    def tasks(self, settings: DictConfig) -> Rows:
        batch = cli.integer(settings, "batch", least=1)
        return [{**task, "batch": batch} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)

        def planned(method: str, limit: int) -> Plan | None:
            options = {"mode": "swap"} if method == "TENSILE" else {}
            return figures.attempt(agents.make(PLANNERS[method], **options), program, machine, limit)

        memory = machine.memory_bytes
        lowest = smallest_plans(program.peak_bytes, 1000, lambda limit: planned("TENSILE", limit))
        results: dict[str, Row | None] = {
            "vDNN": table1_outcome(program, planned("vDNN", memory), machine, memory),
            "Capuchin": None,
            "TENSILE": table1_outcome(program, lowest, machine, memory),
            HELD: table1_outcome(program, lowest, machine, lowest.limit if lowest else memory),
        }
        if results["TENSILE"]:
            limit = results["TENSILE"]["peak_bytes"]
            results["Capuchin"] = table1_outcome(program, planned("Capuchin", limit), machine, limit)
        maps = sum(program.tensors[m.tensor].nbytes for m in feature_maps(program, 1))
        return {"peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns, "maps": maps, "methods": results}

    def chart(self, rows: Rows) -> Chart:
        values = self.template_values(rows)
        title = f"TENSILE: no time lost in {values['free']} of {len(rows)} networks"
        if names := ", ".join(jobs_label(row) for row in rows if paper(row)):
            title += f", {values['saved']:.1%} of {names} saved (paper: {values['saved_paper']:.1%})"
        return self.panels(title, rows)


def table1_outcome(program: Program, plan: Plan | None, machine: Machine, limit: int) -> Row | None:
    """Simulates a plan within ``limit`` bytes."""
    if plan is None:
        return None
    timeline = simulate(program, plan, machine, limit)
    kinds: Counter[str] = Counter()
    for decision in plan.decisions:
        kinds[program.tensors[decision.tensor].kind] += program.tensors[decision.tensor].nbytes
    return {
        "peak_bytes": timeline.peak_bytes,
        "iteration_ns": timeline.iteration_ns,
        "decisions": len(plan.decisions),
        "bytes": kinds,
    }


class Table2(_Ratios):
    """Table 2 and Figure 6: several jobs launched at the same time, and mixtures."""

    name = "tensile_table2"
    planners: Mapping[str, str] = {**PLANNERS, HELD: "tensile", CAPUCHIN_HELD: "capuchin"}
    duels: ClassVar[Mapping[str, tuple[str, str]]] = {
        **_Ratios.duels,
        "Capuchin, both held to their limits": (HELD, CAPUCHIN_HELD),
    }

    def tasks(self, settings: DictConfig) -> Rows:
        batch = cli.integer(settings, "batch", least=1)
        mixtures = cli.values(settings, "jobs")
        for i, names in enumerate(mixtures):
            if not isinstance(names, list) or not names:
                raise cli.UsageError(f"figure.jobs[{i}]: expected a list of workloads, got {names!r}")
        return [{"jobs": [figures.network(str(name), "jobs") for name in names], "batch": batch} for names in mixtures]

    def run(self, task: Row, machine: Machine) -> Row:
        batch = task["batch"]
        memory = machine.memory_bytes
        by_name = {n: figures.program(n, machine, batch_size=batch, algorithms=False) for n in task["jobs"]}
        programs = [by_name[name] for name in task["jobs"]]
        planned = partial(plan_all, programs, machine)
        tightest = tightest_plans(TENSILE("swap"), programs, machine)
        results = {
            "vDNN": table2_outcome(programs, planned(Split("vdnn_all"), memory), machine),
            "TENSILE": table2_outcome(programs, tightest, machine),
            HELD: table2_outcome(programs, tightest, machine, is_held=True),
        }
        limit = results["TENSILE"]["peak_bytes"] if results["TENSILE"] else sum(p.peak_bytes for p in programs)
        for method in ("Capuchin", "AutoSwap", "LP rounding"):
            plans = planned(Split(PLANNERS[method]), limit)
            results[method] = table2_outcome(programs, plans, machine)
            if method == "Capuchin":
                results[CAPUCHIN_HELD] = table2_outcome(programs, plans, machine, is_held=True)
        return {"without": table2_outcome(programs, empty_plans(programs), machine), "methods": results}

    def chart(self, rows: Rows) -> Chart:
        vdnn, capuchin, _ = self.template_values(rows)["duels"].values()
        title = f"TENSILE's CBR beats vDNN's in {vdnn['ahead']} of {vdnn['count']} rows"
        return self.panels(f"{title}, Capuchin's in {capuchin['ahead']} (paper: always)", rows)


def plan_all(programs: Sequence[Program], machine: Machine, planner: JobsPlanner, limit: int) -> Sequence[Plan] | None:
    """Returns a plan per job, or None if the planner finds none."""
    try:
        return planner.plan_jobs(programs, machine, limit)
    except Infeasible:
        return None


def tightest_plans(planner: JobsPlanner, programs: Sequence[Program], machine: Machine) -> Sequence[Plan] | None:
    """Returns the jobs' plans at the smallest feasible limit, to 0.5 % of the sum of the peaks."""
    return smallest_plans(sum(p.peak_bytes for p in programs), 200, partial(plan_all, programs, machine, planner))


def empty_plans(programs: Sequence[Program]) -> list[Plan]:
    """Returns an empty plan per job."""
    return [Plan((), program.fingerprint, "none") for program in programs]


def table2_outcome(
    programs: Sequence[Program], plans: Sequence[Plan] | None, machine: Machine, is_held: bool = False
) -> Row | None:
    """Simulates jobs under their plans in the GPU's memory, each held to its plan's limit if ``is_held``."""
    if plans is None:
        return None
    jobs = [replace(job, within_limit=is_held) for job in jobs_of(programs, plans)]
    timeline = simulate_jobs(jobs, machine, machine.memory_bytes)
    return {
        "peak_bytes": timeline.peak_bytes,
        "makespan_ns": timeline.end_ns,
        "decisions": [len(plan.decisions) for plan in plans],
        "evictions": len(timeline.evictions),
        "channel": round((timeline.copies_ns("d2h") + timeline.copies_ns("h2d")) / timeline.end_ns, 4),
    }


class Ratio(Figure):
    """Memory saved and time lost against the maximum fraction of tensors that are swapped."""

    name = "tensile_ratio"
    styles = (("#1f5fa8", "o", "-"), ("#f16913", "^", "--"), ("#238b45", "s", ":"))

    def tasks(self, settings: DictConfig) -> Rows:
        ratios = figures.numbers(settings, "ratios", lambda x: 0 <= x <= 1, "numbers from 0 to 1")
        network = figures.network(str(settings.network), "network")
        batch = cli.integer(settings, "batch", least=1)
        jobs = figures.integers(settings, "jobs", 1)
        return [{"network": network, "batch": batch, "jobs": n, "ratio": ratio} for n in jobs for ratio in ratios]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)
        programs = [program] * task["jobs"]
        plans = tightest_plans(TENSILE("swap", max_swap_ratio=task["ratio"]), programs, machine)
        plans_by_mode = {"without": empty_plans(programs), "with": plans or empty_plans(programs)}
        return {key: table2_outcome(programs, job_plans, machine, True) for key, job_plans in plans_by_mode.items()}

    def template_values(self, rows: Rows) -> Row:
        groups = list(figures.group_by([ratio_entry(row) for row in rows], "jobs").values())
        best = []
        full = []
        for group in groups:
            best.append(max(group, key=lambda line: line["benefit"] or 0.0)["ratio"])
            # The channel is full from the ratio on that saves as much as the largest.
            full.append(min(line["ratio"] for line in group if line["saved"] == group[-1]["saved"]))
        return {"lines": [line for group in groups for line in group], "best": best, "full": full}

    def chart(self, rows: Rows) -> Chart:
        groups = figures.group_by([ratio_entry(row) for row in rows], "jobs")
        ratios = [row["ratio"] for row in next(iter(groups.values()))]
        panels = []
        for key, (title, axis, form) in zip(("saved", "lost", "benefit"), PANELS, strict=True):
            marks = [
                Line(range(len(lines)), [row[key] for row in lines], color, lines[0]["label"], marker, line)
                for lines, (color, marker, line) in zip(groups.values(), self.styles, strict=False)
            ]
            x_axis = Axis("maximum swapping ratio, %", names=[f"{100 * ratio:g}" for ratio in ratios])
            panels.append(Panel(title, marks, x_axis, Axis(axis, form, (0, None))))
        best = ", ".join(f"{ratio:.0%}" for ratio in self.template_values(rows)["best"])
        title = f"MSR / EOR is best at a swapping ratio of {best} for {', '.join(map(str, groups))} jobs"
        return Chart(title, panels, 2, (4.95, 3.6))


def ratio_entry(row: Row) -> Row:
    """Returns a row with its ratios; the cost-benefit ratio is None if no time is lost."""
    saved, lost, benefit = ratios(row["with"], row["without"])  # type: ignore[misc]
    is_free = lost <= ZERO
    swaps = sum(row["with"]["decisions"])
    texts = cells((saved, lost, float("inf") if is_free else benefit), "")
    return {
        **row,
        "label": jobs_label({"jobs": [row["network"]] * row["jobs"]}),
        "saved": saved,
        "lost": lost,
        "benefit": None if is_free else benefit,
        "cells": texts if swaps else ["no swap", "", ""],
    }
