"""The environment of several jobs: checkers of two libraries, what is shown, decisions that are worth something."""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import envs
from agents.learned.structure2vec import Structure2Vec
from envs.graph import OFFLOAD, REMOVE
from envs.jobs_env import small_scenario
from envs.jobs_task import LOAD, RELIEF, VALID, Scenario
from envs.task import DEAD_END_REWARD
from simulator import Job, JobsTimeline, Kernel, Plan, Program, Swap, Tensor, simulate_jobs
from tests.envs.test_jobs_walk import MACHINE, THREE, TWO
from tests.envs.test_vector_env import assert_all_same, assert_infos_are_alike

SMALL = small_scenario()
Agent = Callable[[dict[str, np.ndarray]], int]


def nothing(observation: dict[str, np.ndarray]) -> int:
    return 0


def greedy(observation: dict[str, np.ndarray]) -> int:
    """TENSILE's rule: the largest tensor at the peak leaves, until the peaks together fit."""
    return int(np.where(observation["action_mask"], observation["nodes"][:, RELIEF], 0).argmax())


def random(seed: int) -> Agent:
    rng = np.random.default_rng(seed)
    return lambda observation: int(rng.choice(np.flatnonzero(observation["action_mask"])))


def timeline_of(env: envs.JobsEnv) -> JobsTimeline:
    """What the jobs have done under the plans that they got."""
    task = env.tasks[0]
    return simulate_jobs(env.jobs, task.machine, task.scenario.limit, task.scenario.until_ns)


def episode(env: envs.JobsEnv, agent: Agent, task: int = 0) -> tuple[float, list[float], dict]:
    """The sum of the rewards, the times of its phases, and what is said in the end."""
    observation, info = env.reset(options={"task": task})
    total, terminated, times = 0.0, False, [info["time_ns"]]
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(np.int64(agent(observation)))
        assert not truncated
        total += reward
        times += [info["time_ns"]] if info["time_ns"] != times[-1] else []
    return total, times, info


@pytest.mark.parametrize("mode", ["swap", "recompute", "joint"])
@pytest.mark.parametrize("invalid", ["end", "ignore"])
def test_checkers(mode, invalid):
    arguments = {"mode": mode, "invalid": invalid, "scenario": [SMALL, replace(SMALL, jobs=SMALL.jobs[:2])]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unbounded features are meant
        check_env(gymnasium.make("GpuMemoryJobs-v0", **arguments).unwrapped, skip_render_check=True)
        sb3_check_env(gymnasium.make("GpuMemoryJobs-v0", **arguments).unwrapped)


def test_what_is_meant_where_nothing_is_given():
    env = gymnasium.make("GpuMemoryJobs-v0").unwrapped
    (task,) = env.tasks
    assert task.scenario == SMALL and SMALL.until_ns is None and SMALL.sharing == "fifo"
    assert SMALL.limit == int(0.6 * sum(job.program.peak_bytes for job in SMALL.jobs))
    kinds = [set(actions.graph.action_kind.tolist()) for actions in task.actions]
    assert all({OFFLOAD, REMOVE} < found for found in kinds)
    env.reset(seed=0)
    assert env.step(-1)[2]  # an invalid action ends the episode
    # Tensors of 1 MiB at least.
    program = SMALL.jobs[0].program
    smaller = replace(program, tensors=(replace(program.tensors[0], nbytes=2**20 - 1), *program.tensors[1:]))
    least = [
        envs.JobsTask(replace(SMALL, jobs=(replace(SMALL.jobs[0], program=one),))).actions[0].nbytes.min()
        for one in (program, smaller)
    ]
    assert least == [2**20, 3 * 2**20]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_vector_environment_is_gymnasiums_of_many(mode):
    """Action by action, through the ends of episodes and invalid actions, under the same seeds; and so that walks are
    stepped in several pieces."""
    small = replace(TWO, limit=130, jobs=(*TWO.jobs, Job("c", THREE, Plan(), 130, leaves_ns=400)))
    kwargs = {"scenario": [TWO, small, replace(small, jobs=small.jobs[1:])], "min_bytes": 1}
    vector = gymnasium.make_vec("GpuMemoryJobs-v0", 24, "vector_entry_point", max_episode_steps=6, autoreset_mode=mode,
                                **kwargs)  # fmt: skip
    assert isinstance(vector, envs.JobsVectorEnv)
    one = partial(gymnasium.make, "GpuMemoryJobs-v0", max_episode_steps=6, **kwargs)
    peer = gymnasium.vector.SyncVectorEnv([one] * 24, autoreset_mode=mode)
    assert (vector.single_action_space, vector.observation_space) == (peer.single_action_space, peer.observation_space)
    (observation, info), (expected, its_info) = vector.reset(seed=5), peer.reset(seed=5)
    assert_all_same(observation, expected)
    rng, ended, cut, tasks = np.random.default_rng(0), 0, 0, set()
    for _ in range(40):
        valid = observation["action_mask"]
        actions = np.array([rng.choice(np.flatnonzero(mask != (rng.random() < 0.05))) for mask in valid])
        observation, reward, terminated, truncated, info = vector.step(actions)
        expected, its_reward, its_end, its_stop, its_info = peer.step(actions)
        assert_all_same(observation, expected)
        assert (reward == its_reward).all() and (terminated == its_end).all() and (truncated == its_stop).all()
        assert_infos_are_alike(info, its_info, 24)
        ended, cut, tasks = ended + terminated.sum(), cut + truncated.sum(), tasks | set(observation["task"].tolist())
        if mode == AutoresetMode.DISABLED and (over := terminated | truncated).any():
            observation, _ = vector.reset(options={"reset_mask": over})
            peer.reset(options={"reset_mask": over.copy()})
    assert ended > 100 and cut > 10 and tasks == {0, 1, 2}


def test_scenarios_are_drawn_by_the_seed():
    several = [SMALL, replace(SMALL, limit=SMALL.limit + 1), replace(SMALL, jobs=SMALL.jobs[:2])]
    env, other = envs.JobsEnv(several), envs.JobsEnv(several)
    drawn = [one.reset(seed=seed)[0]["task"] for seed in (3, None, None, None, None) for one in (env, other)]
    assert drawn[::2] == drawn[1::2] and len(set(drawn)) > 1
    assert env.reset(options={"task": 2})[0]["task"] == 2
    # Scenarios are padded to the largest; those with the same programs share what is known of them.
    observation, info = env.reset(options={"task": 2})
    assert len(observation["nodes"]) == len(env.tasks[0].graph) > len(env.tasks[2].graph)
    assert not observation["nodes"][len(env.tasks[2].graph) :].any() and len(info["action_mask"]) == env.action_space.n
    assert env.tasks[0].actions[1] is env.tasks[2].actions[1]


def test_what_is_returned_is_not_written_to_again():
    env = envs.JobsEnv()
    observation, info = env.reset(seed=0)
    shown = []
    for _ in range(8):
        masks = [observation["action_mask"].astype(np.bool_), info["action_mask"], env.action_masks()]
        assert (masks[0] == masks[1]).all() and (masks[0] == masks[2]).all()
        shown += [(part, part.copy()) for part in (*observation.values(), *masks)]
        env.action_masks()[:] = False  # the caller's own
        observation, *_, info = env.step(greedy(observation))
    assert all((part == kept).all() for part, kept in shown)
    assert not any(np.shares_memory(part, other) for part, _ in shown[:8] for other, _ in shown[8:])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_by_itself(again):
    env = envs.JobsEnv()
    env.reset(seed=0)
    env.step(0)
    other = again(env)
    for action in (0, 0):
        ours, theirs = env.step(action), other.step(action)
        assert ours[1] == theirs[1] and all((ours[0][key] == theirs[0][key]).all() for key in ours[0])


def test_an_invalid_action_ends_the_episode():
    env = envs.JobsEnv(TWO, min_bytes=1)
    for action in (1, 100, -1):  # nothing need leave yet; none; none
        env.reset(seed=0)
        _, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info["invalid"]) == (2 * DEAD_END_REWARD, True, False, True)
        assert env.action_masks().tolist() == [True] + [False] * (int(env.action_space.n) - 1)
        _, reward, terminated, _, info = env.step(0)
        assert (reward, terminated) == (0, True) and not info["invalid"]


def test_an_invalid_action_may_be_ignored():
    env = envs.JobsEnv(TWO, min_bytes=1, invalid="ignore")
    first, _ = env.reset(seed=0)
    for action in (1, 100, -1):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info["invalid"]) == (0, False, False, True)
        assert all((observation[key] == first[key]).all() for key in first)
    assert not env.step(0)[4]["invalid"]
    with pytest.raises(ValueError, match="invalid"):
        envs.JobsEnv(invalid="neither")


def test_maskable_ppo_learns_on_it():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = gymnasium.make("GpuMemoryJobs-v0", scenario=TWO, min_bytes=1)
        model = MaskablePPO("MultiInputPolicy", env, n_steps=16, batch_size=16, seed=0, device="cpu").learn(32)
    observation, info = env.reset(seed=0)
    action, _ = model.predict(observation, action_masks=info["action_mask"])
    assert info["action_mask"][action]


def test_the_graph_of_all_jobs():
    """Node 0 is of all; the others are those of each job's own graph, one after the other."""
    task = envs.JobsTask(SMALL)
    graph, alone = task.graph, [actions.graph for actions in task.actions]
    assert len(graph) == 1 + sum(len(one) - 1 for one in alone) == len(task.job)
    found = set(zip(*graph.edges.tolist(), graph.weights.tolist(), strict=True))
    assert len(found) == graph.edges.shape[1]
    expected, gap = set(), 0
    for j, one in enumerate(alone):
        first = int(np.flatnonzero(task.job == j)[0])
        node = [0, *range(first, first + len(one) - 1)]
        expected |= {(node[a], node[b], w) for (a, b), w in zip(one.edges.T, one.weights.tolist(), strict=True)}
        assert (graph.action_kind[node] == one.action_kind).all() and (graph.kernel[node] == one.kernel).all()
        acts = np.flatnonzero(one.action_gap >= 0)
        assert (graph.action_gap[np.array(node)[acts]] == one.action_gap[acts] + gap).all()
        assert graph.gaps[gap : gap + len(one.gaps)] == one.gaps
        assert (graph.features[node][:, 1:] == one.features[:, 1:]).all()
        peak = SMALL.jobs[j].program.peak_bytes
        assert graph.features[node][:, 0] == pytest.approx(one.features[:, 0] * peak / SMALL.limit)
        gap += len(one.gaps)
    assert found == expected


def test_structure2vec_reads_the_graph_of_all_jobs():
    """A value of each action, of all jobs that are there; what is decided of one job changes those of others."""
    torch.manual_seed(0)
    env = envs.JobsEnv(TWO, min_bytes=1)
    env.reset(seed=0)
    before, *_ = env.step(0)
    after, *_ = env.step(6)
    network = Structure2Vec(env.tasks[0].graph, before["nodes"].shape[1], 8, 3, "mean", True)
    x = torch.from_numpy(np.stack([before["nodes"], after["nodes"]])).transpose(0, 1)
    with torch.no_grad():
        q = network(x, torch.zeros(2, dtype=torch.long))
    assert network.actions.tolist() == [0, 2, 3, 6, 7] and q.shape == (2, 5)
    assert (q[0] != q[1]).all()


def test_what_is_shown_of_the_moment():
    """Nodes of a job: malloc x, write x, read x, free x. x may leave after k0 (node 2), or be recomputed (node 3)."""
    env = envs.JobsEnv(replace(TWO, until_ns=1000), min_bytes=1)
    first, info = env.reset(seed=0)
    # a alone: it needs 100 bytes of 170, so that nothing may be decided.
    assert first["job"].tolist() == [-1] + 4 * [0] + 4 * [-1] and not first["nodes"][5:].any()
    assert first["action_mask"].tolist() == [1] + 8 * [0] and info["action_mask"].dtype == np.int8
    assert first["moment"] == pytest.approx([100 / 170 - 1, 1, 1, 1])
    share = 100 / 170
    size, transfer, recompute, revisit = 40 / 170, 20 / 40, 10 / 40, 20 / 40
    kind = np.array([0, 2 / 3, 1, 0])
    load = [40 / 170, 40 / 170, 40 / 170, 40 / 170]
    static = np.array([4 * [size], 4 * [transfer], [*3 * [recompute], 0], [*3 * [revisit], 0], kind])
    moment = np.array([4 * [0], [0, 40 / 170, 40 / 170, 0], load, 4 * [share], 4 * [1]])
    assert first["nodes"][1:5].T == pytest.approx(np.concatenate([static, moment]))
    assert first["nodes"][0] == pytest.approx([0, 0, 0, 0, 1 / 3, 1, 0, 0, 0, 0])
    # b comes at 100: a has done 2 of 5 iterations, and holds x and y, in k1.
    then, reward, *_, info = env.step(0)
    assert (info["time_ns"], reward, info["slowdown"]) == (100, -10 / 200, 10 / 200)  # k1 has not ended yet
    assert then["job"].tolist() == [-1] + 4 * [0] + 4 * [1]
    assert then["moment"] == pytest.approx([200 / 170 - 1, 70 / 170, 2, 0.9])
    assert then["action_mask"].tolist() == [1, 0, 1, 1, 0, 0, 1, 1, 0]
    assert then["nodes"][1:, 9] == pytest.approx(4 * [0.6] + 4 * [1])
    # b's x leaves: a's 100 bytes and b's 60 fit, and no more need leave.
    last, reward, *_, info = env.step(6)
    assert (info["time_ns"], reward) == (100, 0)
    assert last["moment"][0] == pytest.approx(160 / 170 - 1) and last["action_mask"].tolist() == [1] + 8 * [0]
    assert last["nodes"][:, VALID].tolist() == [1, 0, 0, 0, 0, 0, -1, 0, 0]
    assert last["nodes"][[1, 5], 8] == pytest.approx([100 / 170, 60 / 170])
    assert last["nodes"][[2, 6], RELIEF] == pytest.approx([40 / 170, 0])
    assert (last["nodes"][1:, LOAD] > 0).all()
    # Each is within its peak and half of what is left over.
    env.step(0)
    a, b = env.jobs
    assert b.plan.decisions == (Swap(0, 0, 2),) and (b.plan.limit, b.switches, b.within) == (65, (), True)
    ((at, plan),) = a.switches
    assert (at, plan.decisions, a.plan.limit, plan.limit, a.within) == (100, (), 170, 105, True)
    # Where they stay over the limit, there is none for each, and the same plan is no other one.
    env = envs.JobsEnv(replace(TWO, limit=99), min_bytes=1)
    env.reset(seed=0)
    env.step(0)
    env.step(0)
    assert [(job.plan.limit, job.switches) for job in env.jobs] == [(0, ()), (0, ())]


def test_a_tensor_may_be_away_at_the_peak_over_the_boundary():
    """Of w the next use is in the next iteration; the peak is at k2, then at k1."""
    tensors = (Tensor("w", 30, "parameter", True), Tensor("x", 50), Tensor("y", 60), Tensor("z", 35))
    uses = [((), (1,)), ((0, 1), (2,)), ((1,), (3,))]
    kernels = tuple(Kernel(f"k{k}", "other", "forward", *each, 10) for k, each in enumerate(uses))
    job = Job("a", Program("p", tensors, kernels), Plan(), iterations=2)
    env = envs.JobsEnv(Scenario((job, replace(job, name="b")), MACHINE, 250), min_bytes=1, mode="swap")
    first, _ = env.reset(seed=0)
    (gap,) = env.tasks[0].actions[0].graph.gaps
    (a, b) = np.flatnonzero(env.tasks[0].graph.action_kind == OFFLOAD)
    assert gap == (0, 1, 1) and job.program.live_bytes == (80, 140, 115)
    assert first["action_mask"][[a, b]].tolist() == [1, 1] and not first["nodes"][:, RELIEF].any()
    later = replace(job, program=replace(job.program, tensors=(*tensors[:3], Tensor("z", 80))))
    env = envs.JobsEnv(replace(env.tasks[0].scenario, jobs=(later, job)), min_bytes=1, mode="swap")
    assert env.reset(seed=0)[0]["nodes"][[a, b], RELIEF] == pytest.approx([30 / 250, 0])


def test_phases_begin_when_jobs_come_and_leave():
    """Nobody is there from 40 to 1000; c comes when a and b are there, and is the last."""
    one = Scenario((
        Job("a", THREE, Plan(), 1000, iterations=3), Job("b", THREE, Plan(), 1000, iterations=2),
        Job("early", THREE, Plan(), iterations=1), Job("c", THREE, Plan(), 1030, iterations=3),
    ), MACHINE, 1000)  # fmt: skip
    env = envs.JobsEnv(one, min_bytes=1)
    total, times, info = episode(env, nothing)
    left = [job.left_ns for job in timeline_of(env).jobs]
    assert times == [0, 1000, 1030, *sorted(left[:2] + left[3:])] and left[2] == 40
    alone = [3 * 40, 2 * 40, 40, 3 * 40]
    ratios = [(at - job.arrives_ns) / ns - 1 for at, job, ns in zip(left, one.jobs, alone, strict=True)]
    assert ratios[2] == 0 < min(ratios[0], ratios[1], ratios[3])
    assert total == pytest.approx(-sum(ratios)) and info["slowdown"] == pytest.approx(sum(ratios))


def test_there_are_no_phases_after_the_end_of_the_span():
    """From 250 on both leave when their iterations end."""
    env = envs.JobsEnv(replace(TWO, until_ns=250), min_bytes=1)
    _, times, info = episode(env, nothing)
    assert times[:2] == [0, 100] and len(times) == 3 and times[-1] >= 250
    # Alone, b would be there for 4 of 40 ns, as the iteration that has begun at 220 ends at 260.
    assert env.tasks[0].alone_ns == [200, 160]
    left = [job.left_ns for job in timeline_of(env).jobs]
    ended = [len(job.boundaries) * 40 for job in timeline_of(env).jobs]
    assert info["slowdown"] == pytest.approx((left[0] - ended[0]) / 200 + (left[1] - 100 - ended[1]) / 160)


def test_a_job_that_never_begins_has_lost_its_time():
    """a's parameters leave no room for b, which waits until 95; alone it would have begun a third iteration."""
    hold = Program("hold", (Tensor("w", 70, "parameter", True),), (Kernel("k", "other", "forward", (0,), (), 40),))
    one = Scenario((Job("a", hold, Plan(), iterations=4), Job("b", THREE, Plan(), 5, leaves_ns=95)), MACHINE, 100)
    env = envs.JobsEnv(one, min_bytes=100)
    total, times, info = episode(env, nothing)
    assert times == [0, 5, 95, 160] and timeline_of(env).jobs[1].left_ns is None
    assert info["slowdown"] == 90 / 120 == -total


def test_decisions_are_worth_something():
    """Where memory is short, greedy decisions cost less than none, and other decisions cost other amounts."""
    env = envs.JobsEnv(SMALL)
    with_none, with_greedy = episode(env, nothing)[0], episode(env, greedy)[0]
    with_random = {episode(env, random(seed))[0] for seed in range(5)}
    assert with_none < with_greedy - 0.2
    assert len(with_random) == 5 and np.mean(list(with_random)) < with_greedy
    # With memory enough there is nothing to decide, and it costs what sharing the kernels' time costs.
    env = envs.JobsEnv(replace(SMALL, limit=sum(job.program.peak_bytes for job in SMALL.jobs)))
    assert episode(env, random(0))[0] == episode(env, nothing)[0]
    assert not any(job.plan.decisions for job in env.jobs)
