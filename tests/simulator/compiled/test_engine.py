"""engine.py is reference.py, compiled; and both keep the promises of reference.py's docstring."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from simulator import Engine, OutOfMemory, Plan, Recompute, Swap, reference, simulate
from simulator.compiled.engine import RECOMPUTE, SWAP, SYNC_SWAP, decisions_of, rows_of
from simulator.schedule import lower
from tests.strategies import machines, plans, programs


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_engine_equals_reference(data):
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    required = lower(program, plan).required_bytes
    limit = required + data.draw(st.integers(-1, 60))
    until = data.draw(st.sampled_from([None, None, 0, len(program.kernels) // 2]))
    iterations = data.draw(st.integers(1, 5))
    try:
        expected = reference.simulate(program, plan, machine, limit, iterations, until)
    except OutOfMemory as error:
        with pytest.raises(OutOfMemory) as caught:
            simulate(program, plan, machine, limit, iterations, until)
        assert str(caught.value) == str(error)
        return
    assert simulate(program, plan, machine, limit, iterations, until) == expected
    score = Engine(program, machine, limit, iterations).score(rows_of(plan.decisions), until)
    assert score == (True, expected.iteration_ns, expected.required_bytes, expected.peak_bytes)
    if until is None:
        assert expected.peak_bytes <= limit


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
    decisions = (Swap(1, 1, 6), Recompute(2, 2, 5, True), Swap(3, 2, 5, 4, sync=True))
    assert rows_of(decisions).tolist() == [[SWAP, 1, 1, 6, -1], [RECOMPUTE, 2, 2, 5, 1], [SYNC_SWAP, 3, 2, 5, 4]]


def test_no_plan_no_overhead():
    from tests.tiny import MACHINE, PROGRAM

    timeline = simulate(PROGRAM, Plan(), MACHINE, PROGRAM.peak_bytes)
    assert timeline.overhead == 0
    assert timeline.peak_bytes == PROGRAM.peak_bytes
