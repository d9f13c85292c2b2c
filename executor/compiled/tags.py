"""Marks the nodes of a joint graph with a plan's decisions, for partitioners that take such marks.

    tag(joint_graph, inputs, Partitioner(0.6), num_fwd_outputs=1)

The marks state which values are saved, not where the others are recomputed: the partitioner decides the peak. The
partitioner of PyTorch 2.13 saves no value marked for recomputation, but recomputes some of those marked to be saved.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from executor.compiled.backend import Partitioner
from executor.compiled.launches import ORIGIN, repeatable


def tag(
    joint_graph: fx.GraphModule, inputs: Sequence[object], partitioner: Partitioner, **options: Any
) -> dict[str, CheckpointPolicy]:
    """Marks each forward node ``MUST_SAVE`` or ``MUST_RECOMPUTE`` in ``node.meta["recompute"]``; returns the marks.

    Nodes that cannot be repeated (random draws, side effects), and their direct users, are not marked.

    Args:
        joint_graph: AOTAutograd's joint graph; it is changed only in the marks.
        inputs: The joint graph's inputs.
        partitioner: Makes the plan; without swaps.
        options: As of PyTorch's partitioners (``num_fwd_outputs``).

    Returns:
        The policy by name of the node.

    Raises:
        CompileError: If no plan fits.
        ValueError: If the partitioner swaps.
    """
    if partitioner.mode != "recompute":
        raise ValueError(f"partitioner: expected mode 'recompute', got {partitioner.mode!r}")
    forward, _ = partitioner(copy.deepcopy(joint_graph), inputs, **options)
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    values = results[options["num_fwd_outputs"] :]
    saved = {x.meta.get(ORIGIN, x.name) for x in values if isinstance(x, fx.Node)}
    computed = {node.meta.get(ORIGIN, node.name) for node in forward.graph.nodes if node.op == "call_function"}
    marks = {}
    for node in joint_graph.graph.nodes:
        if node.name in computed and all(map(repeatable, (node, *node.all_input_nodes))):
            has_several = isinstance(node.meta.get("val"), (tuple, list))
            if has_several and saved.issuperset(user.name for user in node.users):
                continue
            policy = CheckpointPolicy.MUST_SAVE if node.name in saved else CheckpointPolicy.MUST_RECOMPUTE
            node.meta |= {"recompute": policy, "ac_graph_id": 0}
            marks[node.name] = policy
    return marks
