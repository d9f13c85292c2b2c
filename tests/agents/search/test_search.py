"""Tests random search and simulated annealing: reproducible, within budget, and correct for known optima."""

from __future__ import annotations

import random

import numpy as np
import pytest

import agents
from agents.floor import floor
from agents.heuristics.autoswap import SCORES
from agents.search import annealing, local_search
from simulator import Kernel, Program, Tensor, simulate
from simulator.compiled.encoding import RECOMPUTE, SWAP
from simulator.compiled.engine import NEVER, Engine, rows_of
from simulator.modes import MODES, Choice
from simulator.moves.moves import Moves
from tests import tiny
from tests.agents.planned import planned
from tests.agents.search.stepwise import ticking
from tests.oracle import enumeration
from tests.programs import BYTE_PER_NS as MACHINE


def pyramid(layers: int, seed: int) -> Program:
    """Builds layers forward then backward; each output is read again by its backward kernel.

    One weight per layer is read by both and written at the end.
    """
    rng = random.Random(seed)
    tensors = [Tensor(f"y{i}", rng.randint(5, 30)) for i in range(layers)]
    tensors += [Tensor(f"w{i}", rng.randint(1, 10), "parameter", True) for i in range(layers)]
    duration = [rng.randint(2, 12) for _ in range(layers)]
    w = range(layers, 2 * layers)
    kernels = [
        Kernel(f"f{i}", "conv", "forward", (*((i - 1,) if i else ()), w[i]), (i,), duration[i]) for i in range(layers)
    ]
    kernels += [Kernel(f"b{i}", "conv", "backward", (i, w[i]), (), 2 * duration[i]) for i in reversed(range(layers))]
    kernels += [Kernel(f"u{i}", "optimizer", "optimizer", (w[i],), (w[i],), 1) for i in range(layers)]
    return Program(f"pyramid{seed}", tuple(tensors), tuple(kernels))


def overhead(program: Program, limit: int, name: str, **options: object) -> float:
    plan = planned(name, program, MACHINE, limit, **options)
    return Engine(program, MACHINE, limit).score(rows_of(plan.decisions)).iteration_ns / program.ideal_ns - 1


SEARCHES: list[tuple[str, dict[str, object]]] = [
    ("random_search", {"calls": 300}),
    ("home", {"particles": 30, "calls": 300}),
    *((name, {"mode": mode, "calls": 300}) for name in ("annealing", "dqn") for mode in ("swap", "joint")),
    ("dqn", {"mode": "recompute", "calls": 700}),
    ("dqn", {"ranks": "uniform", "calls": 300}),
    ("lp_round", {"calls": 1000}),
    ("policy_search", {"calls": 20}),
    ("policy_search", {"calls": 300, "jobs": 4}),
    ("rerun_search", {"kicks": 1}),
    ("best", {"calls": 300}),
]


@pytest.mark.parametrize(
    ("name", "options"), SEARCHES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_same_seed_same_plan_within_the_budget(name: str, options: dict[str, object], few_moves: None) -> None:
    program = pyramid(12, 0)
    limit = int(0.6 * program.peak_bytes)
    planners = [agents.make(name, min_bytes=1, seed=s, **options) for s in (0, 0, 1)]
    first, repeat, other = (p.plan(program, MACHINE, limit) for p in planners)
    assert first == repeat
    bound = floor(program, MACHINE, limit, str(options.get("mode", "joint"))).iteration_ns
    best = name in ("rerun_search", "best") or simulate(program, first, MACHINE, limit).iteration_ns == bound
    assert first != other or best  # which finds the best there is
    calls = options.get("calls", NEVER)
    assert all(p.simulator_calls <= calls for p in planners)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("annealing", "swap"),
        ("annealing", "joint"),
        ("lp_round", "swap"),
        ("lp_round", "joint"),
        ("best", "joint"),
        ("policy_search", "swap"),
        ("policy_search", "joint"),
        ("dqn", "swap"),
        ("dqn", "joint"),
    ],
)
@pytest.mark.parametrize("program", [tiny.PROGRAM, *(pyramid(4, seed) for seed in range(3))], ids=lambda p: p.name)
def test_no_enumerated_plan_is_faster(name: str, mode: str, program: Program) -> None:
    """Early copies and shifts may find plans that are faster still."""
    limit = tiny.LIMIT if program is tiny.PROGRAM else int(0.65 * program.peak_bytes)
    planner = agents.make(name, min_bytes=1, mode=mode, calls=3_000)
    found_ns = simulate(program, planner.plan(program, MACHINE, limit), MACHINE, limit).iteration_ns
    bound = floor(program, MACHINE, limit, mode).iteration_ns
    assert program.ideal_ns < found_ns <= enumeration.shortest_ns(program, MACHINE, limit, mode) and bound <= found_ns


@pytest.mark.parametrize("jobs", [None, 1, 3])
def test_annealing_for_some_seconds(jobs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (annealing, local_search):
        monkeypatch.setattr(module, "time", ticking(1.0))  # a second at every look
    program = pyramid(16, 5)
    limit = int(0.5 * program.peak_bytes)
    short, long = (agents.make("annealing", min_bytes=1, seconds=s, jobs=jobs) for s in (1e-6, 300.0))
    first, plan = (planner.plan(program, MACHINE, limit) for planner in (short, long))
    assert short.simulator_calls < 10 and 500 < long.simulator_calls < 10_000
    ns = [simulate(program, p, MACHINE, limit).iteration_ns for p in (plan, first)]
    assert ns[0] < ns[1]


@pytest.mark.parametrize("mode", MODES)
def test_moves_keep_the_residency(mode: str) -> None:
    """After any moves the residency matches the rows, is within the limit, and the rows fit the program."""
    program = pyramid(8, 2)
    limit = int(0.7 * program.peak_bytes)
    moves = Moves(program, limit, mode, 1, seed=0)
    engine = Engine(program, MACHINE, limit)
    chance = random.Random(1)
    proposed = 0
    kinds = set()
    shifted = 0
    for _ in range(300):
        old_rows = moves.plan()
        rows = moves.propose()
        if rows is None:
            break
        proposed += 1
        assert np.array_equal(moves.plan(), old_rows)  # a proposal changes nothing until it is accepted
        if chance.random() < 0.5:
            continue
        moves.accept()
        assert np.array_equal(moves.plan(), rows)
        kinds |= {(int(r[0]), bool(r[4] > (-1 if r[0] == SWAP else 0))) for r in rows}  # pinned, or kept
        shifted += sum(int(r[2]) != moves.gaps[moves.index[int(r[1]), int(r[3])]].after for r in rows)
        if mode == "swap":
            assert np.array_equal(moves.load, engine.residency(rows))
            assert moves.load.max() <= limit
        else:
            assert (moves.load <= engine.residency(rows)).all()
        agents.planner.Plan(agents.planner.decisions_of(rows)).check(program)
    assert proposed > 100 or mode == "recompute"
    expected = {"swap": {(SWAP, False), (SWAP, True)}, "recompute": {(RECOMPUTE, False), (RECOMPUTE, True)}}
    assert kinds >= expected.get(mode, expected["swap"] | expected["recompute"])
    assert shifted or mode == "recompute"


@pytest.mark.parametrize("mode", ["swap", "joint"])
def test_annealing_starts_from_the_best_heuristic(mode: str) -> None:
    program = pyramid(16, 5)
    limit = int(0.6 * program.peak_bytes)
    lowest = min(overhead(program, limit, f"autoswap_{score}") for score in SCORES)
    assert overhead(program, limit, "annealing", calls=20, mode=mode) <= lowest


def test_weights_decide_what_is_picked() -> None:
    program = pyramid(8, 2)
    weights = np.zeros((len(program.gaps(1)), len(Choice)))
    weights[:5, Choice.SWAPPED] = 1.0
    moves = Moves(program, program.peak_bytes, "joint", 1, seed=0, weights=weights)
    seen = set()
    for _ in range(200):
        rows = moves.propose()
        assert rows is not None
        moves.accept()
        seen |= {moves.index[int(r[1]), int(r[3])] for r in rows}
        assert (rows[:, 0] == SWAP).all()
    assert seen == set(range(5))
