"""python -m experiments.train_program_dqn: whole, stopped and again, and with settings that cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from agents.learned.program_dqn import ProgramDQNConfig, QNet
from agents.learned.training_state import read_weights
from experiments.common import curves
from experiments.common.cli import CONFIGS, dataclass_of
from tests.experiments.conftest import MB, Run, chain

SMALL = ("seeds=[0,1]", "tasks=3", "training.iterations=1", "training.tasks=2", "training.updates=2",
         "training.width=8", "training.layers=1", "training.batch_size=32", "training.guide_calls=20",
         "tuning.iterations=1", "tuning.walks=6", "test.workloads=[mlp]", "test.machines=[h100]", "test.limits=[0.7]",
         "calls=60", "planners=[mutation]")  # fmt: skip
METHODS = [f"{start}, {what}" for start in ("zero-shot", "fine-tuned", "from scratch")
           for what in ("greedy", "best walk", "and search")] + ["search alone", "mutation"]  # fmt: skip


def programs(folder: Path) -> None:
    folder.mkdir()
    for layers in (5, 7):
        one = chain(layers, 32 * MB)
        busy = tuple(replace(kernel, flops=10**10, bytes=96 * MB) for kernel in one.kernels)
        replace(one, kernels=busy).save(folder / f"{layers}.json.gz")


def test_config_is_the_defaults() -> None:
    config = OmegaConf.load(CONFIGS / "train_program_dqn.yaml")
    assert dataclass_of(ProgramDQNConfig, config.training, "training") == ProgramDQNConfig()


def test_a_small_training(run: Run, tmp_path: Path) -> None:
    programs(tmp_path / "programs")
    words = (*SMALL, f"programs={tmp_path / 'programs'}", f"out={tmp_path / 'out'}")
    done = run("train_program_dqn", *words)
    assert done.returncode == 0, done.stderr
    assert "fine-tuned, and search" in done.stdout
    found = json.loads((tmp_path / "out" / "program_dqn.json").read_text())
    assert [m["method"] for m in found["means"]] == METHODS
    assert len(found["rows"]) == 2 * len(METHODS)
    for row in found["rows"]:
        assert row["gap"] is None or row["gap"] > -1e-9
        assert row["calls"] <= 60
    of = {(row["method"], row["seed"]): row for row in found["rows"]}
    for seed in (0, 1):
        assert [of[f"{start}, best walk", seed]["calls"] for start in ("zero-shot", "fine-tuned")] == [6, 12]
        walk, search = (of[f"zero-shot, {what}", seed]["overhead"] for what in ("best walk", "and search"))
        assert walk is None or search <= walk
    logged = [json.loads(line) for line in (tmp_path / "out" / "log-1.jsonl").read_text().splitlines()]
    assert set(curves.NAMES) - {curves.GAP} <= set(logged[-1]) and logged[-1]["calls"] > 0
    assert read_weights(tmp_path / "out" / "weights-1.pt", QNet, "a program DQN").settings["width"] == 8

    for name in ("weights-0.pt", "results-1.jsonl", "program_dqn.json"):
        (tmp_path / "out" / name).unlink()
    again = run("train_program_dqn", *words)
    assert again.returncode == 0, again.stderr
    other = json.loads((tmp_path / "out" / "program_dqn.json").read_text())
    assert [(r["method"], r["overhead"]) for r in other["rows"]] == [
        (r["method"], r["overhead"]) for r in found["rows"]
    ]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("programs=none", "no program/1 file in none"),
        ("calls=10", "fewer episodes than there are calls"),
        ("training.walks=2", "walks, guided"),
        ("training.width=wide", "training.width: expected int"),
        ("most_kernels=3", "no program has as few as 3"),
    ],
)
def test_refuses_what_cannot_be(run: Run, tmp_path: Path, word: str, says: str) -> None:
    programs(tmp_path / "programs")
    words = (*SMALL, "planners=[]", f"programs={tmp_path / 'programs'}", f"out={tmp_path / 'out'}", word)
    done = run("train_program_dqn", *words)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and says in done.stderr
