"""A stack of Llama blocks (Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023), from sizes.

Section 2.2 of the paper: RMSNorm before each part, SwiGLU, rotary positions; no biases. Grouped-query attention as in
Llama 2 (2023, section 2.2 and appendix A.2.1): ``heads`` of queries share ``kv_heads`` of keys and values. AdamW with
betas 0.9 and 0.95 and weight decay 0.1 (section 2.3). The defaults are the block of TinyLlama 1.1B (Zhang et al., 2024,
Table 2), of which there are 22; the configuration takes 4 of them.

What is open: dimensions i and i + head / 2 are rotated together, as in Hugging Face's code (the authors' takes
neighbours, the same up to the order of weights); attention runs in one fused kernel, which reads keys and values
repeated for their groups; the output has weights of its own, which larger Llamas and TinyLlama have.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads.module import Parts, WorkloadError

BASE, EPSILON = 10000.0, 1e-5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x ``[batch, heads, length, size]``, turned by the angles ``[length, size / 2]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention ``[batch, length, width]`` to the same; ``kv_heads`` divides ``heads``."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size, self.groups = width // heads, heads // kv_heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        y: Tensor = self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """Attention and the SwiGLU layer, each after RMSNorm and added to its input."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, EPSILON), nn.RMSNorm(width, EPSILON)
        self.attention = Attention(width, heads, kv_heads)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch · length, vocabulary]``; ``length`` as given to ``__init__``."""

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, length: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, EPSILON), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(length), BASE ** (-torch.arange(0, size, 2) / size))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return logits


def build(
    *, layers: int = 22, width: int = 2048, heads: int = 32, kv_heads: int = 4, hidden: int = 5632,
    vocabulary: int = 32000, length: int = 2048, batch_size: int = 1,
) -> Parts:  # fmt: skip
    """``batch_size`` sequences of ``length`` tokens.

    Raises:
        WorkloadError: heads that do not divide the width into even sizes, or groups that do not divide the heads.
    """
    if width % (2 * heads):
        raise WorkloadError(f"workload.heads: width / heads must be an even integer, got {width} / {heads}")
    if heads % kv_heads:
        raise WorkloadError(f"workload.kv_heads: expected a divisor of heads ({heads}), got {kv_heads}")
    model = Llama(layers, width, heads, kv_heads, hidden, vocabulary, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    batch = (
        torch.empty(batch_size, length, dtype=torch.int64),
        torch.empty(batch_size * length, dtype=torch.int64),
    )
    return model, nn.CrossEntropyLoss(), optimizer, batch
