"""The SimPy model that bench times obeys the same rules: equal to the nanosecond on plans of swaps."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from experiments.benchmarks import simpy_model
from experiments.benchmarks.simulation import swap_all
from simulator import Machine, Plan, Program, Swap, simulate
from tests import strategies
from tests.experiments.conftest import chain


def machine(copy_engines: int, bandwidth: int) -> Machine:
    return Machine("m", 2**40, bandwidth, bandwidth, copy_engines=copy_engines)


@pytest.mark.parametrize("copy_engines", [1, 2])
@pytest.mark.parametrize("bandwidth", [10**9, 12 * 10**9, 60 * 10**9])
@pytest.mark.parametrize("layers", [2, 5, 12])
def test_equal_to_the_simulator(copy_engines: int, bandwidth: int, layers: int) -> None:
    program, on = chain(layers), machine(copy_engines, bandwidth)
    plan = swap_all(program, program.gaps(2**20))
    required = simulate(program, plan, on, program.peak_bytes).required_bytes
    for limit in (required, (required + program.peak_bytes) // 2, program.peak_bytes):
        expected = simulate(program, plan, on, limit).iteration_ns
        for iterations in (1, 2, 3):
            assert simpy_model.simulate(program, plan, on, limit, iterations) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_equal_on_random_programs(data: st.DataObject) -> None:
    program, on = data.draw(strategies.programs()), data.draw(strategies.machines())
    drawn = data.draw(strategies.plans(program))
    plan = Plan(tuple(d for d in drawn.decisions if isinstance(d, Swap)))
    limit = simulate(program, plan, on, 2**40).required_bytes + data.draw(st.integers(0, 40))
    iterations = data.draw(st.integers(1, 4))
    expected = simulate(program, plan, on, limit, iterations)
    model = simpy_model.Model(program, plan, on, limit, iterations)
    assert model.run() == expected.iteration_ns
    assert model.lasts == [end - begin for begin, end in pairwise((0, *expected.boundaries))]  # as many iterations


def test_equal_with_other_algorithms() -> None:
    program, on = chain(4), machine(2, 12 * 10**9)
    program = replace(program, kernels=tuple(replace(k, variants=((10**5, 2**20),)) for k in program.kernels))
    plan = replace(swap_all(program, program.gaps(2**20)), variants=((1, 0), (4, 0)))
    limit = simulate(program, plan, on, 2**40).required_bytes
    expected = simulate(program, plan, on, limit).iteration_ns
    assert simpy_model.simulate(program, plan, on, limit) == expected
    assert simulate(program, replace(plan, variants=()), on, 2**40).iteration_ns != expected


def test_a_plan_over_the_limit_is_refused(program: Program) -> None:
    with pytest.raises(MemoryError):
        simpy_model.simulate(program, Plan(), machine(2, 10**9), program.peak_bytes - 1)
