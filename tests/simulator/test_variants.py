"""Tests plans that select algorithms of kernels (``Plan.variants``)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Engine, Plan, PlanError, Program, Recompute, rules, simulate
from simulator.compiled.engine import rows_of
from simulator.pool import smartpool, timeline_lifetimes
from simulator.schedule import lower
from tests import tiny
from tests.oracle.packing import overlaps
from tests.strategies import machines, plans, programs, with_algorithms
from tests.tiny import A1, MACHINE

# f1 (10 ns) in 4 ns with a workspace of 20 bytes, or in 3 with one of 60; b4 (20 ns) in 50.
F1 = 0
B4 = 4
PROGRAM = Program(
    "tiny",
    tiny.PROGRAM.tensors,
    tuple(
        replace(kernel, variants={F1: ((4, 20), (3, 60)), B4: ((50, 0),)}.get(k, ()))
        for k, kernel in enumerate(tiny.PROGRAM.kernels)
    ),
)
RECOMPUTE = Recompute(A1, 1, 6)


def test_an_engine_of_variants() -> None:
    engine = Engine(PROGRAM, MACHINE, 200)
    rows = rows_of([RECOMPUTE])
    fast = engine.with_variants(((F1, 0),))
    assert fast.score(rows).iteration_ns == 118 and engine.score(rows).iteration_ns == 130
    assert fast.with_variants(()).score(rows) == engine.score(rows)
    assert fast.with_variants(((F1, 1),)).score(rows).iteration_ns == 116  # the program's, not one on another
    assert (fast.calls, engine.calls) == (1, 2)
    plan = Plan((RECOMPUTE,), variants=((F1, 1),))
    assert fast.timeline(plan) == engine.timeline(plan) == rules.simulate(PROGRAM, plan, MACHINE, 200)
    assert (fast.calls, engine.calls) == (2, 3)
    # Planned residency: f1 holds w and a1; b2 needs f1's workspace during its recomputation.
    assert fast.residency(rows).tolist() == [70, *engine.residency(rows)[1:6].tolist(), 120, engine.residency(rows)[7]]


@given(st.data())
def test_a_plan_is_simulated_as_the_program_that_it_runs(data: st.DataObject) -> None:
    program, variants = data.draw(with_algorithms(data.draw(programs())))
    plan = replace(data.draw(plans(program)), variants=variants)
    machine = data.draw(machines())
    runs = program.with_variants(variants)
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    timeline = simulate(program, plan, machine, limit)
    assert timeline == rules.simulate(program, plan, machine, limit)
    assert timeline == replace(simulate(runs, Plan(plan.decisions), machine, limit), ideal_ns=program.ideal_ns)
    if timeline.period == 1:
        blocks = timeline_lifetimes(timeline).intervals
        assert overlaps(blocks, smartpool.pack(blocks).offsets) == []
        assert blocks.peak_bytes <= limit


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (((8, 0),), "variants[0]: there is no kernel 8; the program has 8"),
        (((-1, 0),), "variants[0]: there is no kernel -1; the program has 8"),
        (((F1, 2),), "variants[0]: kernel 0 has no variant 2; it has 2"),
        (((F1, -1),), "variants[0]: kernel 0 has no variant -1; it has 2"),
        (((F1, 0), (1, 0)), "variants[1]: kernel 1 has no variant 0; it has 0"),
        (((F1, 0), (F1, 1)), "variants[1]: kernel 0 after kernel 0; each comes once, ascending"),
        (((B4, 0), (F1, 1)), "variants[1]: kernel 0 after kernel 4; each comes once, ascending"),
    ],
)
def test_variants_that_do_not_fit(variants: tuple[tuple[int, int], ...], message: str) -> None:
    plan = Plan((RECOMPUTE,), PROGRAM.fingerprint, variants=variants)
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        plan.check(PROGRAM)
    for refuses in (PROGRAM, Engine(PROGRAM, MACHINE, 1000)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            refuses.with_variants(variants)
