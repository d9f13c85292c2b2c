"""Bare cudaMalloc and cudaFree: every malloc and every free is a driver call.

The baseline of SmartPool ("Efficient Memory Management for GPU-based Deep Learning Systems", 2020, section VI-A):
"cudaMalloc consumes the exact amount of memory when allocating each and every variable. Hence, it gives optimal
memory consumption which is equal to the peak memory load." Deviations (reasons in simulator/pool/README.md):

1. Offsets are virtual and never reused; the footprint is physical: the peak load, not the highest address.
2. Neither rounding to pages nor fragmentation in the driver is modeled.
"""

from __future__ import annotations

import numpy as np

from simulator.pool.intervals import Intervals, Packing
from simulator.pool.online.freelist import events


def pack(intervals: Intervals) -> Packing:
    """Assigns each block a virtual offset of its own; raises ValueError unless ``period`` is NEVER."""
    order = events(intervals)
    mallocs = order[order >= 0]
    offsets = np.zeros(len(intervals), np.int64)
    offsets[mallocs] = np.cumsum(intervals.nbytes[mallocs]) - intervals.nbytes[mallocs]
    peak = intervals.peak_bytes
    return Packing(offsets, peak, proven=True, driver_mallocs=len(mallocs), driver_frees=len(mallocs))
