"""The vector environment over a batch of walks: seeds, the ends of episodes in Gymnasium's three ways, final infos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

Observation = dict[str, NDArray[Any]]


def chosen_task(options: dict[str, Any] | None, tasks: int, known: Sequence[str] = ("task",)) -> int | None:
    """The task that a reset asks for; raises ValueError for an option or a task that there is not."""
    options = options or {}
    if wrong := [key for key in options if key not in known]:
        raise ValueError(f"options: expected {' or '.join(map(repr, known))}, got {wrong[0]!r}")
    task = options.get("task")
    if task is not None and not -tasks <= int(task) < tasks:
        raise ValueError(f"options: there is no task {task}; there are {tasks}")
    return None if task is None else int(task)


class BatchVectorEnv(gymnasium.vector.VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """Walks of a batch as environments.

    Args:
        batch: has ``rewards``, ``terminated``, ``truncated`` and ``tasks``.
        mode: Gymnasium's ``autoreset_mode``.
        most: episodes are truncated after so many steps; None: they are not.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # type: ignore[misc]
    _shown: Observation  # views of the batch's buffers

    def __init__(
        self, num_envs: int, batch: Any, mode: str | AutoresetMode, most: int | None,
        action_space: gymnasium.Space[Any], observation_space: gymnasium.Space[Any],
    ):  # fmt: skip
        self.num_envs, self._batch = num_envs, batch
        self.autoreset_mode = AutoresetMode(mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}  # type: ignore[misc]
        self._most, self._steps = most, np.zeros(num_envs, np.int64)
        self.single_action_space, self.single_observation_space = action_space, observation_space
        self.action_space = gymnasium.vector.utils.batch_space(action_space, num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(observation_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins episodes anew: all, or those of ``options["reset_mask"]``, of ``options["task"]`` where it is given.

        Raises:
            ValueError: a mask or a list of seeds does not fit, or there is no such option or task.
        """
        task = chosen_task(options, len(self._batch.tasks), ("task", "reset_mask"))
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None:
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed: expected {self.num_envs}, got {len(seeds)}")
            super().reset(seed=seeds[0])
            for i, one in enumerate(seeds):
                if one is not None:
                    self._seed(i, one)
        which = (options or {}).get("reset_mask")
        if which is not None and (which.shape != (self.num_envs,) or which.dtype != np.bool_ or not which.any()):
            raise ValueError(f"reset_mask: expected {self.num_envs} booleans, one of them true")
        self._begin(np.ones(self.num_envs, np.bool_) if which is None else which, task)
        self._steps[slice(None) if which is None else which] = 0
        return self._observations(), self._infos()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Steps every walk: actions (num_envs,).

        Raises:
            ValueError: not so many actions; or, where nothing resets it, an episode has ended.
        """
        batch, over = self._batch, self._over() != 0
        if self.autoreset_mode == AutoresetMode.DISABLED and over.any():
            raise ValueError(f"episodes that have ended: {np.flatnonzero(over).tolist()}")
        self._act(np.asarray(actions), over)  # one that has ended ignores its action, and begins anew
        rewards, terminated = batch.rewards.copy(), batch.terminated.copy()
        truncated = batch.truncated.copy()
        if self._most is not None:
            self._steps += 1
            self._steps[over] = 0
            truncated |= self._steps >= self._most
            self._over()[truncated] = 1
        infos, ended = self._infos(), terminated | truncated
        if ended.any():
            infos |= self._endings(ended)
        if self.autoreset_mode == AutoresetMode.SAME_STEP and ended.any():
            final = self._final(ended, infos)
            self._begin(ended, None)
            self._steps[ended] = 0
            infos = self._infos() | final
        return self._observations(), rewards, terminated, truncated, infos

    def _seed(self, i: int, seed: int) -> None:
        """Of the tasks that environment i draws."""
        raise NotImplementedError

    def _begin(self, which: NDArray[np.bool_], task: int | None) -> None:
        """Begins these episodes anew; their tasks are drawn, or the given one."""
        raise NotImplementedError

    def _act(self, actions: NDArray[np.int64], over: NDArray[np.bool_]) -> None:
        """Steps every walk, or begins it anew where its episode is over."""
        raise NotImplementedError

    def _over(self) -> NDArray[Any]:
        """(num_envs,) not 0 where an episode has ended: a view."""
        raise NotImplementedError

    def _infos(self) -> dict[str, Any]:
        """Of all environments, in arrays."""
        raise NotImplementedError

    def _endings(self, terminated: NDArray[np.bool_]) -> dict[str, Any]:
        """What there is to say of episodes that have ended, with ``_key`` where it counts."""
        return {}

    def _observations(self) -> Observation:
        """Of all environments."""
        raise NotImplementedError

    def _final(self, ended: NDArray[np.bool_], infos: dict[str, Any]) -> dict[str, Any]:
        """What the episodes ended in, as Gymnasium has it."""
        observations = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(ended):
            observations[i] = {key: view[i].copy("K") for key, view in self._shown.items()}
        info: dict[str, Any] = {}
        for key in [key for key in infos if not key.startswith("_")]:
            there = infos.get(f"_{key}", ended)
            none = None if infos[key].dtype == object else np.zeros((), infos[key].dtype)
            info[key] = np.where(there[:, None] if infos[key].ndim == 2 else there, infos[key], none)
            info[f"_{key}"] = there.copy()
        return {"final_obs": observations, "_final_obs": ended.copy(), "final_info": info, "_final_info": ended.copy()}
