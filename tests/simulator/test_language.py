"""Tests hand-computed cases of plan/2: early copies, early recomputation, reruns, and the link."""

from dataclasses import replace

import pytest

from simulator import Engine, Plan, PlanError, Recompute, Rerun, Swap
from simulator.compiled.engine import NEVER, rows_of
from simulator.schedule import lower
from tests.programs import activations, parameter, straight, work
from tests.simulator.test_reference import PLENTY
from tests.simulator.test_steady import NEVER_STEADY
from tests.tiny import MACHINE

# w writes a, r1 reads it for 100 ns, big needs the memory, x is long, r2 reads a again.
READ_MEANWHILE = straight(
    activations(100, 100), ((), (0,), 10), ((0,), (), 100), ((), (1,), 10), ((), (), 200), ((0,), (), 10)
)
LINE = straight(  # a, b of a, a pause, b is read, a is read
    activations(10, 20), ((), (0,), 10), ((0,), (1,), 10), ((), (), 5), ((1,), (), 10), ((0,), (), 10)
)


# ------------------------------------------------------------------------------------------ Swap.copy


def test_a_copy_is_made_while_the_tensor_is_read(simulate):
    late = simulate(READ_MEANWHILE, Plan((Swap(0, 1, 4),)), MACHINE, 100)
    early = simulate(READ_MEANWHILE, Plan((Swap(0, 1, 4, copy=0),)), MACHINE, 100)
    assert (late.iteration_ns, early.iteration_ns) == (430, 330)
    assert work(early, "swap_out")[0] == (0, 10, 110) and work(early, "swap_in")[0] == (0, 120, 220)


@pytest.mark.parametrize(
    ("swap", "reason"),
    [
        (Swap(0, 1, 4, copy=9), "there is no kernel 9"),
        (Swap(0, 1, 4, copy=2), "not from the birth of tensor 0 up to kernel 1"),
        (Swap(1, 3, 5, copy=1), "tensor 1 is written between the end of kernel 1 and that of 3"),
        (Swap(1, 3, 5, copy=2), None),
        (Swap(1, 3, 5, copy=3), None),
    ],
)
def test_a_copy_is_of_the_present_content(swap, reason):
    program = straight(
        activations(10, 10),
        ((), (0,), 1),
        ((0,), (1,), 1),
        ((1,), (1,), 1),
        ((1,), (), 1),
        ((0,), (), 1),
        ((1,), (), 1),
    )
    if reason is None:
        return Plan((swap,)).check(program)
    with pytest.raises(PlanError, match=rf"decisions\[0\].copy: .*{reason}"):
        Plan((swap,)).check(program)


def test_an_early_copy_needs_a_resident_tensor():
    program = straight(activations(10), ((), (0,), 1), ((), (), 1), ((0,), (), 1), ((), (), 1), ((0,), (), 1))
    for first in (Swap(0, 0, 2), Recompute(0, 0, 2)):
        with pytest.raises(PlanError, match="tensor 0 is evicted between the end of kernel 1 and that of 2"):
            Plan((first, Swap(0, 2, 4, copy=1))).check(program)
    Plan((Recompute(0, 0, 2, at=1), Swap(0, 2, 4, copy=1))).check(program)


# -------------------------------------------------------------------------------------- Recompute.at


@pytest.mark.parametrize("at", [0, 1, 5])
def test_not_before_it_is_dropped_and_not_after_its_use(at):
    with pytest.raises(PlanError, match=rf"decisions\[0\].at: kernel {at} is not after 1 and up to 4"):
        Plan((Recompute(0, 1, 4, at=at),)).check(LINE)


def test_early_where_late_is_impossible():
    """Kernel 2 overwrites the persistent input of a's writer."""
    program = straight(
        [parameter(10), *activations(10)],
        ((0,), (1,), 10), ((), (), 10), ((), (0,), 10), ((1,), (), 10),
    )  # fmt: skip
    Plan((Recompute(1, 0, 3, at=2),)).check(program)
    with pytest.raises(PlanError, match="whose input 0 is overwritten before kernel 3"):
        Plan((Recompute(1, 0, 3),)).check(program)


# -------------------------------------------------------------------------------------------- Rerun


def test_what_a_later_run_reads_is_retained(simulate):
    """Tensor b dies at kernel 3, but kernel 4 reads c, which kernel 2 computes from b."""
    program = straight(
        activations(10, 20, 40),
        ((), (0,), 1), ((0,), (1,), 1), ((1,), (2,), 1), ((1,), (), 1), ((), (), 1), ((2,), (), 1),
    )  # fmt: skip
    plan = Plan((Rerun(2, 5),))
    schedule = lower(program, plan)
    assert schedule.residency == (10, 30, 60, 20, 20, 60)
    b, c, again = (block for block in schedule.blocks if block.owner in (1, 2))
    assert (b.first, b.last) == (1, 5) and (c.first, c.last) == (2, 2) and (again.first, again.last) == (5, 6)
    assert simulate(program, plan, MACHINE, 60, iterations=1).iteration_ns == 7


def test_a_plan_of_recomputation_as_reruns(simulate):
    plan = Plan((Recompute(0, 1, 4), Recompute(1, 1, 3)))
    same = Plan(lower(LINE, plan).reruns)
    assert same.decisions == (Rerun(0, 3), Rerun(1, 3), Rerun(0, 4))
    one, other = (simulate(LINE, p, MACHINE, 40, iterations=1) for p in (plan, same))
    assert one.spans == other.spans and other.required_bytes <= one.required_bytes


INPLACE = straight([parameter(1), *activations(10, 10, 10)], ((0,), (1,), 1), ((1,), (1,), 1), ((1,), (2,), 1),
                   ((0,), (0,), 1), ((2,), (), 1), ((1,), (), 1))  # fmt: skip


@pytest.mark.parametrize(
    ("decisions", "reason"),
    [
        ((Rerun(1, 4),), "kernel 1 cannot be recomputed before kernel 4: its input 1 is freed or overwritten"),
        (
            (Rerun(0, 4), Rerun(1, 4)),
            "kernel 0 cannot be recomputed before kernel 4: its input 0 is freed or overwritten",
        ),
        (
            (Rerun(0, 2), Rerun(1, 3)),
            "kernel 1 cannot be recomputed before kernel 3: it updates tensor 1, and kernel 0 is not",
        ),
        ((Rerun(0, 3), Rerun(1, 3)), None),
        ((Rerun(2, 4),), None),
    ],
)
def test_reruns_find_what_they_read(decisions, reason):
    Plan(decisions).check(INPLACE)
    if reason is None:
        assert len(lower(INPLACE, Plan(decisions)).reruns) == len(decisions)
        return
    with pytest.raises(PlanError, match=reason):
        lower(INPLACE, Plan(decisions))


@pytest.mark.parametrize(
    ("decisions", "reason"),
    [
        ((Rerun(7, 4),), r"decisions\[0\].kernel: there is no kernel 7"),
        ((Rerun(0, 6),), r"decisions\[0\].before: there is no kernel 6"),
        ((Rerun(3, 3),), "kernel 3 has not run before kernel 3"),
        ((Rerun(2, 4), Rerun(2, 4)), r"decisions\[1\]: the same as decisions\[0\]"),
        ((Rerun(2, 4), Recompute(2, 2, 4)), "Recompute or Rerun decisions, not both"),
    ],
)
def test_reruns_that_do_not_fit(decisions, reason):
    with pytest.raises(PlanError, match=reason):
        Plan(decisions).check(INPLACE)


# ------------------------------------------------------------------------------------------ the link


def test_the_host_needs_the_largest_concurrent_load(simulate):
    program = straight(
        activations(40, 40),
        ((), (0,), 10), ((), (), 100), ((0,), (), 10), ((), (1,), 10), ((), (), 100), ((1,), (), 10),
    )  # fmt: skip
    plan = Plan((Swap(0, 0, 2), Swap(1, 3, 5)))
    assert lower(program, plan).on_host == (0, 40, 40, 0, 40, 40)
    simulate(program, plan, replace(MACHINE, host_bytes=40), PLENTY)
    with pytest.raises(PlanError, match="the plan has 40 bytes on the host at a time; tiny has 39"):
        simulate(program, plan, replace(MACHINE, host_bytes=39), PLENTY)


def test_a_plan_that_never_repeats_is_not_feasible_for_a_search():
    program, plan, machine, limit = NEVER_STEADY
    score = Engine(program, machine, limit).score(rows_of(plan.decisions))
    assert (score.feasible, score.iteration_ns, score.period) == (False, NEVER, 0)
    assert Engine(program, machine, limit).timeline(plan).period == 0
