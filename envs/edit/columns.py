"""Changes of a gap, and the columns that edits change in the observation of ``GpuMemoryEdit-v1``.

All columns are float32 in [-BOUND, BOUND]. Sizes are relative to the largest load above the limit without a plan, times
to the ideal iteration. "log s": sign(x) ln(1 + s |x|) of such a value x.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.modes import Choice

BOUND = 10.0
NEVER_TRIED = 3.0  # age of what was never tried or changed
MAX_CHANGES = 10  # changes of one edit, including its repair


class Change(IntEnum):
    """Change of one gap, encoded as ``gap * N_CHANGES + change``. All but SHIFT set its ``Choice``."""

    FILL = Choice.RESIDENT
    SWAP = Choice.SWAPPED
    RECOMPUTE = Choice.RECOMPUTED
    RECOMPUTE_AND_KEEP = Choice.CHAIN_KEPT
    SHIFT = len(Choice)  # other optional kernels of the same choice


N_CHANGES = len(Change)


def _floats(**widths: int) -> np.dtype[np.void]:
    """Returns a structured dtype of float32 fields, of 1 or several columns each."""
    return np.dtype([(name, np.float32, () if width == 1 else width) for name, width in widths.items()], align=True)


GAP = _floats(
    choice=len(Choice),  # one-hot
    is_shifted=1,  # whether the optional kernels are not the default ones
    stall_at_use=1,  # stall for data at the use that closes the gap, log 1000
    memory_stall=1,  # stalls for memory within the gap, log 1000
    data_stall=1,  # stalls for data within the gap, log 1000
    stall_share=1,  # share of the iteration's stalls within the gap
    slack=1,  # least free memory within the gap / tensor size, at most 4
    can_fill=1,  # whether the gap is emptied and the tensor would fit
    tight_share=1,  # share of the gap's time in which the tensor would not fit
    out_delay=1,  # from the opening to the end of the swap-out, log 100; 0: none
    in_lead=1,  # from the end of the swap-in to the use, log 100; 0: none
    in_start_lead=1,  # from the start of the swap-in to the use, log 100; 0: none
    recomputation=1,  # time of the recomputation at the use, log 1000; 0: none
    change_age=1,  # steps since the gap changed, ln(1 + steps) / 4; 3: never
    # Of the last trial of each change.
    effect=N_CHANGES,  # walkers.effect_of
    trial_age=N_CHANGES,  # steps since then, ln(1 + steps) / 4; 3: never tried
    accepted_since=N_CHANGES,  # accepted edits since then, ln(1 + edits) / 3; 3: never tried
)
BIN = _floats(
    least_slack=1,  # free memory, at most 4
    mean_slack=1,  # at most 4
    data_stall=1,  # log 1000, / 3
    memory_stall=1,  # log 1000, / 3
    out_load=1,  # share of the bin's time in which the link is busy, at most 3
    in_load=1,
    recomputation=1,  # log 1000, / 3
)
PLAN = _floats(
    overhead=1,  # log 100, / 2
    distance_to_best=1,  # overhead minus that of the episode's best plan, log 300
    progress=1,  # fraction of the budget used
    temperature=1,  # log10(temperature / 3e-4)
    since_best=1,  # trials since the best plan, ln(1 + trials) / 4
    accepted=1,  # accepted edits, ln(1 + edits) / 4
)


def n_columns(columns: np.dtype[np.void]) -> int:
    """Returns the number of float32 columns."""
    return columns.itemsize // np.dtype(np.float32).itemsize


def by_name(observed: NDArray[np.float32], columns: np.dtype[np.void]) -> NDArray[Any]:
    """Returns a view of (..., n_columns(columns)) values as (...) records with the fields of ``columns``."""
    records: NDArray[Any] = observed.view(columns)[..., 0]
    return records
