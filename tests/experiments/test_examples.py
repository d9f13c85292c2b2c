"""The Trainer of Hugging Face under a plan: its own losses, schedule and weights to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from experiments.examples import hf_trainer
from experiments.examples.hf_trainer import PlannedTrainer, model_and_data, padded, train
from simulator import Swap

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument")


def logged(trainer: Trainer) -> list[tuple[float, float]]:
    return [(line["loss"], line["learning_rate"]) for line in trainer.state.log_history if "loss" in line]


def test_a_planned_trainer_is_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_trainer, "model_and_data", lambda *args: (model(), model_and_data(*args)[1]))
    ours, own = train(0.6, 5, tmp_path), train(None, 5, tmp_path)
    assert isinstance(ours, PlannedTrainer) and ours.planned is not None
    assert ours.planned.plan.decisions and ours.planned.peak_bytes <= ours.planned.limit
    same_training(ours, own)
    assert len(logged(own)) == 5 and len({rate for _, rate in logged(own)}) > 3  # the schedule goes on, from 0
    data = model_and_data(8)[1]
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


def same_training(ours: Trainer, own: Trainer) -> None:
    assert logged(ours) == logged(own) and len(logged(own)) > 2
    for a, b in zip(ours.model.state_dict().values(), own.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def both(make: Callable[[], nn.Module], data: list[dict[str, Tensor]], out: Path, accumulate: int) -> list[Trainer]:
    """Two epochs of the planned Trainer and of the Trainer."""
    trained: list[Trainer] = []
    for kind, more in ((PlannedTrainer, {"memory": 0.6, "options": {"planner": "capuchin"}}), (Trainer, {})):
        set_seed(0)
        arguments = TrainingArguments(
            str(out), num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=accumulate,
            learning_rate=1e-2, lr_scheduler_type="cosine", logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, max_grad_norm=0.5,
        )  # fmt: skip
        trained.append(kind(model=make(), args=arguments, train_dataset=data, data_collator=padded, **more))
        trained[-1].train()
    ours, own = trained
    same_training(ours, own)
    assert len({rate for _, rate in logged(own)}) > 2
    plans = [step.plan.decisions for step in ours.planned.steps.values()]
    assert sum(map(bool, plans)) > 1 and any(isinstance(decision, Swap) for plan in plans for decision in plan)
    assert ours.planned.peak_bytes <= ours.planned.limit
    return trained


def model() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def test_batches_of_several_shapes(tmp_path: Path) -> None:
    """Of two lengths, and a short one at the end of each epoch."""
    data = model_and_data(13, (40, 40, 40, 40, 48))[1]
    ours, _ = both(model, data, tmp_path, 1)
    assert len(ours.planned.steps) > 2


class Mean(nn.Module):
    """A model whose loss is a mean, whatever the number of items in other micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(input_ids=input_ids, labels=labels).loss}


@pytest.mark.parametrize(("make", "counted"), [(model, True), (Mean, False)])
def test_accumulation(make: Callable[[], nn.Module], counted: bool, tmp_path: Path) -> None:
    """Three micro-batches a step, of several shapes, then one at the end of each epoch; losses are divided by how many
    tokens all of them have, or by how many they are."""
    data = model_and_data(13, (40, 40, 40, 40, 48))[1]
    ours, own = both(make, data, tmp_path, 3)
    assert own.model_accepts_loss_kwargs is counted
    assert {len(forms) for forms in ours.planned.steps} == {3, 1} and not ours.planned.under_way
    assert any(len(set(forms)) > 1 for forms in ours.planned.steps)
