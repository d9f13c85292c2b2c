"""Tests TENSILE: schedules computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import agents
from agents.heuristics.tensile import TENSILE
from simulator import Kernel, Program, Recompute, Swap, Tensor, simulate
from tests import programs
from tests.agents.planned import planned
from tests.programs import BYTE_PER_NS
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM, W


def straight(tensors: list[Tensor], uses: list[tuple[str, str]], durations: list[int], peak: int) -> Program:
    """Builds a program whose kernel k accesses the tensors in uses[k]; kernel ``peak`` has 50 bytes of workspace."""
    index = {t.name: i for i, t in enumerate(tensors)}
    kernels = tuple(
        Kernel(
            f"k{k}",
            "other",
            "forward",
            tuple(index[c] for c in reads),
            tuple(index[c] for c in writes),
            durations[k],
            workspace=50 * (k == peak),
            recomputable=False,
        )
        for k, (reads, writes) in enumerate(uses)
    )
    return Program("straight", tuple(tensors), kernels)


# a (30 bytes) and b (20) are idle around the peak, k3.
#   time      0   10   20         80   90        120       150  160  170
#   compute   |k0 |k1 |    k2     |k3  |    k4    |    k5   |k6  |k7 |
#   uses       a   b                                         b    a
#   channel       |-- a out --|b out|       ...   |b in|--- a in --|
#                 10         40    60            110  130         160
USES = [("", "a"), ("", "b"), ("", ""), ("", ""), ("", ""), ("", ""), ("b", ""), ("a", "")]
TWO = straight([Tensor("a", 30), Tensor("b", 20)], USES, [10, 10, 60, 10, 30, 30, 10, 10], peak=3)


def test_swaps_lie_in_the_free_intervals_of_the_channel() -> None:
    assert TWO.live_bytes == (30, 50, 50, 100, 50, 50, 50, 30)
    # The largest first: a leaves at once, [10, 40), and returns as late as possible, [130, 160). b cannot leave
    # at 20: the channel is free at 40, [40, 60), while k2 runs, which began when k1 ended. It would return in
    # [130, 150), but for a: [110, 130). The last kernels that end by 130 and 110 are k4 and k3.
    planner = agents.make("tensile", min_bytes=1)
    plan = planner.plan(TWO, BYTE_PER_NS, 50)
    assert plan.decisions == (Swap(0, 0, 7, prefetch=4), Swap(1, 1, 6, prefetch=3))
    assert simulate(TWO, plan, BYTE_PER_NS, 50).iteration_ns == TWO.ideal_ns  # nothing waits
    # One swap is enough for 70 bytes, and none for 100.
    assert planner.plan(TWO, BYTE_PER_NS, 70).decisions == (Swap(0, 0, 7, prefetch=4),)
    assert planner.plan(TWO, BYTE_PER_NS, 100).decisions == ()


def test_a_tensor_leaves_while_it_is_read() -> None:
    # Written until 10, read until 110, when the peak begins: the copy is made during the read.
    program = programs.straight(
        programs.activations(100, 100), ((), (0,), 10), ((0,), (), 100), ((), (1,), 10), ((), (), 200), ((0,), (), 10)
    )
    plan = planned("tensile", program, BYTE_PER_NS, 100, mode="swap")
    assert plan.decisions == (Swap(0, 1, 4, prefetch=2, copy=0),)
    assert simulate(program, plan, BYTE_PER_NS, 100).iteration_ns == program.ideal_ns


def test_recomputation_comes_when_swaps_do_not_succeed() -> None:
    # After w (above) the peak is 170. a1 and a2 are open at it, both of MSPS 40 bytes / 10 ns: the first.
    plan = planned("tensile", PROGRAM, MACHINE, LIMIT)
    assert plan.decisions == (Swap(W, 0, 7, prefetch=5, copy=7), Recompute(A1, 1, 6))
    assert planned("tensile", PROGRAM, MACHINE, 170).decisions == plan.decisions[:1]
    recompute_plan = planned("tensile", PROGRAM, MACHINE, LIMIT, mode="recompute")
    assert recompute_plan.decisions == (Recompute(A1, 1, 6),)
    # With f1 of 40 ns a1 saves 1 byte a nanosecond, a2 still 4.
    slower = PROGRAM.with_durations([40, *(k.duration_ns for k in PROGRAM.kernels[1:])])
    plan = planned("tensile", slower, MACHINE, LIMIT, mode="recompute")
    assert plan.decisions == (Recompute(A2, 2, 5),)


def test_the_copy_on_the_host_serves_the_rest_of_the_accesses() -> None:
    # The peak k2 [70, 80) lies between k0 and k4. Its copy being good, x leaves again when k4 has ended, up to k7, with
    # a swap-in alone.
    uses = [("", "x"), ("", ""), ("", ""), ("", ""), ("x", ""), ("", ""), ("", ""), ("x", "")]
    durations = [10, 60, 10, 30, 10, 30, 30, 10]
    program = straight([Tensor("x", 20)], uses, durations, peak=2)
    # Gap 0-4: out [10, 30), in [90, 110), issued by k2 (ends 80). Gap 4-7: [120, 180): in [160, 180), by k5 (150).
    plan = planned("tensile", program, BYTE_PER_NS, 50)
    assert plan.decisions == (Swap(0, 0, 4, prefetch=2), Swap(0, 4, 7, prefetch=5))
    spans = simulate(program, plan, BYTE_PER_NS, 50).spans
    assert [s.kind for s in spans if s.stream != "compute"].count("swap_out") == 2  # once in each of two iterations
    # Written by k4, it would need a second swap-out: it stays.
    uses[4] = ("x", "x")
    program = straight([Tensor("x", 20)], uses, durations, peak=2)
    assert planned("tensile", program, BYTE_PER_NS, 50).decisions == plan.decisions[:1]


@pytest.mark.parametrize(
    ("ratio", "host", "swapped", "least"),
    [
        (0.5, 10**9, {0}, 70),
        (0.0, 10**9, set(), 100),
        (1.0, 29, {1}, 80),
        (1.0, 10**9, {0, 1}, 50),
    ],
)
def test_the_ratio_and_the_host_bound_what_is_swapped(ratio: float, host: int, swapped: set, least: int) -> None:
    planner = TENSILE(min_bytes=1, max_swap_ratio=ratio)
    machine = replace(BYTE_PER_NS, host_bytes=host)
    assert {d.tensor for d in planner.plan(TWO, machine, least).decisions} == swapped
    with pytest.raises(agents.Infeasible, match=f"{least} bytes"):
        planner.plan(TWO, machine, least - 1)


def test_the_largest_tensor_of_all_jobs_goes_first() -> None:
    # TWO needs 100 bytes at its peak, the other 110. At 200 the 40 bytes of its a go, though 30 or 20 would do.
    larger = straight([Tensor("a", 40), Tensor("b", 20)], USES, [10, 10, 60, 10, 30, 30, 10, 10], peak=3)
    planner = TENSILE(min_bytes=1)
    small, large = planner.plan_jobs([TWO, larger], BYTE_PER_NS, 200)
    assert small.decisions == () and [d.tensor for d in large.decisions] == [0]
    assert (small.limit, large.limit) == (130, 100)  # each gets what the other job leaves
    small, large = planner.plan_jobs([TWO, larger], BYTE_PER_NS, 100)
    assert {d.tensor for d in small.decisions} == {d.tensor for d in large.decisions} == {0, 1}
    with pytest.raises(agents.Infeasible, match="100 bytes"):
        planner.plan_jobs([TWO, larger], BYTE_PER_NS, 99)
    first, second = TENSILE(min_bytes=1, max_swap_ratio=[0.5, 1.0]).plan_jobs([TWO, TWO], BYTE_PER_NS, 120)
    assert {d.tensor for d in first.decisions} == {0} and {d.tensor for d in second.decisions} == {0, 1}
    with pytest.raises(ValueError, match="one for each of 2 jobs, got 3"):
        TENSILE(max_swap_ratio=[1, 1, 1]).plan_jobs([TWO, TWO], BYTE_PER_NS, 120)


def test_the_jobs_share_the_channel() -> None:
    # Alone each takes 100 of 170 ns of it. Two in 170 ns have no room for both; in 340 ns each they have.
    tight = [list(TWO.start_ns)] * 2
    planner = TENSILE(min_bytes=1)
    with pytest.raises(agents.Infeasible):
        planner.plan_jobs([TWO, TWO], BYTE_PER_NS, 100, tight)
    assert all(len(plan.decisions) == 2 for plan in planner.plan_jobs([TWO, TWO], BYTE_PER_NS, 100))
