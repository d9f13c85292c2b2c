"""Random jobs from a seed. Run as a command, it compares the compiled simulator of several jobs with the reference on
so many cases:

    python -m tests.job_cases 100000 [first seed]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from simulator import Job, JobsDeadlock, JobsTimeline, Machine, OutOfMemory, Plan, PlanError, Program
from simulator.jobs import adapted, engine, reference
from simulator.jobs.lowered import Lowered
from simulator.jobs.nouns import Sharing, Tenant
from simulator.schedule import lower
from tests.random_cases import compare, machine_of, plan_of, program_of


class JobsCase(NamedTuple):
    """What a simulation takes."""

    jobs: tuple[Job, ...]
    machine: Machine
    limit: int
    until_ns: int | None
    sharing: Sharing
    tenant: Tenant = ()


def jobs_machine_of(rng: Random) -> Machine:
    """Like ``machine_of``, with switches that cost and kernels that slow each other down."""
    slower = rng.choice([0.7, 1.0, 1.0, 1.3, 2.5])
    return replace(machine_of(rng), switch_ns=rng.choice([0, 0, 1, 7]), concurrency=slower)


def job_of(rng: Random, name: str) -> Job:
    """It may come late, leave early, change its plan, have kernels that take more or less time or other programs."""
    program = program_of(rng)
    if not program.ideal_ns:
        program = program.with_durations([1] * len(program.kernels))
    plans = [plan_of(rng, program) if rng.random() < 0.7 else Plan() for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    times = sorted(rng.sample(range(600), len(plans) - 1))
    arrives = rng.choice([0, 0, rng.randint(0, 300)])
    iterations = rng.choice([None, rng.randint(1, 4)])
    leaves = arrives + rng.randint(0, 800) if iterations is None or rng.random() < 0.2 else None
    job = Job(name, program, plans[0], arrives, iterations, leaves, tuple(zip(times, plans[1:], strict=True)))
    if rng.random() < 0.3:
        return replace(job, switches=(), steps=steps_of(rng, program, plans[0]))
    rows = rng.choice([0, 0, 1, 2, 3])
    return replace(job, durations=tuple(durations_of(rng, program) for _ in range(rows)))


def steps_of(rng: Random, program: Program, plan: Plan) -> tuple[tuple[Program, Plan], ...]:
    """Draws of a program, each with a plan of its own, what it can take over from the program's, or none."""
    draws = [draw_of(rng, program) for _ in range(rng.randint(1, 4))]
    draws = [p if p.ideal_ns else p.with_durations([1] * len(p.kernels)) for p in (program, *draws)]
    several = [(p, rng.choice([Plan(), plan_of(rng, p), adapted(plan, program, p)])) for p in draws]
    return tuple(rng.sample(several, rng.randint(1, len(several))))


def durations_of(rng: Random, program: Program) -> tuple[int, ...]:
    """Other times of a program's kernels, at least one above 0."""
    return (*(rng.randint(0, 40) for _ in program.kernels[1:]), rng.randint(1, 40))


def draw_of(rng: Random, program: Program) -> Program:
    """The program without some of its kernels and what only they use, its tensors in another order."""
    kept = [k for k in program.kernels if rng.random() < 0.8]
    if len(kept) < 2:
        return program
    written = {t for t, tensor in enumerate(program.tensors) if tensor.persistent}
    kernels = []
    for kernel in kept:
        kernels.append(replace(kernel, inputs=tuple(t for t in kernel.inputs if t in written)))
        written |= set(kernel.outputs)
    used = list({t for kernel in kernels for t in kernel.accesses})
    rng.shuffle(used)
    at = {t: i for i, t in enumerate(used)}
    moved = tuple(
        replace(k, inputs=tuple(at[t] for t in k.inputs), outputs=tuple(at[t] for t in k.outputs)) for k in kernels
    )
    return Program("drawn", tuple(program.tensors[t] for t in used), moved)


def jobs_case(seed: int) -> JobsCase:
    """The case of a seed: from one job to four, with more or less memory than they need."""
    rng = Random(seed)
    jobs = tuple(job_of(rng, f"j{i}") for i in range(rng.choice([1, 2, 2, 2, 3, 3, 4])))
    machine = jobs_machine_of(rng)
    limit = least_limit(jobs) + rng.choice([0, 0, rng.randint(0, 40), rng.randint(0, 300)])
    if rng.random() < 0.5:  # some keep within limits, which are large or small
        jobs = tuple(limited(rng, job, [0, limit, limit // len(jobs), rng.randint(0, limit)]) for job in jobs)
    until, sharing = rng.choice([None, None, rng.randint(0, 700)]), rng.choice(["fifo", "shared"])
    return JobsCase(jobs, machine, limit, until, sharing, tenant_of(rng))


def limited(rng: Random, job: Job, limits: Sequence[int]) -> Job:
    """Its plans are made for these limits; perhaps it keeps within them."""
    return replace(
        job, within=rng.random() < 0.7, plan=replace(job.plan, limit=rng.choice(limits)),
        switches=tuple((at, replace(plan, limit=rng.choice(limits))) for at, plan in job.switches),
        steps=tuple((program, replace(plan, limit=rng.choice(limits))) for program, plan in job.steps),
    )  # fmt: skip


def tenant_of(rng: Random) -> Tenant:
    """It takes more and less of the link, or nothing."""
    times = sorted(rng.sample(range(600), rng.choice([0, 0, 1, 3, 10])))
    return tuple((at_ns, rng.choice([0.0, 0.25, 0.9, rng.random()])) for at_ns in times)


def least_limit(jobs: tuple[Job, ...]) -> int:
    """The smallest at which each of the jobs could run alone, evicting on demand."""
    most = 0
    for job in jobs:
        for program, plan in job.entries:
            lowered = Lowered(lower(program, plan))
            most = max(most, lowered.admission_bytes, *lowered.least_bytes)
    return most


def jobs_difference(case: JobsCase) -> str | None:
    """How the compiled simulator differs from the reference in a case; None where it does not."""

    def result(run: Callable[..., JobsTimeline]) -> object:
        try:
            return run(*case)
        except (OutOfMemory, PlanError, JobsDeadlock) as error:
            return str(error)

    right, ours = result(reference.simulate_jobs), result(engine.simulate_jobs)
    if right == ours:
        return None
    if not isinstance(right, JobsTimeline) or not isinstance(ours, JobsTimeline):
        return f"simulate_jobs gives\n{ours}\nnot\n{right}"
    names = [name for name in right.__dataclass_fields__ if getattr(right, name) != getattr(ours, name)]
    return f"simulate_jobs gives other {names}:\n{ours}\nnot\n{right}"


if __name__ == "__main__":
    compare(jobs_case, jobs_difference)
