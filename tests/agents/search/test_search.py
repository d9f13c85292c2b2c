"""Random search and simulated annealing: repeatable, within their budget, and right where the answer is known."""

from __future__ import annotations

import random

import numpy as np
import pytest

import agents
from agents.planner import Rows
from agents.search import annealing, local_search
from agents.search.annealing import everything
from agents.search.local_search import Moves
from simulator import Kernel, Machine, Program, Tensor, simulate
from simulator.compiled.encoding import RECOMPUTE, SWAP
from simulator.compiled.engine import NEVER, Engine, Score, rows_of
from simulator.modes import KEPT, SWAPPED
from tests.agents.search.stepwise import anneal, ticking
from tests.oracle import enumeration

MACHINE = Machine("byte per ns", 10**6, 10**9, 10**9, copy_latency_ns=0)


def pyramid(layers: int, seed: int) -> Program:
    """Layers forward then back; the output of each is read again by its backward kernel. One weight per layer,
    read by both and written at the end."""
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
    plan = agents.make(name, min_bytes=1, **options).plan(program, MACHINE, limit)
    return Engine(program, MACHINE, limit).score(rows_of(plan.decisions)).iteration_ns / program.ideal_ns - 1


@pytest.mark.parametrize(
    ("name", "options"), [("random_search", {}), ("annealing", {}), ("annealing", {"mode": "swap"})]
)
def test_same_seed_same_plan_within_the_budget(name: str, options: dict[str, object]) -> None:
    program = pyramid(12, 0)
    limit = int(0.6 * program.peak_bytes)
    planners = [agents.make(name, min_bytes=1, calls=300, seed=s, **options) for s in (0, 0, 1)]
    first, again, other = (p.plan(program, MACHINE, limit) for p in planners)
    assert first == again
    assert first != other
    assert {p.simulator_calls for p in planners} <= set(range(299, 301))


@pytest.mark.parametrize("seed", range(3))
def test_annealing_finds_the_best_set_of_swaps(seed: int) -> None:
    """Shifts may do better still."""
    program = pyramid(4, seed)
    limit = int(0.65 * program.peak_bytes)
    best = enumeration.shortest_ns(program, MACHINE, limit, "swap") / program.ideal_ns - 1
    assert best > 0
    assert overhead(program, limit, "annealing", calls=3_000) <= best


def test_annealing_is_never_worse_than_autoswap() -> None:
    program = pyramid(16, 5)
    for fraction in (0.5, 0.6, 0.7):
        limit = int(fraction * program.peak_bytes)
        scores = [overhead(program, limit, f"autoswap_{s}") for s in ("doa", "aoa", "wdoa", "swdoa")]
        assert overhead(program, limit, "annealing", calls=500) <= min(scores)


@pytest.mark.parametrize("jobs", [None, 1, 3])
def test_annealing_for_some_seconds(jobs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (annealing, local_search):
        monkeypatch.setattr(module, "time", ticking(1.0))  # a second at every look
    program = pyramid(16, 5)
    limit = int(0.5 * program.peak_bytes)
    few, many = (agents.make("annealing", min_bytes=1, seconds=s, jobs=jobs) for s in (1e-6, 300.0))
    first, plan = (planner.plan(program, MACHINE, limit) for planner in (few, many))
    assert few.simulator_calls < 10 and 500 < many.simulator_calls < 10_000
    ns = [simulate(program, p, MACHINE, limit).iteration_ns for p in (plan, first)]
    assert ns[0] < ns[1]


def test_the_calls_end_a_search_that_has_time() -> None:
    program = pyramid(16, 5)
    planner = agents.make("annealing", min_bytes=1, seconds=60.0, calls=200)
    planner.plan(program, MACHINE, int(0.5 * program.peak_bytes))
    assert 100 < planner.simulator_calls <= 200


@pytest.mark.parametrize("mode", ["swap", "joint", "recompute"])
def test_moves_keep_the_residency(mode: str) -> None:
    """After any moves the residency is that of the rows, within the limit, and the rows fit the program."""
    program = pyramid(8, 2)
    limit = int(0.7 * program.peak_bytes)
    moves = Moves(program, limit, mode, 1, seed=0)
    engine = Engine(program, MACHINE, limit)
    chance = random.Random(1)
    proposed, kinds, shifted = 0, set(), 0
    for _ in range(300):
        before = moves.plan()
        rows = moves.propose()
        if rows is None:
            break
        proposed += 1
        assert np.array_equal(moves.plan(), before)  # a proposal changes nothing until it is accepted
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
    wanted = {"swap": {(SWAP, False), (SWAP, True)}, "recompute": {(RECOMPUTE, False), (RECOMPUTE, True)}}
    assert kinds >= wanted.get(mode, wanted["swap"] | wanted["recompute"])
    assert shifted or mode == "recompute"


@pytest.mark.parametrize("mode", ["swap", "joint", "recompute"])
def test_the_cutoff_changes_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plans are proposed and accepted, with fewer of them simulated to their end."""
    program = pyramid(12, 0)
    limit = int(0.7 * program.peak_bytes)
    start = everything(program, mode, 1)
    score, accept = Engine.score, Moves.accept
    found, sequences = [], []
    for cut in (True, False):
        infeasible, accepted = [], []

        def scored(self: Engine, rows: Rows, until: None, cutoff: int, cut=cut, infeasible=infeasible) -> Score:
            out = score(self, rows, until, cutoff if cut else NEVER)
            infeasible.append(not out.feasible)
            return out

        def noted(self: Moves, accepted=accepted) -> None:
            accept(self)
            accepted.append(self.plan().tolist())

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "score", scored)
            patch.setattr(Moves, "accept", noted)
            moves, engine = Moves(program, limit, mode, 1, seed=0), Engine(program, MACHINE, limit)
            best, best_ns = anneal(moves, engine, start, 10**9, 400, 3e-2, 3e-4, seed=0)
        found.append((best.tolist(), best_ns, engine.calls))
        sequences.append((accepted, sum(infeasible)))
    assert found[0] == found[1] and sequences[0][0] == sequences[1][0] and len(sequences[0][0]) > 20
    assert sequences[0][1] > sequences[1][1]


def test_a_fork_searches_on_its_own() -> None:
    program = pyramid(8, 2)
    limit = int(0.7 * program.peak_bytes)
    moves = Moves(program, limit, "joint", 1, seed=0)
    start = moves.propose()
    assert start is not None
    moves.accept()
    same, other = moves.fork(7), Moves(program, limit, "joint", 1, seed=7)
    for _ in range(50):
        mine, theirs = same.propose(), other.propose()
        assert mine is not None and np.array_equal(mine, theirs)
        same.accept()
        other.accept()
    assert np.array_equal(moves.plan(), start)


def test_weights_decide_what_is_picked() -> None:
    program = pyramid(8, 2)
    weights = np.zeros((len(program.gaps(1)), KEPT + 1))
    weights[:5, SWAPPED] = 1.0
    moves = Moves(program, program.peak_bytes, "joint", 1, seed=0, weights=weights)
    seen = set()
    for _ in range(200):
        rows = moves.propose()
        assert rows is not None
        moves.accept()
        seen |= {moves.index[int(r[1]), int(r[3])] for r in rows}
        assert (rows[:, 0] == SWAP).all()
    assert seen == set(range(5))
