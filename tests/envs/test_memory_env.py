"""The environment: the checkers of two libraries, rewards that add up, a mask that never lies."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings, strategies as st
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import envs
from envs.memory_env import small_task
from simulator import OutOfMemory, simulate
from tests.strategies import machines, programs


@pytest.mark.parametrize("mode", ["swap", "recompute", "joint"])
def test_checkers(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unbounded features are meant
        check_env(gymnasium.make("GpuMemory-v0", mode=mode).unwrapped, skip_render_check=True)
        sb3_check_env(gymnasium.make("GpuMemory-v0", mode=mode).unwrapped)


def random_episode(walk, rng):
    rewards = []
    while not walk.done:
        node = int(rng.choice(np.flatnonzero(walk.mask())))
        rewards.append(walk.step(node).reward)
    return rewards


def test_rewards_sum_to_the_overhead_of_the_returned_plan():
    program, machine = small_task()
    walk = envs.Walk(envs.Task(program, machine, round(0.6 * program.peak_bytes), mode="joint"))
    rng = np.random.default_rng(0)
    overheads = set()
    for _ in range(50):
        walk.reset()
        rewards = random_episode(walk, rng)
        if walk.dead_end:
            continue
        timeline = simulate(program, walk.plan(), machine, walk.task.limit)
        assert timeline.iteration_ns == walk.iteration_ns
        assert sum(rewards) == pytest.approx(-timeline.overhead, abs=1e-12)
        overheads.add(timeline.iteration_ns)
    assert len(overheads) > 10  # the choices matter


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_mask_never_lies(data):
    """A valid action is taken without error and gives a plan that fits the program; an invalid one is refused.
    An episode ends feasible, or in a dead end where indeed no plan of its kind helps kernel p."""
    program, machine = data.draw(programs()), data.draw(machines())
    mode = data.draw(st.sampled_from(["swap", "recompute", "joint"]))
    limit = max(1, int(program.peak_bytes * data.draw(st.floats(0.3, 1))))
    walk = envs.Walk(envs.Task(program, machine, limit, min_bytes=1, mode=mode))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    while not walk.done:
        mask = walk.mask()
        invalid = np.flatnonzero(~mask)
        if len(invalid):
            with pytest.raises(ValueError, match="not a valid action"):
                walk.step(int(rng.choice(invalid)))
        assert mask.any()
        walk.step(int(rng.choice(np.flatnonzero(mask))))
        walk.plan().check(program)
    if walk.dead_end:
        with pytest.raises(OutOfMemory):
            simulate(program, walk.plan(), machine, limit)
    else:
        assert simulate(program, walk.plan(), machine, limit).peak_bytes <= limit


def test_vector_env_is_many_envs():
    vector = gymnasium.make_vec("GpuMemory-v0", num_envs=3, vectorization_mode="vector_entry_point", limit=0.6)
    single = gymnasium.make("GpuMemory-v0", limit=0.6).unwrapped
    observation, _ = vector.reset(seed=0)
    expected, _ = single.reset(seed=0)
    done = False
    while not done:
        action = int(np.flatnonzero(expected["action_mask"])[-1])
        observation, reward, ended, _, _ = vector.step(np.array([action] * 3))
        expected, one, done, _, _ = single.step(action)
        for key in expected:
            assert (observation[key] == expected[key]).all()
        assert (reward == one).all()
        assert (ended == done).all()


def test_several_programs_and_limits():
    program, machine = small_task()
    env = envs.MemoryEnv([program, program], machine, [0.6, 0.8])
    seen = {int(env.reset(seed=s)[0]["program"][0]) for s in range(40)}
    assert seen == {0, 1, 2, 3}
    assert env.reset(options={"task": 2})[0]["program"] == 2
    with pytest.raises(ValueError, match="positive"):
        envs.MemoryEnv(program, machine, 0)


def test_a_limit_may_be_a_size():
    program, machine = small_task()
    env = envs.MemoryEnv(program, machine, ["24MiB", 0.6, 25_000_000])
    assert [task.limit for task in env.tasks] == [24 * 2**20, int(0.6 * program.peak_bytes), 25_000_000]
    assert envs.MemoryVectorEnv(2, program, machine, "24MiB").tasks[0].limit == 24 * 2**20


def test_the_graph_is_the_operations():
    program, machine = small_task()
    graph = envs.Task(program, machine, program.peak_bytes // 2, mode="joint").graph
    concerned = {gap.tensor for gap in graph.gaps}
    assert len(graph) == 1 + sum(op.tensor in concerned for op in program.operations())
    assert len(envs.Task(program, machine, program.peak_bytes).graph) == 1  # nothing need leave
    actions = graph.action_gap[graph.action_gap >= 0]
    kinds = graph.action_kind[graph.action_gap >= 0]
    assert len(set(zip(actions, kinds, strict=True))) == len(actions)  # one node an action
    assert (np.bincount(graph.edges[0]) >= 2).all()
