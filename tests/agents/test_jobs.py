"""Tests several jobs: workload, static memory split, predicted kernel times, and the controller."""

from dataclasses import replace

import numpy as np
import pytest

import agents
from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.controller import control, measured_times
from agents.heuristics.tensile.times import KernelTimes, Sample, corrected, drift, features, r_squared, sequence
from agents.jobs import Split, jobs_of
from envs.memory_env import small_task
from simulator import Job, Plan, simulate_jobs

PROGRAM, MACHINE = small_task()
NONE = Plan((), PROGRAM.fingerprint, "none")
SLOWER = PROGRAM.with_durations([3 * kernel.duration_ns for kernel in PROGRAM.kernels])


def test_every_job_gets_as_much_work() -> None:
    a, b = jobs_of([PROGRAM, SLOWER], [None, None])
    assert (a.iterations, b.iterations) == (18, 6)
    timeline = simulate_jobs([a, b], MACHINE, PROGRAM.peak_bytes + SLOWER.peak_bytes)
    assert timeline.end_ns == 18 * PROGRAM.ideal_ns + 6 * SLOWER.ideal_ns


def test_memory_is_split_by_peaks() -> None:
    double = replace(PROGRAM, tensors=tuple(replace(t, nbytes=2 * t.nbytes) for t in PROGRAM.tensors))
    limit = int(0.6 * (PROGRAM.peak_bytes + double.peak_bytes))
    first, second = Split("autoswap_doa").plan_jobs([PROGRAM, double], MACHINE, limit)
    assert (first.limit, second.limit) == (limit // 3, limit * 2 // 3)
    with pytest.raises(agents.Infeasible):
        Split("autoswap_doa").plan_jobs([PROGRAM, double], MACHINE, limit // 3)


def test_kernel_times_are_learned_and_corrected() -> None:
    kernels = tuple(replace(k, flops=10**6 * k.duration_ns, bytes=k.duration_ns**2) for k in PROGRAM.kernels)
    program = replace(PROGRAM, kernels=kernels)
    times = np.array([kernel.duration_ns for kernel in kernels])
    samples = [Sample(program, n, n * times) for n in (1, 3)]
    learned = KernelTimes.fit(samples)
    assert r_squared(learned.predict(program, 2), 2 * times) > 0.9 > r_squared(np.full_like(times, times.mean()), times)
    assert (KernelTimes.fit(samples).predict(program, 3) == learned.predict(program, 3)).all()
    assert features(program, 2).shape[0] == len(times)
    # Kernels of equal work, whose times only the shapes tell.
    equal = replace(PROGRAM, kernels=tuple(replace(k, kind="other", flops=1, bytes=1) for k in PROGRAM.kernels))
    shapes = np.log1p(times)[:, None].astype(np.float32)
    from_shapes = KernelTimes.fit([Sample(equal, 1, times, shapes)]).predict(equal, 1, shapes)
    assert (
        r_squared(from_shapes, times)
        > 0.9
        > r_squared(KernelTimes.fit([Sample(equal, 1, times)]).predict(equal, 1), times)
    )
    with pytest.raises(ValueError, match="samples"):
        KernelTimes.fit([])
    assert corrected(np.array([100, 10]), np.array([200, 10]), 0.75).tolist() == [125, 10]
    # Kernels that change places early and late make up for each other at the end, not between.
    assert drift(np.array([50, 50]), np.array([60, 40])) == 0.1 and drift(times, times) == 0
    assert sequence(np.array([5, 7])) == [0, 5, 12]


def test_measured_times_exclude_waits_for_memory() -> None:
    jobs = [Job("a", PROGRAM, NONE, iterations=2), Job("b", PROGRAM, NONE, iterations=2)]
    timeline = simulate_jobs(jobs, MACHINE, 2 * PROGRAM.peak_bytes).jobs[0]
    n = len(PROGRAM.kernels)
    assert measured_times(timeline, n, timeline.boundaries[0] - 1) is None
    for now, i in ((timeline.boundaries[0], 0), (timeline.boundaries[1], 1)):
        times = measured_times(timeline, n, now)
        assert times is not None and times.sum() == timeline.iterations_ns[i]
        assert times.sum() == pytest.approx(2 * PROGRAM.ideal_ns, rel=0.1)  # they take turns
    # Waits for memory are not the kernels'.
    limit = int(0.6 * PROGRAM.peak_bytes)
    plan = agents.make("autoswap_doa").plan(PROGRAM, MACHINE, limit)
    single = simulate_jobs([Job("a", PROGRAM, plan, iterations=3)], MACHINE, limit).jobs[0]
    times = measured_times(single, n, single.boundaries[-1])
    assert single.iterations_ns[-1] > PROGRAM.ideal_ns and times is not None and times.sum() == PROGRAM.ideal_ns


@pytest.mark.parametrize("planner", [TENSILE(), Split("capuchin")])
def test_the_controller_replans_for_active_jobs(planner: agents.jobs.JobsPlanner) -> None:
    ideal = PROGRAM.ideal_ns
    limit = int(0.75 * 2 * PROGRAM.peak_bytes)
    jobs = [Job("stays", PROGRAM, NONE), Job("visits", PROGRAM, NONE, arrives_ns=2 * ideal + 1, iterations=3)]
    result = control(jobs, MACHINE, limit, planner, until_ns=20 * ideal, check_ns=ideal)
    resident, visitor = result.timeline.jobs
    assert [event.why for event in result.replanned if event.why != "drift"] == ["arrival", "arrival", "departure"]
    assert result.timeline.peak_bytes <= limit and len(visitor.boundaries) == 3
    # Alone it needs no plan; with the visitor it has one, which takes effect at a boundary; then none again.
    assert result.jobs[0].plan.decisions == () and len(resident.switches) >= 2
    assert result.jobs[0].plans[-1].decisions == ()
    assert all(time in resident.boundaries for time, _ in resident.switches)
    assert resident.iterations_ns[0] == ideal == resident.iterations_ns[-1]
    assert len(resident.spans) >= len(resident.boundaries) * len(PROGRAM.kernels)  # no iteration is lost
    with pytest.raises(ValueError, match="check_ns"):
        control(jobs, MACHINE, limit, planner, until_ns=ideal, check_ns=0)


def test_jobs_within_their_limits_do_not_take_from_each_other() -> None:
    # Without prefetch triggers, tensors are swapped into free memory that other jobs need.
    programs = [PROGRAM] * 3
    limit = int(0.55 * sum(program.peak_bytes for program in programs))
    limited = jobs_of(programs, Split("autoswap_doa").plan_jobs(programs, MACHINE, limit))
    free = [replace(job, within_limit=False) for job in limited]
    separate, shared = (simulate_jobs(jobs, MACHINE, limit) for jobs in (limited, free))
    assert not separate.evictions and shared.evictions
    assert separate.end_ns < shared.end_ns
