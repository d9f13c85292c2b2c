"""SmartPool's Table I and Fig. 2: peak loads, competitive ratios, and the load operation by operation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from omegaconf import DictConfig

import agents
from agents.planner import MIB
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import published
from experiments.figures.figure import Figure, Rows, span
from experiments.plotting.charts import ONE, Axis, Chart, Line, Mark, Panel, Rule, Words, pairs
from experiments.plotting.palette import ALLOCATORS, FAINT, LOAD
from simulator import Timeline, simulate
from simulator.machine import Machine
from simulator.pool import Intervals, program_lifetimes
from simulator.pool.device import Device, train
from simulator.pool.times import allocation_ns
from simulator.program import Program, Tensor
from simulator.timeline import Span

POOLS = ("cnmem", "smartpool")
PAPER: dict[str, dict[str, float]] = published("smartpool_table1")
ZERO = 0.0005  # overheads up to this print as 0.0 %


class Table1(Figure):
    """Table I: competitive ratio and time of cudaMalloc, CnMem and SmartPool."""

    name = "smartpool_table1"
    paper_networks = PAPER

    def run(self, task: Row, machine: Machine) -> Row:
        from experiments import workloads  # only captures need PyTorch

        config = figures.workload(task["network"])
        program = workloads.load({**config, "algorithms": False}, machine).program
        gradients, filters = kept_by_singa(workloads.build(config)[0])
        singa = Program(program.name, (*program.tensors, *gradients, *filters), program.kernels)
        lives = program_lifetimes(program).intervals
        extra = {"gradients": sum(t.nbytes for t in gradients), "filters": sum(t.nbytes for t in filters)}
        return {
            "load": program.peak_bytes,
            "blocks": len(lives),
            "ratios": ratios(lives, machine),
            "weights": sum(t.nbytes for t in program.tensors if t.kind == "parameter"),
            "ideal_ns": program.ideal_ns,
            "online": online(program),
            "allocation_ns": {name: allocation_ns(name, lives, machine) for name in ("cudamalloc", *POOLS)},
            "singa": {"load": singa.peak_bytes, **extra, "ratios": ratios(program_lifetimes(singa).intervals, machine)},
        }

    def template_values(self, rows: Rows) -> Row:
        networks = [table1_entry(row) for row in rows]
        pools = [row["ratios"] for row in rows]
        return {
            "networks": networks,
            "early": span(len(row["online"]["early"]) for row in rows),
            "equal": sum(net["pool"] == round(net["ratios"]["smartpool"] * net["load"]) for net in networks),
            "exact": max(r["smartpool"] for r in pools),
            "aligned": max(r["aligned"] for r in pools),
            "apart": max(abs(r["smartpool_first"] - r["smartpool"]) for r in pools),
        }

    def chart(self, rows: Rows) -> Chart:
        nets = [table1_entry(row) for row in rows]
        names = Axis(names=[net["label"] for net in nets])
        loads: list[Mark] = [
            Line(
                [net[key] for net in nets],
                range(len(nets)),
                color,
                label,
                "o",
                "",
                size=7,
                texts=[f"{net[key] - 1:+.0%}" for net in nets],
                side=side,
            )
            for key, color, label, side in (
                ("captured", FAINT, "load as captured", "left"),
                ("kept", "#238b45", "with what SINGA keeps", "right"),
            )
        ]
        ratios: list[Mark] = []
        speeds: list[Mark] = []
        for shift, pool in zip((-0.16, 0.16), POOLS, strict=True):
            look = ALLOCATORS[pool]._replace(label=ALLOCATORS[pool].label.partition(",")[0])
            for marks, paper, ours in ((ratios, pool, "ratios"), (speeds, f"{pool}_speedup", "speedups")):
                marks += pairs(look, [net["paper"][paper] for net in nets], [net[ours][pool] for net in nets], shift)
        panels = [
            Panel("Peak load, over the paper's", [ONE, *loads], Axis("ours / paper", "%", (0.62, 1.14)), names),
            Panel("Competitive ratio", [ONE, *ratios], Axis("footprint / peak load", limits=(0.985, None)), names),
            Panel("Speedup (fitted)", speeds, Axis("iteration, cudaMalloc / the pool", "{:.2f}×"), names),
        ]
        worst = {pool: max(net["ratios"][pool] for net in nets) for pool in POOLS}
        title = (
            f"SmartPool packs to {worst['smartpool']:.3f} of the load (paper: "
            f"{max(net['paper']['smartpool'] for net in nets):.3f}), CnMem to {worst['cnmem']:.2f}"
        )
        return Chart(title, panels, size=(3.3, 0.42 * len(rows) + 0.9), margins=(0.0, 1.1), keys=3)


def online(program: Program) -> Row:
    """Returns the peaks of iterations on the Device of section V: early ones, then those in which its pool serves."""
    device = Device()
    early = []
    pooled = []
    for peak in train(device, program, 8):
        (early if device.pool is None else pooled).append(peak)
    return {"early": early, "pooled": pooled, "mismatches": device.mismatches}


def ratios(lives: Intervals, machine: Machine) -> dict[str, float]:
    """Returns footprints relative to the load; ``aligned`` is SmartPool with the machine's alignment."""
    load = lives.peak_bytes
    footprints = {name: figures.checked_packing(name, lives).footprint / load for name in (*POOLS, "smartpool_first")}
    return {**footprints, "aligned": figures.checked_packing("smartpool", lives, machine.alignment).footprint / load}


def kept_by_singa(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the previous iteration's gradients, and transformed filters of 3x3 convolutions of stride 1."""
    gradients = [
        Tensor(f"previous gradient of {name}", p.numel() * p.element_size(), "gradient", True)
        for name, p in model.named_parameters()
    ]
    filters = []
    for name, layer in model.named_modules():
        if getattr(layer, "kernel_size", None) == (3, 3) and layer.stride == (1, 1):
            nbytes = layer.weight.numel() * layer.weight.element_size() * 16 // 9
            filters.append(Tensor(f"transformed filters of {name}", nbytes, "buffer", True))
    return gradients, filters


def table1_entry(row: Row) -> Row:
    """Returns a network's numbers with the paper's."""
    paper = PAPER[row["network"]]
    singa = row["singa"]
    ns = {name: row["ideal_ns"] + malloc_ns for name, malloc_ns in row["allocation_ns"].items()}
    return {
        **row,
        "label": figures.label(row["network"]),
        "paper": paper,
        "cudamalloc_ms": ns["cudamalloc"] / 1e6,
        "speedups": {pool: ns["cudamalloc"] / ns[pool] for pool in POOLS},
        "early": max(row["online"]["early"]),
        "pool": max(row["online"]["pooled"]),
        "captured": row["load"] / MIB / paper["load"],
        "kept": singa["load"] / MIB / paper["load"],
    }


class Operation(NamedTuple):
    """Operation on a tensor (malloc, free, read or write); tensors are numbered in order of appearance."""

    kind: str
    tensor: int
    nbytes: int


class Fig2(Figure):
    """Fig. 2: memory load over several iterations of eager PyTorch, operator by operator."""

    name = "smartpool_fig2"

    def tasks(self, settings: DictConfig) -> Rows:
        iterations = cli.integer(settings, "iterations", least=3)
        names = figures.networks(settings)
        return [{"network": name, "iterations": iterations, "curve": name == names[0]} for name in names]

    def run(self, task: Row, machine: Machine) -> Row:
        from experiments import workloads  # only the run needs PyTorch

        config = figures.workload(task["network"])
        start_bytes, lines, starts = record(workloads.build(config), task["iterations"])
        bounds = list(pairwise([*starts, len(lines)]))
        loads = [start_bytes]
        for line in lines:
            loads.append(loads[-1] + {"malloc": line.nbytes, "free": -line.nbytes}.get(line.kind, 0))
        signatures = [signature(lines[a:b]) for a, b in bounds]
        changes = [[i, b] for i, (a, b) in enumerate(pairwise(loads)) if a != b]
        return {
            "operations": [b - a for a, b in bounds],
            "peaks": [max(loads[a : b + 1]) for a, b in bounds],
            "same": [operations == signatures[1] for operations in signatures],  # equal to the second iteration
            "starts": starts,
            "before": start_bytes,
            "points": changes if task["curve"] else [],
            "captured": figures.program(task["network"], machine).peak_bytes,
        }

    def template_values(self, rows: Rows) -> Row:
        return {
            "networks": [{**row, "paper": PAPER[row["network"]]["load"]} for row in rows],
            "count": len(rows),
            "middle": sum(all(row["same"][1:]) for row in rows),
            "exact": sum(row["peaks"][1] == row["captured"] for row in rows),
        }

    def chart(self, rows: Rows) -> Chart:
        row = next(row for row in rows if row["points"])
        total = sum(row["operations"])
        ink = ALLOCATORS["smartpool"].color
        x = [0, *(i for i, _ in row["points"]), total]
        y = [row["before"] / MIB, *(b / MIB for _, b in row["points"])]
        y.append(y[-1])
        peak = row["captured"] / MIB
        bounds = [*row["starts"], total]
        marks: list[Mark] = [
            Line(x, y, ink, step=True, width=1.2, band=(0, y), shade=0.15),
            Rule(peak, horizontal=True, color=LOAD, label=f"peak of the captured program: {peak:,.0f} MB"),
            *(Rule(start, color=FAINT, line="-") for start in row["starts"][1:]),
        ]
        for i, ((a, b), is_same) in enumerate(zip(pairwise(bounds), row["same"], strict=True), 1):
            text = "" if i == 2 else "\nas the 2nd" if is_same else "\nno momentum yet" if i == 1 else "\nother"
            marks.append(Words((a + b) / 2, 0.98, f"iteration {i}{text}", top=True))
        x_axis = Axis("operation (malloc, free, read or write)", "{:,.0f}", (0, total))
        panel = Panel("", marks, x_axis, Axis("memory load (MB)", limits=(0, 1.3 * max(y))))
        values = self.template_values(rows)
        title = f"Iterations 2 to {row['iterations']} are identical in {values['middle']} of {values['count']} networks"
        title += f"; here {figures.label(row['network'])}, batch 100"
        return Chart(title, [panel], size=(10.0, 3.9))


def signature(lines: list[Operation]) -> list[tuple[str, int, int]]:
    """Returns operations with tensors renumbered by first appearance."""
    indices: dict[int, int] = {}
    return [(line.kind, line.nbytes, indices.setdefault(line.tensor, len(indices))) for line in lines]


def record(parts: Any, iterations: int) -> tuple[int, list[Operation], list[int]]:
    """Trains for some iterations and records the operations on tensors.

    Args:
        parts: Model, loss function, optimizer and batch, as from ``workloads.build``.

    Returns:
        Bytes allocated before the first iteration; the operations; the index of each iteration's first operation.
    """
    import torch

    model, loss_fn, optimizer, (x, y) = parts
    recorder = _recorder()
    start_bytes = sum(recorder.register(tensor) for tensor in (*model.parameters(), *model.buffers()))
    starts = []
    with recorder:
        for _ in range(iterations):
            starts.append(len(recorder.lines))
            images, labels = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, y))
            loss_fn(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del images, labels
            recorder.record_freed()
    return start_bytes, recorder.lines, starts


def _recorder() -> Any:
    """Returns a dispatch mode that records the effects of every operator on storages in ``lines``."""
    from torch import Tag, Tensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from executor.capture.operators import ALLOCATIONS, running_statistics, written_tensors

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[Operation] = []
            self.indices: dict[Any, int] = {}  # by storage, including dead ones
            self.live: dict[Any, int] = {}  # bytes of live storages

        def register(self, tensor: Tensor) -> int:
            """Registers a tensor; returns its bytes if the storage is new, else 0."""
            key = StorageWeakRef(tensor.untyped_storage())
            if key in self.indices:
                return 0
            self.indices[key] = len(self.indices)
            self.live[key] = tensor.untyped_storage().nbytes()
            return self.live[key]

        def record_freed(self) -> None:
            """Records the storages freed since the last operator."""
            for key in [key for key in self.live if key.expired()]:
                self.lines.append(Operation("free", self.indices[key], self.live.pop(key)))

        def record(self, kind: str, tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            self.lines.append(Operation(kind, self.indices[StorageWeakRef(storage)], storage.nbytes()))

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.record_freed()
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            out = func(*args, **(kwargs or {}))
            results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            for result in results:
                if self.register(result):
                    self.record("malloc", result)
            written = written_tensors(func, args, kwargs or {}) + running_statistics(func, args, kwargs or {})
            input_keys = {StorageWeakRef(x.untyped_storage()) for x in inputs}
            created = [x for x in results if StorageWeakRef(x.untyped_storage()) not in input_keys]
            is_view = Tag.inplace_view in func.tags or not (written or created)
            if not is_view and func._overloadpacket not in ALLOCATIONS:
                for kind, tensors in (("read", inputs), ("write", [*written, *created])):
                    for tensor in unique(tensors):
                        self.record(kind, tensor)
            return out

    def unique(tensors: list[Tensor]) -> list[Tensor]:
        return list({StorageWeakRef(x.untyped_storage()): x for x in tensors}.values())

    return Recorder()


def limits_mb(settings: DictConfig, network: Any) -> list[float]:
    """Returns the limits in the YAML file in the paper's MB; raises UsageError if one is invalid for this network."""
    if network not in PAPER:
        raise cli.UsageError(f"figure.network: {network!r} is not in Table I ({', '.join(PAPER)})")
    load = PAPER[network]["load"]
    expected = f"MB above 0, at most {network}'s {load:g}"
    return figures.numbers(settings, "limits", lambda value: 0 < value <= load, expected)


def our_limit(program: Program, network: str, paper_mb: float) -> int:
    """Returns the limit in bytes that requires as much swapping out as the paper's limit in MB.

    Raises:
        ValueError: The paper's limit is above its load.
    """
    load = PAPER[network]["load"]
    if paper_mb > load:
        raise ValueError(f"{network}: the paper's load of {load} MB is below the limit of {paper_mb:g} MB")
    return program.peak_bytes - round((load - paper_mb) * MIB)


def run_planner(planner: agents.Planner, program: Program, machine: Machine, limit: int) -> Timeline:
    """Returns the timeline of a planner's plan under its enforced limit; raises Infeasible if it finds none."""
    plan = planner.plan(program, machine, limit)
    return simulate(program, plan, machine, min(limit, plan.limit))


def last_kernels(timeline: Timeline, program: Program) -> list[Span]:
    """Returns the kernels of the last iteration in program order, for a plan without recomputation."""
    begin = timeline.last_start_ns
    return [s for s in timeline.spans if s.kind == "kernel" and s.start_ns >= begin][: len(program.kernels)]


def waits(timeline: Timeline, program: Program) -> list[int]:
    """Returns the compute stream's wait before each kernel of the last iteration in ns, without recomputation."""
    kernels = last_kernels(timeline, program)
    ready_ns = [timeline.last_start_ns, *(s.end_ns for s in kernels)]
    return [s.start_ns - ready for s, ready in zip(kernels, ready_ns, strict=False)]
