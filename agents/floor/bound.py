"""Certified lower bound ("floor") on the iteration time of every plan, by linear programming.

Every plan is a point of a linear program whose columns are the fractions of tensors that are held, swapped and
recomputed, the bytes that leave and return per kernel, and waits (``reruns``, ``transfers``). Every relaxation is
optimistic, so no plan beats its optimum. The bound is computed from the dual solution (``lp``). Entry point:
``floor``. The relaxations are listed in agents/floor/README.md.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from agents.floor.lp import Linear, Row, Solver, Terms
from agents.floor.reruns import RerunLimits, Reruns
from agents.floor.transfers import Groups, Transfers
from simulator.deadline import TimeUp, within
from simulator.machine import Machine
from simulator.modes import KINDS_OF, check_mode
from simulator.program import Gap, Program
from simulator.residency import residency

# Optional constraint families that tighten the bound: inputs missing at a window's start are fully recomputed
# (futures), early copies take time, large tensors occupy memory near the ends of their gap, host capacity. For mode
# recompute also mixed-integer rounding cuts and branch and bound.
FAMILIES = ("futures", "early_copies", "whole_tensors", "host", "cuts", "branching")
UNPROVEN = FAMILIES[:4]  # without the two that keep the optimum of the first program unchanged


@dataclass(frozen=True)
class FloorOptions:
    """Size of a mode's linear program, and effort of its solver. A larger program has a higher bound."""

    max_gaps: int  # gaps that are variables
    max_groups: int = 0  # groups of kernels between which tensors are swapped
    windows: int = 0  # approximate number of windows of recomputation, each touching that share of the peak load
    cells: int = 0  # maximum of windows times versions
    unmerged: int = 400  # kernels up to which none are merged; maximum groups of joint mode's swap-only program
    # Joint mode: the columns of recomputation are added to those of the groups.
    max_pairs: int = 400_000  # maximum of groups times gaps
    min_groups: int = 160  # groups that are kept in spite of max_pairs
    # Ratio of the time to copy all gaps' tensors to the ideal time. Above it, transfers fill most of the iteration.
    slow_link: float = 10.0  # min_groups decreases in proportion
    slower_link: float = 20.0  # groups and cells are limited to the next two values
    slower_link_groups: int = 500
    slower_link_cells: int = 700  # only if the limit exceeds loose_limit
    loose_limit: float = 0.6  # fraction of the peak load
    # Cuts and branch and bound, for mode recompute.
    rounds: int = 10  # rounds of cuts
    nodes: int = 100  # nodes of branch and bound
    full_rows: int = 3_000  # rows above which rounds and nodes decrease in proportion
    max_work: float = 3e8  # simplex steps times rows after the first optimum, for cuts and nodes together


OPTIONS = {
    "swap": FloorOptions(max_gaps=6_000, max_groups=700),
    "recompute": FloorOptions(max_gaps=3_000, windows=10, cells=4_000),
    "joint": FloorOptions(max_gaps=6_000, max_groups=240, windows=5, cells=2_500),
}


@dataclass(frozen=True)
class Refinement:
    """One solve of ``refined_floor``, with arguments of ``floor``."""

    max_gaps: int | None
    detail: float
    deadlines: bool = False


REFINEMENTS = (
    Refinement(800, 0.15),
    Refinement(None, 0.15),
    Refinement(None, 0.4),
    Refinement(None, 1.0),
    Refinement(None, 1.0, True),
)
FEW_GAPS = 0.25  # fraction of the gaps below which those that save the most above the limit are variables
GROWTH = 4.0  # assumed ratio of the times of consecutive refinements


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
    deadlines: bool = False,
) -> Floor:
    """Computes the lower bound on plans of ``mode`` (swap, recompute or joint) within ``limit`` bytes.

    Args:
        program: Program to bound.
        machine: Machine that runs it.
        limit: Memory limit in bytes, persistent tensors included.
        mode: Eviction kinds of the plans: swap, recompute or joint.
        max_gaps: maximum number of gaps that are variables of the linear program (``_modeled_tensors``); the
            others are emptied at no cost. None: ``FloorOptions.max_gaps``, reduced with ``detail``.
        detail: resolution of the merging in large programs; lower values solve faster and give a lower bound.
        families: constraint families, of ``FAMILIES``; omitting one can only lower the bound.
        seconds: approximate time limit of the solver; on a timeout the ideal time is returned. Building the program
            takes time in proportion to ``detail``; with ``detail=0`` nothing is solved.
        deadlines: windows of recomputation end at peaks of memory, and what is missing at a window's start is fully
            recomputed until its next use, not just at some time. Usually a higher bound, at a multiple of the time.

    Returns:
        The bound; its ``feasible`` is False if no plan fits.

    Raises:
        ValueError: the mode or family is unknown, or the mode has decisions that the relaxation does not cover.
    """
    if unknown_families := set(families) - set(FAMILIES):
        raise ValueError(f"families: expected some of {', '.join(FAMILIES)}, got {min(unknown_families)!r}")
    if unknown := [kind for kind in KINDS_OF[check_mode(mode)] if kind not in ("swap", "recompute", "rerun")]:
        raise ValueError(f"mode: the floor does not cover {unknown[0]!r} decisions of {mode!r}; choose another mode")
    options = OPTIONS[mode]
    max_gaps = max(int(options.max_gaps * detail**0.5), 1) if max_gaps is None else max_gaps
    live_bytes = np.array(program.live_bytes, np.int64)
    nbytes = [t.nbytes for t in program.tensors]
    limits = RerunLimits(program)
    candidates = [g for g in program.gaps(1) if mode != "recompute" or limits.absence(g)]
    ends = [g.before if mode != "recompute" else limits.absence(g).stop for g in candidates]
    size = np.array([nbytes[g.tensor] for g in candidates], np.int64)
    spans = np.array([(g.after, end) for g, end in zip(candidates, ends, strict=True)], np.int64).reshape(-1, 2)
    min_load = residency(live_bytes, spans, size)
    # The other tensors' gaps are no variables. They are emptied at no cost, which no plan can improve on.
    heavy_ns = np.array([k.duration_ns for k in program.kernels], np.int64) * (live_bytes > limit)
    modeled = _modeled_tensors(program, candidates, max_gaps, heavy_ns)
    gaps = [g for g in candidates if g.tensor in modeled]
    is_free = np.array([g.tensor not in modeled for g in candidates], bool)
    live_bytes = residency(live_bytes, spans[is_free], size[is_free])
    least_bytes = int(min_load.max())
    zeros = np.zeros(len(gaps))
    ideal = Floor(least_bytes <= limit, least_bytes, program.ideal_ns, 0.0, tuple(gaps), zeros, zeros)
    if not ideal.feasible or live_bytes.max() <= limit or not detail:
        return ideal
    groups, swap_groups, cells = _resolution(options, program, machine, limit, mode, gaps, detail)
    deadline = np.inf if seconds is None else time.monotonic() + seconds
    try:
        # If swaps alone cost nothing, the bound is the ideal time; the swap-only program is cheaper to solve.
        for kind, count in (("swap", swap_groups), (mode, groups)) if mode == "joint" else ((mode, groups),):
            problem = _Problem(
                program,
                machine,
                limit,
                kind,
                gaps,
                live_bytes,
                min_load,
                modeled,
                options.windows,
                cells,
                count,
                families,
                deadlines,
            )
            solver = Solver(problem.lp, deadline)
            share = min(1.0, options.full_rows / len(problem.lp.rows)) if mode == "recompute" else 0.0
            rounds = round(options.rounds * share * ("cuts" in families))
            solution = solver.cut(problem.knapsacks, rounds, options.max_work)
            if solution is not None:
                nodes = round(options.nodes * share * ("branching" in families))
                solution = solver.branch(solution, problem.integer_sums, nodes, options.max_work)
                if solution.bound * problem.tick < 1:  # recomputation cannot reduce it further
                    break
    except TimeoutError:
        return ideal
    if solution is None:
        return replace(ideal, feasible=False)
    delay = solution.bound * problem.tick if kind == mode else 0.0  # below 1 ns the swap-only bound is void
    # A thousandth of a ns is far above the rounding errors of the dual value. Iteration times are integers.
    iteration = program.ideal_ns + max(0, int(np.ceil(delay - 1e-3)))
    overhead = iteration / program.ideal_ns - 1 if program.ideal_ns else 0.0
    swapped, recomputed = problem.fractions(solution.x)
    return Floor(True, least_bytes, iteration, overhead, tuple(gaps), swapped, recomputed)


def refined_floor(
    program: Program,
    machine: Machine,
    limit: int,
    mode: str = "joint",
    seconds: float = 1.0,
    timeout_s: float | None = None,
    families: Collection[str] = UNPROVEN,
) -> Floor:
    """Computes the highest floor of ``REFINEMENTS`` within a time: more gaps and more detail the more time is left.

    Args:
        program, machine, limit, mode, families: as in ``floor``.
        seconds: approximate time in s; a finer solve begins only if ``GROWTH`` times the last one's time is left.
        timeout_s: time limit in s of the first solve, which is always tried; None: ``seconds``.

    Returns:
        The highest floor that was reached in time.

    Raises:
        ValueError: as in ``floor``.
        TimeUp: the first solve has not ended within its time limit.
    """
    begin = time.monotonic()
    timeout_s = seconds if timeout_s is None else timeout_s
    best: Floor | None = None
    for step in REFINEMENTS:
        start = time.monotonic()
        try:
            with within(timeout_s):
                result = floor(
                    program, machine, limit, mode, step.max_gaps, step.detail, families, timeout_s, step.deadlines
                )
        except TimeUp:
            if best is None:
                raise
            break
        if best is None or not result.feasible or result.iteration_ns > best.iteration_ns:
            best = result
        now = time.monotonic()
        timeout_s = seconds - (now - begin)
        if not best.feasible or timeout_s < GROWTH * (now - start):
            break
    assert best is not None
    return best


def _resolution(
    options: FloorOptions, program: Program, machine: Machine, limit: int, mode: str, gaps: list[Gap], detail: float
) -> tuple[int, int, int]:
    """Returns the maximum numbers of groups, of groups of the swap-only program of joint mode, and of cells."""
    n = len(program.kernels)
    nbytes = [program.tensors[g.tensor].nbytes for g in gaps]
    ratio = sum(machine.d2h_ns(b) + machine.h2d_ns(b) for b in nbytes) / max(program.ideal_ns, 1)
    max_groups = max(options.max_groups, options.unmerged if n <= options.unmerged else 0)
    cells = options.cells
    if ratio > options.slower_link and mode != "recompute":
        max_groups = min(max_groups, options.slower_link_groups)
        if limit > options.loose_limit * program.peak_bytes:
            cells = min(cells, options.slower_link_cells)
    affordable: float = n
    if mode == "joint":
        min_groups = options.min_groups * min(1.0, options.slow_link / max(ratio, 1.0))
        affordable = max(min_groups, options.max_pairs / max(len(gaps), 1))
    groups, swap_groups = (int(min(m, affordable) * detail) + 1 for m in (max_groups, options.unmerged))
    return groups, swap_groups if n <= swap_groups else swap_groups // 2, int(cells * detail)


def _modeled_tensors(program: Program, gaps: list[Gap], count: int, heavy_ns: NDArray[np.int64]) -> set[int]:
    """Returns the tensors whose gaps are variables, with at most ``count`` gaps (but at least one tensor).

    The gaps of other tensors are emptied at no cost, and their data is always available, so that any selection is a
    relaxation. If most gaps are variables, those of the largest tensors are, and among equal ones those whose gaps last
    longest. If few are, they are those that save the most bytes x time above the limit, per gap: other gaps leave the
    memory rows that bind as they are. A tensor is modeled with all of its gaps, because recomputation treats its
    versions together.

    Args:
        heavy_ns: int64[n], the duration of each kernel whose load exceeds the limit, 0 for the others.
    """
    n = len(program.kernels)
    ends = np.concatenate([[0], np.cumsum(np.tile([k.duration_ns for k in program.kernels], 2))])
    heavy_ends = np.concatenate([[0], np.cumsum(np.tile(heavy_ns, 2))])
    absence_ns: dict[int, int] = defaultdict(int)
    saved_ns: dict[int, int] = defaultdict(int)
    gap_count = Counter(g.tensor for g in gaps)
    for g in gaps:
        before = g.before if g.before > g.after else g.before + n
        absence_ns[g.tensor] += int(ends[before] - ends[g.after + 1])
        saved_ns[g.tensor] += int(heavy_ends[before] - heavy_ends[g.after + 1])
    nbytes = [t.nbytes for t in program.tensors]
    ranked = sorted(gap_count, key=lambda x: (-nbytes[x], -absence_ns[x], x))
    if count < FEW_GAPS * len(gaps):
        ranked.sort(key=lambda x: -nbytes[x] * saved_ns[x] / gap_count[x])
    totals = list(accumulate(gap_count[x] for x in ranked))
    kept = max(bisect_right(totals, count), 1)
    left_out = set(ranked[kept:])
    smallest = min((nbytes[x] for x in ranked[:kept]), default=1) if left_out else 1
    return {x for x, size in enumerate(nbytes) if size >= smallest and x not in left_out}


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
        modeled: set[int],
        windows: int,
        cells: int,
        max_groups: int,
        families: Collection[str],
        deadlines: bool,
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
            self.reruns = Reruns(
                self.lp, program, limit, live_bytes, min_load, modeled, windows, cells, byte, families, deadlines
            )
        if mode == "recompute" and self.reruns is not None:
            # Without swaps nothing waits: the delay is the time of the recomputed kernels.
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
