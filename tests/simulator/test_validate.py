"""validate.py finds nothing in what the simulator says, and finds every kind of lie."""

from hypothesis import given, settings, strategies as st

from simulator import Plan, reference, simulate
from simulator.validate import violations
from tests.strategies import machines, plans, programs


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_nothing_to_find_in_a_simulated_timeline(data):
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    limit = max(reference.resolve(program, plan.decisions).planned) + data.draw(st.integers(0, 60))
    iterations = data.draw(st.integers(1, 3))
    timeline = reference.simulate(program, plan, machine, limit, iterations)
    assert violations(timeline, program, plan, machine, limit) == []
    timeline = reference.simulate(program, plan, machine, limit, iterations, limit_until=0)
    assert violations(timeline, program, plan, machine, None) == []
