"""What the Q head (program_dqn.py) sees of a walk at a step, beside what the encoder says of the task: compiled.

Of each valid action (``ACTION`` columns) and of each walk (``WALK`` columns). Sizes are over the most that the program
is above the limit, times over the ideal iteration, mostly through a logarithm, as in gap_graph.py. "Over" is the
planned residency above the limit, from the position on. A swap-in is thought of as late as it may be: the last one ends
when its tensor is used, the one before when that begins, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.batch import Batch
from envs.columns import FREE_NS, NEED_AT, POSITION, STUCK_AT, TAKEN_AT
from envs.graph import OFFLOAD, RECOMPUTE_TIME, REMOVE
from envs.task import Task
from simulator.compiled.jit import stage

PARTS = 16  # of the iteration, for which the walk's columns say how much is over and how long swap-ins take
ACTION, WALK = 20, 9 + 2 * PARTS
AFTER, BEFORE, NBYTES, WRAPS, OUT_NS, IN_NS, RERUN_NS, BY_BEFORE, ROWS = range(9)
LIMIT, IDEAL, EXCESS, TOTAL, GAPS_AT, KERNELS_AT, KERNELS, GAPS, NUMBERS = range(9)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Tables(NamedTuple):
    """Several tasks, their gaps and kernels one after another.

    Attributes:
        numbers: (T, NUMBERS) of each task. gaps: (ROWS, G). start: ns at which the kernels start, and the end.
        inputs, readers: of each gap, those (of its task) whose tensors its producer reads, and the gaps whose producers
            read its tensor: where they begin (G + 1), and which.
    """

    numbers: NDArray[np.float64]
    gaps: Ints
    start: Ints
    inputs_at: Ints
    inputs: Ints
    readers_at: Ints
    readers: Ints


def tables_of(tasks: Sequence[tuple[Task, Ints]]) -> Tables:
    """Tables of tasks, with the chain edges (2, E) between their gaps."""
    numbers, gaps, starts = np.zeros((len(tasks), NUMBERS)), [], []
    lists: list[list[Ints]] = [[], []]
    counts: list[list[Ints]] = [[], []]
    gaps_at = kernels_at = 0
    for i, (task, chain) in enumerate(tasks):
        over = np.maximum(task.live_bytes - task.limit, 0)
        g, n = len(task.tensor), len(task.live_bytes)
        total = max(float(over @ task.duration_ns), 1.0)
        numbers[i] = (task.limit, task.ideal_ns, max(int(over.max(initial=0)), 1), total, gaps_at, kernels_at, n, g)
        table = np.zeros((ROWS, g), np.int64)
        table[RERUN_NS, task.removal_gap] = task.graph.features[task.removals, RECOMPUTE_TIME] * task.ideal_ns
        table[:RERUN_NS] = task.after, task.before, task.nbytes, task.wraps, task.d2h_ns, task.h2d_ns
        table[BY_BEFORE] = np.argsort(task.before, kind="stable")
        gaps.append(table)
        starts.append(task.start_ns)
        for way in range(2):
            source, target = chain[way], chain[1 - way]
            lists[way].append(target[np.argsort(source, kind="stable")])
            counts[way].append(np.bincount(source, minlength=g))
        gaps_at, kernels_at = gaps_at + g, kernels_at + n + 1
    (inputs_at, inputs), (readers_at, readers) = (
        (np.concatenate([[0], np.concatenate(count).cumsum()]), np.concatenate([*ends, np.zeros(1, np.int64)]))
        for count, ends in zip(counts, lists, strict=True)
    )
    return Tables(numbers, np.concatenate(gaps, 1), np.concatenate(starts), inputs_at, inputs, readers_at, readers)


def columns(
    batch: Batch, tables: Tables, walks: Ints, task: Ints, of: Ints,
    gap: Ints, kind: Ints,
) -> tuple[Floats, Floats]:  # fmt: skip
    """The columns of actions (V, ACTION), and of walks (W, WALK).

    Args:
        walks: (W,) of the batch. task: (W,) of the tables.
        of, gap, kind: (V,) the walk of each action (0 to W - 1), its gap (-1: do nothing) and what it does with it.
    """
    actions, states = np.zeros((len(of), ACTION), np.float32), np.zeros((len(walks), WALK), np.float32)
    _of_walks(walks, task, batch.walks, batch.options, *tables, states)
    longest = int(tables.numbers[:, [KERNELS, GAPS]].max())
    scratch = np.zeros((4, longest), np.int64)
    of, gap, kind = map(np.ascontiguousarray, (of, gap, kind))  # so that it is compiled once
    _of_actions(walks, task, batch.walks, batch.options, *tables, of, gap, kind, scratch, actions)
    return actions, states


@stage
def _log(x, scale):  # type: ignore[no-untyped-def]
    """sign(x) · log(1 + scale · |x|)."""
    return math.log1p(scale * x) if x > 0 else -math.log1p(-scale * x)


@stage(entry=True)
def _of_walks(  # type: ignore[no-untyped-def]
    walks, tasks, whole, options, numbers, gaps, start, inputs_at, inputs, readers_at, readers, out
):  # fmt: skip
    """Writes the columns of the walks."""
    for w in range(walks.size):
        row, number, to = whole[walks[w]], numbers[tasks[w]], out[w]
        n, g0, k0 = int(number[KERNELS]), int(number[GAPS_AT]), int(number[KERNELS_AT])
        limit, ideal, excess = number[LIMIT], number[IDEAL], number[EXCESS]
        p, stuck = row[POSITION], row[STUCK_AT]
        need, taken = row[options[NEED_AT] :], row[options[TAKEN_AT] :]
        now = start[k0 + p]
        left, most = 0.0, 0.0
        for k in range(p, n):
            over = need[k] - limit
            if over > 0:
                lasts = start[k0 + k + 1] - start[k0 + k]
                left += over * lasts
                most = max(most, over)
                part = min(int(start[k0 + k] / ideal * PARTS), PARTS - 1)
                to[9 + part] += over * lasts / excess / ideal * PARTS
        swaps, removed = 0.0, 0.0
        for g in range(int(number[GAPS])):
            if taken[g] == OFFLOAD:
                lasts = gaps[IN_NS, g0 + g] / ideal
                swaps += lasts
                part = min(int(start[k0 + gaps[BEFORE, g0 + g]] / ideal * PARTS), PARTS - 1)
                to[9 + PARTS + part] += lasts * PARTS
            elif taken[g] == REMOVE:
                removed += gaps[RERUN_NS, g0 + g] / ideal
        to[0] = now / ideal
        to[1] = _log(max(0, row[FREE_NS] - now) / ideal, 50.0)
        to[2] = _log((start[k0 + stuck] - now) / ideal, 50.0)
        to[3] = max(0.0, need[stuck] - limit) / excess if stuck < n else 0.0
        to[4] = left / number[TOTAL]
        to[5] = _log(left / number[TOTAL], 50.0)
        to[6] = most / excess
        to[7] = _log(swaps, 5.0)
        to[8] = _log(removed, 50.0)
        for j in range(9, to.size):
            to[j] = _log(to[j], 5.0)


@stage
def _note(row, options, number, gaps, start, scratch):  # type: ignore[no-untyped-def]
    """Writes of a walk: the kernels that do not fit, from the position on, and by how much; when the swap-ins are used
    that it has to make, the earliest first, and how long they take. Returns how many there are of each; and the sum of
    what is over, bytes · ns."""
    n, g0, k0, now = int(number[KERNELS]), int(number[GAPS_AT]), int(number[KERNELS_AT]), row[POSITION]
    need, taken, count, back, left = row[options[NEED_AT] :], row[options[TAKEN_AT] :], 0, 0, 0.0
    for k in range(now, n):
        over = need[k] - int(number[LIMIT])
        if over > 0:
            scratch[0, count], scratch[1, count] = k, over
            left += np.float64(over) * (start[k0 + k + 1] - start[k0 + k])
            count += 1
    for j in range(int(number[GAPS])):
        g = gaps[BY_BEFORE, g0 + j]
        if taken[g] == OFFLOAD and gaps[BEFORE, g0 + g] > now:
            scratch[2, back], scratch[3, back] = gaps[BEFORE, g0 + g], gaps[IN_NS, g0 + g]
            back += 1
    return count, back, left


@stage(entry=True)
def _of_actions(  # type: ignore[no-untyped-def]
    walks, tasks, whole, options, numbers, gaps, start, inputs_at, inputs, readers_at, readers, of, gap, kind, scratch,
    out,
):  # fmt: skip
    """Writes the columns of the actions, those of a walk one after the other."""
    noted, count, back, left = -1, 0, 0, 0.0
    for v in range(of.size):
        w, g, to = of[v], gap[v], out[v]
        row, number = whole[walks[w]], numbers[tasks[w]]
        if noted != w:
            noted = w
            count, back, left = _note(row, options, number, gaps, start, scratch)
        if g < 0:
            continue
        n, g0, k0 = int(number[KERNELS]), int(number[GAPS_AT]), int(number[KERNELS_AT])
        limit, ideal, excess, total = int(number[LIMIT]), number[IDEAL], number[EXCESS], number[TOTAL]
        p, stuck = row[POSITION], row[STUCK_AT]
        need, taken = row[options[NEED_AT] :], row[options[TAKEN_AT] :]
        after, before, nbytes = gaps[AFTER, g0 + g], gaps[BEFORE, g0 + g], gaps[NBYTES, g0 + g]
        wraps, again_ns = gaps[WRAPS, g0 + g], gaps[RERUN_NS, g0 + g] / ideal
        out_ns, in_ns = gaps[OUT_NS, g0 + g], gaps[IN_NS, g0 + g]
        now, use, ends, gets_stuck = start[k0 + p], start[k0 + before], start[k0 + n], start[k0 + stuck]

        useful, most = 0.0, 0
        for j in range(count):
            k = scratch[0, j]
            if k < before or (wraps and k > after):
                useful += np.float64(min(nbytes, scratch[1, j])) * (start[k0 + k + 1] - start[k0 + k])
                most = max(most, scratch[1, j])
        covers = stuck < n and (stuck < before or (wraps and stuck > after))
        to[0] = useful / max(left, 1.0)
        to[1] = _log(useful / total, 50.0)
        to[2] = most / excess
        to[3] = nbytes / excess
        to[4] = _log(nbytes / most, 1.0) if most > 0 else 0.0
        to[5] = 1.0 if covers else 0.0
        to[6] = min(nbytes / max(need[stuck] - limit, 1), 3.0) if covers else 0.0
        to[7] = _log((use - now) / ideal, 20.0)

        if kind[v] == OFFLOAD:  # its copies, and the room for its swap-in
            opens = start[k0 + after + 1] - (0 if after < p else ends)
            gone = max(max(row[FREE_NS], opens) + out_ns, now)
            late, busy, j = ends, 0, back - 1
            while j >= 0 and scratch[2, j] >= before:
                late = min(late, start[k0 + scratch[2, j]]) - scratch[3, j]
                j -= 1
            while j >= 0:
                busy += scratch[3, j]
                j -= 1
            late = min(late, use)
            to[8] = _log((gone - gets_stuck) / ideal, 50.0)
            to[9] = _log(max(0, gone - gets_stuck) / ideal, 50.0)
            to[10] = _log((use - late) / ideal, 50.0)
            to[11] = _log((late - in_ns - gone) / ideal, 50.0)
            to[12] = _log(max(0, gone - late + in_ns) / ideal, 50.0)
            to[13] = _log((late - in_ns - busy - now) / ideal, 20.0)
            to[14] = (out_ns + in_ns) / ideal
        else:  # what else is away when it runs again
            again, copied = 0, 0
            for e in range(inputs_at[g0 + g], inputs_at[g0 + g + 1]):
                if taken[inputs[e]] == REMOVE:
                    again += gaps[RERUN_NS, g0 + inputs[e]]
                elif taken[inputs[e]] == OFFLOAD:
                    copied += gaps[IN_NS, g0 + inputs[e]]
            to[15] = _log(again / ideal, 200.0)
            to[16] = _log(copied / ideal, 50.0)
            to[17] = _log(again_ns, 200.0)
            to[18] = _log(again_ns / max(useful / total, 1e-4), 1.0)
        away = 0  # recomputations that need it
        for e in range(readers_at[g0 + g], readers_at[g0 + g + 1]):
            away += 1 if taken[readers[e]] == REMOVE else 0
        to[19] = _log(away, 1.0)
