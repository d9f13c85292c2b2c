"""Autocast of CPU tensors by CUDA's lists of operators, for a capture on the CPU of a step that a GPU is to run.

CUDA and the CPU run other operators in float32: a layer norm is one of CUDA's, a cross entropy one of the CPU's. The
lists are PyTorch's (aten/src/ATen/autocast_mode.h). Operators that both run in the lower precision are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_map_only

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
def of_cuda(library: Library) -> Iterator[None]:
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
