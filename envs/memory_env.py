"""``GpuMemory-v0``: the walk of walk.py as a Gymnasium environment, and a native vector environment.

The observation is a dictionary (N nodes; programs are padded to the largest). README.md has an example.

- ``nodes`` (N, 8) float32: the paper's six features (section 4.4.1): size, transfer time, recompute time, time to the
  next use, kind of action, validity (1 valid, 0 not, −1 taken already); and two of the moment: relief, the share of
  what is over the limit (bytes x time by the planned residency) that falls into the gap of the node's action, and how
  far ahead the node is.
- ``action_mask`` (N,) int8: which nodes are actions that may be taken now; never wrong.
- ``current`` (1,) int64: the node under execution.
- ``program`` (1,) int64: index into ``env.unwrapped.tasks``, which hold the static graph (edges, weights).

The action is the number of a node; node 0 is "do nothing". An action that is not valid ends the episode with the
reward of a dead end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.graph import AHEAD, FEATURES, RELIEF, STATIC, VALID
from envs.walk import DEAD_END_REWARD, Task, Walk
from simulator import Kernel, Machine, Program, Tensor
from simulator.limits import limit_bytes

Observation = dict[str, NDArray[Any]]
Limit = float | str  # as simulator.limits.limit_bytes takes it


def small_task() -> tuple[Program, Machine]:
    """A forward and backward pass over eight layers: any agent can learn it in seconds."""
    layers, mib = 8, 2**20
    sizes = [6, 12, 4, 10, 3, 8, 5, 7]
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
    program = Program("small", tuple(tensors), tuple(forward + backward))
    return program, Machine("small", 2**30, 12 * 10**9, 12 * 10**9)


def make_tasks(
    program: Program | Sequence[Program] | None, machine: Machine | None, limit: Limit | Sequence[Limit],
    min_bytes: int, mode: str,
) -> list[Task]:  # fmt: skip
    """One task per program and limit.

    Raises:
        ValueError: a limit is wrong, or there is a program and no machine.
    """
    if program is None:
        program, default_machine = small_task()
        machine = machine or default_machine
    programs = [program] if isinstance(program, Program) else list(program)
    if machine is None:
        raise ValueError("machine: needed with a program")
    limits = list(limit) if isinstance(limit, (list, tuple)) else [limit]
    return [Task(one, machine, limit_bytes(each, one), min_bytes, mode) for one in programs for each in limits]


def dynamic_features(walk: Walk, out: NDArray[np.float32]) -> None:
    """Writes the columns of the moment of the node features, (N, FEATURES), of the walk's present state."""
    task, graph = walk.task, walk.task.graph
    n, p = len(graph), min(walk.position, len(walk.need) - 1)
    acts = graph.action_gap >= 0
    out[:n, VALID] = walk.mask()
    out[:n, VALID][acts] -= walk.taken[graph.action_gap[acts]] == graph.action_kind[acts]
    out[:n, RELIEF][acts] = walk.relief()[graph.action_gap[acts]]
    out[:n, AHEAD] = (task.start_ns[graph.kernel] - task.start_ns[p]) / task.ideal_ns


def current_node(walk: Walk) -> int:
    """The node under execution: the last operation that has begun at the walk's position."""
    return max(0, int(np.searchsorted(walk.task.graph.kernel, walk.position, side="left")) - 1)


class MemoryEnv(gymnasium.Env[Observation, np.int64]):
    """One episode at a time over one or more programs and limits, drawn by the environment's seed.

    Args:
        program: one or several; None: a small built-in task.
        machine: the machine they run on.
        limit: fraction of the peak (up to 1), bytes, or a size such as "24GiB"; or several, drawn per episode.
        min_bytes: tensors below this size are left out.
        mode: "swap", "recompute" or "joint".
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # theirs is no ClassVar

    def __init__(
        self, program: Program | Sequence[Program] | None = None, machine: Machine | None = None,
        limit: Limit | Sequence[Limit] = 0.7, min_bytes: int = 2**20, mode: str = "joint",
    ):  # fmt: skip
        self.tasks = make_tasks(program, machine, limit, min_bytes, mode)
        self.walk = Walk(self.tasks[0])
        self._index = 0
        size = max(len(t.graph) for t in self.tasks)
        self.action_space = spaces.Discrete(size)
        self.observation_space = cast("spaces.Space[Observation]", observation_space(size, len(self.tasks)))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"task": i}`` chooses the program and limit."""
        super().reset(seed=seed)
        chosen = (options or {}).get("task")
        self._index = int(self.np_random.integers(len(self.tasks))) if chosen is None else int(chosen)
        self.walk = Walk(self.tasks[self._index])
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes the action of a node; see the module's docstring."""
        node = int(action)
        if not self.action_masks()[node]:
            return self._observation(), DEAD_END_REWARD, True, False, {**self._info(), "invalid": True}
        if self.walk.done:  # nothing need leave in this task
            return self._observation(), 0.0, True, False, self._info()
        result = self.walk.step(node)
        return self._observation(), result.reward, result.terminated, False, self._info()

    def action_masks(self) -> NDArray[np.bool_]:
        """(N,) which actions are valid now (the name that sb3-contrib's MaskablePPO looks for)."""
        mask = np.zeros(int(self.action_space.n), np.bool_)  # type: ignore[attr-defined]
        mask[: len(self.walk.task.graph)] = self.walk.mask()
        return mask

    def _observation(self) -> Observation:
        graph = self.walk.task.graph
        nodes = np.zeros(self.observation_space["nodes"].shape, np.float32)  # type: ignore[index]
        nodes[: len(graph), :STATIC] = graph.features
        dynamic_features(self.walk, nodes)
        return {
            "nodes": nodes,
            "action_mask": self.action_masks().astype(np.int8),
            "current": np.array([current_node(self.walk)], np.int64),
            "program": np.array([self._index], np.int64),
        }

    def _info(self) -> dict[str, Any]:
        walk = self.walk
        return {"action_mask": self.action_masks(), "overhead": walk.overhead, "iteration_ns": walk.iteration_ns,
                "feasible": walk.done and not walk.dead_end}  # fmt: skip


def observation_space(nodes: int, tasks: int) -> spaces.Dict:
    """The space of the observations described in the module's docstring."""
    big = np.iinfo(np.int64).max
    return spaces.Dict({
        "nodes": spaces.Box(-np.inf, np.inf, (nodes, FEATURES), np.float32),
        "action_mask": spaces.Box(0, 1, (nodes,), np.int8),
        "current": spaces.Box(0, max(nodes - 1, 0), (1,), np.int64),
        "program": spaces.Box(0, min(tasks, big), (1,), np.int64),
    })  # fmt: skip


class MemoryVectorEnv(gymnasium.vector.VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """Many walks stepped in one call, into one batch of observations (no process, no copy per walk).

    The arguments are those of MemoryEnv, with ``num_envs``. An episode that ends is begun anew by the next
    step, whose action is ignored (Gymnasium's NEXT_STEP autoreset).
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP
    }

    def __init__(
        self, num_envs: int, program: Program | Sequence[Program] | None = None, machine: Machine | None = None,
        limit: Limit | Sequence[Limit] = 0.7, min_bytes: int = 2**20, mode: str = "joint",
    ):  # fmt: skip
        self.num_envs = num_envs
        self.tasks = make_tasks(program, machine, limit, min_bytes, mode)
        size = max(len(t.graph) for t in self.tasks)
        self.single_action_space = spaces.Discrete(size)
        self.single_observation_space = observation_space(size, len(self.tasks))
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.walks = [Walk(self.tasks[0]) for _ in range(num_envs)]
        self._index = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.bool_)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins every episode anew."""
        if isinstance(seed, list):
            seed = seed[0]
        super().reset(seed=seed)
        for i in range(self.num_envs):
            self._begin(i)
        return self._observations(), self._infos()

    def _begin(self, i: int) -> None:
        self._index[i] = self.np_random.integers(len(self.tasks))
        self.walks[i] = Walk(self.tasks[self._index[i]])
        self._ended[i] = False

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Steps every walk: actions (num_envs,) of node numbers."""
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, np.bool_)
        for i, (walk, node) in enumerate(zip(self.walks, np.asarray(actions).tolist(), strict=True)):
            if self._ended[i]:
                self._begin(i)
                continue
            if walk.done:
                terminated[i] = True
            elif node >= len(walk.task.graph) or not walk.mask()[node]:
                rewards[i], terminated[i] = DEAD_END_REWARD, True
            else:
                rewards[i], terminated[i], _ = walk.step(node)
            self._ended[i] = terminated[i]
        return self._observations(), rewards, terminated, np.zeros(self.num_envs, np.bool_), self._infos()

    def action_masks(self) -> NDArray[np.bool_]:
        """(num_envs, N)."""
        masks = np.zeros((self.num_envs, int(self.single_action_space.n)), np.bool_)  # type: ignore[attr-defined]
        for i, walk in enumerate(self.walks):
            masks[i, : len(walk.task.graph)] = walk.mask()
        return masks

    def _observations(self) -> Observation:
        size = int(self.single_action_space.n)  # type: ignore[attr-defined]
        nodes = np.zeros((self.num_envs, size, FEATURES), np.float32)
        for i, walk in enumerate(self.walks):
            nodes[i, : len(walk.task.graph), :STATIC] = walk.task.graph.features
            dynamic_features(walk, nodes[i])
        current = np.array([[current_node(walk)] for walk in self.walks], np.int64)
        return {"nodes": nodes, "action_mask": self.action_masks().astype(np.int8), "current": current,
                "program": self._index[:, None].copy()}  # fmt: skip

    def _infos(self) -> dict[str, Any]:
        return {
            "action_mask": self.action_masks(),
            "overhead": np.array([w.overhead for w in self.walks]),
            "feasible": np.array([w.done and not w.dead_end for w in self.walks]),
        }
