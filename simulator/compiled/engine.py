"""The rules of reference.py, compiled: equal to it to the nanosecond, thousands of times faster.

``simulate`` is the public call. ``Engine`` is for planners, which score many plans of one program: a plan
is then an integer array with one row a decision (``rows_of``), and no Python object is made per call.

How it works, and in which order to read these files, is in README.md.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simulator.compiled.event_loop import event_loop
from simulator.compiled.lowering import host_load, swap_residency
from simulator.compiled.rematerialisation import lower_recomputations, recomputes
from simulator.compiled.reruns import lower_reruns
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.reference import MAX_ITERATIONS, check_room
from simulator.schedule import lower
from simulator.timeline import Timeline

# isort: off
from simulator.compiled.encoding import (
    COLUMNS, DONE, DURATION, KIND, LIVE, NEVER, RECOMPUTE, SWAP, SYNC_SWAP, TENSOR, WORKSPACE, Ints, decisions_of,
    ragged, read_log, rows_of,
)  # fmt: skip
# isort: on

__all__ = ["KIND", "NEVER", "RECOMPUTE", "SWAP", "SYNC_SWAP", "TENSOR", "Engine", "Score", "decisions_of", "rows_of",
           "simulate"]  # fmt: skip


class Score(NamedTuple):
    """What a planner asks of a plan."""

    feasible: bool  # it fits, and its iterations repeat
    iteration_ns: int  # NEVER where infeasible
    required_bytes: int  # the smallest limit at which the plan is feasible
    peak_bytes: int
    period: int  # of the iterations that repeat (rule 10); 0: none do, or it does not fit


class Engine:
    """One program on one machine, ready to score many plans. Not for several threads at once.

    Rows are a plan's decisions; ``with_variants`` is the engine for its variants.

    Args:
        limit: bytes, persistent tensors included.
        iterations: how many a ``timeline`` has at least; the last one counts. The figures do not depend on it, so
            that ``score`` simulates only until they are steady (rule 10).
    """

    def __init__(self, program: Program, machine: Machine, limit: int, iterations: int = 2):
        self.program, self.machine = program, machine
        self.variants: tuple[tuple[int, int], ...] = ()
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
        duration = [k.duration_ns for k in kernels]
        self._own = self._kernels = np.array([duration, workspace, born, dies, program.live_bytes], np.int64)
        self._tensors = np.array([
            size, persistent, first, last, [machine.d2h_ns(t.nbytes) for t in tensors],
            [machine.h2d_ns(t.nbytes) for t in tensors]], np.int64)  # fmt: skip
        self._graph = ragged(
            [dict.fromkeys(k.inputs) for k in kernels], [dict.fromkeys(k.outputs) for k in kernels], program.writes
        )
        self._persistent_bytes = sum(t.nbytes for t in tensors if t.persistent)
        self._residency = np.empty((2, n), np.int64)
        self._no_steps = (np.empty((0, 3), np.int64), np.empty((0, 2), np.int64), np.empty((0, 3), np.int64))

    def with_variants(self, variants: Sequence[tuple[int, int]]) -> Engine:
        """This engine for the program as it runs under a plan's ``variants``; its calls are counted anew.

        ``program`` remains the one given: ideal times are its, and plans are checked against it.

        Raises:
            ValueError: as ``Program.chosen``.
        """
        out = copy.copy(self)
        out.variants, out.calls = tuple(variants), 0
        out._kernels, out._residency = self._own.copy(), np.empty_like(self._residency)
        for k, (duration, workspace) in self.program.chosen(variants).items():
            out._kernels[LIVE, k] += workspace - out._kernels[WORKSPACE, k]
            out._kernels[[DURATION, WORKSPACE], k] = duration, workspace
        return out

    def score(self, rows: Ints, limit_until: int | None = None) -> Score:
        """Simulates the plan ``rows``; the rows must fit the program (``Plan.check``), which is not tested here.

        Args:
            limit_until: enforce the limit for kernels before this one only; None: everywhere.
        """
        status, iteration_ns, required, peak, _, detail, _ = self._simulate(rows, limit_until, 1, None)
        period = detail if status == DONE else 0
        return Score(period > 0, iteration_ns if period else NEVER, required, peak, period)

    def residency(self, rows: Ints) -> Ints:
        """Planned residency per kernel (reference.py), int64 (kernels,), in a new array."""
        if not len(self._lowered(rows)[1]):
            swap_residency(self._kernels, self._tensors, rows, self._residency)
        return np.array(self._residency[0])

    def on_host(self, rows: Ints) -> int:
        """The most bytes that the host holds at one time for the plan ``rows`` (Schedule.on_host)."""
        _, endings, *_ = self._lowered(rows)
        return int(host_load(self._tensors, self._graph, rows, endings, len(self.program.kernels)))

    def _lowered(self, rows: Ints) -> tuple[Ints, ...]:
        """What ``lower_recomputations`` or ``lower_reruns`` returns: for a plan of swaps, no steps."""
        kind = recomputes(rows)
        if kind == SWAP:
            return self._kernels, *self._no_steps
        lowered = lower_recomputations if kind == RECOMPUTE else lower_reruns
        return lowered(self._kernels, self._tensors, self._graph, rows, self._residency[0])  # type: ignore[no-any-return]

    def _simulate(self, rows: Ints, limit_until: int | None, iterations: int, log: Ints | None) -> tuple[int, ...]:
        """What ``event_loop`` returns."""
        if rows.shape[1] != COLUMNS:
            raise ValueError(f"rows: expected {COLUMNS} columns, got {rows.shape[1]}")
        self.calls += 1
        n = len(self.program.kernels)
        kernels, *steps = self._lowered(rows)
        return event_loop(  # type: ignore[no-any-return]
            kernels, self._tensors, self._graph, rows, *steps, self._residency, self._persistent_bytes, self.limit,
            n if limit_until is None else limit_until, iterations, max(self.iterations, MAX_ITERATIONS),
            self.machine.copy_engines, self.machine.duplex_share, self.machine.host_bytes, log,
        )  # fmt: skip

    def timeline(self, plan: Plan, limit_until: int | None = None) -> Timeline:
        """Simulates a plan, its variants included, and returns everything that happened.

        Raises:
            PlanError: the plan does not fit the program or the host.
            OutOfMemory: the plan is infeasible at the limit.
        """
        plan.check(self.program)
        if plan.variants != self.variants:
            engine = self.with_variants(plan.variants)
            try:
                return engine.timeline(plan, limit_until)
            finally:
                self.calls += engine.calls
        schedule = lower(self.program, plan)
        check_room(schedule, self.machine, self.limit, len(schedule.residency) if limit_until is None else limit_until)
        rows = rows_of(plan.decisions)
        n_log, room = 4096, 0
        while n_log > room:
            room = n_log
            log = np.empty((room + 1, 4), np.int64)  # one to spare: see _log
            status, _, required, _, n_log, period, _ = self._simulate(rows, limit_until, self.iterations, log)
        if status != DONE:
            raise AssertionError(f"the schedule fits, the compiled one does not (status {status})")
        read = read_log(log[:n_log], plan.decisions, schedule)
        return Timeline.assemble(self.program, self.limit, required, *read, period)


def simulate(
    program: Program, plan: Plan, machine: Machine, limit: int, iterations: int = 2, limit_until: int | None = None
) -> Timeline:
    """Runs a program under a plan; the rules are in reference.py.

    Args:
        limit: bytes, persistent tensors included.
        iterations: how many are simulated at least; the figures are those of the last one, which is steady (rule 10).
        limit_until: enforce the limit for kernels before this one only; None: everywhere.

    Raises:
        PlanError: the plan does not fit the program, or swaps more than the host can hold.
        OutOfMemory: the plan is infeasible at the limit.
    """
    return Engine(program, machine, limit, iterations).timeline(plan, limit_until)
