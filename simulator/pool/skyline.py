"""Compiled search of ``optimal``: decides whether blocks fit under a capacity.

Time is divided into *sections*, the instants of locally maximal sets of live blocks: two blocks meet if and only if
they share a section. A block covers consecutive sections of a line or a ring. The *skyline* of a section is a height
below which nothing more is placed; a *basin* is a run of sections of equal height between higher ones. In a section of
a basin, the branches are the blocks that cover it, fit into the basin and rest on its ground, and leaving the section
empty up to the next possible height. They are complete for *canonical* packings (MiniMalloc, section 4: every block
rests on the bottom or on another block), and every packing can be made canonical. ``fits`` is a depth-first search on
a ``State``; changes are recorded on a trail for ``undo``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from simulator.compiled.encoding import Ints
from simulator.compiled.jit import jit

NOWHERE = np.int64(1 << 62)
MAX_DEPTH = 8000  # maximum recursion depth; a frame takes about 500 bytes of an 8 MiB stack


class Verdict(IntEnum):
    """Answer of a search."""

    FITS = 1
    DOES_NOT_FIT = 0
    GAVE_UP = -1


# Counters of a search: visited nodes, and nodes after which it gives up; placed blocks; changes on the trail; keys in
# ``failed``; stamp of the latest lift.
COUNTERS = np.dtype([(name, np.int64) for name in ("nodes", "budget", "placed", "changed", "failed", "stamp")])


class State(NamedTuple):
    """Search state of n blocks over m sections. Heights and sizes share one unit, such as bytes."""

    first: Ints  # [n] the first section of a block
    width: Ints  # [n] number of sections it covers
    size: Ints  # [n]
    lowest: Ints  # [n] highest skyline under a waiting block
    offsets: Ints  # [n] of placed blocks
    priority: Any  # float64[n] branching priority
    name: Any  # uint64[n] random, for the hash
    # Waiting blocks of section s: members[members_at[s] : members_at[s] + held[s]]. Index of block j in ``members`` for
    # the c-th section it covers: place[place_at[j] + c].
    members: Ints
    members_at: Ints  # [m + 1]
    n_waiting: Ints  # [m]
    place: Ints
    place_at: Ints  # [n + 1]
    skyline: Ints  # [m]
    load: Ints  # [m] sizes of the waiting blocks
    crossed: Ints  # [m] waiting blocks that continue into the next section
    names: Any  # uint64[m] sum of the names of the waiting blocks that start here
    weight: Any  # float64[m] number of failures per section
    raised: Ints  # [m] queue of sections whose skyline rose
    stamped: Ints  # [m] equals the stamp if a block's ``lowest`` rose here
    placed: Ints  # [n] placed blocks in order of placement
    changes: Ints  # [2, ...] trail of the skyline (index s) and of lowest (index m + j), with the value before
    failed: Any  # uint64[2**k] hash table of infeasible subproblems
    counters: Any  # (1,) COUNTERS
    stop: Ints  # [1] nonzero: another search has the answer


def state(first: Ints, width: Ints, size: Ints, sections: int, stop: Ints, table_bits: int = 20) -> State:
    """Returns the initial state without placed blocks; the arguments are those of ``State``."""
    n = len(size)
    place_at = np.concatenate(([0], np.cumsum(width)))
    owner = np.repeat(np.arange(n), width)
    where = (first[owner] + np.arange(len(owner)) - place_at[owner]) % sections
    order = np.argsort(where, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    load = np.zeros(sections, np.int64)
    crossed = np.zeros(sections, np.int64)
    names = np.zeros(sections, np.uint64)
    np.add.at(load, where, size[owner])
    np.add.at(crossed, where, np.arange(1, len(owner) + 1) < place_at[owner + 1])
    name = np.random.default_rng(0).integers(1 << 63, size=n, dtype=np.uint64)
    np.add.at(names, first, name)
    return State(
        first,
        width,
        size,
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n),
        name,
        owner[order],
        np.searchsorted(where[order], np.arange(sections + 1)),
        np.bincount(where, minlength=sections),
        place,
        place_at,
        np.zeros(sections, np.int64),
        load,
        crossed,
        names,
        np.ones(sections),
        np.zeros(sections, np.int64),
        np.zeros(sections, np.int64),
        np.zeros(n, np.int64),
        np.zeros((2, 32 * (len(where) + n)), np.int64),
        np.zeros(1 << table_bits, np.uint64),
        np.zeros(1, COUNTERS),
        stop,
    )


@jit(nogil=True)
def undo(x, placed, changed):
    """Restores an earlier state, given its numbers of placed blocks and changes."""
    count = x.counters[0]
    m = len(x.skyline)
    while count.placed > placed:
        count.placed -= 1
        j = x.placed[count.placed]
        x.names[x.first[j]] += x.name[j]
        for c in range(x.width[j]):
            s = (x.first[j] + c) % m
            x.load[s] += x.size[j]
            x.crossed[s] += c + 1 < x.width[j]
            x.n_waiting[s] += 1
    while count.changed > changed:
        count.changed -= 1
        index = x.changes[0, count.changed]
        value = x.changes[1, count.changed]
        if index < m:
            x.skyline[index] = value
        else:
            x.lowest[index - m] = value


@jit(nogil=True)
def _log(x, index, value):
    count = x.counters[0]
    position = count.changed
    x.changes[0, position] = index
    x.changes[1, position] = value
    count.changed = position + 1


@jit(nogil=True)
def _lift(x, section, height):
    _log(x, section, x.skyline[section])
    x.skyline[section] = height


@jit(nogil=True)
def _settle(x, capacity, n_raised):
    """Lifts the skyline to the lowest heights of waiting blocks; returns False if a load does not fit above it."""
    count = x.counters[0]
    # Starts from the sections x.raised[:n_raised], whose skyline rose.
    m = len(x.skyline)
    if count.changed + 2 * len(x.members) > x.changes.shape[1]:
        count.budget = 0  # no room on the trail: give up
        return True
    while n_raised:
        count.stamp += 1
        stamp = count.stamp
        for s in x.raised[:n_raised]:
            x.stamped[s] = stamp
            for j in x.members[x.members_at[s] : x.members_at[s] + x.n_waiting[s]]:
                if x.lowest[j] < x.skyline[s]:
                    _log(x, m + j, x.lowest[j])
                    x.lowest[j] = x.skyline[s]
                    section = x.first[j]
                    for _ in range(x.width[j]):
                        x.stamped[section] = stamp
                        section = section + 1 if section + 1 < m else 0
        n_raised = 0
        for s in range(m):
            if x.stamped[s] != stamp or x.n_waiting[s] == 0:
                continue
            height = NOWHERE
            for j in x.members[x.members_at[s] : x.members_at[s] + x.n_waiting[s]]:
                height = min(height, x.lowest[j])
            if height > x.skyline[s]:
                _lift(x, s, height)
                x.raised[n_raised] = s
                n_raised += 1
            if height + x.load[s] > capacity:
                x.weight[s] += 1
                return False
    return True


@jit(nogil=True)
def _place(x, capacity, j, ground):
    """Places block j on the ground; returns False if the remaining blocks cannot fit."""
    count = x.counters[0]
    m = len(x.skyline)
    x.offsets[j] = ground
    x.placed[count.placed] = j
    count.placed += 1
    x.names[x.first[j]] -= x.name[j]
    for c in range(x.width[j]):
        s = (x.first[j] + c) % m
        x.load[s] -= x.size[j]
        x.crossed[s] -= c + 1 < x.width[j]
        x.n_waiting[s] -= 1  # swap with the last waiting block
        place = x.place[x.place_at[j] + c]
        last = x.members_at[s] + x.n_waiting[s]
        other = x.members[last]
        x.members[last] = j
        x.members[place] = other
        x.place[x.place_at[other] + (s - x.first[other]) % m] = place
        x.place[x.place_at[j] + c] = last
        _lift(x, s, ground + x.size[j])
        x.raised[c] = s
    return _settle(x, capacity, x.width[j])


@jit(nogil=True)
def _mix(value):
    """Computes splitmix64's finalizer (Steele, Lea and Flood, 2014)."""
    value = np.uint64(value)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@jit(nogil=True)
def _key(x, begin, length):
    """Returns a nonzero 64-bit hash of a subproblem: the waiting blocks of the arc and the skyline under them."""
    m = len(x.skyline)
    key = np.uint64(0)
    s = begin
    for _ in range(length):
        key += x.names[s] + _mix(np.uint64(x.skyline[s]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(s))
        s = s + 1 if s + 1 < m else 0
    return key | np.uint64(1)


@jit(nogil=True)
def _find(table, key):
    """Returns the free slot for a key; negative if the table contains it."""
    mask = len(table) - 1
    slot = np.int64(key >> np.uint64(8)) & mask
    while table[slot] != 0:
        if table[slot] == key:
            return np.int64(-1)
        slot = (slot + 1) & mask
    return np.int64(slot)


@jit(nogil=True)
def _resting(x, section):
    """Returns the blocks that can rest on a basin's ground in this section, by descending priority, and their count."""
    members = x.members[x.members_at[section] : x.members_at[section] + x.n_waiting[section]]
    resting = np.empty(len(members), np.int64)
    n = 0
    for j in members:
        if x.lowest[j] == x.skyline[section]:
            position = n
            while position > 0 and x.priority[resting[position - 1]] < x.priority[j]:
                resting[position] = resting[position - 1]
                position -= 1
            resting[position] = j
            n += 1
    return resting, n


@jit(nogil=True)
def _branch(x, capacity, begin, length, closed, by_weight):
    """Returns the section with the fewest branches for its weight, and up to where it may stay empty, or NOWHERE."""
    m = len(x.skyline)
    if closed:  # start at an edge of a basin
        for i in range(m):
            if x.skyline[(begin + i - 1) % m] != x.skyline[(begin + i) % m]:
                begin = (begin + i) % m
                break
    best = -1
    best_score = np.inf
    best_height = NOWHERE
    inside = np.empty(len(x.size), np.int64)
    i = 0
    while i < length:
        ground = x.skyline[(begin + i) % m]
        basin = i
        while i < length and x.skyline[(begin + i) % m] == ground:
            i += 1
        walled = not closed or i - basin == length  # the ends of an arc are banks without a top
        left = NOWHERE if walled and basin == 0 else x.skyline[(begin + basin - 1) % m]
        right = NOWHERE if walled and i == length else x.skyline[(begin + i) % m]
        if left <= ground or right <= ground:
            continue
        n_inside = 0
        for offset in range(basin, i):
            s = (begin + offset) % m
            for j in x.members[x.members_at[s] : x.members_at[s] + x.n_waiting[s]]:
                if x.first[j] == s and x.lowest[j] == ground:
                    inside[n_inside] = j
                    n_inside += 1
        for offset in range(basin, i):
            s = (begin + offset) % m
            height = min(left, right)
            branches = 0
            for j in inside[:n_inside]:
                if (s - x.first[j]) % m < x.width[j]:
                    branches += 1
                else:
                    height = min(height, ground + x.size[j])
            if height < NOWHERE and height + x.load[s] <= capacity:
                branches += 1
            else:
                height = NOWHERE
            score = branches / x.weight[s] if by_weight else branches + ground / capacity
            if branches == 1:
                return s, height
            if score < best_score:
                best = s
                best_score = score
                best_height = height
    return best, best_height


@jit(nogil=True)
def fits(x, capacity, begin, length, depth, by_weight):
    """Decides whether the waiting blocks of an arc of sections fit under ``capacity``; if so, ``x`` has their offsets.

    Args:
        x: the State; unless the blocks fit, the caller must revert changes (``undo``).
        capacity: footprint in bytes.
        begin: first section of the arc; no waiting block crosses its ends unless it is the whole ring.
        length: sections of the arc.
        depth: recursion depth.
        by_weight: tie-break among equally few branches: most frequent failures first, else lowest skyline first.

    Returns:
        A Verdict; GAVE_UP if the node budget is exhausted or ``x.stop`` is set.
    """
    count = x.counters[0]
    m = len(x.skyline)
    if count.nodes >= count.budget or x.stop[0] or depth > MAX_DEPTH:
        return Verdict.GAVE_UP
    closed = False  # a ring without a cut
    if length == m and x.crossed[(begin - 1) % m]:
        closed = True
        for s in range(m):
            if x.crossed[s] == 0:
                begin = (s + 1) % m
                closed = False
                break
    if not closed:  # parts not joined by a waiting block are independent problems
        is_whole = False
        i = 0
        while i < length:
            start = i
            while x.crossed[(begin + i) % m]:
                i += 1
            i += 1
            is_whole = i - start == length
            if not is_whole and x.load[(begin + start) % m]:
                answer = fits(x, capacity, (begin + start) % m, i - start, depth + 1, by_weight)
                if answer != Verdict.FITS:
                    return answer
        if not is_whole or x.load[begin] == 0:
            return Verdict.FITS

    key = _key(x, begin, length)
    if _find(x.failed, key) < 0:
        return Verdict.DOES_NOT_FIT
    section, height = _branch(x, capacity, begin, length, closed, by_weight)
    ground = x.skyline[section]
    resting, n_resting = _resting(x, section)
    placed = count.placed
    changed = count.changed
    for i in range(n_resting + 1):
        count.nodes += 1
        if i < n_resting:
            j = resting[i]
            twin = False
            for k in resting[:i]:
                twin |= x.size[k] == x.size[j] and x.first[k] == x.first[j] and x.width[k] == x.width[j]
            if twin:
                continue
            possible = _place(x, capacity, j, ground)
        elif height < NOWHERE:
            _lift(x, section, height)
            x.raised[0] = section
            possible = _settle(x, capacity, 1)
        else:
            break
        if possible:
            answer = fits(x, capacity, begin, length, depth + 1, by_weight)
            if answer != Verdict.DOES_NOT_FIT:
                return answer
        undo(x, placed, changed)
    if 2 * count.failed < len(x.failed):
        x.failed[_find(x.failed, key)] = key
        count.failed += 1
    return Verdict.DOES_NOT_FIT
