"""Tests the floor: exact where it can be computed by hand, and never above the time of a plan."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

import agents
from agents.floor import FAMILIES, UNPROVEN, Floor, bound as bound_module, floor, refined_floor, reruns
from agents.floor.lp import Linear, Solver
from simulator import Engine, Kernel, Machine, Plan, Program, Recompute, Rerun, Swap, Tensor, Timeline, simulate
from simulator.deadline import TimeUp
from simulator.modes import MODES
from simulator.plan import PlanError
from simulator.schedule import lower
from tests.agents.planned import planned
from tests.agents.search.test_search import pyramid
from tests.oracle import enumeration
from tests.programs import BYTE_PER_NS as MACHINE
from tests.strategies import machines, networks, plans, programs

DATA = Path(__file__).resolve().parents[1] / "data"


def sandwich(persistent: bool = False, recomputable: bool = True) -> Program:
    """Builds a program of one 100-byte tensor written by the first and read by the last kernel (10 ns each).

    The kernel between them (30 ns) has a workspace of 100 bytes. The outer kernels also read a persistent tensor.
    """
    accesses = ((0,), ()) if persistent else ((), (0,))
    kernels = (
        Kernel("write", "other", "forward", *accesses, 10, recomputable=recomputable),
        Kernel("work", "other", "forward", (), (), 30, workspace=100),
        Kernel("read", "other", "backward", (0,), (), 10),
    )
    return Program("sandwich", (Tensor("t", 100, "activation", persistent),), kernels)


def steps(sizes: list[int], *lines: tuple, recomputable: bool = False) -> Program:
    """Builds a program whose kernel k accesses the tensors of lines[k], with ns and optional workspace."""
    kernels = (Kernel(f"k{k}", "other", "forward", *line, recomputable=recomputable) for k, line in enumerate(lines))
    return Program("steps", tuple(Tensor(f"t{i}", nbytes) for i, nbytes in enumerate(sizes)), tuple(kernels))


# t (100 bytes) must be evicted in kernel 3. Recomputing it for kernel 5 takes 101 ns, because x is evicted then; for
# kernel 4, which reads x, it takes 1.
EARLY = steps(
    [10, 100, 1],
    ((), (0,), 100),
    ((0,), (1,), 1),
    ((1,), (2,), 1),
    ((), (), 10, 100),
    ((2, 0), (), 10),
    ((1,), (), 10),
    recomputable=True,
)
# t (100 bytes) must be evicted in kernel 2; recomputing it takes 1 ns if x (10 bytes) is retained, else 101 ns. With
# nine tenths of x it would be 11 ns, but x is either retained entirely or not at all.
FITS, TOO_LARGE = (
    steps([10, 100], ((), (0,), 100), ((0,), (1,), 1), ((), (), 10, room), ((1,), (), 10), recomputable=True)
    for room in (100, 101)
)
# At the first peak there is room for 30 of 300 bytes, and at each for 11 more. Without ``Reruns._futures`` a tenth of x
# (100 bytes) would be retained, and in every window another part of t (200 bytes) recomputed from it.
TENTHS = steps(
    [100, 200, *[1] * 20],
    ((), (0,), 1000),
    ((0,), (1,), 1),
    *(((), (2 + i,), 10, 290 - 11 * i) for i in range(20)),
    ((1,), (), 10),
    *(((2 + i,), (), 0) for i in range(20)),
    recomputable=True,
)
# a must be evicted for kernel 2. Copied while kernel 1 reads it, it leaves for nothing and returns in the 200 ns of
# kernel 3; where kernel 1 takes 40 ns, 60 of 100 bytes are left when it ends.
COPY, SHORT_COPY = (
    steps([100, 100], ((), (0,), 10), ((0,), (), ns), ((), (1,), 10), ((), (), 200), ((0,), (), 10)) for ns in (100, 40)
)
# b is read by kernel 2 and a by kernel 4, each beside a workspace for which the other is evicted: in the 100 ns between
# them a (100 bytes) returns and b (100) leaves. There are 100 ns before for a to leave, and behind for b to return.
CROSS = steps(
    [100, 100],
    ((), (0, 1), 10),
    ((), (), 100),
    ((1,), (), 10, 100),
    ((), (), 100),
    ((0,), (), 10, 100),
    ((), (), 100),
    ((1,), (), 10),
)
CROSSED = Plan((Swap(0, 0, 4), Swap(1, 2, 6, copy=0)))
# Of 100 ns out 40 are hidden before the work, of 100 ns in 60 behind it.
HIDDEN = steps([100], ((), (0,), 10), ((), (), 40), ((), (), 30, 100), ((), (), 60), ((0,), (), 10))
# a and then b are evicted next to a workspace of 100: the host needs 100 bytes at one time, 200 in all.
IN_TURN = steps(
    [100, 100], ((), (0,), 10), ((), (), 10, 100), ((0,), (), 10), ((), (1,), 10), ((), (), 10, 100), ((1,), (), 10)
)
SLOW = replace(MACHINE, d2h_latency_ns=7, h2d_latency_ns=7, h2d_bytes_per_s=5 * 10**8)


def with_duplex(engines: int, h2d: int, d2h: int) -> Machine:
    """Returns the machine with a number of copy engines and relative speeds of concurrent copies."""
    return replace(MACHINE, copy_engines=engines, duplex_h2d_bytes_per_s=h2d, duplex_d2h_bytes_per_s=d2h)


@pytest.mark.parametrize(
    ("program", "machine", "limit", "mode", "plan", "extra"),
    [
        # All of it is evicted while the second kernel runs: 100 ns out and 100 ns in, or 10 ns of recomputation.
        (sandwich(), MACHINE, 100, "swap", Plan((Swap(0, 0, 2),)), 200),
        (sandwich(), MACHINE, 100, "recompute", Plan((Recompute(0, 0, 2),)), 10),
        (sandwich(), MACHINE, 100, "joint", Plan((Recompute(0, 0, 2),)), 10),
        (sandwich(recomputable=False), MACHINE, 100, "joint", Plan((Swap(0, 0, 2),)), 200),
        (sandwich(), MACHINE, 200, "joint", Plan(), 0),
        (sandwich(), SLOW, 100, "swap", Plan((Swap(0, 0, 2),)), 107 + 207),
        # Never written: its host copy stays valid, so only the 100 ns of the swap-in remain, before the last kernel.
        (sandwich(persistent=True), MACHINE, 100, "joint", Plan((Swap(0, 0, 2),)), 100),
        (EARLY, MACHINE, 111, "joint", Plan((Recompute(1, 2, 5, at=4),)), 1),
        (FITS, MACHINE, 110, "recompute", Plan((Rerun(1, 3),)), 1),
        (TOO_LARGE, MACHINE, 110, "recompute", Plan((Recompute(1, 1, 3),)), 101),
        (TENTHS, MACHINE, 320, "recompute", Plan((Recompute(1, 1, 22),)), 1001),
        (COPY, MACHINE, 100, "swap", Plan((Swap(0, 1, 4, copy=0),)), 0),
        (SHORT_COPY, MACHINE, 100, "swap", Plan((Swap(0, 1, 4, copy=0),)), 60),
        # 10 bytes of b may leave while kernel 2 reads it. At three quarters of their speed beside each other, the
        # other 90 leave in 120 ns, and then 90 of a are back. Out as alone and in at half, 45 of a are back when b
        # has left after 90 ns; in as alone and out at half, 50 of b have left when a is back after 100.
        (CROSS, with_duplex(2, 0, 0), 200, "joint", CROSSED, 0),
        (CROSS, with_duplex(2, 75 * 10**7, 75 * 10**7), 200, "joint", CROSSED, 30),
        (CROSS, with_duplex(2, 5 * 10**8, 10**9), 200, "joint", CROSSED, 45),
        (CROSS, with_duplex(2, 10**9, 5 * 10**8), 200, "joint", CROSSED, 40),
        (CROSS, with_duplex(1, 0, 0), 200, "joint", CROSSED, 90),
        (HIDDEN, MACHINE, 100, "joint", Plan((Swap(0, 0, 4),)), 60 + 40),
        (IN_TURN, replace(MACHINE, host_bytes=100), 100, "joint", Plan((Swap(0, 0, 2), Swap(1, 3, 5))), 400),
    ],
)
def test_the_floor_equals_the_best_plan_by_hand(
    program: Program, machine: Machine, limit: int, mode: str, plan: Plan, extra: int
) -> None:
    assert simulate(program, plan, machine, limit).iteration_ns == program.ideal_ns + extra
    result = floor(program, machine, limit, mode)
    assert (result.feasible, result.iteration_ns) == (True, program.ideal_ns + extra)
    assert result.overhead == pytest.approx(extra / program.ideal_ns)


def test_the_smallest_gaps_are_empty_for_nothing() -> None:
    # The workspace takes 100 of 110 bytes: with t (100 bytes) as the only variable, 90 of its bytes leave.
    first, work, last = sandwich(recomputable=False).kernels
    kernels = (replace(first, outputs=(0, 1)), work, replace(last, inputs=(0, 1)))
    program = Program("two sizes", (*sandwich().tensors, Tensor("u", 10)), kernels)
    assert floor(program, MACHINE, 110, max_gaps=1).iteration_ns == 50 + 2 * 90
    assert floor(program, MACHINE, 110).iteration_ns == 50 + 2 * 100


def blocks(count: int, small: int = 100, large: int = 100, cheap_ns: int = 10, dear_ns: int = 100) -> Program:
    """Builds ``count`` equal blocks of two activations each, and their backward pass.

    Args:
        small, large: sizes of the first and the second activation, in bytes.
        cheap_ns, dear_ns: durations of their kernels.
    """
    forward = []
    for k in range(count):
        first, second = 2 * k, 2 * k + 1
        forward += [(() if k == 0 else (first - 1,), (first,), cheap_ns), ((first,), (second,), dear_ns)]
    backward = [((2 * k, 2 * k + 1), (), 20) for k in reversed(range(count))]
    return steps([small, large] * count, *forward, *backward, recomputable=True)


def test_a_limit_of_gaps_is_kept_among_equal_tensors() -> None:
    program = blocks(8)
    limit = program.peak_bytes // 2
    full = floor(program, MACHINE, limit)
    for count in (5, 9, len(full.gaps) - 1):
        some = floor(program, MACHINE, limit, max_gaps=count)
        assert count - 2 < len(some.gaps) <= count
        assert some.iteration_ns <= full.iteration_ns
    # Without the shortest absences nearly the same floor is proven; if all ties fell out, nothing would be.
    assert some.iteration_ns > program.ideal_ns


def test_few_gaps_are_those_that_save_memory_above_the_limit() -> None:
    # Tensor 0 must leave for the workspace of 250 bytes; larger ones are absent only where memory is not short.
    count = 5
    light = [line for i in range(1, count + 1) for line in (((), (i,), 10), ((), (), 10), ((i,), (), 10))]
    program = steps([100, *[200] * count], ((), (0,), 10), *light, ((), (), 10, 250), ((0,), (), 10))
    result = floor(program, MACHINE, 300, max_gaps=1)
    assert [g.tensor for g in result.gaps] == [0]
    plan = Plan((Swap(0, 0, len(program.kernels) - 1),))
    assert program.ideal_ns < result.iteration_ns <= simulate(program, plan, MACHINE, 300).iteration_ns


@pytest.mark.parametrize(("seconds", "solves"), [(1.0, 1), (7.0, 2), (1e9, len(bound_module.REFINEMENTS))])
def test_more_time_refines_the_floor(monkeypatch: pytest.MonkeyPatch, seconds: float, solves: int) -> None:
    program = pyramid(40, 0)
    task = (program, MACHINE, int(0.5 * program.peak_bytes), "swap")
    seen = []
    clock = iter(range(1000))  # each solve takes 1 s

    def counted(*args: Any) -> Floor:
        seen.append(floor(*args[:7], deadlines=args[8]).iteration_ns)
        return floor(*args[:7], deadlines=args[8])

    monkeypatch.setattr(bound_module, "floor", counted)
    monkeypatch.setattr(bound_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    refined = refined_floor(*task, seconds=seconds, timeout_s=1e9)
    assert (refined.iteration_ns, len(seen)) == (max(seen), solves)


def test_a_refinement_that_takes_too_long_leaves_the_floor_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = pyramid(40, 0)
    task = (program, MACHINE, int(0.5 * program.peak_bytes), "swap")
    found: list[Floor] = []

    def interrupted(*args: Any) -> Floor:
        if found:
            raise TimeUp
        found.append(floor(*args[:7]))
        return found[0]

    monkeypatch.setattr(bound_module, "floor", interrupted)
    assert refined_floor(*task, seconds=1e6) is found[0]
    with pytest.raises(TimeUp):
        refined_floor(*task, seconds=1e6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("exact", "deadlines"), [(0, False), (0, True), (reruns.EXACT, True)])
def test_no_enumerated_plan_of_equal_blocks_is_below(
    monkeypatch: pytest.MonkeyPatch, seed: int, exact: int, deadlines: bool
) -> None:
    """Merges kernels into windows as in large programs, or not."""
    monkeypatch.setattr(reruns, "EXACT", exact)
    rng = np.random.default_rng(seed)
    program = blocks(2 + seed % 2, *(int(x) for x in rng.integers(1, 120, 4)))
    n = len(program.kernels)
    writers = [k for k in range(n) if program.kernels[k].outputs]
    pairs = [Rerun(w, k) for w in writers for k in range(w + 2, n) if k >= len(writers)]
    schedules = list(enumeration.rerun_plans(program, pairs, 4))
    for share in (0.4, 0.55, 0.7, 0.85):
        limit = int(share * program.peak_bytes)
        best = min((ns for ns, required in schedules if required <= limit), default=np.inf)
        if best < np.inf:
            result = floor(program, MACHINE, limit, "recompute", deadlines=deadlines)
            assert result.feasible and result.iteration_ns <= best
            assert floor(program, MACHINE, limit, deadlines=deadlines).iteration_ns <= best


def test_what_a_window_recomputes_from_is_held_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the workspace of kernel 2 there is no room for x: recomputing t takes 101 ns, and recomputing v 1 ns.

    Kernels 2 and 3 are one window unless it ends at the peak: then x would be held at its start and take no memory.
    """
    monkeypatch.setattr(reruns, "EXACT", 0)
    program = steps(
        [10, 100, 20],
        ((), (0,), 100),
        ((0,), (1,), 1),
        ((), (), 10, 112),
        ((1,), (), 10),
        ((), (2,), 1),
        ((), (), 10, 105),
        ((2,), (), 10),
        recomputable=True,
    )
    plan = Plan((Recompute(1, 1, 3), Recompute(2, 4, 6)))
    assert simulate(program, plan, MACHINE, 121).iteration_ns == program.ideal_ns + 102
    assert floor(program, MACHINE, 121, "recompute").iteration_ns == program.ideal_ns + 102


@pytest.mark.parametrize("mode", ["recompute", "joint"])
def test_deadlines_raise_the_floor(mode: str) -> None:
    program = Program.load(DATA / "checkmate" / "un_11.json.gz")
    limit = 6 * 2**30
    bounds = [floor(program, MACHINE, limit, mode, detail=0.5, families=UNPROVEN, deadlines=on) for on in (False, True)]
    assert bounds[0].iteration_ns < bounds[1].iteration_ns


# A persistent tensor that is never written has a permanent host copy.
READS = replace(
    IN_TURN,
    tensors=(Tensor("a", 100, "parameter", True), Tensor("b", 100)),
    kernels=(replace(IN_TURN.kernels[0], inputs=(0,), outputs=()), *IN_TURN.kernels[1:]),
)


@pytest.mark.parametrize(
    ("program", "host", "limit", "mode", "iteration_ns"),
    [
        (
            sandwich(),
            10**9,
            140,
            "swap",
            50 + 120,
        ),  # 40 bytes fit: as bytes could stay, 60 leave and return (relaxation 1)
        (sandwich(), 10**9, 99, "joint", None),
        # 100 bytes must leave, or be recomputed in 10 ns; with 40 bytes more 60 must, if the host has room.
        (sandwich(recomputable=False), 99, 100, "joint", None),
        (sandwich(recomputable=False), 100, 100, "joint", 250),
        (sandwich(), 99, 100, "joint", 60),
        (sandwich(), 60, 140, "swap", 50 + 120),
        (sandwich(), 59, 140, "swap", None),
        (IN_TURN, 99, 100, "joint", None),
        (READS, 200, 200, "swap", 60 + 90),  # a leaves for nothing; 10 of its 100 ns back are beside the last kernel
        (READS, 100, 100, "swap", None),
    ],
)
def test_the_limit_and_the_host(program: Program, host: int, limit: int, mode: str, iteration_ns: int | None) -> None:
    result = floor(program, replace(MACHINE, host_bytes=host), limit, mode)
    assert result.feasible == (iteration_ns is not None)
    assert result.iteration_ns == (iteration_ns or program.ideal_ns)
    assert (result.least_bytes > limit) == (limit == 99)
    if not result.feasible:
        with pytest.raises(agents.Infeasible):
            planned("lp_round", program, replace(MACHINE, host_bytes=host), limit, mode=mode)


@pytest.mark.parametrize(
    ("family", "program", "machine", "fraction", "mode"),
    [
        ("futures", TENTHS, MACHINE, 320 / TENTHS.peak_bytes, "recompute"),
        ("early_copies", pyramid(3, 0), MACHINE, 0.8, "swap"),
        ("whole_tensors", pyramid(3, 0), MACHINE, 0.8, "swap"),
        ("host", IN_TURN, replace(MACHINE, host_bytes=99), 0.5, "joint"),
        ("cuts", TENTHS, MACHINE, 320 / TENTHS.peak_bytes, "recompute"),
        ("branching", pyramid(8, 1), MACHINE, 0.7, "recompute"),
    ],
)
def test_every_family_of_rows_raises_the_floor(
    family: str, program: Program, machine: Machine, fraction: float, mode: str
) -> None:
    limit = round(fraction * program.peak_bytes)
    result = floor(program, machine, limit, mode)
    others = [other for other in FAMILIES if other != family]
    without = floor(program, machine, limit, mode, families=others)
    assert without.feasible and (not result.feasible or without.iteration_ns < result.iteration_ns)
    with pytest.raises(ValueError, match="families"):
        floor(program, machine, limit, mode, families=["cut"])


def test_solver_tolerances_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the dual value, so a wrong dual solution of the solver only gives a lower bound."""
    program = pyramid(6, 0)
    limit = int(0.5 * program.peak_bytes)
    true = floor(program, MACHINE, limit).iteration_ns
    bound = Solver.bound
    rng = np.random.default_rng(0)
    monkeypatch.setattr(Solver, "bound", lambda self, y: bound(self, y + 0.1 * rng.standard_normal(len(y))))
    assert floor(program, MACHINE, limit).iteration_ns <= true


def test_swaps_below_a_nanosecond_are_free_with_recomputation() -> None:
    """With kernels of zero duration, copying a byte takes a fraction of a nanosecond, and recomputing it takes none."""
    sizes = (11, 29, 21, 1, 1, 3, 1, 1, 1)
    tensors = tuple(Tensor(f"t{i}", nbytes, persistent=i == 0) for i, nbytes in enumerate(sizes))
    reads = [(0,)] * 4 + [(4,), (3,), (2,), (1,)]
    kernels = tuple(Kernel(f"k{i}", "conv", "forward", inputs, (i + 1,), 0) for i, inputs in enumerate(reads))
    program = Program("nothing", tensors, kernels)
    machine = replace(MACHINE, d2h_bytes_per_s=5 * 10**8, copy_engines=1)
    assert {mode: floor(program, machine, 65, mode).iteration_ns for mode in ("swap", "recompute", "joint")} == {
        "swap": 1,
        "recompute": 0,
        "joint": 0,
    }


@given(st.data(), programs(7), machines(), st.sampled_from(MODES))
def test_no_enumerated_plan_is_below(data: st.DataObject, program: Program, machine: Machine, mode: str) -> None:
    assume(enumeration.count(program, mode) <= 1500)
    unlimited = Engine(program, machine, 10**9)
    required = {unlimited.score(rows).required_bytes for rows in enumeration.plans(program, mode)}
    limit = data.draw(st.sampled_from(sorted(required)))
    result = floor(program, machine, limit, mode)
    assert result.feasible and result.iteration_ns <= enumeration.shortest_ns(program, machine, limit, mode)


def in_the_long_run(program: Program, plan: Plan, machine: Machine, limit: int) -> Timeline:
    """Asserts that the floor is below the long-run iteration time, simulated longer if nothing repeats yet."""
    timeline = simulate(program, plan, machine, limit)
    while not timeline.period:
        timeline = simulate(program, plan, machine, limit, 4 * len(timeline.boundaries))
    return timeline


def test_aperiodic_plans_are_not_below_the_floor() -> None:
    """Runs the sandwich, then five updates of 1-byte parameters (1000 ns), swapped out until the next iteration.

    A byte leaves in 1013 ns, so five take 5065 ns, and an iteration with the sandwich recomputed takes 5060 ns: the
    queue grows by 5 ns per iteration until kernels wait. In the floor, 5 bytes of parameters and 95 of the sandwich
    are evicted, for 9.5 ns: rounded up, that is an iteration as fast as those while the queue grows.
    """
    first, work, last = sandwich().kernels
    updates = [Kernel(f"update{i}", "optimizer", "optimizer", (i,), (i,), 1000) for i in range(1, 6)]
    parameters = [Tensor(f"p{i}", 1, "parameter", True) for i in range(1, 6)]
    program = Program("drift", (*sandwich().tensors, *parameters), (first, work, last, *updates))
    machine = replace(MACHINE, d2h_bytes_per_s=987_167)
    plan = Plan((Recompute(0, 0, 2), *(Swap(i, i + 2, i + 2) for i in range(1, 6))))
    early = simulate(program, plan, machine, 105)
    late = in_the_long_run(program, plan, machine, 105)
    assert (early.period, early.iteration_ns) == (0, 5060) and (late.steady, late.iteration_ns) == (True, 5065)
    assert floor(program, machine, 105).iteration_ns == 5060


@pytest.mark.parametrize("seed", range(3))
def test_no_enumerated_recomputation_is_below(seed: int) -> None:
    program = pyramid(3, seed)
    pairs = [Rerun(kernel, before) for kernel in range(3) for before in range(3, 6)]
    schedules = list(enumeration.rerun_plans(program, pairs, len(pairs)))
    for limit in (int(0.6 * program.peak_bytes), int(0.8 * program.peak_bytes)):
        best = min((ns for ns, required in schedules if required <= limit), default=np.inf)
        result = floor(program, MACHINE, limit, "recompute")
        assert result.feasible or best == np.inf
        assert result.iteration_ns <= best
        assert best == np.inf or result.iteration_ns >= program.ideal_ns + 0.9 * (best - program.ideal_ns)


@pytest.mark.parametrize(("gib", "percent"), [(10, 2.4207), (6, 6.0350)])
def test_below_the_optima_of_checkmate(gib: int, percent: float) -> None:
    """Compares with overheads that Gurobi found for U-Net, batch 11, in up to 24 hours.

    Source: utsaslab/monet-schedules, optimal within 1e-4 of the iteration at 10 and 6 GiB.
    """
    program = Program.load(DATA / "checkmate" / "un_11.json.gz")
    floor_percent = 100 * floor(program, MACHINE, gib * 2**30, "recompute").overhead
    assert 0.75 * percent < floor_percent <= percent


# Forces small programs to be merged like large ones: slightly with detail 1, more with less detail.
SMALL = {
    mode: replace(options, max_gaps=100, max_groups=10 if options.max_groups else 0, cells=30 if options.cells else 0)
    for mode, options in bound_module.OPTIONS.items()
}


def test_merged_kernels_lose_little() -> None:
    program = pyramid(40, 0)
    limit = int(0.5 * program.peak_bytes)
    exact = floor(program, MACHINE, limit, "swap").overhead
    rough = floor(program, MACHINE, limit, "swap", max_gaps=1000, detail=0.1).overhead
    assert 0.5 * exact < rough <= exact + 1e-9


def test_no_time_to_solve_is_no_floor() -> None:
    program = pyramid(16, 0)
    result = floor(program, MACHINE, int(0.5 * program.peak_bytes), seconds=0.0)
    assert result.feasible and result.overhead == 0.0 and not result.swapped.any()


@settings(max_examples=4 * settings().max_examples)
@given(st.data())
def test_no_drawn_plan_is_below(data: st.DataObject) -> None:
    program = data.draw(programs() | networks())
    machine = data.draw(machines())
    # Each of the three can only raise the bound.
    issue_ns = data.draw(st.sampled_from([0, 0, 20]))
    wait_ns = data.draw(st.sampled_from([0, 0, 3]))
    machine = replace(machine, issue_ns=issue_ns, wait_ns=wait_ns)
    if contention := data.draw(st.sampled_from([0.0, 0.0, 0.4])):
        machine = replace(machine, copy_contention=contention, memory_bytes_per_s=3 * 10**9)
        program = replace(program, kernels=tuple(replace(k, bytes=40) for k in program.kernels))
    plan = data.draw(plans(program, reruns=True))
    required = lower(program, plan).required_bytes
    limit = required + data.draw(st.sampled_from([0, 0, 5]))
    swaps = [isinstance(d, Swap) for d in plan.decisions]
    modes = ["joint"] + ["swap"] * all(swaps) + ["recompute"] * (not any(swaps))
    detail, merged = data.draw(st.sampled_from([(1.0, {}), (0.02, {}), (0.005, {}), (1.0, SMALL), (0.1, SMALL)]))
    exact, deadlines = data.draw(st.sampled_from([(0, False), (0, True), (reruns.EXACT, False), (reruns.EXACT, True)]))
    try:
        timeline = in_the_long_run(program, plan, machine, limit)
    except PlanError:  # the host is full
        assume(False)
    for mode in modes:
        with patch.dict(bound_module.OPTIONS, merged), patch.object(reruns, "EXACT", exact):
            result = floor(program, machine, limit, mode, detail=detail, deadlines=deadlines)
        assert result.feasible and result.least_bytes <= required
        assert result.iteration_ns <= timeline.iteration_ns
        assert ((result.swapped >= 0) & (result.swapped + result.recomputed <= 1 + 1e-6)).all()


def test_rounding_finds_the_plans_that_are_best_by_hand() -> None:
    # Recomputing the tensor takes 10 ns, moving it 200.
    for mode, best in (("joint", Recompute(0, 0, 2)), ("swap", Swap(0, 0, 2))):
        assert planned("lp_round", sandwich(), MACHINE, 100, mode=mode).decisions == (best,)
    # It stops at the floor.
    planner = agents.make("lp_round", min_bytes=1)
    planner.plan(sandwich(), MACHINE, 100)
    assert planner.floor.iteration_ns == 60
    assert planner.simulator_calls == 2  # the rounded plan, and the final check


def test_ctrl_c_ends_a_solve() -> None:
    """The solver would run on until it is cancelled; a second interrupt meanwhile does not leave it running."""

    class Endless:
        def __init__(self) -> None:
            self.cancelled: Queue[None] = Queue()
            self.has_ended = False

        def run(self) -> None:
            main = threading.main_thread().ident
            for _ in range(2):
                while sys._current_frames()[main].f_code.co_name != "wait":
                    time.sleep(0)
                os.kill(os.getpid(), signal.SIGINT)
                self.cancelled.get()
            self.has_ended = True

        def cancelSolve(self) -> None:
            self.cancelled.put(None)

    linear = Linear()
    linear.row([(linear.column(1.0), 1.0)], 1.0)
    solver = Solver(linear)
    assert solver.optimum() is not None
    solver._highs = endless = Endless()
    with pytest.raises(KeyboardInterrupt):
        solver.optimum()
    assert endless.has_ended
