"""Fast simulator: equal to rules.py to the nanosecond.

``simulate`` is the public function. ``Engine`` is for planners, which score many plans of one program. A plan is then
an integer array with one row per decision (``rows_of``), and a call creates no Python objects per decision.

README.md explains the implementation and the reading order.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from simulator.compiled.encoding import (
    BEFORE,
    COLUMNS,
    GAP,
    HOST_BYTES,
    KERNEL_ROWS,
    KIND,
    LOG,
    NEVER,
    RECOMPUTE,
    RERUN,
    RESULT,
    STEP,
    SWAP,
    SYNC_SWAP,
    TENSOR,
    Arrays,
    ByKernel,
    ByRow,
    Ints,
    Kernels,
    Settings,
    Status,
    Tables,
    Tensors,
    columns_of,
    decisions_of,
    ragged,
    read_log,
    rows_of,
    split_graph,
    work_shapes,
)
from simulator.compiled.jit import address
from simulator.compiled.lowering import host_load, swap_residency
from simulator.compiled.rematerialization import lower_recomputations, rerun_times
from simulator.compiled.reruns import lower_reruns
from simulator.compiled.scoring import score_plans
from simulator.files import no_collections
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Gap, Program
from simulator.schedule import MAX_ITERATIONS as STEADY, Schedule, check_room, lower
from simulator.timeline import Timeline

__all__ = [
    "KIND",
    "NEVER",
    "RECOMPUTE",
    "SWAP",
    "SYNC_SWAP",
    "TENSOR",
    "Engine",
    "Score",
    "Scores",
    "decisions_of",
    "rows_of",
    "simulate",
]

SHARE = 20  # fewest plans that are worth a thread
_NO_LOG = np.empty(0, np.int64)
_FINAL = frozenset(map(int, (Status.DONE, Status.OUT_OF_MEMORY, Status.SLOWER)))  # ints, which compare faster
_score_plans: dict[bool, int] = {}  # address of ``score_plans`` compiled for swaps only (True) or all kinds (False)


class Score(NamedTuple):
    """Result of simulating one plan."""

    feasible: bool  # fits the limit, and its iterations repeat
    iteration_ns: int  # NEVER if infeasible
    required_bytes: int  # smallest limit at which the plan is feasible
    peak_bytes: int
    period: int  # number of iterations that repeat (rule 10); 0: infeasible


class Scores(NamedTuple):
    """``Score`` of several plans as columns, (plans,) each."""

    feasible: NDArray[np.bool_]
    iteration_ns: Ints
    required_bytes: Ints
    peak_bytes: Ints
    period: Ints


class _ThreadArrays:
    """Work arrays of one thread."""

    def __init__(self, kernels: int, tensors: int, iterations: int):
        self._sizes = kernels, tensors, iterations
        by_kernel, by_segment, by_tensor, *_ = work_shapes(kernels, tensors, 0, iterations)
        # ``make_room`` allocates
        empty = np.empty(0, np.int64)
        self.arrays = Arrays(
            np.zeros(by_kernel, np.int64),
            np.empty(by_segment, np.int64),
            np.zeros(by_tensor, np.int64),
            empty,
            empty,
            empty,
            empty,
        )
        self.by_kernel = ByKernel(*self.arrays.by_kernel)
        self.rows = -1
        self.results = np.empty(1, RESULT)
        self.flat_results = self.results.view(np.int64)
        self.ends = np.zeros(2, np.int64)
        self.make_steps(256)
        self.make_room(64)

    def make_room(self, rows: int) -> None:
        """Grows the arrays for plans of ``rows`` rows."""
        if rows > self.rows:
            self.rows = max(rows, 2 * self.rows)
            kernels, tensors, iterations = self._sizes
            *_, by_row, states = work_shapes(kernels, tensors, self.rows, iterations)
            gaps = np.empty(self.rows, GAP)
            self.arrays = self.arrays._replace(
                by_row=np.empty(by_row, np.int64), gaps=gaps.view(np.int64), states=np.empty(states, np.int64)
            )
            self.by_row = ByRow(*self.arrays.by_row)
            if len(self.steps) <= self.rows:
                self.make_steps(2 * self.rows)

    def make_steps(self, count: int) -> None:
        """Allocates ``count`` steps."""
        self.steps = np.empty(count, STEP)
        self.arrays = self.arrays._replace(steps=self.steps.view(np.int64))


class Engine:
    """One program on one machine, prepared to score many plans.

    An engine is not thread-safe, but engines share no mutable state, so that each thread may have one. Scoring releases
    the GIL. ``scores`` and ``score_batch`` use several threads themselves. Rows are a plan's decisions;
    ``with_variants`` returns the engine for its variants.

    Args:
        limit: Memory limit in bytes, persistent tensors included.
        iterations: Least number of iterations of a ``timeline``, whose last one is reported. ``score`` does not depend
            on it and simulates only until the iterations repeat (rule 10).
    """

    def __init__(self, program: Program, machine: Machine, limit: int, iterations: int = 2):
        self.program = program
        self.machine = machine
        self.variants: tuple[tuple[int, int], ...] = ()
        self.limit = limit
        self.iterations = iterations
        self.calls = 0
        kernels = program.kernels
        tensors = program.tensors
        n = len(kernels)
        first = np.array([u[0] if u else n for u in program.accesses], np.int64)
        last = np.array([u[-1] if u else -1 for u in program.accesses], np.int64)
        size = np.array([t.nbytes for t in tensors], np.int64)
        persistent = np.array([t.persistent for t in tensors], np.int64)
        born = np.bincount(first[persistent == 0], size[persistent == 0], n + 1)[: n + 1].astype(np.int64)
        dies = np.bincount(last[persistent == 0] + 1, size[persistent == 0], n + 2)[1:].astype(np.int64)
        born[n] = dies[n] = 0
        self._unselected = self._kernels = np.zeros((KERNEL_ROWS, n + 1), np.int64)
        table = Kernels(*self._unselected)
        table.born[:] = born
        table.dies[:] = dies
        table.workspace[:n] = [k.workspace for k in kernels]
        table.live[:n] = program.live_bytes
        table.level[:n] = table.live[:n] - table.workspace[:n] - born[:n]
        table.level[n] = table.level[n - 1] + born[n - 1] - dies[n - 1]
        self._read_times()
        d2h_ns = np.array([machine.d2h_ns(t.nbytes) for t in tensors], np.int64)
        h2d_ns = np.array([machine.h2d_ns(t.nbytes) for t in tensors], np.int64)
        self._tensors = np.array(Tensors(size, persistent, first, last, d2h_ns, h2d_ns), np.int64)
        self._graph = graph_of(program)
        self._persistent_bytes = sum(t.nbytes for t in tensors if t.persistent)
        # None: only plans of swaps so far. Engines take the code for plans that recompute once the process has it.
        has_code = any(types.none not in signature for signature in score_plans.signatures)
        self._n_steps: int | None = -1 if has_code else None
        self._start()

    def _read_times(self) -> None:
        """Reads the kernel durations of the program."""
        kernels = self.program.kernels
        table = Kernels(*self._unselected)
        table.duration[:-1] = [k.duration_ns for k in kernels]
        table.begins[1:] = table.duration[:-1].cumsum()
        table.loss[:-1] = [self.machine.copy_loss(k.bytes, k.duration_ns) for k in kernels]

    def _start(self) -> None:
        """Creates the attributes that engines do not share."""
        self._log_entries = 4096
        machine = self.machine
        settings = Settings(
            limit=self.limit,
            copy_engines=machine.copy_engines,
            d2h_share=machine.d2h_share,
            h2d_share=machine.h2d_share,
            host_bytes=machine.host_bytes,
            persistent_bytes=self._persistent_bytes,
            max_iterations=max(self.iterations, STEADY),
            issue_ns=machine.issue_ns,
            queue_depth=machine.queue_depth,
            wait_ns=machine.wait_ns,
            event_ns=machine.event_ns,
            contends=int(Kernels(*self._unselected).loss.any()),
        )
        self._settings = np.array(settings, np.int64)
        self._work = self._new_work()
        self._idle: list[_ThreadArrays] = []  # for other threads

    def _new_work(self) -> _ThreadArrays:
        iterations = Settings(*self._settings.tolist()).max_iterations
        return _ThreadArrays(len(self.program.kernels), len(self.program.tensors), iterations)

    @property
    def tables(self) -> Tables:
        """Arguments for compiled code that calls ``score_plans`` itself; read-only."""
        return Tables(self._kernels, self._tensors, self._graph, self._settings)

    def retimed(self, program: Program) -> Engine:
        """Returns this engine for a program of the same ``structure`` (not checked), with its call count reset."""
        out = copy.copy(self)
        out.program = program
        out.variants = ()
        out.calls = 0
        out._unselected = out._kernels = self._unselected.copy()
        out._read_times()
        out._start()
        return out

    def with_variants(self, variants: Sequence[tuple[int, int]]) -> Engine:
        """Returns this engine for a plan's ``variants``, with its call count reset.

        ``program`` stays the original one: ideal times are those of the original, and plans are checked against it.

        Raises:
            ValueError: As in ``Program.selected_variants``.
        """
        out = copy.copy(self)
        out.variants = tuple(variants)
        out.calls = 0
        out._kernels = self._unselected.copy()
        out._start()
        table = Kernels(*out._kernels)
        for k, (duration, workspace) in self.program.selected_variants(variants).items():
            table.live[k] += workspace - table.workspace[k]
            table.duration[k] = duration
            table.workspace[k] = workspace
            table.loss[k] = self.machine.copy_loss(self.program.kernels[k].bytes, duration)
        table.begins[1:] = table.duration[:-1].cumsum()
        return out

    def score(self, rows: Ints, limit_until: int | None = None, cutoff_ns: int = NEVER) -> Score:
        """Simulates the plan ``rows``, which must fit the program (``Plan.check``; not checked here).

        Args:
            rows: int64 (decisions, 6), see ``rows_of``.
            limit_until: Enforce the limit only for kernels before this one; None: everywhere.
            cutoff_ns: A plan whose iteration takes at least this long may be reported as infeasible, to stop early.

        Returns:
            Feasibility, iteration time, required and peak bytes of the plan.
        """
        self.calls += 1
        work = self._work
        self._simulate(work, rows, limit_until, 1, _NO_LOG, cutoff_ns)
        status, iteration_ns, required, peak, period = work.flat_results.tolist()
        is_done = status == 0  # Status.DONE, whose look-up would take 5 % of the call
        if is_done and period:
            return Score(True, iteration_ns, required, peak, period)
        return Score(False, NEVER, required, peak if is_done else 0, 0)

    def log(self, rows: Ints, limit_until: int | None = None, iterations: int = 1) -> NDArray[Any]:
        """Returns the log of a plan's simulation, LOG (entries,): start, end, event, index (encoding.py).

        Args:
            rows: int64 (n, 6), the plan.
            limit_until, iterations: as in ``simulate``.
        """
        log = np.empty(self._log_entries, LOG)
        while (entries := self._simulate(self._work, rows, limit_until, iterations, log.view(np.int64))) >= len(log):
            # One spare entry (see ``event_loop``), and some more, so that the logs of similar plans fit at once.
            self._log_entries = entries + entries // 8 + 1
            log = np.empty(self._log_entries, LOG)
        return log[:entries]

    def direct(self, rows: int) -> tuple[Any, ...]:
        """Returns the arguments with which ``score_one`` scores plans of at most ``rows`` rows like ``score``.

        They are valid until the next call of ``score``.
        """
        work = self._work
        swaps_only = self._n_steps is None
        work.make_room(rows)
        arrays = (*self.tables, *work.arrays, work.flat_results, _NO_LOG)
        if swaps_only not in _score_plans:
            plan = np.empty((0, COLUMNS), np.int64)
            _score_plans[swaps_only] = address(score_plans, plan, 0, self._n_steps, 0, NEVER, 1, work.ends, *arrays)
        n = len(self.program.kernels)
        return _score_plans[swaps_only], swaps_only, n, work.ends, work.flat_results, arrays

    def scores(self, plans: Sequence[Ints]) -> list[Score]:
        """Returns the ``Score`` of each plan; uses all cores for many plans."""
        if not plans:
            return []
        scores = self.score_batch(np.concatenate(plans), np.array([len(rows) for rows in plans], np.int64))
        return [Score(*values) for values in zip(*(column.tolist() for column in scores), strict=True)]

    def score_batch(self, rows: Ints, lengths: Ints, threads: int | None = None) -> Scores:
        """Returns ``scores`` of plans with concatenated rows.

        Args:
            rows: int64 (sum of lengths, 6).
            lengths: int64 (plans,) number of rows of each plan.
            threads: Largest number of threads; None: one per core. Each thread scores at least SHARE plans.

        Returns:
            columns of shape (plans,); an infeasible plan has ``iteration_ns`` NEVER.
        """
        n = len(lengths)
        ends = np.zeros(n + 1, np.int64)
        lengths.cumsum(out=ends[1:])
        self.calls += n
        results = np.empty(n, RESULT)
        max_rows = int(lengths.max(initial=0))
        threads = min(threads or cores(), n // SHARE)
        n_chunks = max(1, min(4 * threads, n // SHARE))
        begins = [n * i // n_chunks for i in range(n_chunks + 1)]
        chunks = iter(range(n_chunks))

        def run() -> None:
            try:
                work = self._idle.pop()
            except IndexError:
                work = self._new_work()
            work.make_room(max_rows)
            for i in chunks:
                self._run(work, rows, ends[begins[i] : begins[i + 1] + 1], results[begins[i] : begins[i + 1]])
            self._idle.append(work)

        side_by_side([run] * max(threads, 1))
        is_done = results["status"] == Status.DONE
        feasible = is_done & (results["period"] > 0)
        return Scores(
            feasible,
            np.where(feasible, results["iteration_ns"], NEVER),
            results["required"].copy(),
            np.where(is_done, results["peak"], 0),
            np.where(feasible, results["period"], 0),
        )

    def _run(self, work: _ThreadArrays, rows: Ints, ends: Ints, results: NDArray[Any]) -> None:
        """Scores plans in one thread."""
        next_plan = 0
        n = len(results)
        while next_plan < n:
            next_plan, _ = score_plans(
                rows,
                next_plan,
                self._n_steps,
                len(self.program.kernels),
                NEVER,
                1,
                ends,
                *self.tables,
                *work.arrays,
                results.view(np.int64),
                _NO_LOG,
            )
            if next_plan < n:  # this plan needs larger arrays or other code
                self._simulate(work, rows[ends[next_plan] : ends[next_plan + 1]], None, 1, _NO_LOG)
                results[next_plan] = work.results[0]
                next_plan = next_plan + 1
        for i in np.flatnonzero(results["status"] == Status.HOST_FULL):
            self._simulate(work, rows[ends[i] : ends[i + 1]], None, 1, _NO_LOG)
            results[i] = work.results[0]

    def residency(self, rows: Ints) -> Ints:
        """Returns the planned residency per kernel (RULES.md), int64 (kernels,), as a new array."""
        self._lower(self._work, rows)
        return self._work.by_kernel.planned[:-1].copy()

    def on_host(self, rows: Ints) -> int:
        """Returns the largest number of bytes that the host holds for the plan ``rows`` (Schedule.on_host)."""
        work = self._work
        if self._lower(work, rows)[1] is None:
            work.by_row.returns[: len(rows)] = rows[:, BEFORE]
        return self._host_load(work, rows)

    def _host_load(self, work: _ThreadArrays, rows: Ints) -> int:
        n = len(self.program.kernels)
        return int(host_load(self._tensors, split_graph(self._graph, n), rows, work.by_row.returns, n))

    def _lower(self, work: _ThreadArrays, rows: Ints) -> tuple[Ints, int | None]:
        """Lowers a plan in ``work``; returns its kernels and the number of recomputed ones (None: only swaps)."""
        work.make_room(len(rows))
        kinds = rows[:, KIND]
        kernels = self._kernels
        tensors = self._tensors
        arrays = work.arrays
        if (kinds == RERUN).any():
            graph = split_graph(self._graph, len(self.program.kernels))
            kernels, n_steps = lower_reruns(kernels, tensors, graph, rows, arrays.by_kernel, arrays.by_row, work.steps)
            if n_steps < 0:
                lower(self.program, Plan(decisions_of(rows)))  # raises the PlanError
                raise AssertionError(
                    "compiled code refuses a plan that schedule.lower accepts; report it with program and plan"
                )
            return kernels, n_steps
        if (kinds != RECOMPUTE).all():
            swap_residency(kernels, tensors, rows, work.by_kernel.planned)
            return kernels, None
        while True:
            n_steps, _ = lower_recomputations(
                kernels, tensors, self._graph, rows, arrays.by_kernel, arrays.by_tensor, arrays.by_row, work.steps
            )
            if n_steps < len(work.steps):
                return kernels, n_steps
            work.make_steps(4 * len(work.steps))

    def _simulate(
        self, work: _ThreadArrays, rows: Ints, limit_until: int | None, iterations: int, log: Ints, cutoff: int = NEVER
    ) -> int:
        """Simulates a plan; leaves the result in ``work`` and returns the number of log entries."""
        if rows.shape[1] != COLUMNS:
            raise ValueError(f"rows: expected {COLUMNS} columns, got {rows.shape[1]}")
        m = rows.shape[0]
        if m > work.rows:
            work.make_room(m)
        work.ends[1] = m
        until = len(self.program.kernels) if limit_until is None else limit_until
        kernels = self._kernels
        n_steps = self._n_steps
        settings = self._settings
        while True:
            done, n_log = score_plans(
                rows,
                0,
                n_steps,
                until,
                cutoff,
                iterations,
                work.ends,
                kernels,
                self._tensors,
                self._graph,
                settings,
                *work.arrays,
                work.flat_results,
                log,
            )
            status = work.flat_results.item(0)
            if done and status in _FINAL:
                return int(n_log)
            if status == Status.HOST_FULL and settings[HOST_BYTES] < NEVER:
                # The quick check sums all swapped tensors; they need not be on the host at the same time.
                if self._host_load(work, rows) > settings[HOST_BYTES]:
                    return 0
                settings = settings.copy()
                settings[HOST_BYTES] = NEVER
            elif status == Status.STUCK:
                raise AssertionError(
                    "simulation is stuck although the planned residency fits the limit; report it with program and plan"
                )
            elif status == Status.MORE_STEPS:
                work.make_steps(4 * len(work.steps))
            elif (rows[:, KIND] == RERUN).any():
                kernels, n_steps = self._lower(work, rows)
            else:  # switch to the code for plans that recompute, which takes long to compile
                n_steps = -1
                self._n_steps = -1

    def timeline(self, plan: Plan, limit_until: int | None = None, schedule: Schedule | None = None) -> Timeline:
        """Simulates a plan with its variants; parameters and errors are those of ``simulate``."""
        plan.check(self.program)
        engine = self if plan.variants == self.variants else self.with_variants(plan.variants)
        with no_collections():
            schedule = schedule or lower(self.program, plan)
            until = len(schedule.residency) if limit_until is None else limit_until
            check_room(schedule, self.machine, self.limit, until)
            self.calls += 1
            log = engine.log(rows_of(plan.decisions), limit_until, self.iterations)
            status, _, required, _, period = engine._work.flat_results.tolist()
            if status != Status.DONE:
                raise AssertionError(f"compiled code refuses a schedule that fits (status {status}); report it")
            read = read_log(log, plan.decisions, schedule)
            return Timeline.assemble(self.program, self.limit, required, *read, period)


def rerun_ns(program: Program, gaps: Sequence[Gap]) -> Ints:
    """Returns ``residency.recompute_ns`` of each gap, int64 (gaps,).

    For a chain of more than CHAIN kernels, only the first CHAIN count, to avoid quadratic time.
    """
    n = len(program.kernels)
    (tensor, _, before) = columns_of(gaps).T.copy()
    durations = np.array([k.duration_ns for k in program.kernels], np.int64)
    out = np.empty(len(gaps), np.int64)
    rerun_times(durations, graph_of(program), tensor, before, np.zeros(n, np.int64), np.empty(n, np.int64), out)
    return out


def graph_of(program: Program) -> Ints:
    """Returns ``ragged`` inputs and outputs of the kernels and writers of the tensors.

    ``Program.available_until`` of each kernel's inputs follows, in the same order.
    """
    kernels = program.kernels
    graph = ragged(
        [dict.fromkeys(k.inputs) for k in kernels], [dict.fromkeys(k.outputs) for k in kernels], program.writes
    )
    until = [k for ends in program.available_until for k in ends.values()]
    return np.concatenate((graph, np.array(until, np.int64)))


def cores() -> int:
    """Returns the number of cores that this process may use; 1 in a worker process.

    The environment variable HEADROOM_WORKER marks any process as a worker.
    """
    if multiprocessing.parent_process() is not None or os.environ.get("HEADROOM_WORKER"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(runs: Sequence[Callable[[], None]]) -> None:
    """Calls the first function on this thread and the others on worker threads; waits for all."""
    others = [_threads(os.getpid()).submit(run) for run in runs[1:]]
    runs[0]()
    for other in others:
        other.result()


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Returns the thread pool of a process; a forked child cannot use its parent's."""
    return ThreadPoolExecutor(cores(), "plans")


def simulate(
    program: Program,
    plan: Plan,
    machine: Machine,
    limit: int,
    iterations: int = 2,
    limit_until: int | None = None,
    schedule: Schedule | None = None,
) -> Timeline:
    """Simulates a program under a plan by the rules in RULES.md.

    Args:
        program: One iteration of the job.
        plan: Plan for ``program``.
        machine: Machine to simulate.
        limit: Memory limit in bytes, persistent tensors included.
        iterations: Least number of simulated iterations; the last one, which is steady, is reported (rule 10).
        limit_until: Enforce the limit only for kernels before this one; None: everywhere.
        schedule: Result of ``lower`` for this plan; None: computed here.

    Returns:
        The timeline of all simulated iterations; its iteration time and breakdown are those of the last, in ns.

    Raises:
        PlanError: The plan does not fit the program, or holds more bytes on the host than the machine has.
        OutOfMemory: The plan is infeasible at the limit.
    """
    return Engine(program, machine, limit, iterations).timeline(plan, limit_until, schedule)
