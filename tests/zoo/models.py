"""Small models of other libraries with random weights.

An entry returns a model, its loss, its optimizer, and a function that creates batches ``(x, y)``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

Parts = tuple[nn.Module, Callable[[Any, Any], Tensor], Optimizer, Callable[[], tuple[Any, Any]]]
MODELS: dict[str, Callable[[], Parts]] = {}


def entry(name: str) -> Callable[[Callable[[], Parts]], Callable[[], Parts]]:
    def add(make: Callable[[], Parts]) -> Callable[[], Parts]:
        MODELS[name] = make
        return make

    return add


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# ------------------------------------------------------------------------------------------------ Hugging Face


class Keywords(nn.Module):
    """Calls a model with a batch that is a dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch)


def own_loss(out: Any, _: Any) -> Tensor:
    return out["loss"] if isinstance(out, dict) else out[0]


def hugging_face(architecture: str, batch: Callable[[], dict[str, Tensor]], **config: Any) -> Callable[[], Parts]:
    """Creates a model of ``transformers`` from its class and configuration; it returns its loss."""

    def make() -> Parts:
        transformers = importlib.import_module("transformers")
        kind = getattr(transformers, architecture)
        made = config.pop("made", None) or kind.config_class(**config)
        model = Keywords(kind(made).train())
        return model, own_loss, adamw(model), lambda: (batch(), None)

    return make


def tokens(length: int = 32, batch: int = 4, vocabulary: int = 256, labels: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()} if labels else {"input_ids": ids}


def classified() -> dict[str, Tensor]:
    return {**tokens(labels=False), "attention_mask": torch.ones(4, 32).long(), "labels": torch.randint(2, (4,))}


def pictures(size: int = 32, batch: int = 4, labels: int = 2) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(labels, (batch,))}


def pixels(size: int = 64) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(2, (2, size, size))}


def boxes() -> dict[str, Any]:
    box = {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4) / 2 + 0.25}
    return {"pixel_values": torch.randn(1, 3, 64, 64), "labels": [box]}


TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}

HUGGING_FACE: dict[str, tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "GPT-2": (
        "GPT2LMHeadModel",
        tokens,
        {
            "vocab_size": 256,
            "n_positions": 64,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "BERT": ("BertForSequenceClassification", classified, TEXT),
    "Llama": ("LlamaForCausalLM", tokens, GROUPED),
    "Gemma 2": ("Gemma2ForCausalLM", tokens, GROUPED | {"head_dim": 16}),
    "Mixtral": ("MixtralForCausalLM", tokens, GROUPED | {"num_local_experts": 4}),
    "Mixtral, batched experts": (
        "MixtralForCausalLM",
        tokens,
        GROUPED | {"num_local_experts": 4, "experts_implementation": "batched_mm"},
    ),
    "Mamba": (
        "MambaForCausalLM",
        tokens,
        {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        tokens,
        {
            "vocab_size": 256,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "ViT": ("ViTForImageClassification", pictures, IMAGE),
    "Swin": (
        "SwinForImageClassification",
        pictures,
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        pictures,
        {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2},
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        pixels,
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 2],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
        },
    ),
    "YOLOS": ("YolosForObjectDetection", boxes, IMAGE | {"image_size": [64, 64], "num_detection_tokens": 8}),
}
for _name, (_kind, _batch, _config) in HUGGING_FACE.items():
    entry(_name)(hugging_face(_kind, _batch, **_config))


# ------------------------------------------------------------------------------------------------ graphs


def graph(kind: str, **options: Any) -> Callable[[], Parts]:
    """Returns a maker of a ``torch_geometric`` model that classifies nodes."""

    def make() -> Parts:
        models = importlib.import_module("torch_geometric.nn")
        edges = torch.randint(200, (2, 800))

        class Nodes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = getattr(models, kind)(32, 64, 3, 8, **options)

            def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
                return self.model(*x)

        model = Nodes()
        return (
            model,
            functional.cross_entropy,
            adamw(model),
            lambda: ((torch.randn(200, 32), edges), torch.randint(8, (200,))),
        )

    return make


entry("GCN (torch_geometric)")(graph("GCN", dropout=0.1))
entry("GCN, edges normalized before")(graph("GCN", dropout=0.1, normalize=False))
entry("GraphSAGE (torch_geometric)")(graph("GraphSAGE"))
