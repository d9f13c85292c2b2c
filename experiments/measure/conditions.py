"""Measurement conditions: GPU clocks, power and temperature (NVML), and PyTorch's settings."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from torch.utils import deterministic as determinism

# Reasons for reduced clocks, by bit of nvmlClocksEventReasons*.
REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
    0x100: "display clocks",
}

Sample = tuple[float | None, ...]  # clocks of the SMs and of the memory in MHz, W, °C, bits of REASONS


@contextmanager
def sampled_conditions(device: str, period_s: float = 0.2) -> Iterator[dict[str, Any]]:
    """Samples PyTorch's first GPU while the block runs; yields a dictionary that is filled on exit (``summary``)."""
    conditions: dict[str, Any] = {}
    sample = _sampler(device)
    if isinstance(sample, str):
        conditions["absent"] = sample
        yield conditions
        return
    samples = [sample()]
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(period_s):
            samples.append(sample())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield conditions
    finally:
        stopped.set()
        thread.join()
        conditions |= summary(samples)


def _sampler(device: str) -> Callable[[], Sample] | str:
    """Returns a function that reads one sample, or the reason why sampling is impossible."""
    if device != "cuda":
        return "no GPU is used"
    try:
        import pynvml as nvml
    except ImportError:
        return "pynvml (nvidia-ml-py) is not installed"
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        return f"NVML cannot open the GPU: {error}"

    def read(name: str, *arguments: int, unit: float = 1.0) -> float | None:
        try:
            return float(getattr(nvml, name)(gpu, *arguments) / unit)
        except nvml.NVMLError:
            return None

    return lambda: (
        read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        read("nvmlDeviceGetPowerUsage", unit=1e3),
        read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        read("nvmlDeviceGetCurrentClocksThrottleReasons"),
    )


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Summarizes samples; omits quantities that the GPU does not report.

    Returns:
        Mean and minimum SM clock and minimum memory clock in MHz, mean power in W, maximum temperature in °C, and the
        fraction of samples with each of REASONS.
    """
    sm, memory, watt, celsius, reasons = (
        [value for value in column if value is not None] for column in zip(*samples, strict=True)
    )
    slowed = {name: sum(bool(int(bits) & bit) for bits in reasons) / len(samples) for bit, name in REASONS.items()}
    out: dict[str, Any] = {"samples": len(samples), "slowed": {name: share for name, share in slowed.items() if share}}
    for key, values, reduce in (
        ("sm_mhz", sm, fmean),
        ("least_sm_mhz", sm, min),
        ("least_memory_mhz", memory, min),
        ("watt", watt, fmean),
        ("celsius", celsius, max),
    ):
        if values:
            out[key] = reduce(values)
    return out


@contextmanager
def deterministic() -> Iterator[list[str]]:
    """Makes PyTorch use deterministic operators where they exist, for bit-by-bit comparisons, not for timings.

    Yields:
        A list that is filled on exit with the operators that have no deterministic implementation.
    """
    operators: list[str] = []
    cudnn = torch.backends.cudnn
    memory: Any = determinism  # a module whose attribute is a property
    saved = (
        cudnn.deterministic,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
        torch.is_warn_always_enabled(),
    )
    try:
        cudnn.deterministic = True
        cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # the compared code reads no uninitialized memory
        torch.set_warn_always(True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield operators
        messages = [str(warning.message) for warning in caught]
        operators += sorted({text.split()[0] for text in messages if "not have a deterministic implementation" in text})
    finally:
        cudnn.deterministic, cudnn.benchmark = saved[:2]
        torch.use_deterministic_algorithms(saved[2], warn_only=saved[3])
        memory.fill_uninitialized_memory = saved[4]
        torch.set_warn_always(saved[5])


def report() -> dict[str, Any]:
    """Returns the current PyTorch settings and, on CUDA, how many allocator segments are expandable."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")  # experiments/validate_gpu
    out: dict[str, Any] = {name: os.environ.get(name, "") for name in names}
    out |= {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        segments = torch.cuda.memory_snapshot()
        out["expandable_segments"] = [bool(s.get("is_expandable")) for s in segments].count(True)
        out["other_segments"] = len(segments) - out["expandable_segments"]
    return out
