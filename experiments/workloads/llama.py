"""Llama-style decoders by size: Llama, Qwen3, and Mixtral with a mixture of experts.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, section 2.2: RMSNorm before each part,
SwiGLU, rotary positions, no biases. Grouped-query attention as in Llama 2 (2023, section 2.2 and appendix A.2.1).

Choices: rotary positions pair dimensions i and i + size / 2, as in Hugging Face's code (equal to the authors' code up
to the order of weights); one fused attention kernel reads keys and values repeated for their groups; embedding and
output weights are separate; the loss is in float32, as in torchtitan; AdamW keeps its moments in the parameters' dtype,
as ``torch.optim.AdamW`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._shared import flag, positive, tokens
from experiments.workloads.module import Parts, WorkloadError


@torch.library.custom_op("headroom::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns RMSNorm of x ``[..., width]`` with weight ``[width]``, and 1 / RMS ``[..., 1]`` in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight.float()).to(x.dtype), scale


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("headroom::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight for the gradient of ``rms_norm``'s first result."""
    wide = grad.float()
    unit = x.float() * scale
    inner = wide * weight.float()
    dx = scale * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * unit).flatten(0, -2).sum(0).to(weight.dtype)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
    x, scale, weight = ctx.saved_tensors
    return *rms_norm_backward(grad, x, scale, weight), None


rms_norm.register_autograd(_backward, setup_context=_keep)


class RMSNorm(nn.Module):
    """``nn.RMSNorm`` over the last dimension as a single kernel.

    CUDA has one kernel (``aten._fused_rms_norm``), which keeps its input and one number per row. On the CPU, where
    steps are captured, PyTorch runs eight kernels, which keep two copies in float32. This custom operator has the
    arithmetic of the CPU's kernels and the memory and traffic of the CUDA kernel.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions with angles ``[length, size / 2]`` to x ``[batch, heads, length, size]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention on ``[batch, length, width]``, with heads of ``size``; ``kv_heads`` divides ``heads``."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int, epsilon: float, qk_norm: bool) -> None:
        super().__init__()
        self.size = size
        self.groups = heads // kv_heads
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
            # One statement: the narrow k lives until the wide v exists, as in the committed captures.
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        return self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """SwiGLU feed-forward layer on ``[..., width]``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each after RMSNorm and with a residual connection."""

    def __init__(self, width: int, attention: nn.Module, feed: nn.Module, epsilon: float) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width, epsilon)
        self.norm2 = RMSNorm(width, epsilon)
        self.attention = attention
        self.feed = feed

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    """Decoder from tokens ``[batch, length]`` to logits ``[batch · length, vocabulary]``.

    Args:
        length: Fixed sequence length.
        feed: Returns a new feed-forward layer for a block.
        base: Base of the rotary angles.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        vocabulary: int,
        length: int,
        feed: Callable[[], nn.Module],
        *,
        head_size: int | None = None,
        base: float = 10000.0,
        epsilon: float = 1e-5,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        size = width // heads if head_size is None else head_size
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, Attention(width, heads, kv_heads, size, epsilon, qk_norm), feed(), epsilon)
            for _ in range(layers)
        )
        self.norm = RMSNorm(width, epsilon)
        self.head = nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), base ** (-torch.arange(0, size, 2) / size))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)).flatten(0, 1)


class Experts(nn.Module):
    """Mixture of SwiGLU experts on ``[batch, length, width]`` (Jiang et al., "Mixtral of Experts", 2024).

    Every token goes to the ``top`` experts with the largest router logits; their outputs are summed with the softmax of
    those logits as weights (section 2.1). A program needs fixed tensor sizes, so each expert has a fixed capacity, as
    in GShard (Lepikhin et al., 2020, section 2.2) and the Switch Transformer (Fedus et al., 2022, section 2.2). Tokens
    are dispatched by index, without a mask of tokens x experts x places. A token beyond an expert's capacity gets no
    output from it, and the output of empty places is not read. As in the paper, the loss has no auxiliary term. The
    capacity ``places`` is in tokens.
    """

    def __init__(self, width: int, hidden: int, experts: int, top: int, places: int) -> None:
        super().__init__()
        self.top = top
        self.places = places
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        count = len(self.experts)
        logits, chosen = self.router(tokens).topk(self.top, dim=-1)  # [tokens, top]
        places, fits = self.assign(chosen)
        weights = logits.softmax(-1, dtype=torch.float32).to(x.dtype) * fits
        # The additional last row receives tokens without a place.
        source = torch.zeros(count * self.places + 1, dtype=torch.int64, device=x.device)
        source.scatter_(0, places.flatten(), torch.arange(places.numel(), device=x.device) // self.top)
        inputs = tokens.index_select(0, source[:-1]).split(self.places)
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, inputs, strict=True)])
        routed = outputs.index_select(0, places.clamp(max=count * self.places - 1).flatten())
        return (routed.unflatten(0, (-1, self.top)) * weights[:, :, None]).sum(1).view_as(x)

    def assign(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Assigns places to the chosen experts ``[tokens, top]``, first come first served.

        Returns:
            expert · ``places`` + position in its queue, or ``experts`` · ``places`` if the expert is full; whether the
            token has a place.
        """
        count = len(self.experts)
        flat = chosen.flatten()
        one_hot = flat[:, None] == torch.arange(count, device=chosen.device)
        rank = one_hot.cumsum(0, dtype=torch.int32).gather(1, flat[:, None])[:, 0] - 1
        fits = rank < self.places
        return torch.where(fits, flat * self.places + rank, count * self.places).view_as(chosen), fits.view_as(chosen)


class Loss(nn.Module):
    """Cross-entropy of logits ``[n, vocabulary]`` in float32."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)


def check_heads(width: int, heads: int, kv_heads: int, head_size: int | None) -> None:
    """Checks the sizes of the heads.

    Raises:
        WorkloadError: Heads have an odd size or do not divide the width, or groups do not divide the heads.
    """
    if head_size is None and width % (2 * heads):
        raise WorkloadError(f"workload.heads: width / heads must be an even integer, got {width} / {heads}")
    if head_size is not None and (
        isinstance(head_size, bool) or not isinstance(head_size, int) or head_size < 2 or head_size % 2
    ):
        raise WorkloadError(f"workload.head_size: expected an even integer, got {head_size!r}")
    if heads % kv_heads:
        raise WorkloadError(f"workload.kv_heads: expected a divisor of heads ({heads}), got {kv_heads}")


def parts(model: nn.Module, batch_size: int, length: int) -> Parts:
    """Returns a decoder with its loss, AdamW (LLaMA, section 2.3) and ``batch_size`` sequences of ``length`` tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return model, Loss(), optimizer, tokens(batch_size, length)


def llama(
    *,
    layers: int = 22,
    width: int = 2048,
    heads: int = 32,
    kv_heads: int = 4,
    hidden: int = 5632,
    vocabulary: int = 32000,
    length: int = 2048,
    batch_size: int = 1,
    head_size: int | None = None,
    rope_base: float = 10000.0,
    epsilon: float = 1e-5,
    qk_norm: bool = False,
) -> Parts:
    """Returns a Llama decoder; the defaults are TinyLlama 1.1B (Zhang et al., 2024, Table 2).

    Args:
        layers: Number of blocks.
        width: Width of the residual stream.
        hidden: Width inside the feed-forward network.
        vocabulary: Number of tokens.
        batch_size: Sequences of ``length`` tokens.
        kv_heads: Heads of keys and values, shared by the ``heads`` of queries.
        head_size: Size of a head; None is width / heads.
        rope_base: Base of the rotary angles.
        epsilon: Added to the mean square by every RMSNorm.
        qk_norm: Whether queries and keys pass an RMSNorm per head (Qwen3 Technical Report, 2025, section 2).

    Raises:
        WorkloadError: The heads do not fit (``check_heads``), or base, epsilon or qk_norm is invalid.
    """
    check_heads(width, heads, kv_heads, head_size)
    positive(rope_base, "rope_base")
    positive(epsilon, "epsilon")
    flag(qk_norm, "qk_norm")
    model = Llama(
        layers,
        width,
        heads,
        kv_heads,
        vocabulary,
        length,
        lambda: SwiGLU(width, hidden),
        head_size=head_size,
        base=rope_base,
        epsilon=epsilon,
        qk_norm=qk_norm,
    )
    return parts(model, batch_size, length)


def mixtral(
    *,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    hidden: int = 14336,
    experts: int = 8,
    top: int = 2,
    capacity: float = 1.0,
    vocabulary: int = 32000,
    length: int = 8192,
    batch_size: int = 1,
) -> Parts:
    """Returns a Mixtral decoder; the defaults are those of Table 1, whose 32 layers take 93 GB in bfloat16.

    Args:
        layers: Number of blocks.
        width: Width of the residual stream.
        kv_heads: Heads of keys and values, shared by the ``heads`` of queries.
        hidden: Width inside an expert.
        experts, top: Experts of a block, and how many process each token.
        vocabulary: Number of tokens.
        batch_size: Sequences of ``length`` tokens.
        capacity: Capacity factor of an expert, relative to balanced routing (``top`` · tokens / ``experts``), rounded
            up; 1 fills every place if routing is balanced. The paper gives none: Mixtral drops no tokens.

    Raises:
        WorkloadError: The heads do not fit (``check_heads``), ``top`` exceeds ``experts``, or ``capacity`` is invalid.
    """
    check_heads(width, heads, kv_heads, None)
    if top > experts:
        raise WorkloadError(f"workload.top: expected at most the number of experts ({experts}), got {top}")
    positive(capacity, "capacity")
    places = math.ceil(capacity * top * batch_size * length / experts)
    model = Llama(
        layers,
        width,
        heads,
        kv_heads,
        vocabulary,
        length,
        lambda: Experts(width, hidden, experts, top, places),
        base=1e6,
    )
    return parts(model, batch_size, length)
