"""Tests that replays detect injected faults, and that a fault names its task and leaves no memory allocated."""

import re
from dataclasses import replace

import pytest

from executor.replay import streams
from executor.replay.backend import BackendError
from executor.replay.host_backend import HostBackend
from executor.replay.replay import Run, replay, slots
from executor.replay.streams import ReplayError, cycle
from simulator import Plan, Program, Swap, Tensor
from tests.executor.replay.conftest import LINK
from tests.executor.replay.test_replay import LARGE, LARGE_SWAP, cases
from tests.fake_device.cupy import opened
from tests.tiny import A2, A4

NO_ORDER = "neither waits for the other"


def broken(program, plan, limit, method, tasks, change):
    """Replays on the fake device with the first call of ``method`` in each matching task skipped or changed.

    Args:
        tasks: prefix of the names of matching tasks.
        change: maps the call's arguments to changed ones; None: skip the call.

    Returns:
        Number of broken calls, and the errors found.
    """
    with opened(LINK) as (backend, device):
        does = getattr(backend, method)
        changed = list[str]()

        def call(*arguments):
            if backend.task.startswith(tasks) and backend.task not in changed:
                changed.append(backend.task)
                if change is None:
                    return
                arguments = change(*arguments)
            does(*arguments)

        setattr(backend, method, call)
        wrong = []
        try:
            replay(program, plan, LINK, limit, backend, iterations=2, warmup=1, mode="check")
        except (ReplayError, BackendError) as error:
            wrong.append(str(error))
        return len(changed), " ".join(wrong + device.found)


BEFORE_B2 = r"tensor 1 \('a1'\), before kernel 6 \('b2'\)"


def shifted(stream, device, host, nbytes):
    return stream, device + 4, host, nbytes


def shorter(stream, device, host, nbytes):
    return stream, device, host, nbytes - 1


@pytest.mark.parametrize(
    ("method", "tasks", "change", "match"),
    [
        *(
            ("wait", tasks, None, NO_ORDER)
            for tasks in ("swap-out of tensor 1", "kernel 3", "swap-in of tensor 1", "kernel 6")
        ),  # kernel 3: a4 reuses a1's memory
        ("copy", "swap-out of tensor 1", None, BEFORE_B2),
        ("copy", "swap-in of tensor 1", None, BEFORE_B2),
        ("copy", "swap-out of tensor 1", shifted, f"{BEFORE_B2}|in the arena|{NO_ORDER}"),
        ("copy", "swap-in of tensor 1", shifted, f"{BEFORE_B2}|{NO_ORDER}"),
        ("copy", "swap-in of tensor 1", shorter, r"tensor 1 .*: byte 39,999 of 40,000 is wrong"),
    ],
)
def test_every_wait_and_every_byte_counts(method, tasks, change, match):
    times, wrong = broken(LARGE, LARGE_SWAP, 150_000, method, tasks, change)
    assert times == 3 and re.search(match, wrong)


def in_order(order):
    """Returns how many jobs of each stream precede each job of three rounds by stream order and waits."""
    finished = {}
    streams_finished = {}
    for i in range(3):
        for j, job in enumerate(order.jobs):
            clock = streams_finished.setdefault(job.span.stream, {})
            for rounds, other in job.waits:
                for stream, count in finished.get((i - rounds, other), {}).items():
                    clock[stream] = max(clock.get(stream, 0), count)
            clock[job.span.stream] = clock.get(job.span.stream, 0) + 1
            finished[i, j] = dict(clock)
    return finished


def test_every_wait_of_random_plans_that_protects_bytes_counts(quick):
    """Removing a wait is detected unless it only affects timing (RULES.md, rules 4 and 5) or other waits imply it.

    Timing-only waits are those of copies for kernels that only read, and of compute for a synchronous swap-out.
    """
    detected = 0
    for seed in range(40):
        program, plan, machine, limit = cases(seed)
        order = cycle(program, plan, machine, limit)
        complete = in_order(order)
        with opened(machine) as (backend, device):
            for job in order.jobs:
                for index, wait in enumerate(job.waits.copy()):
                    del job.waits[index]
                    kinds = job.span.stream, order.jobs[wait[1]].span.kind
                    if in_order(order) != complete:
                        with backend.arena(order.footprint, order.host_bytes, slots(order, 3, True)):
                            try:
                                Run(order, backend, 3, 0, True).log(trace=True)
                                when = kinds[1] in ("kernel", "recompute") or kinds == ("compute", "swap_out")
                                assert when or device.found, f"seed {seed}: {job.span} does not wait"
                            except ReplayError:
                                assert device.found
                        detected += bool(device.found)
                        device.found.clear()
                    job.waits.insert(index, wait)
    assert detected > 100


def test_host_contents_are_checked_at_the_end():
    """p, which only f2 updates, is on the host from f2 until its swap-in at f1's end."""
    p = len(LARGE.tensors)
    f2 = LARGE.kernels[1]
    kernels = list(LARGE.kernels)
    kernels[1] = replace(f2, inputs=(*f2.inputs, p), outputs=(*f2.outputs, p))
    program = Program("p", (*LARGE.tensors, Tensor("p", 5000, "parameter", True)), tuple(kernels))
    plan = Plan((Swap(p, 1, 1, prefetch=0),))
    last = "swap-out of tensor 8 ('p'), iteration 2"
    times, wrong = broken(program, plan, 200_000, "copy", last, None)
    assert times == 1 and "tensor 8 ('p'), on the host at the end of the run: byte 0 of 5,000 is wrong" in wrong


def test_a_wrong_address_is_found(monkeypatch):
    """a4 overlaps a2, which is in use, from its byte 4 on."""
    right = streams.pack_within
    lifetimes = streams.timeline_lifetimes
    lives = []
    monkeypatch.setattr(streams, "timeline_lifetimes", lambda timeline: lives.append(lifetimes(timeline)) or lives[-1])

    def wrong(*arguments):
        packing = right(*arguments)
        a2, a4 = (lives[-1].owner.tolist().index(t) for t in (A2, A4))
        offsets = packing.offsets.copy()
        offsets[a4] = offsets[a2] + 4
        return replace(packing, offsets=offsets)

    monkeypatch.setattr(streams, "pack_within", wrong)
    with HostBackend(LINK) as backend, pytest.raises(ReplayError, match=r"tensor [23] \('a[23]'\), \w+ kernel \d"):
        replay(LARGE, Plan(), LINK, 180_000, backend, iterations=2, warmup=1, mode="check")


def test_a_fault_leaves_the_backend_usable_and_no_memory():
    class Broken(HostBackend):
        fails = True

        def copy(self, stream, device, host, nbytes):
            if self.fails and "iteration 1" in self.task:
                raise BackendError(f"{self.task}: the link is down")
            super().copy(stream, device, host, nbytes)

    with Broken(LINK) as backend:
        with pytest.raises(BackendError, match=r"swap-out of tensor 1 \('a1'\), iteration 1: the link is down"):
            replay(LARGE, LARGE_SWAP, LINK, 150_000, backend)
        assert backend.allocated_bytes == 0 and not hasattr(backend, "host")
        backend.fails = False
        assert replay(LARGE, LARGE_SWAP, LINK, 150_000, backend, iterations=2, mode="check").fits
