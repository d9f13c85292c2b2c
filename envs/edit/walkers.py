"""Compiled steps of ``GpuMemoryEdit-v0``: neighbors of a plan, their trials, and features of the simulation log.

A walker is a plan under edit. All walkers of a task share the arrays of ``Walkers``, one row each. A neighbor is a
list of changes, each a gap and a mode (FILL to SHIFT), proposed, repaired and pruned by plan_moves.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.columns import integers
from simulator.compiled.encoding import (
    AFTER,
    BEFORE,
    EXTRA,
    KIND,
    NEVER,
    RECOMPUTE,
    Cause,
    Event,
)
from simulator.compiled.jit import stage
from simulator.compiled.scoring import score_one
from simulator.modes import KEPT, RECOMPUTED, SWAPPED
from simulator.moves.plan_moves import PlanArrays, _shifted, _start, propose, prune, put, repair, rows_in_use, uniform

# changes of a gap; 1 to 3 are SWAPPED, RECOMPUTED, KEPT
FILL = 0
SHIFT = 4
MODES = 5
CHANGES = 10  # maximum changes of a neighbor
BINS = 64  # bins of time per iteration
PLAN_COLUMNS = 17
TRIAL_COLUMNS = 3
BIN_COLUMNS = 7
WHOLE_COLUMNS = 6
METROPOLIS, BETTER, ALWAYS = range(3)
LOOK = 0.02  # fraction of the ideal time by which a plan may be slower before its simulation is stopped
FAILED = 2.0  # points: effect reported for an infeasible plan, or one slower by more than LOOK

# State of a walker: times of the current and the best plan; edits tried, accepted, and tried since the best plan; rows
# of the best plan; the budget; result of the last trial: time_ns (NEVER: infeasible) and acceptance (``accept``).
STATE = integers("now_ns best_ns steps accepted since best_rows budget time_ns accept")


class Walkers(NamedTuple):
    """W plans of one task with m gaps and n kernels, and M neighbors of each."""

    rows: NDArray[np.int64]  # (W, m, 6)
    on: NDArray[np.bool_]  # (W, m)
    load: NDArray[np.int64]  # (W, n)
    rng: NDArray[np.uint64]  # (W, 1)
    state: NDArray[Any]  # (W,) STATE
    best: NDArray[np.int64]  # (W, m, 6)
    codes: NDArray[np.int64]  # (W, M, CHANGES) gap * MODES + mode, or -1
    changed_rows: NDArray[np.int64]  # (W, M, CHANGES, 6)
    counts: NDArray[np.int64]  # (W, M) changes of each neighbor; 0: no neighbor found
    effect: NDArray[np.float32]  # (W, m, MODES) effect of the last trial of each mode
    tried_at: NDArray[np.int64]  # (W, m, MODES) state.steps at that trial, or -1
    accepted_at: NDArray[np.int64]  # (W, m, MODES) state.accepted at that trial
    changed_at: NDArray[np.int64]  # (W, m) state.steps at the gap's last change, or -1


@stage
def _log(x, scale):
    """Returns sign(x) log(1 + scale |x|)."""
    return math.log1p(x * scale) if x >= 0 else -math.log1p(-x * scale)


@stage(entry=True)
def effect_of(ns, now_ns, ideal):
    """Returns the observed effect of a trial: log-scaled points of overhead in [-1.24, 1.24]."""
    points = FAILED if ns >= NEVER else min(max(100.0 * (ns - now_ns) / ideal, -FAILED), FAILED)
    return _log(points, 20.0) / 3


@stage
def mode_of(on, rows, g):
    """Returns the mode of gap g: FILL, SWAPPED, RECOMPUTED or KEPT."""
    if not on[g]:
        return 0
    if rows[g, KIND] == RECOMPUTE:
        return KEPT if rows[g, EXTRA] == 1 else RECOMPUTED
    return SWAPPED


@stage
def _equal_rows(a, b):
    """Returns whether two rows are equal."""
    for c in range(a.shape[0]):
        if a[c] != b[c]:
            return False
    return True


@stage
def plan_of(walkers, i):
    """Returns the current plan of walker i."""
    return PlanArrays(walkers.rows[i], walkers.on[i], walkers.load[i])


@stage
def _read_changes(current, new, differ, codes, rows):
    """Writes the changes from ``current`` to ``new`` and returns their number; 0 if there are more than CHANGES."""
    count = 0
    codes[:] = -1
    if differ[0] < 0:
        return 0
    for j in range(differ[0]):
        g = differ[1 + j]
        seen = False
        for c in range(count):
            seen = seen or codes[c] // MODES == g
        if seen:
            continue
        old_mode = mode_of(current.on, current.rows, g)
        new_mode = mode_of(new.on, new.rows, g)
        if old_mode == new_mode and (new_mode == FILL or _equal_rows(new.rows[g], current.rows[g])):
            continue
        if count == CHANGES:
            codes[:] = -1
            return 0
        codes[count] = g * MODES + (SHIFT if old_mode == new_mode else new_mode)
        for c in range(new.rows.shape[1]):
            rows[count, c] = new.rows[g, c]
        count += 1
    return count


@stage
def draw(walkers, i, slot, limit, gaps, new, scratch):
    """Draws neighbor ``slot`` of walker i. ``new`` must match its plan, or scratch.differ[0] must be -1."""
    current = plan_of(walkers, i)
    walkers.counts[i, slot] = 0
    walkers.codes[i, slot, :] = -1
    if propose(walkers.rng[i], limit, gaps, current, new, scratch) < 0:
        scratch.differ[0] = -1
        return
    walkers.counts[i, slot] = _read_changes(
        current, new, scratch.differ, walkers.codes[i, slot], walkers.changed_rows[i, slot]
    )


@stage(entry=True)
def draw_all(walkers, members, limit, gaps, new, scratch):
    """Draws all neighbors of the walkers ``members``."""
    for i in members:
        scratch.differ[0] = -1
        for slot in range(walkers.counts.shape[1]):
            draw(walkers, i, slot, limit, gaps, new, scratch)


@stage(entry=True)
def write_mask(walkers, members, gaps, mask):
    """Writes to ``mask`` which (gap, mode) actions change the plan, (walkers, m * MODES)."""
    for i in members:
        on = walkers.on[i]
        rows = walkers.rows[i]
        for g in range(on.shape[0]):
            mode = mode_of(on, rows, g)
            mask[i, g * MODES + FILL] = mask[i, g * MODES + SHIFT] = on[g]
            for a in range(SWAPPED, SHIFT):
                changes = gaps.weights[g, a] > 0.0 and not (mode == a and _equal_rows(rows[g], gaps.ways[g, a]))
                mask[i, g * MODES + a] = changes


@stage
def _change_gap(rng, limit, gaps, current, new, scratch, g, mode):
    """Sets ``new`` to the plan with gap g in another mode, repaired and pruned as in ``propose``; False on failure."""
    nbytes = gaps.nbytes
    differ = scratch.differ
    rows = current.rows
    _start(current, new, differ)
    if mode == FILL:
        put(new, nbytes, differ, g, False, rows[g])
    elif mode == SHIFT:
        _shifted(rng, rows[g], gaps.opens[g], gaps.since[g], current.load.shape[0], scratch.row)
        put(new, nbytes, differ, g, True, scratch.row)
    else:
        put(new, nbytes, differ, g, True, gaps.ways[g, mode])
        if not current.on[g]:
            prune(rng, limit, nbytes, new, differ, g)
    return repair(rng, limit, gaps, new, differ, g)


@stage
def open_trial(state, rng, accept, hot, cold, ideal):
    """Counts a trial and draws its acceptance threshold (time in ns) into state.accept."""
    now_ns = state.now_ns
    state.steps += 1
    state.since += 1
    progress = min(state.steps / max(state.budget, 1), 1.0)
    temperature = hot * (cold / hot) ** progress * ideal
    margin = -temperature * math.log(1.0 - uniform(rng)) if accept == METROPOLIS else 0.0
    state.accept = NEVER - 1 if accept == ALWAYS else now_ns + 1 + int(min(margin, 4e18 - now_ns))


@stage
def apply_edit(walkers, i, slot, gaps, new, scratch):
    """Sets ``new`` to neighbor ``slot`` of walker i."""
    codes = walkers.codes[i, slot]
    changed = walkers.changed_rows[i, slot]
    _start(plan_of(walkers, i), new, scratch.differ)
    for c in range(walkers.counts[i, slot]):
        put(new, gaps.nbytes, scratch.differ, codes[c] // MODES, codes[c] % MODES > 0, changed[c])


@stage
def score_trial(state, rows, ideal, scratch, engine):
    """Simulates the first ``rows`` rows of scratch.plan; returns -1 if ``Engine.score`` is needed."""
    return score_one(engine, scratch.plan, rows, max(state.accept, state.now_ns + int(LOOK * ideal)))


@stage
def close_trial(walkers, i, slot, ns, rows, ideal, new, scratch):
    """Records the trial of neighbor ``slot`` and accepts or rejects its plan; returns whether it was accepted."""
    state = walkers.state[i]
    current = plan_of(walkers, i)
    codes = walkers.codes[i, slot]
    is_accepted = ns < min(state.accept, NEVER)
    effect = effect_of(ns, state.now_ns, ideal)
    for c in range(walkers.counts[i, slot]):
        g = codes[c] // MODES
        mode = codes[c] % MODES
        walkers.effect[i, g, mode] = effect
        walkers.tried_at[i, g, mode] = state.steps
        walkers.accepted_at[i, g, mode] = state.accepted
        if is_accepted:
            walkers.changed_at[i, g] = state.steps
    if is_accepted:
        for g in range(current.on.shape[0]):
            current.on[g] = new.on[g]
            for c in range(current.rows.shape[1]):
                current.rows[g, c] = new.rows[g, c]
        for k in range(current.load.shape[0]):
            current.load[k] = new.load[k]
        state.now_ns = ns
        state.accepted += 1
        if ns < state.best_ns:
            state.best_ns = ns
            state.best_rows = rows
            state.since = 0
            for r in range(rows):
                for c in range(current.rows.shape[1]):
                    walkers.best[i, r, c] = scratch.plan[r, c]
    state.time_ns = ns
    state.accept = is_accepted
    return is_accepted


@stage(entry=True)
def step(
    walkers, members, begin, answer_ns, actions, by_gap, accept, hot, cold, ideal, limit, gaps, new, scratch, engine
):
    """Tries the edit that each of the walkers ``which[begin:]`` chooses, and accepts or rejects it.

    Args:
        walkers: arrays of the task's walkers.
        members: indices of the walkers to step.
        begin: first position in ``members``.
        answer_ns: iteration time of the first walker's plan from ``Engine.score``; -1 if not requested.
        actions: (walkers,) index of a neighbor, or gap * MODES + mode if ``by_gap``.
        accept: METROPOLIS, BETTER or ALWAYS.
        hot, cold: first and last temperature, as fractions of ``ideal``.
        ideal: ideal iteration time, ns.
        limit: memory limit in bytes.
        gaps, new, scratch: arrays of ``Moves``.
        engine: ``Engine.direct``.

    Returns:
        The position in ``members`` of a walker whose plan needs ``Engine.score`` (plan in scratch.plan, number of rows
        in state.time_ns), or len(which) when all are done.
    """
    for position in range(begin, members.shape[0]):
        i = members[position]
        state = walkers.state[i]
        a = actions[i]
        slot = 0 if by_gap else a
        has_answer = position == begin and answer_ns >= 0
        ns = answer_ns
        valid = True
        if not has_answer:
            scratch.differ[0] = -1
            if by_gap:
                current = plan_of(walkers, i)
                valid = _change_gap(walkers.rng[i], limit, gaps, current, new, scratch, a // MODES, a % MODES)
                walkers.counts[i, 0] = 0
                if valid:
                    walkers.counts[i, 0] = _read_changes(
                        current, new, scratch.differ, walkers.codes[i, 0], walkers.changed_rows[i, 0]
                    )
            else:
                apply_edit(walkers, i, a, gaps, new, scratch)
            valid = valid and walkers.counts[i, slot] > 0
            open_trial(state, walkers.rng[i], accept, hot, cold, ideal)
            ns = NEVER
        rows = rows_in_use(new, scratch.plan)
        if valid and not has_answer:
            ns = score_trial(state, rows, ideal, scratch, engine)
            if ns < 0:
                state.time_ns = rows
                return position
        is_accepted = close_trial(walkers, i, slot, ns, rows, ideal, new, scratch)
        if not by_gap:
            scratch.differ[0] = -1
            if not is_accepted:
                draw(walkers, i, a, limit, gaps, new, scratch)
            else:
                for other_slot in range(walkers.counts.shape[1]):
                    draw(walkers, i, other_slot, limit, gaps, new, scratch)
    return members.shape[0]


@stage(entry=True)
def show_trials(walkers, members, ages, out):
    """Writes the trial columns of each gap to ``out``, (walkers, m, >= 1 + 3 MODES).

    Args:
        ages: (most,) log(1 + age) for each age in steps.
    """
    max_age = ages.shape[0] - 1
    for i in members:
        step_no = walkers.state[i].steps
        accepted = walkers.state[i].accepted
        for g in range(walkers.on.shape[1]):
            changed_step = walkers.changed_at[i, g]
            out[i, g, 0] = 3.0 if changed_step < 0 else ages[min(step_no - changed_step, max_age)] / 4
            for a in range(MODES):
                tried_step = walkers.tried_at[i, g, a]
                out[i, g, 1 + a] = walkers.effect[i, g, a]
                out[i, g, 1 + MODES + a] = 3.0 if tried_step < 0 else ages[min(step_no - tried_step, max_age)] / 4
                accepted_since = accepted - walkers.accepted_at[i, g, a]
                out[i, g, 1 + 2 * MODES + a] = 3.0 if tried_step < 0 else ages[min(accepted_since, max_age)] / 3


class Times(NamedTuple):
    """Kernel times of a task and scratch arrays for ``show_plan``."""

    bin_of: NDArray[np.int64]  # (n,)
    duration: NDArray[np.float64]  # (n,) ns
    kernels: NDArray[np.float64]  # (5, n): start, stall for data, for memory, recomputation, slack
    copies: NDArray[np.float64]  # (4, m): copy out and in, start and end
    gap_of: NDArray[np.int64]  # (m,) gap of each row in use


@stage
def _read_log(log, times, plan, ideal, bins):
    """Reads the last complete iteration of a log into ``times`` and the link columns of ``bins``; returns the stall."""
    kernels = times.kernels
    copies = times.copies
    n = times.duration.shape[0]
    kernels[:, :] = 0.0
    copies[:, :] = -1.0
    rows = 0
    for g in range(plan.on.shape[0]):
        if plan.on[g]:
            times.gap_of[rows] = g
            rows += 1
    end_entry = -1
    begin_entry = -1
    for e in range(log.shape[0] - 1, -1, -1):
        if log[e].event == Event.BOUNDARY:
            if end_entry < 0:
                end_entry = e
            else:
                begin_entry = e
                break
    begin_ns = log[begin_entry].end if begin_entry >= 0 else 0
    end_entry = log.shape[0] if end_entry < 0 else end_entry
    kernel = 0
    data = 0.0
    memory = 0.0
    rerun = 0.0
    stall = 1.0
    for e in range(begin_entry + 1, end_entry):
        event = log[e].event
        index = log[e].index
        took_ns = log[e].end - log[e].start
        if event == Event.RECOMPUTE:
            rerun += took_ns
        elif event == Event.KERNEL and index < n:
            kernel = index
            kernels[0, kernel] = log[e].start - begin_ns
            kernels[1, kernel] += data
            kernels[2, kernel] += memory
            kernels[3, kernel] += rerun
            data = memory = rerun = 0.0
        elif event == Event.STALL and index != Cause.ISSUE:  # edits do not affect host stalls
            stall += took_ns
            if index == Cause.DATA:
                data += took_ns
            else:
                memory += took_ns
        elif (event == Event.OUT or event == Event.IN) and index < rows:
            c, column = (0, 4) if event == Event.OUT else (2, 5)
            copies[c, times.gap_of[index]] = log[e].start - begin_ns
            copies[c + 1, times.gap_of[index]] = log[e].end - begin_ns
            remaining = took_ns / ideal * BINS
            b = times.bin_of[kernel]
            while remaining > 0.0:  # the link is busy in this bin and the next ones
                bins[b, column] += min(remaining, 1.0)
                remaining -= 1.0
                b = b + 1 if b + 1 < BINS else 0
    return stall


@stage(entry=True)
def show_plan(log, times, walkers, i, limit, excess, gaps, ideal, gap_out, bin_out):
    """Writes a plan's columns of gaps and bins from the log of its simulation.

    Args:
        log: LOG (entries,), ``Engine.log``.
        times: see ``Times``.
        walkers, i: arrays of all walkers, and the index of the walker.
        limit: memory limit in bytes.
        excess: maximum load above the limit without a plan, bytes.
        ideal: ideal iteration time, ns.
        gap_out: (m, >= PLAN_COLUMNS - 1) output.
        bin_out: (BINS, BIN_COLUMNS) output.
    """
    plan = plan_of(walkers, i)
    nbytes = gaps.nbytes
    on = plan.on
    rows = plan.rows
    m = plan.on.shape[0]
    n = plan.load.shape[0]
    kernels = times.kernels
    copies = times.copies
    duration = times.duration
    gap_out[:, : PLAN_COLUMNS - 1] = 0.0
    bin_out[:, :] = 0.0
    stall = _read_log(log, times, plan, ideal, bin_out)
    bin_out[:, 0] = 4.0
    for k in range(n):
        kernels[4, k] = limit - plan.load[k]
        b = times.bin_of[k]
        slack = kernels[4, k] / excess
        bin_out[b, 0] = min(bin_out[b, 0], slack)
        bin_out[b, 1] += slack * duration[k] / ideal * BINS
        bin_out[b, 2] += kernels[1, k]
        bin_out[b, 3] += kernels[2, k]
        bin_out[b, 6] += kernels[3, k]
    for b in range(BINS):
        bin_out[b, 1] = min(bin_out[b, 1], 4.0)
        for c in (2, 3, 6):
            bin_out[b, c] = _log(bin_out[b, c] / ideal, 1000.0) / 3
        for c in (4, 5):
            bin_out[b, c] = min(bin_out[b, c], 3.0)
    for g in range(m):
        out = gap_out[g]
        mode = mode_of(on, rows, g)
        out[mode] = 1.0
        if mode > 0 and not _equal_rows(rows[g], gaps.ways[g, mode]):
            out[4] = 1.0  # shifted
        kind = SWAPPED if gaps.weights[g, SWAPPED] > 0.0 else RECOMPUTED
        after = gaps.ways[g, kind, AFTER]
        closing = gaps.ways[g, kind, BEFORE]
        out[5] = _log(kernels[1, closing] / ideal, 1000.0)
        opening = after + 1 if after + 1 < n else 0
        k = opening
        min_slack = 4.0 * nbytes[g]
        memory = 0.0
        data = 0.0
        tight_ns = 0.0
        span_ns = 1.0
        while k != closing:
            min_slack = min(min_slack, kernels[4, k])
            data += kernels[1, k]
            memory += kernels[2, k]
            span_ns += duration[k]
            if kernels[4, k] < nbytes[g]:
                tight_ns += duration[k]
            k = k + 1 if k + 1 < n else 0
        out[6] = _log(memory / ideal, 1000.0)
        out[7] = _log(data / ideal, 1000.0)
        out[8] = (memory + data) / stall
        out[9] = min_slack / nbytes[g]
        out[10] = 1.0 if on[g] and min_slack >= nbytes[g] else 0.0
        out[11] = tight_ns / span_ns
        if mode == SWAPPED and copies[1, g] >= 0.0:
            out[12] = _log((copies[1, g] - kernels[0, opening]) / ideal, 100.0)
        if mode == SWAPPED and copies[3, g] >= 0.0:
            out[13] = _log((kernels[0, closing] - copies[3, g]) / ideal, 100.0)
            out[14] = _log((kernels[0, closing] - copies[2, g]) / ideal, 100.0)
        if mode > SWAPPED:
            out[15] = _log(kernels[3, closing] / ideal, 1000.0)


def make_walkers(walkers: int, gaps: int, kernels: int, neighbors: int) -> Walkers:
    """Allocates the arrays for the given numbers of walkers, gaps, kernels and neighbors."""
    shape: tuple[Any, ...] = (walkers, gaps)
    return Walkers(
        np.zeros((*shape, 6), np.int64),
        np.zeros(shape, np.bool_),
        np.zeros((walkers, kernels), np.int64),
        np.ones((walkers, 1), np.uint64),
        np.zeros(walkers, STATE),
        np.zeros((*shape, 6), np.int64),
        np.full((walkers, neighbors, CHANGES), -1, np.int64),
        np.zeros((walkers, neighbors, CHANGES, 6), np.int64),
        np.zeros((walkers, neighbors), np.int64),
        np.zeros((*shape, MODES), np.float32),
        np.full((*shape, MODES), -1, np.int64),
        np.zeros((*shape, MODES), np.int64),
        np.full(shape, -1, np.int64),
    )
