"""Hooks, and Python values that a step reads: done as eager does them, or refused by name."""

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from executor import CaptureError, PlannedStep, capture, fit
from executor.training.bindings import StepError
from simulator import Plan

BATCH = torch.linspace(-1, 1, 32).reshape(4, 8), torch.tensor([0, 1, 2, 3])
GAIN = 1.0


class Net(nn.Module):
    """Reads a number of each kind: of a module, a table, a closure's default, a global."""

    def __init__(self, act: Callable[[nn.Module, Tensor], object] = lambda net, x: None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop, self.act = nn.Dropout(0.3), act
        self.scale, self.table, self.epoch, self.kept = 2.0, {"bias": 0.5}, 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.act(self, x)
        return self.scaled(self.last(self.drop(self.norm(self.first(x)))))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale * GAIN + self.table["bias"]


class Loss:
    def __init__(self) -> None:
        self.weight = 0.5

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return self.weight * nn.functional.cross_entropy(out, y)


def parts(*args: Any) -> tuple[Net, Loss, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(*args)
    return net, Loss(), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def trained(hook: Callable[[Net, torch.optim.Optimizer], object], planned: bool) -> list[Tensor]:
    net, loss_fn, optimizer = parts()
    hook(net, optimizer)
    step = PlannedStep(capture(net, loss_fn, optimizer, BATCH), Plan()) if planned else None
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        if step:
            losses.append(step(*BATCH))
        else:
            loss = loss_fn(net(BATCH[0]), BATCH[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *(t.detach() for t in net.state_dict().values())]


def in_backward(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step of one parameter within the backward pass."""
    own = torch.optim.SGD([net.last.bias], lr=0.01)

    def step(_: Tensor) -> None:
        own.step()
        own.zero_grad()

    net.last.bias.register_post_accumulate_grad_hook(step)
    del optimizer.param_groups[0]["params"][-1]


def scaling(net: Net, _: torch.optim.Optimizer) -> None:
    net.first.weight.register_hook(lambda grad: 0.5 * grad)


def after_a_gradient(net: Net, _: torch.optim.Optimizer) -> None:
    def triple(p: Tensor) -> None:
        p.grad.mul_(3)

    net.last.bias.register_post_accumulate_grad_hook(triple)


def around_the_optimizer(net: Net, optimizer: torch.optim.Optimizer) -> None:
    def clip(*_: object) -> None:
        net.last.weight.grad.clamp_(-0.01, 0.01)

    def project(*_: object) -> None:
        net.first.weight.data.clamp_(-0.2, 0.2)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(project)


HOOKS = (scaling, after_a_gradient, around_the_optimizer, in_backward)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_do_what_they_do_in_eager(hook):
    assert all(map(torch.equal, trained(hook, False), trained(hook, True)))
    assert not all(map(torch.equal, trained(lambda *_: None, False), trained(hook, True)))  # it does something


def test_hooks_that_only_python_would_see_are_refused_by_name():
    seen: list[int] = []

    def count(*_: object) -> None:
        seen.append(1)

    net, loss_fn, optimizer = parts()
    handle = optimizer.register_step_post_hook(count)
    with pytest.raises(StepError, match=r"a step hook of the optimizer .*count\) runs no operator"):
        PlannedStep(capture(net, loss_fn, optimizer, BATCH), Plan())
    handle.remove()
    net.first.weight.register_hook(count)
    with pytest.raises(StepError, match=r"a hook of first.weight .*count\) runs no operator"):
        PlannedStep(capture(net, loss_fn, optimizer, BATCH), Plan())
    assert not seen  # what the capture ran of them is undone


@pytest.mark.parametrize("where", ["parameter", "module"])
def test_hooks_that_come_later_are_refused(where):
    net, loss_fn, optimizer = parts()
    step = PlannedStep(capture(net, loss_fn, optimizer, BATCH), Plan())
    step(*BATCH)
    target = net.first.weight.register_hook if where == "parameter" else net.first.register_forward_hook
    handle = target(lambda *_: None)
    with pytest.raises(StepError, match="hooks of the model were added"):
        step(*BATCH)
    handle.remove()
    step(*BATCH)


CHANGES: dict[str, tuple[Callable[[Net, Loss], object], str]] = {
    "dropout": (lambda net, _: setattr(net.drop, "p", 0.1), "drop.p was 0.3 at the capture and is 0.1 now"),
    "batch norm": (lambda net, _: setattr(net.norm, "momentum", 0.2), "norm.momentum was 0.1 .* is 0.2"),
    "an attribute": (lambda net, _: setattr(net, "scale", 1.0), "scale was 2.0 .* is 1.0"),
    "a table": (lambda net, _: net.table.update(bias=0.0), "table.bias was 0.5 .* is 0.0"),
    "the loss": (lambda _, loss: setattr(loss, "weight", 1.0), "loss_fn.weight was 0.5 .* is 1.0"),
    "a value that is gone": (lambda net, _: net.table.clear(), "table.bias was 0.5 .* is None"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_value_that_the_step_reads_has_changed(change, message):
    net, loss_fn, optimizer = parts()
    step = fit(net, loss_fn, optimizer, BATCH, memory=1.0)
    step(*BATCH)
    before = [t.clone() for t in net.state_dict().values()]
    change(net, loss_fn)
    with pytest.raises(StepError, match=message):
        step(*BATCH)
    assert all(map(torch.equal, before, net.state_dict().values()))
    if net.table:
        step.recapture()
        twin, twin_loss, other = parts()
        change(twin, twin_loss)
        twin.load_state_dict(net.state_dict())
        other.load_state_dict(optimizer.state_dict())
        torch.manual_seed(3)
        ours = step(*BATCH)
        torch.manual_seed(3)
        assert torch.equal(ours, twin_loss(twin(BATCH[0]), BATCH[1]))


def test_a_closure_a_default_and_a_global(monkeypatch):
    net, _, optimizer = parts()
    weight = 0.5

    def loss_fn(out: Tensor, y: Tensor, power: float = 1.0) -> Tensor:
        return weight * nn.functional.cross_entropy(out, y) ** power

    step = PlannedStep(capture(net, loss_fn, optimizer, BATCH), Plan())
    step(*BATCH)
    weight = 1.0
    with pytest.raises(StepError, match=r"weight was 0\.5"):
        step(*BATCH)
    weight = 0.5
    loss_fn.__defaults__ = (2.0,)
    with pytest.raises(StepError, match=r"loss_fn.__defaults__ was \(1.0,\)"):
        step(*BATCH)


def test_values_that_no_code_of_the_step_names_may_change():
    net, loss_fn, optimizer = parts()
    step = PlannedStep(capture(net, loss_fn, optimizer, BATCH), Plan())
    net.epoch, net.note = 1, "second"
    step(*BATCH)


@pytest.mark.parametrize(("act", "message"), [
    (lambda net, x: setattr(net, "epoch", net.epoch + 1), "the step changes act.epoch from 0 to 1"),
    (lambda net, x: random.random(), "the step draws from Python's random"),
    (lambda net, x: np.random.rand(), "the step draws from numpy.random"),  # noqa: NPY002 (what users do)
], ids=["counts", "random", "numpy"])  # fmt: skip
def test_what_no_graph_does_again_is_refused(act, message):
    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.epoch >= 0 else x

    torch.manual_seed(0)
    net = Counts(act)
    state = random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    captured = capture(net, Loss(), torch.optim.SGD(net.parameters(), lr=0.1), BATCH)  # it may be simulated
    assert net.epoch == 0 and state == (random.getstate(), repr(np.random.get_state()))  # noqa: NPY002
    with pytest.raises(StepError, match=message.replace("act.", "")):
        PlannedStep(captured, Plan())


def test_a_tensor_that_the_step_keeps_is_no_value():
    net, loss_fn, optimizer = parts(lambda net, x: setattr(net, "kept", x + 1))
    step = PlannedStep(capture(net, loss_fn, optimizer, BATCH), Plan())
    net(BATCH[0])  # evaluation keeps one, too
    step(*BATCH)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_of_cudnns_recurrent_layers_is_refused(kind, monkeypatch):
    """It draws on the host what the kernels draw from; without dropout, or when it does not train, it is captured."""
    monkeypatch.setattr(sys.modules[CaptureError.__module__], "uses_cudnn", lambda module: True)
    batch = torch.randn(4, 2, 3), torch.zeros(1)

    def of(layer):
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        return capture(layer, lambda out, y: out[0].sum(), optimizer, batch)

    layer = kind(3, 3, 2, dropout=0.5)
    with pytest.raises(CaptureError, match=f"the model is a {kind.__name__} with dropout, whose state cuDNN makes"):
        of(layer)
    assert of(layer.eval()) and of(kind(3, 3, 2))


def test_modules_that_work_on_several_gpus_are_refused(tmp_path):
    net, loss_fn, optimizer = parts()
    with pytest.raises(CaptureError, match="the model is a DataParallel, which runs the model on several GPUs"):
        capture(nn.DataParallel(net), loss_fn, optimizer, BATCH)
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match=r"is a DistributedDataParallel, .*executor\.compiled\.compile\(model"):
            capture(nn.parallel.DistributedDataParallel(net), loss_fn, optimizer, BATCH)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        net.first.weight = nn.Parameter(distribute_tensor(net.first.weight.data, mesh))
        with pytest.raises(CaptureError, match=r"first.weight is a DTensor"):
            capture(net, loss_fn, optimizer, BATCH)
    finally:
        torch.distributed.destroy_process_group()
