"""SmartPool+AutoSwap: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), the combined mode.

AutoSwap plans first, then SmartPool gives addresses to the mallocs and frees that the plan makes, those of its swaps
included (section V, last paragraph; section VI-C). What must fit is the *footprint*, the highest address in use, so
that the limit is one of memory as a driver sees it. Choices that the paper leaves open:

1. The user's limit bounds the footprint; AutoSwap's bounds the load. How the second follows from the first is not
   said: here AutoSwap selects for each of ``steps`` load limits from the limit downwards.
2. A load limit is kept while running, too: kernels and swap-ins wait for memory under it (section IV-E). Each
   selection may run under any of those load limits that it fits. Of all the pairs the one of least
   simulated iteration time whose packing fits is returned, ties to the fewer swaps, then the lower peak.
3. ``Plan.limit`` is the load limit to run (and to simulate) under, at most the limit that was asked for; under
   another one other blocks meet and the addresses do not hold.
   Where AutoSwap and the pool leave no room, nothing is returned, even at a limit that the program's load fits.
4. Section IV-E starts a swap-in such that it ends just before its access, one at a time. It is pinned to the
   last kernel that, with unlimited memory, has ended by then (``just_in_time``). Simulator rule 5, which AutoSwap
   alone uses, fetches as early as there is room; that fills memory to the limit with blocks that come in another
   order than they go, and the footprint is up to a quarter above the load.
5. Blocks are those of the simulated last iteration (simulator/pool/intervals.py): a tensor is at its address from
   the start of the kernel that writes it, or of its swap-in, to the end of its last use or of its swap-out.
   Persistent tensors and workspaces have addresses, too.

The packing is no part of the plan: it follows from it, as simulator/pool/__init__.py shows.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from agents.autoswap import AutoSwap, peak_gaps
from agents.planner import MIB, Candidates, Rows, finish, infeasible
from simulator.engine import Engine, decisions_of
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool import smartpool, timeline_lifetimes
from simulator.program import Gap, Program


class SmartPoolAutoSwap:
    """AutoSwap under the load limit that makes SmartPool's footprint fit.

    Args:
        score: doa, aoa, wdoa or swdoa (agents/autoswap.py).
        fit: best or first (simulator/pool/smartpool.py).
        align: round blocks up to the machine's alignment, as addresses on a GPU are.
        steps: load limits to try, evenly spaced from the limit down to half of it or the least that swaps reach.
        min_bytes: tensors below this size are no candidates.
        seed: unused; nothing is drawn.
    """

    name = "smartpool+autoswap"

    def __init__(
        self, score: str = "swdoa", fit: str = "best", align: bool = True, steps: int = 16, min_bytes: int = MIB,
        seed: int = 0,
    ) -> None:  # fmt: skip
        if fit not in smartpool.FITS:
            raise ValueError(f"fit: expected one of {', '.join(smartpool.FITS)}, got {fit!r}")
        if steps < 2:
            raise ValueError(f"steps: expected at least 2, got {steps}")
        self.autoswap = AutoSwap(score, min_bytes)
        self.fit, self.align, self.steps, self.min_bytes = fit, align, steps, min_bytes
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """A plan whose footprint fits ``limit`` when run under ``Plan.limit``; raises Infeasible when none on the
        grid does."""
        candidates = Candidates(program, peak_gaps(program, self.min_bytes))
        lowest = min(limit, max(candidates.least, limit // 2))
        loads = np.unique(np.linspace(limit, lowest, self.steps, dtype=np.int64))[::-1].tolist()
        engines = [Engine(program, machine, load) for load in loads]
        found: dict[tuple[int, int, int], tuple[Engine, Rows]] = {}
        selected = -1
        for load in loads:
            chosen = self.autoswap.select(candidates, program, machine, load)
            if chosen is None or len(chosen) == selected:  # a lower load limit appends to the selection
                continue
            selected = len(chosen)
            rows = just_in_time(program, machine, candidates.rows[chosen])
            for engine in engines:
                score = engine.score(rows)
                if score.feasible:  # the same time and peak as under a higher load limit: the same run
                    found.setdefault((score.iteration_ns, selected, score.peak_bytes), (engine, rows))
        alignment = machine.alignment if self.align else 1
        fitting = None
        for _, (engine, rows) in sorted(found.items(), key=lambda item: item[0]):
            plan = Plan(decisions_of(rows))
            lives = timeline_lifetimes(engine.timeline(plan), program, plan)
            if smartpool.pack(lives.intervals, alignment, self.fit).footprint <= limit:
                fitting = finish(self, program, machine, engine.limit, engine, rows)
                break
        self.simulator_calls = sum(engine.calls for engine in engines)
        if fitting is None:
            raise infeasible(self, program, limit, None)
        return fitting


def just_in_time(program: Program, machine: Machine, rows: Rows) -> Rows:
    """Section IV-E: the swaps ``rows`` (int64[m, 5]), each pinned so that it is back just before its access, and
    one at a time; times are those with unlimited memory."""
    n, lap = len(program.kernels), program.ideal_ns
    ends = [t + i * lap for i in (0, 1) for t in program.start_ns[1:]]  # of the kernels of two iterations
    gaps = [Gap(*row[1:4]) for row in rows.tolist()]
    access = [g.before + n * (g.after >= g.before) for g in gaps]  # counting kernels over the boundary
    pinned, next_in = rows.copy(), ends[-1]
    for i in sorted(range(len(gaps)), key=lambda i: (-access[i], -gaps[i].tensor)):
        start = ends[access[i] - 1] if access[i] else 0
        next_in = min(next_in, start) - machine.h2d_ns(program.tensors[gaps[i].tensor].nbytes)
        pinned[i, 4] = max(gaps[i].after, min(access[i], bisect_right(ends, next_in)) - 1) % n
    return pinned
