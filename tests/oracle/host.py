"""Host thread that issues steps (choice i), computed from issue times without simulating a queue."""

from __future__ import annotations

from collections.abc import Sequence

MAX_ITERATIONS = 64  # most iterations of a simulation that does not become steady


class Host:
    """Issue times of steps, numbered from the start of the simulation.

    Args:
        timed: Per step of an iteration, whether it takes time.
        costs: Per step, ns from the issue of the previous step.
        is_full: Whether the queue is full before the first iteration.
    """

    def __init__(self, timed: Sequence[bool], costs: Sequence[int], depth: int, is_full: bool):
        self.timed = timed
        self.costs = costs
        self.depth = depth
        self.is_full = is_full
        self.times: list[int] = []
        self.ends: list[int] = []  # of timed steps
        self.issued = 0  # number of timed steps
        self.started = 0
        self.has_waited = False
        self.last = self._lead(0)

    def _earliest(self) -> int:
        """Returns the issue time of the next unissued step in an unbounded queue."""
        first = self.issued <= self.depth and (not self.times or self.times[-1] == 0)
        if self.is_full and first:
            return 0
        return (self.times[-1] if self.times else 0) + self.costs[len(self.times) % len(self.costs)]

    def time_of(self, step: int) -> int | None:
        """Returns the issue time of a step; None if it depends on an unfinished step."""
        while len(self.times) <= step:
            timed = self.timed[len(self.times) % len(self.timed)]
            earliest = self._earliest()
            freed_by = self.issued - self.depth if timed else -1
            if freed_by >= len(self.ends):
                return None
            self.times.append(max(earliest, self.ends[freed_by]) if freed_by >= 0 else earliest)
            self.issued += timed
        return self.times[step]

    def _lead(self, now: int) -> tuple[int, int]:
        step = self.started
        while (time := self.time_of(step)) is not None and time <= now:
            step += 1
        return step - self.started, min(now - (self._earliest() if time is None else time), 0)

    def lead(self, now: int, iterations: int, last: bool) -> tuple[int, int]:
        """Returns the lead at a boundary; a gain without a wait counts as none."""
        lead = self._lead(now)
        if (self.has_waited or lead < self.last) and not (last and iterations >= MAX_ITERATIONS):
            self.last = lead
        self.has_waited = False
        return self.last
