"""Trains with Hugging Face's ``Trainer`` under a memory limit.

    python -m experiments.examples.hf_trainer --memory 60% --steps 20

The script differs from one for ``transformers.Trainer`` in two lines: the import and the class with ``memory=``
(executor/integrations/README.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from executor.fit import FitError
from executor.integrations import PlannedTrainer  # instead of: from transformers import Trainer
from simulator import FormatError


def model_and_data(samples: int, lengths: Sequence[int] = (64,)) -> tuple[GPT2LMHeadModel, list[dict[str, Tensor]]]:
    """Returns a small untrained GPT-2 and random token sequences, cycling through ``lengths`` (at most 64 each)."""
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    texts = [torch.randint(256, (lengths[i % len(lengths)],)) for i in range(samples)]
    return GPT2LMHeadModel(config), [{"input_ids": text, "labels": text.clone()} for text in texts]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pads a batch to its longest sequence; padding does not contribute to the loss."""
    return {
        key: pad_sequence([sample[key] for sample in samples], True, value)
        for key, value in (("input_ids", 0), ("labels", -100))
    }


def train(memory: int | float | str, steps: int, out: Path, accumulate: int, lengths: Sequence[int]) -> PlannedTrainer:
    """Trains for ``steps`` steps of ``accumulate`` micro-batches under a memory limit and returns the trainer."""
    set_seed(0)
    model, data = model_and_data(steps * 8 * accumulate, lengths)
    arguments = TrainingArguments(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PlannedTrainer(
        model, arguments, train_dataset=data, data_collator=padded, memory=memory
    )  # instead of: Trainer(…)
    trainer.train()
    return trainer


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, trains, and prints the report of the plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", default="60%", help="memory limit: 24GiB, or part of a step's need (60%%)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64], help="sequence lengths in tokens, at most 64")
    options = parser.parse_args(arguments)
    try:
        with TemporaryDirectory() as out:
            trainer = train(options.memory, options.steps, Path(out), options.accumulate, options.lengths)
    except (FormatError, FitError) as error:
        parser.exit(2, f"error: {error}\n")
    print(trainer.planned.report())


if __name__ == "__main__":
    main()
