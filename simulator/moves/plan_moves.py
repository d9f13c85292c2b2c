"""Compiled moves between plans, used by annealing, by the policy's search and by ``GpuMemoryEdit-v0``.

A plan is one row per candidate gap, switched on or off, with its planned residency (without the memory of recomputation
chains, which the simulator adds). Only plans whose residency fits are proposed: a move that exceeds the limit is
repaired by emptying random gaps that are open where the load is largest. Moves:

- fill: an emptied gap is filled, then the plan is repaired;
- empty: a gap is emptied, then random emptied gaps are filled while the limit holds;
- shift: ``after``, ``copy`` or ``prefetch`` of a swap changes, or ``at`` of a recomputation;
- way: an emptied gap changes between swap, recompute, and recompute with ``keep``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import AFTER, BEFORE, EXTRA, KIND, RECOMPUTE, SWAP, WHEN
from simulator.compiled.jit import stage
from simulator.modes import KEPT, RECOMPUTED, SWAPPED

# probabilities of moves; the rest are shifts and ways
FILL = 0.4
EMPTY = 0.4
PRUNE = 3  # gaps that an empty move tries to fill
SHIFT = 8.0  # mean of a shift, in kernels
EARLY = 0.2  # probability that a recomputed gap picked for a shift is shifted
TRIES = 100  # moves tried before giving up


class Gaps(NamedTuple):
    """The m candidate gaps of a program with n kernels."""

    nbytes: NDArray[np.int64]  # (m,)
    ways: NDArray[np.int64]  # (m, 4, 6) row of each way to empty a gap
    weights: NDArray[np.float64]  # (m, 4) relative probability of each way
    opens: NDArray[np.int64]  # (m,) kernel after which a gap is open
    since: NDArray[np.int64]  # (m,) kernels from the last write to ``opens``
    earlier: NDArray[np.int64]  # (m,) previous gap of the same tensor, or -1


class PlanArrays(NamedTuple):
    """A plan: a row per gap, whether the gap is emptied, and the planned residency."""

    rows: NDArray[np.int64]  # (m, 6)
    on: NDArray[np.bool_]  # (m,)
    load: NDArray[np.int64]  # (n,)


class Scratch(NamedTuple):
    """Work arrays of ``propose``."""

    differ: NDArray[np.int64]  # number of gaps in which ``new`` may differ from ``now``, then these; first -1: any
    row: NDArray[np.int64]  # (6,) row under construction
    plan: NDArray[np.int64]  # (m, 6) rows in use of the last proposed plan


@stage(entry=True)
def uniform(state):
    """Returns a uniform number in [0, 1), by xorshift64* (Vigna, 2016).

    Passing a NumPy generator takes longer than making a move.

    Args:
        state: uint64 (1,), not 0.
    """
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@stage
def add_between(load, after, before, nbytes):
    """Adds ``nbytes`` to the load between ``after`` and ``before``, over the boundary if they wrap."""
    if after >= before:
        for k in range(before):
            load[k] += nbytes
        before = load.shape[0]
    for k in range(after + 1, before):
        load[k] += nbytes


@stage
def _back(row):
    """Returns the kernel before which the tensor is resident again."""
    return row[WHEN] if row[KIND] == RECOMPUTE and row[WHEN] >= 0 else row[BEFORE]


@stage
def _differs(differ, i):
    """Records that gap i of the proposed plan may differ from the current one."""
    count = differ[0]
    if 0 <= count < differ.shape[0] - 1:
        differ[1 + count] = i
        differ[0] = count + 1
    else:
        differ[0] = -1


@stage
def _start(now, new, differ):
    """Copies the current plan to the proposed one."""
    count = differ[0]
    for j in range(count if count >= 0 else now.on.shape[0]):
        i = differ[1 + j] if count >= 0 else j
        new.on[i] = now.on[i]
        for c in range(now.rows.shape[1]):
            new.rows[i, c] = now.rows[i, c]
    for k in range(now.load.shape[0]):
        new.load[k] = now.load[k]
    differ[0] = 0


@stage(entry=True)
def put(plan, nbytes, differ, i, empty, row):
    """Empties gap i of a plan as ``row`` specifies, or fills it."""
    _differs(differ, i)
    rows = plan.rows
    if plan.on[i]:
        add_between(plan.load, rows[i, AFTER], _back(rows[i]), nbytes[i])
    if empty:
        add_between(plan.load, row[AFTER], _back(row), -nbytes[i])
    plan.on[i] = empty
    for c in range(rows.shape[1]):
        rows[i, c] = row[c]


@stage
def _fits(load, after, before, room):
    """Returns whether the load between ``after`` and ``before`` is at most ``room``."""
    n = load.shape[0]
    k = after + 1 if after + 1 < n else 0
    while k != before:
        if load[k] > room:
            return False
        k = k + 1 if k + 1 < n else 0
    return True


@stage
def _pick(rng, on, is_on):
    """Returns a random gap that is on (or off); -1 if none is."""
    count = 0
    for i in range(on.shape[0]):
        count += on[i] == is_on
    if not count:
        return -1
    remaining = int(uniform(rng) * count)
    for i in range(on.shape[0]):
        if on[i] == is_on:
            if not remaining:
                return i
            remaining -= 1
    return -1


@stage
def _weighted_off(rng, on, weights, rows, moved, k):
    """Returns a random filled gap, by weight; with k >= 0, one that is open at kernel k and not ``moved``."""
    total = 0.0
    for pass_index in range(2):
        threshold = uniform(rng) * total if pass_index else 0.0
        for i in range(on.shape[0]):
            if on[i] or i == moved:
                continue
            if k >= 0:
                after = rows[i, AFTER]
                before = rows[i, BEFORE]
                inside = after < k < before if after < before else k > after or k < before
                if not inside:
                    continue
            w = weights[i, SWAPPED] + weights[i, RECOMPUTED] + weights[i, KEPT]
            if pass_index:
                threshold -= w
                if threshold < 0.0:
                    return i
            else:
                total += w
    return -1


@stage
def _way(rng, weights, i):
    """Returns a random way to empty gap i, by weight."""
    threshold = uniform(rng) * (weights[i, SWAPPED] + weights[i, RECOMPUTED] + weights[i, KEPT])
    for way in range(SWAPPED, KEPT):
        threshold -= weights[i, way]
        if threshold < 0.0:
            return way
    for way in range(KEPT, SWAPPED, -1):  # only reached by rounding: the last way
        if weights[i, way] > 0.0:
            return way
    return SWAPPED


@stage
def _shifted(rng, row, opens, since, n, out):
    """Writes a swap with other optional kernels, or a recomputation with another ``at``, into ``out`` (see Gaps)."""
    for c in range(row.shape[0]):
        out[c] = row[c]
    shift = int(-SHIFT * math.log(1.0 - uniform(rng)))
    if row[KIND] == RECOMPUTE:
        shift = min(shift, row[BEFORE] - row[AFTER] - 1)
        out[WHEN] = row[BEFORE] - shift if shift else -1
        return
    choice = uniform(rng)
    if choice < 0.25 and since:
        shift = min(shift, since)
        out[WHEN] = (opens - shift) % n if shift else -1
        out[AFTER] = opens if shift else row[AFTER]
        return
    out[EXTRA] = out[WHEN] = -1
    if choice < 0.6:
        out[AFTER] = (opens + min(shift, (row[BEFORE] - opens - 2) % n)) % n
    elif choice < 0.85:
        out[EXTRA] = (row[BEFORE] - 1 - min(shift, (row[BEFORE] - row[AFTER] - 1) % n)) % n


@stage
def _settle(plan, earlier, differ):
    """Resets early copies that would be issued while an earlier gap of the tensor is open."""
    rows = plan.rows
    on = plan.on
    n = plan.load.shape[0]
    for i in range(on.shape[0]):
        if not on[i] or rows[i, KIND] == RECOMPUTE or rows[i, WHEN] < 0:
            continue
        lead = (rows[i, AFTER] - rows[i, WHEN]) % n
        j = earlier[i]
        while j >= 0:
            distance = (rows[i, AFTER] - rows[j, BEFORE]) % n
            if j != i and on[j] and (rows[i, AFTER] - _back(rows[j])) % n < lead:
                rows[i, WHEN] = -1
                _differs(differ, i)
                break
            j = earlier[j] if distance < lead and j != i else -1


@stage
def _fullest(load, limit):
    """Returns the first kernel of the largest load; -1 if that fits."""
    peak = 0
    k = -1
    for j in range(load.shape[0]):
        peak = max(peak, load[j])
    if peak > limit:
        k = 0
        while load[k] != peak:
            k += 1
    return k


@stage
def prune(rng, limit, nbytes, new, differ, i):
    """Fills random emptied gaps other than gap i while the limit holds."""
    for _ in range(PRUNE):
        j = _pick(rng, new.on, True)
        if j != i and _fits(new.load, new.rows[j, AFTER], new.rows[j, BEFORE], limit - nbytes[j]):
            put(new, nbytes, differ, j, False, new.rows[j])


@stage
def repair(rng, limit, gaps, new, differ, i):
    """Empties random gaps other than i where the load is largest, until the plan fits; returns whether it does."""
    for _ in range(new.on.shape[0]):
        k = _fullest(new.load, limit)
        if k < 0:
            _settle(new, gaps.earlier, differ)
            return True
        j = _weighted_off(rng, new.on, gaps.weights, new.rows, i, k)
        if j < 0:
            return False
        put(new, gaps.nbytes, differ, j, True, gaps.ways[j, _way(rng, gaps.weights, j)])
    return False


@stage
def rows_in_use(plan, out):
    """Writes the rows of the gaps that a plan empties; returns their number."""
    count = 0
    for i in range(plan.on.shape[0]):
        if plan.on[i]:
            for c in range(out.shape[1]):
                out[count, c] = plan.rows[i, c]
            count += 1
    return count


@stage(entry=True)
def propose(rng, limit, gaps, now, new, scratch):
    """Makes ``new`` a neighbor of the plan ``now`` that fits, and writes its rows in use into ``scratch.plan``.

    Returns:
        The number of rows, or -1 if no move was found.
    """
    nbytes = gaps.nbytes
    ways = gaps.ways
    weights = gaps.weights
    (differ, row, plan) = scratch
    rows = now.rows
    on = now.on
    n = now.load.shape[0]
    for _ in range(TRIES):
        _start(now, new, differ)
        kind = uniform(rng)
        if FILL <= kind < FILL + EMPTY:
            i = _weighted_off(rng, on, weights, rows, -1, -1)
            if i < 0:
                continue
            put(new, nbytes, differ, i, True, ways[i, _way(rng, weights, i)])
            prune(rng, limit, nbytes, new, differ, i)
        else:
            i = _pick(rng, on, True)
            if i < 0:
                continue
            n_ways = 0
            for way in range(weights.shape[1]):
                n_ways += weights[i, way] > 0.0
            if kind < FILL:
                put(new, nbytes, differ, i, False, rows[i])
            elif n_ways > 1 and uniform(rng) < 0.5:
                put(new, nbytes, differ, i, True, ways[i, _way(rng, weights, i)])
            elif rows[i, KIND] == SWAP or uniform(rng) < EARLY:
                _shifted(rng, rows[i], gaps.opens[i], gaps.since[i], n, row)
                put(new, nbytes, differ, i, True, row)
            else:
                continue
        if repair(rng, limit, gaps, new, differ, i):
            return rows_in_use(new, plan)
    return -1
