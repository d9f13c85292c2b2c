"""The arrays that the compiled code works on: plans as rows, and the columns of every table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.plan import Decision, Recompute, Swap
from simulator.timeline import Span

Ints = NDArray[np.int64]
NEVER = 2**62  # a time or position that does not come

# Columns of ``rows``, int64 (rows, 5): one row a decision.
KIND, TENSOR, AFTER, BEFORE, EXTRA = range(5)  # EXTRA: prefetch or -1; keep 0 or 1
SWAP, RECOMPUTE, SYNC_SWAP = 0, 1, 2

# What is known of a program on a machine: kernels[DURATION, k] and so on, int64 (5, kernels) and (6, tensors).
# BORN, DIES: bytes of the non-persistent tensors that are first used by the kernel, and last. LIVE: of all that live,
# with its workspace. FIRST, LAST: kernels that use the tensor. D2H, H2D: ns of a transfer.
DURATION, WORKSPACE, BORN, DIES, LIVE = range(5)
SIZE, PERSISTENT, FIRST, LAST, D2H, H2D = range(6)

# Columns and rows of what ``resolve`` returns: ``endings``, ``at_kernel``, ``steps``.
RETURNS, BY_REMAT, AWAY_AT_START = range(3)
STEP_AT, AWAY_BYTES = range(2)
STEP_KERNEL, ALLOCATED, FREED = range(3)

# The parts of gate[k]: what there is to do at kernel k beside letting its duration pass. 0: it is plain.
#     bits 0-19    how many of the tensors that it uses are away
#     bits 20-39   how many of these its rematerialisation reads
#     bit 40       a gap opens or ends here, or a prefetch becomes ready, or the iteration ends
#     bits 41-     how many synchronous swap-outs it waits for, where it is the next kernel
GATE_REMAT, GATE_EVENT, GATE_SYNC = 2**20, 2**40, 2**41
GATE_MISSING = GATE_EVENT - 1

# What the event loop knows of the gap of a row. Positions count kernels from the start of the simulation.
GAP = np.dtype([(name, np.int64) for name in (
    "nbytes", "out_ns", "in_ns",
    "returns",  # the kernel that ends the gap
    "weight",  # what it adds to the gate of that kernel while it is away
    "since_write",  # kernels from the last write of the tensor to the opening of the gap
    "hold",  # kernels from the opening until it may come back
    # While the tensor is away:
    "ready",  # the position from which it may come back
    "order",  # the segment that begins with its use, in units of ORDER_SEGMENT, and the tensor: the least is first
)])  # fmt: skip
ORDER_SEGMENT = 2**32

# How a run ends.
DONE, OUT_OF_MEMORY, HOST_FULL = range(3)

# Columns of the log of a run: start, end, one of these, index or bytes. The first four are spans.
LOG_KERNEL, LOG_RECOMPUTE, LOG_OUT, LOG_IN, LOG_STALL, LOG_BOUNDARY, LOG_MEMORY = range(7)
_SPANS = (("compute", "kernel"), ("compute", "recompute"), ("d2h", "swap_out"), ("h2d", "swap_in"))


def rows_of(decisions: Iterable[Decision]) -> Ints:
    """Decisions as int64 (n, 5): kind, tensor, after, before, extra."""
    table = [
        (SYNC_SWAP if d.sync else SWAP, d.tensor, d.after, d.before, -1 if d.prefetch is None else d.prefetch)
        if isinstance(d, Swap)
        else (RECOMPUTE, d.tensor, d.after, d.before, int(d.keep))
        for d in decisions
    ]
    return np.array(table, np.int64).reshape(-1, 5)


def decisions_of(rows: Ints) -> tuple[Decision, ...]:
    """The inverse of ``rows_of``."""
    return tuple(
        Recompute(t, a, b, bool(extra))
        if kind == RECOMPUTE
        else Swap(t, a, b, None if extra < 0 else extra, kind == SYNC_SWAP)
        for kind, t, a, b, extra in rows.tolist()
    )


def ragged(*tables: Sequence[Iterable[int]]) -> Ints:
    """Tables of lists of integers in one array: first the offsets of each table, then the lists.

    The offsets count from the start of the array: list i of a table is array[offsets[i] : offsets[i + 1]].
    One array, because each one costs a call of compiled code some 50 ns.
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


def read_log(log: Ints) -> tuple[list[int], list[Span], list[tuple[int, int]], list[tuple[int, int, bool]]]:
    """A log, int64 (entries, 4), as ``Timeline.assemble`` takes it: boundaries, spans, memory, stalls."""
    boundaries: list[int] = []
    spans: list[Span] = []
    memory: list[tuple[int, int]] = []
    stalls: list[tuple[int, int, bool]] = []
    for start, end, what, index in log.tolist():
        if what == LOG_MEMORY:
            memory.append((start, index))
        elif what == LOG_STALL:
            stalls.append((start, end, bool(index)))
        elif what == LOG_BOUNDARY:
            boundaries.append(end)
        else:
            stream, kind = _SPANS[what]
            spans.append(Span(start, end, stream, kind, index))  # type: ignore[arg-type]
    return boundaries, spans, memory, stalls
