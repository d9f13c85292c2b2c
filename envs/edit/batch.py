"""Batch of plan-editing walkers over several tasks, used by both environments of env.py."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.batch_env import EnvBatch
from envs.edit import walkers as compiled
from envs.edit.columns import BIN, BOUND, GAP, MAX_CHANGES, N_CHANGES, NEVER_TRIED, PLAN, by_name, n_columns
from envs.edit.task import EditTask, Start
from envs.edit.walkers import Accept
from envs.options import one_of
from simulator.compiled.encoding import LOG, NEVER, decisions_of
from simulator.moves.gap_graph import BINS
from simulator.plan import Plan


class EditBatch(EnvBatch):
    """Vectorized edit environment: W walkers, each of which improves a plan of one task.

    Attributes, for W walkers, G gaps of the largest task, M candidate edits and A actions:
        gaps: observation of the gaps, float32 (W, G, columns of columns.GAP).
        static: static features of the gaps, float32 (W, G, F).
        bins: observation of the bins of time, float32 (W, BINS, 12 static columns and those of columns.BIN).
        bin_state: view of the columns of columns.BIN.
        plan: observation of the plan, float32 (W, columns of columns.PLAN).
        edits: candidate edits, int32 (W, M, MAX_CHANGES), of gap * N_CHANGES + change, padded with -1.
        mask: valid actions, int8 (W, A).
        rewards, overhead, best_overhead, effect_ns, temperature: float64 (W,).
        accepted, feasible, terminated, truncated: bool (W,).
        invalid: bool (W,), whether the last action was masked; it is counted as a rejected trial.
        task, calls: index of the task, and simulator calls of the episode, int64 (W,).

    Args:
        tasks: tasks from which episodes are sampled.
        count: number of walkers (W).
        neighbors: number of candidate edits (M).
        edits: "neighbors" (an action selects a candidate edit) or "gap" (an action selects a gap and a change).
        budget: simulator calls per episode; a pair is a range, sampled log-uniformly; None means twice the gaps.
        accept, hot, cold, reward, shaping: see env.py.
        reference: points of overhead per task that reward="log" subtracts before the logarithm; None means 0.
        max_changes: changes of a candidate edit; a longer one is replaced.
    """

    KIND = "GpuMemoryEdit"
    INFOS = "overhead", "best_overhead", "effect_ns", "accepted", "feasible", "invalid", "calls", "temperature"

    def __init__(
        self,
        tasks: Sequence[EditTask],
        count: int,
        neighbors: int = 64,
        edits: str = "neighbors",
        budget: int | tuple[int, int] | None = None,
        accept: str = "metropolis",
        hot: float = 1e-3,
        cold: float = 3e-5,
        reward: str = "best",
        shaping: float = 0.0,
        reference: Sequence[float] | None = None,
        max_changes: int = MAX_CHANGES,
    ) -> None:
        one_of("edits", edits, ("neighbors", "gap"))
        one_of("accept", accept, [rule.name.lower() for rule in Accept])
        one_of("reward", reward, ("best", "log"))
        min_budget = budget[0] if isinstance(budget, tuple) else budget
        if neighbors < 1 or (min_budget is not None and min_budget < 1):
            raise ValueError(f"neighbors, budget: expected at least 1, got {neighbors} and {budget}")
        if not 0 < cold <= hot:
            raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")
        super().__init__(tasks, count)
        self.by_gap = edits == "gap"
        self.budget = budget
        self.accept = int(Accept[accept.upper()])
        self.hot = hot
        self.cold = cold
        self.logarithmic = reward == "log"
        self.shaping = shaping
        self.reference = [0.0] * len(self.tasks) if reference is None else list(reference)
        max_gaps = max(len(task.graph) for task in self.tasks)
        slots = 1 if self.by_gap else neighbors
        self.actions = N_CHANGES * max_gaps if self.by_gap else neighbors
        shapes = [(count, len(t.graph), len(t.program.kernels), slots, max_changes) for t in self.tasks]
        self._walkers = [compiled.make_walkers(*shape) for shape in shapes]
        self._moves = [task.moves.fork(0) for task in self.tasks]
        self.gaps = np.zeros((count, max_gaps, n_columns(GAP)), np.float32)
        self.static = np.zeros((count, max_gaps, self.tasks[0].static.shape[1]), np.float32)
        static_bins = self.tasks[0].static_bins.shape[1]
        self.bins = np.zeros((count, BINS, static_bins + n_columns(BIN)), np.float32)
        self.plan = np.zeros((count, n_columns(PLAN)), np.float32)
        self.edits = np.full((count, slots, max_changes), -1, np.int32)
        self.mask = np.zeros((count, self.actions), np.int8)
        self.task = np.zeros(count, np.int64)
        self.best_overhead, self.effect_ns, self.temperature = np.zeros((3, count))
        self.accepted, self.invalid = np.zeros((2, count), np.bool_)
        self.calls = np.zeros(count, np.int64)
        self.has_ended = np.ones(count, np.bool_)
        self._state = np.zeros(count, compiled.STATE)  # copies of the walkers' current records
        self._random = [np.random.default_rng() for _ in range(count)]
        self._logs = [np.empty(4096, LOG) for _ in self.tasks]
        self._ages = np.log1p(np.arange(2**14))  # larger ages are observed as the last
        self._ideal = np.array([task.ideal_ns for task in self.tasks], np.float64)

    @property
    def bin_state(self) -> NDArray[np.float32]:
        """Columns of the bins that edits change, (W, BINS, columns of columns.BIN)."""
        return self.bins[:, :, -n_columns(BIN) :]

    def seed(self, i: int, seed: int) -> None:
        """Seeds the tasks, neighbors and acceptance decisions of walker i."""
        self._random[i] = np.random.default_rng(seed)

    def reset(self, mask: NDArray[np.bool_], task: int | None = None, start: int = 0) -> None:
        """Starts episodes of the walkers in ``mask``, on a given or a drawn task.

        Args:
            mask: bool (W,).
            task: index of the task; None draws one per walker.
            start: index of the start plan, fastest first; an index beyond the last selects the slowest.
        """
        for i in np.flatnonzero(mask).tolist():
            t = int(self._random[i].integers(len(self.tasks))) if task is None else range(len(self.tasks))[task]
            starts = self.tasks[t].starts
            self._begin(i, t, starts[min(start, len(starts) - 1)])
        for t, members in self._by_task(mask):
            if not self.by_gap:
                compiled.draw_all(self._walkers[t], members, *self._trial_arrays(t))
        self._finish(mask)
        self.rewards[mask] = 0
        self.terminated[mask] = False
        self.truncated[mask] = False
        self.accepted[mask] = False
        self.invalid[mask] = False
        self.feasible[mask] = True
        self.has_ended[mask] = False

    def _begin(self, i: int, t: int, start: Start) -> None:
        """Starts an episode of walker i from a plan of task t."""
        task = self.tasks[t]
        walkers = self._walkers[t]
        moves = self._moves[t]
        self.task[i] = t
        moves.reset(start.rows)
        walkers.rows[i] = moves.rows
        walkers.on[i] = moves.on
        walkers.load[i] = moves.load
        walkers.rng[i] = self._random[i].integers(1, 2**63, dtype=np.uint64)
        walkers.best[i, : len(start.rows)] = start.rows
        walkers.state[i] = 0
        state = walkers.state[i]
        state["now_ns"] = state["best_ns"] = state["time_ns"] = start.iteration_ns
        state["best_rows"] = len(start.rows)
        state["budget"] = self._calls(i, task)
        walkers.effect[i] = 0
        walkers.tried_at[i] = -1
        walkers.accepted_at[i] = 0
        walkers.changed_at[i] = -1
        self.static[i] = 0
        self.gaps[i] = 0
        for name in ("change_age", "trial_age", "accepted_since"):
            by_name(self.gaps, GAP)[name][i, : len(task.graph)] = NEVER_TRIED
        self.static[i, : len(task.graph)] = task.static
        self.bins[i, :, : task.static_bins.shape[1]] = task.static_bins
        self._show_plan(i)

    def _calls(self, i: int, task: EditTask) -> int:
        """Returns the simulator budget of an episode of walker i."""
        if isinstance(self.budget, tuple):
            return round(float(np.exp(self._random[i].uniform(*np.log(self.budget)))))
        return 2 * len(task.graph) if self.budget is None else self.budget

    def redraw(self, mask: NDArray[np.bool_]) -> None:
        """Redraws all neighbors of the walkers in ``mask``."""
        for t, members in self._by_task(mask):
            compiled.draw_all(self._walkers[t], members, *self._trial_arrays(t))
            compiled.show_edits(self._walkers[t], members, self.edits, self.mask)

    def effects(self) -> NDArray[np.float32]:
        """Returns the effects of the last trials, (W,), scaled as in the observation (walkers.effect_of)."""
        pairs = zip(self.effect_ns.tolist(), self._ideal[self.task].tolist(), strict=True)
        return np.array([compiled.effect_of(effect_ns, 0.0, ideal) for effect_ns, ideal in pairs], np.float32)

    def step(self, actions: NDArray[np.int64], mask: NDArray[np.bool_] | None = None) -> None:
        """Tries the edit that each walker of ``mask`` (None: all) chooses. ``actions``: (W,).

        Raises:
            ValueError: if the shape of ``actions`` is wrong or an action is out of range.
        """
        mask = np.ones(self.count, np.bool_) if mask is None else mask
        actions = np.ascontiguousarray(actions, np.int64)
        if actions.shape != (self.count,) or ((actions < 0) | (actions >= self.actions))[mask].any():
            raise ValueError(f"actions: expected {self.count} integers from 0 to {self.actions - 1}")
        old_times = self._times()
        self.invalid[mask] = self.mask[mask, actions[mask]] == 0
        for t, members in self._by_task(mask):
            task = self.tasks[t]
            walkers = self._walkers[t]
            moves = self._moves[t]
            valid = actions.copy()
            if self.by_gap:  # actions on padding gaps have no effect
                valid[members] = np.where(self.mask[members, actions[members]] > 0, actions[members], -1)
                self._count_skipped(walkers, members[valid[members] < 0])
                members = members[valid[members] >= 0]
            # Compiled code steps all walkers of the task, and returns at one whose plan only the engine can simulate.
            position = 0
            answer_ns = -1
            while position < len(members):
                engine_arrays = task.engine.direct(len(task.graph) + 8)
                position = compiled.step(
                    walkers,
                    members,
                    position,
                    answer_ns,
                    valid,
                    self.by_gap,
                    self.accept,
                    self.hot,
                    self.cold,
                    float(task.ideal_ns),
                    *self._trial_arrays(t),
                    engine_arrays,
                )
                if position < len(members):
                    rows = moves.proposed(int(walkers.state["time_ns"][members[position]]))
                    answer_ns = task.engine.score(rows).iteration_ns
            self._show_plans(t, members[walkers.state["accept"][members] > 0])
        self._finish(mask)
        self._reward(mask, old_times)

    def _count_skipped(self, walkers: compiled.Walkers, members: NDArray[np.int64]) -> None:
        """Counts a step in which no candidate edit was tried."""
        walkers.state["steps"][members] += 1
        walkers.state["since"][members] += 1
        walkers.state["time_ns"][members] = NEVER
        walkers.state["accept"][members] = 0

    def _by_task(self, mask: NDArray[np.bool_]) -> list[tuple[int, NDArray[np.int64]]]:
        """Groups the walkers of ``mask`` by task."""
        # Compiled functions take the tables of one task.
        if len(self.tasks) == 1:
            return [(0, np.flatnonzero(mask))]
        return [(t, np.flatnonzero(mask & (self.task == t))) for t in np.unique(self.task[mask]).tolist()]

    def _trial_arrays(self, t: int) -> tuple[Any, ...]:
        """Returns limit, gaps, trial plan and scratch of a task in the argument order of ``walkers.step``."""
        _, limit, gaps, _, new, scratch = self._moves[t].arrays
        return limit, gaps, new, scratch

    def _show_plan(self, i: int) -> None:
        """Updates the observation of walker i from the simulation log of its plan."""
        self._show_plans(int(self.task[i]), np.array([i]))

    def _show_plans(self, t: int, members: NDArray[np.int64]) -> None:
        """Updates the observations of walkers of task t from the simulation logs of their plans."""
        task = self.tasks[t]
        _, limit, gaps, _, _, scratch = self._moves[t].arrays
        position = 0
        entries = -1
        while position < len(members):
            log = self._logs[t].view(np.int64)
            *engine, arrays = task.engine.direct(len(task.graph) + 8)
            position = compiled.show_plans(
                self._walkers[t],
                members,
                position,
                entries,
                log,
                task.times,
                limit,
                float(task.graph.excess),
                gaps,
                float(task.ideal_ns),
                scratch,
                (*engine, (*arrays[:-1], log)),
                BOUND,
                self.gaps,
                (by_name(self.gaps, GAP), by_name(self.bin_state, BIN)),
            )
            if position < len(members):  # the log is too short, or compiled code cannot simulate the plan
                found = task.engine.log(self.plan_rows(members[position]))
                entries = len(found)
                if entries >= len(self._logs[t]):
                    self._logs[t] = np.empty(entries + entries // 8 + 1, LOG)
                self._logs[t][:entries] = found

    def _finish(self, mask: NDArray[np.bool_]) -> None:
        """Updates trial columns, masks, edits and plan columns of the walkers in ``mask``."""
        for t, members in self._by_task(mask):
            walkers = self._walkers[t]
            moves = self._moves[t]
            compiled.show_trials(walkers, members, self._ages, by_name(self.gaps, GAP))
            self._state[members] = walkers.state[members]
            if self.by_gap:
                self.mask[members] = 0
                compiled.write_mask(walkers, members, moves.arrays[2], self.mask)
            else:
                compiled.show_edits(walkers, members, self.edits, self.mask)
        self.mask[mask & ~self.mask.any(1), 0] = 1  # no neighbors: the episode ends with the next step
        state = self._state[mask]
        ideal = self._ideal[self.task[mask]]
        overhead = state["now_ns"] / ideal - 1
        best_overhead = state["best_ns"] / ideal - 1
        progress = np.minimum(state["steps"] / np.maximum(state["budget"], 1), 1.0)
        temperature = self.hot * (self.cold / self.hot) ** progress
        self.overhead[mask] = overhead
        self.best_overhead[mask] = best_overhead
        self.temperature[mask] = temperature
        self.calls[mask] = state["steps"]
        # Logarithms keep large values within BOUND, and small ones apart.
        columns = np.empty(len(state), PLAN)
        columns["overhead"] = np.log1p(100 * overhead) / 2
        columns["distance_to_best"] = np.log1p(300 * (overhead - best_overhead))
        columns["progress"] = progress
        columns["temperature"] = np.log(temperature / 3e-4) / math.log(10)
        columns["since_best"] = np.log1p(state["since"]) / 4
        columns["accepted"] = np.log1p(state["accepted"]) / 4
        self.plan[mask] = columns.view(np.float32).reshape(-1, n_columns(PLAN)).clip(-BOUND, BOUND)

    def _times(self) -> NDArray[np.float64]:
        """Returns the iteration times of the current and the best plan, (W, 2)."""
        return np.stack([self._state["now_ns"], self._state["best_ns"]], 1).astype(np.float64)

    def _reward(self, mask: NDArray[np.bool_], old_times: NDArray[np.float64]) -> None:
        """Computes rewards and episode ends of ``mask``. ``old_times``: (W, 2), ``_times`` before the step."""
        state = self._state
        times = self._times()
        ideal = self._ideal[self.task][:, None]
        if self.logarithmic:
            reference = np.array(self.reference)[self.task][:, None]
            # 0.3 points bound the reward of the last steps to the reference, and 1 that of a single edit.
            old, new = (np.log(np.maximum(100 * (t / ideal - 1) - reference, 0) + 0.3) for t in (old_times, times))
            gain = np.clip(old - new, -1.0, 1.0)
        else:
            gain = (old_times - times) / ideal
        self.rewards[mask] = (gain[:, 1] + self.shaping * gain[:, 0])[mask]
        trial_ns = state["time_ns"]
        self.feasible[mask] = trial_ns[mask] < NEVER
        self.effect_ns[mask] = np.where(trial_ns < NEVER, trial_ns - old_times[:, 0], np.inf)[mask]
        self.accepted[mask] = state["accept"][mask] > 0
        self.terminated[mask] = (state["best_ns"] <= self._ideal[self.task])[mask]
        stuck = ~self._has_moves()
        spent = state["steps"] >= state["budget"]
        self.truncated[mask] = ((spent | stuck) & ~self.terminated)[mask]
        self.has_ended[mask] = (self.terminated | self.truncated)[mask]

    def _has_moves(self) -> NDArray[np.bool_]:
        """Returns whether each walker has a neighbor to choose, (W,)."""
        if self.by_gap:
            return np.ones(self.count, np.bool_)
        return np.asarray((self.edits[:, :, 0] >= 0).any(1), np.bool_)

    def plan_rows(self, i: int) -> NDArray[np.int64]:
        """Returns a copy of the rows of walker i's current plan (simulator.compiled.engine.rows_of)."""
        walkers = self._walkers[int(self.task[i])]
        rows: NDArray[np.int64] = walkers.rows[i][walkers.on[i]]
        return rows

    def best_plan(self, i: int, planner: str = "") -> Plan:
        """Returns the best plan of walker i's episode."""
        t = int(self.task[i])
        rows = self._walkers[t].best[i, : self._walkers[t].state["best_rows"][i]]
        task = self.tasks[t]
        return Plan.of(task.program, decisions_of(rows), planner, task.limit, task.machine.name)

    def state(self) -> dict[str, NDArray[np.uint8]]:
        """Returns views of the arrays that steps read or change, as bytes, and the random states, for ``restore``."""
        random = json.dumps([generator.bit_generator.state for generator in self._random])
        return {**self._views(), "random": np.frombuffer(random.encode(), np.uint8)}

    def restore(self, state: Mapping[str, NDArray[np.uint8]]) -> None:
        """Sets all walkers to what ``state`` returned in a batch of the same tasks and arguments."""
        for name, view in self._views().items():
            view[...] = state[name]
        for generator, stored in zip(self._random, json.loads(bytes(state["random"])), strict=True):
            generator.bit_generator.state = stored

    def _views(self) -> dict[str, NDArray[np.uint8]]:
        """Returns the walkers' arrays as bytes, by name."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        for t, walkers in enumerate(self._walkers):
            arrays |= {f"{t}.{name}": value for name, value in walkers._asdict().items()}
        return {name: value.view(np.uint8) for name, value in arrays.items() if name not in ("_ages", "_ideal")}

    # Interface of EnvBatch (batch_env.py).

    def ended(self) -> NDArray[np.bool_]:
        """Returns whether each episode has ended, (W,), as a view."""
        return self.has_ended

    def advance(self, actions: NDArray[np.int64], has_ended: NDArray[np.bool_]) -> None:
        """Steps every walker; resets a walker instead if its episode ``has_ended``."""
        self.step(actions, ~has_ended)
        if has_ended.any():
            self.reset(has_ended)

    def final_plan(self, i: int) -> Plan:
        """Returns the best plan of walker i's finished episode (``best_plan``)."""
        return self.best_plan(i)
