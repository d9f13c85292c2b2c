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
from envs.walk import DEAD_END_REWARD
from simulator import OutOfMemory, Program, simulate
from tests.strategies import machines, networks, programs, reachable_limits


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
    program, machine = data.draw(programs() | networks()), data.draw(machines())
    mode = data.draw(st.sampled_from(["swap", "recompute", "joint"]))
    limit = max(1, data.draw(reachable_limits(program) | st.integers(program.peak_bytes // 3, program.peak_bytes)))
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


def assert_same(observation: dict, i: int, expected: dict) -> None:
    assert observation.keys() == expected.keys()
    for key in expected:
        assert (observation[key][i] == expected[key]).all(), key


def test_vector_env_is_many_envs():
    """Action by action, through the ends of episodes: the step after one begins the next, whatever its action is.

    Programs of two lengths, limits at which something must leave and one at which nothing must; random actions, now and
    then an invalid one.
    """
    program, machine = small_task()
    shorter = Program("shorter", program.tensors, program.kernels[:-2])
    arguments = {"program": [program, shorter], "machine": machine, "limit": [0.6, 0.8, 1.0]}
    vector = gymnasium.make_vec("GpuMemory-v0", num_envs=3, vectorization_mode="vector_entry_point", **arguments)
    singles = [gymnasium.make("GpuMemory-v0", **arguments).unwrapped for _ in range(3)]
    observation, info = vector.reset(seed=0)
    for i, single in enumerate(singles):
        assert_same(observation, i, single.reset(options={"task": observation["program"][i, 0]})[0])
    rng = np.random.default_rng(0)
    ended = np.zeros(3, bool)
    ends, rewards, tasks = [], [], set()
    for step in range(300):
        valid = observation["action_mask"]
        actions = [int(rng.choice(np.flatnonzero(valid[i] != (rng.random() < 0.02)))) for i in range(3)]
        observation, reward, terminated, truncated, info = vector.step(np.array(actions))
        assert not truncated.any() and (info["action_mask"] == observation["action_mask"]).all()
        for i, (single, action) in enumerate(zip(singles, actions, strict=True)):
            if ended[i]:
                task = observation["program"][i, 0]
                tasks.add(int(task))
                expected, its_info = single.reset(options={"task": task})
                its_reward, its_end = 0.0, False
            else:
                expected, its_reward, its_end, _, its_info = single.step(action)
            assert_same(observation, i, expected)
            assert (reward[i], terminated[i]) == (its_reward, its_end)
            assert (info["overhead"][i], info["feasible"][i]) == (its_info["overhead"], its_info["feasible"])
        ends += [(step, i) for i in np.flatnonzero(terminated)]
        rewards += reward.tolist()
        ended = terminated
    assert len(ends) > 30 and len({step for step, _ in ends}) > 20  # many, most of them apart
    assert tasks == set(range(6)) and DEAD_END_REWARD in rewards and min(r for r in rewards if r != DEAD_END_REWARD) < 0


def test_an_episode_of_the_vector_env_that_has_ended_takes_no_action():
    """An action that would be refused is not even looked at; the episode after it begins at position 0."""
    vector = envs.MemoryVectorEnv(2, limit=0.6)
    first, _ = vector.reset(seed=0)
    invalid = int(vector.single_action_space.n) - 1
    assert not first["action_mask"][0, invalid]
    wait = vector.step(np.array([invalid, 0]))
    assert wait[1].tolist() == [DEAD_END_REWARD, 0.0] and wait[2].tolist() == [True, False]
    begun = vector.step(np.array([invalid, 0]))
    assert begun[1][0] == 0.0 and not begun[2][0]
    assert_same({key: value[:1] for key, value in begun[0].items()}, 0, {key: value[0] for key, value in first.items()})


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
