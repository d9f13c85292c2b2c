"""Tests of the backends: shared ones for the host, a fake CuPy and, if present, a GPU; then host-only ones."""

from dataclasses import replace

import numpy as np
import pytest

from executor.replay import open_backend
from executor.replay.backend import NEVER, BackendError, first_difference, pattern
from executor.replay.host_backend import HostBackend
from simulator import Machine
from tests.executor.conftest import gpu_backend
from tests.fake_device import cupy

MS = 1_000_000
# 1 MB takes 10 ms out and 20 ms in; 1 ms of latency.
MACHINE = Machine("test", 2**26, 50_000_000, 100_000_000, MS, MS, host_bytes=2**26)


@pytest.fixture(params=["host", "double", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    if request.param == "double":
        with cupy.opened(MACHINE) as (backend, device):
            yield backend
        assert not device.found
        return
    with gpu_backend(MACHINE) if request.param == "cuda" else open_backend("host", MACHINE) as opened:
        yield opened


def test_a_pattern_by_hand():
    # Words 7 and 7 + 2654435761 = 0x9E3779B8, little-endian, cut after six bytes.
    assert pattern(6, 7).tolist() == [7, 0, 0, 0, 0xB8, 0x79]
    whole = pattern(600_001, 3)
    assert first_difference(whole, 3) is None
    assert first_difference(whole, 4) == 0
    whole[500_003] ^= 1
    assert first_difference(whole, 3) == 500_003
    assert first_difference(pattern(1000, 3)[4:], 3) == 0  # shifted by one word


@pytest.mark.parametrize("as_graph", [False, True])
@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (3, 1), (512, 15), (0, 16), (3, 1000), (3, 300_001)])
def test_bytes_go_to_the_host_and_back(backend, offset, nbytes, as_graph):
    def there_and_back():
        backend.fill(offset, nbytes, 5)
        backend.wait("d2h", backend.record("compute"))
        backend.copy("d2h", offset, 7, nbytes)
        backend.wait("compute", backend.record("d2h"))
        backend.fill(offset, nbytes, 6)
        backend.verify(offset, nbytes, 6, 0)
        backend.verify(offset, nbytes, 7, 1)
        backend.wait("h2d", backend.record("compute"))
        backend.copy("h2d", offset, 7, nbytes)
        backend.wait("compute", backend.record("h2d"))
        backend.verify(offset, nbytes, 5, 2)

    with backend.arena(400_000, 400_000, 3):
        if as_graph:
            launch = backend.graph(there_and_back)
            backend.fill(offset, nbytes, 9)  # runs before the graph, although captured later
            launch()
            launch()
        else:
            there_and_back()
        backend.synchronize()
        assert backend.log().wrong.tolist() == [NEVER, 0 if nbytes else NEVER, NEVER]
        assert first_difference(backend.host[7 : 7 + nbytes], 5) is None


def test_a_check_finds_the_first_wrong_byte(backend):
    with backend.arena(4096, 4096, 3):
        backend.fill(0, 4096, 1)
        backend.fill(1003, 2, 2)
        backend.verify(4, 2000, 1, 0)  # shifted by one word: the low byte differs by that of STEP, 0xB1
        backend.verify(0, 4096, 1, 1)
        backend.verify(0, 1003, 1, 2)
        backend.synchronize()
        expected = np.flatnonzero(pattern(4096, 1)[1003:1005] != pattern(2, 2))[0] + 1003
        assert backend.log().wrong.tolist() == [0, expected, NEVER]


def test_a_stream_is_in_order_and_an_event_orders_two(backend):
    with backend.arena(1000, 1000):
        backend.host[:] = pattern(1000, 8)
        begin = backend.record("compute", timed=True)
        for _ in range(4):
            backend.spin(5 * MS)
        late = backend.record("compute", timed=True)
        backend.wait("h2d", late)
        start = backend.record("h2d", timed=True)
        backend.copy("h2d", 0, 0, 1000)
        end = backend.record("h2d", timed=True)
        backend.synchronize()
        assert backend.elapsed_ns(begin, late) >= 10 * MS
        assert backend.elapsed_ns(late, start) >= 0 < backend.elapsed_ns(start, end)


def test_kernels_of_a_graph_log_their_begin_and_end_and_a_launch_clears_what_was_there(backend):
    def three():
        backend.spin(2 * MS, slot=0)
        backend.spin(5 * MS, slot=1)
        backend.spin(2 * MS, slot=0)

    with backend.arena(1000, 1000, 3):
        launch = backend.graph(three)
        for _ in range(2):
            before = backend.log()
            launch()
            backend.synchronize()
            log = backend.log()
            begin = log.begin.astype(np.int64)
            end = log.end.astype(np.int64)
            assert (log.begin[2], log.end[2]) == (NEVER, 0)
            assert end[1] - begin[1] >= 5 * MS and begin[0] + 2 * MS <= begin[1] and end[1] + 2 * MS <= end[0]
            assert begin[0] >= int(before.end[0])


def test_memory_is_taken_once_and_given_back(backend):
    large = 2**25  # CUDA allocates device memory in pages of 2 MiB and places smaller arenas in existing ones
    with backend.arena(large, 2**20):
        assert backend.allocated_bytes >= large and len(backend.host) == 2**20
        with pytest.raises(BackendError, match="free it first"):
            backend.allocate(1, 1)
        with pytest.raises(BackendError, match="not in the arena"):
            backend.fill(large - 3, 4, 0)
        with pytest.raises(BackendError, match="not in the arena"):
            backend.copy("d2h", -1, 0, 1)
        with pytest.raises(BackendError, match="not in the host buffer"):
            backend.copy("d2h", 0, 2**20 - 3, 4)
    assert backend.allocated_bytes == 0 and not hasattr(backend, "host")
    with pytest.raises(BackendError):
        backend.allocate(2**62, 0)
    with pytest.raises(BackendError, match="pinned"):
        backend.allocate(16, 2**62)
    with backend.arena(16, 16):  # refused allocations left nothing behind
        pass


# ------------------------------------------------------------------------------------------- the host


@pytest.mark.parametrize(("engines", "ms"), [(2, 21), (1, 32)])
def test_copies_run_at_once_on_two_engines_and_one_after_the_other_on_one(engines, ms):
    """A copy of 1 MB takes 1 + 10 ms out and 1 + 20 ms in."""
    with HostBackend(replace(MACHINE, copy_engines=engines)) as backend, backend.arena(2 * 10**6, 2 * 10**6):
        begin = backend.record("compute", timed=True)
        for i, stream in enumerate(("d2h", "h2d")):
            backend.wait(stream, begin)
            backend.copy(stream, i * 10**6, i * 10**6, 10**6)
        assert backend.elapsed_ns(begin, backend.record("h2d", timed=True)) == ms * MS


def test_the_host_takes_the_times_of_the_machine():
    """Kernels take 100 and 10 ns, with a pause of 5 ns before each (2 ns in a graph).

    An event costs 30 ns, a wait 40 ns, and the host 7 ns per launch; two launches may be pending.
    """
    machine = replace(MACHINE, launch_ns=5, graph_launch_ns=2, event_ns=30, wait_ns=40, issue_ns=7, queue_depth=2)
    with HostBackend(machine) as backend, backend.arena(16, 16, 3):
        for slot, ns in enumerate((100, 10, 0)):
            backend.spin(ns, slot=slot)
        assert backend.log().begin.tolist() == [7, 112, 127] and backend.host_ns() == 107 + 7
        event = backend.record("compute")
        backend.wait("d2h", event)  # free on a copy stream
        backend.wait("compute", backend.record("d2h"))
        assert backend.elapsed_ns(event, backend.record("compute", timed=True)) == 40
        backend.synchronize()
        assert backend.host_ns() == 127 + 30 + 40
        backend.graph(lambda: [backend.spin(ns, slot=i) for i, ns in enumerate((100, 10, 0))])()
        log = backend.log()
        assert (log.begin - log.begin[0]).tolist() == [0, 102, 114] and backend.host_ns() == 127 + 30 + 40 + 7


@pytest.mark.parametrize(("device", "host", "match"), [(2**26 + 1, 0, "too few"), (0, 2**26 + 1, "cannot be pinned")])
def test_the_host_has_the_memory_of_the_machine(device, host, match):
    with pytest.raises(BackendError, match="expected cuda or host"):
        open_backend("tpu", MACHINE)
    with HostBackend(MACHINE) as backend, pytest.raises(BackendError, match=match):
        backend.allocate(device, host)
