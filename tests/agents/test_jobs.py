"""Several jobs: the measure and its floor, memory split between them, kernel times, and the controller."""

from dataclasses import replace

import numpy as np
import pytest

import agents
from agents.floor import floor
from agents.heuristics.tensile import TENSILE
from agents.heuristics.tensile.controller import control, measured_times
from agents.heuristics.tensile.times import KernelTimes, Sample, corrected, drift, features, r_squared, sequence
from agents.jobs import SearchedSplit, Split, floor_ns, jobs_of, makespan_ns, shares_of_work, unlimited_ns
from envs.memory_env import small_task
from simulator import Job, Plan, simulate, simulate_jobs
from tests import tiny

PROGRAM, MACHINE = small_task()
NONE = Plan((), PROGRAM.fingerprint, "none")
SLOWER = PROGRAM.with_durations([3 * kernel.duration_ns for kernel in PROGRAM.kernels])


def test_every_job_gets_as_much_work() -> None:
    assert shares_of_work([PROGRAM, SLOWER], rounds=2) == (6, 2)
    a, b = jobs_of([PROGRAM, SLOWER], [None, None], rounds=2)
    assert (a.iterations, b.iterations) == (6, 2)
    assert unlimited_ns([PROGRAM, SLOWER], MACHINE, rounds=2) == 6 * PROGRAM.ideal_ns + 2 * SLOWER.ideal_ns


@pytest.mark.parametrize("part", [0.8, 0.65])
@pytest.mark.parametrize("sharing", ["fifo", "shared"])
def test_no_makespan_is_below_the_floor(part: float, sharing: str) -> None:
    programs = [PROGRAM, SLOWER]
    limit = int(part * sum(program.peak_bytes for program in programs))
    least = floor_ns(programs, MACHINE, limit)
    assert least >= unlimited_ns(programs, MACHINE) - 1  # kernels take turns
    for planner in (TENSILE(), Split("autoswap_doa"), Split("lp_round")):
        plans = planner.plan_jobs(programs, MACHINE, limit)
        assert makespan_ns(programs, plans, MACHINE, limit, sharing) >= least  # type: ignore[arg-type]


def test_one_job_alone_may_bind_the_floor() -> None:
    overhead = floor(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT).overhead
    assert 0 < overhead <= 10 / 120  # the optimum
    assert floor_ns([tiny.PROGRAM], tiny.MACHINE, tiny.LIMIT) == 120 + int(5 * 120 * (1 + overhead))


def test_memory_is_split_by_peaks() -> None:
    double = replace(PROGRAM, tensors=tuple(replace(t, nbytes=2 * t.nbytes) for t in PROGRAM.tensors))
    limit = int(0.6 * (PROGRAM.peak_bytes + double.peak_bytes))
    first, second = Split("autoswap_doa").plan_jobs([PROGRAM, double], MACHINE, limit)
    assert (first.limit, second.limit) == (limit // 3, limit * 2 // 3)
    with pytest.raises(agents.Infeasible):
        Split("autoswap_doa").plan_jobs([PROGRAM, double], MACHINE, limit // 3)


def test_jobs_within_their_limits_do_not_take_from_each_other() -> None:
    # Without prefetch triggers tensors come back into memory that is free, and that others need.
    programs = [PROGRAM] * 3
    limit = int(0.55 * sum(program.peak_bytes for program in programs))
    within = jobs_of(programs, Split("autoswap_doa").plan_jobs(programs, MACHINE, limit))
    free = [replace(job, within=False) for job in within]
    kept, taken = (simulate_jobs(jobs, MACHINE, limit) for jobs in (within, free))
    assert not kept.evictions and taken.evictions
    assert kept.end_ns < taken.end_ns


def test_a_searched_split_is_no_worse() -> None:
    programs = [PROGRAM, SLOWER]  # the slower hides its transfers: it can do with less
    limit = int(0.6 * sum(program.peak_bytes for program in programs))
    searched = SearchedSplit("autoswap_doa", tried=40)
    plans = searched.plan_jobs(programs, MACHINE, limit)
    even = Split("autoswap_doa").plan_jobs(programs, MACHINE, limit)
    assert makespan_ns(programs, plans, MACHINE, limit) <= makespan_ns(programs, even, MACHINE, limit)
    needs = [simulate(p, plan, MACHINE, limit).required_bytes for p, plan in zip(programs, plans, strict=True)]
    assert sum(needs) <= limit and searched.simulator_calls > 2 * searched.parts
    with pytest.raises(agents.Infeasible, match="no split"):
        searched.plan_jobs(programs, MACHINE, limit // 3)
    with pytest.raises(ValueError, match="parts"):
        SearchedSplit("autoswap_doa", parts=1)


def test_kernel_times_are_learned_and_corrected() -> None:
    kernels = tuple(replace(k, flops=10**6 * k.duration_ns, bytes=k.duration_ns**2) for k in PROGRAM.kernels)
    program, times = replace(PROGRAM, kernels=kernels), np.array([kernel.duration_ns for kernel in kernels])
    samples = [Sample(program, n, n * times) for n in (1, 3)]
    learned = KernelTimes.fit(samples)
    assert r_squared(learned.predict(program, 2), 2 * times) > 0.9 > r_squared(np.full_like(times, times.mean()), times)
    assert (KernelTimes.fit(samples).predict(program, 3) == learned.predict(program, 3)).all()
    assert features(program, 2).shape[0] == len(times)
    with pytest.raises(ValueError, match="samples"):
        KernelTimes.fit([])
    assert corrected(np.array([100, 10]), np.array([200, 10]), 0.75).tolist() == [125, 10]
    # Kernels that change places early and late make up for each other at the end, not between.
    assert drift(np.array([50, 50]), np.array([60, 40])) == 0.1 and drift(times, times) == 0
    assert sequence(np.array([5, 7])) == [0, 5, 12]


def test_what_is_measured_is_the_kernels_and_their_turns() -> None:
    jobs = [Job("a", PROGRAM, NONE, iterations=2), Job("b", PROGRAM, NONE, iterations=2)]
    ran = simulate_jobs(jobs, MACHINE, 2 * PROGRAM.peak_bytes).jobs[0]
    n = len(PROGRAM.kernels)
    assert measured_times(ran, n, ran.boundaries[0] - 1) is None
    for now, i in ((ran.boundaries[0], 0), (ran.boundaries[1], 1)):
        times = measured_times(ran, n, now)
        assert times is not None and times.sum() == ran.iterations_ns[i]
        assert times.sum() == pytest.approx(2 * PROGRAM.ideal_ns, rel=0.1)  # they take turns
    # Waits for memory are not the kernels'.
    limit = int(0.6 * PROGRAM.peak_bytes)
    plan = agents.make("autoswap_doa").plan(PROGRAM, MACHINE, limit)
    alone = simulate_jobs([Job("a", PROGRAM, plan, iterations=3)], MACHINE, limit).jobs[0]
    times = measured_times(alone, n, alone.boundaries[-1])
    assert alone.iterations_ns[-1] > PROGRAM.ideal_ns and times is not None and times.sum() == PROGRAM.ideal_ns


@pytest.mark.parametrize("planner", [TENSILE(), Split("capuchin")])
def test_the_controller_plans_anew_for_those_who_are_there(planner: agents.jobs.JobsPlanner) -> None:
    ideal, limit = PROGRAM.ideal_ns, int(0.75 * 2 * PROGRAM.peak_bytes)
    jobs = [Job("stays", PROGRAM, NONE), Job("visits", PROGRAM, NONE, arrives_ns=2 * ideal + 1, iterations=3)]
    done = control(jobs, MACHINE, limit, planner, until_ns=20 * ideal, check_ns=ideal)
    stays, visits = done.timeline.jobs
    assert [one.why for one in done.replanned if one.why != "drift"] == ["arrival", "arrival", "departure"]
    assert done.timeline.peak_bytes <= limit and len(visits.boundaries) == 3
    # Alone it needs no plan; with the visitor it has one, which takes effect at a boundary; then none again.
    assert done.jobs[0].plan.decisions == () and len(stays.switches) >= 2
    assert done.jobs[0].plans[-1].decisions == ()
    assert all(at in stays.boundaries for at, _ in stays.switches)
    assert stays.iterations_ns[0] == ideal == stays.iterations_ns[-1]
    assert len(stays.spans) >= len(stays.boundaries) * len(PROGRAM.kernels)  # nothing is lost
    with pytest.raises(ValueError, match="check_ns"):
        control(jobs, MACHINE, limit, planner, until_ns=ideal, check_ns=0)
