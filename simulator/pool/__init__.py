"""Address assignment: the simulator's ledger counts bytes; allocators here give the same tensors offsets.

``intervals`` describes the lifetimes of blocks. An allocator is a module with one function,
``pack(intervals, …) -> Packing``; ``ALLOCATORS`` lists them and ``run`` executes one. Offline allocators know the
whole iteration and pack a circle; online allocators process a line of mallocs and frees one by one.

    lives = program_lifetimes(program)                       # or timeline_lifetimes(timeline)
    blocks, packing = run("smartpool", lives.intervals, machine.alignment)
    packing.footprint, packing.ratio(blocks), packing.offsets[i]

Rationale, formats and results: simulator/pool/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from simulator.compiled.encoding import NEVER
from simulator.pool.intervals import Intervals, Lifetimes, Packing, program_lifetimes, timeline_lifetimes

__all__ = ["ALLOCATORS", "ITERATIONS", "Allocator", "allocator", "run"]
__all__ += ["Intervals", "Lifetimes", "Packing", "program_lifetimes", "timeline_lifetimes"]

ITERATIONS = 3  # of a circle for online allocators: one to grow, two in the steady state


@dataclass(frozen=True)
class Allocator:
    """Registry entry of an allocator."""

    module: str  # in this package
    online: bool = False  # processes mallocs and frees one by one, on a line
    timed: bool = False  # accepts ``seconds`` and returns the best packing found within them
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword options of its ``pack``


# In table order.
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
    """Returns an allocator by name; raises ValueError with the known names."""
    if name not in ALLOCATORS:
        raise ValueError(f"unknown allocator {name!r}; expected one of {', '.join(ALLOCATORS)}")
    return ALLOCATORS[name]


def run(name: str, intervals: Intervals, alignment: int = 1, seconds: float = 5.0) -> tuple[Intervals, Packing]:
    """Packs blocks with a named allocator.

    Args:
        name: key of ``ALLOCATORS``.
        intervals: blocks on a circle or a line. For an online allocator a circle is unrolled over ``ITERATIONS``.
        alignment: bytes, for offline allocators; online ones apply their own rounding.
        seconds: time budget of timed allocators.

    Returns:
        The blocks as packed, and their packing.

    Raises:
        ValueError: the name is unknown or an option is invalid.
    """
    entry = allocator(name)
    pack = import_module(f"simulator.pool.{entry.module}").pack
    if entry.online:
        blocks = intervals if intervals.period == NEVER else intervals.unrolled(ITERATIONS)[0]
        return blocks, pack(blocks, **entry.options)
    options = {**entry.options, **({"seconds": seconds} if entry.timed else {})}
    return intervals, pack(intervals, alignment=alignment, **options)
