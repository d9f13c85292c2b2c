"""Traces of steps on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Event = tuple[float, float, int | None, str, str, int | None]  # begin and duration in us, stream, category, name, bytes


def traced(step: Callable[[], Any], count: int, folder: Path) -> list[Event]:
    """Returns the kernels and copies of ``count`` steps by begin; PyTorch writes a temporary file into ``folder``.

    The host is not traced: with its events GPT-2's traced steps took 84 to 90 ms, untraced ones 73.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    raw = folder / "chrome-trace.json"
    profiler.export_chrome_trace(str(raw))
    events = [
        (e["ts"], e["dur"], e["args"].get("stream"), e["cat"], e["name"][:60], e["args"].get("bytes"))
        for e in json.loads(raw.read_text())["traceEvents"]
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    raw.unlink()
    return sorted(events, key=lambda event: float(event[0]))
