"""Whether a plan fits once its blocks have addresses: a step takes the footprint of their packing, not their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from simulator.pool import portfolio, smartpool
from simulator.pool.intervals import Intervals, Packing, timeline_lifetimes
from simulator.schedule import OutOfMemory
from simulator.timeline import Timeline

SHARES = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.87, 0.84, 0.8)  # of a limit, that are planned for in turn
WORK = 10**8  # of a search for a packing: half a second for a thousand blocks
Found = TypeVar("Found")


class DoesNotPack(RuntimeError):
    """Blocks at addresses of their own need more than a limit.

    Attributes:
        packed_bytes: the smallest footprint that was found.
    """

    def __init__(self, packed_bytes: int, limit: int) -> None:
        super().__init__(f"with addresses it takes {packed_bytes:,} bytes at least, the limit is {limit:,}")
        self.packed_bytes = packed_bytes


def pack_within(intervals: Intervals, limit: int, alignment: int = 1) -> Packing:
    """Packs blocks with SmartPool, and searches for a better packing if that exceeds the limit.

    Args:
        limit: bytes.
        alignment: bytes, of every offset.
    """
    packing = smartpool.pack(intervals, alignment)
    if packing.footprint <= limit or packing.footprint == intervals.rounded(alignment).peak_bytes:
        return packing
    better = portfolio.pack(intervals, alignment, work=WORK)
    return min(packing, better, key=lambda found: found.footprint)


def packed_bytes(timeline: Timeline, limit: int, alignment: int = 1) -> int:
    """Bytes of a steady iteration of a plan once every block has an address: persistent tensors, all that comes and
    goes, and workspaces. The plan fits if this is at most the limit.

    Args:
        timeline: of two iterations at least.
        limit: bytes; a packing within it is not improved.
        alignment: bytes, of every address (``Machine.alignment``).
    """
    return pack_within(timeline_lifetimes(timeline).intervals, limit, alignment).footprint


def first_that_packs(
    limit: int,
    attempt: Callable[[int], tuple[Found, Timeline]],
    alignment: int = 1,
    stops: tuple[type[Exception], ...] = (OutOfMemory,),
) -> tuple[Found, int]:
    """Tries ever smaller parts of a limit (``SHARES``) until the packing of what is found fits into all of it.

    Args:
        limit: bytes.
        attempt: from bytes to a plan (say) for them, and its timeline there; raises ``stops`` if there is none.

    Returns:
        What was found, and its packed bytes.

    Raises:
        DoesNotPack: no packing of what was found fits.
        stops: nothing was found for the whole limit.
    """
    least: int | None = None
    for share in SHARES:
        try:
            found, timeline = attempt(int(limit * share))
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
