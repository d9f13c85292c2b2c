"""Bytes to addresses: the simulator's ledger counts bytes; here the same tensors get offsets.

``intervals`` says who holds how many bytes from when to when. An allocator is a module with one function,
``pack(intervals, …) -> Packing``; ``ALLOCATORS`` names them all and ``run`` runs one. Offline allocators know the whole
iteration and pack a circle; online ones see one malloc or free after another on a line.

    lives = program_lifetimes(program)                       # or timeline_lifetimes(timeline)
    blocks, packing = run("smartpool", lives.intervals, machine.alignment)
    packing.footprint, packing.ratio(blocks), packing.offsets[i]

Reasons, formats and figures: simulator/pool/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from simulator.compiled.encoding import NEVER
from simulator.pool.intervals import Intervals, Lifetimes, Packing, program_lifetimes, timeline_lifetimes

__all__ = [
    "ALLOCATORS",
    "ITERATIONS",
    "Allocator",
    "Intervals",
    "Lifetimes",
    "Packing",
    "allocator",
    "program_lifetimes",
    "run",
    "timeline_lifetimes",
]

ITERATIONS = 3  # that an online allocator sees of a circle: one to grow, two in the steady state


@dataclass(frozen=True)
class Allocator:
    """How to call one of the allocators.

    Attributes:
        module: in this package.
        online: it sees mallocs and frees one by one, on a line.
        timed: it takes ``seconds`` and returns the best packing found within them.
        options: of its ``pack``.
    """

    module: str
    online: bool = False
    timed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


# In the order of tables.
ALLOCATORS = {
    "cudamalloc": Allocator("online.cudamalloc", online=True),
    "caching": Allocator("online.caching", online=True),
    "cnmem": Allocator("online.cnmem", online=True),
    "superneurons": Allocator("online.heap", online=True),
    "smartpool": Allocator("smartpool", options={"fit": "best"}),
    "smartpool_first": Allocator("smartpool", options={"fit": "first"}),
    "portfolio": Allocator("portfolio", timed=True),
    "optimal": Allocator("optimal", timed=True),
}


def allocator(name: str) -> Allocator:
    """The allocator of a name; raises ValueError with the names that there are."""
    if name not in ALLOCATORS:
        raise ValueError(f"there is no allocator {name!r}; there are {', '.join(ALLOCATORS)}")
    return ALLOCATORS[name]


def run(name: str, intervals: Intervals, alignment: int = 1, seconds: float = 5.0) -> tuple[Intervals, Packing]:
    """Packs blocks with the allocator of a name.

    Args:
        intervals: on a circle or a line. For an online allocator a circle is unrolled over ``ITERATIONS``.
        alignment: bytes, of an offline allocator; an online one rounds sizes by rules of its own.
        seconds: for those that search.

    Returns:
        The blocks as they were packed, and their packing.

    Raises:
        ValueError: an unknown name, or a bad option.
    """
    how = allocator(name)
    pack = import_module(f"simulator.pool.{how.module}").pack
    if how.online:
        blocks = intervals if intervals.period == NEVER else intervals.unrolled(ITERATIONS)[0]
        return blocks, pack(blocks, **how.options)
    options = {**how.options, **({"seconds": seconds} if how.timed else {})}
    return intervals, pack(intervals, alignment=alignment, **options)
