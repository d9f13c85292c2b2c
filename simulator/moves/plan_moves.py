"""Compiled moves between plans, used by annealing, by the policy's search and by ``GpuMemoryEdit-v1``.

A plan is one row per candidate gap, switched on or off, with its planned residency (without the memory of recomputation
chains, which the simulator adds). Only plans whose residency fits are proposed: a move that exceeds the limit is
repaired by emptying random gaps that are open where the load is largest. Moves:

- fill: an emptied gap is filled, then the plan is repaired;
- empty: a gap is emptied, then random emptied gaps are filled while the limit holds;
- shift: ``after``, ``copy`` or ``prefetch`` of a swap changes, or ``at`` of a recomputation;
- choice: an emptied gap changes between swap, recompute, and recompute with ``keep``.
- class: in repetitive programs, a class of alike gaps changes (``_move_class``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import AFTER, BEFORE, EXTRA, KIND, RECOMPUTE, SWAP, WHEN
from simulator.compiled.jit import stage
from simulator.modes import Choice
from simulator.moves.classes import Classes


class MoveOptions(NamedTuple):
    """Tuning of the moves; a change alters the plans of every search."""

    fill_prob: float = 0.4
    empty_prob: float = 0.4  # otherwise an emptied gap is shifted or changes its choice
    choice_prob: float = 0.5  # of another choice in place of a shift, if the gap has several
    early_prob: float = 0.2  # that a recomputation picked for a shift is shifted
    mean_shift: float = 8.0  # kernels
    prunes: int = 3  # gaps that an empty move tries to fill
    tries: int = 100  # moves tried before giving up
    run_prob: float = 0.4  # of the moves of classes
    border_prob: float = 0.3  # of the moves of classes; otherwise two classes are exchanged
    whole_prob: float = 0.3  # that a run is the whole class
    mean_run: float = 3.0  # members of another run beyond the first


OPTIONS = MoveOptions()


class Gaps(NamedTuple):
    """The m candidate gaps of a program with n kernels."""

    nbytes: NDArray[np.int64]  # (m,)
    choice_rows: NDArray[np.int64]  # (m, 4, 6) row of each ``Choice``; of RESIDENT: unused
    weights: NDArray[np.float64]  # (m, 4) relative probability of each ``Choice``; of RESIDENT: 0
    opens: NDArray[np.int64]  # (m,) kernel after which a gap is open
    since: NDArray[np.int64]  # (m,) kernels from the last write to ``opens``
    earlier: NDArray[np.int64]  # (m,) previous gap of the same tensor, or -1
    classes: Classes  # of alike gaps
    class_prob: float  # probability that a move is one of a class


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
def _restored_before(row):
    """Returns the kernel before which the tensor is resident again."""
    return row[WHEN] if row[KIND] == RECOMPUTE and row[WHEN] >= 0 else row[BEFORE]


@stage
def _record_change(differ, i):
    """Records that gap i of the proposed plan may differ from the current one."""
    count = differ[0]
    if 0 <= count < differ.shape[0] - 1:
        differ[1 + count] = i
        differ[0] = count + 1
    else:
        differ[0] = -1


@stage
def start_proposal(now, new, differ):
    """Copies the current plan to the proposed one."""
    # A rejected proposal differs from the current plan in few gaps: only these are copied back.
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
    """Empties gap i of a plan as ``row`` specifies, or fills it.

    Args:
        plan: plan to change.
        nbytes: int64 (gaps,), sizes of the tensors.
        differ: gaps in which the proposal differs, as in the move's arrays.
    """
    _record_change(differ, i)
    rows = plan.rows
    if plan.on[i]:
        add_between(plan.load, rows[i, AFTER], _restored_before(rows[i]), nbytes[i])
    if empty:
        add_between(plan.load, row[AFTER], _restored_before(row), -nbytes[i])
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
def _sample_gap(rng, on, is_on):
    """Returns a random gap that is emptied (or filled, if not ``is_on``); -1 if none is."""
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
def _total_weight(weights, i):
    """Returns the weight of all choices that empty gap i."""
    return weights[i, Choice.SWAPPED] + weights[i, Choice.RECOMPUTED] + weights[i, Choice.CHAIN_KEPT]


@stage
def _sample_filled_gap(rng, on, weights, rows, moved, k):
    """Returns a random filled gap, by weight; with k >= 0, one that is open at kernel k and not ``moved``."""
    total = 0.0
    for is_draw in range(2):  # the first pass sums the weights
        threshold = uniform(rng) * total if is_draw else 0.0
        for i in range(on.shape[0]):
            if on[i] or i == moved:
                continue
            if k >= 0:
                after = rows[i, AFTER]
                before = rows[i, BEFORE]
                is_open = after < k < before if after < before else k > after or k < before
                if not is_open:
                    continue
            weight = _total_weight(weights, i)
            if is_draw:
                threshold -= weight
                if threshold < 0.0:
                    return i
            else:
                total += weight
    return -1


@stage
def _sample_choice(rng, weights, i):
    """Returns a random choice that empties gap i, by weight."""
    threshold = uniform(rng) * _total_weight(weights, i)
    last: int = Choice.SWAPPED
    for choice in range(Choice.SWAPPED, weights.shape[1]):
        threshold -= weights[i, choice]
        if threshold < 0.0:
            return choice
        if weights[i, choice] > 0.0:
            last = choice
    return last  # rounding may leave a remainder after the last choice


@stage
def shift_row(rng, row, opens, since, n, out):
    """Writes a swap with other optional kernels, or a recomputation with another ``at``, into ``out`` (see Gaps)."""
    for c in range(row.shape[0]):
        out[c] = row[c]
    # Exponential distances: most useful kernels are close to the gap's ends.
    shift = int(-OPTIONS.mean_shift * math.log(1.0 - uniform(rng)))
    if row[KIND] == RECOMPUTE:
        shift = min(shift, row[BEFORE] - row[AFTER] - 1)
        out[WHEN] = row[BEFORE] - shift if shift else -1
        return
    kind = uniform(rng)  # cumulative probabilities: 0.25 copy, 0.6 after, 0.85 prefetch, 1 none
    if kind < 0.25 and since:
        # The copy must follow the last write; it is combined with the earliest eviction, when the gap opens.
        shift = min(shift, since)
        out[WHEN] = (opens - shift) % n if shift else -1
        out[AFTER] = opens if shift else row[AFTER]
        return
    out[EXTRA] = out[WHEN] = -1
    if kind < 0.6:
        out[AFTER] = (opens + min(shift, (row[BEFORE] - opens - 2) % n)) % n
    elif kind < 0.85:
        out[EXTRA] = (row[BEFORE] - 1 - min(shift, (row[BEFORE] - row[AFTER] - 1) % n)) % n


@stage
def _reset_early_copies(plan, earlier, differ):
    """Resets early copies that would be issued while an earlier gap of the tensor is open."""
    rows = plan.rows
    on = plan.on
    n = plan.load.shape[0]
    for i in range(on.shape[0]):
        if not on[i] or rows[i, KIND] == RECOMPUTE or rows[i, WHEN] < 0:
            continue
        lead = (rows[i, AFTER] - rows[i, WHEN]) % n
        # Gaps of a tensor are linked backwards, over the boundary to itself; those further away than ``lead`` cannot
        # be open when the copy is issued.
        j = earlier[i]
        while j >= 0:
            distance = (rows[i, AFTER] - rows[j, BEFORE]) % n
            if j != i and on[j] and (rows[i, AFTER] - _restored_before(rows[j])) % n < lead:
                rows[i, WHEN] = -1
                _record_change(differ, i)
                break
            j = earlier[j] if distance < lead and j != i else -1


@stage
def _fullest(load, limit):
    """Returns the first kernel of the largest load; -1 if that fits."""
    peak = 0
    k = -1
    # Two passes: the maximum alone vectorizes, and most plans fit.
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
    for _ in range(OPTIONS.prunes):
        j = _sample_gap(rng, new.on, True)
        if j != i and _fits(new.load, new.rows[j, AFTER], new.rows[j, BEFORE], limit - nbytes[j]):
            put(new, nbytes, differ, j, False, new.rows[j])


@stage
def repair(rng, limit, gaps, new, differ, i):
    """Empties random gaps other than i where the load is largest, until the plan fits; returns whether it does."""
    for _ in range(new.on.shape[0]):
        k = _fullest(new.load, limit)
        if k < 0:
            _reset_early_copies(new, gaps.earlier, differ)
            return True
        j = _sample_filled_gap(rng, new.on, gaps.weights, new.rows, i, k)
        if j < 0:
            return False
        put(new, gaps.nbytes, differ, j, True, gaps.choice_rows[j, _sample_choice(rng, gaps.weights, j)])
    return False


@stage
def choice_in(on, rows, i):
    """Returns the ``Choice`` of a plan in gap i."""
    if not on[i]:
        return Choice.RESIDENT
    if rows[i, KIND] == RECOMPUTE:
        return Choice.CHAIN_KEPT if rows[i, EXTRA] == 1 else Choice.RECOMPUTED
    return Choice.SWAPPED


@stage
def _choose(gaps, new, differ, i, choice):
    """Makes a choice in gap i if the gap has it; returns whether the plan changes."""
    if choice == choice_in(new.on, new.rows, i):
        return False
    if choice == Choice.RESIDENT:
        put(new, gaps.nbytes, differ, i, False, new.rows[i])
        return True
    if gaps.weights[i, choice] <= 0.0:
        return False
    put(new, gaps.nbytes, differ, i, True, gaps.choice_rows[i, choice])
    return True


@stage
def _sample_class(rng, chances):
    """Returns a random class, by its chance."""
    threshold = uniform(rng)
    last = chances.shape[0] - 1
    for c in range(last):
        threshold -= chances[c]
        if threshold < 0.0:
            return c
    return last


@stage
def _sample_length(rng):
    """Returns the random number of members of a run that is not a whole class."""
    return 1 + int(-OPTIONS.mean_run * math.log(1.0 - uniform(rng)))


@stage
def _sample_run(rng, begin, end):
    """Returns the bounds of a random run within the bounds of a class."""
    if uniform(rng) < OPTIONS.whole_prob:
        return begin, end
    first = begin + int(uniform(rng) * (end - begin))
    return first, min(first + _sample_length(rng), end)


@stage
def _move_border(rng, gaps, new, differ, begin, end):
    """Moves a random border between members of different choices; returns whether the plan changes."""
    members = gaps.classes.members
    borders = 0
    border = end
    for p in range(begin + 1, end):
        if choice_in(new.on, new.rows, members[p - 1]) != choice_in(new.on, new.rows, members[p]):
            borders += 1
            if uniform(rng) * borders < 1.0:
                border = p
    if border == end:
        return False
    length = _sample_length(rng)
    is_forward = uniform(rng) < 0.5
    choice = choice_in(new.on, new.rows, members[border - 1 if is_forward else border])
    changed = False
    for p in range(border, min(border + length, end)) if is_forward else range(max(border - length, begin), border):
        changed |= _choose(gaps, new, differ, members[p], choice)
    return changed


@stage
def _exchange(rng, gaps, new, differ, first, last):
    """Fills a run and empties one of another class that is at least as large; returns whether both change."""
    (bounds, members) = (gaps.classes.begin, gaps.classes.members)
    filled = 0
    for p in range(first, last):
        i = members[p]
        if _choose(gaps, new, differ, i, Choice.RESIDENT):
            filled += gaps.nbytes[i]
    other = _sample_class(rng, gaps.classes.chances)
    if filled == 0 or other == gaps.classes.owners[members[first]]:
        return False
    begin = bounds[other]
    end = bounds[other + 1]
    p = begin + int(uniform(rng) * (end - begin))
    choice = _sample_choice(rng, gaps.weights, members[p])
    emptied = 0
    while p < end and emptied < filled:
        i = members[p]
        if not new.on[i] and _choose(gaps, new, differ, i, choice):
            emptied += gaps.nbytes[i]
        p += 1
    return emptied > 0


@stage
def _move_class(rng, gaps, new, differ):
    """Makes a random move of a class of alike gaps; returns whether the plan changes.

    A run of consecutive members takes one choice, or the border between members of different choices moves, or a run is
    filled and one of another class emptied.
    """
    c = _sample_class(rng, gaps.classes.chances)
    begin = gaps.classes.begin[c]
    end = gaps.classes.begin[c + 1]
    kind = uniform(rng)
    if OPTIONS.run_prob <= kind < OPTIONS.run_prob + OPTIONS.border_prob:
        return _move_border(rng, gaps, new, differ, begin, end)
    first, last = _sample_run(rng, begin, end)
    if kind >= OPTIONS.run_prob:
        return _exchange(rng, gaps, new, differ, first, last)
    choice = int(uniform(rng) * gaps.weights.shape[1])
    changed = False
    for p in range(first, last):
        changed |= _choose(gaps, new, differ, gaps.classes.members[p], choice)
    return changed


@stage
def _repair_by_runs(rng, limit, gaps, new, differ):
    """Repairs as ``repair``; after each random gap, empties alike ones next to it while the load is too large there."""
    (bounds, members) = (gaps.classes.begin, gaps.classes.members)
    for _ in range(new.on.shape[0]):
        k = _fullest(new.load, limit)
        if k < 0:
            _reset_early_copies(new, gaps.earlier, differ)
            return True
        i = _sample_filled_gap(rng, new.on, gaps.weights, new.rows, -1, k)
        if i < 0:
            return False
        choice = _sample_choice(rng, gaps.weights, i)
        c = gaps.classes.owners[i]
        p = gaps.classes.slots[i]
        step = 1 if uniform(rng) < 0.5 else -1
        while bounds[c] <= p < bounds[c + 1] and new.load[k] > limit:
            i = members[p]
            if not new.on[i]:
                _choose(gaps, new, differ, i, choice)
            p += step
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
def propose(rng, limit, gaps, now, new, scratch, class_prob):
    """Makes ``new`` a neighbor of the plan ``now`` that fits, and writes its rows in use into ``scratch.plan``.

    Args:
        rng, limit, gaps, now, new, scratch: as in ``Moves.arrays``.
        class_prob: probability that the move is one of a class; mostly ``gaps.class_prob``.

    Returns:
        The number of rows, or -1 if no move was found.
    """
    nbytes = gaps.nbytes
    weights = gaps.weights
    (differ, row, plan) = scratch
    rows = now.rows
    on = now.on
    for _ in range(OPTIONS.tries):
        start_proposal(now, new, differ)
        # No number is drawn for a program without repetition, so that its plans do not depend on classes.
        if class_prob > 0.0 and uniform(rng) < class_prob:
            if _move_class(rng, gaps, new, differ) and _repair_by_runs(rng, limit, gaps, new, differ):
                return rows_in_use(new, plan)
            continue
        kind = uniform(rng)
        if OPTIONS.fill_prob <= kind < OPTIONS.fill_prob + OPTIONS.empty_prob:
            i = _sample_filled_gap(rng, on, weights, rows, -1, -1)
            if i < 0:
                continue
            put(new, nbytes, differ, i, True, gaps.choice_rows[i, _sample_choice(rng, weights, i)])
            prune(rng, limit, nbytes, new, differ, i)
        else:
            i = _sample_gap(rng, on, True)
            if i < 0:
                continue
            n_choices = 0
            for choice in range(weights.shape[1]):
                n_choices += weights[i, choice] > 0.0
            if kind < OPTIONS.fill_prob:
                put(new, nbytes, differ, i, False, rows[i])
            elif n_choices > 1 and uniform(rng) < OPTIONS.choice_prob:
                put(new, nbytes, differ, i, True, gaps.choice_rows[i, _sample_choice(rng, weights, i)])
            elif rows[i, KIND] == SWAP or uniform(rng) < OPTIONS.early_prob:
                shift_row(rng, rows[i], gaps.opens[i], gaps.since[i], now.load.shape[0], row)
                put(new, nbytes, differ, i, True, row)
            else:
                continue
        if repair(rng, limit, gaps, new, differ, i):
            return rows_in_use(new, plan)
    return -1
