"""Extracts Inductor's kernel launches from a graph: their order and the storages that each reads and writes.

A graph is lowered and scheduled as in ``compile_fx`` (fused, reordered for its peak) and then discarded, without
generating code or running a compiler. The fusion is therefore Inductor's own, not a model of it. The private PyTorch
interfaces used here are those of version 2.13.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from executor.capture.operators import bind_arguments, flops_of, kind_of
from simulator.machine import Machine
from simulator.program import KernelKind

OFFLOAD = "headroom.offload.default"  # of copies.py
STEP = "headroom_step"  # key in a node's meta: the plan's step in which it executes
ORIGIN = "headroom_origin"  # name of the node that this node of a plan's graph repeats
KERNEL = "headroom_kernel"  # kernel of the Program that executes a node of a plan's graph and stores its value
TEMPORARY = "headroom_temporary"  # bytes that an update of a parameter uses meanwhile; only updates have this key


class Launch(NamedTuple):
    """One kernel that Inductor launches: a fused kernel or an operator call."""

    name: str
    kind: KernelKind
    reads: tuple[str, ...]  # storages
    writes: tuple[str, ...]  # storages, without those that only this kernel uses
    values: tuple[str, ...]  # names of the graph nodes whose values it writes, in order
    flops: int
    dtype: str  # dtype of the matrix products that account for the flops
    reuses: tuple[tuple[str, str], ...]  # (storage written, storage read whose memory it may reuse if that dies)
    workspace: int = 0  # bytes of reductions that only this kernel uses
    joined: bool = False  # C++: consecutive joined kernels are one call, which frees memory at its end


@dataclass(frozen=True)
class Launches:
    """A graph as Inductor executes it. Storages are named after Inductor's buffers or the graph's inputs.

    Attributes:
        nbytes: Size of each storage.
        stored: Name of a graph node -> the storage of its value. Missing nodes are inlined and never in memory.
        outputs: Storage of each output; None if it is not a tensor.
        strides: Strides of each output, possibly symbolic; None if the output is not a tensor.
    """

    launches: tuple[Launch, ...]
    nbytes: dict[str, int]
    stored: dict[str, str]
    outputs: tuple[str | None, ...]
    strides: tuple[tuple[int | torch.SymInt, ...] | None, ...]


@cache
def choices() -> Any:
    """Returns Inductor's choices handler that does not fuse kernels which the plan schedules far apart.

    A fused kernel would execute them all at the earliest step. The handler applies both when graphs are analyzed and
    when they are compiled (``V.set_choices_handler``).
    """
    from torch._inductor.choices import InductorChoices

    def steps(nodes: Any) -> set[int]:
        latest_steps = (max((x.meta.get(STEP, -1) for x in _origins([node])), default=-1) for node in nodes.get_nodes())
        return {step for step in latest_steps if step >= 0}

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            all_steps = steps(node1) | steps(node2)
            return (not all_steps or max(all_steps) - min(all_steps) <= 1) and InductorChoices.can_fuse(
                scheduler, node1, node2, shared_data_score
            )

    return Choices()


def in_order(gm: fx.GraphModule) -> AbstractContextManager[object]:
    """Keeps Inductor from reordering a graph with host copies, since it would wait for each copy immediately."""
    copies = any(str(node.target) == OFFLOAD for node in gm.graph.nodes)
    patch: AbstractContextManager[object] = torch._inductor.config.patch(reorder_for_peak_memory=False)
    return patch if copies else nullcontext()


def launches_of(
    graph: fx.GraphModule,
    backward: bool,
    donated: Collection[str] = (),
    strides: Mapping[str, tuple[int | torch.SymInt, ...]] = MappingProxyType({}),
) -> Launches:
    """Returns the launches of a forward or backward graph, which is not modified.

    Args:
        donated: Inputs of the backward with no other reference, over which results may be written.
        strides: Actual strides of inputs of the backward, as the forward produces them.

    Returns:
        The launches in order, with the size of each storage in bytes.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop, view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    gm = copy.deepcopy(graph)
    placeholders = gm.graph.find_nodes(op="placeholder")
    mode = detect_fake_mode([node.meta["val"] for node in placeholders])
    for node in placeholders:
        stride = strides.get(node.name)
        if stride is not None and sizes(stride) != sizes(node.meta["val"].stride()):
            with mode, torch.no_grad():
                node.meta["val"] = node.meta["val"].as_strided(node.meta["val"].size(), stride)
    inputs = [node.meta["val"] for node in placeholders]
    view_to_reshape(gm)
    with torch.no_grad():
        fake_tensor_prop(gm, inputs)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch.random.fork_rng(devices=()), in_order(gm):
        _recursive_post_grad_passes(gm, is_inference=False)
        lowering = GraphLowering(gm, example_inputs=inputs, shape_env=mode.shape_env, is_backward=backward)
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        lowering.bw_donated_idxs = [i for i, name in enumerate(names) if name in donated]
        lowering.garbage_collect_values = False  # ``env`` is read after the run
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_choices_handler(choices()):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            return _Reader(gm, lowering).read()


class _Reader:
    """Reads a scheduled graph."""

    def __init__(self, gm: fx.GraphModule, lowering: Any) -> None:
        from torch._inductor import ir

        self.ir: Any = ir
        self.gm = gm
        self.lowering = lowering
        self.scheduler = lowering.scheduler
        self.outputs = set(lowering.get_output_names())
        self.reused = self._find_reused()

    def read(self) -> Launches:
        groups: list[list[Any]] = []
        group_of: dict[str, list[Any]] = {}
        for node in self.scheduler.nodes:
            group = None
            if isinstance(node.node, self.ir.MultiOutput):  # one result of a call that has several
                group = group_of.get(node.node.inputs[0].get_name())
            elif isinstance(node.node, self.ir.ConcatKernel):  # launches nothing if one launch writes all parts
                makers = {id(g): g for x in node.node.inputs if (g := group_of.get(x.get_name())) is not None}
                group = next(iter(makers.values())) if len(makers) == 1 else None
            if group is None:
                groups.append(group := [])
            group.append(node)
            for output in node.get_outputs():
                group_of[output.get_name()] = group
        writers: dict[tuple[fx.Node, str], list[Any]] = {}  # (node, storage that its kernel writes in place)
        for group in groups:
            for node in group:
                for name in node.get_buffer_names() & self.scheduler.mutation_real_name.keys():
                    for x in _origins(node.get_nodes()):
                        writers[x, self._owner(name)] = group
        values: dict[int, list[str]] = {id(group): [] for group in groups}
        stored: dict[str, str] = {}
        for fx_node in self.gm.graph.nodes:
            raw = self._buffer(self.lowering.env.get(fx_node))
            if raw is None:
                continue
            storage = self._owner(raw)
            alias = is_view(fx_node) and storage in stored.values()
            stored[fx_node.name] = storage
            writer = writers.get((fx_node, storage), group_of.get(raw))  # not the kernel that only zero-fills it
            if writer is not None and not alias:
                values[id(writer)].append(fx_node.name)
        for group in groups:
            values[id(group)] += [x.name for node in group for x in _origins([node]) if TEMPORARY in x.meta]
        launches = tuple(self._launch(group, self._without_parts(values[id(group)], stored)) for group in groups)
        names = {s for launch in launches for s in launch.reads + launch.writes} | set(stored.values())
        outs = (None if (o := self._buffer(out)) is None else self._owner(o) for out in self.lowering.graph_outputs)
        strides = (
            tuple(map(self._integer, out.get_stride()))
            if isinstance(out, self.ir.IRNode) and out.has_tensor_output()
            else None
            for out in self.lowering.graph_outputs
        )
        return Launches(launches, {name: self._nbytes(name) for name in names}, stored, tuple(outs), tuple(strides))

    def _integer(self, expression: Any) -> int | torch.SymInt:
        """Returns a size or stride of Inductor as PyTorch represents it."""
        if isinstance(expression, int) or expression.is_number:
            return int(expression)
        made: torch.SymInt = self.lowering.sizevars.shape_env.create_symintnode(expression, hint=None)
        return made

    def _without_parts(self, values: list[str], stored: dict[str, str]) -> tuple[str, ...]:
        """Returns ``values`` without parts that are read only by a ``cat`` among them."""
        nodes = {node.name: node for node in self.gm.graph.nodes}
        cats = {nodes[v] for v in values if nodes[v].target is torch.ops.aten.cat.default}
        parts = {v for v in values if len(u := nodes[v].users) == 1 and cats.issuperset(u)}
        return tuple(v for v in values if v not in parts or stored[v] != stored[next(iter(nodes[v].users)).name])

    def _launch(self, group: list[Any], values: tuple[str, ...]) -> Launch:
        from torch._inductor.dependencies import WeakDep

        ir = self.ir
        node_names = {n.get_name() for node in group for n in node.get_nodes()}
        written = [o for node in group for o in node.get_outputs()]
        written_names = {o.get_name() for o in written}
        local = {
            o.get_name()
            for o in written
            if o.get_name() not in self.outputs
            and o.get_name() not in self.scheduler.mutation_real_name
            and all(user.is_weak or user.get_name() in node_names for user in o.users)
        }
        reads = dict.fromkeys(
            self._owner(d.name)
            for node in group
            for d in node.read_writes.reads
            if not isinstance(d, WeakDep) and d.name not in written_names
        )
        writes = dict.fromkeys(
            self._owner(o.get_name())
            for o in written
            if o.get_name() not in local and not isinstance(o.node.layout, (ir.NoneLayout, ir.MultiOutputLayout))
        )
        nodes = [n for node in group for n in node.get_nodes()]
        extern = any(isinstance(n.node, (ir.ExternKernel, ir.MultiOutput)) for n in nodes)
        origins = [x for x in _origins(nodes) if x.op == "call_function"]
        products = [(x, f) for x in origins if extern and (f := _flops(x))]
        dtypes = {
            str(x.meta["val"].dtype).removeprefix("torch.")
            for x, _ in products
            if isinstance(x.meta.get("val"), torch.Tensor)
        }
        if products:
            kind = kind_of(products[0][0].target, "forward")
        elif extern and len(origins) == 1 and isinstance(origins[0].target, torch._ops.OpOverload):
            kind = kind_of(origins[0].target, "forward")
        else:
            kind = "reduce" if any(n.is_reduction() for n in nodes) else "elementwise"
        reuses = tuple(self._reuses(written, local, written_names))
        sums = [o for n in nodes if n.is_reduction() for o in n.get_outputs() if o.get_name() in local]
        return Launch(
            "+".join(x.name for x in origins[-3:]) or group[0].get_name(),
            kind,
            tuple(reads),
            tuple(writes),
            values,
            sum(f for _, f in products),
            next(iter(dtypes), "float32"),
            reuses,
            sum(self._nbytes(o.get_name()) for o in sums) + sum(x.meta.get(TEMPORARY, 0) for x in origins),
            not extern and nodes[0].get_device().type == "cpu",
        )

    def _find_reused(self) -> dict[str, str]:
        """Returns result -> buffer whose memory it reuses, mirroring ``SchedulerNode.decide_inplace_update``."""
        from torch._inductor import config
        from torch._inductor.codegen.wrapper import can_match_buffer_size
        from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode

        unsupported = (self.ir.NoneLayout, self.ir.MultiOutputLayout, self.ir.MutationLayoutSHOULDREMOVE)
        reused: dict[str, str] = {}
        done: set[str] = set()
        for group in self.scheduler.nodes:
            for node in group.get_nodes():
                ignored = node.ancestors | self.lowering.removed_operations | done
                for output in node.get_outputs() if isinstance(node, SchedulerNode) and config.inplace_buffers else ():
                    out = output.node
                    if not out.should_allocate() or out.get_inputs_that_alias_output() or out.get_mutation_names():
                        continue
                    for dep in node.read_writes.reads:
                        donated = self.scheduler.name_to_donated_buffer.get(dep.name)
                        source = donated if donated is not None else self.scheduler.name_to_buf.get(dep.name)
                        if source is None or source.node is None or source.get_name() in reused.values():
                            continue
                        users = [u for u in source.users if u.node.get_name() not in ignored]
                        if (
                            len(users) == 1
                            and users[0].can_inplace
                            and users[0].node is node
                            and not isinstance(source.node.get_output_spec(), unsupported)
                            and not self._is_returned(source)
                            and not isinstance(source.defining_op, NopKernelSchedulerNode)
                            and can_match_buffer_size(source.node, out)
                            and self._has_one_index(source, group)
                        ):
                            reused[output.get_name()] = source.get_name()
                            break
            done.update(group.get_operation_names())
        return reused

    def _is_returned(self, source: Any) -> bool:
        """Returns whether a buffer is an argument that a call returns (a wait)."""
        op = source.defining_op
        is_call = isinstance(op.node, (self.ir.FallbackKernel, self.ir.MultiOutput)) if op else False
        return is_call and bool(source.node.get_inputs_that_alias_output())

    def _has_one_index(self, source: Any, group: Any) -> bool:
        """Returns whether all of a fused kernel reads a buffer in the same order."""
        name = source.get_name()
        node_names = {n.get_name() for n in group.get_nodes()}
        users = [u.node for u in source.users if u.node.get_name() in node_names]
        return len({d for n in users for d in n.read_writes.reads_and_writes() if d.name == name}) <= 1

    def _reuses(self, written: list[Any], local: set[str], written_names: set[str]) -> Iterator[tuple[str, str]]:
        for output in written:
            name = output.get_name()
            source: str | None = self.reused.get(name)
            while source in written_names:
                source = self.reused.get(source)
            if name not in local and source is not None:
                yield self._owner(name), self._owner(source)

    def _buffer(self, value: Any) -> str | None:
        """Returns the name of the buffer that holds a lowered value, or None."""
        value = self._unwrapped(value)
        is_buffer = isinstance(value, self.ir.Buffer) and not isinstance(value, self.ir.ConstantBuffer)
        return value.get_name() if is_buffer else None

    def _unwrapped(self, value: Any) -> Any:
        while isinstance(value, (self.ir.MutableBox, self.ir.BaseView)):
            value = value.data
        return value

    def _owner(self, name: str) -> str:
        """Returns the buffer that owns the memory of an in-place write, part of a ``cat`` or returned argument."""
        while True:
            node = getattr(self.scheduler.name_to_buf.get(name), "node", None)
            layout = node.layout if node is not None else None
            call = node.inputs[0] if isinstance(node, self.ir.MultiOutput) else None
            aliases = call.get_inputs_that_alias_output() if isinstance(call, self.ir.FallbackKernel) else ()
            if name in self.scheduler.mutation_real_name:
                name = self.scheduler.mutation_real_name[name]
            elif isinstance(layout, self.ir.NonOwningLayout):
                name = layout.view.get_name()
            elif aliases:
                name = aliases[0]
            else:
                return name

    def _nbytes(self, name: str) -> int:
        buffer = self.scheduler.name_to_buf.get(name)
        node = buffer.node if buffer is not None else self.lowering.graph_inputs.get(name)
        call = node.inputs[0] if isinstance(node, self.ir.MultiOutput) else None
        if str(getattr(call, "op_overload", "")) == OFFLOAD:
            return 0
        node = self._unwrapped(node)
        without_tensor = (self.ir.NoneLayout, self.ir.MultiOutputLayout)
        if not isinstance(node, self.ir.Buffer) or isinstance(node.layout, without_tensor):
            return 0
        numel = self.lowering.sizevars.optimization_hint(self.lowering.get_allocation_storage_size(node), fallback=0)
        return int(numel) * int(node.get_dtype().itemsize)


def sizes(values: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
    """Returns sizes or strides as integers: symbolic ones are those of the batch that is compiled."""
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return tuple(int(optimization_hint(x)) if isinstance(x, torch.SymInt) else int(x) for x in values)


def is_view(node: fx.Node) -> bool:
    """Returns whether the node's value aliases another tensor's memory, according to its schema."""
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    named = node.target is torch.ops.aten.reshape.default or node.target is torch.ops.aten._unsafe_view.default
    return named or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def repeatable(node: fx.Node) -> bool:
    """Returns whether a call can be repeated with the same result and without side effects."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator)
    if node.target._schema.is_mutable or node.target.namespace == "_c10d_functional":
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return True
    return bind_arguments(node.target, node.args, node.kwargs).get("dropout_p") == 0.0  # attention without dropout


def _origins(nodes: list[Any]) -> list[fx.Node]:
    found = {x: None for n in nodes if n.node is not None for x in n.node.get_origins()}
    return sorted(found, key=lambda x: x._sort_key)


def operator_ns(node: fx.Node, machine: Machine) -> int:
    """Returns the roofline duration of a single operator in ns; 0 for nodes that are not operators."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    values = [x for y in (node, *node.all_input_nodes) for x in torch.utils._pytree.tree_leaves(y.meta.get("val"))]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    nbytes = sum(sizes(x.nbytes for x in tensors))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return roofline_ns(machine, kind_of(node.target, "forward"), _flops(node), nbytes, dtype)


def roofline_ns(machine: Machine, kind: KernelKind, flops: int, nbytes: int, dtype: str) -> int:
    """Returns the roofline duration of a kernel in ns, as float32 if the machine has no rate for the dtype."""
    return machine.kernel_ns(kind, flops, nbytes, dtype if dtype in machine.flops_per_s else "float32")


def _flops(node: fx.Node) -> int:
    """Returns the FLOPs of a call; 0 if unknown."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: _fixed(x.meta.get("val")))
    try:
        return flops_of(node.target, args, kwargs, _fixed(node.meta.get("val")))
    except (TypeError, ValueError, KeyError):
        return 0


def _fixed(values: Any) -> Any:
    """Replaces symbolic sizes: comparing them would make Dynamo compile other sizes again."""

    def fix(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and not all(type(s) is int for s in x.size()):
            return torch.empty(sizes(x.size()), dtype=x.dtype, device="meta")
        return sizes([x])[0] if isinstance(x, torch.SymInt) else x

    return torch.utils._pytree.tree_map(fix, values)
