"""SuperNeurons' Fig. 2, 8 and 12 and Table 2, on programs captured from PyTorch."""

from __future__ import annotations

from collections import Counter
from statistics import median

from omegaconf import DictConfig

import agents
from agents.heuristics.workspace import algorithms, least_workspaces, plan_with_variants
from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.plotting.charts import Axis, Bars, Chart, Line, Panel, Rule, groups
from experiments.plotting.palette import ALLOCATORS, FAINT, INK, LAYERS, MEASURED, PREDICTED
from simulator import simulate
from simulator.machine import Machine
from simulator.pool import program_lifetimes
from simulator.pool.times import allocation_ns

GB = 10**9
POOL = "superneurons"  # SuperNeurons' heap in simulator.pool
FIG2_BATCH = 32
FIG2_PAPER = {"resnet152_imagenet": 18.5, "inception_v4": 44.3}  # GB with workspaces, from the text


class Fig2(Figure):
    """Fig. 2: memory of a training step with and without convolution workspaces."""

    name = "superneurons_fig2"

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=FIG2_BATCH, algorithms=True)
        chosen = [min(algorithms(kernel)) for kernel in program.kernels]
        held = [live - kernel.workspace for live, kernel in zip(program.live_bytes, program.kernels, strict=True)]
        tensors = sum(tensor.nbytes for tensor in program.tensors)  # without freeing any
        return {
            "without": max(held), "fastest": max(a + b for a, (_, b, _) in zip(held, chosen, strict=True)),
            "sum": tensors + sum(nbytes for _, nbytes, _ in chosen), "all": tensors,
        }  # fmt: skip

    def numbers(self, rows: list[Row]) -> Row:
        found = [
            {**row, "label": figures.label(row["network"]), "paper": FIG2_PAPER.get(row["network"], "not said"),
             "times": row["sum"] / row["all"]}
            for row in rows
        ]  # fmt: skip
        return {"networks": found, "batch": FIG2_BATCH, "most": max(one["times"] for one in found)}

    def chart(self, rows: list[Row]) -> Chart:
        names = [figures.label(row["network"]) for row in rows]
        series = [
            ("all tensors", PREDICTED, [row["all"] / GB for row in rows], []),
            ("all tensors and workspaces", MEASURED, [row["sum"] / GB for row in rows], []),
        ]
        theirs = [FIG2_PAPER.get(row["network"]) for row in rows]
        paper = Line(theirs, list(range(len(rows))), INK, "paper", "D", "", size=7, hollow=True, front=5)
        panel = Panel("", [*groups(series, across=True), paper], Axis("GB"), Axis(names=names))
        return Chart(f"Simulated memory of a step, batch {FIG2_BATCH}", [panel], size=(7.5, 0.55 * len(rows) + 1.0))


GROUP_OF = {kind: "POOL, ACT, BN, LRN" for kind in ("pool", "activation", "norm", "lrn")} | {
    "conv": "CONV",
    "matmul": "FC",
}
COLUMNS = {"conv": "CONV", "cheap": "POOL, ACT, BN, LRN", "fc": "FC"}


class Fig8(Figure):
    """Fig. 8: time and memory by type of layer."""

    name = "superneurons_fig8"

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine)
        times, sizes = Counter(dict.fromkeys(LAYERS, 0)), Counter(dict.fromkeys(LAYERS, 0))
        for kernel in program.kernels:
            times[GROUP_OF.get(kernel.kind, "other")] += kernel.duration_ns
        for tensor, writes in zip(program.tensors, program.writes, strict=True):
            if writes and not tensor.persistent:
                sizes[GROUP_OF.get(program.kernels[writes[0]].kind, "other")] += tensor.nbytes
        shares = [{name: n / found.total() for name, n in found.items()} for found in (times, sizes)]
        return {"time": shares[0], "memory": shares[1]}

    def numbers(self, rows: list[Row]) -> Row:
        found = [
            {"label": figures.label(row["network"])}
            | {f"{short}_{key}": row[key][name] for short, name in COLUMNS.items() for key in ("time", "memory")}
            for row in rows
        ]
        keys = ("conv_time", "cheap_time", "cheap_memory")
        return {"networks": found, **{f"{key}s": span(one[key] for one in found) for key in keys}}

    def chart(self, rows: list[Row]) -> Chart:
        names, panels = [figures.label(row["network"]) for row in rows], []
        for key, title in (("time", "Time"), ("memory", "Memory")):
            base, bars = [0.0] * len(rows), []
            for name, colour in LAYERS.items():
                shares = [100 * row[key][name] for row in rows]
                bars.append(Bars(list(range(len(rows))), shares, colour, name, base=list(base)))
                base = [a + b for a, b in zip(base, shares, strict=True)]
            panels.append(Panel(title, bars, Axis("% of a step", "{:g}", (0, 100)), Axis(names=names)))
        return Chart("Simulated time and memory by type of layer", panels, size=(5.0, 0.4 * len(rows) + 1.0))


FIG12_PAPER = (203, 240)  # images/s with the least and with the most workspaces


class Fig12(Figure):
    """Fig. 12: convolution workspaces in the memory that tensors leave free, and training speed."""

    name = "superneurons_fig12"

    def tasks(self, settings: DictConfig) -> list[Row]:
        shares = figures.numbers(settings, "pools", lambda share: share >= 1, "numbers of at least 1")
        return [{"batch_size": batch, "pools": shares} for batch in figures.integers(settings, "batches", 1)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program("alexnet", machine, batch_size=task["batch_size"], algorithms=True)
        planner = agents.make("superneurons", recompute="cost", early=True)
        bare = program.with_variants(least_workspaces(program))
        least, found = figures.least_limit(planner, bare, machine, 2**20), []
        for share in task["pools"]:
            limit = round(share * least)
            one: Row = {"pool": limit}
            for name, fill in (("least", False), ("filled", True)):
                plan = plan_with_variants(planner, program, machine, limit, fill)
                iteration_ns = simulate(program, plan, machine, limit).iteration_ns
                one[name] = {
                    "images_per_s": task["batch_size"] / iteration_ns * 1e9,
                    "workspaces": sum(kernel.workspace for kernel in program.with_variants(plan.variants).kernels),
                }
            found.append(one)
        return {"found": found, "wanted": sum(min(algorithms(kernel))[1] for kernel in program.kernels)}

    def numbers(self, rows: list[Row]) -> Row:
        found = [
            {
                "batch_size": row["batch_size"], "pool": one["pool"], "slow": one["least"]["images_per_s"],
                "fast": one["filled"]["images_per_s"], "share": one["filled"]["workspaces"] / row["wanted"],
                "times": one["filled"]["images_per_s"] / one["least"]["images_per_s"],
            }
            for row in rows
            for one in row["found"]
        ]  # fmt: skip
        return {"rows": found, "gains": span(one["times"] for one in found)}

    def chart(self, rows: list[Row]) -> Chart:
        found = self.numbers(rows)["rows"]
        series = [
            ("least workspaces", PREDICTED, [one["slow"] for one in found], []),
            ("fastest that fit", MEASURED, [one["fast"] for one in found],
             [f"{one['times']:.2f}×, {one['share']:.0%} of all workspaces" for one in found]),
        ]  # fmt: skip
        paper = [
            Line([speed] * 2, [-0.5, len(found) - 0.5], INK, f"paper: {label}, {speed} images/s", line=dash, front=5)
            for label, speed, dash in zip(("least", "most"), FIG12_PAPER, (":", "--"), strict=True)
        ]
        names = [f"batch {one['batch_size']}, {one['pool'] / GB:.2f} GB" for one in found]
        marks = [*groups(series, across=True), *paper]
        panel = Panel("", marks, Axis("images per second", room=1.6), Axis(names=names))
        title = "AlexNet on a K40c: simulated speed with workspaces"
        return Chart(title, [panel], size=(7.0, 0.55 * len(found) + 1.0), keys=2)


TABLE2_PAPER = {  # images/s with cudaMalloc ("CUDA") and with the pool ("Ours")
    "alexnet": (359.4, 401.6), "vgg16_imagenet": (12.1, 14.4), "inception_v4": (6.77, 10.0),
    "resnet50_imagenet": (21.5, 32.9), "resnet101_imagenet": (11.3, 18.95), "resnet152_imagenet": (7.46, 13.2),
}  # fmt: skip


class Table2(Figure):
    """Table 2: images per second with a memory pool and with cudaMalloc."""

    name = "superneurons_table2"
    among = TABLE2_PAPER

    def tasks(self, settings: DictConfig) -> list[Row]:
        return [{**task, "batch": 128 if task["network"] == "alexnet" else 16} for task in super().tasks(settings)]

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"], algorithms=False)
        lives = program_lifetimes(program).intervals
        return {
            "blocks": sum(not t.persistent for t in program.tensors),
            "allocated": sum(t.nbytes for t in program.tensors if not t.persistent),
            "roofline_ns": program.ideal_ns,
            "allocation_ns": {name: allocation_ns(name, lives, machine) for name in ("cudamalloc", POOL)},
        }

    def numbers(self, rows: list[Row]) -> Row:
        networks = table2_facts(rows)
        return {
            "networks": networks, "block": span(one["block_ms"] for one in networks),
            "middle": median(one["block_ms"] for one in networks), "gb": span(one["gb_ms"] for one in networks),
            "roofline": span(one["unit_ms"] * 1e6 / one["roofline_ns"] for one in networks),
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found = table2_facts(rows)
        labels = {"paper": ("the paper", INK), "each": ("ours: one cost per block, fitted", ALLOCATORS[POOL].colour),
                  "ours": ("ours: costs by bytes, as on a GTX 1080 Ti", FAINT)}  # fmt: skip
        series = [
            (*how, [one["speedup"][key] for one in found], [f"{one['speedup'][key]:.2f}×" for one in found])
            for key, how in labels.items()
        ]
        panel = Panel(
            "",
            [Rule(1, across=True, line="-"), *groups(series, hollow=("the paper",))],
            Axis(names=[f"{one['label']}\nbatch {one['batch']}" for one in found]),
            Axis("iteration with cudaMalloc / with the pool", "{:.1f}", (0, None), room=1.05),
        )
        title = "Speedup of SuperNeurons' memory pool over cudaMalloc, Tesla K40c"
        return Chart(title, [panel], size=(2.6 + 1.45 * len(rows), 3.8))


def table2_facts(rows: list[Row]) -> list[Row]:
    """Returns the time that cudaMalloc adds to an iteration, in the paper and here, and the pool's speedup.

    ``each``: speedup with one cost per block for all networks, the median of the costs that give the paper's
    differences.
    """
    out = []
    for row in rows:
        slow, fast = TABLE2_PAPER[row["network"]]
        calls, paper_ms = row["allocation_ns"], 1e3 * row["batch"] * (1 / slow - 1 / fast)
        out.append({
            **row, "label": figures.label(row["network"]), "slow": slow, "fast": fast,
            "unit_ms": 1e3 * row["batch"] / fast,
            "added": {"paper": paper_ms, "ours": (calls["cudamalloc"] - calls[POOL]) / 1e6},
            "block_ms": paper_ms / row["blocks"], "gb_ms": paper_ms / (row["allocated"] / 1e9),
        })  # fmt: skip
    cost = median(one["block_ms"] for one in out)
    for one in out:
        one["added"]["each"] = cost * one["blocks"]
        one["speedup"] = {key: 1 + ms / one["unit_ms"] for key, ms in one["added"].items()}
        one["images"] = {key: one["fast"] / speedup for key, speedup in one["speedup"].items()}
    return out
