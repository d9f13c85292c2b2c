"""Tests the planner ``best``: its table of shares, and that it is at least as good as each of its methods."""

from itertools import count, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import agents
from agents.learned.best import HUGE, OPTIONS, shares
from agents.learned.policy import PolicySearch
from agents.planner import Candidates, decisions_of
from agents.search.annealing import Annealing
from agents.search.lp_round import LPRound
from agents.search.rerun_search import RerunSearch
from agents.search.thinning import thinned, thinned_plans
from simulator import Machine, Plan, Program, simulate
from simulator.compiled.encoding import AFTER, BEFORE, NEVER, TENSOR, rows_of
from simulator.compiled.engine import Engine
from simulator.deadline import TimeUp
from simulator.modes import KINDS_OF, MODES
from simulator.moves.moves import Moves
from simulator.program import Gap
from tests.agents.planned import planned
from tests.agents.search.test_search import MACHINE, pyramid
from tests.simulator.test_classes import stack

PROGRAM = pyramid(12, 0)
LIMIT = int(0.6 * PROGRAM.peak_bytes)


def ns(program: Program, plan: agents.planner.Plan, limit: int = LIMIT) -> int:
    return simulate(program, plan, MACHINE, limit).iteration_ns


def test_time_shares_of_the_methods_add_up_to_one() -> None:
    for mode, kernels, seconds, network in product(
        MODES, (3, 500, 20_000, HUGE), (None, 0.1, 1.0, OPTIONS.lp_s, 10.0, 1e3), (False, True)
    ):
        table = shares(mode, kernels, seconds, network)
        assert np.isclose(sum(share.fraction for share in table), 1) and min(share.fraction for share in table) > 0
        names = {share.method for share in table}
        assert network or "policy_search" not in names
        assert kernels >= HUGE or ("rerun_search" in names) == (mode == "recompute")
    assert len(shares("joint", 500, 10.0, True)) > len(shares("joint", 500, 1.0, True)) == 1  # restarts
    for mode, seconds, methods in (
        ("joint", 5.0, ["annealing"]),
        ("swap", 50.0, [*["annealing"] * len(OPTIONS.classes), "lp_round"]),
        ("recompute", 50.0, ["annealing", "lp_round", "rerun_search"]),
    ):
        table = shares(mode, 5_000, seconds, True, repetitive=True)
        assert [share.method for share in table] == methods and np.isclose(sum(share.fraction for share in table), 1)


def test_no_method_alone_is_better_and_plans_are_deterministic() -> None:
    best, repeated = (agents.make("best", min_bytes=1, calls=601) for _ in range(2))
    plan = best.plan(PROGRAM, MACHINE, LIMIT)
    assert plan == repeated.plan(PROGRAM, MACHINE, LIMIT)
    assert list(best.best_ns) == ["policy_search", "lp_round"] and best.best_ns["lp_round"] == ns(PROGRAM, plan)
    engine = Engine(PROGRAM, MACHINE, LIMIT)
    assert thinned(engine, "joint", 1)[1] < NEVER
    for name, turn in (("policy_search", 0), ("lp_round", 1)):
        method = agents.make(name, min_bytes=1, calls=(600 - engine.calls) // 2, seed=OPTIONS.seed_step * turn)
        assert ns(PROGRAM, plan) <= ns(PROGRAM, method.plan(PROGRAM, MACHINE, LIMIT))
    assert best.floor is not None and best.floor.iteration_ns <= ns(PROGRAM, plan)


def test_recomputation_alone_ends_with_the_search_over_reruns() -> None:
    best = agents.make("best", mode="recompute", min_bytes=1, seconds=0.3)
    plan = best.plan(PROGRAM, MACHINE, LIMIT)
    plan.only("the test", "recompute", "rerun")
    assert "rerun_search" in best.best_ns and best.best_ns["rerun_search"] == ns(PROGRAM, plan)


def test_lp_rounding_continues_from_a_given_plan() -> None:
    """With almost no simulator calls, LP rounding is no worse than the given plan."""
    start = planned("policy_search", PROGRAM, MACHINE, LIMIT)
    from_scratch, continued = (LPRound(20, min_bytes=1) for _ in range(2))
    continued.first = rows_of(start.decisions)
    assert ns(PROGRAM, continued.plan(PROGRAM, MACHINE, LIMIT)) <= ns(PROGRAM, start)
    assert ns(PROGRAM, start) < ns(PROGRAM, from_scratch.plan(PROGRAM, MACHINE, LIMIT))


def test_infeasible_limits_raise_and_unneeded_plans_are_empty() -> None:
    with pytest.raises(agents.Infeasible, match=r"^best: .* cannot be planned within 1,?\d* bytes"):
        planned("best", PROGRAM, MACHINE, 1)
    planner = agents.make("best", seconds=60)
    assert not planner.plan(PROGRAM, MACHINE, PROGRAM.peak_bytes).decisions and planner.simulator_calls == 1


def late(*_: object) -> None:
    raise TimeUp


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_exists_before_any_method_has_run(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy computer every method may be interrupted before it has a plan."""
    for method in (Annealing, PolicySearch, LPRound, RerunSearch):
        monkeypatch.setattr(method, "plan", late)
    monkeypatch.setattr("agents.learned.best._compile_search", lambda _: None)
    limit = int(0.7 * PROGRAM.peak_bytes)
    plan = agents.make("best", min_bytes=1, seconds=1e-6, mode=mode).plan(PROGRAM, MACHINE, limit)
    assert plan.decisions and simulate(PROGRAM, plan, MACHINE, limit).peak_bytes <= limit


def test_repetitive_programs_are_annealed_again_colder_from_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last run moves single gaps, which classes leave as they are."""
    program = stack(*[("attend", 200)] * 12)
    limit = int(0.6 * program.peak_bytes)
    anneal = Annealing.plan
    heats: list[float] = []
    plans: list[int] = []
    probs: list[float] = []

    def recorded(self: Annealing, program: Program, machine: Machine, limit: int) -> Plan:
        assert self.first is not None
        plan = anneal(self, program, machine, limit)
        heats.extend((self.hot, self.cold))
        plans.append(ns(program, Plan(decisions_of(self.first)), limit))
        plans.append(ns(program, plan, limit))
        return plan

    def recorded_moves(*args: Any, **options: Any) -> Moves:
        moves = Moves(*args, **options)
        probs.append(moves.class_prob)
        return moves

    monkeypatch.setattr(Annealing, "plan", recorded)
    monkeypatch.setattr("agents.search.annealing.Moves", recorded_moves)
    plan = agents.make("best", min_bytes=10, calls=600).plan(program, MACHINE, limit)
    assert heats[::2] == sorted(heats[::2], reverse=True) and max(heats[1::2]) < OPTIONS.cold
    assert plans == sorted(plans, reverse=True) and plans[-1] >= ns(program, plan, limit)
    assert plans[2::2] == plans[1:-1:2]  # each starts from the best plan so far
    assert len(probs) == len(OPTIONS.classes) and min(probs[:-1]) > probs[-1] == 0


@pytest.mark.parametrize(("processor", "methods"), [(1.0, {"annealing", "lp_round"}), (0.1, {"annealing"})])
def test_methods_suit_the_processor_time_within_the_budget(
    processor: float, methods: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy computer leaves too little of 6 s for the linear program, although the wall clock shows more."""
    program = stack(*[("attend", 200)] * 12)
    clock = count()
    for method in (Annealing, PolicySearch, LPRound):
        monkeypatch.setattr(method, "plan", late)
    monkeypatch.setattr("agents.learned.best._compile_search", lambda _: None)
    times = SimpleNamespace(monotonic=lambda: 0.1 * next(clock), process_time=lambda: processor * 0.1 * next(clock))
    monkeypatch.setattr("agents.learned.best.time", times)
    best = agents.make("best", min_bytes=10, seconds=6.0)
    best.plan(program, MACHINE, int(0.6 * program.peak_bytes))
    assert set(best.best_ns) == methods


@pytest.mark.parametrize("mode", MODES)
def test_thinned_plans_fit_and_empty_no_gap_in_vain(mode: str) -> None:
    program = pyramid(12, 1)
    limit = int(0.75 * program.peak_bytes)
    engine = Engine(program, MACHINE, limit)
    plans = list(thinned_plans(engine, mode, 1))
    assert len({rows.tobytes() for rows in plans}) > 1
    for rows in plans:
        decisions = decisions_of(rows)
        Plan.of(program, decisions, "the test", limit, MACHINE.name).only("the test", *KINDS_OF[mode])
        gaps = [Gap(*row) for row in rows[:, [TENSOR, AFTER, BEFORE]].tolist()]
        every = Candidates(program, gaps)
        chosen = np.ones(len(gaps), np.bool_)
        assert every.residency(chosen).max() <= limit
        for i in range(len(gaps)):
            chosen[i] = False
            assert every.residency(chosen).max() > limit
            chosen[i] = True
    rows, ns_of_best = thinned(engine, mode, 1)
    assert rows is not None and ns_of_best == min(engine.score(plan).iteration_ns for plan in plans)


def test_thinning_stops_at_the_deadline_with_a_plan() -> None:
    engine = Engine(PROGRAM, MACHINE, LIMIT)
    rows, _ = thinned(engine, "swap", 1, deadline=0.0)
    assert rows is not None and engine.calls == 1
    assert thinned(Engine(PROGRAM, MACHINE, 1), "swap", 1, deadline=0.0)[0] is None
