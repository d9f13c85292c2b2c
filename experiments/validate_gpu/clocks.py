"""A GPU's clocks, power and temperature while something is measured, by NVML.

with watched(device) as seen:
    ...                         # what is measured
seen                            # a summary; without NVML, the reason why there is none
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch

PERIOD_S = 0.2
# Why a GPU runs slower than it could, by the bits of nvmlClocksEventReasons*.
REASONS = {0x2: "application clocks", 0x4: "power cap", 0x8: "hardware", 0x10: "sync boost", 0x20: "software thermal",
           0x40: "hardware thermal", 0x80: "hardware power brake", 0x100: "display clocks"}  # fmt: skip

Sample = tuple[float | None, ...]  # clocks of the SMs and of the memory in MHz, W, °C, bits of REASONS


@contextmanager
def watched(device: str) -> Iterator[dict[str, Any]]:
    """Samples PyTorch's first GPU while the block runs; yields a dictionary that is filled at the end (``summary``)."""
    seen: dict[str, Any] = {}
    sample = _sampler(device)
    if isinstance(sample, str):
        seen["absent"] = sample
        yield seen
        return
    samples, over = [sample()], threading.Event()

    def run() -> None:
        while not over.wait(PERIOD_S):
            samples.append(sample())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen |= summary(samples)


def _sampler(device: str) -> Callable[[], Sample] | str:
    """A function that reads one sample, or the reason why there is none."""
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
        return f"NVML does not know the GPU: {error}"

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
    """Mean and least clock, least memory clock, mean power, highest temperature, and the fraction of samples with each
    of REASONS. What a GPU does not report is left out."""
    sm, memory, watt, celsius, reasons = ([value for value in column if value is not None]
                                          for column in zip(*samples, strict=True))  # fmt: skip
    slowed = {name: sum(bool(int(bits) & bit) for bits in reasons) / len(samples) for bit, name in REASONS.items()}
    out: dict[str, Any] = {"samples": len(samples), "slowed": {name: part for name, part in slowed.items() if part}}
    for key, values, reduce in (("sm_mhz", sm, fmean), ("least_sm_mhz", sm, min), ("least_memory_mhz", memory, min),
                                ("watt", watt, fmean), ("celsius", celsius, max)):  # fmt: skip
        if values:
            out[key] = reduce(values)
    return out
