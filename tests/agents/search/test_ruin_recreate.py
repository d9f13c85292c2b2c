"""Ruin and recreate: repeatable, within its calls, and right where the answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from agents.planner import Rows
from agents.search.ruin_recreate import DROP, FILLED, KEEP, RuinRecreate
from simulator import Machine, Plan, Program
from simulator.compiled.engine import Engine, decisions_of
from tests.agents.exact.test_milp import pyramid, training, two_uses
from tests.strategies import networks, programs, reachable_limits

MACHINE = Machine("byte per ns", 10**6, 10**9, 10**9, copy_latency_ns=0)


def search(program: Program, limit: int, calls: int = 3000, seed: int = 0) -> tuple[Rows | None, RuinRecreate]:
    found = RuinRecreate(program, MACHINE, limit, 1, calls, 100, seed)
    return found.search(), found


@pytest.mark.parametrize(
    ("program", "limit", "expected"),
    [
        (pyramid(6), 3, 3),  # optima derived in test_milp.py
        (pyramid(6), 2, 9),
        (two_uses(10), 20, 50),
        (two_uses(20), 20, 80),
    ],
)
def test_optima_by_hand(program: Program, limit: int, expected: int) -> None:
    rows, _ = search(program, limit)
    assert rows is not None
    score = Engine(program, MACHINE, limit).score(rows)
    assert score.feasible and score.iteration_ns - program.ideal_ns == expected


def test_the_greedy_step_takes_the_most_excess_away_per_ns() -> None:
    # Excess beside the top, which has room for none: 20. Dropping a takes 10 away for 30 ns, b 10 for 20 ns: b first.
    # Then a, which makes the chain of b longer: f1 for b and f1 for a, 60 ns, or 30 ns where b's chain keeps a.
    program = two_uses(10)
    found = RuinRecreate(program, MACHINE, 20, 1, 100, 0, 0)
    state = np.full(2, FILLED, dtype=np.int64)
    assert [g.tensor for g in found.gaps] == [0, 1]
    excess, ns = found._excess(state)
    assert (excess.tolist(), ns) == ([0, 0, 20, 0, 0, 0], program.ideal_ns)
    assert found._recreate(state, (DROP, KEEP)) == program.ideal_ns + 50
    assert state[1] == KEEP


def test_nothing_to_do_and_nothing_to_be_done() -> None:
    rows, found = search(pyramid(6), 6)
    assert rows is not None and not len(rows) and found.calls < 10
    assert search(pyramid(6), 1)[0] is None


def test_same_seed_same_plan_within_the_calls() -> None:
    program = training(0, layers=14)
    limit = int(0.7 * program.peak_bytes)
    (one, first), (two, _), (_, other) = (search(program, limit, 2000, seed) for seed in (0, 0, 1))
    assert one is not None and two is not None and np.array_equal(one, two)
    assert first.calls != other.calls
    assert 2000 <= first.calls < 3000  # a round is finished


def test_more_rounds_are_no_worse_and_better_somewhere() -> None:
    gains = []
    for seed in range(4):
        program = training(seed, layers=12)
        limit = int(0.7 * program.peak_bytes)
        few, many = (search(program, limit, calls)[0] for calls in (0, 3000))
        engine = Engine(program, MACHINE, limit)
        if few is not None and many is not None:
            gains.append(engine.score(few).iteration_ns - engine.score(many).iteration_ns)
    assert min(gains) >= 0 and max(gains) > 0


@given(st.data(), programs() | networks())
def test_any_program(data: st.DataObject, program: Program) -> None:
    limit = data.draw(reachable_limits(program) | st.integers(0, program.peak_bytes))
    rows, _ = search(program, limit, 200)
    assert rows is not None or limit < program.peak_bytes
    if rows is not None:
        Plan(decisions_of(rows)).check(program)
        assert Engine(program, MACHINE, limit).score(rows).feasible
