"""Tests every registered environment: Gymnasium's and SB3's checkers, seeding, specification."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import envs
from envs import tasks
from envs.tasks import FINGERPRINTS, TASKS

SETTINGS = [  # covers each pair of settings
    ("swap", "paper", "end", "paper"),
    ("swap", "causal", "ignore", "full"),
    ("recompute", "paper", "ignore", "full"),
    ("recompute", "causal", "end", "paper"),
    ("joint", "paper", "end", "full"),
    ("joint", "causal", "ignore", "paper"),
]
KEYS = ("mode", "reward", "invalid", "actions")
ENVIRONMENTS = [
    *(
        pytest.param("GpuMemory-v0", {**dict(zip(KEYS, one, strict=True)), "limit": [0.6, 0.8]}, id="-".join(one))
        for one in SETTINGS
    ),
    *(
        pytest.param(f"GpuMemory/{name}-v0", {}, id=name, marks=[pytest.mark.nightly] * (name != "vgg16-45"))
        for name in TASKS
    ),
    *(
        pytest.param("GpuMemoryEdit-v0", {"limit": [0.6, 0.8], "neighbors": 8, "budget": 12, "edits": edits}, id=edits)
        for edits in ("neighbors", "gap")
    ),
    pytest.param("GpuMemoryEdit/squeezenet-40-v0", {}, id="edit-squeezenet", marks=pytest.mark.nightly),
]


def rollout(env: Any, seed: int, steps: int) -> list[Any]:
    """Returns the observations and rewards of random valid actions after a reset with ``seed``."""
    observation, _ = env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    results = [observation]
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(rng.choice(np.flatnonzero(observation["action_mask"])))
        results += [reward, observation]
        if terminated or truncated:
            results.append(observation := env.reset()[0])
    return results


@pytest.mark.parametrize(("name", "arguments"), ENVIRONMENTS)
def test_an_environment_conforms(name: str, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # features are unbounded on purpose
        check_env(gymnasium.make(name, **arguments).unwrapped, skip_render_check=True)
        sb3_check_env(gymnasium.make(name, **arguments).unwrapped)
    env = gymnasium.make(name, **arguments)
    expected = rollout(env, 3, 30)
    for copy in (env, gymnasium.make(EnvSpec.from_json(env.spec.to_json()))):
        np.testing.assert_equal(rollout(copy, 3, 30), expected)


@pytest.mark.parametrize("name", TASKS)
def test_a_named_task_is_the_same_everywhere(name: str) -> None:
    """Each task has the recorded fingerprint, limit and suite."""
    task = TASKS[name]
    program, machine = tasks.load(task.program)
    assert tasks.fingerprint(program, machine) == FINGERPRINTS[task.program]
    env = gymnasium.make(f"GpuMemory/{name}-v0")
    assert env.unwrapped.tasks[0].limit == int(task.limit * program.peak_bytes)
    assert env.spec.id in envs.SUITES[task.split]
