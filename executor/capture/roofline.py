"""Kernel durations from a machine's roofline (Williams et al., "Roofline", CACM 52(4), 2009)."""

from __future__ import annotations

from simulator.kernel_times import scaled
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
