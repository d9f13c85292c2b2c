"""Tests a small figure=compiled with the same partitions; FX's interpreter replaces Inductor's code."""

from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from executor.compiled import Partitioner, backend
from experiments.common import cli
from experiments.figures import compiled
from tests.executor.compiled.test_compiled import graphs

TASK = {
    "network": "MLP",
    "workload": {},
    "limits": [0.8, 0.2],
    "budgets": [0.4],
    "solvers": [],
    "swaps": [0.7],
    "device": "cpu",
    "rounds": 2,
    "planner": "capuchin",
    "seconds": 1,
}


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    return compiled.WithLoss(nn.Sequential(*layers)), torch.randn(256, 64), torch.randint(0, 64, (256,))


@pytest.mark.parametrize(
    "config", OmegaConf.load(cli.CONFIGS / "figure" / "compiled.yaml").networks, ids=lambda config: str(config.name)
)
def test_the_networks_have_a_loss(config: DictConfig) -> None:
    task = compiled.Compiled().tasks(
        OmegaConf.merge(OmegaConf.load(cli.CONFIGS / "figure" / "compiled.yaml"), {"networks": [config]})
    )
    model, x, y = compiled.network({**task[0]["workload"], "batch_size": 1})
    assert model(x, y).shape == () and model(x, y).requires_grad


@pytest.mark.nightly
def test_every_method_has_its_peak_its_time_and_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(
        model: nn.Module, memory: int | float, planner: str = "capuchin", seconds: float = 1.0, mode: str = "recompute"
    ) -> Any:
        partitioner = Partitioner(memory, planner=planner, seconds=seconds, mode=mode)
        compiled_model = graphs(model, partitioner)
        backend._PARTITIONERS[compiled_model] = partitioner
        return compiled_model

    monkeypatch.setattr(compiled, "network", lambda workload: small())
    monkeypatch.setattr(compiled, "compile", run)
    monkeypatch.setattr(compiled, "_compile_plain", lambda model: run(model, 1.0))
    monkeypatch.setattr(compiled, "_compile_budgeted", lambda model, budget, solver: run(model, 0.9))
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
    names = ["none", "checkpoint", "dp 0.4", "at dp 0.4", "ours 0.8", "ours 0.2", "with swaps 0.7"]
    assert list(methods) == names and methods["with swaps 0.7"]["swaps"] > 0
    assert "every plan without swaps needs" in methods["ours 0.2"]["refused"]
    assert methods["ours 0.8"]["peak_bytes"] < methods["dp 0.4"]["peak_bytes"] < methods["none"]["peak_bytes"]
    numbers = compiled.Compiled().template_values([row])
    assert numbers["refused"] == 1 and numbers["points"] == 3 and numbers["pairs"] == 1 and numbers["swapped"] == 1
    heads, cells, _ = compiled.Compiled().format_text([row])
    assert len(heads) == len(cells[0]) and len(cells) == len(methods)
    assert compiled.Compiled().chart([row]).panels
