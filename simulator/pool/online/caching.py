"""PyTorch's caching allocator with its default settings (``c10/cuda/CUDACachingAllocator.cpp``, BSD license).

- A request is rounded up to 512 bytes (``round_size``); up to 1 MiB it goes to the small pool, else to the large one.
- It takes the smallest free block of its pool that is large enough, of several the lowest (``get_free_block``).
- If there is none, a cudaMalloc makes a segment (``get_allocation_size``): 2 MiB in the small pool; in the large one
  20 MiB for requests below 10 MiB, else the request rounded up to 2 MiB.
- A block is split (``should_split``) if at least 512 bytes are left in the small pool, or more than 1 MiB in the
  large one. Otherwise the request keeps the whole block.
- A freed block is merged with the free blocks before and after it in its segment (``try_merge_blocks``).

Deviations: simulator/pool/README.md. ``steps``: a search, insertion or removal goes down a tree of the m free blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simulator.compiled.encoding import NEVER, Ints
from simulator.compiled.jit import jit, stage
from simulator.pool.intervals import Intervals, Packing
from simulator.pool.online.freelist import events

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are multiples of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest small request
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a segment of the small pool
LARGE_BUFFER = 20 << 20  # kLargeBuffer: a segment for requests of 1 to 10 MiB
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: requests from here on get a segment of their own
ROUND_LARGE = 2 << 20  # kRoundLarge: what these segments are rounded up to


class Blocks(NamedTuple):
    """PyTorch's blocks, free or not, as columns of equal length."""

    size: Ints  # bytes
    offset: Ints  # address in bytes
    before: Ints  # neighbors in the segment, or -1
    after: Ints  # likewise
    is_free: Ints  # 0 or 1


class Heap(NamedTuple):
    """State of the allocator. Index 0 of a pool is the small one, 1 the large one."""

    blocks: Blocks
    pools: Ints  # (2, capacity): free blocks by ascending size, of equal sizes by offset
    n_free: Ints  # (2,): number of free blocks per pool
    ends: Ints  # (2,): bytes of the segments so far, per pool if they are expandable, else in [0]
    tails: Ints  # (2,): last block of each pool's expandable segment, or -1
    counts: Any  # (1,) COUNTS


COUNTS = np.dtype([(name, np.int64) for name in ("blocks", "reserved", "peak", "steps", "segments")])


def pack(intervals: Intervals) -> Packing:
    """Returns offsets for blocks on a line; raises ValueError if time repeats."""
    order = events(intervals)
    sizes = intervals.rounded(MIN_BLOCK_SIZE).nbytes
    offsets, reserved, steps, segments, _ = _serve(order, sizes, NEVER, False)
    return Packing(offsets, reserved, steps=steps, driver_mallocs=segments)


def serve(intervals: Intervals, limit: int | None = None, expandable: bool = False) -> tuple[int, bool]:
    """Returns the peak of reserved bytes, and whether all requests are served.

    Args:
        intervals: requests on a line.
        limit: bytes available to cudaMalloc. If it fails, all unused segments are released and the request is retried,
            as PyTorch does before it raises (``release_cached_blocks``).
        expandable: ``expandable_segments:True``: each pool is one segment that grows at its end, by 2 MiB (small) or
            20 MiB; none is released.

    Returns:
        bytes, and False if a request failed within ``limit``.

    Raises:
        ValueError: time repeats.
    """
    sizes = intervals.rounded(MIN_BLOCK_SIZE).nbytes
    limit = NEVER if limit is None else limit
    _, reserved, _, _, served = _serve(events(intervals), sizes, limit, expandable)
    return int(reserved), bool(served)


@stage
def _segment(nbytes):
    """Returns the bytes requested from cudaMalloc."""
    if nbytes <= SMALL_SIZE:
        return SMALL_BUFFER
    if nbytes < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return (nbytes + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


@stage
def _visit(heap, pool):
    """Counts the visit of a tree of the pool's free blocks: as many steps as their number has binary digits."""
    n = heap.n_free[pool]
    while n:
        n >>= 1
        heap.counts[0].steps += 1


@stage
def _new_block(heap, nbytes, offset, before, after):
    """Returns the index of a new free block."""
    blocks = heap.blocks
    block = heap.counts[0].blocks
    heap.counts[0].blocks += 1
    blocks.size[block] = nbytes
    blocks.offset[block] = offset
    blocks.is_free[block] = 1
    blocks.before[block] = before
    blocks.after[block] = after
    return block


@stage
def _join(blocks, low, high):
    """Merges two neighbors into the lower one."""
    after = blocks.after[high]
    blocks.size[low] += blocks.size[high]
    blocks.after[low] = after
    if after >= 0:
        blocks.before[after] = low


@stage
def _find(heap, pool, nbytes, offset):
    """Returns the rank of the pool's first free block that is not below (nbytes, offset)."""
    blocks = heap.blocks
    free = heap.pools[pool]
    low = 0
    high = heap.n_free[pool]
    while low < high:
        middle = (low + high) // 2
        size = blocks.size[free[middle]]
        if size < nbytes or (size == nbytes and blocks.offset[free[middle]] < offset):
            low = middle + 1
        else:
            high = middle
    return low


@stage
def _insert(heap, pool, block):
    """Inserts a block into a pool of free blocks."""
    free = heap.pools[pool]
    _visit(heap, pool)
    rank = _find(heap, pool, heap.blocks.size[block], heap.blocks.offset[block])
    for j in range(heap.n_free[pool], rank, -1):
        free[j] = free[j - 1]
    free[rank] = block
    heap.n_free[pool] += 1


@stage
def _remove(heap, pool, rank):
    """Removes the block of this rank from a pool of free blocks."""
    free = heap.pools[pool]
    heap.n_free[pool] -= 1
    for j in range(rank, heap.n_free[pool]):
        free[j] = free[j + 1]


@stage
def _remove_block(heap, pool, block):
    _remove(heap, pool, _find(heap, pool, heap.blocks.size[block], heap.blocks.offset[block]))


@stage
def _reserve(heap, nbytes, limit):
    """Counts a cudaMalloc; returns whether it succeeds."""
    count = heap.counts[0]
    if count.reserved + nbytes > limit:
        return False
    count.reserved += nbytes
    count.peak = max(count.peak, count.reserved)
    count.segments += 1
    return True


@stage
def _release_cached(heap):
    """Frees the segments of which all is free (``release_cached_blocks``)."""
    blocks = heap.blocks
    for pool in range(2):
        n_kept = 0
        for j in range(heap.n_free[pool]):
            block = heap.pools[pool, j]
            if blocks.before[block] < 0 and blocks.after[block] < 0:
                heap.counts[0].reserved -= blocks.size[block]
            else:
                heap.pools[pool, n_kept] = block
                n_kept += 1
        heap.n_free[pool] = n_kept


@stage
def _grow(heap, pool, nbytes, limit):
    """Returns the last block of an expandable segment, grown to at least ``nbytes`` and out of the pool, or -1."""
    blocks = heap.blocks
    tail = heap.tails[pool]
    page = SMALL_BUFFER if pool == 0 else LARGE_BUFFER
    free = blocks.size[tail] if tail >= 0 and blocks.is_free[tail] else 0
    growth = (nbytes - free + page - 1) // page * page
    if not _reserve(heap, growth, limit):
        return -1
    if free:
        _remove_block(heap, pool, tail)
        blocks.size[tail] += growth
    else:
        # The segments of the two pools lie NEVER bytes apart, so that neither can grow into the other.
        heap.tails[pool] = _new_block(heap, growth, pool * NEVER + heap.ends[pool], tail, -1)
        if tail >= 0:
            blocks.after[tail] = heap.tails[pool]
    heap.ends[pool] += growth
    return heap.tails[pool]


@stage
def _make_segment(heap, nbytes, limit):
    """Returns the block of a new segment for a request, or -1; releases cached segments if memory is short."""
    segment = _segment(nbytes)
    if not _reserve(heap, segment, limit):
        _release_cached(heap)
        if not _reserve(heap, segment, limit):
            return -1
    heap.ends[0] += segment
    return _new_block(heap, segment, heap.ends[0] - segment, -1, -1)


@stage
def _malloc(heap, pool, nbytes, limit, expandable):
    """Returns the block of a request, or -1 if memory is exhausted."""
    blocks = heap.blocks
    _visit(heap, pool)
    rank = _find(heap, pool, nbytes, -1)
    if rank < heap.n_free[pool]:
        _visit(heap, pool)
        block = heap.pools[pool, rank]
        _remove(heap, pool, rank)
    else:
        block = _grow(heap, pool, nbytes, limit) if expandable else _make_segment(heap, nbytes, limit)
        if block < 0:
            return block
    remainder = blocks.size[block] - nbytes
    if (pool == 0 and remainder >= MIN_BLOCK_SIZE) or remainder > SMALL_SIZE:
        after = blocks.after[block]
        rest = _new_block(heap, remainder, blocks.offset[block] + nbytes, block, after)
        if after >= 0:
            blocks.before[after] = rest
        blocks.after[block] = rest
        blocks.size[block] = nbytes
        if heap.tails[pool] == block:
            heap.tails[pool] = rest
        _insert(heap, pool, rest)
    blocks.is_free[block] = 0
    return block


@stage
def _free(heap, pool, block):
    """Frees a block and merges it with its free neighbors."""
    blocks = heap.blocks
    before = blocks.before[block]
    after = blocks.after[block]
    for other in (before, after):
        if other >= 0 and blocks.is_free[other]:
            _visit(heap, pool)
            _remove_block(heap, pool, other)
            low, high = (block, other) if other == after else (other, block)
            if heap.tails[pool] == high:
                heap.tails[pool] = low
            _join(blocks, low, high)
            block = low
    blocks.is_free[block] = 1
    _insert(heap, pool, block)


@jit
def _serve(order, size, limit, expandable):
    """Returns offsets, peak reserved bytes, tree entries visited, number of segments, and whether all were served."""
    n = len(size)
    capacity = 2 * n + 1  # a request makes a block and the rest of its block
    columns = np.empty((5, capacity), np.int64)
    heap = Heap(
        Blocks(columns[0], columns[1], columns[2], columns[3], columns[4]),
        pools=np.empty((2, capacity), np.int64),
        n_free=np.zeros(2, np.int64),
        ends=np.zeros(2, np.int64),
        tails=np.full(2, -1, np.int64),
        counts=np.zeros(1, COUNTS),
    )
    offsets = np.zeros(n, np.int64)
    block_of = np.empty(n, np.int64)  # the block that a request got
    is_served = True
    for event in order:
        request = event if event >= 0 else ~event
        pool = 0 if size[request] <= SMALL_SIZE else 1
        if event < 0:
            _free(heap, pool, block_of[request])
            continue
        block = _malloc(heap, pool, size[request], limit, expandable)
        if block < 0:
            is_served = False
            break
        block_of[request] = block
        offsets[request] = heap.blocks.offset[block]
    count = heap.counts[0]
    return offsets, count.peak, count.steps, count.segments, is_served
