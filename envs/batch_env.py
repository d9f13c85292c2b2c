"""Gymnasium environments over a batch of walks: BatchEnv (one walk) and BatchVectorEnv (all walks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

Observation = dict[str, NDArray[Any]]


class EnvBatch:
    """Batch of episodes that are stepped together: what the environments share.

    A subclass also has ``spaces()`` of one walk, ``views()`` of all observations, ``ended()``, a view (M,),
    ``seed(i, seed)``, ``reset(which, task)``, ``step(actions)``, ``advance(actions, over)``, which resets walks whose
    episodes are over instead, and ``final_plan(i)``, the plan with which walk i's episode has just ended, or None.

    Attributes, for M walks:
        rewards, terminated, truncated, feasible: (M,) of the last step.
        overhead: (M,) of the current plans.
        mask: int8 (M, actions).
    """

    mask: NDArray[np.int8]
    INFOS: ClassVar[tuple[str, ...]]  # names of arrays (M,)

    def __init__(self, tasks: Sequence[Any], count: int):
        self.tasks, self.count = tuple(tasks), count
        self.rewards, self.overhead = np.zeros((2, count))
        self.terminated, self.truncated, self.feasible = np.zeros((3, count), np.bool_)

    def copies(self, views: Observation) -> Observation:
        """Returns copies of ``views``, which must be views of this batch."""
        return {key: view.copy() for key, view in views.items()}


def chosen_task(options: dict[str, Any] | None, tasks: int, known: Sequence[str]) -> int | None:
    """Returns the task index of reset options, or None; raises ValueError if an option or the task is unknown."""
    options = options or {}
    if wrong := [key for key in options if key not in known]:
        raise ValueError(f"options: expected {' or '.join(map(repr, known))}, got {wrong[0]!r}")
    task = options.get("task")
    if task is not None and not -tasks <= int(task) < tasks:
        raise ValueError(f"options: expected a task from {-tasks} to {tasks - 1}, got {task}")
    return None if task is None else int(task)


class _OverBatch:
    """Base class of the environments: a batch and views of its buffers."""

    _batch: Any  # an EnvBatch
    _copy: bool

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreates the views after copying or unpickling."""
        self.__dict__ |= state
        self._look()

    def _look(self) -> None:
        """Creates the views of the batch's buffers."""
        self._views = self._batch.views()
        self._infos = {key: getattr(self._batch, key) for key in self._batch.INFOS}

    @property
    def tasks(self) -> tuple[Any, ...]:
        """Tasks from which episodes are drawn."""
        tasks: tuple[Any, ...] = self._batch.tasks
        return tasks


class BatchEnv(_OverBatch, gymnasium.Env[Observation, np.int64]):
    """Gymnasium environment over a batch of one walk.

    Args:
        copy: if False, observations and masks are views of the batch's buffers.
    """

    _options: ClassVar[tuple[str, ...]] = ("task",)  # options of ``reset``

    def __init__(self, batch: Any, copy: bool):
        self._batch, self._copy = batch, copy
        self._action, self._all = np.zeros(1, np.int64), np.ones(1, np.bool_)
        self.action_space, self.observation_space = batch.spaces()
        self._look()

    def _look(self) -> None:
        super()._look()
        self._shown = {key: view[0] for key, view in self._views.items() if view.ndim > 1}
        self._numbers = {key: view for key, view in self._views.items() if view.ndim == 1}
        self._mask: NDArray[np.bool_] = self._batch.mask[0].view(np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"task": i}`` selects its task.

        Raises:
            ValueError: if an option or its value is unknown.
        """
        task = chosen_task(options, len(self.tasks), self._options)
        super().reset(seed=seed)
        if seed is not None:
            self._batch.seed(0, seed)
        self._batch.reset(self._all, task, **{key: int(x) for key, x in (options or {}).items() if key != "task"})
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes one action and returns observation, reward, terminated, truncated and info."""
        batch = self._batch
        self._action[0] = action
        batch.step(self._action)
        info, terminated, truncated = self._info(), bool(batch.terminated[0]), bool(batch.truncated[0])
        if (terminated or truncated) and (plan := batch.final_plan(0)) is not None:
            info["plan"] = plan
        return self._observation(), float(batch.rewards[0]), terminated, truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns the valid actions, bool (actions,); sb3-contrib's MaskablePPO calls this method."""
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
    """Gymnasium vector environment over all walks of a batch.

    Args:
        copy: if False, observations and masks are views of the batch's buffers.
        mode: Gymnasium's ``autoreset_mode``. NEXT_STEP: the step after the end of an episode resets it and ignores the
            action. SAME_STEP: the step that ends an episode resets it and returns ``final_obs`` and ``final_info``.
            DISABLED: call ``reset(options={"reset_mask": ...})``.
        most: steps after which an episode is truncated; None: never.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # type: ignore[misc]

    def __init__(self, num_envs: int, batch: Any, copy: bool, mode: str | AutoresetMode, most: int | None):
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
        """Starts new episodes, all or those of ``options["reset_mask"]``; ``options["task"]`` selects the task.

        Raises:
            ValueError: if the mask or the list of seeds has the wrong length, or an option or task is unknown.
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
            raise ValueError(f"reset_mask: expected {self.num_envs} booleans, at least one of them true")
        self._batch.reset(np.ones(self.num_envs, np.bool_) if which is None else which, task)
        self._steps[slice(None) if which is None else which] = 0
        return self._observations(), self._copied_infos()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Steps every walk. ``actions``: (num_envs,).

        Raises:
            ValueError: if the number of actions is wrong, or an episode has ended and ``autoreset_mode`` is DISABLED.
        """
        batch, over = self._batch, self._batch.ended() != 0
        if self.autoreset_mode == AutoresetMode.DISABLED and over.any():
            raise ValueError(f"reset episodes that have ended before the next step: {np.flatnonzero(over).tolist()}")
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
        """Returns the valid actions, bool (num_envs, actions)."""
        mask: NDArray[np.bool_] = self._batch.mask.astype(np.bool_)
        return mask

    def _observations(self) -> Observation:
        observations: Observation = self._batch.copies(self._views) if self._copy else self._views
        return observations

    def _copied_infos(self) -> dict[str, Any]:
        infos = {key: view.copy() for key, view in self._infos.items()}
        return {**infos, "action_mask": self._batch.mask.copy() if self._copy else self._batch.mask}

    def _final_plans(self, ended: NDArray[np.bool_]) -> dict[str, Any]:
        """Returns the plans of the episodes that have just ended, as Gymnasium infos."""
        plans = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(ended).tolist():
            plans[i] = self._batch.final_plan(i)
        found = np.array([plan is not None for plan in plans])
        return {"plan": plans, "_plan": found} if found.any() else {}

    def _final(self, ended: NDArray[np.bool_], infos: dict[str, Any]) -> dict[str, Any]:
        """Returns the last observations and infos of ended episodes in Gymnasium's format."""
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
