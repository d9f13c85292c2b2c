"""The compute stream waits for the events of swap-ins (RULES.md, choice j): by hand, and everywhere the same."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Job, Kernel, Machine, Plan, Program, Swap, Tensor, rules, simulate, simulate_jobs
from simulator.schedule import lower
from tests import tiny
from tests.oracle import violations
from tests.strategies import machines, plans, programs

SLOW = replace(tiny.MACHINE, wait_ns=7)


@pytest.mark.parametrize("run", [rules.simulate, simulate])
def test_by_hand(run):
    """Two tensors are back long before kernel 3 begins, which waits for both events; others for none."""
    tensors = tuple(Tensor(name, 10, "parameter", True) for name in "xy")
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (0, 1) if i % 2 else (), (), 1000) for i in range(4))
    program = Program("waits", tensors, kernels)
    machine = Machine("m", 100, 10**9, 10**9, 1, wait_ns=7)
    both = Plan((Swap(0, 1, 3), Swap(1, 1, 3)))
    timeline = run(program, both, machine, 20)
    assert timeline.iteration_ns == 4014 and timeline.breakdown.compute_ns == 4014 and timeline.ideal_ns == 4000
    lasts = [s.end_ns - s.start_ns for s in timeline.spans if s.kind == "kernel"]
    assert lasts == 2 * [1000, 1000, 1000, 1014]
    assert run(program, Plan(), machine, 20).iteration_ns == 4000
    wrapping = run(program, Plan((Swap(0, 3, 1),)), machine, 20)
    assert [s.end_ns - s.start_ns for s in wrapping.spans if s.kind == "kernel"] == 2 * [1000, 1007, 1000, 1000]


def test_what_runs_again_does_not_pay():
    again = simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, SLOW, tiny.LIMIT)
    assert again == simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, tiny.MACHINE, tiny.LIMIT)


@given(st.data())
def test_each_swap_pays_it_once_an_iteration(data):
    program = data.draw(programs())
    plan = data.draw(plans(program, reruns=True))
    machine = replace(
        data.draw(machines()), wait_ns=data.draw(st.integers(0, 20)), issue_ns=data.draw(st.integers(0, 9))
    )
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    timeline = simulate(program, plan, machine, limit)
    swaps = sum(isinstance(d, Swap) for d in plan.decisions)
    first = [s for s in timeline.spans if s.kind == "kernel"][: len(program.kernels)]
    took = sum(s.end_ns - s.start_ns for s in first)
    assert took == sum(k.duration_ns for k in program.with_variants(plan.variants).kernels) + swaps * machine.wait_ns


def test_a_wait_that_is_left_out_is_found():
    right = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert {v.rule for v in violations(right, tiny.PROGRAM, tiny.SWAP_PLAN, SLOW, tiny.LIMIT)} == {"duration"}


def test_several_jobs_refuse_it():
    with pytest.raises(
        ValueError, match=r"^machine\.wait_ns is 7: with several jobs waits for events cost nothing \(0\)$"
    ):
        simulate_jobs([Job("a", tiny.PROGRAM, Plan(), iterations=1)], SLOW, 200)
