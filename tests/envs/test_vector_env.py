"""Tests that the vector environments equal Gymnasium's SyncVectorEnv of single environments bit by bit."""

from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import envs
from envs.memory_env import small_task
from envs.task import DEAD_END_REWARD
from simulator import Program


def assert_same(observation: dict, i: int, expected: dict) -> None:
    assert observation.keys() == expected.keys()
    for key in expected:
        assert (observation[key][i] == expected[key]).all(), key


def assert_all_same(observation: dict, expected: dict) -> None:
    assert observation.keys() == expected.keys()
    for key in expected:
        assert observation[key].dtype == expected[key].dtype and (observation[key] == expected[key]).all(), key


def assert_infos_are_alike(info: dict, expected: dict, size: int) -> None:
    """Compares infos: ours has every key in every step, Gymnasium's marks valid entries by ``_key``."""
    for key, value in expected.items():
        if key.startswith("_"):
            continue
        counts = expected.get(f"_{key}", np.ones(size, np.bool_))
        if key == "final_obs":
            assert (info["_final_obs"] == counts).all()
            for i in np.flatnonzero(counts):
                assert_same({name: array[None] for name, array in info[key][i].items()}, 0, value[i])
            assert all(info[key][i] is None for i in np.flatnonzero(~counts))
        elif key == "final_info":
            assert (info["_final_info"] == counts).all()
            assert_infos_are_alike(info[key], value, size)
        else:
            np.testing.assert_equal(np.asarray(info[key])[counts], value[counts])


PROGRAM, MACHINE = small_task()
SHORTER = Program("shorter", PROGRAM.tensors, PROGRAM.kernels[:-2])
TASKS = {
    "program": [PROGRAM, SHORTER],
    "machine": [MACHINE, replace(MACHINE, d2h_bytes_per_s=6 * 10**9)],
    "limit": [0.6, 0.8, 1.0],
    "actions": "full",
}
EDITS = {"program": None, "limit": [0.6, 0.7], "neighbors": 8, "budget": 12, "reward": "log", "shaping": 0.3}
FORMS = {
    "paper": ("GpuMemory-v1", {**TASKS, "reward": "paper"}, None),
    "causal": ("GpuMemory-v1", {**TASKS, "reward": "causal"}, None),
    "truncated": ("GpuMemory-v1", {**TASKS, "reward": "paper"}, 4),
    "edits": ("GpuMemoryEdit-v1", EDITS, None),
    "gaps, truncated": ("GpuMemoryEdit-v1", {**EDITS, "edits": "gap"}, 4),
}


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("form", FORMS)
def test_the_vector_env_equals_gymnasiums_vector_of_envs(form, mode):
    """Compares all steps, including ends of episodes, under the same seeds in every autoreset mode.

    Covers programs of two lengths, two machines, limits below and above the peak, random actions with a few invalid
    ones, and truncation.
    """
    name, arguments, max_steps = FORMS[form]
    walks = name == "GpuMemory-v1"
    kwargs = {**arguments, "max_episode_steps": max_steps}
    vector = gymnasium.make_vec(name, 3, "vector_entry_point", **kwargs, autoreset_mode=mode)
    assert isinstance(vector, envs.MemoryVectorEnv if walks else envs.MemoryEditVectorEnv)
    assert vector.metadata["autoreset_mode"] == mode
    peer = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, name, **kwargs)] * 3, autoreset_mode=mode)
    assert (vector.single_action_space, vector.observation_space) == (peer.single_action_space, peer.observation_space)
    observation, info = vector.reset(seed=7)
    assert_all_same(observation, peer.reset(seed=7)[0])
    rng = np.random.default_rng(0)
    ends = []
    cut = 0
    rewards = []
    tasks = set()
    for step in range(200 if walks else 60):
        valid = observation["action_mask"]
        actions = np.array([rng.choice(np.flatnonzero(valid[i] != (walks and rng.random() < 0.02))) for i in range(3)])
        observation, reward, terminated, truncated, info = vector.step(actions)
        expected, its_reward, its_end, its_stop, its_info = peer.step(actions)
        assert_all_same(observation, expected)
        assert (reward == its_reward).all() and (terminated == its_end).all() and (truncated == its_stop).all()
        assert (info["action_mask"] == observation["action_mask"]).all()
        assert_infos_are_alike(info, its_info, 3)
        done = terminated | truncated
        ends += [(step, i) for i in np.flatnonzero(terminated if walks else done)]
        rewards += reward.tolist()
        tasks |= set(observation["program" if walks else "task"].tolist())
        cut += truncated.sum()
        if mode == AutoresetMode.DISABLED and done.any():
            with pytest.raises(ValueError, match="reset episodes that have ended"):
                vector.step(actions)
            observation, info = vector.reset(options={"reset_mask": done})
            assert_all_same(observation, peer.reset(options={"reset_mask": done.copy()})[0])
    assert len(ends) > (20 if walks else 8) and len({step for step, _ in ends}) > (10 if walks else 2)
    assert tasks == set(range(12 if walks else 2)) and (DEAD_END_REWARD in rewards) == walks
    assert cut > 10 if max_steps else (cut == 0) == walks


def test_what_may_be_reset():
    vector = envs.MemoryVectorEnv(3, limit=[0.6, 0.8])
    vector.reset(seed=1)
    vector.step(np.zeros(3, np.int64))
    mask = np.array([False, True, False])
    for given in (mask, mask.tolist()):
        observation, _ = vector.reset(options={"reset_mask": given, "task": 1})
    assert observation["current"][0] > 0 and observation["current"][1] == 0 and observation["program"][1] == 1
    for wrong in (np.zeros(3, np.bool_), np.ones(2, np.bool_), np.ones(3), [0, 1, 0]):
        with pytest.raises(ValueError, match="reset_mask: expected 3 booleans"):
            vector.reset(options={"reset_mask": wrong})
    with pytest.raises(ValueError, match="seed: expected 3, got 2"):
        vector.reset(seed=[1, 2])
    for env in (vector, envs.MemoryEnv(limit=[0.6, 0.8])):
        with pytest.raises(ValueError, match="expected a task from -2 to 1, got 2"):
            env.reset(options={"task": 2})
        with pytest.raises(ValueError, match=r"options: expected 'task'.*got 'tasks'"):
            env.reset(options={"tasks": 1})


def test_a_vector_env_takes_the_first_of_several_seeds_and_an_action_for_each_walk():
    vector = envs.MemoryVectorEnv(4, PROGRAM, MACHINE, [0.6, 0.7, 0.8, 0.9])
    programs = [vector.reset(seed=seed)[0]["program"].tolist() for seed in (3, [3, 4, 5, 6], 4)]
    assert programs[0] == programs[1] != programs[2]
    with pytest.raises(ValueError):
        vector.step(np.zeros(3, np.int64))
