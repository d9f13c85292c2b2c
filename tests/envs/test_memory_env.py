"""Tests ``GpuMemory-v1``: observations, sums of rewards, masks, arguments and rendering."""

import copy
import pickle
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envs
from envs import tasks
from envs.memory_env import small_task
from envs.task import DEAD_END_REWARD
from envs.tasks import FINGERPRINTS
from simulator import FormatError, Machine, Program, Tensor, simulate
from simulator.modes import least_residency
from tests.envs import random_actions
from tests.tiny import LIMIT, MACHINE, PROGRAM


def test_features_of_the_current_position():
    """Static features and actions are those of test_graph.py; test_batch.py has the other features."""
    env = envs.MemoryEnv(PROGRAM, MACHINE, 145, min_bytes=1, mode="joint")
    first, info = env.reset(seed=0)
    static = env.tasks[0].graph.features.astype(np.float64)
    static[:, 1:3] /= 1 + static[:, 1:3]  # times, which are not bounded
    assert (first["nodes"][:, :5] == static.astype(np.float32)).all() and (static[:, 1:3] > 0).any(0).all()
    assert (first["current"], first["program"]) == (0, 0)
    assert info.keys() == {"action_mask", "overhead", "iteration_ns", "feasible", "invalid"}
    assert (info["overhead"], info["iteration_ns"], info["feasible"]) == (0, 120, False)
    assert env.step(0)[0]["current"] == 3  # kernel 1 is next; operations 1 to 3 have begun
    second, reward, *_ = env.step(2)  # w is swapped out during the whole excess: 15 bytes x 10 ns and 25 x 20
    assert second["current"] == 6 and np.flatnonzero(second["action_mask"]).tolist() == [0, 5, 9] and reward == 0
    # Only f1 is recomputed: 110 and 130 bytes remain.
    _, reward, terminated, truncated, info = env.step(9)
    assert (reward, terminated, truncated, info["feasible"]) == (pytest.approx(-10 / 120), True, False, True)
    assert (info["iteration_ns"], info["overhead"]) == (130, pytest.approx(10 / 120))


@pytest.mark.parametrize("invalid", ["end", "ignore"])
def test_an_invalid_action_ends_the_episode_or_changes_nothing(invalid):
    """With "ignore", the episode continues as if the action had not been taken."""
    env, reference = (envs.MemoryEnv(PROGRAM, MACHINE, LIMIT, min_bytes=1, invalid=invalid) for _ in range(2))
    first, _ = env.reset(seed=0)
    reference.reset(seed=0)
    observation, *step, info = env.step(2)  # closed
    assert step == ([DEAD_END_REWARD, True, False] if invalid == "end" else [0.0, False, False])
    assert info["invalid"] and all((observation[key] == first[key]).all() for key in first)
    assert np.isnan(info["overhead"]) == (invalid == "end")
    if invalid == "ignore":
        assert not env.step(0)[4]["invalid"]
        reference.step(0)
        for value, expected in zip(env.step(2)[:4], reference.step(2)[:4], strict=True):
            np.testing.assert_equal(value, expected)


def test_a_fitting_program_ends_at_the_first_step():
    env = envs.MemoryEnv(PROGRAM, MACHINE, 1.0, min_bytes=1)
    env.reset(seed=0)
    _, *step, info = env.step(0)
    assert (*step, info["feasible"]) == (0.0, True, False, True)


def test_observations_are_shared_only_on_request():
    for copied in (True, False):
        env = envs.MemoryEnv(limit=0.6, copy=copied)
        vector = envs.MemoryVectorEnv(2, limit=0.6, copy=copied)
        for tested in (env, vector):
            first, info = tested.reset(seed=0)
            copies = {key: value.copy() for key, value in first.items()}
            second, _, _, _, second_info = tested.step(0 if tested is env else np.zeros(2, np.int64))
            assert all(np.shares_memory(first[key], second[key]) != copied for key in first if np.ndim(first[key]))
            assert np.shares_memory(info["action_mask"], second_info["action_mask"]) != copied
            assert all((first[key] == copies[key]).all() for key in first) == copied
            assert not all((second[key] == copies[key]).all() for key in second)


def test_held_observations_are_not_overwritten():
    """Observation buffers are reused only when no view of them is left."""
    vector = envs.MemoryVectorEnv(3, limit=0.6)
    observation, info = vector.reset(seed=0)
    rng = np.random.default_rng(0)
    views = []
    addresses = set()
    for step in range(40):
        actions = random_actions(rng, info["action_mask"])
        observation, *_, info = vector.step(actions)
        addresses.add(observation["nodes"].ctypes.data)
        if step % 5 == 0:
            views.append((observation["nodes"][1, 2:].T, observation["nodes"][1, 2:].T.copy()))
    assert all((view == value).all() for view, value in views)
    assert len({view.ctypes.data for view, _ in views}) == len(views) <= len(addresses) < 20


@pytest.mark.parametrize(
    "make", [envs.MemoryEnv, envs.MemoryEditEnv, partial(envs.MemoryVectorEnv, 2), partial(envs.MemoryEditVectorEnv, 2)]
)
def test_copied_and_pickled_environments_are_independent(make):
    env = make(limit=0.6)
    rng = np.random.default_rng(0)
    _, info = env.reset(seed=0)
    copies = copy.deepcopy(env), pickle.loads(pickle.dumps(env))
    for _ in range(20):
        masks = np.atleast_2d(info["action_mask"])
        actions = random_actions(rng, masks)
        *expected, info = env.step(actions if info["action_mask"].ndim == 2 else actions[0])
        for copied in copies:
            np.testing.assert_equal(copied.step(actions if info["action_mask"].ndim == 2 else actions[0])[:4], expected)
        if np.any(expected[2]) or np.any(expected[3]):
            break


def test_spaces():
    """Spaces have the size of the largest graph: the 16 nodes of test_graph.py, or one if no action is needed."""
    for limits, nodes in (([LIMIT, 180], 16), ([180], 1)):
        env = envs.MemoryEnv([PROGRAM], MACHINE, limits, min_bytes=1)
        assert env.action_space == spaces.Discrete(nodes)
        assert env.observation_space == spaces.Dict(
            {
                "nodes": spaces.Box(np.tile(np.float32([0, 0, 0, 0, 0, -1, 0, -1, -1, 0, 0]), (nodes, 1)), 1.0),
                "action_mask": spaces.Box(0, 1, (nodes,), np.int8),
                "current": spaces.Discrete(nodes),
                "program": spaces.Discrete(len(limits)),
            }
        )


def test_defaults():
    """Defaults: limit 0.7 of the peak, min_bytes 1 MiB, mode joint, the built-in task."""
    program, machine = small_task()
    assert program.fingerprint == "e1b0be3dd802cc53d8612efef0a3702a908d76cf0d625986510a6b800405be76"
    assert machine == Machine("small", 2**30, 12 * 10**9, 12 * 10**9)
    below = Program(
        "below",
        (Tensor("batch", 2**20, "input", True), Tensor("small", 2**20 - 1), *program.tensors[2:]),
        program.kernels,
    )
    for make in (envs.MemoryEnv, partial(envs.MemoryVectorEnv, 1)):
        (task,) = make().tasks
        assert (task.program, task.machine, task.mode) == (program, machine, "joint")
        assert task.limit == int(0.7 * program.peak_bytes)
        assert {1, 2} <= {gap.tensor for gap in task.graph.gaps}
        (task,) = make(below, machine).tasks
        tensors = {gap.tensor for gap in task.graph.gaps}
        assert 2 in tensors and 1 not in tensors


def test_several_programs_and_limits():
    program, machine = small_task()
    env = envs.MemoryEnv([program, program], machine, ["40MiB", 0.8])
    assert [task.limit for task in env.tasks] == 2 * [40 * 2**20, int(0.8 * program.peak_bytes)]
    seen = {int(env.reset(seed=s)[0]["program"]) for s in range(40)}
    assert seen == {0, 1, 2, 3}
    assert env.reset(options={"task": 2})[0]["program"] == 2
    with pytest.raises(ValueError, match="positive"):
        envs.MemoryEnv(program, machine, 0)


# ------------------------------------------------------------------------------------------------ tasks with names


def test_another_file_under_a_name_is_refused(monkeypatch):
    monkeypatch.setitem(FINGERPRINTS, "unet", "0123456789ab")
    tasks.load.cache_clear()
    with pytest.raises(FormatError, match=r"expected fingerprint 0123456789ab, got [0-9a-f]{12}; restore the file$"):
        gymnasium.make("GpuMemory/unet-50-v1")


def test_programs_and_machines_by_name_and_path(tmp_path):
    PROGRAM.save(tmp_path / "tiny.json.gz")
    env = envs.MemoryEnv(str(tmp_path / "tiny.json.gz"), "h100", LIMIT, min_bytes=1)
    assert (env.tasks[0].program, env.tasks[0].machine) == (PROGRAM, Machine.load("h100"))
    assert [task.machine.name for task in envs.MemoryEnv(["vgg16", "unet"], limit=[0.5, 0.6]).tasks] == [
        "gtx1080ti",
        "gtx1080ti",
        "rtx2080ti",
        "rtx2080ti",
    ]
    assert envs.MemoryEnv("vgg16", "h100").tasks[0].machine.name == "h100"
    with pytest.raises(FormatError, match=r"'vgg' is neither a .json file nor one of .*; did you mean 'vgg16'"):
        envs.MemoryEnv("vgg")
    with pytest.raises(ValueError, match="machine: required, because the program is not a named one"):
        envs.MemoryEnv(PROGRAM)


# ------------------------------------------------------------------------------------- results that do not mislead


def test_a_limit_that_no_plan_meets_is_refused():
    """The tiny program holds 105 bytes at its seventh kernel with every eligible tensor evicted."""
    min_limit = least_residency(PROGRAM, 1)
    assert envs.MemoryEnv(PROGRAM, MACHINE, min_limit, min_bytes=1)
    for make in (envs.MemoryEnv, partial(envs.MemoryVectorEnv, 2)):
        with pytest.raises(ValueError, match=f"limit: no plan of mode 'joint' brings 'tiny' below {min_limit} bytes"):
            make(PROGRAM, MACHINE, [0.9, min_limit - 1], min_bytes=1)
    assert least_residency(PROGRAM, 1, "recompute") > min_limit  # the batch cannot be recomputed
    with pytest.raises(ValueError, match="no plan of mode 'recompute'"):
        envs.MemoryEnv(PROGRAM, MACHINE, min_limit, min_bytes=1, mode="recompute")


def final_step(env, rng):
    """Returns the last step of an episode of random valid actions on a drawn task."""
    observation, _ = env.reset(seed=int(rng.integers(2**31)))
    while True:
        step = env.step(rng.choice(np.flatnonzero(observation["action_mask"])))
        observation = step[0]
        if step[2] or step[3]:
            return step


def test_the_best_plan_is_kept_and_a_dead_end_has_no_overhead():
    program, machine = small_task()
    env = envs.MemoryEnv(limit=[0.55, 0.7])
    rng = np.random.default_rng(0)
    assert env.best_plans == (None, None)
    best = {}
    dead_ends = 0
    for _ in range(40):
        observation, _, _, _, info = final_step(env, rng)
        task = int(observation["program"])
        if not info["feasible"]:
            assert np.isnan(info["overhead"]) and "plan" not in info
            dead_ends += 1
            continue
        limit = env.tasks[task].limit
        assert simulate(program, info["plan"], machine, limit).overhead == pytest.approx(info["overhead"], abs=1e-12)
        best[task] = min(best.get(task, np.inf), info["overhead"])
    assert dead_ends and len(best) == 2
    for task, plan in enumerate(env.best_plans):
        timeline = simulate(program, plan, machine, env.tasks[task].limit)
        assert timeline.overhead == pytest.approx(best[task], abs=1e-12)
    assert env.best_plan == env.best_plans[0]


# ---------------------------------------------------------------------------------------------------- pictures


def test_the_rendering_shows_the_walk():
    """A copy takes longer than the kernel beside it, so it is in flight while kernel 1 runs."""
    env = envs.MemoryEnv(PROGRAM, MACHINE, 145, min_bytes=1, mode="joint", render_mode="ansi")
    env.reset(seed=0)
    first = env.render().splitlines()
    assert first[:2] == [
        "tiny on tiny, 81% of the memory",
        "kernel 0 of 8, overhead 0.00%; swapped out 0, in flight 0, to be recomputed 0",
    ]
    assert first[-1] == "^" and sum("the limit" in line for line in first) == 1
    assert "." not in "".join(first[2:-1]).replace("0.00 GiB", "")
    env.step(0)
    env.step(2)
    second = env.render().splitlines()
    assert "swapped out 1" in second[1] and "." in "".join(second[2:-1]).replace("0.00 GiB", "")


@pytest.mark.parametrize("name", ["GpuMemory-v1", "GpuMemoryEdit-v1"])
def test_a_picture(name):
    kwargs = {"program": None, "limit": 0.6}
    env = gymnasium.make(name, **kwargs, render_mode="rgb_array")
    _, info = env.reset(seed=0)
    image = env.render()
    assert (image.shape, image.dtype) == ((450, 800, 3), np.uint8)
    env.step(info["action_mask"].argmax())
    assert (env.render() != image).any()
    with pytest.raises(ValueError, match="render_mode: expected 'ansi' or 'rgb_array', got 'human'"):
        type(env.unwrapped)(**kwargs, render_mode="human")
