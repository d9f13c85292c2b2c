"""Tests of planned compiled models on a GPU: Inductor's kernels, PyTorch's copies, and the allocator's bytes."""

import pytest
import torch
from torch import nn

from executor import compiled
from executor.compiled.backend import needs_operators
from tests.executor.compiled.test_compiled import Block, Net, peak, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def on_a_gpu(mode: str, memory: float) -> compiled.CompiledReport:
    """Checks results bit by bit against torch.compile alone, and the limit; returns the report."""
    torch.manual_seed(0)
    net: nn.Module = Net(*(Block(512) for _ in range(4))).cuda()
    x = torch.randn(16, 256, 512, device="cuda")
    expected = step(torch.compile(net, dynamic=False), net, x)
    torch._dynamo.reset()
    model = compiled.compile(net, memory=memory, planner="annealing", seconds=None, mode=mode)
    found = step(model, net, x)
    assert all(map(torch.equal, found, expected))
    found = step(model, net, x)
    assert all(map(torch.equal, found, expected))
    (graph,) = compiled.report(model).graphs
    real = peak(model, net, x)
    print(compiled.report(model), f"real peak {real:,}, limit {graph.limit:,}, without {graph.without_bytes:,}")
    assert graph.plan is not None and graph.plan.decisions
    assert graph.peak_bytes == pytest.approx(real, rel=0.02) and real <= graph.limit
    return compiled.report(model)


@pytest.mark.gpu
def test_recomputation_keeps_within_the_memory() -> None:
    on_a_gpu("recompute", 0.7)


@pytest.mark.gpu
def test_copies_go_to_the_host_within_the_memory() -> None:
    try:
        needs_operators("swap")
    except compiled.CompileError as error:  # an older PyTorch
        pytest.skip(str(error))
    assert " swaps, " in str(on_a_gpu("swap", 0.7))
