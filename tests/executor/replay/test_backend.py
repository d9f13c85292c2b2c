"""The device seam: the same tests for the host, a double of CuPy and, if any, a GPU; then what only the host shows."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from executor.replay import open_backend
from executor.replay.backend import BackendError, first_difference, pattern
from executor.replay.host_backend import PARTS, HostBackend
from simulator import Machine
from tests.executor.conftest import gpu_backend
from tests.executor.replay import cupy_double
from tests.executor.replay.conftest import Watched

MS = 1_000_000
# 1 MB takes 10 ms out and 20 ms in; 1 ms of latency.
MACHINE = Machine("test", 2**26, 50_000_000, 100_000_000, d2h_latency_ns=MS, h2d_latency_ns=MS, host_bytes=2**26)


@pytest.fixture(params=["host", "double", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    if request.param == "double":
        with cupy_double.opened(MACHINE) as (backend, device):
            yield backend
        assert not device.found
        return
    with gpu_backend(MACHINE) if request.param == "cuda" else open_backend("host", MACHINE) as opened:
        yield opened


def test_a_pattern_by_hand():
    # Words 7 and 7 + 2654435761 = 0x9E3779B8, little-endian, cut after six bytes.
    assert pattern(6, 7).tolist() == [7, 0, 0, 0, 0xB8, 0x79]
    assert pattern(6, 7)[4:].tolist() == pattern(2, 7, first_word=1).tolist()
    whole = pattern(600_001, 3)
    assert first_difference(whole, 3) is None
    assert first_difference(whole, 4) == 0
    whole[500_003] ^= 1
    assert first_difference(whole, 3) == 500_003
    assert first_difference(pattern(1000, 3)[4:], 3) == 0  # it lies a word too far


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (3, 1), (512, 15), (0, 16), (3, 1000), (3, 300_001)])
def test_bytes_go_to_the_host_and_back(backend, offset, nbytes):
    with backend.arena(400_000, 400_000):
        backend.fill(offset, nbytes, 5)
        event = backend.record("compute")
        backend.wait("d2h", event)
        backend.copy("d2h", offset, 7, nbytes)
        event = backend.record("d2h")
        backend.wait("compute", event)
        backend.fill(offset, nbytes, 6)
        right = backend.verify(offset, nbytes, 6)
        wrong = backend.verify(offset, nbytes, 7)
        backend.wait("h2d", backend.record("compute"))
        backend.copy("h2d", offset, 7, nbytes)
        backend.wait("compute", backend.record("h2d"))
        back = backend.verify(offset, nbytes, 5)
        backend.synchronize()
        found = backend.mismatches()
        assert right not in found and back not in found
        assert found == ({wrong: 0} if nbytes else {})
        assert first_difference(backend.host[7 : 7 + nbytes], 5) is None


def test_a_check_finds_the_first_wrong_byte(backend):
    with backend.arena(4096, 4096):
        backend.fill(0, 4096, 1)
        backend.fill(1003, 2, 2)
        number = backend.verify(4, 2000, 1)  # a word too far: its low byte differs by that of STEP, 0xB1
        whole = backend.verify(0, 4096, 1)
        before = backend.verify(0, 1003, 1)
        backend.synchronize()
        expected = np.flatnonzero(pattern(4096, 1)[1003:1005] != pattern(2, 2))[0] + 1003
        assert backend.mismatches() == {number: 0, whole: expected}
        assert before not in backend.mismatches()


def test_a_stream_is_in_order_and_an_event_orders_two(backend):
    with backend.arena(1000, 1000):
        backend.host[:] = pattern(1000, 8)
        begin = backend.record("compute")
        for _ in range(4):
            backend.spin(5 * MS)
        late = backend.record("compute")
        backend.wait("h2d", late)
        start = backend.record("h2d")
        backend.copy("h2d", 0, 0, 1000)
        end = backend.record("h2d")
        backend.synchronize(end)
        times = [backend.time_ns(e) for e in (begin, late, start, end)]
        assert times == sorted(times)
        assert times[1] - times[0] >= 10 * MS


def test_memory_is_taken_once_and_given_back(backend):
    large = 2**25  # CUDA takes memory of the card in parts of 2 MiB, and smaller arenas from one that it has
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
    with backend.arena(16, 16):  # what was refused left nothing behind
        pass


@pytest.mark.gpu
def test_spins_of_a_gpu_are_exact_to_the_microsecond():
    with gpu_backend(MACHINE, 10_000) as backend, backend.arena(16, 16):
        events = []
        backend.spin(20 * MS)
        for ns in [50_000] * 200 + [2000] * 100:
            events.append(backend.record("compute"))
            backend.spin(ns)
        events.append(backend.record("compute"))
        backend.synchronize()
        assert backend.time_ns(events[200]) - backend.time_ns(events[0]) == pytest.approx(10 * MS, rel=0.005)
        assert backend.absorbed_ns() > 0
    with gpu_backend(MACHINE) as backend, backend.arena(16, 16):  # by default a pause is a pause
        backend.spin(20 * MS)
        begin = backend.record("compute")
        for _ in range(200):
            backend.spin(50_000)
        end = backend.record("compute")
        backend.synchronize()
        assert backend.time_ns(end) - backend.time_ns(begin) > 10 * MS and backend.absorbed_ns() == 0


# ------------------------------------------------------------------------------------------- the host


class Gated(HostBackend):
    """Begins when all is in its queues; notes when each piece of work was due to be over, in ns from then on."""

    def __init__(self, machine):
        super().__init__(machine)
        self.gate, self.dues = threading.Event(), []

    def _put(self, stream, work):
        def noted(ready):
            due = work(ready)
            self.dues.append(due)
            return due

        super()._put(stream, noted)

    def begin(self):
        def opened(ready):
            self.gate.wait()
            return time.perf_counter_ns()

        self._put("compute", opened)
        return self.record("compute")

    def lasts(self, begin):
        self.gate.set()
        end = [self.record(stream) for stream in ("compute", "d2h", "h2d")]
        self.synchronize()
        assert max(event.ns for event in end) >= max(self.dues)  # never before
        return max(self.dues) - begin.ns


@pytest.mark.parametrize(("engines", "ms"), [(2, 21), (1, 32)])
def test_copies_run_at_once_on_two_engines_and_one_after_the_other_on_one(engines, ms):
    """1 MB takes 1 + 10 ms out and 1 + 20 ms in."""
    with Gated(replace(MACHINE, copy_engines=engines)) as backend, backend.arena(2 * 10**6, 2 * 10**6):
        begin = backend.begin()
        for i, stream in enumerate(("d2h", "h2d")):
            backend.wait(stream, begin)
            backend.copy(stream, i * 10**6, i * 10**6, 10**6)
        assert backend.lasts(begin) == ms * MS


def test_spins_add_up_without_drift():
    with Gated(MACHINE) as backend, backend.arena(16, 16):
        begin = backend.begin()
        for _ in range(40):
            backend.spin(MS // 2)
        backend.lasts(begin)
        assert backend.dues[-1] - backend.dues[0] == 20 * MS  # however late the thread was woken up


def test_a_kernel_that_streams_takes_its_time_and_leaves_what_was_there():
    """1 MB in 20 ms, twice round an arena of 300 kB; and 40 MB take as long as they take."""
    with Gated(MACHINE) as backend, backend.arena(300_000, 16):
        backend.fill(0, 300_000, 4)
        begin = backend.begin()
        backend.spin(20 * MS, 10**6)
        backend.spin(0, 40 * 10**6)
        number = backend.verify(0, 300_000, 4)
        backend.lasts(begin)
        _, ready, end, late, _ = backend.dues
        assert end - ready >= 20 * MS  # more where its bytes took longer
        assert late - end > 30_000  # 1 TB/s would be 40 us
        assert number not in backend.mismatches() and backend.absorbed_ns() > 0


def test_a_reader_that_does_not_wait_meets_half_a_copy(monkeypatch):
    half, read, parts = threading.Event(), threading.Event(), iter(range(PARTS))

    def stop_in_the_middle(self, due):
        if next(parts) == PARTS // 2:
            half.set()
            assert read.wait(60)
        return due

    monkeypatch.setattr(HostBackend, "_sleep_until", stop_in_the_middle)
    with HostBackend(MACHINE) as backend, backend.arena(10**6, 10**6):
        backend.host[:] = pattern(10**6, 9)
        backend.copy("h2d", 0, 0, 10**6)
        assert half.wait(60)
        number = backend.verify(0, 10**6, 9)
        backend.synchronize(backend.record("compute"))
        read.set()
        backend.synchronize()
        assert backend.mismatches()[number] == 10**6 // 2


def test_free_calls_off_what_is_under_way_and_close_ends_the_threads():
    before = threading.active_count()
    backend = Watched(MACHINE)
    assert threading.active_count() == before + 3
    backend.allocate(1000, 1000)
    backend.spin(10**12)
    backend.wait("h2d", backend.record("compute"))
    backend.copy("h2d", 0, 0, 1000)
    backend.close()
    assert threading.active_count() == before and not backend.ended


@pytest.mark.parametrize(("device", "host", "match"), [(2**26 + 1, 0, "too few"), (0, 2**26 + 1, "cannot be pinned")])
def test_the_host_has_the_memory_of_the_machine(device, host, match):
    with pytest.raises(BackendError, match="there are cuda, host"):
        open_backend("tpu", MACHINE)
    with HostBackend(MACHINE) as backend, pytest.raises(BackendError, match=match):
        backend.allocate(device, host)
