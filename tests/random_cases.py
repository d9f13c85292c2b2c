"""Random cases from a seed, of one program and of several jobs.

The command compares reference, compiled simulator and validator on many cases of one program, and compares a digest of
the results of each block with ``tests/data/random_cases.json``. For several jobs, the digests are of the reference,
their only simulator.

    python -m tests.random_cases 100000 [--seed N|random] [--write]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from simulator import Engine, Machine, rules, simulate, simulate_jobs
from simulator.compiled.engine import NEVER, cores, rows_of
from simulator.decisions import Decision, Recompute, Rerun, Swap
from simulator.job import Job, JobsDeadlock, Sharing
from simulator.plan import Plan, PlanError
from simulator.program import Kernel, Program, Tensor
from simulator.schedule import OutOfMemory, lower
from simulator.timeline import Timeline
from tests import oracle

# cases per digest
BLOCK = 1000
JOBS = 100
DIGESTS = Path(__file__).parent / "data" / "random_cases.json"
REFUSALS = (OutOfMemory, PlanError, JobsDeadlock)


class Case(NamedTuple):
    """Arguments of a simulation."""

    program: Program
    plan: Plan
    machine: Machine
    limit: int
    limit_until: int | None = None
    iterations: int = 2


class JobsCase(NamedTuple):
    """Arguments of a simulation of several jobs."""

    jobs: tuple[Job, ...]
    machine: Machine
    limit: int
    until_ns: int | None
    sharing: Sharing


# --------------------------------------------------------------------------------------- one program


def program_of(rng: Random, max_kernels: int = 14) -> Program:
    """Returns a random program: persistent tensors, in-place and multi-output kernels, workspaces; or a network."""
    tensors = [Tensor(f"p{i}", rng.randint(0, 40), "parameter", True) for i in range(rng.randint(0, 3))]
    persistent = list(range(len(tensors)))
    born = list(persistent)
    kernels: list[Kernel] = []
    n = rng.randint(2, max_kernels)
    backward = rng.random() < 0.6
    for k in range(n):
        recent = born[-8:] + persistent
        inputs = rng.sample(recent, rng.randint(0, min(3, len(recent)))) if recent else []
        if backward and k > n - 1 - k and kernels[n - 1 - k].outputs:
            inputs.append(rng.choice(kernels[n - 1 - k].outputs))
        outputs = []
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            tensors.append(Tensor(f"t{len(tensors)}", rng.randint(0, 40)))
            outputs.append(len(tensors) - 1)
        if recent and rng.random() < 0.2:
            outputs.append(rng.choice(recent))  # in place, with or without reading
            if rng.random() < 0.5:
                inputs.append(outputs[-1])
        born += [t for t in outputs if t not in born]
        kernels.append(
            Kernel(
                f"k{k}",
                "other",
                "forward",
                tuple(dict.fromkeys(inputs)),
                tuple(dict.fromkeys(outputs)),
                rng.randint(0, 30),
                workspace=rng.choice([0, 0, 5, 20]),
                recomputable=rng.random() < 0.9,
            )
        )
    return Program("random", tuple(tensors), tuple(kernels))


def plan_of(rng: Random, program: Program, reruns: bool = True) -> Plan:
    """Returns a random valid plan: early copies, prefetches, synchronous or wrapping swaps, recomputations, reruns."""
    n = len(program.kernels)
    one_by_one = reruns and rng.random() < 0.4
    decisions: list[Decision] = []
    for gap in program.gaps():
        kind = rng.choice(["none", "swap", "swap", "none" if one_by_one else "recompute"])
        if kind == "none":
            continue
        span = (gap.before - gap.after - 1) % n
        after = (gap.after + (rng.randint(0, span) if rng.random() < 0.5 else 0)) % n
        late = (gap.before - after - 1) % n
        decision: Decision
        if kind == "swap":
            prefetch = (after + rng.randint(0, late)) % n if rng.random() < 0.5 else None
            copy = (after - rng.randint(0, n - 1)) % n if rng.random() < 0.5 else None
            decision = Swap(gap.tensor, after, gap.before, prefetch, rng.random() < 0.3, copy)
        else:
            at = after + 1 + rng.randint(0, max(late, 0)) if rng.random() < 0.5 else None
            decision = Recompute(gap.tensor, after, gap.before, rng.random() < 0.5, at)
        decisions = added(program, decisions, decision)
    for _ in range(rng.randint(0, 2 * n) if one_by_one else 0):
        before = rng.randrange(1, n)
        decisions = added(program, decisions, Rerun(rng.randrange(before), before))
    return Plan(tuple(decisions), program.fingerprint)


def added(program: Program, decisions: list[Decision], one: Decision) -> list[Decision]:
    """Returns the decisions with one more, if the plan then still fits the program."""
    more = [*decisions, one]
    try:
        Plan(tuple(more)).check(program)
        lower(program, Plan(tuple(more)))
    except PlanError:
        return decisions
    return more


def machine_of(rng: Random) -> Machine:
    """Returns a random machine whose copies are about as slow as the kernels of ``program_of``."""
    rates = [500_000_000, 1_000_000_000, 3_000_000_000]
    h2d, d2h = (rng.choice([0, 130_000_000, 400_000_000, 700_000_001, 2_900_000_000]) for _ in range(2))
    into = rng.choice(rates)
    out = rng.choice(rates)
    latency_ns = rng.randint(0, 3)
    engines = rng.randint(1, 2)
    return Machine(
        "random",
        10**6,
        into,
        out,
        latency_ns,
        latency_ns,
        engines,
        host_bytes=rng.choice([10**6, 10**6, rng.randint(0, 150)]),
        duplex_h2d_bytes_per_s=h2d,
        duplex_d2h_bytes_per_s=d2h,
    )


def case(seed: int) -> Case:
    """Returns the case of a seed."""
    rng = Random(seed)
    program = program_of(rng)
    plan = plan_of(rng, program)
    machine = machine_of(rng)
    limit = lower(program, plan).required_bytes + rng.randint(-1, 60)
    until = rng.choice([None, None, None, 0, len(program.kernels) // 2])
    return Case(program, plan, machine, limit, until, rng.randint(1, 5))


def contending(rng: Random, case: Case) -> Case:
    """Returns the case with kernels that copies slow down, and with costs of the host."""
    kernels = tuple(replace(k, bytes=rng.choice([0, 7, 40, 1000])) for k in case.program.kernels)
    program = replace(case.program, kernels=kernels)
    machine = replace(
        case.machine,
        memory_bytes_per_s=3 * 10**9,
        copy_contention=rng.choice([0.02, 0.3, 0.499]),
        wait_ns=rng.choice([0, 7]),
        issue_ns=rng.choice([0, 0, 3, 9, 30]),
        event_ns=rng.choice([0, 2]),
        queue_depth=rng.choice([1, 2, 5, 1024]),
        h2d_latency_ns=case.machine.h2d_latency_ns + rng.choice([0, 2]),
    )
    plan = replace(case.plan, fingerprint=program.fingerprint)
    return case._replace(program=program, machine=machine, plan=plan)


def with_algorithms(rng: Random, program: Program) -> tuple[Program, tuple[tuple[int, int], ...]]:
    """Returns the program with several algorithms for some of its kernels, and a plan's selection of them."""
    kernels = []
    chosen = []
    for k, kernel in enumerate(program.kernels):
        variants = tuple((rng.randint(0, 30), rng.randint(0, 30)) for _ in range(rng.randint(0, 3)))
        kernels.append(replace(kernel, variants=variants))
        if variants and rng.random() < 0.5:
            chosen.append((k, rng.randrange(len(variants))))
    return replace(program, kernels=tuple(kernels)), tuple(chosen)


def any_case(seed: int) -> Case:
    """Returns the case of a seed; one in three with copy contention, one in five with several algorithms."""
    one = case(seed)
    if seed % 5 == 0:
        rng = Random(~seed)
        program, variants = with_algorithms(rng, one.program)
        plan = replace(one.plan, fingerprint=program.fingerprint, variants=variants)
        limit = lower(program, plan).required_bytes + rng.randint(-1, 60)
        one = one._replace(program=program, plan=plan, limit=limit)
    return contending(Random(-seed), one) if seed % 3 == 0 else one


def compiled(case: Case) -> tuple[Engine, Any, Any]:
    """Returns the compiled simulator's engine, its timeline or error, and its score."""
    engine = Engine(case.program, case.machine, case.limit, case.iterations).with_variants(case.plan.variants)
    score = engine.score(rows_of(case.plan.decisions), case.limit_until)
    return engine, _result(simulate, *_arguments(case)), score


def difference(case: Case, results: Any = None) -> str | None:
    """Returns how the compiled simulator differs from the reference, or findings of the validator; None: equal.

    Args:
        case: the case.
        results: those of ``compiled``, if it has run.
    """
    right = _result(rules.simulate, *_arguments(case))
    engine, ours, score = results or compiled(case)
    if right != ours:
        return f"simulate gives\n{ours}\nnot\n{right}"
    program, plan, machine, limit, until, _ = case
    rows = rows_of(plan.decisions)
    schedule = lower(program, plan)
    planned = tuple(engine.residency(rows).tolist())
    if planned != schedule.residency:
        return f"residency gives {planned}, not {schedule.residency}"
    if engine.on_host(rows) != max(schedule.on_host):
        return "on_host differs"
    if isinstance(right, str):
        return f"score gives {score}, not {right}" if score.feasible else None
    assert isinstance(right, Timeline)
    ns = right.iteration_ns if right.period else NEVER
    wanted = (right.period > 0, ns, right.required_bytes, right.peak_bytes, right.period)
    if score != wanted:
        return f"score gives {score}, not {wanted}"
    if until in (None, 0):
        found = oracle.violations(right, program, plan, machine, limit if until is None else None)
        return f"the validator finds {found}" if found else None
    return None


def _arguments(case: Case) -> tuple[Any, ...]:
    return (*case[:4], case.iterations, case.limit_until)


def _result(run: Callable[..., Any], *case: Any) -> Any:
    """Returns the result of a simulation, or its error."""
    try:
        return run(*case)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------------------------ several jobs


def jobs_machine_of(rng: Random) -> Machine:
    """Returns a machine as ``machine_of`` does, with switch costs and concurrent kernels that slow each other down."""
    slower = rng.choice([0.7, 1.0, 1.0, 1.3, 2.5])
    return replace(machine_of(rng), switch_ns=rng.choice([0, 0, 1, 7]), concurrency=slower)


def job_of(rng: Random, name: str, program: Program) -> Job:
    """Returns a random job that may arrive late, leave early, change its plan, and have varying durations."""
    if not program.ideal_ns:
        program = program.with_durations([1] * len(program.kernels))
    plans = [plan_of(rng, program) if rng.random() < 0.7 else Plan() for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    times = sorted(rng.sample(range(600), len(plans) - 1))
    arrives = rng.choice([0, 0, rng.randint(0, 300)])
    iterations = rng.choice([None, rng.randint(1, 4)])
    leaves = arrives + rng.randint(0, 800) if iterations is None or rng.random() < 0.2 else None
    job = Job(name, program, plans[0], arrives, iterations, leaves, tuple(zip(times, plans[1:], strict=True)))
    rows = [
        (*(rng.randint(0, 40) for _ in program.kernels[1:]), rng.randint(1, 40))
        for _ in range(rng.choice([0, 0, 1, 2, 3]))
    ]
    return replace(job, durations=tuple(rows))


def limited(rng: Random, job: Job, limits: Sequence[int]) -> Job:
    """Returns the job with plans made for these limits; the job may keep within them."""
    return replace(
        job,
        within_limit=rng.random() < 0.7,
        plan=replace(job.plan, limit=rng.choice(limits)),
        switches=tuple((at, replace(plan, limit=rng.choice(limits))) for at, plan in job.switches),
    )


def jobs_case(seed: int) -> JobsCase:
    """Returns the case of a seed: jobs with more or less memory than each needs alone, evicting on demand."""
    rng = Random(seed)
    jobs = tuple(job_of(rng, f"j{i}", program_of(rng)) for i in range(rng.choice([1, 2, 2, 2, 3, 3, 4])))
    machine = jobs_machine_of(rng)
    lowered = [lower(job.program, plan) for job in jobs for plan in job.plans]
    limit = max(max(one.admission_bytes, *one.least_bytes) for one in lowered)
    limit += rng.choice([0, 0, rng.randint(0, 40), rng.randint(0, 300)])
    if rng.random() < 0.5:  # some jobs keep within large or small limits
        jobs = tuple(limited(rng, job, [0, limit, limit // len(jobs), rng.randint(0, limit)]) for job in jobs)
    until = rng.choice([None, None, rng.randint(0, 700)])
    sharing = rng.choice(["fifo", "shared"])
    return JobsCase(jobs, machine, limit, until, sharing)


# ------------------------------------------------------------------------------------------ digests


def _plain(result: Any) -> Any:
    """Returns a timeline as tuples, because field names are not part of a digest; of an error its class and numbers."""
    if isinstance(result, str):
        return re.findall(r"^\w+|\d+", result)
    if isinstance(result, tuple):
        return tuple(_plain(x) for x in result)
    if hasattr(result, "__dataclass_fields__"):
        return tuple(_plain(getattr(result, field.name)) for field in fields(result))
    return result


def digest(results: Iterable[Any]) -> str:
    """Returns the digest of simulation results: times, peaks, feasibility, spans, blocks."""
    found = sha256()
    for one in results:
        found.update(repr(_plain(one)).encode())
    return found.hexdigest()[:16]


def jobs_digest() -> str:
    """Returns the digest of the results of all cases of several jobs."""
    return digest(_result(simulate_jobs, *jobs_case(seed)) for seed in range(JOBS))


def checked(seeds: range) -> tuple[str, str]:
    """Returns the first difference ("": none), and the digest of the results."""
    results = []
    for seed in seeds:
        one = any_case(seed)
        found = compiled(one)
        if wrong := difference(one, found):
            return f"seed {seed}: {one}\n{wrong}", ""
        results.append(found[1:])
    return "", digest(results)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", type=int)
    parser.add_argument("--seed", default="0", help="seed of the first case, or 'random'")
    parser.add_argument("--write", action="store_true", help="store the new digests as expected ones")
    given = parser.parse_args()
    start = secrets.randbelow(2**40) if given.seed == "random" else int(given.seed)
    every = json.loads(DIGESTS.read_text())
    known = every["programs"]
    changed = []
    end = start + given.cases
    blocks = [range(first, min(first + BLOCK, end)) for first in range(start, end, BLOCK)]
    with multiprocessing.get_context("spawn").Pool(cores()) as pool:
        for seeds, (wrong, now) in zip(blocks, pool.imap(checked, blocks), strict=True):
            if wrong:
                sys.exit(wrong)
            if len(seeds) < BLOCK or seeds[0] % BLOCK:
                print(f"{seeds[0]} to {seeds[-1]}: equal", flush=True)
                continue
            block = seeds[0] // BLOCK
            right = "new" if block >= len(known) else "as it was" if known[block] == now else f"it was {known[block]}"
            print(f"{seeds[0]} to {seeds[-1]}: equal, {now}: {right}", flush=True)
            changed += [str(block)] if right.startswith("it was") else []
            known[block : block + 1] = [now]
    if given.write:
        every["jobs"] = jobs_digest()
        DIGESTS.write_text(json.dumps(every, indent=1) + "\n")
    elif changed:
        sys.exit(f"the results of these blocks have changed: {', '.join(changed)}; --write accepts them")


if __name__ == "__main__":
    main()
