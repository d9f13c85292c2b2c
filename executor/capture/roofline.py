"""Kernel durations from a machine's roofline (Williams et al., "Roofline", CACM 52(4), 2009)."""

from __future__ import annotations

from simulator.kernel_times import scaled
from simulator.machine import Machine
from simulator.program import Program


def with_roofline(
    program: Program, machine: Machine, dtype: str = "float32", iteration_ns: int | None = None
) -> Program:
    """Returns the program with the roofline's duration (``Machine.kernel_ns``) for each kernel.

    For a program without its capture; ``Captured.on`` also uses shapes and layouts. A kernel that touches no memory
    (an allocation, a marker) launches nothing and lasts 0 ns.

    Args:
        dtype: type whose peak FLOP rate is used.
        iteration_ns: ns of an iteration to scale to (``scaled``).

    Raises:
        ValueError: ``iteration_ns`` is not positive, or no kernel takes time.
    """
    durations = [
        machine.kernel_ns(k.kind, k.flops, k.bytes, dtype) if k.flops or k.bytes else 0 for k in program.kernels
    ]
    return program.with_durations(scaled(durations, iteration_ns))
