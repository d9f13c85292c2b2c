"""HOME's Table 2 and Fig. 6, 7 and 9: largest batches, throughput, parts of an iteration, replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from statistics import fmean
from typing import ClassVar

import numpy as np
from omegaconf import DictConfig

import agents
from agents.heuristics.layers import feature_maps
from agents.planner import MIB, Candidates
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import home_networks as home, published
from experiments.figures.figure import Figure, Rows, span
from experiments.figures.home_networks import ASPLOS, LOOKS, METHODS, NETWORKS, TABLE2
from experiments.measure.published.replays import FOLDER, Replay, replays
from experiments.plotting.charts import ONE, Axis, Bars, Chart, Line, Mark, Panel, Rule, Words, pairs
from experiments.plotting.palette import INK, Look, look
from simulator.compiled.engine import simulate
from simulator.files import load_json
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import Timeline


class Table2(Figure):
    """Table 2: largest batches of PyTorch, Capuchin and HOME, also at a bounded loss, and their images per second."""

    name = "home_table2"
    paper_networks = NETWORKS

    def tasks(self, settings: DictConfig) -> Rows:
        resolution = cli.number(settings, "resolution")
        if not 0 < resolution < 1:
            raise cli.UsageError(f"figure.resolution: expected a number between 0 and 1, got {resolution}")
        options = {"resolution": resolution, "slower": cli.number(settings, "slower"), **home.search_options(settings)}
        return [{**task, **options} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        network = task["network"]
        sizes = home.sizes(network, machine)

        @cache
        def plan_of(method: str, batch: int) -> Plan | None:
            return home.first_plan(method, sizes.at_batch(batch), machine, task)

        def may_fit(method: str, batch: int) -> bool:
            return least_bytes(method, sizes.at_batch(batch)) <= machine.memory_bytes

        def has_plan(method: str, batch: int) -> bool:
            return plan_of(method, batch) is not None

        def is_fast(method: str, batch: int) -> bool:
            result = home.run_plan(sizes.at_batch(batch), plan_of(method, batch), machine)
            return result is not None and result["iteration_ns"] / batch <= longest_ns

        plain_batch = home.unplanned_batch(sizes)
        longest_ns = (1 + task["slower"]) * sizes.at_batch(plain_batch).ideal_ns / plain_batch  # per image
        bounds = {method: largest(partial(may_fit, method), plain_batch, home.MOST) for method in TABLE2}
        results = {}
        for method, i in TABLE2.items():
            batch = largest_batch(partial(has_plan, method), plain_batch, bounds[method], task["resolution"])
            bounded = largest_batch(partial(is_fast, method), plain_batch, batch, task["resolution"])
            program = sizes.timed(home.program(network, machine, batch))
            if program.fingerprint != sizes.at_batch(batch).fingerprint:
                raise AssertionError(
                    f"{network}: the capture at batch {batch} differs from the program that was planned; report it"
                )
            paper_batch = NETWORKS[network].batch[i]
            results[method] = {
                "batch": batch,
                "bound": bounds[method],
                "bounded": bounded,
                "peak_bytes": program.peak_bytes,
                "ideal_ns": program.ideal_ns,
                **(home.run_plan(program, plan_of(method, batch), machine) or {}),
                "at_paper": home.run_plan(sizes.at_batch(paper_batch), plan_of(method, paper_batch), machine),
            }
        return {"limit": machine.memory_bytes, "factor": sizes.factor, "found": results}

    def template_values(self, rows: Rows) -> Row:
        networks = [table2_entry(row) for row in rows]
        lines = [
            {
                "network": net["label"],
                "method": method,
                "paper_batch": None if method == ASPLOS else net["paper_batch"][TABLE2[method]],
                "paper_times": None if method == ASPLOS else net["paper_batch"][TABLE2[method]] / net["paper_batch"][0],
                "paper_rate": None if method == ASPLOS else net["paper_rate"][TABLE2[method]],
                "times": net["batch"][method] / net["batch"]["PyTorch"],
                **{key: net[key][method] for key in ("batch", "bounded", "rate")},
            }
            for net in networks
            for method in net["batch"]
        ]
        return {
            "networks": networks,
            "lines": lines,
            **{f"{key}s": span(net[key] for net in networks) for key in ("gain", "gain_paper", "bounded_over")},
            "over_capuchin": [
                fmean(net[key]["HOME"] / net[key]["Capuchin"] - 1 for net in networks) for key in ("batch", "rate")
            ],
            "over_capuchin_paper": [
                fmean(net[key][2] / net[key][1] - 1 for net in networks) for key in ("paper_batch", "paper_rate")
            ],
            "ahead": [
                {
                    "rival": rival,
                    **{key: sum(net[key]["HOME"] > net[key][rival] for net in networks) for key in ("bounded", "rate")},
                    "larger": sum(ratio > 1 + rows[0]["resolution"] for ratio in ratios),
                    "smaller": sum(ratio < 1 / (1 + rows[0]["resolution"]) for ratio in ratios),
                }
                for rival in ("Capuchin", ASPLOS)
                for ratios in [[net["batch"]["HOME"] / net["batch"][rival] for net in networks]]
            ],
        }

    def chart(self, rows: Rows) -> Chart:
        networks = [table2_entry(row) for row in rows]
        panels: dict[str, list[Mark]] = {key: [ONE] for key in ("batch", "bounded", "rate_at", "rate")}
        for shift, method in zip((-0.25, 0, 0.25), ("Capuchin", ASPLOS, "HOME"), strict=True):
            for key, marks in panels.items():
                paper = "paper_batch" if key.startswith("b") else "paper_rate"
                unit = "batch" if key.startswith("b") else "rate"
                theirs = [net[paper][TABLE2[method]] / net[paper][0] for net in networks]
                ours = [net[key][method] and net[key][method] / net[unit]["PyTorch"] for net in networks]
                line, hollow, filled = visible_pairs(LOOKS[method], theirs, ours, shift)
                marks += [filled] if method == ASPLOS else [line, hollow, filled]  # the paper has one Capuchin
        titles = (
            "Largest batch",
            f"Largest batch, at most {rows[0]['slower']:.0%} slower per image",
            "Images/s at the paper's batch",
            "Images/s at the largest batch",
        )
        names = Axis(names=[net["label"] for net in networks])
        times = span(net["times"] for net in networks)
        times_paper = span(net["times_paper"] for net in networks)
        return Chart(
            f"HOME's largest batch: {times:.1f} times PyTorch's (paper: {times_paper:.1f}), RTX 2080 Ti",
            [
                Panel(title, marks, Axis("over PyTorch's at its largest batch", "{:g}×", (0, None)), names)
                for title, marks in zip(titles, panels.values(), strict=True)
            ],
            2,
            (4.95, 0.46 * len(rows) + 0.6),
            keys=3,
        )


def visible_pairs(look: Look, theirs: Sequence[float], ours: Sequence[float | None], shift: float = 0.0) -> list[Mark]:
    """Returns ``pairs`` with markers of two sizes, so that both are visible where the values are equal."""
    line, hollow, filled = pairs(look, theirs, ours, shift)
    return [line, replace(hollow, size=11), replace(filled, size=5)]


def least_bytes(method: str, program: Program) -> int:
    """Returns a lower bound on a method's bytes: the peak with everything swapped out that the method may move."""
    if method == "PyTorch":
        return program.peak_bytes
    gaps = [m.gap for m in feature_maps(program)] if method == "HOME" else program.gaps(MIB)
    return Candidates(program, gaps).least_bytes


def largest_batch(is_feasible: Callable[[int], bool], low: int, high: int, resolution: float) -> int:
    """Returns the largest batch that fits, to within the fraction ``resolution``.

    Args:
        is_feasible: Whether a batch fits; asked for sizes from ``low`` to ``high``.
        low: Batch that fits.
        high: Upper bound, which is tried first.
        resolution: Relative width of the last bracket.
    """
    if is_feasible(high):
        return high
    while high - low > max(1, resolution * low):
        middle = min(2 * low, (low + high) // 2)  # approach from below: infeasible batches take longest
        low, high = (middle, high) if is_feasible(middle) else (low, middle)
    return low


def table2_entry(row: Row) -> Row:
    """Returns one network's batches and images/s by method, at its own and at the paper's largest batch."""
    paper = NETWORKS[row["network"]]
    results = row["found"]
    ideal = {m: result["batch"] / result["ideal_ns"] for m, result in results.items()}
    at_paper = {
        m: result["at_paper"] and paper.batch[TABLE2[m]] / result["at_paper"]["iteration_ns"] * 1e9
        for m, result in results.items()
    }
    home_result = results["HOME"]
    pytorch = results["PyTorch"]
    return {
        "label": paper.label,
        "paper_batch": paper.batch,
        "paper_rate": paper.throughput,
        "rate_at": at_paper,
        **{key: {m: result[key] for m, result in results.items()} for key in ("batch", "bounded")},
        "bounded_over": home_result["bounded"] / pytorch["batch"],
        "rate": {m: result["batch"] / result["iteration_ns"] * 1e9 for m, result in results.items()},
        "times_paper": paper.batch[2] / paper.batch[0],
        "times": home_result["batch"] / pytorch["batch"],
        "gain": ideal["HOME"] / ideal["PyTorch"] - 1,
        "gain_paper": paper.throughput[2] / paper.throughput[0] - 1,
    }


class Fig6(Figure):
    """Fig. 6: images per second against the batch size, with the kernel-time model at each size."""

    name = "home_fig6"
    paper_networks = NETWORKS
    compared = 0.5  # least share of the claims; the paper's batches are large
    dashes: ClassVar = {"vDNN": "-.", "SuperNeurons": ":", "Capuchin": "--", ASPLOS: (0, (6, 2))}

    def tasks(self, settings: DictConfig) -> Rows:
        shares = figures.numbers(settings, "shares", lambda value: 0 < value < float("inf"), "positive numbers")
        options = home.search_options(settings)
        return [{**task, "share": share, **options} for task in super().tasks(settings) for share in sorted(shares)]

    def run(self, task: Row, machine: Machine) -> Row:
        batch = max(round(task["share"] * home.unplanned_batch(home.sizes(task["network"], machine))), 2)
        program = home.modeled_program(task["network"], machine, batch)
        plans = {method: home.first_plan(method, program, machine, task) for method in METHODS}
        results = {method: home.run_plan(program, plan, machine) for method, plan in plans.items()}
        return {"batch": batch, "limit": machine.memory_bytes, "ideal_ns": program.ideal_ns, "methods": results}

    def template_values(self, rows: Rows) -> Row:
        claims = []
        for rival, theirs in self.published.items():
            speedups = [
                (ours / other, f"{NETWORKS[r['network']].label}, batch {r['batch']:,}", r["share"] > 1)
                for r in rows
                if r["share"] >= self.compared
                if (ours := rate(r, "HOME")) and (other := rate(r, rival))
            ]
            needed = [times for times, _, is_needed in speedups if is_needed]
            if speedups:
                claims.append(
                    {
                        "rival": rival,
                        "theirs": theirs,
                        "least": min(speedups),
                        "most": max(speedups),
                        "behind": sum(times < 1 for times in needed),
                        "needed": len(needed),
                    }
                )
        ends = [
            [max((rate(row, method) or 0.0 for row in lines), default=0.0) for method in ("HOME", "PyTorch")]
            for lines in figures.group_by(rows).values()
        ]
        return {
            "methods": METHODS,
            "claims": claims,
            "lines": [{**r, "label": NETWORKS[r["network"]].label, "cells": cells(r)} for r in rows],
            "over_plain": max((ours / plain for ours, plain in ends if plain), default=None),
        }

    def chart(self, rows: Rows) -> Chart:
        images = []
        overheads = []
        for network, lines in figures.group_by(rows).items():
            paper = NETWORKS[network]
            short = [row for row in lines if row["share"] > 1]
            rates: list[Mark] = []
            losses: list[Mark] = []
            for method, (_, color, marker) in LOOKS.items():
                dash = self.dashes.get(method, "-")
                name = f"{method}, ours"
                if method != "PyTorch":
                    overhead = [(row["methods"][method] or {}).get("overhead") for row in short]
                    label = f"{name} (overhead only)" * (method == ASPLOS)
                    losses.append(
                        Line(
                            [row["share"] for row in short],
                            overhead,
                            color,
                            label,
                            marker,
                            dash,
                            size=5,
                            hollow=method == ASPLOS,
                        )
                    )
                if method == ASPLOS:  # its images/s would hide Capuchin's
                    continue
                drawn = [r for r in lines if r["share"] >= 1 or method in ("PyTorch", "vDNN")]
                width, size = (2.8, 6) if method == "HOME" else (1.5, 7 if method == "PyTorch" else 4)
                rates.append(
                    Line(
                        [row["batch"] for row in drawn],
                        [rate(row, method) for row in drawn],
                        color,
                        name + " (after the drop: all layers)" * (method == "vDNN"),
                        marker,
                        dash,
                        width,
                        size,
                        front={"HOME": 2.5, "Capuchin": 3.5}.get(method, 3),
                    )
                )
                if (i := TABLE2.get(method)) is not None:
                    label = f"{method}, largest batch in the paper (Table 2)"
                    rates.append(
                        Line(
                            [paper.batch[i]],
                            [paper.throughput[i]],
                            color,
                            label,
                            marker,
                            "",
                            size=9,
                            hollow=True,
                            front=4,
                        )
                    )
            ticks = [10**n for n in range(6) if lines[0]["batch"] <= 10**n <= lines[-1]["batch"]]
            size_axis = Axis("batch size", "{:,.0f}", scale="log", ticks=ticks)
            images.append(Panel(paper.label, rates, size_axis, Axis("images/s", "{:,.0f}", (0, None))))
            shares = Axis("batch size / largest without a plan", "{:g}×", ticks=[row["share"] for row in short])
            level = Axis("overhead over the kernels", "%", (-0.001, 6), "symlog", (0, 0.01, 0.1, 1))
            overheads.append(Panel(paper.label, losses, shares, level))
        title = "Images/s by batch size, and overhead where memory is short"
        claims = {claim["rival"]: claim for claim in self.template_values(rows)["claims"]}
        if {"vDNN", "SuperNeurons"} <= {*claims}:
            times, behind = claims["vDNN"], claims["SuperNeurons"]
            title = f"HOME: {times['least'][0]:.2f} to {times['most'][0]:.2f} times vDNN's images/s, "
            title += f"behind SuperNeurons at {behind['behind']} of {behind['needed']} points"
        return Chart(title, [*images, *overheads], 2, (4.95, 3.0), (0.0, 1.6), keys=2)


def rate(row: Row, method: str) -> float | None:
    """Returns the images per second, or None if nothing fits."""
    result = row["methods"][method]
    return float(row["batch"] / result["iteration_ns"] * 1e9) if result else None


def cells(row: Row) -> list[str]:
    """Returns the images/s of every method."""
    runs = [(rate(row, method), row["methods"][method]) for method in METHODS]
    return [f"{images:,.0f}{' (all)' * (run['planner'] == 'vdnn_all')}" if images else "–" for images, run in runs]


class Fig7(Figure):
    """Fig. 7: breakdown of an iteration of vDNN, SuperNeurons, Capuchin and HOME."""

    name = "home_fig7"
    points = 0.05  # difference up to which a share of the iteration agrees
    # SuperNeurons' rules, which the paper's figure is about; METHODS has the fastest of its settings.
    rules: ClassVar = {
        "SuperNeurons, fixed rules": {"recompute": "cost"},
        "SuperNeurons, all cheap outputs dropped": {"recompute": "cost", "always": True},
    }
    paper_names: ClassVar = {"SuperNeurons, fixed rules": "SuperNeurons", "SuperNeurons": ""}
    parts: ClassVar = {  # of an iteration: color and hatch
        "computation": ("#9a9a9a", ""),
        "overlap": ("#1f5fa8", "//"),
        "recomputation": ("#8e5bd0", "xx"),
        "swapping": ("#cb181d", ".."),
    }

    def tasks(self, settings: DictConfig) -> Rows:
        batches = figures.batch_sizes(settings, 2)
        for name in batches.keys() - NETWORKS.keys():
            raise cli.UsageError(f"figure.batches: {name!r} is not one of HOME's networks ({', '.join(NETWORKS)})")
        options = home.search_options(settings)
        sets: tuple[Row, ...] = ({"rules": True}, options)  # SuperNeurons by its fixed rules; all methods
        return [{"network": name, "batch": batch, **chosen} for name, batch in batches.items() for chosen in sets]

    def run(self, task: Row, machine: Machine) -> Row:
        sizes = home.sizes(task["network"], machine)
        program = sizes.at_batch(task["batch"])
        results: dict[str, Row | None] = {}
        for method in self.rules if "rules" in task else list(METHODS)[1:]:  # all but PyTorch
            if "rules" in task:
                planner = agents.make("superneurons", **self.rules[method])
                plan = figures.attempt(planner, program, machine, machine.memory_bytes)
            else:
                plan = home.first_plan(method, program, machine, task)
            results[method] = None
            if plan is not None:
                timeline = simulate(program, plan, machine, machine.memory_bytes)
                results[method] = {
                    "planner": plan.planner,
                    "iteration_ns": timeline.iteration_ns,
                    "overhead": timeline.overhead,
                    "parts": split_iteration(timeline),
                }
        return {"unplanned": home.unplanned_batch(sizes), "ideal_ns": program.ideal_ns, "methods": results}

    def template_values(self, rows: Rows) -> Row:
        lines = fig7_lines(rows)
        stated = [
            (paper, line["ours"][part]) for line in lines for part, paper in line["paper"].items() if paper is not None
        ]
        return {
            "lines": lines,
            "stated": len(stated),
            "near": sum(abs(ours - paper) <= self.points for paper, ours in stated),
            "points": self.points,
        }

    def chart(self, rows: Rows) -> Chart:
        times = []
        shares = []
        for of_network in figures.group_by(rows).values():
            row = of_network[0]
            methods = fig7_lines(of_network)
            unit = row["ideal_ns"]
            marks: list[Mark] = [Rule(1)]
            starts = np.zeros(len(methods))
            longest = max((line["found"]["iteration_ns"] for line in methods if line["found"]), default=0) / unit
            for part, (ink, hatch) in self.parts.items():
                width = np.array([line["found"]["parts"][part] / unit if line["found"] else 0.0 for line in methods])
                texts = [
                    f"{line['ours'][part] or 0:.0%}" * bool(w > 0.13 * longest)
                    for line, w in zip(methods, width, strict=True)
                ]
                marks.append(
                    Bars(
                        range(len(methods)),
                        width,
                        ink,
                        part,
                        0.62,
                        starts,
                        texts=texts,
                        inside=True,
                        hatch=hatch,
                    )
                )
                starts = starts + width
            for y, line in enumerate(methods):
                overhead = line["found"] and line["found"]["overhead"]
                text = "does not fit" if overhead is None else f"{overhead:+.{2 if overhead < 0.1 else 0}%}"
                marks.append(Words(starts[y], y, f"  {text}", "left"))
            x_axis = Axis("iteration time, over that of the kernels alone", "{:g}×", (0, 1.25 * longest))
            title = f"{NETWORKS[row['network']].label}, batch {row['batch']:,}"
            times.append(
                Panel(title, marks, x_axis, Axis(names=[line["method"].replace(", ", ",\n") for line in methods]))
            )
            stated = [
                (f"{line['method'].partition(',')[0]}:\n{part}", value, line["ours"][part])
                for line in methods
                for part, value in line["paper"].items()
                if value is not None
            ]
            if stated:
                names, theirs, ours = zip(*stated, strict=True)
                share_marks = visible_pairs(Look("share", INK, "o"), theirs, ours)
                x_axis = Axis("share of the iteration", "%", (-0.03, 0.8))
                shares.append(Panel("Shares that the paper states", share_marks, x_axis, Axis(names=names)))
        panels = [panel for group in zip_longest(times, shares) for panel in group if panel]
        named = {**{name: [name] for name in ("HOME", "vDNN")}, "SuperNeurons' rules": self.rules}
        found = {name: [row["methods"].get(key) for row in rows for key in keys] for name, keys in named.items()}
        worst = {name: max((r["overhead"] for r in results if r), default=np.nan) for name, results in found.items()}
        lost = ", ".join(
            f"{name} {worst[name]:.{2 if worst[name] < 0.1 else 0}%}"
            for name in sorted(worst, key=lambda name: worst[name])
        )
        title = f"Most time lost in 11 GB: {lost}"
        return Chart(title, panels, 2, (4.95, 3.8), keys=3)


def split_iteration(timeline: Timeline) -> dict[str, int]:
    """Splits the last iteration into ns of computation, overlap, recomputation and swapping."""
    begin = timeline.last_start_ns
    end = timeline.boundaries[-1]
    kernels, outs, ins = (
        [(max(s.start_ns, begin), min(s.end_ns, end)) for s in timeline.spans if s.kind == kind and s.end_ns > begin]
        for kind in ("kernel", "swap_out", "swap_in")
    )
    overlap_out = intersect(kernels, outs)
    overlap_in = intersect(kernels, ins)
    overlap_ns = sum(b - a for a, b in overlap_out + overlap_in) - sum(b - a for a, b in intersect(overlap_out, ins))
    breakdown = timeline.breakdown
    waits = breakdown.stall_memory_ns + breakdown.stall_data_ns
    return dict(
        zip(Fig7.parts, (breakdown.compute_ns - overlap_ns, overlap_ns, breakdown.recompute_ns, waits), strict=True)
    )


def intersect(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the intersections of two lists of disjoint intervals."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(start, end) for start, end in pairs if start < end]


def fig7_lines(rows: Rows) -> Rows:
    """Returns a line per network and method; table cells have the paper's share, if stated, and ours."""
    lines = []
    for row in rows:
        stated = published("home_fig7").get(row["network"], {})
        for method, result in row["methods"].items():
            ours = {part: result["parts"][part] / result["iteration_ns"] if result else None for part in Fig7.parts}
            paper = {
                **dict.fromkeys(Fig7.parts),
                **(stated.get(Fig7.paper_names.get(method, method), {}) if result else {}),
            }
            theirs, cells = (
                ["" if shares[part] is None else f"{shares[part]:.1%}" for part in Fig7.parts]
                for shares in (paper, ours)
            )
            lines.append(
                {
                    "network": NETWORKS[row["network"]].label,
                    "batch": row["batch"],
                    "ours": ours,
                    "paper": paper,
                    "method": f"{method} (all layers)"
                    if result and result["planner"] == "vdnn_all"
                    else method.replace("SuperNeurons", "SuperNeurons, fastest setting")
                    if method in METHODS
                    else method,
                    "ms": f"{result['iteration_ns'] / 1e6:,.0f} ({result['overhead']:+.2%})"
                    if result
                    else "does not fit",
                    "cells": cells,
                    "stated": theirs,
                    "found": result,
                }
            )
    return lines


class Fig9(Figure):
    """Fig. 9: times predicted by the evaluator, and measured on an H200."""

    name = "home_fig9"
    streams = "launches from Python"
    graph = "one CUDA graph"

    def tasks(self, settings: DictConfig) -> Rows:
        names = figures.choices(settings, "executors", ("streams", "graph"))
        return [{"executor": getattr(self, name)} for name in names]

    def run(self, task: Row, machine: Machine) -> Row:
        if task["executor"] == self.streams:
            return {"replays": [row._asdict() for row in replays()]}
        replayed = []
        for row in load_json(FOLDER / "probe.json", lambda data: data["rows"]):  # type: ignore[index]
            if row["section"] == "graph_replay":
                _, workload, fraction, planner = row["plan"].split("-")
                predicted = row["predicted"]
                measured = row["measured"]
                replay = Replay(workload, float(fraction), planner, False, predicted, predicted, measured)
                replayed.append(replay._asdict())
        return {"replays": replayed}

    def template_values(self, rows: Rows) -> Row:
        lines = [
            {
                **run,
                "executor": row["executor"],
                "error": run["predicted_ns"] / run["measured_ns"] - 1,
                "label": f"{figures.label(run['workload'])} {run['fraction']:.0%}, {run['planner']}",
                "name": f"{figures.label(run['workload'])} {run['fraction']:.0%}, {look(run['planner']).label}",
            }
            for row in sorted(rows, key=lambda row: row["executor"] != self.graph)
            for run in row["replays"]
        ]
        plans: dict[str, Row] = {}
        summary: Row = {}
        for name, executor in (("graph", self.graph), ("streams", self.streams)):
            group = [run for run in lines if run["executor"] == executor]
            errors = [abs(run["error"]) for run in group]
            before = [abs(run["before_ns"] / run["measured_ns"] - 1) for run in group]
            summary[f"{name}_all"] = None
            if group:
                summary[f"{name}_all"] = {
                    "plans": len(group),
                    "mean": fmean(errors),
                    "worst": max(errors),
                    "before": fmean(before),
                }
            for run in group:
                plans.setdefault(run["label"], {"label": run["label"], "graph": None, "streams": None})[name] = run
        return {"lines": lines, "plans": list(plans.values()), **summary}

    def chart(self, rows: Rows) -> Chart:
        lines = self.template_values(rows)["lines"]
        names = list(dict.fromkeys(line["name"] for line in lines))
        marks: list[Line | Rule] = [Rule(0), Rule(1, line=":", text="paper: below 1 %"), Rule(-1, line=":")]
        for executor, color, marker in ((self.graph, look("home").color, "o"), (self.streams, INK, "^")):
            group = [line for line in lines if line["executor"] == executor]
            positions = [names.index(line["name"]) for line in group]
            errors = [100 * line["error"] for line in group]
            marks.append(Line(errors, positions, color, executor, marker, "", hollow=executor == self.streams))
        panel = Panel("", marks, Axis("predicted − measured, % of measured", "{:g}"), Axis(names=names))
        errors = {name: self.template_values(rows)[f"{name}_all"] for name in ("graph", "streams")}
        means = [
            f"{errors[name]['mean']:.1%} {text}"
            for name, text in (("graph", "as one graph"), ("streams", "launched"))
            if errors[name]
        ]
        return Chart(f"Mean error against an H200: {', '.join(means)}", [panel], size=(8.6, 0.3 * len(names) + 1.2))
