"""Dispatches PyTorch's CUDA operators for a step that is captured on the CPU.

PyTorch's composite operators select the operators that they call by the device of their tensors. Within
``cuda_operators``, the composite operators below treat CPU tensors as CUDA tensors, in the forward pass and in
recomputation during the backward pass. The resulting graph contains CUDA operators: it can be planned, not executed.

Sources, in aten/src/ATen/native: Dropout.cpp (``is_fused_kernel_acceptable``), Normalization.cpp
(``_select_batch_norm_backend``), layer_norm.cpp (``rms_norm_symint``), transformers (cuda/sdp_utils.cpp,
sdp_utils_cpp.h, attention.cpp), of a PyTorch 2.11 or later with CUDA 13 and cuDNN 9.16 or later. The lists of
autocast are those of aten/src/ATen/autocast_mode.h; operators that both devices run in half precision are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.library import Library, _scoped_library, fallthrough_kernel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_map_only

from executor.capture.operators import bind_arguments
from executor.capture.optimizers import patch_attrs
from executor.capture.reach import CaptureError
from executor.capture.recurrent import register as register_recurrent

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
DEFAULT_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, *DEFAULT_ORDER]

# AT_FORALL_FP32 without the operators that the CPU's list also contains.
FLOAT32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
)
# AT_FORALL_FP32_SET_OPT_DTYPE: they get dtype=float32 for the result instead of converted inputs.
RESULT_FLOAT32 = frozenset(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
)


@contextmanager
def cuda_operators(capability: str) -> Iterator[None]:
    """Makes composite operators on CPU tensors dispatch as on a GPU within this context.

    Args:
        capability: CUDA compute capability of the GPU, such as "9.0". With "", attention raises CaptureError, because
            its kernel depends on the capability.
    """
    composite = {
        "batch_norm": _batch_norm,
        "dropout": _dropout,
        "scaled_dot_product_attention": partial(_attention, capability),
    }
    with ExitStack() as stack:
        library = stack.enter_context(_scoped_library("aten", "IMPL"))
        for name, kernel in composite.items():
            library.impl(name, kernel, "AutogradCPU")
        # PyTorch selects the fused operator if the device has a kernel for it. Fake tensors never call the kernel.
        library.impl("_fused_rms_norm", partial(_composite, aten._fused_rms_norm.default), "CPU")
        register_recurrent(library)
        stack.enter_context(_cuda_autocast(library))
        yield


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Runs CUDA's dropout kernel, which saves one byte per element instead of the CPU's factors."""
    if train and 0 < p < 1 and x.numel():
        return torch.native_dropout(x, p, True)[0]
    return _composite(aten.dropout.default, x, p, train)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Runs cuDNN's batch norm where it applies: floating-point inputs with float32 weights."""
    has_both = mean is not None and variance is not None
    has_stats = has_both or (training and mean is None and variance is None)
    if (
        cudnn_enabled
        and torch.backends.cudnn.enabled
        and weight is not None
        and bias is not None
        and has_stats
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and x.dim() >= 3
        and len(x) <= (880_801 if training else 65_535)
        and x.numel() < 2**31 - 1  # some of cuDNN's batch norms have 32-bit indices
    ):
        layout = torch._prims_common.suggest_memory_format(x)
        contiguous = [None if t is None else t.contiguous() for t in (weight, bias, mean, variance)]
        out: Any = aten.cudnn_batch_norm(x.contiguous(memory_format=layout), *contiguous, training, momentum, eps)
        return out[0]
    arguments = x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled
    return _composite(aten.batch_norm.default, *arguments)


def _composite(op: OpOverload, *args: Any) -> Any:
    """Runs PyTorch's C++ composite kernel; ``OpOverload.decompose`` prefers Python's, which may copy an input."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args)


@contextmanager
def _cuda_autocast(library: Library) -> Iterator[None]:
    """Gives autocast on the CPU, which replaces the disabled ``torch.autocast("cuda")``, CUDA's policies."""
    cpu, cuda = (
        {
            name.removeprefix("aten::")
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
            if name.startswith("aten::")
        }
        for key in ("AutocastCPU", "AutocastCUDA")
    )
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
            device_type = "cpu"
            dtype = dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, *args, **kwargs)

    with patch_attrs((torch.autocast, "__init__", init)):
        yield


def _in_float32(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        args, kwargs = tree_map_only(Tensor, _widen, (args, kwargs))
        return op(*args, **kwargs)


def _to_float32(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    arguments = bind_arguments(op, args, kwargs)
    if arguments.get("dtype") is None and _is_narrow(args[0]):
        arguments["dtype"] = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        return op(**arguments)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor


# ------------------------------------------------------------------------------------------- attention


class Attention(NamedTuple):
    """Arguments of ``scaled_dot_product_attention`` ([batch, heads, length, width] if fused) and the GPU."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    is_grouped: bool
    capability: tuple[int, int]

    @property
    def requires_grad(self) -> bool:
        """Whether queries, keys or values require gradients."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def _attention(
    capability: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs ``scaled_dot_product_attention`` with the kernel that PyTorch selects on a GPU."""
    if not capability:
        raise CaptureError(
            'machine.capability: missing, and the kernel of attention depends on it: give it, such as "9.0"'
        )
    major, minor = map(int, capability.split("."))
    attn = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, (major, minor))
    kernel = select_backend(attn)
    mask = _additive_mask(attn, kernel)
    out: Tensor
    if kernel == SDPBackend.CUDNN_ATTENTION:
        out = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, attn.requires_grad, dropout_p, is_causal, False, scale=scale
        )[0]
    elif kernel == SDPBackend.FLASH_ATTENTION:
        width = query.shape[-1]
        padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value)]
        out = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=width**-0.5 if scale is None else scale
        )[0]
        out = out[..., :width] if width % 8 else out
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, attn.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    else:
        out = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def select_backend(attn: Attention) -> SDPBackend:
    """Returns the kernel that PyTorch selects: the first in its order that is enabled and supports the arguments.

    Raises:
        RuntimeError: If no kernel supports them, as on the GPU.
    """
    order = [SDPBackend(i) for i in torch._C._get_sdp_priority_order()]
    if order[:3] == DEFAULT_ORDER or order[:4] == CUDNN_FIRST:  # not set by torch.nn.attention.sdpa_kernel
        prefers_cudnn = attn.capability[0] in (9, 10)
        order = CUDNN_FIRST if prefers_cudnn else [*DEFAULT_ORDER, SDPBackend.CUDNN_ATTENTION]
    for kernel in filter(_KERNELS.__contains__, order):
        enabled, supports = _KERNELS[kernel]
        if enabled() and supports(attn):
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


def _additive_mask(attn: Attention, kernel: SDPBackend) -> Tensor | None:
    """Returns the mask in the additive form that the kernel expects."""
    mask = attn.mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero, lowest = (torch.scalar_tensor(x, dtype=attn.query.dtype, device=mask.device) for x in (0.0, -torch.inf))
        is_cudnn = kernel == SDPBackend.CUDNN_ATTENTION
        # cuDNN adds the lowest finite half to masked-out scores.
        mask = torch.where(mask.logical_not(), -65504.0, zero) if is_cudnn else torch.where(mask, 0.0, lowest)
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        length = mask.shape[-1]
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(*attn.query.shape[:3], attn.key.shape[2])
    return mask


def _supports_fused(attn: Attention, min_capability: tuple[int, int], allows_groups: bool = True) -> bool:
    """Returns whether a fused kernel supports the capability (at least ``min_capability``), shapes and strides."""
    tensors = attn.query, attn.key, attn.value
    if any(t.dim() != 4 or t.dtype != attn.query.dtype or len(t) != len(attn.query) for t in tensors):
        return False
    (heads, length), k_heads, v_heads = attn.query.shape[1:3], attn.key.shape[1], attn.value.shape[1]
    if k_heads != v_heads or (heads % k_heads if allows_groups and attn.is_grouped else heads != k_heads):
        return False
    if not length or not attn.key.shape[2] or (attn.mask is not None and attn.mask.stride(-1) != 1):
        return False
    is_dense = all(t.stride(-1) == 1 for t in tensors) or (allows_groups and attn.query.shape[-1] == 1)
    return is_dense and min_capability <= attn.capability <= (12, 1)


def _supports_cudnn(attn: Attention) -> bool:
    mask, (key_length, width), query_width = attn.mask, attn.value.shape[-2:], attn.query.shape[-1]
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if not _supports_fused(attn, (8, 0)) or strict or attn.query.dtype not in HALF or attn.dropout * 16 % 1:
        return False
    if mask is not None:
        score_shape = *attn.query.shape[:3], attn.key.shape[2]
        if mask.requires_grad or mask.dim() not in (2, 4):
            return False
        if any(a not in (1, b) for a, b in zip(mask.shape, score_shape[-mask.dim() :], strict=True)):
            return False
    max_width = 256 if attn.capability == (9, 0) else 128
    if (query_width, width) == (192, 128) and attn.capability[0] == 10:
        max_width = 192
    if max(query_width, width) > max_width or query_width % 8 or width % 8:
        return False
    return key_length != 1 and not (attn.dropout and attn.query.shape[2] == 1)


def _supports_flash(attn: Attention) -> bool:
    width = attn.query.shape[-1]
    if attn.mask is not None or not _supports_fused(attn, (8, 0)) or attn.query.dtype not in HALF or width > 256:
        return False
    if any(t.shape[-1] != width for t in (attn.key, attn.value)):
        return False
    is_small_gpu = (8, 6) <= attn.capability <= (8, 9) or attn.capability >= (12, 0)
    if is_small_gpu and attn.requires_grad and width > 192 and (width <= 224 or attn.dropout):
        return False
    return not attn.is_causal or attn.query.shape[2] == attn.key.shape[2]


def _supports_efficient(attn: Attention) -> bool:
    width = attn.query.shape[-1]
    dtype = attn.query.dtype
    is_ampere = attn.capability >= (8, 0)
    if not _supports_fused(attn, (5, 0), allows_groups=False) or attn.key.shape[-1] != width:
        return False
    if dtype not in (torch.float32, *HALF) or (dtype == torch.bfloat16 and not is_ampere):
        return False
    has_tensor_cores = is_ampere or (attn.capability >= (7, 0) and dtype in HALF)
    alignment = 16 // dtype.itemsize if has_tensor_cores else 1
    return not any(w % alignment or not w for w in (width, attn.value.shape[-1]))


# Kernel -> whether the user has enabled it, whether it supports the arguments.
_KERNELS: dict[SDPBackend, tuple[Callable[[], bool], Callable[[Attention], bool]]] = {
    SDPBackend.CUDNN_ATTENTION: (torch.backends.cuda.cudnn_sdp_enabled, _supports_cudnn),
    SDPBackend.FLASH_ATTENTION: (torch.backends.cuda.flash_sdp_enabled, _supports_flash),
    SDPBackend.EFFICIENT_ATTENTION: (torch.backends.cuda.mem_efficient_sdp_enabled, _supports_efficient),
    SDPBackend.MATH: (torch.backends.cuda.math_sdp_enabled, lambda attn: True),
}
