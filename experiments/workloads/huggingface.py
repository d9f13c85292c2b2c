"""Language models of Hugging Face's transformers, built from their configuration without downloads.

The step reproduces transformers 4.49 to 4.53, the versions of the published measurements, under any version from 5 on:
the result holds the logits and (by default) every layer's keys and values, uncopied, and attention is computed as in
those versions. The extra ``hf`` installs the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._shared import one_of
from experiments.workloads.module import Parts, WorkloadError

IGNORED = -100  # label without a loss
CONTIGUOUS = "sdpa_of_contiguous"
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"decoder_start_token_id": 0}
# Configuration class, model class, and settings of each model's config.json that differ from the defaults.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "distilgpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 6}),
    "cerebras-gpt-111m": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_layer": 10, "n_positions": 2048, "n_inner": 3072, "activation_function": "gelu", **_NO_DROPOUT},
    ),
    "gpt-neo-125m": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "opt-125m": ("OPTConfig", "OPTForCausalLM", {}),
    "opt-350m": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", _T5),
    "t5-base": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, **_T5},
    ),
}


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
    labels = F.pad(tokens, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(result.logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def same_token(result: Any, tokens: Tensor) -> Tensor:
    """Returns the cross-entropy of the tokens, for logits ``[batch, length, vocabulary]``."""
    return F.cross_entropy(result.logits.flatten(0, 1), tokens.flatten())


def huggingface(*, model: str, batch_size: int = 8, length: int = 128) -> Parts:
    """Returns one of MODELS with AdamW, and ``batch_size`` sequences of ``length`` tokens.

    Raises:
        WorkloadError: The model is unknown, or transformers is not installed.
    """
    config, network, options = one_of(MODELS, model, "model", "huggingface")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise WorkloadError("workload.family: huggingface needs transformers (pip install headroom[hf])") from error
    transformers.AttentionInterface.register(CONTIGUOUS, contiguous_attention)
    transformers.AttentionMaskInterface.register(CONTIGUOUS, transformers.AttentionMaskInterface()["sdpa"])
    # T5 and GPT-Neo had only "eager" attention until version 5.
    kind = "eager" if model.startswith(("t5", "gpt-neo")) else CONTIGUOUS
    inner = getattr(transformers, network)(getattr(transformers, config)(**options, attn_implementation=kind))
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
