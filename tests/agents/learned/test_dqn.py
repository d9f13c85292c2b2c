"""The DQN: walks by Q-values, what was learned elsewhere and what is learned here, same seed same run, resume."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import agents
from agents.learned.dqn import Trainer
from agents.learned.dqn_config import DQNConfig, config_from
from agents.learned.planner import controls
from agents.learned.training import train
from agents.learned.training_state import TrainingStateError
from envs.memory_env import small_task
from envs.task import Task
from envs.tasks import load
from envs.walk import Walk
from experiments.figures import program as bundled
from simulator import Machine, Swap, simulate
from simulator.compiled.engine import rows_of

PROGRAM, MACHINE = small_task()
LIMIT = round(0.6 * PROGRAM.peak_bytes)
SMALL = DQNConfig(episodes=512, num_envs=16, elites=4, checkpoint_every=64)


@pytest.mark.parametrize("mode", ["swap", "recompute", "joint"])
def test_a_walk_takes_the_valid_action_of_the_highest_value(mode: str) -> None:
    """The compiled loop against envs.Walk, step by step; and the plans are simulated to be what the walks say."""
    limit = round(0.7 * PROGRAM.peak_bytes)
    trainer = Trainer(Task(PROGRAM, MACHINE, limit, mode=mode), replace(SMALL, mode=mode), 0)
    values = np.random.default_rng(0).normal(size=(16, len(trainer.code))).astype(np.float32)
    overheads = trainer.walk(values)
    assert len(set(trainer.lengths.tolist())) > 1 and np.isfinite(overheads).any()
    for i, overhead in enumerate(overheads.tolist()):
        walk, taken = Walk(trainer.task, "causal", "full"), []
        while not walk.done:
            taken.append(int(np.where(walk.mask()[trainer.code], values[i], -np.inf).argmax()))
            walk.step(int(trainer.code[taken[-1]]))
        assert trainer.trace[i, : trainer.lengths[i]].tolist() == taken
        assert np.isfinite(overhead) == (not walk.dead_end)
        if np.isfinite(overhead):
            assert overhead == walk.overhead == simulate(PROGRAM, trainer.batch.plan(i), MACHINE, limit).overhead


def test_finds_the_optimum_of_a_small_task() -> None:
    """Against every subset of the gaps, all simulated."""
    task = Task(PROGRAM, MACHINE, LIMIT)
    rows = rows_of([Swap(*gap) for gap in task.graph.gaps])
    best = min(
        task.engine.score(rows[list(chosen)]).iteration_ns
        for size in range(len(rows) + 1)
        for chosen in itertools.combinations(range(len(rows)), size)
    )
    result = train(PROGRAM, MACHINE, LIMIT, SMALL, seed=0)
    assert result.greedy is not None
    for plan in (result.best, result.greedy):  # the values are kept by their greedy walk
        assert simulate(PROGRAM, plan, MACHINE, LIMIT).iteration_ns <= best


def test_both_what_was_learned_elsewhere_and_here_is_worth_something() -> None:
    """On VGG16 in 45 % of its memory, in as many simulator calls, over three seeds; without either it is no DQN."""
    program, machine = load("vgg16")
    limit, config, found = int(0.45 * program.peak_bytes), DQNConfig(), {}
    for seed in range(3):
        for name, agent in {
            "dqn": agents.make("dqn", seed=seed, calls=1024, config=config),
            **controls(config, seed, 1024),
        }.items():
            overhead = simulate(program, agent.plan(program, machine, limit), machine, limit).overhead
            found.setdefault(name, []).append(overhead)
            assert 1000 < agent.simulator_calls <= 1024
    mine, *others = map(np.mean, found.values())
    assert len(others) == 2 and mine < min(others) and mine < 0.02


def test_the_first_walk_is_about_the_plan_that_the_policy_decodes() -> None:
    """On U-Net in half of its memory, where walks by the policy's odds alone are far from it."""
    machine = Machine.load("rtx2080ti")
    program = bundled("unet", machine)
    limit = program.peak_bytes // 2
    policy = simulate(program, agents.make("policy").plan(program, machine, limit), machine, limit).overhead
    trainer = Trainer(Task(program, machine, limit, mode="joint"), DQNConfig(num_envs=2, elites=2), 0)
    near, odds = trainer.walk(np.stack(trainer.priors[:2]))
    assert near < policy + 0.05 < odds and 100 < trainer.task.engine.calls <= 129


def test_same_seed_same_run_and_resume(tmp_path) -> None:
    limit, config = round(0.585 * PROGRAM.peak_bytes), replace(SMALL, episodes=160, init="scratch")
    whole = train(PROGRAM, MACHINE, limit, config, seed=3, checkpoint=tmp_path / "a.pt")
    assert len(whole.history) > 1 and whole.history[-1].best_overhead > 0
    assert repr(train(PROGRAM, MACHINE, limit, config, seed=3)) == repr(whole)
    assert train(PROGRAM, MACHINE, limit, config, seed=4).history != whole.history

    def kill(episode):
        if episode.episode == 96:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(PROGRAM, MACHINE, limit, config, seed=3, checkpoint=tmp_path / "b.pt", on_episode=kill)
    assert repr(train(PROGRAM, MACHINE, limit, config, seed=3, resume=tmp_path / "b.pt")) == repr(whole)
    with pytest.raises(TrainingStateError, match="another seed"):
        train(PROGRAM, MACHINE, limit, config, seed=1, resume=tmp_path / "b.pt")
    with pytest.raises(TrainingStateError, match=r"another agent\.elites"):
        train(PROGRAM, MACHINE, limit, replace(config, elites=2), seed=3, resume=tmp_path / "b.pt")


def test_what_cannot_be_is_named() -> None:
    for values in ({"init": "trained"}, {"elites": 33}, {"num_envs": 0}, {"belady_temperature": 0.1}, {"features": 8}):
        with pytest.raises(ValueError, match="agent." + next(iter(values))):
            config_from(values, DQNConfig)
    with pytest.raises(agents.Infeasible, match="cannot run in"):
        train(PROGRAM, MACHINE, PROGRAM.peak_bytes // 10, SMALL)
    assert train(PROGRAM, MACHINE, PROGRAM.peak_bytes, SMALL).best.decisions == ()
