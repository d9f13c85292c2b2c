"""Tests HOME: particle updates computed by hand, and the swarm."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import agents
from agents.heuristics import home
from agents.heuristics.home import Evaluator, StageModel
from simulator import Gap, simulate
from simulator.compiled import engine
from simulator.compiled.engine import NEVER, Engine, rows_of
from tests.agents.heuristics.test_tensor_cache import PROGRAM as CONVOLUTIONS
from tests.agents.search.test_search import pyramid
from tests.programs import BYTE_PER_NS
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM


def evaluator(limit: int = LIMIT) -> Evaluator:
    """Returns an evaluator of the tiny program; a particle has a placement for a1 and one for a2."""
    return Evaluator(Engine(PROGRAM, MACHINE, limit), [Gap(A1, 1, 6), Gap(A2, 2, 5)])


def particles(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, np.int8)


# Iteration times under 150 bytes (tests/tiny.py): a1 swapped 170; a1 dropped 130; a2 swapped: f4 waits until 70,
# b3 until a2 is back at 140, 200 in all. Both dropped: f1 and f2 recomputed for b3, f1 again for b2: 120 + 20 + 10.
COSTS = {(0, 0): (30, NEVER), (1, 0): (0, 170), (2, 0): (0, 130), (0, 1): (0, 200), (2, 2): (0, 150)}


def test_costs_by_hand() -> None:
    scorer = evaluator()
    assert [tuple(c) for c in scorer.evaluate(particles(*COSTS)).tolist()] == list(COSTS.values())
    assert scorer.engine.calls == 5


@pytest.mark.parametrize(
    ("before", "leader", "personal", "after", "calls"),
    [
        # a1: P_1 gives (2, 0) = 130, P_2 (1, 0) = 170: 2. a2: P_1 gives (2, 2) = 150, P_2 leaves (2, 0), which is
        # known: 0. Better than both.
        ((0, 0), (2, 2), (1, 0), (2, 0), 3),
        # a1: P_1 leaves (0, 0), known and over the limit, P_2 gives (1, 0) = 170: 1. a2: they agree, as it is.
        ((0, 0), (0, 0), (1, 0), (1, 0), 1),
        # a1: they agree on 2, nothing is evaluated. a2: P_1 gives (2, 2) = 150, P_2 (2, 0) = 130.
        ((0, 1), (2, 2), (2, 0), (2, 0), 2),
        # They agree on everything: what comes out is evaluated once.
        ((0, 0), (2, 2), (2, 2), (2, 2), 1),
        ((2, 0), (2, 0), (2, 0), (2, 0), 0),
    ],
)
def test_update_by_hand(before: tuple, leader: tuple, personal: tuple, after: tuple, calls: int) -> None:
    cost = np.array([COSTS[before]], np.int64)
    scorer = evaluator()
    x, new = scorer.update(particles(before), cost, particles(leader), particles(personal))
    assert tuple(x[0].tolist()) == after
    assert tuple(new[0].tolist()) == COSTS[after]
    assert scorer.engine.calls == calls


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_all_placements(seed: int) -> None:
    program = pyramid(6, seed)
    limit = int(0.7 * program.peak_bytes)
    planner = agents.make("home", min_bytes=1, particles=40, seed=seed)
    score = Engine(program, MACHINE, limit).score(rows_of(planner.plan(program, MACHINE, limit).decisions))
    scorer = Evaluator(Engine(program, MACHINE, limit), [f.gap for f in home.feature_maps(program, 1)])
    placements = particles(*itertools.product(range(3), repeat=len(scorer.swaps)))
    assert len(placements) == 3**5  # the last output has no gap
    assert score.iteration_ns == scorer.evaluate(placements)[:, 1].min() > program.ideal_ns


def test_history() -> None:
    program = pyramid(10, 3)
    limit = int(0.65 * program.peak_bytes)
    planner = agents.make("home", min_bytes=1, particles=30, iterations=4)
    plan = planner.plan(program, MACHINE, limit)
    assert 1 < len(planner.history) <= 4
    for worst, mean, best, feasible in planner.history:
        assert program.ideal_ns <= best <= mean <= worst and 0 < feasible <= 30
    best = min(i.best_ns for i in planner.history)
    assert simulate(program, plan, MACHINE, limit).iteration_ns == best < planner.history[0].best_ns
    short = agents.make("home", min_bytes=1, particles=30, iterations=1)
    short.plan(program, MACHINE, limit)
    assert short.history == planner.history[:1] and short.simulator_calls == 31


@pytest.mark.parametrize("calls", [20, 700, 3000])
def test_calls_are_a_bound_and_jobs_change_nothing(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SHARE", 1)
    program = pyramid(12, 0)
    limit = int(0.6 * program.peak_bytes)
    serial, threaded, unlimited = (
        agents.make("home", min_bytes=1, particles=30, **options)
        for options in ({"calls": calls, "jobs": 1}, {"calls": calls, "jobs": 2}, {})
    )
    assert serial.plan(program, MACHINE, limit) == threaded.plan(program, MACHINE, limit)
    assert (serial.history, serial.simulator_calls) == (threaded.history, threaded.simulator_calls)
    unlimited.plan(program, MACHINE, limit)
    assert serial.simulator_calls <= calls
    complete = len(serial.history) - (calls < 3000)  # 3000 are more than it takes
    assert serial.history[:complete] == unlimited.history[:complete]
    assert (serial.simulator_calls == unlimited.simulator_calls) == (calls == 3000)
    if calls == 700:  # stops when the calls left do not suffice for another particle
        assert calls - 2 * 12 - 1 <= serial.simulator_calls


def test_stages_wait_for_swap_outs_as_in_algorithm_2() -> None:
    """Swapping a (40 ns each way) is hidden, or delays the loss until a is out; recomputing a takes one kernel."""
    kept_swapped_recomputed = particles((0,), (1,), (2,))
    for limit, expected in (
        (130, [(0, 500), (0, 500), (0, 600)]),
        (129, [(1, 500), (0, 540), (0, 600)]),
        (89, [(41, 500), (11, 540), (11, 600)]),
    ):
        model = StageModel(CONVOLUTIONS, BYTE_PER_NS, limit, [Gap(1, 1, 4)])
        assert list(map(tuple, model.evaluate(kept_swapped_recomputed).tolist())) == expected
