"""Tests deadlines of code blocks, and time budgets of searches on large programs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import agents
from agents.planner import Infeasible
from agents.search import budgeted as module
from agents.search.budgeted import budgeted
from simulator import Machine, Plan, Program, simulate
from simulator.deadline import TimeUp, within
from tests.tiny import LIMIT, MACHINE, PROGRAM


class Search:
    """A search that runs forever, and one that finds no plan."""

    name = "search"
    mode = "joint"
    min_bytes = 0
    simulator_calls = 0

    def __init__(self, mode: str = "joint", ends: bool = False) -> None:
        self.seconds: float | None = 0.2
        self.mode = mode
        self.ends = ends

    @budgeted
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        while not self.ends:
            pass
        return Plan(planner=self.name, limit=limit)


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", len(PROGRAM.kernels))
    monkeypatch.setattr(module, "SLACK", 1e-3)


@pytest.mark.parametrize("mode", ["swap", "recompute", "joint"])
def test_a_quick_plan_is_returned_on_timeout(mode: str) -> None:
    search = Search(mode)
    plan = search.plan(PROGRAM, MACHINE, LIMIT)
    assert plan.planner == "search" and plan.decisions
    assert search.seconds == 0.2 and search.simulator_calls
    assert {d.kind for d in plan.decisions} <= ({mode} if mode != "joint" else {"swap", "recompute"})
    simulate(PROGRAM, plan, MACHINE, LIMIT)
    with pytest.raises(Infeasible, match="search: found no plan"):
        Search(mode).plan(PROGRAM, MACHINE, 60)


@pytest.mark.parametrize(("seconds", "extra"), [(None, 0), (0.2, 1)])
def test_searches_without_a_budget_and_of_small_programs_are_left_alone(
    seconds: float | None, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Search(ends=True)
    search.seconds = seconds
    monkeypatch.setattr(module, "LARGE", len(PROGRAM.kernels) + extra)
    assert not search.plan(PROGRAM, MACHINE, LIMIT).decisions


@pytest.mark.parametrize("name", ["annealing", "lp_round", "policy_search", "dqn", "rerun_search", "best"])
def test_every_planner_with_seconds_keeps_them(name: str) -> None:
    """A plan is returned however small the time budget is."""
    options: dict[str, Any] = {"min_bytes": 0, "seconds": 1e-3}
    plan = agents.make(name, **options).plan(PROGRAM, MACHINE, LIMIT)
    assert plan.planner == name
    simulate(PROGRAM, plan, MACHINE, LIMIT)


def test_blocks_within_blocks_end_with_the_first() -> None:
    with pytest.raises(TimeUp), within(1e-2), within(60):
        while True:
            pass
    with pytest.raises(TimeUp), within(2e-2):
        with pytest.raises(TimeUp), within(1e-3):
            while True:
                pass
        while True:  # the enclosing deadline keeps running
            pass


def test_a_context_is_not_interrupted_as_it_enters_or_exits() -> None:
    log = list[str]()

    @contextmanager
    def context() -> Iterator[None]:
        signal.raise_signal(signal.SIGALRM)
        log.append("entered")
        yield
        signal.raise_signal(signal.SIGALRM)
        log.append("exited")

    with pytest.raises(TimeUp), within(60):
        with context():
            pass
        while True:
            pass
    assert log == ["entered", "exited"]


def test_compiled_code_is_not_interrupted_as_it_restores_its_constants() -> None:
    """It would end in a SystemError instead of TimeUp."""
    ended = False

    def _numba_unpickle() -> None:
        nonlocal ended
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        ended = True

    with pytest.raises(TimeUp), within(1e-3):
        _numba_unpickle()
        while True:
            pass
    assert ended
