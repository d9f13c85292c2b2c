"""Plans that PyTorch's allocator serves within the card's memory."""

from experiments.plan import on_card
from experiments.plan.__main__ import tightened
from experiments.plan.summary import Best
from simulator import Machine, simulate
from simulator.plan import Plan, Swap
from simulator.pool.card import CardPeak, under_plan
from simulator.program import Kernel, Program, Tensor

MIB = 2**20
GPU = Machine("g", 2**34, 10**12, 10**12, copy_latency_ns=0)


def program() -> Program:
    """An activation waits from the first kernel to the last, while others come and go."""
    tensors = tuple(Tensor(f"t{i}", 12 * MIB, "activation", False) for i in range(5))
    kernels = (
        Kernel("first", "other", "forward", (), (0,), 10**6),
        *(Kernel(f"k{i}", "other", "forward", (i - 1,) if i > 1 else (), (i,), 10**6) for i in range(1, 5)),
        Kernel("last", "other", "backward", (0, 4), (), 10**6),
    )
    return Program("waits", tensors, kernels)


def card(step: Program, memory: int) -> CardPeak:
    return CardPeak(step.peak_bytes, 0, 0, 0, 0, memory, False)


def test_families_are_judged_by_what_the_allocator_serves():
    step = program()
    plan = Plan((Swap(0, 0, 5),))
    timeline = simulate(step, plan, GPU, step.peak_bytes)
    families = [Best("with", {}, plan, timeline, 0.0), Best("without", None, None, None, 0.0)]
    assert [b.served for b in families] == [True, False]
    counted = under_plan(card(step, step.peak_bytes), timeline)
    assert on_card.judged(families, card(step, counted[0]))[0].card == (counted[0], True)
    small = on_card.judged(families, card(step, counted[0] - 2 * MIB))
    assert not small[0].served and small[1] is families[1]
    assert on_card.judged(families, None) == families
    assert on_card.wants_less(small) and not on_card.wants_less(families)
    dearer = simulate(step, Plan((Swap(0, 0, 5, sync=True),)), GPU, step.peak_bytes)
    assert dearer.overhead < timeline.overhead + 0.01  # so that it is not worth another plan
    assert not on_card.wants_less([small[0], Best("served", {}, plan, dearer, 0.0)])


def test_where_none_is_served_less_memory_is_planned_with():
    step = program()
    room = 26 * MIB  # of 24 that two tensors take
    task = step, GPU, 36 * MIB  # within which the step runs as it is, and its allocator takes as much
    found = tightened(task, card(step, room), "joint", 0, 2.0)
    assert found is not None and found.served and found.family == on_card.FAMILY
    assert found.card[0] <= room and found.timeline.peak_bytes < step.peak_bytes
    assert tightened(task, card(step, 10 * MIB), "joint", 0, 2.0) is None
