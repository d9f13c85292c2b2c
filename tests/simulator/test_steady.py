"""Tests rule 10 of RULES.md: a simulation continues until its iterations repeat."""

from dataclasses import replace

from simulator import Plan, Swap, Tensor
from tests.programs import straight, work
from tests.simulator.test_reference import PLENTY
from tests.tiny import MACHINE

# Three swap-outs of 1001 ns each, in iterations of 3000 ns: the queue grows by 3 ns per iteration, and kernels wait
# after some 1000 ns.
NEVER_STEADY = (
    straight([Tensor(f"p{i}", 1001, "parameter", True) for i in range(3)], *(((i,), (i,), 1000) for i in range(3))),
    Plan(tuple(Swap(i, i, i) for i in range(3))), replace(MACHINE, h2d_bytes_per_s=10**12), 10**4,
)  # fmt: skip


def test_iterations_that_repeat_in_turn(simulate):
    """k0 [20 ns] reads p1 (40 bytes), k2 [10 ns] updates p0 (20 bytes) after k1 [30 ns].

    At 100 p1 is resident and p0 is swapped out [100, 120), so that p0 is swapped in first [120, 140), then p1 [140,
    180). The iteration ends at 160. k0 waits for p1 until 180; meanwhile p0 is swapped out [160, 180) and in [180,
    200), so that p1 follows as soon as k0 has ended [200, 240). The iteration ends at 240 in the state of 100.
    """
    program = straight(
        [Tensor("p0", 20, "parameter", True), Tensor("p1", 40, "parameter", True)],
        ((1,), (), 20), ((), (), 30), ((0,), (0,), 10),
    )  # fmt: skip
    plan = Plan((Swap(0, 2, 2), Swap(1, 0, 0)))
    for iterations, boundaries in ((1, (100, 160, 240)), (4, (100, 160, 240, 300, 380))):  # 60, 80, 60, 80
        timeline = simulate(program, plan, MACHINE, PLENTY, iterations)
        assert timeline.boundaries == boundaries
        assert (timeline.iteration_ns, timeline.period, timeline.steady) == (80, 2, False)
    assert work(timeline, "swap_in")[2:6] == [(1, 60, 100), (0, 120, 140), (1, 140, 180), (0, 180, 200)]


def test_a_simulation_that_does_not_become_steady(simulate):
    early = simulate(*NEVER_STEADY, iterations=1)
    assert (len(early.boundaries), early.iteration_ns, early.period) == (64, 3000, 0)
    late = simulate(*NEVER_STEADY, iterations=400)
    assert (len(late.boundaries), late.iteration_ns, late.steady) == (400, 3003, True)
