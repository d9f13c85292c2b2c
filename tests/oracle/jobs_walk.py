"""An episode over several jobs, to be read: programs arrive and leave, the agent plans for those that are there.

A **phase** begins when the set of jobs changes. In it decisions are added to plans that begin empty, because with other
jobs it is another question what has to leave; each swaps or recomputes one gap of one job. "Enough" gives every job its
plan: one that is new starts with it, another changes to it at its next boundary (``Job.switches``). Then time goes on
to the next phase. The reward of "enough" is the total slowdown that this time has cost, negated.

1. Decisions can be taken while the jobs' planned peaks together are over the limit. Where they stay over it, tensors
   are evicted on demand; else every job is ``within`` its peak and an equal part of what is left over.
2. Nothing is known of jobs that come later: those that came are simulated from the start; the past stays as it was.
3. The host is large enough: what plans hold there is reserved as a job begins, and would be known too early.
4. A job keeps its slowdown from its arrival until it is gone; there are no phases after ``until_ns``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from envs.graph import OFFLOAD, REMOVE, STATIC
from envs.jobs_task import (
    FREE,
    JOBS,
    LEFT,
    LOAD,
    OVER,
    RELIEF,
    SHARE,
    TIME_LEFT,
    VALID,
    JobActions,
    JobsTask,
    Scenario,
    gone_ns,
    lost,
)  # fmt: skip
from simulator import Job, JobsTimeline, Plan, Recompute, Swap, simulate_jobs
from simulator.compiled.encoding import AFTER, NEVER, TENSOR, decisions_of, rows_of
from simulator.job import JobTimeline


class _Draft:
    """The plan that a job gets in this phase."""

    def __init__(self, actions: JobActions):
        self.actions = actions
        self.rows = rows_of(())
        self.taken = np.full(len(actions.nbytes), -1, np.int64)  # kind of the action taken of each gap, or -1
        self._look()

    def add(self, kind: int, g: int) -> None:
        """Empties a gap."""
        gap = self.actions.graph.gaps[g]
        self.rows = np.concatenate([self.rows, rows_of([Swap(*gap) if kind == OFFLOAD else Recompute(*gap)])])
        self.taken[g] = kind
        self._look()

    def _look(self) -> None:
        """What follows from the plan: the residency of each kernel, its peak and where that is; bytes on the host."""
        self.need = (
            self.actions.engine.residency(self.rows)
            if len(self.rows)
            else np.array(self.actions.program.live_bytes, np.int64)
        )
        self.peak_at = int(self.need.argmax())
        self.peak = int(self.need[self.peak_at])
        self.on_host = self.actions.engine.on_host(self.rows) if len(self.rows) else 0

    def away_at(self, k: int) -> NDArray[np.bool_]:
        """(G,) gaps in which kernel k lies."""
        after, before = self.actions.after, self.actions.before
        return np.where(after >= before, (after < k) | (k < before), (after < k) & (k < before))

    def possible(self, limit: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(G,) which gaps can be emptied by an offload, and by a removal.

        What a recomputation reads is fetched from the host together, and has to fit under the limit beside a kernel.
        """
        free, room = self.taken < 0, limit - self.actions.largest - self.on_host
        return free & ((self.actions.nbytes <= room) | (self.taken != REMOVE).all()), free & (room >= 0)

    def relief(self) -> NDArray[np.int64]:
        """(G,) bytes that would be away at the first kernel of the planned peak."""
        there = self.away_at(self.peak_at) & (self.taken < 0)
        return np.where(there, self.actions.nbytes, 0)


class JobsWalk:
    """The state of one episode.

    Attributes:
        now_ns: when the phase began; in the end, when the last job left.
        there: the jobs that have come and are not gone, by number.
        planned: the jobs that have come, with the plans that they have got so far.
        timeline: of those, by ascending number, right up to ``now_ns``; None before the first "enough".
        slowdown: total slowdown up to ``now_ns``; in the end, of the whole scenario.
        done: the episode has ended.
    """

    def __init__(self, task: JobsTask):
        self.task = task
        self.reset()

    def reset(self) -> None:
        """Back to the first arrival."""
        self.planned: dict[int, Job] = {}
        self.timeline: JobsTimeline | None = None
        self.slowdown, self.done = 0.0, False
        self._begin(min(job.arrives_ns for job in self.task.scenario.jobs))
        self._refresh()

    @property
    def planned_peak(self) -> int:
        """Bytes that the jobs that are there need at the most, by their plans, if they need them at one time."""
        return sum(draft.peak for draft in self.drafts.values())

    def ran(self) -> dict[int, JobTimeline]:
        """What the jobs that have come did, by number."""
        return dict(zip(sorted(self.planned), self.timeline.jobs, strict=True)) if self.timeline else {}

    def step(self, node: int) -> float:
        """Takes the action of a node; returns the reward.

        Raises:
            ValueError: the action is not valid now.
        """
        task = self.task
        if not (0 <= node < len(task.graph) and self._mask[node]):
            raise ValueError(f"node {node} is not a valid action now")
        reward = 0.0
        if node:
            j = int(task.job[node])
            self.drafts[j].add(int(task.graph.action_kind[node]), int(task.graph.action_gap[node] - task.gap_first[j]))
        elif not self.done:
            reward = self._enough()
        self._refresh()
        return reward

    def end(self) -> None:
        """The episode ends here."""
        self.done = True
        self._refresh()

    def mask(self) -> NDArray[np.bool_]:
        """(N,) which nodes are actions that may be taken now; after the end, only node 0. Do not write to it."""
        return self._mask

    def _refresh(self) -> None:
        task, limit = self.task, self.task.scenario.limit
        self._mask = np.zeros(len(task.graph), np.bool_)
        self._mask[0] = True
        if not self.done and self.planned_peak > limit:
            for j, draft in self.drafts.items():
                actions, own = task.actions[j], self._mask[task.first[j] : task.first[j + 1]]
                for kind, possible in zip((OFFLOAD, REMOVE), draft.possible(limit), strict=True):
                    nodes = actions.nodes[kind]
                    own[nodes - 1] = possible[actions.graph.action_gap[nodes]]

    def show(self, nodes: NDArray[np.float32], moment: NDArray[np.float32]) -> None:
        """Writes what is observed (envs/jobs_env.py says what) into zeros: ``nodes`` (N, LEFT + 1), ``moment`` (4,)."""
        task, scenario, limit = self.task, self.task.scenario, self.task.scenario.limit
        nodes[0, :STATIC], nodes[0, VALID] = task.graph.features[0], 1
        for j, draft in self.drafts.items():
            begin, end = task.first[j], task.first[j + 1]
            actions, own = task.actions[j], nodes[begin:end]
            own[:, :STATIC], own[:, VALID] = task.graph.features[begin:end], self._mask[begin:end]
            relief = (draft.relief() / limit).astype(np.float32)
            for kind, of_kind in actions.nodes.items():
                gap_of = actions.graph.action_gap[of_kind]
                own[of_kind - 1, VALID] -= draft.taken[gap_of] == kind
                own[of_kind - 1, RELIEF] = relief[gap_of]
            own[:, LOAD] = (draft.need / limit).astype(np.float32)[actions.graph.kernel[1:]]
            own[:, SHARE] = draft.peak / limit
            own[:, LEFT] = self.left[j]
        until = scenario.until_ns
        moment[OVER], moment[FREE], moment[JOBS] = self.planned_peak / limit - 1, 1 - self.used / limit, len(self.there)
        moment[TIME_LEFT] = 1 if until is None else max(0, until - self.now_ns) / until

    def _enough(self) -> float:
        """The jobs get their plans, and run until the next one comes or goes; returns the reward."""
        scenario = self.task.scenario
        for j, plan in self._plans().items():
            job = self.planned.get(j)
            if job is None:
                self.planned[j] = replace(scenario.jobs[j], plan=plan, switches=(), within=True)
            elif plan != job.plans[-1]:
                self.planned[j] = replace(job, switches=(*job.switches, (self.now_ns, plan)))
        come = min((job.arrives_ns for job in scenario.jobs if job.arrives_ns > self.now_ns), default=NEVER)
        horizon = scenario.until_ns if come == NEVER else come + 1
        jobs = [self.planned[j] for j in sorted(self.planned)]
        self.timeline = simulate_jobs(jobs, self.task.machine, scenario.limit, horizon, scenario.sharing)
        ran = self.ran()
        then = min([come, *(gone_ns(scenario, j, ran[j]) for j in self.there)])
        self._begin(then)
        if not self.there:
            self._begin(come)
        before = self.slowdown
        self.slowdown = sum(lost(scenario, j, one, self.now_ns) for j, one in ran.items())
        return before - self.slowdown

    def _plans(self) -> dict[int, Plan]:
        """Of the jobs that are there, by number (point 1)."""
        limit, out = self.task.scenario.limit, {}
        spare = (limit - self.planned_peak) // len(self.there)
        for j, draft in self.drafts.items():
            program = self.task.actions[j].program
            own = draft.peak + spare if spare >= 0 else 0
            rows = draft.rows[np.lexsort(draft.rows.T[[AFTER, TENSOR]])]  # in any order they are the same plan
            out[j] = Plan.of(program, decisions_of(rows), "", own, self.task.machine.name)
        return out

    def _begin(self, now: int) -> None:
        """A phase begins; or, from ``until_ns`` on or when nobody is to come any more, the episode has ended."""
        task, scenario, ran = self.task, self.task.scenario, self.ran()
        self.done = now >= (NEVER if scenario.until_ns is None else scenario.until_ns)
        self.now_ns = self.timeline.end_ns if self.done and self.timeline else now
        self.there = [
            j for j, job in enumerate(scenario.jobs)
            if job.arrives_ns <= now and (j not in ran or gone_ns(scenario, j, ran[j]) > now) and not self.done
        ]  # fmt: skip
        self.drafts = {j: _Draft(task.actions[j]) for j in self.there}
        self.left = {j: 1.0 for j in self.there} | {j: _left(scenario, j, ran[j], now) for j in self.there if j in ran}
        self.used = _used(self.timeline, now) if self.there else 0


def _left(scenario: Scenario, j: int, ran: JobTimeline, now: int) -> float:
    """The share of a job's iterations that has not ended."""
    ended = bisect_right(ran.boundaries, now) * scenario.jobs[j].program.ideal_ns
    return max(0.0, 1 - ended / scenario.alone_ns(j))


def _used(timeline: JobsTimeline | None, now: int) -> int:
    """Bytes in use after a time."""
    before: Sequence[tuple[int, int]] = timeline.memory if timeline else ()
    i = bisect_right(before, now, key=lambda point: point[0])
    return before[i - 1][1] if i else 0
