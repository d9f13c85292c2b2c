"""Turns a plan into a forward and a backward graph.

The schedule's steps are emitted in order, each as the nodes whose values its launch writes. The first
``Joint.between`` steps, and the recomputations before them, form the forward graph. A launch reads the copies of its
tensors that the schedule names (``Step.uses``). Values that never occupy memory are emitted again for each launch that
uses them, as Inductor inlines them. Host copies are operators of ``copies.py``, each with a wait after which the memory
is free or the data has arrived. Later passes make no decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from executor.compiled.copies import OFFLOAD, RELOAD, WAIT
from executor.compiled.joint import BACKWARD, FORWARD, UPDATE, Joint
from executor.compiled.launches import KERNEL, ORIGIN, STEP, TEMPORARY, Launch, repeatable
from executor.compiled.updates import readers
from executor.training.issue_order import Item, Move
from simulator.program import Program
from simulator.schedule import Step


def partition(
    joint: Joint, program: Program, items: Iterable[Item], slab: int = 0, offsets: Mapping[int, int] | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and backward graphs of a plan for ``joint.program``, as PyTorch's partitioners do.

    Args:
        items: The plan's steps, with the copies that start and end around each.
        slab: Key of the ``HostSlab`` of the copies.
        offsets: Offset in it by block.

    Returns:
        The forward and the backward module.
    """
    from torch._functorch.partitioners import _extract_fwd_bwd_modules, is_sym_node

    writer = _Writer(joint, program, slab, offsets or {})
    for item in items:
        for move in item.before:
            writer.move(move)
        writer.step(item.step)
        for move in item.after:
            writer.move(move)
    writer.order_updates()
    module = writer.module()
    second = writer.backward_nodes
    used = {x for node in second for x in node.all_input_nodes if x not in second}
    grads = {x for x in writer.grads if x is not None and x not in second}
    saved = [x for x in module.graph.nodes if x in used | grads and x.name not in writer.tangents]
    return _extract_fwd_bwd_modules(
        module,
        [x for x in saved if not is_sym_node(x)],
        [x for x in saved if is_sym_node(x)],
        num_fwd_outputs=joint.outputs,
    )


class _Writer:
    """Writes the steps of a schedule into one graph."""

    def __init__(self, joint: Joint, program: Program, slab: int, offsets: Mapping[int, int]) -> None:
        self.joint = joint
        self.slab = slab
        self.offsets = offsets
        self.graph = fx.Graph()
        self.names = [t.name for t in program.tensors]
        forward = joint.forward.graph
        backward = joint.backward.graph
        self.forward = {node.name: node for node in forward.nodes}
        self.backward = {node.name: node for node in backward.nodes}
        self.order = {node: i for i, node in enumerate((*forward.nodes, *backward.nodes))}
        self.values: dict[int, dict[fx.Node, fx.Node]] = {}  # block -> values stored in it
        self.on_host: dict[int, fx.Node] = {}  # block -> its host copy
        self.arriving: dict[int, fx.Node] = {}  # block -> target of its pending swap-in
        self.roots: dict[int, fx.Node] = {}  # block -> the value that is copied
        self.permanent: dict[fx.Node, fx.Node] = {}  # inputs, sizes, and nodes emitted only once
        self.backward_nodes: set[fx.Node] = set()  # nodes of the backward
        self.results: list[fx.Node | None] = []
        self.grads: list[fx.Node | None] = []
        self.in_backward = False
        self.overwritten: dict[fx.Node, fx.Node] = {}  # values that the next launch overwrites
        self.step_number = 0
        self.updates: dict[str, fx.Node] = {}  # parameter -> its update
        for node in forward.find_nodes(op="placeholder"):
            self.permanent[node] = self.graph.node_copy(node)
        saved = {x.name for x in _results(forward) if x is not None}
        self.tangents = {n.name for n in backward.find_nodes(op="placeholder") if n.name not in saved}
        for name in sorted(self.tangents, key=lambda n: self.order[self.backward[n]]):
            self.permanent[self.backward[name]] = self.graph.node_copy(self.backward[name])

    def step(self, step: Step) -> None:
        """Emits one launch, the marker between the two graphs, or the end marker."""
        k, reads_only, _ = self.joint.kernels[step.kernel]
        launch = self.joint.calls[k].launch
        if reads_only:
            for block in step.frees:
                self.overwritten |= self.values.pop(block, {})
            return
        env = self.permanent | self.overwritten
        for block in step.uses.values():
            env.update(self.values.get(block, {}))
        self.step_number += 1
        if k == self.joint.between:
            self._write_impure(self.forward.values())
            self.results = self._write_all(_results(self.joint.forward.graph)[: self.joint.outputs], env)
            self.in_backward = True
        elif launch is None:
            self._write_impure(self.backward.values())
            self.grads = self._write_all(_results(self.joint.backward.graph), env)
        else:
            # possibly recomputed in the backward
            nodes = self.forward
            graph = self.joint.first
            prefix = FORWARD
            if k > self.joint.between:
                nodes = self.backward
                graph = self.joint.second
                prefix = BACKWARD
            roots = [nodes[v] for v in launch.values if v in nodes]
            blocks = {self.names[t]: block for t, block in step.uses.items()}
            for root in roots:
                env.pop(root, None)
            for root in roots:
                if root in self.permanent:  # already emitted
                    env[root] = self.permanent[root]
                self._write(root, env).meta.setdefault(KERNEL, step.kernel)
                block = blocks.get(prefix + graph.stored.get(root.name, ""))
                if block is not None:
                    self.values.setdefault(block, {})[root] = env[root]
            self._carry(launch, prefix, blocks, {graph.stored.get(root.name, "") for root in roots})
        if not step.is_recomputation:  # recomputation may come in between
            self.overwritten = {}
        for block in step.frees:
            self.values.pop(block, None)

    def move(self, move: Move) -> None:
        """Emits the start or the end of a copy; its wait is the last reader of the memory that it frees."""
        kind, block = move
        if kind == "out":
            ((self.roots[block], value),) = self.values[block].items()
            self.on_host[block] = self._call(OFFLOAD, value, self.slab, self.offsets.get(block, 0))
        elif kind == "reclaim":
            ((_, value),) = self.values.pop(block).items()
            self.on_host[block] = self._call(WAIT, self.on_host[block], value)
        elif kind == "release":
            self.values.pop(block)
        elif kind == "in":
            self.arriving[block] = self._call(RELOAD, self.on_host[block], self.roots[block].meta["val"].device)
        else:
            restored = self._call(WAIT, self.arriving.pop(block), self.on_host[block])
            self.values[block] = {self.roots[block]: restored}
            if self.roots[block] in self.permanent:
                self.permanent[self.roots[block]] = restored

    def _call(self, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda x: x.meta["val"])
        with detect_fake_mode(values):
            node.meta |= {"val": target(*values), STEP: self.step_number}
        # Nodes with side effects would otherwise be in both graphs.
        node.meta["partitioner_tag"] = "must_be_in_backward" if self.in_backward else "must_be_in_forward"
        if self.in_backward:
            self.backward_nodes.add(node)
        return node

    def _carry(self, launch: Launch, prefix: str, blocks: dict[str, int], written: set[str]) -> None:
        """Lets readers recompute a storage that is not a graph value (another layout, a part of a concatenation)."""
        unknown = [blocks[prefix + s] for s in launch.writes if s not in written and prefix + s in blocks]
        for block in unknown:
            values = self.values.setdefault(block, {})
            values.update(self.overwritten)
            for other in blocks.values():
                values.update(self.values.get(other, {}))

    def _write_impure(self, nodes: Iterable[fx.Node]) -> None:
        """Emits nodes outside any launch that write the caller's memory or draw random numbers."""
        for node in list(nodes):
            if node.op == "call_function" and node.is_impure() and not repeatable(node) and node not in self.permanent:
                self._write(node, dict(self.permanent))

    def _write_all(self, nodes: list[fx.Node | None], env: dict[fx.Node, fx.Node]) -> list[fx.Node | None]:
        return [None if node is None else self._write(node, env) for node in nodes]

    def _write(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Returns the value of a node in the new graph and emits missing inputs that are not in ``env``."""
        missing: set[fx.Node] = set()
        stack = [self._source(node)]
        while stack:
            x = stack.pop()
            if x not in env and x not in missing:
                missing.add(x)
                stack += map(self._source, x.all_input_nodes)
        for x in sorted(missing, key=self.order.__getitem__):
            copied = self.graph.node_copy(x, lambda a: env[self._source(a)])
            copied.meta |= {STEP: self.step_number, ORIGIN: x.name}
            env[x] = copied
            if TEMPORARY in x.meta:
                self.updates[x.name.removeprefix(UPDATE)] = copied
            if self.in_backward:
                self.backward_nodes.add(copied)
            if not repeatable(x) or not _is_tensor(x):
                self.permanent[x] = copied
        return env[self._source(node)]

    def _source(self, node: fx.Node) -> fx.Node:
        """Returns the node of the forward that provides an input of the backward."""
        if node.op == "placeholder" and node.graph is self.joint.backward.graph and node.name not in self.tangents:
            return self.forward[node.name]
        return node

    def order_updates(self) -> None:
        """Moves updates behind the readers of their parameters, which they name so that Inductor keeps the order.

        Launches inline values of parameters, and recomputed launches read parameters that the backward did not.
        """
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        for name, update in self.updates.items():
            parameter = self.permanent[self.forward[name]]
            reading = [x for x in readers(parameter) if x in self.backward_nodes and x is not update]
            grad, aliases, key = update.args
            if reading and parameter not in aliases:  # type: ignore[operator]
                update.args = (grad, [*aliases, parameter], key)  # type: ignore[misc]
            last = max((update, *reading), key=position.__getitem__)
            if last is not update:
                last.append(update)
                update.meta[STEP] = last.meta[STEP]

    def module(self) -> fx.GraphModule:
        """Returns both graphs as one joint graph, the input of a partitioner."""
        self.graph.output((*self.results, *self.grads))
        first = self.joint.forward.graph.output_node().meta.get("desc", ())
        second = self.joint.backward.graph.output_node().meta.get("desc", ())
        self.graph.output_node().meta["desc"] = [*first[: self.joint.outputs], *second]
        return fx.GraphModule(self.joint.forward, self.graph)


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    return [x if isinstance(x, fx.Node) else None for x in graph.output_node().args[0]]


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, tuple, list))
