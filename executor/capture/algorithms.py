"""Models cuDNN's convolution algorithms as ``Kernel.variants`` of captured kernels.

The algorithms are implicit GEMM, GEMM (im2col), FFT and Winograd F(4x4, 3x3). Each is a sequence of kernels. Its
workspace follows exactly from the shapes. Its duration is the sum of its kernels' rooflines (``Machine.kernel_ns``).
Notation: N images, C input and K output channels, images of H x W and P x Q, filters of R x S, elements of 4 bytes.
executor/capture/README.md has sources, formulas and assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Literal

import torch
from torch import fx

from executor.capture.operators import bind_arguments
from simulator.machine import Machine
from simulator.program import Program

INDEXING = 24  # instructions per element of the unrolled matrix and tile

Pass = Literal["forward", "images", "filters"]  # the output, and the gradients of images and of filters
Stage = tuple[float, float]  # FLOPs, bytes moved


@dataclass(frozen=True)
class Convolution:
    """A 2-D convolution without groups, transposition or dilation."""

    batch: int  # images
    channels: int  # of the input
    image: tuple[int, int]  # height and width of the input; likewise below
    filters: int  # channels of the output
    filter: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    itemsize: int = 4  # bytes per number

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the output."""
        sizes = zip(self.image, self.filter, self.padding, self.stride, strict=True)
        height, width = ((n + 2 * p - r) // u + 1 for n, r, p, u in sizes)
        return height, width


@dataclass(frozen=True)
class Algorithm:
    """One algorithm for one pass of a convolution."""

    name: str
    workspace: int  # bytes
    stages: tuple[Stage, ...]  # the kernels it launches

    def time_ns(self, machine: Machine, dtype: str = "float32") -> int:
        """Returns the sum of its kernels' roofline durations in ns."""
        return sum(machine.kernel_ns("conv", round(flops), round(nbytes), dtype) for flops, nbytes in self.stages)


def algorithms(conv: Convolution, conv_pass: Pass) -> list[Algorithm]:
    """Returns all algorithms that apply to one pass."""
    n = conv.batch
    c = conv.channels
    k = conv.filters
    item = conv.itemsize
    taps = prod(conv.filter)
    pixels = prod(conv.output)
    tensors = item * n * c * prod(conv.image), item * c * k * taps, item * n * k * pixels  # images, filters, outputs
    flops = 2 * n * k * pixels * c * taps
    # For the gradient of images, the outputs are unrolled, and the input channels are those of the result.
    unrolled, result = (k, c) if conv_pass == "images" else (c, k)
    tiles = -(-result // 128)  # a thread block computes 128 output channels
    indexing = 2 * INDEXING * n * pixels * taps * unrolled * tiles
    candidates = [Algorithm("implicit GEMM", 0, ((flops + indexing, sum(tensors)),))]

    matrix = item * n * pixels * c * taps
    if taps == 1 and conv.stride == (1, 1) and conv.padding == (0, 0):
        candidates.append(Algorithm("GEMM", 0, ((flops, sum(tensors)),)))
    else:  # the matrix is unrolled from the images and read, or written and summed into their gradient
        product = flops, matrix + tensors[1] + tensors[2]
        candidates.append(Algorithm("GEMM", matrix, ((0, tensors[0] + matrix), product)))

    padded = [size + 2 * p for size, p in zip(conv.image, conv.padding, strict=True)]
    pads_within_filter = all(p < r for p, r in zip(conv.padding, conv.filter, strict=True))
    if conv.stride == (1, 1) and pads_within_filter and max(padded) <= 256:
        height, width = (1 << (size - 1).bit_length() for size in padded)
        planes = n * c, c * k, n * k
        bins = height * (width // 2 + 1)
        spectra = [2 * item * bins * count for count in planes]
        transform_flops = [2.5 * height * width * log2(height * width) * count for count in planes]
        candidates.append(_transformed("FFT", tensors, spectra, transform_flops, 8 * bins * n * c * k))

    if conv.stride == (1, 1) and conv.filter == (3, 3):
        tiled = conv.image if conv_pass == "images" else conv.output
        tiles = n * prod(-(-size // 4) for size in tiled)
        counts = tiles * c, c * k, tiles * k
        spectra = [36 * item * count for count in counts]
        # The gradient of images is a convolution of the outputs' gradient, so the transforms swap roles.
        tile_flops = (100.0, 72.0, 144.0) if conv_pass == "images" else (144.0, 72.0, 100.0)
        transform_flops = [flop * count for flop, count in zip(tile_flops, counts, strict=True)]
        candidates.append(_transformed("Winograd", tensors, spectra, transform_flops, 2 * 36 * tiles * c * k))
    return candidates


def _transformed(name: str, tensors: tuple[int, ...], spectra: list[int], work: list[float], product: int) -> Algorithm:
    """Returns an algorithm that transforms both operands, multiplies them, and transforms the result back."""
    transforms = [(w, t + s) for w, t, s in zip(work, tensors, spectra, strict=True)]
    return Algorithm(name, sum(spectra), (*transforms, (product, sum(spectra))))


def pareto_front(
    conv: Convolution, passes: tuple[Pass, ...], machine: Machine, dtype: str = "float32"
) -> list[tuple[int, int]]:
    """Returns the Pareto front of (time in ns, workspace in bytes) over algorithms of all passes, by workspace.

    Args:
        conv: The convolution.
        passes: Passes that the kernel runs, one after the other.
        machine: Machine with the rates.
        dtype: Type of the arithmetic.

    Returns:
        Sum of the times of the passes in ns, and the workspace in bytes that they share, by increasing workspace.
    """
    fronts = [[(a.time_ns(machine, dtype), a.workspace) for a in algorithms(conv, conv_pass)] for conv_pass in passes]
    points: list[tuple[int, int]] = []
    for limit in sorted({w for choices in fronts for _, w in choices}):
        time = sum(min(t for t, w in choices if w <= limit) for choices in fronts)
        if not points or time < points[-1][0]:
            points.append((time, limit))
    return points


def with_algorithms(
    program: Program,
    convolutions: Mapping[int, tuple[Convolution, tuple[Pass, ...]]],
    machine: Machine,
    dtype: str = "float32",
) -> Program:
    """Returns the program with the algorithms of its convolutions as variants, sorted by workspace.

    A kernel's own duration and workspace are those of its fastest algorithm, which is also its last variant. Kernels
    missing in ``convolutions`` keep their duration and get neither workspace nor variants.

    Args:
        program: A program with durations for ``machine``.
        convolutions: The convolution and its passes for each kernel.
        machine: Machine whose figures give the times.
        dtype: Dtype of the convolutions.
    """
    choices = {k: pareto_front(*conv_and_passes, machine, dtype) for k, conv_and_passes in sorted(convolutions.items())}
    captured_ns = sum(program.kernels[k].duration_ns for k in choices)
    modeled_ns = sum(points[-1][0] for points in choices.values())
    kernels = [replace(kernel, workspace=0, variants=()) for kernel in program.kernels]
    clock = 0
    for k, points in choices.items():
        fastest, workspace = points[-1]
        # Rounding ends, not durations, keeps the sum exact.
        begin = clock
        clock = clock + fastest
        best = clock * captured_ns // modeled_ns - begin * captured_ns // modeled_ns, workspace
        slower = [(t * captured_ns // modeled_ns, w) for t, w in points[:-1]]
        variants = (*(variant for variant in slower if variant[0] > best[0]), best)
        kernels[k] = replace(
            kernels[k], duration_ns=best[0], workspace=workspace, variants=variants if len(variants) > 1 else ()
        )
    return Program(program.name, program.tensors, tuple(kernels))


def convolution_of(node: fx.Node) -> tuple[Convolution, tuple[Pass, ...]] | None:
    """Returns the convolution and passes of a captured operator; None if the model does not cover it."""
    aten = torch.ops.aten
    if node.target not in (aten.convolution.default, aten.convolution_backward.default):
        return None
    arguments = bind_arguments(node.target, node.args, node.kwargs)
    passes: list[Pass] = ["forward"]
    if "output_mask" in arguments:
        gradients: tuple[Pass, Pass] = ("images", "filters")
        passes = [name for name, is_needed in zip(gradients, arguments["output_mask"], strict=False) if is_needed]
    x, weight = (arguments[key].meta.get("tensor_meta") for key in ("input", "weight"))
    is_2d = passes and x is not None and weight is not None and len(x.shape) == 4
    if not is_2d or arguments["transposed"] or arguments["groups"] != 1 or any(d != 1 for d in arguments["dilation"]):
        return None
    padding, stride = (tuple(arguments[key]) * (2 // len(arguments[key])) for key in ("padding", "stride"))
    (batch, channels, *image), (filters, _, *size) = x.shape, weight.shape
    itemsize = x.dtype.itemsize
    return Convolution(batch, channels, tuple(image), filters, tuple(size), padding, stride, itemsize), tuple(passes)
