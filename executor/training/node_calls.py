"""A captured graph as calls on a table of values: flat lists that a loop runs without looking at the graph.

A **call** is (out, function, get, options): ``table[out] = function(*get(table), **options)``. Every node has a slot of
the table, and so has every constant argument, so that ``get`` is an ``itemgetter``. The calls of a step (of
simulator.schedule) are its kernel's operator, the items of its result, and the views of what it made. A view holds no
memory, but none can be made of a storage that is away, so all are made at once; views of persistent tensors are made
once, when these are bound.

A node of a tensor that is written again has a slot for each of its blocks, and a step uses those of its own blocks
(``Step.uses``). The block for batch-norm statistics of a kernel that runs again, which nothing fills, is made for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tag, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from executor.capture.capture import Captured
from executor.capture.hyperparameters import Option
from executor.capture.operators import for_profiler
from simulator.schedule import Schedule, Step

Call = tuple[int, Callable[..., Any], Callable[[list[Any]], Any], dict[str, Any]]


class Calls:
    """The calls of every step.

    Attributes:
        slots: node -> its place in the table, of what is in no block or in that of a persistent tensor.
        table: constants in their places, None elsewhere.
        fixed: calls that make the views of persistent tensors, run when those are bound.
        numbers: calls that depend on the optimizers' numbers alone, run when one of these has changed.
        patches: (options of a call, key, slot): where results of ``numbers`` stand, written after these have run.
        first: calls that begin a step; per micro-batch (else one list), those that need no later one's tensors.
        steps: per step of the schedule, its calls, and the slots that are cleared after it.
        asks: kernel -> slot of a number that is read after it; where it is not 0, ``skipped`` are left out.
        losses: kernel -> slot of the loss of a micro-batch, which is there after it.
        skipped: kernel -> its calls where it is left out (work.py).
        of: block -> slots of its values, its maker's first.
        outputs: slots of what is returned; ``nothing``: one that is nobody's.
        read_first: tensors that ``first`` reads, as numbers.
    """

    def __init__(self, captured: Captured, schedule: Schedule):
        self.captured, self.schedule, self.values = captured, schedule, captured.values
        self.slots: dict[fx.Node, int] = {}
        self.table: list[Any] = []
        self.fixed: list[Call] = []
        self.numbers: list[Call] = []
        self.patches: list[tuple[dict[str, Any], str, int]] = []
        self._numbers: set[fx.Node] = set()
        self.first: list[list[Call]] = [[] for _ in captured.micro or (None,)]
        self.read_first: set[int] = set()
        self.bodies: list[list[fx.Node]] = [[] for _ in schedule.program.kernels]
        self._place_nodes()
        self.of: dict[int, list[int]] = {}
        self._places: dict[tuple[fx.Node, int], int] = {}
        last: dict[int, int] = {}  # tensor -> the block that it is in at the end
        for step in schedule.steps:
            last.update({} if step.again else step.uses)
        self.asks: dict[int, int] = {}
        self.losses: dict[int, int] = {}
        self._losses = {micro.loss for micro in captured.micro}
        self.skipped: dict[int, tuple[Call, ...]] = {}
        self.outputs = [self._at(node, last) for node in captured.outputs]
        self.nothing = self._slot()
        self.steps = [self._step(step) for step in schedule.steps]

    def _at(self, node: fx.Node, uses: dict[int, int]) -> int:
        """The slot of a node where its tensor is in the block that ``uses`` says."""
        block = uses.get(self.values.get(node, -1))
        if block is None or self.schedule.blocks[block].first < 0:
            return self.slots[node]
        if (node, block) not in self._places:
            self._places[node, block] = self._slot()
            self.of.setdefault(block, []).append(self._places[node, block])
        return self._places[node, block]

    def _step(self, step: Step) -> tuple[list[Call], tuple[int, ...]]:
        scratch: list[Call] = []

        def place(node: fx.Node) -> int:
            new = len(self._places)
            slot = self._at(node, step.uses)
            if len(self._places) > new:  # written by no kernel: statistics
                scratch.append((slot, torch.empty_like, _getter([self.slots[node]]), {}))
            return slot

        body = self.bodies[step.kernel]
        calls = [self._call(node, place, self._at(node, step.uses)) for node in body]
        if not step.again:
            if step.kernel in self.captured.left_out:
                self.skipped[step.kernel] = tuple(map(self._left_out, body, calls))
            for node in body:
                if node in self.captured.asked:
                    self.asks[step.kernel] = self._at(node, step.uses)
                if node in self._losses:
                    self.losses[step.kernel] = self._at(node, step.uses)
        clear = [s for b in step.frees for s in self.of.get(b, ()) if s not in self.outputs]
        return scratch + calls, (*clear, *(self.slots[n] for n in body if self._sequence(n)))

    def _place_nodes(self) -> None:
        """Slots, and which kernel each node comes with; -1: none, it depends on persistent tensors alone."""
        own = {node: k for k, nodes in enumerate(self.captured.nodes) for node in nodes}
        leaves, parts = self.captured.leaves, len(self.first)
        batch = {leaf for leaf in leaves if isinstance(leaf, fx.Node)}
        # The micro-batch whose tensors a node needs last.
        part = {leaf: i * parts // len(leaves) for i, leaf in reversed([*enumerate(leaves)]) if leaf in batch}
        with_kernel: dict[fx.Node, int] = {}
        fixed: set[fx.Node] = set()
        written: dict[int, int] = {}  # tensor -> the kernel that wrote it last
        for node in self.captured.graph.graph.nodes:
            if node.op == "output" or for_profiler(node):
                continue
            self.slots[node] = self._slot(getattr(self.captured.graph, node.target) if node.op == "get_attr" else None)
            k = with_kernel[node] = own.get(node, max((with_kernel[a] for a in node.all_input_nodes), default=-1))
            if node.target is NUMBER:  # comes after what has written the tensor, whose node that need not be
                k = with_kernel[node] = max(k, *(written.get(self.values.get(a, -1), -1) for a in node.all_input_nodes))
            if node in own:
                written.update(dict.fromkeys(self.schedule.program.kernels[k].outputs, k))
            if node.op != "call_function":
                if node not in batch:
                    fixed.add(node)
            elif k >= 0:
                self.bodies[k].append(node)
            elif isinstance(node.target, Option) or (
                not fixed.issuperset(node.all_input_nodes) and (fixed | self._numbers).issuperset(node.all_input_nodes)
            ):
                self._numbers.add(node)
                self.numbers.append(self._call(node, self.slots.__getitem__, self.slots[node]))
            elif fixed.issuperset(node.all_input_nodes) and node.target is not NUMBER:
                fixed.add(node)
                self.fixed.append(self._call(node, self.slots.__getitem__, self.slots[node]))
            else:
                part[node] = max((part.get(a, 0) for a in node.all_input_nodes), default=0)
                self.first[part[node]].append(self._call(node, self.slots.__getitem__, self.slots[node]))
                if node.target is NUMBER:
                    self.read_first.update(self.values[a] for a in node.all_input_nodes if a in self.values)

    def _slot(self, value: Any = None) -> int:
        self.table.append(value)
        return len(self.table) - 1

    def _sequence(self, node: fx.Node) -> bool:
        """Is its value a tuple or list, which holds tensors?"""
        return node not in self.values and any(user.target is operator.getitem for user in node.users)

    def _call(self, node: fx.Node, place: Callable[[fx.Node], int], out: int) -> Call:
        """The call of a node; ``place`` says where its arguments are."""

        def slot(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return place(value)
            if isinstance(value, (list, tuple)) and any(isinstance(v, fx.Node) for v in value):
                return [slot(v) for v in value]
            return self._slot(map_arg(value, _no_node))

        target = _not_in_place(node.target)
        function = getattr(target, "_op", target)  # below OpOverload's own Python
        known = [key for key, value in node.kwargs.items() if isinstance(value, fx.Node) and value in self._numbers]
        keys = [key for key, value in node.kwargs.items() if isinstance(value, fx.Node) and key not in known]
        options = {key: value for key, value in node.kwargs.items() if key not in keys}
        self.patches += [(options, key, self.slots[node.kwargs[key]]) for key in known]  # type: ignore[index]
        where = [slot(v) for v in node.args] + [slot(node.kwargs[key]) for key in keys]
        if keys:
            function = _with_options(function, len(node.args), keys)
        return out, function, _getter(where), options

    def _left_out(self, node: fx.Node, call: Call) -> Call:
        """The call of a node whose kernel is left out: what it writes in place stays as it is."""
        out, function, get, options = call
        if not isinstance(node.target, OpOverload) or node.target is NUMBER:
            return out, _or_one(function), get, options
        persistent = any(self.schedule.program.tensors[t].persistent for a in node.all_input_nodes
                         if (t := self.values.get(a)) is not None)  # fmt: skip
        return (out, _first, get, {}) if node.target._schema.is_mutable and persistent else call

    def random(self, k: int) -> bool:
        """Does the kernel draw random numbers?"""
        return any(isinstance(n.target, OpOverload) and Tag.nondeterministic_seeded in n.target.tags
                   for n in self.bodies[k])  # fmt: skip


NUMBER = torch.ops.aten._local_scalar_dense.default


def _no_node(node: fx.Node) -> Any:
    raise NotImplementedError(f"the graph has {node} in an argument of an unknown form")


def _getter(where: list[Any]) -> Callable[[list[Any]], Any]:
    """From the table to the arguments in these slots, lists of slots among them."""
    if any(isinstance(s, list) for s in where):
        return lambda table: [[table[i] for i in s] if isinstance(s, list) else table[s] for s in where]
    if len(where) > 1:
        return itemgetter(*where)
    if where:
        return itemgetter(slice(where[0], where[0] + 1))
    return itemgetter(slice(0, 0))


def _first(*args: Any) -> Any:
    return None if isinstance(args[0], list) else args[0]


def _or_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A number that goes nowhere (a bias correction after no step) is 1 where it is none."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except ArithmeticError:
            return 1.0

    return call


def _with_options(function: Callable[..., Any], count: int, keys: list[str]) -> Callable[..., Any]:
    """The first ``count`` arguments by position, the others by these names."""
    return lambda *args, **options: function(*args[:count], **dict(zip(keys, args[count:], strict=True)), **options)


def _not_in_place(target: Any) -> Any:
    """``transpose`` for ``transpose_``: a view beside the old one, because views are made as early as can be."""
    if isinstance(target, OpOverload) and Tag.inplace_view in target.tags:
        name = target._schema.name.partition("::")[2].removesuffix("_")
        packet = getattr(torch.ops.aten, name, None)
        return getattr(packet, target._overloadname, target)
    return target
