"""What bench times of planned steps is what it says."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor import PlannedStep, capture
from experiments.benchmark import training
from experiments.benchmark.simulation import swap_all
from simulator import Machine
from simulator.schedule import lower

MACHINE = Machine.load("gtx1080ti")


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_an_idle_step_runs_no_kernel_and_makes_no_copy() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    batch = torch.randn(2, 64), torch.randn(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    captured = capture(model, torch.nn.MSELoss(), optimizer, batch, machine=MACHINE)
    plan = swap_all(captured.program, captured.program.gaps(512))
    limit = lower(captured.program, plan).required_bytes
    step = PlannedStep(captured, plan, MACHINE, limit)
    with Operators() as real:
        loss = step(*batch)
    assert any("addmm" in name for name in real.names)
    assert training.idle(step, batch)(*batch) != loss
    with Operators() as seen:
        step(*batch)
    assert set(seen.names) <= {"detach.default", "set_.source_Storage", "empty.memory_format", "as_strided.default",
                               "view.dtype", "is_set_to.default", "lift_fresh.default"}  # fmt: skip


def test_the_cost_of_a_step_is_per_kernel_and_per_move(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 10.0, 4.0, 16.0])  # looking, a step, one without kernels, one under a plan
    monkeypatch.setattr(training, "least_s", lambda call, repeats: (call(), next(times))[1])
    seen = []
    monkeypatch.setattr(training, "idle", lambda step, batch: seen.append(step) or step)
    found = training.step_overhead(MACHINE, 18, 2**16, 1)
    plain, moving = seen
    assert found["step_kernel_us"] == round(6e6 / len(plain.order.items), 3)
    moves = sum(len(item.before) + len(item.after) for item in moving.order.items)
    assert moves and found["step_move_us"] == round(6e6 / moves, 3)
    assert found["step_binding_us"] == round(1e6 / len(plain.state.bindings), 4) and found["step_fixed_us"] == 4e6
