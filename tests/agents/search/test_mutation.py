"""Mutation search: better than its start, within its budget, and as its proposals draw."""

from __future__ import annotations

import numpy as np
import pytest

import agents
from agents.learned.dqn_config import DQNConfig, PaperConfig
from agents.learned.planner import without_network
from agents.search import mutation
from agents.search.mutation import FIRST, Draws, Mutations
from envs.batch import Batch
from envs.task import Task
from envs.walk import Walk
from simulator import Engine, Plan, simulate
from simulator.compiled.encoding import decisions_of
from tests.agents.search.stepwise import ticking
from tests.agents.search.test_search import MACHINE, pyramid

PROGRAM = pyramid(12, 0)
LIMIT = int(0.5 * PROGRAM.peak_bytes)


def made(**options: object) -> mutation.Mutation:
    return agents.make("mutation", **{"min_bytes": 1, **options})  # type: ignore[return-value]


def overhead(plan: Plan) -> float:
    return simulate(PROGRAM, plan, MACHINE, LIMIT).overhead


def search() -> Mutations:
    task, rng = Task(PROGRAM, MACHINE, LIMIT, 1, "swap"), np.random.default_rng(0)
    return Mutations(Walk(task), rng, Draws(task, rng, 0.05), 4, 0.05)


def test_mutations_find_better_walks_than_the_first() -> None:
    """And than as many walks that repeat nothing."""
    found, alone = search(), search()
    for _ in range(FIRST):
        found.repeat([])
    first = found.best_overhead
    for _ in range(100):
        found.mutate()
    for _ in range(FIRST + 100):
        alone.repeat([])
    assert found.best_overhead < alone.best_overhead < first
    overheads = [overhead for overhead, _ in found.elites]
    assert len(overheads) == 4 and overheads == sorted(overheads) and overheads[0] == found.best_overhead
    assert found.best is not None
    assert overhead(Plan(decisions_of(found.best))) == pytest.approx(found.best_overhead, abs=1e-12)
    walk = Walk(found.walk.task)
    for node in found.elites[0][1]:
        walk.step(node)  # raises where the action is not valid
    assert walk.done and walk.overhead == overheads[0]


def test_calls_are_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []  # steps of walks, each of which is simulated, and the final check
    score, step = Engine.score, Batch.step
    monkeypatch.setattr(Engine, "score", lambda self, *args: counted.append(0) or score(self, *args))
    monkeypatch.setattr(Batch, "step", lambda self, *args: counted.append(0) or step(self, *args))
    for calls in (200, 1000):
        counted.clear()
        planner = made(calls=calls)
        plan = planner.plan(PROGRAM, MACHINE, LIMIT)
        assert planner.simulator_calls == len(counted) == calls
        assert overhead(plan) > 0  # else it ends before
    assert made().calls == mutation.CALLS and made(seconds=1.0).calls is None


def test_seconds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by a second at every look: before every step of a walk, and before every walk."""
    monkeypatch.setattr(mutation, "time", ticking(1.0))
    few, many = made(seconds=100.0), made(seconds=2000.0)
    first, plan = (planner.plan(PROGRAM, MACHINE, LIMIT) for planner in (few, many))
    assert 70 < few.simulator_calls <= 101 and 1400 < many.simulator_calls <= 2001
    assert overhead(plan) <= overhead(first)
    both = made(seconds=6000.0, calls=150)
    both.plan(PROGRAM, MACHINE, LIMIT)
    assert both.simulator_calls == 150


def test_belady_prefers_what_is_used_last() -> None:
    task, rng = Task(PROGRAM, MACHINE, LIMIT, 1, "swap"), np.random.default_rng(0)
    valid = np.flatnonzero(task.graph.action_gap >= 0)
    belady, uniform = Draws(task, rng, 0.05), Draws(task, rng, None)
    used = [np.mean([draws.next_use[valid[draws.among(valid)]] for _ in range(500)]) for draws in (belady, uniform)]
    latest = belady.next_use[valid].max()
    assert used[0] > 0.8 * latest and used[1] == pytest.approx(belady.next_use[valid].mean(), rel=0.1)
    seen = {belady.among(valid) for _ in range(2000)}
    assert len(seen) > len(valid) // 2  # one in ten is drawn alike
    plans = [made(calls=300, proposals=name).plan(PROGRAM, MACHINE, LIMIT) for name in ("belady", "uniform")]
    assert plans[0] != plans[1]


def test_what_an_agent_is_compared_with_has_its_settings() -> None:
    same = without_network(DQNConfig(mode="swap", min_bytes=7), 3, calls=99)
    assert (same.mode, same.min_bytes, same.temperature) == ("swap", 7, made().temperature)
    assert (same.seed, same.calls, same.seconds) == (3, 99, None)
    paper = without_network(PaperConfig(), 0, seconds=2.0)  # which explores without Belady's rule
    assert (paper.rate, paper.temperature, paper.seconds, paper.calls) == (made().rate, None, 2.0, None)
