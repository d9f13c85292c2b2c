"""The arrays that the compiled simulator of several jobs works on: plans as tables, and the names of all columns.

A plan is one int64 array, its **table**. The records of PLAN say where in it what is: columns of steps, rows (a row is
a swap of the plan, by tensor) and blocks, and lists. Offsets count from the table's beginning: list i of ``x`` is
table[table[x + i] : table[x + i + 1]].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import OF_MACHINE, Ints

# Where things are in a plan's table; ``base``: where the table is among those of all.
PLAN = np.dtype([(name, np.int64) for name in (
    "base", "at_ns", "n", "n_steps", "n_rows", "n_blocks", "n_persistent", "start_bytes", "admission_bytes",
    "share",  # NEVER: all memory
    "alike",  # the first of the job's that does the same
    # Per step: the kernel for which it runs, does it run again, ns, bytes that it allocates and frees, ns before it,
    # kernel.
    "before", "again", "lasts", "takes", "gives", "begins", "kernel",
    # Lists, per step: tensors that must be there, of those that are swapped; blocks that it touches; tensors that it
    # writes, each with its block, or uses last (block -1), where they can have a copy; rows copied at its end, opened.
    "waits", "touched", "writes", "copies", "opens",
    # Per row: tensor, block, kernels from the opening to the return, and until it may come back; flags.
    "row_tensor", "row_block", "row_before", "row_ready", "row_sync", "row_pinned", "row_after", "row_start",
    # Per block: owner, bytes, first and last step, ns of a copy out and in; list of the steps that touch it.
    "owner", "nbytes", "first", "last", "out_ns", "in_ns", "touches",
    "residency",  # per kernel
)], align=True)  # fmt: skip
AWAY, COPIED, OTHERWISE = range(3)  # row_start: when the job begins its tensor is away; or there, and copied

JOB = np.dtype([(name, np.int64) for name in (
    "arrives", "leaves", "iterations", "reserved", "first_plan", "n_plans",
    "durations", "n_durations",  # its first row, and how many; 0: the plan's ns
    "takes_turns",  # its plans are steps; these are known before it begins, GIVEN of them
    "stage",  # WAITING, PRESENT, LEAVING, GONE
    "held",  # bytes
    "plan", "position", "step", "running", "end", "work", "entry", "since", "admitted", "left",
    "boundaries", "boundary",  # how many, and the last
    "ready_since",  # -1: its next step is not ready
    "looked", "held_up", "missing",  # has the next step's data been looked at; what was found
    "sync",  # synchronous swap-outs that are not over
    "evicted",  # blocks that are away on demand
    "hosted", "first", "stale", "next_ready",  # what is on the host; its first to return, and until when that is so
    "offer", "offered_since", "blocked",  # not before this position has passed
)], align=True)  # fmt: skip
GIVEN = 9
WAITING, PRESENT, LEAVING, GONE = range(4)

# Of a gap, by_row[j, GAP_STATE, row] and by_block[j, GAP_STATE, block]: none, or where its tensor is.
GAP_STATE, GAP_BEFORE, GAP_READY, COUNTED, QUEUED, BY_BLOCK = range(6)
BY_ROW = GAP_READY + 1
THERE, LEAVES, HOSTED, RETURNS = range(4)
OPEN_ROW, HOST_BLOCK, BY_TENSOR = range(3)  # by_tensor: the row that has it away; the block that its copy is of; or -1

# The queue to the host, and the two copies under way: copy[OUT] and copy[BACK].
Q_JOB, Q_TENSOR, Q_BLOCK, Q_ISSUED, QUEUE = range(5)
OUT, BACK = range(2)
C_JOB, C_TENSOR, C_BLOCK, C_WORK, C_END, C_ENTRY, C_VOID, COPY = range(8)

(NOW, USED, PEAK, KERNEL_ENDS, SERVED, STEPPED, RUNNING, UNADMITTED, UNFINISHED, HEAD, TAIL, LINK_AT, COMPUTE_AT, N_LOG,
 HOST_LEFT, EVICTIONS, FREE, TENANT, TENANT_AT, STATE) = range(20)  # fmt: skip
# ``settings``, after those that both clocks have (compiled/encoding.py). CHANGES: where those of the tenant begin in
# ``times``. SHARE + k: speed of each of k steps at once.
FIFO, SWITCH_NS, CHANGES, SHARE = range(OF_MACHINE, OF_MACHINE + 4)

# Columns of the log: start, end, one of these, job, index.
L_STEP, L_END, L_OUT, L_IN, L_LEFT, L_STALL, L_BOUNDARY, L_ADMIT, L_SWITCH, L_GONE, L_EVICT, L_NEVER = range(12)
LOG = 6
C_COMPUTE, C_DATA, C_MEMORY = range(3)  # the index of a stall

DONE, DEADLOCK, GOES_ON = range(3)


class World(NamedTuple):
    """All arrays of a simulation; jobs and plans are records, the others int64. Every call copies what describes them:
    the fewer, the faster."""

    tables: Ints  # of all plans
    times: Ints  # the durations of all jobs; then (at_ns, speed) of the tenant's changes, and NEVER
    plans: NDArray[Any]
    jobs: NDArray[Any]
    arrivals: Ints  # jobs in the order in which they arrive
    by_tensor: Ints  # (jobs, BY_TENSOR, tensors)
    by_row: Ints  # (jobs, BY_ROW, rows)
    by_block: Ints  # (jobs, BY_BLOCK, blocks)
    load: Ints  # (jobs, kernels): planned residency and what came back early, from the present kernel on
    hosted: Ints  # (jobs, rows + blocks): gaps that are on the host, a row r as r, a block b as -1 - b
    ends: Ints  # (jobs, kernels + 1): kernels of all jobs that had ended at a position, modulo kernels + 1
    queue: Ints  # (blocks of all jobs and one, QUEUE)
    copy: Ints  # (2, COPY)
    now: Ints
    settings: Ints
    log: Ints  # (entries, LOG), one more than is needed; or of none
