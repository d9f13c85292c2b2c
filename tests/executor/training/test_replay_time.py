"""Tests the predicted time of a replay by hand: kernels and copies in issue order, joined at the end."""

from dataclasses import replace

import pytest

from executor.training.issue_order import order
from executor.training.replay_time import replay_ns
from simulator import Kernel, Machine, Plan, Program, Swap, Tensor, simulate
from simulator.schedule import lower

# One byte per ns and direction, no latency.
FAST = Machine("test", 2**20, 10**9, 10**9, 0, 0, launch_ns=0)
PROGRAM = Program(
    "update",
    (Tensor("state", 1000, "optimizer_state", True), Tensor("gradient", 8)),
    (
        Kernel("backward", "matmul", "backward", (), (1,), 5000),
        Kernel("update", "elementwise", "optimizer", (0, 1), (0,), 5000),
        Kernel("norm", "elementwise", "optimizer", (), (), 5000),
    ),
)
PLAN = Plan((Swap(0, 1, 1),), PROGRAM.fingerprint)


@pytest.mark.parametrize(
    ("share", "total_ns", "after_ns"),
    [
        (1.0, 15_000, 0),  # the swap-out from 10,000 to 11,000, beside the norm
        (0.5, 15_000, 0),  # the swap-in is issued before the kernel that ran when the simulated one began
        (0.1, 25_000, 5000),  # the swap-in until 10,000, the update until 15,000, the swap-out until 25,000
    ],
)
def test_copies_at_the_end_are_part_of_a_replay(share, total_ns, after_ns):
    schedule = lower(PROGRAM, PLAN)
    timeline = simulate(PROGRAM, PLAN, FAST, 1008, schedule=schedule)
    assert timeline.iteration_ns == 15_000
    issued = order(schedule, timeline, graph=True)
    assert replay_ns(issued, timeline, FAST.with_link(share)) == (total_ns, after_ns)


def test_both_directions_share_the_link():
    """Copies of both directions take longer together, and longest on one engine."""
    program = replace(PROGRAM, tensors=(*PROGRAM.tensors, Tensor("other", 1000, "optimizer_state", True)))
    kernels = (*program.kernels[:2], Kernel("second", "elementwise", "optimizer", (2,), (2,), 1000))
    program = replace(program, kernels=kernels)
    plan = Plan((Swap(0, 1, 1), Swap(2, 2, 2)), program.fingerprint)
    schedule = lower(program, plan)
    timeline = simulate(program, plan, FAST, 2008, schedule=schedule)
    issued = order(schedule, timeline, graph=True)
    alone = replay_ns(issued, timeline, FAST.with_link(0.05))
    duplex = replace(FAST, duplex_h2d_bytes_per_s=5 * 10**8, duplex_d2h_bytes_per_s=5 * 10**8)
    shared = replay_ns(issued, timeline, duplex.with_link(0.05))
    one_engine = replay_ns(issued, timeline, replace(FAST, copy_engines=1).with_link(0.05))
    assert alone < shared and alone < one_engine
