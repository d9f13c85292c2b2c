"""Training by the ``Trainer`` of Hugging Face under a memory limit: its data, schedule, logs and callbacks, our steps.

    python -m experiments.examples.hf_trainer --memory 0.6 --steps 20

``PlannedTrainer`` is a Trainer with ``memory=``. Its ``training_step`` does all of a step: forward, loss, backward,
clipping and the optimizer's update, in the memory that it is given. The Trainer's own update then finds no gradients
and does nothing, but its learning-rate schedule goes on. The losses are the Trainer's own to the bit.

One GPU, one shape of batch (``dataloader_drop_last=True``), no accumulation of gradients; their norm is not logged.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from executor import FittedStep, fit


class LossOfTrainer(nn.Module):
    """The Trainer's loss of a batch, as a module. (What begins with an underscore is no part of the step's state.)"""

    def __init__(self, trainer: Trainer, model: nn.Module) -> None:
        super().__init__()
        self._trainer = (trainer,)
        self.model = model

    def forward(self, batch: dict[str, Any]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
        return self._trainer[0].compute_loss(self.model, inputs, num_items_in_batch=batch["num_items_in_batch"])


class PlannedTrainer(Trainer):
    """A Trainer whose steps fit into ``memory``; ``options`` as in ``fit``.

    Attributes:
        planned: the step; None before the first one.
    """

    def __init__(self, *args: Any, memory: int | float | str, options: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.gradient_accumulation_steps > 1:
            raise ValueError("gradient_accumulation_steps: a planned step is a whole one; make the batch larger")
        self.memory, self.options = memory, options or {}
        self.planned: FittedStep | None = None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        batch = {**self._prepare_inputs(inputs), "num_items_in_batch": num_items_in_batch}
        if self.planned is None:
            self.planned = fit(
                LossOfTrainer(self, model), lambda loss, _: loss, self.optimizer.optimizer, (batch, None), self.memory,
                clip_norm=self.args.max_grad_norm or None, **self.options,
            )  # fmt: skip
        return self.planned(batch, None)

    def _get_grad_norm(self, *_: Any, **__: Any) -> None:
        """The gradients are gone when the Trainer asks."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """With all parameters on the device."""
        if self.planned is not None:
            self.planned.finish()
        return super().evaluation_loop(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.planned = None  # of another call: the optimizer is new
        result = super().train(*args, **kwargs)
        if self.planned is not None:
            self.planned.finish()
        return result


def model_and_data(samples: int, length: int = 64) -> tuple[GPT2LMHeadModel, list[dict[str, Tensor]]]:
    """A small GPT-2, nothing downloaded, and random tokens."""
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=64, n_layer=4, n_head=4, bos_token_id=0,
                        eos_token_id=0)  # fmt: skip
    texts = torch.randint(256, (samples, length))
    return GPT2LMHeadModel(config), [{"input_ids": text, "labels": text.clone()} for text in texts]


def train(memory: int | float | str | None, steps: int, out: Path, batch_size: int = 8) -> Trainer:
    """Trains for so many steps; ``memory``: None for the Trainer itself."""
    set_seed(0)
    model, data = model_and_data(steps * batch_size)
    arguments = TrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=batch_size, dataloader_drop_last=True, logging_steps=1,
        learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=steps // 4, save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    chosen = {"model": model, "args": arguments, "train_dataset": data}
    trainer = Trainer(**chosen) if memory is None else PlannedTrainer(**chosen, memory=memory)
    trainer.train()
    return trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="60%", help="24GiB, or a part of what a step needs (60%%)")
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory() as out:
        trainer = train(chosen.memory, chosen.steps, Path(out))
    print(trainer.planned.report())


if __name__ == "__main__":
    main()
