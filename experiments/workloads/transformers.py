"""Transformers with layer norm: GPT-2, the Vision Transformer, BERT, and the Transformer for translation.

Attention is one fused kernel, without dropout in GPT-2 and the Vision Transformer, as is usual today. Llama-style
decoders are in llama.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._shared import labels, one_of, rate, tokens
from experiments.workloads.module import Parts, WorkloadError

# Layers, width, heads.
GPT2_SIZES = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20)}
VIT_SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16), "huge": (32, 1280, 16)}
CONTEXT = 1024  # positions of GPT-2


class Block(nn.Module):
    """Attention and a GELU layer of four times the width, each after layer norm, on ``[batch, length, width]``.

    Args:
        rate: Dropout rate of both results; 0 adds no dropout kernel.
        epsilon: Epsilon of the layer norms.
    """

    def __init__(self, width: int, heads: int, rate: float, epsilon: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, epsilon)
        self.norm2 = nn.LayerNorm(width, epsilon)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = dropout(rate)

    def attention(self, x: Tensor, causal: bool) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        return x + self.dropout(self.project(y))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, causal=False)
        return x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm2(x))))))


class GPT2Block(Block):
    """Causal block with approximate GELU and no dropout after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, causal=True)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


def dropout(rate: float) -> nn.Module:
    """Returns dropout, or the identity for rate 0, where dropout would still draw random numbers."""
    return nn.Dropout(rate) if rate else nn.Identity()


class GPT2(nn.Module):
    """GPT-2 from tokens ``[batch, length]`` to logits ``[batch · length, vocabulary]``.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, Table 2. Pre-norm blocks, learned
    positions, dropout 0.1, output weights tied to the embedding.
    """

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int = 50257, context: int = CONTEXT):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GPT2Block(width, heads, 0.1, 1e-5) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)


class ViT(nn.Module):
    """Vision Transformer for images ``[batch, 3, image, image]``, returning logits ``[batch, classes]``.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, Table 1 and section 3.1: patches of 16 px and a class
    token, learned positions, pre-norm blocks, layer norm and a linear layer on the class token at the end. Dropout 0.1
    "after every dense layer except for the qkv-projections and directly after adding positional- to patch embeddings"
    (appendix B.1; Table 3 has 0.1 for ImageNet and ImageNet-21k, 0 for ViT-L/16 on JFT-300M).
    """

    def __init__(self, layers: int, width: int, heads: int, patch: int, image: int, classes: int, rate: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.dropout = dropout(rate)
        self.blocks = nn.Sequential(*(Block(width, heads, rate, 1e-6) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.blocks(self.dropout(x + self.positions))
        return self.head(self.norm(x[:, 0]))


class Bert(nn.Module):
    """BERT from tokens ``[batch, length]`` to logits ``[batch · length, vocabulary]``.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2019. Encoder
    blocks of Vaswani et al. (2017) with GELU and layer norm after each part; embeddings of tokens, positions and
    segments; the masked language model (section 3.1), whose output weights are tied to the token embeddings.

    1. The loss covers all positions of a batch; the paper's covers the 15 % that are masked.
    2. No next-sentence prediction, as in RoBERTa (2019), and no pooler.
    """

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", 1e-12, batch_first=True)
            for _ in range(layers)
        )
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, 1e-12))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions.weight + self.segments.weight[0]
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.transform(x), self.words.weight, self.bias).flatten(0, 1)


class Translator(nn.Module):
    """Transformer from tokens ``[batch, 2, length]``, of both languages, to logits ``[batch · length, vocabulary]``.

    Vaswani et al., "Attention Is All You Need", 2017, section 3, the base model: encoder and decoder of six layers
    each, width 512, 8 heads, feed-forward layers of 2048, layer norm after each part, sinusoidal positions. Both
    languages and the output share one embedding, multiplied by √width at the input (3.4).

    1. Sentences have one length, without padding; the paper's batches have 25,000 tokens of sentences of similar
       lengths.
    """

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.words = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Transformer(width, heads, layers, layers, 4 * width, dropout, batch_first=True)
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.positions: Tensor
        self.future: Tensor
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width])
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, words: Tensor) -> Tensor:
        source, target = self.dropout(self.words(words) * self.scale + self.positions).unbind(1)
        x = self.layers(source, target, tgt_mask=self.future, tgt_is_causal=True)
        return F.linear(x, self.words.weight).flatten(0, 1)


# ------------------------------------------------------------------------------------------- families


def gpt2(*, size: str, batch_size: int = 8, length: int = CONTEXT) -> Parts:
    """Returns one of GPT2_SIZES with AdamW, and ``batch_size`` sequences of ``length`` tokens.

    Raises:
        WorkloadError: The size is unknown, or ``length`` exceeds the number of positions.
    """
    sizes = one_of(GPT2_SIZES, size, "size", "gpt2")
    if length > CONTEXT:
        raise WorkloadError(f"workload.length: gpt2 has {CONTEXT} positions, not {length}")
    model = GPT2(*sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, nn.CrossEntropyLoss(), optimizer, tokens(batch_size, length)


def vit(
    *,
    size: str,
    batch_size: int = 256,
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    layers: int | None = None,
    dropout: float = 0.1,
) -> Parts:
    """Returns one of VIT_SIZES, and ``batch_size`` images.

    The paper uses Adam with high weight decay (section 4.1); this uses AdamW.

    Args:
        size: Key of VIT_SIZES.
        patch: Side of a patch in pixels.
        classes: Number of classes.
        layers: Number of blocks; None is the size's own.

    Raises:
        WorkloadError: The size is unknown, patches do not divide the image, or layers or dropout are invalid.
    """
    depth, width, heads = one_of(VIT_SIZES, size, "size", "vit")
    if image % patch:
        raise WorkloadError(f"workload.patch: expected a divisor of image ({image}), got {patch}")
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 1):
        raise WorkloadError(f"workload.layers: expected a positive integer, got {layers!r}")
    rate(dropout)
    model = ViT(layers or depth, width, heads, patch, image, classes, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return model, nn.CrossEntropyLoss(), optimizer, (torch.empty(batch_size, 3, image, image), labels(batch_size))


def bert(
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    length: int = 512,
    batch_size: int = 16,
    dropout: float = 0.1,
) -> Parts:
    """Returns BERT-base, and ``batch_size`` sequences of ``length`` tokens.

    Adam at 1e-4 with L2 weight decay 0.01 (appendix A.2), as AdamW.

    Raises:
        WorkloadError: Heads do not divide the width, or the dropout is outside [0, 1).
    """
    check(width, heads, dropout)
    model = Bert(layers, width, heads, vocabulary, length, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    return model, nn.CrossEntropyLoss(), optimizer, tokens(batch_size, length)


def transformer(
    *,
    layers: int = 6,
    width: int = 512,
    heads: int = 8,
    vocabulary: int = 37000,
    length: int = 128,
    batch_size: int = 64,
    dropout: float = 0.1,
) -> Parts:
    """Returns the Transformer, and ``batch_size`` pairs of sentences of ``length`` tokens.

    Dropout and label smoothing 0.1 (section 5.4), Adam with β 0.9 and 0.98 (5.3). Raises WorkloadError as ``bert``.
    """
    check(width, heads, dropout)
    model = Translator(layers, width, heads, vocabulary, length, dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    batch = labels(batch_size, 2, length), labels(batch_size * length)
    return model, nn.CrossEntropyLoss(label_smoothing=0.1), optimizer, batch


def check(width: int, heads: int, dropout: float) -> None:
    """Raises WorkloadError if heads do not divide the width, or the dropout is outside [0, 1)."""
    if width % heads:
        raise WorkloadError(f"workload.heads: expected a divisor of width ({width}), got {heads}")
    rate(dropout)
