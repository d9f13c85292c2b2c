"""Replay broken on purpose is noticed, and a fault is named and leaves nothing behind."""

import os
import signal
import threading
from dataclasses import replace

import pytest

from executor.replay import streams
from executor.replay.backend import BackendError
from executor.replay.host_backend import HostBackend
from executor.replay.replay import replay
from executor.replay.streams import ReplayError
from simulator import Plan, Program, Recompute, Swap, Tensor
from tests.executor.replay.conftest import LINK, Watched
from tests.executor.replay.test_replay import LARGE, LARGE_SWAP
from tests.tiny import A1, A2, A4

# ------------------------------------------------------------------------- broken on purpose


class Mutant(HostBackend):
    """Of the tasks whose names begin so, skips the first call of one method, or changes its arguments."""

    method = tasks = last = ""
    change = None
    happened = 0

    def _call(self, method, *arguments):
        if method == self.method and self.task.startswith(self.tasks) and self.task != self.last:
            self.last = self.task
            self.happened += 1
            if self.change is None:
                return
            arguments = self.change(*arguments)
        getattr(super(), method)(*arguments)

    def wait(self, *arguments):
        self._call("wait", *arguments)

    def copy(self, *arguments):
        self._call("copy", *arguments)


def broken(program, plan, limit, method, tasks, change, match):
    """A replay in which a Mutant does so, and the error that must come of it; how often it was done."""
    with Mutant(LINK) as backend:
        backend.method, backend.tasks, backend.change = method, tasks, change
        with pytest.raises(ReplayError, match=match):
            replay(program, plan, LINK, limit, backend, iterations=2, warmup=1, mode="check")
    return backend.happened


BEFORE_B2 = r"tensor 1 \('a1'\), before kernel 6 \('b2'\)"


def shifted(stream, device, host, nbytes):
    return stream, device + 4, host, nbytes


def shorter(stream, device, host, nbytes):
    return stream, device, host, nbytes - 1


@pytest.mark.parametrize(
    ("method", "tasks", "change", "match"),
    [
        ("wait", "swap-out of tensor 1", None, BEFORE_B2),  # a1 leaves before f1 has written it again
        ("wait", "kernel 3", None, BEFORE_B2),  # f4 puts a4 where a1 still is
        # a1 comes back to where a4 is in use.
        ("wait", "swap-in of tensor 1", None, r"tensor 4 \('a4'\), \w+ kernel [34] \('[fb]4'\)"),
        ("wait", "kernel 6", None, BEFORE_B2),  # b2 reads a1 before it is back
        ("copy", "swap-out of tensor 1", None, BEFORE_B2),
        ("copy", "swap-in of tensor 1", None, BEFORE_B2),
        ("copy", "swap-out of tensor 1", shifted, BEFORE_B2),
        # Its last bytes are those of a2's block, which kernel 5 may read before or after.
        ("copy", "swap-in of tensor 1", shifted, r"tensor (1 \('a1'\), before kernel 6|2 \('a2'\), \w+ kernel 5)"),
        ("copy", "swap-in of tensor 1", shorter, r"tensor 1 .*: byte 39,999 of 40,000 is wrong"),
    ],
)
def test_every_wait_and_every_byte_counts(method, tasks, change, match):
    assert broken(LARGE, LARGE_SWAP, 150_000, method, tasks, change, match) == 3


def test_what_is_on_the_host_in_the_end_is_looked_at():
    """p, updated by f2 only, is on the host from f2 until it is fetched when f1 ends."""
    p, f2 = len(LARGE.tensors), LARGE.kernels[1]
    kernels = list(LARGE.kernels)
    kernels[1] = replace(f2, inputs=(*f2.inputs, p), outputs=(*f2.outputs, p))
    program = Program("p", (*LARGE.tensors, Tensor("p", 5000, "parameter", True)), tuple(kernels))
    plan = Plan((Swap(p, 1, 1, prefetch=0),))
    match = r"tensor 8 \('p'\), on the host at the end of the run: byte 0 of 5,000 is wrong"
    tasks = "swap-out of tensor 8 ('p'), iteration 2"  # the last
    assert broken(program, plan, 200_000, "copy", tasks, None, match) == 1


def test_a_wrong_address_is_found(monkeypatch):
    """a4 lies 4 bytes behind the begin of a2, which is in use."""
    right = streams._pack

    def wrong(lives, *arguments):
        name, packing = right(lives, *arguments)
        a2, a4 = (lives.owner.tolist().index(t) for t in (A2, A4))
        offsets = packing.offsets.copy()
        offsets[a4] = offsets[a2] + 4
        return name, replace(packing, offsets=offsets)

    monkeypatch.setattr(streams, "_pack", wrong)
    with HostBackend(LINK) as backend, pytest.raises(ReplayError, match=r"tensor [23] \('a[23]'\), \w+ kernel \d"):
        replay(LARGE, Plan(), LINK, 180_000, backend, iterations=2, warmup=1, mode="check")


# ------------------------------------------------------------------------- faults


class Broken(HostBackend):
    """Copies to the host fail from the second on, or kernels do from the twentieth on."""

    copies = spins = 0
    what = ""

    def _copy(self, *arguments):
        self.copies += 1
        if self.what == "copy" and self.copies > 2:
            raise OSError("the link is down")
        return super()._copy(*arguments)

    def spin(self, ns, nbytes=0):
        def work(ready):
            raise ZeroDivisionError("a kernel")

        self.spins += 1
        return self._put("compute", work) if self.what == "spin" and self.spins == 20 else super().spin(ns, nbytes)


@pytest.mark.parametrize(
    ("what", "match"),
    [("copy", r"swap-out of tensor 1 \('a1'\), iteration 1: the link is down"),
     ("spin", r"kernel 3 \('f4'\), iteration 2: a kernel")],
)  # fmt: skip
def test_a_fault_is_named_drains_the_streams_and_returns_the_memory(what, match):
    with Broken(LINK) as backend:
        backend.what = what
        with pytest.raises(BackendError, match=match):
            replay(LARGE, LARGE_SWAP, LINK, 150_000, backend, iterations=50)
        assert backend.allocated_bytes == 0 and not hasattr(backend, "host")
        backend.what = ""
        assert replay(LARGE, LARGE_SWAP, LINK, 150_000, backend, iterations=2, mode="check").fits


def test_ctrl_c_stops_everything():
    with Watched(LINK) as backend:
        threads = threading.active_count()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            replay(LARGE.with_durations([10**12] * 8), LARGE_SWAP, LINK, 150_000, backend)
        timer.join()
        assert not backend.ended and backend.allocated_bytes == 0 and threading.active_count() == threads
        assert replay(LARGE, Plan((Recompute(A1, 1, 6),)), LINK, 150_000, backend, iterations=2, mode="check").fits
