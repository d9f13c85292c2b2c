"""Compiles a captured graph into flat lists of calls on a table of values.

A **call** is (out, function, get, options): ``table[out] = function(*get(table), **options)``. ``out`` is a slot,
or a slice for several results. Constant arguments have slots, too, so that ``get`` is an ``itemgetter``. A schedule
step calls its kernel's operator and creates all views of the outputs at once, because no view can be created of a
swapped-out storage. Views of persistent tensors are created when these are bound.
"""

# A detached tensor is the tensor itself (_find_aliases). A node whose tensor is recomputed has a slot for each of the
# tensor's blocks, and a step uses the slots of its own blocks (``Step.uses``). A recomputed batch norm writes its
# statistics into a scratch block, which is allocated for it.

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tag, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from executor.capture.capture import Captured
from executor.capture.operators import NUMBER, is_profiler_node, is_random
from executor.capture.optimizers import Option
from executor.capture.reach import check_constant
from executor.training.direct_calls import direct
from simulator.schedule import Schedule, Step

Call = tuple[int | slice, Callable[..., Any], Callable[[list[Any]], Any], dict[str, Any]]


def run_calls(calls: Iterable[Call], table: list[Any]) -> None:
    """Runs calls in order and stores their results in the table."""
    for out, function, get, options in calls:
        table[out] = function(*get(table), **options)


class Calls:
    """Calls of every schedule step.

    Attributes:
        slots: node -> table slot, for values in no block or in the block of a persistent tensor. Unpacked results get
            their slots when the calls are created.
        table: initial table: constants in their slots, None elsewhere.
        fixed: calls that create views of persistent tensors, run when these are bound.
        numbers: calls that depend only on optimizer numbers, run when one of these changes.
        patches: (options of a call, key, slot): options set to results of ``numbers`` after these have run.
        first: calls at the beginning of a step, one list per micro-batch.
        steps: per schedule step, its calls and the slots cleared after it.
        skip_flags: kernel -> slot of a number read after it; if it is nonzero, ``skipped`` kernels are skipped.
        losses: kernel -> slot of a micro-batch's loss, valid after it.
        skipped: kernel -> its replacement calls if it is skipped (work.py).
        slots_of_block: block -> slots of its values, its creator's first.
        items: node whose call unpacks its results -> nodes of the used results, by index.
        outputs: slots of the step's outputs.
        unused_slot: a slot that no value uses.
        read_first: tensors that ``first`` reads as numbers.
    """

    def __init__(self, captured: Captured, schedule: Schedule):
        self.captured = captured
        self.schedule = schedule
        self.values = captured.values
        self.slots: dict[fx.Node, int] = {}
        self.table: list[Any] = []
        self.fixed: list[Call] = []
        self.numbers: list[Call] = []
        self.patches: list[tuple[dict[str, Any], str, int]] = []
        self._numbers: set[fx.Node] = set()
        self.first: list[list[Call]] = [[] for _ in captured.micro or (None,)]
        self.read_first: set[int] = set()
        self.bodies: list[list[fx.Node]] = [[] for _ in schedule.program.kernels]
        self.slots_of_block: dict[int, list[int]] = {}
        self._block_slots: dict[tuple[fx.Node, int], int] = {}
        self._aliases = _find_aliases(captured)
        self.items: dict[fx.Node, dict[int, fx.Node]] = {}
        self._result_slices: dict[tuple[fx.Node, tuple[int | None, ...]], slice] = {}
        self._stand_ins: dict[fx.Node, Any] = {}
        self._place_nodes()
        last: dict[int, int] = {}  # tensor -> its block at the end
        for step in schedule.steps:
            last.update({} if step.is_recomputation else step.uses)
        self.skip_flags: dict[int, int] = {}
        self.losses: dict[int, int] = {}
        self.skipped: dict[int, tuple[Call, ...]] = {}
        self.unused_slot = self._slot()
        compiled = [self._compile_step(step) for step in schedule.steps]
        self.outputs = [self._slot_of(node, last) for node in captured.outputs]
        self.steps = [(calls, tuple(s for s in clear if s not in self.outputs)) for calls, clear in compiled]
        self._stand_ins.clear()

    def _block(self, node: fx.Node, uses: dict[int, int]) -> int | None:
        """Returns the block of a node's tensor in ``uses``, or None for a persistent tensor or none."""
        block = uses.get(self.values.get(node, -1))
        return None if block is None or self.schedule.blocks[block].first < 0 else block

    def _slot_of(self, node: fx.Node, uses: dict[int, int]) -> int:
        """Returns the slot of a node for the block of its tensor in ``uses``."""
        node = self._aliases.get(node, node)
        block = self._block(node, uses)
        if block is None:
            return self.slots[node]
        if (node, block) not in self._block_slots:
            self._assign_slot(node, block, self._slot())
        return self._block_slots[node, block]

    def _assign_slot(self, node: fx.Node, block: int | None, slot: int) -> None:
        if block is None:
            self.slots.setdefault(node, slot)
        else:
            self._block_slots[node, block] = slot
            self.slots_of_block.setdefault(block, []).append(slot)

    def _result_slot(self, node: fx.Node, uses: dict[int, int]) -> int | slice:
        """Returns the slot, or slice of slots, for the result of a node."""
        if node not in self.items:
            return self._slot_of(node, uses)
        items = self.items[node]
        blocks = tuple(self._block(item, uses) for item in items.values())
        if (node, blocks) not in self._result_slices:
            slots = [self._slot() for _ in range(node.meta["items"])]
            for (i, item), block in zip(items.items(), blocks, strict=True):
                if (item, block) in self._block_slots:
                    raise AssertionError(f"{item} has a block that another call fills; report it")
                self._assign_slot(item, block, slots[i])
            self._result_slices[node, blocks] = slice(slots[0], slots[-1] + 1)
        return self._result_slices[node, blocks]

    def _compile_step(self, step: Step) -> tuple[list[Call], list[int]]:
        scratch: list[Call] = []

        def place(node: fx.Node) -> int:
            count = len(self._block_slots)
            slot = self._slot_of(node, step.uses)
            if len(self._block_slots) > count:  # scratch statistics, which no kernel writes
                scratch.append((slot, torch.empty_like, _getter([self.slots[node]]), {}))
            return slot

        body = self.bodies[step.kernel]
        calls = [self._call(node, place, self._result_slot(node, step.uses)) for node in body]
        if not step.is_recomputation:
            if step.kernel in self.captured.skippable:
                self.skipped[step.kernel] = tuple(map(self._skipped_call, body, calls))
            for nodes, slots in ((self._flag_nodes, self.skip_flags), (self._loss_nodes, self.losses)):
                slots.update((step.kernel, self._slot_of(node, step.uses)) for node in nodes.get(step.kernel, ()))
        clear = [s for b in step.frees for s in self.slots_of_block.get(b, ())]
        for node, (out, *_) in zip(body, calls, strict=True):
            if isinstance(out, slice):  # unused results
                clear += [s for i, s in enumerate(range(out.start, out.stop)) if i not in self.items[node]]
            elif self._is_sequence(node):
                clear.append(out)
        return scratch + calls, clear

    def _place_nodes(self) -> None:
        """Assigns slots and the kernel after which each node is called; -1 if it needs only persistent tensors."""
        kernel_of = {node: k for k, nodes in enumerate(self.captured.nodes) for node in nodes}
        left_out = {node for k in self.captured.skippable for node in self.captured.nodes[k]}
        leaves = self.captured.leaves
        for i, leaf in enumerate(leaves):
            check_constant(leaf, i)
        parts = len(self.first)
        idle = _idle_nodes(self.captured, self._aliases)
        batch = {leaf for leaf in leaves if isinstance(leaf, fx.Node)}
        # The last micro-batch whose tensors a node needs.
        part = {leaf: i * parts // len(leaves) for i, leaf in reversed([*enumerate(leaves)]) if leaf in batch}
        with_kernel: dict[fx.Node, int] = {}
        fixed: set[fx.Node] = set()
        written: dict[int, int] = {}  # tensor -> its last writer
        reads: dict[tuple[fx.Node, int], fx.Node] = {}  # (tensor read as a number, its last writer) -> the first read
        for node in self.captured.graph.graph.nodes:
            if node.op == "output" or is_profiler_node(node) or node in self._aliases or node in idle:
                continue
            inputs = [self._aliases.get(a, a) for a in node.all_input_nodes]
            is_unpacked = node.target is operator.getitem and inputs[0] in self.items
            if (items := _items(node)) and node not in left_out:
                self.items[node] = items
            elif not is_unpacked:
                constant = getattr(self.captured.graph, str(node.target)) if node.op == "get_attr" else None
                self.slots[node] = self._slot(constant)
            k = with_kernel[node] = kernel_of.get(node, max((with_kernel[a] for a in inputs), default=-1))
            if node.target is NUMBER:  # after the tensor's last writer, which may be another node
                k = with_kernel[node] = max(k, *(written.get(self.values.get(a, -1), -1) for a in inputs))
                if k >= 0 and inputs[0] in self.values and node not in self.captured.skip_flags:
                    if (first := reads.setdefault((inputs[0], k), node)) is not node:  # unchanged since the first read
                        self._aliases[node] = first
                        continue
            if node in kernel_of:
                written.update(dict.fromkeys(self.schedule.program.kernels[k].outputs, k))
            if node.op != "call_function":
                if node not in batch:
                    fixed.add(node)
            elif k >= 0:
                if not is_unpacked:
                    self.bodies[k].append(node)
            elif isinstance(node.target, Option) or (
                not fixed.issuperset(inputs) and (fixed | self._numbers).issuperset(inputs)
            ):
                self._numbers.add(node)
                self.numbers.append(self._unplanned_call(node))
            elif fixed.issuperset(inputs) and node.target is not NUMBER:
                fixed.add(node)
                if not is_unpacked:
                    self.fixed.append(self._unplanned_call(node))
            else:
                part[node] = max((part.get(a, 0) for a in inputs), default=0)
                if not is_unpacked:
                    self.first[part[node]].append(self._unplanned_call(node))
                if node.target is NUMBER:
                    self.read_first.update(self.values[a] for a in inputs if a in self.values)
        losses = {self._aliases.get(micro.loss, micro.loss) for micro in self.captured.micro}
        self._flag_nodes, self._loss_nodes = (
            {with_kernel[node]: [n for n in nodes if with_kernel[n] == with_kernel[node]] for node in nodes}
            for nodes in (self.captured.skip_flags, losses)
        )

    def _unplanned_call(self, node: fx.Node) -> Call:
        """Returns the call of a node that belongs to no kernel."""
        return self._call(node, lambda a: self._slot_of(a, {}), self._result_slot(node, {}))

    def _slot(self, value: Any = None) -> int:
        self.table.append(value)
        return len(self.table) - 1

    def _is_sequence(self, node: fx.Node) -> bool:
        """Returns True if the node's value is a tuple or list of tensors."""
        return node not in self.values and any(user.target is operator.getitem for user in node.users)

    def _call(self, node: fx.Node, place: Callable[[fx.Node], int], out: int | slice) -> Call:
        """Returns the call of a node; ``place`` returns the slot of an argument."""

        def slot(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return place(value)
            if isinstance(value, (list, tuple)) and any(isinstance(v, fx.Node) for v in value):
                return [slot(v) for v in value]
            return self._slot(_constant(value))

        function: Any = _out_of_place(node.target)
        if function is aten._unsafe_view.default and node not in self.captured.outputs:
            function = aten.view.default  # what it calls; the result only shares the version counter of its argument
        args: Sequence[Any] = node.args
        if isinstance(function, OpOverload):
            metas, kwargs = map_arg((args, dict(node.kwargs)), self._stand_in)
            target = function
            function = direct(function, metas, kwargs)
            # These operators accept sizes as separate arguments, too, which is faster than a list.
            takes_sizes = target in (aten.view.default, aten.expand.default, aten.permute.default)
            if len(args) == 2 and takes_sizes and (spread := direct(target, metas, kwargs, (metas[0], *metas[1]))):
                function = spread
                args = (args[0], *node.args[1])
        numbers = [key for key, value in node.kwargs.items() if isinstance(value, fx.Node) and value in self._numbers]
        keys = [key for key, value in node.kwargs.items() if isinstance(value, fx.Node) and key not in numbers]
        options = {
            key: value if key in numbers else _constant(value) for key, value in node.kwargs.items() if key not in keys
        }
        self.patches += [(options, key, self.slots[node.kwargs[key]]) for key in numbers]  # type: ignore[index]
        slots = [slot(v) for v in args] + [slot(node.kwargs[key]) for key in keys]
        if keys:
            function = _with_options(function, len(args), keys)
        return out, function, _getter(slots), options

    def _stand_in(self, node: fx.Node) -> Any:
        """Returns a stand-in for a node's value: a tensor without memory, or a number."""
        if node not in self._stand_ins:
            meta = node.meta.get("tensor_meta")
            self._stand_ins[node] = (
                getattr(self.captured.graph, str(node.target))
                if node.op == "get_attr"
                else 0.5
                if meta is None
                else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            )
        return self._stand_ins[node]

    def _skipped_call(self, node: fx.Node, call: Call) -> Call:
        """Returns the call of a node whose kernel is skipped: tensors written in place stay unchanged."""
        out, function, get, options = call
        if not isinstance(node.target, OpOverload) or node.target is NUMBER:
            return out, _one_on_error(function), get, options
        persistent = any(
            self.schedule.program.tensors[t].persistent
            for a in node.all_input_nodes
            if (t := self.values.get(a)) is not None
        )
        return (out, _first_argument, get, {}) if node.target._schema.is_mutable and persistent else call

    def is_random(self, k: int) -> bool:
        """Returns True if the kernel draws random numbers."""
        return any(map(is_random, self.bodies[k]))


def _find_aliases(captured: Captured) -> dict[fx.Node, fx.Node]:
    """Maps nodes to earlier nodes with the same value: detached tensors and repeated views.

    Nothing requires gradients in a step, so both tensors have the same memory, form and version counter. They are
    distinct objects, which matters only if the step returns one of them or changes its form in place.
    """
    graph = captured.graph.graph
    if any(isinstance(n.target, OpOverload) and Tag.inplace_view in _out_of_place(n.target).tags for n in graph.nodes):
        return {}
    aliases: dict[fx.Node, fx.Node] = {}
    views: dict[Any, fx.Node] = {}

    def find_earlier(node: fx.Node) -> fx.Node | None:
        target, base, *rest = node.target, *(aliases.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
        if target is aten.detach.default or (
            target is aten.expand.default and tuple(rest[0]) == tuple(_shape(base))  # strides stay the same
        ):
            return base
        if target is aten.t.default and base.target is aten.t.default:
            return aliases.get(base.args[0], base.args[0])
        return views.setdefault((target, base, repr(rest), repr(node.kwargs)), node)

    for node in graph.nodes:
        if node.target in VIEWS and node not in captured.outputs and len(node.all_input_nodes) == 1:
            if (alias := find_earlier(node)) is not node:
                aliases[node] = alias
    return aliases


aten = torch.ops.aten
VIEWS = (
    aten.detach.default,
    aten.expand.default,
    aten.t.default,
    aten.view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.slice.Tensor,
)


def _shape(node: fx.Node) -> Sequence[int]:
    meta = node.meta.get("tensor_meta")
    return () if meta is None else meta.shape


def _idle_nodes(captured: Captured, aliases: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Returns operators that launch no kernel and whose result is unused (such as batch norm's empty reserve)."""
    used = {*captured.outputs, *captured.skip_flags, *(aliases.get(micro.loss, micro.loss) for micro in captured.micro)}
    used.update(node for nodes in captured.nodes for node in nodes)
    idle: set[fx.Node] = set()
    for node in reversed(captured.graph.graph.nodes):
        target = node.target
        if node in aliases:
            continue
        if isinstance(target, OpOverload) and not (
            node in used or target is NUMBER or target._schema.is_mutable or is_random(node)
        ):
            idle.add(node)
        else:
            used.update(aliases.get(a, a) for a in node.all_input_nodes)
    return idle


def _items(node: fx.Node) -> dict[int, fx.Node]:
    """Returns a node's results by index if it has several and each is extracted once, else an empty dictionary."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return items if "items" in node.meta and len(items) == len(node.users) else {}  # type: ignore[return-value]


def _constant(value: Any) -> Any:
    """Returns a constant argument with ``fx`` lists converted to Python lists, which operators parse faster."""
    if isinstance(value, (list, tuple)):
        return list(map(_constant, value))
    if isinstance(value, fx.Node):
        raise NotImplementedError(f"the graph has {value} in an argument of an unknown form")
    return value


def _getter(slots: list[Any]) -> Callable[[list[Any]], Any]:
    """Returns a function from the table to the arguments in these slots, which may include lists of slots."""
    if any(isinstance(s, list) for s in slots):
        parts = [_getter(s) if isinstance(s, list) else itemgetter(s) for s in slots]
        return lambda table: [part(table) for part in parts]
    if len(slots) > 1:
        return itemgetter(*slots)
    if slots:
        return itemgetter(slice(slots[0], slots[0] + 1))
    return itemgetter(slice(0, 0))


def _first_argument(*args: Any) -> Any:
    return None if isinstance(args[0], list) else args[0]


def _one_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to return 1 on an ArithmeticError, for unused numbers (bias correction before any step)."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except ArithmeticError:
            return 1.0

    return call


def _with_options(function: Callable[..., Any], count: int, keys: list[str]) -> Callable[..., Any]:
    """Wraps a function: the first ``count`` arguments by position, the others by these names."""
    return lambda *args, **options: function(*args[:count], **dict(zip(keys, args[count:], strict=True)), **options)


def _out_of_place(target: Any) -> Any:
    """Returns ``transpose`` for ``transpose_``: views are created early, so the old view must stay unchanged."""
    if isinstance(target, OpOverload) and Tag.inplace_view in target.tags:
        name = target._schema.name.partition("::")[2].removesuffix("_")
        packet = getattr(torch.ops.aten, name, None)
        return getattr(packet, target._overloadname, target)
    return target
