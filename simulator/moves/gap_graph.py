"""Planning task as a graph: its gaps, the iteration in ``BINS`` time bins, and their edges; input of policy_net.py.

Sizes are relative to the largest excess of the program over the limit, times to the ideal iteration. Both also appear
as logarithms, so that features are scale-free. Shapes: G gaps (those of ``Moves`` that can be emptied), K kernels.

Edges: *next*, from a gap to the following one of its tensor; *chain*, from a gap to one whose producer has an input
evicted by the former at its end; *cover*, the share of each bin that each gap covers. Columns that depend on decisions
(``state``) come last: the decision per gap, the remaining excess, and per bin the copies queued on the link.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import columns_of
from simulator.compiled.engine import rerun_ns
from simulator.compiled.jit import stage
from simulator.machine import Machine
from simulator.modes import KEPT, RECOMPUTED, STAYS, SWAPPED
from simulator.moves.moves import Moves
from simulator.program import KERNEL_KINDS, TENSOR_KINDS, Gap, Program
from simulator.residency import residency

BINS = 64
UNDECIDED = -1
KINDS = sorted(KERNEL_KINDS)
TENSORS = sorted(TENSOR_KINDS)
# number of columns that depend on decisions
STATE = 9
BIN_STATE = 7
BIN_STATIC = 5

Floats = NDArray[np.float32]
Choices = NDArray[np.int64]  # (G,): choice for each gap, or UNDECIDED


class GapGraph:
    """Graph of a planning task.

    Args:
        moves: Moves of the program at the limit, in the mode that is planned.
    """

    def __init__(self, program: Program, machine: Machine, limit: int, moves: Moves, mode: str) -> None:
        self.gaps = moves.gaps
        n = len(program.kernels)
        tensor, self.after, self.before = columns_of(self.gaps).T.copy()
        self.limit = limit
        self.count = n
        self.nbytes = np.array([t.nbytes for t in program.tensors], np.int64)[tensor]
        self.live = np.array(program.live_bytes, np.int64)
        start = np.array(program.start_ns, np.float64)
        self.duration = np.diff(start)
        self.ideal = max(start[-1], 1.0)
        over = np.maximum(self.live - limit, 0)
        self.excess = max(int(over.max(initial=0)), 1)  # largest excess of the program over the limit, in bytes
        self.total = max(float(over @ self.duration), 1.0)
        self.ways = moves.weights > 0  # (G, 4) choices that each gap has
        self.ways[:, STAYS] = True
        self.out_ns, self.back_ns = _copies(machine, self.nbytes)
        edges = np.linspace(0, self.ideal, BINS + 1)
        self._opens, self._closes = (
            np.minimum((start[k] / self.ideal * BINS).astype(np.int64), BINS - 1) for k in (self.after + 1, self.before)
        )
        inside = np.minimum(start[1:, None], edges[1:]) - np.maximum(start[:-1, None], edges[:-1])
        self._share = np.maximum(inside, 0) / (self.ideal / BINS)  # (K, BINS) share of the bin's time
        self._hit = self._share > 0
        self.cover = self._covered(start, edges)  # (G, BINS) share of each bin in which the gap is open
        self._producer = _producers(program, self.gaps)
        self.next = _next(self.gaps)  # (2, E) edges from gap to gap, as ``chain``
        self.chain, dead = self._chain(program)
        self.static = self._static(program, machine, mode, tensor, start, over, dead)  # (G, F)
        self.bins = self._bins(over)

    def __len__(self) -> int:
        return len(self.nbytes)

    def _covered(self, start: NDArray[np.float64], edges: NDArray[np.float64]) -> Floats:
        """Returns the share of each bin that each gap covers."""
        opens = start[self.after + 1][:, None]
        closes = start[self.before][:, None]
        wraps = self.after >= self.before
        low = edges[:-1]
        high = edges[1:]
        until = np.clip(closes, low, high) - low
        since = high - np.clip(opens, low, high)
        width = self.ideal / BINS
        overlap = np.where(wraps[:, None], until + since, np.maximum(until + since - width, 0))
        share: Floats = (np.minimum(overlap, width) / width).astype(np.float32)
        return share

    def _static(
        self,
        program: Program,
        machine: Machine,
        mode: str,
        tensor: Choices,
        start: NDArray[np.float64],
        over: NDArray[np.int64],
        dead: NDArray[np.float64],
    ) -> Floats:
        """Returns the columns of the gaps that do not depend on decisions; ``dead`` as in ``_chain``."""
        ideal = self.ideal
        total = self.total
        excess = self.excess
        size = self.nbytes.astype(np.float64)
        out = self.out_ns
        back = self.back_ns
        swaps = self.ways[:, SWAPPED].astype(float)
        remat = self.ways[:, RECOMPUTED].astype(float)
        rerun = self._rerun_ns(program) * remat
        wraps = (self.after >= self.before).astype(float)
        span = start[self.before] - start[self.after + 1] + wraps * start[-1]
        opens = start[self.after + 1] / ideal
        closes = start[self.before] / ideal
        where = np.flatnonzero(over) if over.any() else np.array([0])
        peak = start[int(over.argmax())] / ideal
        first = start[where[0]] / ideal
        last = start[where[-1] + 1] / ideal
        weight = over * self.duration
        need = np.zeros(len(self))
        worst = np.zeros(len(self), np.int64)
        inside(self.after, self.before, self.nbytes, over, self.duration, need, worst)
        relief = self._sums_over_gaps(weight) / total
        spread = self._sums_over_gaps((over > 0) * self.duration) / max(float((over > 0) @ self.duration), 1.0)
        useful = need / total
        moved = (out + back) / ideal
        per_copy = useful / np.maximum(moved, 1e-6)
        per_rerun = useful / np.maximum(rerun / ideal, 1e-6)
        needed = need > 0
        queue_out = _before(self.after, out * needed) / ideal
        queue_back = _before(-self.before, back * needed) / ideal
        share = (worst > 0).astype(float)
        links = np.bincount(self.chain[0], minlength=len(self)).astype(float)
        tau = 2 * np.pi
        gap = [
            log(size / excess, 10),
            np.log(size / self.limit + 1e-9) / 8,
            log(out / ideal, 100),
            log(back / ideal, 100),
            span / ideal,
            log(span / ideal, 100),
            log((span - out - back) / ideal, 100),
            log(rerun / ideal, 1000),
            log(rerun / np.maximum(out + back, 1)) * remat,
            swaps,
            remat,
            self.ways[:, KEPT].astype(float),
            opens,
            closes,
            log(peak - opens, 20),
            log(closes - peak, 20),
            log(first - opens, 20),
            log(closes - last, 20),
            log(first - opens - out / ideal, 50),
            log(closes - last - back / ideal, 50),
            relief,
            spread,
            useful,
            log(useful, 50),
            worst / excess,
            log(size / np.maximum(worst, 1)) * share,
            share,
            log(per_copy),
            log(per_rerun) * remat,
            ranks(per_copy),
            ranks(per_rerun) * remat,
            ranks(useful),
            ranks(size),
            log(queue_out, 5),
            log(queue_out - opens, 5),
            log(queue_back, 5),
            log(queue_back - 1 + closes, 5),
            wraps,
            dead,
            links,
            np.sin(tau * opens),
            np.cos(tau * opens),
            np.sin(tau * closes),
            np.cos(tau * closes),
        ]
        shared = [
            self.limit / max(self.live.max(initial=1), 1),
            log(excess * 1e9 / machine.d2h_bytes_per_s / ideal, 5),
            log(total / ideal / excess, 5),
            math.log(max(len(self), 1)) / 6,
            float(spread.mean()) if len(self) else 0.0,
            float(mode == "swap"),
            float(mode == "recompute"),
            float(machine.copy_engines == 1),
            log(float((out * needed).sum()) / ideal, 5),
            float((over > 0).mean()),
            first,
            last,
        ]
        kinds = np.zeros((len(self), len(TENSORS) + 2 * len(KINDS)))
        tensor_kinds = [TENSORS.index(t.kind) for t in program.tensors]
        kind = np.array([KINDS.index(k.kind) for k in program.kernels], np.int64)
        index = np.arange(len(self))
        kinds[index, np.array(tensor_kinds, np.int64)[tensor]] = 1
        kinds[index, len(TENSORS) + kind[self._producer]] = 1
        kinds[index, len(TENSORS) + len(KINDS) + kind[self.before]] = 1
        columns = np.concatenate([np.stack(gap, 1), kinds, np.tile(shared, (len(self), 1))], 1)
        return columns.astype(np.float32)

    def _sums_over_gaps(self, per_kernel: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns (G,) sums of (K,) over the kernels at which each gap is open."""
        until = np.concatenate([[0.0], np.cumsum(per_kernel)])
        sums: NDArray[np.float64] = until[self.before] - until[self.after + 1]
        sums[self.after >= self.before] += until[-1]
        return sums

    def _rerun_ns(self, program: Program) -> NDArray[np.float64]:
        """Returns (G,) ns of recomputing each gap's tensor with nothing else evicted, else 0."""
        out = np.zeros(len(self))
        chosen = np.flatnonzero(self.ways[:, RECOMPUTED])
        if len(chosen):
            out[chosen] = rerun_ns(program, [self.gaps[i] for i in chosen.tolist()])
        return out

    def _chain(self, program: Program) -> tuple[Choices, NDArray[np.float64]]:
        """Returns the edges (2, E), and (G,) the number of inputs of a gap's producer that must be recomputed, too."""
        by_tensor: dict[int, list[int]] = {}
        for i, gap in enumerate(self.gaps):
            by_tensor.setdefault(gap.tensor, []).append(i)
        dead = np.zeros(len(self))
        pairs = []
        for i in np.flatnonzero(self.ways[:, RECOMPUTED]).tolist():
            before = self.gaps[i].before
            for t in dict.fromkeys(program.kernels[self._producer[i]].inputs):
                if not program.tensors[t].persistent and program.accesses[t][-1] < before:
                    dead[i] += 1
                for j in by_tensor.get(t, ()):
                    gap = self.gaps[j]
                    if gap.after < before <= gap.before or (
                        gap.after >= gap.before and not gap.before < before <= gap.after
                    ):
                        pairs.append((i, j))
        return np.array(pairs, np.int64).reshape(-1, 2).T, dead

    def _bins(self, over: NDArray[np.int64]) -> Floats:
        """Returns the static columns of the bins, (BINS, BIN_STATIC)."""
        place = np.arange(BINS) / BINS
        columns = [
            self.live @ self._share / self.limit,
            self._bin_max(over) / self.excess,
            np.sin(2 * np.pi * place),
            np.cos(2 * np.pi * place),
            place,
        ]
        return np.stack(columns, 1).astype(np.float32)

    def _bin_max(self, per_kernel: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns (BINS,) maxima of (K,) over the kernels of each bin."""
        maxima: NDArray[np.int64] = np.where(self._hit, per_kernel[:, None], 0).max(0, initial=0)
        return maxima

    def load(self, emptied: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns (K,) bytes at each kernel with the gaps ``emptied`` (G,), without copies or recomputation chains."""
        bounds = np.stack([self.after, self.before], 1)[emptied]
        return residency(self.live, bounds, self.nbytes[emptied])

    def state(self, decided: Choices) -> tuple[Floats, Floats]:
        """Returns the columns of gaps (G, STATE) and bins (BINS, BIN_STATE) that depend on decisions."""
        g = len(self)
        over = np.maximum(self.load(decided > STAYS) - self.limit, 0)
        need = np.zeros(g)
        worst = np.zeros(g, np.int64)
        inside(self.after, self.before, self.nbytes, over, self.duration, need, worst)
        relief = self._sums_over_gaps(over * self.duration) / self.total
        one_hot = np.zeros((g, KEPT + 2))
        one_hot[np.arange(g), decided - UNDECIDED] = 1
        room = log(self.nbytes / np.maximum(worst, 1)) * (worst > 0)
        gaps = np.concatenate([one_hot, np.stack([relief, log(relief, 20), worst / self.excess, room], 1)], 1)
        open_bytes = (self.nbytes * (decided == UNDECIDED)) @ self.cover
        swapped = decided == SWAPPED
        out = np.zeros(BINS)
        back = np.zeros(BINS)
        np.add.at(out, self._opens[swapped], self.out_ns[swapped] / self.ideal)
        np.add.at(back, self._closes[swapped], self.back_ns[swapped] / self.ideal)
        bins = [
            over @ self._share / self.excess,
            self._bin_max(over) / self.excess,
            open_bytes / self.excess / 10,
            log(_queue(out), 5),
            log(_queue(back[::-1])[::-1], 5),
            log(out, 20),
            log(back, 20),
        ]
        return gaps.astype(np.float32), np.stack(bins, 1).astype(np.float32)


def log(x: NDArray[np.float64] | float, scale: float = 1.0) -> NDArray[np.float64]:
    """Compresses values logarithmically and keeps their signs: ±ln(1 + scale · |x|)."""
    compressed: NDArray[np.float64] = np.sign(x) * np.log1p(np.abs(x) * scale)
    return compressed


def ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the rank of each value, scaled to [0, 1]."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal values
    scaled: NDArray[np.float64] = (middle[inverse] - 0.5) / max(len(x), 1)
    return scaled


def _before(key: Choices, amount: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns cumulative sums of ``amount`` (G,), gaps sorted by ``key`` (stable), each gap included."""
    out = np.empty(len(key))
    order = np.argsort(key, kind="stable")
    out[order] = np.cumsum(amount[order])
    return out


def _queue(arrivals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns (BINS,) the queue on the link after each bin; ``arrivals`` is in shares of an iteration."""
    queue = np.zeros(BINS)
    queued = 0.0
    for i, arrival in enumerate(arrivals.tolist()):
        queued = max(0.0, queued + arrival - 1 / BINS)
        queue[i] = queued
    return queue


def _copies(machine: Machine, nbytes: Choices) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the durations in ns of the copy to the host and of the copy back, per size."""
    sizes, inverse = np.unique(nbytes, return_inverse=True)
    out, back = (np.array([copy(int(s)) for s in sizes], np.float64) for copy in (machine.d2h_ns, machine.h2d_ns))
    return out[inverse], back[inverse]


def _producers(program: Program, gaps: list[Gap]) -> Choices:
    """Returns (G,) the last kernel that wrote a gap's tensor, in this iteration or the previous one."""
    out = np.zeros(len(gaps), np.int64)
    for i, gap in enumerate(gaps):
        writer = program.version(gap.tensor, gap.after + 1)
        out[i] = writer if writer >= 0 else (program.writes[gap.tensor] or (0,))[-1]
    return out


def _next(gaps: list[Gap]) -> Choices:
    """Returns (2, E) edges from each gap to the following one of its tensor."""
    pairs = [(i, i + 1) for i in range(len(gaps) - 1) if gaps[i].tensor == gaps[i + 1].tensor]
    return np.array(pairs, np.int64).reshape(-1, 2).T


@stage(entry=True)
def inside(after, before, nbytes, over, duration, need, most):
    """Fills ``need`` and ``most`` per gap: bytes x ns over the limit that it could relieve, and the largest excess."""
    n = over.shape[0]
    for g in range(after.shape[0]):
        k = after[g] + 1
        if k == n:
            k = 0
        while k != before[g]:
            need[g] += min(nbytes[g], over[k]) * duration[k]
            most[g] = max(most[g], over[k])
            k = k + 1 if k + 1 < n else 0
