"""The operators that PyTorch runs on a GPU, for a step that is captured on the CPU.

PyTorch's composite operators choose the operators that they call by the device of their tensors. While
``operators_of_cuda`` is entered, those below choose for CPU tensors as for CUDA tensors, in the forward pass and in
what the backward pass recomputes. The resulting graph has operators that no CPU runs: it can be planned, not executed.

Sources, in aten/src/ATen/native: Dropout.cpp (``is_fused_kernel_acceptable``), Normalization.cpp
(``_select_batch_norm_backend``), layer_norm.cpp (``rms_norm_symint``), transformers (cuda_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.library import _scoped_library

from executor.capture import cuda_autocast
from executor.capture.cuda_attention import attention

aten = torch.ops.aten
MOST_ELEMENTS = 2**31 - 1  # some of cuDNN's batch norms have 32-bit indices
MOST_IMAGES = 880_801, 65_535  # that cuDNN's batch norm takes, in training and in evaluation


@contextmanager
def operators_of_cuda(capability: str) -> Iterator[None]:
    """Makes operators on CPU tensors choose as they do on a GPU, while it is entered.

    Args:
        capability: the GPU's CUDA compute capability, such as "9.0"; "" refuses fused attention, which depends on it.
    """
    composite = {
        "batch_norm": _batch_norm,
        "dropout": _dropout,
        "scaled_dot_product_attention": partial(attention, capability),
    }
    with ExitStack() as stack:
        library = stack.enter_context(_scoped_library("aten", "IMPL"))
        for name, kernel in composite.items():
            library.impl(name, kernel, "AutogradCPU")
        # PyTorch takes the fused operator where the device has a kernel for it. Fake tensors never call the kernel.
        library.impl("_fused_rms_norm", partial(_composite, aten._fused_rms_norm.default), "CPU")
        stack.enter_context(cuda_autocast.of_cuda(library))
        yield


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """One kernel, which keeps a byte per element; the CPU's keeps the factors."""
    if train and 0 < p < 1 and x.numel():
        return torch.native_dropout(x, p, True)[0]
    return _composite(aten.dropout.default, x, p, train)  # type: ignore[no-any-return]


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """cuDNN's, where it has one: of floats, with weights in float32."""
    both = mean is not None and variance is not None
    statistics = both or (training and mean is None and variance is None)
    if (
        cudnn_enabled and torch.backends.cudnn.enabled and weight is not None and bias is not None and statistics
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and x.dim() >= 3 and len(x) <= MOST_IMAGES[not training] and x.numel() < MOST_ELEMENTS
    ):  # fmt: skip
        layout = torch._prims_common.suggest_memory_format(x)
        parts = [None if t is None else t.contiguous() for t in (weight, bias, mean, variance)]
        out: Any = aten.cudnn_batch_norm(x.contiguous(memory_format=layout), *parts, training, momentum, eps)
        return out[0]  # type: ignore[no-any-return]
    given = x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled
    return _composite(aten.batch_norm.default, *given)  # type: ignore[no-any-return]


def _composite(op: OpOverload, *args: Any) -> Any:
    """What PyTorch's own kernel does; ``OpOverload.decompose`` prefers Python's, which may copy an input."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args)
