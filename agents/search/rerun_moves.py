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
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import Ints, ragged
from simulator.compiled.jit import jit
from simulator.moves.plan_moves import uniform
from simulator.program import Program


class MoveOptions(NamedTuple):
    """Parameters of the moves. Numbers without a unit are probabilities."""

    remove: float = 0.35  # a move removes a run
    remove_second: float = 0.3  # a removal removes another run
    shift: float = 0.4  # a move shifts runs; the rest are splits
    near: float = 0.4  # a shift goes to a near kernel, else to a kernel that uses one of the tensors
    mean_distance: float = 4.0  # kernels, of a near shift
    after_use: float = 0.4  # a shift to a use goes past it, else before it
    alone: float = 0.7  # a shift moves a single run, else all runs of the pass
    anywhere: float = 0.3  # a split is at a random step, else at the worst
    early: float = 0.3  # a split's run goes to an earlier kernel than the tensor's next use
    chain: float = 0.8  # a split continues with a tensor that must be retained because of it
    max_chain: int = 12  # splits in a chain
    mean_repairs: float = 2.0  # splits after a move, while the limit is exceeded
    price_rate: float = 3e-4  # relative change of the price per move: up above the limit, down below it
    price_range: float = 1e3  # maximum ratio of the price to its initial value, or the reverse
    spare_runs: int = 64  # capacity for runs that a move adds beyond the members of its nodes


OPTIONS = MoveOptions()


class Rule(IntEnum):
    """What the search may do with the runs of a node."""

    FREE = 0
    BANNED = 1  # adds none
    LOCKED = 2  # removes none


# Rows of Tables.kernels, .nodes and .tensors.
KernelRow = np.dtype([("ns", np.int64), ("workspace", np.int64), ("rerun_workspace", np.int64), ("node", np.int64)])
NodeRow = np.dtype([("first", np.int64), ("last", np.int64)])
TensorRow = np.dtype([("nbytes", np.int64), ("owner", np.int64)])


class Tables(NamedTuple):
    """A program as arrays. A node is a kernel, or kernels that must be recomputed together (``nodes_of``).

    ``graph`` is ragged (``encoding.ragged``). Its first lists are the tensors that each kernel uses but does not
    create. Fields ``creates`` to ``users`` are the indices of the first list of each further table. Persistent tensors
    are omitted.
    """

    kernels: NDArray[np.void]  # KernelRow (n,); ``rerun_workspace`` includes the persistent outputs
    nodes: NDArray[np.void]  # NodeRow (nodes,): first and last kernel before which it can be recomputed
    tensors: NDArray[np.void]  # TensorRow (tensors,): bytes; the node that writes it, or -1
    worth: NDArray[np.float64]  # (tensors,), weight of splitting its lifetime; 0: never
    graph: Ints
    creates: int  # per kernel, the tensors that it creates
    writes: int  # per kernel, the tensors that it writes
    members: int  # per node, its kernels
    users: int  # per tensor, the kernels that use it
    base: int  # bytes of persistent tensors
    room: int  # extra capacity of run arrays


def tables(program: Program, min_bytes: int) -> Tables:
    """Returns the arrays of a program; tensors smaller than ``min_bytes`` are never evicted."""
    n = len(program.kernels)
    tensors = program.tensors
    nodes = nodes_of(program)
    node = {k: g for g, members in enumerate(nodes) for k in members}
    spans = [rerun_span(program, members) for members in nodes]
    first = [w[0] if w else -1 for w in program.writes]
    owner = [-1 if t.persistent or w < 0 else node[w] for t, w in zip(tensors, first, strict=True)]

    accessed = [[x for x in k.accesses if not tensors[x].persistent] for k in program.kernels]
    used = [[x for x in xs if first[x] != k] for k, xs in enumerate(accessed)]
    created = [[x for x in xs if first[x] == k] for k, xs in enumerate(accessed)]
    outputs = [dict.fromkeys(k.outputs) for k in program.kernels]
    written = [[x for x in xs if not tensors[x].persistent] for xs in outputs]
    users = [[] if t.persistent else uses for t, uses in zip(tensors, program.accesses, strict=True)]

    # Nothing reads the persistent outputs of a rerun, so they go to scratch memory.
    scratch = [sum(tensors[x].nbytes for x in xs if tensors[x].persistent) for xs in outputs]
    kernels = [
        (k.duration_ns, k.workspace, k.workspace + b, node[i])
        for i, (k, b) in enumerate(zip(program.kernels, scratch, strict=True))
    ]

    # Bytes per ns of recomputation; with the unit, tensors of kernels without duration are not the only ones drawn.
    unit = 1e-3 * max(program.ideal_ns, 1)
    cost = [sum(program.kernels[k].duration_ns for k in members) for members in nodes]
    can_rerun = [g >= 0 and spans[g][0] <= spans[g][1] for g in owner]
    worth = [
        t.nbytes / (cost[g] + unit) if ok and t.nbytes >= max(min_bytes, 1) else 0.0
        for t, g, ok in zip(tensors, owner, can_rerun, strict=True)
    ]
    return Tables(
        np.array(kernels, KernelRow),
        np.array(spans, NodeRow),
        np.array([(t.nbytes, g) for t, g in zip(tensors, owner, strict=True)], TensorRow),
        np.array(worth),
        ragged(used, created, written, nodes, users),
        creates=n + 1,  # each table has one offset more than lists
        writes=2 * n + 2,
        members=3 * n + 3,
        users=3 * n + 4 + len(nodes),
        base=sum(t.nbytes for t in tensors if t.persistent),
        room=(OPTIONS.max_chain + 2) * max(map(len, nodes)) + OPTIONS.spare_runs,
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
    n = table.kernels.shape[0]
    # Backward, a tensor is live from its last use to its creation, and a run of a tensor that is not live is unused.
    # Removed runs leave a hole: runs[w:m] are the remaining ones so far, runs[:j + 1] those still to be visited.
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
                for i in range(graph[table.writes + k], graph[table.writes + k + 1]):
                    needed = needed or live[graph[i]] == 1
                node = table.members + kernels[k].node
                # Members of a node are removed together or not at all, which is known only after its first member.
                group = graph[node + 1] - graph[node] > 1
                if needed or group:
                    w -= 1
                    runs[w] = b * n + k
                    counted[w] = needed
                    has_unused = has_unused or not needed
            if needed:
                for row in (k, table.creates + k):  # tensors that it uses, and tensors that it creates
                    for i in range(graph[row], graph[row + 1]):
                        x = graph[i]
                        if live[x] == 0:
                            live[x] = 1
                            memory += tensors[x].nbytes
                used = memory + (kernels[k].rerun_workspace if is_rerun else kernels[k].workspace)
                if used > limit:
                    excess += used - limit
                if used > peak:
                    peak = used
                    worst = b * (n + 1) + (k if is_rerun else n)
                # Before the kernel, the tensors that it creates take no memory.
                for i in range(graph[table.creates + k], graph[table.creates + k + 1]):
                    live[graph[i]] = 0
                    memory -= tensors[graph[i]].nbytes
                if is_rerun:
                    extra += kernels[k].ns
                    stamp[kernels[k].node] = b
            if j < 0 or runs[j] // n != b:
                break
            k = runs[j] % n
            is_rerun = True
            j -= 1
        if has_unused:  # removes nodes without counted runs
            z = end
            for i in range(end - 1, w - 1, -1):
                if stamp[kernels[runs[i] % n].node] == b:
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
    live = np.zeros(table.tensors.shape[0], np.int64)
    stamp = np.zeros(table.nodes.shape[0], np.int64)
    m, *_ = _sweep(table, 0, state, len(runs), live, stamp, counted)
    return np.array(state[:m][counted[:m]])


@jit
def _fill_live(table, runs, m, live, use, stop):
    """Fills ``live`` at step ``stop``: 1 for retained tensors, 2 for tensors in use; fills ``use`` with next uses."""
    graph = table.graph
    n = table.kernels.shape[0]
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
            for i in range(graph[table.creates + k], graph[table.creates + k + 1]):
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
    n = table.kernels.shape[0]
    for i in range(graph[table.members + node], graph[table.members + node + 1]):
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
    n = table.kernels.shape[0]
    z = 0
    for i in range(m):
        if runs[i] // n != b or kernels[runs[i] % n].node != node:
            runs[z] = runs[i]
            z += 1
    return z


@jit
def _split(rng, table, rules, runs, m, live, before, use, stop):
    """Splits the lifetime of a tensor that is retained across step ``stop``; returns the runs in use."""
    nodes = table.nodes
    tensors = table.tensors
    worth = table.worth
    n = table.kernels.shape[0]
    _fill_live(table, runs, m, live, use, stop)
    # Draws a tensor by worth in one pass (reservoir sampling): the last one that replaces its predecessors is taken.
    x = -1
    total = 0.0
    for i in range(live.shape[0]):
        g = tensors[i].owner
        if live[i] == 1 and worth[i] > 0.0 and nodes[g].first <= use[i] <= nodes[g].last and rules[g] != Rule.BANNED:
            total += worth[i]
            if uniform(rng) * total < worth[i]:
                x = i
    for _ in range(OPTIONS.max_chain):
        if x < 0:
            break
        g = tensors[x].owner
        b = use[x]
        low = max(stop // (n + 1) + 1, nodes[g].first)
        if b > low and uniform(rng) < OPTIONS.early:
            b = low + int(uniform(rng) * (b - low + 1))
        m = _insert(table, runs, m, g, b)
        if uniform(rng) > OPTIONS.chain:
            break
        # The run reads inputs, which may have to be retained longer now: one of these is split next.
        before[:] = live
        _fill_live(table, runs, m, live, use, stop)
        x = -1
        count = 0
        for i in range(live.shape[0]):
            if live[i] == 1 and before[i] == 0:
                g = tensors[i].owner
                count += 1
                if uniform(rng) * count < 1.0:
                    is_allowed = nodes[g].first <= use[i] <= nodes[g].last and rules[g] != Rule.BANNED
                    x = i if is_allowed else -1
    return m


@jit
def _shift(rng, table, runs, m, copy):
    """Moves a run or a pass; returns the runs in use."""
    kernels = table.kernels
    nodes = table.nodes
    graph = table.graph
    n = kernels.shape[0]
    i = int(uniform(rng) * m)
    k = runs[i] % n
    b = runs[i] // n
    if uniform(rng) < OPTIONS.near:
        distance = 1 + int(-OPTIONS.mean_distance * math.log(1.0 - uniform(rng)))
        goal = b + distance if uniform(rng) < 0.5 else b - distance
    else:
        # Next to another use of a tensor that the kernel reads or creates, both share one copy of it.
        uses = graph[k + 1] - graph[k]
        created = graph[table.creates + k + 1] - graph[table.creates + k]
        if uses + created == 0:
            return m
        z = int(uniform(rng) * (uses + created))
        x = graph[graph[k] + z] if z < uses else graph[graph[table.creates + k] + z - uses]
        row = table.users + x
        goal = graph[graph[row] + int(uniform(rng) * (graph[row + 1] - graph[row]))] + (
            uniform(rng) < OPTIONS.after_use
        )
    if goal == b:
        return m
    if uniform(rng) < OPTIONS.alone:
        g = kernels[k].node
        if nodes[g].first <= goal <= nodes[g].last:
            m = _insert(table, runs, _remove(table, runs, m, g, b), g, goal)
        return m
    # Insertions move the runs, so the pass is read from a copy.
    copy[:m] = runs[:m]
    for i in range(m):
        g = kernels[copy[i] % n].node
        if copy[i] // n == b and nodes[g].first <= goal <= nodes[g].last:
            m = _insert(table, runs, _remove(table, runs, m, g, b), g, goal)
    return m


@jit
def _drop(rng, table, rules, runs, m):
    """Removes a run, unless its node is locked; returns the runs in use."""
    n = table.kernels.shape[0]
    i = int(uniform(rng) * m)
    g = table.kernels[runs[i] % n].node
    return m if rules[g] == Rule.LOCKED else _remove(table, runs, m, g, runs[i] // n)


@jit
def anneal(rng, table, limit, rules, runs, m, moves, hot, cold, price):
    """Runs simulated annealing; the temperature (ns) falls geometrically from ``hot`` to ``cold``.

    Args:
        rng: uint64[1], not 0.
        table: program as ``Tables``.
        limit: memory limit in bytes.
        rules: int64[nodes] of ``Rule``.
        runs: int64, the first ``m`` are the start; overwritten with the final state.
        moves: number of moves.
        hot, cold: first and last temperature in ns.
        price: ns per byte of excess.

    Returns:
        Runs in use of the final state; the runs of the fastest state within the limit and the ns of its counted runs
        (-1: none was found); the final price.
    """
    n = table.kernels.shape[0]
    max_runs = runs.shape[0] - table.room
    live, before, use = np.zeros((3, table.tensors.shape[0]), np.int64)
    stamp = np.zeros(table.nodes.shape[0], np.int64)
    counted = np.zeros(runs.shape[0], np.bool_)
    new = np.empty_like(runs)
    copy = np.empty_like(runs)
    m, extra, excess, worst = _sweep(table, limit, runs, m, live, stamp, counted)
    best = runs[:0].copy()
    best_ns = -1
    if excess == 0.0:
        best = runs[:m].copy()
        best_ns = extra
    lowest = price / OPTIONS.price_range
    highest = price * OPTIONS.price_range
    for step in range(moves):
        temperature = hot * (cold / hot) ** (step / moves)
        new[:m] = runs[:m]
        z = m
        kind = uniform(rng)
        if kind < OPTIONS.remove:
            if m > 0:
                z = _drop(rng, table, rules, new, z)
            if z > 0 and uniform(rng) < OPTIONS.remove_second:
                z = _drop(rng, table, rules, new, z)
        elif kind < OPTIONS.remove + OPTIONS.shift:
            if m > 0:
                z = _shift(rng, table, new, z, copy)
        else:
            stop = worst
            if excess == 0.0 or uniform(rng) < OPTIONS.anywhere:
                stop = int(uniform(rng) * n) * (n + 1) + n
            z = _split(rng, table, rules, new, z, live, before, use, stop)
        z, ns, new_excess, new_worst = _sweep(table, limit, new, z, live, stamp, counted)
        for _ in range(int(-OPTIONS.mean_repairs * math.log(1.0 - uniform(rng)))):
            if new_excess == 0.0 or z > max_runs:
                break
            z = _split(rng, table, rules, new, z, live, before, use, new_worst)
            z, ns, new_excess, new_worst = _sweep(table, limit, new, z, live, stamp, counted)
        # The excess is a soft constraint, so that the search can pass through states above the limit.
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
        # The price settles where about half of the states exceed the limit.
        price = min(
            max(price * (1.0 - OPTIONS.price_rate if excess == 0.0 else 1.0 + OPTIONS.price_rate), lowest), highest
        )
    return m, best, best_ns, price
