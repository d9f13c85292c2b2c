"""Random jobs for property tests."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from simulator import Job, Machine, Plan
from tests.job_cases import JobsCase, least_limit, limited, steps_of
from tests.strategies import machines, networks, plans, programs


@st.composite
def jobs(draw: st.DrawFn, name: str) -> Job:
    """It may come late, leave early, change its plan, have kernels that take more or less time or other programs."""
    program = draw(programs(8) | networks())
    if not program.ideal_ns:
        program = program.with_durations([1] * len(program.kernels))
    first, *others = draw(st.lists(plans(program, reruns=True) | st.just(Plan()), min_size=1, max_size=3))
    times = sorted(draw(st.lists(st.integers(0, 400), min_size=len(others), max_size=len(others), unique=True)))
    arrives, leaves = draw(st.integers(0, 200)), draw(st.none() | st.integers(0, 600))
    iterations = draw(st.integers(1, 4)) if leaves is None else draw(st.none() | st.integers(1, 4))
    if len(program.kernels) > 1 and draw(st.booleans()):
        steps = steps_of(Random(draw(st.integers(0, 10**6))), program, first)
        return Job(name, program, first, arrives, iterations, leaves, steps=steps)
    row = st.lists(st.integers(0, 40), min_size=len(program.kernels), max_size=len(program.kernels)).filter(any)
    rows = draw(st.lists(row.map(tuple), max_size=3))
    switches = tuple(zip(times, others, strict=True))
    return Job(name, program, first, arrives, iterations, leaves, switches, durations=tuple(rows))


@st.composite
def jobs_machines(draw: st.DrawFn) -> Machine:
    """Machines on which switches cost, and kernels slow each other down."""
    return replace(draw(machines()), switch_ns=draw(st.sampled_from([0, 0, 1, 7])),
                   concurrency=draw(st.sampled_from([0.7, 1.0, 1.3, 2.5])))  # fmt: skip


@st.composite
def jobs_cases(draw: st.DrawFn, most: int = 3) -> JobsCase:
    """From one job to so many, with more or less memory than they need."""
    several = tuple(draw(jobs(f"j{i}")) for i in range(draw(st.integers(1, most))))
    limit = least_limit(several) + draw(st.integers(0, 60) | st.integers(0, 300))
    if draw(st.booleans()):
        rng = Random(draw(st.integers(0, 10**6)))
        several = tuple(limited(rng, job, [0, limit, limit // len(several), rng.randint(0, limit)]) for job in several)
    until = draw(st.none() | st.integers(0, 500))
    times = sorted(draw(st.sets(st.integers(0, 400), max_size=3)))
    tenant = tuple((at_ns, draw(st.floats(0, 0.99))) for at_ns in times)
    return JobsCase(several, draw(jobs_machines()), limit, until, draw(st.sampled_from(["fifo", "shared"])), tenant)
