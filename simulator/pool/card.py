"""What a card counts while a step runs: tensors, and what stands beside them. All in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.pool import ITERATIONS
from simulator.pool.intervals import program_lifetimes, timeline_lifetimes
from simulator.pool.online import caching
from simulator.program import Program
from simulator.timeline import Timeline


@dataclass(frozen=True)
class CardPeak:
    """Bytes of the card, apart; ``nbytes`` is their sum, what NVML shows.

    Attributes:
        tensors: the program's peak.
        loop: what the loop keeps and the optimizer takes besides, at the highest; below 0 where a GPU needs less.
        workspaces: of libraries, at the highest.
        allocator: what PyTorch reserves above all that is in use at the highest.
        context: the CUDA context, kernels and handles of libraries.
        memory_bytes: of the card, that was asked about; None: none was.
        fits: it can run in that: blocks that are cached and not in use are given back where a malloc fails, as PyTorch
            does.
    """

    tensors: int
    loop: int
    workspaces: int
    allocator: int
    context: int
    memory_bytes: int | None = None
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

    @property
    def limit(self) -> int:
        """Of the memory that was asked about what is left for tensors, at least 1. The allocator is taken to need the
        same part of what is in use under any limit; a step that fits gets its whole peak.

        Raises:
            ValueError: none was asked about.
        """
        if self.memory_bytes is None:
            raise ValueError("memory_bytes: no memory was asked about")
        used = self.reserved - self.allocator
        room = (self.memory_bytes - self.context) * used // max(self.reserved, 1) - self.loop - self.workspaces
        return max(room, self.tensors if self.fits else 1)


def under_plan(card: CardPeak, timeline: Timeline) -> tuple[int, bool]:
    """What the card counts while a plan's blocks come and go, and whether PyTorch's allocator serves them all in the
    memory that was asked about, if any was, where it gives back what it caches; the rest is as without a plan.

    Args:
        timeline: of two iterations at least.
    """
    rest = card.context + card.loop + card.workspaces
    blocks, _ = timeline_lifetimes(timeline).intervals.unrolled(ITERATIONS)
    reserved, served = caching.serve(blocks, None if card.memory_bytes is None else card.memory_bytes - rest)
    return (reserved if served else caching.serve(blocks)[0]) + rest, served


def of_program(program: Program, context: int, memory_bytes: int | None) -> CardPeak:
    """Of a step that is known from a file: only the allocator and the context are modelled."""
    blocks, _ = program_lifetimes(program).intervals.unrolled(ITERATIONS)
    reserved, _ = caching.serve(blocks)
    fits = None
    if memory_bytes is not None:
        fits = reserved + context <= memory_bytes or caching.serve(blocks, memory_bytes - context)[1]
    return CardPeak(program.peak_bytes, 0, 0, max(reserved - program.peak_bytes, 0), context, memory_bytes, fits)
