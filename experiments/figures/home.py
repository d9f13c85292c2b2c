"""HOME's figures and tables: largest batches, throughput, parts of an iteration, predicted times, and its search."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product, zip_longest
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from agents.heuristics.home import HOME, UPDATES, Evaluator, placements
from agents.heuristics.layers import feature_maps
from agents.planner import MIB, Candidates
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row, warm_up
from experiments.figures import choices, home_networks as home
from experiments.figures.figure import Figure, span
from experiments.figures.home_networks import ASPLOS, DASHES, LOOKS, METHODS, NETWORKS, TABLE2
from experiments.measured.replays import FOLDER, Replay, replays
from experiments.plotting.charts import DASHED, DOTTED, ONE, Axis, Bars, Chart, Line, Mark, Panel, Rule, Words, pairs
from experiments.plotting.palette import FAINT, INK, PARTS, SWARM, Look, look
from simulator.compiled.engine import Engine, simulate
from simulator.files import load_json
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import Timeline


class Table2(Figure):
    """Table 2: largest batches of PyTorch, Capuchin and HOME, also at a bounded loss, and their images per second."""

    name = "home_table2"
    paper_networks = NETWORKS

    def tasks(self, settings: DictConfig) -> list[Row]:
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
                raise AssertionError(f"{network}: the capture at batch {batch} differs from the planned program")
            paper_batch = NETWORKS[network].batch[i]
            results[method] = {
                "batch": batch, "bound": bounds[method], "bounded": bounded,
                "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns,
                **(home.run_plan(program, plan_of(method, batch), machine) or {}),
                "at_paper": home.run_plan(sizes.at_batch(paper_batch), plan_of(method, paper_batch), machine),
            }  # fmt: skip
        return {"limit": machine.memory_bytes, "factor": sizes.factor, "found": results}

    def numbers(self, rows: list[Row]) -> Row:
        networks = [facts(row) for row in rows]
        return {
            "networks": networks, "limit": rows[0]["limit"], "slower": rows[0]["slower"], "count": len(rows),
            **{f"{key}s": span(net[key] for net in networks) for key in ("gain", "gain_paper", "bounded_over")},
            "ahead": [
                {"rival": rival, **{key: sum(net[key]["HOME"] > net[key][rival] for net in networks)
                                    for key in ("batch", "bounded", "rate")}}
                for rival in ("Capuchin", ASPLOS)
            ],
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        networks = [facts(row) for row in rows]
        panels: dict[str, list[Mark]] = {key: [ONE] for key in ("batch", "bounded", "rate_at", "rate")}
        for shift, method in zip((-0.25, 0, 0.25), ("Capuchin", ASPLOS, "HOME"), strict=True):
            for key, marks in panels.items():
                paper = "paper_batch" if key.startswith("b") else "paper_rate"
                unit = "batch" if key.startswith("b") else "rate"
                theirs = [net[paper][TABLE2[method]] / net[paper][0] for net in networks]
                ours = [net[key][method] and net[key][method] / net[unit]["PyTorch"] for net in networks]
                line, hollow, filled = visible_pairs(LOOKS[method], theirs, ours, shift)
                marks += [filled] if method == ASPLOS else [line, hollow, filled]  # the paper has one Capuchin
        titles = ("Largest batch", f"Largest batch, at most {rows[0]['slower']:.0%} slower per image",
                  "Images/s at the paper's batch", "Images/s at the largest batch")  # fmt: skip
        names = Axis(names=[net["label"] for net in networks])
        return Chart(
            "Largest batch and throughput in the 11 GB of an RTX 2080 Ti",
            [Panel(title, marks, Axis("over PyTorch's at its largest batch", "{:g}×", (0, None)), names)
             for title, marks in zip(titles, panels.values(), strict=True)],
            2, (6.5, 0.6 * len(rows) + 0.6), keys=5,
        )  # fmt: skip


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
        low: Batch that fits.
        high: Upper bound, which is tried first.
    """
    if is_feasible(high):
        return high
    while high - low > max(1, resolution * low):
        middle = min(2 * low, (low + high) // 2)  # approach from below: infeasible batches take longest
        low, high = (middle, high) if is_feasible(middle) else (low, middle)
    return low


def facts(row: Row) -> Row:
    """Returns one network's batches and images/s by method, at its own and at the paper's largest batch."""
    paper, results = NETWORKS[row["network"]], row["found"]
    ideal = {m: result["batch"] / result["ideal_ns"] for m, result in results.items()}
    at_paper = {m: result["at_paper"] and paper.batch[TABLE2[m]] / result["at_paper"]["iteration_ns"] * 1e9
                for m, result in results.items()}  # fmt: skip
    home_result, pytorch = results["HOME"], results["PyTorch"]
    return {
        "label": paper.label, "paper_batch": paper.batch, "paper_rate": paper.throughput, "rate_at": at_paper,
        **{key: {m: result[key] for m, result in results.items()} for key in ("batch", "bounded")},
        "bounded_over": home_result["bounded"] / pytorch["batch"],
        "rate": {m: result["batch"] / result["iteration_ns"] * 1e9 for m, result in results.items()},
        "times_paper": paper.batch[2] / paper.batch[0], "times": home_result["batch"] / pytorch["batch"],
        "gain": ideal["HOME"] / ideal["PyTorch"] - 1, "gain_paper": paper.throughput[2] / paper.throughput[0] - 1,
    }  # fmt: skip


COMPARED = 0.5  # least share of the claims; the paper's batches are large
CLAIMS = {"vDNN": 5.7, "SuperNeurons": 2.0, "Capuchin": 1.3, ASPLOS: 1.3}  # "up to": HOME's throughput over theirs


class Fig6(Figure):
    """Fig. 6: images per second against the batch size, with the kernel-time model at each size."""

    name = "home_fig6"
    paper_networks = NETWORKS

    def tasks(self, settings: DictConfig) -> list[Row]:
        shares = figures.numbers(settings, "shares", lambda value: 0 < value < float("inf"), "positive numbers")
        options = home.search_options(settings)
        return [{**task, "share": share, **options} for task in super().tasks(settings) for share in sorted(shares)]

    def run(self, task: Row, machine: Machine) -> Row:
        batch = max(round(task["share"] * home.unplanned_batch(home.sizes(task["network"], machine))), 2)
        program = home.modeled_program(task["network"], machine, batch)
        plans = {method: home.first_plan(method, program, machine, task) for method in METHODS}
        results = {method: home.run_plan(program, plan, machine) for method, plan in plans.items()}
        return {"batch": batch, "limit": machine.memory_bytes, "ideal_ns": program.ideal_ns, "methods": results}

    def numbers(self, rows: list[Row]) -> Row:
        claims = []
        for rival, theirs in CLAIMS.items():
            speedups = [(ours / other, f"{NETWORKS[r['network']].label}, batch {r['batch']:,}", r["share"] > 1)
                        for r in rows if r["share"] >= COMPARED
                        if (ours := rate(r, "HOME")) and (other := rate(r, rival))]  # fmt: skip
            needed = [times for times, _, is_needed in speedups if is_needed]
            if speedups:
                claims.append({"rival": rival, "theirs": theirs, "least": min(speedups), "most": max(speedups),
                               "behind": sum(times < 1 for times in needed), "needed": len(needed)})  # fmt: skip
        ends = [[max((rate(row, method) or 0.0 for row in lines), default=0.0) for method in ("HOME", "PyTorch")]
                for lines in figures.group_by(rows).values()]  # fmt: skip
        return {
            "methods": METHODS, "claims": claims,
            "lines": [{**r, "label": NETWORKS[r["network"]].label, "cells": cells(r)} for r in rows],
            "over_plain": max((ours / plain for ours, plain in ends if plain), default=None),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        images, overheads = [], []
        for network, lines in figures.group_by(rows).items():
            paper, short = NETWORKS[network], [row for row in lines if row["share"] > 1]
            rates: list[Mark] = []
            losses: list[Mark] = []
            for method, (_, colour, marker) in LOOKS.items():
                dash, name = DASHES.get(method, "-"), f"{method}, ours"
                if method != "PyTorch":
                    overhead = [(row["methods"][method] or {}).get("overhead") for row in short]
                    label = f"{name} (overhead only)" * (method == ASPLOS)
                    losses.append(Line([row["share"] for row in short], overhead, colour, label, marker, dash, size=5,
                                       hollow=method == ASPLOS))  # fmt: skip
                if method == ASPLOS:  # its images/s would hide Capuchin's
                    continue
                drawn = [r for r in lines if r["share"] >= 1 or method in ("PyTorch", "vDNN")]
                width, size = (2.8, 6) if method == "HOME" else (1.5, 7 if method == "PyTorch" else 4)
                rates.append(Line([row["batch"] for row in drawn], [rate(row, method) for row in drawn], colour,
                                  name + " (after the drop: all layers)" * (method == "vDNN"), marker, dash, width,
                                  size, front={"HOME": 2.5, "Capuchin": 3.5}.get(method, 3)))  # fmt: skip
                if (i := TABLE2.get(method)) is not None:
                    label = f"{method}, largest batch in the paper (Table 2)"
                    rates.append(Line([paper.batch[i]], [paper.throughput[i]], colour, label, marker, "", size=9,
                                      hollow=True, front=4))  # fmt: skip
            ticks = [10**n for n in range(6) if lines[0]["batch"] <= 10**n <= lines[-1]["batch"]]
            size_axis = Axis("batch size", "{:,.0f}", scale="log", ticks=ticks)
            images.append(Panel(paper.label, rates, size_axis, Axis("images/s", "{:,.0f}", (0, None))))
            shares = Axis("batch size / largest without a plan", "{:g}×", ticks=[row["share"] for row in short])
            level = Axis("overhead over the kernels", "%", (-0.001, 6), "symlog", (0, 0.01, 0.1, 1))
            overheads.append(Panel(paper.label, losses, shares, level))
        title = "Throughput against batch size, and overhead where memory is short: RTX 2080 Ti, 11 GB"
        return Chart(title, [*images, *overheads], 3, (4.9, 3.0), (0.0, 1.4))


def rate(row: Row, method: str) -> float | None:
    """Returns the images per second, or None if nothing fits."""
    result = row["methods"][method]
    return float(row["batch"] / result["iteration_ns"] * 1e9) if result else None


def cells(row: Row) -> list[str]:
    """Returns the images/s of every method."""
    runs = [(rate(row, method), row["methods"][method]) for method in METHODS]
    return [f"{images:,.0f}{' (all)' * (run['planner'] == 'vdnn_all')}" if images else "–" for images, run in runs]


# Section 4.3: parts of the iteration, as far as the text gives them.
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "vgg16": {
        "vDNN": {"swapping": 0.75},
        "SuperNeurons": {"recomputation": 0.205, "swapping": 0.09},
        "HOME": {"overlap": 0.57, "swapping": 0.0},
    },
    "inception_v3_cifar": {"vDNN": {"swapping": 0.34}, "Capuchin": {"swapping": 0.05}, "HOME": {"swapping": 0.01}},
}


class Fig7(Figure):
    """Fig. 7: breakdown of an iteration of vDNN, SuperNeurons, Capuchin and HOME."""

    name = "home_fig7"

    def tasks(self, settings: DictConfig) -> list[Row]:
        batches = figures.batch_sizes(settings, 2)
        for name in batches.keys() - NETWORKS.keys():
            raise cli.UsageError(f"figure.batches: {name!r} is not one of HOME's networks ({', '.join(NETWORKS)})")
        return [{"network": name, "batch": batch, **home.search_options(settings)} for name, batch in batches.items()]

    def run(self, task: Row, machine: Machine) -> Row:
        sizes = home.sizes(task["network"], machine)
        program = sizes.at_batch(task["batch"])
        results: dict[str, Row | None] = {}
        for method in list(METHODS)[1:]:  # all but PyTorch
            plan = home.first_plan(method, program, machine, task)
            results[method] = None
            if plan is not None:
                timeline = simulate(program, plan, machine, machine.memory_bytes)
                results[method] = {"planner": plan.planner, "iteration_ns": timeline.iteration_ns,
                                   "overhead": timeline.overhead, "parts": split_iteration(timeline)}  # fmt: skip
        return {"unplanned": home.unplanned_batch(sizes), "ideal_ns": program.ideal_ns, "methods": results}

    def numbers(self, rows: list[Row]) -> Row:
        return {"lines": fig7_lines(rows)}

    def chart(self, rows: list[Row]) -> Chart:
        times, shares = [], []
        for row in rows:
            methods, unit = fig7_lines([row]), row["ideal_ns"]
            marks: list[Mark] = [Rule(1)]
            starts = np.zeros(len(methods))
            longest = max((line["found"]["iteration_ns"] for line in methods if line["found"]), default=0) / unit
            for part, ink in PARTS.items():
                width = np.array([line["found"]["parts"][part] / unit if line["found"] else 0.0 for line in methods])
                texts = [f"{line['ours'][part] or 0:.0%}" * bool(w > 0.08 * longest)
                         for line, w in zip(methods, width, strict=True)]  # fmt: skip
                marks.append(Bars(range(len(methods)), width, ink, part, 0.62, starts, texts=texts, inside=True,
                                  hatch=HATCHES[part]))  # fmt: skip
                starts = starts + width
            for y, line in enumerate(methods):
                text = f"  {line['found']['overhead']:+.2%}" if line["found"] else "  does not fit"
                marks.append(Words(starts[y], y, text, "left"))
            x_axis = Axis("iteration time, over that of the kernels alone", "{:g}×", (0, 1.2 * longest))
            title = f"{NETWORKS[row['network']].label}, batch {row['batch']:,}"
            times.append(Panel(title, marks, x_axis, Axis(names=[line["method"] for line in methods])))
            stated = [(f"{line['method']}: {part}", value, line["ours"][part])
                      for line in methods for part, value in line["paper"].items() if value is not None]  # fmt: skip
            if stated:
                names, theirs, ours = zip(*stated, strict=True)
                share_marks = visible_pairs(Look("share", INK, "o"), theirs, ours)
                x_axis = Axis("share of the iteration", "%", (-0.03, 0.8))
                shares.append(Panel("Shares that the paper states", share_marks, x_axis, Axis(names=names)))
        panels = [panel for group in zip_longest(times, shares) for panel in group if panel]
        title = "Where an iteration's time goes, in 11 GB of an RTX 2080 Ti"
        return Chart(title, panels, 2, (7.4, 3.3), keys=6)


def split_iteration(timeline: Timeline) -> dict[str, int]:
    """Splits the last iteration into ns of computation, overlap, recomputation and swapping."""
    begin, end = timeline.last_start_ns, timeline.boundaries[-1]
    kernels, outs, ins = (
        [(max(s.start_ns, begin), min(s.end_ns, end)) for s in timeline.spans if s.kind == kind and s.end_ns > begin]
        for kind in ("kernel", "swap_out", "swap_in")
    )
    overlap_out, overlap_in = intersect(kernels, outs), intersect(kernels, ins)
    overlap_ns = sum(b - a for a, b in overlap_out + overlap_in) - sum(b - a for a, b in intersect(overlap_out, ins))
    breakdown = timeline.breakdown
    waits = breakdown.stall_memory_ns + breakdown.stall_data_ns
    return dict(zip(PARTS, (breakdown.compute_ns - overlap_ns, overlap_ns, breakdown.recompute_ns, waits), strict=True))


def intersect(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the intersections of two lists of disjoint intervals."""
    pairs = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return [(start, end) for start, end in pairs if start < end]


def fig7_lines(rows: list[Row]) -> list[Row]:
    """Returns a line per network and method; table cells have the paper's share, if stated, and ours."""
    lines = []
    for row in rows:
        for method, result in row["methods"].items():
            ours = {part: result["parts"][part] / result["iteration_ns"] if result else None for part in PARTS}
            paper = {**dict.fromkeys(PARTS), **(PAPER.get(row["network"], {}).get(method, {}) if result else {})}
            shares = [(paper[part], ours[part]) for part in PARTS]
            lines.append({
                "network": NETWORKS[row["network"]].label, "batch": row["batch"], "ours": ours, "paper": paper,
                "method": f"{method} (all layers)" if result and result["planner"] == "vdnn_all" else method,
                "ms": f"{result['iteration_ns'] / 1e6:,.0f} ({result['overhead']:+.2%})" if result else "does not fit",
                "cells": ["" if b is None else f"{b:.1%}" if a is None else f"{a:.1%} / {b:.1%}" for a, b in shares],
                "found": result,
            })  # fmt: skip
    return lines


HATCHES = {"computation": "", "overlap": "//", "recomputation": "xx", "swapping": ".."}
EXECUTORS = {"streams": "launches from Python", "graph": "one CUDA graph"}
GRAPH, STREAMS = EXECUTORS["graph"], EXECUTORS["streams"]
REPLAYED = {"resnet50_imagenet_bf16": "ResNet-50", "gpt2_medium_bf16": "GPT-2 medium", "llama_bf16": "Llama"}


class Fig9(Figure):
    """Fig. 9: times predicted by the evaluator, and measured on an H200."""

    name = "home_fig9"

    def tasks(self, settings: DictConfig) -> list[Row]:
        return [{"executor": EXECUTORS[name]} for name in choices(settings, "executors", EXECUTORS)]

    def run(self, task: Row, machine: Machine) -> Row:
        if task["executor"] == STREAMS:
            return {"replays": [row._asdict() for row in replays()]}
        replayed = []
        for row in load_json(FOLDER / "probe.json", lambda data: data["rows"]):  # type: ignore[index]
            if row["section"] == "graph_replay":
                _, workload, fraction, planner = row["plan"].split("-")
                predicted, measured = row["predicted"], row["measured"]
                replay = Replay(workload, float(fraction), planner, False, predicted, predicted, measured)
                replayed.append(replay._asdict())
        return {"replays": replayed}

    def numbers(self, rows: list[Row]) -> Row:
        lines = [
            {**run, "executor": row["executor"], "error": run["predicted_ns"] / run["measured_ns"] - 1,
             "label": f"{REPLAYED[run['workload']]} {run['fraction']:.0%}, {run['planner']}"}
            for row in sorted(rows, key=lambda row: row["executor"] != GRAPH) for run in row["replays"]
        ]  # fmt: skip
        plans: dict[str, Row] = {}
        summary: Row = {}
        for name, executor in (("graph", GRAPH), ("streams", STREAMS)):
            group = [run for run in lines if run["executor"] == executor]
            errors = [abs(run["error"]) for run in group]
            before = [abs(run["before_ns"] / run["measured_ns"] - 1) for run in group]
            summary[f"{name}_all"] = None
            if group:
                summary[f"{name}_all"] = {"plans": len(group), "mean": fmean(errors), "worst": max(errors),
                                          "before": fmean(before)}  # fmt: skip
            for run in group:
                plans.setdefault(run["label"], {"label": run["label"], "graph": None, "streams": None})[name] = run
        return {"lines": lines, "plans": list(plans.values()), **summary}

    def chart(self, rows: list[Row]) -> Chart:
        lines = self.numbers(rows)["lines"]
        names = list(dict.fromkeys(line["label"] for line in lines))
        marks: list[Line | Rule] = [Rule(0), Rule(1, line=":", text="paper: below 1 %"), Rule(-1, line=":")]
        for executor, colour, marker in ((GRAPH, look("home").colour, "o"), (STREAMS, INK, "^")):
            group = [line for line in lines if line["executor"] == executor]
            positions, errors = [names.index(line["label"]) for line in group], [100 * line["error"] for line in group]
            marks.append(Line(errors, positions, colour, executor, marker, "", hollow=executor == STREAMS))
        panel = Panel("", marks, Axis("predicted − measured, % of measured", "{:g}"), Axis(names=names))
        return Chart("Simulated iterations against replays on an H200", [panel], size=(6.5, 0.3 * len(names) + 1.2))


STATED = {"resnet18_cifar": 16, "squeezenet": 30, "inception_v3_cifar": 89}  # iterations until close to the end
OTHERS = 42  # "other models only need 42 iterations on average"
NEAR = 0.01  # of the final time; counts as "close"
MARKERS = {"worst": "v", "mean": "s", "best": "o"}
NAMES = dict(zip(UPDATES, ("Algorithm 3", "one evaluation"), strict=True))


class Fig8(Figure):
    """Fig. 8: worst, average and best particle over the iterations of HOME's search."""

    name = "home_fig8"
    paper_networks = NETWORKS

    def tasks(self, settings: DictConfig) -> list[Row]:
        share, options = home.batch_share(settings), home.search_options(settings)
        seeds = figures.integers(settings, "seeds", 0)
        return [
            {**task, "share": share, "update": update, "seed": seed, **options}
            for task, update, seed in product(super().tasks(settings), UPDATES, seeds)
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        sizes = home.sizes(task["network"], machine)
        batch = round(task["share"] * home.unplanned_batch(sizes))
        program = sizes.at_batch(batch)
        options = {key: task[key] for key in ("particles", "iterations", "seed", "update")}
        planner = HOME(**options, jobs=1)
        planner.plan(program, machine, machine.memory_bytes)
        history = planner.history
        return {
            "batch": batch, "ideal_ns": program.ideal_ns,
            "worst": [i.worst_ns if i.feasible else None for i in history],
            "mean": [round(i.mean_ns) if i.feasible else None for i in history],
            "best": [i.best_ns if i.feasible else None for i in history],
            "fit": [i.feasible for i in history], "calls": planner.simulator_calls,
        }  # fmt: skip

    def numbers(self, rows: list[Row]) -> Row:
        keys = figures.group_by(({**row, "key": (row["network"], row["update"])} for row in rows), "key")
        networks = [fig8_facts(runs) for runs in keys.values()]
        ends = [net["last"] for net in networks]
        printed, single = ([row for row in rows if row["update"] == update] for update in UPDATES)
        return {
            "networks": networks, "near": NEAR, "particles": rows[0]["particles"],
            "needed": span(map(iterations_needed, printed)), "needed_whole": span(map(iterations_needed, single)),
            "worse": span(b - a for a, b in zip(ends[::2], ends[1::2], strict=False)),
            "each": span(r["calls"] / len(r["best"]) for r in printed),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        panels = []
        names = {"worst": "worst particle", "mean": "mean of the particles", "best": "best particle"}
        for network, runs in figures.group_by(rows).items():
            marks: list[Mark] = [Rule(1, horizontal=True)]
            stated = network in STATED
            text = "paper: close to the end" if stated else f"paper: {OTHERS}, mean of all but InceptionV3"
            marks.append(Rule(STATED.get(network, OTHERS), colour=FAINT, label=text, line=DASHED if stated else DOTTED))
            updates = figures.group_by(runs, "update")
            for key, ink in SWARM.items():
                seeds = [np.array(run[key], float) / run["ideal_ns"] for run in updates[UPDATES[0]]]
                marks += [Line(range(1, len(y) + 1), y, ink, width=0.8, alpha=0.5) for y in seeds]
                mean = curve(updates[UPDATES[0]], key)
                marks.append(Line(range(1, len(mean) + 1), mean, ink, names[key], MARKERS[key], width=2))
            best = curve(updates[UPDATES[1]], "best")
            label = "best, one evaluation per particle"
            marks.append(Line(range(1, len(best) + 1), best, INK, label, line="--", front=4))
            converged = round(fmean(map(iterations_needed, updates[UPDATES[1]])))
            label = f"the same, within {NEAR:.0%} of its end"
            marks.append(Line([converged], [best[converged - 1]], INK, label, "*", "", size=12, front=5))
            title = f"{NETWORKS[network].label}, batch {runs[0]['batch']:,}"
            x = Axis("iteration of the search", "{:g}", scale="log", ticks=(1, 10, 100, 500))
            panels.append(Panel(title, marks, x, Axis("iteration time / kernels alone", "{:g}×")))
        title = "HOME's search: particles that fit 11 GB, by iteration time; thin lines are single seeds"
        return Chart(title, panels, 3, (4.4, 3.2), (0.0, 1.1))


def curve(runs: list[Row], key: str) -> NDArray[np.float64]:
    """Returns the swarm's best, mean or worst iteration time per search iteration, averaged over seeds.

    The result is float64[iterations], relative to total kernel time. A search that ended early keeps its last value.
    Iterations without a feasible particle are NaN.
    """
    length = max(len(run[key]) for run in runs)
    padded = [np.array(run[key] + run[key][-1:] * (length - len(run[key])), float) for run in runs]
    return np.asarray(np.mean([times / run["ideal_ns"] for times, run in zip(padded, runs, strict=True)], axis=0))


def iterations_needed(run: Row) -> int:
    """Returns the iterations until the best particle is within ``NEAR`` of the final one."""
    best = run["best"]
    return next(i for i, ns in enumerate(best, 1) if ns is not None and ns <= (1 + NEAR) * best[-1])


def fig8_facts(runs: list[Row]) -> Row:
    """Returns the means over the seeds of one network with one update rule."""
    network, best = runs[0]["network"], curve(runs, "best")
    return {
        "label": NETWORKS[network].label, "update": NAMES[runs[0]["update"]],
        "paper": STATED.get(network, f"(mean {OTHERS})"), "needed": fmean(map(iterations_needed, runs)),
        "calls": fmean(run["calls"] / len(run["best"]) for run in runs), "first": best[0], "last": best[-1],
    }  # fmt: skip


EVALUATIONS = 500  # timed


class Table3(Figure):
    """Table 3: cost of HOME's search, and of one evaluation of a policy."""

    name = "home_table3"
    paper_networks = NETWORKS
    simulated = False

    def tasks(self, settings: DictConfig) -> list[Row]:
        options = {"share": home.batch_share(settings), **home.search_options(settings)}
        return [{**task, **options} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        sizes = home.sizes(task["network"], machine)
        program = sizes.at_batch(round(task["share"] * home.unplanned_batch(sizes)))
        warm_up(machine, "home")
        planner = HOME(particles=task["particles"], iterations=task["iterations"], jobs=1)
        begin = time.process_time()
        planner.plan(program, machine, machine.memory_bytes)
        search_s = time.process_time() - begin
        gaps = [m.gap for m in feature_maps(program)]
        evaluator = Evaluator(Engine(program, machine, machine.memory_bytes), gaps)
        rng = np.random.default_rng(0)
        modes = [placements(program, gap, "joint") for gap in gaps]
        particles = np.stack([rng.choice(np.array(mode, np.int8), EVALUATIONS) for mode in modes], axis=1)
        begin = time.process_time()
        evaluator.evaluate(particles)
        return {
            "kernels": len(program.kernels), "maps": len(gaps), "search_s": search_s,
            "iterations_run": len(planner.history), "calls": planner.simulator_calls,
            "evaluation_s": (time.process_time() - begin) / EVALUATIONS, "processor": processor(),
        }  # fmt: skip

    def numbers(self, rows: list[Row]) -> Row:
        networks = [table3_facts(row) for row in rows]
        return {
            "networks": networks, "processors": sorted({row["processor"] for row in rows}),
            "particles": rows[0]["particles"], "times": span(net["time"] for net in networks),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        networks = [table3_facts(row) for row in rows]
        names = Axis(names=[net["label"] for net in networks])
        panels = []
        search, single = ("search_paper", "search_s"), ("paper_ms", "ms")
        for title, unit, keys in (("The whole search", "seconds", search), ("One evaluation", "milliseconds", single)):
            theirs, ours = ([net[key] for net in networks] for key in keys)
            join, hollow, filled = pairs(look("home"), theirs, ours)
            marks = [join, replace(hollow, texts=[f"{x:.3g}" for x in theirs]),
                     replace(filled, texts=[f"{x:.2g}" for x in ours], side="left")]  # fmt: skip
            low, high = min(*theirs, *ours), max(*theirs, *ours)
            ticks = [10.0**n for n in range(-3, 4) if low / 3 <= 10.0**n <= 3 * high]
            panels.append(Panel(title, marks, Axis(unit, "{:g}", (low / 3, 3 * high), "log", ticks), names))
        title = "What HOME's search costs: the paper's in 16 threads, ours in one process"
        return Chart(title, panels, size=(5.5, 0.42 * len(rows) + 0.9))


def processor() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())  # fmt: skip


def table3_facts(row: Row) -> Row:
    """Returns one network's numbers with the paper's."""
    paper = NETWORKS[row["network"]]
    return {
        **row, "label": paper.label, "search_paper": paper.search_s, "paper_ms": paper.evaluation_ms,
        "ms": row["evaluation_s"] * 1e3, "time": paper.evaluation_ms / 1e3 / row["evaluation_s"],
    }  # fmt: skip
