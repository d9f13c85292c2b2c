"""The DQN: walks by Q-values, what was learned elsewhere and what is learned here; and what both trainers share."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import agents
from agents.learned.dqn import Trainer
from agents.learned.dqn_config import DQNConfig, PaperConfig, config_from
from agents.learned.planner import controls
from agents.learned.training import Episode, train
from agents.learned.training_state import TrainingStateError
from envs.memory_env import small_task
from envs.task import Task
from envs.tasks import load
from envs.walk import Walk
from experiments.figures import program as bundled
from simulator import Machine, simulate
from tests.agents.learned import test_dqn_paper
from tests.oracle import enumeration

PROGRAM, MACHINE = small_task()
LIMIT = round(0.6 * PROGRAM.peak_bytes)
Config = DQNConfig | PaperConfig
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


# ------------------------------------------------------------------------------------- both trainers

BOTH = pytest.mark.parametrize("small", [SMALL, test_dqn_paper.SMALL], ids=["dqn", "paper"])


@BOTH
def test_finds_the_optimum_of_a_small_task(small: Config) -> None:
    result = train(PROGRAM, MACHINE, LIMIT, small, seed=0)
    # The DQN's values are kept by their greedy walk.
    for plan in (result.best, result.greedy) if small is SMALL else (result.best,):
        found = simulate(PROGRAM, plan, MACHINE, LIMIT).iteration_ns
        assert found <= enumeration.shortest_ns(PROGRAM, MACHINE, LIMIT, "swap")


@pytest.mark.parametrize(("config", "fraction", "stop"), [
    (replace(SMALL, episodes=160, init="scratch"), 0.585, 96),
    (replace(test_dqn_paper.SMALL, n_step=3, episodes=24, checkpoint_every=6), 0.6, 15),
], ids=["dqn", "paper"])  # fmt: skip
def test_same_seed_same_run_and_resume(config: Config, fraction: float, stop: int, tmp_path: Path) -> None:
    limit = round(fraction * PROGRAM.peak_bytes)
    whole = train(PROGRAM, MACHINE, limit, config, seed=3)
    assert len(whole.history) > 1
    assert train(PROGRAM, MACHINE, limit, config, seed=4).history != whole.history

    def kill(episode: Episode) -> None:
        if episode.episode == stop:
            raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        train(PROGRAM, MACHINE, limit, config, seed=3, checkpoint=path, on_episode=kill)
    assert repr(train(PROGRAM, MACHINE, limit, config, seed=3, resume=path)) == repr(whole)  # losses may be nan
    with pytest.raises(TrainingStateError, match="another seed"):
        train(PROGRAM, MACHINE, limit, config, seed=1, resume=path)
    with pytest.raises(TrainingStateError, match=r"another agent\.min_bytes"):
        train(PROGRAM, MACHINE, limit, replace(config, min_bytes=2), seed=3, resume=path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TrainingStateError, match="not a checkpoint"):
        train(PROGRAM, MACHINE, limit, config, resume=path)
    with pytest.raises(TrainingStateError, match="cannot be read"):
        train(PROGRAM, MACHINE, limit, config, resume=tmp_path / "none.pt")


@BOTH
def test_limits_below_reach_and_above_the_peak(small: Config) -> None:
    with pytest.raises(agents.Infeasible, match="cannot run in"):
        train(PROGRAM, MACHINE, PROGRAM.peak_bytes // 10, small)
    with pytest.raises(agents.Infeasible, match="min_bytes"):
        train(PROGRAM, MACHINE, int(PROGRAM.peak_bytes * 0.8), replace(small, min_bytes=2**40))
    assert train(PROGRAM, MACHINE, PROGRAM.peak_bytes, small).best.decisions == ()


@pytest.mark.parametrize(("kind", "values"), [
    (DQNConfig, {"init": "trained"}), (DQNConfig, {"elites": 33}), (DQNConfig, {"num_envs": 0}),
    (DQNConfig, {"belady_temperature": 0.1}), (DQNConfig, {"features": 8}), (PaperConfig, {"sise": 8}),
    (PaperConfig, {"num_envs": "8"}), (PaperConfig, {"num_envs": 0}), (PaperConfig, {"pool": "max"}),
    (PaperConfig, {"mode": "both"}), (PaperConfig, {"num_envs": None}),
])  # fmt: skip
def test_bad_configs_are_named(kind: type[Config], values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="agent." + next(iter(values))):
        config_from(values, kind)
