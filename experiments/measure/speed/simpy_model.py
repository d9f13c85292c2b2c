"""SimPy model of the simulator's rules (simulator/RULES.md), the baseline of the speed suite.

Compute, swap-outs and swap-ins are SimPy processes; every completion wakes the waiting ones. Simultaneous events are
ordered by priority (rule 9): completions (SimPy's timeouts), then starts of swap-outs, of swap-ins and of steps. The
model takes a plan's schedule as input.
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

# Priorities of simultaneous events. They are plain integers, because the model is timed and an IntEnum costs 3 %.
COMPLETED = 1  # SimPy's NORMAL
SETTLED = 2
START_OUT = 3
START_IN = 4
START_STEP = 5
NEXT_ROUND = 6  # work of zero duration completes after all other starts

Events = Generator[simpy.Event, Any, None]


@dataclass
class Evicted:
    """A swapped-out tensor in one of its gaps. Positions count kernels from the start of the run."""

    tensor: int
    before: int  # position of the kernel that needs it
    ready: int  # earliest position of its swap-in
    pinned: bool  # whether the plan, not rule 5, sets ``ready``
    sync: bool  # no step starts before its swap-out completes
    out: bool = False  # whether the swap-out is complete
    blocked: int = -1  # position of a kernel that leaves no memory for it


@dataclass
class Copy:
    """A copy in flight."""

    work: int  # remaining ns at full speed when ``since`` was set, times ALONE
    since: int  # time in ns
    rate: int  # speed, in 1 / ALONE
    disturbed: simpy.Event | None = None  # fires when the other direction starts or ends; None: no effect on this copy


class Model:
    """Simulation of a program under a plan."""

    def __init__(self, schedule: Schedule, machine: Machine, limit: int, iterations: int):
        schedule.plan.only("the SimPy model", "swap", "recompute", "rerun")
        self.env = simpy.Environment()
        self.schedule = schedule
        if schedule.required_bytes > limit:
            raise MemoryError(
                f"the plan needs {schedule.required_bytes:,} bytes, over the limit of {limit:,}; raise it or plan again"
            )
        if max(schedule.on_host) > machine.host_bytes:
            raise MemoryError(
                f"the plan needs {max(schedule.on_host):,} bytes of host memory, more than {machine.host_bytes:,}; "
                "swap less"
            )
        self.program = program = schedule.program
        self.machine = machine
        self.limit = limit
        self.iterations = iterations
        self.n = len(program.kernels)
        self.size = [t.nbytes for t in program.tensors]
        self.allocated = [sum(schedule.blocks[b].nbytes for b in step.allocates) for step in schedule.steps]
        self.freed = [sum(schedule.blocks[b].nbytes for b in step.frees) for step in schedule.steps]
        self.used = sum(block.nbytes for block in schedule.blocks if block.first < 0)
        self.away: dict[int, Evicted] = {}
        self.host_copy: set[int] = set()  # tensors with a valid copy on the host
        for d in schedule.moved:
            if d.tensor in schedule.away_at_start and d.after >= d.before:
                self.away[d.tensor] = self.evict(d, d.after - self.n)
                self.release(self.away[d.tensor])
            elif d.copy is None or d.copy <= d.after:
                continue
            self.host_copy.add(d.tensor)
        self.residency = np.array(schedule.residency)  # planned bytes per kernel
        self.booked = self.residency.copy()  # the same including early swap-ins, for the next n kernels
        self.position = 0  # current kernel, or the next one between kernels
        self.kernel_runs = False
        self.queue: deque[tuple[int, int]] = deque()  # pending swap-outs: tensor, position when enqueued
        self.copying: dict[int, Copy] = {}  # by direction: START_OUT, START_IN
        self.sleeping: dict[int, simpy.Event] = {}
        self.round: simpy.Event | None = None
        self.durations: list[int] = []  # duration of each iteration in ns
        self.states = [self.state()]  # state before the first iteration and after each one

    def run(self) -> int:
        """Runs the simulation and returns the duration of the last iteration in ns."""
        self.env.process(self.swap_outs())
        self.env.process(self.swap_ins())
        self.env.run(until=self.env.process(self.compute()))
        return self.durations[-1]

    def state(self) -> object:
        """Returns the state at an iteration boundary that determines all later iterations."""
        copies = sorted((key, c.work - c.rate * (self.env.now - c.since)) for key, c in self.copying.items())
        away = sorted((t, a.before - self.position, a.out) for t, a in self.away.items())
        return copies, away, [t for t, _ in self.queue], sorted(self.host_copy), self.used

    def is_steady(self) -> bool:
        """Returns whether a state has repeated and the last iteration is the slowest of the period (rule 10)."""
        *before, current = self.states
        if len(self.durations) < self.iterations:
            return False
        seen = [i for i, state in enumerate(before) if state == current][-1:]
        return len(self.durations) >= MAX_ITERATIONS or any(self.durations[-1] == max(self.durations[i:]) for i in seen)

    # ------------------------------------------------------------------------------- taking turns

    def event_now(self, priority: int) -> simpy.Event:
        """Returns an event at the current time with the given priority."""
        return self._fire(simpy.Event(self.env), priority)

    def after(self, ns: int) -> simpy.Event:
        """Returns an event after ``ns``; for 0, after all other starts at the current time."""
        if ns:
            return self.env.timeout(ns)
        if self.round is None or self.round.processed:
            self.round = self.event_now(NEXT_ROUND)
        return self.round

    def sleep(self, priority: int) -> simpy.Event:
        """Returns an event that ``wake_all`` triggers, ordered by ``priority``; one process sleeps per priority."""
        event = self.sleeping[priority] = simpy.Event(self.env)
        return event

    def wake_all(self) -> None:
        """Wakes all sleeping processes."""
        for priority, event in self.sleeping.items():
            self._fire(event, priority)
        self.sleeping.clear()

    def _fire(self, event: simpy.Event, priority: int) -> simpy.Event:
        # Event.succeed with a custom priority
        event._ok = True
        event._value = None
        self.env.schedule(event, priority)
        return event

    # ---------------------------------------------------------------------------------- processes

    def compute(self) -> Events:
        """Runs the steps in order (rules 1 to 3 and 8)."""
        steps = self.schedule.steps
        begin = 0
        while True:
            for step, allocated, freed in zip(steps, self.allocated, self.freed, strict=True):
                yield self.event_now(START_STEP)
                while (
                    self.used + allocated > self.limit
                    or any(t in self.away for t in step.waits)
                    or any(a.sync for a in self.away.values())
                ):
                    yield self.sleep(START_STEP)
                self.used += allocated
                self.kernel_runs = not step.is_recomputation
                yield self.after(step.duration_ns)
                self.kernel_runs = False
                self.used -= freed
                if not step.is_recomputation:
                    self.kernel_ends(step.kernel, step.opens, step.copies)
                self.wake_all()
            for t in [t for t in self.host_copy if not self.program.tensors[t].persistent]:
                self.host_copy.discard(t)  # freed; the next iteration writes a new one
            self.durations.append(self.env.now - begin)
            begin = self.env.now
            yield self.event_now(SETTLED)  # copies that complete at this instant
            self.states.append(self.state())
            if self.is_steady():
                return

    def swap_outs(self) -> Events:
        """Runs the swap-outs first in, first out (rule 4)."""
        while True:
            while not self.queue or (self.machine.copy_engines == 1 and (self.copying or self.swap_in_goes_first())):
                yield self.sleep(START_OUT)
            tensor, _ = self.queue.popleft()
            yield from self.copy(START_OUT, self.machine.d2h_ns(self.size[tensor]))
            self.host_copy.add(tensor)
            if tensor in self.away:
                self.release(self.away[tensor])
            self.wake_all()
            yield self.event_now(START_OUT)

    def swap_ins(self) -> Events:
        """Runs the swap-ins in order of next use, once memory suffices until then (rules 5 and 6)."""
        while True:
            while (self.machine.copy_engines == 1 and self.copying) or (evicted := self.next_swap_in()) is None:
                yield self.sleep(START_IN)
            nbytes = self.size[evicted.tensor]
            self.used += nbytes
            for part in self.kernels_until_use(evicted):
                self.booked[part] += nbytes
            evicted.out = False
            yield from self.copy(START_IN, self.machine.h2d_ns(nbytes))
            del self.away[evicted.tensor]
            self.wake_all()
            yield self.event_now(START_IN)

    def copy(self, direction: int, duration_ns: int) -> Events:
        """Runs one transfer; its rate changes when a slowing copy in the other direction starts or ends."""
        share = self.machine.d2h_share if direction == START_OUT else self.machine.h2d_share
        current = self.copying[direction] = Copy(duration_ns * ALONE, self.env.now, ALONE)
        if duration_ns:
            self.disturb(direction)
        if share == ALONE or not duration_ns:
            yield self.after(duration_ns)
        else:
            while current.work > 0:
                current.since = self.env.now
                current.rate = share if len(self.copying) == 2 else ALONE
                current.disturbed = simpy.Event(self.env)
                yield self.env.timeout(-(-current.work // current.rate)) | current.disturbed
                current.work -= current.rate * (self.env.now - current.since)
        del self.copying[direction]
        self.disturb(direction)

    def disturb(self, direction: int) -> None:
        """Signals the other direction's copy that a copy in direction ``direction`` has started or ended."""
        for other, copy in self.copying.items():
            if other != direction and copy.disturbed is not None and not copy.disturbed.triggered:
                copy.disturbed.succeed()

    # -------------------------------------------------------------------------------------- rules

    def kernel_ends(self, k: int, opens: tuple[Swap, ...], copies: tuple[Swap, ...]) -> None:
        """Opens gaps and enqueues swap-outs at the end of kernel ``k``."""
        self.host_copy.difference_update(self.program.kernels[k].outputs)
        for d in opens:
            evicted = self.away[d.tensor] = self.evict(d, self.position)
            if d.tensor in self.host_copy:
                self.release(evicted)
        self.position += 1
        self.queue.extend((d.tensor, self.position) for d in copies if d.tensor not in self.host_copy)
        self.booked[k] = self.residency[k]

    def evict(self, d: Swap, position: int) -> Evicted:
        """Returns the state of ``d``'s tensor when its gap opens, at the end of the kernel at ``position``."""
        ready = position + 1
        if d.prefetch is not None and d.prefetch != d.after:
            ready = position + (d.prefetch - d.after - 1) % self.n + 2
        before = position + (self.schedule.returns[d] - d.after - 1) % self.n + 1
        return Evicted(d.tensor, before, ready, d.prefetch is not None, d.sync)

    def release(self, evicted: Evicted) -> None:
        """Frees the device memory of a tensor whose swap-out is complete."""
        evicted.sync = False
        evicted.out = True
        self.used -= self.size[evicted.tensor]

    def first_ready(self) -> Evicted | None:
        """Returns the tensor ready for swap-in that is needed first."""
        waiting = [a for a in self.away.values() if a.out and (self.position >= a.ready or self.position == a.before)]
        return min(waiting, key=lambda a: (a.before, a.tensor), default=None)

    def swap_in_goes_first(self) -> bool:
        """Returns whether a single copy engine serves a swap-in next: one issued earlier that can start now."""
        first = self.first_ready()
        return first is not None and first.pinned and first.ready < self.queue[0][1] and self.next_swap_in() is first

    def next_swap_in(self) -> Evicted | None:
        """Returns the swap-in that can start now, or None."""
        first = self.first_ready()
        if first is None:
            return None
        nbytes = self.size[first.tensor]
        start = self.position + self.kernel_runs
        if self.used + nbytes > self.limit or first.blocked >= start:
            return None
        for part in reversed(self.kernels_until_use(first)):
            full = np.flatnonzero(self.booked[part] > self.limit - nbytes)
            if full.size:
                # Blocked until that kernel ends; its position is in the next n kernels.
                first.blocked = start + (part.start + int(full[-1]) - start) % self.n
                return None
        return first

    def kernels_until_use(self, evicted: Evicted) -> list[slice]:
        """Returns the kernels from now until the tensor's use, as one or two slices of an iteration."""
        start = self.position + self.kernel_runs
        stop = evicted.before
        if start >= stop:
            return []
        first = start % self.n
        last = (stop - 1) % self.n + 1
        return [slice(first, last)] if first < last else [slice(first, self.n), slice(0, last)]


def simulate(schedule: Schedule, machine: Machine, limit: int, iterations: int = 1) -> int:
    """Returns the steady iteration's duration in ns, equal to ``Engine.score``; raises MemoryError if infeasible.

    Args:
        schedule: lowered plan.
        machine: machine to simulate.
        limit: memory limit in bytes.
        iterations: minimum number of simulated iterations.
    """
    return Model(schedule, machine, limit, iterations).run()
