"""Tests that `suite=speed` times what it documents."""

import shutil

import numpy as np
import pytest
import torch

from agents import Infeasible
from agents.heuristics.home import HOME
from executor import PlannedStep, capture
from experiments.measure.speed import host_time, packing, simulation
from experiments.measure.speed.simulation import swap_all
from simulator import Machine
from simulator.schedule import lower
from tests.experiments.conftest import chain
from tests.oracle.packing import overlaps

MACHINE = Machine("m", 2**40, 12 * 10**9, 12 * 10**9)


def test_a_search_of_home_is_timed_per_simulator_call(monkeypatch: pytest.MonkeyPatch) -> None:
    program = chain(8)
    with pytest.raises(Infeasible):
        simulation.home_search(program, MACHINE, 6, 3, seed=1, limit=0.01)
    planner = HOME(6, 3, jobs=1, seed=1)
    planner.plan(program, MACHINE, int(0.6 * program.peak_bytes))
    monkeypatch.setattr(simulation.timeit, "timeit", lambda call, setup, number: (call(), 3.0)[1])
    found = simulation.home_search(program, MACHINE, 6, 3, seed=1)
    assert found == {"home_search_s": 3.0, "home_call_us": round(3e6 / planner.simulator_calls, 2)}


def test_packings() -> None:
    blocks = packing.perfect(40, seed=3, width=60, height=50)
    held = [int(blocks.nbytes[(blocks.lower <= t) & (t < blocks.upper)].sum()) for t in range(60)]
    assert len(blocks) == 40 and held == [50] * 60  # fills its rectangle
    with pytest.raises(ValueError, match="2 x 3"):
        packing.perfect(7, seed=0, width=2, height=3)
    one, same, other = (packing.scattered(30, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.nbytes, same.nbytes) and not np.array_equal(one.nbytes, other.nbytes)
    assert overlaps(one, np.cumsum(one.nbytes) - one.nbytes) == []
    assert packing.packing([], perfect_blocks=10, seconds=60.0, seed=0)["optimal_ratio"] == 1


def test_a_planned_step_without_kernels_and_copies() -> None:
    torch.manual_seed(0)
    machine = Machine.load("gtx1080ti")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    batch = torch.randn(2, 64), torch.randn(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    captured = capture(model, torch.nn.MSELoss(), optimizer, batch, machine=machine)
    plan = swap_all(captured.program, captured.program.gaps(512))
    step = host_time.idle(PlannedStep(captured, plan, machine, lower(captured.program, plan).required_bytes), batch)
    resident = [p for p in model.parameters() if p.nbytes < 512]  # a swapped one has no content without copies
    before = [p.clone() for p in resident]
    assert torch.equal(step(*batch), step(*batch))  # no kernel runs, so weights do not change
    assert len(resident) == 2 and all(torch.equal(a, b) for a, b in zip(before, resident, strict=True))


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="the kernels that compute nothing are C++")
def test_steps_without_kernels_issue_their_operators_and_compute_nothing() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Flatten())
    x = torch.randn(2, 1, 1, 1)
    y = torch.zeros(2, dtype=torch.long)
    steps = host_time.steps_of(Machine.load("gtx1080ti"), model, x, y)
    with host_time.without_kernels(steps) as quick:
        before = [p.clone().detach() for p in model.parameters()]
        for step in (*quick, *quick):
            step()
        with pytest.raises(RuntimeError, match="convolution was not recorded"):
            model(x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))  # weights did not change
    assert torch.equal(steps[0](), steps[1]())  # kernels are restored; both steps trained equally often


def test_the_cost_of_a_step_is_per_kernel_and_per_move(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 10.0, 4.0, 16.0])  # checking bindings, a step, one without kernels, one with a plan
    layers = (torch.nn.Flatten(), torch.nn.Linear(3072, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    monkeypatch.setattr(host_time.resnet, "ResNet", lambda depth: torch.nn.Sequential(*layers))
    monkeypatch.setattr(host_time, "shortest_s", lambda call, repeats: (call(), next(times))[1])
    seen: list[PlannedStep] = []
    monkeypatch.setattr(host_time, "idle", lambda step, batch: seen.append(step) or step)
    found = host_time.step_overhead(Machine.load("gtx1080ti"), 18, 2**16, 1)
    plain, moving = seen
    moves = sum(len(item.before) + len(item.after) for item in moving.order.items)
    assert moves and found == {
        "step_kernel_us": round(6e6 / len(plain.order.items), 3),
        "step_move_us": round(6e6 / moves, 3),
        "step_binding_us": round(1e6 / len(plain.state.bindings), 4),
        "step_fixed_us": 4e6,
    }
