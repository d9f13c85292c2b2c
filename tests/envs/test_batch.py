"""Tests that compiled walks equal the reference walks in every step: observations, plans, rewards and ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import envs
from envs.batch import Batch
from envs.graph import OBSERVED, STATIC
from envs.memory_env import small_task
from envs.task import ACTIONS, Task
from simulator import OutOfMemory, simulate
from simulator.modes import Choice
from tests.envs import random_actions
from tests.oracle.walk import Walk, current_node, dynamic_features
from tests.strategies import machines, networks, programs, reachable_limits


def assert_walks_equal(batch: Batch, i: int, walk: Walk, actions: str) -> None:
    """Asserts that walk i of the batch and its observation equal those of the reference walk."""
    n = len(walk.task.graph)
    masks = walk.form_masks()[: batch.forms]
    kind = walk.task.graph.action_kind
    allowed = {
        "copy": [kind == Choice.SWAPPED, False],
        "keep": [kind == Choice.RECOMPUTED, False],
        "at": [False, kind == Choice.RECOMPUTED],
    }
    for form in range(1, len(masks)) if actions != "full" else ():
        masks[form] &= allowed[actions][form - 1]
    mask = batch.mask[i].reshape(batch.forms, batch.size)
    assert (mask[: len(masks), :n] == masks).all()
    assert not mask[len(masks) :].any() and not mask[:, n:].any() and not batch.nodes[i, :, n:].any()
    features = np.zeros((n, OBSERVED), np.float32)
    static = walk.task.graph.features.astype(np.float64)
    static[:, 1:3] /= 1 + static[:, 1:3]
    features[:, :STATIC] = static
    dynamic_features(walk, features)
    assert (batch.nodes[i, :, :n].T == features).all() and batch.spaces()[1]["nodes"].contains(batch.nodes[i].T)
    assert batch.current[i] == current_node(walk)
    assert (batch.plan_rows(i) == walk.rows).all()
    state = walk.position, walk.iteration_ns, walk.done, walk.dead_end, walk.stuck_at, walk.host_left, walk.free_ns
    fields = ["position", "iteration", "ended", "dead_end", "stuck_at", "host_left", "free_ns"]
    assert state == batch.walks[i][fields].item()
    overhead = np.nan if walk.dead_end else walk.overhead
    np.testing.assert_equal((batch.overhead[i], batch.feasible[i]), (overhead, walk.done and not walk.dead_end))


def follow(tasks: list[Task], reward: str, actions: str, seed: int, walks: int, steps: int, small_buffer: bool) -> int:
    """Steps a batch and as many reference walks with random valid actions; returns the number of finished episodes."""
    rng = np.random.default_rng(seed)
    batch = Batch(tasks, walks, reward, "end", actions)
    if small_buffer:
        for thread in batch._threads:
            thread.make_steps(1)
    for i in range(walks):
        batch.seed(i, int(rng.integers(2**62)))
    ended = np.ones(walks, np.bool_)
    episodes = 0
    references = [Walk(tasks[0])] * walks
    total = np.zeros(walks)
    for _ in range(steps):
        if ended.any():
            batch.reset(ended)
            for i in np.flatnonzero(ended):
                references[i] = Walk(batch.task(i), reward)
                total[i] = 0.0
                assert_walks_equal(batch, i, references[i], actions)
        codes = random_actions(rng, batch.mask)
        batch.step(codes)
        for i, walk in enumerate(references):
            if walk.done:  # no further action is needed
                result = 0.0, True
            else:
                result = walk.step(int(codes[i]) % batch.size, int(codes[i]) // batch.size)[:2]
                walk.plan().check(walk.task.program)
            assert result == (batch.rewards[i], batch.terminated[i]) and not batch.invalid[i]
            assert_walks_equal(batch, i, walk, actions)
            ended[i] = result[1]
            total[i] += result[0]
            task = walk.task
            if ended[i] and not walk.dead_end:
                stall_ns = walk.iteration_ns - task.program.ideal_ns
                assert total[i] == pytest.approx(-stall_ns / task.ideal_ns, rel=1e-9, abs=1e-9)
                assert simulate(task.program, batch.plan(i), task.machine, task.limit).iteration_ns == walk.iteration_ns
            elif ended[i]:  # dead end: the next kernel fits under no further action
                with pytest.raises(OutOfMemory):
                    simulate(task.program, batch.plan(i), task.machine, task.limit)
            episodes += int(ended[i])
    return episodes


@given(st.data())
def test_a_batch_is_its_walks(data: st.DataObject) -> None:
    """Covers several tasks at once, each with its own program, machine and limit, also with limited host memory."""
    mode = data.draw(st.sampled_from(["swap", "recompute", "joint"]))
    tasks = []
    for _ in range(data.draw(st.integers(1, 3))):
        program = data.draw(programs() | networks())
        machine = data.draw(machines())
        if data.draw(st.integers(0, 3)) == 0:
            machine = replace(machine, host_bytes=data.draw(st.integers(1, 100)))
        limit = data.draw(reachable_limits(program) | st.integers(program.peak_bytes // 3, program.peak_bytes))
        tasks.append(Task(program, machine, max(1, limit), 1, mode))
    reward = data.draw(st.sampled_from(["paper", "causal"]))
    actions = data.draw(st.sampled_from(sorted(ACTIONS)))
    follow(tasks, reward, actions, data.draw(st.integers(0, 10**6)), 3, 30, data.draw(st.booleans()))


@pytest.mark.parametrize("reward", ["paper", "causal"])
@pytest.mark.parametrize("actions", ["paper", "full"])
def test_many_episodes(reward: str, actions: str) -> None:
    """Covers the built-in task on two threads, also with limited host memory.

    Offloads queue up and are swapped in within the walk.
    """
    program, machine = small_task()
    slow = replace(machine, d2h_bytes_per_s=6 * 10**9, host_bytes=20 * 2**20)
    tasks = [
        Task(program, link, round(fraction * program.peak_bytes), 2**20, mode)
        for link in (machine, slow)
        for fraction in (0.45, 0.6, 0.8)
        for mode in ("swap", "joint")
    ]
    assert follow(tasks, reward, actions, 1, 16, 100, False) > 100


def test_threads_share_nothing() -> None:
    """Steps the same walks on one thread and on several."""
    program, machine = small_task()
    tasks = [Task(program, machine, round(share * program.peak_bytes), 2**20, "joint") for share in (0.5, 0.6, 0.7)]
    batches = [Batch(tasks, 64, threads=threads, autoreset=True) for threads in (1, 3)]
    assert [len(batch._threads) for batch in batches] == [1, 3]
    for batch in batches:
        for i in range(64):
            batch.seed(i, i)
        batch.reset()
    rng = np.random.default_rng(0)
    for _ in range(200):
        actions = random_actions(rng, batches[0].mask)
        for batch in batches:
            batch.step(actions)
        for name in ("walks", "nodes", "mask", "current", "rewards", "terminated", "overhead", "feasible"):
            np.testing.assert_equal(*(getattr(batch, name) for batch in batches), name)


@pytest.mark.parametrize(("name", "value"), [("reward", "both"), ("invalid", "skip"), ("actions", "all")])
def test_an_unknown_setting(name: str, value: str) -> None:
    program, machine = small_task()
    with pytest.raises(ValueError, match=f"{name}: expected .*, got '{value}'"):
        Batch([Task(program, machine, program.peak_bytes)], 1, **{name: value})


def test_a_walk_refuses_an_invalid_action() -> None:
    program, machine = small_task()
    walk = envs.Walk(Task(program, machine, round(0.6 * program.peak_bytes)))
    with pytest.raises(ValueError, match="node 1 is not a valid action"):
        walk.step(1)
    assert not walk.mask()[1] and walk.position == 0
