"""Tests ``experiments.pretrain``: a full run, a repeated run, and invalid settings."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from agents.learned.expert_iteration import Training
from agents.learned.policy_net import trained
from experiments import workloads
from experiments.common.cli import CONFIGS, dataclass_from_config
from experiments.pretrain import append, read_set
from tests.experiments.conftest import Run

MLP = "{family: mlp, batch_size: 8192, layers: [3, 4]}"
ALEXNET = "{family: alexnet, batch_size: 100}"
SMALL = (
    f"sets=[{{programs: 3, networks: [{MLP}, {ALEXNET}]}}, {{programs: 1, networks: [{ALEXNET}]}}]",
    "held_out=[alexnet]",
    "tasks=1",
    "jobs=1",
    "rounds=1",
    "training.epochs=1",
    "training.width=16",
    "training.layers=1",
)


def test_every_value_of_every_network_is_one() -> None:
    config = yaml.safe_load((CONFIGS / "pretrain.yaml").read_text())
    networks = [network for i, entry in enumerate(config["sets"]) for network in read_set(i, entry)[1]]
    for lists in networks:
        for j in range(max(len(values) for key, values in lists.items() if key != "draw")):
            workloads.build({"name": "x", **{key: values[j % len(values)] for key, values in lists.items()}})
    tested = {"squeezenet", "unet", "mobilenet", "gpt2"}
    assert not tested & {family for lists in networks for family in lists["family"]}
    assert dataclass_from_config(Training, OmegaConf.create(config["training"]), "training") == Training()


def test_a_small_training(run: Run, tmp_path: Path) -> None:
    done = run("pretrain", *SMALL, f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "structure2vec-0"
    assert done.stdout.split()[-1] == str(folder / "policy.pt")
    assert trained(folder / "policy.pt").settings["width"] == 16
    first, second = ((tmp_path / f"lessons-{i}.jsonl").read_text().splitlines() for i in (0, 1))
    best = [
        [min((ns for ns, _ in json.loads(line)["plans"]), default=0) for line in lines] for lines in (first, second)
    ]
    assert len(first) == 4 and all(a >= b for a, b in zip(*best, strict=True))
    captured = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*z")} | {
        tmp_path / "lessons-0.jsonl": (tmp_path / "lessons-0.jsonl").read_text()
    }
    (folder / "state-1.pt").unlink()
    weights = (folder / "policy.pt").read_bytes()
    repeated = run("pretrain", *SMALL, f"out={tmp_path}")
    assert repeated.returncode == 0, repeated.stderr
    assert (folder / "policy.pt").read_bytes() == weights
    assert captured == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*z")} | {
        tmp_path / "lessons-0.jsonl": (tmp_path / "lessons-0.jsonl").read_text()
    }


@pytest.mark.nightly
def test_on_ray_the_lessons_and_weights_are_the_same(start: Run, tmp_path: Path) -> None:
    outputs = []
    for name, words in (("here", ()), ("ray", ("launcher=ray", "jobs=2"))):
        done = start("pretrain", *SMALL, *words, f"out={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        files = ("lessons-0.jsonl", "lessons-1.jsonl", "structure2vec-0/policy.pt")
        outputs.append([(tmp_path / name / file).read_bytes() for file in files])
    assert outputs[0] == outputs[1]


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a":1}\n{"a":2}\n{"a"')
    append(path, lambda job: {"a": job}, [1, 2, 3], ("processes", 1), "counting")
    assert path.read_text() == '{"a":1}\n{"a":2}\n{"a":3}\n'
