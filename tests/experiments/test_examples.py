"""The Trainer of Hugging Face under a plan: its own losses, schedule and weights to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments, set_seed

from experiments.examples import hf_trainer
from experiments.examples.hf_trainer import PlannedTrainer, train

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument")


def logged(trainer: Trainer) -> list[tuple[float, float]]:
    return [(line["loss"], line["learning_rate"]) for line in trainer.state.log_history if "loss" in line]


def test_a_planned_trainer_is_the_trainer(tmp_path: Path) -> None:
    ours, own = train(0.6, 5, tmp_path), train(None, 5, tmp_path)
    assert isinstance(ours, PlannedTrainer) and ours.planned is not None
    assert ours.planned.plan.decisions and ours.planned.peak_bytes <= ours.planned.limit
    assert logged(ours) == logged(own) and len(logged(own)) == 5
    assert len({rate for _, rate in logged(own)}) > 3  # the schedule goes on, from 0
    for a, b in zip(ours.model.state_dict().values(), own.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    data = hf_trainer.model_and_data(8)[1]
    assert ours.evaluate(data)["eval_loss"] == own.evaluate(data)["eval_loss"]
    again = []
    for trainer in (ours, own):  # with the state that is there
        set_seed(1)
        again.append(trainer.train().training_loss)
    assert again[0] == again[1]


def test_the_example_ends_with_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    hf_trainer.main(["--steps", "2", "--memory", "70%"])
    page = capsys.readouterr().out
    assert "peak under the plan: " in page and "plan of lp_round" in page and "model.transformer.h.0" in page


def test_accumulation_is_refused(tmp_path: Path) -> None:
    model, data = hf_trainer.model_and_data(4)
    arguments = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, report_to="none")
    with pytest.raises(ValueError, match="gradient_accumulation_steps: a planned step is a whole one"):
        PlannedTrainer(model=model, args=arguments, train_dataset=data, memory=0.6)
