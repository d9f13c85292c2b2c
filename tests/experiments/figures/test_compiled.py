"""Tests a small figure=compiled with the same partitions; FX's interpreter replaces Inductor's code."""

from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from executor.compiled import Partitioner, backend
from executor.compiled.held import Held
from experiments.common import cli
from experiments.figures import compiled
from tests.executor.compiled.test_compiled import graphs

TASK = {
    "network": "MLP",
    "workload": {},
    "limits": [0.8, 0.2],
    "swaps": [0.9],
    "regional": [],
    "in_backward": [],
    "fit": [1.0],
    "budgets": [0.4],
    "solvers": [],
    "device": "cpu",
    "rounds": 2,
    "planner": "capuchin",
    "seconds": 1,
}


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(1024, 64), torch.randint(0, 64, (1024,))


@pytest.mark.parametrize(
    "config", OmegaConf.load(cli.CONFIGS / "figure" / "compiled.yaml").networks, ids=lambda config: str(config.name)
)
def test_the_networks_have_a_loss(config: DictConfig) -> None:
    task = compiled.Compiled().tasks(
        OmegaConf.merge(OmegaConf.load(cli.CONFIGS / "figure" / "compiled.yaml"), {"networks": [config]})
    )
    model, x, y = compiled.network({**task[0]["workload"], "batch_size": 1})
    loss = F.cross_entropy(model(x), y)
    assert loss.shape == () and loss.requires_grad


@pytest.mark.nightly
def test_every_method_has_its_peak_its_time_and_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module, loss_fn: Any, *, memory: Any, optimizer: Any, mode: str = "recompute", **_: Any) -> Any:
        partitioner = Partitioner(memory, planner="capuchin", seconds=1.0, mode=mode)
        partitioner.held = Held(model, optimizer)
        _, x, y = small()
        trained = sum(p.nbytes for p in model.parameters())
        partitioner.held.inputs = partitioner.held.inputs._replace(trained=trained, others=x.nbytes + y.nbytes)
        compiled_model = graphs(backend.WithLoss(model, loss_fn), partitioner)
        backend._PARTITIONERS[compiled_model] = partitioner
        return compiled_model

    def plain(model: nn.Module, optimizer: Any, memory: float = 1.0) -> Any:
        return run(model, F.cross_entropy, memory=memory, optimizer=None)

    monkeypatch.setattr(compiled, "network", lambda workload: small())
    monkeypatch.setattr(compiled, "compile", run)
    monkeypatch.setattr(compiled, "_compile_plain", plain)
    monkeypatch.setattr(compiled, "_compile_budgeted", lambda model, o, budget, solver: plain(model, o, 0.9))
    monkeypatch.setattr(compiled, "_checkpoint_blocks", lambda model: model)
    threads = torch.get_num_threads()
    limit = torch._dynamo.config.recompile_limit
    try:
        row = {**TASK, **compiled.measure_task(TASK)}
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.config.recompile_limit = limit
        torch._functorch.config.enable_autograd_cache = True
        torch._dynamo.reset()
    methods = row["methods"]
    names = ["none", "eager", "ours 0.8", "ours 0.2", "joint 0.9", "fit 1", "checkpoint", "dp 0.4", "at dp 0.4"]
    assert list(methods) == names and methods["joint 0.9"]["kind"] == "joint"
    assert "every plan without swaps needs" in methods["ours 0.2"]["refused"]
    assert methods["at dp 0.4"]["limit_bytes"] == methods["dp 0.4"]["peak_bytes"]
    numbers = compiled.Compiled().template_values([row])
    assert numbers["refused"] == 1 and numbers["points"] == 3 and numbers["pairs"] == 1 and numbers["fitted"] == 1
    assert methods["fit 1"]["bits"]
    heads, cells, _ = compiled.Compiled().format_text([row])
    assert len(heads) == len(cells[0]) and len(cells) == len(methods)
    assert compiled.Compiled().chart([row]).panels
