"""Deep Q-network of the DQN paper: Algorithm 1 with fitted Q-iteration on the environment of envs/walk.py.

Config ``agent=dqn_paper``. As in the paper (Figure 3), the returned plan is the best one found; the final greedy
policy's plan is reported separately. Where the paper is silent: γ = 1; rewards are multiplied by ``reward_scale``; an
update follows every ``update_every`` transitions; invalid actions are masked in the argmax, in exploration and in
equation 5. Settings beyond the paper's (dqn_config.py) are for custom networks (structure2vec.py). ``Trainer.step``
and ``Trainer.update`` contain the algorithm.

Source: "GPU memory management for neural networks using deep Q-network" (2020), Algorithm 1, equations 4 and 5.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.learned.checkpoint import TrainingStateError, read_training_state
from agents.learned.dqn_config import PaperConfig
from agents.learned.optimization import MASKED, descend, one_thread
from agents.learned.structure2vec import CustomNetwork, Structure2Vec
from agents.learned.training import Episode, Trainer as OneTask, check_reachable
from envs.graph import FEATURES, STATIC
from envs.task import Task
from envs.walk import Walk
from simulator import Plan
from simulator.machine import Machine
from simulator.program import Program


class State(NamedTuple):
    """Dynamic part of an observation."""

    dynamic: NDArray[np.float16]  # (N, 3): dynamic node features, from column STATIC on
    current: int  # node of the walk
    mask: NDArray[np.bool_]  # (A,), valid actions


class ExperienceBuffer:
    """Experience replay (D of Algorithm 1): ring buffer of transitions that stores the dynamic part of each state once.

    Episodes are added as a whole, so the state n steps after a transition is n places ahead in the ring and is
    overwritten later than the transition.

    Args:
        capacity: maximum number of transitions.
        nodes: N.
        actions: A.
    """

    def __init__(self, capacity: int, nodes: int, actions: int):
        self.capacity = capacity
        self.size = self.head = 0
        dynamic = ("dynamic", np.float16, (nodes, FEATURES - STATIC))
        self.ring = np.zeros(
            capacity,
            np.dtype(
                [
                    dynamic,
                    ("current", np.int64),
                    ("mask", np.bool_, (actions,)),  # a State
                    ("action", np.int64),
                    ("reward", np.float32),  # discounted sum over n steps
                    ("ahead", np.int64),  # places to the state after n steps; 0: the episode ended
                ],
                align=True,
            ),
        )

    def add(self, trail: list[tuple[State, int, float]], n_step: int, gamma: float = 1.0) -> None:
        """Adds a finished episode of (state, action, reward); an episode longer than the ring loses its start.

        Args:
            trail: The episode in order.
            n_step: Number of rewards that a transition sums.
            gamma: Discount per step.
        """
        rewards = np.array([reward for _, _, reward in trail])
        discounts = gamma ** np.arange(len(trail))
        for i in range(max(0, len(trail) - self.capacity), len(trail)):
            state, action, _ = trail[i]
            end = min(i + n_step, len(trail))
            ahead = end - i if end < len(trail) else 0
            self.ring[self.head] = (*state, action, rewards[i:end] @ discounts[: end - i], ahead)
            self.head = (self.head + 1) % self.capacity
            self.size = min(self.size + 1, self.capacity)

    def sample(self, batch: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draws transitions uniformly with replacement; returns them, and those n steps later (if ``ahead`` > 0)."""
        index = rng.integers(self.size, size=batch)
        transitions = self.ring[index]
        return transitions, self.ring[(index + transitions["ahead"]) % self.capacity]

    def state(self) -> dict[str, Any]:
        """Returns the filled part for a checkpoint."""
        filled = self.ring[: self.size]
        out: dict[str, Any] = {key: torch.from_numpy(filled[key].copy()) for key in self.ring.dtype.names or ()}
        return {**out, "size": self.size, "head": self.head}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the transitions of a ``state``."""
        self.size = int(state["size"])
        self.head = int(state["head"])
        for key in self.ring.dtype.names or ():
            self.ring[key][: self.size] = state[key].numpy()


class Variant(NamedTuple):
    """Reward and actions of Walk, and an optional custom network class (structure2vec.py)."""

    reward: str = "paper"  # as in ``MemoryEnv``, also ``actions``
    actions: str = "paper"
    network: type[nn.Module] | None = None

    @property
    def label_suffix(self) -> str:
        """Suffix of the agent's name in learning curves."""
        return "" if self.actions == "paper" else f", {self.actions}"

    @property
    def names(self) -> list[str]:
        """Entries that identify the variant in a checkpoint."""
        network = f"{self.network.__module__}:{self.network.__qualname__}" if self.network else ""
        return [self.reward, self.actions, network]


class Trainer(OneTask):
    """Algorithm 1. Each ``step`` moves every walk by one action and updates the network.

    Raises:
        Infeasible: if the limit cannot be reached.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        limit: int,
        config: PaperConfig,
        seed: int,
        variant: Variant = Variant(),  # noqa: B008
    ):
        super().__init__(program, machine, limit, config, seed, "episodes", "history")
        self.config: PaperConfig = config
        check_reachable(program, limit, config.min_bytes, config.mode)
        self.task = Task(program, machine, limit, config.min_bytes, config.mode)
        self.variant = variant
        one_thread()
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.q = self._network()
        if config.weights:
            self._initialize(Path(config.weights).expanduser())
        self.target = self._network()
        self.target.load_state_dict(self.q.state_dict())
        adam = config.optimizer == "adam"
        self.optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(self.q.parameters(), config.learning_rate)
        self.actions = self.q.codes.numpy()  # (A,) node of each action, or node + N * form
        self.static = torch.from_numpy(self.task.graph.features)
        self.buffer = ExperienceBuffer(config.buffer_size, len(self.task.graph), len(self.actions))
        self.walks = [self._walk() for _ in range(config.num_envs)]
        self.trails: list[list[tuple[State, int, float]]] = [[] for _ in self.walks]  # state, action, reward
        self.pending_transitions = 0  # transitions since the last update
        self.updates = 0
        self.losses: list[float] = []

    def _walk(self) -> Walk:
        return Walk(self.task, self.variant.reward, self.variant.actions)

    def _network(self) -> Structure2Vec | CustomNetwork:
        c = self.config
        forms = self.task.forms if self.variant.actions != "paper" else 1
        if self.variant.network is not None:
            return CustomNetwork(self.variant.network, self.task.graph, c.features, forms)
        sizes = c.embedding_size, c.message_passing_steps
        return Structure2Vec(self.task.graph, c.features, *sizes, c.pool, c.mixing, forms)

    def _initialize(self, path: Path) -> None:
        """Loads the network of the checkpoint ``path``, of any program; raises TrainingStateError."""
        path = path / "checkpoint.pt" if path.is_dir() else path
        state = read_training_state(path)
        try:
            self.q.load_state_dict(state["q"])
        except (KeyError, TypeError, RuntimeError):
            raise TrainingStateError(
                f"agent.weights: the network of {path} has other sizes; copy embedding_size, features and mixing"
            ) from None

    @property
    def simulator_calls(self) -> int:
        """Simulator calls so far."""
        return self.task.engine.calls

    @property
    def epsilon(self) -> float:
        """Current probability of a random action."""
        c = self.config
        progress = min(1.0, len(self.history) / max(1.0, c.explore * c.episodes))
        return c.epsilon_start + (c.epsilon_end - c.epsilon_start) * progress

    def _state(self, walk: Walk) -> State:
        dynamic = walk.features[:, STATIC:FEATURES].astype(np.float16, order="C")
        return State(dynamic, walk.current, walk.mask()[self.actions])

    def _q(
        self, network: Structure2Vec | CustomNetwork, dynamic: NDArray[np.float16], current: NDArray[np.int64]
    ) -> Tensor:
        """Returns Q-values (B, A) of states given by dynamic features (B, N, 3) and current nodes (B,)."""
        moving = torch.from_numpy(dynamic).float().transpose(0, 1)[..., : self.config.features - STATIC]
        static = self.static[:, None].expand(-1, len(current), -1)
        q: Tensor = network(torch.cat([static, moving], -1), torch.from_numpy(current))[0]
        return q

    @torch.no_grad()
    def act(self, states: list[State], epsilon: float) -> NDArray[np.int64]:
        """Selects ε-greedy actions (Algorithm 1, lines 6 to 10): one index into ``actions`` per state."""
        actions = np.zeros(len(states), np.int64)
        explore = self.rng.random(len(states)) < epsilon
        for i in np.flatnonzero(explore):
            valid = np.flatnonzero(states[i].mask)
            actions[i] = self.rng.choice(valid)
        greedy = np.flatnonzero(~explore)
        if len(greedy):
            dynamic = np.stack([states[i].dynamic for i in greedy])
            q = self._q(self.q, dynamic, np.array([states[i].current for i in greedy])).numpy()
            mask = np.stack([states[i].mask for i in greedy])
            actions[greedy] = np.where(mask, q, MASKED).argmax(1)
        return actions

    def step(self) -> list[Episode]:
        """Runs lines 5 to 17 for every walk; returns the episodes that ended."""
        episodes = []
        states = [self._state(walk) for walk in self.walks]
        actions = self.act(states, self.epsilon)
        for walk, trail, state, action in zip(self.walks, self.trails, states, actions.tolist(), strict=True):
            result = walk.step(int(self.actions[action]))
            trail.append((state, action, result.reward * self.config.reward_scale))
            self.pending_transitions += 1
            if result.terminated:
                self.buffer.add(trail, self.config.n_step, self.config.gamma)
                episodes.append(self._log(walk, len(trail)))
                trail.clear()
                walk.reset()
        while self.pending_transitions >= self.config.update_every and self.buffer.size >= self.config.batch_size:
            self.pending_transitions -= self.config.update_every
            self.losses.append(self.update())
        return episodes

    def _log(self, walk: Walk, steps: int) -> Episode:
        feasible = not walk.dead_end
        if feasible and not walk.overhead >= self.best_overhead:  # best_overhead is NaN at first
            self.best = walk.plan("dqn_paper")
            self.best_overhead = walk.overhead
        loss = float(np.mean(self.losses)) if self.losses else math.nan
        self.losses = []
        self.history.append(
            Episode(
                len(self.history) + 1,
                walk.overhead,
                feasible,
                self.best_overhead,
                self.epsilon,
                loss,
                steps,
                self.task.engine.calls,
            )
        )
        return self.history[-1]

    def update(self) -> float:
        """Performs one minibatch update of fitted Q-iteration (lines 12 and 13); returns the loss."""
        c = self.config
        data, next_data = self.buffer.sample(c.batch_size, self.rng)
        has_next = data["ahead"] > 0  # whether the episode continued after n steps
        with torch.no_grad():  # equation 5: y is a constant
            y = torch.from_numpy(data["reward"])
            if has_next.any():
                mask = torch.from_numpy(next_data["mask"])
                next_q = self._q(self.target if c.target_every else self.q, next_data["dynamic"], next_data["current"])
                selector_q = self._q(self.q, next_data["dynamic"], next_data["current"]) if c.double else next_q
                best = selector_q.masked_fill(~mask, MASKED).argmax(1, keepdim=True)
                y = y + c.gamma**c.n_step * torch.where(torch.from_numpy(has_next), next_q.gather(1, best)[:, 0], 0.0)
        q = self._q(self.q, data["dynamic"], data["current"]).gather(1, torch.from_numpy(data["action"])[:, None])[:, 0]
        adam = c.optimizer == "adam"
        losses = nn.functional.huber_loss(q, y, reduction="none") if adam else (y - q) ** 2  # equation 4
        loss = descend(losses.mean(), self.q, self.optimizer, 10.0 if adam else None)
        self.updates += 1
        if c.target_every and self.updates % c.target_every == 0:
            self.target.load_state_dict(self.q.state_dict())
        return loss

    def greedy(self) -> Plan | None:
        """Returns the greedy policy's plan, or None if the policy reaches a dead end."""
        walk = self._greedy()
        return None if walk.dead_end else walk.plan("dqn_paper")

    def greedy_overhead(self) -> float:
        """Returns the overhead of the greedy policy's plan (NaN in a dead end); the training state is unchanged."""
        rng_state = self.rng.bit_generator.state
        calls = self.task.engine.calls
        walk = self._greedy()
        self.rng.bit_generator.state = rng_state
        self.task.engine.calls = calls
        return walk.overhead

    @torch.no_grad()
    def first_value(self) -> float:
        """Returns the largest Q-value of an episode's first state in units of the return, an estimate of −overhead."""
        state = self._state(self._walk())
        q = self._q(self.q, state.dynamic[None], np.array([state.current]))[0].numpy()
        return float(q[state.mask].max()) / self.config.reward_scale

    def _greedy(self) -> Walk:
        walk = self._walk()
        while not walk.done:
            walk.step(int(self.actions[self.act([self._state(walk)], 0.0)[0]]))
        return walk

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "variant": self.variant.names}

    def state(self) -> dict[str, Any]:
        """Returns the complete training state, from which the run resumes identically."""
        return {
            "q": self.q.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "numpy_rng": json.dumps(self.rng.bit_generator.state),
            "replay": self.buffer.state(),
            "trails": [[int(self.actions[action]) for _, action, _ in trail] for trail in self.trails],
            "started": self.pending_transitions,
            "updates": self.updates,
            "losses": list(self.losses),
            "calls": self.task.engine.calls,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the training state that ``state`` returned."""
        self.q.load_state_dict(state["q"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.buffer.restore(state["replay"])
        for walk, trail, nodes in zip(self.walks, self.trails, state["trails"], strict=True):
            walk.reset()
            trail.clear()
            for node in nodes:
                walk_state = self._state(walk)
                action = int(np.searchsorted(self.actions, node))
                trail.append((walk_state, action, walk.step(node).reward * self.config.reward_scale))
        self.rng.bit_generator.state = json.loads(state["numpy_rng"])
        torch.set_rng_state(state["torch_rng"])
        self.pending_transitions = state["started"]
        self.updates = state["updates"]
        self.losses = list(state["losses"])
        self.task.engine.calls = state["calls"]
