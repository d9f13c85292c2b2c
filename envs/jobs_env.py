"""``GpuMemoryJobs-v0``: the walk over several jobs as a Gymnasium environment, and a vector environment; both are
batches of compiled walks (jobs_batch.py). The action is the number of a node; node 0 is "enough". The observation is a
dictionary (N nodes: those of all jobs; scenarios are padded to the largest).

- ``nodes`` (N, 10) float32: the paper's six features (DQN paper, section 4.4.1), relief, the job's load, its share of
  the memory and what it still has to do. Zeros where the node's job is not there.
- ``moment`` (4,) float32: planned peak over the limit, free memory, how many jobs are there, time left.
- ``action_mask`` (N,) int8: which nodes are actions that may be taken now; never wrong.
- ``job`` (N,) int64: the job that a node belongs to; -1: node 0, a job that is not there, or padding.
- ``task`` int64: index into ``env.unwrapped.tasks``, which hold the scenario and the static graph.

README.md says more of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from envs.graph import OFFLOAD
from envs.jobs_batch import JobsBatch
from envs.jobs_columns import ENDED, PHASE, TASK
from envs.jobs_task import LEFT, TIME_LEFT, JobActions, JobsTask, Scenario
from envs.memory_env import small_program, small_task
from envs.vector_env import BatchVectorEnv, Observation, chosen_task
from simulator import Job, Plan, Recompute, Swap


def small_scenario() -> Scenario:
    """Three jobs that come one after the other, in three fifths of the memory that they need together."""
    first, machine = small_task()
    second = small_program("narrow in the middle", [12, 8, 5, 3, 3, 5, 8, 12])
    third = small_program("wide in the middle", [3, 5, 9, 12, 12, 9, 5, 3])
    jobs = (
        Job("a", first, Plan(), iterations=12),
        Job("b", second, Plan(), arrives_ns=60_000_000, iterations=8),
        Job("c", third, Plan(), arrives_ns=130_000_000, leaves_ns=300_000_000),
    )
    return Scenario(jobs, machine, int(0.6 * sum(job.program.peak_bytes for job in jobs)))


def make_tasks(scenario: Scenario | Sequence[Scenario] | None, min_bytes: int, mode: str) -> list[JobsTask]:
    """One task per scenario; raises as JobsTask."""
    given = small_scenario() if scenario is None else scenario
    known: dict[str, dict[str, JobActions]] = {}  # by machine
    return [
        JobsTask(one, min_bytes, mode, known.setdefault(repr(one.machine), {}))
        for one in ([given] if isinstance(given, Scenario) else given)
    ]


def observation_space(batch: JobsBatch) -> spaces.Dict:
    """The space of the observations described in the module's docstring."""
    nodes = batch.size
    return spaces.Dict({
        "nodes": spaces.Box(-np.inf, np.inf, (nodes, LEFT + 1), np.float32),
        "moment": spaces.Box(-np.inf, np.inf, (TIME_LEFT + 1,), np.float32),
        "action_mask": spaces.Box(0, 1, (nodes,), np.int8),
        "job": spaces.Box(-1, max(len(task.alone_ns) for task in batch.tasks), (nodes,), np.int64),
        "task": spaces.Discrete(len(batch.tasks)),
    })  # fmt: skip


def shown(batch: JobsBatch) -> Observation:
    """The observations of all walks, as views of the batch's buffers."""
    return {"nodes": batch.nodes.transpose(0, 2, 1), "moment": batch.moment, "action_mask": batch.mask,
            "job": batch.job, "task": batch.walks[:, TASK]}  # fmt: skip


class JobsEnv(gymnasium.Env[Observation, np.int64]):
    """One episode at a time over one or more scenarios, drawn by the environment's seed. The rewards of an episode sum
    to -``info["slowdown"]`` of its end.

    Args:
        scenario: one or several; None: a small built-in one.
        min_bytes: tensors below this size are left out.
        mode: "swap", "recompute" or "joint".
        invalid: what an action does that may not be taken: "end" the episode, with DEAD_END_REWARD for each job of the
            scenario; or "ignore": nothing.
        copy: False: observations and masks are views of the environment's buffers, which the next call changes.

    Raises:
        ValueError: of any of these, or of a scenario (``JobsTask``).
        OutOfMemory: a kernel of a job does not fit under its scenario's limit.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # theirs is no ClassVar

    def __init__(
        self, scenario: Scenario | Sequence[Scenario] | None = None, min_bytes: int = 2**20, mode: str = "joint",
        invalid: str = "end", copy: bool = True,
    ):  # fmt: skip
        self._batch = batch = JobsBatch(make_tasks(scenario, min_bytes, mode), 1, invalid)
        self._copy, self._all = copy, np.ones(1, np.bool_)
        self._action, self._task = np.zeros((2, 1), np.int64)
        self._given: list[tuple[int, int, NDArray[np.int8], int]] = []  # time, job, what is taken, limit
        self._look()
        self.action_space = spaces.Discrete(batch.size)
        self.observation_space = cast("spaces.Space[Observation]", observation_space(batch))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has views of its own buffers."""
        self.__dict__ |= state
        self._look()

    def _look(self) -> None:
        self._shown = {key: view[0] for key, view in shown(self._batch).items() if key != "task"}

    @property
    def tasks(self) -> tuple[JobsTask, ...]:
        """What episodes are drawn from."""
        return self._batch.tasks

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"task": i}`` chooses its scenario.

        Raises:
            ValueError: there is no such option or task.
        """
        chosen = chosen_task(options, len(self.tasks))
        super().reset(seed=seed)
        count = len(self.tasks)
        self._task[0] = range(count)[int(self.np_random.integers(count)) if chosen is None else chosen]
        self._given = []
        self._batch.reset(self._all, self._task)
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes the action of a node; see the module's docstring."""
        batch = self._batch
        if action == 0 and not batch.walks[0, ENDED]:
            now = int(batch.walks[0, PHASE])
            self._given += [(now, *draft) for draft in batch.drafts(0)]
        self._action[0] = action
        batch.step(self._action, ~self._all, self._task)
        return self._observation(), float(batch.rewards[0]), bool(batch.terminated[0]), False, self._info()

    def action_masks(self) -> NDArray[np.bool_]:
        """(N,) which actions are valid now (the name that sb3-contrib's MaskablePPO looks for)."""
        mask: NDArray[np.bool_] = self._batch.mask[0].astype(np.bool_)
        return mask

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that have come, with all plans that they have got; for ``simulate_jobs``, on the task's machine."""
        task, jobs = self._batch.task(0), dict[int, Job]()
        for now, j, taken, limit in self._given:
            actions = task.actions[j]
            decisions = tuple(
                Swap(*actions.graph.gaps[g]) if taken[g] == OFFLOAD else Recompute(*actions.graph.gaps[g])
                for g in np.flatnonzero(taken >= 0).tolist()
            )
            plan = Plan.of(actions.program, decisions, "", limit, task.machine.name)
            if j not in jobs:
                jobs[j] = replace(task.scenario.jobs[j], plan=plan, switches=(), within=True)
            elif plan != jobs[j].plans[-1]:
                jobs[j] = replace(jobs[j], switches=(*jobs[j].switches, (now, plan)))
        return tuple(job for _, job in sorted(jobs.items()))

    def _observation(self) -> Observation:
        out = {key: view.copy("K") for key, view in self._shown.items()} if self._copy else dict(self._shown)
        return {**out, "task": self._batch.walks[0, TASK]}

    def _info(self) -> dict[str, Any]:
        batch = self._batch
        return {
            "action_mask": batch.mask[0].copy() if self._copy else batch.mask[0],
            "slowdown": float(batch.slowdown[0]),
            "time_ns": int(batch.walks[0, PHASE]),
            "invalid": bool(batch.invalid[0]),
        }


class JobsVectorEnv(BatchVectorEnv):
    """Many walks stepped in one compiled call by all cores, without processes.

    The arguments are those of JobsEnv, with ``num_envs`` and what MemoryVectorEnv has: ``autoreset_mode`` and
    ``max_episode_steps``. With a ``seed``, environment i draws as a JobsEnv with ``seed + i``.
    """

    def __init__(
        self, num_envs: int, scenario: Scenario | Sequence[Scenario] | None = None, min_bytes: int = 2**20,
        mode: str = "joint", invalid: str = "end", copy: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, max_episode_steps: int | None = None,
    ):  # fmt: skip
        batch = JobsBatch(make_tasks(scenario, min_bytes, mode), num_envs, invalid)
        space = observation_space(batch)
        super().__init__(num_envs, batch, autoreset_mode, max_episode_steps, spaces.Discrete(batch.size), space)
        self._copy, self._nobody = copy, np.zeros(num_envs, np.bool_)
        self._random = [seeding.np_random()[0] for _ in range(num_envs)]
        self._look()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has views of its own buffers."""
        self.__dict__ |= state
        self._look()

    def _look(self) -> None:
        self._shown = shown(self._batch)

    @property
    def tasks(self) -> tuple[JobsTask, ...]:
        """What episodes are drawn from."""
        return cast("tuple[JobsTask, ...]", self._batch.tasks)

    def action_masks(self) -> NDArray[np.bool_]:
        """(num_envs, N)."""
        return cast("NDArray[np.bool_]", self._batch.mask.astype(np.bool_))

    def _seed(self, i: int, seed: int) -> None:
        self._random[i] = seeding.np_random(seed)[0]

    def _drawn(self, which: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The tasks of episodes that begin."""
        tasks = np.zeros(self.num_envs, np.int64)
        for i in np.flatnonzero(which).tolist():
            tasks[i] = self._random[i].integers(len(self.tasks))
        return tasks

    def _begin(self, which: NDArray[np.bool_], task: int | None) -> None:
        chosen = None if task is None else np.full(self.num_envs, range(len(self.tasks))[task])
        self._batch.reset(which, self._drawn(which) if chosen is None else chosen)

    def _act(self, actions: NDArray[np.int64], over: NDArray[np.bool_]) -> None:
        self._batch.step(actions, over, self._drawn(over))

    def _over(self) -> NDArray[Any]:
        return cast("NDArray[Any]", self._batch.walks[:, ENDED])

    def _observations(self) -> Observation:
        if not self._copy:
            return self._shown
        nodes = self._batch.copied_nodes().transpose(0, 2, 1)
        return {"nodes": nodes, **{key: view.copy() for key, view in self._shown.items() if key != "nodes"}}

    def _infos(self) -> dict[str, Any]:
        batch = self._batch
        return {
            "action_mask": batch.mask.copy() if self._copy else batch.mask,
            "slowdown": batch.slowdown.copy(),
            "time_ns": batch.walks[:, PHASE].copy(),
            "invalid": batch.invalid.copy(),
        }
