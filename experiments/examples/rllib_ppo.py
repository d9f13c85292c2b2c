"""PPO of RLlib with action masks on a task of GpuMemory.

    python -m experiments.examples.rllib_ppo --steps 4096
    python -m experiments.examples.rllib_ppo --task GpuMemory/vgg16-45-v0 --steps 200000

``Masked`` is all the glue: RLlib's ActionMaskingTorchRLModule wants an observation of "action_mask" and "observations".
"""

import argparse
from dataclasses import dataclass, fields

import gymnasium
import numpy as np
import ray
import torch
from gymnasium import spaces
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.examples.rl_modules.classes.action_masking_rlm import ActionMaskingTorchRLModule
from ray.tune.registry import register_env

import envs  # noqa: F401  # registers GpuMemory-v0 and the tasks that have names
from experiments.common.workers import start_ray


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


class Masked(gymnasium.ObservationWrapper):
    """The nodes as one vector beside the mask."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        nodes, mask = env.observation_space["nodes"], env.observation_space["action_mask"]
        self.observation_space = spaces.Dict({
            "observations": spaces.Box(-np.inf, np.inf, (int(np.prod(nodes.shape)),), np.float32),
            "action_mask": spaces.Box(0.0, 1.0, mask.shape, np.float32),
        })  # fmt: skip

    def observation(self, observation: dict) -> dict[str, np.ndarray]:
        """As described."""
        mask = observation["action_mask"].astype(np.float32)
        return {"observations": observation["nodes"].ravel(), "action_mask": mask}


def main(args: Args) -> float:
    """Trains, and returns the return of the greedy walk."""

    def trained_in(_: object) -> gymnasium.Env:
        env = Masked(gymnasium.make(args.task))
        return gymnasium.wrappers.TransformReward(env, lambda r: args.reward_scale * max(r, args.worst))

    layers = [args.hidden, args.hidden]
    model = DefaultModelConfig(fcnet_hiddens=layers, fcnet_activation="tanh", vf_share_layers=False)
    config = (
        PPOConfig()
        .environment("masked")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=args.num_envs, rollout_fragment_length="auto")
        .training(lr=args.learning_rate, gamma=1.0, lambda_=0.95, train_batch_size_per_learner=args.batch,
                  minibatch_size=args.minibatch, num_epochs=args.epochs, entropy_coeff=args.entropy, grad_clip=0.5,
                  vf_loss_coeff=0.5, vf_clip_param=float("inf"), use_kl_loss=False, clip_param=0.2)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=ActionMaskingTorchRLModule, model_config=model))
        .debugging(seed=args.seed, log_level="ERROR")
    )  # fmt: skip
    register_env("masked", trained_in)
    start_ray(num_cpus=1, include_dashboard=False)  # ray.init, again where a busy computer was too slow for it
    algorithm = config.build_algo()
    one = Masked(gymnasium.make(args.task))
    for update in range(max(1, args.steps // args.batch)):
        algorithm.train()
        if update % 10 == 0:
            print(f"step {(update + 1) * args.batch:,}: greedy return {greedy(one, algorithm.get_module()):.4f}")
    out = greedy(one, algorithm.get_module())
    algorithm.stop()
    ray.shutdown()
    print(f"greedy return {out:.4f}")
    return out


@torch.no_grad()
def greedy(env: gymnasium.Env, module: RLModule) -> float:
    """The return of the walk that takes the likeliest action every time: -overhead, below -10 in a dead end."""
    observation, _ = env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        batch = {Columns.OBS: {key: torch.from_numpy(value)[None] for key, value in observation.items()}}
        logits = module.forward_inference(batch)[Columns.ACTION_DIST_INPUTS]
        observation, reward, over, _, _ = env.step(int(logits.argmax()))
        total += float(reward)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO of RLlib on GpuMemory")
    for f in fields(Args):
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default)
    main(Args(**vars(parser.parse_args())))
