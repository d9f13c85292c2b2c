"""The rules of rules.py, compiled: equal to it to the nanosecond.

``simulate_jobs`` is the public call. ``JobsEngine`` is for planners, which score many plans of the same programs: it
makes no timeline. Both lower a plan that comes again once only. README.md says in which order to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from simulator import rules
from simulator.compiled.encoding import COLUMNS, NEVER, Ints, machine_settings, rows_of
from simulator.compiled.engine import Engine
from simulator.job import Job, JobsTimeline, Sharing, Tenant
from simulator.jobs.event_loop import begin, run
from simulator.jobs.log import read_log
from simulator.jobs.lowering import Table, table_of
from simulator.lowered import Lowered, check, check_end, left_by, reserved_bytes
from simulator.plan_transfer import Same

# isort: off
from simulator.jobs.tables import (
    BY_BLOCK, BY_ROW, BY_TENSOR, CHANGES, COPY, DEADLOCK, EVICTIONS, GIVEN, JOB, LOG, N_LOG, NOW, PEAK, PLAN, QUEUE,
    STATE, World,
)  # fmt: skip

# isort: on
from simulator.machine import ALONE, Machine
from simulator.plan import Plan
from simulator.program import Program

KEPT = 1024  # plans that an engine keeps lowered
Tables = Sequence[Sequence[Table]]
Durations = tuple[tuple[int, ...], ...]  # as Job.durations
_Given = tuple[Sequence[Job], Tables, Sequence[int], int | None, Tenant, Sequence[int | None]]


@lru_cache(64)
def _engine(program: Same, machine: Same) -> Engine:
    return Engine(program.of, machine.of, NEVER)


def _table(program: Same, machine: Same, plan: Plan | bytes) -> Table:
    """Of a plan, which is checked; or of its rows as bytes, which fit."""
    engine = _engine(program, machine)
    if isinstance(plan, bytes):
        return table_of(engine, np.frombuffer(plan, np.int64).reshape(-1, COLUMNS).copy())
    plan.check(program.of)
    plan.only("a job among several", "swap", "recompute", "rerun")
    return table_of(engine, rows_of(plan.decisions), plan.variants)


@lru_cache(256)
def _known(program: Same, machine: Same, plan: Plan) -> tuple[Lowered, Table]:
    """What ``simulate_jobs`` needs of a plan."""
    rows = rows_of(plan.decisions)
    return Lowered.of(program.of, plan), table_of(_engine(program, machine), rows, plan.variants)


def _key(plan: Plan | Ints) -> Plan | bytes:
    """What of a plan its schedule and its table follow from."""
    if isinstance(plan, Plan):
        return replace(plan, planner="", limit=0, machine="")
    if plan.ndim != 2 or plan.shape[1] != COLUMNS:
        raise ValueError(f"rows: expected {COLUMNS} columns, got shape {plan.shape}")
    return np.asarray(plan, np.int64).tobytes()


class JobScore(NamedTuple):
    """What a planner asks of a job."""

    iterations: int
    mean_ns: float  # of an iteration; NaN where none ended
    admitted_ns: int  # -1: never
    left_ns: int


class JobsScore(NamedTuple):
    """What a planner asks of the plans of several jobs."""

    feasible: bool  # every job could begin, and none was stuck
    jobs: tuple[JobScore, ...]
    peak_bytes: int
    evictions: int  # on demand

    @property
    def makespan_ns(self) -> int:
        """When the last job left."""
        return max((job.left_ns for job in self.jobs), default=0)


class _Arrays:
    """The arrays of a simulation, kept for the next one: tables that are in place stay there, and only what is too
    small is made anew."""

    def __init__(self) -> None:
        self._placed: list[Table | None] = []  # in ``tables``
        self._bases: list[int] = [0]  # where they begin, and where there would be another
        self._world: World | None = None

    def world(
        self, jobs: Sequence[Job], tables: Tables, settings: Sequence[int], until_ns: int | None, tenant: Tenant,
        shares: Sequence[int | None], entries: int = 0,
    ) -> World:  # fmt: skip
        """All arrays, before the first round.

        Args:
            tables: of each job, those of its entries.
            settings: ``_settings``.
            shares: of each entry of the jobs, one after the other, ``Job.share``.
            entries: of the log; 0: none is kept.
        """
        flat = [table for each in tables for table in each]
        kept = self._room(len(jobs), flat, max((len(p.tensors) for job in jobs for p, _ in job.entries), default=0))
        for i, table in enumerate(flat):
            if self._placed[i] is not table:
                base = self._bases[i]
                kept.tables[base : base + len(table.values)] = table.values
                kept.plans[i] = table.record
                kept.plans["base"][i] = base
                self._placed[i] = table
        kept.plans["share"] = [NEVER if share is None else share for share in shares]
        kept.plans["at_ns"] = [at_ns for job in jobs for at_ns in _changes(job)]
        kept.plans["alike"] = [first for job in jobs for first in job.alike]
        state = np.zeros(len(jobs), JOB)
        numbers, first, row = [], 0, 0
        never = NEVER if until_ns is None else until_ns
        for job, mine in zip(jobs, tables, strict=True):
            numbers.append((
                job.arrives_ns, min(never, NEVER if job.leaves_ns is None else job.leaves_ns),
                -1 if job.iterations is None else job.iterations, reserved_bytes(table.on_host for table in mine),
                first, len(mine), row, len(job.durations), len(job.steps) > 0,
            ))  # fmt: skip
            first += len(mine)
            row += len(job.durations) * len(job.program.kernels)
        state.view(np.int64).reshape(len(jobs), JOB.itemsize // 8)[:, :GIVEN] = np.array(numbers, np.int64).reshape(
            -1, GIVEN
        )
        times = [*(job.durations for job in jobs if job.durations), [*left_by(tenant), (NEVER, ALONE)]]
        return kept._replace(
            times=np.concatenate([np.array(x, np.int64).ravel() for x in times]),
            jobs=state,
            arrivals=np.array(sorted(range(len(jobs)), key=lambda j: (jobs[j].arrives_ns, j)), np.int64),
            copy=np.zeros((2, COPY), np.int64),
            now=np.zeros(STATE, np.int64),
            settings=np.array([*settings[:CHANGES], row, *settings[CHANGES:]], np.int64),
            log=np.empty((entries + 1 if entries else 0, LOG), np.int64),
        )

    def _room(self, n: int, flat: Sequence[Table], tensors: int) -> World:
        """What depends on the plans alone, with room for these tables."""
        kernels, rows, blocks = (max((int(t.record[x]) for t in flat), default=0) for x in ("n", "n_rows", "n_blocks"))
        old = self._world
        room = [end - base for base, end in pairwise(self._bases)]
        if (
            old is not None and len(room) == len(flat) and rows <= old.by_row.shape[2]
            and blocks <= old.by_block.shape[2] and all(len(t.values) <= r for t, r in zip(flat, room, strict=True))
        ):  # fmt: skip
            return old
        if old is not None:  # plans come and go: some to spare
            rows, blocks = rows * 5 // 4, blocks * 5 // 4
        room = [len(t.values) * (4 if old is None else 5) // 4 for t in flat]
        self._bases, self._placed = [0, *accumulate(room)], [None] * len(flat)
        some, empty = np.empty(0, np.int64), np.empty
        self._world = World(
            empty(self._bases[-1], np.int64), some, np.zeros(len(flat), PLAN), some, some,
            empty((n, BY_TENSOR, tensors), np.int64), empty((n, BY_ROW, rows), np.int64),
            empty((n, BY_BLOCK, blocks), np.int64), empty((n, kernels), np.int64), empty((n, rows + blocks), np.int64),
            empty((n, kernels + 1), np.int64), empty((n * blocks + 1, QUEUE), np.int64), some, some, some, some,
        )  # fmt: skip
        return self._world


def _changes(job: Job) -> list[int]:
    """When each of its entries takes effect; -1: at the start, or in turns."""
    return [-1, *(at_ns for at_ns, _ in job.switches)] if not job.steps else [-1] * len(job.entries)


def _settings(machine: Machine, limit: int, sharing: Sharing, jobs: int) -> list[int]:
    """World.settings, without CHANGES."""
    speeds = [machine.compute_share(k) for k in range(jobs + 1)]
    return [*machine_settings(machine, limit), sharing == "fifo", machine.switch_ns, *speeds]


def simulate_jobs(
    jobs: Sequence[Job], machine: Machine, limit: int, until_ns: int | None = None, sharing: Sharing = "fifo",
    tenant: Tenant = (),
) -> JobsTimeline:  # fmt: skip
    """Runs several jobs on one machine; the rules are in RULES.md.

    Args:
        limit: bytes, persistent tensors included, for all jobs together.
        until_ns: from then on every job leaves at its next boundary, and none begins; None: they leave by themselves.
        sharing: "fifo": one step at a time on the compute stream; "shared": one of each job, each of them slower.
        tenant: (at_ns, share), ascending: what somebody else takes of the link from then on, in [0, 1).

    Raises:
        ValueError: a job has no end, or the tenant's times or shares are out of range.
        PlanError: a plan does not fit its program, or holds more on the host than that has.
        OutOfMemory: a step of a job does not fit under the limit with everything else away.
        JobsDeadlock: no job can go on, because the host is full.
    """
    plans, given = _checked(jobs, machine, limit, until_ns, sharing, tenant)
    arrays, entries, room = _Arrays(), 4096, 0
    while entries > room:
        room = entries
        world = arrays.world(*given, room)
        if run(world) == DEADLOCK:
            # It says who waits for what.
            return rules.simulate_jobs(jobs, machine, limit, until_ns, sharing, tenant)
        entries = int(world.now[N_LOG])
    end = int(world.jobs["left"].max(initial=-1))
    out, order, evictions = read_log(world.log[:entries], jobs, plans)
    return JobsTimeline.assemble(limit, sharing, end if end >= 0 else int(world.now[NOW]), out, order, evictions)


def _checked(
    jobs: Sequence[Job], machine: Machine, limit: int, until_ns: int | None, sharing: Sharing, tenant: Tenant
) -> tuple[list[list[Lowered]], _Given]:
    """The plans of jobs that can run, lowered; and what ``_Arrays.world`` takes. Raises as ``simulate_jobs``."""
    same = Same(machine)
    known = [[_known(Same(program), same, _key(plan)) for program, plan in job.entries] for job in jobs]
    plans = [[lowered for lowered, _ in each] for each in known]
    check(jobs, plans, machine, limit, until_ns)
    shares = [job.share(p) for job in jobs for p in range(len(job.entries))]
    tables = [[table for _, table in each] for each in known]
    return plans, (jobs, tables, _settings(machine, limit, sharing, len(jobs)), until_ns, tenant, shares)


def world_of(
    jobs: Sequence[Job], machine: Machine, limit: int, until_ns: int | None = None, sharing: Sharing = "fifo",
    tenant: Tenant = (),
) -> World:  # fmt: skip
    """The arrays of ``simulate_jobs`` before the first round, without a log; raises as that does."""
    world = _Arrays().world(*_checked(jobs, machine, limit, until_ns, sharing, tenant)[1])
    begin(world)
    return world


class JobsEngine:
    """Programs that share a machine, ready to score many plans for them. They all begin at 0. Not for several threads
    at once.

    Args:
        limit: bytes, for all together.
        until_ns, iterations: when the jobs leave, as for ``simulate_jobs`` and ``Job``; one of them is given.
            Iterations may be those of each job.
        within: as for ``Job``.
        shares: bytes that each job's swap-ins keep within, in the place of its plan's limit; 0: all may be used.
        tenant: as for ``simulate_jobs``.

    Raises:
        ValueError: neither is given, the shares are not one for each program, or the tenant is out of range.
    """

    def __init__(self, programs: Sequence[Program], machine: Machine, limit: int, until_ns: int | None = None,
                 iterations: int | Sequence[int] | None = None, sharing: Sharing = "fifo", within: bool = False,
                 shares: Sequence[int] | None = None, tenant: Tenant = ()):  # fmt: skip
        if until_ns is None and iterations is None:
            raise ValueError("expected until_ns or iterations")
        if shares is not None and len(shares) != len(programs):
            raise ValueError(f"expected {len(programs)} shares, got {len(shares)}")
        self.programs, self.machine, self.limit = tuple(programs), machine, limit
        self.until_ns, self.sharing, self.calls, self.shares = until_ns, sharing, 0, shares
        self.tenant, self.within = tuple(tenant), within or shares is not None
        left_by(self.tenant)
        counts = iterations if isinstance(iterations, Sequence) else [iterations] * len(programs)
        self._jobs = [
            Job(str(j), program, Plan(), iterations=count)
            for j, (program, count) in enumerate(zip(programs, counts, strict=True))
        ]
        self._known = lru_cache(KEPT)(_table)
        self._same, self._arrays = (Same(machine), [Same(program) for program in programs]), _Arrays()
        self._settings = _settings(machine, limit, sharing, len(self._jobs))

    def score(
        self, plans: Sequence[Plan | Ints], sample: Sequence[Durations] | None = None, tenant: Tenant | None = None,
        shares: Sequence[int] | None = None,
    ) -> JobsScore:  # fmt: skip
        """Simulates the jobs under a plan each; a plan that is given often is lowered once.

        Args:
            plans: for each program a Plan; or its decisions as rows (``compiled.encoding.rows_of``), which must fit the
                program, as those of ``Engine.score``, and have no limit.
            sample: ``Job.durations`` for each program; None: the programs' own.
            tenant, shares: in the place of the engine's.

        Raises:
            PlanError: a plan does not fit its program.
            ValueError: a sample's durations do not fit their program, the tenant is out of range, or rows have another
                number of columns.
        """
        self.calls += 1
        machine, programs = self._same
        known = [self._known(p, machine, _key(q)) for p, q in zip(programs, plans, strict=True)]
        jobs = self._jobs
        if sample is not None:
            jobs = [replace(job, durations=rows) for job, rows in zip(jobs, sample, strict=True)]
        check_end(jobs, [[table.ns] for table in known], self.machine, self.until_ns)
        needs = (max(table.least_bytes, table.record["admission_bytes"]) for table in known)
        if any(bytes_ > self.limit for bytes_ in needs) or any(t.on_host > self.machine.host_bytes for t in known):
            return JobsScore(False, (), 0, 0)
        parts = self.shares if shares is None else shares
        if parts is None:
            parts = [plan.limit if self.within and isinstance(plan, Plan) else 0 for plan in plans]
        world = self._arrays.world(
            jobs, [[table] for table in known], self._settings, self.until_ns,
            self.tenant if tenant is None else tenant, [part or None for part in parts],
        )  # fmt: skip
        status = run(world)
        out = tuple(_job_score(job) for job in world.jobs)
        feasible = status != DEADLOCK and all(job.iterations for job in out)
        return JobsScore(feasible, out, int(world.now[PEAK]), int(world.now[EVICTIONS]))

    def scores(self, plans: Sequence[Plan | Ints], samples: Sequence[Sequence[Durations]]) -> list[JobsScore]:
        """What ``score`` gives for each of the samples: how plans fare when kernels take other times than planned."""
        return [self.score(plans, sample) for sample in samples]


def _job_score(job: Mapping[str, int]) -> JobScore:
    ended, admitted = int(job["boundaries"]), int(job["admitted"])
    mean = (int(job["boundary"]) - admitted) / ended if ended else float("nan")
    return JobScore(ended, mean, admitted, int(job["left"]))
