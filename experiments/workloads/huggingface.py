"""Language models of Hugging Face's transformers, built from their configuration without downloads.

The step reproduces transformers 4.49 to 4.53, the versions of the published measurements, under any version from 5 on:
the result holds the logits and (by default) every layer's keys and values, uncopied, and attention is computed as in
those versions. The extra ``hf`` installs the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._shared import one_of
from experiments.workloads.module import Parts, WorkloadError


class Network(nn.Module):
    """Wrapper that calls a model with a dictionary of tensors; the result has logits, keys and values."""

    def __init__(self, model: nn.Module, pairs: bool) -> None:
        super().__init__()
        self.model = model
        self.pairs = pairs

    def forward(self, batch: dict[str, Tensor]) -> Any:
        from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

        class Kept(DynamicLayer):
            """Cache layer that keeps keys and values uncopied; the package copies them since version 4.54."""

            def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
                self.keys = key_states
                self.values = value_states
                self.is_initialized = True
                return key_states, value_states

        first, *second = (Cache(layer_class_to_replicate=Kept) for _ in range(1 + self.pairs))
        return self.model(**batch, past_key_values=EncoderDecoderCache(first, *second) if second else first)


def next_token(result: Any, tokens: Tensor) -> Tensor:
    """Returns next-token cross-entropy of ``[batch, length, vocabulary]``; labels, not logits, are shifted."""
    ignored = -100  # label without a loss
    labels = F.pad(tokens, (0, 1), value=ignored)[..., 1:].contiguous()
    return F.cross_entropy(result.logits.float().flatten(0, 1), labels.flatten(), ignore_index=ignored)


def same_token(result: Any, tokens: Tensor) -> Tensor:
    """Returns the cross-entropy of the tokens, for logits ``[batch, length, vocabulary]``."""
    return F.cross_entropy(result.logits.flatten(0, 1), tokens.flatten())


def huggingface(*, model: str, batch_size: int = 8, length: int = 128) -> Parts:
    """Returns a model of huggingface.yaml with AdamW, and ``batch_size`` sequences of ``length`` tokens.

    Raises:
        WorkloadError: The model is unknown, or transformers is not installed.
    """
    models = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    entry = one_of(models, model, "model", "huggingface")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise WorkloadError("workload.family: huggingface needs transformers (pip install headroom[hf])") from error
    kind = "sdpa_of_contiguous"
    transformers.AttentionInterface.register(kind, contiguous_attention)
    transformers.AttentionMaskInterface.register(kind, transformers.AttentionMaskInterface()["sdpa"])
    # T5 and GPT-Neo had only "eager" attention until version 5.
    if model.startswith(("t5", "gpt-neo")):
        kind = "eager"
    config = getattr(transformers, entry["config"])(**entry.get("options", {}), attn_implementation=kind)
    inner = getattr(transformers, entry["network"])(config)
    pairs = hasattr(inner, "encoder")
    wrapped = Network(inner, pairs).train()
    names = ("input_ids", "attention_mask", *(("decoder_input_ids",) if pairs else ()))
    batch = {name: torch.ones(batch_size, length, dtype=torch.int64, device="cpu") for name in names}  # masks are read
    tokens = torch.ones(batch_size, length, dtype=torch.int64)
    loss = same_token if pairs else next_token
    return wrapped, loss, torch.optim.AdamW(wrapped.parameters(), lr=1e-4), (batch, tokens)


def contiguous_attention(module: nn.Module, *args: Any, **options: Any) -> Any:
    """Computes SDPA with non-contiguous queries, keys and values copied, as transformers 4.53 did."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, *(x.contiguous() for x in args[:3]), *args[3:], **options)
