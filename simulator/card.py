"""What a card counts while a step runs: tensors, and what stands beside them. All in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.pool.intervals import program_lifetimes, timeline_lifetimes
from simulator.pool.online import caching
from simulator.program import Program
from simulator.timeline import Timeline

ITERATIONS = 3  # that the caching allocator sees of a step that repeats


@dataclass(frozen=True)
class CardPeak:
    """Bytes of the card, apart; ``nbytes`` is their sum, what NVML shows.

    Attributes:
        tensors: the program's peak.
        loop: what the user's loop keeps and the optimizer takes besides, at the highest.
        workspaces: of libraries, at the highest.
        allocator: what PyTorch reserves above all that is in use at the highest.
        context: the CUDA context, kernels and handles of libraries.
        fits: it can run within the memory that was asked about: blocks that are cached and not in use are given back
            where a malloc fails, as PyTorch does; None: not asked.
    """

    tensors: int
    loop: int
    workspaces: int
    allocator: int
    context: int
    fits: bool | None = None

    @property
    def reserved(self) -> int:
        """What ``torch.cuda.max_memory_reserved`` shows."""
        return self.tensors + self.loop + self.workspaces + self.allocator

    @property
    def nbytes(self) -> int:
        """What NVML shows."""
        return self.reserved + self.context

    @property
    def beside(self) -> int:
        """All but the tensors."""
        return self.nbytes - self.tensors

    def for_tensors(self, memory_bytes: int) -> int:
        """The limit of the tensors in so much memory of the card; at least 1. The allocator is taken to need the same
        part of what is in use under any limit; a step that fits gets its whole peak."""
        used = self.reserved - self.allocator
        room = (memory_bytes - self.context) * used // max(self.reserved, 1) - self.loop - self.workspaces
        return max(room, self.tensors if self.fits else 1)


def reserved_bytes(timeline: Timeline) -> int:
    """What PyTorch's allocator reserves while a plan's blocks come and go; the timeline has two iterations at least."""
    return caching.serve(timeline_lifetimes(timeline).intervals.unrolled(ITERATIONS)[0])[0]


def of_program(program: Program, context: int, memory_bytes: int) -> CardPeak:
    """Of a step that is known from a file: only the allocator and the context are modelled."""
    blocks, _ = program_lifetimes(program).intervals.unrolled(ITERATIONS)
    reserved, _ = caching.serve(blocks)
    fits = reserved + context <= memory_bytes or caching.serve(blocks, memory_bytes - context)[1]
    return CardPeak(program.peak_bytes, 0, 0, max(reserved - program.peak_bytes, 0), context, fits)
