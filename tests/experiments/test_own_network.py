"""Tests ``network=module:Class``, ``reward=`` and ``actions=`` of train_dqn and train_sb3."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from agents.learned.dqn_config import PaperConfig
from agents.learned.dqn_paper import Trainer, Variant
from agents.learned.structure2vec import CustomNetwork, CustomNetworkError
from envs import Task
from envs.memory_env import small_task
from simulator import Plan
from tests.experiments.conftest import ROOT, Run, refused, rows_in

PROGRAM, MACHINE = small_task()
LIMIT = int(0.7 * PROGRAM.peak_bytes)


def task() -> Task:
    return Task(PROGRAM, MACHINE, LIMIT, mode="joint")


def example(folder: Path) -> None:
    """Writes mine.py from the example in experiments/STANDARD_LIBRARIES.md."""
    page = (ROOT / "experiments" / "STANDARD_LIBRARIES.md").read_text()
    code = page.partition("    # mine_network.py\n")[2].partition("\n\n    .venv")[0]
    (folder / "mine_network.py").write_text("\n".join(line.removeprefix("    ") for line in code.splitlines()) + "\n")


def test_the_network_of_the_page(run: Run, tmp_path: Path) -> None:
    example(tmp_path / "work")
    words = ("network=mine_network:Mine", "planners=null", "actions=full", "reward=causal", "tracker=none")
    run("train_sb3", *words, "steps=400", "algo.n_steps=16", f"out={tmp_path / 'sb3'}").ok()
    calls = next(row for row in rows_in(tmp_path / "sb3") if row["planner"] == "sb3_maskable_ppo")["simulator_calls"]
    assert 5 < calls < 100  # one an episode
    PROGRAM.save(tmp_path / "small.json")
    words += (f"program={tmp_path / 'small.json'}", "limit=0.7", "agent=dqn_paper", "agent.episodes=12")
    run("train_dqn", *words, f"out={tmp_path / 'dqn'}").ok()
    assert json.loads((tmp_path / "dqn" / "curve.json").read_text())["reward"] == "causal"
    refused(run("train_dqn", *words, "network=mine_network:nn"), "network")


@pytest.mark.nightly
def test_a_named_task(run: Run, tmp_path: Path) -> None:
    words = ("task=GpuMemory/unet-50-v1", "steps=400", "algo.n_steps=50", "planners=null", "tracker=none")
    run("train_sb3", *words, f"out={tmp_path / 'out'}").ok()
    row = rows_in(tmp_path / "out")[0]
    assert (row["workload"], row["machine"], round(row["limit_fraction"], 3)) == ("unet", "rtx2080ti", 0.5)
    config = json.loads((tmp_path / "out" / "summary.json").read_text())["config"]
    assert config["limit"] == 0.5 and config["machine"]["d2h_bytes_per_s"] > 0


class Wrong(nn.Module):
    """Network whose forward returns ``made(N)``."""

    made: Any = staticmethod(lambda n: None)

    def __init__(self, graph: Any, features: int, forms: int):
        super().__init__()
        self.n = len(graph)
        self.layer = nn.Linear(features, 1)

    def forward(self, nodes: torch.Tensor, current: torch.Tensor) -> Any:
        return self.made(self.n)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda n: torch.zeros(2, n), "two tensors"),
        (lambda n: (torch.zeros(2, n - 1), torch.zeros(2, 1)), r"\(2, 39\) .*\(2, 38\)"),
        (lambda n: (torch.zeros(2, n), torch.zeros(1, 1)), r"\(2, any\)"),
        (lambda n: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_invalid_networks_raise_clear_errors(made: Any, words: str) -> None:
    kind = type("Mine", (Wrong,), {"made": staticmethod(made)})
    with pytest.raises(CustomNetworkError, match=words):
        CustomNetwork(kind, task().graph, 11, 1)


def test_the_dqn_takes_actions_in_all_their_forms(tmp_path: Path) -> None:
    """Each form is an action with its own Q-value; a checkpoint is only valid for its variant."""
    config = PaperConfig(episodes=40, num_envs=2, features=8, embedding_size=16, n_step=1000, optimizer="adam")
    trainer = Trainer(PROGRAM, MACHINE, LIMIT, config, 0, variant=Variant("causal", "full"))
    n = len(trainer.task.graph)
    assert set(np.unique(trainer.actions // n)) == {0, 1, 2}
    while len(trainer.history) < config.episodes:
        trainer.step()
    actions = trainer.buffer.ring["action"][: trainer.buffer.size]
    assert set(np.unique(trainer.actions[actions] // n)) == {0, 1, 2}
    assert isinstance(trainer.best, Plan) and trainer.best_overhead < 0.05
    assert trainer.task.engine.calls < trainer.buffer.size  # with the causal reward one per episode
    state = trainer.rng.bit_generator.state, trainer.task.engine.calls
    assert trainer.greedy_overhead() >= 0
    assert state == (trainer.rng.bit_generator.state, trainer.task.engine.calls)
    trainer.save(tmp_path / "checkpoint.pt")
    Trainer(PROGRAM, MACHINE, LIMIT, config, 0, variant=Variant("causal", "full")).load(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="variant"):
        Trainer(PROGRAM, MACHINE, LIMIT, config, 0).load(tmp_path / "checkpoint.pt")
