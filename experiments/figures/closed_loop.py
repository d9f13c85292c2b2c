"""A plan for each iteration of a noisy run (figure=robustness): by a greedy walk that sees the clock, or by a search.

A walk goes by fixed Q-values; its state, which says what may be decided, sees the clock: kernels that have run took
what they took, and copies take what the share of the link at the iteration's begin lets them. From that follow the
kernel at which the agent goes on when a copy has ended, and since when the engine is free. What else it reads (open
gaps, planned residency) is counted in kernels, so that nothing depends on a kernel that has not run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agents.heuristics.tensile.times import corrected
from agents.learned.dqn_config import DQNConfig
from agents.learned.training import check_reachable
from agents.planner import MIB, Infeasible, Rows
from agents.search.local_search import Moves
from envs.task import Task
from envs.walk import Walk
from simulator.compiled.encoding import AFTER, BEFORE, KIND, SWAP, TENSOR, WHEN, decisions_of, rows_of
from simulator.job import Tenant
from simulator.jobs import Job, JobsEngine, JobTimeline, Noise, simulate_jobs
from simulator.jobs.engine import world_of
from simulator.jobs.event_loop import run as run_world
from simulator.jobs.tables import DEADLOCK
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:
    from agents.learned.dqn import Trainer

BETA = 0.5  # of the moving average: the controller's
HOT, COLD = 3e-3, 3e-5  # temperatures, as fractions of the ideal time: those of agents/search/annealing.py


class Run:
    """A job under one draw of noise, which takes a plan for one iteration after the other.

    Attributes:
        rows: ``Job.durations``. tenant: as of ``simulate_jobs``.
        starts: ns at which each iteration so far began, and at which the next one begins.
    """

    def __init__(self, program: Program, machine: Machine, limit: int, noise: Noise, iterations: int, seed: int):
        self.program, self.machine, self.limit, self.iterations = program, machine, limit, iterations
        self.rows, self.tenant = noise.durations(program, iterations, seed), noise.tenants(program, iterations, seed)
        self.plans: list[Plan] = []
        self.starts = [0]

    def durations(self, i: int) -> tuple[int, ...]:
        """(kernels,) ns in iteration i."""
        return (
            self.rows[min(i, len(self.rows) - 1)]
            if self.rows
            else tuple(kernel.duration_ns for kernel in self.program.kernels)
        )

    def thought(self) -> Run:
        """The same with what is to come as it may be thought: kernels take the moving average of what they took, the
        link stays as it is."""
        out, done = copy.copy(self), self.rows[: len(self.plans)]
        times = np.array([kernel.duration_ns for kernel in self.program.kernels], np.int64)
        for row in done:
            times = corrected(times, np.array(row, np.int64), BETA)
        out.rows = (*done, tuple(times.tolist()), tuple(times.tolist())) if self.rows else ()
        out.tenant = [change for change in self.tenant if change[0] <= self.starts[-1]]
        return out

    def _job(self, plans: Sequence[Plan]) -> Job:
        changes = zip(self.starts[1:], plans, plans[1:], strict=False)
        switches = tuple((at, plan) for at, before, plan in changes if plan.decisions != before.decisions)
        return Job(self.program.name, self.program, plans[0], iterations=len(plans), switches=switches,
                   durations=self.rows)  # fmt: skip

    def end_ns(self, *plans: Plan) -> int:
        """When the next iterations would end, one of each plan; raises as ``simulate_jobs``."""
        jobs = [self._job([*self.plans, *plans])]
        world = world_of(jobs, self.machine, self.limit, tenant=self.tenant)
        if run_world(world) == DEADLOCK:
            simulate_jobs(jobs, self.machine, self.limit, tenant=self.tenant)  # raises JobsDeadlock, which names it
        return int(world.jobs["boundary"][0])

    def take(self, plan: Plan) -> None:
        """The next iteration runs under it."""
        self.starts.append(self.end_ns(plan))
        self.plans.append(plan)

    def simulated(self) -> JobTimeline:
        """The iterations so far, as ``simulate_jobs`` runs them with their switches."""
        return simulate_jobs([self._job(self.plans)], self.machine, self.limit, tenant=self.tenant).jobs[0]


def later(tenant: Tenant, at_ns: int) -> Tenant:
    """The tenant from a time on, which becomes 0."""
    before = [share for at, share in tenant if at <= at_ns]
    return ((0, before[-1] if before else 0.0), *((at - at_ns, share) for at, share in tenant if at > at_ns))


def trained(program: Program, machine: Machine, limit: int, episodes: int) -> Trainer:
    """The DQN, trained on the program's own times; raises Infeasible where nothing it can do fits the limit."""
    from agents.learned.dqn import Trainer  # PyTorch takes long to import

    config = DQNConfig(episodes=episodes)
    task = Task(program, machine, limit, config.min_bytes, config.mode)
    check_reachable(task, config.min_bytes)
    trainer = Trainer(task, config, 0)
    while not trainer.done and program.peak_bytes > limit:
        trainer.step()
    return trainer


class Walker:
    """Walks greedily by the Q-values that a trainer has kept, among other kernel times each time.

    Attributes:
        blind: the plan of the walk among the program's own times.
        dead_ends: walks that ended in one, in whose iteration the blind plan was kept.

    Args:
        link: it sees the share of the link at the begin of an iteration, too, and not only what kernels take.
        near: a plan to which the values are moved (``Trainer.moved``).

    Raises:
        Infeasible: the blind walk ends in a dead end.
    """

    def __init__(self, trainer: Trainer, link: bool, near: Plan | None = None) -> None:
        self.task, self.code, self.link, self.dead_ends = trainer.task, trainer.code, link, 0
        self._min_bytes = trainer.config.min_bytes
        kept = [(elite.overhead, elite.values) for elite in trainer.elites]  # none where nothing need leave
        self.values = min(kept, key=lambda entry: entry[0])[1] if kept else np.zeros(len(self.code), np.float32)
        if near is not None:
            self.values = trainer.moved(self.values, rows_of(near.decisions))
        found = self.decided(None, 0.0)
        if found is None:
            raise Infeasible(f"walk: {self.task.program.name!r} ends in a dead end in {self.task.limit:,} bytes")
        self._known, self.blind = found[1], self._plan(found[1])

    def decided(self, durations: Sequence[int] | None, share: float) -> tuple[list[int], Rows] | None:
        """A walk among ``durations`` (ns; None: the program's own) with a ``share`` of the link taken.

        Returns:
            Of each decision, how many kernels had ended when it was made, and its row; None: a dead end.
        """
        task, left = self.task, 1 - share
        program = task.program if durations is None else task.program.with_durations(durations)
        rates = ("h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_h2d_bytes_per_s", "duplex_d2h_bytes_per_s")
        link = {name: math.ceil(getattr(task.machine, name) * left) for name in rates}
        walk = Walk(
            Task(program, replace(task.machine, **link), task.limit, self._min_bytes, task.mode), "causal", "full"
        )
        at: list[int] = []
        while not walk.done:
            action = int(np.where(walk.mask()[self.code], self.values, -np.inf).argmax())
            if action:
                at.append(walk.position)
            walk.step(int(self.code[action]))
        return None if walk.dead_end else (at, walk.rows.copy())

    def plan(self, run: Run) -> Plan:
        """The plan of the next iteration of a run: what is decided in it, as it can then still be done."""
        share = later(run.tenant, run.starts[-1])[0][1] if self.link else 0.0
        found = self.decided(run.durations(len(run.plans)), share)
        if found is None:
            self.dead_ends += 1
            return self.blind
        return self._plan(in_time(*found, self._known))

    def _plan(self, rows: Rows) -> Plan:
        task = self.task
        return Plan.of(task.program, decisions_of(rows), "walk", task.limit, task.machine.name)


def in_time(at: Sequence[int], rows: Rows, known: Rows) -> Rows:
    """Rows as they can still be carried out when they are decided: a walk gives a copy the time at which the engine was
    free, or the last write, which may be over. So a swap-out begins with the decision; but one that the ``known`` plan,
    which was in force, has too, as that plan has it.

    Args:
        at: of each row, how many kernels had ended when it was decided.
    """
    out, before = rows.copy(), {(row[TENSOR], row[BEFORE]): row for row in known}
    for p, row in zip(at, out, strict=True):
        old = before.get((row[TENSOR], row[BEFORE]))
        if row[KIND] != SWAP or row[AFTER] >= row[BEFORE] or (old is not None and (old == row).all()):
            continue  # one over the boundary is decided before the first kernel, in every iteration alike
        row[AFTER] = p - 1
        if old is None or old[KIND] != SWAP or old[WHEN] != row[WHEN]:
            row[WHEN] = -1
    return out


class Replanner:
    """Searches a plan for each iteration of a run.

    Args:
        plans: where each search starts, from the one that is best for the iteration.
        calls: plans that are tried for an iteration.
        clairvoyant: its kernel times and the tenant are known, which no closed loop can do; else they are thought to be
            as TENSILE's controller thinks (times.py) after the iterations before, and the link as it is at the begin.
    """

    def __init__(self, plans: Sequence[Plan], calls: int, clairvoyant: bool, seed: int = 0) -> None:
        self.plans, self.calls, self.clairvoyant, self.seed = list(plans), calls, clairvoyant, seed

    def plan(self, run: Run) -> Plan:
        """The plan of the next iteration of a run; the best of those that were there, where the search has none."""
        i = len(run.plans)
        run = run if self.clairvoyant else run.thought()
        # With an iteration before, by the link as it is at the begin, so that it does not start with everything in
        # memory; and with the next one, so that nothing is put off to that.
        before, after = max(i - 1, 0), min(i + 1, run.iterations - 1)
        sample = [tuple(map(run.durations, (before, i, after)))]
        share, *changes = later(run.tenant, run.starts[i])
        one, three = (JobsEngine([run.program], run.machine, run.limit, iterations=n) for n in (1, 3))

        def lasts(rows: Rows) -> float:
            begin = one.score([rows], sample, [share])
            if not begin.feasible:
                return math.inf
            at = int(begin.jobs[0].mean_ns)
            end = three.score([rows], sample, [share, *((at + soon, part) for soon, part in changes)])
            return 3 * end.jobs[0].mean_ns - at if end.feasible else math.inf

        starts = [*self.plans, *run.plans[-1:]]
        moves = Moves(run.program, run.limit, "joint", MIB, self.seed + i)
        found, found_ns = min(((rows, lasts(rows)) for rows in (rows_of(plan.decisions) for plan in starts)),
                              key=lambda entry: entry[1])  # fmt: skip
        if moves.takes(found):
            found = searched(moves, found, found_ns, lasts, self.calls, sum(map(sum, sample[0][1:])), self.seed + i)
        made = Plan.of(run.program, decisions_of(found), "replanned", run.limit, run.machine.name)
        return min([made, *starts], key=lambda plan: run.end_ns(plan, plan))


def searched(
    moves: Moves, start: Rows, start_ns: float, lasts: Callable[[Rows], float], calls: int, ideal_ns: int, seed: int
) -> Rows:
    """Rows of the best plan that annealing finds from ``start`` by what ``lasts`` says (ns)."""
    random, now, best, best_ns = np.random.default_rng(seed), start_ns, start, start_ns
    moves.reset(start)
    for step in range(calls):
        if best_ns <= ideal_ns:
            break
        rows = moves.propose()
        if rows is None:
            continue
        ns = lasts(rows)
        if ns < now - ideal_ns * HOT * (COLD / HOT) ** (step / calls) * math.log(1.0 - random.random()):
            moves.accept()
            now = ns
            if ns < best_ns:
                best, best_ns = rows, ns
    return best
