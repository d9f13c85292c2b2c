"""The exact planner against brute force and against programs whose optimum is computed by hand."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agents
from agents.exact.milp import MILP, Costs, earliest, highs, move_copies, with_copies
from agents.exact.milp_model import Recomputation
from agents.planner import Rows, ways_of
from simulator import Gap, Kernel, Machine, Program, Recompute, Tensor
from simulator.compiled.encoding import NEVER, RECOMPUTE, decisions_of
from simulator.compiled.engine import Engine, rows_of
from simulator.plan import Plan, Swap, cannot_recompute
from simulator.schedule import lower, reruns
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
        # x4 and x5 alone fit beside f5. b3 runs f0 f1 f2 f3, and x2 stays, for which there is room; b1 runs f0 f1, and
        # x0 stays: 4 + 2.
        (2, 6),
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
    ("rest", "expected", "at"),
    [
        (10, 50, 3),  # both are away beside the top; f1 f2 run for b2, and a stays for b1
        (20, 80, None),  # a would not fit beside the rest: f1 runs once more
    ],
)
def test_it_recovers_for_good_where_that_pays(rest: int, expected: int, at: int | None) -> None:
    program = two_uses(rest)
    found, planner = extra_ns(program, 20, mode="recompute")
    assert (found, planner.status) == (expected, "optimal")
    plan = planner.plan(program, MACHINE, 20)
    dropped = {d.tensor: d for d in plan.decisions}
    assert dropped.keys() == {0, 1}
    assert lower(program, plan).returns[dropped[0]] == (5 if at is None else at)


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


@pytest.mark.parametrize(("rest", "expected"), [(10, 90), (20, 120), (30, 160)])
def test_a_gap_is_emptied_once(rest: int, expected: int) -> None:
    # a and c (30 and 40 ns) make b (20 ns); the top has room for none of them. All three run for bb. Beside the rest
    # there is room for both, for one (c stays, and a is made once more) or for none.
    kernels = (
        Kernel("fa", "conv", "forward", (), (0,), 30),
        Kernel("fc", "conv", "forward", (), (1,), 40),
        Kernel("fb", "conv", "forward", (0, 1), (2,), 20),
        Kernel("top", "conv", "forward", (), (), 10, workspace=30),
        Kernel("bb", "conv", "backward", (2,), (), 10),
        Kernel("rest", "conv", "backward", (), (), 10, workspace=rest),
        Kernel("ba", "conv", "backward", (0,), (), 10),
        Kernel("bc", "conv", "backward", (1,), (), 10),
    )
    program = Program("once", tuple(Tensor(name, 10) for name in "acb"), kernels)
    assert extra_ns(program, 30, mode="recompute")[0] == expected


def test_it_recovers_where_there_is_room() -> None:
    # Beside the top there is room for one of x and u (10 bytes each), not for y (5). If u stays, fy makes y. x cannot
    # be made for bx: 15 for z, 10 and 20 of workspace. But it can be for by, which does not need it: 10 for u, 10
    # and 20. So fx fy run: 10. If x stayed, fu fy would run: 55.
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
    assert (found, planner.status) == (10, "optimal")
    dropped = {d.tensor: d for d in planner.plan(program, MACHINE, 40).decisions}
    assert dropped.keys() == {0, 2} and lower(program, Plan(tuple(dropped.values()))).returns[dropped[0]] == 4


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


@pytest.mark.parametrize(("mode", "expected"), [("swap", 40), ("recompute", 10), ("joint", 10)])
def test_modes_by_hand(mode: str, expected: int) -> None:
    """Recomputation: tests/tiny.py. A swap: a1, copied from 10 on, has left at 50, 20 ns after f4 could begin; it
    returns from the end of b4 on, in 40 ns, of which b3 takes 20. a2 would have left at 60, and return
    beside no kernel."""
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


def cuts_of(program: Program, gaps: list[Gap], gap: Gap) -> list[int]:
    """Kernels inside a gap that end one whose pass may run all that made the tensor."""
    found = []
    for k in sorted({g.before for g in gaps if gap.after < g.before < gap.before}):
        away = frozenset(g.tensor for g in gaps if g.after < k <= g.before)
        again = {w for g in gaps if g.before == k for w in reruns(program, g.tensor, k, away)}
        if again.issuperset(w for w in program.writes[gap.tensor] if w < k):
            found.append(k)
    return found


def check_recomputation(program: Program, limits: Callable[[list[int]], list[int]]) -> bool:
    """Against every recompute-only plan, late drops included, back at a cut: the optimum, or the proof that there is
    none; plans with ``keep`` are no better, and the planner is no worse. The assignment of any
    plan costs what the plan does, and keeps the rows if the plan fits. False: too many plans."""
    gaps = [g for g in program.gaps(1) if cannot_recompute(program, *g) is None]
    cut_at = {(g.tensor, g.before): cuts_of(program, gaps, g) for g in gaps}
    keeps: list[list[tuple[int, ...] | None]] = []
    returns: list[list[tuple[int, ...] | None]] = []
    for t, after, before in gaps:
        dropped, at = range(after, before), cut_at[t, before]
        keeps.append([None, *((RECOMPUTE, t, k, before, keep, -1) for k in dropped for keep in (0, 1))])
        returns.append([None, *((RECOMPUTE, t, k, before, 0, a) for k in dropped for a in (-1, *at) if a < 0 or k < a)])
    if math.prod(map(len, keeps)) + math.prod(map(len, returns)) > 5000:
        return False
    engine = Engine(program, MACHINE, 10**9)
    old, new = ([(engine.score(rows), rows) for rows in every(options)] for options in (keeps, returns))
    plans = old + new
    for limit in limits(sorted({s.required_bytes for s, _ in plans})):
        # All that ``keep`` can say, ``at`` can.
        fits = [s.iteration_ns for s, _ in new if s.required_bytes <= limit]
        assert min(fits, default=NEVER) <= min([NEVER, *(s.iteration_ns for s, _ in old if s.required_bytes <= limit)])
        model = Recomputation(program, limit, 1)
        answer = highs(model.model, 60, None, 0)
        assert answer.infeasible == (not fits)
        assert answer.bound == (min(fits) - program.ideal_ns if fits else None)
        planner = MILP("recompute", min_bytes=1, calls=30)
        try:
            plan = planner.plan(program, MACHINE, limit)
        except agents.Infeasible as error:
            assert not fits and "proven" in str(error)
            continue
        ns = Engine(program, MACHINE, limit).score(rows_of(plan.decisions)).iteration_ns
        assert planner.bound_ns <= ns <= min(fits, default=NEVER)
        assert ns == planner.bound_ns or not fits
        back = lower(program, plan).returns.items()
        if all(until in (d.before, *cut_at[d.tensor, d.before]) for d, until in back):
            assert ns == min(fits)  # else a heuristic plan that is none of these may be faster
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


@given(st.data(), programs(12) | networks())
def test_no_recomputation_of_any_program_is_faster(data: st.DataObject, program: Program) -> None:
    check_recomputation(program, lambda need: [data.draw(st.sampled_from(need))])


def test_what_a_partial_plan_costs_at_least() -> None:
    # 40 bytes each way (80 ns). a1: 70 ns of kernels between f1, which writes it, and b2 leave 80 - 70 of wait; a2: 40
    # ns between f2 and b3, so 80 - 40. a2's gap lies within a1's: the larger counts.
    costs = Costs(tiny.PROGRAM, tiny.MACHINE)
    a1, a2 = (0, tiny.A1, 1, 6, -1), (0, tiny.A2, 2, 5, -1)
    assert tiny.PROGRAM.gap_ns(Gap(*a1[1:4])) == 60 and tiny.PROGRAM.gap_ns(Gap(*a2[1:4])) == 30
    assert [costs.least_ns(rows) - 120 for rows in ([a1], [a2], [a1, a2])] == [10, 40, 40]
    # f1 makes a1 in 10 ns, f2 a2.
    assert costs.least_ns([(1, *a1[1:4], 0), (1, *a2[1:4], 1)]) == 120 + 20


@given(st.data(), st.integers(0, 10**6), machines())
def test_no_plan_costs_less_than_that(data: st.DataObject, seed: int, machine: Machine) -> None:
    program = training(seed)
    costs, engine = Costs(program, machine), Engine(program, machine, 10**9)
    options: list[list[tuple[int, ...] | None]] = [[None, *ways_of(program, g, "joint")] for g in program.gaps(1)]
    for _ in range(30):
        rows = [row for row in (data.draw(st.sampled_from(o)) for o in options) if row]
        table = np.array(rows, dtype=np.int64).reshape(-1, 6)
        leads = np.array([data.draw(st.integers(0, most)) for most in earliest(program, table)], dtype=np.int64)
        copied = with_copies(program, table, leads)
        Plan(decisions_of(copied)).check(program)
        assert costs.least_ns(rows) <= min(engine.score(r).iteration_ns for r in (table, copied))


def test_a_copy_moves_where_that_is_faster() -> None:
    engine = Engine(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT)
    late = rows_of(tiny.SWAP_PLAN.decisions)
    assert earliest(tiny.PROGRAM, late).tolist() == [1]  # f1 writes a1, f2 reads it
    rows, ns = move_copies(tiny.PROGRAM, engine, late, engine.score(late).iteration_ns)
    assert decisions_of(rows) == (Swap(tiny.A1, 1, 6, copy=0),) and ns == 120 + 40
    # w is written by the last kernel, and swapped in each of two gaps: the second copy is made after the first.
    program = Program(
        "twice", (Tensor("w", 10, "parameter", True),),
        tuple(Kernel(f"k{i}", "conv", "forward", (0,) * (i in (0, 2, 5)), (0,) * (i == 5), 10) for i in range(6)),
    )  # fmt: skip
    assert earliest(program, np.array([(0, 0, 0, 2, -1, -1), (0, 0, 2, 5, -1, -1)])).tolist() == [1, 0]
    assert earliest(program, np.array([(0, 0, 3, 5, -1, -1)])).tolist() == [4]


def test_a_start_is_brought_into_the_form_of_the_model() -> None:
    program = two_uses(10)
    model = Recomputation(program, 30, 1)
    for at, nearest in ((2, 3), (3, 3), (4, None), (5, None), (None, None)):
        rows = model.nearest(rows_of((Recompute(0, 1, 5, at=at),)))
        assert rows is not None and decisions_of(rows) == (Recompute(0, 1, 5, at=nearest),)
    kept = model.nearest(rows_of((Recompute(0, 1, 5), Recompute(1, 1, 3, True))))
    assert kept is not None and set(decisions_of(kept)) == {Recompute(0, 1, 5, at=3), Recompute(1, 1, 3)}
    assert model.nearest(rows_of((Swap(0, 1, 5),))) is None


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


@given(st.data(), programs() | networks(), machines(), st.sampled_from(["swap", "recompute", "joint"]))
def test_any_program_at_any_limit(data: st.DataObject, program: Program, machine: Machine, mode: str) -> None:
    limit = data.draw(reachable_limits(program) | st.integers(0, program.peak_bytes))
    planner = MILP(mode, seconds=0.05, min_bytes=data.draw(st.sampled_from([1, 20])), calls=30)
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
    found, planner = extra_ns(program, 12, mode="recompute", seconds=0.01)
    for name, options in (("memonger", {}), ("annealing", {"mode": "recompute", "calls": 50})):
        rows = rows_of(agents.make(name, min_bytes=1, **options).plan(program, MACHINE, 12).decisions)
        assert found <= Engine(program, MACHINE, 12).score(rows).iteration_ns - program.ideal_ns
    assert planner.bound_ns > program.ideal_ns


def test_a_solver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ImportError, match=r"pip install 'headroom\[milp\]'"):
        agents.make("milp", solver="cpsat")
