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
EDITS = {"program": None, "limit": [0.6, 0.8], "neighbors": 8, "budget": 12}
ENVIRONMENTS = [
    *(
        pytest.param("GpuMemory-v1", {**dict(zip(KEYS, one, strict=True)), "limit": [0.6, 0.8]}, id="-".join(one))
        for one in SETTINGS
    ),
    *(
        pytest.param(f"GpuMemory/{name}-v1", {}, id=name, marks=[pytest.mark.nightly] * (name != "vgg16-45"))
        for name in TASKS
    ),
    *(pytest.param("GpuMemoryEdit-v1", {**EDITS, "edits": edits}, id=edits) for edits in ("neighbors", "gap")),
    pytest.param("GpuMemoryEdit/squeezenet-40-v1", {}, id="edit-squeezenet", marks=pytest.mark.nightly),
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
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".* has an unconventional shape")  # neither an image nor a vector
        # Gymnasium's checker takes an invalid action and compares infos by ==, which is False for a NaN.
        ignore = {"invalid": "ignore"} if name.startswith(("GpuMemory-", "GpuMemory/")) else {}
        check_env(gymnasium.make(name, **{**arguments, **ignore}).unwrapped, skip_render_check=True)
        sb3_check_env(gymnasium.make(name, **arguments).unwrapped)
    env = gymnasium.make(name, **arguments)
    expected = rollout(env, 3, 30)
    for copy in (env, gymnasium.make(EnvSpec.from_json(env.spec.to_json()))):
        np.testing.assert_equal(rollout(copy, 3, 30), expected)


@pytest.mark.parametrize("name", ["GpuMemory", "GpuMemoryEdit", "GpuMemory/unet-50", "GpuMemoryEdit/vgg16-45"])
def test_a_former_version_is_refused(name: str) -> None:
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(gymnasium.error.DeprecatedEnv, match=f"v0 for `{name}` is deprecated.*`{name}-v1`"),
    ):
        gymnasium.make(f"{name}-v0")


@pytest.mark.parametrize("name", ["GpuMemory-v1", "GpuMemoryEdit-v1"])
def test_masks_are_as_gymnasium_wants_them(name: str) -> None:
    env = gymnasium.make(name, program=None, limit=0.6)
    vector = gymnasium.make_vec(name, 2, "vector_entry_point", program=None, limit=0.6)
    for tested in (env, vector):
        observation, info = tested.reset(seed=0)
        for mask in (observation["action_mask"], info["action_mask"], tested.unwrapped.action_masks()):
            assert mask.dtype == np.int8
            np.testing.assert_array_equal(mask, info["action_mask"])
    assert info["action_mask"][0, env.action_space.sample(mask=env.unwrapped.action_masks())]


@pytest.mark.parametrize("name", ["GpuMemory-v1", "GpuMemoryEdit-v1"])
def test_an_action_is_an_integer_of_the_space(name: str) -> None:
    env = gymnasium.make(name, program=None, limit=0.6).unwrapped
    vector = gymnasium.make_vec(name, 2, "vector_entry_point", program=None, limit=0.6)
    last = env.action_space.n - 1
    env.reset(seed=0)
    vector.reset(seed=0)
    valid = int(env.action_masks().argmax())
    for wrong in (float(valid), np.float32(valid), last + 1, -1, [valid], "0", True, None):
        with pytest.raises(ValueError, match=f"action: expected an integer from 0 to {last}, got"):
            env.step(wrong)
        with pytest.raises(ValueError, match=f"action: expected 2 integers from 0 to {last}, got"):
            vector.step([wrong, wrong])
    for right in (valid, np.int64(valid), np.uint8(valid), np.array(valid)):
        env.reset(seed=0)
        assert not env.step(right)[4]["invalid"]
    vector.step([valid, valid])


@pytest.mark.parametrize("name", TASKS)
def test_a_named_task_is_the_same_everywhere(name: str) -> None:
    """Each task has the recorded fingerprint, limit and suite."""
    task = TASKS[name]
    program, machine = tasks.load(task.program)
    assert tasks.fingerprint(program, machine) == FINGERPRINTS[task.program]
    env = gymnasium.make(f"GpuMemory/{name}-v1")
    assert env.unwrapped.tasks[0].limit == int(task.limit * program.peak_bytes)
    assert env.spec.id in envs.SUITES[task.split]
