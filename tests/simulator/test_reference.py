"""Tests hand-computed cases for the rules of RULES.md in both simulators; random cases: tests/test_random_cases.py.

One byte takes one nanosecond to copy. Spans are written (kernel or tensor, start, end); memory is (time, bytes in use
after the change).
"""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Engine, OutOfMemory, Plan, Swap, Tensor, rules
from simulator.compiled import engine
from simulator.compiled.engine import NEVER, rows_of
from simulator.schedule import lower
from simulator.timeline import Breakdown
from tests.programs import compute, straight, work
from tests.strategies import machines, networks, plans, programs
from tests.tiny import A1, LIMIT, MACHINE, PROGRAM, SWAP_PLAN


def test_compute_waits_for_a_swap_out(simulate):
    """Checks the timeline that tests/tiny.py draws."""
    timeline = simulate(PROGRAM, SWAP_PLAN, MACHINE, LIMIT, iterations=1)
    assert compute(timeline) == [
        (0, 0, 10),
        (1, 10, 20),
        (2, 20, 30),
        (3, 60, 70),
        (4, 70, 90),
        (5, 90, 110),
        (6, 130, 150),
        (7, 150, 170),
    ]
    assert work(timeline, "swap_out") == [(A1, 20, 60)] and work(timeline, "swap_in") == [(A1, 90, 130)]
    assert timeline.memory == (
        (0, 10),
        (0, 50),
        (10, 90),
        (20, 130),  # w, a1, a2, a3; a4 would make 170
        (60, 90),
        (60, 130),
        (70, 140),  # a1 is swapped out; a4; g4
        (90, 100),
        (90, 150),  # a4 dies, a1's swap-in starts and g3 is born
        (110, 100),
        (130, 110),
        (150, 60),
        (170, 10),  # a3 and g4 die; g2; a2 and g3 die; a1 and g2 die
    )
    # 30 ns until a1 is swapped out, 20 until it is swapped in; 80 ns of copies, 30 of them beside kernels.
    assert timeline.breakdown == Breakdown(120, 0, 30, 20, 30)
    # Planned: k3 = w a2 a3 a4, k4 = the same and g4, …; the largest decides.
    assert lower(PROGRAM, SWAP_PLAN).residency == (50, 90, 90, 130, 140, 110, 110, 60)
    assert (timeline.required_bytes, timeline.peak_bytes) == (140, 150)


def test_choice_c_nothing_is_evicted_on_demand(simulate):
    with pytest.raises(OutOfMemory) as caught:
        simulate(PROGRAM, Plan(), MACHINE, 179)
    error = caught.value
    assert (error.kernel, error.requested, error.used, error.limit) == (4, 10, 170, 179)
    assert str(error) == "kernel 4 needs 10 bytes beside 170 in use, over the limit of 179"
    with pytest.raises(OutOfMemory) as caught:  # which counts the plan's evictions
        simulate(PROGRAM, SWAP_PLAN, MACHINE, 139)
    assert (caught.value.kernel, caught.value.requested, caught.value.used) == (4, 10, 130)


def test_iterations_that_repeat_in_turn(simulate):
    """In turn, p0 (updated by k2) is swapped in before p1 (read by k0), for which k0 then waits, or after it."""
    tensors = [Tensor("p0", 20, "parameter", True), Tensor("p1", 40, "parameter", True)]
    program = straight(tensors, ((1,), (), 20), ((), (), 30), ((0,), (0,), 10))
    plan = Plan((Swap(0, 2, 2), Swap(1, 0, 0)))
    for iterations, boundaries in ((1, (100, 160, 240)), (4, (100, 160, 240, 300, 380))):  # 60, 80, 60, 80
        timeline = simulate(program, plan, MACHINE, 1000, iterations)
        assert timeline.boundaries == boundaries
        assert (timeline.iteration_ns, timeline.period, timeline.steady) == (80, 2, False)
    assert work(timeline, "swap_in")[2:6] == [(1, 60, 100), (0, 120, 140), (1, 140, 180), (0, 180, 200)]


def test_a_simulation_that_does_not_become_steady(simulate):
    """Three swap-outs of 1001 ns, in iterations of 3000 ns: the queue grows, and kernels wait after some 1000 ns."""
    tensors = [Tensor(f"p{i}", 1001, "parameter", True) for i in range(3)]
    program = straight(tensors, *(((i,), (i,), 1000) for i in range(3)))
    plan = Plan(tuple(Swap(i, i, i) for i in range(3)))
    machine = replace(MACHINE, h2d_bytes_per_s=10**12)
    early = simulate(program, plan, machine, 10**4, iterations=1)
    assert (len(early.boundaries), early.iteration_ns, early.period) == (64, 3000, 0)
    late = simulate(program, plan, machine, 10**4, iterations=400)
    assert (len(late.boundaries), late.iteration_ns, late.steady) == (400, 3003, True)
    score = Engine(program, machine, 10**4).score(rows_of(plan.decisions))
    assert (score.feasible, score.iteration_ns, score.period) == (False, NEVER, 0)


@given(st.data())
def test_the_order_of_the_decisions_has_no_meaning(data):
    program = data.draw(programs() | networks())
    plan = data.draw(plans(program))
    machine = data.draw(machines())
    decisions = tuple(data.draw(st.permutations(plan.decisions)))
    limit = lower(program, plan).required_bytes
    expected = rules.simulate(program, plan, machine, limit)
    for run in (rules.simulate, engine.simulate):
        assert run(program, Plan(decisions), machine, limit) == expected
