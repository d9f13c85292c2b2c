"""Tests of limits for a whole device: what a step holds, several graphs, the loss inside, and later compilations."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from executor import compiled
from executor.compiled import CompileError, Partitioner, allocated_peak, chunked_cross_entropy
from executor.compiled.held import Held
from tests.executor.compiled.test_compiled import QUICK, Block, Broken, blocks, graphs, step

WORDS = 256


class Language(nn.Module):
    """Language model; without a head it returns hidden states."""

    def __init__(self, has_head: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, WORDS)
        self.has_head = has_head

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.blocks(self.embedding(words))
        return self.head(hidden) if self.has_head else hidden


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    net.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


ALL_CHANGES = ("short", "freeze", "short", "unfreeze", "eval", "train")


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("recompute", ("freeze",)),
        pytest.param("recompute", ALL_CHANGES, marks=pytest.mark.nightly),
        pytest.param("joint", ALL_CHANGES, marks=pytest.mark.nightly),
    ],
)
def test_later_compilations_keep_the_limit_of_the_first(mode: str, changes: tuple[str, ...]) -> None:
    """A shorter batch or frozen layers lower a graph's peak; its plans may need more than the fraction of that."""
    torch.manual_seed(0)
    net = Language()
    partitioner = Partitioner(0.8, planner=QUICK, mode=mode)
    model = graphs(net, partitioner)
    words = torch.randint(0, WORDS, (4, 64))
    limits = []
    for change in ("none", *changes):
        if change in ("freeze", "unfreeze"):
            nn.ModuleList((net.embedding, net.blocks[0])).requires_grad_(change == "unfreeze")
        if change in ("eval", "train"):
            net.train(change == "train")
        batch = words[:3] if change == "short" else words
        found = gradients(net, loss_fn(model(batch), batch))
        torch.testing.assert_close(found, gradients(net, loss_fn(net(batch), batch)))
        limits.append(partitioner.graphs[-1].limit)
    first = partitioner.graphs[0]
    assert len(partitioner.graphs) > len(set(changes)) - 3 and len(set(limits)) == 1
    assert first.plan is not None and all(g.peak_bytes <= g.limit for g in partitioner.graphs)
    assert any(g.without_bytes * 0.8 < g.limit for g in partitioner.graphs)


@pytest.mark.nightly
def test_copies_train_and_a_second_backward_is_refused() -> None:
    net = blocks()
    x = torch.randn(4, 64, 32)
    model = compiled.compile(net, memory=0.8, planner=QUICK)
    expected = step(model, net, x)
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, step(twin, twin._orig_mod, x), expected))
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        batch = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(batch), batch, create_graph=True)
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="donated buffers"):
        model(x).backward(retain_graph=True)
    net.zero_grad()
    (model(x) + model(x)).backward()  # two graphs in flight
    torch.testing.assert_close(net.parts[0].up.weight.grad, 2 * expected[3])


@pytest.mark.nightly
def test_bytes_count_all_that_a_step_holds() -> None:
    """The allocated peak of a whole step, with its update, is the predicted one."""
    torch.manual_seed(0)
    net = Language()
    optimizer = torch.optim.AdamW(net.parameters())
    words = torch.randint(0, WORDS, (8, 64))
    memory = 2_300_000
    model = compiled.compile(net, loss_fn, memory=memory, optimizer=optimizer, planner=QUICK)

    def train() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(words, words)
        loss.backward()
        optimizer.step()
        return loss.detach()

    train()
    optimizer.zero_grad()
    (graph,) = compiled.report(model).graphs
    parameters = sum(p.nbytes for p in net.parameters())
    state = sum(x.nbytes for values in optimizer.state.values() for x in values.values())
    assert graph.held == {"parameter": parameters, "optimizer_state": state, "input": words.nbytes}
    assert graph.plan is not None and graph.limit == memory - sum(graph.held.values())
    assert allocated_peak(train) == pytest.approx(graph.peak_bytes, rel=0.005) and graph.peak_bytes <= graph.limit
    page = graph.report()
    assert page.limit == memory and page.persistent_bytes == parameters + state + words.nbytes
    assert page.under.kinds["parameter"] == parameters and "optimizer state" in str(page)


def test_bytes_that_the_held_tensors_exceed_are_refused() -> None:
    net = Language()
    optimizer = torch.optim.AdamW(net.parameters())
    words = torch.randint(0, WORDS, (8, 64))
    model = compiled.compile(net, loss_fn, memory="500KiB", optimizer=optimizer, planner=QUICK)
    with pytest.raises(CompileError, match=r"memory: 500KiB leave .* beside .* of optimizer state and .* of inputs"):
        model(words, words)


def test_buffers_that_no_update_reads_are_no_part_of_it() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    update = Held(net, torch.optim.AdamW(net.parameters())).update
    parameters = list(net.parameters())
    assert update.state == 2 * sum(p.nbytes for p in parameters) + 4 * len(parameters) and update.temporary > 0


def test_graphs_of_a_step_share_bytes() -> None:
    net = Broken(Block(32), Block(32))
    x = torch.randn(4, 64, 32)
    partitioner = Partitioner("1MiB", planner=QUICK)
    torch.testing.assert_close(step(graphs(net, partitioner), net, x), step(net, net, x))
    first, second = partitioner.graphs
    assert first.limit == 2**20 and second.limit == 2**20 - second.held["activation"]
    assert x.nbytes < second.held["activation"] < first.peak_bytes
    torch._dynamo.reset()
    with pytest.raises(CompileError, match=r"graph 1/0 does not fit into .* beside .* of activations"):
        graphs(net, Partitioner(first.peak_bytes, planner=QUICK))(x)


def chunked(net: Language) -> Any:
    return lambda hidden, target: chunked_cross_entropy(hidden, net.head.weight, target, chunks=8, bias=net.head.bias)


def test_chunked_cross_entropy_is_the_loss_of_all_tokens() -> None:
    torch.manual_seed(0)
    net = Language(has_head=False).double()
    words = torch.randint(0, WORDS, (3, 7))
    target = words.clone()
    target[0, 0] = -100
    logits = net.head(net(words))
    found = gradients(net, chunked(net)(net(words), target))
    torch.testing.assert_close(found, gradients(net, loss_fn(logits, target)))
    with pytest.raises(ValueError, match="chunks: expected at least 1"):
        chunked_cross_entropy(net(words), net.head.weight, target, chunks=0)
