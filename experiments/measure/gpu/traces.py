"""Traces of steps on a GPU, and speeds of copies beside kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from executor.memory.pinned import CUDA

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


def copy_speeds(out: Path, swaps: int = 60, nbytes: int = 2**25) -> Iterator[tuple[str, str, float]]:
    """Yields (form, label, bytes per second) of swap-outs beside kernels.

    Each swap-out forks from the kernels and joins them ``lag`` kernels later, from streams or as a graph. Graphs are
    replayed one at a time and three in a row.

    Args:
        out: folder for a temporary file.
        swaps: number of swap-outs.
        nbytes: bytes of each.
    """
    x = torch.randn(2**26, device="cuda")
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    host = torch.from_numpy(CUDA.take(swaps * nbytes)).view(swaps, nbytes)

    def work(lag: int, sides: Sequence[torch.cuda.Stream]) -> None:
        compute = torch.cuda.current_stream()
        ends = []
        for i in range(swaps):
            x.mul_(1.0)
            side = sides[i % len(sides)]
            side.wait_stream(compute)
            with torch.cuda.stream(side):
                host[i].copy_(device, non_blocking=True)
                ends.append(side.record_event())
            if i >= lag:
                compute.wait_event(ends[i - lag])
        for side in sides:
            compute.wait_stream(side)

    for lag, width in ((2, 1), (30, 1), (2, 8), (30, 8)):
        sides = [torch.cuda.Stream() for _ in range(width)]
        graph = torch.cuda.CUDAGraph()
        run = partial(work, lag, sides)
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        for form, call, count in (("streams", run, 1), ("graph", graph.replay, 1), ("graph", graph.replay, 3)):
            transfers = [event for event in traced(call, count, out) if event[3] == "gpu_memcpy"]
            speed = 1e6 * sum(event[5] for event in transfers) / sum(event[1] for event in transfers)
            yield form, f"joined {lag} kernels later, {width} copy streams, {count} in a row", speed
