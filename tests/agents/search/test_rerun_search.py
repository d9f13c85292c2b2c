"""Tests rerun_search against brute force, the schedule, and Checkmate's published results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agents
from agents.search import rerun_search
from agents.search.rerun_moves import Rule, anneal, nodes_of, pruned, tables
from agents.search.rerun_search import least_bytes, rows
from simulator import Kernel, Plan, PlanError, Program, Rerun, Tensor, simulate
from simulator.compiled.encoding import decisions_of
from simulator.schedule import lower
from tests.agents.planned import planned
from tests.agents.search.stepwise import ticking
from tests.agents.search.test_search import pyramid
from tests.oracle.enumeration import rerun_plans
from tests.programs import BYTE_PER_NS as MACHINE
from tests.strategies import programs

DATA = Path(__file__).parents[2] / "data" / "checkmate"


def extra_ns(program: Program, plan: Plan, limit: int) -> int:
    return simulate(program, plan, MACHINE, limit).iteration_ns - program.ideal_ns


@pytest.mark.parametrize("seed", range(4))
def test_as_good_as_every_set_of_reruns(seed: int, few_moves: None) -> None:
    program = pyramid(3, seed)
    n = len(program.kernels)
    schedules = list(rerun_plans(program, [Rerun(k, b) for b in range(n) for k in range(b) if k < 3], 4))
    reach = min(required for _, required in schedules)
    assert reach < program.peak_bytes
    for limit in range(reach, program.peak_bytes, 5):
        best = min(ns for ns, required in schedules if required <= limit)
        plan = planned("rerun_search", program, MACHINE, limit, kicks=2)
        assert simulate(program, plan, MACHINE, limit).iteration_ns <= best


@given(st.data())
def test_costs_of_the_sweep_equal_those_of_the_schedule(data: st.DataObject) -> None:
    """Computed costs match the plans found for in-place kernels, several outputs and persistent results."""
    program = data.draw(programs())
    table = tables(program, 1)
    min_limit = least_bytes(program, table)
    if not min_limit <= program.peak_bytes - 1:
        return
    limit = data.draw(st.integers(min_limit, program.peak_bytes - 1))
    n = len(program.kernels)
    state = np.empty(4 * n + table.room, np.int64)
    rules = np.full(len(table.nodes), Rule.FREE, np.int64)
    rng = np.array([data.draw(st.integers(1, 2**62))], np.uint64)
    _, runs, ns, _ = anneal(rng, table, limit, rules, state, 0, 400, 10.0, 0.1, 1.0)
    if ns >= 0:
        plan = Plan(decisions_of(rows(pruned(table, runs), n)))
        plan.check(program)
        schedule = lower(program, plan)
        assert schedule.required_bytes <= limit
        assert sum(program.kernels[d.kernel].duration_ns for d in schedule.reruns) == ns


def in_place() -> Program:
    """Builds a batch norm, its ReLU in place, a kernel that reads in between, and a non-recomputable kernel."""
    size = [("x", 10, True), ("a", 10, False), ("y", 40, False), ("m", 4, False), ("z", 40, False), ("r", 8, False)]
    tensors = tuple(Tensor(name, nbytes, "activation", lasts) for name, nbytes, lasts in size)
    return Program(
        "in place",
        tensors,
        (
            Kernel("conv", "conv", "forward", (0,), (1,), 5),
            Kernel("norm", "norm", "forward", (1,), (2,), 3),
            Kernel("mean", "reduce", "forward", (2,), (3,), 2),
            Kernel("relu_", "activation", "forward", (2,), (2,), 1),
            Kernel("dropout", "dropout", "forward", (2,), (5,), 1, recomputable=False),
            Kernel("up", "conv", "forward", (1,), (4,), 7),
            Kernel("loss", "other", "forward", (4, 5), (5,), 2),
            Kernel("back", "conv", "backward", (2, 3, 5), (5,), 4),
        ),
    )


def test_writers_of_a_tensor_are_recomputed_together() -> None:
    program = in_place()
    assert nodes_of(program) == [[0], [1, 2, 3], [4, 6, 7], [5]]
    plan = planned("rerun_search", program, MACHINE, program.peak_bytes - 1, kicks=1)
    assert {d.kernel for d in plan.decisions} == {1, 2, 3}
    assert extra_ns(program, plan, program.peak_bytes - 1) == 6
    with pytest.raises(PlanError):
        lower(program, Plan((Rerun(3, 7),)))


def test_infeasible_limits_name_the_smallest_one() -> None:
    program = in_place()
    table = tables(program, 1)
    min_limit = least_bytes(program, table)
    with pytest.raises(agents.Infeasible, match=f"{min_limit:,} bytes"):
        planned("rerun_search", program, MACHINE, min_limit - 1)
    with pytest.raises(agents.Infeasible, match="min_bytes"):
        agents.make("rerun_search", kicks=1).plan(program, MACHINE, program.peak_bytes - 1)
    assert agents.make("rerun_search").plan(program, MACHINE, program.peak_bytes).decisions == ()


def test_the_time_budget_ends_the_search(few_moves: None, monkeypatch: pytest.MonkeyPatch) -> None:
    program = pyramid(8, 5)
    limit = int(0.6 * program.peak_bytes)
    monkeypatch.setattr(rerun_search, "time", ticking(1.0))  # a second at every look
    planned("rerun_search", program, MACHINE, limit, seconds=100.0, kicks=10**9)


def test_unet_at_10_gib_is_at_most_what_checkmate_published() -> None:
    models = json.loads((DATA / "answers.json").read_text())["models"]
    (published,) = (b for b in models[1]["budgets"] if b["budget_gib"] == 10)
    program = Program.load(DATA / models[1]["program"])
    plan = agents.make("rerun_search", kicks=0).plan(program, MACHINE, published["limit_bytes"])
    timeline = simulate(program, plan, MACHINE, published["limit_bytes"])
    assert timeline.peak_bytes <= published["limit_bytes"]
    assert timeline.iteration_ns <= published["schedule_ns"]
