"""Episode of ``GpuMemory-v1`` without Gymnasium: the agent walks through one iteration and decides evictions.

The position p is the number of completed kernels. "Do nothing" moves to the next position at which a gap opens or a
kernel cannot start. "Offload" swaps out a tensor whose gap is open; the agent waits for the transfer, rounded up to a
kernel. "Remove" drops a tensor, which is recomputed later. After both the agent stays at p while kernel p cannot
start. The episode ends when the rest of the iteration fits, or in a dead end: kernel p cannot start and no action is
valid. The rules are in compiled_walk.py, their readable reference in tests/oracle/walk.py, and rewards and deviations
from the paper in gpu_memory.md.

Source: "GPU memory management for neural networks using deep Q-network" (2020), sections 4.5 to 4.8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.batch import Batch
from envs.task import PLAIN, Task
from simulator.plan import Plan


class Step(NamedTuple):
    """Result of one action."""

    reward: float
    terminated: bool  # whether the episode has ended
    dead_end: bool  # whether it ended without a plan that fits


class Walk:
    """One episode at a time of one task: a compiled batch of one walk.

    Args:
        reward: "paper": change in the simulated time of the partial plan, with the limit enforced up to the position;
            "causal": stall and recomputation time since the last step.
        actions: "paper"; "full": each in several forms (task.py); "copy", "keep" or "at": with that form only.

    Raises:
        ValueError: if ``reward`` or ``actions`` is unknown.
    """

    def __init__(self, task: Task, reward: str = "paper", actions: str = "paper"):
        self.task = task
        self._causal = reward == "causal"
        self._batch = Batch((task,), 1, reward, actions=actions, threads=1)
        self._action = np.zeros(1, np.int64)
        walks = self._batch.walks  # reading a field through the record is four times slower
        self._position = walks["position"]
        self._iteration = walks["iteration"]
        self._ended = walks["ended"]
        self._dead_end = walks["dead_end"]
        self._mask: NDArray[np.bool_] = self._batch.mask[0].view(np.bool_)
        self.reset()

    def reset(self) -> None:
        """Resets the walk to position 0 with an empty plan."""
        self._batch.reset()

    @property
    def position(self) -> int:
        """Number of completed kernels."""
        return int(self._position[0])

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return bool(self._ended[0])

    @property
    def dead_end(self) -> bool:
        """Whether the episode has ended without a feasible plan."""
        return bool(self._dead_end[0])

    @property
    def iteration_ns(self) -> int:
        """Simulated iteration time of the partial plan."""
        return int(self._iteration[0])

    @property
    def overhead(self) -> float:
        """Simulated time of the partial plan / ideal time - 1; NaN in a dead end."""
        return float(self._batch.overhead[0])

    @property
    def rows(self) -> NDArray[np.int64]:
        """Partial plan (simulator.compiled.engine.rows_of), valid until the next action."""
        return self._batch.plan_rows(0)

    @property
    def features(self) -> NDArray[np.float32]:
        """Node features (graph.py), float32 (N, OBSERVED), valid until the next action."""
        features: NDArray[np.float32] = self._batch.nodes[0].T
        return features

    @property
    def current(self) -> int:
        """Current node: the last operation that has begun."""
        return int(self._batch.current[0])

    def plan(self, planner: str = "") -> Plan:
        """Returns the partial plan."""
        return self._batch.plan(0, planner)

    def mask(self) -> NDArray[np.bool_]:
        """Returns the valid actions, bool (N F,), as a view that the next action changes.

        Node n in form f is at n + N * f. After the end only node 0 is valid.
        """
        return self._mask

    def step(self, node: int, form: int = PLAIN) -> Step:
        """Takes the action of a node in one of its forms; ``node`` may also be node + N * form.

        Raises:
            ValueError: if the action is not valid now.
        """
        code = node + self._batch.size * form
        if self.done or code >= len(self._mask) or not self._mask[code]:
            raise ValueError(f"node {node} is not a valid action now (form {form}); choose where the action mask is 1")
        self._action[0] = code
        self._batch.step(self._action)
        if self.done or not self._causal:
            self.task.engine.calls += 1
        return Step(float(self._batch.rewards[0]), self.done, self.dead_end)
