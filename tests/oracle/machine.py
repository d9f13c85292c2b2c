"""Effects of a copy on other copies and kernels, computed independently from a machine's figures."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from simulator.machine import Machine

LONE = 2**20  # work per nanosecond of a transfer alone on the link


class Violation(NamedTuple):
    """One broken rule."""

    rule: str
    time_ns: int
    detail: str


def taken(lasts_ns: int, moves: int, machine: Machine) -> int:
    """Returns the speed, in units of 1 / LONE, that a copy takes from a step that moves ``moves`` bytes (k)."""
    if not lasts_ns:
        return 0
    could = lasts_ns * machine.memory_bytes_per_s  # in 10^-9 bytes
    busy = Fraction(min(moves * 10**9, could), could)
    return int(int(machine.copy_contention * LONE) * busy)


def beside_each_other(machine: Machine) -> dict[str, int]:
    """Returns, by stream, the work per nanosecond of a copy beside an opposite copy (g)."""
    figures = {
        "d2h": (machine.d2h_bytes_per_s, machine.duplex_d2h_bytes_per_s),
        "h2d": (machine.h2d_bytes_per_s, machine.duplex_h2d_bytes_per_s),
    }
    return {
        stream: LONE if machine.copy_engines == 1 or not beside else min(LONE, max(1, beside * LONE // alone))
        for stream, (alone, beside) in figures.items()
    }


def copy_ns(machine: Machine, stream: str, nbytes: int) -> int:
    """Returns the duration of a copy alone on the link."""
    whole, rest = divmod(nbytes * 10**9, machine.d2h_bytes_per_s if stream == "d2h" else machine.h2d_bytes_per_s)
    latency = machine.d2h_latency_ns if stream == "d2h" else machine.h2d_latency_ns
    return latency + whole + (rest > 0)
