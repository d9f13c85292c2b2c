"""Certified lower bound ("floor") on the iteration time of every plan, by linear programming.

Every plan is a point of a linear program whose columns are the fractions of tensors that are held, swapped and
recomputed, the bytes that leave and return per kernel, and waits (``reruns``, ``transfers``). Every relaxation is
optimistic, so no plan beats its optimum. The bound is computed from the dual solution (``lp``). Entry point:
``floor``. The relaxations are listed in agents/README.md.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agents.floor.lp import Linear, Row, Solver, Terms
from agents.floor.reruns import RerunLimits, Reruns
from agents.floor.transfers import Groups, Transfers
from simulator.machine import Machine
from simulator.modes import KINDS_OF, check_mode
from simulator.program import Gap, Program
from simulator.residency import residency

COVERS = ("swap", "recompute", "rerun")  # kinds of decisions that the linear program covers
LARGEST = {"swap": 6000, "recompute": 3000, "joint": 6000}
WINDOWS = {"recompute": 10, "joint": 5}  # approximate number of windows, each touching that share of the peak load
CELLS = {"recompute": 4000, "joint": 2500}  # maximum of windows times versions
GROUPS = {"swap": 700, "joint": 240}  # maximum number of kernel groups
UNMERGED = 400  # smaller programs are not merged; larger ones get half as many groups in joint mode's swap-only program
LINK_RATIO = 10  # above this ratio of copy time to ideal time MIN_GROUPS decreases
# above this ratio of copy time to ideal time: maximum number of groups
HIGH_LINK = 20
LINK_GROUPS = 500
# and of cells, if the limit exceeds this fraction of the peak load
LIMIT_CELLS = 700
HIGH_LIMIT = 0.6
# joint mode: minimum number of groups, and maximum of groups times gaps
MIN_GROUPS = 160
MAX_PAIRS = 400_000
# cutting rounds, branch-and-bound nodes; fewer above ROWS rows, in proportion
ROUNDS = 10
NODES = 100
# WORK: budget of simplex steps times rows after the first optimum
ROWS = 3000
WORK = 3e8
ROUNDING = 1e-3  # ns, far above rounding errors of the dual value
# Optional constraint families that tighten the bound: inputs missing at a window's start are fully recomputed
# (futures), early copies take time, large tensors occupy memory near the ends of their gap, host capacity. For mode
# recompute also mixed-integer rounding cuts and branch and bound.
FAMILIES = ("futures", "early_copies", "whole_tensors", "host", "cuts", "branching")
UNPROVEN = FAMILIES[:4]  # without the two that keep the optimum of the first program unchanged


@dataclass(frozen=True)
class Floor:
    """Lower bound that holds for every plan.

    Attributes:
        feasible: False: no plan fits the limit, regardless of its time.
        least_bytes: no plan fits a smaller limit than this.
        iteration_ns: no plan has a shorter steady-state iteration; the ideal time if infeasible.
        overhead: ``iteration_ns`` over the ideal time, minus 1.
        gaps: the m gaps that are variables of the linear program.
        swapped: float64[m], fraction of each gap's tensor that the relaxed optimum swaps.
        recomputed: float64[m], fraction that it drops and recomputes.
    """

    feasible: bool
    least_bytes: int
    iteration_ns: int
    overhead: float
    gaps: tuple[Gap, ...]
    swapped: NDArray[np.float64]
    recomputed: NDArray[np.float64]


def floor(
    program: Program,
    machine: Machine,
    limit: int,
    mode: str = "joint",
    max_gaps: int | None = None,
    detail: float = 1.0,
    families: Collection[str] = FAMILIES,
    seconds: float | None = None,
) -> Floor:
    """Computes the lower bound on plans of ``mode`` (swap, recompute or joint) within ``limit`` bytes.

    Args:
        program: Program to bound.
        machine: Machine that runs it.
        limit: Memory limit in bytes, persistent tensors included.
        mode: Eviction kinds of the plans: swap, recompute or joint.
        max_gaps: number of gaps that are variables of the linear program, those of the largest tensors; the others are
            emptied at no cost. None: LARGEST, reduced with ``detail``.
        detail: resolution of the merging in large programs; lower values solve faster and give a lower bound.
        families: constraint families, of ``FAMILIES``; omitting one can only lower the bound.
        seconds: approximate time limit of the solver; on a timeout the ideal time is returned. Building the program
            takes time in proportion to ``detail``; with ``detail=0`` nothing is solved.

    Raises:
        ValueError: the mode or family is unknown, or the mode has decisions that the relaxation does not cover.
    """
    if unknown_families := set(families) - set(FAMILIES):
        raise ValueError(f"families: expected some of {', '.join(FAMILIES)}, got {min(unknown_families)!r}")
    if unknown := [kind for kind in KINDS_OF[check_mode(mode)] if kind not in COVERS]:
        raise ValueError(f"the floor does not cover {unknown[0]!r} decisions of mode {mode!r}")
    max_gaps = max(int(LARGEST[mode] * detail**0.5), 1) if max_gaps is None else max_gaps
    live_bytes = np.array(program.live_bytes, np.int64)
    nbytes = [t.nbytes for t in program.tensors]
    limits = RerunLimits(program)
    n = len(program.kernels)
    candidates = [g for g in program.gaps(1) if mode != "recompute" or limits.absence(g)]
    ends = [g.before if mode != "recompute" else limits.absence(g).stop for g in candidates]
    size = np.array([nbytes[g.tensor] for g in candidates], np.int64)
    spans = np.array([(g.after, end) for g, end in zip(candidates, ends, strict=True)], np.int64).reshape(-1, 2)
    min_load = residency(live_bytes, spans, size)
    cutoff = _threshold(sorted(size.tolist(), reverse=True), max_gaps)
    gaps = [g for g in candidates if nbytes[g.tensor] >= cutoff]
    is_small = size < cutoff
    live_bytes = residency(live_bytes, spans[is_small], size[is_small])
    least_bytes = int(min_load.max())
    zeros = np.zeros(len(gaps))
    ideal = Floor(least_bytes <= limit, least_bytes, program.ideal_ns, 0.0, tuple(gaps), zeros, zeros)
    if not ideal.feasible or live_bytes.max() <= limit or not detail:
        return ideal
    copies = sum(machine.d2h_ns(nbytes[g.tensor]) + machine.h2d_ns(nbytes[g.tensor]) for g in gaps)
    ratio = copies / max(program.ideal_ns, 1)
    n = len(limits.rerun_until)
    min_groups = MIN_GROUPS * min(1.0, LINK_RATIO / max(ratio, 1.0))
    mergeable = max(min_groups, MAX_PAIRS / max(len(gaps), 1)) if mode == "joint" else n
    max_groups = max(GROUPS.get(mode, 0), UNMERGED if n <= UNMERGED else 0)
    cells = CELLS.get(mode, 0)
    if ratio > HIGH_LINK and mode != "recompute":
        max_groups = min(max_groups, LINK_GROUPS)
        cells = min(cells, LIMIT_CELLS) if limit > HIGH_LIMIT * program.peak_bytes else cells
    groups, swap_groups = (int(min(m, mergeable) * detail) + 1 for m in (max_groups, UNMERGED))
    # If swaps alone cost nothing, the bound is the ideal time; the swap-only program is cheaper to solve.
    swap_only = ("swap", swap_groups if n <= swap_groups else swap_groups // 2)
    deadline = np.inf if seconds is None else time.monotonic() + seconds
    try:
        for kind, count in (swap_only, (mode, groups)) if mode == "joint" else ((mode, groups),):
            problem = _Problem(
                program, machine, limit, kind, gaps, live_bytes, min_load, cutoff, int(cells * detail), count, families
            )
            solver = Solver(problem.lp, deadline)
            share = min(1.0, ROWS / len(problem.lp.rows)) if mode == "recompute" else 0.0
            solution = solver.cut(problem.knapsacks, round(ROUNDS * share * ("cuts" in families)), WORK)
            if solution is not None:
                nodes = round(NODES * share * ("branching" in families))
                solution = solver.branch(solution, problem.integer_sums, nodes, WORK)
                if solution.bound * problem.tick < 1:  # recomputation cannot reduce it further
                    break
    except TimeoutError:
        return ideal
    if solution is None:
        return replace(ideal, feasible=False)
    delay = solution.bound * problem.tick if kind == mode else 0.0  # below 1 ns the swap-only bound is void
    iteration = program.ideal_ns + max(0, int(np.ceil(delay - ROUNDING)))
    overhead = iteration / program.ideal_ns - 1 if program.ideal_ns else 0.0
    swapped, recomputed = problem.fractions(solution.x)
    return Floor(True, least_bytes, iteration, overhead, tuple(gaps), swapped, recomputed)


def _threshold(sizes: list[int], count: int) -> int:
    """Returns the size threshold that keeps about ``count`` of the sizes (descending).

    At most ``count`` sizes are kept, except if these are fewer than half of ``count``. The next smaller size is then
    kept as well if the total stays within 1.5 times ``count``.
    """
    if len(sizes) <= count:
        return 1
    next_size = sizes[count]
    larger = [size for size in sizes if size > next_size]
    if not larger:
        return next_size
    keeps_next = len(larger) < count / 2 and len(larger) + sizes.count(next_size) <= 1.5 * count
    return next_size if keeps_next else larger[-1]


class _Problem:
    """The linear program of one mode.

    Attributes:
        tick: ns, the time unit of its objective.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        limit: int,
        mode: str,
        gaps: list[Gap],
        live_bytes: NDArray[np.int64],
        min_load: NDArray[np.int64],
        min_nbytes: int,
        cells: int,
        max_groups: int,
        families: Collection[str],
    ) -> None:
        largest = max(program.tensors[g.tensor].nbytes for g in gaps)
        # Scales bytes and times so that coefficients are near 1.
        byte = largest / 8
        self.tick = max(program.ideal_ns, machine.d2h_ns(largest)) / 1000
        self.lp = Linear()
        self.gaps = gaps
        self.swap = list[int]()
        self.reruns: Reruns | None = None
        # Of mode recompute: memory rows in 0/1 columns, and sums of columns that are integers in every plan, with their
        # weights in branching.
        self.knapsacks: list[Row] = []
        self.integer_sums: list[tuple[Terms, float]] = []
        if mode != "swap":
            self.reruns = Reruns(self.lp, program, limit, live_bytes, min_nbytes, WINDOWS[mode], cells, byte, families)
        if mode == "recompute" and self.reruns is not None:
            loads = self.reruns.load(set(np.flatnonzero(live_bytes > limit).tolist()))
            for terms, constant in loads.values():
                self.lp.row(terms, limit / byte - constant)
                self.knapsacks.append((self.reruns.expanded(terms), limit / byte - constant))
            for (_, w), column in self.reruns.rerun.items():
                self.lp.cost[column] = program.kernels[w].duration_ns / self.tick
            self.integer_sums = self.reruns.integer_sums(self.tick)
            return
        groups = Groups(program, max_groups, [a for a, _ in self.reruns.windows] if self.reruns is not None else [])
        rows = groups.heaviest(live_bytes, min_load, limit)
        loads = {k: ([], float(live_bytes[k]) / byte) for k in rows} if self.reruns is None else self.reruns.load(rows)
        self.swap = Transfers(
            self.lp, program, machine, limit, gaps, groups, loads, self.reruns, byte, self.tick, families
        ).swap

    def fractions(self, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns float64[m] twice: the fraction of each gap's tensor that is swapped, and that is recomputed."""
        swapped = np.zeros(len(self.gaps))
        evicted = np.zeros(len(self.gaps))
        reruns = self.reruns
        if self.swap:
            swapped = np.clip(x[self.swap], 0, 1)
        if reruns is not None:
            for i, gap in enumerate(self.gaps):
                columns = reruns.absent(gap)
                evicted[i] = max([0.0, *(float(x[c] if sign > 0 else 1 - x[c]) for _, c, sign in columns)])
        return swapped, np.minimum(evicted, 1 - swapped)
