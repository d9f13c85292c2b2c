"""Modes of a plan, and the choices that a planner has for a tensor within one gap.

Shared by the environments, the planners and the floor; the simulator itself does not use them.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from simulator.decisions import KINDS, Name, can_recompute
from simulator.program import Gap, Program
from simulator.residency import residency

# Decision kinds that a plan of each mode may have. Mode joint allows all kinds.
KINDS_OF: dict[str, tuple[Name, ...]] = {
    "swap": ("swap",),
    "recompute": ("recompute", "rerun"),
    "joint": tuple(kind.kind for kind in KINDS),
}
MODES = tuple(KINDS_OF)


class Choice(IntEnum):
    """How a plan treats a tensor within one gap; an index of arrays.

    The DQN paper calls the first three do nothing, offload and remove. Choices are not the codes of rows
    (compiled/encoding.py), which also tell synchronous swaps and reruns apart.
    """

    RESIDENT = 0  # the gap is filled: the tensor stays in memory
    SWAPPED = 1
    RECOMPUTED = 2
    CHAIN_KEPT = 3  # recomputed with ``keep``: tensors recomputed on the way stay for their own later uses


def check_mode(mode: str) -> str:
    """Returns the mode; raises ValueError unless it is one of MODES."""
    if mode not in MODES:
        raise ValueError(f"mode: expected {', '.join(map(repr, MODES[:-1]))} or {MODES[-1]!r}, got {mode!r}")
    return mode


def evictions(program: Program, gap: Gap, mode: str) -> list[Choice]:
    """Returns the choices other than RESIDENT that ``mode`` and the program allow in ``gap``."""
    choices = [Choice.SWAPPED] if mode != "recompute" else []
    if mode != "swap" and gap.after < gap.before and can_recompute(program, gap.tensor, gap.before):
        choices += [Choice.RECOMPUTED, Choice.CHAIN_KEPT]
    return choices


def spans(after: int, before: int, n: int) -> tuple[slice, ...]:
    """Returns the kernels (of ``n``) between ``after`` and ``before`` as one slice, or two over the boundary."""
    return (slice(after + 1, before),) if after < before else (slice(after + 1, n), slice(0, before))


def least_residency(program: Program, min_bytes: int, mode: str = "joint") -> int:
    """Returns a lower bound on the required bytes of any plan of ``mode``.

    It is the peak of the planned residency with every gap emptied that ``mode`` allows.

    Args:
        program: Program to be planned.
        min_bytes: Smallest tensor in bytes whose gaps are emptied.
        mode: Allowed eviction kinds, one of ``MODES``.

    Returns:
        The bound in bytes, persistent tensors and workspaces included.
    """
    gaps = [gap for gap in program.gaps(min_bytes) if mode != "recompute" or evictions(program, gap, mode)]
    nbytes = np.array([program.tensors[gap.tensor].nbytes for gap in gaps], np.int64)
    bounds = np.array([gap[1:] for gap in gaps], np.int64).reshape(-1, 2)
    return int(residency(np.array(program.live_bytes, np.int64), bounds, nbytes).max())
