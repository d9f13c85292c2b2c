"""The memory pool of "SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (PPoPP 2018).

Section 3.2.1: one big chunk of memory is allocated beforehand and divided into blocks of 1 KB. A list of empty
nodes and a list of allocated nodes hold an address and a number of blocks each. An allocation takes the first node
of the empty list with enough free memory; a deallocation finds its node with a hash table from IDs and places it
back in the empty list. What the paper leaves open:

1. The order of the empty list: by address, so that the first node is the lowest (first-fit).
2. Whether empty neighbours become one node: they do, at once. Without, the heap would break up into the smallest
   sizes. Both choices are those of the heap in the program that the authors released (``gpu_malloc``), which rounds
   to 16 bytes and walks its list on deallocation; here, as in the paper, 1 KB and a hash table.
3. How big the chunk is: enough for everything; the footprint is what is needed of it.
4. ``steps``: the empty nodes that an allocation looks at; for a deallocation the entry of the hash table and the
   empty nodes up to the place of the node.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled.jit import jit
from simulator.pool.freelist import BEGIN, END, events, give_back, insert, take
from simulator.pool.intervals import Intervals, Packing

BLOCK = 1024  # "1KB blocks as the basic storage unit"


def pack(intervals: Intervals) -> Packing:
    """Offsets for blocks on a line; raises ValueError if time repeats."""
    order = events(intervals)
    size = intervals.rounded(BLOCK).nbytes
    offsets, steps = _serve(order, size)
    return Packing(offsets, int((offsets + size).max(initial=0)), steps=steps, driver_mallocs=int(len(order) > 0))


@jit
def _serve(order, size):  # type: ignore[no-untyped-def]
    """All allocations and deallocations; offsets and list entries looked at."""
    n = len(size)
    offsets, steps = np.zeros(n, np.int64), 0
    empty = np.empty((3, n + 2), np.int64)
    m = insert(empty, 0, 0, 0, size.sum(), 0)  # at the top there is always room for the requests to come
    for event in order:
        if event >= 0:
            first = 0
            while empty[END, first] - empty[BEGIN, first] < size[event]:
                first += 1
            steps += first + 1
            offsets[event] = empty[BEGIN, first]
            m = take(empty, m, first, size[event])
        else:
            block = ~event
            below = np.searchsorted(empty[BEGIN, :m], offsets[block])
            steps += 1 + min(below + 1, m)
            m = give_back(empty, m, below, offsets[block], offsets[block] + size[block], 0)
    return offsets, steps
