"""Networks that are really trained: built on a device, with content, ready to step; their steps timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import agents
from executor.capture.capture import Captured, capture
from executor.memory.pinned import CUDA, available
from experiments.workloads import llama, resnet, transformers, vgg
from simulator.machine import Machine
from simulator.program import Program

MIB = 2**20
TURNS = 4  # of two steps that are measured side by side, each
WARM = 1  # steps at the begin of a turn


@dataclass(frozen=True, eq=False)
class Network:
    """A model, what trains it, one batch, and the blocks that checkpointing would take as units."""

    name: str
    model: nn.Module
    loss_fn: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    blocks: tuple[nn.Module, ...]

    def captured(self, machine: Machine) -> Captured:
        """Its step as a program, with durations for a machine; raises CaptureError."""
        return capture(self.model, self.loss_fn, self.optimizer, self.batch, machine=machine, name=self.name)

    def step(self, forward: Callable[[Tensor], Any] | None = None) -> Tensor:
        """One eager training step; returns the loss. ``forward`` in the place of the model, if given."""
        x, y = self.batch
        loss: Tensor = self.loss_fn((forward or self.model)(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


Parts = tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]  # model, batch, loss


class Autocast(nn.Module):
    """A model under bfloat16 autocast."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out: Tensor = self.model(x)
        return out


def _images(model: nn.Module, batch: int, size: int = 32, classes: int = 10) -> Parts:
    return model, (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))), nn.CrossEntropyLoss()


def _channels_last(model: nn.Module, batch: int, size: int, classes: int, half: bool) -> Parts:
    """As images are trained on tensor cores; ``half``: under bfloat16 autocast, the loss in float32."""
    model, (x, y), loss = _images(model.to(memory_format=torch.channels_last), batch, size, classes)
    x = x.contiguous(memory_format=torch.channels_last)
    return (Autocast(model), (x, y), llama.Loss()) if half else (model, (x, y), loss)


def _text(model: nn.Module, batch: int, length: int, words: int, half: bool = False) -> Parts:
    """``half``: all in bfloat16, the loss in float32."""
    data = torch.randint(words, (batch, length)), torch.randint(words, (batch * length,))
    return (model.to(torch.bfloat16), data, llama.Loss()) if half else (model, data, nn.CrossEntropyLoss())


def _llama(layers: int, width: int, heads: int, hidden: int, words: int, length: int) -> nn.Module:
    """Llama's blocks, with PyTorch's own RMSNorm: what it compiles and fuses is then what it can."""
    model = llama.Llama(layers, width, heads, max(1, heads // 8), words, length, lambda: llama.SwiGLU(width, hidden))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, llama.RMSNorm):
                setattr(module, name, nn.RMSNorm(len(child.weight), child.epsilon, device=child.weight.device))
    return model


def _tiny_resnet() -> nn.Module:
    blocks = [resnet.Block(8, 8, 1, 2), resnet.Block(8, 8, 1, 2), resnet.Block(8, 16, 2, 2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16, 10))


def _resnet50() -> nn.Module:
    return resnet.ImageNetResNet((3, 4, 6, 3))


def _gpt2() -> nn.Module:
    return transformers.GPT2(*transformers.GPT2_SIZES["medium"])


# Name -> the batch that it is trained with, and the model, one batch of any size, and the loss. The Llama is twelve
# blocks of TinyLlama 1.1B.
NETWORKS: dict[str, tuple[int, Callable[[int], Parts]]] = {
    "vgg16": (100, lambda n: _images(vgg.VGG(16), n)),
    "resnet50": (100, lambda n: _images(resnet.ResNet(50), n)),
    "resnet50_imagenet": (64, lambda n: _channels_last(_resnet50(), n, 224, 1000, False)),
    "resnet50_imagenet_bf16": (64, lambda n: _channels_last(_resnet50(), n, 224, 1000, True)),
    "gpt2_medium": (8, lambda n: _text(_gpt2(), n, transformers.CONTEXT, transformers.VOCABULARY)),
    "gpt2_medium_bf16": (8, lambda n: _text(_gpt2(), n, transformers.CONTEXT, transformers.VOCABULARY, True)),
    "llama_bf16": (4, lambda n: _text(_llama(12, 2048, 32, 5632, 32000, 2048), n, 2048, 32000, True)),
    "tiny_resnet": (8, lambda n: _images(_tiny_resnet(), n, 16)),
    "tiny_resnet_bf16": (8, lambda n: _channels_last(_tiny_resnet(), n, 16, 10, True)),
    "tiny_gpt2": (4, lambda n: _text(transformers.GPT2(2, 32, 2, vocabulary=64, context=16), n, 16, 64)),
    "tiny_llama_bf16": (4, lambda n: _text(_llama(2, 32, 2, 64, 64, 16), n, 16, 64, True)),
}
BLOCKS = (resnet.Block, resnet.Bottleneck, transformers.Block, llama.Block)


def own_batch(name: str) -> int:
    """The batch that a network is trained with."""
    return NETWORKS[name][0]


def on_meta(name: str) -> Parts:
    """A network without content, for a batch of 1."""
    with torch.device("meta"):
        return NETWORKS[name][1](1)


def reads_numbers(name: str) -> bool:
    """Does its optimizer read numbers on the host, so that a graph needs another one?"""
    return on_meta(name)[1][0].dtype == torch.int64


def block_count(name: str) -> int:
    """Blocks that checkpointing would take as units."""
    return sum(isinstance(module, BLOCKS) for module in on_meta(name)[0].modules())


def build(name: str, device: str, seed: int = 0, batch: int | None = None, capturable: bool = False) -> Network:
    """A network with random content, in the memory of those before it; the same seed gives the same on one device.

    ``capturable``: an AdamW that reads no number on the host, as a graph needs it; SGD reads none.
    """
    give_back()
    torch.manual_seed(seed)
    own, make = NETWORKS[name]
    with torch.device(device):
        model, data, loss_fn = make(batch or own)
    text = data[0].dtype == torch.int64
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable)
        if text
        else torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    )
    blocks = tuple(m for m in model.modules() if isinstance(m, BLOCKS))
    return Network(name, model, loss_fn, optimizer, data, blocks)


def timed(step: Callable[[], Any], count: int, device: str) -> tuple[list[Any], list[int]]:
    """So many steps: what they return, and ns of each. On CUDA they follow each other without a wait in between, as in
    training, and events on the current stream tell when each was over."""
    results: list[Any] = []
    times: list[int] = []
    if device != "cuda":
        for _ in range(count):
            begin = time.perf_counter_ns()
            results.append(step())
            times.append(time.perf_counter_ns() - begin)
        return results, times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        results.append(step())
        mark.record()
    torch.cuda.synchronize()
    return results, [round(1e6 * a.elapsed_time(b)) for a, b in zip(marks, marks[1:], strict=False)]


def in_turns(
    step: Callable[[], Any], other: Callable[[], Any], count: int, device: str, held: int = 0,
    turn: Callable[[bool], object] = bool,
) -> tuple[list[Any], list[int], list[int], int]:  # fmt: skip
    """``timed`` of two steps that take turns, so that a GPU that slows down does so under both.

    Args:
        count: steps of each that are measured, at least 1, in up to TURNS turns.
        held: bytes of the device that are not ``step``'s.
        turn: called when one of the two is about to have its turn, before the WARM steps that are not measured; with
            whether it is ``step``.

    Returns:
        What the measured ``step`` returns; its times, and those of ``other``, in ns; the bytes that it has at its peak
        (CUDA; else 0).
    """
    results: list[Any] = []
    times: tuple[list[int], list[int]] = ([], [])
    turns, peak = min(TURNS, count), 0
    for i in range(turns):
        for mine, run in ((True, step), (False, other)):
            if device == "cuda":
                peak = peak if mine else max(peak, torch.cuda.max_memory_allocated() - held)
                give_back()
                torch.cuda.reset_peak_memory_stats()
            turn(mine)
            for _ in range(WARM):
                run()
            found, took = timed(run, count * (i + 1) // turns - count * i // turns, device)
            results += found if mine else []
            times[not mine].extend(took)
    return results, *times, peak


def limit_of(program: Program, fraction: float) -> int:
    """Persistent tensors, and a fraction of what the peak has above them, in bytes."""
    persistent = sum(t.nbytes for t in program.tensors if t.persistent)
    return persistent + round(fraction * (program.peak_bytes - persistent))


def give_back() -> None:
    """Memory of what is not used any more goes back to the device and to the host."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # of PyTorch 2.6 and later: pinned memory
            torch._C._host_emptyCache()


def cap_memory(nbytes: float | None, device: str) -> None:
    """A cap on the memory that PyTorch reserves, in bytes; None: none."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total))


def made(planner: str, program: Program, **wanted: Any) -> agents.Planner:
    """A planner with those of the options that it has, which moves what is worth moving."""
    options = {**wanted, "min_bytes": smallest_block(program)}
    return agents.make(planner, **{key: options[key] for key in options.keys() & agents.options(planner)})


def smallest_block(program: Program) -> int:
    """Bytes from which on a tensor is worth moving."""
    return max(1, min(MIB, program.peak_bytes // 500))


def host_bytes() -> int:
    """Memory of this computer that may be pinned: three quarters of what is left, with what is pinned and free."""
    CUDA.drop()
    return available()[0] * 3 // 4
