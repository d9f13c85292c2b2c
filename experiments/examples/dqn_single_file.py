"""Trains a masked DQN on one task of either environment in one file (CleanRL style, PyTorch and NumPy only).

    python -m experiments.examples.dqn_single_file --steps 20000 --seed 0
    python -m experiments.examples.dqn_single_file --task GpuMemoryEdit/unet-50-v1 --reward-scale 100

Source: "GPU memory management for neural networks using deep Q-network" (2020), equations 1 to 5 (structure2vec, on
GpuMemory), plus a target network. On GpuMemoryEdit an edit's Q-value is the sum over its changes.
Shapes: N nodes, E edges, B states, F features, p embedding size, G gaps, M edits.
"""

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import envs  # noqa: F401  # registers GpuMemory/… and GpuMemoryEdit/…
from envs.edit.columns import N_CHANGES
from experiments.common import report
from experiments.common.curves import Curve

MASKED = -1e8  # value of an invalid action; not -inf, because 0 * -inf is NaN


@dataclass
class Args:
    """Settings of a run, which are also its command-line options."""

    task: str = "GpuMemory-v1"
    steps: int = 20_000  # total over all environments
    seed: int = 0
    limit: float = 0.7  # fraction of the peak of GpuMemory-v1; a named task has its own
    num_envs: int = 8  # environments that step together
    size: int = 16  # embedding size p
    rounds: int = 3  # rounds of message passing
    width: int = 64  # hidden width on GpuMemoryEdit
    learning_rate: float = 1e-3
    buffer: int = 10_000  # transitions
    batch: int = 32  # transitions per update
    warm_up: int = 1_000  # steps before the first update
    target_every: int = 800  # steps
    explore: float = 0.3  # fraction of the steps over which epsilon decays from 1 to 0.02
    reward_scale: float = 10.0  # factor of the rewards
    greedy_every: int = 2_000  # steps (one simulator call each) between evaluations of the greedy policy
    curve: str = ""  # learning-curve file for figure=learning, e.g. curve.json


class QNetwork(nn.Module):
    """structure2vec network: Q (B, N) of every node, MASKED for invalid actions."""

    def __init__(self, edges: np.ndarray, weights: np.ndarray, features: int, p: int, rounds: int):
        super().__init__()
        self.source, self.target = torch.from_numpy(edges)  # (E,) each; every node is also its own neighbor
        self.weights = torch.from_numpy(weights)[:, None]
        self.rounds = rounds
        self.features = nn.Linear(features, p)
        self.neighbors = nn.Linear(p, p, bias=False)
        self.edge = nn.Linear(1, p, bias=False)
        self.edges = nn.Linear(p, p, bias=False)
        self.all, self.current, self.node = (nn.Linear(p, p) for _ in range(3))
        self.mix = nn.Linear(3 * p, p)
        self.q = nn.Linear(p, 1)

    def gather(self, messages: Tensor, n: int) -> Tensor:
        """Sums the messages on each node's edges: (B, E, p) -> (B, N, p)."""
        return messages.new_zeros(len(messages), n, messages.shape[2]).index_add(1, self.target, messages)

    def forward(self, nodes: Tensor, current: Tensor, mask: Tensor) -> Tensor:
        """Returns Q (B, N) from nodes (B, N, F), current (B,) and mask (B, N)."""
        n = nodes.shape[1]
        fixed = self.features(nodes) + self.edges(self.gather(self.edge(self.weights).relu()[None], n))
        s = fixed.relu()
        for _ in range(self.rounds - 1):  # equation 1: node embeddings from features, neighbors and edges
            s = (fixed + self.neighbors(self.gather(s[:, self.source], n))).relu()
        graph = torch.cat([self.all(s.mean(1)), self.current(s[torch.arange(len(s)), current])], 1)  # equation 2
        joint = torch.cat([graph[:, None].expand(-1, n, -1), self.node(s)], 2)
        return self.q(self.mix(joint).relu())[..., 0].masked_fill(~mask, MASKED)  # equation 3


class EditQNetwork(nn.Module):
    """Q (B, M) of every edit, the sum of its changes' values; MASKED for invalid actions."""

    def __init__(self, static: np.ndarray, columns: int, width: int):
        super().__init__()
        self.static = torch.from_numpy(static)  # (G, F)
        self.of_static = nn.Linear(static.shape[1], width)
        self.of_state = nn.Linear(columns, width)
        self.q = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, N_CHANGES))

    def forward(self, gaps: Tensor, plan: Tensor, edits: Tensor, mask: Tensor) -> Tensor:
        """Returns Q (B, M) from gaps (B, G, F), plan (B, F), edits (B, M, changes) and mask (B, M)."""
        state = torch.cat([gaps, plan[:, None].expand(-1, gaps.shape[1], -1)], 2)
        values = self.q(self.of_static(self.static) + self.of_state(state)).flatten(1)  # of gap * N_CHANGES + change
        changes = values.gather(1, edits.clamp(min=0).flatten(1)).view_as(edits)
        return changes.masked_fill(edits < 0, 0.0).sum(2).masked_fill(~mask, MASKED)


def state_of(observation: dict[str, np.ndarray]) -> tuple[Tensor, ...]:
    """Returns the network's inputs: nodes, current, mask; or gaps, plan, edits, mask."""
    mask = torch.from_numpy(observation["action_mask"] != 0)
    if "edits" in observation:
        gaps, plan, edits = (torch.from_numpy(observation[key].copy()) for key in ("gaps", "plan", "edits"))
        return gaps, plan, edits.long(), mask
    return *(torch.from_numpy(observation[key].copy()) for key in ("nodes", "current")), mask


def network_of(args: Args, graph: Any, observation: dict[str, np.ndarray]) -> nn.Module:
    """Returns the network for the task's graph and observations."""
    if "edits" in observation:
        columns = observation["gaps"].shape[2] + observation["plan"].shape[1]
        return EditQNetwork(observation["static"][0].copy(), columns, args.width)
    return QNetwork(graph.edges, graph.weights, observation["nodes"].shape[2], args.size, args.rounds)


def environment(args: Args, count: int, **options: Any) -> gymnasium.vector.VectorEnv:
    """Returns a vector environment of ``count`` environments."""
    limit = {"limit": args.limit} if args.task == "GpuMemory-v1" else {}
    return gymnasium.make_vec(args.task, count, "vector_entry_point", **limit, **options)


def overhead_of(info: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the overhead that each episode ended with, NaN in a dead end; in GpuMemoryEdit of the best plan."""
    return info.get("best_overhead", info["overhead"])


def main(args: Args) -> float:
    """Trains and returns the overhead of the greedy plan (infinite if it is infeasible)."""
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = environment(args, args.num_envs, autoreset_mode="Disabled")
    task = env.unwrapped.tasks[0]
    metadata = {"agent": "dqn_single_file", "seed": args.seed, "reward": "paper"}
    curve = Curve(
        Path(args.curve) if args.curve else None,
        task.program,
        task.machine,
        task.limit,
        task.mode,
        metadata,
        args.greedy_every,
    )
    observation, _ = env.reset(seed=args.seed)
    n = observation["action_mask"].shape[1]
    q, target = (network_of(args, task.graph, observation) for _ in range(2))
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), args.learning_rate)

    # The replay buffer is a ring: row i of each tensor belongs to transition i.
    size = args.buffer
    obs, next_obs = ([torch.zeros(size, *x.shape[1:], dtype=x.dtype) for x in state_of(observation)] for _ in range(2))
    actions_taken = torch.zeros(size, dtype=torch.long)
    rewards = torch.zeros(size)
    ends = torch.zeros(size)
    stored = 0
    episodes = 0
    returns = np.zeros(args.num_envs)

    for step in range(0, args.steps, args.num_envs):
        # Epsilon-greedy among the valid actions.
        epsilon = max(0.02, 1 - 0.98 * step / (args.explore * args.steps))
        state = state_of(observation)
        with torch.no_grad():
            greedy = q(*state).argmax(1).numpy()
        random = np.where(state[-1], rng.random((args.num_envs, n)), -1).argmax(1)
        actions = np.where(rng.random(args.num_envs) < epsilon, random, greedy)

        observation, reward, terminated, truncated, info = env.step(actions)
        terminated |= truncated  # only a spent budget truncates, and the state has its fraction
        slots = torch.arange(stored, stored + args.num_envs) % size
        for ring, values in zip((*obs, *next_obs), (*state, *state_of(observation)), strict=True):
            ring[slots] = values
        actions_taken[slots] = torch.from_numpy(actions)
        ends[slots] = torch.from_numpy(terminated).float()
        rewards[slots] = torch.from_numpy(reward * args.reward_scale).float()
        stored += args.num_envs
        returns += reward
        for ended in np.flatnonzero(terminated):
            episodes += 1
            curve.add_episode(overhead_of(info)[ended])
            if episodes % 50 == 0:
                print(f"step {step:,}, episode {episodes:,}: return {returns[ended]:.4f}, epsilon {epsilon:.2f}")
            returns[ended] = 0.0
        if terminated.any():
            observation, _ = env.reset(options={"reset_mask": terminated})

        if stored >= args.warm_up:  # equations 4 and 5
            i = torch.from_numpy(rng.integers(min(stored, size), size=args.batch))
            with torch.no_grad():
                y = rewards[i] + (1 - ends[i]) * target(*(ring[i] for ring in next_obs)).max(1).values
            value = q(*(ring[i] for ring in obs)).gather(1, actions_taken[i][:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(value, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q.parameters(), 10.0)
            optimizer.step()
        if step % args.target_every == 0:
            target.load_state_dict(q.state_dict())
        curve.add_point_if_due(step + args.num_envs, lambda: greedy_overhead(q, args))

    greedy_cost = greedy_overhead(q, args)
    curve.add_point(stored, greedy_cost)
    overhead = greedy_cost if math.isfinite(greedy_cost) else math.inf
    rows = [report.score(name, task.program, task.machine, task.limit, args.seed)[0] for name in report.heuristics()]
    best = min((row for row in rows if row["feasible"]), key=lambda row: row["overhead"])
    print(f"greedy plan: overhead {overhead:.2%}; best published heuristic, {best['planner']}: {best['overhead']:.2%}")
    return overhead


def greedy_overhead(q: nn.Module, args: Args) -> float:
    """Returns the overhead of the greedy episode; NaN if its plan is infeasible."""
    env = environment(args, 1)
    observation, info = env.reset(seed=0)
    is_done = False
    while not is_done:
        with torch.no_grad():
            observation, _, terminated, truncated, info = env.step(q(*state_of(observation)).argmax(1).numpy())
        is_done = bool(terminated[0] or truncated[0])
    return float(overhead_of(info)[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a masked DQN on GpuMemory or GpuMemoryEdit.")
    for f in fields(Args):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    main(Args(**vars(parser.parse_args())))
