"""CnMem, NVIDIA's memory pool for CUDA (https://github.com/NVIDIA/cnmem, 2015, ``src/cnmem.cpp``): an online free list.

- A request is rounded up to 512 bytes.
- The free list is ordered by address. A malloc scans all of it and takes the smallest sufficient piece (lowest on
  ties); the rest of the piece stays in the list.
- The used list has the newest block first. A free walks it to the block, walks the free list to the insertion point,
  and merges the block with adjacent free pieces.
- If no piece is large enough, the pool grows by one cudaMalloc of the rounded request. Pieces of two cudaMallocs
  never merge, and nothing is released before the pool is destroyed. Deviations: simulator/pool/README.md.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals, Packing
from simulator.pool.online.freelist import events, free_list, give_back, insert, take

GRANULARITY = 512  # CNMEM_GRANULARITY


def pack(intervals: Intervals, reserve_bytes: int | None = 0) -> Packing:
    """Returns offsets for blocks on a line.

    Args:
        intervals: blocks on a line.
        reserve_bytes: initial pool size, rounded up to 512; None for far more than is needed.

    Returns:
        the packing, with ``steps`` and ``driver_mallocs`` counted.

    Raises:
        ValueError: time repeats, or ``reserve_bytes`` is negative.
    """
    order = events(intervals)
    size = intervals.rounded(GRANULARITY).nbytes
    if reserve_bytes is not None and reserve_bytes < 0:
        raise ValueError(f"reserve_bytes: expected at least 0, got {reserve_bytes}")
    # Twice the sum, so the remainder is larger than any piece below it.
    reserve = 2 * int(size.sum()) if reserve_bytes is None else -(-reserve_bytes // GRANULARITY) * GRANULARITY
    offsets, footprint, steps, mallocs = _serve(order, size, reserve)
    if reserve_bytes is None:
        footprint = int((offsets + size).max(initial=0))
    return Packing(offsets, footprint, steps=steps, driver_mallocs=mallocs)


@jit
def _serve(order, size, reserve):
    """Serves all mallocs and frees; returns offsets, bytes of the pool, list entries visited, and cudaMalloc calls."""
    n = len(size)
    offsets = np.zeros(n, np.int64)
    is_head = np.zeros(n, np.int64)
    used = np.empty(n, np.int64)  # the newest last
    n_used = 0
    free = free_list(2 * n + 2)
    m = insert(free, 0, 0, 0, reserve, 1) if reserve else 0
    reserved = reserve
    steps = 0
    mallocs = m
    for event in order:
        if event >= 0:
            nbytes = size[event]
            best = -1
            smallest = np.int64(0)
            for j in range(m):
                piece = free.end[j] - free.begin[j]
                if piece >= nbytes and (best < 0 or piece < smallest):
                    best = j
                    smallest = piece
            steps += m
            if best < 0:
                steps += m  # to its place, above all others
                best = m
                m = insert(free, m, m, reserved, reserved + nbytes, 1)
                reserved += nbytes
                mallocs += 1
            offsets[event] = free.begin[best]
            is_head[event] = free.is_head[best]
            m = take(free, m, best, nbytes)
            used[n_used] = event
            n_used += 1
        else:
            block = ~event
            index = n_used - 1
            while used[index] != block:
                index -= 1
            steps += n_used - index
            n_used -= 1
            for j in range(index, n_used):
                used[j] = used[j + 1]
            index_below = np.searchsorted(free.begin[:m], offsets[block])
            steps += min(index_below + 1, m)
            m = give_back(free, m, index_below, offsets[block], offsets[block] + size[block], is_head[block])
    return offsets, reserved, steps, mallocs
