"""Tests costs besides kernels and copies: issue by the host (RULES.md, i), events (j), copies beside kernels (k).

Cases computed by hand in both simulators, properties, and the validator.
"""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, strategies as st

from agents.floor import floor
from simulator import Engine, Job, Kernel, Machine, Plan, Program, Swap, Tensor, Timeline, simulate, simulate_jobs
from simulator.compiled.engine import rows_of
from simulator.job_state import ALONE_ONLY
from simulator.schedule import lower
from simulator.timeline import Breakdown
from tests import random_cases, tiny
from tests.oracle import violations
from tests.programs import lasts
from tests.strategies import RANDOM, machines, plans, programs

ISSUES, WAITS = replace(tiny.MACHINE, issue_ns=20), replace(tiny.MACHINE, wait_ns=7)
# 1 byte per ns over the link, 100 in device memory: kernels of 1000 ns that move 100,000 bytes are memory-bound.
CONTENDS = Machine("m", 10**6, 10**9, 10**9, 0, 0, memory_bytes_per_s=100 * 10**9, copy_contention=0.25)


def program_of(*uses: tuple[int, ...], nbytes: int = 0) -> Program:
    """Returns kernels of 1000 ns that move ``nbytes`` each, on persistent tensors x and y of 100 bytes."""
    tensors = tuple(Tensor(name, 100, "parameter", True) for name in "xy")
    kernels = tuple(Kernel(f"k{i}", "other", "forward", u, u, 1000, bytes=nbytes) for i, u in enumerate(uses))
    return Program("costs", tensors, kernels)


FOUR = ((), (0, 1), (), (0, 1))


# ----------------------------------------------------------------------------------- copies beside kernels


@pytest.mark.parametrize(("nbytes", "loss"), [(0, 0), (50_000, 0.125), (100_000, 0.25), (400_000, 0.25)])
def test_memory_bound_kernels_slow_down_more(simulate, nbytes, loss):
    """Tensor x is evicted in kernel 2: its swap-out and swap-in take 100 ns each, one after the other."""
    program, plan = program_of(*FOUR, nbytes=nbytes), Plan((Swap(0, 1, 3, prefetch=2),))
    timeline = simulate(program, plan, CONTENDS, 10**6)
    # The swap-out is beside kernel 2; the swap-in begins when it ends, and kernel 3 waits for it.
    assert lasts(timeline)[-4:] == [1000, 1000, 1000 + ceil(100 * loss), 1000]
    assert timeline.breakdown.stall_data_ns == 100 and timeline.breakdown.compute_ns == sum(lasts(timeline)[-4:])
    assert violations(timeline, program, plan, CONTENDS, 10**6) == []


def test_both_directions_take_twice(simulate):
    """Swap-out of y and swap-in of x are beside kernel 2 for 100 ns: 100 ns at half the speed count as 50."""
    program = program_of((0,), (1,), (), (0,), (1,), nbytes=100_000)
    plan = Plan((Swap(0, 0, 3, prefetch=1), Swap(1, 1, 4, prefetch=3)))
    for machine in (CONTENDS, replace(CONTENDS, copy_engines=1)):  # one after the other: as long at 3/4
        assert lasts(simulate(program, plan, machine, 10**6))[-5:] == [1000, 1025, 1050, 1000, 1000]


# ---------------------------------------------------------------------------------------------------- waits


def test_kernels_wait_for_events_of_swap_ins(simulate):
    """Two tensors are swapped in long before kernel 3, which waits for both events; other kernels wait for none."""
    tensors = tuple(Tensor(name, 10, "parameter", True) for name in "xy")
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (0, 1) if i % 2 else (), (), 1000) for i in range(4))
    program, machine = Program("waits", tensors, kernels), Machine("m", 100, 10**9, 10**9, 1, 1, wait_ns=7)
    timeline = simulate(program, Plan((Swap(0, 1, 3), Swap(1, 1, 3))), machine, 20)
    assert timeline.iteration_ns == 4014 and timeline.breakdown.compute_ns == 4014 and timeline.ideal_ns == 4000
    assert lasts(timeline) == 2 * [1000, 1000, 1000, 1014]
    assert simulate(program, Plan(), machine, 20).iteration_ns == 4000
    assert lasts(simulate(program, Plan((Swap(0, 3, 1),)), machine, 20)) == 2 * [1000, 1007, 1000, 1000]
    again = simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, WAITS, tiny.LIMIT)  # recomputed kernels do not pay
    assert again == simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, tiny.MACHINE, tiny.LIMIT)


@given(st.data())
def test_each_swap_pays_its_wait_once_an_iteration(data):
    program = data.draw(programs())
    plan = data.draw(plans(program, reruns=True))
    machine = replace(
        data.draw(machines()), wait_ns=data.draw(st.integers(0, 20)), issue_ns=data.draw(st.integers(0, 9))
    )
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    took = sum(lasts(simulate(program, plan, machine, limit))[: len(program.kernels)])
    assert took == program.ideal_ns + len(plan.of_kind(Swap)) * machine.wait_ns


# ------------------------------------------------------------------------------------------------- the host


def test_a_slow_host(simulate):
    """The program of tests/tiny.py has eight kernels in 120 ns; with a swap 170 ns, with a recomputed kernel 130 ns."""
    assert simulate(tiny.PROGRAM, Plan(), ISSUES, 180).iteration_ns == 8 * 20
    swapped = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, ISSUES, tiny.LIMIT)
    assert swapped.iteration_ns == 10 * 20 and swapped.breakdown == Breakdown(120, 0, 0, 20, 60, 60)
    assert swapped.boundaries == (220, 420) and swapped.ideal_ns == 120 and swapped.overhead == 200 / 120 - 1
    again = simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, ISSUES, tiny.LIMIT)
    assert again.iteration_ns == 9 * 20 and again.breakdown.stall_issue_ns == 9 * 20 - 130
    fast = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, replace(ISSUES, issue_ns=10), tiny.LIMIT)
    assert fast == simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    marker = Kernel("marker", "other", "forward", (0,), (), 0)  # kernels without duration are not issued
    program = Program("two", (Tensor("x", 1),), (Kernel("k", "other", "forward", (), (0,), 5), marker))
    assert simulate(program, Plan(), replace(ISSUES, issue_ns=7), 10).iteration_ns == 7


def test_files_hold_issue_stalls_only_if_they_occur(tmp_path):
    for machine in (ISSUES, tiny.MACHINE):
        timeline = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, machine, tiny.LIMIT)
        timeline.save(tmp_path / "t.json")
        assert Timeline.load(tmp_path / "t.json") == timeline
        assert ("stall_issue_ns" in timeline.to_dict()["breakdown"]) == (machine is ISSUES)


def test_small_kernels_after_large_ones_use_up_the_queue(simulate):
    """Four kernels take 100 ns, then eight take 1 ns; a launch takes 10 ns. The host's lead is the queue depth."""
    lengths = [100] * 4 + [1] * 8
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (), (), ns) for i, ns in enumerate(lengths))
    program, machine = Program("tail", (), kernels), Machine("m", 1, 1, 1, issue_ns=10)

    def step(depth):
        timeline = simulate(program, Plan(), replace(machine, queue_depth=depth), 1)
        assert timeline.iteration_ns == 408 + timeline.breakdown.stall_issue_ns and timeline.period == 1
        return timeline.iteration_ns

    assert [step(depth) for depth in (1024, 8, 3, 1)] == [408, 410, 460, 480]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 60), st.integers(1, 20))
def test_a_straight_program_against_its_recurrence(durations, issue_ns, depth):
    """Compares 100 steady iterations with the recurrence of the issue and end times of each kernel."""
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (), (), ns) for i, ns in enumerate(durations))
    program, machine = Program("straight", (), kernels), Machine("m", 1, 1, 1, issue_ns=issue_ns, queue_depth=depth)
    issued, ends = 0, []
    for _ in range(3000):
        for ns in durations:
            issued = max(issued + issue_ns, ends[-depth] if len(ends) >= depth else 0)
            ends.append(max(issued, ends[-1] if ends else 0) + ns)
    n = len(durations)
    assert ends[-1] - ends[-1 - 100 * n] == 100 * simulate(program, Plan(), machine, 1).iteration_ns


# ------------------------------------------------------------------------------------------------------ all


@given(st.data())
def test_a_cutoff_gives_up_nothing_that_is_faster_and_the_floor_holds(data):
    program = data.draw(programs())
    plan = data.draw(plans(program, reruns=True))
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    case = random_cases.contending(data.draw(RANDOM), random_cases.Case(program, plan, data.draw(machines()), limit))
    program, plan, machine = case[:3]
    engine, rows = Engine(program, machine, limit).with_variants(plan.variants), rows_of(plan.decisions)
    score = engine.score(rows)
    if score.feasible:
        assert engine.score(rows, cutoff_ns=score.iteration_ns + 1) == score
        cut = engine.score(rows, cutoff_ns=score.iteration_ns)
        assert not cut.feasible or cut == score
        assert floor(program, machine, limit).iteration_ns <= score.iteration_ns


def test_costs_that_are_left_out_are_found():
    free = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert {v.rule for v in violations(free, tiny.PROGRAM, tiny.SWAP_PLAN, WAITS, tiny.LIMIT)} == {"duration"}
    assert {v.rule for v in violations(free, tiny.PROGRAM, tiny.SWAP_PLAN, ISSUES, tiny.LIMIT)} == {"issued"}
    program, plan = program_of(*FOUR, nbytes=100_000), Plan((Swap(0, 1, 3),))
    free = simulate(program, plan, replace(CONTENDS, copy_contention=0.0), 10**6)
    assert {v.rule for v in violations(free, program, plan, CONTENDS, 10**6)} == {"duration"}


@pytest.mark.parametrize("key", ALONE_ONLY)
def test_simulate_jobs_refuses_host_costs(key):
    machine = replace(tiny.MACHINE, **{key: 0.25 if key == "copy_contention" else 7})
    with pytest.raises(ValueError, match=rf"^machine\.{key} is "):
        simulate_jobs([Job("a", tiny.PROGRAM, Plan(), iterations=1)], machine, 200)
