"""What may be done with the gaps of a program: the modes of a plan, and the ways to empty one gap.

Not used by the simulator itself; in one place for the environments, the planners and the bound on them.
"""

from __future__ import annotations

import numpy as np

from simulator.decisions import KINDS, Name, can_recompute
from simulator.program import Gap, Program
from simulator.residency import residency

# The kinds of decisions that a plan of a mode may have. What moves nothing is recomputation, joint is all.
KINDS_OF: dict[str, tuple[Name, ...]] = {
    "swap": ("swap",), "recompute": ("recompute", "rerun"), "joint": tuple(kind.kind for kind in KINDS),
}  # fmt: skip
MODES = tuple(KINDS_OF)

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
    gaps = [gap for gap in program.gaps(min_bytes) if mode != "recompute" or ways_to_empty(program, gap, mode)]
    nbytes = np.array([program.tensors[gap.tensor].nbytes for gap in gaps], np.int64)
    where = np.array([gap[1:] for gap in gaps], np.int64).reshape(-1, 2)
    return int(residency(np.array(program.live_bytes, np.int64), where, nbytes).max())
