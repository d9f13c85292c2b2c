"""Bytes to addresses. The ledger of the simulator counts bytes; here the same tensors get offsets.

``intervals`` says who holds how many bytes from when to when. An allocator is a module with one function,
``pack(intervals, …) -> Packing``. ``validate`` finds blocks that share an address.

    lives = timeline_lifetimes(simulate(program, plan, machine, limit), program, plan)
    packing = smartpool.pack(lives.intervals, machine.alignment)
    packing.footprint, packing.offsets[i], lives.owner[i]
"""

from simulator.pool.intervals import Intervals, Lifetimes, Packing, program_lifetimes, timeline_lifetimes

__all__ = ["Intervals", "Lifetimes", "Packing", "program_lifetimes", "timeline_lifetimes"]
