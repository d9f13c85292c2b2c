"""Times the allocators on synthetic instances of any size, one of them with a known optimum."""

from __future__ import annotations

import heapq
import time
from typing import Any

import numpy as np

from simulator.pool import Intervals, optimal, portfolio, smartpool


def packing(sizes: list[int], perfect_blocks: int, seconds: float, seed: int) -> dict[str, Any]:
    """Returns seconds and footprint ratios of the allocators.

    Args:
        sizes: numbers of blocks of the random instances.
        perfect_blocks: number of blocks of the instance with a known optimum.
        seconds: time limit of the portfolio and the exact allocator.
        seed: seed of the instances.
    """
    optimal.pack(scattered(10, seed))  # warm-up that compiles the allocator and its initial heuristics
    results: dict[str, Any] = {"smartpool_s": {}, "smartpool_ratio": {}, "portfolio_ratio": {}}
    for n in sizes:
        blocks = scattered(n, seed)
        start = time.perf_counter()
        greedy = smartpool.pack(blocks)
        results["smartpool_s"][n] = round(time.perf_counter() - start, 3)
        results["smartpool_ratio"][n] = round(greedy.ratio(blocks), 5)
        results["portfolio_ratio"][n] = round(portfolio.pack(blocks, seconds=seconds, seed=seed).ratio(blocks), 5)
    blocks = perfect(perfect_blocks, seed)
    start = time.perf_counter()
    exact = optimal.pack(blocks, seconds=seconds, seed=seed, workers=1)
    results["optimal_s"] = round(time.perf_counter() - start, 3)
    return results | {"optimal_ratio": round(exact.ratio(blocks), 5)}


def scattered(n: int, seed: int) -> Intervals:
    """Returns n random blocks with lifetimes of up to a tenth of the duration and sizes of up to 100 MB."""
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, n, n)
    return Intervals(lower, lower + rng.integers(1, max(n // 10, 2), n), rng.integers(1, 10**8, n))


def perfect(n: int, seed: int, width: int = 2**20, height: int = 2**20) -> Intervals:
    """Returns n shuffled blocks that fill ``height`` bytes over ``width`` instants, by cutting a rectangle.

    Raises:
        ValueError: the rectangle has too few unit cells for n blocks.
    """
    rng = np.random.default_rng(seed)
    heap = [(0.0, 0, width, height)]  # (rank, start, duration, bytes) of rectangles, large ones first
    while len(heap) < n:
        _, start, duration, nbytes = heapq.heappop(heap)
        if max(duration, nbytes) < 2:
            raise ValueError(f"n: a rectangle of {width} x {height} cannot be cut into {n} blocks; choose fewer")
        part = rng.uniform(0.2, 0.8)
        cut_time = duration / width * rng.uniform(0.5, 1.5) > nbytes / height * rng.uniform(0.5, 1.5)
        if duration > 1 and (cut_time or nbytes < 2):
            first = min(max(int(part * duration), 1), duration - 1)
            parts = [(start, first, nbytes), (start + first, duration - first, nbytes)]
        else:
            first = min(max(int(part * nbytes), 1), nbytes - 1)
            parts = [(start, duration, first), (start, duration, nbytes - first)]
        for piece in parts:
            heapq.heappush(heap, (-piece[1] * piece[2] * rng.uniform(0.3, 1), *piece))
    _, starts, durations, sizes = np.array(heap)[rng.permutation(n)].T.astype(np.int64)
    return Intervals(starts, starts + durations, sizes)
