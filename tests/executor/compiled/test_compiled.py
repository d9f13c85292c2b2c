"""Tests of plans for torch.compile.

One test compiles with Inductor and needs a C++ compiler. The others execute the same graphs with FX's interpreter and
inspect Inductor's launches.
"""

import copy
import pickle
import shutil
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from executor import compiled
from executor.compiled import CompileError, Partitioner, allocated_peak
from executor.compiled.graph_report import CompiledReport
from executor.compiled.held import Held
from executor.compiled.search import Search
from executor.fit import FitError
from simulator.schedule import lower

QUICK = "capuchin"


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.drop)


class Net(nn.Module):
    """Model that returns its loss, so it has no tangents; ``words`` makes it a language model whose words are all 0."""

    def __init__(self, *parts: nn.Module, words: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.words = words

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        if self.words:
            return F.cross_entropy(x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long))
        return x.square().mean()


def blocks(n: int = 2, drop: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(*(Block(32, drop) for _ in range(n)))


def graphs(model: Any, partitioner: Partitioner, dynamic: bool = False) -> Any:
    """Returns ``torch.compile(model)`` whose graphs are partitioned by a plan and executed by the interpreter."""
    from torch._guards import detect_fake_mode
    from torch._inductor import config
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.virtualized import V

    partitioner.in_order = True  # the interpreter keeps the order

    def partition(gm: Any, inputs: Any, **options: Any) -> Any:
        mode = detect_fake_mode(torch.utils._pytree.tree_leaves(inputs))
        with config.patch(custom_partitioner_fn=partitioner), V.set_fake_mode(mode):
            return partition_fn(gm, inputs, **options)

    return interpreted(model, partition, dynamic)


def interpreted(model: Any, partition_fn: Any, dynamic: bool = False) -> Any:
    """Returns ``torch.compile(model)`` without Inductor."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    run = aot_autograd(
        fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward),
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
    )
    return torch.compile(model, backend=run, dynamic=dynamic)


def step(model: Any, net: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the loss and all gradients."""
    net.zero_grad()
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def peak(model: Any, net: nn.Module, x: Tensor) -> int:
    """Returns the bytes that a step of a compiled model allocates."""
    net.zero_grad()
    return allocated_peak(lambda: model(x).backward(), x.device.type)


class Statistics(nn.Module):
    """Layer that reads its running mean, as a "clone" or for a "mask", and then updates it in place."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.read = read
        self.register_buffer("mean", torch.full((32,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.read == "clone":
            out = torch.tanh(h * self.mean.clone())
        else:
            out = torch.where(h > self.mean - 1.5, h, 0.1 * h)
        with torch.no_grad():
            self.mean.mul_(0.8).add_(h.mean(0))
        return out


def test_a_buffer_that_is_read_and_then_changed_has_eagers_gradients() -> None:
    """torch.compile 2.13 passes the updated buffer to the backward."""
    torch.manual_seed(0)
    net = Net(*(Statistics("clone") for _ in range(2)))
    x = torch.randn(64, 32)
    twin = copy.deepcopy(net)
    expected = step(twin, twin, x)
    found = step(compiled.compile(net, memory=1.0, planner=QUICK), net, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_readers_of_a_modified_buffer_are_not_recomputed() -> None:
    torch.manual_seed(0)
    net = Net(*(Statistics("mask") for _ in range(4)))
    x = torch.randn(256, 32)
    with pytest.raises(CompileError, match="does not fit"):
        step(compiled.compile(net, memory=0.8, planner=QUICK), net, x)


def test_a_planned_model_has_the_predicted_peak_and_unplanned_bits() -> None:
    net = blocks()
    x = torch.randn(4, 64, 32)
    plain = torch.compile(net, dynamic=False)
    expected = step(plain, net, x)
    without = peak(plain, net, x)
    torch._dynamo.reset()
    planned = compiled.compile(net, memory=0.7, planner=QUICK)
    found = step(planned, net, x)
    (graph,) = compiled.report(planned).graphs
    assert all(map(torch.equal, found, expected))
    assert graph.plan is not None and graph.plan.decisions
    assert graph.peak_bytes <= graph.limit == int(0.7 * graph.without_bytes)
    assert peak(planned, net, x) == pytest.approx(graph.peak_bytes, rel=0.02)
    assert without == pytest.approx(graph.without_bytes, rel=0.02)
    assert "recomputed" in str(compiled.report(planned))


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    net = blocks(1)
    with pytest.raises(CompileError, match="needs a C\\+\\+ compiler on the CPU"):
        compiled.compile(net, memory=0.9)(torch.randn(2, 8, 32))


@pytest.mark.nightly
def test_less_memory_takes_more_time() -> None:
    """The last network has an embedding, whose gradient is zero-filled early and accumulated at the end."""
    mlp = blocks()
    x = torch.randn(4, 64, 32)
    words = Net(nn.Embedding(50, 32), Block(32), Block(32))
    times = []
    for net, batch, memory in ((mlp, x, 0.95), (mlp, x, 0.8), (words, torch.randint(0, 50, (4, 64)), 0.75)):
        torch._dynamo.reset()
        partitioner = Partitioner(memory, "h100", QUICK)
        torch.testing.assert_close(step(graphs(net, partitioner), net, batch), step(net, net, batch))
        (graph,) = partitioner.graphs
        assert graph.plan is not None and graph.plan.decisions and graph.peak_bytes <= graph.limit
        times.append(graph.iteration_ns)
    assert 0 < times[0] <= times[1]


def test_a_language_models_loss_whose_gradient_is_written_over_the_logits() -> None:
    """Logits dominate the memory: a Program with logits and their gradient at once would not fit."""
    torch.manual_seed(0)
    net = Net(*(Block(32) for _ in range(4)), nn.Linear(32, 512), words=True)
    x = torch.randn(4, 64, 32)
    partitioner = Partitioner(0.75, planner="annealing", seconds=None)
    torch.testing.assert_close(step(graphs(net, partitioner), net, x), step(net, net, x))
    (graph,) = partitioner.graphs
    assert graph.program is not None and graph.plan is not None
    assert graph.program.peak_bytes == graph.without_bytes < graph.peak_bytes / 0.75 * 1.1
    assert graph.limit * 0.95 < graph.peak_bytes <= graph.limit
    assert lower(graph.program, graph.plan).required_bytes == graph.peak_bytes


@pytest.mark.parametrize(("memory", "planned"), [(1.0, False), (0.9, True)])
def test_convolutions_reserve_memory_for_libraries(memory: float, planned: bool) -> None:
    net = Net(*(part for _ in range(6) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.GELU())))
    partitioner = Partitioner(memory, planner=QUICK)
    step(graphs(net, partitioner), net, torch.randn(8, 4, 16, 16))
    (graph,) = partitioner.graphs
    assert (graph.plan is not None) == planned
    assert not planned or graph.peak_bytes <= 0.99 * graph.limit


def test_infeasible_memory_is_refused_with_the_minimum() -> None:
    with pytest.raises(
        CompileError,
        match=r"graph 0/0 does not fit into .*: every plan without swaps needs at least [^=]*: raise memory=(\n|$)",
    ):
        graphs(blocks(), Partitioner(0.2))(torch.randn(4, 64, 32))


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        torch._dynamo.graph_break()
        return self.parts[1](x).square().mean()


@pytest.mark.nightly
def test_graphs_and_shapes() -> None:
    """A fraction applies to each graph, and each shape has its own plan within the limit of the first."""
    net = Broken(Block(32), Block(32))
    partitioner = Partitioner(0.95, planner=QUICK)
    model = graphs(net, partitioner)
    for batch in (4, 3):
        x = torch.randn(batch, 64, 32)
        torch.testing.assert_close(step(model, net, x), step(net, net, x))
    found = {graph.name: graph for graph in partitioner.graphs}
    assert len(found) == 4
    for name, graph in found.items():
        first = found[f"{name[0]}/0"]
        assert graph.peak_bytes <= graph.limit == int(0.95 * first.without_bytes)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoints_of_the_users_stay_and_are_named() -> None:
    net = Net(Checkpointed(32))
    x = torch.randn(4, 64, 32)
    partitioner = Partitioner(0.5)
    with pytest.warns(UserWarning, match="left as PyTorch partitions it, because it has checkpoint regions"):
        found = step(graphs(net, partitioner), net, x)
    torch.testing.assert_close(found, step(net, net, x))
    assert "left as PyTorch" in str(CompiledReport(tuple(partitioner.graphs)))


@pytest.mark.nightly
def test_random_numbers_are_drawn_once() -> None:
    """Forward and backward use the same masks: gradients equal those without a plan."""
    net = blocks(2, drop=0.5)
    x = torch.randn(4, 64, 32)
    partitioner = Partitioner(0.75, planner=QUICK)
    expected = step(graphs(net, Partitioner(1.0)), net, x)
    torch._dynamo.reset()
    torch.testing.assert_close(step(graphs(net, partitioner), net, x), expected)
    assert partitioner.graphs[0].plan is not None


@pytest.mark.nightly
def test_statistics_of_batch_norm_are_written_once() -> None:
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for i in range(4)
    ]
    net = Net(*parts)
    x = torch.randn(4, 3, 16, 16)
    partitioner = Partitioner(0.8, planner=QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(graphs(net, partitioner), net, x)
    statistics = [b.clone() for b in net.buffers()]
    for name, b in net.named_buffers():
        b.fill_(1.0 if name.endswith("var") else 0.0)
    torch.testing.assert_close(found, step(net, net, x))
    torch.testing.assert_close(statistics, list(net.buffers()))
    assert partitioner.graphs[0].plan is not None


def test_the_key_of_a_cache_names_all_that_a_plan_depends_on() -> None:
    def planner(*_: object) -> Any:
        raise NotImplementedError

    same = Partitioner(0.5, "h100").uuid()
    assert same == Partitioner(0.5, "h100").uuid()
    others = [
        Partitioner(0.6, "h100"),
        Partitioner(0.5, "h200"),
        Partitioner(0.5, "h100", "capuchin"),
        Partitioner(0.5, "h100", planner),
        Partitioner(0.5, "h100", planner),
    ]
    assert len({same, *(p.uuid() for p in others)}) == 6


def test_inductors_copies_of_the_partitioner_leave_out_the_model() -> None:
    """It copies its configuration, and pickles it for the key of its cache, when it compiles a graph."""
    net = blocks()
    net.lock = threading.Lock()  # type: ignore[assignment]  # cannot be copied or pickled
    partitioner = Partitioner(0.8)
    partitioner.held = Held(net, None)
    assert copy.deepcopy(partitioner) is partitioner
    assert len(pickle.dumps(partitioner)) < 1000


@pytest.mark.parametrize(("least", "needs", "drafts"), [(0, 990, 2), (950, 0, 6)])
def test_a_search_returns_a_fitting_plan_or_the_reason(least: int, needs: int, drafts: int) -> None:
    """Inductor needs ten percent more than each plan's estimate."""
    limits: list[int] = []

    def plan(limit: int) -> Any:
        limits.append(limit)
        if limit < least:
            raise FitError("no plan")
        return SimpleNamespace(nbytes=limit, timeline=SimpleNamespace(iteration_ns=10_000 - limit))

    def schedule(candidate: Any) -> Any:
        return SimpleNamespace(peak_bytes=lambda: candidate.nbytes * 11 // 10)

    best, reason = Search(plan, schedule, aim=1000, enough=5000).run()
    assert (best.peak_bytes if best else 0) == needs and len(limits) == drafts
    assert reason == ("" if best else "no plan (as Inductor schedules what was tried, it needs 1.02 KiB)")
