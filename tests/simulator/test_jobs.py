"""Tests several jobs: hand-computed cases, one job alone, properties, and the formats of JobsTimeline."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given, strategies as st

import simulator
from simulator import Job, JobsDeadlock, Machine, OutOfMemory, Plan, PlanError, Program, simulate, simulate_jobs
from simulator.job import Eviction, Stall
from simulator.schedule import lower
from simulator.timeline import Span
from tests import tiny
from tests.oracle.steps import Steps
from tests.programs import activations, straight
from tests.random_cases import jobs_case
from tests.strategies import jobs_machines, networks, plans, programs, with_algorithms

MACHINE = Machine("a byte per ns", 1000, 10**9, 10**9, d2h_latency_ns=0, h2d_latency_ns=0)


GROWS = straight(activations(40, 30), ((), (0,), 10), ((0,), (1,), 10))


def one_kernel(duration_ns: int, nbytes: int = 10) -> Program:
    return straight(activations(nbytes), ((), (0,), duration_ns))


def once(*programs: Program) -> list[Job]:
    """Returns jobs a, b, ... without plans, for one iteration each."""
    return [Job(name, program, Plan(), iterations=1) for name, program in zip("abc", programs, strict=False)]


# ------------------------------------------------------------------------------------- memory, on demand


def test_a_deadlock_and_its_eviction():
    """Both have 40 bytes at 20 and request 30. Job a has waited longer: b's x is swapped out [20, 60), in [70, 110)."""
    timeline = simulate_jobs(once(GROWS, GROWS), MACHINE, 100)
    a, b = timeline.jobs
    assert timeline.evictions == (Eviction(20, 1, 0, 0, 40, 0),)
    assert (a.boundaries, b.boundaries) == ((70,), (120,))
    copies = [s for s in b.spans if s.stream != "compute"]
    assert copies == [Span(20, 60, "d2h", "swap_out", 0), Span(70, 110, "h2d", "swap_in", 0)]
    assert a.stalls == (Stall(10, 60, "memory"),)
    assert b.stalls == (Stall(0, 10, "compute"), Stall(20, 70, "memory"), Stall(70, 110, "data"))
    assert timeline.memory == ((0, 0), (0, 40), (10, 80), (60, 40), (60, 70), (70, 0), (70, 40), (110, 70), (120, 0))
    assert timeline.copies_ns("d2h") == timeline.copies_ns("h2d") == 40


def test_a_full_host_is_reported_as_a_deadlock():
    jobs = once(GROWS, GROWS)
    with pytest.raises(JobsDeadlock, match=r"at 20 ns.*'a' asks for 30 bytes for kernel 1; 'b' asks for 30 bytes for"):
        simulate_jobs(jobs, replace(MACHINE, host_bytes=39), 100)
    simulate_jobs(jobs, replace(MACHINE, host_bytes=40), 100)


def test_a_step_that_never_fits_is_refused_by_name():
    with pytest.raises(OutOfMemory, match="job 'a': kernel 1 needs 30 bytes beside 40 in use, over the limit of 69"):
        simulate_jobs(once(GROWS), MACHINE, 69)
    simulate_jobs(once(GROWS), MACHINE, 70)


# ------------------------------------------------------------------------------------ coming and leaving


def test_what_is_not_a_simulation():
    with pytest.raises(ValueError, match="job 'a' has no end"):
        simulate_jobs([Job("a", one_kernel(10), Plan())], MACHINE, 100)
    with pytest.raises(ValueError, match="job 'a' takes no time"):
        simulate_jobs([Job("a", one_kernel(0), Plan(), leaves_ns=10)], MACHINE, 100)
    with pytest.raises(PlanError, match="job 'a': its plans have 40 bytes on the host"):
        simulate_jobs([Job("a", tiny.PROGRAM, tiny.SWAP_PLAN, iterations=1)], replace(MACHINE, host_bytes=39), 150)
    lasting = replace(Job("a", one_kernel(10), Plan(), leaves_ns=10), durations=((0,), (0,)))
    with pytest.raises(ValueError, match="job 'a' takes no time"):
        simulate_jobs([lasting], MACHINE, 100)
    for wrong in ({"durations": ((1,) * 7,)}, {"durations": ((1,) * 7 + (-1,),)}):
        with pytest.raises(ValueError, match=r"job 'a': durations\[0\]: expected 8 integers"):
            Job("a", tiny.PROGRAM, Plan(), **wrong)
    for wrong in ({"arrives_ns": -1}, {"iterations": 0}, {"switches": ((5, Plan()), (5, Plan()))}):
        with pytest.raises(ValueError, match="job 'a'"):
            Job("a", tiny.PROGRAM, Plan(), **wrong)
    for cost in ("issue_ns", "wait_ns", "event_ns", "copy_contention"):
        with pytest.raises(ValueError, match=rf"^machine\.{cost} is "):
            simulate_jobs(once(GROWS), replace(MACHINE, **{cost: 0.25 if cost == "copy_contention" else 7}), 100)
    none = simulate_jobs([], MACHINE, 100)
    assert (none.end_ns, none.peak_bytes, none.jobs) == (0, 0, ())


def test_a_switch_to_the_same_decisions_changes_nothing():
    """The result does not depend on copies in flight at the boundary or on the order of the decisions."""
    for seed in range(30):
        case = jobs_case(seed)
        machine = replace(case.machine, host_bytes=10**6)  # two plans in succession reserve more host memory
        jobs = tuple(replace(job, switches=()) for job in case.jobs)
        again = tuple(
            replace(job, switches=tuple((at, replace(job.plan, decisions=job.plan.decisions[::-1])) for at in (30, 90)))
            for job in jobs
        )
        timeline, other = (simulate_jobs(several, machine, *case[2:]) for several in (jobs, again))
        assert replace(other, jobs=tuple(replace(job, switches=()) for job in other.jobs)) == timeline, f"seed {seed}"


def test_the_example_of_the_readme_runs():
    section = Path(simulator.__file__).with_name("README.md").read_text().partition("## Several jobs\n")[2]
    lines = section.partition("\nJobs share")[0]
    names = dict(resnet=tiny.PROGRAM, vgg=GROWS, plan_a=tiny.SWAP_PLAN, plan_b=Plan())
    exec(dedent(lines), names)
    assert [len(job.boundaries) for job in names["timeline"].jobs] == [10, 5]


# ------------------------------------------------------------------------------------------ what always holds


@given(st.data())
def test_a_single_job_equals_simulate(data):
    program, variants = data.draw((programs() | networks()).flatmap(with_algorithms))
    plan = replace(data.draw(plans(program, reruns=True)), variants=variants)
    machine = data.draw(jobs_machines())
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    n = data.draw(st.integers(1, 4))
    sharing = data.draw(st.sampled_from(["fifo", "shared"]))
    alone = simulate(program, plan, machine, limit, n + 1)
    timeline = simulate_jobs([Job("a", program, plan, iterations=n + 1)], machine, limit, sharing=sharing)
    job = timeline.jobs[0]
    assert timeline.evictions == ()
    assert job.boundaries == alone.boundaries[: n + 1]
    assert job.events_until == alone.events_until[: n + 2]
    assert job.events[: job.events_until[-1]] == alone.events[: job.events_until[-1]]
    # Copies in flight at the end of a simulation are cut.
    until, end = alone.boundaries[n - 1 : n + 1]
    assert [(s[:1], s[2:]) for s in job.spans if s.start_ns < until] == [
        (s[:1], s[2:]) for s in alone.spans if s.start_ns < until
    ]
    assert [s for s in job.spans if s.end_ns < end] == [s for s in alone.spans if s.end_ns < end]


def test_every_job_ends_and_no_rule_is_broken_on_the_way():
    """This holds with any limit if the host has enough memory."""
    for seed in range(60):
        case = jobs_case(seed)
        machine = replace(case.machine, host_bytes=10**6)
        timeline = simulate_jobs(case.jobs, machine, *case[2:])
        assert all(0 <= used <= case.limit for _, used in timeline.memory) and timeline.memory[-1][1] == 0
        spans = sorted((s for ran in timeline.jobs for s in ran.spans), key=lambda s: (s.start_ns, s.end_ns))
        engines = [["d2h", "h2d"]] if machine.copy_engines == 1 else [["d2h"], ["h2d"]]
        for streams in [*engines, ["compute"]] if case.sharing == "fifo" else engines:
            assert all(a.end_ns <= b.start_ns for a, b in pairwise(s for s in spans if s.stream in streams))
        for job, ran in zip(case.jobs, timeline.jobs, strict=True):
            assert (ran.admitted_ns is None) == (ran.left_ns is None) == (not ran.spans), f"seed {seed}"
            if job.iterations is not None and job.leaves_ns is None and case.until_ns is None:
                assert len(ran.boundaries) == job.iterations, f"seed {seed}"
            kernels = [s.index for s in ran.spans if s.kind == "kernel"]
            assert kernels == len(ran.boundaries) * [*range(len(job.program.kernels))], f"seed {seed}"
            if len(job.plans) == 1 and kernels:  # every kernel reads the right content
                compute = [s for s in ran.spans if s.stream == "compute" and s.kind != "switch"]
                assert Steps(compute, job.program.with_variants(job.plan.variants), job.plan).found == []


# ----------------------------------------------------------------------------------------------- JSON, Perfetto

JOBS = (
    Job("a", tiny.PROGRAM, tiny.SWAP_PLAN, iterations=2),
    Job("b", tiny.PROGRAM, Plan(), 50, iterations=2, switches=((61, tiny.RECOMPUTE_PLAN),)),
    Job("late", tiny.PROGRAM, Plan(), 10**6, leaves_ns=20),
)
TIMELINE = simulate_jobs(JOBS, tiny.MACHINE, 200)


def test_perfetto_has_a_process_a_job():
    trace = TIMELINE.perfetto(JOBS)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {1: "a", 2: "b", 3: "late", 4: "all jobs"}
    pieces = [e for e in trace if e["ph"] == "X"]
    assert len(pieces) == sum(len(j.spans) + len(j.stalls) for j in TIMELINE.jobs)
    first = next(e for e in pieces if e["cat"] == "swap_out" and e["pid"] == 1)
    assert first["name"] == "swap_out a1" and first["dur"] == 0.04
    marks = [(e["pid"], e["name"], e["ts"]) for e in trace if e["ph"] == "i"]
    assert marks == [(2, "plan 1", TIMELINE.jobs[1].boundaries[0] / 1000)]
    memory = [e["args"]["bytes"] for e in trace if e["ph"] == "C" and e["pid"] == 4]
    assert max(memory) == TIMELINE.peak_bytes <= 200 and memory[-1] == 0
