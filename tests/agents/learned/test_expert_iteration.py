"""Tests expert iteration: the teachers' plans, training items, and bit-identical training after an interruption."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agents.learned import expert_iteration as learning
from agents.learned.policy_net import batch_of, rows_of_kinds
from simulator import Machine
from simulator.compiled.engine import Engine
from simulator.modes import MODES, Choice
from simulator.moves.gap_graph import GapState
from tests.experiments.conftest import chain

MACHINE = Machine("link of 10 GB/s", 2**40, 10**10, 10**10)
SETTINGS = learning.Training(width=16, layers=1, epochs=4, batch_size=2, warm_up=2)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    few_calls = replace(learning.OPTIONS, min_calls=60, max_calls=60, validation_calls=60)
    monkeypatch.setattr(learning, "OPTIONS", few_calls)


def lesson(layers: int, fraction: float = 0.6, mode: str = "joint") -> learning.Lesson:
    program = chain(layers)
    limit = int(fraction * program.peak_bytes)
    return learning.Lesson(program, MACHINE, limit, mode, learning.first_plans(program, MACHINE, limit, mode))


@pytest.mark.parametrize("mode", MODES)
def test_teachers_plans(mode: str) -> None:
    task = lesson(8, mode=mode)
    engine = Engine(task.program, MACHINE, task.limit)
    assert [ns for ns, _ in task.plans] == sorted(engine.score(rows).iteration_ns for _, rows in task.plans)
    assert all(engine.score(rows).feasible for _, rows in task.plans)
    net = learning.network([learning.Example(task)], SETTINGS, 0).eval()
    better = learning.better_plans(net, task, 0)
    assert len(better) <= learning.OPTIONS.max_plans and better[0][0] <= task.plans[0][0]
    assert all(engine.score(rows).iteration_ns == ns for ns, rows in better)


def test_a_limit_within_reach() -> None:
    program = chain(8)
    min_limit = learning.reachable(program, MACHINE, 1, "swap")
    assert Engine(program, MACHINE, min_limit).score(learning.everything(program, "swap", learning.MIB)).feasible
    assert learning.reachable(program, MACHINE, min_limit + 1, "swap") == min_limit + 1
    assert not learning.first_plans(program, MACHINE, 1, "swap")


def test_examples_have_targets_and_counts_per_gap() -> None:
    task = lesson(8)
    example = learning.Example(task)
    for kinds, (ns, rows) in zip(example.kinds, task.plans, strict=True):
        plain = rows_of_kinds(example.graph, kinds)  # without the shifts
        assert {tuple(row) for row in plain[:, :2]} == {tuple(row) for row in rows[:, :2]}
        assert ns == task.plans[0][0] or example.shares[0] > example.shares[-1]
    rng = np.random.default_rng(0)
    undecided = example.item(rng, 1.0)["gap"]
    partial = example.item(rng, 1e-9)["gap"]
    assert torch.allclose(undecided.target.sum(1), torch.ones(len(example.graph))) and (undecided.count > 0).all()
    state = GapState(*partial.x[:, -len(GapState._fields) :].T)
    decided = torch.stack([state.resident, state.swapped, state.recomputed]).any(0)
    assert decided.any() and (partial.count[decided] == 0).all()
    assert (partial.target.max(1).values == 1).all()


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    lessons = [lesson(n) for n in (5, 6, 7, 8)]
    examples = [learning.Example(item) for item in lessons]

    def train(state: Path, watch: Any) -> dict[str, torch.Tensor]:
        net = learning.network(examples, SETTINGS, 0)
        return learning.train(net, examples, lessons[:1], SETTINGS, 0, state, watch).state_dict()

    class Stopped(Exception):
        pass

    def stop(entry: dict[str, Any]) -> None:
        if entry["epoch"] == 2:
            raise Stopped

    seen: list[dict[str, Any]] = []
    uninterrupted = train(tmp_path / "whole.pt", seen.append)
    with pytest.raises(Stopped):
        train(tmp_path / "cut.pt", stop)
    resumed = train(tmp_path / "cut.pt", lambda entry: None)
    assert all(torch.equal(resumed[key], value) for key, value in uninterrupted.items())
    assert seen[-1]["loss"] < seen[0]["loss"]
    net, other_net = (learning.network(examples, SETTINGS, seed).state_dict() for seed in (0, 1))
    assert any(not torch.equal(net[key], value) for key, value in other_net.items())


def test_the_loss_weights_tasks_equally_and_gaps_by_their_count() -> None:
    """Uses a network with uniform probabilities over the eviction kinds of each gap: 1/2, 1/3 or 1/4."""
    example = learning.Example(lesson(6))
    net = learning.network([example], SETTINGS, 0)
    for weight in net.out.parameters():
        torch.nn.init.zeros_(weight)
    item = example.item(np.random.default_rng(0), 1.0)
    counts = item["gap"].count.numpy()
    want = float(counts @ np.log(example.graph.allowed.sum(1)) / counts.sum())
    for batch in ([item], [item, item]):
        assert learning.loss(net, batch_of(batch)).item() == pytest.approx(want, rel=1e-5)
    assert Choice.SWAPPED in example.kinds or Choice.RECOMPUTED in example.kinds
