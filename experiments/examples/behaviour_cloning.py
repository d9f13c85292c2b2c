"""Offline data of a task of GpuMemory, and behaviour cloning on it.

    python -m experiments.examples.behaviour_cloning --source annealing --out runs/offline/annealing

Walks of plans that annealing or the policy has made, or of random play. ``--out`` keeps them with Minari's names and
shapes: metadata.json, and data/episode_*.npz with observations/… (T + 1 of each), actions, rewards, terminations and
truncations (T). ``--minari NAME/TASK/SOURCE-v0``, where Minari is installed, keeps them as a dataset of its own.
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

import agents
import envs  # noqa: F401  # registers GpuMemory/…
from envs.graph import RELIEF
from envs.task import COPY, EARLY, KEEP, Task
from experiments.examples import ppo_single_file
from experiments.examples.ppo_single_file import Agent, States
from simulator import Plan, Swap
from simulator.files import write_json

SOURCES = ("annealing", "policy", "random")


@dataclass
class Args:
    task: str = "GpuMemory/vgg16-45-v0"
    source: str = "annealing"  # policy, random; all: as many walks of each
    walks: int = 8
    calls: int = 2_000  # simulator calls of each plan of annealing
    seed: int = 0
    hidden: int = 128
    epochs: int = 60
    batch: int = 64
    learning_rate: float = 1e-3
    out: str = ""  # a folder for the walks
    minari: str = ""  # the id of a dataset of Minari's


@dataclass
class Episode:
    """T steps: observations of T + 1 moments by key, actions, rewards, terminations, truncations."""

    observations: dict[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


def wanted(task: Task, plan: Plan) -> np.ndarray:
    """(N * forms,) how much a walk that follows a plan wants each action: 3 what the plan does, 2 the same in another
    form, 1 to go on."""
    n, gaps = len(task.graph), {(gap.tensor, gap.before): i for i, gap in enumerate(task.graph.gaps)}
    nodes = {True: dict(zip(task.offload_gap.tolist(), task.offloads.tolist(), strict=True)),
             False: dict(zip(task.removal_gap.tolist(), task.removals.tolist(), strict=True))}  # fmt: skip
    out = np.zeros(n * task.forms)
    out[0] = 1
    for decision in plan.decisions:
        swap = isinstance(decision, Swap)
        node = nodes[swap].get(gaps.get((decision.tensor, decision.before), -1))
        if node is None:  # a kernel that runs again by itself, or too small a tensor
            continue
        if isinstance(decision, Swap):
            form = COPY if decision.copy is not None else 0
        else:
            form = EARLY if getattr(decision, "at", None) is not None else KEEP if decision.keep else 0
        out[node::n] = 2
        out[node + n * form] = 3
    return out


def walk(task: str, plan: Plan | None, seed: int) -> Episode:
    """An episode that follows a plan as far as the environment's actions can; without one, of random play."""
    env, rng = gymnasium.make(task, actions="full"), np.random.default_rng(seed)
    want = None if plan is None else wanted(env.unwrapped.tasks[0], plan)
    observation, _ = env.reset(seed=seed)
    seen, taken, rewards, over = [observation], list[int](), list[float](), False
    while not over:
        valid = np.flatnonzero(observation["action_mask"])
        if want is None:
            action = int(rng.choice(valid))
        else:  # where nothing that is planned can be done, what relieves most
            relief = observation["nodes"][valid % len(observation["nodes"]), RELIEF]
            action = int(valid[(want[valid] + 0.5 * relief).argmax()])
        observation, reward, over, _, _ = env.step(np.int64(action))
        seen.append(observation)
        taken.append(action)
        rewards.append(float(reward))
    steps = np.arange(1, len(taken) + 1)
    return Episode({key: np.array([one[key] for one in seen]) for key in seen[0]}, np.array(taken), np.array(rewards),
                   steps == len(taken), np.zeros(len(taken), np.bool_))  # fmt: skip


def dataset(args: Args) -> list[Episode]:
    """The walks of a source."""
    if args.source == "all":
        return [one for source in SOURCES for one in dataset(Args(**{**vars(args), "source": source}))]
    if args.source not in SOURCES:
        raise ValueError(f"source: expected all or one of {', '.join(SOURCES)}, got {args.source!r}")
    task, out = gymnasium.make(args.task).unwrapped.tasks[0], []
    for i in range(args.walks):
        seed = 1000 * args.seed + i
        options = {"calls": args.calls, "seed": seed} if args.source == "annealing" else {"seed": seed}
        planner = None if args.source == "random" else agents.make(args.source, **options)
        plan = None if planner is None else planner.plan(task.program, task.machine, task.limit)
        out.append(walk(args.task, plan, seed))
    return out


def save(args: Args, episodes: list[Episode], folder: Path) -> None:
    """The walks with Minari's names, in plain files."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for i, one in enumerate(episodes):
        parts = {f"observations/{key}": values for key, values in one.observations.items()}
        rest = {key: values for key, values in vars(one).items() if key != "observations"}
        np.savez_compressed(folder / "data" / f"episode_{i:05d}.npz", **parts, **rest)
    write_json(folder / "metadata.json", {
        "dataset_id": f"{args.task.removesuffix('-v0').lower()}/{args.source}-v0", "data_format": "npz",
        "total_episodes": len(episodes), "total_steps": sum(len(one.actions) for one in episodes),
        "env_spec": json.loads(gymnasium.make(args.task, actions="full").spec.to_json()), "algorithm_name": args.source,
    }, indent=1)  # fmt: skip


def save_minari(args: Args, episodes: list[Episode]) -> None:
    """The walks as a dataset of Minari's, in its own folder (MINARI_DATASETS_PATH)."""
    import minari
    from minari.data_collector import EpisodeBuffer

    buffers = [
        EpisodeBuffer(i, None, None, one.observations, one.actions, one.rewards.tolist(), one.terminations.tolist(),
                      one.truncations.tolist()) for i, one in enumerate(episodes)
    ]  # fmt: skip
    minari.create_dataset_from_buffers(args.minari, buffers, env=gymnasium.make(args.task, actions="full"),
                                       algorithm_name=args.source)  # fmt: skip


def clone(args: Args, episodes: list[Episode]) -> tuple[float, Plan | None]:
    """Learns what the walks did, by cross-entropy among what may be taken; overhead (NaN in a dead end) and plan of the
    greedy walk."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    together: dict[str, Any] = {key: np.concatenate([one.observations[key][:-1] for one in episodes])
                                for key in episodes[0].observations}  # fmt: skip
    states_of = States(together)
    states, masks = states_of(together)
    actions = torch.from_numpy(np.concatenate([one.actions for one in episodes]))
    agent = Agent(states_of.size, masks.shape[1], args.hidden)
    optimizer = torch.optim.Adam(agent.actor.parameters(), args.learning_rate)
    for _ in range(args.epochs):
        for i in torch.randperm(len(actions)).split(args.batch):
            loss = -agent.policy(states[i], masks[i]).log_prob(actions[i]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return ppo_single_file.greedy(ppo_single_file.Args(task=args.task, actions="full"), agent, states_of)


def main(args: Args) -> float:
    """Makes the walks, keeps them, and returns the overhead of what was cloned."""
    episodes = dataset(args)
    returns = np.array([one.rewards.sum() for one in episodes])
    print(
        f"{len(episodes)} walks of {args.source}: return {returns.mean():.4f} in the mean, {returns.max():.4f} at best"
    )
    if args.out:
        save(args, episodes, Path(args.out))
    if args.minari:
        save_minari(args, episodes)
    overhead, _ = clone(args, episodes)
    print(f"behaviour cloning, greedy walk: overhead {overhead:.2%}")
    return overhead


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="walks of GpuMemory, and behaviour cloning")
    for f in fields(Args):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    main(Args(**vars(parser.parse_args())))
