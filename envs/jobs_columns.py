"""The arrays of compiled_jobs.py: the columns of every table, and the tuples that hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

Ints = NDArray[Any]

# A scenario: how many jobs and nodes, its limit and ``until_ns`` (or NEVER), where its parts and tables begin.
(N_JOBS, N_NODES, LIMIT, UNTIL, PART_AT, TIMES_AT, TIMES_END, ARRIVALS_AT, SETTINGS_AT, SETTINGS_END, STATIC_AT,
 SCENARIO) = range(12)  # fmt: skip

# A part, a job of a scenario: numbers of its program, its first node, the bytes of its largest kernel, are there
# removals; where tables begin in ``ints``, or (WORK_AT) in what a thread works on; the job's times.
(KERNELS, TENSORS, GAPS, NODES, FIRST, LARGEST, REMOVABLE, KERNELS_AT, TENSORS_AT, GRAPH_AT, GRAPH_END, GAPS_AT,
 NODES_AT, WORK_AT, ALONE_NS, IDEAL_NS, ARRIVES, LEAVES, PART) = range(19)  # fmt: skip
# Its gaps and nodes, a row each; nodes count from the job's first one.
TENSOR, AFTER, BEFORE, NBYTES, OFFLOAD_NODE, REMOVE_NODE, GAP_ROWS = range(7)
NODE_KERNEL, NODE_KIND, NODE_GAP, NODE_ROWS = range(4)

# ``walks``. PHASE: when the phase began. PEAKS: of the jobs that are there, together. DECIDED: the job whose draft has
# changed. PENDING: what it waits for, and WANTED: how much of it.
TASK, ENDED, PHASE, PEAKS, USED_BYTES, DECIDED, PENDING, WANTED, WALK = range(9)
NOT_PENDING, ANEW, ENOUGH, WANTS_STEPS, WANTS_TABLE, WANTS_PLACE, WANTS_BLOCKS, DOES_NOT_FIT, STUCK = range(9)

# ``drafts``, a row a job. THERE, KNOWN: it is there; it has been given a plan, the last one in place PLACE. LIMITS + p:
# the limit of the plan in place p. ENDED_NS: ideal ns of the iterations that have ended.
THERE, KNOWN, PLACE, LIMITS, PEAK, PEAK_AT, ON_HOST, REMOVALS, ENDED_NS, DRAFT = 0, 1, 2, 3, 5, 6, 7, 8, 9, 10
NEW = 0  # ``taken``: of the draft; 1 + p: of the plan in place p

# ``options``: dimensions of the arrays: jobs, tensors, rows, blocks and kernels at most, ints of a place for a table.
O_JOBS, O_TENSORS, O_ROWS, O_BLOCKS, O_KERNELS, O_PLACE, O_IGNORE, OPTIONS = range(8)


class Tables(NamedTuple):
    """What is known of all tasks."""

    options: Ints
    tasks: Ints  # (tasks, SCENARIO)
    parts: Ints  # (parts, PART)
    ints: Ints
    static: Ints  # float32: columns of nodes
    records: Ints  # (tasks, ints): of the jobs before they come; and the state of the clock
    state: Ints
    no_log: Ints


class Arrays(NamedTuple):
    """The state of all walks."""

    walks: Ints  # (walks, WALK)
    drafts: Ints  # (walks, jobs, DRAFT)
    need: Ints  # (walks, jobs, kernels + 1): planned residency of the drafts
    taken: Ints  # int8 (walks, 3, jobs, gaps): kind of the action that was taken of each gap, or -1
    plans: Ints  # PLAN (walks, 2 jobs)
    places: Ints  # (walks, ints): tables of plans
    jobs: Ints  # JOB (walks, jobs)
    records: Ints  # the same memory as int64
    state: Ints  # (walks, ints): the rest of what is kept (``_world``)


class Scratch(NamedTuple):
    """What a thread works on."""

    ints: Ints  # by_kernel and by_tensor of each program
    rows: Ints
    by_row: Ints
    steps: Ints
    table: Ints
    shares: Ints  # float32 (kernels,)
    jobs: Ints  # as those of a walk
    records: Ints
    state: Ints


class Shown(NamedTuple):
    """What is observed, and the results of the last step."""

    rewards: Ints
    terminated: Ints
    invalid: Ints
    slowdown: Ints
    mask: Ints  # int8 (walks, nodes)
    nodes: Ints  # float32 (walks, LEFT + 1, nodes)
    moment: Ints  # float32 (walks, 4)
    job: Ints  # (walks, nodes)


class PartView(NamedTuple):
    """The tables of a part."""

    row: Ints
    kernels: Ints
    tensors: Ints
    graph: Ints
    gaps: Ints
    nodes: Ints
