"""``GpuMemory-v0``: the walk of walk.py as a Gymnasium environment, and a vector environment; both are batches of
compiled walks (batch.py). The observation is a dictionary (N nodes; programs are padded to the largest).

- ``nodes`` (N, 11) float32: the paper's six features (section 4.4.1): size, transfer time, recompute time, time to the
  next use, kind of action, validity (1 valid, 0 not, −1 taken already); and five of the moment: relief, how far ahead
  the node is, planned residency over the limit, copy queue, where the walk gets stuck. README.md says what they are.
- ``action_mask`` (N,) int8: which nodes are actions that may be taken now; never wrong.
- ``current`` (1,) int64: the node under execution.
- ``program`` (1,) int64: index into ``env.unwrapped.tasks``, which hold the static graph (edges, weights).

The action is the number of a node; node 0 is "do nothing". With ``actions="full"`` it is node + N * form, and the mask
is as long. The buffers are by column, and ``nodes`` is a view of them: what is static is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from envs import columns
from envs.batch import Batch
from envs.graph import OBSERVED
from envs.task import Task
from simulator import Kernel, Machine, Plan, Program, Tensor
from simulator.limits import limit_bytes

__all__ = ["MemoryEnv", "MemoryVectorEnv", "make_tasks", "small_task"]

Observation = dict[str, NDArray[Any]]
Limit = float | str  # as simulator.limits.limit_bytes takes it


def small_program(name: str, sizes: Sequence[int]) -> Program:
    """A forward and backward pass over layers of so many MiB."""
    layers, mib = len(sizes), 2**20
    tensors = [Tensor("batch", mib, "input", True)]
    tensors += [Tensor(f"activation{i}", sizes[i] * mib) for i in range(layers)]
    tensors += [Tensor(f"gradient{i}", sizes[i] * mib, "gradient") for i in range(layers)]
    forward = [Kernel(f"forward{i}", "conv", "forward", (i,), (i + 1,), 200_000 + 50_000 * sizes[i])
               for i in range(layers)]  # fmt: skip
    backward = []
    for i in reversed(range(layers)):
        inputs = (i + 1, i) if i == layers - 1 else (i + 1, i, layers + 2 + i)
        backward.append(
            Kernel(f"backward{i}", "conv", "backward", inputs, (layers + 1 + i,), 400_000 + 100_000 * sizes[i])
        )
    return Program(name, tuple(tensors), tuple(forward + backward))


def small_task() -> tuple[Program, Machine]:
    """Eight layers: any agent can learn it in seconds."""
    return small_program("small", [6, 12, 4, 10, 3, 8, 5, 7]), Machine("small", 2**30, 12 * 10**9, 12 * 10**9)


def make_tasks(
    program: Program | Sequence[Program] | None, machine: Machine | Sequence[Machine] | None,
    limit: Limit | Sequence[Limit], min_bytes: int, mode: str,
) -> list[Task]:  # fmt: skip
    """One task per program, machine and limit.

    Raises:
        ValueError: a limit is wrong, or there is a program and no machine.
    """
    if program is None:
        program, default_machine = small_task()
        machine = machine or default_machine
    programs = [program] if isinstance(program, Program) else list(program)
    machines = [machine] if isinstance(machine, Machine) else list(machine or ())
    if not machines:
        raise ValueError("machine: needed with a program")
    limits = list(limit) if isinstance(limit, (list, tuple)) else [limit]
    return [Task(one, on, limit_bytes(each, one), min_bytes, mode)
            for one in programs for on in machines for each in limits]  # fmt: skip


def observation_space(batch: Batch) -> spaces.Dict:
    """The space of the observations described in the module's docstring."""
    nodes = batch.size
    return spaces.Dict({
        "nodes": spaces.Box(-np.inf, np.inf, (nodes, OBSERVED), np.float32),
        "action_mask": spaces.Box(0, 1, (nodes * batch.forms,), np.int8),
        "current": spaces.Box(0, max(nodes - 1, 0), (1,), np.int64),
        "program": spaces.Box(0, len(batch.tasks), (1,), np.int64),
    })  # fmt: skip


class _OverBatch:
    """What both environments have: a batch, and views of its buffers."""

    _batch: Batch

    def _look(self) -> None:
        """Makes the views."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has views of its own buffers."""
        self.__dict__ |= state
        self._look()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What episodes are drawn from."""
        return self._batch.tasks


class MemoryEnv(_OverBatch, gymnasium.Env[Observation, np.int64]):
    """One episode at a time over one or more tasks, drawn by the environment's seed.

    Args:
        program: one or several; None: a small built-in task.
        machine: the machine they run on; or several.
        limit: fraction of the peak (up to 1), bytes, or a size such as "24GiB"; or several. Tasks are every program on
            every machine under every limit.
        min_bytes: tensors below this size are left out.
        mode: "swap", "recompute" or "joint".
        reward: "paper": the change in simulated time of the plan so far; "causal": the stall as the clock advances.
            Both sum to −overhead.
        invalid: what an action does that may not be taken: "end" the episode as a dead end does, or "ignore": nothing.
        actions: "paper", or "full": each in several forms (task.py).
        copy: False: observations and masks are views of the environment's buffers, which the next call changes.

    Raises:
        ValueError: of any of these.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # theirs is no ClassVar

    def __init__(
        self, program: Program | Sequence[Program] | None = None, machine: Machine | Sequence[Machine] | None = None,
        limit: Limit | Sequence[Limit] = 0.7, min_bytes: int = 2**20, mode: str = "joint", reward: str = "paper",
        invalid: str = "end", actions: str = "paper", copy: bool = True,
    ):  # fmt: skip
        self._batch = Batch(make_tasks(program, machine, limit, min_bytes, mode), 1, reward, invalid, actions)
        self._copy = copy
        self._action = np.zeros(1, np.int64)
        self._look()
        self.action_space = spaces.Discrete(self._mask.size)
        self.observation_space = cast("spaces.Space[Observation]", observation_space(self._batch))

    def _look(self) -> None:
        self._shown = {key: view[0] for key, view in shown(self._batch).items()}
        self._mask = self._batch.mask[0].view(np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"task": i}`` chooses its task."""
        super().reset(seed=seed)
        if seed is not None:
            self._batch.seed(0, walk_seed(seed))
        self._batch.reset(task=(options or {}).get("task"))
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes the action of a node; see the module's docstring."""
        batch = self._batch
        self._action[0] = action
        batch.step(self._action)
        info = self._info()
        if batch.invalid[0]:
            info["invalid"] = True
        return self._observation(), float(batch.rewards[0]), bool(batch.terminated[0]), False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """(N F,) which actions are valid now (the name that sb3-contrib's MaskablePPO looks for)."""
        mask: NDArray[np.bool_] = self._mask.copy()
        return mask

    def plan(self, planner: str = "") -> Plan:
        """The plan so far."""
        return self._batch.plan(0, planner)

    def _observation(self) -> Observation:
        return {key: view.copy("K") for key, view in self._shown.items()} if self._copy else self._shown

    def _info(self) -> dict[str, Any]:
        batch = self._batch
        return {
            "action_mask": self._mask.copy() if self._copy else self._mask,
            "overhead": float(batch.overhead[0]),
            "iteration_ns": int(batch.walks[0, columns.ITERATION]),
            "feasible": bool(batch.feasible[0]),
        }


def shown(batch: Batch) -> Observation:
    """The observations of all walks, as views of the batch's buffers."""
    return {"nodes": batch.nodes.transpose(0, 2, 1), "action_mask": batch.mask, "current": batch.current[:, None],
            "program": batch.walks[:, columns.TASK : columns.TASK + 1]}  # fmt: skip


def walk_seed(seed: int) -> int:
    """The state of the generator of a walk, of the environment's seed."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))


class MemoryVectorEnv(_OverBatch, gymnasium.vector.VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """Many walks stepped in one compiled call by all cores, without processes.

    The arguments are those of MemoryEnv, with ``num_envs`` and Gymnasium's ``autoreset_mode``: an episode that ends is
    begun anew by the next step, whose action is ignored (NEXT_STEP); by the step that ends it, with what it ended in as
    ``final_obs`` and ``final_info`` (SAME_STEP); or by ``reset(options={"reset_mask": ...})`` (DISABLED). With a
    ``seed``, environment i draws as a MemoryEnv with ``seed + i``.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # type: ignore[misc]

    def __init__(
        self, num_envs: int, program: Program | Sequence[Program] | None = None,
        machine: Machine | Sequence[Machine] | None = None, limit: Limit | Sequence[Limit] = 0.7,
        min_bytes: int = 2**20, mode: str = "joint", reward: str = "paper", invalid: str = "end",
        actions: str = "paper", copy: bool = True, autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ):  # fmt: skip
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}  # type: ignore[misc]
        self._batch = batch = Batch(
            make_tasks(program, machine, limit, min_bytes, mode), num_envs, reward, invalid, actions,
            self.autoreset_mode == AutoresetMode.NEXT_STEP,
        )  # fmt: skip
        self._copy = copy
        self._look()
        self._never = np.zeros(num_envs, np.bool_)
        self.single_action_space = spaces.Discrete(batch.mask.shape[1])
        self.single_observation_space = observation_space(batch)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)

    def _look(self) -> None:
        self._shown, self._mask = shown(self._batch), self._batch.mask.view(np.bool_)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins episodes anew: all, or those of ``options["reset_mask"]``, of ``options["task"]`` where it is given.

        Raises:
            ValueError: a mask or a list of seeds does not fit.
        """
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None:
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed: expected {self.num_envs}, got {len(seeds)}")
            super().reset(seed=seeds[0])
            for i, one in enumerate(seeds):
                if one is not None:
                    self._batch.seed(i, walk_seed(one))
        options = options or {}
        which = options.get("reset_mask")
        if which is not None and (which.shape != (self.num_envs,) or which.dtype != np.bool_ or not which.any()):
            raise ValueError(f"reset_mask: expected {self.num_envs} booleans, one of them true")
        self._batch.reset(which, options.get("task"))
        return self._observations(), self._infos()

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Steps every walk: actions (num_envs,).

        Raises:
            ValueError: not so many actions; or, where nothing resets it, an episode has ended.
        """
        batch = self._batch
        if self.autoreset_mode == AutoresetMode.DISABLED and batch.walks[:, columns.OVER].any():
            raise ValueError(f"episodes that have ended: {np.flatnonzero(batch.walks[:, columns.OVER]).tolist()}")
        batch.step(np.asarray(actions))
        rewards, terminated, more = batch.rewards.copy(), batch.terminated.copy(), {"invalid": batch.invalid.copy()}
        if self.autoreset_mode == AutoresetMode.SAME_STEP and terminated.any():
            more |= self._final(terminated)
            more["invalid"] &= ~terminated
            batch.reset(terminated)
        return self._observations(), rewards, terminated, self._never.copy(), self._infos() | more

    def _final(self, ended: NDArray[np.bool_]) -> dict[str, Any]:
        """What the episodes ended in, as Gymnasium has it."""
        observations = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(ended):
            observations[i] = {key: view[i].copy("K") for key, view in self._shown.items()}
        info: dict[str, Any] = {}
        for key, value in (self._infos() | {"invalid": self._batch.invalid}).items():
            info[key] = np.where(ended[:, None] if value.ndim == 2 else ended, value, np.zeros((), value.dtype))
            info[f"_{key}"] = ended.copy()
        return {"final_obs": observations, "_final_obs": ended.copy(), "final_info": info, "_final_info": ended.copy()}

    def action_masks(self) -> NDArray[np.bool_]:
        """(num_envs, N F)."""
        return self._mask.copy()

    def plan(self, i: int, planner: str = "") -> Plan:
        """The plan so far of environment i."""
        return self._batch.plan(i, planner)

    def _observations(self) -> Observation:
        if not self._copy:
            return self._shown
        nodes = self._batch.copied_nodes().transpose(0, 2, 1)
        return {"nodes": nodes, **{key: view.copy() for key, view in self._shown.items() if key != "nodes"}}

    def _infos(self) -> dict[str, Any]:
        batch = self._batch
        return {
            "action_mask": self._mask.copy() if self._copy else self._mask,
            "overhead": batch.overhead.copy(),
            "iteration_ns": batch.walks[:, columns.ITERATION].copy(),
            "feasible": batch.feasible.copy(),
        }
