"""AutoSwap: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section IV.

Candidate gaps are ranked by a priority score and selected one by one until the peak load is at most the limit. This
file has the four scores; autoswap_bo.py combines them by Bayesian optimization (section IV-C), smartpool_autoswap.py
adds addresses (section V). Entry point: ``AutoSwap.choose``. Numbered choices and deviations: README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planner import MIB, Candidates, Family, PlannerInfo, Rows, RowsPlanner, is_open, one_of
from simulator.compiled.encoding import AFTER, BEFORE
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.files import no_collections
from simulator.machine import Machine
from simulator.program import Gap, Program

PAPER = '"Efficient Memory Management for GPU-based Deep Learning Systems", section'
FAMILY: Family = "swap: AutoSwap"
NAMES = ("doa", "aoa", "wdoa", "swdoa")


@dataclass(eq=False)
class AutoSwap(RowsPlanner):
    """AutoSwap with one of its four scores.

    Args:
        score: doa, aoa, wdoa or swdoa.
    """

    facts = tuple(
        PlannerInfo(
            f"autoswap_{one}", f"AutoSwap {one.upper()}", f"{PAPER} IV", FAMILY, i, 20 + 10 * i, "swap", {"score": one}
        )
        for i, one in enumerate(NAMES)
    )

    score: str = one_of(NAMES, "swdoa")

    @no_collections()
    def choose(self, engine: Engine) -> Rows:
        """Selects swaps until the planned residency fits; raises Infeasible if no selection suffices."""
        candidates = self.reachable(engine, peak_gaps(engine.program, self.min_bytes))
        return candidates.rows[self.select(candidates, engine.program, engine.machine, engine.limit)]

    def select(self, candidates: Candidates, program: Program, machine: Machine, limit: int) -> NDArray[np.int64]:
        """Returns the selected candidates in order of selection by this score (section IV-D)."""
        return candidates.first(SCORES[self.score](candidates, program, machine), limit)


def peak_gaps(program: Program, min_bytes: int = MIB) -> list[Gap]:
    """Returns the gaps of tensors of at least ``min_bytes`` that are open at the peak (section IV-A)."""
    peak = int(np.argmax(program.live_bytes))
    return [g for g in program.gaps(min_bytes) if is_open(g, peak)]


def duration_of_absence(candidates: Candidates, program: Program, machine: Machine) -> NDArray[np.int64]:
    """Returns DOA, int64[m] ns: time between the two accesses minus both transfers."""
    free = [program.gap_ns(g) for g in candidates.gaps]
    transfers = [machine.d2h_ns(b) + machine.h2d_ns(b) for b in candidates.nbytes.tolist()]
    return np.array(free, dtype=np.int64) - np.array(transfers, dtype=np.int64)


def area_of_absence(candidates: Candidates, program: Program, machine: Machine) -> NDArray[np.float64]:
    """Returns AOA, float64[m]: DOA times the size; if DOA is negative, DOA over the size."""
    doa, nbytes = duration_of_absence(candidates, program, machine), candidates.nbytes.astype(np.float64)
    return np.where(doa >= 0, doa * nbytes, doa / nbytes)


def weighted_duration(candidates: Candidates, program: Program) -> NDArray[np.float64]:
    """Returns WDOA, float64[m] byte-nanoseconds: area under the load between the two accesses of each gap."""
    area, after, before = load_area(candidates, program), candidates.rows[:, AFTER], candidates.rows[:, BEFORE]
    return area[before] - area[after + 1] + np.where(after < before, 0.0, area[-1])


def load_area(candidates: Candidates, program: Program) -> NDArray[np.float64]:
    """Returns float64[n + 1], the byte-nanoseconds before each kernel and in all, which exceed 64-bit integers."""
    return np.concatenate(([0.0], np.cumsum(candidates.live_bytes.astype(np.float64) * np.diff(program.start_ns))))


def submodular_weighted_duration(
    candidates: Candidates, program: Program
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the candidates in order of selection by SWDOA, and its value in byte-nanoseconds at each selection.

    Each candidate maximizes WDOA under the load that the previous selections leave (Fig. 6). Loads only decrease, and
    so does the score.
    """
    area, start = load_area(candidates, program), np.array(program.start_ns, np.float64)
    scores = weighted_duration(candidates, program)
    heap, gone = np.argsort(-scores, kind="stable"), np.zeros((2, len(start) + 1))
    order, scored, found = np.empty_like(heap), np.zeros_like(heap), np.empty_like(scores)
    greedy(area, start, candidates.rows, candidates.nbytes, scores, heap, scored, gone, order, found)
    return order, found


@stage
def _until(gone, start, k):
    """Returns the byte-nanoseconds evicted before kernel k, from two Fenwick trees.

    The trees hold the bytes that leave minus those that return at each kernel, and these times the kernel's start.
    """
    nbytes = area = 0.0
    i = k
    while i > 0:
        nbytes += gone[0, i]
        area += gone[1, i]
        i -= i & -i
    return nbytes * start[k] - area


@stage
def _leave(gone, start, k, nbytes):
    """Marks ``nbytes`` as evicted from kernel k on."""
    i = k + 1
    while i < gone.shape[1]:
        gone[0, i] += nbytes
        gone[1, i] += nbytes * start[k]
        i += i & -i


@stage
def _sink(heap, size, scores):
    """Sifts down the first heap entry: highest score first, ties by candidate index."""
    at, moved = 0, heap[0]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        for other in range(child, min(child + 2, size)):
            a, b = heap[other], heap[child]
            if scores[a] > scores[b] or (scores[a] == scores[b] and a < b):
                child = other
        below = heap[child]
        if scores[moved] > scores[below] or (scores[moved] == scores[below] and moved < below):
            break
        heap[at], at = below, child
    heap[at] = moved


@stage(entry=True)
def greedy(area, start, rows, nbytes, scores, heap, scored, gone, order, found):
    """Fills ``order`` and ``found`` of ``submodular_weighted_duration`` by lazy greedy selection.

    Scores only decrease, so a candidate that is still the highest after its score was updated is the maximum.

    Args:
        area: float64[n + 1], byte-nanoseconds before each kernel; ``start``: ns before it.
        scores, heap: initial scores of the m candidates, and the candidates as a heap by score.
        scored: int64[m], number of selections when each was scored: 0.
        gone: float64[2, n + 2], zeros: see ``_until``.
    """
    size, end = heap.shape[0], start.shape[0] - 1
    for count in range(order.shape[0]):
        best = heap[0]
        while scored[best] < count:
            after, before = rows[best, AFTER] + 1, rows[best, BEFORE]
            score = area[before] - area[after] - (_until(gone, start, before) - _until(gone, start, after))
            if after > before:
                score += area[end] - _until(gone, start, end)
            scores[best], scored[best] = score, count
            _sink(heap, size, scores)
            best = heap[0]
        order[count], found[count] = best, scores[best]
        after, before = rows[best, AFTER] + 1, rows[best, BEFORE]
        _leave(gone, start, after, nbytes[best])
        _leave(gone, start, before, -nbytes[best])
        if after > before:
            _leave(gone, start, 0, nbytes[best])
        size -= 1
        heap[0] = heap[size]
        _sink(heap, size, scores)


def descending(scores: NDArray[np.int64] | NDArray[np.float64]) -> Iterator[int]:
    """Yields candidates by descending score."""
    return iter(np.argsort(-scores, kind="stable").tolist())


# Per score: yields every candidate by descending score.
SCORES: dict[str, Callable[[Candidates, Program, Machine], Iterator[int]]] = {
    "doa": lambda candidates, *task: descending(duration_of_absence(candidates, *task)),
    "aoa": lambda candidates, *task: descending(area_of_absence(candidates, *task)),
    "wdoa": lambda candidates, program, _: descending(weighted_duration(candidates, program)),
    "swdoa": lambda candidates, program, _: iter(submodular_weighted_duration(candidates, program)[0].tolist()),
}
