"""``GpuMemoryEdit-v0``: an episode edits a whole plan, one simulated neighbour at a time.

The state is a feasible plan with its simulated timeline. A step simulates one of M neighbours of the plan and takes it
or not; the episode ends after ``budget`` simulator calls, or when the plan costs no time. Every edit can be undone by
another one.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from envs.edit.batch import GAP_COLUMNS, EditBatch
from envs.edit.task import BOUND, EditTask
from envs.edit.walkers import BINS, CHANGES, MODES, WHOLE_COLUMNS
from envs.memory_env import Limit, MachineLike, OneOrMore, ProgramLike, several, small_task
from envs.tasks import program_and_machine
from envs.vector_env import BatchVectorEnv, Observation, chosen_task
from simulator.limits import limit_bytes
from simulator.plan import Plan

__all__ = ["MemoryEditEnv", "MemoryEditVectorEnv", "make_edit_tasks"]

OPTIONS = ("task", "start")


def make_edit_tasks(
    program: OneOrMore[ProgramLike] | None, machine: OneOrMore[MachineLike] | None, limit: OneOrMore[Limit],
    min_bytes: int, mode: str, start: str | Plan,
) -> list[EditTask]:  # fmt: skip
    """Returns one task per program, machine and limit.

    Raises:
        ValueError: as ``EditTask``, or a limit is wrong, or a program has no machine.
    """
    if program is None:
        program, own = small_task()
        machine = machine or own
    pairs = [
        program_and_machine(p, m) for p in several(program) for m in ([None] if machine is None else several(machine))
    ]
    return [EditTask(p, m, limit_bytes(one, p), mode, min_bytes, start) for p, m in pairs for one in several(limit)]


def _batch(
    count: int, program: Any, machine: Any, limit: Any, min_bytes: int, mode: str, start: str | Plan,
    reference: str, reward: str, options: dict[str, Any],
) -> EditBatch:  # fmt: skip
    tasks = make_edit_tasks(program, machine, limit, min_bytes, mode, start)
    below = None
    if reward == "log":
        if reference not in ("floor", "ideal"):
            raise ValueError(f"reference: expected 'floor' or 'ideal', got {reference!r}")
        if reference == "floor":
            from envs.edit.starts import floor_of

            below = [floor_of(task) for task in tasks]
    return EditBatch(tasks, count, reward=reward, reference=below, **options)


def _space(batch: EditBatch) -> spaces.Dict:
    gaps, features = batch.static.shape[1:]
    return spaces.Dict({
        "static": spaces.Box(-BOUND, BOUND, (gaps, features), np.float32),
        "gaps": spaces.Box(-BOUND, BOUND, (gaps, GAP_COLUMNS), np.float32),
        "bins": spaces.Box(-BOUND, BOUND, (BINS, batch.bins.shape[2]), np.float32),
        "plan": spaces.Box(-BOUND, BOUND, (WHOLE_COLUMNS,), np.float32),
        "edits": spaces.Box(-1, MODES * gaps - 1, (batch.edits.shape[1], CHANGES), np.int32),
        "action_mask": spaces.Box(0, 1, (batch.actions,), np.int8),
        "task": spaces.Discrete(len(batch.tasks)),
    })  # fmt: skip


def _views(batch: EditBatch) -> Observation:
    """The observations of all walkers, as views of the batch's buffers."""
    return {"static": batch.static, "gaps": batch.gaps, "bins": batch.bins, "plan": batch.plan, "edits": batch.edits,
            "action_mask": batch.mask, "task": batch.task}  # fmt: skip


INFOS = (
    "overhead", "best_overhead", "effect_ns", "accepted", "feasible", "calls", "temperature",
)  # fmt: skip


class MemoryEditEnv(gymnasium.Env[Observation, np.int64]):
    """Edits one plan at a time.

    Observation (G gaps of the largest task, M neighbours; all floats in [-10, 10], sizes relative to the excess over
    the limit and times to the ideal iteration, so that nothing depends on a program's size):

    - ``static`` (G, F) float32: what no edit changes of a gap (gap_graph.py), and the log prior of its modes.
    - ``gaps`` (G, 32) float32: mode (4, one-hot), shifted; stall at its return, stalls for memory and for data
      within, share of all stalls, least slack over its size, whether it could be filled, share of its time without
      slack; lateness of the copy out, earliness of the copy in at its end and start, recomputation; steps since it
      changed; and for each of its 5 actions the effect of the last trial, steps and accepted edits since.
    - ``bins`` (64, 19) float32: 12 static columns of each bin of time; least and mean slack, stalls for data and
      memory, load of both links, recomputation.
    - ``plan`` (6,) float32: overhead, distance to the best, part of the budget, temperature, tries since the best,
      accepted edits.
    - ``edits`` (M, 10) int32: the changes of each neighbour as gap * 5 + mode, -1 where it has fewer; modes: 0 fill,
      1 swap, 2 recompute, 3 recompute and keep, 4 shift.
    - ``action_mask`` (M,) int8. ``task`` int64: index into ``env.unwrapped.tasks``, which hold the static graph.

    Args:
        program: one or several programs, names (tasks.py) or paths; None: a small built-in task.
        machine: one or several machines, presets or paths; None: that of the named program.
        limit: fraction of the peak, bytes, or a size such as "24GiB"; or several. Tasks are all combinations.
        min_bytes: tensors below this size stay.
        mode: "swap", "recompute" or "joint".
        start: "policy", "heuristic", "empty" or a Plan; see task.py. ``reset(options={"start": i})`` takes the i-th
            fastest of its plans instead of the fastest.
        edits: "neighbours": the action is one of ``neighbours`` edits with their repair; "gap": it is a gap and a mode
            (gap * 5 + mode), and the repair follows unseen.
        neighbours: M.
        budget: simulator calls of an episode; None: twice the task's gaps.
        accept: "metropolis" (by a temperature that falls from ``hot`` to ``cold``, fractions of the ideal time),
            "better" (no slower than the present plan) or "always".
        reward: "best": points of overhead by which the best plan improves, so that an episode's rewards sum to the
            start's overhead less the best one's; "log": log((best + 0.3) / (new best + 0.3)) of points above
            ``reference``.
        shaping: adds this times the same reward of the present plan.
        reference: of reward="log": the certified "floor" (of the LP bound) or the "ideal" time.
        copy: False: observations are views of buffers that the next call changes.

    Raises:
        ValueError: of any of these.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self, program: OneOrMore[ProgramLike] | None = None, machine: OneOrMore[MachineLike] | None = None,
        limit: OneOrMore[Limit] = 0.7, min_bytes: int = 2**20, mode: str = "joint", start: str | Plan = "heuristic",
        edits: str = "neighbours", neighbours: int = 64, budget: int | None = None, accept: str = "metropolis",
        hot: float = 1e-3, cold: float = 3e-5, reward: str = "best", shaping: float = 0.0, reference: str = "floor",
        copy: bool = True,
    ) -> None:  # fmt: skip
        options = {"neighbours": neighbours, "edits": edits, "budget": budget, "accept": accept, "hot": hot,
                   "cold": cold, "shaping": shaping}  # fmt: skip
        self._batch = _batch(1, program, machine, limit, min_bytes, mode, start, reference, reward, options)
        self._copy, self._all = copy, np.ones(1, np.bool_)
        self.action_space = spaces.Discrete(self._batch.actions)
        self.observation_space = cast("spaces.Space[Observation]", _space(self._batch))

    @property
    def tasks(self) -> tuple[EditTask, ...]:
        """The tasks that episodes are drawn from."""
        return self._batch.tasks

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode.

        Args:
            options: ``task`` and ``start`` choose the task and its start plan.

        Raises:
            ValueError: an option, a task or a start is unknown.
        """
        task = chosen_task(options, len(self.tasks), OPTIONS)
        super().reset(seed=seed)
        if seed is not None:
            self._batch.seed(0, seed)
        self._batch.reset(self._all, task, int((options or {}).get("start", 0)))
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Simulates a neighbour of the plan, and takes it or not."""
        batch = self._batch
        batch.step(np.array([action], np.int64))
        info = self._info()
        if batch.over[0]:
            info["plan"] = batch.best_plan(0)
        return self._observation(), float(batch.rewards[0]), bool(batch.terminated[0]), bool(batch.truncated[0]), info

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns which actions are valid now (the name that sb3-contrib's MaskablePPO calls)."""
        mask: NDArray[np.bool_] = self._batch.mask[0].astype(np.bool_)
        return mask

    @property
    def best_plan(self) -> Plan:
        """The best plan of the episode."""
        return self._batch.best_plan(0)

    def _observation(self) -> Observation:
        found = {key: view[0] for key, view in _views(self._batch).items()}
        return {key: np.copy(one) if self._copy and one.ndim else one for key, one in found.items()}

    def _info(self) -> dict[str, Any]:
        values = {key: getattr(self._batch, key)[0].item() for key in INFOS}
        return {**values, "action_mask": self._batch.mask[0].copy()}


class MemoryEditVectorEnv(BatchVectorEnv):
    """Many walkers of one or several tasks, each task's stepped in one compiled call.

    The arguments are those of MemoryEditEnv, with ``num_envs`` and Gymnasium's ``autoreset_mode``. With a ``seed``,
    environment i draws as a MemoryEditEnv with ``seed + i``.
    """

    _batch: EditBatch

    def __init__(
        self, num_envs: int, program: OneOrMore[ProgramLike] | None = None,
        machine: OneOrMore[MachineLike] | None = None, limit: OneOrMore[Limit] = 0.7, min_bytes: int = 2**20,
        mode: str = "joint", start: str | Plan = "heuristic", edits: str = "neighbours", neighbours: int = 64,
        budget: int | None = None, accept: str = "metropolis", hot: float = 1e-3, cold: float = 3e-5,
        reward: str = "best", shaping: float = 0.0, reference: str = "floor", copy: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, max_episode_steps: int | None = None,
    ) -> None:  # fmt: skip
        options = {"neighbours": neighbours, "edits": edits, "budget": budget, "accept": accept, "hot": hot,
                   "cold": cold, "shaping": shaping}  # fmt: skip
        batch = _batch(num_envs, program, machine, limit, min_bytes, mode, start, reference, reward, options)
        super().__init__(
            num_envs, batch, autoreset_mode, max_episode_steps, spaces.Discrete(batch.actions), _space(batch)
        )
        self._copy = copy

    @property
    def tasks(self) -> tuple[EditTask, ...]:
        """The tasks that episodes are drawn from."""
        return self._batch.tasks

    @property
    def _shown(self) -> Observation:  # type: ignore[override]
        return _views(self._batch)

    def _seed(self, i: int, seed: int) -> None:
        self._batch.seed(i, seed)

    def _begin(self, which: NDArray[np.bool_], task: int | None) -> None:
        self._batch.reset(which, task)

    def _act(self, actions: NDArray[np.int64], over: NDArray[np.bool_]) -> None:
        self._batch.step(actions, ~over)
        if over.any():
            self._batch.reset(over)

    def _over(self) -> NDArray[np.bool_]:
        return self._batch.over

    def _endings(self, ended: NDArray[np.bool_]) -> dict[str, Any]:
        """The best plans of the episodes that have ended."""
        plans = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(ended).tolist():
            plans[i] = self._batch.best_plan(i)
        return {"plan": plans, "_plan": ended.copy()}

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns (num_envs, actions) which actions are valid now."""
        return self._batch.mask.astype(np.bool_)

    def best_plan(self, i: int) -> Plan:
        """The best plan of environment i's episode."""
        return self._batch.best_plan(i)

    def _observations(self) -> Observation:
        return {key: view.copy() for key, view in self._shown.items()} if self._copy else self._shown

    def _infos(self) -> dict[str, Any]:
        found = {key: getattr(self._batch, key).copy() for key in INFOS}
        return {**found, "action_mask": self._batch.mask.copy()}
