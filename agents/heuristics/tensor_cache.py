"""Tensor Cache of SuperNeurons at run time (PPoPP 2018, section 3.3.2, Algorithm 2).

``TensorCache`` is Algorithm 2: an LRU list with locks, ``insert`` (LRU.in), ``evict`` (LRU.out) and ``check``. ``run``
executes a program with it: tensors are evicted when memory is short, and fetched on a miss. Deviations:

1. The list holds the outputs that section 3.3.1 offloads (CONV layers). Others are live from first write to last use.
2. An eviction without a valid host copy delays the kernel until its transfer ends, since the kernel needs the memory.
3. A backward CONV layer prefetches the inputs of the next one (section 3.3.1) only if they fit without an eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from agents.heuristics.superneurons import CONV, layer_outputs
from agents.planner import MIB, Infeasible
from simulator.machine import Machine
from simulator.program import Program


@dataclass
class TensorCache:
    """LRU list of the tensors in device memory; locked tensors cannot be evicted.

    Attributes:
        lru: tensors in order of their last use, least recent first.
        locked: tensors that the running layer uses.
    """

    lru: OrderedDict[int, None] = field(default_factory=OrderedDict)
    locked: set[int] = field(default_factory=set)
    hits: int = 0
    misses: int = 0

    def insert(self, tensor: int) -> None:
        """Adds a tensor as the most recently used (LRU.in)."""
        self.lru[tensor] = None
        self.lru.move_to_end(tensor)

    def evict(self) -> int | None:
        """Removes and returns the least recently used unlocked tensor (LRU.out), or None if all are locked."""
        tensor = next((t for t in self.lru if t not in self.locked), None)
        if tensor is not None:
            del self.lru[tensor]
        return tensor

    def check(self, tensor: int) -> bool:
        """Returns whether the tensor is in memory (a hit), and then makes it the most recently used."""
        hit = tensor in self.lru
        if hit:
            self.lru.move_to_end(tensor)
        self.hits += hit
        self.misses += not hit
        return hit


@dataclass(frozen=True)
class CacheRun:
    """Result of one iteration with a Tensor Cache.

    Attributes:
        iteration_ns: duration, including all waits for transfers.
        hits, misses: uses of offloadable tensors found in memory, and fetched from the host.
        offloaded_bytes, fetched_bytes: bytes over the link in each direction.
        peak_bytes: peak memory in use.
    """

    iteration_ns: int
    hits: int
    misses: int
    offloaded_bytes: int
    fetched_bytes: int
    peak_bytes: int


def run(program: Program, machine: Machine, limit: int, min_bytes: int = MIB) -> CacheRun:
    """Executes one iteration within ``limit`` bytes with a Tensor Cache and no plan.

    Transfers of one direction are serialized; the two directions and the kernels overlap. All iterations take the same
    time, since no persistent tensor is offloaded.

    Raises:
        Infeasible: a kernel does not fit with everything offloadable evicted.
    """
    return _Run(program, machine, limit, layer_outputs(program, CONV, min_bytes)).iterate()


class _Run:
    """State of the run: bytes in use, residency of tensors, and when the streams become free."""

    def __init__(self, program: Program, machine: Machine, limit: int, cached: frozenset[int]) -> None:
        self.program, self.machine, self.limit, self.cached = program, machine, limit, cached
        self.cache = TensorCache()
        self.nbytes = [tensor.nbytes for tensor in program.tensors]
        self.used = self.peak = sum(tensor.nbytes for tensor in program.tensors if tensor.persistent)
        self.resident = {t for t, tensor in enumerate(program.tensors) if tensor.persistent}
        self.valid: set[int] = set()  # tensors with a valid host copy
        self.arrives: dict[int, int] = {}  # time at which a prefetched tensor arrives
        self.now = self.d2h_free = self.h2d_free = self.offloaded = self.fetched = 0
        self.last_use = [uses[-1] if uses else -1 for uses in program.accesses]
        convolutions = [
            k for k, kernel in enumerate(program.kernels) if (kernel.kind, kernel.phase) == ("conv", "backward")
        ]
        self.next_conv = dict(pairwise(convolutions))

    def iterate(self) -> CacheRun:
        for k, kernel in enumerate(self.program.kernels):
            touched = kernel.accesses
            self.cache.locked = set(self.cached.intersection(touched))
            missing = [t for t in touched if t not in self.resident]
            self._make_room(kernel.workspace + sum(self.nbytes[t] for t in missing), k)
            for t in touched:
                if t in self.cached and self.program.writes[t][0] < k and not self.cache.check(t):
                    self._fetch(t)
            for t in missing:
                self._allocate(t)
            self.now = max([self.now, *(self.arrives.pop(t) for t in touched if t in self.arrives)])
            self._prefetch(k)
            self.peak = max(self.peak, self.used + kernel.workspace)
            self.now += kernel.duration_ns
            self.valid.difference_update(kernel.outputs)
            self._free(t for t in touched if self.last_use[t] == k and not self.program.tensors[t].persistent)
        cache = self.cache
        return CacheRun(self.now, cache.hits, cache.misses, self.offloaded, self.fetched, self.peak)

    def _make_room(self, nbytes: int, k: int) -> None:
        """Evicts tensors until ``nbytes`` are free; the clock waits for the transfers."""
        while self.used + nbytes > self.limit:
            victim = self.cache.evict()
            if victim is None:
                raise Infeasible(
                    f"kernel {k} needs {self.used + nbytes:,} bytes with every unlocked tensor evicted; "
                    f"the limit is {self.limit:,}"
                )
            if victim not in self.valid:
                self.d2h_free = max(self.now, self.d2h_free) + self.machine.d2h_ns(self.nbytes[victim])
                self.now = self.d2h_free
                self.offloaded += self.nbytes[victim]
                self.valid.add(victim)
            self.arrives.pop(victim, None)
            self.resident.remove(victim)
            self.used -= self.nbytes[victim]

    def _fetch(self, tensor: int) -> None:
        self.h2d_free = max(self.now, self.h2d_free) + self.machine.h2d_ns(self.nbytes[tensor])
        self.arrives[tensor] = self.h2d_free
        self.fetched += self.nbytes[tensor]

    def _allocate(self, tensor: int) -> None:
        self.resident.add(tensor)
        self.used += self.nbytes[tensor]
        if tensor in self.cached:
            self.cache.insert(tensor)

    def _prefetch(self, k: int) -> None:
        """Fetches the inputs of the next backward CONV layer if they fit next to the running kernel."""
        for t in self.program.kernels[self.next_conv[k]].accesses if k in self.next_conv else ():
            absent = t in self.valid and t not in self.resident
            if absent and self.used + self.program.kernels[k].workspace + self.nbytes[t] <= self.limit:
                self._fetch(t)
                self._allocate(t)

    def _free(self, tensors: Iterable[int]) -> None:
        for t in tensors:
            self.resident.remove(t)
            self.cache.lru.pop(t, None)
            self.used -= self.nbytes[t]
