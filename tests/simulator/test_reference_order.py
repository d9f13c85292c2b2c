"""Tests hand-computed cases for order, iterations and choices of RULES.md, for both simulators."""

import pytest
from hypothesis import given, strategies as st

from simulator import OutOfMemory, Plan, Recompute, Swap, Tensor, rules
from simulator.compiled import engine
from simulator.schedule import lower
from simulator.timeline import Breakdown
from tests.programs import activations, compute, straight, work
from tests.simulator.test_reference import ONE_ENGINE, PLENTY
from tests.strategies import machines, networks, plans, programs
from tests.tiny import A1, MACHINE, PROGRAM, SWAP_PLAN

# ------------------------------------------------------------------- rules 9 and 10: order, iterations


def test_order_at_one_instant(simulate):
    """At 20 k1 and x's swap-out end and y's is issued: y's swap-out, x's swap-in and k2 start."""
    timeline = simulate(TWO_SWAPS, SWAP_BOTH, MACHINE, PLENTY, iterations=1)
    assert [s.kind for s in timeline.spans if s.start_ns == 20] == ["swap_out", "swap_in", "kernel"]
    assert [m for m in timeline.memory if m[0] == 20] == [(20, 10), (20, 25)]  # x out; x in and workspace


def test_a_gap_over_the_iteration_boundary(simulate):
    """Tensor p starts on the host and fits beside k1's workspace only after k1: [30, …) of 10 ns, past the boundary."""
    program = straight([Tensor("p", 10, "parameter", True)], ((0,), (), 10), ((), (), 10, 10), ((), (), 5))
    timeline = simulate(program, Plan((Swap(0, 0, 0),)), MACHINE, 10, iterations=2)
    assert work(timeline, "swap_out") == []  # never written: the copy on the host stays valid
    assert work(timeline, "swap_in") == [(0, 0, 10), (0, 30, 40), (0, 60, 70)]
    assert compute(timeline) == [(0, 10, 20), (1, 20, 30), (2, 30, 35), (0, 40, 50), (1, 50, 60), (2, 60, 65)]
    assert timeline.boundaries == (35, 65) and timeline.iteration_ns == 30
    assert timeline.memory[:4] == ((0, 0), (0, 10), (20, 0), (20, 10))
    assert timeline.breakdown.stall_data_ns == 5


def test_a_written_parameter_leaves_over_the_boundary(simulate):
    """k0 updates p in every iteration, so p must be copied in every iteration."""
    program = straight([Tensor("p", 10, "parameter", True)], ((0,), (0,), 10), ((), (), 10), ((), (), 30))
    timeline = simulate(program, Plan((Swap(0, 0, 0),)), MACHINE, PLENTY, iterations=2)
    assert work(timeline, "swap_in") == [(0, 0, 10), (0, 30, 40), (0, 80, 90)]
    assert work(timeline, "swap_out") == [(0, 20, 30), (0, 70, 80)]
    assert timeline.boundaries == (60, 110)


def test_the_next_iteration_waits_for_a_synchronous_swap_out(simulate):
    """k1 updates p; its swap-out is [30, 40) at the end of the iteration; k0, which does not use p, starts at 40."""
    program = straight([Tensor("p", 10, "parameter", True)], ((), (), 10), ((0,), (0,), 10), ((), (), 10))
    timeline = simulate(program, Plan((Swap(0, 2, 1, sync=True),)), MACHINE, PLENTY, iterations=3)
    assert work(timeline, "swap_in") == [(0, 0, 10), (0, 40, 50), (0, 80, 90)]
    assert work(timeline, "swap_out") == [(0, 30, 40), (0, 70, 80)]
    assert compute(timeline)[3:6] == [(0, 40, 50), (1, 50, 60), (2, 60, 70)]
    assert timeline.boundaries == (30, 70, 110) and timeline.breakdown == Breakdown(30, 0, 10, 0, 10)


def test_a_chain_that_ends_a_wrapping_gap_before_the_boundary(simulate):
    """Tensor p is evicted after k0; the chain of k3 reads it, so p is resident when the next iteration starts."""
    program = straight(
        [Tensor("p", 10, "parameter", True), *activations(10)],
        ((0,), (1,), 10), ((), (), 30), ((), (), 10), ((1,), (), 10),
    )  # fmt: skip
    plan = Plan((Swap(0, 0, 0), Recompute(1, 0, 3)))
    timeline = simulate(program, plan, MACHINE, PLENTY, iterations=2)
    assert timeline.memory[0] == (0, 10)
    assert compute(timeline)[0] == (0, 0, 10)
    assert timeline.iteration_ns == 70  # 60 and recomputation of k0


def test_a_wrapping_gap_that_has_ended_is_no_gap_before_its_kernel(simulate):
    """As above, but k1 uses p: as the chain of k4 has swapped it in, k0 runs beside it, with 10 of 15 bytes."""
    program = straight(
        [Tensor("p", 10, "parameter", True), *activations(10)],
        ((), (), 10, 5), ((0,), (1,), 10), ((), (), 30), ((), (), 10), ((1,), (), 10),
    )  # fmt: skip
    plan = Plan((Swap(0, 1, 1), Recompute(1, 1, 4)))
    schedule = lower(program, plan)
    assert (schedule.away_at_start, schedule.residency) == (frozenset(), (15, 20, 0, 0, 20))
    assert simulate(program, plan, MACHINE, 20).memory[:2] == ((0, 10), (0, 15))


@given(st.data())
def test_the_order_of_the_decisions_has_no_meaning(data):
    program = data.draw(programs() | networks())
    plan, machine = data.draw(plans(program)), data.draw(machines())
    decisions = tuple(data.draw(st.permutations(plan.decisions)))
    limit = lower(program, plan).required_bytes
    expected = rules.simulate(program, plan, machine, limit)
    for run in (rules.simulate, engine.simulate):
        assert run(program, Plan(decisions), machine, limit) == expected


# -------------------------------------------------------------------------------- the five choices

# k0 makes x, k1 makes y, k2 has a workspace of 5, k3 reads x, k4 reads y; all take 10 ns.
TWO_SWAPS = straight(
    activations(10, 10), ((), (0,), 10), ((), (1,), 10), ((), (), 10, 5), ((0,), (), 10), ((1,), (), 10)
)
SWAP_BOTH = Plan((Swap(0, 0, 3), Swap(1, 1, 4)))


def test_choice_a_a_swap_out_is_completed_even_when_it_is_late(simulate):
    program = straight(activations(100), ((), (0,), 10), ((), (), 5), ((0,), (), 10))
    timeline = simulate(program, Plan((Swap(0, 0, 2),)), MACHINE, PLENTY, iterations=1)
    assert [(s.kind, s.start_ns, s.end_ns) for s in timeline.spans if s.stream != "compute"] == [
        ("swap_out", 10, 110), ("swap_in", 110, 210),
    ]  # fmt: skip
    assert compute(timeline)[-1] == (2, 210, 220)
    # 195 ns of stalls: for the swap-out [15, 110), for the swap-in [110, 210).
    assert timeline.breakdown == Breakdown(25, 0, 95, 100, 5)


def test_choice_b_two_copy_engines(simulate):
    timeline = simulate(TWO_SWAPS, SWAP_BOTH, MACHINE, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(0, 10, 20), (1, 20, 30)]
    assert work(timeline, "swap_in") == [(0, 20, 30), (1, 30, 40)]
    assert timeline.breakdown == Breakdown(50, 0, 0, 0, 40)


def test_choice_b_one_copy_engine(simulate):
    """At 20 both the swap-in of x and the swap-out of y could start: y goes first."""
    timeline = simulate(TWO_SWAPS, SWAP_BOTH, ONE_ENGINE, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(0, 10, 20), (1, 20, 30)]
    assert work(timeline, "swap_in") == [(0, 30, 40), (1, 40, 50)]
    assert compute(timeline)[2:] == [(2, 20, 30), (3, 40, 50), (4, 50, 60)]
    assert timeline.breakdown == Breakdown(50, 0, 0, 10, 30)


def test_choice_c_nothing_is_evicted_on_demand(simulate):
    with pytest.raises(OutOfMemory) as caught:
        simulate(PROGRAM, Plan(), MACHINE, 179)
    error = caught.value
    assert (error.kernel, error.requested, error.used, error.limit) == (4, 10, 170, 179)
    assert str(error) == "kernel 4 needs 10 bytes beside 170 in use, over the limit of 179"
    with pytest.raises(OutOfMemory) as caught:  # which counts the plan's evictions
        simulate(PROGRAM, SWAP_PLAN, MACHINE, 139)
    assert (caught.value.kernel, caught.value.requested, caught.value.used) == (4, 10, 130)


def test_choice_d_the_limit_until_a_kernel(simulate):
    """Under 139 bytes b4 (kernel 4) does not fit; with the limit enforced before it only, a1's swap-in is [70, 110)."""
    timeline = simulate(PROGRAM, SWAP_PLAN, MACHINE, 139, iterations=1, limit_until=4)
    assert work(timeline, "swap_in") == [(A1, 70, 110)]
    assert compute(timeline)[3:] == [(3, 60, 70), (4, 70, 90), (5, 90, 110), (6, 110, 130), (7, 130, 150)]
    assert (timeline.iteration_ns, timeline.peak_bytes) == (150, 180)
    with pytest.raises(OutOfMemory):
        simulate(PROGRAM, SWAP_PLAN, MACHINE, 139, iterations=1, limit_until=5)
