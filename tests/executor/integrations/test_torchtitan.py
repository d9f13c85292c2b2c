"""The policy against torchtitan's interface, whose registry stands here as a stub; what it tags is carried out by
PyTorch's own copy of torchtitan's pass."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass import (
    remat_using_tags_for_fwd_loss_bwd_graph,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from executor.compiled import allocated_peak
from executor.fit import FitError
from executor.integrations.torchtitan import program_of, register, tag
from simulator.machine import Machine

H100 = Machine.load("h100")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., fx.GraphModule]]:
    known: dict[str, Callable[..., fx.GraphModule]] = {}

    def register_memory_policy(key: str) -> Callable[[Any], Any]:
        return lambda fn: known.setdefault(key, fn)

    for name in ("torchtitan", "torchtitan.experiments", "torchtitan.experiments.graph_trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("torchtitan.experiments.graph_trainer.registry")
    module.register_memory_policy = register_memory_policy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return known


def traced() -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Forward, loss and backward of three blocks as one graph, its backward marked as graph_trainer marks it."""
    torch.manual_seed(0)
    weights = [w for _ in range(3) for w in (torch.randn(128, 32) / 8, torch.randn(32, 128) / 8)]
    x = torch.randn(256, 32)

    def step(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        y = x
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            y = y + F.gelu(F.layer_norm(y, (32,)) @ up.T) @ down.T
        loss = y.square().mean()
        return loss, *torch.autograd.grad(loss, weights)

    inputs = (x, *(nn.Parameter(w) for w in weights))
    gm = make_fx(step, tracing_mode="fake")(*inputs)
    loss, *_ = gm.graph.output_node().args[0]  # type: ignore[misc, union-attr]
    backward = False
    for node in gm.graph.nodes:
        node.meta["autograd_backward"] = backward
        backward |= node is loss
    return gm, tuple(t.detach() for t in inputs)


def test_what_is_tagged_is_made_again_within_the_memory(registry: dict[str, Callable[..., fx.GraphModule]]) -> None:
    register(0.6, "h100", "capuchin")
    gm, inputs = traced()
    expected, without = gm(*inputs), program_of(gm, H100)[0].peak_bytes
    config = SimpleNamespace(compile=SimpleNamespace(memory_policy="headroom"))
    planned = remat_using_tags_for_fwd_loss_bwd_graph(registry["headroom"](gm, config=config))
    predicted = program_of(planned, H100)[0].peak_bytes
    assert all(map(torch.equal, planned(*inputs), expected))
    assert predicted <= 0.6 * without
    assert allocated_peak(lambda: planned(*inputs)) == pytest.approx(predicted, rel=0.02)


def test_enough_memory_saves_all_and_too_little_is_refused() -> None:
    gm, _ = traced()
    assert tag(gm, 1.0, H100) is gm
    tagged = {node.meta["recompute"] for node in gm.graph.nodes if "recompute" in node.meta}
    assert tagged == {CheckpointPolicy.MUST_SAVE}
    with pytest.raises(FitError, match="no plan that only runs kernels again needs less than"):
        tag(gm, 0.1, H100)
