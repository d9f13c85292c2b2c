"""PPO of TorchRL with action masks on a task of GpuMemory.

    python -m experiments.examples.torchrl_ppo --steps 4096
    python -m experiments.examples.torchrl_ppo --task GpuMemory/vgg16-45-v0 --steps 200000

TorchRL reads the observation as it is. ``ActionMask`` gives the mask to the environment's action spec, so that random
actions are valid ones; ``MaskedCategorical`` is the policy's distribution, in roll-outs and in the loss.
"""

import argparse
from dataclasses import dataclass, fields

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import (
    ActionMask,
    Compose,
    DTypeCastTransform,
    ExplorationType,
    FlattenObservation,
    GymEnv,
    RewardClipping,
    RewardScaling,
    SerialEnv,
    Transform,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import MLP, MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import envs  # noqa: F401  # registers GpuMemory-v0 and the tasks that have names


@dataclass
class Args:
    task: str = "GpuMemory-v0"
    steps: int = 4_096  # of all environments
    seed: int = 0
    num_envs: int = 8
    batch: int = 512  # steps between updates
    minibatch: int = 128
    epochs: int = 4
    hidden: int = 128
    learning_rate: float = 1e-3
    entropy: float = 0.01
    worst: float = -1.0  # rewards are cut there: a dead end's would drown all others
    reward_scale: float = 10.0


def made(task: str, *rewards: Transform) -> TransformedEnv:
    """The task, its nodes as one vector and its mask as booleans."""
    flat = FlattenObservation(-2, -1, in_keys=["nodes"])
    mask = DTypeCastTransform(torch.int8, torch.bool, in_keys=["action_mask"])
    return TransformedEnv(GymEnv(task, categorical_action_encoding=True), Compose(mask, ActionMask(), flat, *rewards))


def main(args: Args) -> float:
    """Trains, and returns the return of the greedy walk."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    def trained_in() -> TransformedEnv:
        scale = args.reward_scale
        return made(args.task, RewardScaling(0.0, scale), RewardClipping(scale * args.worst, scale))

    env = SerialEnv(args.num_envs, trained_in)
    env.set_seed(args.seed)
    one = made(args.task)
    inputs, actions = one.observation_spec["nodes"].shape[-1], one.action_spec.n
    layers = {"num_cells": [args.hidden, args.hidden], "activation_class": nn.Tanh}
    actor = ProbabilisticActor(
        TensorDictModule(MLP(inputs, actions, **layers), ["nodes"], ["logits"]),
        in_keys={"logits": "logits", "mask": "action_mask"}, out_keys=["action"], spec=one.action_spec.clone(),
        distribution_class=MaskedCategorical, distribution_kwargs={"neg_inf": -1e8}, return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(MLP(inputs, 1, **layers), in_keys=["nodes"])
    advantage = GAE(gamma=1.0, lmbda=0.95, value_network=critic)  # an episode ends, and its return is the overhead
    loss = ClipPPOLoss(actor, critic, entropy_coeff=args.entropy, critic_coeff=0.5, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), args.learning_rate)

    collector = Collector(
        env, actor, frames_per_batch=args.batch, total_frames=args.steps, auto_register_policy_transforms=False
    )
    for update, batch in enumerate(collector):
        for _ in range(args.epochs):
            with torch.no_grad():
                advantage(batch)
            flat = batch.reshape(-1)
            for i in torch.randperm(len(flat)).split(args.minibatch):
                found = loss(flat[i])
                optimizer.zero_grad()
                (found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        if update % 10 == 0:
            print(f"step {(update + 1) * args.batch:,}: greedy return {greedy(one, actor):.4f}")
    collector.shutdown()
    out = greedy(one, actor)
    print(f"greedy return {out:.4f}")
    return out


@torch.no_grad()
def greedy(env: TransformedEnv, actor: ProbabilisticActor) -> float:
    """The return of the walk that takes the likeliest action every time: -overhead, below -10 in a dead end."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        return float(env.rollout(100_000, actor)["next", "reward"].sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO of TorchRL on GpuMemory")
    for f in fields(Args):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    main(Args(**vars(parser.parse_args())))
