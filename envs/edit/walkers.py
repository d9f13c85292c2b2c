"""Compiled steps of ``GpuMemoryEdit-v1``: neighbors of a plan, their trials, and features of the simulation log.

A walker is a plan under edit. All walkers of a task share the arrays of ``Walkers``, one row each. A neighbor is a
list of changes (columns.py), proposed, repaired and pruned by plan_moves.py.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.columns import integers
from envs.edit.columns import N_CHANGES, Change
from simulator.compiled.encoding import (
    AFTER,
    BEFORE,
    LOG,
    NEVER,
    RESULT,
    Cause,
    Event,
    Status,
)
from simulator.compiled.jit import call, stage
from simulator.compiled.scoring import score_one
from simulator.modes import Choice
from simulator.moves.gap_graph import BINS
from simulator.moves.plan_moves import (
    PlanArrays,
    choice_in,
    propose,
    prune,
    put,
    repair,
    rows_in_use,
    shift_row,
    start_proposal,
    uniform,
)

# Points to which effects are clipped: the simulation of a plan that is slower by more is stopped, and the plan counts
# as infeasible.
MAX_EFFECT = 2.0


class Accept(IntEnum):
    """Rule by which a trial's plan replaces the current one."""

    METROPOLIS = 0
    BETTER = 1
    ALWAYS = 2


# State of a walker: times of the current and the best plan; edits tried, accepted, and tried since the best plan; rows
# of the best plan; the budget; result of the last trial: time_ns (NEVER: infeasible) and acceptance (``accept``).
STATE = integers("now_ns best_ns steps accepted since best_rows budget time_ns accept")


class Walkers(NamedTuple):
    """W plans of one task with m gaps and n kernels, and M neighbors of each, of at most C changes."""

    rows: NDArray[np.int64]  # (W, m, 6)
    on: NDArray[np.bool_]  # (W, m)
    load: NDArray[np.int64]  # (W, n)
    rng: NDArray[np.uint64]  # (W, 1)
    state: NDArray[Any]  # (W,) STATE
    best: NDArray[np.int64]  # (W, m, 6)
    codes: NDArray[np.int64]  # (W, M, C) gap * N_CHANGES + change, or -1
    changed_rows: NDArray[np.int64]  # (W, M, C, 6)
    counts: NDArray[np.int64]  # (W, M) changes of each neighbor; 0: no neighbor found
    effect: NDArray[np.float32]  # (W, m, N_CHANGES) effect of the last trial of each change
    tried_at: NDArray[np.int32]  # (W, m, N_CHANGES) state.steps at that trial, or -1
    accepted_at: NDArray[np.int32]  # (W, m, N_CHANGES) state.accepted at that trial
    changed_at: NDArray[np.int64]  # (W, m) state.steps at the gap's last change, or -1


@stage
def _log(x, scale):
    """Returns sign(x) log(1 + scale |x|)."""
    if x == 0.0:  # most columns of an idle gap
        return x
    return math.log1p(x * scale) if x >= 0 else -math.log1p(-x * scale)


@stage(entry=True)
def effect_of(ns, now_ns, ideal):
    """Returns the observed effect of a trial: log-scaled points of overhead in [-1.24, 1.24]."""
    points = MAX_EFFECT if ns >= NEVER else min(max(100.0 * (ns - now_ns) / ideal, -MAX_EFFECT), MAX_EFFECT)
    return _log(points, 20.0) / 3


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
    """Writes the changes from ``current`` to ``new`` and returns their number; 0 if there are more than ``codes``."""
    max_changes = codes.shape[0]
    count = 0
    codes[:] = -1
    if differ[0] < 0:  # too many gaps changed to be recorded
        return 0
    for j in range(differ[0]):
        g = differ[1 + j]
        # A move and its repair may touch a gap several times; only the difference counts.
        seen = False
        for c in range(count):
            seen = seen or codes[c] // N_CHANGES == g
        if seen:
            continue
        # Repair may undo a change.
        old = choice_in(current.on, current.rows, g)
        chosen = choice_in(new.on, new.rows, g)
        if old == chosen and (chosen == Choice.RESIDENT or _equal_rows(new.rows[g], current.rows[g])):
            continue
        if count == max_changes:
            codes[:] = -1
            return 0
        codes[count] = g * N_CHANGES + chosen
        if old == chosen:
            codes[count] = g * N_CHANGES + Change.SHIFT
        for c in range(new.rows.shape[1]):
            rows[count, c] = new.rows[g, c]
        count += 1
    return count


@stage
def draw(walkers, i, slot, limit, gaps, new, scratch):
    """Draws neighbor ``slot`` of walker i. ``new`` must match its plan, or scratch.differ[0] must be -1.

    Args:
        walkers: state of all walkers.
        i, slot: walker, and the slot to fill.
        limit: memory limit in bytes.
        gaps, new, scratch: tables of the gaps, the plan that is changed, and work arrays.
    """
    current = plan_of(walkers, i)
    walkers.counts[i, slot] = 0
    walkers.codes[i, slot, :] = -1
    class_prob = gaps.class_prob
    for _ in range(2 if class_prob > 0.0 else 1):
        # After a failed proposal, ``new`` differs from the plan in unknown gaps: the next one copies the whole plan.
        if propose(walkers.rng[i], limit, gaps, current, new, scratch, class_prob) < 0:
            scratch.differ[0] = -1
            return
        walkers.counts[i, slot] = _read_changes(
            current, new, scratch.differ, walkers.codes[i, slot], walkers.changed_rows[i, slot]
        )
        if walkers.counts[i, slot] > 0:
            return
        # A class may take more changes than an edit has; one gap takes few.
        class_prob = 0.0


@stage(entry=True)
def draw_all(walkers, members, limit, gaps, new, scratch):
    """Draws all neighbors of the walkers ``members``."""
    for i in members:
        scratch.differ[0] = -1
        for slot in range(walkers.counts.shape[1]):
            draw(walkers, i, slot, limit, gaps, new, scratch)


@stage(entry=True)
def write_mask(walkers, members, gaps, mask):
    """Writes to ``mask`` which (gap, change) actions change the plan, (walkers, m * N_CHANGES)."""
    for i in members:
        on = walkers.on[i]
        rows = walkers.rows[i]
        for g in range(on.shape[0]):
            current = choice_in(on, rows, g)
            actions = mask[i, g * N_CHANGES : (g + 1) * N_CHANGES]
            actions[Change.FILL] = actions[Change.SHIFT] = on[g]
            for choice in range(Choice.SWAPPED, gaps.weights.shape[1]):
                # An action that leaves the plan as it is would waste a simulator call.
                is_same = current == choice and _equal_rows(rows[g], gaps.choice_rows[g, choice])
                actions[choice] = gaps.weights[g, choice] > 0.0 and not is_same


@stage
def _change_gap(rng, limit, gaps, current, new, scratch, g, change):
    """Sets ``new`` to the plan with gap g changed, repaired and pruned as in ``propose``; False on failure."""
    nbytes = gaps.nbytes
    differ = scratch.differ
    rows = current.rows
    start_proposal(current, new, differ)
    if change == Change.FILL:
        put(new, nbytes, differ, g, False, rows[g])
    elif change == Change.SHIFT:
        shift_row(rng, rows[g], gaps.opens[g], gaps.since[g], current.load.shape[0], scratch.row)
        put(new, nbytes, differ, g, True, scratch.row)
    else:
        put(new, nbytes, differ, g, True, gaps.choice_rows[g, change])
        if not current.on[g]:  # the freed memory may let other gaps be filled
            prune(rng, limit, nbytes, new, differ, g)
    return repair(rng, limit, gaps, new, differ, g)


@stage
def open_trial(state, rng, accept, hot, cold, ideal):
    """Counts a trial and draws its acceptance threshold (time in ns) into state.accept.

    Args:
        state, rng: the walker's state and random state.
        accept: rule of acceptance.
        hot, cold: first and last temperature, as fractions of the ideal time.
        ideal: ideal time in ns.
    """
    now_ns = state.now_ns
    state.steps += 1
    state.since += 1
    progress = min(state.steps / max(state.budget, 1), 1.0)
    temperature = hot * (cold / hot) ** progress * ideal
    margin = -temperature * math.log(1.0 - uniform(rng)) if accept == Accept.METROPOLIS else 0.0
    # The margin is drawn before the trial, so that the simulation can stop at the threshold. It must not overflow.
    state.accept = NEVER - 1 if accept == Accept.ALWAYS else now_ns + 1 + int(min(margin, 4e18 - now_ns))


@stage
def apply_edit(walkers, i, slot, gaps, new, scratch):
    """Sets ``new`` to neighbor ``slot`` of walker i."""
    codes = walkers.codes[i, slot]
    changed = walkers.changed_rows[i, slot]
    start_proposal(plan_of(walkers, i), new, scratch.differ)
    for c in range(walkers.counts[i, slot]):
        put(new, gaps.nbytes, scratch.differ, codes[c] // N_CHANGES, codes[c] % N_CHANGES != Change.FILL, changed[c])


@stage
def score_trial(state, rows, ideal, scratch, engine):
    """Simulates the first ``rows`` rows of scratch.plan; returns -1 if ``Engine.score`` is needed."""
    # Effects up to MAX_EFFECT are observed even of plans that will be rejected.
    cutoff_ns = max(state.accept, state.now_ns + int(MAX_EFFECT / 100 * ideal))
    return score_one(engine, scratch.plan, rows, cutoff_ns)


@stage
def close_trial(walkers, i, slot, ns, rows, ideal, new, scratch):
    """Records the trial of neighbor ``slot`` and accepts or rejects its plan; returns whether it was accepted.

    Args:
        walkers: state of all walkers.
        i, slot: walker and neighbor.
        ns: iteration time of the plan in ns.
        rows: number of rows of the plan.
        ideal: ideal time in ns.
        new, scratch: the plan tried, and work arrays.
    """
    state = walkers.state[i]
    current = plan_of(walkers, i)
    codes = walkers.codes[i, slot]
    # An infeasible plan is never accepted, whatever the rule.
    is_accepted = ns < min(state.accept, NEVER)
    effect = effect_of(ns, state.now_ns, ideal)
    for c in range(walkers.counts[i, slot]):
        g = codes[c] // N_CHANGES
        change = codes[c] % N_CHANGES
        walkers.effect[i, g, change] = effect
        walkers.tried_at[i, g, change] = state.steps
        walkers.accepted_at[i, g, change] = state.accepted
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
            # In the order of the engine's rows, so that the best plan can be scored without the gaps.
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
    """Tries the edit that each of the walkers ``members[begin:]`` chooses, and accepts or rejects it.

    Args:
        walkers: arrays of the task's walkers.
        members: indices of the walkers to step.
        begin: first position in ``members``.
        answer_ns: iteration time of the first walker's plan from ``Engine.score``; -1 if not requested.
        actions: (walkers,) index of a neighbor, or gap * N_CHANGES + change if ``by_gap``.
        accept: an ``Accept``.
        hot, cold: first and last temperature, as fractions of ``ideal``.
        ideal: ideal iteration time, ns.
        limit: memory limit in bytes.
        gaps, new, scratch: arrays of ``Moves``.
        engine: ``Engine.direct``.

    Returns:
        The position in ``members`` of a walker whose plan needs ``Engine.score`` (plan in scratch.plan, number of rows
        in state.time_ns), or len(members) when all are done.
    """
    for position in range(begin, members.shape[0]):
        i = members[position]
        state = walkers.state[i]
        a = actions[i]
        slot = 0 if by_gap else a
        # An answer continues a trial: its edit is in ``new``, and its margin is drawn.
        has_answer = position == begin and answer_ns >= 0
        ns = answer_ns
        valid = True
        if not has_answer:
            scratch.differ[0] = -1
            if by_gap:
                current = plan_of(walkers, i)
                valid = _change_gap(walkers.rng[i], limit, gaps, current, new, scratch, a // N_CHANGES, a % N_CHANGES)
                walkers.counts[i, 0] = 0
                if valid:
                    walkers.counts[i, 0] = _read_changes(
                        current, new, scratch.differ, walkers.codes[i, 0], walkers.changed_rows[i, 0]
                    )
            else:
                apply_edit(walkers, i, a, gaps, new, scratch)
            valid = valid and walkers.counts[i, slot] > 0
            open_trial(state, walkers.rng[i], accept, hot, cold, ideal)
            # An edit that cannot be repaired counts as a rejected trial.
            ns = NEVER
        rows = rows_in_use(new, scratch.plan)
        if valid and not has_answer:
            ns = score_trial(state, rows, ideal, scratch, engine)
            if ns < 0:
                state.time_ns = rows
                return position
        is_accepted = close_trial(walkers, i, slot, ns, rows, ideal, new, scratch)
        if not by_gap:
            # After a rejection the other neighbors are still neighbors of the same plan.
            scratch.differ[0] = -1
            if not is_accepted:
                draw(walkers, i, a, limit, gaps, new, scratch)
            else:
                for other_slot in range(walkers.counts.shape[1]):
                    draw(walkers, i, other_slot, limit, gaps, new, scratch)
    return members.shape[0]


@stage(entry=True)
def show_trials(walkers, members, ages, out):
    """Writes the columns of each gap that depend on trials to ``out``, columns.GAP (walkers, >= m).

    Args:
        ages: (most,) log(1 + age) for each age in steps.
        members: classes of gaps that are edited together.
    """
    max_age = ages.shape[0] - 1
    for i in members:
        step_no = walkers.state[i].steps
        accepted = walkers.state[i].accepted
        # Columns of what was never tried or changed keep the value of the episode's begin.
        for g in range(walkers.on.shape[1]):
            gap = out[i, g]
            changed_step = walkers.changed_at[i, g]
            if changed_step >= 0:
                gap.change_age = ages[min(step_no - changed_step, max_age)] / 4
            for change in range(N_CHANGES):
                tried_step = walkers.tried_at[i, g, change]
                if tried_step >= 0:
                    accepted_since = accepted - walkers.accepted_at[i, g, change]
                    gap.effect[change] = walkers.effect[i, g, change]
                    gap.trial_age[change] = ages[min(step_no - tried_step, max_age)] / 4
                    gap.accepted_since[change] = ages[min(accepted_since, max_age)] / 3


class Times(NamedTuple):
    """Kernel times of a task, and scratch arrays for ``show_plans``; all but the first five are of one iteration."""

    bin_of: NDArray[np.int64]  # (n,)
    duration: NDArray[np.float64]  # (n,) ns
    duration_ns: NDArray[np.int64]  # (n,)
    duration_until: NDArray[np.float64]  # (n + 1,) ns of all kernels before; the next ..._until likewise
    by_size: NDArray[np.int64]  # (m,) gaps, sorted by the size of their tensors
    data_until: NDArray[np.float64]  # (n + 1,) ns
    memory_until: NDArray[np.float64]  # (n + 1,) ns
    tight_until: NDArray[np.int64]  # (n + 1,) ns of kernels with less free memory than a tensor takes
    least_slack: NDArray[np.float64]  # (levels, n) free bytes, least of 2**level kernels from each on
    gap_of: NDArray[np.int64]  # (m,) gap of each row in use
    start: NDArray[np.float64]  # (n,) ns
    data_stall: NDArray[np.float64]  # (n,) ns of waiting for data before the kernel
    memory_stall: NDArray[np.float64]  # (n,) ns of waiting for memory before the kernel
    rerun: NDArray[np.float64]  # (n,) ns of recomputation before the kernel
    slack: NDArray[np.float64]  # (n,) free bytes
    out_end: NDArray[np.float64]  # (m,) ns, -1: no copy; the next two likewise
    in_start: NDArray[np.float64]
    in_end: NDArray[np.float64]


@stage
def _last_iteration(log):
    """Returns the entries of a log's last two boundaries; before the first: -1; len(log) if it has none."""
    end_entry = -1
    for e in range(log.shape[0] - 1, -1, -1):
        if log[e].event == Event.BOUNDARY:
            if end_entry >= 0:
                return e, end_entry
            end_entry = e
    return -1, log.shape[0] if end_entry < 0 else end_entry


@stage
def _read_log(log, times, plan, ideal, bins):
    """Reads the last complete iteration of a log into ``times`` and the link columns of ``bins``; returns the stall."""
    times.start[:] = 0.0
    times.data_stall[:] = 0.0
    times.memory_stall[:] = 0.0
    times.rerun[:] = 0.0
    times.out_end[:] = -1.0
    times.in_start[:] = -1.0
    times.in_end[:] = -1.0
    # The log names rows in use, observations gaps.
    rows = 0
    for g in range(plan.on.shape[0]):
        if plan.on[g]:
            times.gap_of[rows] = g
            rows += 1
    begin_entry, end_entry = _last_iteration(log)
    begin_ns = log[begin_entry].end if begin_entry >= 0 else 0
    kernel = 0
    data = 0.0
    memory = 0.0
    rerun = 0.0
    stall = 1.0  # not 0, because shares divide by it
    for e in range(begin_entry + 1, end_entry):
        event = log[e].event
        index = log[e].index
        took_ns = log[e].end - log[e].start
        if event == Event.RECOMPUTE:
            rerun += took_ns
        elif event == Event.KERNEL and index < times.start.shape[0]:
            # Stalls and recomputations are logged before the kernel that they delay.
            kernel = index
            times.start[kernel] = log[e].start - begin_ns
            times.data_stall[kernel] += data
            times.memory_stall[kernel] += memory
            times.rerun[kernel] += rerun
            data = memory = rerun = 0.0
        elif event == Event.STALL and index != Cause.ISSUE:  # edits do not affect host stalls
            stall += took_ns
            if index == Cause.DATA:
                data += took_ns
            else:
                memory += took_ns
        elif (event == Event.OUT or event == Event.IN) and index < rows:
            g = times.gap_of[index]
            if event == Event.OUT:
                times.out_end[g] = log[e].end - begin_ns
            else:
                times.in_start[g] = log[e].start - begin_ns
                times.in_end[g] = log[e].end - begin_ns
            remaining = took_ns / ideal * BINS
            b = times.bin_of[kernel]
            while remaining > 0.0:  # the link is busy in this bin and the next ones
                if event == Event.OUT:
                    bins[b].out_load += min(remaining, 1.0)
                else:
                    bins[b].in_load += min(remaining, 1.0)
                remaining -= 1.0
                b = b + 1 if b + 1 < BINS else 0
    return stall


@stage
def _show_bins(times, plan, limit, excess, ideal, bins):
    """Writes the slack of each kernel, and all columns of ``bins`` but the link's."""
    for b in range(BINS):
        bins[b].least_slack = 4.0
        bins[b].mean_slack = bins[b].data_stall = bins[b].memory_stall = bins[b].recomputation = 0.0
    for k in range(plan.load.shape[0]):
        times.slack[k] = limit - plan.load[k]
        slack = times.slack[k] / excess
        seen = bins[times.bin_of[k]]
        seen.least_slack = min(seen.least_slack, slack)
        seen.mean_slack += slack * times.duration[k] / ideal * BINS
        seen.data_stall += times.data_stall[k]
        seen.memory_stall += times.memory_stall[k]
        seen.recomputation += times.rerun[k]
    for b in range(BINS):
        seen = bins[b]
        seen.mean_slack = min(seen.mean_slack, 4.0)
        seen.data_stall = _log(seen.data_stall / ideal, 1000.0) / 3
        seen.memory_stall = _log(seen.memory_stall / ideal, 1000.0) / 3
        seen.recomputation = _log(seen.recomputation / ideal, 1000.0) / 3
        seen.out_load = min(seen.out_load, 3.0)
        seen.in_load = min(seen.in_load, 3.0)


@stage
def _bounds(gaps, g, n):
    """Returns the first kernel within gap g and the one that closes it, which the current row may have shifted."""
    default = gaps.choice_rows[g, Choice.SWAPPED if gaps.weights[g, Choice.SWAPPED] > 0.0 else Choice.RECOMPUTED]
    after = default[AFTER]
    return after + 1 if after + 1 < n else 0, default[BEFORE]


@stage
def _sum_between(until, begin, end):
    """Returns the sum over the kernels from ``begin`` to before ``end``, over the boundary if they wrap."""
    total = until[end] - until[begin]
    return total + until[until.shape[0] - 1] if end < begin else total


@stage
def _least_slack(times, begin, end):
    """Returns the least free memory of the kernels from ``begin`` to before ``end``; infinite if there are none."""
    if begin >= end:
        return math.inf
    level = 0
    while 2 << level <= end - begin:
        level += 1
    return min(times.least_slack[level, begin], times.least_slack[level, end - (1 << level)])


@stage
def _sum_up(times):
    """Fills the sums and minima over kernels, so that a gap's columns do not take a pass over its kernels."""
    n = times.slack.shape[0]
    for k in range(n):
        times.data_until[k + 1] = times.data_until[k] + times.data_stall[k]
        times.memory_until[k + 1] = times.memory_until[k] + times.memory_stall[k]
        times.least_slack[0, k] = times.slack[k]
    for level in range(1, times.least_slack.shape[0]):
        half = 1 << (level - 1)
        for k in range(n - 2 * half + 1):
            times.least_slack[level, k] = min(times.least_slack[level - 1, k], times.least_slack[level - 1, k + half])


@stage(inline=True)
def _show_gap(times, plan, gaps, g, stall, ideal, out):
    """Writes the columns of gap g that depend on the plan; ``stall``: of the whole iteration, ns."""
    n = plan.load.shape[0]
    nbytes = gaps.nbytes[g]
    choice = choice_in(plan.on, plan.rows, g)
    out.choice[:] = 0.0
    out.choice[choice] = 1.0
    is_default = choice == Choice.RESIDENT or _equal_rows(plan.rows[g], gaps.choice_rows[g, choice])
    out.is_shifted = 0.0 if is_default else 1.0
    opening, closing = _bounds(gaps, g, n)
    is_wrapped = closing < opening
    min_slack = _least_slack(times, opening, n if is_wrapped else closing)
    if is_wrapped:
        min_slack = min(min_slack, _least_slack(times, 0, closing))
    min_slack = min(min_slack, 4.0 * nbytes)
    memory = _sum_between(times.memory_until, opening, closing)
    data = _sum_between(times.data_until, opening, closing)
    span_ns = 1.0 + _sum_between(times.duration_until, opening, closing)
    tight_ns = _sum_between(times.tight_until, opening, closing) if min_slack < nbytes else 0.0
    out.stall_at_use = _log(times.data_stall[closing] / ideal, 1000.0)
    out.memory_stall = _log(memory / ideal, 1000.0)
    out.data_stall = _log(data / ideal, 1000.0)
    out.stall_share = (memory + data) / stall
    out.slack = min_slack / nbytes
    out.can_fill = 1.0 if plan.on[g] and min_slack >= nbytes else 0.0
    out.tight_share = tight_ns / span_ns
    out.out_delay = out.in_lead = out.in_start_lead = out.recomputation = 0.0
    if choice == Choice.SWAPPED and times.out_end[g] >= 0.0:
        out.out_delay = _log((times.out_end[g] - times.start[opening]) / ideal, 100.0)
    if choice == Choice.SWAPPED and times.in_end[g] >= 0.0:
        out.in_lead = _log((times.start[closing] - times.in_end[g]) / ideal, 100.0)
        out.in_start_lead = _log((times.start[closing] - times.in_start[g]) / ideal, 100.0)
    if choice > Choice.SWAPPED:
        out.recomputation = _log(times.rerun[closing] / ideal, 1000.0)


@stage
def _show_plan(log, times, walkers, i, limit, excess, gaps, ideal, gap_out, bin_out):
    """Writes a plan's columns of gaps and bins from the log of its simulation (see ``show_plans``)."""
    plan = plan_of(walkers, i)
    for b in range(BINS):
        bin_out[b].out_load = bin_out[b].in_load = 0.0
    stall = _read_log(log, times, plan, ideal, bin_out)
    _show_bins(times, plan, limit, excess, ideal, bin_out)
    _sum_up(times)
    nbytes = np.int64(-1)
    for g in times.by_size:
        if gaps.nbytes[g] != nbytes:
            nbytes = gaps.nbytes[g]
            tight_ns = 0
            for k in range(plan.load.shape[0]):
                tight_ns += times.duration_ns[k] if times.slack[k] < nbytes else 0
                times.tight_until[k + 1] = tight_ns
        _show_gap(times, plan, gaps, g, stall, ideal, gap_out[g])


@stage
def _log_one(engine, plan, rows, log):
    """Simulates the first ``rows`` of ``plan`` like ``Engine.log``; returns the entries, -1 if only it can tell.

    The last array of ``engine`` is the log.
    """
    entry, swaps_only, n, ends, results, arrays = engine
    ends[1] = rows
    entries = 0
    if swaps_only:
        entries = call(entry, (0, 0), (plan, 0, None, n, NEVER, 1, ends) + arrays)[1]
    else:
        entries = call(entry, (0, 0), (plan, 0, -1, n, NEVER, 1, ends) + arrays)[1]
    is_done = results.view(RESULT)[0].status == Status.DONE
    return entries if is_done and entries < log.view(LOG).shape[0] else -1


@stage(entry=True)
def show_plans(
    walkers, members, begin, entries, log, times, limit, excess, gaps, ideal, scratch, engine, bound, columns, outputs
):
    """Writes the columns of gaps and bins of the plans of the walkers ``members[begin:]``.

    Plans are simulated again, because trials are not logged: a log takes 2 to 6 times as long as a simulation without
    one, and most trials are rejected.

    Args:
        walkers, members: see ``step``.
        begin: first position in ``members``.
        entries: number of entries of ``log`` if it is the log of the first walker's plan, else -1.
        log: LOG, as int64.
        times: see ``Times``.
        limit: memory limit in bytes.
        excess: maximum load above the limit without a plan, bytes.
        gaps, scratch: arrays of ``Moves``.
        ideal: ideal iteration time, ns.
        engine: ``Engine.direct`` with ``log`` as its last array.
        bound: largest absolute value of a column of gaps.
        columns: float32 (walkers, >= m, columns of columns.GAP), ``outputs[0]`` as an array.
        outputs: columns.GAP (walkers, >= m) and columns.BIN (walkers, BINS), output.

    Returns:
        The position in ``members`` of a walker whose plan needs ``Engine.log``, or len(members) when all are done.
    """
    gap_out, bin_out = outputs
    for position in range(begin, members.shape[0]):
        i = members[position]
        if position > begin or entries < 0:
            rows = rows_in_use(plan_of(walkers, i), scratch.plan)
            entries = _log_one(engine, scratch.plan, rows, log)
            if entries < 0:
                return position
        _show_plan(log.view(LOG)[:entries], times, walkers, i, limit, excess, gaps, ideal, gap_out[i], bin_out[i])
        for g in range(gaps.nbytes.shape[0]):
            for c in range(columns.shape[2]):
                columns[i, g, c] = min(max(columns[i, g, c], np.float32(-bound)), np.float32(bound))
    return members.shape[0]


@stage(entry=True)
def show_edits(walkers, members, edits, mask):
    """Writes the neighbors to ``edits``, int32 (walkers, M, C), and whether each slot has one to ``mask``."""
    for i in members:
        for slot in range(edits.shape[1]):
            mask[i, slot] = walkers.counts[i, slot] > 0
            for c in range(edits.shape[2]):
                edits[i, slot, c] = walkers.codes[i, slot, c]


@stage(entry=True)
def scale_columns(raw, factors, members, out):
    """Writes raw (W, N, C) times ``factors`` (C,), clipped to [-1, 1], to ``out`` for the walkers ``members``."""
    for i in members:
        for j in range(raw.shape[1]):
            for c in range(raw.shape[2]):
                out[i, j, c] = min(max(raw[i, j, c] * factors[c], np.float32(-1.0)), np.float32(1.0))


def make_walkers(walkers: int, gaps: int, kernels: int, neighbors: int, changes: int) -> Walkers:
    """Allocates the arrays for the given numbers of walkers, gaps, kernels, neighbors and changes of a neighbor."""
    shape: tuple[Any, ...] = (walkers, gaps)
    return Walkers(
        rows=np.zeros((*shape, 6), np.int64),
        on=np.zeros(shape, np.bool_),
        load=np.zeros((walkers, kernels), np.int64),
        rng=np.ones((walkers, 1), np.uint64),
        state=np.zeros(walkers, STATE),
        best=np.zeros((*shape, 6), np.int64),
        codes=np.full((walkers, neighbors, changes), -1, np.int64),
        changed_rows=np.zeros((walkers, neighbors, changes, 6), np.int64),
        counts=np.zeros((walkers, neighbors), np.int64),
        effect=np.zeros((*shape, N_CHANGES), np.float32),
        tried_at=np.full((*shape, N_CHANGES), -1, np.int32),
        accepted_at=np.zeros((*shape, N_CHANGES), np.int32),
        changed_at=np.full(shape, -1, np.int64),
    )
