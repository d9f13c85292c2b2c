"""Places in host memory for the copies of an iteration: a place belongs to a tensor only while its copy is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from simulator.pool import Intervals, run


class Held:
    """When the host holds each tensor, on the circle of an iteration, and where.

    A tensor has one place. It is held from the start of a copy until the last way back from that copy is over; where
    several copies are made of it, between them, too, but for the longest time; where none is made, for good.

    Args:
        copies: tensor -> when copies to the host start, 0 <= time < period.
        returns: tensor -> when ways back are over, 0 <= time < period, all of these times different.
        nbytes: of all tensors.

    Attributes:
        tensors: those held, by ascending ``intervals.lower``.
        offsets: tensor -> its place, of those with bytes.
        footprint: bytes of all places.
    """

    def __init__(
        self, copies: Mapping[int, Sequence[int]], returns: Mapping[int, Sequence[int]], nbytes: Sequence[int],
        period: int, alignment: int,
    ) -> None:  # fmt: skip
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
        self.tensors: list[int] = table[:, 2].tolist()
        sizes = np.array([nbytes[t] for t in self.tensors], np.int64)
        self.intervals = Intervals(table[:, 0].copy(), table[:, 1].copy(), sizes, period)
        packing = run("smartpool", self.intervals, alignment)[1]
        self.offsets = {t: int(at) for t, at in zip(self.tensors, packing.offsets, strict=True) if nbytes[t]}
        self.footprint = packing.footprint

    def neighbours(self, t: int) -> list[int]:
        """The other tensors with bytes in the same place."""
        size = dict(zip(self.tensors, self.intervals.nbytes.tolist(), strict=True))
        begin, end = self.offsets.get(t, 0), self.offsets.get(t, 0) + size[t]
        return [x for x, at in self.offsets.items() if x != t and at < end and begin < at + size[x]]
