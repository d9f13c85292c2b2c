"""Checks plans with assigned addresses: a step needs the footprint of its packed blocks, not the sum of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from simulator.pool import portfolio, smartpool
from simulator.pool.intervals import Intervals, Packing, timeline_lifetimes
from simulator.schedule import OutOfMemory
from simulator.timeline import Timeline

SHARES = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.87, 0.84, 0.8)  # fractions of the limit, tried in turn
Found = TypeVar("Found")


class DoesNotPack(RuntimeError):
    """Raised if the packed blocks exceed the limit; ``packed_bytes`` is the smallest footprint found."""

    def __init__(self, packed_bytes: int, limit: int) -> None:
        super().__init__(f"the packed blocks take at least {packed_bytes:,} bytes; the limit is {limit:,}")
        self.packed_bytes = packed_bytes


def pack_within(intervals: Intervals, limit: int, alignment: int = 1) -> Packing:
    """Packs blocks with SmartPool, and searches for a better packing if its footprint exceeds the limit.

    Args:
        intervals: blocks on a circle or a line.
        limit: memory limit in bytes.
        alignment: alignment of every offset in bytes.

    Returns:
        The packing with the smaller footprint, which may still exceed ``limit``.
    """
    packing = smartpool.pack(intervals, alignment)
    if packing.footprint <= limit or packing.footprint == intervals.rounded(alignment).peak_bytes:
        return packing
    better = portfolio.pack(intervals, alignment, work=10**8)  # a second or so, and the same result every time
    return min(packing, better, key=lambda found: found.footprint)


def packed_bytes(timeline: Timeline, limit: int, alignment: int = 1) -> int:
    """Returns the footprint of a steady iteration: persistent and temporary tensors, and workspaces.

    The plan fits if the footprint is at most the limit.

    Args:
        timeline: covers at least two iterations.
        limit: memory limit in bytes; a packing within it is not improved further.
        alignment: alignment of every address in bytes (``Machine.alignment``).

    Returns:
        the footprint in bytes of the packing with the smallest footprint found.
    """
    return pack_within(timeline_lifetimes(timeline).intervals, limit, alignment).footprint


def lower_limits(limit: int) -> list[int]:
    """Returns the limits in bytes to plan for, from ``limit`` down, where addresses need more than the tensors."""
    return [int(limit * share) for share in SHARES]


def first_that_packs(
    limit: int,
    attempt: Callable[[int], tuple[Found, Timeline]],
    alignment: int = 1,
    stops: tuple[type[Exception], ...] = (OutOfMemory,),
) -> tuple[Found, int]:
    """Plans for decreasing fractions of a limit (``SHARES``) until the packed plan fits into the full limit.

    Args:
        limit: memory limit in bytes.
        attempt: maps a limit in bytes to a result (such as a plan) and its timeline; raises ``stops`` if it finds
            none.
        alignment: alignment of every offset in bytes.
        stops: exceptions of ``attempt`` that mean "no result".

    Returns:
        The result and its packed bytes.

    Raises:
        DoesNotPack: no result fits once packed.
        stops: ``attempt`` finds nothing for the full limit.
    """
    least: int | None = None
    for nbytes in lower_limits(limit):
        try:
            found, timeline = attempt(nbytes)
        except stops:
            if least is None:
                raise
            break
        packed = packed_bytes(timeline, limit, alignment)
        if packed <= limit:
            return found, packed
        least = packed if least is None else min(least, packed)
    assert least is not None
    raise DoesNotPack(least, limit)
