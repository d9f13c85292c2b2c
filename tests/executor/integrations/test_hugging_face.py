"""Tests that ``PlannedTrainer`` equals Hugging Face's Trainer bit by bit: losses, norms, weights, optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.amp import GradScaler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from executor import CaptureError, StepError
from executor.integrations import PlannedTrainer
from executor.training.memory_source import Blocks
from experiments.examples import hf_trainer
from experiments.examples.hf_trainer import model_and_data, padded
from simulator import Swap

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument", "error:Detected call of")


class Logs(TrainerCallback):
    """Collects the Trainer's logs without times."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.lines.append({k: v for k, v in logs.items() if not k.endswith(("runtime", "per_second"))})


def model() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class Pair:
    """A planned Trainer and an equivalent plain one, whose class has the same user-defined methods."""

    def __init__(
        self,
        out: Path,
        make: Callable[[], nn.Module] = model,
        lengths: tuple[int, ...] = (40,),
        samples: int = 12,
        mixin: type = object,
        collate: Callable[[Any], dict[str, Tensor]] = padded,
        **chosen: Any,
    ) -> None:
        self.trainers: list[Trainer] = []
        self.logs: list[Logs] = []
        set_seed(0)
        self.data = model_and_data(samples, lengths)[1]
        planned = {"memory": 0.6, "options": {"planner": "capuchin"}}
        for name, base, more in (("ours", PlannedTrainer, planned), ("own", Trainer, {})):
            set_seed(0)
            arguments = TrainingArguments(
                str(out / name),
                **{
                    "num_train_epochs": 2,
                    "per_device_train_batch_size": 4,
                    "learning_rate": 1e-2,
                    "logging_steps": 1,
                    "lr_scheduler_type": "cosine",
                    "save_strategy": "no",
                    "report_to": "none",
                    "disable_tqdm": True,
                    "max_grad_norm": 0.5,
                    "use_cpu": True,
                    **chosen,
                },
            )
            self.logs.append(Logs())
            self.trainers.append(
                type("Mine", (mixin, base) if mixin is not object else (base,), {})(
                    model=make(),
                    args=arguments,
                    train_dataset=self.data,
                    eval_dataset=self.data[:4],
                    data_collator=collate,
                    callbacks=[self.logs[-1]],
                    **more,
                )
            )
        self.ours, self.own = self.trainers

    def train(self, **options: Any) -> Pair:
        for trainer in self.trainers:
            set_seed(1)
            trainer.train(**options)
        self.same()
        return self

    def same(self) -> None:
        ours, own = self.logs
        assert ours.lines == own.lines and sum("loss" in line for line in own.lines) > 1
        assert all("grad_norm" in line for line in own.lines if "loss" in line)
        for a, b in zip(self.ours.model.state_dict().values(), self.own.model.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        states = [trainer.optimizer.state_dict()["state"] for trainer in self.trainers]
        assert states[0].keys() == states[1].keys() and states[1]
        for i, state in states[1].items():
            assert all(torch.equal(value, states[0][i][key]) for key, value in state.items())
        planned = self.ours.planned
        assert any(step.plan.decisions for step in planned.steps.values()) and planned.peak_bytes <= planned.limit
        assert self.ours.state.global_step == self.own.state.global_step > 1


def test_a_planned_trainer_is_the_trainer(tmp_path: Path) -> None:
    """Compares logs of losses, norms, rates and evaluations, then trains again from the current state."""
    pair = Pair(tmp_path, eval_strategy="steps", eval_steps=2).train()
    assert len({line["learning_rate"] for line in pair.logs[1].lines if "loss" in line}) > 3  # the schedule advances
    assert any("eval_loss" in line for line in pair.logs[1].lines)
    assert type(pair.ours.optimizer.optimizer) is type(pair.own.optimizer.optimizer) is torch.optim.AdamW
    assert not pair.ours.optimizer.optimizer._optimizer_step_pre_hooks
    pair.train()


@pytest.mark.nightly
def test_checkpoints_are_the_trainers_and_training_goes_on_from_them(tmp_path: Path) -> None:
    every = {"save_strategy": "steps", "save_steps": 2}
    uninterrupted = Pair(tmp_path / "whole", **every).train()
    files = {f.name: f for f in (tmp_path / "whole/ours/checkpoint-4").iterdir()}
    checkpoint = tmp_path / "whole/own/checkpoint-4"
    assert files.keys() == {f.name for f in checkpoint.iterdir()} and len(files) > 6
    for name in ("model.safetensors", "rng_state.pth", "scheduler.pt"):
        assert files[name].read_bytes() == (checkpoint / name).read_bytes()
    resumed = Pair(tmp_path / "again", **every)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert [line for line in uninterrupted.logs[0].lines if "loss" in line][4:] == resumed.logs[0].lines[:-1]


class Mean(nn.Module):
    """Model whose loss is a mean, regardless of the number of items in other micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(input_ids=input_ids, labels=labels).loss}


@pytest.mark.nightly
@pytest.mark.parametrize(("make", "counted"), [(model, True), (Mean, False)])
def test_accumulation(make: Callable[[], nn.Module], counted: bool, tmp_path: Path) -> None:
    """Trains three micro-batches of several shapes per step, and one at the end of each epoch.

    Losses are divided by the tokens of all micro-batches, or by the number of micro-batches.
    """
    chosen = {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_grad_norm": 0.0}
    pair = Pair(tmp_path, make, (40, 40, 40, 40, 48), 13, **chosen).train()
    assert pair.own.model_accepts_loss_kwargs is counted
    steps = pair.ours.planned.steps
    assert {len(key.forms) for key in steps} == {3, 1} and not pair.ours.planned.in_progress
    assert any(len(set(key.forms)) > 1 for key in steps)
    assert any(isinstance(decision, Swap) for step in steps.values() for decision in step.plan.decisions)


@pytest.mark.nightly
def test_autocast_and_batches_of_several_shapes(tmp_path: Path) -> None:
    """Trains on batches of two lengths, and on a short batch at the end of the epoch."""
    pair = Pair(tmp_path, lengths=(40, 40, 40, 40, 48), samples=13, num_train_epochs=1, bf16=True).train()
    assert len(pair.ours.planned.steps) > 2 and "bfloat16" in str(pair.ours.planned.captured.graph.graph)


@pytest.mark.nightly
def test_float16_with_its_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate supports float16 only on GPUs, so its check is patched."""
    pair = Pair(tmp_path)
    for trainer in pair.trainers:
        trainer.accelerator.scaler = GradScaler("cpu", init_scale=2.0**8)
        trainer.accelerator.native_amp = True
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    pair.train()
    assert "torch.float16" in str(pair.ours.planned.captured.graph.graph)
    planned, plain = (trainer.accelerator.scaler.state_dict() for trainer in pair.trainers)
    assert planned == plain and plain["_growth_tracker"] > 2


def classifier() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=256, max_position_embeddings=64))


def of_texts(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.stack([s["input_ids"] for s in samples]),
        "labels": torch.stack([s["labels"][0] % 2 for s in samples]),
    }


@pytest.mark.nightly
def test_a_classifier_infers_its_problem_type(tmp_path: Path) -> None:
    """The first step sets ``problem_type`` in the model's configuration."""
    pair = Pair(tmp_path, classifier, collate=of_texts).train()
    assert pair.ours.model.config.problem_type == pair.own.model.config.problem_type == "single_label_classification"


class Distilled:
    """Trainer whose compute_loss uses a teacher, weights and a number that are its attributes."""

    part = 0.5

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **_: Any) -> Tensor:
        with torch.no_grad():
            told = self.teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
        logits = model(input_ids=inputs["input_ids"]).logits
        return self.mine(nn.functional.cross_entropy(logits.flatten(0, 1), told.flatten(0, 1), weight=self.weights))

    def mine(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def give(self) -> None:
        set_seed(2)
        self.teacher = model().eval()
        self.weights = torch.rand(256)
        self.factor = 0.5


@pytest.mark.nightly
def test_a_custom_loss(tmp_path: Path) -> None:
    """Trainer attributes that compute_loss reads are part of the step, and a changed number is detected."""
    pair = Pair(tmp_path, mixin=Distilled)
    for trainer in pair.trainers:
        trainer.give()
    pair.train()
    assert any("teacher" in name for name in pair.ours.planned.captured.names)

    class Later(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            pair.ours.factor = 0.25

    pair.ours.add_callback(Later)
    with pytest.raises(StepError, match=r"factor was 0\.5 at the capture and is 0\.25 now"):
        pair.ours.train()


def test_unsupported_training_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, samples=8)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(CaptureError, match="with 2 processes, PlannedTrainer on one device"):
        pair.ours._next = [({}, None)]
        pair.ours.training_step(pair.ours.model, {})


@pytest.mark.nightly
def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    hf_trainer.main(["--steps", "2", "--memory", "70%"])
    page = capsys.readouterr().out
    assert "peak under the plan: " in page and "model.transformer.h.0" in page
    with pytest.raises(SystemExit) as end:
        hf_trainer.main(["--memory", "24", "--steps", "1"])
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: memory: ")


@pytest.mark.parametrize("owner", ["transformers", "user"])
def test_copies_continue_between_steps_if_no_code_reads_parameters(
    owner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps wait for copies at their ends only if a callback of the user runs between them."""
    waits: list[bool] = []
    settle = Blocks.settle

    def watched(blocks: Blocks, wait: bool = True) -> None:
        waits.append(wait)
        settle(blocks, wait)

    monkeypatch.setattr(Logs, "__module__", f"{owner}.callbacks")
    monkeypatch.setattr(Blocks, "settle", watched)
    pair = Pair(tmp_path).train()
    assert set(waits[-pair.own.state.global_step :]) == {owner == "user"}  # the check waits, too


class Freezing(TrainerCallback):
    """Freezes the first layers at the third step."""

    def __init__(self) -> None:
        self.planned: PlannedTrainer | None = None  # whose step it recaptures

    def on_step_begin(self, args: Any, state: Any, *_: Any, model: nn.Module, **__: Any) -> None:
        if state.global_step == 2:
            model.transformer.wte.requires_grad_(False)
            if self.planned is not None and self.planned.planned is not None:
                self.planned.planned.recapture()


@pytest.mark.nightly
@pytest.mark.parametrize("recaptures", [True, False])
def test_layers_that_a_callback_freezes(tmp_path: Path, recaptures: bool) -> None:
    pair = Pair(tmp_path)
    for trainer in pair.trainers:
        freezing = Freezing()
        freezing.planned = pair.ours if recaptures and trainer is pair.ours else None
        trainer.add_callback(freezing)
    if recaptures:
        pair.train()
    else:
        with pytest.raises(StepError, match=r"wte\.weight was frozen .* trainer\.planned\.recapture\(\)"):
            pair.ours.train()
