"""What the transformers share: RMSNorm as PyTorch runs it on CUDA, in one kernel.

``nn.RMSNorm`` is one kernel on CUDA (``aten._fused_rms_norm``), which keeps its input and a number per row. On the CPU,
where steps are captured, it is eight, which keep two copies in float32. So it is an operator of our own here, whose
arithmetic is that of the eight and whose memory and traffic are those of the one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("headroom::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x ``[..., width]`` over its root mean square, times weight ``[width]``; and 1 / root ``[..., 1]``, in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight.float()).to(x.dtype), scale


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("headroom::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, of ``rms_norm``'s first result's."""
    wide, unit = grad.float(), x.float() * scale
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
    """``nn.RMSNorm`` over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = rms_norm(x, self.weight, self.epsilon)[0]
        return y
