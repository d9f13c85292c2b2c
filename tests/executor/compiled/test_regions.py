"""Tests of plans for equal blocks, which are made and compiled once."""

import pytest
import torch
from torch import nn

from executor import compiled
from executor.compiled import CompileError
from executor.compiled.regions import regions
from tests.executor.compiled.test_compiled import QUICK, Block, Net, peak, step


def blocks(n: int) -> Net:
    """Returns blocks after another layer, so that the first one's input has a gradient, too."""
    torch.manual_seed(0)
    return Net(nn.Linear(32, 32), *(Block(32) for _ in range(n)))


def test_regions_are_equal_blocks_and_the_modules_outside() -> None:
    net = Net(nn.Embedding(8, 32), nn.Sequential(Block(32), Block(16), Block(32), nn.ReLU()), nn.Linear(32, 8))
    found = regions(net)
    counts = [(region.name, len(region.modules)) for region in found]
    assert counts == [("parts.0", 1), ("parts.1.Block", 2), ("parts.1.Block", 1), ("parts.2", 1)]
    with pytest.raises(ValueError, match="regional: Linear has no ModuleList or Sequential with equal blocks"):
        regions(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="regional: expected mode 'recompute', got 'joint'"):
        compiled.compile(blocks(2), memory=0.5, mode="joint", regional=True)


@pytest.mark.nightly
def test_equal_blocks_share_a_plan_within_the_limit_of_all() -> None:
    net = blocks(8)
    x = torch.randn(4, 64, 32)
    compiled.compile(net, memory=1.0, planner=QUICK, regional=True)
    expected = step(net, net, x)
    without = peak(net, net, x)
    torch._dynamo.reset()
    planned = blocks(8)
    compiled.compile(planned, memory=0.6, planner=QUICK, regional=True)
    found = step(planned, planned, x)
    (graph,) = compiled.report(planned).graphs
    assert all(map(torch.equal, found, expected))
    assert graph.copies == 8 and graph.region == "parts.Block" and graph.plan is not None and graph.plan.decisions
    real = peak(planned, planned, x)
    assert real <= graph.limit and real == pytest.approx(graph.peak_bytes, rel=0.03)
    assert without == pytest.approx(graph.without_bytes, rel=0.03)
    page = graph.report()
    assert page.limit == pytest.approx(graph.limit, rel=0.01)
    assert "graph 0/0 (8 x parts.Block): limit" in str(compiled.report(planned))


@pytest.mark.nightly
def test_blocks_share_the_bytes_of_a_device() -> None:
    net = blocks(8)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(4, 64, 32)
    compiled.compile(net, memory="3MiB", optimizer=optimizer, planner=QUICK, regional=True)
    step(net, net, x)
    (graph,) = compiled.report(net).graphs
    parameters = sum(p.nbytes for p in net.parameters())
    assert graph.held["parameter"] == parameters
    assert graph.held["gradient"] == sum(p.nbytes for p in net.parts[0].parameters())
    assert graph.plan is not None and graph.limit == 3 * 2**20 - sum(graph.held.values())
    assert peak(net, net, x) <= graph.limit
    torch._dynamo.reset()
    small = blocks(8)
    compiled.compile(small, memory=0.1, planner=QUICK, regional=True)
    with pytest.raises(CompileError, match=r"graph 0/0 does not fit into"):
        small(x)
