"""The rules of rules.py, compiled: equal to it to the nanosecond.

``simulate_jobs`` is the public call. ``JobsEngine`` is for planners, which score many plans of the same programs: it
makes no timeline. Both lower a plan that comes again once only. README.md says in which order to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from simulator import rules
from simulator.compiled.encoding import NEVER, Ints, decisions_of
from simulator.compiled.engine import Engine
from simulator.job import Job, JobsTimeline, Sharing, Tenant
from simulator.jobs.event_loop import run
from simulator.jobs.log import read_log
from simulator.jobs.lowering import Table, table_of
from simulator.lowered import Lowered, check, check_end, left_by, reserved_bytes
from simulator.plan_transfer import Same

# isort: off
from simulator.jobs.tables import (
    C_END, C_JOB, DEADLOCK, EVICTIONS, FREE, HOST_LEFT, JOB, LOG, N_LOG, NOW, PEAK, PLAN, SERVED, STATE, STEPPED,
    TENANT, TENANT_AT, UNADMITTED, UNFINISHED, World,
)  # fmt: skip

# isort: on
from simulator.machine import ALONE, Machine
from simulator.plan import Plan, Rerun
from simulator.program import Program
from simulator.schedule import lower

KEPT = 1024  # plans that an engine keeps lowered
Tables = Sequence[Sequence[Table]]
Durations = tuple[tuple[int, ...], ...]  # as Job.durations


@lru_cache(64)
def _engine(program: Same, machine: Same) -> Engine:
    return Engine(program.of, machine.of, NEVER)


def _table(program: Same, machine: Same, plan: Plan) -> Table:
    """Of a plan, which is checked."""
    plan.check(program.of)
    plan.only("a job among several", "swap", "recompute", "rerun")
    if plan.of_kind(Rerun):
        lower(program.of, plan)  # says which of these cannot be
    return table_of(_engine(program, machine), plan)


@lru_cache(256)
def _known(program: Same, machine: Same, plan: Plan) -> tuple[Lowered, Table]:
    """What ``simulate_jobs`` needs of a plan."""
    return Lowered.of(program.of, plan), table_of(_engine(program, machine), plan)


def _key(program: Program, machine: Machine, plan: Plan) -> tuple[Same, Same, Plan]:
    """What a schedule and its table follow from."""
    return Same(program), Same(machine), replace(plan, planner="", limit=0, machine="")


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


def _world(jobs: Sequence[Job], tables: Tables, machine: Machine, limit: int,
           until_ns: int | None, sharing: Sharing, tenant: Tenant, entries: int) -> World:  # fmt: skip
    """All arrays, before the first round.

    Args:
        tables: of each job, those of its entries.
        entries: of the log; 0: none is kept.
    """
    n = len(jobs)
    flat = [table for each in tables for table in each]
    own = [(job, p) for job in jobs for p in range(len(job.entries))]
    records = np.zeros(len(flat), PLAN)
    base = 0
    for i, (table, (job, p)) in enumerate(zip(flat, own, strict=True)):
        share, at_ns = job.share(p), job.switches[p - 1][0] if p and job.switches else -1
        mine = {"base": base, "at_ns": at_ns, "share": NEVER if share is None else share, "alike": job.alike[p]}
        for name, value in (table.record | mine).items():
            records[i][name] = value
        base += len(table.values)
    state = np.zeros(n, JOB)
    never = NEVER if until_ns is None else until_ns
    changes = [*left_by(tenant), (NEVER, ALONE)]
    first, rows = 0, base
    for j, job in enumerate(jobs):
        for name, number in {
            "arrives": job.arrives_ns, "leaves": min(never, NEVER if job.leaves_ns is None else job.leaves_ns),
            "iterations": -1 if job.iterations is None else job.iterations,
            "reserved": reserved_bytes(table.on_host for table in tables[j]),
            "first_plan": first, "n_plans": len(tables[j]), "durations": rows, "n_durations": len(job.durations),
            "takes_turns": len(job.steps) > 0,
            "end": NEVER, "admitted": -1, "left": -1, "ready_since": -1, "stale": 1, "first": NEVER, "offer": NEVER,
            "blocked": -1,
        }.items():  # fmt: skip
            state[j][name] = number
        first += len(tables[j])
        rows += len(job.durations) * len(job.program.kernels)
    most = {name: max((t.record[name] for t in flat), default=0) for name in ("n", "n_rows", "n_blocks")}
    tensors = max((len(program.tensors) for job in jobs for program, _ in job.entries), default=0)
    now = np.zeros(STATE, np.int64)
    now[[UNADMITTED, UNFINISHED]] = n
    now[[SERVED, STEPPED]] = -1
    now[HOST_LEFT], now[FREE], now[TENANT], now[TENANT_AT] = machine.host_bytes, ALONE, rows, changes[0][0]
    more = [*(job.durations for job in jobs), changes]
    link, speeds = (machine.d2h_share, machine.h2d_share), [machine.compute_share(k) for k in range(n + 1)]
    copy = np.zeros((2, 7), np.int64)
    copy[:, C_JOB], copy[:, C_END] = -1, NEVER
    return World(
        np.concatenate([*(t.values for t in flat), *(np.array(x, np.int64).ravel() for x in more)]),
        records,
        state,
        np.array(sorted(range(n), key=lambda j: (jobs[j].arrives_ns, j)), np.int64),
        np.full((n, 2, tensors), -1, np.int64),
        np.zeros((n, 3, most["n_rows"]), np.int64),
        np.zeros((n, 5, most["n_blocks"]), np.int64),
        np.zeros((n, most["n"]), np.int64),
        np.zeros((n, most["n_rows"] + most["n_blocks"]), np.int64),
        np.zeros((n, most["n"] + 1), np.int64),
        np.zeros((n * most["n_blocks"] + 1, 4), np.int64),
        copy,
        now,
        np.array([limit, machine.copy_engines, *link, sharing == "fifo", machine.switch_ns, *speeds], np.int64),
        np.empty((entries + 1 if entries else 0, LOG), np.int64),
    )


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
    known = [[_known(*_key(program, machine, plan)) for program, plan in job.entries] for job in jobs]
    plans = [[lowered for lowered, _ in each] for each in known]
    tables = [[table for _, table in each] for each in known]
    check(jobs, plans, machine, limit, until_ns)
    entries, room = 4096, 0
    while entries > room:
        room = entries
        world = _world(jobs, tables, machine, limit, until_ns, sharing, tenant, room)
        if run(world) == DEADLOCK:
            # It says who waits for what.
            return rules.simulate_jobs(jobs, machine, limit, until_ns, sharing, tenant)
        entries = int(world.now[N_LOG])
    end = int(world.jobs["left"].max(initial=-1))
    out, order, evictions = read_log(world.log[:entries], jobs, plans)
    return JobsTimeline.assemble(limit, sharing, end if end >= 0 else int(world.now[NOW]), out, order, evictions)


class JobsEngine:
    """Programs that share a machine, ready to score many plans for them. They all begin at 0.

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
        self.tenant = tuple(tenant)
        left_by(self.tenant)
        within = within or shares is not None
        counts = iterations if isinstance(iterations, Sequence) else [iterations] * len(programs)
        self._jobs = [
            Job(str(j), program, Plan(), iterations=count, within=within)
            for j, (program, count) in enumerate(zip(programs, counts, strict=True))
        ]
        self._known = lru_cache(KEPT)(_table)

    def score(
        self, plans: Sequence[Plan | Ints], sample: Sequence[Durations] | None = None, tenant: Tenant | None = None
    ) -> JobsScore:
        """Simulates the jobs under a plan each; a plan that is given often is lowered once.

        Args:
            plans: a Plan, or its decisions as rows (``compiled.encoding.rows_of``), for each program.
            sample: ``Job.durations`` for each program; None: the programs' own.
            tenant: in the place of the engine's.

        Raises:
            PlanError: a plan does not fit its program.
            ValueError: a sample's durations do not fit their program, or the tenant is out of range.
        """
        self.calls += 1
        given = [plan if isinstance(plan, Plan) else Plan(decisions_of(plan)) for plan in plans]
        known = [self._known(*_key(p, self.machine, q)) for p, q in zip(self.programs, given, strict=True)]
        if self.shares is not None:
            given = [replace(plan, limit=share) for plan, share in zip(given, self.shares, strict=True)]
        rows = [()] * len(given) if sample is None else sample
        jobs = [replace(j, plan=q, durations=d) for j, q, d in zip(self._jobs, given, rows, strict=True)]
        check_end(jobs, [[table.ns] for table in known], self.machine, self.until_ns)
        needs = (max(table.least_bytes, table.record["admission_bytes"]) for table in known)
        if any(bytes_ > self.limit for bytes_ in needs) or any(t.on_host > self.machine.host_bytes for t in known):
            return JobsScore(False, (), 0, 0)
        tables = [[table] for table in known]
        taken = self.tenant if tenant is None else tenant
        world = _world(jobs, tables, self.machine, self.limit, self.until_ns, self.sharing, taken, 0)
        status = run(world)
        out = tuple(_job_score(world.jobs[j]) for j in range(len(jobs)))
        feasible = status != DEADLOCK and all(job.iterations for job in out)
        return JobsScore(feasible, out, int(world.now[PEAK]), int(world.now[EVICTIONS]))

    def scores(self, plans: Sequence[Plan | Ints], samples: Sequence[Sequence[Durations]]) -> list[JobsScore]:
        """What ``score`` gives for each of the samples: how plans fare when kernels take other times than planned."""
        return [self.score(plans, sample) for sample in samples]


def _job_score(job: Mapping[str, int]) -> JobScore:
    ended, admitted = int(job["boundaries"]), int(job["admitted"])
    mean = (int(job["boundary"]) - admitted) / ended if ended else float("nan")
    return JobScore(ended, mean, admitted, int(job["left"]))
