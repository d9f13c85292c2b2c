"""Tests that the compiled loop of the local search is bit-identical to its reference, however it ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from agents.planner import Rows
from agents.search import local_search
from agents.search.annealing import everything
from agents.search.local_search import CLOCK, TICK, Chains
from simulator import Engine, Machine, Program
from simulator.compiled.encoding import NEVER
from simulator.moves.moves import Moves
from tests import random_cases
from tests.agents.search import stepwise
from tests.agents.search.stepwise import ticking
from tests.agents.search.test_search import MACHINE, pyramid

HOT = 3e-2
COLD = 3e-4


class Counted(Engine):
    """Counts its calls from Python."""

    python_calls = 0

    def score(self, rows: Rows, limit_until: int | None = None, cutoff_ns: int = NEVER) -> Any:
        self.python_calls += 1
        return super().score(rows, limit_until, cutoff_ns)


def outcome(
    anneal: Any, program: Program, machine: Machine, limit: int, mode: str, seed: int, short: bool, **options: Any
) -> tuple[list[Any], Counted]:
    """Returns the result of a search: best plan, its time, calls, current plan, and random numbers.

    Args:
        short: starts with too little room for recomputation chains, and without their compiled code.
    """
    engine = Counted(program, machine, limit)
    if short:
        engine._n_steps = None
        engine._work.make_steps(2)
    moves = Moves(program, limit, mode, 1, seed)
    start = everything(program, mode, 1)
    settings = {"start_ns": 10**9, "calls": 200, "hot": HOT, "cold": COLD, "seed": seed} | options
    best, best_ns = anneal(moves, engine, start, **settings)
    result = [best.tolist(), best_ns, engine.calls, moves.plan().tolist(), moves.load.tolist(), moves._rng.tolist()]
    return result, engine


def random_task(seed: int) -> tuple[Program, Machine, int, str, random.Random]:
    """Draws a program (half of them networks), a machine, a limit and a mode."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        program = pyramid(rng.randint(2, 14), seed)
        machine = MACHINE
    else:
        program = random_cases.program_of(rng)
        machine = random_cases.machine_of(rng)
    if rng.random() < 0.3:  # too little for all tensors at one time, now and then
        machine = replace(machine, host_bytes=int(rng.uniform(0.1, 1.0) * program.peak_bytes))
    limit = int(rng.uniform(0.5, 1.1) * program.peak_bytes)
    return program, machine, limit, rng.choice(["swap", "recompute", "joint"]), rng


def test_compiled_annealing_equals_the_stepwise_reference() -> None:
    accepted = python_calls = 0
    for seed in range(150):
        program, machine, limit, mode, rng = random_task(seed)
        options: dict[str, Any] = {"calls": rng.choice([0, 1, 7, 8, 9, 100, 400])}
        if rng.random() < 0.2:
            options["start_ns"] = NEVER  # as after a kick: anything is better
        if rng.random() < 0.3:
            options["enough_ns"] = int(program.ideal_ns * rng.uniform(1.0, 1.5))
        if rng.random() < 0.1:
            options |= {"hot": 1e30, "cold": 1.0}  # all is accepted
        short = rng.random() < 0.3
        task = program, machine, limit, mode, seed, short
        expected, reference = outcome(stepwise.anneal, *task, **options)
        compiled, engine = outcome(local_search.anneal, *task, **options)
        assert compiled == expected, seed
        assert reference.python_calls == reference.calls
        assert engine.python_calls == 0 or short or machine.host_bytes < program.peak_bytes, seed
        python_calls += engine.python_calls
        accepted += expected[3] != everything(program, mode, 1).tolist()
    assert accepted > 50 and python_calls > 50


@pytest.mark.parametrize("mode", ["swap", "recompute", "joint"])
@pytest.mark.parametrize("calls", [None, 150])
def test_compiled_annealing_equals_the_reference_with_a_time_budget(
    mode: str, calls: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a clock that advances by a second per check, with equally many checks."""
    program = pyramid(12, 1)
    task = program, MACHINE, int(0.6 * program.peak_bytes), mode, 3, True
    results = []
    for module in (stepwise, local_search):
        monkeypatch.setattr(module, "time", ticking(1.0))
        results.append(outcome(module.anneal, *task, calls=calls, deadline=25.0)[0])
    assert results[0] == results[1]
    assert results[0][2] == (150 if calls else 24 * CLOCK)


def test_short_steps_are_not_held_up_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval doubles while checks are less than TICK apart; a slower search checks every CLOCK calls."""
    program = pyramid(12, 1)
    calls = {}
    for seconds in (0.9 * TICK, TICK):
        monkeypatch.setattr(local_search, "time", ticking(seconds))
        task = program, MACHINE, int(0.6 * program.peak_bytes), "swap", 0, False
        calls[seconds] = outcome(local_search.anneal, *task, calls=None, deadline=6.5 * seconds)[1].calls
    assert calls == {0.9 * TICK: CLOCK * (1 + 2 + 4 + 8 + 16 + 32), TICK: CLOCK * 6}


def test_ctrl_c_ends_the_chains_of_a_search() -> None:
    """Without an end of their own, the chains would run on while the threads are joined."""
    program = pyramid(12, 1)
    limit = int(0.6 * program.peak_bytes)
    chains = []
    with pytest.raises(KeyboardInterrupt), Chains(2) as pool:
        for seed in range(2):
            options = {"calls": None, "stopped": pool.stopped}
            chains.append(
                pool.submit(outcome, local_search.anneal, program, MACHINE, limit, "swap", seed, False, **options)
            )
        raise KeyboardInterrupt
    for chain in chains:
        _, engine = chain.result()
        assert engine.calls < 10**9
