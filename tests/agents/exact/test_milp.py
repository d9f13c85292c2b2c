"""The exact planner against brute force and against programs whose optimum is computed by hand."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import agents
from agents.exact.milp import MILP, Costs
from agents.exact.milp_model import Recomputation
from agents.planner import Rows, ways_of
from simulator import Gap, Kernel, Machine, Program, Recompute, Tensor
from simulator.compiled.encoding import RECOMPUTE
from simulator.compiled.engine import Engine, rows_of
from simulator.plan import cannot_recompute
from tests import tiny
from tests.strategies import machines, networks, programs, reachable_limits

MACHINE = Machine("byte per ns", 10**6, 10**9, 10**9, copy_latency_ns=0)


def extra_ns(program: Program, limit: int, **options: object) -> tuple[int, MILP]:
    """Time of the plan beyond the ideal, and the planner."""
    planner = MILP(min_bytes=1, calls=50, **options)  # type: ignore[arg-type]
    plan = planner.plan(program, MACHINE, limit)
    score = Engine(program, MACHINE, limit).score(rows_of(plan.decisions))
    assert score.feasible and planner.bound_ns <= score.iteration_ns
    assert planner.gap == pytest.approx(100 * (score.iteration_ns - planner.bound_ns) / program.ideal_ns)
    return score.iteration_ns - program.ideal_ns, planner


def pyramid(layers: int) -> Program:
    """Layers of 1 byte and 1 ns; the way back reads each output again, last first, and frees it."""
    forward = [Kernel(f"f{i}", "conv", "forward", (i - 1,) if i else (), (i,), 1) for i in range(layers)]
    backward = [Kernel(f"b{i}", "conv", "backward", (i,), (), 1) for i in reversed(range(layers))]
    return Program("pyramid", tuple(Tensor(f"x{i}", 1) for i in range(layers)), tuple(forward + backward))


@pytest.mark.parametrize("solver", ["highs", "cpsat"])
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (6, 0),
        (5, 1),  # f5 and b5 see all six: one is dropped and made again
        (4, 2),
        (3, 3),  # x3 stays; b2 runs f0 f1 f2 and keeps the three, which fit then
        # x4 and x5 alone fit beside f5. b3 runs f0 f1 f2 f3, b2 runs f0 f1 f2, neither with room to keep; b1 runs
        # f0 f1 and keeps x0: 4 + 3 + 2.
        (2, 9),
    ],
)
def test_pyramid_by_hand(limit: int, expected: int, solver: str) -> None:
    found, planner = extra_ns(pyramid(6), limit, mode="recompute", solver=solver)
    assert (found, planner.gap, planner.status) == (expected, 0.0, "optimal")


def test_what_is_impossible_is_proven_so() -> None:
    planner = MILP("recompute", min_bytes=1, calls=50)
    with pytest.raises(agents.Infeasible, match="it is proven that no recompute plan fits"):
        planner.plan(pyramid(6), MACHINE, 1)  # f1 needs two
    assert planner.status == "infeasible"


def two_uses(rest: int) -> Program:
    """a (10 bytes, 30 ns), b (10 bytes, 20 ns, from a); 20 bytes of workspace in kernel 2; b and then a are read, with
    ``rest`` bytes of workspace in between."""
    kernels = (
        Kernel("f1", "conv", "forward", (), (0,), 30),
        Kernel("f2", "conv", "forward", (0,), (1,), 20),
        Kernel("top", "conv", "forward", (), (), 10, workspace=20),
        Kernel("b2", "conv", "backward", (1,), (), 10),
        Kernel("rest", "conv", "backward", (), (), 10, workspace=rest),
        Kernel("b1", "conv", "backward", (0,), (), 10),
    )
    return Program("two uses", (Tensor("a", 10), Tensor("b", 10)), kernels)


@pytest.mark.parametrize(
    ("rest", "expected", "keep"),
    [
        (10, 50, True),  # both are away beside the top; f1 f2 run for b2, and a stays for b1
        (20, 80, False),  # a would not fit beside the rest: f1 runs once more
    ],
)
def test_it_keeps_where_that_pays(rest: int, expected: int, keep: bool) -> None:
    program = two_uses(rest)
    found, planner = extra_ns(program, 20, mode="recompute")
    assert (found, planner.status) == (expected, "optimal")
    plan = planner.plan(program, MACHINE, 20)
    assert Recompute(1, 1, 3, keep) in plan.decisions


def test_it_drops_late_what_a_chain_needs() -> None:
    # Beside kernel 2 there is room for x but not for y; beside kernel 4 for neither (y is dead by then). If x goes as
    # its gap opens, y costs f0 f1 and x f0: 210. If it goes after kernel 3, y costs f1 and x f0.
    kernels = (
        Kernel("f0", "conv", "forward", (), (0,), 100),
        Kernel("f1", "conv", "forward", (0,), (1,), 10),
        Kernel("top", "conv", "forward", (), (), 10, workspace=20),
        Kernel("b1", "conv", "backward", (1,), (), 10),
        Kernel("end", "conv", "backward", (), (), 10, workspace=30),
        Kernel("b0", "conv", "backward", (0,), (), 10),
    )
    program = Program("late", (Tensor("x", 10), Tensor("y", 20)), kernels)
    found, planner = extra_ns(program, 30, mode="recompute")
    assert (found, planner.status) == (110, "optimal")
    assert Recompute(0, 3, 5) in planner.plan(program, MACHINE, 30).decisions


def test_a_gap_is_emptied_once() -> None:
    # a and c (30 and 40 ns) make b (20 ns); the top has room for none of them. All three run for b. One of a and c
    # would fit beside the rest, but what b's chain recovers is kept as a whole or not at all, and a kept one cannot
    # be dropped anew: 90 + 30 + 40 and not 90 + 30.
    kernels = (
        Kernel("fa", "conv", "forward", (), (0,), 30),
        Kernel("fc", "conv", "forward", (), (1,), 40),
        Kernel("fb", "conv", "forward", (0, 1), (2,), 20),
        Kernel("top", "conv", "forward", (), (), 10, workspace=30),
        Kernel("bb", "conv", "backward", (2,), (), 10),
        Kernel("rest", "conv", "backward", (), (), 10, workspace=20),
        Kernel("ba", "conv", "backward", (0,), (), 10),
        Kernel("bc", "conv", "backward", (1,), (), 10),
    )
    program = Program("once", tuple(Tensor(name, 10) for name in "acb"), kernels)
    assert extra_ns(program, 30, mode="recompute")[0] == 160


def test_nothing_runs_again_without_need() -> None:
    # Beside the top there is room for one of x and u (10 bytes each), not for y (5). If u stays, fy makes y, but then x
    # cannot be made for bx: 15 for z, 10 and 20 of workspace. Made for by, when it fits, x could be kept; but y does
    # not need it. So x stays, and fu fy run: 55. Dropping all three costs 60.
    kernels = (
        Kernel("fx", "conv", "forward", (), (0,), 5, workspace=20),
        Kernel("fu", "conv", "forward", (0,), (1,), 50),
        Kernel("fy", "conv", "forward", (1,), (2,), 5),
        Kernel("top", "conv", "forward", (), (), 10, workspace=30),
        Kernel("by", "conv", "backward", (1, 2), (3,), 10),
        Kernel("bx", "conv", "backward", (0, 3), (), 10),
    )
    program = Program("need", (Tensor("x", 10), Tensor("u", 10), Tensor("y", 5), Tensor("z", 15)), kernels)
    found, planner = extra_ns(program, 40, mode="recompute")
    assert (found, planner.status) == (55, "optimal")


@pytest.mark.parametrize(("limit", "fits"), [(42, True), (41, False)])
def test_a_chain_holds_what_it_will_overwrite(limit: int, fits: bool) -> None:
    # y must be away beside the top: 10 + 10 (z) + 25. Its chain is f1 f2 f3, as a and m are dead; f3 overwrites x
    # without reading it, so that x is held while f2 runs: 10 (z) + 1 (a) + 10 (x) + 1 (m) + 20 = 42.
    kernels = (
        Kernel("f1", "conv", "forward", (), (0, 1), 5),
        Kernel("f2", "conv", "forward", (), (2,), 5, workspace=20),
        Kernel("f3", "conv", "forward", (0, 2), (3, 1), 5),
        Kernel("top", "conv", "forward", (), (4,), 10, workspace=25),
        Kernel("by", "conv", "backward", (3, 4), (), 10),
    )
    sizes = {"a": 1, "x": 10, "m": 1, "y": 10, "z": 10}
    program = Program("overwrite", tuple(Tensor(*item) for item in sizes.items()), kernels)
    if fits:
        assert extra_ns(program, limit, mode="recompute")[0] == 15
    else:
        with pytest.raises(agents.Infeasible, match="it is proven"):
            MILP("recompute", min_bytes=1, calls=50).plan(program, MACHINE, limit)


@pytest.mark.parametrize(("mode", "expected"), [("swap", 50), ("recompute", 10), ("joint", 10)])
def test_modes_by_hand(mode: str, expected: int) -> None:
    """The optima are derived in tests/tiny.py."""
    planner = MILP(mode, min_bytes=1, calls=50)
    plan = planner.plan(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT)
    score = Engine(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT).score(rows_of(plan.decisions))
    assert score.iteration_ns - tiny.PROGRAM.ideal_ns == expected
    assert planner.bound_ns <= score.iteration_ns
    assert planner.status == "optimal" if mode == "recompute" else planner.status in ("optimal", "searched")


def every(options: list[list[tuple[int, ...] | None]]) -> Iterator[Rows]:
    for chosen in itertools.product(*options):
        yield np.array([row for row in chosen if row], dtype=np.int64).reshape(-1, 6)


def training(seed: int, layers: int = 4) -> Program:
    """A small random step: skip connections, second outputs, updates in place, workspaces, the way back."""
    rng = random.Random(seed)
    tensors, kernels, outputs = [Tensor("w", rng.randint(1, 10), "parameter", True)], [], []

    def new(name: str, nbytes: int) -> int:
        tensors.append(Tensor(name, nbytes))
        return len(tensors) - 1

    def kernel(name: str, inputs: list[int], written: list[int], longest: int) -> None:
        workspace, duration = rng.choice([0, 0, 5, 20]), rng.randint(0, longest)
        unique = (tuple(dict.fromkeys(inputs)), tuple(dict.fromkeys(written)))
        kernels.append(Kernel(name, "conv", "forward" if name[0] == "f" else "backward", *unique, duration, workspace))

    for i in range(layers):
        inputs = [outputs[-1], *rng.sample(outputs, rng.random() < 0.4)] if outputs else [0]
        in_place = rng.sample(outputs, rng.random() < 0.15) if outputs else []
        outputs.append(new(f"y{i}", rng.randint(1, 30)))
        second = [new(f"s{i}", rng.randint(1, 30))] if rng.random() < 0.2 else []
        kernel(f"f{i}", inputs, [outputs[-1], *second, *in_place], 12)
    gradient: list[int] = []
    for i in reversed(range(layers)):
        inputs = [outputs[i], *gradient, *rng.sample(range(1, len(outputs)), rng.random() < 0.4)]
        gradient = [new(f"g{i}", rng.randint(0, 30))]
        kernel(f"b{i}", inputs, [*gradient, *rng.sample(outputs, rng.random() < 0.15)], 20)
    return Program(f"training{seed}", tuple(tensors), tuple(kernels))


def check_recomputation(program: Program, limits: Callable[[list[int]], list[int]]) -> bool:
    """Against every recompute-only plan, late drops included: the optimum, or the proof that there is none. The
    assignment of any plan costs what the plan does, and keeps the rows if the plan fits. False: too many plans."""
    options: list[list[tuple[int, ...] | None]] = []
    for gap in program.gaps(1):
        t, after, before = gap
        if cannot_recompute(program, *gap) is None:
            options.append(
                [None, *((RECOMPUTE, t, k, before, keep, -1) for k in range(after, before) for keep in (0, 1))]
            )
    if math.prod(len(o) for o in options) > 2500:
        return False
    engine = Engine(program, MACHINE, 10**9)
    plans = [(engine.score(rows), rows) for rows in every(options)]
    for limit in limits(sorted({s.required_bytes for s, _ in plans})):
        fits = [s.iteration_ns for s, _ in plans if s.required_bytes <= limit]
        planner = MILP("recompute", min_bytes=1, calls=30)
        if not fits:
            with pytest.raises(agents.Infeasible, match="proven"):
                planner.plan(program, MACHINE, limit)
            continue
        plan = planner.plan(program, MACHINE, limit)
        score = Engine(program, MACHINE, limit).score(rows_of(plan.decisions))
        assert score.iteration_ns == min(fits) == planner.bound_ns
        model = Recomputation(program, limit, 1)
        for s, rows in plans[:: max(1, len(plans) // 20)]:
            x = model.assignment(rows)
            assert sum(c * v for c, v in zip(model.model.cost, x, strict=True)) == s.iteration_ns - program.ideal_ns
            if s.required_bytes <= limit:
                assert all(sum(c * x[v] for c, v in terms) <= bound for terms, bound in model.model.rows)
    return True


def test_no_recomputation_is_faster() -> None:
    checked = [check_recomputation(training(seed), lambda need: [need[0] - 1, *need[:: 1 + len(need) // 3]])
               for seed in range(30)]  # fmt: skip
    assert sum(checked) > 10


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), programs(12) | networks())
def test_no_recomputation_of_any_program_is_faster(data: st.DataObject, program: Program) -> None:
    check_recomputation(program, lambda need: [data.draw(st.sampled_from(need))])


def test_what_a_partial_plan_costs_at_least() -> None:
    # 40 bytes each way (80 ns). a1: 40 ns of kernels between f2 and b2 leave 80 - (10 + 10 + 20 + 20) = 20 of wait;
    # a2 30 ns between f3 and b3, so 80 - 30 = 50; a2's gap lies within a1's: the larger counts.
    costs = Costs(tiny.PROGRAM, tiny.MACHINE)
    a1, a2 = (0, tiny.A1, 1, 6, -1), (0, tiny.A2, 2, 5, -1)
    assert tiny.PROGRAM.gap_ns(Gap(*a1[1:4])) == 60 and tiny.PROGRAM.gap_ns(Gap(*a2[1:4])) == 30
    assert [costs.least_ns(rows) - 120 for rows in ([a1], [a2], [a1, a2])] == [20, 50, 50]
    # f1 makes a1 in 10 ns, f2 a2.
    assert costs.least_ns([(1, *a1[1:4], 0), (1, *a2[1:4], 1)]) == 120 + 20


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(0, 10**6), machines())
def test_no_plan_costs_less_than_that(data: st.DataObject, seed: int, machine: Machine) -> None:
    program = training(seed)
    costs, engine = Costs(program, machine), Engine(program, machine, 10**9)
    options: list[list[tuple[int, ...] | None]] = [[None, *ways_of(program, g, "joint")] for g in program.gaps(1)]
    for _ in range(30):
        rows = [row for row in (data.draw(st.sampled_from(o)) for o in options) if row]
        assert costs.least_ns(rows) <= engine.score(np.array(rows, dtype=np.int64).reshape(-1, 6)).iteration_ns


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), programs(7), machines(), st.sampled_from(["swap", "joint"]))
def test_no_enumerated_plan_is_faster(data: st.DataObject, program: Program, machine: Machine, mode: str) -> None:
    options: list[list[tuple[int, ...] | None]] = [[None, *ways_of(program, g, mode)] for g in program.gaps(1)]
    if math.prod(len(o) for o in options) > 1500:
        return
    engine = Engine(program, machine, 10**9)
    limit = data.draw(st.sampled_from(sorted({engine.score(rows).required_bytes for rows in every(options)})))
    engine = Engine(program, machine, limit)
    best = min(s.iteration_ns for s in map(engine.score, every(options)) if s.feasible)
    planner = MILP(mode, min_bytes=1, calls=30)
    found = engine.score(rows_of(planner.plan(program, machine, limit).decisions))
    assert found.feasible and planner.bound_ns <= found.iteration_ns <= best
    assert planner.status in ("optimal", "searched")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), programs() | networks(), machines(), st.sampled_from(["swap", "recompute", "joint"]))
def test_any_program_at_any_limit(data: st.DataObject, program: Program, machine: Machine, mode: str) -> None:
    limit = data.draw(reachable_limits(program) | st.integers(0, program.peak_bytes))
    planner = MILP(mode, time_limit=0.05, min_bytes=data.draw(st.sampled_from([1, 20])), calls=30)
    try:
        plan = planner.plan(program, machine, limit)
    except agents.Infeasible:
        assert limit < program.peak_bytes
        return
    plan.check(program)
    score = Engine(program, machine, limit).score(rows_of(plan.decisions))
    assert score.feasible and planner.gap >= 0.0
    assert planner.status in ("optimal", "searched", "stopped")
    assert (planner.gap == 0.0) == (planner.status == "optimal")


def test_stopped_it_is_no_worse_than_the_heuristics() -> None:
    program = pyramid(40)
    found, planner = extra_ns(program, 12, mode="recompute", time_limit=0.01)
    for name, options in (("memonger", {}), ("annealing", {"mode": "recompute", "calls": 50})):
        rows = rows_of(agents.make(name, min_bytes=1, **options).plan(program, MACHINE, 12).decisions)
        assert found <= Engine(program, MACHINE, 12).score(rows).iteration_ns - program.ideal_ns
    assert planner.bound_ns > program.ideal_ns


def test_bad_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="solver: expected one of highs, cpsat"):
        agents.make("milp", solver="gurobi")
    with pytest.raises(ValueError, match="time_limit: expected more than 0"):
        agents.make("milp", time_limit=0)
    with pytest.raises(ValueError, match="calls: expected at least"):
        agents.make("milp", calls=1)
    with pytest.raises(ValueError, match="mode: expected"):
        agents.make("milp", mode="both")
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"pip install 'headroom\[milp\]'"):
        agents.make("milp", solver="cpsat")
