"""A memory policy for torchtitan's graph_trainer: what is saved, and what is made again, is a plan's.

    from executor.integrations.torchtitan import register

    register("40GiB")                               # before the trainer is made
    config.compile.memory_policy = "headroom"       # torchtitan/experiments/graph_trainer

The graph is forward, loss and backward in one. The policy makes a Program of its operators, plans it, and tags the
forward's nodes; torchtitan's own pass then makes again what is tagged, each value once, before its first use in the
backward. What that takes is looked at by PyTorch's copy of the pass, and planned anew where it is too much.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from executor.compiled.backend import CPU, Planner
from executor.compiled.launches import cost_of, is_view, repeatable, tensors_of
from executor.fit import FitError, machine_of, planned_in_mode
from simulator.limits import is_fraction, limit_bytes, size_bytes
from simulator.machine import Machine
from simulator.program import Kernel, Program, Tensor as Storage
from simulator.report import size
from simulator.schedule import lower

TRIES = 4  # plans, the limit lowered by what torchtitan's pass made of the one before
LEFT = ("lm_head", "loss")  # modules that torchtitan's pass cannot make again: several backward regions


def register(
    memory: int | float | str, machine: Machine | str | None = None, planner: Planner = "lp_round",
    seconds: float | None = 3.0, name: str = "headroom",
) -> None:  # fmt: skip
    """Registers the policy under ``name``.

    Args:
        memory: bytes, a size ("40GiB"), or a part (0.6) of what the graph needs without a policy. Of what forward, loss
            and backward allocate; not parameters, optimizer state and the batch.
        machine, planner, seconds: as ``executor.compiled.Partitioner`` has them.

    Raises:
        ImportError: there is no torchtitan with a graph_trainer.
        FormatError: memory or machine is none.
    """
    from torchtitan.experiments.graph_trainer.registry import register_memory_policy

    if not is_fraction(memory):
        size_bytes(memory, "memory")
    given = Machine.load(machine) if isinstance(machine, str) else machine

    @register_memory_policy(name)
    def policy(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        return tag(gm, memory, given, planner, seconds)


def tag(
    gm: fx.GraphModule, memory: int | float | str, machine: Machine | None = None, planner: Planner = "lp_round",
    seconds: float | None = 3.0,
) -> fx.GraphModule:  # fmt: skip
    """Tags the forward's nodes in place; ``meta["autograd_backward"]`` tells the backward's, as torchtitan has it.

    Raises:
        FitError: no plan fits as torchtitan carries it out.
    """
    from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
        remat_using_tags_for_fwd_loss_bwd_graph as carried_out,
    )

    devices = {x.device for node in gm.graph.nodes for x in tensors_of(node)}
    cuda = next((d for d in devices if d.type == "cuda"), None)
    machine = machine or (CPU if cuda is None else machine_of(torch.cuda.get_device_name(cuda)))
    program, nodes = program_of(gm, machine)
    asked = limit = limit_bytes(memory, program, "memory")
    for _ in range(TRIES):
        again: set[fx.Node] = set()
        if program.peak_bytes > asked:
            plan, _ = planned_in_mode(program, machine, limit, planner, seconds)
            again = {nodes[step.kernel] for step in lower(program, plan).steps if step.again}
        _tag(gm, again)
        peak = program_of(carried_out(copy.deepcopy(gm)), machine)[0].peak_bytes
        if peak <= asked:
            return gm
        limit -= peak - asked
    raise FitError(
        f"the graph does not fit into {size(asked)}: the plans that were tried take {size(peak)} as torchtitan's pass "
        "carries them out"
    )


def program_of(gm: fx.GraphModule, machine: Machine) -> tuple[Program, list[fx.Node]]:
    """The graph as a Program, operator by operator, and the node of each kernel.

    Views are followed by their schemas: what was made again has the fake tensors of what it is made again of.
    """
    held: dict[fx.Node, list[int | None]] = {}  # the storage of each result; None: the caller's
    storages: list[Storage] = []
    kernels: list[Kernel] = []
    nodes: list[fx.Node] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        if node.op in ("placeholder", "get_attr"):
            held[node] = [None] * len(values)
            continue
        read = dict.fromkeys(s for x in node.all_input_nodes for s in held[x])
        if node.target is operator.getitem:
            held[node] = [held[node.args[0]][node.args[1]]]
            continue
        if is_view(node):
            held[node] = [held[node.all_input_nodes[0]][0]] * len(values)
            continue
        func = node.target if isinstance(node.target, torch._ops.OpOverload) else None
        if node.op == "output":
            held[node] = []
        elif func is not None and func._schema.is_mutable:
            held[node] = [held[node.all_input_nodes[0]][0]] * len(values)
        else:
            held[node] = []
            for x in values:
                made = isinstance(x, Tensor)
                held[node].append(len(storages) if made else None)
                if made:
                    storages.append(Storage(f"{node.name}:{len(storages)}", x.untyped_storage().nbytes(), "activation"))
        cost = cost_of(node, machine)
        kernels.append(
            Kernel(
                node.name, cost.kind, "backward" if _backward(node) else "forward",
                tuple(s for s in read if s is not None),
                tuple(dict.fromkeys(s for s in held[node] if s is not None)),
                cost.ns, 0, cost.flops, cost.nbytes, _may_run_again(node),
            )
        )  # fmt: skip
        nodes.append(node)
    return Program("torchtitan", tuple(storages), tuple(kernels)), nodes


def _tag(gm: fx.GraphModule, again: set[fx.Node]) -> None:
    """Views, and the parts of what has several results, go with what they are of."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or _backward(node):
            continue
        follows = node.target is operator.getitem or is_view(node)
        base = node.all_input_nodes[0] if follows and node.all_input_nodes else node
        repeated = node in again or (follows and _repeated(base))
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if repeated else CheckpointPolicy.MUST_SAVE


def _repeated(node: fx.Node) -> bool:
    return node.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE


def _may_run_again(node: fx.Node) -> bool:
    """PyTorch's pass makes no random numbers again, and torchtitan's takes one region of the backward."""
    place = node.meta.get("custom", {}).get("module_fqn", "")
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "call_function" and not (_backward(node) or drawn or place.startswith(LEFT)) and repeatable(node)


def _backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward", False))
