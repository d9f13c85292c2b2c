"""Arrays of the compiled code: plans as rows, and the columns of every table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.decisions import KINDS, Decision, Recompute, Rerun, Row as Row, Swap
from simulator.modes import Choice
from simulator.program import Gap
from simulator.schedule import NEVER as NEVER, Schedule
from simulator.timeline import CAUSES, BlockEvent, Span

Ints = NDArray[np.int64]

# Columns of ``rows``, int64 (rows, 6): one row per decision. EXTRA: prefetch or -1 (Swap); keep, 0 or 1 (Recompute).
# WHEN: copy or -1; at or -1. For a Rerun, AFTER is the kernel and BEFORE its pass; the other columns are unused.
KIND, TENSOR, AFTER, BEFORE, EXTRA, WHEN = range(6)
COLUMNS = 6
(SWAP, SYNC_SWAP), (RECOMPUTE,), (RERUN,) = Swap.codes, Recompute.codes, Rerun.codes  # swaps are even

# A program on a machine: kernels[DURATION, k] and so on, int64 (8, kernels + 1) and (6, tensors).
# BORN, DIES: bytes of the non-persistent tensors first (last) used by the kernel. LIVE: bytes of all live tensors and
# the workspace. LEVEL: bytes before the kernel. BEGINS: ns of all kernels before it. LOSS: Machine.copy_loss.
# FIRST, LAST: first and last kernel that use the tensor. D2H, H2D: ns of a transfer.
DURATION, WORKSPACE, BORN, DIES, LIVE, LEVEL, BEGINS, LOSS, KERNEL_ROWS = range(9)
SIZE, PERSISTENT, FIRST, LAST, D2H, H2D, TENSOR_ROWS = range(7)

# Columns of ``steps``, a row per recomputed kernel, in order. STEP_FOR: the kernel for which it is recomputed.
STEP_KERNEL, ALLOCATED, FREED, STEP_FOR, STEP_COLUMNS = range(5)

# Work arrays (``work_shapes``): rows of ``by_kernel``, ``by_segment``, ``by_tensor`` and ``by_row``. Lowering fills
# PLANNED and, by row, RETURNS (the kernel that ends the gap), BY_REMAT (whether a recomputation ends it) and
# AWAY_AT_START. The others are described at the functions that use them.
PLANNED, ENFORCED, GATE, OPENS, SEGMENT, ENDS, MARKED, PENDING = range(8)
ORDER, WAITS, ISSUES, KERNEL_TOPS, KERNEL_ADDED, BY_KERNEL = range(8, 14)
FIRST_OF, HIGHEST, EXPECTED, SEGMENT_TOPS, SEGMENT_ADDED, BY_SEGMENT = range(6)
COPIED, AWAY, HOLDS, STAYS, USED_LAST, USED, BY_TENSOR = range(7)
RETURNS, BY_REMAT, AWAY_AT_START, NEXT_OPEN, NEXT_END, READY, DUE, CHILD, SIBLING, QUEUE, BY_ROW = range(11)

CHECKS = 7  # number of kernels (at 1/2, 1/4, ... of an iteration) at which the state is compared with the last one

# Bit fields of gate[k], the work at kernel k besides its duration. 0: none.
#     bits 0-19    number of evicted tensors that it uses
#     bits 20-39   number of evicted tensors that its pass reads
#     bit 40       a gap opens or ends here, or a prefetch becomes ready, or the iteration ends
#     bits 41-     number of synchronous swap-outs that it waits for, if it is the next kernel
GATE_REMAT = 2**20
GATE_EVENT = 2**40
GATE_SYNC = 2**41
GATE_MISSING = GATE_EVENT - 1

# The gap of a row in the event loop. Positions count kernels from the start of the simulation.
GAP = np.dtype(
    [
        (name, np.int64)
        for name in (
            "tensor",
            "kind",
            "nbytes",
            "out_ns",
            "in_ns",
            "returns",  # the kernel that ends the gap
            "lead",  # kernels from the issue of the copy to the opening of the gap
            "pinned",  # 1 if it has a prefetch kernel
            "weight",  # increment of the gate of kernel ``returns`` while evicted
            "since_write",  # kernels from the last write of the tensor to the opening of the gap
            "hold",  # kernels from the opening until the tensor may be swapped in
            "issued",  # the position from which its copy is enqueued
            "pending",  # state of the copy: 0: none or complete; COPYING; LEAVING: the gap is open
        )
    ],
    align=True,
)
# While the tensor of a row is evicted, by_row[READY]: the position from which it may be swapped in; by_row[DUE]: the
# segment that begins with its use times DUE_SEGMENT, plus the tensor; swap-ins are in this order.
DUE_SEGMENT = 2**32
COPYING = 1
LEAVING = 2

# Status of a simulation. SLOWER: the iteration takes at least the cutoff. Without a result: MORE_STEPS: ``steps`` is
# too short; UNKNOWN: a row has a kind that is not compiled in; STUCK: internal error.
DONE, OUT_OF_MEMORY, HOST_FULL, SLOWER, MORE_STEPS, UNKNOWN, STUCK = range(7)

# Columns of the results, a row per plan.
STATUS, ITERATION_NS, REQUIRED, PEAK, PERIOD, RESULTS = range(6)

# Entries of ``settings``. D2H_SHARE, H2D_SHARE: speed beside an opposite copy. CONTENDS: whether any LOSS is positive.
(
    LIMIT,
    COPY_ENGINES,
    D2H_SHARE,
    H2D_SHARE,
    HOST_BYTES,
    PERSISTENT_BYTES,
    MAX_ITERATIONS,
    ISSUE_NS,
    QUEUE_DEPTH,
    WAIT_NS,
    EVENT_NS,
    CONTENDS,
    SETTINGS,
) = range(13)

# Last columns of a state (rule 10): the host's lead, in steps and in ns; 1 at a start with host copies that no
# iteration has made; duration of the iteration.
LEAD, LEAD_NS, AT_START, LASTED, STATE_COLUMNS = range(5)

# Columns of the log: start, end, one of these, and kernel, row or (for a stall) FOR_: index into timeline.CAUSES.
# The first four are spans. LOG_END: a step ends. LOG_LEFT: the memory of an open gap is freed.
LOG_KERNEL, LOG_RECOMPUTE, LOG_OUT, LOG_IN, LOG_STALL, LOG_BOUNDARY, LOG_END, LOG_LEFT = range(8)
FOR_MEMORY, FOR_DATA, FOR_ISSUE = range(len(CAUSES))


class Tables(NamedTuple):
    """Encoded program, machine and limit."""

    kernels: Ints
    tensors: Ints
    graph: Ints
    settings: Ints


class Arrays(NamedTuple):
    """Work arrays of a call."""

    by_kernel: Ints
    by_segment: Ints
    by_tensor: Ints
    by_row: Ints
    gaps: NDArray[Any]
    steps: Ints
    states: Ints


class Lowering(NamedTuple):
    """Result of lowering a plan, besides ``by_kernel`` and ``by_row``."""

    recomputes: bool  # whether kernels are recomputed
    n_steps: int  # number of recomputed kernels in ``steps``
    lasts: int  # total duration of the recomputed kernels in ns
    required: int  # largest planned residency


def work_shapes(kernels: int, tensors: int, rows: int, iterations: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of by_kernel, by_segment, by_tensor, by_row and states for plans of ``rows`` rows.

    A state has one column per row and STATE_COLUMNS more. There is one state per boundary, and two per check.
    """
    return (
        (BY_KERNEL, kernels + 1),
        (BY_SEGMENT, 2 * kernels + 2),
        (BY_TENSOR, tensors),
        (BY_ROW, 2 * rows + 1),
        (iterations + 1 + 2 * (CHECKS + 1), rows + STATE_COLUMNS),
    )


def rows_of(decisions: Iterable[Decision]) -> Ints:
    """Converts decisions to int64 (n, 6): kind, tensor, after, before, extra, when."""
    return np.fromiter(chain.from_iterable(d.row() for d in decisions), np.int64).reshape(-1, COLUMNS)


def columns_of(gaps: Iterable[Gap]) -> Ints:
    """Converts gaps to int64 (n, 3): tensor, after, before."""
    return np.fromiter(chain.from_iterable(gaps), np.int64).reshape(-1, 3)


def row_of(gap: Gap, choice: int) -> Row:
    """Returns the row without optional kernels that evicts the tensor of ``gap`` by ``choice``, not RESIDENT."""
    if choice == Choice.SWAPPED:
        return SWAP, *gap, -1, -1
    return RECOMPUTE, *gap, int(choice == Choice.CHAIN_KEPT), -1


def choice_of(row: Sequence[int]) -> Choice:
    """Returns the choice that a row makes in its gap, the inverse of ``row_of``; raises ValueError for other kinds."""
    if row[KIND] == SWAP:
        return Choice.SWAPPED
    if row[KIND] == RECOMPUTE:
        return Choice.CHAIN_KEPT if row[EXTRA] == 1 else Choice.RECOMPUTED
    raise ValueError(f"a row of kind {row[KIND]} makes no choice for a single gap")


def rows_for(gaps: Iterable[Gap], choice: int) -> Ints:
    """Returns ``row_of`` each gap, int64 (m, 6)."""
    columns = columns_of(gaps)
    rows = np.empty((len(columns), 6), np.int64)
    rows[:, 1:4] = columns
    rows[:, [0, 4, 5]] = [row_of(Gap(0, 0, 0), choice)[i] for i in (0, 4, 5)]
    return rows


_OF_CODE = {code: kind for kind in KINDS for code in kind.codes}


def decisions_of(rows: Ints) -> tuple[Decision, ...]:
    """Converts rows to decisions, the inverse of ``rows_of``; raises ValueError for an unknown kind."""
    try:
        return tuple(_OF_CODE[row[KIND]].from_row(row) for row in rows.tolist())
    except KeyError as error:
        raise ValueError(f"rows: no decision is of kind {error}") from None


def ragged(*tables: Sequence[Iterable[int]]) -> Ints:
    """Returns tables of lists of integers as one array: first the offsets of each table, then the lists.

    Offsets are relative to the start of the array: list i of a table is array[offsets[i] : offsets[i + 1]]. A single
    array is used because each argument of compiled code costs some 50 ns per call.
    """
    offsets: list[int] = []
    values: list[int] = []
    begin = sum(len(table) + 1 for table in tables)
    for table in tables:
        for row in table:
            offsets.append(begin + len(values))
            values += row
        offsets.append(begin + len(values))
    return np.array(offsets + values, np.int64)


def read_log(
    log: Ints, decisions: Sequence[Decision], schedule: Schedule
) -> tuple[list[int], list[Span], list[BlockEvent], list[int], list[tuple[int, int, str]]]:
    """Converts a log, int64 (entries, 4), to the arguments of ``Timeline.assemble``.

    Args:
        decisions: Decisions of the rows.
    """
    boundaries: list[int] = []
    spans: list[Span] = []
    events: list[BlockEvent] = []
    stalls: list[tuple[int, int, str]] = []

    def change(time: int, block: int, sign: int) -> None:
        owner, nbytes, *_ = schedule.blocks[block]
        if nbytes:
            events.append(BlockEvent(time, owner, block, sign * nbytes))

    for b, block in enumerate(schedule.blocks):
        if block.first < 0 and block.owner not in schedule.away_at_start:
            change(0, b, 1)
    step = 0
    events_until = [len(events)]
    for start, end, kind, index in log.tolist():
        if kind in (LOG_OUT, LOG_IN, LOG_LEFT):
            swap = decisions[index]
            assert isinstance(swap, Swap), swap
            if kind == LOG_OUT:
                spans.append(Span(start, end, "d2h", "swap_out", swap.tensor))
                continue
            change(start, schedule.moved[swap], 1 if kind == LOG_IN else -1)
            if kind == LOG_IN:
                spans.append(Span(start, end, "h2d", "swap_in", swap.tensor))
        elif kind in (LOG_KERNEL, LOG_RECOMPUTE):
            started = schedule.steps[step]
            spans.append(Span(start, end, "compute", started.kind, started.subject))
            for b in started.allocates:
                change(start, b, 1)
        elif kind == LOG_END:
            for b in schedule.steps[step].frees:
                change(start, b, -1)
            step = (step + 1) % len(schedule.steps)
        elif kind == LOG_STALL:
            stalls.append((start, end, CAUSES[index]))
        elif kind == LOG_BOUNDARY:
            boundaries.append(end)
            events_until.append(len(events))
    return boundaries, spans, events, events_until, stalls
