"""Speed of a chain of copies in a CUDA graph beside branches that wait for a late kernel.

Traces of planned graphs show copies at 54 GB/s while no other branch waits and at 46 with sixteen; streams keep 55.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from executor.memory.pinned import CUDA
from experiments.measure.gpu.traces import traced

Direction = Literal["d2h", "h2d"]
CASES: tuple[tuple[Direction, int], ...] = (("d2h", 0), ("d2h", 1), ("d2h", 4), ("d2h", 12), ("h2d", 0), ("h2d", 12))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        copies: copies of the chain.
        nbytes: bytes of each.
        width: width of the square matrices of the products beside it; five products per copy last longer than it.
    """

    copies: int
    nbytes: int
    width: int


SIZES = {"cuda": Sizes(24, 2**25, 4096), "cpu": Sizes(4, 2**16, 16)}


def copy_rates(device: str, folder: Path) -> Iterator[tuple[str, list[float]]]:
    """Yields (label, bytes per second of the chain in each run) of copies beside waiting branches.

    Args:
        device: "cuda"; or "cpu", which issues the same calls without streams and graphs.
        folder: folder for a temporary file.
    """
    sizes = SIZES[device]
    branches = max(waiting for _, waiting in CASES)
    pinned = CUDA.take(sizes.copies * sizes.nbytes) if device == "cuda" else None
    host = (torch.from_numpy(pinned) if pinned is not None else torch.zeros(sizes.copies * sizes.nbytes)).view(
        sizes.copies, -1
    )
    block = torch.empty_like(host[0], device=device)
    matrix = torch.randn(sizes.width, sizes.width, device=device).to(torch.bfloat16)
    flags = torch.zeros(branches, device=device)
    streams = [torch.cuda.Stream() for _ in range(1 + branches)] if device == "cuda" else [None] * (1 + branches)

    def work(direction: Direction, waiting: int) -> None:
        """Issues products, a chain of copies from the first one on, and branches that wait for the last one."""
        chain, *sides = streams[: 1 + waiting]
        compute = torch.cuda.current_stream() if chain else None
        flags.add_(1)
        _wait(chain, compute)
        with _on(chain):
            for row in host:
                target, source = (row, block) if direction == "d2h" else (block, row)
                target.copy_(source, non_blocking=True)
        for _ in range(5 * sizes.copies):
            torch.mm(matrix, matrix)
        for i, side in enumerate(sides):
            _wait(side, compute)
            with _on(side):
                flags[i].add_(1)
        for stream in (chain, *sides):
            _wait(compute, stream)

    def rates(run: Callable[[], Any], count: int) -> list[float]:
        nbytes = sizes.copies * host[0].nbytes
        if device != "cuda":
            begin = time.perf_counter()
            run()
            return [nbytes / (time.perf_counter() - begin)]
        copies = [event for event in traced(run, count, folder) if event[5] == host[0].nbytes]
        runs = [copies[i * sizes.copies : (i + 1) * sizes.copies] for i in range(count)]
        return [1e6 * nbytes / sum(event[1] for event in one) for one in runs]

    for direction, waiting in CASES:
        run = partial(work, direction, waiting)
        label = f"{direction}, {waiting} waiting"
        run()
        yield f"{label}: streams", rates(run, 1)
        if device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graph.replay()
            torch.cuda.synchronize()
            yield f"{label}: graph", rates(graph.replay, 3)


def _wait(stream: Any, other: Any) -> None:
    if stream:
        stream.wait_stream(other)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if stream else nullcontext()
