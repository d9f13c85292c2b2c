"""HOME's Table 2 and Fig. 6, 7 and 9: largest batches, throughput, parts of an iteration, predicted times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
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
from experiments.figures.home_networks import ASPLOS, DASHES, LOOKS, METHODS, NETWORKS, TABLE2
from experiments.measured.replays import FOLDER, Replay, replays
from experiments.plotting.charts import ONE, Axis, Bars, Chart, Line, Mark, Panel, Rule, Values, Words, pairs
from experiments.plotting.palette import INK, PARTS, Look, look
from simulator.compiled.engine import simulate
from simulator.files import load_json
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import Timeline


class Table2(Figure):
    """Table 2: largest batches of PyTorch, Capuchin and HOME, also at a bounded loss, and their images per second."""

    name = "home_table2"
    among = NETWORKS

    def tasks(self, settings: DictConfig) -> list[Row]:
        resolution = cli.number(settings, "resolution")
        if not 0 < resolution < 1:
            raise cli.UsageError(f"figure.resolution: expected a number between 0 and 1, got {resolution}")
        options = {"resolution": resolution, "slower": cli.number(settings, "slower"), **home.search(settings)}
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

        def fast(method: str, batch: int) -> bool:
            found = home.outcome(of.at(batch), plan(method, batch), machine)
            return found is not None and found["iteration_ns"] / batch <= longest_ns

        plain = home.unplanned(of)
        longest_ns = (1 + task["slower"]) * of.at(plain).ideal_ns / plain  # per image
        bounds = {method: largest(partial(within, method), plain, home.MOST) for method in TABLE2}
        found = {}
        for method, i in TABLE2.items():
            batch = highest(partial(fits, method), plain, bounds[method], task["resolution"])
            bounded = highest(partial(fast, method), plain, batch, task["resolution"])
            program = of.timed(home.program(network, machine, batch))
            if program.fingerprint != of.at(batch).fingerprint:
                raise AssertionError(f"{network}: the capture at batch {batch} differs from the planned program")
            theirs = NETWORKS[network].batch[i]
            found[method] = {
                "batch": batch, "bound": bounds[method], "bounded": bounded,
                "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns,
                **(home.outcome(program, plan(method, batch), machine) or {}),
                "at_paper": home.outcome(of.at(theirs), plan(method, theirs), machine),
            }  # fmt: skip
        return {"limit": machine.memory_bytes, "factor": of.factor, "found": found}

    def numbers(self, rows: list[Row]) -> Row:
        networks = [facts(row) for row in rows]
        return {
            "networks": networks, "limit": rows[0]["limit"], "slower": rows[0]["slower"], "count": len(rows),
            **{f"{key}s": span(one[key] for one in networks)
               for key in ("more", "part", "gain", "gain_paper", "bounded_over")},
            "ahead": [
                {"rival": rival, **{key: sum(one[key]["HOME"] > one[key][rival] for one in networks)
                                    for key in ("batches", "bounded", "rate")}}
                for rival in ("Capuchin", ASPLOS)
            ],
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found = [facts(row) for row in rows]
        panels: dict[str, list[Mark]] = {key: [ONE] for key in ("batches", "bounded", "rate_at", "rate")}
        for shift, method in zip((-0.25, 0, 0.25), ("Capuchin", ASPLOS, "HOME"), strict=True):
            for key, marks in panels.items():
                paper = "paper_batch" if key.startswith("b") else "paper_rate"
                unit = "batches" if key.startswith("b") else "rate"
                theirs = [one[paper][TABLE2[method]] / one[paper][0] for one in found]
                ours = [one[key][method] and one[key][method] / one[unit]["PyTorch"] for one in found]
                line, hollow, filled = visible_pairs(LOOKS[method], theirs, ours, shift)
                marks += [filled] if method == ASPLOS else [line, hollow, filled]  # the paper has one Capuchin
        titles = ("Largest batch", f"Largest batch, at most {rows[0]['slower']:.0%} slower per image",
                  "Images/s at the paper's batch", "Images/s at the largest batch")  # fmt: skip
        names = Axis(names=[one["label"] for one in found])
        return Chart(
            "Largest batch and throughput in the 11 GB of an RTX 2080 Ti",
            [Panel(title, marks, Axis("over PyTorch's at its largest batch", "{:g}×", (0, None)), names)
             for title, marks in zip(titles, panels.values(), strict=True)],
            2, (6.5, 0.6 * len(rows) + 0.6), keys=5,
        )  # fmt: skip


def visible_pairs(look: Look, theirs: Sequence[float], ours: Values, shift: float = 0.0) -> list[Mark]:
    """Returns ``pairs`` with markers of two sizes, so that both are visible where the values are equal."""
    line, hollow, filled = pairs(look, theirs, ours, shift)
    return [line, replace(hollow, size=11), replace(filled, size=5)]


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
    at_paper = {m: one["at_paper"] and paper.batch[TABLE2[m]] / one["at_paper"]["iteration_ns"] * 1e9
                for m, one in found.items()}  # fmt: skip
    home_ = found["HOME"]
    return {
        **home_, "label": paper.label, "paper_batch": paper.batch, "paper_rate": paper.throughput, "rate_at": at_paper,
        "batches": {m: one["batch"] for m, one in found.items()},
        "bounded": {m: one["bounded"] for m, one in found.items()},
        "bounded_over": home_["bounded"] / found["PyTorch"]["batch"],
        "rate": {m: one["batch"] / one["iteration_ns"] * 1e9 for m, one in found.items()},
        "times_paper": paper.batch[2] / paper.batch[0], "times": home_["batch"] / found["PyTorch"]["batch"],
        "gain": ideal["HOME"] / ideal["PyTorch"] - 1, "gain_paper": paper.throughput[2] / paper.throughput[0] - 1,
        "part": paper.batch[2] / home_["batch"], "more": found["PyTorch"]["batch"] / paper.batch[0] - 1,
    }  # fmt: skip


FIG6_SHOWN = (1.0, 2.0)  # shares in the table; the picture shows all
COMPARED = 0.5  # least share of the claims; the paper's batches are large
CLAIMS = {"vDNN": 5.7, "SuperNeurons": 2.0, "Capuchin": 1.3, ASPLOS: 1.3}  # "up to": HOME's throughput over theirs


class Fig6(Figure):
    """Fig. 6: images per second against the batch size, with the kernel-time model at each size."""

    name = "home_fig6"
    among = NETWORKS

    def tasks(self, settings: DictConfig) -> list[Row]:
        shares = figures.numbers(settings, "shares", lambda value: 0 < value < float("inf"), "positive numbers")
        options = home.search(settings)
        return [{**task, "share": share, **options} for task in super().tasks(settings) for share in sorted(shares)]

    def run(self, task: Row, machine: Machine) -> Row:
        batch = max(round(task["share"] * home.unplanned(home.sizes(task["network"], machine))), 2)
        program = home.modeled(task["network"], machine, batch)
        plans = {method: home.planned(method, program, machine, task) for method in METHODS}
        found = {method: home.outcome(program, plan, machine) for method, plan in plans.items()}
        return {"batch": batch, "limit": machine.memory_bytes, "ideal_ns": program.ideal_ns, "methods": found}

    def numbers(self, rows: list[Row]) -> Row:
        claims = []
        for rival, theirs in CLAIMS.items():
            both = [(ours / other, f"{NETWORKS[r['network']].label}, batch {r['batch']:,}", r["share"] > 1)
                    for r in rows if r["share"] >= COMPARED
                    if (ours := rate(r, "HOME")) and (other := rate(r, rival))]  # fmt: skip
            needed = [times for times, _, is_needed in both if is_needed]
            if both:
                claims.append({"rival": rival, "theirs": theirs, "least": min(both), "most": max(both),
                               "behind": sum(times < 1 for times in needed), "needed": len(needed)})  # fmt: skip
        growth, gains, over_plain = [], [], []
        for lines in figures.grouped(rows).values():
            images = [row["batch"] / row["ideal_ns"] for row in lines]
            plain = [one for row, one in zip(lines, images, strict=True) if row["methods"]["PyTorch"]]
            if plain:
                growth.append(plain[-1] / plain[0])
                gains.append(images[-1] / plain[-1] - 1)
                over_plain.append(max(rate(row, "HOME") or 0.0 for row in lines) / plain[-1] / 1e9)
        return {
            "methods": METHODS,
            "lines": [{**r, "label": NETWORKS[r["network"]].label, "cells": cells(r)}
                      for r in rows if r["share"] in FIG6_SHOWN],
            "claims": claims, "growth": span(growth), "gain": span(gains), "smallest": min(r["share"] for r in rows),
            "over_plain": max(over_plain, default=None),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        images, overheads = [], []
        for network, lines in figures.grouped(rows).items():
            paper, short = NETWORKS[network], [row for row in lines if row["share"] > 1]
            above: list[Mark] = []
            below: list[Mark] = []
            for method, (_, colour, marker) in LOOKS.items():
                dash, name = DASHES.get(method, "-"), f"{method}, ours"
                if method != "PyTorch":
                    overhead = [(row["methods"][method] or {}).get("overhead") for row in short]
                    label = f"{name} (overhead only)" * (method == ASPLOS)
                    below.append(Line([row["share"] for row in short], overhead, colour, label, marker, dash, size=5,
                                      hollow=method == ASPLOS))  # fmt: skip
                if method == ASPLOS:  # its images/s would hide Capuchin's
                    continue
                kept = [r for r in lines if r["share"] >= 1 or method in ("PyTorch", "vDNN")]
                width, size = (2.8, 6) if method == "HOME" else (1.5, 7 if method == "PyTorch" else 4)
                above.append(Line([row["batch"] for row in kept], [rate(row, method) for row in kept], colour,
                                  name + " (after the drop: all layers)" * (method == "vDNN"), marker, dash, width,
                                  size, front={"HOME": 2.5, "Capuchin": 3.5}.get(method, 3)))  # fmt: skip
                if (i := TABLE2.get(method)) is not None:
                    label = f"{method}, largest batch in the paper (Table 2)"
                    above.append(Line([paper.batch[i]], [paper.throughput[i]], colour, label, marker, "", size=9,
                                      hollow=True, front=4))  # fmt: skip
            ticks = [10**n for n in range(6) if lines[0]["batch"] <= 10**n <= lines[-1]["batch"]]
            size_axis = Axis("batch size", "{:,.0f}", scale="log", ticks=ticks)
            images.append(Panel(paper.label, above, size_axis, Axis("images/s", "{:,.0f}", (0, None))))
            shares = Axis("batch size / largest without a plan", "{:g}×", ticks=[row["share"] for row in short])
            level = Axis("overhead over the kernels", "%", (-0.001, 6), "symlog", (0, 0.01, 0.1, 1))
            overheads.append(Panel(paper.label, below, shares, level))
        title = "Throughput against batch size, and overhead where memory is short: RTX 2080 Ti, 11 GB"
        return Chart(title, [*images, *overheads], 3, (4.9, 3.0), (0.0, 1.4))


def rate(row: Row, method: str) -> float | None:
    """Returns the images per second, or None if nothing fits."""
    found = row["methods"][method]
    return float(row["batch"] / found["iteration_ns"] * 1e9) if found else None


def cells(row: Row) -> list[str]:
    """Returns the images/s of every method."""
    found = [(rate(row, method), row["methods"][method]) for method in METHODS]
    return [f"{images:,.0f}{' (all)' * (of['planner'] == 'vdnn_all')}" if images else "–" for images, of in found]


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
        options, batches = home.search(settings), cli.to_dict(settings.batches)
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
            both = here if "recomputation" in theirs else None
            networks.append({
                "label": NETWORKS[row["network"]].label,
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
        times, shares = [], []
        for row in rows:
            methods, unit = fig7_lines([row]), row["ideal_ns"]
            marks: list[Mark] = [Rule(1)]
            left = np.zeros(len(methods))
            longest = max((one["found"]["iteration_ns"] for one in methods if one["found"]), default=0) / unit
            for part, ink in PARTS.items():
                width = np.array([one["found"]["parts"][part] / unit if one["found"] else 0.0 for one in methods])
                texts = [f"{one['ours'][part] or 0:.0%}" * bool(w > 0.08 * longest)
                         for one, w in zip(methods, width, strict=True)]  # fmt: skip
                marks.append(Bars(range(len(methods)), width, ink, part, 0.62, left, texts=texts, inside=True,
                                  hatch=HATCHES[part]))  # fmt: skip
                left = left + width
            for y, one in enumerate(methods):
                text = f"  {one['found']['overhead']:+.2%}" if one["found"] else "  does not fit"
                marks.append(Words(left[y], y, text, "left"))
            where = Axis("iteration time, over that of the kernels alone", "{:g}×", (0, 1.2 * longest))
            title = f"{NETWORKS[row['network']].label}, batch {row['batch']:,}"
            times.append(Panel(title, marks, where, Axis(names=[one["method"] for one in methods])))
            stated = [(f"{one['method']}: {part}", value, one["ours"][part])
                      for one in methods for part, value in one["paper"].items() if value is not None]  # fmt: skip
            if stated:
                names, theirs, ours = zip(*stated, strict=True)
                both = visible_pairs(Look("share", INK, "o"), theirs, ours)
                where = Axis("share of the iteration", "%", (-0.03, 0.8))
                shares.append(Panel("Shares that the paper states", both, where, Axis(names=names)))
        panels = [panel for one in zip_longest(times, shares) for panel in one if panel]
        title = "Where an iteration's time goes, in 11 GB of an RTX 2080 Ti"
        return Chart(title, panels, 2, (7.4, 3.3), keys=6)


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
            "ms": f"{found['iteration_ns'] / 1e6:,.0f} ({found['overhead']:+.2%})" if found else "does not fit",
        }
        for row in rows
        for method, found in row["methods"].items()
    ]  # fmt: skip


HATCHES = {"computation": "", "overlap": "//", "recomputation": "xx", "swapping": ".."}
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
        plans: dict[str, Row] = {}
        for one in found:
            kind = "graph" if one["executor"] == GRAPH else "streams"
            plans.setdefault(one["label"], {"label": one["label"], "graph": None, "streams": None})[kind] = one
        return {"lines": found, "plans": list(plans.values()), **out}

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
