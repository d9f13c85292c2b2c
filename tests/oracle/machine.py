"""Effects of a copy on other copies and kernels, computed independently from a machine's figures."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from simulator.machine import Machine

FULL = 2**20  # work per nanosecond of a transfer alone on the link


class Violation(NamedTuple):
    """One broken rule."""

    rule: str
    time_ns: int
    detail: str


def speed_loss(duration_ns: int, traffic_bytes: int, machine: Machine) -> int:
    """Returns the speed, in units of 1 / FULL, that a copy takes from a step with ``traffic_bytes`` (k)."""
    if not duration_ns:
        return 0
    capacity = duration_ns * machine.memory_bytes_per_s  # in 10^-9 bytes
    share = Fraction(min(traffic_bytes * 10**9, capacity), capacity)
    return int(int(machine.copy_contention * FULL) * share)


def duplex_rates(machine: Machine) -> dict[str, int]:
    """Returns, by stream, the work per nanosecond of a copy beside an opposite copy (g)."""
    rates = {
        "d2h": (machine.d2h_bytes_per_s, machine.duplex_d2h_bytes_per_s),
        "h2d": (machine.h2d_bytes_per_s, machine.duplex_h2d_bytes_per_s),
    }
    return {
        stream: FULL if machine.copy_engines == 1 or not duplex else min(FULL, max(1, duplex * FULL // rate))
        for stream, (rate, duplex) in rates.items()
    }


def copy_ns(machine: Machine, stream: str, nbytes: int) -> int:
    """Returns the duration of a copy alone on the link."""
    ns, part = divmod(nbytes * 10**9, machine.d2h_bytes_per_s if stream == "d2h" else machine.h2d_bytes_per_s)
    latency = machine.d2h_latency_ns if stream == "d2h" else machine.h2d_latency_ns
    return latency + ns + (part > 0)
