"""Compares the block events of a timeline with the ledger of the replay.

Only the order of simultaneous allocations, or frees, is free. Block indices are arbitrary except that persistent
tensors come first, but an index must always be one copy of one tensor, and each copy must have one index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from typing import NamedTuple

from simulator.timeline import BlockEvent
from tests.oracle.machine import Violation


class Change(NamedTuple):
    """One change of the ledger."""

    time_ns: int
    owner: int  # tensor, or -1 - k: the workspace of kernel k
    born: int  # first step of the block, counted from the start of its iteration; -1: a persistent tensor
    nbytes: int  # positive for an allocation, negative for a free


def curve(events: Iterable[BlockEvent]) -> list[tuple[int, int]]:
    """Returns (time_ns, bytes in use) after each change; simultaneous allocations, or frees, are merged."""
    out = []
    used = 0
    for (time, _), group in groupby(events, lambda e: (e.time_ns, e.nbytes > 0)):
        used += sum(e.nbytes for e in group)
        out.append((time, used))
    return out


def wrong_events(
    ledger: Iterable[Change], events: Iterable[BlockEvent], persistent: Iterable[int]
) -> Iterator[Violation]:
    """Checks the rule ``memory``: yields the first instant that differs, and blocks that are several copies.

    Args:
        persistent: Indices of the persistent tensors.
    """
    expected = groupby(ledger, lambda c: (c.time_ns, c.nbytes > 0))
    recorded = groupby(events, lambda e: (e.time_ns, e.nbytes > 0))
    index = {(t, -1): i for i, t in enumerate(persistent)}
    block = {i: copy for copy, i in index.items()}
    for group, other in zip_longest(expected, recorded):
        # The sort is stable: changes of one owner stay in order.
        changes = sorted(group[1], key=lambda c: c.owner) if group else []
        group_events = sorted(other[1], key=lambda e: e.owner) if other else []
        if [(c.time_ns, c.owner, c.nbytes) for c in changes] != [(e.time_ns, e.owner, e.nbytes) for e in group_events]:
            time_ns = (group or other)[0][0]
            yield Violation("memory", time_ns, f"events are {_text(group_events)}, the ledger says {_text(changes)}")
            return
        for c, e in zip(changes, group_events, strict=True):
            copy = c.owner, c.born
            if index.setdefault(copy, e.block) != e.block or block.setdefault(e.block, copy) != copy:
                yield Violation("memory", e.time_ns, f"block {e.block} of tensor {c.owner} is another copy of it")


def _text(changes: Iterable[Change | BlockEvent]) -> str:
    return ", ".join(f"{c.nbytes:+,} by {c.owner} at {c.time_ns}" for c in changes) or "none"
