"""Tests of compiled steps that update each parameter within the backward pass."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import compiled
from executor.capture.reach import CaptureError
from executor.compiled import CompileError, Partitioner, allocated_peak, compile_step
from executor.compiled.updates import UPDATE, readers
from tests.executor.compiled.test_compiled import QUICK, Block, Net, blocks
from tests.executor.compiled.test_device_limit import WORDS, Language, loss_fn


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)


def trained(net: nn.Module, optimizer: Any, train: Any, batch: Any) -> list[Tensor]:
    """Returns the losses of three steps with decreasing learning rates, followed by parameters and state."""
    losses = []
    for i in range(3):
        optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        losses.append(train(*batch))
    state = [x for p in net.parameters() for x in optimizer.state[p].values()]
    return [x.detach().clone() for x in (*losses, *net.parameters(), *state)]


def ordinary(model: Any, optimizer: Any) -> Any:
    def train(*batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


@pytest.mark.nightly
@pytest.mark.parametrize("memory", [1.0, 0.8])
def test_updates_in_the_backward_pass_have_the_ordinary_bits(memory: float) -> None:
    torch.manual_seed(0)
    net = Language()
    twin = copy.deepcopy(net)
    words = torch.randint(0, WORDS, (8, 64))
    optimizer, other = adamw(net), adamw(twin)
    step = compile_step(net, loss_fn, optimizer, memory=memory, planner=QUICK)
    found = trained(net, optimizer, step, (words, words))
    assert all(p.grad is None for p in net.parameters())
    (graph,) = step.report().graphs
    assert (graph.plan is not None) == (memory < 1) and graph.peak_bytes <= graph.limit
    assert allocated_peak(lambda: step(words, words)) == pytest.approx(graph.peak_bytes, rel=0.005)
    torch._dynamo.reset()
    plain = torch.compile(compiled.backend.WithLoss(twin, loss_fn), dynamic=False)
    assert all(map(torch.equal, found, trained(twin, other, ordinary(plain, other), (words, words))))


@pytest.mark.nightly
def test_updates_serve_smaller_batches() -> None:
    torch.manual_seed(0)
    net = blocks()
    twin = copy.deepcopy(net)
    optimizer, other = adamw(net), adamw(twin)
    step = compile_step(net, lambda out, _: out.square().mean(), optimizer, memory=0.9, planner=QUICK, dynamic=True)
    for batch in (4, 3):  # whose size is a symbol in both graphs
        x = torch.randn(batch, 64, 32)
        loss = step(x)
        other.zero_grad()
        expected = twin(x).square().mean()
        expected.backward()
        other.step()
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()), atol=1e-4, rtol=1e-3)  # rate: 0.01
    (graph,) = step.report().graphs
    assert graph.plan is not None and graph.peak_bytes <= graph.limit


class Residual(nn.Module):
    """Two convolutions with batch norm, and their input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.layers = nn.Sequential(*(layer for conv in convolutions for layer in (conv, nn.BatchNorm2d(channels))))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + x)


def test_updates_follow_the_readers_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's launches inline values of parameters, which an update before them would change."""
    found = []

    def call(self: Partitioner, *args: Any, **kwargs: Any) -> Any:
        _, backward = partition(self, *args, **kwargs)
        found.append((self.graphs[-1].plan, backward.graph))
        raise NotImplementedError("nothing is compiled")

    partition = Partitioner.__call__
    monkeypatch.setattr(Partitioner, "__call__", call)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = compile_step(net, nn.functional.cross_entropy, optimizer, memory=0.7, planner=QUICK)
    with pytest.raises(Exception, match="nothing is compiled"):
        step(torch.randn(64, 3, 32, 32), torch.randint(0, 16, (64,)))
    ((plan, graph),) = found
    assert plan is not None
    position = {node: i for i, node in enumerate(graph.nodes)}
    parameters = {node.name: node for node in graph.find_nodes(op="placeholder")}
    updates = graph.find_nodes(op="call_function", target=UPDATE)
    read = [u for u in updates if u.name.removeprefix("update_") in parameters]
    assert len(updates) == len(list(net.parameters())) and len(read) > 8
    for update in read:
        parameter = parameters[update.name.removeprefix("update_")]
        others = [node for node in readers(parameter) if node is not update]
        assert all(position[node] < position[update] for node in others)
        assert parameter in update.args[1] or not others


@pytest.mark.nightly
def test_gradients_do_not_live_at_once() -> None:
    """A batch of few tokens: gradients are most of the memory. The control makes its update after the backward."""
    torch.manual_seed(0)
    net = Net(*(Block(64) for _ in range(4)))
    x = torch.randn(2, 4, 64)
    gradients = sum(p.nbytes for p in net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    control = compiled.compile(net, memory=1.0)
    train = ordinary(control, optimizer)
    train(x)
    optimizer.zero_grad()
    after = allocated_peak(lambda: train(x))
    optimizer.zero_grad()
    torch._dynamo.reset()
    step = compile_step(net, None, optimizer, memory=1.0)
    step(x)
    (graph,) = step.report().graphs
    early = allocated_peak(lambda: step(x))
    assert early == pytest.approx(graph.peak_bytes, rel=0.005)
    assert after > gradients and early < 0.4 * after


def test_updates_that_need_all_gradients_are_refused() -> None:
    net = blocks(1)

    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            return super().step(closure)

    with pytest.raises(CaptureError, match="optimizer_in_backward: the update cannot move into the backward pass"):
        compile_step(net, None, Clipped(net.parameters(), lr=0.1), memory=0.9)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = next(net.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CompileError, match="hooks of parameters or of the optimizer would not be called"):
        compile_step(net, None, optimizer, memory=0.9)
    handle.remove()
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(CompileError, match="hooks of parameters or of the optimizer would not be called"):
        compile_step(net, None, optimizer, memory=0.9)
