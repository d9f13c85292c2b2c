"""Copies take from the speed of kernels (RULES.md, choice k): by hand, and everywhere the same."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, strategies as st

from agents.floor import floor
from simulator import Engine, Job, Kernel, Machine, Plan, Program, Swap, Tensor, rules, simulate, simulate_jobs
from simulator.compiled.engine import rows_of
from simulator.machine import ALONE
from simulator.schedule import lower
from tests import random_cases, tiny
from tests.oracle import violations
from tests.strategies import RANDOM, machines, plans, programs

RUNS = pytest.mark.parametrize("run", [rules.simulate, simulate])


def program_of(nbytes, duration=1000, count=4):
    """Tensors x and y of 100 bytes, used by each second kernel; a kernel moves so many bytes."""
    tensors = tuple(Tensor(name, 100, "parameter", True) for name in "xy")
    uses = [(0, 1) if i % 2 else () for i in range(count)]
    return Program("contends", tensors, tuple(
        Kernel(f"k{i}", "other", "forward", u, u, duration, bytes=nbytes) for i, u in enumerate(uses)
    ))  # fmt: skip


# 1 byte a ns over the link and 100 in the GPU's memory: kernels of 1000 ns that move 100,000 bytes are memory-bound.
MACHINE = Machine("m", 10**6, 10**9, 10**9, 0, memory_bytes_per_s=100 * 10**9, copy_contention=0.25)


@RUNS
@pytest.mark.parametrize(("nbytes", "loss"), [(0, 0), (50_000, 0.125), (100_000, 0.25), (400_000, 0.25)])
def test_the_nearer_to_the_bandwidth_the_more(run, nbytes, loss):
    """x is away in kernel 2: 100 ns of the copy out and 100 of that back, one after the other."""
    program, plan = program_of(nbytes), Plan((Swap(0, 1, 3, prefetch=2),))
    timeline = run(program, plan, MACHINE, 10**6)
    # The copy out is beside kernel 2; the copy back begins when that ends, and kernel 3 waits for it.
    lasts = [s.end_ns - s.start_ns for s in timeline.spans if s.kind == "kernel"][-4:]
    assert lasts == [1000, 1000, 1000 + ceil(100 * loss), 1000]
    assert timeline.breakdown.stall_data_ns == 100 and timeline.breakdown.compute_ns == sum(lasts)
    assert violations(timeline, program, plan, MACHINE, 10**6) == []


@RUNS
def test_both_directions_take_twice(run):
    """y leaves while x comes back, beside kernel 2, for 100 ns: 100 ns at half the speed are worth 50."""
    tensors = tuple(Tensor(name, 100, "parameter", True) for name in "xy")
    uses = [(0,), (1,), (), (0,), (1,)]
    kernels = tuple(Kernel(f"k{i}", "other", "forward", u, u, 1000, bytes=100_000) for i, u in enumerate(uses))
    program, plan = Program("both", tensors, kernels), Plan((Swap(0, 0, 3, prefetch=1), Swap(1, 1, 4, prefetch=3)))
    timeline = run(program, plan, MACHINE, 10**6)
    lasts = [s.end_ns - s.start_ns for s in timeline.spans if s.kind == "kernel"][-5:]
    assert lasts == [1000, 1025, 1050, 1000, 1000]
    one = run(program, plan, replace(MACHINE, copy_engines=1), 10**6)  # one after the other: as long at 3/4
    assert [s.end_ns - s.start_ns for s in one.spans if s.kind == "kernel"][-5:] == [1000, 1025, 1050, 1000, 1000]


@RUNS
def test_a_copy_longer_than_the_kernel(run):
    """1000 ns of work at 3/4 of the speed take 1334."""
    program, plan = program_of(100_000), Plan((Swap(0, 1, 3),))
    slow = replace(MACHINE, d2h_bytes_per_s=50_000_000)  # 2000 ns out
    timeline = run(program, plan, slow, 10**6)
    assert [s.end_ns - s.start_ns for s in timeline.spans if s.kind == "kernel"][-2] == 1334


def test_what_a_copy_takes():
    assert MACHINE.copy_loss(100_000, 1000) == ALONE // 4 == MACHINE.copy_loss(10**9, 1000)
    assert MACHINE.copy_loss(10_000, 1000) == ALONE // 40
    assert MACHINE.copy_loss(0, 1000) == MACHINE.copy_loss(1000, 0) == 0
    assert replace(MACHINE, copy_contention=0.0).copy_loss(100_000, 1000) == 0


def test_it_is_of_consequence():
    """In the cases in which all simulators agree (tests/test_random_cases.py)."""
    differs = 0
    for seed in range(0, 900, 3):
        program, plan, machine, limit = random_cases.any_case(seed)[:4]
        if limit >= lower(program, plan).required_bytes and max(lower(program, plan).on_host) <= machine.host_bytes:
            free = simulate(program, plan, replace(machine, copy_contention=0.0), limit)
            differs += simulate(program, plan, machine, limit) != free
    assert differs > 80


@given(st.data())
def test_a_cutoff_and_the_floor_hold(data):
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
        found = floor(program, machine, limit)
        assert found.iteration_ns <= score.iteration_ns


def test_a_kernel_that_is_too_fast_is_found():
    program, plan = program_of(100_000), Plan((Swap(0, 1, 3),))
    free = simulate(program, plan, replace(MACHINE, copy_contention=0.0), 10**6)
    assert {v.rule for v in violations(free, program, plan, MACHINE, 10**6)} == {"duration"}


def test_variants_move_the_same_bytes_in_another_time():
    """The faster algorithm is memory-bound, the other is not."""
    program, plan = program_of(50_000), Plan((Swap(0, 1, 3, prefetch=2),))
    kernels = tuple(replace(k, variants=((1000, 0), (500, 0))) for k in program.kernels)
    program = replace(program, kernels=kernels)
    fast = replace(plan, variants=((2, 1),))
    for run in (rules.simulate, simulate):
        timeline = run(program, fast, MACHINE, 10**6)
        assert [s.end_ns - s.start_ns for s in timeline.spans if s.kind == "kernel"][-2] == 525
    assert violations(timeline, program, fast, MACHINE, 10**6) == []


def test_several_jobs_refuse_it():
    with pytest.raises(
        ValueError,
        match=r"^machine\.copy_contention is 0\.25: with several jobs copies take nothing from kernels \(0\)$",
    ):
        simulate_jobs([Job("a", tiny.PROGRAM, Plan(), iterations=1)], MACHINE, 200)
