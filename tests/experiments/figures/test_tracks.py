"""The tracks: what a submitted row says is simulated again; walks as offline data; what PPO reads."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

import agents
from experiments.benchmark import __main__ as benchmark
from experiments.common.cli import CONFIGS, UsageError
from experiments.examples import behaviour_cloning, ppo_single_file
from experiments.figures import actions, tracks, tracks_agents
from simulator import FormatError, Machine
from simulator.files import write_json


def rows() -> list[dict[str, Any]]:
    program, machine, limit = tracks_agents.program_of("vgg16-45")
    planner = agents.make("tensile")
    plan = planner.plan(program, machine, limit).to_dict()["decisions"]
    steps, calls, _ = tracks_agents.job_actions("greedy", "small", {}, 0)
    shared = {"agent": "mine", "calls": 10_000, "seconds": None, "seed": 0, "trained": {"cpu_s": 3}}
    return [{**shared, "track": track, "task": task, "simulator_calls": made, "plan": found,
             **tracks.measured(track, task, found)}
            for track, task, made, found in (("one", "vgg16-45", planner.simulator_calls, plan),
                                             ("jobs", "small", calls, steps))]  # fmt: skip


def test_a_row_is_checked_and_a_false_one_refused(tmp_path: Path) -> None:
    good, file = rows(), tmp_path / "mine.json"
    assert good[0]["overhead"] > 0 and good[1]["slowdown"] < 3.4  # without plans: 3.59

    def said(*changes: tuple[int, str, Any]) -> str:
        wrong = json.loads(json.dumps(good))
        for i, key, value in changes:
            wrong[i][key] = value
        write_json(file, {"rows": wrong})
        try:
            return benchmark.checked("tracks", file)
        except FormatError as error:
            return str(error)

    assert said() == f"{file}: 2 rows, each is worth what it says"
    better = good[0]["overhead"] - 0.01
    assert f'rows[0]: it says {{"overhead": {better}}}, and its plan' in said((0, "overhead", better))
    assert "rows[1]: it says" in said((1, "slowdown", 1.0))
    assert "rows[0]: it says" in said((0, "more", 1))
    assert "rows[0].plan: " in said((0, "plan", good[0]["plan"][:1]))  # it does not fit
    assert "rows[0].plan: decisions[0]" in said((0, "plan", [{"kind": "swap"}]))
    assert "rows[1].plan: plan: the episode does not end" in said((1, "plan", good[1]["plan"][:-1]))
    assert "rows[1].plan: plan[0]: 10000000 is no action there" in said((1, "plan", [10**7]))
    assert "rows[0].simulator_calls: 10,600 are more" in said((0, "simulator_calls", 10_600))
    assert "rows[0].seed: true is not of its kind" in said((0, "seed", True))
    assert "rows[0]: there is no task" in said((0, "task", "../vgg16"))
    assert "rows[0].agent: expected a name" in said((0, "agent", "a | b"))
    (tmp_path / "w.pt").write_bytes(b"weights")
    assert "w.pt has another sha256" in said((0, "trained", {"weights": ["w.pt", "0" * 64]}))
    with pytest.raises(UsageError, match="check: rows are of the suite tracks, not of core"):
        benchmark.checked("core", file)


def test_rows_that_are_here_are_worth_what_they_say() -> None:
    found = list(tracks.rows_in(tracks.RESULTS / "tracks.json"))
    assert {row["track"] for _, row in found} == set(tracks.TRACKS)
    quick = [one for one in found if one[1]["track"] != "noise" and one[1]["task"] in ("vgg16-45", "unet-50", "small")]
    for where, row in random.Random(0).sample(quick, 20):
        tracks.check_row(where, row, tracks.RESULTS)
    for file in tracks.SUBMITTED.glob("*.json"):
        tracks.check(file)


def test_rows_become_scores_beside_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = OmegaConf.load(CONFIGS / "figure" / "tracks.yaml")
    one = {"tasks": ["vgg16-45"], "calls": [300], "seconds": [], "agents": ["random", "mutation", "tensile"]}
    settings.merge_with({"tracks": ["one"], "seeds": [0, 1], "one": one})
    assert isinstance(settings, DictConfig)
    made = [{**task, **tracks.run(task, Machine.load("h100"))} for task in tracks.tasks(settings)]
    assert [len(row["runs"]) for row in made] == [0, 2, 2, 2]
    others = {**rows()[0], "calls": None}
    write_json(tmp_path / "others.json", {"rows": [others, {**rows()[1], "agent": "of another track"}]})
    monkeypatch.setattr(tracks, "SUBMITTED", tmp_path)
    lines = {line["agent"]: line for line in tracks.numbers(made)["lines"]}
    assert set(lines) == {"random", "mutation", "tensile", "mine"}
    assert lines["mine"]["score"] == pytest.approx(100 * others["overhead"]) and lines["mine"]["trained"] == "3 cpu s"
    assert lines["tensile"]["score"] == lines["mine"]["score"] < lines["random"]["score"]
    settings.merge_with({"agents": ["nobody"]})
    with pytest.raises(UsageError, match="nobody"):
        tracks.tasks(settings)


def test_walks_are_kept_as_minari_has_them_and_cloned(tmp_path: Path) -> None:
    args = behaviour_cloning.Args(
        task="GpuMemory-v0", source="all", walks=2, calls=50, epochs=20, hidden=32, out=str(tmp_path)
    )
    assert behaviour_cloning.main(args) < 0.13  # random play: 15 % in the mean
    about = json.loads((tmp_path / "metadata.json").read_text())
    files = sorted((tmp_path / "data").glob("*.npz"))
    assert about["total_episodes"] == len(files) == 6 and about["env_spec"]["kwargs"]["actions"] == "full"
    with np.load(files[0]) as one:
        steps = len(one["actions"])
        env = gymnasium.make("GpuMemory-v0", actions="full")
        observation, _ = env.reset(seed=0)
        for i, action in enumerate(one["actions"]):
            assert (one["observations/nodes"][i] == observation["nodes"]).all()
            observation, reward, over, _, info = env.step(action)
            assert (reward, over) == (one["rewards"][i], one["terminations"][i])
        assert over and not one["truncations"].any() and one["observations/action_mask"].shape[0] == steps + 1
        assert info["overhead"] == pytest.approx(0.0)  # annealing has a plan that costs nothing


@pytest.mark.parametrize("kind", ["structure2vec", "policy"])
def test_ppo_reads_graphs_too(kind: str) -> None:
    args = ppo_single_file.Args("GpuMemory-v0", 128, num_envs=4, num_steps=32, actions="full", reward="episodic")
    found = ppo_single_file.train(args, partial(actions.reading, kind))
    assert np.isfinite(found.best) and found.best_plan is not None and 3 < found.decisions < 30
    assert found.calls == round(128 / found.decisions)  # one an episode


def test_what_settings_are_worth_is_said_beside_the_first() -> None:
    def row(name: str, agent: str, seed: int, **found: float | None) -> dict[str, Any]:
        return {"task": "a", "name": name, "question": "?", "agent": agent, "seed": seed, "calls": 10, "floor": 0.01,
                "simulator_calls": 10, "cpu_s": 1.0, **found}  # fmt: skip

    made = [row("ppo", "ppo", s, greedy=0.05, best=0.03, decisions=4.0) for s in range(2)]
    made += [row("full", "ppo", s, greedy=0.02, best=None, decisions=5.0) for s in range(2)]
    made += [row("annealing", "annealing", 0, best=0.01)]
    heads, cells = actions.FIGURE.table(made)
    assert all(len(line) == len(heads) for line in cells)
    gaps = [("4.00 (4.00)", "2.00 (2.00)"), ("1.00 (1.00)", "100.00 (100.00)"), ("", "0.00 (0.00)")]
    assert [tuple(line[5:7]) for line in cells] == gaps
    assert "a, `full`: +3.00 points" in " ".join(actions.FIGURE.notes(made))
