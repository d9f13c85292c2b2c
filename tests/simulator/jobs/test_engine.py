"""engine.py is rules.py, compiled; JobsEngine says what the timelines say."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import (
    Engine,
    Job,
    JobsDeadlock,
    Kernel,
    Machine,
    Plan,
    PlanError,
    Program,
    Rerun,
    Swap,
    Tensor,
    simulate,
)
from simulator.compiled.encoding import rows_of
from simulator.jobs import JobsEngine, alone_ns, engine, without_limit
from simulator.jobs.lowering import table_of
from simulator.lowered import Lowered
from simulator.schedule import lower
from tests import tiny
from tests.random_cases import any_case, least_limit
from tests.strategies import jobs_cases, jobs_machines, plans, programs


def test_a_table_is_what_the_schedule_says():
    for seed in range(300):
        program, plan, machine = any_case(seed)[:3]
        lowered = Lowered(lower(program, plan))
        table = table_of(Engine(program, machine, 0), rows_of(plan.decisions), plan.variants)
        schedule = lowered.schedule
        columns = [table.values[table.record[name] :] for name in ("owner", "nbytes", "first", "last")]
        assert tuple(zip(*(c[: len(schedule.blocks)].tolist() for c in columns), strict=True)) == schedule.blocks
        begin, lists = table.record["touched"], table.values.tolist()
        touched = [lists[lists[begin + i] : lists[begin + i + 1]] for i in range(len(schedule.steps))]
        assert touched == [sorted(blocks) for blocks in lowered.touched]
        facts = table.record["start_bytes"], table.record["admission_bytes"], table.least_bytes, table.on_host, table.ns
        right = lowered.start_bytes, lowered.admission_bytes, max(lowered.least_bytes), lowered.on_host
        assert facts == (*right, lowered.begins[-1]), f"seed {seed}"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([((), (0,)), ((), (0,)), ((0,), ())], "it goes on writing tensor 0, and kernel 0 does not run again"),
        ([((), (0,)), ((0,), (1,)), ((0,), (0,)), ((1,), ())], "tensor 0 is not there as it read it"),
    ],
)
def test_a_plan_whose_kernels_cannot_run_again_is_refused(lines, why):
    """As a plan and as rows, which are not checked otherwise."""
    kernels = tuple(Kernel(f"k{i}", "other", "forward", *line, 10) for i, line in enumerate(lines))
    program, plan = Program("p", (Tensor("x", 10), Tensor("y", 10)), kernels), Plan((Rerun(1, len(lines) - 1),))
    match = f"kernel 1 cannot run again before kernel {len(lines) - 1}: {why}"
    for given_plan in (plan, rows_of(plan.decisions)):
        with pytest.raises(PlanError, match=match):
            JobsEngine([program], tiny.MACHINE, 100, iterations=1).score([given_plan])
    with pytest.raises(PlanError, match=match):
        Engine(program, tiny.MACHINE, 100).score(rows_of(plan.decisions))


def test_a_log_of_more_entries_than_expected():
    """More than 4,096 of them."""
    program = Program("one", (Tensor("x", 10),), (Kernel("k", "other", "forward", (), (0,), 10),))
    timeline = engine.simulate_jobs([Job("a", program, Plan(), iterations=3000)], tiny.MACHINE, 100)
    assert timeline.jobs[0].boundaries == tuple(range(10, 30_010, 10))


@given(st.data())
def test_a_score_is_what_the_timeline_says(data):
    several = data.draw(st.lists(programs(8), min_size=1, max_size=3))
    several = [p if p.ideal_ns else p.with_durations([1] * len(p.kernels)) for p in several]
    chosen = [data.draw(plans(p, reruns=True)) for p in several]
    machine, sharing = data.draw(jobs_machines()), data.draw(st.sampled_from(["fifo", "shared"]))
    iterations, until = data.draw(st.sampled_from([(2, None), (None, 300), (3, 200)]))
    jobs = [
        Job(str(j), p, plan, iterations=iterations) for j, (p, plan) in enumerate(zip(several, chosen, strict=True))
    ]
    limit = least_limit(tuple(jobs)) + data.draw(st.integers(0, 100))
    scorer = JobsEngine(several, machine, limit, until, iterations, sharing)
    for given_plans in (chosen, [rows_of(plan.decisions) for plan in chosen]):
        score = scorer.score(given_plans)
        timeline = engine.simulate_jobs(jobs, machine, limit, until, sharing)
        assert (score.peak_bytes, score.evictions) == (timeline.peak_bytes, len(timeline.evictions))
        assert score.feasible == all(job.boundaries for job in timeline.jobs)
        for job, ran in zip(score.jobs, timeline.jobs, strict=True):
            assert job.iterations == len(ran.boundaries)
            assert (job.admitted_ns, job.left_ns) == tuple(
                -1 if t is None else t for t in (ran.admitted_ns, ran.left_ns)
            )
            assert job.mean_ns == ran.mean_ns or (math.isnan(job.mean_ns) and math.isnan(ran.mean_ns))
    assert scorer.calls == 2


def test_what_cannot_run_is_not_feasible():
    """40 bytes of the host are needed, and 90 of memory for f2 alone, which reads 40 and writes 40 beside w."""
    programs = [tiny.PROGRAM, tiny.PROGRAM]
    least = least_limit((Job("a", tiny.PROGRAM, Plan()),))
    assert JobsEngine(programs, tiny.MACHINE, least, iterations=1).score([Plan(), Plan()]).feasible
    assert not JobsEngine(programs, tiny.MACHINE, least - 1, iterations=1).score([Plan(), Plan()]).feasible
    small = replace(tiny.MACHINE, host_bytes=39)
    assert not JobsEngine(programs, small, 300, iterations=1).score([tiny.SWAP_PLAN, Plan()]).feasible
    assert not JobsEngine(programs, small, least, iterations=1).score([Plan(), Plan()]).feasible  # they are stuck
    with pytest.raises(PlanError):
        JobsEngine(programs, small, 300, iterations=1).score([Plan((Swap(1, 2, 3),)), Plan()])
    with pytest.raises(ValueError, match="until_ns or iterations"):
        JobsEngine(programs, small, 300)
    with pytest.raises(ValueError, match="expected 2 shares, got 1"):
        JobsEngine(programs, small, 300, 100, shares=[200])


@given(st.data())
def test_a_score_within_shares_beside_a_tenant_and_over_samples_of_the_times(data):
    case = data.draw(jobs_cases())
    programs, chosen = zip(*(job.entries[0] for job in case.jobs), strict=True)
    shares = [data.draw(st.integers(0, case.limit)) for _ in chosen]
    samples = [[job.durations for job in case.jobs], [()] * len(chosen)]
    scorer = JobsEngine(programs, case.machine, case.limit, 300, 3, case.sharing, shares=shares, tenant=case.tenant)
    other = JobsEngine(programs, case.machine, case.limit, 300, 3, case.sharing)
    for sample, score in zip(samples, scorer.scores(chosen, samples), strict=True):
        several = [
            Job(str(j), program, replace(plan, limit=share), iterations=3, within=True, durations=rows)
            for j, (program, plan, share, rows) in enumerate(zip(programs, chosen, shares, sample, strict=True))
        ]
        assert repr(other.score(chosen, sample, case.tenant, shares)) == repr(score)  # there may be a NaN
        try:
            timeline = engine.simulate_jobs(several, case.machine, case.limit, 300, case.sharing, case.tenant)
        except (JobsDeadlock, PlanError):
            assert not score.feasible
            continue
        assert (score.peak_bytes, score.evictions) == (timeline.peak_bytes, len(timeline.evictions))
        assert [job.left_ns for job in score.jobs] == [-1 if r.left_ns is None else r.left_ns for r in timeline.jobs]


def test_a_plan_that_comes_again_is_lowered_once(monkeypatch):
    """Whatever it says of who made it for what; another program's is another."""
    made = []
    monkeypatch.setattr(engine, "table_of", lambda *plan: made.append(plan) or table_of(*plan))
    program = replace(tiny.PROGRAM)
    for plan in (tiny.SWAP_PLAN, replace(tiny.SWAP_PLAN, limit=150), replace(tiny.SWAP_PLAN, decisions=())):
        engine.simulate_jobs([Job("a", program, plan, iterations=1)] * 2, tiny.MACHINE, 300)
    assert len(made) == 2
    engine.simulate_jobs([Job("a", replace(program), tiny.SWAP_PLAN, iterations=1)], tiny.MACHINE, 300)
    assert len(made) == 3


def test_an_engine_keeps_so_many_plans(monkeypatch):
    monkeypatch.setattr(engine, "KEPT", 1)
    alone = JobsEngine([tiny.PROGRAM], tiny.MACHINE, tiny.LIMIT, iterations=2)
    wanted = [alone.score([plan]) for plan in (tiny.SWAP_PLAN, tiny.RECOMPUTE_PLAN)]
    assert [alone.score([plan]) for plan in (tiny.SWAP_PLAN, tiny.RECOMPUTE_PLAN)] == wanted
    assert [job.mean_ns for score in wanted for job in score.jobs] == [170, 130]


def test_the_plans_of_two_jobs_make_room_for_each_other():
    """Where both recompute, nothing is evicted on demand; without plans something is, and both are slower."""
    two = JobsEngine([tiny.PROGRAM] * 2, tiny.MACHINE, 250, iterations=3)
    planned, unplanned = two.score([tiny.RECOMPUTE_PLAN] * 2), two.score([Plan(), Plan()])
    assert planned.evictions == 0 < unplanned.evictions
    assert all(a.mean_ns < b.mean_ns for a, b in zip(planned.jobs, unplanned.jobs, strict=True))


def test_what_the_time_is_measured_against():
    jobs = [Job("a", tiny.PROGRAM, tiny.SWAP_PLAN, iterations=2), Job("b", tiny.PROGRAM, Plan(), iterations=2)]
    assert alone_ns(jobs[0], tiny.MACHINE, tiny.LIMIT) == 170
    free = without_limit(jobs, tiny.MACHINE)
    assert not free.evictions and free.end_ns == 4 * tiny.PROGRAM.ideal_ns
    assert not any(s.stream != "compute" for job in free.jobs for s in job.spans)
    steps = ((tiny.PROGRAM, tiny.SWAP_PLAN), (tiny.PROGRAM, Plan()))
    several = Job("a", tiny.PROGRAM, Plan(), iterations=2, steps=steps)
    assert alone_ns(several, tiny.MACHINE, tiny.LIMIT) == 170
    assert without_limit([several], tiny.MACHINE).end_ns == 2 * tiny.PROGRAM.ideal_ns


def test_a_job_alone_is_as_fast_as_simulate_says():
    machine = Machine("slow link", 1000, 10**9, 10**9, copy_latency_ns=3)
    limit = lower(tiny.PROGRAM, tiny.SWAP_PLAN).required_bytes
    score = JobsEngine([tiny.PROGRAM], machine, limit, iterations=5).score([tiny.SWAP_PLAN])
    assert score.jobs[0].mean_ns == simulate(tiny.PROGRAM, tiny.SWAP_PLAN, machine, limit).iteration_ns
