"""Bare cudaMalloc and cudaFree: every malloc and every free is a call of the driver.

The baseline of SmartPool ("Efficient Memory Management for GPU-based Deep Learning Systems", 2020, section VI-A):
"cudaMalloc consumes the exact amount of memory when allocating each and every variable. Hence, it gives optimal
memory consumption which is equal to the peak memory load." Deviations:

1. The driver maps pages of physical memory at virtual addresses, so that fragments of addresses cost no memory. The
   offsets here are virtual: each block comes after all earlier ones and no address is used twice. The footprint is
   physical, the peak load; it is not the highest end of a block, as it is for all other allocators.
2. The paper also says that cudaMalloc "causes fragmentation due to various variable sizes", and pages round small
   blocks up. Neither is modelled: "the exact amount" is what the paper compares with.
"""

from __future__ import annotations

import numpy as np

from simulator.pool.intervals import Intervals, Packing
from simulator.pool.online.freelist import events


def pack(intervals: Intervals) -> Packing:
    """Virtual offsets for blocks on a line; raises ValueError if time repeats."""
    order = events(intervals)
    mallocs = order[order >= 0]
    offsets = np.zeros(len(intervals), np.int64)
    offsets[mallocs] = np.cumsum(intervals.nbytes[mallocs]) - intervals.nbytes[mallocs]
    peak = intervals.peak_bytes
    return Packing(offsets, peak, proven=True, driver_mallocs=len(mallocs), driver_frees=len(mallocs))
