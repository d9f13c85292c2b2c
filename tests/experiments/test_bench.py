"""What bench times is what it says."""

import pytest

from agents import Infeasible
from agents.home import HOME
from experiments import bench
from simulator import Machine
from tests.experiments.conftest import chain

MACHINE = Machine("m", 2**40, 12 * 10**9, 12 * 10**9)


def test_home_search_is_per_simulator_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    program = chain(8)
    found = bench.home_search(program, MACHINE, 6, 3, seed=1)
    planner = HOME(6, 3, jobs=1, seed=1)
    planner.plan(program, MACHINE, int(0.6 * program.peak_bytes))
    assert found == {"home_search_s": 3.0, "home_call_us": round(3e6 / planner.simulator_calls, 2)}
    assert planner.simulator_calls > 6


def test_home_search_within_no_limit_is_infeasible() -> None:
    with pytest.raises(Infeasible):
        bench.home_search(chain(8), MACHINE, 6, 3, seed=1, limit=0.01)
