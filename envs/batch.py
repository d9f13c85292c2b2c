"""Batch of walks over several tasks, stepped by compiled code on several threads.

This module allocates the arrays of compiled_walk.py. It also handles the two rare cases that compiled code cannot:
enlarging the buffer of recomputation steps, and checking a plan's host memory when host memory is limited.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs import columns
from envs.batch_env import EnvBatch, Observation
from envs.compiled_walk import step_walks
from envs.graph import OBSERVED
from envs.task import ACTIONS, REWARDS, Task
from simulator.compiled import encoding
from simulator.compiled.engine import cores, side_by_side
from simulator.plan import Plan

INVALID = ("end", "ignore")
SHARE = 8  # minimum walks per thread
_NONE = np.empty(0, np.int64)
_ENGINES = Lock()  # engines are not thread-safe


def _references(arrays: list[Any], i: int) -> int:
    """Returns the reference count of arrays[i], including temporary references made here."""
    return sys.getrefcount(arrays[i])


_UNUSED = _references([np.empty(0)], 0)  # count of an array that only the list references


def one_of(name: str, value: str, choices: Collection[str]) -> str:
    """Returns ``value``; raises ValueError unless it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
    return value


class ArrayPacker:
    """Concatenates arrays into one buffer and stores each keyed array only once."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []
        self.size = 0
        self._offsets: dict[Any, int] = {}

    def put(self, array: NDArray[Any], key: Any = None) -> int:
        """Appends an array and returns its offset; a known ``key`` returns the offset of the stored array."""
        key = len(self.arrays) if key is None else key
        if key not in self._offsets:
            self._offsets[key], self.size = self.size, self.size + array.size
            self.arrays.append(np.ascontiguousarray(array).ravel())
        return self._offsets[key]

    def joined(self, kind: Any) -> NDArray[Any]:
        """Returns all arrays as one, of dtype ``kind``, with a zero at its end."""
        return np.concatenate([*self.arrays, np.zeros(1, kind)])


def _gap_table(task: Task) -> NDArray[Any]:
    table = np.full(len(task.tensor), -1, columns.GAP)
    for name in ("tensor", "after", "before", "wraps", "nbytes", "copy_at", "first_since"):
        table[name] = getattr(task, name)
    table["offload_node"][task.offload_gap] = task.offloads
    table["remove_node"][task.removal_gap] = task.removals
    table["by_after"] = np.lexsort((task.after, task.wraps))
    table["by_before"] = np.argsort(task.before, kind="stable")
    return table


class _WorkArrays:
    """Work arrays of one thread."""

    def __init__(self, ints: int, size: int, gaps: int):
        self.ints = np.zeros(ints, np.int64)
        self.scratch = np.zeros(2 * size)
        self.shares = np.zeros(size, np.float32)
        self.gaps = np.empty(max(gaps, 1), encoding.GAP).view(np.int64)
        self.steps = np.empty(max(256, 2 * gaps), encoding.STEP)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays in the order of the ``work`` argument of ``step_walks``."""
        return self.ints, self.scratch, self.scratch.view(np.int64), self.shares, self.gaps, self.steps.view(np.int64)

    def make_steps(self) -> None:
        """Grows the buffer of recomputation steps to four times its size."""
        self.steps = np.empty(4 * len(self.steps), encoding.STEP)


class Batch(EnvBatch):
    """Batch of walks that are stepped in one call.

    Attributes, for M walks, N nodes and F forms of an action:
        nodes: float32 (M, OBSERVED, N), mask: int8 (M, F N), current and task: int64 (M,). The observation.
        rewards, terminated, truncated (always False), invalid: (M,) of the last step.
        overhead: (M,) of the partial plans; NaN in a dead end.
        feasible: (M,) whether the episode ended with a feasible plan.

    Args:
        tasks: tasks from which episodes are drawn.
        walks: number of walks, M.
        reward, invalid, actions: see memory_env.py.
        autoreset: whether ``step`` resets a walk whose episode has ended.
        threads: maximum number of threads; None: one per core.

    Raises:
        ValueError: if ``reward``, ``invalid`` or ``actions`` is unknown.
    """

    INFOS = "overhead", "iteration_ns", "feasible", "invalid"

    def __init__(
        self,
        tasks: Sequence[Task],
        walks: int,
        reward: str = "paper",
        invalid: str = "end",
        actions: str = "paper",
        autoreset: bool = False,
        threads: int | None = None,
    ):
        one_of("reward", reward, REWARDS)
        one_of("invalid", invalid, INVALID)
        one_of("actions", actions, ACTIONS)
        super().__init__(tasks, walks)
        self.size = max(len(t.graph) for t in tasks)
        self.forms = max(t.forms for t in tasks) if ACTIONS[actions] else 1
        kernels = max(len(t.program.kernels) for t in tasks)
        gaps = max(len(t.graph.gaps) for t in tasks)
        iterations = max(int(encoding.Settings(*t.engine.tables.settings).max_iterations) for t in tasks)
        _, by_segment, _, by_row, states = map(prod, encoding.work_shapes(kernels, 0, gaps, iterations))
        self._tables(by_segment + by_row + states + encoding.RESULTS + 2 + encoding.SETTINGS)
        self.options = np.zeros(1, columns.OPTIONS)
        causal = reward == "causal"
        ignore = invalid == "ignore"
        self.options[0] = self.size, self.forms, causal, ignore, autoreset, len(tasks), iterations, ACTIONS[actions]
        self.walks = np.zeros(walks, columns.WALK)
        self.walks["seed"] = np.random.default_rng().integers(2**63, size=walks)
        self._need, ended_ns = np.zeros((2, walks, kernels + 1), np.int64)
        self.rows = np.zeros((walks, max(gaps, 1), encoding.COLUMNS), np.int64)
        self.nodes = np.zeros((walks, OBSERVED, self.size), np.float32)
        self.mask = np.zeros((walks, self.forms * self.size), np.int8)
        self.current = np.zeros(walks, np.int64)
        self.invalid = np.zeros(walks, np.bool_)
        self.touched = np.zeros((walks, max(len(t.program.tensors) for t in tasks)), np.bool_)
        self._inputs = self.options, self.task_rows, self.gaps, self.ints, self.floats  # in the order of ``step_walks``
        self._state = self.walks, self._need, ended_ns, *np.zeros((3, walks, gaps), np.int64), self.rows, self.touched
        self._best: dict[int, tuple[float, Plan]] = {}  # task index -> overhead and plan
        self._outputs = (
            self.rewards,
            self.terminated,
            self.invalid,
            self.overhead,
            self.feasible,
            self.mask,
            self.nodes,
            self.current,
        )
        self._no_walks = np.zeros(walks, np.bool_)
        self._random_tasks = np.full(walks, -1, np.int64)
        size = max(kernels + 1, self.size, gaps)
        threads = max(1, min(threads or cores(), walks // SHARE))
        pieces = min(4 * threads, walks // SHARE) if threads > 1 else 1
        self._bounds = [(walks * i // pieces, walks * (i + 1) // pieces) for i in range(pieces)]
        self._works = [_WorkArrays(self._work_size, size, gaps) for _ in range(threads)]
        self._copies: list[NDArray[np.float32]] = []

    def _tables(self, shared: int) -> None:
        """Builds the tables of compiled_walk.py. ``shared``: size of the work array's task-independent part."""
        gaps = ArrayPacker()
        ints = ArrayPacker()
        floats = ArrayPacker()
        work = ArrayPacker()
        work.size = shared
        self.task_rows = np.zeros(len(self.tasks), columns.TASK)
        for i, task in enumerate(self.tasks):
            tables = task.engine.tables
            graph = task.graph
            program = id(task.program)
            machine = task.machine
            n = len(task.program.kernels)
            acts = np.flatnonzero(graph.action_gap >= 0)
            nodes = np.zeros((columns.NODE_ROWS, len(graph)), np.int64)
            nodes[columns.NODE_KERNEL] = graph.kernel
            nodes[columns.NODE_KIND] = graph.action_kind
            nodes[columns.NODE_GAP] = graph.action_gap
            nodes[columns.ACTIONS, : len(acts)] = acts
            nodes[columns.ACTION_GAPS, : len(acts)] = graph.action_gap[acts]
            graph_at = ints.put(tables.graph, ("graph", program))
            by_kernel, _, by_tensor, *_ = map(prod, encoding.work_shapes(n, len(task.program.tensors), 0, 0))
            self.task_rows[i] = (
                n,
                len(task.program.tensors),
                len(task.tensor),
                len(graph),
                len(acts),
                task.limit,
                task.ideal_ns,
                machine.host_bytes,
                task.host_is_short,
                ints.put(tables.kernels, ("kernels", program, id(machine))),
                ints.put(tables.tensors, ("tensors", program, id(machine))),
                graph_at,
                graph_at + tables.graph.size,
                ints.put(tables.settings),
                ints.put(task.next_opening),
                gaps.put(_gap_table(task)),
                ints.put(nodes),
                ints.put(np.maximum(0, np.searchsorted(graph.kernel, np.arange(n + 1)) - 1)),
                floats.put(graph.features.T.astype(np.float64)),
                floats.put(task.start_ns[graph.kernel].astype(np.float64)),
                work.put(np.empty(by_kernel + by_tensor, np.int8), program),
            )
        self.gaps = gaps.joined(columns.GAP)
        self.ints = ints.joined(np.int64)
        self.floats = floats.joined(np.float64)
        self._work_size = work.size

    def seed(self, i: int, seed: int) -> None:
        """Seeds the task sampling of walk i."""
        self.walks["seed"][i] = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1)

    def reset(self, mask: NDArray[np.bool_] | None = None, task: int | None = None) -> None:
        """Starts new episodes in all walks or in those of ``mask``, on a given or a drawn task."""
        resets = ~self._no_walks if mask is None else mask
        tasks = self._random_tasks if task is None else np.full(self.count, range(len(self.tasks))[task], np.int64)
        self._run(_NONE, resets, tasks)

    def step(self, actions: NDArray[np.int64]) -> None:
        """Steps every walk. ``actions``: (M,) node + ``size`` * form."""
        if actions.shape != (self.count,):
            raise ValueError(f"actions: expected {self.count}, got shape {actions.shape}")
        self._run(np.ascontiguousarray(actions, np.int64), self._no_walks, self._random_tasks)

    def _run(self, actions: NDArray[np.int64], resets: NDArray[np.bool_], tasks: NDArray[np.int64]) -> None:
        def run(begin: int, end: int, work: _WorkArrays) -> None:
            resume = False
            while step_walks(
                begin, end, resume, resets, actions, tasks, self._inputs, self._state, work.arrays(), self._outputs
            ):
                self._settle(begin, end, work)
                resume = True

        self._run_pieces(run)

    def _run_pieces(self, run: Callable[[int, int, _WorkArrays], None]) -> None:
        """Calls ``run`` for each piece of the walks; idle threads take the next piece."""
        todo = iter(self._bounds)

        def run_pieces(work: _WorkArrays) -> None:
            for begin, end in todo:
                run(begin, end, work)

        side_by_side([partial(run_pieces, work) for work in self._works])

    def _settle(self, begin: int, end: int, work: _WorkArrays) -> None:
        """Resolves the pending requests of walks ``begin`` to ``end`` - 1."""
        pending = self.walks["pending"][begin:end]
        if (pending == columns.WANTS_STEPS).any():
            work.make_steps()
        for i in (begin + np.flatnonzero(pending == columns.WANTS_HOST)).tolist():
            task = self.task(i)
            with _ENGINES:
                on_host = task.engine.on_host(self.plan_rows(i))
            self.walks["host_left"][i] = task.machine.host_bytes - on_host

    def task(self, i: int) -> Task:
        """Returns the task of walk i."""
        task: Task = self.tasks[int(self.walks["task"][i])]
        return task

    def plan_rows(self, i: int) -> NDArray[np.int64]:
        """Returns the partial plan of walk i as a view (simulator.compiled.engine.rows_of)."""
        rows: NDArray[np.int64] = self.rows[i, : self.walks["count"][i]]
        return rows

    def need(self, i: int) -> NDArray[np.int64]:
        """Returns the planned residency of walk i in bytes per kernel, as a view."""
        need: NDArray[np.int64] = self._need[i, : len(self.task(i).live_bytes)]
        return need

    def plan(self, i: int, planner: str = "") -> Plan:
        """Returns the partial plan of walk i."""
        task = self.task(i)
        decisions = encoding.decisions_of(self.plan_rows(i))
        return Plan.of(task.program, decisions, planner, task.limit, task.machine.name)

    def ended(self) -> NDArray[Any]:
        """Returns whether each episode has ended, (M,), as a view."""
        has_ended: NDArray[Any] = self.walks["over"]
        return has_ended

    def spaces(self) -> tuple[spaces.Discrete, spaces.Dict]:
        """Returns the action and observation spaces of one walk (memory_env.py)."""
        return spaces.Discrete(self.mask.shape[1]), spaces.Dict(
            {
                "nodes": spaces.Box(-np.inf, np.inf, (self.size, OBSERVED), np.float32),
                "action_mask": spaces.Box(0, 1, (self.mask.shape[1],), np.int8),
                "current": spaces.Discrete(self.size),
                "program": spaces.Discrete(len(self.tasks)),
            }
        )

    def views(self) -> Observation:
        """Returns the observations of all walks as views."""
        return {
            "nodes": self.nodes.transpose(0, 2, 1),
            "action_mask": self.mask,
            "current": self.current,
            "program": self.walks["task"],
        }

    @property
    def iteration_ns(self) -> NDArray[np.int64]:
        """Simulated iteration times of the partial plans, (M,), as a view."""
        times: NDArray[np.int64] = self.walks["iteration"]
        return times

    def copies(self, views: Observation) -> Observation:
        """Returns copies of ``views``, which must be views of this batch.

        The copy of ``nodes`` reuses an earlier copy that is no longer referenced, because allocation costs as much as
        copying.
        """
        spare = [i for i in range(len(self._copies)) if _references(self._copies, i) == _UNUSED]
        if spare:
            nodes = self._copies[spare[0]]
        else:
            nodes = np.empty_like(self.nodes)
            self._copies = [*self._copies[-2:], nodes]

        def run(begin: int, end: int, work: _WorkArrays) -> None:
            np.copyto(nodes[begin:end], self.nodes[begin:end])

        self._run_pieces(run)
        copies = {key: view.copy() for key, view in views.items() if key != "nodes"}
        return {**copies, "nodes": nodes.transpose(0, 2, 1)}

    def advance(self, actions: NDArray[np.int64], has_ended: NDArray[np.bool_]) -> None:
        """Steps every walk. With ``autoreset``, walks whose episode has ended start a new one."""
        self.step(actions)

    def final_plan(self, i: int) -> Plan | None:
        """Returns the plan of walk i if its last step ended the episode with a feasible plan, else None."""
        if not (self.terminated[i] and self.feasible[i]):
            return None
        plan = self.plan(i)
        task = int(self.walks["task"][i])
        overhead = float(self.overhead[i])
        if task not in self._best or overhead < self._best[task][0]:
            self._best[task] = overhead, plan
        return plan

    @property
    def best_plans(self) -> tuple[Plan | None, ...]:
        """Fastest plan with which an episode of each task has ended (``final_plan``), or None."""
        return tuple(self._best[t][1] if t in self._best else None for t in range(len(self.tasks)))
