"""The operators that PyTorch runs on a GPU, for a step that is captured on the CPU.

PyTorch's composite operators choose the operators that they call by the device of their tensors. While
``operators_of_cuda`` is entered, those below choose for CPU tensors as for CUDA tensors, in the forward pass and in
what the backward pass recomputes. The resulting graph has operators that no CPU runs: it can be planned, not executed.

Sources, in aten/src/ATen/native: Dropout.cpp (``is_fused_kernel_acceptable``), Normalization.cpp
(``_select_batch_norm_backend``), layer_norm.cpp (``rms_norm_symint``), transformers (cuda_attention.py). The lists of
autocast are those of aten/src/ATen/autocast_mode.h; operators that both devices run in half precision are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.library import Library, _scoped_library, fallthrough_kernel
from torch.utils._pytree import tree_map_only

from executor.capture.cuda_attention import attention

aten = torch.ops.aten
MOST_ELEMENTS = 2**31 - 1  # some of cuDNN's batch norms have 32-bit indices
MOST_IMAGES = 880_801, 65_535  # that cuDNN's batch norm takes, in training and in evaluation

# AT_FORALL_FP32, of those that are not the CPU's, too.
FLOAT32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
)
# AT_FORALL_FP32_SET_OPT_DTYPE: they are told that their result is float32, and do not convert what they read before.
RESULT_FLOAT32 = frozenset(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
)


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
        stack.enter_context(_autocast_of_cuda(library))
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


@contextmanager
def _autocast_of_cuda(library: Library) -> Iterator[None]:
    """Gives autocast on the CPU the policies of CUDA, as far as this PyTorch has them.

    ``torch.autocast("cuda")``, which PyTorch turns off where there is no GPU, is then autocast on the CPU.

    Args:
        library: takes the policies; they end with it.
    """
    cpu, cuda = (
        {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
         if name.startswith("aten::")}
        for key in ("AutocastCPU", "AutocastCUDA")
    )  # fmt: skip
    for name in cpu - cuda:
        library.impl(name, fallthrough_kernel, "AutocastCPU")
    for policy, names in ((_in_float32, FLOAT32), (_to_float32, RESULT_FLOAT32)):
        for name in names & cuda:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(policy, op), "AutocastCPU")
    original = torch.autocast.__init__

    def init(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


def _in_float32(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return op(*args, **kwargs)


def _to_float32(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    if given.get("dtype") is None and _is_narrow(args[0]):
        given["dtype"] = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        return op(**given)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor
