"""In which order a training step issues a plan: what happens before and after each kernel, iteration after iteration.

The simulator has a clock, a training step has an order: one thread issues everything ahead of the device, and events
hold back what must wait. ``order`` turns a plan into one iteration of **items** (kernels, and the kernels that are run
again, rule 7) in the order of the compute stream, each with the **moves** before and after it:

    out      start the swap-out (rule 4)             in       take memory and start the swap-in (rule 5)
    reclaim  wait for the swap-out, free its memory  wait     wait for the swap-in
    release  free: the copy on the host is valid     drop     free: the tensor will be recomputed

The simulated times become places in this order (reasons in executor/training/README.md):

1. A swap-in is issued before the item that ran when its transfer started, or after it if its memory is only free then.
2. A swap-out's memory is taken when it is needed, the oldest first (rule 8), and as late as the limit allows.
3. The limit holds at every item by the items' own ledger; an early swap-in never takes what later items need (rule 5).
4. Copies on the host are valid within the iteration; at its boundary only those of tensors that are away.
5. An iteration ends with the moves under way with which it starts, or (``MAX_ITERATIONS``) waits for its copies.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from simulator.compiled.engine import simulate
from simulator.machine import Machine
from simulator.plan import Decision, Plan, Recompute, Swap
from simulator.program import Program
from simulator.reference import Schedule, resolve
from simulator.timeline import Timeline

MAX_ITERATIONS = 16

Move = tuple[Literal["out", "in", "reclaim", "wait", "release", "drop"], int]  # and the tensor


class Item(NamedTuple):
    """One launch on the compute stream.

    Attributes:
        before_kernel: the kernel for which this one runs again; the kernel itself where it does not.
        charged, freed: bytes that it takes (with its workspace) and gives back when it is over.
    """

    kernel: int
    before_kernel: int
    rerun: bool
    before: tuple[Move, ...]
    charged: int
    freed: int
    after: tuple[Move, ...]


@dataclass(frozen=True)
class Order:
    """One steady iteration.

    Attributes:
        program: under the plan's variants.
        dropped: per kernel for which others run again, the tensors that are dropped when these begin.
        start: where tensors are at the boundary that are not resident: "host", "out" (leaving) or "in" (coming back).
        used: bytes in use at the boundary.
        peak: largest number of bytes in use.
    """

    program: Program
    schedule: Schedule
    dropped: dict[int, frozenset[int]]
    items: tuple[Item, ...]
    start: dict[int, Literal["host", "out", "in"]]
    used: int
    peak: int
    limit: int


def order(program: Program, plan: Plan, machine: Machine, limit: int) -> Order:
    """The order of issue of a plan.

    Raises:
        PlanError: the plan does not fit the program or the host's memory.
        OutOfMemory: it is infeasible at the limit.
    """
    timeline = simulate(program, plan, machine, limit)
    program = program.with_variants(plan.variants)
    walk = _Walk(program, plan, limit)
    walk.read(timeline)
    for _ in range(MAX_ITERATIONS):
        before = walk.state()
        out = walk.iteration()
        if walk.state() == before:
            return out
    walk.barrier = True
    walk.iteration()
    return walk.iteration()


class _Leaving(NamedTuple):
    tensor: int
    over: int  # the item before which its simulated copy is over


class _Walk:
    """Iterations, item by item. Items and kernels are counted from the first one on, over all iterations."""

    def __init__(self, program: Program, plan: Plan, limit: int):
        self.program, self.limit = program, limit
        self.schedule = schedule = resolve(program, plan.decisions)
        self.residency = np.array(schedule.residency, np.int64)
        self.size = [t.nbytes for t in program.tensors]
        self.n = len(program.kernels)
        self.opens: dict[int, list[Decision]] = {}
        for d in sorted(plan.decisions, key=lambda d: d.tensor):
            self.opens.setdefault(d.after, []).append(d)
        # Per item: kernel, for which kernel it runs, bytes allocated, freed, and the tensors that must be there.
        self.items: list[tuple[int, int, bool, int, int, frozenset[int]]] = []
        self.at: list[tuple[int, int]] = []  # per kernel: the first item that runs for it, its own item
        self.dropped: dict[int, frozenset[int]] = {}
        dropped: dict[int, Decision] = {}
        for k, kernel in enumerate(program.kernels):
            remat = schedule.remats.get(k)
            first = len(self.items)
            if remat:
                self.dropped[k] = frozenset(dropped)
                self.items += [(s.kernel, k, True, s.allocated, s.freed, remat.fetched) for s in remat.steps]
            self.at.append((first, len(self.items)))
            dropped = {t: d for t, d in dropped.items() if schedule.returns.get(d) != k}
            dropped |= {d.tensor: d for d in self.opens.get(k, ()) if isinstance(d, Recompute)}
            uses = program.accesses
            mine = [t for t in kernel.accesses if not program.tensors[t].persistent]
            born = sum(self.size[t] for t in mine if uses[t][0] == k)
            dies = sum(self.size[t] for t in mine if uses[t][-1] == k)
            waits = frozenset(kernel.accesses) - (remat.recovered if remat else frozenset())
            self.items.append((k, k, False, born, dies, waits))
        self.position = self.clock = 0  # kernels and items that are over
        self.leaving: deque[_Leaving] = deque()
        self.coming: set[int] = set()  # on the way back
        self.early: dict[int, int] = {}  # tensor that has come or is coming back -> kernel that needs it
        self.away: dict[int, Swap] = {}  # on the host or leaving
        self.needed: dict[int, int] = {}  # of those: the kernel that needs it
        self.valid = set(schedule.away_at_start)  # copies on the host
        self.barrier = False
        for d in plan.decisions:
            if d.tensor in schedule.away_at_start and d.after >= d.before and isinstance(d, Swap):
                self.away[d.tensor], self.needed[d.tensor] = d, self._ahead(d, d.after - self.n)
        persistent = sum(t.nbytes for t in program.tensors if t.persistent)
        self.used = persistent - sum(self.size[t] for t in self.away)

    def _ahead(self, d: Decision, position: int) -> int:
        """The kernel that ends the gap which kernel ``position`` opened."""
        return position + (self.schedule.returns[d] - d.after - 1) % self.n + 1

    def state(self) -> object:
        """What the iterations to come depend on, relative to the boundary."""
        return (
            [(x.tensor, max(0, x.over - self.clock)) for x in self.leaving],
            self.coming.copy(),
            {t: k - self.position for t, k in self.early.items()},
            {t: k - self.position for t, k in self.needed.items()},
        )

    def read(self, timeline: Timeline) -> None:
        """The simulated times as places, the last of each decision.

        ``over``: items from the one that opens the gap to the first that starts when the swap-out is over.
        ``lead``: items from that before which the swap-in is issued to the first one that waits for it.
        """
        spans = timeline.spans
        compute = [s for s in spans if s.stream == "compute"]
        starts, ends = [s.start_ns for s in compute], [s.end_ns for s in compute]
        starts += [s + timeline.iteration_ns for s in starts[-len(self.items) :]]  # the iteration after the last
        kernels = [i for i, s in enumerate(compute) if s.kind == "kernel"]  # their items
        self.over: dict[Decision, int] = {}
        self.lead: dict[Decision, int] = {}
        swaps: dict[int, list[Swap]] = {}
        for ds in self.opens.values():
            for d in ds:
                if isinstance(d, Swap):
                    swaps.setdefault(d.tensor, []).append(d)
        kernel_ends = [ends[i] for i in kernels]
        for s in spans:
            if s.stream == "compute":
                continue
            done = bisect_right(kernel_ends, s.start_ns) - 1  # the last kernel that is over

            def opened(d: Swap, done: int = done) -> int:
                return done - (done - d.after) % self.n

            d = max(swaps[s.index], key=opened)
            opening = opened(d)
            if s.kind == "swap_out":
                item = kernels[opening] if opening >= 0 else 0
                self.over[d] = bisect_left(starts, s.end_ns) - item
            else:
                # Before the item that is running; where none is or one starts just now, before the next.
                running = bisect_left(starts, s.start_ns)
                if running and (running > len(ends) or ends[running - 1] > s.start_ns):
                    running -= 1
                k = self._ahead(d, opening)
                self.lead[d] = k // self.n * len(self.items) + self._first_wait(d, k % self.n) - running

    def _first_wait(self, d: Swap, k: int) -> int:
        """The first item of kernel k that needs the tensor."""
        remat = self.schedule.remats.get(k)
        return self.at[k][0] if remat and d.tensor in remat.fetched else self.at[k][1]

    # ------------------------------------------------------------------------------------------ moves

    def _reclaim(self, moves: list[Move]) -> None:
        gone = self.leaving.popleft()
        moves.append(("reclaim", gone.tensor))
        self.valid.add(gone.tensor)
        self.used -= self.size[gone.tensor]

    def _make_room(self, nbytes: int, moves: list[Move]) -> None:
        while self.used + nbytes > self.limit and self.leaving:
            self._reclaim(moves)

    def _swap_in(self, t: int, moves: list[Move]) -> None:
        while t not in self.valid or any(x.tensor == t for x in self.leaving):
            self._reclaim(moves)
        self._make_room(self.size[t], moves)
        moves.append(("in", t))
        self.used += self.size[t]
        self.coming.add(t)
        self.early[t] = self.needed.pop(t)
        del self.away[t]

    def _fits(self, t: int, charge: int) -> bool:
        """Can the swap-in be issued before an item that takes ``charge`` bytes, without a wait that the simulator does
        not have, now and by the planned residency until its use?"""
        gone = {x.tensor for x in self.leaving if x.over <= self.clock}
        if t not in gone and any(x.tensor == t for x in self.leaving):
            return False
        free = sum(self.size[x] for x in gone)
        if self.used - free + self.size[t] + charge > self.limit:
            return False
        load = self.residency.take(range(self.position, self.needed[t]), mode="wrap")
        for x, k in self.early.items():
            load[: k - self.position] += self.size[x]
        return bool((load + self.size[t] <= self.limit).all())

    def iteration(self) -> Order:
        """Walks over one iteration."""
        self.valid = {t for t in self.away if t in self.valid}
        leaving = {x.tensor for x in self.leaving}
        start: dict[int, Literal["host", "out", "in"]] = {}
        start |= {t: "out" if t in leaving else "host" for t in self.away}
        start |= dict.fromkeys(self.coming, "in")
        used = peak = self.used
        items = []
        end = self.position + self.n
        for w, k, rerun, allocated, freed, waits in self.items:
            before: list[Move] = []
            after: list[Move] = []
            charged = allocated + self.program.kernels[w].workspace
            for t in sorted((t for t in waits if t in self.away), key=lambda t: (self.needed[t], t)):
                self._swap_in(t, before)
            peak = max(peak, self.used)
            for t in sorted(self.away, key=lambda t: (self.needed[t], t)):
                d, k_back = self.away[t], self.needed[t]
                place = k_back // self.n * len(self.items) + self._first_wait(d, k_back % self.n)
                if self.clock < place - self.lead.get(d, 0) or (self.barrier and k_back >= end):
                    continue
                if not self._fits(t, charged):
                    break
                self._swap_in(t, before)
            self._make_room(charged, before)
            for t in sorted(waits & self.coming):
                before.append(("wait", t))
                self.coming.remove(t)
            if self.used + charged > self.limit:
                raise AssertionError(f"kernel {w}: the planned residency promised that it would fit")
            peak = max(peak, self.used + charged)
            self.used += allocated - freed
            if not rerun:
                self._over(k, after)
            self.clock += 1
            items.append(Item(w, k, rerun, tuple(before), charged, charged - allocated + freed, tuple(after)))
        if self.barrier:
            while self.leaving:
                self._reclaim(after)
            items[-1] = items[-1]._replace(after=tuple(after))
        return Order(self.program, self.schedule, self.dropped, tuple(items), start, used, peak, self.limit)

    def _over(self, k: int, after: list[Move]) -> None:
        """Kernel k is over: gaps open."""
        self.valid -= set(self.program.kernels[k].outputs)
        for d in self.opens.get(k, ()):
            t = d.tensor
            if isinstance(d, Recompute):
                after.append(("drop", t))
                self.used -= self.size[t]
                continue
            self.early.pop(t, None)
            self.away[t], self.needed[t] = d, self._ahead(d, self.position)
            if t in self.valid:
                after.append(("release", t))
                self.used -= self.size[t]
                continue
            after.append(("out", t))
            self.leaving.append(_Leaving(t, self.clock + self.over.get(d, len(self.items))))
            if d.sync:
                while any(x.tensor == t for x in self.leaving):
                    self._reclaim(after)
        self.position += 1
        self.early = {t: p for t, p in self.early.items() if p >= self.position}
