"""Tests hand-computed cases for the rules of RULES.md, one by one, for both simulators.

One byte takes one nanosecond to copy, except where a test states otherwise. Spans are written
(kernel or tensor, start, end); memory is (time, bytes in use after the change).
"""

from dataclasses import replace

import pytest

from simulator import Gap, Machine, Plan, Recompute, Swap, Tensor
from simulator.residency import recompute_ns, reruns
from simulator.schedule import lower
from simulator.timeline import Breakdown
from tests.programs import activations, compute, straight, work
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM, RECOMPUTE_PLAN, SWAP_PLAN

ONE_ENGINE = replace(MACHINE, copy_engines=1)
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


def test_workspace_is_held_while_the_kernel_runs(simulate):
    program = straight(activations(10), ((), (0,), 5, 7), ((0,), (), 5, 20))
    timeline = simulate(program, Plan(), MACHINE, 30, iterations=1)
    assert timeline.memory == ((0, 0), (0, 17), (5, 10), (5, 30), (10, 0))  # the last: workspace and tensor at once


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


def test_a_transfer_takes_latency_and_bytes_over_bandwidth_rounded_up(simulate):
    # 10 bytes at 3 bytes/ns: 3.33 -> 4, at 4 bytes/ns: 2.5 -> 3; both after 2 ns.
    machine = Machine("m", 100, 4 * 10**9, 3 * 10**9, d2h_latency_ns=2, h2d_latency_ns=2)
    program = straight(activations(10), ((), (0,), 10), ((), (), 50), ((0,), (), 10))
    timeline = simulate(program, Plan((Swap(0, 0, 2),)), machine, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(0, 10, 16)] and work(timeline, "swap_in") == [(0, 16, 21)]


def test_swap_outs_are_first_in_first_out(simulate):
    # Tensors 0, 1 and 2 are born in k0. 1 is swapped out after k0; 0 and 2, both after k1, wait for it, 0 first.
    program = straight(activations(10, 30, 10), ((), (0, 1, 2), 10), ((), (), 10), ((), (), 100), ((0, 1, 2), (), 10))
    plan = Plan((Swap(2, 1, 3), Swap(0, 1, 3), Swap(1, 0, 3)))
    timeline = simulate(program, plan, MACHINE, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(1, 10, 40), (0, 40, 50), (2, 50, 60)]


X_USED_THREE_TIMES = [((), (0,), 20), ((), (), 20), ((0,), (), 20), ((), (), 20), ((0,), (), 20)]
X_TWICE_AWAY = Plan((Swap(0, 0, 2), Swap(0, 2, 4)))


def test_a_valid_host_copy_is_released_at_once(simulate):
    program = straight(activations(10), *X_USED_THREE_TIMES)
    timeline = simulate(program, X_TWICE_AWAY, MACHINE, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(0, 20, 30)]
    assert work(timeline, "swap_in") == [(0, 30, 40), (0, 60, 70)]
    assert timeline.memory == ((0, 0), (0, 10), (30, 0), (30, 10), (60, 0), (60, 10), (100, 0))


def test_a_written_tensor_is_copied_again(simulate):
    lines = list(X_USED_THREE_TIMES)
    lines[2] = ((0,), (0,), 20)  # in place
    timeline = simulate(straight(activations(10), *lines), X_TWICE_AWAY, MACHINE, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(0, 20, 30), (0, 60, 70)]
    assert work(timeline, "swap_in") == [(0, 30, 40), (0, 70, 80)]


SYNC_PLAN = Plan((Swap(A1, 1, 6, sync=True),))


def test_compute_waits_for_a_synchronous_swap_out(simulate):
    """Everything fits, but f3 waits for the swap-out of a1 [20, 60); its swap-in is [60, 100), long before b2."""
    timeline = simulate(PROGRAM, SYNC_PLAN, MACHINE, PLENTY, iterations=1)
    assert compute(timeline) == [
        (0, 0, 10), (1, 10, 20), (2, 60, 70), (3, 70, 80), (4, 80, 100), (5, 100, 120), (6, 120, 140), (7, 140, 160),
    ]  # fmt: skip
    assert work(timeline, "swap_out") == [(A1, 20, 60)] and work(timeline, "swap_in") == [(A1, 60, 100)]
    assert timeline.breakdown == Breakdown(120, 0, 40, 0, 40)
    assert timeline.required_bytes == simulate(PROGRAM, SWAP_PLAN, MACHINE, PLENTY).required_bytes


@pytest.mark.parametrize(("machine", "y_leaves", "rest", "breakdown"), [
    # Both end before x is resident: all of [60, 90) is a stall for data. Then k4 waits for y [100, 110).
    (MACHINE, (60, 80), [(3, 90, 100), (4, 110, 120)], Breakdown(80, 0, 0, 40, 80)),
    # The swap-out of y starts when x is resident: [90, 110) is a stall for memory.
    (ONE_ENGINE, (90, 110), [(3, 110, 120), (4, 130, 140)], Breakdown(80, 0, 20, 40, 60)),
])  # fmt: skip
def test_a_synchronous_swap_out_beside_a_swap_in(simulate, machine, y_leaves, rest, breakdown):
    """Tensor x (40 bytes): out [10, 50), in [50, 90) for k3. y (20 bytes): out after k2, which ends at 60."""
    program = straight(
        activations(40, 20), ((), (0,), 10), ((), (), 40), ((), (1,), 10), ((0,), (), 10), ((1,), (), 10)
    )
    plan = Plan((Swap(0, 0, 3), Swap(1, 2, 4, sync=True)))
    timeline = simulate(program, plan, machine, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(0, 10, 50), (1, *y_leaves)]
    assert compute(timeline)[3:] == rest and timeline.breakdown == breakdown


# ----------------------------------------------------------------------- rules 5 and 6: swapping in


def test_a_swap_in_waits_until_it_fits_at_every_kernel_to_its_use(simulate):
    """Under 180 bytes f4 need not wait; a1 is swapped in [60, 100), after b4 ends."""
    timeline = simulate(PROGRAM, SWAP_PLAN, MACHINE, 180, iterations=1)
    assert work(timeline, "swap_in") == [(A1, 60, 100)]
    assert compute(timeline)[-3:] == [(5, 60, 80), (6, 100, 120), (7, 120, 140)]
    assert timeline.breakdown == Breakdown(120, 0, 0, 20, 60)


def test_prefetch_pins_the_swap_in(simulate):
    """The swap-in of the previous test is issued at the end of b3 (80), not when it fits (60)."""
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


def test_a_kernel_waits_for_its_evicted_input(simulate):
    """Under 140 bytes a1 (40) fits beside neither b4 (140) nor b3 (110): it is swapped in when b2 needs it, at 110."""
    timeline = simulate(PROGRAM, SWAP_PLAN, MACHINE, 140, iterations=1)
    assert work(timeline, "swap_in") == [(A1, 110, 150)]
    assert compute(timeline)[5:] == [(5, 90, 110), (6, 150, 170), (7, 170, 190)]
    assert timeline.breakdown == Breakdown(120, 0, 30, 40, 10)


# ------------------------------------------------------------------------------ rule 7: recomputing

# k0: p -> a, k1: a -> b, k2: b -> c, k3: a marker of 10 ns, k4 reads c, k5 reads b, k6 reads a.
P, A, B, C = range(4)
CHAIN = straight(
    [Tensor("p", 5, "parameter", True), *activations(10, 10, 10)],
    ((P,), (A,), 10), ((A,), (B,), 10), ((B,), (C,), 10), ((), (), 10), ((C,), (), 10), ((B,), (), 10), ((A,), (), 10),
)  # fmt: skip


def test_recomputation(simulate):
    """f1 is recomputed for b2 in 10 ns; nothing waits."""
    timeline = simulate(PROGRAM, RECOMPUTE_PLAN, MACHINE, LIMIT)
    assert compute(timeline)[5:8] == [(5, 60, 80), (0, 80, 90), (6, 90, 110)]
    assert timeline.breakdown == Breakdown(120, 10, 0, 0, 0) and timeline.iteration_ns == 130


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


def test_a_speed_centric_chain(simulate):
    """With ``keep``, tensors recovered on the way for k4 stay, so that k5 and k6 need no chain."""
    plan = Plan((Recompute(A, 1, 6), Recompute(B, 2, 5), Recompute(C, 2, 4, keep=True)))
    timeline = simulate(CHAIN, plan, MACHINE, 35, iterations=1)
    assert work(timeline, "recompute") == [(0, 40, 50), (1, 50, 60), (2, 60, 70)]
    assert timeline.memory[6:] == ((40, 15), (50, 25), (60, 35), (80, 25), (90, 15), (100, 5))
    assert timeline.breakdown == Breakdown(70, 30, 0, 0, 0) and timeline.required_bytes == 35


def test_a_chain_fetches_what_is_on_the_host_and_it_stays(simulate):
    """The swap-in of a is pinned after k5, but the chain of k4 needs it at 40; k6 finds it resident."""
    plan = Plan((Swap(A, 1, 6, prefetch=5), Recompute(B, 2, 5), Recompute(C, 2, 4)))
    timeline = simulate(CHAIN, plan, MACHINE, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(A, 20, 30)] and work(timeline, "swap_in") == [(A, 40, 50)]
    assert work(timeline, "recompute") == [(1, 50, 60), (2, 60, 70), (1, 80, 90)]
    assert compute(timeline)[-1] == (6, 100, 110)


def test_kept_tensors_have_their_current_content(simulate):
    """k1 makes y from x (k0), then k2 updates x. For k4 y is recomputed from k0's x; k5 reads the x of k0 and k2."""
    program = straight(
        activations(10, 10),
        ((), (0,), 10), ((0,), (1,), 10), ((0,), (0,), 10), ((), (), 10), ((1,), (), 10), ((0,), (), 10),
    )  # fmt: skip
    plan = Plan((Recompute(0, 2, 5), Recompute(1, 1, 4, keep=True)))
    timeline = simulate(program, plan, MACHINE, PLENTY, iterations=1)
    assert compute(timeline)[4:] == [
        (0, 40, 50), (1, 50, 60), (4, 60, 70), (0, 70, 80), (2, 80, 90), (5, 90, 100),
    ]  # fmt: skip
    assert [(s.kernel, s.before) for s in lower(program, plan).steps if s.again] == [(0, 4), (1, 4), (0, 5), (2, 5)]


def test_what_the_kernel_itself_overwrites_is_read_before(simulate):
    """k3 reads y and overwrites x, from which k1 recomputes y for it; k0 is not recomputed."""
    program = straight(activations(10, 10), ((), (0,), 10), ((0,), (1,), 10), ((), (), 10), ((1,), (0,), 10))
    timeline = simulate(program, Plan((Recompute(1, 1, 3),)), MACHINE, PLENTY, iterations=1)
    assert compute(timeline)[3:] == [(1, 30, 40), (3, 40, 50)]


def test_recomputations_run_in_order():
    """k1 and k8 write t from x (k0), which is resident; if x is dropped, k0 is recomputed, too."""
    lines = [((), (), 10) for _ in range(11)]
    lines[0], lines[1], lines[8], lines[10] = ((), (0,), 10), ((0,), (1,), 10), ((1,), (1,), 10), ((0, 1), (), 10)
    program = straight(activations(10, 10), *lines)
    assert reruns(program, {1}, 10) == [1, 8]
    assert reruns(program, {1}, 10, {0}) == [0, 1, 8]
    assert recompute_ns(program, Gap(1, 8, 10)) == 20


def test_a_chain_waits_for_a_synchronous_swap_out(simulate):
    """Swap-out of a when k3 ends [40, 50); the chain of k4, which does not read it, starts after that."""
    plan = Plan((Swap(A, 3, 6, sync=True), Recompute(C, 2, 4)))
    timeline = simulate(CHAIN, plan, MACHINE, PLENTY, iterations=1)
    assert work(timeline, "swap_out") == [(A, 40, 50)]
    assert compute(timeline)[3:] == [(3, 30, 40), (2, 50, 60), (4, 60, 70), (5, 70, 80), (6, 80, 90)]
    assert timeline.breakdown == Breakdown(70, 10, 10, 0, 10)


def test_inputs_that_changed_are_rebuilt_as_they_were(simulate):
    """After y = k1(x), k2 updates x in place: y needs the x of k0, in memory of the pass."""
    program = straight(
        activations(10, 4),
        ((), (0,), 5), ((0,), (1,), 5), ((0,), (0,), 5), ((1,), (), 5), ((0,), (), 5),
    )  # fmt: skip
    timeline = simulate(program, Plan((Recompute(1, 1, 3),)), MACHINE, PLENTY, iterations=1)
    assert compute(timeline)[3:6] == [(0, 15, 20), (1, 20, 25), (3, 25, 30)]
    # x; y; y dropped; x again beside x, y, the second x freed; y dies; x dies
    assert timeline.memory == ((0, 0), (0, 10), (5, 14), (10, 10), (15, 20), (20, 24), (25, 14), (30, 10), (35, 0))


def test_every_writer_is_recomputed(simulate):
    """k0 writes x, and k1, which has a workspace, updates it in place."""
    program = straight(activations(10), ((), (0,), 5), ((0,), (0,), 5, 3), ((), (), 5), ((0,), (), 5))
    timeline = simulate(program, Plan((Recompute(0, 1, 3),)), MACHINE, 13, iterations=1)
    assert compute(timeline)[3:] == [(0, 15, 20), (1, 20, 25), (3, 25, 30)]
    assert timeline.memory[4:] == ((15, 10), (20, 13), (25, 10), (30, 0))
