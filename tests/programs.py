"""Small programs, and queries of their timelines, for hand-computed tests."""

from __future__ import annotations

from simulator import Kernel, Machine, Program, Tensor, Timeline

BYTE_PER_NS = Machine("byte per ns", 10**6, 10**9, 10**9, d2h_latency_ns=0, h2d_latency_ns=0)


def straight(tensors: list[Tensor], *lines: tuple) -> Program:
    """Returns a program from (inputs, outputs, duration_ns[, workspace]) lines."""
    kernels = tuple(
        Kernel(f"k{i}", "other", "forward", reads, writes, *rest) for i, (reads, writes, *rest) in enumerate(lines)
    )
    return Program("by hand", tuple(tensors), kernels)


def activations(*sizes: int) -> list[Tensor]:
    """Returns tensors of these sizes in bytes."""
    return [Tensor(f"t{i}", size) for i, size in enumerate(sizes)]


def parameter(nbytes: int) -> Tensor:
    """Returns a persistent tensor."""
    return Tensor("w", nbytes, "parameter", True)


def work(timeline: Timeline, *kinds: str) -> list[tuple[int, int, int]]:
    """Returns (kernel or tensor, start, end) of the spans of these kinds."""
    return [(s.index, s.start_ns, s.end_ns) for s in timeline.spans if s.kind in kinds]


def compute(timeline: Timeline) -> list[tuple[int, int, int]]:
    """Returns (kernel, start, end) of kernels and recomputations."""
    return work(timeline, "kernel", "recompute")
