"""Arrays of the compiled code: plans as rows, and the columns of every table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
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


class Kernels(NamedTuple):
    """Kernels of a program on a machine: rows of an int64 table (KERNEL_ROWS, kernels + 1)."""

    duration: Ints  # ns; 0 in the last column, which is padding
    workspace: Ints  # bytes
    born: Ints  # bytes of the non-persistent tensors first used by the kernel
    dies: Ints  # bytes of the non-persistent tensors last used by the kernel
    live: Ints  # bytes of all live tensors and the workspace
    level: Ints  # bytes before the kernel
    begins: Ints  # ns of all kernels before it
    loss: Ints  # Machine.copy_loss


class Tensors(NamedTuple):
    """Tensors of a program on a machine: rows of an int64 table (TENSOR_ROWS, tensors)."""

    size: Ints  # bytes
    persistent: Ints  # 0 or 1
    first: Ints  # first kernel that uses it
    last: Ints  # last kernel that uses it
    d2h_ns: Ints  # duration of a copy to the host
    h2d_ns: Ints  # duration of a copy from the host


class Graph(NamedTuple):
    """``graph`` of ``score_plans``: for instance, kernel k writes values[results_at[k] : results_at[k + 1]]."""

    values: Ints
    reads_at: Ints  # inputs of the kernels
    results_at: Ints  # outputs of the kernels
    writes_at: Ints  # writers of the tensors
    until: int  # offset from an input to its ``Program.available_until``


class Settings(NamedTuple):
    """Limit and machine: an int64 array (SETTINGS,)."""

    limit: int  # bytes
    copy_engines: int  # 1 or 2
    d2h_share: int  # speed beside an opposite copy
    h2d_share: int
    host_bytes: int  # host memory for copies
    persistent_bytes: int  # of all persistent tensors
    max_iterations: int  # after which a simulation ends
    issue_ns: int  # as in ``Machine``, as are the next three
    queue_depth: int
    wait_ns: int
    event_ns: int
    contends: int  # whether any kernel has a loss


# Sizes of these tables for those who store them.
KERNEL_ROWS = len(Kernels._fields)
TENSOR_ROWS = len(Tensors._fields)
SETTINGS = len(Settings._fields)
HOST_BYTES = Settings._fields.index("host_bytes")


class ByKernel(NamedTuple):
    """Work arrays by kernel: rows of an int64 table. Those without comment are described where they are filled."""

    planned: Ints  # planned residency in bytes, filled by lowering
    enforced: Ints  # the same, far below 0 where the limit is not enforced
    gate: Ints  # GATE
    missing_in_pass: Ints  # number of evicted tensors that the kernel's pass reads
    opens: Ints
    segment: Ints
    waits: Ints
    issues: Ints
    tops: Ints
    added: Ints
    ends: Ints
    marked: Ints
    pending: Ints
    order: Ints


class BySegment(NamedTuple):
    """Work arrays by segment (segments.py): rows of an int64 table."""

    first: Ints
    highest: Ints
    expected: Ints
    tops: Ints
    added: Ints


class ByTensor(NamedTuple):
    """Work arrays by tensor: rows of an int64 table."""

    copied: Ints
    evicted_by: Ints  # row that evicts the tensor: r + 1 on the host, -r - 1 dropped, 0 none
    # Of the chain of one kernel, each valid if it is the mark of that kernel:
    resident: Ints  # the chain has recomputed the tensor, and not freed it
    kept: Ints  # the tensor stays after the chain
    used: Ints  # ``used_last`` is valid
    used_last: Ints  # last kernel of the chain that uses the tensor


class ByRow(NamedTuple):
    """Work arrays by row of the plan: rows of an int64 table. Lowering fills the first three."""

    returns: Ints  # the kernel that ends the gap
    by_pass: Ints  # whether a recomputation ends it
    away_at_start: Ints
    next_open: Ints  # linked lists by kernel
    next_end: Ints
    ready: Ints  # while evicted: the position from which the tensor may be swapped in
    due: Ints  # while evicted: the segment that begins with its use times DUE_SEGMENT, plus the tensor
    child: Ints  # heaps, see heap.py
    sibling: Ints
    queue: Ints  # rows whose copies to the host are issued


WORK_ROWS = tuple(len(table._fields) for table in (ByKernel, BySegment, ByTensor, ByRow))
CHECKS = 7  # number of kernels (at 1/2, 1/4, ... of an iteration) at which the state is compared with the last one
DUE_SEGMENT = 2**32  # swap-ins are in the order of ``due``


def integers(*names: str) -> np.dtype[Any]:
    """Returns a record type of int64 fields. Arrays of records cross the border to compiled code as flat int64."""
    return np.dtype([(name, np.int64) for name in names], align=True)


# A recomputed kernel, in the order of execution.
STEP = integers(
    "kernel",
    "allocated",  # bytes
    "freed",
    "before",  # the kernel for which it is recomputed
)

# The work at a kernel besides its duration. The counters share one word, so that one comparison finds a plain kernel.
GATE = np.dtype(
    {
        "names": ["word", "missing", "has_event", "sync"],
        "formats": ["i8", "u4", "u2", "u2"],
        "offsets": [0, 0, 4, 6],
    }
)
# word: 0 if the kernel is plain
# missing: number of evicted tensors that it uses
# has_event: a gap opens or ends here, or a prefetch becomes ready, or the iteration ends
# sync: number of synchronous swap-outs that it waits for, if it is the next kernel

# The gap of a row in the event loop. Positions count kernels from the start of the simulation.
GAP = integers(
    "tensor",
    "kind",
    "nbytes",
    "out_ns",
    "in_ns",
    "returns",  # the kernel that ends the gap
    "lead",  # kernels from the issue of the copy to the opening of the gap
    "pinned",  # 1 if it has a prefetch kernel
    "by_pass",  # 1 if the kernel's pass reads the tensor, too
    "since_write",  # kernels from the last write of the tensor to the opening of the gap
    "hold",  # kernels from the opening until the tensor may be swapped in
    "issued",  # the position from which its copy is enqueued
    "copy",  # Copy
)


class Copy(IntEnum):
    """State of a gap's copy to the host."""

    DONE = 0  # or there is none
    PENDING = 1
    LEAVING = 2  # pending, and the gap is open


class Link(IntEnum):
    """Copy engines."""

    OUT = 0
    IN = 1


# An engine: one of the links, or compute.
ENGINE = integers(
    "end_ns",  # completion time; NEVER: idle
    "row",  # of the plan
    "work",  # remaining work at the last update, in ns times ALONE
    "updated_ns",
    "speed",  # of compute: now; of a link: beside another copy
    "entry",  # of the log
)

# State of the event loop.
CLOCK = integers(
    "now",
    "begin",  # of the iteration
    "iteration",
    "iteration_ns",  # of the last complete one
    "period",
    "status",
    "position",  # of ``kernel``, from the start of the simulation
    "kernel",  # the running one, or else the next
    "step",  # its next recomputed step
    "in_pass",  # whether the running or next step is recomputed
    "passes_left_ns",  # recomputed kernels in the rest of the iteration
    "used",  # bytes
    "peak",
    "limit",  # in force
    "held",  # root of a heap of rows on the host: the next that becomes ready
    "waiting",  # root of a heap of rows that are ready: the next that is used
    "blocked",  # the first of ``waiting`` cannot be swapped in before the kernel at this position has ended
    "next_bytes",  # of the next swap-in, if its engine is free, else NEVER
    "head",  # of the queue of copies to the host
    "tail",
    "in_failed",  # with one engine: the swap-in that was issued first does not fit
    "is_slowed",  # copies slow each other down, so that their work must be tracked
    "restarted",  # a copy has started beside another, so that both change their speed
    "unissued",  # the next step waits for the host
    "check",  # number of checks in the rest of the iteration
    "next_check",  # the kernel of the next one, or the number of kernels
    "entries",  # of the log
)


# The thread that issues steps (host.py).
HOST = integers(
    "kernel",  # next to issue
    "step",  # of the kernels that are recomputed, the next to issue, if it is for ``kernel``
    "issued",  # number of steps that are issued and have not started
    "queued",  # number of timed steps that are issued and unfinished
    "next_ns",  # time of the next issue, assuming that the queue has room
    "has_waited",  # whether a step has waited for the host in this iteration
    "lead",  # of the host at the last boundary, in steps and in ns
    "lead_ns",
)

# Head of a state (rule 10), before the rows.
STATE = integers(
    "lasted_ns",  # duration of the iteration so far; not compared
    "lead",  # of the host, in steps
    "lead_ns",
    "at_start",  # positive at a start with host copies that no iteration has made
)
STATE_COLUMNS = len(STATE.names or ())


class Status(IntEnum):
    """Status of a simulation."""

    DONE = 0
    OUT_OF_MEMORY = 1
    HOST_FULL = 2
    SLOWER = 3  # the iteration takes at least the cutoff
    # Without a result:
    MORE_STEPS = 4  # ``steps`` is too short
    UNKNOWN = 5  # a row has a kind that is not compiled in
    STUCK = 6  # internal error


RESULT = integers("status", "iteration_ns", "required", "peak", "period")
RESULTS = len(RESULT.names or ())


class Event(IntEnum):
    """Entries of the log. The first four are spans."""

    KERNEL = 0
    RECOMPUTE = 1
    OUT = 2
    IN = 3
    STALL = 4
    BOUNDARY = 5
    END = 6  # a step ends
    LEFT = 7  # the memory of an open gap is freed


class Cause(IntEnum):
    """Causes of a stall: index into timeline.CAUSES."""

    MEMORY = 0
    DATA = 1
    ISSUE = 2


LOG = integers("start", "end", "event", "index")  # index: kernel, row or (for a stall) Cause


class Tables(NamedTuple):
    """Encoded program, machine and limit, which compiled code reads by ``named``."""

    kernels: Ints  # Kernels
    tensors: Ints  # Tensors
    graph: Ints  # Graph
    settings: Ints  # Settings


class Arrays(NamedTuple):
    """Work arrays of a call."""

    by_kernel: Ints  # ByKernel
    by_segment: Ints  # BySegment
    by_tensor: Ints  # ByTensor
    by_row: Ints  # ByRow
    gaps: NDArray[Any]  # GAP, or int64 that hold these
    steps: NDArray[Any]  # STEP, or int64 that hold these
    states: Ints  # (states, rows + STATE_COLUMNS)


class Lowering(NamedTuple):
    """Result of lowering a plan, besides ``by_kernel`` and ``by_row``."""

    recomputes: bool  # whether kernels are recomputed
    n_steps: int  # number of recomputed kernels in ``steps``
    rerun_ns: int  # total duration of the recomputed kernels
    required: int  # largest planned residency


def work_shapes(kernels: int, tensors: int, rows: int, iterations: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of by_kernel, by_segment, by_tensor, by_row and states for plans of ``rows`` rows.

    A state has STATE_COLUMNS columns (STATE) and one more per row. There is one state per boundary, and two per check.
    """
    by_kernel, by_segment, by_tensor, by_row = WORK_ROWS
    return (
        (by_kernel, kernels + 1),
        (by_segment, 2 * kernels + 2),
        (by_tensor, tensors),
        (by_row, 2 * rows + 1),
        (iterations + 1 + 2 * (CHECKS + 1), STATE_COLUMNS + rows),
    )


def split_graph(graph: Ints, kernels: int) -> Graph:
    """Returns the tables of a ``graph``."""
    return Graph(graph, graph, graph[kernels + 1 :], graph[2 * kernels + 2 :], graph.size - graph[kernels])


def rows_of(decisions: Iterable[Decision]) -> Ints:
    """Converts decisions to int64 (n, 6): kind, tensor, after, before, extra, when."""
    return np.fromiter(chain.from_iterable(d.row() for d in decisions), np.int64).reshape(-1, COLUMNS)


def columns_of(gaps: Iterable[Gap]) -> Ints:
    """Converts gaps to int64 (n, 3): tensor, after, before."""
    return np.fromiter(chain.from_iterable(gaps), np.int64).reshape(-1, 3)


def row_of(gap: Gap, choice: int) -> Row:
    """Returns the row that evicts the tensor of ``gap`` by ``choice`` (not RESIDENT), with no optional kernel set."""
    if choice == Choice.SWAPPED:
        return SWAP, *gap, -1, -1
    return RECOMPUTE, *gap, int(choice == Choice.CHAIN_KEPT), -1


def choice_of(row: Sequence[int]) -> Choice:
    """Returns the choice that a row makes in its gap, the inverse of ``row_of``; raises ValueError for other kinds."""
    if row[KIND] == SWAP:
        return Choice.SWAPPED
    if row[KIND] == RECOMPUTE:
        return Choice.CHAIN_KEPT if row[EXTRA] == 1 else Choice.RECOMPUTED
    raise ValueError(f"row: expected kind {SWAP} or {RECOMPUTE}, which fill a single gap, got {row[KIND]}")


def rows_for(gaps: Iterable[Gap], choice: int) -> Ints:
    """Returns ``row_of`` each gap, int64 (m, 6).

    Args:
        choice: A ``Choice``, the same for all gaps.
    """
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
        raise ValueError(f"rows: expected kinds of {', '.join(map(str, _OF_CODE))}, got {error}") from None


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
    log: NDArray[Any], decisions: Sequence[Decision], schedule: Schedule
) -> tuple[list[int], list[Span], list[BlockEvent], list[int], list[tuple[int, int, str]]]:
    """Converts a log, LOG (entries,), to the arguments of ``Timeline.assemble``.

    Args:
        decisions: Decisions of the rows.
        log: LOG records of one simulation.
        schedule: Schedule of the plan.

    Returns:
        Kernel boundaries, spans, block events, their number at each boundary, and stalls.
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
        if kind in (Event.OUT, Event.IN, Event.LEFT):
            swap = decisions[index]
            assert isinstance(swap, Swap), swap
            if kind == Event.OUT:
                spans.append(Span(start, end, "d2h", "swap_out", swap.tensor))
                continue
            change(start, schedule.moved[swap], 1 if kind == Event.IN else -1)
            if kind == Event.IN:
                spans.append(Span(start, end, "h2d", "swap_in", swap.tensor))
        elif kind in (Event.KERNEL, Event.RECOMPUTE):
            started = schedule.steps[step]
            spans.append(Span(start, end, "compute", started.kind, started.subject))
            for b in started.allocates:
                change(start, b, 1)
        elif kind == Event.END:
            for b in schedule.steps[step].frees:
                change(start, b, -1)
            step = (step + 1) % len(schedule.steps)
        elif kind == Event.STALL:
            stalls.append((start, end, CAUSES[index]))
        elif kind == Event.BOUNDARY:
            boundaries.append(end)
            events_until.append(len(events))
    return boundaries, spans, events, events_until, stalls
