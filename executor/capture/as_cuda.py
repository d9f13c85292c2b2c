"""What PyTorch runs on CUDA in the place of the CPU's operators, for a capture on the CPU of a step that is to run on a
GPU. The graph has then operators that no CPU runs: it can be planned, not executed.

- Dropout is one kernel that keeps a byte per element (``native_dropout``); the CPU's keeps the factors
  (``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp).
- Attention is a fused kernel whether it has dropout and a mask or not (aten/src/ATen/native/transformers/cuda/
  sdp_utils.cpp); the CPU's with dropout forms every product. Grouped queries and inputs that are not
  ``[batch, heads, length, width]`` are left as they are.

Batch norm, pooling, losses and convolutions keep the same tensors on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def differs(kernel: str) -> bool:
    """Whether a kernel of this name is the CPU's where CUDA may have another: of dropout or attention."""
    return any(part in kernel for part in ("bernoulli", "flash_attention_for_cpu"))


@contextmanager
def operators_of_cuda() -> Iterator[None]:
    """While it is entered, tensors of the CPU take CUDA's operators, in what a backward pass recomputes, too."""
    original = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:  # ``Tensor.backward`` runs with the mode turned off
        with _OperatorsOfCuda():
            return original(*args, **kwargs)

    torch.autograd._engine_run_backward = backward
    try:
        with _OperatorsOfCuda():
            yield
    finally:
        torch.autograd._engine_run_backward = original


class _OperatorsOfCuda(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return F.dropout(input, p, training, inplace)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # what is added is of the type of the queries
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        shape = (*query.shape[:3], key.shape[2])
        attn_mask = attn_mask.expand(shape)
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, attn_mask) if t is not None)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out: Tensor = kernel(query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale)[0]
    return out
