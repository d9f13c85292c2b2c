"""What the tests of replays share: the host in a device's place, and a device without noise."""

import time

import pytest

from executor.replay.backend import Backend
from executor.replay.host_backend import HostBackend
from simulator import Machine

LINK = Machine("link", 10**6, 5_000_000, 5_000_000, d2h_latency_ns=0, h2d_latency_ns=0, alignment=16)


@pytest.fixture
def host():
    with HostBackend(LINK) as backend:
        yield backend


class Watched(HostBackend):
    """Says whether a wait of minutes came to its end, which none may that is called off."""

    ended = False

    def _sleep_until(self, due):
        long = due - time.perf_counter_ns() > 10**11
        due = super()._sleep_until(due)
        self.ended |= long
        return due


class Virtual(Backend):
    """A device without noise: everything lasts exactly as long as the machine says."""

    name, memory_bytes = "virtual", 2**62

    def __init__(self, machine):
        self.machine = machine

    def allocate(self, device_bytes, host_bytes):
        self.allocated, self.now = device_bytes, dict.fromkeys(("compute", "d2h", "h2d"), 0)

    def free(self):
        self.allocated = 0

    close = free

    @property
    def allocated_bytes(self):
        return self.allocated

    def _on(self, stream):
        return "d2h" if stream == "h2d" and self.machine.copy_engines == 1 else stream

    def copy(self, stream, device, host, nbytes):
        self.now[self._on(stream)] += self.machine.d2h_ns(nbytes) if stream == "d2h" else self.machine.h2d_ns(nbytes)

    def spin(self, ns, nbytes=0):
        self.now["compute"] += ns
        self.bytes = [*getattr(self, "bytes", ()), nbytes]

    def absorbed_ns(self):
        return 700

    def fill(self, device, nbytes, seed): ...

    def verify(self, device, nbytes, seed): ...

    def mismatches(self): ...

    def record(self, stream):
        return self.now[self._on(stream)]

    def wait(self, stream, event):
        self.now[self._on(stream)] = max(self.now[self._on(stream)], event)

    def synchronize(self, event=None): ...

    def time_ns(self, event):
        return event
