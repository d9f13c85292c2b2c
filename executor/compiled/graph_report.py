"""Reports on the graphs of a compiled model."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.report import size
from simulator.schedule import lower


@dataclass(frozen=True)
class Graph:
    """Result of planning one graph.

    Attributes:
        name: Dynamo's compilation id ("0/1" is the second compilation of the first graph).
        limit: Limit in bytes for the allocations of forward and backward.
        without_bytes: Peak of PyTorch's own partition, as Inductor schedules it.
        peak_bytes: Peak of the compiled graphs.
        skip_reason: Reason why the graph was left to PyTorch's partitioner; "" if it was planned or needs no plan.
        program, plan, machine: None or "" without a plan.
        iteration_ns, ideal_ns, floor_ns: Simulated times; the floor is None if the planner does not compute one.
        seconds: CPU time of planning and partitioning.
        looking_s: CPU time of Inductor's scheduling of candidate graphs.
    """

    name: str
    limit: int = 0
    without_bytes: int = 0
    peak_bytes: int = 0
    skip_reason: str = ""
    program: Program | None = None
    plan: Plan | None = None
    machine: str = ""
    iteration_ns: int = 0
    ideal_ns: int = 0
    floor_ns: int | None = None
    seconds: float = 0.0
    looking_s: float = 0.0

    def __str__(self) -> str:
        if self.skip_reason:
            return f"graph {self.name}: left as PyTorch partitions it, because {self.skip_reason}"
        line = f"graph {self.name}: limit {size(self.limit)}, peak {size(self.peak_bytes)}"
        if self.plan is None or self.program is None:
            return f"{line}, which needs no plan"
        reruns = [s.kernel for s in lower(self.program, self.plan).steps if s.is_recomputation]
        ns = sum(self.program.kernels[k].duration_ns for k in reruns)
        swaps = [self.program.tensors[d.tensor].nbytes for d in self.plan.decisions if isinstance(d, Swap)]
        swapped = f"; {len(swaps)} swaps, {size(sum(swaps))} each way" if swaps else ""
        plan = f"plan of {self.plan.planner}: {len(reruns)} kernels recomputed, {ns / 1e6:.2f} ms on {self.machine}"
        ms = self.iteration_ns / 1e6
        overhead = self.iteration_ns / self.ideal_ns - 1
        lines = [
            f"{line} ({size(self.without_bytes)} without a plan)",
            f"  {plan}{swapped}",
            f"  predicted: {ms:.2f} ms, {overhead:.2%} over the ideal",
        ]
        if self.floor_ns is not None:
            lines.append(f"  floor: no plan takes less than {self.floor_ns / 1e6:.2f} ms")
        return "\n".join(lines)


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
