"""Stable-Baselines3 on GpuMemory-v0, the command that trains it, and the DQN in one file."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from agents.learned import sb3
from agents.learned.optimisation import MASKED
from envs import MemoryEnv, Task
from envs.memory_env import small_task
from experiments.common import curves
from experiments.examples import dqn_single_file, ppo_single_file
from simulator import Plan, simulate
from tests.experiments.common.test_cli import check_rows, refused, rows_in
from tests.experiments.conftest import Run, chain

PROGRAM, MACHINE = small_task()
ENVIRONMENT = {"limit": 0.7}
LIMIT = int(0.7 * PROGRAM.peak_bytes)
PPO = {"n_steps": 64, "batch_size": 64, "n_epochs": 5, "learning_rate": 3e-3, "gamma": 1.0}
SMALL: dict[str, dict[str, Any]] = {
    "maskable_ppo": {"n_steps": 16, "batch_size": 64, "n_epochs": 2},
    "dqn": {"buffer_size": 500, "learning_starts": 100, "train_freq": 1, "target_update_interval": 50},
}


def made(algorithm: str, seed: int = 0, **options: Any) -> tuple[Any, sb3.Record]:
    record = sb3.Record(algorithm)
    settings = {"num_envs": 4, "reward_scale": 10.0, "network": {}, **options}
    return sb3.make(algorithm, ENVIRONMENT, record, seed, **settings), record


def overhead(plan: Plan | None) -> float:
    return simulate(PROGRAM, plan, MACHINE, LIMIT).overhead if plan is not None else math.inf


class Invalid(BaseCallback):
    """Counts actions that could not be taken, but for each environment's first: there SB3 has not set epsilon yet."""

    count = 0

    def _on_step(self) -> bool:
        if self.n_calls > 1:
            self.count += sum(info["invalid"] for info in self.locals["infos"])
        return True


# ------------------------------------------------------------------------------------------- training


def test_maskable_ppo_learns_the_small_task() -> None:
    model, _ = made("maskable_ppo", seed=3, num_envs=8, **PPO)
    assert overhead(sb3.greedy(model, ENVIRONMENT, "")) > 0.05
    invalid = Invalid()
    model.learn(2500, invalid)
    assert overhead(sb3.greedy(model, ENVIRONMENT, "")) <= 0.01
    assert not invalid.count


@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_the_record_has_every_episode_and_the_best_plan(algorithm: str) -> None:
    told: list[sb3.Episode] = []
    model, record = made(algorithm, **SMALL[algorithm])
    record.on_episode = told.append
    model.learn(512)
    assert record.steps == 512 and told == record.history and len(told) > 20
    assert [e.episode for e in told] == list(range(1, len(told) + 1))
    found = [e.overhead for e in told if e.feasible]
    assert told[-1].best_overhead == min(found) == pytest.approx(overhead(record.best))
    assert record.best is not None and record.best.planner == algorithm


@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_a_seed_makes_the_same_run_again(algorithm: str) -> None:
    histories = []
    for seed in (5, 5, 6):
        model, record = made(algorithm, seed, **SMALL[algorithm])
        model.learn(512)
        histories.append([(e.steps, e.overhead) for e in record.history if e.feasible])
    assert histories[0] == histories[1] != histories[2]


def test_rewards_are_scaled_for_learning_only() -> None:
    env, random = sb3.Recorded(MemoryEnv(limit=0.7), record := sb3.Record(""), 10.0), np.random.default_rng(0)
    env.reset(seed=0)
    total, terminated, info = 0.0, False, {}
    while not terminated:
        _, reward, terminated, _, info = env.step(random.choice(np.flatnonzero(env.get_wrapper_attr("action_masks")())))
        total += reward
    assert total == pytest.approx(-10 * info["overhead"]) and record.history[0].overhead == info["overhead"] > 0
    model, record = made("maskable_ppo", **SMALL["maskable_ppo"])
    model.learn(64)
    returns = [one["r"] for one in model.ep_info_buffer]
    assert returns == pytest.approx([-e.overhead for e in record.history if e.feasible], abs=1e-5)


def test_what_the_network_cannot_be_is_refused() -> None:
    tasks = [Task(program, MACHINE, int(0.7 * program.peak_bytes)) for program in (PROGRAM, chain())]
    with pytest.raises(ValueError, match="reads one graph, and these 2 tasks have several"):
        sb3.graph_of(tasks)
    with pytest.raises(ValueError, match="pool: expected one of"):
        made("dqn", network={"pool": "median"})
    assert sb3.graph_of([tasks[0], Task(PROGRAM, MACHINE, LIMIT)]) is tasks[0].graph


# ---------------------------------------------------------------------------------------------- masks


def invalid_actions() -> dict[str, int]:
    """How many invalid actions the DQN takes in warm-up, while it explores, and greedily."""
    counts = {}
    for phase, settings in {
        "warm-up": {"learning_starts": 10_000},
        "exploration": {"learning_starts": 4, "exploration_fraction": 1.0, "exploration_final_eps": 1.0},
        "greedy": {"learning_starts": 0, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0},
    }.items():
        model, _ = made("dqn", **{**SMALL["dqn"], **settings})
        invalid = Invalid()
        model.learn(400, invalid)
        counts[phase] = invalid.count
    return counts


def test_the_dqn_takes_no_invalid_action() -> None:
    assert invalid_actions() == {"warm-up": 0, "exploration": 0, "greedy": 0}


@pytest.mark.parametrize(
    ("owner", "name", "without", "phases"),
    [
        (sb3.MaskedDQN, "_sample_action", DQN._sample_action, {"warm-up"}),
        (sb3.MaskedDQN, "predict", DQN.predict, {"exploration"}),
        (sb3.MaskedQNetwork, "forward", lambda q, obs: q.extract_features(obs, q.features_extractor)[:, :39] * 0
         + torch.arange(39), {"greedy"}),
    ],
)  # fmt: skip
def test_every_mask_is_needed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, without: Any, phases: set[str]
) -> None:
    """Without the mask there are invalid actions, so that the test above would see it missing."""
    monkeypatch.setattr(owner, name, without)
    counts = invalid_actions()
    assert {phase for phase, count in counts.items() if count} == phases


def test_the_maximum_of_the_target_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that may not be taken are worth a million to the network; no target may have it."""
    features = sb3.GraphFeatures.forward

    def tempting(extractor: sb3.GraphFeatures, observations: Mapping[str, Tensor]) -> Tensor:
        out = features(extractor, observations).clone()
        out[:, : extractor.nodes][observations["action_mask"] == 0] = 1e6
        return out

    monkeypatch.setattr(sb3.GraphFeatures, "forward", tempting)
    model, _ = made("dqn", **{**SMALL["dqn"], "learning_starts": 10_000})
    model.learn(400)
    model.train(1, 64)
    assert model.logger.name_to_value["train/loss"] < 100


@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_scores_are_of_actions_and_the_rest_is_masked_but_finite(algorithm: str) -> None:
    model, _ = made(algorithm, **SMALL[algorithm])
    env = MemoryEnv(limit=0.7)
    observation, _ = env.reset(seed=0)
    batch, _ = model.policy.obs_to_tensor(observation)
    mask = torch.from_numpy(env.action_masks())
    if algorithm == "dqn":
        scores = model.q_net(batch)[0]
        assert torch.equal(scores == MASKED, ~mask)
    else:
        chances = model.policy.get_distribution(batch, env.action_masks()).distribution.probs[0]
        assert torch.equal(chances > 0, mask)
        scores = model.policy.get_distribution(batch).distribution.logits[0]
    assert torch.isfinite(scores).all() and len(scores[mask].unique()) == mask.sum()


# -------------------------------------------------------------------------------------- as a user does


@pytest.mark.parametrize("algorithm", sb3.ALGORITHMS)
def test_the_command_writes_its_run_directory(run: Run, tmp_path: Path, algorithm: str) -> None:
    out = tmp_path / "out"
    words = ("steps=600", "seed=1", "planners=[autoswap_doa]", "greedy_every=200")
    done = run("train_sb3", f"algo={algorithm}", *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    names = {"program.json", "summary.json", "results.jsonl", "plan.json", "model.zip", "tb", "learning_curve.png",
             "memory_curve.png", "timeline.json", "curve.json", ".hydra"}  # fmt: skip
    assert {f.name for f in out.iterdir()} == names
    rows, agent = rows_in(out), f"sb3_{algorithm}"
    check_rows(rows)
    names_of = ["autoswap_doa", "mutation, equal calls", "mutation, equal seconds", agent, f"{agent}_greedy"]
    assert [row["planner"] for row in rows] == names_of
    steps = rows[3]["simulator_calls"]
    assert 600 <= steps < 600 + 8 * 64 and rows[1]["simulator_calls"] <= steps  # type: ignore[operator]
    plan = Plan.load(out / "plan.json")
    assert overhead(plan) == rows[3]["overhead"] and plan.planner == agent
    summary = json.loads((out / "summary.json").read_text())
    assert summary["versions"]["sb3-contrib"] and summary["config"]["steps"] == 600
    told = EventAccumulator(str(out / "tb"))
    told.Reload()
    best = [(e.step, e.value) for e in told.Scalars("episode/best_overhead")]
    assert best[-1] == (steps, pytest.approx(overhead(plan))) and len(best) > 1
    assert best == sorted(best, key=lambda entry: (entry[0], -entry[1]))
    assert {"rollout/ep_rew_mean", "time/fps", *curves.NAMES} <= set(told.Tags()["scalars"])
    greedy = told.Scalars(curves.GREEDY)
    assert len(greedy) >= 3 and greedy[-1].value == pytest.approx(rows[4]["overhead"], abs=1e-6)
    assert "time/total_timesteps" not in told.Tags()["scalars"]


def test_a_program_of_ones_own(run: Run, program_file: Path, tmp_path: Path) -> None:
    words = (f"program={program_file}", "limit=0.6", "mode=swap", "steps=64", "algo.n_steps=8", "planners=null")
    done = run("train_sb3", *words, f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert {row["machine"] for row in rows_in(tmp_path / "out")} == {"gtx1080ti"}
    assert {row["mode"] for row in rows_in(tmp_path / "out")} == {"swap"}


@pytest.mark.parametrize("causal", [False, True])
def test_scalars_are_by_simulator_calls(causal: bool) -> None:
    said: list[int] = []
    record = sb3.Record("", causal=causal)
    environment = {**ENVIRONMENT, "reward": "causal" if causal else "paper"}
    model = sb3.make("maskable_ppo", environment, record, 0, num_envs=4, reward_scale=10.0, network={},
                     **SMALL["maskable_ppo"])  # fmt: skip
    sb3.watch(model, record, lambda step, _: said.append(step))
    model.learn(256)
    model.logger.dump(model.num_timesteps)
    assert record.steps == 256 and said[-1] == record.calls == (len(record.history) if causal else 256)


def test_mlflow_has_the_scalars(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # of the reading below
    out = tmp_path / "out"
    words = ("steps=300", "algo.n_steps=16", "planners=null", "tracker=mlflow", f"out={out}")
    done = run("train_sb3", *words)
    assert done.returncode == 0, done.stderr
    assert not (out / "tb").exists()
    client = MlflowClient((out / "mlruns").absolute().as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("headroom").experiment_id])
    assert kept.info.status == "FINISHED" and kept.data.params["algo.n_steps"] == "16"
    best = client.get_metric_history(kept.info.run_id, "episode/best_overhead")
    row = next(row for row in rows_in(out) if row["planner"] == "sb3_maskable_ppo")
    assert best[-1].step <= row["simulator_calls"] and best[-1].value == row["overhead"]  # type: ignore[operator]
    assert "rollout/ep_rew_mean" in kept.data.metrics


def test_mistakes_end_with_status_2_and_leave_nothing(run: Run, tmp_path: Path) -> None:
    refused(run("train_sb3", "limit=1"), "small fits without a plan")
    refused(run("train_sb3", "algo=ppo"), "'maskable_ppo'")
    refused(run("train_sb3", "tracker=neptune"), "tracker: expected tensorboard, wandb, mlflow or none")
    refused(run("train_sb3", "+algo.walks=3"), "walks")
    assert not any((tmp_path / "work").rglob("*.*"))


# ----------------------------------------------------------------------------------------- the one file


def test_the_single_file_learns_the_small_task(capsys: pytest.CaptureFixture[str]) -> None:
    found = dqn_single_file.main(dqn_single_file.Args(steps=4000, seed=1))
    lines = capsys.readouterr().out.splitlines()
    assert found <= 0.01
    assert lines[-1].startswith(f"greedy plan: overhead {found:.2%}; best published heuristic, autoswap_doa: 0.00%")
    returns = [float(line.split("return ")[1].split(",")[0]) for line in lines[:-1]]
    assert len(returns) > 5 and np.mean(returns[-3:]) > returns[0]


def test_the_single_file_of_ppo_learns_the_small_task(capsys: pytest.CaptureFixture[str]) -> None:
    args = ppo_single_file.Args(task="GpuMemory-v0", steps=12_288, num_envs=16, num_steps=48, hidden=64, seed=1)
    assert ppo_single_file.main(args) <= 0.01
    first, *_, last = capsys.readouterr().out.splitlines()
    assert float(first.split("overhead ")[1].split("%")[0]) > 5 and "greedy plan: overhead 0.00%" in last


def test_ppo_takes_nothing_invalid() -> None:
    env = gymnasium.make_vec("GpuMemory-v0", 2, "vector_entry_point", limit=0.7)
    observation, _ = env.reset(seed=0)
    states_of = ppo_single_file.States(observation)
    state, mask = states_of(observation)
    policy = ppo_single_file.Agent(states_of.size, mask.shape[1], 8).policy(state, mask)
    assert torch.equal(policy.probs > 0, mask) and state.shape == (2, states_of.size)


def test_the_single_files_network_masks() -> None:
    env = gymnasium.make_vec("GpuMemory-v0", 2, "vector_entry_point", limit=0.7)
    observation, _ = env.reset(seed=0)
    graph = env.unwrapped.tasks[0].graph  # type: ignore[attr-defined]
    network = dqn_single_file.QNetwork(graph.edges, graph.weights, observation["nodes"].shape[2], 8, 3)
    q = network(*dqn_single_file.state_of(observation))
    assert torch.equal(q == MASKED, torch.from_numpy(observation["action_mask"] == 0))
    assert q.shape == observation["action_mask"].shape
