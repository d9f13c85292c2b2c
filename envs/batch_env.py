"""Gymnasium environments over a batch of walks: BatchEnv (one walk) and BatchVectorEnv (all walks)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from envs.compilation import announce
from envs.options import one_of
from envs.render import MODES, Frame, picture, text
from simulator import Plan

Observation = dict[str, NDArray[Any]]


class _Loan:
    """Lends an array: once no view of ``numpy.asarray(loan)`` is left, the array is added to ``spare``."""

    def __init__(self, array: NDArray[Any], spare: list[NDArray[Any]]):
        self._array = array
        self._spare = spare
        self.__array_interface__ = array.__array_interface__  # views of views, too, refer to the loan

    def __del__(self) -> None:
        if len(self._spare) < 3:  # a caller that held very many at once will not do so again soon
            self._spare.append(self._array)


class SpareArrays:
    """Arrays like ``example``, reused when no view of them is left: allocation costs as much as copying."""

    def __init__(self, example: NDArray[Any]):
        self._example = example
        self._spare: list[NDArray[Any]] = []

    def lend(self) -> NDArray[Any]:
        """Returns an array of any content."""
        return np.asarray(_Loan(self._spare.pop() if self._spare else np.empty_like(self._example), self._spare))


class EnvBatch:
    """Batch of episodes that are stepped together: the interface that the environments need.

    Attributes, for M walks:
        rewards, terminated, truncated, feasible: (M,) of the last step.
        overhead: (M,) of the current plans.
        mask: int8 (M, actions).
    """

    mask: NDArray[np.int8]
    KIND: ClassVar[str]  # family of the environment, a key of compilation.ENTRIES
    INFOS: ClassVar[tuple[str, ...]]  # names of arrays (M,)

    def __init__(self, tasks: Sequence[Any], count: int):
        self.tasks = tuple(tasks)
        self.count = count
        self.rewards, self.overhead = np.zeros((2, count))
        self.terminated, self.truncated, self.feasible = np.zeros((3, count), np.bool_)

    def ended(self) -> NDArray[Any]:
        """Returns whether each episode has ended, (M,), as a view."""
        raise NotImplementedError

    def spaces(self) -> tuple[spaces.Discrete, spaces.Dict]:
        """Returns the action and observation spaces of one walk."""
        raise NotImplementedError

    def seed(self, i: int, seed: int) -> None:
        """Seeds walk i."""
        raise NotImplementedError

    def advance(self, actions: NDArray[np.int64], has_ended: NDArray[np.bool_]) -> None:
        """Steps every walk; resets a walk instead if its episode ``has_ended``."""
        raise NotImplementedError

    def final_plan(self, i: int) -> Plan | None:
        """Returns the plan with which the episode of walk i has just ended, or None."""
        raise NotImplementedError

    def frame(self, i: int) -> Frame:
        """Returns what a rendering of walk i shows."""
        raise NotImplementedError

    def views(self) -> Observation:
        """Returns the observations of all walks as views."""
        raise NotImplementedError

    def copies(self, views: Observation) -> Observation:
        """Returns copies of ``views``, which must be views of this batch."""
        return {key: view.copy() for key, view in views.items()}

    def infos(self) -> Observation:
        """Returns the info arrays of all walks as views, without the action masks."""
        return {key: getattr(self, key) for key in self.INFOS}


def task_option(options: dict[str, Any] | None, tasks: int, names: Sequence[str]) -> int | None:
    """Returns the task index of reset options, or None; raises ValueError if an option or the task is unknown."""
    options = options or {}
    if unknown := [key for key in options if key not in names]:
        raise ValueError(f"options: expected {' or '.join(map(repr, names))}, got {unknown[0]!r}")
    task = options.get("task")
    if task is not None and not -tasks <= int(task) < tasks:
        raise ValueError(f"options: expected a task from {-tasks} to {tasks - 1}, got {task}")
    return None if task is None else int(task)


def checked_actions(actions: Any, shape: tuple[int, ...], count: int) -> NDArray[np.int64]:
    """Returns actions as int64 of ``shape``.

    Raises:
        ValueError: if the shape differs, or an action is not an integer from 0 to ``count`` - 1.
    """
    array = np.asarray(actions)
    if array.shape == shape and array.dtype.kind in "iu":
        wrong = array[(array < 0) | (array >= count)]
        if not wrong.size:
            return array.astype(np.int64)
        given = f"{wrong[0]}"
    else:
        given = f"{array.dtype} {np.array2string(array, threshold=8)}"
    integers = f"{shape[0]} integers" if shape else "an integer"
    raise ValueError(f"action: expected {integers} from 0 to {count - 1}, got {given}")


class _BatchEnvBase:
    """Base class of the environments: a batch and views of its buffers."""

    _batch: Any  # an EnvBatch
    _copy: bool

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreates the views after copying or unpickling."""
        self.__dict__ |= state
        self._make_views()

    def _make_views(self) -> None:
        """Creates the views of the batch's buffers."""
        self._views, self._infos = self._batch.views(), self._batch.infos()

    @property
    def tasks(self) -> tuple[Any, ...]:
        """Tasks from which episodes are drawn."""
        tasks: tuple[Any, ...] = self._batch.tasks
        return tasks


class BatchEnv(_BatchEnvBase, gymnasium.Env[Observation, np.int64]):
    """Gymnasium environment over a batch of one walk.

    Args:
        copy: if False, observations and masks are views of the batch's buffers.
        render_mode: "ansi", "rgb_array" or None (render.py).
    """

    _options: ClassVar[tuple[str, ...]] = ("task",)  # options of ``reset``
    metadata: ClassVar[dict[str, Any]] = {"render_modes": list(MODES), "render_fps": 8}  # type: ignore[misc]

    def __init__(self, batch: EnvBatch, copy: bool, render_mode: str | None):
        self.render_mode = render_mode if render_mode is None else one_of("render_mode", render_mode, MODES)
        self._batch = batch
        self._copy = copy
        self._action = np.zeros(1, np.int64)
        self._all = np.ones(1, np.bool_)
        self.action_space, self.observation_space = batch.spaces()  # type: ignore[assignment]
        self._make_views()

    def _make_views(self) -> None:
        super()._make_views()
        self._arrays = {key: view[0] for key, view in self._views.items() if view.ndim > 1}
        self._scalars = {key: view for key, view in self._views.items() if view.ndim == 1}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"task": i}`` selects its task.

        Raises:
            ValueError: if an option or its value is unknown.
        """
        task = task_option(options, len(self.tasks), self._options)
        announce(self._batch.KIND)
        super().reset(seed=seed)
        if seed is not None:
            self._batch.seed(0, seed)
        self._batch.reset(self._all, task, **{key: int(x) for key, x in (options or {}).items() if key != "task"})
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes one action and returns observation, reward, terminated, truncated and info.

        Raises:
            ValueError: if the action is not an integer of the action space; a masked one is no error.
        """
        batch = self._batch
        self._action[0] = checked_actions(action, (), batch.mask.shape[1])
        batch.step(self._action)
        info = self._info()
        terminated = bool(batch.terminated[0])
        truncated = bool(batch.truncated[0])
        if (terminated or truncated) and (plan := batch.final_plan(0)) is not None:
            info["plan"] = plan
        return self._observation(), float(batch.rewards[0]), terminated, truncated, info

    def action_masks(self) -> NDArray[np.int8]:
        """Returns the valid actions, int8 (actions,); sb3-contrib's MaskablePPO calls this method."""
        mask: NDArray[np.int8] = self._batch.mask[0].copy()
        return mask

    def render(self) -> Any:
        """Renders memory use over the iteration against the limit: text, or uint8 (450, 800, 3)."""
        if self.render_mode is None:
            gymnasium.logger.warn('render_mode is None: make the environment with render_mode="rgb_array" to render it')
            return None
        frame = self._batch.frame(0)
        return text(frame) if self.render_mode == "ansi" else picture(frame)

    def _observation(self) -> Observation:
        observation = {key: view.copy("K") for key, view in self._arrays.items()} if self._copy else dict(self._arrays)
        for key, view in self._scalars.items():
            observation[key] = view[0]
        return observation

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {key: view.item(0) for key, view in self._infos.items()}
        info["action_mask"] = self._arrays["action_mask"].copy() if self._copy else self._arrays["action_mask"]
        return info


class BatchVectorEnv(_BatchEnvBase, gymnasium.vector.VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """Gymnasium vector environment over all walks of a batch.

    Args:
        copy: if False, observations and masks are views of the batch's buffers.
        mode: Gymnasium's ``autoreset_mode``. NEXT_STEP: the step after the end of an episode resets it and ignores the
            action. SAME_STEP: the step that ends an episode resets it and returns ``final_obs`` and ``final_info``.
            DISABLED: call ``reset(options={"reset_mask": ...})``.
        most: steps after which an episode is truncated; None: never.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # type: ignore[misc]

    def __init__(self, num_envs: int, batch: EnvBatch, copy: bool, mode: str | AutoresetMode, max_steps: int | None):
        self.num_envs = num_envs
        self._batch = batch
        self._copy = copy
        self.autoreset_mode = AutoresetMode(mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}  # type: ignore[misc]
        self._max_steps = max_steps
        self._steps = np.zeros(num_envs, np.int64)
        self.single_action_space, self.single_observation_space = batch.spaces()
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self._make_views()

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts new episodes, all or those of ``options["reset_mask"]``; ``options["task"]`` selects the task.

        Raises:
            ValueError: if the mask or the list of seeds has the wrong length, or an option or task is unknown.
        """
        task = task_option(options, len(self.tasks), ("task", "reset_mask"))
        announce(self._batch.KIND)
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None:
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed: expected {self.num_envs}, got {len(seeds)}")
            super().reset(seed=seeds[0])
            for i, env_seed in enumerate(seeds):
                if env_seed is not None:
                    self._batch.seed(i, env_seed)
        mask = (options or {}).get("reset_mask")
        mask = None if mask is None else np.asarray(mask)
        if mask is not None and (mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any()):
            raise ValueError(f"reset_mask: expected {self.num_envs} booleans, at least one of them true")
        self._batch.reset(np.ones(self.num_envs, np.bool_) if mask is None else mask, task)
        self._steps[slice(None) if mask is None else mask] = 0
        return self._observations(), self._copied_infos()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Steps every walk. ``actions``: (num_envs,).

        Raises:
            ValueError: if an action is not an integer of the action space, also one that is ignored because its episode
                has ended; or an episode has ended and ``autoreset_mode`` is DISABLED.
        """
        batch = self._batch
        actions = checked_actions(actions, (self.num_envs,), batch.mask.shape[1])
        ended = self._batch.ended() != 0
        if self.autoreset_mode == AutoresetMode.DISABLED and ended.any():
            raise ValueError(f"reset episodes that have ended before the next step: {np.flatnonzero(ended).tolist()}")
        batch.advance(actions, ended)
        rewards = batch.rewards.copy()
        terminated = batch.terminated.copy()
        truncated = batch.truncated.copy()
        if self._max_steps is not None:
            self._steps += 1
            self._steps[ended] = 0
            truncated |= self._steps >= self._max_steps
            batch.ended()[truncated] = 1
        infos = self._copied_infos()
        done = terminated | truncated
        if done.any():
            infos |= self._final_plans(done)
        if self.autoreset_mode == AutoresetMode.SAME_STEP and done.any():
            final = self._final(done, infos)
            batch.reset(done, None)
            self._steps[done] = 0
            infos = self._copied_infos() | final
        return self._observations(), rewards, terminated, truncated, infos

    def action_masks(self) -> NDArray[np.int8]:
        """Returns the valid actions, int8 (num_envs, actions)."""
        mask: NDArray[np.int8] = self._batch.mask.copy()
        return mask

    def _observations(self) -> Observation:
        observations: Observation = self._batch.copies(self._views) if self._copy else self._views
        return observations

    def _copied_infos(self) -> dict[str, Any]:
        infos = {key: view.copy() for key, view in self._infos.items()}
        return {**infos, "action_mask": self._batch.mask.copy() if self._copy else self._batch.mask}

    def _final_plans(self, done: NDArray[np.bool_]) -> dict[str, Any]:
        """Returns the plans of the episodes that have just ended, as Gymnasium infos."""
        plans = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(done).tolist():
            plans[i] = self._batch.final_plan(i)
        has_plan = np.array([plan is not None for plan in plans])
        return {"plan": plans, "_plan": has_plan} if has_plan.any() else {}

    def _final(self, done: NDArray[np.bool_], infos: dict[str, Any]) -> dict[str, Any]:
        """Returns the last observations and infos of ended episodes in Gymnasium's format."""
        last = self._observations()
        observations = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(done):
            observations[i] = {key: view[i].copy("K") for key, view in last.items()}
        info: dict[str, Any] = {}
        for key in [key for key in infos if not key.startswith("_")]:
            is_set = infos.get(f"_{key}", done)
            default = None if infos[key].dtype == object else np.zeros((), infos[key].dtype)
            info[key] = np.where(is_set[:, None] if infos[key].ndim == 2 else is_set, infos[key], default)
            info[f"_{key}"] = is_set.copy()
        return {"final_obs": observations, "_final_obs": done.copy(), "final_info": info, "_final_info": done.copy()}
