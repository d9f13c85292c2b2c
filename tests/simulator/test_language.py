"""Tests which early copies, early recomputations and reruns of plan/2 fit a program."""

import pytest

from simulator import Plan, PlanError, Recompute, Rerun, Swap
from simulator.schedule import lower
from tests.programs import activations, parameter, straight
from tests.tiny import MACHINE

LINE = straight(  # a, b of a, a pause, b is read, a is read
    activations(10, 20), ((), (0,), 10), ((0,), (1,), 10), ((), (), 5), ((1,), (), 10), ((0,), (), 10)
)


# ------------------------------------------------------------------------------------------ Swap.copy


@pytest.mark.parametrize(
    ("swap", "reason"),
    [
        (Swap(0, 1, 4, copy=9), "there is no kernel 9"),
        (Swap(0, 1, 4, copy=2), "expected a kernel from the first write of tensor 0 .0. up to 1, got 2"),
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
    with pytest.raises(PlanError, match=rf"decisions\[0\].at: expected a kernel after 1 and up to 4, got {at}"):
        Plan((Recompute(0, 1, 4, at=at),)).check(LINE)


def test_early_where_late_is_impossible():
    """Kernel 2 overwrites the persistent input of a's writer."""
    program = straight(
        [parameter(10), *activations(10)],
        ((0,), (1,), 10),
        ((), (), 10),
        ((), (0,), 10),
        ((1,), (), 10),
    )
    Plan((Recompute(1, 0, 3, at=2),)).check(program)
    with pytest.raises(PlanError, match="whose input 0 is overwritten before kernel 3"):
        Plan((Recompute(1, 0, 3),)).check(program)


# -------------------------------------------------------------------------------------------- Rerun


def test_a_plan_of_recomputation_as_reruns(simulate):
    plan = Plan((Recompute(0, 1, 4), Recompute(1, 1, 3)))
    same = Plan(lower(LINE, plan).reruns)
    assert same.decisions == (Rerun(0, 3), Rerun(1, 3), Rerun(0, 4))
    one, other = (simulate(LINE, p, MACHINE, 40, iterations=1) for p in (plan, same))
    assert one.spans == other.spans and other.required_bytes <= one.required_bytes


INPLACE = straight(
    [parameter(1), *activations(10, 10, 10)],
    ((0,), (1,), 1),
    ((1,), (1,), 1),
    ((1,), (2,), 1),
    ((0,), (0,), 1),
    ((2,), (), 1),
    ((1,), (), 1),
)


@pytest.mark.parametrize(
    ("decisions", "reason"),
    [
        ((Rerun(1, 4),), "kernel 1 cannot be recomputed before kernel 4: its input 1 is freed or overwritten"),
        ((Rerun(0, 4), Rerun(1, 4)), "kernel 0 cannot be recomputed before kernel 4: its input 0 is freed or"),
        ((Rerun(0, 2), Rerun(1, 3)), "kernel 1 cannot be recomputed before kernel 3: it updates tensor 1, and kernel"),
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
