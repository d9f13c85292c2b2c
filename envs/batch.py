"""Batch of walks over several tasks, stepped by compiled code on several threads.

This module allocates the arrays of compiled_walk.py. It also handles the two rare cases that compiled code cannot:
enlarging the buffer of recomputation steps, and checking a plan's host memory when host memory is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs import columns
from envs.batch_env import EnvBatch, Observation, SpareArrays
from envs.columns import BatchTables, Outputs, WalkArrays, WorkArrays
from envs.compiled_walk import step_walks
from envs.graph import OBSERVED, SIGNED, observed_static
from envs.options import one_of
from envs.render import Frame, walk_frame
from envs.task import ACTIONS, REWARDS, Task
from simulator.compiled import encoding
from simulator.compiled.engine import cores, side_by_side
from simulator.plan import Plan

INVALID = ("end", "ignore")
MIN_WALKS = 8  # per thread


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


class _Thread:
    """Work arrays of one thread."""

    def __init__(self, ints: int, size: int, gaps: int):
        product = np.zeros(2 * size)
        self.arrays = WorkArrays(
            ints=np.zeros(ints, np.int64),
            product=product,
            bits=product.view(np.int64),
            shares=np.zeros(size, np.float32),
            gaps=np.empty(max(gaps, 1), encoding.GAP).view(np.int64),
            steps=np.empty(max(256, 2 * gaps), encoding.STEP).view(np.int64),
        )

    def make_steps(self, count: int) -> None:
        """Allocates the buffer of ``count`` recomputation steps."""
        self.arrays = self.arrays._replace(steps=np.empty(count, encoding.STEP).view(np.int64))


class Batch(EnvBatch):
    """Batch of walks that are stepped in one call.

    Attributes, for M walks, N nodes and F forms of an action:
        nodes: float32 (M, OBSERVED, N), mask: int8 (M, F N), current and task: int64 (M,). The observation.
        rewards, terminated, truncated (always False), invalid: (M,) of the last step.
        overhead: (M,) of the partial plans; NaN in a dead end and after an invalid action that ends the episode.
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

    KIND = "GpuMemory"
    INFOS = "overhead", "iteration_ns", "feasible", "invalid"
    _engine_lock = Lock()  # of all batches, which may share tasks: engines are not thread-safe

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
        self.options = columns.record(
            columns.OPTIONS,
            shown_nodes=self.size,
            forms=self.forms,
            causal=reward == "causal",
            ignore=invalid == "ignore",
            autoreset=autoreset,
            tasks=len(tasks),
            iterations=iterations,
            **dict.fromkeys(ACTIONS[actions], True),
        )
        self.walks = np.zeros(walks, columns.WALK)
        self.walks["seed"] = np.random.default_rng().integers(2**63, size=walks)
        self._need, ended_ns = np.zeros((2, walks, kernels + 1), np.int64)
        out_end, queue, gap_actions = np.zeros((3, walks, gaps), np.int64)
        self.rows = np.zeros((walks, max(gaps, 1), encoding.COLUMNS), np.int64)
        self.nodes = np.zeros((walks, OBSERVED, self.size), np.float32)
        self.mask = np.zeros((walks, self.forms * self.size), np.int8)
        self.current = np.zeros(walks, np.int64)
        self.invalid = np.zeros(walks, np.bool_)
        state = WalkArrays(
            walks=self.walks,
            need=self._need,
            ended_ns=ended_ns,
            out_end=out_end,
            queue=queue,
            gap_actions=gap_actions,
            rows=self.rows,
            touched=np.zeros((walks, max(len(t.program.tensors) for t in tasks)), np.bool_),
        )
        outputs = Outputs(*(getattr(self, name) for name in Outputs._fields))
        self._best: dict[int, tuple[float, Plan]] = {}  # task index -> overhead and plan
        self._no_walks = np.zeros(walks, np.bool_)
        self._random_tasks = np.full(walks, -1, np.int64)
        tables, n_work = self._make_tables(by_segment + by_row + states + encoding.RESULTS + 2 + encoding.SETTINGS)
        self._tables, self._state, self._outputs = map(tuple, (tables, state, outputs))
        threads = max(1, min(threads or cores(), walks // MIN_WALKS))
        # More pieces than threads, because the walks of a piece may be slower than those of another.
        pieces = min(4 * threads, walks // MIN_WALKS) if threads > 1 else 1
        self._bounds = [(walks * i // pieces, walks * (i + 1) // pieces) for i in range(pieces)]
        self._threads = [_Thread(n_work, max(kernels + 1, self.size, gaps), gaps) for _ in range(threads)]
        self._spare = SpareArrays(self.nodes)  # for copies of ``nodes``

    def _make_tables(self, shared: int) -> tuple[BatchTables, int]:
        """Returns the tables, and the size of a thread's work array; ``shared``: of its task-independent part."""
        gaps = ArrayPacker()
        ints = ArrayPacker()
        floats = ArrayPacker()
        work = ArrayPacker()
        work.size = shared
        rows = []
        for task in self.tasks:
            encoded = task.engine.tables
            graph = task.graph
            program = id(task.program)
            machine = task.machine
            n = len(task.program.kernels)
            action_nodes = np.flatnonzero(graph.action_gap >= 0)
            by_kernel, _, by_tensor, *_ = map(prod, encoding.work_shapes(n, len(task.program.tensors), 0, 0))
            graph_at = ints.put(encoded.graph, ("graph", program))
            rows.append(
                columns.record(
                    columns.TASK,
                    kernels=n,
                    tensors=len(task.program.tensors),
                    gaps=len(task.tensor),
                    nodes=len(graph),
                    n_actions=len(action_nodes),
                    limit_bytes=task.limit,
                    ideal_ns=task.ideal_ns,
                    host_bytes=machine.host_bytes,
                    host_is_short=task.host_is_short,
                    kernels_at=ints.put(encoded.kernels, ("kernels", program, id(machine))),
                    tensors_at=ints.put(encoded.tensors, ("tensors", program, id(machine))),
                    graph_at=graph_at,
                    graph_end=graph_at + encoded.graph.size,
                    settings_at=ints.put(encoded.settings),
                    opening_at=ints.put(task.next_opening),
                    gaps_at=gaps.put(_gap_table(task)),
                    node_kernel_at=ints.put(graph.kernel),
                    node_kind_at=ints.put(graph.action_kind),
                    node_gap_at=ints.put(graph.action_gap),
                    action_nodes_at=ints.put(action_nodes),
                    action_gaps_at=ints.put(graph.action_gap[action_nodes]),
                    node_at=ints.put(np.maximum(0, np.searchsorted(graph.kernel, np.arange(n + 1)) - 1)),
                    static_at=floats.put(observed_static(graph).T),
                    times_at=floats.put(task.start_ns[graph.kernel].astype(np.float64)),
                    work_at=work.put(np.empty(by_kernel + by_tensor, np.int8), program),
                )
            )
        tables = BatchTables(
            options=self.options,
            tasks=np.concatenate(rows),
            gaps=gaps.joined(columns.GAP),
            ints=ints.joined(np.int64),
            floats=floats.joined(np.float64),
        )
        return tables, work.size

    def seed(self, i: int, seed: int) -> None:
        """Seeds the task sampling of walk i."""
        self.walks["seed"][i] = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1)

    def reset(self, mask: NDArray[np.bool_] | None = None, task: int | None = None) -> None:
        """Starts new episodes in all walks or in those of ``mask``, on a given or a drawn task."""
        resets = ~self._no_walks if mask is None else mask
        tasks = self._random_tasks if task is None else np.full(self.count, range(len(self.tasks))[task], np.int64)
        self._run(np.empty(0, np.int64), resets, tasks)

    def step(self, actions: NDArray[np.int64]) -> None:
        """Steps every walk.

        Args:
            actions: int64 (M,), node + ``size`` * form of each walk.

        Raises:
            ValueError: ``actions`` has another shape.
        """
        if actions.shape != (self.count,):
            raise ValueError(f"actions: expected {self.count}, got shape {actions.shape}")
        self._run(np.ascontiguousarray(actions, np.int64), self._no_walks, self._random_tasks)

    def _run(self, actions: NDArray[np.int64], resets: NDArray[np.bool_], tasks: NDArray[np.int64]) -> None:
        def run(begin: int, end: int, thread: _Thread) -> None:
            resume = False
            arrays = tuple(thread.arrays)
            while step_walks(
                begin, end, resume, resets, actions, tasks, self._tables, self._state, arrays, self._outputs
            ):
                self._settle(begin, end, thread)
                resume = True
                arrays = tuple(thread.arrays)

        self._run_pieces(run)

    def _run_pieces(self, run: Callable[[int, int, _Thread], None]) -> None:
        """Calls ``run`` for each piece of the walks; idle threads take the next piece."""
        todo = iter(self._bounds)

        def run_pieces(thread: _Thread) -> None:
            for begin, end in todo:
                run(begin, end, thread)

        side_by_side([partial(run_pieces, thread) for thread in self._threads])

    def _settle(self, begin: int, end: int, thread: _Thread) -> None:
        """Resolves the pending requests of walks ``begin`` to ``end`` - 1."""
        pending = self.walks["pending"][begin:end]
        if (pending == columns.Pending.STEPS).any():
            thread.make_steps(4 * len(thread.arrays.steps.view(encoding.STEP)))
        for i in (begin + np.flatnonzero(pending == columns.Pending.HOST_BYTES)).tolist():
            task = self.task(i)
            with self._engine_lock:
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
        low = np.zeros((self.size, OBSERVED), np.float32)
        low[:, SIGNED] = -1.0
        return spaces.Discrete(self.mask.shape[1]), spaces.Dict(
            {
                "nodes": spaces.Box(low, np.ones_like(low)),
                "action_mask": spaces.Box(0, 1, (self.mask.shape[1],), np.int8),
                "current": spaces.Discrete(self.size),
                "program": spaces.Discrete(len(self.tasks)),
            }
        )

    def frame(self, i: int) -> Frame:
        """Returns what a rendering of walk i shows."""
        return walk_frame(self, i)

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

        The copy of ``nodes`` reuses the memory of an earlier one of which no view is left, because allocation costs as
        much as copying.
        """
        nodes = self._spare.lend()

        def run(begin: int, end: int, thread: _Thread) -> None:
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
