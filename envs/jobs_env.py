"""``GpuMemoryJobs-v0``: the walk of jobs_walk.py as a Gymnasium environment. The action is the number of a node; node 0
is "enough". The observation is a dictionary (N nodes: those of all jobs; scenarios are padded to the largest).

- ``nodes`` (N, 10) float32: the paper's six features (DQN paper, section 4.4.1), relief, the job's load, its share of
  the memory and what it still has to do. Zeros where the node's job is not there.
- ``moment`` (4,) float32: planned peak over the limit, free memory, how many jobs are there, time left.
- ``action_mask`` (N,) int8: which nodes are actions that may be taken now; never wrong.
- ``job`` (N,) int64: the job that a node belongs to; -1: node 0, a job that is not there, or padding.
- ``task`` (1,) int64: index into ``env.unwrapped.tasks``, which hold the scenario and the static graph.

README.md says more of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.batch import INVALID, one_of
from envs.jobs_walk import LEFT, TIME_LEFT, JobActions, JobsTask, JobsWalk, Scenario
from envs.memory_env import Observation, chosen_task, small_program, small_task
from envs.task import DEAD_END_REWARD
from simulator import Job, Plan


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


class JobsEnv(gymnasium.Env[Observation, np.int64]):
    """One episode at a time over one or more scenarios, drawn by the environment's seed. The rewards of an episode sum
    to -``info["slowdown"]`` of its end.

    Args:
        scenario: one or several; None: a small built-in one.
        min_bytes: tensors below this size are left out.
        mode: "swap", "recompute" or "joint".
        invalid: what an action does that may not be taken: "end" the episode, with DEAD_END_REWARD for each job of the
            scenario; or "ignore": nothing.

    Raises:
        ValueError: of any of these, or of a scenario (``JobsTask``).
        OutOfMemory: a kernel of a job does not fit under its scenario's limit.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # theirs is no ClassVar

    def __init__(
        self, scenario: Scenario | Sequence[Scenario] | None = None, min_bytes: int = 2**20, mode: str = "joint",
        invalid: str = "end",
    ):  # fmt: skip
        self.invalid = one_of("invalid", invalid, INVALID)
        given = small_scenario() if scenario is None else scenario
        scenarios = [given] if isinstance(given, Scenario) else list(given)
        known: dict[str, dict[str, JobActions]] = {}  # by machine
        self.tasks = tuple(JobsTask(one, min_bytes, mode, known.setdefault(repr(one.machine), {})) for one in scenarios)
        self.size = nodes = max(len(task.graph) for task in self.tasks)
        self._task = 0
        self._walk = JobsWalk(self.tasks[0])
        self.action_space = spaces.Discrete(nodes)
        self.observation_space = cast("spaces.Space[Observation]", spaces.Dict({
            "nodes": spaces.Box(-np.inf, np.inf, (nodes, LEFT + 1), np.float32),
            "moment": spaces.Box(-np.inf, np.inf, (TIME_LEFT + 1,), np.float32),
            "action_mask": spaces.Box(0, 1, (nodes,), np.int8),
            "job": spaces.Box(-1, max(len(task.alone_ns) for task in self.tasks), (nodes,), np.int64),
            "task": spaces.Box(0, len(self.tasks), (1,), np.int64),
        }))  # fmt: skip

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; ``options={"task": i}`` chooses its scenario."""
        super().reset(seed=seed)
        chosen = chosen_task(options, len(self.tasks))
        self._task = int(self.np_random.integers(len(self.tasks)) if chosen is None else chosen)
        self._walk = JobsWalk(self.tasks[self._task])
        return self._shown()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Takes the action of a node; see the module's docstring."""
        walk, reward, more = self._walk, 0.0, {}
        if 0 <= action < len(walk.task.graph) and walk.mask()[action]:
            reward = walk.step(int(action))
        else:
            more = {"invalid": True}
            if self.invalid == "end":
                reward = DEAD_END_REWARD * len(walk.task.alone_ns)
                walk.end()
        observation, info = self._shown()
        return observation, reward, walk.done, False, info | more

    def action_masks(self) -> NDArray[np.bool_]:
        """(N,) which actions are valid now (the name that sb3-contrib's MaskablePPO looks for)."""
        mask = np.zeros(self.size, np.bool_)
        own = self._walk.mask()
        mask[: len(own)] = own
        return mask

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that have come, with all plans that they have got; for ``simulate_jobs``, on the task's machine."""
        return tuple(job for _, job in sorted(self._walk.planned.items()))

    def _shown(self) -> tuple[Observation, dict[str, Any]]:
        """Observation and info, in arrays that nobody else has."""
        walk, task, mask = self._walk, self.tasks[self._task], self.action_masks()
        nodes, moment = np.zeros((self.size, LEFT + 1), np.float32), np.zeros(TIME_LEFT + 1, np.float32)
        walk.show(nodes, moment)
        job = np.full(self.size, -1, np.int64)
        job[: len(task.job)] = np.where(np.isin(task.job, walk.there), task.job, -1)
        observation: Observation = {"nodes": nodes, "moment": moment, "action_mask": mask.astype(np.int8), "job": job,
                                    "task": np.array([self._task])}  # fmt: skip
        return observation, {"action_mask": mask, "slowdown": walk.slowdown, "time_ns": walk.now_ns}
