"""Language models of Hugging Face's transformers, made from their configuration alone: nothing is downloaded.

The step is that of its own loop: ``model(input_ids=…, attention_mask=…, labels=…)``, whose result holds the loss, the
logits and, as configured by default, every layer's keys and values. The extra ``hf`` installs the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.workloads.module import Parts, WorkloadError

# Class of the configuration, of the model, and what differs from the class's defaults, as each model's config.json says.
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "distilgpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 6}),
    "cerebras-gpt-111m": ("GPT2Config", "GPT2LMHeadModel", {
        "n_layer": 10, "n_positions": 2048, "n_inner": 3072, "activation_function": "gelu", **_NO_DROPOUT}),
    "gpt-neo-125m": ("GPTNeoConfig", "GPTNeoForCausalLM", {
        "hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]}),
    "opt-125m": ("OPTConfig", "OPTForCausalLM", {}),
    "opt-350m": ("OPTConfig", "OPTForCausalLM", {
        "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False}),
    "t5-small": ("T5Config", "T5ForConditionalGeneration", _T5),
    "t5-base": ("T5Config", "T5ForConditionalGeneration", {
        "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, **_T5}),
}  # fmt: skip


class Keywords(nn.Module):
    """Calls a model with a dictionary of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


def own_loss(result: Any, _: Any) -> Tensor:
    """The loss that the model has computed."""
    loss: Tensor = result.loss
    return loss


def build(*, model: str, batch_size: int = 8, length: int = 128) -> Parts:
    """``batch_size`` sequences of ``length`` tokens for one of MODELS, with AdamW.

    Raises:
        WorkloadError: no such model, or transformers is not installed.
    """
    if not isinstance(model, str) or model not in MODELS:
        raise WorkloadError(f"workload.model: huggingface has {', '.join(MODELS)}, not {model!r}")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise WorkloadError("workload.family: huggingface needs transformers (pip install headroom[hf])") from error
    config, network, options = MODELS[model]
    made = Keywords(getattr(transformers, network)(getattr(transformers, config)(**options)))
    names = ("input_ids", "attention_mask", "labels")
    batch = {name: torch.ones(batch_size, length, dtype=torch.int64) for name in names}
    return made.train(), own_loss, torch.optim.AdamW(made.parameters(), lr=1e-4), (batch, batch["labels"])
