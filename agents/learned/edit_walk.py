"""Walks over the plans of one task: draw edits, rank them with a head of the Q-network, simulate the best.

``try_best_edits`` is the compiled loop. A pool holds the best untried neighbors of the current plan; each call replaces
the lowest-ranked ones with new draws and tries the best. After an accepted edit the pool is redrawn.

The ranking needs the network's encoding of a plan, which takes as long as several calls. ``EditWalk.encode`` updates
it; between updates edits are ranked as if the plan were still the encoded one (a stale encoding).

Deviations from a greedy policy of the trained network: the encoding may be stale; the pool keeps edits from call to
call; an edit of a class of alike gaps has more changes than any in training; Q-values are compared without the state's
value and the mean advantage, which are equal for all edits of a plan. With ``RANDOM`` instead of a head, edits are
tried as drawn: the walk without the network.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.learned.edit_encoder import Encoder
from agents.learned.edit_net import EditNet
from envs.edit.batch import EditBatch
from envs.edit.task import EditTask, Start
from envs.edit.walkers import apply_edit, close_trial, draw, open_trial, score_trial
from simulator.compiled.jit import stage
from simulator.moves.plan_moves import rows_in_use

EMPTY = -1e30  # score of an empty slot
NEXT = 1e30  # score of an edit that is tried as drawn
CLASS_CHANGES = 256  # changes of an edit of a class of alike gaps, including its repair
PoolState = np.dtype(
    [
        ("slot", np.int64),  # slot on trial
        ("is_stale", np.int64),  # whether to redraw the pool
        ("seen", np.int64),  # number of keys in ``Pool.seen``
    ]
)


class Ranking(IntEnum):
    """Ranking of edits: by a head of the network, by the advantage without the supervised part (ADVANTAGE), or none."""

    Q = 0
    IMPROVES = 1
    RANDOM = 2
    ADVANTAGE = 3


class Head(NamedTuple):
    """Layers of the network after the sum over an edit's changes, of width w."""

    edit_weight: NDArray[np.float32]  # (w, w)
    edit_bias: NDArray[np.float32]  # (w,)
    out_weight: NDArray[np.float32]  # (3, w)
    out_bias: NDArray[np.float32]  # (3,)
    lift: NDArray[np.float32]  # (1,)
    hidden: NDArray[np.float32]  # (2, w) scratch


class Pool(NamedTuple):
    """Untried neighbors of one walker's plan."""

    score: NDArray[np.float64]  # (M,) EMPTY: empty
    seen: NDArray[np.uint64]  # hash set of edits that are in the pool or were tried at this plan; 0: free
    state: NDArray[np.void]  # PoolState[1]


def head_of(net: EditNet | None) -> Head:
    """Returns the head of a network as arrays; a placeholder if ``net`` is None."""
    if net is None:
        zeros = np.zeros((1, 1), np.float32)
        return Head(zeros, zeros[0], np.zeros((3, 1), np.float32), np.zeros(3, np.float32), zeros[0], zeros)
    tensors = [net.edit.weight, net.edit.bias, net.out.weight, net.out.bias, net.lift.view(1)]
    layers: list[Any] = [tensor.detach().numpy().copy() for tensor in tensors]
    return Head._make([*layers, np.zeros((2, net.settings["width"]), np.float32)])


def make_pool(neighbors: int) -> Pool:
    """Returns an empty pool."""
    state = np.zeros(1, PoolState)
    state["is_stale"] = 1
    return Pool(np.full(neighbors, EMPTY), np.zeros(4096, np.uint64), state)  # a power of two, for the mask


@stage
def rank(h, base, head, codes, count, ranking):
    """Returns the network's score of one edit, without the terms that are equal for all edits.

    Args:
        h: float32 (G * N_CHANGES, w), encoding of each change.
        base: float32 (w,), encoding of the plan.
        head: Weights of the score and its scratch arrays.
        codes: int32, gap * N_CHANGES + change of the edit's changes.
        count: Number of codes.
        ranking: A ``Ranking``: the outputs of the head that form the score.
    """
    # ``EditNet.score`` of one edit, without the state's value and the mean advantage, which are equal for all edits.
    w = base.shape[0]
    first = head.hidden[0]
    second = head.hidden[1]
    for x in range(w):
        total = base[x]
        for c in range(count):
            total += h[codes[c], x]
        first[x] = max(total, np.float32(0))
    for x in range(w):
        total = head.edit_bias[x]
        for y in range(w):
            total += head.edit_weight[x, y] * first[y]
        second[x] = max(total, np.float32(0))
    advantage = head.out_bias[0]
    improves = head.out_bias[2]
    for y in range(w):
        advantage += head.out_weight[0, y] * second[y]
        improves += head.out_weight[2, y] * second[y]
    if ranking == Ranking.IMPROVES:
        return np.float64(improves)
    if ranking == Ranking.ADVANTAGE:
        return np.float64(advantage)
    return np.float64(advantage + head.lift[0] / (np.float32(1) + np.float32(math.exp(-improves))))


@stage
def _is_new(pool, codes, rows, count):
    """Adds an edit's hash to the pool's set; returns False if it was already there."""
    # FNV-1a over the changes and their rows; an odd key is never 0, which marks a free slot.
    key = np.uint64(1469598103934665603)
    for c in range(count):
        key = (key ^ np.uint64(codes[c])) * np.uint64(1099511628211)
        for x in range(rows.shape[1]):
            key = (key ^ np.uint64(rows[c, x] + 7)) * np.uint64(1099511628211)
    key |= np.uint64(1)
    state = pool.state[0]
    if state.seen >= 2_000:  # half full: probes would become long, and trying an edit again does no harm
        pool.seen[:] = 0
        state.seen = 0
    mask = pool.seen.shape[0] - 1
    slot: Any = np.int64(key & np.uint64(mask))
    while pool.seen[slot] != np.uint64(0):
        if pool.seen[slot] == key:
            return False
        slot = (slot + 1) & mask
    pool.seen[slot] = key
    state.seen += 1
    return True


@stage
def _extreme(score, sign):
    """Returns the first slot of the highest (``sign`` 1) or lowest (-1) score."""
    best = 0
    for e in range(1, score.shape[0]):
        if sign * score[e] > sign * score[best]:
            best = e
    return best


@stage
def _refill_pool(walkers, i, count, pool, h, base, head, ranking, limit, gaps, new, scratch):
    """Draws ``count`` neighbors into the slots of the lowest scores."""
    for _ in range(count):
        slot = _extreme(pool.score, -1.0)
        draw(walkers, i, slot, limit, gaps, new, scratch)
        n_changes = walkers.counts[i, slot]
        codes = walkers.codes[i, slot]
        pool.score[slot] = EMPTY
        if n_changes > 0 and _is_new(pool, codes, walkers.changed_rows[i, slot], n_changes):
            if ranking == Ranking.RANDOM:
                pool.score[slot] = NEXT
            else:
                pool.score[slot] = rank(h, base, head, codes, n_changes, ranking)


@stage(entry=True)
def try_best_edits(
    walkers,
    i,
    calls,
    draws,
    first_draws,
    answer_ns,
    pool,
    h,
    base,
    head,
    ranking,
    accept,
    hot,
    cold,
    ideal,
    limit,
    gaps,
    new,
    scratch,
    engine,
    enough_ns,
    accepts,
):
    """Tries the best neighbors of walker i.

    Args:
        walkers: state of all walkers.
        calls: maximum number of simulator calls.
        draws, first_draws: neighbors drawn per call, and at the first call after an accepted edit.
        answer_ns: see ``walkers.step``.
        pool: neighbors drawn so far, with their scores.
        h, base, head: encoding of the state, and weights of the output layer, as in ``rank``.
        ranking: a ``Ranking``.
        accept, hot, cold: rule of acceptance, and its first and last temperature.
        ideal: ideal time in ns.
        limit: memory limit in bytes.
        gaps, new, scratch: tables of the gaps, the plan tried, and work arrays.
        engine: arrays of ``Engine.direct``.
        enough_ns: iteration time of a plan that ends the walk.
        accepts: accepted edits after which to return.

    Returns:
        The number of calls, that of accepted edits, and whether ``Engine.score`` is needed.
    """
    state = walkers.state[i]
    pool_state = pool.state[0]
    # After a call of ``Engine.score``, the first trial is the one that it simulated.
    has_answer = answer_ns >= 0
    accepted = 0
    for call in range(calls):
        slot = pool_state.slot
        ns = answer_ns
        if not has_answer:
            scratch.differ[0] = -1  # ``new`` may hold another walker's plan
            count = draws
            if pool_state.is_stale != 0:
                pool.score[:] = EMPTY
                pool.seen[:] = 0
                pool_state.is_stale = 0
                pool_state.seen = 0
                count = first_draws
            for _ in range(8):  # near a local optimum most draws were tried before
                _refill_pool(walkers, i, count, pool, h, base, head, ranking, limit, gaps, new, scratch)
                slot = _extreme(pool.score, 1.0)
                if pool.score[slot] > EMPTY:
                    break
            pool_state.slot = slot
            open_trial(state, walkers.rng[i], accept, hot, cold, ideal)
            if pool.score[slot] == EMPTY:  # every neighbor was tried: allow them again
                pool_state.is_stale = 1
                continue
            apply_edit(walkers, i, slot, gaps, new, scratch)
        rows = rows_in_use(new, scratch.plan)
        if not has_answer:
            ns = score_trial(state, rows, ideal, scratch, engine)
            if ns < 0:  # the answer comes with the next call; until then the state holds the number of rows
                state.time_ns = rows
                return call, accepted, True
        has_answer = False
        pool.score[slot] = EMPTY
        if close_trial(walkers, i, slot, ns, rows, ideal, new, scratch):
            pool_state.is_stale = 1
            accepted += 1
            if accepted >= accepts or state.best_ns <= enough_ns:
                return call + 1, accepted, False
    return calls, accepted, False


class EditWalk(EditBatch):
    """Walkers of one task that try ranked edits.

    Args:
        task: the task.
        count: number of walkers.
        net: network that ranks the neighbors; None: they are tried as drawn.
        seed: random seed of the first walker.
        neighbors: size of a pool.
        draws, first_draws: neighbors drawn per call, and at the first call after an accepted edit.
        ranking: a ``Ranking``.
        hot, cold: first and last temperature, as fractions of the ideal time.
    """

    def __init__(
        self,
        task: EditTask,
        count: int,
        net: EditNet | None,
        seed: int,
        neighbors: int = 64,
        draws: int = 8,
        first_draws: int = 64,
        ranking: Ranking = Ranking.Q,
        hot: float = 1e-3,
        cold: float = 3e-5,
    ) -> None:
        if net is None:
            neighbors = draws = first_draws = 1
        super().__init__([task], count, neighbors, budget=1, hot=hot, cold=cold, max_changes=CLASS_CHANGES)
        for i in range(count):
            self.seed(i, seed + i)
        self.draws = draws
        self.first_draws = first_draws
        self.ranking = int(Ranking.RANDOM if net is None else ranking)
        self.encoder = None if net is None else Encoder(net, task)
        self.weights = [task.moves.weights] * count  # of the draws of each walker
        self._head = head_of(net)
        self._pools = [make_pool(neighbors) for _ in range(count)]
        no_encoding = np.zeros((1, 1), np.float32)
        self._encodings = [(no_encoding, no_encoding[0])] * count
        self.simulated = 0

    def begin(self, i: int, start: Start) -> None:
        """Starts walker i from a plan."""
        self._begin(i, 0, start)
        self._pools[i].state["is_stale"] = 1

    def encode(self, i: int) -> None:
        """Evaluates the network for the current plan of walker i."""
        if self.encoder is None:
            return
        self._show_plan(i)
        walker_mask = np.zeros(self.count, np.bool_)
        walker_mask[i] = True
        self._finish(walker_mask)
        self._encodings[i] = self.encoder.encode(self.gaps[i], self.bin_state[i], self.plan[i])

    def walk(self, i: int, calls: int, progress: float, accepts: int = 1) -> tuple[int, int]:
        """Tries edits with walker i, ranked with its last encoding.

        Args:
            i: index of the walker.
            calls: maximum simulator calls.
            progress: progress of the temperature, from 0 to 1.
            accepts: accepted edits after which to return.

        Returns:
            The numbers of simulator calls and of accepted edits.
        """
        task = self.tasks[0]
        walkers = self._walkers[0]
        state = walkers.state[i : i + 1]
        # The temperature depends on steps / budget, so a budget is chosen that gives the progress.
        state["budget"] = round(min((int(state["steps"][0]) + 1) / max(progress, 1e-9), 1e12))
        calls_made = 0
        accepted = 0
        answer_ns = -1
        needs_score = True
        first_engine_call = task.engine.calls
        limit, gaps, new, scratch = self._trial_arrays(0)
        while needs_score:
            engine_arrays = task.engine.direct(len(task.graph) + 8)
            new_calls, new_accepted, needs_score = try_best_edits(
                walkers,
                i,
                calls - calls_made,
                self.draws,
                self.first_draws,
                answer_ns,
                self._pools[i],
                *self._encodings[i],
                self._head,
                self.ranking,
                self.accept,
                self.hot,
                self.cold,
                float(task.ideal_ns),
                limit,
                gaps._replace(weights=self.weights[i]),
                new,
                scratch,
                engine_arrays,
                task.ideal_ns,
                accepts - accepted,
            )
            calls_made += new_calls
            accepted += new_accepted
            if needs_score:
                answer_ns = task.engine.score(self._moves[0].proposed(int(state["time_ns"][0]))).iteration_ns
        self.simulated += calls_made - (task.engine.calls - first_engine_call)  # Engine.score counts its own calls
        return calls_made, accepted

    def has_ideal_plan(self, i: int) -> bool:
        """Returns whether walker i has found a plan without overhead."""
        return bool(self._walkers[0].state["best_ns"][i] <= self.tasks[0].ideal_ns)

    def best(self, i: int) -> Start:
        """Returns the best plan of walker i."""
        walkers = self._walkers[0]
        return Start(int(walkers.state["best_ns"][i]), walkers.best[i, : walkers.state["best_rows"][i]].copy())
