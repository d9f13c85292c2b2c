"""engine.py is reference.py, compiled; and both keep the promises of reference.py's docstring."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from simulator import Engine, OutOfMemory, Plan, Recompute, Rerun, Swap, simulate
from simulator.compiled.encoding import RECOMPUTE, RERUN, SWAP, SYNC_SWAP, decisions_of, rows_of
from simulator.schedule import lower
from tests import random_cases, tiny
from tests.strategies import machines, plans, programs


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_engine_equals_reference(data):
    program = data.draw(programs())
    plan, machine = data.draw(plans(program, reruns=True)), data.draw(machines())
    limit = lower(program, plan).required_bytes + data.draw(st.integers(-1, 60))
    until = data.draw(st.sampled_from([None, None, 0, len(program.kernels) // 2]))
    case = random_cases.Case(program, plan, machine, limit, until, data.draw(st.integers(1, 5)))
    assert random_cases.difference(case) is None


@pytest.mark.parametrize("first", range(0, 4000, 1000))
def test_engine_equals_reference_in_many_cases(first):
    for seed in range(first, first + 1000):
        assert random_cases.difference(random_cases.case(seed)) is None, f"seed {seed}"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_figures_do_not_depend_on_the_iterations(data):
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    least = simulate(program, plan, machine, limit, 1)
    more = simulate(program, plan, machine, limit, len(least.boundaries) + 3)
    if least.period:
        assert (least.iteration_ns, least.peak_bytes) == (more.iteration_ns, more.peak_bytes)
    if least.steady:
        assert (least.breakdown, least.period) == (more.breakdown, more.period)
        assert {b - a for a, b in pairwise(more.boundaries[-4:])} == {least.iteration_ns}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_one_iteration_is_enough_where_no_persistent_tensor_is_swapped(data):
    program = data.draw(programs())
    decisions = [d for d in data.draw(plans(program)).decisions if not program.tensors[d.tensor].persistent]
    plan, machine = Plan(tuple(decisions)), data.draw(machines())
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    one, five = (simulate(program, plan, machine, limit, i) for i in (1, 5))
    assert (len(one.boundaries), len(five.boundaries)) == (1, 5)
    assert (one.iteration_ns, one.breakdown, one.peak_bytes) == (five.iteration_ns, five.breakdown, five.peak_bytes)
    assert {b - a for a, b in pairwise((0, *five.boundaries))} == {one.iteration_ns}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_feasible_exactly_from_required_bytes_on(data):
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    required = lower(program, plan).required_bytes
    for limit in (required, required + data.draw(st.integers(1, 100))):
        assert simulate(program, plan, machine, limit, 3).peak_bytes <= limit
    if required:
        with pytest.raises(OutOfMemory):
            simulate(program, plan, machine, required - 1)


@given(st.data())
def test_rows_and_decisions_are_inverse(data):
    plan = data.draw(plans(data.draw(programs())))
    assert decisions_of(rows_of(plan.decisions)) == plan.decisions


def test_a_synchronous_swap_is_a_kind_of_row():
    decisions = (Swap(1, 1, 6), Recompute(2, 2, 5, True), Swap(3, 2, 5, 4, sync=True), Swap(1, 1, 6, copy=0),
                 Recompute(2, 2, 5, at=4), Rerun(2, 5))  # fmt: skip
    assert rows_of(decisions).tolist() == [
        [SWAP, 1, 1, 6, -1, -1], [RECOMPUTE, 2, 2, 5, 1, -1], [SYNC_SWAP, 3, 2, 5, 4, -1], [SWAP, 1, 1, 6, -1, 0],
        [RECOMPUTE, 2, 2, 5, 0, 4], [RERUN, -1, 2, 5, 0, -1],
    ]  # fmt: skip
    assert decisions_of(rows_of(decisions)) == decisions
    with pytest.raises(ValueError, match="expected 6 columns, got 5"):
        Engine(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT).score(rows_of(decisions)[:, :5])


def test_no_plan_no_overhead():
    from tests.tiny import MACHINE, PROGRAM

    timeline = simulate(PROGRAM, Plan(), MACHINE, PROGRAM.peak_bytes)
    assert timeline.overhead == 0
    assert timeline.peak_bytes == PROGRAM.peak_bytes
