"""Tests of compiled, planned models in other training loops: Lightning, Hugging Face, Accelerate, DDP and FSDP2."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from executor import compiled
from executor.compiled import Partitioner
from tests.executor.compiled.test_compiled import QUICK, blocks, graphs

STEPS = 2
EXACT: dict[str, Any] = {"planner": "annealing", "seconds": None}


def with_interpreter(net: nn.Module, memory: float) -> tuple[Any, Callable[[], Any]]:
    partitioner = Partitioner(memory, planner=QUICK)
    return graphs(net, partitioner), lambda: partitioner.graphs


def with_inductor(net: nn.Module, memory: float) -> tuple[Any, Callable[[], Any]]:
    if memory == 1.0:
        return torch.compile(net, dynamic=False), lambda: ()
    model = compiled.compile(net, memory=memory, planner=QUICK)
    return model, lambda: compiled.report(model).graphs


BACKENDS = [with_interpreter, pytest.param(with_inductor, marks=pytest.mark.nightly)]


def train(model: Any, net: nn.Module, rank: int) -> list[Tensor]:
    """Returns the losses of this rank's batches, with a step of SGD on the parameters of ``net`` after each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(model(torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(2 * step + rank))))
        losses[-1].backward()
        optimizer.step()
    return losses


def trained_in_ddp(make: Any, memory: float, rank: int) -> list[Tensor]:
    """Returns the losses of this rank's batches, followed by the parameters."""
    torch._dynamo.reset()
    net = blocks()
    model, found = make(net, memory)
    parallel = DistributedDataParallel(model)
    losses = train(parallel, net, rank)
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


def trained_in_fsdp(order: str, memory: float, rank: int) -> list[Tensor]:
    """Returns the losses of this rank's batches, followed by the whole parameters."""
    from torch.distributed.fsdp import fully_shard

    def shard() -> None:
        for part in net.parts:
            fully_shard(part, mesh=dist.init_device_mesh("cpu", (2,)))

    torch._dynamo.reset()
    net = blocks()
    model = net
    if order == "shard first":
        shard()
        model = torch.compile(net, dynamic=False) if memory == 1.0 else compiled.compile(net, memory=memory, **EXACT)
    else:
        if memory < 1:
            model = compiled.compile(net, memory=memory, regional=True, **EXACT)
        for part in net.parts if memory == 1.0 else ():
            part.compile(dynamic=False)
        shard()
    losses = train(model, net, rank)
    if memory < 1:
        assert any(graph.plan is not None and graph.plan.decisions for graph in compiled.report(model).graphs)
    return [t.detach() for t in (*losses, *(p.full_tensor() for p in net.parameters()))]


def run_fsdp_rank(rank: int, folder: str, order: str) -> None:
    from torch._inductor import config  # takes long

    config.compile_threads = 1
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save([trained_in_fsdp(order, memory, rank) for memory in (1.0, 0.85)], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["shard first", "compile blocks first"])
def test_two_ranks_of_fsdp_train_as_without_a_plan(order: str, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(run_fsdp_rank, (str(tmp_path), order), nprocs=2, start_method="spawn")
    for rank in range(2):
        unplanned, planned = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert len(planned) > STEPS and all(map(torch.equal, planned, unplanned))


def language_model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=40,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # otherwise a warning in the loss breaks the graph
    return model


def in_hugging_face(model: Any, data: Sequence[Any], compiles: bool, folder: Path) -> list[Tensor]:
    """Returns the losses of Hugging Face's Trainer, which compiles the model itself if ``compiles``."""
    arguments = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        torch_compile=compiles,
        remove_unused_columns=False,  # a compiled model's forward names no columns
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return [torch.tensor(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def in_accelerate(model: Any, data: Sequence[Any], compiles: bool, folder: Path) -> list[Tensor]:
    """Returns the losses of a loop with Accelerate, which compiles the model itself if ``compiles``."""
    accelerator = Accelerator(cpu=True, dynamo_backend="inductor" if compiles else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        losses.append(model(**batch).loss)
        accelerator.backward(losses[-1])
        optimizer.step()
    return [loss.detach() for loss in losses]


@pytest.mark.nightly
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("train", [in_hugging_face, in_accelerate])
def test_hugging_face_and_accelerate_train_as_without_a_plan(train: Any, compiles: bool, tmp_path: Path) -> None:
    words = torch.randint(64, (4 * STEPS, 40), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": text, "labels": text} for text in words]
    trained = []
    for memory in (1.0, 0.8):
        torch._dynamo.reset()
        AcceleratorState._reset_state(True)
        net = language_model()
        partitioner = Partitioner(memory, **EXACT) if memory < 1 else None
        if compiles:
            with torch._inductor.config.patch(custom_partitioner_fn=partitioner):
                losses = train(net, data, True, tmp_path)
            found = partitioner.graphs if partitioner else []
        else:
            model = compiled.compile(net, memory=memory, **EXACT) if memory < 1 else torch.compile(net, dynamic=False)
            losses = train(model, data, False, tmp_path)
            found = compiled.report(model).graphs if memory < 1 else []
        assert len(losses) == STEPS
        trained.append([*losses, *(p.detach() for p in net.parameters())])
    AcceleratorState._reset_state(True)
    assert [g.plan is not None and g.peak_bytes <= g.limit for g in found] == [True]
    unplanned, planned = trained
    assert len(unplanned) > STEPS and all(map(torch.equal, planned, unplanned))


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
