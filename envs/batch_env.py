"""Gymnasium environments over a batch: one walk of it (BatchEnv), or all of them (BatchVectorEnv)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from simulator import Plan

Observation = dict[str, NDArray[Any]]


class EnvBatch:
    """Walks over tasks that are stepped together, and what the environments read of them.

    Attributes, for M walks:
        rewards (M,), terminated, truncated, feasible: of the last step. overhead: of the plans so far.
        mask: int8 (M, actions).
    """

    mask: NDArray[np.int8]
    INFOS: ClassVar[tuple[str, ...]]  # names of arrays (M,)

    def __init__(self, tasks: Sequence[Any], count: int):
        self.tasks, self.count = tuple(tasks), count
        self.rewards, self.overhead = np.zeros((2, count))
        self.terminated, self.truncated, self.feasible = np.zeros((3, count), np.bool_)

    def ended(self) -> NDArray[Any]:
        """(M,) whether the episode has ended: a view."""
        raise NotImplementedError

    def spaces(self) -> tuple[spaces.Discrete, spaces.Dict]:
        """Spaces of the actions and observations of one walk."""
        raise NotImplementedError

    def seed(self, i: int, seed: int) -> None:
        """Seeds walk i."""
        raise NotImplementedError

    def advance(self, actions: NDArray[np.int64], over: NDArray[np.bool_]) -> None:
        """Steps every walk, or begins it anew if its episode is ``over``."""
        raise NotImplementedError

    def final_plan(self, i: int) -> Plan | None:
        """The plan with which the episode of walk i has just ended, if it has one."""
        raise NotImplementedError

    def views(self) -> Observation:
        """Observations of all walks, as views."""
        raise NotImplementedError

    def copies(self, views: Observation) -> Observation:
        """Copies of ``views``, which are this batch's."""
        return {key: view.copy() for key, view in views.items()}

    def infos(self) -> Observation:
        """Infos of all walks but their masks, as views."""
        return {key: getattr(self, key) for key in self.INFOS}


def chosen_task(options: dict[str, Any] | None, tasks: int, known: Sequence[str]) -> int | None:
    """The task that a reset asks for; raises ValueError if an option or the task is unknown."""
    options = options or {}
    if wrong := [key for key in options if key not in known]:
        raise ValueError(f"options: expected {' or '.join(map(repr, known))}, got {wrong[0]!r}")
    task = options.get("task")
    if task is not None and not -tasks <= int(task) < tasks:
        raise ValueError(f"options: there is no task {task}; there are {tasks}")
    return None if task is None else int(task)


class _OverBatch:
    """A batch, and views of its buffers."""

    _batch: Any  # an EnvBatch
    _copy: bool

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has views of its own buffers."""
        self.__dict__ |= state
        self._look()

    def _look(self) -> None:
        """Makes the views."""
        self._views, self._infos = self._batch.views(), self._batch.infos()

    @property
    def tasks(self) -> tuple[Any, ...]:
        """The tasks that episodes are drawn from."""
        tasks: tuple[Any, ...] = self._batch.tasks
        return tasks


class BatchEnv(_OverBatch, gymnasium.Env[Observation, np.int64]):
    """The only walk of a batch.

    Args:
        copy: False: observations and masks are views of the batch's buffers.
    """

    _options: ClassVar[tuple[str, ...]] = ("task",)  # of reset

    def __init__(self, batch: EnvBatch, copy: bool):
        self._batch, self._copy = batch, copy
        self._action, self._all = np.zeros(1, np.int64), np.ones(1, np.bool_)
        self.action_space, self.observation_space = batch.spaces()  # type: ignore[assignment]
        self._look()

    def _look(self) -> None:
        super()._look()
        self._shown = {key: view[0] for key, view in self._views.items() if view.ndim > 1}
        self._numbers = {key: view for key, view in self._views.items() if view.ndim == 1}
        self._mask: NDArray[np.bool_] = self._batch.mask[0].view(np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"task": i}`` chooses its task.

        Raises:
            ValueError: an option or its value is unknown.
        """
        task = chosen_task(options, len(self.tasks), self._options)
        super().reset(seed=seed)
        if seed is not None:
            self._batch.seed(0, seed)
        self._batch.reset(self._all, task, **{key: int(x) for key, x in (options or {}).items() if key != "task"})
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes an action."""
        batch = self._batch
        self._action[0] = action
        batch.step(self._action)
        info, terminated, truncated = self._info(), bool(batch.terminated[0]), bool(batch.truncated[0])
        if (terminated or truncated) and (plan := batch.final_plan(0)) is not None:
            info["plan"] = plan
        return self._observation(), float(batch.rewards[0]), terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """(actions,) which actions are valid now (the name that sb3-contrib's MaskablePPO looks for)."""
        return self._mask.copy()

    def _observation(self) -> Observation:
        shown = {key: view.copy("K") for key, view in self._shown.items()} if self._copy else dict(self._shown)
        for key, view in self._numbers.items():
            shown[key] = view[0]
        return shown

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {key: view.item(0) for key, view in self._infos.items()}
        info["action_mask"] = self._shown["action_mask"].copy() if self._copy else self._shown["action_mask"]
        return info


class BatchVectorEnv(_OverBatch, gymnasium.vector.VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """All walks of a batch.

    Args:
        copy: False: observations and masks are views of the batch's buffers.
        mode: Gymnasium's ``autoreset_mode``: an episode that ends is begun anew by the next step, whose action is
            ignored (NEXT_STEP); by the step that ends it, with what it ended in as ``final_obs`` and ``final_info``
            (SAME_STEP); or by ``reset(options={"reset_mask": ...})`` (DISABLED).
        most: steps after which episodes are truncated; None: they are not.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # type: ignore[misc]

    def __init__(self, num_envs: int, batch: EnvBatch, copy: bool, mode: str | AutoresetMode, most: int | None):
        self.num_envs, self._batch, self._copy = num_envs, batch, copy
        self.autoreset_mode = AutoresetMode(mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}  # type: ignore[misc]
        self._most, self._steps = most, np.zeros(num_envs, np.int64)
        self.single_action_space, self.single_observation_space = batch.spaces()
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self._look()

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins all episodes anew, or those of ``options["reset_mask"]``; ``options["task"]`` chooses their task.

        Raises:
            ValueError: a mask or a list of seeds does not fit, or there is no such option or task.
        """
        task = chosen_task(options, len(self.tasks), ("task", "reset_mask"))
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None:
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed: expected {self.num_envs}, got {len(seeds)}")
            super().reset(seed=seeds[0])
            for i, one in enumerate(seeds):
                if one is not None:
                    self._batch.seed(i, one)
        which = (options or {}).get("reset_mask")
        if which is not None and (which.shape != (self.num_envs,) or which.dtype != np.bool_ or not which.any()):
            raise ValueError(f"reset_mask: expected {self.num_envs} booleans, one of them true")
        self._batch.reset(np.ones(self.num_envs, np.bool_) if which is None else which, task)
        self._steps[slice(None) if which is None else which] = 0
        return self._observations(), self._copied_infos()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Steps every walk: actions (num_envs,).

        Raises:
            ValueError: not so many actions; or an episode has ended that nothing resets.
        """
        batch, over = self._batch, self._batch.ended() != 0
        if self.autoreset_mode == AutoresetMode.DISABLED and over.any():
            raise ValueError(f"episodes that have ended: {np.flatnonzero(over).tolist()}")
        batch.advance(np.asarray(actions), over)
        rewards, terminated, truncated = batch.rewards.copy(), batch.terminated.copy(), batch.truncated.copy()
        if self._most is not None:
            self._steps += 1
            self._steps[over] = 0
            truncated |= self._steps >= self._most
            batch.ended()[truncated] = 1
        infos, ended = self._copied_infos(), terminated | truncated
        if ended.any():
            infos |= self._final_plans(ended)
        if self.autoreset_mode == AutoresetMode.SAME_STEP and ended.any():
            final = self._final(ended, infos)
            batch.reset(ended, None)
            self._steps[ended] = 0
            infos = self._copied_infos() | final
        return self._observations(), rewards, terminated, truncated, infos

    def action_masks(self) -> NDArray[np.bool_]:
        """(num_envs, actions) which actions are valid now."""
        mask: NDArray[np.bool_] = self._batch.mask.astype(np.bool_)
        return mask

    def _observations(self) -> Observation:
        observations: Observation = self._batch.copies(self._views) if self._copy else self._views
        return observations

    def _copied_infos(self) -> dict[str, Any]:
        infos = {key: view.copy() for key, view in self._infos.items()}
        return {**infos, "action_mask": self._batch.mask.copy() if self._copy else self._batch.mask}

    def _final_plans(self, ended: NDArray[np.bool_]) -> dict[str, Any]:
        """The plans with which episodes have ended."""
        plans = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(ended).tolist():
            plans[i] = self._batch.final_plan(i)
        found = np.array([plan is not None for plan in plans])
        return {"plan": plans, "_plan": found} if found.any() else {}

    def _final(self, ended: NDArray[np.bool_], infos: dict[str, Any]) -> dict[str, Any]:
        """Observations and infos of the episodes that have ended, as Gymnasium has them."""
        observations = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(ended):
            observations[i] = {key: view[i].copy("K") for key, view in self._views.items()}
        info: dict[str, Any] = {}
        for key in [key for key in infos if not key.startswith("_")]:
            there = infos.get(f"_{key}", ended)
            none = None if infos[key].dtype == object else np.zeros((), infos[key].dtype)
            info[key] = np.where(there[:, None] if infos[key].ndim == 2 else there, infos[key], none)
            info[f"_{key}"] = there.copy()
        return {"final_obs": observations, "_final_obs": ended.copy(), "final_info": info, "_final_info": ended.copy()}
