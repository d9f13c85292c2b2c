"""Device memory of a step as NVML reports it: tensors plus loop state, workspaces, allocator overhead and context."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.pool import ITERATIONS
from simulator.pool.intervals import program_lifetimes, timeline_lifetimes
from simulator.pool.online import caching
from simulator.pool.packed import packed_bytes
from simulator.program import Program
from simulator.timeline import Timeline


@dataclass(frozen=True)
class DevicePeak:
    """Breakdown of the peak device memory, in bytes; ``nbytes`` is the sum that NVML shows."""

    tensors: int  # the program's peak
    loop: int  # peak of data held by the training loop and extra optimizer state; negative if the GPU needs less
    workspaces: int  # peak of library workspaces
    allocator: int  # memory that PyTorch reserves beyond the peak in use
    context: int  # CUDA context, kernels and library handles
    memory_bytes: int | None = None  # device memory to check against
    # Whether the step can run in ``memory_bytes``; PyTorch releases cached free blocks when a malloc fails.
    fits: bool | None = None

    @property
    def reserved(self) -> int:
        """Bytes that ``torch.cuda.max_memory_reserved`` reports."""
        return self.tensors + self.loop + self.workspaces + self.allocator

    @property
    def nbytes(self) -> int:
        """Bytes that NVML reports."""
        return self.reserved + self.context

    @property
    def beside(self) -> int:
        """Bytes of everything except tensors."""
        return self.nbytes - self.tensors

    @property
    def fixed(self) -> int:
        """Bytes of everything except tensors and the allocator's overhead."""
        return self.context + self.loop + self.workspaces

    @property
    def graph_limit(self) -> int:
        """Memory limit for tensors at packed addresses, without the allocator's overhead; as ``limit`` if it fits."""
        if self.memory_bytes is None or self.tensors <= self.memory_bytes - self.fixed:
            return self.limit
        return max(self.memory_bytes - self.fixed, 1)

    @property
    def limit(self) -> int:
        """Memory limit for tensors, at least 1 byte, if the device has ``memory_bytes``.

        Assumes that the allocator's overhead is proportional to the bytes in use. A step that fits gets its whole
        peak.

        Raises:
            ValueError: ``memory_bytes`` was not given.
        """
        if self.memory_bytes is None:
            raise ValueError("memory_bytes: not given, so the limit is unknown; give the size of device memory")
        used = self.reserved - self.allocator
        tensor_bytes = (self.memory_bytes - self.context) * used // max(self.reserved, 1) - self.loop - self.workspaces
        return max(tensor_bytes, self.tensors if self.fits else 1)


def under_plan(unplanned: DevicePeak, timeline: Timeline) -> tuple[int, bool]:
    """Returns the device memory of a planned step, and whether PyTorch's allocator can serve it.

    The allocator releases cached blocks when ``unplanned.memory_bytes`` (if given) is exhausted. Loop, workspaces and
    context are taken from ``unplanned``.

    Args:
        unplanned: device memory of the unplanned step.
        timeline: covers at least two iterations.

    Returns:
        bytes of device memory, and whether the allocator serves every request within ``memory_bytes``.
    """
    other_bytes = unplanned.fixed
    blocks, _ = timeline_lifetimes(timeline).intervals.unrolled(ITERATIONS)
    reserved, served = caching.serve(
        blocks, None if unplanned.memory_bytes is None else unplanned.memory_bytes - other_bytes
    )
    return (reserved if served else caching.serve(blocks)[0]) + other_bytes, served


def in_graph(unplanned: DevicePeak, timeline: Timeline, alignment: int) -> tuple[int, bool]:
    """Returns the device memory of a planned step at packed addresses, and whether the device has it.

    Args:
        unplanned: device memory of the unplanned step.
        timeline: covers at least two iterations.
        alignment: alignment of every address in bytes.

    Returns:
        bytes of device memory, and whether they are at most ``memory_bytes`` (True if that is unknown).
    """
    other_bytes = unplanned.fixed
    room = timeline.peak_bytes if unplanned.memory_bytes is None else unplanned.memory_bytes - other_bytes
    packed = packed_bytes(timeline, room, alignment)
    return packed + other_bytes, unplanned.memory_bytes is None or packed <= room


def planned_peak(unplanned: DevicePeak, timeline: Timeline, alignment: int, as_graph: bool) -> tuple[int, bool]:
    """Returns the device memory of a planned step as the executor runs it, and whether the device has it.

    Args:
        unplanned: device memory of the unplanned step.
        timeline: covers at least two iterations.
        alignment: alignment of every address in bytes.
        as_graph: whether the step is one CUDA graph, whose blocks have packed addresses. Otherwise PyTorch's allocator
            chooses them, so a plan whose tensors fit may still not run.

    Returns:
        bytes of device memory, and whether the step runs in ``memory_bytes``.
    """
    return in_graph(unplanned, timeline, alignment) if as_graph else under_plan(unplanned, timeline)


def of_program(program: Program, context: int, memory_bytes: int | None) -> DevicePeak:
    """Returns the breakdown of a program loaded from a file: only allocator and context are modeled."""
    blocks, _ = program_lifetimes(program).intervals.unrolled(ITERATIONS)
    reserved, _ = caching.serve(blocks)
    fits = None
    if memory_bytes is not None:
        fits = reserved + context <= memory_bytes or caching.serve(blocks, memory_bytes - context)[1]
    return DevicePeak(program.peak_bytes, 0, 0, max(reserved - program.peak_bytes, 0), context, memory_bytes, fits)
