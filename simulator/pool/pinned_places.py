"""Offsets in pinned host memory for the copies of an iteration; a slot is reserved only while its copy is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.pool import Intervals, run


class PinnedSlots:
    """Host memory of each tensor on the circle of an iteration: lifetimes and offsets.

    A tensor has one slot. It is held from the start of a swap-out until the last swap-in from that copy ends. With
    several swap-outs it is also held between them, except for the longest gap; without any it is held permanently.

    Args:
        copies: tensor -> start times of its swap-outs, 0 <= time < period.
        returns: tensor -> end times of its swap-ins, 0 <= time < period, distinct from all start times.
        nbytes: size of each tensor in bytes.
    """

    def __init__(
        self,
        copies: Mapping[int, Sequence[int]],
        returns: Mapping[int, Sequence[int]],
        nbytes: Sequence[int],
        period: int,
        alignment: int,
    ) -> None:
        rows = []
        for t in {*copies, *returns}:
            events = sorted([*((at, True) for at in copies.get(t, ())), *((at, False) for at in returns.get(t, ()))])
            free = [
                ((now - then) % period, now, then)
                for (then, starts), (now, copies_now) in zip([*events[-1:], *events], events, strict=False)
                if copies_now and not starts
            ]
            _, lower, upper = max(free, default=(0, 0, period))
            rows.append((lower, upper if upper > lower else upper + period, t))
        table = np.array(sorted(rows), np.int64).reshape(-1, 3)
        self.tensors: list[int] = table[:, 2].tolist()  # with a slot, by ascending ``intervals.lower``
        sizes = np.array([nbytes[t] for t in self.tensors], np.int64)
        self.intervals = Intervals(table[:, 0].copy(), table[:, 1].copy(), sizes, period)
        packing = run("smartpool", self.intervals, alignment)[1]
        self.offsets = {t: int(at) for t, at in zip(self.tensors, packing.offsets, strict=True) if nbytes[t]}
        self.footprint = packing.footprint  # bytes of all slots

    def neighbors(self, t: int) -> list[int]:
        """Returns the other nonempty tensors whose slots overlap."""
        size = dict(zip(self.tensors, self.intervals.nbytes.tolist(), strict=True))
        begin = self.offsets.get(t, 0)
        end = self.offsets.get(t, 0) + size[t]
        return [x for x, at in self.offsets.items() if x != t and at < end and begin < at + size[x]]
