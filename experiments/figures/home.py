"""HOME's Table 2 and Fig. 6, 7 and 9: largest batches, throughput, parts of an iteration, predicted times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from statistics import fmean

import numpy as np
from omegaconf import DictConfig

from agents.heuristics.layers import feature_maps
from agents.planner import MIB, Candidates
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import chosen, home_networks as home
from experiments.figures.figure import Figure, span
from experiments.figures.home_networks import METHODS, NETWORKS, TABLE2
from experiments.measured.replays import FOLDER, Replay, replays
from experiments.plotting import palette
from experiments.plotting.charts import ONE, Axis, Bars, Chart, Line, Mark, Panel, Rule, Words, pairs
from experiments.plotting.palette import INK, PARTS, look
from simulator.compiled.engine import simulate
from simulator.files import load_json
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import Timeline


class Table2(Figure):
    """Table 2: largest batches of PyTorch, Capuchin and HOME, and their images per second."""

    name = "home_table2"
    among = NETWORKS

    def tasks(self, settings: DictConfig) -> list[Row]:
        resolution = cli.number(settings, "resolution")
        if not 0 < resolution < 1:
            raise cli.UsageError(f"figure.resolution: expected a number between 0 and 1, got {resolution}")
        options = {"resolution": resolution, **home.search(settings)}
        return [{**task, **options} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        network = task["network"]
        of = home.sizes(network, machine)

        @cache
        def plan(method: str, batch: int) -> Plan | None:
            return home.planned(method, of.at(batch), machine, task)

        def within(method: str, batch: int) -> bool:
            return least(method, of.at(batch)) <= machine.memory_bytes

        def fits(method: str, batch: int) -> bool:
            return plan(method, batch) is not None

        plain = home.unplanned(of)
        bounds = {method: largest(partial(within, method), plain, home.MOST) for method in TABLE2}
        found = {}
        for i, method in enumerate(TABLE2):
            batch = highest(partial(fits, method), plain, bounds[method], task["resolution"])
            program = of.timed(home.program(network, machine, batch))
            if program.fingerprint != of.at(batch).fingerprint:
                raise AssertionError(f"{network}: the capture at batch {batch} differs from the planned program")
            theirs = NETWORKS[network].batch[i]
            found[method] = {
                "batch": batch, "bound": bounds[method], "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns,
                **(home.outcome(program, plan(method, batch), machine) or {}),
                "at_paper": home.outcome(of.at(theirs), plan(method, theirs), machine),
            }  # fmt: skip
        return {"limit": machine.memory_bytes, "factor": of.factor, "found": found}

    def numbers(self, rows: list[Row]) -> Row:
        networks = [facts(row) for row in rows]
        return {
            "networks": networks, "limit": rows[0]["limit"], "count": len(rows),
            **{f"{key}s": span(one[key] for one in networks) for key in ("more", "part", "gain", "gain_paper")},
            **{f"{key}_ahead": sum(one[key]["HOME"] > one[key]["Capuchin"] for one in networks)
               for key in ("batches", "rate")},
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found = [facts(row) for row in rows]
        panels: list[list[Mark]] = [[ONE], [ONE], [ONE]]
        for shift, (i, method) in zip((-0.17, 0.17), ((1, "Capuchin"), (2, "HOME")), strict=True):
            how = palette.look(method.lower())._replace(label=method)
            batch, rate = ([one[key][i] / one[key][0] for one in found] for key in ("paper_batch", "paper_rate"))
            panels[0] += pairs(how, batch, [one["batches"][method] / one["batches"]["PyTorch"] for one in found], shift)
            for marks, key in zip(panels[1:], ("rate_at", "rate"), strict=True):
                ours = [one[key][method] and one[key][method] / one["rate"]["PyTorch"] for one in found]
                marks += pairs(how, rate, ours, shift)
        titles = ("Largest batch", "Images/s at the paper's batch", "Images/s at one's own largest batch")
        names = Axis(names=[one["label"] for one in found])
        return Chart(
            "Largest batch and throughput in the 11 GB of an RTX 2080 Ti",
            [Panel(title, marks, Axis("over PyTorch's at its largest batch", "{:g}×", (0, None)), names)
             for title, marks in zip(titles, panels, strict=True)],
            size=(4.6, 0.5 * len(rows) + 1.0),
        )  # fmt: skip


def least(method: str, program: Program) -> int:
    """Returns a lower bound on a method's bytes: the peak with everything swapped out that the method may move."""
    if method == "PyTorch":
        return program.peak_bytes
    gaps = [m.gap for m in feature_maps(program)] if method == "HOME" else program.gaps(MIB)
    return Candidates(program, gaps).least


def highest(fits: Callable[[int], bool], low: int, high: int, resolution: float) -> int:
    """Returns the largest batch that fits, to within the fraction ``resolution``.

    Args:
        low: Batch that fits.
        high: Upper bound, which is tried first.
    """
    if fits(high):
        return high
    while high - low > max(1, resolution * low):
        middle = min(2 * low, (low + high) // 2)  # approach from below: infeasible batches take longest
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def facts(row: Row) -> Row:
    """Returns one network's batches and images/s by method, at its own and at the paper's largest batch."""
    paper, found = NETWORKS[row["network"]], row["found"]
    ideal = {m: one["batch"] / one["ideal_ns"] for m, one in found.items()}
    at_paper = {m: one["at_paper"] and batch / one["at_paper"]["iteration_ns"] * 1e9
                for batch, (m, one) in zip(paper.batch, found.items(), strict=True)}  # fmt: skip
    home_ = found["HOME"]
    return {
        **home_, "label": paper.label, "paper_batch": paper.batch, "paper_rate": paper.throughput, "rate_at": at_paper,
        "cells_at": [f"{theirs:,} / " + (f"{ours:,.0f}" if ours else "does not fit")
                     for theirs, ours in list(zip(paper.throughput, at_paper.values(), strict=True))[1:]],
        "batches": {m: one["batch"] for m, one in found.items()},
        "rate": {m: one["batch"] / one["iteration_ns"] * 1e9 for m, one in found.items()},
        "times_paper": paper.batch[2] / paper.batch[0], "times": home_["batch"] / found["PyTorch"]["batch"],
        "gain": ideal["HOME"] / ideal["PyTorch"] - 1, "gain_paper": paper.throughput[2] / paper.throughput[0] - 1,
        "part": paper.batch[2] / home_["batch"], "more": found["PyTorch"]["batch"] / paper.batch[0] - 1,
    }  # fmt: skip


FIG6_SHOWN = (1.0, 2.0)  # shares in the table; the picture shows all
CLAIMS = {"vDNN": 5.7, "SuperNeurons": 2.0, "Capuchin": 1.3}  # "up to": HOME's throughput over theirs, at one batch
DASHES = {"vDNN": "-.", "SuperNeurons": ":", "Capuchin": "--"}


class Fig6(Figure):
    """Fig. 6: images per second against the batch size, five methods, six networks."""

    name = "home_fig6"
    among = NETWORKS

    def tasks(self, settings: DictConfig) -> list[Row]:
        shares = figures.numbers(settings, "shares", lambda value: 0 < value < float("inf"), "positive numbers")
        options = home.search(settings)
        return [{**task, "share": share, **options} for task in super().tasks(settings) for share in sorted(shares)]

    def run(self, task: Row, machine: Machine) -> Row:
        of = home.sizes(task["network"], machine)
        batch = round(task["share"] * home.unplanned(of))
        program = of.at(batch)
        plans = {method: home.planned(method, program, machine, task) for method in METHODS}
        found = {method: home.outcome(program, plan, machine) for method, plan in plans.items()}
        return {"batch": batch, "limit": machine.memory_bytes, "ideal_ns": program.ideal_ns, "methods": found}

    def numbers(self, rows: list[Row]) -> Row:
        claims = []
        for rival, theirs in CLAIMS.items():
            both = [(home_rate / other, f"{NETWORKS[r['network']].label}, batch {r['batch']:,}")
                    for r in rows if (home_rate := rate(r, "HOME")) and (other := rate(r, rival))]  # fmt: skip
            claims += [{"rival": rival, "theirs": theirs, "least": min(both), "most": max(both)}] if both else []
        needed = [(r["methods"]["Capuchin"], r["methods"]["HOME"]) for r in rows if not r["methods"]["PyTorch"]]
        needed = [(theirs["iteration_ns"], ours["iteration_ns"]) for theirs, ours in needed if theirs and ours]
        gains, over_plain = [], []
        for lines in figures.grouped(rows).values():
            ideal = [row["batch"] / row["ideal_ns"] for row in (lines[0], lines[-1])]
            gains.append(ideal[1] / ideal[0] - 1)
            best, plain = (max((rate(row, m) or 0.0 for row in lines), default=0.0) for m in ("HOME", "PyTorch"))
            over_plain += [best / plain] if plain else []
        return {
            "methods": METHODS,
            "lines": [{**r, "label": NETWORKS[r["network"]].label, "cells": cells(r)}
                      for r in rows if r["share"] in FIG6_SHOWN],
            "claims": claims, "needed": len(needed) or None,
            "behind": sum(theirs < ours for theirs, ours in needed),
            "over_plain": max(over_plain, default=None), "gain": max(gains),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        panels = []
        for network, lines in figures.grouped(rows).items():
            paper, marks = NETWORKS[network], []
            for method, planners in METHODS.items():
                _, colour, marker = palette.look(planners[0][0])
                x, y = [row["batch"] for row in lines], [rate(row, method) for row in lines]
                name = f"{method}, ours{' (after the drop: all layers)' * (method == 'vDNN')}"
                width, size, front = 3.5 if method == "Capuchin" else 1.5, *((9, 2) if method == "PyTorch" else (5, 3))
                dash = DASHES.get(method, "-")
                marks.append(Line(x, y, colour, name, marker, dash, width=width, size=size, front=front))
                if method in TABLE2:
                    i = TABLE2.index(method)
                    x, y = [paper.batch[i]], [paper.throughput[i]]
                    name = f"{method}'s largest batch in the paper (Table 2)"
                    marks.append(Line(x, y, colour, name, marker, "", size=9, hollow=True, front=4))
            where = Axis("batch size", "{:,.0f}", (0, None)), Axis("images/s", "{:,.0f}", (0, None))
            panels.append(Panel(paper.label, marks, *where))
        return Chart("Throughput against batch size on an RTX 2080 Ti (11 GB)", panels, 3, (4.9, 3.5), (0.0, 1.1))


def rate(row: Row, method: str) -> float | None:
    """Returns the images per second, or None if nothing fits."""
    found = row["methods"][method]
    return float(row["batch"] / found["iteration_ns"] * 1e9) if found else None


def cells(row: Row) -> list[str]:
    """Returns the images/s of every method."""
    found = [(rate(row, method), row["methods"][method]) for method in METHODS]
    return [
        f"{images:,.0f}{' (all)' * (of['planner'] == 'vdnn_all')}" if images else "does not fit" for images, of in found
    ]


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
        options, batches = home.search(settings), cli.plain(settings.batches)
        for name, batch in batches.items():
            if name not in NETWORKS:
                raise cli.UsageError(f"figure.batches: {name!r} is not one of HOME's networks ({', '.join(NETWORKS)})")
            if isinstance(batch, bool) or not isinstance(batch, int) or batch < 2:
                raise cli.UsageError(f"figure.batches.{name}: expected an integer of at least 2, got {batch!r}")
        return [{"network": name, "batch": batch, **options} for name, batch in batches.items()]

    def run(self, task: Row, machine: Machine) -> Row:
        of = home.sizes(task["network"], machine)
        program = of.at(task["batch"])
        found: dict[str, Row | None] = {}
        for method in METHODS:
            if method == "PyTorch":
                continue
            plan = home.planned(method, program, machine, task)
            found[method] = home.outcome(program, plan, machine)
            if plan is not None:
                timeline = simulate(program, plan, machine, machine.memory_bytes)
                found[method] = {"planner": plan.planner, "iteration_ns": timeline.iteration_ns}
                found[method] |= {"overhead": timeline.overhead, "parts": parts(timeline)}
        return {"unplanned": home.unplanned(of), "ideal_ns": program.ideal_ns, "methods": found}

    def numbers(self, rows: list[Row]) -> Row:
        networks = []
        for row in rows:
            theirs, here = PAPER.get(row["network"], {}).get("SuperNeurons", {}), row["methods"]["SuperNeurons"]
            said = [f"{method} {found['overhead']:+.2%}" if found else f"{method} does not fit"
                    for method, found in row["methods"].items()]  # fmt: skip
            both = here if "recomputation" in theirs else None
            networks.append({
                "label": NETWORKS[row["network"]].label, "batch": row["batch"],
                "times": row["batch"] / row["unplanned"], "said": said,
                "again": both and here["parts"]["recomputation"] / row["ideal_ns"],
                "again_paper": both and theirs["recomputation"] / (1 - theirs["recomputation"] - theirs["swapping"]),
            })  # fmt: skip
        lines = fig7_lines(rows)
        for line in lines:
            parts = zip(line["paper"].values(), line["ours"].values(), strict=True)
            line["cells"] = [
                "" if b is None else f"{a:.1%} / {b:.1%}" if a is not None else f"{b:.1%}" for a, b in parts
            ]
        return {"networks": networks, "lines": lines}

    def chart(self, rows: list[Row]) -> Chart:
        panels = []
        for row in rows:
            methods, unit = fig7_lines([row]), row["ideal_ns"]
            marks: list[Mark] = [Rule(1)]
            left = np.zeros(len(methods))
            longest = max((one["found"]["iteration_ns"] for one in methods if one["found"]), default=0) / unit
            for part, ink in PARTS.items():
                width = np.array([one["found"]["parts"][part] / unit if one["found"] else 0.0 for one in methods])
                shares = [one["ours"][part] or 0 for one in methods]
                texts = [f"{share:.0%}" * bool(w > 0.05 * longest) for share, w in zip(shares, width, strict=True)]
                marks.append(Bars(range(len(methods)), width, ink, part, 0.62, left, texts=texts, inside=True))
                left = left + width
            for y, one in enumerate(methods):
                said = [f"{part} {100 * value:g}%" for part, value in one["paper"].items() if value is not None]
                paper = f"  (paper: {', '.join(said)})" if said else ""
                text = f"  {one['found']['overhead']:+.1%}{paper}" if one["found"] else "  does not fit"
                marks.append(Words(left[y], y, text, "left"))
            where = Axis("iteration time, over that of the kernels alone", "{:g}×", (0, 1.5 * longest))
            title = f"{NETWORKS[row['network']].label}, batch {row['batch']:,}"
            panels.append(Panel(title, marks, where, Axis(names=[one["method"] for one in methods])))
        return Chart("Where an iteration's time goes, in 11 GB of an RTX 2080 Ti", panels, 1, (12.0, 2.7), keys=4)


def parts(timeline: Timeline) -> dict[str, int]:
    """Splits the last iteration into ns of computation, overlap, recomputation and swapping."""
    begin, end = timeline.last_start_ns, timeline.boundaries[-1]
    kernels, outs, ins = (
        [(max(s.start_ns, begin), min(s.end_ns, end)) for s in timeline.spans if s.kind == kind and s.end_ns > begin]
        for kind in ("kernel", "swap_out", "swap_in")
    )
    beside_out, beside_in = meet(kernels, outs), meet(kernels, ins)
    both = sum(b - a for a, b in beside_out + beside_in) - sum(b - a for a, b in meet(beside_out, ins))
    took = timeline.breakdown
    waits = took.stall_memory_ns + took.stall_data_ns
    return dict(zip(PARTS, (took.compute_ns - both, both, took.recompute_ns, waits), strict=True))


def meet(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the intersections of two lists of disjoint intervals."""
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(start, end) for start, end in pairs if start < end]


def fig7_lines(rows: list[Row]) -> list[Row]:
    """Returns a line per network and method."""
    return [
        {
            "network": NETWORKS[row["network"]].label, "batch": row["batch"], "ideal_ns": row["ideal_ns"],
            "method": f"{method} (all layers)" if found and found["planner"] == "vdnn_all" else method, "found": found,
            "ours": {part: found["parts"][part] / found["iteration_ns"] if found else None for part in PARTS},
            "paper": {**dict.fromkeys(PARTS), **(PAPER.get(row["network"], {}).get(method, {}) if found else {})},
            "ms": f"{found['iteration_ns'] / 1e6:,.0f}" if found else "does not fit",
        }
        for row in rows
        for method, found in row["methods"].items()
    ]  # fmt: skip


EXECUTORS = {"streams": "launches from Python", "graph": "one CUDA graph"}
GRAPH, STREAMS = EXECUTORS["graph"], EXECUTORS["streams"]
REPLAYED = {"resnet50_imagenet_bf16": "ResNet-50", "gpt2_medium_bf16": "GPT-2 medium", "llama_bf16": "Llama"}


class Fig9(Figure):
    """Fig. 9: times predicted by the evaluator, and measured on an H200."""

    name = "home_fig9"

    def tasks(self, settings: DictConfig) -> list[Row]:
        return [{"executor": EXECUTORS[name]} for name in chosen(settings, "executors", EXECUTORS)]

    def run(self, task: Row, machine: Machine) -> Row:
        if task["executor"] == STREAMS:
            return {"replays": [row._asdict() for row in replays()]}
        found = []
        for row in load_json(FOLDER / "probe.json", lambda data: data["rows"]):  # type: ignore[index]
            if row["section"] == "graph_replay":
                _, workload, fraction, planner = row["plan"].split("-")
                predicted, measured = row["predicted"], row["measured"]
                replay = Replay(workload, float(fraction), planner, False, predicted, predicted, measured)
                found.append(replay._asdict())
        return {"replays": found}

    def numbers(self, rows: list[Row]) -> Row:
        out: Row = {}
        found = [
            {
                **one, "executor": row["executor"], "error": one["predicted_ns"] / one["measured_ns"] - 1,
                "label": f"{REPLAYED[one['workload']]} {one['fraction']:.0%}, {one['planner']}",
            }
            for row in sorted(rows, key=lambda row: row["executor"] != GRAPH)
            for one in row["replays"]
        ]  # fmt: skip
        for name, executor in (("graph", GRAPH), ("streams", STREAMS)):
            here = [one for one in found if one["executor"] == executor]
            errors = [abs(one["error"]) for one in here]
            before = [abs(one["before_ns"] / one["measured_ns"] - 1) for one in here]
            out |= {
                f"{name}_plans": len(here), f"{name}_mean": fmean(errors) if here else None,
                f"{name}_worst": max(errors, default=None), f"{name}_before": fmean(before) if here else None,
            }  # fmt: skip
        return {"lines": found, **out}

    def chart(self, rows: list[Row]) -> Chart:
        found = self.numbers(rows)["lines"]
        names = list(dict.fromkeys(one["label"] for one in found))
        marks: list[Line | Rule] = [Rule(0), Rule(1, line=":", text="paper: below 1 %"), Rule(-1, line=":")]
        for executor, colour, marker in ((GRAPH, look("home").colour, "o"), (STREAMS, INK, "^")):
            here = [one for one in found if one["executor"] == executor]
            at, errors = [names.index(one["label"]) for one in here], [100 * one["error"] for one in here]
            marks.append(Line(errors, at, colour, executor, marker, "", hollow=executor == STREAMS))
        panel = Panel("", marks, Axis("predicted − measured, % of measured", "{:g}"), Axis(names=names))
        return Chart("Simulated iterations against replays on an H200", [panel], size=(6.5, 0.3 * len(names) + 1.2))
