"""Stable-Baselines3 on GpuMemory-v0: MaskablePPO (sb3-contrib), and DQN with the masks that SB3's lacks.

Both read the graph with structure2vec.py. Its Q-values, scattered over the nodes, are DQN's Q-values and PPO's logits;
PPO's critic reads the graph state of equation 2. Invalid actions have ``optimisation.MASKED``, as in dqn_paper.py.
What sb3-contrib masks for PPO is after "A closer look at invalid action masking in policy gradient algorithms" (2020).
DQN masks them in the greedy action, in exploration, in warm-up, and in the maximum of the target.

Everything else is the libraries': one-step returns from a uniform replay buffer, or clipped policy gradients. The
extras `sb3` and `dev` install both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3 import DQN
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.dqn.policies import MultiInputPolicy, QNetwork
from torch import Tensor, nn

from agents.learned.dqn_config import POOLS
from agents.learned.optimisation import MASKED, one_thread
from agents.learned.structure2vec import CustomNetwork, Structure2Vec
from agents.learned.training import Episode
from envs import Task
from envs.graph import OBSERVED, OperationGraph
from simulator import Plan

Observation = dict[str, NDArray[Any]]
VALUE = 64  # width of the critic's hidden layer


def graph_of(tasks: Sequence[Task]) -> OperationGraph:
    """The one graph of all tasks: they have the same edges, weights and actions.

    Raises:
        ValueError: they have several.
    """
    first, *others = (task.graph for task in tasks)
    for graph in others:
        pairs = ((first.edges, graph.edges), (first.weights, graph.weights), (first.action_kind, graph.action_kind))
        if not all(np.array_equal(a, b) for a, b in pairs):
            raise ValueError(f"the network reads one graph, and these {len(tasks)} tasks have several")
    return first


class GraphFeatures(BaseFeaturesExtractor):
    """structure2vec as SB3's features extractor: (B, N * forms + 2p).

    First a score of each of the N nodes, MASKED where a node is no action; then the graph state.

    Args:
        graph: as ``graph_of``.
        forms: in how many an action may be taken; so many scores of each node, form by form.
        own: a class in the place of structure2vec (CustomNetwork); the others are not used then.
        embedding_size, message_passing_steps, pool, mixing: as Structure2Vec; it reads all features observed.

    Raises:
        ValueError: there is no such pool.
    """

    def __init__(
        self, observation_space: gymnasium.spaces.Dict, graph: OperationGraph, embedding_size: int = 16,
        message_passing_steps: int = 3, pool: str = "mean", mixing: bool = True, forms: int = 1,
        own: type[nn.Module] | None = None,
    ):  # fmt: skip
        if pool not in POOLS:
            raise ValueError(f"pool: expected one of {POOLS}, got {pool!r}")
        found = None if own is None else CustomNetwork(own, graph, OBSERVED, forms)
        self.nodes = forms * len(graph)
        super().__init__(observation_space, self.nodes + (2 * embedding_size if found is None else found.state_size))
        sizes = embedding_size, message_passing_steps
        self.network = found or Structure2Vec(graph, OBSERVED, *sizes, pool, mixing, forms)

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        x = observations["nodes"].transpose(0, 1)
        q, state = self.network.with_graph_state(x, observations["current"].flatten(1).argmax(1))
        scores = q.new_full((len(q), self.nodes), MASKED).index_copy(1, self.network.codes, q)
        return torch.cat([scores, state], 1)


# ------------------------------------------------------------------------------------------------ PPO


class ActorCritic(nn.Module):
    """What SB3 calls an MLP extractor: logits are the scores as they are, the critic has a layer on the graph state."""

    latent_dim_vf = VALUE

    def __init__(self, nodes: int, features: int):
        super().__init__()
        self.latent_dim_pi = nodes
        self.value = nn.Sequential(nn.Linear(features - nodes, VALUE), nn.ReLU())

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, : self.latent_dim_pi]

    def forward_critic(self, features: Tensor) -> Tensor:
        value: Tensor = self.value(features[:, self.latent_dim_pi :])
        return value


class GraphActorCriticPolicy(MaskableMultiInputActorCriticPolicy):
    """MaskablePPO's policy, without layers between a node's score and its logit."""

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = ActorCritic(int(self.action_space.n), self.features_dim)  # type: ignore[attr-defined,assignment]

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Identity()
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------------------ DQN


class MaskedQNetwork(QNetwork):
    """(B, N): MASKED where the observation's mask forbids an action, in the greedy action and in targets alike."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.q_net = nn.Sequential()  # the scores as they are

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        mask = obs["action_mask"] > 0
        q = self.extract_features(obs, self.features_extractor)[:, : mask.shape[1]]  # type: ignore[arg-type]
        return torch.where(mask, q, MASKED)


class MaskedDQNPolicy(MultiInputPolicy):
    """DQN's policy with MaskedQNetwork, as the network and as the target."""

    def make_q_net(self) -> MaskedQNetwork:
        return MaskedQNetwork(**self._update_features_extractor(self.net_args)).to(self.device)


class MaskedDQN(DQN):
    """DQN whose random actions are valid ones: while it explores, each environment by its own coin, and in warm-up."""

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"MultiInputPolicy": MaskedDQNPolicy}

    def predict(
        self, observation: Observation, state: Any = None, episode_start: Any = None, deterministic: bool = False,  # type: ignore[override]
    ) -> tuple[NDArray[Any], Any]:  # fmt: skip
        """ε-greedy; greedy where it is ``deterministic``."""
        actions, state = super().predict(observation, state, episode_start, deterministic=True)
        if deterministic:
            return actions, state
        explores = self.action_space.np_random.random(actions.shape) < self.exploration_rate
        return np.where(explores, self._random(observation).reshape(actions.shape), actions), state

    def _sample_action(
        self, learning_starts: int, action_noise: Any = None, n_envs: int = 1
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        if self.num_timesteps >= learning_starts:
            return super()._sample_action(learning_starts, action_noise, n_envs)
        actions = self._random(self._last_obs)  # type: ignore[arg-type]
        return actions, actions

    def _random(self, observation: Observation) -> NDArray[np.int64]:
        """(B,) a valid action each, uniformly."""
        masks = np.atleast_2d(observation["action_mask"]).astype(np.int8)
        return np.array([self.action_space.sample(mask) for mask in masks])


# ------------------------------------------------------------------------------------------- training


@dataclass
class Record:
    """The episodes of all environments, and the best plan among them."""

    planner: str
    on_episode: Callable[[Episode], None] | None = None
    history: list[Episode] = field(default_factory=list)
    best: Plan | None = None
    steps: int = 0
    calls: int = 0  # of the simulator: one a step, or one an episode with the causal reward
    causal: bool = False


class Recorded(gymnasium.Wrapper[Observation, np.int64, Observation, np.int64]):
    """Keeps a record, because a vector environment has reset an episode before anybody can ask for its plan; and
    multiplies rewards by ``scale``."""

    def __init__(self, env: gymnasium.Env[Observation, np.int64], record: Record, scale: float):
        super().__init__(env)
        self.record, self.scale, self.steps = record, scale, 0

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """The environment's step; a finished plan that is better than the record's takes its place."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        record = self.record
        record.steps += 1
        self.steps += 1
        record.calls += terminated or not record.causal
        if terminated:
            best = record.history[-1].best_overhead if record.history else float("nan")
            overhead = info["overhead"] if info["feasible"] else float("nan")
            if info["feasible"] and not overhead >= best:  # the first one compares with nan
                best = overhead
                record.best = self.get_wrapper_attr("plan")(record.planner)
            episode = Episode(
                len(record.history) + 1, overhead, info["feasible"], best, np.nan, np.nan, self.steps, record.calls
            )
            self.steps = 0
            record.history.append(episode)
            if record.on_episode:
                record.on_episode(episode)
        return observation, float(reward) * self.scale, terminated, truncated, info


class Scalars(KVWriter):
    """Hands on the numbers that the library's logger has collected by a step, those that it gives TensorBoard."""

    def __init__(self, tell: Callable[[int, Mapping[str, float]], None]):
        self.tell = tell

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """As the library calls it."""
        numbers = {key: float(v) for key, v in key_values.items() if isinstance(v, (int, float, np.number))}
        self.tell(step, {key: v for key, v in numbers.items() if "tensorboard" not in key_excluded.get(key, ())})

    def close(self) -> None:
        """As the library calls it; whoever made it closes what it tells."""


def watch(model: BaseAlgorithm, record: Record, tell: Callable[[int, Mapping[str, float]], None]) -> None:
    """Tells ``tell`` all that the library logs, by simulator calls. To be called before ``learn``; the rest is told by
    ``model.logger.dump``."""
    model.set_logger(Logger(None, [Scalars(lambda _, values: tell(record.calls, values))]))


ALGORITHMS: dict[str, tuple[type[BaseAlgorithm], type[BasePolicy]]] = {
    "maskable_ppo": (MaskablePPO, GraphActorCriticPolicy), "dqn": (MaskedDQN, MaskedDQNPolicy),
}  # fmt: skip


def make(
    algorithm: str, environment: Mapping[str, Any], record: Record, seed: int, num_envs: int, reward_scale: float,
    network: Mapping[str, Any], own: type[nn.Module] | None = None, **options: Any,
) -> BaseAlgorithm:  # fmt: skip
    """A model of the library, ready to learn.

    Args:
        algorithm: a key of ALGORITHMS.
        environment: the arguments of GpuMemory-v0.
        network: those of GraphFeatures but the graph, the forms and ``own``, which is beside them.
        options: those of the library's class.

    Raises:
        ValueError, TypeError, AssertionError: of these.
    """
    one_thread()
    env = make_vec_env(
        lambda: gymnasium.make("GpuMemory-v0", **environment), num_envs, seed,
        wrapper_class=lambda one: Recorded(one, record, reward_scale),
    )  # fmt: skip
    kind, policy = ALGORITHMS[algorithm]
    task = env.get_attr("tasks")[0][0]
    forms = task.forms if environment.get("actions", "paper") != "paper" else 1
    extractor = {"graph": graph_of(env.get_attr("tasks")[0]), **network, "forms": forms, "own": own}
    policy_options = {"features_extractor_class": GraphFeatures, "features_extractor_kwargs": extractor, "net_arch": []}
    if algorithm == "maskable_ppo":
        policy_options["ortho_init"] = False  # it would begin with one of the extractor's layers as good as off
    return kind(policy, env, policy_kwargs=policy_options, seed=seed, device="cpu", **options)


def greedy_overhead(model: BaseAlgorithm, env: gymnasium.Env[Observation, np.int64]) -> float:
    """Of the deterministic policy, NaN where it ends in a dead end."""
    observation, info = env.reset(seed=0)
    terminated = False
    while not terminated:
        masks = {"action_masks": info["action_mask"]} if isinstance(model, MaskablePPO) else {}
        action, _ = model.predict(observation, deterministic=True, **masks)
        observation, _, terminated, _, info = env.step(np.int64(action))
    return float(info["overhead"])


def greedy(model: BaseAlgorithm, environment: Mapping[str, Any], planner: str) -> Plan | None:
    """The plan of the deterministic policy, or None where it ends in a dead end."""
    env = gymnasium.make("GpuMemory-v0", **environment)
    found = greedy_overhead(model, env)
    plan: Plan = env.get_wrapper_attr("plan")(planner)
    return None if np.isnan(found) else plan
