"""Decoders of Llama's kind, from sizes (Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023).

Section 2.2 of the paper: RMSNorm before each part, SwiGLU, rotary positions; no biases. Grouped-query attention as in
Llama 2 (2023, section 2.2 and appendix A.2.1): ``heads`` of queries share ``kv_heads`` of keys and values. AdamW with
betas 0.9 and 0.95 and weight decay 0.1 (section 2.3). The defaults are the block of TinyLlama 1.1B (Zhang et al., 2024,
Table 2), of which there are 22. ``qk_norm``: queries and keys pass an RMSNorm over each head (Qwen3 Technical Report,
2025, section 2).

What is open: dimensions i and i + size / 2 are rotated together, as in Hugging Face's code (the authors' takes
neighbours, the same up to the order of weights); attention runs in one fused kernel, which reads keys and values
repeated for their groups; the output has weights of its own; the loss is in float32, as in torchtitan. AdamW keeps its
two moments in the parameters' dtype, and no copy of them: what ``torch.optim.AdamW`` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._transformers import RMSNorm
from experiments.workloads.module import Parts, WorkloadError


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x ``[batch, heads, length, size]``, turned by the angles ``[length, size / 2]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention ``[batch, length, width]`` to the same, of heads of ``size``; ``kv_heads`` divides ``heads``."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int, epsilon: float, qk_norm: bool) -> None:
        super().__init__()
        self.size, self.groups = size, heads // kv_heads
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k = nn.Linear(width, kv_heads * size, bias=False)
        self.v = nn.Linear(width, kv_heads * size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(size, epsilon) if qk_norm else nn.Identity() for _ in range(2))
        self.project = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (-1, self.size)) for part in (self.q, self.k, self.v))
        q, k = (rotate(part.transpose(1, 2), cos, sin) for part in (self.q_norm(q), self.k_norm(k)))
        v = v.transpose(1, 2)
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        y: Tensor = self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class SwiGLU(nn.Module):
    """The feed-forward layer ``[..., width]`` to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention and a feed-forward layer, each after RMSNorm and added to its input."""

    def __init__(self, width: int, attention: nn.Module, feed: nn.Module, epsilon: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width, epsilon), RMSNorm(width, epsilon)
        self.attention, self.feed = attention, feed

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        out: Tensor = x + self.feed(self.norm2(x))
        return out


class Llama(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch · length, vocabulary]``; ``length`` as given to ``__init__``.

    Args:
        feed: makes a block's feed-forward layer.
        base: of the rotary angles.
    """

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, vocabulary: int, length: int,
        feed: Callable[[], nn.Module], *, head_size: int | None = None, base: float = 10000.0, epsilon: float = 1e-5,
        qk_norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        size = width // heads if head_size is None else head_size
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, Attention(width, heads, kv_heads, size, epsilon, qk_norm), feed(), epsilon)
            for _ in range(layers)
        )
        self.norm, self.head = RMSNorm(width, epsilon), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), base ** (-torch.arange(0, size, 2) / size))
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


class Loss(nn.Module):
    """Cross-entropy of logits ``[n, vocabulary]`` in float32."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)


def checked(width: int, heads: int, kv_heads: int, head_size: int | None) -> None:
    """Whether the heads fit.

    Raises:
        WorkloadError: heads of an odd size, or that do not divide the width; groups that do not divide the heads.
    """
    if head_size is None and width % (2 * heads):
        raise WorkloadError(f"workload.heads: width / heads must be an even integer, got {width} / {heads}")
    if head_size is not None and (isinstance(head_size, bool) or not isinstance(head_size, int) or head_size < 2
                                  or head_size % 2):  # fmt: skip
        raise WorkloadError(f"workload.head_size: expected an even integer, got {head_size!r}")
    if heads % kv_heads:
        raise WorkloadError(f"workload.kv_heads: expected a divisor of heads ({heads}), got {kv_heads}")


def parts(model: nn.Module, batch_size: int, length: int) -> Parts:
    """A decoder with its loss, optimizer and ``batch_size`` sequences of ``length`` tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    batch = (
        torch.empty(batch_size, length, dtype=torch.int64),
        torch.empty(batch_size * length, dtype=torch.int64),
    )
    return model, Loss(), optimizer, batch


def build(
    *, layers: int = 22, width: int = 2048, heads: int = 32, kv_heads: int = 4, hidden: int = 5632,
    vocabulary: int = 32000, length: int = 2048, batch_size: int = 1, head_size: int | None = None,
    rope_base: float = 10000.0, epsilon: float = 1e-5, qk_norm: bool = False,
) -> Parts:  # fmt: skip
    """``batch_size`` sequences of ``length`` tokens; ``head_size`` None: width / heads.

    Raises:
        WorkloadError: heads that do not fit (``checked``), or a base, epsilon or qk_norm that is none.
    """
    checked(width, heads, kv_heads, head_size)
    for key, value in (("rope_base", rope_base), ("epsilon", epsilon)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise WorkloadError(f"workload.{key}: expected a number above 0, got {value!r}")
    if not isinstance(qk_norm, bool):
        raise WorkloadError(f"workload.qk_norm: expected true or false, got {qk_norm!r}")
    model = Llama(layers, width, heads, kv_heads, vocabulary, length, lambda: SwiGLU(width, hidden),
                  head_size=head_size, base=rope_base, epsilon=epsilon, qk_norm=qk_norm)  # fmt: skip
    return parts(model, batch_size, length)
