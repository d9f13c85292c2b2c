"""A captured graph as calls on a table of values: flat lists that a loop runs without looking at the graph.

A **call** is (out, function, get, options): ``table[out] = function(*get(table), **options)``. ``out`` is the slot of a
node, or a slice: several results have consecutive slots. Constant arguments have slots, too, so that ``get`` is an
``itemgetter``. A step (of simulator.schedule) calls its kernel's operator and the views of what that made. A view holds
no memory, but none can be made of a storage that is away, so all are made at once; views of persistent tensors are made
when these are bound. A detached tensor is the tensor itself (``same_values``).

A node of a tensor that is written again has a slot for each of its blocks, and a step uses those of its own blocks
(``Step.uses``). The block for batch-norm statistics of a kernel that runs again, which nothing fills, is made for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tag, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from executor.capture.capture import Captured
from executor.capture.operators import for_profiler
from executor.capture.optimizers import Option
from executor.training.direct_calls import direct
from simulator.schedule import Schedule, Step

Call = tuple[int | slice, Callable[..., Any], Callable[[list[Any]], Any], dict[str, Any]]


class Calls:
    """The calls of every step.

    Attributes:
        slots: node -> its place in the table, of what is in no block or in that of a persistent tensor. Results that a
            call unpacks have theirs once the calls are made.
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
        items: node whose call unpacks its results -> the nodes of those that are used, by index.
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
        self.of: dict[int, list[int]] = {}
        self._places: dict[tuple[fx.Node, int], int] = {}
        self._same = same_values(captured)
        self.items: dict[fx.Node, dict[int, fx.Node]] = {}
        self._runs: dict[tuple[fx.Node, tuple[int | None, ...]], slice] = {}
        self._stand_ins: dict[fx.Node, Any] = {}
        self._place_nodes()
        last: dict[int, int] = {}  # tensor -> the block that it is in at the end
        for step in schedule.steps:
            last.update({} if step.again else step.uses)
        self.asks: dict[int, int] = {}
        self.losses: dict[int, int] = {}
        self.skipped: dict[int, tuple[Call, ...]] = {}
        self.nothing = self._slot()
        made = [self._step(step) for step in schedule.steps]
        self.outputs = [self._at(node, last) for node in captured.outputs]
        self.steps = [(calls, tuple(s for s in clear if s not in self.outputs)) for calls, clear in made]
        self._stand_ins.clear()

    def _block(self, node: fx.Node, uses: dict[int, int]) -> int | None:
        """The block of a node's tensor by ``uses``; None if that is persistent, or in no block."""
        block = uses.get(self.values.get(node, -1))
        return None if block is None or self.schedule.blocks[block].first < 0 else block

    def _at(self, node: fx.Node, uses: dict[int, int]) -> int:
        """The slot of a node where its tensor is in the block that ``uses`` says."""
        node = self._same.get(node, node)
        block = self._block(node, uses)
        if block is None:
            return self.slots[node]
        if (node, block) not in self._places:
            self._place(node, block, self._slot())
        return self._places[node, block]

    def _place(self, node: fx.Node, block: int | None, slot: int) -> None:
        if block is None:
            self.slots.setdefault(node, slot)
        else:
            self._places[node, block] = slot
            self.of.setdefault(block, []).append(slot)

    def _out(self, node: fx.Node, uses: dict[int, int]) -> int | slice:
        """Where the result of a node goes."""
        if node not in self.items:
            return self._at(node, uses)
        items = self.items[node]
        blocks = tuple(self._block(item, uses) for item in items.values())
        if (node, blocks) not in self._runs:
            slots = [self._slot() for _ in range(node.meta["items"])]
            for (i, item), block in zip(items.items(), blocks, strict=True):
                if (item, block) in self._places:
                    raise AssertionError(f"{item} has a block that another call fills")
                self._place(item, block, slots[i])
            self._runs[node, blocks] = slice(slots[0], slots[-1] + 1)
        return self._runs[node, blocks]

    def _step(self, step: Step) -> tuple[list[Call], list[int]]:
        scratch: list[Call] = []

        def place(node: fx.Node) -> int:
            new = len(self._places)
            slot = self._at(node, step.uses)
            if len(self._places) > new:  # written by no kernel: statistics
                scratch.append((slot, torch.empty_like, _getter([self.slots[node]]), {}))
            return slot

        body = self.bodies[step.kernel]
        calls = [self._call(node, place, self._out(node, step.uses)) for node in body]
        if not step.again:
            if step.kernel in self.captured.left_out:
                self.skipped[step.kernel] = tuple(map(self._left_out, body, calls))
            for nodes, found in ((self._asked, self.asks), (self._losses, self.losses)):
                found.update((step.kernel, self._at(node, step.uses)) for node in nodes.get(step.kernel, ()))
        clear = [s for b in step.frees for s in self.of.get(b, ())]
        for node, (out, *_) in zip(body, calls, strict=True):
            if isinstance(out, slice):  # results that nothing takes
                clear += [s for i, s in enumerate(range(out.start, out.stop)) if i not in self.items[node]]
            elif self._sequence(node):
                clear.append(out)
        return scratch + calls, clear

    def _place_nodes(self) -> None:
        """Slots, and which kernel each node comes with; -1: none, it depends on persistent tensors alone."""
        own = {node: k for k, nodes in enumerate(self.captured.nodes) for node in nodes}
        left_out = {node for k in self.captured.left_out for node in self.captured.nodes[k]}
        leaves, parts, idle = self.captured.leaves, len(self.first), idle_nodes(self.captured, self._same)
        batch = {leaf for leaf in leaves if isinstance(leaf, fx.Node)}
        # The micro-batch whose tensors a node needs last.
        part = {leaf: i * parts // len(leaves) for i, leaf in reversed([*enumerate(leaves)]) if leaf in batch}
        with_kernel: dict[fx.Node, int] = {}
        fixed: set[fx.Node] = set()
        written: dict[int, int] = {}  # tensor -> the kernel that wrote it last
        reads: dict[tuple[fx.Node, int], fx.Node] = {}  # tensor read as a number, its last writer -> the first read
        for node in self.captured.graph.graph.nodes:
            if node.op == "output" or for_profiler(node) or node in self._same or node in idle:
                continue
            inputs = [self._same.get(a, a) for a in node.all_input_nodes]
            unpacked = node.target is operator.getitem and inputs[0] in self.items
            if (items := _items(node)) and node not in left_out:
                self.items[node] = items
            elif not unpacked:
                constant = getattr(self.captured.graph, str(node.target)) if node.op == "get_attr" else None
                self.slots[node] = self._slot(constant)
            k = with_kernel[node] = own.get(node, max((with_kernel[a] for a in inputs), default=-1))
            if node.target is NUMBER:  # comes after what has written the tensor, whose node that need not be
                k = with_kernel[node] = max(k, *(written.get(self.values.get(a, -1), -1) for a in inputs))
                if k >= 0 and inputs[0] in self.values and node not in self.captured.asked:
                    if (first := reads.setdefault((inputs[0], k), node)) is not node:  # read again, unwritten since
                        self._same[node] = first
                        continue
            if node in own:
                written.update(dict.fromkeys(self.schedule.program.kernels[k].outputs, k))
            if node.op != "call_function":
                if node not in batch:
                    fixed.add(node)
            elif k >= 0:
                if not unpacked:
                    self.bodies[k].append(node)
            elif isinstance(node.target, Option) or (
                not fixed.issuperset(inputs) and (fixed | self._numbers).issuperset(inputs)
            ):
                self._numbers.add(node)
                self.numbers.append(self._early(node))
            elif fixed.issuperset(inputs) and node.target is not NUMBER:
                fixed.add(node)
                if not unpacked:
                    self.fixed.append(self._early(node))
            else:
                part[node] = max((part.get(a, 0) for a in inputs), default=0)
                if not unpacked:
                    self.first[part[node]].append(self._early(node))
                if node.target is NUMBER:
                    self.read_first.update(self.values[a] for a in inputs if a in self.values)
        losses = {self._same.get(micro.loss, micro.loss) for micro in self.captured.micro}
        self._asked, self._losses = (
            {with_kernel[node]: [n for n in nodes if with_kernel[n] == with_kernel[node]] for node in nodes}
            for nodes in (self.captured.asked, losses)
        )

    def _early(self, node: fx.Node) -> Call:
        """The call of a node that comes with no kernel."""
        return self._call(node, lambda a: self._at(a, {}), self._out(node, {}))

    def _slot(self, value: Any = None) -> int:
        self.table.append(value)
        return len(self.table) - 1

    def _sequence(self, node: fx.Node) -> bool:
        """Is its value a tuple or list, which holds tensors?"""
        return node not in self.values and any(user.target is operator.getitem for user in node.users)

    def _call(self, node: fx.Node, place: Callable[[fx.Node], int], out: int | slice) -> Call:
        """The call of a node; ``place`` says where its arguments are."""

        def slot(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return place(value)
            if isinstance(value, (list, tuple)) and any(isinstance(v, fx.Node) for v in value):
                return [slot(v) for v in value]
            return self._slot(_constant(value))

        function: Any = _not_in_place(node.target)
        if function is aten._unsafe_view.default and node not in self.captured.outputs:
            function = aten.view.default  # which it calls; the result only counts its versions with its argument's
        args: Sequence[Any] = node.args
        if isinstance(function, OpOverload):
            given, named = map_arg((args, dict(node.kwargs)), self._stand_in)
            target, function = function, direct(function, given, named)
            if len(args) == 2 and target in SIZES and (spread := direct(target, given, named, (given[0], *given[1]))):
                function, args = spread, (args[0], *node.args[1])  # type: ignore[misc]
        known = [key for key, value in node.kwargs.items() if isinstance(value, fx.Node) and value in self._numbers]
        keys = [key for key, value in node.kwargs.items() if isinstance(value, fx.Node) and key not in known]
        options = {
            key: value if key in known else _constant(value) for key, value in node.kwargs.items() if key not in keys
        }
        self.patches += [(options, key, self.slots[node.kwargs[key]]) for key in known]  # type: ignore[index]
        where = [slot(v) for v in args] + [slot(node.kwargs[key]) for key in keys]
        if keys:
            function = _with_options(function, len(args), keys)
        return out, function, _getter(where), options

    def _stand_in(self, node: fx.Node) -> Any:
        """A value of the kind of a node's: a tensor without memory, or a number."""
        if node not in self._stand_ins:
            meta = node.meta.get("tensor_meta")
            self._stand_ins[node] = (
                getattr(self.captured.graph, str(node.target)) if node.op == "get_attr" else 0.5 if meta is None
                else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            )  # fmt: skip
        return self._stand_ins[node]

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


def same_values(captured: Captured) -> dict[fx.Node, fx.Node]:
    """Nodes whose value may be that of an earlier node, and that node: detached tensors, and views made before.

    In a step nothing requires gradients. So both tensors have one memory, form and version counter. They differ as
    objects, which shows where the step returns one of them, and where an operator changes a tensor's form in place.
    """
    graph = captured.graph.graph
    if any(isinstance(n.target, OpOverload) and Tag.inplace_view in _not_in_place(n.target).tags for n in graph.nodes):
        return {}
    found: dict[fx.Node, fx.Node] = {}
    views: dict[Any, fx.Node] = {}

    def earlier(node: fx.Node) -> fx.Node | None:
        target, base, *rest = node.target, *(found.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
        if target is aten.detach.default or (
            target is aten.expand.default and tuple(rest[0]) == tuple(_shape(base))  # which leaves strides as they are
        ):
            return base
        if target is aten.t.default and base.target is aten.t.default:
            return found.get(base.args[0], base.args[0])
        return views.setdefault((target, base, repr(rest), repr(node.kwargs)), node)

    for node in graph.nodes:
        if node.target in VIEWS and node not in captured.outputs and len(node.all_input_nodes) == 1:
            if (same := earlier(node)) is not node:
                found[node] = same
    return found


aten = torch.ops.aten
VIEWS = (aten.detach.default, aten.expand.default, aten.t.default, aten.view.default, aten.transpose.int,
         aten.permute.default, aten.unsqueeze.default, aten.slice.Tensor)  # fmt: skip


# What takes sizes one by one faster than a list of them.
SIZES = (aten.view.default, aten.expand.default, aten.permute.default)


def _shape(node: fx.Node) -> Sequence[int]:
    meta = node.meta.get("tensor_meta")
    return () if meta is None else meta.shape


def idle_nodes(captured: Captured, same: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Operators that launch nothing, and whose result nothing takes (an empty tensor beside a batch norm's results).

    Args:
        same: nodes that are not called, as an earlier one has their value.
    """
    taken = {*captured.outputs, *captured.asked, *(same.get(micro.loss, micro.loss) for micro in captured.micro)}
    taken.update(node for nodes in captured.nodes for node in nodes)
    idle: set[fx.Node] = set()
    for node in reversed(captured.graph.graph.nodes):
        target = node.target
        if node in same:
            continue
        if isinstance(target, OpOverload) and not (
            node in taken or target is NUMBER or target._schema.is_mutable or Tag.nondeterministic_seeded in target.tags
        ):
            idle.add(node)
        else:
            taken.update(same.get(a, a) for a in node.all_input_nodes)
    return idle


def _items(node: fx.Node) -> dict[int, fx.Node]:
    """The results of a node, if it has several and each is taken out once; by index."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return items if "items" in node.meta and len(items) == len(node.users) else {}  # type: ignore[return-value]


def _constant(value: Any) -> Any:
    """A constant argument; lists as Python's own, because operators take long to read those of ``fx``."""
    if isinstance(value, (list, tuple)):
        return list(map(_constant, value))
    if isinstance(value, fx.Node):
        raise NotImplementedError(f"the graph has {value} in an argument of an unknown form")
    return value


def _getter(where: list[Any]) -> Callable[[list[Any]], Any]:
    """From the table to the arguments in these slots, lists of slots among them."""
    if any(isinstance(s, list) for s in where):
        parts = [_getter(s) if isinstance(s, list) else itemgetter(s) for s in where]
        return lambda table: [part(table) for part in parts]
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
