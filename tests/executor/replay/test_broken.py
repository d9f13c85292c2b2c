"""Replay broken on purpose is noticed, and a fault is named and leaves nothing behind."""

from dataclasses import replace

import pytest

from executor.replay import streams
from executor.replay.backend import BackendError
from executor.replay.host_backend import HostBackend
from executor.replay.replay import Run, replay, slots
from executor.replay.streams import ReplayError, circle
from simulator import Plan, Program, Swap, Tensor
from tests.executor.replay.conftest import LINK
from tests.executor.replay.test_replay import LARGE, LARGE_SWAP, cases
from tests.tiny import A2, A4

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


def broken(program, plan, limit, method, tasks, change, error, match):
    """A replay in which a Mutant does so, and the error that must come of it; how often it was done."""
    with Mutant(LINK) as backend:
        backend.method, backend.tasks, backend.change = method, tasks, change
        with pytest.raises(error, match=match):
            replay(program, plan, LINK, limit, backend, iterations=2, warmup=1, mode="check")
    return backend.happened


BEFORE_B2 = r"^tensor 1 \('a1'\), before kernel 6 \('b2'\)"


def shifted(stream, device, host, nbytes):
    return stream, device + 4, host, nbytes


def shorter(stream, device, host, nbytes):
    return stream, device, host, nbytes - 1


def unordered(one, other):
    return rf"^{one}, iteration \d: it uses bytes of the .* that {other}, iteration \d uses, too"


OUT, BACK = r"swap-out of tensor 1 \('a1'\)", r"swap-in of tensor 1 \('a1'\)"


@pytest.mark.parametrize(
    ("method", "tasks", "change", "error", "match"),
    [
        ("wait", "swap-out of tensor 1", None, BackendError, unordered(OUT, r"kernel 0 \('f1'\)")),
        ("wait", "kernel 3", None, BackendError, unordered(r"kernel 3 \('f4'\)", OUT)),  # a4 lies where a1 was
        ("wait", "swap-in of tensor 1", None, BackendError, unordered(BACK, r"kernel [34] \('[fb]4'\)")),
        ("wait", "kernel 6", None, BackendError, unordered(r"kernel 6 \('b2'\)", BACK)),
        ("copy", "swap-out of tensor 1", None, ReplayError, BEFORE_B2),
        ("copy", "swap-in of tensor 1", None, ReplayError, BEFORE_B2),
        ("copy", "swap-out of tensor 1", shifted, (ReplayError, BackendError), BEFORE_B2 + "|in the arena|" + OUT),
        ("copy", "swap-in of tensor 1", shifted, (ReplayError, BackendError), BEFORE_B2 + "|" + BACK),
        ("copy", "swap-in of tensor 1", shorter, ReplayError, r"tensor 1 .*: byte 39,999 of 40,000 is wrong"),
    ],
)
def test_every_wait_and_every_byte_counts(method, tasks, change, error, match):
    assert broken(LARGE, LARGE_SWAP, 150_000, method, tasks, change, error, match) == 3


def in_order(order):
    """Of each job of three rounds, how many jobs of each stream come before it by streams and waits alone."""
    over, streams_over = {}, {}
    for i in range(3):
        for j, job in enumerate(order.jobs):
            clock = streams_over.setdefault(job.span.stream, {})
            for back, other in job.waits:
                for stream, count in over.get((i - back, other), {}).items():
                    clock[stream] = max(clock.get(stream, 0), count)
            clock[job.span.stream] = clock.get(job.span.stream, 0) + 1
            over[i, j] = dict(clock)
    return over


def checked(order, machine):
    with HostBackend(machine) as backend, backend.arena(order.footprint, order.host_bytes, slots(order, 3, True)):
        Run(order, backend, 3, 0, True).log(trace=True)


def test_every_wait_of_random_plans_that_protects_bytes_counts():
    """Some waits say when, not what (RULES.md, rules 4 and 5): those of copies for kernels that only read, and those of
    compute for a synchronous swap-out. Others are implied by the rest. Any other that is left out is found."""
    found = 0
    for seed in range(40):
        program, plan, machine, limit = cases(seed)
        order = circle(program, plan, machine, limit, ("smartpool",))
        whole = in_order(order)
        for job in order.jobs:
            for wait in list(job.waits):
                at = job.waits.index(wait)
                del job.waits[at]
                kinds = job.span.stream, order.jobs[wait[1]].span.kind
                if in_order(order) != whole:
                    try:
                        checked(order, machine)
                        when = kinds[1] in ("kernel", "recompute") or kinds == ("compute", "swap_out")
                        assert when, f"seed {seed}: {job.span} does not wait for {order.jobs[wait[1]].span}"
                    except (BackendError, ReplayError):
                        found += 1
                job.waits.insert(at, wait)
    assert found > 100


def test_what_is_on_the_host_in_the_end_is_looked_at():
    """p, updated by f2 only, is on the host from f2 until it is fetched when f1 ends."""
    p, f2 = len(LARGE.tensors), LARGE.kernels[1]
    kernels = list(LARGE.kernels)
    kernels[1] = replace(f2, inputs=(*f2.inputs, p), outputs=(*f2.outputs, p))
    program = Program("p", (*LARGE.tensors, Tensor("p", 5000, "parameter", True)), tuple(kernels))
    plan = Plan((Swap(p, 1, 1, prefetch=0),))
    match = r"tensor 8 \('p'\), on the host at the end of the run: byte 0 of 5,000 is wrong"
    tasks = "swap-out of tensor 8 ('p'), iteration 2"  # the last
    assert broken(program, plan, 200_000, "copy", tasks, None, ReplayError, match) == 1


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
