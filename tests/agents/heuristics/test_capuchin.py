"""Tests Capuchin against free times, lanes and MSPS computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import agents
from agents.heuristics import capuchin
from agents.heuristics.capuchin import PolicyMaker
from simulator import Gap, Plan, Recompute, Swap, simulate
from simulator.compiled.engine import Engine
from tests.agents.heuristics.test_autoswap import straight
from tests.agents.planned import planned
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM, W


def policy(mode: str = "joint") -> PolicyMaker:
    return PolicyMaker(Engine(PROGRAM, MACHINE, LIMIT), mode, 1)


def overhead_ns(plan: Plan) -> int:
    return simulate(PROGRAM, plan, MACHINE, LIMIT).iteration_ns - PROGRAM.ideal_ns


# Candidates w (0, 7), a1 (1, 6), a2 (2, 5): open at f4 or b4, the kernels above 150 bytes, by 20 and by 30.
w = 0
a1 = 1
a2 = 2


def test_free_times_lanes_and_overheads_by_hand() -> None:
    maker = policy()
    assert maker.gaps == [Gap(W, 0, 7), Gap(A1, 1, 6), Gap(A2, 2, 5)]
    # Back-access less swap-in time, less end of the evicted-access and swap-out time:
    # (100 - 10) - (10 + 10), (80 - 40) - (20 + 40), (60 - 40) - (30 + 40)
    assert maker.free.tolist() == [70, -20, -50]
    assert list(maker.can_swap) == [w, a1, a2]
    # A lane carries one transfer at a time. Out: w 10-20, a1 20-60, then a2, evicted at 30, 60-100. In, from the last:
    # w 90-100, a1 40-80, a2 0-40 where alone it would start at 20.
    assert [lane.tolist() for lane in maker.lanes([w, a1, a2])] == [[20, 60, 100], [90, 40, 0]]
    # w has left at 20, before f4 at 30, and need not start back before 90, after b4 has ended at 60.
    assert maker.overhead([w]) == max(20 - 90, 20 - 30, 60 - 90)
    # a1 is out at 60, f4 would start at 30: 30 ns; its way back begins at 40, b4 ends at 60: 20 ns. The simulator
    # agrees: 50 ns are what the docstring of tests.tiny proves for the swap of a1.
    assert maker.overhead([a1]) == 50
    maker.swaps = [w]
    assert maker.swap_ns(a1) == 50
    # With a2 recomputed nothing of a1 is needed at the peak; the transfers still take 20 ns more than the gap.
    maker.recomputed = [a2]
    assert maker.overhead([a1]) == 20


def test_msps_is_updated_when_a_source_or_a_user_is_chosen() -> None:
    maker = policy()
    assert [maker.recompute_ns(i) for i in (a1, a2)] == [10, 10]  # f1 from w; f2 from a1
    assert maker.msps(a1) == 4.0  # 40 bytes in 10 ns
    maker.try_adding(a1, maker.recomputed, maker.can_recompute)
    assert maker.recompute_ns(a2) == 20  # a1 is evicted at b3 now: f1 and f2
    maker = policy()
    maker.try_adding(a2, maker.recomputed, maker.can_recompute)
    assert maker.recompute_ns(a1) == 20  # for itself, and again in the chain of a2
    assert maker.msps(a1) == 2.0


def test_hybrid_swaps_what_is_hidden_and_recomputes_what_is_cheaper() -> None:
    # w is hidden; 10 and 20 bytes are left. a1 by swap costs 50 ns, recomputing a1 costs f1, 10 ns.
    # w's swap-in should start at 90: the last kernel to end by then is b3 (5), at 80.
    plan = planned("capuchin", PROGRAM, MACHINE, LIMIT, rounds=1)
    assert plan.decisions == (Swap(W, 0, 7, prefetch=5), Recompute(A1, 1, 6))
    # f1 is recomputed at 80 for b2 and waits from 80 to 90 for its input w: feedback moves the trigger to b4 (4).
    assert overhead_ns(plan) == 20
    plan = planned("capuchin", PROGRAM, MACHINE, LIMIT)
    assert plan.decisions == (Swap(W, 0, 7, prefetch=4), Recompute(A1, 1, 6))
    assert overhead_ns(plan) == 10  # the optimum of tests.tiny


def test_feedback_moves_a_late_trigger_earlier() -> None:
    # Kernels of 10 ns; tensor 0 (20 bytes) is needed gone at kernel 3, tensor 1 (20 bytes) at kernel 10.
    gaps = [(0, 8), (5, 13)]
    program = straight(gaps, [20, 20], [10] * 14, [30 if k in (3, 10) else 0 for k in range(14)])
    machine = replace(MACHINE, copy_engines=1)
    # Tensor 0 must start back at 60, when kernel 5 ends. On the one engine the swap-out of tensor 1 goes first, 60-80,
    # and kernel 8 waits from 80 to 100. A step of 5 % (1 ns) makes it kernel 4: 50-70, and tensor 1 leaves 70-90.
    first = planned("capuchin", program, machine, 40, rounds=1)
    assert first.decisions == (Swap(0, 0, 8, prefetch=5), Swap(1, 5, 13, prefetch=10))
    assert simulate(program, first, machine, 40).iteration_ns == 140 + 20
    planner = agents.make("capuchin", min_bytes=1)
    plan = planner.plan(program, machine, 40)
    assert plan.decisions == (Swap(0, 0, 8, prefetch=4), Swap(1, 5, 13, prefetch=10))
    assert simulate(program, plan, machine, 40).iteration_ns == 140
    assert planner.simulator_calls == 1 + 2 + 1  # before, two rounds of feedback, the last check


def test_layer_by_layer_ignores_later_tensors() -> None:
    a2 = capuchin.feature_maps(PROGRAM, 1)[1]
    # After f2 and before b3, a3, a4 and g4 are first accessed.
    partial = capuchin.program_up_to(PROGRAM, a2)
    assert [t.name for t in partial.tensors if not t.nbytes] == ["a3", "a4", "g4"]
    # Up to a2's layer everything fits; in the whole step, 30 bytes are missing. Dropping a1 costs f1, 10 ns.
    plan = planned("capuchin", PROGRAM, MACHINE, LIMIT, policy="layers")
    assert plan.decisions == (Recompute(A1, 1, 6),) and overhead_ns(plan) == 10
    swaps = planned("capuchin", PROGRAM, MACHINE, LIMIT, policy="layers", mode="swap")
    assert swaps.decisions == (Swap(A1, 1, 6),) and overhead_ns(swaps) == 50
    with pytest.raises(agents.Infeasible):
        planned("capuchin", PROGRAM, MACHINE, 80, policy="layers")  # f2 needs w, a1 and a2
