"""SuperNeurons' Fig. 10 and 12 and Tables 1 and 3, on networks counted as the paper counts them (layerwise.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import Any, ClassVar

from omegaconf import DictConfig

import agents
from agents.heuristics.superneurons import JOINS
from agents.heuristics.workspace import algorithms, plan_with_variants
from agents.planner import MIB
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import layerwise, published
from experiments.figures.figure import Figure, Rows, span
from experiments.figures.layerwise import FREE
from experiments.plotting.charts import Axis, Bars, Chart, Line, Mark, Panel, Rule, groups
from experiments.plotting.palette import INK, MEASURED, PREDICTED
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program, Tensor

PLANS: dict[str, dict[str, Any]] = {"liveness": {"offload": False}, "offload": {}, "recompute": {"strategy": "cost"}}
FIG10_LABELS = {
    "liveness": "liveness analysis",
    "offload": "+ prefetch and offload",
    "recompute": "+ cost-aware recomputation",
    "captured": "the step that PyTorch runs, with liveness analysis",
}
FIG10_PAPER: dict[str, float] = published("superneurons_alexnet")


class Fig10(Figure):
    """Fig. 10: AlexNet's memory step by step, as techniques are added."""

    name = "superneurons_alexnet"
    colors: ClassVar = {"liveness": "#1f5fa8", "offload": "#f16913", "recompute": "#8e5bd0", "captured": "#5f6b75"}
    rounded = "+ cost-aware recomputation: peak, MB"  # the number of the paper that is rounded to MB
    # Steps, from 1, at which the text states the memory: POOL5's and POOL2's backward steps.
    pool5 = 32
    pool2 = 39

    def tasks(self, settings: DictConfig) -> Rows:
        names = figures.choices(settings, "shown", FIG10_LABELS)
        return [{"shown": name, "batch_size": settings.batch_size} for name in names]

    def run(self, task: Row, machine: Machine) -> Row:
        if task["shown"] == "captured":
            return captured_steps(task["batch_size"], machine)
        program = layerwise.program("alexnet", layerwise.alexnet(), task["batch_size"])
        steps, recomputed, peak = layerwise.memory_steps(program, layerwise.plan(program, **PLANS[task["shown"]]))
        peak_step = max(range(len(steps)), key=lambda i: steps[i].nbytes)
        layer = program.kernels[self.pool5 - 1]
        sizes = [[tensor.name, tensor.nbytes] for tensor in program.tensors]
        return {
            "steps": [[s.name, s.phase, s.nbytes, len(s.tensors)] for s in steps],
            "peak": peak,
            "again": recomputed,
            "at_peak": [sizes[t] for t in steps[peak_step].tensors],
            "tensors": len(program.tensors),
            "all": sum(t.nbytes for t in program.tensors),
            "smallest": min(t.nbytes for t in program.tensors),
            "layer": [sizes[t] for t in layer.accesses],
        }

    def template_values(self, rows: Rows) -> Row:
        ours = our_numbers(rows)
        pytorch = next((row for row in rows if row["shown"] == "captured"), None)
        exact = sum(matches_paper(key, value) for key, value in ours.items())
        return {"lines": lines(ours, pytorch), "of": len(ours), "exact": exact, "captured": pytorch}

    def chart(self, rows: Rows) -> Chart:
        top = 1.1 * max((row["all"] for row in rows if row["shown"] in PLANS), default=0) / MIB
        panels = []
        layerwise_rows = [row for row in rows if row["shown"] in PLANS]
        for row in rows:
            name = row["shown"]
            steps = row["steps"]
            ink = self.colors[row["shown"]]
            x = range(1, len(steps) + 1)
            sizes = [s[2] / MIB for s in steps]
            peak = _peak_step(row)
            bars = Bars(x, sizes, ink, thick=1.0, horizontal=False, shade=0.35, texts=[f"{s[3] or ''}" for s in steps])
            marks: list[Mark] = [bars, Bars([peak + 1], [sizes[peak]], ink, thick=1.0, horizontal=False)]
            ends = [sum(s[1] == "forward" for s in steps), sum(s[1] != "optimizer" for s in steps)]
            marks += [Rule(end + 0.5, line="-") for end in ends if end < len(steps)]
            stated = FIG10_PAPER.get(f"{FIG10_LABELS[name]}: peak, MB")
            paper = f" (paper: {format_exact(stated)} MB)" if stated else ""
            where = f"{'step' if name in PLANS else 'kernel'} {peak + 1}, {operator(steps[peak][0])}"
            title = f"{FIG10_LABELS[name]}: peak {sizes[peak]:,.3f} MB{paper}, {where}"
            limits = 0.5, len(steps) + 0.5
            kernels = Axis("kernel: forward | backward | optimizer", limits=limits)
            high = None
            if name in PLANS:
                total_mb = row["all"] / MIB
                high = top
                text = f"all {row['tensors']} tensors at once: {total_mb:,.3f} MB"
                marks.append(Rule(total_mb, horizontal=True, text=text, below=True))
                is_last = row is layerwise_rows[-1]  # the steps have the same names in all panels
                layers = [s[0] if is_last else "" for s in steps]
                kernels = Axis("forward | backward" if is_last else "", limits=limits, ticks=list(x), names=layers)
            panels.append(Panel(title, marks, kernels, Axis("memory (MB)", limits=(0, high))))
        ours = our_numbers(rows)
        exact = sum(matches_paper(key, value) for key, value in ours.items())
        title = f"AlexNet, batch {rows[0]['batch_size']}: {exact} of {len(ours)} numbers of the paper to the last digit"
        note = "Bars: MB in memory at a step, and number of tensors; dark: the peak."
        return Chart(title, panels, 1, (9.9, 2.35), (0.0, 0.6), note=note)


def captured_steps(batch_size: int, machine: Machine) -> Row:
    """Returns the bytes at every kernel of PyTorch's program, and the contents of its peak by producing operator."""
    program = figures.program("alexnet", machine, batch_size=batch_size)
    static = sum(t.nbytes for t in program.tensors if t.persistent)
    peak_kernel = max(range(len(program.kernels)), key=lambda k: program.live_bytes[k])
    at_peak: dict[str, list[int]] = {}
    for t, tensor in enumerate(program.tensors):
        uses = program.accesses[t]
        if not tensor.persistent and uses and uses[0] <= peak_kernel <= uses[-1]:
            count = at_peak.setdefault(program.kernels[program.writes[t][0]].name, [0, 0])
            count[0] += 1
            count[1] += tensor.nbytes
    plans = {name: layerwise.plan(program, **options) for name, options in PLANS.items()}
    peaks = {name: simulate(program, p, FREE, FREE.memory_bytes).peak_bytes - static for name, p in plans.items()}
    return {
        "steps": [[k.name, k.phase, n - static, 0] for k, n in zip(program.kernels, program.live_bytes, strict=True)],
        "peak": program.peak_bytes - static,
        "peaks": peaks,
        "kept": static,
        "at_peak": sorted(([name, *count] for name, count in at_peak.items()), key=lambda entry: -entry[2]),
        "tensors": sum(not t.persistent for t in program.tensors),
        "all": sum(t.nbytes for t in program.tensors if not t.persistent),
    }


def our_numbers(rows: Rows) -> dict[str, float]:
    """Returns our numbers, by the keys of ``FIG10_PAPER``, for the techniques that were computed."""
    numbers: dict[str, float] = {}
    for row in rows:
        name = FIG10_LABELS[row["shown"]]
        steps = row["steps"]
        peak_step = _peak_step(row)
        if row["shown"] == "captured":
            continue
        numbers |= {
            "no sharing of memory: MB": row["all"] / MIB,
            "no sharing of memory: tensors": row["tensors"],
            f"{name}: peak, MB": row["peak"] / MIB,
            f"{name}: step of the peak": peak_step + 1,
            f"{name}: tensors in memory then": steps[peak_step][3],
            f"{name}: tensors at step 39": steps[Fig10.pool2 - 1][3],
            f"{name}: MB at step 32": steps[Fig10.pool5 - 1][2] / MIB,
        }
        if row["shown"] == "liveness":
            layer = dict(row["layer"])
            at_peak = dict(row["at_peak"])
            numbers["outputs of CONV1 to CONV5 at step 32, MB"] = sum(at_peak[t] for t in at_peak.keys() - layer) / MIB
            numbers["tensors of POOL5's backward step, MB"] = sum(layer.values()) / MIB
    return {key: numbers[key] for key in FIG10_PAPER if key in numbers}


def matches_paper(key: str, value: float) -> bool:
    """Returns whether a number is that of the paper to its last digit."""
    unit = 0.5 if key == Fig10.rounded or "MB" not in key else 0.0011
    return abs(value - FIG10_PAPER[key]) < unit


def _peak_step(row: Row) -> int:
    sizes = [step[2] for step in row["steps"]]
    return sizes.index(max(sizes))


def lines(ours: dict[str, float], captured: Row | None) -> Rows:
    """Returns a table line per number in the paper's text, with PyTorch's values for the peaks."""
    pytorch = (
        {}
        if captured is None
        else {
            "no sharing of memory: MB": captured["all"] / MIB,
            "no sharing of memory: tensors": captured["tensors"],
            **{f"{FIG10_LABELS[name]}: peak, MB": n / MIB for name, n in captured["peaks"].items()},
        }
    )
    forms = {key: ",.3f" if "MB" in key else ",.0f" for key in ours}
    return [
        {
            "words": key,
            "paper": format_exact(FIG10_PAPER[key]),
            "ours": format(value, forms[key]),
            "pytorch": format(pytorch[key], forms[key]) if key in pytorch else None,
        }
        for key, value in ours.items()
    ]


def format_exact(value: float) -> str:
    """Formats a number of the paper as printed."""
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def operator(name: str) -> str:
    """Shortens an operator's name: aten.add.Tensor becomes add."""
    return name.removeprefix("aten.").partition(".")[0]


TABLE1_LABELS = {"speed": "speed-centric", "memory": "memory-centric", "cost": "cost-aware"}


class Table1(Figure):
    """Table 1: recomputed layers, and peak memory, by strategy."""

    name = "superneurons_table1"
    colors: ClassVar = {"speed": "#f16913", "memory": "#1f5fa8", "cost": "#238b45"}
    networks: ClassVar = {  # layers and batch size
        "alexnet": (layerwise.alexnet, 200),
        "resnet50": (partial(layerwise.resnet, 3, 4, 6, 3), 32),
        "resnet101": (partial(layerwise.resnet, 3, 4, 23, 3), 32),
    }

    def tasks(self, settings: DictConfig) -> Rows:
        names = figures.choices(settings, "networks", self.networks, "network ")
        return [{"network": name, "strategy": strategy} for name in names for strategy in TABLE1_LABELS]

    def run(self, task: Row, machine: Machine) -> Row:
        layers, batch_size = self.networks[task["network"]]
        program = layerwise.program(task["network"], layers(), batch_size)
        branches = any(layer.kind in JOINS for layer in layers())
        plan = layerwise.plan(program, strategy=task["strategy"], branches=branches)
        planner = agents.make("superneurons", recompute=task["strategy"], joins=branches)
        steps, recomputed, peak = layerwise.memory_steps(program, plan)
        peak_step = max(steps, key=lambda step: step.nbytes)
        at_peak = [[program.tensors[t].name, program.tensors[t].nbytes] for t in peak_step.tensors]
        return {
            "batch_size": batch_size,
            "again": recomputed,
            "peak": peak,
            "step": f"{peak_step.name} {peak_step.phase}",
            "at_peak": at_peak,
            "planner": figures.least_limit(planner, program, FREE, 1),
        }

    def template_values(self, rows: Rows) -> Row:
        lines = [table1_entry(row) for row in rows]
        return {
            "lines": lines,
            "count": len(rows),
            "same": sum(row["again"] == row["paper"][0] for row in lines),
            "close": sum(row["close"] for row in lines),
            "planner": sum(row["planner"] == row["peak"] for row in rows),
        }

    def chart(self, rows: Rows) -> Chart:
        networks = figures.group_by(map(table1_entry, rows))
        panels = []
        quantities = (("Layers recomputed", "again", 1), ("Peak memory (MB)", "peak", MIB))
        for i, (title, key, unit) in enumerate(quantities):
            marks: list[Mark] = []
            for s, (strategy, label) in enumerate(TABLE1_LABELS.items()):
                runs = [next((row for row in net if row["strategy"] == strategy), None) for net in networks.values()]
                ours = [row and row[key] / unit for row in runs]
                theirs = [row and row["paper"][i] for row in runs]
                texts = [
                    "" if a is None else f"{a:,.{3 * i}f}" + (f"\n({b:g})" if round(a - b, 3 * i - 1) else "")
                    for a, b in zip(ours, theirs, strict=True)
                ]
                x = [n + 0.27 * (s - 1) for n in range(len(networks))]
                marks.append(Bars(x, ours, self.colors[strategy], label, 0.24, horizontal=False, texts=texts))
                marks.append(Line(x, theirs, INK, "the paper's (in brackets where it differs)", "_", "", size=19))
            names = [f"{net[0]['label']}, batch {net[0]['batch_size']}" for net in networks.values()]
            panels.append(Panel(title, marks, Axis(names=names), Axis(limits=(0, None), room=1.08)))
        values = self.template_values(rows)
        title = f"{values['same']} of {values['count']} counts and {values['close']} of {values['count']} peaks"
        return Chart(f"{title} equal the paper's to the last digit", panels, 1, (9.0, 3.2))


def table1_entry(row: Row) -> Row:
    """Returns the numbers of a network under a strategy, next to those of the paper."""
    layers, peak = published("superneurons_table1")[row["network"]][row["strategy"]]
    return {
        **row,
        "label": figures.label(row["network"]),
        "named": TABLE1_LABELS[row["strategy"]],
        "paper": (layers, peak),
        "paper_mb": f"{peak:,g}" if peak < 500 else f"{peak:,.3f}",
        "close": abs(row["peak"] / MIB - peak) < 0.0011,
    }


KEPT = ("weights", "gradients of weights", "momentum")


def with_weights(program: Program, nbytes: int) -> Program:
    """Returns the program with the tensors that stay in memory, of ``nbytes`` each."""
    tensors = (Tensor(name, nbytes, "parameter", True) for name in KEPT)
    return Program(program.name, (*program.tensors, *tensors), program.kernels)


class Table3(Figure):
    """Table 3: copies that the Tensor Cache avoids on AlexNet."""

    name = "superneurons_table3"

    def tasks(self, settings: DictConfig) -> Rows:
        return [{"batch_size": batch} for batch in figures.integers(settings, "batches", 1)]

    def run(self, task: Row, machine: Machine) -> Row:
        from experiments import workloads  # only counting parameters needs PyTorch

        model = workloads.build(figures.workload("alexnet"))[0]
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        program = with_weights(layerwise.program("alexnet", layerwise.alexnet(), task["batch_size"]), weights)
        plan = figures.attempt(
            agents.make("superneurons", mode="swap", recompute="cost"), program, machine, machine.memory_bytes
        )
        return {
            "weights": weights,
            "memory": machine.memory_bytes,
            "copied": traffic(program, layerwise.plan(program)),
            "cached": plan and traffic(program, plan),
            "peak": program.peak_bytes,
            "all": sum(t.nbytes for t in program.tensors),
        }

    def template_values(self, rows: Rows) -> Row:
        # The largest batch whose peak fits: the peak is proportional to the batch beside what is kept.
        first = rows[0]
        kept_bytes = len(KEPT) * rows[0]["weights"]
        in_paper = [row for row in rows if row["batch_size"] in self.published]
        sizes = [
            {
                **row,
                "paper": self.published.get(row["batch_size"]),
                "copied_gb": row["copied"] / 1e9,
                "cached_gb": None if row["cached"] is None else row["cached"] / 1e9,
                "cached": "does not fit" if row["cached"] is None else f"{row['cached'] / 1e9:.2f}",
            }
            for row in rows
        ]
        return {
            "sizes": sizes,
            "in_paper": [size for size in sizes if size["paper"]],
            "less": span(1 - row["copied"] / 1e9 / self.published[row["batch_size"]][0] for row in in_paper),
            "limit": int((first["memory"] - kept_bytes) * first["batch_size"] // (first["peak"] - kept_bytes)),
        }

    def chart(self, rows: Rows) -> Chart:
        xs = [row["batch_size"] for row in rows]
        marks: list[Mark] = []
        curves = (("copied", PREDICTED, "without cache", "s", "--"), ("cached", MEASURED, "Tensor Cache", "o", ""))
        for i, (key, ink, name, marker, dash) in enumerate(curves):
            ours = [None if row[key] is None else row[key] / 1e9 for row in rows]
            theirs = [self.published[x][i] if x in self.published else None for x in xs]
            marks += [
                Line(xs, ours, ink, f"{name}, ours", marker, dash, width=2),
                Line(xs, theirs, ink, f"{name}, paper", marker, "", size=8, hollow=True),
            ]
        limit = self.template_values(rows)["limit"]
        marks.append(Rule(limit, text=f"peak fills the memory at {limit:,}"))
        marks.append(Line([min(*xs, limit), limit], [0, 0], MEASURED, width=2))  # nothing to copy
        x = Axis("batch size (above 1,024 only ours)", limits=(0, 1.04 * max(xs)), ticks=xs)
        panel = Panel("", marks, x, Axis("copied in one iteration (GB)", room=1.06))
        paper = next(f" (paper: {cached:g} GB at {batch:,})" for batch, (_, cached) in self.published.items() if cached)
        title = f"Tensor Cache: no copies up to batch {limit:,}{paper}"
        return Chart(title, [panel], size=(9.5, 4.2))


def traffic(program: Program, plan: Plan) -> int:
    """Returns the bytes that a plan copies in one iteration, out and back in."""
    return sum(2 * program.tensors[d.tensor].nbytes for d in plan.of_kind(Swap))


class Fig12(Figure):
    """Fig. 12: convolution workspaces in the memory that tensors leave free, and training speed."""

    name = "superneurons_fig12"
    gb = 10**9
    shown = 3  # GB of the pool whose workspaces the paper draws
    colors: ClassVar = ("#1f5fa8", "#f16913")  # by batch size

    def tasks(self, settings: DictConfig) -> Rows:
        pools = figures.numbers(settings, "pools", lambda size: size > 0, "sizes in GB above 0")
        if self.shown not in pools:
            raise cli.UsageError(f"figure.pools: {self.shown} GB is required, since the paper draws it")
        return [{"batch_size": batch, "pools": pools} for batch in figures.integers(settings, "batches", 1)]

    def run(self, task: Row, machine: Machine) -> Row:
        batch = task["batch_size"]
        captured = figures.program("alexnet", machine, batch_size=batch, algorithms=True)
        program = timed(layerwise.program("alexnet", layerwise.alexnet(), batch), captured, machine)
        program = with_weights(program, sum(t.nbytes for t in captured.tensors if t.kind == "parameter"))
        convolutions = [k for k, kernel in enumerate(program.kernels) if kernel.kind == "conv"]
        found = []
        for size in task["pools"]:
            limit = round(size * self.gb)
            result: Row = {"pool": size}
            for name, is_filled in (("least", False), ("filled", True)):
                try:
                    planner = agents.make("superneurons")
                    plan = plan_with_variants(planner, program, machine, limit, is_filled, include_default=False)
                except agents.Infeasible:
                    result[name] = None
                    continue
                kernels = program.with_variants(plan.variants).kernels
                result[name] = {
                    "images_per_s": batch / simulate(program, plan, machine, limit).iteration_ns * 1e9,
                    "workspaces": [kernels[k].workspace for k in convolutions],
                    "evictions": len(plan.decisions),
                }
            found.append(result)
        return {
            "kernels": [[program.kernels[k].name, program.kernels[k].phase] for k in convolutions],
            "fastest": [min(algorithms(program.kernels[k]))[1] for k in convolutions],
            "found": found,
        }

    def template_values(self, rows: Rows) -> Row:
        lines = [fig12_entry(row, result) for row in rows for result in row["found"] if result["filled"]]
        shown = {line["batch_size"]: line["share"] for line in lines if line["pool"] == self.shown}
        by_batch = figures.group_by(lines, "batch_size").values()
        steps = [pair for pools in by_batch for pair in pairwise(pools) if pair[1]["share"] > pair[0]["share"]]
        small, large = (shown.get(batch) for batch in self.published["batches"])
        return {
            "lines": lines,
            "shown": self.shown,
            "small": small,
            "large": large,
            "is_less": None if small is None or large is None else [large < small, large > small],
            "steps": len(steps),
            "faster": sum(b["fast"] > a["fast"] for a, b in steps),
            "gains": span(line["times"] for line in lines),
            "rises": [pools[-1]["fast"] / pools[0]["fast"] for pools in by_batch],
            "paper": self.published["most"] / self.published["least"],
        }

    def chart(self, rows: Rows) -> Chart:
        panels = []
        for row in rows:
            result = next(result for result in row["found"] if result["pool"] == self.shown)
            given = result["filled"]["workspaces"] if result["filled"] else []
            series = [
                ("fastest algorithm", INK, [nbytes / MIB for nbytes in row["fastest"]], []),
                (f"assigned in {self.shown} GB", MEASURED, [nbytes / MIB for nbytes in given], []),
            ]
            names = [f"{name} {phase}" for name, phase in row["kernels"]]
            marks = groups(series, horizontal=True, hollow=("fastest algorithm",))
            title = f"Batch {row['batch_size']} in {self.shown} GB"
            panels.append(Panel(title, marks, Axis("workspace (MB)"), Axis(names=names)))
        marks: list[Mark] = []
        for row, ink in zip(rows, self.colors, strict=False):
            lines = [fig12_entry(row, result) for result in row["found"] if result["filled"]]
            pools = [line["pool"] for line in lines]
            batch = f"batch {row['batch_size']}"
            marks += [
                Line(pools, [line["fast"] for line in lines], ink, f"{batch}: fastest that fit", "o"),
                Line(
                    pools, [line["slow"] for line in lines], ink, f"{batch}: least workspaces", "o", "--", hollow=True
                ),
            ]
        marks += [
            Rule(
                self.published[key],
                horizontal=True,
                text=f"paper, {key} workspaces: {self.published[key]}",
                line=":",
                below=True,
            )
            for key in ("least", "most")
        ]
        panels.append(Panel("Speed", marks, Axis("memory pool (GB)"), Axis("images per second", limits=(0, None))))
        values = self.template_values(rows)
        fits = {line["batch_size"]: line["share"] for line in values["lines"] if line["pool"] == self.shown}
        shares = ", ".join(f"{share:.0%} at batch {batch}" for batch, share in fits.items())
        title = f"AlexNet in {self.shown} GB: workspaces fit {shares}"
        return Chart(title, panels, size=(3.3, 3.4), keys=3)


def timed(program: Program, captured: Program, machine: Machine) -> Program:
    """Returns the layers' steps with durations, and with the captured convolutions' algorithms.

    Convolutions and products take as long as PyTorch's, which follow in the same order. A fully connected layer's
    backward step has two. Other layers take the time of their memory traffic.
    """
    convolutions = (kernel for kernel in captured.kernels if kernel.kind == "conv")
    products = (kernel.duration_ns for kernel in captured.kernels if kernel.kind == "matmul")
    kernels = []
    for kernel in program.kernels:
        if kernel.kind == "conv":
            conv = next(convolutions)
            change = {"duration_ns": conv.duration_ns, "workspace": conv.workspace, "variants": conv.variants}
        elif kernel.kind == "matmul":
            change = {"duration_ns": sum(islice(products, 1 + (kernel.phase == "backward")))}
        else:
            nbytes = sum(program.tensors[t].nbytes for t in kernel.accesses)
            change = {"duration_ns": machine.kernel_ns(kernel.kind, 0, nbytes)}
        kernels.append(replace(kernel, **change))
    return Program(program.name, program.tensors, tuple(kernels))


def fig12_entry(row: Row, result: Row) -> Row:
    """Returns the speeds in one pool, and the share of the fastest algorithms' workspaces that fits beside tensors."""
    slow, fast = (result[name]["images_per_s"] for name in ("least", "filled"))
    return {
        "batch_size": row["batch_size"],
        "pool": result["pool"],
        "slow": slow,
        "fast": fast,
        "times": fast / slow,
        "share": sum(result["filled"]["workspaces"]) / sum(row["fastest"]),
        "evictions": result["filled"]["evictions"],
    }
