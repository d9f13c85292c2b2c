"""Predicts the time of a replay: an issue order captured as one CUDA graph, which ends with its last copy.

The simulator lets copies at the end of an iteration overlap the next one (simulator/RULES.md, 10). A graph joins them,
and the next replay begins after that. As all of a replay's copies are in the order, one iteration decides its time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from executor.training.issue_order import Order
from simulator.machine import Machine
from simulator.timeline import Timeline

Direction = Literal["d2h", "h2d"]
Copy = tuple[Direction, int]  # and its tensor


@dataclass
class _Link:
    """Copy engines of a machine: one queue per direction, slower while both directions are busy.

    Attributes:
        time_ns: time up to which the copies are simulated.
        queues: (time at which the copy may begin, ns that it takes alone, copy) by queue.
        ends: time at which each copy has ended.
    """

    machine: Machine
    time_ns: float = 0.0
    queues: dict[Direction, deque[tuple[float, float, Copy]]] = field(
        default_factory=lambda: {"d2h": deque(), "h2d": deque()}
    )
    ends: dict[Copy, float] = field(default_factory=dict)

    def start(self, copy: Copy, nbytes: int, time_ns: float) -> None:
        direction = copy[0]
        alone_ns = self.machine.d2h_ns(nbytes) if direction == "d2h" else self.machine.h2d_ns(nbytes)
        self.ends.pop(copy, None)
        self.queues[direction if self.machine.copy_engines > 1 else "d2h"].append((time_ns, alone_ns, copy))

    def end_of(self, copy: Copy) -> float:
        """Returns the time at which a copy ends; 0 if it was not started."""
        while any(copy == queued for queue in self.queues.values() for *_, queued in queue):
            self._advance()
        return self.ends.get(copy, 0.0)

    def finish(self) -> float:
        """Returns the time at which the last copy ends."""
        while any(self.queues.values()):
            self._advance()
        return max(self.ends.values(), default=0.0)

    def _advance(self) -> None:
        """Advances to the next begin or end of a copy."""
        heads = {direction: queue[0] for direction, queue in self.queues.items() if queue}
        active = [direction for direction, (begin, *_) in heads.items() if begin <= self.time_ns]
        later = [begin for begin, *_ in heads.values() if begin > self.time_ns]
        if not active:
            self.time_ns = min(later)
            return
        shares = {"d2h": self.machine.d2h_share / 2**20, "h2d": self.machine.h2d_share / 2**20}
        rates = {direction: shares[direction] if len(active) > 1 else 1.0 for direction in active}
        step_ns = min([heads[d][1] / rates[d] for d in active] + [begin - self.time_ns for begin in later])
        self.time_ns += step_ns
        for direction in active:
            begin, left_ns, copy = self.queues[direction].popleft()
            left_ns -= step_ns * rates[direction]
            if left_ns > 0.5:
                self.queues[direction].appendleft((begin, left_ns, copy))
            else:
                self.ends[copy] = self.time_ns


def replay_ns(order: Order, timeline: Timeline, machine: Machine) -> tuple[int, int]:
    """Returns the time of a replay in ns, and the part of it after the last kernel.

    Args:
        order: issue order for a graph (``order(…, graph=True)``).
        timeline: simulated timeline of its plan, from which the kernels' times are taken.
        machine: machine whose link carries the copies; the one of a graph (``Machine.in_graph``).
    """
    kernels = [span.end_ns - span.start_ns for span in timeline.spans if span.stream == "compute"]
    durations = kernels[-len(order.items) :]
    tensors = order.program.tensors
    blocks = order.schedule.blocks
    link = _Link(machine)
    # A swap-out that the plan has in flight at the boundary starts at the beginning of each replay.
    deferred = {t for t, place in order.start.items() if place == "out"}
    last_outs = {
        blocks[b].owner: (i, k)
        for i, item in enumerate(order.items)
        for k, (kind, b) in enumerate(item.after)
        if kind == "out" and blocks[b].owner in deferred
    }
    for t, place in order.start.items():
        if place != "host":
            link.start(("d2h" if place == "out" else "h2d", t), tensors[t].nbytes, 0.0)
    compute_ns = 0.0
    kernels_end = 0.0
    for i, (item, duration_ns) in enumerate(zip(order.items, durations, strict=True)):
        for k, (kind, b) in enumerate((*item.before, *item.after)):
            position = k - len(item.before)
            if position == 0:
                kernels_end = compute_ns = compute_ns + duration_ns
            t = blocks[b].owner
            if kind in ("out", "in"):
                if (i, position) not in last_outs.values():
                    link.start(("d2h" if kind == "out" else "h2d", t), tensors[t].nbytes, compute_ns)
            elif kind in ("reclaim", "wait"):
                compute_ns = max(compute_ns, link.end_of(("d2h" if kind == "reclaim" else "h2d", t)))
        if not item.after:
            kernels_end = compute_ns = compute_ns + duration_ns
    total_ns = max(compute_ns, link.finish())
    return round(total_ns), round(total_ns - kernels_end)
