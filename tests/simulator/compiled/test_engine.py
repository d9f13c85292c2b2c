"""Tests that the compiled simulator equals rules.py, and that both keep the guarantees of RULES.md."""

from random import Random

import numpy as np
import pytest

from agents.floor import floor
from simulator import Engine, Kernel, Plan, Program, Recompute, Rerun, Swap, Tensor, rules, simulate
from simulator.compiled import engine as compiled
from simulator.compiled.encoding import RECOMPUTE, RERUN, SWAP, SYNC_SWAP, decisions_of, rows_of
from simulator.schedule import lower
from tests import random_cases, tiny


def test_rows_and_decisions_are_inverse():
    decisions = (
        Swap(1, 1, 6),
        Recompute(2, 2, 5, True),
        Swap(3, 2, 5, 4, sync=True),
        Swap(1, 1, 6, copy=0),
        Recompute(2, 2, 5, at=4),
        Rerun(2, 5),
    )
    assert rows_of(decisions).tolist() == [
        [SWAP, 1, 1, 6, -1, -1],
        [RECOMPUTE, 2, 2, 5, 1, -1],
        [SYNC_SWAP, 3, 2, 5, 4, -1],
        [SWAP, 1, 1, 6, -1, 0],
        [RECOMPUTE, 2, 2, 5, 0, 4],
        [RERUN, -1, 2, 5, 0, -1],
    ]
    assert decisions_of(rows_of(decisions)) == decisions
    with pytest.raises(ValueError, match="expected 6 columns, got 5"):
        Engine(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT).score(rows_of(decisions)[:, :5])


def test_a_plan_is_simulated_up_to_the_cutoff():
    slower = 0
    for seed in range(60):
        case = random_cases.any_case(seed)
        engine = Engine(case.program, case.machine, case.limit).with_variants(case.plan.variants)
        rows = rows_of(case.plan.decisions)
        score = engine.score(rows, case.limit_until)
        if case.limit_until is None and not case.plan.variants:
            assert floor(case.program, case.machine, case.limit).iteration_ns <= score.iteration_ns, f"seed {seed}"
        for cutoff in (score.iteration_ns, score.iteration_ns + 1) if score.feasible else (100,):
            found = engine.score(rows, case.limit_until, cutoff)
            if score.iteration_ns < cutoff:
                assert found == score, f"seed {seed}"
            else:
                assert found.iteration_ns >= score.iteration_ns, f"seed {seed}"
                slower += score.feasible and not found.feasible
    assert slower > 15


def test_batches_are_scored_as_plans_one_by_one(monkeypatch):
    monkeypatch.setattr(compiled, "SHARE", 1)
    for seed in range(10):
        rng = Random(seed)
        program = random_cases.program_of(rng)
        machine = random_cases.machine_of(rng)
        plans = [random_cases.plan_of(rng, program) for _ in range(20)]
        needs = sorted(lower(program, plan).required_bytes for plan in plans)
        rows = [rows_of(plan.decisions) for plan in plans]
        one, many, two = (Engine(program, machine, needs[10]) for _ in range(3))
        wanted = [one.score(r) for r in rows]
        assert many.scores(rows) == many.scores(rows) == wanted
        assert many.calls == 2 * len(plans)
        found = two.score_batch(np.concatenate(rows), np.array([len(r) for r in rows]), threads=1)
        assert found.iteration_ns.tolist() == [s.iteration_ns for s in wanted]
    assert many.scores([]) == []


def test_long_plans_have_room():
    """The engine enlarges its arrays for plans with more rows and steps, alone and in a batch."""
    n = 80
    tensors = tuple(Tensor(f"t{k}", 10) for k in range(2 * n))
    kernels = [Kernel("f", "other", "forward", (k - 1,) if k else (), (k,), 3) for k in range(n)]
    kernels += [Kernel("b", "other", "backward", (2 * n - 1 - k, k - 1), (k,), 5) for k in range(n, 2 * n)]
    program = Program("long", tensors, tuple(kernels))
    plan = Plan(tuple(Recompute(t, t + 1, 2 * n - 1 - t) for t in range(1, n - 1)))
    plan.check(program)
    schedule = lower(program, plan)
    assert len(schedule.reruns) > 256 and len(plan.decisions) > 64
    limit = schedule.required_bytes
    right = rules.simulate(program, plan, tiny.MACHINE, limit)
    assert simulate(program, plan, tiny.MACHINE, limit) == right
    rows = rows_of(plan.decisions)
    engine = Engine(program, tiny.MACHINE, limit)
    assert engine.residency(rows).tolist() == list(schedule.residency)
    scores = Engine(program, tiny.MACHINE, limit).scores([rows, rows[:3], rows])
    assert scores[0] == scores[2] == engine.score(rows) == (True, right.iteration_ns, limit, limit, 1)
