"""engine.py is reference.py, compiled; and both keep the promises of reference.py's docstring."""

import pytest
from hypothesis import given, settings, strategies as st

from simulator import Engine, OutOfMemory, Plan, reference, simulate
from simulator.engine import decisions_of, rows_of
from tests.strategies import machines, plans, programs


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_engine_equals_reference(data):
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    required = max(reference.resolve(program, plan.decisions).planned)
    limit = required + data.draw(st.integers(-1, 60))
    until = data.draw(st.sampled_from([None, None, 0, len(program.kernels) // 2]))
    iterations = data.draw(st.integers(1, 3))
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
def test_feasible_exactly_from_required_bytes_on(data):
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    required = max(reference.resolve(program, plan.decisions).planned)
    for limit in (required, required + data.draw(st.integers(1, 100))):
        assert simulate(program, plan, machine, limit, 3).peak_bytes <= limit
    if required:
        with pytest.raises(OutOfMemory):
            simulate(program, plan, machine, required - 1)


@given(st.data())
def test_rows_and_decisions_are_inverse(data):
    plan = data.draw(plans(data.draw(programs())))
    assert decisions_of(rows_of(plan.decisions)) == plan.decisions


def test_no_plan_no_overhead():
    from tests.tiny import MACHINE, PROGRAM

    timeline = simulate(PROGRAM, Plan(), MACHINE, PROGRAM.peak_bytes)
    assert timeline.overhead == 0
    assert timeline.peak_bytes == PROGRAM.peak_bytes
