"""Trains a masked PPO on one task of either environment in one file (CleanRL style, PyTorch and NumPy only).

    python -m experiments.examples.ppo_single_file --task GpuMemory/vgg16-45-v1 --steps 400000 --seed 0
    python -m experiments.examples.ppo_single_file --task GpuMemoryEdit/unet-50-v1 --hidden 64 --reward-scale 100

Sources: "Proximal policy optimization algorithms" (2017), equations 7 and 9; generalized advantage estimation (2015),
equation 16; "A closer look at invalid action masking in policy gradient algorithms" (2020): logits of invalid actions
are MASKED in sampling and in the update. On GpuMemory the policy is an MLP that fits one program; on GpuMemoryEdit an
edit's logit is the sum over its changes.
Shapes: N nodes or edits, M environments, T steps per environment between updates, F features, G gaps.
"""

import argparse
import math
import time
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import envs  # noqa: F401  # registers GpuMemory/… and GpuMemoryEdit/…
from envs.edit.columns import N_CHANGES
from envs.graph import Feature
from experiments.common.curves import Curve

MASKED = -1e8  # logit of an invalid action; not -inf, because 0 * -inf is NaN


@dataclass
class Args:
    """Settings of a run, which are also its command-line options."""

    task: str = "GpuMemory/vgg16-45-v1"
    steps: int = 400_000  # total over all environments
    seed: int = 0
    reward: str = "paper"  # of GpuMemory; or causal, or episodic (the whole reward at the last step)
    actions: str = "paper"  # of GpuMemory; or copy, keep, at, full: action spaces with more forms
    min_bytes: int = 2**20  # smaller tensors stay resident and offer no action
    num_envs: int = 64  # M
    num_steps: int = 64  # T
    hidden: int = 256  # width of the layers
    learning_rate: float = 1e-3  # decays to 0
    epochs: int = 4  # passes over the transitions of an update
    minibatches: int = 8  # per epoch
    gamma: float = 1.0  # undiscounted: episodes are finite and returns are overheads
    gae_lambda: float = 0.95  # of generalized advantage estimation
    clip: float = 0.2  # range of the probability ratio around 1
    entropy: float = 0.01  # decays to 0
    value: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # gradients are clipped to it
    reward_scale: float = 10.0  # factor of the rewards
    worst: float = -1.0  # lower bound of rewards, because that of an infeasible plan would dominate
    greedy_every: int = 10_000  # simulator calls between evaluations of the greedy policy
    curve: str = ""  # learning-curve file for figure=learning, e.g. curve.json


class Agent(nn.Module):
    """Actor with logits (B, N) and critic with value (B, 1) for states (B, inputs) of GpuMemory."""

    def __init__(self, inputs: int, nodes: int, hidden: int):
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
            )
            for outputs in (nodes, 1)
        )
        for layers, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            for i, layer in enumerate(layers[::2]):
                nn.init.orthogonal_(layer.weight, gain if i == 2 else 2**0.5)
                nn.init.zeros_(layer.bias)

    def policy(self, states: Tensor, masks: Tensor) -> Categorical:
        """Returns the policy (B, N) over valid actions."""
        return Categorical(logits=torch.where(masks, self.actor(states), MASKED))

    def value(self, states: Tensor) -> Tensor:
        """Returns the value of each state, (B,)."""
        return self.critic(states)[:, 0]


class States:
    """Converts observations of GpuMemory to network inputs.

    Inputs: validity of every action, planned memory pressure at every node, distance to the kernel at which the walk
    gets stuck, and position of the walk.
    """

    def __init__(self, observation: dict[str, np.ndarray]):
        self.acts = np.flatnonzero(observation["nodes"][0, :, Feature.ACTION] > 0)
        self.size = len(self.acts) + observation["nodes"].shape[1] + 2

    def __call__(self, observation: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """Returns states, float32 (M, size), and masks of valid actions, bool (M, N)."""
        nodes = observation["nodes"]
        position = observation["current"][:, None] / observation["nodes"].shape[1]
        parts = np.concatenate(
            [nodes[:, self.acts, Feature.VALID], nodes[:, :, Feature.PRESSURE], nodes[:, :1, Feature.STUCK], position],
            1,
        )
        return torch.from_numpy(parts.astype(np.float32)), torch.from_numpy(observation["action_mask"] != 0)


class EditAgent(nn.Module):
    """Actor with logits (B, N) of edits and critic for states (B, inputs) of ``EditStates``."""

    def __init__(self, states_of: "EditStates", hidden: int):
        super().__init__()
        self.shapes = states_of.shapes
        self.static = states_of.static
        self.of_static = nn.Linear(self.static.shape[1], hidden)
        self.of_gap = nn.Linear(self.shapes["gaps"][1], hidden)
        (plan,) = self.shapes["plan"]
        self.of_plan = nn.Linear(plan, hidden)
        self.actor = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, N_CHANGES))
        self.critic = nn.Sequential(nn.Linear(hidden + plan, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def read(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden features of the gaps (B, G, hidden), plan (B, F) and edits (B, N, changes)."""
        parts = states.split([math.prod(shape) for shape in self.shapes.values()], 1)
        gaps, plan, edits = (part.unflatten(1, shape) for part, shape in zip(parts, self.shapes.values(), strict=True))
        hidden = self.of_static(self.static) + self.of_gap(gaps) + self.of_plan(plan)[:, None]
        return hidden.relu(), plan, edits.long()

    def policy(self, states: Tensor, masks: Tensor) -> Categorical:
        """Returns the policy (B, N) over valid edits."""
        hidden, _, edits = self.read(states)
        changes = self.actor(hidden).flatten(1).gather(1, edits.clamp(min=0).flatten(1)).view_as(edits)
        logits = changes.masked_fill(edits < 0, 0.0).sum(2)
        return Categorical(logits=torch.where(masks, logits, MASKED))

    def value(self, states: Tensor) -> Tensor:
        """Returns the value of each state, (B,)."""
        hidden, plan, _ = self.read(states)
        return self.critic(torch.cat([hidden.mean(1), plan], 1))[:, 0]


class EditStates:
    """Flattens observations of GpuMemoryEdit to network inputs: gaps, plan and edits (gap * N_CHANGES + change)."""

    def __init__(self, observation: dict[str, np.ndarray]):
        self.static = torch.from_numpy(observation["static"][0].copy())  # (G, F)
        self.shapes = {key: observation[key].shape[1:] for key in ("gaps", "plan", "edits")}

    def __call__(self, observation: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """Returns states, float32 (M, inputs), and masks of valid actions, bool (M, N)."""
        parts = [observation[key].reshape(len(observation[key]), -1) for key in self.shapes]
        return torch.from_numpy(np.concatenate(parts, 1).astype(np.float32)), torch.from_numpy(
            observation["action_mask"] != 0
        )


def agent_of(args: Args, observation: dict[str, np.ndarray]) -> tuple[Agent | EditAgent, States | EditStates]:
    """Returns the agent for observations (M, …), and the conversion of observations to its inputs."""
    if "edits" in observation:
        edit_states = EditStates(observation)
        return EditAgent(edit_states, args.hidden), edit_states
    states_of = States(observation)
    return Agent(states_of.size, observation["action_mask"].shape[1], args.hidden), states_of


def environment(args: Args, count: int, **options: str) -> gymnasium.vector.VectorEnv:
    """Returns a vector environment of ``count`` environments."""
    if args.task.startswith("GpuMemoryEdit"):
        if (args.reward, args.actions) != ("paper", "paper"):
            raise SystemExit(f"{args.task} takes no --reward or --actions; leave them out")
        return gymnasium.make_vec(args.task, count, "vector_entry_point", min_bytes=args.min_bytes, **options)
    reward = "causal" if args.reward == "episodic" else args.reward
    return gymnasium.make_vec(
        args.task, count, "vector_entry_point", reward=reward, actions=args.actions, min_bytes=args.min_bytes, **options
    )


def overhead_of(info: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the overhead that each episode ended with, NaN in a dead end; in GpuMemoryEdit of the best plan."""
    return info.get("best_overhead", info["overhead"])


def main(args: Args) -> float:
    """Trains and returns the overhead of the greedy plan (NaN if it is infeasible)."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = environment(args, args.num_envs, autoreset_mode="SameStep")
    observation, _ = env.reset(seed=args.seed)
    m = args.num_envs
    t = args.num_steps
    n = observation["action_mask"].shape[1]
    task = env.unwrapped.tasks[0]
    agent, states_of = agent_of(args, observation)
    state, mask = states_of(observation)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5)
    states = torch.zeros(t, *state.shape)
    masks = torch.zeros(t, m, n, dtype=torch.bool)
    actions = torch.zeros(t, m, dtype=torch.long)
    logs = torch.zeros(t, m)
    values = torch.zeros(t + 1, m)
    rewards = torch.zeros(t, m)
    ends = torch.zeros(t, m)
    name = "ppo_single_file" + ("" if args.actions == "paper" else f", {args.actions}")
    metadata = {"agent": name, "seed": args.seed, "reward": args.reward}
    curve = Curve(
        Path(args.curve) if args.curve else None,
        task.program,
        task.machine,
        task.limit,
        task.mode,
        metadata,
        args.greedy_every,
    )
    updates = args.steps // (m * t)
    best = float("inf")
    begin = time.perf_counter()
    calls = 0
    pending = np.zeros(m)  # accumulated rewards with reward=episodic

    for update in range(updates):
        remaining = 1 - update / updates
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        costs: list[float] = []

        for k in range(t):  # rollout of T steps
            with torch.no_grad():
                policy = agent.policy(state, mask)
                action = policy.sample()
                states[k] = state
                masks[k] = mask
                actions[k] = action
                logs[k] = policy.log_prob(action)
                values[k] = agent.value(state)
            observation, reward, terminated, truncated, info = env.step(action.numpy())
            terminated |= truncated  # only a spent budget truncates, and the state has its fraction
            if args.reward == "episodic":
                pending += reward
                reward = np.where(terminated, pending, 0.0)
                pending[terminated] = 0.0
            calls += m if args.reward == "paper" else int(terminated.sum())  # causal: one call at the end of an episode
            if terminated.any():
                overheads = overhead_of(info["final_info"])[terminated]
                for overhead in overheads:
                    curve.add_episode(overhead)
                costs += overheads[np.isfinite(overheads)].tolist()
            rewards[k] = torch.from_numpy(args.reward_scale * np.maximum(reward, args.worst)).float()
            ends[k] = torch.from_numpy(terminated).float()
            state, mask = states_of(observation)

        with torch.no_grad():
            values[t] = agent.value(state)
            advantages = torch.zeros(t, m)
            advantage = torch.zeros(m)
            for k in reversed(range(t)):
                continues = 1 - ends[k]
                delta = rewards[k] + args.gamma * continues * values[k + 1] - values[k]
                advantage = delta + args.gamma * args.gae_lambda * continues * advantage
                advantages[k] = advantage
            returns = advantages + values[:t]

        flat = [x.flatten(0, 1) for x in (states, masks, actions, logs, advantages, returns)]
        for _ in range(args.epochs):
            for i in torch.randperm(t * m).chunk(args.minibatches):
                s, valid, a, old, gain, target = (x[i] for x in flat)
                policy = agent.policy(s, valid)
                ratio = (policy.log_prob(a) - old).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                surrogate = torch.min(ratio * gain, ratio.clamp(1 - args.clip, 1 + args.clip) * gain).mean()
                error = 0.5 * (agent.value(s) - target).square().mean()
                loss = args.value * error - surrogate - remaining * args.entropy * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        curve.add_point_if_due(calls, lambda: greedy(args, agent, states_of))
        best = min([best, *costs])
        if costs and (update % max(1, updates // 10) == 0 or update == updates - 1):
            print(
                f"step {(update + 1) * m * t:,}: mean overhead {np.mean(costs):.2%} over {len(costs)} episodes, "
                f"best so far {best:.2%}, {time.perf_counter() - begin:.0f} s"
            )

    overhead = greedy(args, agent, states_of)
    curve.add_point(calls, overhead)
    print(f"greedy plan: overhead {overhead:.2%}; best of all episodes: {best:.2%}")
    return overhead


def greedy(args: Args, agent: Agent | EditAgent, states_of: States | EditStates) -> float:
    """Returns the overhead of the greedy episode; NaN if its plan is infeasible."""
    env = environment(args, 1)
    observation, info = env.reset(seed=0)
    is_done = False
    while not is_done:
        with torch.no_grad():
            action = agent.policy(*states_of(observation)).probs.argmax(1)
        observation, _, terminated, truncated, info = env.step(action.numpy())
        is_done = bool(terminated[0] or truncated[0])
    return float(overhead_of(info)[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a masked PPO on GpuMemory or GpuMemoryEdit.")
    for f in fields(Args):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    main(Args(**vars(parser.parse_args())))
