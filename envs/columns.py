"""Records, arrays and views of the compiled walks (allocated by batch.py)."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]


def integers(names: str) -> np.dtype[np.void]:
    """Returns a structured dtype of int64 fields with the given names."""
    return np.dtype([(name, np.int64) for name in names.split()])


def record(kind: np.dtype[np.void], **values: int) -> NDArray[np.void]:
    """Returns an array of one record; fields that are not given are 0."""
    array = np.zeros(1, kind)
    for name, value in values.items():
        array[name] = value
    return array


class Pending(IntEnum):
    """Request of a walk to batch.py, which compiled code cannot fulfill."""

    NOTHING = 0
    HOST_BYTES = 1  # host memory that the plan leaves
    STEPS = 2  # a longer buffer of recomputation steps


# A task: counts, limits, and the offsets of its tables in ``ints``; gaps_at is an offset in ``gaps``, static_at and
# times_at are offsets in ``floats``, work_at is an offset in a thread's work array.
TASK = integers(
    "kernels tensors gaps nodes n_actions limit_bytes ideal_ns host_bytes host_is_short kernels_at tensors_at graph_at "
    "graph_end settings_at opening_at gaps_at node_kernel_at node_kind_at node_gap_at action_nodes_at action_gaps_at "
    "node_at static_at times_at work_at"
)
# A walk. shown: 1 + the task whose static columns are in the observation. opened, closed: number of entries of by_after
# and by_before already passed. valid_actions: without node 0. ended: Walk.done. over: whether the episode has ended,
# possibly by an invalid action. came_from, changed: position before the step, and the gap that it emptied or -1.
# new_from, new_to: range of kernels whose planned residency may have changed. pending: a Pending. The last five belong
# to the clock: when the copy engines are free, and the active part of ``queue``.
WALK = integers(
    "task shown seed position count free_ns stuck_at iteration ended dead_end host_left pending over opened closed "
    "valid_actions removals rerun_ns changed new_from new_to came_from out_free in_free head tail under_way"
)
# A batch: N nodes and F forms of the observation, and its options (copies, keeps, earlies: allowed additional forms).
OPTIONS = integers("shown_nodes forms causal ignore autoreset tasks iterations copies keeps earlies")
# A gap. offload_node, remove_node: node of the action, or -1. by_after: index of the gap at this rank by opening
# kernel, wrapping gaps last. by_before: index of the gap at this rank by closing kernel.
GAP = integers("tensor after before wraps nbytes copy_at first_since offload_node remove_node by_after by_before")


class BatchTables(NamedTuple):
    """What the walks of a batch read."""

    options: Ints  # (1,) OPTIONS
    tasks: Ints  # (tasks,) TASK
    gaps: Ints  # GAP, of all tasks
    ints: Ints  # int64 tables of all tasks
    floats: Ints  # float64 tables of all tasks


class WalkArrays(NamedTuple):
    """State of M walks; the fields up to ``gap_actions`` are those of a WalkView."""

    walks: Ints  # (M,) WALK
    need: Ints  # (M, kernels + 1)
    ended_ns: Ints  # (M, kernels + 1)
    out_end: Ints  # (M, gaps)
    queue: Ints  # (M, gaps)
    gap_actions: Ints  # (M, gaps)
    rows: Ints  # (M, gaps, COLUMNS): partial plans (simulator/compiled/encoding.py)
    touched: Ints  # bool (M, tensors): tensors that the plan's recomputation writes or reads


class WorkArrays(NamedTuple):
    """Work arrays of one thread; ``bits`` is ``product`` viewed as int64."""

    ints: Ints
    product: Ints
    bits: Ints
    shares: Ints
    gaps: Ints
    steps: Ints


class Outputs(NamedTuple):
    """Results of M walks. Those after ``invalid`` are written only where they change."""

    rewards: Ints  # (M,) of the last step
    terminated: Ints  # (M,) of the last step
    invalid: Ints  # (M,) of the last step
    overhead: Ints  # (M,) NaN in a dead end
    feasible: Ints  # (M,)
    mask: Ints  # (M, F N)
    nodes: Ints  # (M, OBSERVED, N)
    current: Ints  # (M,)


class TaskView(NamedTuple):
    """Tables of one task with n kernels, as views of ``ints`` and ``floats``."""

    kernels: Ints  # (KERNEL_ROWS, n + 1): simulator/compiled/encoding.py
    tensors: Ints  # (TENSOR_ROWS, tensors): the same
    graph: Ints
    settings: Ints  # (SETTINGS,)
    gaps: Ints  # (G,) GAP
    node_kernel: Ints  # (N,)
    node_kind: Ints  # (N,) kind of the node's action, or -1
    node_gap: Ints  # (N,) gap of the node's action, or -1
    action_nodes: Ints  # (n_actions,): the nodes with an action on a gap
    action_gaps: Ints  # (n_actions,): their gaps
    times: Ints  # float64 (N,): start time of each node's kernel, ns
    begins: Ints  # (n + 1,): start time of each kernel and end of the iteration, ns
    opening: Ints  # (n,): the next position at which a gap opens
    node_at: Ints  # (n + 1,): current node at each position
    limit: int
    ideal_ns: int
    host_bytes: int
    host_is_short: int  # whether the host may be too small for a plan


class WalkView(NamedTuple):
    """One walk and its arrays."""

    row: Any  # a WALK
    need: Ints  # (n + 1,): planned residency
    ended_ns: Ints  # (n + 1,): clock time at which all kernels before k have ended
    out_end: Ints  # (G,): completion time of the gap's copy to the host
    queue: Ints  # (G,): gaps with copies in flight, from head to tail
    gap_actions: Ints  # (G,): action taken on the gap, or -1


class Simulation(NamedTuple):
    """Arguments of ``score_plans`` for one plan, as views of a thread's work array."""

    arrays: Any  # simulator.compiled.encoding.Arrays
    results: Ints  # RESULT
    ends: Ints  # (2,): first and last + 1 row of the plan
    settings: Ints  # (SETTINGS,)
