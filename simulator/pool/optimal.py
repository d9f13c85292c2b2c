"""Minimum footprint, proven where possible: the heuristics of ``portfolio``, then an exact search.

Branch and bound over canonical packings (every block rests on the bottom or on another block). The load of each
section of time must fit above its lowest free height, and time ranges that share no block are separate problems. The
search itself is ``skyline``. Differences from the source: simulator/pool/README.md.

Source: Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from simulator.compiled.encoding import Ints
from simulator.pool import portfolio, skyline
from simulator.pool.intervals import Intervals, Packing
from simulator.pool.portfolio import sections
from simulator.pool.skyline import State, Verdict


class SearchOptions(NamedTuple):
    """Options of the exact search."""

    max_blocks: int = 2000  # above, only the heuristics run
    min_run: int = 100  # nodes of the shortest run, if half the number of blocks is less
    # Each run orders its branches by a random one of these exponents of duration and size, ...
    mixes: tuple[tuple[float, float], ...] = ((1, 0), (0, 1), (1, 1), (0.5, 1), (1, 0.5))
    noise: tuple[float, ...] = (0.0, 0.2, 0.5)  # ... with normal noise of one of these deviations of the logarithm
    failure_decay: float = 0.8  # of the failures per section from run to run


OPTIONS = SearchOptions()


def pack(
    intervals: Intervals, alignment: int = 1, seconds: float = 5.0, seed: int = 0, workers: int | None = None
) -> Packing:
    """Returns the best packing found within the time budget; ``Packing.proven`` if it is optimal.

    Args:
        intervals: blocks on a circle or a line.
        alignment: bytes; sizes are rounded up to it, so that every offset is a multiple.
        seconds: wall-clock budget of heuristics and search, without compilation. The search stops once the footprint
            is proven.
        seed: seed of the search orders. With several workers, or on a timeout, results may differ between runs.
        workers: threads; None: one per core.

    Returns:
        the packing: int64[n] offsets in bytes in the order of the blocks, and the footprint in bytes.

    Raises:
        ValueError: ``alignment`` is below 1.
    """
    _compile()
    deadline = time.monotonic() + seconds
    blocks = intervals.rounded(alignment)
    small = len(blocks) <= OPTIONS.max_blocks
    best = portfolio.pack(blocks, seconds=0.01 * seconds if small else seconds, seed=seed)
    if best.proven or not small:
        return best
    temps, index, offsets, base = blocks.above_permanent()
    search = _Search(temps, seed, workers)
    unit = math.gcd(*temps.nbytes.tolist())

    # bounds on the footprint of the temporary blocks
    low = blocks.peak_bytes - base
    high = best.footprint - base
    # position of the capacity between low and high
    packing = best
    bias = 0.0
    while low < high and (budget := deadline - time.monotonic()) > 0:
        capacity = low + int(bias * (high - low)) // unit * unit
        verdict, packed = search.fits(capacity, min(budget, seconds / 10 if bias else max(budget / 2, seconds / 10)))
        if verdict == Verdict.FITS:
            offsets[index] = packed + base
            high = int((packed + temps.nbytes).max())
            packing = Packing(offsets.copy(), high + base, steps=best.steps)
        elif verdict == Verdict.DOES_NOT_FIT:
            low = capacity + unit
        else:
            bias = (1 + bias) / 2 if bias < 0.9 else 0.0
    return Packing(packing.offsets, packing.footprint, low >= high, packing.steps)


@functools.cache
def _compile() -> None:
    """Compiles the search before the clock starts."""
    portfolio.pack(portfolio.HARD, work=1)
    _Search(portfolio.HARD, seed=0, workers=1).fits(portfolio.HARD.peak_bytes, seconds=1)


class _Search:
    """Repeated, restarted runs of ``skyline.fits`` on one set of temporary blocks, in several threads."""

    def __init__(self, blocks: Intervals, seed: int, workers: int | None):
        first, count, n_sections = sections(blocks)
        self.shape = np.log(np.stack((count, blocks.nbytes)))
        self.stop = np.zeros(1, np.int64)
        workers = workers or os.cpu_count() or 1
        self.states = [skyline.state(first, count, blocks.nbytes, n_sections, self.stop) for _ in range(workers)]
        self.rngs = [np.random.default_rng((seed, worker)) for worker in range(workers)]
        self.capacity = 0

    def fits(self, capacity: int, seconds: float) -> tuple[int, Ints]:
        """Returns FITS and the offsets, DOES_NOT_FIT, or GAVE_UP after the time budget."""
        for x in self.states:
            skyline.undo(x, 0, 0)
            if capacity > self.capacity:  # infeasible under one capacity implies infeasible under a smaller one
                x.failed[:] = x.counters["failed"] = 0
        self.capacity = capacity
        self.stop[0] = 0
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(len(self.states)) as pool:
            futures = [pool.submit(self._runs, x, rng, deadline) for x, rng in zip(self.states, self.rngs, strict=True)]
            try:
                offsets = {verdict.result(): x.offsets for verdict, x in zip(futures, self.states, strict=True)}
            finally:
                self.stop[0] = 1  # the threads end even after an exception
        verdict = next(kind for kind in Verdict if kind in offsets)
        return verdict, offsets[verdict]

    def _runs(self, x: State, rng: np.random.Generator, deadline: float) -> int:
        """Executes the runs of one thread until any thread has the answer."""
        for run in itertools.count(1):
            if self.stop[0] or time.monotonic() > deadline:
                break
            mix = rng.choice(OPTIONS.mixes)
            noise = rng.choice(OPTIONS.noise) * rng.standard_normal(len(x.size))
            x.priority[:] = mix @ self.shape + noise
            x.weight[:] = OPTIONS.failure_decay * x.weight + (1 - OPTIONS.failure_decay)
            x.counters["nodes"] = 0
            x.counters["budget"] = max(OPTIONS.min_run, len(x.size) // 2) * luby(run)
            verdict = skyline.fits(x, self.capacity, 0, len(x.skyline), 0, bool(rng.random() < 2 / 3))
            if verdict != Verdict.GAVE_UP:
                self.stop[0] = 1
                return int(verdict)
            skyline.undo(x, 0, 0)
        return Verdict.GAVE_UP


def luby(i: int) -> int:
    """Returns the Luby sequence 1, 1, 2, 1, 1, 2, 4, …: restart lengths within a logarithmic factor of the optimum."""
    k = i.bit_length()
    return 1 << (k - 1) if i == (1 << k) - 1 else luby(i - (1 << (k - 1)) + 1)
