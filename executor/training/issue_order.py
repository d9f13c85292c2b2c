"""Converts a simulated timeline of a plan into the order in which a training step issues it.

One thread issues all work ahead of the device, and events enforce dependencies, so a step needs an order instead of
times. ``order`` returns one iteration of **items**, the steps of simulator.schedule, each with the **moves** before and
after it. executor/training/README.md gives the reasons for the rules below.
"""

# 1. A swap-in is issued before the item that ran when its transfer started, or later if its memory is only free then.
# 2. A swap-out's memory is reclaimed when needed, oldest first (rule 8), and as late as the limit allows.
# 3. The limit holds at every item by the items' own ledger; an early swap-in never takes bytes that later items need
#    (rule 5).
# 4. Host copies are valid within the iteration; at its boundary only those of swapped-out tensors are.
# 5. An iteration ends with the copies in flight with which it starts, or (after ``MAX_ITERATIONS``) waits for them. A
#    CUDA graph has no copies in flight at its ends, so its order reclaims those whose simulated swap-out has ended.

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from simulator.plan import Swap
from simulator.pool.pinned_places import PinnedSlots
from simulator.program import Program
from simulator.schedule import Schedule, Step
from simulator.timeline import Timeline

MAX_ITERATIONS = 16

# A move and its block of the schedule. out: start the copy to the host (rule 4); reclaim: wait for that copy and free
# the memory; release: free the memory, the host copy being valid; in: allocate and start the swap-in; wait: for it.
MoveKind = Literal["out", "in", "reclaim", "wait", "release"]
Move = tuple[MoveKind, int]


class Item(NamedTuple):
    """One launch on the compute stream.

    Attributes:
        step: the schedule step.
        before, after: moves issued before and after it.
        charged: bytes allocated, workspace included.
        freed: bytes freed at its end.
    """

    step: Step
    before: tuple[Move, ...]
    charged: int
    freed: int
    after: tuple[Move, ...]


@dataclass(frozen=True)
class Order:
    """One steady-state iteration.

    Attributes:
        items: one item per schedule step, in order.
        start: location of non-resident tensors at the iteration boundary: "host", "out" (swap-out in flight) or "in"
            (swap-in in flight).
        used: bytes in use at the boundary.
        peak: peak bytes in use.
        limit: memory limit in bytes.
    """

    schedule: Schedule
    items: tuple[Item, ...]
    start: dict[int, Literal["host", "out", "in"]]
    used: int
    peak: int
    limit: int

    @property
    def program(self) -> Program:
        """The program under the plan's variants."""
        return self.schedule.program

    def host_slots(self, alignment: int) -> PinnedSlots:
        """Returns the host slots. The clock counts moves; a slot is held until compute has waited for its swap-in."""
        moves = [move for item in self.items for move in item.before + item.after]
        times: dict[str, dict[int, list[int]]] = {"out": {}, "wait": {}}
        for time, (kind, block) in enumerate(moves):
            if kind in times:
                times[kind].setdefault(self.schedule.blocks[block].owner, []).append(time)
        nbytes = [t.nbytes for t in self.program.tensors]
        return PinnedSlots(times["out"], times["wait"], nbytes, max(len(moves), 1), alignment)


def order(schedule: Schedule, timeline: Timeline, graph: bool = False) -> Order:
    """Returns the order in which a plan is issued.

    Args:
        schedule: schedule of the plan.
        timeline: timeline of the same plan, simulated at the memory limit of the order.
        graph: whether the order is captured as a CUDA graph (rule 5).

    Returns:
        one item per schedule step, in order, with the bytes in use.

    Raises:
        PlanError: the plan contains a kind of decision that training does not support.
    """
    schedule.plan.only("a training step", "swap", "recompute", "rerun")
    builder = _IssueBuilder(schedule, timeline.limit, graph)
    builder.read_timeline(timeline)
    for _ in range(MAX_ITERATIONS):
        state = builder.state()
        out = builder.iteration()
        if builder.state() == state:
            return out
    builder.barrier = True
    builder.iteration()
    return builder.iteration()


class _IssueBuilder:
    """Walk over iterations item by item; items and kernels are numbered consecutively across iterations."""

    def __init__(self, schedule: Schedule, limit: int, graph: bool):
        self.schedule = schedule
        self.limit = limit
        self.graph = graph
        self.program = schedule.program
        self.steps = schedule.steps
        self.residency = np.array(schedule.residency, np.int64)
        self.size = [t.nbytes for t in self.program.tensors]
        self.n = len(self.program.kernels)
        # The simulator makes these copies in the previous iteration; here the user may change the content between (4).
        self.recopied = [d for d in schedule.moved if d.copy is not None and d.copy > d.after]
        self.position = self.clock = 0  # numbers of finished kernels and items
        self.copying: list[int] = []  # tensors with a copy to the host in flight, in order of issue
        # Those with an open gap -> the item before which the simulated swap-out has ended.
        self.swapping_out: dict[int, int] = {}
        self.swapping_in: set[int] = set()  # swap-in in flight
        self.restored: dict[int, int] = {}  # tensor swapped in or being swapped in -> the kernel that needs it
        self.evicted: dict[int, Swap] = {}  # tensors on the host or being swapped out
        self.needed_at: dict[int, int] = {}  # tensor in ``evicted`` -> the kernel that needs it
        self.block: dict[int, int] = {}  # tensor -> its block swapped out or in last
        self.valid = set(schedule.away_at_start)  # tensors with a valid host copy
        self.barrier = False
        self.waits: dict[tuple[int, int], int] = {}  # (tensor, kernel) -> the kernel's first item that waits for it
        for d in schedule.moved:
            if d.tensor in schedule.away_at_start and d.after >= d.before:
                self._open_gap(d, d.after - self.n)
        self.used = sum(b.nbytes for b in schedule.blocks if b.first < 0) - sum(self.size[t] for t in self.evicted)

    def _open_gap(self, d: Swap, position: int) -> None:
        """Opens the gap of a swap at kernel ``position``."""
        self.evicted[d.tensor], self.block[d.tensor] = d, self.schedule.moved[d]
        self.needed_at[d.tensor] = self._gap_end(d, position)

    def _gap_end(self, d: Swap, position: int) -> int:
        """Returns the kernel that ends the gap opened by kernel ``position``."""
        return position + (self.schedule.returns[d] - d.after - 1) % self.n + 1

    def state(self) -> object:
        """Returns the state that determines later iterations, relative to the boundary."""
        return (
            [(t, max(0, self.swapping_out[t] - self.clock)) for t in self.copying],
            self.swapping_in.copy(),
            {t: k - self.position for t, k in self.restored.items()},
            {t: k - self.position for t, k in self.needed_at.items()},
        )

    def read_timeline(self, timeline: Timeline) -> None:
        """Converts the simulated times of each swap to distances in items, from its last occurrence.

        ``reclaim_distance``: distance from the item that opens the gap to the first item with the memory freed.
        ``lead``: distance from the item before which the swap-in is issued to the first item that waits for it.
        """
        compute = [s for s in timeline.spans if s.stream == "compute"]
        starts = [s.start_ns for s in compute]
        ends = [s.end_ns for s in compute]
        starts += [s + timeline.iteration_ns for s in starts[-len(self.steps) :]]  # one more iteration
        self.reclaim_distance: dict[Swap, int] = {}
        self.lead: dict[Swap, int] = {}
        gaps = self.schedule.gaps_of_blocks
        count = Counter[tuple[int, bool]]()
        for event in timeline.events:
            if (swaps := gaps.get(event.block)) is None:
                continue
            is_swap_in = event.nbytes >= 0
            # A tensor created in the iteration has one more allocation at the start and one more free at the end.
            is_created = self.schedule.blocks[event.block].first >= 0
            iteration, gap = divmod(count[event.block, is_swap_in] - is_swap_in, len(swaps) + is_created)
            count[event.block, is_swap_in] += 1
            if gap == len(swaps):
                continue
            d = swaps[gap]
            item = bisect_left(starts, event.time_ns)
            if not is_swap_in:
                self.reclaim_distance[d] = item - iteration * len(self.steps) - self.schedule.step_of(d.after)
                continue
            # Before the running item; before the next one if none is running or one is just starting.
            if item and (item > len(ends) or ends[item - 1] > event.time_ns):
                item -= 1
            self.lead[d] = self._first_wait(d.tensor, self._gap_end(d, iteration * self.n + d.after)) - item

    def _first_wait(self, t: int, k: int) -> int:
        """Returns the first item of kernel ``k`` that needs the tensor."""
        iteration, k = divmod(k, self.n)
        if (t, k) not in self.waits:
            items = range(self.schedule.first[k], self.schedule.first[k + 1])
            self.waits[t, k] = next(i for i in items if t in self.steps[i].waits)
        return iteration * len(self.steps) + self.waits[t, k]

    # ------------------------------------------------------------------------------------------ moves

    def _start_copy(self, d: Swap, moves: list[Move]) -> None:
        if d.tensor not in self.valid and d.tensor not in self.copying:
            moves.append(("out", self.schedule.moved[d]))
            self.copying.append(d.tensor)

    def _oldest(self) -> int:
        """Returns the tensor of the oldest swap-out in flight."""
        return next(t for t in self.copying if t in self.swapping_out)

    def _reclaim(self, moves: list[Move]) -> None:
        """Reclaims the memory of the oldest swap-out."""
        t = self._oldest()
        self.copying.remove(t)
        del self.swapping_out[t]
        moves.append(("reclaim", self.block[t]))
        self.valid.add(t)
        self.used -= self.size[t]

    def _make_room(self, nbytes: int, moves: list[Move]) -> None:
        while self.used + nbytes > self.limit and self.swapping_out:
            self._reclaim(moves)

    def _swap_in(self, t: int, moves: list[Move]) -> None:
        while t in self.swapping_out:
            self._reclaim(moves)
        self._make_room(self.size[t], moves)
        moves.append(("in", self.block[t]))
        self.used += self.size[t]
        self.swapping_in.add(t)
        self.restored[t] = self.needed_at.pop(t)
        del self.evicted[t]

    def _fits(self, t: int, charge: int) -> bool:
        """Returns True if a swap-in before an item of ``charge`` bytes fits until its use without extra waits.

        This repeats the simulator's rule 5 on the order's own ledger: here swap-outs end later, copies are repeated
        (rule 4), and if iterations differ, the times are those of the last one.
        """
        reclaimable = {x for x, item in self.swapping_out.items() if item <= self.clock}
        if t in self.swapping_out and t not in reclaimable:
            return False
        free = sum(self.size[x] for x in reclaimable)
        if self.used - free + self.size[t] + charge > self.limit:
            return False
        load = self.residency.take(range(self.position, self.needed_at[t]), mode="wrap")
        for x, k in self.restored.items():
            load[: k - self.position] += self.size[x]
        return bool((load + self.size[t] <= self.limit).all())

    def iteration(self) -> Order:
        """Walks over one iteration and returns its order."""
        self.valid &= self.evicted.keys()
        start: dict[int, Literal["host", "out", "in"]] = dict.fromkeys(self.swapping_in, "in")
        start = {t: "out" if t in self.swapping_out else "host" for t in self.evicted} | start
        used = peak = self.used
        items: list[Item] = []
        end = self.position + self.n
        blocks = self.schedule.blocks
        for step in self.steps:
            before: list[Move] = []
            after: list[Move] = []
            if not items:
                for d in self.recopied:
                    self._start_copy(d, before)
            charged, freed = (sum(blocks[b].nbytes for b in ids) for ids in (step.allocates, step.frees))
            for t in sorted(step.waits & self.evicted.keys(), key=lambda t: (self.needed_at[t], t)):
                self._swap_in(t, before)
            peak = max(peak, self.used)
            for t in sorted(self.evicted, key=lambda t: (self.needed_at[t], t)):
                d = self.evicted[t]
                kernel = self.needed_at[t]
                if self.clock < self._first_wait(t, kernel) - self.lead.get(d, 0) or (self.barrier and kernel >= end):
                    continue
                if not self._fits(t, charged):
                    break
                self._swap_in(t, before)
            self._make_room(charged, before)
            for t in sorted(step.waits & self.swapping_in):
                before.append(("wait", self.block[t]))
                self.swapping_in.remove(t)
            if self.used + charged > self.limit:
                raise AssertionError(
                    f"kernel {step.kernel} does not fit into {self.limit:,} bytes, unlike planned; report it"
                )
            peak = max(peak, self.used + charged)
            self.used += charged - freed
            if not step.is_recomputation:
                self._end_kernel(step, after)
            self.clock += 1
            items.append(Item(step, tuple(before), charged, freed, tuple(after)))
        while self.swapping_out and (self.barrier or (self.graph and self.swapping_out[self._oldest()] <= self.clock)):
            self._reclaim(after)
        items[-1] = items[-1]._replace(after=tuple(after))
        return Order(self.schedule, tuple(items), start, used, peak, self.limit)

    def _end_kernel(self, step: Step, after: list[Move]) -> None:
        """Ends a kernel: starts copies and opens gaps."""
        self.valid -= set(self.program.kernels[step.kernel].outputs)
        for d in step.copies:
            if d not in self.recopied:
                self._start_copy(d, after)
        for d in step.opens:
            t = d.tensor
            self.restored.pop(t, None)
            self._open_gap(d, self.position)
            if t in self.valid:
                after.append(("release", self.block[t]))
                self.used -= self.size[t]
                continue
            self.swapping_out[t] = self.clock + self.reclaim_distance.get(d, len(self.steps))
            while d.sync and t in self.swapping_out:
                self._reclaim(after)
        self.position += 1
        self.restored = {t: p for t, p in self.restored.items() if p >= self.position}
