"""How long allocation takes on the host, in one iteration of the steady state.

Two things take time: calls of the driver, at the cost that the Machine states, and looking at the entries of lists and
tables, which the allocators count (``Packing.steps``).

- An online allocator has settled after an iteration or two: iteration k costs what k iterations cost less what k - 1
  iterations cost.
- An offline one has packed beforehand. A malloc looks its offset up in a table of n blocks, which SmartPool keeps in a
  ``std::map``, "with time complexity O(log n)" ("Efficient Memory Management for GPU-based Deep Learning Systems",
  2020, section VI-A); a free does nothing. The pool is one cudaMalloc, made once.
"""

from __future__ import annotations

from simulator.compiled.encoding import NEVER
from simulator.machine import Machine
from simulator.pool import ITERATIONS, allocator, run
from simulator.pool.intervals import Intervals

# A list of nodes as CnMem's takes 2 ns a node for up to a thousand of them in a random order, 5 ns for ten thousand,
# measured on a core of 2.5 GHz; a level of a tree is one node, too.
STEP_NS = 2


def allocation_ns(name: str, intervals: Intervals, machine: Machine) -> int:
    """Time of all mallocs and frees of one steady iteration, in ns; on a line, of the whole line.

    Raises:
        ValueError: an unknown name.
    """
    online = allocator(name).online
    if not online:
        again = intervals.upper - intervals.lower < intervals.period  # what never leaves is not allocated again
        return int(again.sum()) * len(intervals).bit_length() * STEP_NS
    if intervals.period == NEVER:
        return _total_ns(name, intervals, machine)
    longer, shorter = (intervals.unrolled(k)[0] for k in (ITERATIONS, ITERATIONS - 1))
    return _total_ns(name, longer, machine) - _total_ns(name, shorter, machine)


def _total_ns(name: str, line: Intervals, machine: Machine) -> int:
    """Time of an online allocator on a line."""
    _, packing = run(name, line)
    # What the driver has mapped in all: what a pool holds, or for virtual addresses, never used twice, their number.
    mapped = max(packing.footprint, int((packing.offsets + line.nbytes).max(initial=0)))
    calls = machine.driver_ns(packing.driver_mallocs, packing.driver_frees, mapped)
    return calls + packing.steps * STEP_NS
