"""Reports on the graphs of a compiled model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.pool.packed import packed_bytes
from simulator.program import Program, Tensor, TensorKind
from simulator.report import KINDS, Report, report as reported, size
from simulator.schedule import Schedule, lower


@dataclass(frozen=True)
class Graph:
    """Result of planning one graph.

    Attributes:
        name: Dynamo's compilation id ("0/1" is the second compilation of the first graph).
        limit: Limit in bytes for the allocations of forward and backward.
        without_bytes: Peak of PyTorch's own partition, as Inductor schedules it.
        peak_bytes: Peak of the compiled graphs.
        skip_reason: Reason why the graph was left to PyTorch's partitioner; "" if it was planned or needs no plan.
        program, machine: None if it was left to PyTorch.
        plan: None without a plan.
        held: Bytes beside ``limit`` by kind of tensor, if the limit is a device's.
        iteration_ns, ideal_ns, floor_ns: Simulated times; the floor is None if the planner does not compute one.
        seconds: CPU time of planning and partitioning.
        looking_s: CPU time of Inductor's scheduling of candidate graphs.
        region: The modules that the graph is compiled for, if the model is compiled by regions.
        copies: Number of these modules; the limit and peaks are those of all of them.
        other_bytes: Bytes that the others hold while one of them runs.
        host_bytes: Pinned host memory of one step's swaps.
        is_measured: Whether durations are those of a profiled step.
        measured_ns: Duration of all kernels in the step that ``measure`` profiled; 0 without it.
    """

    name: str
    limit: int = 0
    without_bytes: int = 0
    peak_bytes: int = 0
    skip_reason: str = ""
    program: Program | None = None
    plan: Plan | None = None
    machine: Machine | None = None
    iteration_ns: int = 0
    ideal_ns: int = 0
    floor_ns: int | None = None
    seconds: float = 0.0
    looking_s: float = 0.0
    held: Mapping[str, int] = field(default_factory=dict)
    region: str = ""
    copies: int = 1
    other_bytes: int = 0
    host_bytes: int = 0
    is_measured: bool = False
    measured_ns: int = 0

    @property
    def frame(self) -> str:
        """Part of the name that compilations for other shapes share."""
        return self.region or frame_of(self.name)

    @cached_property
    def schedule(self) -> Schedule | None:
        """Schedule of the plan; None without a plan."""
        return lower(self.program, self.plan) if self.program and self.plan else None

    @property
    def kernels_ns(self) -> int:
        """Predicted duration of all kernels of the plan, recomputed ones included; 0 without a plan."""
        return sum(step.duration_ns for step in self.schedule.steps) if self.schedule else 0

    def report(self) -> Report:
        """Returns the report of ``fit``: peaks by kind of tensor, moved tensors and predicted time.

        Its peaks are the Program's; ``peak_bytes`` also knows results that Inductor writes over their inputs.

        Raises:
            ValueError: If the graph was left to PyTorch.
        """
        if self.program is None or self.machine is None:
            raise ValueError(f"graph {self.name} was left to PyTorch and has no plan: {self.skip_reason}; skip it")
        counted = {**self.held, "activation": self.held.get("activation", 0) + self.other_bytes}
        kinds = {kind: n for kind, n in counted.items() if n}
        held = tuple(Tensor(f"held:{kind}", n, cast(TensorKind, kind), True) for kind, n in kinds.items())
        program = replace(self.program, tensors=(*self.program.tensors, *held))
        plan = replace(self.plan, fingerprint="", structure="") if self.plan else None
        required = self.schedule.required_bytes if self.schedule else 0
        limit = max(self.limit - self.other_bytes, required) + sum(kinds.values())
        unplanned = simulate(program, Plan(), self.machine, program.peak_bytes)
        planned = simulate(program, plan, self.machine, limit) if plan and plan.decisions else None
        packed = packed_bytes(planned or unplanned, limit, self.machine.alignment)
        return reported(program, self.machine, limit, packed, unplanned, planned, plan, self.floor_ns)

    def __str__(self) -> str:
        if self.skip_reason:
            return f"graph {self.name}: left as PyTorch partitions it, because {self.skip_reason}"
        beside = f" beside {describe(self.held)}" if self.held else ""
        region = f" ({self.copies} x {self.region})" if self.region else ""
        line = f"graph {self.name}{region}: limit {size(self.limit)}{beside}, peak {size(self.peak_bytes)}"
        if self.plan is None or self.program is None or self.machine is None or self.schedule is None:
            return f"{line}, which needs no plan"
        reruns = [step.kernel for step in self.schedule.steps if step.is_recomputation]
        ns = sum(self.program.kernels[k].duration_ns for k in reruns)
        swaps = [self.program.tensors[d.tensor].nbytes for d in self.plan.decisions if isinstance(d, Swap)]
        swapped = f"; {len(swaps)} swaps, {size(sum(swaps))} each way, {size(self.host_bytes)} pinned" if swaps else ""
        plan = (
            f"plan of {self.plan.planner}: {len(reruns)} kernels recomputed, {ns / 1e6:.2f} ms on {self.machine.name}"
        )
        ms = self.iteration_ns / 1e6
        overhead = self.iteration_ns / self.ideal_ns - 1
        lines = [
            f"{line} ({size(self.without_bytes)} without a plan)",
            f"  {plan}{swapped}",
            f"  predicted: {ms:.2f} ms, {overhead:.2%} over the ideal",
        ]
        if self.measured_ns:
            source = "an earlier step" if self.is_measured else "the roofline"
            lines.append(
                f"  measured: {self.measured_ns / 1e6:.2f} ms in kernels; predicted from {source}: "
                f"{self.kernels_ns / 1e6:.2f} ms"
            )
        if self.floor_ns is not None:
            lines.append(f"  floor: no plan takes less than {self.floor_ns / 1e6:.2f} ms")
        return "\n".join(lines)


def frame_of(name: str) -> str:
    """Returns the part of a graph's name that its compilations for other shapes share."""
    return name.split("/")[0]


def describe(held: Mapping[str, int]) -> str:
    """Formats bytes by kind of tensor: "3.00 GiB of parameters and 6.00 GiB of optimizer state"."""
    parts = [f"{size(nbytes)} of {KINDS[kind]}" for kind, nbytes in held.items()]
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


@dataclass(frozen=True)
class CompiledReport:
    """Graphs of a compiled model in compilation order; ``str`` formats them as text."""

    graphs: tuple[Graph, ...]

    @property
    def peak_bytes(self) -> int:
        """Largest peak among the graphs."""
        return max((graph.peak_bytes for graph in self.graphs), default=0)

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "nothing compiled yet: call the model, with gradients"
