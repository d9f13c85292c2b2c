"""KernelTimes: coefficients of the kernel-time model, fitted to measurements of one GPU architecture.

The model needs operator shapes and is implemented in executor/capture/durations.py. A share is relative to the
machine's peak: ``flops_per_s`` for arithmetic, ``memory_bytes_per_s`` for traffic. experiments/measured/README.md
lists the measurements and the error of each coefficient.
"""

from __future__ import annotations

from dataclasses import dataclass, fields as dataclass_fields
from itertools import accumulate, pairwise

from simulator.files import FormatError
from simulator.settings import read


@dataclass(frozen=True)
class KernelTimes:
    """Coefficients of one GPU; shares of a peak unless a comment states otherwise.

    Raises:
        FormatError: A coefficient is out of range.
    """

    source: str  # measurements that the coefficients are fitted to; `plan` prints it
    error: float  # standard deviation of ln(measured / modeled) over held-out kernels of at least 20 us
    step_error: float  # bound on the relative error of the sum over a step
    launch_ns: int  # duration of the shortest kernels
    multiprocessors: int  # a count
    elementwise: float  # bandwidth of elementwise kernels, which read and write each byte once
    multi_tensor: float  # bandwidth of updates of many parameters in one kernel (foreach, fused)
    norm: float  # bandwidth of one pass of a normalization
    norm_channels: float  # channels per multiprocessor with which batch norm reaches 1 - 1/e of ``norm``
    pool: float  # bandwidth of pooling with 3 x 3 windows
    pool_backward: float
    # Convolutions on tensor cores (TF32, half precision): shares of their rate.
    conv: float
    conv_backward: float
    conv_1x1: float  # stride 1, which needs no layout conversion
    conv_1x1_backward: float
    conv_bandwidth: float  # bandwidth of operands and of their conversions to NHWC and back
    conv_channels: float  # number of channels at which half the rate is reached
    # Convolutions without tensor cores: shares of float32's rate.
    conv_float32: float
    conv_float32_backward: float
    winograd: float  # 3 x 3 filters of stride 1, instead of the two above; may exceed 1
    # Matrix products.
    matmul: float  # on tensor cores
    matmul_float32: float
    attention: float  # fused, on tensor cores
    # Optional. 0: not measured on this GPU; the rule that uses the coefficient is skipped.
    attention_backward: float = 0.0  # fused, on tensor cores; 0: ``attention``
    unaligned: float = 0.0  # relative rate of matmuls and convolutions whose rows are not multiples of 16 bytes
    columns: float = 0.0  # bandwidth of sums that keep the contiguous dimension (bias gradients, batch norm in NHWC)
    row_ns: float = 0.0  # least ns per row, pass and multiprocessor of layer norm, RMS norm and softmax
    element_flops: float = 0.0  # float32 FLOPs that take as long as one element of a kernel that is not vectorized

    def __post_init__(self) -> None:
        ranges = {
            "launch_ns": (-1, 1_000_000),
            "multiprocessors": (0, 1024),
            "winograd": (0.0, 4.0),
            "conv_channels": (0.0, 1024.0),
            "norm_channels": (0.0, 64.0),
            "error": (0.0, 3.0),
            "row_ns": (0.0, 100_000.0),
            "element_flops": (0.0, 100_000.0),
        }
        for entry in dataclass_fields(self):
            value = getattr(self, entry.name)
            low, high = ranges.get(entry.name, (0.0, 1.0))
            optional = value == 0 and entry.default == 0
            if entry.name != "source" and not optional and not low < value <= high:
                raise FormatError(
                    f"machine.kernel_times.{entry.name}: expected a number in ({low:g}, {high:g}], got {value!r}"
                )

    @classmethod
    def from_dict(cls, data: object) -> KernelTimes:
        """Reads a dictionary of fields; fields with a default are optional.

        Raises:
            FormatError: An entry is malformed; the message names the first.
        """
        return read(cls, data, "machine.kernel_times")


def scaled(durations: list[int], iteration_ns: int | None) -> list[int]:
    """Scales durations so that their sum is exactly ``iteration_ns``; returns them unchanged for None.

    Args:
        durations: Duration of each kernel in ns.
        iteration_ns: Duration of an iteration in ns, for example measured.

    Returns:
        The duration of each kernel in ns.

    Raises:
        ValueError: ``iteration_ns`` is not positive, or all durations are 0.
    """
    if iteration_ns is None:
        return durations
    total = sum(durations)
    if iteration_ns < 1 or total < 1:
        raise ValueError(f"iteration_ns: cannot scale {total} ns of kernels to {iteration_ns} ns")
    # Rounding ends, not durations, keeps the sum exact.
    ends = [clock * iteration_ns // total for clock in accumulate(durations, initial=0)]
    return [b - a for a, b in pairwise(ends)]
