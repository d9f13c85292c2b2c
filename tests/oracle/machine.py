"""What a copy does to the other and to a kernel, reckoned from a machine's figures anew."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from simulator.machine import Machine

LONE = 2**20  # what a transfer alone on the link gets done in a nanosecond


class Violation(NamedTuple):
    """One broken rule."""

    rule: str
    time_ns: int
    detail: str


def taken(lasts_ns: int, moves: int, machine: Machine) -> int:
    """What a copy takes from the speed of a step that moves so many bytes of device memory, of LONE (k)."""
    if not lasts_ns:
        return 0
    could = lasts_ns * machine.memory_bytes_per_s  # 10^-9 bytes
    busy = Fraction(min(moves * 10**9, could), could)
    return int(int(machine.copy_contention * LONE) * busy)


def beside_each_other(machine: Machine) -> dict[str, int]:
    """By stream, what a copy beside one in the other direction gets done in a nanosecond, of LONE (g)."""
    figures = {
        "d2h": (machine.d2h_bytes_per_s, machine.duplex_d2h_bytes_per_s),
        "h2d": (machine.h2d_bytes_per_s, machine.duplex_h2d_bytes_per_s),
    }
    return {
        stream: LONE if machine.copy_engines == 1 or not beside else min(LONE, max(1, beside * LONE // alone))
        for stream, (alone, beside) in figures.items()
    }


def copy_ns(machine: Machine, stream: str, nbytes: int) -> int:
    """How long a copy takes alone."""
    whole, rest = divmod(nbytes * 10**9, machine.d2h_bytes_per_s if stream == "d2h" else machine.h2d_bytes_per_s)
    latency = machine.d2h_latency_ns if stream == "d2h" else machine.h2d_latency_ns
    return latency + whole + (rest > 0)
