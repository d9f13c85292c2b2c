"""Tests of the CuPy backend on a fake CuPy: kernels against NumPy, order by vector clocks."""

import ctypes
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from executor import calibrate
from executor.replay.backend import BackendError, first_difference, pattern
from executor.replay.replay import replay
from simulator import Plan, Recompute, Swap
from tests.executor.replay.conftest import LINK
from tests.executor.replay.test_replay import LARGE, LARGE_SWAP
from tests.fake_device.cupy import CUDARuntimeError, compiled, opened
from tests.tiny import A1, A2

US = 1000


@pytest.fixture(scope="module")
def kernels():
    with opened(LINK):
        from executor.replay.cupy_backend import SOURCE
    return compiled(SOURCE)[0]


def run(kernels, name, blocks, threads, *args, start=0):
    return getattr(kernels, f"run_{name}")(*map(ctypes.c_uint64, (start, blocks, threads, *args)))


def test_fill_and_verify_are_numpys(kernels):
    """Both work at every alignment; ``verify`` reports the first of several wrong bytes."""
    rng = Random(0)
    memory = np.zeros(6000, np.uint8)
    base = -(-memory.ctypes.data // 16) * 16 - memory.ctypes.data
    for at, n in [(a, n) for a in range(17) for n in (1, 3, 15, 16, 17, 100, 4097)]:
        seed = rng.randrange(2**32)
        where = memory.ctypes.data + base + at
        memory[:] = 7
        run(kernels, "fill", rng.randint(1, 4), 32, where, n, seed)
        inside = memory[base + at : base + at + n]
        assert (inside == pattern(n, seed)).all() and (memory != 7).sum() == (inside != 7).sum()
        wrong = sorted(rng.sample(range(n), min(n, rng.randint(0, 3))))
        inside[wrong] ^= 1 << rng.randrange(8)
        answer = np.array([2**64 - 1], np.uint64)
        run(kernels, "verify", rng.randint(1, 4), 32, where, n, seed, answer.ctypes.data)
        data = first_difference(inside, seed)
        assert data == (wrong[0] if wrong else None)
        assert int(answer[0]) == (2**64 - 1 if data is None else data)


# ------------------------------------------------------------------------------------------------------------ replays


PLANS = [
    LARGE_SWAP,
    Plan((Swap(A1, 1, 6, prefetch=3, sync=True), Swap(A2, 2, 5, copy=1))),
    Plan((Recompute(A1, 1, 6),)),
]


@pytest.mark.parametrize(("plan", "seed"), [(PLANS[0], None), (PLANS[1], 1), (PLANS[2], 1)])
def test_a_replay_is_right_whenever_copies_are_done(plan, seed):
    with opened(LINK, seed) as (backend, device):
        checked = replay(LARGE, plan, LINK, 150_000, backend, iterations=3, mode="check")
        assert checked.checks > 50 and not device.found
        timed = replay(LARGE, plan, LINK, 150_000, backend, iterations=3)
        assert not device.found
    assert 0 <= timed.error < 3 * US * len(LARGE.kernels) / timed.predicted_ns and timed.fits


def test_the_timed_graph_has_kernels_copies_and_the_events_that_another_stream_waits_for():
    with opened(LINK) as (backend, device):
        replay(LARGE, LARGE_SWAP, LINK, 150_000, backend, iterations=3, warmup=1)
    timed, *_, traced = device.launched
    assert device.launched == [timed] * 3 + [traced]
    # Four iterations of a swap-out and a swap-in with four events each, of which the swap-out's is waited for twice;
    # three more events fork and join the streams.
    assert timed.nodes == {"spin": 32, "copy": 8, "record": 4 * 4 + 3, "wait": 4 * 5 + 4}
    assert traced.nodes == {**timed.nodes, "spin": 32 + 2 * 8}


def test_calibration_recovers_the_costs_of_the_double(monkeypatch):
    """Copies take the machine's times, the kernels' clock advances by 1 us per read, and the queue is unlimited."""
    machine = replace(
        LINK,
        memory_bytes=2**28,
        d2h_bytes_per_s=4 * 10**9,
        h2d_bytes_per_s=5 * 10**9,
        d2h_latency_ns=9 * US,
        h2d_latency_ns=7 * US,
    )
    monkeypatch.setattr(calibrate, "MOST_LAUNCHES", 5)
    monkeypatch.setattr(calibrate, "LAUNCHES", 20)
    monkeypatch.setattr(calibrate, "NODES", 20)
    with opened(machine) as (backend, device):
        monkeypatch.setattr(backend, "host_ns", lambda: 0)
        calibration = calibrate.calibrate(backend, machine, 2**18)
        assert not device.found
    for figure in ("d2h_latency_ns", "h2d_latency_ns", "d2h_bytes_per_s", "h2d_bytes_per_s"):
        assert getattr(calibration.machine, figure) == pytest.approx(getattr(machine, figure), rel=0.01), figure
    assert calibration.machine.launch_ns == calibration.machine.graph_launch_ns == US and not calibration.depth
    assert calibration.machine.event_ns == calibration.machine.wait_ns == 0


def test_a_capture_that_fails_ends_and_the_next_one_works():
    with opened(LINK) as (backend, device):
        with backend.arena(100, 100), pytest.raises(BackendError, match="not in the arena"):
            backend.graph(lambda: backend.copy("d2h", 90, 0, 20))
        with backend.arena(100, 100, 1):
            backend.graph(lambda: backend.copy("d2h", 80, 0, 20))()
            backend.synchronize()
    assert len(device.launched) == 1 and not device.graph


def test_errors_are_one_sentence_and_leave_no_memory():
    with opened(LINK) as (backend, device):
        with pytest.raises(BackendError, match=r"^an arena of 1,000,001 bytes cannot be allocated \(cudaErrorMemory"):
            backend.allocate(10**6 + 1, 16)
        assert not device.memory and backend.allocated_bytes == 0
        with pytest.raises(BackendError, match=r"cannot be pinned: .* are available"):
            backend.allocate(16, 2**62)
        with pytest.raises(BackendError, match=r"^a: the GPU reports that earlier work failed \(cudaErrorIllegal"):
            with backend.arena(1000, 1000):
                backend.task = "a"
                backend.fill(0, 10, 1)
                device.error = CUDARuntimeError("cudaErrorIllegalAddress")
                backend.synchronize()
        assert not device.memory and not hasattr(backend, "host")
