"""How long a kernel takes on a machine: a model of time per kind, from the operator's shapes and types.

``kernel_ns`` is the launch plus the longer of arithmetic and traffic, each at the share of the machine's peak that was
measured for its kind (``Machine.kernel_times``; a machine without them has one roofline, ``Machine.kernel_ns``):

1. Convolutions on tensor cores: cuDNN works on NHWC, so that tensors in NCHW are converted before and after each of the
   calls (forward, gradient of images, gradient of filters); not for 1x1 filters of stride 1, but where the gradient
   of filters has more channels in than out. Few channels leave tensor cores idle.
2. Convolutions in float32 are not converted; 3x3 filters of stride 1 take Winograd's algorithm.
3. Matrix products run in tiles; fewer tiles than multiprocessors leave the others idle.
4. Batch norm passes over its tensors three times forward and five times backward, a block of threads per channel.
5. Pooling takes a time per element of its windows; lookups touch the rows that they look up.
6. Updates by ``torch.optim`` are multi-tensor kernels, as on a GPU, unless ``foreach`` is False; one that was captured
   for a single parameter is timed as a part of one, without a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, prod
from typing import Any

import torch
from torch import fx

from executor.capture.algorithms import Convolution, Pass, convolution_of
from executor.capture.operators import arguments
from simulator.files import FormatError
from simulator.kernel_times import KernelTimes
from simulator.machine import Machine
from simulator.program import Kernel, Program

TILE, TILE_FLOAT32 = 128, 64  # rows and columns of a matrix product's tile, on tensor cores and without
WINDOW = 9  # elements of the window that pooling was measured with
LOOKUPS = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward"})
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
TENSOR_CORES = frozenset({"tf32", "bfloat16", "float16"})


@dataclass(frozen=True)
class Precision:
    """What PyTorch's flags let float32 operators run in."""

    conv_tf32: bool  # torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32; PyTorch's default
    matmul_tf32: bool  # torch.backends.cuda.matmul.…, torch.set_float32_matmul_precision

    @classmethod
    def now(cls) -> Precision:
        """PyTorch's flags as they are set now."""
        backends: Any = torch.backends
        return cls(backends.cudnn.conv.fp32_precision == "tf32", backends.cuda.matmul.fp32_precision == "tf32")

    def arithmetic(self, kind: str, dtype: torch.dtype, machine: Machine) -> str:
        """The type that a kernel of ``kind`` multiplies in, as ``Machine.flops_per_s`` names it; float32 where the
        machine has no figure for its own, as it is then emulated."""
        tf32 = self.conv_tf32 if kind == "conv" else self.matmul_tf32
        if dtype == torch.float32 and tf32 and kind in ("conv", "matmul", "rnn") and "tf32" in machine.flops_per_s:
            return "tf32"
        name = str(dtype).removeprefix("torch.")
        return name if name in machine.flops_per_s else "float32"


def kernel_ns(
    kernel: Kernel, nodes: Sequence[fx.Node], machine: Machine, precision: Precision, multi_tensor: bool = False
) -> int:
    """The time of a captured kernel.

    Args:
        nodes: its operator first.
        multi_tensor: it is a kernel that updates many parameters, or a part of one.

    Raises:
        FormatError: the machine has no figure for float32.
    """
    if not nodes or not (kernel.flops or kernel.bytes):
        return 0  # nothing is launched
    dtype = precision.arithmetic(kernel.kind, _dtype(nodes[0]), machine)
    times = machine.kernel_times
    if times is None:
        return machine.kernel_ns(kernel.kind, kernel.flops, kernel.bytes, dtype)
    bandwidth = machine.memory_bytes_per_s
    name = nodes[0].target._overloadpacket.__name__  # type: ignore[union-attr]
    if multi_tensor:
        launch_ns = times.launch_ns if name.startswith(("_foreach", "_fused")) else 0
        return launch_ns + round(kernel.bytes / (bandwidth * times.multi_tensor) * 1e9)
    backward = "backward" in name
    rate = machine.flops_per_s.get(dtype, 0)
    if kernel.flops and not rate:
        raise FormatError(f"machine.flops_per_s: {machine.name} has no figure for {dtype}")
    if kernel.kind == "conv":
        seconds = _convolution(kernel, nodes[0], times, rate, bandwidth, dtype)
    elif kernel.kind == "matmul":
        share = times.matmul if dtype in TENSOR_CORES else times.matmul_float32
        if "attention" in name:
            share = times.attention if dtype in TENSOR_CORES else times.matmul_float32
        elif name in PRODUCTS:
            share *= _occupied(nodes[0], times, TILE if dtype in TENSOR_CORES else TILE_FLOAT32)
        seconds = max(kernel.flops / (rate * share), kernel.bytes / (bandwidth * times.elementwise))
    elif kernel.kind == "norm":
        seconds = _norm(kernel, nodes[0], times, backward) / bandwidth
    elif kernel.kind == "pool" and "adaptive" not in name:
        share = times.pool_backward if backward else times.pool
        window = prod(_given(nodes[0]).get("kernel_size", (3, 3)))
        seconds = kernel.bytes / bandwidth * max(window / (WINDOW * share), 1 / times.elementwise)
    else:
        moved = 2 * _nbytes(nodes[0]) if name in LOOKUPS else kernel.bytes
        seconds = moved / (bandwidth * times.elementwise)
        if kernel.flops:
            share = times.matmul if dtype in TENSOR_CORES else times.matmul_float32
            seconds = max(seconds, kernel.flops / (rate * share))
    return times.launch_ns + round(seconds * 1e9)


def arithmetic(program: Program, nodes: Sequence[Sequence[fx.Node]], machine: Machine, precision: Precision) -> str:
    """A sentence: in which types a captured program's convolutions and products are timed; "" where it has none."""
    found: dict[str, set[str]] = {}
    for kernel, name in zip(program.kernels, types(program, nodes, machine, precision), strict=True):
        if kernel.flops and name:
            kind = "convolutions" if kernel.kind == "conv" else "matrix products"
            found.setdefault(kind, set()).add(name)
    parts = [
        f"{kind} in {' and '.join(sorted(types))}".replace("tf32", "TF32") for kind, types in sorted(found.items())
    ]
    return f"They are timed with {', '.join(parts)}, as the step's types and PyTorch's flags have it." if parts else ""


def types(
    program: Program, nodes: Sequence[Sequence[fx.Node]], machine: Machine, precision: Precision
) -> tuple[str, ...]:
    """Per kernel the type that it computes in, as ``Precision.arithmetic`` names it; "" where nothing is launched."""
    return tuple(
        precision.arithmetic(kernel.kind, _dtype(own[0]), machine) if own and (kernel.flops or kernel.bytes) else ""
        for kernel, own in zip(program.kernels, nodes, strict=True)
    )


def _convolution(kernel: Kernel, node: fx.Node, times: KernelTimes, rate: int, bandwidth: int, dtype: str) -> float:
    """Seconds of all passes of a convolution."""
    found = convolution_of(node)
    if found is None:  # grouped, transposed, 1-D or 3-D: as it moves its operands once, without tensor cores
        return max(kernel.flops / (rate * times.conv_float32), kernel.bytes / (bandwidth * times.conv_bandwidth))
    convolution, passes = found
    nhwc = _channels_last(node)
    seconds = 0.0
    for what in passes:
        arithmetic, traffic, converted = _pass(convolution, what, times, dtype in TENSOR_CORES)
        seconds += max(arithmetic / rate, traffic / (bandwidth * times.conv_bandwidth))
        if not nhwc:
            seconds += converted / (bandwidth * times.conv_bandwidth)
    return seconds


def _pass(c: Convolution, what: Pass, times: KernelTimes, tensor_cores: bool) -> tuple[float, int, int]:
    """FLOPs over the share of the rate at which they run, bytes of operands, and of conversions of their layout."""
    images = c.itemsize * c.batch * c.channels * prod(c.image)
    outputs = c.itemsize * c.batch * c.filters * prod(c.output)
    filters = c.itemsize * c.channels * c.filters * prod(c.filter)
    flops = 2 * c.batch * c.filters * prod(c.output) * c.channels * prod(c.filter)
    traffic = images + outputs + filters
    forward = what == "forward"
    if not tensor_cores:
        winograd = c.filter == (3, 3) and c.stride == (1, 1)
        share = times.winograd if winograd else times.conv_float32 if forward else times.conv_float32_backward
        return flops / share, traffic, 0
    if c.filter == (1, 1) and c.stride == (1, 1):
        share = times.conv_1x1 if forward else times.conv_1x1_backward
        converted = what == "filters" and c.channels > c.filters
        return flops / share, traffic, 2 * (images + outputs) * converted
    share = times.conv if forward else times.conv_backward
    idle = 1 + times.conv_channels / min(c.channels, c.filters)
    return flops / share * idle, traffic, 2 * (images + outputs)


def _norm(kernel: Kernel, node: fx.Node, times: KernelTimes, backward: bool) -> float:
    """Bytes over the share of the bandwidth at which they pass."""
    meta = _largest(node)
    nbytes = prod(meta.shape) * meta.dtype.itemsize
    batch_norm = "batch_norm" in str(node.target)
    moved = max(nbytes * ((5 if backward else 3) if batch_norm else (5 if backward else 2)), kernel.bytes)
    blocks = meta.shape[1] / times.multiprocessors if batch_norm and len(meta.shape) > 1 else float("inf")
    return moved / (times.norm * (1 - exp(-blocks / times.norm_channels)))


def _occupied(node: fx.Node, times: KernelTimes, tile: int) -> float:
    """The share of the multiprocessors that a matrix product has tiles for."""
    *batch, m, n = node.meta["tensor_meta"].shape
    return min(1.0, prod(batch) * ceil(m / tile) * ceil(n / tile) / times.multiprocessors)


def _given(node: fx.Node) -> dict[str, Any]:
    return {argument.name: value for argument, value in arguments(node.target, node.args, node.kwargs)}


def _metas(node: fx.Node) -> list[Any]:
    """Of its arguments, lists of them included."""
    found = (n.meta.get("tensor_meta") for n in node.all_input_nodes)
    return [meta for meta in found if hasattr(meta, "dtype")]


def _largest(node: fx.Node) -> Any:
    """The largest of its arguments and result."""
    own = [meta] if hasattr(meta := node.meta.get("tensor_meta"), "dtype") else []
    return max(_metas(node) + own, key=lambda meta: prod(meta.shape))


def _dtype(node: fx.Node) -> torch.dtype:
    """The type of its first argument of floating-point numbers."""
    own = [meta] if hasattr(meta := node.meta.get("tensor_meta"), "dtype") else []
    return next((m.dtype for m in _metas(node) + own if m.dtype.is_floating_point), torch.float32)


def _nbytes(node: fx.Node) -> int:
    """Of its result, or the first of its results."""
    meta = node.meta.get("tensor_meta")
    meta = meta[0] if isinstance(meta, (list, tuple)) and not hasattr(meta, "dtype") else meta
    return prod(meta.shape) * meta.dtype.itemsize if hasattr(meta, "dtype") else 0


def _channels_last(node: fx.Node) -> bool:
    meta = _given(node)["input"].meta["tensor_meta"]
    return bool(meta.memory_format == torch.channels_last)
