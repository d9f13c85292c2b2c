"""Tensor Cache of SuperNeurons at run time (PPoPP 2018, section 3.3.2, Algorithm 2).

``TensorCache`` is Algorithm 2: an LRU list with locks, ``insert`` (LRU.in), ``evict`` (LRU.out) and ``check``. ``run``
executes a program with it: tensors are evicted when memory is short, and fetched on a miss. Deviations:

1. The list holds the outputs that section 3.3.1 offloads (CONV layers). Others are live from first write to last use.
2. An eviction without a valid host copy delays the kernel until its transfer ends, since the kernel needs the memory.
3. A backward CONV layer prefetches the inputs of the next one (section 3.3.1) only if they fit without an eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from agents.heuristics.superneurons import CONV, layer_outputs
from agents.planner import MIB, Infeasible
from simulator.machine import Machine
from simulator.program import Program


class TensorCache(OrderedDict[int, None]):
    """LRU list of the tensors in device memory, least recently used first; ``locked`` tensors cannot be evicted."""

    locked: Collection[int] = ()

    def insert(self, tensor: int) -> None:
        """Adds a tensor as the most recently used (LRU.in)."""
        self[tensor] = None
        self.move_to_end(tensor)

    def evict(self) -> int | None:
        """Removes and returns the least recently used unlocked tensor (LRU.out), or None if all are locked."""
        tensor = next((t for t in self if t not in self.locked), None)
        if tensor is not None:
            del self[tensor]
        return tensor

    def check(self, tensor: int) -> bool:
        """Returns whether the tensor is in memory (a hit), and then makes it the most recently used."""
        if tensor in self:
            self.move_to_end(tensor)
        return tensor in self


@dataclass
class CacheRun:
    """Result of one iteration with a Tensor Cache.

    Attributes:
        iteration_ns: duration, including all waits for transfers.
        hits, misses: uses of offloadable tensors found in memory, and fetched from the host.
        offloaded_bytes, fetched_bytes: bytes over the link in each direction.
        peak_bytes: peak memory in use.
    """

    iteration_ns: int = 0
    hits: int = 0
    misses: int = 0
    offloaded_bytes: int = 0
    fetched_bytes: int = 0
    peak_bytes: int = 0


def run(program: Program, machine: Machine, limit: int, min_bytes: int = MIB) -> CacheRun:
    """Executes one iteration within ``limit`` bytes with a Tensor Cache and no plan.

    Transfers of one direction are serialized; the two directions and the kernels overlap. All iterations take the same
    time, since no persistent tensor is offloaded.

    Raises:
        Infeasible: a kernel does not fit with everything offloadable evicted.
    """
    state = _CacheState(program, machine, limit, layer_outputs(program, CONV, min_bytes))
    for k in range(len(program.kernels)):
        state.step(k)
    return state.result


class _CacheState:
    """State of the run: bytes in use, residency of tensors, and when the streams become free."""

    def __init__(self, program: Program, machine: Machine, limit: int, cached: frozenset[int]) -> None:
        self.program = program
        self.machine = machine
        self.limit = limit
        self.cached = cached
        self.cache = TensorCache()
        self.result = CacheRun()
        self.nbytes = [tensor.nbytes for tensor in program.tensors]
        self.resident = {t for t, tensor in enumerate(program.tensors) if tensor.persistent}
        self.used = self.result.peak_bytes = sum(self.nbytes[t] for t in self.resident)
        self.valid: set[int] = set()  # tensors with a valid host copy
        self.arrives: dict[int, int] = {}  # time at which a prefetched tensor arrives
        self.d2h_free = self.h2d_free = 0
        kinds = [(kernel.kind, kernel.phase) for kernel in program.kernels]
        self.next_conv = dict(pairwise(k for k, kind in enumerate(kinds) if kind == ("conv", "backward")))

    def step(self, k: int) -> None:
        """Executes kernel ``k``."""
        program = self.program
        result = self.result
        kernel = self.program.kernels[k]
        touched = kernel.accesses
        self.cache.locked = self.cached.intersection(touched)
        missing = [t for t in touched if t not in self.resident]
        self._make_room(kernel.workspace + sum(self.nbytes[t] for t in missing), k)
        for t in touched:
            if t in self.cached and program.writes[t][0] < k:
                hit = self.cache.check(t)
                result.hits = result.hits + hit
                result.misses = result.misses + (not hit)
                if not hit:
                    self._fetch(t)
        for t in missing:
            self._allocate(t)
        result.iteration_ns = max([result.iteration_ns, *(self.arrives.pop(t) for t in touched if t in self.arrives)])
        self._prefetch(k)
        result.peak_bytes = max(result.peak_bytes, self.used + kernel.workspace)
        result.iteration_ns += kernel.duration_ns
        self.valid.difference_update(kernel.outputs)
        for t in touched:
            if program.accesses[t][-1] == k and not program.tensors[t].persistent:
                self.cache.pop(t, None)
                self._release(t)

    def _make_room(self, nbytes: int, k: int) -> None:
        """Evicts tensors until ``nbytes`` are free; the clock waits for the transfers."""
        while self.used + nbytes > self.limit:
            victim = self.cache.evict()
            if victim is None:
                raise Infeasible(
                    f"kernel {k} needs {self.used + nbytes:,} bytes with every unlocked tensor evicted; "
                    f"the limit is {self.limit:,}; raise it"
                )
            if victim not in self.valid:
                begin = max(self.result.iteration_ns, self.d2h_free)
                self.result.iteration_ns = self.d2h_free = begin + self.machine.d2h_ns(self.nbytes[victim])
                self.result.offloaded_bytes += self.nbytes[victim]
                self.valid.add(victim)
            self.arrives.pop(victim, None)
            self._release(victim)

    def _fetch(self, tensor: int) -> None:
        begin = max(self.result.iteration_ns, self.h2d_free)
        self.arrives[tensor] = self.h2d_free = begin + self.machine.h2d_ns(self.nbytes[tensor])
        self.result.fetched_bytes += self.nbytes[tensor]

    def _allocate(self, tensor: int) -> None:
        self.resident.add(tensor)
        self.used += self.nbytes[tensor]
        if tensor in self.cached:
            self.cache.insert(tensor)

    def _release(self, tensor: int) -> None:
        self.resident.remove(tensor)
        self.used -= self.nbytes[tensor]

    def _prefetch(self, k: int) -> None:
        """Fetches the inputs of the next backward CONV layer if they fit next to the running kernel."""
        for t in self.program.kernels[self.next_conv[k]].accesses if k in self.next_conv else ():
            absent = t in self.valid and t not in self.resident
            if absent and self.used + self.program.kernels[k].workspace + self.nbytes[t] <= self.limit:
                self._fetch(t)
                self._allocate(t)
