"""Tests of compiled, planned models in DistributedDataParallel (two processes) and Lightning's Trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from executor import compiled
from executor.compiled import Partitioner
from tests.executor.compiled.test_compiled import QUICK, blocks, graphs

STEPS = 2


def with_interpreter(net: nn.Module, memory: float) -> tuple[Any, Callable[[], Any]]:
    partitioner = Partitioner(memory, planner=QUICK)
    return graphs(net, partitioner), lambda: partitioner.graphs


def with_inductor(net: nn.Module, memory: float) -> tuple[Any, Callable[[], Any]]:
    if memory == 1.0:
        return torch.compile(net, dynamic=False), lambda: ()
    model = compiled.compile(net, memory=memory, planner=QUICK)
    return model, lambda: compiled.report(model).graphs


BACKENDS = [with_interpreter, pytest.param(with_inductor, marks=pytest.mark.nightly)]


def trained_in_ddp(make: Any, memory: float, rank: int) -> list[Tensor]:
    """Returns the losses of this rank's batches, followed by the parameters."""
    torch._dynamo.reset()
    net = blocks()
    model, found = make(net, memory)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(parallel(torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(2 * step + rank))))
        losses[-1].backward()
        optimizer.step()
    if memory < 1:
        (graph,) = found()
        assert graph.plan is not None and graph.plan.decisions
    return [t.detach() for t in (*losses, *net.parameters())]


def run_rank(rank: int, folder: str, make: Any) -> None:
    from torch._inductor import config  # takes long

    config.compile_threads = 1  # else a rank would wait for Inductor's worker processes at exit
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save([trained_in_ddp(make, memory, rank) for memory in (1.0, 0.8)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("make", [with_interpreter, with_inductor])
def test_two_ranks_of_ddp_train_as_without_a_plan(make: Any, tmp_path: Path) -> None:
    # Forking a process with Inductor's threads would deadlock.
    torch.multiprocessing.start_processes(run_rank, (str(tmp_path), make), nprocs=2, start_method="spawn")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for unplanned, planned in ranks:
        assert all(map(torch.equal, planned, unplanned))
    ours, theirs = (planned for _, planned in ranks)
    assert all(map(torch.equal, ours[STEPS:], theirs[STEPS:]))  # parameters
    assert not any(map(torch.equal, ours[:STEPS], theirs[:STEPS]))  # each rank has batches of its own


@pytest.mark.parametrize("make", BACKENDS)
def test_lightnings_trainer_trains_as_without_a_plan(make: Any, tmp_path: Path) -> None:
    import lightning.pytorch as lightning  # takes long

    class Module(lightning.LightningModule):
        def __init__(self, memory: float) -> None:
            super().__init__()
            self.net, self.found = make(blocks(), memory)
            self.losses: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.net(batch)
            self.log("loss", loss)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    data = torch.randn(4 * STEPS, 64, 32, generator=torch.Generator().manual_seed(0))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trained = []
    for memory in (1.0, 0.8):
        torch._dynamo.reset()
        module = Module(memory)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, gradient_clip_val=1.0, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(module, DataLoader(data, batch_size=4))
        assert len(module.losses) == trainer.global_step == STEPS
        trained.append([*module.losses, *(p.detach() for p in module.parameters())])
    (graph,) = module.found()
    assert graph.plan is not None and graph.plan.decisions
    unplanned, planned = trained
    assert len(unplanned) > STEPS and all(map(torch.equal, planned, unplanned))
