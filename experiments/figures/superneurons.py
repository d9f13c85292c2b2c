"""SuperNeurons' Fig. 2, 8, 11 and 12 and Table 2, on programs captured from PyTorch."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from statistics import median
from typing import ClassVar

from omegaconf import DictConfig

import agents
from agents.heuristics import tensor_cache
from agents.heuristics.workspace import algorithms
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import published
from experiments.figures.figure import Figure, Rows, span
from experiments.plotting.charts import Axis, Chart, Line, Panel, Rule, groups
from experiments.plotting.palette import ALLOCATORS, FAINT, INK, MEASURED, PREDICTED, color
from simulator import simulate
from simulator.machine import Machine
from simulator.pool import program_lifetimes
from simulator.pool.times import allocation_ns
from simulator.program import Program


class Fig2(Figure):
    """Fig. 2: memory of a training step with and without convolution workspaces."""

    name = "superneurons_fig2"
    batch = 32

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=self.batch, algorithms=True)
        fastest = [min(algorithms(kernel)) for kernel in program.kernels]
        live_bytes = [live - kernel.workspace for live, kernel in zip(program.live_bytes, program.kernels, strict=True)]
        tensors = sum(tensor.nbytes for tensor in program.tensors)  # without freeing any
        return {
            "without": max(live_bytes),
            "fastest": max(a + b for a, (_, b, _) in zip(live_bytes, fastest, strict=True)),
            "sum": tensors + sum(nbytes for _, nbytes, _ in fastest),
            "all": tensors,
        }

    def template_values(self, rows: Rows) -> Row:
        return {
            "networks": [
                {**row, "paper": self.published.get(row["network"], "not said"), "sum_gb": row["sum"] / 1e9}
                for row in rows
            ]
        }

    def chart(self, rows: Rows) -> Chart:
        names = [figures.label(row["network"]) for row in rows]
        columns = (("all", "all tensors", PREDICTED), ("sum", "all tensors and workspaces", MEASURED))
        series = [(label, ink, [row[key] / 1e9 for row in rows], []) for key, label, ink in columns]
        theirs = [self.published.get(row["network"]) for row in rows]
        paper = Line(theirs, range(len(rows)), INK, "paper", "D", "", size=7, hollow=True, front=5)
        panel = Panel("", [*groups(series, horizontal=True), paper], Axis("GB"), Axis(names=names))
        sums = (
            f"{name}: {row['sum'] / 1e9:.1f} GB (paper: {gb})"
            for name, row, gb in zip(names, rows, theirs, strict=True)
            if gb
        )
        title = ", ".join(sums) or f"Memory of a step, batch {self.batch}"
        return Chart(title, [panel], size=(9.5, 0.55 * len(rows) + 1.0))


class Fig13(Figure):
    """Fig. 13: the sum of all tensors at the largest batches of Table 5, by framework."""

    name = "superneurons_fig13"
    paper_networks = published("superneurons_table5")
    batches = (32, 64)  # captured; sums are affine in the batch
    frameworks: ClassVar = {
        "Caffe": ("#9a9a9a", "s"),
        "MXNet": ("#1f5fa8", "^"),
        "Torch": ("#f16913", "v"),
        "TensorFlow": ("#8e5bd0", "D"),
        "SuperNeurons": ("#238b45", "o"),
    }

    def run(self, task: Row, machine: Machine) -> Row:
        name = task["network"]
        small, large = (
            sum(t.nbytes for t in figures.program(name, machine, batch_size=batch, algorithms=False).tensors)
            for batch in self.batches
        )
        slope = (large - small) // (self.batches[1] - self.batches[0])
        batches = {key: batch for key, batch in self.paper_networks[name].items() if batch is not None}
        return {"sums": {key: small + slope * (batch - self.batches[0]) for key, batch in batches.items()}}

    def template_values(self, rows: Rows) -> Row:
        networks = [
            {
                **row,
                "cells": [f"{row['sums'][key] / 1e9:,.1f}" if key in row["sums"] else "N/A" for key in self.frameworks],
                "times": row["sums"]["SuperNeurons"] / row["sums"]["Caffe"],
            }
            for row in rows
        ]
        return {
            "networks": networks,
            "heads": list(self.frameworks),
            "most": max(net["times"] for net in networks),
            "batches": max(
                batches["SuperNeurons"] / batches["Caffe"]
                for batches in (self.paper_networks[row["network"]] for row in rows)
            ),
            "paper": self.published["times"],
            "ahead": sum(max(row["sums"].values()) == row["sums"]["SuperNeurons"] for row in rows),
        }

    def chart(self, rows: Rows) -> Chart:
        names = [figures.label(row["network"]) for row in rows]
        marks = [
            Line(
                [row["sums"].get(key, 0) / 1e9 or None for row in rows],
                range(len(rows)),
                color("superneurons") if key == "SuperNeurons" else ink,
                key,
                marker,
                "",
                size=7,
            )
            for key, (ink, marker) in self.frameworks.items()
        ]
        most = self.template_values(rows)["most"]
        title = f"SuperNeurons' largest model is up to {most:.1f} times Caffe's"
        axis = Axis("all tensors of a step (GB)", scale="log", ticks=[5, 10, 20, 50, 100, 200])
        return Chart(title, [Panel("", marks, axis, Axis(names=names))], size=(8.5, 3.4), keys=5)


class Fig8(Figure):
    """Fig. 8: time and memory by type of layer."""

    name = "superneurons_fig8"
    types: ClassVar = {  # of layers, by kind of kernel
        "conv": "CONV",
        "pool": "POOL",
        "activation": "ACT",
        "lrn": "LRN",
        "norm": "BN",
        "matmul": "FC",
        "dropout": "DROPOUT",
        "softmax": "SOFTMAX",
        "other": "other",
    }
    cheap: ClassVar = ("POOL", "ACT", "BN", "LRN")
    looks: ClassVar = (  # of networks
        ("#1f5fa8", "o"),
        ("#f16913", "s"),
        ("#238b45", "^"),
        ("#41ab5d", "v"),
        ("#74c476", "D"),
        ("#8e5bd0", "P"),
    )

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        types = [self.types[kind] for kind in layer_kinds(program)]
        times = Counter(dict.fromkeys(self.types.values(), 0))
        sizes = times.copy()
        for kernel, layer in zip(program.kernels, types, strict=True):
            times[layer] += kernel.duration_ns
        for tensor, writes in zip(program.tensors, program.writes, strict=True):
            if writes and not tensor.persistent:
                sizes[types[writes[0]]] += tensor.nbytes
        shares = [{name: n / totals.total() for name, n in totals.items()} for totals in (times, sizes)]
        return {"time": shares[0], "memory": shares[1]}

    def template_values(self, rows: Rows) -> Row:
        small = ("DROPOUT", "SOFTMAX")
        heads = [name for name in self.types.values() if name not in small]
        shares = [(row["network"], key, row[key]) for row in rows for key in ("time", "memory")]
        return {
            "lines": [
                {
                    "network": network,
                    "label": f"{figures.label(network)}, {key}",
                    "cells": [part[name] for name in heads],
                }
                for network, key, part in shares
            ],
            "heads": heads,
            "left_out": max(part[name] for _, _, part in shares for name in small),
            "convolutions": [row["time"]["CONV"] for row in rows],
            "cheap": {key: [sum(row[key][name] for name in self.cheap) for row in rows] for key in ("time", "memory")},
        }

    def chart(self, rows: Rows) -> Chart:
        names = list(self.types.values())
        panels = []
        for key, title in (("time", "Time"), ("memory", "Memory")):
            marks = [
                Line(
                    [100 * row[key][name] for name in names],
                    range(len(names)),
                    ink,
                    figures.label(row["network"]),
                    marker,
                    "",
                    size=7,
                )
                for row, (ink, marker) in zip(rows, cycle(self.looks), strict=False)
            ]
            panels.append(Panel(title, marks, Axis("% of a step", "{:g}", (-2, 102)), Axis(names=names)))
        values = self.template_values(rows)
        title = (
            f"CONV: {span(values['convolutions']):.0%} of the time; "
            f"{', '.join(self.cheap)}: {span(values['cheap']['memory']):.0%} of memory"
        )
        return Chart(title, panels, size=(4.95, 3.9), keys=3)


def layer_kinds(program: Program) -> list[str]:
    """Returns the type of layer that each kernel belongs to, a key of ``Fig8.types``.

    PyTorch runs local response normalization as a three-dimensional average pool amid elementwise kernels. A program
    with such pools has no other elementwise kernels in its layers.
    """
    has_lrn = any("avg_pool3d" in kernel.name for kernel in program.kernels)
    kinds = []
    for kernel in program.kernels:
        kind: str = kernel.kind
        if kernel.phase == "optimizer":
            kind = "other"
        elif any(name in kernel.name for name in ("softmax", "nll_loss", "ones_like")):  # with the loss
            kind = "softmax"
        elif has_lrn and ("avg_pool3d" in kernel.name or kind in ("elementwise", "copy")):
            kind = "lrn"
        kinds.append(kind if kind in Fig8.types else "other")
    return kinds


class Table2(Figure):
    """Table 2: images per second with a memory pool and with cudaMalloc."""

    name = "superneurons_table2"
    paper_networks = published("superneurons_table2")

    def tasks(self, settings: DictConfig) -> Rows:
        return [{**task, "batch": 128 if task["network"] == "alexnet" else 16} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)
        lives = program_lifetimes(program).intervals
        return {
            "blocks": sum(not t.persistent for t in program.tensors),
            "allocated": sum(t.nbytes for t in program.tensors if not t.persistent),
            "roofline_ns": program.ideal_ns,
            "allocation_ns": {name: allocation_ns(name, lives, machine) for name in ("cudamalloc", "superneurons")},
        }

    def template_values(self, rows: Rows) -> Row:
        return {"networks": table2_entries(rows)}

    def chart(self, rows: Rows) -> Chart:
        networks = table2_entries(rows)
        labels = {
            "paper": ("the paper", INK),
            "each": ("ours: one cost per block, fitted", ALLOCATORS["superneurons"].color),
            "ours": ("ours: costs by bytes, as on a GTX 1080 Ti", FAINT),
        }
        series = [
            (*style, [net["speedup"][key] for net in networks], [f"{net['speedup'][key]:.2f}×" for net in networks])
            for key, style in labels.items()
        ]
        panel = Panel(
            "",
            [Rule(1, horizontal=True, line="-"), *groups(series, hollow=("the paper",))],
            Axis(names=[f"{net['label']}\nbatch {net['batch']}" for net in networks]),
            Axis("iteration with cudaMalloc / with the pool, K40c", "{:.1f}", (0, None), room=1.05),
        )
        ours, paper = (span(net["speedup"][key] for net in networks) for key in ("ours", "paper"))
        title = f"A pool is {ours:.2f} times as fast as cudaMalloc (paper: {paper:.2f})"
        return Chart(title, [panel], size=(1.5 + 1.4 * len(rows), 3.8))


def table2_entries(rows: Rows) -> Rows:
    """Returns the pool's speedup over cudaMalloc, and images/s without the pool, by what an allocation costs.

    ``each``: one cost per block for all networks, the median of the costs that give the paper's differences.
    """
    networks = []
    costs = []
    for row in rows:
        slow, fast = Table2.paper_networks[row["network"]]
        paper_ms = 1e3 * row["batch"] * (1 / slow - 1 / fast)
        calls = row["allocation_ns"]
        costs.append(paper_ms / row["blocks"])
        added = {"paper": paper_ms, "ours": (calls["cudamalloc"] - calls["superneurons"]) / 1e6}
        networks.append({**row, "label": figures.label(row["network"]), "slow": slow, "fast": fast, "added": added})
    for net in networks:
        net["added"]["each"] = median(costs) * net["blocks"]
        pool_ms = 1e3 * net["batch"] / net["fast"]
        net["speedup"] = {key: 1 + ms / pool_ms for key, ms in net["added"].items()}
        net["images"] = {key: net["fast"] / speedup for key, speedup in net["speedup"].items()}
    return networks


class Fig11(Figure):
    """Fig. 11: images per second with the Tensor Cache and without it."""

    name = "superneurons_fig11"

    def tasks(self, settings: DictConfig) -> Rows:
        short = cli.number(settings, "short")
        batches = figures.batch_sizes(settings, 1)
        return [{"network": name, "batch": batch, "short": short} for name, batch in batches.items()]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"])
        return {
            "peak": program.peak_bytes,
            "ideal_ns": program.ideal_ns,
            "without": run_offloaded(program, machine),
            "cached": run_cached(program, machine, machine.memory_bytes),
            "cached_short": run_cached(program, machine, int(task["short"] * program.peak_bytes)),
        }

    def template_values(self, rows: Rows) -> Row:
        networks = [fig11_entry(row) for row in rows]
        return {"networks": networks, "losses": span(net["loss"] for net in networks)}

    def chart(self, rows: Rows) -> Chart:
        networks = sorted(map(fig11_entry, rows), key=lambda net: net["loss"])
        series = [
            (label, ink, [net["speeds"][i] for net in networks], [f"{net['speeds'][i]:.0%}" for net in networks])
            for i, (label, ink) in enumerate((("with Tensor Cache", color("superneurons")), ("without", FAINT)))
        ]
        names = Axis(names=[f"{net['label']}\nbatch {net['batch']}" for net in networks])
        ends = [-0.5, len(networks) - 0.5]
        speed = 1 - self.published["loss"]
        label = f"paper: at least {speed:.0%} without"
        paper = Line(ends, [speed] * 2, INK, label, line="--", front=5)
        panel = Panel("", [*groups(series), paper], names, Axis("speed, of that without swaps", "%", (0, 1.15)))
        losses = span(net["loss"] for net in networks)
        title = f"Without the Tensor Cache speed falls by {losses:.0%} (paper: up to {1 - speed:.0%}); K40c, 12 GB"
        return Chart(title, [panel], size=(1.4 * len(rows) + 1.5, 4.2))


def run_offloaded(program: Program, machine: Machine) -> Row:
    """Returns the iteration with every CONV output offloaded (section 3.3.1)."""
    limit = machine.memory_bytes
    plan = agents.make("superneurons", mode="swap", recompute="cost", cache="off").plan(program, machine, limit)
    timeline = simulate(program, plan, machine, limit)
    moved = sum(program.tensors[decision.tensor].nbytes for decision in plan.decisions)
    return {"iteration_ns": timeline.iteration_ns, "offloaded": moved}


def run_cached(program: Program, machine: Machine, limit: int) -> Row | None:
    """Returns the iteration with the Tensor Cache at run time; None if it does not fit."""
    try:
        result = tensor_cache.run(program, machine, limit)
    except agents.Infeasible:
        return None
    return {
        "iteration_ns": result.iteration_ns,
        "offloaded": result.offloaded_bytes,
        "misses": result.misses,
        "hits": result.hits,
    }


def fig11_entry(row: Row) -> Row:
    """Returns the speeds of a network, also relative to the iteration without swaps."""
    short = row["cached_short"]
    ns = [row[key]["iteration_ns"] for key in ("cached", "without")]
    return {
        **row,
        "label": figures.label(row["network"]),
        "images": [row["batch"] / time_ns * 1e9 for time_ns in ns],
        "speeds": [row["ideal_ns"] / time_ns for time_ns in ns],
        "loss": 1 - ns[0] / ns[1],
        "short_speed": "does not fit" if short is None else f"{row['ideal_ns'] / short['iteration_ns']:.0%}",
    }
