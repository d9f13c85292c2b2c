"""The simulator's clock (simulator/RULES.md) as a SimPy model: the peer that bench times.

Written as one would with SimPy: compute, the swap-outs and the swap-ins are processes; whoever completes
something wakes those that wait. Events of one instant are ordered by their priority (rule 9): completions
(SimPy's own timeouts), then starts of swap-outs, of swap-ins, of steps. What a plan means without a clock, the
schedule, is given to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from simulator.machine import ALONE, Machine
from simulator.plan import Swap
from simulator.schedule import MAX_ITERATIONS, Schedule

# The first is SimPy's NORMAL; the last is that of work without duration, which completes when all else has started.
COMPLETED, SETTLED, START_OUT, START_IN, START_STEP, NEXT_ROUND = 1, 2, 3, 4, 5, 6

Events = Generator[simpy.Event, Any, None]


@dataclass
class Away:
    """A tensor in one of its gaps. Positions count kernels from the start of the run."""

    tensor: int
    before: int  # position of the kernel that needs it
    ready: int  # position from which it may come back
    pinned: bool  # by the plan, not by rule 5
    sync: bool  # no step starts until its bytes have left
    out: bool = False  # its bytes have left
    blocked: int = -1  # the kernel at this position leaves no room for it


@dataclass
class Copy:
    """A copy under way."""

    work: int  # ns alone on the link, in parts of ALONE, that were left at ``since``
    since: int
    rate: int
    disturbed: simpy.Event | None = None  # the other direction starts or ends; None: that is nothing to it


class Model:
    """One run of a program under a plan."""

    def __init__(self, schedule: Schedule, machine: Machine, limit: int, iterations: int):
        schedule.plan.only("the SimPy model", "swap", "recompute", "rerun")
        self.env = simpy.Environment()
        self.schedule = schedule
        if schedule.required_bytes > limit:
            raise MemoryError(f"the plan needs {schedule.required_bytes:,} bytes, over the limit of {limit:,}")
        if max(schedule.on_host) > machine.host_bytes:
            raise MemoryError(f"the plan has {max(schedule.on_host):,} bytes on the host, of {machine.host_bytes:,}")
        self.program = program = schedule.program
        self.machine, self.limit, self.iterations = machine, limit, iterations
        self.n = len(program.kernels)
        self.size = [t.nbytes for t in program.tensors]
        self.takes = [sum(schedule.blocks[b].nbytes for b in step.allocates) for step in schedule.steps]
        self.gives = [sum(schedule.blocks[b].nbytes for b in step.frees) for step in schedule.steps]
        self.used = sum(block.nbytes for block in schedule.blocks if block.first < 0)
        self.away: dict[int, Away] = {}
        self.host_copy: set[int] = set()  # tensors with a valid copy on the host
        for d in schedule.moved:
            if d.tensor in schedule.away_at_start and d.after >= d.before:
                self.away[d.tensor] = self.leave(d, d.after - self.n)
                self.left(self.away[d.tensor])
            elif d.copy is None or d.copy <= d.after:
                continue
            self.host_copy.add(d.tensor)
        self.residency = np.array(schedule.residency)  # planned, per kernel
        self.booked = self.residency.copy()  # with what comes back early, for the n kernels ahead
        self.position = 0  # the kernel that runs, or else the next one
        self.kernel_runs = False
        self.queue: deque[tuple[int, int]] = deque()  # to the host: tensor, and the position from which it waits
        self.copying: dict[int, Copy] = {}  # by START_OUT, START_IN
        self.asleep: dict[int, simpy.Event] = {}
        self.round: simpy.Event | None = None
        self.lasts: list[int] = []  # what each iteration has lasted
        self.states = [self.state()]  # before the first iteration and after each

    def run(self) -> int:
        """Duration of the last iteration in ns."""
        self.env.process(self.swap_outs())
        self.env.process(self.swap_ins())
        self.env.run(until=self.env.process(self.compute()))
        return self.lasts[-1]

    def state(self) -> object:
        """What the iterations to come depend on, at a boundary and relative to it."""
        copies = sorted((what, c.work - c.rate * (self.env.now - c.since)) for what, c in self.copying.items())
        away = sorted((t, a.before - self.position, a.out) for t, a in self.away.items())
        return copies, away, [t for t, _ in self.queue], sorted(self.host_copy), self.used

    def ends(self) -> bool:
        """Rule 10: a state has come again, and the last iteration is the slowest in between."""
        *before, present = self.states
        if len(self.lasts) < self.iterations:
            return False
        since = [i for i, state in enumerate(before) if state == present][-1:]
        return len(self.lasts) >= MAX_ITERATIONS or any(self.lasts[-1] == max(self.lasts[i:]) for i in since)

    # ------------------------------------------------------------------------------- taking turns

    def turn(self, priority: int) -> simpy.Event:
        """Later in this instant."""
        return self._fire(simpy.Event(self.env), priority)

    def after(self, ns: int) -> simpy.Event:
        """When so much time has passed; without any, when everything that can has started at this instant."""
        if ns:
            return self.env.timeout(ns)
        if self.round is None or self.round.processed:
            self.round = self.turn(NEXT_ROUND)
        return self.round

    def sleep(self, priority: int) -> simpy.Event:
        """Until something completes."""
        event = self.asleep[priority] = simpy.Event(self.env)
        return event

    def completed(self) -> None:
        """Wakes all who sleep."""
        for priority, event in self.asleep.items():
            self._fire(event, priority)
        self.asleep.clear()

    def _fire(self, event: simpy.Event, priority: int) -> simpy.Event:
        event._ok, event._value = True, None  # Event.succeed, at a priority of our own
        self.env.schedule(event, priority)
        return event

    # ---------------------------------------------------------------------------------- processes

    def compute(self) -> Events:
        """Rules 1 to 3 and 8: steps in order."""
        steps = self.schedule.steps
        begin = 0
        while True:
            for step, takes, gives in zip(steps, self.takes, self.gives, strict=True):
                yield self.turn(START_STEP)
                while (
                    self.used + takes > self.limit
                    or any(t in self.away for t in step.waits)
                    or any(a.sync for a in self.away.values())
                ):
                    yield self.sleep(START_STEP)
                self.used += takes
                self.kernel_runs = not step.again
                yield self.after(step.duration_ns)
                self.kernel_runs = False
                self.used -= gives
                if not step.again:
                    self.kernel_ends(step.kernel, step.opens, step.copies)
                self.completed()
            for t in [t for t in self.host_copy if not self.program.tensors[t].persistent]:
                self.host_copy.discard(t)  # it died; the next iteration writes another
            self.lasts.append(self.env.now - begin)
            begin = self.env.now
            yield self.turn(SETTLED)  # copies that complete at this instant
            self.states.append(self.state())
            if self.ends():
                return

    def swap_outs(self) -> Events:
        """Rule 4: first in, first out."""
        while True:
            while not self.queue or (self.machine.copy_engines == 1 and (self.copying or self.return_goes_first())):
                yield self.sleep(START_OUT)
            tensor, _ = self.queue.popleft()
            yield from self.copy(START_OUT, self.machine.d2h_ns(self.size[tensor]))
            self.host_copy.add(tensor)
            if tensor in self.away:
                self.left(self.away[tensor])
            self.completed()
            yield self.turn(START_OUT)

    def swap_ins(self) -> Events:
        """Rules 5 and 6: by next use, when there is room until then."""
        while True:
            while (self.machine.copy_engines == 1 and self.copying) or (coming := self.next_in()) is None:
                yield self.sleep(START_IN)
            nbytes = self.size[coming.tensor]
            self.used += nbytes
            for part in self.ahead(coming):
                self.booked[part] += nbytes
            coming.out = False
            yield from self.copy(START_IN, self.machine.h2d_ns(nbytes))
            del self.away[coming.tensor]
            self.completed()
            yield self.turn(START_IN)

    def copy(self, what: int, lasts: int) -> Events:
        """One transfer. Where that slows it down, it is disturbed by what starts and ends in the other direction."""
        share = self.machine.d2h_share if what == START_OUT else self.machine.h2d_share
        mine = self.copying[what] = Copy(lasts * ALONE, self.env.now, ALONE)
        if lasts:
            self.disturb(what)
        if share == ALONE or not lasts:
            yield self.after(lasts)
        else:
            while mine.work > 0:
                mine.since, mine.rate = self.env.now, share if len(self.copying) == 2 else ALONE
                mine.disturbed = simpy.Event(self.env)
                yield self.env.timeout(-(-mine.work // mine.rate)) | mine.disturbed
                mine.work -= mine.rate * (self.env.now - mine.since)
        del self.copying[what]
        self.disturb(what)

    def disturb(self, what: int) -> None:
        """The direction ``what`` has started or ended: the other has another rate."""
        for other, copy in self.copying.items():
            if other != what and copy.disturbed is not None and not copy.disturbed.triggered:
                copy.disturbed.succeed()

    # -------------------------------------------------------------------------------------- rules

    def kernel_ends(self, k: int, opens: tuple[Swap, ...], copies: tuple[Swap, ...]) -> None:
        """Gaps open, and copies to the host are enqueued."""
        self.host_copy.difference_update(self.program.kernels[k].outputs)
        for d in opens:
            gone = self.away[d.tensor] = self.leave(d, self.position)
            if d.tensor in self.host_copy:
                self.left(gone)
        self.position += 1
        self.queue.extend((d.tensor, self.position) for d in copies if d.tensor not in self.host_copy)
        self.booked[k] = self.residency[k]

    def leave(self, d: Swap, position: int) -> Away:
        """The tensor of ``d`` when its gap opens, at the end of the kernel at ``position``."""
        ready = position + 1
        if d.prefetch is not None and d.prefetch != d.after:
            ready = position + (d.prefetch - d.after - 1) % self.n + 2
        before = position + (self.schedule.returns[d] - d.after - 1) % self.n + 1
        return Away(d.tensor, before, ready, d.prefetch is not None, d.sync)

    def left(self, gone: Away) -> None:
        """Its bytes are free."""
        gone.sync, gone.out = False, True
        self.used -= self.size[gone.tensor]

    def first_in(self) -> Away | None:
        """Of what may come back, what is needed first."""
        waiting = [a for a in self.away.values() if a.out and (self.position >= a.ready or self.position == a.before)]
        return min(waiting, key=lambda a: (a.before, a.tensor), default=None)

    def return_goes_first(self) -> bool:
        """One engine serves in order of issue, but what cannot start yet lets the others go before it."""
        first = self.first_in()
        return first is not None and first.pinned and first.ready < self.queue[0][1] and self.next_in() is first

    def next_in(self) -> Away | None:
        """The swap-in that can start now."""
        first = self.first_in()
        if first is None:
            return None
        nbytes, start = self.size[first.tensor], self.position + self.kernel_runs
        if self.used + nbytes > self.limit or first.blocked >= start:
            return None
        for part in reversed(self.ahead(first)):
            full = np.flatnonzero(self.booked[part] > self.limit - nbytes)
            if full.size:
                # Not before that kernel has ended; the position is the one in the iteration ahead.
                first.blocked = start + (part.start + int(full[-1]) - start) % self.n
                return None
        return first

    def ahead(self, item: Away) -> list[slice]:
        """The kernels from now until the item's use, in one or two parts of an iteration."""
        start, stop = self.position + self.kernel_runs, item.before
        if start >= stop:
            return []
        first, last = start % self.n, (stop - 1) % self.n + 1
        return [slice(first, last)] if first < last else [slice(first, self.n), slice(0, last)]


def simulate(schedule: Schedule, machine: Machine, limit: int, iterations: int = 1) -> int:
    """Duration of the steady iteration in ns, as ``Engine.score`` has it; raises MemoryError if infeasible.

    Args:
        iterations: how many are simulated at least.
    """
    return Model(schedule, machine, limit, iterations).run()
