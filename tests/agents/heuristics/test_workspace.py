"""Tests dynamic workspaces: small programs computed by hand, and properties on random programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import agents
from agents.floor import floor
from agents.heuristics.workspace import least_workspaces, plan_with_variants, relaxed, with_fastest_variants
from simulator import Engine, Kernel, Machine, OutOfMemory, Plan, PlanError, Program, Recompute, Swap, Tensor, simulate
from tests.agents.planned import planned
from tests.agents.test_floor import in_the_long_run
from tests.programs import BYTE_PER_NS
from tests.strategies import machines, plans, programs, with_algorithms

MACHINE = replace(BYTE_PER_NS, alignment=1)

# Two layers of 40 bytes. Bytes in use: 40 while a is written, 80 then. Algorithms are (duration, workspace).
PAIR = Program(
    "pair",
    (Tensor("a", 40), Tensor("b", 40)),
    (
        Kernel("first", "conv", "forward", (), (0,), 6, workspace=30, variants=((10, 0), (6, 30), (2, 100))),
        Kernel("second", "conv", "forward", (0,), (1,), 20, variants=((10, 20), (5, 60))),
        Kernel("last", "other", "backward", (0, 1), (), 7),
    ),
)


def test_least_workspaces_and_the_best_of_both() -> None:
    assert least_workspaces(PAIR) == ((0, 0),)  # the second's own needs none
    assert [(k.duration_ns, k.workspace) for k in relaxed(PAIR).kernels] == [(2, 0), (5, 0), (7, 0)]
    ties = replace(PAIR.kernels[0], variants=((5, 30), (6, 30)))
    assert least_workspaces(replace(PAIR, kernels=(ties, *PAIR.kernels[1:]))) == ((0, 0),)


def test_over_the_limit_with_the_least_workspaces() -> None:
    with pytest.raises(agents.Infeasible, match=r"^the plan: with minimal workspaces, kernel 1 needs 40 bytes"):
        with_fastest_variants(PAIR, Plan(), MACHINE, 79)
    with pytest.raises(PlanError, match="there is no kernel 9"):
        with_fastest_variants(PAIR, Plan(variants=((9, 0),)), MACHINE, 100)


# first 10, second 10, third 10, then first again 10 and last 10. While first runs: 40 bytes at first; again 80 of b and
# the a that it makes, beside c of 30: 110.
REPEATED = Program(
    "again",
    (Tensor("a", 40), Tensor("b", 40), Tensor("c", 30)),
    (
        Kernel("first", "conv", "forward", (), (0,), 10, variants=((4, 50), (3, 60))),
        Kernel("second", "conv", "forward", (0,), (1,), 10),
        Kernel("third", "conv", "forward", (1,), (2,), 10),
        Kernel("last", "other", "backward", (0, 1, 2), (), 10),
    ),
)
# k0 writes a, which is swapped while k1 runs, for 100 ns, and is back before k2, the one with a faster algorithm,
# because rule 5 fetches early. Copies take 5 ns.
EARLY = Program(
    "early",
    (Tensor("a", 50), Tensor("b", 10)),
    (
        Kernel("k0", "other", "forward", (), (0,), 10),
        Kernel("k1", "other", "forward", (), (1,), 100),
        Kernel("k2", "conv", "backward", (), (), 40, variants=((10, 50),)),
        Kernel("k3", "other", "backward", (0, 1), (), 10),
    ),
)
FAST = Machine("ten bytes per ns", 10**6, 10**10, 10**10, d2h_latency_ns=0, h2d_latency_ns=0)
RERUN = Plan((Recompute(0, 1, 3),))
SWAPPED = Plan((Swap(0, 0, 3),))
FASTER = replace(SWAPPED, variants=((2, 0),))


@pytest.mark.parametrize(
    ("program", "plan", "limit", "machine", "variants", "iteration_ns"),
    [
        # The first has 40 bytes left at a limit of 80, the second none; 60 and 20 at 100; 100 and 60 at 140.
        (PAIR, Plan(), 80, MACHINE, (), 6 + 20 + 7),  # 6 ns in 30 bytes are the first's own
        (PAIR, Plan(), 99, MACHINE, (), 6 + 20 + 7),
        (PAIR, Plan(), 100, MACHINE, ((1, 0),), 6 + 10 + 7),
        (PAIR, Plan(), 139, MACHINE, ((1, 0),), 6 + 10 + 7),
        (PAIR, Plan(), 140, MACHINE, ((0, 2), (1, 1)), 2 + 5 + 7),
        # Bytes left are the fewest of all runs.
        (REPEATED, RERUN, 159, MACHINE, (), 50),
        (REPEATED, RERUN, 160, MACHINE, ((0, 0),), 4 + 10 + 10 + 4 + 10),
        (REPEATED, RERUN, 170, MACHINE, ((0, 1),), 3 + 10 + 10 + 3 + 10),
        # Copies give way only where that is shorter. With 50 of workspace a cannot be back before k2 ends; k3 then
        # waits for 5 ns, but k2 is 30 faster.
        (EARLY, SWAPPED, 100, FAST, ((2, 0),), 10 + 100 + 10 + 5 + 10),
        # Where the copy takes 50 ns it is not worth it, and a plan that has it so is undone: 10 + 100 + 10 + 50 + 10.
        (EARLY, SWAPPED, 100, MACHINE, (), 10 + 100 + 40 + 10),
        (EARLY, FASTER, 100, MACHINE, (), 10 + 100 + 40 + 10),
    ],
)
def test_the_fastest_that_fit_the_bytes_left(
    program: Program, plan: Plan, limit: int, machine: Machine, variants: tuple, iteration_ns: int
) -> None:
    filled = with_fastest_variants(program, plan, machine, limit)
    assert filled == replace(plan, variants=variants)
    assert simulate(program, filled, machine, limit).iteration_ns == iteration_ns


@given(st.data())
def test_never_over_the_limit_and_never_slower(data: st.DataObject) -> None:
    program, variants = data.draw(with_algorithms(data.draw(programs())))
    plan = replace(data.draw(plans(program)), variants=variants)
    machine = data.draw(machines())
    smallest = replace(plan, variants=least_workspaces(program))
    required = simulate(program, smallest, machine, 10**6).required_bytes
    limit = required + data.draw(st.integers(0, 40))
    old_ns = [simulate(program, smallest, machine, limit).iteration_ns]
    try:
        old_ns.append(simulate(program, plan, machine, limit).iteration_ns)
    except OutOfMemory:
        pass
    engine = Engine(program, machine, limit)
    filled = with_fastest_variants(program, plan, machine, limit, engine)
    timeline = simulate(program, filled, machine, limit)
    assert timeline.required_bytes <= limit and timeline.peak_bytes <= limit
    assert timeline.iteration_ns <= min(old_ns)
    assert 0 < engine.calls < 200
    with pytest.raises(agents.Infeasible):
        with_fastest_variants(program, plan, machine, required - 1)


@given(st.data())
def test_the_relaxed_program_has_the_floor(data: st.DataObject) -> None:
    program, variants = data.draw(with_algorithms(data.draw(programs())))
    plan = replace(data.draw(plans(program)), variants=variants)
    machine = data.draw(machines())
    required = simulate(program, plan, machine, 10**6).required_bytes
    timeline = in_the_long_run(program, plan, machine, required)
    bound = floor(relaxed(program), machine, required)
    assert bound.feasible and bound.least_bytes <= required
    assert bound.iteration_ns <= timeline.iteration_ns


def network(layers: int = 6) -> Program:
    """Builds convolutions, forward and backward, of 4 ns with 30 bytes of workspace, or 10 ns without."""
    tensors = [Tensor("x", 1, "input", True), *(Tensor(f"y{i}", 20) for i in range(layers))]
    tensors += [Tensor(f"d{i}", 5, "gradient") for i in range(layers)]
    slow = ((10_000, 0),)
    kernels = [Kernel("conv", "conv", "forward", (i,), (i + 1,), 4_000, 30, variants=slow) for i in range(layers)]
    for i in reversed(range(layers)):
        reads = (i + 1, layers + i + 2) if i < layers - 1 else (i + 1,)
        kernels.append(Kernel("back", "conv", "backward", reads, (layers + i + 1,), 4_000, 30, variants=slow))
    return Program("network", tuple(tensors), tuple(kernels))


@pytest.mark.parametrize("name", ["superneurons", "autoswap_swdoa", "smartpool+autoswap"])
def test_every_planner_plans_for_tensors_then_fills_and_never_loses_to_fast_algorithms(name: str) -> None:
    program = network()
    shorter = 0
    for limit in (75, 95, *range(100, 157, 8)):
        combined, filled, base = (agents.make(name, min_bytes=1) for _ in range(3))
        fixed = base.plan(program.with_variants(least_workspaces(program)), MACHINE, limit)
        plan = plan_with_variants(filled, program, MACHINE, limit, include_default=False)
        assert plan.decisions == fixed.decisions and plan.limit == fixed.limit <= limit
        smallest = replace(plan, variants=least_workspaces(program))
        assert plan == smallest or name != "smartpool+autoswap"  # its addresses are for these workspaces
        alternatives = [plan, smallest]
        try:
            alternatives.append(base.plan(program, MACHINE, limit))
        except agents.Infeasible:
            pass
        times = [simulate(program, p, MACHINE, p.limit).iteration_ns for p in alternatives]
        best = plan_with_variants(combined, program, MACHINE, limit)
        assert simulate(program, best, MACHINE, best.limit).iteration_ns <= min(times) and times[0] <= times[1]
        shorter += min(times) < times[0]
        assert best.fingerprint == program.fingerprint and combined.simulator_calls >= len(alternatives)
    assert shorter  # planning for fast algorithms is worth something


def test_superneurons_has_the_option() -> None:
    program = network()
    limit = 95
    plan = planned("superneurons", program, MACHINE, limit, workspace=True)
    paper = plan_with_variants(agents.make("superneurons", min_bytes=1), program, MACHINE, limit, include_default=False)
    assert plan == paper and plan.variants
