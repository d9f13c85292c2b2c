"""Annealing over the plans of several jobs."""

import pytest

from agents.jobs import Split, engine_of, jobs_of, makespan_ns, unlimited_ns
from agents.planner import Infeasible
from agents.search.joint_annealing import JointAnnealing
from envs.memory_env import small_task
from simulator import simulate, simulate_jobs

PROGRAM, MACHINE = small_task()
SLOWER = PROGRAM.with_durations([3 * kernel.duration_ns for kernel in PROGRAM.kernels])
PROGRAMS = [PROGRAM, SLOWER]
LIMIT = int(0.6 * 2 * PROGRAM.peak_bytes)


def test_it_is_faster_than_its_start_and_fits() -> None:
    start = Split("autoswap_doa")
    begun = makespan_ns(PROGRAMS, start.plan_jobs(PROGRAMS, MACHINE, LIMIT), MACHINE, LIMIT)
    planner = JointAnnealing([start], calls=200)
    plans = planner.plan_jobs(PROGRAMS, MACHINE, LIMIT)
    timeline = simulate_jobs(jobs_of(PROGRAMS, plans), MACHINE, LIMIT)
    assert unlimited_ns(PROGRAMS, MACHINE) <= timeline.end_ns < begun
    assert timeline.peak_bytes <= LIMIT and not timeline.evictions
    # Every job has its own part of the memory, and its plan fits there.
    assert sum(plan.limit for plan in plans) <= LIMIT
    for program, plan in zip(PROGRAMS, plans, strict=True):
        assert simulate(program, plan, MACHINE, plan.limit).required_bytes <= plan.limit
    assert 200 < planner.simulator_calls <= start.simulator_calls + 1 + 200
    assert planner.plan_jobs(PROGRAMS, MACHINE, LIMIT) == plans


def test_the_engine_says_what_the_timeline_says() -> None:
    plans = Split("autoswap_doa").plan_jobs(PROGRAMS, MACHINE, LIMIT)
    score = engine_of(PROGRAMS, MACHINE, LIMIT).score(plans)
    assert score.feasible and score.makespan_ns == makespan_ns(PROGRAMS, plans, MACHINE, LIMIT)
    assert [job.iterations for job in score.jobs] == [18, 6]


def test_no_plans_and_no_sense() -> None:
    with pytest.raises(Infeasible, match="no start"):
        JointAnnealing([Split("autoswap_doa")]).plan_jobs(PROGRAMS, MACHINE, LIMIT // 4)
    # With memory enough there is nothing to improve.
    everything = 2 * PROGRAM.peak_bytes
    plans = JointAnnealing([Split("autoswap_doa")], calls=5).plan_jobs(PROGRAMS, MACHINE, everything)
    assert [plan.decisions for plan in plans] == [(), ()]
    with pytest.raises(ValueError, match="calls"):
        JointAnnealing(calls=0)
    with pytest.raises(ValueError, match="hot"):
        JointAnnealing(hot=1e-5, cold=1e-3)
