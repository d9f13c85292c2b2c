"""PPO of other libraries with their own action masks. Random valid walks of the small task have a return of -0.15 in
the mean; the greedy walk of an untrained network has -0.13 to -0.26, one that takes an invalid action -10."""

from importlib import import_module

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["torchrl_ppo", "rllib_ppo"])
def test_a_library_learns_the_small_task_with_its_masks(name: str) -> None:
    example = import_module(f"experiments.examples.{name}")
    assert example.main(example.Args(steps=2048, seed=1)) > -0.02
