"""Tests Stable-Baselines3 on both environments: its training command, and the single-file agents."""

import dataclasses
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from agents.learned import sb3
from agents.learned.external import ArchivePlanner
from agents.learned.optimization import MASKED
from agents.learned.training import Episode
from envs import Task
from envs.memory_env import small_task
from envs.tasks import load
from experiments.common import curves, report
from experiments.examples import dqn_single_file, ppo_single_file
from simulator import Plan, simulate
from tests.experiments.conftest import Run, chain, check_rows, rows_in

PROGRAM, MACHINE = small_task()
ENVIRONMENT = {"limit": 0.7}
EDITS = {"id": "GpuMemoryEdit-v1", "program": PROGRAM, "machine": MACHINE, "limit": 0.6, "start": "empty"}
LIMIT = int(0.7 * PROGRAM.peak_bytes)
PPO = {"n_steps": 64, "batch_size": 64, "n_epochs": 5, "learning_rate": 3e-3, "gamma": 1.0}
SMALL: dict[str, dict[str, Any]] = {
    "maskable_ppo": {"n_steps": 16, "batch_size": 64, "n_epochs": 2},
    "dqn": {"buffer_size": 500, "learning_starts": 100, "train_freq": 1, "target_update_interval": 50},
}


def make_model(algorithm: str, seed: int = 0, environment: Mapping[str, Any] = ENVIRONMENT, **options: Any) -> Any:
    return sb3.make(algorithm, environment, seed, **{"num_envs": 4, "reward_scale": 10.0, "network": {}, **options})


def overhead(plan: Plan | None) -> float:
    return simulate(PROGRAM, plan, MACHINE, LIMIT).overhead if plan is not None else math.inf


class Invalid(BaseCallback):
    """Counts invalid actions, except each environment's first: SB3 has not set epsilon by then."""

    count = 0

    def _on_step(self) -> bool:
        if self.n_calls > 1:
            self.count += sum(info["invalid"] for info in self.locals["infos"])
        return True


# ------------------------------------------------------------------------------------------- training


def test_maskable_ppo_learns_the_small_task() -> None:
    model = make_model("maskable_ppo", seed=3, num_envs=8, **PPO)
    assert overhead(sb3.greedy(model, ENVIRONMENT, "")) > 0.05
    invalid = Invalid()
    model.learn(2500, invalid)
    assert overhead(sb3.greedy(model, ENVIRONMENT, "")) <= 0.01
    assert not invalid.count


@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_the_record_has_every_episode_and_a_seed_makes_the_same_run_again(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers that the library's logger leaves no folder behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    histories = []
    for seed in (5, 5, 6):
        episodes: list[Episode] = []
        record = sb3.EpisodeRecorder(algorithm, on_episode=episodes.append)
        make_model(algorithm, seed, **SMALL[algorithm]).learn(512, record)
        assert record.num_timesteps == 512 and episodes == record.history and len(episodes) > 20
        assert [e.episode for e in episodes] == list(range(1, len(episodes) + 1))
        overheads = [e.overhead for e in episodes if e.feasible]
        assert episodes[-1].best_overhead == min(overheads) == pytest.approx(overhead(record.best))
        assert record.best is not None and record.best.planner == algorithm
        histories.append([(e.steps, e.overhead) for e in record.history if e.feasible])
    assert histories[0] == histories[1] != histories[2]
    assert not list(tmp_path.iterdir())


def test_rewards_are_scaled_for_learning_only() -> None:
    """The sum of an episode's rewards is −10 times its overhead; Monitor, inside the wrapper, reports the plain sum."""
    env = make_model("maskable_ppo", num_envs=1, **SMALL["maskable_ppo"]).get_env()
    rng = np.random.default_rng(0)
    env.reset()
    total = 0.0
    done = False
    while not done:
        (mask,) = env.env_method("action_masks")
        _, (reward,), (done,), (info,) = env.step(np.array([rng.choice(np.flatnonzero(mask))]))
        total += reward
    assert total == pytest.approx(-10 * info["overhead"], rel=1e-5) and info["overhead"] > 0
    assert info["episode"]["r"] == pytest.approx(-info["overhead"], abs=1e-5)


def test_what_the_network_cannot_be_is_refused() -> None:
    tasks = [Task(program, MACHINE, int(0.7 * program.peak_bytes)) for program in (PROGRAM, chain())]
    with pytest.raises(ValueError, match="one graph"):
        sb3.graph_of(tasks)
    with pytest.raises(ValueError, match="pool"):
        make_model("dqn", network={"pool": "median"})
    assert sb3.graph_of([tasks[0], Task(PROGRAM, MACHINE, LIMIT)]) is tasks[0].graph


# ---------------------------------------------------------------------------------------------- edits


@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_both_algorithms_train_on_edits(algorithm: str) -> None:
    """A spent budget ends an episode as a terminal state, and its overhead is the best plan's."""
    model = make_model(algorithm, 1, EDITS, **SMALL[algorithm])
    before = [parameter.clone() for parameter in model.policy.parameters()]
    record = sb3.EpisodeRecorder(algorithm)
    invalid = Invalid()
    model.learn(320, [record, invalid])
    assert not invalid.count and len(record.history) >= 20 and all(e.feasible for e in record.history)
    assert record.best is not None
    best = simulate(PROGRAM, record.best, MACHINE, int(0.6 * PROGRAM.peak_bytes)).overhead
    assert min(e.overhead for e in record.history) == record.history[-1].best_overhead == pytest.approx(best)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.policy.parameters(), strict=True))
    plan = sb3.greedy(model, EDITS, "mine")
    assert plan is not None and plan.planner == "mine"


def edit_inputs() -> tuple[sb3.BudgetedEdits, dict[str, Tensor]]:
    """Returns an environment, and its first observation as a batch of one."""
    env = sb3.make_env(EDITS)
    assert isinstance(env, sb3.BudgetedEdits)
    observation, _ = env.reset(seed=0)
    return env, {key: torch.from_numpy(value[None]) for key, value in observation.items()}


def test_an_edits_score_is_the_sum_of_its_changes_scores() -> None:
    """Permuted edits have permuted scores; edits of one change add up to the edit of all; padding adds nothing."""
    torch.manual_seed(0)
    env, inputs = edit_inputs()
    kind, arguments = sb3.extractor_of(env, {"edit_width": 8}, None)
    extractor = kind(env.observation_space, **arguments)
    edits = inputs["edits"]
    count = edits.shape[1]
    order = torch.randperm(count)

    def scores(edits: Tensor) -> Tensor:
        return extractor({**inputs, "edits": edits})[0, : edits.shape[1]]

    assert scores(edits).unique().numel() > 3
    torch.testing.assert_close(scores(edits[:, order]), scores(edits)[order])
    changes = torch.tensor([2, 16, 30])
    single = torch.full((1, 3, 10), -1)
    single[0, :, 0] = changes
    united = torch.full((1, 1, 10), -1)
    united[0, 0, 2:5] = changes
    torch.testing.assert_close(scores(united)[0], scores(single).sum())


def test_a_network_of_edits_refuses_several_programs_and_classes_of_ones_own() -> None:
    for environment, network in ((EDITS, torch.nn.Linear), ({**EDITS, "limit": [0.6, 0.65]}, None)):
        with pytest.raises(ValueError, match="one program and no custom network"):
            sb3.extractor_of(sb3.make_env(environment), {}, network)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_the_command_trains_on_a_named_task_of_edits(run: Run, tmp_path: Path, algorithm: str) -> None:
    """Covers that the archive plans as the trained model."""
    out = tmp_path / "out"
    words = ("task=GpuMemoryEdit/unet-50-v1", "steps=600", "algo.num_envs=2", "planners=null", "tracker=none")
    run("train_sb3", f"algo={algorithm}", *words, f"out={out}").ok()
    *_, greedy = rows_in(out)
    program, machine = load("unet")
    row, _, _ = report.score_with(ArchivePlanner(out / "model.zip"), program, machine, greedy["limit_bytes"], 0)
    assert row["overhead"] == greedy["overhead"] < 0.054


# ---------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("environment", [ENVIRONMENT, EDITS])
@pytest.mark.parametrize(
    "settings",
    [
        {"learning_starts": 10_000},  # warm-up
        {"learning_starts": 4, "exploration_fraction": 1.0, "exploration_final_eps": 1.0},  # exploration
        {"learning_starts": 0, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0},  # greedy
    ],
)
def test_the_dqn_takes_no_invalid_action(settings: dict[str, Any], environment: dict[str, Any]) -> None:
    model = make_model("dqn", 0, environment, **{**SMALL["dqn"], **settings})
    invalid = Invalid()
    model.learn(400, invalid)
    assert not invalid.count


def test_the_maximum_of_the_target_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked nodes have a Q-value of a million; no target may use it."""
    features = sb3.GraphFeatures.forward

    def tempting(extractor: sb3.GraphFeatures, observations: Mapping[str, Tensor]) -> Tensor:
        scores = features(extractor, observations).clone()
        scores[:, : extractor.nodes][observations["action_mask"] == 0] = 1e6
        return scores

    monkeypatch.setattr(sb3.GraphFeatures, "forward", tempting)
    model = make_model("dqn", **{**SMALL["dqn"], "learning_starts": 10_000})
    model.learn(400)
    model.train(1, 64)
    assert model.logger.name_to_value["train/loss"] < 100


# -------------------------------------------------------------------------------------- as a user does


@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_the_command_writes_its_run_directory(run: Run, tmp_path: Path, algorithm: str) -> None:
    out = tmp_path / "out"
    words = ("steps=600", "seed=1", "planners=[autoswap_doa]", "greedy_every=200")
    done = run("train_sb3", f"algo={algorithm}", *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    files = {
        "program.json",
        "summary.json",
        "results.jsonl",
        "plan.json",
        "model.zip",
        "tb",
        "learning_curve.png",
        "memory_curve.png",
        "timeline.json",
        "curve.json",
        ".hydra",
    }
    assert {f.name for f in out.iterdir()} == files
    rows = rows_in(out)
    agent = f"sb3_{algorithm}"
    check_rows(rows)
    names = [
        "autoswap_doa",
        "without the network, equal calls",
        "without the network, equal seconds",
        agent,
        f"{agent}_greedy",
    ]
    assert [row["planner"] for row in rows] == names
    steps = rows[3]["simulator_calls"]
    assert 600 <= steps < 600 + 8 * 64 and rows[1]["simulator_calls"] <= steps
    plan = Plan.load(out / "plan.json")
    assert overhead(plan) == rows[3]["overhead"] and plan.planner == agent
    assert json.loads((out / "summary.json").read_text())["versions"]["sb3-contrib"]
    events = EventAccumulator(str(out / "tb"))
    events.Reload()
    best = [(e.step, e.value) for e in events.Scalars("episode/best_overhead")]
    assert best[-1] == (steps, pytest.approx(overhead(plan))) and len(best) > 1
    assert best == sorted(best, key=lambda entry: (entry[0], -entry[1]))
    assert {
        "rollout/ep_rew_mean",
        "time/fps",
        curves.GREEDY,
        "greedy/gap",
        curves.OVERHEAD,
        "episode/feasible",
        curves.BEST,
    } <= set(events.Tags()["scalars"])
    greedy = events.Scalars(curves.GREEDY)
    assert len(greedy) >= 3 and greedy[-1].value == pytest.approx(rows[4]["overhead"], abs=1e-6)


def test_a_program_of_ones_own(run: Run, program_file: Path, tmp_path: Path) -> None:
    words = (f"program={program_file}", "limit=0.6", "mode=swap", "steps=64", "algo.n_steps=8", "planners=null")
    done = run("train_sb3", *words, f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert {(row["machine"], row["mode"]) for row in rows_in(tmp_path / "out")} == {("gtx1080ti", "swap")}


# ----------------------------------------------------------------------------------------- the one file


def test_the_single_file_learns_the_small_task(capsys: pytest.CaptureFixture[str]) -> None:
    overhead = dqn_single_file.main(dqn_single_file.Args(steps=4000, seed=1))
    lines = capsys.readouterr().out.splitlines()
    assert overhead <= 0.01
    assert f"{overhead:.2%}" in lines[-1]
    returns = [float(line.split("return ")[1].split(",")[0]) for line in lines[:-1]]
    assert len(returns) > 5 and np.mean(returns[-3:]) > returns[0]


def test_the_single_file_of_ppo_learns_the_small_task(capsys: pytest.CaptureFixture[str]) -> None:
    args = ppo_single_file.Args(task="GpuMemory-v1", steps=12_288, num_envs=16, num_steps=48, hidden=64, seed=1)
    assert ppo_single_file.main(args) <= 0.01
    first, *_, last = capsys.readouterr().out.splitlines()
    assert float(first.split("overhead ")[1].split("%")[0]) > 5 and "greedy plan: overhead 0.00%" in last


@pytest.mark.nightly
def test_the_single_files_train_on_edits(capsys: pytest.CaptureFixture[str]) -> None:
    """The greedy plan is never worse than the start, and the best of all episodes is better."""
    task = "GpuMemoryEdit/unet-50-v1"
    _, info = gymnasium.make(task).reset(seed=0)
    dqn = dqn_single_file.Args(task=task, steps=400, num_envs=2, warm_up=100, buffer=200, greedy_every=10**6)
    ppo = ppo_single_file.Args(task=task, steps=640, num_envs=2, num_steps=64, hidden=16, greedy_every=10**6)
    for greedy in (dqn_single_file.main(dqn), ppo_single_file.main(ppo)):
        assert 0 < greedy <= info["overhead"]
    assert float(capsys.readouterr().out.split()[-1].rstrip("%")) < 100 * info["overhead"]
    with pytest.raises(SystemExit, match="--reward"):
        ppo_single_file.main(dataclasses.replace(ppo, reward="causal"))


def test_the_single_files_score_each_edit_alone() -> None:
    """Masked edits get no probability or MASKED; permuted edits have permuted values."""
    options = {key: value for key, value in EDITS.items() if key != "id"}
    env = gymnasium.make_vec("GpuMemoryEdit-v1", 2, "vector_entry_point", **options)
    observation, _ = env.reset(seed=0)
    observation["action_mask"][:, ::5] = 0
    order = np.random.default_rng(0).permutation(observation["action_mask"].shape[1])
    permuted = observation | {key: observation[key][:, order] for key in ("edits", "action_mask")}
    agent, states_of = ppo_single_file.agent_of(ppo_single_file.Args(hidden=8), observation)
    network = dqn_single_file.network_of(dqn_single_file.Args(width=8), None, observation)
    masked = torch.from_numpy(observation["action_mask"] == 0)
    for values, of_permuted, excluded in (
        (*(agent.policy(*states_of(x)).probs for x in (observation, permuted)), 0.0),
        (*(network(*dqn_single_file.state_of(x)) for x in (observation, permuted)), MASKED),
    ):
        torch.testing.assert_close(of_permuted, values[:, order])
        assert torch.equal(values == excluded, masked) and values[~masked].unique().numel() > 3


def test_the_single_files_mask() -> None:
    env = gymnasium.make_vec("GpuMemory-v1", 2, "vector_entry_point", limit=0.7)
    observation, _ = env.reset(seed=0)
    states_of = ppo_single_file.States(observation)
    state, mask = states_of(observation)
    policy = ppo_single_file.Agent(states_of.size, mask.shape[1], 8).policy(state, mask)
    assert torch.equal(policy.probs > 0, mask) and state.shape == (2, states_of.size)
    graph = env.unwrapped.tasks[0].graph
    network = dqn_single_file.QNetwork(graph.edges, graph.weights, observation["nodes"].shape[2], 8, 3)
    q = network(*dqn_single_file.state_of(observation))
    assert torch.equal(q == MASKED, torch.from_numpy(observation["action_mask"] == 0))
