"""The arrays that the compiled code works on: plans as rows, and the columns of every table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.plan import Decision, Recompute, Swap

Ints = NDArray[np.int64]
NEVER = 2**62  # a time or position that does not come

# Columns of a row, one row a decision.
KIND, TENSOR, AFTER, BEFORE, EXTRA = range(5)  # EXTRA: prefetch or -1; keep 0 or 1
SWAP, RECOMPUTE = 0, 1

# Rows of Engine._kernels and Engine._tensors.
DURATION, WORKSPACE, BORN, DIES, LOAD = range(5)
SIZE, PERSISTENT, FIRST, LAST, D2H, H2D = range(6)

# Columns of what ``resolve`` returns.
RETURNS, BY_CHAIN, AWAY_AT_START = range(3)
STEP_AT, RESIDENT = range(2)
STEP_KERNEL, ALLOCATED, FREED = range(3)


def rows_of(decisions: Iterable[Decision]) -> Ints:
    """Decisions as int64 (n, 5): kind, tensor, after, before, extra."""
    table = [
        (SWAP, d.tensor, d.after, d.before, -1 if d.prefetch is None else d.prefetch)
        if isinstance(d, Swap)
        else (RECOMPUTE, d.tensor, d.after, d.before, int(d.keep))
        for d in decisions
    ]
    return np.array(table, np.int64).reshape(-1, 5)


def decisions_of(rows: Ints) -> tuple[Decision, ...]:
    """The inverse of ``rows_of``."""
    return tuple(
        Swap(t, a, b, None if extra < 0 else extra) if kind == SWAP else Recompute(t, a, b, bool(extra))
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
