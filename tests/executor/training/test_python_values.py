"""Tests Python values that a step reads: a change is refused by name, and a new capture accepts it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from executor import PlannedStep, StepError, capture
from simulator import Plan
from tests.executor.networks import sgd
from tests.executor.training.programs import Loop, Twins, moving, standard

GAIN = 1.0


class Net(nn.Module):
    """Network that reads numbers from a module, a table and a global."""

    def __init__(self, act: Callable[[nn.Module, Tensor], object] = lambda net, x: None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.drop = nn.Dropout(0.3)
        self.act = act
        self.scale = 2.0
        self.table = {"bias": 0.5}
        self.epoch = 0
        self.kept = None

    def forward(self, x: Tensor) -> Tensor:
        self.act(self, x)
        return self.scaled(self.last(self.drop(self.norm(self.first(x)))))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale * GAIN + self.table["bias"]


class Loss:
    def __init__(self) -> None:
        power = 1.0

        def raised(loss: Tensor, by: float = 1.0) -> Tensor:
            return loss ** (power * by)

        self.weight = 0.5
        self.raised = raised

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return self.weight * self.raised(nn.functional.cross_entropy(out, y))


def batch(_: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randint(4, (4,))


def reading(*args: Any) -> Loop:
    model = Net(*args)
    return standard(model, Loss(), sgd(model), batch)


CHANGES: dict[str, tuple[Callable[[Net, Loss], object], str]] = {
    "dropout": (lambda net, _: setattr(net.drop, "p", 0.1), "drop.p was 0.3 .* is 0.1"),
    "batch norm": (lambda net, _: setattr(net.norm, "momentum", 0.2), "norm.momentum was 0.1 .* is 0.2"),
    "an attribute": (lambda net, _: setattr(net, "scale", 1.0), "scale was 2.0 .* is 1.0"),
    "a table": (lambda net, _: net.table.update(bias=0.0), "table.bias was 0.5 .* is 0.0"),
    "the loss": (lambda _, loss: setattr(loss, "weight", 1.0), "loss_fn.weight was 0.5 .* is 1.0"),
    "a closure": (lambda _, loss: setattr(loss.raised.__closure__[0], "cell_contents", 2.0), "power was 1.0 .* is 2.0"),
    "a default": (lambda _, loss: setattr(loss.raised, "__defaults__", (2.0,)), r"__defaults__ was \(1.0,\)"),
    "a value that is gone": (lambda net, _: net.table.clear(), "table.bias was 0.5 .* is missing"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_value_that_the_step_reads_has_changed(what: str) -> None:
    change, named = CHANGES[what]
    twins = Twins(reading)
    steps = twins.steps_under(moving)
    twins.train(steps)
    change(twins.ours.model, twins.ours.capture_args[1])
    with pytest.raises(StepError, match=named):
        steps(*twins.next_batch())
    twins.compare()
    if twins.ours.model.table:
        steps.recapture()
        change(twins.eager.model, twins.eager.capture_args[1])
        twins.train(steps, 2)


def test_unread_values_and_kept_tensors_may_change() -> None:
    twins = Twins(reading, lambda net, x: setattr(net, "kept", x + 1))
    step = PlannedStep(twins.captured(), Plan())
    twins.ours.model.epoch = 1
    twins.ours.model.note = "second"
    with torch.random.fork_rng():
        twins.ours.model(batch()[0])  # keeps a tensor, too
    twins.eager.model.load_state_dict(twins.ours.model.state_dict())  # with batch norm's statistics
    twins.train(step)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda net, x: setattr(net, "epoch", net.epoch + 1), "epoch from 0 to 1"),
        (lambda net, x: random.random(), "Python's random"),
        (lambda net, x: np.random.rand(), "numpy.random"),  # noqa: NPY002 (what users do)
    ],
    ids=["counts", "random", "numpy"],
)
def test_unrepeatable_values_are_refused(act: Any, named: str) -> None:
    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.epoch >= 0 else x

    model = Counts(act)
    state = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    captured = capture(model, Loss(), sgd(model), batch())  # it may be simulated
    assert model.epoch == 0 and state == (random.getstate(), repr(np.random.get_state()))  # noqa: NPY002
    with pytest.raises(StepError, match=named):
        PlannedStep(captured, Plan())
