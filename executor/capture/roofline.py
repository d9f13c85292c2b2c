"""Kernel durations from a machine's roofline (Williams et al., "Roofline", CACM 52(4), 2009)."""

from __future__ import annotations

from simulator.machine import Machine
from simulator.program import Program


def with_roofline(
    program: Program, machine: Machine, dtype: str = "float32", iteration_ns: int | None = None
) -> Program:
    """The program with durations ``Machine.kernel_ns`` of each kernel's FLOPs and bytes, for who has no more than a
    program; of a capture, ``Captured.on`` knows more.

    A kernel that touches no memory (an allocation, a marker) launches nothing and lasts 0 ns.

    Args:
        dtype: whose peak FLOP rate to use.
        iteration_ns: see ``scaled``.

    Raises:
        ValueError: ``iteration_ns`` is not positive, or no kernel takes time.
    """
    durations = [
        machine.kernel_ns(k.kind, k.flops, k.bytes, dtype) if k.flops or k.bytes else 0 for k in program.kernels
    ]
    return program.with_durations(scaled(durations, iteration_ns))


def scaled(durations: list[int], iteration_ns: int | None) -> list[int]:
    """The durations, with their sum exactly ``iteration_ns``, e.g. a measured iteration time, where that is given: they
    are then only the proportions.

    Raises:
        ValueError: ``iteration_ns`` is not positive, or no kernel takes time.
    """
    if iteration_ns is None:
        return durations
    total = sum(durations)
    if iteration_ns < 1 or total < 1:
        raise ValueError(f"iteration_ns: cannot scale {total} ns of kernels to {iteration_ns} ns")
    ends, clock = [0], 0
    for duration in durations:
        clock += duration
        ends.append(clock * iteration_ns // total)  # rounding ends, not durations, keeps the sum exact
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]
