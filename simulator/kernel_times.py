"""KernelTimes: the coefficients of a model of kernel times, fitted to one architecture's published measurements.

The model itself needs the operators' shapes and stands in executor/capture/kernel_times.py; here is what a machine's
file says of its GPU. A share is of the machine's peak: of ``flops_per_s`` for arithmetic, of ``memory_bytes_per_s``
for traffic. What each is fitted to, and with which error: experiments/measured/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields as dataclass_fields

from simulator.files import FormatError, fields


@dataclass(frozen=True)
class KernelTimes:
    """Shares without unit; ``multiprocessors`` is a count.

    Raises:
        FormatError: a figure is out of range.
    """

    source: str  # what they are fitted to, as `plan` prints it
    error: float  # standard deviation of ln(measured / modelled), kernels of at least 20 us, shapes not fitted to
    step_error: float  # by how much the sum over a step may be off, of itself
    launch_ns: int  # of kernels that follow one another: the time of the shortest
    multiprocessors: int
    elementwise: float  # of the bandwidth: whatever reads and writes each byte once
    multi_tensor: float  # of the bandwidth: updates of many parameters in one kernel (foreach, fused)
    norm: float  # of the bandwidth: normalisations, in passes over their tensors
    norm_channels: float  # channels per multiprocessor with which batch norm reaches 1 - 1/e of that
    pool: float  # of the bandwidth, of pooling of 3 x 3 windows
    pool_backward: float
    # Convolutions on tensor cores (TF32, half precision), of their rate.
    conv: float
    conv_backward: float
    conv_1x1: float  # of stride 1, which need no other layout
    conv_1x1_backward: float
    conv_bandwidth: float  # of the bandwidth: operands, and conversions of their layout to NHWC and back
    conv_channels: float  # with so many channels half the rate is reached
    # Convolutions without tensor cores, of float32's rate.
    conv_float32: float
    conv_float32_backward: float
    winograd: float  # 3 x 3 filters of stride 1, in place of both; more than 1 is possible
    # Matrix products.
    matmul: float  # on tensor cores
    matmul_float32: float
    attention: float  # fused, on tensor cores

    def __post_init__(self) -> None:
        for entry in dataclass_fields(self):
            value = getattr(self, entry.name)
            if entry.name == "source":
                continue
            low, high = _RANGES.get(entry.name, (0.0, 1.0))
            if not low < value <= high:
                raise FormatError(
                    f"machine.kernel_times.{entry.name}: expected a number in ({low:g}, {high:g}], got {value!r}"
                )

    @classmethod
    def from_dict(cls, data: object) -> KernelTimes:
        """Reads a dictionary with all fields.

        Raises:
            FormatError: naming the first malformed entry.
        """
        kinds = {entry.name: _TYPES.get(entry.name, float) for entry in dataclass_fields(cls)}
        return cls(**fields(data, "machine.kernel_times", kinds, {}))


def scaled(durations: list[int], iteration_ns: int | None) -> list[int]:
    """The durations, with their sum exactly ``iteration_ns``, e.g. a measured iteration time, where that is given: they
    are then only the proportions.

    Raises:
        ValueError: ``iteration_ns`` is not positive, or no kernel takes time.
    """
    if iteration_ns is None:
        return durations
    total = sum(durations)
    if iteration_ns < 1 or total < 1:
        raise ValueError(f"iteration_ns: cannot scale {total} ns of kernels to {iteration_ns} ns")
    ends, clock = [0], 0
    for duration in durations:
        clock += duration
        ends.append(clock * iteration_ns // total)  # rounding ends, not durations, keeps the sum exact
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


_TYPES: dict[str, type] = {"source": str, "launch_ns": int, "multiprocessors": int}
_RANGES = {"launch_ns": (-1, 1_000_000), "multiprocessors": (0, 1024), "winograd": (0.0, 4.0),
           "conv_channels": (0.0, 1024.0), "norm_channels": (0.0, 64.0), "error": (0.0, 3.0)}  # fmt: skip
