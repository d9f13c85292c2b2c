"""What an episode over several jobs is about: a scenario, the graph of its jobs, and what slowdown means.

tests/oracle/jobs_walk.py states the rules of an episode to be read; compiled_jobs.py has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from envs.graph import NOTHING, OFFLOAD, REMOVE, SIZE, STATIC, OperationGraph, build_graph
from simulator import Engine, Job, JobsTimeline, Machine, Plan, Program
from simulator.compiled.encoding import NEVER
from simulator.job import JobTimeline, Sharing
from simulator.jobs.engine import world_of

# Columns of the node features after the graph's; and of what is known of the moment.
VALID, RELIEF, LOAD, SHARE, LEFT = range(STATIC, STATIC + 5)
OVER, FREE, JOBS, TIME_LEFT = range(4)
HOST_BYTES = 2**60  # what plans hold there is reserved as a job begins, and would be known too early


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
        accessed = ((sum(program.tensors[t].nbytes for t in k.accesses) + k.workspace) for k in program.kernels)
        self.largest = max(accessed)  # kernel, with all that it accesses


class JobsTask:
    """A scenario, and the graph of all its jobs; shared by any number of walks (one thread).

    Attributes:
        graph: the jobs' graphs, which have node 0 in common. Sizes are over the limit, times over the ideal iteration
            of the node's own job; kernels are those of its program, gaps are numbered through.
        job: (N,) the job of each node; -1: node 0.
        alone_ns: of each job, ``Scenario.alone_ns``.
        machine: the scenario's, with a host that is large enough.
        world: what ``simulate_jobs`` would begin with.

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
        # Two places for the plans of each job: of the one that it runs under, and of the one that it changes to.
        plain = [replace(job, plan=Plan(), switches=((1, Plan()),), within=False) for job in scenario.jobs]
        self.world = world_of(plain, self.machine, scenario.limit, 0, scenario.sharing)
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
