"""Compiled local search over recomputation schedules: moves, memory and time of a set of reruns.

A state is a sorted array of **runs**, before * n + kernel, one for each kernel that is recomputed just before another
(a ``Rerun``; n: kernels of the program). One backward sweep over the steps (``_sweep``) derives the retained tensors.
The cost is the duration of the runs plus ``price`` times the excess: bytes above the limit, summed over the steps.
Runs without a reader are removed. Moves: remove one or two runs (``_drop``); move a run, or all runs of a pass, to
another kernel (``_shift``); split the lifetime of a tensor at the worst or a random step (``_split``). While a state
exceeds the limit, further lifetimes are split at its worst step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import Ints, ragged
from simulator.compiled.jit import jit
from simulator.moves.plan_moves import uniform
from simulator.program import Program

# probabilities of the moves; the rest are splits
REMOVE = 0.35
SHIFT = 0.4
SECOND = 0.3  # probability that a removal removes a second run
# shifts: to a near kernel; else past the use, not before; a single run
NEAR = 0.4
AFTER_USE = 0.4
ALONE = 0.7
STEP = 4.0  # kernels, mean of a near shift
# splits: at a random step; at an earlier kernel; one more link
ANYWHERE = 0.3
EARLY = 0.3
CHAIN = 0.8
LONGEST = 12
REPAIRS = 2.0  # mean number of splits after a move
# change of the price per move (up above the limit, down below it), and its range
RATE = 3e-4
RANGE = 1e3
# what the search may do with the runs of a node
FREE = 0
BANNED = 1
LOCKED = 2
ROOM = 64  # maximum runs that a move adds beyond the members of its nodes

# Rows of Tables.kernels, .nodes, .tensors.
DURATION, WORKSPACE, RERUN_WORKSPACE, NODE = range(4)  # RERUN_WORKSPACE: including unused outputs
FROM, TO = range(2)
SIZE, OWNER = range(2)


class Tables(NamedTuple):
    """A program as arrays. A node is a kernel, or kernels that must be recomputed together (``nodes_of``).

    graph (ragged): per kernel, the tensors it uses but does not create, those it creates, and those it writes; per
    node, its kernels; per tensor, the kernels that use it. Persistent tensors are omitted.
    """

    kernels: Ints  # (4, n)
    nodes: Ints  # (2, nodes): a node can be recomputed before kernels FROM to TO
    tensors: Ints  # (2, tensors): bytes; the node that writes it, or -1
    worth: NDArray[np.float64]  # (tensors,), weight of splitting its lifetime; 0: never
    graph: Ints
    base: int  # bytes of persistent tensors
    room: int  # extra capacity of run arrays


def tables(program: Program, min_bytes: int) -> Tables:
    """Returns the arrays of a program; tensors smaller than ``min_bytes`` are never evicted."""
    n = len(program.kernels)
    tensors = program.tensors
    writes = program.writes
    nodes = nodes_of(program)
    node = {k: g for g, members in enumerate(nodes) for k in members}
    spans = [rerun_span(program, members) for members in nodes]
    first = [w[0] if w else -1 for w in writes]
    accessed = [[x for x in k.accesses if not tensors[x].persistent] for k in program.kernels]
    created = [[x for x in xs if first[x] == k] for k, xs in enumerate(accessed)]
    written = [[tensors[x] for x in dict.fromkeys(k.outputs)] for k in program.kernels]
    persistent = [sum(t.nbytes for t in out if t.persistent) for out in written]
    owner = [-1 if t.persistent or w < 0 else node[w] for t, w in zip(tensors, first, strict=True)]
    cost = [sum(program.kernels[k].duration_ns for k in members) for members in nodes]
    unit = 1e-3 * max(program.ideal_ns, 1)
    room = (LONGEST + 2) * max(map(len, nodes)) + ROOM
    worth = [
        t.nbytes / (cost[g] + unit) if g >= 0 and spans[g][0] <= spans[g][1] and t.nbytes >= max(min_bytes, 1) else 0.0
        for t, g in zip(tensors, owner, strict=True)
    ]
    return Tables(
        np.array(
            [
                [k.duration_ns for k in program.kernels],
                [k.workspace for k in program.kernels],
                [k.workspace + b for k, b in zip(program.kernels, persistent, strict=True)],
                [node[k] for k in range(n)],
            ],
            np.int64,
        ),
        np.array(spans, np.int64).T.copy(),
        np.array([[t.nbytes for t in tensors], owner], np.int64).reshape(2, -1),
        np.array(worth),
        ragged(
            [[x for x in xs if first[x] != k] for k, xs in enumerate(accessed)],
            created,
            [[x for x in dict.fromkeys(k.outputs) if not tensors[x].persistent] for k in program.kernels],
            nodes,
            [[] if t.persistent else uses for t, uses in zip(tensors, program.accesses, strict=True)],
        ),
        sum(t.nbytes for t in tensors if t.persistent),
        room,
    )


def nodes_of(program: Program) -> list[list[int]]:
    """Groups kernels that must be recomputed together: the writers of one tensor, and its readers between them."""
    group = list(range(len(program.kernels)))

    def root(k: int) -> int:
        while group[k] != k:
            k = group[k]
        return k

    for x, writers in enumerate(program.writes):
        if len(writers) > 1 and not program.tensors[x].persistent:
            for k in program.accesses[x]:
                if k in writers or (k < writers[-1] and program.kernels[k].recomputable):
                    group[max(root(k), root(writers[0]))] = min(root(k), root(writers[0]))
    nodes: dict[int, list[int]] = {}
    for k in range(len(group)):
        nodes.setdefault(root(k), []).append(k)
    return list(nodes.values())


def rerun_span(program: Program, members: list[int]) -> tuple[int, int]:
    """Returns the first and last kernel before which a node can be recomputed; first > last if it cannot.

    The node's inputs must be unchanged, and earlier versions of persistent tensors cannot be restored.
    """
    last = len(program.kernels) - 1
    for k in members:
        kernel = program.kernels[k]
        if not kernel.recomputable:
            last = -1
        for x in kernel.accesses:
            if program.tensors[x].persistent:
                read = x in kernel.inputs
                last = min([last, *(w for w in program.writes[x] if (w >= k if read else w > k))])
    return members[-1] + 1, last


@jit
def _sweep(table, limit, runs, m, live, stamp, counted):
    """Sweeps backward over all steps and removes the runs that write nothing that is read.

    If only some members of a node are unused, they stay in the array but are not ``counted``.

    Args:
        m: runs in use.
        live, stamp, counted: int64[tensors], int64[nodes], bool[len(runs)], overwritten.

    Returns:
        Runs in use, ns of the counted runs, excess in bytes, and the step with the highest memory (before * (n + 1) +
        kernel, where kernel n stands for the kernel itself).
    """
    kernels = table.kernels
    tensors = table.tensors
    graph = table.graph
    n = table.kernels.shape[1]
    live[:] = 0
    stamp[:] = -1
    memory = table.base
    peak = table.base
    worst = n
    extra = 0
    excess = 0.0
    j = m - 1
    w = m
    for b in range(n - 1, -1, -1):
        k = b
        is_rerun = False
        end = w
        has_unused = False
        while True:
            needed = not is_rerun
            if is_rerun:
                for i in range(graph[2 * n + 2 + k], graph[2 * n + 3 + k]):
                    needed = needed or live[graph[i]] == 1
                group = graph[3 * n + 3 + kernels[NODE, k] + 1] - graph[3 * n + 3 + kernels[NODE, k]] > 1
                if needed or group:
                    w -= 1
                    runs[w] = b * n + k
                    counted[w] = needed
                    has_unused = has_unused or not needed
            if needed:
                for part in (k, n + 1 + k):  # tensors it uses, and tensors it creates
                    for i in range(graph[part], graph[part + 1]):
                        x = graph[i]
                        if live[x] == 0:
                            live[x] = 1
                            memory += tensors[SIZE, x]
                used = memory + kernels[RERUN_WORKSPACE if is_rerun else WORKSPACE, k]
                if used > limit:
                    excess += used - limit
                if used > peak:
                    peak = used
                    worst = b * (n + 1) + (k if is_rerun else n)
                for i in range(graph[n + 1 + k], graph[n + 2 + k]):
                    live[graph[i]] = 0
                    memory -= tensors[SIZE, graph[i]]
                if is_rerun:
                    extra += kernels[DURATION, k]
                    stamp[kernels[NODE, k]] = b
            if j < 0 or runs[j] // n != b:
                break
            k = runs[j] % n
            is_rerun = True
            j -= 1
        if has_unused:  # removes nodes without counted runs
            z = end
            for i in range(end - 1, w - 1, -1):
                if stamp[kernels[NODE, runs[i] % n]] == b:
                    z -= 1
                    runs[z] = runs[i]
                    counted[z] = counted[i]
            w = z
    for i in range(w, m):
        runs[i - w] = runs[i]
        counted[i - w] = counted[i]
    return m - w, extra, excess, worst


def pruned(table: Tables, runs: Ints) -> Ints:
    """Returns the runs of a state that write data which a later kernel reads."""
    state = runs.copy()
    counted = np.zeros(len(runs), np.bool_)
    live = np.zeros(table.tensors.shape[1], np.int64)
    stamp = np.zeros(table.nodes.shape[1], np.int64)
    m, *_ = _sweep(table, 0, state, len(runs), live, stamp, counted)
    return np.array(state[:m][counted[:m]])


@jit
def _fill_live(table, runs, m, live, use, stop):
    """Fills ``live`` at step ``stop``: 1 for retained tensors, 2 for tensors in use; fills ``use`` with next uses."""
    graph = table.graph
    n = table.kernels.shape[1]
    live[:] = 0
    j = m - 1
    for b in range(n - 1, stop // (n + 1) - 1, -1):
        k = b
        code = n
        while True:
            is_stop = b * (n + 1) + code == stop
            for i in range(graph[k], graph[k + 1]):
                live[graph[i]] = 2 if is_stop else 1
                use[graph[i]] = b
            for i in range(graph[n + 1 + k], graph[n + 2 + k]):
                live[graph[i]] = 2 if is_stop else 0
            if is_stop:
                return
            if j < 0 or runs[j] // n != b:
                break
            k = code = runs[j] % n
            j -= 1


@jit
def _insert(table, runs, m, node, b):
    """Adds runs of all members of a node before kernel b; returns the runs in use."""
    graph = table.graph
    n = table.kernels.shape[1]
    for i in range(graph[3 * n + 3 + node], graph[3 * n + 4 + node]):
        key = b * n + graph[i]
        z = m
        while z > 0 and runs[z - 1] >= key:
            z -= 1
        if z == m or runs[z] != key:
            for y in range(m, z, -1):
                runs[y] = runs[y - 1]
            runs[z] = key
            m += 1
    return m


@jit
def _remove(table, runs, m, node, b):
    """Removes the runs of a node before kernel b; returns the runs in use."""
    kernels = table.kernels
    n = table.kernels.shape[1]
    z = 0
    for i in range(m):
        if runs[i] // n != b or kernels[NODE, runs[i] % n] != node:
            runs[z] = runs[i]
            z += 1
    return z


@jit
def _split(rng, table, rules, runs, m, live, before, use, stop):
    """Splits the lifetime of a tensor that is retained across step ``stop``; returns the runs in use."""
    nodes = table.nodes
    tensors = table.tensors
    worth = table.worth
    n = table.kernels.shape[1]
    _fill_live(table, runs, m, live, use, stop)
    x = -1
    total = 0.0
    for i in range(live.shape[0]):
        g = tensors[OWNER, i]
        if live[i] == 1 and worth[i] > 0.0 and nodes[FROM, g] <= use[i] <= nodes[TO, g] and rules[g] != BANNED:
            total += worth[i]
            if uniform(rng) * total < worth[i]:
                x = i
    for _ in range(LONGEST):
        if x < 0:
            break
        g = tensors[OWNER, x]
        b = use[x]
        low = max(stop // (n + 1) + 1, nodes[FROM, g])
        if b > low and uniform(rng) < EARLY:
            b = low + int(uniform(rng) * (b - low + 1))
        m = _insert(table, runs, m, g, b)
        if uniform(rng) > CHAIN:
            break
        before[:] = live
        _fill_live(table, runs, m, live, use, stop)
        x = -1
        count = 0
        for i in range(live.shape[0]):  # tensors that must be retained now
            if live[i] == 1 and before[i] == 0:
                g = tensors[OWNER, i]
                count += 1
                if uniform(rng) * count < 1.0:
                    is_allowed = nodes[FROM, g] <= use[i] <= nodes[TO, g] and rules[g] != BANNED
                    x = i if is_allowed else -1
    return m


@jit
def _shift(rng, table, runs, m, copy):
    """Moves a run or a pass; returns the runs in use."""
    kernels = table.kernels
    nodes = table.nodes
    graph = table.graph
    n = kernels.shape[1]
    i = int(uniform(rng) * m)
    k = runs[i] % n
    b = runs[i] // n
    if uniform(rng) < NEAR:
        distance = 1 + int(-STEP * math.log(1.0 - uniform(rng)))
        goal = b + distance if uniform(rng) < 0.5 else b - distance
    else:
        uses = graph[k + 1] - graph[k]
        created = graph[n + 2 + k] - graph[n + 1 + k]
        if uses + created == 0:
            return m
        z = int(uniform(rng) * (uses + created))
        x = graph[graph[k] + z] if z < uses else graph[graph[n + 1 + k] + z - uses]
        row = 3 * n + 4 + nodes.shape[1] + x
        goal = graph[graph[row] + int(uniform(rng) * (graph[row + 1] - graph[row]))] + (uniform(rng) < AFTER_USE)
    if goal == b:
        return m
    if uniform(rng) < ALONE:
        g = kernels[NODE, k]
        if nodes[FROM, g] <= goal <= nodes[TO, g]:
            m = _insert(table, runs, _remove(table, runs, m, g, b), g, goal)
        return m
    copy[:m] = runs[:m]
    for i in range(m):
        g = kernels[NODE, copy[i] % n]
        if copy[i] // n == b and nodes[FROM, g] <= goal <= nodes[TO, g]:
            m = _insert(table, runs, _remove(table, runs, m, g, b), g, goal)
    return m


@jit
def _drop(rng, table, rules, runs, m):
    """Removes a run, unless its node is locked; returns the runs in use."""
    n = table.kernels.shape[1]
    i = int(uniform(rng) * m)
    g = table.kernels[NODE, runs[i] % n]
    return m if rules[g] == LOCKED else _remove(table, runs, m, g, runs[i] // n)


@jit
def anneal(rng, table, limit, rules, runs, m, moves, hot, cold, price):
    """Runs simulated annealing; the temperature (ns) falls geometrically from ``hot`` to ``cold``.

    Args:
        rng: uint64[1], not 0.
        rules: int64[nodes]: FREE, BANNED or LOCKED.
        runs: int64, the first ``m`` are the start; overwritten with the final state.
        price: ns per byte of excess.

    Returns:
        Runs in use of the final state; the runs of the fastest state within the limit and the ns of its counted runs
        (-1: none was found); the final price.
    """
    n = table.kernels.shape[1]
    max_runs = runs.shape[0] - table.room
    live, before, use = np.zeros((3, table.tensors.shape[1]), np.int64)
    stamp = np.zeros(table.nodes.shape[1], np.int64)
    counted = np.zeros(runs.shape[0], np.bool_)
    new = np.empty_like(runs)
    copy = np.empty_like(runs)
    m, extra, excess, worst = _sweep(table, limit, runs, m, live, stamp, counted)
    best = runs[:0].copy()
    best_ns = -1
    if excess == 0.0:
        best = runs[:m].copy()
        best_ns = extra
    lowest = price / RANGE
    highest = price * RANGE
    for step in range(moves):
        temperature = hot * (cold / hot) ** (step / moves)
        new[:m] = runs[:m]
        z = m
        kind = uniform(rng)
        if kind < REMOVE:
            if m > 0:
                z = _drop(rng, table, rules, new, z)
            if z > 0 and uniform(rng) < SECOND:
                z = _drop(rng, table, rules, new, z)
        elif kind < REMOVE + SHIFT:
            if m > 0:
                z = _shift(rng, table, new, z, copy)
        else:
            stop = worst
            if excess == 0.0 or uniform(rng) < ANYWHERE:
                stop = int(uniform(rng) * n) * (n + 1) + n
            z = _split(rng, table, rules, new, z, live, before, use, stop)
        z, ns, new_excess, new_worst = _sweep(table, limit, new, z, live, stamp, counted)
        for _ in range(int(-REPAIRS * math.log(1.0 - uniform(rng)))):
            if new_excess == 0.0 or z > max_runs:
                break
            z = _split(rng, table, rules, new, z, live, before, use, new_worst)
            z, ns, new_excess, new_worst = _sweep(table, limit, new, z, live, stamp, counted)
        worse = ns - extra + price * (new_excess - excess)
        if z <= max_runs and (worse <= 0.0 or uniform(rng) < math.exp(-worse / temperature)):
            runs[:z] = new[:z]
            m = z
            extra = ns
            excess = new_excess
            worst = new_worst
            if new_excess == 0.0 and (best_ns < 0 or ns < best_ns):
                best = new[:z].copy()
                best_ns = ns
        price = min(max(price * (1.0 - RATE if excess == 0.0 else 1.0 + RATE), lowest), highest)
    return m, best, best_ns, price
