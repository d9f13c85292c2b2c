"""What may be done with the gaps of a program: the modes of a plan, and the ways to empty one gap.

Not used by the simulator itself; in one place for the environments, the planners and the bound on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from simulator.compiled.encoding import EXTRA, KIND, RECOMPUTE, SWAP, Ints, columns_of
from simulator.decisions import KINDS, Name, can_recompute
from simulator.program import Gap, Program

# The kinds of decisions that a plan of a mode may have. What moves nothing is recomputation, joint is all.
KINDS_OF: dict[str, tuple[Name, ...]] = {
    "swap": ("swap",), "recompute": ("recompute", "rerun"), "joint": tuple(kind.kind for kind in KINDS),
}  # fmt: skip
MODES = tuple(KINDS_OF)

# kind, tensor, after, before, extra (swap: prefetch or -1; recompute: keep), when (swap: copy, recompute: at, or -1)
Row = tuple[int, int, int, int, int, int]

# What happens to the tensor in a gap. Arrays are indexed by these.
STAYS, SWAPPED, RECOMPUTED, KEPT = range(4)  # KEPT: recomputed, and what its chain recovers stays (``keep``)


def check_mode(mode: str) -> str:
    """The mode; raises ValueError unless it is one of MODES."""
    if mode not in MODES:
        raise ValueError(f"mode: expected {', '.join(map(repr, MODES[:-1]))} or {MODES[-1]!r}, got {mode!r}")
    return mode


def ways_to_empty(program: Program, gap: Gap, mode: str) -> list[int]:
    """SWAPPED, RECOMPUTED, KEPT, as far as ``mode`` and the program allow them in ``gap``."""
    ways = [SWAPPED] if mode != "recompute" else []
    if mode != "swap" and gap.after < gap.before and can_recompute(program, gap.tensor, gap.before):
        ways += [RECOMPUTED, KEPT]
    return ways


def spans(after: int, before: int, n: int) -> tuple[slice, ...]:
    """Kernels (of ``n``) between ``after`` and ``before``: one slice, or two over the iteration boundary."""
    return (slice(after + 1, before),) if after < before else (slice(after + 1, n), slice(0, before))


def least_residency(program: Program, min_bytes: int, mode: str = "joint") -> int:
    """The peak of the planned residency, in bytes, with every gap emptied that ``mode`` allows to empty, of tensors of
    at least ``min_bytes``. No plan is below it."""
    n = len(program.kernels)
    change = np.zeros(n + 1, dtype=np.int64)
    for gap in program.gaps(min_bytes):
        if mode != "recompute" or ways_to_empty(program, gap, mode):
            for span in spans(gap.after, gap.before, n):
                change[span.start] -= program.tensors[gap.tensor].nbytes
                change[span.stop] += program.tensors[gap.tensor].nbytes
    return int((np.array(program.live_bytes, dtype=np.int64) + np.cumsum(change)[:n]).max())


def row_of(gap: Gap, way: int) -> Row:
    """The row that empties ``gap`` in a way (SWAPPED, its prefetch left to the simulator, RECOMPUTED or KEPT)."""
    return (SWAP, *gap, -1, -1) if way == SWAPPED else (RECOMPUTE, *gap, int(way == KEPT), -1)


def way_of(row: Sequence[int]) -> int:
    """How a row empties its gap: the inverse of ``row_of``; raises ValueError where it does so in no such way."""
    if row[KIND] == SWAP:
        return SWAPPED
    if row[KIND] == RECOMPUTE:
        return KEPT if row[EXTRA] == 1 else RECOMPUTED
    raise ValueError(f"a row of kind {row[KIND]} empties its gap in no way that a planner knows")


def rows_for(gaps: Iterable[Gap], way: int) -> Ints:
    """int64[m, 6]: ``row_of`` each of the gaps."""
    where = columns_of(gaps)
    out = np.empty((len(where), 6), np.int64)
    out[:, 1:4] = where
    out[:, [0, 4, 5]] = [row_of(Gap(0, 0, 0), way)[i] for i in (0, 4, 5)]
    return out
