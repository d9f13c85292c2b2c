"""Tables of the compiled walks (compiled_walk.py, observation.py), which batch.py makes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]


def integers(names: str) -> np.dtype[np.void]:
    """A record of int64 fields."""
    return np.dtype([(name, np.int64) for name in names.split()])


# A task: how many there are of what, the task in numbers, and where its tables begin in ``ints``, or (gaps_at) in
# ``gaps``, or (static_at, times_at) in ``floats``, or (work_at) in what a thread works on.
TASK = integers(
    "kernels tensors gaps nodes n_actions limit_bytes ideal_ns host short kernels_at tensors_at graph_at graph_end "
    "settings_at opening_at gaps_at nodes_at node_at static_at times_at work_at"
)
# A walk. shown: the task whose static columns are shown, and 1. opened, closed: how many of by_after and by_before are
# behind. valid_actions: beside node 0. ended: Walk.done. over: the episode is; an invalid action may have ended it.
# came_from, changed: the position before the step, and the gap that it emptied, or -1. new_from, new_to: kernels whose
# planned residency may have changed. pending: what it waits for. The last five are the clock's: when its engines are
# free, and what of ``queue`` is under way.
WALK = integers(
    "task shown seed position count free_ns stuck_at iteration ended dead_end host_left pending over opened closed "
    "valid_actions removals rerun_ns changed new_from new_to came_from out_free in_free head tail under_way"
)
NOT_PENDING, WANTS_HOST, WANTS_STEPS = range(3)
# A batch: N nodes and F forms that are shown, what it was asked for (language: the other forms that may be taken, as
# bits), the most kernels and gaps of a task.
OPTIONS = integers("shown_nodes forms causal ignore autoreset tasks iterations language most_kernels most_gaps")

# A gap. offload_node, remove_node: or -1. by_after, by_before: the gap in this place when those that do not wrap are
# sorted by the kernel that opens them, and then the others; and when all are by the one that ends them.
GAP = integers("tensor after before wraps nbytes copy_at first_since offload_node remove_node by_after by_before")
# The nodes of a task. ACTIONS, ACTION_GAPS: the nodes that are actions, n_actions of them, and their gaps.
NODE_KERNEL, NODE_KIND, NODE_GAP, ACTIONS, ACTION_GAPS, NODE_ROWS = range(6)


class TaskView(NamedTuple):
    """The tables of one task with n kernels, as views of ``ints`` and ``floats``."""

    row: Any  # a TASK
    kernels: Ints  # (KERNEL_ROWS, n + 1): simulator/compiled/encoding.py
    tensors: Ints  # (TENSOR_ROWS, tensors): the same
    graph: Ints
    gaps: Ints  # (G,) GAP
    nodes: Ints  # (NODE_ROWS, N)
    times: Ints  # float64 (N,): when the kernels of the nodes start
    begins: Ints  # (n + 1,): when kernels start, and the iteration ends
    opening: Ints  # (n,): the next position at which a gap opens
    node_at: Ints  # (n + 1,): the node under execution
    limit: int


class WalkView(NamedTuple):
    """One walk, and its arrays."""

    row: Any  # a WALK
    need: Ints  # (n + 1,): planned residency
    ended: Ints  # (n + 1,): when all kernels before k had ended, by the clock
    out_end: Ints  # (G,): when the gap's copy to the host is complete
    queue: Ints  # (G,): gaps whose copies are under way, from head to tail
    taken: Ints  # (G,): what was done with the gap, or -1


class Scratch(NamedTuple):
    """What a thread works on to show a walk; ``bits`` is ``product`` as int64."""

    product: Ints
    bits: Ints
    shares: Ints
