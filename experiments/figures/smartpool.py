"""Reproduces Figs. 8 and 9, Table II and section VI-B-3 of the SmartPool paper (AutoSwap)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from omegaconf import DictConfig

import agents
from agents.floor import floor
from agents.heuristics.autoswap import BASIC, peak_gaps
from agents.planner import MIB, Candidates
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import bisect
from experiments.common.report import Row
from experiments.figures import published
from experiments.figures.figure import Figure, Rows, span
from experiments.figures.smartpool_loads import PAPER, ZERO, last_kernels, limits_mb, our_limit, run_planner, waits
from experiments.plotting import plots
from experiments.plotting.charts import DASHED, DOTTED, Axis, Chart, Line, Mark, Panel, Rule, floor as floor_area, pairs
from experiments.plotting.palette import FAINT, INK, LOAD, SWAPPED, look
from simulator import Machine, Plan, Program, Swap, Timeline, simulate
from simulator.pool.device import Device, train


class Fig8(Figure):
    """Fig. 8: memory load of VGG16 over one iteration, with AutoSwap at several limits."""

    name = "smartpool_fig8"
    # Names of the curves without a limit.
    no_swap = "no swap"
    load_min = "load_min"

    def tasks(self, settings: DictConfig) -> Rows:
        network = settings.network
        limits = limits_mb(settings, settings.network)
        curves: Rows = [{"curve": self.no_swap, "limit": None}, {"curve": self.load_min, "limit": None}]
        curves += [{"curve": f"limit {limit:g} MB", "limit": limit} for limit in limits]
        return [{"network": network, **curve} for curve in curves]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        limit = None
        gradients = None
        if task["curve"] == self.load_min:
            load, timeline = load_min(program, machine)
            x = np.array(program.start_ns) / 1e6
            y = np.append(load, load[-1]) / MIB
            peak = int(load.max())
            peak_kernel = int(load.argmax())
            uses = zip(program.tensors, program.accesses, strict=True)
            gradients = sum(t.nbytes for t, u in uses if t.kind == "gradient" and u and u[0] <= peak_kernel <= u[-1])
        else:
            timeline = simulate(program, Plan(), machine, program.peak_bytes)
            if task["limit"] is not None:
                limit = our_limit(program, task["network"], task["limit"])
                timeline = run_planner(agents.make("autoswap_bo"), program, machine, limit)
            peak = timeline.peak_bytes
            x, y = plots.steady_memory(timeline)
        swap_outs = [s for s in timeline.spans if s.kind == "swap_out" and s.start_ns >= timeline.last_start_ns]
        return {
            "ours": limit,
            "load": program.peak_bytes,
            "peak": peak,
            "gradients": gradients,
            "peak_ms": float(x[int(np.argmax(y))]),
            "iteration_ns": timeline.iteration_ns,
            "ideal_ns": program.ideal_ns,
            "moved": sum(program.tensors[s.index].nbytes for s in swap_outs),
            "swaps": len(swap_outs),
            "curve_points": [[round(float(a), 4), round(float(b), 3)] for a, b in zip(x, y, strict=True)],
        }

    def template_values(self, rows: Rows) -> Row:
        minimum = next(row for row in rows if row["curve"] == self.load_min)
        paper_load = PAPER[rows[0]["network"]]["load"]
        lowest = self.published["lowest_mb"]
        return {
            "curves": [{**row, "overhead": row["iteration_ns"] / row["ideal_ns"] - 1} for row in rows],
            "away": minimum["load"] - minimum["peak"],
            "paper": paper_load - lowest,
            "lowest": lowest,
        }

    def chart(self, rows: Rows) -> Chart:
        curves = sorted(self.template_values(rows)["curves"], key=lambda row: -row["peak"])
        marks: list[Mark] = []
        for row, ink in zip(curves, [*[FAINT, *SWAPPED][: len(curves) - 1], LOAD], strict=True):
            x, y = zip(*row["curve_points"], strict=True)
            text = f"{row['curve']}: peak {row['peak'] / MIB:,.0f} MB"
            if row["limit"]:
                ours = row["ours"] / MIB
                text = f"paper's limit {row['limit']:g} MB, ours {ours:,.0f} MB: {row['overhead']:.1%} overhead"
                marks.append(Rule(ours, horizontal=True, color=ink))
            marks.append(
                Line(x, y, ink, text, step=True, width=1.5, band=(0, y) if row["curve"] == self.no_swap else None)
            )
        longest = max(row["curve_points"][-1][0] for row in rows)
        axes = Axis("time in the iteration (ms)", limits=(0, longest)), Axis("memory load (MB)", limits=(0, None))
        tightest = min((row for row in curves if row["limit"]), key=lambda row: row["ours"])
        sizes = f"{tightest['load'] / MIB:,.0f} MB into {tightest['ours'] / MIB:,.0f} MB"
        title = f"{figures.label(tightest['network'])}: AutoSwap fits {sizes} with {tightest['overhead']:.1%} overhead"
        return Chart(title, [Panel("", marks, *axes)], size=(9.5, 4.4), keys=2)


def load_min(program: Program, machine: Machine) -> tuple[np.ndarray, Timeline]:
    """Returns the load per kernel (int64[n]) with all AutoSwap candidates swapped out, and the synchronous run."""
    candidates = Candidates(program, peak_gaps(program))
    load = candidates.residency(np.ones(len(candidates), dtype=bool))
    n = len(program.kernels)
    swaps = tuple(Swap(*g, prefetch=(g.before - 1) % n, sync=True) for g in candidates.gaps)
    return load, simulate(program, Plan(swaps), machine, program.peak_bytes)


SCORES = tuple(f"autoswap_{score}" for score in BASIC)


class Fig9(Figure):
    """Fig. 9: overhead of AutoSwap's priority scores and of Bayesian optimization (BO)."""

    name = "smartpool_fig9"
    dashes = ("-", "--", ":", "-.")  # by SCORES

    def tasks(self, settings: DictConfig) -> Rows:
        network = settings.network
        shared = {"network": network, "limits": sorted(limits_mb(settings, network), reverse=True)}
        seeds = figures.integers(settings, "seeds", 0)
        return [{**shared, "seed": None}, *({**shared, "seed": seed} for seed in seeds)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        limits = [our_limit(program, task["network"], limit) for limit in task["limits"]]
        planners = {n: agents.make(n) for n in SCORES}
        seed = task["seed"]
        if seed is not None:
            planners = {"bo": agents.make("autoswap_bo", seed=seed)}
        runs = {n: [run_planner(p, program, machine, limit) for limit in limits] for n, p in planners.items()}
        overheads = {n: [timeline.overhead for timeline in timelines] for n, timelines in runs.items()}
        if seed is None:
            overheads["floor"] = [floor(program, machine, limit, "swap").overhead for limit in limits]
        forward = sum(kernel.phase == "forward" for kernel in program.kernels)
        waited = {n: sum(waits(timelines[-1], program)[:forward]) / program.ideal_ns for n, timelines in runs.items()}
        return {"load": program.peak_bytes, "ours": limits, "overheads": overheads, "forward": waited}

    def template_values(self, rows: Rows) -> Row:
        lines = Lines(rows)
        aoa, doa, wdoa, swdoa = lines.scores
        best = lines.scores.min(axis=0)
        most = lines.scores.max(axis=0)
        weighted = np.minimum(wdoa, swdoa) <= np.minimum(aoa, doa) + ZERO
        paid = most > ZERO
        columns = lines.paper, lines.ours, lines.scores.T.tolist(), lines.bo_median, lines.floor
        return {
            "lines": [
                dict(zip(("paper", "ours", "scores", "bo", "floor"), values, strict=True))
                for values in zip(*columns, strict=True)
            ],
            "count": len(paid),
            "paid": int(paid.sum()),
            "weighted": int(weighted[paid].sum()),
            "near": int((most - best < self.published["close"]).sum()),
            "below": int((most < self.published["highest"]).sum()),
            "claimed": self.published["free_mb"],
            "free": [lines.free_limit(overheads) for overheads in (lines.bo_median, best, lines.floor)],
        }

    def chart(self, rows: Rows) -> Chart:
        lines = Lines(rows)
        bo = lines.bo_median
        # The floor does not decrease with a tighter limit: between two limits the wider one's floor holds.
        x = [*lines.paper, min(lines.paper) - 5]
        y = [*lines.floor, lines.floor[-1]]
        marks: list[Mark] = [
            floor_area(x, y, -0.003, step=True),
            Rule(self.published["free_mb"], color=FAINT, text="the paper's limit\nof no overhead"),
        ]
        for name, overheads, dash in zip(SCORES, lines.scores, self.dashes, strict=True):
            label, ink, marker = look(name)
            end = f"{label.split()[-1]} {overheads[-1]:.0%}"
            marks.append(Line(lines.paper, overheads, ink, label.split()[-1], marker, dash, end=end))
        band = (lines.bo.min(axis=0), lines.bo.max(axis=0))
        name = f"BO, median and range of {len(lines.bo)} seeds"
        ink = look("autoswap_bo").color
        marks.append(Line(lines.paper, bo, ink, name, width=2.6, band=band, end=f"BO {bo[-1]:.0%}", front=4))
        shift = lines.paper[0] - lines.ours[0] / MIB
        label = f"memory load limit of the paper (MB); ours, at which as much must leave, is {shift:,.0f} MB lower"
        heights = Axis("overhead of an iteration", "%", (-0.003, 1.08 * max(lines.scores.max(), 0.02)))
        panel = Panel("", marks, Axis(label, limits=(max(lines.paper) + 5, min(lines.paper) - 5)), heights)
        free, free_score = (f"{lines.free_limit(overheads):g} MB" for overheads in (bo, lines.scores.min(axis=0)))
        title = f"{figures.label(lines.network)}: no overhead down to {free} with BO"
        title += f" (paper: {self.published['free_mb']}), {free_score} with scores"
        return Chart(title, [panel], size=(10.0, 4.8))


class Lines:
    """Rows as float64[limits] arrays; ``scores`` is [scores, limits], ``bo`` is [seeds, limits]."""

    def __init__(self, rows: Rows) -> None:
        first = next(row for row in rows if row["seed"] is None)
        self.network = first["network"]
        self.paper = first["limits"]
        self.ours = first["ours"]
        self.scores = np.array([first["overheads"][name] for name in SCORES])
        self.floor = np.array(first["overheads"]["floor"])
        self.bo = np.array([row["overheads"]["bo"] for row in rows if row["seed"] is not None])
        self.bo_median = np.median(self.bo, axis=0)

    def free_limit(self, overheads: np.ndarray) -> float:
        """Returns the paper's lowest limit at and above which no limit has overhead."""
        paid = np.flatnonzero(overheads > ZERO)
        return float(self.paper[paid[0] - 1 if len(paid) else -1]) if not len(paid) or paid[0] else np.nan


REDUCED_MB = published("smartpool_table2")


def paper(row: Row) -> float:
    """Returns the paper's reduction of a network's load."""
    return float(1 - REDUCED_MB[row["network"]] / PAPER[row["network"]]["load"])


class Table2(Figure):
    """Table II: largest reduction of the memory load by AutoSwap without overhead."""

    name = "smartpool_table2"
    fastest_link = 2.0  # highest speed that is tried, relative to the link's
    paper_networks = REDUCED_MB

    def tasks(self, settings: DictConfig) -> Rows:
        steps = cli.integer(settings, "steps", least=2)
        return [{**task, "steps": steps} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        theirs = our_limit(program, task["network"], REDUCED_MB[task["network"]])
        least = floor_limit(program, machine)
        reduced = lowest_free_limit(program, machine, task["steps"], least)
        at_reduced, at_theirs = (
            run_planner(agents.make("autoswap_bo"), program, machine, n) for n in (reduced, theirs)
        )
        return {
            "load": program.peak_bytes,
            "reduced": reduced,
            "ideal_ns": program.ideal_ns,
            "least": least,
            "swapped_ns": at_reduced.breakdown.overlapped_transfer_ns,
            "at_theirs": at_theirs.overhead,
            "link": slowest_link(program, machine, theirs),
            "on_demand_ns": on_demand_ns(program, machine, reduced),
        }

    def template_values(self, rows: Rows) -> Row:
        networks = [table2_entry(row) for row in rows]
        return {
            "networks": networks,
            "count": len(rows),
            "free": sum(row["at_theirs"] <= ZERO for row in rows),
            "links": span(row["link"] for row in rows) or span([self.fastest_link]),
            "early": span(net["early"] for net in networks),
        }

    def chart(self, rows: Rows) -> Chart:
        networks = [table2_entry(row) for row in rows]
        theirs, ours, most = ([net[key] for net in networks] for key in ("paper", "of_theirs", "most_of_theirs"))
        join, hollow, filled = pairs(look("autoswap_bo")._replace(marker="o"), theirs, ours)
        marks = [
            join,
            replace(hollow, texts=[f"{x:.0%}" for x in theirs], side="left"),
            replace(filled, texts=[f"{x:.0%}" for x in ours], side="above"),
            Line(
                most,
                range(len(rows)),
                INK,
                "no plan of swaps can do more (proven)",
                "|",
                "",
                size=13,
                texts=[f"{x:.0%}" for x in most],
            ),
        ]
        axis = Axis("what leaves without overhead, of the paper's load", "%", (0, 0.6))
        title = f"AutoSwap saves {span(ours):.0%} of the load without overhead (paper: {span(theirs):.0%})"
        return Chart(
            title,
            [Panel("", marks, axis, Axis(names=[net["label"] for net in networks]))],
            size=(9.9, 0.42 * len(rows) + 0.8),
        )


def is_free(program: Program, machine: Machine, limit: int) -> bool:
    """Returns whether AutoSwap's plan has no overhead."""
    return run_planner(agents.make("autoswap_bo"), program, machine, limit).overhead <= ZERO


def limits_tried(program: Program, steps: int) -> list[int]:
    """Returns limits from the load down to AutoSwap's least load, evenly spaced."""
    least = Candidates(program, peak_gaps(program)).least_bytes
    return np.linspace(program.peak_bytes, least, steps + 1).astype(np.int64).tolist()


def lowest_free_limit(program: Program, machine: Machine, steps: int, lowest: int) -> int:
    """Returns AutoSwap's lowest limit without overhead, from ``lowest`` to the load in ``steps``."""
    limits = limits_tried(program, steps)
    return min(limit for limit in limits if limit >= lowest and is_free(program, machine, limit))


def floor_limit(program: Program, machine: Machine) -> int:
    """Returns the highest limit below which every plan of swaps has overhead or does not fit, to 1 % of the load."""
    high = program.peak_bytes
    low = floor(program, machine, high, "swap").least_bytes

    def is_free(limit: int) -> bool:
        return floor(program, machine, limit, "swap").overhead <= ZERO

    return low if is_free(low) else bisect(is_free, low, high, program.peak_bytes // 100)[0]


def on_demand_ns(program: Program, machine: Machine, limit: int) -> int:
    """Returns the time of the swaps in an early iteration, on demand and without overlap (section V)."""
    device = Device(limit=limit)
    iterations = train(device, program, 2)
    next(iterations)
    counts = len(device.swapped_out), len(device.swapped_in)
    next(iterations)
    swapped_out = device.swapped_out[counts[0] :]
    swapped_in = device.swapped_in[counts[1] :]
    return sum(map(machine.d2h_ns, swapped_out)) + sum(map(machine.h2d_ns, swapped_in))


def slowest_link(program: Program, machine: Machine, limit: int) -> float | None:
    """Returns the smallest link speed without overhead at ``limit``, as a multiple of the machine's.

    None if ``Table2.fastest_link`` is too slow.
    """

    def is_enough(factor: float) -> bool:
        speeds = (round(speed * factor) for speed in (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s))
        h2d, d2h = speeds
        return is_free(program, replace(machine, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h), limit)

    low = 0.1  # far below what any network needs
    high = Table2.fastest_link
    if not is_enough(high):
        return None
    for _ in range(7):  # to 2 %
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def table2_entry(row: Row) -> Row:
    """Returns a network's limits in MB and as fractions of the load."""
    load = PAPER[row["network"]]["load"]
    reduction = row["load"] - row["reduced"]
    return {
        **row,
        "label": figures.label(row["network"]),
        "load_paper": load,
        "reduced_paper": REDUCED_MB[row["network"]],
        "link": f"more than {Table2.fastest_link:g}" if row["link"] is None else f"{row['link']:.2f}",
        "paper": paper(row),
        "ours": reduction / row["load"],
        "of_theirs": reduction / MIB / load,
        "most": 1 - row["least"] / row["load"],
        "most_of_theirs": (row["load"] - row["least"]) / MIB / load,
        "early": row["on_demand_ns"] / row["ideal_ns"],
    }


class Cause(Figure):
    """Table II with a slower link, waits per swap, and a slower host."""

    name = "smartpool_cause"
    planner = "autoswap_swdoa"  # Bayesian optimization takes thirty times as long
    close = 0.01  # difference from the paper's reduction up to which an advantage counts as removed
    looks = (("#1f5fa8", "s"), ("#f16913", "^"), ("#8c564b", "v"), ("#238b45", "D"), ("#8e5bd0", "P"), ("#cb181d", "X"))
    paper_networks = REDUCED_MB

    def tasks(self, settings: DictConfig) -> Rows:
        options = {
            "steps": cli.integer(settings, "steps", least=2),
            "links": figures.numbers(settings, "links", lambda x: 0 < x <= 1, "numbers of at most 1"),
            "waits_us": figures.numbers(settings, "waits_us", lambda x: x > 0, "positive numbers"),
            "issue_us": cli.integer(settings, "issue_us", least=1),
            "thresholds": figures.numbers(settings, "thresholds", lambda x: x > 0, "positive numbers"),
        }
        return [{**task, **options} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        load = PAPER[task["network"]]["load"] * MIB
        limits = limits_tried(program, task["steps"])
        reductions = {}
        for label, variant in variants(task, machine).items():
            planner = agents.make(self.planner)
            overheads = {limit: run_planner(planner, program, variant, limit).overhead for limit in limits}
            lowest = [min(limit for limit in limits if overheads[limit] <= bound) for bound in task["thresholds"]]
            reductions[label] = [(program.peak_bytes - limit) / load for limit in lowest]
        return {"reductions": reductions}

    def template_values(self, rows: Rows) -> Row:
        thresholds = rows[0]["thresholds"]
        costs = []
        for label in rows[0]["reductions"]:
            removed = [
                sum(row["reductions"][label][i] <= paper(row) + self.close for row in rows)
                for i in range(len(thresholds))
            ]
            reductions = [value for row in rows for value in row["reductions"][label]]
            costs.append({"label": label, "removed": removed, "reductions": reductions})
        lines = [
            {
                "network": row["network"],
                "threshold": threshold,
                "paper": paper(row),
                "cells": [reductions[i] for reductions in row["reductions"].values()],
            }
            for row in rows
            for i, threshold in enumerate(thresholds)
        ]
        papers = [paper(row) for row in rows for _ in thresholds]
        return {"lines": lines, "costs": costs, "thresholds": thresholds, "papers": papers}

    def chart(self, rows: Rows) -> Chart:
        values = self.template_values(rows)
        thresholds = values["thresholds"]
        axis = Axis("counted as no overhead: up to, % of an iteration", names=[f"{100 * t:g}" for t in thresholds])
        marks: list[Mark] = [Rule(float(np.median([paper(row) for row in rows])), horizontal=True, text="paper")]
        for i, (cost, (color, marker)) in enumerate(zip(values["costs"], self.looks, strict=False)):
            label = cost["label"]
            medians = np.median([row["reductions"][label] for row in rows], axis=0)
            size = 15 if i == 0 else 11 - i  # equal medians show as nested markers
            marks.append(Line(range(len(thresholds)), medians, color, label, marker, size=size, hollow=i == 0))
        heights = Axis("reduction without overhead, of the paper's load", "%", (0, 0.5))
        plain, most = values["costs"][0], max(values["costs"][1:], key=lambda cost: sum(cost["removed"]))
        ahead, left = (span(len(rows) - count for count in cost["removed"]) for cost in (plain, most))
        title = f"{ahead:d} of {len(rows)} networks beat the paper, {left:d} with {most['label']}"
        if not self.wait_matters(values["costs"]):
            title += f"; waits matter only below {thresholds[:3][-1]:.1%}"
        return Chart(title, [Panel(f"Median of {len(rows)} networks", marks, axis, heights)], size=(9.9, 4.2))

    @staticmethod
    def wait_matters(costs: Rows) -> bool:
        """Returns whether a wait per swap removes the advantage anywhere but at the smallest two thresholds."""
        plain = costs[0]["removed"]
        return any(cost["removed"][2:] != plain[2:] for cost in costs if cost["label"].startswith("wait"))


def variants(task: Row, machine: Machine) -> dict[str, Machine]:
    """Returns the machine as measured, with slower links, with waits per swap, and with a slower host."""
    speeds = machine.h2d_bytes_per_s, machine.d2h_bytes_per_s
    machines = {"as measured": machine}
    for factor in task["links"]:
        h2d, d2h = (round(speed * factor) for speed in speeds)
        machines[f"link × {factor:g}"] = replace(machine, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h)
    for us in task["waits_us"]:
        machines[f"wait {us:g} us"] = replace(machine, wait_ns=round(1000 * us))
    machines[f"issue {task['issue_us']} us"] = replace(machine, issue_ns=1000 * task["issue_us"])
    return machines


class Optimality(Figure):
    """Section VI-B-3: avoidable part of AutoSwap's overhead."""

    name = "smartpool_optimality"
    example = ("vgg16", 350)  # network, and limit in MB
    negligible = 0.005  # fraction of an iteration

    def tasks(self, settings: DictConfig) -> Rows:
        leave = figures.numbers(settings, "leave", lambda share: 0 < share < 1, "shares between 0 and 1")
        calls = cli.integer(settings, "calls", least=20)
        return [{**task, "leave": sorted(leave), "calls": calls} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        network = task["network"]
        program = figures.program(network, machine)
        limits = [(share, int(program.peak_bytes * (1 - share))) for share in task["leave"]]
        if network == self.example[0]:
            limits.append((None, our_limit(program, *self.example)))
        high = next(k for k, load in enumerate(program.live_bytes) if load >= 0.95 * program.peak_bytes)
        entries = [measure_limit(program, machine, limit, task["calls"], share) for share, limit in limits]
        ns = {"ideal_ns": program.ideal_ns, "ramp_ns": program.start_ns[high]}
        return {"load": program.peak_bytes, **ns, "limits": [entry for entry in entries if entry is not None]}

    def template_values(self, rows: Rows) -> Row:
        cases = points(rows)
        paid = [case for case in cases if case["ours"] > ZERO]
        avoided = {}  # median share of the overhead, by family
        for kind in ("vgg", "resnet"):
            shares = [1 - case["known"] / case["ours"] for case in paid if case["network"].startswith(kind)]
            avoided[kind] = float(np.median(shares)) if shares else None
        least = [case["least"] for case in paid]
        small = [case for case in paid if case["paper"] <= self.negligible]
        return {
            "points": [limits[-1] for limits in figures.group_by(cases).values()],
            "paid": len(paid),
            "known": sum(overhead > ZERO for overhead in least),
            "proven": 100 * max(least, default=0),
            "negligible": self.negligible,
            "small": len(small),
            **avoided,
            "examples": [case for case in paid if case["share"] is None],
        }

    def chart(self, rows: Rows) -> Chart:
        cases = points(rows)
        panels = []
        heights = Axis("overhead of an iteration", "%", (-0.015, 1.08 * max(0.01, *(case["ours"] for case in cases))))
        shares = Axis("swapped out, of the load", "%", (0.48, 0.72), ticks=(0.5, 0.55, 0.6, 0.65, 0.7))
        for network, lines in figures.group_by(cases).items():
            lines = sorted(lines, key=lambda case: -case["limit"])
            x, low, best_known, ours, paper = (
                np.array([case[key] for case in lines]) for key in ("left", "floor", "known", "ours", "paper")
            )
            label = "AutoSwap BO less what the paper's method avoids"
            marks: list[Mark] = [
                floor_area(x, low),
                Line(x, best_known, look("annealing").color, "best plan known (annealing)", "s", DASHED),
                Line(x, ours - paper, INK, label, "D", DOTTED, size=8, hollow=True),
                Line(x, ours, look("autoswap_bo").color, "AutoSwap BO", "o", size=4.5, front=4),
            ]
            marks += [
                Rule(case["left"], color=FAINT, text="350 MB,\nthe paper's\nexample")
                for case in lines
                if case["share"] is None
            ]
            panels.append(Panel(figures.label(network), marks, shares, heights))
        values = self.template_values(rows)
        title = f"A better plan than AutoSwap's is known at {values['known']} of {values['paid']} limits with overhead"
        return Chart(title, panels, 2, (4.95, 2.9), keys=2)


def measure_limit(program: Program, machine: Machine, limit: int, calls: int, share: float | None) -> Row | None:
    """Returns the times of an iteration at one limit, or None if AutoSwap's candidates do not reach it."""
    if (plan := figures.attempt(agents.make("autoswap_bo"), program, machine, limit)) is None:
        return None
    timeline = simulate(program, plan, machine, limit)
    annealed = agents.make("annealing", calls=calls, mode="swap").plan(program, machine, limit)
    wait_ns, avoidable_ns = avoidable_wait(timeline, program, plan, machine)
    begin = timeline.last_start_ns
    return {
        "share": share,
        "limit": limit,
        "iteration_ns": timeline.iteration_ns,
        "forward_wait_ns": wait_ns,
        "avoidable_ns": avoidable_ns,
        "out_ns": sum(s.end_ns - s.start_ns for s in timeline.spans if s.stream == "d2h" and s.start_ns >= begin),
        "annealing_ns": min(simulate(program, annealed, machine, limit).iteration_ns, timeline.iteration_ns),
        "floor_ns": floor(program, machine, limit, "swap").iteration_ns,
    }


def avoidable_wait(timeline: Timeline, program: Program, plan: Plan, machine: Machine) -> tuple[int, int]:
    """Returns the forward-pass wait of the last iteration, and the part avoidable by the paper's method, in ns."""
    begin = timeline.last_start_ns
    kernels = last_kernels(timeline, program)
    end = max(k for k, kernel in enumerate(program.kernels) if kernel.phase == "forward") + 1
    waited = waits(timeline, program)[:end]
    total = sum(waited)
    if not total:
        return 0, 0
    last = max(k for k, ns in enumerate(waited) if ns)
    selected = {(d.tensor, d.after, d.before) for d in plan.decisions}
    opened = {}  # gaps open at the last wait, with the time since which they are
    for g in program.gaps(MIB):
        if g not in selected and (g.after < last < g.before if g.after < g.before else not g.before <= last <= g.after):
            opened[g] = kernels[g.after].end_ns if g.after < last else begin
    copy_ns = {g: machine.d2h_ns(program.tensors[g.tensor].nbytes) for g in opened}
    saved = 0
    for start, stop in idle_intervals(timeline, begin, kernels[last].start_ns):
        now = start
        while True:
            candidates = [(copy_ns[g], g) for g, open_ns in opened.items() if max(now, open_ns) + copy_ns[g] <= stop]
            if not candidates:
                break
            transfer, g = max(candidates)
            now = max(now, opened.pop(g)) + transfer
            saved += transfer
    return total, min(saved, total)


def idle_intervals(timeline: Timeline, begin: int, end: int) -> list[tuple[int, int]]:
    """Returns the intervals [start, end) between two times in which the swap-out stream is idle."""
    busy = sorted((s.start_ns, s.end_ns) for s in timeline.spans if s.stream == "d2h" and s.end_ns > begin)
    intervals = []
    now = begin
    for start, stop in [*busy, (end, end)]:
        if min(start, end) > now:
            intervals.append((now, min(start, end)))
        now = max(now, stop)
    return intervals


def points(rows: Rows) -> Rows:
    """Returns a row per limit of every network.

    Overheads: "ours" is AutoSwap's, "known" the best known plan's, "floor" the certified lower bound. Avoidable
    overheads: "paper" by the paper's method, "least" relative to the best known plan, "most" relative to the floor.
    """
    points = []
    for row in rows:
        ideal = row["ideal_ns"]
        label = figures.label(row["network"])
        for result in row["limits"]:
            ours, best_known, low = (result[key] / ideal - 1 for key in ("iteration_ns", "annealing_ns", "floor_ns"))
            paper = result["avoidable_ns"] / ideal
            overheads = {"ours": ours, "paper": paper, "least": ours - best_known, "most": ours - low}
            points.append(
                {
                    **result,
                    **overheads,
                    "known": best_known,
                    "floor": low,
                    "network": row["network"],
                    "label": f"{label} paper" if result["share"] is None else f"{label} {result['share']:.0%}",
                    "left": 1 - result["limit"] / row["load"],
                    "waits": result["forward_wait_ns"] / ideal,
                    "ms": {key: value * ideal / 1e6 for key, value in overheads.items()},
                }
            )
    return points
