"""Captured steps: the program, the graph that executes it, and where the step's tensors are bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_unflatten

from executor.capture.algorithms import convolution_of, with_algorithms
from executor.capture.ambient import Modes
from executor.capture.batches import constant_key, flatten
from executor.capture.durations import Precision, compute_dtype, estimated_flops, kernel_ns
from executor.capture.effects import Effect
from executor.capture.hooks import Hooks
from executor.capture.optimizers import Numbers
from executor.capture.references import PythonValues
from executor.capture.state import Home
from simulator.kernel_times import scaled
from simulator.machine import Machine
from simulator.program import Program
from simulator.report import Origins, Place, size


class MicroBatch(NamedTuple):
    """The end of a micro-batch.

    Attributes:
        end: First kernel after the micro-batch.
        loss: Node of its contribution to the step's loss.
        draw_kernel: Kernel after whose draws the random state stands at this point; -1 for the state before the step.
        is_reset: Whether the random state was reset, so that ``draw_kernel`` is not the kernel that drew last.
    """

    end: int
    loss: fx.Node
    draw_kernel: int
    is_reset: bool


class UserHolds(NamedTuple):
    """Tensors that a training loop keeps alive from one step to the next.

    The program leaves them out: its tensors that are not persistent die within a step.

    Attributes:
        outputs: Tensors of the model's result.
        outputs_end: First kernel after the model's next result replaces ``outputs``.
        gradients: Tensors that are ``.grad`` of parameters when an optimizer steps, or at the step's end.
        zero_grad: First kernel after ``zero_grad`` (the number of kernels if it is called at the step's end); -1 if it
            is not called and gradients accumulate.
    """

    outputs: tuple[int, ...]
    outputs_end: int
    gradients: tuple[int, ...]
    zero_grad: int


class Returned(NamedTuple):
    """Layout of the graph's outputs: the step's results, gradients, their norm, and tensors of effects.

    Attributes:
        spec, tensors: Structure of the step's result, and which of its leaves are tensors (the others are None).
        gradients: Placeholders of the parameters whose gradients stay after the step.
        norm: Whether the outputs contain the gradient norm.
        effects: Tensors that the step leaves in the user's objects.
        rebound: Placeholders that the step rebinds to a new tensor, which is copied into them.
    """

    spec: TreeSpec
    tensors: tuple[bool, ...]
    gradients: tuple[int, ...]
    norm: bool
    effects: tuple[Effect, ...]
    rebound: tuple[int, ...]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Returns the step's result, rebuilt from the graph's outputs."""
        flat = iter(outputs)
        return tree_unflatten([next(flat) if tensor else None for tensor in self.tensors], self.spec)


class Source(NamedTuple):
    """The captured call ``step(*args)`` and a function that captures it with other arguments.

    Attributes:
        roots: Objects from which the step's state is reached, each with its name.
    """

    step: Callable[..., Any]
    args: Any
    roots: tuple[tuple[Any, str], ...]
    recapture: Callable[[Any], Captured]


@dataclass(frozen=True, eq=False)
class HostRead:
    """A number that the step's Python code reads from its batch, as in ``if mask.all(): …``.

    It depends on the batch alone or on constants (``torch.arange``). Tracing computes it from the example batch. The
    graph is valid only for batches with the same number, so each step computes and compares it first.

    Attributes:
        nodes: Graph nodes that compute it, in order; the last one is the tensor that is read (or its placeholder).
        constants: Constant tensors of the graph, by node.
        value: Its value at capture time.
        where: The line of the user's code that reads it.
    """

    nodes: tuple[fx.Node, ...]
    constants: Mapping[fx.Node, Any]
    value: Any
    where: str

    @cached_property
    def inputs(self) -> set[fx.Node]:
        """Placeholders of the tensors that it depends on."""
        return {n for node in self.nodes for n in (node, *node.all_input_nodes) if n.op == "placeholder"}

    def evaluate(self, batch: Mapping[fx.Node, Tensor]) -> Any:
        """Returns the number for a batch, given as tensors by placeholder."""
        return evaluate_number(self.nodes, {**self.constants, **batch})


def evaluate_number(nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
    """Evaluates graph nodes on given input values and returns the number that the last one computes.

    If an operator writes in place, the input tensors are cloned first.
    """
    table = dict(values)
    if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in nodes):
        for operand in {n for node in nodes for n in node.all_input_nodes} & table.keys():
            table[operand] = table[operand].clone() if isinstance(table[operand], Tensor) else table[operand]
    last: Any = None
    with torch.no_grad(), torch._C._DisableAutocast():  # the nodes contain its casts
        for node in nodes:
            if node in values:  # a tensor of the batch itself
                last = table[node]
                continue
            assert isinstance(node.target, Callable)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), table.__getitem__)
            last = table[node] = node.target(*args, **kwargs)
    return last.item()


@dataclass(frozen=True, eq=False)
class Captured:
    """A program and the graph from which it was built.

    ``graph`` takes the placeholders' tensors in order and returns ``outputs``, the flat list of the step's tensors. On
    real tensors it performs exactly the step, including in-place updates of the state.

    Attributes:
        program: Kernels and tensors of the step.
        graph: The step's operators as PyTorch executes them.
        nodes: Per kernel, its operator and its getitems; () for a marker.
        values: Index in ``program.tensors`` of each node whose value is one tensor.
        placeholders: Inputs of the graph, in order.
        names: Name of each placeholder, such as "features.0.weight" or "optimizer.features.0.weight.momentum_buffer".
        sources: The user's tensor of each placeholder; None for state that does not exist yet.
        homes: Slot that binds each placeholder's tensor now; None for arguments.
        devices: Device of each placeholder.
        outputs: Nodes of the tensors that the graph returns.
        spec: Structure of the step's arguments.
        leaves: The step's arguments, flat; placeholders replace tensors.
        settings: Constant options per optimizer and group.
        numbers: Optimizer options that may change between steps.
        skip_flags: Numbers that skip the kernels in ``skippable`` if nonzero (GradScaler).
        skippable: Kernels that a GradScaler may skip.
        draws: Kernel after whose draws the random state of a kernel begins, if not the last; the number of kernels
            stands for the step's end.
        modules: Modules of the step, each with its training mode and its submodules.
        places: Source location of each kernel; a marker has the place of the kernel before it.
        owners: Module of each tensor: that of its parameter, also for buffers, gradients and optimizer state; "inputs"
            for the step's arguments; otherwise that of the first kernel that uses it.
        precision: PyTorch's precision flags at the capture.
        micro: Ends of the micro-batches, with gradient accumulation.
        holds: Tensors that the training loop keeps from one step to the next.
        python: Python values that the step reads and writes.
        hooks: Hooks of the step's tensors and modules.
        modes: PyTorch's ambient modes at the capture.
        is_first: Whether later steps differ from this one.
        returned: Layout of the graph's outputs.
        source: The captured call, and how to capture it with other arguments.
        reads: Numbers of the batch on which the step branches.
        early_update: Whether the kernels of the update are in the backward pass (early_update.py).
    """

    program: Program
    graph: fx.GraphModule
    nodes: tuple[tuple[fx.Node, ...], ...]
    values: dict[fx.Node, int]
    placeholders: tuple[fx.Node, ...]
    names: tuple[str, ...]
    sources: tuple[Tensor | None, ...]
    homes: list[Home | None]
    devices: tuple[torch.device, ...]
    outputs: tuple[fx.Node, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    settings: tuple[tuple[Optimizer, tuple[dict[str, Any], ...]], ...]
    numbers: Numbers
    skip_flags: frozenset[fx.Node]
    skippable: frozenset[int]
    draws: dict[int, int]
    modules: tuple[tuple[nn.Module, bool, tuple[nn.Module | None, ...]], ...]
    places: tuple[Place, ...]
    owners: tuple[str, ...]
    precision: Precision
    micro: tuple[MicroBatch, ...]
    holds: UserHolds
    python: PythonValues
    hooks: Hooks
    modes: Modes
    is_first: bool
    returned: Returned
    source: Source
    reads: tuple[HostRead, ...]
    early_update: bool = False

    def __post_init__(self) -> None:
        self.python.bind(self.homes, self.returned.effects)

    @property
    def origins(self) -> Origins:
        """Modules and source lines of the program's tensors and kernels."""
        return Origins(self.places, self.owners)

    def node_devices(self) -> dict[fx.Node, torch.device]:
        """Returns each node's device: the one its operator names, else that of its inputs (a GPU before the host)."""
        placeholder_devices = dict(zip(self.placeholders, self.devices, strict=True))
        out: dict[fx.Node, torch.device] = {}
        for node in self.graph.graph.nodes:
            if node.op == "get_attr":
                value = getattr(self.graph, str(node.target), None)
                out[node] = value.device if isinstance(value, Tensor) else torch.device("cpu")
            elif node in placeholder_devices:
                out[node] = placeholder_devices[node]
            elif isinstance(requested := node.kwargs.get("device"), torch.device):
                out[node] = requested
            else:
                inputs = [out[a] for a in node.all_input_nodes]
                out[node] = next((p for p in inputs if p.type != "cpu"), torch.device("cpu"))
        return out

    def numbers_of(self, args: Any) -> tuple[Any, ...]:
        """Returns the keys of the numbers that the step's Python code would read from these arguments (``reads``)."""
        leaves, _ = flatten(args)
        batch = {leaf: value for leaf, value in zip(self.leaves, leaves, strict=True) if isinstance(leaf, fx.Node)}
        return tuple(constant_key(read.evaluate(batch)) for read in self.reads)

    def on(self, machine: Machine, iteration_ns: int | None = None, algorithms: bool = False) -> Captured:
        """Returns this capture with durations for another machine (see ``kernel_ns``).

        Args:
            iteration_ns: A measured iteration time in ns to which the durations are scaled.
            algorithms: Whether convolutions get the workspace of their fastest algorithm and the other algorithms as
                variants (see ``with_algorithms``). Otherwise they have neither.

        Returns:
            The same capture, with durations in ns.

        Raises:
            FormatError: If the machine has no rate for float32.
            ValueError: If ``iteration_ns`` is not positive, or no kernel takes time.
        """
        is_multi_tensor = self._is_multi_tensor
        durations = [
            kernel_ns(k, nodes, machine, self.precision, is_multi_tensor and k.kind == "optimizer")
            for k, nodes in zip(self.program.kernels, self.nodes, strict=True)
        ]
        candidates = {k: convolution_of(nodes[0]) for k, nodes in enumerate(self.nodes) if nodes and algorithms}
        convolutions = {k: convolution for k, convolution in candidates.items() if convolution is not None}
        program = self.program.with_durations(scaled(durations, iteration_ns))
        return replace(self, program=with_algorithms(program, convolutions, machine))

    def dtypes(self, machine: Machine) -> tuple[str, ...]:
        """Returns each kernel's compute dtype, as named in ``flops_per_s``; "" for a marker."""
        pairs = zip(self.program.kernels, self.nodes, strict=True)
        return tuple(compute_dtype(kernel, nodes, machine, self.precision) for kernel, nodes in pairs)

    def arithmetic(self, machine: Machine) -> str:
        """Returns sentences on compute dtypes, estimated FLOPs and copied weights for reports; "" if none applies."""
        dtypes: dict[str, set[str]] = {}
        for kernel, name in zip(self.program.kernels, self.dtypes(machine), strict=True):
            if kernel.flops and name:
                kind = "convolutions" if kernel.kind == "conv" else "matrix products"
                dtypes.setdefault(kind, set()).add(name.replace("tf32", "TF32"))
        parts = [f"{kind} in {' and '.join(sorted(names, key=str.lower))}" for kind, names in sorted(dtypes.items())]
        listing = ", ".join(parts)
        sentence = f"They are timed with {listing}, as the step's types and PyTorch's flags have it." if parts else ""
        estimated = {
            k.name for k, nodes in zip(self.program.kernels, self.nodes, strict=True) if estimated_flops(k, nodes)
        }
        note = f"FLOPs of {', '.join(sorted(estimated))} are estimated from shapes." if estimated else ""
        return " ".join(filter(None, (sentence, note, self._copied_weights)))

    @property
    def _copied_weights(self) -> str:
        """A sentence about stacked weights that an index copies into more bytes than they have, or ""."""
        kernels = []
        for k, nodes in zip(self.program.kernels, self.nodes, strict=True):
            if nodes and nodes[0].target in (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default):
                weights = nodes[0].args[0]
                assert isinstance(weights, fx.Node)
                tensor = self.program.tensors[self.values[weights]]
                nbytes = sum(self.program.tensors[t].nbytes for t in k.outputs)
                is_stack = tensor.kind == "parameter" and len(weights.meta["tensor_meta"].shape) > 2
                if is_stack and nbytes > tensor.nbytes:
                    kernels.append((k.module, nbytes))
        if not kernels:
            return ""
        configs = (getattr(module, "config", None) for module, *_ in self.modules)
        names = (getattr(config, "_experts_implementation", None) for config in configs)
        name = next((f" (experts_implementation={name!r})" for name in names if name), "")
        total = size(sum(nbytes for _, nbytes in kernels))
        return (
            f"{kernels[0][0]}{name} copies the weights of experts for every token, {total} in the step: choose "
            "an implementation that does not, such as 'grouped_mm' of transformers."
        )

    @property
    def _is_multi_tensor(self) -> bool:
        """Whether all optimizers use multi-tensor updates, which are PyTorch's default on a GPU."""
        return all(
            type(optimizer).__module__.startswith("torch.optim") and group.get("foreach", False) is not False
            for optimizer, groups in self.settings
            for group in groups
        )
