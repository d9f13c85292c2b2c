"""The rules of reference.py, compiled: equal to it to the nanosecond, thousands of times faster.

``simulate`` is the public call. ``Engine`` is for planners, which score many plans of one program: a plan
is then an integer array with one row a decision (``rows_of``), and no Python object is made per call.

How it is fast: sizes, births and deaths are added up per kernel beforehand, so that a kernel that no
decision touches costs a few additions; the planned residency of a plan without recomputation is one
prefix sum (chains.py has the rest); a swap-in that does not fit is not tried again before the last kernel
beside which it does not fit has ended. Rule 5's "fits at every kernel until it is used" is kept per segment,
a run of kernels that ends where something is due: what came back early is due at the end of a segment, so
it weighs on all of a segment or on nothing of it, and the rule is one maximum over an array, a charge one
addition to it (a vector loop each).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from simulator.chains import recomputes, resolve
from simulator.machine import Machine
from simulator.plan import Plan, PlanError
from simulator.program import Program
from simulator.reference import OutOfMemory
from simulator.timeline import Span, Timeline

# isort: off
from simulator.tables import (
    AFTER, ALLOCATED, AWAY_AT_START, BEFORE, BORN, BY_CHAIN, D2H, DIES, DURATION, EXTRA, FREED, H2D, KIND, LOAD,
    NEVER, RECOMPUTE, RESIDENT, RETURNS, SIZE, STEP_AT, STEP_KERNEL, SWAP, TENSOR, WORKSPACE,
    Ints, decisions_of, ragged, rows_of,
)  # fmt: skip
# isort: on

__all__ = ["KIND", "NEVER", "RECOMPUTE", "SWAP", "TENSOR", "Engine", "Score", "decisions_of", "rows_of", "simulate"]

# What an entry of the log is: the first four are spans.
_KERNEL, _AGAIN, _OUT, _IN, _STALL, _BOUNDARY, _MEMORY = range(7)
_SPANS = (("compute", "kernel"), ("compute", "recompute"), ("d2h", "swap_out"), ("h2d", "swap_in"))


class Score(NamedTuple):
    """What a planner asks of a plan."""

    feasible: bool
    iteration_ns: int  # NEVER where infeasible
    required_bytes: int  # the smallest limit at which the plan is feasible
    peak_bytes: int


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
        self._graph = ragged(
            [dict.fromkeys(k.inputs) for k in kernels], [k.accesses for k in kernels],
            [dict.fromkeys(k.outputs) for k in kernels], program.writes,
        )  # fmt: skip
        self._base = sum(t.nbytes for t in tensors if t.persistent)
        self._planned = np.empty((2, n), np.int64)
        self._no_log = np.empty((0, 4), np.int64)
        self._no_chains = (np.empty((0, 3), np.int64), np.empty((0, 2), np.int64), np.empty((0, 3), np.int64))

    def score(self, rows: Ints, limit_until: int | None = None) -> Score:
        """Simulates the plan ``rows``; the rows must fit the program (``Plan.check``), which is not tested here.

        Args:
            limit_until: enforce the limit for kernels before this one only; None: everywhere.
        """
        out = self._simulate(rows, limit_until, self._no_log)
        return Score(out[0] == 0, out[1], out[2], out[3])

    def planned(self, rows: Ints) -> Ints:
        """Planned residency per kernel (reference.py), int64 (kernels,), in a new array."""
        if not len(self._chains(rows)[0]):
            _plan_swaps(self._kernels, self._tensors, rows, self._planned)
        return np.array(self._planned[0])

    def _chains(self, rows: Ints) -> tuple[Ints, ...]:
        """What ``resolve`` returns, or empty arrays for a plan without recomputation."""
        if not recomputes(rows):
            return self._no_chains
        return resolve(self._kernels, self._tensors, self._graph, rows, self._base, self._planned[0])  # type: ignore[no-any-return]

    def _simulate(self, rows: Ints, limit_until: int | None, log: Ints) -> tuple[int, ...]:
        self.calls += 1
        n = len(self.program.kernels)
        return _simulate(  # type: ignore[no-any-return, call-arg]
            self._kernels, self._tensors, self._graph, rows, *self._chains(rows), self._planned, self._base, self.limit,
            n if limit_until is None else limit_until, self.iterations, self.machine.copy_engines,
            self.machine.host_bytes, log,
        )  # fmt: skip

    def timeline(self, plan: Plan, limit_until: int | None = None) -> Timeline:
        """Simulates a plan and returns everything that happened.

        Raises:
            PlanError: the plan does not fit the program or the host.
            OutOfMemory: the plan is infeasible at the limit.
        """
        plan.check(self.program)
        rows = rows_of(plan.decisions)
        n_log, room = 4096, 0
        while n_log > room:
            room = n_log
            log = np.empty((room, 4), np.int64)
            status, _, required, _, n_log, detail, used = self._simulate(rows, limit_until, log)
        if status == 1:
            raise OutOfMemory(detail, int(self._planned[0, detail]) - used, used, self.limit)
        if status == 2:
            raise PlanError(
                f"the plan swaps {detail:,} bytes; {self.machine.name} has {self.machine.host_bytes:,} on the host"
            )
        found: list[Span] = []
        stalls: list[tuple[int, int, bool]] = []
        boundaries: list[int] = []
        curve: list[tuple[int, int]] = []  # time, bytes
        for start, end, what, index in log[:n_log].tolist():
            if what == _MEMORY:
                curve.append((start, index))
            elif what == _STALL:
                stalls.append((start, end, bool(index)))
            elif what == _BOUNDARY:
                boundaries.append(end)
            else:
                stream, kind = _SPANS[what]
                found.append(Span(start, end, stream, kind, index))  # type: ignore[arg-type]
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

_BUSY, _CHAIN = 2**40, 2**20  # parts of `gate` in _simulate


@njit(cache=True)
def _plan_swaps(kernels, tensors, rows, planned):  # type: ignore[no-untyped-def]
    """Planned residency of a plan without recomputation: the load less what is away."""
    n = kernels.shape[1]
    need, change = planned[0], planned[1]
    change[:] = 0
    for r in range(rows.shape[0]):
        size, after, before = tensors[SIZE, rows[r, TENSOR]], rows[r, AFTER], rows[r, BEFORE]
        if after >= before:
            change[0] -= size
        if after + 1 < n:
            change[after + 1] -= size
        change[before] += size
    away = 0
    load = kernels[LOAD]
    for k in range(n):
        away += change[k]
        need[k] = load[k] + away


@njit(cache=True)
def _log(log, count, start, end, what, index):  # type: ignore[no-untyped-def]
    """Appends to the log while there is room; returns how many entries there would be with room for all."""
    if count < log.shape[0]:
        log[count, 0], log[count, 1], log[count, 2], log[count, 3] = start, end, what, index
    return count + 1


@njit(cache=True)
def _log_memory(log, count, now, used, change):  # type: ignore[no-untyped-def]
    return _log(log, count, now, now, _MEMORY, used) if change else count


@njit(cache=True)
def _simulate(  # type: ignore[no-untyped-def]
    kernels, tensors, graph, rows, by_row, by_kernel, steps, planned, base, limit, until, iterations, copy_engines,
    host_bytes, log,
):  # fmt: skip
    """Returns (status, iteration_ns, required, peak, entries of the log, detail, used).

    status 0: done; 1: out of memory at kernel ``detail``; 2: ``detail`` bytes are too many for the host.
    """
    n, m = kernels.shape[1], rows.shape[0]
    duration, workspace, born, dies = kernels[DURATION], kernels[WORKSPACE], kernels[BORN], kernels[DIES]
    size, write_at = tensors[SIZE], graph[3 * n + 3 :]
    # Each call of _log stays behind `if record`: LLVM then makes a loop without them, which is 2.7 times as fast.
    record = log.shape[0] > 0
    recomputes = by_row.shape[0] > 0
    if not recomputes:
        _plan_swaps(kernels, tensors, rows, planned)
    need = enforced = planned[0]
    required = 0
    for k in range(n):
        required = max(required, need[k])
    if required > limit:
        for k in range(min(until, n)):
            if need[k] > limit:
                there = by_kernel[k, RESIDENT] if recomputes else need[k] - workspace[k] - born[k]
                return 1, NEVER, required, 0, 0, k, there
    if until < n:
        enforced = planned[1]  # far below 0 where the limit does not count
        enforced[:until], enforced[until:] = need[:until], -NEVER

    copied = np.full(tensors.shape[1], -NEVER, np.int64)  # per tensor: position of its newest host copy
    # Per row: bytes and times; what it adds to `gate`; kernels since the tensor was last written, and until it may
    # come back; while away, the segment that begins with its use and the position from which it may come back.
    room = np.empty((11, m), np.int64)  # one allocation: each costs some 30 ns
    nbytes, out_ns, in_ns, weight, written, hold = room[0], room[1], room[2], room[3], room[4], room[5]
    goal, ready, waiting, pinned, returns = room[6], room[7], room[8], room[9], room[10]
    follows = np.full(m + n, -1, np.int64)  # m + k begins the list of the rows that open at kernel k, by tensor
    queue = np.empty(m * (iterations + 1) + 1, np.int64)
    q_head = q_tail = 0
    n_waiting = n_pinned = 0  # on the host, the next to come back last; on the host, not to come back yet
    # Per kernel: how many of the tensors it needs are away, plus _CHAIN for each that its chain needs, plus _BUSY
    # if anything else happens at its start or end. Kernels with 0 are plain.
    gate = np.zeros(n, np.int64)
    gate[n - 1] = _BUSY
    starts, n_segments = np.zeros(n, np.bool_), 1
    starts[0] = True
    used, on_host = base, 0
    for r in range(m):
        t, after = rows[r, TENSOR], rows[r, AFTER]
        back = returns[r] = by_row[r, RETURNS] if recomputes else rows[r, BEFORE]
        at = m + after
        while follows[at] >= 0 and rows[follows[at], TENSOR] < t:
            at = follows[at]
        follows[at], follows[r] = r, follows[at]
        nbytes[r] = size[t]
        gate[after] |= _BUSY
        if rows[r, KIND] == RECOMPUTE:
            gate[back] |= _BUSY
            continue
        if copied[t] == -NEVER:
            copied[t] = -NEVER + 1
            on_host += size[t]
        out_ns[r], in_ns[r] = tensors[D2H, t], tensors[H2D, t]
        n_segments += not starts[back]
        starts[back] = True
        weight[r] = 1 + _CHAIN * by_row[r, BY_CHAIN] if recomputes else 1
        hold[r] = 1
        pin = rows[r, EXTRA]
        if pin >= 0:
            gate[pin] |= _BUSY
            hold[r] = pin - after + 1 if pin >= after else pin - after + 1 + n
        written[r] = after - graph[write_at[t + 1] - 1] + n if write_at[t] < write_at[t + 1] else NEVER // 2
        for i in range(write_at[t + 1] - 1, write_at[t] - 1, -1):
            if graph[i] <= after:
                written[r] = after - graph[i]
                break
    if on_host > host_bytes:
        return 2, NEVER, required, 0, 0, on_host, 0

    # A segment ends before a kernel at which something is due, or with the iteration. By segment and iteration,
    # `worst` is the largest planned residency plus what came back early; `high` is without the latter. The one that
    # has begun counts from the present kernel only: `crest` is the largest from a kernel to the end of its segment.
    segment, crest = np.empty(n + 1, np.int64), np.empty(n, np.int64)
    high, first = np.empty(n_segments, np.int64), np.empty(n_segments + 1, np.int64)
    segment[n], first[n_segments] = n_segments, n
    top, at = -NEVER, n_segments - 1
    for k in range(n - 1, -1, -1):
        top = max(top, enforced[k])
        segment[k], crest[k] = at, top
        high[at], first[at] = top, k
        if starts[k]:
            top = -NEVER
            at -= 1
    # Uses lie at most one iteration ahead.
    worst = np.empty((iterations + 1) * n_segments, np.int64)
    for i in range(0, worst.size, n_segments):
        worst[i : i + n_segments] = high

    now, position, k, iteration, begin = 0, 0, 0, 0, 0
    s, again, out_row, back_row = 0, False, 0, 0
    end = out_end = back_end = NEVER  # of what is under way
    blocked = -1  # the head of `waiting` cannot come back before the kernel at this position has ended
    for r in range(m):
        if rows[r, KIND] == SWAP and (by_row[r, AWAY_AT_START] == 1 if recomputes else rows[r, AFTER] >= returns[r]):
            used -= nbytes[r]
            copied[rows[r, TENSOR]] = rows[r, AFTER] - n
            ready[r] = rows[r, AFTER] - n + hold[r]
            goal[r] = segment[returns[r]]
            gate[returns[r]] += weight[r]
            pinned[n_pinned] = r
            n_pinned += 1
    peak = used
    limit_here = limit if until > 0 else NEVER
    n_log = _log(log, 0, 0, 0, _MEMORY, used)
    fresh = True  # pinned swap-ins may have become ready
    while True:
        # Copies complete.
        if out_end == now:
            used -= nbytes[out_row]
            if record:
                n_log = _log_memory(log, n_log, now, used, nbytes[out_row])
            out_end = NEVER
            pinned[n_pinned] = out_row
            n_pinned += 1
            fresh = True
        if back_end == now:
            gate[returns[back_row]] -= weight[back_row]
            back_end = NEVER
        # The kernel completes.
        if end == now:
            end = NEVER
            change = workspace[steps[s, STEP_KERNEL]] + steps[s, FREED] if again else workspace[k] + dies[k]
            used -= change
            if record:
                n_log = _log_memory(log, n_log, now, used, change)
            if again:
                s += 1
            else:
                r = follows[m + k]
                while r >= 0:
                    leaves = True
                    if rows[r, KIND] == SWAP:
                        t = rows[r, TENSOR]
                        goal[r] = segment[returns[r]] + (iteration + (returns[r] <= k)) * n_segments
                        gate[returns[r]] += weight[r]
                        ready[r] = position + hold[r]
                        leaves = copied[t] >= position - written[r]
                        copied[t] = position
                        if leaves:
                            pinned[n_pinned] = r
                            n_pinned += 1
                        else:
                            queue[q_tail] = r
                            q_tail += 1
                    if leaves:
                        used -= nbytes[r]
                        if record:
                            n_log = _log_memory(log, n_log, now, used, nbytes[r])
                    r = follows[r]
                fresh = True
                position, k = position + 1, k + 1
                if k == n:
                    k = 0
                    if record:
                        n_log = _log(log, n_log, now, now, _BOUNDARY, 0)
                    iteration += 1
                    if iteration == iterations:
                        break
                    begin = now
                limit_here = limit if k < until else NEVER
                if recomputes:
                    s = by_kernel[k, STEP_AT]
        if fresh and n_pinned:
            left = 0
            for i in range(n_pinned):
                r = pinned[i]
                if ready[r] > position and returns[r] != k:
                    pinned[left] = r
                    left += 1
                    continue
                at = n_waiting  # sorted by (use, tensor), the smallest last
                while at > 0 and (
                    goal[waiting[at - 1]] < goal[r]
                    or (goal[waiting[at - 1]] == goal[r] and rows[waiting[at - 1], TENSOR] < rows[r, TENSOR])
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
        if q_head < q_tail and out_end == NEVER and (copy_engines == 2 or back_end == NEVER):
            out_row = queue[q_head]
            q_head += 1
            out_end = now + out_ns[out_row]
            if record:
                n_log = _log(log, n_log, now, out_end, _OUT, rows[out_row, TENSOR])
        head_bytes = NEVER  # of the next swap-in, where the engine is free for it
        if n_waiting and back_end == NEVER and (copy_engines == 2 or out_end == NEVER):
            r = waiting[n_waiting - 1]
            head_bytes = nbytes[r]
            start = position + (end != NEVER and not again)
            if start > blocked and used + head_bytes <= limit_here:
                blocked = -1
                fits = limit - head_bytes
                at, origin, shift = start - position + k, position - k, iteration * n_segments
                if at == n:
                    at, origin, shift = 0, origin + n, shift + n_segments
                low, stop = segment[at] + shift, goal[r]
                # The first test is a bound that often holds: all that came early beside the worst of all kernels.
                if low < stop and required + worst[low] - high[low - shift] > fits:
                    top = worst[stop - 1] if low + 1 < stop else -NEVER  # it mostly decides
                    if top <= fits:
                        later = worst[low + 1 : stop]  # a slice, because LLVM makes gathers of worst[j]
                        for j in range(later.size):
                            top = max(top, later[j])
                    j = -1  # the last segment beside which it does not fit
                    if top > fits:
                        j = stop - 1
                        while worst[j] <= fits:
                            j -= 1
                    elif crest[at] + worst[low] - high[low - shift] > fits:
                        j = low
                    if j >= 0:
                        if j >= shift + n_segments:
                            shift, origin = shift + n_segments, origin + n
                        came, q = worst[j] - high[j - shift], first[j - shift + 1] - 1
                        while enforced[q] + came <= fits:
                            q -= 1
                        blocked = q + origin
                if blocked < 0:
                    beside = worst[low:stop]
                    for j in range(beside.size):
                        beside[j] += head_bytes
                    n_waiting -= 1
                    used += head_bytes
                    peak = max(peak, used)
                    back_row, back_end = r, now + in_ns[r]
                    if record:
                        n_log = _log(log, n_log, now, back_end, _IN, rows[r, TENSOR])
                        n_log = _log_memory(log, n_log, now, used, head_bytes)
                    head_bytes = NEVER
        if end == NEVER:
            # Plain kernels, up to the next completion of a copy or the next chance of a swap-in.
            if gate[k] == 0 and not record:
                until_time, came_from, chance = min(out_end, back_end), position, False
                while gate[k] == 0:
                    change = used + workspace[k] + born[k]
                    then = now + duration[k]
                    if change > limit_here or then >= until_time:
                        break
                    peak = max(peak, change)
                    used += born[k] - dies[k]
                    now = then
                    position, k = position + 1, k + 1
                    limit_here = limit if k < until else NEVER
                    if used + head_bytes <= limit_here and position > blocked:
                        chance = True
                        break
                if position != came_from:
                    if recomputes:
                        s = by_kernel[k, STEP_AT]
                    if chance or (n_pinned and gate[k] & (_BUSY - 1)):
                        fresh = True
                        continue
            # A kernel starts.
            again = recomputes and s < by_kernel[k + 1, STEP_AT]
            which = steps[s, STEP_KERNEL] if again else k
            change = workspace[which] + (steps[s, ALLOCATED] if again else born[k])
            missing = gate[k] & (_BUSY - 1)  # what is away
            if (missing < _CHAIN if again else missing == 0) and used + change <= limit_here:
                used += change
                peak = max(peak, used)
                end = now + duration[which]
                if record:
                    n_log = _log(log, n_log, now, end, _AGAIN if again else _KERNEL, which)
                    n_log = _log_memory(log, n_log, now, used, change)
        # On to the next completion.
        then = min(end, min(out_end, back_end))
        if then == NEVER:
            raise AssertionError("nothing is under way: the planned residency promised that this cannot be")
        if record and end == NEVER and then > now:
            missing = gate[k] & (_BUSY - 1)
            waits = missing >= _CHAIN if again else missing > 0
            n_log = _log(log, n_log, now, then, _STALL, waits and back_end != NEVER)
        now = then
    return 0, now - begin, required, peak, n_log, 0, 0
