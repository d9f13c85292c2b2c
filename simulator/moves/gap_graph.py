"""Planning task as a graph: its gaps, the iteration in ``BINS`` time bins, and their edges; input of policy_net.py.

Sizes are relative to the largest excess of the program over the limit, times to the ideal iteration. Both also appear
as logarithms, so that features are scale-free. Shapes: G gaps (those of ``Moves`` that can be emptied), K kernels.

Edges: *next*, from a gap to the following one of its tensor; *chain*, from a gap to one whose producer has an input
evicted by the former at its end; *cover*, the share of each bin that each gap covers. Columns that depend on decisions
(``state``) come last: the decision per gap, the remaining excess, and per bin the copies queued on the link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import columns_of
from simulator.compiled.engine import rerun_ns
from simulator.compiled.jit import stage
from simulator.machine import Machine
from simulator.modes import Choice
from simulator.moves.moves import Moves
from simulator.program import KERNEL_KINDS, TENSOR_KINDS, Gap, Program
from simulator.residency import residency

BINS = 64
UNDECIDED = -1  # of a gap for which no ``Choice`` has been made

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Choices = NDArray[np.int64]  # (G,): choice for each gap, or UNDECIDED


class GapState(NamedTuple):
    """Columns of the gaps that depend on decisions. The first five are the decision, one-hot."""

    undecided: NDArray[np.bool_]
    resident: NDArray[np.bool_]
    swapped: NDArray[np.bool_]
    recomputed: NDArray[np.bool_]
    chain_kept: NDArray[np.bool_]
    excess: Doubles  # excess x time within the gap / that of the program
    log_excess: Doubles
    max_excess: Doubles  # largest excess within the gap / that of the program
    log_size_by_max_excess: Doubles


class BinColumns(NamedTuple):
    """Columns of the bins that do not depend on decisions."""

    load: Doubles  # mean / limit
    excess: Doubles  # maximum / largest excess
    sin_time: Doubles
    cos_time: Doubles
    time: Doubles  # start of the bin / ideal time


class BinState(NamedTuple):
    """Columns of the bins that depend on decisions."""

    mean_excess: Doubles
    max_excess: Doubles
    undecided_bytes: Doubles  # open bytes of undecided gaps / largest excess / 10
    log_queue_out: Doubles  # time of the copies that wait for the link after the bin
    log_queue_back: Doubles  # before the bin, counted backwards from the latest start of each swap-in
    log_out: Doubles  # time of the copies that are issued in the bin
    log_back: Doubles


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
        self.allowed = moves.weights > 0  # (G, 4) choices that each gap has
        self.allowed[:, Choice.RESIDENT] = True
        self.out_ns, self.back_ns = _copies(machine, self.nbytes)
        edges = np.linspace(0, self.ideal, BINS + 1)
        self._opens, self._closes = (
            np.minimum((start[k] / self.ideal * BINS).astype(np.int64), BINS - 1) for k in (self.after + 1, self.before)
        )
        overlap = np.minimum(start[1:, None], edges[1:]) - np.maximum(start[:-1, None], edges[:-1])
        self._share = np.maximum(overlap, 0) / (self.ideal / BINS)  # (K, BINS) share of the bin's time
        self._hit = self._share > 0
        self.cover = self._covered(start, edges)  # (G, BINS) share of each bin in which the gap is open
        self._producer = _producers(program, self.gaps)
        self.next = _next(self.gaps)  # (2, E) edges from gap to gap, as ``chain``
        self.chain, dead = self._chain(program)
        static = self._static(program, machine, mode, tensor, start, over, dead)
        self.columns = tuple(static)  # names of the F columns of ``static``
        self.static = _stack(static.values())  # (G, F)
        self.bins = self._bins(over)  # (BINS, len(BinColumns._fields))

    def __len__(self) -> int:
        return len(self.nbytes)

    def _covered(self, start: Doubles, edges: Doubles) -> Floats:
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
        start: Doubles,
        over: NDArray[np.int64],
        dead: Doubles,
    ) -> dict[str, Doubles]:
        """Returns the columns of the gaps that do not depend on decisions, by name; ``dead`` as in ``_chain``.

        ``shared`` columns are equal for all gaps. Kinds are one-hot.
        """
        ideal = self.ideal
        wraps = (self.after >= self.before).astype(float)
        opens = start[self.after + 1] / ideal
        closes = start[self.before] / ideal
        rerun_ns = self._rerun_ns(program)
        need, worst = self._relievable(over)
        needed = need > 0
        exceeding = np.flatnonzero(over) if over.any() else np.array([0])
        first = start[exceeding[0]] / ideal
        last = start[exceeding[-1] + 1] / ideal
        peak = start[int(over.argmax())] / ideal
        relief = self._relief_columns(over, need, worst, rerun_ns)
        columns = {
            **self._cost_columns(start[self.before] - start[self.after + 1] + wraps * start[-1], rerun_ns),
            "opens": opens,
            "closes": closes,
            "log_peak_after_opening": log(peak - opens, 20),
            "log_closing_after_peak": log(closes - peak, 20),
            "log_first_excess_after_opening": log(first - opens, 20),
            "log_closing_after_last_excess": log(closes - last, 20),
            "log_first_excess_after_copy": log(first - opens - self.out_ns / ideal, 50),
            "log_copy_after_last_excess": log(closes - last - self.back_ns / ideal, 50),
            **relief,
            **self._queue_columns(needed, opens, closes),
            "wraps": wraps,
            "lost_inputs": dead,
            "chained_gaps": np.bincount(self.chain[0], minlength=len(self)).astype(float),
            "sin_opens": np.sin(2 * np.pi * opens),
            "cos_opens": np.cos(2 * np.pi * opens),
            "sin_closes": np.sin(2 * np.pi * closes),
            "cos_closes": np.cos(2 * np.pi * closes),
            **self._kind_columns(program, tensor),
        }
        shared = {
            "limit": self.limit / max(self.live.max(initial=1), 1),
            "log_copy_of_excess": log(self.excess * 1e9 / machine.d2h_bytes_per_s / ideal, 5),
            "log_mean_excess": log(self.total / ideal / self.excess, 5),
            "log_gaps": math.log(max(len(self), 1)) / 6,
            "mean_exceeding_time": float(relief["exceeding_time"].mean()) if len(self) else 0.0,
            "is_swap": float(mode == "swap"),
            "is_recompute": float(mode == "recompute"),
            "is_half_duplex": float(machine.copy_engines == 1),
            "log_needed_copies": log(float((self.out_ns * needed).sum()) / ideal, 5),
            "exceeding_kernels": float((over > 0).mean()),
            "first_excess": first,
            "last_excess": last,
        }
        return columns | {name: np.full(len(self), value) for name, value in shared.items()}

    def _cost_columns(self, span_ns: Doubles, rerun_ns: Doubles) -> dict[str, Doubles]:
        """Returns sizes and durations, and which choices each gap has."""
        ideal = self.ideal
        out = self.out_ns
        back = self.back_ns
        size = self.nbytes.astype(np.float64)
        can_swap, can_recompute, can_keep = self.allowed[:, Choice.SWAPPED :].astype(float).T
        return {
            "log_size_by_excess": log(size / self.excess, 10),
            "log_size_by_limit": np.log(size / self.limit + 1e-9) / 8,
            "log_out": log(out / ideal, 100),
            "log_back": log(back / ideal, 100),
            "span": span_ns / ideal,
            "log_span": log(span_ns / ideal, 100),
            "log_slack": log((span_ns - out - back) / ideal, 100),
            "log_rerun": log(rerun_ns / ideal, 1000),
            "log_rerun_by_copies": log(rerun_ns / np.maximum(out + back, 1)) * can_recompute,
            "can_swap": can_swap,
            "can_recompute": can_recompute,
            "can_keep": can_keep,
        }

    def _relief_columns(
        self, over: NDArray[np.int64], need: Doubles, worst: NDArray[np.int64], rerun_ns: Doubles
    ) -> dict[str, Doubles]:
        """Returns the excess within each gap, and how much of it the gap can relieve, also per cost."""
        size = self.nbytes.astype(np.float64)
        can_recompute = self.allowed[:, Choice.RECOMPUTED].astype(float)
        has_excess = (worst > 0).astype(float)
        exceeding_ns = (over > 0) * self.duration
        useful = need / self.total
        # Costs are bounded below, so that free gaps do not dominate the scale.
        per_copy = useful / np.maximum((self.out_ns + self.back_ns) / self.ideal, 1e-6)
        per_rerun = useful / np.maximum(rerun_ns / self.ideal, 1e-6)
        return {
            "excess": self._sums_over_gaps(over * self.duration) / self.total,
            "exceeding_time": self._sums_over_gaps(exceeding_ns) / max(float((over > 0) @ self.duration), 1.0),
            "useful": useful,
            "log_useful": log(useful, 50),
            "max_excess": worst / self.excess,
            "log_size_by_max_excess": log(size / np.maximum(worst, 1)) * has_excess,
            "has_excess": has_excess,
            "log_useful_per_copy": log(per_copy),
            "log_useful_per_rerun": log(per_rerun) * can_recompute,
            "rank_per_copy": ranks(per_copy),
            "rank_per_rerun": ranks(per_rerun) * can_recompute,
            "rank_useful": ranks(useful),
            "rank_size": ranks(size),
        }

    def _queue_columns(self, needed: NDArray[np.bool_], opens: Doubles, closes: Doubles) -> dict[str, Doubles]:
        """Returns the time of the link if all ``needed`` gaps were swapped, up to each gap and relative to its ends."""
        queue_out = _before(self.after, self.out_ns * needed) / self.ideal
        queue_back = _before(-self.before, self.back_ns * needed) / self.ideal
        return {
            "log_queue_out": log(queue_out, 5),
            "log_queue_out_delay": log(queue_out - opens, 5),
            "log_queue_back": log(queue_back, 5),
            "log_queue_back_delay": log(queue_back - 1 + closes, 5),
        }

    def _kind_columns(self, program: Program, tensor: Choices) -> dict[str, Doubles]:
        """Returns the kinds of each gap's tensor, of its producer and of the kernel that closes the gap."""
        tensor_kinds = np.array([t.kind for t in program.tensors])
        kernel_kinds = np.array([k.kind for k in program.kernels])
        columns = {f"tensor_is_{kind}": tensor_kinds[tensor] == kind for kind in sorted(TENSOR_KINDS)}
        for name, kernel in (("producer", self._producer), ("user", self.before)):
            columns |= {f"{name}_is_{kind}": kernel_kinds[kernel] == kind for kind in sorted(KERNEL_KINDS)}
        return {name: column.astype(float) for name, column in columns.items()}

    def _relievable(self, over: NDArray[np.int64]) -> tuple[Doubles, NDArray[np.int64]]:
        """Returns what each gap could relieve of the excess ``over`` (K,), bytes x ns, and the largest excess in it."""
        need = np.zeros(len(self))
        worst = np.zeros(len(self), np.int64)
        sum_excess(self.after, self.before, self.nbytes, over, self.duration, need, worst)
        return need, worst

    def _sums_over_gaps(self, per_kernel: Doubles) -> Doubles:
        """Returns (G,) sums of (K,) over the kernels at which each gap is open."""
        until = np.concatenate([[0.0], np.cumsum(per_kernel)])
        sums: Doubles = until[self.before] - until[self.after + 1]
        sums[self.after >= self.before] += until[-1]
        return sums

    def _rerun_ns(self, program: Program) -> Doubles:
        """Returns (G,) ns of recomputing each gap's tensor with nothing else evicted, else 0."""
        out = np.zeros(len(self))
        chosen = np.flatnonzero(self.allowed[:, Choice.RECOMPUTED])
        if len(chosen):
            out[chosen] = rerun_ns(program, [self.gaps[i] for i in chosen.tolist()])
        return out

    def _chain(self, program: Program) -> tuple[Choices, Doubles]:
        """Returns the edges (2, E), and (G,) the number of inputs of a gap's producer that must be recomputed, too."""
        by_tensor: dict[int, list[int]] = {}
        for i, gap in enumerate(self.gaps):
            by_tensor.setdefault(gap.tensor, []).append(i)
        dead = np.zeros(len(self))
        pairs = []
        for i in np.flatnonzero(self.allowed[:, Choice.RECOMPUTED]).tolist():
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
        """Returns the ``BinColumns``."""
        time = np.arange(BINS) / BINS
        columns = BinColumns(
            load=self.live @ self._share / self.limit,
            excess=self._bin_max(over) / self.excess,
            sin_time=np.sin(2 * np.pi * time),
            cos_time=np.cos(2 * np.pi * time),
            time=time,
        )
        return _stack(columns)

    def _bin_max(self, per_kernel: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns (BINS,) maxima of (K,) over the kernels of each bin."""
        maxima: NDArray[np.int64] = np.where(self._hit, per_kernel[:, None], 0).max(0, initial=0)
        return maxima

    def load(self, emptied: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns (K,) bytes at each kernel with the gaps ``emptied`` (G,), without copies or recomputation chains."""
        bounds = np.stack([self.after, self.before], 1)[emptied]
        return residency(self.live, bounds, self.nbytes[emptied])

    def state(self, decided: Choices) -> tuple[Floats, Floats]:
        """Returns ``GapState`` of the gaps, (G, 9), and ``BinState`` of the bins, (BINS, 7), after decisions."""
        over = np.maximum(self.load(decided > Choice.RESIDENT) - self.limit, 0)
        _, worst = self._relievable(over)
        excess = self._sums_over_gaps(over * self.duration) / self.total
        undecided = decided == UNDECIDED
        swapped = decided == Choice.SWAPPED
        gaps = GapState(
            undecided=undecided,
            resident=decided == Choice.RESIDENT,
            swapped=swapped,
            recomputed=decided == Choice.RECOMPUTED,
            chain_kept=decided == Choice.CHAIN_KEPT,
            excess=excess,
            log_excess=log(excess, 20),
            max_excess=worst / self.excess,
            log_size_by_max_excess=log(self.nbytes / np.maximum(worst, 1)) * (worst > 0),
        )
        out = np.zeros(BINS)
        back = np.zeros(BINS)
        np.add.at(out, self._opens[swapped], self.out_ns[swapped] / self.ideal)
        np.add.at(back, self._closes[swapped], self.back_ns[swapped] / self.ideal)
        bins = BinState(
            mean_excess=over @ self._share / self.excess,
            max_excess=self._bin_max(over) / self.excess,
            undecided_bytes=(self.nbytes * undecided) @ self.cover / self.excess / 10,
            log_queue_out=log(_queue(out), 5),
            log_queue_back=log(_queue(back[::-1])[::-1], 5),  # swap-ins queue backwards from their uses
            log_out=log(out, 20),
            log_back=log(back, 20),
        )
        return _stack(gaps), _stack(bins)


def _stack(columns: Iterable[NDArray[Any]]) -> Floats:
    """Returns columns (N,) as one float32 (N, columns)."""
    return np.stack(list(columns), 1).astype(np.float32)


def log(x: Doubles | float, scale: float = 1.0) -> Doubles:
    """Compresses values logarithmically and keeps their signs: ±ln(1 + scale · |x|)."""
    compressed: Doubles = np.sign(x) * np.log1p(np.abs(x) * scale)
    return compressed


def ranks(x: Doubles) -> Doubles:
    """Returns the rank of each value, scaled to [0, 1]."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal values
    scaled: Doubles = (middle[inverse] - 0.5) / max(len(x), 1)
    return scaled


def _before(key: Choices, amount: Doubles) -> Doubles:
    """Returns cumulative sums of ``amount`` (G,), gaps sorted by ``key`` (stable), each gap included."""
    out = np.empty(len(key))
    order = np.argsort(key, kind="stable")
    out[order] = np.cumsum(amount[order])
    return out


def _queue(arrivals: Doubles) -> Doubles:
    """Returns (BINS,) the queue on the link after each bin; ``arrivals`` is in shares of an iteration."""
    queue = np.zeros(BINS)
    queued = 0.0
    for i, arrival in enumerate(arrivals.tolist()):
        queued = max(0.0, queued + arrival - 1 / BINS)
        queue[i] = queued
    return queue


def _copies(machine: Machine, nbytes: Choices) -> tuple[Doubles, Doubles]:
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
def sum_excess(after, before, nbytes, over, duration, need, most):
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
