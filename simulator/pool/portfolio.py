"""Portfolio of packing heuristics with a time limit, for instances too large or too hard for the exact search.

SmartPool's best-fit and first-fit (``smartpool``) and skyline runs come first. Then two searches improve the best
packing in turns, until the time is over or the footprint equals the peak load:

- *Skyline*: the best-fit heuristic of Burke, Kendall and Whitwell (Operations Research 52(4), 2004);
- *Squeaky wheel* (Joslin and Clements, JAIR 10, 1999) over the skyline's priorities;
- *Ejection*: the guided ejection search of Nagata and Bräysy (Operations Research Letters 37(5), 2009).

Details and differences from the sources: simulator/pool/README.md.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from simulator.compiled.encoding import Ints
from simulator.compiled.jit import jit
from simulator.compiled.lowering import sort
from simulator.pool import smartpool
from simulator.pool.intervals import Intervals, Packing

NOTHING_WAITS = np.int64(1 << 62)  # height of a section without waiting blocks


class SearchOptions(NamedTuple):
    """Options of the searches."""

    # Exponents of duration and size in the priorities of the first skyline runs, best first.
    mixes: tuple[tuple[float, float], ...] = ((1.0, 0.5), (1.0, 0.0), (1.0, 1.0), (0.5, 1.0), (0.0, 1.0))
    noise: tuple[float, ...] = (0.0, 0.1, 0.3)  # deviations of the logarithm of a squeaky wheel's first priorities
    turns: int = 200  # squeaky-wheel runs per start
    blame: float = math.exp(0.5)  # factor on the priority of the blocks of a section that failed
    patience: int = 3_000  # steps of ejection without fewer ejected blocks after which the target is given up
    burst: int = 2_000_000  # work between clock checks, some milliseconds
    shares: tuple[int, int] = (1, 3)  # of the work, for squeaky wheel and ejection


OPTIONS = SearchOptions()


class Blocks(NamedTuple):
    """n blocks over m sections; sizes in units of their greatest common divisor."""

    first: Ints  # [n] the first section of a block
    covers: Ints  # [n] how many it covers, cyclically
    size: Ints  # [n]
    load: Ints  # [m]
    begin: Ints  # [n] blocks sorted by first section
    begin_at: Ints  # [m + 1] start of each section in ``begin``
    # The same for blocks with 2^k <= covers < 2^(k+1), by k: neighbors of a block are contiguous for each k.
    kin: Ints  # [n]
    kin_at: Ints  # [k, m + 1]


class _Best:
    """Best packing so far of the temporary blocks."""

    def __init__(self, offsets: Ints, footprint: int):
        self.offsets = offsets
        self.footprint = footprint

    def offer(self, offsets: Ints, footprint: int) -> None:
        if footprint < self.footprint:
            self.offsets = offsets.copy()
            self.footprint = footprint


def pack(
    intervals: Intervals, alignment: int = 1, seconds: float = 5.0, seed: int = 0, work: int | None = None
) -> Packing:
    """Returns the best packing found within the time budget; ``Packing.proven`` if its footprint is the peak load.

    Args:
        intervals: blocks on a circle or a line.
        alignment: bytes; sizes are rounded up to it, so that every offset is a multiple.
        seconds: wall-clock budget, without compilation. One skyline run and SmartPool's two heuristics always run, and
            runs are not interrupted.
        seed: seed of the search.
        work: budget in visited entries instead of ``seconds``, for deterministic packings.

    Returns:
        the packing: int64[n] offsets in bytes in the order of the blocks, and the footprint in bytes.

    Raises:
        ValueError: ``alignment`` is below 1.
    """
    _compile()
    deadline = time.monotonic() + seconds if work is None else math.inf
    rounded = intervals.rounded(alignment)
    temps, index, offsets, footprint = rounded.above_permanent()
    if len(index):
        packed = _search(rounded, temps, index, deadline, work, seed)
        offsets[index] = footprint + packed
        footprint += int((packed + temps.nbytes).max())
    # Addresses are precomputed: a malloc looks its address up, a free does nothing.
    return Packing(offsets, footprint, footprint == rounded.peak_bytes, steps=len(rounded))


# On a circle of 3, each of three blocks meets the other two, but only two are live at once: all searches run.
HARD = Intervals(np.arange(3), np.arange(2, 5), np.ones(3, np.int64), 3)


@functools.cache
def _compile() -> None:
    """Compiles the searches before the clock starts."""
    _search(HARD, HARD, np.arange(3), math.inf, 3 * OPTIONS.burst, 0)


def _search(blocks: Intervals, temps: Intervals, index: Ints, deadline: float, work: int | None, seed: int) -> Ints:
    """Returns offsets of ``temps``, the temporary blocks with indices ``index``."""
    unit = math.gcd(*temps.nbytes.tolist())
    x = _blocks(Intervals(temps.lower, temps.upper, temps.nbytes // unit, temps.period))
    load = int(x.load.max())
    best = _Best(np.empty(0, np.int64), int(NOTHING_WAITS))

    def is_over() -> bool:
        return best.footprint == load or time.monotonic() > deadline

    offsets = np.empty(len(index), np.int64)
    for by_duration, by_size in OPTIONS.mixes:
        footprint, _ = _skyline(x, _priority(x, by_duration, by_size), best.footprint - 1, offsets)
        best.offer(offsets, footprint)
        if is_over():
            break
    for fit in smartpool.FITS:
        if best.footprint > load:
            packed = smartpool.pack(blocks, fit=fit).offsets
            is_permanent = blocks.upper - blocks.lower == blocks.period
            order = np.argsort(packed[is_permanent])  # offsets without the permanent blocks below
            bases = np.cumsum(np.append(0, blocks.nbytes[is_permanent][order]))
            offsets = (packed[index] - bases[np.searchsorted(packed[is_permanent][order], packed[index])]) // unit
            best.offer(offsets, int((offsets + x.size).max()))
    rng = np.random.default_rng(seed)
    searches = [_squeaky_wheel(x, best, rng)]
    if best.footprint.bit_length() + len(index).bit_length() < 63:
        searches.append(_ejection(x, best, rng, load))
    spent = [0.0] * len(searches)
    while not is_over() and (work is None or sum(spent) < work):
        search = min(range(len(searches)), key=lambda i: spent[i] / OPTIONS.shares[i])
        spent[search] += next(searches[search], 0)  # 0: the footprint equals the load
    return best.offsets * unit


def _squeaky_wheel(x: Blocks, best: _Best, rng: np.random.Generator) -> Iterator[int]:
    """Executes skyline runs with priorities learned from failures; yields the work of each burst."""
    offsets = np.empty(len(x.size), np.int64)
    work = 0
    while True:
        # Half of the starts prefer long blocks, the others use a random mix.
        by_duration = 1.0 if rng.random() < 0.5 else rng.random()
        priority = _priority(x, by_duration, rng.random())
        priority *= np.exp(rng.choice(OPTIONS.noise) * rng.standard_normal(len(priority)))
        for _ in range(OPTIONS.turns):
            footprint, visited = _skyline(x, priority, best.footprint - 1, offsets)
            best.offer(offsets, footprint)
            work += visited
            if work > OPTIONS.burst:
                yield work
                work = 0


def _ejection(x: Blocks, best: _Best, rng: np.random.Generator, load: int) -> Iterator[int]:
    """Tries targets between the load and the best footprint; yields the work of each burst."""
    area: Any = x.size * x.covers.astype(np.float64)
    area /= area.mean()
    weight = area.copy()
    step = 0.5
    while best.footprint > load:
        target = max(load, math.floor(best.footprint - 1 - (best.footprint - load) * step))
        offsets = best.offsets.copy()
        offsets[offsets + x.size > target] = -1
        state = np.array([np.count_nonzero(offsets < 0), 0])
        while state[0] and state[1] < OPTIONS.patience:
            yield _eject(x, offsets, weight, target, rng, state)
        if state[0]:
            step = step / 2 if step > 0.02 else 0.5
        else:
            best.offer(offsets, int((offsets + x.size).max()))
            step = min(1.0, 2 * step)
        weight = (weight + area) / 2


def _priority(x: Blocks, by_duration: float, by_size: float) -> Any:
    return x.covers**by_duration * x.size**by_size


def _blocks(intervals: Intervals) -> Blocks:
    first, covers, m = sections(intervals)
    begin = np.argsort(first, kind="stable")
    kind = np.frexp(covers)[1] - 1
    kin = np.lexsort((first, kind))
    kinds = range(int(kind.max()) + 1)
    kin_at = np.stack([np.searchsorted(kind[kin] * m + first[kin], k * m + np.arange(m + 1)) for k in kinds])
    change = np.zeros(2 * m + 1, np.int64)  # two rounds
    np.add.at(change, first, intervals.nbytes)
    np.add.at(change, first + covers, -intervals.nbytes)
    load = np.cumsum(change)[: 2 * m].reshape(2, m).sum(axis=0)
    return Blocks(
        first, covers, intervals.nbytes, load, begin, np.searchsorted(first[begin], np.arange(m + 1)), kin, kin_at
    )


def sections(blocks: Intervals) -> tuple[Ints, Ints, int]:
    """Returns the instants of locally maximal sets of live blocks: runs of mallocs without a free between them.

    Returns:
        int64[n], the first section of each block; int64[n], how many it covers (cyclically); the number of sections.
    """
    n = len(blocks)
    ends = blocks.upper if blocks.upper.max() <= blocks.period else (blocks.upper - 1) % blocks.period + 1
    times = np.concatenate((blocks.lower, ends))
    is_malloc = np.arange(2 * n) < n
    order = np.lexsort((is_malloc, times))  # frees come first
    opens = is_malloc[order] & ~np.roll(is_malloc[order], 1)
    section = np.empty(2 * n, np.int64)
    # A free before the first malloc belongs to a block of the previous round's last section.
    section[order] = (np.cumsum(opens) - 1) % opens.sum()
    first = section[:n]
    last = section[n:]
    return first, (last - first) % opens.sum() + 1, int(opens.sum())


@jit
def _skyline(x, priority, limit, offsets):
    """Fills basins until no block waits; returns the footprint and the work."""
    # If the footprint would exceed ``limit``, it is NOTHING_WAITS, and the blocks of the failing section gain priority.
    m = len(x.load)
    waiting_bytes = x.load.copy()  # bytes that wait
    height = np.where(waiting_bytes > 0, np.int64(0), NOTHING_WAITS)
    waiting = x.begin.copy()  # per section, waiting blocks first
    n_waiting = x.begin_at[1:] - x.begin_at[:-1]
    footprint = np.int64(0)
    work = 0
    s = 0
    scanned = 0
    while True:
        if height[s] == NOTHING_WAITS:
            while scanned < m and height[scanned] == NOTHING_WAITS:
                scanned += 1
            if scanned == m:
                return footprint, work
            s = scanned
        ground = height[s]
        begin = s
        end = s + 1 if s + 1 < m else 0
        length = 1
        while length < m and height[begin - 1] == ground:
            begin = begin - 1 if begin else m - 1
            length += 1
        while length < m and height[end] == ground:
            end = end + 1 if end + 1 < m else 0
            length += 1
        rim = NOTHING_WAITS
        if length < m:  # downhill
            before = begin - 1 if begin else m - 1
            if height[before] < ground or height[end] < ground:
                s = before if height[before] < ground else end
                continue
            rim = min(height[before], height[end])
        work += length
        block = -1
        place = 0
        section = begin
        for i in range(length):
            for k in range(x.begin_at[section], x.begin_at[section] + n_waiting[section]):
                j = waiting[k]
                if (i + x.covers[j] <= length or length == m) and (block < 0 or priority[j] > priority[block]):
                    block = j
                    place = k
            work += n_waiting[section]
            section = section + 1 if section + 1 < m else 0
        s = begin
        section = begin
        top = rim
        covered = length
        if block >= 0:
            section = x.first[block]
            top = ground + x.size[block]
            covered = x.covers[block]
            n_waiting[section] -= 1
            waiting[place] = waiting[x.begin_at[section] + n_waiting[section]]
            offsets[block] = ground
            footprint = max(footprint, top)
            if section == begin:  # continue with the rest of the basin
                s = end - 1 if end else m - 1
        for _ in range(covered):
            if block >= 0:
                waiting_bytes[section] -= x.size[block]
            height[section] = top if waiting_bytes[section] else NOTHING_WAITS
            if (waiting_bytes[section] and top + waiting_bytes[section] > limit) or footprint > limit:
                for j in range(len(priority)):
                    if (section - x.first[j]) % m < x.covers[j]:
                        priority[j] *= OPTIONS.blame
                return NOTHING_WAITS, work + len(priority)
            section = section + 1 if section + 1 < m else 0


@jit
def _sort(keys, n):
    """Sorts the first n entries."""
    if n > 40:
        keys[:n].sort()
    else:
        sort(keys, 0, n)


@jit
def _neighbors(x, offsets, block, bits, begins):
    """Writes offset << bits | index of the placed neighbors of a block, ascending; returns number and work."""
    m = len(x.load)
    first = x.first[block]
    covers = x.covers[block]
    d = 0
    visited = 0
    for k in range(len(x.kin_at)):
        # sections in which they begin
        low = first - (2 << k) + 2
        high = first + covers
        if high - low >= m:
            low = 0
            high = m
        kin_at = x.kin_at[k]
        for half in range(2):  # the part inside [0, m), and the part that wraps around
            if half == 0:
                a = kin_at[max(low, 0)]
                b = kin_at[min(high, m)]
            elif low < 0:
                a = kin_at[low + m]
                b = kin_at[m]
            elif high > m:
                a = kin_at[0]
                b = kin_at[high - m]
            else:
                break
            visited += b - a
            for j in x.kin[a:b]:
                begins[d] = offsets[j] << bits | j
                after = x.first[j] - first
                after += m if after < 0 else 0
                d += (offsets[j] >= 0) & ((after < covers) | (m - after < x.covers[j]))
    _sort(begins, d)
    return d, visited


@jit
def _cheapest(begins, ends, bits, size, target, weight, rng):
    """Returns the offset below target - size where overlapping blocks weigh least in total; random ties."""
    d = len(begins)
    mask = (np.int64(1) << bits) - 1
    best = np.int64(0)
    least = np.inf
    ties = 0
    cost = 0.0
    n_entered = 0
    left_behind = 0
    offset = np.int64(0)
    while True:
        while n_entered < d and begins[n_entered] >> bits < offset + size:
            cost += weight[begins[n_entered] & mask]
            n_entered += 1
        while left_behind < d and ends[left_behind] >> bits <= offset:
            cost -= weight[ends[left_behind] & mask]
            left_behind += 1
        if cost < least - 1e-9:
            best = offset
            least = cost
            ties = 1
        elif cost < least + 1e-9:
            ties += 1
            if rng.random() * ties < 1:
                best = offset
        if offset >= target - size:
            return best
        # The next one on top of a block or right below one.
        k = n_entered
        while k < d and begins[k] >> bits == offset + size:
            k += 1
        offset = target - size
        if left_behind < d:
            offset = min(offset, ends[left_behind] >> bits)
        if k < d:
            offset = min(offset, (begins[k] >> bits) - size)


@jit
def _eject(x, offsets, weight, target, rng, state):
    """Executes a burst of guided ejection toward a footprint of ``target`` bytes; returns its work."""
    # offsets: negative for ejected blocks. state, int64[2]: the fewest ejected blocks so far, and steps since.
    n = len(offsets)
    bits = 0
    while n >> bits:
        bits += 1
    mask = (np.int64(1) << bits) - 1
    # height << bits | block of the next block's neighbors
    begins = np.empty(n, np.int64)
    ends = np.empty(n, np.int64)
    out = np.empty(n, np.int64)
    n_out = 0
    work = 0
    for j in range(n):
        if offsets[j] < 0:
            out[n_out] = j
            n_out += 1
    while work < OPTIONS.burst and state[0] and state[1] < OPTIONS.patience:
        i = rng.integers(0, n_out)
        block = out[i]
        n_out = n_out - 1
        out[i] = out[n_out]
        size = x.size[block]
        d, visited = _neighbors(x, offsets, block, bits, begins)
        work += visited + 16 * d
        # The smallest hole, the block at one of its ends.
        top = np.int64(0)
        offset = np.int64(-1)
        hole = np.int64(0)
        for k in range(d + 1):
            begin = begins[k] >> bits if k < d else target
            if begin - top >= size and (offset < 0 or begin - top < hole):
                offset = top
                hole = begin - top
            if k < d:
                j = begins[k] & mask
                top = max(top, begin + x.size[j])
                ends[k] = (begin + x.size[j]) << bits | j
        if offset >= 0:
            if rng.random() < 0.5:
                offset += hole - size
        else:
            weight[block] += 1
            _sort(ends, d)
            offset = _cheapest(begins[:d], ends[:d], bits, size, target, weight, rng)
            for k in range(d):
                if begins[k] >> bits >= offset + size:
                    break
                j = begins[k] & mask
                if offsets[j] + x.size[j] > offset:
                    offsets[j] = -1
                    out[n_out] = j
                    n_out += 1
        offsets[block] = offset
        state[1] += 1
        if n_out < state[0]:
            state[0] = n_out
            state[1] = 0
    return work + n
