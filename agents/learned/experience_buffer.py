"""Experience replay (Algorithm 1's D): what changes is stored per transition, the rest once per program.

Whole episodes are added, so that the state n steps after a transition is n places further on in the ring, and is
overwritten later than the transition itself. No state is stored twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from envs.graph import FEATURES, STATIC


class State(NamedTuple):
    """The part of an observation that changes."""

    dynamic: NDArray[np.float16]  # (N, 3): the node features of the moment, from column STATIC on
    current: int
    mask: NDArray[np.bool_]  # (A,)


class Batch(NamedTuple):
    """A sample of B transitions; ``next_*`` is the state after n steps, meaningless where not ``more``."""

    place: NDArray[np.int64]  # in the ring
    dynamic: NDArray[np.float16]
    current: NDArray[np.int64]
    action: NDArray[np.int64]
    reward: NDArray[np.float32]  # discounted sum over n steps
    more: NDArray[np.bool_]  # the episode went on after n steps
    next_dynamic: NDArray[np.float16]
    next_current: NDArray[np.int64]
    next_mask: NDArray[np.bool_]


class ExperienceBuffer:
    """A ring of transitions.

    Args:
        capacity: transitions.
    """

    def __init__(self, capacity: int, nodes: int, actions: int):
        self.capacity = capacity
        self.size = self.head = 0
        self.arrays: dict[str, NDArray[Any]] = {
            "dynamic": np.zeros((capacity, nodes, FEATURES - STATIC), np.float16),
            "current": np.zeros(capacity, np.int64),
            "mask": np.zeros((capacity, actions), np.bool_),
            "action": np.zeros(capacity, np.int64),
            "reward": np.zeros(capacity, np.float32),
            "ahead": np.zeros(capacity, np.int64),  # places to the state after n steps; 0: the episode ended
        }

    def add(self, trail: list[tuple[State, int, float]], n_step: int, gamma: float = 1.0) -> None:
        """Adds an ended episode, (state, action, reward) per step; one longer than the ring loses its start."""
        rewards = np.array([reward for _, _, reward in trail])
        discounts = gamma ** np.arange(len(trail))
        a = self.arrays
        for i in range(max(0, len(trail) - self.capacity), len(trail)):
            (dynamic, current, mask), action, _ = trail[i]
            end = min(i + n_step, len(trail))
            at = self.head
            a["dynamic"][at], a["current"][at], a["mask"][at], a["action"][at] = dynamic, current, mask, action
            a["reward"][at] = rewards[i:end] @ discounts[: end - i]
            a["ahead"][at] = end - i if end < len(trail) else 0
            self.head = (self.head + 1) % self.capacity
            self.size = min(self.size + 1, self.capacity)

    def sample(self, batch: int, rng: np.random.Generator) -> Batch:
        """Draws transitions with replacement."""
        a = self.arrays
        index = rng.integers(self.size, size=batch)
        later = (index + a["ahead"][index]) % self.capacity
        return Batch(
            index, a["dynamic"][index], a["current"][index], a["action"][index], a["reward"][index],
            a["ahead"][index] > 0, a["dynamic"][later], a["current"][later], a["mask"][later],
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """For the checkpoint: the filled part."""
        out: dict[str, Any] = {k: torch.from_numpy(v[: self.size].copy()) for k, v in self.arrays.items()}
        return {**out, "size": self.size, "head": self.head}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.size, self.head = int(state["size"]), int(state["head"])
        for key, array in self.arrays.items():
            array[: self.size] = state[key].numpy()
