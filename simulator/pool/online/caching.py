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

import numpy as np

from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals, Packing
from simulator.pool.online.freelist import events

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are multiples of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest small request
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a segment of the small pool
LARGE_BUFFER = 20 << 20  # kLargeBuffer: a segment for requests of 1 to 10 MiB
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: requests from here on get a segment of their own
ROUND_LARGE = 2 << 20  # kRoundLarge: what these segments are rounded up to

_ENDLESS = 1 << 50
_SIZE, _OFFSET, _PREV, _NEXT, _FREE = range(5)  # rows of the table of PyTorch's blocks; PREV and NEXT: -1 for none


def pack(intervals: Intervals) -> Packing:
    """Returns offsets for blocks on a line; raises ValueError if time repeats."""
    order = events(intervals)
    sizes = intervals.rounded(MIN_BLOCK_SIZE).nbytes
    offsets, reserved, steps, segments, _ = _serve(order, sizes, _ENDLESS, False)
    return Packing(offsets, reserved, steps=steps, driver_mallocs=segments)


def serve(intervals: Intervals, limit: int | None = None, expandable: bool = False) -> tuple[int, bool]:
    """Returns the peak of reserved bytes, and whether all requests are served.

    Args:
        intervals: requests on a line.
        limit: bytes available to cudaMalloc. If it fails, all unused segments are released and the request is retried,
            as PyTorch does before it raises (``release_cached_blocks``).
        expandable: ``expandable_segments:True``: each pool is one segment that grows at its end, by 2 MiB (small) or
            20 MiB; none is released.

    Raises:
        ValueError: time repeats.
    """
    sizes = intervals.rounded(MIN_BLOCK_SIZE).nbytes
    most = _ENDLESS if limit is None else limit
    _, reserved, _, _, served = _serve(events(intervals), sizes, most, expandable)
    return int(reserved), bool(served)


@jit
def _segment(nbytes):
    """Returns the bytes requested from cudaMalloc."""
    if nbytes <= SMALL_SIZE:
        return SMALL_BUFFER
    if nbytes < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return (nbytes + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


@jit
def _depth(m):
    """Returns the number of binary digits of m."""
    digits = 0
    while m:
        m >>= 1
        digits += 1
    return digits


@jit
def _fill(blocks, block, nbytes, offset, before, after):
    """Writes the table row of a new free block."""
    blocks[_SIZE, block] = nbytes
    blocks[_OFFSET, block] = offset
    blocks[_FREE, block] = 1
    blocks[_PREV, block] = before
    blocks[_NEXT, block] = after


@jit
def _join(blocks, low, high):
    """Merges two neighbors; returns the lower one."""
    after = blocks[_NEXT, high]
    blocks[_SIZE, low] += blocks[_SIZE, high]
    blocks[_NEXT, low] = after
    if after >= 0:
        blocks[_PREV, after] = low
    return low


@jit
def _place(blocks, pool, m, nbytes, offset):
    """Returns the index of the first of m free blocks that is not below (nbytes, offset)."""
    low = 0
    high = m
    while low < high:
        middle = (low + high) // 2
        size = blocks[_SIZE, pool[middle]]
        if size < nbytes or (size == nbytes and blocks[_OFFSET, pool[middle]] < offset):
            low = middle + 1
        else:
            high = middle
    return low


@jit
def _insert(blocks, pool, m, block):
    """Inserts a block into a pool of m; returns the new m."""
    index = _place(blocks, pool, m, blocks[_SIZE, block], blocks[_OFFSET, block])
    for j in range(m, index, -1):
        pool[j] = pool[j - 1]
    pool[index] = block
    return m + 1


@jit
def _remove(pool, m, index):
    """Removes the block at index ``index`` from a pool of m; returns the new m."""
    for j in range(index, m - 1):
        pool[j] = pool[j + 1]
    return m - 1


@jit
def _released(blocks, pools, counts):
    """Removes free blocks that are whole segments from both pools; returns their bytes."""
    nbytes = 0
    for pool in range(2):
        n_kept = 0
        for j in range(counts[pool]):
            block = pools[pool, j]
            if blocks[_PREV, block] < 0 and blocks[_NEXT, block] < 0:
                nbytes += blocks[_SIZE, block]
            else:
                pools[pool, n_kept] = block
                n_kept += 1
        counts[pool] = n_kept
    return nbytes


@jit
def _serve(order, size, limit, expandable):
    """Returns offsets, peak reserved bytes, tree entries visited, number of segments, and whether all were served."""
    # The two pools of expandable segments lie _ENDLESS bytes apart.
    n = len(size)
    # holds: row of the block that a request got
    offsets = np.zeros(n, np.int64)
    block_of = np.empty(n, np.int64)
    blocks = np.empty((5, 2 * n + 1), np.int64)
    n_blocks = 0
    # free blocks, small and large
    pools = np.empty((2, 2 * n + 1), np.int64)
    counts = np.zeros(2, np.int64)
    reserved = 0
    peak = 0
    steps = 0
    segments = 0
    # expandable segments: end and last block
    ends = np.zeros(2, np.int64)
    tails = np.full(2, -1, np.int64)
    for event in order:
        request = event if event >= 0 else ~event
        nbytes = size[request]
        pool_index = 0 if nbytes <= SMALL_SIZE else 1
        pool = pools[pool_index]
        m = counts[pool_index]
        if event >= 0:
            steps += _depth(m)
            index = _place(blocks, pool, m, nbytes, -1)
            if index < m:
                steps += _depth(m)
                block = pool[index]
                m = _remove(pool, m, index)
            elif expandable:
                tail = tails[pool_index]
                page = SMALL_BUFFER if pool_index == 0 else LARGE_BUFFER
                free = blocks[_SIZE, tail] if tail >= 0 and blocks[_FREE, tail] else 0
                grown = (nbytes - free + page - 1) // page * page
                if reserved + grown > limit:
                    return offsets, max(peak, reserved), steps, segments, False
                if free:
                    block = tail
                    m = _remove(pool, m, _place(blocks, pool, m, free, blocks[_OFFSET, tail]))
                    blocks[_SIZE, block] += grown
                else:
                    block = n_blocks
                    n_blocks = n_blocks + 1
                    _fill(blocks, block, grown, pool_index * _ENDLESS + ends[pool_index], tail, -1)
                    if tail >= 0:
                        blocks[_NEXT, tail] = block
                tails[pool_index] = block
                ends[pool_index] += grown
                reserved += grown
                segments += 1
            else:
                segment = _segment(nbytes)
                if reserved + segment > limit:
                    peak = max(peak, reserved)
                    reserved -= _released(blocks, pools, counts)
                    m = counts[pool_index]
                    if reserved + segment > limit:
                        return offsets, peak, steps, segments, False
                block = n_blocks
                n_blocks = n_blocks + 1
                _fill(blocks, block, segment, ends[0], -1, -1)
                ends[0] += segment
                reserved += segment
                segments += 1
            remainder = blocks[_SIZE, block] - nbytes
            if (pool_index == 0 and remainder >= MIN_BLOCK_SIZE) or remainder > SMALL_SIZE:
                remainder_block = n_blocks
                n_blocks = n_blocks + 1
                after = blocks[_NEXT, block]
                _fill(blocks, remainder_block, remainder, blocks[_OFFSET, block] + nbytes, block, after)
                if after >= 0:
                    blocks[_PREV, after] = remainder_block
                blocks[_NEXT, block] = remainder_block
                blocks[_SIZE, block] = nbytes
                if expandable and tails[pool_index] == block:
                    tails[pool_index] = remainder_block
                steps += _depth(m)
                m = _insert(blocks, pool, m, remainder_block)
            blocks[_FREE, block] = 0
            block_of[request] = block
            offsets[request] = blocks[_OFFSET, block]
        else:
            block = block_of[request]
            before = blocks[_PREV, block]
            after = blocks[_NEXT, block]
            for other in (before, after):
                if other >= 0 and blocks[_FREE, other]:
                    steps += _depth(m)
                    m = _remove(pool, m, _place(blocks, pool, m, blocks[_SIZE, other], blocks[_OFFSET, other]))
                    low, high = (block, other) if other == after else (other, block)
                    if tails[pool_index] == high:
                        tails[pool_index] = low
                    block = _join(blocks, low, high)
            blocks[_FREE, block] = 1
            steps += _depth(m)
            m = _insert(blocks, pool, m, block)
        counts[pool_index] = m
    return offsets, max(peak, reserved), steps, segments, True
