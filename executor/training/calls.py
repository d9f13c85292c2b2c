"""A captured graph as calls on a table of values: flat lists that a loop runs without looking at the graph.

A **call** is (out, function, get, options): ``table[out] = function(*get(table), **options)``. Every node has a slot of
the table, and so has every constant argument, so that ``get`` is an ``itemgetter``. The calls of a kernel are its
operator, the items of its result, and the views of what it made. A view holds no memory, but none can be made of a
storage that is away, so all are made at once; views of persistent tensors are made once, when these are bound.

A rematerialisation (rule 7 of simulator.reference) has slots of its own. Its kernels write only those, and read those
where what they need is not present; what it recovers then replaces what was dropped. Batch-norm statistics, which a
kernel writes beside its outputs, go to scratch memory.
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
from simulator.program import Program
from simulator.reference import Rematerialisation, present

Call = tuple[int, Callable[..., Any], Callable[[list[Any]], Any], dict[str, Any]]


class Calls:
    """The calls of every kernel and of every rematerialisation.

    Attributes:
        slots: node -> its place in the table.
        table: constants in their places, None elsewhere.
        fixed: calls that make the views of persistent tensors, run when those are bound.
        first: calls that begin a step.
        kernels: per kernel, its calls.
        clears: per kernel, the slots of the tensors that die with it.
        of: tensor -> slots of its values, its maker's first.
        read_first: tensors that ``first`` reads, as numbers.
    """

    def __init__(self, captured: Captured, program: Program):
        self.captured, self.program, self.values = captured, program, captured.values
        self.slots: dict[fx.Node, int] = {}
        self.table: list[Any] = []
        self.fixed: list[Call] = []
        self.first: list[Call] = []
        self.read_first: set[int] = set()
        self.bodies: list[list[fx.Node]] = [[] for _ in program.kernels]
        self._place_nodes()
        self.outputs = [self.slots[node] for node in captured.outputs]
        self.of: dict[int, list[int]] = {}
        for node, t in self.values.items():
            if node in self.slots:
                self.of.setdefault(t, []).append(self.slots[node])
        self.kernels = [[self._call(n, self.slots.__getitem__, self.slots[n]) for n in body] for body in self.bodies]
        self.clears: list[tuple[int, ...]] = []
        for k, kernel in enumerate(program.kernels):
            dead = [t for t in kernel.accesses
                    if not program.tensors[t].persistent and program.accesses[t][-1] == k]  # fmt: skip
            slots = [s for t in dead for s in self.of.get(t, ()) if s not in self.outputs]
            self.clears.append((*slots, *(self.slots[n] for n in self.bodies[k] if self._sequence(n))))

    def _place_nodes(self) -> None:
        """Slots, and which kernel each node comes with; -1: none, it depends on persistent tensors alone."""
        own = {node: k for k, nodes in enumerate(self.captured.nodes) for node in nodes}
        batch = {leaf for leaf in self.captured.leaves if isinstance(leaf, fx.Node)}
        with_kernel: dict[fx.Node, int] = {}
        fixed: set[fx.Node] = set()
        for node in self.captured.graph.graph.nodes:
            if (
                node.op == "output"
                or _is_profiler(node)
                or (node.op == "get_attr" and all(map(_is_profiler, node.users)))
            ):
                continue
            self.slots[node] = self._slot(getattr(self.captured.graph, node.target) if node.op == "get_attr" else None)
            k = with_kernel[node] = own.get(node, max((with_kernel[a] for a in node.all_input_nodes), default=-1))
            if node.op != "call_function":
                if node not in batch:
                    fixed.add(node)
            elif k >= 0:
                self.bodies[k].append(node)
            elif fixed.issuperset(node.all_input_nodes) and node.target is not _NUMBER:
                fixed.add(node)
                self.fixed.append(self._call(node, self.slots.__getitem__, self.slots[node]))
            else:
                self.first.append(self._call(node, self.slots.__getitem__, self.slots[node]))
                if node.target is _NUMBER:
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
        keys = [key for key, value in node.kwargs.items() if isinstance(value, fx.Node)]
        options = {key: value for key, value in node.kwargs.items() if key not in keys}
        where = [slot(v) for v in node.args] + [slot(node.kwargs[key]) for key in keys]
        if keys:
            function = _with_options(function, len(node.args), keys)
        return out, function, _getter(where), options

    def random(self, k: int) -> bool:
        """Does the kernel draw random numbers?"""
        return any(isinstance(n.target, OpOverload) and Tag.nondeterministic_seeded in n.target.tags
                   for n in self.bodies[k])  # fmt: skip

    def rematerialise(
        self, k: int, remat: Rematerialisation, dropped: frozenset[int]
    ) -> list[tuple[list[Call], tuple[int, ...]]]:
        """Per kernel that runs again for kernel k: its calls, and the slots that are cleared after it."""
        program, values = self.program, self.values
        last: dict[int, int] = {}
        for i, step in enumerate(remat.steps):
            kernel = program.kernels[step.kernel]
            gone = [x for x in kernel.inputs if not present(program, x, step.kernel, k, dropped)]
            last.update(dict.fromkeys((*kernel.outputs, *gone), i))
        own: dict[fx.Node, int] = {}
        out: list[tuple[list[Call], tuple[int, ...]]] = []
        for i, step in enumerate(remat.steps):
            w = step.kernel
            calls: list[Call] = []
            scratch: list[int] = []

            def place(a: fx.Node, w: int = w, calls: list[Call] = calls, scratch: list[int] = scratch) -> int:
                x = values.get(a)
                if x is None:
                    return own.get(a, self.slots[a])
                if present(program, x, w, k, dropped):
                    return self.slots[a]
                if program.tensors[x].persistent:  # statistics
                    scratch.append(self._slot())
                    calls.append((scratch[-1], torch.empty_like, _getter([self.slots[a]]), {}))
                    return scratch[-1]
                return own[a]

            for node in self.bodies[w]:
                if node in self.captured.nodes[w] or any(a in own for a in node.all_input_nodes):
                    slot = self._slot()
                    calls.append(self._call(node, place, slot))
                    own[node] = slot
            clear = [own[n] for n in self.bodies[w] if n in own and self._sequence(n)]
            over = {x for x, j in last.items() if j == i and x not in remat.recovered}
            clear += [s for n, s in own.items() if values.get(n) in over]
            out.append((calls, (*clear, *scratch)))
        found = [(n, s) for n, s in own.items() if values.get(n) in remat.recovered]
        calls, cleared = out[-1]
        calls += [(self.slots[n], _same, _getter([s]), {}) for n, s in found]
        out[-1] = calls, (*cleared, *(s for _, s in found))
        return out


_NUMBER = torch.ops.aten._local_scalar_dense.default


def _same(value: Any) -> Any:
    return value


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


def _with_options(function: Callable[..., Any], count: int, keys: list[str]) -> Callable[..., Any]:
    """The first ``count`` arguments by position, the others by these names."""
    return lambda *args, **options: function(*args[:count], **dict(zip(keys, args[count:], strict=True)), **options)


def _is_profiler(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "profiler"


def _not_in_place(target: Any) -> Any:
    """``transpose`` for ``transpose_``: a view beside the old one, because views are made as early as can be."""
    if isinstance(target, OpOverload) and Tag.inplace_view in target.tags:
        name = target._schema.name.partition("::")[2].removesuffix("_")
        packet = getattr(torch.ops.aten, name, None)
        return getattr(packet, target._overloadname, target)
    return target
