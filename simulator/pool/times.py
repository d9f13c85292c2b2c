"""Host time of allocation in one steady-state iteration.

Two costs are modeled: driver calls, at the cost given by the Machine, and visits of list and table entries, which the
allocators count (``Packing.steps``).

- An online allocator settles after one or two iterations: the cost of iteration k is that of k iterations minus that
  of k - 1 iterations.
- An offline allocator packs in advance. A malloc looks its offset up in a table of n blocks, which SmartPool keeps in
  a ``std::map``, "with time complexity O(log n)" ("Efficient Memory Management for GPU-based Deep Learning Systems",
  2020, section VI-A); a free does nothing. The pool is a single cudaMalloc.
"""

from __future__ import annotations

from simulator.compiled.encoding import NEVER
from simulator.machine import Machine
from simulator.pool import ITERATIONS, allocator, run
from simulator.pool.intervals import Intervals

# Traversing a linked list such as CnMem's takes 2 ns per node for up to a thousand nodes in random order and 5 ns for
# ten thousand, measured on a 2.5 GHz core; a tree level counts as one node.
STEP_NS = 2


def allocation_ns(name: str, intervals: Intervals, machine: Machine) -> int:
    """Returns the time of all mallocs and frees of one steady iteration, in ns; on a line, of the whole line.

    Raises:
        ValueError: the name is unknown.
    """
    online = allocator(name).online
    if not online:
        again = intervals.upper - intervals.lower < intervals.period  # permanent blocks are not reallocated
        return int(again.sum()) * len(intervals).bit_length() * STEP_NS
    if intervals.period == NEVER:
        return _total_ns(name, intervals, machine)
    longer, shorter = (intervals.unrolled(k)[0] for k in (ITERATIONS, ITERATIONS - 1))
    return _total_ns(name, longer, machine) - _total_ns(name, shorter, machine)


def _total_ns(name: str, line: Intervals, machine: Machine) -> int:
    """Returns the time of an online allocator on a line."""
    _, packing = run(name, line)
    # Bytes mapped by the driver: the pool's, or the total size with virtual addresses that are never reused.
    mapped = max(packing.footprint, int((packing.offsets + line.nbytes).max(initial=0)))
    calls = machine.driver_ns(packing.driver_mallocs, packing.driver_frees, mapped)
    return calls + packing.steps * STEP_NS
