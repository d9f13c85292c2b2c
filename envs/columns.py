"""Record types and views of the tables that the compiled walks read (built by batch.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]


def integers(names: str) -> np.dtype[np.void]:
    """Returns a structured dtype of int64 fields with the given names."""
    return np.dtype([(name, np.int64) for name in names.split()])


# A task: counts, limits, and the offsets of its tables in ``ints``; gaps_at is an offset in ``gaps``, static_at and
# times_at are offsets in ``floats``, work_at is an offset in a thread's work array.
TASK = integers(
    "kernels tensors gaps nodes n_actions limit_bytes ideal_ns host short kernels_at tensors_at graph_at graph_end "
    "settings_at opening_at gaps_at nodes_at node_at static_at times_at work_at"
)
# A walk. shown: 1 + the task whose static columns are in the observation. opened, closed: number of entries of by_after
# and by_before already passed. valid_actions: without node 0. ended: Walk.done. over: whether the episode has ended,
# possibly by an invalid action. came_from, changed: position before the step, and the gap that it emptied or -1.
# new_from, new_to: range of kernels whose planned residency may have changed. pending: the request to batch.py. The
# last five belong to the clock: when the copy engines are free, and the active part of ``queue``.
WALK = integers(
    "task shown seed position count free_ns stuck_at iteration ended dead_end host_left pending over opened closed "
    "valid_actions removals rerun_ns changed new_from new_to came_from out_free in_free head tail under_way"
)
NOT_PENDING, WANTS_HOST, WANTS_STEPS = range(3)
# A batch: N nodes and F forms of the observation, and its options (language: allowed additional forms, as bits).
OPTIONS = integers("shown_nodes forms causal ignore autoreset tasks iterations language")

# A gap. offload_node, remove_node: node of the action, or -1. by_after: index of the gap at this rank by opening
# kernel, wrapping gaps last. by_before: index of the gap at this rank by closing kernel.
GAP = integers("tensor after before wraps nbytes copy_at first_since offload_node remove_node by_after by_before")
# The nodes of a task. ACTIONS, ACTION_GAPS: the n_actions nodes that are actions, and their gaps.
NODE_KERNEL, NODE_KIND, NODE_GAP, ACTIONS, ACTION_GAPS, NODE_ROWS = range(6)


class TaskView(NamedTuple):
    """Tables of one task with n kernels, as views of ``ints`` and ``floats``."""

    row: Any  # a TASK
    kernels: Ints  # (KERNEL_ROWS, n + 1): simulator/compiled/encoding.py
    tensors: Ints  # (TENSOR_ROWS, tensors): the same
    graph: Ints
    gaps: Ints  # (G,) GAP
    nodes: Ints  # (NODE_ROWS, N)
    times: Ints  # float64 (N,): start time of each node's kernel, ns
    begins: Ints  # (n + 1,): start time of each kernel and end of the iteration, ns
    opening: Ints  # (n,): the next position at which a gap opens
    node_at: Ints  # (n + 1,): current node at each position
    limit: int


class WalkView(NamedTuple):
    """One walk and its arrays."""

    row: Any  # a WALK
    need: Ints  # (n + 1,): planned residency
    ended: Ints  # (n + 1,): clock time at which all kernels before k have ended
    out_end: Ints  # (G,): completion time of the gap's copy to the host
    queue: Ints  # (G,): gaps with copies in flight, from head to tail
    taken: Ints  # (G,): action taken on the gap, or -1


class Scratch(NamedTuple):
    """Scratch arrays of one thread for writing observations; ``bits`` is ``product`` viewed as int64."""

    product: Ints
    bits: Ints
    shares: Ints
