"""The exact planner: the best plan there is for a small program, and for any program how far off a plan can be.

With ``mode="recompute"`` it solves a 0/1 program (milp_model.py) after Checkmate ("Checkmate: Breaking the Memory Wall
with Optimal Tensor Rematerialization", MLSys 2020), by SciPy's HiGHS or OR-Tools' CP-SAT. With transfers (``"swap"``,
``"joint"``) only the simulator knows the time: branch and bound over the plans of at most ``MOST`` candidate gaps, and
in larger programs the best heuristic plan. In each mode the floor (agents/floor/) bounds what is left to gain.
README.md says over which plans each is exact. Read on in ``MILP.plan``. Differences from Checkmate:

1. The rules are the simulator's: one pass of recomputation before a kernel, its memory step by step.
2. It is exact over the recompute-only plans of ``Program.gaps(min_bytes)`` that empty a gap once, at any kernel, and
   fill it (``at``) for its end or in a pass for the end of another gap that makes all it needs. It says no ``Rerun``.
3. The search starts from the best heuristic plan, as far as the solver takes a start, and never returns a worse one.
4. Checkmate's two-phase rounding of the linear relaxation is left out: choice 3 makes it unnecessary.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import agents
from agents.deadline import TimeUp, within
from agents.exact.milp_model import Recomputation, ZeroOne
from agents.floor import floor
from agents.planner import (
    MIB,
    Candidates,
    Infeasible,
    PlannerInfo,
    Rows,
    check_budget,
    finish,
    held_back,
    plans_of,
    ways_of,
)
from agents.search.in_time import LARGE, in_time
from agents.search.ruin_recreate import RuinRecreate
from simulator.compiled.encoding import AFTER, RECOMPUTE, SWAP, SYNC_SWAP, WHEN
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import check_mode, ways_to_empty
from simulator.plan import Plan
from simulator.program import Program

BROKEN_OFF = 500  # kernels: from so many on, the floor and the heuristics end with the seconds
MOST = 24  # candidate gaps that are enumerated
TOLERANCE = 1e-6  # relative, of HiGHS


class MILP:
    """Exact planning with a proven gap.

    Args:
        mode: swap, recompute or joint.
        solver: "highs", or "cpsat" (needs OR-Tools); of the 0/1 program of ``mode="recompute"``.
        seconds: of wall-clock time. Where they end a search, the plan depends on the speed of the computer.
        calls: simulator calls of each heuristic.
        min_bytes: tensors below this size stay.
        seed: of the heuristics and of CP-SAT.

    Attributes:
        bound_ns: no plan that it considers (of gaps of at least ``min_bytes``) has a shorter iteration. With transfers,
            no plan of the mode whatever.
        gap: the plan's overhead less that of the bound, in points (per cent of the ideal time).
        status: "optimal": the gap is proven to be 0; "searched": nothing faster is among the plans enumerated;
            "stopped": by the time limit, or the program is too large to enumerate; "infeasible": proven to be.

    Raises:
        ImportError: ``solver="cpsat"`` without OR-Tools.
    """

    facts = PlannerInfo(
        "milp", "MILP", 'after "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020',
        family="search and exact", slot=5, place=240, moves="joint", slow=4,
    )  # fmt: skip
    name = facts.key

    def __init__(
        self,
        mode: str = "joint",
        solver: str = "highs",
        seconds: float = 60.0,
        calls: int = 20_000,
        min_bytes: int = MIB,
        seed: int = 0,
    ) -> None:
        if solver not in SOLVERS:
            raise ValueError(f"solver: expected one of {', '.join(SOLVERS)}, got {solver!r}")
        check_budget(calls, seconds)
        if solver == "cpsat":
            _cp_model()
        self.mode, self.solver, self.seconds, self.calls = check_mode(mode), solver, seconds, calls
        self.min_bytes, self.seed = min_bytes, seed
        self.simulator_calls, self.bound_ns, self.gap, self.status = 0, 0, 0.0, ""

    @partial(in_time, large=BROKEN_OFF)
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan; raises Infeasible when there is none or none was found: the message says which."""
        until = time.monotonic() + self.seconds
        self.bound_ns, self.gap, self.status = program.ideal_ns, 0.0, ""
        engine = Engine(program, machine, limit)
        large = len(program.kernels) >= BROKEN_OFF
        below = floor(program, machine, limit, self.mode, seconds=self.seconds if large else None)
        self.bound_ns = below.iteration_ns
        end = until if large else None
        best, best_ns = self._heuristics(program, machine, limit, engine, end) if below.feasible else (None, 0)
        proven = not below.feasible or (best is not None and best_ns <= self.bound_ns)
        if not proven and self.mode == "recompute":
            best, proven = self._solve(program, limit, engine, best, best_ns, until)
        elif not proven:
            best, self.status = self._branch(program, machine, limit, engine, best, best_ns, until)
            if best is not None:
                best, _ = move_copies(program, engine, best, engine.score(best).iteration_ns)
        if best is None:
            self.simulator_calls = engine.calls
            self.status = "infeasible" if proven else self.status
            proof = f"it is proven that no {self.mode} plan {'that it considers ' if below.feasible else ''}fits"
            why = {"infeasible": proof, "searched": "no plan that it tried fits"}
            raise Infeasible(
                f"{self.name}: {program.name!r} cannot be planned within {limit:,} bytes (peak "
                f"{program.peak_bytes:,}); {why.get(self.status, 'it found no plan that fits')}"
                f"{held_back(program, limit, self.min_bytes) if below.feasible else ''}"
            )
        best_ns = engine.score(best).iteration_ns
        self.gap = 100.0 * (best_ns - self.bound_ns) / max(program.ideal_ns, 1)
        if best_ns <= self.bound_ns:
            self.status = "optimal"
        return finish(self, program, machine, limit, engine, best)

    def _heuristics(
        self, program: Program, machine: Machine, limit: int, engine: Engine, until: float | None
    ) -> tuple[Rows | None, int]:
        """Rows and iteration time of the best plan of the heuristics that there is time for; None: for all of them."""
        if program.peak_bytes <= limit:
            return np.empty((0, 6), dtype=np.int64), program.ideal_ns
        found: list[Rows | None] = []
        options: dict[str, Any] = {"min_bytes": self.min_bytes, "seed": self.seed}
        large = {"seconds": self.seconds / 10} if len(program.kernels) >= LARGE else {}
        heuristics = [agents.make("superneurons", mode=self.mode, **options)]
        for mode in ("swap", "joint") if self.mode == "joint" else (self.mode,):
            heuristics += [
                agents.make(name, mode=mode, calls=self.calls, **options, **large) for name in ("annealing", "lp_round")
            ]
        try:
            with within(None if until is None else max(until - time.monotonic(), 1e-2)):
                if self.mode != "swap":
                    search = RuinRecreate(program, machine, limit, self.min_bytes, self.calls, PATIENCE, self.seed)
                    found.append(search.search())
                    engine.calls += search.calls
                for heuristic in heuristics:
                    found += plans_of([heuristic], program, machine, limit, engine)
        except TimeUp:
            pass
        scored = [(engine.score(rows).iteration_ns, i) for i, rows in enumerate(found) if rows is not None]
        if not scored:
            return None, 0
        best_ns, i = min(scored)
        return found[i], best_ns

    def _solve(
        self, program: Program, limit: int, engine: Engine, best: Rows | None, best_ns: int, until: float
    ) -> tuple[Rows | None, bool]:
        """The 0/1 program: the best rows, and whether they (or that there are none) are proven."""
        recomputation = Recomputation(program, limit, self.min_bytes)
        start = recomputation.nearest(best) if best is not None else None
        hint = recomputation.assignment(start) if start is not None and engine.score(start).feasible else None
        left = max(until - time.monotonic(), 0.01)
        answer = SOLVERS[self.solver](recomputation.model, left, hint, self.seed)
        if answer.infeasible and best is None:
            return None, True
        if answer.bound is not None:
            self.bound_ns = max(self.bound_ns, program.ideal_ns + answer.bound)
        if answer.x is not None:
            rows = recomputation.rows(answer.x)
            score = engine.score(rows)
            # HiGHS keeps the limit only to its tolerance: a plan may be some bytes above it.
            if score.feasible and (best is None or score.iteration_ns < best_ns):
                best, best_ns = rows, score.iteration_ns
        self.status = "stopped"
        # A bound above the time of a feasible plan is above it by the solver's tolerance.
        self.bound_ns = min(self.bound_ns, best_ns) if best is not None else self.bound_ns
        return best, False

    def _branch(
        self, program: Program, machine: Machine, limit: int, engine: Engine, best: Rows | None, best_ns: int,
        until: float,
    ) -> tuple[Rows | None, str]:  # fmt: skip
        """Depth first over what happens to each gap; the best rows and a status."""
        gaps = [g for g in program.gaps(self.min_bytes) if ways_to_empty(program, g, self.mode)]
        if len(gaps) > MOST:
            return best, "stopped"
        live_bytes = np.array(program.live_bytes)
        candidates = Candidates(program, gaps)
        # First those that weigh most where memory is short.
        weight = candidates.nbytes * (candidates.absent & (live_bytes > limit)).sum(1)
        order = np.argsort(-weight, kind="stable").tolist()
        costs = Costs(program, machine)
        # (depth, rows so far, load with the gaps that are not decided emptied)
        stack: list[tuple[int, list[tuple[int, ...]], Any]] = [(0, [], candidates.residency(np.ones(len(gaps), bool)))]
        while stack:
            if time.monotonic() > until:
                return best, "stopped"
            depth, rows, load = stack.pop()
            if load.max() > limit or (rows and best is not None and costs.least_ns(rows) >= best_ns):
                continue
            if depth == len(order):
                table = np.array(rows, dtype=np.int64).reshape(-1, 6)
                for copied in (table, with_copies(program, table, earliest(program, table))):
                    score = engine.score(copied)
                    if score.feasible and (best is None or score.iteration_ns < best_ns):
                        best, best_ns = move_copies(program, engine, copied, score.iteration_ns)
                continue
            i = order[depth]
            ways = ways_of(program, gaps[i], self.mode)
            stack += [(depth + 1, [*rows, way], load) for way in reversed(ways)]
            stack.append((depth + 1, rows, load + candidates.nbytes[i] * candidates.absent[i]))
        return best, "searched"


class Costs:
    """Lower bounds on the iteration time of any plan that has certain rows."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self.program, self.machine = program, machine

    def least_ns(self, rows: list[tuple[int, ...]]) -> int:
        """ns, for rows that empty their gaps as they open."""
        return self.program.ideal_ns + max(self._reruns(rows), self._waits(rows))

    def _reruns(self, rows: list[tuple[int, ...]]) -> int:
        """Every writer of a tensor runs again once per gap; one run may serve all tensors that its kernel writes."""
        times: dict[tuple[int, int], int] = {}
        for kind, t, after, *_ in rows:
            if kind == RECOMPUTE:
                for w in self.program.writes[t]:
                    if w <= after:
                        times[w, t] = times.get((w, t), 0) + 1
        most: dict[int, int] = {}
        for (w, _), count in times.items():
            most[w] = max(most.get(w, 0), count)
        return sum(self.program.kernels[w].duration_ns * count for w, count in most.items())

    def _waits(self, rows: list[tuple[int, ...]]) -> int:
        """A swapped tensor returns within its gap, and is copied before that, but after it was written. Where that
        takes longer than the kernels in between, compute waits for the rest; what does not overlap adds up."""
        intervals = []
        for kind, t, after, before, *_ in rows:
            if kind != RECOMPUTE and after < before:
                nbytes = self.program.tensors[t].nbytes
                begin, back = self.program.start_ns[before], self.machine.h2d_ns(nbytes)
                intervals.append((before, after, max(0, back - (begin - self.program.start_ns[after + 1]))))
                written = max((w for w in self.program.writes[t] if w <= after), default=-1)
                uses = [u for u in self.program.accesses[t] if written <= u <= after]
                # Where it could not have left since it was written, it has no valid copy on the host.
                if written >= 0 and all(b - a == 1 for a, b in pairwise(uses)):
                    both = self.machine.d2h_ns(nbytes) + back
                    intervals.append((before, written, max(0, both - (begin - self.program.start_ns[written + 1]))))
        ends, best = [0], [0]  # weighted interval scheduling, by the end
        for before, after, ns in sorted(intervals):
            value = max(best[-1], best[bisect_right(ends, after) - 1] + ns)
            ends.append(before)
            best.append(value)
        return best[-1]


# ---------------------------------------------------------------------------------------------- copies


def earliest(program: Program, rows: Rows) -> Rows:
    """int64[n]: per row, by how many kernels the copy of a swap can be issued before its gap opens: not before the
    last write, nor before the end of an emptied gap of the tensor. 0 for what is no swap."""
    n = len(program.kernels)
    ends: dict[int, list[int]] = {}
    for kind, t, _, before, _, when in rows.tolist():
        ends.setdefault(t, []).append(when if kind == RECOMPUTE and when >= 0 else before)
    return np.array(
        [
            0 if kind not in (SWAP, SYNC_SWAP) else min((after - k) % n for k in (*program.writes[t], *ends[t]))
            for kind, t, after, *_ in rows.tolist()
        ],
        dtype=np.int64,
    )


def with_copies(program: Program, rows: Rows, leads: Rows) -> Rows:
    """The rows with the copies of swaps issued so many kernels (int64[n]) before their gaps open."""
    found = rows.copy()
    early = leads > 0
    found[early, WHEN] = (rows[early, AFTER] - leads[early]) % len(program.kernels)
    return found


def move_copies(program: Program, engine: Engine, rows: Rows, best_ns: int) -> tuple[Rows, int]:
    """The plan with one copy after another issued earlier or later where that is faster; and its time."""
    n = len(program.kernels)
    for i, most in enumerate(earliest(program, rows).tolist()):
        for lead in {most >> half for half in range(most.bit_length() + 1)} if most else ():
            tried = rows.copy()
            tried[i, WHEN] = (rows[i, AFTER] - lead) % n if lead else -1
            score = engine.score(tried)
            if score.feasible and score.iteration_ns < best_ns:
                rows, best_ns = tried, score.iteration_ns
    return rows, best_ns


# --------------------------------------------------------------------------------------------- solvers


class Answer(NamedTuple):
    """What a solver says about a 0/1 program."""

    x: list[int] | None  # the best assignment found
    bound: int | None  # no assignment costs less
    infeasible: bool  # there is none


def highs(model: ZeroOne, seconds: float, hint: list[int] | None, seed: int) -> Answer:
    """SciPy's HiGHS. It takes no start; ``seed`` is not used: nothing is drawn."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if not model.upper:  # nothing to decide, which SciPy refuses: the one answer is no values at all
        possible = all(most >= 0 for _, most in model.rows)
        return Answer([] if possible else None, 0 if possible else None, not possible)
    upper = np.array(model.upper, dtype=float)
    rows, columns, values, bounds = [], [], [], []
    for i, (terms, most) in enumerate(model.rows):
        # Every variable from 0 to 1 and every coefficient at most 1: its tolerances are absolute.
        scale = max((abs(c) * model.upper[v] for c, v in terms), default=1) or 1
        for c, v in terms:
            rows.append(i)
            columns.append(v)
            values.append(c * model.upper[v] / scale)
        bounds.append(most / scale)
    matrix = csr_array((values, (rows, columns)), shape=(len(bounds), len(upper)))
    with _quiet():
        found = milp(
            np.array(model.cost, dtype=float), constraints=LinearConstraint(matrix, -np.inf, bounds),
            integrality=upper == 1, bounds=Bounds(0, 1), options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )  # fmt: skip
    x = None if found.x is None else np.rint(found.x * upper).astype(int).tolist()
    bound: int | None = None
    if found.status == 0 and x is not None:
        bound = sum(c * v for c, v in zip(model.cost, x, strict=True))
    elif found.mip_dual_bound is not None and math.isfinite(found.mip_dual_bound):
        bound = math.ceil(found.mip_dual_bound - TOLERANCE * max(1.0, abs(found.mip_dual_bound)))
    return Answer(x, bound, found.status == 2)


def cpsat(model: ZeroOne, seconds: float, hint: list[int] | None, seed: int) -> Answer:
    """OR-Tools' CP-SAT, which counts in integers throughout."""
    cp = _cp_model()
    problem = cp.CpModel()
    x = [problem.new_int_var(0, upper, "") for upper in model.upper]
    for terms, bound in model.rows:
        problem.add(cp.LinearExpr.weighted_sum([x[v] for _, v in terms], [c for c, _ in terms]) <= bound)
    problem.minimize(cp.LinearExpr.weighted_sum(x, model.cost))
    for v, value in zip(x, hint or [], strict=False):
        problem.add_hint(v, value)
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = os.cpu_count() or 1
    solver.parameters.interleave_search = True  # the same search whatever the number of workers
    solver.parameters.random_seed = seed
    status = solver.solve(problem)
    found = [solver.value(v) for v in x] if status in (cp.OPTIMAL, cp.FEASIBLE) else None
    return Answer(found, math.ceil(solver.best_objective_bound - 0.5), status == cp.INFEASIBLE)


SOLVERS: dict[str, Callable[[ZeroOne, float, list[int] | None, int], Answer]] = {"highs": highs, "cpsat": cpsat}
PATIENCE = 200  # rounds of ruin and recreate without a better plan


def _cp_model() -> Any:
    """OR-Tools' CP-SAT module; raises ImportError saying how to get it."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ImportError("solver='cpsat' needs OR-Tools: pip install 'headroom[milp]'") from error
    return cp_model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discards standard output: the HiGHS of some SciPy versions prints a line for every solution it repairs."""
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
