"""Kernel durations from a machine's roofline (Williams et al., "Roofline", CACM 52(4), 2009)."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.program import Program


def with_roofline(
    program: Program, machine: Machine, dtype: str = "float32", iteration_ns: int | None = None
) -> Program:
    """The program with durations ``Machine.kernel_ns`` of each kernel's FLOPs and bytes.

    A kernel that touches no memory (an allocation, a marker) launches nothing and lasts 0 ns.

    Args:
        dtype: whose peak FLOP rate to use.
        iteration_ns: when given, all durations are scaled so that ``ideal_ns`` is exactly this, e.g. a
            measured iteration time; the roofline then only gives the proportions.

    Raises:
        ValueError: ``iteration_ns`` is not positive, or no kernel takes time.
    """
    durations = [
        machine.kernel_ns(k.kind, k.flops, k.bytes, dtype) if k.flops or k.bytes else 0 for k in program.kernels
    ]
    if iteration_ns is not None:
        total = sum(durations)
        if iteration_ns < 1 or total < 1:
            raise ValueError(f"iteration_ns: cannot scale {total} ns of kernels to {iteration_ns} ns")
        ends, clock = [0], 0
        for duration in durations:
            clock += duration
            ends.append(clock * iteration_ns // total)  # rounding ends, not durations, keeps the sum exact
        durations = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return program.with_durations(durations)
