"""Tests captures of stock ``transformers`` models against eager PyTorch: exact peaks, bit-identical results.

The models are made from small configurations, without pretrained weights. Each runs with and without ``use_cache``,
with three kinds of attention mask, at two input sizes, and with each kind of gradient checkpointing: Llama in every
pair of these values, the others with each value. The reference for the peak is PyTorch's ``MemTracker`` on the second
eager step, because the first one creates the optimizer's state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from executor import capture_step
from executor.training.check import eager_peak, memory_tracker
from executor.training.planned_step import PlannedStep
from simulator import Plan

VOCABULARY = 300
ROWS = 2
STEPS = 2
Batch = dict[str, Tensor]


class Variant(NamedTuple):
    """How a model runs.

    Attributes:
        large: a sequence of 512 tokens instead of 48, or the larger input of a vision or audio model.
        cache: ``use_cache``; None for a model without it.
        mask: "none"; "ones"; "padding" (each row ends with zeros, how many differs between batches).
        checkpoint: "off", "reentrant", "non-reentrant" or "selective".
    """

    large: bool = False
    cache: bool | None = None
    mask: str = "none"
    checkpoint: str = "off"

    def __str__(self) -> str:
        cache = {None: "", True: "cache, ", False: "no cache, "}[self.cache]
        return f"{'large' if self.large else 'small'}, {cache}mask {self.mask}, checkpoint {self.checkpoint}"


def text(variant: Variant) -> Batch:
    """Returns token ids and labels, both (ROWS, length), and a mask if the variant has one."""
    length = 512 if variant.large else 48
    ids = torch.randint(3, VOCABULARY, (ROWS, length))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if variant.mask != "none":
        batch["attention_mask"] = torch.ones(ROWS, length, dtype=torch.long)
    if variant.mask == "padding":
        for mask, padding in zip(batch["attention_mask"], torch.randint(1, length // 2, (ROWS,)).tolist(), strict=True):
            mask[-padding:] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def audio(variant: Variant) -> Batch:
    """Returns log-mel features (ROWS, bins, frames) and labels (ROWS, length)."""
    frames, length = (800, 200) if variant.large else (100, 16)
    labels = torch.randint(3, VOCABULARY, (ROWS, length))
    return {"input_features": torch.randn(ROWS, 16, frames), "labels": labels}


def pictures(variant: Variant) -> Batch:
    """Returns images (ROWS, 3, size, size) and labels (ROWS,)."""
    size = 128 if variant.large else 32
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(2, (ROWS,))}


LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = LAYERS | SPECIAL | {"num_key_value_heads": 2, "max_position_embeddings": 1024}
# Name: class, batches, configuration.
MODELS: dict[str, tuple[str, Callable[[Variant], Batch], dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", text, GROUPED),
    "qwen2": ("Qwen2ForCausalLM", text, GROUPED),
    "qwen3": ("Qwen3ForCausalLM", text, GROUPED | {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", text, GROUPED | {"sliding_window": 256}),
    "gemma": ("GemmaForCausalLM", text, GROUPED | {"head_dim": 16}),
    "bert": ("BertForMaskedLM", text, LAYERS | SPECIAL | {"max_position_embeddings": 1024}),
    "t5": (
        "T5ForConditionalGeneration",
        text,
        SPECIAL
        | {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        audio,
        SPECIAL
        | {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 16,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
        },
    ),
    "vit": ("ViTForImageClassification", pictures, LAYERS | {"patch_size": 8}),
}
SIZES = {"whisper": {"max_source_positions": (50, 400)}, "vit": {"image_size": (32, 128)}}  # small, large
CACHELESS = {"bert", "vit"}


def variants(name: str) -> list[Variant]:
    """Returns variants of a model in which each value of a field occurs, and for Llama every pair of two fields."""
    caches = (None,) if name in CACHELESS else (True, False)
    masks = ("none", "ones", "padding") if MODELS[name][1] is text else ("none",)
    checkpoints = ("off", "reentrant", "non-reentrant", *["selective"] * (name == "llama"))
    if name != "llama":
        return [
            Variant(k % 2 == 1, caches[k % len(caches)], masks[k % len(masks)], c) for k, c in enumerate(checkpoints)
        ]
    return [
        Variant((i + j) % 2 == 1, caches[(i + j // 2) % 2], mask, checkpoint)
        for (i, mask), (j, checkpoint) in product(enumerate(masks), enumerate(checkpoints))
    ]


def keep_products(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves matrix products and recomputes all other operators."""
    saved = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Training:
    """A model with its optimizer and its step, which passes its arguments to the model under the names ``keys``."""

    def __init__(self, name: str, variant: Variant, keys: list[str]) -> None:
        architecture, _, options = MODELS[name]
        model_type = getattr(transformers, architecture)
        options = options | {key: sizes[variant.large] for key, sizes in SIZES.get(name, {}).items()}
        options |= {} if variant.cache is None else {"use_cache": variant.cache}
        torch.manual_seed(0)
        model = model_type(model_type.config_class(**options))
        if variant.checkpoint != "off":
            checkpoint_kwargs: dict[str, Any] = {"use_reentrant": variant.checkpoint == "reentrant"}
            if variant.checkpoint == "selective":
                checkpoint_kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_kwargs)
        model.train()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(*batch: Tensor) -> Tensor:
            loss = model(**dict(zip(keys, batch, strict=True))).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        self.model = model
        self.opt = opt
        self.step = step

    def run(self, step: Callable[..., Tensor], batches: list[tuple[Tensor, ...]], tracker: Any = None) -> Batch:
        """Runs a step on each batch, the last one under ``tracker``; returns losses, parameters and random state."""
        state = {}
        for i, batch in enumerate(batches):
            torch.manual_seed(i)
            tracks = tracker is not None and i == len(batches) - 1
            if tracks:
                tracker.track_external(self.model, self.opt, *batch)
            with tracker if tracks else nullcontext():
                loss = step(*batch)
            state[f"loss of step {i}"] = loss.detach().clone()
            del loss
            state[f"random state after step {i}"] = torch.get_rng_state()
            state |= {f"{key} after step {i}": p.detach().clone() for key, p in self.model.named_parameters()}
        return state


def differences(name: str, variant: Variant) -> list[str]:
    """Trains a model eagerly and as captured; returns a sentence for each difference."""
    torch.manual_seed(1)
    samples = [MODELS[name][1](variant) for _ in range(STEPS)]
    keys = list(samples[0])
    batches = [tuple(batch.values()) for batch in samples]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = Training(name, variant, keys)
        expected = eager.run(eager.step, batches, tracker := memory_tracker())
        peak_bytes = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        planned_training = Training(name, variant, keys)
        try:
            captured = capture_step(planned_training.step, *batches[0], check=False)
            program = captured.program
            planned = PlannedStep(captured, Plan.of(program, (), "", program.peak_bytes, ""))
            actual = planned_training.run(planned, batches)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
    problems = []
    captured_bytes = eager_peak(captured)
    if difference := captured_bytes - peak_bytes:
        problems.append(f"the captured peak is {captured_bytes:,} bytes, {difference:+,} from MemTracker's")
    as_bytes = [{k: x.reshape(-1).view(torch.uint8) for k, x in state.items()} for state in (expected, actual)]
    if unequal := [key for key, value in as_bytes[0].items() if not torch.equal(as_bytes[1][key], value)]:
        problems.append(f"{len(unequal)} tensors differ, first {unequal[0]}")
    return problems


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("llama", [Variant(cache=True, mask="ones", checkpoint="non-reentrant")]),
        *(pytest.param(name, variants(name), id=name, marks=pytest.mark.nightly) for name in MODELS),
    ],
)
def test_peak_and_bits_equal_eager(name: str, chosen: list[Variant]) -> None:
    problems = [f"{name}, {variant}: {problem}" for variant in chosen for problem in differences(name, variant)]
    assert not problems, "\n" + "\n".join(problems)
