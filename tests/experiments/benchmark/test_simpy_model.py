"""The SimPy model that bench times obeys the same rules: equal to the nanosecond, whatever the plan."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from experiments.benchmark import simpy_model
from experiments.benchmark.simulation import swap_all
from simulator import Decision, Machine, Plan, Program, Recompute, Rerun, Swap, simulate
from simulator.schedule import lower
from tests import strategies, tiny
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
            assert simpy_model.simulate(lower(program, plan), on, limit, iterations) == expected


@given(st.data())
def test_equal_on_random_programs(data: st.DataObject) -> None:
    program, on = data.draw(strategies.programs() | strategies.networks()), data.draw(strategies.machines())
    plan = data.draw(strategies.plans(program, reruns=True))
    limit = simulate(program, plan, on, 2**40).required_bytes + data.draw(st.integers(0, 40))
    iterations = data.draw(st.integers(1, 4))
    expected = simulate(program, plan, on, limit, iterations)
    model = simpy_model.Model(lower(program, plan), on, limit, iterations)
    assert model.run() == expected.iteration_ns
    assert model.lasts == [end - begin for begin, end in pairwise((0, *expected.boundaries))]  # as many iterations


# By hand, one byte a nanosecond. f1 to f4 last 10 ns, b4 to b1 20 ns; a1 is away from 20 to 80, a2 from 30 to 60.
BOTH = (Swap(tiny.A1, 1, 6, prefetch=3), Swap(tiny.A2, 2, 5))


@pytest.mark.parametrize(
    ("decisions", "changes", "expected"),
    [
        ((Swap(tiny.A1, 1, 6),), {}, 140),  # out [20, 60), back [60, 100) for b2
        ((Swap(tiny.A1, 5, 6, copy=1),), {}, 160),  # copied [20, 60), free at 80, back [80, 120)
        ((Swap(tiny.A1, 5, 6),), {}, 200),  # out [80, 120), back [120, 160)
        ((Swap(tiny.A1, 1, 6, sync=True),), {}, 160),  # f3 waits for 60
        ((Recompute(tiny.A1, 1, 6, at=5),), {}, 130),  # f1 again
        ((Rerun(0, 5), Rerun(1, 5)), {}, 140),  # f1 and f2 again
        (BOTH, {}, 200),  # out a1 [20, 60), a2 [60, 100); back a1 [60, 100), a2 [100, 140) for b3
        # a2 and a1 at half the rate [60, 140); a2 [140, 180)
        (BOTH, {"duplex_h2d_bytes_per_s": 5 * 10**8, "duplex_d2h_bytes_per_s": 5 * 10**8}, 240),
        # One of them at a quarter: a2 leaves [60, 100), a1 is back [60, 130), a2 [130, 170); or a1 is back [60, 100),
        # a2 has left when 30 more are gone, at 130, and is back [130, 170).
        (BOTH, {"duplex_h2d_bytes_per_s": 25 * 10**7}, 230),
        (BOTH, {"duplex_d2h_bytes_per_s": 25 * 10**7}, 230),
        (BOTH, {"copy_engines": 1}, 220),  # out a1, a2, for it was issued first; back a2 [100, 140), a1 [140, 180)
        # a1 is back [60, 100) before a2 leaves [100, 140), for its return was issued first; a2 [140, 180).
        ((Swap(tiny.A1, 1, 6, prefetch=2), Swap(tiny.A2, 3, 5)), {"copy_engines": 1}, 240),
        ((Swap(tiny.A1, 1, 6), Swap(tiny.A2, 3, 5)), {"copy_engines": 1}, 220),  # not issued: after a2
    ],
)  # fmt: skip
def test_by_hand(decisions: tuple[Decision, ...], changes: dict[str, int], expected: int) -> None:
    on = replace(tiny.MACHINE, **changes)
    assert simpy_model.simulate(lower(tiny.PROGRAM, Plan(decisions)), on, 1000) == expected
    assert simulate(tiny.PROGRAM, Plan(decisions), on, 1000).iteration_ns == expected


def test_equal_with_other_algorithms() -> None:
    program, on = chain(4), machine(2, 12 * 10**9)
    program = replace(program, kernels=tuple(replace(k, variants=((10**5, 2**20),)) for k in program.kernels))
    plan = replace(swap_all(program, program.gaps(2**20)), variants=((1, 0), (4, 0)))
    limit = simulate(program, plan, on, 2**40).required_bytes
    expected = simulate(program, plan, on, limit).iteration_ns
    assert simpy_model.simulate(lower(program, plan), on, limit) == expected
    assert simulate(program, replace(plan, variants=()), on, 2**40).iteration_ns != expected


def test_a_plan_over_the_limit_is_refused(program: Program) -> None:
    with pytest.raises(MemoryError):
        simpy_model.simulate(lower(program, Plan()), machine(2, 10**9), program.peak_bytes - 1)


def test_a_plan_that_the_host_cannot_hold_is_refused() -> None:
    schedule = lower(tiny.PROGRAM, Plan((Swap(tiny.A1, 1, 6),)))
    assert simpy_model.simulate(schedule, replace(tiny.MACHINE, host_bytes=40), 1000) == 140
    with pytest.raises(MemoryError):
        simpy_model.simulate(schedule, replace(tiny.MACHINE, host_bytes=39), 1000)
