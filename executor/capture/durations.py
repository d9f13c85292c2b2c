"""Models the duration of a captured kernel from its operator's shapes, dtypes and layouts.

``kernel_ns`` returns the launch overhead plus the longer of arithmetic and memory traffic, each at the fraction of the
machine's peak that was fitted for its kind (``Machine.kernel_times``). A machine without fitted fractions uses one
roofline (``Machine.kernel_ns``).
"""
# 1. Convolutions on tensor cores convert NCHW tensors to NHWC and back, except 1x1 filters of stride 1 (but filters'
#    gradients with more channels in than out). Few channels leave tensor cores idle.
# 2. Float32 convolutions need no conversion. 3x3 filters of stride 1 use Winograd's algorithm.
# 3. Matrix products run in tiles. Unaligned rows are loaded element by element.
# 4. Normalizations, softmax and sums pass over their tensors; executor/capture/README.md has the number of passes.
# 5. ``torch.optim`` updates are parts of a multi-tensor kernel, as on a GPU, unless ``foreach`` is False. A part that
#    was captured for a single parameter has no launch.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, prod
from typing import Any

import torch
from torch import fx

from executor.capture.algorithms import Convolution, Pass, convolution_of
from executor.capture.operators import bind_arguments
from simulator.files import FormatError
from simulator.kernel_times import KernelTimes, scaled
from simulator.machine import Machine
from simulator.program import Kernel, Program

ALIGNMENT = 16  # bytes; the widest load of a thread


@dataclass(frozen=True)
class Precision:
    """PyTorch's flags that allow float32 operators to use TF32."""

    conv_tf32: bool  # torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32; PyTorch's default
    matmul_tf32: bool  # torch.backends.cuda.matmul.…, torch.set_float32_matmul_precision

    @classmethod
    def from_flags(cls) -> Precision:
        """Returns PyTorch's current flags."""
        backends: Any = torch.backends
        return cls(backends.cudnn.conv.fp32_precision == "tf32", backends.cuda.matmul.fp32_precision == "tf32")

    def arithmetic(self, kind: str, dtype: torch.dtype, machine: Machine) -> str:
        """Returns the dtype of a kernel's multiplications, as named in ``Machine.flops_per_s``.

        A dtype without a rate in ``Machine.flops_per_s`` is emulated in float32.

        Args:
            kind: The kernel's kind.
            dtype: Dtype of its operands.
            machine: Machine whose rates count.

        Returns:
            A key of ``Machine.flops_per_s``, or "float32".
        """
        tf32 = self.conv_tf32 if kind == "conv" else self.matmul_tf32
        if dtype == torch.float32 and tf32 and kind in ("conv", "matmul", "rnn") and "tf32" in machine.flops_per_s:
            return "tf32"
        name = str(dtype).removeprefix("torch.")
        return name if name in machine.flops_per_s else "float32"


def kernel_ns(
    kernel: Kernel, nodes: Sequence[fx.Node], machine: Machine, precision: Precision, multi_tensor: bool = False
) -> int:
    """Returns the modeled duration of a captured kernel in ns.

    Args:
        kernel: The kernel.
        nodes: The kernel's operator, followed by its getitems.
        machine: Machine with the rates of the model.
        precision: Flags that allow TF32.
        multi_tensor: Whether the kernel updates many parameters, or is a part of such a kernel.

    Returns:
        The duration in ns; 0 for a kernel that launches nothing.

    Raises:
        FormatError: If the machine has no rate for float32.
    """
    dtype = compute_dtype(kernel, nodes, machine, precision)
    if not dtype:
        return 0  # an allocation or a marker launches nothing
    node = nodes[0]
    times = machine.kernel_times
    bandwidth = machine.memory_bytes_per_s
    if times is None:
        return machine.kernel_ns(kernel.kind, kernel.flops, kernel.bytes, dtype)
    name = node.target._overloadpacket.__name__
    if multi_tensor:
        launch_ns = times.launch_ns if name.startswith(("_foreach", "_fused")) else 0
        return launch_ns + round(kernel.bytes / (bandwidth * times.multi_tensor) * 1e9)
    is_backward = "backward" in name
    tensor_cores = dtype in ("tf32", "bfloat16", "float16")
    flops = kernel.flops or estimated_flops(kernel, nodes)
    rate = _rate(machine, dtype) if flops or kernel.kind == "conv" else 0
    matmul_share = times.matmul if tensor_cores else times.matmul_float32
    if kernel.kind == "conv":
        seconds = _convolution(kernel, node, times, rate, bandwidth, tensor_cores)
    elif kernel.kind == "matmul":
        share = matmul_share
        if "attention" in name and tensor_cores:
            share = times.attention_backward or times.attention if is_backward else times.attention
        elif name in ("mm", "addmm", "bmm", "baddbmm"):
            tile = 128 if tensor_cores else 64  # rows and columns that a thread block computes
            share *= _occupancy(node, times, tile)
            if times.unaligned and tensor_cores and not _has_aligned_rows(node):
                share *= times.unaligned
        seconds = kernel.bytes / (bandwidth * times.elementwise)
        if flops:
            seconds = max(seconds, flops / (rate * share))
    elif kernel.kind == "norm":
        seconds = _norm(kernel, node, times, bandwidth, is_backward)
    # PyTorch's softmax keeps rows of up to 1,024 elements in registers and reads them once.
    elif times.row_ns and "softmax" in name and (length := _softmax_length(node)) > 1024:
        seconds = _row_passes(kernel, node, times, bandwidth, 4 if is_backward else 3, length)
    elif times.columns and kernel.kind == "reduce" and _keeps_contiguous(node):
        seconds = kernel.bytes / (bandwidth * times.columns)
    elif kernel.kind == "pool" and "adaptive" not in name:
        share = times.pool_backward if is_backward else times.pool
        # The share was fitted to windows of nine elements.
        window = prod(_bound_arguments(node).get("kernel_size", (3, 3)))
        seconds = kernel.bytes / bandwidth * max(window / (9 * share), 1 / times.elementwise)
    else:
        is_lookup = name in ("embedding", "index_select", "gather", "index", "nll_loss_forward")
        moved_bytes = 2 * _nbytes(node) if is_lookup else kernel.bytes
        seconds = moved_bytes / (bandwidth * times.elementwise)
        is_pointwise = kernel.kind in ("elementwise", "activation", "dropout", "copy")
        if times.element_flops and is_pointwise and not _is_vectorized(node):
            elements = prod(_largest_meta(node).shape)
            seconds = max(seconds, elements * times.element_flops / _rate(machine, "float32"))
        if kernel.flops:
            seconds = max(seconds, kernel.flops / (rate * matmul_share))
    return times.launch_ns + round(seconds * 1e9)


def estimated_flops(kernel: Kernel, nodes: Sequence[fx.Node]) -> int:
    """Returns the FLOPs of a matrix product for which ``flops_of`` has no formula, from its shapes; 0 for others.

    A grouped product is counted as if its groups filled the dimension that they divide.
    """
    if (
        kernel.kind != "matmul"
        or kernel.flops
        or not nodes
        or not nodes[0].target._overloadpacket.__name__.endswith("mm")
    ):
        return 0
    bound = _bound_arguments(nodes[0])
    names = ("mat1", "batch1", "self"), ("mat2", "batch2")
    operands = (next((bound[name] for name in aliases if name in bound), None) for aliases in names)
    first, second = (getattr(operand, "meta", {}).get("tensor_meta") for operand in operands)
    if first is None or second is None:
        return 0
    # Groups of the first operand alone divide the columns of the second: each multiplies a part of them.
    rows = first.shape[-2:] if len(first.shape) > len(second.shape) else first.shape
    return 2 * prod(rows) * second.shape[-1]


def with_roofline(
    program: Program, machine: Machine, dtype: str = "float32", iteration_ns: int | None = None
) -> Program:
    """Returns the program with the roofline's duration (``Machine.kernel_ns``) for each kernel.

    Use it for a program without its capture; ``Captured.on`` also considers shapes and layouts. A kernel that touches
    no memory (an allocation, a marker) launches nothing and takes 0 ns.

    Args:
        dtype: Dtype whose peak FLOP rate is used.
        iteration_ns: Iteration time in ns to which durations are scaled (``scaled``).
        program: Program whose durations are replaced.
        machine: Machine whose roofline is used.

    Returns:
        The program with durations in ns.

    Raises:
        ValueError: If ``iteration_ns`` is not positive, or no kernel takes time.

    Source: Williams et al., "Roofline", CACM 52(4), 2009.
    """
    durations = [
        machine.kernel_ns(k.kind, k.flops, k.bytes, dtype) if k.flops or k.bytes else 0 for k in program.kernels
    ]
    return program.with_durations(scaled(durations, iteration_ns))


def compute_dtype(kernel: Kernel, nodes: Sequence[fx.Node], machine: Machine, precision: Precision) -> str:
    """Returns a kernel's compute dtype (``Precision.arithmetic``); "" if it launches nothing."""
    if not nodes or not (kernel.flops or kernel.bytes):
        return ""
    operands = (meta.dtype for meta in _metas(nodes[0]) if meta.dtype.is_floating_point)
    return precision.arithmetic(kernel.kind, next(operands, torch.float32), machine)


def _rate(machine: Machine, dtype: str) -> int:
    if not machine.flops_per_s.get(dtype):
        raise FormatError(
            f"machine.flops_per_s: {machine.name} has no figure for {dtype}; add it to the machine's file"
        )
    return machine.flops_per_s[dtype]


def _convolution(
    kernel: Kernel, node: fx.Node, times: KernelTimes, rate: int, bandwidth: int, tensor_cores: bool
) -> float:
    """Returns the duration of all passes of a convolution in seconds."""
    convolution_and_passes = convolution_of(node)
    if convolution_and_passes is None:  # grouped, transposed, 1-D or 3-D: one pass over the operands, no tensor cores
        return max(kernel.flops / (rate * times.conv_float32), kernel.bytes / (bandwidth * times.conv_bandwidth))
    convolution, passes = convolution_and_passes
    is_nhwc = _is_channels_last(node)
    seconds = 0.0
    for conv_pass in passes:
        arithmetic, traffic, converted_bytes = _pass(convolution, conv_pass, times, tensor_cores, is_nhwc)
        seconds += max(arithmetic / rate, traffic / (bandwidth * times.conv_bandwidth))
        if not is_nhwc:
            seconds += converted_bytes / (bandwidth * times.conv_bandwidth)
    return seconds


def _pass(c: Convolution, part: Pass, times: KernelTimes, tensor_cores: bool, is_nhwc: bool) -> tuple[float, int, int]:
    """Returns a pass's FLOPs divided by their share of the rate, and the bytes of operands and layout conversions."""
    images = c.itemsize * c.batch * c.channels * prod(c.image)
    outputs = c.itemsize * c.batch * c.filters * prod(c.output)
    filters = c.itemsize * c.channels * c.filters * prod(c.filter)
    flops = 2 * c.batch * c.filters * prod(c.output) * c.channels * prod(c.filter)
    traffic = images + outputs + filters
    is_forward = part == "forward"
    if not tensor_cores:
        is_winograd = c.filter == (3, 3) and c.stride == (1, 1)
        share = times.winograd if is_winograd else times.conv_float32 if is_forward else times.conv_float32_backward
        return flops / share, traffic, 0
    if c.filter == (1, 1) and c.stride == (1, 1):
        share = times.conv_1x1 if is_forward else times.conv_1x1_backward
        is_converted = part == "filters" and c.channels > c.filters
        return flops / share, traffic, 2 * (images + outputs) * is_converted
    share = times.conv if is_forward else times.conv_backward
    fewest_channels = min(c.channels, c.filters)
    if times.unaligned and is_nhwc and c.itemsize * fewest_channels % ALIGNMENT:  # conversions pad the channels
        share = share * times.unaligned
        fewest_channels = max(c.channels, c.filters)
    idle_factor = 1 + times.conv_channels / fewest_channels
    return flops / share * idle_factor, traffic, 2 * (images + outputs)


def _norm(kernel: Kernel, node: fx.Node, times: KernelTimes, bandwidth: int, is_backward: bool) -> float:
    """Returns the duration of a normalization in seconds."""
    if "batch_norm" not in str(node.target):
        return _row_passes(kernel, node, times, bandwidth, 5 if is_backward else 2, _normalized_length(node))
    meta = _largest_meta(node)
    nbytes = prod(meta.shape) * meta.dtype.itemsize
    if times.columns and meta.dtype == torch.bfloat16 and _is_channels_last(node):  # PyTorch's kernels, not cuDNN's
        # Forward, Welford's algorithm updates three values per element: count, mean and sum of squares.
        summed, mapped = (2, 3) if is_backward else (3, 2)
        return nbytes / bandwidth * (summed / times.columns + mapped / times.elementwise)
    moved_bytes = max(nbytes * (5 if is_backward else 3), kernel.bytes)
    blocks = meta.shape[1] / times.multiprocessors if len(meta.shape) > 1 else float("inf")
    return moved_bytes / (bandwidth * times.norm * (1 - exp(-blocks / times.norm_channels)))


def _row_passes(kernel: Kernel, node: fx.Node, times: KernelTimes, bandwidth: int, passes: int, length: int) -> float:
    """Returns the seconds of ``passes`` over a tensor with one block per row of ``length`` elements (0: no rows)."""
    meta = _largest_meta(node)
    elements = prod(meta.shape)
    moved_bytes = max(passes * elements * meta.dtype.itemsize, kernel.bytes)
    rows = elements // length if length else 0
    return max(moved_bytes / (bandwidth * times.norm), passes * rows * times.row_ns / times.multiprocessors * 1e-9)


def _normalized_length(node: fx.Node) -> int:
    """Returns the row length of layer norm or RMS norm; 0 for other normalizations."""
    sizes = _bound_arguments(node).get("normalized_shape", ())
    return prod(sizes) if sizes and all(isinstance(size, int) for size in sizes) else 0


def _softmax_length(node: fx.Node) -> int:
    """Returns the row length of softmax; 0 if it is not over the last dimension."""
    shape = _largest_meta(node).shape
    dim = _bound_arguments(node)["dim"]
    return shape[-1] if shape and dim % len(shape) == len(shape) - 1 else 0


def _keeps_contiguous(node: fx.Node) -> bool:
    """Returns whether a reduction keeps the dimension in which its input is contiguous."""
    source = _metas(node)[0]
    dims = _bound_arguments(node).get("dim")
    if not isinstance(dims, (list, tuple)) or not dims or not source.shape:
        return False
    reduced = {dim % len(source.shape) for dim in dims}
    sizes = enumerate(zip(source.shape, source.stride, strict=True))
    return any(stride == 1 and size > 1 and i not in reduced for i, (size, stride) in sizes)


def _is_vectorized(node: fx.Node) -> bool:
    """Returns whether an element-wise kernel loads several elements per instruction.

    PyTorch does so for dense tensors of one layout and one type, and for the conversion from float32 to half precision.
    """
    metas = [meta for meta in _metas(node) if prod(meta.shape) > 1]
    name = node.target._overloadpacket.__name__
    if name in ("cat", "stack"):
        return all(map(_is_contiguous, metas))
    if not all(map(_is_dense, metas)):
        return False
    layouts = {tuple((n, s) for n, s in zip(m.shape, m.stride, strict=True) if n > 1) for m in metas}
    floats = {meta.dtype for meta in metas if meta.dtype.is_floating_point}
    if len(layouts) > 1 or len(floats) <= 1:
        return len(layouts) <= 1
    is_narrowed = name in ("_to_copy", "copy_") and torch.float64 not in floats
    return is_narrowed and node.all_input_nodes[-1].meta["tensor_meta"].dtype == torch.float32


def _is_dense(meta: Any) -> bool:
    """Returns whether a tensor's elements fill a range of memory."""
    return sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True)) + 1 == prod(meta.shape)


def _is_contiguous(meta: Any) -> bool:
    """Returns whether a tensor is dense, its last dimension the fastest."""
    strides = [stride for size, stride in zip(meta.shape, meta.stride, strict=True) if size > 1]
    return _is_dense(meta) and strides == sorted(strides, reverse=True)


def _has_aligned_rows(node: fx.Node) -> bool:
    """Returns whether the rows of a product's operands and result begin at multiples of ALIGNMENT."""
    strides = ((stride, meta.dtype.itemsize) for meta in _metas(node) for stride in meta.stride)
    return all(stride * itemsize % ALIGNMENT == 0 for stride, itemsize in strides if stride > 1)


def _occupancy(node: fx.Node, times: KernelTimes, tile: int) -> float:
    """Returns the fraction of multiprocessors that a matrix product's tiles occupy."""
    *batch, m, n = node.meta["tensor_meta"].shape
    return min(1.0, prod(batch) * ceil(m / tile) * ceil(n / tile) / times.multiprocessors)


def _bound_arguments(node: fx.Node) -> dict[str, Any]:
    return bind_arguments(node.target, node.args, node.kwargs)


def _metas(node: fx.Node) -> list[Any]:
    """Returns metadata of the tensors among a node's arguments, including those in lists, and of a single result."""
    metas = (n.meta.get("tensor_meta") for n in (*node.all_input_nodes, node))
    return [meta for meta in metas if hasattr(meta, "dtype")]


def _largest_meta(node: fx.Node) -> Any:
    return max(_metas(node), key=lambda meta: prod(meta.shape))


def _nbytes(node: fx.Node) -> int:
    """Returns the bytes of a node's (first) result."""
    meta = node.meta.get("tensor_meta")
    meta = meta[0] if isinstance(meta, (list, tuple)) and not hasattr(meta, "dtype") else meta
    return prod(meta.shape) * meta.dtype.itemsize if hasattr(meta, "dtype") else 0


def _is_channels_last(node: fx.Node) -> bool:
    return bool(_bound_arguments(node)["input"].meta["tensor_meta"].memory_format == torch.channels_last)
