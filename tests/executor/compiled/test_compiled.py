"""Plans for torch.compile. One test compiles with Inductor, and needs a C++ compiler; the others run the same graphs by
FX's interpreter, and look at what Inductor would launch."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from executor import compiled
from executor.compiled import CompileError, Partitioner, allocated_peak
from executor.compiled.backend import CompiledReport


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.drop)


class Net(nn.Module):
    """Returns its loss, so that no gradient comes from outside."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def blocks(n: int = 2, drop: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(*(Block(32, drop) for _ in range(n)))


def graphs(model: Any, partitioner: Callable[..., Any], **options: Any) -> Any:
    """``torch.compile(model)`` whose graphs are run by the interpreter."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    run = aot_autograd(
        fw_compiler=lambda gm, inputs: make_boxed_func(gm.forward), partition_fn=partitioner,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    return torch.compile(model, backend=run, dynamic=False, **options)


def step(model: Any, net: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss and all gradients."""
    net.zero_grad()
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def peak(model: Any, net: nn.Module, x: Tensor) -> int:
    """The bytes that a step allocates, of a model that has been compiled."""
    net.zero_grad()
    return allocated_peak(lambda: model(x).backward())


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_model_takes_what_was_predicted_and_has_the_bits_of_one_without_a_plan() -> None:
    net, x = blocks(), torch.randn(4, 64, 32)
    plain = torch.compile(net, dynamic=False)
    expected = step(plain, net, x)
    without = peak(plain, net, x)
    torch._dynamo.reset()
    planned = compiled.compile(net, memory=0.7)
    found = step(planned, net, x)
    (graph,) = compiled.report(planned).graphs
    assert all(map(torch.equal, found, expected))
    assert graph.plan is not None and graph.plan.decisions
    assert graph.peak_bytes <= graph.limit == int(0.7 * graph.without_bytes)
    assert peak(planned, net, x) == pytest.approx(graph.peak_bytes, rel=0.02)
    assert without == pytest.approx(graph.without_bytes, rel=0.02)
    assert "run again" in str(compiled.report(planned))


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    net = blocks(1)
    with pytest.raises(CompileError, match="needs a C\\+\\+ compiler on the CPU"):
        compiled.compile(net, memory=0.9)(torch.randn(2, 8, 32))


def test_what_does_not_fit_is_refused_with_the_least_that_does() -> None:
    with pytest.raises(
        CompileError, match=r"graph 0/0 does not fit into .*: no plan that only runs kernels again needs less"
    ):
        graphs(blocks(), Partitioner(0.2))(torch.randn(4, 64, 32))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(32)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False).square().mean()


def test_checkpoints_of_the_users_stay_and_are_named() -> None:
    net, x = Checkpointed(), torch.randn(4, 64, 32)
    partitioner = Partitioner(0.5)
    with pytest.warns(UserWarning, match="left as PyTorch partitions it, because it has checkpoint regions"):
        found = step(graphs(net, partitioner), net, x)
    torch.testing.assert_close(found, step(net, net, x))
    assert "left as PyTorch" in str(CompiledReport(tuple(partitioner.graphs)))


def test_the_key_of_a_cache_names_all_that_a_plan_depends_on() -> None:
    def planner(*_: object) -> Any:
        raise NotImplementedError

    same = Partitioner(0.5, "h100").uuid()
    assert same == Partitioner(0.5, "h100").uuid()
    others = [Partitioner(0.6, "h100"), Partitioner(0.5, "h200"), Partitioner(0.5, "h100", "capuchin"),
              Partitioner(0.5, "h100", planner), Partitioner(0.5, "h100", planner)]  # fmt: skip
    assert len({same, *(p.uuid() for p in others)}) == 6
