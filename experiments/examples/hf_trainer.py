"""Training by the ``Trainer`` of Hugging Face under a memory limit: its data, schedule, logs and callbacks, our steps.

    python -m experiments.examples.hf_trainer --memory 0.6 --steps 20

``PlannedTrainer`` is a Trainer with ``memory=``. Its ``training_step`` does all of a step: forward, loss, backward and,
after the last micro-batch, clipping and the optimizer's update, in the memory that it is given. The Trainer's own
update then finds no gradients and does nothing, but its learning-rate schedule goes on. The losses are the Trainer's
own to the bit, for batches of any shape and with ``gradient_accumulation_steps``. (Each combination of shapes in a step
is planned when it is first seen: pad to few lengths.)

One GPU; the norm of the gradients is not logged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from executor import FittedSteps, fit


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
        planned: the steps; None before the first one.
    """

    def __init__(self, *args: Any, memory: int | float | str, options: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.memory, self.options = memory, options or {}
        self.planned: FittedSteps | None = None
        self._next: list[tuple[dict[str, Any], None]] = []  # micro-batches of a step that has not begun

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Tensor | int | None]:
        """All micro-batches of a step: at the end of an epoch there may be fewer, and each has a shape of its own."""
        samples, count = super().get_batch_samples(*args, **kwargs)
        self._next = [self._pair(inputs, count) for inputs in samples]
        return samples, count

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        model.train()
        if self._next:
            if self.planned is None:
                self.planned = self._fit(model, num_items_in_batch is not None)
            self.planned.begin(*self._next)
            self._next = []
        assert self.planned is not None
        return self.planned(*self._pair(inputs, num_items_in_batch))

    def _pair(self, inputs: dict[str, Any], count: Tensor | int | None) -> tuple[dict[str, Any], None]:
        return {**self._prepare_inputs(inputs), "num_items_in_batch": count}, None

    def _fit(self, model: nn.Module, counted: bool) -> FittedSteps:
        k = self.args.gradient_accumulation_steps
        # As the Trainer has it: a loss that was divided by the items of all micro-batches is not by their number.
        scaled = (self.model_accepts_loss_kwargs and counted) or self.compute_loss_func is not None
        if (told := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            scaled = told
        return fit(
            LossOfTrainer(self, model), lambda loss, _: loss, self.optimizer.optimizer,
            tuple(self._next) if k > 1 else self._next[0], self.memory, accumulate=k, average=not scaled,
            clip_norm=self.args.max_grad_norm or None, **self.options,
        )  # fmt: skip

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


def model_and_data(samples: int, lengths: Sequence[int] = (64,)) -> tuple[GPT2LMHeadModel, list[dict[str, Tensor]]]:
    """A small GPT-2, nothing downloaded, and random tokens: texts of these lengths (at most 64) in turns."""
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    texts = [torch.randint(256, (lengths[i % len(lengths)],)) for i in range(samples)]
    return GPT2LMHeadModel(config), [{"input_ids": text, "labels": text.clone()} for text in texts]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest text; what is padded counts for no loss."""
    return {key: pad_sequence([sample[key] for sample in samples], True, value)
            for key, value in (("input_ids", 0), ("labels", -100))}  # fmt: skip


def train(
    memory: int | float | str | None, steps: int, out: Path, batch_size: int = 8, accumulate: int = 1,
    lengths: Sequence[int] = (64,),
) -> Trainer:  # fmt: skip
    """Trains for so many steps; ``memory``: None for the Trainer itself."""
    set_seed(0)
    model, data = model_and_data(steps * batch_size * accumulate, lengths)
    arguments = TrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulate,
        logging_steps=1, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=steps // 4, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    chosen = {"model": model, "args": arguments, "train_dataset": data, "data_collator": padded}
    trainer = Trainer(**chosen) if memory is None else PlannedTrainer(**chosen, memory=memory)
    trainer.train()
    return trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="60%", help="24GiB, or a part of what a step needs (60%%)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64], help="of texts, at most 64")
    chosen = parser.parse_args(arguments)
    with TemporaryDirectory() as out:
        trainer = train(chosen.memory, chosen.steps, Path(out), 8, chosen.accumulate, chosen.lengths)
    print(trainer.planned.report())


if __name__ == "__main__":
    main()
