"""SuperNeurons' Tables 4 and 5: the deepest network and the largest batches that train in 12 GB, by framework.

The paper runs Caffe, MXNet, Torch, TensorFlow and its own runtime on a K40c. Here memory strategies run on captured
PyTorch programs, without workspaces or other GPU memory:

- ``own``: every tensor has separate memory, the paper's baseline; Caffe and Torch are at best twice as good (2.2);
- ``none``: dead tensors are freed (liveness analysis), as in MXNet's and TensorFlow's engines, without a plan;
- ``superneurons``: CONV outputs are swapped out, cheap layers recomputed; ``superneurons_joins`` also swaps out sums
  and concatenations (agents/heuristics/superneurons.py, choice 1);
- ``bound``: not a method but an upper bound: every tensor is swapped out whenever no kernel uses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from omegaconf import DictConfig

import agents
from agents.heuristics.layers import feature_maps
from agents.heuristics.superneurons import JOINS, STRATEGIES, evictable_gaps
from agents.planner import Candidates
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import attempt, choices, published
from experiments.figures.figure import Figure, Rows
from experiments.figures.home_networks import Sizes
from experiments.plotting.charts import Axis, Bars, Chart, Mark, Panel, Rule
from experiments.plotting.palette import INK, color, label
from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.program import Kernel, Program, Tensor
from simulator.timeline import Timeline


class Method(NamedTuple):
    """Strategy: a planner of ``agents`` with its options; "" does not plan."""

    label: str
    planner: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    color: str = ""  # by default the planner's


METHODS = {
    "own": Method("every tensor its own memory", color="#c9c9c9"),
    "none": Method("dead tensors freed", "none", color="#6b6b6b"),
    "memonger": Method("memonger", "memonger"),
    "vdnn_all": Method("vDNN all", "vdnn_all"),
    "superneurons": Method("SuperNeurons", "superneurons"),
    "superneurons_joins": Method("SuperNeurons, sums too", "superneurons", {"joins": True}, "#238b45"),
    "bound": Method("no plan goes beyond"),
}
RECOMPUTE = ("best", *STRATEGIES)


def run_method(method: str, program: Program, machine: Machine, recompute: str) -> Timeline | None:
    """Returns the timeline of a method in the machine's memory, or None if it does not fit.

    Args:
        method: Name in ``METHODS``.
        program: Program to plan.
        machine: Machine with the memory to fit.
        recompute: Strategy of SuperNeurons, as in its planner.
    """
    if lower_bound(method, program) > machine.memory_bytes:
        return None
    strategy = METHODS[method]
    options = {"recompute": recompute} if strategy.planner == "superneurons" else {}
    planner = agents.make(strategy.planner, **strategy.options, **options)
    plan = attempt(planner, program, machine, machine.memory_bytes)
    return None if plan is None else simulate(program, plan, machine, machine.memory_bytes)


def lower_bound(method: str, program: Program) -> int:
    """Returns a lower bound on a method's bytes: the peak with its movable tensors swapped out while unused."""
    if method == "own":
        return sum(t.nbytes for t in program.tensors)
    if method == "none":
        return program.peak_bytes
    strategy = METHODS[method]
    if strategy.planner == "superneurons":
        gaps = list(evictable_gaps(program, joins=strategy.options.get("joins", False)))
    else:
        gaps = list(program.gaps()) if method == "bound" else [m.gap for m in feature_maps(program)]
    return Candidates(program, gaps).least_bytes


def max_size(
    method: str, build: Callable[[int], Program], machine: Machine, start: int, limit: int, recompute: str
) -> tuple[int, Row]:
    """Returns the largest size up to ``limit`` at which a method fits, and its iteration if the method has a planner.

    Args:
        method: Name in ``METHODS``.
        build: Returns the program of a size.
        machine: Machine with the memory to fit.
        start: Initial size of the search.
        limit: Largest size that is tried.
        recompute: As in ``run_method``.
    """
    top = largest(lambda n: lower_bound(method, build(n)) <= machine.memory_bytes, min(start, limit), limit)
    if not METHODS[method].planner:
        return top, {}
    timelines: dict[int, Timeline | None] = {0: None}

    def fits(n: int) -> bool:
        if n not in timelines:
            timelines[n] = run_method(method, build(n), machine, recompute)
        return n == 0 or timelines[n] is not None

    # The lower bound is close, so the search starts there and goes down.
    size = top if fits(top) else top - 1 - largest(lambda steps: not fits(top - steps), 1, top)
    timeline = timelines[size]
    if timeline is None:
        return 0, {}
    return size, {"overhead": timeline.overhead, "iteration_ns": timeline.iteration_ns, "peak": timeline.peak_bytes}


def panel(
    title: str,
    paper: Mapping[str, int | None],
    ours: Sequence[tuple[str, str, int, str]],
    axis: str,
    room: float,
    bound: int | None = None,
) -> Panel:
    """Returns a panel with a hollow bar per framework of the paper, and a bar per method of ours.

    Args:
        title: Title of the panel.
        paper: Size by framework; None: not available.
        ours: Method, name, size and text of each bar.
        axis: Label of the axis of sizes.
        room: Factor by which the axis exceeds the largest bar.
        bound: Size to mark with a line, or None.
    """
    n = len(paper)
    texts = ["N/A" if value is None else f"{value:,}" for value in paper.values()]
    marks: list[Mark] = [Bars(range(n), list(paper.values()), INK, hollow=True, thick=0.7, texts=texts)]
    marks += [
        Bars([n + i], [value], METHODS[method].color or color(method), thick=0.7, texts=[text])
        for i, (method, _, value, text) in enumerate(ours)
    ]
    marks += [] if bound is None else [Rule(bound)]
    names = [*(f"{name} (paper)" for name in paper), *(name for _, name, _, _ in ours)]
    return Panel(title, marks, Axis(axis, limits=(0, None), room=room), Axis(names=names))


class Deeper:
    """Network at any depth, derived from one capture by repeating one of several equal layers.

    A layer consists of the kernels that use parameters ``layers.N.…``, the following kernels without parameters in the
    forward pass, and the preceding ones in the backward pass. A tensor belongs to the layer whose kernel accesses it
    first. Copies are linked as layer N is with its neighbors. A kernel elsewhere that reads a tensor of layer N (such
    as a marker that keeps all gradients) reads the tensors of all copies.

    Args:
        layer: N; the adjacent layers must be equal to it.

    Raises:
        ValueError: Adjacent layers differ, or the layer's kernels are not contiguous in every phase.
    """

    def __init__(self, program: Program, layer: int) -> None:
        self._program = program
        self._layer = layer
        self._kernels = _kernel_layers(program)
        self._tensors = [
            number(t.name) if t.persistent else self._kernels[uses[0]] if uses else None
            for t, uses in zip(program.tensors, program.accesses, strict=True)
        ]
        members = self._tensors_of(layer)
        self._twin: dict[int, int] = {}  # a neighbor's tensor: the corresponding tensor of the layer
        for neighbor in (layer - 1, layer + 1):
            others = self._tensors_of(neighbor)
            if [_plain(program.tensors[t]) for t in members] != [_plain(program.tensors[t]) for t in others]:
                raise ValueError(
                    f"{program.name}: layers {neighbor} and {layer} differ; choose a layer with equal neighbors"
                )
            self._twin.update(zip(others, members, strict=True))
        self._pieces = [list(piece) for _, piece in groupby(range(len(program.kernels)), self._piece_key)]
        phases = [program.kernels[p[0]].phase for p in self._pieces if self._kernels[p[0]] == layer]
        if len(phases) != len(set(phases)):
            raise ValueError(f"{program.name}: the kernels of layer {layer} are not contiguous; choose another layer")

    def _tensors_of(self, layer: int) -> list[int]:
        return [t for t, owner in enumerate(self._tensors) if owner == layer]

    def _piece_key(self, k: int) -> tuple[bool, str]:
        return self._kernels[k] == self._layer, self._program.kernels[k].phase

    def with_more(self, more: int) -> Program:
        """Returns the program with ``more`` layers (0: unchanged); raises ValueError if negative."""
        if more < 0:
            raise ValueError(f"more: expected at least 0, got {more}")
        program = self._program
        layer = self._layer
        members = self._tensors_of(layer)
        tensors = list(program.tensors)
        copies = [{t: t for t in members}]
        for c in range(1, more + 1):
            copies.append({t: len(tensors) + i for i, t in enumerate(members)})
            tensors += [replace(tensors[t], name=f"{tensors[t].name}+{c}") for t in members]

        def link(k: int, c: int) -> Kernel:
            def ids(tensor_ids: tuple[int, ...]) -> tuple[int, ...]:
                return tuple(chain.from_iterable(self._ids(t, self._kernels[k], c, copies) for t in tensor_ids))

            kernel = program.kernels[k]
            return replace(kernel, inputs=ids(kernel.inputs), outputs=ids(kernel.outputs))

        kernels: list[Kernel] = []
        for piece in self._pieces:
            inside = self._kernels[piece[0]] == layer
            order = range(more + 1) if inside else range(1)
            for c in reversed(order) if program.kernels[piece[0]].phase == "backward" else order:
                kernels += [link(k, c) for k in piece]
        return Program(program.name, tuple(tensors), tuple(kernels))

    def _ids(self, t: int, layer: int | None, c: int, copies: Sequence[Mapping[int, int]]) -> Iterable[int]:
        """Returns the tensors that replace ``t`` for a kernel of copy ``c`` of a layer."""
        owner = self._tensors[t]
        last = len(copies) - 1
        if layer == self._layer and owner is not None:
            if owner == layer:
                return (copies[c][t],)
            other = c + owner - layer
            return (copies[other][self._twin[t]],) if t in self._twin and 0 <= other <= last else (t,)
        if owner != self._layer:
            return (t,)
        if layer in (owner - 1, owner + 1):
            return (copies[0 if layer == owner - 1 else last][t],)
        return (copy[t] for copy in copies)


def number(name: str) -> int | None:
    """Returns N for a parameter, buffer or optimizer state ``…layers.N.…``."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    return int(match[1]) if match else None


def _kernel_layers(program: Program) -> list[int | None]:
    """Returns the layer of every kernel."""
    numbers = [number(t.name) if t.persistent else None for t in program.tensors]
    touched = [{numbers[t] for t in kernel.accesses} - {None} for kernel in program.kernels]
    out: list[int | None] = [None] * len(touched)
    for backward in (False, True):
        current = None
        n = len(touched)
        for k in reversed(range(n)) if backward else range(n):
            if (program.kernels[k].phase == "backward") == backward:
                current = max(touched[k]) if len(touched[k]) == 1 else current if not touched[k] else None
                out[k] = current
    return out


def _plain(tensor: Tensor) -> Tensor:
    return replace(tensor, name="")


def without_names(program: Program) -> tuple[list[Tensor], list[Kernel]]:
    """Returns a program's tensors and kernels without names, with tensors in the order of first access.

    Equal results mean equivalent programs.
    """
    order = list(dict.fromkeys(t for kernel in program.kernels for t in kernel.accesses))
    index = {t: i for i, t in enumerate(order)}
    return [_plain(program.tensors[t]) for t in order], [
        replace(k, inputs=tuple(sorted(index[t] for t in k.inputs)), outputs=tuple(sorted(index[t] for t in k.outputs)))
        for k in program.kernels
    ]


STAGES = (6, 32, 6)  # n1, n2, n4
CAPTURED = 4  # n3 of the capture, whose third block is repeated


class Table4(Figure):
    """Table 4: the deepest ResNet that trains in 12 GB, by framework, and by method also at batch size 1."""

    name = "superneurons_table4"
    # n3 at which a search begins, and the maximum.
    first: ClassVar = {"own": CAPTURED, "none": 128}
    most = 2048

    def tasks(self, settings: DictConfig) -> Rows:
        methods = choices(settings, "methods", METHODS)
        captured = str(settings.captured)
        if captured not in methods:
            raise cli.UsageError(f"figure.captured: expected one of the methods {', '.join(methods)}, got {captured!r}")
        batch = cli.integer(settings, "batch_size", least=2)
        common = {"recompute": cli.choice(settings, "recompute", RECOMPUTE)}
        out = [{"method": name, "batch": batch, "captured": name == captured, **common} for name in methods]
        at_batch_1 = choices(settings, "batch_1", METHODS) if settings.batch_1 else []
        return out + [{"method": name, "batch": 1, "captured": False, **common} for name in at_batch_1]

    def run(self, task: Row, machine: Machine) -> Row:
        method = task["method"]
        batch = task["batch"]
        shallow = Deeper(base(batch, machine), 4 + sum(STAGES[:2]) + CAPTURED // 2)
        start = self.first.get(method, 400) if batch > 1 else 400
        recompute = task["recompute"]
        n3, iteration = max_size(
            method, lambda n: shallow.with_more(n - CAPTURED), machine, start, self.most, recompute
        )
        program = shallow.with_more(n3 - CAPTURED)
        if task["captured"]:
            program_captured = capture(batch, n3, machine)
            if without_names(program_captured) != without_names(program):
                raise AssertionError(
                    f"n3 = {n3}: the captured program differs from the one with repeated blocks; report it"
                )
            program = program_captured
            if METHODS[method].planner and run_method(method, program_captured, machine, recompute) is None:
                raise AssertionError(f"{method}: n3 = {n3} fits with repeated blocks, but not as captured; report it")
        sums = [m for m in feature_maps(program) if program.kernels[m.layer].kind in JOINS]
        return {
            "n3": n3,
            "depth": depth(n3),
            "kernels": len(program.kernels),
            "memory": machine.memory_bytes,
            "at_end": program.live_bytes[-1],
            "sums": sum(program.tensors[m.tensor].nbytes for m in sums),
            **iteration,
        }

    def template_values(self, rows: Rows) -> Row:
        lines = [
            {
                **row,
                "label": METHODS[row["method"]].label + ", batch size 1" * (row["batch"] == 1),
                "held": row["at_end"] / row["memory"],
                "overhead": row.get("overhead"),
                "images": row["batch"] / row["iteration_ns"] * 1e9 if "overhead" in row else None,
            }
            for row in rows
        ]
        paper = [{"framework": name, "there": depth} for name, depth in self.published[16].items()]
        own = next((line["depth"] for line in lines if line["method"] == "superneurons" and line["batch"] == 16), None)
        single = {line["method"]: line["depth"] for line in lines if line["batch"] == 1}
        rivals = [line["depth"] for line in lines if line["batch"] == 16 and line["method"] in ("vdnn_all", "memonger")]
        return {
            "paper": paper,
            "found": lines,
            "own": own,
            "own_paper": self.published[16]["SuperNeurons"],
            "single": single.get("superneurons"),
            "single_none": single.get("none"),
            "single_gain": single["superneurons"] / single["none"] if {"superneurons", "none"} <= {*single} else None,
            "single_paper": next(iter(self.published[1].values())),
            "ahead": None if own is None else sum(own > depth for depth in rivals),
            "behind": None if own is None else sum(own < depth for depth in rivals),
            "rivals": len(rivals),
        }

    def chart(self, rows: Rows) -> Chart:
        slower = [f" ({row['overhead']:.0%} slower)" if row.get("overhead") else "" for row in rows]
        values = self.template_values(rows)
        bars = [
            (line["method"], line["label"], line["depth"], f"{line['depth']:,}{text}")
            for line, text in zip(values["found"], slower, strict=True)
        ]
        paper = self.published[16] | (self.published[1] if any(row["batch"] == 1 for row in rows) else {})
        note = "Frameworks in the paper (hollow), methods simulated here (filled)"
        title = f"Deepest ResNet in 12 GB, batch size {rows[0]['batch']}"
        if values["own"] and values["rivals"]:
            title = f"{values['own']:,} layers with SuperNeurons (paper: {values['own_paper']:,}), more with "
            title += f"{values['behind']} of {values['rivals']} older methods"
        size = (9.6, 0.7 + 0.36 * (len(paper) + len(rows)))
        axis = f"layers with weights of the deepest ResNet in 12 GB, batch size {rows[0]['batch']}"
        return Chart(title, [panel("", paper, bars, axis, 1.28)], size=size, margins=(0.0, 0.5), note=note)


def capture(batch: int, n3: int, machine: Machine) -> Program:
    """Captures the network."""
    n1, n2, n4 = STAGES
    return figures.program("resnet50_imagenet", machine, batch_size=batch, stages=f"{n1}-{n2}-{n3}-{n4}")


def base(batch: int, machine: Machine) -> Program:
    """Returns the network from which deeper ones are derived."""
    if batch == 1:
        batches = (2, 4)  # a batch of 1 cannot be captured
        return Sizes((capture_base(batches[0]), capture_base(batches[1])), batches, machine).at_batch(1)
    from executor.capture.durations import with_roofline  # PyTorch

    return with_roofline(capture_base(batch), machine)


@lru_cache(maxsize=2)  # a process runs several tasks
def capture_base(batch: int) -> Program:
    """Captures the network; its durations are not used."""
    return capture(batch, CAPTURED, Machine.load("k40c"))


def depth(n3: int) -> int:
    """Returns the number of layers with weights."""
    return 3 * (sum(STAGES) + n3) + 2


class Table5(Figure):
    """Table 5: the largest batch of six networks that trains in 12 GB, by framework."""

    name = "superneurons_table5"
    paper_networks = published("superneurons_table5")
    batches = (32, 64)  # captured
    most = 1 << 14  # batch size
    checked = "superneurons"  # method at whose batch the derived program is compared with a capture

    def tasks(self, settings: DictConfig) -> Rows:
        names = figures.networks(settings, self.paper_networks)
        methods = choices(settings, "methods", METHODS)
        ours = str(settings.ours)
        if self.checked not in methods:
            raise cli.UsageError(
                f"figure.methods: {self.checked} is required, since captures are compared at its batch"
            )
        recompute = cli.choice(settings, "recompute", RECOMPUTE)
        searches: Rows = [{"network": name, "methods": methods, "recompute": recompute} for name in names]
        return searches + [
            {"network": n, "planner": ours, "batch": self.paper_networks[n]["SuperNeurons"]} for n in names
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        name = task["network"]
        if "planner" in task:
            program = figures.program(name, machine, batch_size=task["batch"], algorithms=False)
            return {"overhead": figures.overhead(agents.make(task["planner"]), program, machine, machine.memory_bytes)}
        small, large = (figures.program(name, machine, batch_size=batch, algorithms=False) for batch in self.batches)
        sizes = Sizes((small, large), self.batches, machine)
        results = {}
        for method in task["methods"]:
            batch, iteration = max_size(method, sizes.at_batch, machine, self.batches[0], self.most, task["recompute"])
            results[method] = {"batch": batch, **iteration}
        batch = results[self.checked]["batch"]
        if figures.program(name, machine, batch_size=batch, algorithms=False) != sizes.at_batch(batch):
            raise AssertionError(
                f"{name}: at batch {batch} the captured program differs from the interpolated one; report it"
            )
        kernels = len(small.kernels)
        return {"found": results, "kernels": kernels, "memory": machine.memory_bytes, "host": machine.host_bytes}

    def template_values(self, rows: Rows) -> Row:
        searched = [row for row in rows if "found" in row]
        planned = {row["network"]: row for row in rows if "planner" in row}
        methods = searched[0]["found"]
        networks = []
        for row in searched:
            overhead = planned[row["network"]]["overhead"]
            own = {
                "ours": row["found"][self.checked]["batch"],
                "theirs": self.paper_networks[row["network"]]["SuperNeurons"],
            }
            networks.append({"network": row["network"], "overhead": overhead, **own})
        ahead = {
            name: sum(row["found"][name]["batch"] > row["found"][self.checked]["batch"] for row in searched)
            for name in methods
        }
        lines = []
        for row in searched:
            for name, batch in self.paper_networks[row["network"]].items():
                paper = "N/A" if batch is None else f"{batch:,}"
                lines.append(
                    {"network": row["network"], "method": name, "paper": paper, "ours": None, "overhead": None}
                )
            for method, result in row["found"].items():
                cells = {"ours": result["batch"], "overhead": result.get("overhead")}
                lines.append({"network": row["network"], "method": METHODS[method].label, "paper": None, **cells})
        return {
            "networks": networks,
            "lines": lines,
            "planner": label(next(iter(planned.values()))["planner"]),
            "ahead": {"vdnn_all": None, "memonger": None, **ahead},
            "behind_sums": sum(
                row["found"]["vdnn_all"]["batch"] > row["found"]["superneurons_joins"]["batch"]
                for row in searched
                if {"vdnn_all", "superneurons_joins"} <= {*row["found"]}
            ),
            "behind_vdnn": sum(
                row["found"]["vdnn_all"]["batch"] < row["found"][self.checked]["batch"]
                for row in searched
                if "vdnn_all" in row["found"]
            ),
        }

    def chart(self, rows: Rows) -> Chart:
        panels = []
        for row in (row for row in rows if "found" in row):
            sizes = {m: result["batch"] for m, result in row["found"].items()}
            bound = sizes.get("bound")
            bars = [(m, METHODS[m].label, batch, f"{batch:,}") for m, batch in sizes.items() if m != "bound"]
            title = figures.label(row["network"]) + (f": no plan beyond {bound:,}" if bound else "")
            panels.append(panel(title, self.paper_networks[row["network"]], bars, "largest batch, images", 1.12, bound))
        values = self.template_values(rows)
        networks = values["networks"]
        above = sum(net["ours"] > net["theirs"] for net in networks)
        title = f"SuperNeurons' largest batch tops the paper's on {above} of {len(networks)} networks"
        title += f", vDNN's on {values['behind_vdnn']}" if values["ahead"]["vdnn_all"] is not None else ""
        note = "Largest batch that trains in 12 GB: frameworks in the paper (hollow), methods simulated here (filled)"
        return Chart(title, panels, 2, (3.9, 3.5), (2.2, 0.4), note=note)
