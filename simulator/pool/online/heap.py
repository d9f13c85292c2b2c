"""Memory pool of SuperNeurons (PPoPP 2018, section 3.2.1; full title: agents/heuristics/superneurons.py).

One large chunk of memory is allocated in advance and divided into blocks of 1 KB. Nodes of an empty list and an
allocated list hold an address and a number of blocks. An allocation takes the first sufficient empty node; a
deallocation finds its node in a hash table of IDs and returns it to the empty list. Choices not specified in the paper
(reasons in simulator/pool/README.md):

1. The empty list is ordered by address: first-fit.
2. Adjacent empty nodes are merged immediately.
3. The chunk is large enough for everything; the footprint is the part that is used.
4. ``steps``: empty nodes visited to allocate or to reinsert a node, and one hash entry per deallocation.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals, Packing
from simulator.pool.online.freelist import events, free_list, give_back, insert, take

BLOCK_BYTES = 1024  # "1KB blocks as the basic storage unit"


def pack(intervals: Intervals) -> Packing:
    """Returns offsets for blocks on a line; raises ValueError if time repeats."""
    order = events(intervals)
    size = intervals.rounded(BLOCK_BYTES).nbytes
    offsets, steps = _serve(order, size)
    return Packing(offsets, int((offsets + size).max(initial=0)), steps=steps, driver_mallocs=int(len(order) > 0))


@jit
def _serve(order, size):
    """Serves all allocations and deallocations; returns offsets and list entries visited."""
    n = len(size)
    offsets = np.zeros(n, np.int64)
    steps = 0
    empty = free_list(n + 2)
    m = insert(empty, 0, 0, 0, size.sum(), 0)  # the top node always has room for later requests
    for event in order:
        if event >= 0:
            first = 0
            while empty.end[first] - empty.begin[first] < size[event]:
                first += 1
            steps += first + 1
            offsets[event] = empty.begin[first]
            m = take(empty, m, first, size[event])
        else:
            block = ~event
            below = np.searchsorted(empty.begin[:m], offsets[block])
            steps += 1 + min(below + 1, m)
            m = give_back(empty, m, below, offsets[block], offsets[block] + size[block], 0)
    return offsets, steps
