"""Functions as ``torch.compile`` would run them, for captures: AOTAutograd's partition and Inductor's fused kernels.

A function is traced to a forward and a backward graph with Inductor's decompositions and PyTorch's partitioner, which
decides what is saved for the backward pass. Inductor schedules both graphs (``executor.compiled.launches``). Each fused
kernel becomes one call of an operator that computes its part of the graph, so that a capture sees one kernel with the
tensors that it reads and writes. Library calls (matrix products, attention) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from executor.compiled.joint import donatable
from executor.compiled.launches import Launch, launches_of

PARTS: list[fx.GraphModule] = []  # parts of graphs, by the index that ``fused`` is called with


@torch.library.custom_op("headroom::fused", mutates_args=())
def fused(part: int, inputs: list[Tensor]) -> list[Tensor]:
    """Returns the results of ``PARTS[part]``, which is one kernel."""
    return [x.clone() for x in PARTS[part](*inputs)]


@fused.register_fake
def _(part: int, inputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in PARTS[part](*inputs)]


class Step(NamedTuple):
    """One launch: its inputs and results by name in the graph; ``dead`` are names without a later use.

    ``part`` is an index in ``PARTS``; ``is_fused`` is False for library calls.
    """

    part: int
    is_fused: bool
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    dead: tuple[str, ...]


class Scheduled:
    """A graph as a sequence of launches; the last of ``steps`` only creates views, the graph's outputs."""

    def __init__(self, graph: fx.GraphModule, launches: Sequence[Launch]) -> None:
        self.placeholders = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        outputs: Any = graph.graph.output_node().args[0]
        self.is_tensor = [isinstance(out, fx.Node) for out in outputs]
        nodes = {node.name: node for node in graph.graph.nodes}
        known = {nodes[name] for name in self.placeholders}
        groups: list[tuple[list[fx.Node], set[fx.Node], bool]] = []
        for launch in launches:
            results = [nodes[name] for name in launch.values]
            groups.append((results, set(known), launch.joined))
            known.update(results)
        groups.append(([out for out in outputs if isinstance(out, fx.Node)], known, False))
        self.steps: list[Step] = []
        self.used: set[str] = set()
        for results, before, is_fused in reversed(groups):
            # A kernel writes only what a later one reads: Inductor keeps the rest in registers.
            kept = [x for x in results if x not in before and x.name in self.used] if self.steps else results
            if kept:
                part, inputs = _part(graph, kept, before)
                dead = tuple({*inputs} - self.used)
                self.steps.insert(0, Step(part, is_fused, inputs, tuple(node.name for node in kept), dead))
                self.used.update(inputs)

    def __call__(self, args: list[Tensor]) -> list[Tensor | None]:
        """Runs the launches and clears ``args``."""
        values = {name: x for name, x in zip(self.placeholders, args, strict=True) if name in self.used}
        args.clear()
        for step in self.steps[:-1]:
            inputs = [values[name] for name in step.inputs]
            results = fused(step.part, inputs) if step.is_fused else PARTS[step.part](*inputs)
            del inputs
            for name in step.dead:
                del values[name]
            values.update(zip(step.results, results, strict=True))
            del results
        last = self.steps[-1]
        outputs = iter(PARTS[last.part](*(values[name] for name in last.inputs)))
        return [next(outputs) if is_tensor else None for is_tensor in self.is_tensor]


def _part(graph: fx.GraphModule, results: Sequence[fx.Node], known: set[fx.Node]) -> tuple[int, tuple[str, ...]]:
    """Adds the part that computes ``results`` from ``known`` nodes to PARTS; returns its index and inputs."""
    needed: set[fx.Node] = set()
    inputs: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        if node in known:
            inputs[node] = None
        elif node not in needed:
            needed.add(node)
            for argument in node.all_input_nodes:
                visit(argument)

    for node in results:
        visit(node)
    part = fx.Graph()
    copies = {node: part.placeholder(node.name) for node in inputs}
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = part.node_copy(node, lambda x: copies[x])
    part.output([copies[node] for node in results])
    PARTS.append(fx.GraphModule(graph, part))
    return len(PARTS) - 1, tuple(node.name for node in inputs)


class Compiled:
    """``function(*args)`` of tensors, as ``torch.compile`` would run it.

    Args:
        args: Examples: shapes, dtypes, and which of them require gradients. The function returns one tensor.
    """

    def __init__(self, function: Callable[..., Tensor], args: Sequence[Tensor]) -> None:
        forward, backward = _graphs(function, args)
        self.forward = Scheduled(forward, launches_of(forward, False).launches)
        self.backward = Scheduled(backward, launches_of(backward, True, donatable(forward, backward, 1)).launches)

    def __call__(self, *args: Tensor) -> Tensor:
        return _Function.apply(self, *args)  # type: ignore[no-untyped-call]


class _Function(torch.autograd.Function):
    """Runs the graphs; tensors that the backward reads are saved as AOTAutograd saves them."""

    @staticmethod
    def forward(ctx: Any, compiled: Compiled, *args: Tensor) -> Tensor:
        result, *saved = compiled.forward(list(args))
        ctx.save_for_backward(*saved)
        ctx.compiled = compiled
        assert result is not None
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        args = [*ctx.saved_tensors, grad]
        ctx.maybe_clear_saved_tensors()
        return None, *ctx.compiled.backward(args)


def _graphs(function: Callable[..., Tensor], args: Sequence[Tensor]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns forward and backward graphs of a function, partitioned as ``torch.compile`` does."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm)

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, **options, compiler="inductor")

    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype, device="cpu", requires_grad=x.requires_grad) for x in args]
        compiled = aot_function(
            function,
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        compiled(*fakes).sum().backward()
    forward, backward = graphs
    return forward, backward
