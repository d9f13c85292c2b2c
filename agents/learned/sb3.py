"""Stable-Baselines3 on both environments: MaskablePPO (sb3-contrib), and SB3's DQN with action masks added.

On ``GpuMemory-v1`` both read the graph with structure2vec.py (``GraphFeatures``), on ``GpuMemoryEdit-v1`` the gaps
(``EditFeatures``). The scores are DQN's Q-values and PPO's logits; PPO's critic reads a summary of the state, in
structure2vec that of equation 2. Invalid actions get ``optimization.MASKED``, as in dqn_paper.py.
sb3-contrib's masking follows "A closer look at invalid action masking in policy gradient algorithms" (2020). DQN masks
the greedy action, exploration, warm-up, and the maximum of the target.

Everything else is from the libraries: one-step returns from a uniform replay buffer, or clipped policy gradients. The
extras `sb3` and `dev` install both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TransformReward
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3 import DQN
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.dqn.policies import MultiInputPolicy, QNetwork
from torch import Tensor, nn

from agents.learned.dqn_config import POOLS
from agents.learned.optimization import MASKED, one_thread
from agents.learned.structure2vec import CustomNetwork, Structure2Vec
from agents.learned.training import Episode
from envs import Task
from envs.edit.columns import N_CHANGES
from envs.graph import OBSERVED, OperationGraph
from simulator import Plan

Observation = dict[str, NDArray[Any]]
Env = gymnasium.Env[Observation, np.int64]
VALUE = 64  # width of the critic's hidden layer


def graph_of(tasks: Sequence[Task]) -> OperationGraph:
    """Returns the graph that all tasks share (edges, weights and actions).

    Raises:
        ValueError: if the tasks have different graphs.
    """
    first, *others = (task.graph for task in tasks)
    for graph in others:
        pairs = ((first.edges, graph.edges), (first.weights, graph.weights), (first.action_kind, graph.action_kind))
        if not all(np.array_equal(a, b) for a, b in pairs):
            raise ValueError(
                f"the network reads one graph, but these {len(tasks)} tasks have different ones; give tasks of one"
            )
    return first


class GraphFeatures(BaseFeaturesExtractor):
    """SB3 features extractor with structure2vec: (B, N * forms + 2p).

    The output is a score for each node and form (form by form), MASKED for nodes that are not actions, followed by the
    graph state.

    Args:
        observation_space: observation space of the environment.
        graph: see ``graph_of``.
        forms: number of forms of an action.
        own: custom class instead of structure2vec (CustomNetwork); the sizes below are then ignored.
        embedding_size, message_passing_steps, pool, mixing: see Structure2Vec, which reads all observed features.

    Raises:
        ValueError: if the pool is unknown.
    """

    def __init__(
        self,
        observation_space: gymnasium.spaces.Dict,
        graph: OperationGraph,
        embedding_size: int = 16,
        message_passing_steps: int = 3,
        pool: str = "mean",
        mixing: bool = True,
        forms: int = 1,
        own: type[nn.Module] | None = None,
    ):
        if pool not in POOLS:
            raise ValueError(f"pool: expected one of {POOLS}, got {pool!r}")
        network: Structure2Vec | CustomNetwork
        if own is not None:
            network = CustomNetwork(own, graph, OBSERVED, forms)
        else:
            network = Structure2Vec(graph, OBSERVED, embedding_size, message_passing_steps, pool, mixing, forms)
        self.nodes = forms * len(graph)
        super().__init__(observation_space, self.nodes + network.state_size)
        self.network = network

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        x = observations["nodes"].transpose(0, 1)
        q, state = self.network(x, observations["current"].flatten(1).argmax(1))
        scores = q.new_full((len(q), self.nodes), MASKED).index_copy(1, self.network.codes, q)
        return torch.cat([scores, state], 1)


class EditFeatures(BaseFeaturesExtractor):
    """SB3 features extractor for ``BudgetedEdits``: (B, M + P + width) for M edits and P columns of ``plan``.

    The output is a score for each edit, followed by ``plan`` and the mean of the gaps' hidden features. The score of an
    edit is the sum of its changes' scores, each a function of its gap and of ``plan``.

    Args:
        observation_space: observation space of the environment.
        static: static columns of each gap, (G, F).
        width: width of the hidden layers.
    """

    def __init__(self, observation_space: gymnasium.spaces.Dict, static: NDArray[np.float32], width: int = 64):
        shapes = {key: space.shape or () for key, space in observation_space.items()}
        (plan,) = shapes["plan"]
        super().__init__(observation_space, shapes["edits"][0] + plan + width)
        self.static: Tensor
        self.register_buffer("static", torch.from_numpy(static), persistent=False)  # depends on the program
        self.of_static = nn.Linear(static.shape[1], width, bias=False)
        self.of_gap = nn.Linear(shapes["gaps"][1], width)
        self.of_plan = nn.Linear(plan, width, bias=False)
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, N_CHANGES))

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        plan = observations["plan"]
        hidden = self.of_static(self.static) + self.of_gap(observations["gaps"]) + self.of_plan(plan)[:, None]
        hidden = hidden.relu()
        edits = observations["edits"].long()  # (B, M, changes), gap * N_CHANGES + change, padded with -1
        changes = self.score(hidden).flatten(1).gather(1, edits.clamp(min=0).flatten(1)).view_as(edits)
        scores = changes.masked_fill(edits < 0, 0.0).sum(2)
        return torch.cat([scores, plan, hidden.mean(1)], 1)


class BudgetedEdits(gymnasium.Wrapper[Observation, np.int64, Observation, np.int64]):
    """``GpuMemoryEdit-v1`` of one program, reduced to the observations of ``EditFeatures``.

    A spent budget terminates the episode: ``plan`` has the fraction used, so no value is bootstrapped from the end.

    Attributes:
        static: static columns of each gap, (G, F), which a replay buffer would store with each transition.
    """

    KEYS = ("gaps", "plan", "edits", "action_mask")

    def __init__(self, env: Env):
        super().__init__(env)
        assert isinstance(env.observation_space, gymnasium.spaces.Dict)
        self.observation_space = gymnasium.spaces.Dict({key: env.observation_space[key] for key in self.KEYS})
        self.static: NDArray[np.float32] = np.array(env.reset()[0]["static"])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return {key: observation[key] for key in self.KEYS}, info

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return {key: observation[key] for key in self.KEYS}, float(reward), terminated or truncated, False, info


def make_env(environment: Mapping[str, Any]) -> Env:
    """Returns the environment that SB3 trains on, from arguments of ``gymnasium.make`` (``id``: GpuMemory-v1)."""
    env: Env = gymnasium.make(**{"id": "GpuMemory-v1", **environment})
    return BudgetedEdits(env) if "edits" in env.observation_space.spaces else env  # type: ignore[attr-defined]


def extractor_of(
    env: Env, network: Mapping[str, Any], custom_network: type[nn.Module] | None
) -> tuple[type[BaseFeaturesExtractor], dict[str, Any]]:
    """Returns the features extractor that fits an environment of ``make_env``, and its arguments.

    Raises:
        ValueError: if the tasks have different graphs, or ``GpuMemoryEdit-v1`` a custom network.
    """
    sizes = dict(network)
    width = sizes.pop("edit_width", 64)
    tasks = env.get_wrapper_attr("tasks")
    if not isinstance(env, BudgetedEdits):
        graph = graph_of(tasks)
        forms = int(env.action_space.n) // len(graph)  # type: ignore[attr-defined]
        return GraphFeatures, {"graph": graph, **sizes, "forms": forms, "own": custom_network}
    if len(tasks) > 1 or custom_network is not None:
        raise ValueError("network: GpuMemoryEdit needs one program and no custom network; use GpuMemory for others")
    return EditFeatures, {"static": env.static, "width": width}


def overhead_of(info: Mapping[str, Any]) -> float:
    """Returns the overhead of an episode's result from its last info: of the best plan in GpuMemoryEdit."""
    return float(info.get("best_overhead", info["overhead"]))


# ------------------------------------------------------------------------------------------------ PPO


class ActorCritic(nn.Module):
    """MLP extractor in SB3's terms: logits are the unchanged scores, the critic has one layer on the graph state."""

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
    """Policy of MaskablePPO without layers between a node's score and its logit."""

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = ActorCritic(int(self.action_space.n), self.features_dim)  # type: ignore[attr-defined,assignment]

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Identity()
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]


# ------------------------------------------------------------------------------------------------ DQN


class MaskedQNetwork(QNetwork):
    """Q-network (B, N) that masks invalid actions in the greedy action and in targets."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.q_net = nn.Sequential()  # the scores are the Q-values

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:  # type: ignore[override]
        mask = obs["action_mask"] > 0
        q = self.extract_features(obs, self.features_extractor)[:, : mask.shape[1]]  # type: ignore[arg-type]
        return torch.where(mask, q, MASKED)


class MaskedDQNPolicy(MultiInputPolicy):
    """Policy of DQN with MaskedQNetwork as online and target network."""

    def make_q_net(self) -> MaskedQNetwork:
        return MaskedQNetwork(**self._update_features_extractor(self.net_args)).to(self.device)


class MaskedDQN(DQN):
    """DQN with valid random actions in exploration (independent per environment) and in warm-up."""

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"MultiInputPolicy": MaskedDQNPolicy}

    def predict(  # type: ignore[override]
        self,
        observation: Observation,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], Any]:
        """Returns ε-greedy actions, or greedy ones if ``deterministic``."""
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
        """Samples a valid action uniformly for each environment, (B,)."""
        masks = np.atleast_2d(observation["action_mask"]).astype(np.int8)
        return np.array([self.action_space.sample(mask) for mask in masks])


# ------------------------------------------------------------------------------------------- training


class EpisodeRecorder(BaseCallback):
    """Callback that records the finished episodes of all environments, and the best plan.

    Args:
        planner: name of the agent in plans.
        causal: whether the reward is causal, which takes one simulator call per episode instead of one per step.
        on_episode: called after every episode.
        after_step: called after every step of all environments.
    """

    def __init__(
        self,
        planner: str,
        causal: bool = False,
        on_episode: Callable[[Episode], None] = lambda _: None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.planner = planner
        self.causal = causal
        self.on_episode = on_episode
        self.after_step = after_step
        self.history: list[Episode] = []
        self.best: Plan | None = None
        self.calls = 0  # of the simulator
        self.lengths = Counter[int]()  # steps of the unfinished episode of each environment

    def _on_step(self) -> bool:
        for i, (done, info) in enumerate(zip(self.locals["dones"], self.locals["infos"], strict=True)):
            self.lengths[i] += 1
            self.calls += bool(done or not self.causal)
            if done:
                best = self.history[-1].best_overhead if self.history else np.nan
                is_feasible = "plan" in info
                overhead = overhead_of(info) if is_feasible else np.nan
                if is_feasible and not overhead >= best:  # best is NaN at first
                    best = overhead
                    self.best = replace(info["plan"], planner=self.planner)
                self.history.append(
                    Episode(
                        len(self.history) + 1,
                        overhead,
                        is_feasible,
                        best,
                        np.nan,
                        np.nan,
                        self.lengths.pop(i),
                        self.calls,
                    )
                )
                self.on_episode(self.history[-1])
        self.after_step()
        return True


class Scalars(KVWriter):
    """Logger output that forwards the TensorBoard scalars of the library's logger."""

    def __init__(self, tell: Callable[[int, Mapping[str, float]], None]):
        self.tell = tell

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Forwards the scalars of one step; called by the library."""
        numbers = {key: float(v) for key, v in key_values.items() if isinstance(v, (int, float, np.number))}
        self.tell(step, {key: v for key, v in numbers.items() if "tensorboard" not in key_excluded.get(key, ())})

    def close(self) -> None:
        """Does nothing; the owner of ``tell`` closes it."""


def watch(model: BaseAlgorithm, record: EpisodeRecorder, tell: Callable[[int, Mapping[str, float]], None]) -> None:
    """Forwards the library's scalars to ``tell``, indexed by simulator calls.

    Call it before ``learn``, and ``model.logger.dump`` after it to forward the last scalars.
    """
    model.set_logger(Logger(None, [Scalars(lambda _, values: tell(record.calls, values))]))


ALGORITHMS: dict[str, tuple[type[BaseAlgorithm], type[BasePolicy]]] = {
    "maskable_ppo": (MaskablePPO, GraphActorCriticPolicy),
    "dqn": (MaskedDQN, MaskedDQNPolicy),
}


def make(
    algorithm: str,
    environment: Mapping[str, Any],
    seed: int,
    num_envs: int,
    reward_scale: float,
    network: Mapping[str, Any],
    custom_network: type[nn.Module] | None = None,
    **options: Any,
) -> BaseAlgorithm:
    """Returns a model of the library, ready to learn.

    Args:
        algorithm: a key of ALGORITHMS.
        environment: see ``make_env``.
        seed: random seed.
        num_envs: number of environments.
        reward_scale: factor of the rewards.
        network: arguments of GraphFeatures, except ``graph``, ``forms`` and ``own``; ``edit_width`` of EditFeatures.
        custom_network: custom network class.
        options: arguments of the library's class.

    Raises:
        ValueError, TypeError, AssertionError: if an argument is invalid.
    """
    one_thread()
    extractor, arguments = extractor_of(make_env(environment), network, custom_network)
    env = make_vec_env(
        lambda: make_env(environment),
        num_envs,
        seed,
        wrapper_class=lambda inner_env: TransformReward(inner_env, lambda reward: float(reward) * reward_scale),
    )
    kind, policy = ALGORITHMS[algorithm]
    policy_options = {"features_extractor_class": extractor, "features_extractor_kwargs": arguments, "net_arch": []}
    if algorithm == "maskable_ppo":
        policy_options["ortho_init"] = False  # it would scale an extractor layer close to zero
    model = kind(policy, env, policy_kwargs=policy_options, seed=seed, device="cpu", **options)
    model.set_logger(Logger(None, []))  # the library's default would create a folder in the temporary directory
    return model


def run_episode(model: BaseAlgorithm, env: Env, seed: int = 0, deterministic: bool = True) -> dict[str, Any]:
    """Returns the last info of an episode in an environment of ``make_env``."""
    observation, info = env.reset(seed=seed)
    terminated = False
    while not terminated:
        masks = {"action_masks": info["action_mask"]} if isinstance(model, MaskablePPO) else {}
        action, _ = model.predict(observation, deterministic=deterministic, **masks)
        observation, _, terminated, _, info = env.step(np.int64(action))
    return info


def greedy_overhead(model: BaseAlgorithm, env: Env) -> float:
    """Returns the overhead of the deterministic policy, NaN in a dead end."""
    return overhead_of(run_episode(model, env))


def greedy(model: BaseAlgorithm, environment: Mapping[str, Any], planner: str) -> Plan | None:
    """Returns the plan of the deterministic policy, or None if it ends in a dead end."""
    plan: Plan | None = run_episode(model, make_env(environment)).get("plan")
    return None if plan is None else replace(plan, planner=planner)
