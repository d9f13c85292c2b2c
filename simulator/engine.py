"""The rules of reference.py, compiled: equal to it to the nanosecond, thousands of times faster.

``simulate`` is the public call. ``Engine`` is for planners, which score many plans of one program: a plan
is then an integer array with one row a decision (``rows_of``), and no Python object is made per call.

How it is fast: sizes, births and deaths are added up per kernel beforehand, so that a kernel that no
decision touches costs a few additions; the planned residency of a plan without recomputation is one
prefix sum; tensors on the host are kept sorted by next use (they leave in about the reverse order, so an
insertion is at the end). Rule 5's "fits at every kernel until it is used" is decided at the kernel with the
largest planned residency wherever that settles it: nothing after that kernel can be worse, because what
came back early only leaves the sum as it is used. A swap-in that does not fit beside a kernel is not tried
again before that kernel has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.machine import Machine
from simulator.plan import Decision, Plan, PlanError, Recompute, Swap
from simulator.program import Program
from simulator.reference import OutOfMemory
from simulator.timeline import Span, Timeline

Ints = NDArray[np.int64]

SWAP, RECOMPUTE = 0, 1
NEVER = 2**62

# Columns of a row.
KIND, TENSOR, AFTER, BEFORE, EXTRA = range(5)  # EXTRA: prefetch or -1; keep 0 or 1

# Streams of recorded spans.
_KERNEL, _AGAIN, _OUT, _IN = range(4)
_SPANS = (("compute", "kernel"), ("compute", "recompute"), ("d2h", "swap_out"), ("h2d", "swap_in"))


class Score(NamedTuple):
    """What a planner asks of a plan."""

    feasible: bool
    iteration_ns: int  # NEVER where infeasible
    required_bytes: int  # the smallest limit at which the plan is feasible
    peak_bytes: int


def rows_of(decisions: Iterable[Decision]) -> Ints:
    """Decisions as int64 (n, 5): kind, tensor, after, before, extra."""
    table = [
        (SWAP, d.tensor, d.after, d.before, -1 if d.prefetch is None else d.prefetch)
        if isinstance(d, Swap)
        else (RECOMPUTE, d.tensor, d.after, d.before, int(d.keep))
        for d in decisions
    ]
    return np.array(table, np.int64).reshape(-1, 5)


def decisions_of(rows: Ints) -> tuple[Decision, ...]:
    """The inverse of ``rows_of``."""
    return tuple(
        Swap(t, a, b, None if extra < 0 else extra) if kind == SWAP else Recompute(t, a, b, bool(extra))
        for kind, t, a, b, extra in rows.tolist()
    )


def _ragged(lists: Iterable[Iterable[int]]) -> tuple[Ints, Ints]:
    """Lists of integers as (offsets, values)."""
    rows = [list(r) for r in lists]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    return offsets, np.array([v for r in rows for v in r], np.int64)


class Engine:
    """One program on one machine, ready to score many plans. Not for several threads at once.

    Args:
        limit: bytes, persistent tensors included.
        iterations: how many are simulated; the last one counts.
    """

    def __init__(self, program: Program, machine: Machine, limit: int, iterations: int = 2):
        self.program, self.machine = program, machine
        self.limit, self.iterations = limit, iterations
        self.calls = 0
        kernels, tensors = program.kernels, program.tensors
        n = len(kernels)
        first = np.array([u[0] if u else n for u in program.accesses], np.int64)
        last = np.array([u[-1] if u else -1 for u in program.accesses], np.int64)
        size = np.array([t.nbytes for t in tensors], np.int64)
        persistent = np.array([t.persistent for t in tensors], np.int64)
        born = np.bincount(first[persistent == 0], size[persistent == 0], n + 1)[:n].astype(np.int64)
        dies = np.bincount(last[persistent == 0] + 1, size[persistent == 0], n + 1)[1:].astype(np.int64)
        workspace = [k.workspace for k in kernels]
        self._kernels = np.array([[k.duration_ns for k in kernels], workspace, born, dies, program.loads], np.int64)
        self._tensors = np.array([
            size, persistent, first, last, [machine.d2h_ns(t.nbytes) for t in tensors],
            [machine.h2d_ns(t.nbytes) for t in tensors]], np.int64)  # fmt: skip
        reads = _ragged(dict.fromkeys(k.inputs) for k in kernels)
        uses = _ragged(k.accesses for k in kernels)
        results = _ragged(dict.fromkeys(k.outputs) for k in kernels)
        writes = _ragged(program.writes)
        self._graph = (*reads, *uses, *results, *writes)
        self._base = sum(t.nbytes for t in tensors if t.persistent)
        self._planned = np.empty((2, n), np.int64)
        self._no_record = np.empty((0, 4), np.int64)

    def score(self, rows: Ints, limit_until: int | None = None) -> Score:
        """Simulates the plan ``rows``; the rows must fit the program (``Plan.check``), which is not tested here.

        Args:
            limit_until: enforce the limit for kernels before this one only; None: everywhere.
        """
        out = self._simulate(rows, limit_until, self._no_record, self._no_record)
        return Score(out[0] == 0, out[1], out[2], out[3])

    def planned(self, rows: Ints) -> Ints:
        """Planned residency per kernel (reference.py), int64 (kernels,), in a new array."""
        _plan_residency(self._kernels, self._tensors, self._graph, rows, self._base, self._planned)
        return self._planned[0].copy()

    def _simulate(self, rows: Ints, limit_until: int | None, spans: Ints, memory: Ints) -> tuple[int, ...]:
        self.calls += 1
        n = len(self.program.kernels)
        return _simulate(  # type: ignore[no-any-return]
            self._kernels, self._tensors, self._graph, rows, self._base, self._planned, self.limit,
            n if limit_until is None else limit_until, self.iterations, self.machine.copy_engines,
            self.machine.host_bytes, spans, memory,
        )  # fmt: skip

    def timeline(self, plan: Plan, limit_until: int | None = None) -> Timeline:
        """Simulates a plan and returns everything that happened.

        Raises:
            PlanError: the plan does not fit the program or the host.
            OutOfMemory: the plan is infeasible at the limit.
        """
        plan.check(self.program)
        rows = rows_of(plan.decisions)
        room = 4096
        while True:
            spans, memory = np.empty((room, 4), np.int64), np.empty((room, 2), np.int64)
            out = self._simulate(rows, limit_until, spans, memory)
            status, _, required, _, n_spans, n_memory, detail, used = out
            if n_spans < room and n_memory < room:
                break
            room = 2 * max(n_spans, n_memory)
        if status == 1:
            raise OutOfMemory(detail, int(self._planned[0, detail]) - used, used, self.limit)
        if status == 2:
            raise PlanError(
                f"the plan swaps {detail:,} bytes; {self.machine.name} has {self.machine.host_bytes:,} on the host"
            )
        found: list[Span] = []
        stalls: list[tuple[int, int, bool]] = []
        boundaries: list[int] = []
        for start, end, what, index in spans[:n_spans].tolist():
            if what == _STALL:
                stalls.append((start, end, bool(index)))
            elif what == _BOUNDARY:
                boundaries.append(end)
            else:
                stream, kind = _SPANS[what]
                found.append(Span(start, end, stream, kind, index))  # type: ignore[arg-type]
        curve = [(t, b) for t, b in memory[:n_memory].tolist()]
        return Timeline.assemble(self.program, self.limit, required, boundaries, found, curve, stalls)


def simulate(
    program: Program, plan: Plan, machine: Machine, limit: int, iterations: int = 2, limit_until: int | None = None
) -> Timeline:
    """Runs a program under a plan; the rules are in reference.py.

    Args:
        limit: bytes, persistent tensors included.
        iterations: how many are simulated; the figures are those of the last one.
        limit_until: enforce the limit for kernels before this one only; None: everywhere.

    Raises:
        PlanError: the plan does not fit the program, or swaps more than the host can hold.
        OutOfMemory: the plan is infeasible at the limit.
    """
    return Engine(program, machine, limit, iterations).timeline(plan, limit_until)


# ------------------------------------------------------------------------------------- compiled part

_STALL, _BOUNDARY = 4, 5  # further values of the third column of a recorded span

# Rows of Engine._kernels and Engine._tensors.
_DURATION, _WORKSPACE, _BORN, _DIES, _LOAD = range(5)
_SIZE, _PERSISTENT, _FIRST, _LAST, _D2H, _H2D = range(6)


@njit(cache=True)
def _plan_swaps(kernels, tensors, rows, planned):  # type: ignore[no-untyped-def]
    """Planned residency of a plan without recomputation: the load less what is away."""
    n = kernels.shape[1]
    need, change = planned[0], planned[1]
    change[:] = 0
    for r in range(rows.shape[0]):
        size, after, before = tensors[_SIZE, rows[r, TENSOR]], rows[r, AFTER], rows[r, BEFORE]
        if after >= before:
            change[0] -= size
        if after + 1 < n:
            change[after + 1] -= size
        change[before] += size
    away = 0
    load = kernels[_LOAD]
    for k in range(n):
        away += change[k]
        need[k] = load[k] + away


@njit(cache=True)
def _present(x, w, k, tensors, write_at, write, away, rows):  # type: ignore[no-untyped-def]
    """Is tensor x there at kernel k, or on the host, as kernel w read it?"""
    if not tensors[_PERSISTENT, x] and not (tensors[_FIRST, x] < k <= tensors[_LAST, x]):
        return False
    if away[x] >= 0 and rows[away[x], KIND] == RECOMPUTE:
        return False
    for i in range(write_at[x], write_at[x + 1]):
        if w <= write[i] < k:
            return False
    return True


@njit(cache=True)
def _walk(kernels, tensors, graph, rows, base, planned, away_at_start):  # type: ignore[no-untyped-def]
    """reference._walk: returns (kernel that ends each gap, gaps ended by a chain, chains, resident)."""
    read_at, read, use_at, use, result_at, result, write_at, write = graph
    n, m, n_tensors = kernels.shape[1], rows.shape[0], tensors.shape[1]
    size, need = tensors[_SIZE], planned[0]
    resident = np.zeros(n, np.int64)
    away = np.full(n_tensors, -1, np.int64)
    returns, by_chain = rows[:, BEFORE].copy(), np.zeros(m, np.bool_)
    opens = np.full(n, -1, np.int64)
    opens_next = np.full(m, -1, np.int64)
    used = base
    for r in range(m):
        opens_next[r] = opens[rows[r, AFTER]]
        opens[rows[r, AFTER]] = r
        if away_at_start[r]:
            away[rows[r, TENSOR]] = r
            used -= size[rows[r, TENSOR]]
    step_at = np.zeros(n + 1, np.int64)
    steps = np.empty((256, 3), np.int64)  # kernel, allocated, freed
    n_steps = 0
    marked = np.full(n, -1, np.int64)  # kernels of the chain of kernel k hold k
    pending, order = np.empty(n, np.int64), np.empty(n, np.int64)
    last, held = np.empty(n_tensors, np.int64), np.full(n_tensors, -1, np.int64)
    stays = np.full(n_tensors, -1, np.int64)
    for k in range(n):
        keep, n_pending, n_order = False, 0, 0
        for i in range(use_at[k], use_at[k + 1]):
            t = use[i]
            r = away[t]
            if r >= 0 and rows[r, KIND] == RECOMPUTE:
                keep |= rows[r, EXTRA] == 1
                stays[t] = k
                for j in range(write_at[t], write_at[t + 1]):
                    w = write[j]
                    if w < k and marked[w] != k:
                        marked[w] = k
                        pending[n_pending] = w
                        n_pending += 1
        while n_pending:
            n_pending -= 1
            w = pending[n_pending]
            order[n_order] = w
            n_order += 1
            for i in range(read_at[w], read_at[w + 1]):
                x = read[i]
                if _present(x, w, k, tensors, write_at, write, away, rows):
                    continue
                for j in range(write_at[x], write_at[x + 1]):
                    u = write[j]
                    if u < w and marked[u] != k:
                        marked[u] = k
                        pending[n_pending] = u
                        n_pending += 1
        chain = np.sort(order[:n_order])
        if keep:
            for r in range(m):
                t = rows[r, TENSOR]
                if rows[r, KIND] == RECOMPUTE and away[t] == r:
                    whole = True
                    for j in range(write_at[t], write_at[t + 1]):
                        whole &= write[j] >= k or marked[write[j]] == k
                    if whole:
                        stays[t] = k
        for w in chain:
            for i in range(result_at[w], result_at[w + 1]):
                last[result[i]] = w
            for i in range(read_at[w], read_at[w + 1]):
                x = read[i]
                if not _present(x, w, k, tensors, write_at, write, away, rows):
                    last[x] = w
        if n_steps + n_order > steps.shape[0]:
            more = np.empty((2 * (n_steps + n_order), 3), np.int64)
            more[:n_steps] = steps[:n_steps]
            steps = more
        for s in range(n_order):
            w = chain[s]
            allocated, freed = 0, 0
            for i in range(result_at[w], result_at[w + 1]):
                if held[result[i]] != k:
                    held[result[i]] = k
                    allocated += size[result[i]]
            for side in range(2):
                lo, hi = (result_at[w], result_at[w + 1]) if side == 0 else (read_at[w], read_at[w + 1])
                for i in range(lo, hi):
                    x = result[i] if side == 0 else read[i]
                    if held[x] == k and last[x] == w and stays[x] != k:
                        held[x] = -1
                        freed += size[x]
            steps[n_steps + s, 0] = w
            steps[n_steps + s, 1] = allocated
            steps[n_steps + s, 2] = freed
        # Swapped tensors that the chain or the kernel needs come back.
        for s in range(n_order):
            w = chain[s]
            for i in range(read_at[w], read_at[w + 1]):
                x = read[i]
                r = away[x]
                if r >= 0 and rows[r, KIND] == SWAP and _present(x, w, k, tensors, write_at, write, away, rows):
                    returns[r], by_chain[r] = k, True
                    away[x] = -1
                    used += size[x]
        for i in range(use_at[k], use_at[k + 1]):
            r = away[use[i]]
            if r >= 0 and rows[r, KIND] == SWAP:
                returns[r], by_chain[r] = k, False
                away[use[i]] = -1
                used += size[use[i]]
        resident[k] = used
        highest = 0
        for s in range(n_steps, n_steps + n_order):
            used += steps[s, 1]
            highest = max(highest, used + kernels[_WORKSPACE, steps[s, 0]])
            used -= steps[s, 2]
        if n_order:
            for r in range(m):
                t = rows[r, TENSOR]
                if stays[t] == k and away[t] == r:
                    returns[r] = k
                    away[t] = -1
        n_steps += n_order
        step_at[k + 1] = n_steps
        used += kernels[_BORN, k]
        need[k] = max(highest, used + kernels[_WORKSPACE, k])
        used -= kernels[_DIES, k]
        r = opens[k]
        while r >= 0:
            away[rows[r, TENSOR]] = r
            used -= size[rows[r, TENSOR]]
            r = opens_next[r]
    still = np.zeros(m, np.bool_)
    for r in range(m):
        still[r] = away[rows[r, TENSOR]] == r
    return returns, by_chain, step_at, steps, resident, still


@njit(cache=True)
def _resolve(kernels, tensors, graph, rows, base, planned):  # type: ignore[no-untyped-def]
    """reference.resolve."""
    wraps = rows[:, AFTER] >= rows[:, BEFORE]
    out = _walk(kernels, tensors, graph, rows, base, planned, wraps)
    if (out[5] != wraps).any():
        out = _walk(kernels, tensors, graph, rows, base, planned, out[5])
    return out


@njit(cache=True)
def _plan_residency(kernels, tensors, graph, rows, base, planned):  # type: ignore[no-untyped-def]
    """Fills planned[0]."""
    if (rows[:, KIND] == RECOMPUTE).any():
        _resolve(kernels, tensors, graph, rows, base, planned)
    else:
        _plan_swaps(kernels, tensors, rows, planned)


@njit(cache=True)
def _simulate(  # type: ignore[no-untyped-def]
    kernels, tensors, graph, rows, base, planned, limit, until, iterations, copy_engines, host_bytes, spans, memory
):
    """Returns (status, iteration_ns, required, peak, spans recorded, memory changes recorded, detail, used).

    status 0: done; 1: out of memory at kernel ``detail``; 2: ``detail`` bytes are too many for the host.
    """
    n, m = kernels.shape[1], rows.shape[0]
    duration, workspace, born, dies = kernels[_DURATION], kernels[_WORKSPACE], kernels[_BORN], kernels[_DIES]
    size, d2h_ns, h2d_ns = tensors[_SIZE], tensors[_D2H], tensors[_H2D]
    write_at, write = graph[6], graph[7]
    record = spans.shape[0] > 0
    n_spans, n_memory = 0, 0

    recomputes = False
    for r in range(m):
        recomputes |= rows[r, KIND] == RECOMPUTE
    if recomputes:
        returns, by_chain, step_at, steps, resident, starts_away = _resolve(
            kernels, tensors, graph, rows, base, planned
        )
    else:
        _plan_swaps(kernels, tensors, rows, planned)
        returns, by_chain = rows[:, BEFORE].copy(), np.zeros(m, np.bool_)
        starts_away = np.empty(m, np.bool_)
        for r in range(m):
            starts_away[r] = rows[r, AFTER] >= rows[r, BEFORE]
        step_at, steps = np.zeros(1, np.int64), np.empty((0, 3), np.int64)
        resident = step_at
    need, enforced = planned[0], planned[1]  # enforced: 0 where the limit does not count
    required, bad = 0, -1
    for k in range(n):
        enforced[k] = need[k] if k < until else -NEVER
        required = max(required, need[k])
        if bad < 0 and k < until and need[k] > limit:
            bad = k
    if bad >= 0:
        there = resident[bad] if recomputes else need[bad] - workspace[bad] - born[bad]
        return 1, NEVER, required, 0, 0, 0, bad, there

    top_from = np.empty(n, np.int64)  # the kernel with the largest planned residency from this one on
    top = n - 1
    for k in range(n - 1, -1, -1):
        if enforced[k] > enforced[top]:
            top = k
        top_from[k] = top

    # Per tensor: position of its newest host copy. Per row: kernels since the tensor was last written.
    copied = np.empty(tensors.shape[1], np.int64)
    for r in range(m):
        copied[rows[r, TENSOR]] = -NEVER
    written, length, state = np.empty(m, np.int64), np.empty(m, np.int64), np.zeros(m, np.int64)
    opens, due = np.full(n, -1, np.int64), np.full(n, -1, np.int64)  # linked lists of rows by kernel
    opens_next, due_next = np.full(m, -1, np.int64), np.full(m, -1, np.int64)
    before, ready = np.empty(m, np.int64), np.empty(m, np.int64)  # positions, while away
    waiting, n_waiting = np.empty(m, np.int64), 0  # on the host, the next to come back last
    pinned, n_pinned = np.empty(m, np.int64), 0  # on the host, not to come back yet
    queue, q_head, q_tail = np.empty(m * (iterations + 1) + 1, np.int64), 0, 0
    # Came back before its use: (position of the use, bytes), sorted by position.
    most = m * (iterations + 2) + 1
    early, e_head, e_tail, came_early = np.empty((2 * most, 2), np.int64), most, most, 0
    # 0: plain compute; 1: swap-ins are due at this kernel; 2: something else happens at its start or end.
    busy = np.zeros(n, np.int8)
    busy[n - 1] = 2
    used, on_host = base, 0
    for r in range(m):
        t, after = rows[r, TENSOR], rows[r, AFTER]
        previous, at = -1, opens[after]  # ascending by tensor
        while at >= 0 and rows[at, TENSOR] < t:
            previous, at = at, opens_next[at]
        opens_next[r] = at
        if previous < 0:
            opens[after] = r
        else:
            opens_next[previous] = r
        if rows[r, KIND] == RECOMPUTE:
            busy[after] = busy[returns[r]] = busy[returns[r] - 1] = 2  # -1 is the last kernel
            continue
        if copied[t] == -NEVER:
            copied[t] = -NEVER + 1
            on_host += size[t]
        busy[after] = 2
        busy[returns[r]] = max(busy[returns[r]], np.int8(1))
        if rows[r, EXTRA] >= 0:
            busy[rows[r, EXTRA]] = 2
        due_next[r] = due[returns[r]]
        due[returns[r]] = r
        gap = returns[r] - after
        length[r] = gap if gap > 0 else gap + n
        since = NEVER // 2
        if write_at[t] < write_at[t + 1]:
            since = after - write[write_at[t + 1] - 1] + n
            for i in range(write_at[t + 1] - 1, write_at[t] - 1, -1):
                if write[i] <= after:
                    since = after - write[i]
                    break
        written[r] = since
    if on_host > host_bytes:
        return 2, NEVER, required, 0, 0, 0, on_host, 0

    now, position, k, iteration, begin = 0, 0, 0, 0, 0
    s, again, running, end = step_at[0], False, False, 0
    out_row, out_end, back_row, back_end = -1, 0, -1, 0
    blocked = -1  # the head of `waiting` cannot come back before the kernel at this position has ended
    due_left, chain_left = 0, 0
    landed = -1  # a row whose tensor has just reached the host
    for r in range(m):
        if starts_away[r] and rows[r, KIND] == SWAP:
            t = rows[r, TENSOR]
            used -= size[t]
            copied[t] = rows[r, AFTER] - n
            state[r] = 2
            before[r] = rows[r, AFTER] - n + length[r]
            ready[r] = rows[r, AFTER] - n + 1
            if rows[r, EXTRA] >= 0 and rows[r, EXTRA] != rows[r, AFTER]:
                ahead = rows[r, EXTRA] - rows[r, AFTER]
                ready[r] += ahead if ahead > 0 else ahead + n
            if before[r] == 0:
                due_left += 1
                if by_chain[r]:
                    chain_left += 1
            pinned[n_pinned] = r
            n_pinned += 1
    peak = used
    limit_here = limit if until > 0 else NEVER
    if record:
        memory[0, 0], memory[0, 1] = 0, used
    n_memory = 1
    fresh = True  # a new position: pinned swap-ins may have become ready
    while True:
        # Copies complete.
        if out_row >= 0 and out_end == now:
            used -= size[rows[out_row, TENSOR]]
            if record:
                if n_memory < memory.shape[0]:
                    memory[n_memory, 0], memory[n_memory, 1] = now, used
                n_memory += size[rows[out_row, TENSOR]] > 0
            landed, out_row = out_row, -1
            state[landed] = 2
            pinned[n_pinned] = landed
            n_pinned += 1
            fresh = True
        if back_row >= 0 and back_end == now:
            state[back_row] = 0
            if before[back_row] == position:
                due_left -= 1
                if by_chain[back_row]:
                    chain_left -= 1
            back_row = -1
        # The kernel completes.
        if running and end == now:
            running = False
            if again:
                change = workspace[steps[s, 0]] + steps[s, 2]
                s += 1
            else:
                change = workspace[k] + dies[k]
            used -= change
            if record:
                if n_memory < memory.shape[0]:
                    memory[n_memory, 0], memory[n_memory, 1] = now, used
                n_memory += change > 0
            if not again:
                r = opens[k]
                while r >= 0:
                    t = rows[r, TENSOR]
                    leaves = True
                    if rows[r, KIND] == SWAP:
                        before[r] = position + length[r]
                        ready[r] = position + 1
                        if rows[r, EXTRA] >= 0 and rows[r, EXTRA] != k:
                            ahead = rows[r, EXTRA] - k
                            ready[r] += ahead if ahead > 0 else ahead + n
                        leaves = copied[t] >= position - written[r]
                        copied[t] = position
                        if leaves:
                            state[r] = 2
                            pinned[n_pinned] = r
                            n_pinned += 1
                        else:
                            state[r] = 1
                            queue[q_tail] = r
                            q_tail += 1
                    if leaves:
                        used -= size[t]
                        if record:
                            if n_memory < memory.shape[0]:
                                memory[n_memory, 0], memory[n_memory, 1] = now, used
                            n_memory += size[t] > 0
                    r = opens_next[r]
                position += 1
                fresh = True
                k += 1
                if k == n:
                    k = 0
                    if record:
                        if n_spans < spans.shape[0]:
                            spans[n_spans, 0], spans[n_spans, 1] = now, now
                            spans[n_spans, 2], spans[n_spans, 3] = _BOUNDARY, 0
                        n_spans += 1
                    iteration += 1
                    if iteration == iterations:
                        break
                    begin = now
                limit_here = limit if k < until else NEVER
                due_left, chain_left = 0, 0
                r = due[k]
                while r >= 0:
                    if state[r] != 0:
                        due_left += 1
                        if by_chain[r]:
                            chain_left += 1
                    r = due_next[r]
                if recomputes:
                    s = step_at[k]
        if fresh and n_pinned:
            left = 0
            for i in range(n_pinned):
                r = pinned[i]
                if ready[r] > position and before[r] > position:
                    pinned[left] = r
                    left += 1
                    continue
                at = n_waiting  # sorted by (before, tensor), the smallest last
                while at > 0 and (
                    before[waiting[at - 1]] < before[r]
                    or (before[waiting[at - 1]] == before[r] and rows[waiting[at - 1], TENSOR] < rows[r, TENSOR])
                ):
                    waiting[at] = waiting[at - 1]
                    at -= 1
                waiting[at] = r
                if at == n_waiting:
                    blocked = -1
                n_waiting += 1
            n_pinned = left
        fresh = False
        # Copies start.
        if q_head < q_tail and out_row < 0 and (copy_engines == 2 or back_row < 0):
            out_row = queue[q_head]
            q_head += 1
            out_end = now + d2h_ns[rows[out_row, TENSOR]]
            if record:
                if n_spans < spans.shape[0]:
                    spans[n_spans, 0], spans[n_spans, 1] = now, out_end
                    spans[n_spans, 2], spans[n_spans, 3] = _OUT, rows[out_row, TENSOR]
                n_spans += 1
        if n_waiting and back_row < 0 and (copy_engines == 2 or out_row < 0):
            r = waiting[n_waiting - 1]
            t = rows[r, TENSOR]
            start = position + 1 if running and not again else position
            if start > blocked and used + size[t] <= limit_here:
                blocked = -1
                fits = limit - size[t]
                while e_head < e_tail and early[e_head, 0] <= position:
                    came_early -= early[e_head, 1]
                    e_head += 1
                p = start
                while p < before[r] and blocked < 0:  # this iteration's part, then the next one's
                    at = p % n
                    origin = p - at
                    stop = min(before[r], origin + n)
                    top = origin + top_from[at]
                    if top < stop:
                        came, i = came_early, e_head
                        while i < e_tail and early[i, 0] <= top:
                            came -= early[i, 1]
                            i += 1
                        if enforced[top - origin] + came > fits:
                            blocked = top
                            break
                        last = top if enforced[top - origin] + came_early > fits else p
                    else:
                        last = stop
                    i, came = e_tail - 1, 0
                    for q in range(last - 1, p - 1, -1):
                        while i >= e_head and early[i, 0] > q:
                            came += early[i, 1]
                            i -= 1
                        if enforced[q - origin] + came > fits:
                            blocked = q
                            break
                    p = stop
                if blocked < 0:
                    low, high = e_head, e_tail
                    while low < high:
                        middle = (low + high) // 2
                        if early[middle, 0] > before[r]:
                            high = middle
                        else:
                            low = middle + 1
                    if low - e_head < e_tail - low:
                        for i in range(e_head, low):
                            early[i - 1, 0], early[i - 1, 1] = early[i, 0], early[i, 1]
                        e_head -= 1
                        low -= 1
                    else:
                        for i in range(e_tail, low, -1):
                            early[i, 0], early[i, 1] = early[i - 1, 0], early[i - 1, 1]
                        e_tail += 1
                    early[low, 0], early[low, 1] = before[r], size[t]
                    came_early += size[t]
                    n_waiting -= 1
                    used += size[t]
                    peak = max(peak, used)
                    state[r] = 3
                    back_row, back_end = r, now + h2d_ns[t]
                    if record:
                        if n_spans < spans.shape[0]:
                            spans[n_spans, 0], spans[n_spans, 1] = now, back_end
                            spans[n_spans, 2], spans[n_spans, 3] = _IN, t
                        n_spans += 1
                        if n_memory < memory.shape[0]:
                            memory[n_memory, 0], memory[n_memory, 1] = now, used
                        n_memory += size[t] > 0
        # Plain kernels, up to the next completion of a copy or the next chance of a swap-in.
        if not running and not record and busy[k] < 2:
            until_time = NEVER
            if out_row >= 0:
                until_time = out_end
            if back_row >= 0 and back_end < until_time:
                until_time = back_end
            until_position = NEVER
            if n_waiting and back_row < 0 and (copy_engines == 2 or out_row < 0):
                until_position = blocked
            came_from = position
            while busy[k] < 2 and position < until_position:
                if busy[k] == 1:
                    due_left = 0
                    r = due[k]
                    while r >= 0:
                        due_left += state[r] != 0
                        r = due_next[r]
                    if due_left:
                        break
                change = workspace[k] + born[k]
                if used + change > limit_here or now + duration[k] >= until_time:
                    break
                peak = max(peak, used + change)
                used += born[k] - dies[k]
                now += duration[k]
                position += 1
                k += 1
                limit_here = limit if k < until else NEVER
            if position != came_from:
                due_left, chain_left = 0, 0
                r = due[k]
                while r >= 0:
                    if state[r] != 0:
                        due_left += 1
                        if by_chain[r]:
                            chain_left += 1
                    r = due_next[r]
                if recomputes:
                    s = step_at[k]
                if due_left and n_pinned:
                    fresh = True
                    continue
        # A kernel starts.
        if not running:
            again = recomputes and s < step_at[k + 1]
            which = steps[s, 0] if again else k
            change = workspace[which] + (steps[s, 1] if again else born[k])
            if (chain_left if again else due_left) == 0 and used + change <= limit_here:
                used += change
                peak = max(peak, used)
                running, end = True, now + duration[which]
                if record:
                    if n_spans < spans.shape[0]:
                        spans[n_spans, 0], spans[n_spans, 1] = now, end
                        spans[n_spans, 2], spans[n_spans, 3] = (_AGAIN if again else _KERNEL), which
                    n_spans += 1
                    if n_memory < memory.shape[0]:
                        memory[n_memory, 0], memory[n_memory, 1] = now, used
                    n_memory += change > 0
        # On to the next completion.
        then = end if running else NEVER
        if out_row >= 0 and out_end < then:
            then = out_end
        if back_row >= 0 and back_end < then:
            then = back_end
        if then == NEVER:
            raise AssertionError("nothing is under way: the planned residency promised that this cannot be")
        if record and not running and then > now:
            missing = (chain_left if again else due_left) > 0
            if n_spans < spans.shape[0]:
                spans[n_spans, 0], spans[n_spans, 1] = now, then
                spans[n_spans, 2], spans[n_spans, 3] = _STALL, missing and back_row >= 0
            n_spans += 1
        now = then
    return 0, now - begin, required, peak, n_spans, n_memory, 0, 0
