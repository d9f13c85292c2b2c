"""Batch of plan-editing walkers over several tasks, used by both environments of env.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.batch import one_of
from envs.batch_env import EnvBatch, Observation
from envs.edit import walkers as of
from envs.edit.task import BOUND, EditTask, Start
from envs.edit.walkers import BIN_COLUMNS, BINS, CHANGES, MODES, PLAN_COLUMNS, TRIAL_COLUMNS, WHOLE_COLUMNS
from simulator.compiled.encoding import NEVER, decisions_of
from simulator.plan import Plan

ACCEPT = ("metropolis", "better", "always")
REWARDS = ("best", "log")
EDITS = ("neighbours", "gap")
OFFSET, LARGEST = 0.3, 1.0  # points added inside the logarithm of the reward; bound on the reward of one edit
AGES = 1 << 14
GAP_COLUMNS = PLAN_COLUMNS - 1 + 1 + TRIAL_COLUMNS * MODES


class EditBatch(EnvBatch):
    """Vectorized edit environment: W walkers, each of which improves a plan of one task.

    Attributes, for W walkers, G gaps of the largest task, M candidate edits and A actions:
        gaps: observation of the gaps, float32 (W, G, GAP_COLUMNS).
        static: static features of the gaps, float32 (W, G, F).
        bins: observation of the bins of time, float32 (W, BINS, 12 + BIN_COLUMNS).
        plan: observation of the plan, float32 (W, 6).
        edits: candidate edits, int32 (W, M, CHANGES).
        mask: valid actions, int8 (W, A).
        rewards, overhead, best_overhead, effect_ns, temperature: float64 (W,).
        accepted, feasible, terminated, truncated: bool (W,).
        task, calls: index of the task, and simulator calls of the episode, int64 (W,).

    Args:
        tasks: tasks from which episodes are sampled.
        count: number of walkers (W).
        neighbours: number of candidate edits (M).
        edits: "neighbours" (an action selects a candidate edit) or "gap" (an action selects a gap and a mode).
        budget: simulator calls per episode; a pair is a range, sampled log-uniformly; None means twice the gaps.
        accept, hot, cold, reward, shaping: see env.py.
        below: points of overhead per task that reward="log" subtracts before the logarithm; None means 0.
    """

    INFOS = "overhead", "best_overhead", "effect_ns", "accepted", "feasible", "calls", "temperature"

    def __init__(
        self, tasks: Sequence[EditTask], count: int, neighbours: int = 64, edits: str = "neighbours",
        budget: int | tuple[int, int] | None = None, accept: str = "metropolis", hot: float = 1e-3,
        cold: float = 3e-5, reward: str = "best", shaping: float = 0.0, below: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        for name, value, known in (("edits", edits, EDITS), ("accept", accept, ACCEPT), ("reward", reward, REWARDS)):
            one_of(name, value, known)
        least = budget[0] if isinstance(budget, tuple) else budget
        if neighbours < 1 or (least is not None and least < 1):
            raise ValueError(f"neighbours, budget: expected at least 1, got {neighbours} and {budget}")
        if not 0 < cold <= hot:
            raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")
        super().__init__(tasks, count)
        self.by_gap, self.budget = edits == "gap", budget
        self.accept, self.hot, self.cold = ACCEPT.index(accept), hot, cold
        self.logarithmic, self.shaping = reward == "log", shaping
        self.reference = [0.0] * len(self.tasks) if below is None else list(below)
        most = max(len(task.graph) for task in self.tasks)
        slots = 1 if self.by_gap else neighbours
        self.actions = MODES * most if self.by_gap else neighbours
        shapes = [(count, len(t.graph), len(t.program.kernels), slots) for t in self.tasks]
        self._walkers = [of.make_walkers(*shape) for shape in shapes]
        self._moves = [task.moves.fork(0) for task in self.tasks]
        self.gaps = np.zeros((count, most, GAP_COLUMNS), np.float32)
        self.static = np.zeros((count, most, self.tasks[0].static.shape[1]), np.float32)
        static_bins = self.tasks[0].static_bins.shape[1]
        self.bins = np.zeros((count, BINS, static_bins + BIN_COLUMNS), np.float32)
        self.plan = np.zeros((count, WHOLE_COLUMNS), np.float32)
        self.edits = np.full((count, slots, CHANGES), -1, np.int32)
        self.mask = np.zeros((count, self.actions), np.int8)
        self.task = np.zeros(count, np.int64)
        self.best_overhead, self.effect_ns, self.temperature = np.zeros((3, count))
        self.accepted, self.calls = np.zeros(count, np.bool_), np.zeros(count, np.int64)
        self.over = np.ones(count, np.bool_)
        self._state = np.zeros(count, of.STATE)  # copies of the walkers' current records
        self._random = [np.random.default_rng() for _ in range(count)]
        self._ages = np.log1p(np.arange(AGES))
        self._ideal = np.array([task.ideal_ns for task in self.tasks], np.float64)

    def seed(self, i: int, seed: int) -> None:
        """Seeds the tasks, neighbors and acceptance decisions of walker i."""
        self._random[i] = np.random.default_rng(seed)

    def reset(self, which: NDArray[np.bool_], task: int | None = None, start: int = 0) -> None:
        """Starts episodes of the walkers in the mask ``which``, on a given or a drawn task.

        Args:
            which: bool (W,).
            task: index of the task; None draws one per walker.
            start: index of the start plan, fastest first; an index beyond the last selects the slowest.
        """
        for i in np.flatnonzero(which).tolist():
            t = int(self._random[i].integers(len(self.tasks))) if task is None else range(len(self.tasks))[task]
            starts = self.tasks[t].starts
            self._begin(i, t, starts[min(start, len(starts) - 1)])
        for t, members in self._by_task(which):
            if not self.by_gap:
                of.draw_all(self._walkers[t], members, *self._moved(t))
        self._finish(which)
        self.rewards[which], self.terminated[which], self.truncated[which] = 0, False, False
        self.accepted[which], self.feasible[which], self.over[which] = False, True, False

    def _begin(self, i: int, t: int, start: Start) -> None:
        """Starts an episode of walker i from a plan of task t."""
        chosen, walkers, moves = self.tasks[t], self._walkers[t], self._moves[t]
        self.task[i] = t
        moves.reset(start.rows)
        walkers.rows[i], walkers.on[i], walkers.load[i] = moves.rows, moves.on, moves.load
        walkers.rng[i] = self._random[i].integers(1, 2**63, dtype=np.uint64)
        walkers.best[i, : len(start.rows)] = start.rows
        budget, ns = self.budget, start.iteration_ns
        if isinstance(budget, tuple):
            budget = round(float(np.exp(self._random[i].uniform(*np.log(budget)))))
        budget = 2 * len(chosen.graph) if budget is None else budget
        walkers.state[i] = ns, ns, 0, 0, 0, len(start.rows), budget, ns, 0
        walkers.effect[i], walkers.tried_at[i], walkers.accepted_at[i], walkers.changed_at[i] = 0, -1, 0, -1
        self.static[i], self.gaps[i] = 0, 0
        self.static[i, : len(chosen.graph)] = chosen.static
        self.bins[i, :, : chosen.static_bins.shape[1]] = chosen.static_bins
        self._show_plan(i)

    def redraw(self, which: NDArray[np.bool_]) -> None:
        """Redraws all neighbors of the walkers in the mask ``which``."""
        for t, members in self._by_task(which):
            of.draw_all(self._walkers[t], members, *self._moved(t))
            self.edits[members] = self._walkers[t].codes[members]
            self.mask[members] = self._walkers[t].counts[members] > 0

    def effects(self) -> NDArray[np.float32]:
        """Returns the effects of the last trials, (W,), scaled as in the observation (walkers.effect_of)."""
        pairs = zip(self.effect_ns.tolist(), self._ideal[self.task].tolist(), strict=True)
        return np.array([of.effect_of(effect_ns, 0.0, ideal) for effect_ns, ideal in pairs], np.float32)

    def step(self, actions: NDArray[np.int64], which: NDArray[np.bool_] | None = None) -> None:
        """Tries the edit that each walker of the mask ``which`` (None: all) chooses. ``actions``: (W,).

        Raises:
            ValueError: if the shape of ``actions`` is wrong or an action is out of range.
        """
        which = np.ones(self.count, np.bool_) if which is None else which
        actions = np.ascontiguousarray(actions, np.int64)
        if actions.shape != (self.count,) or ((actions < 0) | (actions >= self.actions))[which].any():
            raise ValueError(f"actions: expected {self.count} integers from 0 to {self.actions - 1}")
        before = self._times()
        for t, members in self._by_task(which):
            task, walkers, moves = self.tasks[t], self._walkers[t], self._moves[t]
            valid = actions.copy()
            if self.by_gap:  # actions on padding gaps have no effect
                valid[members] = np.where(self.mask[members, actions[members]] > 0, actions[members], -1)
                self._nothing(walkers, members[valid[members] < 0])
                members = members[valid[members] >= 0]
            at, answer = 0, -1
            while at < len(members):
                room = task.engine.direct(len(task.graph) + 8)
                at = of.step(
                    walkers, members, at, answer, valid, self.by_gap, self.accept, self.hot, self.cold,
                    float(task.ideal_ns), *self._moved(t), room,
                )  # fmt: skip
                if at < len(members):
                    rows = moves.proposed(int(walkers.state["time_ns"][members[at]]))
                    answer = task.engine.score(rows).iteration_ns
            for i in members[walkers.state["accept"][members] > 0].tolist():
                self._show_plan(i)
        self._finish(which)
        self._judge(which, before)

    def _nothing(self, walkers: of.Walkers, members: NDArray[np.int64]) -> None:
        """Counts a step in which no candidate edit was tried."""
        walkers.state["steps"][members] += 1
        walkers.state["since"][members] += 1
        walkers.state["time_ns"][members], walkers.state["accept"][members] = NEVER, 0

    def _by_task(self, which: NDArray[np.bool_]) -> list[tuple[int, NDArray[np.int64]]]:
        """Groups the walkers of the mask ``which`` by task."""
        if len(self.tasks) == 1:
            return [(0, np.flatnonzero(which))]
        return [(t, np.flatnonzero(which & (self.task == t))) for t in np.unique(self.task[which]).tolist()]

    def _moved(self, t: int) -> tuple[Any, ...]:
        """Returns limit, gaps, trial plan and scratch of a task in the argument order of ``walkers.step``."""
        _, limit, gaps, _, new, scratch = self._moves[t].arrays
        return limit, gaps, new, scratch

    def _show_plan(self, i: int) -> None:
        """Updates the observation of walker i from the simulation log of its plan."""
        t = int(self.task[i])
        task, walkers, moves = self.tasks[t], self._walkers[t], self._moves[t]
        log = task.engine.log(walkers.rows[i][walkers.on[i]])
        of.show_plan(
            log, task.times, walkers, i, task.limit, float(task.graph.excess), moves.arrays[2], float(task.ideal_ns),
            self.gaps[i], self.bins[i, :, -BIN_COLUMNS:],
        )  # fmt: skip
        np.clip(self.gaps[i], -BOUND, BOUND, out=self.gaps[i])

    def _finish(self, which: NDArray[np.bool_]) -> None:
        """Updates trial columns, masks, edits and plan columns of the walkers in the mask ``which``."""
        for t, members in self._by_task(which):
            walkers, moves = self._walkers[t], self._moves[t]
            of.show_trials(walkers, members, self._ages, self.gaps[:, :, PLAN_COLUMNS - 1 :])
            self._state[members] = walkers.state[members]
            if self.by_gap:
                self.mask[members] = 0
                of.mask_of(walkers, members, moves.arrays[2], self.mask)
            else:
                self.edits[members] = walkers.codes[members]
                self.mask[members] = walkers.counts[members] > 0
        self.mask[which & ~self.mask.any(1), 0] = 1  # no neighbors: the episode ends with the next step
        state, ideal = self._state[which], self._ideal[self.task[which]]
        now, best = state["now_ns"] / ideal - 1, state["best_ns"] / ideal - 1
        done = np.minimum(state["steps"] / np.maximum(state["budget"], 1), 1.0)
        heat = self.hot * (self.cold / self.hot) ** done
        self.overhead[which], self.best_overhead[which], self.temperature[which] = now, best, heat
        self.calls[which] = state["steps"]
        columns = [
            np.log1p(100 * now) / 2, np.log1p(300 * (now - best)), done, np.log(heat / 3e-4) / math.log(10),
            np.log1p(state["since"]) / 4, np.log1p(state["accepted"]) / 4,
        ]  # fmt: skip
        self.plan[which] = np.stack(columns, 1).clip(-BOUND, BOUND)

    def _times(self) -> NDArray[np.float64]:
        """Returns the iteration times of the current and the best plan, (W, 2)."""
        return np.stack([self._state["now_ns"], self._state["best_ns"]], 1).astype(np.float64)

    def _judge(self, which: NDArray[np.bool_], before: NDArray[np.float64]) -> None:
        """Computes rewards and episode ends of the mask ``which``. ``before``: (W, 2), ``_times`` before the step."""
        state, after, ideal = self._state, self._times(), self._ideal[self.task][:, None]
        if self.logarithmic:
            reference = np.array(self.reference)[self.task][:, None]
            old, new = (np.log(np.maximum(100 * (t / ideal - 1) - reference, 0) + OFFSET) for t in (before, after))
            gain = np.clip(old - new, -LARGEST, LARGEST)
        else:
            gain = 100 * (before - after) / ideal
        self.rewards[which] = (gain[:, 1] + self.shaping * gain[:, 0])[which]
        tried = state["time_ns"]
        self.feasible[which] = tried[which] < NEVER
        self.effect_ns[which] = np.where(tried < NEVER, tried - before[:, 0], np.inf)[which]
        self.accepted[which] = state["accept"][which] > 0
        self.terminated[which] = (state["best_ns"] <= self._ideal[self.task])[which]
        stuck = (self.edits[:, :, 0] < 0).all(1) & (not self.by_gap)
        spent = state["steps"] >= state["budget"]
        self.truncated[which] = ((spent | stuck) & ~self.terminated)[which]
        self.over[which] = (self.terminated | self.truncated)[which]

    def best_plan(self, i: int, planner: str = "") -> Plan:
        """Returns the best plan of walker i's episode."""
        t = int(self.task[i])
        rows = self._walkers[t].best[i, : self._walkers[t].state["best_rows"][i]]
        task = self.tasks[t]
        return Plan.of(task.program, decisions_of(rows), planner, task.limit, task.machine.name)

    def ended(self) -> NDArray[np.bool_]:
        """Returns whether each episode has ended, (W,), as a view."""
        return self.over

    def spaces(self) -> tuple[spaces.Discrete, spaces.Dict]:
        """Returns the action and observation spaces of one walker (env.py)."""
        gaps, features = self.static.shape[1:]
        return spaces.Discrete(self.actions), spaces.Dict({
            "static": spaces.Box(-BOUND, BOUND, (gaps, features), np.float32),
            "gaps": spaces.Box(-BOUND, BOUND, (gaps, GAP_COLUMNS), np.float32),
            "bins": spaces.Box(-BOUND, BOUND, (BINS, self.bins.shape[2]), np.float32),
            "plan": spaces.Box(-BOUND, BOUND, (WHOLE_COLUMNS,), np.float32),
            "edits": spaces.Box(-1, MODES * gaps - 1, (self.edits.shape[1], CHANGES), np.int32),
            "action_mask": spaces.Box(0, 1, (self.actions,), np.int8),
            "task": spaces.Discrete(len(self.tasks)),
        })  # fmt: skip

    def views(self) -> Observation:
        """Returns the observations of all walkers as views."""
        return {"static": self.static, "gaps": self.gaps, "bins": self.bins, "plan": self.plan, "edits": self.edits,
                "action_mask": self.mask, "task": self.task}  # fmt: skip

    def advance(self, actions: NDArray[np.int64], over: NDArray[np.bool_]) -> None:
        """Steps every walker; resets a walker instead if its episode is ``over``."""
        self.step(actions, ~over)
        if over.any():
            self.reset(over)

    final_plan = best_plan
