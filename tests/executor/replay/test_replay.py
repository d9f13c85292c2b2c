"""Tests of replays: order of issue in virtual time, then real bytes on the host backend."""

from dataclasses import replace
from random import Random

import pytest

from executor.replay import streams
from executor.replay.host_backend import HostBackend
from executor.replay.replay import Run, replay, slots
from executor.replay.streams import ReplayError, cycle, unrolled
from simulator import Kernel, Machine, OutOfMemory, Plan, Program, Recompute, Rerun, Swap, Tensor, Timeline, simulate
from simulator.schedule import lower
from tests.executor.conftest import gpu_backend
from tests.executor.replay.conftest import LINK
from tests.random_cases import case as random_case
from tests.tiny import A1, A2, A3, LIMIT, MACHINE, PROGRAM, RECOMPUTE_PLAN, SWAP_PLAN, W

BYTES = replace(
    MACHINE, alignment=1, launch_ns=0, memory_bytes_per_s=10**15
)  # addresses count bytes, as the ledger does

# ------------------------------------------------------------------------- order and waits, without noise


def names(jobs):
    """Returns the waits of each waiting job, by names."""
    name = [(job.span.kind, job.span.index) for job in jobs]
    return {name[j]: {(back, *name[i]) for back, i in job.waits} for j, job in enumerate(jobs) if job.waits}


def test_the_swap_plan_of_the_picture_by_hand():
    """f4 waits for a1's swap-out, b2 for its swap-in (drawn in tests/tiny.py): 30 ns for memory and 20 ns for data."""
    measured = replay(PROGRAM, SWAP_PLAN, BYTES, LIMIT, HostBackend(BYTES), iterations=3)
    assert measured.iterations_ns == (170, 170, 170)
    assert measured.timeline.breakdown == measured.predicted.breakdown
    assert (measured.timeline.breakdown.stall_memory_ns, measured.timeline.breakdown.stall_data_ns) == (30, 20)
    assert (measured.footprint, measured.device_bytes, measured.timeline.peak_bytes) == (150, 150, 150)
    assert (measured.error, measured.fits, measured.checks, measured.period) == (0, True, 0, 1)
    # Spans of every iteration equal those of the simulation.
    simulated = simulate(PROGRAM, SWAP_PLAN, BYTES, LIMIT, iterations=3)
    assert measured.timeline.spans == simulated.spans and measured.timeline.boundaries == simulated.boundaries
    assert measured.timeline.memory[-10:] == simulated.memory[-10:]
    # Across streams, f4 waits for an address and the swap-in for the last kernel that had ended.
    assert names(cycle(PROGRAM, SWAP_PLAN, BYTES, LIMIT).jobs) == {
        ("swap_out", A1): {(0, "kernel", 1)},
        ("kernel", 3): {(0, "swap_out", A1)},
        ("swap_in", A1): {(0, "swap_out", A1), (0, "kernel", 4)},
        ("kernel", 6): {(0, "swap_in", A1)},
    }


def test_a_prefetch_is_issued_when_its_kernel_ends_and_a_synchronous_swap_out_holds_compute():
    # a1 is swapped out in [20, 60) while f3 waits 40 ns; its swap-in, pinned to f4's end at 80, ends at 120 with b3.
    # w (10 bytes) is swapped out across the boundary: after b1, until f1.
    plan = Plan((Swap(A1, 1, 6, prefetch=3, sync=True), Swap(W, 7, 0)))
    measured = replay(PROGRAM, plan, BYTES, 300, HostBackend(BYTES))
    assert measured.iteration_ns == measured.predicted_ns == 180
    # No kernel takes w's memory, and b4 ends before the swap-in of a1 starts.
    assert names(cycle(PROGRAM, Plan((Swap(W, 0, 7, sync=True),)), BYTES, 300).jobs)["kernel", 1] == {
        (0, "swap_out", W)
    }
    plan = Plan((Swap(A1, 1, 6, prefetch=3), Swap(A2, 2, 5, prefetch=3)))
    waits = names(cycle(PROGRAM, plan, BYTES, 300).jobs)
    assert waits["swap_in", A1] == {(0, "swap_out", A1), (0, "kernel", 3)}


def test_the_pause_between_nodes_is_taken_off_in_advance_and_waits_stay_visible():
    """With a pause of 6 ns per node, kernels of 10 ns spin for 4 ns; waits for copies add to that.

    A node of 3 ns takes 3 ns too long, which the next one makes up for.
    """
    paused = replace(BYTES, graph_launch_ns=6, issue_ns=50)  # issue_ns has no effect on a graph
    assert replay(PROGRAM, SWAP_PLAN, paused, LIMIT, HostBackend(paused)).iterations_ns == (170,) * 5
    short = PROGRAM.with_durations([3, 10, 10, 10, 20, 20, 20, 20])
    measured = replay(short, Plan(), paused, 1000, HostBackend(paused))
    assert measured.iteration_ns == measured.predicted_ns == 113
    slower = replay(short, Plan(), paused, 1000, HostBackend(replace(paused, graph_launch_ns=9)))
    assert slower.iteration_ns == 113 + 8 * 3  # a pause that exceeds the calibrated one stays visible
    late = replay(PROGRAM, SWAP_PLAN, BYTES, LIMIT, HostBackend(replace(BYTES, d2h_bytes_per_s=10**9 // 2)))
    assert late.iteration_ns == 170 + 40  # the swap-out takes twice as long


def test_a_place_on_the_host_is_used_twice():
    """a1 (f2 to b2) and w (b1 to the next f1) share 40 host bytes, so a1's swap-out waits for w's swap-in."""
    plan = Plan((Swap(A1, 1, 6), Swap(W, 7, 0)))
    order = cycle(PROGRAM, plan, BYTES, 300)
    assert order.host_bytes == 40 and order.host == {A1: 0, W: 0}
    assert (0, "swap_in", W) in names(order.jobs)["swap_out", A1]


ALTERNATING = Program(
    "alternating",
    (Tensor("p0", 20, "parameter", True), Tensor("p1", 40, "parameter", True), Tensor("a", 5)),
    (
        Kernel("k0", "other", "forward", (1,), (2,), 20),
        Kernel("k1", "other", "forward", (), (), 30),
        Kernel("k2", "other", "forward", (0, 2), (0,), 10),
    ),
)
ALTERNATING_PLAN = Plan((Swap(0, 2, 2), Swap(1, 0, 0)))


def test_alternating_iterations_form_one_cycle():
    """Iterations alternate between 60 and 80 ns, 70 ns on average."""
    measured = replay(ALTERNATING, ALTERNATING_PLAN, BYTES, 1000, HostBackend(BYTES), iterations=5)
    assert measured.period == 2 and len(measured.iterations_ns) == 6
    assert set(measured.iterations_ns) == {60, 80}
    assert measured.iteration_ns == measured.predicted_ns == 70
    assert {s.index for s in measured.timeline.spans if s.stream == "compute"} == {0, 1, 2}


def test_unrolling_by_hand():
    program, plan, original = unrolled(ALTERNATING, Plan((Swap(0, 2, 2, prefetch=0), Swap(1, 0, 0))), 2)
    assert original == [0, 1, 2, 2] and [k.outputs for k in program.kernels] == [(2,), (), (0,), (3,), (), (0,)]
    assert set(plan.decisions) == {Swap(0, 2, 5, prefetch=3), Swap(0, 5, 2, prefetch=0), Swap(1, 0, 3), Swap(1, 3, 0)}
    plan = Plan((Swap(1, 0, 0, copy=2), Recompute(2, 0, 2, at=1), Rerun(0, 2)))
    assert set(unrolled(ALTERNATING, plan, 2)[1].decisions) == {
        Swap(1, 0, 3, copy=5),
        Swap(1, 3, 0, copy=2),
        Recompute(2, 0, 2, at=1),
        Recompute(3, 3, 5, at=4),
        Rerun(0, 2),
        Rerun(3, 5),
    }


def test_a_plan_that_never_becomes_steady_is_refused(monkeypatch):
    monkeypatch.setattr(streams, "LONGEST", 64)  # as in tests/simulator/test_reference.py, which needs 400
    tensors = tuple(Tensor(f"p{i}", 1001, "parameter", True) for i in range(3))
    program = Program("p", tensors, tuple(Kernel(f"k{i}", "other", "forward", (i,), (i,), 1000) for i in range(3)))
    with pytest.raises(ReplayError, match="do not repeat"):
        cycle(program, Plan(tuple(Swap(i, i, i) for i in range(3))), replace(BYTES, h2d_bytes_per_s=10**12), 10**4)


def cases(seed):
    """Returns a random program, a plan with all kinds of decisions, a machine and a feasible limit."""
    rng = Random(seed)
    program, plan, machine, *_ = random_case(seed)
    kernels = [
        replace(k, variants=tuple((rng.randint(0, 30), rng.randint(0, 30)) for _ in range(rng.randint(0, 2))))
        for k in program.kernels
    ]
    program = replace(program, kernels=tuple(kernels))
    chosen = [(k, rng.randrange(len(x.variants))) for k, x in enumerate(kernels) if x.variants and rng.random() < 0.5]
    plan = replace(plan, variants=tuple(chosen), fingerprint="")
    machine = replace(machine, alignment=rng.choice([1, 4, 512]), host_bytes=10**6)
    return program, plan, machine, lower(program, plan).required_bytes + rng.randint(0, 40)


def test_no_plan_takes_longer_than_simulated(quick):
    for seed in range(200):
        program, plan, machine, limit = cases(seed)
        backend = HostBackend(machine)
        order = cycle(program, plan, machine, limit)
        with backend.arena(order.footprint, order.host_bytes, slots(order, 6, False)):
            run = Run(order, backend, 6, 0, False)
            log = run.log(trace=True)
            begin = int(log.begin.min())
            for i, end in enumerate(run.boundaries(log)):
                assert end - begin <= (i + 1) * order.predicted.iteration_ns / order.iterations, f"seed {seed}"
            timeline = run.read(log, program, limit, 2 * order.iterations)
        assert timeline.peak_bytes <= order.footprint, f"seed {seed}"
        parts = timeline.breakdown
        stalls = parts.stall_memory_ns + parts.stall_data_ns
        assert parts.compute_ns + parts.recompute_ns + stalls == timeline.iteration_ns, f"seed {seed}"
        kernels = [s.index for s in timeline.spans if s.kind == "kernel"]
        assert kernels == list(range(len(program.kernels))) * 4 * order.iterations, f"seed {seed}"
        durations = [k.duration_ns for k in program.with_variants(plan.variants).kernels]
        assert all(s.end_ns - s.start_ns == durations[s.index] for s in timeline.spans if s.stream == "compute")


# ------------------------------------------------------------------------- the footprint and the limit


def test_the_arena_is_as_large_as_the_footprint():
    aligned = replace(MACHINE, alignment=64)  # blocks of 40 and 10 bytes take 64 each; w, a1, a2, a3 at once and more
    measured = replay(PROGRAM, SWAP_PLAN, aligned, LIMIT, HostBackend(aligned))
    assert measured.footprint > LIMIT and not measured.fits and measured.device_bytes == measured.footprint


def test_a_plan_that_does_not_fit_by_bytes_is_out_of_memory():
    with pytest.raises(OutOfMemory):
        replay(PROGRAM, Plan(), BYTES, LIMIT, HostBackend(BYTES))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"iterations": 1}, "iterations >= 2"),
        ({"warmup": 0}, "warmup >= 1"),
        ({"mode": "fast"}, "time or check"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        replay(PROGRAM, SWAP_PLAN, BYTES, LIMIT, HostBackend(BYTES), **options)


# ------------------------------------------------------------------------- real bytes

# tests/tiny.py, a thousand times larger and 200,000 times slower: f1 takes 2 ms, a1 8 ms each way, SWAP_PLAN 34 ms.
LARGE = Program(
    "large",
    tuple(replace(t, nbytes=1000 * t.nbytes) for t in PROGRAM.tensors),
    tuple(replace(k, duration_ns=200_000 * k.duration_ns) for k in PROGRAM.kernels),
)
LARGE_SWAP = Plan(SWAP_PLAN.decisions)
LARGE_RECOMPUTE = Plan(RECOMPUTE_PLAN.decisions)


@pytest.mark.parametrize(
    ("plan", "checks"),
    [
        # 3 iterations of 15 reads, checked before and during their kernels, and 7 results after them; then w.
        (LARGE_SWAP, 3 * 37 + 1),
        (Plan((Swap(A2, 2, 5), Swap(W, 0, 7))), 3 * 37 + 1),
        (Plan((Swap(W, 7, 0),)), 3 * 37 + 1),
        (LARGE_RECOMPUTE, 3 * 40 + 1),  # recomputed f1 reads w (two checks) and writes a1
        (Plan((Swap(A1, 1, 6, copy=0), Swap(W, 0, 7, copy=7))), 3 * 37 + 1),
        (Plan((Recompute(A1, 1, 6, at=5),)), 3 * 40 + 1),
        (Plan((Rerun(0, 5), Rerun(1, 5), Swap(A3, 3, 4, copy=2))), 3 * 43 + 1),
    ],
)
def test_patterns_are_right(host, plan, checks):
    measured = replay(LARGE, plan, LINK, 180_000, host, iterations=2, warmup=1, mode="check")
    assert measured.checks == checks
    assert host.allocated_bytes == 0 and not hasattr(host, "host")


def test_the_measured_timeline_is_of_the_simulators_type(host, tmp_path):
    measured = replay(LARGE, LARGE_SWAP, LINK, 150_000, host, 2, 1)
    assert measured.timeline.peak_bytes <= measured.footprint <= 150_000
    path = tmp_path / "measured.json"
    measured.timeline.save(path)
    assert Timeline.load(path) == measured.timeline
    events = measured.timeline.perfetto(LARGE)["traceEvents"]
    assert sum(e.get("cat") == "swap_in" for e in events) == 2
    assert measured.timeline.breakdown.stall_memory_ns > 0 < measured.timeline.breakdown.stall_data_ns


def test_random_plans_keep_every_byte(quick):
    for seed in range(150, 180):
        program, plan, machine, limit = cases(seed)
        with HostBackend(machine) as backend:
            measured = replay(program, plan, machine, limit, backend, 2, 1, mode="check")
        assert measured.timeline.peak_bytes <= measured.footprint == measured.device_bytes, f"seed {seed}"


def test_alternating_iterations_keep_every_byte(host):
    machine = replace(LINK, alignment=1)
    program = replace(ALTERNATING, tensors=tuple(replace(t, nbytes=100 * t.nbytes) for t in ALTERNATING.tensors))
    program = program.with_durations([2000 * k.duration_ns * 10 for k in program.kernels])
    assert replay(program, ALTERNATING_PLAN, machine, 10**5, host, mode="check").period == 2


@pytest.mark.gpu
def test_patterns_are_right_on_a_gpu():
    machine = Machine.load("h200")
    program = replace(LARGE, tensors=tuple(replace(t, nbytes=1000 * t.nbytes) for t in LARGE.tensors))
    with gpu_backend(machine) as backend:
        measured = replay(program, LARGE_SWAP, machine, 150_020_000, backend, mode="check")
    assert measured.fits and measured.checks > 0


def test_copies_take_nothing_from_kernels_that_spin():
    """The prediction of a replay ignores contention between copies and kernels, because spins move no bytes."""
    machine = replace(BYTES, copy_contention=0.25, memory_bytes_per_s=10**9)
    program = replace(PROGRAM, kernels=tuple(replace(k, bytes=10**6) for k in PROGRAM.kernels))
    plan = replace(SWAP_PLAN, fingerprint=program.fingerprint)
    found = replay(program, plan, machine, LIMIT, HostBackend(machine))
    assert found.predicted.iteration_ns == simulate(PROGRAM, SWAP_PLAN, BYTES, LIMIT).iteration_ns
    assert simulate(program, plan, machine, LIMIT).breakdown.compute_ns > PROGRAM.ideal_ns
    assert found.timeline.breakdown == found.predicted.breakdown and found.predicted.breakdown.compute_ns == 120
