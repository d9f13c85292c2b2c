"""Random programs, plans and machines from a seed, thousands a second: ``strategies`` draws the same, and shrinks it.

Run as a command, it compares the compiled simulator with the reference on so many cases:

    python -m tests.random_cases 100000 [first seed]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from simulator import Decision, Kernel, Machine, Plan, Program, Recompute, Rerun, Swap, Tensor, Timeline
from simulator.plan import PlanError
from simulator.schedule import lower


class Case(NamedTuple):
    """What a simulation takes."""

    program: Program
    plan: Plan
    machine: Machine
    limit: int
    limit_until: int | None
    iterations: int


def program_of(rng: Random) -> Program:
    """Persistent tensors, in-place and multi-output kernels, workspaces and markers; some share a shape with networks:
    what the first half writes, the second half reads again, the other way round."""
    tensors = [Tensor(f"p{i}", rng.randint(0, 40), "parameter", True) for i in range(rng.randint(0, 3))]
    persistent = list(range(len(tensors)))
    born = list(persistent)
    kernels: list[Kernel] = []
    n = rng.randint(2, 14)
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
        kernels.append(Kernel(
            f"k{k}", "other", "forward", tuple(dict.fromkeys(inputs)), tuple(dict.fromkeys(outputs)),
            rng.randint(0, 30), workspace=rng.choice([0, 0, 5, 20]), recomputable=rng.random() < 0.9,
        ))  # fmt: skip
    return Program("random", tuple(tensors), tuple(kernels))


def plan_of(rng: Random, program: Program, new: bool = True) -> Plan:
    """A plan that fits; ``new``: with early copies, early recomputation and kernels that run again."""
    n = len(program.kernels)
    one_by_one = new and rng.random() < 0.4
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
            copy = (after - rng.randint(0, n - 1)) % n if new and rng.random() < 0.5 else None
            decision = Swap(gap.tensor, after, gap.before, prefetch, rng.random() < 0.3, copy)
        else:
            at = after + 1 + rng.randint(0, max(late, 0)) if new and rng.random() < 0.5 else None
            decision = Recompute(gap.tensor, after, gap.before, rng.random() < 0.5, at)
        decisions = added(program, decisions, decision)
    for _ in range(rng.randint(0, 2 * n) if one_by_one else 0):
        before = rng.randrange(1, n)
        decisions = added(program, decisions, Rerun(rng.randrange(before), before))
    return Plan(tuple(decisions), program.fingerprint)


def added(program: Program, decisions: list[Decision], one: Decision) -> list[Decision]:
    """With this decision, if the plan then fits the program still."""
    more = [*decisions, one]
    try:
        Plan(tuple(more)).check(program)
        lower(program, Plan(tuple(more)))
    except PlanError:
        return decisions
    return more


def machine_of(rng: Random, new: bool = True) -> Machine:
    """Copies are about as slow as the kernels of ``program_of``."""
    rates = [500_000_000, 1_000_000_000, 3_000_000_000]
    h2d, d2h = (rng.choice([0, 130_000_000, 400_000_000, 700_000_001, 2_900_000_000]) if new else 0 for _ in range(2))
    return Machine("random", 10**6, rng.choice(rates), rng.choice(rates), rng.randint(0, 3), rng.randint(1, 2),
                   host_bytes=rng.choice([10**6, 10**6, rng.randint(0, 150)]), duplex_h2d_bytes_per_s=h2d,
                   duplex_d2h_bytes_per_s=d2h)  # fmt: skip


def case(seed: int) -> Case:
    """The case of a seed."""
    rng = Random(seed)
    program = program_of(rng)
    plan, machine = plan_of(rng, program), machine_of(rng)
    limit = lower(program, plan).required_bytes + rng.randint(-1, 60)
    until = rng.choice([None, None, None, 0, len(program.kernels) // 2])
    return Case(program, plan, machine, limit, until, rng.randint(1, 5))


def contending(rng: Random, case: Case) -> Case:
    """The case with kernels that move bytes, from which copies take memory bandwidth, and with costs of the host."""
    kernels = tuple(replace(k, bytes=rng.choice([0, 7, 40, 1000])) for k in case.program.kernels)
    program = replace(case.program, kernels=kernels)
    machine = replace(
        case.machine, memory_bytes_per_s=3 * 10**9, copy_contention=rng.choice([0.02, 0.3, 0.499]),
        wait_ns=rng.choice([0, 7]), issue_ns=rng.choice([0, 0, 9]),
    )  # fmt: skip
    plan = replace(case.plan, fingerprint=program.fingerprint)
    return case._replace(program=program, machine=machine, plan=plan)


def difference(case: Case) -> str | None:
    """How the compiled simulator differs from the reference in a case; None where it does not."""
    from simulator import Engine, OutOfMemory, reference, simulate
    from simulator.compiled.engine import NEVER, rows_of

    def result(run: object) -> object:
        try:
            return run(*case[:4], case.iterations, case.limit_until)  # type: ignore[operator]
        except (OutOfMemory, PlanError) as error:
            return str(error)

    right, ours = result(reference.simulate), result(simulate)
    if right != ours:
        return f"simulate gives\n{ours}\nnot\n{right}"
    engine = Engine(case.program, case.machine, case.limit, case.iterations).with_variants(case.plan.variants)
    planned = tuple(engine.residency(rows_of(case.plan.decisions)).tolist())
    if planned != lower(case.program, case.plan).residency:
        return f"residency gives {planned}, not {lower(case.program, case.plan).residency}"
    score = engine.score(rows_of(case.plan.decisions), case.limit_until)
    if engine.on_host(rows_of(case.plan.decisions)) != max(lower(case.program, case.plan).on_host):
        return "on_host differs"
    if isinstance(right, str):
        return f"score gives {score}, not {right}" if score.feasible else None
    assert isinstance(right, Timeline)
    ns = right.iteration_ns if right.period else NEVER
    wanted = (right.period > 0, ns, right.required_bytes, right.peak_bytes, right.period)
    if score != wanted:
        return f"score gives {score}, not {wanted}"
    return None


def compare(case_of: Callable[[int], Any], difference_of: Callable[[Any], str | None]) -> None:
    """Draws as many cases as the command line says, from its first seed on; exits at the first difference."""
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + int(sys.argv[1])):
        found = difference_of(case_of(seed))
        if found:
            sys.exit(f"seed {seed}: {case_of(seed)}\n{found}")
    print(f"{sys.argv[1]} cases: equal")


if __name__ == "__main__":
    compare(lambda seed: contending(Random(-seed), case(seed)) if seed % 3 == 0 else case(seed), difference)
