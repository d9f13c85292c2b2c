"""An episode over several jobs without Gymnasium: programs arrive and leave, the agent plans for those that are there.

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
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from envs.graph import NOTHING, OFFLOAD, REMOVE, SIZE, STATIC, OperationGraph, build_graph
from simulator import Engine, Job, JobsTimeline, Machine, Plan, Program, Recompute, Swap, simulate_jobs
from simulator.compiled.encoding import AFTER, NEVER, TENSOR, decisions_of, rows_of
from simulator.job import JobTimeline, Sharing

# Columns of the node features after the graph's; and of what is known of the moment.
VALID, RELIEF, LOAD, SHARE, LEFT = range(STATIC, STATIC + 5)
OVER, FREE, JOBS, TIME_LEFT = range(4)
HOST_BYTES = 2**60  # point 3


@dataclass(frozen=True)
class Scenario:
    """Jobs that come and go on one machine. Their own plans and switches, and ``within``, are not used.

    Attributes:
        limit: bytes, for all jobs together.
        until_ns: from then on every job leaves at its next boundary, and none begins; None: they leave by themselves.
        sharing: as for ``simulate_jobs``.

    Raises:
        ValueError: a job runs several programs.
    """

    jobs: tuple[Job, ...]
    machine: Machine
    limit: int
    until_ns: int | None = None
    sharing: Sharing = "fifo"

    def __post_init__(self) -> None:
        for job in self.jobs:
            if job.steps:
                raise ValueError(f"job {job.name!r}: a scenario's jobs run one program each, without steps")

    def leaves_ns(self, j: int) -> int:
        """From when on a job leaves at its next boundary, whatever it has done; NEVER: it does its iterations."""
        return min(NEVER if at is None else at for at in (self.jobs[j].leaves_ns, self.until_ns))

    def alone_ns(self, j: int) -> int:
        """How long a job would be there alone with unlimited memory.

        Raises:
            ValueError: it has no end, never begins, or takes no time.
        """
        job, leaves = self.jobs[j], self.leaves_ns(j)
        if job.iterations is None and leaves == NEVER:
            raise ValueError(f"job {job.name!r} has no end: give it iterations or leaves_ns, or the scenario until_ns")
        if leaves <= job.arrives_ns or not job.program.ideal_ns:
            raise ValueError(f"job {job.name!r}: expected one that begins and takes time")
        most = -((job.arrives_ns - leaves) // job.program.ideal_ns)
        return job.program.ideal_ns * min(most, job.iterations or most)


def lost(scenario: Scenario, j: int, ran: JobTimeline, now: int = NEVER) -> float:
    """The slowdown of a job up to a time: from its arrival, less the time of the kernels that have ended, over the time
    that it would be there alone. Of a job that does all its iterations it is time / ideal time - 1 in the end."""
    there = max(0, min(now, gone_ns(scenario, j, ran)) - ran.arrived_ns)
    kernels = scenario.jobs[j].program.kernels
    done = sum(kernels[s.index].duration_ns for s in ran.spans if s.kind == "kernel" and s.end_ns <= now)
    return (there - done) / scenario.alone_ns(j)


def gone_ns(scenario: Scenario, j: int, ran: JobTimeline) -> int:
    """When a job is gone: when it left, or could no longer begin."""
    return scenario.leaves_ns(j) if ran.left_ns is None else ran.left_ns


def total_slowdown(scenario: Scenario, timeline: JobsTimeline) -> float:
    """The sum of the slowdowns of all jobs of a timeline of the scenario, to the end."""
    return sum(lost(scenario, j, ran) for j, ran in enumerate(timeline.jobs))


class JobActions:
    """What can be decided of one program. G gaps, N nodes of its graph."""

    def __init__(self, program: Program, machine: Machine, min_bytes: int, mode: str):
        self.program = program
        self.graph = graph = build_graph(program, machine, 0, min_bytes, mode)
        self.engine = Engine(program, machine, program.peak_bytes)
        self.tensor, self.after, self.before = graph.gap_columns
        self.nbytes = np.array([program.tensors[t].nbytes for t in self.tensor], np.int64)
        self.nodes = {kind: np.flatnonzero(graph.action_kind == kind) for kind in (OFFLOAD, REMOVE)}
        self.live = np.array(program.live_bytes, np.int64)
        accessed = ((sum(program.tensors[t].nbytes for t in k.accesses) + k.workspace) for k in program.kernels)
        self.largest = max(accessed)  # kernel, with all that it accesses

    def away_at(self, k: int) -> NDArray[np.bool_]:
        """(G,) gaps in which kernel k lies."""
        wraps = self.after >= self.before
        inside: NDArray[np.bool_] = np.where(
            wraps, (self.after < k) | (k < self.before), (self.after < k) & (k < self.before)
        )
        return inside


class JobsTask:
    """A scenario, and the graph of all its jobs; shared by any number of walks (one thread).

    Attributes:
        graph: the jobs' graphs, which have node 0 in common. Sizes are over the limit, times over the ideal iteration
            of the node's own job; kernels are those of its program, gaps are numbered through.
        job: (N,) the job of each node; -1: node 0.
        alone_ns: of each job, ``Scenario.alone_ns``.

    Args:
        known: actions that other tasks of the same machine, ``min_bytes`` and ``mode`` have, by program.

    Raises:
        ValueError: unknown mode, no jobs, or a job that has no end, never begins or takes no time.
        OutOfMemory: a kernel of a job does not fit under the limit with everything else away.
    """

    def __init__(self, scenario: Scenario, min_bytes: int = 2**20, mode: str = "joint",
                 known: dict[str, JobActions] | None = None):  # fmt: skip
        if not scenario.jobs:
            raise ValueError("a scenario has at least one job")
        self.scenario = scenario
        self.machine = replace(scenario.machine, host_bytes=HOST_BYTES)
        self.alone_ns = [scenario.alone_ns(j) for j in range(len(scenario.jobs))]
        plain = [replace(job, plan=Plan(), switches=()) for job in scenario.jobs]
        simulate_jobs(plain, self.machine, scenario.limit, 0, scenario.sharing)  # raises; nobody begins
        known = {} if known is None else known
        self.actions: list[JobActions] = []
        for one in scenario.jobs:
            name = one.program.fingerprint
            if name not in known:
                known[name] = JobActions(one.program, scenario.machine, min_bytes, mode)
            self.actions.append(known[name])
        lengths = [len(part.graph) - 1 for part in self.actions]
        self.first = np.cumsum([1, *lengths])  # node of each job
        self.gap_first = np.cumsum([0, *(len(part.graph.gaps) for part in self.actions)])
        self.job = np.repeat(np.arange(-1, len(lengths)), [1, *lengths])
        self.graph = self._union()

    def _union(self) -> OperationGraph:
        graphs = [part.graph for part in self.actions]
        features = [graphs[0].features[:1], *(graph.features[1:].copy() for graph in graphs)]
        edges, weights, gap_of = [np.zeros((2, 1), np.int64)], [np.zeros(1, np.float32)], [graphs[0].action_gap[:1]]
        for j, graph in enumerate(graphs):
            features[j + 1][:, SIZE] *= self.actions[j].program.peak_bytes / self.scenario.limit
            own = (graph.edges > 0).any(0)  # all but the loop of node 0
            edges.append(np.where(graph.edges > 0, graph.edges + self.first[j] - 1, 0)[:, own])
            weights.append(graph.weights[own])
            gap_of.append(np.where(graph.action_gap >= 0, graph.action_gap + self.gap_first[j], -1)[1:])
        return OperationGraph(
            tuple(gap for graph in graphs for gap in graph.gaps),
            np.concatenate(features),
            np.concatenate([np.zeros(1, np.int64), *(graph.kernel[1:] for graph in graphs)]),
            np.concatenate(edges, 1),
            np.concatenate(weights),
            np.concatenate([[NOTHING], *(graph.action_kind[1:] for graph in graphs)]),
            np.concatenate(gap_of),
        )


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
        self.need = self.actions.engine.residency(self.rows) if len(self.rows) else self.actions.live
        self.peak_at = int(self.need.argmax())
        self.peak = int(self.need[self.peak_at])
        self.on_host = self.actions.engine.on_host(self.rows) if len(self.rows) else 0

    def possible(self, limit: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(G,) which gaps can be emptied by an offload, and by a removal.

        What a recomputation reads is fetched from the host together, and has to fit under the limit beside a kernel.
        """
        free, room = self.taken < 0, limit - self.actions.largest - self.on_host
        return free & ((self.actions.nbytes <= room) | (self.taken != REMOVE).all()), free & (room >= 0)

    def relief(self) -> NDArray[np.int64]:
        """(G,) bytes that would be away at the first kernel of the planned peak."""
        there = self.actions.away_at(self.peak_at) & (self.taken < 0)
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
        """Writes what is observed (jobs_env.py says what) into zeros: ``nodes`` (N, LEFT + 1), ``moment`` (4,)."""
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
