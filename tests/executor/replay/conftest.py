"""Shared fixtures of the replay tests, which run on the host backend."""

import pytest

from executor.replay import streams
from executor.replay.host_backend import HostBackend
from simulator import Machine
from simulator.pool import smartpool

LINK = Machine("link", 10**6, 5_000_000, 5_000_000, d2h_latency_ns=0, h2d_latency_ns=0, alignment=16)


@pytest.fixture
def host():
    with HostBackend(LINK) as backend:
        yield backend


@pytest.fixture
def quick(monkeypatch):
    """Packs without searching for a smaller footprint, which random plans do not need."""
    monkeypatch.setattr(streams, "pack_within", lambda blocks, limit, alignment: smartpool.pack(blocks, alignment))
