"""Tests ``train_dqn`` without a workload: training on several programs, tested on others."""

import json
import signal
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from agents.learned.checkpoint import read_training_state
from agents.learned.dqn import DQN
from agents.learned.dqn_config import Args
from agents.learned.edit_net import EditNet, trained
from experiments.common import cli
from experiments.common.resume import SETTINGS
from experiments.train_unseen import ABLATION, HEAD, RANDOM, with_link, without_output
from simulator.machine import Machine
from tests.experiments.conftest import Run, refused

SHORT = ["several.train=[vgg16-45]", "several.links=[1]", "several.test=[unet-50]", "several.calls=40", "tracker=none"]


@pytest.mark.nightly
def test_a_training_is_tested_on_an_unseen_program(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["several.seeds=1", "several.every=2", "agent.iterations=4", "agent.target_every=2"]
    done = run("train_dqn", *SHORT, *words, f"out={out}").ok()
    result = json.loads((out / "unseen.json").read_text())
    assert [point["iterations"] for point in result["points"]] == [0, 2, 4]
    assert result["points"][-1]["target_syncs"] == 3  # six updates in the fourth iteration
    for overheads in [*result["levels"].values(), *(point["overheads"] for point in result["points"])]:
        ((overhead,),) = overheads
        assert overhead >= result["floors"][0]
    assert set(result["levels"]) == {RANDOM, ABLATION, HEAD}
    assert (out / "unseen.png").read_bytes().startswith(b"\x89PNG")
    assert trained(out / "weights.pt").settings["width"] == 32
    assert "greedy policy, trained" in done.stdout


@pytest.mark.nightly
def test_a_resumed_training_equals_an_uninterrupted_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is terminated in its third iteration, between two points."""
    words = [*SHORT, "several.seeds=1", "several.every=2", "agent.iterations=5"]
    out = tmp_path / "out"
    iterate = DQN.iterate

    def terminate(trainer: DQN) -> dict[str, float]:
        if len(trainer.history) == 2:
            signal.raise_signal(signal.SIGTERM)
        return iterate(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(DQN, "iterate", terminate)
        done = run("train_dqn", *words, f"out={out}")
    assert (done.returncode, done.stderr) == (143, f"terminated; resume={out} continues this run\n")
    assert (out / SETTINGS).is_file() and not (out / "unseen.json").exists()
    assert len(read_training_state(out / "checkpoint.pt")["history"]) == 3
    refused(run("train_dqn", f"resume={out}", "limit=0.5"), "limit", "several programs")
    refused(run("train_dqn", f"resume={out}", "several.calls=41"), "several")
    run("train_dqn", f"resume={out}").ok()
    assert not (out / "checkpoint.pt").exists() and not (out / SETTINGS).exists()
    run("train_dqn", *words, f"out={tmp_path / 'whole'}").ok()
    resumed, whole = (json.loads((tmp_path / name / "unseen.json").read_text()) for name in ("out", "whole"))
    for point in (*resumed["points"], *whole["points"]):
        del point["cpu_s"]
    assert len(whole["points"]) == 4
    assert {key: resumed[key] for key in ("points", "levels", "floors")} == {
        key: whole[key] for key in ("points", "levels", "floors")
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["several.test=[vgg16-40]"], ["several.test", "'vgg16'"]),
        (["several.train=[vgg-45]"], ["several.train", "'vgg-45'", "squeezenet"]),
        (["several.links=[0]"], ["several.links"]),
        (["several.calls=0"], ["several.calls"]),
        (["several.test=[]"], ["several.test"]),
    ],
)
def test_invalid_tasks_are_refused(run: Run, words: list[str], named: list[str]) -> None:
    refused(run("train_dqn", *SHORT, *words), *named)


def test_the_default_copies_the_target_network_more_than_once() -> None:
    config = OmegaConf.load(cli.CONFIGS / "agent" / "dqn_scratch.yaml")
    assert isinstance(config, DictConfig)
    args: Args = cli.dataclass_from_config(Args, config, "agent")
    assert (args.iterations - args.learning_starts + 1) * args.updates // args.target_every > 1


def test_the_ablation_ranks_all_edits_equally() -> None:
    net = EditNet(static=3, bins=2, width=8)
    h = torch.randn(1, 5 * 7, 8)
    edits = torch.tensor([[[0, 4], [9, -1], [30, 2]]])
    q, _, _ = without_output(net).score(h, torch.randn(1, 8), edits)
    assert len(set(q[0].tolist())) == 1
    assert len(set(net.score(h, torch.randn(1, 8), edits)[0][0].tolist())) == 3


def test_a_link_factor_scales_every_bandwidth() -> None:
    machine = Machine.load("gtx1080ti")
    slower = with_link(machine, 0.5)
    assert slower.h2d_bytes_per_s == machine.h2d_bytes_per_s // 2
    assert slower.duplex_d2h_bytes_per_s == machine.duplex_d2h_bytes_per_s // 2
    assert slower.flops_per_s == machine.flops_per_s
