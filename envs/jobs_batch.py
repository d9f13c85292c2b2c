"""Many walks over several jobs: the arrays of compiled_jobs.py, and the threads that step them.

What compiled code does not settle is settled here: more room. That is rare.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs import jobs_columns as columns
from envs.batch import INVALID, Parts, Pieces, one_of
from envs.compiled_jobs import act, go_on, plan
from envs.graph import OFFLOAD, REMOVE
from envs.jobs_columns import Arrays, Scratch, Shown, Tables
from envs.jobs_task import LEFT, TIME_LEFT, JobActions, JobsTask
from simulator import Swap
from simulator.compiled import encoding
from simulator.jobs import tables
from simulator.jobs.lowering import table_of

_NONE = np.empty(0, np.int64)


def _gap_table(actions: JobActions) -> NDArray[np.int64]:
    table = np.full((columns.GAP_ROWS, len(actions.nbytes)), -1, np.int64)
    table[columns.TENSOR], table[columns.AFTER], table[columns.BEFORE] = actions.tensor, actions.after, actions.before
    table[columns.NBYTES] = actions.nbytes
    for row, kind in ((columns.OFFLOAD_NODE, OFFLOAD), (columns.REMOVE_NODE, REMOVE)):
        nodes = actions.nodes[kind]
        table[row, actions.graph.action_gap[nodes]] = nodes - 1
    return table


class JobsBatch(Pieces):
    """Walks over several jobs, stepped in one call.

    Attributes, for M walks and N nodes:
        nodes: float32 (M, LEFT + 1, N); moment: float32 (M, 4); mask: int8 (M, N); job: int64 (M, N): what is observed.
        rewards (M,), terminated, invalid: of the last step. slowdown: float64 (M,), so far.

    Args:
        tasks: what walks are begun with.
        invalid: "end" or "ignore".
        threads: at most; None: one a core.

    Raises:
        ValueError: ``invalid`` is another.
    """

    def __init__(self, tasks: Sequence[JobsTask], walks: int, invalid: str = "end", threads: int | None = None):
        one_of("invalid", invalid, INVALID)
        self.tasks = tuple(tasks)
        self.size = max(len(task.graph) for task in tasks)
        actions = {id(one): one for task in tasks for one in task.actions}.values()
        options = self._options = np.zeros(columns.OPTIONS, np.int64)
        options[columns.O_JOBS] = jobs = max(len(task.actions) for task in tasks)
        options[columns.O_TENSORS] = max(len(one.program.tensors) for one in actions)
        options[columns.O_ROWS] = gaps = max(1, *(len(one.nbytes) for one in actions))
        options[columns.O_KERNELS] = kernels = max(len(one.program.kernels) for one in actions)
        options[columns.O_IGNORE] = invalid == "ignore"
        for one in actions:  # of all gaps, if only that is done
            table = table_of(one.engine, encoding.rows_of([Swap(*gap) for gap in one.graph.gaps]))
            options[columns.O_PLACE] = max(options[columns.O_PLACE], len(table.values))
            options[columns.O_BLOCKS] = max(options[columns.O_BLOCKS], int(table.record["n_blocks"]))
        self._tables = self._joined()
        self.walks = np.zeros((walks, columns.WALK), np.int64)
        self._drafts = np.zeros((walks, jobs, columns.DRAFT), np.int64)
        self._need = np.zeros((walks, jobs, kernels + 1), np.int64)
        self.taken = np.full((walks, 3, jobs, gaps), -1, np.int8)
        self._plans = np.zeros((walks, 2 * jobs), tables.PLAN)
        self._jobs = np.zeros((walks, jobs), tables.JOB)
        self._state = np.zeros((walks, self._state_size()), np.int64)
        self._places = np.empty((walks, 2 * jobs * int(options[columns.O_PLACE])), np.int64)
        self.nodes = np.zeros((walks, LEFT + 1, self.size), np.float32)
        self.moment = np.zeros((walks, TIME_LEFT + 1), np.float32)
        self.mask = np.zeros((walks, self.size), np.int8)
        self.job = np.full((walks, self.size), -1, np.int64)
        self.rewards, self.slowdown = np.zeros((2, walks))
        self.terminated, self.invalid = np.zeros((2, walks), np.bool_)
        self._shown = Shown(
            self.rewards, self.terminated, self.invalid, self.slowdown, self.mask, self.nodes, self.moment, self.job
        )
        super().__init__(walks, threads, self._work)
        self._bundle()

    def _joined(self) -> Tables:
        """What is known of all tasks. Sets what a thread needs for the programs."""
        ints, static, work = Parts(), Parts(), 0
        of_tasks = np.zeros((len(self.tasks), columns.SCENARIO), np.int64)
        parts: list[NDArray[np.int64]] = []
        work_at: dict[int, int] = {}
        for t, task in zip(of_tasks, self.tasks, strict=True):
            scenario, world = task.scenario, task.world
            t[[columns.N_JOBS, columns.N_NODES, columns.LIMIT]] = len(task.actions), len(task.graph), scenario.limit
            t[columns.UNTIL] = encoding.NEVER if scenario.until_ns is None else scenario.until_ns
            t[columns.PART_AT] = len(parts)
            t[columns.TIMES_AT] = ints.put(world.times)
            t[columns.TIMES_END] = ints.size
            t[columns.ARRIVALS_AT] = ints.put(world.arrivals)
            t[columns.SETTINGS_AT] = ints.put(world.settings)
            t[columns.SETTINGS_END] = ints.size
            t[columns.STATIC_AT] = static.put(task.graph.features.T.astype(np.float32))
            for j, one in enumerate(task.actions):
                key, tables_of, graph = id(one), one.engine.tables, one.graph
                n, tensors = len(one.program.kernels), len(one.program.tensors)
                p = np.zeros(columns.PART, np.int64)
                p[[columns.KERNELS, columns.TENSORS, columns.GAPS]] = n, tensors, len(one.nbytes)
                p[[columns.NODES, columns.FIRST, columns.LARGEST]] = len(graph) - 1, task.first[j], one.largest
                p[columns.REMOVABLE] = len(one.nodes[REMOVE]) > 0
                p[columns.KERNELS_AT] = ints.put(tables_of.kernels, ("kernels", key))
                p[columns.TENSORS_AT] = ints.put(tables_of.tensors, ("tensors", key))
                p[columns.GRAPH_AT] = ints.put(tables_of.graph, ("graph", key))
                p[columns.GRAPH_END] = p[columns.GRAPH_AT] + tables_of.graph.size
                p[columns.GAPS_AT] = ints.put(_gap_table(one), ("gaps", key))
                p[columns.NODES_AT] = ints.put(
                    np.array([graph.kernel[1:], graph.action_kind[1:], graph.action_gap[1:]]), ("nodes", key)
                )
                if key not in work_at:
                    work_at[key] = work
                    by_kernel, _, by_tensor, *_ = map(prod, encoding.work_shapes(n, tensors, 0, 0))
                    work += by_kernel + by_tensor
                p[columns.WORK_AT] = work_at[key]
                p[[columns.ALONE_NS, columns.IDEAL_NS]] = task.alone_ns[j], one.program.ideal_ns
                p[[columns.ARRIVES, columns.LEAVES]] = scenario.jobs[j].arrives_ns, scenario.leaves_ns(j)
                parts.append(p)
        self._work_ints = work
        no_log = np.empty((0, tables.LOG), np.int64)
        return Tables(self._options, of_tasks, np.array(parts), ints.joined(np.int64), static.joined(np.float32),
                      *self._start(), no_log)  # fmt: skip

    def _start(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of each task the records of the jobs, who have not come yet, and the state of the clock."""
        records = np.zeros((len(self.tasks), int(self._options[columns.O_JOBS])), tables.JOB)
        state = np.zeros((len(self.tasks), self._state_size()), np.int64)
        for record, row, task in zip(records, state, self.tasks, strict=True):
            now, copies, by_tensor, *_ = self._state_parts(row)
            now[:], copies[:], by_tensor[:] = task.world.now, task.world.copy, -1
            record[: len(task.actions)] = task.world.jobs
            record["arrives"] = record["leaves"] = encoding.NEVER
            record["reserved"] = 0  # the host is large enough
        return records.view(np.int64), state

    def _state_shapes(self) -> list[tuple[int, ...]]:
        """Of the parts of ``state``, in order: compiled_jobs.py, ``_world``."""
        jobs, tensors, rows, blocks, kernels = self._options[: columns.O_PLACE].tolist()
        return [
            (tables.STATE,), (2, tables.COPY), (jobs, tables.BY_TENSOR, tensors), (jobs, tables.BY_ROW, rows),
            (jobs, tables.BY_BLOCK, blocks), (jobs, kernels), (jobs, rows + blocks), (jobs, kernels + 1),
            (jobs * blocks + 1, tables.QUEUE),
        ]  # fmt: skip

    def _state_parts(self, state: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Views of the parts of a state, or of many."""
        shapes = self._state_shapes()
        ends = np.cumsum([prod(shape) for shape in shapes])[:-1]
        parts = np.split(state, ends, axis=-1)
        return [part.reshape(*state.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _state_size(self) -> int:
        return sum(map(prod, self._state_shapes()))

    def _work(self) -> Scratch:
        """What a thread works on."""
        jobs, _, rows, _, kernels = self._options[: columns.O_PLACE].tolist()
        records = np.zeros(jobs, tables.JOB)
        return Scratch(
            np.zeros(self._work_ints, np.int64), np.zeros((rows, encoding.COLUMNS), np.int64),
            np.zeros((encoding.BY_ROW, rows), np.int64),
            np.zeros((max(256, 2 * rows), encoding.STEP_COLUMNS), np.int64),
            np.empty(2 * int(self._options[columns.O_PLACE]), np.int64), np.zeros(kernels, np.float32), records,
            records.view(np.int64), np.zeros(self._state_size(), np.int64),
        )  # fmt: skip

    def _bundle(self) -> None:
        self._arrays = Arrays(
            self.walks, self._drafts, self._need, self.taken, self._plans, self._places, self._jobs,
            self._jobs.view(np.int64), self._state,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Without views, of which a copy would be no view."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_works", "_arrays")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._works = [self._work() for _ in range(self._threads)]
        self._bundle()

    def drafts(self, i: int) -> list[tuple[int, NDArray[np.int8], int]]:
        """Of the jobs of walk i that are there: number, (G,) kind of the action taken of each gap or -1, and the limit
        that the plan would have."""
        task, drafts = self.task(i), self._drafts[i]
        there = np.flatnonzero(drafts[: len(task.actions), columns.THERE]).tolist()
        spare, out = task.scenario.limit - int(self.walks[i, columns.PEAKS]), []
        for j in there:
            taken = self.taken[i, columns.NEW, j, : len(task.actions[j].nbytes)].copy()
            out.append((j, taken, int(drafts[j, columns.PEAK]) + spare // len(there) if spare >= 0 else 0))
        return out

    def task(self, i: int) -> JobsTask:
        """The task of walk i."""
        return self.tasks[int(self.walks[i, columns.TASK])]

    def reset(self, which: NDArray[np.bool_], tasks: NDArray[np.int64]) -> None:
        """Begins some walks anew, each with the task that is given for it."""
        self.walks[which, columns.TASK] = tasks[which]
        self._run(_NONE, which)

    def step(self, actions: NDArray[np.int64], which: NDArray[np.bool_], tasks: NDArray[np.int64]) -> None:
        """Takes the action of a node in every walk, but for those that begin anew."""
        if actions.shape != (self.count,):
            raise ValueError(f"actions: expected {self.count}, got shape {actions.shape}")
        self.walks[which, columns.TASK] = tasks[which]
        self._run(np.ascontiguousarray(actions, np.int64), which)

    def _run(self, actions: NDArray[np.int64], resets: NDArray[np.bool_]) -> None:
        resume = False
        while True:
            pending: list[int] = []

            def run(begin: int, end: int, work: Scratch, resume: bool = resume, pending: list[int] = pending) -> None:
                given = self._tables, self._arrays, work
                if act(begin, end, resume, resets, actions, *given, self._shown):
                    waits = plan(begin, end, actions, *given)
                    if waits + go_on(begin, end, *given, self._shown):
                        pending.append(begin)

            self._by_pieces(run)
            if not pending:
                return
            self._make_room()
            resume = True

    def _make_room(self) -> None:
        """What walks wait for."""
        waits = self.walks[:, columns.PENDING]
        most = {int(w): int(self.walks[waits == w, columns.WANTED].max()) for w in np.unique(waits)}
        if columns.STUCK in most or columns.DOES_NOT_FIT in most:
            raise AssertionError("jobs cannot go on: the mask promised that this cannot be")
        options = self._options
        if columns.WANTS_PLACE in most:
            places = self._places.reshape(-1, int(options[columns.O_PLACE]))
            room = most[columns.WANTS_PLACE] * 5 // 4
            wider = np.empty((len(places), room), np.int64)
            wider[:, : places.shape[1]] = places
            self._places, options[columns.O_PLACE] = wider.reshape(self.count, -1), room
            self._plans["base"] = np.arange(self._plans.shape[1]) * room
        if columns.WANTS_BLOCKS in most:
            old = self._state_parts(self._state)
            options[columns.O_BLOCKS] = most[columns.WANTS_BLOCKS] * 5 // 4
            self._state = np.zeros((self.count, self._state_size()), np.int64)
            for part, new in zip(old, self._state_parts(self._state), strict=True):
                new[tuple(map(slice, part.shape))] = part
            records, state = self._start()
            self._tables = self._tables._replace(records=records, state=state)
        steps = 4 if columns.WANTS_STEPS in most else 1
        self._works = [
            self._work()._replace(
                steps=np.zeros((steps * len(work.steps), encoding.STEP_COLUMNS), np.int64),
                table=np.empty(max(len(work.table), 2 * most.get(columns.WANTS_TABLE, 0)), np.int64),
            )
            for work in self._works
        ]
        self._bundle()
