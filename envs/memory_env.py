"""``GpuMemory-v0``: the walk of walk.py as a Gymnasium environment, and a vector environment; both are batches of
compiled walks (batch.py). The observation is a dictionary (N nodes; programs are padded to the largest).

- ``nodes`` (N, 11) float32: the paper's six features (section 4.4.1): size, transfer time, recompute time, time to the
  next use, kind of action, validity (1 valid, 0 not, −1 taken already); and five of the moment: relief, how far ahead
  the node is, planned residency over the limit, copy queue, where the walk gets stuck. README.md says what they are.
- ``action_mask`` (N,) int8: which nodes are actions that may be taken now; never wrong.
- ``current`` int64: the node under execution.
- ``program`` int64: index into ``env.unwrapped.tasks``, which hold the static graph (edges, weights).

The action is the number of a node; node 0 is "do nothing". With ``actions="full"`` it is node + N * form, and the mask
is as long. The buffers are by column, and ``nodes`` is a view of them: what is static is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from envs import columns
from envs.batch import Batch, one_of
from envs.graph import OBSERVED
from envs.render import Scene
from envs.task import Task
from envs.tasks import program_and_machine
from envs.vector_env import BatchVectorEnv, Observation, chosen_task
from simulator import Kernel, Machine, Plan, Program, Tensor
from simulator.limits import limit_bytes
from simulator.modes import check_mode, least_residency

__all__ = ["MemoryEnv", "MemoryVectorEnv", "make_tasks", "small_task"]

T = TypeVar("T")
Limit = float | str  # as simulator.limits.limit_bytes takes it
ProgramLike = Program | str  # or a name (tasks.py), or the path of a .json or .json.gz
MachineLike = Machine | str  # or a preset, or the path of a YAML
OneOrMore: TypeAlias = T | Sequence[T]


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
    program: OneOrMore[ProgramLike] | None, machine: OneOrMore[MachineLike] | None, limit: OneOrMore[Limit],
    min_bytes: int, mode: str,
) -> list[Task]:  # fmt: skip
    """One task per program, machine and limit.

    Raises:
        ValueError: a limit is wrong or below what any plan can reach, or there is a program and no machine.
    """
    if program is None:
        program, default_machine = small_task()
        machine = machine or default_machine
    programs, limits = several(program), several(limit)
    tasks = []
    for one in programs:
        for on in [None] if machine is None else several(machine):
            built, where = program_and_machine(one, on)
            least = least_residency(built, min_bytes, check_mode(mode))
            for each in limits:
                if (nbytes := limit_bytes(each, built)) < least:
                    raise ValueError(
                        f"limit: no plan of mode {mode!r} brings {built.name!r} below {least:,} bytes while tensors "
                        f"smaller than {min_bytes:,} bytes stay; got {nbytes:,}"
                    )
                tasks.append(Task(built, where, nbytes, min_bytes, mode))
    return tasks


def several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def observation_space(batch: Batch) -> spaces.Dict:
    """The space of the observations described in the module's docstring."""
    nodes = batch.size
    return spaces.Dict({
        "nodes": spaces.Box(-np.inf, np.inf, (nodes, OBSERVED), np.float32),
        "action_mask": spaces.Box(0, 1, (nodes * batch.forms,), np.int8),
        "current": spaces.Discrete(nodes),
        "program": spaces.Discrete(len(batch.tasks)),
    })  # fmt: skip


class _OverBatch:
    """What both environments have: a batch, views of its buffers, and the best plans so far."""

    _batch: Batch
    _best: dict[int, tuple[float, Plan]]  # by task: overhead and plan

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

    @property
    def best_plans(self) -> tuple[Plan | None, ...]:
        """Of each task the plan of least overhead with which an episode has ended; None before there is one."""
        return tuple(self._best[t][1] if t in self._best else None for t in range(len(self.tasks)))

    @property
    def best_plan(self) -> Plan | None:
        """That of the first task, which is the only one unless several were asked for."""
        return self.best_plans[0]

    def _finished(self, i: int) -> Plan:
        """The plan with which the episode of walk i has ended."""
        batch = self._batch
        plan, task, overhead = batch.plan(i), int(batch.walks[i, columns.TASK]), float(batch.overhead[i])
        if task not in self._best or overhead < self._best[task][0]:
            self._best[task] = overhead, plan
        return plan


class MemoryEnv(_OverBatch, gymnasium.Env[Observation, np.int64]):
    """One episode at a time over one or more tasks, drawn by the environment's seed.

    Args:
        program: one or several, each a Program, a name (tasks.py) or a path; None: a small built-in task.
        machine: the machine they run on, or its preset or path; or several. None: that of the named program.
        limit: fraction of the peak (up to 1), bytes, or a size such as "24GiB"; or several. Tasks are every program on
            every machine under every limit.
        min_bytes: tensors below this size are left out.
        mode: "swap", "recompute" or "joint".
        reward: "paper": the change in simulated time of the plan so far; "causal": the stall as the clock advances.
            Both sum to −overhead.
        invalid: what an action does that may not be taken: "end" the episode as a dead end does, or "ignore": nothing.
        actions: "paper"; "full": each in several forms (task.py); or with one of them, "copy", "keep" or "at".
        copy: False: observations and masks are views of the environment's buffers, which the next call changes.
        render_mode: "ansi": text; "rgb_array": a picture, uint8 (450, 800, 3); None: neither (render.py).

    Raises:
        ValueError: of any of these.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}  # type: ignore[misc]

    def __init__(
        self, program: OneOrMore[ProgramLike] | None = None, machine: OneOrMore[MachineLike] | None = None,
        limit: OneOrMore[Limit] = 0.7, min_bytes: int = 2**20, mode: str = "joint", reward: str = "paper",
        invalid: str = "end", actions: str = "paper", copy: bool = True, render_mode: str | None = None,
    ):  # fmt: skip
        if render_mode is not None:
            one_of("render_mode", render_mode, self.metadata["render_modes"])
        self.render_mode, self._best = render_mode, {}
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
        """Starts an episode; ``options={"task": i}`` chooses its task.

        Raises:
            ValueError: there is no such option or task.
        """
        task = chosen_task(options, len(self.tasks))
        super().reset(seed=seed)
        if seed is not None:
            self._batch.seed(0, walk_seed(seed))
        self._batch.reset(task=task)
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes the action of a node; see the module's docstring."""
        batch = self._batch
        self._action[0] = action
        batch.step(self._action)
        info = self._info()
        if batch.terminated[0] and batch.feasible[0]:
            info["plan"] = self._finished(0)
        return self._observation(), float(batch.rewards[0]), bool(batch.terminated[0]), False, info

    def render(self) -> Any:
        """The memory against the limit, what is on the way, what has left; see render.py."""
        if self.render_mode is None:
            gymnasium.logger.warn('There is nothing to render: make the environment with render_mode="rgb_array"')
            return None
        scene = Scene.of(self._batch, 0)
        return scene.text() if self.render_mode == "ansi" else scene.picture()

    def action_masks(self) -> NDArray[np.bool_]:
        """(N F,) which actions are valid now (the name that sb3-contrib's MaskablePPO looks for)."""
        mask: NDArray[np.bool_] = self._mask.copy()
        return mask

    def plan(self, planner: str = "") -> Plan:
        """The plan so far."""
        return self._batch.plan(0, planner)

    def _observation(self) -> Observation:
        out = {key: view.copy("K") for key, view in self._shown.items()} if self._copy else dict(self._shown)
        return {**out, "current": self._batch.current[0], "program": self._batch.walks[0, columns.TASK]}

    def _info(self) -> dict[str, Any]:
        batch = self._batch
        return {
            "action_mask": self._shown["action_mask"].copy() if self._copy else self._shown["action_mask"],
            "overhead": float(overheads(batch)[0]),
            "iteration_ns": int(batch.walks[0, columns.ITERATION]),
            "feasible": bool(batch.feasible[0]),
            "invalid": bool(batch.invalid[0]),
        }


def shown(batch: Batch) -> Observation:
    """The observations of all walks, as views of the batch's buffers."""
    return {"nodes": batch.nodes.transpose(0, 2, 1), "action_mask": batch.mask, "current": batch.current,
            "program": batch.walks[:, columns.TASK]}  # fmt: skip


def overheads(batch: Batch) -> NDArray[np.float64]:
    """(M,) of the plans so far; NaN in a dead end, where there is no plan."""
    return np.where(batch.walks[:, columns.DEAD_END] != 0, np.nan, batch.overhead)


def walk_seed(seed: int) -> int:
    """The state of the generator of a walk, of the environment's seed."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))


class MemoryVectorEnv(_OverBatch, BatchVectorEnv):
    """Many walks stepped in one compiled call by all cores, without processes.

    The arguments are those of MemoryEnv, with ``num_envs`` and Gymnasium's ``autoreset_mode``: an episode that ends is
    begun anew by the next step, whose action is ignored (NEXT_STEP); by the step that ends it, with what it ended in as
    ``final_obs`` and ``final_info`` (SAME_STEP); or by ``reset(options={"reset_mask": ...})`` (DISABLED). With a
    ``seed``, environment i draws as a MemoryEnv with ``seed + i``. ``max_episode_steps``: episodes are truncated then.
    """

    def __init__(
        self, num_envs: int, program: OneOrMore[ProgramLike] | None = None,
        machine: OneOrMore[MachineLike] | None = None, limit: OneOrMore[Limit] = 0.7, min_bytes: int = 2**20,
        mode: str = "joint", reward: str = "paper", invalid: str = "end", actions: str = "paper", copy: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, max_episode_steps: int | None = None,
    ):  # fmt: skip
        batch = Batch(
            make_tasks(program, machine, limit, min_bytes, mode), num_envs, reward, invalid, actions,
            AutoresetMode(autoreset_mode) == AutoresetMode.NEXT_STEP,
        )  # fmt: skip
        space = observation_space(batch)
        super().__init__(
            num_envs, batch, autoreset_mode, max_episode_steps, spaces.Discrete(batch.mask.shape[1]), space
        )
        self._copy, self._best = copy, {}
        self._look()

    def _look(self) -> None:
        self._shown, self._mask = shown(self._batch), self._batch.mask.view(np.bool_)

    def _seed(self, i: int, seed: int) -> None:
        self._batch.seed(i, walk_seed(seed))

    def _begin(self, which: NDArray[np.bool_], task: int | None) -> None:
        self._batch.reset(which, task)

    def _act(self, actions: NDArray[np.int64], over: NDArray[np.bool_]) -> None:
        self._batch.step(actions)  # the batch knows by itself what is over

    def _over(self) -> NDArray[Any]:
        return self._batch.walks[:, columns.OVER]

    def _endings(self, ended: NDArray[np.bool_]) -> dict[str, Any]:
        """The plans with which episodes have ended."""
        ended = ended & self._batch.terminated & self._batch.feasible
        plans = np.full(self.num_envs, None, object)
        for i in np.flatnonzero(ended).tolist():
            plans[i] = self._finished(i)
        return {"plan": plans, "_plan": ended} if ended.any() else {}

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
            "action_mask": batch.mask.copy() if self._copy else batch.mask,
            "overhead": overheads(batch),
            "iteration_ns": batch.walks[:, columns.ITERATION].copy(),
            "feasible": batch.feasible.copy(),
            "invalid": batch.invalid.copy(),
        }
