"""A masked PPO with a flat MLP on a task of GpuMemory in one file, in the manner of CleanRL: PyTorch and NumPy only.

    python -m experiments.examples.ppo_single_file --task GpuMemory/vgg16-45-v0 --steps 400000 --seed 0

After "Proximal policy optimization algorithms" (2017), equations 7 and 9, and generalised advantages (2015), equation
16; "A closer look at invalid action masking in policy gradient algorithms" (2020): logits of what may not be taken are
MASKED when an action is drawn and when it is learned from. It knows one program by heart and says nothing about others.
Shapes: N nodes, M environments, T steps of each between updates, F features.
"""

import argparse
import time
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import envs  # noqa: F401  # registers GpuMemory/…
from envs.graph import ACTION, PRESSURE, STUCK, VALID
from experiments.common.curves import Curve

MASKED = -1e8  # a logit; not -inf, because 0 * -inf is not a number


@dataclass
class Args:
    task: str = "GpuMemory/vgg16-45-v0"
    steps: int = 400_000  # of all environments
    seed: int = 0
    reward: str = "paper"  # causal; or episodic: all of it with the last step
    actions: str = "paper"  # copy, keep, at, full: with these forms
    min_bytes: int = 2**20  # smaller tensors stay, and are no decisions
    num_envs: int = 64  # M
    num_steps: int = 64  # T
    hidden: int = 256
    learning_rate: float = 1e-3  # falls to 0
    epochs: int = 4
    minibatches: int = 8
    gamma: float = 1.0  # an episode ends, and its returns are overheads
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01  # falls to 0
    value: float = 0.5
    max_grad_norm: float = 0.5
    reward_scale: float = 10.0
    worst: float = -1.0  # rewards are cut there: a dead end's would drown all others
    greedy_every: int = 10_000  # simulator calls between two walks of the greedy policy
    curve: str = ""  # a file for the scalars of these: curve.json, as figure=learning reads it


class Agent(nn.Module):
    """Logits (B, N) and value (B,) of states (B, inputs)."""

    def __init__(self, inputs: int, nodes: int, hidden: int):
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
                          nn.Linear(hidden, outputs)) for outputs in (nodes, 1)
        )  # fmt: skip
        for layers, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            for i, layer in enumerate(layers[::2]):
                nn.init.orthogonal_(layer.weight, gain if i == 2 else 2**0.5)
                nn.init.zeros_(layer.bias)

    def policy(self, states: Tensor, masks: Tensor) -> Categorical:
        """Of what may be taken."""
        return Categorical(logits=torch.where(masks, self.actor(states), MASKED))


class States:
    """What the network reads of an observation: of every action whether it may be taken and has been, the planned
    residency at every node, and where the walk is."""

    def __init__(self, observation: dict[str, np.ndarray]):
        self.acts = np.flatnonzero(observation["nodes"][0, :, ACTION] > 0)
        self.size = len(self.acts) + observation["nodes"].shape[1] + 2

    def __call__(self, observation: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        nodes, here = observation["nodes"], observation["current"][:, None] / observation["nodes"].shape[1]
        parts = np.concatenate([nodes[:, self.acts, VALID], nodes[:, :, PRESSURE], nodes[:, :1, STUCK], here], 1)
        return torch.from_numpy(parts.astype(np.float32)), torch.from_numpy(observation["action_mask"] != 0)


def environment(args: Args, count: int, **options: str) -> gymnasium.vector.VectorEnv:
    """So many environments."""
    reward = "causal" if args.reward == "episodic" else args.reward
    return gymnasium.make_vec(args.task, count, "vector_entry_point", reward=reward, actions=args.actions,
                              min_bytes=args.min_bytes, **options)  # fmt: skip


def main(args: Args) -> float:
    """Trains, and returns the overhead of the greedy plan (NaN in a dead end)."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = environment(args, args.num_envs, autoreset_mode="SameStep")
    observation, _ = env.reset(seed=args.seed)
    m, t, n, task = args.num_envs, args.num_steps, observation["action_mask"].shape[1], env.unwrapped.tasks[0]
    states_of = States(observation)
    agent = Agent(states_of.size, n, args.hidden)
    state, mask = states_of(observation)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5)
    states, masks = torch.zeros(t, *state.shape), torch.zeros(t, m, n, dtype=torch.bool)
    actions, logs, values = torch.zeros(t, m, dtype=torch.long), torch.zeros(t, m), torch.zeros(t + 1, m)
    rewards, ends = torch.zeros(t, m), torch.zeros(t, m)
    name = "ppo_single_file" + ("" if args.actions == "paper" else f", {args.actions}")
    about = {"agent": name, "seed": args.seed, "reward": args.reward}
    curve = Curve(Path(args.curve) if args.curve else None, task.program, task.machine, task.limit, task.mode, about,
                  args.greedy_every)  # fmt: skip
    updates, best, begin, calls = args.steps // (m * t), float("inf"), time.perf_counter(), 0
    owed = np.zeros(m)  # of episodic rewards

    for update in range(updates):
        left = 1 - update / updates
        optimizer.param_groups[0]["lr"] = left * args.learning_rate
        found: list[float] = []

        for k in range(t):  # a roll-out of T steps
            with torch.no_grad():
                policy = agent.policy(state, mask)
                action = policy.sample()
                states[k], masks[k], actions[k], logs[k] = state, mask, action, policy.log_prob(action)
                values[k] = agent.critic(state)[:, 0]
            observation, reward, terminated, _, info = env.step(action.numpy())
            if args.reward == "episodic":
                owed += reward
                reward = np.where(terminated, owed, 0.0)
                owed[terminated] = 0.0
            calls += m if args.reward == "paper" else int(terminated.sum())  # causal: one at the end of an episode
            if terminated.any():
                for overhead in info["final_info"]["overhead"][terminated]:  # NaN in a dead end
                    curve.episode(overhead)
                found += info["final_info"]["overhead"][terminated & info["final_info"]["feasible"]].tolist()
            rewards[k] = torch.from_numpy(args.reward_scale * np.maximum(reward, args.worst)).float()
            ends[k] = torch.from_numpy(terminated).float()
            state, mask = states_of(observation)

        with torch.no_grad():
            values[t] = agent.critic(state)[:, 0]
            advantages, ahead = torch.zeros(t, m), torch.zeros(m)
            for k in reversed(range(t)):
                goes_on = 1 - ends[k]
                delta = rewards[k] + args.gamma * goes_on * values[k + 1] - values[k]
                ahead = delta + args.gamma * args.gae_lambda * goes_on * ahead
                advantages[k] = ahead
            returns = advantages + values[:t]

        flat = [x.flatten(0, 1) for x in (states, masks, actions, logs, advantages, returns)]
        for _ in range(args.epochs):
            for i in torch.randperm(t * m).chunk(args.minibatches):
                s, valid, a, old, gain, target = (x[i] for x in flat)
                policy = agent.policy(s, valid)
                ratio = (policy.log_prob(a) - old).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                surrogate = torch.min(ratio * gain, ratio.clamp(1 - args.clip, 1 + args.clip) * gain).mean()
                error = 0.5 * (agent.critic(s)[:, 0] - target).square().mean()
                loss = args.value * error - surrogate - left * args.entropy * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        curve.maybe(calls, lambda: greedy(args, agent, states_of))
        best = min([best, *found])
        if found and (update % max(1, updates // 10) == 0 or update == updates - 1):
            print(f"step {(update + 1) * m * t:,}: overhead {np.mean(found):.2%} in the mean of {len(found)} episodes, "
                  f"best so far {best:.2%}, {time.perf_counter() - begin:.0f} s")  # fmt: skip

    overhead = greedy(args, agent, states_of)
    curve.point(calls, overhead)
    print(f"greedy plan: overhead {overhead:.2%}; best of all episodes: {best:.2%}")
    return overhead


def greedy(args: Args, agent: Agent, states_of: States) -> float:
    """Overhead of the walk that takes the likeliest action every time; NaN in a dead end."""
    env = environment(args, 1)
    observation, info = env.reset(seed=0)
    over = False
    while not over:
        with torch.no_grad():
            action = agent.policy(*states_of(observation)).probs.argmax(1)
        observation, _, terminated, _, info = env.step(action.numpy())
        over = bool(terminated[0])
    return float(info["overhead"][0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="masked PPO on GpuMemory")
    for f in fields(Args):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    main(Args(**vars(parser.parse_args())))
