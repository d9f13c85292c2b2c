"""What bench times is what it says."""

import itertools

import numpy as np
import pytest

from agents import Infeasible
from agents.heuristics.home import HOME
from experiments.benchmark import packing, simulation
from simulator import Machine
from tests.experiments.conftest import chain
from tests.oracle.packing import overlaps

MACHINE = Machine("m", 2**40, 12 * 10**9, 12 * 10**9)


def test_home_search_is_per_simulator_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0])
    monkeypatch.setattr(simulation.time, "perf_counter", lambda: next(clock))
    program = chain(8)
    found = simulation.home_search(program, MACHINE, 6, 3, seed=1)
    planner = HOME(6, 3, jobs=1, seed=1)
    planner.plan(program, MACHINE, int(0.6 * program.peak_bytes))
    assert found == {"home_search_s": 3.0, "home_call_us": round(3e6 / planner.simulator_calls, 2)}
    assert planner.simulator_calls > 6


def test_home_search_within_no_limit_is_infeasible() -> None:
    with pytest.raises(Infeasible):
        simulation.home_search(chain(8), MACHINE, 6, 3, seed=1, limit=0.01)


def test_a_perfect_packing_fills_its_rectangle() -> None:
    blocks = packing.perfect(40, seed=3, width=60, height=50)
    assert len(blocks) == 40 and min(blocks.nbytes) >= 1 and min(blocks.upper - blocks.lower) >= 1
    held = [int(blocks.nbytes[(blocks.lower <= t) & (t < blocks.upper)].sum()) for t in range(60)]
    assert held == [50] * 60
    with pytest.raises(ValueError, match="a rectangle of 2 x 3 cannot be cut into 7"):
        packing.perfect(7, seed=0, width=2, height=3)


def test_packing_is_timed_per_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate(itertools.count(1), initial=0)  # 0 1 3 6 10 15: pairs of calls are 1, 3, 5 apart
    monkeypatch.setattr(packing.time, "perf_counter", lambda: next(clock))
    found = packing.packing([50, 80], perfect_blocks=30, seconds=2.0, seed=0)
    assert found["smartpool_s"] == {50: 1, 80: 3} and found["optimal_s"] == 5
    for n, ratio in found["portfolio_ratio"].items():
        assert 1 <= ratio <= found["smartpool_ratio"][n]
    assert found["optimal_ratio"] == 1


def test_scattered_blocks_depend_on_the_seed() -> None:
    one, same, other = (packing.scattered(30, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.nbytes, same.nbytes) and not np.array_equal(one.nbytes, other.nbytes)
    assert overlaps(one, np.cumsum(one.nbytes) - one.nbytes) == []
