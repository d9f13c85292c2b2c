"""Tests plan/2 and plan/1: reading, errors, and which plans fit a program."""

import itertools
import json
import os
import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Plan, PlanError, Program, Recompute, Swap
from simulator.plan import cannot_recompute
from simulator.schedule import lower
from tests.programs import activations, parameter, straight
from tests.strategies import programs
from tests.tiny import A1, A4, PROGRAM, SWAP_PLAN, W


def test_the_file_as_it_is_written(tmp_path):
    decisions = (Swap(3, 2, 5, 4, sync=True), Recompute(1, 1, 6, keep=True), Swap(1, 1, 6))
    plan = Plan(decisions, "f", "by hand", 150, "tiny")
    plan.save(tmp_path / "p")
    assert Plan.load(tmp_path / "p") == plan and os.listdir(tmp_path) == ["p"]
    assert json.loads((tmp_path / "p").read_text()) == {
        "format": "plan/2",
        "fingerprint": "f",
        "planner": "by hand",
        "limit": 150,
        "machine": "tiny",
        "decisions": [
            {"kind": "swap", "tensor": 3, "after": 2, "before": 5, "prefetch": 4, "sync": True},
            {"kind": "recompute", "tensor": 1, "after": 1, "before": 6, "keep": True},
            {"kind": "swap", "tensor": 1, "after": 1, "before": 6},
        ],
    }


def is_a_gap(program: Program, swap: Swap) -> bool:
    """Returns whether the tensor is alive and unused from the end of ``after`` until its use ``before``."""
    n = len(program.kernels)
    uses = [swap.tensor in k.inputs + k.outputs for k in program.kernels]
    if not uses[swap.before]:
        return False
    if not program.tensors[swap.tensor].persistent and not (any(uses[: swap.after + 1]) and swap.after < swap.before):
        return False
    walked = [swap.after]
    while (walked[-1] + 1) % n != swap.before:
        walked.append((walked[-1] + 1) % n)
    return not any(uses[k] for k in walked[1:]) and swap.prefetch in (None, *walked)


@given(st.data())
def test_a_swap_fits_exactly_where_there_is_a_gap(data):
    """Enumerates all swaps of a small program."""
    program = data.draw(programs(max_kernels=5))
    kernels = range(len(program.kernels))
    prefetch = data.draw(st.none() | st.integers(-1, len(kernels)))
    for tensor, after, before in itertools.product(range(len(program.tensors)), kernels, kernels):
        swap = Swap(tensor, after, before, prefetch)
        if is_a_gap(program, swap):
            Plan((swap,)).check(program)
        else:
            with pytest.raises(PlanError, match=r"^decisions\[0\]"):
                Plan((swap,)).check(program)


# ------------------------------------------------------------------------- plans that fit, or do not


MISFITS = [
    (Swap(8, 1, 6), "decisions[0]: there is no tensor 8"),
    (Swap(-1, 1, 6), "decisions[0]: there is no tensor -1"),
    (Swap(A1, 8, 6), "decisions[0].after: there is no kernel 8"),
    (Swap(A1, 1, -2), "decisions[0].before: there is no kernel -2"),
    (Swap(A1, 1, 5), "decisions[0]: kernel 5 does not use tensor 1"),
    (Swap(A1, 0, 6), "decisions[0]: tensor 1 is used between the end of kernel 0 and kernel 6"),
    (Swap(A4, 0, 3), "decisions[0]: tensor 4 is not born yet when kernel 0 ends"),
    (Swap(A1, 7, 0), "decisions[0]: the gap wraps over the iteration boundary but tensor 1 is not persistent"),
    (Swap(A1, 6, 6), "decisions[0]: the gap wraps over the iteration boundary but tensor 1 is not persistent"),
    (Swap(W, 3, 0), "decisions[0]: tensor 0 is used between the end of kernel 3 and kernel 0"),
    (Swap(W, 7, 7), "decisions[0]: tensor 0 is used between the end of kernel 7 and kernel 7"),
    (Swap(A1, 2, 6, 1), "decisions[0].prefetch: expected a kernel from 2 up to before 6, got 1"),
    (Swap(A1, 2, 6, 6), "decisions[0].prefetch: expected a kernel from 2 up to before 6, got 6"),
    (Swap(A1, 2, 6, 99), "decisions[0].prefetch: expected a kernel from 2 up to before 6, got 99"),
    (Swap(W, 7, 0, 3), "decisions[0].prefetch: expected a kernel from 7 up to before 0, got 3"),
    (Recompute(W, 0, 7), "decisions[0]: tensor 0 is persistent; only tensors born in the iteration can be recomputed"),
    (Recompute(W, 7, 0), "decisions[0]: a persistent tensor cannot be recomputed over the iteration boundary"),
]


@pytest.mark.parametrize(("decision", "message"), MISFITS, ids=[f"{d}" for d, _ in MISFITS])
def test_decisions_that_do_not_fit(decision, message):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}"):
        Plan((decision,)).check(PROGRAM)


def test_two_decisions_for_one_gap():
    reason = r"^decisions\[1\]: tensor 1 is already evicted before kernel 6 by decisions\[0\]; keep one of them$"
    with pytest.raises(PlanError, match=reason):
        Plan((Swap(A1, 1, 6), Recompute(A1, 3, 6))).check(PROGRAM)


def test_a_plan_for_another_program():
    other = PROGRAM.with_durations([1] * 8)
    SWAP_PLAN.check(PROGRAM)
    reason = f"fingerprint {PROGRAM.fingerprint[:12]}, 'tiny' has {other.fingerprint[:12]})"
    with pytest.raises(PlanError, match=re.escape(reason) + "$"):
        SWAP_PLAN.check(other)
    Plan(SWAP_PLAN.decisions).check(other)  # without a fingerprint, a plan fits if its gaps do


def test_a_plan_under_other_times(tmp_path):
    other = PROGRAM.with_durations([7] * 8)
    plan = Plan.of(PROGRAM, SWAP_PLAN.decisions, "by hand", 150, "tiny")
    assert plan.fingerprint == PROGRAM.fingerprint and plan.structure == PROGRAM.structure == other.structure
    with pytest.raises(PlanError, match=r"only times differ: Plan.retimed, retime=true of experiments.evaluate$"):
        plan.check(other)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").retimed(other)
    assert again == Plan.of(other, plan.decisions, "by hand", 150, "tiny")
    again.check(other)
    assert again.retimed(PROGRAM) == plan == plan.retimed(PROGRAM)
    assert Plan(plan.decisions).retimed(other) == Plan(plan.decisions)  # it names no program


def test_a_plan_for_more_than_other_times():
    plan = Plan.of(PROGRAM, SWAP_PLAN.decisions)
    named = Program("other", PROGRAM.tensors, PROGRAM.kernels).with_durations([7] * 8)
    short = Program("short", PROGRAM.tensors, PROGRAM.kernels[:6])
    for other, why in ((named, "its decisions would fit"), (short, r"decisions\[0\].before: there is no kernel 6")):
        with pytest.raises(
            PlanError, match=f"program than '{other.name}', and not only times differ: {why}; plan it again$"
        ):
            plan.retimed(other)
    assert SWAP_PLAN.retimed(PROGRAM) == SWAP_PLAN  # of an older version: it has no structure
    with pytest.raises(PlanError, match="does not record whether only times differ"):
        SWAP_PLAN.retimed(PROGRAM.with_durations([7] * 8))


# --------------------------------------------------------------------- what cannot be recomputed

# k0: p -> x (may not run twice, or may), k1: x -> y, k2: p in place, k3 reads y, k4 reads x and y.
P, X, Y = range(3)


def rebuild(first_twice: bool = True) -> Program:
    program = straight(
        [parameter(1), *activations(1, 1)],
        ((P,), (X,), 1),
        ((X,), (Y,), 1),
        ((P,), (P,), 1),
        ((Y,), (), 1),
        ((X, Y), (), 1),
    )
    return replace(program, kernels=(replace(program.kernels[0], recomputable=first_twice), *program.kernels[1:]))


def test_why_a_tensor_cannot_be_recomputed():
    once = rebuild(first_twice=False)
    changed = rebuild()
    for program, decision, reason in (
        (once, Recompute(X, 1, 4), r"tensor 1 needs kernel 0 \(k0\), which cannot be run twice; swap it instead$"),
        (
            changed,
            Recompute(X, 1, 4),
            r"tensor 1 needs kernel 0 \(k0\), whose input 0 is overwritten before kernel 4; swap",
        ),
        # y must be recomputed for k3 from x, which died in k1, so k0 is recomputed, too.
        (replace(once, kernels=once.kernels[:4]), Recompute(Y, 1, 3), r"tensor 2 needs kernel 0 \(k0\)"),
    ):
        with pytest.raises(PlanError, match=rf"^decisions\[0\]: {reason}"):
            Plan((decision,)).check(program)


@given(st.data())
def test_each_decision_that_fits_alone_fits_beside_the_others(data):
    """Dropping one tensor never makes another droppable tensor unrecoverable."""
    program = data.draw(programs())
    drops = [
        Recompute(*gap, data.draw(st.booleans())) for gap in program.gaps() if cannot_recompute(program, *gap) is None
    ]
    Plan(tuple(drops)).check(program)
    steps = lower(program, Plan(tuple(drops))).steps
    assert all(program.kernels[step.kernel].recomputable for step in steps if step.is_recomputation)
