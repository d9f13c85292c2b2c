"""Moves between plans, compiled: the local search of simulated annealing, LP rounding and the DQN's refinement.

A state is a plan as one row per candidate gap, switched on or off, with its planned residency (without the memory of
recomputation chains, which the simulator adds). Only plans whose residency fits are proposed: a move that breaks the
limit is repaired by emptying random gaps that are open where the load is largest. So hardly a simulator call is spent
on a plan that cannot run. Moves:

- fill: an emptied gap is filled, then the plan is repaired;
- empty: a gap is emptied, then emptied ones are filled at random while the limit holds;
- shift: a tensor leaves some kernels later, so that others go before it on the FIFO, its copy to the host is issued
  earlier, while it is read, or its swap-in when a chosen kernel ends; a tensor is recomputed earlier;
- way: an emptied gap changes between swap, recompute, and recompute with ``keep``.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from agents.planner import Candidates, Rows, row_of
from simulator.compiled.encoding import AFTER, BEFORE, EXTRA, KIND, NEVER, RECOMPUTE, SWAP, TENSOR, WHEN
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.program import Gap, Program
from simulator.ways import KEPT, RECOMPUTED, SWAPPED, ways_to_empty

FILL, EMPTY = 0.4, 0.4  # shares of the moves; the rest are shifts and ways
PRUNE = 3  # gaps that an empty move tries to fill
SHIFT = 8.0  # kernels, mean of a shift
EARLY = 0.2  # how often a recomputed gap that is picked for a shift is shifted
TRIES = 100  # moves tried before giving up
CLOCK = 8  # calls between two looks at the clock

Floats = NDArray[np.float64]


class Moves:
    """The candidate gaps of a program, the present plan of the search, and the one that it tries.

    Args:
        weights: float64[m, 4], how likely each way (SWAPPED, RECOMPUTED, KEPT) of each of the m gaps of
            ``program.gaps(min_bytes)`` is picked; None: all alike.

    Attributes:
        gaps: those that can be emptied in at least one way.
        rows: int64[len(gaps), 6], a row per gap, whether it is in use or not.
        weights: float64[len(gaps), 4], as above; may be changed.
        on: bool[len(gaps)], gaps that the plan empties.
        load: int64[n], planned residency per kernel.
    """

    def __init__(
        self, program: Program, limit: int, mode: str, min_bytes: int, seed: int, weights: Floats | None = None
    ) -> None:
        gaps = program.gaps(min_bytes)
        ways = [ways_to_empty(program, gap, mode) for gap in gaps]
        kept = [i for i, w in enumerate(ways) if w]
        self.gaps = [gaps[i] for i in kept]
        candidates = Candidates(program, self.gaps)
        self.index = {(g.tensor, g.before): i for i, g in enumerate(self.gaps)}
        self._live_bytes, self._nbytes = candidates.live_bytes, candidates.nbytes
        self._ways = np.zeros((len(kept), KEPT + 1, 6), dtype=np.int64)  # the row of each way
        self.weights = np.zeros((len(kept), KEPT + 1))
        for i, j in enumerate(kept):
            for way in ways[j]:
                self._ways[i, way] = row_of(gaps[j], way)
                self.weights[i, way] = 1.0 if weights is None else weights[j, way]
        self._after = np.array([g.after for g in self.gaps], dtype=np.int64)
        self._since = np.array([since_write(program, g) for g in self.gaps], dtype=np.int64)
        self._earlier = _earlier(program, self.gaps)
        self._limit = limit
        self._own(seed)

    def _own(self, seed: int) -> None:
        """What no two searches share."""
        self._rng = np.random.default_rng(seed).integers(1, 2**63, 1, dtype=np.uint64)
        self.rows, self.on, self.load = self._empty()
        self._tried = self._empty()
        self._differ = np.full(len(self.gaps) + 2 * PRUNE + 8, -1, dtype=np.int64)  # see _start
        self._plan, self._row = np.empty_like(self.rows), np.empty(6, dtype=np.int64)

    def _empty(self) -> tuple[Rows, NDArray[np.bool_], NDArray[np.int64]]:
        first = self.weights.argmax(1)
        return self._ways[np.arange(len(first)), first], np.zeros(len(first), dtype=np.bool_), self._live_bytes.copy()

    def fork(self, seed: int) -> Moves:
        """Moves of the same gaps, with a plan and random numbers of their own; the weights are shared."""
        out = copy.copy(self)
        out._own(seed)
        return out

    def reset(self, rows: Rows) -> None:
        """Makes this the plan of ``rows`` (int64[k, 6]), of gaps that are candidates."""
        self.rows, self.on, self.load = self._empty()
        for row in rows:
            i = self.index[int(row[TENSOR]), int(row[BEFORE])]
            _put(self.rows, self.on, self.load, self._nbytes, self._differ, i, True, np.asarray(row, np.int64))
        self._differ[0] = -1

    def plan(self) -> Rows:
        """int64[k, 6]: the rows in use, a copy."""
        return self.rows[self.on]

    def propose(self) -> Rows | None:
        """Rows of a neighbouring plan whose residency fits; None when ``TRIES`` moves in a row did not."""
        n = _propose(self._rng, self._limit, self._nbytes, self._ways, self.weights, self._after, self._since,
                     self._earlier, self.rows, self.on, self.load, *self._tried, self._differ, self._row,
                     self._plan)  # fmt: skip
        return self._plan[:n].copy() if n >= 0 else None

    def accept(self) -> None:
        """Goes to the plan that was proposed last."""
        self._tried, (self.rows, self.on, self.load) = (self.rows, self.on, self.load), self._tried


def since_write(program: Program, gap: Gap) -> int:
    """Kernels from the last write of the content that a gap empties to the gap, and not over its own end."""
    n, t = len(program.kernels), gap.tensor
    back = [(gap.after - w) % n for w in program.writes[t] if w <= gap.after or program.tensors[t].persistent]
    return min([*back, (gap.after - gap.before) % n])


def _earlier(program: Program, gaps: list[Gap]) -> NDArray[np.int64]:
    """int64[gaps]: the gap of the same tensor before each, of the iteration before where it lives that long; or -1."""
    out = np.full(len(gaps), -1, dtype=np.int64)
    of: dict[int, list[int]] = {}
    for i in sorted(range(len(gaps)), key=lambda i: gaps[i].after):
        of.setdefault(gaps[i].tensor, []).append(i)
    for t, mine in of.items():
        for i, j in zip(mine, mine[-1:] + mine, strict=False):
            if i != mine[0] or program.tensors[t].persistent:
                out[i] = j
    return out


def anneal(
    moves: Moves, engine: Engine, start: Rows, start_ns: int, calls: int | None, hot: float, cold: float, seed: int,
    enough_ns: int = 0, until: float | None = None,
) -> tuple[Rows, int]:  # fmt: skip
    """Metropolis acceptance, the temperature falling geometrically from ``hot`` to ``cold``.

    Args:
        start: rows of a plan that fits, and its iteration time.
        calls: simulator calls; None: as many as there is time for.
        hot, cold: temperatures, as fractions of the ideal time.
        enough_ns: stop at a plan that is at least this fast.
        until: time.monotonic() at which to stop. The temperature is that of the calls or of the time, the lower one.

    Returns:
        rows and iteration time of the best plan.
    """
    ideal = max(engine.program.ideal_ns, 1)
    chance = _uniforms(seed)
    moves.reset(start)
    best, best_ns, now_ns = start, start_ns, start_ns
    enough = max(enough_ns, engine.program.ideal_ns)
    begin, spent = time.monotonic(), 0.0
    for step in range(calls) if calls is not None else count():
        if until is not None and step % CLOCK == 0:
            spent = (time.monotonic() - begin) / max(until - begin, 1e-9)
        if best_ns <= enough or spent >= 1:
            break
        rows = moves.propose()
        if rows is None:
            break
        done = max(spent, step / calls if calls is not None else 0.0)
        temperature = ideal * hot * (cold / hot) ** done
        # A slower plan is not accepted, so that it need not be simulated to its end.
        cutoff_ns = min(now_ns + math.ceil(-temperature * math.log(1.0 - next(chance))), NEVER)
        iteration_ns = engine.score(rows, None, cutoff_ns).iteration_ns
        if iteration_ns < cutoff_ns:
            moves.accept()
            now_ns = iteration_ns
            if now_ns < best_ns:
                best, best_ns = rows, now_ns
    return best, best_ns


def _uniforms(seed: int) -> Iterator[float]:
    """Uniform in [0, 1), without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.random(4096).tolist()


# ------------------------------------------------------------------------------------- compiled part


@stage(entry=True)
def uniform(state):  # type: ignore[no-untyped-def]
    """Uniform in [0, 1), by xorshift64* (Vigna, 2016). Passing a NumPy generator takes longer than making a move.

    Args:
        state: uint64[1], not 0.
    """
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@stage
def _add(load, after, before, nbytes):  # type: ignore[no-untyped-def]
    """Adds to the load between ``after`` and ``before``, over the boundary where they wrap."""
    if after >= before:
        for k in range(before):
            load[k] += nbytes
        before = load.shape[0]
    for k in range(after + 1, before):
        load[k] += nbytes


@stage
def _back(row):  # type: ignore[no-untyped-def]
    """The kernel for which the tensor is there again."""
    return row[WHEN] if row[KIND] == RECOMPUTE and row[WHEN] >= 0 else row[BEFORE]


@stage
def _differs(differ, i):  # type: ignore[no-untyped-def]
    """Notes that gap i of the plan that is tried may not be as in the present one (``_start``)."""
    count = differ[0]
    if 0 <= count < differ.shape[0] - 1:
        differ[1 + count] = i
        differ[0] = count + 1
    else:
        differ[0] = -1


@stage
def _start(rows, on, load, new_rows, new_on, new_load, differ):  # type: ignore[no-untyped-def]
    """Makes the new ones as the present ones.

    Args:
        differ: how many gaps may differ, and then which; first -1: any.
    """
    count = differ[0]
    for j in range(count if count >= 0 else on.shape[0]):
        i = differ[1 + j] if count >= 0 else j
        new_on[i] = on[i]
        for c in range(rows.shape[1]):
            new_rows[i, c] = rows[i, c]
    for k in range(load.shape[0]):
        new_load[k] = load[k]
    differ[0] = 0


@stage(entry=True)
def _put(rows, on, load, nbytes, differ, i, empty, row):  # type: ignore[no-untyped-def]
    """Makes gap i emptied as ``row`` says, or filled."""
    _differs(differ, i)
    if on[i]:
        _add(load, rows[i, AFTER], _back(rows[i]), nbytes[i])
    if empty:
        _add(load, row[AFTER], _back(row), -nbytes[i])
    on[i] = empty
    for c in range(rows.shape[1]):
        rows[i, c] = row[c]


@stage
def _fits(load, after, before, room):  # type: ignore[no-untyped-def]
    """Is the load between ``after`` and ``before`` at most ``room``?"""
    n = load.shape[0]
    k = after + 1 if after + 1 < n else 0
    while k != before:
        if load[k] > room:
            return False
        k = k + 1 if k + 1 < n else 0
    return True


@stage
def _pick(rng, on, want):  # type: ignore[no-untyped-def]
    """A random gap that is on (or off); -1 where there is none."""
    count = 0
    for i in range(on.shape[0]):
        count += on[i] == want
    if not count:
        return -1
    left = int(uniform(rng) * count)
    for i in range(on.shape[0]):
        if on[i] == want:
            if not left:
                return i
            left -= 1
    return -1


@stage
def _weighted_off(rng, on, weights, rows, moved, k):  # type: ignore[no-untyped-def]
    """A random gap that is not emptied, by weight; with k >= 0 one that is open at kernel k and not ``moved``."""
    total = 0.0
    for turn in range(2):
        at = uniform(rng) * total if turn else 0.0
        for i in range(on.shape[0]):
            if on[i] or i == moved:
                continue
            if k >= 0:
                after, before = rows[i, AFTER], rows[i, BEFORE]
                inside = after < k < before if after < before else k > after or k < before
                if not inside:
                    continue
            w = weights[i, SWAPPED] + weights[i, RECOMPUTED] + weights[i, KEPT]
            if turn:
                at -= w
                if at < 0.0:
                    return i
            else:
                total += w
    return -1


@stage
def _way(rng, weights, i):  # type: ignore[no-untyped-def]
    """A random way to empty gap i, by weight."""
    at = uniform(rng) * (weights[i, SWAPPED] + weights[i, RECOMPUTED] + weights[i, KEPT])
    for way in range(SWAPPED, KEPT):
        at -= weights[i, way]
        if at < 0.0:
            return way
    for way in range(KEPT, SWAPPED, -1):  # the last one, unless rounding led here
        if weights[i, way] > 0.0:
            return way
    return SWAPPED


@stage
def _shifted(rng, row, opens, since, n, out):  # type: ignore[no-untyped-def]
    """Writes into ``out`` a swap with another ``after``, ``prefetch`` or ``copy``, or a recomputation with another
    ``at``.

    Args:
        opens: where the gap opens; ``since``: kernels from the last write to there.
    """
    for c in range(row.shape[0]):
        out[c] = row[c]
    shift = int(-SHIFT * math.log(1.0 - uniform(rng)))
    if row[KIND] == RECOMPUTE:
        shift = min(shift, row[BEFORE] - row[AFTER] - 1)
        out[WHEN] = row[BEFORE] - shift if shift else -1
        return
    what = uniform(rng)
    if what < 0.25 and since:
        shift = min(shift, since)
        out[WHEN] = (opens - shift) % n if shift else -1
        out[AFTER] = opens if shift else row[AFTER]
        return
    out[EXTRA] = out[WHEN] = -1
    if what < 0.6:
        out[AFTER] = (opens + min(shift, (row[BEFORE] - opens - 2) % n)) % n
    elif what < 0.85:
        out[EXTRA] = (row[BEFORE] - 1 - min(shift, (row[BEFORE] - row[AFTER] - 1) % n)) % n


@stage
def _settle(rows, on, earlier, n, differ):  # type: ignore[no-untyped-def]
    """A copy is of what is there: where an earlier gap of the tensor ends after it, it is issued as the gap opens."""
    for i in range(on.shape[0]):
        if not on[i] or rows[i, KIND] == RECOMPUTE or rows[i, WHEN] < 0:
            continue
        lead, j = (rows[i, AFTER] - rows[i, WHEN]) % n, earlier[i]
        while j >= 0:
            back = (rows[i, AFTER] - rows[j, BEFORE]) % n
            if j != i and on[j] and (rows[i, AFTER] - _back(rows[j])) % n < lead:
                rows[i, WHEN] = -1
                _differs(differ, i)
                break
            j = earlier[j] if back < lead and j != i else -1


@stage
def _fullest(load, limit):  # type: ignore[no-untyped-def]
    """The first kernel of the largest load; -1 where that fits."""
    top, k = 0, -1
    for j in range(load.shape[0]):
        top = max(top, load[j])
    if top > limit:
        k = 0
        while load[k] != top:
            k += 1
    return k


@stage(entry=True)
def _propose(  # type: ignore[no-untyped-def]
    rng, limit, nbytes, ways, weights, opens, since, earlier, rows, on, load, new_rows, new_on, new_load, differ, row,
    plan,
):  # fmt: skip
    """Writes a neighbour of (rows, on, load) into the new ones, and its rows in use into ``plan``; returns how many
    they are, or -1 when no move was found."""
    m, n = on.shape[0], load.shape[0]
    for _ in range(TRIES):
        _start(rows, on, load, new_rows, new_on, new_load, differ)
        kind = uniform(rng)
        if FILL <= kind < FILL + EMPTY:
            i = _weighted_off(rng, on, weights, rows, -1, -1)
            if i < 0:
                continue
            _put(new_rows, new_on, new_load, nbytes, differ, i, True, ways[i, _way(rng, weights, i)])
            for _ in range(PRUNE):
                j = _pick(rng, new_on, True)
                if j != i and _fits(new_load, new_rows[j, AFTER], new_rows[j, BEFORE], limit - nbytes[j]):
                    _put(new_rows, new_on, new_load, nbytes, differ, j, False, new_rows[j])
        else:
            i = _pick(rng, on, True)
            if i < 0:
                continue
            several = 0
            for way in range(weights.shape[1]):
                several += weights[i, way] > 0.0
            if kind < FILL:
                _put(new_rows, new_on, new_load, nbytes, differ, i, False, rows[i])
            elif several > 1 and uniform(rng) < 0.5:
                _put(new_rows, new_on, new_load, nbytes, differ, i, True, ways[i, _way(rng, weights, i)])
            elif rows[i, KIND] == SWAP or uniform(rng) < EARLY:
                _shifted(rng, rows[i], opens[i], since[i], n, row)
                _put(new_rows, new_on, new_load, nbytes, differ, i, True, row)
            else:
                continue
        for _ in range(m):
            k = _fullest(new_load, limit)
            if k < 0:
                _settle(new_rows, new_on, earlier, n, differ)
                count = 0
                for j in range(m):
                    if new_on[j]:
                        for c in range(plan.shape[1]):
                            plan[count, c] = new_rows[j, c]
                        count += 1
                return count
            j = _weighted_off(rng, new_on, weights, new_rows, i, k)
            if j < 0:
                break
            _put(new_rows, new_on, new_load, nbytes, differ, j, True, ways[j, _way(rng, weights, j)])
    return -1
