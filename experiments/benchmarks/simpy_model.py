"""The simulator's rules for swaps (simulator/reference.py) as a SimPy model: the peer that bench times.

Written as one would with SimPy: compute, the swap-outs and the swap-ins are processes; whoever completes
something wakes those that wait. Events of one instant are ordered by their priority (rule 9): completions
(SimPy's own timeouts), then starts of swap-outs, of swap-ins, of kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import simpy

from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.reference import MAX_ITERATIONS

COMPLETED, START_OUT, START_IN, START_KERNEL = 1, 2, 3, 4  # the first is SimPy's NORMAL


@dataclass
class Away:
    """A tensor in one of its gaps. Positions count kernels from the start of the run."""

    tensor: int
    before: int  # position of the kernel that needs it
    ready: int  # position from which it may come back
    sync: bool  # no kernel starts until its bytes have left
    out: bool = False  # its bytes have left
    blocked: int = -1  # the kernel at this position leaves no room for it


class Model:
    """One run of a program under a plan of swaps."""

    def __init__(self, program: Program, plan: Plan, machine: Machine, limit: int, iterations: int):
        self.env = simpy.Environment()
        self.program, self.machine, self.limit, self.iterations = program, machine, limit, iterations
        n = self.n = len(program.kernels)
        self.size = [t.nbytes for t in program.tensors]
        self.swaps: list[list[Swap]] = [[] for _ in range(n)]  # by the kernel that opens the gap
        change = [0] * (n + 1)
        self.born, self.dies = [0] * n, [0] * n
        for t, tensor in enumerate(program.tensors):
            if not tensor.persistent and program.accesses[t]:
                self.born[program.accesses[t][0]] += tensor.nbytes
                self.dies[program.accesses[t][-1]] += tensor.nbytes
        self.used = sum(t.nbytes for t in program.tensors if t.persistent)
        self.away: dict[int, Away] = {}
        self.host_copy: set[int] = set()  # tensors with a valid copy on the host
        for d in sorted(plan.decisions, key=lambda d: d.tensor):
            if not isinstance(d, Swap):
                raise ValueError("the SimPy model knows swaps only")
            nbytes = self.size[d.tensor]
            self.swaps[d.after].append(d)
            change[d.after + 1] -= nbytes
            change[d.before] += nbytes
            if d.after >= d.before:  # over the iteration boundary: on the host when the run starts
                change[0] -= nbytes
                self.used -= nbytes
                self.host_copy.add(d.tensor)
                self.away[d.tensor] = self.leave(d, d.after - n)
                self.away[d.tensor].sync, self.away[d.tensor].out = False, True
        self.residency = np.array(program.live_bytes) + np.cumsum(change[:n])  # planned residency per kernel
        self.booked = self.residency.copy()  # with what comes back early, for the n kernels ahead
        if self.residency.max() > limit:
            raise MemoryError(f"the plan needs {self.residency.max():,} bytes, over the limit of {limit:,}")
        self.position = 0  # the kernel that runs, or else the next one
        self.kernel_runs = False
        self.queue: deque[Away] = deque()
        self.copying: dict[int, int] = {}  # START_OUT, START_IN -> end
        self.asleep: dict[int, simpy.Event] = {}
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
        copies = sorted((what, end - self.env.now) for what, end in self.copying.items())
        away = sorted((t, a.before - self.position, a.out) for t, a in self.away.items())
        return copies, away, [a.tensor for a in self.queue], sorted(self.host_copy), self.used

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

    def compute(self) -> Generator[simpy.Event, None, None]:
        """Rules 1 to 3 and 8: kernels in order."""
        kernels = self.program.kernels
        begin = 0
        while True:
            for k in range(self.n):
                kernel = kernels[k]
                yield self.turn(START_KERNEL)
                need = self.born[k] + kernel.workspace
                while (
                    self.used + need > self.limit
                    or any(t in self.away for t in kernel.accesses)
                    or any(a.sync for a in self.away.values())
                ):
                    yield self.sleep(START_KERNEL)
                self.used += need
                self.kernel_runs = True
                yield self.env.timeout(kernel.duration_ns)
                self.kernel_runs = False
                self.used -= kernel.workspace + self.dies[k]
                self.host_copy.difference_update(kernel.outputs)
                for d in self.swaps[k]:
                    gone = self.away[d.tensor] = self.leave(d, self.position)
                    if d.tensor in self.host_copy:
                        self.left(gone)
                    else:
                        self.queue.append(gone)
                self.position += 1
                self.booked[k] = self.residency[k]
                self.completed()
            for t in [t for t in self.host_copy if not self.program.tensors[t].persistent]:
                self.host_copy.discard(t)  # it died; the next iteration writes another
            self.lasts.append(self.env.now - begin)
            begin = self.env.now
            yield self.turn(COMPLETED)  # copies that complete at this instant
            self.states.append(self.state())
            if self.ends():
                return

    def swap_outs(self) -> Generator[simpy.Event, None, None]:
        """Rule 4: first in, first out."""
        while True:
            while not self.queue or (self.machine.copy_engines == 1 and self.copying):
                yield self.sleep(START_OUT)
            gone = self.queue.popleft()
            lasts = self.machine.d2h_ns(self.size[gone.tensor])
            self.copying[START_OUT] = self.env.now + lasts
            yield self.env.timeout(lasts)
            del self.copying[START_OUT]
            self.left(gone)
            self.host_copy.add(gone.tensor)
            self.completed()
            yield self.turn(START_OUT)

    def swap_ins(self) -> Generator[simpy.Event, None, None]:
        """Rules 5 and 6: by next use, when there is room until then."""
        while True:
            coming = None
            while coming is None:
                coming = self.next_in()
                if coming is None:
                    yield self.sleep(START_IN)
            nbytes = self.size[coming.tensor]
            self.used += nbytes
            for part in self.ahead(coming):
                self.booked[part] += nbytes
            coming.out = False
            lasts = self.machine.h2d_ns(nbytes)
            self.copying[START_IN] = self.env.now + lasts
            yield self.env.timeout(lasts)
            del self.copying[START_IN]
            del self.away[coming.tensor]
            self.completed()
            yield self.turn(START_IN)

    # -------------------------------------------------------------------------------------- rules

    def leave(self, d: Swap, position: int) -> Away:
        """The tensor of ``d`` when its gap opens, at the end of the kernel at ``position``."""
        ready = position + 1
        if d.prefetch is not None and d.prefetch != d.after:
            ready = position + (d.prefetch - d.after - 1) % self.n + 2
        return Away(d.tensor, position + (d.before - d.after - 1) % self.n + 1, ready, d.sync)

    def left(self, gone: Away) -> None:
        """Its bytes are free."""
        gone.sync, gone.out = False, True
        self.used -= self.size[gone.tensor]

    def next_in(self) -> Away | None:
        """The swap-in that can start now."""
        if self.machine.copy_engines == 1 and self.copying:
            return None
        waiting = [a for a in self.away.values()
                   if a.out and (self.position >= a.ready or self.position == a.before)]  # fmt: skip
        if not waiting:
            return None
        first = min(waiting, key=lambda a: (a.before, a.tensor))
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


def simulate(program: Program, plan: Plan, machine: Machine, limit: int, iterations: int = 1) -> int:
    """Duration of the steady iteration in ns, as ``Engine.score`` has it; raises MemoryError if infeasible.

    Args:
        iterations: how many are simulated at least.
    """
    return Model(program.with_variants(plan.variants), plan, machine, limit, iterations).run()
