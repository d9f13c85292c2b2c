"""The columns of every table of the compiled walks (compiled_walk.py, observation.py; batch.py makes the tables)."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

Ints = NDArray[Any]

# ``where``, a row a task: how many there are of what, the task in numbers, and where its tables begin in ``ints``, or
# (STATIC_AT, TIMES_AT) in ``floats``, or (WORK_AT) in what a thread works on.
(
    KERNELS, TENSORS, GAPS, NODES, N_ACTIONS, LIMIT_BYTES, IDEAL_NS, HOST, SHORT, KERNELS_AT, TENSORS_AT, GRAPH_AT,
    GRAPH_END, SETTINGS_AT, OPENING_AT, GAPS_AT, NODES_AT, NODE_AT, STATIC_AT, TIMES_AT, WORK_AT, WHERE,
) = range(22)  # fmt: skip

# The gaps of a task, a row each. OFFLOAD_NODE, REMOVE_NODE: or -1. BY_AFTER: those that do not wrap by the kernel that
# opens them, and then the others. BY_BEFORE: all by the kernel that ends them.
(
    TENSOR, AFTER, BEFORE, WRAPS, NBYTES, COPY_AT, FIRST_SINCE, OFFLOAD_NODE, REMOVE_NODE, BY_AFTER, BY_BEFORE,
    GAP_ROWS,
) = range(12)  # fmt: skip

# The nodes of a task. ACTIONS, ACTION_GAPS: the nodes that are actions, N_ACTIONS of them, and their gaps.
NODE_KERNEL, NODE_KIND, NODE_GAP, ACTIONS, ACTION_GAPS, NODE_ROWS = range(6)

# ``walks``, a row a walk. SHOWN: the task whose static columns are shown, and 1. OPENED, CLOSED: how many of BY_AFTER
# and BY_BEFORE are behind. VALID_ACTIONS: beside node 0. ENDED: Walk.done. OVER: the episode is, an invalid action may
# have done it. CAME_FROM, CHANGED: the position before the step, and the gap that it emptied, or -1. NEW_FROM, NEW_TO:
# the kernels whose planned residency may have changed. PENDING: what it waits for. The last five are the clock's: when
# its engines are free, and what of ``queue`` is under way.
(
    TASK, SHOWN, SEED, POSITION, COUNT, FREE_NS, STUCK_AT, ITERATION, ENDED, DEAD_END, HOST_LEFT, PENDING, OVER, OPENED,
    CLOSED, VALID_ACTIONS, REMOVALS, RERUN_NS, CHANGED, NEW_FROM, NEW_TO, CAME_FROM, OUT_FREE, IN_FREE, HEAD, TAIL,
    UNDER_WAY, WALK,
) = range(28)  # fmt: skip
NOT_PENDING, WANTS_HOST, WANTS_STEPS = range(3)

# ``options`` of a batch: N nodes and F forms that are shown, what it was asked for (LANGUAGE: the other forms that may
# be taken, as bits), where arrays begin in a walk's row.
(
    SHOWN_NODES, FORMS, CAUSAL, IGNORE, AUTORESET, TASKS, NEED_AT, ENDED_AT, OUT_END_AT, QUEUE_AT, TAKEN_AT,
    ITERATIONS, LANGUAGE,
    OPTIONS,
) = range(14)  # fmt: skip


class TaskView(NamedTuple):
    """The tables of one task with n kernels, as views of ``ints`` and ``floats``."""

    row: Ints  # of ``where``
    kernels: Ints  # (KERNEL_ROWS, n + 1): simulator/compiled/encoding.py
    tensors: Ints  # (TENSOR_ROWS, tensors): the same
    graph: Ints
    gaps: Ints  # (GAP_ROWS, G)
    nodes: Ints  # (NODE_ROWS, N)
    times: Ints  # float64 (N,): when the kernels of the nodes start
    begins: Ints  # (n + 1,): when kernels start, and the iteration ends
    opening: Ints  # (n,): the next position at which a gap opens
    node_at: Ints  # (n + 1,): the node under execution
    limit: int


class WalkView(NamedTuple):
    """One walk: its columns, and the arrays behind them in its row."""

    row: Ints  # (WALK,)
    need: Ints  # (n + 1,): planned residency
    ended: Ints  # (n + 1,): when all kernels before k had ended, by the clock
    out_end: Ints  # (G,): when the gap's copy to the host is complete
    queue: Ints  # (G,): gaps whose copies are under way, from HEAD to TAIL
    taken: Ints  # (G,): what was done with the gap, or -1


class Scratch(NamedTuple):
    """What a thread works on to show a walk; ``bits`` is ``product`` as int64."""

    product: Ints
    bits: Ints
    shares: Ints
