"""What a capture gives: the program of a step, the graph that runs it, and where the step finds its tensors."""

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
from executor.capture.batches import flatten
from executor.capture.durations import Precision, computed_in, kernel_ns
from executor.capture.effects import Effect
from executor.capture.optimizers import Numbers
from executor.capture.python_values import PythonValues
from executor.capture.state import Home
from simulator.kernel_times import scaled
from simulator.machine import Machine
from simulator.program import Program
from simulator.report import Origins, Place


class MicroBatch(NamedTuple):
    """The end of a micro-batch.

    Attributes:
        end: the first kernel after it.
        loss: what it adds to the step's loss.
        drawn: the kernel after whose random numbers the random state is then; -1: that before the step.
        put_back: that is not the kernel that drew last.
    """

    end: int
    loss: fx.Node
    drawn: int
    put_back: bool


class UserHolds(NamedTuple):
    """What a loop that calls the step keeps from one step to the next. The program has none of it: its tensors that are
    not persistent die within a step.

    Attributes:
        outputs: tensors of the model's result.
        until: the first kernel after the model has returned the next.
        gradients: tensors that are ``.grad`` of parameters when an optimizer steps.
        zero_grad: the first kernel after ``zero_grad`` was called, by the number of kernels at the step's end; -1: it
            was not, and gradients are added to those that are there.
    """

    outputs: tuple[int, ...] = ()
    until: int = 0
    gradients: tuple[int, ...] = ()
    zero_grad: int = -1


class Returned(NamedTuple):
    """What the graph's outputs are: the tensors that the step returns, gradients, their norm, and what effects leave.

    Attributes:
        spec, tensors: of what the step returns, and which of its leaves are tensors; the others are None.
        gradients: placeholders of the parameters whose gradients stay after the step.
        norm: whether there is one.
        effects: tensors that the step leaves in the user's objects.
        rebound: placeholders in whose place the step binds another tensor, which is copied into them.
    """

    spec: TreeSpec | None = None
    tensors: tuple[bool, ...] = (True,)
    gradients: tuple[int, ...] = ()
    norm: bool = False
    effects: tuple[Effect, ...] = ()
    rebound: tuple[int, ...] = ()

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """What the step returns."""
        if self.spec is None or self.spec.is_leaf():
            return outputs[0] if self.tensors[0] else None
        flat = iter(outputs)
        return tree_unflatten([next(flat) if tensor else None for tensor in self.tensors], self.spec)


class Source(NamedTuple):
    """What was captured: ``step(*args)``, and how to capture it with other arguments.

    Attributes:
        roots: what the step can reach, each with its name.
    """

    step: Callable[..., Any]
    args: Any
    roots: tuple[tuple[Any, str], ...]
    again: Callable[[Any], Captured]


@dataclass(frozen=True, eq=False)
class HostRead:
    """A number that the step's Python reads from its batch: ``if mask.all(): …``.

    It depends on the batch alone, or on nothing (``torch.arange``), and is computed from the example batch while the
    step is traced. The graph is right only for batches with the same number, which each step computes before it runs.

    Attributes:
        nodes: of the graph, in order, that compute it; the last gives the tensor that is read.
        constants: tensors of the graph by node.
        value: at the capture.
        where: the user's line.
    """

    nodes: tuple[fx.Node, ...]
    constants: Mapping[fx.Node, Any]
    value: Any
    where: str

    @cached_property
    def inputs(self) -> set[fx.Node]:
        """Placeholders of the tensors that decide it."""
        return {n for node in self.nodes for n in node.all_input_nodes if n.op == "placeholder"}

    def of(self, batch: Mapping[fx.Node, Tensor]) -> Any:
        """Returns the number for a batch, by placeholder."""
        return number(self.nodes, {**self.constants, **batch})


def number(nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
    """Runs nodes of a graph on values of those that they take; returns the number that the last one is.

    If an operator writes in place, the given tensors are copied before.
    """
    table = dict(values)
    if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in nodes):
        for given in {n for node in nodes for n in node.all_input_nodes} & table.keys():
            table[given] = table[given].clone() if isinstance(table[given], Tensor) else table[given]
    last: Any = None
    with torch.no_grad():
        for node in nodes:
            assert isinstance(node.target, Callable)  # type: ignore[arg-type]
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), table.__getitem__)
            last = table[node] = node.target(*args, **kwargs)
    return last.item()


NOTHING, NOT_WATCHED, ONE_TENSOR = UserHolds(), PythonValues(), Returned()


@dataclass(frozen=True, eq=False)
class Captured:
    """A program and the graph it came from.

    ``graph`` takes the placeholders' tensors in order and returns ``outputs`` (the step's tensors, flat);
    run on real tensors it does exactly the step, in-place updates of the state included.
    """

    program: Program
    graph: fx.GraphModule
    nodes: tuple[tuple[fx.Node, ...], ...]  # per kernel: its operator and the getitems of it; () for a marker
    values: dict[fx.Node, int]  # node whose value is one tensor -> index in program.tensors
    placeholders: tuple[fx.Node, ...]
    names: tuple[str, ...]  # per placeholder, e.g. "features.0.weight", "optimizer.features.0.weight.momentum_buffer"
    sources: tuple[Tensor | None, ...]  # per placeholder: the user's tensor; None: state not created yet
    homes: tuple[Home | None, ...]  # per placeholder: where the step finds its tensor; None for its arguments
    devices: tuple[torch.device, ...]  # per placeholder
    outputs: tuple[fx.Node, ...]
    spec: TreeSpec  # of the step's arguments
    leaves: tuple[Any, ...]  # those, flat; a tensor's placeholder stands for it
    settings: tuple[tuple[Optimizer, tuple[dict[str, Any], ...]], ...]  # per optimizer and group: what cannot change
    numbers: Numbers  # of the optimizers' options: what may change
    asked: frozenset[fx.Node]  # numbers that are not 0 where ``left_out`` must not be done (hooks.py)
    left_out: frozenset[int]  # kernels
    # Kernel (their number: the end) -> that after whose random numbers it begins, if not the last.
    draws: dict[int, int]
    modules: tuple[tuple[nn.Module, bool, tuple[nn.Module | None, ...]], ...]  # whether it trains, its submodules
    places: tuple[Place, ...]  # per kernel; a marker's is that of the kernel before it
    # Per tensor of the program: the module of a parameter, for a buffer, gradient or optimizer state, too; "inputs" for
    # the step's arguments; else that of the kernel that first uses it.
    owners: tuple[str, ...]
    precision: Precision  # PyTorch's flags at the capture
    micro: tuple[MicroBatch, ...] = ()  # where the step is of several, which come one by one or together
    holds: UserHolds = NOTHING
    python: PythonValues = NOT_WATCHED
    hooks: int = 0  # of modules and their parameters
    returned: Returned = ONE_TENSOR
    source: Source | None = None
    reads: tuple[HostRead, ...] = ()  # numbers of the batch that decided what the step does

    @property
    def origins(self) -> Origins:
        """Where the tensors and the kernels come from in the user's code."""
        return Origins(self.places, self.owners)

    def numbers_of(self, args: Any) -> tuple[Any, ...]:
        """Returns the numbers that the step's Python would read from these arguments (``reads``)."""
        leaves, _ = flatten(args)
        batch = {want: leaf for want, leaf in zip(self.leaves, leaves, strict=True) if isinstance(want, fx.Node)}
        return tuple(read.of(batch) for read in self.reads)

    def on(self, machine: Machine, iteration_ns: int | None = None, algorithms: bool = False) -> Captured:
        """The same capture with durations for another machine (see ``kernel_ns``).

        Args:
            iteration_ns: a measured iteration time, to which the durations are scaled.
            algorithms: convolutions have the workspace of their fastest algorithm, and the others as variants (see
                ``with_algorithms``); without it they have neither.

        Raises:
            FormatError: the machine has no figure for float32.
            ValueError: ``iteration_ns`` is not positive, or no kernel takes time.
        """
        many = self._multi_tensor
        durations = [kernel_ns(k, nodes, machine, self.precision, many and k.kind == "optimizer")
                     for k, nodes in zip(self.program.kernels, self.nodes, strict=True)]  # fmt: skip
        found = {k: convolution_of(nodes[0]) for k, nodes in enumerate(self.nodes) if nodes and algorithms}
        known = {k: convolution for k, convolution in found.items() if convolution is not None}
        program = self.program.with_durations(scaled(durations, iteration_ns))
        return replace(self, program=with_algorithms(program, known, machine))

    def types(self, machine: Machine) -> tuple[str, ...]:
        """Per kernel: the type in which a machine computes it, as ``flops_per_s`` names it; "" of a marker."""
        pairs = zip(self.program.kernels, self.nodes, strict=True)
        return tuple(computed_in(kernel, nodes, machine, self.precision) for kernel, nodes in pairs)

    def arithmetic(self, machine: Machine) -> str:
        """Returns a sentence: the types in which convolutions and products are timed; "" without any."""
        found: dict[str, set[str]] = {}
        for kernel, name in zip(self.program.kernels, self.types(machine), strict=True):
            if kernel.flops and name:
                kind = "convolutions" if kernel.kind == "conv" else "matrix products"
                found.setdefault(kind, set()).add(name.replace("tf32", "TF32"))
        parts = [f"{kind} in {' and '.join(sorted(names, key=str.lower))}" for kind, names in sorted(found.items())]
        timed = ", ".join(parts)
        return f"They are timed with {timed}, as the step's types and PyTorch's flags have it." if parts else ""

    @property
    def _multi_tensor(self) -> bool:
        """Do all optimizers update many parameters in a kernel, as PyTorch's do on a GPU unless told otherwise?"""
        return all(
            type(optimizer).__module__.startswith("torch.optim") and group.get("foreach", False) is not False
            for optimizer, groups in self.settings
            for group in groups
        )
