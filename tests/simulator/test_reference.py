"""Tests hand-computed cases for the rules of RULES.md, one by one, for both simulators.

One byte takes one nanosecond to copy. Spans are written
(kernel or tensor, start, end); memory is (time, bytes in use after the change).
"""

import pytest
from hypothesis import given, strategies as st

from simulator import Gap, OutOfMemory, Plan, Recompute, Swap, Tensor, rules
from simulator.compiled import engine
from simulator.residency import recompute_ns, reruns
from simulator.schedule import lower
from simulator.timeline import Breakdown
from tests.programs import activations, compute, straight, work
from tests.strategies import machines, networks, plans, programs
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM, SWAP_PLAN

PLENTY = 1000


# --------------------------------------------------------------------------- rules 1 to 3: kernels


def test_without_a_plan(simulate):
    timeline = simulate(PROGRAM, Plan(), MACHINE, 180, iterations=1)
    assert compute(timeline) == [
        (0, 0, 10), (1, 10, 20), (2, 20, 30), (3, 30, 40), (4, 40, 60), (5, 60, 80), (6, 80, 100), (7, 100, 120),
    ]  # fmt: skip
    assert timeline.memory == (
        (0, 10), (0, 50), (10, 90), (20, 130), (30, 170), (40, 180),  # w, a1, a2, a3, a4, g4
        (60, 140), (60, 150), (80, 100), (80, 110),  # a4 dies, g3 is born; a3 and g4 die, g2 is born
        (100, 60), (120, 10),  # a2 and g3 die; a1 and g2 die
    )  # fmt: skip
    assert timeline.breakdown == Breakdown(120, 0, 0, 0, 0)
    assert (timeline.iteration_ns, timeline.peak_bytes, timeline.required_bytes) == (120, 180, 180)
    assert simulate(PROGRAM, Plan(), MACHINE, 180, iterations=3).boundaries == (120, 240, 360)


# ---------------------------------------------------------------------- rules 4 and 8: swapping out


def test_compute_waits_for_a_swap_out(simulate):
    """Checks the timeline that tests/tiny.py draws."""
    timeline = simulate(PROGRAM, SWAP_PLAN, MACHINE, LIMIT, iterations=1)
    assert compute(timeline) == [
        (0, 0, 10), (1, 10, 20), (2, 20, 30), (3, 60, 70), (4, 70, 90), (5, 90, 110), (6, 130, 150), (7, 150, 170),
    ]  # fmt: skip
    assert work(timeline, "swap_out") == [(A1, 20, 60)] and work(timeline, "swap_in") == [(A1, 90, 130)]
    assert timeline.memory == (
        (0, 10), (0, 50), (10, 90), (20, 130),  # w, a1, a2, a3; a4 would make 170
        (60, 90), (60, 130), (70, 140),  # a1 is swapped out; a4; g4
        (90, 100), (90, 150),  # a4 dies, a1's swap-in starts and g3 is born
        (110, 100), (130, 110), (150, 60), (170, 10),  # a3 and g4 die; g2; a2 and g3 die; a1 and g2 die
    )  # fmt: skip
    # 30 ns until a1 is swapped out, 20 until it is swapped in; 80 ns of copies, 30 of them beside kernels.
    assert timeline.breakdown == Breakdown(120, 0, 30, 20, 30)
    # Planned: k3 = w a2 a3 a4, k4 = the same and g4, …; the largest decides.
    assert lower(PROGRAM, SWAP_PLAN).residency == (50, 90, 90, 130, 140, 110, 110, 60)
    assert (timeline.required_bytes, timeline.peak_bytes) == (140, 150)


# ----------------------------------------------------------------------- rules 5 and 6: swapping in


def test_prefetch_pins_the_swap_in(simulate):
    """Under 180 bytes the swap-in is issued at the end of b3 (80), not when it fits (60)."""
    plan = Plan((Swap(A1, 1, 6, prefetch=5),))
    timeline = simulate(PROGRAM, plan, MACHINE, 180, iterations=1)
    assert work(timeline, "swap_in") == [(A1, 80, 120)]
    assert timeline.iteration_ns == 160


def test_tensors_are_swapped_in_in_order_of_next_use(simulate):
    """Under 130 bytes: a1 out [20, 60), a2 out [60, 100), then g4 fits (b4 [100, 120)).

    a2 is needed first, at b3: in [120, 160). Beside a2 and g3 a1 does not fit: in [180, 220).
    """
    plan = Plan((Swap(A1, 1, 6), Swap(A2, 2, 5)))
    timeline = simulate(PROGRAM, plan, MACHINE, 130, iterations=1)
    assert work(timeline, "swap_out") == [(A1, 20, 60), (A2, 60, 100)]
    assert work(timeline, "swap_in") == [(A2, 120, 160), (A1, 180, 220)]
    assert compute(timeline)[3:] == [(3, 60, 70), (4, 100, 120), (5, 160, 180), (6, 220, 240), (7, 240, 260)]
    # Compute stalls [30, 60) and [70, 100) for memory, [120, 160) and [180, 220) for data.
    assert timeline.breakdown == Breakdown(120, 0, 60, 80, 20)


# ------------------------------------------------------------------------------ rule 7: recomputing

# k0: p -> a, k1: a -> b, k2: b -> c, k3: a marker of 10 ns, k4 reads c, k5 reads b, k6 reads a.
P, A, B, C = range(4)
CHAIN = straight(
    [Tensor("p", 5, "parameter", True), *activations(10, 10, 10)],
    ((P,), (A,), 10), ((A,), (B,), 10), ((B,), (C,), 10), ((), (), 10), ((C,), (), 10), ((B,), (), 10), ((A,), (), 10),
)  # fmt: skip


def test_a_memory_centric_chain(simulate):
    plan = Plan((Recompute(A, 1, 6), Recompute(B, 2, 5), Recompute(C, 2, 4)))
    timeline = simulate(CHAIN, plan, MACHINE, 25, iterations=1)
    assert work(timeline, "recompute") == [
        (0, 40, 50), (1, 50, 60), (2, 60, 70),  # for k4 [70, 80)
        (0, 80, 90), (1, 90, 100),  # for k5 [100, 110)
        (0, 110, 120),  # for k6 [120, 130)
    ]  # fmt: skip
    assert timeline.memory == (
        (0, 5), (0, 15), (10, 25), (20, 15), (20, 25), (30, 5),  # a; b; a dropped, c; b and c dropped
        (40, 15), (50, 25), (60, 15), (60, 25), (70, 15), (80, 5),  # a; b, without a; c, without b; c dies
        (80, 15), (90, 25), (100, 15), (110, 5), (110, 15), (130, 5),
    )  # fmt: skip
    assert timeline.breakdown == Breakdown(70, 60, 0, 0, 0) and timeline.required_bytes == 25


def test_recomputations_run_in_order():
    """k1 and k8 write t from x (k0), which is resident; if x is dropped, k0 is recomputed, too."""
    lines = [((), (), 10) for _ in range(11)]
    lines[0], lines[1], lines[8], lines[10] = ((), (0,), 10), ((0,), (1,), 10), ((1,), (1,), 10), ((0, 1), (), 10)
    program = straight(activations(10, 10), *lines)
    assert reruns(program, {1}, 10) == [1, 8]
    assert reruns(program, {1}, 10, {0}) == [0, 1, 8]
    assert recompute_ns(program, Gap(1, 8, 10)) == 20


# ------------------------------------------------------------------ iterations, limits, order


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


def test_choice_c_nothing_is_evicted_on_demand(simulate):
    with pytest.raises(OutOfMemory) as caught:
        simulate(PROGRAM, Plan(), MACHINE, 179)
    error = caught.value
    assert (error.kernel, error.requested, error.used, error.limit) == (4, 10, 170, 179)
    assert str(error) == "kernel 4 needs 10 bytes beside 170 in use, over the limit of 179"
    with pytest.raises(OutOfMemory) as caught:  # which counts the plan's evictions
        simulate(PROGRAM, SWAP_PLAN, MACHINE, 139)
    assert (caught.value.kernel, caught.value.requested, caught.value.used) == (4, 10, 130)


@given(st.data())
def test_the_order_of_the_decisions_has_no_meaning(data):
    program = data.draw(programs() | networks())
    plan, machine = data.draw(plans(program)), data.draw(machines())
    decisions = tuple(data.draw(st.permutations(plan.decisions)))
    limit = lower(program, plan).required_bytes
    expected = rules.simulate(program, plan, machine, limit)
    for run in (rules.simulate, engine.simulate):
        assert run(program, Plan(decisions), machine, limit) == expected
