"""Tests that the SimPy model of the speed suite equals the simulator to the nanosecond for any plan."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from experiments.measure.speed import simpy_model
from experiments.measure.speed.simulation import swap_all
from simulator import Machine, Plan, Program, Swap, simulate
from simulator.schedule import lower
from tests import strategies, tiny
from tests.experiments.conftest import chain


def machine(copy_engines: int, bandwidth: int) -> Machine:
    return Machine("m", 2**40, bandwidth, bandwidth, copy_engines=copy_engines)


@settings(max_examples=50)
@given(st.data())
def test_equal_on_random_programs(data: st.DataObject) -> None:
    program = data.draw(strategies.programs() | strategies.networks())
    on = data.draw(strategies.machines())
    plan = data.draw(strategies.plans(program, reruns=True))
    limit = simulate(program, plan, on, 2**40).required_bytes + data.draw(st.integers(0, 40))
    iterations = data.draw(st.integers(1, 4))
    expected = simulate(program, plan, on, limit, iterations)
    model = simpy_model.Model(lower(program, plan), on, limit, iterations)
    assert model.run() == expected.iteration_ns
    assert model.durations == [
        end - begin for begin, end in pairwise((0, *expected.boundaries))
    ]  # the same number of iterations


def test_equal_with_other_algorithms() -> None:
    program = chain(4)
    on = machine(2, 12 * 10**9)
    program = replace(program, kernels=tuple(replace(k, variants=((10**5, 2**20),)) for k in program.kernels))
    plan = replace(swap_all(program, program.gaps(2**20)), variants=((1, 0), (4, 0)))
    limit = simulate(program, plan, on, 2**40).required_bytes
    expected = simulate(program, plan, on, limit).iteration_ns
    assert simpy_model.simulate(lower(program, plan), on, limit) == expected
    assert simulate(program, replace(plan, variants=()), on, 2**40).iteration_ns != expected


def test_a_plan_that_does_not_fit_is_refused(program: Program) -> None:
    with pytest.raises(MemoryError):
        simpy_model.simulate(lower(program, Plan()), machine(2, 10**9), program.peak_bytes - 1)
    schedule = lower(tiny.PROGRAM, Plan((Swap(tiny.A1, 1, 6),)))
    assert simpy_model.simulate(schedule, replace(tiny.MACHINE, host_bytes=40), 1000) == 140
    with pytest.raises(MemoryError):
        simpy_model.simulate(schedule, replace(tiny.MACHINE, host_bytes=39), 1000)
