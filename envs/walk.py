"""An episode without Gymnasium: the agent walks through one iteration and decides what leaves.

Actions, transitions and rewards of "GPU memory management for neural networks using deep Q-network", sections 4.5 to
4.8. The position p is the number of kernels that have ended. "Do nothing" goes to the next position at which another
gap opens or a kernel cannot start. "Offload" swaps out a tensor whose gap is open, and holds the agent until the
transfer ends, rounded up to the next kernel. "Remove" drops one, to be recomputed. While kernel p cannot start for
lack of memory, the agent stays. The episode ends when nothing more need leave, or in a dead end: kernel p cannot start
and nothing can leave. README.md says why, what the rewards are, and what is chosen where the paper is silent.
compiled_walk.py has the rules; tests/oracle/walk.py states them to be read, and the two are tested equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.batch import Batch
from envs.task import PLAIN, Task
from simulator.plan import Plan


class Step(NamedTuple):
    """The result of one action."""

    reward: float
    terminated: bool
    dead_end: bool


class Walk:
    """One episode at a time of one task: a compiled batch of one.

    Args:
        reward: "paper": the change in simulated time of the plan so far, with the limit enforced up to the position;
            "causal": what the present iteration has waited so far, and what runs again.
        actions: "paper"; "full": each in several forms (task.py); or with one of them, "copy", "keep" or "at".

    Raises:
        ValueError: unknown reward or actions.
    """

    def __init__(self, task: Task, reward: str = "paper", actions: str = "paper"):
        self.task, self._causal = task, reward == "causal"
        self._batch = Batch((task,), 1, reward, actions=actions, threads=1)
        self._action = np.zeros(1, np.int64)
        walks = self._batch.walks  # a field of the record itself takes four times as long to read
        self._position, self._iteration = walks["position"], walks["iteration"]
        self._ended, self._dead_end = walks["ended"], walks["dead_end"]
        self._mask: NDArray[np.bool_] = self._batch.mask[0].view(np.bool_)
        self.reset()

    def reset(self) -> None:
        """Back to position 0 with an empty plan."""
        self._batch.reset()

    @property
    def position(self) -> int:
        """How many kernels have ended."""
        return int(self._position[0])

    @property
    def done(self) -> bool:
        """Has the episode ended?"""
        return bool(self._ended[0])

    @property
    def dead_end(self) -> bool:
        """Has it ended without a plan that fits?"""
        return bool(self._dead_end[0])

    @property
    def iteration_ns(self) -> int:
        """Simulated time of the plan so far."""
        return int(self._iteration[0])

    @property
    def overhead(self) -> float:
        """Simulated time of the plan so far over the ideal time, less 1; NaN in a dead end."""
        return float(self._batch.overhead[0])

    @property
    def rows(self) -> NDArray[np.int64]:
        """The plan so far (simulator.compiled.engine.rows_of), until the next action."""
        return self._batch.plan_rows(0)

    @property
    def features(self) -> NDArray[np.float32]:
        """(N, OBSERVED) node features (graph.py), until the next action."""
        features: NDArray[np.float32] = self._batch.nodes[0].T
        return features

    @property
    def current(self) -> int:
        """The node under execution: the last operation that has begun."""
        return int(self._batch.current[0])

    def plan(self, planner: str = "") -> Plan:
        """The plan so far."""
        return self._batch.plan(0, planner)

    def mask(self) -> NDArray[np.bool_]:
        """(N F,) which actions may be taken now, until the next one; after the end, only do nothing. Node n in form f
        is at n + N * f."""
        return self._mask

    def step(self, node: int, form: int = PLAIN) -> Step:
        """Takes the action that a node represents, in one of its forms; ``node`` may be node + N * form itself.

        Raises:
            ValueError: the action is not valid now.
        """
        code = node + self._batch.size * form
        if self.done or code >= len(self._mask) or not self._mask[code]:
            raise ValueError(f"node {node} is not a valid action now" + (f" in form {form}" if form else ""))
        self._action[0] = code
        self._batch.step(self._action)
        if self.done or not self._causal:
            self.task.engine.calls += 1
        return Step(float(self._batch.rewards[0]), self.done, self.dead_end)
